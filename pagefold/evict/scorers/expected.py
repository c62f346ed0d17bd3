"""Keep what queries to come are expected to look at."""

from typing import ClassVar

import torch
from torch import Tensor

from pagefold.evict.scorer import SCORERS, ScoreContext
from pagefold.evict.scorers._common import require, softmax_rows
from pagefold.store.format import Plane


@SCORERS.add
class ExpectedAttention:
    """score = (expected attention + eps) * |v| (Expected Attention, arXiv 2510.00636).

    A query head's future queries are taken as normal, with the mean and the covariance that the window's queries have
    before RoPE. With R the mean rotation over the next `horizon` positions, k' = R^T k, and s the softmax scale,

        log E[exp(s q.k)] = s mean.k' + s^2 k'^T cov k' / 2

    is the logit of a row; a softmax over the source rows and the mean over the query heads of the KV head follow.

    horizon   positions ahead that are averaged over
    eps       share of |v| that counts without any attention
    """

    name: ClassVar[str] = "expected"
    needs_window: ClassVar[bool] = True
    never_waits: ClassVar[bool] = True
    state: ClassVar[dict[str, Plane]] = {}

    horizon: int = 512
    eps: float = 0.01

    def __post_init__(self):
        require(1 <= self.horizon <= 1 << 16, "horizon", self.horizon, "an integer in [1, 65536]")
        require(self.eps >= 0, "eps", self.eps, "a number >= 0")

    def score(self, ctx: ScoreContext) -> Tensor:
        queries, keys = ctx.rows.queries(), ctx.rows.keys()
        window, query_heads = queries.shape[2:4]
        past = ctx.num_tokens[:, None] - 1 - torch.arange(window - 1, -1, -1, device=keys.device) * ctx.window_stride
        future = torch.arange(self.horizon, device=keys.device) + ctx.num_tokens[:, None]
        # RoPE turned q by its position and would turn a mean query by R: both are undone by the opposite sine.
        cos, sin = _rope(past, ctx.inv_freq, queries.dtype)
        queries = _turn(queries, cos[:, None, :, None], -sin[:, None, :, None])
        cos, sin = _rope(future, ctx.inv_freq, keys.dtype)
        keys = _turn(keys, cos.mean(1)[:, None, None], -sin.mean(1)[:, None, None])

        attention = torch.zeros_like(keys[..., 0])
        for head in range(query_heads):
            # Mean and variance over the window of q.k' are mean.k' and k'^T cov k'.
            logits = (queries[..., head, :] @ keys.mT) * ctx.scale
            variance, mean = torch.var_mean(logits, dim=2, correction=0)
            attention += softmax_rows(mean + variance / 2, ctx.valid)
        return (attention / query_heads + self.eps) * ctx.rows.value_lengths()


def _rope(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of int64[J, P] positions: float[J, P, D / 2]. Angles are large, hence float64 until here."""
    angle = positions[..., None].double() * inv_freq.double()
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + D / 2]): the half-split form of RoPE."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
