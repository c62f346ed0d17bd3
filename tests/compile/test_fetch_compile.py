"""Kernels between products fetch the next weight where a device can, and are themselves where it cannot."""

# ruff: noqa: E402 - what is imported depends on Triton being there and compiling

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs the package triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted, not compiled", allow_module_level=True)

from pagefold.backends.triton import attend_decode, deal, layer_ops
from pagefold.backends.triton.layer_ops import FETCHERS, TritonOps
from pagefold.models.layers import Linear
from tests.compile.test_compile import Launch, Recorder, launches_of
from tests.compile.test_sampling_compile import machine_code


def launches(monkeypatch, call: str) -> list[Launch]:
    if call in ("append", "decode", "decode evenly"):
        return launches_of(monkeypatch, call, "int4", None, 128)
    found: list[Launch] = []
    for name in ("norm_rows", "gate_rows"):
        monkeypatch.setattr(layer_ops, name, Recorder(getattr(layer_ops, name), found))
    x = torch.zeros(8, 512, dtype=torch.bfloat16)
    TritonOps().add_rms_norm(x, x, torch.ones(512), 1e-6)
    TritonOps().silu_mul(x)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("call", ["append", "decode", "decode evenly", "norm and gate"])
def test_fetching_is_one_instruction(monkeypatch, tmp_path, call):
    kernels = (layer_ops.append_heads, layer_ops.norm_rows, layer_ops.gate_rows)
    kernels += (attend_decode.merge_splits, deal.merge_dealt)
    found = [launch for launch in launches(monkeypatch, call) if launch.kernel in kernels]
    assert found
    for launch in found:
        for capability, programs in ((90, FETCHERS), (90, 0), (80, 0)):
            launch.args["FETCH"] = programs
            ops, _ = machine_code(launch.compile(capability).asm["cubin"], tmp_path)
            assert sum(op.startswith("UBLKPF") for op in ops) == bool(programs), (launch.kernel.__name__, capability)


def test_what_is_announced_is_fetched_once_and_only_by_small_batches(monkeypatch):
    monkeypatch.setattr(layer_ops, "starts_ahead", lambda _: True)
    monkeypatch.setattr(layer_ops, "interpreted", lambda: False)
    found: list[Launch] = []
    monkeypatch.setattr(layer_ops, "norm_rows", Recorder(layer_ops.norm_rows, found))
    ops, product = TritonOps(), Linear(torch.zeros(64, 16, dtype=torch.float64))
    for num_tokens, announced in ((4, True), (4, False), (layer_ops.FETCHED_BY + 1, True), (4, False)):
        if announced:
            ops.read_soon(product)
        ops.rms_norm(torch.zeros(num_tokens, 16), torch.ones(16), 1e-6)
    assert [launch.args["FETCH"] for launch in found] == [FETCHERS, 0, 0, 0]
    assert found[0].args["soon"] is product.weight and found[0].args["num_soon"] == 64 * 16 * 8
