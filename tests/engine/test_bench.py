"""Benchmarks do the work they claim, measure it, and refuse to compare what failed its check."""

import dataclasses
import hashlib
import json
import sys

import numpy as np
import pytest
import torch

from pagefold.bench import gaps, measure, throughput
from pagefold.bench.charts import timeline_chart
from pagefold.bench.export import export_hf
from pagefold.bench.peers import PeerHome, PeerResult, Workload
from pagefold.bench.workloads import (
    Case,
    dataset_workload,
    named_case,
    named_workload,
    random_case,
    random_workload,
    read_requests,
    suite_cases,
)
from pagefold.cli import main
from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError
from pagefold.engine.build import load_model
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


@pytest.fixture
def kernels():
    """Benchmarks of kernels that only a device runs."""
    pytest.importorskip("triton", reason="needs the package triton")
    from pagefold.bench import kernels

    return kernels


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


@pytest.mark.parametrize(
    ("work", "tokens", "digest"),
    [
        (named_workload("nano"), 133_966, "199c6f016a1bff73"),
        (named_workload("nano", 16), 7_496, "b38af50efb4ae61a"),
        (named_workload("reason"), 498_377, "dc92615d5bf4db09"),
        (named_workload("long"), 2_048, "948261930a8e82a4"),
    ],
    ids=["nano", "nano 16", "reason", "long"],
)
def test_named_work_is_what_published_figures_were_taken_on(work, tokens, digest):
    assert sum(work.output_lens) == tokens and work.temperature == 0.6
    text = json.dumps([work.prompts, work.output_lens])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


@pytest.fixture
def with_cuda(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


def test_a_named_case_gives_both_sides_the_same_memory(with_cuda, model_dir):
    case = named_case("reason", {"model": model_dir, "max_model_len": 6144}, num_requests=3)
    shared = {"load_format": "dummy", "enable_prefix_caching": False, "kv_cache_memory_bytes": 16 << 30}
    shared |= {"max_model_len": 6144, "max_num_seqs": 256}
    assert case.peer_options == shared and (case.device, case.dtype) == ("cuda", "bfloat16")
    ours = {"model": model_dir, "dtype": "bfloat16", "max_num_batched_tokens": 8192}
    assert case.engines == {"full": shared | ours}
    assert not case.workload.prefill_apart and len(case.workload.prompts) == 3

    case = named_case("long", {"model": model_dir, "max_num_batched_tokens": 4096}, users=40, temperature=0.0)
    assert case.peer_options["max_num_batched_tokens"] == 4096 and case.peer_options["max_num_seqs"] == 40
    assert case.workload.prefill_apart and case.workload.temperature == 0 and len(case.workload.prompts) == 40


def test_a_case_on_a_cpu_fixes_the_precision_and_leaves_peers_their_settings(model_dir):
    case = random_case({"model": model_dir, "backend": "cpu", "max_num_seqs": 3}, 2, 5, 6, temperature=0.5)
    assert case.dtype in ("bfloat16", "float32") and case.engines["full"]["dtype"] == case.dtype
    assert (case.device, case.peer_options, case.workload.temperature) == ("cpu", {}, 0.5)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["throughput", "--workload", "nano"], ["workload", "CUDA device", "--backend cpu"]),
        (["gaps"], ["backend", "CUDA device"]),
        (["throughput", "--users", "3"], ["users", "long"]),
        (["throughput", "--workload", "long", "--num-requests", "3"], ["num_requests", "--users"]),
        (["throughput", "--workload", "nano", "--num-requests", "0", "--backend", "cpu"], ["num_requests", "got 0"]),
        (["throughput", "--chart", "c.png"], ["chart", "--ablate"]),
        (["throughput", "--suite", "cpu", "--ablate"], ["suite", "--ablate"]),
        (["throughput", "--ablate", "--sweep-output-len", "4"], ["not allowed with"]),
        (["throughput", "--samples", "0", "--backend", "cpu"], ["samples", "got 0"]),
        (["throughput", "--workload", "nano", "--suite", "cpu"], ["--suite", "not allowed with", "--workload"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_measured_is_refused_in_one_line(argv, words, model_dir, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", argv[0], model_dir, *argv[1:]]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words)


def test_kernels_without_a_device_say_so(kernels, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["kernels"])
    with pytest.raises(SystemExit, match="CUDA device"):
        kernels.main()


# ---- throughput


def test_full_cache_is_measured_and_checked(options):
    work = random_workload(3, 40, 20, 256)
    result = measure.measure("full", options, work)
    assert result.ok and result.output_tokens == 60
    assert result.tok_s == pytest.approx(60 / result.wall_s)
    assert 0 < result.ttft_s <= result.wall_s and result.tpot_s > 0
    assert result.rows_kept == result.rows_seen == 3 * 59
    assert result.peak_running == 3 and result.preemptions == 0
    assert 0 < result.mean_running <= 3 and 0 < result.step_s < result.wall_s
    assert result.folds == result.compaction_s == result.rows_evicted == 0
    assert result.peak_pages == 3 * 4 and result.num_pages == 64
    assert result.peak_rss_bytes > 1e8


def test_prefill_is_told_from_decode(options):
    work = dataclasses.replace(random_workload(3, 40, 20, 256), prefill_apart=True, temperature=0.6)
    result = measure.measure("full", options | {"enable_prefix_caching": False}, work)
    assert result.ok and 0 < result.prefill_s < result.wall_s
    assert result.decode_tok_s == pytest.approx(57 / (result.wall_s - result.prefill_s))


def test_kv_memory_is_accounted_for(options):
    """State of scorers and padding's page take their part of what was asked for."""
    del options["num_pages"]
    work, options = random_workload(1, 20, 4, 256), options | {"kv_cache_memory_bytes": 1 << 20}
    full = measure.measure("full", options, work)
    assert full.kv_bytes == 1 << 20
    assert (
        full.kv_row_bytes == full.num_pages * 16 * 2 * 2 * 2 * 16 * 4
    )  # rows, layers, heads, K and V, channels, bytes
    assert 0.9 < full.kv_row_bytes / full.kv_bytes < 1


def test_a_case_without_weights_hands_its_config_to_peers(options, tmp_path, monkeypatch):
    """Nothing is exported, and tokens of random weights are not compared."""
    peer, given = PeerResult("vllm", tok_s=10.0, wall_s=3.0, version="1", decode_tok_s=4.0, preemptions=2), []

    def run_peer(*args, **keywords):
        given.append((args, keywords))
        return peer

    monkeypatch.setattr(throughput, "run_peer", run_peer)
    case = Case("t", Workload([[1, 2]], [4]), "float32", {"full": options}, "cuda", {"load_format": "dummy"})
    path = tmp_path / "report.json"
    assert throughput.run_throughput([case], {"vllm": PeerHome(path="x")}, 1, str(path))
    ((args, keywords),) = given
    assert [str(arg) for arg in args[2:4]] == [options["model"], "float32"] and args[5] == PeerHome(path="x")
    assert keywords == {"device": "cuda", "options": {"load_format": "dummy"}}
    (report,) = json.loads(path.read_text())
    assert report["peers"][0]["preemptions"] == 2 and report["pagefold"][0]["kv_row_bytes"] > 0
    table = throughput.results_table(case, [measure.EngineResult("full", rows_seen=1), peer], 1)
    headers = [column.header for column in table.columns]
    assert "decode tok/s" in headers and "prefill s" not in headers and headers[-1] == "x vllm"


def test_folding_keeps_few_rows_and_a_small_pool_preempts(options):
    work = random_workload(6, 40, 60, 256)
    folded = measure.measure("folded", options | {"kv_eviction": "recency", "kv_budget": 32}, work)
    assert folded.ok and folded.rows_kept <= 6 * 48 and folded.rows_seen == 6 * 99
    assert folded.rows_evicted >= 6 * 48 and folded.folds >= 6 * 3
    assert 0 < folded.compaction_s < folded.wall_s
    crowded = measure.measure("crowded", options | {"num_pages": 20}, work)
    assert crowded.ok and crowded.preemptions > 0 and crowded.peak_pages <= 20


def test_a_wrong_first_token_is_caught(options, monkeypatch):
    """The batch's outputs are compared with those of the same prompts alone."""
    serve, calls = measure.serve, []

    def bent(engine, prompts, params, salt=""):
        served = serve(engine, prompts, params, salt)
        calls.append(salt)
        if salt == "":
            served.outputs[1].outputs[0].token_ids[2] ^= 1
        return served

    monkeypatch.setattr(measure, "serve", bent)
    result = measure.measure("full", options, random_workload(3, 10, 6, 256))
    assert "request 1" in result.note and calls == ["warm-up", "", "alone-0", "alone-1"]


def test_a_process_of_its_own_gives_the_same_tokens(options):
    work = random_workload(2, 10, 6, 256)
    apart = measure.run_engine("full", options, work, threads=1)
    here = measure.measure("full", options, work)
    assert apart.ok and [list(ids) for ids in apart.outputs] == [list(ids) for ids in here.outputs]


def test_an_engine_that_cannot_run_is_a_note(options):
    result = measure.run_engine("bad", options | {"num_pages": 2}, random_workload(1, 100, 4, 256), threads=1)
    assert not result.ok and "prompt" in result.note


@pytest.mark.parametrize("failed", ["engine", "peer", "nobody"])
def test_no_ratio_without_a_sound_result_on_both_sides(failed):
    case = Case("t", Workload([[1, 2]], [4]), "float32", {"full": {}})
    ours = measure.EngineResult("full", tok_s=30.0, wall_s=1.0, rows_kept=1, rows_seen=1)
    peer = PeerResult("transformers", tok_s=10.0, wall_s=3.0)
    if failed == "engine":
        ours = dataclasses.replace(ours, note="request 0 got 3 tokens of 4")
    if failed == "peer":
        peer = dataclasses.replace(peer, note="no interpreter")
    table = throughput.results_table(case, [ours, peer], 1)
    ratios = next(column for column in table.columns if column.header == "x transformers")
    assert (list(ratios.cells)[0] == "3.00") == (failed == "nobody")
    assert any(column.header == "check" for column in table.columns) == (failed != "nobody")


def test_the_suite_is_w1_and_w2_full_and_w2_folded_in_two_precisions(options):
    cases = suite_cases({"model": options["model"]})
    shapes = [(c.title, c.dtype, list(c.engines), len(c.workload.prompts), c.workload.max_len) for c in cases]
    assert shapes == [
        (name, dtype, engines, num, longest)
        for dtype in ("bfloat16", "float32")
        for name, engines, num, longest in (("W1", ["full"], 16, 256), ("W2", ["full", "zipage 256"], 8, 1536))
    ]


# ---- gaps and kernels


def spans_of(*times: tuple[float, float, str]) -> list[gaps.Span]:
    return [gaps.Span(*time) for time in times]


def test_idle_time_is_what_no_stream_fills():
    seen = gaps.timeline(
        spans_of((0, 10, "a"), (4, 30, "copy"), (12, 20, "b"), (35, 40, "a"), (40, 44, "b"), (50, 60, "a")), steps=2
    )
    assert seen.busy_us == (30 + 5 + 4 + 10) / 2 and seen.idle_us == (5 + 6) / 2
    assert seen.busy_us + seen.idle_us == 60 / 2 and seen.launches == 3
    assert [(gap.after, gap.before, gap.us, gap.longest_us) for gap in seen.gaps] == [
        ("b", "a", 3.0, 6),
        ("copy", "a", 2.5, 5),
    ]
    assert [(kernel.name, kernel.us, kernel.count) for kernel in seen.kernels] == [
        ("copy", 13.0, 0.5),
        ("a", 12.5, 1.5),
        ("b", 6.0, 1.0),
    ]


def test_a_trace_gives_what_ran_on_the_device():
    event = {"ph": "X", "cat": "kernel", "ts": "7.5", "dur": 2, "name": "k"}
    others = [event | {"cat": "cuda_runtime"}, {"ph": "f", "cat": "kernel"}, {"ph": "M", "name": "process_name"}]
    copy = event | {"cat": "gpu_memcpy", "ts": 1.25, "name": "Memcpy DtoH"}
    assert gaps.device_spans({"traceEvents": [event, *others, copy]}) == spans_of(
        (1.25, 3.25, "Memcpy DtoH"), (7.5, 9.5, "k")
    )
    with pytest.raises(ValueError, match="no kernel"):
        gaps.timeline([], 1)


def test_steady_steps_give_one_token_a_request(options):
    options |= {"backend": "cpu"}
    loaded = load_model(EngineConfig.from_options(**options))
    found = gaps.measure_gaps(loaded, options, 5, input_len=20, steps=6, floor_s=1e-6, traced=False)
    assert found.steps.tokens == 5 and found.tok_s == pytest.approx(5 / found.steps.period_s)
    assert 0 < found.steps.host_s <= found.steps.period_s and found.steps.median_step_s > 0
    assert found.floor_share == pytest.approx(1e-6 / found.steps.period_s)
    with pytest.raises(InputError, match="num_requests: got 50, the engine does not run as many"):
        gaps.measure_gaps(loaded, options, 50, input_len=20, steps=2, traced=False)


def test_gaps_on_a_cpu_that_is_asked_for_are_timed_without_a_trace(options, tmp_path, capsys):
    path = tmp_path / "gaps.json"
    gaps.run_gaps(options | {"backend": "cpu"}, [2, 1], 8, 2, 0.6, str(path))
    runs = json.loads(path.read_text())["runs"]
    assert [(run["num_requests"], run["timeline"]) for run in runs] == [(2, None), (1, None)]
    assert "A decode step" in capsys.readouterr().out


def test_traced_runs_are_shown():
    seen = gaps.timeline(spans_of((0, 10, "a"), (15, 30, "b")), steps=1)
    found = gaps.Gaps(1, 100.0, gaps.Steps(5e-5, 4e-5, 1e-5, 1.0), 0.5, seen)
    cells = {column.header: list(column.cells)[0] for column in gaps.steps_table([found]).columns}
    assert cells["GPU busy"] == "25" and cells["idle"] == "25 (50%)" and cells["floor"] == "50%"
    assert list(gaps.gaps_table(found).columns[0].cells) == ["5.0"]
    assert list(gaps.kernels_table(found).columns[1].cells) == ["60.0%", "40.0%"]


def test_a_step_reads_all_weights_once(model_dir):
    spec = ModelSpec.from_hf(resolve(model_dir).config())
    tensors = dict(resolve(model_dir).tensors())
    assert gaps.weight_bytes(spec, 2) == 2 * sum(t.numel() for t in tensors.values())  # the head is the embedding


def test_kernel_tables_take_the_best_of_each_shape(kernels):
    size = {"batch": 64, "length": 1024}
    rows = [
        {"what": "decode", "format": "bf16", "page": 64, "us": 90.0, "tb_s": 3.0, "share": 0.75} | size,
        {"what": "decode", "format": "bf16", "page": 64, "us": 80.0, "tb_s": 3.4, "share": 0.85} | size,
        {"what": "decode", "format": "bf16", "page": 16, "us": 70.0, "tb_s": 3.9, "share": 0.95} | size,
        {"what": "decode", "format": "int4", "page": 64, "failed": "no"} | size,
        {"what": "decode fa3", "page": 16, "us": 120.0, "tb_s": 2.2, "share": 0.55} | size,
        {"what": "prefill fa3", "q_len": 8192, "length": 8192, "us": 1.0, "tflop_s": 612.0},
        {"what": "prefill", "format": "int4", "q_len": 8192, "length": 8192, "tflop_s": 600.0},
        {"what": "prefill paged", "format": "int4", "q_len": 8192, "length": 8192, "tflop_s": 300.0},
    ]
    decode, prefill = kernels.markdown(rows, ["bf16", "int4"]).split("\n\n")
    assert "| 64 x 1024 | 120 us, 2.20 (55%) | - | 80 us, 3.40 (85%) | - |" in decode.splitlines()
    assert "| 8192 of 8192 | 612 | - | - | 600 | 300 |" in prefill.splitlines()
    assert all(len({line.count("|") for line in table.splitlines()}) == 1 for table in (decode, prefill))


def test_flash_attention_rows_have_their_share_or_a_reason(kernels, monkeypatch, capsys):
    answer = {"rows": [{"what": "decode", "batch": 1, "length": 1000, "page": 16, "layers": 2, "us": 4.096}]}
    monkeypatch.setattr(kernels, "run_flash_attention_3", lambda shapes, heads, home: answer)
    report = kernels.Report(4e12)
    kernels.flash_attention_3(report, PeerHome())
    assert report.rows[0]["tb_s"] == pytest.approx(1.0) and report.rows[0]["share"] == pytest.approx(0.25)
    monkeypatch.setattr(kernels, "run_flash_attention_3", lambda *_: {"note": "vllm is not there"})
    kernels.flash_attention_3(report, PeerHome())
    assert "vllm is not there" in report.rows[1]["failed"] and "vllm is not there" in capsys.readouterr().out


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
    samples = [measure.Sample(0.1 * i, 3 - i % 3, i % 2, 5 * i) for i in range(1, 9)]
    timeline_chart(tmp_path / "chart.png", "title", {"a": samples, "b": samples[:3]}, {"a": 50, "b": 60})
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
