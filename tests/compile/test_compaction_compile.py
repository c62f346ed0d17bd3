"""The kernels of a compaction compile for real devices on a machine that has none, within their limits."""

# ruff: noqa: E402 - what is imported depends on Triton being there and compiling

from collections import Counter

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs the package triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted, not compiled", allow_module_level=True)

from pagefold.backends.triton import compaction, rows, window
from pagefold.backends.triton.backend import TritonBackend
from pagefold.evict import row_kernels
from pagefold.store.format import Plane
from tests.backend.cases import Case, make_jobs, make_keep, make_view
from tests.compile.test_compile import SHARED, Launch, Recorder, instructions

TIERS = [
    ("fp32", None),
    ("bf16", None),
    ("fp16", None),
    ("fp8", None),
    ("int4", None),
    ("bf16", "int4"),
    ("int4", "k4v2"),
]
KERNELS = {
    window: ("rotate_window", "turn_window", "window_sums", "window_weights", "expect_rows"),
    compaction: ("row_lengths", "compare_rows", "select_best"),
    rows: ("read_rows", "read_states", "move_rows"),
}


def launches_of(monkeypatch, hot: str, cold: str | None, compared: bool = True) -> list[Launch]:
    """What a Zipage fold launches, by window attention and by expected attention, for a bfloat16 model with 4 query
    heads per KV head, and a long-block crowding of other columns."""
    found: list[Launch] = []
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), found))
    state = {"score": Plane(torch.float32, 1)}
    case = Case("mixed", hot, cold, (300, 700), 64, 4, 128, num_window=16, dtype=torch.bfloat16, state=state)
    view = make_view(case)
    jobs = make_jobs(view, case, dst_tier=1 if cold else 0)
    jobs.compared = compared
    ours, every = TritonBackend(), slice(None)
    ours.window_scores(view, jobs, every, 0.1)
    ours.read_state(view, jobs, every, "score")
    ours.read_lengths(view, jobs, every, "v")
    ours.crowding(view, jobs, every, 0.5, 128)
    ours.expected_logits(view, jobs, every, 0.1, 512)
    ours.crowding(view, jobs, every, 0.5, 256)
    ours.crowding(view, jobs, slice(1), 0.5, None)
    scores = torch.zeros(len(jobs.slots), view.members.shape[1], jobs.max_src)
    ours.select_rows(view, jobs, scores, 4, 16)
    ours.compact(view, jobs, every, make_keep(jobs, view.members.shape[1], 64), {"score": scores[..., None]})
    return found


@pytest.mark.parametrize("hot, cold", TIERS)
def test_a_fold_is_few_launches(monkeypatch, hot, cold):
    """Two passes of window attention, the second with lengths of keys unless rows have 8 bits, or one of expected
    attention; state, lengths of values, crowding, of other columns too, selection, moving."""
    names = [launch.kernel.__name__ for launch in launches_of(monkeypatch, hot, cold)]
    tiers = 1 + bool(cold)
    assert names.count("compare_rows") == 3
    assert names.count("row_lengths") == (2 if cold else 4 if hot == "fp8" else 2)
    frames = len({"int4" in tier or "k4" in tier for tier in (hot, cold) if tier})
    assert names.count("turn_window") == frames
    assert names.count("rotate_window") == int("int4" in (hot, cold))
    assert names.count("window_sums") == names.count("window_weights") == names.count("expect_rows") == tiers
    assert [names.count(name) for name in ("read_states", "select_best", "move_rows")] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("hot, cold", TIERS)
def test_kernels_compile_without_spills(monkeypatch, tmp_path, hot, cold, capability):
    if capability < 89 and "fp8" in (hot, cold):
        pytest.skip("e4m3 needs compute capability 8.9")
    for launch in launches_of(monkeypatch, hot, cold):
        compiled = launch.compile(capability)
        name = f"{launch.kernel.__name__} {launch.args.get('M', '')}"
        ops, _ = instructions(compiled.asm["cubin"], tmp_path)
        assert compiled.metadata.shared <= SHARED[capability], name
        # window attention in float32 is there for exactness
        exact = hot == "fp32" and name.startswith(("window", "expect"))
        assert exact or not [op for op in ops if op.startswith(("LDL", "STL"))], f"{name} spills"
        if name.startswith("compare_rows") and hot != "fp32":
            assert any(op.startswith(("HMMA", "HGMMA")) for op in ops), f"{name} without matrix units"
        if name.startswith("move_rows") and cold is None:
            assert any(op.startswith("LDG.E.128") for op in ops), f"{name} moves narrow words"


@pytest.mark.parametrize("format", ["bf16", "fp8", "int4"])
def test_tiles_of_window_attention_make_no_threads_wait(monkeypatch, tmp_path, format):
    """But for the tile's arrival: sums stay in lanes; scores are added up in a warp, then put in order to be stored."""
    for launch in launches_of(monkeypatch, format, None, compared=False):
        if launch.kernel.__name__ in ("window_sums", "window_weights"):
            exchanges = 4 if launch.kernel.__name__ == "window_weights" else 0
            loop, registers = instructions(launch.compile(90).asm["cubin"], tmp_path)
            kinds = Counter(op.split(".")[0] for op in loop)
            assert kinds["HGMMA"] == 8 and kinds["LDGSTS"], "the loop over tiles"
            assert kinds["SHFL"] == exchanges and kinds["STS"] <= bool(exchanges) and kinds["BAR"] <= 2
            assert kinds["MUFU"] <= 48 and len(loop) <= 470
            assert registers <= 168, "three programs at a time"


@pytest.mark.parametrize("format", ["bf16", "int4"])
def test_queries_of_long_windows_are_turned_without_spills(monkeypatch, tmp_path, format):
    found: list[Launch] = []
    for name in ("turn_window", "expect_rows"):
        monkeypatch.setattr(window, name, Recorder(getattr(window, name), found))
    case = Case("uniform", format, None, (700,), 64, 4, 128, num_window=64, dtype=torch.bfloat16)
    view = make_view(case)
    TritonBackend().expected_logits(view, make_jobs(view, case, dst_tier=0), slice(None), 0.1, 512)
    for launch in found:
        ops, _ = instructions(launch.compile(90).asm["cubin"], tmp_path)
        assert not [op for op in ops if op.startswith(("LDL", "STL"))], launch.kernel.__name__


def test_what_scorers_compute_along_rows_compiles(monkeypatch, tmp_path):
    """In registers, each of them a launch."""
    found: list[Launch] = []
    for name in ("share_rows", "memory_rows", "mean_share_rows", "pool_rows"):
        monkeypatch.setattr(row_kernels, name, Recorder(getattr(row_kernels, name), found))
    x, valid = torch.zeros(2, 3, 1280), torch.ones(2, 1, 1280, dtype=torch.bool)
    row_kernels.minus_softmax(x, 0.2, x, valid, 5.0)
    row_kernels.weighed(x, 6.0, x, valid)
    row_kernels.with_memory(x, x, torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool), 0.8)
    row_kernels.pooled(x, valid, 7)
    for per_head in (1, 4):
        row_kernels.mean_shares(x[:, :, None].expand(-1, -1, per_head, -1), valid)
    assert len(found) == 6
    for launch in found:
        for capability in (80, 90):
            ops, registers = instructions(launch.compile(capability).asm["cubin"], tmp_path)
            assert registers <= 168 and not [op for op in ops if op.startswith(("LDL", "STL"))]
