"""Triton kernels behind the backend protocol: pages are read as they are stored, nothing waits for the host."""

import math

import torch
from torch import Tensor

from pagefold.backends.base import ForwardInputs, HeadTurn, KVView
from pagefold.backends.torch_ops import plain_product
from pagefold.backends.triton.ahead import starts_ahead
from pagefold.backends.triton.attend_decode import decode_split, merge_splits
from pagefold.backends.triton.attend_prefill import prefill_tile
from pagefold.backends.triton.compaction import TritonCompaction
from pagefold.backends.triton.deal import deal, is_dealt, merge_shares
from pagefold.backends.triton.layer_ops import TritonOps, append_heads, append_tile
from pagefold.backends.triton.long_prefill import LongPrefill, attend_long, warm_up
from pagefold.backends.triton.one_token import MAX_TOKENS, held_product
from pagefold.backends.triton.pages import TritonPages
from pagefold.backends.triton.plan import (
    BatchPlan,
    DecodePart,
    DecodeShape,
    PrefillPart,
    Shape,
    decode_shape,
    device_codec,
    interpreted,
    least_rows,
    next_power_of_2,
    num_splits,
    plan_batch,
    prefill_shape,
    reading,
    tile_tokens,
)
from pagefold.backends.triton.rows import TritonRows, rotate_rows, rotates
from pagefold.backends.triton.window import TritonWindow
from pagefold.store.shim import HAS_TRITON, triton


class TritonBackend(TritonOps, TritonRows, TritonPages, TritonWindow, TritonCompaction):
    """
    decode    shape of the decode kernel; by default, what suits the format
    prefill   shape of the paged prefill kernel, which then attends to every chunk; by default it is what suits the
              format, and long chunks go to cuDNN
    """

    name = "triton"

    def __init__(self, decode: DecodeShape | None = None, prefill: Shape | None = None):
        if not HAS_TRITON:
            raise ValueError("backend: triton needs the package triton, which is not installed")
        self._decode_shape = decode
        self._prefill_shape = prefill
        self._long = LongPrefill()
        self.few_tokens = 0 if interpreted() else MAX_TOKENS  # a CPU's weights may be packed

    def _shapes(self, kv: KVView, tier: int) -> tuple[DecodeShape, Shape]:
        head_dim = kv.window.shape[-1]
        v = device_codec(kv.tiers[tier].format.v)
        return self._decode_shape or decode_shape(v, head_dim), self._prefill_shape or prefill_shape(v, head_dim)

    def _plan(self, kv: KVView, fwd: ForwardInputs) -> BatchPlan:
        plans = fwd.plan = fwd.plan or {}
        plan = plans.get(id(kv))
        if not isinstance(plan, BatchPlan):
            long = self._long.plan(kv, fwd) if self._prefill_shape is None else []
            plan = plans[id(kv)] = plan_batch(kv, fwd, [chunk.index for chunk in long])
            plan.long = long
        return plan

    def warm_up(self, kv: KVView, max_tokens: int, max_model_len: int) -> None:
        for part in kv.parts:
            warm_up(part, max_tokens, max_model_len)

    def append(self, kv: KVView, layer: int, qkv: Tensor, fwd: ForwardInputs, turn: HeadTurn | None) -> Tensor:
        hot, plan, qkv = kv.tiers[0], self._plan(kv, fwd), qkv.contiguous()
        num_tokens, num_heads, head_dim = qkv.shape
        num_kv = kv.group_of.shape[1]
        num_q = num_heads - 2 * num_kv
        k_codec, v_codec = device_codec(hot.format.k), device_codec(hot.format.v)
        states = [name for name in hot.planes if name.startswith("state.")]
        q = torch.empty(num_tokens, num_q, head_dim, dtype=qkv.dtype, device=qkv.device)
        rotate = rotates(kv)
        rotated = torch.empty(q.shape, dtype=torch.float32, device=q.device) if rotate else q
        tokens, heads, warps = append_tile(num_tokens, num_q, num_kv, rotate or hot.format.v.rotate)
        ahead = starts_ahead(qkv.device)
        parts = triton.cdiv(num_q, heads) + 2 * triton.cdiv(num_kv, heads)
        append_heads[(triton.cdiv(num_tokens, tokens) * parts,)](
            qkv,
            q,
            rotated,
            kv.window,
            *plan.planes[0],
            tuple(hot.rows(name) for name in states),
            fwd.positions,
            plan.token_slots,
            fwd.window_slots,
            fwd.window_index,
            kv.page_table,
            kv.evicted,
            kv.group_of,
            kv.column_of,
            turn.cos_sin if turn else qkv,
            turn.weight if turn and turn.weight is not None else qkv,
            turn.eps if turn else 0.0,
            layer,
            num_tokens,
            hot.num_pages,
            *kv.page_table.shape[1:],
            kv.window.shape[1],
            HQ=num_q,
            H=num_kv,
            D=head_dim,
            PS=kv.page_size,
            BT=tokens,
            BH=heads,
            TURN=turn is not None,
            NORM=turn is not None and turn.weight is not None,
            ROTATE=rotate,
            WINDOW=kv.window.shape[2] if fwd.keeps_window else 0,
            STATE_WIDTHS=tuple(hot.layout[name].width for name in states),
            STORE_K=k_codec.store,
            K_OPTIONS=k_codec.options,
            STORE_V=v_codec.store,
            V_OPTIONS=v_codec.options,
            AHEAD=ahead,
            num_warps=warps,
            launch_pdl=ahead,
        )
        plan.appended = (q, rotated)
        return q

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
        held = held_product(x, weight, bias, norm, gate, add_to)
        return plain_product(self, x, weight, bias, norm, gate, add_to) if held is None else held

    def attend(self, kv: KVView, layer: int, q: Tensor, fwd: ForwardInputs, scale: float) -> Tensor:
        plan = self._plan(kv, fwd)
        known = plan.appended[1] if plan.appended and plan.appended[0] is q else None
        q = q.contiguous()
        out = torch.empty_like(q)
        queries = _query_frames(kv, q, known) if plan.decode or plan.prefill else []
        if plan.decode:
            self._decode(kv, layer, queries, plan, plan.decode, scale, out)
        if plan.prefill:
            self._prefill(kv, layer, queries, plan, plan.prefill, fwd, scale, out)
        for chunk in plan.long:
            attend_long(kv, plan.planes, layer, q, chunk, scale, out)
        return out

    def _decode(
        self,
        kv: KVView,
        layer: int,
        queries: list[Tensor],
        plan: BatchPlan,
        part: DecodePart,
        scale: float,
        out: Tensor,
    ) -> None:
        num_heads, head_dim = kv.group_of.shape[1], kv.window.shape[-1]
        per_head, batch, num_tiers = out.shape[1] // num_heads, len(part.tokens), len(kv.tiers)
        shapes = [self._shapes(kv, tier)[0] for tier in range(num_tiers)]
        if is_dealt(kv, batch * num_heads, shapes):
            plan.deal = plan.deal or deal(kv, part, shapes)
        if dealt := plan.deal:
            splits, direct = dealt.most, False
            grid, parts = (splits,), (num_tiers * splits, per_head)
        else:
            splits = max(num_splits(shape, batch * num_heads, part.max_rows) for shape in shapes)
            direct = num_tiers * splits == 1 and not kv.tiers[0].format.v.rotate
            grid, parts = (splits, num_heads, batch), (batch, out.shape[1], num_tiers * splits)
        partial = out if direct else torch.empty(*parts, head_dim, dtype=torch.float32, device=out.device)
        lse = torch.empty(parts, dtype=torch.float32, device=out.device)
        ahead = starts_ahead(out.device)
        for tier, (store, shape) in enumerate(zip(kv.tiers, shapes)):
            decode_split[grid](
                queries[tier],
                *plan.planes[tier],
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
                least_rows(shape, batch * num_heads),
                tier * splits,
                num_tiers * splits,
                dealt.table[tier, layer] if dealt else part.slots,
                dealt.width if dealt else 0,
                H=num_heads,
                R=per_head,
                M=max(shape.heads, next_power_of_2(per_head)),
                D=head_dim,
                PS=kv.page_size,
                N=shape.tile,
                TIER=tier,
                NUM_TIERS=num_tiers,
                DIRECT=direct,
                DEALT=dealt is not None,
                **reading(store.format.k, head_dim, "K"),
                **reading(store.format.v, head_dim, "V"),
                K_WIDTH=store.layout["k_data"].width,
                V_WIDTH=store.layout["v_data"].width,
                PRECISION="ieee",
                AHEAD=ahead,
                num_warps=shape.warps,
                num_stages=shape.stages,
                launch_pdl=ahead,
            )
        if dealt:
            merge_shares(kv, dealt, layer, partial, lse, part.tokens, out, ahead)
        elif not direct:
            _merge(kv, partial, lse, part.tokens, splits, out)

    def _prefill(
        self,
        kv: KVView,
        layer: int,
        queries: list[Tensor],
        plan: BatchPlan,
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
                *plan.planes[tier],
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
                BQ=tile_tokens(kv),
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


def _query_frames(kv: KVView, q: Tensor, rotated: Tensor | None = None) -> list[Tensor]:
    """q [..., D] for each tier, in the frame in which it stores K; `rotated` if it is known."""
    if rotated is None and rotates(kv):
        rotated = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        num_rows = q.numel() // q.shape[-1]
        rotate_rows[(triton.cdiv(num_rows, 4),)](q, rotated, num_rows, D=q.shape[-1], N=4, num_warps=1)
    return [rotated if store.format.k.rotate and rotated is not None else q for store in kv.tiers]


def _merge(kv: KVView, partial: Tensor, lse: Tensor, tokens: Tensor, splits: int, out: Tensor) -> None:
    ahead = starts_ahead(out.device)
    merge_splits[(out.shape[1], len(tokens))](
        partial,
        lse,
        out,
        tokens,
        splits,
        D=out.shape[-1],
        BS=min(16, next_power_of_2(splits)),
        ALL=next_power_of_2(len(kv.tiers) * splits),
        NUM_TIERS=len(kv.tiers),
        ROTATE=tuple(store.format.v.rotate for store in kv.tiers),
        AHEAD=ahead,
        num_warps=1,
        launch_pdl=ahead,
    )
