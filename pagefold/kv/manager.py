"""The scheduler's only door to KV memory: admission by reservation, growth, folding, prefix hits, swap."""

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

import numpy as np

from pagefold.core.types import InputError, Job, SwapOp, TableEdits
from pagefold.kv.ledger import Ledger
from pagefold.kv.pool import PagePool
from pagefold.kv.prefix import PrefixCache
from pagefold.kv.state import COLD, HOT, FoldPolicy, Folds, KVState
from pagefold.kv.table import TableJournal


@dataclass(frozen=True)
class KVGeometry:
    """Sizes that follow from the configuration and the model.

    num_pages        pages per tier, page 0 included (one tier, or hot and cold)
    num_host_pages   pages per tier of the host store that preempted requests are swapped to
    bytes_per_page   per tier
    num_groups       page-table rows per sequence
    page_size        rows per page
    max_seqs         sequences that run at once
    window_slots     query windows to lend
    """

    num_pages: tuple[int, ...]
    num_host_pages: tuple[int, ...]
    bytes_per_page: tuple[int, ...]
    num_groups: int
    page_size: int
    max_seqs: int
    window_slots: int


@dataclass
class Swapped:
    """Where a preempted sequence's pages wait in host memory, and what it takes to bring them back."""

    kv: KVState
    host_pages: list[np.ndarray]


class KVManager:
    """Decides in integers who holds which pages; the bytes are moved later, by the worker that gets the plan.

    Memory rules:

    * A *reserved* sequence (one that evicts at fixed token counts) was promised its peak at admission, so it never
      waits for pages to grow. The ledger knows what is still promised and not yet taken.
    * A compaction writes fresh pages before it gives the old ones back. Spare pages are kept for that; a
      sequence whose compaction finds none waits at that token.
    * The others take what is left, and are preempted when nothing is.
    """

    def __init__(self, geometry: KVGeometry, prefix_caching: bool = True):
        self.geometry = geometry
        self.pools = [PagePool(n) for n in geometry.num_pages]
        self.host_pools = [PagePool(n) for n in geometry.num_host_pages]
        self.prefix = PrefixCache(self.pools[HOT], geometry.page_size) if prefix_caching else None
        self.journal = TableJournal()
        self.ledger = Ledger()
        self.live: list[KVState] = []
        self._slots = list(range(geometry.max_seqs, 0, -1))  # slot 0 is the garbage room of padding
        self._windows = list(range(geometry.window_slots, 0, -1))

    # ---- what fits

    @property
    def num_tiers(self) -> int:
        return len(self.pools)

    def peak_pages(self, policy: FoldPolicy, prompt_len: int, last: int) -> list[int]:
        """Most pages per tier that a sequence ever holds between compactions (their destinations not counted).

        Rows of a head stay within budget + period + lag, or the prompt's length (to the next event, and lag) before the
        first fold is visible.
        """
        size = self.geometry.page_size
        pages = lambda rows: np.minimum(-(-np.asarray(rows) // size), math.ceil(last / size))  # noqa: E731
        budget = policy.budget
        if not policy.evicts:
            hot, cold = last, 0
            if policy.cold_after is not None:
                prompt_rows = -(-prompt_len // policy.period) * policy.period
                hot = max(prompt_rows, policy.cold_after + size + policy.period) + policy.lag
                cold = max(0, last - policy.cold_after)
            return [int(pages([hot] * len(budget)).sum()), int(pages([cold] * len(budget)).sum())]
        decode = budget + policy.period + policy.lag
        if policy.cold_after is not None:
            decode = np.minimum(budget, policy.cold_after + size) + policy.period + policy.lag
        prompt = np.full_like(budget, -(-prompt_len // policy.period) * policy.period)
        if policy.prefill_period:
            prompt = np.minimum(prompt, budget + policy.prefill_period)
        cold = 0 if policy.cold_after is None else int(pages(budget).sum())
        return [int(pages(np.maximum(decode, prompt + policy.lag)).sum()), cold]

    def _copy_pages(self, policy: FoldPolicy, last: int) -> list[int]:
        """Destination pages per tier of one whole compaction; none if the sequence ends before it is over budget."""
        need, size = [0, 0], self.geometry.page_size
        if policy.evicts:
            folded = policy.budget[policy.budget + size < last]
            need[HOT if policy.cold_after is None else COLD] = int((folded // size).sum())
        return need

    def fits_requests(self, policy: FoldPolicy, prompt_len: int, last: int) -> int:
        """Sequences of this length that run together without a preemption or a wait for pages, if each comes when the
        prompts of those before it are folded."""
        peaks, settled = self.peak_pages(policy, prompt_len, last), self.peak_pages(policy, 0, last)
        hot, cold = self._copy_pages(policy, last)

        def too_many(count: int) -> bool:
            spare = Ledger.spare_for(Counter({(policy.lag + 1, policy.period, hot, cold): count}))
            needs = (peak + (count - 1) * each + kept for peak, each, kept in zip(peaks, settled, spare))
            return any(need >= pool.num_pages for need, pool in zip(needs, self.pools))

        return bisect_left(range(1, self.geometry.max_seqs + 1), True, key=too_many)

    def check_fits(self, policy: FoldPolicy, prompt_len: int, last: int) -> None:
        """Refuse a request that could never run, saying the largest that could.

        Raises InputError naming `prompt` or `max_tokens`.
        """
        copies = self._copy_pages(policy, last)
        for tier in range(self.num_tiers):
            room = self.pools[tier].num_pages - 1 - copies[tier]
            need = self.peak_pages(policy, prompt_len, last)[tier]
            if need <= room:
                continue
            geometry = self.geometry
            if policy.evicts and self.peak_pages(policy, 0, last)[tier] > room:
                facts = f"{need + copies[tier]} pages while folding, {self.pools[tier].num_pages - 1} in the pool"
                raise InputError("kv_budget", f"got {int(policy.budget.mean())} rows a head, needs {facts}")
            per_row = geometry.bytes_per_page[tier] // geometry.page_size
            most = max(0, room // geometry.num_groups * geometry.page_size)
            facts = (
                f"{need + copies[tier]} pages needed, {self.pools[tier].num_pages - 1} in the pool "
                f"({geometry.page_size} rows a page, {per_row} bytes a row and group)"
            )
            if self.peak_pages(policy, prompt_len, prompt_len + 1)[tier] > room:
                limit = f"got {prompt_len} tokens, the largest that fits is {max(0, most - 1)}"
                raise InputError("prompt", f"{limit}: {facts}")
            raise InputError("max_tokens", f"got {last - prompt_len + 1}, at most {most - prompt_len + 1} fit: {facts}")

    def fits_tokens(self, policy: FoldPolicy, prompt_len: int, most: int) -> int:
        """Tokens, at most `most`, of the longest never-evicting sequence with this prompt that the pools hold."""

        def too_long(last: int) -> bool:
            return any(n >= p.num_pages for n, p in zip(self.peak_pages(policy, prompt_len, last), self.pools))

        return prompt_len - 1 + bisect_left(range(prompt_len, most + 1), True, key=too_long)

    def room(self, tier: int = HOT) -> int:
        """Pages that a sequence without a reservation may take now."""
        pool = self.pools[tier]
        return pool.num_available - pool.surplus - self.ledger.held_back(tier)

    def _take(self, tier: int, count: int, reserved: bool) -> np.ndarray:
        pool = self.pools[tier]
        if tier == HOT and self.prefix is not None and pool.num_free < count:
            self.prefix.make_room(count)
        return pool.take(count, reserved)

    # ---- life of a sequence

    def admit(
        self, policy: FoldPolicy, tokens: list[int], prompt_len: int, last: int, salt: str | None, margin: int = 0
    ) -> KVState | None:
        """Give a sequence a slot, the pages of its longest cached prefix, and, if it evicts, its reservation.

        salt     None: no prefix hits (every token must be computed)
        margin   pages that must stay free beside what the sequence's tokens need
        Returns None, and changes nothing, if there is no room now.
        """
        if not self._slots:
            return None
        pool, groups, size = self.pools[HOT], self.geometry.num_groups, self.geometry.page_size
        kv = KVState(policy, size, prompt_len, last, 0, None if policy.under_pressure else 0)
        kv.copies = self._copy_pages(policy, last)
        kv.bound = self.peak_pages(policy, 0, last) if policy.evicts else [0, 0]
        if policy.evicts and not policy.under_pressure:
            kv.reserved, kv.reserve = True, self.peak_pages(policy, prompt_len, last)
            for tier, other in enumerate(self.pools):
                if other.num_available - other.surplus - self.ledger.held_back(tier, kv) < kv.reserve[tier]:
                    return None
        elif self.room() < margin:
            return None  # whatever it finds cached
        hits, key = np.empty((0, groups), np.int32), b""
        if self.prefix is not None and salt is not None:
            key = self.prefix.root(salt)
            event, _ = kv.upcoming()
            computed = max(1, policy.window if policy.needs_window else 1)  # tokens before the event that must be
            limit = len(tokens) - 1 if event is None else min(len(tokens) - 1, event - computed)
            hits, key = self.prefix.match(salt, tokens, limit)
        hit_pages = hits.ravel()
        if not kv.reserved:
            idle = int((pool.refs[hit_pages] == 0).sum())
            # a hit on a page that only a reserved sequence holds will not come back when that one folds
            shared = int(pool.reserved[hit_pages][pool.refs[hit_pages] == 1].sum())
            need = -(-len(tokens) // size) * groups
            if not policy.evicts:  # with a cold tier not all of them are hot at once
                need = min(need, self.peak_pages(policy, prompt_len, last)[HOT])
            fresh = max(0, need - len(hit_pages))
            own_spare = self.ledger.held_back(HOT, kv) - self.ledger.held_back(HOT)
            if self.room() - own_spare - margin < fresh + idle + shared:
                return None
        kv.index_key = key
        if len(hits):
            pool.hold(hit_pages, kv.reserved)
            kv.append_pages(hits.T.copy())
            kv.num_tokens = kv.num_cached = len(hits) * size
            kv.num_indexed = len(hits)
            self.prefix.touch(key)  # type: ignore[union-attr]
        if not kv.index_key:
            kv.num_indexed = -1
        self._take_slot(kv)
        return kv

    def _take_slot(self, kv: KVState) -> None:
        kv.slot = self._slots.pop()
        kv.quiet_until = 0
        self.live.append(kv)
        self.ledger.join(kv)
        self.journal.whole(kv)

    def extend(self, kv: KVState, num_tokens: int) -> bool:
        """Pages for `num_tokens` more tokens. False, and nothing changed, if there is no room."""
        count = kv.new_pages(num_tokens)
        need = count * kv.num_groups
        if need and not kv.reserved and self.room() < need:
            return False
        if need:
            pages = self._take(HOT, need, kv.reserved).reshape(kv.num_groups, count)
            self.journal.pages(kv, kv.append_pages(pages))
            self.ledger.recount(kv)
        kv.num_tokens += num_tokens
        return True

    def can_launch(self, kv: KVState, at: int) -> bool:
        """Whether the destination pages of the folds due at token count `at` can be had now."""
        tier = self._fold_tier(kv)
        pool = self.pools[tier]
        room = pool.num_available - self.ledger.promised[tier] - pool.surplus
        if kv.reserved:
            # pages it grows by, and cold pages that cooling fills up to the promise, are its own already
            room += max(0, kv.reserve[tier] - kv.held[tier]) if tier == COLD else 0
        elif tier == HOT:
            room -= kv.new_pages(at - kv.num_tokens) * kv.num_groups
        return int(kv.due_folds(at).num_dst.sum()) <= room

    def _fold_tier(self, kv: KVState) -> int:
        return HOT if kv.policy.cold_after is None else COLD

    def launch(self, kv: KVState, policy_index: int) -> list[Job]:
        """Fold at the present token count, an event: take the destination pages and describe the jobs.

        The old pages stay readable until `commit`. The lent window goes with the ticket.
        """
        tier, folds = self._fold_tier(kv), kv.due_folds(kv.num_tokens)
        dst = self._take(tier, int(folds.num_dst.sum()), kv.reserved)
        jobs = self._jobs(kv, folds, dst, tier, policy_index)
        kv.launch(folds, dst, tier)
        self.ledger.recount(kv)
        return jobs

    @staticmethod
    def _jobs(kv: KVState, folds: Folds, dst: np.ndarray, dst_tier: int, policy_index: int) -> list[Job]:
        slot, at, size, window = kv.slot, kv.num_tokens, kv.page_size, kv.window_slot
        jobs, end = [], 0
        for group, first, num_src, num_dst, num_rows in zip(
            *(column.tolist() for column in folds), kv.rows[folds.groups].tolist(), strict=True
        ):
            start, end = end, end + num_dst
            to, rows = dst[start:end], num_dst * size
            jobs.append(Job(slot, group, first, num_src, num_rows, at, rows, to, dst_tier, window, policy_index))
        return jobs

    def commit(self, kv: KVState) -> None:
        """The folds in flight become visible; the old pages go back.

        pages of one group, while a fold is in flight
          [0, first)          untouched (cold pages, when cooling)
          [first, first + S)  source: full pages at launch, read-only until now, given back now
          [first + S, end)    tail: appended since launch; its first page is page-aligned by construction
        afterwards
          [first, first + D)  destination
          [first + D, end - S + D)   tail
        """
        ticket = kv.ticket
        assert ticket is not None
        groups, first, num_src, num_dst = ticket.folds
        shrink, end = num_src - num_dst, int(kv.num_pages.max())
        pages, index = kv.pages[groups, :end], np.arange(end)
        inside = index >= first[:, None]
        source = inside & (index < (first + num_src)[:, None])
        if kv.held[COLD]:
            was_cold = index < kv.cold[groups, None]
            self._give_back(kv, COLD, pages[source & was_cold])
            self._give_back(kv, HOT, pages[source & ~was_cold])
        else:
            self._give_back(kv, HOT, pages[source])
        tail = index >= (first + num_dst)[:, None]
        moved = pages[np.arange(len(groups))[:, None], np.minimum(index + tail * shrink[:, None], end - 1)]
        moved[inside & ~tail] = ticket.dst
        kv.pages[groups, :end] = moved
        kv.num_pages[groups] -= shrink
        kv.evicted, kv.cold = ticket.evicted, ticket.cold
        kv.hold(ticket.dst_tier, len(ticket.dst))
        kv.num_compactions += bool(shrink.any())
        changed = kv.num_pages.copy()
        changed[groups] = first
        self.journal.pages(kv, changed)
        self.journal.lengths(kv)
        self._return_window(ticket.window_slot)
        kv.ticket = None
        kv.num_indexed = -1
        if kv.reserved and kv.num_tokens >= kv.prompt_len:
            kv.reserve = kv.bound  # the prompt's peak is behind it
        self.ledger.recount(kv)
        if kv.policy.evicts and not kv.reserved and kv.evicted.any():
            self._try_reserve(kv)

    def _try_reserve(self, kv: KVState) -> None:
        """A request that began to evict under pressure is bounded from now on: promise it its bound, if possible."""
        for tier in range(self.num_tiers):
            own = kv.tier_pages(tier)
            shared = int((self.pools[tier].refs[own] > 1).sum())
            if self.room(tier) < max(0, kv.bound[tier] - kv.held[tier]) + shared:
                return
        kv.reserve, kv.reserved = kv.bound, True
        self.ledger.recount(kv)
        for tier in range(self.num_tiers):
            self.pools[tier].set_reserved(kv.tier_pages(tier))

    def start_folding(self, kv: KVState) -> None:
        """Ask a request in pressure mode to begin evicting, as soon as a whole window of queries can be kept."""
        kv.fold_from = kv.num_tokens + kv.policy.window
        kv.folds_changed()

    def index(self, kv: KVState, tokens: list[int]) -> None:
        """Tell the prefix cache of pages that are full by now and that nothing was ever evicted from.

        tokens   those whose ids are known; a page with a token that is still being drawn has to wait
        """
        if self.prefix is None or kv.num_indexed < 0:
            return
        full, size = min(kv.num_tokens, len(tokens)) // kv.page_size, kv.page_size
        if full > kv.num_indexed:
            for i in range(kv.num_indexed, full):
                page_tokens = tuple(tokens[i * size : (i + 1) * size])
                kv.index_key = self.prefix.insert(kv.index_key, page_tokens, kv.pages[:, i])
            kv.num_indexed = full
            self.prefix.touch(kv.index_key)

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

    # ---- swap

    def swap_out(self, kv: KVState) -> tuple[Swapped, list[SwapOp]] | None:
        """Move a sequence's pages to host memory and release it. None, and nothing changed, if the host is full.

        The sequence must hold no window and have no fold in flight.
        """
        assert kv.ticket is None and kv.window_slot == 0
        pages = [kv.tier_pages(tier) for tier in range(self.num_tiers)]
        if any(len(p) > pool.num_free for p, pool in zip(pages, self.host_pools, strict=True)):
            return None
        host = [pool.take(len(p), False) for p, pool in zip(pages, self.host_pools, strict=True)]
        ops = [SwapOp(t, True, pages[t], host[t]) for t in range(self.num_tiers) if len(pages[t])]
        self.release(kv)
        return Swapped(kv, host), ops

    def swap_in(self, swapped: Swapped, margin: int = 0) -> list[SwapOp] | None:
        """Bring a sequence back under a new slot, on pages of its own. None, and nothing changed, without room.

        margin   pages that must stay free beside the sequence's own, if it has no reservation
        """
        kv = swapped.kv
        if not self._slots:
            return None
        for tier, pool in enumerate(self.pools):
            need = max(len(swapped.host_pages[tier]), kv.reserve[tier])
            if not kv.reserved and tier == HOT and self.live:
                need += margin + kv.num_groups
            if pool.num_available - pool.surplus - self.ledger.held_back(tier, kv) < need:
                return None
        ops, fresh = [], []
        for tier, host in enumerate(swapped.host_pages):
            fresh.append(self._take(tier, len(host), kv.reserved))
            if len(host):
                ops.append(SwapOp(tier, False, host, fresh[tier]))
        index = np.arange(kv.pages.shape[1])
        cold = index < kv.cold[:, None]
        valid = index < kv.num_pages[:, None]
        kv.pages[valid & ~cold] = fresh[HOT]
        if self.num_tiers > 1:
            kv.pages[valid & cold] = fresh[COLD]
        kv.num_indexed = -1
        self._take_slot(kv)
        return ops

    def discard(self, swapped: Swapped) -> None:
        """Forget a swapped sequence (it was aborted, or its pages were copied back)."""
        for pool, pages in zip(self.host_pools, swapped.host_pages, strict=True):
            pool.drop(pages, False)

    # ---- for the worker and for tests

    def drain_edits(self) -> TableEdits:
        """What the device tables must change, each entry once."""
        return self.journal.drain()

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
            assert pool.num_available >= self.ledger.promised[tier], f"tier {tier}: more is promised than there is"
        for kv in self.live:
            assert np.array_equal(kv.num_pages, -(-kv.rows // kv.page_size)), "a group owns ceil(rows / page) pages"
        lent = sum((kv.window_slot != 0) + bool(kv.ticket and kv.ticket.window_slot) for kv in self.live)
        assert lent + len(self._windows) == self.geometry.window_slots
        assert len(self.live) + len(self._slots) == self.geometry.max_seqs
