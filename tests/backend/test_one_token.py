"""Products of one token equal torch's, the kernel interpreted on the CPU.

The interpreter must be chosen before kernels are defined, so a plain run starts this file again in its own process.
"""

# ruff: noqa: E402 - what is imported depends on Triton being there

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs the package triton")

from pagefold.backends.torch_ops import TorchOps
from pagefold.backends.triton.backend import TritonBackend
from pagefold.backends.triton.one_token import HELD_LOADS, WIDTH, held_product
from tests.interpreted import assert_passes_interpreted, interpreted, plain


@pytest.mark.slow
@plain
def test_in_the_interpreter():
    assert_passes_interpreted(__file__)


@interpreted
@pytest.mark.parametrize("n, k", [(24, 64), (19, 1500), (5, HELD_LOADS // 2 * WIDTH + 8)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_equal_those_of_torch(n, k, biased):
    x, norm = torch.randn(1, k), (torch.rand(k), 1e-5)
    for gate in (False, True):
        weight, bias = torch.randn(n * (1 + gate), k) / k**0.5, torch.randn(n * (1 + gate)) if biased else None
        for normed in (None, norm):
            got = TritonBackend().product(x, weight, bias, gate=gate, norm=normed)
            torch.testing.assert_close(got, TorchOps().product(x, weight, bias, gate=gate, norm=normed))
    sums, weight, bias = torch.randn(1, n), torch.randn(n, k) / k**0.5, torch.randn(n) if biased else None
    want = TorchOps().product(x, weight, bias, add_to=sums.clone())
    assert TritonBackend().product(x, weight, bias, add_to=sums) is sums
    torch.testing.assert_close(sums, want)


@interpreted
def test_a_row_too_long_to_be_held_is_left_to_the_library():
    x, weight = torch.randn(1, HELD_LOADS * WIDTH + 1), torch.randn(3, HELD_LOADS * WIDTH + 1)
    assert held_product(x, weight, None, None, False, None) is None
    torch.testing.assert_close(TritonBackend().product(x, weight, None), x @ weight.T)
