"""4-bit rows: near-lossless for most models of 8B parameters and more, a small loss below."""

from typing import ClassVar

import torch

from pagefold.store.format import FORMATS
from pagefold.store.lowbit import MidRiseCodec, as_float16, store_mid_rise
from pagefold.store.shim import DeviceCodec, jit, load_tile, tl


@jit
def load_int4(data, row, ok, D: tl.constexpr, ACROSS: tl.constexpr, MMA: tl.constexpr):
    """Low nibbles of even and odd bytes as 2^-24 code, then high ones as 2^-20 code.

    A 16-bit word is two bytes of a row. One AND leaves the same nibble of two words, which read as float16 is a
    subnormal number: matrix units take those as they are, and no conversion from integers is ever needed (they run at
    a fraction of the rate). Codes on top of 1024, the other way to do this, would drown in the rounding of the sums:
    matrix units cut towards zero, so that the error is the same in every tile and adds up.
    """
    x = load_tile(data.to(tl.pointer_type(tl.uint16), bitcast=True), row, ok, D // 4, ACROSS)
    if MMA == tl.float16:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 odd;
            shr.b32 odd, $4, 8;
            and.b32 $0, $4, 0x000F000F;
            and.b32 $1, odd, 0x000F000F;
            and.b32 $2, $4, 0x00F000F0;
            and.b32 $3, odd, 0x00F000F0;
            }
            """,
            "=&r,=&r,=&r,=&r,r",
            args=[x],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        odd = x >> 8
        low, low_odd = as_float16(x & 0x0F).to(MMA), as_float16(odd & 0x0F).to(MMA)
        return low, low_odd, as_float16(x & 0xF0).to(MMA), as_float16(odd & 0xF0).to(MMA)


@jit
def store_int4(data, scale, row, ok, x, D: tl.constexpr, OPTIONS: tl.constexpr):
    store_mid_rise(data, scale, row, ok, x, x.shape[0], D, 4, OPTIONS)


CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)
SHIFTS = (-24, -24, -20, -20)
DEVICE = DeviceCodec(
    load_int4,
    store_int4,
    torch.float16,
    pairs=2,
    bias=tuple(7.5 * 2.0**shift for shift in SHIFTS),
    gain=tuple(2.0**-shift for shift in SHIFTS),
    options=CLIPS,
)
INT4 = MidRiseCodec(bits=4, clips=CLIPS, device=DEVICE)


@FORMATS.add
class Int4:
    """132 bytes of K and V at D = 128 (4.125 bits a number). Byte j is channels j (low nibble) and j + D / 2."""

    name: ClassVar[str] = "int4"
    k = v = INT4
