"""What the evaluations promise: they measure the cache that serves, and a cache that lost nothing measures as full."""

import argparse
import io
import json

import numpy as np
import pytest
import torch
from rich.console import Console

from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError
from pagefold.engine.build import Loaded
from pagefold.eval import perplexity
from pagefold.eval.cli import FORMATS, SCORERS, add_parsers, draw_chart, engine_options, perplexity_table
from pagefold.eval.needle import CUE, QUESTION, make_needle, run_needle
from pagefold.eval.perplexity import load_records, make_variants, paired_gain, run_perplexity
from pagefold.eval.teacher import Comparison, Teacher, compare, log_probs
from pagefold.eval.texts import cut_windows, encode_text, load_text, parse_share, share_rows
from tests.engine.tiny import tiny_loaded, tiny_tokenizer, write_profile
from tests.models.test_decoder import run as run_dense

SIZE = 4
OPTIONS = {"page_size": SIZE, "kv_window": 2, "kv_sink_tokens": 1, "num_pages": 400}
FOLD = {"kv_buffer": SIZE, "kv_prefill_buffer": SIZE}


@pytest.fixture(scope="module")
def tiny() -> Loaded:
    return tiny_loaded()


def text(num: int) -> list[int]:
    return np.random.default_rng(0).integers(0, 256, num).tolist()


def measure(tiny, variants, num=64, window=32, path=None):
    return run_perplexity(tiny, OPTIONS, text(num), window, variants, path, use_tqdm=False)


def test_a_full_cache_predicts_as_the_dense_model_does(tiny):
    windows = [text(37), text(90)[50:]]
    hidden = Teacher(tiny, EngineConfig.from_options(**OPTIONS, max_num_batched_tokens=16)).read(windows)
    for window, rows in zip(windows, hidden, strict=True):
        dense = run_dense(tiny.decoder, torch.tensor(window), [len(window)])[:-1].log_softmax(-1)
        torch.testing.assert_close(log_probs(tiny.decoder, rows), dense)


def test_a_folded_cache_is_folded_while_the_text_is_read(tiny):
    """Nothing differs up to the first fold; the token after it is predicted without what was dropped."""
    window, budget = text(32), 2 * SIZE
    full = Teacher(tiny, EngineConfig.from_options(**OPTIONS)).read([window])[0]
    config = EngineConfig.from_options(**OPTIONS, **FOLD, kv_eviction="recency", kv_budget=budget)
    folded = Teacher(tiny, config).read([window])[0]
    differs = (full - folded).abs().amax(-1) > 1e-6
    first_fold = budget + SIZE
    assert not differs[:first_fold].any() and differs[first_fold:].all()


def test_scores_are_those_of_the_distributions(tiny):
    window = text(20)
    full, other = torch.randn(2, 19, 64, dtype=torch.float64)
    got = compare(tiny.decoder, full, other, window)
    p, q = log_probs(tiny.decoder, full), log_probs(tiny.decoder, other)
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    np.testing.assert_allclose(got.kl, kl.numpy(), rtol=1e-5)
    np.testing.assert_allclose(got.nll, [-q[i, token] for i, token in enumerate(window[1:])], rtol=1e-5)
    np.testing.assert_array_equal(got.agree, (p.argmax(-1) == q.argmax(-1)).numpy())


@pytest.mark.parametrize("scorer", ["zipage", "snapkv", "recency", "random"])
def test_a_budget_of_the_whole_window_costs_nothing(tiny, scorer):
    full, whole = measure(tiny, make_variants([], [scorer], ["1"], 32, SIZE, SIZE))
    assert full["overall"]["kl"][0] == 0
    assert whole["overall"]["kl_p99"][0] == pytest.approx(0, abs=1e-9)
    assert whole["overall"]["agree"] == [1, 1, 1]
    assert whole["overall"]["perplexity"] == pytest.approx(full["overall"]["perplexity"])


def test_smaller_budgets_and_formats_cost_more(tiny):
    variants = make_variants(["fp64", "fp8", "int4"], ["recency"], ["3/4", "1/2", "1/4"], 32, SIZE, SIZE)
    _, same, fp8, int4, *budgets = (record["overall"]["kl"][0] for record in measure(tiny, variants))
    assert same == 0 and 0 < fp8 < int4
    assert 0 < budgets[0] < budgets[1] < budgets[2]


def test_finished_configurations_are_not_measured_again(tiny, tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    variants = make_variants([], ["recency"], ["1/2", "1/4"], 32, SIZE, SIZE)
    first = measure(tiny, variants[:2], path=path)
    read = []
    real = perplexity._read
    monkeypatch.setattr(perplexity, "_read", lambda *args: read.append(args[3]) or real(*args))

    again = measure(tiny, variants, path=path)
    assert read == ["full", "recency 1/4"]
    assert again[:2] == first and load_records(path) == again
    assert measure(tiny, variants, path=path) == again and len(read) == 2
    measure(tiny, variants, num=60, path=path)  # another text
    assert len(read) == 5


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([1]))
    with pytest.raises(InputError, match="json"):
        load_records(tmp_path / "a.json")


def record(name: str, kl: list[float]):
    settings = {"kv_eviction": name, "kv_budget": 8}
    return {"name": f"{name} 1/2", "share": "1/2", "settings": settings, "blocks": {"tokens": [10] * len(kl), "kl": kl}}


def test_verdicts_compare_token_by_token():
    """A difference that is the same in every block is sure, however much the blocks differ among themselves."""
    base = np.random.default_rng(0).uniform(1, 100, 20)
    better, worse, noise = base - 1, base, base + np.random.default_rng(1).normal(0, 9, 20)
    assert paired_gain(record("a", better), record("b", worse)) == pytest.approx([0.1, 0.1, 0.1])
    (line,) = perplexity.verdicts([record("snapkv", better), record("recency", worse)])
    assert "? yes:" in line and "snapkv beats recency" in line
    (line,) = perplexity.verdicts([record("snapkv", noise), record("recency", worse), record("random", better - 9)])
    assert "? no:" in line and "snapkv ties with recency" in line and "snapkv loses to random" in line


def test_layouts_are_compared_with_the_common_one(tiny, tmp_path):
    """Each scorer at each budget again in each layout, with the same rows; the same layout changes nothing."""
    layout = f"clustered:profile={write_profile(tmp_path / 'p.npz')},heads_per_page=1"
    variants = make_variants([], ["recency", "random"], ["1/2"], 32, SIZE, SIZE, [layout, "uniform"])
    full, *folded = measure(tiny, variants)
    assert [r["settings"].get("kv_layout") for r in folded] == [None, None, layout, layout, "uniform", "uniform"]
    assert {r["settings"]["kv_budget"] for r in folded} == {16}
    common, clustered, same = (r["overall"]["kl"][0] for r in folded[::2])
    assert common == same != clustered
    lines = perplexity.verdicts([full, *folded[:4]])
    assert len(lines) == 1 and lines[0].startswith(f"{layout} at 1/2, against uniform: recency ")
    assert "random" in lines[0]


def test_intervals_hold_their_value_and_narrow_with_the_text():
    draw = np.random.default_rng(0)

    def interval(num):
        rows = [Comparison(*draw.exponential(1, (3, 2048))) for _ in range(num)]
        return perplexity.summarise(rows)["overall"]["kl"]

    few, many = interval(1), interval(16)
    for value, low, high in (few, many):
        assert low < value < high
    assert many[2] - many[1] < 0.5 * (few[2] - few[1])


def test_budgets_are_whole_pages():
    shares = [parse_share(text, "budgets") for text in ("1/2", "0.25", "1/3", "1/1000", "1")]
    assert [share_rows(2048, share, 32) for share in shares] == [1024, 512, 672, 32, 2048]
    for text in ("0", "2", "half", "1/0", "-1/2"):
        with pytest.raises(InputError, match="budgets"):
            parse_share(text, "budgets")


def test_windows_cover_the_text_once():
    ids = list(range(10))
    assert cut_windows(ids, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert cut_windows(ids[:9], 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cut_windows(ids[:5], 4, [99]) == [[99, 0, 1, 2], [99, 3, 4]]


def test_lists_may_hold_specs_with_options():
    assert SCORERS("zipage:lam=0.2,tau=0.4,snapkv") == ["zipage:lam=0.2,tau=0.4", "snapkv"]
    assert FORMATS("fp32,k=int4,v=fp8,bf16") == ["fp32", "k=int4,v=fp8", "bf16"]
    assert SCORERS("") == []


def test_results_are_shown(tiny, tmp_path):
    records = measure(tiny, make_variants(["int4"], ["snapkv", "recency"], ["1/2"], 32, SIZE, SIZE))
    console = Console(record=True, width=160, file=io.StringIO())
    console.print(perplexity_table(records, "overall", "all"))
    shown = console.export_text()
    assert all(record["name"] in shown for record in records) and "16" in shown
    draw_chart(records, tmp_path / "chart.svg")
    assert (tmp_path / "chart.svg").stat().st_size > 1000


def test_commands_take_engine_options():
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers())
    for words in (
        "eval perplexity tiny --kv-window 8 --scorers zipage:lam=0.5,tau=1,recency",
        "eval needle tiny --kv-window 8 --lengths 512",
        "profile tiny --kv-window 8 --texts a b --budget 64 --out c.npz",
    ):
        args = parser.parse_args(words.split())
        assert callable(args.func) and engine_options(args) == {"model": "tiny", "kv_window": 8}


def test_the_default_text_is_prose():
    prose = load_text()
    assert prose.startswith("Persuasion\n\nby\n\nJane Austen") and 100_000 < len(prose) < 110_000
    with pytest.raises(InputError, match="nowhere"):
        load_text("nowhere.txt")


# ---- needle

TOKENIZER = tiny_tokenizer()
PROSE = encode_text(TOKENIZER, load_text()[1000:4000])


def test_a_needle_lies_where_it_should():
    """At the sentence end nearest to its depth, with the question behind the prose and the cue behind the body."""
    for depth in (0.0, 0.5, 1.0):
        needle = make_needle(TOKENIZER, PROSE, 512, depth, 0)
        prompt = TOKENIZER.decode(needle.prompt)
        sentence = f" The pass key is {needle.key}. Remember it. {needle.key} is the pass key."
        assert len(needle.prompt) == 512 + len(CUE) and prompt.endswith(QUESTION + CUE)
        assert prompt.count(sentence) == 1 and prompt.count(needle.key) == 2
        before, after = prompt.removesuffix(QUESTION + CUE).split(sentence)
        prose = before + after
        assert prose in load_text()
        ends = [0, len(prose), *(i + 1 for i, char in enumerate(prose) if char == ".")]
        assert abs(len(before) - depth * len(prose)) == min(abs(i - depth * len(prose)) for i in ends)


def test_needles_are_the_same_every_time_and_differ_from_one_another():
    make = lambda *args: make_needle(TOKENIZER, PROSE, *args)  # noqa: E731
    assert make(512, 0.5, 1) == make(512, 0.5, 1)
    assert len({n.key for n in (make(512, 0.5, 1), make(512, 0.5, 2), make(512, 0.1, 1), make(516, 0.5, 1))}) == 4
    with pytest.raises(InputError, match="lengths"):
        make(80, 0.5, 0)


def test_needles_are_searched_in_a_folded_cache(monkeypatch):
    """Every prompt is folded once, at its body's end; a model of random weights finds nothing."""
    from pagefold.eval import needle

    engines = []
    real = needle.build_engine
    monkeypatch.setattr(needle, "build_engine", lambda *args: engines.append(real(*args)) or engines[-1])
    loaded = tiny_loaded()
    options = {**OPTIONS, "kv_buffer": 32, "num_pages": 2000, "kv_eviction": "recency"}
    found = run_needle(loaded, options, PROSE, [160, 192], [0.2, 0.8], 2, use_tqdm=False, share="1/2")
    assert found == {160: {0.2: 0, 0.8: 0}, 192: {0.2: 0, 0.8: 0}}
    assert [e.scheduler.stats.folds for e in engines] == [4, 4]
    assert [e.config.eviction.kv_budget for e in engines] == [80, 96]
    with pytest.raises(InputError, match="multiple of kv_buffer"):
        run_needle(loaded, options, PROSE, [164], [0.2], 1, use_tqdm=False)
