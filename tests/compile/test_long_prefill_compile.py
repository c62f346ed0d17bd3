"""The kernels around the library's attention compile for a real device and keep to its registers."""

# ruff: noqa: E402 - what is imported depends on Triton being there and compiling

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs the package triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted, not compiled", allow_module_level=True)

from pagefold.backends.triton import long_prefill as module
from pagefold.backends.triton.plan import device_codec, prefill_shape
from tests.backend.cases import Case, make_batch, make_view, new_queries
from tests.compile.test_compile import TIERS, Launch, Recorder, instructions


@pytest.mark.slow
@pytest.mark.parametrize("hot, cold", TIERS)
def test_kernels_compile_without_spills(monkeypatch, tmp_path, hot, cold):
    """A chunk after 11 of the smallest blocks, so that three parts are merged."""
    launches: list[Launch] = []
    for name in ("decode_block", "merge_parts", "prefill_tile"):
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), launches))
    for name, value in {"BLOCK_ROWS": 64, "QUERY_STEP": 16, "MIN_PAIRS": 1}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "has_prefix_attention", lambda kv: True)
    monkeypatch.setattr(
        module, "prefix_attention", lambda q, k, v, scale: (torch.empty_like(q), torch.empty(q.shape[:2]))
    )
    case = Case("uniform", hot, cold, (64 * 11 + 48,), 64, 4, 128, dtype=torch.bfloat16)
    view = make_view(case)
    batch = make_batch(view, case, [(1, 48)])
    q = new_queries(view, case, batch)
    (chunk,) = module.LongPrefill().plan(view, batch)
    shapes = [prefill_shape(device_codec(store.format.v), 128) for store in view.tiers]
    module.attend_long(view, 1, q, [q.float()] * len(view.tiers), chunk, shapes, 0.1, torch.empty_like(q))
    kernels = {(launch.kernel.__name__, launch.args["TIER"]): launch for launch in launches if "TIER" in launch.args}
    kernels["merge_parts", 0] = launches[-1]
    assert launches[-1].args["NUM_PARTS"] == 3 and len(kernels) == 1 + 2 * len(view.tiers)
    for (name, _), launch in kernels.items():
        if name != "prefill_tile":  # compiled by `test_compile.py`
            ops, registers = instructions(launch.compile(90).asm["cubin"], tmp_path)
            assert registers <= 128 and not [op for op in ops if op.startswith(("LDL", "STL"))], name
            assert any(op.startswith("STG") and "128" in op for op in ops), name
