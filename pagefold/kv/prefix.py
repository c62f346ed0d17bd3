"""Prompts that begin alike share pages: a chain of hashes over full pages that nothing was ever evicted from."""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice

import numpy as np

from pagefold.kv.pool import PagePool


@dataclass
class _Entry:
    tokens: tuple[int, ...]
    parent: bytes
    pages: np.ndarray  # int32[G]: one page per group for this logical page


class PrefixCache:
    """Maps page-aligned token prefixes to pages of the hot tier.

    The key of a page is the SHA-256 of its parent's key and its tokens, so equal keys mean equal histories; tokens
    and parent are compared as well, so that a collision is a miss. The root key carries whatever else makes rows
    differ (a request's salt). Entries are forgotten least recently used first, children before parents.
    """

    def __init__(self, pool: PagePool, page_size: int):
        self.pool = pool
        self.page_size = page_size
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._barren = -1  # what `pool.times_idled` was when nothing was left to forget

    @staticmethod
    def root(salt: str) -> bytes:
        return hashlib.sha256(b"root\0" + salt.encode()).digest()

    @staticmethod
    def key(parent: bytes, tokens: tuple[int, ...]) -> bytes:
        return hashlib.sha256(parent + np.asarray(tokens, np.int64).tobytes()).digest()

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, salt: str, tokens: list[int], limit: int) -> tuple[np.ndarray, bytes]:
        """Pages of the longest known prefix of at most `limit` tokens.

        Returns (int32[n, G] pages, key of the last one). Nothing is held yet.
        """
        size, key, pages = self.page_size, self.root(salt), []
        for start in range(0, min(limit, len(tokens)) // size * size, size):
            page_tokens = tuple(tokens[start : start + size])
            child = self.key(key, page_tokens)
            entry = self._entries.get(child)
            if entry is None or entry.parent != key or entry.tokens != page_tokens:
                break
            pages.append(entry.pages)
            key = child
        return np.array(pages, np.int32), key

    def touch(self, key: bytes) -> None:
        """The chain that ends in `key` was used: it is forgotten last, its deepest page first."""
        while (entry := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
            key = entry.parent

    def insert(self, parent: bytes, tokens: tuple[int, ...], pages: np.ndarray) -> bytes:
        """Remember one full page (int32[G] ids, held by the caller) and return its key; `touch` the chain afterwards.

        The first copy of a prefix stays the known one.
        """
        key = self.key(parent, tokens)
        if key not in self._entries:
            self._entries[key] = _Entry(tokens, parent, pages.copy())
            self.pool.remember(pages)
        return key

    def make_room(self, num_free: int) -> None:
        """Forget idle pages, least recently used first, until the pool has `num_free` free ones."""
        if self._barren == self.pool.times_idled:
            return
        left, batch = len(self._entries), 4
        while left:
            oldest = [*islice(self._entries.items(), min(batch, left))]
            in_use = np.all(self.pool.refs[np.stack([entry.pages for _, entry in oldest])], axis=1).tolist()
            for (key, entry), used in zip(oldest, in_use, strict=True):
                if self.pool.num_free >= num_free:
                    return
                if used:
                    self._entries.move_to_end(key)  # forgetting it frees nothing
                else:
                    del self._entries[key]
                    self.pool.forget(entry.pages)
            left, batch = left - len(oldest), min(2 * batch, 256)
        self._barren = self.pool.times_idled

    def count_memories(self) -> np.ndarray:
        """int32[pages]: how many entries name each page."""
        counts = np.zeros(self.pool.num_pages, np.int32)
        for entry in self._entries.values():
            np.add.at(counts, entry.pages, 1)
        return counts

    def clear(self) -> None:
        for entry in self._entries.values():
            self.pool.forget(entry.pages)
        self._entries.clear()
