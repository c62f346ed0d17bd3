"""Uneven budgets: heads that want alike share pages, and a group keeps as many rows as its neediest head wants."""

import math
from typing import ClassVar

import numpy as np

from pagefold.core.types import InputError
from pagefold.kv.layout import LAYOUTS, HeadLayout
from pagefold.kv.profile import group_cells, load_profile

SCOPES = ("cross", "layer")
LEAST_SHARE = 1e-6  # weights must be positive; a head that wants nothing still keeps its sinks and window


@LAYOUTS.add
class Clustered:
    """Head groups from a measured profile (Tangram, arXiv 2606.06302, sections 4.1 and 4.2).

    A head's share is min(1, mean + alpha * std) of the evictable rows. Heads are sorted by share and cut into groups;
    a group's weight is its largest member's share, scaled so that the mean over groups is 1.

    profile          profile file (see `pagefold/kv/profile.py`), required
    heads_per_page   heads in a group; divides the KV heads of the model (cross) or of a layer (layer)
    scope            "cross" sorts the heads of all layers together, "layer" those of each layer
    alpha            standard deviations reserved on top of the mean
    """

    name: ClassVar[str] = "clustered"

    profile: str = ""
    heads_per_page: int = 4
    scope: str = "cross"
    alpha: float = 2.0

    def __post_init__(self):
        if not self.profile:
            raise InputError("profile", "the clustered layout needs a profile file, as in clustered:profile=FILE")
        if self.heads_per_page < 1:
            raise InputError("heads_per_page", f"got {self.heads_per_page}, must be an integer >= 1")
        if self.scope not in SCOPES:
            raise InputError("scope", f"got {self.scope!r}, must be one of {', '.join(SCOPES)}")
        if not (self.alpha >= 0 and math.isfinite(self.alpha)):
            raise InputError("alpha", f"got {self.alpha}, must be a finite number >= 0")

    def build(self, num_layers: int, num_heads: int) -> HeadLayout:
        profile = load_profile(self.profile)
        profile.require_shape(num_layers, num_heads)
        shares = profile.shares(self.alpha)
        groups = group_cells(shares, self.heads_per_page, self.scope)
        group_of, column_of = np.empty((2, num_layers * num_heads), np.int32)
        group_of[groups] = np.arange(len(groups))[:, None]
        column_of[groups] = np.arange(self.heads_per_page)
        weight = np.maximum(shares.ravel()[groups].max(1), LEAST_SHARE)
        shape = num_layers, num_heads
        return HeadLayout(group_of.reshape(shape), column_of.reshape(shape), weight / weight.mean())
