"""The two layers a decoder is made of, for inference only."""

import torch
import torch.nn.functional as F
from torch import Tensor

PACK_ROWS = 512  # batch size oneDNN lays weights out for; this layout was also the fastest from 1 to 2048 rows


def _packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


class Linear:
    """x W^T + b, with what follows it in a decoder fused in.

    weight   [out, in]; on a CPU in float32 and bfloat16 it is laid out for oneDNN, once, and the plain copy is not kept
    bias     [out] or None

    Inputs are [T, in], results [T, out] of the same dtype. Fused results are rounded once.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.packed = _packable(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS) if self.packed else weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def silu(self, x: Tensor) -> Tensor:
        """silu(x W^T + b)"""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "swish", [], "")
        return F.silu(F.linear(x, self.weight, self.bias), inplace=True)

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """(x W^T + b) * other"""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, "mul")
        return F.linear(x, self.weight, self.bias).mul_(other)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """(x W^T + b) + other"""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, "add")
        return F.linear(x, self.weight, self.bias).add_(other)


class RMSNorm:
    """x * weight / sqrt(mean(x^2) + eps) over the last dimension (arXiv 1910.07467), computed in at least float32.

    weight   [n], or [H, n] where each head of x[T, H, n] has its own
    """

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype):
        wide, n = torch.float64 if dtype == torch.float64 else torch.float32, weight.shape[-1]
        # sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(n eps)) / sqrt(n)
        self.weight = weight.to(wide) * n**0.5
        self.floor = torch.tensor((n * eps) ** 0.5, dtype=wide, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.to(self.weight.dtype)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return (wide / torch.hypot(length, self.floor)).mul_(self.weight).to(x.dtype)
