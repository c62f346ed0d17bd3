"""4-bit keys and 2-bit values: attention averages the error of V and exponentiates that of K, so K gets the bits."""

from typing import ClassVar

import torch

from pagefold.store.format import FORMATS
from pagefold.store.formats.int4 import INT4
from pagefold.store.lowbit import MidRiseCodec, as_float16, store_mid_rise
from pagefold.store.shim import DeviceCodec, jit, load_tile, tl


@jit
def load_int2(data, row, ok, D: tl.constexpr, ACROSS: tl.constexpr, MMA: tl.constexpr):
    """Even and odd bytes of each part of a row as code * 2^-24 * (1, 4, 16, 64); see `load_int4`."""
    x = load_tile(data.to(tl.pointer_type(tl.uint16), bitcast=True), row, ok, D // 8, ACROSS)
    if MMA == tl.float16:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 odd;
            shr.b32 odd, $8, 8;
            and.b32 $0, $8, 0x00030003;
            and.b32 $1, odd, 0x00030003;
            and.b32 $2, $8, 0x000C000C;
            and.b32 $3, odd, 0x000C000C;
            and.b32 $4, $8, 0x00300030;
            and.b32 $5, odd, 0x00300030;
            and.b32 $6, $8, 0x00C000C0;
            and.b32 $7, odd, 0x00C000C0;
            }
            """,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
            args=[x],
            dtype=(
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
            ),
            is_pure=True,
            pack=2,
        )
    else:
        odd = x >> 8
        first, first_odd = as_float16(x & 0x03).to(MMA), as_float16(odd & 0x03).to(MMA)
        second, second_odd = as_float16(x & 0x0C).to(MMA), as_float16(odd & 0x0C).to(MMA)
        third, third_odd = as_float16(x & 0x30).to(MMA), as_float16(odd & 0x30).to(MMA)
        fourth, fourth_odd = as_float16(x & 0xC0).to(MMA), as_float16(odd & 0xC0).to(MMA)
        return first, first_odd, second, second_odd, third, third_odd, fourth, fourth_odd


@jit
def store_int2(data, scale, row, ok, x, D: tl.constexpr, OPTIONS: tl.constexpr):
    store_mid_rise(data, scale, row, ok, x, x.shape[0], D, 2, OPTIONS)


CLIPS = (1.0, 0.8, 0.67, 0.6, 0.53, 0.46)
SHIFTS = (-24, -24, -22, -22, -20, -20, -18, -18)
DEVICE = DeviceCodec(
    load_int2,
    store_int2,
    torch.float16,
    pairs=2,
    bias=tuple(1.5 * 2.0**shift for shift in SHIFTS),
    gain=tuple(2.0**-shift for shift in SHIFTS),
    options=CLIPS,
)


@FORMATS.add
class K4V2:
    """100 bytes of K and V at D = 128 (3.125 bits a number). V's byte j is channels j, j + D/4, j + D/2, j + 3D/4."""

    name: ClassVar[str] = "k4v2"
    k = INT4
    v = MidRiseCodec(bits=2, clips=CLIPS, device=DEVICE)
