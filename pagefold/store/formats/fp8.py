"""8-bit floating-point rows (e4m3fn: no infinities, largest 448) with one scale a row."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pagefold.store.format import FORMATS, Plane
from pagefold.store.lowbit import finite, float16_above

LARGEST = 448.0


@dataclass(frozen=True)
class Float8Codec:
    """``x[d] ~ e4m3[d] * scale``; the scale, float16, maps the row's largest magnitude to 448.

    NaN is stored as 0 and whatever lies beyond +-65504 as +-65504; the scale is never 0.
    """

    c_load: str
    rotate: bool = False

    def planes(self, head_dim: int) -> tuple[Plane, Plane]:
        return Plane(torch.float8_e4m3fn, head_dim), Plane(torch.float16, 1)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = finite(x)
        scale = float16_above(x.abs().amax(-1, keepdim=True) / LARGEST)
        return (x / scale.float()).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale

    def decode_stored(self, data: Tensor, scale: Tensor, out: torch.dtype) -> Tensor:
        return (data.float() * scale.float()).to(out)

    def decode(self, data: Tensor, scale: Tensor, out: torch.dtype) -> Tensor:
        return self.decode_stored(data, scale, out)


# e4m3 is s eeee mmm: moved to a float's fields, the exponent needs 127 - 7 more. With a zero exponent the number is
# mmm * 2^-9, which is what lies above 2^-6 in the float whose exponent field reads 1 + 127 - 7.
_C_LOAD = """
static inline float LOAD(const void *data, const void *scale, int64_t row, float *restrict x) {
    const uint8_t *restrict stored = (const uint8_t *)data + row * D;
    for (int d = 0; d < D; d++) {
        uint32_t code = stored[d], magnitude = (code & 0x7f) << 20, tiny = (code & 0x78) ? 0 : 1u << 23;
        float shift = float_of_bits(tiny ? 121u << 23 : 0);
        float y = float_of_bits(magnitude + (120u << 23) + tiny) - shift;
        x[d] = float_of_bits(bits_of_float(y) | (code & 0x80) << 24);
    }
    return half_to_float(((const uint16_t *)scale)[row]);
}
"""


@FORMATS.add
class Float8:
    """260 bytes of K and V at D = 128."""

    name: ClassVar[str] = "fp8"
    k = v = Float8Codec(_C_LOAD)
