"""Captured compactions: one launch for a batch of jobs instead of some dozens, so that folds cost the host little."""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

MOST = 64  # graphs kept; batches of other shapes run eagerly, as all do the first time


class FoldGraphs:
    """Runs batches of jobs; those of a shape that was seen before by replaying what they launch."""

    def __init__(self, device: torch.device):
        self._capturing = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()  # of all graphs: they run one after the other
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._seen: set[Hashable] = set()

    def run(self, shape: Hashable, table: Tensor, launch: Callable[[Tensor], None]) -> None:
        """launch(table) on the current stream.

        shape   everything that what is launched depends on, the numbers in the table excepted
        launch  must not wait for the device
        """
        if shape not in self._graphs:
            if shape not in self._seen or len(self._graphs) == MOST:
                self._seen.add(shape)
                launch(table)  # kernels are compiled outside of a capture
                return
            self._graphs[shape] = self._capture(torch.empty_like(table), launch)
        graph, held = self._graphs[shape]
        held.copy_(table, non_blocking=True)
        graph.replay()

    def _capture(self, held: Tensor, launch: Callable[[Tensor], None]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._capturing):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch(held)
            finally:
                graph.capture_end()
        return graph, held
