"""The kernels around the library's attention compile for a real device and keep to its registers."""

# ruff: noqa: E402 - what is imported depends on Triton being there and compiling

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs the package triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted, not compiled", allow_module_level=True)

from pagefold.backends.triton import long_prefill as module
from tests.backend.cases import Case, make_batch, make_view, new_queries
from tests.compile.test_compile import TIERS, Launch, Recorder, instructions

KERNELS = ("decode_rows", "place_queries", "merge_parts")


@pytest.mark.slow
@pytest.mark.parametrize("hot, cold", TIERS)
def test_kernels_compile_without_spills(monkeypatch, tmp_path, hot, cold):
    """A chunk after 11 of the smallest blocks and some rows, so that four parts are merged."""
    launches: list[Launch] = []
    for name in KERNELS:
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), launches))
    for name, value in {"BLOCK_ROWS": 64, "QUERY_STEP": 16, "MIN_PAIRS": 1}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "has_attention", lambda kv: True)
    monkeypatch.setattr(module, "attention", lambda q, *_: (torch.empty_like(q), torch.empty(q.shape[:2])))
    case = Case("uniform", hot, cold, (64 * 11 + 5 + 41,), 64, 4, 128, dtype=torch.bfloat16)
    view = make_view(case)
    batch = make_batch(view, case, [(1, 41)])
    q = new_queries(view, case, batch)
    (chunk,) = module.LongPrefill().plan(view, batch)
    names = ("k_data", "k_scale", "v_data", "v_scale")
    planes = [[store.rows(name) for name in names] for store in view.tiers]
    module.attend_long(view, planes, 1, q, chunk, 0.1, torch.empty_like(q))
    kinds = {(run.kernel.__name__, run.args.get("TIER"), run.args.get("SHIFT")): run for run in launches}
    assert len(kinds) == len(launches) == 3 + len(view.tiers) and launches[-1].args["num_parts"] == 4
    for name, launch in kinds.items():
        ops, registers = instructions(launch.compile(90).asm["cubin"], tmp_path)
        assert registers <= 128 and not [op for op in ops if op.startswith(("LDL", "STL"))], name
        assert any(op.startswith("STG") and "128" in op for op in ops), name


@pytest.mark.slow
def test_a_merge_of_many_parts_compiles_without_spills(monkeypatch, tmp_path):
    launches: list[Launch] = []
    monkeypatch.setattr(module, "merge_parts", Recorder(module.merge_parts, launches))
    view = make_view(Case("uniform", "bf16", None, (16,), 64, 4, 128, dtype=torch.bfloat16))
    part = (torch.empty(8, 64, 128, dtype=torch.bfloat16), torch.empty(8, 64))
    cover = module.Cover(torch.arange(2), torch.zeros(2, dtype=torch.int64), False, True, 0, 64, [])
    module._merge(view, [part] * 13, cover, torch.empty(64, 8, 128, dtype=torch.bfloat16))
    ops, registers = instructions(launches[0].compile(90).asm["cubin"], tmp_path)
    assert registers <= 128 and not [op for op in ops if op.startswith(("LDL", "STL"))]
