"""`python -m pagefold.bench.demo`: the same requests in the same few megabytes of KV memory, full and folded.

A full cache has no room for all requests: they queue, and those that run push each other out. Folded requests stay
small, so more of them run at once and none is pushed out.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from pagefold.bench.charts import timeline_chart
from pagefold.bench.measure import Served, serve
from pagefold.bench.prompts import COMPARED, PROMPTS
from pagefold.core.config import EngineConfig
from pagefold.core.types import SamplingParams
from pagefold.engine.build import Loaded, build_engine, load_model
from pagefold.engine.scheduler import Stats

MODEL = "smollm2"
PAGE_SIZE = 16
TEXT_SHOWN = 700  # characters


@dataclass(frozen=True)
class Scale:
    """How much work, and how little memory: `pages` full-cache pages, and the budgets in rows of the folded runs."""

    prompts: int
    max_tokens: int
    pages: int
    budgets: tuple[int, int]


FULL_SCALE = Scale(prompts=len(PROMPTS), max_tokens=900, pages=144, budgets=(128, 96))
QUICK_SCALE = Scale(prompts=8, max_tokens=160, pages=32, budgets=(64, 48))


@dataclass(frozen=True)
class Run:
    """One way to hold the rows, and what came of it."""

    name: str
    options: dict[str, Any]
    served: Served
    stats: Stats
    num_pages: int
    bytes_per_page: int

    @property
    def tok_s(self) -> float:
        return self.served.output_tokens / self.served.wall_s


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="pagefold-demo", description="Full and folded KV caches on the same work, side by side."
    )
    parser.add_argument("--quick", action="store_true", help="few prompts and short answers")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of report.json and chart.png")
    args = parser.parse_args(argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    start = time.perf_counter()
    runs, pool_bytes, prompts = run_demo(QUICK_SCALE if args.quick else FULL_SCALE, console)
    console.print(runs_table(runs))
    for index in COMPARED:
        if index < len(prompts):
            console.print(texts_table(runs, prompts[index], index))
    write_report(args.out, runs, pool_bytes, prompts)
    title = f"{len(prompts)} requests in {pool_bytes / 1e6:.0f} MB of KV pages"
    try:
        timeline_chart(
            args.out / "chart.png",
            title,
            {r.name: r.served.timeline for r in runs},
            {r.name: r.num_pages for r in runs},
        )
        console.print(f"requests running and pool use over time: {args.out / 'chart.png'}")
    except ImportError as error:
        console.print(f"no chart: {error}")
    console.print(f"every figure and text: {args.out / 'report.json'}; {time.perf_counter() - start:.0f} s in all")
    return 0 if all(is_complete(run, runs[0]) for run in runs) else 1


def run_demo(scale: Scale, console: Console) -> tuple[list[Run], int, list[str]]:
    """Load the model once, and serve the same prompts in each way. Returns the runs, the pool's bytes, the prompts."""
    texts = PROMPTS[: scale.prompts]
    common: dict[str, Any] = {"model": MODEL, "page_size": PAGE_SIZE, "max_num_seqs": 64}
    with console.status(f"loading {MODEL}"):
        loaded = load_model(EngineConfig.from_options(**common))
    assert loaded.tokenizer is not None
    prompts = [loaded.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
    sampling = SamplingParams(temperature=0.0, max_tokens=scale.max_tokens, ignore_eos=True)
    common["max_model_len"] = max(map(len, prompts)) + scale.max_tokens
    full_page_bytes = 2 * PAGE_SIZE * loaded.spec.num_layers * loaded.spec.num_kv_heads * loaded.spec.head_dim
    full_page_bytes *= loaded.decoder.dtype.itemsize
    common["kv_cache_memory_bytes"] = pool_bytes = scale.pages * full_page_bytes
    console.print(
        Panel(pool_words(scale, prompts, pool_bytes, full_page_bytes), title="The same work, the same memory")
    )
    large, small = scale.budgets
    ways = {
        "full": {},
        f"zipage {large}": {"kv_eviction": "zipage", "kv_budget": large},
        f"zipage {small}": {"kv_eviction": "zipage", "kv_budget": small},
        f"zipage {large}, int4": {"kv_eviction": "zipage", "kv_budget": large, "kv_format": "int4"},
    }
    runs = []
    for name, options in ways.items():
        with console.status(f"{name}: {len(prompts)} requests"):
            runs.append(run_one(name, common | options, loaded, prompts, sampling))
        console.print(f"{name}: {runs[-1].served.output_tokens} tokens in {runs[-1].served.wall_s:.1f} s")
    return runs, pool_bytes, texts


def run_one(
    name: str, options: dict[str, Any], loaded: Loaded, prompts: list[list[int]], sampling: SamplingParams
) -> Run:
    engine = build_engine(EngineConfig.from_options(**options), loaded)
    # kernels are compiled at their first use; long enough to fold once
    budget = engine.config.eviction.kv_budget if options.get("kv_eviction") else 0
    warm = SamplingParams(temperature=0.0, max_tokens=2 * PAGE_SIZE, ignore_eos=True)
    serve(engine, [prompts[0][:1] * (budget + 1)], [warm], "warm-up")
    if engine.manager.prefix is not None:
        engine.manager.forget_all()
    engine.scheduler.stats = stats = Stats()
    served = serve(engine, prompts, [sampling] * len(prompts))
    pool = engine.manager.pools[0]
    return Run(name, options, served, stats, pool.num_pages - 1, engine.manager.geometry.bytes_per_page[0])


def pool_words(scale: Scale, prompts: list[list[int]], pool_bytes: int, page_bytes: int) -> str:
    """What the pool holds, in plain words."""
    rows = statistics.mean(map(len, prompts)) + scale.max_tokens
    pages = (scale.pages - 1) * PAGE_SIZE / rows
    return (
        f"{len(prompts)} conversations, {scale.max_tokens} tokens of answer each, all asked at once. "
        f"The KV pool has {pool_bytes / 1e6:.0f} MB: {scale.pages - 1} pages of {PAGE_SIZE} tokens "
        f"({page_bytes / 1e3:.0f} kB each), {(scale.pages - 1) * PAGE_SIZE} tokens in all. A conversation has about "
        f"{rows:.0f} tokens at its end, so a full cache can see about {pages:.1f} of them through at a time; folded to "
        f"{scale.budgets[0]} or {scale.budgets[1]} rows a head they stay small, and int4 rows take "
        "less than a third of the bytes."
    )


def is_complete(run: Run, full: Run) -> bool:
    """Whether a run did all of the work that the full cache did; else its speed says nothing."""
    lengths = [[len(o.outputs[0].token_ids) for o in r.served.outputs] for r in (run, full)]
    return lengths[0] == lengths[1] and run.served.output_tokens > 0


def runs_table(runs: list[Run]) -> Table:
    table = Table(title="What the pool made of it", title_justify="left")
    columns = ["tok/s", "speed-up", "wall s", "running (mean)", "at most", "preemptions", "tokens computed twice"]
    for column in ["cache", *columns, "pages at most", "MB at most", "rows kept of seen"]:
        table.add_column(column, justify="left" if column == "cache" else "right")
    full = runs[0]
    for run in runs:
        stats, served = run.stats, run.served
        speed_up = f"{run.tok_s / full.tok_s:.2f}" if is_complete(run, full) else "incomplete"
        table.add_row(
            run.name,
            f"{run.tok_s:.0f}",
            speed_up,
            f"{served.wall_s:.1f}",
            f"{served.mean_running:.1f}",
            f"{stats.peak_running}",
            f"{stats.preemptions}",
            f"{stats.tokens_lost}",
            f"{stats.peak_pages} of {run.num_pages}",
            f"{stats.peak_pages * run.bytes_per_page / 1e6:.1f}",
            f"{served.rows_kept / served.rows_seen:.0%}",
        )
    return table


def texts_table(runs: list[Run], prompt: str, index: int) -> Table:
    """The answers of three runs to one prompt, side by side."""
    table = Table(title=f"Greedy answers to: {prompt.splitlines()[0]}", title_justify="left", show_lines=True)
    shown = [runs[0], *runs[2:]]
    for run in shown:
        table.add_column(run.name, ratio=1)
    texts = [run.served.outputs[index].outputs[0].text.strip() for run in shown]
    table.add_row(*(escape(f"{text[:TEXT_SHOWN]}..." if len(text) > TEXT_SHOWN else text) for text in texts))
    return table


def write_report(folder: Path, runs: list[Run], pool_bytes: int, prompts: list[str]) -> None:
    """Write report.json: every figure, timeline and text."""
    folder.mkdir(parents=True, exist_ok=True)
    report = {
        "model": MODEL,
        "machine": {"processor": platform.processor(), "torch": torch.__version__, "threads": torch.get_num_threads()},
        "pool_bytes": pool_bytes,
        "prompts": prompts,
        "runs": [
            {
                "name": run.name,
                "options": run.options,
                "tok_s": run.tok_s,
                "speed_up": run.tok_s / runs[0].tok_s if is_complete(run, runs[0]) else None,
                "wall_s": run.served.wall_s,
                "output_tokens": run.served.output_tokens,
                "mean_running": run.served.mean_running,
                "rows_kept": run.served.rows_kept,
                "rows_seen": run.served.rows_seen,
                "num_pages": run.num_pages,
                "bytes_per_page": run.bytes_per_page,
                "stats": asdict(run.stats),
                "timeline": [asdict(sample) for sample in run.served.timeline],
                "texts": [output.outputs[0].text for output in run.served.outputs],
            }
            for run in runs
        ],
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
