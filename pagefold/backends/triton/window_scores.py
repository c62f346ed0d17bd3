"""How much the last queries before a compaction attend to each row, without ever holding the logits of a cache.

Two passes over the keys. The first finds, for each query, the logarithm of its sum of exponentials over all rows it
sees; the second computes the weights again, tile by tile, and reduces them over query heads and over the window.
"""

from pagefold.backends.triton.addressing import piece_channels, tier_rows, tile_pages, tile_rows
from pagefold.store.lowbit import device_hadamard
from pagefold.store.shim import jit, tl

WINDOW = ("first_column", "num_columns", "num_slots", "num_heads")  # integers of `window_of`
SPLIT_ROWS = 2048  # of a program of `window_sums`: a constant, so that no sum depends on who else is in the batch
SHARE = 1024  # rows of a program of `window_weights`


@jit
def window_of(
    window, members, groups, window_slots, first_column, num_columns, num_slots, num_heads,
    R: tl.constexpr, W: tl.constexpr, D: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """(the R heads' first queries of a window, numbers from there to their next) of job `program_id(2)` and column
    first_column + `program_id(1)`.

    window   [L, num_slots, W, num_heads, D] as in `KVView`, or, OWN, what `rotate_window` made of it
    """
    i_c, i_j = tl.program_id(1), tl.program_id(2)
    if OWN:
        return window + (i_j.to(tl.int64) * tl.num_programs(1) + i_c) * W * R * D, R * D
    else:
        member = members + (tl.load(groups + i_j) * num_columns + first_column + i_c) * 2
        line = tl.load(member).to(tl.int64) * num_slots + tl.load(window_slots + i_j)
        return window + line * W * num_heads * D + tl.load(member + 1) * R * D, num_heads * D


@jit(do_not_specialize=WINDOW)
def rotate_window(
    window, rotated, members, groups, window_slots, first_column, num_columns, num_slots, num_heads,
    R: tl.constexpr, W: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Grid (rows, C, J): rotated float32[J, C, W, R, D], the queries of each head in the frame K is stored in."""
    i_c, i_j = tl.program_id(1), tl.program_id(2)
    queries, row_size = window_of(
        window, members, groups, window_slots, first_column, num_columns, num_slots, num_heads, R, W, D, False
    )
    i = tl.program_id(0) * N + tl.arange(0, N)
    o_d = tl.arange(0, D)
    mask = (i < W * R)[:, None]
    x = tl.load(queries + (i // R * row_size + i % R * D)[:, None] + o_d[None, :], mask=mask, other=0.0)
    i_head = i_j.to(tl.int64) * tl.num_programs(1) + i_c
    to = rotated + i_head * W * R * D + i[:, None] * D + o_d[None, :]
    tl.store(to, device_hadamard(x.to(tl.float32), N, D), mask=mask)


@jit
def window_queries(
    window, row_size, D: tl.constexpr, R: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, Q: tl.constexpr,
    P: tl.constexpr, PAIRS: tl.constexpr, BIAS: tl.constexpr, GAIN: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """(pieces [D / P, Q] of the queries of R heads, their bias [Q]); query r * WP + u is query u of head r, which is
    at u * row_size + r * D. What all pieces have of their gain, GAIN[0], is left to the scale of the logits."""
    o_q = tl.arange(0, Q)
    r, u = o_q // WP, o_q % WP
    b_q = ()
    bias = tl.zeros([Q], tl.float32)
    for p in tl.static_range(P):
        at = (u * row_size + r * D)[None, :] + piece_channels(D, P, PAIRS, p)[:, None]
        mask = ((r < R) & (u < W))[None, :]
        piece = (tl.load(window + at, mask=mask, other=0.0).to(tl.float32) * (GAIN[p] / GAIN[0])).to(MMA)
        bias += tl.sum(piece.to(tl.float32), 0) * BIAS[p]
        b_q = b_q + (piece,)
    return b_q, bias


@jit
def window_logits(
    k_data, k_scale, row, ok, b_q, bias, scale, D: tl.constexpr, N: tl.constexpr, Q: tl.constexpr,
    LOAD: tl.constexpr, PIECES: tl.constexpr, SCALED: tl.constexpr, MMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """float32[N, Q], base 2."""
    b_k = LOAD(k_data, row, ok, D, False, MMA)
    s = tl.zeros([N, Q], tl.float32)
    for p in tl.static_range(PIECES):
        s = tl.dot(b_k[p], b_q[p], s, input_precision=PRECISION)
    if SCALED:
        return (s - bias[None, :]) * (tl.load(k_scale + row, mask=ok, other=0.0).to(tl.float32) * scale)[:, None]
    else:
        return s * scale


@jit(do_not_specialize=[*WINDOW, "num_pages", "num_groups", "max_pages", "split_rows"])
def window_sums(
    window,
    k_data,
    k_scale,
    sums,
    members,
    page_table,
    cold,
    slots,
    groups,
    num_rows,
    window_slots,
    first_column,
    num_columns,
    num_slots,
    num_heads,
    scale,
    split_rows,
    num_pages,
    num_groups,
    max_pages,
    R: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    Q: tl.constexpr,
    D: tl.constexpr,
    PS: tl.constexpr,
    N: tl.constexpr,
    TIER: tl.constexpr,
    NUM_TIERS: tl.constexpr,
    OWN: tl.constexpr,
    LOAD: tl.constexpr,
    PIECES: tl.constexpr,
    PAIRS: tl.constexpr,
    BIAS: tl.constexpr,
    GAIN: tl.constexpr,
    SCALED: tl.constexpr,
    MMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (splits, C, J): log2 of each query's sum of exponentials over `split_rows` of the rows of one tier.

    window   as in `window_of`
    sums     float32[J, C, NUM_TIERS, splits, Q], -inf where nothing is seen
    """
    i_s, i_c, i_j = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_head = i_j.to(tl.int64) * tl.num_programs(1) + i_c
    line = tl.load(slots + i_j) * num_groups + tl.load(groups + i_j)
    n = tl.load(num_rows + i_j).to(tl.int32)
    first, stop = tier_rows(n, line, cold, PS, TIER, NUM_TIERS)
    start = first + i_s * split_rows
    stop = tl.minimum(start + split_rows, stop)
    o_q, o_n = tl.arange(0, Q), tl.arange(0, N)
    seen = tl.where(o_q % WP < W, n - W + o_q % WP + 1, 0)
    scale *= GAIN[0]
    queries, row_size = window_of(
        window, members, groups, window_slots, first_column, num_columns, num_slots, num_heads, R, W, D, OWN
    )
    b_q, bias = window_queries(queries, row_size, D, R, W, WP, Q, PIECES, PAIRS, BIAS, GAIN, MMA)
    pages = page_table + line * max_pages
    base = (first_column + i_c).to(tl.int64) * num_pages
    m = tl.full([Q], -1e30, tl.float32)
    l = tl.zeros([Q], tl.float32)
    for i_t in range(start, stop, N):
        row = tile_rows(tile_pages(pages, i_t, stop, PS, N), i_t, base, PS, N)
        s = window_logits(
            k_data, k_scale, row, i_t + o_n < stop, b_q, bias, scale, D, N, Q, LOAD, PIECES, SCALED, MMA, PRECISION
        )
        s = tl.where((i_t + o_n)[:, None] < tl.minimum(seen, stop)[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        l = l * tl.exp2(m - m_new) + tl.sum(tl.exp2(s - m_new[None, :]), 0)
        m = m_new
    part = (i_head * NUM_TIERS + TIER) * tl.num_programs(0) + i_s
    tl.store(sums + part * Q + o_q, m + tl.log2(l))


@jit(do_not_specialize=[*WINDOW, "num_sums", "max_src", "num_pages", "num_groups", "max_pages", "share"])
def window_weights(
    window,
    k_data,
    k_scale,
    sums,
    scores,
    members,
    page_table,
    cold,
    slots,
    groups,
    num_rows,
    window_slots,
    num_src,
    first_page,
    first_column,
    num_columns,
    num_slots,
    num_heads,
    scale,
    share,
    num_sums,
    max_src,
    num_pages,
    num_groups,
    max_pages,
    R: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    Q: tl.constexpr,
    D: tl.constexpr,
    PS: tl.constexpr,
    N: tl.constexpr,
    TIER: tl.constexpr,
    NUM_TIERS: tl.constexpr,
    OWN: tl.constexpr,
    MEAN: tl.constexpr,
    LOAD: tl.constexpr,
    PIECES: tl.constexpr,
    PAIRS: tl.constexpr,
    BIAS: tl.constexpr,
    GAIN: tl.constexpr,
    SCALED: tl.constexpr,
    MMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (stretches of `share` source rows, C, J): scores float32[J, C, max_src], the rows of one tier.

    sums   float32[J, C, num_sums, Q] of `window_sums`, all tiers
    """
    i_i, i_c, i_j = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_head = i_j.to(tl.int64) * tl.num_programs(1) + i_c
    line = tl.load(slots + i_j) * num_groups + tl.load(groups + i_j)
    n = tl.load(num_rows + i_j).to(tl.int32)
    origin = (tl.load(first_page + i_j) * PS).to(tl.int32)
    first, stop = tier_rows(n, line, cold, PS, TIER, NUM_TIERS)
    stop = tl.minimum(stop, origin + tl.load(num_src + i_j).to(tl.int32))
    start = origin + i_i * share
    if start >= stop or start + share <= first:
        return

    o_q, o_n = tl.arange(0, Q), tl.arange(0, N)
    p_s = sums + i_head * num_sums * Q + o_q
    m = tl.load(p_s)
    for i in range(1, num_sums):
        m = tl.maximum(m, tl.load(p_s + i * Q))
    m = tl.maximum(m, -1e30)
    total = tl.zeros([Q], tl.float32)
    for i in range(0, num_sums):
        total += tl.exp2(tl.load(p_s + i * Q) - m)

    scale *= GAIN[0]
    queries, row_size = window_of(
        window, members, groups, window_slots, first_column, num_columns, num_slots, num_heads, R, W, D, OWN
    )
    b_q, bias = window_queries(queries, row_size, D, R, W, WP, Q, PIECES, PAIRS, BIAS, GAIN, MMA)
    base = (first_column + i_c).to(tl.int64) * num_pages
    pages = page_table + line * max_pages
    seen = tl.where((o_q % WP < W) & (o_q // WP < R), n - W + o_q % WP + 1, 0)
    for i_t in range(start, tl.minimum(start + share, stop), N):
        i_row = i_t + o_n
        ok = (i_row >= first) & (i_row < stop)
        row = tile_rows(tile_pages(pages, i_t, stop, PS, N), i_t, base, PS, N)
        s = window_logits(k_data, k_scale, row, ok, b_q, bias, scale, D, N, Q, LOAD, PIECES, SCALED, MMA, PRECISION)
        visible = i_row[:, None] < seen[None, :]
        w = tl.where(visible, tl.exp2(s - m[None, :]) / tl.maximum(total, 1e-30)[None, :], 0.0)
        heads = tl.reshape(w, (N, Q // WP, WP))
        if MEAN:
            best = tl.sum(heads, 1) / R
        else:
            best = tl.max(heads, 1)
        tl.store(scores + i_head * max_src + i_row - origin, tl.sum(best, 1) / W, mask=ok)
