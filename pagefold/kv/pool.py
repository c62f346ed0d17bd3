"""Who owns which page, as integers. The pool never sees a tensor."""

import numpy as np


class PagePool:
    """Page ids of one tier with reference counts.

    A page is *free* (nobody holds it, nothing is remembered in it), *held* (one or more sequences reference it) or
    *idle* (nobody holds it, but the prefix cache or a trunk remembers what is in it; it can be taken back at any time).
    Page 0 is the garbage room of padding and is never handed out.

        refs      int32[pages]   sequences that hold the page
        reserved  int32[pages]   those of them that were admitted by reservation
        memories  int32[pages]   who remembers the page: the prefix cache, and each trunk

    `surplus` counts what reservations must not rely on: a page that a reserved sequence shares with somebody else
    will not come back to the pool when that sequence drops it.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.refs = np.zeros(num_pages, np.int32)
        self.reserved = np.zeros(num_pages, np.int32)
        self.memories = np.zeros(num_pages, np.int32)
        self.surplus = 0
        self.num_idle = 0
        self.times_idled = 0  # how often pages went from held to idle
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # a stack; the lowest ids leave first
        self._num_free = num_pages - 1

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def cached(self) -> np.ndarray:
        """bool[pages]: somebody remembers what is in the page."""
        return self.memories > 0

    @property
    def num_available(self) -> int:
        """Pages that can be handed out: free ones, and idle ones once they are forgotten."""
        return self._num_free + self.num_idle

    @property
    def num_held(self) -> int:
        return self.num_pages - 1 - self.num_available

    def take(self, count: int, reserved: bool) -> np.ndarray:
        """Hand out `count` free pages (int32), each held once. The caller has made sure that they are there."""
        if count > self._num_free:
            raise RuntimeError(f"page pool: {count} pages wanted, {self._num_free} free")
        self._num_free -= count
        pages = self._free[self._num_free : self._num_free + count][::-1].copy()
        self.refs[pages] = 1
        if reserved:
            self.reserved[pages] = 1
        return pages

    def hold(self, pages: np.ndarray, reserved: bool) -> None:
        """One more sequence references each of these pages (distinct, held or idle)."""
        before = self._surplus_of(pages)
        self.num_idle -= int((self.refs[pages] == 0).sum())
        self.refs[pages] += 1
        self.reserved[pages] += int(reserved)
        self.surplus += self._surplus_of(pages) - before

    def drop(self, pages: np.ndarray, reserved: bool) -> None:
        """One sequence lets go of each of these pages (distinct)."""
        shared = pages[self.refs[pages] > 1]
        before = self._surplus_of(shared)
        self.refs[pages] -= 1
        if reserved:
            self.reserved[pages] -= 1
        self.surplus += self._surplus_of(shared) - before
        unused = pages[self.refs[pages] == 0] if len(shared) else pages
        idle = self.memories[unused] > 0
        if idle.any():
            self.num_idle += int(idle.sum())
            self.times_idled += 1
            unused = unused[~idle]
        self._give_back(unused)

    def set_reserved(self, pages: np.ndarray) -> None:
        """A sequence that holds these pages is from now on a reserved one."""
        before = self._surplus_of(pages)
        self.reserved[pages] += 1
        self.surplus += self._surplus_of(pages) - before

    def remember(self, pages: np.ndarray) -> None:
        """One more knows what is in these (held, distinct) pages."""
        self.memories[pages] += 1

    def forget(self, pages: np.ndarray) -> None:
        """One forgets these (distinct) pages; those that nobody holds or remembers become free."""
        self.memories[pages] -= 1
        idle = pages[(self.refs[pages] == 0) & (self.memories[pages] == 0)]
        self.num_idle -= len(idle)
        self._give_back(idle)

    def sharing_cost(self, pages: np.ndarray) -> int:
        """Pages that a reserved sequence needs beyond its reservation if it holds these of others (distinct).

        Holding one that somebody holds already takes nothing from the pool now, but it will not come back either when
        one of them drops it.
        """
        shared = pages[self.refs[pages] > 0]
        return int(np.where(self.refs[shared] == 1, self.reserved[shared], 0).sum())

    def _give_back(self, pages: np.ndarray) -> None:
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def _surplus_of(self, pages: np.ndarray) -> int:
        if not len(pages):
            return 0
        return int((self.reserved[pages] * (self.refs[pages] > 1)).sum())

    def check(self) -> None:
        """Free, idle and held pages partition the pool (cheap enough for tests and for a drained engine)."""
        free = self._free[: self._num_free]
        assert len(set(free.tolist())) == self._num_free and 0 not in free
        assert (self.refs >= 0).all() and (self.reserved >= 0).all() and (self.reserved <= self.refs).all()
        assert (self.memories >= 0).all()
        assert not self.refs[free].any() and not self.memories[free].any()
        unused = self.refs[1:] == 0
        assert int((unused & self.cached[1:]).sum()) == self.num_idle
        assert int((unused & ~self.cached[1:]).sum()) == self._num_free
        assert self.surplus == int((self.reserved * (self.refs > 1)).sum())
