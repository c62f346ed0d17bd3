"""The KV of one sequence as numbers: how long it is, which pages hold it, when it is folded next."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagefold.core.types import ScorePolicy, window_lead

if TYPE_CHECKING:
    from pagefold.kv.trunks import Trunk

HOT, COLD = 0, 1


@dataclass(frozen=True)
class FoldPolicy:
    """How one request's rows are folded. All counts are in tokens or rows.

    scorer          spec string of the scorer; None: rows are never evicted
    needs_window    the scorer looks at `window` queries, the last at the event, the others each `stride` tokens before
    budget          int32[G], rows each head keeps after a compaction, multiples of the page size
    period          tokens between compactions while decoding, a multiple of the page size
    prefill_period  the same while prefilling, a multiple of `period`; None: nothing is folded before the prompt's end
    window          trailing rows that are always kept, and queries of a window; lead + lag is at most `period`
    sink_tokens     leading rows that are always kept
    lag             tokens from a compaction's launch to the step that sees it (0 while prefilling)
    cold_after      rows that stay hot when older ones are moved to the cold tier; None: there is no cold tier
    stride          tokens from one query of a window to the next
    under_pressure  nothing is evicted until the scheduler asks for it
    ask             what the request asked for, in words: rows that were folded for one ask serve the same ask only
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
    stride: int = 1
    under_pressure: bool = False
    ask: str = ""

    @property
    def evicts(self) -> bool:
        return self.scorer is not None

    @property
    def lead(self) -> int:
        """Tokens before an event from whose first one on a window is needed; 1 if none is."""
        return window_lead(self.window, self.stride) if self.needs_window else 1

    @property
    def score(self) -> ScorePolicy:
        """What the worker must know of it."""
        return ScorePolicy(self.scorer or "none", self.sink_tokens, self.window)


class RowCounts(NamedTuple):
    """What folding has left of a sequence when its rows were last changed.

    evicted   int32[G], as in `KVState`; `cold` the same
    fixed     tokens stored at that time: all tokens from this one on have a row, and those rows are not in need of a
              fold that was missed
    """

    evicted: np.ndarray
    cold: np.ndarray
    fixed: int


def pages_of_tier(tier: int, pages: np.ndarray, num_pages: np.ndarray, cold: np.ndarray) -> np.ndarray:
    """The ids of one tier in a page table int32[G, capacity], group after group; num_pages and cold are int32[G]."""
    return pages[tier_mask(tier, pages.shape[1], num_pages, cold)]


def tier_mask(tier: int, capacity: int, num_pages: np.ndarray, cold: np.ndarray) -> np.ndarray:
    """bool[G, capacity]: the entries of a page table that name pages of this tier."""
    index = np.arange(capacity)
    in_cold = index < cold[:, None]
    return (index < num_pages[:, None]) & (in_cold if tier == COLD else ~in_cold)


class Folds(NamedTuple):
    """Of group groups[i], `num_src` pages from `first` on become `num_dst` others. int32[F] each."""

    groups: np.ndarray
    first: np.ndarray
    num_src: np.ndarray
    num_dst: np.ndarray


@dataclass
class Ticket:
    """Folds of one sequence that were launched and are not yet visible.

    commit_at     the folds become visible before token number `commit_at` is computed
    evicted       int32[G], what `KVState` has under this name from then on; `cold` the same
    dst           int32[sum of num_dst], destination pages of one fold after the other
    dst_tier      where they lie
    window_slot   the window that the folds read, held until the commit
    """

    commit_at: int
    evicted: np.ndarray
    cold: np.ndarray
    folds: Folds
    dst: np.ndarray
    dst_tier: int
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
        bound         what it can hold at most once its prompt is behind it, if it evicts
        copies        destination pages per tier of one whole compaction
        num_cached    tokens whose rows were there at admission, in the prefix cache or a trunk
        fixed         tokens stored when a fold last became visible
        trunk         what it grew from, if it resumed
        num_indexed   leading pages the prefix cache was told of; -1: no more, since a fold is visible
        window_start  token whose query goes to index 0 of the window of the next event, 0 if there is none
        quiet_until   up to this token count a step that decodes needs nothing but a place for one more token: no page,
                      window or fold

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
    bound: list[int] = field(default_factory=lambda: [0, 0])
    copies: list[int] = field(default_factory=lambda: [0, 0])
    num_cached: int = 0
    fixed: int = 0
    trunk: "Trunk | None" = None
    num_indexed: int = 0
    index_key: bytes = b""
    num_compactions: int = 0
    window_start: int = 0
    quiet_until: int = 0
    _next: tuple[int | None, int | None] | None = field(default=None, init=False)
    _due: tuple[int, Folds] | None = field(default=None, init=False)

    def __post_init__(self):
        groups = len(self.policy.budget)
        self.evicted, self.cold, self.num_pages = (np.zeros(groups, np.int32) for _ in range(3))
        self.pages = np.zeros((groups, 8), np.int32)
        self._groups = np.arange(groups)

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

    def tier_pages(self, tier: int) -> np.ndarray:
        """All page ids held in one tier."""
        return pages_of_tier(tier, self.pages, self.num_pages, self.cold)

    def new_pages(self, num_tokens: int) -> int:
        """Pages *per group* that `num_tokens` more tokens open; the same for every group."""
        size = self.page_size
        return -(-(self.num_tokens + num_tokens) // size) + -self.num_tokens // size

    def append_pages(self, pages: np.ndarray) -> np.ndarray:
        """Add int32[G, n] pages to the ends of the groups. Returns the table index of each group's first new page."""
        first, count = self.num_pages, pages.shape[1]
        need = int(first.max()) + count
        if need > self.pages.shape[1]:
            self.pages = np.pad(self.pages, ((0, 0), (0, max(need, 2 * self.pages.shape[1]) - self.pages.shape[1])))
        self.pages[self._groups[:, None], first[:, None] + np.arange(count)] = pages
        self.num_pages = first + count
        self.hold(HOT, pages.size)
        return first

    def hold(self, tier: int, count: int) -> None:
        """So many more pages are held."""
        self.held[tier] += count
        self.peak_held[tier] = max(self.peak_held[tier], self.held[tier])

    def flying(self, tier: int) -> int:
        """Destination pages in one tier of the folds in flight."""
        return len(self.ticket.dst) if self.ticket and self.ticket.dst_tier == tier else 0

    def promised(self, tier: int) -> int:
        """Pages of the reservation that are not taken yet.

        Cold pages are only ever taken by folds, so those in flight count as taken.
        """
        if not self.reserved:
            return 0
        return max(0, self.reserve[tier] - self.held[tier] - (self.flying(COLD) if tier == COLD else 0))

    def _after_ticket(self) -> tuple[np.ndarray, np.ndarray]:
        """(evicted, cold) as they will be once the folds in flight are visible."""
        return (self.ticket.evicted, self.ticket.cold) if self.ticket else (self.evicted, self.cold)

    def launch(self, folds: Folds, dst: np.ndarray, dst_tier: int) -> None:
        """The folds due now are in flight: they fill `dst`, and the window goes with them."""
        evicted, cold = self.evicted.copy(), self.cold
        evicted[folds.groups] += (folds.num_src - folds.num_dst) * self.page_size
        if dst_tier == COLD:
            cold = cold.copy()
            cold[folds.groups] = folds.first + folds.num_dst
        lag = self.policy.lag if self.num_tokens >= self.prompt_len else 0
        self.ticket = Ticket(self.num_tokens + lag, evicted, cold, folds, dst, dst_tier, self.window_slot)
        self.window_slot = 0
        self.folds_changed()

    def upcoming(self) -> tuple[int | None, int | None]:
        """The next event, and the token from which on its window's queries must be kept (None: they need not)."""
        if self._next is None or (self._next[0] is not None and self._next[0] <= self.num_tokens):
            event, policy = self.next_event(), self.policy
            evicts = event is not None and (policy.cold_after is None or event >= (self._evicts_from() or event + 1))
            self._next = event, event - policy.lead if event is not None and evicts and policy.needs_window else None
        return self._next

    def folds_changed(self) -> None:
        """Other folds are due than it seemed. (A commit changes nothing: it was reckoned with since the launch.)"""
        self._next, self._due, self.quiet_until = None, None, 0

    def note_quiet(self) -> None:
        """Look ahead, while decoding, to the next token that needs more than its place: those before it are planned
        without looking."""
        event, window_from = self.upcoming()
        self.window_start = 0 if event is None else event - self.policy.lead
        until = min(-(-self.num_tokens // self.page_size) * self.page_size, self.last)
        if event is not None:
            until = min(until, event - 1)
        if window_from is not None and not self.window_slot:
            until = min(until, window_from)
        self.quiet_until = until

    def next_event(self) -> int | None:
        """The next token count at which rows are folded, a function of the request alone (pressure mode apart).

        Eviction of group g is possible from evicted[g] + budget[g] + page_size tokens on (one full page too many),
        cooling from evicted[g] + cold_after + (cold[g] + 1) * page_size on. It happens at the next multiple of
        `prefill_period` inside the prompt, or of `period` from the prompt's end on: so every page is full then, and
        the window's tokens all came after the event before.
        """
        policy, due = self.policy, []
        if (evicts_from := self._evicts_from()) is not None:
            due.append(evicts_from)
        if policy.cold_after is not None:
            evicted, cold = self._after_ticket()
            due.append(int((evicted + (cold + 1) * self.page_size).min()) + policy.cold_after)
        if not due:
            return None
        at = max(min(due), self.num_tokens + 1)
        step = policy.prefill_period
        if step and (inside := -(-at // step) * step) <= self.prompt_len:
            at = inside
        else:
            at = -(-max(at, self.prompt_len) // policy.period) * policy.period
        return at if at < self.last else None

    def _evicts_from(self) -> int | None:
        """Token count from which on some group, folds in flight included, is a full page over its budget."""
        if not self.policy.evicts or self.fold_from is None:
            return None
        return max(int((self._after_ticket()[0] + self.policy.budget).min()) + self.page_size, self.fold_from)

    def due_folds(self, num_tokens: int) -> Folds:
        """The folds at this token count, the next event: those that evict, then those that only cool."""
        if self._due is None or self._due[0] != num_tokens:
            self._due = num_tokens, self._folds_at(num_tokens)
        return self._due[1]

    def _folds_at(self, num_tokens: int) -> Folds:
        policy, size = self.policy, self.page_size
        evict = num_tokens - self.evicted >= policy.budget + size
        if not policy.evicts or self.fold_from is None or num_tokens < self.fold_from:
            evict[:] = False
        groups = np.flatnonzero(evict)
        first = np.zeros(len(groups), np.int32)
        num_src = (num_tokens - self.evicted[groups]) // size
        num_dst = policy.budget[groups] // size
        if policy.cold_after is not None:
            until = (num_tokens - self.evicted - policy.cold_after) // size
            cooled = np.flatnonzero(~evict & (until > self.cold))
            count = until[cooled] - self.cold[cooled]
            groups, first = np.concatenate([groups, cooled]), np.concatenate([first, self.cold[cooled]])
            num_src, num_dst = np.concatenate([num_src, count]), np.concatenate([num_dst, count])
        return Folds(groups, first, num_src, num_dst)
