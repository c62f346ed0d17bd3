"""A thousand streams at once, a third of which break off: nothing is left of them, and the others never notice."""

import asyncio
import json
import random

import aiohttp
import pytest

from tests.server.fake import wait_until
from tests.server.live import live

NUM_REQUESTS, NUM_KINDS, AT_ONCE = 1000, 40, 250
OPTIONS = {
    "dtype": "float64",  # no rounding that depends on the neighbours can flip a draw
    "max_num_seqs": 48,
    "num_pages": 250,  # fewer than so many sequences may come to: some wait, some are preempted
    "kv_swap_bytes": 1 << 22,
    "kv_eviction": "zipage",
    "disable_log_requests": True,
}


def kind(number: int) -> dict:
    """One of the requests, in every mode that the server mixes; kinds share beginnings, so that the cache is used."""
    draws = random.Random(number)
    body = {"prompt": [number % 7 + 1] * draws.randint(1, 40) + [number + 1], "max_tokens": draws.randint(4, 24)}
    body |= {"stream": True, "seed": number, "ignore_eos": True, "temperature": number % 3 / 2}
    match number % 4:
        case 0:
            body |= {"kv_eviction": "none", "max_tokens": 80 if number % 8 else 4}  # long ones are preempted
        case 1:
            body |= {"kv_evict_when": "always", "kv_budget": 8}
        case 2:
            body |= {"kv_eviction": "recency", "kv_evict_when": "always"}
        case _:
            body |= {"kv_evict_when": "pressure", "n": 2}
    return body


async def ask(http: aiohttp.ClientSession, body: dict, leave_after: int | None = None) -> list[str] | None:
    """The texts of an answer, by continuation; None if it was left after so many chunks."""
    texts, chunks = [""] * body.get("n", 1), 0
    async with http.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if leave_after is not None and chunks >= leave_after:
                return None  # the connection is closed, for the answer is not read to its end
            data = line.removeprefix(b"data: ").strip()
            if data in (b"", b"[DONE]"):
                continue
            chunks += 1
            event = json.loads(data)
            assert "error" not in event, event
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
    return texts


async def load(url: str, alone: dict[int, list[str]]) -> int:
    """Send everything; returns how many answers came whole, each as the same request got it alone."""
    draws, gate = random.Random(0), asyncio.Semaphore(AT_ONCE)

    async def one(number: int, leave_after: int | None, in_s: float | None) -> bool:
        async with gate:
            try:
                async with asyncio.timeout(in_s):
                    texts = await ask(http, kind(number), leave_after)
            except TimeoutError:
                return False
        by_memory = number % 4 == 3  # what is folded under pressure depends on the neighbours, as it says
        assert texts is None or texts == alone[number] or by_memory, number
        return texts is not None

    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as http:
        tasks = []
        for i in range(NUM_REQUESTS):
            leaves = i % 3 == 0
            how = draws.choice(["chunk", "time"]) if leaves else None
            leave_after = draws.randint(0, 6) if how == "chunk" else None
            tasks.append(one(i % NUM_KINDS, leave_after, draws.uniform(0, 0.5) if how == "time" else None))
        return sum(await asyncio.gather(*tasks))


async def ask_alone(url: str) -> dict[int, list[str]]:
    async with aiohttp.ClientSession(url) as http:
        answers = {number: await ask(http, kind(number)) for number in range(NUM_KINDS)}
    return {number: texts for number, texts in answers.items() if texts is not None}


@pytest.mark.slow
def test_a_thousand_streams_of_which_a_third_break_off(tmp_path):
    with live(tmp_path, **OPTIONS) as server:
        alone = asyncio.run(ask_alone(server.url))
        whole = asyncio.run(load(server.url, alone))
        assert NUM_REQUESTS * 2 // 3 <= whole < NUM_REQUESTS

        def idle():
            stats = server.stats()
            return stats["running"] == stats["waiting"] == stats["swapped"] == stats["kv"][0]["used"] == 0

        wait_until(idle)
        assert server.http.post("/reset_prefix_cache").json() == {"reset": True}
        stats = server.stats()
        assert stats["kv"][0]["idle"] == 0 and stats["finished"]["abort"] > 0
        assert stats["folds"] > 0 and stats["prefix_cache"]["hits"] > 0 and stats["preemptions"] > 0
        assert asyncio.run(ask_alone(server.url)) == alone  # and it goes on as it began
