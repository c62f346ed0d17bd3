"""Keep what the newest query looks at."""

from typing import ClassVar

from torch import Tensor

from pagefold.evict.scorer import SCORERS, ScoreContext
from pagefold.evict.scorers._common import shares_of_heads
from pagefold.store.format import Plane


@SCORERS.add
class Tova:
    """score = attention of the last query, averaged over query heads (TOVA, arXiv 2401.06104).

    The softmax runs over the source rows: the keys of an open last page are not under judgement. The average is over
    the query heads of all KV heads of the layer that sit in the job, so that with a layout that keeps a layer's heads
    together they all keep the same rows; a head that is alone of its layer averages over its own query heads.
    """

    name: ClassVar[str] = "tova"
    needs_window: ClassVar[bool] = True
    never_waits: ClassVar[bool] = True
    state: ClassVar[dict[str, Plane]] = {}

    def score(self, ctx: ScoreContext) -> Tensor:
        query = ctx.rows.queries()[:, :, -1]
        logits = (query @ ctx.rows.keys().mT) * ctx.scale
        attention = shares_of_heads(logits, ctx.valid)
        same_layer = (ctx.layers[:, :, None] == ctx.layers[:, None]).to(attention.dtype)
        return (same_layer @ attention) / same_layer.sum(-1, keepdim=True)
