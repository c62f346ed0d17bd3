"""Zipage against a slow float64 oracle over several compactions of a recorded (query, key) stream, and its unit facts.

The oracle is written from the formulas (Zipage, arXiv 2603.08743) with loops and numpy, and shares no code with the
scorer or the selection.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefold.evict.crowding import crowding, crowding_of_rows
from pagefold.evict.scorer import SCORERS, ScoreContext
from pagefold.evict.select import select_rows

HEADS, GROUP, DIM, WINDOW, SINKS, PAGE, BUDGET = 2, 3, 8, 4, 2, 8, 32
SCALE = DIM**-0.5
EVENTS = [58, 64, 72, 83, 88]  # token counts at which rows are dropped: a long prompt first, open pages at 58 and 83
OPTIONS = {
    "default": {"block": 16},
    "short last block": {"block": 20},
    "one block": {"block": 256},
    "full": {"redundancy": "full"},
    "full, low threshold": {"redundancy": "full", "threshold": 0.1},
    "no redundancy": {"redundancy": "none"},
    "no memory": {"block": 16, "alpha": 0.0},
    "long memory": {"redundancy": "none", "alpha": 1.0},
    "pooled once": {"block": 16, "pool": "once"},
    "always pooled": {"block": 16, "pool": "always", "kernel": 3},
    "nothing similar": {"block": 16, "threshold": 1.5},
    "attention first": {"block": 16, "lam": 0.9, "tau": 1.0},
    "nothing unseen": {"block": 16, "eps": 0.0},
    "the paper": {"block": 16, "values": False, "pool": "once"},
    "attention alone": {"redundancy": "none", "values": False},
}


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def window_attention(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """queries [w, G, D], keys [n, D] of all rows -> S [n]. Query u sees rows up to n - w + u."""
    n, total = len(keys), np.zeros(len(keys))
    for u in range(len(queries)):
        visible = n - len(queries) + u + 1
        best = np.zeros(n)
        for query in queries[u]:
            weights = np.zeros(n)
            weights[:visible] = softmax(np.array([query @ keys[j] / math.sqrt(DIM) for j in range(visible)]))
            assert weights.sum() == pytest.approx(1)
            best = np.maximum(best, weights)
        total += best
    return total / len(queries)


def crowd(keys: np.ndarray, threshold: float) -> np.ndarray:
    """rho of one block: keys [b, D] -> [b]."""
    b = len(keys)
    unit = [k / max(np.linalg.norm(k), 1e-6) for k in keys]
    cosines = [[0.0 if r == c else float(unit[r] @ unit[c]) for c in range(b)] for r in range(b)]
    for c in range(b):
        for r in reversed(range(b)):
            if cosines[r][c] > threshold:
                cosines[r][c] = 0.0
                break
    return np.array([sum(row) for row in cosines])


@dataclass
class OracleHead:
    """One head's rows: which tokens they are, their keys and values, and their F."""

    tokens: list[int] = field(default_factory=list)
    keys: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    def append(self, token: int, key: np.ndarray, value: np.ndarray) -> None:
        self.tokens.append(token)
        self.keys.append(key)
        self.values.append(value)
        self.memory.append(0.0)

    def fold(self, queries: np.ndarray, first: bool, o: dict) -> list[int]:
        """Score, select and compact. Returns the kept row indices."""
        n_src = len(self.tokens) // PAGE * PAGE
        keys = np.array(self.keys)
        s = window_attention(queries, keys)[:n_src]
        if not first:
            left = o["alpha"] ** ((n_src - BUDGET) / o["block"])
            s = np.array([max(s[j], left * self.memory[j]) for j in range(n_src)])
        memory = list(s)
        if o["pool"] == "always" or (o["pool"] == "once" and first):
            reach = o["kernel"] // 2
            s = np.array([max(s[max(0, j - reach) : j + reach + 1]) for j in range(n_src)])
        if o["values"]:
            lengths = [math.sqrt(sum(x * x for x in self.values[j])) for j in range(n_src)]
            s = np.array([(s[j] + o["eps"] / n_src) * lengths[j] / (sum(lengths) / n_src) for j in range(n_src)])
        z = s
        if o["redundancy"] == "full":
            z = o["lam"] * s - (1 - o["lam"]) * softmax(crowd(keys[:n_src], o["threshold"]) / (o["tau"] * n_src))
        elif o["redundancy"] == "lightning":
            b = o["block"]
            rho = np.concatenate([crowd(keys[i : min(i + b, n_src)], o["threshold"]) for i in range(0, n_src, b)])
            z = o["lam"] * s - (1 - o["lam"]) * softmax(rho / (o["tau"] * b))
        z = [math.inf if j < SINKS or j >= len(self.tokens) - WINDOW else z[j] for j in range(n_src)]
        keep = sorted(sorted(range(n_src), key=lambda j: (z[j], j))[-BUDGET:])
        rows = keep + list(range(n_src, len(self.tokens)))
        memory += self.memory[n_src:]
        self.tokens = [self.tokens[j] for j in rows]
        self.keys = [self.keys[j] for j in rows]
        self.values = [self.values[j] for j in rows]
        self.memory = [memory[j] for j in rows]
        return keep


@dataclass
class Rows:
    """A RowSource over one job: queries [C, w, G, D], keys and values [C, n, D] of all rows, memory [C, n]."""

    num_src: int
    window_queries: torch.Tensor
    all_keys: torch.Tensor
    all_values: torch.Tensor
    memory: torch.Tensor

    def attention(self, across: str = "max") -> torch.Tensor:
        logits = torch.einsum("cwgd,cnd->cgwn", self.window_queries, self.all_keys) * SCALE
        n = self.all_keys.shape[1]
        causal = torch.ones(WINDOW, n, dtype=torch.bool).tril(n - WINDOW)
        weights = logits.masked_fill(~causal, -torch.inf).softmax(-1)
        return (weights.amax(1) if across == "max" else weights.mean(1)).mean(1)[None, :, : self.num_src]

    def queries(self) -> torch.Tensor:
        return self.window_queries[None]

    def keys(self) -> torch.Tensor:
        return self.all_keys[None, :, : self.num_src]

    def values(self) -> torch.Tensor:
        return self.all_values[None, :, : self.num_src]

    def value_lengths(self) -> torch.Tensor:
        return self.values().norm(dim=-1)

    def crowding(self, threshold: float, block: int | None = None) -> torch.Tensor:
        return crowding_of_rows(self.keys(), torch.ones(1, 1, self.num_src, dtype=torch.bool), threshold, block)

    def state(self, name: str) -> torch.Tensor:
        assert name == "global_score"
        return self.memory[None, :, : self.num_src, None]


def context(rows: Rows, num_tokens: int, first: bool) -> ScoreContext:
    columns = torch.arange(len(rows.all_keys))[None]
    return ScoreContext(
        rows=rows,
        num_src=torch.tensor([rows.num_src]),
        num_rows=torch.tensor([rows.all_keys.shape[1]]),
        num_dropped=torch.tensor([rows.num_src - BUDGET]),
        num_tokens=torch.tensor([num_tokens]),
        first=torch.tensor([first]),
        layers=torch.zeros_like(columns),
        heads=columns,
        inv_freq=torch.ones(DIM // 2),
        scale=SCALE,
        sink_tokens=SINKS,
        window=WINDOW,
    )


def recorded_stream(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """queries [T, H, G, D], keys and values [T, H, D]; keys repeat a few directions, so that many are redundant."""
    draw = np.random.default_rng(seed)
    directions = draw.normal(size=(HEADS, 6, DIM))
    keys = directions[:, draw.integers(0, 6, EVENTS[-1])].swapaxes(0, 1) + 0.3 * draw.normal(
        size=(EVENTS[-1], HEADS, DIM)
    )
    queries, values = draw.normal(size=(EVENTS[-1], HEADS, GROUP, DIM)), draw.normal(size=keys.shape)
    return queries, keys, values * draw.uniform(0.1, 2, size=(EVENTS[-1], HEADS, 1))


def fold_scorer(options: dict, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(kept rows, tokens of the rows, F of the rows) after each compaction, by the scorer."""
    queries, keys, values = (torch.from_numpy(x) for x in recorded_stream(seed))
    scorer = SCORERS.get("zipage")(**options)
    tokens = torch.empty(HEADS, 0, dtype=torch.int64)
    memory = torch.empty(HEADS, 0)
    history = []
    start = 0
    for event in EVENTS:
        new = torch.arange(start, event).expand(HEADS, -1)
        tokens, memory = torch.cat([tokens, new], 1), torch.cat([memory, torch.zeros(new.shape)], 1)
        start = event
        num_rows = tokens.shape[1]
        num_src = num_rows // PAGE * PAGE
        all_keys, all_values = (torch.stack([x[tokens[c], c] for c in range(HEADS)]) for x in (keys, values))
        window = queries[event - WINDOW : event].permute(1, 0, 2, 3)
        ctx = context(Rows(num_src, window, all_keys, all_values, memory), event, first=not history)
        keep = select_rows(scorer.score(ctx), ctx.num_src, ctx.num_rows, BUDGET, SINKS, WINDOW)[0]
        if "global_score" in ctx.new_state:
            memory[:, :num_src] = ctx.new_state["global_score"][0, ..., 0]
        rows = torch.cat([keep, torch.arange(num_src, num_rows).expand(HEADS, -1)], 1)
        tokens, memory = tokens.gather(1, rows), memory.gather(1, rows)
        history.append((keep, tokens, memory))
    return history


@pytest.mark.parametrize("name", OPTIONS)
def test_every_compaction_keeps_what_the_oracle_keeps(name):
    options = OPTIONS[name]
    full = {**SCORERS.options("zipage"), **options}
    queries, keys, values = recorded_stream()
    heads = [OracleHead() for _ in range(HEADS)]
    start = 0
    for i, (keep, tokens, memory) in enumerate(fold_scorer(options)):
        event = EVENTS[i]
        for c, head in enumerate(heads):
            for token in range(start, event):
                head.append(token, keys[token, c], values[token, c])
            kept = head.fold(queries[event - WINDOW : event, c], first=i == 0, o=full)
            assert keep[c].tolist() == kept, f"head {c}, compaction {i}"
            assert tokens[c].tolist() == head.tokens
            if full["alpha"]:
                np.testing.assert_allclose(memory[c].numpy(), head.memory, rtol=1e-5)
        start = event


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "default"])
def test_the_stream_tells_the_options_apart(name):
    """Otherwise agreement with the oracle would say little about them."""
    tokens = lambda options: [t.tolist() for _, t, _ in fold_scorer(options)]  # noqa: E731
    assert tokens(OPTIONS[name]) != tokens(OPTIONS["default"])


@pytest.mark.parametrize("name", OPTIONS)
def test_sinks_window_and_counts_hold_at_every_compaction(name):
    for event, (keep, tokens, _) in zip(EVENTS, fold_scorer(OPTIONS[name]), strict=True):
        assert keep.shape == (HEADS, BUDGET)
        assert (keep.diff(dim=1) > 0).all()
        assert (tokens.diff(dim=1) > 0).all()
        assert tokens[:, :SINKS].tolist() == [list(range(SINKS))] * HEADS
        assert tokens[:, -WINDOW:].tolist() == [list(range(event - WINDOW, event))] * HEADS


def random_rows(seed: int, num_src: int, memory: float = 0.0) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
    queries, keys, values = normal(HEADS, WINDOW, GROUP, DIM), normal(HEADS, num_src, DIM), normal(HEADS, num_src, DIM)
    past = torch.rand(HEADS, num_src, generator=draw, dtype=torch.float64) * memory
    return Rows(num_src, queries, keys, values, past)


def redundancy_of(rows: Rows, **options) -> torch.Tensor:
    """R alone: with lam = 0, Z = -R."""
    scorer = SCORERS.get("zipage")(lam=0.0, **options)
    return -scorer.score(context(rows, rows.num_src, first=True))[0]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([8, 24, 40]))
def test_window_attention_is_a_share_for_each_query_head(seed, num_src):
    """With no open page, a head's scores sum to at least 1 (one query head) and at most the number of query heads."""
    total = random_rows(seed, num_src).attention().sum(-1)
    assert (total >= 1 - 1e-9).all() and (total <= GROUP + 1e-9).all()


def test_of_three_identical_keys_the_newest_is_not_redundant():
    keys = torch.ones(1, 3, DIM, dtype=torch.float64) / math.sqrt(DIM)
    torch.testing.assert_close(crowding(keys, 0.5, 1 << 17), torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(crowding(keys, 1.5, 1 << 17), torch.full((1, 3), 2.0, dtype=torch.float64))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 12), st.sampled_from([0.0, 0.3, 2.0]))
def test_tiles_never_change_redundancy(seed, num_blocks, block, threshold):
    keys = torch.nn.functional.normalize(
        random_rows(seed, num_blocks * block).all_keys[0].view(num_blocks, block, DIM), dim=-1
    )
    expected = np.stack([crowd(k.numpy(), threshold) for k in keys])
    for tile_elements in (1, 2 * block, block * block, 1 << 17):
        np.testing.assert_allclose(crowding(keys, threshold, tile_elements).numpy(), expected, atol=1e-12)


def test_lightning_equals_full_when_one_block_holds_all_rows():
    rows = random_rows(0, 24)
    torch.testing.assert_close(
        redundancy_of(rows, redundancy="lightning", block=24), redundancy_of(rows, redundancy="full")
    )


@pytest.mark.parametrize("redundancy", ["lightning", "full"])
def test_redundancy_is_a_share_among_real_rows(redundancy):
    torch.testing.assert_close(
        redundancy_of(random_rows(0, 24), redundancy=redundancy).sum(-1), torch.ones(HEADS).double()
    )


@pytest.mark.parametrize("first", [True, False])
def test_memory_only_ever_raises_a_score(first):
    rows = random_rows(0, 32, memory=0.3)
    plain = rows.attention()[0]
    run = lambda alpha: SCORERS.get("zipage")(alpha=alpha, redundancy="none", pool="none", values=False)  # noqa: E731
    ctx = context(rows, 32, first)
    remembered = run(0.8).score(ctx)[0]
    assert (remembered >= plain).all()
    assert (remembered > plain).any() != first  # the first compaction has no past to look at
    torch.testing.assert_close(ctx.new_state["global_score"][0, ..., 0], remembered.float())
    assert torch.equal(run(0.0).score(context(rows, 32, first))[0], plain)


def test_memory_is_stored_before_pooling():
    rows = random_rows(0, 32)
    ctx = context(rows, 32, first=True)
    pooled = SCORERS.get("zipage")(redundancy="none", pool="always", values=False).score(ctx)[0]
    torch.testing.assert_close(ctx.new_state["global_score"][0, ..., 0], rows.attention()[0].float())
    assert (pooled > rows.attention()[0]).any()


def test_of_rows_looked_at_alike_those_that_add_more_are_worth_more():
    rows = random_rows(0, 32)
    by_values = SCORERS.get("zipage")(redundancy="none", alpha=0.0, eps=3.0)
    score = by_values.score(context(rows, 32, first=True))[0]
    lengths = rows.value_lengths()[0]
    worth = (rows.attention()[0] + 3 / 32) * lengths / lengths.mean(-1, keepdim=True)
    torch.testing.assert_close(score, worth)
    rows.all_values = rows.all_values * 1000  # what counts is how rows compare
    torch.testing.assert_close(by_values.score(context(rows, 32, first=True))[0], score)
    rows.all_values = rows.all_values * 0
    assert (by_values.score(context(rows, 32, first=True))[0] == 0).all()


def test_ranking_ignores_a_constant():
    scores = torch.randn(1, HEADS, 64, dtype=torch.float64)
    counts = torch.tensor([64])
    keep = select_rows(scores, counts, counts, 32, SINKS, WINDOW)
    assert torch.equal(select_rows(scores + 3.0, counts, counts, 32, SINKS, WINDOW), keep)
