"""Other engines on the same work, in the same run: each in a process of its own, under its own interpreter.

This file is also the program that runs inside the peer's interpreter, where pagefold is not installed; so it imports
nothing but the standard library until it knows which peer it is.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TCMALLOC = "libtcmalloc_minimal.so.4"
NO_ANSWER = "no answer"


@dataclass(frozen=True)
class Workload:
    """Greedy continuations of token ids, end-of-sequence ids ignored, so every engine does exactly the same work.

    prompts       token ids, one list per request
    output_lens   tokens to generate for each of them
    """

    prompts: list[list[int]]
    output_lens: list[int]

    def __post_init__(self):
        if not self.prompts or len(self.prompts) != len(self.output_lens):
            raise ValueError(f"workload: got {len(self.prompts)} prompts and {len(self.output_lens)} output lengths")
        if not all(self.prompts) or min(self.output_lens) < 1:
            raise ValueError("workload: every prompt and every output must have at least one token")

    @property
    def max_len(self) -> int:
        """Tokens of the longest sequence, prompt and output together."""
        return max(len(prompt) + length for prompt, length in zip(self.prompts, self.output_lens, strict=True))


@dataclass(frozen=True)
class PeerResult:
    """What one peer did, or why it did not.

    tok_s            output tokens per second of `wall_s`
    wall_s           seconds from the first prompt in to the last token out, loading and warm-up excluded
    output_tokens    tokens that were asked for and came out
    peak_rss_bytes   peak resident memory of the processes the peer kept until the end, shared libraries counted once
    version          as the peer states it
    note             "" after a good run, else why there are no figures
    outputs          token ids, one list per prompt
    """

    name: str
    tok_s: float = 0.0
    wall_s: float = 0.0
    output_tokens: int = 0
    peak_rss_bytes: int = 0
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
    python: str | Path | None = None,
    *,
    kv_gib: int = 1,
    timeout_s: float = 1800,
) -> PeerResult:
    """Run `workload` on a peer and measure it. A peer that is absent or fails is a result with a note.

    name        "transformers" (one static batch, sdpa) or "vllm" (continuous batching, compiled)
    model_dir   Hugging Face directory: config.json and safetensors; no tokenizer is needed
    dtype       "float32", "bfloat16" or "float16"
    threads     CPU threads, bound to the first cores this process may use
    python      interpreter that has the peer installed; default: the running one
    kv_gib      GiB of KV pages for a peer that asks for a size
    timeout_s   seconds for everything, loading and compiling included
    """
    if name not in PEERS:
        raise ValueError(f"unknown peer {name!r}; known: {', '.join(PEERS)}")
    executable = Path(python or sys.executable)
    if not executable.exists():
        return PeerResult(name, note=f"no interpreter at {executable}")
    with tempfile.TemporaryDirectory(prefix="pagefold-peer-") as folder:
        job, answer, log = (Path(folder) / part for part in ("job.json", "answer.json", "log.txt"))
        job.write_text(
            json.dumps({"workload": asdict(workload), "model": str(model_dir), "dtype": dtype, "threads": threads})
        )
        command = [str(executable), "-P", __file__, name, str(job), str(answer)]
        environment = os.environ | peer_environment(name, executable, threads, kv_gib)
        failure = _run(command, environment, log, timeout_s)
        if answer.exists():
            fields = json.loads(answer.read_text())
            outputs = tuple(tuple(ids) for ids in fields.pop("outputs", ()))
            return PeerResult(name, outputs=outputs, **fields)
        return PeerResult(name, note=f"{failure or NO_ANSWER}: {_last_words(log)}")


def peer_environment(name: str, python: Path, threads: int, kv_gib: int) -> dict[str, str]:
    """Environment variables a peer is run with.

    vLLM's CPU engine is meant to run with tcmalloc and Intel's OpenMP loaded first; each is preloaded where it is found
    (the system's library folders, the `lib` folder of the peer's virtual environment).
    """
    cores = sorted(os.sched_getaffinity(0))[:threads]
    env = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if name == "vllm":
        env |= {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
            "VLLM_NO_USAGE_STATS": "1",
            "LD_PRELOAD": ":".join(map(str, _preloads(python))),
        }
    return env


def _preloads(python: Path) -> list[Path]:
    folders = [Path("/usr/lib"), *Path("/usr/lib").glob("*-linux-gnu"), Path("/usr/lib64")]
    found = [folder / TCMALLOC for folder in folders] + [python.parent.parent / "lib" / "libiomp5.so"]
    return [path for path in found if path.exists()]


def _run(command: list[str], environment: dict[str, str], log: Path, timeout_s: float) -> str:
    """Run a command in a process group of its own. Returns "" or what went wrong; nothing of the group is left."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
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


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])


# From here on: what runs inside the peer's interpreter.

WARM_UP_TOKENS = 4
Generate = Callable[[list[list[int]], list[int]], list[list[int]]]


def _load_transformers(job: dict[str, Any]) -> tuple[str, Generate]:
    """`generate` on one left-padded batch: it runs as long as its longest request, as static batching does."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.set_num_threads(job["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=getattr(torch, job["dtype"]), attn_implementation="sdpa"
    ).eval()
    model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=max(lengths), use_cache=True)
        return [row[:length] for row, length in zip(out[:, width:].tolist(), lengths, strict=True)]

    return transformers.__version__, generate


def _load_vllm(job: dict[str, Any]) -> tuple[str, Generate]:
    """vLLM's offline engine with its own defaults, all requests handed over at once."""
    vllm = importlib.import_module("vllm")
    workload = Workload(**job["workload"])
    llm = vllm.LLM(
        model=job["model"],
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        max_model_len=workload.max_len + WARM_UP_TOKENS,
        max_num_seqs=len(workload.prompts),
    )

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        params = [
            vllm.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length, detokenize=False)
            for length in lengths
        ]
        out = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(request.outputs[0].token_ids) for request in out]

    return vllm.__version__, generate


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


def _measure(name: str, job: dict[str, Any]) -> dict[str, Any]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        return {"note": f"{name} cannot be imported by {sys.executable}: {error}"}
    version, generate = PEERS[name](job)
    workload = Workload(**job["workload"])
    # The shapes of the work without its tokens: buffers and kernels are ready, a prefix cache has nothing to reuse.
    generate([[1] * len(prompt) for prompt in workload.prompts], [WARM_UP_TOKENS] * len(workload.prompts))
    start = time.perf_counter()
    outputs = generate(workload.prompts, workload.output_lens)
    wall_s = time.perf_counter() - start
    output_tokens = sum(map(len, outputs))
    return {
        "version": version,
        "wall_s": wall_s,
        "output_tokens": output_tokens,
        "tok_s": output_tokens / wall_s,
        "peak_rss_bytes": _peak_rss_bytes(os.getpid()),
        "outputs": outputs,
    }


if __name__ == "__main__":
    peer, job_file, answer_file = sys.argv[1:]
    Path(answer_file).write_text(json.dumps(_measure(peer, json.loads(Path(job_file).read_text()))))
