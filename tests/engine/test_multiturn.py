"""`pagefold bench multiturn`: the same chats for every engine, figures that add up, and the gain of kept turns."""

import hashlib
import json
from dataclasses import replace
from itertools import count

import pytest

from pagefold.bench import multiturn, peers
from pagefold.bench.chats import parse_span, random_chats, read_chats
from pagefold.bench.multiturn import rounds_of
from pagefold.bench.peers import PeerHome
from pagefold.bench.turns import Chats, Progress, run_chats
from pagefold.cli import main
from pagefold.core.types import InputError
from tests.engine.tiny import tiny_tokenizer
from tests.model_dir import write_model_dir

KEPT = {"kv_eviction": "snapkv", "kv_budget_ratio": 0.25, "kv_prefill_buffer": 32, "kv_window": 8}


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> dict:
    model = str(write_model_dir(tmp_path_factory.mktemp("model")))
    return {"model": model, "dtype": "float32", "page_size": 16, "max_num_batched_tokens": 256}


# ---- work


def test_the_default_chats_are_what_published_figures_are_taken_on():
    chats = random_chats()
    assert (len(chats.turns), chats.num_rounds, chats.output_len) == (48, 4, 256)
    assert sum(len(turn) for turns in chats.turns for turn in turns) == 985_999
    by_rounds = [list(turns) for turns in zip(*chats.turns, strict=True)]
    assert hashlib.sha256(json.dumps(by_rounds).encode()).hexdigest()[:16] == "91bfc49285bfc050"


def test_chats_come_from_a_file_too(tmp_path):
    path, tokenizer = tmp_path / "chats.jsonl", tiny_tokenizer()
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "no"}, {"role": "user", "content": "c"}]
    path.write_text(json.dumps({"turns": ["ab", [7, 8]]}) + "\n" + json.dumps({"messages": talk}) + "\n")
    ids = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    chats = read_chats(path, tokenizer, 9)
    assert chats.turns == [[ids("ab"), [7, 8]], [ids("ab"), ids("c")]] and chats.max_len == 4 + 2 * 9
    for text in ('{"turns": []}', '{"prompt": "a"}', '{"turns": [[]]}', '{"turns": [["a"]]}'):
        path.write_text(text)
        with pytest.raises(InputError, match="line 1"):
            read_chats(path, tokenizer, 9)


def test_lengths_are_a_number_or_a_range():
    assert parse_span("first_len", "7") == 7 and parse_span("first_len", "7:9") == (7, 9)
    for text in ("", "a", "9:7", "0", "1:2:3"):
        with pytest.raises(InputError, match="first_len"):
            parse_span("first_len", text)


class Echo:
    """Answers with the last token of a history, a token a step, and notes what it was asked."""

    def __init__(self, output_len: int):
        self.asked: dict[str, list[int]] = {}
        self.answers: dict[str, list[int]] = {}
        self.output_len = output_len

    def add(self, id: str, prompt: list[int]) -> None:
        self.asked[id], self.answers[id] = prompt, []

    def step(self) -> list[Progress]:
        done = []
        for id, ids in list(self.answers.items()):
            ids.append(self.asked[id][-1])
            if len(ids) == self.output_len:
                del self.answers[id]
            done.append(Progress(id, ids, len(ids) == self.output_len, len(self.asked[id]) // 2))
        return done


@pytest.mark.parametrize("think_s", [None, 0.0, 0.002])
def test_each_turn_submits_the_whole_history(think_s):
    chats = Chats([[[1, 2], [3]], [[4], [5, 6], [7]]], output_len=2, think_s=think_s)
    engine = Echo(2)
    answers = run_chats(chats, engine.add, engine.step)
    assert engine.asked["0.1"] == [1, 2, 2, 2, 3] and engine.asked["1.2"] == [4, 4, 4, 5, 6, 6, 6, 7]
    assert len(answers) == 5 and all(a.asked_s <= a.first_s <= a.last_s and a.output_len == 2 for a in answers)
    if think_s is None:  # no turn before all answers to the one before
        for turn in (1, 2):
            ended = max(a.last_s for a in answers if a.turn == turn - 1)
            assert min(a.asked_s for a in answers if a.turn == turn) >= ended
    rounds = rounds_of(answers)
    assert [r.prompt_tokens for r in rounds] == [3, 5 + 5, 8] and rounds[2].cached_tokens == 4
    assert all(r.ttft_median_s <= r.ttft_p99_s <= r.wall_s for r in rounds)


# ---- engines


def test_kept_turns_compute_a_fraction_of_what_full_and_anew_compute(options):
    """Six chats of three turns in a pool that holds two of them in full."""
    chats = random_chats(6, 3, 256, (20, 30), 16, largest_id=255)
    pool = {"num_pages": 2 * 26, "kv_keep_bytes": 1 << 22, "kv_budget": 64}
    ways = {"kept": KEPT, "full": KEPT | multiturn.RIVALS["full"], "anew": KEPT | multiturn.RIVALS["anew"]}
    results, computed = {}, {}
    for name, way in ways.items():
        own, _ = multiturn.engine_options(options | pool | way, chats)
        results[name] = multiturn.measure(name, own, chats, (1, 30))
        assert results[name].ok, results[name].note
        computed[name] = [r.prompt_tokens - r.cached_tokens for r in results[name].rounds[1:]]
    kept = results["kept"]
    assert kept.ours["resumed"] == 12 and kept.preemptions == 0
    assert all(ours < 6 * (30 + 16 + 1 + 16) for ours in computed["kept"])
    assert sum(computed["kept"]) * 4 < min(sum(computed["full"]), sum(computed["anew"]))
    assert kept.ours["peak_running"] > results["full"].ours["peak_running"]
    assert kept.ours["rows_kept"] < 0.5 * kept.ours["rows_seen"]
    assert 0 < kept.ours["folding_s"] < kept.rounds[0].wall_s and results["full"].ours["folding_share"] == 0
    assert kept.ours["folding_share"] == pytest.approx(kept.ours["folding_s"] / kept.rounds[0].wall_s)


@pytest.mark.parametrize("first_len", [1600, 1590], ids=["whole pieces", "an unfolded rest"])
def test_pool_use_after_folding_is_what_was_reserved(options, tmp_path, first_len):
    """Tangram P5 and P9: one token and 1,000 tokens after folding, a request holds what it was promised, or the page
    less that its next tokens will open. Folding is over when the last piece of the prompt is folded too."""
    model = write_model_dir(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    chats = random_chats(1, 1, first_len, 1, 4, largest_id=255)
    own, _ = multiturn.engine_options(options | KEPT | {"model": str(model), "num_pages": 400}, chats)
    footprint = multiturn.measure("kept", own, chats).ours["footprint"]
    assert footprint["reserved"] == (400 + 16) // 16 and set(footprint["held"]) == {"1", "1000"}
    assert all(footprint["reserved"] - 1 <= held <= footprint["reserved"] for held in footprint["held"].values())


def test_the_command_writes_figures_and_a_picture(options, tmp_path, capsys):
    chats, figures, picture = tmp_path / "chats.jsonl", tmp_path / "out.json", tmp_path / "out.png"
    chats.write_text("\n".join(json.dumps({"turns": [[i] * 60, [i] * 9]}) for i in range(3)))
    argv = ["bench", "multiturn", options["model"], "--dataset", str(chats), "--output-len", "20", "--page-size", "16"]
    argv += [
        "--kv-eviction",
        "recency",
        "--kv-budget",
        "32",
        "--num-pages",
        "40",
        "--against",
        "full",
        "--threads",
        "1",
    ]
    argv += ["--peer", "vllm", "--peer-python", str(tmp_path / "none"), "--dtype", "float32"]
    assert main([*argv, "--json", str(figures), "--chart", str(picture)]) == 0
    report = json.loads(figures.read_text())
    kept, full, vllm = report["results"]
    assert kept["ours"]["resumed"] == 3 and full["ours"]["resumed"] == 0 and "no interpreter" in vllm["note"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "recency 32" in out and "full" in out and "no interpreter" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--sessions", "0"], "sessions: got 0"),
        (["--first-len", "9:7"], "first_len"),
        (["--think-time", "-1"], "think_time"),
        (["--dataset", "x.jsonl", "--turns", "3"], "turns"),
        (["--peer-options", "[1]"], "JSON object"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(argv, words, options, capsys):
    assert main(["bench", "multiturn", options["model"], *argv]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error


@pytest.mark.smollm2
@pytest.mark.slow
def test_smollm2_on_a_cpu_shows_the_gain(smollm2, tmp_path):
    figures = tmp_path / "out.json"
    argv = ["bench", "multiturn", "smollm2", "--sessions", "5", "--turns", "2", "--output-len", "8"]
    argv += ["--first-len", "192", "--next-len", "16", "--against", "full", "--threads", "1", "--page-size", "16"]
    argv += ["--kv-eviction", "snapkv", "--kv-budget-ratio", "0.25", "--kv-prefill-buffer", "64"]
    argv += ["--kv-cache-memory-bytes", "20000000", "--kv-keep-bytes", "20000000", "--max-model-len", "256"]
    assert main([*argv, "--json", str(figures)]) == 0
    kept, full = json.loads(figures.read_text())["results"]
    computed = lambda result: sum(r["prompt_tokens"] - r["cached_tokens"] for r in result["rounds"][1:])  # noqa: E731
    assert 4 * computed(kept) < computed(full)


# ---- vLLM's side

FAKE_VLLM = """
from types import SimpleNamespace as Space

__version__ = "0.0.fake"

class SamplingParams:
    def __init__(self, **how):
        self.how = how

class LLM:
    def __init__(self, **options):
        assert options["enable_prefix_caching"] and options["skip_tokenizer_init"], options
        self.options, self.running, self.llm_engine = options, {}, self

    def reset_prefix_cache(self):
        assert not self.running

    def add_request(self, id, prompt, params):
        assert len(prompt["prompt_token_ids"]) + params.how["max_tokens"] <= self.options["max_model_len"]
        self.running[id] = prompt["prompt_token_ids"], params.how["max_tokens"], []

    def step(self):
        out = []
        for id, (prompt, most, ids) in list(self.running.items()):
            ids.append(self.options["seed"])
            if len(ids) == most:
                del self.running[id]
            facts = {"finished": len(ids) == most, "num_cached_tokens": len(prompt) // 2}
            out.append(Space(request_id=id, outputs=[Space(token_ids=ids)], **facts))
        return out
"""


def test_vllm_is_run_on_the_same_chats_with_the_same_memory(options, tmp_path):
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    chats = random_chats(3, 3, 12, 5, 4, largest_id=255)
    given, dtype = multiturn.engine_options(options | {"num_pages": 40}, chats)
    result = multiturn.run_vllm(chats, given, dtype, PeerHome(path=tmp_path), 1, {"seed": 9})
    assert result.ok, result.note
    assert result.version == "0.0.fake" and [r.prompt_tokens for r in result.rounds] == [36, 3 * 21, 3 * 30]
    assert result.rounds[1].cached_tokens == 30 and result.tok_s > 0
    assert peers.run_chats_on_vllm({}, PeerHome(path=tmp_path / "gone"), "cpu", 1)["note"].startswith("no folder")


def test_an_answer_of_the_wrong_length_fails_the_run(options, monkeypatch):
    numbers = count()
    run = multiturn.run_chats

    def cut(*args):
        answers = run(*args)
        return [replace(a, output_len=a.output_len - (next(numbers) == 1)) for a in answers]

    monkeypatch.setattr(multiturn, "run_chats", cut)
    chats = random_chats(1, 1, 12, 5, 4, largest_id=255)
    own, _ = multiturn.engine_options(options | {"num_pages": 40}, chats)
    assert "got 3 tokens" in multiturn.measure("x", own, chats).note
