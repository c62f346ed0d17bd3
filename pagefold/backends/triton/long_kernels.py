"""Kernels around the library's attention: rows decoded for it, queries put in place, partial results merged."""

from pagefold.backends.triton.addressing import tier_rows, tile_pages, tile_rows
from pagefold.backends.triton.rows import decoded
from pagefold.store.shim import jit, tl


@jit(do_not_specialize=["slot", "first_row", "num_rows", "stop_row", "num_pages", "num_groups", "max_pages"])
def decode_rows(
    k_data,
    k_scale,
    v_data,
    v_scale,
    k,
    v,
    page_table,
    cold,
    heads,
    rest,
    group_of,
    column_of,
    slot,
    first_row,
    num_rows,
    stop_row,
    num_pages,
    num_groups,
    max_pages,
    D: tl.constexpr,
    PS: tl.constexpr,
    N: tl.constexpr,
    TIER: tl.constexpr,
    NUM_TIERS: tl.constexpr,
    LOAD_K: tl.constexpr,
    K_PIECES: tl.constexpr,
    K_BIAS: tl.constexpr,
    K_GAIN: tl.constexpr,
    K_SCALED: tl.constexpr,
    K_ROTATE: tl.constexpr,
    LOAD_V: tl.constexpr,
    V_PIECES: tl.constexpr,
    V_BIAS: tl.constexpr,
    V_GAIN: tl.constexpr,
    V_SCALED: tl.constexpr,
    V_ROTATE: tl.constexpr,
):
    """Grid (tiles, h): the rows [first_row, first_row + num_rows) of heads[h] that lie in one tier, as k, v [num_rows,
    h, D] in the model's frame; the hot tier's launch writes zeros from row stop_row + rest[h] on. first_row is a
    multiple of N."""
    i_i, i_h = tl.program_id(0), tl.program_id(1)
    head = tl.load(heads + i_h)
    line = slot.to(tl.int64) * num_groups + tl.load(group_of + head)
    n = (stop_row + tl.load(rest + i_h)).to(tl.int32)
    first, stop = tier_rows(n, line, cold, PS, TIER, NUM_TIERS)
    i_t = first_row + i_i * N
    i_row = i_t + tl.arange(0, N)
    ok = (i_row >= first) & (i_row < stop)
    if TIER == 0:
        written = ok | (i_row >= n)
        if i_t + N <= tl.minimum(first, n):
            return
    else:
        written = ok
        if i_t >= stop:
            return
    written = written & (i_row < first_row + num_rows)
    base = tl.load(column_of + head).to(tl.int64) * num_pages
    row = tile_rows(tile_pages(page_table + line * max_pages, i_t, stop, PS, N), i_t, base, PS, N)
    place = (i_row - first_row).to(tl.int64) * tl.num_programs(1) + i_h
    to = place[:, None] * D + tl.arange(0, D)[None, :]
    b_k = decoded(k_data, k_scale, row, ok, N, D, K_ROTATE, LOAD_K, K_PIECES, K_BIAS, K_GAIN, K_SCALED)
    tl.store(k + to, tl.where(ok[:, None], b_k, 0.0), mask=written[:, None])
    b_v = decoded(v_data, v_scale, row, ok, N, D, V_ROTATE, LOAD_V, V_PIECES, V_BIAS, V_GAIN, V_SCALED)
    tl.store(v + to, tl.where(ok[:, None], b_v, 0.0), mask=written[:, None])


@jit(do_not_specialize=["num_queries", "num_tokens", "num_heads"])
def place_queries(
    q,
    to,
    heads,
    rest,
    num_queries,
    num_tokens,
    num_heads,
    R: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Grid (tiles, h * R): to[t, i] = q[t, heads[i // R] * R + i % R] of q [num_tokens, num_heads, D], to [num_queries,
    h * R, D]; with SHIFT, to[t + rest[i // R], i]. The others become 0."""
    i_h = tl.program_id(1)
    i_t = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    i_from = i_t
    if SHIFT:
        i_from -= tl.load(rest + i_h // R)
    ok = (i_from >= 0) & (i_from < num_tokens)
    i_from = i_from * num_heads + tl.load(heads + i_h // R) * R + i_h % R
    o_d = tl.arange(0, D)[None, :]
    b_q = tl.load(q + i_from[:, None] * D + o_d, mask=ok[:, None], other=0.0)
    i_to = i_t * tl.num_programs(1) + i_h
    tl.store(to + i_to[:, None] * D + o_d, b_q, mask=(i_t < num_queries)[:, None])


@jit(do_not_specialize=["num_parts", "num_tokens", "num_heads"])
def merge_parts(
    parts,
    part_lse,
    out,
    heads,
    rest,
    num_parts,
    num_tokens,
    num_heads,
    square_head_stride,
    square_token_stride,
    square_lse_stride,
    head_stride,
    token_stride,
    lse_stride,
    ROOM: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
):
    """Grid (tiles, h * R): N tokens of a query head.

    parts      ROOM times [h * R, queries, D], rows contiguous; the first num_parts count. The first has the tokens from
               rest[h] on, the others from 0 on
    part_lse   ROOM times float32[h * R, queries], natural logarithms
    out        [tokens, num_heads, D]
    heads      int64[h]
    rest       int64[h]
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    i_h = tl.program_id(1).to(tl.int64)
    i_t = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    o_d = tl.arange(0, D)[None, :]
    ok = i_t < num_tokens
    i_s = i_t + tl.load(rest + i_h // R)
    i_lse = i_h * lse_stride + i_t
    i_part = (i_h * head_stride + i_t * token_stride)[:, None] + o_d

    first_lse = tl.load(part_lse[0] + i_h * square_lse_stride + i_s, mask=ok, other=0.0) * LOG2_E
    m = first_lse
    for p in tl.static_range(1, ROOM):
        if p < num_parts:
            m = tl.maximum(m, tl.load(part_lse[p] + i_lse, mask=ok, other=0.0) * LOG2_E)
    total = tl.exp2(first_lse - m)
    i_square = (i_h * square_head_stride + i_s * square_token_stride)[:, None] + o_d
    result = tl.load(parts[0] + i_square, mask=ok[:, None], other=0.0).to(tl.float32) * total[:, None]
    for p in tl.static_range(1, ROOM):
        if p < num_parts:
            weight = tl.exp2(tl.load(part_lse[p] + i_lse, mask=ok, other=0.0) * LOG2_E - m)
            o = tl.load(parts[p] + i_part, mask=ok[:, None], other=0.0).to(tl.float32)
            result += o * weight[:, None]
            total += weight
    i_out = i_t * num_heads + tl.load(heads + i_h // R) * R + i_h % R
    tl.store(out + i_out[:, None] * D + o_d, result / total[:, None], mask=ok[:, None])
