"""A step in the making, and what is remembered of it until its results are there."""

from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from pagefold.core.types import Chunks, Job, Samples, SampleSpec, ScorePolicy, StepPlan
from pagefold.engine.grammar import Matcher, fill_masks
from pagefold.engine.sequence import Sequence
from pagefold.kv.manager import KVManager
from pagefold.kv.state import FoldPolicy, KVState

T = TypeVar("T")


class PlannedStep(NamedTuple):
    """A step that is planned and whose results are to come. All lists have an entry for each chunk.

    draws   the chunk ends with the last token there is, known or not, so that the next one is drawn
    """

    seqs: list[Sequence]
    kvs: list[KVState]
    draws: list[bool]
    chunks: Chunks

    def by_chunk(self, results: list[T]) -> list[T] | list[T | None]:
        """Results of the chunks that have logits, and None for the others."""
        if len(results) == len(self.seqs):
            return results
        rest = iter(results)
        return [next(rest) if num_logits else None for num_logits in self.chunks.columns[3].tolist()]

    def of_slots(self, failed: dict[int, str]) -> dict[KVState, str]:
        """What failed, by sequence instead of slot."""
        if not failed:
            return {}
        slots = self.chunks.columns[0].tolist()
        return {kv: failed[slot] for kv, slot in zip(self.kvs, slots, strict=True) if slot in failed}


class StepBuilder:
    """A step in the making: chunks one by one, and those of the quiet all at once. They may come in any order."""

    def __init__(self, max_tokens: int):
        self.tokens_left = max_tokens
        self.seqs: list[Sequence] = []
        self.kvs: list[KVState] = []
        self.draws: list[bool] = []
        self.jobs: list[Job] = []
        self.policies: list[ScorePolicy] = []
        self._chunks: list[np.ndarray] = []  # columns of `Chunks`
        self._tokens: list[int] = []
        self._samples: list[SampleSpec | None] = []
        self._prompt_targets: dict[int, tuple[list[int], int]] = {}
        self._constrained: list[tuple[Matcher, SampleSpec]] = []

    def policy_index(self, policy: FoldPolicy) -> int:
        score = policy.score
        if score not in self.policies:
            self.policies.append(score)
        return self.policies.index(score)

    def add(self, seq: Sequence, kv: KVState, start: int, count: int, window_start: int) -> bool:
        """Tokens [start, start + count) of a sequence. If they are its last, known or not, the next one is drawn.
        Returns whether it is."""
        tokens, end = seq.tokens, start + count
        draws = end == len(tokens) + seq.num_drawing
        num_logits = int(draws)
        if seq.request.sampling.prompt_logprobs is not None and start < seq.prompt_len - 1:
            num_logits = count
            self._add_prompt_targets(seq, start, end)
        if count == 1:
            self._tokens.append(tokens[start] if start < len(tokens) else -1)
        else:
            assert end <= len(tokens), "a token that is not known yet is the only one pending"
            self._tokens += tokens[start:end]
        spec = None
        if draws and seq.max_tokens:
            seq.num_drawing += 1
            spec = seq.spec
            if seq.grammar:
                spec = replace(spec, position=end)  # its mask is of this draw only
                self._constrained.append((seq.grammar, spec))
        if num_logits:
            self._samples.append(spec)
        chunk = kv.slot, start, count, num_logits, kv.window_slot, window_start
        self._add_rows([seq], [kv], [draws], np.array(chunk, np.int64)[:, None])
        self.tokens_left -= count
        return draws

    def add_quiet(self, seqs: list[Sequence], kvs: list[KVState], windows: np.ndarray) -> None:
        """One more token of each, and the draw of the next: they need nothing else (`KVState.quiet_until`).

        windows   int64[2, slots], `window_slot` and `window_start` of each slot's sequence
        """
        if not seqs:
            return
        count = len(seqs)
        columns = np.ones((6, count), np.int64)
        columns[0] = np.fromiter([kv.slot for kv in kvs], np.int64, count)
        columns[1] = np.fromiter([kv.num_tokens for kv in kvs], np.int64, count)
        columns[4:] = windows[:, columns[0]]
        self._tokens += [-1 if seq.num_drawing else seq.tokens[-1] for seq in seqs]
        self._samples += [seq.spec for seq in seqs]
        for seq, kv in zip(seqs, kvs, strict=True):
            seq.num_drawing += 1
            kv.num_tokens += 1
        self._add_rows(seqs, kvs, [True] * count, columns)
        self.tokens_left -= count

    def _add_rows(self, seqs: list[Sequence], kvs: list[KVState], draws: list[bool], columns: np.ndarray) -> None:
        self.seqs += seqs
        self.kvs += kvs
        self.draws += draws
        self._chunks.append(columns)

    def _add_prompt_targets(self, seq: Sequence, start: int, end: int) -> None:
        k = seq.request.sampling.prompt_logprobs
        if k is not None and len(seq.prompt_logprobs) < seq.prompt_len - 1:
            self._prompt_targets[len(self.seqs)] = seq.tokens[start + 1 : min(end + 1, seq.prompt_len)], k

    def build(self, step: int, manager: KVManager) -> tuple[StepPlan, PlannedStep]:
        if self._constrained:
            fill_masks(self._constrained)
        chunks = Chunks(np.concatenate(self._chunks, 1) if self._chunks else np.empty((6, 0), np.int64))
        ends = chunks.columns[1] + chunks.columns[2]
        plan = StepPlan(
            step=step,
            edits=manager.drain_edits(),
            swaps=manager.drain_copies(),
            chunks=chunks,
            tokens=np.fromiter(self._tokens, np.int32, len(self._tokens)),
            samples=Samples(self._samples, ends[chunks.columns[3] > 0]),
            prompt_targets=self._prompt_targets,
            jobs=self.jobs,
            policies=self.policies,
        )
        return plan, PlannedStep(self.seqs, self.kvs, self.draws, chunks)
