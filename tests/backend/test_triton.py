"""The Triton kernels, interpreted on the CPU, do to every byte what the reference does.

The interpreter must be chosen before kernels are defined, so a plain run starts this file again in a process of its
own; `TRITON_INTERPRET=1 pytest tests/backend/test_triton.py` runs the tests themselves.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs the package triton")

from pagefold.backends.base import KVView
from pagefold.backends.reference import Reference
from pagefold.backends.torch_ops import TorchOps, split_heads
from pagefold.backends.triton import backend as module
from pagefold.backends.triton import compaction, expectation, window
from pagefold.backends.triton.backend import TritonBackend
from pagefold.backends.triton.deal import CLASSES, ROUNDS, deal, is_dealt
from pagefold.backends.triton.layer_ops import append_tile
from pagefold.backends.triton.plan import (
    DecodePart,
    DecodeShape,
    least_rows,
    next_power_of_2,
    num_splits,
    plan_batch,
    tile_tokens,
)
from pagefold.store.format import FORMATS, Plane, parse_format
from pagefold.store.lowbit import quotient
from pagefold.store.shim import jit, tl
from tests.backend.cases import (
    LAYOUTS,
    Case,
    bytes_of,
    copy_of,
    make_batch,
    make_jobs,
    make_keep,
    make_turn,
    make_view,
    new_queries,
    new_tokens,
    of_sources,
)
from tests.interpreted import assert_passes_interpreted, interpreted, plain

STATE = {"score": Plane(torch.float32, 1), "pair": Plane(torch.float16, 2)}
PAIRS = ["k=fp8,v=int4", "k=int4,v=fp16"]
ONE_TIER = [(name, None) for name in [*FORMATS.names(), *PAIRS] if name != "fp64"]
TIERS = [*ONE_TIER, ("bf16", "int4"), ("int4", "k4v2"), ("fp32", "k=fp8,v=int4")]
DECODE = [(4, 1), (1, 1), (3, 1), (2, 1)]
MIXED = [(4, 20), (1, 1), (2, 7), (3, 3)]
LENGTHS = (1, 7, 8, 45)


@pytest.mark.slow
@plain
@pytest.mark.parametrize("part", ["attention", "append", "not attention and not append"])
def test_in_the_interpreter(part):
    assert_passes_interpreted(__file__, "-k", part)


def close(ours: torch.Tensor, truth: torch.Tensor) -> None:
    """Interpreted kernels multiply in float32."""
    limit = 2e-5
    assert ours.dtype == truth.dtype and ours.shape == truth.shape
    torch.testing.assert_close(ours, truth, atol=limit, rtol=limit)


def differing(ours, theirs) -> list[str]:
    """Names of planes in which two caches differ."""
    ours, theirs = bytes_of(ours), bytes_of(theirs)
    return [name for name in theirs if not torch.equal(ours[name], theirs[name])]


@interpreted
@pytest.mark.parametrize("layout, chunks", [("uniform", DECODE), ("mixed", MIXED)], ids=["decode", "mixed"])
@pytest.mark.parametrize("hot, cold", TIERS)
def test_attention(layout, hot, cold, chunks):
    case = Case(layout, hot, cold, LENGTHS, head_dim=64)
    view = make_view(case)
    batch = make_batch(view, case, chunks)
    q = new_queries(view, case, batch)
    close(TritonBackend().attend(view, 1, q, batch, 0.3), Reference().attend(view, 1, q, batch, 0.3))


@interpreted
@pytest.mark.parametrize(
    "hot, cold, page_size, per_head, head_dim",
    [
        ("bf16", "int4", 16, 1, 64),
        ("bf16", "int4", 64, 3, 128),
        ("bf16", "int4", 128, 3, 64),
        ("k4v2", None, 64, 3, 128),
        ("k4v2", None, 128, 3, 64),
        ("k4v2", None, 16, 16, 64),
    ],
)
def test_attention_whatever_the_page_size_and_the_number_of_heads(hot, cold, per_head, head_dim, page_size):
    """Tiles of rows span several pages, or are a part of one."""
    case = Case("mixed", hot, cold, (33, 300), page_size, per_head, head_dim)
    view = make_view(case)
    for chunks in ([(1, 1), (2, 1)], [(2, 6), (1, 1)]):
        batch = make_batch(view, case, chunks)
        q = new_queries(view, case, batch)
        ours = TritonBackend().attend(view, 1, q, batch, 0.1)
        close(ours, Reference().attend(view, 1, q, batch, 0.1))


@interpreted
@pytest.mark.parametrize("hot, cold", [("fp32", None), ("int4", None), ("bf16", "k4v2")])
@pytest.mark.parametrize("min_rows, programs", [(16, 8), (16, 1000), (32, 100)])
@pytest.mark.parametrize("layout, dealt", [("uniform", False), ("uniform", True), ("mixed", True)])
def test_attention_whatever_the_splits(monkeypatch, layout, dealt, hot, cold, min_rows, programs):
    """Including splits that get no rows, and heads that have none in a tier."""
    monkeypatch.setattr(module, "is_dealt", lambda *_: dealt)
    case = Case(layout, hot, cold, (1, 100, 40), head_dim=64)
    view = make_view(case)
    batch = make_batch(view, case, [(2, 1), (1, 1), (3, 1)])
    q = new_queries(view, case, batch)
    shape, layer = DecodeShape(tile=16, warps=1, stages=1, programs=programs, min_rows=min_rows), view.group_of.shape[0]
    ours = TritonBackend(shape).attend(view, layer - 1, q, batch, 0.3)
    close(ours, Reference().attend(view, layer - 1, q, batch, 0.3))


def dealt_view(rows: list[list[int]], cold: list[list[int]], page_size: int) -> KVView:
    """Tables of sequences of 4,096 tokens whose groups, one for each head of one layer, hold so many rows, and so many
    pages in the cold tier. The first head is of the last group."""
    heads = len(rows[0])
    evicted, in_cold = (torch.tensor([[0] * heads, *table], dtype=torch.int32) for table in (rows, cold))
    evicted[1:] = (1 << 12) - evicted[1:]
    order = torch.arange(heads, dtype=torch.int32).flip(0)[None]
    table = torch.zeros(len(rows) + 1, heads, 1, dtype=torch.int32)
    members = torch.stack((torch.zeros_like(order[0]), order[0]), -1)[:, None]
    zeros = torch.zeros_like(order)
    window, inv_freq = torch.zeros(1, 1, 1, heads, 16), torch.zeros(8)
    return KVView([], table, evicted, in_cold, order, zeros, members, window, inv_freq, page_size)


@pytest.mark.parametrize(
    "groups, heads, dealt", [(1, 8, True), (1, 528, True), (1, 529, False), (2, 8, True), (2, 4096, True)]
)
def test_rows_are_dealt_out_where_one_head_would_keep_others_waiting(groups, heads, dealt):
    view: Any = SimpleNamespace(page_table=torch.zeros(1, groups, 1))
    shapes = [DecodeShape(64, 4, 2, programs=programs) for programs in (528, 1056)]
    assert is_dealt(view, heads, shapes) == dealt


@interpreted
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_shares_of_attention_are_equal_and_cover_every_row_once(data):
    """No program gets more than a share, only the last of a head less than a whole one, and the shorter, the later."""
    heads, tile = data.draw(st.sampled_from([1, 2, 3, 8])), 16
    tiers, batch = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 5))
    table = lambda most: [[data.draw(st.integers(0, most)) for _ in range(heads)] for _ in range(batch)]  # noqa: E731
    rows, cold = table(4096), table(4)
    rows = [[max(n, 16 * c + 1) for n, c in zip(*both)] for both in zip(rows, cold)]
    if tiers == 1:
        cold = [[0] * heads for _ in rows]
    shape = DecodeShape(16, 1, 1, programs=data.draw(st.sampled_from([1, 7, 40, 300])), min_rows=32)
    slots = torch.arange(1, batch + 1)
    part = DecodePart(slots - 1, slots, torch.full((batch,), 1 << 12), 1 << 12)
    view = dealt_view(rows, cold, page_size=16)
    found = deal(view, part, [shape] * tiers)
    for tier in range(tiers):
        line = found.table[tier, 0].tolist()
        firsts, counts, items = line[: found.width], line[found.width : 2 * found.width], line[2 * found.width : -4]
        share = line[-4]
        in_tier = [
            (16 * c if tier else n - 16 * c) for of_rows, of_cold in zip(rows, cold) for n, c in zip(of_rows, of_cold)
        ]
        in_tier = [n for b in range(batch) for n in in_tier[b * heads : (b + 1) * heads][::-1]]
        least = least_rows(shape, batch * heads)
        fit = shape.programs * (ROUNDS if batch * heads > shape.programs else 1)
        assert share % tile == 0 and share == max(least, -(-sum(in_tier) // (fit * tile)) * tile)
        assert counts[: batch * heads] == [-(-n // share) for n in in_tier]
        assert firsts[: batch * heads] == [sum(counts[:i]) for i in range(batch * heads)]
        given_out = list(zip(items[::2], items[1::2]))
        used = [item for item in given_out if item[0] >= 0]
        assert given_out[: len(used)] == used and len(given_out) == found.most
        assert sorted(used) == [(i, s) for i, n in enumerate(in_tier) for s in range(-(-n // share))]
        sizes = [min(share, in_tier[i] - s * share) for i, s in used]
        whole = sum(n // share for n in in_tier)
        assert sizes[:whole] == [share] * whole
        classes = [size * CLASSES // share for size in sizes[whole:]]
        assert classes == sorted(classes, reverse=True) and all(0 < size < share for size in sizes[whole:])


@pytest.mark.parametrize("programs, max_rows, splits", [(8, 200, 3), (8, 4096, 64), (8, 10**6, 325), (512, 4096, 5)])
def test_few_heads_are_split_into_single_tiles(programs, max_rows, splits):
    shape = DecodeShape(tile=64, warps=4, stages=2, programs=1000, min_rows=256)
    assert num_splits(shape, programs, max_rows) == splits
    assert least_rows(shape, programs) == (64 if programs == 8 else 256)


@interpreted
def test_padding_of_a_batch_changes_nothing_in_attention():
    """Slot 0 is nobody's: a captured graph fills its batch with tokens of it."""
    case = Case("mixed", "bf16", lengths=LENGTHS, head_dim=64)
    view = make_view(case)
    batch = make_batch(view, case, DECODE)
    q = new_queries(view, case, batch)
    out = TritonBackend().attend(view, 0, q, batch, 0.3)
    pad = lambda x, value: torch.cat((x, torch.full((2,), value, dtype=x.dtype)))  # noqa: E731
    padded = dataclasses.replace(
        batch,
        plan=None,
        slots=pad(batch.slots, 0),
        seq_lens=pad(batch.seq_lens, 1),
        q_start=torch.arange(len(DECODE) + 3),
        host_q_lens=batch.host_q_lens + [1, 1],
        host_slots=batch.host_slots + [0, 0],
        host_seq_lens=batch.host_seq_lens + [1, 1],
    )
    close(TritonBackend().attend(view, 0, torch.cat((q, q[:2])), padded, 0.3)[: len(q)], out)


@interpreted
@pytest.mark.parametrize("hot, cold", [*ONE_TIER, ("bf16", "int4")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_append_writes_the_same_bytes(layout, hot, cold):
    """Rows, cleared state and the window's queries. (bfloat16 rows of a bfloat16 model: the interpreter's casts to
    that type cut where the hardware rounds.)"""
    case = Case(layout, hot, cold, state=STATE, head_dim=64, dtype=torch.bfloat16 if hot == "bf16" else torch.float32)
    ours = make_view(case)
    theirs = copy_of(ours)
    chunks = [(5, 9), (2, 1), (3, 2), (1, 1)]
    tokens = new_tokens(ours, case, make_batch(ours, case, chunks))
    TritonBackend().append(ours, 1, tokens.clone(), make_batch(ours, case, chunks, window=True), None)
    Reference().append(theirs, 1, tokens, make_batch(theirs, case, chunks, window=True), None)
    assert differing(ours, theirs) == []


@interpreted
@pytest.mark.parametrize("hot", ["fp16", "fp8", "int8", "int4", "k4v2"])
def test_append_follows_the_policy_for_extremes(hot):
    case = Case(hot=hot, lengths=(12,), head_dim=64)
    ours = make_view(case)
    theirs = copy_of(ours)
    batch = make_batch(ours, case, [(1, 6)])
    tokens = new_tokens(ours, case, batch)
    _, k, v = split_heads(tokens, ours.group_of.shape[1])
    k[0, 0, 5], k[1, 1, 7], k[2, 0, 0], k[3], v[4, 1, 9], v[5] = torch.nan, torch.inf, -torch.inf, 0.0, 1e30, 1e-40
    k[4], k[5], v[0], v[1, 0], v[2, 0, ::2] = k[4] * 1e-7, -1e-44, v[0] * 1e-38, -0.0, -1e-6
    TritonBackend().append(ours, 0, tokens.clone(), batch, None)
    Reference().append(theirs, 0, tokens, batch, None)
    assert differing(ours, theirs) == []


@interpreted
@pytest.mark.parametrize(
    "hot, cold, norm", [("fp32", None, False), *((*tiers, True) for tiers in [*ONE_TIER, ("bf16", "int4")])]
)
def test_append_turns_queries_and_keys(hot, cold, norm):
    """Up to the order of summation, which may break a tie between two codes otherwise. (The interpreter's casts to
    bfloat16 cut where the hardware rounds.)"""
    cut = hot == "bf16"
    case = Case("mixed", hot, cold, (20, 7, 23), head_dim=64, dtype=torch.bfloat16 if cut else torch.float32)
    turn, chunks = make_turn(case, 23, norm), [(3, 5), (1, 2), (2, 1)]
    ours = make_view(case)
    theirs = copy_of(ours)
    tokens = new_tokens(ours, case, make_batch(ours, case, chunks))
    backend, batch = TritonBackend(), make_batch(ours, case, chunks, window=True)
    q = backend.append(ours, 1, tokens.clone(), batch, turn)
    truth = Reference().append(theirs, 1, tokens, make_batch(theirs, case, chunks, window=True), turn)
    limit = {"atol": 2**-6, "rtol": 2**-6} if cut else {"atol": 2e-5, "rtol": 2e-5}
    torch.testing.assert_close(q, truth, **limit)
    torch.testing.assert_close(ours.window, theirs.window, **limit)
    for name, plane in ours.tiers[0].planes.items():
        expected = theirs.tiers[0].planes[name]
        if plane.dtype in (torch.uint8, torch.float8_e4m3fn):
            different = (plane.view(torch.uint8) != expected.view(torch.uint8)).sum()
            assert different <= 0.01 * len(tokens) * plane.shape[-1], name
        else:
            half = {"rtol": 2e-3} if plane.dtype == torch.float16 else {}
            torch.testing.assert_close(plane, expected, equal_nan=True, **limit | half)
    attended = backend.attend(ours, 1, q, batch, 0.3)
    assert torch.equal(attended, backend.attend(ours, 1, q.clone(), batch, 0.3)), "queries rotated on the way differ"


@interpreted
@pytest.mark.parametrize("tile", [(2, 2, 1), (1, 4, 1), (8, 2, 4)])
@pytest.mark.parametrize("hot", ["fp32", "k4v2"])
def test_append_writes_the_same_bytes_whatever_the_tile(monkeypatch, hot, tile):
    """Including tiles with more heads than there are."""
    monkeypatch.setattr(module, "append_tile", lambda *_: tile)
    case = Case("mixed", hot, per_head=3, state=STATE, head_dim=64)
    ours = make_view(case)
    theirs = copy_of(ours)
    chunks = [(5, 9), (2, 1), (3, 2), (1, 1)]
    tokens = new_tokens(ours, case, make_batch(ours, case, chunks))
    for layer in (0, 3):
        q = TritonBackend().append(ours, layer, tokens.clone(), make_batch(ours, case, chunks, window=True), None)
        assert torch.equal(q, split_heads(tokens, 2)[0])
        Reference().append(theirs, layer, tokens, make_batch(theirs, case, chunks, window=True), None)
    assert differing(ours, theirs) == []


@given(st.integers(1, 20000), st.integers(1, 128), st.integers(1, 64), st.booleans())
def test_tiles_of_append_are_powers_of_two(num_tokens, num_q, num_kv, rotate):
    tokens, heads, warps = append_tile(num_tokens, num_q, num_kv, rotate)
    assert tokens * heads == next_power_of_2(tokens * heads) and heads == next_power_of_2(heads)
    assert warps == next_power_of_2(warps) <= 8


@jit
def quotients(y, scale, guess, out, N: tl.constexpr):
    o = tl.arange(0, N)
    b_s = tl.load(scale + o)
    tl.store(out + o, quotient(tl.load(y + o), b_s, quotient(1.0, b_s, tl.load(guess + o))))


@interpreted
@pytest.mark.parametrize("ulps", [-3, 0, 3])
@pytest.mark.parametrize("case", ["any", "half-way"])
def test_append_divides_to_the_last_bit(case, ulps):
    """Numbers by every float16 scale, with a guess of its reciprocal that is some units off. Half-way: the numbers
    whose quotients are closest to half-way between two float32."""
    rng, n = torch.Generator().manual_seed(ulps), 1 << 19
    scale = (torch.arange(n) % 0x7BFF + 1).to(torch.int16).view(torch.float16).float()  # 2^-24 to 65504
    y = (torch.rand(n, generator=rng) + 1) * 2.0 ** torch.randint(-40, 19, (n,), generator=rng)
    if case == "half-way":
        y = (scale.double() * ((y / scale).double() * (1 + 2.0**-24))).float()
    y *= torch.randint(0, 2, (n,), generator=rng) * 2 - 1
    guess = ((1 / scale).view(torch.int32) + ulps).view(torch.float32)
    out = torch.empty(n)
    quotients[(1,)](y, scale, guess, out, N=n)
    assert torch.equal(out, y / scale)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens, width", [(1, 64), (3, 100), (2, 1500)])
def test_layer_arithmetic(num_tokens, width, dtype):
    """Numbers that bfloat16 holds, with sums that it holds: what it does to results is cut, not rounded, here."""
    rng = torch.Generator().manual_seed(0)
    x, delta = (torch.randint(-64, 64, (num_tokens, width), generator=rng).to(dtype) / 16 for _ in range(2))
    weight, gate_up = torch.rand(width, generator=rng), torch.cat((x, delta), -1)
    ours, theirs = TritonBackend(), TorchOps()
    limit = 2e-5 if dtype == torch.float32 else 2**-7
    check = lambda a, b: torch.testing.assert_close(a, b, atol=limit, rtol=limit)  # noqa: E731
    check(ours.rms_norm(x, weight, 1e-5), theirs.rms_norm(x, weight, 1e-5))
    check(ours.silu_mul(gate_up), theirs.silu_mul(gate_up))
    other = x.clone()
    check(ours.add_rms_norm(x, delta, weight, 1e-5), theirs.add_rms_norm(other, delta, weight, 1e-5))
    assert torch.equal(x, other)


@interpreted
def test_layer_arithmetic_of_parts_of_wider_rows():
    x = torch.randn(4, 3, 40)
    ours, theirs = TritonBackend(), TorchOps()
    torch.testing.assert_close(ours.rms_norm(x[:, 1], x[0, 0], 1e-5), theirs.rms_norm(x[:, 1], x[0, 0], 1e-5))
    torch.testing.assert_close(ours.silu_mul(x[:, 2]), theirs.silu_mul(x[:, 2]))
    with pytest.raises(ValueError, match=r"add_rms_norm: x is added to in place.*\(120, 1\)"):
        ours.add_rms_norm(x[:, 1], x[:, 2], x[0, 0], 1e-5)


CHUNKS = Case(lengths=(1, 7, 8, 45, 300), per_head=3)
CHUNK = st.integers(1, 5).flatmap(lambda slot: st.tuples(st.just(slot), st.integers(1, CHUNKS.lengths[slot - 1])))


@settings(max_examples=40, deadline=None)
@given(st.lists(CHUNK, min_size=1, max_size=8))
def test_tables_of_a_batch_name_every_token_once(chunks):
    view = make_view(dataclasses.replace(CHUNKS, lengths=(1,)))
    batch = make_batch(view, CHUNKS, chunks)
    plan, tile = plan_batch(view, batch), tile_tokens(view)
    assert plan.token_slots.tolist() == [slot for slot, q_len in chunks for _ in range(q_len)]
    found = plan.decode.tokens.tolist() if plan.decode else []
    for token, slot, seq_len in zip(found, *(plan.decode.slots, plan.decode.seq_lens) if plan.decode else ([], [])):
        assert slot == plan.token_slots[token] and seq_len - 1 == batch.positions[token]
    assert not plan.decode or plan.decode.max_rows == plan.decode.seq_lens.max()
    if plan.prefill:
        rows = []
        for chunk, first, place in zip(plan.prefill.tile_chunk, plan.prefill.tile_first, plan.prefill.tile_token):
            start, end = int(batch.q_start[chunk] + first), int(batch.q_start[chunk + 1])
            tokens = range(start, min(end, start + tile))
            assert plan.prefill.tokens[place : place + len(tokens)].tolist() == list(tokens)
            rows.append(batch.positions[tokens[0]])
            found += tokens
        assert rows == sorted(rows, reverse=True), "the longest tile goes first"
    assert sorted(found) == list(range(len(batch.tokens)))


@interpreted
@pytest.mark.parametrize(
    "hot, cold, first_page",
    [(*tiers, page) for i, tiers in enumerate(TIERS) for page in ((0, 1) if tiers[1] else (i % 2,))],
)
def test_what_scorers_read(hot, cold, first_page):
    lengths, stride = (17, 29, 22), 1 + 3 * first_page  # some queries come before a short head's first row
    case = Case("mixed", hot, cold, lengths, head_dim=64, per_head=3, num_window=5, state=STATE, stride=stride)
    view = make_view(case)
    jobs = make_jobs(view, case, dst_tier=0, first_page=first_page)
    ours, theirs = TritonBackend(), Reference()
    logits = theirs.expected_logits(view, jobs, slice(1, 2), 0.3, 40)
    close(of_sources(ours.expected_logits(view, jobs, slice(1, 2), 0.3, 40), jobs), logits)
    for columns, across in ((slice(None), "max"), (slice(1, 2), "mean")):
        scores = ours.window_scores(view, jobs, columns, 0.3, across)
        close(scores, theirs.window_scores(view, jobs, columns, 0.3, across))
        for role in ("k", "v"):
            rows = ours.read_rows(view, jobs, columns, role)
            close(rows, theirs.read_rows(view, jobs, columns, role))
            lengths = ours.read_lengths(view, jobs, columns, role)
            close(lengths, theirs.read_lengths(view, jobs, columns, role))
        for name in STATE:
            state = ours.read_state(view, jobs, columns, name)
            assert torch.equal(state, theirs.read_state(view, jobs, columns, name))


@interpreted
def test_turns_of_few_horizons_are_kept_and_those_of_others_made_again(monkeypatch):
    monkeypatch.setattr(window, "HORIZONS", 1)
    case = Case("uniform", "fp32", None, (17,), head_dim=32)
    view = make_view(case)
    jobs = make_jobs(view, case, dst_tier=0)
    for horizon in (40, 7, 40, 7):
        args = (view, jobs, slice(1), 0.3, horizon)
        close(of_sources(TritonBackend().expected_logits(*args), jobs), Reference().expected_logits(*args))
        assert list(view.foresight) == [40]


@interpreted
@pytest.mark.parametrize("hot, taken", [("fp32", True), ("bf16", True), ("int4", True), ("fp8", False)])
def test_lengths_taken_on_the_way_serve_the_comparison_of_rows(monkeypatch, hot, taken):
    """Of these columns of this view alone; by the kernel that multiplies keys anyway, unless rows have 8 bits."""
    case = Case("mixed", hot, None, (17, 45, 30), head_dim=32, num_window=5)
    view, ours = make_view(case), TritonBackend()
    columns, other = slice(1, 2), slice(0, 1)
    jobs = dataclasses.replace(make_jobs(view, case, dst_tier=0, first_page=1), compared=True)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **kwargs: empty(*shape, **kwargs).fill_(torch.nan))
    ours.window_scores(view, jobs, columns, 0.3)
    launched, kernel = [], compaction.row_lengths
    counted = type("Counted", (), {"__getitem__": lambda _, grid: launched.append(grid) or kernel[grid]})()
    monkeypatch.setattr(compaction, "row_lengths", counted)
    for some, kv in ((columns, view), (other, view), (columns, copy_of(view))):
        for block in (16, None):
            close(ours.crowding(kv, jobs, some, 0.3, block), Reference().crowding(kv, jobs, some, 0.3, block))
    assert len(launched) == (4 if taken else 6)


@interpreted
@pytest.mark.parametrize("hot, cold", [("fp8", None), ("bf16", "int4")])
def test_scores_of_many_splits_ignore_longer_neighbours(monkeypatch, hot, cold):
    monkeypatch.setattr(window, "SPLIT_ROWS", 16)
    monkeypatch.setattr(window, "SHARE", 104)
    monkeypatch.setattr(expectation, "SHARE", 104)
    case = Case("mixed", hot, cold, (60, 280), head_dim=32, num_window=5)
    view = make_view(case)
    jobs, column = make_jobs(view, case, dst_tier=0), slice(1, 2)
    scores = TritonBackend().window_scores(view, jobs, column, 0.3)
    logits = TritonBackend().expected_logits(view, jobs, column, 0.3, 40)
    close(of_sources(logits, jobs), Reference().expected_logits(view, jobs, column, 0.3, 40))
    close(scores, Reference().window_scores(view, jobs, column, 0.3))
    for j, (num_src, num_rows) in enumerate(zip(jobs.num_src.tolist(), jobs.num_rows.tolist())):
        own = {name: value[j : j + 1] for name, value in vars(jobs).items() if isinstance(value, torch.Tensor)}
        alone = dataclasses.replace(jobs, **own, max_src=num_src, max_rows=num_rows)
        same = TritonBackend().window_scores(view, alone, column, 0.3)
        assert torch.equal(same[0], scores[j, :, :num_src])
        same = TritonBackend().expected_logits(view, alone, column, 0.3, 40)
        assert torch.equal(same[0], logits[j, ..., :num_src])


@interpreted
@pytest.mark.parametrize("hot, cold", TIERS)
@pytest.mark.parametrize("layout", ["by_layer", "mixed"])
def test_compaction_writes_the_same_bytes(layout, hot, cold):
    case = Case(layout, hot, cold, (17, 45, 30), head_dim=64, state=STATE)
    for dst_tier in range(1 + case.two_tiers):
        if dst_tier == 0 and (hot, cold) == ("bf16", "int4"):
            continue  # back to bfloat16: the interpreter's cast
        ours = make_view(case)
        theirs = copy_of(ours)
        jobs = make_jobs(ours, case, dst_tier, first_page=1)
        num_columns = ours.members.shape[1]
        for columns in (slice(0, 1), slice(1, num_columns)):
            keep = make_keep(jobs, len(range(num_columns)[columns]), case.page_size)
            state = {"score": torch.rand(*keep.shape[:2], jobs.max_src, 1)}
            TritonBackend().compact(ours, jobs, columns, keep, state)
            Reference().compact(theirs, jobs, columns, keep, state)
        assert differing(ours, theirs) == []


@interpreted
@pytest.mark.parametrize("hot", FORMATS.names())
def test_swapped_pages_are_byte_identical(hot):
    device, host, reference_host = (make_view(Case(hot=hot, state=STATE, seed=seed)) for seed in (0, 1, 1))
    src, dst = torch.tensor([3, 9, 4]), torch.tensor([7, 2, 11])
    TritonBackend().copy_pages(device.tiers[0], src, host.tiers[0], dst)
    Reference().copy_pages(device.tiers[0], src, reference_host.tiers[0], dst)
    assert differing(host, reference_host) == []


@pytest.mark.parametrize("format", [name for name in FORMATS.names() if name != "fp64"])
def test_pieces_of_a_row_are_where_the_codec_says(format):
    """`DeviceCodec` describes the same packing as the codec's own `decode_stored`."""
    codec = parse_format(format).v
    data, scale = codec.encode(torch.randn(7, 64))
    number = codec.decode_stored(data, scale, torch.float32)
    device = codec.device
    if device.num_pieces > 1:
        words = data.view(torch.uint8).view(torch.int16).int() & 0xFFFF
        even, odd = words & 0xFF, words >> 8
        if format == "fp8":
            pieces = [part.to(torch.uint8).view(torch.float8_e4m3fn).float() for part in (even, odd)]
        else:
            bits = codec.bits
            masks = [(2**bits - 1) << shift for shift in range(0, 8, bits)]
            pieces = [(part & mask).float() * 2.0**-24 for mask in masks for part in (even, odd)]
        assert torch.equal(device.numbers(pieces) * scale.float(), number)
    else:
        assert torch.equal(device.numbers([data]), number)


def test_a_format_without_kernels_is_refused_by_name():
    view = make_view(Case(hot="fp64"))
    batch = make_batch(view, Case(hot="fp64"), DECODE)
    with pytest.raises(ValueError, match="backend triton: no kernels for PlainCodec.*float64.*use one of bf16"):
        TritonBackend().append(view, 0, new_tokens(view, Case(), batch), batch, None)
