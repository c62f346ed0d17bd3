"""Folding on a GPU: what is kept is what the reference keeps, alone or padded, inline or beside the steps; no sync."""

import pytest
import torch

from pagefold.backends.base import JobBatch
from pagefold.backends.reference import Reference
from pagefold.backends.triton.backend import TritonBackend
from pagefold.core.types import Request, ScorePolicy
from pagefold.engine.policy import usual_folds
from pagefold.evict.scorer import SCORERS
from pagefold.evict.select import select_rows
from pagefold.runner.compressor import Compressor
from pagefold.store.format import FORMATS
from tests.backend.cases import Case, bytes_of, make_jobs, make_view
from tests.backend.test_triton_compaction import STATE, fold_jobs, repeat_keys
from tests.engine.tiny import assert_drained, greedy
from tests.gpu.test_engine import FOLDED, engine_of, tokens_of, work
from tests.gpu.test_kernels import moved, relative

pytestmark = pytest.mark.gpu

ONE_TIER = [(name, None) for name in FORMATS.names() if name != "fp64"]
TIERS = [*ONE_TIER, ("bf16", "int4"), ("int4", "k4v2"), ("fp8", "int4")]
LENGTHS = (130, 64, 700, 1300)


@pytest.mark.parametrize("block", [64, 256, None])
@pytest.mark.parametrize("hot, cold", TIERS)
def test_crowding(hot, cold, block):
    """Up to rounding; keys repeat, so that there are rows whose cosine is 1, and hardly any near the threshold."""
    view = make_view(Case("mixed", hot, cold, LENGTHS[:3], 16, 2, 128, dtype=torch.bfloat16, num_window=16))
    repeat_keys(view)
    jobs = make_jobs(view, Case(lengths=LENGTHS[:3], page_size=16, num_window=16), 0)
    ours = TritonBackend().crowding(moved(view), moved(jobs), slice(0, 1), 0.7, block)
    assert relative(ours, Reference().crowding(view, jobs, slice(0, 1), 0.7, block)) < 1e-2


@pytest.mark.parametrize("num_rows, num_keep", [(64, 16), (1280, 1024), (16384, 1024), (40000, 64)])
def test_selection_is_exact(num_rows, num_keep):
    """Including ties, infinities and NaN, in jobs of which one is shorter."""
    view = moved(make_view(Case(page_size=16)))
    scores = torch.randn(2, 40, num_rows, device="cuda")
    scores[:, ::2] = (scores[:, ::2] * 2).round()
    scores[0, 1, ::7], scores[1, 2, ::5], scores[1, 3] = torch.nan, torch.inf, -torch.inf
    num_src = torch.tensor([num_rows, num_rows // 2], device="cuda")
    if num_keep > num_rows // 2:  # the shorter one could not keep so many
        num_src[1] = num_rows
    one = torch.zeros(2, dtype=torch.int64, device="cuda")
    dst = torch.ones(2, num_keep // 16, dtype=torch.int64, device="cuda")
    jobs = JobBatch(one, one, one, num_src, num_src + 5, one, one, dst, 0, num_rows, num_rows + 5)
    keep = TritonBackend().select_rows(view, jobs, scores, 4, 9)
    assert torch.equal(keep.cpu(), select_rows(scores.cpu(), num_src.cpu(), num_src.cpu() + 5, num_keep, 4, 9))


@pytest.mark.parametrize("hot, cold", TIERS)
@pytest.mark.parametrize("scorer", ["zipage", "zipage:redundancy=full", "snapkv"])
def test_jobs_of_a_batch_keep_what_they_keep_alone(hot, cold, scorer):
    """To the last byte, whatever they are padded to and whoever is beside them, inline or on a stream of their own."""
    case = Case("mixed", hot, cold, LENGTHS, 16, 4, 128, num_window=16, dtype=torch.bfloat16, state=STATE)
    first = make_view(case)
    repeat_keys(first)
    jobs, policies = fold_jobs(first, case, case.two_tiers), [ScorePolicy(scorer, 0, 16)]
    results = []
    for pad, overlap, parts in ((True, False, [jobs]), (True, True, [jobs]), (False, False, [[j] for j in jobs[::-1]])):
        view = moved(first)
        compressor = Compressor(TritonBackend(), view, 128**-0.5, pad=pad, overlap=overlap)
        for part in parts:
            compressor.run(part, policies)
        torch.cuda.synchronize()
        results.append(bytes_of(moved(view, "cpu")))
    for other in results[1:]:
        for name, found in other.items():
            assert torch.equal(found, results[0][name]), name


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("hot, cold", [("bf16", None), ("int4", None), ("bf16", "int4")])
@pytest.mark.parametrize("scorer", ["zipage", "keydiff"])
def test_captured_jobs_keep_what_others_do(scorer, hot, cold, overlap):
    """To the last byte, at the first run, which is eager, at the second, which is captured, and at a replay with other
    jobs of the same shape."""
    case = Case("mixed", hot, cold, LENGTHS, 16, 4, 128, num_window=16, dtype=torch.bfloat16, state=STATE)
    first = make_view(case)
    repeat_keys(first)
    jobs, policies = fold_jobs(first, case, case.two_tiers), [ScorePolicy(scorer, 0, 16)]
    plain, view = moved(first), moved(first)
    captured = Compressor(TritonBackend(), view, 128**-0.5, overlap=overlap, graphs=True)
    for number in range(4):
        some = jobs[::-1] if number == 3 else jobs
        for store, before in zip((*plain.tiers, *view.tiers), (*first.tiers, *first.tiers), strict=True):
            for name, plane in store.planes.items():
                plane.copy_(before.planes[name])
        Compressor(TritonBackend(), plain, 128**-0.5).run(some, policies)
        captured.run(some, policies)
        torch.cuda.synchronize()
        truth = bytes_of(moved(plain, "cpu"))
        for name, found in bytes_of(moved(view, "cpu")).items():
            assert torch.equal(found, truth[name]), (number, name)
    assert captured._graphs is not None
    assert captured._graphs._graphs


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("scorer", SCORERS.names())
def test_no_job_waits_for_the_device(scorer, overlap):
    case = Case("mixed", "bf16", "int4", LENGTHS, 16, 4, 128, num_window=16, dtype=torch.bfloat16, state=STATE)
    first = make_view(case)
    view, jobs, policies = moved(first), fold_jobs(first, case, 1), [ScorePolicy(scorer, 0, 16)]
    compressor = Compressor(TritonBackend(), view, 128**-0.5, overlap=overlap)
    compressor.run(jobs, policies)  # kernels are compiled
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        compressor.run(jobs, policies)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@pytest.mark.parametrize("options", [{}, {"num_pages": 60}, {"kv_cold_format": "fp32", "kv_cold_after": 16}])
def test_jobs_beside_the_steps_give_the_tokens_of_jobs_between_them(options):
    """With little room, requests are swapped and dropped while their jobs run."""
    prompts, params = work(60, seed=4)
    options = FOLDED | {"kv_lag": 4} | options
    beside, between = engine_of(**options), engine_of(**options)
    assert beside.runner.compressor._stream is not None
    between.runner.compressor._stream = None
    assert tokens_of(beside, prompts, params) == tokens_of(between, prompts, params)


def test_aborts_while_jobs_run_change_no_other_request():
    """Slots and pages of requests that were dropped in the middle of a job go to others at once."""
    prompts, params = work(60, seed=5)
    doomed = set(range(0, 60, 3))
    plain = tokens_of(engine_of(**FOLDED, kv_lag=4), prompts, params)
    engine, aborted, tokens = engine_of(**FOLDED, kv_lag=4), set(), {}
    for i in range(60):
        engine.add(Request(f"{i}", tuple(prompts[i]), params[i]))
    while engine.has_work:
        for seq in list(engine.scheduler.running):
            name = int(seq.request.id)
            if name in doomed and seq.kv.ticket:
                engine.abort(seq.request.id)
                aborted.add(name)
        tokens |= {int(out.request_id): out.outputs[0].token_ids for out in engine.step() if out.finished}
    assert_drained(engine)
    assert aborted
    assert all(tokens[i] == plain[i] for i in range(60) if i not in aborted)


def test_warming_up_writes_to_nobodys_page():
    engine = engine_of(**FOLDED)
    engine.add(Request("a", tuple(range(70)), greedy(30)))
    engine.step()
    planes, policy = engine.runner.kv.tiers[0].planes, engine.policies.default
    for plane in planes.values():
        plane.copy_(torch.randn(plane.shape))
    before = {name: plane.clone() for name, plane in planes.items()}
    jobs = usual_folds(policy, 16, 512)
    assert len(jobs) == engine.manager.geometry.num_groups
    engine.runner.compressor.warm_up(jobs, policy.score)
    torch.cuda.synchronize()
    assert all(torch.equal(plane[1:], before[name][1:]) for name, plane in planes.items())
