"""How much rows repeat each other: the kernels of `RowSource.crowding`, whose truth is `pagefold.evict.crowding`."""

import torch
from torch import Tensor

from pagefold.backends.triton.addressing import tile_pages, tile_rows
from pagefold.backends.triton.rows import WHERE, decoded, source_rows
from pagefold.store.shim import jit, tl, triton

COLUMNS = 64  # rows that others are compared with at a time
STEP, NEAR_STEP = 2.0**-40, 2.0**-22  # that cosines are counted in; an int32 holds twice what those of 255 rows come to


def inverse_lengths(num_jobs: int, width: int, max_src: int, device: torch.device) -> Tensor:
    """Room for `inverse` of `compare_rows`."""
    stride = (triton.cdiv(max_src, COLUMNS) + 1) * COLUMNS
    return torch.empty(num_jobs, width, stride, dtype=torch.float32, device=device)


@jit
def centred_pieces(
    data, row, ok, D: tl.constexpr, ACROSS: tl.constexpr, LOAD: tl.constexpr, PIECES: tl.constexpr,
    BIAS: tl.constexpr, GAIN: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """Rows as stored, but for their scale, in pieces [N, D / P], or [D / P, N] with ACROSS. Cosines are the same in any
    frame, so rotated rows stay rotated."""
    x = LOAD(data, row, ok, D, ACROSS, MMA)
    pieces = ()
    for p in tl.static_range(PIECES):
        if BIAS[p] == 0.0 and GAIN[p] == 1.0:
            pieces = pieces + (x[p],)
        else:
            pieces = pieces + (((x[p].to(tl.float32) - BIAS[p]) * GAIN[p]).to(MMA),)
    return pieces


@jit(do_not_specialize=[*WHERE, "max_src"])
def row_lengths(
    data, scale, out, num_src, tables, first_column, num_groups, max_pages, num_pages, cold_pages, max_src,
    INVERSE: tl.constexpr, TIER: tl.constexpr, NUM_TIERS: tl.constexpr, PS: tl.constexpr, D: tl.constexpr,
    N: tl.constexpr, MMA: tl.constexpr, LOAD: tl.constexpr, PIECES: tl.constexpr, BIAS: tl.constexpr,
    GAIN: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, C, J): out float32[J, C, max_src], max_src being theirs or more, the lengths of the source
    rows of one tier, or, INVERSE, what makes the length of their `centred_pieces` 1. The first tier's launch puts 0 for
    all other rows."""
    i_j = tl.program_id(2)
    i = tl.program_id(0) * N + tl.arange(0, N)
    ok = i < tl.load(num_src + i_j)
    row, is_cold = source_rows(i, ok, tables, first_column, num_groups, max_pages, num_pages, cold_pages, PS, NUM_TIERS)
    ok &= is_cold == (TIER == 1)
    pieces = centred_pieces(data, row, ok, D, False, LOAD, PIECES, BIAS, GAIN, MMA)
    squares = tl.zeros([N], tl.float32)
    for p in tl.static_range(PIECES):
        wide = pieces[p].to(tl.float32)
        squares += tl.sum(wide * wide, 1)
    length = tl.sqrt(squares)
    factor = 1.0
    if SCALED:
        factor = tl.load(scale + row, mask=ok, other=0.0).to(tl.float32)
    length *= factor
    if INVERSE:  # a row shorter than 1e-6 counts as one of that length
        length = factor / tl.maximum(length, 1e-6)
    to = (i_j.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * max_src + i
    tl.store(out + to, tl.where(ok, length, 0.0), mask=ok if TIER == 1 else i < max_src)


@jit
def against_stored(
    a, M: tl.constexpr, PIECES: tl.constexpr, BIAS: tl.constexpr, GAIN: tl.constexpr, MMA: tl.constexpr
):  # fmt: skip
    """(pieces, offset [M]): their product with rows exactly as stored, less the offset, times GAIN[0], is the product
    of the `centred_pieces` a with those of the rows. So what is centred is centred once, not in every tile."""
    pieces = ()
    offset = tl.zeros([M], tl.float32)
    for p in tl.static_range(PIECES):
        if BIAS[p] == 0.0 and GAIN[p] == GAIN[0]:
            pieces = pieces + (a[p],)
        else:
            piece = (a[p].to(tl.float32) * (GAIN[p] / GAIN[0])).to(MMA)
            offset += tl.sum(piece.to(tl.float32), 1) * BIAS[p]
            pieces = pieces + (piece,)
    return pieces, offset


@jit
def unit_rows(
    planes, inverse, i, ok, tables, first_column, num_groups, max_pages, num_pages, cold_pages,
    NUM_TIERS: tl.constexpr, PS: tl.constexpr, N: tl.constexpr, D: tl.constexpr, ACROSS: tl.constexpr,
    MMA: tl.constexpr, ROTATE: tl.constexpr, LOAD: tl.constexpr, PIECES: tl.constexpr, BIAS: tl.constexpr,
    GAIN: tl.constexpr, SCALED: tl.constexpr, COLD_ROTATE: tl.constexpr, COLD_LOAD: tl.constexpr,
    COLD_PIECES: tl.constexpr, COLD_BIAS: tl.constexpr, COLD_GAIN: tl.constexpr, COLD_SCALED: tl.constexpr,
):  # fmt: skip
    """Pieces of source rows i and what makes their length 1, float32[N], 0 where not ok: `inverse`, which `row_lengths`
    made; or one piece, in a frame in common, of length 1, where there are two tiers."""
    row, is_cold = source_rows(i, ok, tables, first_column, num_groups, max_pages, num_pages, cold_pages, PS, NUM_TIERS)
    if NUM_TIERS == 1:
        pieces = centred_pieces(planes[0], row, ok, D, ACROSS, LOAD, PIECES, BIAS, GAIN, MMA)
        return pieces, tl.load(inverse + i, mask=ok, other=0.0)
    else:
        hot = ok & (is_cold == False)  # noqa: E712
        x = decoded(planes[0], planes[1], row, hot, N, D, ROTATE, LOAD, PIECES, BIAS, GAIN, SCALED)
        cold = decoded(
            planes[2], planes[3], row, ok & is_cold, N, D, COLD_ROTATE, COLD_LOAD, COLD_PIECES, COLD_BIAS, COLD_GAIN,
            COLD_SCALED,
        )  # fmt: skip
        x = tl.where(hot[:, None], x, cold)
        x = (x / tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-6)[:, None]).to(MMA)
        if ACROSS:
            x = tl.trans(x)
        return (x,), tl.where(ok, 1.0, 0.0)


@jit
def compared(
    s, factor, limit, i_row, first, start, i_t, sums, newest, tile, M: tl.constexpr, N: tl.constexpr,
    NEAR: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """(sums, newest, tile) of `compare_rows` after the columns i_t.., whose products with the rows are s [M, N]."""
    o_n = tl.arange(0, N)
    s *= factor[None, :]
    if (i_t < first + M) & (i_t + N > first):
        s = tl.where(i_row[:, None] == (i_t + o_n)[None, :], 0.0, s)
    sums += tl.sum(tl.reshape(s, [M, N // 8, 8]), 1)
    ranks = (s.to(tl.int32, bitcast=True) >> 31 - BITS) + (o_n // 8 << BITS)[None, :]
    best = tl.max(tl.reshape(tl.where(s > limit[:, None], ranks, -1), [M, N // 8, 8]), 1)
    if NEAR:
        newest = tl.where(best >= 0, best + ((i_t - start) // 8 << BITS), newest)
    else:
        newest = tl.where(best >= 0, best, newest)
        tile = tl.where(best >= 0, i_t, tile)
    return sums, newest, tile


@jit(do_not_specialize=[*WHERE, "threshold", "block", "max_src", "stride"])
def compare_rows(
    planes,
    inverse,
    total,
    less,
    num_src,
    tables,
    first_column,
    num_groups,
    max_pages,
    num_pages,
    cold_pages,
    threshold,
    block,
    max_src,
    stride,
    M: tl.constexpr,
    N: tl.constexpr,
    ALIGNED: tl.constexpr,
    NEAR: tl.constexpr,
    STEP: tl.constexpr,
    NUM_TIERS: tl.constexpr,
    PS: tl.constexpr,
    D: tl.constexpr,
    MMA: tl.constexpr,
    PRECISION: tl.constexpr,
    PIECE_COUNT: tl.constexpr,
    ROTATE: tl.constexpr,
    LOAD: tl.constexpr,
    PIECES: tl.constexpr,
    BIAS: tl.constexpr,
    GAIN: tl.constexpr,
    SCALED: tl.constexpr,
    COLD_ROTATE: tl.constexpr,
    COLD_LOAD: tl.constexpr,
    COLD_PIECES: tl.constexpr,
    COLD_BIAS: tl.constexpr,
    COLD_GAIN: tl.constexpr,
    COLD_SCALED: tl.constexpr,
):
    """Grid (tiles of M rows, block after block, C, J): M rows against all of their block, N at a time.

    ALIGNED   one tier, and a block is the only one or a multiple of N rows
    inverse   float32[J, C, stride] of `row_lengths`; 0 past a job's rows. Stride is a multiple of N, and leaves room to
              ask for N rows too many. Not looked at where there are two tiers
    NEAR      a block has at most 256 rows, so that a place among every eighth of them is five bits
    total     float32[J, C, max_src]   of each row, the sum of its cosines with the others
    less      int[J, C, max_src]       what of it does not count, in steps of STEP: each row's cosine with the newest
                                       other row that is similar is added to that one's. Integers, because sums of
                                       those do not depend on who comes first
    """
    i_c, i_j = tl.program_id(1), tl.program_id(2)
    i_head = i_j.to(tl.int64) * tl.num_programs(1) + i_c
    at = i_head * max_src
    inverse += tl.multiple_of(i_head * stride, N)
    tiles = tl.cdiv(block, M)
    start = tl.program_id(0) // tiles * block
    stop = tl.minimum(start + block, tl.load(num_src + i_j).to(tl.int32))
    first = start + tl.program_id(0) % tiles * M
    if first >= stop:
        return

    i_row = first + tl.arange(0, M)
    inside = i_row < stop
    pages = tables[0] + (tl.load(tables[2] + i_j) * num_groups + tl.load(tables[3] + i_j)) * max_pages
    pages += tl.load(tables[4] + i_j)
    base = (first_column + i_c).to(tl.int64) * num_pages
    offset = tl.zeros([M], tl.float32)
    if ALIGNED:
        row = tile_rows(tile_pages(pages, first, stop, PS, M), first, base, PS, M)
        b_a = centred_pieces(planes[0], row, inside, D, False, LOAD, PIECES, BIAS, GAIN, MMA)
        b_a, offset = against_stored(b_a, M, PIECES, BIAS, GAIN, MMA)
        a_factor = tl.load(inverse + i_row, mask=inside, other=0.0) * GAIN[0]
    else:
        b_a, a_factor = unit_rows(
            planes, inverse, i_row, inside, tables, first_column, num_groups, max_pages, num_pages, cold_pages,
            NUM_TIERS, PS, M, D, False, MMA, ROTATE, LOAD, PIECES, BIAS, GAIN, SCALED,
            COLD_ROTATE, COLD_LOAD, COLD_PIECES, COLD_BIAS, COLD_GAIN, COLD_SCALED,
        )  # fmt: skip
    limit = threshold / tl.maximum(a_factor, 1e-30)
    # Of every eighth column, which lie in one lane: the sum, and the newest similar one, as a number whose lower bits
    # are those of its cosine, whose sign is known, and whose upper ones its place: in its block, or in its tile.
    BITS: tl.constexpr = 26 if NEAR else 28
    o_n = tl.arange(0, N)
    sums = tl.zeros([M, 8], tl.float32)
    newest = tl.full([M, 8], -1, tl.int32)
    tile = tl.full([M, 8], 0, tl.int32)
    if ALIGNED:
        page = tile_pages(pages, start, stop, PS, N)
        next_factor = tl.load(inverse + tl.multiple_of(start, N) + o_n)
    for i_t in range(start, stop, N):
        i_other = i_t + o_n
        ok = i_other < stop
        if ALIGNED:
            other_row = tile_rows(page, i_t, base, PS, N)
            page = tile_pages(pages, i_t + N, stop, PS, N)
            b_b = LOAD(planes[0], other_row, ok, D, True, MMA)
            b_factor = next_factor
            next_factor = tl.load(inverse + tl.multiple_of(i_t + N, N) + o_n)
        else:
            b_b, b_factor = unit_rows(
                planes, inverse, i_other, ok, tables, first_column, num_groups, max_pages, num_pages, cold_pages,
                NUM_TIERS, PS, N, D, True, MMA, ROTATE, LOAD, PIECES, BIAS, GAIN, SCALED,
                COLD_ROTATE, COLD_LOAD, COLD_PIECES, COLD_BIAS, COLD_GAIN, COLD_SCALED,
            )  # fmt: skip
        s = tl.zeros([M, N], tl.float32) - offset[:, None]
        for p in tl.static_range(PIECE_COUNT):
            s = tl.dot(b_a[p], b_b[p], s, input_precision=PRECISION)
        sums, newest, tile = compared(
            s, b_factor, limit, i_row, first, start, i_t, sums, newest, tile, M, N, NEAR, BITS
        )
    tl.store(total + at + i_row, tl.sum(sums, 1) * a_factor, mask=inside)

    place = (start if NEAR else tile) + (newest >> BITS) * 8
    column = tl.where(newest >= 0, place + tl.arange(0, 8)[None, :], -1)
    half = 1 << 30 - BITS  # of what the shift cut off
    cosine = (((newest & ((1 << BITS) - 1)) << 31 - BITS) + half).to(tl.float32, bitcast=True)
    found = tl.where(inside, tl.max(column, 1), -1)
    cosine = tl.sum(tl.where(column == found[:, None], cosine, 0.0), 1) * a_factor
    tl.atomic_add(less + at + found, (cosine * (1 / STEP)).to(less.dtype.element_ty), mask=found >= 0, sem="relaxed")
