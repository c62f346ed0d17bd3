"""What scorers compute along the rows of a head, a kernel each, for devices: as torch operations a dozen launches each.

`pagefold.evict.scorers._common` has the same functions in torch, which are the definition.
"""

import torch
from torch import Tensor

from pagefold.store.shim import HAS_TRITON, jit, tl, triton

TILE = 2048  # rows at a time
STEPS = 1 << 42  # in one: what sums of shares count in


@jit(do_not_specialize=["n", "per_job"])
def masked(x, valid, i, n, other):
    """x[i] of n rows, `other` on padding."""
    is_valid = tl.load(valid + i, mask=i < n, other=0) != 0
    return tl.where(is_valid, tl.load(x + i, mask=i < n, other=0.0), other), is_valid


@jit
def largest(x, valid, n, other, N: tl.constexpr):
    """The largest of n numbers, NaN if one is."""
    best = tl.full([N], other, tl.float32)
    for start in range(0, n, N):
        b_x, _ = masked(x, valid, start + tl.arange(0, N), n, other)
        best = tl.maximum(best, b_x, propagate_nan=tl.PropagateNan.ALL)
    return tl.max(best, 0)


@jit(do_not_specialize=["n", "per_job", "slope"])
def share_rows(x, valid, out, n, per_job, slope, SOFTMAX: tl.constexpr, STEPS: tl.constexpr, N: tl.constexpr):
    """Grid (heads): out float32[heads, n], the softmax of slope * x, or else x as multiples of its mean, 0 on padding.

    valid   uint8[jobs, n]; `per_job` heads have the same
    """
    i_head = tl.program_id(0).to(tl.int64)
    x += i_head * n
    valid += i_head // per_job * n
    o_n = tl.arange(0, N)
    other = float("-inf") if SOFTMAX else 0.0
    scale = largest(x, valid, n, other, N)
    if not SOFTMAX:
        scale = 1.0 / tl.maximum(scale, 1.1754943508222875e-38)  # the least normal float32
    steps, count = tl.zeros([N], tl.int64), tl.zeros([N], tl.int32)
    for start in range(0, n, N):
        b_x, is_valid = masked(x, valid, start + o_n, n, other)
        weight = tl.exp((b_x - scale) * slope) if SOFTMAX else b_x * scale
        steps += (weight * STEPS).to(tl.int64)
        count += is_valid.to(tl.int32)
    factor = STEPS / tl.maximum(tl.sum(steps, 0), 1).to(tl.float32)
    if not SOFTMAX:
        factor *= tl.sum(count, 0).to(tl.float32)
    for start in range(0, n, N):
        b_x, _ = masked(x, valid, start + o_n, n, other)
        weight = tl.exp((b_x - scale) * slope) if SOFTMAX else b_x * scale
        tl.store(out + i_head * n + start + o_n, weight * factor, mask=start + o_n < n)


@jit(do_not_specialize=["n", "per_job"])
def mean_share_rows(x, valid, out, n, per_job, R: tl.constexpr, STEPS: tl.constexpr, N: tl.constexpr):
    """Grid (heads): out float32[heads, n], the mean of the softmaxes of x float32[heads, R, n], 0 on padding."""
    i_head = tl.program_id(0).to(tl.int64)
    x += i_head * R * n
    valid += i_head // per_job * n
    o_n = tl.arange(0, N)
    scales, factors = (), ()
    for r in tl.static_range(R):
        scale = largest(x + r * n, valid, n, float("-inf"), N)
        steps = tl.zeros([N], tl.int64)
        for start in range(0, n, N):
            b_x, _ = masked(x + r * n, valid, start + o_n, n, float("-inf"))
            steps += (tl.exp(b_x - scale) * STEPS).to(tl.int64)
        scales = scales + (scale,)
        factors = factors + (STEPS / R / tl.maximum(tl.sum(steps, 0), 1).to(tl.float32),)
    for start in range(0, n, N):
        share = tl.zeros([N], tl.float32)
        for r in tl.static_range(R):
            b_x, _ = masked(x + r * n, valid, start + o_n, n, float("-inf"))
            share += tl.exp(b_x - scales[r]) * factors[r]
        tl.store(out + i_head * n + start + o_n, share, mask=start + o_n < n)


@jit(do_not_specialize=["n", "per_job", "half"])
def pool_rows(x, valid, out, n, per_job, half, N: tl.constexpr):
    """Grid (heads, tiles): out float32[heads, n], the largest x among rows at most `half` away."""
    i_head = tl.program_id(0).to(tl.int64)
    x += i_head * n
    valid += i_head // per_job * n
    i = tl.program_id(1) * N + tl.arange(0, N)
    best = tl.full([N], float("-inf"), tl.float32)
    for shift in range(-half, half + 1):
        near = i + shift
        b_x, _ = masked(x, valid, tl.where(near < 0, n, near), n, float("-inf"))
        best = tl.maximum(best, b_x, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + i_head * n + i, best, mask=i < n)


def serves(x: Tensor) -> bool:
    """Whether these kernels do for x."""
    return HAS_TRITON and x.is_cuda and x.dtype == torch.float32


def shares(x: Tensor, valid: Tensor, *, softmax: bool, scale: float = 1.0) -> Tensor:
    """float32[J, ..., N] of x of this shape; valid is bool[J, 1, ..., N]; `scale` > 0 is of softmax."""
    x, valid, out = _ready(x, valid)
    n, heads = x.shape[-1], x.numel() // x.shape[-1]
    share_rows[(heads,)](x, valid, out, n, heads // len(x), scale, SOFTMAX=softmax, STEPS=STEPS, N=TILE)
    return out


def mean_shares(x: Tensor, valid: Tensor) -> Tensor:
    """float32[J, C, N] of x [J, C, R, N]; valid is bool[J, 1, N]."""
    num_jobs, width, per_head, n = x.shape
    out = torch.empty(num_jobs, width, n, dtype=x.dtype, device=x.device)
    mean_share_rows[(num_jobs * width,)](
        x.contiguous(), valid.contiguous().view(torch.uint8), out, n, width, R=per_head, STEPS=STEPS, N=TILE
    )
    return out


def pooled(x: Tensor, valid: Tensor, kernel: int) -> Tensor:
    """float32[J, ..., N] of x of this shape; valid is bool[J, 1, ..., N]."""
    x, valid, out = _ready(x, valid)
    n, heads = x.shape[-1], x.numel() // x.shape[-1]
    pool_rows[(heads, triton.cdiv(n, TILE))](x, valid, out, n, heads // len(x), kernel // 2, N=TILE)
    return out


def _ready(x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.contiguous(),
        valid.contiguous().view(torch.uint8),
        torch.empty_like(x, memory_format=torch.contiguous_format),
    )
