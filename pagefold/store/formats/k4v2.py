"""4-bit keys and 2-bit values: attention averages the error of V and exponentiates that of K, so K gets the bits."""

from typing import ClassVar

from pagefold.store.format import FORMATS
from pagefold.store.formats.int4 import INT4
from pagefold.store.lowbit import MidRiseCodec


@FORMATS.add
class K4V2:
    """100 bytes of K and V at D = 128 (3.125 bits a number). V's byte j is channels j, j + D/4, j + D/2, j + 3D/4."""

    name: ClassVar[str] = "k4v2"
    k = INT4
    v = MidRiseCodec(bits=2, clips=(1.0, 0.8, 0.67, 0.6, 0.53, 0.46))
