"""Profiles: what they hold is what the scorer said, and an engine serves with them."""

import argparse
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold import LLM
from pagefold.cli import main
from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError
from pagefold.engine.build import Loaded
from pagefold.eval.chains import chains_task
from pagefold.eval.cli import _programs
from pagefold.eval.profile import cut_samples, fold_scores, head_shares, measure_profile
from pagefold.kv.layouts.clustered import Clustered
from pagefold.kv.profile import load_profile, save_profile
from tests.engine.tiny import tiny_loaded

LENGTH, SINKS, WINDOW = 64, 2, 4
OPTIONS = {"model": "tiny", "page_size": 8, "kv_window": WINDOW, "kv_sink_tokens": SINKS}


@pytest.fixture(scope="module")
def tiny() -> Loaded:
    return tiny_loaded()


@pytest.fixture(scope="module")
def samples() -> list[list[int]]:
    return cut_samples(np.random.default_rng(0).integers(0, 256, 4 * (LENGTH + 1) + 9).tolist(), LENGTH)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.data())
def test_as_many_cells_are_kept_as_there_is_room_for(layers, heads, rows, data):
    """And none that is left out ranks above one that is kept, by whole layers or by all."""
    num_kept = data.draw(st.integers(1, rows))
    values = data.draw(st.lists(st.integers(-3, 3), min_size=layers * heads * rows, max_size=layers * heads * rows))
    scores = np.array(values, np.float32).reshape(layers, heads, rows)
    cross, layer = (head_shares(scores, num_kept, scope) for scope in ("cross", "layer"))
    assert cross.shape == layer.shape == (layers, heads)
    assert round(cross.sum() * rows) == num_kept * heads * layers
    np.testing.assert_allclose(layer.sum(1) * rows, num_kept * heads)
    for shares, parts in ((cross.reshape(1, -1), scores.reshape(1, -1, rows)), (layer, scores)):
        for share, part in zip(shares, parts, strict=True):
            counts = np.round(share * rows).astype(int)
            ranked = [np.sort(row)[::-1] for row in part]
            kept = [row[n - 1] for row, n in zip(ranked, counts, strict=True) if n]
            left = [row[n] for row, n in zip(ranked, counts, strict=True) if n < rows]
            assert not kept or not left or min(kept) >= max(left)


def test_scores_that_are_no_numbers_are_left_out_first():
    scores = np.array([[[np.nan, np.nan], [1.0, -5.0]]], np.float32)
    np.testing.assert_array_equal(head_shares(scores, 1), [[0, 1]])


def test_recorded_scores_are_the_scorer_s(tiny, samples):
    """Recency scores rows by their index, whatever the head; all columns are seen, whole or in tiles."""
    options = {**OPTIONS, "kv_eviction": "recency", "kv_budget": 16, "kv_prefill_buffer": LENGTH}
    scores = fold_scores(tiny, EngineConfig.from_options(**options), samples[0])
    np.testing.assert_array_equal(scores, np.broadcast_to(np.arange(LENGTH), (2, 2, LENGTH)))
    attention = fold_scores(tiny, EngineConfig.from_options(**options | {"kv_eviction": "snapkv:kernel=1"}), samples[0])
    assert (attention.sum(-1) >= 0.99).all()  # the max over query heads of distributions


@pytest.mark.parametrize("scope", ["cross", "layer"])
def test_a_profile_holds_the_shares_of_every_sample(tiny, samples, scope):
    profile = measure_profile(tiny, OPTIONS, samples, "snapkv", budget=24, scope=scope, use_tqdm=False)
    assert profile.samples is not None and profile.samples.shape == (4, 2, 2)
    evictable = LENGTH - SINKS - WINDOW
    kept = (24 - SINKS - WINDOW) / evictable
    np.testing.assert_allclose(profile.samples.mean((1, 2)), kept)
    if scope == "layer":
        np.testing.assert_allclose(profile.samples.mean(2), kept)
    assert profile.meta["tokens"] == [LENGTH, LENGTH] and profile.meta["samples"] == 4 and profile.meta["budget"] == 24
    by_ratio = measure_profile(tiny, OPTIONS, samples, "snapkv", ratio="3/8", scope=scope, use_tqdm=False)
    np.testing.assert_array_equal(by_ratio.samples, profile.samples)


def test_an_even_scorer_has_an_even_profile(tiny, samples):
    profile = measure_profile(tiny, OPTIONS, samples[:1], "recency", budget=35, scope="layer", use_tqdm=False)
    assert np.ptp(profile.mean) <= 0.5


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"budget": 6}, "budget"),
        ({"budget": LENGTH + 1}, "budget"),
        ({"budget": 24, "ratio": "1/2"}, "budget"),
        ({}, "budget"),
        ({"budget": 24, "scope": "global"}, "scope"),
        ({"budget": 24, "scorer": "nothing"}, "kv_eviction"),
    ],
)
def test_what_cannot_be_measured_is_refused(tiny, samples, wrong, field):
    with pytest.raises(InputError, match=field):
        measure_profile(tiny, OPTIONS, samples, **{"scorer": "snapkv", "use_tqdm": False} | wrong)


def test_a_sample_too_short_to_evict_from_is_refused(tiny):
    with pytest.raises(InputError, match="tokens: got 8, must be at least 16"):
        measure_profile(tiny, OPTIONS, [list(range(9))], "snapkv", budget=8, use_tqdm=False)


def test_a_layout_is_built_from_a_saved_profile(tiny, samples, tmp_path):
    path = tmp_path / "profile.npz"
    profile = measure_profile(tiny, OPTIONS, samples, "snapkv", budget=24, use_tqdm=False)
    save_profile(path, profile)
    np.testing.assert_allclose(load_profile(path).mean, profile.mean, rtol=1e-6)
    layout = Clustered(profile=str(path), heads_per_page=2).build(2, 2)
    assert layout.num_groups == 2 and layout.heads_per_page == 2


@pytest.mark.slow
@pytest.mark.smollm2
def test_the_built_in_model_serves_with_its_profile(tmp_path):
    from pagefold.core.types import SamplingParams
    from pagefold.engine.build import load_model
    from pagefold.eval.texts import load_text

    path = tmp_path / "profile.npz"
    loaded = load_model(EngineConfig.from_options(dtype="float32"))
    assert loaded.tokenizer is not None
    samples = cut_samples(loaded.tokenizer.encode(load_text())[: 2 * 257], 256)
    save_profile(path, measure_profile(loaded, {"model": "smollm2"}, samples, "snapkv", ratio="1/4", use_tqdm=False))
    layout = f"clustered:profile={path},heads_per_page=3"
    llm = LLM("smollm2", dtype="float32", kv_layout=layout, kv_eviction="snapkv", kv_budget=64)
    (output,) = llm.generate(load_text()[2000:2800], SamplingParams(max_tokens=64, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 64 and output.kv.compactions > 0


def test_a_model_without_text_is_profiled_on_programs(tmp_path, monkeypatch):
    """Samples are programs with their answers, and none that `eval chains` asks."""
    tiny = tiny_loaded()
    monkeypatch.setattr("pagefold.engine.build.load_model", lambda _: replace(tiny, tokenizer=None))
    words = ["profile", "tiny", "--page-size", "8", "--kv-window", "4", "--chains", "8", "--tokens", "64"]
    words += ["--samples", "3", "--ratio", "1/2", "--out", str(tmp_path / "p.npz")]
    assert main(words) == 0
    profile = load_profile(tmp_path / "p.npz")
    assert profile.meta["samples"] == 3 and profile.meta["tokens"] == [64, 64] and profile.mean.shape == (2, 2)
    asked = chains_task(50, 8).prompts
    args = argparse.Namespace(samples=3, chains=8, tokens=64)
    assert all(tuple(ids[: len(asked[0])]) not in asked for ids in _programs(args))
    assert main([*words[:-1], str(tmp_path / "q.npz"), "--tokens", "128"]) == 2
