"""A whole server, front and engine, in processes of their own, over a tiny random model."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.model_dir import write_model_dir

START_S = 60.0
OPTIONS = {"page_size": 4, "num_pages": 600, "max_num_seqs": 4, "max_model_len": 256, "kv_window": 3, "kv_budget": 16}


@dataclass
class Live:
    """`http` talks to it; `process` is the front's."""

    http: httpx.Client
    process: subprocess.Popen

    @property
    def url(self) -> str:
        return str(self.http.base_url)

    def engine_pid(self) -> int:
        """Of the front's only child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def stats(self) -> dict[str, Any]:
        return self.http.get("/ui/state").json()["stats"]

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=15)


@contextmanager
def live(directory: Path, model: str | None = None, **options: Any) -> Iterator[Live]:
    """Serve `model`, by default the tiny one; `options` are those of the command line, on top of `OPTIONS`."""
    model = model or str(write_model_dir(directory / "tiny"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = []
    for name, value in (OPTIONS | {"port": port, "dtype": "float32"} | options).items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pagefold.cli", "serve", model, *flags]
    process = subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2])
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            _wait(http, process)
            yield Live(http, process)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(http: httpx.Client, process: subprocess.Popen) -> None:
    end = time.monotonic() + START_S
    while True:
        assert process.poll() is None, f"the server ended with code {process.returncode}"
        assert time.monotonic() < end, "the server did not start in time"
        try:
            if http.get("/health", timeout=1).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
