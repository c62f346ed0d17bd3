"""Measures a head profile: how unequally the KV heads of a model share a budget, over sample texts.

Following Tangram (arXiv 2606.06302, section 4.1): the scores of all heads are ranked together, the best cells fill the
budget, and the part of the evictable rows that a head gets so is its share. Mean and standard deviation over the
samples are what a clustered layout reserves by.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor
from tqdm import tqdm

from pagefold.backends.base import Backend, KVView
from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError, Request, SamplingParams, ScorePolicy
from pagefold.engine.build import Loaded, build_engine
from pagefold.eval.texts import parse_share
from pagefold.evict.scorer import ScoreContext
from pagefold.kv.profile import HeadProfile
from pagefold.runner.compressor import Compressor

SCOPES = ("cross", "layer")


class ScoreRecorder(Compressor):
    """Folds as ever, and keeps the scores of the last fold: float32[L, H, N] in `scores_of`, NaN where none came."""

    def __init__(self, backend: Backend, kv: KVView, scale: float):
        super().__init__(backend, kv, scale)
        self.scores_of = np.empty((0, 0, 0), np.float32)

    def score(self, ctx: ScoreContext, policy: ScorePolicy) -> Tensor:
        scores = super().score(ctx, policy)
        shape = (*self.kv.group_of.shape, ctx.max_src)
        if self.scores_of.shape != shape:
            self.scores_of = np.full(shape, np.nan, np.float32)
        self.scores_of[ctx.layers.cpu().numpy(), ctx.heads.cpu().numpy()] = scores.float().cpu().numpy()
        return scores


def fold_scores(loaded: Loaded, config: EngineConfig, tokens: Sequence[int]) -> np.ndarray:
    """What the scorer says of the rows of all N tokens but the last, with a configuration that folds there once:
    float32[L, H, N]."""
    engine = build_engine(config, loaded)
    runner = engine.runner
    recorder = runner.compressor = ScoreRecorder(runner.backend, runner.kv, runner.model.scale)
    engine.add(Request("sample", tuple(tokens), SamplingParams(max_tokens=0, detokenize=False)))
    while engine.has_work:
        engine.step()
    assert recorder.scores_of.size and not np.isnan(recorder.scores_of).any()
    return recorder.scores_of


def head_shares(scores: np.ndarray, num_kept: int, scope: str = "cross") -> np.ndarray:
    """The share of its evictable rows each head keeps if the best cells stay: float64[L, H].

    scores     float[L, H, E], of evictable rows only; higher = keep
    num_kept   rows kept per head on average: num_kept * H cells of a layer in all
    scope      "cross" ranks the cells of all layers together, "layer" those of each layer by themselves

    Exactly as many cells stay as there is room for; equal scores go to the first layer, head and row.
    """
    layers, heads, rows = scores.shape
    if not 0 < num_kept <= rows:
        raise InputError("budget", f"leaves {num_kept} of the {rows} evictable rows, must leave between 1 and {rows}")
    together = scores.reshape(1 if scope == "cross" else layers, -1)
    order = np.argsort(-np.nan_to_num(together, nan=-np.inf), axis=1, kind="stable")
    kept = np.zeros(together.shape, bool)
    np.put_along_axis(kept, order[:, : num_kept * together.shape[1] // rows], True, axis=1)
    return kept.reshape(scores.shape).mean(-1)


def measure_profile(
    loaded: Loaded,
    options: dict[str, Any],
    samples: Sequence[Sequence[int]],
    scorer: str,
    budget: int | None = None,
    ratio: str | None = None,
    scope: str = "cross",
    use_tqdm: bool = True,
) -> HeadProfile:
    """Measure a profile over samples (token ids), each of a whole number of pages and one token more.

    options   engine options, `model` included
    budget    rows kept per head on average, sinks and window included; or
    ratio     the kept share of the sample's rows ("1/4", "0.25")

    Raises InputError for an unknown scorer, and for a budget that leaves no evictable row, or more than there are.
    """
    if (budget is None) == (ratio is None):
        raise InputError("budget", "exactly one of budget and ratio must be given")
    if scope not in SCOPES:
        raise InputError("scope", f"got {scope!r}, must be one of {', '.join(SCOPES)}")
    share = parse_share(ratio, "ratio") if ratio is not None else None
    shares = []
    for tokens in tqdm(samples, desc="samples", disable=not use_tqdm, dynamic_ncols=True):
        length = len(tokens) - 1
        config = _fold_at(length, {**options, "kv_eviction": scorer})
        sinks, window = config.eviction.kv_sink_tokens, config.eviction.kv_window
        scores = fold_scores(loaded, config, tokens)[:, :, sinks : length - window]
        rows = round(length * share) if share is not None else budget or 0
        shares.append(head_shares(scores, rows - sinks - window, scope))
    lengths = [len(tokens) - 1 for tokens in samples]
    kept = {"ratio": float(share)} if share is not None else {"budget": budget}
    meta = {
        "model": str(options.get("model", "")),
        "scorer": scorer,
        **kept,
        "tokens": [min(lengths), max(lengths)],
        "scope": scope,
    }
    return HeadProfile.from_samples(np.stack(shares), meta)


def _fold_at(length: int, options: dict[str, Any]) -> EngineConfig:
    """Fold once, at token `length`. How far does not matter, for scores are taken before rows are: as far as can be."""
    config = EngineConfig.from_options(**options, kv_layout="uniform", kv_prefill_buffer=length, max_num_seqs=1)
    protected, size = config.eviction.kv_window + config.eviction.kv_sink_tokens, config.cache.page_size
    budget = (protected // size + 1) * size
    if length < budget + size:
        raise InputError("tokens", f"got {length}, must be at least {budget + size} for something to be evicted")
    cache = replace(config.cache, num_pages=2 * (length // size + 2))  # the sample, what is kept of it, the token after
    return replace(config, cache=cache, eviction=replace(config.eviction, kv_budget=budget))


def cut_samples(ids: Sequence[int], tokens: int) -> list[list[int]]:
    """Stretches of tokens + 1 ids, one after the other; an incomplete last one is dropped."""
    return [list(ids[i : i + tokens + 1]) for i in range(0, len(ids) - tokens, tokens + 1)]
