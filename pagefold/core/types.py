"""The words every room uses: what a user asks for, what a step does, what comes back. No torch here."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple, overload

import numpy as np


class InputError(ValueError):
    """A request or option that cannot be served. The message names the field, the value and the limit.

    field   the name of the offending field, as the user wrote it
    """

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


def _check(ok: bool, field: str, value: object, limit: str) -> None:
    if not ok:
        raise InputError(field, f"got {value!r}, must be {limit}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int beyond every float
        return False


def check_ratio(value: object) -> None:
    """Raise InputError if this is no `kv_budget_ratio`."""
    ok = value is None or (_is_real(value) and 0 < value <= 1)  # type: ignore[operator]
    _check(ok, "kv_budget_ratio", value, "a number in (0, 1]")


def _as_tuple(field: str, value: object, limit: str) -> tuple:
    if value is None:
        return ()
    if isinstance(value, (str, int)):
        return (value,)
    _check(isinstance(value, Iterable) and not isinstance(value, (bytes, Mapping)), field, value, limit)
    return tuple(value)  # type: ignore[arg-type]


def _check_token_ids(field: str, ids: Iterable[object]) -> None:
    for id in ids:
        _check(_is_int(id) and 0 <= id < 2**31, field, id, "a token id")  # type: ignore[operator]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt. Names and defaults are vLLM's; the ``kv_*`` fields are ours.

    n                     continuations of the prompt
    temperature           0 is greedy; tiny values are treated as greedy
    top_p, top_k, min_p   nucleus, rank (0 or -1: off) and relative-probability cuts
    seed                  fixes the draw of this request, whatever else is in the batch; None draws one
    stop                  strings that end the text; excluded unless `include_stop_str_in_output`
    stop_token_ids        ids that end the text, besides the model's EOS ids
    max_tokens            None: as many as the context and the pool allow
    min_tokens            EOS ids and stop ids are masked, and stop strings not looked for, until this many are out
    logprobs              None, or how many alternatives to report a token (0: only the chosen one)
    prompt_logprobs       the same for the prompt's tokens
    logit_bias            {token id: added to its logit}
    allowed_token_ids     if given, no other id is ever drawn
    bad_words             strings that are never produced
    structured_outputs    one of `STRUCTURED_OUTPUTS` and its value, such as {"regex": "[0-9]+"}: the form of the text
    kv_eviction           scorer spec or "none"; None takes the engine's
    kv_budget             rows kept per head after a compaction; None takes the engine's
    kv_budget_ratio       the same as a share of the prompt's tokens, in (0, 1], instead of `kv_budget`
    kv_evict_when         "always" or "pressure"; None takes the engine's
    kv_keep_turns         resume from what an earlier, folded request left of this prompt's beginning, and leave the
                          like for later ones; None takes the engine's
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: dict[str, Any] | None = None
    kv_eviction: str | None = None
    kv_budget: int | None = None
    kv_budget_ratio: float | None = None
    kv_evict_when: str | None = None
    kv_keep_turns: bool | None = None

    MAX_N = 1024
    MAX_LOGPROBS = 128
    MAX_WORDS = 1024  # entries of `stop`, `bad_words`, `stop_token_ids` and `logit_bias`: each is looked at every step
    GREEDY_BELOW = 1e-3  # below it, only near ties could be drawn differently

    def __post_init__(self):
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731 - frozen, normalised once
        for name in ("stop", "bad_words"):
            put(name, _as_tuple(name, getattr(self, name), "a string or a list of strings"))
        put("stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids, "a list of token ids"))
        _check_token_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", _as_tuple("allowed_token_ids", self.allowed_token_ids, "a list of token ids"))
            _check(len(self.allowed_token_ids) > 0, "allowed_token_ids", [], "a non-empty list")
            _check_token_ids("allowed_token_ids", self.allowed_token_ids)
        if self.logit_bias is not None:
            try:  # JSON has only strings for keys
                bias = {int(k) if isinstance(k, str) else k: v for k, v in self.logit_bias.items()}
            except (ValueError, AttributeError):
                limit = "a mapping of token ids to numbers"
                raise InputError("logit_bias", f"got {self.logit_bias!r}, must be {limit}") from None
            put("logit_bias", bias)
            _check_token_ids("logit_bias", bias)
            for key, value in bias.items():
                _check(_is_real(value) and abs(value) <= 100, f"logit_bias[{key}]", value, "a number in [-100, 100]")
        for name in ("stop", "bad_words", "stop_token_ids", "logit_bias"):
            count = len(getattr(self, name) or ())
            if count > self.MAX_WORDS:
                raise InputError(name, f"got {count} entries, at most {self.MAX_WORDS} are allowed")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            _check(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        _check(_is_int(self.n) and 1 <= self.n <= self.MAX_N, "n", self.n, f"an integer in [1, {self.MAX_N}]")
        for name, low, high in (
            ("temperature", 0.0, 1e4),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("min_p", 0.0, 1.0),
        ):
            value = getattr(self, name)
            _check(_is_real(value) and low <= value <= high, name, value, f"a finite number in [{low:g}, {high:g}]")
        _check(_is_real(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        _check(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "an integer >= 1, or 0 or -1 for off")
        _check(
            _is_real(self.repetition_penalty) and 0 < self.repetition_penalty <= 100,
            "repetition_penalty",
            self.repetition_penalty,
            "a number in (0, 100]",
        )
        if self.seed is not None:
            _check(_is_int(self.seed) and -(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit integer")
        if self.max_tokens is not None:
            _check(_is_int(self.max_tokens) and self.max_tokens >= 0, "max_tokens", self.max_tokens, "an integer >= 0")
        _check(_is_int(self.min_tokens) and self.min_tokens >= 0, "min_tokens", self.min_tokens, "an integer >= 0")
        if self.max_tokens is not None:
            _check(
                self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, f"<= max_tokens ({self.max_tokens})"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                limit = f"an integer in [0, {self.MAX_LOGPROBS}]"
                _check(_is_int(value) and 0 <= value <= self.MAX_LOGPROBS, name, value, limit)
        for text in self.stop:
            _check(isinstance(text, str) and text != "", "stop", text, "a non-empty string")
        for text in self.bad_words:
            _check(isinstance(text, str) and text != "", "bad_words", text, "a non-empty string")
        if self.stop and not self.detokenize:
            raise InputError("stop", "needs detokenize=True, for stop strings are looked for in the text")
        if self.structured_outputs is not None:
            known = isinstance(self.structured_outputs, dict) and set(self.structured_outputs) <= set(
                STRUCTURED_OUTPUTS
            )
            limit = f"an object with one of {', '.join(STRUCTURED_OUTPUTS)}"
            _check(known and len(self.structured_outputs) == 1, "structured_outputs", self.structured_outputs, limit)
        if self.kv_eviction is not None:
            _check(isinstance(self.kv_eviction, str), "kv_eviction", self.kv_eviction, "a scorer spec or 'none'")
        if self.kv_budget is not None:
            _check(_is_int(self.kv_budget) and self.kv_budget > 0, "kv_budget", self.kv_budget, "an integer > 0")
        check_ratio(self.kv_budget_ratio)
        if self.kv_budget is not None and self.kv_budget_ratio is not None:
            raise InputError(
                "kv_budget_ratio", f"got {self.kv_budget_ratio}, and kv_budget={self.kv_budget}: one of them"
            )
        keep = self.kv_keep_turns
        _check(keep is None or isinstance(keep, bool), "kv_keep_turns", keep, "true or false")
        if self.kv_evict_when is not None:
            _check(
                self.kv_evict_when in EVICT_WHEN, "kv_evict_when", self.kv_evict_when, f"one of {', '.join(EVICT_WHEN)}"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature < self.GREEDY_BELOW


STRUCTURED_OUTPUTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
EVICT_WHEN = ("always", "pressure")


@dataclass(frozen=True)
class Request:
    """What the user asked for one continuation; never changes.

    id           unique in the engine; continuations of one prompt (`n` > 1) are requests of their own
    prompt       token ids
    priority     lower runs first; equal ones run in order of arrival
    cache_salt   keeps this request's cached prefixes apart from those of other salts
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    cache_salt: str = ""


class FinishReason(str, Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: the chosen id first, then the best alternatives, best first.

    ids        int, chosen id at index 0
    logprobs   float, natural logarithm, of the distribution before temperature and cuts
    ranks      int, 1 is the most likely id
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]


class Job(NamedTuple):
    """One group's compaction or cooling, as the worker needs it.

    Rows of the full pages [first_page, first_page + num_src_pages) of (slot, group) are read, `keep_rows` of them
    are chosen (all of them when cooling), and written in order to `dst_pages`.
    """

    slot: int
    group: int
    first_page: int
    num_src_pages: int
    num_rows: int  # rows of the group at launch, an open last page included
    num_tokens: int  # tokens of the sequence at launch: the window's last query is token num_tokens - 1
    keep_rows: int
    dst_pages: np.ndarray  # int32[keep_rows / page size]
    dst_tier: int
    window_slot: int  # 0: the job needs no window (cooling, or a scorer without queries)
    policy: int  # index into StepPlan.policies


@dataclass(frozen=True)
class ScorePolicy:
    """What the worker must know of a request's eviction policy: which scorer ranks its rows and which rows are safe.

    scorer        spec string, as given to the scorer registry
    sink_tokens   leading rows that are always kept
    window        trailing rows that are always kept, and the number of queries a window holds
    """

    scorer: str
    sink_tokens: int
    window: int


def window_lead(window: int, stride: int) -> int:
    """Tokens from the first of `window` queries, one every `stride` tokens, to the end of the last; both included."""
    return (window - 1) * stride + 1


class Chunk(NamedTuple):
    """Tokens [start, start + num_tokens) of one sequence, computed in this step; decode is num_tokens == 1.

    num_logits     how many of the last tokens need logits: 0 (an inner prefill chunk), 1, or all (prompt logprobs)
    window_slot    window slot lent to the sequence, 0 if it holds none
    window_start   token whose query goes to index 0 of the window
    """

    slot: int
    start: int
    num_tokens: int
    num_logits: int
    window_slot: int = 0
    window_start: int = 0


class Chunks(Sequence[Chunk]):
    """The chunks of a step, held as columns: a batch is hundreds of them, every step.

    columns   int64[6, N], a row for each field of `Chunk`, in their order
    """

    def __init__(self, columns: np.ndarray):
        self.columns = columns

    def __len__(self) -> int:
        return self.columns.shape[1]

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> "Chunks": ...
    def __getitem__(self, index: int | slice) -> "Chunk | Chunks":
        part = self.columns[:, index]
        return Chunks(part) if isinstance(index, slice) else Chunk(*part.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chunks) and np.array_equal(self.columns, other.columns)

    __hash__ = None  # type: ignore[assignment]


class Move(Enum):
    """From which store pages are copied to which."""

    OUT = "device to host"
    IN = "host to device"
    WITHIN = "device to device"


class SwapOp(NamedTuple):
    """Copy pages between the device store of `tier` and its store in host memory, or within the device."""

    tier: int
    move: Move
    src_pages: np.ndarray
    dst_pages: np.ndarray


@dataclass
class TableEdits:
    """Changes to the device tables since the last step. No entry of a table is named twice, so their order is free.

    pages     int32[N, 4]   (slot, group, index, page)
    lengths   int32[M, 4]   (slot, group, evicted rows, cold pages)
    """

    pages: np.ndarray
    lengths: np.ndarray


@dataclass(slots=True, eq=False)
class SampleSpec:
    """What the sampler must know of one sequence whose next token is drawn in this step.

    seed        int64, with `position` it fixes the draw
    position    index of the drawn token in the sequence; len(prompt) + len(output), or one more if the step was planned
                before the token drawn last was known, which `output` lacks then
    prompt      token ids of the prompt (for the repetition penalty)
    output      token ids generated so far (for all penalties, bad words, min_tokens)
    stop_ids    ids masked while fewer than `params.min_tokens` tokens are out
    bad_ids     bad words as id sequences
    mask        uint32[>= vocabulary / 32], if the output has a grammar: the bits of ids that may follow, lowest first
    """

    params: SamplingParams
    seed: int
    position: int
    prompt: tuple[int, ...]
    output: list[int]
    stop_ids: frozenset[int]
    bad_ids: tuple[tuple[int, ...], ...]
    mask: np.ndarray | None = None


class Samples(Sequence[SampleSpec | None]):
    """The specs of a step's draws; None where none is made.

    A sequence has one spec for all its draws, so that it need not be made anew, and what follows from it can be kept;
    only the position is the step's.

    lasting     list of N; `position` in it means nothing
    positions   int64[N], what stands for it
    """

    def __init__(self, lasting: list[SampleSpec | None], positions: np.ndarray):
        self.lasting = lasting
        self.positions = positions

    @classmethod
    def of(cls, specs: Sequence[SampleSpec]) -> "Samples":
        """Of specs that know their positions."""
        return cls([*specs], np.fromiter((spec.position for spec in specs), np.int64, len(specs)))

    @property
    def drawn(self) -> list[int]:
        """Indices of those that are not None."""
        return [n for n, spec in enumerate(self.lasting) if spec is not None]

    def only_drawn(self) -> "Samples":
        """Without those that are None."""
        if None not in self.lasting:
            return self
        return Samples([spec for spec in self.lasting if spec is not None], self.positions[self.drawn])

    def __len__(self) -> int:
        return len(self.lasting)

    @overload
    def __getitem__(self, index: int) -> SampleSpec | None: ...
    @overload
    def __getitem__(self, index: slice) -> "Samples": ...
    def __getitem__(self, index: int | slice) -> "SampleSpec | None | Samples":
        if isinstance(index, slice):
            return Samples(self.lasting[index], self.positions[index])
        spec = self.lasting[index]
        return spec and replace(spec, position=int(self.positions[index]))


@dataclass
class StepPlan:
    """The only message from the scheduler to the worker: picklable, so that it can be recorded and replayed. (To be
    pickled when it is made: the outputs in `samples` grow.)

    tokens      int32[T]   token ids of all chunks, one after the other; -1 stands for the token drawn last for the
                chunk's slot, which planning ahead does not know yet
    samples     one per chunk with num_logits > 0, in the order of `chunks`; None where the logits are wanted only
                for prompt logprobs
    prompt_targets   {index into `chunks`: (the ids that follow the chunk's tokens inside the prompt, how many
                alternatives to rank)}, for requests that want prompt logprobs
    jobs        compactions to run after this step's forward
    policies    the score policies that `jobs` refer to
    """

    step: int
    edits: TableEdits
    swaps: list[SwapOp]
    chunks: Chunks
    tokens: np.ndarray
    samples: Samples
    prompt_targets: dict[int, tuple[list[int], int]]
    jobs: list[Job]
    policies: list[ScorePolicy]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass
class StepResult:
    """What the worker sends back.

    ids                one per entry of `StepPlan.samples`, None where no token was drawn
    logprobs           the same shape: the chosen token's, if it asked for them
    prompt_logprobs    one entry per target in `StepPlan.prompt_targets`
    failed             {slot: what went wrong} of those whose jobs failed: their destination pages hold nothing
    """

    step: int
    ids: list[int | None]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    failed: dict[int, str] = field(default_factory=dict)
