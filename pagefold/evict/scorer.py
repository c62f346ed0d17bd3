"""What is worth keeping: the contract of a scorer, and what it may look at."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from pagefold.core.registry import Registry
from pagefold.store.format import Plane

SCORERS = Registry("scorer", "pagefold.evict.scorers")


class RowSource(Protocol):
    """Lazy access to the rows under judgement; a backend answers, so a scorer never sees pages or formats.

    J jobs, C heads (columns) each, N source rows (padded to the longest job), D channels.
    """

    def attention(self, across: str = "max") -> Tensor:
        """Window attention float32[J, C, N]: softmax per query head over all rows, max (or mean) over the query heads
        of the KV head, mean over the window, 0 for queries of older tokens. Needs `needs_window`."""
        ...

    def expected_logits(self, horizon: int) -> Tensor:
        """log E[exp(logit)] of each row for queries of the next `horizon` positions, float32[J, C, R, N], R query heads
        per KV head: these queries are taken as normal, with the mean and the covariance that the window's queries have
        before RoPE, and turned by RoPE as it turns on average at those positions. So it is the mean of the logits of
        the window's queries, turned so, plus half their variance (Expected Attention, arXiv 2510.00636). Any number on
        padding. Needs `needs_window`."""
        ...

    def queries(self) -> Tensor:
        """The window's queries, oldest first, post-RoPE: float32[J, C, w, R, D], R query heads per KV head."""
        ...

    def keys(self) -> Tensor:
        """float32[J, C, N, D], post-RoPE."""
        ...

    def values(self) -> Tensor:
        """float32[J, C, N, D]."""
        ...

    def key_lengths(self) -> Tensor:
        """|k|, float32[J, C, N]: cheaper than keys."""
        ...

    def value_lengths(self) -> Tensor:
        """|v|, float32[J, C, N]: cheaper than values."""
        ...

    def crowding(self, threshold: float, block: int | None = None) -> Tensor:
        """How much a row's key repeats the others: the sum of its cosines with them, float32[J, C, N].

        For each row, the newest other row more similar to it than `threshold` (>= 0) does not count that cosine: of
        rows that repeat each other the newest looks least redundant (R-KV, arXiv 2505.24133). Three identical keys
        give (2, 1, 0). Rows are compared inside blocks of `block` consecutive source rows, or all with all."""
        ...

    def state(self, name: str) -> Tensor:
        """The scorer's own per-row memory, float32[J, C, N, width]."""
        ...


@dataclass
class ScoreContext:
    """One batch of compactions, as a scorer sees it.

    rows          access to keys, values, attention and state
    num_src       int64[J]      source rows of each job; rows beyond are padding
    num_rows      int64[J]      rows of the head in all: the source rows and those of an open last page
    num_dropped   int64[J]      source rows that will go: as many as came since the compaction before, unless this
                                is the first or the budget changed in between
    num_tokens    int64[J]      tokens of the sequence; the window's last query is at position num_tokens - 1
    first         bool[J]       this is the request's first compaction
    layers        int64[J, C]   layer of each column
    heads         int64[J, C]   KV head of each column
    inv_freq      float[rotary_dim / 2]   RoPE frequencies
    scale         float         softmax scale of the model's attention
    sink_tokens   leading rows that selection protects
    window        trailing rows that selection protects
    window_stride tokens from one query of the window to the next
    new_state     {state name: float32[J, C, N, width]}: what a scorer puts here travels with the kept rows
    max_src       N, the largest of num_src, on the host; where it is not given num_src is read, and so waited for
    """

    rows: RowSource
    num_src: Tensor
    num_rows: Tensor
    num_dropped: Tensor
    num_tokens: Tensor
    first: Tensor
    layers: Tensor
    heads: Tensor
    inv_freq: Tensor
    scale: float
    sink_tokens: int
    window: int
    window_stride: int = 1
    new_state: dict[str, Tensor] = field(default_factory=dict)
    max_src: int = 0

    def __post_init__(self):
        self.max_src = self.max_src or int(self.num_src.max())

    @cached_property
    def valid(self) -> Tensor:
        """bool[J, 1, N]: False on padding."""
        return (torch.arange(self.max_src, device=self.num_src.device) < self.num_src[:, None])[:, None]


class Scorer(Protocol):
    """Ranks rows; higher is kept. A plug-in is a frozen dataclass of options, so it holds no state between calls.

    needs_window   queries of recent tokens must have been stored (`rows.attention`, `rows.queries`)
    state          per-row planes the scorer keeps in the pages
    compares_rows  True if it asks for `rows.crowding` after anything else of the rows' keys, which then may cost less
    reads_rows     False if it never asks for `rows.keys` or `rows.values`, so that more heads fit into memory at once;
                   a scorer that does not say may ask
    never_waits    True if it never needs a number of the device on the host, so that what it launches can be captured
                   and launched again; a scorer that does not say may need one
    """

    name: ClassVar[str]
    needs_window: ClassVar[bool]
    state: ClassVar[dict[str, Plane]]

    def score(self, ctx: ScoreContext) -> Tensor:
        """float32[J, C, N], higher = keep. Values on padding do not matter."""
        ...
