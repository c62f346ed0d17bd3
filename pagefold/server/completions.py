"""/v1/completions: text or token ids are continued as they are."""

from collections.abc import Sequence
from typing import Any

from pagefold.core.types import InputError
from pagefold.models.tokenizer import Tokenizer
from pagefold.server.generation import Front, Job, grammar_of
from pagefold.server.messages import Delta, Logprobs
from pagefold.server.protocol import CompletionBody
from pagefold.server.tokens import TextLogprobs, join_logprobs, prompt_logprobs

DEFAULT_MAX_TOKENS = 16  # as OpenAI's


async def completion_job(front: Front, body: CompletionBody) -> Job:
    """Raises InputError or ApiError for what cannot be served."""
    front.check_model(body.model)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = front.sampling(body, max_tokens, body.logprobs)
    if body.echo and body.logprobs is not None:
        sampling["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    prompts = await _prompts(front, body)
    front.check_prompts(prompts, "prompt", max_tokens)
    choices = []
    for i, prompt in enumerate(prompts):
        shared = _Prompt(prompt)
        choices += [CompletionChoice(i * body.n + k, front.tokenizer, shared, body) for k in range(body.n)]
    return Job("cmpl", body, prompts, sampling, grammar_of(body), choices, ("text_completion", "text_completion"))


async def _prompts(front: Front, body: CompletionBody) -> list[list[int]]:
    """Token ids of each prompt; control tokens spelt out in a text are control tokens."""
    given: Any = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise InputError("prompt", "is empty: there must be at least one token")
    front.check_count(len(given), body.n)
    if isinstance(given[0], list):
        return given
    tokenizer = front.need_tokenizer("prompt")
    size = sum(map(len, given))
    return await front.in_thread(size, lambda: [tokenizer.encode(text, body.add_special_tokens) for text in given])


class _Prompt:
    """What continuations of one prompt share; its log-probabilities come with the first of them."""

    def __init__(self, ids: Sequence[int]):
        self.ids = ids
        self.logprobs: list[Logprobs | None] | None = None


class CompletionChoice:
    """A continuation as text. With `echo` the prompt's text comes first, and its log-probabilities.

    With `return_token_ids` its choice has `token_ids`, in a chunk what is new of them, and first the prompt's.
    """

    def __init__(self, index: int, tokenizer: Tokenizer | None, prompt: _Prompt, body: CompletionBody):
        self._index, self._tokenizer, self._prompt, self._body = index, tokenizer, prompt, body
        self._echoed = not body.echo
        self._text_logprobs = TextLogprobs(tokenizer)
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[dict[str, list[Any]]] = []
        self._last: Delta | None = None

    def push(self, delta: Delta) -> dict[str, Any] | None:
        self._last = delta
        if delta.prompt_logprobs is not None:
            self._prompt.logprobs = delta.prompt_logprobs
        text, ids = delta.text, delta.token_ids
        entries: list[Logprobs | None] = [*(delta.logprobs or ())]
        if not self._echoed:
            self._echoed = True
            text = self._shown_prompt() + text
            ids = [*self._prompt.ids, *ids]
            entries = [*self._cut(self._prompt.logprobs or [None] * len(self._prompt.ids)), *entries]
        logprobs = None
        if self._body.logprobs is not None and entries:
            logprobs = self._text_logprobs.show(ids, entries)
            self._logprobs.append(logprobs)
        begins = not self._ids
        self._texts.append(text)
        self._ids += delta.token_ids
        with_ids = self._body.return_token_ids and bool(delta.token_ids)
        if not (text or with_ids) and logprobs is None and delta.finish_reason is None:
            return None
        choice = self._choice(delta, text, logprobs)
        return self._with_ids(choice, delta.token_ids, begins) if self._body.return_token_ids else choice

    def whole(self) -> dict[str, Any]:
        assert self._last is not None
        choice = self._choice(self._last, "".join(self._texts), join_logprobs(self._logprobs))
        if self._body.prompt_logprobs is not None and self._prompt.logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, self._prompt.logprobs, self._body.prompt_logprobs
            )
        return self._with_ids(choice, self._ids, True) if self._body.return_token_ids else choice

    def _with_ids(self, choice: dict[str, Any], ids: Sequence[int], begins: bool) -> dict[str, Any]:
        return choice | {"token_ids": ids} | ({"prompt_token_ids": self._prompt.ids} if begins else {})

    def _choice(self, delta: Delta, text: str, logprobs: dict[str, list[Any]] | None) -> dict[str, Any]:
        choice = {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        return choice if delta.stop_reason is None else choice | {"stop_reason": delta.stop_reason}

    def _shown_prompt(self) -> str:
        if isinstance(self._body.prompt, str):
            return self._body.prompt
        return self._tokenizer.decode(self._prompt.ids) if self._tokenizer else ""

    def _cut(self, entries: Sequence[Logprobs | None]) -> list[Logprobs | None]:
        """As many alternatives as were asked for; there are more if `prompt_logprobs` asks for more."""
        most = 1 + (self._body.logprobs or 0)
        return [e and Logprobs(e.ids[:most], e.logprobs[:most], e.ranks[:most]) for e in entries]
