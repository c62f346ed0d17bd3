"""What scorers compute along the rows of a head, a kernel each, for devices: as torch operations up to a dozen
launches each.

`pagefold.evict.scorers._common` has the same functions in torch, which are the definition.
"""

import math

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
    nans = tl.sum((best != best).to(tl.int32), 0)  # a maximum across lanes passes over them
    return tl.where(nans > 0, float("nan"), tl.max(best, 0))


@jit(do_not_specialize=["n", "per_job", "slope", "part", "plus"])
def share_rows(
    x, valid, scores, out, n, per_job, slope, part, plus, SOFTMAX: tl.constexpr, STEPS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Grid (heads): out float32[heads, n], what scores float32[heads, n] become by a head's x: part * scores -
    (1 - part) * softmax of slope * x, SOFTMAX, or (scores + plus / N) times x as a multiple of its mean, N being the
    head's source rows.

    valid   uint8[jobs, n]; `per_job` heads have the same
    """
    i_head = tl.program_id(0).to(tl.int64)
    x += i_head * n
    valid += i_head // per_job * n
    o_n = tl.arange(0, N)
    other = float("-inf") if SOFTMAX else 0.0
    most = largest(x, valid, n, other, N)
    if not SOFTMAX:  # the least normal float32, so that rows of zeros have a share of 0
        most = tl.maximum(most, 1.1754943508222875e-38, propagate_nan=tl.PropagateNan.ALL)
    steps, count = tl.zeros([N], tl.int64), tl.zeros([N], tl.int32)
    for start in range(0, n, N):
        b_x, is_valid = masked(x, valid, start + o_n, n, other)
        weight = tl.exp((b_x - most) * slope) if SOFTMAX else b_x * (1.0 / most)
        steps += (weight * STEPS).to(tl.int64)
        count += is_valid.to(tl.int32)
    factor = STEPS / tl.maximum(tl.sum(steps, 0), 1).to(tl.float32)
    rows = tl.sum(count, 0).to(tl.float32)
    if not SOFTMAX:
        factor *= rows
    for start in range(0, n, N):
        b_x, _ = masked(x, valid, start + o_n, n, other)
        weight = tl.exp((b_x - most) * slope) if SOFTMAX else b_x * (1.0 / most)
        share = weight * factor
        at = i_head * n + start + o_n
        b_scores = tl.load(scores + at, mask=start + o_n < n, other=0.0)
        share = part * b_scores - (1 - part) * share if SOFTMAX else (b_scores + plus / rows) * share
        tl.store(out + at, share, mask=start + o_n < n)


@jit(do_not_specialize=["n", "per_job", "slope"])
def memory_rows(x, before, num_dropped, first, out, n, per_job, slope, N: tl.constexpr):
    """Grid (heads, tiles): out float32[heads, n], the larger of x and 2^(slope * num_dropped) * before, which counts as
    0 where `first`, uint8[jobs], is 1."""
    i_head = tl.program_id(0).to(tl.int64)
    i_j = i_head // per_job
    i = tl.program_id(1) * N + tl.arange(0, N)
    left = tl.exp2(slope * tl.load(num_dropped + i_j).to(tl.float32))
    b_x = tl.load(x + i_head * n + i, mask=i < n)
    b_before = tl.load(before + i_head * n + i, mask=(i < n) & (tl.load(first + i_j) == 0), other=0.0)
    best = tl.maximum(b_x, left * b_before, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + i_head * n + i, best, mask=i < n)


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


def minus_softmax(scores: Tensor, part: float, x: Tensor, valid: Tensor, scale: float) -> Tensor:
    """float32[J, C, N] of scores and x of this shape; valid is bool[J, 1, N]; `scale` > 0."""
    return _with_shares(scores, x, valid, softmax=True, slope=scale, part=part)


def weighed(scores: Tensor, plus: float, x: Tensor, valid: Tensor) -> Tensor:
    """float32[J, C, N] of scores and x of this shape; valid is bool[J, 1, N]."""
    return _with_shares(scores, x, valid, softmax=False, plus=plus)


def with_memory(scores: Tensor, before: Tensor, num_dropped: Tensor, first: Tensor, rate: float) -> Tensor:
    """float32[J, C, N] of scores and before of this shape; int64[J], bool[J]; rate in (0, 1]."""
    num_jobs, width, n = scores.shape
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    memory_rows[(num_jobs * width, triton.cdiv(n, TILE))](
        *(scores.contiguous(), before.contiguous(), num_dropped, first.view(torch.uint8), out),
        *(n, width, math.log2(rate)),
        N=TILE,
    )
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


def _with_shares(
    scores: Tensor,
    x: Tensor,
    valid: Tensor,
    *,
    softmax: bool,
    slope: float = 1.0,
    part: float = 0.0,
    plus: float = 0.0,
) -> Tensor:
    """What `share_rows` makes of scores float32[J, C, N]."""
    x, valid, out = _ready(x, valid)
    num_jobs, width, n = x.shape
    share_rows[(num_jobs * width,)](
        *(x, valid, scores.contiguous(), out),
        *(n, width, slope, part, plus),
        SOFTMAX=softmax,
        STEPS=STEPS,
        N=TILE,
    )
    return out


def _ready(x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.contiguous(),
        valid.contiguous().view(torch.uint8),
        torch.empty_like(x, memory_format=torch.contiguous_format),
    )
