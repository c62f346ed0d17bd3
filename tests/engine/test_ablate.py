"""An ablation takes one part away at a time, a sweep changes one length; what cannot be compared says so."""

import dataclasses
import json

import pytest

from pagefold.bench import ablate, measure, sweep, throughput
from pagefold.bench.peers import Workload
from pagefold.bench.workloads import Case, random_workload, sampled_workload
from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError
from tests.model_dir import write_model_dir


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return str(write_model_dir(tmp_path_factory.mktemp("model")))


@pytest.fixture
def options(model_dir) -> dict:
    shared = {"model": model_dir, "dtype": "float32", "backend": "cpu", "page_size": 16, "num_pages": 64}
    return shared | {"kv_swap_bytes": 0, "kv_budget": 32, "kv_window": 8}


@pytest.fixture
def in_this_process(monkeypatch):
    """Engines of a case are measured without a process of their own."""
    run = lambda name, options, work, threads: measure.measure(name, options, work)  # noqa: E731
    monkeypatch.setattr(throughput, "run_engine", run)


def ablated(given: dict, device: str = "cpu", **work) -> ablate.Ablation:
    case = Case("t", Workload(**work or {"prompts": [[1, 2]] * 5, "output_lens": [4] * 5}), "float32", {"one": given})
    return ablate.ablation_of(dataclasses.replace(case, device=device), given)


def test_each_row_of_an_ablation_differs_from_the_folded_one_in_one_option():
    case = ablated({"model": "m", "kv_budget": 64}, "cuda").case
    rows = case.engines
    assert case.peer_options == {"enable_prefix_caching": True}
    folded = rows.pop("folded")
    assert folded["kv_lag"] == 8 and folded["max_num_seqs"] == 5 and folded["enable_prefix_caching"]
    changed = {name: {k: v for k, v in row.items() if folded.get(k) != v} for name, row in rows.items()}
    assert changed == {
        "full cache": {"kv_eviction": "none"},
        "constrained scheduling": {"kv_window_lending": "for-life"},
        "synchronous compaction": {"kv_lag": 0},
        "no prefix cache": {"enable_prefix_caching": False},
        "full redundancy": {"kv_eviction": "zipage:redundancy=full"},
        "no redundancy": {"kv_eviction": "zipage:redundancy=none"},
        "no global score": {"kv_eviction": "zipage:alpha=0.0"},
        "no weights by values": {"kv_eviction": "zipage:values=False"},
    }
    for options in (folded, *rows.values()):
        EngineConfig.from_options(**options)


@pytest.mark.parametrize(
    ("given", "device", "name", "reason"),
    [
        ({}, "cpu", "asynchronous compaction", "no second stream"),
        ({"kv_window": 128}, "cuda", "asynchronous compaction", "no token of lag"),
        (
            {"kv_window": 22, "kv_window_stride": 3, "kv_buffer": 64},
            "cuda",
            "asynchronous compaction",
            "no token of lag",
        ),
        ({"kv_eviction": "recency"}, "cuda", "constrained scheduling", "looks at no queries"),
        ({"kv_eviction": "snapkv:kernel=3"}, "cuda", "no global score", "snapkv has no option alpha"),
    ],
)
def test_a_row_that_cannot_be_says_why(given, device, name, reason):
    ablation = ablated(given, device)
    assert reason in ablation.absent[name] and name not in ablation.case.engines
    table = ablate.ablation_table(ablation, [measure.EngineResult("full cache", note="failed")], 1)
    assert any(reason in str(cell) for cell in table.columns[-1].cells)


def test_the_lag_is_what_the_period_of_the_device_leaves_a_window():
    for given, lag in (({}, 8), ({"kv_window_stride": 8}, 7), ({"kv_window": 16, "kv_buffer": 32}, 8)):
        assert ablated(given, "cuda").case.engines["folded"]["kv_lag"] == lag


def test_options_of_a_spec_are_kept():
    rows = ablated({"kv_eviction": "zipage:block=64,redundancy=none"}, "cuda").case.engines
    assert rows["full redundancy"]["kv_eviction"] == "zipage:block=64,redundancy=full"
    assert rows["lightning redundancy"]["kv_eviction"] == "zipage:block=64,redundancy=lightning"
    assert "no redundancy" not in rows


@pytest.mark.parametrize(
    ("given", "device", "field"),
    [
        ({"kv_eviction": "none"}, "cpu", "kv_eviction"),
        ({"enable_prefix_caching": False}, "cpu", "enable_prefix_caching"),
        ({"kv_window_lending": "for-life"}, "cpu", "kv_window_lending"),
        ({"kv_lag": 0}, "cuda", "kv_lag"),
        ({"kv_eviction": "zipage:redundancy=some"}, "cpu", "kv_eviction"),
    ],
)
def test_what_an_ablation_compares_cannot_be_asked_for(given, device, field):
    with pytest.raises(InputError, match=field):
        ablated(given, device)


def test_an_ablation_runs_its_rows_and_writes_them(options, in_this_process, tmp_path, capsys):
    given = options | {"num_pages": 20, "kv_window_slots": 2, "kv_eviction": "snapkv"}
    work = sampled_workload(random_workload(4, 40, 60, 256), 2)
    case = Case("t", work, "float32", {"one": given})
    paths = [tmp_path / name for name in ("rows.json", "rows.png")]
    assert ablate.run_ablation(ablate.ablation_of(case, given), {}, 1, *map(str, paths))
    report, shown = json.loads(paths[0].read_text()), capsys.readouterr().out
    rows = {row["name"]: row for row in report["pagefold"]}
    assert all(name in shown for name in [*rows, *report["absent"]])
    assert rows["full cache"]["folds"] == 0 and rows["full cache"]["preemptions"] > 0
    assert all(row["folds"] > 0 and row["compaction_s"] > 0 for name, row in rows.items() if name != "full cache")
    assert rows["constrained scheduling"]["peak_running"] == 2 < rows["folded"]["peak_running"]
    assert report["ratio_to_first"]["pagefold, full cache"] == 1
    assert report["ratio_to_first"]["pagefold, folded"] == rows["folded"]["tok_s"] / rows["full cache"]["tok_s"]
    assert paths[1].read_bytes().startswith(b"\x89PNG")


def test_a_sweep_runs_full_and_folded_at_every_length(options, in_this_process, tmp_path, capsys):
    cases = sweep.sweep_cases(Case("t", random_workload(2, 10, 1, 256), "float32", {"one": options}), [20, 60])
    assert [case.workload.output_lens for case in cases] == [[20, 20], [60, 60]]
    assert {row["max_model_len"] for case in cases for row in case.engines.values()} == {70}
    paths = [tmp_path / name for name in ("sweep.json", "sweep.png")]
    assert sweep.run_sweep(cases, {}, 1, *map(str, paths))
    rows = {
        (row["name"], case["workload"]["output_lens"][0]): row
        for case in json.loads(paths[0].read_text())
        for row in case["pagefold"]
    }
    assert set(rows) == {(name, length) for name in ("full", "zipage 32") for length in (20, 60)}
    assert rows["full", 60]["rows_kept"] == 2 * 69 and rows["zipage 32", 60]["rows_kept"] <= 2 * 48
    assert "zipage 32" in capsys.readouterr().out and paths[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["", "20,x", "0", "20,-1"])
def test_lengths_that_are_none_are_refused(text):
    with pytest.raises(InputError, match="sweep_output_len"):
        sweep.parse_lengths(text)


def test_samples_ask_fewer_prompts_more_often():
    work = random_workload(6, 4, 5, 256)
    asked = sampled_workload(work, 3)
    assert asked.prompts == [work.prompts[0]] * 3 + [work.prompts[1]] * 3 and asked.output_lens == work.output_lens
    with pytest.raises(InputError, match="samples"):
        sampled_workload(work, 7)
