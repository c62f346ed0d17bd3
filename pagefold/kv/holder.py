"""Who holds which pages: taken, shared, given back, moved to host memory and back. What for is the manager's affair."""

from dataclasses import dataclass

import numpy as np

from pagefold.core.types import Move, SwapOp, TableEdits
from pagefold.kv.bounds import KVGeometry
from pagefold.kv.ledger import Ledger
from pagefold.kv.pool import PagePool
from pagefold.kv.prefix import PrefixCache
from pagefold.kv.state import HOT, KVState, tier_mask
from pagefold.kv.table import TableJournal
from pagefold.kv.trunks import Trunks


@dataclass
class Swapped:
    """Where a preempted sequence's pages wait in host memory, and what it takes to bring them back."""

    kv: KVState
    host_pages: list[np.ndarray]


class PageHolder:
    """The pools of all tiers and of host memory, what is remembered in them, slots and query windows.

    Whoever needs a page gets a free one; if there is none, one that is only remembered: of the prefix cache first, then
    of trunks, for a page of theirs stands for more tokens.
    """

    def __init__(self, geometry: KVGeometry, prefix_caching: bool = True):
        self.geometry = geometry
        self.pools = [PagePool(n) for n in geometry.num_pages]
        self.host_pools = [PagePool(n) for n in geometry.num_host_pages]
        self.prefix = PrefixCache(self.pools[HOT], geometry.page_size) if prefix_caching else None
        self.trunks = Trunks(self.pools, self.host_pools, geometry.num_trunk_pages)
        self.journal = TableJournal()
        self.ledger = Ledger()
        self.live: list[KVState] = []
        self._slots = list(range(geometry.max_seqs, 0, -1))  # slot 0 is the garbage room of padding
        self._windows = list(range(geometry.window_slots, 0, -1))

    # ---- what fits

    @property
    def num_tiers(self) -> int:
        return len(self.pools)

    def room(self, tier: int = HOT) -> int:
        """Pages that a sequence without a reservation may take now."""
        pool = self.pools[tier]
        return pool.num_available - pool.surplus - self.ledger.held_back(tier)

    def _take(self, tier: int, count: int, reserved: bool) -> np.ndarray:
        pool = self.pools[tier]
        if pool.num_free < count:
            if tier == HOT and self.prefix is not None:
                self.prefix.make_room(count)
            self.trunks.make_room(tier, count)  # last: a page of theirs stands for more tokens
        return pool.take(count, reserved)

    def _unpromised(self, tier: int, kv: KVState) -> int:
        """Pages that may be given to a new sequence beside those that others, and folds with it among them, rely on."""
        pool = self.pools[tier]
        return pool.num_available - pool.surplus - self.ledger.held_back(tier, kv)

    # ---- sequences come and go

    def _take_slot(self, kv: KVState) -> None:
        kv.slot = self._slots.pop()
        kv.quiet_until = 0
        self.live.append(kv)
        self.ledger.join(kv)
        self.journal.whole(kv)

    def lend_window(self, kv: KVState) -> bool:
        """Lend a query window. False if none is left."""
        if kv.window_slot == 0 and self._windows:
            kv.window_slot = self._windows.pop()
        return kv.window_slot != 0

    def _return_window(self, window_slot: int) -> None:
        if window_slot:
            self._windows.append(window_slot)

    def _give_back(self, kv: KVState, tier: int, pages: np.ndarray) -> None:
        kv.hold(tier, -len(pages))
        self._drop(tier, pages, kv.reserved)

    def _drop(self, tier: int, pages: np.ndarray, reserved: bool) -> None:
        if len(pages):
            self.pools[tier].drop(pages, reserved)

    def release(self, kv: KVState) -> None:
        """The sequence is done, aborted or dropped for recomputation: everything it holds goes back."""
        for tier in range(self.num_tiers):
            self._drop(tier, kv.tier_pages(tier), kv.reserved)
        if kv.ticket:
            self._drop(kv.ticket.dst_tier, kv.ticket.dst, kv.reserved)
            self._return_window(kv.ticket.window_slot)
        self._return_window(kv.window_slot)
        kv.ticket, kv.window_slot = None, 0
        self._slots.append(kv.slot)
        self.live.remove(kv)
        self.ledger.leave(kv)
        self.journal.forget(kv)

    def forget_all(self) -> None:
        """No page is known to hold what it should."""
        if self.prefix is not None:
            self.prefix.clear()
        self.trunks.clear()

    # ---- swap

    def swap_out(self, kv: KVState) -> Swapped | None:
        """Move a sequence's pages to host memory and release it. None, and nothing changed, if the host is full.

        The sequence must hold no window and have no fold in flight.
        """
        assert kv.ticket is None and kv.window_slot == 0
        pages = [kv.tier_pages(tier) for tier in range(self.num_tiers)]
        if not self.fits_host(kv):
            return None
        host = []
        for tier, (pool, out) in enumerate(zip(self.host_pools, pages, strict=True)):
            self.trunks.make_host_room(tier, len(out))
            host.append(pool.take(len(out), False))
            if len(out):
                self.trunks.copies.append(SwapOp(tier, Move.OUT, out, host[tier]))
        self.release(kv)
        return Swapped(kv, host)

    def fits_host(self, kv: KVState) -> bool:
        """Whether host memory has room for what the sequence holds."""
        return all(kv.held[tier] <= pool.num_available for tier, pool in enumerate(self.host_pools))

    def swap_in(self, swapped: Swapped, margin: int = 0) -> bool:
        """Bring a sequence back under a new slot, on pages of its own. False, and nothing changed, without room.

        margin   pages that must stay free beside the sequence's own, if it has no reservation
        """
        kv = swapped.kv
        if not self._slots:
            return False
        for tier in range(self.num_tiers):
            need = max(len(swapped.host_pages[tier]), kv.reserve[tier])
            if not kv.reserved and tier == HOT and self.live:
                need += margin + kv.num_groups
            if self._unpromised(tier, kv) < need:
                return False
        for tier, host in enumerate(swapped.host_pages):
            fresh = self._take(tier, len(host), kv.reserved)
            if len(host):
                self.trunks.copies.append(SwapOp(tier, Move.IN, host, fresh))
                kv.pages[tier_mask(tier, kv.pages.shape[1], kv.num_pages, kv.cold)] = fresh
        kv.num_indexed = -1
        self._take_slot(kv)
        return True

    def discard(self, swapped: Swapped) -> None:
        """Forget a swapped sequence (it was aborted, or its pages were copied back)."""
        for pool, pages in zip(self.host_pools, swapped.host_pages, strict=True):
            pool.drop(pages, False)

    # ---- for the worker and for tests

    def drain_edits(self) -> TableEdits:
        """What the device tables must change, each entry once."""
        return self.journal.drain()

    def drain_copies(self) -> list[SwapOp]:
        """The copies of pages to make before the next step, in this order: a page may be copied from, given away and
        copied to."""
        copies, self.trunks.copies = self.trunks.copies, []
        return copies

    @property
    def num_windows_free(self) -> int:
        return len(self._windows)

    def check(self) -> None:
        """Every page has as many references as holders, and reservations are covered."""
        for tier, pool in enumerate(self.pools):
            pool.check()
            refs = np.zeros(pool.num_pages, np.int32)
            for kv in self.live:
                np.add.at(refs, kv.tier_pages(tier), 1)
                if kv.ticket and kv.ticket.dst_tier == tier:
                    np.add.at(refs, kv.ticket.dst, 1)
            assert np.array_equal(refs, pool.refs), f"tier {tier}: references and holders differ"
            memories = self.trunks.count_memories(tier, on_host=False)
            if tier == HOT and self.prefix is not None:
                memories += self.prefix.count_memories()
            assert np.array_equal(memories, pool.memories), f"tier {tier}: it is not known who remembers a page"
            assert np.array_equal(self.trunks.count_memories(tier, on_host=True), self.host_pools[tier].memories)
            assert pool.num_available >= self.ledger.promised[tier], f"tier {tier}: more is promised than there is"
        for kv in self.live:
            assert np.array_equal(kv.num_pages, -(-kv.rows // kv.page_size)), "a group owns ceil(rows / page) pages"
            if kv.num_tokens % kv.page_size:
                pages, pool = kv.pages[np.arange(kv.num_groups), kv.num_pages - 1], self.pools[HOT]
                assert (pool.refs[pages] == 1).all() and not pool.memories[pages].any(), "an open page is shared"
        lent = sum((kv.window_slot != 0) + bool(kv.ticket and kv.ticket.window_slot) for kv in self.live)
        assert lent + len(self._windows) == self.geometry.window_slots
        assert len(self.live) + len(self._slots) == self.geometry.max_seqs
