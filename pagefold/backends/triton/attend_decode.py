"""Attention of one new token per sequence: split over rows, all query heads of a KV head together, then merged.

Rows (tokens) and channels lie on the M side of the matrix products and query heads on the N side, which may be as
short as 8: scores^T = K q^T and out^T = V^T p^T. Rows are read as they are stored: what a format packs together comes
as several tiles of 16-bit operands (see `DeviceCodec`), its bias is taken off per tile, its scale multiplies scores
(K) and probabilities (V).

Codes come by asynchronous copies, tiles ahead; scales are too short for those, so they are read a tile ahead by hand: a
load that is waited for in every tile takes longer than the tile. Sums over rows are left to the end, or to the matrix
units, because threads would have to exchange them in every tile; only the maximum is.
"""

from pagefold.backends.triton.addressing import piece_channels, tier_rows, tile_pages, tile_rows
from pagefold.backends.triton.ahead import start_next_and_wait
from pagefold.backends.triton.weights import weight_reference
from pagefold.store.lowbit import device_hadamard
from pagefold.store.shim import jit, tl


@jit
def tile_scales(k_scale, v_scale, page, i_t, stop, PS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Scales of K and V of the rows [i_t, i_t + N) of a head, 0 from `stop` on; 1 for all where there are none."""
    row, ok = tile_rows(page, i_t, 0, PS, N), tl.arange(0, N) < stop - i_t
    of_k = tl.load(k_scale + row, mask=ok, other=0.0) if K else 1.0
    of_v = tl.load(v_scale + row, mask=ok, other=0.0) if V else 1.0
    return of_k, of_v


@jit(do_not_specialize=["num_pages", "num_groups", "max_pages", "min_rows", "first_split", "all_splits", "width"])
def decode_split(
    q,
    k_data,
    k_scale,
    v_data,
    v_scale,
    out,
    lse,
    page_table,
    evicted,
    cold,
    tokens,
    slots,
    seq_lens,
    group_of,
    column_of,
    scale,
    num_pages,
    num_groups,
    max_pages,
    min_rows,
    first_split,
    all_splits,
    table,
    width,
    H: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    PS: tl.constexpr,
    N: tl.constexpr,
    TIER: tl.constexpr,
    NUM_TIERS: tl.constexpr,
    DIRECT: tl.constexpr,
    DEALT: tl.constexpr,
    LOAD_K: tl.constexpr,
    K_PIECES: tl.constexpr,
    K_PAIRS: tl.constexpr,
    K_BIAS: tl.constexpr,
    K_GAIN: tl.constexpr,
    K_SCALED: tl.constexpr,
    K_WIDTH: tl.constexpr,
    K_MMA: tl.constexpr,
    LOAD_V: tl.constexpr,
    V_PIECES: tl.constexpr,
    V_PAIRS: tl.constexpr,
    V_BIAS: tl.constexpr,
    V_GAIN: tl.constexpr,
    V_SCALED: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_MMA: tl.constexpr,
    PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Grid (splits, H, B): one split of the rows of one KV head of one sequence that lie in one tier; with DEALT, grid
    (programs): what `table`, the layer's line of a `Deal` with `width` heads, has for the program.

    q              [T, H * R, D], in the frame K is stored in
    out, lse       float32[B, H * R, all_splits, D] normalised, and log2 of the sum of exponentials, -inf for no rows;
                   with DIRECT, out is the result [T, H * R, D] itself; with DEALT, splits are [shares, R], of which
                   first_split is the tier's first
    scale          softmax scale * log2(e)
    M              R, rounded up to what the matrix units take
    K_WIDTH        entries of a row of k_data; V_WIDTH of v_data
    AHEAD          started before the kernel in front has ended
    """
    if AHEAD:
        start_next_and_wait()
    num_heads: tl.constexpr = H
    if DEALT:
        items = table + 2 * width
        i_head, i_s = tl.load(items + 2 * tl.program_id(0)), tl.load(items + 2 * tl.program_id(0) + 1)
        if i_head < 0:
            return
        i_b, i_h = i_head // num_heads, i_head % num_heads
    else:
        i_s, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_q = tl.load(tokens + i_b)
    line = tl.load(slots + i_b) * num_groups + tl.load(group_of + i_h)
    n = (tl.load(seq_lens + i_b) - tl.load(evicted + line)).to(tl.int32)
    first, stop = tier_rows(n, line, cold, PS, TIER, NUM_TIERS)
    if DEALT:
        share = tl.load(items + 2 * tl.num_programs(0))
    else:
        share = tl.maximum(tl.cdiv(tl.cdiv(stop - first, tl.num_programs(0)), N) * N, min_rows)
    start = first + i_s * share
    stop = tl.minimum(start + share, stop)

    o_m, o_n = tl.arange(0, M), tl.arange(0, N)
    head_ok = o_m < R
    if DEALT:
        i_row = (first_split + tl.load(table + i_head) + i_s).to(tl.int64) * R + o_m
    else:
        i_row = (i_b.to(tl.int64) * num_heads * R + i_h * R + o_m) * all_splits + first_split + i_s
    if not DIRECT:  # noqa: SIM102 - only this is known to the compiler
        if start >= stop:
            tl.store(lse + i_row, tl.full([M], float("-inf"), tl.float32), mask=head_ok)
            return

    # rows are counted from the head's first, so that their numbers fit 32 bits (a pool has no more rows a column)
    first_row = tl.load(column_of + i_h).to(tl.int64) * num_pages * PS
    k_data, v_data = k_data + first_row * K_WIDTH, v_data + first_row * V_WIDTH
    k_scale, v_scale = k_scale + first_row, v_scale + first_row
    pages = page_table + line * max_pages
    page = tile_pages(pages, start, stop, PS, N)
    next_k_scale, next_v_scale = tile_scales(k_scale, v_scale, page, start, stop, PS, N, K_SCALED, V_SCALED)
    p_q = q + ((i_q * num_heads + i_h) * R + o_m[None, :]) * D
    b_q = ()
    q_bias = tl.zeros([D // K_PIECES, M], tl.float32)
    for p in tl.static_range(K_PIECES):
        o_c = piece_channels(D, K_PIECES, K_PAIRS, p)
        piece = tl.load(p_q + o_c[:, None], mask=head_ok[None, :], other=0.0).to(tl.float32)
        piece = (piece * (K_GAIN[p] / K_GAIN[0])).to(K_MMA)
        q_bias += piece.to(tl.float32) * K_BIAS[p]
        b_q = b_q + (piece,)
    q_bias = tl.sum(q_bias, 0)

    scale *= K_GAIN[0]
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([N, M], tl.float32)
    acc = ()
    for _ in tl.static_range(V_PIECES):
        acc = acc + (tl.zeros([D // V_PIECES, M], tl.float32),)
    ones = tl.full([D // V_PIECES, N], 1.0, V_MMA)  # times the weights: their sum, where the bias is taken off
    for i_t in range(start, stop, N):
        row, ok = tile_rows(page, i_t, 0, PS, N), o_n < stop - i_t
        of_k, of_v = next_k_scale, next_v_scale
        page = tile_pages(pages, i_t + N, stop, PS, N)
        next_k_scale, next_v_scale = tile_scales(k_scale, v_scale, page, i_t + N, stop, PS, N, K_SCALED, V_SCALED)
        b_k = LOAD_K(k_data, row, ok, D, False, K_MMA)
        s = tl.broadcast_to(-q_bias[None, :], (N, M))
        for p in tl.static_range(K_PIECES):
            s = tl.dot(b_k[p], b_q[p], s, input_precision=PRECISION)
        if K_SCALED:
            s = s * (of_k.to(tl.float32) * scale)[:, None]
        else:
            s = s * scale
        s = tl.where(ok[:, None], s, float("-inf"))
        row_scale = of_v.to(tl.float32)[:, None] if V_SCALED else 1.0
        m_new = tl.maximum(m, weight_reference(s, row_scale, 0, V_SCALED))
        alpha = tl.exp2(m - m_new)
        w = tl.exp2(s - m_new[None, :])
        l = l * alpha[None, :] + w
        m = m_new
        if V_SCALED:
            w = w * row_scale
        b_w = w.to(V_MMA)
        b_v = LOAD_V(v_data, row, ok, D, True, V_MMA)
        new = ()
        if V_BIAS[0] == 0.0:
            for p in tl.static_range(V_PIECES):
                new = new + (tl.dot(b_v[p], b_w, acc[p] * alpha[None, :], input_precision=PRECISION),)
        else:
            total = tl.dot(ones, b_w, input_precision=PRECISION)
            for p in tl.static_range(V_PIECES):
                part = tl.dot(b_v[p], b_w, input_precision=PRECISION) - total * V_BIAS[p]
                new = new + (acc[p] * alpha[None, :] + part,)
        acc = new

    l = tl.sum(l, 0)
    share_of = 1.0 / tl.maximum(l, 1e-30)
    if DIRECT:
        p_o = out + ((i_q * num_heads + i_h) * R + o_m[None, :]) * D
    else:
        p_o = out + i_row[None, :] * D
        tl.store(lse + i_row, m + tl.log2(l), mask=head_ok)
    for p in tl.static_range(V_PIECES):
        o_c = piece_channels(D, V_PIECES, V_PAIRS, p)
        tl.store(p_o + o_c[:, None], acc[p] * (share_of * V_GAIN[p])[None, :], mask=head_ok[None, :])


@jit
def sum_of_parts(partial, lse, first, count, stride, m, D: tl.constexpr, BS: tl.constexpr):
    """(float32[D], float32): normalised parts first, first + stride, ... of a head, `count` of them, each weighted by
    2^(lse - m), added up; and the sum of these weights."""
    o_s, o_d = tl.arange(0, BS), tl.arange(0, D)
    acc, total = tl.zeros([D], tl.float32), 0.0
    for i in range(0, count, BS):
        ok, at = i + o_s < count, first + (i + o_s).to(tl.int64) * stride
        weight = tl.exp2(tl.load(lse + at, mask=ok, other=-float("inf")) - m)
        part = tl.load(partial + at[:, None] * D + o_d[None, :], mask=ok[:, None], other=0.0)
        acc += tl.sum(part * weight[:, None], 0)
        total += tl.sum(weight, 0)
    return acc, total


@jit
def store_merged(out, tokens, i_b, i_h, num_heads, result, total, D: tl.constexpr):
    """out[tokens[i_b], i_h] = result[1, D] / total, 0 for a head without rows."""
    to = (tl.load(tokens + i_b) * num_heads + i_h) * D
    tl.store(out + to + tl.arange(0, D)[None, :], result / tl.maximum(total, 1e-30))


@jit(do_not_specialize=["splits"])
def merge_splits(
    partial,
    lse,
    out,
    tokens,
    splits,
    D: tl.constexpr,
    BS: tl.constexpr,
    ALL: tl.constexpr,
    NUM_TIERS: tl.constexpr,
    ROTATE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Grid (Hq, B): out[tokens[b], h] from its splits, `splits` for each tier; a tier's sum leaves its rows' frame.

    partial   float32[B, Hq, NUM_TIERS * splits, D], not read where lse is -inf
    lse       float32[B, Hq, NUM_TIERS * splits], base 2
    ALL       at least NUM_TIERS * splits
    AHEAD     started before the kernel in front has ended
    """
    if AHEAD:
        start_next_and_wait()
    i_h, i_b = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(0)
    first = (i_b.to(tl.int64) * num_heads + i_h) * NUM_TIERS * splits
    o_all = tl.arange(0, ALL)
    b_lse = tl.load(lse + first + o_all, mask=o_all < NUM_TIERS * splits, other=-float("inf"))
    m = tl.max(b_lse, 0)
    m = tl.where(m == -float("inf"), 0.0, m)
    total = 0.0
    result = tl.zeros([1, D], tl.float32)
    for tier in tl.static_range(NUM_TIERS):
        # a tier's rows lie in its first splits
        of_tier = (o_all >= tier * splits) & (o_all < (tier + 1) * splits)
        used = tl.sum((of_tier & (b_lse != -float("inf"))).to(tl.int32), 0)
        acc, weight = sum_of_parts(partial, lse, first + tier * splits, used, 1, m, D, BS)
        total += weight
        acc = acc[None, :]
        if ROTATE[tier]:
            acc = device_hadamard(acc, 1, D)
        result += acc
    store_merged(out, tokens, i_b, i_h, num_heads, result, total, D)
