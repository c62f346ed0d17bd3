"""Pages that leave for host memory and come back are the same bytes, however long they are under way."""

import threading

import numpy as np
import pytest
import torch

from pagefold.backends.registry import make_backend
from pagefold.core.types import Move, SwapOp
from pagefold.runner import mover
from pagefold.runner.mover import PageMover, planes_of
from pagefold.store.format import Plane, parse_format
from pagefold.store.pagestore import PageStore
from tests.engine.test_turns import FOLDS, move_after, talk, tokens_of
from tests.engine.tiny import tiny_engine

STATE = {"score": Plane(torch.float32, 1)}


def store(num_pages: int, seed: int, name: str = "int4") -> PageStore:
    made = PageStore(parse_format(name), num_pages, 3, 4, 16, STATE)
    draw = torch.Generator().manual_seed(seed)
    for _, plane in planes_of(made):
        raw = plane.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=draw, dtype=torch.uint8))
    return made


def pages_of(made: PageStore, pages: list[int]) -> list[torch.Tensor]:
    return [plane[:, pages].clone() for _, plane in planes_of(made)]


def op(move: Move, src: list[int], dst: list[int]) -> SwapOp:
    return SwapOp(0, move, np.array(src, np.int32), np.array(dst, np.int32))


@pytest.mark.parametrize("name", ["int4", "fp8", "bf16"])
@pytest.mark.parametrize("beside", [False, True])
def test_pages_come_back_as_they_left(name, beside, monkeypatch):
    """Copied within the device, sent, overwritten while they are under way, fetched; in slices of a page or two."""
    monkeypatch.setattr(mover, "SLICE_BYTES", 2 * 3 * 4 * 40)
    device, host = store(12, 1, name), store(9, 2, name)
    moves = PageMover(make_backend("reference"), [device], [host], beside)
    gone, other = pages_of(device, [1, 2, 3, 4, 5]), pages_of(device, [8])
    moves.run([op(Move.OUT, [1, 2, 3, 4, 5], [4, 5, 6, 7, 8]), op(Move.WITHIN, [8], [1])])
    assert all(torch.equal(a, b) for a, b in zip(pages_of(device, [1]), other))
    moves.run([op(Move.IN, [4, 5, 6, 7, 8], [9, 10, 11, 2, 3])])
    assert all(torch.equal(a, b) for a, b in zip(pages_of(device, [9, 10, 11, 2, 3]), gone))
    moves.run([op(Move.OUT, [9], [4]), op(Move.OUT, [8], [4]), op(Move.IN, [4], [7])])
    assert all(torch.equal(a, b) for a, b in zip(pages_of(device, [7]), other)), "the later of two, in order"


def test_a_step_does_not_wait_for_pages_to_be_filed(monkeypatch):
    may_file, file = threading.Event(), mover._file

    def slow(*args) -> None:
        assert may_file.wait(10)
        file(*args)

    monkeypatch.setattr(mover, "_file", slow)
    device, host = store(6, 1), store(6, 2)
    moves, gone = PageMover(make_backend("reference"), [device], [host], True), pages_of(device, [1])
    before = pages_of(host, [3])
    moves.run([op(Move.OUT, [1], [3]), op(Move.OUT, [2], [4])])
    moves.run([])
    assert all(torch.equal(a, b) for a, b in zip(pages_of(host, [3]), before))
    may_file.set()
    moves.run([op(Move.IN, [3], [5])])
    assert all(torch.equal(a, b) for a, b in zip(pages_of(device, [5]), gone))


def test_what_fails_while_filing_fails_the_next_step(monkeypatch):
    monkeypatch.setattr(mover, "_file", lambda *args: 1 / 0)
    moves = PageMover(make_backend("reference"), [store(6, 1)], [store(6, 2)], True)
    moves.run([op(Move.OUT, [1], [3])])
    with pytest.raises(ZeroDivisionError):
        moves.run([op(Move.IN, [3], [2])])


def test_a_chat_from_host_memory_is_the_same_when_pages_move_beside_the_steps():
    fold = FOLDS[0]
    engine = tiny_engine(**fold, kv_keep_bytes=1 << 22)
    runner = engine.runner
    runner.movers = [PageMover(runner.backend, runner.kv.tiers, runner.host[0], beside=True)]
    engine.scheduler.finish = move_after(engine, engine.scheduler.finish)
    turns = talk(engine)
    assert all(turn.kv.resumed_tokens for turn in turns[1:])
    assert tokens_of(turns) == tokens_of(talk(tiny_engine(**fold)))
