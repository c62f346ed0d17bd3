"""Small tools that several scorers share. Tensors are padded: `valid` (bool[J, 1, N]) is False on padding."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from pagefold.core.types import InputError
from pagefold.evict import row_kernels


def require(ok: bool, option: str, value: object, limit: str) -> None:
    """Raise InputError for `option` unless `ok`."""
    if not ok:
        raise InputError(option, f"got {value!r}, must be {limit}")


def require_kernel(kernel: int) -> None:
    require(kernel >= 1 and kernel % 2 == 1, "kernel", kernel, "an odd integer >= 1")


def max_pool_rows(scores: Tensor, valid: Tensor, kernel: int) -> Tensor:
    """Every row's score becomes the best among its `kernel` nearest rows, itself included. float[J, C, N]."""
    kernel = min(kernel, 2 * scores.shape[-1] - 1)  # a wider one sees no more
    if row_kernels.serves(scores):
        return row_kernels.pooled(scores, valid, kernel)
    return F.max_pool1d(scores.masked_fill(~valid, -torch.inf), kernel, stride=1, padding=kernel // 2)


def softmax_rows(logits: Tensor, valid: Tensor) -> Tensor:
    """Softmax over the source rows, 0 on padding. float[J, C, N], up to 2 million rows."""
    return shares_of_heads(logits[:, :, None], valid)


def minus_softmax(scores: Tensor, part: float, logits: Tensor, valid: Tensor, scale: float | Tensor) -> Tensor:
    """part * scores - (1 - part) * softmax of scale * logits over the source rows. float[J, C, N]; `scale` > 0 may be
    float[J, 1, 1]."""
    if row_kernels.serves(scores) and row_kernels.serves(logits) and isinstance(scale, float):
        return row_kernels.minus_softmax(scores, part, logits, valid, scale)
    return torch.sub(part * scores, softmax_rows(scale * logits, valid), alpha=1 - part)


def shares_of_heads(logits: Tensor, valid: Tensor) -> Tensor:
    """Softmax over the source rows for each query head, and its mean over them, 0 on padding: float[J, C, R, N], up to
    2 million rows, to float[J, C, N]."""
    if row_kernels.serves(logits):
        return row_kernels.mean_shares(logits, valid)
    logits = logits.masked_fill(~valid[:, :, None], -torch.inf)
    return _shares((logits - logits.amax(-1, keepdim=True)).exp()).mean(2)


def weighed(scores: Tensor, plus: float, x: Tensor, valid: Tensor) -> Tensor:
    """(scores + plus / N) * x, x >= 0 as a multiple of its mean over the N source rows. float[J, C, N], up to 2 million
    rows."""
    if row_kernels.serves(scores) and row_kernels.serves(x):
        return row_kernels.weighed(scores, plus, x, valid)
    x, count = x.masked_fill(~valid, 0.0), valid.sum(-1, keepdim=True)
    largest = x.amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    return (scores + plus / count.to(scores.dtype)) * (_shares(x / largest) * count)


def with_memory(scores: Tensor, before: Tensor, num_dropped: Tensor, first: Tensor, rate: float) -> Tensor:
    """The larger of the scores and of rate^num_dropped * before, which counts as 0 for the `first` job of a request.
    float[J, C, N], int64[J], bool[J]; rate in (0, 1]."""
    if row_kernels.serves(scores) and row_kernels.serves(before):
        return row_kernels.with_memory(scores, before, num_dropped, first, rate)
    left = (num_dropped.to(scores.dtype) * math.log2(rate)).exp2()
    return torch.maximum(scores, left[:, None, None] * before.masked_fill(first[:, None, None], 0.0))


def _shares(weights: Tensor) -> Tensor:
    """Weights in [0, 1], of which the largest is 1 (or 0: then all shares are), as shares of their sum.

    The sum is taken in integers (steps of 2^-42), which have no order of summation: a job's shares are the same to the
    last bit whatever it is padded to.
    """
    total = (weights * 2.0**42).long().sum(-1, keepdim=True).clamp(min=1)
    return weights / (total.to(weights.dtype) * 2.0**-42)


def unit_rows(rows: Tensor, valid: Tensor) -> Tensor:
    """Rows scaled to length 1, all zeros on padding. float[J, C, N, D]."""
    return F.normalize(rows, dim=-1, eps=1e-6).masked_fill(~valid[..., None], 0.0)
