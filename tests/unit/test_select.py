"""Selection is an exact, deterministic top-k with protected rows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefold.core.types import InputError
from pagefold.evict.select import check_keep, select_ragged, select_rows

VALUES = [0.0, -0.0, 1.0, -1.0, 2.5, 1e-45, -1e-45, 3e38, -3e38, math.inf, -math.inf, math.nan]


def select(scores, num_src, num_rows, keep_rows, sink_tokens=0, window=0):
    return select_rows(scores, torch.tensor(num_src), torch.tensor(num_rows), keep_rows, sink_tokens, window)


def oracle(
    scores: list[float], num_src: int, num_rows: int, keep_rows: int, sink_tokens: int, window: int
) -> list[int]:
    def rank(row: int):
        protected = row < sink_tokens or row >= num_rows - window
        real = not math.isnan(scores[row])
        return (protected, real, scores[row] if real else 0.0, row)

    return sorted(sorted(range(num_src), key=rank, reverse=True)[:keep_rows])


@st.composite
def jobs(draw):
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    num_jobs, columns = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    num_src = draw(st.lists(st.integers(4, 20), min_size=num_jobs, max_size=num_jobs))
    tail = draw(st.lists(st.integers(0, 5), min_size=num_jobs, max_size=num_jobs))
    sink_tokens, window = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    keep_rows = draw(st.integers(sink_tokens + window, min(num_src)).filter(bool))
    size = num_jobs * columns * max(num_src)
    values = draw(st.lists(st.sampled_from(VALUES), min_size=size, max_size=size))
    scores = torch.tensor(values, dtype=dtype).view(num_jobs, columns, max(num_src))
    return scores, num_src, [a + b for a, b in zip(num_src, tail, strict=True)], keep_rows, sink_tokens, window


@settings(max_examples=300, deadline=None)
@given(jobs())
def test_selection_equals_a_sort_with_ties_to_the_newest(job):
    scores, num_src, num_rows, keep_rows, sink_tokens, window = job
    keep = select(scores, num_src, num_rows, keep_rows, sink_tokens, window)
    assert keep.dtype == torch.int64
    assert (keep.diff(dim=-1) > 0).all()
    for j in range(scores.shape[0]):
        for c in range(scores.shape[1]):
            expected = oracle(scores[j, c].tolist(), num_src[j], num_rows[j], keep_rows, sink_tokens, window)
            assert keep[j, c].tolist() == expected


def test_neighbours_and_padding_never_change_a_jobs_rows():
    scores = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 3, 32)).round(1))
    alone = select(scores, [32], [35], 16, 2, 4)
    padded = torch.cat([torch.cat([scores, torch.full((1, 3, 9), math.inf)], -1), torch.full((1, 3, 41), math.nan)])
    assert torch.equal(select(padded, [32, 41], [35, 41], 16, 2, 4)[:1], alone)


def test_a_window_beyond_the_source_rows_protects_only_what_is_left():
    scores = torch.zeros(1, 1, 8)
    scores[0, 0, :3] = 1.0
    # Rows 6..9 are the window; of those 6 and 7 are source rows.
    assert select(scores, [8], [10], 4, 1, 4)[0, 0].tolist() == [0, 2, 6, 7]
    assert select(scores, [8], [20], 2, 0, 4)[0, 0].tolist() == [1, 2]


def test_keeping_all_rows_is_the_identity():
    assert select(torch.randn(2, 2, 8), [8, 8], [8, 8], 8, 1, 2).tolist() == [[list(range(8))] * 2] * 2


@pytest.mark.parametrize(
    ("keep_rows", "message"),
    [
        (5, "keep_rows: got 5, must be at least the 6 protected rows"),
        (9, "keep_rows: got 9, must be at most the 8 source"),
    ],
)
def test_impossible_counts_are_refused(keep_rows, message):
    with pytest.raises(InputError, match=message):
        select(torch.zeros(2, 1, 16), [8, 16], [8, 16], keep_rows, 2, 4)


@given(st.integers(1, 30), st.integers(0, 9), st.integers(0, 5), st.integers(0, 5), st.integers(0, 32))
def test_the_limits_are_those_of_the_rows_themselves(num_src, tail, sink_tokens, window, keep_rows):
    num_rows = num_src + tail
    protected = sum(row < sink_tokens or row >= num_rows - window for row in range(num_src))
    if protected <= keep_rows <= num_src:
        check_keep(keep_rows, num_src, num_rows, sink_tokens, window)
    else:
        with pytest.raises(InputError):
            check_keep(keep_rows, num_src, num_rows, sink_tokens, window)


@given(st.lists(st.tuples(st.integers(4, 12), st.integers(2, 4)), min_size=1, max_size=4))
def test_jobs_that_keep_different_numbers_of_rows_keep_what_they_keep_alone(jobs):
    num_src, counts = (list(column) for column in zip(*jobs, strict=True))
    scores = torch.randn(len(jobs), 2, max(num_src)).round(decimals=1)
    lengths = torch.tensor(num_src)
    keep = select_ragged(scores, lengths, lengths, counts, 1, 1)
    assert keep.shape == (len(jobs), 2, max(counts))
    for j, count in enumerate(counts):
        assert torch.equal(keep[j, :, :count], select(scores[j : j + 1], [num_src[j]], [num_src[j]], count, 1, 1)[0])
