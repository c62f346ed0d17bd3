"""Causal attention of chunks of new tokens over paged rows: queries on the M side, rows as they are stored."""

from pagefold.backends.triton.addressing import piece_channels, tier_rows, tile_pages, tile_rows
from pagefold.backends.triton.weights import weight_reference
from pagefold.store.shim import jit, tl


@jit
def prefill_step(
    m,
    l,
    acc,
    b_q,
    q_bias,
    k_data,
    k_scale,
    v_data,
    v_scale,
    row,
    ok,
    visible,
    scale,
    D: tl.constexpr,
    MASKED: tl.constexpr,
    LOAD_K: tl.constexpr,
    K_PIECES: tl.constexpr,
    K_SCALED: tl.constexpr,
    K_MMA: tl.constexpr,
    LOAD_V: tl.constexpr,
    V_PIECES: tl.constexpr,
    V_PAIRS: tl.constexpr,
    V_BIAS: tl.constexpr,
    V_SCALED: tl.constexpr,
    V_MMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of rows for one tile of queries; `visible` bool[M, N] is looked at where MASKED.

    Pieces of V whose channels are neighbours are put together again, which is free here and makes products wider and
    fewer: matrix units are given each operand by a descriptor, and with those of 8 pieces alive in the loop ptxas 12.8
    runs out of uniform registers, spills them and restores some wrongly.
    """
    b_k = LOAD_K(k_data, row, ok, D, True, K_MMA)
    s = tl.dot(b_q[0], b_k[0], input_precision=PRECISION)
    for p in tl.static_range(1, K_PIECES):
        s = tl.dot(b_q[p], b_k[p], s, input_precision=PRECISION)
    if K_SCALED:
        s = (s - q_bias[:, None]) * (tl.load(k_scale + row, mask=ok, other=0.0).to(tl.float32) * scale)[None, :]
    else:
        s = s * scale
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    row_scale = tl.load(v_scale + row, mask=ok, other=0.0).to(tl.float32)[None, :] if V_SCALED else 1.0
    m_new = tl.maximum(m, weight_reference(s, row_scale, 1, V_SCALED))
    alpha = tl.exp2(m - m_new)
    w = tl.exp2(s - m_new[:, None])
    l = l * alpha + tl.sum(w, 1)
    if V_SCALED:
        w = w * row_scale
    b_w = w.to(V_MMA)
    b_v = LOAD_V(v_data, row, ok, D, False, V_MMA)
    new = ()
    total = tl.sum(b_w.to(tl.float32), 1)
    for i in tl.static_range(V_PIECES // V_PAIRS):
        if V_PAIRS == 2:
            values = tl.interleave(b_v[2 * i], b_v[2 * i + 1])
        else:
            values = b_v[i]
        if V_BIAS[i * V_PAIRS] == 0.0:
            new = new + (tl.dot(b_w, values, acc[i] * alpha[:, None], input_precision=PRECISION),)
        else:
            part = tl.dot(b_w, values, input_precision=PRECISION) - (total * V_BIAS[i * V_PAIRS])[:, None]
            new = new + (acc[i] * alpha[:, None] + part,)
    return m_new, l, new


@jit(do_not_specialize=["num_pages", "num_groups", "max_pages"])
def prefill_tile(
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
    tile_chunk,
    tile_first,
    tile_token,
    q_start,
    slots,
    seq_lens,
    group_of,
    column_of,
    scale,
    num_pages,
    num_groups,
    max_pages,
    R: tl.constexpr,
    RP: tl.constexpr,
    BQ: tl.constexpr,
    D: tl.constexpr,
    PS: tl.constexpr,
    N: tl.constexpr,
    TIER: tl.constexpr,
    NUM_TIERS: tl.constexpr,
    DIRECT: tl.constexpr,
    LOAD_K: tl.constexpr,
    K_PIECES: tl.constexpr,
    K_PAIRS: tl.constexpr,
    K_BIAS: tl.constexpr,
    K_GAIN: tl.constexpr,
    K_SCALED: tl.constexpr,
    K_MMA: tl.constexpr,
    LOAD_V: tl.constexpr,
    V_PIECES: tl.constexpr,
    V_PAIRS: tl.constexpr,
    V_BIAS: tl.constexpr,
    V_GAIN: tl.constexpr,
    V_SCALED: tl.constexpr,
    V_MMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (tiles, H): BQ tokens of one chunk with the R query heads of one KV head, over the rows of one tier.

    tile_chunk    int64[tiles]   chunk of the batch
    tile_first    int64[tiles]   its first token inside the chunk
    tile_token    int64[tiles]   where the partial result of its first token goes
    out, lse      float32[tokens, H * R, NUM_TIERS, D] and [tokens, H * R, NUM_TIERS] as in `decode_split`; with DIRECT,
                  out is the result [T, H * R, D] itself
    """
    i_i, i_h = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    i_b, j_0 = tl.load(tile_chunk + i_i), tl.load(tile_first + i_i).to(tl.int32)
    i_q = tl.load(q_start + i_b)
    q_len = (tl.load(q_start + i_b + 1) - i_q).to(tl.int32)
    line = tl.load(slots + i_b) * num_groups + tl.load(group_of + i_h)
    n = (tl.load(seq_lens + i_b) - tl.load(evicted + line)).to(tl.int32)
    first, stop = tier_rows(n, line, cold, PS, TIER, NUM_TIERS)
    past = n - q_len

    o_m, o_n = tl.arange(0, BQ * RP), tl.arange(0, N)
    j, r = j_0 + o_m // RP, o_m % RP
    query_ok = (j < q_len) & (r < R)
    p_q = q + (((i_q + j) * num_heads + i_h) * R + r)[:, None] * D
    b_q = ()
    q_bias = tl.zeros([BQ * RP], tl.float32)
    for p in tl.static_range(K_PIECES):
        o_c = piece_channels(D, K_PIECES, K_PAIRS, p)
        piece = tl.load(p_q + o_c[None, :], mask=query_ok[:, None], other=0.0).to(tl.float32)
        piece = (piece * (K_GAIN[p] / K_GAIN[0])).to(K_MMA)
        q_bias += tl.sum(piece.to(tl.float32), 1) * K_BIAS[p]
        b_q = b_q + (piece,)

    scale *= K_GAIN[0]
    m = tl.full([BQ * RP], -1e30, tl.float32)  # finite, as a query may see no row of this tier
    l = tl.zeros([BQ * RP], tl.float32)
    acc = ()
    for _ in tl.static_range(V_PIECES // V_PAIRS):
        acc = acc + (tl.zeros([BQ * RP, D * V_PAIRS // V_PIECES], tl.float32),)
    base = tl.load(column_of + i_h).to(tl.int64) * num_pages
    pages = page_table + line * max_pages
    # rows [first, open) are seen by every query of the tile, [open, end) by some
    end = tl.minimum(stop, past + tl.minimum(j_0 + BQ, q_len))
    open_row = first + tl.maximum(tl.minimum(end, past + j_0 + 1) - first, 0) // N * N
    page = tile_pages(pages, first, end, PS, N)
    for i_t in range(first, open_row, N):
        row = tile_rows(page, i_t, base, PS, N)
        page = tile_pages(pages, i_t + N, end, PS, N)
        ok = tl.full([N], True, tl.int1)
        m, l, acc = prefill_step(
            m, l, acc, b_q, q_bias, k_data, k_scale, v_data, v_scale, row, ok, ok[None, :], scale, D, False,
            LOAD_K, K_PIECES, K_SCALED, K_MMA, LOAD_V, V_PIECES, V_PAIRS, V_BIAS, V_SCALED, V_MMA, PRECISION,
        )  # fmt: skip
    for i_t in range(open_row, end, N):
        row = tile_rows(tile_pages(pages, i_t, end, PS, N), i_t, base, PS, N)
        ok = i_t + o_n < end
        visible = (i_t + o_n)[None, :] < tl.minimum(past + j + 1, end)[:, None]
        m, l, acc = prefill_step(
            m, l, acc, b_q, q_bias, k_data, k_scale, v_data, v_scale, row, ok, visible, scale, D, True,
            LOAD_K, K_PIECES, K_SCALED, K_MMA, LOAD_V, V_PIECES, V_PAIRS, V_BIAS, V_SCALED, V_MMA, PRECISION,
        )  # fmt: skip

    if DIRECT:
        p_o = out + (((i_q + j) * num_heads + i_h) * R + r)[:, None] * D
    else:
        i_o = ((tl.load(tile_token + i_i) + o_m // RP) * num_heads + i_h) * R + r
        p_o = out + (i_o * NUM_TIERS + TIER)[:, None] * D
        tl.store(lse + i_o * NUM_TIERS + TIER, m + tl.log2(l), mask=query_ok)
    share_of = 1.0 / tl.maximum(l, 1e-30)
    for i in tl.static_range(V_PIECES // V_PAIRS):
        o_c = piece_channels(D, V_PIECES // V_PAIRS, 1, i)
        tl.store(p_o + o_c[None, :], acc[i] * (share_of * V_GAIN[i * V_PAIRS])[:, None], mask=query_ok[:, None])
