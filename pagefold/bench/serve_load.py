"""The work of `pagefold bench serve`: its options, random prompts, requests of a JSONL file, conversations."""

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagefold.core.types import InputError

DATASETS = ("random", "jsonl", "multi-turn")
FIRST_ID = 10  # many tokenizers have their markers below it
# a chat needs text and the client has no tokenizer: short words that are one token each in most vocabularies
_TEXT = (
    "the of and to in is that it was for on are as with his they at be this have from or one had by word but not what "
    "all were we when your can said there use an each which she do how their if will up other about out many then them "
    "these so some her would make like him into time has look two more write go see number no way could people my than "
    "first water been call who oil its now find long down day did get come made may part"
)
WORDS = _TEXT.split()


def _option(default: Any, text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": text, **metadata})


@dataclass(frozen=True)
class ServeBench:
    """What to send where. The command line has one flag a field; names and meanings are vLLM's where it has them."""

    base_url: str = _option("http://127.0.0.1:8000", "server")
    endpoint: str = _option("/v1/completions", "or /v1/chat/completions, or another path that speaks like either")
    model: str | None = _option(None, "model name in the requests; default: the first of /v1/models")
    dataset_name: str = _option("random", "kind of work", choices=DATASETS)
    dataset_path: str | None = _option(None, "JSONL file: bodies (prompt or messages), or turns for multi-turn")
    num_prompts: int = _option(100, "sessions; a JSONL file is repeated until there are enough")
    random_input_len: int = _option(1024, "tokens a prompt (or a turn); in a chat, words of about one token")
    random_output_len: int = _option(128, "max_tokens of an answer")
    random_range_ratio: float = _option(0.0, "lengths are uniform in [len * (1 - r), len * (1 + r)], r below 1")
    random_prefix_len: int = _option(0, "tokens that all prompts begin with, on top of their length")
    num_turns: int = _option(4, "turns of a session of multi-turn")
    vocab_size: int = _option(10_000, "random token ids are below it")
    request_rate: float = _option(math.inf, "sessions a second, Poisson; inf: all at once")
    max_concurrency: int | None = _option(None, "sessions that run at once; others wait unsent")
    num_warmups: int = _option(1, "requests before the clock starts, none of them in the figures")
    seed: int = _option(0, "of prompts, lengths and arrivals; change it between runs, or the prefix cache helps")
    ignore_eos: bool = _option(False, "ask for answers of full length (vLLM and Pagefold know the field)")
    temperature: float | None = _option(None, "default: the server's")
    extra_body: dict | None = _option(None, "more fields of each request, such as kv_eviction and kv_budget")

    def __post_init__(self):
        least = {"num_prompts": 1, "random_input_len": 1, "random_output_len": 1, "num_turns": 1, "vocab_size": 2}
        for name, low in (least | {"max_concurrency": 1, "num_warmups": 0, "random_prefix_len": 0}).items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise InputError(name, f"got {value}, must be an integer >= {low}")
        if not 0 <= self.random_range_ratio < 1:
            raise InputError("random_range_ratio", f"got {self.random_range_ratio}, must be in [0, 1)")
        if not self.request_rate > 0:
            raise InputError("request_rate", f"got {self.request_rate}, must be above 0, or inf")
        if self.dataset_name not in DATASETS:
            raise InputError("dataset_name", f"got {self.dataset_name!r}, must be one of {', '.join(DATASETS)}")
        if self.dataset_name == "multi-turn" and not self.chat:
            raise InputError("endpoint", f"multi-turn needs /v1/chat/completions, got {self.endpoint}")

    @property
    def chat(self) -> bool:
        return self.endpoint.rstrip("/").endswith("/chat/completions")


@dataclass(frozen=True)
class Turn:
    """One request of a session.

    body         fields of the request; `messages` are only what the turn adds
    num_tokens   length of the prompt where the client knows it, else 0; holds if the server counts nothing
    """

    body: dict[str, Any]
    num_tokens: int = 0


@dataclass(frozen=True)
class Session:
    turns: tuple[Turn, ...]


def make_sessions(bench: ServeBench) -> list[Session]:
    """The sessions of a benchmark, the same ones for a seed."""
    if bench.dataset_path is None:
        if bench.dataset_name == "jsonl":
            raise InputError("dataset_path", "the dataset jsonl needs a file")
        return list(itertools.islice(_drawn(bench, bench.seed), bench.num_prompts))
    if bench.dataset_name == "random":
        raise InputError("dataset_path", "the dataset random reads no file; --dataset-name jsonl or multi-turn does")
    sessions = [_entry_session(bench, number, line) for number, line in _lines(bench.dataset_path)]
    if not sessions:
        raise InputError("dataset_path", f"{bench.dataset_path} holds no request")
    return list(itertools.islice(itertools.cycle(sessions), bench.num_prompts))


def warm_up_sessions(bench: ServeBench) -> list[Session]:
    """Random requests of one turn that share nothing with the measured ones."""
    single = dataclasses.replace(bench, num_turns=1, random_prefix_len=0)
    return list(itertools.islice(_drawn(single, f"warm-up {bench.seed}"), bench.num_warmups))


# ---- random


def _drawn(bench: ServeBench, seed: int | str) -> Iterator[Session]:
    draws = random.Random(seed)
    prefix = _tokens(bench, draws, bench.random_prefix_len)
    num_turns = bench.num_turns if bench.dataset_name == "multi-turn" else 1
    while True:
        yield Session(tuple(_drawn_turn(bench, draws, prefix if index == 0 else []) for index in range(num_turns)))


def _drawn_turn(bench: ServeBench, draws: random.Random, prefix: list) -> Turn:
    tokens = prefix + _tokens(bench, draws, _length(bench, draws, bench.random_input_len))
    limit = {"max_tokens": _length(bench, draws, bench.random_output_len)}
    if bench.chat:
        return Turn({"messages": [{"role": "user", "content": " ".join(tokens)}]} | limit)
    return Turn({"prompt": tokens} | limit, len(tokens))


def _length(bench: ServeBench, draws: random.Random, mean: int) -> int:
    spread = int(mean * bench.random_range_ratio)
    return max(1, draws.randint(mean - spread, mean + spread))


def _tokens(bench: ServeBench, draws: random.Random, count: int) -> list:
    if bench.chat:
        return draws.choices(WORDS, k=count)
    return [draws.randrange(min(FIRST_ID, bench.vocab_size - 1), bench.vocab_size) for _ in range(count)]


# ---- JSONL


def _lines(path: str) -> Iterator[tuple[int, str]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("dataset_path", f"{path} cannot be read: {error}") from None
    return ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())


def _entry_session(bench: ServeBench, number: int, line: str) -> Session:
    """One line: a body with `prompt` (text or ids) or `messages`, or `turns`, a list of what the user says."""
    where = f"line {number} of {bench.dataset_path}"
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InputError("dataset_path", f"{where} is no JSON: {error}") from None
    wanted = "turns" if bench.dataset_name == "multi-turn" else "prompt or messages"
    if not isinstance(entry, dict) or not any(entry.get(name) for name in wanted.split(" or ")):
        raise InputError("dataset_path", f"{where} must be an object with {wanted}")
    body = {"max_tokens": bench.random_output_len} | {k: v for k, v in entry.items() if k not in ("turns", "prompt")}
    if bench.dataset_name == "multi-turn":
        users = [[{"role": "user", "content": text}] for text in entry["turns"]]
        users[0] = [*entry.get("messages", ()), *users[0]]
        return Session(tuple(Turn(body | {"messages": messages}) for messages in users))
    prompt = entry.get("prompt")
    if bench.chat:
        if prompt is not None and not isinstance(prompt, str):
            raise InputError("dataset_path", f"{where}: a prompt of token ids cannot be sent to {bench.endpoint}")
        return Session((Turn({"messages": [{"role": "user", "content": prompt}]} | body),))
    if prompt is None:
        raise InputError("dataset_path", f"{where}: messages need /v1/chat/completions, not {bench.endpoint}")
    return Session((Turn(body | {"prompt": prompt}, len(prompt) if isinstance(prompt, list) else 0),))
