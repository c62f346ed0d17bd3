"""What must hold of every backend whatever the reference says: exact moves, direct reads, no neighbours."""

import logging

import pytest
import torch

from pagefold.backends import cpu_decode, native, registry
from pagefold.backends.reference import read
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
)

BACKENDS = pytest.mark.parametrize("backend", registry.testable_backends())
HOT = pytest.mark.parametrize("hot", FORMATS.names())
STATE = {"score": Plane(torch.float32, 1)}


def as_bytes(plane: torch.Tensor) -> torch.Tensor:
    return plane.contiguous().view(torch.uint8)


def source_bytes(view, jobs, j: int, name: str, column: int) -> torch.Tensor:
    """uint8[num_src, bytes]: the source rows of job j in one plane, in order; all of them hot."""
    first, num_src = int(jobs.first_page[j]), int(jobs.num_src[j])
    pages = view.page_table[jobs.slots[j], jobs.groups[j], first : first + num_src // view.page_size].long()
    return as_bytes(view.tiers[0].planes[name][pages, column]).flatten(0, 1)


@BACKENDS
@HOT
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kept_rows_move_bit_by_bit(backend, hot, layout):
    """A compaction is a sorted gather of every plane, and neither its sources nor anything else changes."""
    case = Case(layout, hot, state=STATE, lengths=(17, 45))
    view = make_view(case)
    before = copy_of(view)
    jobs = make_jobs(view, case, dst_tier=0)
    keep = make_keep(jobs, view.members.shape[1], case.page_size)
    make_backend(backend).compact(view, jobs, slice(None), keep, {})
    store = view.tiers[0]
    for name, plane in store.planes.items():
        if plane.shape[-1]:
            for j, c in torch.cartesian_prod(torch.arange(len(keep)), torch.arange(keep.shape[1])).tolist():
                moved = as_bytes(plane[jobs.dst_pages[j], c]).flatten(0, 1)
                assert torch.equal(moved, source_bytes(before, jobs, j, name, c)[keep[j, c]]), name
    others = torch.ones(store.num_pages, dtype=torch.bool)
    others[jobs.dst_pages.flatten()] = False
    for name, plane in store.planes.items():
        if plane.shape[-1]:
            assert torch.equal(as_bytes(plane[others]), as_bytes(before.tiers[0].planes[name][others])), name


@BACKENDS
@HOT
def test_keeping_every_row_is_the_identity(backend, hot):
    case = Case("by_layer", hot, state=STATE, lengths=(16, 23, 16), page_size=8)
    view = make_view(case)
    view.evicted.zero_()
    jobs = make_jobs(view, case, dst_tier=0, keep_pages=2)
    keep = torch.arange(16).expand(len(jobs.slots), view.members.shape[1], 16)
    before = {
        name: [source_bytes(view, jobs, j, name, c) for j in range(len(keep)) for c in range(keep.shape[1])]
        for name, plane in view.tiers[0].planes.items()
        if plane.shape[-1]
    }
    make_backend(backend).compact(view, jobs, slice(None), keep, {})
    view.page_table[jobs.slots, jobs.groups, :2] = jobs.dst_pages.int()
    for name, rows in before.items():
        after = [source_bytes(view, jobs, j, name, c) for j in range(len(keep)) for c in range(keep.shape[1])]
        assert all(torch.equal(a, b) for a, b in zip(after, rows)), name


@BACKENDS
@pytest.mark.parametrize("hot, cold", [("bf16", "int4"), ("fp32", "fp8"), ("int4", "k4v2")])
def test_cooled_rows_are_encoded_once(backend, hot, cold):
    """Rows that change tier are what the cold codec makes of the stored row; a codec both tiers share moves bytes."""
    case = Case("uniform", hot, cold, lengths=(45,))
    view = make_view(case)
    view.cold.zero_()
    view.page_table[1, :, :5] = torch.arange(1, 6)
    view.tiers[0].planes["k_data"][1:6], view.tiers[0].planes["k_scale"][1:6] = view.tiers[0].format.k.encode(
        torch.randn(5, 4, 8, 16)
    )
    view.tiers[0].planes["v_data"][1:6], view.tiers[0].planes["v_scale"][1:6] = view.tiers[0].format.v.encode(
        torch.randn(5, 4, 8, 16)
    )
    jobs = make_jobs(view, case, dst_tier=1)
    keep = make_keep(jobs, 4, 8)
    make_backend(backend).compact(view, jobs, slice(None), keep, {})
    for role in ("k", "v"):
        old, new = (getattr(store.format, role) for store in view.tiers)
        for c in range(4):
            data, scale = (source_bytes(view, jobs, 0, f"{role}_{part}", c)[keep[0, c]] for part in ("data", "scale"))
            data, scale = (
                part.view(view.tiers[0].planes[f"{role}_{kind}"].dtype) if part.shape[-1] else part
                for part, kind in ((data, "data"), (scale, "scale"))
            )
            expected = (data, scale) if old == new else new.encode(old.decode(data, scale, torch.float32))
            for part, values in zip(("data", "scale"), expected):
                stored = view.tiers[1].planes[f"{role}_{part}"][jobs.dst_pages[0, 0], c]
                assert torch.equal(as_bytes(stored), as_bytes(values))


@BACKENDS
def test_given_state_replaces_stored_state(backend):
    case = Case("mixed", "bf16", "int4", state={**STATE, "kept": Plane(torch.float16, 2)}, lengths=(45, 30))
    view = make_view(case)
    jobs = make_jobs(view, case, dst_tier=1)
    keep = make_keep(jobs, 2, case.page_size)
    given = torch.rand(len(keep), 2, jobs.max_src, 1)
    kept = make_backend(backend).read_state(view, jobs, slice(None), "kept")
    make_backend(backend).compact(view, jobs, slice(None), keep, {"score": given})
    for j in range(len(keep)):
        for c in range(2):
            page = jobs.dst_pages[j, 0]
            assert torch.equal(view.tiers[1].planes["state.score"][page, c], given[j, c, keep[j, c]])
            assert torch.equal(view.tiers[1].planes["state.kept"][page, c].float(), kept[j, c, keep[j, c]])


@BACKENDS
@pytest.mark.parametrize("hot, cold", [*((name, None) for name in FORMATS.names()), ("bf16", "int4"), ("k4v2", "fp8")])
def test_reading_stored_rows_is_decoding_then_attending(backend, hot, cold):
    """Within 1e-5 of attention in float64 over the decoded rows, at one row, around a block's edge, and far beyond."""
    case = Case("by_layer", hot, cold, lengths=(1, 63, 65, 700), head_dim=64, page_size=16, per_head=3)
    view = make_view(case)
    batch = make_batch(view, case, [(1, 1), (2, 1), (3, 1), (4, 1)])
    q = new_queries(view, case, batch)
    out = make_backend(backend).attend(view, 1, q, batch, 0.125)
    for b, slot in enumerate(batch.host_slots):
        for head in range(2):
            group, column = int(view.group_of[1, head]), int(view.column_of[1, head])
            rows = range(case.lengths[b] - int(view.evicted[slot, group]))
            keys, values = (read(view, slot, group, column, rows, role, torch.float64) for role in ("k", "v"))
            query = q[b, 3 * head : 3 * head + 3].double()
            expected = torch.softmax(query @ keys.T * 0.125, -1) @ values
            torch.testing.assert_close(out[b, 3 * head : 3 * head + 3].double(), expected, atol=1e-5, rtol=1e-5)


@BACKENDS
@pytest.mark.parametrize("hot, cold", [("fp32", None), ("int4", None), ("bf16", "k4v2")])
def test_attention_ignores_neighbours_and_where_pages_lie(backend, hot, cold):
    """The order of a batch, its other members and the physical places of pages change nothing."""
    case = Case("mixed", hot, cold, lengths=(20, 45, 33), dtype=torch.float64)
    view = make_view(case)
    chunks = [(1, 4), (2, 1), (3, 1)]
    batch = make_batch(view, case, chunks)
    q = new_queries(view, case, batch)
    out = make_backend(backend).attend(view, 2, q, batch, 0.25)

    turned = make_batch(view, case, chunks[::-1])
    order = torch.tensor([5, 4, 0, 1, 2, 3])
    torch.testing.assert_close(
        make_backend(backend).attend(view, 2, q[order], turned, 0.25), out[order], atol=1e-12, rtol=0
    )
    alone = make_batch(view, case, chunks[:1])
    torch.testing.assert_close(make_backend(backend).attend(view, 2, q[:4], alone, 0.25), out[:4], atol=1e-12, rtol=0)

    moved = copy_of(view)
    for tier, store in enumerate(moved.tiers):
        shuffle = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(store.num_pages - 1) + 1])
        for name, plane in store.planes.items():
            plane[shuffle] = view.tiers[tier].planes[name].clone()
        in_tier = (torch.arange(view.page_table.shape[2]) < view.cold[..., None]) == bool(tier)
        moved.page_table[in_tier] = shuffle[view.page_table[in_tier].long()].int()
    batch = make_batch(moved, case, chunks)
    assert torch.equal(make_backend(backend).attend(moved, 2, q, batch, 0.25), out)


def test_compiled_decode_is_the_same_in_any_batch():
    """Bit by bit: work is cut at fixed rows, whatever the batch and the number of threads."""
    case = Case("mixed", "bf16", "int4", lengths=(20, 700, 33), head_dim=32)
    view = make_view(case)
    backend = make_backend("cpu")
    batch = make_batch(view, case, [(1, 1), (2, 1), (3, 1)])
    q = new_queries(view, case, batch)
    out = backend.attend(view, 0, q, batch, 0.2)
    for b, slot in enumerate(batch.host_slots):
        assert torch.equal(
            backend.attend(view, 0, q[b : b + 1], make_batch(view, case, [(slot, 1)]), 0.2), out[b : b + 1]
        )


@BACKENDS
@HOT
def test_page_bytes_do_not_depend_on_chunking(backend, hot):
    case = Case("by_layer", hot, lengths=(20,))
    whole, parts = make_view(case), make_view(case)
    tokens = new_tokens(whole, case, make_batch(whole, case, [(1, 20)]))
    batch_of = lambda chunk: make_batch(parts, Case(lengths=(chunk.stop,)), [(1, chunk.stop - chunk.start)])  # noqa: E731
    for view in (whole, parts):
        view.evicted.zero_()
    make_backend(backend).append(whole, 1, tokens.clone(), make_batch(whole, case, [(1, 20)]), None)
    for chunk in (slice(0, 7), slice(7, 8), slice(8, 20)):
        make_backend(backend).append(parts, 1, tokens[chunk].clone(), batch_of(chunk), None)
    ours, theirs = bytes_of(whole), bytes_of(parts)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_without_a_compiler_torch_decodes_and_one_warning_says_so(monkeypatch, caplog):
    monkeypatch.setattr(native, "compiler", lambda: None)
    native.build.cache_clear()
    native._warn.cache_clear()
    case = Case(hot="int4")
    view = make_view(case)
    batch = make_batch(view, case, [(5, 1), (2, 1)])
    q = new_queries(view, case, batch)
    with caplog.at_level(logging.WARNING):
        slow = [make_backend("cpu").attend(view, 0, q, make_batch(view, case, [(5, 1), (2, 1)]), 0.3) for _ in range(2)]
    assert [record.levelname for record in caplog.records if "no C compiler" in record.message] == ["WARNING"]
    monkeypatch.undo()
    native.build.cache_clear()
    torch.testing.assert_close(make_backend("cpu").attend(view, 0, q, batch, 0.3), slow[0], atol=1e-5, rtol=1e-5)


def test_a_failing_compiler_is_reported_and_survived(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(native, "compiler", lambda: "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.build.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert cpu_decode.bind(make_view(Case(hot="bf16"))) is None
    assert "failed to build" in caplog.text
    native.build.cache_clear()


def test_the_kernel_cache_is_used_again(monkeypatch, tmp_path):
    """A second process, here a cleared memo, loads the library that the first one built."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.build.cache_clear()
    if native.compiler() is None:
        pytest.skip("no C compiler")
    assert cpu_decode.bind(make_view(Case(hot="fp8"))) is not None
    built = list((tmp_path / "pagefold" / "kernels").iterdir())
    assert [path.suffix for path in built] == [".so"]
    native.build.cache_clear()
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    assert cpu_decode.bind(make_view(Case(hot="fp8"))) is not None
    native.build.cache_clear()


@pytest.mark.parametrize("hot, dtype", [("fp64", torch.float32), ("bf16", torch.float64)])
def test_the_compiled_kernel_leaves_float64_to_torch(hot, dtype):
    assert cpu_decode.bind(make_view(Case(hot=hot, dtype=dtype))) is None


def test_backends_are_made_by_name():
    assert [make_backend(name).name for name in ("reference", "cpu")] == ["reference", "cpu"]
    with pytest.raises(ValueError, match="backend: got 'gpu', must be one of reference, cpu"):
        make_backend("gpu")
