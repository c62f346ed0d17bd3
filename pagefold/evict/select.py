"""Selection: which rows survive a compaction, given a score for each."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagefold.core.types import InputError


def select_rows(
    scores: Tensor,
    num_src: Tensor,
    num_rows: Tensor,
    keep_rows: int,
    sink_tokens: int,
    window: int,
) -> Tensor:
    """The `keep_rows` best source rows of every head, in order of age.

        scores        float[J, C, N]   float32 or float64, higher = keep; values on padding do not matter
        num_src       int64[J]         source rows of each job; rows beyond are padding
        num_rows      int64[J]         rows of the head in all, an open last page included
        keep_rows     rows kept per head, the same for every job
        sink_tokens   leading rows that are kept whatever their score
        window        the last `window` of the `num_rows` rows are kept, as far as they are source rows

    Exact and deterministic: equal scores go to the newer row, NaN ranks below every other score of a real row, and a
    job's rows depend on nothing but its own scores. Returns int64[J, C, keep_rows], ascending.

    Raises InputError if `keep_rows` is smaller than the number of protected rows or larger than that of source rows.
    """
    num_jobs, num_columns, max_src = scores.shape
    row = torch.arange(max_src, device=scores.device)
    real = row < num_src[:, None]
    protected = real & ((row < sink_tokens) | (row >= (num_rows - window)[:, None]))
    for length, rows in zip(num_src.tolist(), num_rows.tolist()):
        check_keep(keep_rows, length, rows, sink_tokens, window)

    ranks = _ranks(scores)
    info = torch.iinfo(ranks.dtype)
    ranks = ranks.masked_fill(protected[:, None], info.max).masked_fill(~real[:, None], info.min)

    # Rows above the k-th rank are kept, and of those that share it as many of the newest as there is room for.
    lowest_kept = ranks.kthvalue(max_src - keep_rows + 1, dim=-1, keepdim=True).values
    above, tied = ranks > lowest_kept, ranks == lowest_kept
    room = keep_rows - above.sum(-1, keepdim=True)
    ties_from_newest = tied.flip(-1).cumsum(-1).flip(-1)
    keep = above | (tied & (ties_from_newest <= room))

    # The i-th kept row goes to place i; all others meet in one place more, which is cut off.
    place = torch.where(keep, keep.cumsum(-1) - 1, keep_rows)
    rows = torch.empty(num_jobs, num_columns, keep_rows + 1, dtype=torch.int64, device=scores.device)
    return rows.scatter_(-1, place, row.expand_as(place))[..., :keep_rows]


def select_ragged(
    scores: Tensor, num_src: Tensor, num_rows: Tensor, keep_rows: Sequence[int], sink_tokens: int, window: int
) -> Tensor:
    """`select_rows` of jobs that keep `keep_rows[j]` rows each: int64[J, C, max(keep_rows)], 0 past a job's last."""
    if len(set(keep_rows)) == 1:
        return select_rows(scores, num_src, num_rows, keep_rows[0], sink_tokens, window)
    out = torch.zeros(*scores.shape[:2], max(keep_rows), dtype=torch.int64, device=scores.device)
    for j, count in enumerate(keep_rows):
        one = slice(j, j + 1)
        out[one, :, :count] = select_rows(scores[one], num_src[one], num_rows[one], count, sink_tokens, window)
    return out


def check_keep(keep_rows: int, num_src: int, num_rows: int, sink_tokens: int, window: int) -> None:
    """Raise InputError unless a job can keep so many of its `num_src` source rows, of `num_rows` in all."""
    first_of_window = min(max(num_rows - window, 0), num_src)
    num_protected = min(sink_tokens, first_of_window) + num_src - first_of_window
    if keep_rows < num_protected:
        limit = f"the {num_protected} protected rows (sink_tokens={sink_tokens}, window={window})"
        raise InputError("keep_rows", f"got {keep_rows}, must be at least {limit}")
    if keep_rows > num_src:
        raise InputError("keep_rows", f"got {keep_rows}, must be at most the {num_src} source rows")


def _ranks(scores: Tensor) -> Tensor:
    """Integers in the order of the scores, so that NaN, protected rows and padding have places of their own.

    From the least: padding (set by the caller), NaN, -inf, the finite scores, inf, protected rows.
    """
    integer = {torch.float32: torch.int32, torch.float64: torch.int64}[scores.dtype]
    info = torch.iinfo(integer)
    bits = (scores + 0.0).view(integer)  # -0.0 becomes 0.0
    ranks = torch.where(bits < 0, bits ^ info.max, bits)  # the bits of negative floats count downwards
    return ranks.masked_fill(scores.isnan(), info.min + 1)
