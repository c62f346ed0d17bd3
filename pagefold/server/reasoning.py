"""What a model thinks, apart from what it answers: `<think>...</think>` in a stream of text."""

OPEN, CLOSE = "<think>", "</think>"


def prefix_at_end(text: str, mark: str) -> int:
    """Length of the longest proper beginning of `mark` that `text` ends with."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def ends_thinking(text: str) -> bool:
    """Whether a prompt ends with an open `<think>`, as templates of models that always think write it."""
    return text.rstrip().endswith(OPEN)


class ReasoningSplitter:
    """Cuts a growing text in two. However it is cut into pushes, the joined parts are the same.

        <think> blanks reasoning blanks </think> blanks content
        [skip ][ skip ]         [     skip            ]

    thinking   the prompt already holds `<think>`
    enabled    False: everything is content

    A mark counts as the opening one only at the start of the text, and `</think>` only while thinking. An answer cut
    off while thinking is all reasoning.
    """

    def __init__(self, thinking: bool = False, enabled: bool = True):
        self._state = "content" if not enabled else "reasoning" if thinking else "start"
        self._held = ""
        self._blank = enabled and thinking  # drop blanks that come next

    def push(self, text: str) -> tuple[str, str]:
        """(new reasoning, new content)."""
        self._held += text
        reasoning = content = ""
        if self._state == "start":
            stripped = self._held.lstrip()
            if stripped.startswith(OPEN):
                self._state, self._blank, self._held = "reasoning", True, stripped[len(OPEN) :]
            elif OPEN.startswith(stripped):
                return "", ""
            else:
                self._state = "content"
        if self._state == "reasoning":
            self._strip()
            before, close, after = self._held.partition(CLOSE)
            if close:
                reasoning, self._held = before.rstrip(), after
                self._state, self._blank = "content", True
            else:
                keep = prefix_at_end(before, CLOSE)
                body = before[: len(before) - keep].rstrip()
                reasoning, self._held = body, before[len(body) :]
        if self._state == "content":
            self._strip()
            content, self._held = self._held, ""
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """The text has ended: what was held back."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._state == "reasoning" else ("", held)

    def _strip(self) -> None:
        if self._blank:
            self._held = self._held.lstrip()
            self._blank = not self._held
