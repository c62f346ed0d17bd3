"""Long chunks after long prefixes: cuDNN attends to the rows that every query sees, our own kernel to the rest.

    rows of a head      0 ................................. B ............. past ........... n
    who attends         cuDNN, unmasked, block by block     the paged prefill kernel, causal

cuDNN reaches most of what the device can do, but wants rows in one piece and compiles a plan for every new shape. So
blocks have few sizes, queries are padded to few lengths, and a block's rows are first decoded into work space: bytes
read once, against thousands of queries. Partial results are merged by their log-sum-exp in float32.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from pagefold.backends.base import ForwardInputs, KVView
from pagefold.backends.triton.addressing import tier_rows, tile_pages, tile_rows
from pagefold.backends.triton.attend_prefill import prefill_tile
from pagefold.backends.triton.plan import PrefillPart, Shape, next_power_of_2, reading, tile_tokens
from pagefold.backends.triton.rows import decoded
from pagefold.store.format import RowCodec
from pagefold.store.lowbit import device_hadamard
from pagefold.store.shim import jit, tl, triton

BLOCK_ROWS = 4096  # blocks are this times a power of two
MAX_BLOCK_ROWS = 65536  # bounds the work space: 268 MB for 8 heads of 128 channels
QUERY_STEP = 1024  # queries are padded to a multiple of this; shorter chunks are left to the paged kernel
MAX_QUERIES = 8192  # longer chunks are cut
MIN_PAIRS = 1 << 25  # of a query and a row: a millisecond of a layer, which hides the launches
TILE_ROWS = 16  # rows a program decodes
TILE_TOKENS = 16  # tokens a program merges, of one query head


def prefix_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Every query of q [Hq, Q, D] over every row of k, v [H, n, D]: out [Hq, Q, D], and the natural logarithm of the
    sum of exponentials, float32[Hq, Q]."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q[None], k[None], v[None], None, True, 0.0, False, False, scale=scale
    )
    return out[0], lse.reshape(q.shape[:2])


def has_prefix_attention(kv: KVView) -> bool:
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
    """KV heads of a layer, int64[h], whose first rows are attended to in the same blocks, (first row, rows) each."""

    heads: Tensor
    blocks: list[tuple[int, int]]


@dataclass
class LongChunk:
    """One chunk of a batch, the same for every layer.

    index      of the chunk in the batch
    first      its first token in the batch
    slot       int64[1]
    covers     of each layer; all its heads are in one of them
    rest       the cache as if it held this sequence alone, in slot 0, without the rows that blocks cover: order is
               age, so rows can be left out the way evicted ones are
    rest_fwd   the chunk as a batch of its own, over `rest`
    tiles      of its queries
    planes     of each tier: rows of k_data, k_scale, v_data, v_scale
    """

    index: int
    first: int
    q_len: int
    slot: Tensor
    covers: list[list[Cover]]
    rest: KVView
    rest_fwd: ForwardInputs
    tiles: PrefillPart
    planes: list[list[Tensor]]


class LongPrefill:
    """Finds the long chunks of batches. Remembers the layout of the cache on the host, and lists of heads on the
    device."""

    def __init__(self):
        self._kv: KVView | None = None
        self._group_of: list[list[int]] = []
        self._heads: dict[tuple[int, ...], Tensor] = {}

    def plan(self, kv: KVView, fwd: ForwardInputs) -> list[LongChunk]:
        """Without `fwd.host_evicted`, a batch that may have a long chunk waits for the device to read it."""
        starts = [0]
        for q_len in fwd.host_q_lens:
            starts.append(starts[-1] + q_len)
        found = []
        for index, (slot, q_len, seq_len) in enumerate(zip(fwd.host_slots, fwd.host_q_lens, fwd.host_seq_lens)):
            past = seq_len - q_len
            if q_len < QUERY_STEP or q_len * past < MIN_PAIRS:
                continue
            if BLOCK_ROWS % kv.page_size or not has_prefix_attention(kv):
                continue
            dropped = (kv.evicted if fwd.host_evicted is None else fwd.host_evicted)[slot].tolist()
            covered = [max(past - int(rows), 0) // BLOCK_ROWS * BLOCK_ROWS for rows in dropped]
            if q_len * max(covered) >= MIN_PAIRS:
                found.append(self._chunk(kv, fwd, index, starts[index], covered))
        return found

    def _chunk(self, kv: KVView, fwd: ForwardInputs, index: int, first: int, covered: list[int]) -> LongChunk:
        """`covered` rows of each group go to blocks."""
        if self._kv is not kv:
            self._kv, self._group_of, self._heads = kv, kv.group_of.tolist(), {}
        device, q_len = fwd.slots.device, fwd.host_q_lens[index]
        by_rows: dict[tuple[int, ...], list[Cover]] = {}
        covers = []
        for groups in self._group_of:
            rows = tuple(covered[group] for group in groups)
            if rows not in by_rows:
                by_rows[rows] = self._covers(rows, device)
            covers.append(by_rows[rows])
        # copied, as kernels are compiled for the alignment of what they are given
        slot, seq_len = (table[index : index + 1].clone() for table in (fwd.slots, fwd.seq_lens))
        q_start = fwd.q_start[index : index + 2].clone()
        rest = _without(kv, fwd.host_slots[index], torch.tensor(covered, dtype=torch.int32).to(device))
        rest_fwd = replace(fwd, q_start=q_start, slots=torch.zeros_like(slot), seq_lens=seq_len)
        tile = tile_tokens(kv)
        tile_first = torch.arange((q_len - 1) // tile, -1, -1, device=device) * tile  # longest first
        tiles = PrefillPart(torch.zeros_like(tile_first), tile_first, tile_first, torch.arange(q_len, device=device))
        names = ("k_data", "k_scale", "v_data", "v_scale")
        planes = [[store.rows(name) for name in names] for store in kv.tiers]
        return LongChunk(index, first, q_len, slot, covers, rest, rest_fwd, tiles, planes)

    def _covers(self, rows: tuple[int, ...], device: torch.device) -> list[Cover]:
        """Of the heads of a layer, rows[h] each. All heads together if they agree, else powers of two of them, so that
        uneven layouts do not make many shapes."""
        covers = []
        for count in sorted(set(rows)):
            heads = [head for head, rows_of_head in enumerate(rows) if rows_of_head == count]
            while heads:
                size = len(heads) if len(heads) == len(rows) else 1 << len(heads).bit_length() - 1
                some, heads = tuple(heads[:size]), heads[size:]
                if some not in self._heads:
                    self._heads[some] = torch.tensor(some).to(device)
                covers.append(Cover(self._heads[some], _blocks(count)))
        return covers


def _blocks(num_rows: int) -> list[tuple[int, int]]:
    """(first row, rows) of blocks, the largest first."""
    blocks, first = [], 0
    while first < num_rows:
        size = min(MAX_BLOCK_ROWS, BLOCK_ROWS << ((num_rows - first) // BLOCK_ROWS).bit_length() - 1)
        blocks.append((first, size))
        first += size
    return blocks


def _without(kv: KVView, slot: int, covered: Tensor) -> KVView:
    """The cache with one sequence, whose groups lack their first `covered` rows, int32[G], whole pages."""
    pages = covered // kv.page_size
    place = torch.arange(kv.page_table.shape[2], device=covered.device) + pages[:, None]
    table = kv.page_table[slot].gather(1, place.clamp_(max=kv.page_table.shape[2] - 1))
    cold = (kv.cold[slot] - pages).clamp_(min=0)
    return replace(kv, page_table=table[None], evicted=(kv.evicted[slot] + covered)[None], cold=cold[None])


def attend_long(
    kv: KVView, layer: int, q: Tensor, queries: list[Tensor], chunk: LongChunk, shapes: list[Shape], scale: float,
    out: Tensor,
) -> None:  # fmt: skip
    """Causal attention of one long chunk: its tokens of out [T, Hq, D].

    q         [T, Hq, D], contiguous
    queries   q for each tier, in the frame in which it stores K
    shapes    of the prefill kernel, for each tier
    """
    own, own_lse = prefill_partial(chunk.rest, chunk.planes, layer, queries, chunk.tiles, chunk.rest_fwd, shapes, scale)
    for first in range(0, chunk.q_len, MAX_QUERIES):
        num_tokens = min(MAX_QUERIES, chunk.q_len - first)
        tokens = slice(chunk.first + first, chunk.first + first + num_tokens)
        for cover in chunk.covers[layer]:
            query = _padded_queries(kv, q[tokens], cover.heads)
            parts = []
            for first_row, num_rows in cover.blocks:
                k, v = gather_rows(kv, chunk.planes, layer, chunk.slot, cover.heads, first_row, num_rows, q.dtype)
                parts.append(prefix_attention(query, k, v, scale))
            part = slice(first, first + num_tokens)
            _merge(kv, parts, own[part], own_lse[part], cover.heads, out[tokens])


def _padded_queries(kv: KVView, q: Tensor, heads: Tensor) -> Tensor:
    """[h * R, Q, D] of q [n, Hq, D]: the query heads of some KV heads, Q the next multiple of QUERY_STEP."""
    num_heads = kv.group_of.shape[1]
    if len(heads) < num_heads:
        q = q.unflatten(1, (num_heads, -1)).index_select(1, heads).flatten(1, 2)
    return pad(q, (0, 0, 0, 0, 0, -len(q) % QUERY_STEP)).transpose(0, 1)


def prefill_partial(
    kv: KVView,
    planes: list[list[Tensor]],
    layer: int,
    queries: list[Tensor],
    tiles: PrefillPart,
    fwd: ForwardInputs,
    shapes: list[Shape],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """What chunks attend to in each tier, in the frame in which it stores V: float32[n, Hq, tiers, D], normalised, and
    the base-2 logarithm of the sum of exponentials, float32[n, Hq, tiers]."""
    num_heads, (num_query_heads, head_dim) = kv.group_of.shape[1], queries[0].shape[1:]
    per_head, num_tiers = num_query_heads // num_heads, len(kv.tiers)
    lse = torch.empty(len(tiles.tokens), num_query_heads, num_tiers, dtype=torch.float32, device=tiles.tokens.device)
    partial = lse.new_empty(*lse.shape, head_dim)
    for tier, (store, shape) in enumerate(zip(kv.tiers, shapes)):
        prefill_tile[(len(tiles.tile_chunk), num_heads)](
            queries[tier],
            *planes[tier],
            partial,
            lse,
            kv.page_table,
            kv.evicted,
            kv.cold,
            tiles.tile_chunk,
            tiles.tile_first,
            tiles.tile_token,
            fwd.q_start,
            fwd.slots,
            fwd.seq_lens,
            kv.group_of[layer],
            kv.column_of[layer],
            scale * math.log2(math.e),
            store.num_pages,
            *kv.page_table.shape[1:],
            R=per_head,
            RP=next_power_of_2(per_head),
            BQ=tile_tokens(kv),
            D=head_dim,
            PS=kv.page_size,
            N=shape.tile,
            TIER=tier,
            NUM_TIERS=num_tiers,
            DIRECT=False,
            **reading(store.format.k, head_dim, "K"),
            **reading(store.format.v, head_dim, "V"),
            PRECISION="ieee",
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
    return partial, lse


def gather_rows(
    kv: KVView, planes: list[list[Tensor]], layer: int, slot: Tensor, heads: Tensor, first_row: int, num_rows: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decoded K and V, dtype [h, num_rows, D] each, of rows [first_row, first_row + num_rows) of a sequence's heads.

    slot    int64[1]
    heads   int64[h], of the layer
    """
    head_dim = kv.window.shape[-1]
    k, v = torch.empty(2, len(heads), num_rows, head_dim, dtype=dtype, device=heads.device)
    for tier, store in enumerate(kv.tiers):
        decode_block[(triton.cdiv(num_rows, TILE_ROWS), len(heads))](
            *planes[tier],
            k,
            v,
            kv.page_table,
            kv.cold,
            slot,
            heads,
            kv.group_of[layer],
            kv.column_of[layer],
            first_row,
            num_rows,
            store.num_pages,
            *kv.page_table.shape[1:],
            D=head_dim,
            PS=kv.page_size,
            N=TILE_ROWS,
            TIER=tier,
            NUM_TIERS=len(kv.tiers),
            **_decoding(store.format.k, head_dim, "K"),
            **_decoding(store.format.v, head_dim, "V"),
            num_warps=4,
        )
    return k, v


def _decoding(codec: RowCodec, head_dim: int, role: str) -> dict:
    """Constants of `decode_block` for a codec."""
    unused = {f"{role}_PAIRS", f"{role}_MMA"}
    constants = {name: value for name, value in reading(codec, head_dim, role).items() if name not in unused}
    return constants | {f"{role}_ROTATE": codec.rotate}


@jit(do_not_specialize=["first_row", "num_rows", "num_pages", "num_groups", "max_pages"])
def decode_block(
    k_data,
    k_scale,
    v_data,
    v_scale,
    k,
    v,
    page_table,
    cold,
    slots,
    heads,
    group_of,
    column_of,
    first_row,
    num_rows,
    num_pages,
    num_groups,
    max_pages,
    D: tl.constexpr,
    PS: tl.constexpr,
    N: tl.constexpr,
    TIER: tl.constexpr,
    NUM_TIERS: tl.constexpr,
    LOAD_K: tl.constexpr,
    K_PIECES: tl.constexpr,
    K_BIAS: tl.constexpr,
    K_GAIN: tl.constexpr,
    K_SCALED: tl.constexpr,
    K_ROTATE: tl.constexpr,
    LOAD_V: tl.constexpr,
    V_PIECES: tl.constexpr,
    V_BIAS: tl.constexpr,
    V_GAIN: tl.constexpr,
    V_SCALED: tl.constexpr,
    V_ROTATE: tl.constexpr,
):
    """Grid (tiles, h): the rows [first_row, first_row + num_rows) of heads[h] that lie in one tier, as k, v [h,
    num_rows, D] in the model's frame. first_row is a multiple of PS and of N."""
    i_i, i_h = tl.program_id(0), tl.program_id(1)
    head = tl.load(heads + i_h)
    line = tl.load(slots) * num_groups + tl.load(group_of + head)
    first, stop = tier_rows(first_row + num_rows, line, cold, PS, TIER, NUM_TIERS)
    i_t = first_row + i_i * N
    if i_t >= stop or i_t + N <= first:
        return
    i_row = i_t + tl.arange(0, N)
    ok = (i_row >= first) & (i_row < stop)
    base = tl.load(column_of + head).to(tl.int64) * num_pages
    row = tile_rows(tile_pages(page_table + line * max_pages, i_t, stop, PS, N), i_t, base, PS, N)
    to = (i_h.to(tl.int64) * num_rows + i_row - first_row)[:, None] * D + tl.arange(0, D)[None, :]
    b_k = decoded(k_data, k_scale, row, ok, N, D, K_ROTATE, LOAD_K, K_PIECES, K_BIAS, K_GAIN, K_SCALED)
    tl.store(k + to, b_k, mask=ok[:, None])
    b_v = decoded(v_data, v_scale, row, ok, N, D, V_ROTATE, LOAD_V, V_PIECES, V_BIAS, V_GAIN, V_SCALED)
    tl.store(v + to, b_v, mask=ok[:, None])


def _merge(
    kv: KVView, parts: list[tuple[Tensor, Tensor]], own: Tensor, own_lse: Tensor, heads: Tensor, out: Tensor
) -> None:
    """out [n, Hq, D] of some KV heads, from blocks' parts and what `prefill_partial` left."""
    num_tokens, num_query_heads, head_dim = out.shape
    per_head = num_query_heads // kv.group_of.shape[1]
    outs, lses = zip(*parts) if parts else ((own[:, :, 0].transpose(0, 1),), (own_lse,))
    merge_parts[(triton.cdiv(num_tokens, TILE_TOKENS), len(heads) * per_head)](
        outs,
        lses,
        own,
        own_lse,
        out,
        heads,
        num_tokens,
        num_query_heads,
        *outs[0].stride()[:2],
        lses[0].stride(0),
        NUM_PARTS=len(parts),
        R=per_head,
        D=head_dim,
        N=TILE_TOKENS,
        NUM_TIERS=len(kv.tiers),
        ROTATE=tuple(store.format.v.rotate for store in kv.tiers),
        num_warps=4,
    )


@jit(do_not_specialize=["num_tokens", "num_heads"])
def merge_parts(
    parts,
    part_lse,
    own,
    own_lse,
    out,
    heads,
    num_tokens,
    num_heads,
    head_stride,
    token_stride,
    lse_stride,
    NUM_PARTS: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    NUM_TIERS: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """Grid (tiles, h * R): N tokens of a query head.

    parts      NUM_PARTS times [h * R, tokens, D], rows contiguous, in the model's frame
    part_lse   NUM_PARTS times float32[h * R, tokens], natural logarithms
    own        float32[tokens, num_heads, NUM_TIERS, D], not read where own_lse is -inf; a tier's sum leaves its frame
    own_lse    float32[tokens, num_heads, NUM_TIERS], base 2
    out        [tokens, num_heads, D]
    heads      int64[h]
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    i_h = tl.program_id(1).to(tl.int64)
    i_t = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    o_d = tl.arange(0, D)
    ok = i_t < num_tokens
    i_own = i_t * num_heads + tl.load(heads + i_h // R) * R + i_h % R
    i_lse = i_h * lse_stride + i_t
    i_part = (i_h * head_stride + i_t * token_stride)[:, None] + o_d[None, :]

    m = tl.full([N], -1e30, tl.float32)
    for tier in tl.static_range(NUM_TIERS):
        m = tl.maximum(m, tl.load(own_lse + i_own * NUM_TIERS + tier, mask=ok, other=0.0))
    for p in tl.static_range(NUM_PARTS):
        m = tl.maximum(m, tl.load(part_lse[p] + i_lse, mask=ok, other=0.0) * LOG2_E)
    total = tl.zeros([N], tl.float32)
    result = tl.zeros([N, D], tl.float32)
    for tier in tl.static_range(NUM_TIERS):
        i_o = i_own * NUM_TIERS + tier
        weight = tl.exp2(tl.load(own_lse + i_o, mask=ok, other=float("-inf")) - m)
        o = tl.load(own + i_o[:, None] * D + o_d[None, :], mask=(weight > 0)[:, None], other=0.0)
        o = o * weight[:, None]
        if ROTATE[tier]:
            o = device_hadamard(o, N, D)
        result += o
        total += weight
    for p in tl.static_range(NUM_PARTS):
        weight = tl.exp2(tl.load(part_lse[p] + i_lse, mask=ok, other=float("-inf")) * LOG2_E - m)
        o = tl.load(parts[p] + i_part, mask=ok[:, None], other=0.0).to(tl.float32)
        result += o * weight[:, None]
        total += weight
    result = result / tl.maximum(total, 1e-30)[:, None]
    tl.store(out + i_own[:, None] * D + o_d[None, :], result, mask=ok[:, None])
