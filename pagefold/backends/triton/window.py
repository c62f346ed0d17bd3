"""What a compaction asks of the window's queries: how much they look at each row, or those to come are expected to."""

import math

import torch
from torch import Tensor

from pagefold.backends.base import JobBatch, KVView
from pagefold.backends.triton import expectation
from pagefold.backends.triton.crowding import inverse_lengths
from pagefold.backends.triton.expectation import expect_rows, foresight, turn_window
from pagefold.backends.triton.plan import device_codec, mma_dtype, next_power_of_2, reading
from pagefold.backends.triton.rows import rotates, width_of
from pagefold.backends.triton.window_scores import (
    SHARE,
    SPLIT_ROWS,
    SUMS,
    WEIGHTS,
    rotate_window,
    window_sums,
    window_weights,
)
from pagefold.store.shim import tl, triton

# Of a KV head in window attention, those that pad included. 512 gave wrong scores on an H200, though not interpreted.
MAX_QUERIES = 256
HORIZONS = 64  # whose turns are kept; those of others are made again for every fold


class TritonWindow:
    """The part of the backend that multiplies keys by the window's queries."""

    def max_window(self, per_head: int) -> int | None:
        return MAX_QUERIES // next_power_of_2(per_head)

    def window_scores(self, kv: KVView, jobs: JobBatch, columns: slice, scale: float, across: str = "max") -> Tensor:
        num_jobs, max_src, head_dim = len(jobs.slots), jobs.max_src, kv.window.shape[-1]
        column_ids = range(kv.members.shape[1])[columns]
        num_columns, num_tiers = len(column_ids), len(kv.tiers)
        num_slots, num_window, num_heads = kv.window.shape[1:4]
        per_head = num_heads // kv.group_of.shape[1]
        window_pad = next_power_of_2(num_window)
        num_queries = max(16, next_power_of_2(per_head) * window_pad)
        splits, device = triton.cdiv(jobs.max_rows, SPLIT_ROWS), jobs.slots.device
        sums = torch.empty(num_jobs, num_columns, num_tiers, splits, num_queries, device=device)
        scores = torch.zeros(num_jobs, num_columns, max_src, device=device)
        found = finds_lengths(kv, jobs)
        inverse = inverse_lengths(num_jobs, num_columns, max_src, device).zero_() if found else scores
        of_window = (column_ids.start, kv.members.shape[1], num_slots, num_heads)
        rotated = kv.window
        if rotates(kv):
            queries = num_window * per_head
            rotated = torch.empty(num_jobs, num_columns, queries, head_dim, dtype=frame_dtype(kv, True), device=device)
            rotate_window[(triton.cdiv(queries, 8), num_columns, num_jobs)](
                *(kv.window, rotated, kv.members, jobs.groups, jobs.window_slots, *of_window),
                R=per_head,
                W=num_window,
                D=head_dim,
                N=8,
                num_warps=1,
            )
        base_2 = scale * math.log2(math.e)
        constants = dict(R=per_head, W=num_window, WP=window_pad, STRIDE=kv.window_stride, Q=num_queries)
        constants |= dict(D=head_dim, PS=kv.page_size)
        tables = (kv.members, kv.page_table, kv.cold, jobs.slots, jobs.groups, jobs.num_rows, jobs.window_slots)
        passes = (
            (window_sums, splits, (sums, *tables), (base_2, SPLIT_ROWS), {"LANES": 16 * SUMS.warps}, SUMS),
            (
                window_weights,
                triton.cdiv(max_src, SHARE),
                (sums, scores, inverse, *tables, jobs.num_src, jobs.first_page),
                (base_2, SHARE, splits, max_src, inverse.shape[2]),
                {"MEAN": across == "mean", "INVERSE": found},
                WEIGHTS,
            ),
        )
        for kernel, programs, tensors, numbers, options, shape in passes:
            for tier, store in enumerate(kv.tiers):
                own, codec = store.format.k.rotate, reading(store.format.k, head_dim)
                kernel[(programs, num_columns, num_jobs)](
                    rotated if own else kv.window,
                    store.rows("k_data"),
                    store.rows("k_scale"),
                    *tensors,
                    *of_window,
                    *numbers,
                    store.num_pages,
                    *kv.page_table.shape[1:],
                    **constants,
                    **options,
                    N=shape.tile,
                    TIER=tier,
                    NUM_TIERS=num_tiers,
                    OWN=own,
                    **codec,
                    PRECISION="ieee",
                    num_warps=shape.warps,
                    num_stages=2 if codec["MMA"] == tl.float32 else shape.stages,  # rows are as wide as two
                )
        if found:
            jobs.inverse = (kv, columns, inverse)
        return scores

    def expected_logits(self, kv: KVView, jobs: JobBatch, columns: slice, scale: float, horizon: int) -> Tensor:
        num_jobs, num_columns, max_src = len(jobs.slots), width_of(kv, columns), jobs.max_src
        num_window, num_heads, head_dim = kv.window.shape[2:]
        per_head, num_tiers = num_heads // kv.group_of.shape[1], len(kv.tiers)
        window_pad = next_power_of_2(num_window)
        queries = {
            rotate: self._turned(kv, jobs, columns, horizon, rotate)
            for rotate in {store.format.k.rotate for store in kv.tiers}
        }
        logits = torch.empty(num_jobs, num_columns, per_head, max_src, device=jobs.slots.device)
        for tier, store in enumerate(kv.tiers):
            codec, shape = reading(store.format.k, head_dim), expectation.SHAPE
            expect_rows[(triton.cdiv(max_src, expectation.SHARE), num_columns, num_jobs)](
                queries[store.format.k.rotate],
                store.rows("k_data"),
                store.rows("k_scale"),
                logits,
                kv.page_table,
                kv.cold,
                jobs.slots,
                jobs.groups,
                jobs.num_rows,
                jobs.num_src,
                jobs.first_page,
                range(kv.members.shape[1])[columns].start,
                store.num_pages,
                *kv.page_table.shape[1:],
                scale,
                expectation.SHARE,
                max_src,
                R=per_head,
                W=num_window,
                WP=window_pad,
                Q=max(16, next_power_of_2(per_head) * window_pad),
                D=head_dim,
                PS=kv.page_size,
                N=shape.tile,
                TIER=tier,
                NUM_TIERS=num_tiers,
                **codec,
                PRECISION="ieee",
                num_warps=shape.warps,
                num_stages=2 if codec["MMA"] == tl.float32 else shape.stages,  # rows are as wide as two
            )
        return logits

    def _turned(self, kv: KVView, jobs: JobBatch, columns: slice, horizon: int, rotate: bool) -> Tensor:
        """`queries` of `expect_rows`."""
        num_slots, num_window, num_heads, head_dim = kv.window.shape[1:]
        per_head = num_heads // kv.group_of.shape[1]
        turns = kv.foresight.get(horizon)
        if turns is None:
            turns = foresight(kv.inv_freq, num_window, kv.window_stride, horizon)
            captured = turns.is_cuda and torch.cuda.is_current_stream_capturing()  # then it is the graph's alone
            if len(kv.foresight) < HORIZONS and not captured:
                kv.foresight[horizon] = turns
        window_pad = next_power_of_2(num_window)
        shape = (len(jobs.slots), width_of(kv, columns), num_window, per_head, head_dim)
        turned = torch.empty(shape, dtype=frame_dtype(kv, rotate), device=kv.window.device)
        turn_window[(per_head, *shape[1::-1])](
            kv.window,
            turned,
            turns,
            kv.members,
            jobs.groups,
            jobs.window_slots,
            range(kv.members.shape[1])[columns].start,
            kv.members.shape[1],
            num_slots,
            num_heads,
            R=per_head,
            W=num_window,
            WP=window_pad,
            D=head_dim,
            ROTATE=rotate,
            num_warps=min(8, max(1, window_pad * head_dim // 2048)),
        )
        return turned


def finds_lengths(kv: KVView, jobs: JobBatch) -> bool:
    """Whether window attention takes the lengths of keys for `crowding`, which reads those of two tiers by itself."""
    return jobs.compared and len(kv.tiers) == 1 and not device_codec(kv.tiers[0].format.k).lengths_alone


def frame_dtype(kv: KVView, rotate: bool) -> torch.dtype:
    """What queries that are made ready for keys in a frame are kept in: float32 if products there are."""
    products = {mma_dtype(device_codec(store.format.k)) for store in kv.tiers if store.format.k.rotate == rotate}
    return torch.float32 if tl.float32 in products else torch.float16
