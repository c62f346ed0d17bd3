"""What is run: random token ids of given lengths, and requests read from a JSONL file."""

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from pagefold.bench.peers import Workload
from pagefold.core.types import InputError, SamplingParams
from pagefold.models.tokenizer import Tokenizer

SHAPES = {"W1": (16, 128, 128), "W2": (8, 512, 1024)}  # requests, prompt tokens, output tokens
PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")
SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))


def random_workload(
    num_requests: int,
    input_len: int,
    output_len: int,
    vocab_size: int,
    seed: int = 0,
    special_ids: Collection[int] = (),
) -> Workload:
    """Prompts of uniformly drawn token ids below `vocab_size`, none of them special; the same ones for a seed."""
    for name, value in (("num_requests", num_requests), ("input_len", input_len), ("output_len", output_len)):
        if value < 1:
            raise InputError(name, f"got {value}, must be an integer >= 1")
    ids = np.setdiff1d(np.arange(vocab_size), np.fromiter(special_ids, np.int64))
    prompts = np.random.default_rng(seed).choice(ids, (num_requests, input_len))
    return Workload(prompts.tolist(), [output_len] * num_requests)


def dataset_workload(path: str | Path, tokenizer: Tokenizer, output_len: int) -> Workload:
    """The requests of a JSONL file, with their `max_tokens` or else `output_len` output tokens; all must be sound."""
    prompts, lengths = [], []
    for entry in read_requests(path):
        if isinstance(entry, InputError):
            raise entry
        prompts.append(prompt_tokens(entry, tokenizer))
        lengths.append(request_sampling(entry, {"max_tokens": output_len}).max_tokens or output_len)
    if not prompts:
        raise InputError("dataset", f"{path} holds no request")
    return Workload(prompts, lengths)


def read_requests(path: str | Path) -> list[dict[str, Any] | InputError]:
    """One entry per line that is not blank: its JSON object, or what is wrong with it."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("input", f"{path} cannot be read: {error}") from None
    return [_parse(line, number) for number, line in enumerate(lines, 1) if line.strip()]


def _parse(line: str, number: int) -> dict[str, Any] | InputError:
    try:
        entry = json.loads(line)
    except ValueError as error:
        return InputError(f"line {number}", f"not JSON: {error}")
    return entry if isinstance(entry, dict) else InputError(f"line {number}", "must be a JSON object")


def prompt_tokens(entry: dict[str, Any], tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of a request that has one of "prompt" (text), "messages" and "prompt_token_ids"."""
    given = [name for name in PROMPT_FIELDS if name in entry]
    if len(given) != 1:
        raise InputError("prompt", f"got {' and '.join(given) or 'none'}, need one of {', '.join(PROMPT_FIELDS)}")
    name, value = given[0], entry[given[0]]
    if name == "prompt_token_ids":
        if not isinstance(value, list):
            raise InputError(name, f"got {value!r}, must be a list of token ids")
        return value
    if tokenizer is None:
        raise InputError(name, "this model has no tokenizer, send prompt_token_ids")
    if name == "prompt":
        if not isinstance(value, str):
            raise InputError(name, f"got {value!r}, must be text")
        return tokenizer.encode(value)
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise InputError(name, f"got {value!r}, must be a list of at least one message")
    return tokenizer.apply_chat_template(value)


def request_sampling(entry: dict[str, Any], defaults: dict[str, Any]) -> SamplingParams:
    """`defaults` with what the request itself says; a field that is not known is an error that lists the known."""
    own = {name: value for name, value in entry.items() if name not in PROMPT_FIELDS}
    for name in own:
        if name not in SAMPLING_FIELDS:
            known = ", ".join(sorted((*PROMPT_FIELDS, *SAMPLING_FIELDS)))
            raise InputError(name, f"unknown field; known: {known}")
    return SamplingParams(**{**defaults, **own})
