"""The engine process serves what the offline engine serves, to whoever stays, and its end is noticed at once."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from contextlib import suppress
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
pytest.importorskip("llguidance")

from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError, Request, SamplingParams
from pagefold.engine.grammar import GrammarCompiler
from pagefold.engine.llm import LLM
from pagefold.server import process
from pagefold.server.client import EngineClient, EngineDead
from pagefold.server.messages import (
    Abort,
    Answer,
    Ask,
    Delta,
    Deltas,
    Generate,
    Grammar,
    Logprobs,
    Refused,
    decode_to_front,
    encode,
)
from pagefold.server.process import EngineServer
from pagefold.server.stats import STEP_TOKENS, Counters, engine_stats, pool_map
from tests.engine.tiny import BOS, EOS, assert_drained, prompt_of, tiny_engine, tiny_tokenizer
from tests.model_dir import write_model_dir

OPTIONS = {
    "dtype": "float32",
    "page_size": 4,
    "num_pages": 300,
    "kv_swap_bytes": 1 << 20,
    "kv_budget": 16,
    "kv_window": 3,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return str(write_model_dir(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def client(loop, model_dir):
    client = EngineClient(EngineConfig.from_options(model=model_dir, **OPTIONS))
    loop.run(client.start())
    yield client
    loop.run(client.close())


async def collect(client: EngineClient, request: Generate) -> list[list[Delta]]:
    """The deltas of each continuation."""
    parts: list[list[Delta]] = [[] for _ in range(request.sampling.get("n", 1))]
    async for deltas in client.generate(request):
        for delta in deltas:
            parts[delta.index].append(delta)
    return parts


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def ids_of(deltas: list[Delta]) -> list[int]:
    return [id for delta in deltas for id in delta.token_ids]


def endless(id: str, max_tokens: int = 480) -> Generate:
    return Generate(id, [BOS, 1, 2], {"max_tokens": max_tokens, "ignore_eos": True, "seed": 1})


async def until_idle(client: EngineClient, within_s: float = 2.0) -> dict:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        stats = await client.ask("stats")
        if not stats["running"] and not stats["waiting"] and not stats["kv"][0]["used"]:
            return stats
        await asyncio.sleep(0.01)
    raise AssertionError(stats)


# ---- what is served


def test_streams_together_are_what_the_offline_engine_gives(loop, client, model_dir):
    params = [
        {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True},
        {"temperature": 0.9, "seed": 3, "max_tokens": 30, "n": 3, "ignore_eos": True},
        {"temperature": 0.7, "seed": 4, "max_tokens": 25, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.0, "max_tokens": 60, "kv_eviction": "keydiff", "kv_budget": 16, "ignore_eos": True},
        {"temperature": 0.0, "max_tokens": 0},
        {"temperature": 0.9, "seed": 5, "max_tokens": 200, "stop": ["a", "Z"], "min_tokens": 2},
    ]
    prompts = [prompt_of(20 + i, i) for i in range(len(params))]
    offline = LLM(model_dir, **OPTIONS).generate(prompts, [SamplingParams(**p) for p in params], use_tqdm=False)

    async def all_streams():
        requests = [Generate(f"s{i}", prompts[i], params[i]) for i in range(len(params))]
        return await asyncio.gather(*(collect(client, request) for request in requests))

    for parts, output in zip(loop.run(all_streams()), offline, strict=True):
        assert sum(delta.last for part in parts for delta in part) == 1
        for deltas, choice in zip(parts, output.outputs, strict=True):
            end = deltas[-1]
            assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
            assert (text_of(deltas), ids_of(deltas)) == (choice.text, choice.token_ids)
            assert (end.finish_reason, end.stop_reason, end.error) == (choice.finish_reason, choice.stop_reason, None)
            assert end.kv == vars(choice.kv)
            if choice.logprobs is None:
                assert all(delta.logprobs is None for delta in deltas)
            else:
                got = [entry for delta in deltas for entry in delta.logprobs or []]
                assert got == [Logprobs([*e.ids], [*e.logprobs], [*e.ranks]) for e in choice.logprobs]
    asked = loop.run(collect(client, Generate("p", prompts[2], params[2])))[0]
    assert [bool(delta.prompt_logprobs) for delta in asked] == [True] + [False] * (len(asked) - 1)
    assert offline[2].prompt_logprobs is not None and asked[0].prompt_logprobs is not None
    assert [e and e.ids for e in asked[0].prompt_logprobs] == [e and [*e.ids] for e in offline[2].prompt_logprobs]


def test_answers_with_a_grammar_wait_for_it_and_keep_to_it(loop, client):
    request = Generate("g", [BOS, 5], {"max_tokens": 60, "seed": 2}, grammar=Grammar("regex", "[0-9]{3}-[a-f]+;"))
    (deltas,) = loop.run(collect(client, request))
    assert deltas[-1].finish_reason == "stop" and text_of(deltas)[3] == "-" and text_of(deltas)[-1] == ";"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Generate("r", [BOS, 999], {}), "prompt"),
        (Generate("r", [], {}), "prompt"),
        (Generate("r", [BOS] * 600, {}), "prompt"),
        (Generate("r", [2**63], {}), "prompt"),
        (Generate("r", [2**70], {}), "request"),
        (Generate("r", [BOS], {"temperature": -1}), "temperature"),
        (Generate("r", [BOS], {"no_such_thing": 1}), "no_such_thing"),
        (Generate("r", [BOS], {"stop": ["\ud800"]}), "request"),
        (Generate("r", [BOS], {}, grammar=Grammar("json_schema", '{"type":"strin"}')), "response_format"),
        (Generate("r", [BOS], {}, grammar=Grammar("poem", "x")), "response_format"),
    ],
    ids=lambda value: "" if isinstance(value, Generate) else value,
)
def test_what_cannot_be_served_is_refused_and_nobody_else_notices(loop, client, request_, field):
    async def both():
        beside = asyncio.create_task(collect(client, endless("beside", 60)))
        with pytest.raises(InputError) as refused:
            await collect(client, request_)
        return refused.value, await beside

    error, (deltas,) = loop.run(both())
    assert error.field == field and str(error).count(f"{field}: ") == 1
    assert len(ids_of(deltas)) == 60


def test_an_id_serves_one_request_at_a_time(loop, client):
    async def twice():
        first = asyncio.create_task(collect(client, endless("same", 30)))
        await asyncio.sleep(0)
        with pytest.raises(InputError, match="already"):
            await collect(client, endless("same", 30))
        return await first

    assert len(ids_of(loop.run(twice())[0])) == 30


# ---- who leaves


@pytest.mark.parametrize("how", ["break", "cancel", "cancel at once", "abort"])
def test_36_whoever_leaves_gives_back_his_pages_within_two_steps(loop, client, how):
    async def leave():
        if how == "break":
            async for _ in client.generate(endless("leaver")):
                break
        else:
            task = asyncio.create_task(collect(client, endless("leaver")))
            if how != "cancel at once":
                while not (await client.ask("stats"))["running"]:
                    await asyncio.sleep(0.001)
            else:
                await asyncio.sleep(0)
            if how == "abort":
                client.abort(["leaver"])
                assert (await task)[0][-1].finish_reason == "abort"
            else:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        before = await client.ask("stats")
        return before, await until_idle(client)

    before, after = loop.run(leave())
    assert after["steps"] - before["steps"] <= 2 and not client._streams
    assert after["finished"]["abort"] >= (how != "cancel at once")


def test_a_request_that_waits_in_the_queue_can_leave(loop, client):
    async def crowd():
        tasks = [asyncio.create_task(collect(client, endless(f"crowd{i}"))) for i in range(12)]
        while (await client.ask("stats"))["waiting"] < 4:
            await asyncio.sleep(0.001)
        for task in reversed(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return await until_idle(client)

    assert loop.run(crowd())["kv"][0]["used"] == 0


def test_whoever_falls_behind_gets_all_that_came_at_once(loop, client):
    async def dawdle():
        batches = []
        async for deltas in client.generate(endless("dawdler", 60)):
            batches.append(deltas)
            await asyncio.sleep(0.05)
        return batches

    batches = loop.run(dawdle())
    assert len(ids_of([delta for deltas in batches for delta in deltas])) == 60
    assert all(batches) and max(map(len, batches)) > 1


def test_questions_are_answered_while_requests_run(loop, client):
    async def watch():
        request = endless("watched", 400)
        request.sampling |= {"kv_eviction": "keydiff", "kv_budget": 16}
        seen = []
        async for _ in client.generate(request):
            seen.append((await client.ask("stats"), await client.ask("pool")))
        return seen

    seen = loop.run(watch())
    busy = [(stats, pool) for stats, pool in seen if stats["running"]]
    for stats, pool in busy:
        (entry,) = stats["requests"]
        assert entry["id"] == "watched" and entry["state"] == "running"
        assert entry["rows_kept"] <= entry["rows_seen"]
        assert 0 <= stats["kv"][0]["used"] - entry["pages"][0] <= 4  # what a fold in flight writes
        assert len(pool[0]["codes"]) == OPTIONS["num_pages"] and max(pool[0]["codes"]) <= 5
    assert any(2 in pool[0]["codes"] for _, pool in busy) and any(5 in pool[0]["codes"] for _, pool in busy)
    assert busy[-1][0]["requests"][0]["rows_kept"] < 40 and busy[-1][0]["folds"] > 0
    with pytest.raises(RuntimeError, match="no question"):
        loop.run(client.ask("the time"))
    assert loop.run(client.ask("ping")) is True


def test_the_prefix_cache_can_be_emptied(loop, client):
    prompt = prompt_of(40, 77)

    def cached(id: str) -> int:
        return loop.run(collect(client, Generate(id, prompt, {"max_tokens": 1})))[0][0].num_cached_tokens

    assert (cached("c1"), cached("c2")) == (0, 36)
    loop.run(client.ask("reset_prefix_cache"))
    assert cached("c3") == 0


def test_what_the_engine_says_of_itself(client):
    facts = client.facts
    assert (facts["max_model_len"], facts["vocab_size"], facts["eos_token_ids"]) == (512, 260, [EOS])
    rows = {row["option"]: row for row in facts["options"]}
    assert (rows["backend"]["asked"], rows["backend"]["got"]) == ("auto", "cpu")
    assert (rows["num_pages"]["asked"], rows["num_pages"]["got"]) == (300, 300)
    assert all(row["why"] for row in rows.values()) and any("hot pages" in line for line in facts["memory"])


# ---- the process ends


@pytest.fixture
def own_client(loop, model_dir):
    client = EngineClient(EngineConfig.from_options(model=model_dir, **OPTIONS), log_level="error")
    loop.run(client.start())
    yield client
    loop.run(client.close())


def test_a_killed_engine_is_noticed_at_once_by_all_who_wait(loop, own_client):
    async def kill():
        client = own_client
        streams = [asyncio.create_task(collect(client, endless(f"k{i}"))) for i in range(10)]
        waiter = asyncio.create_task(client.wait_dead())
        while (await client.ask("stats"))["running"] < 8:
            await asyncio.sleep(0.001)
        os.kill(client.pid, signal.SIGSTOP)  # so that the question cannot be answered any more
        question = asyncio.create_task(client.ask("ping"))
        await asyncio.sleep(0.01)
        os.kill(client.pid, signal.SIGKILL)
        start = time.monotonic()
        results = await asyncio.wait_for(asyncio.gather(*streams, question, return_exceptions=True), 1.0)
        reason = await asyncio.wait_for(waiter, 1.0)
        return time.monotonic() - start, results, reason

    took, results, reason = loop.run(kill())
    assert took < 1.0 and reason == own_client.dead == "the engine process was killed by SIGKILL"
    assert all(isinstance(result, EngineDead) for result in results)
    with pytest.raises(EngineDead, match="SIGKILL"):
        loop.run(own_client.ask("ping"))
    with pytest.raises(EngineDead, match="SIGKILL"):
        loop.run(collect(own_client, endless("late")))


def test_signals_are_the_fronts_business(loop, own_client):
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(own_client.pid, number)
    assert len(ids_of(loop.run(collect(own_client, endless("calm", 20)))[0])) == 20


@pytest.mark.parametrize("drain_s", [20.0, 0.05])
def test_draining_finishes_what_runs_and_takes_nothing_new(loop, own_client, drain_s):
    async def drain():
        client = own_client
        running = asyncio.create_task(collect(client, endless("running")))
        while not (await client.ask("stats"))["running"]:
            await asyncio.sleep(0.001)
        closing = asyncio.create_task(client.close(drain_s))
        await asyncio.sleep(0)
        with pytest.raises(EngineDead, match="shutting down"):
            await collect(client, endless("new"))
        await closing
        return (await running)[0]

    deltas = loop.run(drain())
    whole = len(ids_of(deltas)) == 480
    assert deltas[-1].finish_reason == ("length" if whole else "abort")
    assert whole or drain_s < 1
    assert own_client.dead and own_client._process.returncode is not None


def test_the_engine_does_not_outlive_the_front(model_dir):
    code = (
        "import asyncio, sys\n"
        "from pagefold.core.config import EngineConfig\n"
        "from pagefold.server.client import EngineClient\n"
        "async def main():\n"
        f"    client = EngineClient(EngineConfig.from_options(model={model_dir!r}, **{OPTIONS!r}))\n"
        "    await client.start()\n"
        "    print(client.pid, flush=True)\n"
        "    await client.wait_dead()\n"
        "asyncio.run(main())\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    front = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env, text=True)
    assert front.stdout is not None
    pid = int(front.stdout.readline())
    front.kill()
    front.wait()
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and is_running(pid):
        time.sleep(0.01)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("options", "field"), [({"kv_format": "int99"}, "kv_format"), ({"model": "no/such"}, "model")])
def test_options_that_the_engine_refuses_name_the_field(loop, model_dir, options, field):
    client = EngineClient(EngineConfig.from_options(**{"model": model_dir} | OPTIONS | options), log_level="critical")
    with patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}), pytest.raises(InputError) as refused:
        loop.run(client.start())
    assert refused.value.field == field and client.dead


# ---- the loop, in this process


class FakeSocket:
    """What the front would say and hear."""

    def __init__(self):
        self.inbox: list[bytes] = []
        self.heard = []

    def poll(self, timeout=None):
        return len(self.inbox)

    def recv(self):
        return self.inbox.pop(0)

    def send(self, data):
        self.heard.append(decode_to_front(data))

    def say(self, *messages):
        self.inbox += [encode(message) for message in messages]


def turn(server: EngineServer) -> None:
    server._take_messages()
    server._add_compiled()
    if server.engine.has_work:
        server._step()


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer(), 260, [EOS])


@pytest.fixture
def served():
    socket = FakeSocket()
    return EngineServer(tiny_engine(), socket, None), socket  # type: ignore[arg-type]


def test_a_step_that_fails_ends_its_requests_with_an_error_and_the_loop_goes_on(served):
    server, socket = served
    socket.say(endless("a"), endless("b"))
    turn(server)
    with patch.object(server.engine.runner, "launch", side_effect=ZeroDivisionError("oh")):
        turn(server)
    ends = {delta.id: delta for message in socket.heard for delta in message.items if delta.last}
    assert set(ends) == {"a", "b"} and not server._open
    assert all(end.finish_reason == "abort" and "oh" in end.error for end in ends.values())
    assert_drained(server.engine)
    socket.say(endless("c", 3))
    for _ in range(4):
        turn(server)
    assert socket.heard[-1].items[-1].last and socket.heard[-1].items[-1].finish_reason == "length"
    assert server._counters.finished == {"error": 2, "length": 1}


def test_a_grammar_that_takes_too_long_is_refused_and_can_be_left(served, monkeypatch):
    server, socket = served
    server._compiler = type("Slow", (), {"submit": lambda *_: Future()})()  # type: ignore[assignment]
    slow = Generate("slow", [BOS], {"n": 2}, grammar=Grammar("regex", "a"))
    socket.say(slow)
    turn(server)
    assert server._compiling and not socket.heard
    socket.say(Abort(["slow", "unknown"]))
    turn(server)
    assert [(d.index, d.finish_reason, d.last) for d in socket.heard[0].items] == [
        (0, "abort", False),
        (1, "abort", True),
    ]
    socket.say(slow, Ask(1, "drain"))
    turn(server)
    monkeypatch.setattr(process, "COMPILE_S", 0.0)
    turn(server)
    assert isinstance(socket.heard[-1], Refused) and socket.heard[-1].field == "structured_outputs.regex"
    assert not server._compiling and not server.engine.has_work


def test_a_step_sends_one_message_with_what_is_new(served):
    server, socket = served
    socket.say(*(endless(str(i), 6) for i in range(3)))
    for _ in range(6):
        turn(server)
    assert all(isinstance(message, Deltas) for message in socket.heard) and len(socket.heard) == 6
    assert all(len(delta.token_ids) == 1 for message in socket.heard for delta in message.items)
    socket.say(Ask(7, "stats"))
    turn(server)
    answer = socket.heard[-1]
    assert isinstance(answer, Answer) and answer.seq == 7
    assert answer.value["tokens"] == {"prompt": 9, "cached": 0, "generated": 18}


def test_steps_waits_and_prefills_are_counted(served):
    """64 tokens a step: a prompt of 100 takes two."""
    server, socket = served
    before = time.perf_counter()
    socket.say(Generate("a", prompt_of(100, 1), {"n": 1, "max_tokens": 3, "ignore_eos": True}), endless("b", 2))
    for _ in range(10):
        turn(server)
    spent = time.perf_counter() - before
    deltas = {id: [d for m in socket.heard for d in m.items if d.id == id] for id in ("a", "b")}
    for first, *rest in deltas.values():
        assert 0 <= first.queue_s <= first.queue_s + first.prefill_s <= spent
        assert all(delta.queue_s is None is delta.prefill_s for delta in rest)
    assert deltas["a"][0].prefill_s > 0
    steps = engine_stats(server.engine, server._counters, 0)["step_tokens"]
    assert steps["sum"] == 100 + 2 + 3 + 1  # prompts, and all tokens generated but the last ones
    assert sum(steps["counts"]) == server.engine.scheduler.stats.steps
    assert steps["counts"][STEP_TOKENS.index(64)] >= 1


def test_compactions_are_timed_and_their_pages_counted():
    """Two requests share a prefix: the first to fold copies pages that the other one, or the cache, still needs."""
    engine = tiny_engine(num_pages=200, kv_eviction="recency", kv_evict_when="always")
    for id in ("a", "b"):
        engine.add(Request(id, tuple(prompt_of(40, 3)), SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)))
        engine.step()
    while engine.has_work:
        engine.step()
    counted = engine_stats(engine, Counters(), 0)["compaction"]
    stats = engine.scheduler.stats
    assert stats.folds >= counted["runs"] > 0 and counted["seconds"] > 0
    assert counted["pages_freed"] > 0
    assert 0 < counted["pages_copied"]


@settings(max_examples=25)
@given(st.data())
def test_whatever_happens_every_request_ends_once_and_nothing_is_held(compiler, data):
    """Requests come with and without grammars, leave at any moment, and steps fail."""
    socket = FakeSocket()
    server = EngineServer(tiny_engine(num_pages=60, plan_ahead=data.draw(st.booleans())), socket, compiler)  # type: ignore[arg-type]
    asked: list[Generate] = []
    for _ in range(data.draw(st.integers(5, 25))):
        match data.draw(st.sampled_from(["ask", "ask", "leave", "turn", "turn", "turn", "fail"])):
            case "ask":
                sampling = {"n": data.draw(st.integers(1, 2)), "max_tokens": data.draw(st.integers(0, 12)), "seed": 1}
                form = Grammar("regex", data.draw(st.sampled_from(["[ab]{3}", "("])))
                form = form if data.draw(st.booleans()) else None
                asked.append(Generate(f"{len(asked)}", [BOS, 5, 6], sampling, grammar=form))
                socket.say(asked[-1])
            case "leave" if asked:
                socket.say(Abort([data.draw(st.sampled_from(asked)).id]))
            case "fail":
                with patch.object(server.engine.scheduler, "update", side_effect=ArithmeticError):
                    turn(server)
            case _:
                turn(server)
    deadline = time.monotonic() + 20
    while (socket.inbox or server._compiling or server.engine.has_work) and time.monotonic() < deadline:
        turn(server)
    ends = {message.id: message for message in socket.heard if isinstance(message, Refused)}
    parts: dict[tuple[str, int], list[Delta]] = {}
    for delta in (delta for message in socket.heard if isinstance(message, Deltas) for delta in message.items):
        assert delta.id not in ends, "nothing comes after the last one"
        assert not any(past.finish_reason for past in parts.setdefault((delta.id, delta.index), []))
        parts[delta.id, delta.index].append(delta)
        if delta.last:
            ends[delta.id] = delta
    assert set(ends) == {request.id for request in asked}
    for request in asked:
        for i in range(request.sampling["n"] if isinstance(ends[request.id], Delta) else 0):
            deltas = parts[request.id, i]
            assert deltas[-1].finish_reason in ("stop", "length", "abort")
            if request.grammar and deltas[-1].finish_reason == "stop":
                assert re.fullmatch("[ab]{3}", text_of(deltas))
    if server.engine.manager.prefix:
        server.engine.manager.prefix.clear()
    assert not server._open and not server._compiling
    assert_drained(server.engine)


def test_a_model_without_a_tokenizer_keeps_to_no_grammar(served):
    server, socket = served
    socket.say(Generate("g", [BOS], {}, grammar=Grammar("json_object", "")))
    turn(server)
    assert (socket.heard[0].field, server.engine.has_work) == ("response_format", False)


def test_the_map_of_pages_tells_what_each_is_for():
    engine = tiny_engine(num_pages=120, kv_cold_format="fp32", kv_cold_after=8, page_size=4)
    prompt, manager = prompt_of(41, 3), engine.manager
    for id in ("first", "second"):
        engine.add(Request(id, tuple(prompt), SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)))
        engine.step()
    for _ in range(12):
        hot, cold = (np.frombuffer(tier["codes"], np.uint8) for tier in pool_map(engine))
        pools = manager.pools
        assert [len(hot), len(cold)] == [pool.num_pages - 1 for pool in pools]
        assert [(hot >= 2).sum(), (cold >= 2).sum()] == [pool.num_held for pool in pools]
        assert [(codes == 1).sum() for codes in (hot, cold)] == [pool.num_idle for pool in pools]
        folding = sum(len(kv.ticket.dst) for kv in manager.live if kv.ticket)
        assert folding <= (cold == 5).sum() and not (hot == 4).any() and not (cold == 2).any()
        engine.step()
    assert (cold == 4).any()
