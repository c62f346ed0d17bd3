"""Options are checked once, where they are given, and every refusal names the field, the value and the limit."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.core.config import CacheConfig, EngineConfig, EvictionConfig, ModelConfig, SchedulerConfig
from pagefold.core.types import InputError


def refusal(**options) -> InputError:
    with pytest.raises(InputError) as caught:
        EngineConfig.from_options(**options)
    return caught.value


def test_defaults_are_valid_and_evict_nothing():
    config = EngineConfig.from_options()
    assert config == EngineConfig()
    assert config.eviction.kv_eviction == "none"


def test_flat_options_land_in_their_sections():
    config = EngineConfig.from_options(model="m", page_size=64, kv_budget=256, max_num_seqs=3)
    assert config.model == ModelConfig(model="m")
    assert config.cache == CacheConfig(page_size=64)
    assert config.eviction == EvictionConfig(kv_budget=256)
    assert config.scheduler == SchedulerConfig(max_num_seqs=3)


def test_every_leaf_has_one_flat_name_and_a_help_text():
    leaves = EngineConfig.leaves()
    names = [leaf.name for leaf in leaves]
    assert len(names) == len(set(names))
    assert set(names) == set(EngineConfig().options())
    assert all(leaf.metadata["help"] for leaf in leaves)


@given(
    page_size=st.sampled_from([1, 2, 16, 32, 128]),
    pages=st.none() | st.integers(1, 8),
    budget=st.integers(1, 10**6),
    max_num_seqs=st.integers(1, 4096),
    dtype=st.sampled_from(["auto", "float32", "bfloat16"]),
    prefix=st.booleans(),
)
def test_options_round_trip(page_size, pages, budget, max_num_seqs, dtype, prefix):
    config = EngineConfig.from_options(
        page_size=page_size,
        kv_buffer=pages and pages * page_size,
        kv_budget=budget,
        max_num_seqs=max_num_seqs,
        dtype=dtype,
        enable_prefix_caching=prefix,
    )
    assert EngineConfig.from_options(**config.options()) == config
    assert config.period == (pages or 1) * page_size


def test_an_unknown_option_lists_the_known_ones():
    error = refusal(kv_budgets=128)
    assert error.field == "kv_budgets"
    assert "unknown option" in str(error)
    for leaf in EngineConfig.leaves():
        assert leaf.name in str(error)


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"dtype": "int3"}, "dtype", ["'int3'", "float32", "bfloat16"]),
        ({"backend": "abacus"}, "backend", ["'abacus'", "cpu", "reference"]),
        ({"load_format": "csv"}, "load_format", ["'csv'", "dummy"]),
        ({"preemption": "none"}, "preemption", ["'none'", "recompute", "swap"]),
        ({"kv_window_lending": "never"}, "kv_window_lending", ["'never'", "just-in-time", "for-life"]),
        ({"kv_evict_when": "never"}, "kv_evict_when", ["'never'", "always", "pressure"]),
        ({"page_size": 48}, "page_size", ["48", "power of two"]),
        ({"page_size": 0}, "page_size", ["0", ">= 1"]),
        ({"page_size": -32}, "page_size", ["-32", ">= 1"]),
        ({"num_pages": 1}, "num_pages", ["1", ">= 2"]),
        ({"max_model_len": 0}, "max_model_len", ["0", ">= 1"]),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes", ["0", ">= 1"]),
        ({"kv_swap_bytes": -1}, "kv_swap_bytes", ["-1", ">= 0"]),
        ({"kv_budget": 0}, "kv_budget", ["0", ">= 1"]),
        ({"kv_budget": 1.5}, "kv_budget", ["1.5", "integer"]),
        ({"kv_budget": True}, "kv_budget", ["True", "integer"]),
        ({"kv_budget": "128"}, "kv_budget", ["'128'", "integer"]),
        ({"kv_window": 0}, "kv_window", ["0", ">= 1"]),
        ({"kv_sink_tokens": -1}, "kv_sink_tokens", ["-1", ">= 0"]),
        ({"max_num_seqs": 0}, "max_num_seqs", ["0", ">= 1"]),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens", ["0", ">= 1"]),
        ({"kv_window_slots": 0}, "kv_window_slots", ["0", ">= 1"]),
        ({"kv_cold_after": -1}, "kv_cold_after", ["-1", ">= 0"]),
        ({"kv_cold_share": 0.0}, "kv_cold_share", ["0.0", "between 0 and 1"]),
        ({"kv_cold_share": 1.0}, "kv_cold_share", ["1.0", "between 0 and 1"]),
        ({"kv_buffer": 48}, "kv_buffer", ["48", "multiple of page_size (32)"]),
        ({"kv_prefill_buffer": 33}, "kv_prefill_buffer", ["33", "multiple of page_size (32)"]),
        ({"page_size": 64, "kv_buffer": 32}, "kv_buffer", ["32", "multiple of page_size (64)"]),
        ({"kv_lag": 32, "kv_buffer": 32}, "kv_lag", ["32", "smaller than kv_buffer (32)"]),
        ({"kv_lag": 128}, "kv_lag", ["128", "smaller than kv_buffer (128)"]),
        ({"kv_eviction": "snapkv", "kv_window": 129}, "kv_window", ["129 queries", "at most kv_buffer (128)"]),
        (
            {"kv_eviction": "snapkv", "kv_buffer": 32, "kv_window": 9, "kv_window_stride": 4},
            "kv_window",
            ["9 queries, one every 4 tokens, span 33", "at most kv_buffer (32)"],
        ),
        ({"kv_window_stride": 0}, "kv_window_stride", ["0", ">= 1"]),
        ({"kv_lag": 64, "kv_buffer": 64}, "kv_lag", ["64", "smaller than kv_buffer (64)"]),
        ({"kv_lag": -1}, "kv_lag", ["-1", ">= 0"]),
    ],
)
def test_a_bad_value_is_refused_with_its_field_value_and_limit(options, field, words):
    error = refusal(**options)
    assert error.field == field
    assert str(error).startswith(f"{field}: ")
    for word in words:
        assert word in str(error)


def test_limits_themselves_are_accepted():
    EngineConfig.from_options(page_size=1, kv_buffer=1, kv_lag=0, num_pages=2, kv_budget=1, kv_window=1)
    EngineConfig.from_options(kv_lag=31, kv_sink_tokens=0, kv_cold_after=0, kv_swap_bytes=0)


def test_derived_sizes_follow_the_options():
    assert EngineConfig.from_options(page_size=16).period == 16
    assert EngineConfig.from_options(page_size=16, kv_buffer=64).period == 64
    assert EngineConfig.from_options(max_num_seqs=256).window_slots == 160  # 16 of every 32 tokens, and a quarter more
    assert EngineConfig.from_options(max_num_seqs=1).window_slots == 1
    assert EngineConfig.from_options(max_num_seqs=256, kv_buffer=256).window_slots == 20
    assert EngineConfig.from_options(max_num_seqs=256, kv_window_slots=7).window_slots == 7


def test_sections_are_checked_together_however_they_are_built():
    with pytest.raises(InputError, match="kv_buffer"):
        EngineConfig(cache=CacheConfig(page_size=64), eviction=EvictionConfig(kv_buffer=32))
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().cache.page_size = 3  # type: ignore[misc]
