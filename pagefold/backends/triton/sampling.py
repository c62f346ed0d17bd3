"""Draws: the race of `runner/sampler.py` in two launches, and the cuts, without a word from the host.

The first kernel reads every logit once and leaves each block's largest logit and the winner of the block's race. The
second, one program per row, picks the winner of the row. Rates are relative to that of the largest logit, so the sum
of a softmax is never needed.

min_p, top_k and top_p keep the most likely ids of a row, and the winner among those is found by asking winners of
larger races. Whoever wins among a set wins among each part of the set that he is in. So: take the winner of all,
count the ids that are ahead of him (more likely, or as likely with a lower id) and their mass. If that says he is kept,
he is the draw; if not, nobody behind him is kept either, and the winner among those ahead is asked next. A rejection
halves what is left, or better, so that most rows need one or two passes, and a block whose largest logit is behind the
one asked is not read.
"""

import numpy as np
import torch
from torch import Tensor

from pagefold.backends.triton.plan import next_power_of_2
from pagefold.store.shim import jit, tl, triton


@jit
def load_float(rule):
    return tl.load(rule).to(tl.float64, bitcast=True).to(tl.float32)


@jit
def load_rule(rules, i_n):
    """(source, key, sharpness, floor, top_k, top_p) of row i_n; see `pack_rules`."""
    rule = rules + i_n * 6
    top_k = tl.load(rule + 4).to(tl.int32)
    return tl.load(rule), tl.load(rule + 1), load_float(rule + 2), load_float(rule + 3), top_k, load_float(rule + 5)


@jit
def load_logits(logits, edited, i_n, stride, source, vocab_size, o):
    """float32 logits of the ids `o` of row i_n: +inf for NaN, -inf beyond the vocabulary."""
    ok = o < vocab_size
    if source < 0:
        x = tl.load(logits + i_n.to(tl.int64) * stride + o, mask=ok, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(edited + source * vocab_size + o, mask=ok, other=float("-inf"))
    return tl.where(x == x, x, float("inf"))


@jit
def waiting_time(salts, key, vocab_size, o):
    """The exponential waiting times at rate 1 of the ids `o`: -log(1 - v), where v is uniform.

    1 - v = 2^n (1 + f) with 1 + f in [2^-0.5, 2^0.5). Those who wait least have n = 0 and f = -v, without rounding. The
    polynomial is (log(1 + f) / f - 1) / f within 2e-7 of the logarithm.
    """
    MULTIPLIER: tl.constexpr = 0xBF58476D1CE4E5B9
    ALL_BITS: tl.constexpr = 0xFFFFFFFFFFFFFFFF
    bits = (tl.load(salts + o, mask=o < vocab_size, other=0) ^ key).to(tl.uint64, bitcast=True)
    bits = ((bits ^ (bits >> 32)) * MULTIPLIER) ^ ALL_BITS
    low = bits.to(tl.uint32).to(tl.float32) * 2.0**-64 + 2.0**-53
    v = (bits >> 32).to(tl.uint32).to(tl.float32) * 2.0**-32 + low
    u = tl.maximum(1.0 - v, 2.0**-25).to(tl.int32, bitcast=True)
    n = (u - 0x3F3504F3) >> 23
    f = tl.where(n == 0, -v, (u - (n << 23)).to(tl.float32, bitcast=True) - 1.0)
    r = f * (f * (f * -0.1005505 + 0.161564) - 0.1724276) + 0.1991018
    r = f * (f * (f * r - 0.2497155) + 0.333346) - 0.5000032
    return n.to(tl.float32) * -0.6931472 - (f * (f * r) + f)


@jit
def scan_rows(logits, edited, rules, salts, partial, winners, stride, vocab_size, BLOCK: tl.constexpr):
    """Grid (N, blocks): what one block of one row has to say.

    rules     int64[N, 6], see `pack_rules`
    partial   float32[3, N, blocks]: the largest logit m, or +inf for a block with a NaN; and where ids are drawn at
              random, the time of the winner and the sum of the rates, if an id of logit m has the rate 1
    winners   int32[N, blocks]
    """
    i_n, i_b = tl.program_id(0), tl.program_id(1)
    num_blocks = tl.num_programs(1)
    source, key, sharpness, _, _, top_p = load_rule(rules, i_n)
    o = i_b * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits, edited, i_n, stride, source, vocab_size, o)
    m = tl.max(x, 0)
    behind = tl.where(m == float("-inf"), 0.0, m) - x
    p_out = partial + i_n * num_blocks + i_b
    plane = tl.num_programs(0) * num_blocks
    tl.store(p_out, m)
    if sharpness > 0:
        if top_p < float("inf"):
            tl.store(p_out + 2 * plane, tl.sum(tl.exp2(behind * -sharpness), 0))
        behind = tl.exp2(behind * sharpness) * waiting_time(salts, key, vocab_size, o)
    least = tl.min(behind, 0)
    tl.store(p_out + plane, least)
    tl.store(winners + i_n * num_blocks + i_b, tl.min(tl.where(behind == least, o, vocab_size), 0))


@jit
def race_ahead(
    logits,
    edited,
    i_n,
    stride,
    source,
    vocab_size,
    salts,
    key,
    sharpness,
    top,
    maxima,
    num_blocks,
    asked_x,
    asked,
    BLOCK: tl.constexpr,
):
    """(number, mass, winner) of the ids that are ahead of the id `asked` with logit `asked_x`."""
    mass = tl.zeros([BLOCK], tl.float32)
    num = tl.zeros([BLOCK], tl.int32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    winner = tl.zeros([BLOCK], tl.int32) + vocab_size
    for i_b in range(num_blocks):
        if tl.load(maxima + i_b) >= asked_x:
            o = i_b * BLOCK + tl.arange(0, BLOCK)
            x = load_logits(logits, edited, i_n, stride, source, vocab_size, o)
            ahead = (x > asked_x) | ((x == asked_x) & (o < asked))
            behind = (top - x) * sharpness
            mass += tl.where(ahead, tl.exp2(-behind), 0.0)
            num += ahead.to(tl.int32)
            time = tl.where(ahead, tl.exp2(behind) * waiting_time(salts, key, vocab_size, o), float("inf"))
            winner = tl.where(time < least, o, winner)
            least = tl.minimum(time, least)
    winner = tl.min(tl.where(least == tl.min(least, 0), winner, vocab_size), 0)
    return tl.sum(num, 0), tl.sum(mass, 0), winner


@jit
def order_of(x):
    """int64 in the order of finite float32 numbers and infinities, neighbours next to each other."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@jit
def float_of(order):
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def kth_largest(
    logits, edited, i_n, stride, source, vocab_size, top, maxima, num_blocks, k, least, BLOCK: tl.constexpr
):
    """A number that the k largest logits of a row reach, and no others but equals of the k-th; `least` is such a bound
    from below. Cuts the range of float32 numbers in eight until it holds one, or separates the k-th from the next.
    """
    PARTS: tl.constexpr = 8
    low, high = order_of(least), order_of(top) + 1  # `low` is reached by k or more, `high` by fewer
    num_low = vocab_size + 1
    while (high - low > 1) & (num_low != k):
        step = (high - low + PARTS - 1) // PARTS
        border = float_of(tl.minimum(low + step * tl.arange(1, PARTS + 1), high))
        reach = tl.zeros([PARTS, BLOCK], tl.int32)
        first = float_of(low + step)
        for i_b in range(num_blocks):
            if tl.load(maxima + i_b) >= first:
                o = i_b * BLOCK + tl.arange(0, BLOCK)
                x = load_logits(logits, edited, i_n, stride, source, vocab_size, o)
                reach += (x[None, :] >= border[:, None]).to(tl.int32)
        num = tl.sum(reach, 1)
        num_low = tl.minimum(tl.min(tl.where(num >= k, num, vocab_size + 1), 0), num_low)
        low += step * tl.sum((num >= k).to(tl.int64), 0)
        high = tl.minimum(low + step, high)
    return float_of(low)


@jit
def finish_rows(
    logits,
    edited,
    rules,
    salts,
    partial,
    winners,
    ids,
    stride,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Grid (N): the draw of a row, int64, or -1, from what `scan_rows` left. BLOCKS is a power of 2 >= num_blocks."""
    i_n = tl.program_id(0)
    plane = tl.num_programs(0) * num_blocks
    source, key, sharpness, floor, k, p = load_rule(rules, i_n)
    maxima = partial + i_n * num_blocks
    o = tl.arange(0, BLOCKS)
    ok = o < num_blocks
    m = tl.load(maxima + o, mask=ok, other=float("-inf"))
    top = tl.max(m, 0)
    sound = tl.abs(top) < float("inf")
    behind = top - m
    if sharpness > 0:
        behind = tl.exp2(behind * sharpness) * tl.load(maxima + plane + o, mask=ok, other=float("inf"))
    candidates = tl.load(winners + i_n * num_blocks + o, mask=ok, other=0)
    winner = tl.min(tl.where(behind == tl.min(behind, 0), candidates, vocab_size), 0)

    floor += top
    ranked = (k < vocab_size) | (p < float("inf"))
    if sound & (ranked | (floor > float("-inf"))):
        if k < vocab_size:
            reach = tl.zeros([BLOCKS], tl.int32)
            for i_b in range(num_blocks):
                reach += (tl.load(maxima + i_b) >= m).to(tl.int32)
            least = tl.max(tl.where(reach >= k, m, float("-inf")), 0)  # the k-th largest of the blocks' largest
            if p < float("inf"):
                least = kth_largest(
                    logits, edited, i_n, stride, source, vocab_size, top, maxima, num_blocks, k, least, BLOCK
                )
            floor = tl.maximum(floor, least)
        rates = tl.load(maxima + 2 * plane + o, mask=ok, other=0.0)
        whole = tl.sum(rates * tl.exp2((m - top) * sharpness), 0)
        from_floor = floor > float("-inf")  # at first, a race of those that reach the floor
        asking = True
        while asking:
            asked = tl.where(from_floor, vocab_size, winner)
            x = load_logits(logits, edited, i_n, stride, source, vocab_size, winner)
            x = tl.where(from_floor, floor, x)
            num, mass, next_winner = race_ahead(
                logits, edited, i_n, stride, source, vocab_size, salts, key, sharpness, top, maxima, num_blocks,
                x, asked, BLOCK,
            )  # fmt: skip
            if from_floor:
                whole = mass - tl.maximum(num - k, 0) * tl.exp2((floor - top) * sharpness)  # less equals of the k-th
                asking = ranked
                winner = next_winner
            else:
                asking = (num > 0) & ((num >= k) | ((p < 1) & (mass >= p * whole)))
                winner = tl.where(asking, next_winner, winner)
            from_floor = False
    tl.store(ids + i_n, tl.where(sound, winner, -1).to(tl.int64))


def pack_rules(
    source: np.ndarray,
    keys: np.ndarray,
    sharpness: np.ndarray,
    floor: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
) -> np.ndarray:
    """How each row is drawn from: int64[N, 6], the float64 columns by their bits.

    source      int64[N], the row of `edited` that takes the place of the row of logits, or -1
    keys        int64[N], hash of the seed and the position
    sharpness   float64[N], log2(e) / temperature; 0: greedy
    floor       float64[N], the least logit that min_p keeps, relative to the largest; -inf: off
    top_k       int64[N], the size of the vocabulary: off
    top_p       float64[N], inf: off
    """
    columns = (source, keys, sharpness, floor, top_k, top_p)
    return np.stack([column.view(np.int64) for column in columns], 1)


def draw(logits: Tensor, edited: Tensor, rules: Tensor, salts: Tensor, block: int) -> Tensor:
    """The next id of every row, or -1 where no logit is finite or one is NaN or +inf: int64[N].

    logits   bf16, fp16 or fp32 [N, >= V], rows contiguous
    edited   float32[*, V]
    rules    int64[N, 6], see `pack_rules`
    salts    int64[V], hashes of the ids
    block    ids that the programs look at together, a power of 2
    """
    num_rows, vocab_size = len(rules), len(salts)
    num_blocks = triton.cdiv(vocab_size, block)
    partial = torch.empty(3, num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    winners = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    stride = logits.stride(0)
    scan_rows[(num_rows, num_blocks)](
        logits, edited, rules, salts, partial, winners, stride, vocab_size, BLOCK=block, num_warps=2
    )
    finish_rows[(num_rows,)](
        logits, edited, rules, salts, partial, winners, ids, stride, vocab_size, num_blocks,
        BLOCK=block, BLOCKS=next_power_of_2(num_blocks), num_warps=8,
    )  # fmt: skip
    return ids
