"""Keep rows whose keys are short."""

from typing import ClassVar

from torch import Tensor

from pagefold.evict.scorer import SCORERS, ScoreContext
from pagefold.store.format import Plane


@SCORERS.add
class KeyNorm:
    """score = -|k|: short keys draw much attention (arXiv 2406.11430)."""

    name: ClassVar[str] = "keynorm"
    needs_window: ClassVar[bool] = False
    never_waits: ClassVar[bool] = True
    reads_rows: ClassVar[bool] = False
    state: ClassVar[dict[str, Plane]] = {}

    def score(self, ctx: ScoreContext) -> Tensor:
        return -ctx.rows.key_lengths()
