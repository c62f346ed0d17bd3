"""64-bit rows: exact where the model computes in float64. For tests of exactness."""

from typing import ClassVar

import torch

from pagefold.store.format import FORMATS
from pagefold.store.plain import PlainCodec


@FORMATS.add
class Float64:
    """1024 bytes a row pair at D = 64; no compiled loader, for the compiled kernel computes in float32."""

    name: ClassVar[str] = "fp64"
    k = v = PlainCodec(torch.float64)
