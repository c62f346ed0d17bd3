"""What is run: random token ids of given lengths, well-known mixes of requests, requests read from a JSONL file; and
the cases that pair such work with the engines to compare on it."""

import dataclasses
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from pagefold.bench.peers import Workload
from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError, SamplingParams
from pagefold.engine.build import choose_device, choose_dtype
from pagefold.models.sources import resolve
from pagefold.models.spec import ModelSpec
from pagefold.models.tokenizer import Tokenizer

SHAPES = {"W1": (16, 128, 128), "W2": (8, 512, 1024)}  # requests, prompt tokens, output tokens
SUITE_DTYPES = ("bfloat16", "float32")
SUITE_KV_BYTES = {"bfloat16": 300 << 20, "float32": 600 << 20}  # what the full cache of W2 needs, and a little more
# on a CPU a compaction costs about as much as a step, so it is done every 128 tokens instead of every page
FOLDED = {"kv_eviction": "zipage", "kv_budget": 256, "kv_buffer": 128}

LARGEST_ID = 10_000  # of the tokens in the named workloads
NAMED = ("nano", "reason", "long")
NAMED_TEMPERATURE = 0.6
LONG_PROMPT, LONG_OUTPUT = 130_048, 1024
# what both sides are given; what is asked for overrides it
NAMED_OPTIONS: dict[str, dict[str, Any]] = {
    "nano": {"kv_cache_memory_bytes": 60 << 30, "max_model_len": 4096, "max_num_seqs": 256},
    "reason": {"kv_cache_memory_bytes": 16 << 30, "max_model_len": 8192, "max_num_seqs": 256},
    "long": {"kv_cache_memory_bytes": 40 << 30, "max_model_len": 131_072, "max_num_seqs": 16},
}
RANDOM_WEIGHTS = {"load_format": "dummy", "enable_prefix_caching": False}
OUR_CHUNK = {"max_num_batched_tokens": 8192}  # peers choose their own

# options that vLLM has too, under the same names
PEER_OPTIONS = (
    "load_format",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "enable_prefix_caching",
)

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


def named_workload(
    name: str, num_requests: int | None = None, users: int = 2, temperature: float | None = None
) -> Workload:
    """One of the mixes of requests that figures are published for; always the same tokens.

    nano     256 requests, 100 to 1024 tokens in and out: short chats, as in nano-vllm's benchmark
    reason   160 requests, 96 to 320 tokens in, 2048 to 4096 out: chains of thought (Zipage, arXiv 2603.08743)
    long     `users` requests, 130,048 tokens in, 1,024 out
    `num_requests` makes nano and reason shorter or longer; their requests are then others.
    """
    temperature = NAMED_TEMPERATURE if temperature is None else temperature
    for option, value in (("num_requests", num_requests), ("users", users)):
        if value is not None and value < 1:
            raise InputError(option, f"got {value}, must be an integer >= 1")
    if name == "nano":
        prompts, lengths = _drawn(Random(0), num_requests or 256, (100, 1024), (100, 1024))
    elif name == "reason":
        prompts, lengths = _drawn(Random(1), num_requests or 160, (96, 320), (2048, 4096))
    elif name == "long":
        prompts, lengths = _drawn(Random(2), users, LONG_PROMPT, LONG_OUTPUT)
    else:
        raise InputError("workload", f"got {name!r}, must be one of {', '.join(NAMED)}")
    return Workload(prompts, lengths, temperature, prefill_apart=name == "long")


Span = int | tuple[int, int]


def _drawn(random: Random, num: int, prompt: Span, output: Span) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths; a length that is fixed draws nothing. The order of the draws is part of the work."""
    prompts = [[random.randint(0, LARGEST_ID) for _ in range(drawn(random, prompt))] for _ in range(num)]
    return prompts, [drawn(random, output) for _ in range(num)]


def drawn(random: Random, span: Span) -> int:
    return span if isinstance(span, int) else random.randint(*span)


def sampled_workload(work: Workload, samples: int) -> Workload:
    """The same number of requests with fewer prompts, each asked `samples` times in a row, as benchmarks of reasoning
    do; what they may share is then a prefix. InputError if there are fewer requests than that."""
    if not 1 <= samples <= len(work.prompts):
        raise InputError("samples", f"got {samples}, must be in [1, {len(work.prompts)}], the number of requests")
    prompts = [work.prompts[i // samples] for i in range(len(work.prompts))]
    return dataclasses.replace(work, prompts=prompts)


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


# ---- cases: one piece of work, several engines


@dataclass(frozen=True)
class Case:
    """Engines to compare on one workload.

    title          what the work is
    dtype          precision of every engine, ours and peers
    engines        {name: engine options}
    device         "cpu" or "cuda": where the peers run
    peer_options   keywords for the peers' engine
    """

    title: str
    workload: Workload
    dtype: str
    engines: dict[str, dict[str, Any]]
    device: str = "cpu"
    peer_options: dict[str, Any] = field(default_factory=dict)


def engine_name(options: dict[str, Any]) -> str:
    """A configuration in a few words: "full", "zipage 256", "zipage 256, int4"."""
    evict = EngineConfig.from_options(**options).eviction
    budget = evict.kv_budget if evict.kv_budget_ratio is None else f"{evict.kv_budget_ratio:.0%}"
    parts = ["full" if evict.kv_eviction == "none" else f"{evict.kv_eviction} {budget}"]
    parts += [str(options[name]) for name in ("kv_layout", "kv_format", "kv_cold_format") if options.get(name)]
    return ", ".join(parts)


def device_of(options: dict[str, Any]) -> str:
    """Where an engine with these options runs: on a CUDA device if there is one, unless a CPU backend is asked for."""
    backend = options.get("backend", "auto")
    return "cuda" if backend in ("auto", "triton") and torch.cuda.is_available() else "cpu"


def require_cuda(field: str, what: str, options: dict[str, Any]) -> None:
    """Raise InputError if `what` has no CUDA device to run on; naming a CPU backend is consent to do without."""
    if device_of(options) == "cpu" and options.get("backend", "auto") in ("auto", "triton"):
        raise InputError(field, f"{what} needs a CUDA device, and torch finds none; --backend cpu runs it on the CPU")


def suite_cases(options: dict[str, Any]) -> list[Case]:
    """`--suite cpu`: W1 and W2 with a full cache, W2 folded to 256 rows, in bf16 and fp32 (or in the dtype given)."""
    vocab_size, special_ids = _vocabulary(options)
    dtypes = SUITE_DTYPES if options.get("dtype", "auto") == "auto" else (options["dtype"],)
    cases = []
    for dtype in dtypes:
        pool = {"kv_cache_memory_bytes": SUITE_KV_BYTES[dtype]} if dtype in SUITE_KV_BYTES else {}
        for name, shape in SHAPES.items():
            full = pool | options
            variants = [full] if name == "W1" else [full, full | FOLDED]
            workload = random_workload(*shape, vocab_size, options.get("seed", 0), special_ids)
            cases.append(_case(name, workload, variants, dtype, options))
    return cases


def random_case(
    options: dict[str, Any], num_requests: int, input_len: int, output_len: int, temperature: float = 0.0
) -> Case:
    """`--num-requests N --input-len A --output-len B`: our engine as configured, on random tokens."""
    vocab_size, special_ids = _vocabulary(options)
    work = random_workload(num_requests, input_len, output_len, vocab_size, options.get("seed", 0), special_ids)
    return single_case("random", options, dataclasses.replace(work, temperature=temperature))


def single_case(title: str, options: dict[str, Any], workload: Workload) -> Case:
    dtype = options.get("dtype", "auto")
    if dtype == "auto":
        dtype = str(choose_dtype(dtype, choose_device(options.get("backend", "auto")))).removeprefix("torch.")
    return _case(title, workload, [options], dtype, options)


def named_case(
    name: str,
    options: dict[str, Any],
    num_requests: int | None = None,
    users: int = 2,
    temperature: float | None = None,
) -> Case:
    """`--workload NAME`: our engine and its peers with the same memory, random weights, bfloat16, and no prefix cache.

    Raises InputError if there is no CUDA device and no CPU backend is asked for.
    """
    require_cuda("workload", name, options)
    workload = named_workload(name, num_requests, users, temperature)
    shared = RANDOM_WEIGHTS | NAMED_OPTIONS[name]
    shared["max_num_seqs"] = max(shared["max_num_seqs"], users)
    if "gpu_memory_utilization" in options:
        del shared["kv_cache_memory_bytes"]
    dtype = options.get("dtype", "auto")
    dtype = "bfloat16" if dtype == "auto" else dtype
    return _case(name, workload, [shared | OUR_CHUNK | options], dtype, shared | options)


def _case(
    title: str, workload: Workload, variants: list[dict[str, Any]], dtype: str, peer_options: dict[str, Any]
) -> Case:
    """Peers on a CPU have settings of their own; of what is asked for they get to know the source of the weights."""
    device = device_of(variants[0])
    passed = PEER_OPTIONS if device == "cuda" else ("load_format",)
    return Case(
        title,
        workload,
        dtype,
        {engine_name(options): options | {"dtype": dtype} for options in variants},
        device,
        {name: peer_options[name] for name in passed if peer_options.get(name) not in (None, "auto")},
    )


def _vocabulary(options: dict[str, Any]) -> tuple[int, frozenset[int]]:
    """Size and special ids; a model without weights needs no tokenizer either, and then no id is special."""
    source = resolve(options["model"])
    vocab_size = ModelSpec.from_hf(source.config()).vocab_size
    if options.get("load_format") == "dummy":
        return vocab_size, frozenset()
    return vocab_size, source.tokenizer().special_ids
