"""Products of a few tokens compile for real devices on a machine that has none, within their limits."""

# ruff: noqa: E402 - what is imported depends on Triton being there and compiling

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs the package triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted, not compiled", allow_module_level=True)

from pagefold.backends.triton import few_rows
from tests.compile.test_compile import Launch, Recorder
from tests.compile.test_sampling_compile import machine_code

KINDS = {"plain": {}, "norm": {"norm": True}, "gate": {"norm": True, "gate": True}, "add": {"add_to": True}}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, few_rows.MAX_TOKENS])
def test_products_read_wide_and_spill_nothing(monkeypatch, tmp_path, num_tokens, kind, capability):
    found: list[Launch] = []
    monkeypatch.setattr(few_rows, "product_rows", Recorder(few_rows.product_rows, found))
    x = torch.zeros(num_tokens, 2560, dtype=torch.bfloat16)
    options: dict = {name: value for name, value in KINDS[kind].items() if name == "gate"}
    if "norm" in KINDS[kind]:
        options["norm"] = torch.zeros(2560), 1e-6
    if "add_to" in KINDS[kind]:
        options["add_to"] = torch.zeros(num_tokens, 1024, dtype=torch.bfloat16)
    few_rows.product(x, torch.zeros(2048 if kind == "gate" else 1024, 2560, dtype=torch.bfloat16), None, **options)
    (launch,) = found
    launch.args["AHEAD"] = capability >= 90
    ops, registers = machine_code(launch.compile(capability).asm["cubin"], tmp_path)
    assert not [op for op in ops if op.startswith(("LDL", "STL"))]
    assert [op for op in ops if op.startswith("LDG") and "128" in op]
    assert registers <= 168
