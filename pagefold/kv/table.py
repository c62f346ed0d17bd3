"""Edits of the device page table, collected on the host and sent once a step."""

import numpy as np

from pagefold.core.types import TableEdits
from pagefold.kv.state import KVState


class TableJournal:
    """What the next `StepPlan` must change in the device tables. The host's truth is `KVState`."""

    def __init__(self):
        self._pages: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []

    def pages(self, slot: int, groups: np.ndarray, first: np.ndarray, pages: np.ndarray) -> None:
        """Entries [first[i], first[i] + n) of (slot, groups[i]) become pages[i] (int32[len(groups), n])."""
        count = pages.shape[1]
        quads = np.empty((len(groups), count, 4), np.int32)
        quads[..., 0] = slot
        quads[..., 1] = groups[:, None]
        quads[..., 2] = first[:, None] + np.arange(count)
        quads[..., 3] = pages
        self._pages.append(quads.reshape(-1, 4))

    def lengths(self, kv: KVState) -> None:
        """`evicted` and `cold` of every group of the sequence."""
        groups = np.arange(kv.num_groups, dtype=np.int32)
        self._lengths.append(np.stack([np.full_like(groups, kv.slot), groups, kv.evicted, kv.cold], 1))

    def whole(self, kv: KVState) -> None:
        """Everything about a sequence: after it took a slot, or after its pages were replaced."""
        for g in range(kv.num_groups):
            n = kv.num_pages[g]
            self.pages(kv.slot, np.array([g]), np.array([0]), kv.pages[g : g + 1, :n])
        self.lengths(kv)

    def drain(self) -> TableEdits:
        """All edits since the last call, in order."""
        empty = np.empty((0, 4), np.int32)
        edits = TableEdits(np.concatenate([empty, *self._pages]), np.concatenate([empty, *self._lengths]))
        self._pages, self._lengths = [], []
        return edits
