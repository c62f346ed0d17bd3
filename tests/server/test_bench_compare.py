"""`pagefold bench serve --serve`: our server, the engine offline and another server, on the same requests."""

import io
import json

import pytest
from rich.console import Console

pytest.importorskip("aiohttp")

from pagefold.bench.serve_compare import ServerFailed, comparison_table, offline_work, running
from pagefold.bench.serve_load import ServeBench
from pagefold.cli import main
from pagefold.core.types import InputError
from tests.model_dir import CONFIG

PEER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        models = {"data": [{"id": " ".join(sys.argv[1:])}]}
        self._say([json.dumps(models if self.path == "/v1/models" else {})])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["return_token_ids"] and body["ignore_eos"]
        ends = [None] * (body["max_tokens"] - 1) + ["length"]
        choices = [{"index": 0, "text": "", "token_ids": [7], "finish_reason": end} for end in ends]
        events = [{"choices": [choice]} for choice in choices]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ends)}
        events.append({"choices": [], "usage": usage})
        self._say([f"data: {json.dumps(event)}\\n\\n" for event in events] + ["data: [DONE]\\n\\n"])

    def _say(self, parts):
        self.send_response(200)
        self.send_header("Content-Type", "application/json" if len(parts) == 1 else "text/event-stream")
        self.end_headers()
        for part in parts:
            self.wfile.write(part.encode())

    def log_message(self, *_):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def model(tmp_path):
    """A folder without weights or a tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_a_note_keeps_its_brackets():
    bench = {"num_prompts": 1, "random_input_len": 2, "random_output_len": 3}
    shown = io.StringIO()
    found = {"bench": bench, "servers": {"pagefold": {"note": "pip install 'pagefold[server]'"}}}
    Console(file=shown, width=300).print(comparison_table(found))
    assert "'pagefold[server]'" in shown.getvalue()


@pytest.mark.slow
def test_all_do_the_same_work_and_a_model_without_a_tokenizer_is_no_hindrance(model, tmp_path, capsys):
    package = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(PEER)
    options = {"load_format": "dummy", "max_num_seqs": 8, "max_model_len": 64, "num_pages": 100, "backend": "cpu"}
    result = tmp_path / "result.json"
    code = main(
        ["bench", "serve", "--serve", str(model), "--serve-options", json.dumps(options)]
        + ["--num-prompts", "8", "--input-len", "20", "--output-len", "12", "--vocab-size", "250"]
        + ["--ignore-eos", "--temperature", "0", "--json", str(result)]
        + ["--peer", "vllm", "--peer-path", str(tmp_path / "site"), "--peer-options", '{"enforce_eager": true}']
    )
    assert code == 0
    found = json.loads(result.read_text())
    assert found["offline"]["output_tokens"] == 8 * 12 and found["offline"]["note"] == ""
    for name in ("pagefold", "vllm"):
        report = found["servers"][name]
        assert (report["completed"], report["failed"]) == (8, 0)
        assert (report["total_input_tokens"], report["total_output_tokens"]) == (8 * 20, 8 * 12)
        assert report["median_ttft_ms"] > 0
    flags = found["servers"]["vllm"]["model_id"]
    for flag in ("--load-format dummy", "--max-num-seqs 8", "--max-model-len 64", "--skip-tokenizer-init"):
        assert flag in flags
    assert "--enforce-eager" in flags and "num-pages" not in flags
    ratio = found["servers"]["pagefold"]["output_throughput"] / found["offline"]["tok_s"]
    assert found["served_over_offline"] == pytest.approx(ratio)
    assert f"{ratio:.3f}" in capsys.readouterr().out


def test_a_server_that_does_not_start_is_told_with_its_last_words(tmp_path):
    command = ["/bin/sh", "-c", "echo no such device >&2; exit 3"]
    with pytest.raises(ServerFailed, match="exit code 3: no such device"), running(command, {}, tmp_path / "log"):
        pass


@pytest.mark.parametrize(
    "options", [{"endpoint": "/v1/chat/completions"}, {"dataset_name": "jsonl"}, {"random_range_ratio": 0.5}]
)
def test_work_that_cannot_be_done_offline_is_refused(options):
    with pytest.raises(InputError, match="offline"):
        offline_work(ServeBench(**options))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--peer", "vllm"], ["peer", "--serve"]),
        (["--serve-options", '{"page_size": 4}'], ["serve_options", "--serve"]),
        (["--serve", "smollm2", "--serve-options", '{"kv_budgt": 1}'], ["kv_budgt"]),
        (["--serve", "smollm2", "--serve-options", "[]"], ["--serve-options", "a JSON object"]),
    ],
)
def test_flags_that_make_no_sense_are_one_line(flags, words, capsys):
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words), error
