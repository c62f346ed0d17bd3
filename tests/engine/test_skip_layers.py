"""Layers that keep another row format: exact, in every combination, and paid for."""

import numpy as np
import pytest
import torch

from pagefold.backends.registry import testable_backends as backends
from pagefold.bench.inspection import print_inspection
from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError
from pagefold.engine.build import build_layout
from pagefold.engine.parts import build_parts, doubtful_keys
from pagefold.evict.scorer import SCORERS
from pagefold.models.tiny import tiny_spec
from tests.engine.conftest import LAYOUT_SPECS
from tests.engine.test_matrix import PREFILL_FOLDS, logprobs_of_long_prompt
from tests.engine.tiny import assert_drained, greedy, prompt_of, run, tiny_engine
from tests.model_dir import write_model_dir

SNAPKV = {"kv_eviction": "snapkv", "kv_budget": 16}
COOLED = {"kv_cold_format": "int4", "kv_cold_after": 4}
LAYOUTS = [spec for spec in LAYOUT_SPECS if "heads_per_page=1" not in spec]  # 4 groups of the 2 heads of 2 layers


@pytest.mark.parametrize("skipped", ["0", "-1"])
@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("options", [{}, SNAPKV, SNAPKV | COOLED], ids=["full", "folded", "cooled"])
def test_skipping_into_the_same_format_changes_nothing(options, backend, skipped):
    both = {"kv_format": "fp64", "backend": backend} | options
    skip = {"kv_format_skip_layers": skipped, "kv_skip_format": "fp64"}
    if "kv_cold_format" in options:
        both |= {"kv_cold_format": "fp64"}
    want, got = (logprobs_of_long_prompt(40, **both, **more) for more in ({}, skip))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, SNAPKV, SNAPKV | COOLED], ids=["full", "folded", "cooled"])
def test_backends_agree_on_skipped_layers(options, layout, layout_of):
    skip = {"kv_format": "k=fp8,v=int4", "kv_format_skip_layers": "1", "kv_layout": layout_of(layout)}
    want, got = (logprobs_of_long_prompt(40, backend=name, **skip, **options) for name in backends())
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("scorer", SCORERS.names())
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_scorer_folds_skipped_layers(scorer, dtype):
    """In float32 the CPU's kernels, one for each of the formats, write and read the rows."""
    engine = tiny_engine(kv_eviction=scorer, kv_format="int4", kv_format_skip_layers="0", dtype=dtype, **PREFILL_FOLDS)
    output = run(engine, [prompt_of(22)], [greedy(26)])[0]
    assert output.kv.compactions > 1 and output.kv.rows_evicted > 0
    assert_drained(engine)


def test_skipped_layers_are_stored_more_exactly():
    """Predictions come nearer to those of exact rows with each layer that is skipped."""
    exact = logprobs_of_long_prompt(60, kv_format="fp64", kv_budget=300)
    skips = ({}, {"kv_format_skip_layers": "0"}, {"kv_format_skip_layers": "0,1"})
    off = [
        np.abs(logprobs_of_long_prompt(60, kv_format="k4v2", kv_budget=300, **skip) - exact).mean()
        for skip in skips[:2]
    ]
    assert off[0] > off[1] > 0
    with pytest.raises(InputError, match="kv_format_skip_layers: names every layer"):
        logprobs_of_long_prompt(60, kv_format="k4v2", **skips[2])


def test_swapped_requests_keep_their_skipped_rows():
    """Too few pages for both: one is swapped to the host and back, and nobody's tokens change."""
    options = {"kv_format": "int4", "kv_format_skip_layers": "0", "preemption": "swap", "enable_prefix_caching": False}
    prompts = [prompt_of(22, seed) for seed in range(2)]
    alone = [run(tiny_engine(**options), [prompt], [greedy(40)])[0].outputs[0].token_ids for prompt in prompts]
    engine = tiny_engine(num_pages=22, **options)
    outputs = run(engine, prompts, [greedy(40)] * 2)
    assert engine.scheduler.stats.swaps > 0
    assert [output.outputs[0].token_ids for output in outputs] == alone
    assert_drained(engine)


def test_cached_prefixes_hold_skipped_rows():
    engine = tiny_engine(kv_format="int4", kv_format_skip_layers="1")
    first, second = (run(engine, [prompt_of(40)], [greedy(10)])[0] for _ in range(2))
    assert second.num_cached_tokens >= 36
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_a_page_has_the_bytes_of_its_columns():
    """D = 16: int4 rows of K and V are 20 bytes, float64 ones 256; 2 heads a layer, 4 rows a page."""
    engine = tiny_engine(kv_format="int4", kv_format_skip_layers="1")
    assert engine.manager.geometry.bytes_per_page == (4 * 2 * (20 + 256),)
    main, apart = engine.runner.kv.parts
    held = sum(plane.nbytes for part in (main, apart) for plane in part.tiers[0].planes.values())
    assert held == engine.manager.geometry.num_pages[0] * 4 * 2 * (20 + 256)
    assert main.of(0) is main and main.of(1) is apart


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_format_skip_layers": "2"}, ["kv_format_skip_layers", "got '2'", "[-2, 2)"]),
        ({"kv_format_skip_layers": "first"}, ["kv_format_skip_layers", "got 'first'", "integers"]),
        ({"kv_format_skip_layers": ""}, ["kv_format_skip_layers", "got ''"]),
        ({"kv_skip_format": "fp8"}, ["kv_skip_format", "no kv_format_skip_layers"]),
        ({"kv_format_skip_layers": "0", "kv_skip_format": "fp7"}, ["kv_skip_format", "unknown format 'fp7'"]),
    ],
)
def test_wrong_layers_are_refused_by_name(options, words):
    with pytest.raises(InputError) as caught:
        tiny_engine(**options)
    assert all(word in str(caught.value) for word in words)


def test_a_layout_of_many_groups_says_how_many_layers_it_can_spare(layout_of):
    layout = layout_of("clustered:profile={profile},heads_per_page=1")
    with pytest.raises(InputError, match="kv_format_skip_layers: got 1 layers, must be a multiple of 2: .* 4 groups"):
        tiny_engine(kv_layout=layout, kv_format_skip_layers="0")


def test_inspect_and_the_start_tell_what_is_skipped(tmp_path, capsys, caplog):
    skip = {"kv_format": "int4", "kv_format_skip_layers": "-1"}
    with caplog.at_level("INFO", logger="pagefold"):
        tiny_engine(**skip)
    assert "int4, layers 1 in fp64" in caplog.text and "138 bytes a row and head" in caplog.text
    print_inspection(EngineConfig.from_options(model=str(write_model_dir(tmp_path)), dtype="float32", **skip))
    out = capsys.readouterr().out
    assert "int4, layers 1 in fp32" in out and "74 (K and V of one token for one head" in out


@pytest.mark.parametrize(
    "family, format, doubted",
    [("qwen2", "int4", True), ("qwen2", "k4v2", True), ("qwen2", "k=int8,v=int4", False), ("llama", "int4", False)],
)
def test_narrow_keys_of_a_model_with_key_biases_are_warned_of(family, format, doubted):
    spec = tiny_spec(family)
    config = EngineConfig.from_options(kv_format=format, kv_layout="uniform")
    _, parts = build_parts(config, spec, build_layout(config, spec), torch.float32)
    warning = doubtful_keys(spec, parts)
    assert (warning is not None) == doubted
    assert warning is None or ("k=int8,v=int4" in warning and format in warning)
