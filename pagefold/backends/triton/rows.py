"""Kernels that write, read and move single rows, and turn them between frames."""

from pagefold.store.lowbit import device_hadamard
from pagefold.store.shim import jit, tl


@jit(do_not_specialize=["num_items", "num_pages", "num_groups", "max_pages"])
def append_rows(
    k,
    v,
    k_data,
    k_scale,
    v_data,
    v_scale,
    rows,
    page_table,
    evicted,
    positions,
    token_slots,
    group_of,
    column_of,
    k_stride,
    v_stride,
    num_items,
    num_pages,
    num_groups,
    max_pages,
    H: tl.constexpr,
    D: tl.constexpr,
    PS: tl.constexpr,
    N: tl.constexpr,
    STORE_K: tl.constexpr,
    K_OPTIONS: tl.constexpr,
    STORE_V: tl.constexpr,
    V_OPTIONS: tl.constexpr,
):
    """Encode N (token, head) items of k, v [T, H, D] into the hot tier; `rows` int64[T, H] says where they went."""
    item = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    ok = item < num_items
    i_t, i_h = item // H, item % H
    line = tl.load(token_slots + i_t, mask=ok, other=0) * num_groups + tl.load(group_of + i_h, mask=ok, other=0)
    index = tl.load(positions + i_t, mask=ok, other=0) - tl.load(evicted + line, mask=ok, other=0)
    page = tl.load(page_table + line * max_pages + index // PS, mask=ok, other=0).to(tl.int64)
    row = (tl.load(column_of + i_h, mask=ok, other=0).to(tl.int64) * num_pages + page) * PS + index % PS
    o_d = tl.arange(0, D)
    b_k = tl.load(k + (i_t * k_stride + i_h * D)[:, None] + o_d[None, :], mask=ok[:, None], other=0.0)
    STORE_K(k_data, k_scale, row, ok, b_k.to(tl.float32), D, K_OPTIONS)
    b_v = tl.load(v + (i_t * v_stride + i_h * D)[:, None] + o_d[None, :], mask=ok[:, None], other=0.0)
    STORE_V(v_data, v_scale, row, ok, b_v.to(tl.float32), D, V_OPTIONS)
    tl.store(rows + item, row, mask=ok)


@jit(do_not_specialize=["num_rows"])
def rotate_rows(x, out, num_rows, D: tl.constexpr, N: tl.constexpr):
    """out[num_rows, D] = Hadamard transform of x[num_rows, D]."""
    i = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    ok = i < num_rows
    at = i[:, None] * D + tl.arange(0, D)[None, :]
    b_x = tl.load(x + at, mask=ok[:, None], other=0.0).to(tl.float32)
    tl.store(out + at, device_hadamard(b_x, N, D), mask=ok[:, None])


@jit
def piece_numbers(x, p: tl.constexpr, BIAS: tl.constexpr, GAIN: tl.constexpr):
    return (x[p] - BIAS[p]) * GAIN[p]


@jit
def pair_numbers(x, p: tl.constexpr, BIAS: tl.constexpr, GAIN: tl.constexpr):
    """Pieces p and p + 1, whose channels are neighbours."""
    return tl.interleave(piece_numbers(x, p, BIAS, GAIN), piece_numbers(x, p + 1, BIAS, GAIN))


@jit
def decoded(
    data,
    scale,
    row,
    ok,
    N: tl.constexpr,
    D: tl.constexpr,
    ROTATE: tl.constexpr,
    LOAD: tl.constexpr,
    PIECES: tl.constexpr,
    BIAS: tl.constexpr,
    GAIN: tl.constexpr,
    SCALED: tl.constexpr,
):
    """float32[N, D] of rows in the model's frame: pieces side by side, pairs of channels first, then parts of a row."""
    x = LOAD(data, row, ok, D, False, tl.float32)
    if PIECES == 1:
        whole = piece_numbers(x, 0, BIAS, GAIN)
    elif PIECES == 2:
        whole = pair_numbers(x, 0, BIAS, GAIN)
    elif PIECES == 4:
        halves = tl.join(pair_numbers(x, 0, BIAS, GAIN), pair_numbers(x, 2, BIAS, GAIN))
        whole = tl.reshape(tl.permute(halves, (0, 2, 1)), (N, D))
    else:
        even = tl.join(pair_numbers(x, 0, BIAS, GAIN), pair_numbers(x, 4, BIAS, GAIN))
        odd = tl.join(pair_numbers(x, 2, BIAS, GAIN), pair_numbers(x, 6, BIAS, GAIN))
        whole = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), (N, D))
    if SCALED:
        whole = whole * tl.load(scale + row, mask=ok, other=0.0).to(tl.float32)[:, None]
    if ROTATE:
        whole = device_hadamard(whole, N, D)
    return whole


@jit(do_not_specialize=["num_rows"])
def read_rows(
    data,
    scale,
    rows,
    tiers,
    out,
    num_rows,
    TIER: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    ROTATE: tl.constexpr,
    LOAD: tl.constexpr,
    PIECES: tl.constexpr,
    BIAS: tl.constexpr,
    GAIN: tl.constexpr,
    SCALED: tl.constexpr,
):
    """out[i] = row rows[i] of a plane, decoded, where tiers[i] == TIER."""
    i = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    ok = (i < num_rows) & (tl.load(tiers + i, mask=i < num_rows, other=-1) == TIER)
    row = tl.load(rows + i, mask=ok, other=0)
    x = decoded(data, scale, row, ok, N, D, ROTATE, LOAD, PIECES, BIAS, GAIN, SCALED)
    tl.store(out + i[:, None] * D + tl.arange(0, D)[None, :], x, mask=ok[:, None])


@jit(do_not_specialize=["num_rows"])
def recode_rows(
    data,
    scale,
    to_data,
    to_scale,
    rows,
    to_rows,
    tiers,
    num_rows,
    TIER: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    ROTATE: tl.constexpr,
    LOAD: tl.constexpr,
    PIECES: tl.constexpr,
    BIAS: tl.constexpr,
    GAIN: tl.constexpr,
    SCALED: tl.constexpr,
    STORE: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Row rows[i] of one plane, decoded, becomes row to_rows[i] of another, encoded, where tiers[i] == TIER."""
    i = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    ok = (i < num_rows) & (tl.load(tiers + i, mask=i < num_rows, other=-1) == TIER)
    row = tl.load(rows + i, mask=ok, other=0)
    x = decoded(data, scale, row, ok, N, D, ROTATE, LOAD, PIECES, BIAS, GAIN, SCALED)
    STORE(to_data, to_scale, tl.load(to_rows + i, mask=ok, other=0), ok, x, D, OPTIONS)


@jit(do_not_specialize=["num_rows"])
def copy_rows(
    src,
    dst,
    rows,
    to_rows,
    tiers,
    num_rows,
    width,
    TIER: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
):
    """dst[to_rows[i]] = src[rows[i]], `width` words each (WIDTH, the next power of two), where tiers[i] == TIER."""
    i = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    ok = (i < num_rows) & (tl.load(tiers + i, mask=i < num_rows, other=-1) == TIER)
    row, to = tl.load(rows + i, mask=ok, other=0), tl.load(to_rows + i, mask=ok, other=0)
    o_w = tl.arange(0, WIDTH)
    mask = ok[:, None] & (o_w < width)[None, :]
    x = tl.load(src + row[:, None] * width + o_w[None, :], mask=mask)
    tl.store(dst + to[:, None] * width + o_w[None, :], x, mask=mask)
