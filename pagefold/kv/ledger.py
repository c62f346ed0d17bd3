"""What the live sequences were promised and what their folds keep busy, as running totals."""

import math
from collections import Counter
from fractions import Fraction

from pagefold.kv.state import COLD, HOT, KVState

_Kind = tuple[int, int, int, int]  # lag + 1, period, destination pages per tier of one whole compaction


class Ledger:
    """Totals per tier over the sequences that live, kept up to date so that nobody has to sum over them.

    promised   pages promised to reserved sequences and not yet taken
    flying     destination pages of the folds that are launched and not yet visible

    Whoever changes what a sequence holds, was promised or has in flight calls `recount` afterwards.
    """

    def __init__(self):
        self.promised = [0, 0]
        self.flying = [0, 0]
        self._entries: dict[KVState, tuple[int, int, int, int]] = {}
        self._kinds: Counter[_Kind] = Counter()  # of the sequences that fold
        self._spare: list[int] | None = None

    def join(self, kv: KVState) -> None:
        self._entries[kv] = 0, 0, 0, 0
        if any(kv.copies):
            self._kinds[self._kind(kv)] += 1
            self._spare = None
        self.recount(kv)

    def leave(self, kv: KVState) -> None:
        self._change(self._entries.pop(kv), (0, 0, 0, 0))
        if any(kv.copies):
            self._kinds[self._kind(kv)] -= 1
            self._spare = None

    def recount(self, kv: KVState) -> None:
        new = kv.promised(HOT), kv.promised(COLD), kv.flying(HOT), kv.flying(COLD)
        if new != self._entries[kv]:
            self._change(self._entries[kv], new)
            self._entries[kv] = new

    def _change(self, old: tuple[int, int, int, int], new: tuple[int, int, int, int]) -> None:
        for tier in (HOT, COLD):
            self.promised[tier] += new[tier] - old[tier]
            self.flying[tier] += new[2 + tier] - old[2 + tier]

    def spare(self, extra: KVState | None = None) -> list[int]:
        """Pages to keep for compactions: enough for the expected number at once and one more.

        extra   a sequence that may be about to join
        """
        if extra is not None and any(extra.copies):
            return self.spare_for(self._kinds + Counter([self._kind(extra)]))
        if self._spare is None:
            self._spare = self.spare_for(self._kinds)
        return self._spare

    @staticmethod
    def _kind(kv: KVState) -> _Kind:
        hot, cold = kv.copies
        return kv.policy.lag + 1, kv.policy.period, hot, cold

    @staticmethod
    def spare_for(kinds: Counter[_Kind]) -> list[int]:
        """`spare` for so many sequences of each kind."""
        kinds = +kinds
        if not kinds:
            return [0, 0]
        expected = sum(Fraction(busy, period) * count for (busy, period, *_), count in kinds.items())
        jobs = min(1 + math.ceil(Fraction(3, 2) * expected), kinds.total())
        return [jobs * max(kind[2 + tier] for kind in kinds) for tier in (HOT, COLD)]

    def held_back(self, tier: int, extra: KVState | None = None) -> int:
        """Pages that are promised, or kept for folds beside those that folds have taken already."""
        return self.promised[tier] + max(0, self.spare(extra)[tier] - self.flying[tier])
