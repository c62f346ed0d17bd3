"""Ordinary paging: every head of every layer shares one page table and one length."""

from typing import ClassVar

import numpy as np

from pagefold.kv.layout import LAYOUTS, HeadLayout


@LAYOUTS.add
class Uniform:
    """One group; column = layer * num_heads + head."""

    name: ClassVar[str] = "uniform"

    def build(self, num_layers: int, num_heads: int) -> HeadLayout:
        columns = np.arange(num_layers * num_heads, dtype=np.int32).reshape(num_layers, num_heads)
        return HeadLayout(np.zeros_like(columns), columns, np.ones(1))
