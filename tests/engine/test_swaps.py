"""Pages that leave for host memory and come back are the same bytes, in every part of the cache."""

import numpy as np
import pytest
import torch

from pagefold.core.types import InputError, Move, SwapOp
from pagefold.store.mapped import mapped_zeros
from pagefold.store.pagestore import PageStore
from tests.engine.tiny import tiny_engine


def pages_of(store: PageStore, pages: list[int]) -> list[torch.Tensor]:
    return [plane[pages].clone() for plane in store.planes.values()]


def op(move: Move, src: list[int], dst: list[int]) -> SwapOp:
    return SwapOp(0, move, np.array(src, np.int32), np.array(dst, np.int32))


def test_swaps_happen_in_order_in_every_part():
    """Sent, overwritten, fetched elsewhere; of two that are sent to one place, the later stays."""
    runner = tiny_engine(kv_format="int4", kv_format_skip_layers="0", kv_eviction="zipage").runner
    stores = [part.tiers[0] for part in runner.kv.parts]
    assert len(stores) == 2
    for store in stores:
        for plane in store.planes.values():
            raw = plane.transpose(0, 1).view(torch.uint8)
            raw.copy_(torch.randint(0, 255, raw.shape, dtype=torch.uint8))
    gone, other = ([pages_of(store, pages) for store in stores] for pages in ([1, 2, 3], [8]))
    swaps = [
        op(Move.OUT, [1, 2, 3], [4, 5, 6]),
        op(Move.WITHIN, [8], [1]),
        op(Move.IN, [4, 5, 6], [9, 10, 2]),
        op(Move.OUT, [9], [4]),
        op(Move.OUT, [8], [4]),
        op(Move.IN, [4], [7]),
    ]
    for each in swaps:
        runner.swap(each)
    for store, theirs, later in zip(stores, gone, other, strict=True):
        same = lambda pages, want: all(  # noqa: E731
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(pages_of(store, pages), want, strict=True)  # noqa: B023
        )
        assert same([9, 10, 2], theirs) and same([1], later) and same([7], later)


def test_host_memory_that_cannot_be_had_is_named():
    with pytest.raises(MemoryError, match=f"{1 << 62} bytes of host memory"):
        mapped_zeros(1 << 62)
    with pytest.raises(InputError, match=f"kv_keep_bytes: got {1 << 60}"):
        tiny_engine(kv_eviction="zipage", kv_keep_bytes=1 << 60)
