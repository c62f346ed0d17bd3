"""Long chunks after long prefixes, interpreted on the CPU: blocks and what is left make what the reference does.

Blocks and chunks are made short, and the library's attention is replaced by its definition. Like `test_triton.py`, a
plain run starts this file again with the interpreter.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from pagefold.backends.reference import Reference
from pagefold.backends.triton import long_prefill
from pagefold.backends.triton.backend import TritonBackend
from pagefold.backends.triton.long_prefill import LongPrefill, attend_long
from tests.backend import cases
from tests.backend.cases import Case, make_batch, make_view, new_queries
from tests.interpreted import assert_passes_interpreted, interpreted, plain


@pytest.mark.slow
@plain
def test_in_the_interpreter():
    assert_passes_interpreted(__file__)


def defined_attention(calls: list[tuple[int, int, int, bool]]):
    """The definition of `attention`, which notes (KV heads, queries, rows, causal) of each call."""

    def attend(q, k, v, scale, causal):
        calls.append((len(k), q.shape[1], k.shape[1], causal))
        assert all(torch.isfinite(x).all() for x in (q, k, v))
        assert q.shape[1] == k.shape[1] or not causal
        assert q.stride() == (q.shape[2], q.shape[0] * q.shape[2], 1), "plans are made for strides too"
        assert k.stride() == v.stride() == (k.shape[2], k.shape[0] * k.shape[2], 1), "plans are made for strides too"
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        logits = q @ k.mT * scale
        if causal:
            logits = logits.masked_fill(torch.ones_like(logits[0], dtype=torch.bool).triu(1), -torch.inf)
        out = torch.softmax(logits, -1) @ v
        return out.transpose(0, 1).contiguous().transpose(0, 1), torch.logsumexp(logits, -1)

    return attend


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, int, int, bool]]:
    """Short blocks and chunks; the calls that would have gone to the library."""
    found = []
    short = {"BLOCK_ROWS": 16, "MAX_BLOCK_ROWS": 64, "QUERY_STEP": 8, "FINE_QUERIES": 16, "MAX_QUERIES": 32}
    for name, value in (short | {"MIN_PAIRS": 16 * 8}).items():
        monkeypatch.setattr(long_prefill, name, value)
    monkeypatch.setattr(long_prefill, "has_attention", lambda kv: True)
    monkeypatch.setattr(long_prefill, "attention", defined_attention(found))
    return found


def planes_of(view) -> list[list[torch.Tensor]]:
    names = ("k_data", "k_scale", "v_data", "v_scale")
    return [[store.rows(name) for name in names] for store in view.tiers]


def attend(view, layer, q, batch, scale) -> torch.Tensor:
    """The backend's attention; what long chunks are given comes from `attend_long` alone."""
    out = TritonBackend().attend(view, layer, q, batch, scale)
    for chunk in LongPrefill().plan(view, batch):
        out[chunk.tokens] = torch.nan
        attend_long(view, planes_of(view), layer, q, chunk, scale, out)
    return out


def check(case: Case, chunks: list[tuple[int, int]], layer: int = 1) -> None:
    view = make_view(case)
    batch = make_batch(view, case, chunks)
    q = new_queries(view, case, batch)
    ours = attend(view, layer, q, batch, 0.3)
    torch.testing.assert_close(ours, Reference().attend(view, layer, q, batch, 0.3), atol=2e-5, rtol=2e-5)


@interpreted
@pytest.mark.parametrize("hot, cold", [("bf16", None), ("fp8", None), ("int4", None), ("k4v2", None), ("fp32", "int4"),
                                       ("int4", "k4v2"), ("k4v2", "fp8")])  # fmt: skip
@pytest.mark.parametrize("layout", ["uniform", "mixed"])
def test_whatever_the_format_and_the_layout(calls, layout, hot, cold):
    """Groups of the mixed layout have dropped 0, 8 and 16 rows; the cold tier ends inside a block."""
    check(Case(layout, hot, cold, (60,), head_dim=64), [(1, 9)])
    assert calls


@interpreted
@pytest.mark.parametrize("page_size", [2, 8, 16])
@pytest.mark.parametrize("per_head, head_dim", [(1, 16), (3, 32)])
def test_whatever_the_page_size_and_the_number_of_heads(calls, page_size, per_head, head_dim):
    check(Case("mixed", "fp16", "int4", (50, 44), page_size, per_head, head_dim), [(2, 11), (1, 8)], layer=2)
    assert calls


@interpreted
def test_several_long_chunks_between_short_ones_and_decodes(calls):
    case = Case("mixed", "bf16", "int4", (40, 60, 1, 90, 33, 24), head_dim=32)
    check(case, [(1, 1), (2, 20), (3, 1), (4, 9), (5, 7), (6, 8), (1, 1)], layer=2)
    assert {queries for _, queries, _, causal in calls if not causal} == {8, 16, 32}


@interpreted
def test_shapes_are_few(calls):
    """A long chunk is cut evenly, later parts after the blocks of earlier ones. Blocks are powers of two up to the
    largest, queries are padded, coarsely where there are many; no row is covered twice."""
    check(Case(lengths=(16 * 11 + 5 + 69,)), [(1, 69)])
    blocks = [(64, 64, 32, 16), (64, 64, 64), (64, 64, 64, 32)]  # of 176, 192 and 224 rows; 5, 13 and 5 are left
    queries, squares = (32, 32, 32), (32, 40, 32)  # for 24, 24 and 21
    once = [
        call
        for sizes, padded, square in zip(blocks, queries, squares)
        for call in [(2, padded, rows, False) for rows in sizes] + [(2, square, square, True)]
    ]
    assert calls == once * 2  # by the backend, and alone


@interpreted
@pytest.mark.parametrize("length, q_len, square", [(32, 32, 32), (29, 29, 32), (43, 29, 48), (59, 32, 48)])
def test_the_chunks_own_rows_and_what_blocks_leave_are_one_square(calls, length, q_len, square):
    """From an empty cache in one call: neither a short prefix nor what is left of a longer one has another."""
    check(Case(hot="int4", lengths=(length,), head_dim=64), [(1, q_len)])
    assert calls[-1] == (2, square, square, True)
    assert [rows for _, _, rows, causal in calls if not causal] == [16] * 2 * (length - q_len >= 16)


@interpreted
@pytest.mark.parametrize(
    "past, expected",
    [
        (48, [(4, 8, 32, False), (4, 16, 16, True), (2, 8, 32, False), (2, 8, 16, False), (2, 8, 8, True)]),
        (24, [(2, 16, 16, True), (4, 8, 16, False), (4, 16, 16, True)]),
    ],
)
def test_heads_of_uneven_lengths_share_calls_by_powers_of_two(calls, monkeypatch, past, expected):
    """Six heads in groups of their own, two each without 0, 8 and 16 of the rows before the chunk: those that agree in
    their blocks share calls, whatever is left of each."""
    monkeypatch.setitem(cases.LAYOUTS, "alone", ([[0, 1, 2, 3, 4, 5]], [[0] * 6]))
    check(Case("alone", lengths=(past + 8,)), [(1, 8)], layer=0)
    assert calls == expected * 2


@pytest.mark.parametrize("length, q_len", [(23, 8), (90, 7), (14, 14)], ids=["prefix", "chunk", "both"])
def test_what_is_too_short_is_left_alone(calls, monkeypatch, length, q_len):
    monkeypatch.setattr(long_prefill, "MIN_PAIRS", 170)
    case = Case(lengths=(length,))
    view = make_view(case)
    assert LongPrefill().plan(view, make_batch(view, case, [(1, q_len)])) == []


def test_nothing_is_read_back_where_evicted_rows_are_known(calls, monkeypatch):
    case = Case("mixed", lengths=(60,))
    view = make_view(case)
    batch = make_batch(view, case, [(1, 9)])
    planner = LongPrefill()
    read = planner.plan(view, batch)[0]
    batch.host_evicted = view.evicted.numpy().copy()

    def refuse(*args):
        raise AssertionError("read back")

    for name in ("tolist", "item", "cpu", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    given = planner.plan(view, batch)[0]
    assert [[cover.passes for cover in layer] for layer in given.covers] == [
        [cover.passes for cover in layer] for layer in read.covers
    ]


def test_without_a_device_there_is_no_library_attention():
    assert not long_prefill.has_attention(make_view(Case(dtype=torch.bfloat16)))


@interpreted
def test_after_warming_up_no_chunk_has_a_shape_of_its_own(calls, monkeypatch):
    """Every length of chunk after every length of prefix."""
    monkeypatch.setattr(long_prefill, "WARM_SECONDS", 1e9)
    max_tokens, max_len = 24, 99
    view = make_view(Case(lengths=(max_len,)))
    for plane in view.tiers[0].planes.values():
        plane[0] = 0
    long_prefill.warm_up(view, max_tokens, max_len)
    warm = set(calls)
    assert len(calls) < 2 * len(warm)
    calls.clear()
    note = lambda q, k, v, scale, causal: calls.append((len(k), q.shape[1], k.shape[1], causal))  # noqa: E731
    monkeypatch.setattr(long_prefill, "attention", note)
    monkeypatch.setattr(long_prefill, "gather_rows", lambda *args: torch.zeros(2, args[6], 2, 16).unbind())
    monkeypatch.setattr(long_prefill, "_placed", lambda kv, q, cover, n, shift: torch.zeros(n, 4, 16).transpose(0, 1))
    monkeypatch.setattr(long_prefill, "_merge", lambda *args: None)
    planner, q = LongPrefill(), torch.zeros(max_tokens, 4, 16)
    for q_len in range(8, max_tokens + 1):
        for past in range(0, max_len - q_len + 1):
            chunk = planner.chunk(view, 0, 1, slice(0, q_len), np.array([past]))
            attend_long(view, [], 0, q, chunk, 1.0, q)
    assert set(calls) == warm


def test_warming_up_ends_in_time_and_is_for_those_who_may_need_it(calls, monkeypatch):
    monkeypatch.setattr(long_prefill, "WARM_SECONDS", -1.0)
    seen = []
    monkeypatch.setattr(long_prefill, "attend_long", lambda *args: seen.append(args[4].q_len))
    view = make_view(Case(lengths=(99,)))
    long_prefill.warm_up(view, 24, 99)
    assert seen == [24]
    long_prefill.warm_up(view, 24, 15)
    assert seen == [24]
