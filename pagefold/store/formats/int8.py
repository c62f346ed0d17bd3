"""8-bit rows: as many bytes as fp8, and a quarter of its error, for rotated rows need no exponents."""

from typing import ClassVar

import torch

from pagefold.store.format import FORMATS
from pagefold.store.lowbit import MidRiseCodec, as_float16, store_mid_rise
from pagefold.store.shim import DeviceCodec, jit, load_tile, tl


@jit
def load_int8(data, row, ok, D: tl.constexpr, ACROSS: tl.constexpr, MMA: tl.constexpr):
    """Even and odd channels as 2^-24 code: bytes are subnormal float16, as `load_int4`'s nibbles are."""
    x = load_tile(data.to(tl.pointer_type(tl.uint16), bitcast=True), row, ok, D // 2, ACROSS)
    if MMA == tl.float16:
        return tl.inline_asm_elementwise(
            """
            {
            and.b32 $0, $2, 0x00FF00FF;
            prmt.b32 $1, $2, 0, 0x4341;
            }
            """,
            "=&r,=&r,r",
            args=[x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return as_float16(x & 0xFF).to(MMA), as_float16(x >> 8).to(MMA)


@jit
def store_int8(data, scale, row, ok, x, D: tl.constexpr, OPTIONS: tl.constexpr):
    store_mid_rise(data, scale, row, ok, x, x.shape[0], D, 8, OPTIONS)


CLIPS = (1.0,)  # at 8 bits clipping costs more than a finer grid gains
DEVICE = DeviceCodec(
    load_int8,
    store_int8,
    torch.float16,
    pairs=2,
    bias=(127.5 * 2.0**-24,) * 2,
    gain=(2.0**24,) * 2,
    options=CLIPS,
    lengths_alone=True,  # as of fp8, whose numbers are made ready in the same way
)


@FORMATS.add
class Int8:
    """260 bytes of K and V at D = 128."""

    name: ClassVar[str] = "int8"
    k = v = MidRiseCodec(bits=8, clips=CLIPS, device=DEVICE)
