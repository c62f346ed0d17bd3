"""Keep what queries to come are expected to look at."""

from typing import ClassVar

from torch import Tensor

from pagefold.evict.scorer import SCORERS, ScoreContext
from pagefold.evict.scorers._common import require, shares_of_heads
from pagefold.store.format import Plane


@SCORERS.add
class ExpectedAttention:
    """score = (expected attention + eps) * |v| (Expected Attention, arXiv 2510.00636).

    Expected attention is the softmax over the source rows of `RowSource.expected_logits`, and its mean over the query
    heads of the KV head.

    horizon   positions ahead that are averaged over
    eps       share of |v| that counts without any attention
    """

    name: ClassVar[str] = "expected"
    needs_window: ClassVar[bool] = True
    never_waits: ClassVar[bool] = True
    reads_rows: ClassVar[bool] = False
    state: ClassVar[dict[str, Plane]] = {}

    horizon: int = 512
    eps: float = 0.01

    def __post_init__(self):
        require(1 <= self.horizon <= 1 << 16, "horizon", self.horizon, "an integer in [1, 65536]")
        require(self.eps >= 0, "eps", self.eps, "a number >= 0")

    def score(self, ctx: ScoreContext) -> Tensor:
        attention = shares_of_heads(ctx.rows.expected_logits(self.horizon), ctx.valid)
        return (attention + self.eps) * ctx.rows.value_lengths()
