"""Who owns which page, as integers. The pool never sees a tensor."""

import numpy as np


class PagePool:
    """Page ids of one tier with reference counts.

    A page is *free* (nobody holds it, nothing is remembered in it), *held* (one or more sequences reference it) or
    *idle* (nobody holds it, but the prefix cache remembers what is in it; it can be taken back at any time). Page 0
    is the garbage room of padding and is never handed out.

        refs      int32[pages]   sequences that hold the page
        reserved  int32[pages]   those of them that were admitted by reservation
        cached    bool[pages]    the prefix cache remembers the page

    `surplus` counts what reservations must not rely on: a page that a reserved sequence shares with somebody else
    will not come back to the pool when that sequence drops it.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.refs = np.zeros(num_pages, np.int32)
        self.reserved = np.zeros(num_pages, np.int32)
        self.cached = np.zeros(num_pages, bool)
        self.surplus = 0
        self.num_idle = 0
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # a stack; the lowest ids leave first
        self._num_free = num_pages - 1

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_available(self) -> int:
        """Pages that can be handed out: free ones, and idle ones once the prefix cache forgets them."""
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
        if self.cached[unused].any():
            idle = self.cached[unused]
            self.num_idle += int(idle.sum())
            unused = unused[~idle]
        self._give_back(unused)

    def set_reserved(self, pages: np.ndarray) -> None:
        """A sequence that holds these pages is from now on a reserved one."""
        before = self._surplus_of(pages)
        self.reserved[pages] += 1
        self.surplus += self._surplus_of(pages) - before

    def remember(self, pages: np.ndarray) -> None:
        """The prefix cache knows what is in these (held) pages."""
        self.cached[pages] = True

    def forget(self, pages: np.ndarray) -> None:
        """The prefix cache forgets these pages; idle ones become free."""
        self.cached[pages] = False
        idle = pages[self.refs[pages] == 0]
        self.num_idle -= len(idle)
        self._give_back(idle)

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
        assert not self.refs[free].any() and not self.cached[free].any()
        unused = self.refs[1:] == 0
        assert int((unused & self.cached[1:]).sum()) == self.num_idle
        assert int((unused & ~self.cached[1:]).sum()) == self._num_free
        assert self.surplus == int((self.reserved * (self.refs > 1)).sum())
