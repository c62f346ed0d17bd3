"""What queries to come are expected to say of each row: the kernel of `RowSource.expected_logits`, whose truth is
`pagefold.evict.expectation`.

One pass over the keys. What they meet is not the window's queries but their mean and their contrasts: for W queries,
W - 1 weighted sums such that the squares of the contrasts of any W numbers sum to the variance of these. So a tile of
rows needs no mean of its logits before their spread, which stay in registers; what is written is one number for each
query head.
"""

import torch
from torch import Tensor

from pagefold.backends.triton.addressing import tier_rows, tile_pages, tile_rows
from pagefold.backends.triton.plan import Shape
from pagefold.backends.triton.window_scores import WINDOW, products, tile_scales, window_of, window_queries
from pagefold.evict.expectation import turns
from pagefold.store.lowbit import device_hadamard
from pagefold.store.shim import jit, tl

SHARE = 2048  # rows of a program
SHAPE = Shape(tile=64, warps=4, stages=3)


def foresight(inv_freq: Tensor, window: int, stride: int, horizon: int) -> Tensor:
    """`turns` as cosines and sines, float32[2, w, D / 2]."""
    factors = torch.view_as_real(turns(inv_freq, window, stride, horizon))
    return factors.permute(2, 0, 1).float().contiguous()


@jit
def contrasts(x, o_u, W: tl.constexpr):
    """Row 0: the mean of W rows. Row i: row i against those before it (Helmert), so that the squares of rows 1 to W - 1
    sum to the variance."""
    i = o_u.to(tl.float32)
    length = tl.where(o_u > 0, tl.rsqrt(tl.maximum(W * i * (i + 1.0), 1.0)), 0.0)
    against = (tl.cumsum(x, 0) - (i + 1.0)[:, None] * x) * length[:, None]
    return tl.where((o_u > 0)[:, None], against, tl.sum(x, 0)[None, :] * (1 / W))


@jit(do_not_specialize=WINDOW)
def turn_window(
    window, turned, turns, members, groups, window_slots, first_column, num_columns, num_slots, num_heads,
    R: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, D: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Grid (R, C, J): turned [J, C, W, R, D], the mean and the `contrasts` of a head's queries, turned by `turns` that
    `foresight` made, and with ROTATE in the frame that K is stored in."""
    i_r, i_c, i_j = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    queries, row_size = window_of(
        window, i_c, i_j, members, groups, window_slots, first_column, num_columns, num_slots, num_heads, R, W, D, False
    )
    H: tl.constexpr = D // 2
    o_u, o_h = tl.arange(0, WP), tl.arange(0, H)
    mask = (o_u < W)[:, None]
    row = queries + (o_u * row_size + i_r * D)[:, None] + o_h[None, :]
    first = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(row + H, mask=mask, other=0.0).to(tl.float32)
    at = turns + o_u[:, None] * H + o_h[None, :]
    cos, sin = tl.load(at, mask=mask, other=0.0), tl.load(at + W * H, mask=mask, other=0.0)
    head = (i_j.to(tl.int64) * tl.num_programs(1) + i_c) * W * R * D
    to = turned + head + (o_u * R + i_r)[:, None] * D
    low = contrasts(first * cos - second * sin, o_u, W)
    high = contrasts(second * cos + first * sin, o_u, W)
    if ROTATE:
        x = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (WP, D))
        tl.store(to + tl.arange(0, D)[None, :], device_hadamard(x, WP, D), mask=mask)
    else:
        tl.store(to + o_h[None, :], low, mask=mask)
        tl.store(to + H + o_h[None, :], high, mask=mask)


@jit(do_not_specialize=["first_column", "num_pages", "num_groups", "max_pages", "share", "max_src"])
def expect_rows(
    queries,
    k_data,
    k_scale,
    logits,
    page_table,
    cold,
    slots,
    groups,
    num_rows,
    num_src,
    first_page,
    first_column,
    num_pages,
    num_groups,
    max_pages,
    scale,
    share,
    max_src,
    R: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    Q: tl.constexpr,
    D: tl.constexpr,
    PS: tl.constexpr,
    N: tl.constexpr,
    TIER: tl.constexpr,
    NUM_TIERS: tl.constexpr,
    LOAD: tl.constexpr,
    PIECES: tl.constexpr,
    PAIRS: tl.constexpr,
    BIAS: tl.constexpr,
    GAIN: tl.constexpr,
    SCALED: tl.constexpr,
    MMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (stretches of `share` source rows, C, J): the rows of one tier.

    queries   [J, C, W, R, D] of `turn_window`
    logits    float32[J, C, R, max_src], the mean of the logits of a head's queries plus half their variance
    """
    i_c, i_j = tl.program_id(1), tl.program_id(2)
    i_head = i_j.to(tl.int64) * tl.num_programs(1) + i_c
    line = tl.load(slots + i_j) * num_groups + tl.load(groups + i_j)
    origin = (tl.load(first_page + i_j) * PS).to(tl.int32)
    first, stop = tier_rows(tl.load(num_rows + i_j).to(tl.int32), line, cold, PS, TIER, NUM_TIERS)
    stop = tl.minimum(stop, origin + tl.load(num_src + i_j).to(tl.int32))
    start = origin + tl.program_id(0) * share
    if start >= stop or start + share <= first:
        return

    b_q, bias = window_queries(queries + i_head * W * R * D, R * D, D, R, W, WP, Q, PIECES, PAIRS, BIAS, GAIN, MMA)
    scale *= GAIN[0]
    base = (first_column + i_c).to(tl.int64) * num_pages
    pages = page_table + line * max_pages
    stop = tl.minimum(start + share, stop)
    start = tl.maximum(start, first)
    o_n, o_r = tl.arange(0, N), tl.arange(0, Q // WP)
    is_mean = (tl.arange(0, WP) == 0)[None, None, :]
    page = tile_pages(pages, start, stop, PS, N)
    next_scale = tile_scales(k_scale, page, start, base, PS, N, SCALED)
    for i_t in range(start, stop, N):
        i_row = i_t + o_n
        row, row_scale = tile_rows(page, i_t, base, PS, N), next_scale
        page = tile_pages(pages, i_t + N, stop, PS, N)
        next_scale = tile_scales(k_scale, page, i_t + N, base, PS, N, SCALED)
        b_k = LOAD(k_data, row, tl.full([N], True, tl.int1), D, False, MMA)
        s = products(b_k, b_q, bias, N, Q, PIECES, BIAS, PRECISION)
        if SCALED:
            factor = row_scale.to(tl.float32) * scale
        else:
            factor = tl.full([N], 1.0, tl.float32) * scale
        heads = tl.reshape(s, (N, Q // WP, WP))  # queries that are padding are 0
        weight = tl.where(is_mean, 1.0, (0.5 * factor)[:, None, None] * heads)
        expected = tl.sum(heads * weight, 2) * factor[:, None]
        at = (i_head * R + o_r[None, :]) * max_src + (i_row - origin)[:, None]
        tl.store(logits + at, expected, mask=(i_row < stop)[:, None] & (o_r < R)[None, :])
