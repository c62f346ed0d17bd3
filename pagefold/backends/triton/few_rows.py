"""Matrix products of a few tokens, bound by reading weights, with what lies around them inside.

A decode step of one request is some hundred products that each read a weight once. What is lost between them is lost
for good, so norms, gates and residual sums are part of the products, and a kernel asks for its weights while the one in
front of it still runs (programmatic dependent launch): weights depend on nobody. What bounds a product is the bytes in
flight, bandwidth times latency, 30 to 40 KB for each multiprocessor. Programs are many and small enough that several
lie on one, and each asks for most of what it reads at once: one or two tokens are multiplied with rows of the weight
that registers hold whole (`held_rows`); more of them by the matrix units, whose operands stream through shared memory
(`streamed_rows`).
"""

import torch
from torch import Tensor

from pagefold.backends.triton.ahead import starts_ahead
from pagefold.backends.triton.plan import next_power_of_2
from pagefold.store.shim import jit, tl, triton

MAX_TOKENS = 16  # more are faster in a library's products
HELD_TOKENS = 2  # each takes sums of its own
HELD_WIDTH = 1024  # of a row, which is 16 bytes a lane of four warps
HELD_LOADS = 20  # of 16 bytes, by a lane: up to 40 KB a program, and registers for four of them on a multiprocessor
ROWS, WIDTH, PARTS = 16, 64, 4  # of a streamed tile: 8 KB in 16 bits
EARLY_BYTES = 1 << 16  # of a program's weights that the L2 cache fetches while the kernel in front runs


@jit
def finished(value, up, squares, bias, p_o, o_n, ok, n, k, eps,
             NORM: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Outputs from sums: the norm's root, biases bias[o_n], gate and residual sum, as in `held_rows`."""
    if NORM:
        scale = tl.rsqrt(squares / k + eps)
        value, up = value * scale, up * scale
    if BIAS:
        value += tl.load(bias + o_n, mask=o_n < n, other=0.0).to(tl.float32)
    if GATE:
        if BIAS:
            up += tl.load(bias + n + o_n, mask=o_n < n, other=0.0).to(tl.float32)
        value = value / (1.0 + tl.exp(-value)) * up
    if ADD:
        # rounded before it is added, as a library's product would be
        value = value.to(p_o.dtype.element_ty).to(tl.float32) + tl.load(p_o, mask=ok, other=0.0).to(tl.float32)
    tl.store(p_o, value, mask=ok)


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
    T: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Grid (n / ROWS): ROWS columns of out[T, n] = y W^T + b, y being x[T, k] or its RMS norm; k <= CHUNKS * WIDTH.

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
    for t in tl.static_range(T):
        acc = tl.zeros([ROWS, WIDTH // 8], tl.float32)
        acc_u = tl.zeros([ROWS, WIDTH // 8], tl.float32)
        squares = tl.zeros([WIDTH], tl.float32)
        for c in tl.static_range(CHUNKS):
            k_ok = c * WIDTH + o_k < k
            b_x = tl.load(x + t * k + c * WIDTH + o_k, mask=k_ok, other=0.0).to(tl.float32)
            if NORM:
                squares += b_x * b_x
                b_x = b_x * tl.load(norm + c * WIDTH + o_k, mask=k_ok, other=0.0)
            # what lies in one lane is summed at once, so that sums take few registers
            acc += tl.sum(tl.reshape(tl.cast(tiles[c], tl.float32) * b_x[None, :], [ROWS, WIDTH // 8, 8]), 2)
            if GATE:
                acc_u += tl.sum(tl.reshape(tl.cast(tiles_u[c], tl.float32) * b_x[None, :], [ROWS, WIDTH // 8, 8]), 2)
        value, up, square = tl.sum(acc, 1), tl.sum(acc_u, 1), tl.sum(squares, 0)
        finished(value, up, square, bias, out + t * n + o_n, o_n, row_ok, n, k, eps, NORM, GATE, ADD, BIAS)


@jit
def fetch_early(start, num_bytes, THREADS: tl.constexpr):
    """Have the L2 cache fetch up to num_bytes from start on, which is aligned to 16 bytes: a piece a thread."""
    piece = num_bytes // (THREADS * 16) * 16
    if piece > 0:
        at = start.to(tl.pointer_type(tl.int8)) + tl.arange(0, THREADS) * piece
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [at, tl.zeros([THREADS], tl.int32) + piece],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit(do_not_specialize=["num_tokens", "early_rows"])
def streamed_rows(
    x,
    norm,
    weight,
    bias,
    out,
    num_tokens,
    n,
    k,
    eps,
    early_rows,
    T: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As `held_rows`, of num_tokens <= T tokens. Each warp multiplies one of PARTS parts of k, in tiles [ROWS, WIDTH].

    early_rows   of a program's rows of the weight that are fetched before anything is waited for, with AHEAD
    """
    first = tl.program_id(0) * ROWS
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
        p_first = weight + first.to(tl.int64) * k
        early = tl.minimum(early_rows, n - first) * k * (weight.dtype.element_ty.primitive_bitwidth // 8)
        fetch_early(p_first, early, PARTS * 32)
        if GATE:
            fetch_early(p_first + n.to(tl.int64) * k, early, PARTS * 32)
        tl.extra.cuda.gdc_wait()
    o_n, o_k, o_t = first + tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, T)
    row_ok, token_ok = (o_n < n)[None, :, None], (o_t < num_tokens)[None, None, :]
    part = tl.cdiv(k, PARTS * WIDTH) * WIDTH
    at = (tl.arange(0, PARTS) * part)[:, None, None]
    p_w = weight + o_n.to(tl.int64)[None, :, None] * k + at + o_k[None, None, :]
    p_x = x + o_t[None, None, :] * k + at + o_k[None, :, None]
    acc = tl.zeros([PARTS, ROWS, T], tl.float32)
    acc_u = tl.zeros([PARTS, ROWS, T], tl.float32)
    squares = tl.zeros([PARTS, WIDTH, T], tl.float32)
    for i_k in tl.range(0, part, WIDTH, num_stages=STAGES):
        w_ok, x_ok = row_ok & (at + i_k + o_k[None, None, :] < k), at + i_k + o_k[None, :, None] < k
        b_w = tl.load(p_w + i_k, mask=w_ok, other=0.0)
        b_x = tl.load(p_x + i_k, mask=x_ok & token_ok, other=0.0)
        if NORM:
            wide = b_x.to(tl.float32)
            squares += wide * wide
            gain = tl.load(norm + at + i_k + o_k[None, :, None], mask=x_ok, other=0.0)
            b_x = (wide * gain).to(x.dtype.element_ty)
        acc = tl.dot(b_w, b_x, acc, input_precision="ieee")
        if GATE:
            b_u = tl.load(p_w + n.to(tl.int64) * k + i_k, mask=w_ok, other=0.0)
            acc_u = tl.dot(b_u, b_x, acc_u, input_precision="ieee")
    value, up, square = tl.sum(acc, 0), tl.sum(acc_u, 0), tl.sum(tl.sum(squares, 1), 0)[None, :]
    p_o = out + o_t[None, :] * n + o_n[:, None]
    ok = (o_n < n)[:, None] & (o_t < num_tokens)[None, :]
    finished(value, up, square, bias, p_o, o_n[:, None], ok, n, k, eps, NORM, GATE, ADD, BIAS)


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
    ahead = starts_ahead(x.device)
    tensors = x, norm[0] if norm else x, weight, x if bias is None else bias, out
    eps = norm[1] if norm else 0.0
    kind = {"NORM": norm is not None, "GATE": gate, "ADD": add_to is not None, "BIAS": bias is not None}
    chunks = triton.cdiv(k, HELD_WIDTH)
    loads = chunks * (1 + gate) * x.element_size() // 2  # of 16 bytes, of a lane, for one row
    if num_tokens <= HELD_TOKENS and loads <= HELD_LOADS:
        rows = next_power_of_2(HELD_LOADS // loads + 1) // 2  # the power of two below
        held_rows[(triton.cdiv(n, rows),)](
            *(*tensors, n, k, eps),
            **kind,
            T=num_tokens,
            AHEAD=ahead,
            ROWS=rows,
            WIDTH=HELD_WIDTH,
            CHUNKS=chunks,
            num_warps=4,
            launch_pdl=ahead,
        )
        return out
    row_bytes = k * weight.element_size()
    early_rows = min(ROWS, EARLY_BYTES // row_bytes) if row_bytes % 16 == 0 else 0
    streamed_rows[(triton.cdiv(n, ROWS),)](
        *(*tensors, num_tokens, n, k, eps, early_rows),
        **kind,
        T=8 if num_tokens <= 8 else 16,
        AHEAD=ahead,
        ROWS=ROWS,
        WIDTH=WIDTH,
        PARTS=PARTS,
        STAGES=(4 if gate else 6) if x.element_size() == 2 else 3,
        num_warps=PARTS,
        launch_pdl=ahead,
    )
    return out
