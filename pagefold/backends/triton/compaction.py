"""What a compaction decides by: how much rows repeat each other, and which of them stay. Nothing waits for the host."""

import torch
from torch import Tensor

from pagefold.backends.base import JobBatch, KVView
from pagefold.backends.triton.crowding import COLUMNS, NEAR_STEP, STEP, compare_rows, inverse_lengths, row_lengths
from pagefold.backends.triton.plan import (
    device_codec,
    mma_dtype,
    multiplies_in_shared_memory,
    next_power_of_2,
    reading,
)
from pagefold.backends.triton.rows import by_tier, codec_of, decoding, where, width_of
from pagefold.store.shim import jit, tl, triton

TILE, LONG_TILE = 64, 128  # rows of a program that compares them with others, `COLUMNS` at a time
REGISTERS, LONG_REGISTERS = 128, 168  # of a lane of it, so that four or three programs share a multiprocessor
NEAR_ROWS = 256  # of a block that `compare_rows` calls near
LENGTHS = 64  # rows of a program that takes their lengths
SELECT_TILE = 2048  # scores looked at at a time, whatever there are, so that two programs serve all lengths


@jit
def score_ranks(scores, i, n, sink_tokens, window_start):
    """Integers in the order of the scores, as in `pagefold.evict.select`: padding, NaN, -inf, the finite scores, inf,
    protected rows."""
    x = tl.load(scores + i, mask=i < n, other=0.0)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    ranks = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ranks = tl.where(x != x, -0x7FFFFFFF, ranks)
    ranks = tl.where((i < sink_tokens) | (i >= window_start), 0x7FFFFFFF, ranks)
    return tl.where(i < n, ranks, -0x80000000)


@jit(do_not_specialize=["sink_tokens", "window", "max_src", "num_dst"])
def select_best(
    scores,
    keep,
    num_src,
    num_rows,
    to_pages,
    sink_tokens,
    window,
    max_src,
    num_dst,
    PS: tl.constexpr,
    N: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Grid (C, J): the rows of one head that stay, int64[J, C, num_dst * PS], from scores float32[J, C, max_src].

    The rank of the last one is found bit by bit, from the highest: it is the largest that enough rows reach. WHOLE
    means that no job has more than N source rows, whose ranks then stay in registers.
    """
    i_c, i_j = tl.program_id(0), tl.program_id(1)
    i_head = i_j.to(tl.int64) * tl.num_programs(0) + i_c
    scores += i_head * max_src
    keep += i_head * num_dst * PS
    n = tl.load(num_src + i_j).to(tl.int32)
    window_start = tl.load(num_rows + i_j).to(tl.int32) - window
    o_n = tl.arange(0, N)
    is_page = tl.zeros([N], tl.int32)
    for i_p in range(0, num_dst, N):
        is_page += (tl.load(to_pages + i_j * num_dst + i_p + o_n, mask=i_p + o_n < num_dst, other=0) != 0).to(tl.int32)
    num_keep = tl.sum(is_page, 0) * PS

    head = score_ranks(scores, o_n, n, sink_tokens, window_start)
    step = tl.full([], 1 << 31, tl.int64)
    least = tl.full([], -(1 << 31), tl.int64)
    for _ in range(32):
        tried = (least + step).to(tl.int32)
        if WHOLE:
            count = (head >= tried).to(tl.int32)
        else:
            count = tl.zeros([N], tl.int32)
            for i_t in range(0, n, N):
                count += (score_ranks(scores, i_t + o_n, n, sink_tokens, window_start) >= tried).to(tl.int32)
        least = tl.where(tl.sum(count, 0) >= num_keep, least + step, least)
        step = step // 2

    lowest = least.to(tl.int32)
    above, tied = tl.zeros([N], tl.int32), tl.zeros([N], tl.int32)
    for i_t in range(0, n, N):
        ranks = head if WHOLE else score_ranks(scores, i_t + o_n, n, sink_tokens, window_start)
        above += (ranks > lowest).to(tl.int32)
        tied += (ranks == lowest).to(tl.int32)
    dropped = tl.sum(tied, 0) - (num_keep - tl.sum(above, 0))  # of those that tie, the oldest
    place, ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for i_t in range(0, n, N):
        ranks = head if WHOLE else score_ranks(scores, i_t + o_n, n, sink_tokens, window_start)
        tie = ((ranks == lowest) & (i_t + o_n < n)).to(tl.int32)
        kept = ((ranks > lowest) | ((tie == 1) & (ties + tl.cumsum(tie, 0) > dropped))).to(tl.int32)
        at = place + tl.cumsum(kept, 0) - 1
        tl.store(keep + at, (i_t + o_n).to(tl.int64), mask=kept == 1)
        place += tl.sum(kept, 0)
        ties += tl.sum(tie, 0)


class TritonCompaction:
    """What the compactor asks of the backend before rows move."""

    def crowding(self, kv: KVView, jobs: JobBatch, columns: slice, threshold: float, block: int | None) -> Tensor:
        """The shape of a program depends on the format and `block` alone, and so does the order in which cosines are
        summed. Float32 and rows of two formats need more registers, so twice the warps. What bounds the others is
        instructions, of which longer tiles need fewer; they have the registers for it in near blocks, where no tile of
        the newest row is kept."""
        num_tiers, max_src, head_dim = len(kv.tiers), jobs.max_src, kv.window.shape[-1]
        hot, cold = kv.tiers[0], kv.tiers[-1]
        codecs = [device_codec(codec_of(store, "k")) for store in kv.tiers]
        narrow = num_tiers == 1 and codecs[0].mma != torch.float32
        aligned = num_tiers == 1 and (block or COLUMNS) % COLUMNS == 0
        near = block is not None and block <= NEAR_ROWS
        rows, registers = min(TILE, max(16, next_power_of_2(block or TILE))), REGISTERS
        if narrow and aligned and near and (block or 0) % LONG_TILE == 0:
            rows, registers = LONG_TILE, LONG_REGISTERS
        length = min(block or max_src, max_src)
        shape = (len(jobs.slots), width_of(kv, columns), max_src)
        total = torch.zeros(shape, dtype=torch.float32, device=jobs.slots.device)
        step, counts = (NEAR_STEP, torch.int32) if near else (STEP, torch.int64)
        less = torch.zeros_like(total, dtype=counts)
        constants = decoding(codec_of(hot, "k"), head_dim)
        constants |= {f"COLD_{name}": value for name, value in decoding(codec_of(cold, "k"), head_dim).items()}
        if constants["ROTATE"] and constants["COLD_ROTATE"]:
            constants |= {"ROTATE": False, "COLD_ROTATE": False}
        mma = mma_dtype(codecs[0])
        if num_tiers == 2:  # rows of length 1
            mma = tl.float32 if tl.float32 in map(mma_dtype, codecs) else tl.float16
        inverse = self._inverse_lengths(kv, jobs, columns)
        grid = (triton.cdiv(max_src, length) * triton.cdiv(length, rows), *shape[1::-1])
        compare_rows[grid](
            tuple(store.rows(f"k_{part}") for store in (hot, cold) for part in ("data", "scale")),
            inverse,
            total,
            less,
            jobs.num_src,
            *where(kv, jobs, columns),
            threshold,
            length,
            max_src,
            inverse.shape[2],
            M=rows,
            N=COLUMNS,
            ALIGNED=aligned,
            NEAR=near,
            STEP=step,
            NUM_TIERS=num_tiers,
            PS=kv.page_size,
            D=head_dim,
            MMA=mma,
            PRECISION="ieee",
            PIECE_COUNT=codecs[0].num_pieces if num_tiers == 1 else 1,
            **constants,
            num_warps=4 if narrow else 8,
            num_stages=2,
            maxnreg=registers if narrow and multiplies_in_shared_memory() else None,
        )
        return total.sub_(less, alpha=step)

    def read_lengths(self, kv: KVView, jobs: JobBatch, columns: slice, role: str) -> Tensor:
        shape = (len(jobs.slots), width_of(kv, columns), jobs.max_src)
        out = torch.empty(shape, dtype=torch.float32, device=jobs.slots.device)
        self._lengths(kv, jobs, columns, role, out, inverse=False)
        return out

    def _inverse_lengths(self, kv: KVView, jobs: JobBatch, columns: slice) -> Tensor:
        """`inverse` of `compare_rows`, if it looks at it."""
        if jobs.inverse and jobs.inverse[0] is kv and jobs.inverse[1] == columns:
            return jobs.inverse[2]
        inverse = inverse_lengths(len(jobs.slots), width_of(kv, columns), jobs.max_src, jobs.slots.device)
        if len(kv.tiers) == 1:
            self._lengths(kv, jobs, columns, "k", inverse, inverse=True)
        return inverse

    def _lengths(self, kv: KVView, jobs: JobBatch, columns: slice, role: str, out: Tensor, *, inverse: bool) -> None:
        """Into out float32[J, C, max_src or more], 0 on padding. Rows stay as they are stored: their lengths are the
        same."""
        grid = triton.cdiv(out.shape[2], LENGTHS), *out.shape[1::-1]
        for args, codec, constants in by_tier(kv, jobs, columns, role, out):
            constants |= {name: value for name, value in reading(codec, constants["D"]).items() if name != "PAIRS"}
            row_lengths[grid](*args, INVERSE=inverse, N=LENGTHS, **constants)

    def select_rows(self, kv: KVView, jobs: JobBatch, scores: Tensor, sink_tokens: int, window: int) -> Tensor:
        num_jobs, width, max_src = scores.shape
        num_dst = jobs.dst_pages.shape[1]
        shape = (num_jobs, width, num_dst * kv.page_size)
        keep = torch.empty(shape, dtype=torch.int64, device=scores.device)
        select_best[(width, num_jobs)](
            scores.float().contiguous(),
            keep,
            jobs.num_src,
            jobs.num_rows,
            jobs.dst_pages,
            sink_tokens,
            window,
            max_src,
            num_dst,
            PS=kv.page_size,
            N=SELECT_TILE,
            WHOLE=max_src <= SELECT_TILE,
        )
        return keep
