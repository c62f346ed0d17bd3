"""Products of a few tokens equal torch's, the kernel interpreted on the CPU.

The interpreter must be chosen before kernels are defined, so a plain run starts this file again in its own process.
"""

# ruff: noqa: E402 - what is imported depends on Triton being there

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="needs the package triton")

from pagefold.backends.torch_ops import TorchOps
from pagefold.backends.triton.few_rows import HELD_TOKENS, MAX_TOKENS, product

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_in_the_interpreter():
    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton 3.6 needs numpy < 2.4")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(
        command, check=False, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-4000:]


@pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
@pytest.mark.parametrize("num_tokens", [1, HELD_TOKENS, HELD_TOKENS + 1, MAX_TOKENS])
@pytest.mark.parametrize("n, k", [(24, 64), (19, 1500)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_equal_those_of_torch(num_tokens, n, k, biased):
    x, norm = torch.randn(num_tokens, k), (torch.rand(k), 1e-5)
    for gate in (False, True):
        weight, bias = torch.randn(n * (1 + gate), k) / k**0.5, torch.randn(n * (1 + gate)) if biased else None
        for normed in (None, norm):
            got = product(x, weight, bias, gate=gate, norm=normed)
            torch.testing.assert_close(got, TorchOps().product(x, weight, bias, gate=gate, norm=normed))
    sums, weight, bias = torch.randn(num_tokens, n), torch.randn(n, k) / k**0.5, torch.randn(n) if biased else None
    want = TorchOps().product(x, weight, bias, add_to=sums.clone())
    assert product(x, weight, bias, add_to=sums) is sums
    torch.testing.assert_close(sums, want)
