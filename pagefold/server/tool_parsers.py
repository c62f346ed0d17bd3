"""Tool calls in a stream of text: JSON objects, between tags as Hermes and Qwen write them or bare as Llama 3 does."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagefold.server.reasoning import prefix_at_end

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass
class CallDelta:
    """More of one call. The first of a call has its id and name, the others only `arguments`, a piece of JSON."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None

    def as_openai(self) -> dict[str, Any]:
        function = (
            {"arguments": self.arguments} if self.name is None else {"name": self.name, "arguments": self.arguments}
        )
        start = {} if self.id is None else {"id": self.id, "type": "function"}
        return {"index": self.index, **start, "function": function}


class CallScanner:
    """Reads one ``{"name": ..., "arguments": {...}}``, a character at a time.

        name     when it is known
        called   name and the beginning of the arguments are there: what comes next cannot make it no call
        done     the object is closed
        wrong    it is no such object

    "parameters" is another word for "arguments". These are passed on as the model writes them, blanks at both ends
    dropped. Some models write the object into a string: that is unpacked.
    """

    ARGUMENTS = frozenset({"arguments", "parameters"})
    KEYS = ARGUMENTS | {"name", "type", "id"}

    def __init__(self):
        self.name: str | None = None
        self.called = self.done = self.wrong = False
        self.in_string = False
        self._chars: list[str] = []
        self._depth = 0
        self._escaped = False
        self._key: str | None = None
        self._start = 0  # of the key or value being read, at depth 1
        self._in_value = False
        self._arguments: str | None = None  # when they are complete

    @property
    def raw(self) -> str:
        return "".join(self._chars)

    @property
    def arguments(self) -> str:
        """JSON text that is certain so far."""
        if self._arguments is not None or not self._in_value or self._key not in self.ARGUMENTS:
            return self._arguments or ("{}" if self.done else "")
        value = self._since_start().strip()
        return "" if value.startswith('"') else value

    def step(self, char: str) -> None:
        self._chars.append(char)
        wrong = False
        if self.in_string:
            self._string(char)
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self._depth += 1
            if self._depth == 1:
                wrong = char == "["
                self._start = len(self._chars)
        elif char in "}]":
            self._depth -= 1
            if self._depth <= 0:
                self._end_value()
                self.done = True
                self.called |= self.name is not None and not self.wrong
                wrong = not self.called
        elif self._depth == 0:
            wrong = not char.isspace()
        elif self._depth == 1 and char == ":":
            self._key = _loads(self._since_start(but=1))
            wrong = self._key not in self.KEYS
            self._start, self._in_value = len(self._chars), True
        elif self._depth == 1 and char == ",":
            self._end_value()
        self.wrong |= wrong and not self.called
        has_arguments = self._arguments is not None or (self._in_value and self._key in self.ARGUMENTS)
        self.called |= self.name is not None and has_arguments and not self.wrong

    def _string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self.in_string = False

    def _since_start(self, but: int = 0) -> str:
        return "".join(self._chars[self._start : len(self._chars) - but])

    def _end_value(self) -> None:
        text = self._since_start(but=1).strip()
        if self._in_value and self._key == "name" and not self.called:
            name = _loads(text)
            self.wrong |= not isinstance(name, str)
            self.name = name if isinstance(name, str) else None
        elif self._in_value and self._key in self.ARGUMENTS and self._arguments is None:
            inner = _loads(text) if text.startswith('"') else text
            self._arguments = inner if isinstance(inner, str) else text
        self._start, self._in_value = len(self._chars), False


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


class ToolParser:
    """Splits a growing text into content and calls; however it is cut into pushes, the joined parts are the same."""

    def __init__(self):
        self.num_calls = 0
        self._scanner: CallScanner | None = None
        self._sent = -1  # characters of the open call's arguments that are out; -1: nothing of the call is

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """(new content, more of the calls)."""
        raise NotImplementedError

    def finish(self) -> tuple[str, list[CallDelta]]:
        """The text has ended: what was held back."""
        raise NotImplementedError

    def _more(self) -> list[CallDelta]:
        """What is new of the open call."""
        scanner = self._scanner
        assert scanner is not None
        if not scanner.called:
            return []
        arguments, first = scanner.arguments, self._sent < 0
        piece = arguments[max(self._sent, 0) :]
        self._sent = len(arguments)
        if first:
            return [CallDelta(self.num_calls, piece, f"call_{uuid.uuid4().hex[:24]}", scanner.name)]
        return [CallDelta(self.num_calls, piece)] if piece else []

    def _close(self) -> str:
        """End the open call; returns the text of one that was none."""
        scanner = self._scanner
        assert scanner is not None
        self._scanner, self._sent = None, -1
        self.num_calls += scanner.called
        return "" if scanner.called else scanner.raw


class TaggedCalls(ToolParser):
    """Hermes' and Qwen's form: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them.

    A call that is not such an object is content, marks included.
    """

    def __init__(self):
        super().__init__()
        self._held = ""

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        self._held += text
        content, calls, going = "", [], True
        while going:
            if self._scanner is None:
                more, going = self._outside()
                content += more
            else:
                more, deltas, going = self._inside()
                content += more
                calls += deltas
        return content, calls

    def _outside(self) -> tuple[str, bool]:
        before, mark, after = self._held.partition(OPEN)
        if mark:
            self._held, self._scanner = after, CallScanner()
            return before.rstrip(), True
        keep = prefix_at_end(before, OPEN)
        body = before[: len(before) - keep]
        body = body.rstrip()  # blanks before a call are no content
        self._held = before[len(body) :]
        return body, False

    def _inside(self) -> tuple[str, list[CallDelta], bool]:
        scanner = self._scanner
        assert scanner is not None
        at = 0
        while at < len(self._held) and not scanner.done:
            rest = self._held[at:]
            if not scanner.in_string and rest[0] == "<":
                if rest.startswith(CLOSE):
                    break
                if CLOSE.startswith(rest):  # the mark may go on in the next push
                    self._held = rest
                    return "", self._more(), False
            scanner.step(rest[0])
            at += 1
        self._held = self._held[at:]
        deltas, called = self._more(), scanner.called
        rest = self._held.lstrip() if scanner.done else self._held
        closed = rest.startswith(CLOSE)
        if not closed and (not scanner.done or CLOSE.startswith(rest.rstrip())):
            return "", deltas, False
        raw = self._close()
        self._held = rest[len(CLOSE) :] if closed else self._held
        return "" if called else OPEN + raw + (CLOSE if closed else ""), deltas, True

    def finish(self) -> tuple[str, list[CallDelta]]:
        held, self._held = self._held, ""
        if self._scanner is None:
            return ("" if self.num_calls and held.isspace() else held), []
        called = self._scanner.called
        return ("" if called else OPEN + self._close() + held), []


class BareCalls(ToolParser):
    """Calls that begin the text: JSON objects with characters of `blanks` between them, as Llama 3 writes them.

    names   of the tools: an object that calls another one is an ordinary answer
    tag     may come first

    What follows the first thing that is no call is content.
    """

    def __init__(self, blanks: str, names: Sequence[str], tag: str = ""):
        super().__init__()
        self._blanks, self._names, self._tag = blanks, frozenset(names), tag
        self._held = ""
        self._plain = False

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        if self._plain:
            return text, []
        self._held += text
        calls: list[CallDelta] = []
        while self._held and not self._plain:
            if self._scanner is None:
                if not self._begin():
                    break
            else:
                calls += self._scan()
        if not self._plain:
            return "", calls
        content, self._held = self._held, ""
        return content, calls

    def _begin(self) -> bool:
        """Go to the next object; False if there is nothing to go on with yet."""
        rest = self._held.lstrip(self._blanks)
        if self._tag and self._tag.startswith(rest[: len(self._tag)]) and self.num_calls == 0:
            if len(rest) < len(self._tag):
                return False
            rest = rest[len(self._tag) :].lstrip(self._blanks)
        if not rest:
            return False
        if rest[0] == "{":
            self._held, self._scanner = rest, CallScanner()
        else:
            self._plain = True
        return True

    def _scan(self) -> list[CallDelta]:
        scanner = self._scanner
        assert scanner is not None
        at = 0
        while at < len(self._held) and not (scanner.done or scanner.wrong):
            scanner.step(self._held[at])
            at += 1
        self._held = self._held[at:]
        if scanner.wrong or (scanner.called and scanner.name not in self._names):
            self._plain, self._scanner = True, None
            self._held = scanner.raw + self._held
            return []
        calls = self._more()
        if scanner.done:
            self._close()
        return calls

    def finish(self) -> tuple[str, list[CallDelta]]:
        held, self._held = self._held, ""
        if self._scanner is not None:
            return self._close() + held, []
        return ("" if self.num_calls else held), []
