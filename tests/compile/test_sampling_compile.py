"""The kernels that draw compile for real devices on a machine that has none, within their limits."""

# ruff: noqa: E402 - what is imported depends on Triton being there and compiling

import re
import subprocess

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="needs the package triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted, not compiled", allow_module_level=True)

from pagefold.backends.triton import sampling
from pagefold.runner.device_sampler import BLOCK
from pagefold.runner.sampler import race_salts
from tests.compile.test_compile import TOOLS, Launch, Recorder

VOCAB = 151_936
MAX_REGISTERS = {"scan_rows": 80, "finish_rows": 128}  # so that 800 and 512 threads fit on a multiprocessor
MAX_PER_LOGIT = 66  # lane-instructions of `scan_rows`: at 30 T/s, 512 rows of 151,936 take a fifth of a millisecond


def launches(monkeypatch, dtype: torch.dtype) -> list[Launch]:
    found: list[Launch] = []
    for name in MAX_REGISTERS:
        monkeypatch.setattr(sampling, name, Recorder(getattr(sampling, name), found))
    rules = torch.from_numpy(sampling.pack_rules(*[np.zeros(2)] * 6))
    sampling.draw(torch.zeros(2, VOCAB, dtype=dtype), torch.zeros(0, VOCAB), rules, race_salts(VOCAB), BLOCK)
    return found


def machine_code(cubin: bytes, folder) -> tuple[list[str], int]:
    """(opcodes, registers)"""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    text = subprocess.run([TOOLS / "nvdisasm", "-c", path], capture_output=True, text=True, check=True).stdout
    usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", path], capture_output=True, text=True, check=True).stdout
    ops = re.findall(r"^\s+(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*).*;", text, re.MULTILINE)
    return ops, int(re.search(r"REG:(\d+)", usage)[1])


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernels_compile_within_the_limits_of_the_device(monkeypatch, tmp_path, dtype, capability):
    """No spills, wide loads, and no more instructions than the time of a draw allows."""
    for launch in launches(monkeypatch, dtype):
        name = launch.kernel.__name__
        ops, registers = machine_code(launch.compile(capability).asm["cubin"], tmp_path)
        assert registers <= MAX_REGISTERS[name], name
        assert not [op for op in ops if op.startswith(("LDL", "STL"))], f"{name} spills"
        assert any(op.startswith("LDG") and "128" in op for op in ops)
        if name == "scan_rows":
            assert len(ops) * launch.args["num_warps"] * 32 <= MAX_PER_LOGIT * BLOCK
