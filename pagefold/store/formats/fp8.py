"""8-bit floating-point rows (e4m3fn: no infinities, largest 448) with one scale a row."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from pagefold.store.format import FORMATS, Plane
from pagefold.store.lowbit import device_finite, device_float16_above, finite, float16_above, quotient
from pagefold.store.shim import DeviceCodec, jit, load_tile, tl

LARGEST = 448.0


@dataclass(frozen=True)
class Float8Codec:
    """``x[d] ~ e4m3[d] * scale``; the scale, float16, maps the row's largest magnitude to 448.

    NaN is stored as 0 and whatever lies beyond +-65504 as +-65504; the scale is never 0.
    """

    c_load: str
    c_store: str
    rotate: bool = False
    device: DeviceCodec | None = field(default=None, compare=False)

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

# Rounded as in `round_e4m3`: to an eighth of the power of two below, 2^-9 at least.
_C_STORE = """
static inline void STORE(void *data, void *scale, int64_t row, float *restrict x) {
    uint8_t *restrict stored = (uint8_t *)data + row * D;
    only_finite(x);
    uint16_t half = half_above(largest(x) / 448.0f);
    float step = half_to_float(half);
    for (int d = 0; d < D; d++) {
        float y = x[d] / step;
        y = y > 448.0f ? 448.0f : y < -448.0f ? -448.0f : y;
        float power = float_of_bits(bits_of_float(y) & 0x7f800000);
        float shift = (power > 0x1p-6f ? power : 0x1p-6f) * 0x1.8p20f;
        float magnitude = (fabsf(y) + shift) - shift;
        uint32_t normal = (bits_of_float(magnitude) - (120u << 23)) >> 20, tiny = (uint32_t)(magnitude * 0x1p9f);
        stored[d] = (magnitude < 0x1p-6f ? tiny : normal) | (bits_of_float(y) >> 24 & 0x80);
    }
    ((uint16_t *)scale)[row] = half;
}
"""


@jit
def load_e4m3(data, row, ok, D: tl.constexpr, ACROSS: tl.constexpr, MMA: tl.constexpr):
    """Even and odd channels. A 16-bit word is a pair of them, so that tiles can be transposed on their way out of
    shared memory, which works on 16 bits; float16 holds every e4m3."""
    x = load_tile(data.to(tl.pointer_type(tl.uint16), bitcast=True), row, ok, D // 2, ACROSS)
    if MMA == tl.float16:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 sorted;
            .reg .b16 even, odd;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {even, odd}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, even;
            cvt.rn.f16x2.e4m3x2 $1, odd;
            }
            """,
            "=r,=r,r",
            args=[x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        even = (x & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        odd = (x >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return even.to(MMA), odd.to(MMA)


@jit
def round_e4m3(x):
    """Nearest e4m3 as float32, ties to even, 0 <= x <= 448: a step is an eighth of the power of two below, 2^-9 at
    least. Casts differ in how they round (Triton's interpreter loses the carry into the exponent); here none has to."""
    power = (x.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shift = tl.maximum(power, 2.0**-6) * (1.5 * 2.0**20)
    return (x + shift) - shift


@jit
def store_e4m3(data, scale, row, ok, x, D: tl.constexpr, OPTIONS: tl.constexpr):
    x = device_finite(x)
    size = tl.abs(x)
    scales = device_float16_above(quotient(tl.max(size, 1), 448.0, 1 / 448))
    step = scales[:, None]
    size = round_e4m3(tl.minimum(quotient(size, step, quotient(1.0, step, 1.0 / step)), 448.0))
    sign = x.to(tl.uint32, bitcast=True) & 0x80000000
    y = (size.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True).to(tl.float8e4nv)
    d = tl.arange(0, D)
    tl.store(data + row[:, None] * D + d[None, :], y.to(tl.uint8, bitcast=True), mask=ok[:, None])
    tl.store(scale + row, scales.to(tl.float16), mask=ok)


# A length takes every number in float32, from float16 made of e4m3: on an H200 144 us, for 111 to read them again.
DEVICE = DeviceCodec(
    load_e4m3, store_e4m3, torch.float16, pairs=2, bias=(0.0, 0.0), gain=(1.0, 1.0), lengths_alone=True
)


@FORMATS.add
class Float8:
    """260 bytes of K and V at D = 128."""

    name: ClassVar[str] = "fp8"
    k = v = Float8Codec(_C_LOAD, _C_STORE, device=DEVICE)
