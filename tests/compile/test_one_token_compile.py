"""Products of one token compile for real devices on a machine that has none, within their limits."""

# ruff: noqa: E402 - what is imported depends on Triton being there and compiling

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs the package triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted, not compiled", allow_module_level=True)

from pagefold.backends.triton import one_token
from pagefold.backends.triton.backend import TritonBackend
from tests.compile.test_compile import SHARED, Launch, Recorder
from tests.compile.test_sampling_compile import machine_code

KINDS: dict[str, tuple[int, int, dict[str, Any]]] = {  # of Qwen3-4B: n, k and options
    "qkv": (6144, 2560, {"norm": True}),
    "o": (2560, 4096, {"add_to": True}),
    "gate_up": (9728, 2560, {"norm": True, "gate": True}),
    "down": (2560, 9728, {"add_to": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kind", KINDS)
def test_products_keep_many_bytes_in_flight(monkeypatch, tmp_path, kind, capability):
    """By wide loads of programs of which several fit on a multiprocessor."""
    found: list[Launch] = []
    monkeypatch.setattr(one_token, "held_rows", Recorder(one_token.held_rows, found))
    n, k, options = KINDS[kind]
    options = dict(options)
    x = torch.zeros(1, k, dtype=torch.bfloat16)
    if "norm" in options:
        options["norm"] = torch.zeros(k), 1e-6
    if "add_to" in options:
        options["add_to"] = torch.zeros(1, n, dtype=torch.bfloat16)
    weight = torch.empty(n * (1 + options.get("gate", False)), k, dtype=torch.bfloat16)
    TritonBackend().product(x, weight, None, **options)
    (launch,) = found
    launch.args["AHEAD"] = capability >= 90
    compiled = launch.compile(capability)
    ops, registers = machine_code(compiled.asm["cubin"], tmp_path)
    assert sum(op.startswith("LDL") for op in ops) <= 2  # once a program, if at all
    programs = min(65536 // (registers * 128), SHARED[capability] // max(1, compiled.metadata.shared))
    loads = sum(op.startswith("LDG") and "128" in op for op in ops)
    before = next((i for i, op in enumerate(ops) if op == "ACQBULK"), len(ops))
    early = sum(op.startswith("LDG") and "128" in op for op in ops[:before])
    assert loads * 2048 * programs >= 64 << 10 and (capability < 90 or early >= loads // 3)
