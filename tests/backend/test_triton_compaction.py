"""The kernels that decide a compaction, interpreted on the CPU: crowding, selection, and batches of unequal jobs.

As in `test_triton.py`, a plain run starts this file again in a process with the interpreter.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from pagefold.backends.base import JobBatch, KVView
from pagefold.backends.reference import Reference
from pagefold.backends.triton import compaction as module
from pagefold.backends.triton.backend import TritonBackend
from pagefold.core.types import Job, ScorePolicy
from pagefold.evict.select import select_rows
from pagefold.runner.compressor import Compressor
from pagefold.store.format import FORMATS, Plane
from tests.backend.cases import Case, bytes_of, copy_of, make_jobs, make_view
from tests.interpreted import assert_passes_interpreted, interpreted, plain

ONE_TIER = [(name, None) for name in FORMATS.names() if name != "fp64"]
TIERS = [*ONE_TIER, ("bf16", "int4"), ("int4", "k4v2"), ("fp32", "k=fp8,v=int4")]
VALUES = [0.0, -0.0, 1.0, -1.0, 2.5, 1e-45, -1e-45, 3e38, -3e38, math.inf, -math.inf, math.nan]


@pytest.mark.slow
@plain
@pytest.mark.parametrize("part", ["crowding", "not crowding"])
def test_in_the_interpreter(part):
    assert_passes_interpreted(__file__, "-k", part)


def repeat_keys(view: KVView) -> None:
    """Copy the key of every third row to the next two, so that some rows are similar."""
    for store in view.tiers:
        for part in ("k_data", "k_scale"):
            plane = store.planes[part].transpose(0, 1)
            raw = plane.view(torch.uint8) if plane.shape[-1] else plane
            for shift in (1, 2):
                raw[:, :, shift::3] = raw[:, :, 0::3][:, :, : raw[:, :, shift::3].shape[2]]


@interpreted
@pytest.mark.parametrize("threshold", [0.0501, 0.5])
@pytest.mark.parametrize("hot, cold", TIERS)
def test_crowding(hot, cold, threshold):
    """Blocks that a program takes whole, with a short one at the end; longer ones; all rows with all."""
    case = Case("mixed", hot, cold, (17, 45, 30), head_dim=32, num_window=1)
    view = make_view(case)
    repeat_keys(view)
    jobs = make_jobs(view, case, 0, first_page=1)
    for columns, block in ((slice(None), 12), (slice(1, 2), 300), (slice(0, 1), None)):
        ours = TritonBackend().crowding(view, jobs, columns, threshold, block)
        truth = Reference().crowding(view, jobs, columns, threshold, block)
        assert ours.dtype == truth.dtype
        torch.testing.assert_close(ours, truth, atol=2e-3 if cold and hot != "fp32" else 2e-5, rtol=1e-3)


@interpreted
@pytest.mark.parametrize(
    "hot, cold, threshold, block",
    [
        ("int4", None, 0.4, 48),
        ("int4", None, 0.4, 64),
        ("bf16", None, 0.4, 32),
        ("int4", None, 0.4, None),
        ("int8", None, 0.0, 40),
        ("bf16", "int4", 0.4, 48),
    ],
)
def test_crowding_of_many_tiles(monkeypatch, hot, cold, threshold, block):
    """Blocks of whole tiles of columns and others, which end inside a tile of rows, and of long tiles; all rows with
    all."""
    monkeypatch.setattr(module, "TILE", 16)
    monkeypatch.setattr(module, "LONG_TILE", 32)
    monkeypatch.setattr(module, "COLUMNS", 16)
    monkeypatch.setattr(module, "NEAR_ROWS", 48)
    case = Case("uniform", hot, cold, (70, 50), head_dim=32, num_window=1)
    view = make_view(case)
    repeat_keys(view)
    jobs, some = make_jobs(view, case, 0), slice(0, 1)
    ours = TritonBackend().crowding(view, jobs, some, threshold, block)
    truth = Reference().crowding(view, jobs, some, threshold, block)
    torch.testing.assert_close(ours, truth, atol=2e-3 if cold else 2e-5, rtol=1e-3 if cold else 1e-5)


@interpreted
@pytest.mark.parametrize("format", ["bf16", "int4"])
def test_crowding_of_a_block_of_equal_rows(format):
    """The newest row has no cosine that counts, not even of as many as a near block may have."""
    case = Case("uniform", format, None, (256,), head_dim=32, num_window=1)
    view = make_view(case)
    jobs, first = make_jobs(view, case, 0), int(view.page_table[1, 0, 0]) * view.page_size
    for part in ("k_data", "k_scale"):
        rows = view.tiers[0].rows(part)
        rows[:] = rows[first].clone()
    ours = TritonBackend().crowding(view, jobs, slice(0, 1), 0.0, module.NEAR_ROWS)
    truth = Reference().crowding(view, jobs, slice(0, 1), 0.0, module.NEAR_ROWS)
    torch.testing.assert_close(ours, truth, atol=1e-3, rtol=1e-5)
    assert truth[0, 0, -1].abs() < 1e-3 and (truth[0, 0, :255] > 253).all()


def jobs_of(num_src: list[int], num_rows: list[int], num_pages: list[int]) -> JobBatch:
    """Jobs that selection looks at: lengths, and destination pages."""
    zeros = torch.zeros(len(num_src), dtype=torch.int64)
    dst = torch.zeros(len(num_src), max(num_pages), dtype=torch.int64)
    for j, count in enumerate(num_pages):
        dst[j, :count] = 1 + torch.arange(count)
    lengths = torch.tensor(num_src), torch.tensor(num_rows)
    return JobBatch(zeros, zeros, zeros, *lengths, zeros, zeros, dst, 0, max(num_src), max(num_rows))


@interpreted
@pytest.mark.parametrize("tile", [16, 1024])
@pytest.mark.parametrize("seed", range(6))
def test_selection(monkeypatch, seed, tile):
    """Ties, infinities, NaN; jobs of different lengths that keep different numbers of rows; padding that is best."""
    monkeypatch.setattr(module, "SELECT_TILE", tile)
    view = dataclasses.replace(make_view(Case()), page_size=4)
    rng = np.random.default_rng(seed)
    num_pages = [2, 5, 3]
    num_src = [4 * int(rng.integers(pages, 13)) for pages in num_pages]
    num_rows = [length + int(rng.integers(0, 4)) for length in num_src]
    jobs = jobs_of(num_src, num_rows, num_pages)
    scores = torch.from_numpy(rng.choice(VALUES if seed % 2 else VALUES[:3], (3, 2, max(num_src)))).float()
    for j, length in enumerate(num_src):
        scores[j, :, length:] = math.inf
    sinks, window = int(rng.integers(0, 3)), int(rng.integers(0, 4))
    keep = TritonBackend().select_rows(view, jobs, scores, sinks, window)
    assert torch.equal(Reference().select_rows(view, jobs, scores, sinks, window)[1], keep[1])
    for j, pages in enumerate(num_pages):
        one = slice(j, j + 1)
        truth = select_rows(scores[one], jobs.num_src[one], jobs.num_rows[one], 4 * pages, sinks, window)
        assert torch.equal(keep[one, :, : 4 * pages], truth)


STATE = {"global_score": Plane(torch.float32, 1)}
LENGTHS = (45, 17, 60, 33)


def fold_jobs(view: KVView, case: Case, dst_tier: int) -> list[Job]:
    """A compaction of every group with two full pages, to half of its pages; every fifth is cooled as it is."""
    used = set(view.page_table.flatten().tolist())
    fresh = iter([page for page in range(1, view.tiers[dst_tier].num_pages) if page not in used])
    found = []
    for slot, length in enumerate(case.lengths, start=1):
        for group in range(view.page_table.shape[1]):
            n = length - int(view.evicted[slot, group])
            pages = n // case.page_size
            if pages < 2:
                continue
            kept = pages if len(found) % 5 == 4 else (pages + 1) // 2
            dst = np.array([next(fresh) for _ in range(kept)], np.int32)
            keep_rows, window_slot = kept * case.page_size, 1 + slot % 2
            found.append(Job(slot, group, 0, pages, n, length, keep_rows, dst, dst_tier, window_slot, 0))
    return found


@interpreted
@pytest.mark.parametrize(
    "scorer, hot, cold",
    [
        ("zipage:block=16", "fp8", "k4v2"),
        ("zipage:redundancy=full", "int4", None),
        ("snapkv", "fp32", None),
        ("expected", "int4", None),
    ],
)
def test_jobs_of_a_batch_keep_what_they_keep_alone(hot, cold, scorer):
    """Whatever they are padded to, whoever is beside them, in one pass over the columns or several: to the last bit."""
    case = Case("mixed", hot, cold, LENGTHS, head_dim=32, state=STATE, per_head=1)
    first = make_view(case)
    repeat_keys(first)
    jobs = fold_jobs(first, case, case.two_tiers)
    assert len({job.num_src_pages for job in jobs}) > 2
    policies = [ScorePolicy(scorer, 1, 4)]
    results = []
    for pad, parts, tile_bytes in ((True, [jobs], 1 << 26), (False, [[job] for job in jobs[::-1]], 1)):
        view = copy_of(first)
        compressor = Compressor(TritonBackend(), view, 0.3, tile_bytes, pad)
        for part in parts:
            compressor.run(part, policies)
        results.append(bytes_of(view))
    for name, found in results[0].items():
        assert torch.equal(found, results[1][name]), name
    assert any(not torch.equal(found, results[0][name]) for name, found in bytes_of(first).items())


@interpreted
@pytest.mark.parametrize("scorer, launches", [("zipage", 1), ("zipage:redundancy=none", 1), ("snapkv", 0)])
def test_a_batch_reads_keys_for_their_lengths_only_if_nothing_else_does(monkeypatch, scorer, launches):
    """`row_lengths` runs for values; window attention has taken the lengths of keys."""
    case = Case("uniform", "int4", None, LENGTHS, head_dim=32, state=STATE)
    view, kernel, found = make_view(case), module.row_lengths, []
    counted = type("Counted", (), {"__getitem__": lambda _, grid: found.append(grid) or kernel[grid]})()
    monkeypatch.setattr(module, "row_lengths", counted)
    Compressor(TritonBackend(), view, 0.3, pad=True).run(fold_jobs(view, case, False)[:1], [ScorePolicy(scorer, 1, 4)])
    assert len(found) == launches


@pytest.mark.parametrize("hot, cold", [("fp64", None), ("fp32", "int4")])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_padded_jobs_keep_what_they_keep_alone_on_a_cpu(backend, hot, cold):
    from pagefold.backends.registry import make_backend

    case = Case("mixed", hot, cold, LENGTHS, head_dim=16, state=STATE, dtype=torch.float64)
    first = make_view(case)
    jobs = fold_jobs(first, case, case.two_tiers)
    results = []
    for pad in (True, False):
        view = copy_of(first)
        Compressor(make_backend(backend), view, 0.3, pad=pad).run(jobs, [ScorePolicy("zipage:block=16", 1, 4)])
        results.append(view)
    for ours, theirs in zip(results[0].tiers, results[1].tiers):
        for name, plane in ours.planes.items():
            if name.startswith("state."):
                torch.testing.assert_close(plane, theirs.planes[name], equal_nan=True)
            elif plane.shape[-1]:
                raw = [store.planes[name].contiguous().view(torch.uint8) for store in (ours, theirs)]
                assert torch.equal(*raw), name


@interpreted
@pytest.mark.parametrize("scorer", ["zipage:block=16", "snapkv", "keydiff"])
def test_a_job_of_a_batch_that_keeps_nothing_writes_to_nobodys_page(scorer):
    """So a batch can be padded, and an engine warmed up."""
    case = Case("mixed", "int4", None, (30, 45), head_dim=32, num_window=4, state=STATE)
    view, policies = make_view(case), [ScorePolicy(scorer, 1, 4)]
    before = bytes_of(view)
    job = Job(0, 0, 0, 4, 32, 32, 16, np.zeros(2, np.int32), 0, 0, 0)
    Compressor(TritonBackend(), view, 0.3, pad=True).run([job, job], policies)
    for name, plane in bytes_of(view).items():
        assert torch.equal(
            plane if name == "window" else plane[1:], before[name] if name == "window" else before[name][1:]
        )
