"""HumanEval: code is found in an answer, run apart from everything, and passes only by passing the tests."""

import gzip
import json
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pagefold.cli import main
from pagefold.core.types import InputError
from pagefold.eval.answers import Answer
from pagefold.eval.humaneval import extract_code, humaneval_task, load_problems, test_program
from pagefold.eval.sandbox import LIMITS, has_namespaces, run_program
from tests.engine.tiny import tiny_tokenizer

test_program.__test__ = False  # type: ignore[attr-defined]
FAST = replace(LIMITS, seconds=2.0)
PROBLEM = {
    "task_id": "Toy/0",
    "prompt": 'import math\n\n\ndef root(x: float) -> float:\n    """The square root of x."""\n',
    "entry_point": "root",
    "test": "def check(candidate):\n    assert candidate(9) == 3\n    assert candidate(16) == 4\n",
}
WHOLE = "def root(x):\n    return math.sqrt(x)\n"


@pytest.mark.parametrize(
    ("answer", "passed"),
    [
        (f"Here it is:\n```python\n{WHOLE}```\nIt uses math.", True),
        (f"```\n{WHOLE}", True),  # cut off
        (WHOLE, True),
        ("```python\n    return math.sqrt(x)\n```", True),
        (f"Install it:\n```sh\npip install root\n```\n```python\n{WHOLE}```", True),
        ("```python\ndef root(x):\n    return x / 3\n```", False),
        ("```python\ndef root(x):\n    return\n  3\n```", False),
        ("I cannot.", False),
        ("```python\nimport os, sys\nos._exit(0)\n```", False),
        ("```python\nraise SystemExit\n```", False),
    ],
)
def test_an_answer_passes_if_its_code_passes_the_tests(answer, passed):
    assert run_program(test_program(PROBLEM, extract_code(answer)), FAST).passed == passed


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("while True: pass", "timeout"),
        ("import time\ntime.sleep(60)", "timeout"),
        ("x = bytearray(1 << 31)", "MemoryError"),
        ("open('big', 'wb').write(bytes(1 << 22))", "OSError: [Errno 27] File too large"),
        ("print('x' * (1 << 22))", "OSError: [Errno 27] File too large"),
        ("input()", "EOFError: EOF when reading a line"),
        ("open('pyproject.toml')", "FileNotFoundError: [Errno 2] No such file or directory: 'pyproject.toml'"),
        ("exit(0)", "ended early"),
    ],
)
def test_a_program_that_takes_too_much_fails_and_says_why(source, reason):
    outcome = run_program(source, FAST)
    assert not outcome.passed and outcome.reason == reason


def test_a_program_has_its_own_empty_directory_and_environment(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    program = "import os\nassert sorted(os.listdir()) == ['err', 'out', 'program.py']\n"
    program += "assert 'SECRET_TOKEN' not in os.environ"
    before = sorted(os.listdir())
    assert run_program(program + "\nopen('left', 'w').write('x')", FAST).passed
    assert sorted(os.listdir()) == before


def test_a_program_leaves_no_process_behind(tmp_path):
    mark = tmp_path / "alive"
    child = f"import time\ntime.sleep(2.5)\nopen({str(mark)!r}, 'w')"
    program = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n"
    assert run_program(program, FAST).passed
    assert run_program(program + "while True: pass", FAST).reason == "timeout"
    time.sleep(3)
    assert not mark.exists()


@pytest.mark.skipif(not has_namespaces(), reason="needs unshare")
def test_a_program_reaches_no_network_and_no_other_process():
    connect = "import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        outcome = run_program(connect.format(port=server.getsockname()[1]), FAST)
    assert "Network is unreachable" in outcome.reason
    assert "ProcessLookupError" in run_program(f"import os\nos.kill({os.getpid()}, {signal.SIGTERM})", FAST).reason


def test_problems_are_read_and_asked_through_the_chat_template(tmp_path):
    path = tmp_path / "problems.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(PROBLEM) + "\n").encode()))
    problems = load_problems(path)
    assert problems == [PROBLEM]
    tokenizer = tiny_tokenizer()
    task = humaneval_task(tokenizer, problems, limits=FAST)
    asked = tokenizer.decode(task.prompts[0])
    assert PROBLEM["prompt"].strip() in asked and "```python" in asked
    assert task.check(0, Answer([1], f"```python\n{WHOLE}```")) == {"passed": True}
    with pytest.raises(InputError, match="model: has no tokenizer"):
        humaneval_task(None, problems)
    path.write_bytes(gzip.compress(b'{"task_id": 1}\n'))
    with pytest.raises(InputError, match="a problem lacks prompt, entry_point, test"):
        load_problems(path)
    with pytest.raises(InputError, match="problems: "):
        load_problems(Path("no-such-file.jsonl"))


def test_the_command_line_refuses_what_cannot_be(capsys):
    for flags, message in (
        (["--scorers", "nobody"], "error: scorers: "),
        (["--budgets", "3/2"], "error: budgets: got '3/2'"),
        (["--kv-window", "99"], "error: kv_window: 99 queries, one every 1 tokens, span 99; with kv_lag (0) that must"),
    ):
        assert main(["eval", "humaneval", "no-model", *flags]) == 2
        assert message in capsys.readouterr().err
