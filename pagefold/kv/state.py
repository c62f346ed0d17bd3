"""The KV of one sequence as numbers: how long it is, which pages hold it, when it is folded next."""

from dataclasses import dataclass, field

import numpy as np

HOT, COLD = 0, 1


@dataclass(frozen=True)
class FoldPolicy:
    """How one request's rows are folded. All counts are in tokens or rows.

    scorer          spec string of the scorer; None: rows are never evicted
    needs_window    the scorer looks at the queries of the last `window` tokens
    budget          int32[G], rows each head keeps after a compaction, multiples of the page size
    period          tokens between compactions while decoding, a multiple of the page size
    prefill_period  the same while prefilling, a multiple of `period`; None: nothing is folded before the prompt's end
    window          trailing rows that are always kept; window + lag is at most `period`
    sink_tokens     leading rows that are always kept
    lag             tokens from a compaction's launch to the step that sees it (0 while prefilling)
    cold_after      rows that stay hot when older ones are moved to the cold tier; None: there is no cold tier
    under_pressure  nothing is evicted until the scheduler asks for it
    """

    scorer: str | None
    needs_window: bool
    budget: np.ndarray
    period: int
    prefill_period: int | None
    window: int
    sink_tokens: int
    lag: int
    cold_after: int | None
    under_pressure: bool = False

    @property
    def evicts(self) -> bool:
        return self.scorer is not None


@dataclass
class Fold:
    """One group's part of a ticket: source pages [first, first + len(src)) become `dst`."""

    group: int
    first: int
    src: np.ndarray
    dst: np.ndarray
    dst_tier: int


@dataclass
class Ticket:
    """Folds of one sequence that were launched and are not yet visible.

    commit_at     the folds become visible before token number `commit_at` is computed
    window_slot   the window that the folds read, held until the commit
    """

    commit_at: int
    folds: list[Fold]
    window_slot: int


@dataclass(eq=False)
class KVState:
    """Rows of one sequence in the paged store.

        num_tokens    tokens stored so far, the same for every group
        prompt_len    tokens of the prompt (of the request; a resumed request may have to recompute more)
        last          no token from this number on will ever be stored
        evicted       int32[G]   rows dropped, a multiple of the page size; rows of g = num_tokens - evicted[g]
        cold          int32[G]   leading pages that sit in the cold tier
        pages         int32[G, capacity]   page ids, [0, num_pages[g]) are valid
        num_pages     int32[G]
        slot          row of the device tables
        fold_from     eviction may start from this token count on (pressure mode moves it; None: not yet)
        held          pages held per tier; peak_held: the most so far
        window_slot   query window lent to the sequence, 0: none
        reserve       pages per tier promised at admission; 0 where the sequence takes what is free
        num_cached    tokens taken from the prefix cache at admission
        num_indexed   leading pages the prefix cache was told of; -1: no more, since a fold is visible

    All groups stay in phase: what a group has evicted is a multiple of the page size, so every group opens a new
    page at the same token.
    """

    policy: FoldPolicy
    page_size: int
    prompt_len: int
    last: int
    slot: int
    fold_from: int | None
    num_tokens: int = 0
    evicted: np.ndarray = field(init=False)
    cold: np.ndarray = field(init=False)
    pages: np.ndarray = field(init=False)
    num_pages: np.ndarray = field(init=False)
    window_slot: int = 0
    ticket: Ticket | None = None
    held: list[int] = field(default_factory=lambda: [0, 0])
    peak_held: list[int] = field(default_factory=lambda: [0, 0])
    reserve: list[int] = field(default_factory=lambda: [0, 0])
    reserved: bool = False
    num_cached: int = 0
    num_indexed: int = 0
    index_key: bytes = b""
    num_compactions: int = 0

    def __post_init__(self):
        groups = len(self.policy.budget)
        self.evicted, self.cold, self.num_pages = (np.zeros(groups, np.int32) for _ in range(3))
        self.pages = np.zeros((groups, 8), np.int32)

    @property
    def rows(self) -> np.ndarray:
        """int32[G]: rows stored."""
        return self.num_tokens - self.evicted

    @property
    def folded(self) -> bool:
        """Rows were evicted or cooled: recomputing the tokens would not bring the same rows back."""
        return bool(self.evicted.any() or self.cold.any())

    @property
    def num_groups(self) -> int:
        return len(self.evicted)

    def count_held(self) -> None:
        """Bring `held` up to date after pages were replaced."""
        cold = int(self.cold.sum())
        self.held = [int(self.num_pages.sum()) - cold, cold]
        self.peak_held = [max(old, new) for old, new in zip(self.peak_held, self.held, strict=True)]

    def tier_pages(self, tier: int) -> np.ndarray:
        """All page ids held in one tier."""
        index = np.arange(self.pages.shape[1])
        cold = index < self.cold[:, None]
        valid = index < self.num_pages[:, None]
        return self.pages[valid & (cold if tier == COLD else ~cold)]

    def new_pages(self, num_tokens: int) -> int:
        """Pages *per group* that `num_tokens` more tokens open; the same for every group."""
        size = self.page_size
        return -(-(self.num_tokens + num_tokens) // size) + -self.num_tokens // size

    def append_pages(self, pages: np.ndarray) -> np.ndarray:
        """Add int32[G, n] pages to the ends of the groups. Returns the table index of each group's first new page."""
        first, count = self.num_pages.copy(), pages.shape[1]
        need = int(first.max()) + count
        if need > self.pages.shape[1]:
            self.pages = np.pad(self.pages, ((0, 0), (0, max(need, 2 * self.pages.shape[1]) - self.pages.shape[1])))
        index = first[:, None] + np.arange(count)
        np.put_along_axis(self.pages, index, pages, 1)
        self.num_pages += count
        self.held[HOT] += pages.size
        self.peak_held = [max(old, new) for old, new in zip(self.peak_held, self.held, strict=True)]
        return first

    def _after_ticket(self) -> tuple[np.ndarray, np.ndarray]:
        """(evicted, cold) as they will be once the folds in flight are visible."""
        evicted, cold = self.evicted.copy(), self.cold.copy()
        for fold in self.ticket.folds if self.ticket else ():
            evicted[fold.group] += (len(fold.src) - len(fold.dst)) * self.page_size
            if fold.dst_tier == COLD:
                cold[fold.group] = fold.first + len(fold.dst)
        return evicted, cold

    def next_event(self) -> int | None:
        """The next token count at which rows are folded, a function of the request alone (pressure mode apart).

        Eviction of group g is possible from evicted[g] + budget[g] + page_size tokens on (one full page too many),
        cooling from evicted[g] + cold_after + (cold[g] + 1) * page_size on. It happens at the next multiple of
        `prefill_period` inside the prompt, or of `period` from the prompt's end on: so every page is full then, and
        the window's tokens all came after the event before.
        """
        policy, size = self.policy, self.page_size
        evicted, cold = self._after_ticket()
        due = []
        if policy.evicts and self.fold_from is not None:
            due.append(max(int((evicted + policy.budget).min()) + size, self.fold_from))
        if policy.cold_after is not None:
            due.append(int((evicted + (cold + 1) * size).min()) + policy.cold_after)
        if not due:
            return None
        at = max(min(due), self.num_tokens + 1)
        step = policy.prefill_period
        if step and (inside := -(-at // step) * step) <= self.prompt_len:
            at = inside
        else:
            at = -(-max(at, self.prompt_len) // policy.period) * policy.period
        return at if at < self.last else None

    def _evicting(self, num_tokens: int) -> np.ndarray:
        """bool[G]: groups that are over budget, in full pages, at this token count."""
        if not self.policy.evicts or self.fold_from is None or num_tokens < self.fold_from:
            return np.zeros(self.num_groups, bool)
        return (num_tokens - self._after_ticket()[0]) // self.page_size > self.policy.budget // self.page_size

    def evicts_at(self, num_tokens: int) -> bool:
        """Whether rows are evicted (not only cooled) at this token count."""
        return bool(self._evicting(num_tokens).any())

    def due_folds(self, num_tokens: int) -> list[tuple[int, int, int, int]]:
        """(group, first page, source pages, destination pages) of the folds at this token count, the next event."""
        policy, size = self.policy, self.page_size
        full = (num_tokens - self.evicted) // size
        keep = policy.budget // size
        evict = self._evicting(num_tokens)
        folds = [(int(g), 0, int(full[g]), int(keep[g])) for g in np.flatnonzero(evict)]
        if policy.cold_after is not None:
            until = (num_tokens - self.evicted - policy.cold_after) // size
            for g in np.flatnonzero(~evict & (until > self.cold)):
                count = int(until[g] - self.cold[g])
                folds.append((int(g), int(self.cold[g]), count, count))
        return folds
