"""How much the last queries before a compaction attend to each row, without ever holding the logits of a cache.

Two passes over the keys. The first finds, for each query, the logarithm of its sum of exponentials over all rows it
sees; the second computes the weights again, tile by tile, and reduces them over query heads and over the window.

Keys are few bytes for what is done with them, so instructions and waits count: the page and the scales of a tile are
asked for a tile ahead, and only tiles that not all queries see whole are masked. A head's last tile is read whole as
well, rows behind the last being those of its page or of page 0; they are masked or not stored.
"""

from pagefold.backends.triton.addressing import tier_rows, tile_pages, tile_rows
from pagefold.backends.triton.plan import Shape
from pagefold.store.lowbit import device_hadamard
from pagefold.store.shim import jit, tl

WINDOW = ("first_column", "num_columns", "num_slots", "num_heads")  # integers of `window_of`
SPLIT_ROWS = 2048  # of a program of `window_sums`: a constant, so that no sum depends on who else is in the batch
SHARE = 2048  # rows of a program of `window_weights`
# how the two passes are launched; tiles of the first have 16 rows a warp at least
SUMS, WEIGHTS = Shape(tile=64, warps=4, stages=3), Shape(tile=64, warps=4, stages=3)


@jit
def window_of(
    window, i_c, i_j, members, groups, window_slots, first_column, num_columns, num_slots, num_heads,
    R: tl.constexpr, W: tl.constexpr, D: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """(the R heads' first queries of a window, numbers from there to their next) of job i_j and column
    first_column + i_c.

    window   [L, num_slots, W, num_heads, D] as in `KVView`, or, OWN, what `rotate_window` made of it
    """
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
    """Grid (rows, C, J): rotated [J, C, W, R, D], the queries of each head in the frame K is stored in."""
    i_c, i_j = tl.program_id(1), tl.program_id(2)
    queries, row_size = window_of(
        window, i_c, i_j, members, groups, window_slots, first_column, num_columns, num_slots, num_heads, R, W, D, False
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
    at u * row_size + r * D. What all pieces have of their gain, GAIN[0], is left to the scale of the logits.

    Queries are read as they lie, in wide words, and put in order in registers."""
    o_q, o_d = tl.arange(0, Q), tl.arange(0, D * PAIRS // P)
    r, u = o_q // WP, o_q % WP
    at = (u * row_size + r * D)[:, None] + o_d[None, :]
    mask = ((r < R) & (u < W))[:, None]
    b_q = ()
    bias = tl.zeros([Q], tl.float32)
    for part in tl.static_range(P // PAIRS):
        x = tl.load(window + at + part * (D * PAIRS // P), mask=mask, other=0.0)
        if PAIRS == 2:
            halves = tl.split(tl.reshape(x, (Q, D // P, 2)))
        else:
            halves = (x,)
        for half in tl.static_range(PAIRS):
            piece = (halves[half].to(tl.float32) * (GAIN[part * PAIRS + half] / GAIN[0])).to(MMA)
            bias += tl.sum(piece.to(tl.float32), 1) * BIAS[part * PAIRS + half]
            b_q = b_q + (tl.trans(piece),)
    return b_q, bias


@jit
def tile_scales(k_scale, page, i_t, base, PS: tl.constexpr, N: tl.constexpr, SCALED: tl.constexpr):
    """Scales of the rows [i_t, i_t + N) on their pages, float16[N], if rows have any."""
    scales = 1.0
    if SCALED:
        scales = tl.load(k_scale + tile_rows(page, i_t, base, PS, N))
    return scales


@jit
def products(
    b_k, b_q, bias, N: tl.constexpr, Q: tl.constexpr, PIECES: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr
):
    """float32[N, Q] of rows in pieces as stored, their scales left out, with what `window_queries` gave."""
    s = tl.zeros([N, Q], tl.float32)
    for p in tl.static_range(PIECES):
        s = tl.dot(b_k[p], b_q[p], s, input_precision=PRECISION)
    if BIAS[0] != 0.0:
        s -= bias[None, :]
    return s


@jit
def window_logits(
    b_k, row_scale, b_q, bias, scale, N: tl.constexpr, Q: tl.constexpr, PIECES: tl.constexpr, BIAS: tl.constexpr,
    SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """float32[N, Q] of rows in pieces as stored, base 2 if `scale` is."""
    s = products(b_k, b_q, bias, N, Q, PIECES, BIAS, PRECISION)
    if SCALED:
        return s * (row_scale.to(tl.float32) * scale)[:, None]
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
    STRIDE: tl.constexpr,
    Q: tl.constexpr,
    D: tl.constexpr,
    PS: tl.constexpr,
    N: tl.constexpr,
    LANES: tl.constexpr,
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

    Sums and maxima run in lanes: rows that are equal modulo LANES, or 8 apart in one of its 16s, are those that matrix
    units leave in one thread. So no tile makes threads exchange or wait, and lanes meet once, at the end.

    window   as in `window_of`
    sums     float32[J, C, NUM_TIERS, splits, Q], -inf where nothing is seen; any number for queries that are padding
    scale    > 0
    LANES    16 rows a warp
    """
    i_s, i_c, i_j = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_head = i_j.to(tl.int64) * tl.num_programs(1) + i_c
    line = tl.load(slots + i_j) * num_groups + tl.load(groups + i_j)
    n = tl.load(num_rows + i_j).to(tl.int32)
    first, stop = tier_rows(n, line, cold, PS, TIER, NUM_TIERS)
    start = first + i_s * split_rows
    stop = tl.minimum(start + split_rows, stop)
    o_q, o_n = tl.arange(0, Q), tl.arange(0, N)
    seen = tl.minimum(n - (W - 1 - o_q % WP) * STRIDE, stop)
    scale *= GAIN[0]
    queries, row_size = window_of(
        window, i_c, i_j, members, groups, window_slots, first_column, num_columns, num_slots, num_heads, R, W, D, OWN
    )
    b_q, bias = window_queries(queries, row_size, D, R, W, WP, Q, PIECES, PAIRS, BIAS, GAIN, MMA)
    pages = page_table + line * max_pages
    base = (first_column + i_c).to(tl.int64) * num_pages
    m = tl.full([LANES // 16, 8, Q], -1e30, tl.float32)
    l = tl.zeros([LANES // 16, 8, Q], tl.float32)
    page = tile_pages(pages, start, stop, PS, N)
    next_scale = tile_scales(k_scale, page, start, base, PS, N, SCALED)
    for i_t in range(start, stop, N):
        row, row_scale = tile_rows(page, i_t, base, PS, N), next_scale
        page = tile_pages(pages, i_t + N, stop, PS, N)
        next_scale = tile_scales(k_scale, page, i_t + N, base, PS, N, SCALED)
        b_k = LOAD(k_data, row, tl.full([N], True, tl.int1), D, False, MMA)
        s = window_logits(b_k, row_scale, b_q, bias, 1.0, N, Q, PIECES, BIAS, SCALED, PRECISION)
        if i_t + N > tl.minimum(stop, n - (W - 1) * STRIDE):
            s = tl.where((i_t + o_n)[:, None] < seen[None, :], s, float("-inf"))
        s = tl.reshape(s, (N // LANES, LANES // 16, 2, 8, Q))
        m_new = tl.maximum(m, tl.max(tl.max(s, 2), 0) * scale)
        w = tl.exp2(s * scale - m_new[None, :, None, :, :])
        l = l * tl.exp2(m - m_new) + tl.sum(tl.sum(w, 2), 0)
        m = m_new
    m = tl.reshape(m, (LANES // 2, Q))
    most = tl.max(m, 0)
    l = tl.sum(tl.reshape(l, (LANES // 2, Q)) * tl.exp2(m - most[None, :]), 0)
    part = (i_head * NUM_TIERS + TIER) * tl.num_programs(0) + i_s
    tl.store(sums + part * Q + o_q, most + tl.log2(l))


@jit
def log_of_sums(sums, splits, o_q, Q: tl.constexpr, NUM_TIERS: tl.constexpr, S: tl.constexpr = 16):
    """float32[Q]: log2 of the sum of exponentials over all rows, from sums [NUM_TIERS, splits, Q]; inf, the logarithm
    that leaves no weight, where nothing is seen. S splits at a time, each tier from its first: splits that only a
    longer neighbour has are zeros at the end, which change no rounding."""
    m = tl.full([Q], -1e30, tl.float32)
    total = tl.zeros([Q], tl.float32)
    for tier in tl.static_range(NUM_TIERS):
        for i in range(0, splits, S):
            i_s = i + tl.arange(0, S)
            at = ((tier * splits + i_s) * Q)[:, None] + o_q[None, :]
            part = tl.load(sums + at, mask=(i_s < splits)[:, None], other=float("-inf"))
            m_new = tl.maximum(m, tl.max(part, 0))
            total = total * tl.exp2(m - m_new) + tl.sum(tl.exp2(part - m_new[None, :]), 0)
            m = m_new
    return tl.where(total == 0.0, float("inf"), m + tl.log2(total))


@jit
def inverse_length(
    b_k, row_scale, N: tl.constexpr, PIECES: tl.constexpr, BIAS: tl.constexpr, GAIN: tl.constexpr, SCALED: tl.constexpr
):
    """What `row_lengths` gives as INVERSE of rows, from their pieces as stored: float32[N]."""
    squares = tl.zeros([N], tl.float32)
    for p in tl.static_range(PIECES):
        wide = (b_k[p].to(tl.float32) - BIAS[p]) * GAIN[p]
        squares += tl.sum(wide * wide, 1)
    length = tl.sqrt(squares)
    if SCALED:  # a row shorter than 1e-6 counts as one of that length
        factor = row_scale.to(tl.float32)
        return factor / tl.maximum(length * factor, 1e-6)
    else:
        return 1.0 / tl.maximum(length, 1e-6)


@jit(do_not_specialize=[*WINDOW, "splits", "max_src", "stride", "num_pages", "num_groups", "max_pages", "share"])
def window_weights(
    window,
    k_data,
    k_scale,
    sums,
    scores,
    inverse,
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
    splits,
    max_src,
    stride,
    num_pages,
    num_groups,
    max_pages,
    R: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    STRIDE: tl.constexpr,
    Q: tl.constexpr,
    D: tl.constexpr,
    PS: tl.constexpr,
    N: tl.constexpr,
    TIER: tl.constexpr,
    NUM_TIERS: tl.constexpr,
    OWN: tl.constexpr,
    MEAN: tl.constexpr,
    INVERSE: tl.constexpr,
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

    sums      float32[J, C, NUM_TIERS, splits, Q] of `window_sums`
    inverse   INVERSE: float32[J, C, stride], as `row_lengths` makes it
    """
    # the last heads first: of their keys, the first pass has left some in the L2 cache
    i_c, i_j = tl.num_programs(1) - 1 - tl.program_id(1), tl.num_programs(2) - 1 - tl.program_id(2)
    i_head = i_j.to(tl.int64) * tl.num_programs(1) + i_c
    line = tl.load(slots + i_j) * num_groups + tl.load(groups + i_j)
    n = tl.load(num_rows + i_j).to(tl.int32)
    origin = (tl.load(first_page + i_j) * PS).to(tl.int32)
    first, stop = tier_rows(n, line, cold, PS, TIER, NUM_TIERS)
    stop = tl.minimum(stop, origin + tl.load(num_src + i_j).to(tl.int32))
    start = origin + tl.program_id(0) * share
    if start >= stop or start + share <= first:
        return

    o_q, o_n = tl.arange(0, Q), tl.arange(0, N)
    lse = log_of_sums(sums + i_head * NUM_TIERS * splits * Q, splits, o_q, Q, NUM_TIERS)
    lse = tl.where((o_q % WP < W) & (o_q // WP < R), lse, float("inf"))
    scale *= GAIN[0]
    queries, row_size = window_of(
        window, i_c, i_j, members, groups, window_slots, first_column, num_columns, num_slots, num_heads, R, W, D, OWN
    )
    b_q, bias = window_queries(queries, row_size, D, R, W, WP, Q, PIECES, PAIRS, BIAS, GAIN, MMA)
    base = (first_column + i_c).to(tl.int64) * num_pages
    pages = page_table + line * max_pages
    seen = n - (W - 1 - o_q % WP) * STRIDE
    stop = tl.minimum(start + share, stop)
    start = tl.maximum(start, first)
    page = tile_pages(pages, start, stop, PS, N)
    next_scale = tile_scales(k_scale, page, start, base, PS, N, SCALED)
    for i_t in range(start, stop, N):
        i_row = i_t + o_n
        row, row_scale = tile_rows(page, i_t, base, PS, N), next_scale
        page = tile_pages(pages, i_t + N, stop, PS, N)
        next_scale = tile_scales(k_scale, page, i_t + N, base, PS, N, SCALED)
        b_k = LOAD(k_data, row, tl.full([N], True, tl.int1), D, False, MMA)
        s = window_logits(b_k, row_scale, b_q, bias, scale, N, Q, PIECES, BIAS, SCALED, PRECISION)
        w = tl.exp2(s - lse[None, :])
        if i_t + N > n - (W - 1) * STRIDE:
            w = tl.where(i_row[:, None] < seen[None, :], w, 0.0)
        heads = tl.reshape(w, (N, Q // WP, WP))
        if MEAN:
            best = tl.sum(heads, 1) * (1 / R)
        else:
            best = tl.max(heads, 1)
        tl.store(scores + i_head * max_src + i_row - origin, tl.sum(best, 1) * (1 / W), mask=i_row < stop)
        if INVERSE:
            length = inverse_length(b_k, row_scale, N, PIECES, BIAS, GAIN, SCALED)
            tl.store(inverse + i_head * stride + i_row - origin, length, mask=i_row < stop)
