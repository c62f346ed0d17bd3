"""The forms in which models write tool calls, and the grammar that makes a model write one."""

import json
from collections.abc import Sequence
from typing import Any

from pagefold.server.deepseek_calls import CALLS_OPEN, FENCE, MarkedCalls
from pagefold.server.messages import Grammar
from pagefold.server.tool_parsers import OPEN, BareCalls, TaggedCalls, ToolParser

PYTHON_TAG = "<|python_tag|>"
# JSON as models have seen it in calls, for llguidance: no blanks but those that `json.dumps` writes
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def choose_parser(name: str | None, template: str | None) -> str | None:
    """The form of tool calls: the one that was asked for, or else the one that the chat template shows, if any."""
    if name is not None:
        return name
    template = template or ""
    if CALLS_OPEN in template:
        return "deepseek_v3" if FENCE in template else "deepseek_v31"
    if OPEN in template:
        return "hermes"
    return "llama3_json" if '{"name": function name, "parameters"' in template else None


def make_parser(form: str, names: Sequence[str]) -> ToolParser:
    """`form` is one of `settings.TOOL_PARSERS`, or "list": what `call_grammar` makes a model write."""
    if form == "hermes":
        return TaggedCalls()
    if form in ("deepseek_v3", "deepseek_v31"):
        return MarkedCalls(fenced=form == "deepseek_v3")
    if form == "llama3_json":
        return BareCalls(" \t\r\n;,", names, PYTHON_TAG)
    return BareCalls(" \t\r\n[,]", names)


def call_grammar(tools: Sequence[dict[str, Any]], only_one: bool) -> Grammar:
    """A JSON list of calls of `tools` (their "function" objects), at least one, in llguidance's Lark.

    A grammar rather than one schema of the list, so that each tool's schema is a document of its own, which references
    inside it count on.
    """
    lines = ['start: "[" call "]"' if only_one else 'start: "[" call (", " call)* "]"']
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        parameters = tool.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
        start = json.dumps(f'{{"name": {json.dumps(tool["name"])}, "arguments": ')
        lines.append(f'call_{i}: {start} arguments_{i} "}}"')
        lines.append(f"arguments_{i}: %json {json.dumps(parameters | {'x-guidance': SPACING})}")
    return Grammar("grammar", "\n".join(lines))
