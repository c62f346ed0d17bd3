"""The sampler of the device draws what the sampler of the host draws, its kernels interpreted on the CPU.

The interpreter must be chosen before kernels are defined, so a plain run starts this file again in a process of its
own; `TRITON_INTERPRET=1 pytest tests/backend/test_device_sampler.py` runs the tests themselves.
"""

# ruff: noqa: E402 - what is imported depends on Triton being there

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton", reason="needs the package triton")

from pagefold.core.types import Samples, SampleSpec, SamplingParams, TokenLogprobs
from pagefold.runner import device_sampler
from pagefold.runner.device_sampler import DeviceSampler
from pagefold.runner.sampler import Sampler, is_greedy
from tests.interpreted import assert_passes_interpreted, interpreted, plain

VOCAB = 300


@pytest.mark.slow
@plain
def test_in_the_interpreter():
    assert_passes_interpreted(__file__)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that a small vocabulary has several."""
    monkeypatch.setattr(device_sampler, "BLOCK", 128)


def spec(seed=0, prompt=(), output=(), stop_ids=(), bad_ids=(), **params) -> SampleSpec:
    return SampleSpec(
        params=SamplingParams(max_tokens=None, **params),
        seed=seed,
        position=len(prompt) + len(output),
        prompt=tuple(prompt),
        output=list(output),
        stop_ids=frozenset(stop_ids),
        bad_ids=tuple(bad_ids),
    )


def random_params(rng: random.Random, vocab: int) -> dict:
    """Cuts of all kinds, and often no edits."""
    params = {
        "temperature": rng.choice([0, 0.3, 0.7, 1.0, 1.0, 2.0]),
        "top_k": rng.choice([0, 0, 0, 1, 2, 5, 20, 50, vocab // 2, 2 * vocab]),
        "top_p": rng.choice([1.0, 1.0, 1.0, 0.1, 0.5, 0.9, 0.99]),
        "min_p": rng.choice([0.0, 0.0, 0.0, 0.02, 0.3, 1.0]),
    }
    ids = lambda most: [rng.randrange(vocab) for _ in range(rng.randint(1, most))]  # noqa: E731
    edits = {
        "allowed_token_ids": lambda: tuple(ids(40)),
        "logit_bias": lambda: {id: rng.choice([-100, -1.5, 0.25, 3]) for id in ids(10)},
        "repetition_penalty": lambda: rng.choice([0.7, 1.1, 2.0]),
        "frequency_penalty": lambda: rng.choice([-1.0, 0.3, 1.7]),
        "presence_penalty": lambda: rng.choice([-0.5, 0.7]),
        "min_tokens": lambda: rng.randint(1, 8),
    }
    if rng.random() < 0.4:
        params |= {name: make() for name, make in edits.items() if rng.random() < 0.4}
    return params


def random_spec(rng: random.Random, vocab: int) -> SampleSpec:
    params = random_params(rng, vocab)
    few = [rng.randrange(vocab) for _ in range(4)]  # so that ids repeat
    output = [rng.choice(few) for _ in range(rng.choice([0, 1, 2, 5, 9]))]
    bad = [tuple(rng.choice(few) for _ in range(rng.randint(1, 3))) for _ in range(4)]
    return spec(
        seed=rng.randrange(-(2**63), 2**63),
        prompt=[rng.randrange(vocab) for _ in range(rng.randint(1, 30))],
        output=output,
        stop_ids=few[:2] if "min_tokens" in params else (),
        bad_ids=bad if rng.random() < 0.15 else (),
        **params,
    )


def in_flight(specs: list[SampleSpec], rng: random.Random) -> tuple[list[SampleSpec], list[int]]:
    """The same specs, some of them without their newest token, and the token before the one drawn."""
    seen = [replace(s, output=s.output[:-1]) if s.output and rng.random() < 0.5 else s for s in specs]
    return seen, [(s.output or s.prompt or [0])[-1] for s in specs]


def random_logits(seed: int, rows: int, vocab: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Flat and peaked rows; bfloat16 makes many equals."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocab, generator=generator) * (torch.arange(rows) % 4 + 1)[:, None]
    x.masked_fill_(torch.rand(rows, vocab, generator=generator) < 0.05, -math.inf)
    return x.to(dtype)


def start(sampler: DeviceSampler, x: torch.Tensor, specs: list[SampleSpec], last: list[int] | None = None):
    return sampler.launch(x, Samples.of(specs), torch.tensor(last or [0] * len(specs), device=x.device))


def drawn(x: torch.Tensor, specs: list[SampleSpec], last: list[int] | None = None) -> list[int | None]:
    return start(DeviceSampler(x.shape[1], x.device), x, specs, last).result()[0]


def assert_same(ours, theirs, specs: list[SampleSpec]) -> int:
    """Of results: how many draws differ, which rounding may do to those that are a matter of chance."""
    differing = [row for row, (a, b) in enumerate(zip(ours[0], theirs[0], strict=True)) if a != b]
    for row in differing:
        assert not is_greedy(specs[row]) and None not in (ours[0][row], theirs[0][row]), specs[row]
    for row, (a, b) in enumerate(zip(ours[1], theirs[1], strict=True)):
        if row not in differing:
            assert_same_logprobs(a, b)
    return len(differing)


def assert_same_logprobs(a: TokenLogprobs | None, b: TokenLogprobs | None) -> None:
    assert (a is None) == (b is None)
    if a and b:
        assert (a.ids, a.ranks) == (b.ids, b.ranks)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5, nan_ok=True)


def assert_drawn_from(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square; 5 standard deviations is far beyond chance."""
    assert counts[probabilities == 0].sum() == 0
    expected = (probabilities * counts.sum())[probabilities > 0]
    dof = len(expected) - 1
    chi_square = ((counts[probabilities > 0] - expected) ** 2 / expected).sum()
    assert chi_square < dof + 5 * math.sqrt(2 * dof) + 5


# the same ids as the host's sampler


@interpreted
def test_random_specs_draw_what_the_host_draws():
    """Cuts and edits mixed freely in batches, tokens in flight, equals, rows without a distribution."""
    rng, num, differing, batches = random.Random(0), 60, 0, 4
    for seed in range(batches):
        x = random_logits(seed, num, VOCAB + 4)  # with padding
        x[seed, seed], x[seed + 1, 7], x[seed + 2] = math.nan, math.inf, -math.inf
        whole = [random_spec(rng, VOCAB) for _ in range(num)]
        specs, last = in_flight(whole, rng)
        before = x.clone()
        ours = start(DeviceSampler(VOCAB, "cpu"), x, specs, last).result()
        assert torch.equal(x.nan_to_num(), before.nan_to_num())
        differing += assert_same(ours, Sampler(VOCAB).sample(x, whole), whole)
    assert differing <= 1


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_plain_rows_draw_what_the_host_draws(dtype):
    num = 120
    x = random_logits(1, num, VOCAB, dtype)
    specs = [spec(seed=i * 7919, temperature=(0, 0.4, 1.0, 8.0)[i % 4]) for i in range(num)]
    assert (
        assert_same(start(DeviceSampler(VOCAB, "cpu"), x, specs).result(), Sampler(VOCAB).sample(x, specs), specs) <= 1
    )


@interpreted
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    levels=st.sampled_from([1, 2, 5, 10**6]),  # few levels: many equals
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    data=st.data(),
)
def test_cuts_among_equals_leave_what_the_host_leaves(seed, levels, dtype, data):
    cut = st.fixed_dictionaries(
        {
            "top_k": st.sampled_from([0, 1, 2, 3, 5, 17, VOCAB - 1, VOCAB, 10**6]),
            "top_p": st.sampled_from([1e-4, 0.3, 0.9, 0.999, 1.0]),
            "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
            "temperature": st.sampled_from([0.002, 0.5, 1.0, 10.0]),
        }
    )
    params = data.draw(st.lists(cut, min_size=4, max_size=4))
    x = torch.rand(4, VOCAB, generator=torch.Generator().manual_seed(seed % 2**32))
    x = ((x * levels).floor() / levels * 6 - 3).to(dtype)
    specs = [spec(seed + i if i < 0 else seed, prompt=(1,) * i, **p) for i, p in enumerate(params)]
    assert drawn(x, specs) == Sampler(VOCAB).sample(x, specs)[0]


@interpreted
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32), num=st.integers(2, 6), data=st.data())
def test_a_draw_is_the_same_alone_and_in_any_batch(seed, num, data):
    rng = random.Random(seed)
    specs = [random_spec(rng, VOCAB) for _ in range(num)]
    x = random_logits(seed, num, VOCAB)
    x[0, 3] = math.nan
    together = drawn(x, specs)
    assert together[0] is None
    order = data.draw(st.permutations(range(num)))
    assert drawn(x[order], [specs[i] for i in order]) == [together[i] for i in order]
    assert [drawn(x[i : i + 1], specs[i : i + 1])[0] for i in range(num)] == together


@interpreted
@pytest.mark.parametrize(
    "params", [{"temperature": 2.0}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.8}], ids=str
)
def test_draws_follow_the_distribution(params):
    num, x = 150, torch.tensor([1.0, 0.5, 2.0, -1.0, 0.0, 0.5, -3.0, 1.5], dtype=torch.float64)
    p = (x / params.get("temperature", 1)).softmax(-1)
    p = torch.where(p < params.get("min_p", 0) * p.max(), 0, p)
    order = p.sort(descending=True, stable=True).indices
    p[order[params.get("top_k", 8) :]] = 0
    p /= p.sum()
    p[order[1:][p[order].cumsum(0)[:-1] >= params.get("top_p", 1.1)]] = 0
    ids = drawn(x.float().expand(num, -1), [spec(seed=i, **params) for i in range(num)])
    assert_drawn_from(np.bincount(np.array(ids), minlength=8), (p / p.sum()).numpy())


# rows without a distribution, masks that give way


@interpreted
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_harms_only_itself(bad):
    x = random_logits(3, 3, VOCAB)
    expected = drawn(x, [spec(i) for i in range(3)])
    x[1, 200] = bad
    for params in ({}, {"temperature": 0}, {"top_p": 0.5}, {"logit_bias": {3: 1.0}}, {"allowed_token_ids": (1, 2)}):
        draw = start(DeviceSampler(VOCAB, "cpu"), x, [spec(0), spec(1, **params, logprobs=1), spec(2)])
        assert draw.ids.tolist() == [expected[0], -1, expected[2]]
        assert draw.result() == ([expected[0], None, expected[2]], [None] * 3)
    assert drawn(torch.full((1, VOCAB), -math.inf), [spec()]) == [None]


@interpreted
def test_masks_that_forbid_everything_give_way():
    every = [(i,) for i in range(VOCAB)]
    but = lambda *ids: [(i,) for i in range(VOCAB) if i not in ids]  # noqa: E731
    x = torch.arange(VOCAB, dtype=torch.float32).expand(6, -1).contiguous()
    x[5, 8] = -math.inf
    greedy = {"temperature": 0}
    specs = [
        spec(**greedy, allowed_token_ids=(5,), stop_ids={5}, min_tokens=3),
        spec(**greedy, stop_ids={5, 6}, min_tokens=3, bad_ids=but(5, 6)),
        spec(**greedy, allowed_token_ids=(4, 8), bad_ids=every),
        spec(bad_ids=every),
        spec(allowed_token_ids=(10**6,)),
        spec(allowed_token_ids=(8,)),
    ]
    whole = drawn(x, specs)
    assert whole[:3] == [5, 6, 8] and whole[3] in range(VOCAB) and whole[4:] == [None, None]


# a token that only the device knows


@interpreted
def test_edits_count_the_token_in_flight():
    """Output [3, 4], then 7 on the device only."""
    x = torch.zeros(9, VOCAB)
    x[:, 7], x[:, 9] = 2.0, 1.5
    x[5:7, 9] = 0.5
    late = {"prompt": [1, 2], "output": [3, 4, 7], "temperature": 0}
    bad, stops = {"bad_ids": [(4, 7, 9)]}, {"stop_ids": {7}}
    whole = [
        spec(**late),
        spec(**late, repetition_penalty=1.5),
        spec(**late, presence_penalty=0.6),
        spec(**late, frequency_penalty=0.6),
        spec(**late, logit_bias={9: 5}, **bad),
        spec(**late | {"output": [7, 4, 7]}, frequency_penalty=0.7),
        spec(**late | {"output": [7, 4, 7]}, presence_penalty=1.4),
        spec(**late, min_tokens=3, **stops),
        spec(**late, min_tokens=4, **stops),
    ]
    specs = [replace(s, output=s.output[:-1]) for s in whole]
    assert drawn(x, specs, [7] * 9) == [7, 9, 9, 9, 7, 7, 7, 7, 9]
    assert drawn(x, specs, [8] * 9) == [7, 7, 7, 7, 9, 7, 7, 7, 9]
    assert drawn(x, specs, [-1] * 9)[:5] == [7, 7, 7, 7, 9]
    assert drawn(x, whole, [0] * 9) == Sampler(VOCAB).sample(x, whole)[0]


# log-probabilities


@interpreted
def test_logprobs_are_those_of_the_host():
    x = random_logits(5, 4, VOCAB + 4)
    specs = [spec(i, logprobs=k, top_k=3, logit_bias={2: 5.0}) for i, k in enumerate([0, 5, None, 128])]
    ours = start(DeviceSampler(VOCAB, "cpu"), x, specs).result()
    assert assert_same(ours, Sampler(VOCAB).sample(x, specs), specs) == 0
    assert [entry and len(entry.ids) for entry in ours[1]] == [1, 6, None, 129]


@interpreted
def test_prompt_logprobs_are_those_of_the_host():
    x = random_logits(6, 70, VOCAB + 4)
    targets = [i % VOCAB for i in range(70)]
    ours = DeviceSampler(VOCAB, "cpu").prompt_logprobs(x, targets, 3).result()
    for a, b in zip(ours, Sampler(VOCAB).prompt_logprobs(x, targets, 3), strict=True):
        assert_same_logprobs(a, b)
    assert DeviceSampler(VOCAB, "cpu").prompt_logprobs(x[:0], [], 3).result() == []


@interpreted
def test_an_empty_batch_is_no_error_and_a_wrong_shape_is():
    sampler = DeviceSampler(VOCAB, "cpu")
    assert start(sampler, torch.zeros(0, VOCAB), []).result() == ([], [])
    with pytest.raises(ValueError, match=r"must be \[1, >= 300\]"):
        start(sampler, torch.zeros(2, VOCAB), [spec()])
