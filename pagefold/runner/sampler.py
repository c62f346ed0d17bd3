"""From logits to token ids: masks, penalties, cuts and the draw, and the log-probabilities that go with them.

The order of operations is vLLM's:

    log-probabilities are taken from the model's own distribution, before anything below
    allowed_token_ids, grammar, min_tokens, logit_bias, bad_words    masks and biases
    repetition penalty (prompt and output), frequency, presence      penalties
    greedy:  the largest logit, ties to the lowest id
    else:    temperature, min_p, top_k, top_p, the draw

A draw is a race: every id gets an exponential waiting time with its probability as the rate, and the shortest wins,
which is a sample of the distribution (the Gumbel-max trick in another form). The times come from a hash of (seed,
position, id) alone, so that neither batch mates nor their order can change what a request draws, and a rounding error
in the logits seldom does.

Two things can go wrong in a row, and both stay in that row. A row with a NaN or +inf logit, or with no finite one, has
no distribution: its id is None. Masks that leave no id give way: min_tokens first, so that the request can end, then
bad_words; allowed_token_ids and a grammar's mask never do, and if they leave no finite logit the id is None.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from pagefold.core.types import SampleSpec, TokenLogprobs

_FIRST_CANDIDATES = 128  # ids ranked at first for top_p; eight times more as long as they hold too little mass
_ROWS_AT_ONCE = 64  # on an accelerator; a CPU goes row by row, which stays in its cache
_GOLDEN, _MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of splitmix64
_WORD = (1 << 64) - 1
_LOW_HALF = (1 << 32) - 1

_Picker = Callable[[Tensor, list[SampleSpec]], Tensor]  # one id per row of edited logits: int64[M]


class Sampler:
    """Draws one id per row of logits. It keeps nothing of a request: all of that is in its `SampleSpec`.

    vocab_size   logits at and above this id (padding of the output matrix) are never looked at
    device       where the logits live
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu"):
        self.vocab_size = vocab_size
        self._salts = race_salts(vocab_size).to(device)

    @torch.no_grad()
    def sample(
        self, logits: Tensor, specs: Sequence[SampleSpec]
    ) -> tuple[list[int | None], list[TokenLogprobs | None]]:
        """Draw the next id of every row.

        logits    floating[N, >= vocab_size], left unchanged
        specs     one per row

        Returns the ids (None: the row has no distribution), and the log-probabilities of the rows that asked for them
        (see `token_logprobs`).
        """
        if logits.dim() != 2 or len(logits) != len(specs) or logits.shape[1] < self.vocab_size:
            raise ValueError(f"logits: got {tuple(logits.shape)}, must be [{len(specs)}, >= {self.vocab_size}]")
        logits = logits[:, : self.vocab_size]
        ids: list[int | None] = [None] * len(specs)
        plain: list[int] = []
        groups: dict[_Picker, list[int]] = {}
        for row, sound in enumerate(logits.amax(-1).isfinite().tolist()):
            if sound and is_greedy(specs[row]) and not has_edits(specs[row], len(specs[row].output)):
                plain.append(row)
            elif sound:
                groups.setdefault(self._picker(specs[row]), []).append(row)

        if plain:
            rows = logits if len(plain) == len(specs) else _take(logits, plain)
            for row, token in zip(plain, rows.argmax(-1).tolist(), strict=True):
                ids[row] = token
        for pick, rows in groups.items():
            for part in _parts(rows, logits.device):
                for row, token in zip(part, self._edit_and_pick(logits, part, specs, pick), strict=True):
                    ids[row] = token
        return ids, _reported(logits, ids, specs)

    @torch.no_grad()
    def prompt_logprobs(self, logits: Tensor, targets: Sequence[int], k: int) -> list[TokenLogprobs]:
        """Rank `targets`, the tokens that follow in the prompt, in logits[n, >= vocab_size] (see `token_logprobs`)."""
        return token_logprobs(logits[:, : self.vocab_size], targets, [k] * len(targets))

    def _picker(self, spec: SampleSpec) -> _Picker:
        if is_greedy(spec):
            return _pick_best
        return self._draw_cut if spec.params.top_k > 0 or spec.params.top_p < 1 else self._draw

    def _edit_and_pick(
        self,
        logits: Tensor,
        rows: Sequence[int],
        specs: Sequence[SampleSpec],
        pick: _Picker,
    ) -> list[int | None]:
        chosen = [specs[row] for row in rows]
        x = at_least_float32(_take(logits, rows))
        for i, spec in enumerate(chosen):
            if has_edits(spec, len(spec.output)):
                x[i] = _edit(x[i], spec)
        sound = x.amax(-1).isfinite().tolist()
        return [token if ok else None for token, ok in zip(pick(x, chosen).tolist(), sound, strict=True)]

    def _draw(self, x: Tensor, specs: list[SampleSpec]) -> Tensor:
        """One id per row of x[M, V], from the whole vocabulary."""
        return _race(_scale(x, specs).exp_().double(), self._salts, specs)

    def _draw_cut(self, x: Tensor, specs: list[SampleSpec]) -> Tensor:
        """One id per row of x[M, V], from those that top_k and top_p leave."""
        ids, weights = _cut(x, _scale(x, specs), [s.params.top_k for s in specs], [s.params.top_p for s in specs])
        return ids.gather(1, _race(weights, self._salts[ids], specs)[:, None])[:, 0]


def token_logprobs(logits: Tensor, chosen: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """The chosen id of each row, followed by the row's `counts[i]` most likely ids (the chosen one may be among them).

    logits    floating[n, V]; a row with NaN yields NaN

    Equal logits rank by id, lowest first.
    """
    entries: list[TokenLogprobs] = []
    for rows in _parts(range(len(chosen)), logits.device):
        x = at_least_float32(logits[rows[0] : rows[-1] + 1])
        target = torch.tensor([chosen[row] for row in rows], device=x.device)
        part = [counts[row] for row in rows]
        entries += logprob_entries(*ranked(x, target, max(part)), part)
    return entries


def ranked(x: Tensor, target: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of x[n, V]: the target and the best `most` ids (or all), their log-probabilities, the target's rank.

    int64[n, 1 + most], floating[n, 1 + most], int64[n]
    """
    target = target[:, None]
    value = x.gather(1, target)
    ahead = (x > value) | ((x == value) & (torch.arange(x.shape[1], device=x.device) < target))
    ids = torch.cat((target, _best(x, min(most, x.shape[1]))), dim=1)
    return ids, x.gather(1, ids) - x.logsumexp(-1, keepdim=True), ahead.sum(-1) + 1


def logprob_entries(ids: Tensor, logprobs: Tensor, ranks: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """What `ranked` found, as far as each row asked for it."""
    rows = zip(ids.tolist(), logprobs.tolist(), ranks.tolist(), counts, strict=True)
    return [
        TokenLogprobs(tuple(row[: 1 + k]), tuple(logprob[: 1 + k]), (rank, *range(1, len(row[: 1 + k]))))
        for row, logprob, rank, k in rows
    ]


def _reported(logits: Tensor, ids: list[int | None], specs: Sequence[SampleSpec]) -> list[TokenLogprobs | None]:
    asked = [
        (row, token, k)
        for row, token in enumerate(ids)
        if token is not None and (k := specs[row].params.logprobs) is not None
    ]
    entries: list[TokenLogprobs | None] = [None] * len(ids)
    if asked:
        rows, chosen, counts = (list(column) for column in zip(*asked, strict=True))
        for row, entry in zip(rows, token_logprobs(_take(logits, rows), chosen, counts), strict=True):
            entries[row] = entry
    return entries


def _parts(rows: Sequence[int], device: torch.device) -> Iterator[Sequence[int]]:
    size = 1 if device.type == "cpu" else _ROWS_AT_ONCE
    return (rows[first : first + size] for first in range(0, len(rows), size))


def _take(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """A copy of some rows."""
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


def at_least_float32(x: Tensor) -> Tensor:
    """float64 as it is, every other float as float32."""
    return x if x.dtype == torch.float64 else x.float()


def is_greedy(spec: SampleSpec) -> bool:
    return spec.params.greedy or spec.params.top_k == 1


def has_edits(spec: SampleSpec, num_output: int) -> bool:
    """Whether the logits of a sequence with so many generated tokens are changed before anything is picked."""
    p = spec.params
    return bool(
        p.allowed_token_ids is not None
        or spec.mask is not None
        or (spec.stop_ids and num_output < p.min_tokens)
        or p.logit_bias
        or spec.bad_ids
        or p.repetition_penalty != 1
        or (num_output and (p.frequency_penalty != 0 or p.presence_penalty != 0))
    )


def _edit(x: Tensor, spec: SampleSpec) -> Tensor:
    """Masks, biases and penalties of one row x[V], which may be overwritten."""
    p = spec.params
    if p.allowed_token_ids is not None:
        allowed = _index(p.allowed_token_ids, x)
        x = torch.full_like(x, -math.inf).index_copy_(0, allowed, x[allowed])
    if spec.mask is not None:
        x.masked_fill_(~torch.from_numpy(mask_bits(spec.mask, len(x))).to(x.device), -math.inf)
    early = spec.stop_ids if len(spec.output) < p.min_tokens else frozenset()
    bad = [word[-1] for word in spec.bad_ids if would_end(word, spec.output)]
    if early or bad:
        x = _forbid(x, early, bad)
    if p.logit_bias:
        bias = {token: value for token, value in p.logit_bias.items() if 0 <= token < len(x)}
        x[_index(bias, x)] += torch.tensor(list(bias.values()), dtype=x.dtype, device=x.device)
    if p.repetition_penalty != 1:
        seen = _index(list(chain(spec.prompt, spec.output)), x)  # repeated ids write the same value again
        value = x[seen]
        x[seen] = torch.where(value > 0, value / p.repetition_penalty, value * p.repetition_penalty)
    if spec.output and (p.frequency_penalty != 0 or p.presence_penalty != 0):
        counts = Counter(spec.output)
        penalty = [p.frequency_penalty * num + p.presence_penalty for num in counts.values()]
        x[_index(counts, x)] -= torch.tensor(penalty, dtype=x.dtype, device=x.device)
    return x


def would_end(word: tuple[int, ...], output: list[int]) -> bool:
    """Whether the output ends with all of `word` but its last id."""
    prefix = word[:-1]
    return not prefix or tuple(output[-len(prefix) :]) == prefix


def _forbid(x: Tensor, early: Collection[int], bad: Collection[int]) -> Tensor:
    """x[V] without the ids that min_tokens and bad_words forbid, as far as that leaves any."""
    for banned in ({*early, *bad}, bad):
        masked = x.index_fill(0, _index(banned, x), -math.inf)
        if masked.amax() > -math.inf:
            return masked
    return x


def _index(ids: Collection[int], x: Tensor) -> Tensor:
    """The ids that x[V] has a logit for, in their order."""
    return torch.from_numpy(known_ids(ids, len(x))).to(x.device)


def known_ids(ids: Collection[int], vocab_size: int) -> np.ndarray:
    """The ids that there are, in their order: int64[*]."""
    index = np.fromiter(ids, np.int64, len(ids))
    return index[(index >= 0) & (index < vocab_size)]


def mask_bits(mask: np.ndarray, vocab_size: int) -> np.ndarray:
    """`SampleSpec.mask` as bool[V]."""
    return np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").view(bool)


def _pick_best(x: Tensor, specs: list[SampleSpec]) -> Tensor:
    return x.argmax(-1)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _scale(x: Tensor, specs: list[SampleSpec]) -> Tensor:
    """x[M, V] under temperature and min_p, with the largest at 0."""
    scaled = (x - x.amax(-1, keepdim=True)).div_(_column([s.params.temperature for s in specs], x))
    min_p = [s.params.min_p for s in specs]
    if any(min_p):
        scaled.masked_fill_(scaled < _column(min_p, x).log(), -math.inf)
    return scaled


def _cut(x: Tensor, scaled: Tensor, top_k: list[int], top_p: list[float]) -> tuple[Tensor, Tensor]:
    """The most likely ids, best first, and their weights: those outside the cuts weigh 0. int64 and float64[M, C].

    top_k keeps the k most likely ids; of these, top_p keeps the fewest of the most likely that hold a share p of their
    mass.
    """
    vocab_size = x.shape[1]
    total = None if all(k > 0 for k in top_k) else scaled.exp().sum(-1, keepdim=True, dtype=torch.float64)
    k = torch.tensor([k if k > 0 else vocab_size for k in top_k], device=x.device)[:, None]
    p = torch.tensor(top_p, dtype=torch.float64, device=x.device)[:, None]
    most = max(_FIRST_CANDIDATES, *top_k)
    for num in (min(most, vocab_size), min(most * 8, vocab_size), vocab_size):
        ids = _best(x, num)
        weights = scaled.gather(1, ids).exp_().double()
        weights.masked_fill_(torch.arange(num, device=x.device) >= k, 0)
        mass = weights.cumsum(-1)
        whole = mass[:, -1:] if total is None else torch.where(k <= num, mass[:, -1:], total)
        inside = mass - weights < p * whole
        if num == vocab_size or not bool((inside[:, -1:] & (k > num)).any()):
            break
    return ids, weights.mul_(inside)


def _best(x: Tensor, num: int) -> Tensor:
    """The ids of the `num` largest of x[M, V], best first, ties to the lowest id: int64[M, num].

    Ranks integers that hold the float's order in the high half and the id's in the low half, so that no two are equal.
    """
    last = x.shape[1] - 1
    bits = (x.float() + 0.0).view(torch.int32)  # + 0.0 makes -0.0 a plain zero
    order = bits ^ (bits >> 31).bitwise_and_(0x7FFFFFFF)
    keys = (order.long() << 32).add_(torch.arange(last, -1, -1, device=x.device))
    best = keys.topk(num).values if num <= last else keys.sort(descending=True).values
    return last - best.bitwise_and_(_LOW_HALF)


def _race(weights: Tensor, salts: Tensor, specs: list[SampleSpec]) -> Tensor:
    """The column of float64 weights[M, C] that wins each row's race; the columns are the ids of salts[C] or [M, C]."""
    keys = [_signed(race_key(seed_key(s.seed & _WORD), s.position)) for s in specs]
    bits = salts ^ torch.tensor(keys, dtype=torch.int64, device=weights.device)[:, None]
    bits ^= (bits >> 32).bitwise_and_(_LOW_HALF)
    bits *= _signed(_MIX_A)
    uniform = (bits >> 12).bitwise_and_((1 << 52) - 1).double().add_(0.5).mul_(2.0**-52)  # in (0, 1), without the ends
    return uniform.log_().div_(weights).argmax(-1)  # minus the waiting times: -inf where the weight is 0


def race_salts(vocab_size: int) -> Tensor:
    """What the ids bring to the hash: int64[V]."""
    return torch.from_numpy(_mix(np.arange(1, vocab_size + 1, dtype=np.uint64)).view(np.int64))


def seed_key(seed):
    """A seed, well mixed, on a Python int in [0, 2^64) or uint64[*]."""
    return _mix(seed)


def race_key(seed_key, position):
    """What seed and position bring to the hash, on Python ints in [0, 2^64) or uint64[*]."""
    return _mix(seed_key + position * _GOLDEN & _WORD)


def _mix(z):
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014), on a Python int or uint64[*]."""
    z = (z ^ (z >> 30)) * _MIX_A & _WORD
    z = (z ^ (z >> 27)) * _MIX_B & _WORD
    return z ^ (z >> 31)


def _signed(word: int) -> int:
    return word - (word >> 63 << 64)
