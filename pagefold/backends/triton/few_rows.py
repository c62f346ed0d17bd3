"""Matrix products of a few tokens, bound by reading weights, with what lies around them inside.

A decode step of one request is some hundred products that each read a weight once. What is lost between them is lost
for good, so norms, gates and residual sums are part of the products, and a kernel reads its first weights while the one
in front of it still runs (programmatic dependent launch): weights depend on nobody.
"""

import torch
from torch import Tensor

from pagefold.backends.triton.plan import interpreted
from pagefold.store.shim import jit, tl, triton

MAX_TOKENS = 2  # more are faster in a library's products
ROWS, WIDTH = 4, 1024  # of a program's tiles of the weight: 8 KB in 16 bits, several programs to a multiprocessor


@jit
def product_rows(
    x,
    norm,
    weight,
    bias,
    out,
    n,
    k,
    eps,
    T: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Grid (n / ROWS): ROWS columns of out[T, n] = y W^T + b, y being x[T, k] or its RMS norm.

    NORM    y = x * norm / sqrt(mean(x^2) + eps); the root is taken out of the product
    GATE    weight is [2 n, k], gate first: out = silu(gate) * up
    ADD     out += the product
    AHEAD   started before the kernel in front has ended
    """
    o_n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_k = tl.arange(0, WIDTH)
    row_ok = o_n < n
    p_w = weight + o_n.to(tl.int64)[:, None] * k + o_k[None, :]
    ok = row_ok[:, None] & (o_k < k)[None, :]
    tile = tl.load(p_w, mask=ok, other=0.0)
    if GATE:
        p_u = p_w + n.to(tl.int64) * k
        tile_u = tl.load(p_u, mask=ok, other=0.0)
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc, acc_u, squares = (), (), ()
    for _ in tl.static_range(T):
        acc = acc + (tl.zeros([ROWS, WIDTH], tl.float32),)
        acc_u = acc_u + (tl.zeros([ROWS, WIDTH], tl.float32) if GATE else 0.0,)
        squares = squares + (tl.zeros([WIDTH], tl.float32),)
    for i_k in range(0, k, WIDTH):
        # the next tile is on its way while this one is multiplied
        ok = row_ok[:, None] & (i_k + WIDTH + o_k < k)[None, :]
        after = tl.load(p_w + i_k + WIDTH, mask=ok, other=0.0)
        if GATE:
            after_u = tl.load(p_u + i_k + WIDTH, mask=ok, other=0.0)
        if NORM:
            gain = tl.load(norm + i_k + o_k, mask=i_k + o_k < k, other=0.0)
        new, new_u, new_squares = (), (), ()
        for t in tl.static_range(T):
            b_x = tl.load(x + t * k + i_k + o_k, mask=i_k + o_k < k, other=0.0).to(tl.float32)
            if NORM:
                new_squares = new_squares + (squares[t] + b_x * b_x,)
                b_x = b_x * gain
            else:
                new_squares = new_squares + (squares[t],)
            new = new + (acc[t] + tile.to(tl.float32) * b_x[None, :],)
            new_u = new_u + (acc_u[t] + tile_u.to(tl.float32) * b_x[None, :] if GATE else 0.0,)
        acc, acc_u, squares = new, new_u, new_squares
        tile = after
        if GATE:
            tile_u = after_u
    for t in tl.static_range(T):
        value = tl.sum(acc[t], 1)
        scale = 1.0
        if NORM:
            scale = tl.rsqrt(tl.sum(squares[t], 0) / k + eps)
            value = value * scale
        if BIAS:
            value += tl.load(bias + o_n, mask=row_ok, other=0.0).to(tl.float32)
        if GATE:
            up = tl.sum(acc_u[t], 1) * scale
            if BIAS:
                up += tl.load(bias + n + o_n, mask=row_ok, other=0.0).to(tl.float32)
            value = value / (1.0 + tl.exp(-value)) * up
        if ADD:
            # rounded before it is added, as a library's product would be
            value = value.to(out.dtype.element_ty).to(tl.float32)
            value += tl.load(out + t * n + o_n, mask=row_ok, other=0.0).to(tl.float32)
        tl.store(out + t * n + o_n, value, mask=row_ok)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: tuple[Tensor, float] | None = None,
    gate: bool = False,
    add_to: Tensor | None = None,
) -> Tensor:
    """x[T, k] times weight[n, k] (or [2 n, k], gate first, if `gate`), T at most `MAX_TOKENS`: [T, n].

    norm     (weight, eps) of the RMS norm of x that is multiplied instead of x
    add_to   [T, n], which the product is added to in place
    """
    num_tokens, k = x.shape
    n = weight.shape[0] // 2 if gate else weight.shape[0]
    out = torch.empty(num_tokens, n, dtype=x.dtype, device=x.device) if add_to is None else add_to
    rows = max(1, ROWS // (num_tokens * (1 + gate)))  # sums of so many tokens and weights fit into registers
    ahead = not interpreted() and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    product_rows[(triton.cdiv(n, rows),)](
        x,
        norm[0] if norm else x,
        weight,
        x if bias is None else bias,
        out,
        n,
        k,
        norm[1] if norm else 0.0,
        T=num_tokens,
        NORM=norm is not None,
        GATE=gate,
        ADD=add_to is not None,
        BIAS=bias is not None,
        AHEAD=ahead,
        ROWS=rows,
        WIDTH=min(WIDTH, triton.next_power_of_2(k)),
        num_warps=4,
        launch_pdl=ahead,
    )
    return out
