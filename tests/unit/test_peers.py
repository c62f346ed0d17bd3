"""Peers do the asked work, and one that is missing or broken says so instead of failing the benchmark."""

import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from pagefold.bench import peers
from pagefold.bench.peers import PeerHome, Workload, run_flash_attention_3, run_peer

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
WORK = Workload(prompts=[[5, 6, 7, 8, 9], [11, 12], [3]], output_lens=[4, 6, 2])


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    path = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@needs_transformers
def test_transformers_does_the_asked_work_whatever_is_in_the_batch(tiny_llama):
    result = run_peer("transformers", WORK, tiny_llama, dtype="float32", threads=1)
    assert result.note == ""
    assert [len(ids) for ids in result.outputs] == WORK.output_lens
    assert result.output_tokens == sum(WORK.output_lens)
    assert result.tok_s == pytest.approx(result.output_tokens / result.wall_s)
    assert result.peak_rss_bytes > 50 << 20
    assert result.version

    alone = run_peer("transformers", Workload(WORK.prompts[1:2], WORK.output_lens[1:2]), tiny_llama, dtype="float32")
    assert alone.outputs[0] == result.outputs[1], "padding changed the answer"


def test_a_peer_that_is_not_installed_is_a_note(tmp_path):
    """A bare virtual environment has neither peer."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    for name in peers.PEERS:
        result = run_peer(name, WORK, tmp_path, home=PeerHome(tmp_path / "bare" / "bin" / "python"))
        assert not result.ok
        assert result.note.startswith(f"{name} cannot be imported by")
        assert result.tok_s == result.output_tokens == 0


def test_a_missing_interpreter_is_a_note(tmp_path):
    assert "no interpreter at" in run_peer("vllm", WORK, tmp_path, home=PeerHome(tmp_path / "python")).note
    assert "no folder" in run_peer("vllm", WORK, tmp_path, home=PeerHome(path=tmp_path / "gone")).note


@needs_transformers
def test_a_peer_that_crashes_leaves_its_last_words(tmp_path):
    note = run_peer("transformers", WORK, tmp_path / "no-such-model", dtype="float32").note
    assert note.startswith("exit code 1: ")
    assert "no-such-model" in note


FAKE_VLLM = """
import json, os, sys, time
from dataclasses import dataclass
from types import SimpleNamespace as Space

__version__ = "0.0.fake"

@dataclass
class SamplingParams:
    max_tokens: int
    temperature: float = 1.0
    ignore_eos: bool = False
    detokenize: bool = True

class LLM:
    def __init__(self, **options):
        if options["max_num_seqs"] == 13:
            raise RuntimeError("no device memory left")
        self.seen = {"options": options, "calls": []}
        self.seen["environment"] = {k: v for k, v in os.environ.items() if k.startswith(("VLLM", "PYTHONPATH"))}
        scheduler = Space(_preempt_request=lambda request: None)
        self.llm_engine = Space(engine_core=Space(engine_core=Space(scheduler=scheduler)))

    def generate(self, prompts, params, use_tqdm):
        self.seen["calls"].append([[len(p["prompt_token_ids"]), s.max_tokens] for p, s in zip(prompts, params)])
        self.seen["sampling"] = vars(params[0])
        self.llm_engine.engine_core.engine_core.scheduler._preempt_request("a request")
        time.sleep(0.01 * max(s.max_tokens for s in params))
        with open(os.path.join(self.seen["options"]["model"], "seen.json"), "w") as file:
            json.dump(self.seen, file)
        return [Space(outputs=[Space(token_ids=[7] * s.max_tokens)]) for s in params]
"""


@pytest.fixture
def fake_vllm(tmp_path) -> PeerHome:
    """A folder of packages with a vllm that records what it was asked."""
    package = tmp_path / "packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_VLLM)
    return PeerHome(path=package.parent)


def test_a_peer_on_a_gpu_gets_its_own_packages_and_the_shared_options(fake_vllm, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    options = {"load_format": "dummy", "max_model_len": 8192, "max_num_seqs": 256, "kv_cache_memory_bytes": 1 << 34}
    work = Workload([[1] * 9000, [2, 3]], [8, 8], temperature=0.6)
    result = run_peer("vllm", work, tmp_path, "bfloat16", home=fake_vllm, device="cuda", options=options)
    assert result.ok and result.version == "0.0.fake" and result.preemptions == 1
    assert result.output_tokens == 16 and result.wall_s >= 0.08 and result.prefill_s == result.decode_tok_s == 0
    seen = json.loads((tmp_path / "seen.json").read_text())
    fixed = {"model": str(tmp_path), "dtype": "bfloat16", "skip_tokenizer_init": True, "disable_log_stats": True}
    assert seen["options"] == options | fixed | {"enable_prefix_caching": False}
    assert seen["sampling"] == {"max_tokens": 8, "temperature": 0.6, "ignore_eos": True, "detokenize": False}
    assert seen["calls"] == [[[8192, 4], [2, 4]], [[9000, 8], [2, 8]]]
    assert seen["environment"]["PYTHONPATH"] == str(fake_vllm.path)
    assert seen["environment"]["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_CPU_KVCACHE_SPACE" not in seen["environment"]


def test_prefill_and_all_are_timed_in_one_process(fake_vllm, tmp_path):
    work = Workload([[1] * 5, [2, 3]], [30, 20], prefill_apart=True)
    result = run_peer("vllm", work, tmp_path, home=fake_vllm, device="cuda")
    calls = json.loads((tmp_path / "seen.json").read_text())["calls"]
    assert calls[1:] == [[[5, 1], [2, 1]], [[5, 30], [2, 20]]]
    assert 0.01 <= result.prefill_s < result.wall_s
    assert result.decode_tok_s == pytest.approx(48 / (result.wall_s - result.prefill_s))
    assert result.tok_s == pytest.approx(50 / result.wall_s)


def test_a_peer_that_fails_on_its_device_is_a_note(fake_vllm, tmp_path):
    result = run_peer("vllm", WORK, tmp_path, home=fake_vllm, device="cuda", options={"max_num_seqs": 13})
    assert not result.ok and "no device memory left" in result.note


def test_flash_attention_that_is_missing_or_fails_says_so(fake_vllm):
    shapes = [{"what": "decode", "batch": 1, "length": 32, "page": 16, "layers": 1}]
    missing = run_flash_attention_3(shapes, (4, 2, 16), fake_vllm)
    assert missing["note"].startswith("vllm.vllm_flash_attn cannot be imported by")
    assert fake_vllm.path
    (Path(fake_vllm.path) / "vllm" / "vllm_flash_attn.py").write_text("def flash_attn_varlen_func(): raise ValueError")
    answer = run_flash_attention_3(shapes, (4, 2, 16), fake_vllm)
    assert answer["version"] == "0.0.fake"
    assert answer["rows"][0].keys() == shapes[0].keys() | {"failed"}


def test_a_peer_that_hangs_is_ended_with_all_its_children(tmp_path):
    child = tmp_path / "child.pid"
    script = f"sleep 60 & echo $! > {child}; wait"
    start = time.perf_counter()
    failure = peers._run(["sh", "-c", script], {}, tmp_path / "log", timeout_s=1)
    assert failure == "not finished after 1 s"
    assert time.perf_counter() - start < 30
    state = Path(f"/proc/{child.read_text().strip()}/stat")
    deadline = time.perf_counter() + 5
    while state.exists() and state.read_text().split()[2] != "Z" and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_peak_memory_counts_the_processes_a_peer_keeps():
    grab = "x = b'1' * (64 << 20); print('ready', flush=True); input()"
    process = subprocess.Popen(
        ["sh", "-c", f'{sys.executable} -c "{grab}"; true'], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin and process.stdout
    process.stdout.readline()
    peak = peers._peak_rss_bytes(process.pid)
    process.communicate(b"\n")
    assert peak > 64 << 20
    assert peers._peak_rss_bytes(process.pid) == 0


def test_no_decode_rate_without_a_prefill_time():
    assert WORK.decode_rate(5.0, 2.0) == 3.0
    assert WORK.decode_rate(5.0, 0.0) == WORK.decode_rate(2.0, 2.0) == 0.0


@pytest.mark.parametrize(("prompts", "lengths"), [([], []), ([[1]], [1, 2]), ([[]], [1]), ([[1]], [0])])
def test_work_that_is_no_work_is_refused(prompts, lengths):
    with pytest.raises(ValueError, match="workload"):
        Workload(prompts, lengths)


def test_an_unknown_peer_lists_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match="known: transformers, vllm"):
        run_peer("llama", WORK, tmp_path)
