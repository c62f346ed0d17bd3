"""Answers under folding: every problem in every configuration once, budgets from lengths, figures that add up."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagefold.core.types import InputError
from pagefold.engine.build import Loaded
from pagefold.eval import chains
from pagefold.eval.answers import FULL, Answer, Samples, Task, Variant, engine_config, make_variants, run_answers
from pagefold.eval.answers_report import answers_table, draw_chart, kept, summarise, verdicts
from pagefold.eval.shown import model_name
from pagefold.eval.statistics import bootstrap, mcnemar, wilson
from tests.engine.tiny import tiny_loaded

OPTIONS = {"model": "tiny", "page_size": 4, "kv_window": 2, "kv_sink_tokens": 1, "num_pages": 900, "max_num_seqs": 16}
SCORERS = ("zipage", "snapkv", "recency", "random")


@pytest.fixture(scope="module")
def tiny() -> Loaded:
    return tiny_loaded()


def make_task(num: int = 3, max_tokens: int = 30, check=None) -> Task:
    draw = np.random.default_rng(0)
    prompts = [tuple(draw.integers(0, 256, 20 + 7 * i).tolist()) for i in range(num)]
    return Task("toy", {"num": num}, prompts, max_tokens, check or (lambda i, a: {"passed": a.token_ids[-1] % 2 == 0}))


def run(tiny, task, variants, path=None, **options):
    return run_answers(tiny, {**OPTIONS, **options}, task, variants, path, use_tqdm=False)


def test_every_problem_is_answered_once_in_every_configuration(tiny):
    asked = []
    task = make_task(check=lambda i, a: asked.append(i) or {"passed": True})
    variants = make_variants(SCORERS, ["1/2", "1/4"], ["int4"], ["uniform"])
    samples = run(tiny, task, variants)
    assert len(variants) == 1 + 8 + 1 + 8 and sorted(asked) == sorted([0, 1, 2] * len(variants))
    for variant in variants:
        for i, sample in enumerate(samples.of(variant.name, 3)):
            assert sample["prompt_tokens"] == len(task.prompts[i]) and sample["answer"]
            length = sum(samples.of(FULL, 3)[i][name] for name in ("prompt_tokens", "tokens"))
            share = {"1/2": 0.5, "1/4": 0.25}.get(variant.share)
            assert sample["budget"] == (share and round(length * share / 4) * 4)
            assert (sample["compactions"] > 0) == bool(variant.share)


def test_a_budget_of_the_whole_length_changes_no_answer(tiny):
    variants = make_variants(SCORERS, ["1", "1/4"])
    samples = run(tiny, make_task(), variants)
    full = [s["answer"] for s in samples.of(FULL, 3)]
    assert all([s["answer"] for s in samples.of(f"{scorer} 1", 3)] == full for scorer in SCORERS)
    assert any([s["answer"] for s in samples.of(f"{scorer} 1/4", 3)] != full for scorer in SCORERS)


def test_a_budget_is_never_below_what_is_protected(tiny):
    samples = run(tiny, make_task(), make_variants(["recency"], ["1/100"]), kv_window=4, kv_sink_tokens=4)
    assert [s["budget"] for s in samples.of("recency 1/100", 3)] == [12, 12, 12]


def test_a_rerun_continues_and_a_torn_line_is_done_again(tiny, tmp_path):
    path = tmp_path / "samples.jsonl"
    asked = []
    task = make_task(check=lambda i, a: asked.append(i) or {"passed": i == 0})
    first = run(tiny, task, make_variants(["recency"], ["1/2"]), path)
    whole = path.read_text()
    assert len(whole.splitlines()) == 1 + 6 and len(asked) == 6

    path.write_text(whole[:-5])  # the process died while it wrote
    again = run(tiny, task, make_variants(["recency", "random"], ["1/2"]), path)
    assert len(asked) == 6 + 1 + 3
    for name in (FULL, "recency 1/2"):
        assert again.of(name, 3) == first.of(name, 3)
    run(tiny, task, make_variants(["recency", "random"], ["1/2"]), path)
    assert len(asked) == 10


def test_samples_of_other_settings_are_refused(tiny, tmp_path):
    path = tmp_path / "samples.jsonl"
    run(tiny, make_task(), make_variants([], []), path)
    before = path.read_text()
    with pytest.raises(InputError, match=r"samples: .*another run, which differs in max_tokens, kv_window$"):
        run(tiny, make_task(max_tokens=20), make_variants([], []), path, kv_window=3)
    assert path.read_text() == before
    path.write_text("[1]\n[2]\n")
    with pytest.raises(InputError, match=r"samples: .*no samples of this command"):
        run(tiny, make_task(), make_variants([], []), path)


def test_the_engine_is_started_with_the_scorer_that_stores_the_most():
    variants = make_variants(["recency", "snapkv", "zipage:alpha=0.5", "random"], ["1/2"])
    assert engine_config(OPTIONS, variants).eviction.kv_eviction == "zipage:alpha=0.5"
    assert engine_config(OPTIONS, [Variant()]).eviction.kv_eviction == "none"
    with pytest.raises(InputError, match="scorers: "):
        make_variants(["nobody"], ["1/2"])
    with pytest.raises(InputError, match="budgets: got '2'"):
        make_variants(["random"], ["2"])


def test_a_layout_or_format_that_cannot_be_is_refused_before_any_work(tiny):
    task = make_task(check=lambda i, a: pytest.fail("a problem was answered"))
    for wrong, variants in (
        ("layout", make_variants(["recency"], ["1/2"], layouts=["clustered:profile=nowhere.npz"])),
        ("format", make_variants([], [], formats=["int3"])),
    ):
        with pytest.raises(InputError, match=f"kv_{wrong}"):
            run(tiny, task, variants)


# ---- figures


@given(st.integers(0, 60), st.integers(1, 60))
def test_wilson_holds_the_share_and_stays_a_share(passed, num):
    passed = min(passed, num)
    share, low, high = wilson(passed, num)
    assert share == passed / num and 0 <= low <= share + 1e-12 and share - 1e-12 <= high <= 1


def test_intervals_and_tests_are_the_textbooks():
    # Wilson for 8 of 10, and the binomial tail for 1 against 9
    assert wilson(8, 10) == pytest.approx([0.8, 0.4902, 0.9433], abs=1e-4)
    assert mcnemar(9, 1) == mcnemar(1, 9) == pytest.approx(2 * (1 + 10) / 1024)
    assert mcnemar(0, 0) == mcnemar(3, 3) == 1.0


def test_what_is_kept_is_paired():
    """A variant that fails where the full cache fails has kept everything, however few that are."""
    full = np.array([1, 0] * 50)
    assert kept(full, full) == [1, 1, 1]
    value, low, high = kept(full * ([1] * 80 + [0] * 20), full)
    assert value == pytest.approx(0.8) and 0.65 < low < 0.8 < high < 0.95
    assert kept(full, 0 * full) is None
    assert bootstrap(lambda n: n @ full / n.sum(1), 100)[0] == 0.5


def fill(samples: Samples, passed: dict[str, list[int]]) -> None:
    for name, marks in passed.items():
        for i, mark in enumerate(marks):
            sample = {
                "variant": name,
                "problem": i,
                "tokens": 10,
                "compactions": 1,
                "budget": None,
                "rows_kept": 10,
                "passed": bool(mark),
            }
            samples.add(sample)


def test_records_table_verdicts_and_chart(tmp_path):
    variants = make_variants(["zipage", "recency"], ["1/4"], ["int4"])
    samples = Samples(None, {})
    full = [1] * 36 + [0] * 4
    fill(samples, {FULL: full, "zipage 1/4": [1] * 34 + [0] * 5 + [1], "recency 1/4": [0] * 40, "full int4": full})
    records = summarise(samples, variants, 40)
    zipage = records[1]
    assert zipage["marks"]["passed"][0] == 35 / 40 and zipage["kept"][0] == 35 / 36
    assert (zipage["won"], zipage["lost"], zipage["p"]) == (1, 2, 1.0)
    assert verdicts(records) == ["budget 1/4: zipage beats recency (35 won, 0 lost, p 5.8e-11)"]
    assert answers_table("t", records).row_count == 4
    json.dumps(records)
    draw_chart("t", records, tmp_path / "a.svg")
    for name in ("zipage", "recency", "full int4"):
        assert name in (tmp_path / "a.svg").read_text()


def test_titles_name_a_models_file_without_its_folders(tmp_path):
    (tmp_path / "coder.gguf").touch()
    assert model_name(str(tmp_path / "coder.gguf")) == "coder.gguf"
    assert model_name("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"


def test_chains_are_judged_by_their_last_value_and_their_thought():
    task = chains.chains_task(2, 5, seed=3)
    programs = chains.draw_programs(2, 5, torch.Generator().manual_seed(3))
    right = chains.split_answer(programs)[1].tolist()
    assert task.check(0, Answer(right[0], "")) == {"passed": True, "thought": True}
    slip = [*right[0]]
    slip[6] = chains.VALUES + (slip[6] - chains.VALUES + 1) % 13
    assert task.check(0, Answer(slip, "")) == {"passed": True, "thought": False}
    assert task.check(0, Answer(right[0][:-1], "")) == {"passed": False, "thought": False}
    assert task.check(0, Answer(right[1], "")) == {"passed": False, "thought": False}
    assert task.max_tokens == 45 * 5 // 4
