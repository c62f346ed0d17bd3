"""Which heads share pages, and how many of their rows survive a compaction."""

import math
from collections.abc import Collection
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
        """Rows each head of a group keeps after a compaction: as many over all groups as if every group had the budget
        in whole pages, so that layouts are compared at equal memory.

        budget   mean rows per head
        floor    rows that selection protects (sinks and window); no group gets less
        Returns int32[G], multiples of `page_size`. What the floor gives to groups that want less, the others lack in
        proportion to their weights; pages left over by rounding go to those that lack the largest part of one.
        """
        least = max(1, -(-floor // page_size))
        each = max(least, round(budget / page_size))
        order = np.argsort(-self.weight, kind="stable")
        above = np.arange(1, self.num_groups + 1)  # groups above the floor, if so many are
        scale = (each * self.num_groups - (self.num_groups - above) * least) / self.weight[order].cumsum()
        most = np.flatnonzero(self.weight[order] * scale > least - 1e-6)[-1]
        wanted = np.maximum(self.weight * scale[most], least)
        pages = np.floor(wanted)
        left = int(each * self.num_groups - pages.sum())
        pages[np.argsort(pages - wanted, kind="stable")[:left]] += 1
        return (np.minimum(pages, (1 << 30) // page_size) * page_size).astype(np.int32)  # counts are int32


def set_apart(layout: HeadLayout, layers: Collection[int]) -> HeadLayout:
    """The layout with the heads of some layers in the last columns of every group, so that these columns may hold rows
    of another size.

    Where the groups have equally many of these heads, groups stay what they are. Else both kinds of heads are dealt
    anew, in the order of their weights, and a group's weight is the mean of what its heads had: the mean over all
    groups stays 1. Raises ValueError if they cannot be dealt evenly.
    """
    num_layers, num_heads = layout.group_of.shape
    groups, per_page = layout.num_groups, layout.heads_per_page
    apart = np.isin(np.arange(num_layers), list(layers)).repeat(num_heads)
    count, odd = divmod(int(apart.sum()), groups)
    if odd:
        step = groups // math.gcd(groups, num_heads)
        raise ValueError(f"got {len(layers)} layers, must be a multiple of {step}: the layout has {groups} groups")
    group_of, weight = layout.group_of.ravel().copy(), layout.weight
    column_of = np.empty_like(group_of)
    if not np.array_equal(np.bincount(group_of[apart], minlength=groups), np.full(groups, count)):
        wanted = weight[group_of]
        for kind in (~apart, apart):
            cells = np.flatnonzero(kind)
            group_of[cells[np.argsort(wanted[cells], kind="stable")]] = np.arange(groups).repeat(len(cells) // groups)
        weight = np.bincount(group_of, wanted) / per_page
    for kind, first in ((~apart, 0), (apart, per_page - count)):
        cells = np.flatnonzero(kind)
        cells = cells[np.argsort(group_of[cells], kind="stable")].reshape(groups, -1)
        column_of[cells] = first + np.arange(cells.shape[1])
    shape = num_layers, num_heads
    return HeadLayout(group_of.reshape(shape), column_of.reshape(shape), weight)


class LayoutSpec(Protocol):
    """A plug-in that arranges the heads of a model."""

    name: ClassVar[str]

    def build(self, num_layers: int, num_heads: int) -> HeadLayout: ...
