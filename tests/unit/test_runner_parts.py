"""Promises of the small parts around a step: uploads, captured sizes, what a device fills in, counts that grow."""

import gc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagefold.backends.reference import Reference
from pagefold.backends.triton.backend import TritonBackend
from pagefold.backends.upload import upload
from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError, SamplingParams
from pagefold.engine.build import check_window, choose_device, for_device
from pagefold.engine.policy import PolicyMaker, usual_folds
from pagefold.kv.layout import HeadLayout
from pagefold.runner.device_sampler import _Counts, _Kept
from pagefold.runner.fold_graphs import FoldGraphs
from pagefold.runner.graphs import LARGEST, graph_sizes, nothing_collected


@given(st.lists(st.lists(st.integers(-(2**62), 2**62), max_size=7), min_size=1, max_size=6))
def test_uploads_arrive_whole_and_aligned(lists):
    arrays = [np.array(numbers, np.int64) for numbers in lists]
    moved = upload(arrays, torch.device("cpu"))
    assert [tensor.tolist() for tensor in moved] == lists
    assert all((tensor.data_ptr() - moved[0].data_ptr()) % 16 == 0 for tensor in moved if tensor.numel())


def test_uploads_flatten_and_widen():
    (moved,) = upload([np.arange(6, dtype=np.int32).reshape(2, 3)], torch.device("cpu"))
    assert (moved.tolist(), moved.dtype) == ([0, 1, 2, 3, 4, 5], torch.int64)


@pytest.mark.parametrize("most", [*range(1, 20), 100, 255, 256, 257, 300, 512, 513, 4096])
def test_every_batch_has_a_captured_size_that_is_not_much_larger(most):
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(most, LARGEST)
    assert all(after - before <= 16 for before, after in zip(sizes, sizes[1:], strict=False))


@pytest.mark.parametrize("device, ahead, tokens", [("cpu", False, 2048), ("cuda", True, 8192)])
def test_what_depends_on_the_device_is_filled_in_unless_it_was_given(device, ahead, tokens):
    scheduler = for_device(EngineConfig(), torch.device(device)).scheduler
    assert (scheduler.plan_ahead, scheduler.tokens_per_step) == (ahead, tokens)
    given = EngineConfig.from_options(plan_ahead=not ahead, max_num_batched_tokens=100)
    scheduler = for_device(given, torch.device(device)).scheduler
    assert (scheduler.plan_ahead, scheduler.tokens_per_step) == (not ahead, 100)


@given(st.lists(st.lists(st.integers(0, 90), max_size=70), max_size=5))
def test_counts_of_a_growing_output_are_those_of_the_whole(parts):
    counts, output = _Counts(80), []
    for part in parts:
        output += part
        ids, times = counts.of(output)
        assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == Counter(id for id in output if id < 80)


def test_what_two_steps_did_not_ask_for_is_let_go():
    kept, owner, made = _Kept(), [1], []
    for expected in (1, 1):
        assert kept.of(owner, lambda: made.append(0) or len(made)) == expected
        kept.turn()
    kept.turn()
    assert kept.of(owner, lambda: made.append(0) or len(made)) == 2


@pytest.mark.parametrize("field", ["stop", "bad_words", "stop_token_ids", "logit_bias"])
def test_lists_that_every_step_looks_at_have_a_limit(field):
    entries = list(range(1025)) if field == "stop_token_ids" else [str(i) for i in range(1025)]
    with pytest.raises(InputError, match=f"{field}: got 1025 entries, at most 1024"):
        SamplingParams(**{field: dict.fromkeys(range(1025), 0.5) if field == "logit_bias" else entries})


def test_a_gpu_backend_without_a_gpu_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="backend: got 'triton', which needs a CUDA device"):
        choose_device("triton")
    assert choose_device("auto").type == "cpu"


@pytest.mark.parametrize(
    "options, period",
    [({}, 128), ({"page_size": 256}, 256), ({"kv_buffer": 64}, 64), ({"kv_prefill_buffer": 192}, 32)],
)
def test_a_gpu_folds_every_128_tokens_where_pages_and_prompts_allow_it(options, period):
    config = EngineConfig.from_options(**{"page_size": 32} | options)
    assert for_device(config, torch.device("cuda")).period == period
    assert for_device(config, torch.device("cpu")).period == config.period


def test_what_depends_on_the_period_is_checked_once_the_device_is_known():
    config = EngineConfig.from_options(page_size=32, kv_eviction="snapkv", kv_window=64)
    assert for_device(config, torch.device("cuda")).period == 128
    with pytest.raises(InputError, match=r"kv_window: 64 queries.* must be at most kv_buffer \(32\)"):
        for_device(config, torch.device("cpu"))


def test_a_window_of_more_queries_than_the_backend_takes_is_refused():
    check_window(4096, 4, Reference())
    pytest.importorskip("triton", reason="needs the package triton")
    check_window(64, 3, TritonBackend())
    with pytest.raises(InputError, match="kv_window: got 65, must be at most 64 with backend triton"):
        check_window(65, 3, TritonBackend())


def test_usual_folds_are_those_of_groups_that_can_be_so_long():
    config = EngineConfig.from_options(kv_eviction="snapkv", kv_budget=128, page_size=16, kv_buffer=32)
    layout = HeadLayout(np.arange(2, dtype=np.int32)[:, None], np.zeros((2, 1), np.int32), np.array([0.5, 1.5]))
    policy = PolicyMaker(config, layout).default
    jobs = usual_folds(policy, 16, 200)
    assert [(job.group, job.num_src_pages, job.keep_rows, len(job.dst_pages)) for job in jobs] == [(0, 6, 64, 4)]
    assert len(usual_folds(policy, 16, 224)) == 2 and not usual_folds(policy, 16, 95)
    assert all(job.slot == 0 and not job.dst_pages.any() for job in jobs)


class Replay:
    """Stands for a captured graph: does what was launched, with the table that it holds."""

    def __init__(self, launch, held):
        self.replay = lambda: launch(held)


def graphs_on_a_cpu(monkeypatch, capture) -> FoldGraphs:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(FoldGraphs, "_capture", capture)
    return FoldGraphs(torch.device("cpu"))


def test_batches_of_a_shape_are_captured_when_it_comes_again(monkeypatch):
    captured, launched = [], []

    def capture(self, held, launch):
        captured.append(held)
        return Replay(launch, held), held

    graphs = graphs_on_a_cpu(monkeypatch, capture)
    for number in range(4):
        graphs.run("one", torch.tensor([number]), lambda table: launched.append(int(table)))
    graphs.run("other", torch.tensor([9]), lambda table: launched.append(int(table)))
    assert launched == [0, 1, 2, 3, 9] and len(captured) == 1


def test_what_cannot_be_captured_is_launched_and_not_tried_again(monkeypatch, caplog):
    tried, launched = [], []

    def capture(self, held, launch):
        tried.append(held)
        raise RuntimeError("out of memory")

    graphs = graphs_on_a_cpu(monkeypatch, capture)
    for number in range(4):
        graphs.run("one", torch.tensor([number]), lambda table: launched.append(int(table)))
    assert launched == [0, 1, 2, 3] and len(tried) == 1 and "out of memory" in caplog.text


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_inside_a_capture_and_what_was_set_comes_back(enabled):
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ZeroDivisionError), nothing_collected():
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
