"""Tool calls as DeepSeek's models write them: between marks, the arguments in a fence (V3, R1) or bare (V3.1)."""

import re
import uuid

from pagefold.server.reasoning import prefix_at_end
from pagefold.server.tool_parsers import CallDelta, ToolParser

CALLS_OPEN, CALLS_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, MIDDLE, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```json"

_FENCED_HEAD = re.compile(rf"\s*function{re.escape(MIDDLE)}\s*([^\n]*?\S)\s*{FENCE}")
_BARE_HEAD = re.compile(rf"\s*([^\n]*?\S)\s*{re.escape(MIDDLE)}")
_FENCE_END = re.compile(r"\s*`{0,3}\s*$")  # or what may become it


class MarkedCalls(ToolParser):
    """Any number of calls in one section, which comes after the content:

        V3, R1  <calls begin> <call begin>function<sep>NAME \\n```json\\n ARGUMENTS \\n``` <call end> ... <calls end>
        V3.1    <calls begin> <call begin>NAME<sep> ARGUMENTS <call end> ... <calls end>

    fenced   whether the first of the two is meant

    A section that holds no call is content, marks included. Arguments are passed on as the model writes them, and it
    is the name that makes a call: an answer cut off behind it is an unfinished call.
    """

    def __init__(self, fenced: bool):
        super().__init__()
        self._head = _FENCED_HEAD if fenced else _BARE_HEAD
        self._held = ""
        self._read = self._content  # what comes next

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        self._held += text
        content, calls, going = "", [], True
        while going:
            more, deltas, going = self._read()
            content += more
            calls += deltas
        return content, calls

    def finish(self) -> tuple[str, list[CallDelta]]:
        held, self._held = self._held, ""
        if self._read == self._arguments or (self.num_calls and held.isspace()):
            return "", []
        start = CALLS_OPEN if self._read == self._section and not self.num_calls else ""
        return start + held, []

    # ---- states: (new content, more of the calls, whether there is more to read)

    def _content(self) -> tuple[str, list[CallDelta], bool]:
        before, mark, after = self._held.partition(CALLS_OPEN)
        if mark:
            self._held, self._read = after, self._section
            return before.rstrip(), [], True
        body = before[: len(before) - prefix_at_end(before, CALLS_OPEN)].rstrip()  # blanks before a call are no content
        self._held = before[len(body) :]
        return body, [], False

    def _section(self) -> tuple[str, list[CallDelta], bool]:
        rest = self._held.lstrip()
        if rest.startswith(OPEN):
            return self._begin(rest[len(OPEN) :])
        if rest.startswith(CALLS_CLOSE) and self.num_calls:
            self._held, self._read = rest[len(CALLS_CLOSE) :], self._content
            return "", [], True
        if OPEN.startswith(rest) or (CALLS_CLOSE.startswith(rest) and self.num_calls):
            return "", [], False
        return self._no_call()

    def _begin(self, rest: str) -> tuple[str, list[CallDelta], bool]:
        before, mark, _ = rest.partition(CLOSE)
        if head := self._head.match(before):
            self._held, self._read, self._sent = rest[head.end() :], self._arguments, 0
            return "", [CallDelta(self.num_calls, "", f"call_{uuid.uuid4().hex[:24]}", head[1])], True
        return self._no_call() if mark else ("", [], False)

    def _no_call(self) -> tuple[str, list[CallDelta], bool]:
        self._read = self._content
        return "" if self.num_calls else CALLS_OPEN, [], True

    def _arguments(self) -> tuple[str, list[CallDelta], bool]:
        before, mark, after = self._held.partition(CLOSE)
        sure = before if mark else before[: len(before) - prefix_at_end(before, CLOSE)]
        sure = (_FENCE_END.sub("", sure) if self._head is _FENCED_HEAD else sure.rstrip()).lstrip()
        piece, self._sent = sure[self._sent :], len(sure)
        if mark:
            self._held, self._read = after, self._section
            piece = piece if sure else "{}"
        deltas = [CallDelta(self.num_calls, piece)] if piece else []
        self.num_calls += bool(mark)
        return "", deltas, bool(mark)
