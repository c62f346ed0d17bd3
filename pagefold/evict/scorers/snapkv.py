"""Keep what the last queries look at, and its neighbours."""

from typing import ClassVar

from torch import Tensor

from pagefold.evict.scorer import SCORERS, ScoreContext
from pagefold.evict.scorers._common import max_pool_rows, require_kernel
from pagefold.store.format import Plane


@SCORERS.add
class SnapKV:
    """score = max_pool(window attention) over the rows (SnapKV, arXiv 2404.14469).

    The attention is causal inside the window and normalised over all rows: the max over the query heads of the KV
    head, then the mean over the window.

    kernel   rows a pooling step looks at, odd
    """

    name: ClassVar[str] = "snapkv"
    needs_window: ClassVar[bool] = True
    never_waits: ClassVar[bool] = True
    reads_rows: ClassVar[bool] = False
    state: ClassVar[dict[str, Plane]] = {}

    kernel: int = 7

    def __post_init__(self):
        require_kernel(self.kernel)

    def score(self, ctx: ScoreContext) -> Tensor:
        return max_pool_rows(ctx.rows.attention("max"), ctx.valid, self.kernel)
