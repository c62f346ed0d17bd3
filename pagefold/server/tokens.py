"""Tokens and their log-probabilities, as OpenAI's API shows them.

A token is shown as the text of its bytes. Those that are no whole character become U+FFFD; chats give them too.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from pagefold.models.tokenizer import Tokenizer
from pagefold.server.messages import Logprobs

LOWEST = -9999.0  # for a token that cannot come: JSON knows no infinity


def token_text(tokenizer: Tokenizer | None, id: int) -> str:
    return f"token_id:{id}" if tokenizer is None else tokenizer.token_bytes(id).decode("utf-8", "replace")


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


def chat_logprobs(tokenizer: Tokenizer | None, entries: Iterable[Logprobs]) -> list[dict[str, Any]]:
    """The `content` of a chat's logprobs, one item per token."""

    def show(id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(id) if tokenizer else b""
        return {"token": token_text(tokenizer, id), "logprob": finite(logprob), "bytes": list(data)}

    return [
        show(entry.ids[0], entry.logprobs[0]) | {"top_logprobs": [*map(show, entry.ids[1:], entry.logprobs[1:])]}
        for entry in entries
    ]


class TextLogprobs:
    """The logprobs object of a completion; offsets count the characters of the text before, from piece to piece."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._unseen = tokenizer.special_ids if tokenizer else frozenset()
        self._offset = 0

    def show(self, ids: Sequence[int], entries: Sequence[Logprobs | None]) -> dict[str, list[Any]]:
        """`entries` are those of `ids`; None for the first token of a prompt, which nothing predicts."""
        tokens = [token_text(self._tokenizer, id) for id in ids]
        offsets = []
        for id, token in zip(ids, tokens, strict=True):
            offsets.append(self._offset)
            self._offset += len(token) if id not in self._unseen else 0
        return {
            "tokens": tokens,
            "token_logprobs": [entry and finite(entry.logprobs[0]) for entry in entries],
            "top_logprobs": [entry and self._best(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _best(self, entry: Logprobs) -> dict[str, float]:
        """The alternatives and the chosen token; of two that look alike, the likelier."""
        best: dict[str, float] = {}
        for id, logprob in zip([*entry.ids[1:], entry.ids[0]], [*entry.logprobs[1:], entry.logprobs[0]], strict=True):
            best.setdefault(token_text(self._tokenizer, id), finite(logprob))
        return best


def join_logprobs(pieces: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]] | None:
    """Objects of one shape, made of lists, one after the other."""
    if not pieces:
        return None
    return {name: [item for piece in pieces for item in piece[name]] for name in pieces[0]}


def prompt_logprobs(
    tokenizer: Tokenizer | None, entries: Sequence[Logprobs | None], most: int
) -> list[dict[str, dict[str, Any]] | None]:
    """Per token of the prompt {id: {logprob, rank, decoded_token}} of the token and the `most` likeliest, as vLLM's."""
    return [
        entry
        and {
            str(id): {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(tokenizer, id)}
            for id, logprob, rank in list(zip(entry.ids, entry.logprobs, entry.ranks, strict=True))[: 1 + most]
        }
        for entry in entries
    ]
