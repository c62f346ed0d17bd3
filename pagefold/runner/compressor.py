"""Runs the jobs of a step: score, select, move. Which rows survive stays on the device; the host never asks."""

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagefold.backends.base import Backend, JobBatch, KVView
from pagefold.backends.upload import upload
from pagefold.core.types import Job, Move, ScorePolicy, SwapOp, TableEdits
from pagefold.evict.scorer import SCORERS, ScoreContext, Scorer
from pagefold.evict.select import check_keep
from pagefold.runner.fold_graphs import FoldGraphs

COLUMNS = 7  # integers of a job in a table, besides its destination pages
ROUNDED = 128  # captured batches have room for a multiple of so many rows
HEADS = 2304  # heads of all jobs of a captured batch, about: 8 jobs of 36 layers of 8
WORDS_PER_ROW = 10  # float32 that scoring and selecting hold for a row at most, besides one for each query head


class _Rows:
    """The `RowSource` of one slice of columns of one batch of jobs."""

    def __init__(self, backend: Backend, kv: KVView, jobs: JobBatch, columns: slice, scale: float):
        self._args = (kv, jobs, columns)
        self._backend = backend
        self._scale = scale

    def attention(self, across: str = "max") -> Tensor:
        return self._backend.window_scores(*self._args, self._scale, across)

    def expected_logits(self, horizon: int) -> Tensor:
        return self._backend.expected_logits(*self._args, self._scale, horizon)

    def queries(self) -> Tensor:
        kv, jobs, columns = self._args
        return kv.queries(jobs.groups, jobs.window_slots, columns)

    def keys(self) -> Tensor:
        return self._backend.read_rows(*self._args, "k")

    def values(self) -> Tensor:
        return self._backend.read_rows(*self._args, "v")

    def key_lengths(self) -> Tensor:
        return self._backend.read_lengths(*self._args, "k")

    def value_lengths(self) -> Tensor:
        return self._backend.read_lengths(*self._args, "v")

    def crowding(self, threshold: float, block: int | None = None) -> Tensor:
        return self._backend.crowding(*self._args, threshold, block)

    def state(self, name: str) -> Tensor:
        return self._backend.read_state(*self._args, name)


class _Running(NamedTuple):
    """Jobs of one step on the side stream: their slots, the pages that they write, and an event after the last."""

    slots: list[int]
    dst: np.ndarray
    done: torch.cuda.Event

    def meets(self, edits: TableEdits, swaps: list[SwapOp]) -> bool:
        """Whether a table is about to name what the jobs write, a swap to read it, or their slots to change hands."""
        pages = np.concatenate([edits.pages[:, 3], *(op.src_pages for op in swaps if op.move is not Move.IN)])
        return bool(np.isin(pages, self.dst).any() or np.isin(edits.lengths[:, 0], self.slots).any())


class _Batch(NamedTuple):
    """Jobs that run together. `table` lies on the host: COLUMNS lines of one integer a job, then pages job by job."""

    jobs: list[Job]
    table: np.ndarray
    num_jobs: int
    num_dst: int
    max_src: int
    max_rows: int

    @property
    def dst_tier(self) -> int:
        return self.jobs[0].dst_tier

    def shape(self) -> tuple[int, ...]:
        return self.num_jobs, self.num_dst, self.dst_tier, self.max_src, self.max_rows

    def on_device(self, table: Tensor, compared: bool) -> JobBatch:
        """Views of a table on the device."""
        lines = table[: -self.num_dst * _even(self.num_jobs)].view(COLUMNS, -1)[:, : self.num_jobs]
        dst = table[lines.stride(0) * COLUMNS :].view(-1, self.num_dst)[: self.num_jobs]
        slots, groups, first_page, num_src, num_rows, num_tokens, window_slots = lines
        return JobBatch(
            slots=slots,
            groups=groups,
            first_page=first_page,
            num_src=num_src,
            num_rows=num_rows,
            num_tokens=num_tokens,
            window_slots=window_slots,
            dst_pages=dst,
            dst_tier=self.dst_tier,
            max_src=self.max_src,
            max_rows=self.max_rows,
            compared=compared,
        )


def _even(n: int) -> int:
    return n + n % 2


class Compressor:
    """Executes compactions and coolings, a few launches per batch of jobs.

    scale       softmax scale of the model's attention
    tile_bytes  how much memory one pass over the columns may take; by default 64 MB, and 224 on a device, where eight
                requests are one pass
    pad         jobs of unequal lengths share a batch; by default on a device, where a launch costs more than rows do
    overlap     jobs run beside the steps that follow, on a stream of their own; see `before_edits`
    graphs      batches of a shape that comes again are captured, on a device
    """

    def __init__(
        self,
        backend: Backend,
        kv: KVView,
        scale: float,
        tile_bytes: int | None = None,
        pad: bool | None = None,
        overlap: bool = False,
        graphs: bool = False,
    ):
        self.backend = backend
        self.kv = kv
        self.scale = scale
        self._device = kv.page_table.device
        self.tile_bytes = tile_bytes or (224 << 20 if self._device.type == "cuda" else 64 << 20)
        self._pad = self._device.type == "cuda" if pad is None else pad
        self._stream = torch.cuda.Stream(self._device) if overlap and self._device.type == "cuda" else None
        self._graphs = FoldGraphs(self._device) if graphs and self._device.type == "cuda" else None
        self._scorers: dict[str, Scorer] = {}
        self._running: deque[_Running] = deque()
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # begun and done, on a device
        self._num_runs, self._seconds = 0, 0.0

    def run(self, jobs: list[Job], policies: list[ScorePolicy]) -> None:
        """All jobs of a step, after what was launched before. Raises InputError if a job cannot keep what it should,
        and whatever a scorer raises; destinations may hold anything then."""
        if not jobs:
            return
        if self._device.type != "cuda":
            start = time.perf_counter()
            self._run(jobs, policies)
            self._count(time.perf_counter() - start)
            return
        current = torch.cuda.current_stream(self._device)
        if self._stream is not None:
            self._stream.wait_stream(current)
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream or current):  # all that is made here comes from its own memory pool
            begun.record()
            try:
                self._run(jobs, policies)
            finally:  # if it failed, what was launched before still writes to the pages
                done.record()
                if self._stream is not None:
                    self._note(jobs, done)
        self.spent()
        self._timed.append((begun, done))

    @torch.inference_mode()
    def warm_up(self, jobs: list[Job], policy: ScorePolicy) -> None:
        """Compile, and capture, what one to eight requests with such jobs launch together, so that no request waits for
        it. The jobs are of slot 0 and keep nothing: their destination pages are 0."""
        with torch.cuda.stream(self._stream):  # none: the current one
            for requests in (1, 2, 4, 8):
                for _ in ("eager", "captured"):
                    self._run(jobs * requests, [policy])

    def spent(self) -> tuple[int, float]:
        """(steps whose jobs are done, seconds that these took): the device's own where there is one."""
        while self._timed and self._timed[0][1].query():
            begun, done = self._timed.popleft()
            self._count(begun.elapsed_time(done) / 1e3)
        return self._num_runs, self._seconds

    def _count(self, seconds: float) -> None:
        self._num_runs += 1
        self._seconds += seconds

    def _note(self, jobs: list[Job], done: torch.cuda.Event) -> None:
        dst = np.concatenate([job.dst_pages for job in jobs])
        self._running.append(_Running([job.slot for job in jobs], dst, done))

    def _wait(self, done: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(done)

    def before_edits(self, edits: TableEdits, swaps: list[SwapOp]) -> None:
        """Have the current stream wait for the jobs whose pages get an owner, by their commit or because their request
        was dropped and its pages go to others, and for those whose slot gets another sequence. That is enough: until
        its commit a sequence only appends behind what its jobs read; what a dropped request had may be overwritten,
        for nobody owns what its jobs write; a page that was committed and swapped out at once is in no table, but in
        the swap. Jobs finish in order, so one wait does. Pages of different tiers may have the same number: then a
        wait comes early."""
        while self._running and self._running[0].done.query():
            self._running.popleft()
        last = max((i for i, running in enumerate(self._running, 1) if running.meets(edits, swaps)), default=0)
        if last:
            self._wait([self._running.popleft() for _ in range(last)][-1].done)

    def _run(self, jobs: list[Job], policies: list[ScorePolicy]) -> None:
        size = self.kv.page_size
        groups: dict[tuple, list[Job]] = defaultdict(list)
        for job in jobs:
            num_src, policy = job.num_src_pages * size, policies[job.policy]
            all_kept = job.keep_rows == num_src
            if not all_kept:
                check_keep(job.keep_rows, num_src, job.num_rows, policy.sink_tokens, policy.window)
            # a batch is padded to its longest job, so at most to twice the length of another
            alike = (num_src.bit_length(),) if self._pad else (num_src, job.keep_rows)
            groups[job.policy, job.dst_tier, all_kept, *alike].append(job)
        parts = [(key, batch) for key, alike in groups.items() for batch in self._batches(alike)]
        tables = upload([batch.table for _, batch in parts], self._device)
        for ((policy, _, all_kept, *_), batch), table in zip(parts, tables, strict=True):
            self._run_table(batch, table, policies[policy], all_kept)

    def _run_table(self, batch: _Batch, table: Tensor, policy: ScorePolicy, all_kept: bool) -> None:
        def launch(table: Tensor) -> None:
            jobs = batch.on_device(table, not all_kept and getattr(self._scorer(policy), "compares_rows", False))
            for kv in self.kv.parts:
                self._run_batch(kv, jobs, policy, all_kept)

        if self._graphs is None or not (all_kept or getattr(self._scorer(policy), "never_waits", False)):
            launch(table)
        else:
            self._graphs.run((policy, all_kept, batch.shape()), table, launch)

    def _batches(self, jobs: list[Job]) -> Iterator[_Batch]:
        """Jobs alike as batches. Lines of a table start at multiples of 16 bytes, as kernels are compiled for.

        To be captured, a batch is padded to one of few shapes. What is there too much is a job of slot 0 that has no
        rows and keeps none."""
        size, most = self.kv.page_size, len(jobs)
        if self._graphs:
            most = max(8, HEADS // self.kv.members.shape[1])
        for some in (jobs[i : i + most] for i in range(0, len(jobs), most)):
            num_jobs, num_dst = len(some), max(len(job.dst_pages) for job in some)
            max_src, max_rows = max(job.num_src_pages for job in some) * size, max(job.num_rows for job in some)
            if self._graphs:
                num_jobs = 1 << (num_jobs - 1).bit_length()
                max_src, max_rows = (-(-rows // ROUNDED) * ROUNDED for rows in (max_src, max_rows))
            table = np.zeros(_even(num_jobs) * (COLUMNS + num_dst), np.int64)
            lines = table[: _even(num_jobs) * COLUMNS].reshape(COLUMNS, -1)
            dst = table[lines.size :].reshape(-1, num_dst)
            for i, job in enumerate(some):
                num_src = job.num_src_pages * size
                rows = job.num_rows, job.num_tokens, job.window_slot
                lines[:, i] = job.slot, job.group, job.first_page, num_src, *rows
                dst[i, : len(job.dst_pages)] = job.dst_pages
            yield _Batch(some, table, num_jobs, num_dst, max_src, max_rows)

    def _run_batch(self, kv: KVView, jobs: JobBatch, policy: ScorePolicy, all_kept: bool) -> None:
        """Score, select and move the rows of one part of the view."""
        num_jobs, columns, num_src = len(jobs.slots), kv.members.shape[1], jobs.max_src
        heads = kv.group_of.shape[1]
        per_head, head_dim = kv.window.shape[3] // heads, kv.tiers[0].head_dim
        per_row = 4 * (head_dim if self._decodes(policy, all_kept) else WORDS_PER_ROW + per_head)
        turned = 2 * kv.window.shape[2] * per_head * head_dim  # the window's queries, made ready for keys as stored
        per_tile = max(1, self.tile_bytes // (num_jobs * (num_src * per_row + turned)))
        # whole layers at a time where the layout has them side by side, so that a scorer may look across a layer
        tile = max(heads, per_tile // heads * heads) if columns % heads == 0 else min(per_tile, columns)
        for start in range(0, columns, tile):
            part = slice(start, min(start + tile, columns))
            if all_kept:
                rows = jobs.dst_pages.shape[1] * kv.page_size
                keep = torch.arange(rows, device=self._device).expand(num_jobs, part.stop - part.start, rows)
                self.backend.compact(kv, jobs, part, keep, {})
                continue
            ctx = self._context(kv, jobs, part, policy)
            scores = self.score(ctx, policy)
            keep = self.backend.select_rows(kv, jobs, scores, policy.sink_tokens, policy.window)
            self.backend.compact(kv, jobs, part, keep, ctx.new_state)

    def _scorer(self, policy: ScorePolicy) -> Scorer:
        """Built once: it holds no state, and reading a spec takes longer than launching a fold."""
        if policy.scorer not in self._scorers:
            self._scorers[policy.scorer] = SCORERS.build(policy.scorer)
        return self._scorers[policy.scorer]

    def _decodes(self, policy: ScorePolicy, all_kept: bool) -> bool:
        """Whether rows are decoded into memory, as on a CPU they always are."""
        if self._device.type == "cpu":
            return True
        return not all_kept and getattr(self._scorer(policy), "reads_rows", True)

    def score(self, ctx: ScoreContext, policy: ScorePolicy) -> Tensor:
        """float32[J, C, N]: what the policy's scorer says of the rows. A subclass may watch the scores here."""
        return self._scorer(policy).score(ctx)

    def _context(self, kv: KVView, jobs: JobBatch, columns: slice, policy: ScorePolicy) -> ScoreContext:
        members = kv.members[jobs.groups][:, columns].long()
        return ScoreContext(
            rows=_Rows(self.backend, kv, jobs, columns, self.scale),
            num_src=jobs.num_src,
            num_rows=jobs.num_rows,
            num_dropped=jobs.num_src - (jobs.dst_pages != 0).sum(1) * kv.page_size,
            num_tokens=jobs.num_tokens,
            first=kv.evicted[jobs.slots, jobs.groups] == 0,
            layers=members[..., 0],
            heads=members[..., 1],
            inv_freq=kv.inv_freq,
            scale=self.scale,
            sink_tokens=policy.sink_tokens,
            window=policy.window,
            window_stride=kv.window_stride,
            max_src=jobs.max_src,
        )
