"""Other engines on the same work, in the same run: each in a process of its own, under its own interpreter.

This file is also the program that runs inside the peer's interpreter, where pagefold is not installed; so it imports
nothing but the standard library until it knows which peer it is.
"""

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

TCMALLOC = "libtcmalloc_minimal.so.4"
NO_ANSWER = "no answer"
WARM_UP_TOKENS, WARM_UP_PROMPT = 4, 8192


@dataclass(frozen=True)
class Workload:
    """Continuations of token ids, end-of-sequence ids ignored, so every engine does exactly the same work.

    prompts         token ids, one list per request
    output_lens     tokens to generate for each of them
    temperature     of the draws; 0 is greedy
    prefill_apart   the prompts are run once more with one output token each, to tell prefill from decode
    """

    prompts: list[list[int]]
    output_lens: list[int]
    temperature: float = 0.0
    prefill_apart: bool = False

    def __post_init__(self):
        if not self.prompts or len(self.prompts) != len(self.output_lens):
            raise ValueError(f"workload: got {len(self.prompts)} prompts and {len(self.output_lens)} output lengths")
        if not all(self.prompts) or min(self.output_lens) < 1:
            raise ValueError("workload: every prompt and every output must have at least one token")
        if self.temperature < 0:
            raise ValueError(f"temperature: got {self.temperature}, must be >= 0")

    @property
    def max_len(self) -> int:
        """Tokens of the longest sequence, prompt and output together."""
        return max(len(prompt) + length for prompt, length in zip(self.prompts, self.output_lens, strict=True))

    def warm_up(self) -> "Workload":
        """The shapes of the work without its tokens, of long prompts only the beginning: buffers and kernels are ready,
        a prefix cache has nothing to reuse."""
        prompts = [[1] * min(len(prompt), WARM_UP_PROMPT) for prompt in self.prompts]
        return Workload(prompts, [WARM_UP_TOKENS] * len(prompts), self.temperature)

    def prefill(self) -> "Workload":
        """The prompts with one output token each."""
        return Workload(self.prompts, [1] * len(self.prompts), self.temperature)

    def decode_rate(self, wall_s: float, prefill_s: float) -> float:
        """Output tokens after the first ones per second, the prefill's time taken off; 0 if that was not measured."""
        tokens = sum(self.output_lens) - len(self.output_lens)
        return tokens / (wall_s - prefill_s) if 0 < prefill_s < wall_s else 0.0


@dataclass(frozen=True)
class PeerHome:
    """Where a peer is.

    python   interpreter that runs it; default: the running one
    path     folder of its packages, if they are not installed for the interpreter: the process's whole PYTHONPATH
    """

    python: str | Path | None = None
    path: str | Path | None = None

    @property
    def interpreter(self) -> Path:
        return Path(self.python or sys.executable).absolute()


@dataclass(frozen=True)
class PeerResult:
    """What one peer did, or why it did not.

    tok_s               output tokens per second of `wall_s`
    wall_s              seconds from the first prompt in to the last token out, loading and warm-up excluded
    output_tokens       tokens that were asked for and came out
    init_s              seconds of loading, compiling and capturing, before the warm-up
    prefill_s           seconds of the prompts with one output token each; 0 if they were not run so
    decode_tok_s        see `Workload.decode_rate`
    preemptions         None if the peer does not tell
    peak_rss_bytes      peak resident memory of the processes the peer kept until the end, shared libraries counted once
    peak_device_bytes   most device memory that its tensors had (torch.cuda.max_memory_allocated)
    version             as the peer states it
    note                "" after a good run, else why there are no figures
    outputs             token ids, one list per prompt
    """

    name: str
    tok_s: float = 0.0
    wall_s: float = 0.0
    output_tokens: int = 0
    init_s: float = 0.0
    prefill_s: float = 0.0
    decode_tok_s: float = 0.0
    preemptions: int | None = None
    peak_rss_bytes: int = 0
    peak_device_bytes: int = 0
    version: str = ""
    note: str = ""
    outputs: tuple[tuple[int, ...], ...] = ()

    @property
    def ok(self) -> bool:
        return not self.note


def run_peer(
    name: str,
    workload: Workload,
    model_dir: str | Path,
    dtype: str = "bfloat16",
    threads: int = 1,
    home: PeerHome | None = None,
    *,
    device: str = "cpu",
    options: dict[str, Any] | None = None,
    kv_gib: int = 1,
    timeout_s: float = 1800,
) -> PeerResult:
    """Run `workload` on a peer and measure it. A peer that is absent or fails is a result with a note.

    name        "transformers" (one static batch, sdpa) or "vllm" (continuous batching, compiled)
    model_dir   Hugging Face directory: config.json and safetensors; no tokenizer is needed, and no weights with
                load_format "dummy"
    dtype       "float32", "bfloat16" or "float16"
    threads     CPU threads of a peer on the CPU, bound to the first cores this process may use
    home        where the peer is
    device      "cpu" or "cuda"
    options     keywords of vLLM's engine; of them transformers knows load_format
    kv_gib      GiB of KV pages for a peer on the CPU that asks for a size
    timeout_s   seconds for everything, loading and compiling included
    """
    if name not in PEERS:
        raise ValueError(f"unknown peer {name!r}; known: {', '.join(PEERS)}")
    job = {
        "workload": asdict(workload),
        "model": str(Path(model_dir).resolve()),
        "dtype": dtype,
        "threads": threads,
        "device": device,
        "options": options or {},
    }
    home = home or PeerHome()
    fields = _ask(name, job, home, peer_environment(name, home, device, threads, kv_gib), timeout_s)
    outputs = tuple(tuple(ids) for ids in fields.pop("outputs", ()))
    return PeerResult(name, outputs=outputs, **fields)


def run_flash_attention_3(
    shapes: list[dict[str, Any]], heads: tuple[int, int, int], home: PeerHome, timeout_s: float = 120
) -> dict[str, Any]:
    """Time vLLM's build of FlashAttention-3 in a process of its own, in bfloat16, on replayed CUDA graphs.

    shapes   {"what": "decode", "batch", "length", "page", "layers"}: `layers` caches in turn, pages scattered;
             {"what": "prefill", "q_len", "length"}: the last q_len tokens of one sequence
    heads    query heads, KV heads, channels
    Returns {"version", "rows": each shape with the "us" of one layer, or with why it "failed"}, or {"note": why not}.
    """
    environment = peer_environment("vllm", home, "cuda", 1, 1)
    return _ask("flash-attention-3", {"shapes": shapes, "heads": heads}, home, environment, timeout_s)


def run_growth(
    job: dict[str, Any], home: PeerHome, device: str, threads: int, timeout_s: float = 1800
) -> dict[str, Any]:
    """The job of `pagefold.bench.capacity` on vLLM; see `growth.grow_vllm`. {"note": why} if there are no figures."""
    return _ask("vllm-growth", job, home, peer_environment("vllm", home, device, threads, 1), timeout_s)


def run_chats_on_vllm(
    job: dict[str, Any], home: PeerHome, device: str, threads: int, timeout_s: float = 1800
) -> dict[str, Any]:
    """A job of `pagefold.bench.multiturn`; see `turns.chat_with_vllm`. {"note": why} if there are no figures."""
    return _ask("vllm-chats", job, home, peer_environment("vllm", home, device, threads, 1), timeout_s)


def _ask(
    program: str, job: dict[str, Any], home: PeerHome, environment: dict[str, str], timeout_s: float
) -> dict[str, Any]:
    """The answer of one of `PROGRAMS`, run inside the peer's interpreter; {"note": why} if there is none."""
    if not home.interpreter.exists():
        return {"note": f"no interpreter at {home.interpreter}"}
    if home.path and not Path(home.path).is_dir():
        return {"note": f"no folder {home.path}"}
    with tempfile.TemporaryDirectory(prefix="pagefold-peer-") as folder:
        job_file, answer, log = (Path(folder) / part for part in ("job.json", "answer.json", "log.txt"))
        job_file.write_text(json.dumps(job))
        command = [str(home.interpreter), "-P", str(Path(__file__).resolve()), program, str(job_file), str(answer)]
        failure = _run(command, environment, log, timeout_s)
        if answer.exists():
            return json.loads(answer.read_text())
        return {"note": f"{failure or NO_ANSWER}: {last_words(log)}"}


def peer_environment(name: str, home: PeerHome, device: str, threads: int, kv_gib: int) -> dict[str, str]:
    """The environment a peer is run with: this process's, but the PYTHONPATH is the peer's own.

    vLLM's CPU engine is meant to run with tcmalloc and Intel's OpenMP loaded first; each is preloaded where it is found
    (the system's library folders, the `lib` folder of the peer's virtual environment). On a GPU its engine stays in the
    process that is measured.
    """
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if home.path:
        env["PYTHONPATH"] = str(Path(home.path).resolve())
    if name == "vllm":
        env |= {"VLLM_NO_USAGE_STATS": "1"}
    if device == "cuda":
        return env | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"} if name == "vllm" else env
    env["OMP_NUM_THREADS"] = str(threads)
    if name == "vllm":
        env |= {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
            "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
            "LD_PRELOAD": ":".join(map(str, _preloads(home.interpreter))),
        }
    return env


def _preloads(python: Path) -> list[Path]:
    folders = [Path("/usr/lib"), *Path("/usr/lib").glob("*-linux-gnu"), Path("/usr/lib64")]
    found = [folder / TCMALLOC for folder in folders] + [python.parent.parent / "lib" / "libiomp5.so"]
    return [path for path in found if path.exists()]


def _run(command: list[str], environment: dict[str, str], log: Path, timeout_s: float) -> str:
    """Run a command beside its log, in a process group of its own. Returns "" or what went wrong; nothing of the group
    is left."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
            return f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            return f"not finished after {timeout_s:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def last_words(log: Path) -> str:
    """The last lines of a log that say something."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])


def median_seconds(work: Callable[[], object], budget: float = 0.03, graph: bool = True) -> float:
    """Median device time of `work`, tried for `budget` seconds: replayed as a CUDA graph, or launched as it is."""
    torch = importlib.import_module("torch")
    for _ in range(1 if graph else 3):
        work()
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            work()
        work = captured.replay
    times, spent = [], 0.0
    while len(times) < 5 or (spent < budget and len(times) < 50):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
        spent += times[-1]
    return sorted(times[1:])[len(times[1:]) // 2]


# From here on: what runs inside the peer's interpreter.

Generate = Callable[[Workload], list[list[int]]]


class Peer(NamedTuple):
    """A loaded peer. `preemptions` counts them since it was loaded; None if that is not known."""

    version: str
    generate: Generate
    preemptions: Callable[[], int | None] = lambda: None


def _load_transformers(job: dict[str, Any]) -> Peer:
    """`generate` on one left-padded batch: it runs as long as its longest request, as static batching does."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.set_num_threads(job["threads"])
    how = {"dtype": getattr(torch, job["dtype"]), "attn_implementation": "sdpa"}
    if job["options"].get("load_format") == "dummy":
        config = transformers.AutoConfig.from_pretrained(job["model"])
        model = transformers.AutoModelForCausalLM.from_config(config, **how)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], **how)
    model = model.to(job["device"]).eval()

    def generate(work: Workload) -> list[list[int]]:
        draw = {"do_sample": True, "temperature": work.temperature, "top_k": 0} if work.temperature else {}
        model.generation_config = transformers.GenerationConfig(
            **{"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | draw
        )
        width = max(map(len, work.prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in work.prompts], device=job["device"])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in work.prompts])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask.to(ids.device), max_new_tokens=max(work.output_lens))
        return [row[:length] for row, length in zip(out[:, width:].tolist(), work.output_lens, strict=True)]

    return Peer(transformers.__version__, generate)


def _load_vllm(job: dict[str, Any]) -> Peer:
    """vLLM's offline engine with its own defaults where none are asked for, all requests handed over at once."""
    vllm = importlib.import_module("vllm")
    workload = Workload(**job["workload"])
    options = {"max_model_len": workload.max_len + WARM_UP_TOKENS, "max_num_seqs": len(workload.prompts)}
    if job["device"] == "cuda":
        options |= {"enable_prefix_caching": False, "disable_log_stats": True}
    llm = vllm.LLM(model=job["model"], dtype=job["dtype"], skip_tokenizer_init=True, **options | job["options"])

    def generate(work: Workload) -> list[list[int]]:
        how = {"temperature": work.temperature, "ignore_eos": True, "detokenize": False}
        params = [vllm.SamplingParams(max_tokens=length, **how) for length in work.output_lens]
        out = llm.generate([{"prompt_token_ids": ids} for ids in work.prompts], params, use_tqdm=False)
        return [list(request.outputs[0].token_ids) for request in out]

    return Peer(vllm.__version__, generate, _count_preemptions(llm))


def _count_preemptions(llm: Any) -> Callable[[], int | None]:
    """Counts what vLLM's scheduler preempts, if it runs in this process."""
    count = 0
    try:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request
    except AttributeError:
        return lambda: None

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return preempt(*args, **options)

    scheduler._preempt_request = counted
    return lambda: count


PEERS = {"transformers": _load_transformers, "vllm": _load_vllm}


def _peak_rss_bytes(pid: int) -> int:
    """Peak resident memory of a process and its living descendants. Linux.

    The processes' own peaks (VmHWM) summed, but pages of files, mostly the same libraries in each, counted once.
    """
    own_kib, file_kib, todo = 0, 0, [pid]
    while todo:
        process = Path(f"/proc/{todo.pop()}")
        try:
            status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
            tasks = [(task / "children").read_text() for task in (process / "task").iterdir()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        peak, mapped = (int(status.get(key, "0 kB").split()[0]) for key in ("VmHWM", "RssFile"))
        own_kib, file_kib = own_kib + peak - mapped, max(file_kib, mapped)
        todo += map(int, " ".join(tasks).split())
    return (own_kib + file_kib) * 1024


def peak_device_bytes() -> int:
    """Most device memory that tensors of this process had; 0 if it used none."""
    torch = sys.modules.get("torch")
    return torch.cuda.max_memory_allocated() if torch and torch.cuda.is_initialized() else 0


def _measure(name: str, job: dict[str, Any]) -> dict[str, Any]:
    if missing := _missing(name):
        return missing
    workload, clock = Workload(**job["workload"]), time.perf_counter
    start = clock()
    peer = PEERS[name](job)
    init_s = clock() - start
    peer.generate(workload.warm_up())
    prefill_s = 0.0
    if workload.prefill_apart:
        start = clock()
        peer.generate(workload.prefill())
        prefill_s = clock() - start
    before, start = peer.preemptions(), clock()
    outputs = peer.generate(workload)
    wall_s = clock() - start
    after, output_tokens = peer.preemptions(), sum(map(len, outputs))
    return {
        "version": peer.version,
        "wall_s": wall_s,
        "output_tokens": output_tokens,
        "tok_s": output_tokens / wall_s,
        "init_s": init_s,
        "prefill_s": prefill_s,
        "decode_tok_s": workload.decode_rate(wall_s, prefill_s),
        "preemptions": None if before is None or after is None else after - before,
        "peak_rss_bytes": _peak_rss_bytes(os.getpid()),
        "peak_device_bytes": peak_device_bytes(),
        "outputs": outputs,
    }


def _missing(module: str) -> dict[str, str] | None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return {"note": f"{module} cannot be imported by {sys.executable}: {error}"}
    return None


def _time_flash_attention_3(job: dict[str, Any]) -> dict[str, Any]:
    if missing := _missing("vllm.vllm_flash_attn"):
        return missing
    torch, rows = importlib.import_module("torch"), []
    for shape in job["shapes"]:
        prepare = {"decode": _flash_decode, "prefill": _flash_prefill}[shape["what"]]
        try:
            work = prepare(torch, shape, *job["heads"])
            rows.append(shape | {"us": median_seconds(work) * 1e6 / shape.get("layers", 1)})
            del work
        except Exception as error:  # one shape must not lose the others
            rows.append(shape | {"failed": f"{type(error).__name__}: {str(error)[:200]}"})
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
    return {"version": getattr(sys.modules["vllm"], "__version__", ""), "rows": rows}


def _flash_decode(torch: Any, shape: dict[str, Any], q_heads: int, kv_heads: int, head_dim: int) -> Callable[[], None]:
    flash = importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
    batch, length, page = shape["batch"], shape["length"], shape["page"]
    device, num_pages = torch.device("cuda"), batch * length // page
    cache = torch.empty(
        shape["layers"], 2, num_pages, page, kv_heads, head_dim, device=device, dtype=torch.bfloat16
    ).normal_()
    q = torch.randn(batch, q_heads, head_dim, device=device, dtype=torch.bfloat16)
    how = {
        "max_seqlen_q": 1,
        "cu_seqlens_q": torch.arange(batch + 1, device=device, dtype=torch.int32),
        "max_seqlen_k": length,
        "seqused_k": torch.full((batch,), length, device=device, dtype=torch.int32),
        "block_table": torch.randperm(num_pages, device=device, dtype=torch.int32).view(batch, -1),
    }

    def work() -> None:
        for keys, values in cache:
            flash(q, keys, values, causal=True, fa_version=3, **how)

    return work


def _flash_prefill(torch: Any, shape: dict[str, Any], q_heads: int, kv_heads: int, head_dim: int) -> Callable[[], None]:
    flash = importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
    q_len, length = shape["q_len"], shape["length"]
    normal = lambda *size: torch.randn(*size, head_dim, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, keys, values = normal(q_len, q_heads), normal(length, kv_heads), normal(length, kv_heads)
    bounds = lambda end: torch.tensor([0, end], device="cuda", dtype=torch.int32)  # noqa: E731
    how = {"max_seqlen_q": q_len, "cu_seqlens_q": bounds(q_len), "max_seqlen_k": length, "cu_seqlens_k": bounds(length)}
    return lambda: flash(q, keys, values, causal=True, fa_version=3, **how)


def _grow_vllm(job: dict[str, Any]) -> dict[str, Any]:
    growth = runpy.run_path(str(Path(__file__).with_name("growth.py")))
    return _missing("vllm") or growth["grow_vllm"](job, _count_preemptions)


def _chat_with_vllm(job: dict[str, Any]) -> dict[str, Any]:
    turns = runpy.run_path(str(Path(__file__).with_name("turns.py")))
    return _missing("vllm") or turns["chat_with_vllm"](job, _count_preemptions)


PROGRAMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "transformers": lambda job: _measure("transformers", job),
    "vllm": lambda job: _measure("vllm", job),
    "vllm-growth": _grow_vllm,
    "vllm-chats": _chat_with_vllm,
    "flash-attention-3": _time_flash_attention_3,
}


def _answer(program: str, job_file: str, answer_file: str) -> None:
    text = json.dumps(PROGRAMS[program](json.loads(Path(job_file).read_text())))
    partial = Path(f"{answer_file}.part")
    partial.write_text(text)
    partial.replace(answer_file)
    sys.stdout.flush()
    os._exit(0)  # the end of an engine is not measured, and may hang


if __name__ == "__main__":
    _answer(*sys.argv[1:])
