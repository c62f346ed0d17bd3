"""Decode and prefill attention on a GPU against what the memory and the matrix units give, and what a compaction takes.

    python -m pagefold.bench.kernels --json kernels.json --fa3 --peer-path FOLDER
    python -m pagefold.bench.kernels --uneven --formats bf16
    python -m pagefold.bench.kernels --compaction

Bytes are those that a format defines, read once; times are of replayed CUDA graphs over several layers, which together
exceed the L2 cache. No number is printed for a kernel whose output was not first compared with torch.
"""

import argparse
import dataclasses
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pagefold.backends.base import ForwardInputs, KVView
from pagefold.backends.triton.backend import TritonBackend
from pagefold.backends.triton.plan import DecodeShape, Shape, decode_shape, device_codec
from pagefold.bench.peers import PeerHome, run_flash_attention_3
from pagefold.bench.peers import median_seconds as seconds
from pagefold.core.types import Job, ScorePolicy
from pagefold.evict.scorer import SCORERS
from pagefold.runner.compressor import Compressor
from pagefold.store.format import parse_format
from pagefold.store.pagestore import PageStore

DEVICE = "cuda"
Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
DECODE = [(64, 1024), (64, 4096), (256, 1024), (256, 4096), (6, 131072), (1, 131072)]  # sequences, tokens of each
PROBES = [(64, 4096), (6, 131072)]
UNEVEN = [(200, 100, 1900), (56, 200, 4200), (2, 131072, 131072), (256, 100, 200)]  # sequences, shortest, longest
FLASH_PAGES = [(*size, 16) for size in DECODE] + [(64, 4096, 256), (6, 131072, 256)]
PREFILL = [(8192, 8192), (8192, 32768), (8192, 131072), (2048, 32768)]  # new tokens, tokens in all
COPIED_BYTES = (1 << 30, 1 << 31, 1 << 32)
LAYER_BYTES = 3 << 28  # of all layers that a timed graph reads: many times the L2 cache
LIMIT = 1e-2  # relative error that a kernel may have
COMPACTION_LAYERS, COMPACTION_ROWS, COMPACTION_KEEP = 36, 1280, 1024
COMPACTION_JOBS = (1, 8)

# (tile, warps, stages), first those that looked best on paper
SHAPES = {
    "bf16": [(64, 4, 3), (64, 4, 2), (64, 4, 4), (128, 4, 2), (128, 4, 3), (64, 2, 3), (32, 2, 3), (32, 1, 3)],
    "fp8": [(64, 2, 3), (64, 4, 3), (64, 2, 4), (128, 2, 3), (128, 4, 3), (64, 1, 3), (32, 1, 4)],
    "int4": [(64, 1, 3), (64, 1, 4), (128, 2, 3), (128, 2, 2), (64, 2, 3), (64, 2, 4), (32, 1, 4)],
    "k4v2": [(64, 1, 3), (64, 1, 4), (64, 1, 2), (128, 1, 3), (128, 2, 3), (64, 2, 3), (32, 1, 4)],
}
PREFILL_SHAPES = [(64, 8, 2), (64, 8, 3), (128, 8, 2), (64, 4, 2), (64, 4, 3), (32, 4, 3)]


def copy_bandwidth() -> float:
    """Bytes read and written per second by the best of several large copies on the device.

    They are launched as they are: inside a CUDA graph a copy may be left to the copy engines, which are slower than
    kernels. For the same reason an element-wise kernel is tried beside `copy_`.
    """
    best = 0.0
    for size in COPIED_BYTES:
        if 3 * size > torch.cuda.mem_get_info()[0]:
            break
        for dtype in (torch.float32, torch.int64):
            source = torch.empty(size // dtype.itemsize, dtype=dtype, device=DEVICE).random_()
            target = torch.empty_like(source)
            for copy in (partial(target.copy_, source), partial(torch.neg, source, out=target)):
                best = max(best, 2 * size / seconds(copy, 0.06, graph=False))
            del source, target, copy
        torch.cuda.empty_cache()
    return best


def fill(plane: Tensor) -> None:
    """Random contents that decode to numbers of ordinary size."""
    for part in plane:  # a column at a time, so that temporaries stay small
        if plane.dtype == torch.uint8:
            part.random_(0, 256)
        elif plane.dtype == torch.float8_e4m3fn:
            part.copy_(torch.randn(part.shape, device=DEVICE, dtype=torch.float16).mul_(100).clamp_(-448, 448))
        elif plane.shape[-1] == 1:
            part.uniform_(0.15, 0.25) if plane.dtype == torch.float16 else part.zero_()
        else:
            part.normal_()


@dataclasses.dataclass
class Cache:
    """Sequences of equal length, all layers in one store, pages scattered. Page sizes divide `max_page`."""

    format: str
    batch: int
    length: int
    max_page: int = 128
    store: PageStore = dataclasses.field(init=False)
    layers: int = dataclasses.field(init=False)

    def __post_init__(self):
        pair = parse_format(self.format)
        self.layers = decode_layers(self.layer_bytes)
        num_pages = self.batch * self.length // self.max_page + 1
        self.store = PageStore(pair, num_pages, self.layers * KV_HEADS, self.max_page, HEAD_DIM, {}, DEVICE)
        for plane in self.store.planes.values():
            if plane.shape[-1]:
                fill(plane.transpose(0, 1))
        if "fp8" in self.format:
            for name in ("k_scale", "v_scale"):
                self.store.planes[name].fill_(0.01)

    @property
    def layer_bytes(self) -> int:
        return self.batch * self.length * KV_HEADS * parse_format(self.format).bytes_per_row(HEAD_DIM)

    def view(self, page_size: int) -> KVView:
        """The same bytes cut into pages of another size."""
        store = PageStore(self.store.format, 1, 1, page_size, HEAD_DIM, {}, DEVICE)
        store.num_columns = self.store.num_columns
        store.num_pages = self.store.num_pages * self.max_page // page_size
        for name, plane in self.store.planes.items():
            shape = (store.num_columns, store.num_pages, page_size, plane.shape[-1])
            store.planes[name] = plane.transpose(0, 1).reshape(shape).transpose(0, 1)
        pages = self.length // page_size
        first = self.max_page // page_size  # page 0 belongs to nobody
        table = torch.zeros(self.batch + 1, 1, pages, dtype=torch.int32, device=DEVICE)
        owned = torch.randperm(self.batch * pages, device=DEVICE, dtype=torch.int32) + first
        table[1:] = owned.view(self.batch, 1, pages)
        zeros = torch.zeros(self.batch + 1, 1, dtype=torch.int32, device=DEVICE)
        columns = torch.arange(self.layers * KV_HEADS, dtype=torch.int32, device=DEVICE).view(self.layers, KV_HEADS)
        members = torch.stack((columns // KV_HEADS, columns % KV_HEADS), -1).view(1, -1, 2)
        window = torch.zeros(self.layers, 2, 16, Q_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
        inv_freq = torch.ones(HEAD_DIM // 2, device=DEVICE)
        tables = (table, zeros, zeros.clone(), torch.zeros_like(columns), columns, members)
        return KVView([store], *tables, window, inv_freq, page_size)

    def batch_of(self, q_len: int) -> ForwardInputs:
        """The last q_len tokens of every sequence."""
        tensor = lambda values: torch.tensor(values, dtype=torch.int64, device=DEVICE)  # noqa: E731
        slots, none = list(range(1, self.batch + 1)), tensor([])
        positions = torch.arange(self.length - q_len, self.length, device=DEVICE).repeat(self.batch)
        return ForwardInputs(
            tokens=torch.zeros_like(positions),
            positions=positions,
            q_start=torch.arange(self.batch + 1, device=DEVICE) * q_len,
            slots=tensor(slots),
            seq_lens=tensor([self.length] * self.batch),
            logits_at=none,
            window_slots=torch.zeros_like(positions),
            window_index=torch.zeros_like(positions),
            keeps_window=False,
            host_q_lens=[q_len] * self.batch,
            host_slots=slots,
            host_seq_lens=[self.length] * self.batch,
        )


def relative_error(kv: KVView, q: Tensor, out: Tensor, layer: int, q_len: int, length: int, sequences: list[int]):
    """Largest relative error of a head's output against float32 attention by torch over decoded rows, a few queries."""
    store, worst = kv.tiers[0], 0.0
    per_head = Q_HEADS // KV_HEADS
    for b in sequences:
        pages = kv.page_table[b + 1, 0].long()
        for head in (0, KV_HEADS - 1):
            column = int(kv.column_of[layer, head])
            keys, values = (
                codec.decode(
                    store.planes[f"{role}_data"][pages, column].flatten(0, 1),
                    store.planes[f"{role}_scale"][pages, column].flatten(0, 1),
                    torch.float32,
                )
                for role, codec in (("k", store.format.k), ("v", store.format.v))
            )
            for j in {0, q_len // 2, q_len - 1}:
                seen, heads = length - q_len + j + 1, slice(head * per_head, (head + 1) * per_head)
                weights = torch.softmax(q[b * q_len + j, heads].float() @ keys[:seen].T * SCALE, -1)
                expected, got = weights @ values[:seen], out[b * q_len + j, heads].float()
                error = ((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max()
                worst = max(worst, float(error)) if error == error else math.inf
    return worst


def checked(kv: KVView, backend, q: Tensor, fwd: ForwardInputs, q_len: int, length: int) -> float:
    """Relative error of one call; raises if it is too large, or if a result was not written."""
    layer = kv.group_of.shape[0] - 1
    fwd.plan = None
    unwritten = torch.full_like(q, math.nan)
    del unwritten  # its memory is what the allocator gives to an output that is not written
    out = backend.attend(kv, layer, q, fwd, SCALE)
    error = relative_error(kv, q, out, layer, q_len, length, sorted({0, len(fwd.host_slots) - 1}))
    if not (error <= LIMIT and bool(torch.isfinite(out).all())):
        raise ValueError(f"relative error {error:.2e} against torch, limit {LIMIT:g}")
    return error


class Report:
    """Rows of results: kept for the JSON, printed in one line each."""

    def __init__(self, bandwidth: float):
        self.bandwidth = bandwidth
        self.rows: list[dict] = []
        self.start = time.monotonic()

    def attempt(self, label: dict, measure: Callable[[], dict]) -> dict | None:
        """One failing variant must not lose the others."""
        try:
            row = label | measure()
        except Exception as error:
            torch.cuda.empty_cache()
            row = label | {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
            self.rows.append(row)
            if sum("failed" in row for row in self.rows) <= 8:  # the rest are in the JSON
                print("FAILED", json.dumps(row)[:260], flush=True)
            return None
        self.rows.append(row)
        return row

    def elapsed(self) -> float:
        return time.monotonic() - self.start


def time_decode(cache: Cache, kv: KVView, backend, bandwidth: float) -> dict:
    fwd = cache.batch_of(1)
    q = torch.randn(cache.batch, Q_HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    error = checked(kv, backend, q, fwd, 1, cache.length)
    fwd.plan = None
    spent = seconds(lambda: [backend.attend(kv, l, q, fwd, SCALE) for l in range(cache.layers)]) / cache.layers
    rate = cache.layer_bytes / spent
    return {"us": spent * 1e6, "tb_s": rate / 1e12, "share": rate / bandwidth, "error": error}


def shape_of(variant: tuple[int, int, int], default: DecodeShape, filled: float = 1.0) -> DecodeShape:
    """A variant (tile, warps, stages) with `filled` times as many warps at work as the engine aims at."""
    tile, warps, stages = variant
    programs = int(default.programs * default.warps / warps * filled)
    return dataclasses.replace(default, tile=tile, warps=warps, stages=stages, programs=programs)


Variant = tuple[int, int, int]


def decode_rows(
    report: Report,
    format: str,
    size: tuple[int, int],
    tries: list[tuple[Variant, int, float]],
    seconds_left: Callable[[], float],
) -> list[dict]:
    """Results of (variant, page size, share of the usual number of programs) on one shape, as far as time allows."""
    default, rows = decode_shape(device_codec(parse_format(format).v), HEAD_DIM), []
    cache = Cache(format, *size)
    for variant, page, filled in tries:
        if seconds_left() < 0:
            break
        label = {"what": "decode", "format": format, "batch": size[0], "length": size[1], "page": page}
        label |= {"variant": variant, "filled": filled}
        backend = TritonBackend(decode=shape_of(variant, default, filled))
        rows.append(report.attempt(label, partial(time_decode, cache, cache.view(page), backend, report.bandwidth)))
    return [row for row in rows if row]


def decode_format(report: Report, format: str, seconds_left: Callable[[], float]) -> None:
    """All variants on two shapes, then the best of them everywhere, then the number of programs and page sizes."""
    scores: dict[Variant, list[float]] = {}
    for size in PROBES:
        for row in decode_rows(report, format, size, [(v, 64, 1.0) for v in SHAPES[format]], seconds_left):
            scores.setdefault(row["variant"], []).append(row["share"])
        torch.cuda.empty_cache()
    best = sorted(scores, key=lambda variant: (-len(scores[variant]), -min(scores[variant])))
    line = "  ".join(f"{v}:{'/'.join(f'{share:.2f}' for share in scores[v])}" for v in best)
    print(f"{format} share of copy at {PROBES} by (tile, warps, stages): {line}", flush=True)
    tries = [(variant, 64, filled) for variant in best[:2] for filled in (0.5, 1.0, 2.0)]
    tries += [(variant, page, 1.0) for variant in best[:1] for page in (16, 32, 128)]
    for size in DECODE:
        rows = decode_rows(report, format, size, tries, seconds_left)
        torch.cuda.empty_cache()
        if rows:
            top = max((row for row in rows if row["page"] == 64), key=lambda row: row["share"])
            pages = " ".join(f"{row['page']}:{row['us']:.0f}" for row in rows if row["page"] != 64)
            print(
                f"{format:5s} {size[0]:4d}x{size[1]:<6d} {top['us']:7.0f} us {top['tb_s']:.2f} TB/s {top['share']:4.0%}"
                f"  {top['variant']} x{top['filled']}  err {top['error']:.1e}  by page {pages}",
                flush=True,
            )


def uneven(report: Report, format: str) -> None:
    """Decode of sequences of unequal lengths, with half, all and twice the warps that the engine aims at."""
    default = decode_shape(device_codec(parse_format(format).v), HEAD_DIM)
    variant = default.tile, default.warps, default.stages
    for batch, shortest, longest in UNEVEN:
        cache, draw = Cache(format, batch, -(-longest // 128) * 128), random.Random(1)
        lengths = [draw.randint(shortest, longest) for _ in range(batch)]
        for page in (32, 64):
            for filled in (0.5, 1.0, 2.0):
                label = {"what": "uneven", "format": format, "batch": batch, "lengths": [shortest, longest]}
                backend = TritonBackend(decode=shape_of(variant, default, filled))
                measure = partial(time_uneven, cache, cache.view(page), backend, lengths)
                if row := report.attempt(label | {"page": page, "filled": filled}, measure):
                    print(
                        f"uneven {format} {batch} x {shortest}-{longest} page {page}, warps x {filled}:"
                        f" {row['us']:.0f} us {row['tb_s']:.2f} TB/s",
                        flush=True,
                    )
        torch.cuda.empty_cache()


def time_uneven(cache: Cache, kv: KVView, backend: TritonBackend, lengths: list[int]) -> dict:
    fwd = cache.batch_of(1)
    q = torch.randn(cache.batch, Q_HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    error = checked(kv, backend, q, fwd, 1, cache.length)  # at the full length
    fwd.seq_lens, fwd.plan = torch.tensor(lengths, device=DEVICE), None
    spent = seconds(lambda: [backend.attend(kv, l, q, fwd, SCALE) for l in range(cache.layers)]) / cache.layers
    rate = cache.layer_bytes * sum(lengths) / (cache.batch * cache.length) / spent
    return {"us": spent * 1e6, "tb_s": rate / 1e12, "error": error}


def time_prefill(cache: Cache, q: Tensor, q_len: int, flops: float, variant: Variant | None) -> dict:
    """As the engine does it, or, with a variant, by the paged kernel alone."""
    kv, fwd = cache.view(64), cache.batch_of(q_len)
    backend = TritonBackend(prefill=Shape(*variant) if variant else None)
    error = checked(kv, backend, q, fwd, q_len, cache.length)
    spent = seconds(lambda: backend.attend(kv, 0, q, fwd, SCALE), graph=False)
    return {"us": spent * 1e6, "tflop_s": flops / spent / 1e12, "error": error}


def prefill(report: Report, seconds_left: Callable[[], float]) -> None:
    for q_len, length in PREFILL:
        q = torch.randn(q_len, Q_HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
        flops = prefill_flops(q_len, length)
        for format in ("bf16", "int4"):
            cache, rows = Cache(format, 1, length), []
            label = {"what": "prefill", "format": format, "q_len": q_len, "length": length}
            if row := report.attempt(label, partial(time_prefill, cache, q, q_len, flops, None)):
                print(f"prefill {format} q {q_len} of {length}: {row['tflop_s']:.0f} TFLOP/s", flush=True)
            for variant in PREFILL_SHAPES:
                if seconds_left() < 0:
                    break
                paged = label | {"what": "prefill paged", "variant": variant}
                rows.append(report.attempt(paged, partial(time_prefill, cache, q, q_len, flops, variant)))
            line = "  ".join(f"{row['variant']}:{row['tflop_s']:.0f}" for row in rows if row)
            print(f"prefill {format} q {q_len} of {length}, TFLOP/s by (tile, warps, stages): {line}", flush=True)


def compaction_work(format: str, num_jobs: int) -> tuple[Compressor, list[Job]]:
    """Folds of a model of the shape of Qwen3-4B, whole sequences of 1280 rows down to 1024, from random rows."""
    size, source, kept = 64, COMPACTION_ROWS // 64, COMPACTION_KEEP // 64
    pages, columns = num_jobs * (source + kept) + 1, COMPACTION_LAYERS * KV_HEADS
    state = SCORERS.get("zipage").state
    store = PageStore(parse_format(format), pages, columns, size, HEAD_DIM, state, DEVICE)
    for plane in store.planes.values():
        if plane.shape[-1]:
            fill(plane.transpose(0, 1))
    if "fp8" in format:
        for name in ("k_scale", "v_scale"):
            store.planes[name].fill_(0.01)
    owned = torch.randperm(pages - 1, device=DEVICE, dtype=torch.int32) + 1
    table = torch.zeros(num_jobs + 1, 1, source, dtype=torch.int32, device=DEVICE)
    table[1:, 0] = owned[: num_jobs * source].view(num_jobs, source)
    evicted = torch.full((num_jobs + 1, 1), size, dtype=torch.int32, device=DEVICE)
    ids = torch.arange(columns, dtype=torch.int32, device=DEVICE).view(COMPACTION_LAYERS, KV_HEADS)
    members = torch.stack((ids // KV_HEADS, ids % KV_HEADS), -1).view(1, columns, 2)
    window = torch.randn(COMPACTION_LAYERS, num_jobs + 1, 16, Q_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
    tables = (table, evicted, torch.zeros_like(evicted), torch.zeros_like(ids), ids, members, window)
    kv = KVView([store], *tables, torch.ones(HEAD_DIM // 2, device=DEVICE), size)
    fresh = owned[num_jobs * source :].view(num_jobs, kept).cpu().numpy()
    length = COMPACTION_ROWS
    jobs = [
        Job(j + 1, 0, 0, source, length, length + size, COMPACTION_KEEP, fresh[j], 0, j + 1, 0) for j in range(num_jobs)
    ]
    return Compressor(TritonBackend(), kv, SCALE), jobs


@torch.inference_mode()
def time_compaction(format: str, num_jobs: int, scorer: str) -> dict:
    """An event as the runner launches it: from the first launch to the last kernel's end, and what kernels take."""
    compressor, jobs = compaction_work(format, num_jobs)
    policies = [ScorePolicy(scorer, 4, 16)]
    event = lambda: compressor.run(jobs, policies)  # noqa: E731
    spent = seconds(event, 0.1, graph=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        event()
        torch.cuda.synchronize()
    kernels = [item for item in profile.events() or () if item.device_type.name == "CUDA"]
    took: Counter[str] = Counter()
    for item in kernels:
        took[item.name[:40]] += item.device_time
    return {
        "us": spent * 1e6,
        "kernel_us": sum(item.device_time for item in kernels),
        "launches": len(kernels),
        "longest": dict(took.most_common(8)),
    }


def compaction(report: Report, formats: list[str]) -> None:
    for format in formats:
        for num_jobs in COMPACTION_JOBS:
            for scorer in ("zipage", "zipage:redundancy=none", "expected"):
                label = {"what": "compaction", "format": format, "jobs": num_jobs, "scorer": scorer}
                if row := report.attempt(label, partial(time_compaction, format, num_jobs, scorer)):
                    print(
                        f"compaction {format} of {num_jobs} by {scorer}: {row['us']:.0f} us an event, kernels"
                        f" {row['kernel_us']:.0f} us in {row['launches']} launches; {row['longest']}",
                        flush=True,
                    )
                torch.cuda.empty_cache()


def decode_layers(layer_bytes: int) -> int:
    """Layers that a timed graph reads one after the other."""
    return max(1, min(8, math.ceil(LAYER_BYTES / layer_bytes)))


def prefill_flops(q_len: int, length: int) -> float:
    """Of causal attention: what a query may not see is not counted."""
    return 4 * Q_HEADS * HEAD_DIM * (q_len * (length - q_len) + q_len * q_len / 2)


def flash_attention_3(report: Report, home: PeerHome) -> None:
    """FlashAttention-3 of vLLM, in a process of its own but timed like ours; a missing one is a row that says so."""
    shapes: list[dict] = []
    for batch, length, page in FLASH_PAGES:
        shape = {"what": "decode", "batch": batch, "length": length, "page": page}
        shapes.append(shape | {"layers": decode_layers(batch * length * KV_HEADS * HEAD_DIM * 4)})
    shapes += [{"what": "prefill", "q_len": q_len, "length": length} for q_len, length in PREFILL]
    answer = run_flash_attention_3(shapes, (Q_HEADS, KV_HEADS, HEAD_DIM), home)
    if "note" in answer:
        answer["rows"] = [{"what": "decode", "failed": answer["note"]}]
    for shape in answer["rows"]:
        what = f"{shape['what']} fa3"
        if "failed" in shape:
            report.attempt({"what": what}, partial(_fail, shape["failed"]))
            continue
        spent = shape["us"] / 1e6
        row = shape | {"what": what, "format": "bf16"}
        if shape["what"] == "decode":
            rate = shape["batch"] * shape["length"] * KV_HEADS * HEAD_DIM * 4 / spent
            row |= {"tb_s": rate / 1e12, "share": rate / report.bandwidth}
            place = f"{row['batch']:4d}x{row['length']:<6d} page {row['page']}"
            words = f"{row['tb_s']:.2f} TB/s {row['share']:4.0%}"
        else:
            row |= {"tflop_s": prefill_flops(shape["q_len"], shape["length"]) / spent / 1e12}
            place, words = f"prefill q {row['q_len']} of {row['length']}", f"{row['tflop_s']:.0f} TFLOP/s"
        report.rows.append(row)
        print(f"fa3   {place} {row['us']:7.0f} us {words}", flush=True)


def _fail(why: str) -> dict:
    raise RuntimeError(why)


# ---- tables for docs/benchmarks.md


def best_row(rows: list[dict], by: str, **wanted: object) -> dict | None:
    """The measured row with the most `by` among those that have the wanted fields."""
    fitting = [row for row in rows if by in row and all(row.get(key) == value for key, value in wanted.items())]
    return max(fitting, key=lambda row: row[by], default=None)


def markdown(rows: list[dict], formats: list[str]) -> str:
    """Decode by rate and share of the copy, prefill by arithmetic; "-" where nothing was measured."""
    decode = lambda row: f"{row['us']:.0f} us, {row['tb_s']:.2f} ({row['share']:.0%})" if row else "-"  # noqa: E731
    fixed = {"FA3 bf16, page 16": {"what": "decode fa3", "page": 16}, "page 256": {"what": "decode fa3", "page": 256}}
    columns = fixed | {format: {"what": "decode", "format": format, "page": 64} for format in formats}
    lines = _header("batch x length", columns)
    for batch, length in DECODE:
        cells = [decode(best_row(rows, "tb_s", batch=batch, length=length, **want)) for want in columns.values()]
        lines.append(f"| {batch} x {length} | {' | '.join(cells)} |")
    columns = {"FA3": {"what": "prefill fa3"}}
    for format in ("bf16", "int4"):
        columns[f"engine, {format}"] = {"what": "prefill", "format": format}
        columns[f"paged kernel alone, {format}"] = {"what": "prefill paged", "format": format}
    lines += ["", *_header("TFLOP/s, q of context", columns)]
    for q_len, length in PREFILL:
        found = [best_row(rows, "tflop_s", q_len=q_len, length=length, **want) for want in columns.values()]
        cells = [f"{row['tflop_s']:.0f}" if row else "-" for row in found]
        lines.append(f"| {q_len} of {length} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _header(first: str, columns: dict[str, dict]) -> list[str]:
    return [f"| {first} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for all results")
    parser.add_argument("--formats", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--fa3", action="store_true", help="also time the FlashAttention-3 that vLLM brings")
    parser.add_argument("--peer-path", metavar="DIR", help="folder of vLLM's packages, if it is not installed")
    parser.add_argument("--peer-python", metavar="PATH", help="interpreter that has vLLM; default: this one")
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--uneven", action="store_true", help="time decode of unequal lengths, and nothing else")
    parser.add_argument("--compaction", action="store_true", help="time compactions, and nothing else")
    parser.add_argument("--seconds", type=float, default=130, help="start nothing new after this long")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench kernels: needs a CUDA device")
    torch.manual_seed(0)
    report = Report(copy_bandwidth())
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}: copy {report.bandwidth / 1e12:.2f} TB/s", flush=True)
    left = lambda: args.seconds - report.elapsed()  # noqa: E731
    try:
        if args.compaction:
            compaction(report, args.formats)
            return
        if args.uneven:
            for format in args.formats:
                uneven(report, format)
            return
        if args.fa3:
            flash_attention_3(report, PeerHome(args.peer_python, args.peer_path))
        for i, format in enumerate(args.formats):
            share = left() * (0.8 if not args.no_prefill else 1.0) / (len(args.formats) - i)
            until = report.elapsed() + share
            decode_format(report, format, lambda until=until: until - report.elapsed())
        if not args.no_prefill:
            prefill(report, left)
    finally:
        if args.json:
            with open(args.json, "w") as file:
                json.dump({"device": device, "copy_tb_s": report.bandwidth / 1e12, "rows": report.rows}, file, indent=1)
    print(f"\n{markdown(report.rows, args.formats)}\n\n{report.elapsed():.0f} s", flush=True)


if __name__ == "__main__":
    main()
