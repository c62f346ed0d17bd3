"""Benchmarks do the work they claim, measure it, and refuse to compare what failed its check."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from pagefold.bench import throughput
from pagefold.bench.charts import timeline_chart
from pagefold.bench.export import export_hf
from pagefold.bench.peers import PeerResult, Workload
from pagefold.bench.workloads import dataset_workload, random_workload, read_requests
from pagefold.core.types import InputError
from pagefold.models.sources import resolve
from pagefold.models.spec import ModelSpec
from tests.engine.tiny import tiny_tokenizer
from tests.model_dir import write_model_dir


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return str(write_model_dir(tmp_path_factory.mktemp("model")))


@pytest.fixture
def options(model_dir) -> dict:
    return {"model": model_dir, "dtype": "float32", "page_size": 16, "num_pages": 64, "kv_swap_bytes": 0}


# ---- workloads


def test_random_prompts_are_fixed_by_the_seed_and_avoid_special_tokens():
    make = lambda seed: random_workload(5, 200, 7, 260, seed, {0, 256, 259})  # noqa: E731
    work = make(3)
    assert work == make(3) != make(4)
    assert [len(p) for p in work.prompts] == [200] * 5 and work.output_lens == [7] * 5
    ids = set(np.ravel(work.prompts))
    assert not ids & {0, 256, 259} and min(ids) >= 1 and max(ids) < 260
    assert len({tuple(p) for p in work.prompts}) == 5


@pytest.mark.parametrize("field", ["num_requests", "input_len", "output_len"])
def test_work_of_no_tokens_is_refused_by_name(field):
    shape = {"num_requests": 1, "input_len": 1, "output_len": 1, field: 0}
    with pytest.raises(InputError, match=field):
        random_workload(**shape, vocab_size=10)


def test_a_dataset_gives_prompts_and_lengths(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "ab", "max_tokens": 3}\n\n{"prompt_token_ids": [7, 8]}\n')
    tokenizer = tiny_tokenizer()
    work = dataset_workload(path, tokenizer, output_len=9)
    assert work == Workload([tokenizer.encode("ab"), [7, 8]], [3, 9])


def test_a_damaged_line_is_an_error_of_its_own(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt"\n[1]\n')
    good, damaged, wrong = read_requests(path)
    assert good == {"prompt": "a"} and damaged.field == "line 2" and wrong.field == "line 3"
    with pytest.raises(InputError, match="line 2"):
        dataset_workload(path, tiny_tokenizer(), 1)


# ---- throughput


def test_full_cache_is_measured_and_checked(options):
    work = random_workload(3, 40, 20, 256)
    result = throughput.measure("full", options, work)
    assert result.ok and result.output_tokens == 60
    assert result.tok_s == pytest.approx(60 / result.wall_s)
    assert 0 < result.ttft_s <= result.wall_s and result.tpot_s > 0
    assert result.rows_kept == result.rows_seen == 3 * 59
    assert result.peak_running == 3 and result.preemptions == 0
    assert result.peak_pages == 3 * 4 and result.num_pages == 64
    assert result.peak_rss_bytes > 1e8


def test_folding_keeps_few_rows_and_a_small_pool_preempts(options):
    work = random_workload(6, 40, 60, 256)
    folded = throughput.measure("folded", options | {"kv_eviction": "recency", "kv_budget": 32}, work)
    assert folded.ok and folded.rows_kept <= 6 * 48 and folded.rows_seen == 6 * 99
    crowded = throughput.measure("crowded", options | {"num_pages": 20}, work)
    assert crowded.ok and crowded.preemptions > 0 and crowded.peak_pages <= 20


def test_a_wrong_first_token_is_caught(options, monkeypatch):
    """The batch's outputs are compared with those of the same prompts alone."""
    serve, calls = throughput.serve, []

    def bent(engine, prompts, params, salt=""):
        served = serve(engine, prompts, params, salt)
        calls.append(salt)
        if salt == "":
            served.outputs[1].outputs[0].token_ids[2] ^= 1
        return served

    monkeypatch.setattr(throughput, "serve", bent)
    result = throughput.measure("full", options, random_workload(3, 10, 6, 256))
    assert "request 1" in result.note and calls == ["warm-up", "", "alone-0", "alone-1"]


def test_a_process_of_its_own_gives_the_same_tokens(options):
    work = random_workload(2, 10, 6, 256)
    apart = throughput.run_engine("full", options, work, threads=1)
    here = throughput.measure("full", options, work)
    assert apart.ok and [list(ids) for ids in apart.outputs] == [list(ids) for ids in here.outputs]


def test_an_engine_that_cannot_run_is_a_note(options):
    result = throughput.run_engine("bad", options | {"num_pages": 2}, random_workload(1, 100, 4, 256), threads=1)
    assert not result.ok and "prompt" in result.note


@pytest.mark.parametrize("failed", ["engine", "peer", "nobody"])
def test_no_ratio_without_a_sound_result_on_both_sides(failed):
    case = throughput.Case("t", Workload([[1, 2]], [4]), "float32", {"full": {}})
    ours = throughput.EngineResult("full", tok_s=30.0, wall_s=1.0, rows_kept=1, rows_seen=1)
    peer = PeerResult("transformers", tok_s=10.0, wall_s=3.0)
    if failed == "engine":
        ours = dataclasses.replace(ours, note="request 0 got 3 tokens of 4")
    if failed == "peer":
        peer = dataclasses.replace(peer, note="no interpreter")
    table = throughput.results_table(case, [ours, peer], 1)
    assert (list(table.columns[-1].cells)[0] == "3.00") == (failed == "nobody")


def test_the_suite_is_w1_and_w2_full_and_w2_folded_in_two_precisions(options):
    cases = throughput.suite_cases({"model": options["model"]})
    shapes = [(c.title, c.dtype, list(c.engines), len(c.workload.prompts), c.workload.max_len) for c in cases]
    assert shapes == [
        (name, dtype, engines, num, longest)
        for dtype in ("bfloat16", "float32")
        for name, engines, num, longest in (("W1", ["full"], 16, 256), ("W2", ["full", "zipage 256"], 8, 1536))
    ]


# ---- export and charts


def test_an_exported_model_is_the_same_model(model_dir, tmp_path):
    copy, original = resolve(str(export_hf(model_dir, tmp_path / "copy", "float32"))), resolve(model_dir)
    assert ModelSpec.from_hf(copy.config()) == ModelSpec.from_hf(original.config())
    tensors, expected = dict(copy.tensors()), dict(original.tensors())
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert copy.tokenizer().encode("a <|eos|> é") == original.tokenizer().encode("a <|eos|> é")


@pytest.mark.smollm2
def test_an_exported_gguf_keeps_its_tensors_tokenizer_and_template(smollm2, tmp_path):
    original = resolve("smollm2")
    copy = resolve(str(export_hf("smollm2", tmp_path, "bfloat16")))
    spec, expected = ModelSpec.from_hf(copy.config()), ModelSpec.from_hf(original.config())
    assert dataclasses.replace(spec, dtype="") == dataclasses.replace(expected, dtype="")
    name = "model.layers.7.self_attn.q_proj.weight"
    assert torch.equal(dict(copy.tensors())[name], dict(original.tensors())[name].to(torch.bfloat16))
    ours, theirs = copy.tokenizer(), original.tokenizer()
    talk = [{"role": "user", "content": "Héllo <|im_end|> 123"}]
    assert ours.apply_chat_template(talk) == theirs.apply_chat_template(talk)
    assert set(ours.eos_token_ids) == set(theirs.eos_token_ids)


def test_rope_that_no_config_can_say_is_refused(model_dir, tmp_path):
    config = json.loads((resolve(model_dir).path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "freq_factors", "factors": [1.0] * 8}
    bent = write_model_dir(tmp_path / "bent")
    (bent / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="RoPE"):
        export_hf(str(bent), tmp_path / "copy")


def test_a_chart_is_a_picture(tmp_path):
    samples = [throughput.Sample(0.1 * i, 3 - i % 3, i % 2, 5 * i) for i in range(1, 9)]
    timeline_chart(tmp_path / "chart.png", "title", {"a": samples, "b": samples[:3]}, {"a": 50, "b": 60})
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
