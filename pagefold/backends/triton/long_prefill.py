"""Long chunks: cuDNN attends to everything, block by block, over rows that are decoded for it.

    rows of a head      0 ............................ B ....... past ........... past + queries
    who attends         blocks, seen by every query    |  the square, causal, one call

cuDNN reaches most of what the device can do, but wants rows in one piece and compiles a plan for every new shape. So
blocks have few sizes and what they leave, less than the smallest, is attended to with the chunk's own rows: a causal
square, in which the leftover rows have queries that nobody asked for. Queries are padded to few lengths; a causal mask
keeps padding at the end from all others. Rows are decoded into work space: bytes read once, against thousands of
queries. Partial results are merged by their log-sum-exp in float32.
"""

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagefold.backends.base import ForwardInputs, KVView
from pagefold.backends.triton.long_kernels import decode_rows, merge_parts, place_queries
from pagefold.backends.triton.plan import next_power_of_2, reading
from pagefold.backends.upload import upload
from pagefold.store.format import RowCodec
from pagefold.store.shim import triton

BLOCK_ROWS = 4096  # blocks are this times a power of two
MAX_BLOCK_ROWS = 65536  # and what is decoded at a time, which bounds the work space: 268 MB for 8 heads of 128 channels
QUERY_STEP = 1024  # queries are padded to a multiple of this; shorter chunks are left to the paged kernel
FINE_QUERIES = 4096  # above, to a multiple of twice as much
MAX_QUERIES = 8192  # longer chunks are cut
MIN_PAIRS = 1 << 24  # of a query and a row: half a millisecond of a layer, which hides the launches
WARM_SECONDS = 3.0  # most that plans may take at the start: 40 of them
TILE_ROWS = 16  # rows a program decodes; divides blocks
TILE_TOKENS = 16  # tokens a program places or merges, of one query head


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """q [Hq, Q, D] over every row of k, v [H, n, D], or, causal, query j over rows [0, j]: out [Hq, Q, D], and the
    natural logarithm of the sum of exponentials, float32[Hq, Q]."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        q[None], k[None], v[None], None, True, 0.0, causal, False, scale=scale
    )
    return out[0], lse.reshape(q.shape[:2])


def has_attention(kv: KVView) -> bool:
    """Where cuDNN is faster than our own kernel: Hopper and later, in 16 bits."""
    window = kv.window
    return (
        window.is_cuda
        and window.dtype in (torch.bfloat16, torch.float16)
        and window.shape[-1] in (64, 128)
        and torch.backends.cudnn.is_available()
        and torch.cuda.get_device_capability(window.device) >= (9, 0)
    )


@dataclass
class Cover:
    """KV heads of a layer that are attended to in the same calls.

    heads     int64[h]
    rest      int64[h]   rows of each between the blocks and the chunk
    shifted   whether any head has such rows
    every     whether these are all the heads of the layer
    num_rows  B: rows in blocks
    square    rows of the square: rest and queries, padded
    passes    rows of what is decoded together, all blocks in their order and the square at the end
    """

    heads: Tensor
    rest: Tensor
    shifted: bool
    every: bool
    num_rows: int
    square: int
    passes: list[list[int]]


@dataclass
class LongChunk:
    """One chunk of a batch, or a part of one, the same for every layer.

    index    of the chunk in the batch
    slot     of its sequence
    tokens   of the batch
    covers   of each layer; every head is in one of them
    """

    index: int
    slot: int
    tokens: slice
    covers: list[list[Cover]]

    @property
    def q_len(self) -> int:
        return self.tokens.stop - self.tokens.start


class LongPrefill:
    """Finds the long chunks of batches. Remembers the layout of the cache on the host."""

    def __init__(self):
        self._on_device: Tensor | None = None
        self._group_of = np.empty((0, 0), np.int32)

    def plan(self, kv: KVView, fwd: ForwardInputs) -> list[LongChunk]:
        """Without `fwd.host_evicted`, a batch that may have a long chunk waits for the device to read it."""
        found, token = [], 0
        for index, (slot, q_len, seq_len) in enumerate(zip(fwd.host_slots, fwd.host_q_lens, fwd.host_seq_lens)):
            past = seq_len - q_len
            if _is_long(q_len, past) and has_attention(kv):
                evicted = kv.evicted[slot].cpu().numpy() if fwd.host_evicted is None else fwd.host_evicted[slot]
                if _is_long(q_len, past - int(evicted.min())):
                    size = _padded(-(-q_len // -(-q_len // MAX_QUERIES)), QUERY_STEP)
                    for first in range(0, q_len, size):
                        tokens = slice(token + first, token + min(first + size, q_len))
                        found.append(self.chunk(kv, index, slot, tokens, past + first - evicted))
            token += q_len
        return found

    def chunk(self, kv: KVView, index: int, slot: int, tokens: slice, past: np.ndarray) -> LongChunk:
        """`past` int[G]: rows of each group before these tokens."""
        if self._on_device is not kv.group_of:
            self._on_device, self._group_of = kv.group_of, kv.group_of.cpu().numpy()
        found = [tuple(rows) for rows in past[self._group_of].tolist()]
        parts_of = {rows: _heads_together(rows) for rows in dict.fromkeys(found)}
        tables = []
        for rows, parts in parts_of.items():
            for heads in parts:
                tables += [np.array(heads), np.array([rows[head] % BLOCK_ROWS for head in heads])]
        there = iter(upload(tables, kv.group_of.device))
        covers = {}
        for rows, parts in parts_of.items():
            covers[rows] = [_cover(rows, heads, tokens.stop - tokens.start, there) for heads in parts]
        return LongChunk(index, slot, tokens, [covers[rows] for rows in found])


def _is_long(q_len: int, past: int) -> bool:
    return q_len >= QUERY_STEP and q_len * (past + q_len // 2) >= MIN_PAIRS


def _padded(num: int, step: int) -> int:
    return -(-num // step) * step


def _padded_queries(q_len: int) -> int:
    return _padded(q_len, QUERY_STEP if q_len <= FINE_QUERIES else 2 * QUERY_STEP)


def _heads_together(rows: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Heads of a layer by what goes to blocks, rows[h] before the chunk each. All heads together if they agree, else
    powers of two of them, so that uneven layouts do not make many shapes."""
    blocks = [num_rows // BLOCK_ROWS for num_rows in rows]
    found = []
    for count in sorted(set(blocks)):
        heads = [head for head, blocks_of_head in enumerate(blocks) if blocks_of_head == count]
        while heads:
            size = len(heads) if len(heads) == len(rows) else 1 << len(heads).bit_length() - 1
            some, heads = tuple(heads[:size]), heads[size:]
            found.append(some)
    return found


def _cover(rows: tuple[int, ...], heads: tuple[int, ...], q_len: int, tables: Iterator[Tensor]) -> Cover:
    """Of some heads that agree in their blocks, and their two tables."""
    rest = max(rows[head] % BLOCK_ROWS for head in heads)
    blocks, square = _blocks(rows[heads[0]] // BLOCK_ROWS), _padded(rest + q_len, QUERY_STEP)
    passes: list[list[int]] = [[]]
    for num_rows in (*blocks, square):
        if passes[-1] and sum(passes[-1]) + num_rows > MAX_BLOCK_ROWS:
            passes.append([])
        passes[-1].append(num_rows)
    return Cover(next(tables), next(tables), rest > 0, len(heads) == len(rows), sum(blocks), square, passes)


def _blocks(count: int) -> list[int]:
    """Rows of blocks that make `count` of the smallest, the largest first."""
    blocks = []
    while count > 0:
        size = min(MAX_BLOCK_ROWS // BLOCK_ROWS, 1 << count.bit_length() - 1)
        blocks.append(size * BLOCK_ROWS)
        count -= size
    return blocks


def attend_long(
    kv: KVView, planes: list[list[Tensor]], layer: int, q: Tensor, chunk: LongChunk, scale: float, out: Tensor
) -> None:
    """Causal attention of one long chunk: its tokens of out [T, Hq, D].

    planes   of each tier: rows of k_data, k_scale, v_data, v_scale
    q        [T, Hq, D], contiguous
    """
    q, out = q[chunk.tokens], out[chunk.tokens]
    for cover in chunk.covers[layer]:
        of_blocks, of_square = _queries(kv, q, cover)
        parts, first_row, stop_row = [], 0, cover.num_rows + chunk.q_len
        for sizes in cover.passes:
            k, v = gather_rows(kv, planes, layer, chunk.slot, cover, first_row, sum(sizes), stop_row, q.dtype)
            for keys, values in zip(k.split(sizes), v.split(sizes)):
                causal = first_row == cover.num_rows
                query = of_square if causal else of_blocks
                parts.append(attention(query, keys.transpose(0, 1), values.transpose(0, 1), scale, causal))
                first_row += len(keys)
            del k, v, keys, values  # before the next are made
        _merge(kv, parts, cover, out)


def _queries(kv: KVView, q: Tensor, cover: Cover) -> tuple[Tensor, Tensor]:
    """[h * R, Q, D] of q [n, Hq, D], what attends to blocks and to the square. All have the strides of q, as plans are
    made for strides too."""
    num_queries = _padded_queries(len(q)) if cover.num_rows else cover.square
    direct = cover.every and len(q) == num_queries
    of_blocks = q.transpose(0, 1)
    if not direct and (cover.num_rows or not cover.shifted):
        of_blocks = _placed(kv, q, cover, num_queries, shift=False)
    of_square = _placed(kv, q, cover, cover.square, shift=True) if cover.shifted else of_blocks[:, : cover.square]
    return of_blocks, of_square


def _placed(kv: KVView, q: Tensor, cover: Cover, num_queries: int, shift: bool) -> Tensor:
    """Queries of some heads as [h * R, num_queries, D], from `rest` on if shifted, among zeros."""
    num_tokens, num_query_heads, head_dim = q.shape
    per_head = num_query_heads // kv.group_of.shape[1]
    placed = q.new_empty(num_queries, len(cover.heads) * per_head, head_dim)
    place_queries[(triton.cdiv(num_queries, TILE_TOKENS), placed.shape[1])](
        q,
        placed,
        cover.heads,
        cover.rest,
        num_queries,
        num_tokens,
        num_query_heads,
        R=per_head,
        D=head_dim,
        N=TILE_TOKENS,
        SHIFT=shift,
        num_warps=4,
    )
    return placed.transpose(0, 1)


def gather_rows(
    kv: KVView, planes: list[list[Tensor]], layer: int, slot: int, cover: Cover, first_row: int, num_rows: int,
    stop_row: int, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decoded K and V, dtype [num_rows, h, D] each, of a sequence's rows first_row, ..., a multiple of TILE_ROWS. Zeros
    where a head has no row of the chunk or before it, that is from stop_row + rest on."""
    head_dim = kv.window.shape[-1]
    k, v = torch.empty(2, num_rows, len(cover.heads), head_dim, dtype=dtype, device=kv.group_of.device)
    for tier, store in enumerate(kv.tiers):
        decode_rows[(triton.cdiv(num_rows, TILE_ROWS), len(cover.heads))](
            *planes[tier],
            k,
            v,
            kv.page_table,
            kv.cold,
            cover.heads,
            cover.rest,
            kv.group_of[layer],
            kv.column_of[layer],
            slot,
            first_row,
            num_rows,
            stop_row,
            store.num_pages,
            *kv.page_table.shape[1:],
            D=head_dim,
            PS=kv.page_size,
            N=TILE_ROWS,
            TIER=tier,
            NUM_TIERS=len(kv.tiers),
            **_decoding(store.format.k, store.format.v, head_dim),
            num_warps=4,
        )
    return k, v


@functools.cache
def _decoding(k: RowCodec, v: RowCodec, head_dim: int) -> dict[str, Any]:
    """Constants of `decode_rows` for two codecs."""
    constants = reading(k, head_dim, "K") | reading(v, head_dim, "V")
    for name in ("K_PAIRS", "K_MMA", "V_PAIRS", "V_MMA"):
        del constants[name]
    return constants | {"K_ROTATE": k.rotate, "V_ROTATE": v.rotate}


def _merge(kv: KVView, parts: list[tuple[Tensor, Tensor]], cover: Cover, out: Tensor) -> None:
    """out [n, Hq, D] of some KV heads from the parts of blocks and, the last, of the square."""
    num_tokens, num_query_heads, head_dim = out.shape
    per_head = num_query_heads // kv.group_of.shape[1]
    room = max(
        4, next_power_of_2(len(parts))
    )  # compiled for few numbers of parts; what is there twice is not looked at
    outs, lses = zip(*parts[-1:], *parts[:-1], *parts[-1:] * (room - len(parts)))
    strides = [(*out.stride()[:2], lse.stride(0)) for out, lse in (parts[-1], parts[0])]
    merge_parts[(triton.cdiv(num_tokens, TILE_TOKENS), len(cover.heads) * per_head)](
        outs,
        lses,
        out,
        cover.heads,
        cover.rest,
        len(parts),
        num_tokens,
        num_query_heads,
        *strides[0],
        *strides[1],
        ROOM=room,
        R=per_head,
        D=head_dim,
        N=TILE_TOKENS,
        num_warps=4,
    )


def warm_up(kv: KVView, max_tokens: int, max_model_len: int) -> None:
    """Attend once in the shapes that chunks of up to max_tokens can have in sequences of up to max_model_len, the most
    usual first, so that no request waits for a plan: 70 ms each. Rows are those of slot 0. To be called by the thread
    that will attend, as plans belong to the one that made them."""
    most = min(max_tokens, MAX_QUERIES, max_model_len)
    if not has_attention(kv) or not _is_long(most, max_model_len - most):
        return
    planner, shape = LongPrefill(), kv.window.shape[-2:]
    names = ("k_data", "k_scale", "v_data", "v_scale")
    planes = [[store.rows(name) for name in names] for store in kv.tiers]
    q = torch.zeros(most, *shape, dtype=kv.window.dtype, device=kv.window.device)
    out, end = torch.empty_like(q), None
    for q_len, past in _usual_shapes(most, max_model_len):
        chunk = planner.chunk(kv, 0, 0, slice(0, q_len), np.full(kv.page_table.shape[1], past))
        attend_long(kv, planes, 0, q, chunk, 1.0, out)
        end = end or time.perf_counter() + WARM_SECONDS  # kernels are compiled on the way of the first
        if time.perf_counter() > end:
            return


def _usual_shapes(most: int, max_model_len: int) -> Iterator[tuple[int, int]]:
    """(queries, rows before): every length of queries with every block, and every square."""
    lengths = [q_len for q_len in range(QUERY_STEP, most + 1, QUERY_STEP) if q_len == _padded_queries(q_len)]
    lengths = sorted({*lengths, most}, reverse=True)
    squares = range(_padded(min(most + BLOCK_ROWS, max_model_len), QUERY_STEP), 0, -QUERY_STEP)
    for q_len in lengths:
        past = BLOCK_ROWS
        while past <= min(MAX_BLOCK_ROWS, max_model_len - q_len):
            yield q_len, past
            past *= 2
        if q_len == lengths[0]:
            for size in squares:
                yield min(size, most), max(min(size, most + BLOCK_ROWS - 1, max_model_len) - most, 0)
