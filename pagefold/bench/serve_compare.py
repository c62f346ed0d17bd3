"""`pagefold bench serve --serve MODEL`: our server, the same engine offline and other servers, on the same requests.

Each runs alone, in processes of its own that are started here and ended again, so that all have the whole device. Every
server first gets the same number of requests with other tokens and short answers, for whatever it compiles or allocates
at its first use; offline, `throughput.measure` does the same.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pagefold.bench.peers import PeerHome, Workload, last_words, peer_environment
from pagefold.bench.serve import bench_report, write_report
from pagefold.bench.serve_load import ServeBench, make_sessions
from pagefold.bench.throughput import run_engine
from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError
from pagefold.models.sources import resolve

START_S = 1800.0  # loading, compiling and capturing
STOP_S = 30.0
WARM_UP_TOKENS = 16
SHARED = ("dtype", "gpu_memory_utilization", "load_format", "max_model_len", "max_num_batched_tokens", "max_num_seqs")
PEER_SERVERS = {"vllm": "vllm.entrypoints.openai.api_server"}


class ServerFailed(RuntimeError):
    """A server that did not come up, or ended; the message has its last words."""


@dataclass(frozen=True)
class Contest:
    """Who is measured.

    model          directory, or another name that servers know
    options        of `EngineConfig`, for the server and for the engine offline
    peers          {a name of `PEER_SERVERS`: where it is}
    peer_options   options of the peers' servers, by the names of their flags; those of `SHARED` that `options` has, and
                   skip_tokenizer_init for a model without a tokenizer, are there already
    offline        whether the same work is also done offline
    """

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    peers: dict[str, PeerHome] = field(default_factory=dict)
    peer_options: dict[str, Any] = field(default_factory=dict)
    offline: bool = True

    def __post_init__(self):
        if Path(self.model).exists():
            object.__setattr__(self, "model", str(Path(self.model).resolve()))  # servers are started elsewhere
        EngineConfig.from_options(model=self.model, **self.options)
        if unknown := sorted(set(self.peers) - set(PEER_SERVERS)):
            raise InputError("peer", f"{unknown[0]!r} has no server here, only {', '.join(PEER_SERVERS)}")


def run_contest(bench: ServeBench, contest: Contest, limits: dict[str, float], json_path: str | None) -> bool:
    """Measure everyone, print a table, write all figures; False if our server failed.

    limits   of goodput, as `parse_goodput` gives them
    Raises InputError for work that cannot be done offline, if it should be.
    """
    progress = Console(stderr=True)
    found: dict[str, Any] = {"bench": asdict(bench), "options": contest.options, "servers": {}}
    if contest.offline:
        work = offline_work(bench)
        with progress.status("offline"):
            offline = run_engine("offline", contest.options | {"model": contest.model}, work, _threads())
        found["offline"] = {name: value for name, value in asdict(offline).items() if name != "outputs"}
    with tempfile.TemporaryDirectory(prefix="pagefold-contest-") as folder:
        for name, command, environment in _servers(contest, bench):
            with progress.status(name):
                found["servers"][name] = _measure(name, command, environment, bench, limits, Path(folder))
    ours = found["servers"]["pagefold"]
    if contest.offline and found["offline"]["tok_s"] and "output_throughput" in ours:
        found["served_over_offline"] = ours["output_throughput"] / found["offline"]["tok_s"]
    console = Console()
    _print(found, console if console.is_terminal else Console(width=180))
    if json_path:
        write_report(json_path, found)
    return ours.get("completed", 0) > 0


def offline_work(bench: ServeBench) -> Workload:
    """The requests of a benchmark as token ids. Raises InputError where they are none, or arrive one by one."""
    if bench.chat or bench.dataset_name != "random" or bench.random_range_ratio:
        raise InputError("offline", "needs random prompts of one length, sent to /v1/completions; or use --no-offline")
    bodies = [session.turns[0].body for session in make_sessions(bench)]
    temperature = 1.0 if bench.temperature is None else bench.temperature
    return Workload([body["prompt"] for body in bodies], [body["max_tokens"] for body in bodies], temperature)


# ---- servers


def _servers(contest: Contest, bench: ServeBench) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """(name, command without the port, environment)."""
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": str(_threads())}
    command = [sys.executable, "-m", "pagefold.cli", "serve", contest.model, "--disable-log-requests"]
    command += ["--max-queue", str(2 * bench.num_prompts), *_flags(contest.options)]
    yield "pagefold", command, os.environ | path
    options = {name: value for name, value in contest.options.items() if name in SHARED}
    if not resolve(contest.model).has_tokenizer:
        options["skip_tokenizer_init"] = True
    for name, home in contest.peers.items():
        device = "cpu" if contest.options.get("backend") == "cpu" or not _has_cuda() else "cuda"
        environment = peer_environment(name, home, device, _threads(), kv_gib=1)
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # a server's engine is a process of its own
        command = [str(home.interpreter), "-P", "-m", PEER_SERVERS[name], "--model", contest.model]
        yield name, command + _flags(options | contest.peer_options), environment


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _threads() -> int:
    return len(os.sched_getaffinity(0))


def _flags(options: Mapping[str, Any]) -> list[str]:
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags


def _measure(
    name: str,
    command: list[str],
    environment: dict[str, str],
    bench: ServeBench,
    limits: dict[str, float],
    folder: Path,
) -> dict[str, Any]:
    """The report of one server, or {"note": why there is none}. A peer that fails must not take the others along."""
    begun = time.perf_counter()
    try:
        with running(command, environment, folder / f"{name}.log") as url:
            init_s = time.perf_counter() - begun
            body = {"return_token_ids": True} | (bench.extra_body or {})  # a model may have no tokenizer, and no text
            here = replace(bench, base_url=url, num_warmups=0, extra_body=body)
            warm = replace(here, random_output_len=WARM_UP_TOKENS, seed=bench.seed + 1, dataset_name="random")
            bench_report(replace(warm, dataset_path=None), None, {})
            return bench_report(here, None, limits) | {"init_s": init_s}
    except (ServerFailed, InputError) as error:
        return {"note": str(error)}


@contextmanager
def running(command: list[str], environment: dict[str, str], log: Path) -> Iterator[str]:
    """The address of a server that `command` starts, with `--host` and `--port` added; nothing of it is left after.

    Raises ServerFailed if it ends before it answers /health, or does not within `START_S` seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as out:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        try:
            process = subprocess.Popen(
                command + address, env=environment, cwd=log.parent, start_new_session=True, **streams
            )
        except OSError as error:
            raise ServerFailed(str(error)) from None
        try:
            _wait(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and whatever it started
            process.wait()


def _wait(url: str, process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        if process.poll() is not None:
            raise ServerFailed(f"exit code {process.returncode}: {last_words(log)}")
        if time.monotonic() > end:
            raise ServerFailed(f"not up after {START_S:g} s: {last_words(log)}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)


# ---- the table

_COLUMNS = {
    "TTFT ms": ("median_ttft_ms", "p99_ttft_ms"),
    "ITL ms": ("median_itl_ms", "p99_itl_ms"),
    "TPOT ms": ("median_tpot_ms", "p99_tpot_ms"),
}


def comparison_table(found: Mapping[str, Any]) -> Table:
    """A row for the engine offline, if it ran, and for every server; a note where there are no figures."""
    bench = found["bench"]
    title = f"{bench['num_prompts']} requests, {bench['random_input_len']} tokens in, {bench['random_output_len']} out"
    table = Table(title=title)
    for heading in ("", "tok/s", *(f"{name} {which}" for name in _COLUMNS for which in ("median", "p99")), "note"):
        table.add_column(heading, justify="right" if heading not in ("", "note") else "left")
    if offline := found.get("offline"):
        table.add_row("offline", f"{offline['tok_s']:.0f}", *["" for _ in range(6)], escape(offline["note"]))
    for name, report in found["servers"].items():
        keys = [key for pair in _COLUMNS.values() for key in pair]
        rate = report.get("output_throughput")
        failed = f"{report['failed']} failed" if report.get("failed") else report.get("note", "")
        cells = [f"{report[key]:.1f}" if key in report else "" for key in keys]
        table.add_row(name, "" if rate is None else f"{rate:.0f}", *cells, escape(failed))
    return table


def _print(found: dict[str, Any], console: Console) -> None:
    console.print(comparison_table(found))
    if "served_over_offline" in found:
        console.print(f"served / offline: {found['served_over_offline']:.3f}")
