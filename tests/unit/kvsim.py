"""A worker made of Python integers: it executes step plans exactly as the real one does, on pages that hold hashes.

The row of a token is a hash of the token and of every row that it sees, in every group. So a token that is computed
against one wrong, missing, stale or foreign row gets another row, draws another next token, and the whole output
differs from that of `expected_output`, which knows nothing of pages, chunks or neighbours.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pagefold.core.types import Job, Move, SampleSpec, SamplingParams, StepPlan, StepResult, TokenLogprobs
from pagefold.kv.bounds import KVGeometry
from pagefold.kv.manager import KVManager
from pagefold.kv.state import COLD, FoldPolicy

VOCAB = 50
POISON, JUNK = -1, 77


def choose(rows: list[int], group: int, keep: int, sinks: int, protected_from: int) -> list[int]:
    """Indices of the rows that survive: sinks and recent ones, the rest ranked by a hash of their content."""
    safe = [i for i in range(len(rows)) if i < sinks or i >= protected_from]
    rest = sorted((i for i in range(len(rows)) if i not in set(safe)), key=lambda i: hash((rows[i], group)))
    return sorted(safe + rest[: keep - len(safe)])


def new_row(token: int, seen: list[list[int]]) -> int:
    return hash((token, tuple(tuple(rows) for rows in seen))) & 0x7FFFFFFF


def draw(row: int) -> int:
    return row % VOCAB


@dataclass
class Rows:
    """The rows of a sequence of `num_tokens` tokens, group by group, and the folds that are not visible yet."""

    kept: list[list[int]]
    num_tokens: int = 0
    pending: tuple[int, list[tuple[int, list[int], int]]] | None = None

    def copy(self) -> "Rows":
        return Rows([list(rows) for rows in self.kept], self.num_tokens, self.pending)

    def commit(self) -> None:
        """Before token number `num_tokens` is computed, folds that are due become visible."""
        if self.pending and self.num_tokens >= self.pending[0]:
            for g, kept, num_src in self.pending[1]:
                self.kept[g] = kept + self.kept[g][num_src:]
            self.pending = None

    def append(self, token: int) -> int:
        self.commit()
        row = new_row(token, self.kept)
        for rows in self.kept:
            rows.append(row)
        self.num_tokens += 1
        return row

    def fold(self, policy: FoldPolicy, size: int, prompt_len: int, last: int) -> None:
        """What is due at this token count."""
        count, in_prompt = self.num_tokens, self.num_tokens < prompt_len
        inside = policy.prefill_period and count <= prompt_len and count % policy.prefill_period == 0
        after = not in_prompt and count % policy.period == 0
        if not (inside or after) or count >= last:
            return
        folds = []
        for g, rows in enumerate(self.kept):
            full = len(rows) // size
            if policy.evicts and full * size > policy.budget[g]:
                src = rows[: full * size]
                keep = choose(src, g, int(policy.budget[g]), policy.sink_tokens, len(rows) - policy.window)
                folds.append((g, [src[i] for i in keep], full * size))
        if folds:
            self.pending = (count + (0 if in_prompt else policy.lag), folds)


def expected_output(
    prompt: list[int], policy: FoldPolicy, page_size: int, max_tokens: int, start: Rows | None = None
) -> list[int]:
    """What a request must produce, from its own history alone: its prompt, and the rows that it resumes from."""
    rows = start.copy() if start else Rows([[] for _ in policy.budget])
    tokens, last = list(prompt), len(prompt) + max_tokens - 1
    while rows.num_tokens < last:
        row = rows.append(tokens[rows.num_tokens])
        if rows.num_tokens >= len(prompt):
            tokens.append(draw(row))
        rows.fold(policy, page_size, len(prompt), last)
    return tokens[len(prompt) :]


def rows_at(tokens: list[int], count: int, policy: FoldPolicy, size: int, prompt_len: int, last: int, start) -> Rows:
    """The rows of a request when `count` of its tokens were stored and what was due had become visible."""
    rows = start.copy() if start else Rows([[] for _ in policy.budget])
    while rows.num_tokens < count:
        rows.append(tokens[rows.num_tokens])
        rows.fold(policy, size, prompt_len, last)
    rows.commit()
    return rows


class SimRunner:
    """Executes plans; checks that windows hold the right queries and that no page of another is touched.

    unsound   where this token would be drawn, the logits are not finite
    failing   steps whose jobs fail
    stride    tokens from one query of a window to the next
    """

    def __init__(
        self,
        geometry: KVGeometry,
        policies_by_scorer: dict[str, FoldPolicy],
        unsound: int | None = None,
        failing: frozenset[int] = frozenset(),
        stride: int = 1,
    ):
        self.geometry = geometry
        self.tiers = [np.full((n, geometry.page_size), POISON, np.int64) for n in geometry.num_pages]
        self.host = [np.full((n, geometry.page_size), POISON, np.int64) for n in geometry.num_host_pages]
        groups, slots = geometry.num_groups, geometry.max_seqs + 1
        self.table = np.zeros((slots, groups, 512), np.int32)
        self.evicted = np.zeros((slots, groups), np.int32)
        self.cold = np.zeros((slots, groups), np.int32)
        self.windows: dict[int, dict[int, int]] = {}
        self.policies = policies_by_scorer
        self.unsound = unsound
        self.failing, self.stride = failing, stride
        self.drawn: dict[int, int] = {}  # by slot, the token drawn last

    def _where(self, slot: int, group: int, i: int) -> tuple[np.ndarray, tuple[int, int]]:
        page, offset = divmod(i, self.geometry.page_size)
        tier = COLD if page < self.cold[slot, group] else 0
        return self.tiers[tier], (int(self.table[slot, group, page]), offset)

    def _rows(self, slot: int, group: int, count: int) -> list[int]:
        out = []
        for i in range(count):
            store, at = self._where(slot, group, i)
            out.append(int(store[at]))
        assert POISON not in out, "a row was read before it was written, or after its page was given back"
        return out

    @staticmethod
    def free_pages(manager: KVManager) -> list[np.ndarray]:
        """bool[pages] per tier: what nobody holds and the prefix cache does not remember."""
        return [(pool.refs == 0) & ~pool.cached for pool in manager.pools]

    def execute(self, plan: StepPlan, free: list[np.ndarray]) -> StepResult:
        """`free` are the pages that nobody may read in this step or later, as of when it was planned."""
        for edits in (plan.edits.pages[:, :3], plan.edits.lengths[:, :2]):
            assert len(np.unique(edits, axis=0)) == len(edits), "an entry is edited twice"
        slot, group, index, page = plan.edits.pages.T
        self.table[slot, group, index] = page
        slot, group, rows, pages = plan.edits.lengths.T
        self.evicted[slot, group], self.cold[slot, group] = rows, pages
        for op in plan.swaps:
            src = self.host if op.move is Move.IN else self.tiers
            dst = self.host if op.move is Move.OUT else self.tiers
            dst[op.tier][op.dst_pages] = src[op.tier][op.src_pages]
        for tier, pages in zip(self.tiers, free, strict=True):
            tier[pages] = POISON
        ids: list[int | None] = []
        start = 0
        samples = iter(plan.samples)
        for chunk in plan.chunks:
            tokens = plan.tokens[start : start + chunk.num_tokens]
            start += chunk.num_tokens
            row = 0
            for j, token in enumerate(tokens):
                n = chunk.start + j
                token = self.drawn[chunk.slot] if token < 0 else token
                seen = [
                    self._rows(chunk.slot, g, n - self.evicted[chunk.slot, g]) for g in range(self.geometry.num_groups)
                ]
                row = new_row(int(token), seen)
                for g in range(self.geometry.num_groups):
                    store, at = self._where(chunk.slot, g, n - self.evicted[chunk.slot, g])
                    assert at[0] != 0, "the garbage page must not be written for a live sequence"
                    store[at] = row
                if chunk.window_slot and n >= chunk.window_start:
                    window = self.windows.setdefault(chunk.window_slot, {})
                    if n == chunk.window_start:
                        window.clear()
                    index, between = divmod(n - chunk.window_start, self.stride)
                    if not between:
                        window[index] = row
            if chunk.num_logits:
                ids.append(self._draw(row, chunk.slot, next(samples), chunk.start + chunk.num_tokens))
        failed = {job.slot: "failed" for job in plan.jobs} if plan.step in self.failing else {}
        for job in plan.jobs:
            if failed:
                self.tiers[job.dst_tier][job.dst_pages] = JUNK
            else:
                self._fold(job, plan)
        ranked = lambda token: TokenLogprobs((token,), (0.0,), (1,))  # noqa: E731
        prompts = {i: [ranked(t) for t in targets] for i, (targets, _) in plan.prompt_targets.items()}
        return StepResult(plan.step, ids, [None] * len(ids), prompts, failed)

    def _draw(self, row: int, slot: int, spec: SampleSpec | None, position: int) -> int | None:
        if spec is None:
            return None
        assert spec.position == position
        self.drawn[slot] = draw(row)
        return None if draw(row) == self.unsound else draw(row)

    def _fold(self, job: Job, plan: StepPlan) -> None:
        size = self.geometry.page_size
        rows = self._rows(job.slot, job.group, job.num_rows)
        first = job.first_page * size
        src = rows[first : first + job.num_src_pages * size]
        keep = list(range(len(src)))
        if job.keep_rows < len(src):
            policy = plan.policies[job.policy]
            keep = choose(src, job.group, job.keep_rows, policy.sink_tokens, job.num_rows - policy.window)
            if self.policies[policy.scorer].needs_window:
                window = self.windows[job.window_slot]
                seen = rows[::-1][:: self.stride][: policy.window][::-1]
                assert [window[i] for i in range(policy.window)] == seen, "foreign or stale queries"
        dst = self.tiers[job.dst_tier]
        for i, k in enumerate(keep):
            dst[job.dst_pages[i // size], i % size] = src[k]


def fold_policy(
    page_size: int,
    budget_pages: list[int],
    scorer: str | None = "win",
    period_pages: int = 1,
    prefill_pages: int | None = None,
    window: int = 3,
    lag: int = 0,
    cold_after: int | None = None,
    under_pressure: bool = False,
    stride: int = 1,
) -> FoldPolicy:
    return FoldPolicy(
        scorer=scorer,
        needs_window=scorer == "win",
        budget=np.array(budget_pages, np.int32) * page_size * (scorer is not None),
        period=period_pages * page_size,
        prefill_period=prefill_pages and prefill_pages * page_size,
        window=window,
        sink_tokens=1,
        lag=lag,
        cold_after=cold_after,
        stride=stride,
        under_pressure=under_pressure,
        ask=f"{scorer} {budget_pages} {period_pages} {prefill_pages} {window} {lag} {cold_after} {under_pressure}",
    )


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)
