"""Rows of 2 or 4 bits a channel: rotated, symmetric, one scale a row."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagefold.store.format import Plane

LARGEST = 65504.0  # of float16: inputs beyond, infinities included, are stored as this
SMALLEST_SCALE = 2.0**-24  # of float16: scales are never 0


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last axis, in Sylvester's order; its own inverse.

    D must be a power of two. Made of elementwise sums, in which a row's bits do not depend on its neighbours; a
    matrix product would choose its order of summation by the number of rows.
    """
    head_dim = x.shape[-1]
    y = x
    for _ in range(head_dim.bit_length() - 1):
        a, b = y[..., 0::2], y[..., 1::2]
        y = torch.cat((a + b, a - b), -1)
    return y * head_dim**-0.5


def finite(x: Tensor) -> Tensor:
    """float32 of x without NaN (0 instead) and within +-65504."""
    return torch.nan_to_num(x.float(), nan=0.0).clamp(-LARGEST, LARGEST)


def float16_above(x: Tensor) -> Tensor:
    """The least positive float16 >= x, for 0 <= x; 65504 for anything larger."""
    near = x.clamp(SMALLEST_SCALE, LARGEST).half()
    above = (near.view(torch.int16) + 1).view(torch.float16)
    return torch.where(near < x, above, near).clamp(max=LARGEST)


@dataclass(frozen=True)
class MidRiseCodec:
    """``y = H x`` (orthonormal Hadamard), ``y[d] ~ (code[d] - (2^bits - 1) / 2) * scale``, one float16 scale a row.

    The rotation spreads outlier channels over all of them, after which a uniform grid without zero point is as good
    as a codebook (SAW-INT4, arXiv 2604.19157). The scale is the candidate of `clips` (fractions of the one that
    clips nothing) with the least squared error.

    Packing: a row is cut in 8 / bits equal parts; byte j holds channel j of each part, the first part lowest. So a
    row is whole bytes, for V as for K, and moving rows between pages is a byte copy.

    NaN is stored as 0 and whatever lies beyond +-65504 as +-65504; the scale saturates at 65504 and is never 0.
    """

    bits: int
    clips: tuple[float, ...]
    rotate: bool = True
    c_load: str = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "c_load", _C_LOAD.replace("BITS", str(self.bits)))

    @property
    def middle(self) -> float:
        """The code, half-way between two, that stands for 0."""
        return (2**self.bits - 1) / 2

    def planes(self, head_dim: int) -> tuple[Plane, Plane]:
        if head_dim < 8 // self.bits or head_dim & (head_dim - 1):
            raise ValueError(f"head_dim: got {head_dim}, must be a power of two for a rotated {self.bits}-bit format")
        return Plane(torch.uint8, head_dim * self.bits // 8), Plane(torch.float16, 1)

    def codes(self, y: Tensor, scale: Tensor) -> Tensor:
        """Nearest codes, as float32, of rotated rows y under a given scale (broadcast against y)."""
        return (y / scale + self.middle).round_().clamp_(0, 2 * self.middle)

    def pack(self, codes: Tensor) -> Tensor:
        """Integers below 2^bits [..., D] -> uint8[..., D * bits / 8]."""
        parts = codes.to(torch.uint8).unflatten(-1, (8 // self.bits, -1))
        out = parts[..., 0, :]
        for part in range(1, 8 // self.bits):
            out = out | (parts[..., part, :] << (part * self.bits))
        return out

    def unpack(self, data: Tensor) -> Tensor:
        """uint8[..., D * bits / 8] -> uint8 codes [..., D]."""
        mask = 2**self.bits - 1
        return torch.cat([(data >> shift) & mask for shift in range(0, 8, self.bits)], -1)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = hadamard(finite(x))
        widest = y.abs().amax(-1, keepdim=True) / self.middle
        clips = torch.tensor(self.clips, device=y.device).view(-1, *[1] * y.ndim)
        candidates = float16_above(widest * clips)
        scales = candidates.float()
        codes = self.codes(y, scales)
        error = ((codes - self.middle) * scales).sub_(y).square_().sum(-1, keepdim=True)
        best = error.argmin(0, keepdim=True)
        chosen = codes.gather(0, best.expand(1, *y.shape))[0]
        return self.pack(chosen), candidates.gather(0, best)[0]

    def decode_stored(self, data: Tensor, scale: Tensor, out: torch.dtype) -> Tensor:
        return (self.unpack(data).float().sub_(self.middle) * scale.float()).to(out)

    def decode(self, data: Tensor, scale: Tensor, out: torch.dtype) -> Tensor:
        exact = torch.float64 if out == torch.float64 else torch.float32
        return hadamard(self.decode_stored(data, scale, exact)).to(out)


_C_LOAD = """
static inline float LOAD(const void *data, const void *scale, int64_t row, float *restrict x) {
    enum { PARTS = 8 / BITS, WIDTH = D / PARTS, MASK = (1 << BITS) - 1 };
    const uint8_t *restrict code = (const uint8_t *)data + row * WIDTH;
    for (int part = 0; part < PARTS; part++)
        for (int j = 0; j < WIDTH; j++)
            x[part * WIDTH + j] = (float)((code[j] >> (part * BITS)) & MASK) - MASK * 0.5f;
    return half_to_float(((const uint16_t *)scale)[row]);
}
"""
