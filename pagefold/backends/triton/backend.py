"""Triton kernels behind the backend protocol: pages are read as they are stored, nothing waits for the host."""

import math

import torch
from torch import Tensor

from pagefold.backends.base import ForwardInputs, HeadTurn, JobBatch, KVView
from pagefold.backends.torch_ops import TorchOps, turned_heads
from pagefold.backends.triton.attend_decode import decode_split, merge_splits
from pagefold.backends.triton.attend_prefill import prefill_tile
from pagefold.backends.triton.plan import (
    BatchPlan,
    DecodePart,
    DecodeShape,
    PrefillPart,
    Shape,
    decode_shape,
    device_codec,
    multiprocessors,
    next_power_of_2,
    plan_batch,
    prefill_shape,
    reading,
)
from pagefold.backends.triton.rows import append_rows, copy_rows, read_rows, recode_rows, rotate_rows
from pagefold.backends.triton.window_scores import window_sums, window_weights
from pagefold.store.format import RowCodec
from pagefold.store.pagestore import PageStore
from pagefold.store.shim import HAS_TRITON, triton

ROWS = 16  # items a program of the row kernels handles


def _codec(store: PageStore, role: str) -> RowCodec:
    return store.format.k if role == "k" else store.format.v


def _words(store: PageStore, name: str) -> Tensor:
    """A plane as rows of the widest integers that a row is made of."""
    rows = store.rows(name).view(torch.uint8)
    for dtype in (torch.int64, torch.int32, torch.int16):
        if rows.shape[-1] % dtype.itemsize == 0:
            return rows.view(dtype)
    return rows


class TritonBackend(TorchOps):
    """
    decode    shape of the decode kernel; by default, what suits the format
    prefill   shape of the prefill kernel
    """

    name = "triton"

    def __init__(self, decode: DecodeShape | None = None, prefill: Shape | None = None):
        if not HAS_TRITON:
            raise ValueError("backend: triton needs the package triton, which is not installed")
        self._decode_shape = decode
        self._prefill_shape = prefill

    def _shapes(self, kv: KVView, tier: int) -> tuple[DecodeShape, Shape]:
        head_dim = kv.window.shape[-1]
        decode = self._decode_shape or decode_shape(device_codec(kv.tiers[tier].format.v), head_dim)
        return decode, self._prefill_shape or prefill_shape(head_dim)

    def _plan(self, kv: KVView, fwd: ForwardInputs) -> BatchPlan:
        if not (isinstance(fwd.plan, BatchPlan) and fwd.plan.kv is kv):
            fwd.plan = plan_batch(kv, fwd, _tile_tokens(kv))
        return fwd.plan

    def append(self, kv: KVView, layer: int, qkv: Tensor, fwd: ForwardInputs, turn: HeadTurn | None) -> Tensor:
        hot = kv.tiers[0]
        q, k, v = turned_heads(qkv, kv.group_of.shape[1], fwd.positions, turn)
        num_tokens, num_heads, head_dim = k.shape
        k, v = (x if x.stride()[1:] == (head_dim, 1) else x.contiguous() for x in (k, v))
        rows = torch.empty(num_tokens, num_heads, dtype=torch.int64, device=k.device)
        items = 1 if num_tokens * num_heads <= 4096 else ROWS
        append_rows[(triton.cdiv(rows.numel(), items),)](
            k,
            v,
            *(hot.rows(name) for name in ("k_data", "k_scale", "v_data", "v_scale")),
            rows,
            kv.page_table,
            kv.evicted,
            fwd.positions,
            self._plan(kv, fwd).token_slots,
            kv.group_of[layer],
            kv.column_of[layer],
            k.stride(0),
            v.stride(0),
            rows.numel(),
            hot.num_pages,
            *kv.page_table.shape[1:],
            H=num_heads,
            D=head_dim,
            PS=kv.page_size,
            N=items,
            STORE_K=device_codec(hot.format.k).store,
            K_OPTIONS=device_codec(hot.format.k).options,
            STORE_V=device_codec(hot.format.v).store,
            V_OPTIONS=device_codec(hot.format.v).options,
            num_warps=1 if items == 1 else 4,
        )
        for name in hot.planes:
            if name.startswith("state."):
                hot.rows(name).index_fill_(0, rows.flatten(), 0)
        if fwd.keeps_window:
            kv.window[layer, fwd.window_slots, fwd.window_index] = q.to(kv.window.dtype)
        return q

    def attend(self, kv: KVView, layer: int, q: Tensor, fwd: ForwardInputs, scale: float) -> Tensor:
        plan = self._plan(kv, fwd)
        q = q.contiguous()
        out = torch.empty_like(q)
        queries = _query_frames(kv, q)
        if plan.decode:
            self._decode(kv, layer, queries, plan.decode, scale, out)
        if plan.prefill:
            self._prefill(kv, layer, queries, plan.prefill, fwd, scale, out)
        return out

    def _decode(
        self, kv: KVView, layer: int, queries: list[Tensor], part: DecodePart, scale: float, out: Tensor
    ) -> None:
        num_heads, head_dim = kv.group_of.shape[1], kv.window.shape[-1]
        per_head, batch, num_tiers = out.shape[1] // num_heads, len(part.tokens), len(kv.tiers)
        shapes = [self._shapes(kv, tier)[0] for tier in range(num_tiers)]
        splits = max(_num_splits(shape, batch * num_heads, part.max_rows) for shape in shapes)
        direct = num_tiers * splits == 1 and not kv.tiers[0].format.v.rotate
        parts = (batch, out.shape[1], num_tiers * splits)
        partial = out if direct else torch.empty(*parts, head_dim, dtype=torch.float32, device=out.device)
        lse = torch.empty(parts, dtype=torch.float32, device=out.device)
        for tier, (store, shape) in enumerate(zip(kv.tiers, shapes)):
            decode_split[(splits, num_heads, batch)](
                queries[tier],
                *(store.rows(name) for name in ("k_data", "k_scale", "v_data", "v_scale")),
                partial,
                lse,
                kv.page_table,
                kv.evicted,
                kv.cold,
                part.tokens,
                part.slots,
                part.seq_lens,
                kv.group_of[layer],
                kv.column_of[layer],
                scale * math.log2(math.e),
                store.num_pages,
                *kv.page_table.shape[1:],
                -(-shape.min_rows // shape.tile) * shape.tile,
                tier * splits,
                num_tiers * splits,
                R=per_head,
                M=max(shape.heads, next_power_of_2(per_head)),
                D=head_dim,
                PS=kv.page_size,
                N=shape.tile,
                TIER=tier,
                NUM_TIERS=num_tiers,
                DIRECT=direct,
                **reading(store.format.k, head_dim, "K"),
                **reading(store.format.v, head_dim, "V"),
                PRECISION="ieee",
                num_warps=shape.warps,
                num_stages=shape.stages,
            )
        if not direct:
            _merge(kv, partial, lse, part.tokens, splits, out)

    def _prefill(
        self,
        kv: KVView,
        layer: int,
        queries: list[Tensor],
        part: PrefillPart,
        fwd: ForwardInputs,
        scale: float,
        out: Tensor,
    ) -> None:
        num_heads, head_dim = kv.group_of.shape[1], kv.window.shape[-1]
        per_head, num_tiers = out.shape[1] // num_heads, len(kv.tiers)
        direct = num_tiers == 1 and not kv.tiers[0].format.v.rotate
        parts = (len(part.tokens), out.shape[1], num_tiers)
        partial = out if direct else torch.empty(*parts, head_dim, dtype=torch.float32, device=out.device)
        lse = torch.empty(parts, dtype=torch.float32, device=out.device)
        for tier, store in enumerate(kv.tiers):
            shape = self._shapes(kv, tier)[1]
            prefill_tile[(len(part.tile_chunk), num_heads)](
                queries[tier],
                *(store.rows(name) for name in ("k_data", "k_scale", "v_data", "v_scale")),
                partial,
                lse,
                kv.page_table,
                kv.evicted,
                kv.cold,
                part.tile_chunk,
                part.tile_first,
                part.tile_token,
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
                BQ=_tile_tokens(kv),
                D=head_dim,
                PS=kv.page_size,
                N=shape.tile,
                TIER=tier,
                NUM_TIERS=num_tiers,
                DIRECT=direct,
                **reading(store.format.k, head_dim, "K"),
                **reading(store.format.v, head_dim, "V"),
                PRECISION="ieee",
                num_warps=shape.warps,
                num_stages=shape.stages,
            )
        if not direct:
            _merge(kv, partial, lse, part.tokens, 1, out)

    def window_scores(self, kv: KVView, jobs: JobBatch, columns: slice, scale: float, across: str = "max") -> Tensor:
        num_jobs, max_src, head_dim = len(jobs.slots), jobs.max_src, kv.window.shape[-1]
        column_ids = range(kv.members.shape[1])[columns]
        num_columns, num_tiers, num_window = len(column_ids), len(kv.tiers), kv.window.shape[2]
        per_head = kv.window.shape[3] // kv.group_of.shape[1]
        layers, heads = kv.members[jobs.groups][:, columns].long().unbind(-1)  # [J, C]
        window = kv.window.unflatten(3, (-1, per_head))
        queries = window[layers, jobs.window_slots[:, None], :, heads].transpose(2, 3).contiguous()  # [J, C, R, w, D]
        window_pad = next_power_of_2(num_window)
        num_queries = max(16, next_power_of_2(per_head) * window_pad)
        max_rows = kv.page_table.shape[2] * kv.page_size
        splits = max(1, min(2 * multiprocessors() // (num_jobs * num_columns), max_rows // 512))
        sums = torch.empty(num_jobs, num_columns, num_tiers, splits, num_queries, device=queries.device)
        scores = torch.zeros(num_jobs, num_columns, max_src, device=queries.device)
        tile = 64
        frames = _query_frames(kv, queries)
        constants = dict(R=per_head, W=num_window, WP=window_pad, Q=num_queries, D=head_dim, PS=kv.page_size, N=tile)
        for tier, store in enumerate(kv.tiers):
            window_sums[(splits, num_columns, num_jobs)](
                frames[tier],
                store.rows("k_data"),
                store.rows("k_scale"),
                sums,
                kv.page_table,
                kv.cold,
                jobs.slots,
                jobs.groups,
                jobs.num_rows,
                column_ids.start,
                scale * math.log2(math.e),
                store.num_pages,
                *kv.page_table.shape[1:],
                **constants,
                TIER=tier,
                NUM_TIERS=num_tiers,
                **reading(store.format.k, head_dim),
                PRECISION="ieee",
                num_warps=4,
                num_stages=2,
            )
        for tier, store in enumerate(kv.tiers):
            window_weights[(triton.cdiv(max_src, tile), num_columns, num_jobs)](
                frames[tier],
                store.rows("k_data"),
                store.rows("k_scale"),
                sums,
                scores,
                kv.page_table,
                kv.cold,
                jobs.slots,
                jobs.groups,
                jobs.num_rows,
                jobs.num_src,
                jobs.first_page,
                column_ids.start,
                scale * math.log2(math.e),
                num_tiers * splits,
                max_src,
                store.num_pages,
                *kv.page_table.shape[1:],
                **constants,
                TIER=tier,
                NUM_TIERS=num_tiers,
                MEAN=across == "mean",
                **reading(store.format.k, head_dim),
                PRECISION="ieee",
                num_warps=4,
                num_stages=1,
            )
        return scores

    def read_rows(self, kv: KVView, jobs: JobBatch, columns: slice, role: str) -> Tensor:
        every = torch.arange(jobs.max_src, device=jobs.slots.device).expand(len(jobs.slots), _width(kv, columns), -1)
        rows, tiers = _source(kv, jobs, columns, every)
        out = torch.zeros(*every.shape, kv.window.shape[-1], dtype=torch.float32, device=rows.device)
        for tier, store in enumerate(kv.tiers):
            read_rows[(triton.cdiv(rows.numel(), ROWS),)](
                store.rows(f"{role}_data"),
                store.rows(f"{role}_scale"),
                rows,
                tiers,
                out,
                rows.numel(),
                TIER=tier,
                D=out.shape[-1],
                N=ROWS,
                **_decoding(_codec(store, role), out.shape[-1]),
            )
        return out

    def read_state(self, kv: KVView, jobs: JobBatch, columns: slice, name: str) -> Tensor:
        every = torch.arange(jobs.max_src, device=jobs.slots.device).expand(len(jobs.slots), _width(kv, columns), -1)
        rows, tiers = _source(kv, jobs, columns, every)
        found = [
            store.rows(f"state.{name}")[torch.where(tiers == tier, rows, 0)] for tier, store in enumerate(kv.tiers)
        ]
        state = found[0] if len(found) == 1 else torch.where((tiers == 1)[..., None], found[1], found[0])
        return state.float().masked_fill((tiers < 0)[..., None], 0)

    def compact(self, kv: KVView, jobs: JobBatch, columns: slice, keep: Tensor, state: dict[str, Tensor]) -> None:
        dst = kv.tiers[jobs.dst_tier]
        rows, tiers = _source(kv, jobs, columns, keep)
        place = torch.arange(keep.shape[2], device=keep.device)
        page = jobs.dst_pages[:, None, place // kv.page_size].long()
        to = (_column_ids(kv, columns)[:, None] * dst.num_pages + page) * kv.page_size + place % kv.page_size
        to = to.contiguous()
        for tier, src in enumerate(kv.tiers):
            moved = [name for name in dst.planes if name.startswith("state.")]
            for role in ("k", "v"):
                names = (f"{role}_data", f"{role}_scale")
                if _codec(src, role) == _codec(dst, role):
                    moved += names
                else:
                    self._recode(src, dst, role, rows, to, tiers, tier)
            for name in moved:
                if dst.planes[name].shape[-1]:
                    words = _words(src, name)
                    copy_rows[(triton.cdiv(rows.numel(), ROWS),)](
                        words,
                        _words(dst, name),
                        rows,
                        to,
                        tiers,
                        rows.numel(),
                        words.shape[-1],
                        TIER=tier,
                        WIDTH=next_power_of_2(words.shape[-1]),
                        N=ROWS,
                    )
        for name, values in state.items():
            kept = values.gather(2, keep[..., None].expand(-1, -1, -1, values.shape[-1])).flatten(0, 2)
            plane = dst.rows(f"state.{name}")
            plane.index_copy_(0, to.flatten(), kept.to(plane.dtype))

    def _recode(
        self, src: PageStore, dst: PageStore, role: str, rows: Tensor, to: Tensor, tiers: Tensor, tier: int
    ) -> None:
        new = device_codec(_codec(dst, role))
        recode_rows[(triton.cdiv(rows.numel(), ROWS),)](
            src.rows(f"{role}_data"),
            src.rows(f"{role}_scale"),
            dst.rows(f"{role}_data"),
            dst.rows(f"{role}_scale"),
            rows,
            to,
            tiers,
            rows.numel(),
            TIER=tier,
            D=src.head_dim,
            N=ROWS,
            **_decoding(_codec(src, role), src.head_dim),
            STORE=new.store,
            OPTIONS=new.options,
        )

    def copy_pages(self, src: PageStore, src_pages: Tensor, dst: PageStore, dst_pages: Tensor) -> None:
        """One of the stores may be in the host's memory."""
        for name, plane in dst.planes.items():
            if plane.shape[-1]:
                pages = _words(src, name).view(src.num_columns, src.num_pages, -1)
                chosen = pages.index_select(1, src_pages.to(pages.device).long())
                into = _words(dst, name).view(dst.num_columns, dst.num_pages, -1)
                into.index_copy_(1, dst_pages.to(into.device).long(), chosen.to(into.device))


def _tile_tokens(kv: KVView) -> int:
    """Tokens of a tile of queries in prefill: 128 rows with the query heads of a KV head."""
    per_head = kv.window.shape[3] // kv.group_of.shape[1]
    return max(1, 128 // next_power_of_2(per_head))


def _num_splits(shape: DecodeShape, programs: int, max_rows: int) -> int:
    """Splits of a head's rows: enough to fill the device, none shorter than `min_rows`."""
    return max(1, min(-(-shape.programs // programs), max_rows // shape.min_rows))


def _query_frames(kv: KVView, q: Tensor) -> list[Tensor]:
    """q [..., D] for each tier, in the frame in which it stores K."""
    rotated = None
    if any(store.format.k.rotate for store in kv.tiers):
        rotated = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        num_rows = q.numel() // q.shape[-1]
        rotate_rows[(triton.cdiv(num_rows, 4),)](q, rotated, num_rows, D=q.shape[-1], N=4, num_warps=1)
    return [rotated if store.format.k.rotate and rotated is not None else q for store in kv.tiers]


def _merge(kv: KVView, partial: Tensor, lse: Tensor, tokens: Tensor, splits: int, out: Tensor) -> None:
    merge_splits[(out.shape[1], len(tokens))](
        partial,
        lse,
        out,
        tokens,
        splits,
        D=out.shape[-1],
        BS=min(16, next_power_of_2(splits)),
        NUM_TIERS=len(kv.tiers),
        ROTATE=tuple(store.format.v.rotate for store in kv.tiers),
        num_warps=1,
    )


def _decoding(codec: RowCodec, head_dim: int) -> dict:
    """Constants of a kernel that decodes rows into the model's frame."""
    constants = reading(codec, head_dim)
    return {name: constants[name] for name in ("LOAD", "PIECES", "BIAS", "GAIN", "SCALED")} | {"ROTATE": codec.rotate}


def _width(kv: KVView, columns: slice) -> int:
    return len(range(kv.members.shape[1])[columns])


def _column_ids(kv: KVView, columns: slice) -> Tensor:
    return torch.arange(kv.members.shape[1], device=kv.members.device)[columns]


def _source(kv: KVView, jobs: JobBatch, columns: slice, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, tiers) of source rows `chosen` int64[J, C, n]: flat row in the planes of its tier, int64[J, C, n] each.
    Past the end of a job the tier is -1."""
    place = jobs.first_page[:, None, None] + chosen // kv.page_size
    ok = chosen < jobs.num_src[:, None, None]
    tables = kv.page_table[jobs.slots, jobs.groups][:, None].expand(-1, chosen.shape[1], -1)
    page = tables.gather(2, place.clamp(max=tables.shape[2] - 1)).long()
    cold = place < kv.cold[jobs.slots, jobs.groups, None, None]
    num_pages = torch.where(cold, kv.tiers[-1].num_pages, kv.tiers[0].num_pages)
    rows = (_column_ids(kv, columns)[:, None] * num_pages + page) * kv.page_size + chosen % kv.page_size
    return rows, torch.where(ok, cold.long(), -1)
