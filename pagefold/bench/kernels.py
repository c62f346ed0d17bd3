"""Decode and prefill attention on a GPU against what the memory and the matrix units give.

    python -m pagefold.bench.kernels --json kernels.json --fa3

Bytes are those that a format defines, read once; times are of replayed CUDA graphs over several layers, which together
exceed the L2 cache. No number is printed for a kernel whose output was not first compared with torch.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from pagefold.backends.base import ForwardInputs, KVView
from pagefold.backends.triton.backend import TritonBackend
from pagefold.backends.triton.plan import DecodeShape, Shape, decode_shape, device_codec
from pagefold.store.format import parse_format
from pagefold.store.pagestore import PageStore

DEVICE = "cuda"
Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
DECODE = [(64, 1024), (64, 4096), (256, 1024), (256, 4096), (6, 131072), (1, 131072)]  # sequences, tokens of each
PREFILL = [(8192, 8192), (8192, 32768), (2048, 32768)]  # new tokens, tokens in all
LAYER_BYTES = 3 << 28  # of all layers that a timed graph reads: many times the L2 cache
LIMIT = 1e-2  # relative error that a kernel may have

# (tile, warps, stages), first those that looked best on paper
SHAPES = {
    "bf16": [(64, 4, 3), (64, 4, 2), (64, 4, 4), (128, 4, 2), (128, 4, 3), (64, 2, 3), (32, 2, 3), (32, 1, 3)],
    "fp8": [(64, 2, 3), (64, 4, 3), (64, 2, 4), (128, 2, 3), (128, 4, 3), (64, 1, 3), (32, 1, 4)],
    "int4": [(64, 1, 3), (64, 1, 4), (128, 2, 3), (128, 2, 2), (64, 2, 3), (64, 2, 4), (32, 1, 4)],
    "k4v2": [(64, 1, 3), (64, 1, 4), (64, 1, 2), (128, 1, 3), (128, 2, 3), (64, 2, 3), (32, 1, 4)],
}
PREFILL_SHAPES = [(64, 8, 2), (64, 8, 3), (128, 8, 2), (64, 4, 2), (64, 4, 3), (32, 4, 3)]


def seconds(work: Callable[[], object], budget: float = 0.03) -> float:
    """Median time of replaying a CUDA graph of `work`."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times, spent = [], 0.0
    while len(times) < 5 or (spent < budget and len(times) < 50):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
        spent += times[-1]
    return sorted(times[1:])[len(times[1:]) // 2]


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large device copy."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), 0.1)


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
        self.layers = max(1, min(8, math.ceil(LAYER_BYTES / self.layer_bytes)))
        num_pages = self.batch * self.length // self.max_page + 1
        self.store = PageStore(pair, num_pages, self.layers * KV_HEADS, self.max_page, HEAD_DIM, {}, DEVICE)
        for name, plane in self.store.planes.items():
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
            window_tokens=none,
            window_slots=none,
            window_index=none,
            host_q_lens=[q_len] * self.batch,
            host_slots=slots,
            host_seq_lens=[self.length] * self.batch,
        )


def relative_error(kv: KVView, q: Tensor, out: Tensor, layer: int, q_len: int, length: int, sequences: list[int]):
    """Largest relative error of whole heads against float32 attention by torch over decoded rows, a few queries each."""
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
        except Exception as error:  # noqa: BLE001 - compilers and devices fail in many ways
            torch.cuda.empty_cache()
            row = label | {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
            print("FAILED", json.dumps(row)[:260], flush=True)
            self.rows.append(row)
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
    tile, warps, stages = variant
    programs = int(132 * 16 / warps * filled)
    return dataclasses.replace(default, tile=tile, warps=warps, stages=stages, programs=programs)


def decode_format(report: Report, format: str, seconds_left: Callable[[], float]) -> None:
    """All variants on two shapes, then the best of them everywhere, then the number of programs and page sizes."""
    default = decode_shape(device_codec(parse_format(format).v), HEAD_DIM)
    probes, best = {}, []
    for variant in SHAPES[format]:
        for batch, length in ((64, 4096), (6, 131072)):
            if seconds_left() < 0:
                break
            cache = probes.setdefault((batch, length), Cache(format, batch, length))
            label = {"what": "decode", "format": format, "batch": batch, "length": length, "page": 64}
            label |= {"variant": variant, "filled": 1.0}
            backend = TritonBackend(decode=shape_of(variant, default))
            report.attempt(label, lambda: time_decode(cache, cache.view(64), backend, report.bandwidth))  # noqa: B023
    probes.clear()
    torch.cuda.empty_cache()
    scores: dict[tuple, list[float]] = {}
    for row in report.rows:
        if row["what"] == "decode" and row["format"] == format and "share" in row:
            scores.setdefault(row["variant"], []).append(row["share"])
    best = sorted(scores, key=lambda variant: -min(scores[variant]))[:2]
    line = "  ".join(f"{v}:{'/'.join(f'{s:.2f}' for s in scores[v])}" for v in sorted(scores, key=lambda v: -min(scores[v])))
    print(f"{format} share of copy at 64x4096/6x131072 by (tile, warps, stages): {line}", flush=True)
    for batch, length in DECODE:
        if seconds_left() < 0:
            return
        cache = Cache(format, batch, length)
        tries = [(variant, 64, filled) for variant in best for filled in (0.5, 1.0, 2.0)]
        tries += [(variant, page, 1.0) for variant in best[:1] for page in (16, 32, 128)]
        rows = []
        for variant, page, filled in tries:
            label = {"what": "decode", "format": format, "batch": batch, "length": length, "page": page}
            label |= {"variant": variant, "filled": filled}
            backend = TritonBackend(decode=shape_of(variant, default, filled))
            rows.append(
                report.attempt(label, lambda: time_decode(cache, cache.view(page), backend, report.bandwidth))  # noqa: B023
            )
        rows = [row for row in rows if row]
        if rows:
            top = max((row for row in rows if row["page"] == 64), key=lambda row: row["share"])
            pages = " ".join(f"{row['page']}:{row['us']:.0f}" for row in rows if row["page"] != 64)
            print(
                f"{format:5s} {batch:4d}x{length:<6d} {top['us']:7.0f} us {top['tb_s']:.2f} TB/s {top['share']:4.0%}"
                f"  {top['variant']} x{top['filled']}  err {top['error']:.1e}  by page {pages}",
                flush=True,
            )
        del cache
        torch.cuda.empty_cache()


def prefill(report: Report, seconds_left: Callable[[], float]) -> None:
    for q_len, length in PREFILL:
        for format in ("bf16", "int4"):
            cache = Cache(format, 1, length)
            kv, fwd = cache.view(64), cache.batch_of(q_len)
            q = torch.randn(q_len, Q_HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
            flops = 4 * Q_HEADS * HEAD_DIM * (q_len * (length - q_len) + q_len * q_len / 2)
            rows = []
            for variant in PREFILL_SHAPES:
                if seconds_left() < 0:
                    return
                backend = TritonBackend(prefill=Shape(*variant))

                def measure() -> dict:
                    error = checked(kv, backend, q, fwd, q_len, length)  # noqa: B023
                    spent = seconds(lambda: backend.attend(kv, 0, q, fwd, SCALE))  # noqa: B023
                    return {"us": spent * 1e6, "tflop_s": flops / spent / 1e12, "error": error}  # noqa: B023

                label = {"what": "prefill", "format": format, "q_len": q_len, "length": length, "variant": variant}
                rows.append(report.attempt(label, measure))
            rows = [row for row in rows if row]
            line = "  ".join(f"{row['variant']}:{row['tflop_s']:.0f}" for row in rows)
            print(f"prefill {format} q {q_len} of {length}, TFLOP/s by (tile, warps, stages): {line}", flush=True)
            if format == "bf16":
                prefill_cudnn(report, q, q_len, length, flops)


def prefill_cudnn(report: Report, q: Tensor, q_len: int, length: int, flops: float) -> None:
    """The same arithmetic as two cuDNN calls over contiguous rows: the prefix unmasked, the chunk a causal square."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    keys, values = torch.randn(2, 1, KV_HEADS, length, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    query = q.transpose(0, 1)[None].contiguous()
    past = length - q_len

    def work() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            if past:
                scaled_dot_product_attention(query, keys[:, :, :past], values[:, :, :past], enable_gqa=True)
            scaled_dot_product_attention(query, keys[:, :, past:], values[:, :, past:], is_causal=True, enable_gqa=True)

    def measure() -> dict:
        spent = seconds(work)
        return {"us": spent * 1e6, "tflop_s": flops / spent / 1e12}

    row = report.attempt({"what": "prefill cudnn, unmerged", "q_len": q_len, "length": length}, measure)
    if row:
        print(f"prefill cuDNN, two calls, q {q_len} of {length}: {row['tflop_s']:.0f} TFLOP/s", flush=True)


def flash_attention_3(report: Report) -> None:
    """FlashAttention-3 of a vLLM installation, over pages of 16 rows, timed like ours."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    for batch, length in DECODE:
        layer_bytes = batch * length * KV_HEADS * HEAD_DIM * 4
        layers = max(1, min(8, math.ceil(LAYER_BYTES / layer_bytes)))
        pages = batch * length // 16
        cache = torch.empty(layers, 2, pages, 16, KV_HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
        for layer in cache:
            layer.normal_()
        q = torch.randn(batch, Q_HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
        starts = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32)
        lengths = torch.full((batch,), length, device=DEVICE, dtype=torch.int32)
        table = torch.randperm(pages, device=DEVICE, dtype=torch.int32).view(batch, -1)

        def work() -> None:
            for keys, values in cache:  # noqa: B023
                flash_attn_varlen_func(
                    q, keys, values, max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=length,  # noqa: B023
                    seqused_k=lengths, block_table=table, causal=True, fa_version=3,  # noqa: B023
                )  # fmt: skip

        def measure() -> dict:
            spent = seconds(work) / layers  # noqa: B023
            rate = layer_bytes / spent  # noqa: B023
            return {"us": spent * 1e6, "tb_s": rate / 1e12, "share": rate / report.bandwidth}

        row = report.attempt({"what": "decode fa3", "format": "bf16", "batch": batch, "length": length}, measure)
        if row:
            print(f"fa3   {batch:4d}x{length:<6d} {row['us']:7.0f} us {row['tb_s']:.2f} TB/s {row['share']:4.0%}", flush=True)
        del cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for all results")
    parser.add_argument("--formats", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--fa3", action="store_true", help="also time FlashAttention-3, if vLLM is installed")
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--seconds", type=float, default=220, help="start nothing new after this long")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench kernels: needs a CUDA device")
    torch.manual_seed(0)
    report = Report(copy_bandwidth())
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}: copy {report.bandwidth / 1e12:.2f} TB/s", flush=True)
    left = lambda: args.seconds - report.elapsed()  # noqa: E731
    try:
        if args.fa3:
            report.attempt({"what": "fa3"}, lambda: flash_attention_3(report) or {})
        for i, format in enumerate(args.formats):
            share = left() * (0.8 if not args.no_prefill else 1.0) / (len(args.formats) - i)
            until = report.elapsed() + share
            decode_format(report, format, lambda: until - report.elapsed())  # noqa: B023
        if not args.no_prefill:
            prefill(report, left)
    finally:
        if args.json:
            with open(args.json, "w") as file:
                json.dump({"device": device, "copy_tb_s": report.bandwidth / 1e12, "rows": report.rows}, file, indent=1)
    print(f"{report.elapsed():.0f} s", flush=True)


if __name__ == "__main__":
    main()
