"""The sampler of the device on a device: a large vocabulary, thousands of draws, and that it never waits."""

import random
import time

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from pagefold.backends.triton.sampling import draw
from pagefold.core.types import Samples
from pagefold.runner.device_sampler import BLOCK, DeviceSampler
from pagefold.runner.sampler import Sampler
from tests.backend.test_device_sampler import (
    assert_drawn_from,
    assert_same,
    in_flight,
    random_logits,
    random_spec,
    spec,
    start,
)

pytestmark = pytest.mark.gpu

VOCAB = 151_936


@pytest.fixture(scope="module")
def sampler() -> DeviceSampler:
    return DeviceSampler(VOCAB, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_draws_equal_the_host_samplers(sampler, dtype):
    rng, num, differing = random.Random(1), 256, 0
    truth = Sampler(VOCAB, "cuda")
    for seed in range(8):
        x = random_logits(seed, num, VOCAB + 64, dtype).cuda()
        whole = [random_spec(rng, VOCAB) for _ in range(num)]
        specs, last = in_flight(whole, rng)
        differing += assert_same(start(sampler, x, specs, last).result(), truth.sample(x, whole), whole)
    assert differing <= 0.001 * 8 * num


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.3},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 12, "top_p": 0.7, "min_p": 0.01},
        {"top_k": 9, "frequency_penalty": 0.5},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params):
    """Of a vocabulary of 40, which the host's distribution test has found to be right."""
    x = random_logits(0, 1, 40, torch.float32).expand(4000, -1).contiguous().cuda()
    specs = [spec(i, prompt=(1, 2), output=(3, 3), **params) for i in range(8000)]
    halves = specs[:4000], specs[4000:]
    ids = start(DeviceSampler(40, "cuda"), x, halves[0]).result()[0]
    others, _ = Sampler(40).sample(x.cpu(), halves[1])
    expected = np.bincount(np.array(others), minlength=40) / 4000
    counts = np.bincount(np.array(ids), minlength=40)
    common = expected >= 0.01
    assert counts[expected == 0].sum() <= 4
    assert_drawn_from(counts[common] / 2, expected[common] / expected[common].sum())  # both sides are noisy


def test_a_launch_does_not_wait(sampler):
    rng = random.Random(2)
    x = random_logits(3, 64, VOCAB).cuda()
    whole = [random_spec(rng, VOCAB) for _ in range(64)]
    specs, last = in_flight(whole, rng)
    expected = start(sampler, x, specs, last).result()
    token = torch.tensor(last, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = sampler.launch(x, Samples.of(specs), token)
        ranks = sampler.prompt_logprobs(x, last, 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert launched.result() == expected
    assert len(ranks.result()) == 64


def test_prompt_logprobs_equal_the_host_samplers(sampler):
    x = random_logits(4, 100, VOCAB).cuda()
    targets = list(range(5, 105))
    ours, theirs = (s.prompt_logprobs(x, targets, 20) for s in (sampler, Sampler(VOCAB, "cuda")))
    for a, b in zip(ours.result(), theirs, strict=True):
        assert (a.ids, a.ranks) == (b.ids, b.ranks)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


BATCHES = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "min_p": {"min_p": 0.05},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "top_k and top_p": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
}


@pytest.mark.parametrize("name", BATCHES)
def test_draws_of_256_rows_take_half_a_millisecond_at_most(name, sampler, capsys):
    """On the device, replayed as a graph; the host's time to launch them is only reported."""
    report = []
    for num in (1, 64, 256, 512):
        x = torch.randn(num, VOCAB, device="cuda", dtype=torch.bfloat16) * 3
        specs = [spec(i, prompt=(1, 2, 3), **BATCHES[name]) for i in range(num)]
        samples, last = Samples.of(specs), torch.zeros(num, dtype=torch.int64, device="cuda")
        sampler.launch(x, samples, last).result()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            launched = sampler.launch(x, samples, last)
        host = (time.perf_counter() - begin) / 5
        launched.result()
        device = device_seconds(sampler, x, specs)
        report.append(f"{num} rows {device * 1e6:.0f} us (host {host * 1e6:.0f} us)")
        assert num > 256 or device < 0.5e-3
    with capsys.disabled():
        print(f"\n{name}: " + ", ".join(report))


def device_seconds(sampler: DeviceSampler, x: torch.Tensor, specs: list) -> float:
    rules = torch.from_numpy(sampler._known.of(specs, sampler._habit)[0].copy()).cuda()
    run = lambda: draw(x, sampler._unedited, rules, sampler._salts, BLOCK)  # noqa: E731
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / 10
