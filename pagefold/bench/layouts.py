"""`pagefold bench layouts`: head layouts side by side on one model in memory, each with requests that were folded.

What an uneven layout must not cost: decode attention takes the time of its rows however they are spread over heads, the
pages it saves are in the pool, and folding is a small part of the prefill. Numbers are of the engine's own tables.
"""

import gc
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from pagefold.backends.base import ForwardInputs
from pagefold.bench.measure import compaction_seconds, end_all
from pagefold.bench.multiturn import FOOTPRINT_TOKENS, measure_footprint
from pagefold.bench.peers import median_seconds
from pagefold.bench.throughput import wide_console
from pagefold.bench.workloads import device_of, random_workload, require_cuda
from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError, Request, SamplingParams
from pagefold.engine.build import Loaded, build_engine, build_layout, load_model
from pagefold.engine.engine import Engine
from pagefold.engine.sequence import Sequence as Running
from pagefold.kv.state import KVState
from pagefold.models.sources import resolve
from pagefold.models.spec import ModelSpec

CHUNK = 8192  # tokens of a step
AFTER = (0, *FOOTPRINT_TOKENS)  # tokens after folding
TIMES = 5  # attention on a CPU


@dataclass(frozen=True)
class Layout:
    """What was measured of one layout.

    rows            that the batch holds, over all heads and requests, and `row_bytes` of their K and V
    layer_rows      the least and the most rows of a layer
    attend_s        seconds of attention of one decode batch, over all layers
    prefill_s       seconds from the first request to the step after the last one's fold
    folding_s       of these, that compactions took
    held            {tokens after its fold: pages of one request}
    reserved        pages that it was promised from then on
    """

    layout: str
    num_groups: int
    rows: int
    row_bytes: int
    layer_rows: tuple[int, int]
    attend_s: float
    prefill_s: float
    folding_s: float
    held: dict[str, int]
    reserved: int

    @property
    def tb_s(self) -> float:
        return self.row_bytes / self.attend_s / 1e12

    @property
    def folding_share(self) -> float:
        return self.folding_s / self.prefill_s

    @property
    def off_reserve(self) -> float:
        """Largest distance of the pages held from those reserved, as a share of these; NaN if no pages were noted."""
        return max((abs(pages / self.reserved - 1) for pages in self.held.values()), default=math.nan)

    def per_row(self, first: "Layout") -> float:
        """Seconds of attention per row, over those of another layout."""
        return self.attend_s / self.rows / (first.attend_s / first.rows)


def measure_layout(loaded: Loaded, options: dict[str, Any], prompts: list[list[int]]) -> Layout:
    """Serve the prompts until all are folded, then look at what is held, and time attention to it.

    Raises InputError if the options never fold such requests, or do not let them run at once.
    """
    config = EngineConfig.from_options(**options)
    engine = build_engine(config, loaded)
    serve_until_folded(engine, prompts)  # whatever is compiled or captured when it is first met
    end_all(engine)
    folded_before, start = compaction_seconds(engine), time.perf_counter()
    running = serve_until_folded(engine, prompts)
    folding_s = compaction_seconds(engine) - folded_before  # waits for the device
    prefill_s = time.perf_counter() - start
    states = [seq.kv for seq in running]
    by_layer, row_bytes = rows_held(engine, states)
    attend_s = attention_seconds(engine, states)
    end_all(engine)
    footprint = measure_footprint(engine, prompts[0], AFTER)
    return Layout(
        layout=config.cache.kv_layout,
        num_groups=engine.manager.geometry.num_groups,
        rows=int(by_layer.sum()),
        row_bytes=row_bytes,
        layer_rows=(int(by_layer.min()), int(by_layer.max())),
        attend_s=attend_s,
        prefill_s=prefill_s,
        folding_s=folding_s,
        held=footprint["held"],
        reserved=footprint["reserved"],
    )


def serve_until_folded(engine: Engine, prompts: list[list[int]]) -> list[Running]:
    """Run the prompts until the rows of each were folded at or after its end and all of it is visible."""
    sampling = SamplingParams(
        max_tokens=engine.max_model_len - len(prompts[0]), ignore_eos=True, detokenize=False, kv_keep_turns=False
    )
    for i, prompt in enumerate(prompts):
        engine.add(Request(f"layouts-{i}", tuple(prompt), sampling))
    started = list(engine.scheduler.waiting)
    if not all(seq.policy.evicts for seq in started):
        raise InputError("kv_eviction", "is 'none': nothing would be folded")
    while not all(_is_folded(seq, engine.config.period) for seq in started):
        if any(output.finished for output in engine.step()):
            end_all(engine)
            limit = f"the engine does not run as many at once until they are folded, within {sampling.max_tokens}"
            raise InputError("num_requests", f"got {len(prompts)}, {limit} tokens of output")
    return started


def _is_folded(seq: Running, period: int) -> bool:
    if seq.state is None:
        return False
    kv, first_event = seq.kv, -(-seq.prompt_len // period) * period
    return kv.num_compactions > 0 and kv.num_tokens > first_event and kv.ticket is None


def rows_held(engine: Engine, states: Sequence[KVState]) -> tuple[np.ndarray, int]:
    """(int64[L], rows of each layer's heads, over all requests; bytes of their K and V)."""
    kv = engine.runner.kv
    group_of = kv.group_of.cpu().numpy()
    rows = np.array([state.rows for state in states], np.int64).sum(0)[group_of].sum(1)
    cold = np.array([state.cold for state in states], np.int64).sum(0)[group_of].sum(1) * kv.page_size
    by_tier, total = (rows - cold, cold), 0
    for layer in range(len(group_of)):
        for store, of_tier in zip(kv.of(layer).tiers, by_tier, strict=False):
            total += int(of_tier[layer]) * store.format.bytes_per_row(store.head_dim)
    return rows, total


@torch.inference_mode()
def attention_seconds(engine: Engine, states: Sequence[KVState]) -> float:
    """Median seconds of `attend` over all layers for one new token of every request, the last one stored; on a GPU of a
    replayed graph that is laid out as the engine's own are, the batch's tables included."""
    runner, batch = engine.runner, decode_batch(engine, states)
    kv, backend, scale = runner.kv, runner.backend, runner.model.scale
    num_heads, head_dim = kv.window.shape[3:]
    q = torch.randn(len(states), num_heads, head_dim, device=runner.device).to(kv.window.dtype)

    def attend() -> None:
        batch.plan = None
        for layer in range(len(kv.group_of)):
            backend.attend(kv.of(layer), layer, q, batch, scale)

    if runner.device.type == "cuda":
        torch.cuda.synchronize()
        return median_seconds(attend, budget=0.5)
    return statistics.median(_seconds(attend) for _ in range(TIMES))


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def decode_batch(engine: Engine, states: Sequence[KVState]) -> ForwardInputs:
    """The last stored token of every request again, as a batch of single tokens."""
    runner = engine.runner
    ints = partial(torch.tensor, dtype=torch.int64, device=runner.device)
    slots, lens = [state.slot for state in states], [state.num_tokens for state in states]
    none = torch.zeros(len(slots), dtype=torch.int64, device=runner.device)
    return ForwardInputs(
        tokens=none,
        positions=ints(lens) - 1,
        q_start=torch.arange(len(slots) + 1, device=runner.device),
        slots=ints(slots),
        seq_lens=ints(lens),
        logits_at=none[:0],
        window_slots=none,
        window_index=none,
        keeps_window=False,
        host_q_lens=[1] * len(slots),
        host_slots=slots,
        host_seq_lens=[engine.max_model_len] * len(slots) if runner.graphs else lens,
    )


# ---- the command


def parse_layouts(text: str) -> list[str]:
    """Specs of layouts from one text, separated by semicolons (options within a spec are by commas)."""
    specs = [spec.strip() for spec in text.split(";")]
    if not all(specs):
        raise InputError("layouts", f"got {text!r}, must be layout specs separated by ';', such as 'uniform;...'")
    return specs


def run_layouts(
    options: dict[str, Any], layouts: list[str], num_requests: int, input_len: int, json_file: str | None = None
) -> None:
    """Measure every layout and print the table; a bad option is told before weights are loaded."""
    require_cuda("backend", "bench layouts", options)
    if "kv_layout" in options:
        raise InputError("kv_layout", f"got {options['kv_layout']!r}, and the layouts to measure are in --layouts")
    spec = ModelSpec.from_hf(resolve(options["model"]).config())
    prompts = random_workload(num_requests, input_len, 1, spec.vocab_size, options.get("seed", 0)).prompts
    options = engine_options(options, spec, num_requests, input_len)
    runs = [options | {"kv_layout": layout} for layout in layouts]
    for own in runs:
        build_layout(EngineConfig.from_options(**own), spec)
    loaded = load_model(EngineConfig.from_options(**options))
    console, found = wide_console(), []
    facts = {"options": options, "num_requests": num_requests, "input_len": input_len}
    facts["device"] = torch.cuda.get_device_name() if device_of(options) == "cuda" else "cpu"
    for own in runs:
        with console.status(own["kv_layout"]):
            found.append(measure_layout(loaded, own, prompts))
        gc.collect()  # the engine's memory goes back before the next one is built
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if json_file:  # at once: the next one may fail
            rows = [figures(layout, found[0]) for layout in found]
            Path(json_file).write_text(json.dumps(facts | {"layouts": rows}, indent=1) + "\n")
    console.print(table(found, f"{num_requests} requests of {input_len} tokens, {facts['device']}"))


def engine_options(options: dict[str, Any], spec: ModelSpec, num_requests: int, input_len: int) -> dict[str, Any]:
    """What is asked for, with room for the requests to run at once and for one to go on alone after its fold."""
    chunk = options.get("max_num_batched_tokens", CHUNK)
    while_others_prefill = math.ceil(num_requests * input_len / max(1, chunk - num_requests))
    needed = input_len + while_others_prefill + 2 * max(FOOTPRINT_TOKENS)
    defaults = {"max_num_seqs": num_requests, "max_num_batched_tokens": chunk, "enable_prefix_caching": False}
    return defaults | {"max_model_len": min(needed, spec.max_context)} | options


def figures(layout: Layout, first: Layout) -> dict[str, Any]:
    derived = {name: getattr(layout, name) for name in ("tb_s", "off_reserve", "folding_share")}
    compared = {"rows_of_first": layout.rows / first.rows, "per_row_of_first": layout.per_row(first)}
    return asdict(layout) | derived | compared


def table(found: list[Layout], title: str) -> Table:
    """A line per layout; ratios are to the first. Folders of profiles are left out."""
    table = Table(title=title, title_justify="left")
    columns = ("layout", "groups", "rows", "x first", "of a layer", "attend us", "TB/s", "time a row, x first")
    for column in (*columns, f"pages {', '.join(map(str, AFTER))} after", "reserved", "off", "folding of prefill"):
        table.add_column(column, justify="left" if column == "layout" else "right", no_wrap=column == "layout")
    for layout in found:
        cells = [re.sub(r"[^=,]*/", "", layout.layout), f"{layout.num_groups}", f"{layout.rows}"]
        cells += [f"{layout.rows / found[0].rows:.4f}", f"{layout.layer_rows[0]}-{layout.layer_rows[1]}"]
        cells += [f"{1e6 * layout.attend_s:.0f}", f"{layout.tb_s:.3f}", f"{layout.per_row(found[0]):.3f}"]
        cells += [", ".join(map(str, layout.held.values())), f"{layout.reserved}", f"{layout.off_reserve:.1%}"]
        table.add_row(*cells, f"{layout.folding_s:.2f} of {layout.prefill_s:.2f} s, {layout.folding_share:.1%}")
    return table
