"""Peers do the asked work, and one that is missing or broken says so instead of failing the benchmark."""

import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from pagefold.bench import peers
from pagefold.bench.peers import Workload, run_peer

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
        result = run_peer(name, WORK, tmp_path, python=tmp_path / "bare" / "bin" / "python")
        assert not result.ok
        assert result.note.startswith(f"{name} cannot be imported by")
        assert result.tok_s == result.output_tokens == 0


def test_a_missing_interpreter_is_a_note(tmp_path):
    assert "no interpreter at" in run_peer("vllm", WORK, tmp_path, python=tmp_path / "python").note


@needs_transformers
def test_a_peer_that_crashes_leaves_its_last_words(tmp_path):
    note = run_peer("transformers", WORK, tmp_path / "no-such-model", dtype="float32").note
    assert note.startswith("exit code 1: ")
    assert "no-such-model" in note


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


@pytest.mark.parametrize(("prompts", "lengths"), [([], []), ([[1]], [1, 2]), ([[]], [1]), ([[1]], [0])])
def test_work_that_is_no_work_is_refused(prompts, lengths):
    with pytest.raises(ValueError, match="workload"):
        Workload(prompts, lengths)


def test_an_unknown_peer_lists_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match="known: transformers, vllm"):
        run_peer("llama", WORK, tmp_path)
