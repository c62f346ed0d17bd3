"""Keep the newest rows: with sinks this is StreamingLLM."""

from typing import ClassVar

import torch
from torch import Tensor

from pagefold.evict.scorer import SCORERS, ScoreContext
from pagefold.store.format import Plane


@SCORERS.add
class Recency:
    """score = row index (StreamingLLM, arXiv 2309.17453; the sinks are `sink_tokens`)."""

    name: ClassVar[str] = "recency"
    needs_window: ClassVar[bool] = False
    never_waits: ClassVar[bool] = True
    reads_rows: ClassVar[bool] = False
    state: ClassVar[dict[str, Plane]] = {}

    def score(self, ctx: ScoreContext) -> Tensor:
        row = torch.arange(ctx.max_src, dtype=torch.float32, device=ctx.num_src.device)
        return row.expand(*ctx.layers.shape, -1)
