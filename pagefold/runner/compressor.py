"""Runs the jobs of a step: score, select, move. Which rows survive stays on the device; the host never asks."""

from collections import defaultdict
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from pagefold.backends.base import Backend, JobBatch, KVView
from pagefold.core.types import Job, ScorePolicy
from pagefold.evict.scorer import SCORERS, ScoreContext
from pagefold.evict.select import select_rows


class _Rows:
    """The `RowSource` of one slice of columns of one batch of jobs."""

    def __init__(self, backend: Backend, kv: KVView, jobs: JobBatch, columns: slice, scale: float):
        self._args = (kv, jobs, columns)
        self._backend = backend
        self._scale = scale

    def attention(self, across: str = "max") -> Tensor:
        return self._backend.window_scores(*self._args, self._scale, across)

    def queries(self) -> Tensor:
        kv, jobs, columns = self._args
        layers, heads = kv.members[jobs.groups][:, columns].long().unbind(-1)
        num_layers, slots, width, num_q, dim = kv.window.shape
        num_kv = kv.group_of.shape[1]
        window = kv.window.view(num_layers, slots, width, num_kv, num_q // num_kv, dim)
        return window[layers, jobs.window_slots[:, None], :, heads].to(kv.row_dtype)

    def keys(self) -> Tensor:
        return self._backend.read_rows(*self._args, "k")

    def values(self) -> Tensor:
        return self._backend.read_rows(*self._args, "v")

    def state(self, name: str) -> Tensor:
        return self._backend.read_state(*self._args, name)


class Compressor:
    """Executes compactions and coolings, a few launches per batch of equal jobs.

    scale       softmax scale of the model's attention
    tile_bytes  how much decoded memory one pass over the columns may take
    """

    def __init__(self, backend: Backend, kv: KVView, scale: float, tile_bytes: int = 64 << 20):
        self.backend = backend
        self.kv = kv
        self.scale = scale
        self.tile_bytes = tile_bytes

    @cached_property
    def _heads_of_layer(self) -> int:
        return self.kv.group_of.shape[1]

    def run(self, jobs: list[Job], policies: list[ScorePolicy]) -> None:
        """All jobs of a step. Jobs that keep equally many rows of equally many are done together."""
        batches: dict[tuple, list[Job]] = defaultdict(list)
        for job in jobs:
            batches[job.policy, job.keep_rows, job.num_src_pages, job.dst_tier].append(job)
        for (policy, keep_rows, num_src, _), batch in batches.items():
            self._run_batch(self._job_batch(batch), policies[policy], keep_rows, num_src * self.kv.page_size)

    def _job_batch(self, jobs: list[Job]) -> JobBatch:
        size, device = self.kv.page_size, self.kv.page_table.device
        column = lambda values: torch.tensor(list(values), dtype=torch.int64, device=device)  # noqa: E731
        return JobBatch(
            slots=column(j.slot for j in jobs),
            groups=column(j.group for j in jobs),
            first_page=column(j.first_page for j in jobs),
            num_src=column(j.num_src_pages * size for j in jobs),
            num_rows=column(j.num_rows for j in jobs),
            num_tokens=column(j.num_tokens for j in jobs),
            window_slots=column(j.window_slot for j in jobs),
            dst_pages=torch.from_numpy(np.stack([j.dst_pages for j in jobs])).to(device, torch.int64),
            dst_tier=jobs[0].dst_tier,
            max_src=max(j.num_src_pages for j in jobs) * size,
            max_rows=max(j.num_rows for j in jobs),
        )

    def _run_batch(self, jobs: JobBatch, policy: ScorePolicy, keep_rows: int, num_src: int) -> None:
        num_jobs, columns = len(jobs.slots), self.kv.members.shape[1]
        head_dim = self.kv.tiers[0].head_dim
        heads = self._heads_of_layer
        # whole layers at a time where the layout has them side by side, so that a scorer may look across a layer
        per_tile = max(1, self.tile_bytes // (num_jobs * num_src * head_dim * 4))
        tile = max(heads, per_tile // heads * heads) if columns % heads == 0 else min(per_tile, columns)
        for start in range(0, columns, tile):
            part = slice(start, min(start + tile, columns))
            if keep_rows == num_src:
                width = part.stop - part.start
                keep = torch.arange(num_src, device=jobs.slots.device).expand(num_jobs, width, num_src)
                self.backend.compact(self.kv, jobs, part, keep, {})
                continue
            ctx = self._context(jobs, part, policy)
            scores = self.score(ctx, policy)
            keep = select_rows(scores, jobs.num_src, jobs.num_rows, keep_rows, policy.sink_tokens, policy.window)
            self.backend.compact(self.kv, jobs, part, keep, ctx.new_state)

    def score(self, ctx: ScoreContext, policy: ScorePolicy) -> Tensor:
        """float32[J, C, N]: what the policy's scorer says of the rows. A subclass may watch the scores here."""
        return SCORERS.build(policy.scorer).score(ctx)

    def _context(self, jobs: JobBatch, columns: slice, policy: ScorePolicy) -> ScoreContext:
        members = self.kv.members[jobs.groups][:, columns].long()
        return ScoreContext(
            rows=_Rows(self.backend, self.kv, jobs, columns, self.scale),
            num_src=jobs.num_src,
            num_rows=jobs.num_rows,
            num_tokens=jobs.num_tokens,
            first=self.kv.evicted[jobs.slots, jobs.groups] == 0,
            layers=members[..., 0],
            heads=members[..., 1],
            inv_freq=self.kv.inv_freq,
            scale=self.scale,
            sink_tokens=policy.sink_tokens,
            window=policy.window,
        )
