"""Small tools that several scorers share. Tensors are padded: `valid` (bool[J, 1, N]) is False on padding."""

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


def softmax_rows(logits: Tensor, valid: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Softmax of scale * logits over the source rows, 0 on padding. float[J, C, N], up to 2 million rows."""
    if row_kernels.serves(logits) and isinstance(scale, float):
        return row_kernels.shares(logits, valid, softmax=True, scale=scale)
    logits = (scale * logits).masked_fill(~valid, -torch.inf)
    if row_kernels.serves(logits):
        return row_kernels.shares(logits, valid, softmax=True)
    return _shares((logits - logits.amax(-1, keepdim=True)).exp())


def shares_of_heads(logits: Tensor, valid: Tensor) -> Tensor:
    """Softmax over the source rows for each query head, and its mean over them: float[J, C, R, N] to float[J, C, N]."""
    if row_kernels.serves(logits):
        return row_kernels.mean_shares(logits, valid)
    return softmax_rows(logits, valid[:, :, None]).mean(2)


def times_mean(x: Tensor, valid: Tensor) -> Tensor:
    """x >= 0 as a multiple of its mean over the source rows, 0 on padding. float[J, C, N], up to 2 million rows."""
    if row_kernels.serves(x):
        return row_kernels.shares(x, valid, softmax=False)
    x = x.masked_fill(~valid, 0.0)
    largest = x.amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    return _shares(x / largest) * valid.sum(-1, keepdim=True)


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
