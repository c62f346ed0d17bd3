"""Prometheus metrics, under vLLM's names where it has one. What the engine counts is asked for at each scrape."""

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from pagefold.server.messages import Delta
from pagefold.server.protocol import GenerationBody

SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
BETWEEN = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Timeline:
    """When things happened to one continuation, in seconds since `start`, when its request was read."""

    def __init__(self, start: float):
        self.start = start
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self.num_tokens = 0
        self.finish_reason = "abort"  # until it is known to have ended otherwise


class TokenUsage(Protocol):
    """Of one request; `kv` sums what its continuations held."""

    prompt_tokens: int
    completion_tokens: int
    kv: dict[str, float]

    @property
    def cached_tokens(self) -> int: ...


class Tally:
    """A histogram: `counts` has one entry a bound, of the values up to it and above the bound before, and the rest."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


def _histogram(
    name: str, text: str, model: str, bounds: Sequence[float], counts: Sequence[int], total: float
) -> HistogramMetricFamily:
    metric = HistogramMetricFamily(name, text, labels=["model_name"])
    limits = [*(str(float(bound)) for bound in bounds), "+Inf"]
    metric.add_metric([model], list(zip(limits, accumulate(counts), strict=True)), total)
    return metric


class Metrics(Collector):
    """The metrics of one server, in a registry of their own."""

    def __init__(self, prefix: str, model: str):
        self.registry = CollectorRegistry()
        self._prefix, self._model = prefix, model
        self._engine = _EngineStats(prefix, model)
        self.registry.register(self._engine)
        self.registry.register(self)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(f"{prefix}:{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
            return metric.labels(model)

        self._first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", SHORT)
        self._between = Tally(BETWEEN)
        self._per_token = histogram("request_time_per_output_token_seconds", "Mean of a continuation.", BETWEEN)
        self._total = histogram("e2e_request_latency_seconds", "From arrival to the last token.", LONG)
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last.", LONG)
        self._queue = histogram("request_queue_time_seconds", "From arrival in the engine to the first step.", LONG)
        self._prefill = histogram("request_prefill_time_seconds", "From the first step to the first token.", LONG)
        self._prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._output_tokens = histogram("request_generation_tokens", "Tokens of a continuation.", TOKENS)
        self._policies = Counter(
            f"{prefix}:requests_by_kv_policy",
            "Requests by the eviction they asked for.",
            ["model_name", "kv_eviction"],
            registry=self.registry,
        )

    def observe(self, timeline: Timeline, delta: Delta) -> None:
        """A continuation got a delta. Tokens that come together share the time since those before."""
        if delta.queue_s is not None and delta.prefill_s is not None:
            self._queue.observe(delta.queue_s)
            self._prefill.observe(delta.prefill_s)
        count = len(delta.token_ids)
        if count:
            now = time.perf_counter() - timeline.start
            if timeline.first_token_s is None:
                timeline.first_token_s = now
                self._first_token.observe(now)
            else:
                self._between.observe(now - timeline.last_token_s)
            timeline.last_token_s = now
            timeline.num_tokens += count
        timeline.finish_reason = delta.finish_reason or timeline.finish_reason

    def finished(self, timeline: Timeline) -> None:
        """A continuation has ended."""
        self._output_tokens.observe(timeline.num_tokens)
        self._total.observe(time.perf_counter() - timeline.start)
        if timeline.first_token_s is not None:
            decode = timeline.last_token_s - timeline.first_token_s
            self._decode.observe(decode)
            if timeline.num_tokens > 1:
                self._per_token.observe(decode / (timeline.num_tokens - 1))

    def counted(self, usage: TokenUsage, body: GenerationBody) -> None:
        """A request has ended, with all its continuations."""
        self._prompt_tokens.observe(usage.prompt_tokens)
        # a spec is the client's own text, and each one would be a series of its own
        policy = "default" if body.kv_eviction is None else body.kv_eviction.partition(":")[0]
        self._policies.labels(self._model, policy if usage.kv else "none finished").inc()

    def collect(self) -> Iterator[Any]:
        """The metric that is not the library's: its histograms cost too much to be told of every token."""
        name, tally = f"{self._prefix}:inter_token_latency_seconds", self._between
        yield _histogram(name, "Between tokens of a continuation.", self._model, tally.bounds, tally.counts, tally.sum)

    def render(self, stats: Mapping[str, Any] | None) -> bytes:
        """The text of a scrape. `stats` is the engine's answer; None: it is dead, and its metrics are left out."""
        self._engine.stats = stats
        return generate_latest(self.registry)


class _EngineStats(Collector):
    """What the engine answered last, as metrics."""

    def __init__(self, prefix: str, model: str):
        self.stats: Mapping[str, Any] | None = None
        self._prefix, self._model = prefix, model

    def collect(self) -> Iterator[Any]:
        if self.stats is None:
            return
        stats = self.stats
        for name, text, value in _gauges(stats):
            metric = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
            metric.add_metric([self._model], value)
            yield metric
        for name, text, value in _counters(stats):
            metric = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
            metric.add_metric([self._model], value)
            yield metric
        ended = CounterMetricFamily(
            f"{self._prefix}:request_success", "Continuations that ended.", labels=["model_name", "finished_reason"]
        )
        for reason, count in stats["finished"].items():
            ended.add_metric([self._model, reason], count)
        yield ended
        yield self._reasons_to_wait(stats)
        yield self._step_tokens(stats["step_tokens"])
        spent = SummaryMetricFamily(
            f"{self._prefix}:kv_compaction_seconds", "Time of a step's compactions.", labels=["model_name"]
        )
        spent.add_metric([self._model], stats["compaction"]["runs"], stats["compaction"]["seconds"])
        yield spent
        pages = {"num_gpu_blocks": str(stats["kv"][0]["total"]), "block_size": str(stats["page_size"])}
        yield InfoMetricFamily(f"{self._prefix}:cache_config", "How the KV cache is cut.", pages)

    def _reasons_to_wait(self, stats: Mapping[str, Any]) -> Any:
        metric = GaugeMetricFamily(
            f"{self._prefix}:num_requests_waiting_by_reason",
            "Continuations that wait: for room, for their compiled grammar, or to be swapped in.",
            labels=["model_name", "reason"],
        )
        compiling = stats["compiling"]
        reasons = {"room": stats["waiting"] - compiling, "grammar": compiling, "swapped": stats["swapped"]}
        for reason, count in reasons.items():
            metric.add_metric([self._model, reason], count)
        return metric

    def _step_tokens(self, counted: Mapping[str, Any]) -> Any:
        name, text = f"{self._prefix}:iteration_tokens_total", "Tokens that a step computes."
        return _histogram(name, text, self._model, counted["bounds"], counted["counts"], counted["sum"])


def _gauges(stats: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    hot, live = stats["kv"][0], stats["live"]
    held_bytes = sum(tier["used"] * tier["bytes_per_page"] for tier in stats["kv"])
    yield "num_requests_running", "Continuations in the running batch.", stats["running"]
    yield "num_requests_waiting", "Continuations that wait for room.", stats["waiting"] + stats["swapped"]
    yield "num_requests_swapped", "Of these, the ones whose rows are in host memory.", stats["swapped"]
    yield "kv_cache_usage_perc", "Share of the KV pages that are held, 0 to 1.", hot["used"] / max(hot["total"], 1)
    yield "kv_tokens_logical", "Tokens that running requests have stored.", live["tokens"]
    yield "kv_tokens_kept", "Rows per head that are left of them.", live["rows_kept"]
    per_token = held_bytes / live["tokens"] if live["tokens"] else 0.0
    yield "kv_bytes_per_token", "Bytes of held pages per token stored.", per_token
    yield "last_step_seconds", "How long the last step took.", stats["last_step_seconds"]


def _counters(stats: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    tokens, prefix = stats["tokens"], stats["prefix_cache"]
    yield "prompt_tokens", "Prompt tokens of requests that were begun.", tokens["prompt"]
    yield "prompt_tokens_cached", "Of these, the ones found in the prefix cache.", tokens["cached"]
    yield "generation_tokens", "Tokens generated.", tokens["generated"]
    yield "prefix_cache_queries", "Tokens looked for in the prefix cache.", prefix["queries"]
    yield "prefix_cache_hits", "Tokens found there; recomputed ones do not count.", prefix["hits"]
    yield "num_preemptions", "Times a request had to give its pages back.", stats["preemptions"]
    yield "preempted_tokens_lost", "Tokens to be computed again after that.", stats["tokens_lost"]
    yield "kv_compactions", "Folds of requests' rows.", stats["folds"]
    yield "kv_evicted_tokens", "Rows per head that compactions dropped.", stats["rows"]["evicted"]
    freed, copied = (stats["compaction"][name] for name in ("pages_freed", "pages_copied"))
    yield "kv_blocks_freed_by_eviction", "Pages that compactions gave back, less those of the copies.", freed
    yield "kv_cow_copies", "Pages that compactions copied and others, or the prefix cache, still need.", copied
    yield "num_steps", "Steps of the engine.", stats["steps"]
    yield "step_seconds", "Time spent in them.", stats["step_seconds"]
    yield "requests_refused", "Requests that the engine could not serve.", stats["refused"]
