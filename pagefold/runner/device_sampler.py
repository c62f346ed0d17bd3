"""The sampler of `runner/sampler.py` on an accelerator: the host waits for nothing until it asks for a result.

Whatever a step's specs say goes up in one copy, and ids and log-probabilities come back in another, which is waited for
when the result is asked for. Rows without edits are drawn from as they are, in two kernels; rows with edits are copied
to float32, all of them edited together, and drawn from in the same two kernels.

A step may be planned while the one before it is still running. A spec then lacks its newest token, which the device
knows: penalties and bad words take it from there.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from pagefold.backends.triton.sampling import draw
from pagefold.backends.upload import upload
from pagefold.core.types import Samples, SampleSpec, TokenLogprobs
from pagefold.runner.habits import Habit, KnownSpecs
from pagefold.runner.sampler import (
    has_edits,
    known_ids,
    logprob_entries,
    race_key,
    race_salts,
    ranked,
    would_end,
)

T = TypeVar("T", np.ndarray, Tensor)
V = TypeVar("V")
BLOCK = 1024  # ids that kernels look at together: the fewer, the more of a row its cuts can skip
_RANKED_AT_ONCE = 64  # rows whose log-probabilities are taken together


class _Readback:
    """int64 tensors on their way to the host, in one copy."""

    def __init__(self, *parts: Tensor):
        self._shapes = [part.shape for part in parts]
        packed = torch.cat([part.reshape(-1) for part in parts]) if len(parts) != 1 else parts[0].reshape(-1)
        self._host, self._event = packed, None
        if packed.device.type == "cuda":
            self._host = torch.empty(packed.shape, dtype=torch.int64, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        parts = self._host.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes)]


class Draw:
    """Tokens that may still be being drawn.

    ids   int64[N] on the device, -1 where a row has no distribution
    """

    def __init__(self, ids: Tensor, ranks: list[Tensor], asked: list[int], counts: list[int]):
        """`ranks` of the rows `asked`, and how many alternatives each of them wants."""
        self.ids = ids
        self._asked, self._counts = asked, counts
        self._readback = _Readback(ids, *ranks)

    def result(self) -> tuple[list[int | None], list[TokenLogprobs | None]]:
        """Wait for the ids (None: the row has no distribution) and the log-probabilities of the rows that asked."""
        host_ids, *ranks = self._readback.wait()
        ids = [None if token < 0 else token for token in host_ids.tolist()]
        logprobs: list[TokenLogprobs | None] = [None] * len(ids)
        if self._asked:
            for row, entry in zip(self._asked, _entries(ranks, self._counts), strict=True):
                logprobs[row] = entry if ids[row] is not None else None
        return ids, logprobs


class PromptRanks:
    """Log-probabilities of prompt tokens that may still be being computed."""

    def __init__(self, ranks: list[Tensor], counts: list[int]):
        self._readback, self._counts = _Readback(*ranks), counts

    def result(self) -> list[TokenLogprobs]:
        return _entries(self._readback.wait(), self._counts)


class _Edits(NamedTuple, Generic[T]):
    """What is done to the rows that have edits, E of them, of V logits each: int64 arrays, and tensors after `upload`.
    Columns marked * hold float64 numbers, by their bits.

    A place is row * V + id. Row E is nobody's, and takes what is to be written nowhere.

        rows        [E + 1]     where they are among the logits
        waits       [E + 1]     1 where the newest token is known to the device only
        repetition, frequency, presence    * [E + 1]
        narrow                  rows with allowed_token_ids
        allowed                 places of those ids
        masked, words           rows with a mask, and its words of 64 bits, ceil(V / 64) each
        early, bad              places that min_tokens and bad_words forbid
        bad_after               the newest token after which a bad one is forbidden; -1: any
        biased, bias *          places, each once
        seen                    places of the prompt's and the output's ids, for the repetition penalty
        counted, times          places of the output's ids, each once, for the other two, and how often they occur
    """

    rows: T
    waits: T
    repetition: T
    frequency: T
    presence: T
    narrow: T
    allowed: T
    masked: T
    words: T
    early: T
    bad: T
    bad_after: T
    biased: T
    bias: T
    seen: T
    counted: T
    times: T


class DeviceSampler:
    """Draws one id per row of logits: the same ids as `Sampler`, up to rounding.

    vocab_size   logits at and above this id are never looked at
    device       where the logits live
    """

    def __init__(self, vocab_size: int, device: torch.device | str):
        self.vocab_size = vocab_size
        self._device = torch.device(device)
        self._salts = race_salts(vocab_size).to(self._device)
        self._unedited = torch.empty(0, vocab_size, dtype=torch.float32, device=self._device)
        self._known = KnownSpecs()
        self._habits: _Kept[Habit] = _Kept()  # of parameters
        self._prompts: _Kept[np.ndarray] = _Kept()  # distinct ids
        self._outputs: _Kept[_Counts] = _Kept()

    @torch.inference_mode()
    def launch(self, logits: Tensor, specs: Samples, last: Tensor) -> Draw:
        """Start drawing the next id of every row.

        logits   bf16, fp16 or fp32 [N, >= vocab_size], left unchanged
        specs    one per row; the output of a spec may lack its newest token, if its position says so
        last     int64[N] on the device, the token before the one drawn
        """
        if logits.dim() != 2 or len(logits) != len(specs) or logits.shape[1] < self.vocab_size:
            raise ValueError(f"logits: got {tuple(logits.shape)}, must be [{len(specs)}, >= {self.vocab_size}]")
        if not specs:
            return Draw(torch.empty(0, dtype=torch.int64, device=self._device), [], [], [])
        for kept in (self._habits, self._prompts, self._outputs):
            kept.turn()
        rules, may_edit, num_ranked = self._known.of(cast(list[SampleSpec], specs.lasting), self._habit)
        rules[:, 1] = race_key(rules[:, 1].view(np.uint64), specs.positions.view(np.uint64)).view(np.int64)
        edited = {row: spec for row in np.flatnonzero(may_edit).tolist() if (spec := specs[row]) and _is_edited(spec)}
        if edited:
            rules[[*edited], 0] = np.arange(len(edited))
        asked = np.flatnonzero(num_ranked >= 0)
        counts = num_ranked[asked].tolist()
        edits = self._edits(edited) if edited else ()
        rules, asked_rows, *sent = upload([rules, asked, *edits], self._device)
        rows = self._edit(logits, last, _Edits(*sent)) if sent else self._unedited
        ids = draw(logits, rows, rules.view(len(specs), -1), self._salts, BLOCK)
        ranks = self._rank(logits, asked_rows, ids[asked_rows].clamp(min=0), max(counts)) if counts else []
        return Draw(ids, ranks, asked.tolist(), counts)

    @torch.inference_mode()
    def prompt_logprobs(self, logits: Tensor, targets: Sequence[int], k: int) -> PromptRanks:
        """Start ranking `targets`, the tokens that follow in the prompt, in logits[n, >= vocab_size]."""
        target, rows = upload([np.array(targets, np.int64), np.arange(len(targets))], self._device)
        return PromptRanks(self._rank(logits, rows, target, k), [k] * len(targets))

    def _rank(self, logits: Tensor, rows: Tensor, target: Tensor, most: int) -> list[Tensor]:
        """`ranked`, of some rows of the logits; float64 log-probabilities by their bits."""
        logits = logits[:, : self.vocab_size]
        parts = [
            ranked(logits.index_select(0, part).float(), of_part, most)
            for part, of_part in zip(rows.split(_RANKED_AT_ONCE), target.split(_RANKED_AT_ONCE))
        ]
        ids, logprobs, ranks = (torch.cat(column) for column in zip(*parts))
        return [ids, logprobs.double().view(torch.int64), ranks]

    def _habit(self, spec: SampleSpec) -> Habit:
        return self._habits.of(spec.params, lambda: Habit.make(spec, self.vocab_size))

    def _edits(self, edited: dict[int, SampleSpec]) -> _Edits[np.ndarray]:
        """Everything that the host knows about the rows that have edits. What a step costs here must not grow with the
        lengths of prompts and outputs but by copying their distinct ids."""
        lists: dict[str, list[np.ndarray]] = {name: [np.empty(0, np.int64)] for name in _Edits._fields[5:]}
        lists["bias"] = [np.empty(0)]
        add = lambda name, values: lists[name].append(np.asarray(values, lists[name][0].dtype))  # noqa: E731
        for row, spec in enumerate(edited.values()):
            p, first, habit = spec.params, row * self.vocab_size, self._habit(spec)
            if p.allowed_token_ids is not None:
                add("narrow", [row])
                add("allowed", first + habit.allowed)
            if spec.mask is not None:
                add("masked", [row])
                add("words", self._mask_words(spec.mask))
            if _num_output(spec) < p.min_tokens:
                add("early", first + habit.stops)
            for word in spec.bad_ids:
                after = _forbidden_after(word, spec)
                if after is not None and 0 <= word[-1] < self.vocab_size:
                    add("bad", [first + word[-1]])
                    add("bad_after", [after])
            if p.logit_bias:
                add("biased", first + habit.biased)
                add("bias", habit.bias)
            if p.repetition_penalty != 1:
                distinct = lambda s=spec: np.unique(known_ids(s.prompt, self.vocab_size))  # noqa: E731
                add("seen", first + self._prompts.of(spec.prompt, distinct))
            if p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0:
                ids, times = self._outputs.of(spec.output, lambda: _Counts(self.vocab_size)).of(spec.output)
                if p.repetition_penalty != 1:
                    add("seen", first + ids)
                if p.frequency_penalty != 0 or p.presence_penalty != 0:
                    add("counted", first + ids)
                    add("times", times)
        specs = edited.values()
        column = lambda name, spare: np.array([*(getattr(spec.params, name) for spec in specs), spare]).view(np.int64)  # noqa: E731
        return _Edits(
            rows=np.array([*edited, 0]),
            waits=np.array([*(_num_output(spec) > len(spec.output) for spec in specs), 0], np.int64),
            repetition=column("repetition_penalty", 1.0),
            frequency=column("frequency_penalty", 0.0),
            presence=column("presence_penalty", 0.0),
            **{name: np.concatenate(arrays).view(np.int64) for name, arrays in lists.items()},
        )

    def _mask_words(self, mask: np.ndarray) -> np.ndarray:
        words = np.zeros(-(-self.vocab_size // 64) * 2, np.uint32)
        words[: len(mask)] = mask[: len(words)]
        return words.view(np.int64)

    def _edit(self, logits: Tensor, last: Tensor, e: _Edits[Tensor]) -> Tensor:
        """float32[E + 1, V], the rows that have edits, after them."""
        width, nowhere = self.vocab_size, (len(e.rows) - 1) * self.vocab_size
        x = logits[:, :width].index_select(0, e.rows).float()
        flat = x.view(-1)
        sound = x.amax(-1).isfinite()
        newest = torch.where(e.waits > 0, last.index_select(0, e.rows), -1)
        place = torch.arange(0, flat.numel(), width, device=x.device) + newest
        place = torch.where(newest >= 0, place, nowhere)
        if e.narrow.numel():
            kept = flat.index_select(0, e.allowed)
            x.index_fill_(0, e.narrow, -math.inf)
            flat.index_copy_(0, e.allowed, kept)
        if e.masked.numel():
            _apply_masks(x, e.masked, e.words)
        if e.early.numel() or e.bad.numel():
            follows = (e.bad_after < 0) | (e.bad_after == newest[e.bad // width])
            _forbid(x, e.early, torch.where(follows, e.bad, nowhere))
        if e.biased.numel():
            flat.index_add_(0, e.biased, e.bias.view(torch.float64).float())
        _punish_seen(x, torch.cat((e.seen, place)), e.repetition.view(torch.float64).float())
        _punish_output(x, e, place)
        x[:, 0].masked_fill_(~sound, math.nan)  # masks may have hidden what was wrong with the row
        return x


class _Kept(Generic[V]):
    """What was found out about objects that this step or the one before asked for, by their identity. The objects are
    kept with it, so that their identity stays theirs."""

    def __init__(self):
        self._now: dict[int, tuple[Any, V]] = {}
        self._before: dict[int, tuple[Any, V]] = {}

    def turn(self) -> None:
        """A step begins."""
        self._now, self._before = {}, self._now

    def of(self, owner: Any, make: Callable[[], V]) -> V:
        entry = self._now.get(id(owner))
        if entry is None:
            entry = self._before.get(id(owner)) or (owner, make())
            self._now[id(owner)] = entry
        return entry[1]


class _Counts:
    """The distinct ids of an output that grows, and how often each occurs."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        self._place: dict[int, int] = {}
        self._table = np.zeros((2, 64), np.int64)  # ids, times
        self._taken = 0

    def of(self, output: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """(ids, times) int64[*] each, after taking in what `output` grew by since the last call."""
        for id in output[self._taken :]:
            if 0 <= id < self._vocab_size:
                place = self._place.setdefault(id, len(self._place))
                if place == self._table.shape[1]:
                    self._table = np.concatenate((self._table, np.zeros_like(self._table)), 1)
                self._table[:, place] = id, self._table[1, place] + 1
        self._taken = len(output)
        ids, times = self._table[:, : len(self._place)]
        return ids, times


def _is_edited(spec: SampleSpec) -> bool:
    return has_edits(spec, _num_output(spec))


def _num_output(spec: SampleSpec) -> int:
    """Tokens generated so far, whether the spec knows the newest one or not."""
    return spec.position - len(spec.prompt)


def _forbidden_after(word: tuple[int, ...], spec: SampleSpec) -> int | None:
    """The newest token after which the last id of a bad word would complete it; -1: any; None: none."""
    if len(word) > 1 and _num_output(spec) > len(spec.output):
        return word[-2] if would_end(word[:-1], spec.output) else None
    return -1 if would_end(word, spec.output) else None


# Places that occur twice among those written below get the same number twice.


def _apply_masks(x: Tensor, rows: Tensor, words: Tensor) -> None:
    """Keep of some rows of x[R, V] the ids whose bits are set in words int64[rows * ceil(V / 64)], lowest first."""
    bits = torch.arange(8, dtype=torch.uint8, device=x.device)
    allowed = (words.view(torch.uint8)[:, None] >> bits & 1).view(len(rows), -1)[:, : x.shape[1]]
    x.index_copy_(0, rows, x.index_select(0, rows).masked_fill_(allowed == 0, -math.inf))


def _forbid(x: Tensor, early: Tensor, bad: Tensor) -> None:
    """Take the places `early` and `bad` from x[R, V]; in a row that has nothing left, only `bad`, or else neither."""
    flat, width = x.view(-1), x.shape[1]
    both = torch.cat((early, bad))
    before = flat.index_select(0, both)
    flat.index_fill_(0, both, -math.inf)
    left = x.amax(-1) > -math.inf
    flat.index_copy_(0, both, before.masked_fill(left[both // width], -math.inf))
    flat.index_fill_(0, bad, -math.inf)
    left = x.amax(-1) > -math.inf
    flat.index_copy_(0, bad, before[len(early) :].masked_fill(left[bad // width], -math.inf))


def _punish_seen(x: Tensor, places: Tensor, penalty: Tensor) -> None:
    """Repetition penalty[R] at places of x[R, V]."""
    flat = x.view(-1)
    value, by = flat.index_select(0, places), penalty[places // x.shape[1]]
    flat.index_copy_(0, places, torch.where(value > 0, value / by, value * by))


def _punish_output(x: Tensor, e: _Edits[Tensor], place: Tensor) -> None:
    """Frequency and presence penalties; the newest token, at `place`, counts once more or for the first time."""
    flat, width = x.view(-1), x.shape[1]
    frequency, presence = e.frequency.view(torch.float64), e.presence.view(torch.float64)
    row = e.counted // width
    again = e.counted == place[row]
    first = torch.where(torch.zeros_like(place).index_add_(0, row, again.long()) > 0, len(flat) - width, place)
    flat.index_add_(0, e.counted, -(frequency[row] * (e.times + again) + presence[row]).float())
    flat.index_add_(0, first, -(frequency + presence).float())


def _entries(ranks: list[Tensor], counts: list[int]) -> list[TokenLogprobs]:
    ids, logprobs, rank = ranks
    return logprob_entries(ids, logprobs.view(torch.float64), rank, counts)
