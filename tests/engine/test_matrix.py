"""Every scorer, layout, format and backend, in one engine. A new plug-in is covered by being registered."""

from functools import cache

import numpy as np
import pytest

from pagefold.backends.registry import testable_backends as backends
from pagefold.core.types import Request
from pagefold.engine.engine import Engine
from pagefold.evict.scorer import SCORERS
from pagefold.kv.state import COLD, HOT
from pagefold.store.format import FORMATS
from tests.engine.conftest import LAYOUT_SPECS
from tests.engine.tiny import alone, assert_drained, greedy, prompt_of, run, tiny_engine

PROMPT, OUTPUT = prompt_of(22), 26
PREFILL_FOLDS = {"kv_prefill_buffer": 8, "kv_buffer": 8, "kv_budget": 8, "max_num_batched_tokens": 7}


@cache
def full_kv(prompt_len: int, max_tokens: int) -> list[int]:
    return alone(prompt_of(prompt_len), greedy(max_tokens)).outputs[0].token_ids


def logprobs_of_long_prompt(length: int = 60, **options) -> np.ndarray:
    """float64[length - 1]: log-probability of each token of a prompt that is folded while it is read."""
    engine = tiny_engine(**PREFILL_FOLDS | options)
    output = run(engine, [prompt_of(length)], [greedy(1, prompt_logprobs=0)])[0]
    assert_drained(engine)
    assert output.prompt_logprobs and output.prompt_logprobs[0] is None
    return np.array([entry.logprobs[0] for entry in output.prompt_logprobs[1:] if entry])


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("layout", LAYOUT_SPECS)
@pytest.mark.parametrize("scorer", SCORERS.names())
def test_case_c1_a_budget_beyond_the_length_gives_the_tokens_of_full_kv(scorer, layout, backend, layout_of):
    """The least budget of a head is what counts: a clustered head may get a fifth of the mean."""
    options = {"kv_layout": layout_of(layout), "backend": backend, "kv_budget": 300, "num_pages": 2000}
    output = alone(PROMPT, greedy(OUTPUT), kv_eviction=scorer, **options)
    assert output.outputs[0].token_ids == full_kv(len(PROMPT), OUTPUT)
    assert output.kv.rows_evicted == 0 and output.kv.compactions == 0


@pytest.mark.parametrize("layout", LAYOUT_SPECS)
@pytest.mark.parametrize("scorer", SCORERS.names())
def test_folded_tokens_do_not_depend_on_the_backend(scorer, layout, layout_of):
    """Rows are evicted while the prompt is read and while tokens are generated, from every head."""
    tokens = []
    for backend in backends():
        engine = tiny_engine(kv_eviction=scorer, kv_layout=layout_of(layout), backend=backend, **PREFILL_FOLDS)
        output = run(engine, [PROMPT], [greedy(OUTPUT)])[0]
        tokens.append(output.outputs[0].token_ids)
        assert output.kv.compactions > 1 and output.kv.rows_evicted > 0
        assert_drained(engine)
    assert all(other == tokens[0] for other in tokens) and tokens[0] != full_kv(len(PROMPT), OUTPUT)


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("format", [*FORMATS.names(), "k=fp8,v=int4", "k=int4,v=fp8"])
def test_folded_logits_of_every_format_do_not_depend_on_the_backend(format, dtype, chunk):
    """In float32 and token by token the CPU reads rows with its compiled kernel. Recency ranks rows by age: no rounding
    can change which are kept."""
    options = {"kv_eviction": "recency", "kv_format": format, "dtype": dtype, "max_num_batched_tokens": chunk}
    length = 40 if chunk == 1 else 60
    want, got = (logprobs_of_long_prompt(length, backend=name, **options) for name in ("reference", "cpu"))
    # what one float32 rounding of a key may move, at most one code of a row is encoded otherwise
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-9 if dtype == "float64" else 2e-2)


@pytest.mark.parametrize("cold", FORMATS.names())
@pytest.mark.parametrize("hot", FORMATS.names())
def test_every_pair_of_tiers_gives_the_logits_of_the_reference(hot, cold):
    """Rows are cooled, and evicted from both tiers, while the prompt is read."""
    options = {"kv_format": hot, "kv_cold_format": cold, "kv_cold_after": 4, "kv_eviction": "snapkv", "kv_budget": 16}
    want, got = (logprobs_of_long_prompt(40, backend=name, **options) for name in ("reference", "cpu"))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("layout", LAYOUT_SPECS)
@pytest.mark.parametrize("lag", [0, 1])
def test_cooling_into_the_same_format_changes_nothing(layout, lag, layout_of):
    """Every row is moved to the cold tier and none is lost: the tokens are those of full KV."""
    options = {"kv_cold_format": "fp64", "kv_cold_after": 6, "kv_lag": lag, "kv_layout": layout_of(layout)}
    engine = tiny_engine(num_pages=2000, **options)
    engine_output = run(engine, [PROMPT], [greedy(OUTPUT)])[0]
    assert engine_output.outputs[0].token_ids == full_kv(len(PROMPT), OUTPUT)
    assert_drained(engine)


@pytest.mark.parametrize("tiers", [1, 2])
@pytest.mark.parametrize("layout", LAYOUT_SPECS)
@pytest.mark.parametrize("scorer", SCORERS.names())
def test_rows_stay_within_budget_buffer_and_lag(scorer, layout, tiers, layout_of):
    """At every step after the first compaction, for every head, whatever the output's length."""
    cold = {"kv_cold_format": "int4", "kv_cold_after": 4} if tiers == 2 else {}
    engine = tiny_engine(kv_eviction=scorer, kv_layout=layout_of(layout), kv_lag=1, num_pages=2000, **cold)
    for seed, length in enumerate((3, 22)):
        watch_bounds(engine, prompt_of(length, seed), 60)


def watch_bounds(engine: Engine, prompt: list[int], max_tokens: int) -> None:
    engine.add(Request("watched", tuple(prompt), greedy(max_tokens)))
    seq = engine.scheduler.waiting[0]
    policy, seen_cold = seq.policy, 0
    while engine.has_work:
        (output,) = engine.step() or (None,)
        engine.manager.check()
        kv = seq.kv
        assert kv is not None
        if kv.evicted.any() and not seq.finished:
            assert (kv.rows <= policy.budget + policy.period + policy.lag).all()
            seen_cold += kv.held[COLD]
            assert kv.held[HOT] + kv.held[COLD] == kv.num_pages.sum()
    assert output and output.finished and len(output.outputs[0].token_ids) == max_tokens
    assert kv.evicted.any() and (seen_cold > 0) == (engine.manager.num_tiers == 2)
    assert_drained(engine)
