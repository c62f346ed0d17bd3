"""4-bit rows: near-lossless for most models of 8B parameters and more, a small loss below."""

from typing import ClassVar

from pagefold.store.format import FORMATS
from pagefold.store.lowbit import MidRiseCodec

INT4 = MidRiseCodec(bits=4, clips=(1.0, 0.95, 0.9, 0.85, 0.8, 0.7))


@FORMATS.add
class Int4:
    """132 bytes of K and V at D = 128 (4.125 bits a number). Byte j is channels j (low nibble) and j + D / 2."""

    name: ClassVar[str] = "int4"
    k = v = INT4
