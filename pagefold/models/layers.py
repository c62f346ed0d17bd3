"""The two layers a decoder is made of, for inference only."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pagefold.backends import cpu_linear

PACK_ROWS = 512  # batch size oneDNN lays weights out for; this layout was also the fastest from 1 to 2048 rows


def _packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


class Linear:
    """x W^T + b

    weight   [out, in]; on a CPU in float32 and bfloat16 it is laid out for a kernel of ours, or else for oneDNN, once,
             and the plain copy is not kept
    bias     [out] or None

    Inputs are [T, in], results [T, out] of the same dtype.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.kernel = cpu_linear.bind(weight, bias)
        self.packed = self.kernel is not None or _packable(weight)
        self.bias = bias
        if self.kernel is None:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.kernel is not None:
            return self.kernel(x)
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


class RMSNorm(NamedTuple):
    """What a backend's `rms_norm` needs.

    weight   [n], float32, or float64 for a float64 model; [2, n] where queries and keys each have their own
    """

    weight: Tensor
    eps: float
