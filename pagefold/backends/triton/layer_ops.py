"""What lies between a layer's matrix products, a kernel each: norms, gates, and heads on their way to the cache."""

import math

import torch
from torch import Tensor

from pagefold.backends.triton.ahead import start_next_and_wait, starts_ahead
from pagefold.backends.triton.plan import next_power_of_2
from pagefold.store.lowbit import device_hadamard
from pagefold.store.shim import jit, tl, triton


@jit
def norm_rows(x, delta, weight, out, n, eps, ADD: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    """Grid (T): out = RMS norm of x [T, n], or, with ADD, of x += delta, which is rounded and stored first.

    AHEAD   started before the kernel in front has ended
    """
    i_t = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BLOCK)
    ok = o_n < n
    if AHEAD:
        start_next_and_wait()
    b_x = tl.load(x + i_t * n + o_n, mask=ok, other=0.0)
    if ADD:
        b_delta = tl.load(delta + i_t * n + o_n, mask=ok, other=0.0)
        b_x = (b_x.to(tl.float32) + b_delta.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + i_t * n + o_n, b_x, mask=ok)
    wide = b_x.to(tl.float32)
    b_w = tl.load(weight + o_n, mask=ok, other=0.0)
    tl.store(out + i_t * n + o_n, wide * tl.rsqrt(tl.sum(wide * wide, 0) / n + eps) * b_w, mask=ok)


@jit
def gate_rows(gate_up, out, n, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    """Grid (T, n / BLOCK): out[T, n] = silu(gate) * up of gate_up[T, 2 n], gate first.

    AHEAD   started before the kernel in front has ended
    """
    i_t = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = o_n < n
    if AHEAD:
        start_next_and_wait()
    gate = tl.load(gate_up + i_t * 2 * n + o_n, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + i_t * 2 * n + n + o_n, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + i_t * n + o_n, gate / (1.0 + tl.exp(-gate)) * up, mask=ok)


@jit
def turned_halves(
    first, second, ok, position, cos_sin, weight, eps, D: tl.constexpr, TURN: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Halves [N, D / 2] of heads, channels [0, D / 2) and the rest, normed and rotated, in their dtype."""
    if TURN:
        dtype: tl.constexpr = first.dtype
        o_d = tl.arange(0, D // 2)
        first, second = first.to(tl.float32), second.to(tl.float32)
        if NORM:
            squares = tl.sum(first * first + second * second, 1)
            scale = tl.rsqrt(squares / D + eps)[:, None]
            first = first * scale * tl.load(weight + o_d)[None, :]
            second = second * scale * tl.load(weight + D // 2 + o_d)[None, :]
        p_c = cos_sin + position[:, None] * D + o_d[None, :]
        cos = tl.load(p_c, mask=ok[:, None], other=0.0)
        sin = tl.load(p_c + D // 2, mask=ok[:, None], other=0.0)
        turned = first * cos - second * sin
        second = (second * cos + first * sin).to(dtype)
        first = turned.to(dtype)
    return first, second


@jit
def joined_halves(first, second, N: tl.constexpr, D: tl.constexpr):
    """float32[N, D]"""
    halves = tl.join(first.to(tl.float32), second.to(tl.float32))
    return tl.reshape(tl.permute(halves, (0, 2, 1)), (N, D))


@jit
def store_halves(out, at, ok, first, second, D: tl.constexpr):
    """To out + at[N]."""
    p_out = out + at[:, None] + tl.arange(0, D // 2)[None, :]
    tl.store(p_out, first, mask=ok[:, None])
    tl.store(p_out + D // 2, second, mask=ok[:, None])


@jit
def row_of(position, line, column, ok, page_table, evicted, num_pages, max_pages, PS: tl.constexpr):
    """Where the rows of tokens at position[N] go, in heads that are in column[N] of their pages and at line[N], slot *
    groups + group, of the tables. Where a program stores them, for it waits here for two loads, one after the other."""
    index = position - tl.load(evicted + line, mask=ok, other=0)
    page = tl.load(page_table + line * max_pages + index // PS, mask=ok, other=0)
    return (column * num_pages + page) * PS + index % PS


@jit(do_not_specialize=["layer", "num_tokens", "num_pages", "num_groups", "max_pages", "num_windows"])
def append_heads(
    qkv,
    q,
    q_rotated,
    window,
    k_data,
    k_scale,
    v_data,
    v_scale,
    states,
    positions,
    token_slots,
    window_slots,
    window_index,
    page_table,
    evicted,
    group_of,
    column_of,
    cos_sin,
    weight,
    eps,
    layer,
    num_tokens,
    num_pages,
    num_groups,
    max_pages,
    num_windows,
    HQ: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    PS: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    WINDOW: tl.constexpr,
    STATE_WIDTHS: tl.constexpr,
    STORE_K: tl.constexpr,
    K_OPTIONS: tl.constexpr,
    STORE_V: tl.constexpr,
    V_OPTIONS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Grid (T / BT * parts): BT tokens and BH heads of the same kind, in parts of the query heads, the key
    heads, then the value heads of qkv [T, HQ + 2 H, D].

    q           [T, HQ, D], queries as attention needs them
    q_rotated   float32[T, HQ, D], their Hadamard transform; only written with ROTATE
    window      [L, window slots, WINDOW, HQ, D], as in `KVView`; not written where WINDOW is 0
    states      planes whose rows are cleared, STATE_WIDTHS entries a row
    cos_sin     float32[positions, 2, D / 2], looked at with TURN
    weight      float32[2, D], looked at with NORM
    AHEAD       started before the kernel in front has ended
    """
    if AHEAD:
        start_next_and_wait()
    N: tl.constexpr = BT * BH
    Q_PARTS: tl.constexpr = (HQ + BH - 1) // BH
    KV_PARTS: tl.constexpr = (H + BH - 1) // BH
    PARTS: tl.constexpr = Q_PARTS + 2 * KV_PARTS
    i_p = tl.program_id(0) % PARTS
    i_kv = i_p - Q_PARTS
    item = tl.arange(0, N)
    i_t = (tl.program_id(0) // PARTS).to(tl.int64) * BT + item // BH
    i_h = tl.where(i_kv < 0, i_p, i_kv % KV_PARTS) * BH + item % BH
    token_ok = i_t < num_tokens
    ok = token_ok & (i_h < tl.where(i_kv < 0, HQ, H))
    # asked for before anything else: the numbers are needed first, the tables' entries only when they are stored
    at = (i_t * (HQ + 2 * H) + tl.where(i_kv < 0, 0, tl.where(i_kv < KV_PARTS, HQ, HQ + H)) + i_h) * D
    p_x = qkv + at[:, None] + tl.arange(0, D // 2)[None, :]
    first = tl.load(p_x, mask=ok[:, None], other=0.0)
    second = tl.load(p_x + D // 2, mask=ok[:, None], other=0.0)
    position = tl.load(positions + i_t, mask=token_ok, other=0)

    if i_kv < 0:
        first, second = turned_halves(first, second, ok, position, cos_sin, weight, eps, D, TURN, NORM)
        to = (i_t * HQ + i_h) * D
        store_halves(q, to, ok, first, second, D)
        if ROTATE:
            rotated = tl.reshape(device_hadamard(joined_halves(first, second, N, D), N, D), (N, 2, D // 2))
            one, other = tl.split(tl.permute(rotated, (0, 2, 1)))
            store_halves(q_rotated, to, ok, one, other, D)
        if WINDOW > 0:
            slot = tl.load(window_slots + i_t, mask=token_ok, other=0)
            index = tl.load(window_index + i_t, mask=token_ok, other=0)
            entry = ((layer * num_windows + slot) * WINDOW + index) * HQ + i_h
            store_halves(window, entry * D, ok & (slot > 0), first, second, D)
    else:
        slot = tl.load(token_slots + i_t, mask=ok, other=0)
        line = slot * num_groups + tl.load(group_of + layer * H + i_h, mask=ok, other=0)
        column = tl.load(column_of + layer * H + i_h, mask=ok, other=0).to(tl.int64)
        if i_kv < KV_PARTS:
            first, second = turned_halves(first, second, ok, position, cos_sin, weight + D, eps, D, TURN, NORM)
            row = row_of(position, line, column, ok, page_table, evicted, num_pages, max_pages, PS)
            STORE_K(k_data, k_scale, row, ok, joined_halves(first, second, N, D), D, K_OPTIONS)
            for i in tl.static_range(len(STATE_WIDTHS)):
                o_w = tl.arange(0, triton.next_power_of_2(STATE_WIDTHS[i]))
                mask = ok[:, None] & (o_w < STATE_WIDTHS[i])[None, :]
                tl.store(states[i] + row[:, None] * STATE_WIDTHS[i] + o_w[None, :], 0, mask=mask)
        else:
            row = row_of(position, line, column, ok, page_table, evicted, num_pages, max_pages, PS)
            STORE_V(v_data, v_scale, row, ok, joined_halves(first, second, N, D), D, V_OPTIONS)


# By whether heads are rotated: (most heads of a batch, heads a program, warps). One head a warp while that does not
# fill the device, then as many as share shuffles and loads of 16 bytes a lane.
TILES = {
    False: ((1024, 1, 1), (6144, 2, 1), (65536, 8, 4), (math.inf, 32, 4)),
    True: ((1024, 1, 1), (6144, 2, 1), (math.inf, 4, 2)),
}


def append_tile(num_tokens: int, num_q: int, num_kv: int, rotate: bool) -> tuple[int, int, int]:
    """(tokens, heads, warps) of a program of `append_heads`, from `TILES`."""
    num_items = num_tokens * (num_q + 2 * num_kv)
    items, warps = next((items, warps) for most, items, warps in TILES[rotate] if num_items <= most)
    heads = min(items, next_power_of_2(num_kv), 8)
    return items // heads, heads, warps


class TritonOps:
    """The layers' part of the backend: float32 inside, rounded once, on contiguous rows."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _normed(x.contiguous(), None, weight, eps)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not x.is_contiguous():
            raise ValueError(
                f"add_rms_norm: x is added to in place and must be contiguous; its strides are {x.stride()}"
            )
        return _normed(x, delta.contiguous(), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        num_tokens, n = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(num_tokens, n, dtype=gate_up.dtype, device=gate_up.device)
        block = 1024 if num_tokens <= 64 else 2048  # many small programs while they are few
        ahead = starts_ahead(out.device)
        gate_rows[(num_tokens, triton.cdiv(n, block))](
            gate_up.contiguous(), out, n, BLOCK=block, AHEAD=ahead, num_warps=4, launch_pdl=ahead
        )
        return out


def _normed(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    out, block, ahead = torch.empty_like(x), next_power_of_2(x.shape[-1]), starts_ahead(x.device)
    norm_rows[(len(x),)](
        x,
        x if delta is None else delta,
        weight,
        out,
        x.shape[-1],
        eps,
        ADD=delta is not None,
        BLOCK=block,
        AHEAD=ahead,
        num_warps=max(1, min(16, block // 512)),  # 16 numbers a lane
        launch_pdl=ahead,
    )
    return out
