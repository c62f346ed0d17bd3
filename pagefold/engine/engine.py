"""The loop: requests in, steps, text out."""

from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

from pagefold.core.config import EngineConfig
from pagefold.core.types import FinishReason, InputError, Request
from pagefold.engine.detokenize import Detokenizer
from pagefold.engine.grammar import Matcher
from pagefold.engine.outputs import CompletionOutput, KVUsage, RequestOutput
from pagefold.engine.policy import PolicyMaker
from pagefold.engine.scheduler import Scheduler
from pagefold.engine.sequence import Sequence
from pagefold.kv.bounds import check_fits, fits_tokens
from pagefold.kv.manager import KVManager
from pagefold.kv.state import FoldPolicy
from pagefold.models.tokenizer import Tokenizer
from pagefold.runner.runner import Launched, ModelRunner


@dataclass
class _Choice:
    """One continuation of a prompt: its sequence, its text, what the user has seen of it.

    says_more   a token brings more than its id: text or log-probabilities
    num_read    tokens that its text was told of
    """

    seq: Sequence
    detokenizer: Detokenizer | None
    output: CompletionOutput
    says_more: bool
    num_read: int = 0


@dataclass
class _Served:
    """One prompt with its continuations."""

    output: RequestOutput
    choices: list[_Choice]


class Engine:
    """Serves requests step by step, in one process and one thread.

    A bad request is refused by `add` with an `InputError`; it touches nobody else. `abort` works at any moment.

    With `plan_ahead`, a step is launched before the tokens of the one before it are read, so that the device never
    waits for the host. They come out of `step` one call later, and a request that is found to have ended has one token
    computed for nothing; which tokens they are does not change.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        manager: KVManager,
        policies: PolicyMaker,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
    ):
        self.config = config
        self.runner = runner
        self.manager = manager
        self.policies = policies
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.plan_ahead = bool(config.scheduler.plan_ahead)
        self.scheduler = Scheduler(config.scheduler, manager)
        self._in_flight: deque[Launched] = deque()
        self._served: dict[str, _Served] = {}
        self._owner: dict[Sequence, tuple[_Served, _Choice]] = {}
        self._arrivals = 0

    # ---- requests come and go

    def add(self, request: Request, prompt_text: str | None = None, grammar: Matcher | None = None) -> None:
        """Queue a request. Raises InputError, naming the field and the limit, if it can never be served.

        grammar   what each continuation must look like, in its first state
        """
        if request.id in self._served:
            raise InputError("request_id", f"{request.id!r} is already being served")
        sampling = request.sampling
        self._check_ids(request)
        if sampling.structured_outputs is not None and grammar is None:
            raise InputError("structured_outputs", "needs its grammar compiled; `LLM.submit` does that")
        policy = self.policies.policy(sampling, len(request.prompt))
        keeps = self.config.keep_turns if sampling.kv_keep_turns is None else sampling.kv_keep_turns
        max_tokens = self._max_tokens(request, policy)
        bad_ids = self._bad_words(sampling.bad_words)
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.eos_token_ids)
        output = RequestOutput(request.id, prompt_text, list(request.prompt), [])
        served = _Served(output, [])
        for i in range(sampling.n):
            child = request if sampling.n == 1 else replace(request, id=f"{request.id}#{i}")
            seed = self._seed(sampling.seed, i)
            matcher = grammar and grammar.copy()
            seq = Sequence(child, policy, self._arrivals, seed, stop_ids, bad_ids, max_tokens, matcher, keeps)
            self._arrivals += 1
            text = None
            if sampling.detokenize and self.tokenizer is not None:
                text = Detokenizer(self.tokenizer, sampling, request.prompt)
            shown = CompletionOutput(i, token_ids=seq.output, count_kv=partial(self._kv_usage, seq))
            choice = _Choice(seq, text, shown, text is not None or sampling.logprobs is not None)
            served.choices.append(choice)
            output.outputs.append(choice.output)
            self._owner[seq] = served, choice
            self.scheduler.add(seq)
        self._served[request.id] = served

    def abort(self, request_id: str) -> None:
        """Stop a request wherever it is; its pages, windows and references go back at once. Unknown ids are ignored."""
        served = self._served.pop(request_id, None)
        for choice in served.choices if served else ():
            self.scheduler.finish(choice.seq, FinishReason.ABORT)
            self._owner.pop(choice.seq, None)

    @property
    def has_work(self) -> bool:
        """There is something to compute, or a result to read."""
        return self.scheduler.has_work or bool(self._in_flight)

    # ---- one step

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns the requests that got tokens or finished, with everything they have so far.

        If it fails, rows of the steps in flight may be missing: every request is aborted, the cache of prefixes is
        emptied, the error is raised, and the engine goes on with whatever is added next.
        """
        try:
            return self._compute()
        except BaseException:
            for request_id in list(self._served):
                self.abort(request_id)
            self._in_flight.clear()
            self.scheduler.forget_steps()
            raise

    def _compute(self) -> list[RequestOutput]:
        plan = self.scheduler.plan()
        if plan is not None:
            self._in_flight.append(self.runner.launch(plan))
            if self.plan_ahead and len(self._in_flight) == 1:
                return []  # read after the next step is launched
        if not self._in_flight:
            return []
        result = self._in_flight.popleft().result()
        changed: dict[str, RequestOutput] = {}
        for seq in self.scheduler.update(result):
            served, choice = self._owner[seq]
            if choice.output.started is None:
                choice.output.started = seq.started
                if choice is served.choices[0]:
                    self._show_prompt(seq, served.output)
            if choice.says_more or seq.finish_reason is not None:
                self._refresh(choice)
                if seq.finished:
                    self._settle(served, choice)
            changed[served.output.request_id] = served.output
        return list(changed.values())

    def _settle(self, served: _Served, choice: _Choice) -> None:
        """A continuation has ended, and maybe the request with it."""
        seq, output = choice.seq, choice.output
        assert seq.finish_reason is not None
        output.finish_reason, output.stop_reason = seq.finish_reason.value, seq.stop_reason
        output.error = seq.error
        output.settle()
        del self._owner[seq]
        served.output.finished = all(choice.seq.finished for choice in served.choices)
        if served.output.finished:
            self._served.pop(served.output.request_id, None)  # a sibling that ended with it was first

    def _refresh(self, choice: _Choice) -> None:
        """Bring a continuation's text and log-probabilities up to date with its sequence; stop strings end it here."""
        seq, output = choice.seq, choice.output
        sampling = seq.request.sampling
        if choice.detokenizer:
            new = seq.output[choice.num_read :]
            choice.num_read += len(new)
            stopped = seq.finish_reason is FinishReason.STOP and new[-1] in seq.stop_ids  # not by a grammar's end
            hide = stopped and not sampling.include_stop_str_in_output
            choice.detokenizer.push(new[:-1] if hide else new)
            if choice.detokenizer.stopped is not None and seq.finish_reason is not FinishReason.ABORT:
                self.scheduler.finish(seq, FinishReason.STOP, choice.detokenizer.stopped)
                # the token that completed it may have been the last one allowed
                seq.finish_reason, seq.stop_reason = FinishReason.STOP, choice.detokenizer.stopped
            if seq.finished:
                choice.detokenizer.finish()
            output.text = choice.detokenizer.text
        if sampling.logprobs is not None:
            output.logprobs = output.logprobs or []
            fresh = seq.logprobs[len(output.logprobs) :]
            output.logprobs += fresh
            output.cumulative_logprob = sum((e.logprobs[0] for e in fresh), output.cumulative_logprob or 0.0)

    @staticmethod
    def _show_prompt(seq: Sequence, output: RequestOutput) -> None:
        """What there is to say of the prompt is known when the first token is."""
        output.num_cached_tokens = seq.num_cached or 0
        if seq.request.sampling.prompt_logprobs is not None:
            output.prompt_logprobs = [None, *seq.prompt_logprobs]

    def _kv_usage(self, seq: Sequence) -> KVUsage:
        kv = seq.state or seq.dropped
        if kv is None:
            return KVUsage(preemptions=seq.num_preemptions)
        size = self.manager.geometry.bytes_per_page
        return KVUsage(
            tokens=kv.num_tokens,
            rows_kept=float(kv.rows.mean()),
            rows_evicted=float(kv.evicted.mean()),
            compactions=int(kv.num_compactions),
            bytes=sum(b * n for b, n in zip(size, kv.held, strict=False)),
            peak_bytes=sum(b * n for b, n in zip(size, kv.peak_held, strict=False)),
            preemptions=seq.num_preemptions,
            resumed_tokens=kv.num_cached if kv.trunk is not None else 0,
        )

    # ---- what a request may ask for

    def _check_ids(self, request: Request) -> None:
        limit = f"must be in [0, {self.vocab_size})"
        if not request.prompt:
            raise InputError("prompt", "is empty: there must be at least one token")
        if not isinstance(request.priority, int):
            raise InputError("priority", f"got {request.priority!r}, must be an integer")
        try:
            request.cache_salt.encode()
        except (AttributeError, UnicodeEncodeError):
            raise InputError("cache_salt", f"got {request.cache_salt!r}, must be text that UTF-8 can hold") from None
        sampling = request.sampling
        for field, ids in (
            ("prompt", request.prompt),
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", tuple(sampling.logit_bias or ())),
            ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ):
            for token in ids:
                if not isinstance(token, int) or not 0 <= token < self.vocab_size:
                    raise InputError(field, f"token id {token!r} {limit}")
        if (sampling.stop or sampling.bad_words) and self.tokenizer is None:
            raise InputError("stop" if sampling.stop else "bad_words", "needs a tokenizer, and this model has none")

    def _max_tokens(self, request: Request, policy: FoldPolicy) -> int:
        """Tokens to generate: what was asked for, within the context and the pool."""
        length, limit = len(request.prompt), self.max_model_len
        if length >= limit and request.sampling.max_tokens != 0 or length > limit:
            raise InputError(
                "prompt", f"has {length} tokens; the context holds {limit}, one of them generated at least"
            )
        max_tokens = request.sampling.max_tokens
        room = limit - length
        if max_tokens is None:
            max_tokens = room
            if not policy.evicts:
                max_tokens = min(room, max(1, self._longest(policy, length) - length + 1))
        max_tokens = min(max_tokens, room)
        check_fits(self.manager.geometry, policy, length, length + max(max_tokens, 1) - 1)
        return max_tokens

    def _longest(self, policy: FoldPolicy, prompt_len: int) -> int:
        size = self.manager.geometry.page_size
        return fits_tokens(self.manager.pools, policy, size, prompt_len, self.max_model_len)

    def _bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Each word as it stands, and as it stands after a space: tokenisers spell the two differently."""
        spelled = []
        for word in words:
            assert self.tokenizer is not None
            for text in (word, " " + word.lstrip()):
                ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
                if ids and ids not in spelled:
                    spelled.append(ids)
        return tuple(spelled)

    def _seed(self, seed: int | None, index: int) -> int:
        """63 bits from the request's seed and the continuation's index, or from the engine's seed and the arrival."""
        parts = (self.config.model.seed, self._arrivals) if seed is None else ("user", seed, index)
        return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1
