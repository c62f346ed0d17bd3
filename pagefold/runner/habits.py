"""What follows from the parameters of a request for each of its draws, kept from one step to the next."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pagefold.backends.triton.sampling import pack_rules
from pagefold.core.types import SampleSpec
from pagefold.runner.sampler import has_edits, is_greedy, known_ids, seed_key

_ENDED_KEPT = 32  # specs of ended sequences, whose prompts they hold
_LOG2_E = math.log2(math.e)


class Habit(NamedTuple):
    """What the parameters of a request say of each of its draws; ids are int64 arrays."""

    may_edit: bool
    num_ranked: int | None
    cuts: tuple[float, float, int, float]
    allowed: np.ndarray
    stops: np.ndarray
    biased: np.ndarray
    bias: np.ndarray

    @classmethod
    def make(cls, spec: SampleSpec, vocab_size: int) -> "Habit":
        p = spec.params
        bias = {id: value for id, value in (p.logit_bias or {}).items() if 0 <= id < vocab_size}
        return cls(
            may_edit=has_edits(spec, 0) or has_edits(spec, 1),
            num_ranked=p.logprobs,
            cuts=_cuts(spec, vocab_size),
            allowed=known_ids(p.allowed_token_ids or (), vocab_size),
            stops=known_ids(spec.stop_ids, vocab_size),
            biased=known_ids(bias, vocab_size),
            bias=np.array(list(bias.values()), np.float64),
        )


class KnownSpecs:
    """What follows from specs alone, whatever the position, so that a step's rules are one look-up in a table.

    Specs are told apart by identity: a sequence has one for all its draws. Those of ended sequences are forgotten when
    there are more than a few.
    """

    def __init__(self):
        self._place: dict[SampleSpec, int] = {}
        self._table = np.empty((0, 8), np.int64)  # the columns of `pack_rules`, may_edit, num_ranked

    def of(self, specs: list[SampleSpec], habit: Callable[[SampleSpec], Habit]) -> tuple[np.ndarray, ...]:
        """(rules int64[N, 6] as of `pack_rules`, without edits and with seeds' keys for keys, may_edit bool[N],
        num_ranked int64[N], -1 where no log-probabilities are wanted)"""
        places = [*map(self._place.get, specs)]
        if None in places or len(places) < len(self._place) - _ENDED_KEPT:
            self._renew(specs, habit)
            places = [self._place[spec] for spec in specs]
        rows = self._table[np.fromiter(places, np.int64, len(places))]  # type: ignore[arg-type]
        return rows[:, :6], rows[:, 6] > 0, rows[:, 7]

    def _renew(self, specs: list[SampleSpec], habit: Callable[[SampleSpec], Habit]) -> None:
        new = [*dict.fromkeys(spec for spec in specs if spec not in self._place)]
        if len(self._place) + len(new) > min(len(self._table), len(specs) + _ENDED_KEPT):
            kept = [spec for spec in dict.fromkeys(specs) if spec in self._place]
            table = np.empty((len(specs) + _ENDED_KEPT, 8), np.int64)
            table[: len(kept)] = self._table[[self._place[spec] for spec in kept]]
            self._place, self._table = {spec: place for place, spec in enumerate(kept)}, table
        if new:
            first = len(self._place)
            self._table[first : first + len(new)] = _facts(new, [habit(spec) for spec in new])
            self._place.update((spec, first + n) for n, spec in enumerate(new))


def _facts(specs: list[SampleSpec], habits: list[Habit]) -> np.ndarray:
    """Rows of the table of `KnownSpecs`."""
    sharpness, floor, top_k, top_p = np.array([habit.cuts for habit in habits]).T.copy()  # float64 holds every top_k
    seeds = seed_key(np.array([spec.seed for spec in specs], np.int64).view(np.uint64))
    rules = pack_rules(np.full(len(specs), -1), seeds, sharpness, floor, top_k.astype(np.int64), top_p)
    may_edit = [habit.may_edit or spec.mask is not None for spec, habit in zip(specs, habits, strict=True)]
    num_ranked = [-1 if habit.num_ranked is None else habit.num_ranked for habit in habits]
    return np.column_stack([rules, may_edit, num_ranked])


def _cuts(spec: SampleSpec, vocab_size: int) -> tuple[float, float, int, float]:
    """(sharpness, floor, top_k, top_p) as `pack_rules` wants them."""
    p = spec.params
    if is_greedy(spec):
        return 0.0, -math.inf, vocab_size, math.inf
    floor = p.temperature * math.log(p.min_p) if p.min_p > 0 else -math.inf
    top_k = p.top_k if 0 < p.top_k < vocab_size else vocab_size
    return _LOG2_E / p.temperature, floor, top_k, p.top_p if p.top_p < 1 else math.inf
