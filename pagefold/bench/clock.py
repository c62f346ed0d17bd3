"""How long the jobs of an engine take, measured where they run."""

import time

import torch

from pagefold.core.types import Job, ScorePolicy
from pagefold.engine.engine import Engine
from pagefold.runner.compressor import Compressor


class CompactionClock(Compressor):
    """Folds as ever, and keeps the time: of this thread on a CPU, of the stream that the jobs run on on a device. On a
    stream of their own they take longer than they add to the steps, which share the device with them."""

    def __init__(self, engine: Engine):
        """Takes the place of the engine's compressor, before it has folded anything."""
        runner = engine.runner
        super().__init__(runner.backend, runner.kv, runner.model.scale, overlap=engine.config.eviction.kv_lag > 0)
        self._on_device = runner.device.type == "cuda"
        self.restart()
        runner.compressor = self

    def restart(self) -> None:
        """What was folded before does not count."""
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def _run(self, jobs: list[Job], policies: list[ScorePolicy]) -> None:
        if self._on_device:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            super()._run(jobs, policies)
            end.record()
            self._events.append((start, end))
            return
        start = time.perf_counter()
        super()._run(jobs, policies)
        self._seconds += time.perf_counter() - start

    def seconds(self) -> float:
        """Waits for the device."""
        if self._events:
            torch.cuda.synchronize(self._device)
        return self._seconds + sum(start.elapsed_time(end) for start, end in self._events) / 1e3
