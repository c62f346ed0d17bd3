"""Users with long contexts, who arrive one after the other and stay: decode speed at each count of them.

A prompt is read once per user and not once per count. The file is run inside a peer's interpreter too, where pagefold
is not installed, so it imports nothing but the standard library.
"""

import importlib
import statistics
import time
from collections.abc import Callable, Collection
from random import Random
from typing import Any

WARM_STEPS = 8  # of each count, before its measurement
WARM_PROMPT, WARM_OUTPUT = 8192, 4
LARGEST_ID = 10_000  # of the random prompts


def prompt_of(user: int, length: int, vocab_size: int) -> list[int]:
    """Random token ids: the same for a user in every engine, and others for every user."""
    return Random(user).choices(range(1, min(LARGEST_ID, vocab_size)), k=length)


def chosen_counts(wanted: Collection[int], capacity: int) -> list[int]:
    """The counts to measure: those wanted that fit, and the capacity itself; none if nobody fits."""
    return sorted({count for count in wanted if count <= capacity} | ({capacity} - {0}))


def grow(
    add: Callable[[int], None],
    step: Callable[[], Collection[int]],
    counts: Collection[int],
    steps: int,
    preemptions: Callable[[], int | None],
) -> list[dict[str, Any]]:
    """Let users arrive until each of the ascending `counts` is reached, and decode `steps` tokens for each user there.

    add     queues the request of one more user
    step    computes; returns the users who got a token
    Returns, for every count: `users`; `prefill_s`, seconds from each user's arrival to the first token, while those
    before decode on; `decode_tok_s`, tokens of all users per second; `latency_ms` and `latency_p99_ms`, median and 99th
    percentile of a step, which is the time between two tokens of a user; `steps`; `preemptions` so far.
    Raises RuntimeError if a user gets no token in a step that is measured.
    """
    stages, prefill_s = [], []
    for count in counts:
        for user in range(len(prefill_s), count):
            start = time.perf_counter()
            add(user)
            while user not in step():
                pass
            prefill_s.append(time.perf_counter() - start)
        for _ in range(WARM_STEPS):
            step()
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            served = len(step())
            seconds.append(time.perf_counter() - start)
            if served != count:
                raise RuntimeError(f"{served} of {count} users got a token in a step: they do not fit")
        stages.append(
            {
                "users": count,
                "prefill_s": list(prefill_s),
                "decode_tok_s": count * steps / sum(seconds),
                "latency_ms": 1e3 * statistics.median(seconds),
                "latency_p99_ms": 1e3 * _p99(seconds),
                "steps": steps,
                "preemptions": preemptions(),
            }
        )
    return stages


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]


# From here on: what runs inside vLLM's interpreter.


def grow_vllm(job: dict[str, Any], count_preemptions: Callable[[Any], Callable[[], int | None]]) -> dict[str, Any]:
    """The job of `pagefold.bench.capacity` on vLLM's offline engine, stepped by hand."""
    vllm = importlib.import_module("vllm")
    start = time.perf_counter()
    options = {"max_model_len": job["context"], "enable_prefix_caching": False, "disable_log_stats": True}
    llm = vllm.LLM(model=job["model"], dtype=job["dtype"], skip_tokenizer_init=True, **options | job["options"])
    init_s = time.perf_counter() - start
    engine = llm.llm_engine
    cache, vocab_size = engine.vllm_config.cache_config, engine.model_config.get_vocab_size()
    capacity = (cache.num_gpu_blocks - 1) // -(-job["context"] // cache.block_size)  # block 0 is nobody's
    capacity = min(capacity, job["options"]["max_num_seqs"])

    def add(name: str, length: int, max_tokens: int, user: int) -> None:
        sampling = vllm.SamplingParams(
            temperature=job["temperature"], ignore_eos=True, detokenize=False, max_tokens=max_tokens
        )
        engine.add_request(name, {"prompt_token_ids": prompt_of(user, length, vocab_size)}, sampling)

    prompt_len = job["context"] - job["output_len"]
    add("warm-up", min(WARM_PROMPT, prompt_len), WARM_OUTPUT, user=-1)
    while engine.has_unfinished_requests():
        engine.step()
    preemptions, lengths = count_preemptions(llm), {}

    def step() -> list[int]:
        served = []
        for output in engine.step():
            user, length = int(output.request_id), len(output.outputs[0].token_ids)
            if length > lengths.get(user, 0):
                lengths[user] = length
                served.append(user)
        return served

    stages = grow(
        lambda user: add(str(user), prompt_len, job["output_len"], user),
        step,
        chosen_counts(job["users"], capacity),
        job["steps"],
        preemptions,
    )
    return {
        "version": vllm.__version__,
        "init_s": init_s,
        "capacity": capacity,
        "pool_tokens": (cache.num_gpu_blocks - 1) * cache.block_size,
        "stages": stages,
    }
