"""Rows stored as they are: a cast, no scale."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagefold.store.format import Plane


@dataclass(frozen=True)
class PlainCodec:
    """A row is its D numbers in `dtype`.

    NaN stays NaN, so that it shows in the output. Numbers (and infinities) beyond the range of float16 are stored as
    its largest, +-65504: one outlier must not turn attention into NaN. The other types keep infinities.
    """

    dtype: torch.dtype
    c_load: str = ""
    rotate: bool = False

    def planes(self, head_dim: int) -> tuple[Plane, Plane]:
        return Plane(self.dtype, head_dim), Plane(torch.float16, 0)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.dtype == torch.float16:
            x = x.clamp(-65504.0, 65504.0)
        return x.to(self.dtype), x.new_empty(*x.shape[:-1], 0, dtype=torch.float16)

    def decode_stored(self, data: Tensor, scale: Tensor, out: torch.dtype) -> Tensor:
        return data.to(out)

    def decode(self, data: Tensor, scale: Tensor, out: torch.dtype) -> Tensor:
        return data.to(out)
