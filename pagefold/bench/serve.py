"""`pagefold bench serve`: put load on any OpenAI-compatible server and print what `vllm bench serve` prints.

A *session* is one user, whose turns are sent one after the other, each with the answers before it; a plain request is
a session of one turn. Sessions arrive as a Poisson process (or all at once) and at most `max_concurrency` of them run.
"""

import asyncio
import contextlib
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from tqdm import tqdm

from pagefold.bench.serve_load import ServeBench, Session, make_sessions, warm_up_sessions
from pagefold.bench.serve_report import Sample, parse_goodput, print_table, summarise
from pagefold.core.types import InputError

GIVE_UP = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=600)  # seconds; a long queue is no failure
SHOWN_ERRORS = 5
KEEP_S = 2.0
RECEIVE_BUFFER = 1 << 18  # bytes of an answer that may wait for this process


def run_serve(bench: ServeBench, api_key: str | None, goodput: list[str], json_path: str | None) -> bool:
    """Run the benchmark, print its table and write its figures; False if no request succeeded.

    api_key   sent as a bearer token; never written anywhere
    goodput   limits in milliseconds, such as "ttft:500"
    """
    report = bench_report(bench, api_key, parse_goodput(goodput))
    print_table(report)
    if json_path:
        write_report(json_path, report)
    return report["completed"] > 0


def bench_report(bench: ServeBench, api_key: str | None, limits: dict[str, float]) -> dict[str, Any]:
    """Run the benchmark; returns all its figures. Raises InputError if there is no server."""
    sessions = make_sessions(bench)
    samples, duration, model = asyncio.run(_measure(bench, sessions, api_key))
    facts = {"model_id": model, "num_prompts": len(samples), "seed": bench.seed, "endpoint": bench.endpoint}
    facts |= {"request_rate": bench.request_rate, "max_concurrency": bench.max_concurrency}
    report = summarise(samples, duration, facts, limits)
    for error, count in Counter(sample.error for sample in samples if sample.error).most_common(SHOWN_ERRORS):
        print(f"{count} failed: {error}", file=sys.stderr)
    return report


def write_report(path: str, report: dict[str, Any]) -> None:
    """Raises InputError if that cannot be done."""
    try:
        Path(path).write_text(json.dumps(_finite(report), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError("json", f"{path} cannot be written: {error}") from None


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return "inf" if value == math.inf else value


# ---- sending


async def _measure(bench: ServeBench, sessions: list[Session], api_key: str | None) -> tuple[list[Sample], float, str]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # The gate below is the only limit; idle connections are dropped before a server drops them while they are taken.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S)
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, timeout=GIVE_UP, read_bufsize=RECEIVE_BUFFER
    ) as http:
        model = bench.model or await _first_model(http, bench.base_url.rstrip("/"))
        for session in warm_up_sessions(bench):
            for sample in await _run_session(http, bench, model, session):
                if sample.error:
                    raise InputError("base_url", f"a warm-up request to {bench.base_url} failed: {sample.error}")
        samples, duration = await _drive(http, bench, model, sessions)
    return samples, duration, model


async def _first_model(http: aiohttp.ClientSession, base_url: str) -> str:
    try:
        async with http.get(f"{base_url}/v1/models") as response:
            if response.status != 200:
                raise InputError("base_url", f"{base_url}/v1/models: {await _refusal(response)}")
            return (await response.json())["data"][0]["id"]
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise InputError("base_url", f"{base_url}/v1/models: {_words(error)}; is the server up?") from None


async def _drive(
    http: aiohttp.ClientSession, bench: ServeBench, model: str, sessions: list[Session]
) -> tuple[list[Sample], float]:
    """Samples in the order of the sessions, and seconds from the first request to the last answer."""
    gate = asyncio.Semaphore(bench.max_concurrency) if bench.max_concurrency else contextlib.nullcontext()
    total = sum(len(session.turns) for session in sessions)
    with tqdm(total=total, unit="req", disable=None) as progress:

        async def run(session: Session) -> list[Sample]:
            async with gate:
                return await _run_session(http, bench, model, session, progress)

        start = time.perf_counter()
        tasks = []
        for session, arrival in zip(sessions, arrivals(bench.request_rate, bench.seed), strict=False):
            if arrival:
                await asyncio.sleep(start + arrival - time.perf_counter())
            tasks.append(asyncio.create_task(run(session)))
        samples = [sample for samples in await asyncio.gather(*tasks) for sample in samples]
    return samples, time.perf_counter() - start


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds after the start at which sessions arrive: a Poisson process of `rate` a second, the first one at 0."""
    draws, now = random.Random(f"arrivals {seed}"), 0.0
    while True:
        yield now
        if rate != math.inf:
            now += draws.expovariate(rate)


async def _run_session(
    http: aiohttp.ClientSession, bench: ServeBench, model: str, session: Session, progress: tqdm | None = None
) -> list[Sample]:
    """One sample a turn. A failed turn ends the session, for its answer is part of the next one."""
    url = bench.base_url.rstrip("/") + bench.endpoint
    fixed: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if bench.ignore_eos:
        fixed["ignore_eos"] = True
    if bench.temperature is not None:
        fixed["temperature"] = bench.temperature
    samples, history = [], []
    for turn in session.turns:
        body = fixed | turn.body | (bench.extra_body or {})
        if bench.chat:
            body["messages"] = history = [*history, *turn.body["messages"]]
        sample = await send(http, url, body, turn.num_tokens)
        samples.append(sample)
        if progress is not None:
            progress.update()
        if sample.error:
            break
        history = [*history, {"role": "assistant", "content": sample.text}]
    return samples


async def send(http: aiohttp.ClientSession, url: str, body: dict[str, Any], num_tokens: int = 0) -> Sample:
    """One streamed request; a failure of any kind is a sample with its `error`. `num_tokens` holds without usage."""
    data = json.dumps(body).encode()  # before the clock starts
    sample = Sample(time.perf_counter(), num_tokens)
    try:
        async with http.post(url, data=data, headers={"Content-Type": "application/json"}) as response:
            if response.status != 200:
                sample.error = await _refusal(response)
            else:
                await _read_events(response, sample)
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError, AttributeError) as error:
        sample.error = _words(error)
    sample.finish(time.perf_counter())
    return sample


async def _read_events(response: aiohttp.ClientResponse, sample: Sample) -> None:
    rest = b""
    async for data in response.content.iter_any():
        now = time.perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                _take_event(line[5:].strip(), now, sample)


def _take_event(data: bytes, now: float, sample: Sample) -> None:
    if data == b"[DONE]":
        sample.done = True
        return
    event = json.loads(data)
    if "error" in event:
        error = event["error"]
        raise ValueError(error.get("message", error) if isinstance(error, dict) else error)
    if event.get("usage"):
        sample.usage = event["usage"]
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {}
        content = choice.get("text") or delta.get("content") or ""
        sample.text += content
        said = content or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
        if said or choice.get("token_ids"):
            sample.times.append(now)
        if choice.get("finish_reason"):
            sample.done, sample.end = True, now


async def _refusal(response: aiohttp.ClientResponse) -> str:
    text = await response.text(errors="replace")
    with contextlib.suppress(ValueError, LookupError, TypeError):
        text = json.loads(text)["error"]["message"]
    return f"HTTP {response.status}: {' '.join(str(text).split())[:300]}"


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
