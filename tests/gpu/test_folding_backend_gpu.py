"""What folding relies on in a backend, against formulas: attention over stored rows, window scores, heads on their own.

Each test runs on the CPU backend, and on a GPU where there is one. The numbers are those of Zipage's invariants
(arXiv 2603.08743), as docs/invariants.md has them.
"""

import itertools

import pytest
import torch

from pagefold.backends.base import KVView
from pagefold.backends.reference import read
from pagefold.backends.registry import make_backend
from pagefold.core.types import ScorePolicy
from pagefold.runner.compressor import Compressor
from tests.backend.cases import Case, bytes_of, copy_of, make_batch, make_jobs, make_keep, make_view, new_queries
from tests.backend.test_triton_compaction import STATE, fold_jobs, repeat_keys
from tests.gpu.test_kernels import moved, relative

pytestmark = pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=pytest.mark.gpu)])
ROUNDING = {"fp32": 1e-5, "int4": 1e-2}  # of attention, relative


def device_of(backend: str) -> str:
    return "cpu" if backend == "cpu" else "cuda"


def outputs_of(view: KVView, case: Case, q: torch.Tensor, backend: str) -> torch.Tensor:
    """Attention of one query of each sequence in layer 1."""
    device = device_of(backend)
    batch = make_batch(view, case, [(slot + 1, 1) for slot in range(len(case.lengths))])
    ours = make_backend(backend).attend(moved(view, device), 1, q.to(device), moved(batch, device), case.head_dim**-0.5)
    return ours.cpu()


def rows_in_order(view: KVView, case: Case, slot: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one head of layer 1, float64[n, D] each."""
    group, column = int(view.group_of[1, head]), int(view.column_of[1, head])
    rows = range(case.lengths[slot - 1] - int(view.evicted[slot, group]))
    k, v = (read(view, slot, group, column, rows, role, torch.float64) for role in ("k", "v"))
    return k, v


def softmax_over(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (q.double() @ k.T * q.shape[-1] ** -0.5).softmax(-1) @ v


def shuffled(view: KVView, case: Case) -> KVView:
    """The rows of each head in another order, each head's own, keys and values alike."""
    twin = copy_of(view)
    for slot, length in enumerate(case.lengths, start=1):
        for group in range(view.page_table.shape[1]):
            num_rows = length - int(view.evicted[slot, group])
            pages = view.page_table[slot, group].long()
            for column in range(view.members.shape[1]):
                order, at = torch.randperm(num_rows), torch.arange(num_rows)
                for name, plane in view.tiers[0].planes.items():
                    rows = plane[pages[order // case.page_size], column, order % case.page_size]
                    twin.tiers[0].planes[name][pages[at // case.page_size], column, at % case.page_size] = rows
    return twin


@pytest.mark.parametrize("format", ["fp32", "int4"])
def test_attention_does_not_ask_where_a_row_is(backend, format):
    """Invariant 3, first half: positions are in the rows, so a query that sees them all is blind to their order."""
    case = Case("mixed", format, lengths=(20, 45, 77), page_size=16, head_dim=64)
    view = make_view(case)
    q = new_queries(view, case, make_batch(view, case, [(slot, 1) for slot in (1, 2, 3)]))
    want, got = outputs_of(view, case, q, backend), outputs_of(shuffled(view, case), case, q, backend)
    assert relative(got, want) < ROUNDING[format]


@pytest.mark.parametrize("format", ["fp32", "int4"])
def test_attention_after_a_compaction_is_attention_over_the_kept_rows(backend, format):
    """Invariant 3, second half, with the rows behind the folded ones."""
    case = Case("mixed", format, lengths=(40, 45, 77), page_size=16, head_dim=64)
    view = make_view(case)
    view.evicted.zero_()
    rng = torch.Generator().manual_seed(0)
    for store in view.tiers:  # every page holds rows, also those that `make_view` left out as evicted
        for role, codec in (("k", store.format.k), ("v", store.format.v)):
            shape = (store.num_pages, store.num_columns, store.page_size, case.head_dim)
            for part, values in zip(("data", "scale"), codec.encode(torch.randn(shape, generator=rng)), strict=True):
                store.planes[f"{role}_{part}"].copy_(values)
    before, jobs = copy_of(view), make_jobs(view, case, 0)
    keep = make_keep(jobs, view.members.shape[1], case.page_size)
    device = device_of(backend)
    there = moved(view, device)
    make_backend(backend).compact(there, moved(jobs, device), slice(None), keep.to(device), {})
    view = moved(there, "cpu")
    for j, (slot, group) in enumerate(zip(jobs.slots.tolist(), jobs.groups.tolist(), strict=True)):
        num_src, line = int(jobs.num_src[j]) // case.page_size, view.page_table[slot, group]
        line[: len(line) - num_src + 1] = torch.cat([jobs.dst_pages[j].int(), line[num_src:].clone()])
        view.evicted[slot, group] = int(jobs.num_src[j]) - case.page_size
    q = new_queries(view, case, make_batch(view, case, [(slot, 1) for slot in (1, 2, 3)]))
    got = outputs_of(view, case, q, backend)
    jobs_of = {(int(slot), int(group)): j for j, (slot, group) in enumerate(zip(jobs.slots, jobs.groups, strict=True))}
    for slot, head in itertools.product((1, 2, 3), range(view.group_of.shape[1])):
        group, column = int(view.group_of[1, head]), int(view.column_of[1, head])
        k, v = rows_in_order(before, case, slot, head)
        j = jobs_of[slot, group]
        seen = torch.cat([keep[j, column], torch.arange(int(jobs.num_src[j]), len(k))])
        for i in range(head * case.per_head, (head + 1) * case.per_head):
            want = softmax_over(k[seen], v[seen], q[slot - 1, i])
            assert relative(got[slot - 1, i], want) < ROUNDING[format]


# ---- scores


@pytest.mark.parametrize("open_rows", [0, 5])
def test_window_scores_are_a_causal_softmax_for_each_query_head(backend, open_rows):
    """Invariant 6: the max over a KV head's query heads, the mean over the window; nothing of the window's future."""
    case = Case("mixed", "fp32", lengths=(32 + open_rows, 64 + open_rows), page_size=16, head_dim=64, num_window=8)
    view = make_view(case)
    jobs, device = make_jobs(view, case, 0), device_of(backend)
    there = make_backend(backend).window_scores(moved(view, device), moved(jobs, device), slice(None), 0.125)
    scores, per_head = there.cpu().double(), case.per_head
    for j, c in itertools.product(range(len(scores)), range(view.members.shape[1])):
        slot, group, n = int(jobs.slots[j]), int(jobs.groups[j]), int(jobs.num_rows[j])
        layer, head = view.members[group, c].tolist()
        keys = read(view, slot, group, c, range(n), "k", torch.float64)
        queries = view.window[layer, int(jobs.window_slots[j]), :, head * per_head : (head + 1) * per_head].double()
        causal = torch.ones(8, n, dtype=torch.bool).tril(n - 8)
        logits = torch.einsum("wrd,nd->rwn", queries, keys) * 0.125
        want = logits.masked_fill(~causal, -torch.inf).softmax(-1).amax(0).mean(0)
        num_src = int(jobs.num_src[j])
        torch.testing.assert_close(scores[j, c, :num_src], want[:num_src], atol=1e-5, rtol=1e-4)
        assert not scores[j, c, num_src:].any()
        if not open_rows:
            assert 1 - 1e-4 <= scores[j, c].sum() <= per_head + 1e-4


@pytest.mark.parametrize("scorer", ["zipage:block=16", "zipage:redundancy=full", "snapkv"])
def test_a_head_keeps_its_rows_whatever_heads_are_beside_it(backend, scorer):
    """Invariant 7, and what one device can show of 8: heads that are elsewhere could as well be on another device."""
    wide = backend == "cpu"  # where products of other shapes are rounded otherwise
    dtype, format = (torch.float64, "fp64") if wide else (torch.float32, "fp32")
    case = Case("uniform", format, None, (45, 17, 60, 33), head_dim=64, state=STATE, dtype=dtype, page_size=16)
    first = make_view(case)
    repeat_keys(first)
    results = []
    for tile_bytes in (64 << 20, 1):
        view = moved(first, device_of(backend))
        compressor = Compressor(make_backend(backend), view, 0.125, tile_bytes)  # all heads, and a layer at a time
        compressor.run(fold_jobs(first, case, 0), [ScorePolicy(scorer, 1, 4)])
        results.append(bytes_of(moved(view, "cpu")))
    for name, found in results[0].items():
        if "state" not in name or not wide:
            assert torch.equal(found, results[1][name]), name
    assert any(not torch.equal(found, results[0][name]) for name, found in bytes_of(first).items())
