"""`pagefold bench serve` against a stub server whose timings are known: every figure must be right."""

import asyncio
import json
import statistics
import threading
import time
from itertools import pairwise

import pytest

web = pytest.importorskip("aiohttp.web")

from pagefold.bench.serve import arrivals  # noqa: E402
from pagefold.bench.serve_load import ServeBench, make_sessions, warm_up_sessions  # noqa: E402
from pagefold.bench.serve_report import Sample, parse_goodput, summarise  # noqa: E402
from pagefold.cli import main  # noqa: E402
from pagefold.core.types import InputError  # noqa: E402

FIRST_S, GAP_S = 0.08, 0.02
SLACK_MS = 120  # between what the server did and what the client saw of it, on a machine with other work


class Stub:
    """Answers after `first_s` with a chunk every `gap_s`; `behave` may change an answer by its number."""

    def __init__(self):
        self.bodies, self.keys, self.running, self.most_running = [], [], 0, 0
        self.outputs, self.tokens_a_chunk, self.usage, self.behave = 5, 1, True, {}
        self.first_s, self.gap_s, self.after_s = FIRST_S, GAP_S, 0.0
        self.moments: list[list[float]] = []  # of each answer: begun, every output, finish reason

    async def models(self, request):
        return web.json_response({"data": [{"id": "stub"}]})

    async def answer(self, request):
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        behaviour = self.behave.get(number)
        if behaviour == "refuse":
            return web.json_response({"error": {"message": "the queue is full"}}, status=429)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        try:
            await self.write(stream, body, behaviour)
        finally:
            self.running -= 1
        return stream

    async def write(self, stream, body, behaviour):
        chat = "messages" in body
        send = lambda event: stream.write(b"data: " + json.dumps(event).encode() + b"\n\n")  # noqa: E731
        self.moments.append(moments := [time.perf_counter()])
        if chat:  # a role is no output
            await send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(self.first_s)
        for index in range(self.outputs):
            if index:
                await asyncio.sleep(self.gap_s)
            if index == 2 and behaviour == "break":
                return
            moments.append(time.perf_counter())
            await send({"choices": [{"index": 0, "delta": {"content": "w "}} if chat else {"index": 0, "text": "w "}]})
        moments.append(time.perf_counter())
        await send({"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "length"}]})
        await asyncio.sleep(self.after_s)  # what comes after the end of the answer counts for nothing
        if self.usage and body["stream_options"]["include_usage"]:
            usage = {"prompt_tokens": 7, "completion_tokens": self.outputs * self.tokens_a_chunk}
            usage["prompt_tokens_details"] = {"cached_tokens": 3}
            await send({"choices": [], "usage": usage | {"kv": {"tokens": 100, "rows_kept": 25.0, "compactions": 2}}})
        await stream.write(b"data: [DONE]\n\n")


@pytest.fixture
def stub():
    """A running stub; `stub.url` is where."""
    stub, loop, up = Stub(), asyncio.new_event_loop(), threading.Event()

    async def start():
        app = web.Application()
        app.router.add_get("/v1/models", stub.models)
        app.router.add_post("/v1/completions", stub.answer)
        app.router.add_post("/v1/chat/completions", stub.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        up.set()
        return runner

    def serve():
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert up.wait(10)
    yield stub
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def measure(stub, tmp_path, *flags: str) -> dict:
    path = tmp_path / "result.json"
    small = ["--num-prompts", "4", "--input-len", "6", "--num-warmups", "0"]
    assert main(["bench", "serve", "--base-url", stub.url, "--json", str(path), *small, *flags]) == 0
    return json.loads(path.read_text())


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_latencies_are_those_of_the_server(stub, tmp_path, endpoint):
    stub.first_s, stub.gap_s, stub.after_s = 0.4, 0.06, 0.4
    figures = measure(stub, tmp_path, "--endpoint", endpoint)
    first, last = ([1e3 * (times[i] - times[0]) for times in stub.moments] for i in (1, -1))
    gaps = [1e3 * (b - a) for times in stub.moments for a, b in pairwise(times[1:-1])]
    for which, of in (("mean", statistics.mean), ("median", statistics.median)):
        assert figures[f"{which}_ttft_ms"] == pytest.approx(of(first), abs=SLACK_MS)
        assert figures[f"{which}_e2el_ms"] == pytest.approx(of(last), abs=SLACK_MS)
        assert figures[f"{which}_itl_ms"] == pytest.approx(of(gaps), abs=20)
    assert figures["mean_tpot_ms"] == pytest.approx(statistics.mean(gaps), abs=20)
    assert min(first) <= figures["p99_ttft_ms"] <= max(first) + SLACK_MS
    assert (figures["completed"], figures["failed"], figures["model_id"]) == (4, 0, "stub")
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (28, 20)
    assert figures["output_throughput"] == pytest.approx(20 / figures["duration"])
    assert figures["total_token_throughput"] == pytest.approx(48 / figures["duration"])
    assert figures["request_throughput"] == pytest.approx(4 / figures["duration"])
    assert figures["max_concurrent_requests"] == 4
    assert figures["total_cached_tokens"] == 12 and figures["kv_rows_kept"] == 100


def test_several_tokens_a_chunk_part_itl_from_tpot(stub, tmp_path):
    stub.tokens_a_chunk = 4
    figures = measure(stub, tmp_path)
    assert figures["total_output_tokens"] == 80
    assert figures["mean_tpot_ms"] == pytest.approx(figures["mean_itl_ms"] * 4 / 19, rel=0.3)


def test_without_usage_outputs_and_sent_ids_are_counted(stub, tmp_path):
    stub.usage = False
    figures = measure(stub, tmp_path, "--random-prefix-len", "3")
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (4 * 9, 20)
    assert figures["tokens_counted_by"] == "outputs"


def test_failed_requests_are_told_and_stay_out_of_the_figures(stub, tmp_path, capsys):
    stub.behave = {1: "refuse", 2: "break"}
    figures = measure(stub, tmp_path, "--max-concurrency", "1")
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (2, 2, 10)
    told = capsys.readouterr().err
    assert "HTTP 429: the queue is full" in told and "without a finish reason" in told


def test_no_success_is_exit_code_1(stub, capsys):
    stub.behave = dict.fromkeys(range(2), "refuse")
    flags = ["--base-url", stub.url, "--num-prompts", "2", "--num-warmups", "0"]
    assert main(["bench", "serve", *flags]) == 1
    assert "Successful requests:                     0" in capsys.readouterr().out


def test_concurrency_is_capped(stub, tmp_path):
    figures = measure(stub, tmp_path, "--max-concurrency", "2", "--num-prompts", "6")
    assert stub.most_running == 2
    assert figures["duration"] > 3 * (FIRST_S + 4 * GAP_S)


def test_goodput_counts_what_keeps_every_limit(stub, tmp_path, capsys):
    assert measure(stub, tmp_path, "--goodput", "ttft:1")["request_goodput"] == 0
    figures = measure(stub, tmp_path, "--goodput", "ttft:500", "tpot:200")
    assert figures["request_goodput"] == figures["request_throughput"]
    assert "Request goodput (req/s):" in capsys.readouterr().out


def test_a_conversation_carries_the_answers_before_it(stub, tmp_path):
    flags = ["--dataset-name", "multi-turn", "--endpoint", "/v1/chat/completions", "--num-turns", "3"]
    figures = measure(stub, tmp_path, *flags, "--num-prompts", "2", "--max-concurrency", "1")
    assert figures["completed"] == 6
    first, second, third = (body["messages"] for body in stub.bodies[:3])
    assert [m["role"] for m in third] == ["user", "assistant"] * 2 + ["user"]
    assert second[:1] == first and third[:3] == second
    assert second[1] == {"role": "assistant", "content": "w " * 5}


def test_a_failed_turn_ends_its_conversation(stub, tmp_path):
    stub.behave = {1: "break"}
    flags = ["--dataset-name", "multi-turn", "--endpoint", "/v1/chat/completions", "--num-turns", "3"]
    figures = measure(stub, tmp_path, *flags, "--num-prompts", "1")
    assert (figures["completed"], figures["failed"]) == (1, 1)


def test_a_jsonl_file_is_sent_as_written_and_repeated(stub, tmp_path):
    work = tmp_path / "work.jsonl"
    work.write_text('{"prompt": "hello", "max_tokens": 3, "kv_budget": 64}\n\n{"prompt": [1, 2, 3]}\n')
    flags = ["--dataset-name", "jsonl", "--dataset-path", str(work), "--output-len", "9", "--max-concurrency", "1"]
    measure(stub, tmp_path, *flags, "--extra-body", '{"kv_eviction": "zipage"}', "--temperature", "0", "--ignore-eos")
    sent = [(b["prompt"], b["max_tokens"], b.get("kv_budget")) for b in stub.bodies]
    assert sent == [("hello", 3, 64), ([1, 2, 3], 9, None)] * 2
    assert all(b["kv_eviction"] == "zipage" and b["temperature"] == 0 and b["ignore_eos"] for b in stub.bodies)


def test_a_bad_line_is_named(tmp_path):
    work = tmp_path / "work.jsonl"
    work.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(InputError, match="line 2"):
        make_sessions(ServeBench(dataset_name="jsonl", dataset_path=str(work)))


def test_the_key_is_sent_and_never_printed(stub, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    figures = measure(stub, tmp_path)
    measure(stub, tmp_path, "--api-key", "given")
    assert stub.keys == ["Bearer from-environment"] * 4 + ["Bearer given"] * 4
    shown = capsys.readouterr()
    assert "from-environment" not in shown.out + shown.err + json.dumps(figures)


def test_a_failed_warm_up_or_a_missing_server_is_one_line(stub, capsys):
    stub.behave = {0: "refuse"}
    assert main(["bench", "serve", "--base-url", stub.url]) == 2
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9"]) == 2
    first, second = capsys.readouterr().err.strip().splitlines()
    assert "the queue is full" in first and "is the server up?" in second


def test_the_table_has_the_labels_that_scripts_look_for(stub, tmp_path, capsys):
    measure(stub, tmp_path, "--request-rate", "100", "--max-concurrency", "4")
    shown = capsys.readouterr().out
    for label in (
        "============ Serving Benchmark Result ============",
        "Successful requests:                     4",
        "Maximum request concurrency:             4",
        "Request rate configured (RPS):           100.00",
        "Benchmark duration (s): ",
        "Total input tokens: ",
        "Total generated tokens: ",
        "Request throughput (req/s): ",
        "Output token throughput (tok/s): ",
        "Total token throughput (tok/s): ",
        "---------------Time to First Token----------------",
        "-----Time per Output Token (excl. 1st token)------",
        "---------------Inter-token Latency----------------",
        "----------------End-to-end Latency----------------",
        *(f"{statistic} {name} (ms): " for statistic in ("Mean", "Median", "P99") for name in ("TTFT", "TPOT", "ITL")),
    ):
        assert label in shown, label
    assert "Rows a head kept of them (%):            25.00" in shown


def test_prompts_and_arrivals_follow_the_seed():
    bench = ServeBench(num_prompts=20, random_range_ratio=0.5, random_input_len=100, random_prefix_len=8)
    sessions = make_sessions(bench)
    assert sessions == make_sessions(bench) != make_sessions(ServeBench(num_prompts=20, seed=1))
    prompts = [session.turns[0].body["prompt"] for session in sessions]
    assert all(58 <= len(prompt) <= 158 for prompt in prompts) and len({len(p) for p in prompts}) > 5
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 1 and len({tuple(p[:16]) for p in prompts}) == 20
    warm_up = warm_up_sessions(bench)[0].turns[0].body["prompt"]
    assert warm_up[:8] != prompts[0][:8]


def test_poisson_arrivals_keep_their_rate():
    times = [time for time, _ in zip(arrivals(50.0, seed=3), range(4000), strict=False)]
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.1)  # exponential: as wide as its mean


def test_figures_of_hand_made_samples():
    """Two requests whose every moment is known, one of a single token."""
    chunk = {"completion_tokens": 3, "prompt_tokens": 10}
    long = Sample(10.0, times=[10.5, 10.7, 11.1], end=11.2, usage=chunk, done=True)
    short = Sample(10.1, times=[10.4], end=10.4, usage={"completion_tokens": 1, "prompt_tokens": 4}, done=True)
    facts = {"request_rate": 1.0, "max_concurrency": None}
    figures = summarise([long, short], 2.0, facts, {"ttft": 400.0, "tpot": 1e3})
    expected = {"mean_ttft_ms": 400, "mean_tpot_ms": 350, "mean_itl_ms": 300, "median_itl_ms": 300}
    expected |= {"mean_e2el_ms": 750, "request_goodput": 0.5, "output_throughput": 2, "total_token_throughput": 9}
    expected |= {"max_output_tokens_per_s": 3, "max_concurrent_requests": 2}
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    "options",
    [
        {"num_prompts": 0},
        {"random_range_ratio": 1.0},
        {"request_rate": 0.0},
        {"max_concurrency": 0},
        {"dataset_name": "sonnet"},
        {"dataset_name": "multi-turn"},
    ],
)
def test_options_out_of_range_are_refused_by_name(options):
    with pytest.raises(InputError):
        ServeBench(**options)


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "itl:5", "tpot:-1", "ttft:nan"])
def test_goodput_limits_must_be_sound(text):
    with pytest.raises(InputError, match="goodput"):
        parse_goodput([text])
