"""/v1/chat/completions: a conversation through the model's template, with tools and reasoning."""

import json
from collections.abc import Sequence
from typing import Any

from pagefold.core.types import InputError
from pagefold.models.tokenizer import Tokenizer
from pagefold.server.deepseek_calls import CALLS_OPEN
from pagefold.server.generation import Front, Job, grammar_of
from pagefold.server.messages import Delta, Grammar
from pagefold.server.protocol import ChatBody, Message, NamedTool, TemplateBody, Tool
from pagefold.server.reasoning import CLOSE, OPEN, ReasoningSplitter, ends_thinking
from pagefold.server.tokens import chat_logprobs, prompt_logprobs
from pagefold.server.tool_parsers import CallDelta, ToolParser
from pagefold.server.tools import call_grammar, choose_parser, make_parser

TAIL_TOKENS = 16  # of a prompt, enough to see whether it ends with `<think>`
TEMPLATE_OWN = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "unk_token"})


async def chat_job(front: Front, body: ChatBody) -> Job:
    """Raises InputError or ApiError for what cannot be served. Of two limits, `max_completion_tokens` wins."""
    front.check_model(body.model)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    sampling = front.sampling(body, max_tokens, _num_logprobs(body))
    form, calls, tools = _tool_choice(front, body)
    asked = ("tools", calls) if calls else grammar_of(body)
    prompt = await render(front, body.messages, body, tools)
    front.check_prompts([prompt], "messages", max_tokens)
    # under a grammar the model cannot think: all it writes is the answer
    enabled = asked is None and reasoning_enabled(front)
    thinking = enabled and _starts_thinking(front, prompt)
    names = [tool.function.name for tool in tools or ()]
    choices = []
    for index in range(body.n):
        parser = make_parser(form, names) if form else None
        splitter = ReasoningSplitter(thinking, enabled)
        choices.append(ChatChoice(index, front.tokenizer, splitter, parser, body))
    objects = ("chat.completion", "chat.completion.chunk")
    return Job("chatcmpl", body, [prompt], sampling, asked, choices, objects)


def _num_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise InputError("top_logprobs", "needs logprobs: true")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= 128:
        raise InputError("top_logprobs", f"got {body.top_logprobs}, must be an integer in [0, 128]")
    return (body.top_logprobs or 0) if body.logprobs else None


# ---- the prompt


async def render(
    front: Front, messages: Sequence[Message], options: TemplateBody, tools: Sequence[Tool] | None
) -> list[int]:
    """Token ids of a conversation. Only the template makes control tokens, never what a message says."""
    tokenizer = front.need_tokenizer("messages")
    variables = dict(options.chat_template_kwargs)
    if taken := sorted(TEMPLATE_OWN & variables.keys()):
        raise InputError("chat_template_kwargs", f"{taken[0]!r} is not free to be set")
    if options.reasoning_effort is not None:
        if "reasoning_effort" not in (tokenizer.chat_template or ""):
            raise InputError("reasoning_effort", "this model's chat template has no such choice")
        variables["reasoning_effort"] = options.reasoning_effort
    deepseek = CALLS_OPEN in (tokenizer.chat_template or "")
    turns = [_for_template(message, i, deepseek) for i, message in enumerate(messages)]
    shown = [tool.model_dump(exclude_none=True) for tool in tools] if tools else None
    size = sum(len(message.content or "") for message in messages)
    return await front.in_thread(
        size,
        lambda: tokenizer.apply_chat_template(
            turns, tools=shown, add_generation_prompt=options.add_generation_prompt, **variables
        ),
    )


def _for_template(message: Message, index: int, deepseek: bool) -> dict[str, Any]:
    """Templates want arguments as objects, reasoning under one name, and no role that is younger than they are.

    deepseek   theirs want arguments as JSON text, and calls without content to have none
    """
    turn = message.model_dump(exclude_none=True)
    turn.setdefault("content", None if deepseek and message.tool_calls else "")
    if message.role == "developer":
        turn["role"] = "system"
    if reasoning := turn.pop("reasoning", None):
        turn.setdefault("reasoning_content", reasoning)
    for k, call in enumerate(turn.get("tool_calls", ())):
        arguments = call["function"].get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            field = f"messages[{index}].tool_calls[{k}].function.arguments"
            raise InputError(field, "is not JSON") from None
        call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False) if deepseek else arguments
    return turn


# ---- reasoning and tools


def reasoning_enabled(front: Front) -> bool:
    asked = front.settings.reasoning_parser
    if asked is None:
        return OPEN in ((front.tokenizer and front.tokenizer.chat_template) or "")
    return asked != "none"


def _starts_thinking(front: Front, prompt: Sequence[int]) -> bool:
    assert front.tokenizer is not None
    tail = front.tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False)
    if front.settings.reasoning_parser == "deepseek_r1":  # the first of these begin to think without saying so
        return not tail.rstrip().endswith(CLOSE)
    return ends_thinking(tail)


def _tool_choice(front: Front, body: ChatBody) -> tuple[str | None, Grammar | None, list[Tool] | None]:
    """(form in which calls come, grammar that makes them, tools to show to the model)."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none"):
            raise InputError("tool_choice", "needs tools")
        return None, None, None
    if choice == "none":
        return None, None, None
    if choice in (None, "auto"):
        return _automatic(front, body), None, body.tools
    wanted = body.tools
    if isinstance(choice, NamedTool):
        name = choice.function.name
        wanted = [tool for tool in body.tools if tool.function.name == name]
        if not wanted:
            raise InputError("tool_choice", f"names {name!r}, which is none of the tools")
    if (other := grammar_of(body)) is not None:
        raise InputError("tool_choice", f"makes the answer a call, and {other[0]} makes it something else")
    only_one = isinstance(choice, NamedTool) or not body.parallel_tool_calls
    functions = [tool.function.model_dump(exclude_none=True) for tool in wanted]
    return "list", call_grammar(functions, only_one), body.tools


def _automatic(front: Front, body: ChatBody) -> str:
    if not front.settings.enable_auto_tool_choice:
        raise InputError("tool_choice", "'auto' needs the server's option --enable-auto-tool-choice")
    if grammar_of(body) is not None:
        raise InputError(
            "tools", "cannot be called by an answer that is made to look otherwise; use tool_choice 'none'"
        )
    template = front.tokenizer.chat_template if front.tokenizer else None
    form = choose_parser(front.settings.tool_call_parser, template)
    if form is None:
        message = "'auto' needs a form of calls, and the chat template shows none; see the server's --tool-call-parser"
        raise InputError("tool_choice", message)
    return form


class ChatChoice:
    """A continuation as a message: reasoning, content and tool calls apart, the same streamed and whole."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer | None,
        splitter: ReasoningSplitter,
        parser: ToolParser | None,
        body: ChatBody,
    ):
        self._index, self._tokenizer, self._body = index, tokenizer, body
        self._splitter, self._parser = splitter, parser
        self._started = False
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._logprobs: list[dict[str, Any]] = []
        self._prompt_logprobs: list[Any] | None = None
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    def push(self, delta: Delta) -> dict[str, Any] | None:
        reasoning, content, calls = self._split(delta.text, delta.finish_reason is not None)
        shown: dict[str, Any] = {}
        if reasoning:
            self._reasoning.append(reasoning)
            shown["reasoning_content"] = reasoning
        if content:
            self._content.append(content)
            shown["content"] = content
        if calls:
            shown["tool_calls"] = self._take(calls)
        logprobs = None
        if self._body.logprobs and delta.logprobs:
            logprobs = {"content": chat_logprobs(self._tokenizer, delta.logprobs), "refusal": None}
            self._logprobs += logprobs["content"]
        if delta.prompt_logprobs is not None and self._body.prompt_logprobs is not None:
            most = self._body.prompt_logprobs
            self._prompt_logprobs = prompt_logprobs(self._tokenizer, delta.prompt_logprobs, most)
        if delta.finish_reason is not None:
            calls_end = self._calls and delta.finish_reason == "stop"
            self._finish_reason = "tool_calls" if calls_end else delta.finish_reason
            self._stop_reason = delta.stop_reason
        elif not shown and logprobs is None:
            return None
        if not self._started:
            self._started = True
            shown = {"role": "assistant"} | ({} if shown else {"content": ""}) | shown
        chunk = {"index": self._index, "delta": shown, "logprobs": logprobs, "finish_reason": self._finish_reason}
        return chunk if self._stop_reason is None else chunk | {"stop_reason": self._stop_reason}

    def whole(self) -> dict[str, Any]:
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": None if self._calls and not content else content}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in self._calls.values()]
        choice = {
            "index": self._index,
            "message": message,
            "logprobs": {"content": self._logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": self._finish_reason,
        }
        if self._stop_reason is not None:
            choice["stop_reason"] = self._stop_reason
        return choice if self._prompt_logprobs is None else choice | {"prompt_logprobs": self._prompt_logprobs}

    def _split(self, text: str, ended: bool) -> tuple[str, str, list[CallDelta]]:
        reasoning, content = self._splitter.push(text)
        if ended:
            more_reasoning, more_content = self._splitter.finish()
            reasoning, content = reasoning + more_reasoning, content + more_content
        calls: list[CallDelta] = []
        if self._parser is not None:
            content, calls = self._parser.push(content)
            if ended:
                more_content, more_calls = self._parser.finish()
                content, calls = content + more_content, calls + more_calls
        if not self._body.parallel_tool_calls:
            calls = [call for call in calls if call.index == 0]
        return reasoning, content, calls

    def _take(self, calls: Sequence[CallDelta]) -> list[dict[str, Any]]:
        """What is new, one item per call; kept for the whole message too."""
        new: dict[int, CallDelta] = {}
        for call in calls:
            if call.index in new:
                new[call.index].arguments += call.arguments
            else:
                new[call.index] = call
        for index, call in new.items():
            if index in self._calls:
                self._calls[index]["function"]["arguments"] += call.arguments
            else:
                self._calls[index] = call.as_openai()
        return [call.as_openai() for call in new.values()]
