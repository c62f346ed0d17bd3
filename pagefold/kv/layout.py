"""Which heads share pages, and how many of their rows survive a compaction."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from pagefold.core.registry import Registry

LAYOUTS = Registry("layout", "pagefold.kv.layouts")


@dataclass(frozen=True)
class HeadLayout:
    """Where each KV head's rows live, and how many of them survive a compaction.

    A *group* is a set of `heads_per_page` heads that share page ids and one length; a head's place
    inside its group's pages is its *column*. Heads of one group may come from different layers.

        group_of         int32[L, H]   page-table row of head (layer, head)
        column_of        int32[L, H]   0 <= column < heads_per_page
        weight           float64[G]    share of the budget a head of the group gets: a budget of B rows means
                                       B * weight rows for each of its heads (mean over groups: 1)
        heads_per_page   int           Hp;  L*H == G*Hp

    Invariants (checked once, in `__post_init__`): (group, column) is a bijection with (layer, head);
    weights are positive.

    G == 1 is ordinary paging: one page id covers every head of every layer.
    """

    group_of: np.ndarray
    column_of: np.ndarray
    weight: np.ndarray

    def __post_init__(self):
        layers, heads = self.group_of.shape
        groups, per_page = self.num_groups, self.heads_per_page
        cell = self.group_of.astype(np.int64) * per_page + self.column_of
        if groups * per_page != layers * heads or not np.array_equal(np.sort(cell.ravel()), np.arange(layers * heads)):
            raise ValueError("layout: (group, column) must be a bijection with (layer, head)")
        if not (self.weight > 0).all():
            raise ValueError("layout: weights must be positive")

    @property
    def num_groups(self) -> int:
        return len(self.weight)

    @property
    def heads_per_page(self) -> int:
        return self.group_of.size // len(self.weight)

    def members(self) -> np.ndarray:
        """int32[G, Hp, 2]: (layer, head) of each (group, column)."""
        out = np.empty((self.num_groups, self.heads_per_page, 2), np.int32)
        layers, heads = np.indices(self.group_of.shape)
        out[self.group_of, self.column_of, 0] = layers
        out[self.group_of, self.column_of, 1] = heads
        return out

    def budgets(self, budget: int, page_size: int, floor: int) -> np.ndarray:
        """Rows each head of a group keeps after a compaction.

        budget   mean rows per head
        floor    rows that selection protects (sinks and window); no group gets less
        Returns int32[G], multiples of `page_size`.
        """
        rows = np.clip(self.weight * budget, max(floor, 1), 1 << 30)  # counts are int32
        return (np.maximum(np.round(rows / page_size), -(-floor // page_size)).clip(1) * page_size).astype(np.int32)


class LayoutSpec(Protocol):
    """A plug-in that arranges the heads of a model."""

    name: ClassVar[str]

    def build(self, num_layers: int, num_heads: int) -> HeadLayout: ...
