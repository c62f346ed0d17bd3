"""Every backend does to every byte what the reference does: all methods, formats, layouts, tiers and odd shapes."""

import pytest
import torch

from pagefold.backends import registry
from pagefold.backends.reference import Reference
from pagefold.backends.registry import make_backend
from pagefold.store.format import FORMATS, Plane
from tests.backend.cases import (
    LAYOUTS,
    Case,
    bytes_of,
    copy_of,
    make_batch,
    make_jobs,
    make_keep,
    make_view,
    new_queries,
    new_tokens,
    of_sources,
)

STATE = {"score": Plane(torch.float32, 1), "pair": Plane(torch.float16, 2)}
PAIRS = ["k=fp8,v=int4", "k=int4,v=fp16"]
TIERS = [*((name, None) for name in [*FORMATS.names(), *PAIRS])]
TIERS += [("bf16", "int4"), ("int4", "k4v2"), ("fp32", "k=fp8,v=int4")]
BACKENDS = [name for name in registry.testable_backends() if name != "reference"]
DECODE = [(5, 1), (1, 1), (3, 1), (2, 1), (4, 1)]
PREFILL = [(5, 20), (1, 1), (2, 7), (3, 3), (4, 1)]


def close(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> None:
    limit = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    assert a.dtype == b.dtype and a.shape == b.shape
    torch.testing.assert_close(a.double(), b.double(), atol=limit, rtol=limit)


def assert_same_bytes(a, b) -> None:
    ours, theirs = bytes_of(a), bytes_of(b)
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("hot, cold", TIERS)
@pytest.mark.parametrize("chunks", [DECODE, PREFILL], ids=["decode", "mixed"])
def test_attention(backend, layout, hot, cold, chunks):
    case = Case(layout=layout, hot=hot, cold=cold)
    view = make_view(case)
    batch = make_batch(view, case, chunks)
    tested = make_backend(backend)
    for layer in range(len(view.group_of)):
        q = new_queries(view, case, batch, seed=layer)
        close(tested.attend(view, layer, q, batch, 0.3), Reference().attend(view, layer, q, batch, 0.3), case.dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("per_head", [1, 3, 4])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("hot, cold", [("fp32", None), ("bf16", "int4"), ("fp8", None), ("fp16", "k4v2")])
def test_attention_shapes(backend, per_head, head_dim, hot, cold):
    case = Case("mixed", hot, cold, lengths=(33, 300), page_size=32, per_head=per_head, head_dim=head_dim)
    view = make_view(case)
    for chunks in ([(1, 1), (2, 1)], [(2, 6), (1, 1)]):
        batch = make_batch(view, case, chunks)
        q = new_queries(view, case, batch)
        scale = head_dim**-0.5
        close(
            make_backend(backend).attend(view, 1, q, batch, scale),
            Reference().attend(view, 1, q, batch, scale),
            case.dtype,
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("hot", ["bf16", "fp64", "int4"])
def test_attention_dtypes(backend, dtype, hot):
    case = Case("by_layer", hot, dtype=dtype)
    view = make_view(case)
    for chunks in (DECODE, PREFILL):
        batch = make_batch(view, case, chunks)
        q = new_queries(view, case, batch)
        close(make_backend(backend).attend(view, 0, q, batch, 0.25), Reference().attend(view, 0, q, batch, 0.25), dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("hot, cold", TIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_append_writes_the_same_bytes(backend, layout, hot, cold, dtype):
    """Rows, cleared state and the window's queries; nothing else in any plane changes."""
    case = Case(layout=layout, hot=hot, cold=cold, dtype=dtype, state=STATE)
    ours = make_view(case)
    theirs = copy_of(ours)
    chunks = [(5, 9), (2, 1), (3, 2), (1, 1)]
    for layer in range(len(ours.group_of)):
        tokens = new_tokens(ours, case, make_batch(ours, case, chunks), seed=layer)
        batch = make_batch(ours, case, chunks, window=True)
        queries = make_backend(backend).append(ours, layer, tokens.clone(), batch, None)
        Reference().append(theirs, layer, tokens, make_batch(theirs, case, chunks, window=True), None)
        assert torch.equal(queries, tokens[:, : queries.shape[1]])
    assert_same_bytes(ours, theirs)
    for name in STATE:
        group, column = int(ours.group_of[0, 0]), int(ours.column_of[0, 0])
        row = case.lengths[4] - 1 - int(ours.evicted[5, group])
        page = ours.page_table[5, group, row // case.page_size]
        assert (ours.tiers[0].planes[f"state.{name}"][page, column, row % case.page_size] == 0).all()
    assert torch.equal(ours.window[layer, 1, 0], tokens[9 - case.num_window, : ours.window.shape[3]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("hot, cold", TIERS)
@pytest.mark.parametrize("first_page", [0, 1])
def test_what_scorers_read(backend, layout, hot, cold, first_page):
    stride = 1 + 2 * first_page  # some of the queries come before a short head's first row
    case = Case(layout=layout, hot=hot, cold=cold, state=STATE, lengths=(8, 17, 45, 30), stride=stride)
    view = make_view(case)
    jobs = make_jobs(view, case, dst_tier=0, first_page=first_page)
    ours, theirs = make_backend(backend), Reference()
    for columns in (slice(None), slice(1, 2)):
        for across in ("max", "mean"):
            scores = ours.window_scores(view, jobs, columns, 0.3, across)
            close(scores, theirs.window_scores(view, jobs, columns, 0.3, across), torch.float32)
        logits = theirs.expected_logits(view, jobs, columns, 0.3, 40)
        close(of_sources(ours.expected_logits(view, jobs, columns, 0.3, 40), jobs), logits, torch.float32)
        for role in ("k", "v"):
            rows = ours.read_rows(view, jobs, columns, role)
            close(rows, theirs.read_rows(view, jobs, columns, role), torch.float32)
            lengths = ours.read_lengths(view, jobs, columns, role)
            close(lengths, theirs.read_lengths(view, jobs, columns, role), torch.float32)
        for name in STATE:
            state = ours.read_state(view, jobs, columns, name)
            assert torch.equal(state, theirs.read_state(view, jobs, columns, name))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("hot, cold", TIERS)
@pytest.mark.parametrize("first_page", [0, 1])
def test_compaction_writes_the_same_bytes(backend, layout, hot, cold, first_page):
    case = Case(layout=layout, hot=hot, cold=cold, state=STATE, lengths=(17, 45, 30))
    for dst_tier in range(1 + case.two_tiers):
        ours = make_view(case)
        theirs = copy_of(ours)
        num_columns = ours.members.shape[1]
        jobs = make_jobs(ours, case, dst_tier, first_page=first_page)
        for columns in (slice(0, 1), slice(1, num_columns)):
            keep = make_keep(jobs, len(range(num_columns)[columns]), case.page_size)
            state = {"score": torch.rand(*keep.shape[:2], jobs.max_src, 1)}
            make_backend(backend).compact(ours, jobs, columns, keep, state)
            Reference().compact(theirs, jobs, columns, keep, state)
        assert_same_bytes(ours, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hot", FORMATS.names())
def test_swapped_pages_are_byte_identical(backend, hot):
    device, host, reference_host = (make_view(Case(hot=hot, state=STATE, seed=seed)) for seed in (0, 1, 1))
    src, dst = torch.tensor([3, 9, 4]), torch.tensor([7, 2, 11])
    make_backend(backend).copy_pages(device.tiers[0], src, host.tiers[0], dst)
    Reference().copy_pages(device.tiers[0], src, reference_host.tiers[0], dst)
    assert_same_bytes(host, reference_host)
    for name, plane in device.tiers[0].planes.items():
        if plane.shape[-1]:
            moved = host.tiers[0].planes[name][dst].contiguous().view(torch.uint8)
            assert torch.equal(moved, plane[src].contiguous().view(torch.uint8)), name
