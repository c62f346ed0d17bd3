"""Keep rows whose keys are unlike the others."""

from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from pagefold.evict.scorer import SCORERS, ScoreContext
from pagefold.evict.scorers._common import unit_rows
from pagefold.store.format import Plane


@SCORERS.add
class KeyDiff:
    """score = -cos(k, anchor), anchor = the mean of the source rows' normalised keys (KeyDiff, arXiv 2504.15364)."""

    name: ClassVar[str] = "keydiff"
    needs_window: ClassVar[bool] = False
    never_waits: ClassVar[bool] = True
    state: ClassVar[dict[str, Plane]] = {}

    def score(self, ctx: ScoreContext) -> Tensor:
        keys = unit_rows(ctx.rows.keys(), ctx.valid)
        # The anchor's length does not matter, so the sum does for the mean.
        anchor = F.normalize(keys.sum(-2), dim=-1, eps=1e-6)
        return -(keys @ anchor[..., None]).squeeze(-1)
