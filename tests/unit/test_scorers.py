"""Every scorer does what its formula says, and a job's scores are a function of that job alone."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from pagefold.core.types import InputError
from pagefold.evict.crowding import crowding_of_rows
from pagefold.evict.expectation import expected_logits, turned, turns
from pagefold.evict.scorer import SCORERS, ScoreContext
from pagefold.evict.scorers._common import softmax_rows
from pagefold.evict.select import select_rows

HEADS, QUERY_HEADS, DIM, WINDOW = 4, 2, 8, 4
INV_FREQ = 10000.0 ** -(torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
SCALE = DIM**-0.5
SPECS = SCORERS.names() + [
    "zipage:redundancy=full",
    "zipage:pool=always,block=8",
    "zipage:alpha=0,redundancy=none",
]


@dataclass
class Case:
    """One job: `num_src` source rows of `num_rows`; float[C, ...] tensors without padding."""

    num_src: int
    num_tokens: int
    first: bool
    queries: Tensor  # [C, w, R, D]
    keys: Tensor  # [C, num_rows, D]
    values: Tensor
    state: Tensor  # [C, num_rows, 1]

    @property
    def num_rows(self) -> int:
        return self.keys.shape[1]


def make_case(seed: int, num_src: int, open_rows: int = 0, num_tokens: int = 500, first: bool = False) -> Case:
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
    num_rows = num_src + open_rows
    centres = normal(HEADS, 5, DIM)  # few directions, so that some rows are similar
    keys = centres[:, torch.randint(5, (num_rows,), generator=draw)] + 0.4 * normal(HEADS, num_rows, DIM)
    state = torch.rand(HEADS, num_rows, 1, generator=draw, dtype=torch.float64) * 0.1
    queries, values = normal(HEADS, WINDOW, QUERY_HEADS, DIM), normal(HEADS, num_rows, DIM)
    return Case(num_src, num_tokens, first, queries, keys, values, state)


class DenseRows:
    """A RowSource over dense tensors. Padding is NaN, so that nothing that reads it goes unnoticed."""

    def __init__(self, cases: list[Case], dtype: torch.dtype):
        self.cases, self.dtype = cases, dtype

    def _pad(self, rows: list[Tensor]) -> Tensor:
        """float[C, >= num_src, ...] a job -> [J, C, N, ...]."""
        longest = max(case.num_src for case in self.cases)
        out = torch.full((len(rows), HEADS, longest, *rows[0].shape[2:]), torch.nan, dtype=self.dtype)
        for j, (row, case) in enumerate(zip(rows, self.cases, strict=True)):
            out[j, :, : case.num_src] = row[:, : case.num_src].to(self.dtype)
        return out

    def attention(self, across: str = "max") -> Tensor:
        scores = []
        for case in self.cases:
            logits = torch.einsum("cwrd,cnd->crwn", case.queries, case.keys) * SCALE
            future = torch.arange(case.num_rows) > torch.arange(case.num_rows - WINDOW, case.num_rows)[:, None]
            weights = logits.masked_fill(future, -torch.inf).softmax(-1)
            scores.append((weights.amax(1) if across == "max" else weights.mean(1)).mean(1))
        return self._pad(scores)

    def expected_logits(self, horizon: int) -> Tensor:
        queries = turned(self.queries(), turns(INV_FREQ, WINDOW, 1, horizon))
        return torch.stack([expected_logits(q, k, SCALE) for q, k in zip(queries, self.keys(), strict=True)])

    def queries(self) -> Tensor:
        return torch.stack([case.queries for case in self.cases]).to(self.dtype)

    def keys(self) -> Tensor:
        return self._pad([case.keys for case in self.cases])

    def values(self) -> Tensor:
        return self._pad([case.values for case in self.cases])

    def key_lengths(self) -> Tensor:
        return self.keys().norm(dim=-1)

    def value_lengths(self) -> Tensor:
        return self.values().norm(dim=-1)

    def crowding(self, threshold: float, block: int | None = None) -> Tensor:
        rows = [
            crowding_of_rows(case.keys[None, :, : case.num_src], torch.ones(1, 1, case.num_src) > 0, threshold, block)
            for case in self.cases
        ]
        return self._pad([row[0] for row in rows])

    def state(self, name: str) -> Tensor:
        return self._pad([case.state for case in self.cases])


def make_context(cases: list[Case], dtype: torch.dtype = torch.float64, layers=(0, 0, 0, 1)) -> ScoreContext:
    column = lambda field: torch.tensor([getattr(case, field) for case in cases])  # noqa: E731
    heads = torch.tensor([0, 1, 2, 0])
    return ScoreContext(
        rows=DenseRows(cases, dtype),
        num_src=column("num_src"),
        num_rows=column("num_rows"),
        num_dropped=column("num_src") // 2,
        num_tokens=column("num_tokens"),
        first=column("first"),
        layers=torch.tensor(layers).expand(len(cases), -1),
        heads=heads.expand(len(cases), -1),
        inv_freq=INV_FREQ,
        scale=SCALE,
        sink_tokens=2,
        window=WINDOW,
    )


def score(spec: str, cases: list[Case], dtype: torch.dtype = torch.float64, **options) -> Tensor:
    return SCORERS.build(spec).score(make_context(cases, dtype, **options))


def naive(spec: str, case: Case, of_row) -> None:
    """Compare a scorer with a loop over the columns: of_row(keys[N, D], queries[w, R, D], values[N, D]) -> float[N]."""
    got = score(spec, [case])[0]
    for c in range(HEADS):
        keys, values = case.keys[c, : case.num_src].numpy(), case.values[c, : case.num_src].numpy()
        np.testing.assert_allclose(got[c].numpy(), of_row(keys, case.queries[c].numpy(), values), rtol=1e-9, atol=1e-12)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spec", SPECS)
def test_a_job_scores_the_same_in_any_batch(spec, dtype):
    """Padding and neighbours change no score by more than rounding, and no selected row at all."""
    cases = [make_case(0, 24, 3), make_case(1, 64, first=True), make_case(2, 40, 1, num_tokens=90)]
    context = make_context(cases, dtype)
    together = SCORERS.build(spec).score(context)
    for j, case in enumerate(cases):
        own = make_context([case], dtype)
        alone = SCORERS.build(spec).score(own)[0]
        torch.testing.assert_close(together[j, :, : case.num_src], alone, rtol=1e-6, atol=1e-6)
        pick = lambda scores, case=case: select_rows(  # noqa: E731
            scores[None], torch.tensor([case.num_src]), torch.tensor([case.num_rows]), 16, 2, WINDOW
        )
        assert torch.equal(pick(together[j]), pick(alone))
        for name, state in own.new_state.items():
            assert state.dtype == torch.float32
            torch.testing.assert_close(context.new_state[name][j, :, : case.num_src], state[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_softmax_is_the_same_to_the_last_bit_whatever_it_is_padded_to(dtype):
    logits = torch.randn(2, 3, 1000, dtype=dtype) * 8
    valid = torch.ones(2, 1, 1000, dtype=torch.bool)
    alone = softmax_rows(logits, valid)
    torch.testing.assert_close(alone, logits.softmax(-1))
    for padding in (1, 24, 3000):
        pad = lambda x, value: torch.nn.functional.pad(x, (0, padding), value=value)  # noqa: B023, E731
        padded = softmax_rows(pad(logits, torch.nan), pad(valid, False))
        assert torch.equal(padded[..., :1000], alone) and not padded[..., 1000:].any()


@pytest.mark.parametrize("spec", SPECS)
def test_scores_are_finite_and_shaped_as_promised(spec):
    case = make_case(3, 32, 2, first=True)
    scores = score(spec, [case], torch.float32)
    assert scores.shape == (1, HEADS, 32)
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()


def test_recency_prefers_the_newest():
    assert score("recency", [make_case(0, 8)])[0].tolist() == [list(range(8))] * HEADS


def test_keynorm_prefers_short_keys():
    naive("keynorm", make_case(0, 16), lambda k, q, v: -np.sqrt((k * k).sum(1)))


def test_keydiff_prefers_keys_unlike_the_mean():
    def formula(k, q, v):
        unit = k / np.linalg.norm(k, axis=1, keepdims=True)
        anchor = unit.mean(0)
        return -(unit @ anchor) / np.linalg.norm(anchor)

    naive("keydiff", make_case(0, 16, 3), formula)


def test_snapkv_pools_the_window_attention():
    case = make_case(0, 24, 3)
    attention = DenseRows([case], torch.float64).attention()[0].numpy()
    for spec, reach in (("snapkv", 3), ("snapkv:kernel=1", 0), ("snapkv:kernel=3", 1)):
        pooled = [[row[max(0, i - reach) : i + reach + 1].max() for i in range(24)] for row in attention]
        np.testing.assert_array_equal(score(spec, [case])[0].numpy(), pooled)


def test_tova_averages_the_last_query_over_the_heads_of_a_layer():
    case = make_case(0, 16, 2)
    last = [
        np.mean([softmax(case.keys[c, :16].numpy() @ case.queries[c, -1, r].numpy() * SCALE) for r in range(2)], axis=0)
        for c in range(HEADS)
    ]
    got = score("tova", [case], layers=(0, 0, 0, 1))[0].numpy()
    np.testing.assert_allclose(got, [np.mean(last[:3], axis=0)] * 3 + [last[3]], rtol=1e-9)
    np.testing.assert_allclose(score("tova", [case], layers=(0, 1, 2, 3))[0].numpy(), last, rtol=1e-9)


def rotation(position: float) -> np.ndarray:
    """RoPE at a position as a D x D matrix: pairs (i, i + D / 2)."""
    out, half = np.zeros((DIM, DIM)), DIM // 2
    for i, frequency in enumerate(INV_FREQ.tolist()):
        c, s = math.cos(position * frequency), math.sin(position * frequency)
        out[i, i] = out[i + half, i + half] = c
        out[i, i + half], out[i + half, i] = -s, s
    return out


@pytest.mark.parametrize(("spec", "horizon", "eps"), [("expected", 512, 0.01), ("expected:horizon=3,eps=0.5", 3, 0.5)])
def test_expected_attention_follows_the_mean_and_covariance_of_queries(spec, horizon, eps):
    case = make_case(0, 16, 3, num_tokens=300)

    def formula(k, q, v):
        ahead = np.mean([rotation(300 + i) for i in range(horizon)], axis=0)
        probability = 0
        for r in range(QUERY_HEADS):
            plain = np.stack([rotation(300 - WINDOW + u).T @ q[u, r] for u in range(WINDOW)])
            mean, covariance = plain.mean(0), np.cov(plain.T, bias=True)
            turned = k @ ahead  # rows are R^T k
            logits = turned @ mean * SCALE + np.einsum("nd,de,ne->n", turned, covariance, turned) * SCALE**2 / 2
            probability = probability + softmax(logits) / QUERY_HEADS
        return (probability + eps) * np.linalg.norm(v, axis=1)

    naive(spec, case, formula)


@pytest.mark.parametrize("horizon, stride", [(5, 1), (5, 4), (512, 1)])
def test_turns_are_the_mean_rotation_of_positions_to_come(horizon, stride):
    """Before RoPE and after: what RoPE turned a query by is undone, and each position of the horizon turns it anew."""
    last = 300
    factors = turns(INV_FREQ, WINDOW, stride, horizon)
    query = make_case(0, 4).queries[0]  # [w, R, D]
    for u in range(WINDOW):
        undone = rotation(last - (WINDOW - 1 - u) * stride).T
        ahead = np.mean([rotation(last + h) for h in range(1, horizon + 1)], axis=0)
        np.testing.assert_allclose(turned(query, factors)[u].numpy(), query[u].numpy() @ (ahead @ undone).T, atol=1e-12)


def test_channels_that_rope_does_not_turn_are_not_turned():
    assert torch.equal(turns(torch.zeros(3), WINDOW, 2, 100), torch.ones(WINDOW, 3, dtype=torch.complex128))


def test_random_scores_are_uniform_and_differ_by_every_part_of_their_key():
    case = make_case(0, 4096)
    scores = score("random", [case])[0]
    assert 0 <= scores.min() and scores.max() < 1
    histogram = torch.histc(scores, 8, 0, 1) / scores.numel()
    assert (histogram - 1 / 8).abs().max() < 0.01
    assert (
        torch.corrcoef(scores).fill_diagonal_(0).abs().max() < 0.05
    )  # heads, and a layer with a head of the same index
    assert torch.corrcoef(torch.stack([scores[0, 1:], scores[0, :-1]]))[0, 1].abs() < 0.05  # neighbours
    later = score("random", [make_case(0, 4096, num_tokens=501)])[0]
    seeded = score("random:seed=1", [case])[0]
    for other in (later, seeded):
        assert abs(float(torch.corrcoef(torch.stack([scores[0], other[0]]))[0, 1])) < 0.05
    assert torch.equal(score("random:seed=0", [case])[0], scores)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("snapkv:kernel=4", "kernel: got 4, must be an odd integer"),
        ("zipage:kernel=0", "kernel: got 0, must be an odd integer"),
        ("zipage:pool=twice", "pool: got 'twice', must be one of none, once, always"),
        ("zipage:redundancy=flash", "redundancy: got 'flash', must be one of none, lightning, full"),
        ("zipage:lam=1.5", r"lam: got 1.5, must be a number in \[0, 1\]"),
        ("zipage:tau=0", "tau: got 0.0, must be a number > 0"),
        ("zipage:alpha=-1", r"alpha: got -1.0, must be a number in \[0, 1\]"),
        ("zipage:threshold=-0.1", "threshold: got -0.1, must be a number >= 0"),
        ("zipage:block=0", "block: got 0, must be an integer >= 1"),
        ("zipage:eps=-1", "eps: got -1.0, must be a number >= 0"),
        ("expected:horizon=0", "horizon: got 0, must be an integer in \\[1, 65536\\]"),
        ("expected:eps=-1", "eps: got -1.0, must be a number >= 0"),
    ],
)
def test_bad_options_are_named(spec, message):
    with pytest.raises(InputError, match=message):
        SCORERS.build(spec)
