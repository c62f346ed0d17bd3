"""One request being served."""

from dataclasses import dataclass, field
from enum import Enum, auto

from pagefold.core.types import FinishReason, Request, SampleSpec, TokenLogprobs
from pagefold.engine.grammar import Matcher
from pagefold.kv.holder import Swapped
from pagefold.kv.state import FoldPolicy, KVState


class Status(Enum):
    WAITING = auto()  # holds nothing; its tokens, if any were generated, will be recomputed
    SWAPPED = auto()  # its pages wait in host memory
    RUNNING = auto()
    FINISHED = auto()


@dataclass(eq=False)
class Sequence:
    """A request with its tokens so far and its place in KV memory.

    arrival      order of arrival, breaks ties of priority
    seed         fixes the draws, with the position
    stop_ids     ids that end it (EOS ids unless ignored, and stop_token_ids)
    bad_ids      bad words as id sequences
    max_tokens   tokens to generate, within what the context and the pool allow
    keeps_turn   it may resume from a trunk, and leaves one when it ends
    grammar      what its output must look like, advanced by every token of it
    prompt_len   tokens of the prompt
    last         number of tokens that are ever stored (the last one drawn is not)
    spec         what all its draws have in common
    tokens       prompt and generated tokens, as far as their ids are known
    num_drawing  tokens that steps in flight are drawing: they count, and can be computed, before their ids are known
    state        its rows, while it runs; what became of them, once it is finished
    dropped      the rows it had before it was last preempted to be computed again
    num_cached   tokens taken from the prefix cache or a trunk when it first ran
    started      when that was, by `time.perf_counter`
    error        why it was aborted, if it failed
    """

    request: Request
    policy: FoldPolicy
    arrival: int
    seed: int
    stop_ids: frozenset[int]
    bad_ids: tuple[tuple[int, ...], ...]
    max_tokens: int
    grammar: Matcher | None = None
    keeps_turn: bool = False
    prompt_len: int = field(init=False)
    last: int = field(init=False)
    spec: SampleSpec = field(init=False)
    tokens: list[int] = field(init=False)
    num_drawing: int = 0
    output: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    state: KVState | None = None
    dropped: KVState | None = None
    swapped: Swapped | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached: int | None = None
    started: float | None = None
    num_preemptions: int = 0
    error: str | None = None

    def __post_init__(self):
        self.prompt_len = len(self.request.prompt)
        self.last = self.prompt_len + max(self.max_tokens, 1) - 1
        ask = self.request
        self.tokens = list(ask.prompt)
        self.spec = SampleSpec(ask.sampling, self.seed, 0, ask.prompt, self.output, self.stop_ids, self.bad_ids)

    @property
    def kv(self) -> KVState:
        """The rows of a sequence that has, or had, a place in KV memory."""
        assert self.state is not None, f"request {self.request.id} holds no KV"
        return self.state

    def runs_on(self, kv: KVState) -> bool:
        """It runs, and these are its rows; it may have been preempted, and have others since."""
        return self.state is kv and self.status is Status.RUNNING

    @property
    def may_be_quiet(self) -> bool:
        """Once it decodes, its next token can be planned without knowing the newest."""
        return self.max_tokens > 0 and self.grammar is None

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is not stored yet, and will be: the only measure of progress."""
        total, stored = len(self.tokens) + self.num_drawing, self.state.num_tokens if self.state else 0
        return (total if total < self.last else self.last) - stored

    @property
    def order(self) -> tuple[int, int]:
        return self.request.priority, self.arrival

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED
