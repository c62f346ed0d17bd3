"""The contract between the model, the compressor and whoever touches page bytes."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagefold.store.pagestore import PageStore


@dataclass
class KVView:
    """Everything a backend may read or write of the cache: tensors only.

        tiers         hot store, and the cold one if there is a cold tier
        page_table    int32[slots, G, max_pages]  entries [0, cold) are pages of the cold tier, the rest of the hot one
        evicted       int32[slots, G]   rows dropped so far, a multiple of the page size
        cold          int32[slots, G]   leading pages that sit in the cold tier
        group_of      int32[L, H]       page-table row of a head
        column_of     int32[L, H]       its column
        members       int32[G, Hp, 2]   (layer, head) of each (group, column)
        window        float[L, window slots, w, Hq, D]   queries of tokens before a compaction (post-RoPE)
        inv_freq      float[rotary_dim / 2]   RoPE frequencies, for `expected_logits`
        page_size     rows per page
        window_stride tokens from one query of a window to the next; the last one is of the last token
        apart         the view of layers whose rows have another format: the same tables, stores and columns of their
                      own; None if there are none. `members` and the stores of this view are without them
        layers_apart  these layers
        foresight     what a backend turns the window's queries by to foresee those to come, by horizon

    Addressing, the one rule that every backend shares:

        n   = seq_len - evicted[slot, g]            rows stored for head (l, h), g = group_of[l, h]
        row i of the head is index i % page_size of page page_table[slot, g, i // page_size], column column_of[l, h]
        query j of a chunk of q_len sees rows [0, n - q_len + j + 1); order is age, so causal needs no positions
    """

    tiers: list[PageStore]
    page_table: Tensor
    evicted: Tensor
    cold: Tensor
    group_of: Tensor
    column_of: Tensor
    members: Tensor
    window: Tensor
    inv_freq: Tensor
    page_size: int
    window_stride: int = 1
    apart: "KVView | None" = None
    layers_apart: frozenset[int] = frozenset()
    foresight: dict[int, Tensor] = field(default_factory=dict, init=False)

    def of(self, layer: int) -> "KVView":
        """Where the rows of a layer are: what a backend is to be given with it."""
        return self.apart if self.apart and layer in self.layers_apart else self

    @property
    def parts(self) -> list["KVView"]:
        """This view, and the one of layers apart if there are any: together they have every column of every page."""
        return [self, self.apart] if self.apart else [self]

    def queries(self, groups: Tensor, window_slots: Tensor, columns: slice) -> Tensor:
        """The windows' queries of some columns of jobs, whose groups and window slots are int64[J]: `row_dtype`
        [J, C, w, R, D], oldest first, R query heads per KV head."""
        layers, heads = self.members[groups][:, columns].long().unbind(-1)  # [J, C]
        per_head = self.window.shape[3] // self.group_of.shape[1]
        return self.window.unflatten(3, (-1, per_head))[layers, window_slots[:, None], :, heads].to(self.row_dtype)

    @property
    def row_dtype(self) -> torch.dtype:
        """What rows are decoded to outside attention: float64 where the model computes in it, else float32."""
        return torch.float64 if self.window.dtype == torch.float64 else torch.float32


@dataclass
class ForwardInputs:
    """One step's batch: B chunks with T tokens in all, chunk after chunk.

    tokens         int64[T]
    positions      int64[T]     logical positions (RoPE)
    q_start        int64[B+1]   chunk b is tokens [q_start[b], q_start[b+1])
    slots          int64[B]
    seq_lens       int64[B]     tokens of the sequence once this chunk is stored
    logits_at      int64[N]     tokens whose logits are wanted
    window_slots   int64[T]     window slot that a token's query is kept in for a coming compaction; 0: not kept
    window_index   int64[T]     and place in it
    keeps_window   False if no query is kept
    host_*         lengths and slots again as Python ints, so that no backend reads a tensor back
    host_evicted   int32[slots, G], the view's `evicted` on the host; None where a backend may read it back
    plan           {id of a view: index tables that a backend derives from the batch at the view's first layer and keeps
                   for the others}; None in a fresh batch, and again after any edit of the page tables
    """

    tokens: Tensor
    positions: Tensor
    q_start: Tensor
    slots: Tensor
    seq_lens: Tensor
    logits_at: Tensor
    window_slots: Tensor
    window_index: Tensor
    keeps_window: bool
    host_q_lens: list[int]
    host_slots: list[int]
    host_seq_lens: list[int]
    host_evicted: np.ndarray | None = None
    plan: dict[int, object] | None = None


@dataclass
class HeadTurn:
    """How queries and keys are made ready: each head is normed (Qwen3 does), then rotated by its position (RoPE).

    cos_sin   float32[max_model_len, 2, D / 2], by position, what they are scaled by worked in; float64 for a float64
              model
    weight    of the norm, cos_sin's dtype [2, D], of queries and of keys; or None
    eps       of the norm
    """

    cos_sin: Tensor
    weight: Tensor | None
    eps: float


@dataclass
class JobBatch:
    """Compactions of one step that are scored together: J jobs over groups of Hp columns, padded to N source rows.

    slots         int64[J]
    groups        int64[J]
    first_page    int64[J]    table index of the first source page
    num_src       int64[J]    source rows (full pages only); N is the largest
    num_rows      int64[J]    rows of the group, an open last page included
    num_tokens    int64[J]    tokens of the sequence: the window's last query is token num_tokens - 1
    window_slots  int64[J]    0 where a job has no window
    dst_pages     int64[J, n / page_size]   destination pages, which say how many rows a job keeps: 0 past its last
    dst_tier      int         tier of the destination
    max_src       int         largest of num_src, on the host
    max_rows      int         largest of num_rows, on the host
    compared      `crowding` will be asked for: what it needs may be found on the way to what is asked before
    inverse       what a backend found so, of some columns of a view: the view, the columns, and a tensor of its own
                  making [J, C, N or more] that says what makes the length of each key 1
    """

    slots: Tensor
    groups: Tensor
    first_page: Tensor
    num_src: Tensor
    num_rows: Tensor
    num_tokens: Tensor
    window_slots: Tensor
    dst_pages: Tensor
    dst_tier: int
    max_src: int
    max_rows: int
    compared: bool = False
    inverse: tuple[KVView, slice, Tensor] | None = field(default=None, init=False)


class Backend(Protocol):
    """Who reads and writes pages, and does the arithmetic between the model's matrix products. `reference` is the
    truth; every other backend is tested against it.

    Row data come and go in float32, or in float64 where the model computes in float64.
    """

    name: str
    few_tokens: int  # batches of so many tokens are better served by `product` than by a library's products; 0: none

    def max_window(self, per_head: int) -> int | None:
        """The most queries of a window that rows can be scored by, with per_head query heads per KV head; None: any."""
        ...

    def warm_up(self, kv: KVView, max_tokens: int, max_model_len: int) -> None:
        """Build what attention of up to max_tokens new tokens in sequences of up to max_model_len builds when it is
        first met, so that no request waits for it. Reads slot 0; to be called by the thread that will attend."""
        ...

    def append(self, kv: KVView, layer: int, qkv: Tensor, fwd: ForwardInputs, turn: HeadTurn | None) -> Tensor:
        """Turn the new tokens' queries and keys (qkv: float[T, Hq + 2 H, D], queries first; it may be overwritten),
        encode K and V into the hot tier, clear the rows' state, keep the window's queries. Without `turn`, heads are
        ready as they are. Returns the queries, [T, Hq, D]."""
        ...

    def attend(self, kv: KVView, layer: int, q: Tensor, fwd: ForwardInputs, scale: float) -> Tensor:
        """Causal attention of q (float[T, Hq, D]) over the stored rows, the chunk's own included. Returns q's shape."""
        ...

    def window_scores(self, kv: KVView, jobs: JobBatch, columns: slice, scale: float, across: str = "max") -> Tensor:
        """Attention of the window's queries: softmax per query head over the group's rows (causal inside the window,
        an open last page included), then the max (`across="max"`) or mean over the query heads of the KV head, then
        the mean over the window. Returns float32[J, C, N] for the source rows; 0 where a job has fewer than N."""
        ...

    def expected_logits(self, kv: KVView, jobs: JobBatch, columns: slice, scale: float, horizon: int) -> Tensor:
        """What `RowSource.expected_logits` says of the source rows, float32[J, C, R, N], with `scale` as the softmax
        scale of attention. Any number where a job has fewer than N rows."""
        ...

    def read_rows(self, kv: KVView, jobs: JobBatch, columns: slice, role: str) -> Tensor:
        """Decoded source rows float32[J, C, N, D], role "k" or "v"; 0 where a job has fewer than N rows."""
        ...

    def read_lengths(self, kv: KVView, jobs: JobBatch, columns: slice, role: str) -> Tensor:
        """Euclidean lengths of what `read_rows` gives, float32[J, C, N]; 0 where a job has fewer than N rows."""
        ...

    def read_state(self, kv: KVView, jobs: JobBatch, columns: slice, name: str) -> Tensor:
        """A scorer's per-row memory, float32[J, C, N, width]; 0 where a job has fewer than N rows."""
        ...

    def crowding(self, kv: KVView, jobs: JobBatch, columns: slice, threshold: float, block: int | None) -> Tensor:
        """How much the keys of source rows repeat each other, float32[J, C, N]; 0 where a job has fewer than N rows.
        `RowSource.crowding` says how."""
        ...

    def select_rows(self, kv: KVView, jobs: JobBatch, scores: Tensor, sink_tokens: int, window: int) -> Tensor:
        """The best source rows of each job, as many as its destination has room for: int64[J, C, n], ascending; what
        follows a job's last does not matter. `pagefold.evict.select.select_rows` says which. The caller has checked
        the limits."""
        ...

    def compact(self, kv: KVView, jobs: JobBatch, columns: slice, keep: Tensor, state: dict[str, Tensor]) -> None:
        """Write rows keep (int64[J, C, n], ascending indices of source rows) to the destination pages, in every plane,
        as many as a job has pages for. Rows are re-encoded only if the tier changes, and with it the codec. `state`
        (float32[J, C, N, width] by name) replaces the stored state of the source rows on the way. Source pages are
        never written."""
        ...

    def copy_pages(self, src: PageStore, src_pages: Tensor, dst: PageStore, dst_pages: Tensor) -> None:
        """Copy whole pages between stores of the same format, every plane: swap out and in. Page ids are int64, where
        the tables are, and no page is both read and written; on a device, a store in the host's memory is `mapped`."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x[T, n] * weight / sqrt(mean(x^2) + eps), computed in weight's dtype, float32 at least, and rounded once."""
        ...

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x += delta, in place; returns the norm of the sum."""
        ...

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        norm: tuple[Tensor, float] | None = None,
        gate: bool = False,
        add_to: Tensor | None = None,
    ) -> Tensor:
        """x[T, k] W^T + b for at most `few_tokens` tokens, weight [n, k]: [T, n].

        norm     (weight, eps) of the RMS norm of x that is multiplied instead of x
        gate     weight is [2 n, k], gate first; the result is silu(gate) * up
        add_to   [T, n], which the product is added to in place and which is returned
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of gate_up[T, 2 F], gate first: [T, F]."""
        ...
