"""A format that is one file, made by following `docs/add-a-format.md` alone, works on every backend, under eviction, in
every layout, in both tiers, as one half of a pair and in skipped layers.

Triton's backend runs in its interpreter, which must be chosen before kernels are defined: a plain run starts this file
again in a process of its own.
"""

import numpy as np
import pytest

from pagefold.backends.registry import make_backend
from pagefold.store.format import FORMATS, parse_format
from tests.engine.conftest import LAYOUT_SPECS
from tests.engine.test_matrix import logprobs_of_long_prompt
from tests.interpreted import INTERPRETED, assert_passes_interpreted, plain

BACKENDS = ["triton"] if INTERPRETED else ["cpu"]
USES = {
    "alone": {"kv_format": "{0}"},
    "hot": {"kv_format": "{0}", "kv_cold_format": "int4", "kv_cold_after": 4},
    "cold": {"kv_format": "fp32", "kv_cold_format": "{0}", "kv_cold_after": 4},
    "keys": {"kv_format": "k={0},v=int4"},
    "values": {"kv_format": "k=int4,v={0}"},
    "skipped": {"kv_format": "k4v2", "kv_format_skip_layers": "0", "kv_skip_format": "{0}"},
}


@pytest.mark.slow
@plain
def test_in_the_interpreter():
    assert_passes_interpreted(__file__, "-x", "-k", "dropped")


def logprobs(backend: str, monkeypatch, use: str, name: str, layout: str, length: int, **options) -> np.ndarray:
    """Of a prompt that is folded while it is read, through an engine whose tensors are in host memory."""
    monkeypatch.setattr("pagefold.engine.build.build_backend", lambda *_: make_backend(backend))
    named = {key: value.format(name) if isinstance(value, str) else value for key, value in USES[use].items()}
    options = {"kv_eviction": "recency", "kv_budget": 16, "dtype": "float32", "kv_layout": layout} | options
    return logprobs_of_long_prompt(length, **named | options)


@pytest.mark.parametrize("use", ["cold", "values", "skipped"] if INTERPRETED else USES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dropped_format_gives_the_logits_of_the_reference(drop_in, monkeypatch, backend, use):
    name = drop_in("add-a-format.md", FORMATS)
    length = 20 if INTERPRETED else 40
    want, got = (logprobs(each, monkeypatch, use, name, "uniform", length) for each in ("reference", backend))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-2)
    assert np.abs(got - want).mean() < 1e-3


@pytest.mark.parametrize("layout", LAYOUT_SPECS[-2:-1] if INTERPRETED else LAYOUT_SPECS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dropped_format_is_evicted_in_every_layout(drop_in, monkeypatch, backend, layout, layout_of):
    name, how = drop_in("add-a-format.md", FORMATS), {"kv_eviction": "zipage", "kv_budget": 8}
    layout, length = layout_of(layout), 20 if INTERPRETED else 40
    want, got = (logprobs(each, monkeypatch, "alone", name, layout, length, **how) for each in ("reference", backend))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-2)


@pytest.mark.skipif(INTERPRETED, reason="needs no kernel")
def test_a_dropped_format_is_compiled_for_the_cpu(drop_in):
    """Or else the tests above would have compared torch with itself."""
    from pagefold.backends import cpu_append, cpu_decode
    from tests.backend.cases import Case, make_view

    view = make_view(Case(hot=drop_in("add-a-format.md", FORMATS)))
    assert cpu_append.source_of(view) and cpu_decode.source_of(view)


def test_a_dropped_format_without_kernels_lists_those_that_have_some():
    pytest.importorskip("triton", reason="needs the package triton")
    from pagefold.backends.triton.plan import device_codec

    with pytest.raises(ValueError, match="use one of bf16, fp16, fp32, fp8, int4, int8, k4v2$"):
        device_codec(parse_format("fp64").k)
