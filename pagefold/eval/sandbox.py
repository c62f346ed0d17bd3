"""Run a Python program that nobody has read: in a process of its own, with limits, cut off from the network.

Where `unshare` may make namespaces (Linux), the program has no network, and every process it starts dies with it.
Elsewhere it has the limits, an empty directory and a process group that is killed. It still runs as this user, who may
read files: for programs of a model under test, not of somebody who means harm.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_NAMESPACES = ("unshare", "--user", "--map-root-user", "--net", "--ipc", "--pid", "--fork", "--kill-child")
_CHILD = """
import resource, runpy, sys
seconds, memory, file_size = map(int, sys.argv[1:4])
for name, limit in (
    ("CPU", seconds), ("AS", memory), ("DATA", memory), ("FSIZE", file_size), ("NOFILE", 64), ("NPROC", 64), ("CORE", 0)
):
    hard = resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
sys.argv[:] = ["program.py"]
runpy.run_path("program.py", run_name="__main__")
"""


@dataclass(frozen=True)
class Limits:
    """Wall and CPU time in seconds, memory and the size of a written file in bytes."""

    seconds: float = 10.0
    memory: int = 1 << 30
    file_size: int = 1 << 20


LIMITS = Limits()


@dataclass(frozen=True)
class Outcome:
    """Whether a program ran to its last line, and otherwise why not: "timeout" or the last line of its errors."""

    passed: bool
    reason: str = ""


def run_program(source: str, limits: Limits = LIMITS) -> Outcome:
    """Run a program to its end. It passes if its last line was reached: leaving early, by whatever exit code, is not
    enough, for the program is made to write a secret at its end."""
    secret = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="pagefold-") as name:
        home = Path(name)
        (home / "program.py").write_text(f"{source}\n\n\nprint({secret!r}, flush=True)\n", encoding="utf-8")
        with open(home / "out", "wb+") as out, open(home / "err", "wb+") as err:
            finished = _run(home, limits, out, err)
            if not finished:
                return Outcome(False, "timeout")
            out.seek(0)
            if out.read().rstrip().endswith(secret.encode()):
                return Outcome(True)
            err.seek(0)
            lines = err.read().decode(errors="replace").strip().splitlines()
            return Outcome(False, lines[-1] if lines else "ended early")


def _run(home: Path, limits: Limits, out, err) -> bool:
    """Run program.py in `home`; False if its time was up. Nothing it started in its process group is left."""
    wrapper = _NAMESPACES if has_namespaces() else ()
    numbers = (int(limits.seconds) + 1, limits.memory, limits.file_size)
    environment = {"PATH": os.defpath, "HOME": str(home), "TMPDIR": str(home), "LANG": "C.UTF-8"}
    process = subprocess.Popen(
        [*wrapper, sys.executable, "-I", "-c", _CHILD, *map(str, numbers)],
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
    )
    try:
        process.wait(limits.seconds)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@cache
def has_namespaces() -> bool:
    """Whether programs can be cut off from the network and from all other processes."""
    if not shutil.which(_NAMESPACES[0]):
        return False
    tried = subprocess.run([*_NAMESPACES, "true"], capture_output=True, check=False, timeout=30)
    return tried.returncode == 0
