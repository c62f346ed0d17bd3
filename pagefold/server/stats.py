"""What there is to know of a running engine, as plain data for metrics, the page and the start-up table."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagefold.core.config import EngineConfig
from pagefold.engine.engine import Engine
from pagefold.engine.outputs import CompletionOutput
from pagefold.engine.sequence import Sequence
from pagefold.kv.state import COLD, HOT, KVState

TIERS = ("hot", "cold")
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # bounds of a histogram, as vLLM's
FREE, IDLE, OWNED, SHARED, COLD_PAGE, FOLDING = range(6)


@dataclass
class Counters:
    """Totals since the start that the engine itself does not keep.

    finished      continuations by finish reason; "error" for those that failed
    rows_kept, rows_evicted   rows per head of finished continuations
    by_step_tokens   steps by the first bound of `STEP_TOKENS` that the tokens they computed do not exceed
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    step_seconds: float = 0.0
    last_step_seconds: float = 0.0
    refused: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    rows_kept: float = 0.0
    rows_evicted: float = 0.0
    by_step_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))

    def count_step(self, seconds: float, tokens: int) -> None:
        """A step took so long, and one of so many tokens was planned; 0: none was."""
        self.last_step_seconds = seconds
        self.step_seconds += seconds
        if tokens:
            self.by_step_tokens[bisect_left(STEP_TOKENS, tokens)] += 1

    def count_end(self, choice: CompletionOutput) -> None:
        self.finished["error" if choice.error else choice.finish_reason or "abort"] += 1
        self.rows_kept += choice.kv.rows_kept
        self.rows_evicted += choice.kv.rows_evicted


def engine_stats(engine: Engine, counters: Counters, compiling: int) -> dict[str, Any]:
    """The answer to "stats". Rows are per head, means over heads; totals include what runs.

    running, waiting, swapped, compiling   continuations; those whose grammar is compiled wait, too, and count in both
    kv          per tier: pages held, idle (held by the prefix cache alone) and total, bytes of one
    live        tokens and rows of those that run: `tokens` seen, `rows_kept` of them
    compaction  steps with jobs of folding, the seconds these took; pages they freed, and copied for others' sake
    step_tokens   steps by the tokens they computed: one count a bound, one above all, and the tokens of all steps
    requests    what runs or is swapped out, one by one
    """
    scheduler, manager = engine.scheduler, engine.manager
    waiting = [s for s in scheduler.waiting if not s.swapped]
    live = [s for s in scheduler.waiting if s.swapped] + scheduler.running
    requests = _describe(live, manager.geometry.bytes_per_page)
    tokens, kept = (sum(request[name] for request in requests) for name in ("rows_seen", "rows_kept"))
    done, stats = counters, scheduler.stats
    num_runs, spent = engine.runner.compressor.spent()
    return {
        "running": len(scheduler.running),
        "waiting": len(waiting) + compiling,
        "swapped": len(scheduler.waiting) - len(waiting),
        "compiling": compiling,
        "kv": [
            {
                "tier": TIERS[tier],
                "format": engine.runner.kv.tiers[tier].format.name,
                "used": pool.num_held,
                "idle": pool.num_idle,
                "total": pool.num_pages - 1,
                "bytes_per_page": manager.geometry.bytes_per_page[tier],
            }
            for tier, pool in enumerate(manager.pools)
        ],
        "page_size": manager.geometry.page_size,
        "prefix_cache": {
            "queries": stats.prefix_queries,
            "hits": stats.prefix_hits,
            "entries": len(manager.prefix) if manager.prefix else 0,
        },
        "preemptions": stats.preemptions,
        "swaps": stats.swaps,
        "tokens_lost": stats.tokens_lost,
        "folds": stats.folds,
        "compaction": {
            "runs": num_runs,
            "seconds": spent,
            "pages_freed": manager.pages_freed,
            "pages_copied": manager.pages_copied,
        },
        "live": {"tokens": tokens, "rows_kept": kept},
        "rows": {"kept": done.rows_kept + kept, "evicted": done.rows_evicted + tokens - kept},
        "tokens": {"prompt": done.prompt_tokens, "cached": done.cached_tokens, "generated": done.generated_tokens},
        "steps": stats.steps,
        "step_tokens": {"bounds": list(STEP_TOKENS), "counts": list(done.by_step_tokens), "sum": stats.tokens},
        "step_seconds": done.step_seconds,
        "last_step_seconds": done.last_step_seconds,
        "finished": dict(done.finished),
        "refused": done.refused,
        "requests": requests,
    }


def _describe(live: Iterable[Sequence], bytes_per_page: tuple[int, ...]) -> list[dict[str, Any]]:
    """Of sequences that hold pages, on the device or in host memory."""
    states = [(seq, seq.swapped.kv if seq.swapped else seq.kv) for seq in live]
    if not states:
        return []
    evicted = np.array([kv.evicted for _, kv in states]).mean(1)  # all at once: this runs between two steps
    return [
        {
            "id": seq.request.id,
            "state": seq.status.name.lower(),
            "prompt_tokens": seq.prompt_len,
            "output_tokens": len(seq.output),
            "rows_seen": kv.num_tokens,
            "rows_kept": kv.num_tokens - rows,
            "compactions": kv.num_compactions,
            "pages": kv.held[: len(bytes_per_page)],
            "bytes": sum(b * n for b, n in zip(bytes_per_page, kv.held, strict=False)),
            "preemptions": seq.num_preemptions,
        }
        for (seq, kv), rows in zip(states, evicted.tolist(), strict=True)
    ]


def pool_map(engine: Engine) -> list[dict[str, Any]]:
    """The answer to "pool": per tier, `codes` holds one byte a page, page 1 first.

    0 free, 1 idle in the prefix cache, 2 held by one sequence, 3 shared, 4 cold, 5 read or written by a fold
    """
    manager = engine.manager
    tiers = []
    for tier, pool in enumerate(manager.pools):
        codes = np.full(pool.num_pages, FREE, np.uint8)
        codes[pool.cached] = IDLE
        codes[pool.refs == 1] = OWNED if tier == HOT else COLD_PAGE
        codes[pool.refs > 1] = SHARED
        tiers.append(codes)
    for kv in manager.live:
        _mark_folds(kv, tiers)
    return [{"tier": TIERS[tier], "codes": codes[1:].tobytes()} for tier, codes in enumerate(tiers)]


def _mark_folds(kv: KVState, tiers: list[np.ndarray]) -> None:
    if kv.ticket is None:
        return
    tiers[kv.ticket.dst_tier][kv.ticket.dst] = FOLDING
    folds = kv.ticket.folds
    for group, first, count in zip(folds.groups, folds.first, folds.num_src, strict=True):
        pages, num_cold = kv.pages[group], max(first, min(kv.cold[group], first + count))
        if num_cold > first:
            tiers[COLD][pages[first:num_cold]] = FOLDING
        tiers[HOT][pages[num_cold : first + count]] = FOLDING


# ---- the start-up table

_WHY = {
    "dtype": "what the processor multiplies natively",
    "backend": "the device there is",
    "max_model_len": "the model's context",
    "kv_format": "the model's own precision",
    "kv_buffer": "one page, on a GPU 128 tokens",
    "num_pages": "what the KV memory holds",
    "kv_cache_memory_bytes": "pages of all tiers",
    "kv_window_slots": "what the running requests need",
    "max_num_batched_tokens": "the default of this device",
    "plan_ahead": "on a GPU only, which would wait for the host",
}


def option_table(asked: EngineConfig, engine: Engine) -> list[dict[str, Any]]:
    """Rows of option, asked, got and why, for the options that were set and for those that the engine filled in."""
    defaults, got = EngineConfig().options(), engine.config.options() | _filled_in(asked, engine)
    rows = []
    for name, value in asked.options().items():
        same = value == got[name]
        if same and value == defaults[name]:
            continue
        why = "as asked" if same else _WHY.get(name, "depends on others")
        rows.append({"option": name, "asked": _shown(value), "got": _shown(got[name]), "why": why})
    return rows


def as_text(rows: list[dict[str, Any]]) -> str:
    """The table as lines of aligned columns, with a heading."""
    cells = [list(rows[0])] + [[str(cell) for cell in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def _filled_in(asked: EngineConfig, engine: Engine) -> dict[str, Any]:
    config, kv, geometry = engine.config, engine.runner.kv, engine.manager.geometry
    evicts = config.eviction.kv_eviction != "none"
    return {
        "dtype": str(kv.window.dtype).removeprefix("torch."),
        "backend": engine.runner.backend.name,
        "max_model_len": engine.max_model_len,
        "kv_format": kv.tiers[HOT].format.name,
        "kv_buffer": config.period if evicts else asked.eviction.kv_buffer,  # nobody would look at it
        "num_pages": geometry.num_pages[HOT] - 1,
        "kv_cache_memory_bytes": sum(n * b for n, b in zip(geometry.num_pages, geometry.bytes_per_page, strict=True)),
        "kv_window_slots": geometry.window_slots if evicts else config.scheduler.kv_window_slots,
        "max_num_batched_tokens": config.scheduler.tokens_per_step,
        "plan_ahead": engine.plan_ahead,
    }


def _shown(value: Any) -> Any:
    return "auto" if value is None else value
