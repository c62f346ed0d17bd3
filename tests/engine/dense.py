"""The tiny model once more, slowly: plain tensors, one token at a time, an explicit list of the rows each head keeps.

It shares nothing with the engine but the weights and the scorers' formulas, which are given dense tensors here: no
pages, chunks, tables or backends. What it says is what a folded request must produce.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagefold.evict.crowding import crowding_of_rows
from pagefold.evict.expectation import expected_logits, turned, turns
from pagefold.evict.scorer import SCORERS, ScoreContext
from pagefold.models.rope import inv_freq
from pagefold.models.tiny import tiny_spec
from tests.engine.tiny import tiny_tensors

SPEC = tiny_spec(tie_word_embeddings=False)
WEIGHTS = dict(tiny_tensors(SPEC))
INV_FREQ = inv_freq(SPEC.rope, SPEC.head_dim, SPEC.max_position_embeddings).double()
SCALE = SPEC.head_dim**-0.5
PER_HEAD = SPEC.num_heads // SPEC.num_kv_heads
HEADS = [(layer, head) for layer in range(SPEC.num_layers) for head in range(SPEC.num_kv_heads)]


@dataclass
class Rows:
    """What one KV head keeps: [n, D] each, oldest first, and the scorer's memory by name, float32[n, width]."""

    k: Tensor = field(default_factory=lambda: torch.empty(0, SPEC.head_dim, dtype=torch.float64))
    v: Tensor = field(default_factory=lambda: torch.empty(0, SPEC.head_dim, dtype=torch.float64))
    state: dict[str, Tensor] = field(default_factory=dict)

    def append(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = torch.cat((self.k, k[None])), torch.cat((self.v, v[None]))
        self.state = {name: torch.cat((old, old.new_zeros(1, old.shape[1]))) for name, old in self.state.items()}

    def kept(self, index: list[int]) -> "Rows":
        return Rows(self.k[index], self.v[index], {name: old[index] for name, old in self.state.items()})


@dataclass
class Folding:
    """When and how rows are evicted: the engine's options, with the rows that each group of heads keeps."""

    scorer: str
    groups: list[list[tuple[int, int]]]
    budgets: list[int]
    page_size: int = 4
    period: int = 4
    prefill_period: int | None = None
    window: int = 3
    stride: int = 1
    sink_tokens: int = 1
    lag: int = 0

    def is_event(self, count: int, prompt_len: int) -> bool:
        inside = bool(self.prefill_period) and count <= prompt_len and count % (self.prefill_period or 1) == 0
        return inside or (count >= prompt_len and count % self.period == 0)


class DenseRows:
    """The `RowSource` of one group: a job whose columns are the group's heads."""

    def __init__(self, model: "Dense", group: list[tuple[int, int]]):
        self.model, self.group = model, group

    def keys(self) -> Tensor:
        return torch.stack([self.model.rows[cell].k for cell in self.group])[None]

    def values(self) -> Tensor:
        return torch.stack([self.model.rows[cell].v for cell in self.group])[None]

    def queries(self) -> Tensor:
        assert self.model.folding
        w = self.model.folding.window
        kept = [self.model.queries[cell][:: -self.model.folding.stride][:w][::-1] for cell in self.group]
        return torch.stack([torch.stack(queries) for queries in kept])[None]

    def attention(self, across: str = "max") -> Tensor:
        keys, queries = self.keys(), self.queries()
        assert self.model.folding
        rows, window, stride = keys.shape[2], queries.shape[2], self.model.folding.stride
        out = torch.zeros(1, len(self.group), rows, dtype=torch.float64)
        for c in range(len(self.group)):
            for u in range(window):
                seen = rows - (window - 1 - u) * stride
                weights = (queries[0, c, u] @ keys[0, c, :seen].T * SCALE).softmax(-1)
                out[0, c, :seen] += (weights.amax(0) if across == "max" else weights.mean(0)) / window
        return out

    def expected_logits(self, horizon: int) -> Tensor:
        assert self.model.folding
        factors = turns(INV_FREQ, self.model.folding.window, self.model.folding.stride, horizon)
        return expected_logits(turned(self.queries(), factors), self.keys(), SCALE)

    def key_lengths(self) -> Tensor:
        return self.keys().norm(dim=-1)

    def value_lengths(self) -> Tensor:
        return self.values().norm(dim=-1)

    def crowding(self, threshold: float, block: int | None = None) -> Tensor:
        keys = self.keys()
        return crowding_of_rows(keys, torch.ones(1, 1, keys.shape[2], dtype=torch.bool), threshold, block)

    def state(self, name: str) -> Tensor:
        width = SCORERS.get(self.model.folding.scorer.partition(":")[0]).state[name].width  # type: ignore
        rows = [self.model.rows[cell] for cell in self.group]
        return torch.stack([r.state.get(name, torch.zeros(len(r.k), width)) for r in rows])[None]


class Dense:
    """Feed tokens one by one; `step` returns the next token's logits, float64[vocab]."""

    def __init__(self, folding: Folding | None = None):
        self.folding = folding
        self.rows = {cell: Rows() for cell in HEADS}
        self.queries: dict[tuple[int, int], list[Tensor]] = defaultdict(list)  # [PER_HEAD, D] each
        self.count = 0
        self.num_folds = 0
        self._folded: set[int] = set()  # groups that evicted before
        self._pending: tuple[int, list[tuple[int, list[Rows], int]]] | None = None

    def step(self, token: int, prompt_len: int) -> Tensor:
        if self._pending and self.count >= self._pending[0]:
            self._commit()
        logits = self._forward(token)
        self.count += 1
        if self.folding and self.folding.is_event(self.count, prompt_len):
            self._launch(prompt_len)
        return logits

    def _forward(self, token: int) -> Tensor:
        x = WEIGHTS["model.embed_tokens.weight"][token]
        for layer in range(SPEC.num_layers):
            w = {name.split(".", 3)[3]: t for name, t in WEIGHTS.items() if name.startswith(f"model.layers.{layer}.")}
            h = _norm(x, w["input_layernorm.weight"])
            q, k, v = ((w[f"self_attn.{part}_proj.weight"] @ h).view(-1, SPEC.head_dim) for part in ("q", "k", "v"))
            q, k = _rope(q, self.count), _rope(k, self.count)
            out = []
            for head in range(SPEC.num_kv_heads):
                rows, mine = self.rows[layer, head], q[head * PER_HEAD : (head + 1) * PER_HEAD]
                rows.append(k[head], v[head])
                self.queries[layer, head].append(mine)
                out.append((mine @ rows.k.T * SCALE).softmax(-1) @ rows.v)
            x = x + w["self_attn.o_proj.weight"] @ torch.cat(out).flatten()
            h = _norm(x, w["post_attention_layernorm.weight"])
            gate = w["mlp.gate_proj.weight"] @ h
            x = x + w["mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * (w["mlp.up_proj.weight"] @ h))
        return WEIGHTS["lm_head.weight"] @ _norm(x, WEIGHTS["model.norm.weight"])

    def _launch(self, prompt_len: int) -> None:
        f, folds = self.folding, []
        assert f is not None
        for g, (group, budget) in enumerate(zip(f.groups, f.budgets, strict=True)):
            n = len(self.rows[group[0]].k)
            if n <= budget:
                continue
            folds.append((g, self._survivors(g, group, n, budget), n))
        if folds:
            self._pending = (self.count + (f.lag if self.count >= prompt_len else 0), folds)

    def _survivors(self, g: int, group: list[tuple[int, int]], n: int, budget: int) -> list[Rows]:
        f = self.folding
        assert f is not None
        one = lambda value: torch.tensor([value])  # noqa: E731
        layers, heads = torch.tensor(group).T[:, None]
        ctx = ScoreContext(
            rows=DenseRows(self, group),
            num_src=one(n),
            num_rows=one(n),
            num_dropped=one(n - budget),
            num_tokens=one(self.count),
            first=one(g not in self._folded),
            layers=layers,
            heads=heads,
            inv_freq=INV_FREQ.float(),
            scale=SCALE,
            sink_tokens=f.sink_tokens,
            window=f.window,
            window_stride=f.stride,
        )
        scores = SCORERS.build(f.scorer).score(ctx)[0]
        safe = {*range(f.sink_tokens), *range(n - f.window, n)}
        out = []
        for c, cell in enumerate(group):
            ranked = sorted(range(n), key=lambda i: (i in safe, float(scores[c, i]), i), reverse=True)
            kept = self.rows[cell].kept(sorted(ranked[:budget]))
            for name, new in ctx.new_state.items():
                kept.state[name] = new[0, c, sorted(ranked[:budget])]
            out.append(kept)
        return out

    def _commit(self) -> None:
        """The survivors take the place of the rows that they were chosen from; later rows follow."""
        assert self.folding and self._pending
        for g, survivors, n in self._pending[1]:
            self._folded.add(g)
            for cell, kept in zip(self.folding.groups[g], survivors, strict=True):
                tail = self.rows[cell].kept(list(range(n, len(self.rows[cell].k))))
                for name in kept.state:
                    tail.state.setdefault(name, torch.zeros(len(tail.k), kept.state[name].shape[1]))
                state = {name: torch.cat((kept.state[name], tail.state[name])) for name in kept.state}
                self.rows[cell] = Rows(torch.cat((kept.k, tail.k)), torch.cat((kept.v, tail.v)), state)
        self._pending = None
        self.num_folds += 1


def dense_logits(tokens: list[int], folding: Folding | None = None, prompt_len: int | None = None) -> Tensor:
    """float64[len(tokens), vocab]: what follows each token."""
    model, length = Dense(folding), len(tokens) if prompt_len is None else prompt_len
    return torch.stack([model.step(token, length) for token in tokens])


def dense_greedy(prompt: list[int], max_tokens: int, folding: Folding | None = None) -> tuple[list[int], Dense]:
    """The greedy continuation, and the model with what its heads kept."""
    model, tokens = Dense(folding), list(prompt)
    for i in range(len(prompt) + max_tokens - 1):
        logits = model.step(tokens[i], len(prompt))
        if i + 1 == len(tokens):
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :], model


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean() + SPEC.rms_norm_eps) * weight


def _rope(x: Tensor, position: int) -> Tensor:
    cos, sin = (position * INV_FREQ).cos(), (position * INV_FREQ).sin()
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
