"""From token ids to text while they come, with stop strings.

The text of a request is its tokens' bytes read as UTF-8, each invalid sequence as one U+FFFD, and it is the same
however the ids are grouped into pushes. Bytes of an unfinished character wait for the rest of it; when the output ends
inside a character, one U+FFFD stands for what there was. This equals `decode` of all the ids, except that decoders with
byte fallback (sentencepiece) put one U+FFFD per byte, for valid bytes next to invalid ones too, which would take back
characters already shown.

    bytes of the ids:     released text | held: may become a stop string | bytes of an unfinished character
                          never changes   decided by the next characters   in the UTF-8 decoder
"""

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from pagefold.core.types import SamplingParams


class TokenText(Protocol):
    """What is needed of a tokenizer.

    token_bytes   what an id adds in the middle of a text: part of a character, or a special token's spelling
    special_ids   left out of the text if `skip_special_tokens`
    """

    @property
    def special_ids(self) -> frozenset[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, id: int) -> bytes: ...


class Detokenizer:
    """The text of one request. No ids make it raise: those that the tokenizer does not know add nothing.

    Stop strings are looked for in the text as it is shown, whichever tokens it comes from, and also in the spelling of
    special tokens that are not shown. The one that is complete first wins, of two that end together the longer one.
    The text ends before it, or after it if `include_stop_str_in_output`.

        stopped   the stop string that was met; ids pushed after that are ignored

    Costs O(new characters) a push, for each stop string.
    """

    def __init__(self, tokenizer: TokenText, params: SamplingParams, prompt_ids: Sequence[int]):
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._params = params
        self._stops = [_StopString(text) for text in params.stop]
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._pieces: list[str] = []  # released text
        self._held: deque[str] = deque()  # what each held character will show: itself, or "" if it is not shown
        # sentencepiece drops a space that begins a text, and a text begins here if the prompt shows none
        self._num_ids = 0
        self._begins = all(id in tokenizer.special_ids for id in prompt_ids)

    @property
    def text(self) -> str:
        """All text released so far."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; returns the new text that is certain by now."""
        if not self._params.detokenize:
            return ""
        return self._release("".join(map(self._add, ids)))

    def finish(self) -> str:
        """The output has ended; returns the rest of the text."""
        rest = self._read(b"", final=True)
        if self.stopped is None:
            rest += "".join(self._held)
            self._held.clear()
        return self._release(rest)

    def _release(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text

    def _add(self, id: int) -> str:
        """The text that becomes certain by one more id."""
        if self.stopped is not None:
            return ""
        self._num_ids += 1
        data = self._bytes(id)
        if self._params.skip_special_tokens and id in self._tokenizer.special_ids:
            spelling = data.decode("utf-8", "replace")
            watched = self._watching and any(spelling in s.text for s in self._stops)
            return self._match(spelling, shown=False) if watched else ""
        if data and self._begins:
            self._begins = False
            if data.startswith(b" ") and self._tokenizer.decode([id]) == data[1:].decode("utf-8", "replace"):
                data = data[1:]
        return self._read(data)

    def _bytes(self, id: int) -> bytes:
        try:
            return self._tokenizer.token_bytes(id) if id >= 0 else b""
        except Exception:  # an id out of range must not end other requests, whatever the tokenizer makes of it
            return b""

    def _read(self, data: bytes, final: bool = False) -> str:
        text = self._utf8.decode(data, final)
        return self._match(text, shown=True) if self._watching else text

    @property
    def _watching(self) -> bool:
        """Stop strings count from the first text after `min_tokens` tokens."""
        return bool(self._stops) and self._num_ids > self._params.min_tokens

    def _match(self, text: str, shown: bool) -> str:
        """Run characters past the stop strings; returns the shown ones that can be part of none."""
        released: list[str] = []
        for char in text:
            if self.stopped is not None:
                break
            self._held.append(char if shown else "")
            met = [stop.text for stop in self._stops if stop.step(char)]
            self.stopped = max(met, key=len, default=None)
            undecided = len(self.stopped) if self.stopped else max(stop.matched for stop in self._stops)
            released += [self._held.popleft() for _ in range(len(self._held) - undecided)]
            if self.stopped:
                released += [self.stopped] if self._params.include_stop_str_in_output else []
                self._held.clear()
        return "".join(released)


class _StopString:
    """Finds `text` in a stream of characters (Knuth, Morris and Pratt 1977).

    matched   length of the longest beginning of `text` that the characters so far end with
    """

    def __init__(self, text: str):
        self.text = text
        self.matched = 0
        self._borders = [0]  # [n]: longest proper beginning of text[: n + 1] that it also ends with
        for char in text[1:]:
            self._borders.append(self._extend(self._borders[-1], char))

    def _extend(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._borders[matched - 1]
        return matched + (self.text[matched] == char)

    def step(self, char: str) -> bool:
        """Take one character; whether it completes `text`. Not to be called again after that."""
        self.matched = self._extend(self.matched, char)
        return self.matched == len(self.text)
