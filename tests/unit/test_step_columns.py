"""What stands in columns says what it would say row by row: chunks, samples, batches, and what is kept of specs."""

import gc
import pickle
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs the package triton")

from pagefold.core.types import Chunk, Chunks, Samples, SampleSpec, SamplingParams, StepPlan, TableEdits
from pagefold.runner.habits import Habit, KnownSpecs
from pagefold.runner.inputs import batch_of

VOCAB = 100
chunks = st.builds(
    lambda slot, start, count, window, ahead: Chunk(slot, start, count, 1, window, max(0, start + ahead)),
    st.integers(1, 9), st.integers(0, 50), st.integers(1, 6), st.integers(0, 3), st.integers(-5, 8),
)  # fmt: skip


def columns_of(rows: list[Chunk]) -> Chunks:
    return Chunks(np.array(rows, np.int64).reshape(-1, 6).T)


@given(st.lists(chunks, max_size=5))
def test_chunks_are_those_they_were_made_of(rows):
    columns = columns_of(rows)
    assert [*columns] == rows and len(columns) == len(rows) and [*columns[1:]] == rows[1:]
    assert pickle.loads(pickle.dumps(columns)) == columns != columns_of([*rows, Chunk(1, 0, 1, 1)])


@given(st.lists(chunks, min_size=1, max_size=5), st.integers(1, 4))
def test_a_batch_has_a_row_for_each_token_of_each_chunk(rows, stride):
    tokens = np.arange(sum(chunk.num_tokens for chunk in rows), dtype=np.int32)
    edits = TableEdits(*(np.empty((0, 4), np.int32) for _ in range(2)))
    plan = StepPlan(1, edits, [], columns_of(rows), tokens, Samples([], np.empty(0, np.int64)), {}, [], [])
    batch = batch_of(plan, stride)
    expected = []
    for chunk in rows:
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            after = position - chunk.window_start
            kept = chunk.window_slot > 0 and after >= 0 and after % stride == 0
            expected.append((position, chunk.window_slot * kept, after // stride * kept))
    assert [*zip(batch.positions, batch.window_slots, batch.window_index, strict=True)] == expected
    assert batch.seq_lens.tolist() == [chunk.start + chunk.num_tokens for chunk in rows]
    assert batch.single_tokens == all(chunk.num_tokens == 1 for chunk in rows)


def spec(seed: int, **params) -> SampleSpec:
    return SampleSpec(SamplingParams(**params), seed, 0, (1, 2), [], frozenset({7}), ())


def test_samples_are_specs_that_know_the_positions_of_their_step():
    lasting = [spec(1), None, spec(2)]
    samples = Samples(lasting, np.array([5, 0, 9]))
    assert [each and (each.seed, each.position) for each in samples] == [(1, 5), None, (2, 9)]
    assert (samples.drawn, samples.only_drawn().positions.tolist()) == ([0, 2], [5, 9])
    assert lasting[0] is not None and lasting[0].position == 0
    assert Samples.of([*samples.only_drawn()]).positions.tolist() == [5, 9]  # type: ignore[list-item]


def facts(known: KnownSpecs, specs: list[SampleSpec]) -> list[list]:
    return [column.tolist() for column in known.of(specs, lambda each: Habit.make(each, VOCAB))]


def test_what_is_kept_of_specs_is_what_follows_from_them_whoever_came_and_went():
    known, running, rng = KnownSpecs(), [], np.random.default_rng(0)
    for step in range(300):
        running = [each for each in running if rng.random() < 0.9]
        options = {"temperature": rng.random(), "top_k": int(rng.integers(0, 9)), "logprobs": [None, 2][step % 2]}
        running += [spec(int(rng.integers(1 << 62)), **options) for _ in range(rng.integers(0, 9))]
        if running:
            rng.shuffle(running)  # type: ignore[arg-type]
            assert facts(known, running) == facts(KnownSpecs(), running)


def test_specs_of_sequences_that_ended_are_let_go():
    class Output(list):
        """A list that can be watched."""

    known, alive = KnownSpecs(), []
    for seed in range(200):
        new = spec(seed)
        new.output = Output()
        alive.append(weakref.ref(new.output))
        facts(known, [new])
        del new
    gc.collect()
    assert sum(ref() is not None for ref in alive) < 50
