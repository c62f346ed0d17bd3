"""Long chunks after long prefixes, interpreted on the CPU: blocks and what is left make what the reference does.

Blocks and chunks are made short, and the library's attention is replaced by its definition. Like `test_triton.py`, a
plain run starts this file again with the interpreter.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from pagefold.backends.reference import Reference
from pagefold.backends.triton import long_prefill
from pagefold.backends.triton.backend import TritonBackend, _query_frames
from pagefold.backends.triton.long_prefill import LongPrefill, attend_long
from tests.backend import cases
from tests.backend.cases import Case, make_batch, make_view, new_queries

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_in_the_interpreter():
    import triton

    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton 3.6 needs numpy < 2.4")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(
        command, check=False, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-4000:]


def defined_attention(calls: list[tuple[int, int, int]]):
    """The definition of `prefix_attention`, which notes (KV heads, queries, rows) of each call."""

    def attend(q, k, v, scale):
        calls.append((len(k), q.shape[1], k.shape[1]))
        assert torch.isfinite(k).all() and torch.isfinite(v).all()
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        logits = q @ k.mT * scale
        out = torch.softmax(logits, -1) @ v
        return out.transpose(0, 1).contiguous().transpose(0, 1), torch.logsumexp(logits, -1)

    return attend


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, int, int]]:
    """Short blocks and chunks; the calls that would have gone to the library."""
    found = []
    short = {"BLOCK_ROWS": 16, "MAX_BLOCK_ROWS": 64, "QUERY_STEP": 8, "MAX_QUERIES": 16, "MIN_PAIRS": 16 * 8}
    for name, value in short.items():
        monkeypatch.setattr(long_prefill, name, value)
    monkeypatch.setattr(long_prefill, "has_prefix_attention", lambda kv: True)
    monkeypatch.setattr(long_prefill, "prefix_attention", defined_attention(found))
    return found


def attend(view, layer, q, batch, scale) -> torch.Tensor:
    """The backend's attention; what long chunks are given comes from `attend_long` alone."""
    backend = TritonBackend()
    out = backend.attend(view, layer, q, batch, scale)
    shapes = [backend._shapes(view, tier)[1] for tier in range(len(view.tiers))]
    for chunk in LongPrefill().plan(view, batch):
        out[chunk.first : chunk.first + chunk.q_len] = torch.nan
        attend_long(view, layer, q, _query_frames(view, q), chunk, shapes, scale, out)
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
    assert {queries for _, queries, _ in calls} == {8, 16}


@interpreted
def test_shapes_are_few(calls):
    """Blocks are powers of two up to the largest, queries are padded and cut; no row is covered twice."""
    check(Case(lengths=(16 * 11 + 5 + 37,)), [(1, 37)])
    assert calls == [(2, queries, rows) for queries in (16, 16, 8) for rows in (64, 64, 32, 16)]


@interpreted
@pytest.mark.parametrize(
    "past, expected", [(48, [(4, 8, 32), (2, 8, 32), (2, 8, 16)]), (24, [(4, 8, 16)])], ids=["all", "some"]
)
def test_heads_of_uneven_lengths_share_calls_by_powers_of_two(calls, monkeypatch, past, expected):
    """Six heads in groups of their own, two each without 0, 8 and 16 of the rows before the chunk; what has too few
    left is the paged kernel's."""
    monkeypatch.setitem(cases.LAYOUTS, "alone", ([[0, 1, 2, 3, 4, 5]], [[0] * 6]))
    check(Case("alone", lengths=(past + 8,)), [(1, 8)], layer=0)
    assert calls == expected


@pytest.mark.parametrize("length, q_len", [(23, 8), (90, 7), (32, 10)], ids=["prefix", "chunk", "both"])
def test_what_is_too_short_is_left_alone(calls, monkeypatch, length, q_len):
    monkeypatch.setattr(long_prefill, "MIN_PAIRS", 170)
    case = Case(lengths=(length,))
    view = make_view(case)
    assert LongPrefill().plan(view, make_batch(view, case, [(1, q_len)])) == []


def test_nothing_is_read_back_where_evicted_rows_are_known(calls, monkeypatch):
    case = Case("mixed", lengths=(60,))
    view = make_view(case)
    batch = make_batch(view, case, [(1, 9)])
    known, planner = view.evicted.tolist(), LongPrefill()
    read = planner.plan(view, batch)[0]

    def refuse(*args):
        raise AssertionError("read back")

    for name in ("tolist", "item", "cpu", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    given = planner.plan(view, batch, known)[0]
    assert [[cover.blocks for cover in layer] for layer in given.covers] == [
        [cover.blocks for cover in layer] for layer in read.covers
    ]


def test_a_page_larger_than_a_block_leaves_every_chunk_to_the_paged_kernel(calls):
    case = Case(lengths=(200,), page_size=32)
    view = make_view(case)
    assert LongPrefill().plan(view, make_batch(view, case, [(1, 9)])) == []


def test_without_a_device_there_is_no_library_attention():
    assert not long_prefill.has_prefix_attention(make_view(Case(dtype=torch.bfloat16)))
