"""Keep what the last queries look at or looked at, and of rows that say the same the newest."""

from typing import ClassVar

import torch
from torch import Tensor

from pagefold.evict.scorer import SCORERS, ScoreContext
from pagefold.evict.scorers._common import max_pool_rows, minus_softmax, require, require_kernel, weighed, with_memory
from pagefold.store.format import Plane

POOLS = ("none", "once", "always")
REDUNDANCIES = ("none", "lightning", "full")


@SCORERS.add
class Zipage:
    """Window attention with a memory, minus redundancy (Zipage, arXiv 2603.08743).

    The memory comes from G-KV, the redundancy from R-KV.

        S    window attention: softmax per query head, max over the KV head's query heads, mean over the window
        S'   max(S, alpha^(n / block) * F), F being the row's S' at the compaction before and n the tokens since; S at a
             request's first compaction
        V    (S' + eps / N) times the length of the row's value, as a multiple of the mean one: what it adds to the
             output, and may add to that of other queries. N is the number of source rows
        R    softmax over the source rows of their crowding (`RowSource.crowding`), divided by tau and the rows compared
        Z    lam * V - (1 - lam) * R, or V without redundancy; S' is max-pooled first where `pool` says so

    V is not Zipage's, which has S' in its place, pools once and compares blocks of 256. Weights by values are from VATP
    (arXiv 2406.12335), attention for every row is from Expected Attention (arXiv 2510.00636).

    lam, tau          weights as above
    alpha             what is left of F after `block` tokens; 0 turns the memory off
    eps               attention that every row has besides, as a multiple of 1 / N; nothing without `values`
    pool              "none", "once" (at the first compaction of a request) or "always"
    kernel            rows a pooling step looks at, odd
    redundancy        "none", "lightning" (rows are compared inside blocks) or "full" (all pairs)
    threshold         cosine above which two rows are similar; above 1 none are
    block             consecutive source rows that lightning compares
    values            whether scores are weighted by the lengths of values
    """

    name: ClassVar[str] = "zipage"
    needs_window: ClassVar[bool] = True
    never_waits: ClassVar[bool] = True
    reads_rows: ClassVar[bool] = False
    state: ClassVar[dict[str, Plane]] = {"global_score": Plane(torch.float32, 1)}

    lam: float = 0.2
    tau: float = 0.4
    alpha: float = 0.8
    pool: str = "none"
    kernel: int = 5
    redundancy: str = "lightning"
    threshold: float = 0.5
    block: int = 128
    values: bool = True
    eps: float = 6.0

    def __post_init__(self):
        require(0 <= self.lam <= 1, "lam", self.lam, "a number in [0, 1]")
        require(self.tau > 0, "tau", self.tau, "a number > 0")
        require(0 <= self.alpha <= 1, "alpha", self.alpha, "a number in [0, 1]")
        require(self.eps >= 0, "eps", self.eps, "a number >= 0")
        require(self.pool in POOLS, "pool", self.pool, f"one of {', '.join(POOLS)}")
        require_kernel(self.kernel)
        require(self.redundancy in REDUNDANCIES, "redundancy", self.redundancy, f"one of {', '.join(REDUNDANCIES)}")
        require(self.threshold >= 0, "threshold", self.threshold, "a number >= 0")
        require(self.block >= 1, "block", self.block, "an integer >= 1")

    @property
    def compares_rows(self) -> bool:
        return self.redundancy != "none"

    def score(self, ctx: ScoreContext) -> Tensor:
        scores = self._remember(ctx, ctx.rows.attention("max"))
        if self.pool != "none":
            pooled = max_pool_rows(scores, ctx.valid, self.kernel)
            scores = pooled if self.pool == "always" else torch.where(ctx.first[:, None, None], pooled, scores)
        if self.values:
            scores = weighed(scores, self.eps, ctx.rows.value_lengths(), ctx.valid)
        if self.redundancy == "none":
            return scores
        # A block longer than all the rows is cut to them, but still divides by its nominal length.
        full = self.redundancy == "full"
        block, compared = (None, ctx.num_src[:, None, None]) if full else (self.block, self.block)
        crowding = ctx.rows.crowding(self.threshold, block)
        return minus_softmax(scores, self.lam, crowding, ctx.valid, 1 / (self.tau * compared))

    def _remember(self, ctx: ScoreContext, attention: Tensor) -> Tensor:
        """S -> S', which becomes the F of the rows that are kept: before pooling, and only in their new pages.

        The paper keeps a stale F out of the newest block; here rows appended since the last compaction hold F = 0,
        because appending a row clears its state, so the maximum is S for them by itself.
        """
        if self.alpha == 0:
            return attention
        before = ctx.rows.state("global_score")[..., 0]
        scores = with_memory(attention, before, ctx.num_dropped, ctx.first, self.alpha ** (1 / self.block))
        ctx.new_state["global_score"] = scores.float()[..., None]
        return scores
