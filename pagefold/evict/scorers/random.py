"""Keep rows at random: the baseline any scorer has to beat."""

from typing import ClassVar

import torch
from torch import Tensor

from pagefold.evict.scorer import SCORERS, ScoreContext
from pagefold.store.format import Plane


@SCORERS.add
class Random:
    """score = uniform in [0, 1), a hash of (seed, tokens of the sequence, layer, head, row).

    No generator is involved, so a job scores the same in any batch, on any device.

    seed   another seed, another draw; its low 32 bits count
    """

    name: ClassVar[str] = "random"
    needs_window: ClassVar[bool] = False
    never_waits: ClassVar[bool] = True
    reads_rows: ClassVar[bool] = False
    state: ClassVar[dict[str, Plane]] = {}

    seed: int = 0

    def score(self, ctx: ScoreContext) -> Tensor:
        seed = torch.full((), self.seed & 0xFFFFFFFF, device=ctx.num_src.device)  # filled there: nothing is copied
        row = torch.arange(ctx.max_src, device=ctx.num_src.device)
        hashed = _mix(seed)
        for part in (ctx.num_tokens[:, None, None], ctx.layers[..., None], ctx.heads[..., None], row):
            hashed = _mix(hashed ^ part)
        return (hashed >> 8).float() / 2**24  # 24 bits: exact in float32


def _mix(x: Tensor) -> Tensor:
    """Scramble the low 32 bits of an int64 (a bijection on them). Products stay below 2**63: no overflow."""
    x = (x + 0x9E3779B9) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)
