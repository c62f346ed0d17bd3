"""Captured forward passes of decode batches: one launch instead of some hundreds.

A graph holds addresses, not values. Everything a decode step reads lies at a fixed place: the stores, the page tables,
the tokens drawn last, and the batch's own numbers, which are copied into `_columns` before a replay.
"""

import gc
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from pagefold.backends.base import Backend, ForwardInputs, KVView
from pagefold.runner.inputs import Batch
from pagefold.runner.model import Model

LARGEST = 512  # beyond it a step is long enough to hide its launches
_PADDING = np.array([[0], [0], [0], [1], [0], [0]])  # a token of slot 0, whose sequence is one token long


@contextmanager
def nothing_collected() -> Iterator[None]:
    """No garbage is collected meanwhile: what it holds on a device would be freed, which spoils a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def graph_sizes(most: int) -> list[int]:
    """Batch sizes to capture for batches of at most `most` tokens; a batch is padded to the next one."""
    most = min(most, LARGEST)
    sizes = [1, 2, 4, *range(8, min(most, 256) + 8, 8), *range(272, most + 16, 16)]
    return [size for size in sizes if size < most] + [most]


class DecodeGraphs:
    """Replays the model for batches of single tokens.

    sizes           ascending batch sizes
    max_model_len   longest sequence, for which the work of attention is laid out
    drawn           int64[slots], the token drawn last for each slot
    """

    def __init__(self, model: Model, backend: Backend, kv: KVView, sizes: list[int], max_model_len: int, drawn: Tensor):
        self._sizes = sizes
        self._columns = torch.zeros(6, sizes[-1], dtype=torch.int64, device=drawn.device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, ForwardInputs]] = {}
        self._columns.copy_(torch.from_numpy(_PADDING))
        pool = None
        for size in reversed(sizes):  # the largest first: the others fit into its memory
            fwd = self._inputs(size, kv, max_model_len)

            def step(fwd: ForwardInputs = fwd, tokens: Tensor = self._columns[0, :size]) -> Tensor:
                fwd.tokens, fwd.plan = torch.where(tokens < 0, drawn[fwd.slots], tokens), None
                return model.forward(fwd, kv, backend)

            step()  # kernels are compiled and libraries set up outside of the capture
            graph = torch.cuda.CUDAGraph()
            with nothing_collected(), torch.cuda.graph(graph, pool=pool):
                hidden = step()
            pool = graph.pool()
            self._graphs[size] = graph, hidden, fwd  # whose tensors the graph reads

    def _inputs(self, size: int, kv: KVView, max_model_len: int) -> ForwardInputs:
        tokens, positions, slots, seq_lens, window_slots, window_index = self._columns[:, :size]
        return ForwardInputs(
            tokens=tokens,
            positions=positions,
            q_start=torch.arange(size + 1, device=tokens.device),
            slots=slots,
            seq_lens=seq_lens,
            logits_at=tokens[:0],
            window_slots=window_slots,
            window_index=window_index,
            keeps_window=kv.window.shape[2] > 0,
            host_q_lens=[1] * size,
            host_slots=[0] * size,
            host_seq_lens=[max_model_len] * size,
        )

    def fits(self, batch: Batch) -> bool:
        return batch.single_tokens and len(batch.slots) <= self._sizes[-1]

    def replay(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """(hidden states [B, hidden], tokens int64[B], slots int64[B]) of the batch; overwritten by the next replay.
        Logits are left out: those of all sizes would be gigabytes."""
        num = len(batch.slots)
        size = self._sizes[bisect_left(self._sizes, num)]
        columns = torch.empty(self._columns.shape, dtype=torch.int64, pin_memory=True)
        rows = batch.tokens, batch.positions, batch.slots, batch.seq_lens, batch.window_slots, batch.window_index
        host = columns.numpy()
        for column, values in zip(host, rows, strict=True):
            column[:num] = values
        host[:, num:] = _PADDING
        self._columns.copy_(columns, non_blocking=True)
        graph, hidden, fwd = self._graphs[size]
        graph.replay()
        return hidden[:num], fwd.tokens[:num], self._columns[2, :num]
