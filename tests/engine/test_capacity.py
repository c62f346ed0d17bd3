"""`bench capacity` finds how many users fit, and what it measures is what it says."""

import argparse
import json

import numpy as np
import pytest

from pagefold.bench import capacity, capacity_cli
from pagefold.bench.capacity import Capacity, Crowd, measure, run_format
from pagefold.bench.capacity_work import Growth
from pagefold.bench.growth import chosen_counts, grow, prompt_of
from pagefold.bench.peers import PeerHome
from pagefold.cli import main
from pagefold.core.types import InputError, Request
from pagefold.engine.scheduler import Stats
from pagefold.kv.bounds import fits_requests
from pagefold.kv.state import HOT
from tests.engine.tiny import assert_drained, drain, greedy, tiny_engine
from tests.engine.tiny import prompt_of as some_prompt
from tests.model_dir import write_model_dir

GROWTH = Growth(context=80, output_len=48, users=(1, 2), steps=4)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return str(write_model_dir(tmp_path_factory.mktemp("model")))


@pytest.fixture
def options(model_dir) -> dict:
    return {
        "model": model_dir,
        "dtype": "float32",
        "backend": "cpu",
        "page_size": 8,
        "num_pages": 32,
        "max_num_seqs": 8,
        "kv_swap_bytes": 0,
        "enable_prefix_caching": False,
    }


@pytest.mark.parametrize("format", ["fp64", "int4"])
@pytest.mark.parametrize(
    ("num_pages", "options"),
    [(100, {}), (33, {"kv_eviction": "zipage", "kv_budget": 12}), (60, {"kv_cold_format": "int4", "kv_cold_after": 8})],
    ids=["full", "zipage", "cold"],
)
def test_the_capacity_is_what_runs_to_its_end_without_a_preemption(num_pages, options, format):
    """And with one user more, somebody is preempted or has to wait for pages."""
    prompt_len, output_len = 30, 80
    options = {"kv_format": format, "num_pages": num_pages, "enable_prefix_caching": False, **options}
    engine = tiny_engine(**options)
    most = fits_requests(engine.manager.geometry, engine.policies.default, prompt_len, prompt_len + output_len - 1)
    assert 2 <= most < 8
    for users in (most, most + 1):
        engine.scheduler.stats = stats = Stats()
        for user in range(users):
            engine.add(Request(f"{user}", tuple(some_prompt(prompt_len, user)), greedy(output_len)))
            for _ in range(6):  # beyond its first fold
                engine.step()
        drain(engine)
        assert_drained(engine)
        clean = stats.preemptions == 0 and stats.peak_running == users
        assert clean == (users == most)


def test_every_count_up_to_the_capacity_is_measured(options):
    result = measure(options | {"kv_format": "fp32"}, GROWTH)
    assert result.clean and result.capacity == 3  # of 10 pages each, of 32
    assert [stage["users"] for stage in result.stages] == [1, 2, 3]
    assert result.bytes_per_token == 2 * 2 * 2 * 16 * 4 and result.pool_tokens == 256
    for stage in result.stages:
        assert len(stage["prefill_s"]) == stage["users"] and min(stage["prefill_s"]) > 0
        assert stage["preemptions"] == 0 and stage["steps"] == 4
        assert 0 < stage["latency_ms"] <= stage["latency_p99_ms"]
        assert stage["decode_tok_s"] == pytest.approx(1e3 * stage["users"] / stage["latency_ms"], rel=0.9)


def test_small_rows_let_more_users_in(options):
    del options["num_pages"]
    options |= {"kv_cache_memory_bytes": 210_000}
    growth = Growth(context=200, output_len=150, users=(1,), steps=2)
    found = [measure(options | {"kv_format": name}, growth).capacity for name in ("fp32", "bf16", "int4")]
    assert found == [2, 4, 8]


@pytest.mark.parametrize("layout", ["uniform", "by_layer"])
def test_a_cloned_prompt_has_the_same_bytes_on_pages_of_its_own(options, layout, monkeypatch):
    from pagefold.core.config import EngineConfig
    from pagefold.engine.build import build_engine
    from pagefold.kv.layout import HeadLayout

    if layout == "by_layer":
        two_groups = HeadLayout(np.array([[0, 0], [1, 1]], np.int32), np.array([[0, 1], [0, 1]], np.int32), np.ones(2))
        monkeypatch.setattr("pagefold.engine.build.build_layout", lambda *_: two_groups)
    monkeypatch.setattr(capacity, "CLONED_PAGES", 2)
    engine = build_engine(EngineConfig.from_options(**options | {"kv_format": "int4", "num_pages": 80}))
    crowd = Crowd(engine, Growth(context=80, output_len=48, clone_prompts=True))
    crowd.add(0)
    while not crowd.step():
        pass
    crowd.add(1)
    assert not engine.scheduler.waiting
    first, second = (seq.kv for seq in engine.scheduler.running)
    assert second.num_tokens == 31 and not set(first.pages[:, :4].ravel()) & set(second.pages[:, :4].ravel())
    store = engine.runner.kv.tiers[HOT]
    for name in ("k_data", "k_scale", "v_data", "v_scale"):
        for group in range(first.num_groups):
            ours, theirs = (store.planes[name][kv.pages[group, :4].tolist()].flatten(2) for kv in (first, second))
            assert (ours == theirs).all()
    assert sorted(crowd.step()) == [0, 1]
    crowd.leave()
    assert_drained(engine)


def test_cloning_asks_for_rows_that_stay(options):
    for moves in ({"kv_eviction": "zipage", "kv_window": 4}, {"kv_cold_format": "int4"}):
        with pytest.raises(InputError, match="clone_prompts"):
            measure(options | moves, Growth(80, 48, clone_prompts=True))


@pytest.mark.slow
def test_an_engine_that_fails_is_a_note(options):
    growth = Growth(context=400, output_len=48, users=(1,), steps=4)
    assert "no user of 400 tokens fits" in run_format(options | {"kv_format": "fp32"}, growth, 1).note
    assert "output_len: got 20" in run_format(options | {"kv_format": "fp32"}, Growth(80, 20, (1,), 30), 1).note


def test_counts_are_those_that_fit_and_the_most():
    assert chosen_counts((1, 2, 4, 8), 6) == [1, 2, 4, 6]
    assert chosen_counts((1, 2), 2) == [1, 2] and chosen_counts((3,), 0) == []


def test_growth_measures_what_its_users_get():
    """A user's first token comes after three steps; the arrival is not part of the decode."""
    waits, log = {}, []

    def step() -> list[int]:
        log.append(dict(waits))
        for user in waits:
            waits[user] -= 1
        return [user for user, left in waits.items() if left < 0]

    stages = grow(lambda user: waits.update({user: 2}), step, [1, 3], steps=5, preemptions=lambda: None)
    assert [stage["users"] for stage in stages] == [1, 3]
    assert [len(stage["prefill_s"]) for stage in stages] == [1, 3]
    assert len(log) == (3 + 8 + 5) + (2 * 3 + 8 + 5)

    waits = {}
    with pytest.raises(RuntimeError, match="0 of 1 users got a token"):
        grow(lambda user: None, iter([[0], *[[0]] * 8, []]).__next__, [1], steps=1, preemptions=lambda: None)


def test_prompts_are_fixed_and_differ():
    assert prompt_of(3, 50, 260) == prompt_of(3, 50, 260) != prompt_of(4, 50, 260)
    assert all(0 < token < 260 for token in prompt_of(1, 500, 260))


ARGV = ["bench", "capacity", "--dtype", "float32", "--page-size", "8", "--num-pages", "32", "--backend", "cpu"]
ARGV += ["--context-lens", "80", "--output-len", "48", "--steps", "3", "--users", "1", "--threads", "1"]


@pytest.mark.slow
def test_the_command_writes_figures_and_a_chart(model_dir, tmp_path, capsys):
    json_file, chart = tmp_path / "found.json", tmp_path / "chart.svg"
    argv = [*ARGV, model_dir, "--load-format", "dummy", "--formats", "fp32,k=fp8,v=int4", "--json", str(json_file)]
    assert main([*argv, "--chart", str(chart)]) == 0
    out = capsys.readouterr().out
    assert "k=fp8,v=int4" in out and "clean capacity" in out and "not measured: the weights are random" in out
    found = json.loads(json_file.read_text())["results"]
    assert [(r["format"], r["capacity"], r["clean"]) for r in found] == [("fp32", 3, True), ("k=fp8,v=int4", 3, True)]
    assert "<svg" in chart.read_text()


def test_quality_is_measured_where_weights_are_real(options):
    asked = []

    def quality(options, formats, context):
        asked.append((formats, context))
        return {format: {"KL": 0.01, "needles": "1 of 2"} for format in formats}

    results = [Capacity("pagefold", "int4", 80), Capacity("vllm", "fp8", 80)]
    console = argparse.Namespace(print=lambda *_: None)
    ours, theirs = capacity_cli._with_quality(console, options, ["int4"], [80], results, quality)  # type: ignore[arg-type]
    assert asked == [(["int4"], 80)] and ours.quality["KL"] == 0.01 and theirs.quality == {}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--formats", "int5"], ["formats", "int5", "known"]),
        (["--users", "1,x"], ["users", "1,x"]),
        (["--users", "0,1"], ["users", "got 0"]),
        (["--context-lens", "49"], ["context_lens", "got 49", ">= 50"]),
        (["--kv-format", "int4"], ["kv_format", "--formats"]),
        (["--steps", "1"], ["steps", "got 1"]),
    ],
    ids=" ".join,
)
def test_what_cannot_be_measured_is_refused_in_one_line(argv, words, model_dir, capsys):
    assert main([*ARGV, model_dir, *argv]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words)


FAKE_VLLM = """
from types import SimpleNamespace as Space

__version__ = "0.0.fake"
SamplingParams = Space


class Engine:
    def __init__(self, options):
        self.vllm_config = Space(cache_config=Space(num_gpu_blocks=25, block_size=16))
        self.model_config = Space(get_vocab_size=lambda: 260)
        self.left, self.given, self.options = {}, {}, options

    def add_request(self, name, prompt, sampling):
        assert len(prompt["prompt_token_ids"]) + sampling.max_tokens <= self.options["max_model_len"]
        self.left[name], self.given[name] = sampling.max_tokens, 0

    def has_unfinished_requests(self):
        return bool(self.left)

    def step(self):
        out = []
        for name in list(self.left):
            self.given[name] += 1
            self.left[name] -= 1
            if not self.left[name]:
                del self.left[name]
            out.append(Space(request_id=name, outputs=[Space(token_ids=[1] * self.given[name])]))
        return out


class LLM:
    def __init__(self, **options):
        assert options["kv_cache_dtype"] == "fp8" and options["max_num_seqs"] == 8
        self.llm_engine = Engine(options)
"""


def test_vllm_is_stepped_through_the_same_counts(options, tmp_path):
    package = tmp_path / "packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_VLLM)
    home = PeerHome(path=package.parent)
    result = capacity.run_vllm("fp8", options, GROWTH, tmp_path, home, "cuda", 1)
    assert result.note == "" and result.version == "0.0.fake" and result.capacity == 4  # of 5 blocks each, of 24
    assert [stage["users"] for stage in result.stages] == [1, 2, 4] and result.pool_tokens == 24 * 16
    assert result.clean and result.stages[0]["preemptions"] is None

    missing = capacity.run_vllm("fp8", options, GROWTH, tmp_path, PeerHome(path=tmp_path / "gone"), "cuda", 1)
    assert "no folder" in missing.note
