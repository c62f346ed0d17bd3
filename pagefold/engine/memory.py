"""What a GPU's memory is spent on: measured before the KV pages are allocated, told at the start."""

from dataclasses import dataclass

import numpy as np
import torch

from pagefold.backends.base import Backend, KVView
from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError
from pagefold.kv.manager import KVGeometry
from pagefold.models.decoder import Decoder
from pagefold.models.spec import ModelSpec
from pagefold.runner.inputs import Batch, forward_inputs
from pagefold.store.format import FormatPair

GRAPH_BYTES = 1 << 30  # kept for captured decode steps and what libraries take later


@dataclass
class MemoryBudget:
    """Bytes of a GPU.

    total         of the device
    other         taken before: by this process for weights and tables, by other processes, by the CUDA context
    activations   most that a step takes beside
    kv_bytes      what `gpu_memory_utilization` leaves for pages
    """

    total: int
    other: int
    activations: int
    kv_bytes: int


@torch.inference_mode()
def measure(decoder: Decoder, backend: Backend, kv: KVView, config: EngineConfig, max_model_len: int) -> MemoryBudget:
    """Run the largest step there can be, in slot 0's garbage room, and see what it takes.

    Raises InputError if the weights and one step leave nothing for pages.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    num_tokens = min(config.scheduler.tokens_per_step, max_model_len)
    num_rows = config.scheduler.max_num_seqs
    zeros = np.zeros(num_tokens, np.int64)
    batch = Batch(
        tokens=zeros,
        positions=np.arange(max_model_len - num_tokens, max_model_len),
        window_slots=zeros,
        window_index=zeros,
        slots=zeros[:1],
        q_lens=np.array([num_tokens]),
        seq_lens=np.array([max_model_len]),
        num_logits=np.array([min(num_rows, num_tokens)]),
    )
    drawn = torch.zeros(1, dtype=torch.int64, device=decoder.device)
    fwd = forward_inputs(batch, drawn, np.zeros((1, kv.page_table.shape[1]), np.int32))
    hidden = decoder.forward(fwd, kv, backend)
    decoder.logits(hidden[fwd.logits_at]).float()  # a sampler may widen them
    torch.cuda.synchronize()
    activations = torch.cuda.max_memory_allocated() - before
    del hidden
    torch.cuda.empty_cache()
    kept = 0 if config.model.enforce_eager else GRAPH_BYTES
    share = config.cache.gpu_memory_utilization
    left = int(total * share) - (total - free) - activations - kept
    asked = config.cache.kv_cache_memory_bytes
    if asked is None and config.cache.num_pages is None and left <= 0:
        need = (total - free + activations + kept) / 1e9
        raise InputError(
            "gpu_memory_utilization",
            f"got {share}, which is {total * share / 1e9:.1f} GB of {total / 1e9:.1f}; weights, tables and one step of "
            f"{num_tokens} tokens take {need:.1f} GB",
        )
    room = free - activations - kept
    if asked is not None and asked > room:
        raise InputError("kv_cache_memory_bytes", f"got {asked}, the device has {max(room, 0)} to give")
    return MemoryBudget(total, total - free, activations, left)


def describe(
    config: EngineConfig,
    spec: ModelSpec,
    geometry: KVGeometry,
    formats: list[FormatPair],
    kv: KVView,
    budget: MemoryBudget | None,
) -> str:
    """What fits and what it costs, a line for each."""
    lines = []
    if budget:
        lines.append(
            f"memory: {budget.total / 1e9:.1f} GB, {budget.other / 1e9:.2f} taken by weights, tables and others, "
            f"{budget.activations / 1e9:.2f} by a step of {config.scheduler.tokens_per_step} tokens"
        )
    heads = spec.num_layers * spec.num_kv_heads
    for name, fmt, pages, size in zip(
        ("hot", "cold"), formats, geometry.num_pages, geometry.bytes_per_page, strict=False
    ):
        row = size * geometry.num_groups / heads / geometry.page_size
        tokens = (pages - 1) // geometry.num_groups * geometry.page_size
        lines.append(
            f"{name} pages: {pages - 1} of {geometry.page_size} rows in {fmt.name}, {pages * size / 1e9:.2f} GB; "
            f"{row:.0f} bytes a row and head, {row * heads:.0f} a token; {tokens} tokens fit, none evicted"
        )
    if kv.window.numel():
        lines.append(
            f"query windows: {geometry.window_slots} of {kv.window.shape[2]} tokens, {kv.window.nbytes / 1e9:.2f} GB"
        )
    tables = kv.page_table.nbytes + kv.evicted.nbytes + kv.cold.nbytes
    lines.append(f"page tables: {geometry.max_seqs} requests, {geometry.num_groups} groups, {tables / 1e6:.1f} MB")
    return "\n".join(lines)
