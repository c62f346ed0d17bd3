"""Copies of whole pages between the device and host memory, beside the steps."""

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from pagefold.backends.base import Backend
from pagefold.core.types import Move, SwapOp
from pagefold.store.pagestore import PageStore

SLICE_BYTES = 64 << 20  # copied at a time, so that pinned buffers are of few sizes and used again
STAGED_BYTES = 1 << 30  # of device memory, at most, that waits for its copy to the host


class PageMover:
    """Executes the swaps of plans, in their order.

    Pages that leave are gathered on the device in the order of the steps, so that what follows may overwrite them; they
    travel on a stream of their own, and a thread files them in the host's store. Pages that come back wait for those
    that are still being filed under their ids, and are there for the step.

    tiers, host   one store per tier
    beside        use the stream and the thread; else everything is done at once
    """

    def __init__(self, backend: Backend, tiers: list[PageStore], host: list[PageStore], beside: bool):
        self.backend = backend
        self.tiers = tiers
        self.host = host
        self._thread = ThreadPoolExecutor(1, "pagefold-mover") if beside else None
        self._stream: torch.cuda.Stream | None = None
        self._leaving: list[tuple[int, np.ndarray, int, Future]] = []  # tier, host pages, bytes staged, when filed

    def run(self, swaps: list[SwapOp]) -> None:
        """Raises what went wrong when pages of an earlier call were filed."""
        self._note_filed()
        for op in swaps:
            if self._thread is None or op.move is Move.WITHIN:
                self._copy(op)
            elif op.move is Move.OUT:
                self._send(op)
            else:
                self._wait(op.tier, op.src_pages)
                self._fetch(op)

    def _copy(self, op: SwapOp) -> None:
        src = (self.host if op.move is Move.IN else self.tiers)[op.tier]
        dst = (self.host if op.move is Move.OUT else self.tiers)[op.tier]
        self.backend.copy_pages(src, _ids(op.src_pages), dst, _ids(op.dst_pages))

    def _send(self, op: SwapOp) -> None:
        assert self._thread is not None
        device, host = self.tiers[op.tier], self.host[op.tier]
        for part in _slices(device, len(op.src_pages)):
            while sum(staged for *_, staged, _ in self._leaving) > STAGED_BYTES:
                self._leaving.pop(0)[-1].result()
            src = _ids(op.src_pages[part]).to(next(iter(device.planes.values())).device)
            staged = [(name, plane.index_select(1, src)) for name, plane in planes_of(device)]
            sent, arrived = self._to_host(staged)
            filed = self._thread.submit(_file, host, op.dst_pages[part], sent, arrived)
            self._leaving.append((op.tier, op.dst_pages[part], sum(each.nbytes for _, each in staged), filed))

    def _to_host(self, staged: list[tuple[str, Tensor]]) -> tuple[list[tuple[str, Tensor]], torch.cuda.Event | None]:
        """The tensors in host memory, once the event has happened."""
        device = staged[0][1].device
        if device.type != "cuda":
            return staged, None
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        sent = []
        with torch.cuda.stream(self._stream):
            for name, tensor in staged:
                tensor.record_stream(self._stream)
                there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                sent.append((name, there.copy_(tensor, non_blocking=True)))
            arrived = torch.cuda.Event()
            arrived.record()
        return sent, arrived

    def _fetch(self, op: SwapOp) -> None:
        device, host = self.tiers[op.tier], self.host[op.tier]
        for part in _slices(device, len(op.src_pages)):
            src, dst = _ids(op.src_pages[part]), _ids(op.dst_pages[part])
            for (_, there), (_, here) in zip(planes_of(host), planes_of(device), strict=True):
                shape = (there.shape[0], len(src), there.shape[2])
                chosen = torch.empty(shape, dtype=there.dtype, pin_memory=here.is_cuda)
                torch.index_select(there, 1, src, out=chosen)
                here.index_copy_(1, dst.to(here.device), chosen.to(here.device, non_blocking=True))

    def _wait(self, tier: int, pages: np.ndarray) -> None:
        """Until these host pages are filed."""
        awaited = [each for each in self._leaving if each[0] == tier and np.isin(each[1], pages).any()]
        self._leaving = [each for each in self._leaving if not any(each is other for other in awaited)]
        for *_, filed in awaited:
            filed.result()

    def _note_filed(self) -> None:
        """Forget what has been filed, in order."""
        while self._leaving and self._leaving[0][-1].done():
            self._leaving.pop(0)[-1].result()


def planes_of(store: PageStore) -> list[tuple[str, Tensor]]:
    """Planes that have bytes as [columns, pages, words of a page], the widest words that fit. Views."""
    planes = []
    for name, plane in store.planes.items():
        if plane.shape[-1]:
            raw = plane.transpose(0, 1).flatten(2).view(torch.uint8)
            planes.append((name, raw.view(torch.int64) if raw.shape[-1] % 8 == 0 else raw))
    return planes


def _slices(store: PageStore, count: int) -> list[slice]:
    size = sum(plane[:, 0].nbytes for _, plane in planes_of(store))
    step = max(1, SLICE_BYTES // size)
    return [slice(start, start + step) for start in range(0, count, step)]


def _file(
    store: PageStore, pages: np.ndarray, sent: list[tuple[str, Tensor]], arrived: torch.cuda.Event | None
) -> None:
    """Pages that were sent go to their places in the host's store."""
    if arrived is not None:
        arrived.synchronize()
    planes = dict(planes_of(store))
    for name, tensor in sent:
        planes[name].index_copy_(1, _ids(pages), tensor)


def _ids(pages: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(pages, np.int64))
