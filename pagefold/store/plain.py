"""Rows stored as they are: a cast, no scale."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagefold.store.format import Plane
from pagefold.store.shim import DeviceCodec, jit, load_tile, tl


@dataclass(frozen=True)
class PlainCodec:
    """A row is its D numbers in `dtype`.

    NaN stays NaN, so that it shows in the output. Numbers (and infinities) beyond the range of float16 are stored as
    its largest, +-65504: one outlier must not turn attention into NaN. The other types keep infinities.
    """

    dtype: torch.dtype
    c_load: str = ""
    c_store: str = ""
    rotate: bool = False
    device: DeviceCodec | None = field(default=None, compare=False)

    def planes(self, head_dim: int) -> tuple[Plane, Plane]:
        return Plane(self.dtype, head_dim), Plane(torch.float16, 0)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.dtype == torch.float16:
            x = x.to(torch.promote_types(x.dtype, torch.float32)).clamp(-65504.0, 65504.0)  # bfloat16 has no 65504
        return x.to(self.dtype), x.new_empty(*x.shape[:-1], 0, dtype=torch.float16)

    def decode_stored(self, data: Tensor, scale: Tensor, out: torch.dtype) -> Tensor:
        return data.to(out)

    def decode(self, data: Tensor, scale: Tensor, out: torch.dtype) -> Tensor:
        return data.to(out)


@jit
def load_plain(data, row, ok, D: tl.constexpr, ACROSS: tl.constexpr, MMA: tl.constexpr):
    return (load_tile(data, row, ok, D, ACROSS).to(MMA),)


@jit
def store_plain(data, scale, row, ok, x, D: tl.constexpr, OPTIONS: tl.constexpr):
    """OPTIONS is (largest,), beyond which numbers, but not NaN, are cut."""
    x = tl.where(x > OPTIONS[0], OPTIONS[0], tl.where(x < -OPTIONS[0], -OPTIONS[0], x))
    d = tl.arange(0, D)
    tl.store(data + row[:, None] * D + d[None, :], x.to(data.dtype.element_ty), mask=ok[:, None])
