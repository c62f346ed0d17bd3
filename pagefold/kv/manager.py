"""The scheduler's only door to KV memory: admission by reservation, growth, folding, prefix hits, swap."""

import numpy as np

from pagefold.core.types import Job, Move, SwapOp
from pagefold.kv.bounds import KVGeometry, copied_pages, peak_pages
from pagefold.kv.holder import PageHolder
from pagefold.kv.state import COLD, HOT, FoldPolicy, Folds, KVState, tier_mask
from pagefold.kv.timeline import fits_in_time
from pagefold.kv.trunks import Trunk


class KVManager(PageHolder):
    """Decides in integers who holds which pages; the bytes are moved later, by the worker that gets the plan.

    Memory rules:

    * A *reserved* sequence (one that evicts at fixed token counts) was promised its peak at admission, so it never
      waits for pages to grow. The ledger knows what is still promised and not yet taken.
    * A compaction writes fresh pages before it gives the old ones back. Spare pages are kept for that; a
      sequence whose compaction finds none waits at that token.
    * The others take what is left, and are preempted when nothing is. One that evicts, and whose peak is not to be had
      yet, is among them if it will be by the time it needs it: it is *early*, until it can be promised its bound.
    """

    def __init__(self, geometry: KVGeometry, prefix_caching: bool = True):
        super().__init__(geometry, prefix_caching)
        self._found: tuple[list[int], int, tuple[str, str], int, tuple[Trunk, int] | None] | None = None
        self.early: list[KVState] = []
        self._no_for = 0  # steps for which nobody may begin early
        self.pages_freed = 0  # by compactions so far: pages given back less those of the copies
        self.pages_copied = 0  # of the pages they gave back, the ones that others, or the prefix cache, still need

    # ---- life of a sequence

    def admit(
        self,
        policy: FoldPolicy,
        tokens: list[int],
        prompt_len: int,
        last: int,
        salt: str | None,
        margin: int = 0,
        resumes: bool = False,
    ) -> KVState | None:
        """Give a sequence a slot, what is known of its beginning, and, if it evicts, its reservation.

        That is the rows of a trunk, or the pages of the longest cached prefix if these are as many tokens; nothing was
        evicted from them, so they are the better ones.

        salt      None: nothing is known (every token must be computed)
        margin    pages that must stay free beside what the sequence's tokens need
        resumes   it may grow from a trunk
        Returns None, and changes nothing, if there is no room now.
        """
        if not self._slots:
            return None
        fresh = self._blank(policy, prompt_len, last)
        grown = self._grown(policy, tokens, prompt_len, last, salt) if resumes and salt is not None else None
        if grown is not None:
            trunk, kv = grown
            if self._resume_fits(kv, trunk, tokens, margin):
                hits, key = self._cached(fresh, tokens, salt)
                if len(hits) * kv.page_size < kv.num_cached or not self._fits(fresh, tokens, margin, hits):
                    return self._resume(kv, trunk)
            elif self.live:
                return None  # alone it would fit, or else without a trunk
        early = fresh.reserved and bool(self.early or not self._fits(fresh, tokens, margin, None))
        if early:
            if self.num_tiers > 1 or fresh.reserve != fresh.bound:
                return None  # a long prompt holds more at once
            fresh.reserve, fresh.reserved = [0, 0], False
        if not self._fits(fresh, tokens, margin, None) or early and not self._fits_in_time(fresh):
            return None
        hits, key = self._cached(fresh, tokens, salt)
        if not self._fits(fresh, tokens, margin, hits):
            return None
        if early:
            self.early.append(fresh)
        fresh.index_key = key
        if len(hits):
            self.pools[HOT].hold(hits.ravel(), fresh.reserved)
            fresh.append_pages(hits.T.copy())
            fresh.num_tokens = fresh.num_cached = len(hits) * fresh.page_size
            fresh.num_indexed = len(hits)
            self.prefix.touch(key)  # type: ignore[union-attr]
        if not fresh.index_key:
            fresh.num_indexed = -1
        self._take_slot(fresh)
        return fresh

    def _blank(self, policy: FoldPolicy, prompt_len: int, last: int) -> KVState:
        size = self.geometry.page_size
        kv = KVState(policy, size, prompt_len, last, 0, None if policy.under_pressure else 0)
        kv.copies = copied_pages(policy, size, last)
        if policy.evicts:
            kv.bound = peak_pages(policy, size, 0, last)
            if not policy.under_pressure:
                kv.reserved, kv.reserve = True, peak_pages(policy, size, prompt_len, last)
        return kv

    def _cached(self, kv: KVState, tokens: list[int], salt: str | None) -> tuple[np.ndarray, bytes]:
        """int32[n, G] pages of the longest cached prefix that a new sequence may use, and the key of the last.

        The tokens of its first event's window are computed, and so is what follows the event.
        """
        if self.prefix is None or salt is None:
            return np.empty((0, self.geometry.num_groups), np.int32), b""
        return self.prefix.match(salt, tokens, self._most_known(kv, len(tokens)))

    @staticmethod
    def _most_known(kv: KVState, num_tokens: int) -> int:
        """How many of a new sequence's tokens need not be computed: the last one must, and its first event's window."""
        event, _ = kv.upcoming()
        return num_tokens - 1 if event is None else min(num_tokens - 1, event - kv.policy.lead)

    def _fits(self, kv: KVState, tokens: list[int], margin: int, hits: np.ndarray | None) -> bool:
        """Whether there is room for a new sequence that finds these cached pages; with None, whether it is worth
        looking for them."""
        if kv.reserved:
            return all(self._unpromised(tier, kv) >= kv.reserve[tier] for tier in range(self.num_tiers))
        if hits is None:
            return self.room() >= margin
        pool, pages = self.pools[HOT], hits.ravel()
        need = -(-len(tokens) // kv.page_size) * kv.num_groups
        if not kv.policy.evicts:  # with a cold tier not all of them are hot at once
            need = min(need, peak_pages(kv.policy, kv.page_size, kv.prompt_len, kv.last)[HOT])
        idle = int((pool.refs[pages] == 0).sum())
        fresh = max(0, need - len(pages))
        return self._unpromised(HOT, kv) - margin >= fresh + idle + pool.sharing_cost(pages)

    def _fits_in_time(self, kv: KVState) -> bool:
        """Whether a new sequence may begin before it is promised its bound. The head of the queue asks at every step: a
        no holds for a page of steps, or until somebody leaves."""
        if self._no_for:
            self._no_for -= 1
            return False
        fits = fits_in_time(kv, self.live, self._unpromised(HOT, kv))
        self._no_for = 0 if fits else self.geometry.page_size - 1
        return fits

    def promise_early(self) -> None:
        """Promise early sequences their bounds as soon as there is room for all: one alone would take what the others
        grow into first."""
        if not self.early:
            return
        self.early = [kv for kv in self.early if not kv.reserved]  # some were when they first folded
        wanted = sum(max(0, kv.bound[HOT] - kv.held[HOT]) for kv in self.early)
        if self.room() < wanted or any(kv.ticket for kv in self.early):
            return
        for kv in self.early:
            self._try_reserve(kv)
        self.early = [kv for kv in self.early if not kv.reserved]

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
        self.pages_freed += int(shrink.sum())
        if kv.held[COLD]:
            was_cold = index < kv.cold[groups, None]
            self._give_back(kv, COLD, pages[source & was_cold])
            source &= ~was_cold
        hot, sources = self.pools[HOT], pages[source]
        self.pages_copied += int(((hot.refs[sources] > 1) | (hot.memories[sources] > 0)).sum())
        self._give_back(kv, HOT, sources)
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
        kv.ticket, kv.fixed = None, ticket.commit_at
        kv.num_indexed = -1
        if kv.reserved and kv.num_tokens >= kv.prompt_len:
            kv.reserve = kv.bound  # the prompt's peak is behind it
        self.ledger.recount(kv)
        if kv.policy.evicts and not kv.reserved and kv.evicted.any():
            self._try_reserve(kv)

    def _try_reserve(self, kv: KVState) -> None:
        """A request that began to evict under pressure, or early, is bounded: promise it its bound, if possible."""
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
        kv.fold_from = kv.num_tokens + kv.policy.lead
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

    def release(self, kv: KVState) -> None:
        if kv in self.early:
            self.early.remove(kv)
        self._no_for = 0
        super().release(kv)

    # ---- trunks

    def keep(self, kv: KVState, tokens: list[int], salt: str) -> None:
        """The sequence has ended, and these are the tokens it stored: whoever goes on from them need not compute them.

        Call it before `release`. Folds in flight that the next token would have seen become visible; later ones are
        dropped, as if they had not been launched. What was never folded is the prefix cache's.
        """
        if kv.ticket and kv.ticket.commit_at <= len(tokens):
            self.commit(kv)
        if kv.folded and kv.fixed <= len(tokens):
            self.trunks.keep(kv, tokens, salt)

    def _grown(
        self, policy: FoldPolicy, tokens: list[int], prompt_len: int, last: int, salt: str
    ) -> tuple[Trunk, KVState] | None:
        """The trunk to resume from, and a sequence that has its rows, but no slot and no page yet.

        It stands where a sequence would that has the trunk's rows as of `fixed` and went on: so it begins before the
        window of that sequence's next event, even if the trunk knows more.
        """
        root = salt, policy.ask
        asked = tokens, len(tokens), root, self.trunks.changes  # the head of the queue asks every step
        if self._found is None or self._found[0] is not tokens or self._found[1:4] != asked[1:]:
            self._found = *asked, self.trunks.find(root, tokens[:-1])
        if (found := self._found[4]) is None:
            return None
        trunk, shared = found
        kv, size = self._blank(policy, prompt_len, last), self.geometry.page_size
        kv.evicted, kv.cold, kv.num_tokens = trunk.counts.evicted, trunk.counts.cold, trunk.counts.fixed
        known = min(shared, self._most_known(kv, len(tokens)))
        if known < trunk.counts.fixed:
            return None
        if kv.reserved:
            fresh, kv.reserve = kv.reserve, peak_pages(policy, size, prompt_len, last, trunk.counts)
            if any(need > most for need, most in zip(kv.reserve, fresh, strict=True)):
                return None
        kv.num_tokens = kv.num_cached = known
        kv.fixed, kv.trunk, kv.num_indexed, kv.num_compactions = trunk.counts.fixed, trunk, -1, trunk.num_compactions
        kv.num_pages = -(-kv.rows // size)
        kv.folds_changed()
        return trunk, kv

    def _borrowed(self, kv: KVState, trunk: Trunk) -> list[np.ndarray]:
        """Per tier, the trunk's pages that hold rows of the sequence; those of an open last page are the last of each
        group."""
        capacity = trunk.pages.shape[1]
        return [trunk.pages[tier_mask(t, capacity, kv.num_pages, kv.cold)] for t in range(self.num_tiers)]

    def _resume_fits(self, kv: KVState, trunk: Trunk, tokens: list[int], margin: int) -> bool:
        pages = self._borrowed(kv, trunk)
        for tier, pool in enumerate(self.pools):
            shared = pages[tier][:0] if trunk.on_host else pages[tier]
            # an open page is held while it is copied, beside the copy
            extra = pool.sharing_cost(shared) + (kv.num_groups if tier == HOT and not trunk.on_host else 0)
            if kv.reserved:
                if self._unpromised(tier, kv) < kv.reserve[tier] + extra:
                    return False
                continue
            need = len(pages[tier])
            if tier == HOT:
                need = int((-(-(len(tokens) - kv.evicted) // kv.page_size) - kv.cold).sum())
            held = int((pool.refs[shared] > 0).sum())
            if self._unpromised(tier, kv) - (margin if tier == HOT else 0) < need - held + extra:
                return False
        return True

    def _resume(self, kv: KVState, trunk: Trunk) -> KVState:
        """Rows are shared by reference; an open page is copied, for it will be written, and so is all that is in host
        memory."""
        size, borrowed = kv.page_size, self._borrowed(kv, trunk)
        source, move = (self.host_pools, Move.IN) if trunk.on_host else (self.pools, Move.WITHIN)
        is_open = kv.num_tokens % size > 0
        kv.pages = np.zeros((kv.num_groups, int(kv.num_pages.max()) + 8), np.int32)
        kv.pages[:, : trunk.pages.shape[1]] = trunk.pages[:, : kv.pages.shape[1]]
        self.trunks.grow(trunk)
        for tier, pages in enumerate(borrowed):  # first: making room must not touch them
            source[tier].hold(pages, kv.reserved and not trunk.on_host)
        for tier, pages in enumerate(borrowed):
            kv.hold(tier, len(pages))
            copied = np.zeros(kv.pages.shape, bool)
            if trunk.on_host:
                copied = tier_mask(tier, kv.pages.shape[1], kv.num_pages, kv.cold)
            elif is_open and tier == HOT:
                copied[np.arange(kv.num_groups), kv.num_pages - 1] = True
            if copied.any():
                src = kv.pages[copied]
                kv.pages[copied] = self._take(tier, len(src), kv.reserved)
                self.trunks.copies.append(SwapOp(tier, move, src, kv.pages[copied]))
                source[tier].drop(src, kv.reserved and not trunk.on_host)
        self._take_slot(kv)
        return kv
