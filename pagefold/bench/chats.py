"""What is said in chats of many turns: random token ids of given lengths, or the conversations of a file."""

from pathlib import Path
from random import Random
from typing import Any

from pagefold.bench.turns import Chats
from pagefold.bench.workloads import LARGEST_ID, Span, drawn, read_requests
from pagefold.core.types import InputError
from pagefold.models.tokenizer import Tokenizer


def random_chats(
    sessions: int = 48,
    turns: int = 4,
    first_len: Span = (12288, 20480),
    next_len: Span = (512, 2048),
    output_len: int = 256,
    largest_id: int = LARGEST_ID,
    seed: int = 3,
) -> Chats:
    """Random token ids, always the same for a seed. By default a long first turn and short ones after it, far more
    history than a small pool holds (after Tangram, arXiv 2606.06302): 113 GB of it in Qwen3-4B with bf16 rows.

    first_len, next_len   tokens of the first and of later turns; a pair is drawn from
    """
    for name, value in (("sessions", sessions), ("turns", turns), ("output_len", output_len)):
        if value < 1:
            raise InputError(name, f"got {value}, must be an integer >= 1")
    random = Random(seed)
    length = lambda span: drawn(random, span)  # noqa: E731
    lengths = [[length(first_len if turn == 0 else next_len) for _ in range(sessions)] for turn in range(turns)]
    rounds = [[[random.randint(0, largest_id) for _ in range(n)] for n in row] for row in lengths]
    return Chats([list(chat) for chat in zip(*rounds, strict=True)], output_len)


def parse_span(name: str, text: str) -> Span:
    """ "512" or "512:2048"; raises InputError naming the option."""
    try:
        ends = [int(part) for part in text.split(":")]
    except ValueError:
        ends = []
    if not (1 <= len(ends) <= 2 and 1 <= ends[0] <= ends[-1]):
        raise InputError(name, f"got {text!r}, must be a number of tokens, or two as in 512:2048")
    return ends[0] if len(ends) == 1 else (ends[0], ends[1])


def read_chats(path: str | Path, tokenizer: Tokenizer | None, output_len: int) -> Chats:
    """Conversations of a JSONL file, one a line: {"turns": [what the user says, as text or token ids, ...]}, or
    {"messages": [...]} of which the user's are taken. Texts are encoded as they stand, without a chat template."""
    chats = []
    for number, entry in enumerate(read_requests(path), 1):
        if isinstance(entry, InputError):
            raise entry
        said: Any = entry.get("turns")
        if "messages" in entry:
            said = [message.get("content") for message in entry["messages"] if message.get("role") == "user"]
        if not said or not isinstance(said, list):
            raise InputError(f"line {number}", "needs turns, a list of texts or of token ids, or messages")
        chats.append([_encode(turn, tokenizer, number) for turn in said])
    if not chats:
        raise InputError("dataset", f"{path} holds no conversation")
    return Chats(chats, output_len)


def _encode(turn: Any, tokenizer: Tokenizer | None, number: int) -> list[int]:
    ids = turn
    if isinstance(turn, str):
        if tokenizer is None:
            raise InputError(f"line {number}", "holds text, and this model has no tokenizer")
        ids = tokenizer.encode(turn, add_special_tokens=False)
    if not isinstance(ids, list) or not ids or not all(isinstance(id, int) for id in ids):
        raise InputError(f"line {number}", f"got {turn!r}, must be text or token ids, at least one")
    return ids
