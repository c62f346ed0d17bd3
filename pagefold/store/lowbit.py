"""Rows of 2, 4 or 8 bits a channel: rotated, symmetric, one scale a row."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagefold.store.format import Plane
from pagefold.store.shim import DeviceCodec, jit, tl

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
    device: DeviceCodec | None = field(default=None, compare=False)
    c_load: str = field(init=False)
    c_store: str = field(init=False)

    def __post_init__(self):
        clips = ", ".join(f"{clip}f" for clip in self.clips)
        object.__setattr__(self, "c_load", _C_LOAD.replace("BITS", str(self.bits)))
        object.__setattr__(self, "c_store", _C_STORE.replace("BITS", str(self.bits)).replace("CLIPS", clips))

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
        error = ((codes - self.middle) * scales).sub_(y).square_().sum(-1, keepdim=True, dtype=torch.float64)
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

_C_STORE = """
static inline void STORE(void *data, void *scale, int64_t row, float *restrict x) {
    enum { PARTS = 8 / BITS, WIDTH = D / PARTS, MASK = (1 << BITS) - 1 };
    static const float clips[] = {CLIPS};
    uint8_t *restrict packed = (uint8_t *)data + row * WIDTH;
    float codes[D], best[D];
    double least = INFINITY;
    only_finite(x);
    hadamard(x);
    float widest = largest(x) / (MASK * 0.5f);
    for (int i = 0; i < (int)(sizeof clips / sizeof *clips); i++) {
        uint16_t half = half_above(widest * clips[i]);
        float step = half_to_float(half);
        double error = 0;
        for (int d = 0; d < D; d++) {
            float code = rintf(x[d] / step + MASK * 0.5f);
            code = code > MASK ? MASK : code;
            codes[d] = code < 0 ? 0 : code;
        }
#pragma omp simd reduction(+ : error)
        for (int d = 0; d < D; d++) {
            float off = (codes[d] - MASK * 0.5f) * step - x[d];
            error += off * off;
        }
        if (error < least) {
            least = error;
            ((uint16_t *)scale)[row] = half;
            memcpy(best, codes, sizeof best);
        }
    }
    for (int j = 0; j < WIDTH; j++) {
        uint32_t byte = 0;
        for (int part = 0; part < PARTS; part++) byte |= (uint32_t)(int32_t)best[part * WIDTH + j] << part * BITS;
        packed[j] = byte;
    }
}
"""


@jit
def device_hadamard(x, N: tl.constexpr, D: tl.constexpr):
    """`hadamard` of float32[N, D]: the same sums in the same order.

    Channels stay where they are: a number meets its partner, stage + 1 bits away, as what is left of both when it is
    taken out of their XOR. Where a warp has whole rows, that is a register or one shuffle.
    """
    sign = (1 - 2 * tl.arange(0, 2)).to(tl.float32)[None, None, :, None]
    for stage in tl.static_range(0, 10):
        if (1 << stage) < D:
            pairs = tl.reshape(x, (N, D // 2 >> stage, 2, 1 << stage))
            bits = pairs.to(tl.int32, bitcast=True)
            partner = (bits ^ tl.xor_sum(bits, 2, keep_dims=True)).to(tl.float32, bitcast=True)
            x = tl.reshape(partner + pairs * sign, (N, D))
    return x * (D**-0.5)


@jit
def device_finite(x):
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0)


@jit
def device_float16_above(x):
    """float32"""
    x = tl.minimum(tl.maximum(x, 2.0**-24), 65504.0)
    near = x.to(tl.float16)
    above = (near.to(tl.int16, bitcast=True) + 1).to(tl.float16, bitcast=True)
    return tl.where(near.to(tl.float32) < x, above.to(tl.float32), near.to(tl.float32))


@jit
def quotient(y, scale, reciprocal):
    """y / scale, rounded correctly, for float16 scales of any shape that broadcasts and their `reciprocal`s; numbers
    and quotients below 2^-100 may be off. The plain way is branches, in every element.

    A guess of 13 bits times a scale of 11 fits float32, so that the rest is exact, and one correction is enough: it is
    for each of the 2^33 pairs of significands, whether the compiler fuses products and sums or not.
    """
    guess = ((y * reciprocal).to(tl.int32, bitcast=True) & -2048).to(tl.float32, bitcast=True)
    return guess + (y - guess * scale) * reciprocal


@jit
def best_scale(y, CLIPS: tl.constexpr, LARGEST_CODE: tl.constexpr):
    """float32[N]: the candidate scale of rows y[N, D] with the least squared error.

    Codes are only nearly the nearest here: of a number that is half-way between two, to a rounding, either is as far
    away. They are rounded as shares of the largest, which are cut to [0, 1] for free. Errors are summed in float32;
    candidates that differ by less than it can tell are as good as each other.
    """
    MIDDLE: tl.constexpr = LARGEST_CODE * 0.5
    widest = quotient(tl.max(tl.abs(y), 1), MIDDLE, 1 / MIDDLE)
    best = device_float16_above(widest * CLIPS[0])
    if len(CLIPS) > 1:
        least = tl.full(widest.shape, float("inf"), tl.float32)
        for clip in tl.static_range(len(CLIPS)):
            candidate = device_float16_above(widest * CLIPS[clip])
            root = tl.rsqrt(candidate)  # a division takes care of numbers that scales cannot be
            share = tl.minimum(tl.maximum(y * (root * root * (1 / LARGEST_CODE))[:, None] + 0.5, 0.0), 1.0)
            code = (share * LARGEST_CODE + 12582912.0) - 12582912.0  # 1.5 * 2^23: what is added to it is rounded
            e = (code - MIDDLE) * candidate[:, None] - y
            error = tl.sum(e * e, 1)
            best = tl.where(error < least, candidate, best)
            least = tl.minimum(error, least)
    return best


@jit
def store_mid_rise(data, scale, row, ok, x, N: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, CLIPS: tl.constexpr):
    """`MidRiseCodec.encode` of float32[N, D]."""
    PARTS: tl.constexpr = 8 // BITS
    LARGEST_CODE: tl.constexpr = 2**BITS - 1
    y = device_hadamard(device_finite(x), N, D)
    best = best_scale(y, CLIPS, LARGEST_CODE)
    step = best[:, None]
    code = quotient(y, step, quotient(1.0, step, 1.0 / step)) + LARGEST_CODE * 0.5
    code = tl.minimum(tl.maximum(code, 0.0), LARGEST_CODE * 1.0) + 12582912.0  # its lowest bits are the nearest code
    parts = tl.reshape(code.to(tl.int32, bitcast=True) & LARGEST_CODE, (N, PARTS, D // PARTS))
    shift = tl.arange(0, PARTS) * BITS
    packed = tl.sum(parts << shift[None, :, None], 1).to(tl.uint8)
    j = tl.arange(0, D // PARTS)
    tl.store(data + row[:, None] * (D // PARTS) + j[None, :], packed, mask=ok[:, None])
    tl.store(scale + row, best.to(tl.float16), mask=ok)


@jit
def as_float16(bits):
    """bits * 2^-24: an integer below 1024 is a subnormal float16."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True)
