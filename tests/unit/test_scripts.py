"""Scripts ask the command line for what it has."""

import os
import subprocess
import sys
from pathlib import Path

from pagefold.core.places import cache_folder

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_gpu.sh"
# In place of the script's Python: says what it was called with, runs `pagefold` up to its flags, and fails for FAIL.
PYTHON = """#!/bin/sh
echo "$@"
case "$*" in *"$FAIL"*) exit 3 ;; esac
[ "$1" = -m ] && exit
shift 2
exec "$REAL" -c 'import sys; from pagefold.cli import build_parser; build_parser().parse_args(sys.argv[1:])' "$@"
"""


def measure(tmp_path: Path, *stages: str, fail: str = "no such thing") -> subprocess.CompletedProcess:
    fake = tmp_path / "python"
    fake.write_text(PYTHON)
    fake.chmod(0o755)
    names = {"PYTHON": str(fake), "REAL": sys.executable, "FAIL": fail}
    names |= dict.fromkeys(("QWEN4B", "QWEN06B", "VLLM", "LAYOUTS"), str(tmp_path))
    command = ["bash", str(SCRIPT), str(tmp_path / "out"), *stages]
    return subprocess.run(command, check=False, env=os.environ | names, capture_output=True, text=True)


def test_every_stage_of_the_measurements_has_flags_that_there_are(tmp_path):
    run = measure(tmp_path)
    logs = {path.stem: path.read_text() for path in (tmp_path / "out").glob("*.log")}
    assert run.returncode == 0, (run.stdout, logs)
    assert len(logs) == len(run.stdout.splitlines()) > 15 and all(logs.values())


def test_a_stage_that_fails_is_named_and_the_others_run(tmp_path):
    run = measure(tmp_path, "nano", "lag", "wrong", "compaction", fail="--peer vllm")
    assert run.returncode == 1 and run.stdout.splitlines()[-1] == "failed: nano wrong"
    assert "there are: tests kernels" in (tmp_path / "out" / "wrong.log").read_text()
    assert (tmp_path / "out" / "compaction.log").read_text()


def test_what_is_fetched_and_compiled_goes_where_caches_go(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "pagefold"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == tmp_path / "home" / ".cache" / "pagefold"
