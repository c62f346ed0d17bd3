"""Edits of the device page table, collected on the host and sent once a step."""

import numpy as np

from pagefold.core.types import TableEdits
from pagefold.kv.state import KVState


class TableJournal:
    """What the next `StepPlan` must change in the device tables. The host's truth is `KVState`.

    Only places are noted; what they hold is read when the plan is made. So no entry is sent twice.
    """

    def __init__(self):
        self._pages: dict[KVState, np.ndarray] = {}  # int32[G]: entries from this one on may have changed
        self._lengths: dict[KVState, None] = {}

    def pages(self, kv: KVState, first: np.ndarray) -> None:
        """Entries of group g from first[g] (int32[G]) on have changed."""
        known = self._pages.get(kv)
        self._pages[kv] = first if known is None else np.minimum(known, first)

    def lengths(self, kv: KVState) -> None:
        """`evicted` or `cold` have changed."""
        self._lengths[kv] = None

    def whole(self, kv: KVState) -> None:
        """The sequence took a slot: everything about it is new there."""
        self._pages[kv] = np.zeros(kv.num_groups, np.int32)
        self._lengths[kv] = None

    def forget(self, kv: KVState) -> None:
        """The sequence gave its slot back."""
        self._pages.pop(kv, None)
        self._lengths.pop(kv, None)

    def drain(self) -> TableEdits:
        """All edits since the last call."""
        edits = TableEdits(self._page_edits(list(self._pages)), self._length_edits(list(self._lengths)))
        self._pages, self._lengths = {}, {}
        return edits

    def _page_edits(self, changed: list[KVState]) -> np.ndarray:
        if not changed:
            return np.empty((0, 4), np.int32)
        first = np.stack([self._pages[kv] for kv in changed])  # int32[K, G]
        count = np.maximum(np.stack([kv.num_pages for kv in changed]) - first, 0)
        ends = count.sum(1).cumsum()
        edits = np.empty((ends[-1], 4), np.int32)
        # row r = (sequence, group) has count[r] entries, one after the other
        num_groups, count, first = first.shape[1], count.ravel(), first.ravel()
        rows = np.repeat(np.arange(len(count)), count)
        edits[:, 1] = groups = rows % num_groups
        edits[:, 2] = index = np.arange(len(rows)) + (first - (count.cumsum() - count))[rows]
        edits[:, 0] = np.array([kv.slot for kv in changed])[rows // num_groups]
        start = 0
        for kv, end in zip(changed, ends.tolist(), strict=True):
            edits[start:end, 3] = kv.pages[groups[start:end], index[start:end]]
            start = end
        return edits

    def _length_edits(self, changed: list[KVState]) -> np.ndarray:
        if not changed:
            return np.empty((0, 4), np.int32)
        num_groups = changed[0].num_groups
        edits = np.empty((len(changed), num_groups, 4), np.int32)
        edits[..., 0] = np.array([kv.slot for kv in changed])[:, None]
        edits[..., 1] = np.arange(num_groups)
        edits[..., 2] = np.stack([kv.evicted for kv in changed])
        edits[..., 3] = np.stack([kv.cold for kv in changed])
        return edits.reshape(-1, 4)
