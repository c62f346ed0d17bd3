"""Matrix products of one token, bound by reading weights, with what lies around them inside.

A decode step of one request is some hundred products that each read a weight once. What is lost between them is lost
for good, so norms, gates and residual sums are part of the products, and a kernel asks for its weights while the one in
front of it still runs (programmatic dependent launch): weights depend on nobody. What bounds a product is the bytes in
flight, bandwidth times latency, 30 to 40 KB for each multiprocessor. So programs are small enough that several lie on
one, and each asks for all that it reads at once, rows of the weight that registers hold whole. For two tokens and more
a library's products were measured to be faster.
"""

import torch
from torch import Tensor

from pagefold.backends.triton.ahead import starts_ahead
from pagefold.backends.triton.plan import next_power_of_2
from pagefold.store.shim import jit, tl, triton

MAX_TOKENS = 1
WIDTH = 1024  # of a part of a row, which is 16 bytes a lane of four warps
HELD_LOADS = 20  # of 16 bytes, by a lane: up to 40 KB a program, and registers for four of them on a multiprocessor


@jit
def held_rows(
    x,
    norm,
    weight,
    bias,
    out,
    n,
    k,
    eps,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Grid (n / ROWS): ROWS columns of out[n] = y W^T + b, y being x[k] or its RMS norm; k <= CHUNKS * WIDTH.

    NORM    y = x * norm / sqrt(mean(x^2) + eps); the root is taken out of the product
    GATE    weight is [2 n, k], gate first: out = silu(gate) * up
    ADD     out += the product
    AHEAD   started before the kernel in front has ended
    """
    o_n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_k = tl.arange(0, WIDTH)
    row_ok = o_n < n
    p_w = weight + o_n.to(tl.int64)[:, None] * k + o_k[None, :]
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
    tiles, tiles_u = (), ()
    for c in tl.static_range(CHUNKS):
        ok = row_ok[:, None] & (c * WIDTH + o_k < k)[None, :]
        tiles = tiles + (tl.load(p_w + c * WIDTH, mask=ok, other=0.0),)
        tiles_u = tiles_u + (tl.load(p_w + n.to(tl.int64) * k + c * WIDTH, mask=ok, other=0.0) if GATE else 0.0,)
    if AHEAD:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([ROWS, WIDTH // 8], tl.float32)
    acc_u = tl.zeros([ROWS, WIDTH // 8], tl.float32)
    squares = tl.zeros([WIDTH], tl.float32)
    for c in tl.static_range(CHUNKS):
        k_ok = c * WIDTH + o_k < k
        b_x = tl.load(x + c * WIDTH + o_k, mask=k_ok, other=0.0).to(tl.float32)
        if NORM:
            squares += b_x * b_x
            b_x = b_x * tl.load(norm + c * WIDTH + o_k, mask=k_ok, other=0.0)
        # what lies in one lane is summed at once, so that sums take few registers
        acc += tl.sum(tl.reshape(tl.cast(tiles[c], tl.float32) * b_x[None, :], [ROWS, WIDTH // 8, 8]), 2)
        if GATE:
            acc_u += tl.sum(tl.reshape(tl.cast(tiles_u[c], tl.float32) * b_x[None, :], [ROWS, WIDTH // 8, 8]), 2)
    value, up = tl.sum(acc, 1), tl.sum(acc_u, 1)
    if NORM:
        root = tl.rsqrt(tl.sum(squares, 0) / k + eps)
        value, up = value * root, up * root
    if BIAS:
        value += tl.load(bias + o_n, mask=row_ok, other=0.0).to(tl.float32)
    if GATE:
        if BIAS:
            up += tl.load(bias + n + o_n, mask=row_ok, other=0.0).to(tl.float32)
        value = value / (1.0 + tl.exp(-value)) * up
    if ADD:
        # rounded before it is added, as a library's product would be
        value = value.to(out.dtype.element_ty).to(tl.float32) + tl.load(out + o_n, mask=row_ok, other=0.0).to(
            tl.float32
        )
    tl.store(out + o_n, value, mask=row_ok)


def held_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None,
    gate: bool,
    add_to: Tensor | None,
) -> Tensor | None:
    """`Backend.product` of one token, x[1, k]; None if a row of the weight is too long to be held."""
    k = x.shape[1]
    chunks = triton.cdiv(k, WIDTH)
    loads = chunks * (1 + gate) * x.element_size() // 2  # of 16 bytes, of a lane, for one row
    if loads > HELD_LOADS:
        return None
    n = weight.shape[0] // 2 if gate else weight.shape[0]
    out = torch.empty(1, n, dtype=x.dtype, device=x.device) if add_to is None else add_to
    rows = next_power_of_2(HELD_LOADS // loads + 1) // 2  # the power of two below
    ahead = starts_ahead(x.device)
    held_rows[(triton.cdiv(n, rows),)](
        x,
        norm[0] if norm else x,
        weight,
        x if bias is None else bias,
        out,
        n,
        k,
        norm[1] if norm else 0.0,
        NORM=norm is not None,
        GATE=gate,
        ADD=add_to is not None,
        BIAS=bias is not None,
        AHEAD=ahead,
        ROWS=rows,
        WIDTH=WIDTH,
        CHUNKS=chunks,
        num_warps=4,
        launch_pdl=ahead,
    )
    return out
