"""Figures of `pagefold bench serve`, with the labels of the table and the keys of the file that vLLM's has.

TTFT is the time from sending to the first output, ITL the gaps between outputs, pooled over all requests, E2EL the time
to the end of the answer and TPOT (E2EL - TTFT) / (tokens - 1), one a request. Outputs are chunks with text, reasoning
or tool calls: where a server puts several tokens into a chunk, ITL is longer than TPOT.
"""

import itertools
import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagefold.core.types import InputError

WIDTH = 50
METRICS = {  # key: (how it is titled, how it is called)
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}
GOODPUT = ("ttft", "tpot", "e2el")


@dataclass
class Sample:
    """One request: what came back, and when (seconds of `time.perf_counter`).

    num_tokens   prompt tokens as far as the client knows; usage, if the server gave it, goes before
    times        arrivals of the outputs
    end          arrival of the finish reason
    """

    start: float
    num_tokens: int = 0
    times: list[float] = field(default_factory=list)
    end: float = 0.0
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    done: bool = False
    error: str | None = None

    def finish(self, now: float) -> None:
        """The stream is over."""
        self.end = self.end or (self.times[-1] if self.times else now)
        if not self.error and not self.done:
            self.error = f"the stream ended after {len(self.times)} outputs without a finish reason"
        if not self.error and not self.times:
            self.times = [self.end]  # an answer of no visible text

    @property
    def input_tokens(self) -> int:
        return self.usage.get("prompt_tokens") or self.num_tokens

    @property
    def output_tokens(self) -> int:
        return self.usage.get("completion_tokens", len(self.times))

    @property
    def ttft(self) -> float:
        return self.times[0] - self.start

    @property
    def e2el(self) -> float:
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itls(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.times)]

    def meets(self, limits: dict[str, float]) -> bool:
        """Whether the request kept within all limits (milliseconds); one of a single token has no TPOT to miss."""
        return all((getattr(self, name) or 0.0) * 1e3 <= limit for name, limit in limits.items())


def parse_goodput(texts: list[str]) -> dict[str, float]:
    """{metric: milliseconds} from texts such as "ttft:500"."""
    limits = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if name not in GOODPUT or not limits[name] > 0:
            wanted = f"METRIC:MILLISECONDS with a metric of {', '.join(GOODPUT)}"
            raise InputError("goodput", f"got {text!r}, must be {wanted}")
    return limits


def summarise(
    samples: list[Sample], duration: float, facts: dict[str, Any], limits: dict[str, float]
) -> dict[str, Any]:
    """All figures of a run, in a dict of plain values; times are in milliseconds, rates a second."""
    good = [sample for sample in samples if not sample.error]
    inputs, outputs = (sum(getattr(s, name) for s in good) for name in ("input_tokens", "output_tokens"))
    report: dict[str, Any] = {"date": time.strftime("%Y%m%d-%H%M%S"), **facts, "duration": duration}
    report |= {"completed": len(good), "failed": len(samples) - len(good)}
    report |= {"total_input_tokens": inputs, "total_output_tokens": outputs}
    report["request_throughput"] = len(good) / duration
    report["request_goodput"] = sum(s.meets(limits) for s in good) / duration if limits else None
    report["output_throughput"] = outputs / duration
    report["total_token_throughput"] = (inputs + outputs) / duration
    report["max_output_tokens_per_s"] = _peak_rate(good)
    report["max_concurrent_requests"] = _peak_concurrency(good)
    report["tokens_counted_by"] = "usage" if all("completion_tokens" in s.usage for s in good) else "outputs"
    report |= _statistics("ttft", [s.ttft for s in good])
    report |= _statistics("tpot", [s.tpot for s in good if s.tpot is not None])
    report |= _statistics("itl", [gap for s in good for gap in s.itls])
    report |= _statistics("e2el", [s.e2el for s in good])
    return report | _cache_facts(good) | {"errors": sorted({s.error for s in samples if s.error})}


def _statistics(name: str, seconds: list[float]) -> dict[str, float]:
    ms = np.array(seconds or [0.0]) * 1e3
    values = {"mean": ms.mean(), "median": np.median(ms), "std": ms.std(), "p99": np.percentile(ms, 99)}
    return {f"{statistic}_{name}_ms": float(value) for statistic, value in values.items()}


def _peak_rate(samples: list[Sample]) -> float:
    """Most tokens that came within one second of the clock, a request's tokens spread evenly over its outputs."""
    if not samples:
        return 0.0
    times = np.concatenate([s.times for s in samples])
    weights = np.repeat([s.output_tokens / len(s.times) for s in samples], [len(s.times) for s in samples])
    return float(np.bincount((times - min(s.start for s in samples)).astype(int), weights).max())


def _peak_concurrency(samples: list[Sample]) -> int:
    events = sorted([(s.start, 1) for s in samples] + [(s.end, -1) for s in samples])
    return max(itertools.accumulate((step for _, step in events)), default=0)


def _cache_facts(samples: list[Sample]) -> dict[str, Any]:
    """What the server says of its cache: prompt tokens found there and, from Pagefold, rows kept of tokens stored."""
    cached = [((s.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0) for s in samples]
    facts: dict[str, Any] = {"total_cached_tokens": sum(cached)}
    kv = [s.usage["kv"] for s in samples if s.usage.get("kv")]
    if kv:
        for name in ("tokens", "rows_kept", "compactions", "preemptions"):
            facts[f"kv_{name}"] = sum(usage.get(name) or 0 for usage in kv)
        facts["kv_max_peak_bytes"] = max(usage.get("peak_bytes") or 0 for usage in kv)
    return facts


# ---- the table


def print_table(report: dict[str, Any]) -> None:
    print(f"{' Serving Benchmark Result ':=^{WIDTH}}")
    rows = {"Successful requests": report["completed"], "Failed requests": report["failed"]}
    if report["max_concurrency"]:
        rows["Maximum request concurrency"] = report["max_concurrency"]
    if report["request_rate"] != math.inf:
        rows["Request rate configured (RPS)"] = float(report["request_rate"])
    rows["Benchmark duration (s)"] = report["duration"]
    rows["Total input tokens"] = report["total_input_tokens"]
    rows["Total generated tokens"] = report["total_output_tokens"]
    rows["Request throughput (req/s)"] = report["request_throughput"]
    if report["request_goodput"] is not None:
        rows["Request goodput (req/s)"] = report["request_goodput"]
    rows["Output token throughput (tok/s)"] = report["output_throughput"]
    rows["Peak output token throughput (tok/s)"] = report["max_output_tokens_per_s"]
    rows["Peak concurrent requests"] = float(report["max_concurrent_requests"])
    rows["Total token throughput (tok/s)"] = report["total_token_throughput"]
    _print_rows(rows)
    for key, (title, name) in METRICS.items():
        print(f"{title:-^{WIDTH}}")
        labels = {"mean": "Mean", "median": "Median", "p99": "P99"}
        _print_rows({f"{label} {name} (ms)": report[f"{which}_{key}_ms"] for which, label in labels.items()})
    if report["total_cached_tokens"] or "kv_tokens" in report:
        print(f"{'KV Cache':-^{WIDTH}}")
        rows = {"Cached input tokens": report["total_cached_tokens"]}
        if report.get("kv_tokens"):
            rows["Tokens stored"] = report["kv_tokens"]
            rows["Rows a head kept of them (%)"] = 100 * report["kv_rows_kept"] / report["kv_tokens"]
            rows["Compactions"] = report["kv_compactions"]
            rows["Preemptions"] = report["kv_preemptions"]
        _print_rows(rows)
    print("=" * WIDTH)


def _print_rows(rows: dict[str, Any]) -> None:
    for label, value in rows.items():
        print(f"{label + ':':<40} {value:<10.2f}" if isinstance(value, float) else f"{label + ':':<40} {value:<10}")
