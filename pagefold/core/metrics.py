"""Counts, levels and durations of one engine, by name. Standard library only; reporting them is the server's part.

metrics.count("kv_compactions_total")
metrics.gauge("num_requests_running", 3)
with metrics.timer("kv_compaction_seconds"):
    ...
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass


@dataclass
class Durations:
    """What is kept of the durations of one name, in seconds.

    num     how many there were
    total   their sum
    last    the latest one
    max     the longest one
    """

    num: int = 0
    total: float = 0.0
    last: float = 0.0
    max: float = 0.0


class Metrics:
    """Written by the engine, read by any thread through `snapshot`. A name belongs to one kind; using it as another
    raises `ValueError`, for it would be reported twice."""

    def __init__(self):
        self._lock = threading.Lock()
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._durations: dict[str, Durations] = {}

    def count(self, name: str, value: float = 1) -> None:
        """Add to a counter, which never goes down."""
        if not value >= 0:
            raise ValueError(f"{name}: got {value!r}, must be >= 0, for a counter never goes down")
        with self._lock:
            self._claim(name, self._counters)
            self._counters[name] = self._counters.get(name, 0) + value

    def gauge(self, name: str, value: float) -> None:
        """Set a level."""
        with self._lock:
            self._claim(name, self._gauges)
            self._gauges[name] = value

    def observe(self, name: str, seconds: float) -> None:
        """Record a duration that was measured elsewhere."""
        with self._lock:
            self._claim(name, self._durations)
            entry = self._durations.setdefault(name, Durations())
            entry.num += 1
            entry.total += seconds
            entry.last = seconds
            entry.max = max(entry.max, seconds)

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Record how long the block takes, also if it raises."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.observe(name, time.perf_counter() - begin)

    def snapshot(self) -> dict[str, float | dict[str, float]]:
        """A copy of everything: a number per counter and gauge, the fields of `Durations` per timer."""
        with self._lock:
            durations = {name: asdict(entry) for name, entry in self._durations.items()}
            return {**self._counters, **self._gauges, **durations}

    def _claim(self, name: str, kind: dict) -> None:
        if name not in kind and any(name in other for other in (self._counters, self._gauges, self._durations)):
            raise ValueError(f"{name}: is in use as another kind of metric")
