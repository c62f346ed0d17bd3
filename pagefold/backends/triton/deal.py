"""Rows of heads of unequal lengths, dealt out to the programs of decode attention before the first layer attends.

Where a layout has several groups, one head of a layer may keep most of its prompt and the one beside it a page; and of
a few sequences, one may be long. Splitting both into as many parts leaves some programs idle and others running alone,
so a layer's rows are cut into equal shares instead, as many as fill the device. Balancing ahead of time, from lengths
known before attention begins, is Tangram's idea (arXiv 2606.06302); here they are those on the device, so that a
captured graph holds for any lengths.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagefold.backends.base import KVView
from pagefold.backends.triton.addressing import tier_rows
from pagefold.backends.triton.ahead import start_next_and_wait
from pagefold.backends.triton.attend_decode import store_merged, sum_of_parts
from pagefold.backends.triton.plan import DecodePart, DecodeShape, least_rows, next_power_of_2
from pagefold.store.lowbit import device_hadamard
from pagefold.store.shim import jit, tl, triton

ROUNDS = 3  # shares that a program works on one after the other, about, where heads outnumber programs
ENTRIES = 4096  # of a block of items that is written at once
CLASSES = 8  # of shares by their rows: programs that start last should have least to do


@dataclass
class Deal:
    """How the rows of every layer are cut.

    table     int32[tiers, L, n], for each tier and layer a line of
                  [width]    of each head (sequence after sequence), its first share among those of all
                  [width]    how many shares it has
                  [most, 2]  of each program, its head and which share of it, about in order of size; -1: none
                  rows of a share, and 3 unused, so that every line begins at 16 bytes
    width     B * H, rounded up to 4
    most      programs of a layer and tier
    """

    table: Tensor
    width: int
    most: int


def is_dealt(kv: KVView, heads: int, shapes: list[DecodeShape]) -> bool:
    """Whether the rows of a batch with so many heads of sequences are dealt out: where heads of a sequence differ in
    length, and where there are so few that a long one would keep the others waiting."""
    return kv.page_table.shape[1] > 1 or heads <= min(shape.programs for shape in shapes)


def deal(kv: KVView, part: DecodePart, shapes: list[DecodeShape]) -> Deal:
    """Cut the rows that a batch of single tokens reads; a launch for each tier, and nothing that waits."""
    layers, num_heads = kv.group_of.shape
    heads = len(part.tokens) * num_heads
    # where there are more heads than programs at once, smaller shares, so that those which start last end early
    rounds = [1 if heads <= shape.programs else ROUNDS for shape in shapes]
    most = max(shape.programs * times for shape, times in zip(shapes, rounds, strict=True)) + heads
    most, width = most + most % 2, triton.cdiv(heads, 4) * 4
    line = 2 * width + 2 * most + 4
    table = torch.empty(len(shapes), layers, line, dtype=torch.int32, device=part.tokens.device)
    block = 32 if heads <= 32 else max(256, next_power_of_2(heads))  # few sizes: the kernel is compiled for each
    for tier, shape in enumerate(shapes):
        deal_rows[(layers,)](
            table[tier],
            part.slots,
            part.seq_lens,
            kv.evicted,
            kv.cold,
            kv.group_of,
            heads,
            kv.page_table.shape[1],
            shape.programs * rounds[tier],
            least_rows(shape, heads),
            most,
            width,
            line,
            H=num_heads,
            PS=kv.page_size,
            N=shape.tile,
            TIER=tier,
            NUM_TIERS=len(shapes),
            BLOCK=block,
            PARTS=max(1, ENTRIES // block),
            CLASSES=CLASSES,
            num_warps=8,
        )
    return Deal(table, width, most)


def merge_shares(
    kv: KVView,
    dealt: Deal,
    layer: int,
    partial: Tensor,
    lse: Tensor,
    tokens: Tensor,
    out: Tensor,
    ahead: bool,
) -> None:
    """out[tokens] of a layer from what its shares gave, as `merge_dealt` has them.

    ahead     start before the kernel in front has ended
    """
    merge_dealt[(out.shape[1], len(tokens))](
        partial,
        lse,
        out,
        dealt.table[0, layer],
        tokens,
        dealt.width,
        dealt.most,
        dealt.table.stride(0),
        R=partial.shape[1],
        D=out.shape[-1],
        BS=16,
        NUM_TIERS=len(kv.tiers),
        ROTATE=tuple(store.format.v.rotate for store in kv.tiers),
        AHEAD=ahead,
        num_warps=1,
        launch_pdl=ahead,
    )


@jit(do_not_specialize=["heads", "num_groups", "programs", "least", "most", "width", "line"])
def deal_rows(
    table,
    slots,
    seq_lens,
    evicted,
    cold,
    group_of,
    heads,
    num_groups,
    programs,
    least,
    most,
    width,
    line,
    H: tl.constexpr,
    PS: tl.constexpr,
    N: tl.constexpr,
    TIER: tl.constexpr,
    NUM_TIERS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """Grid (L): a layer's line of a `Deal`, for one tier.

    heads     B * H, at most BLOCK
    programs  to cut all rows for; those that get less than a whole share come on top
    least     rows of a share at least, a multiple of N
    PARTS     items of each head that are written at once
    CLASSES   of shares that are less than a whole one, those of most rows first
    """
    layer = tl.program_id(0).to(tl.int64)
    table += layer * line
    i = tl.arange(0, BLOCK)
    ok = i < heads
    group = tl.load(group_of + layer * H + i % H)
    place = tl.load(slots + i // H, mask=ok, other=0) * num_groups + group
    n = (tl.load(seq_lens + i // H, mask=ok, other=0) - tl.load(evicted + place)).to(tl.int32)
    first, stop = tier_rows(n, place, cold, PS, TIER, NUM_TIERS)
    rows = tl.where(ok, tl.maximum(stop - first, 0), 0)
    total = tl.sum(rows.to(tl.int64), 0)
    share = tl.maximum(tl.cdiv(tl.cdiv(total, programs), N) * N, least).to(tl.int32)
    whole = rows // share
    count = tl.cdiv(rows, share)
    items = table + 2 * width
    tl.store(table + i, tl.cumsum(count, 0) - count, mask=ok)
    tl.store(table + width + i, count, mask=ok)
    tl.store(items + 2 * most, share)
    before, num_whole, o_p = tl.cumsum(whole, 0) - whole, tl.sum(whole, 0), tl.arange(0, PARTS)
    for p in range(0, tl.max(whole, 0), PARTS):
        head, number = tl.broadcast(i[:, None], p + o_p[None, :])
        one = items + 2 * (before[:, None] + number)
        tl.store(one, head, mask=number < whole[:, None])
        tl.store(one + 1, number, mask=number < whole[:, None])
    given_out, rest = num_whole, rows % share
    for c in tl.static_range(CLASSES):
        here = ((rest > 0) & (rest * CLASSES // share == CLASSES - 1 - c)).to(tl.int32)
        last = items + 2 * (given_out + tl.cumsum(here, 0) - here)
        tl.store(last, i, mask=here > 0)
        tl.store(last + 1, whole, mask=here > 0)
        given_out += tl.sum(here, 0)
    for w in range(given_out, most, BLOCK):
        tl.store(items + 2 * (w + i), -1, mask=w + i < most)


@jit(do_not_specialize=["width", "most", "per_tier"])
def merge_dealt(
    partial,
    lse,
    out,
    table,
    tokens,
    width,
    most,
    per_tier,
    R: tl.constexpr,
    D: tl.constexpr,
    BS: tl.constexpr,
    NUM_TIERS: tl.constexpr,
    ROTATE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Grid (Hq, B): out[tokens[b], h] from the shares of its KV head in all tiers, whose sum leaves its rows'
    frame.

    partial    float32[NUM_TIERS * most, R, D]
    lse        float32[NUM_TIERS * most, R], base 2
    table      the layer's line of a `Deal`, that of the next tier `per_tier` integers after it
    AHEAD      started before the kernel in front has ended
    """
    if AHEAD:
        start_next_and_wait()
    i_h, i_b = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(0)
    head = table + (i_b * num_heads + i_h) // R
    o_s = tl.arange(0, BS)
    m = tl.full([BS], float("-inf"), tl.float32)
    for tier in tl.static_range(NUM_TIERS):
        first, count = tier * most + tl.load(head + tier * per_tier), tl.load(head + tier * per_tier + width)
        for s in range(0, count, BS):
            at = (first + s + o_s).to(tl.int64) * R + i_h % R
            m = tl.maximum(m, tl.load(lse + at, mask=s + o_s < count, other=float("-inf")))
    m = tl.max(m, 0)
    total = 0.0
    result = tl.zeros([1, D], tl.float32)
    for tier in tl.static_range(NUM_TIERS):
        first, count = tier * most + tl.load(head + tier * per_tier), tl.load(head + tier * per_tier + width)
        acc, weight = sum_of_parts(partial, lse, first.to(tl.int64) * R + i_h % R, count, R, m, D, BS)
        total += weight
        acc = acc[None, :]
        if ROTATE[tier]:
            acc = device_hadamard(acc, 1, D)
        result += acc
    store_merged(out, tokens, i_b, i_h, num_heads, result, total, D)
