"""What scorers compute along rows equals torch's, the kernels interpreted on the CPU.

The interpreter must be chosen before kernels are defined, so a plain run starts this file again in its own process.
"""

# ruff: noqa: E402 - what is imported depends on Triton being there

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs the package triton")

from pagefold.evict import row_kernels
from pagefold.evict.scorers._common import (
    max_pool_rows,
    minus_softmax,
    shares_of_heads,
    weighed,
    with_memory,
)
from tests.interpreted import assert_passes_interpreted, interpreted, plain


@pytest.mark.slow
@plain
def test_in_the_interpreter():
    assert_passes_interpreted(__file__)


def rows_of(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows of jobs of unequal lengths, and which of them are valid; padding is no number."""
    x = torch.rand(*shape)
    lengths = torch.randint(1, shape[-1] + 1, shape[:1])
    lengths[0] = shape[-1]
    valid = (torch.arange(shape[-1]) < lengths[:, None]).view(shape[0], *[1] * (len(shape) - 2), shape[-1])
    return x.masked_fill(~valid, torch.nan), valid


@interpreted
@pytest.mark.parametrize("shape", [(3, 2, 5), (2, 3, 2, 40), (2, 2, row_kernels.TILE + 70)])
def test_pooling_is_what_torch_gives(shape):
    x, valid = rows_of(*shape)
    for kernel in (1, 7, 2 * shape[-1] - 1) if shape[-1] < 100 else (7,):
        ours = row_kernels.pooled(-x, valid, kernel).masked_fill(~valid, 0)
        flat, mask = -x.flatten(1, -2), valid.flatten(1, -2)
        theirs = max_pool_rows(flat, mask, kernel).view(shape).masked_fill(~valid, 0)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@interpreted
@pytest.mark.parametrize("shape", [(3, 2, 5), (2, 3, 40), (2, 2, row_kernels.TILE + 70)])
def test_scores_with_what_else_counts(shape):
    x, valid = rows_of(*shape)
    scores, before = torch.rand(2, *shape)

    def same(ours, theirs):
        torch.testing.assert_close(*(y.masked_fill(~valid, 0) for y in (ours, theirs)))

    same(row_kernels.weighed(scores, 6.0, x, valid), weighed(scores, 6.0, x, valid))
    same(row_kernels.minus_softmax(scores, 0.2, x, valid, 5.0), minus_softmax(scores, 0.2, x, valid, 5.0))
    num_dropped, first = torch.arange(0, 200 * shape[0], 200), torch.arange(shape[0]) == 1
    before[1] = torch.nan  # of a first fold, which looks at none
    args = scores, before, num_dropped, first, 0.8 ** (1 / 128)
    same(row_kernels.with_memory(*args), with_memory(*args))
    assert torch.equal(with_memory(*args)[1], scores[1])


@interpreted
@pytest.mark.parametrize("shape", [(3, 2, 1, 5), (2, 3, 3, 40), (2, 2, 2, row_kernels.TILE + 70)])
def test_the_mean_of_the_query_heads_softmaxes(shape):
    x, valid = rows_of(*shape)
    ours = row_kernels.mean_shares(5 * x, valid[:, :, 0])
    torch.testing.assert_close(ours, shares_of_heads(5 * x, valid[:, :, 0]))
    torch.testing.assert_close(ours.sum(-1), torch.ones(shape[:2]))


@interpreted
def test_what_a_job_is_padded_to_changes_no_bit():
    x, valid = rows_of(1, 3, 100)
    wide, more = (
        torch.full((2, 3, row_kernels.TILE + 1), torch.nan),
        torch.zeros(2, 1, row_kernels.TILE + 1, dtype=torch.bool),
    )
    wide[1, :, :100], more[1, :, :100] = x[0], valid[0]
    scores = torch.rand(2, 3, row_kernels.TILE + 1)
    few = scores[1:, :, :100]
    alone, among = row_kernels.weighed(few, 6.0, x, valid), row_kernels.weighed(scores, 6.0, wide, more)
    assert torch.equal(among[1, :, :100], alone[0])
    alone = row_kernels.minus_softmax(few, 0.2, x, valid, 5.0)
    assert torch.equal(row_kernels.minus_softmax(scores, 0.2, wide, more, 5.0)[1, :, :100], alone[0])
    alone = row_kernels.mean_shares(x[:, :1, None].expand(-1, -1, 2, -1), valid)[0]
    among = row_kernels.mean_shares(wide[:, :1, None].expand(-1, -1, 2, -1), more)[1, :, :100]
    assert torch.equal(among, alone)


@interpreted
def test_a_score_that_is_no_number_stays_visible():
    x, valid = torch.rand(1, 1, 50), torch.ones(1, 1, 50, dtype=torch.bool)
    x[0, 0, 20] = torch.nan
    nothing, one = torch.zeros_like(x), torch.ones(1, dtype=torch.int64)
    for args in ((x, nothing), (nothing, x)):
        seen = row_kernels.with_memory(*args, one, one == 0, 0.8)[0, 0]
        assert seen.isnan().nonzero().flatten().tolist() == [20]
    for ours, theirs in (
        (row_kernels.mean_shares(x[:, :, None], valid), shares_of_heads(x[:, :, None], valid)),
        (row_kernels.weighed(nothing, 6.0, x, valid), weighed(nothing, 6.0, x, valid)),
    ):
        assert ours.isnan().all() and theirs.isnan().all()
    assert row_kernels.pooled(x, valid, 7)[0, 0].isnan().nonzero().flatten().tolist() == list(range(17, 24))
