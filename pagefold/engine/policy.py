"""From options to the fold policy of one request: engine defaults, what the request overrides, what the engine has."""

import math
from dataclasses import replace

import numpy as np

from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError, Job, SamplingParams
from pagefold.evict.scorer import SCORERS, Scorer
from pagefold.kv.layout import HeadLayout
from pagefold.kv.state import COLD, HOT, FoldPolicy
from pagefold.store.format import Plane

MAX_BUDGET = 1 << 30  # rows; lengths are int32


def build_scorer(spec: str, field: str = "kv_eviction") -> Scorer | None:
    """None for "none"; a bad spec is an InputError that lists what is known."""
    if spec == "none":
        return None
    try:
        return SCORERS.build(spec)
    except ValueError as error:
        raise InputError(field, str(error)) from None


POLICIES_KEPT = 256


class PolicyMaker:
    """Makes the `FoldPolicy` of each request.

    The engine's own scorer decides what is allocated: query windows, and the per-row state planes `state`. A request
    may choose another scorer, or none, as long as it needs no more than that.
    """

    def __init__(self, config: EngineConfig, layout: HeadLayout):
        self.config = config
        self.layout = layout
        default = build_scorer(config.eviction.kv_eviction)
        self.has_window = default is not None and default.needs_window
        self.state: dict[str, Plane] = dict(default.state) if default else {}
        self._cache: dict[tuple, FoldPolicy] = {}
        self.default = self.policy(SamplingParams())

    def policy(self, sampling: SamplingParams, prompt_len: int = 0) -> FoldPolicy:
        """Raises InputError naming `kv_eviction` or `kv_budget` if the request asks for what cannot be had.

        A budget that is a share of the prompt is never less than what selection protects and a row.
        """
        evict = self.config.eviction
        spec = evict.kv_eviction if sampling.kv_eviction is None else sampling.kv_eviction
        budget = evict.kv_budget if sampling.kv_budget is None else sampling.kv_budget
        ratio = evict.kv_budget_ratio if sampling.kv_budget_ratio is None else sampling.kv_budget_ratio
        when = evict.kv_evict_when if sampling.kv_evict_when is None else sampling.kv_evict_when
        ask = f"{spec}, {budget} rows, {when}"
        if ratio is not None and sampling.kv_budget is None:
            budget = max(math.ceil(ratio * prompt_len), evict.kv_window + evict.kv_sink_tokens + 1)
            ask = f"{spec}, {ratio} of the prompt, {when}"
        key = (spec, budget, when, ask)
        if key not in self._cache:
            if len(self._cache) == POLICIES_KEPT:
                self._cache.clear()
            self._cache[key] = replace(self._make(spec, budget, when), ask=ask)
        return self._cache[key]

    def _make(self, spec: str, budget: int, when: str) -> FoldPolicy:
        evict, cache = self.config.eviction, self.config.cache
        budget = min(budget, MAX_BUDGET)
        scorer = build_scorer(spec)
        never = FoldPolicy(
            scorer=None,
            needs_window=False,
            budget=np.zeros(self.layout.num_groups, np.int32),
            period=self.config.period,
            prefill_period=evict.kv_prefill_buffer,
            window=evict.kv_window,
            sink_tokens=evict.kv_sink_tokens,
            lag=evict.kv_lag,
            cold_after=cache.kv_cold_after if cache.kv_cold_format else None,
            stride=evict.kv_window_stride,
        )
        if scorer is None:
            return never
        protected = evict.kv_window + evict.kv_sink_tokens
        if budget < protected + 1:
            limit = f"more than kv_window + kv_sink_tokens ({evict.kv_window} + {evict.kv_sink_tokens})"
            raise InputError("kv_budget", f"got {budget}, must be {limit}")
        if scorer.needs_window and not self.has_window:
            why = "keeps no query windows; start it with a kv_eviction that does, such as zipage"
            raise InputError("kv_eviction", f"{spec!r} needs the queries of recent tokens, and this engine {why}")
        missing = set(scorer.state) - set(self.state)
        if missing:
            why = f"has no room in its pages; start it with kv_eviction={scorer.name}"
            raise InputError("kv_eviction", f"{spec!r} keeps {', '.join(missing)} per row, for which this engine {why}")
        return replace(
            never,
            scorer=spec,
            needs_window=scorer.needs_window,
            budget=self.layout.budgets(budget, cache.page_size, protected),
            under_pressure=when == "pressure",
        )


def usual_folds(policy: FoldPolicy, page_size: int, max_rows: int) -> list[Job]:
    """The jobs of a request that is folded again and again, one for each group, as jobs of slot 0 that keep nothing:
    what an engine on a GPU gets ready for. None of groups that never have so many rows."""
    jobs, tier = [], HOT if policy.cold_after is None else COLD
    for group, budget in enumerate(policy.budget.tolist() if policy.evicts else ()):
        rows, kept = budget + policy.period, np.zeros(budget // page_size, np.int32)
        if rows <= max_rows:
            jobs.append(Job(0, group, 0, rows // page_size, rows, rows, budget, kept, tier, 0, 0))
    return jobs
