"""What a finished (or running) request looks like to the user. Names are vLLM's; `kv` is ours."""

from collections.abc import Callable
from dataclasses import dataclass, field

from pagefold.core.types import TokenLogprobs


@dataclass
class KVUsage:
    """What became of a request's KV rows.

    tokens           tokens stored
    rows_kept        rows per head at the end (mean over heads)
    rows_evicted     rows per head dropped on the way
    compactions      times rows were evicted
    bytes            bytes of the pages held at the end
    peak_bytes       the most bytes of pages held
    preemptions      times the request was preempted
    resumed_tokens   tokens of the prompt that were not computed, for an earlier request had left their folded rows;
                     the rows that one evicted and the compactions it had are counted above

    With steps planned ahead, a request that ends by a stop id or string has had one step more than its tokens need, and
    what that step folded or opened counts.
    """

    tokens: int = 0
    rows_kept: float = 0.0
    rows_evicted: float = 0.0
    compactions: int = 0
    bytes: int = 0
    peak_bytes: int = 0
    preemptions: int = 0
    resumed_tokens: int = 0


@dataclass
class CompletionOutput:
    """One continuation. `finish_reason` is None while it runs, else "stop", "length" or "abort".

    token_ids  grows while it runs; the engine's own list, not to be changed
    started    when it first had a place in a step, by `time.perf_counter`
    count_kv   counts `kv` anew whenever it is asked for, as long as the request runs
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    started: float | None = None
    count_kv: Callable[[], KVUsage] | None = field(default=None, repr=False, compare=False)
    _kv: KVUsage = field(default_factory=KVUsage)

    @property
    def kv(self) -> KVUsage:
        return self.count_kv() if self.count_kv else self._kv

    def settle(self) -> None:
        """The request has ended: what became of its rows is final."""
        self._kv, self.count_kv = self.kv, None


@dataclass
class RequestOutput:
    """One prompt with its continuations (`n` of them). `kv` is that of the first continuation."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0

    @property
    def kv(self) -> KVUsage:
        return self.outputs[0].kv
