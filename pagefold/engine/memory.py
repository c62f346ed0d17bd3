"""What a GPU's memory is spent on: measured before the KV pages are allocated, told at the start."""

from dataclasses import dataclass

import numpy as np
import torch

from pagefold.backends.base import Backend, KVView
from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError
from pagefold.engine.parts import Part, formats_of
from pagefold.kv.bounds import KVGeometry
from pagefold.models.decoder import Decoder
from pagefold.models.spec import ModelSpec
from pagefold.runner.inputs import Batch, forward_inputs
from pagefold.runner.runner import RANKED_ROWS

GRAPH_BYTES = 1 << 30  # kept for captured decode steps and what libraries take later
TIERS = ("hot", "cold")
CONTEXT_BYTES = 600 << 20  # what CUDA and its libraries take of a device for a process


@dataclass
class MemoryBudget:
    """Bytes of a GPU.

    total         of the device
    ours          taken by this process before: weights, tables, what CUDA itself needs
    activations   most that a step takes beside
    kv_bytes      what `gpu_memory_utilization` leaves for pages
    """

    total: int
    ours: int
    activations: int
    kv_bytes: int


@torch.inference_mode()
def measure(
    decoder: Decoder,
    backend: Backend,
    kv: KVView,
    config: EngineConfig,
    geometry: KVGeometry,
    max_model_len: int,
) -> MemoryBudget:
    """Run the largest step there can be, in slot 0's garbage room, and see what it takes.

    Raises InputError if the weights and one step leave nothing for pages.
    """
    num_tokens = config.scheduler.tokens_per_step
    backend.warm_up(kv, num_tokens, max_model_len)  # first, as what a library loads is among what others take
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    # as many chunks of slot 0 as it takes, each at the end of the longest sequence
    q_lens = np.diff([*range(0, num_tokens, max_model_len), num_tokens])
    zeros = np.zeros(num_tokens, np.int64)
    batch = Batch(
        tokens=zeros,
        positions=np.concatenate([np.arange(max_model_len - q_len, max_model_len) for q_len in q_lens]),
        window_slots=zeros,
        window_index=zeros,
        slots=zeros[: len(q_lens)],
        q_lens=q_lens,
        seq_lens=np.full_like(q_lens, max_model_len),
        num_logits=np.full_like(q_lens, 1),
    )
    drawn = torch.zeros(1, dtype=torch.int64, device=decoder.device)
    fwd = forward_inputs(batch, drawn, np.zeros((1, kv.page_table.shape[1]), np.int32))
    hidden = decoder.forward(fwd, kv, backend)
    num_rows = max(config.scheduler.max_num_seqs, RANKED_ROWS)
    decoder.logits(hidden[:1].expand(num_rows, -1)).float()  # a sampler may widen them
    torch.cuda.synchronize()
    activations = torch.cuda.max_memory_allocated() - before
    del hidden
    torch.cuda.empty_cache()
    kept = 0 if config.model.enforce_eager else GRAPH_BYTES
    share, cache = config.cache.gpu_memory_utilization, config.cache
    ours = torch.cuda.memory_reserved() + CONTEXT_BYTES
    room = free - activations - kept
    left = min(room, int(total * share) - ours - activations - kept)
    asked = cache.kv_cache_memory_bytes
    if asked is None and cache.num_pages is not None:
        asked = sum(pages * size for pages, size in zip(geometry.num_pages, geometry.bytes_per_page, strict=True))
    if asked is not None and asked > room:
        field = "num_pages" if cache.kv_cache_memory_bytes is None else "kv_cache_memory_bytes"
        raise InputError(field, f"got {getattr(cache, field)}, {asked} bytes; the device has {max(room, 0)} to give")
    if asked is None and left < sum(2 * size for size in geometry.bytes_per_page):
        raise InputError(
            "gpu_memory_utilization",
            f"got {share}, which is {total * share / 1e9:.1f} GB of {total / 1e9:.1f}; weights and tables take "
            f"{ours / 1e9:.1f} GB, one step of {num_tokens} tokens {(activations + kept) / 1e9:.1f}, and other "
            f"processes leave {free / 1e9:.1f} free",
        )
    return MemoryBudget(total, ours, activations, left)


def describe(
    config: EngineConfig,
    spec: ModelSpec,
    geometry: KVGeometry,
    parts: list[Part],
    kv: KVView,
    budget: MemoryBudget | None,
) -> str:
    """What fits and what it costs, a line for each."""
    lines = []
    if budget:
        lines.append(
            f"memory: {budget.total / 1e9:.1f} GB, {budget.ours / 1e9:.2f} taken by weights and tables, "
            f"{budget.activations / 1e9:.2f} by a step of {config.scheduler.tokens_per_step} tokens"
        )
    heads = spec.num_layers * spec.num_kv_heads
    for tier, (pages, size) in enumerate(zip(geometry.num_pages, geometry.bytes_per_page, strict=True)):
        row = size * geometry.num_groups / heads / geometry.page_size
        tokens = (pages - 1) // geometry.num_groups * geometry.page_size
        kind = f"{geometry.page_size} rows in {formats_of(parts, tier)}"
        lines.append(
            f"{TIERS[tier]} pages: {pages - 1} of {kind}, {pages * size / 1e9:.2f} GB; "
            f"{row:.0f} bytes a row and head, {row * heads:.0f} a token; {tokens} tokens fit, none evicted"
        )
    if kv.window.numel():
        lines.append(
            f"query windows: {geometry.window_slots} of {kv.window.shape[2]} queries, {kv.window.nbytes / 1e9:.2f} GB"
        )
    tables = kv.page_table.nbytes + kv.evicted.nbytes + kv.cold.nbytes
    lines.append(f"page tables: {geometry.max_seqs} requests, {geometry.num_groups} groups, {tables / 1e6:.1f} MB")
    return "\n".join(lines)
