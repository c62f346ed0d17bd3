"""Captured compactions: one launch for a batch of jobs instead of some dozens, so that folds cost the host little."""

import logging
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from pagefold.runner.graphs import nothing_collected

logger = logging.getLogger("pagefold")

MOST = 64  # graphs kept; batches of other shapes run eagerly, as all do the first time


class FoldGraphs:
    """Runs batches of jobs; those of a shape that was seen before by replaying what they launch."""

    def __init__(self, device: torch.device):
        self._capturing = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()  # of all graphs: they run one after the other
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._seen: set[Hashable] = set()
        self._failed: set[Hashable] = set()

    def run(self, shape: Hashable, table: Tensor, launch: Callable[[Tensor], None]) -> None:
        """launch(table) on the current stream.

        shape   everything that what is launched depends on, the numbers in the table excepted
        launch  must not wait for the device
        """
        if shape not in self._graphs:
            if shape in self._seen - self._failed and len(self._graphs) < MOST:
                self._try_to_capture(shape, table, launch)
            self._seen.add(shape)
        if shape not in self._graphs:
            launch(table)  # kernels are compiled outside of a capture
            return
        graph, held = self._graphs[shape]
        held.copy_(table, non_blocking=True)
        graph.replay()

    def _try_to_capture(self, shape: Hashable, table: Tensor, launch: Callable[[Tensor], None]) -> None:
        """What cannot be captured, for want of memory or because it waits, runs eagerly from then on."""
        try:
            self._graphs[shape] = self._capture(torch.empty_like(table), launch)
        except RuntimeError as error:
            logger.warning("a compaction could not be captured and runs launch by launch: %s", error)
            self._failed.add(shape)

    def _capture(self, held: Tensor, launch: Callable[[Tensor], None]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        with nothing_collected(), torch.cuda.stream(self._capturing):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch(held)
            finally:
                graph.capture_end()
        return graph, held
