"""Who computes how many tokens in the next step. Integers only: this file sees `core` and `kv`, never a tensor."""

import time
from bisect import insort
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from pagefold.core.config import SchedulerConfig
from pagefold.core.types import FinishReason, StepPlan, StepResult
from pagefold.engine.pressure import Pressure
from pagefold.engine.sequence import Sequence, Status
from pagefold.engine.step import PlannedStep, StepBuilder
from pagefold.kv.manager import KVManager
from pagefold.kv.state import KVState


@dataclass
class Stats:
    """Counters since the start, and the peaks that benchmarks report."""

    steps: int = 0
    tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    tokens_lost: int = 0
    folds: int = 0
    peak_running: int = 0
    peak_pages: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    resumed: int = 0


class Scheduler:
    """Plans steps of mixed prefill and decode: every running sequence computes what it has pending, decode first.

    There are no phases: a sequence has tokens whose KV is not stored, and computes some of them. A chunk never
    crosses the sequence's next event (the token count at which its rows are folded), so what a token sees depends on
    its request alone, never on chunk sizes or neighbours (pressure mode apart, which says so).

    A sequence stalls at its present token, and nothing else does, when it needs a query window and none is free, or
    when its fold finds no destination pages. Sequences without a reservation are preempted, newest first, when pages
    run out.

    A step may be planned before the results of the one before it are known. Everything but the ids of the tokens it
    draws follows from counts, so the plan names such a token -1. A sequence that turns out to have ended before it is
    taken out then, and what the later step draws for it is dropped. One that was preempted meanwhile comes back when
    all its tokens are known. What a grammar allows next follows from the ids, so a sequence that has one is left out
    while its newest token is in flight.
    """

    def __init__(self, config: SchedulerConfig, manager: KVManager):
        self.config = config
        self.manager = manager
        self.waiting: list[Sequence] = []  # by priority and arrival; preempted ones come back to their old place
        self.running: list[Sequence] = []  # in the same order
        self.stats = Stats()
        self._folding: list[tuple[Sequence, KVState]] = []  # whose folds are in flight
        self._in_flight: deque[PlannedStep] = deque()  # steps planned, oldest first, whose results are to come
        self._step = 0
        # of the quiet, by slot: window slot, and window start
        self._windows = np.zeros((2, manager.geometry.max_seqs + 1), np.int64)
        self._pressure = Pressure(manager)

    # ---- requests come and go

    def add(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=lambda s: s.order)
        self._pressure.meet(seq.policy)

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Take a sequence out at any moment: it ended, was aborted or failed."""
        if seq.finished:
            return
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            # what was computed beyond the last token, before it was known to be the last, does not count
            stored = min(seq.kv.num_tokens, len(seq.tokens) - bool(seq.output))
            if seq.keeps_turn and reason is not FinishReason.ABORT:
                self.manager.keep(seq.kv, seq.tokens[:stored], seq.request.cache_salt)
            self.manager.release(seq.kv)
            seq.kv.num_tokens = stored
        else:
            self.waiting.remove(seq)
            if seq.swapped:
                self.manager.discard(seq.swapped)
                seq.state, seq.swapped = seq.swapped.kv, None
        seq.status, seq.finish_reason, seq.stop_reason = Status.FINISHED, reason, stop_reason

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # ---- planning

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to compute, or nothing before a result in flight is known."""
        if not self.has_work:
            return None
        self._commit_due()
        self.manager.promise_early()
        self._pressure.relieve(self.running, self.waiting)
        plan = StepBuilder(self.config.tokens_per_step)
        if self._plan_running(plan):
            self._admit(plan)
        if not plan.seqs and self._in_flight:
            return None
        if not plan.seqs and self.running:
            raise RuntimeError("scheduler: no sequence can make progress; this is a bug")
        self.stats.steps += 1
        self.stats.tokens += self.config.tokens_per_step - plan.tokens_left
        self.stats.peak_running = max(self.stats.peak_running, len(self.running))
        self.stats.peak_pages = max(self.stats.peak_pages, sum(pool.num_held for pool in self.manager.pools))
        self._step += 1
        message, step = plan.build(self._step, self.manager)
        self._in_flight.append(step)
        return message

    def _commit_due(self) -> None:
        for seq, kv in self._folding:
            if kv.ticket and kv.num_tokens >= kv.ticket.commit_at:
                self.manager.index(kv, seq.tokens)  # pages that it gives back may be whole prefixes
                self.manager.commit(kv)
                self.stats.folds += 1
        self._folding = [(seq, kv) for seq, kv in self._folding if kv.ticket]  # the others were committed or dropped

    def forget_steps(self) -> None:
        """The steps in flight failed. Their rows may be missing, so no page is known to hold what it should."""
        self._in_flight.clear()
        self.manager.drain_copies()
        self.manager.forget_all()

    def _plan_running(self, plan: StepBuilder) -> bool:
        """Decodes first, then prefills, oldest first. False if pages were short, so that nobody may be admitted.

        Most decodes need nothing but a place for one more token: they are planned all at once, after those that may
        need their pages.
        """
        quiet, kvs, decodes, prefills, ended = [], [], [], [], 0
        room_for_all = len(self.running) <= plan.tokens_left
        for seq in self.running:
            kv = seq.state
            if kv and kv.num_tokens < kv.quiet_until and room_for_all:
                quiet.append(seq)
                kvs.append(kv)
                continue
            pending = seq.num_pending
            if pending == 0:
                ended += 1  # its last token is in flight
            elif seq.grammar and seq.num_drawing:
                continue  # what may follow depends on the token that is being drawn
            elif pending == 1:
                decodes.append(seq)
            else:
                prefills.append(seq)
        enough = self._plan_each(decodes, plan, ended)
        if not enough:
            quiet = [seq for seq in quiet if seq.status is Status.RUNNING]
            kvs = [seq.kv for seq in quiet]
        plan.add_quiet(quiet, kvs, self._windows)
        enough &= self._plan_each(prefills, plan, ended)
        if not plan.seqs and self.running and not self._in_flight:
            self._break_deadlock(plan)
            enough = False
        return enough

    def _plan_each(self, seqs: list[Sequence], plan: StepBuilder, ended: int) -> bool:
        """Plan a chunk of each, preempting others for pages unless some have `ended`. False if pages were short."""
        enough = True
        for seq in seqs:
            if plan.tokens_left == 0:
                break
            if seq.status is not Status.RUNNING:
                continue  # preempted by an older one
            while not self._plan_chunk(seq, plan):
                if ended:  # worth waiting for
                    enough = False
                    break
                victim = self._victim(seq, plan)
                if victim is None:
                    break
                self.preempt(victim)
                enough = False
        return enough

    def _plan_chunk(self, seq: Sequence, plan: StepBuilder) -> bool:
        """Plan as many pending tokens as may be computed now. False only if free pages are what is missing."""
        manager, kv = self.manager, seq.kv
        start, pending = kv.num_tokens, seq.num_pending
        count = min(pending, plan.tokens_left)
        event, window_from = kv.upcoming()
        if kv.ticket:
            count = min(count, kv.ticket.commit_at - start)
        if event is not None:
            count = min(count, event - start)
        if window_from is not None and start + count > window_from and not manager.lend_window(kv):
            count = window_from - start  # the window's queries must be kept: wait at its first token
        if count <= 0:
            return True
        if event is not None and start + count == event and not manager.can_launch(kv, event):
            count -= 1  # wait at the last token before the event
            if count == 0:  # folds in flight will give back more pages than they took: worth waiting for
                return kv.reserved or any(other.ticket for _, other in self._folding)
        if not manager.extend(kv, count):
            return False
        draws = plan.add(seq, kv, start, count, 0 if event is None else event - kv.policy.lead)
        if kv.num_tokens == event:
            plan.jobs += manager.launch(kv, plan.policy_index(kv.policy))
            self._folding.append((seq, kv))
        if draws and seq.may_be_quiet:
            kv.note_quiet()
            self._windows[:, kv.slot] = kv.window_slot, kv.window_start
        return True

    def _victim(self, needy: Sequence, plan: StepBuilder) -> Sequence | None:
        """Who gives up its pages for `needy`: the newest that is newer than it and not in this step.

        First those that evicted nothing and hold no window, then those that evicted (they are swapped).
        """
        planned = {*plan.seqs}
        newer = [s for s in self.running if s.order > needy.order and s not in planned and not s.kv.ticket]
        plain = [s for s in newer if not s.kv.folded and not s.kv.reserved]
        for group in (
            [s for s in plain if not s.kv.window_slot],
            plain,
            [s for s in newer if s.kv.folded and self.can_preempt(s)],
        ):
            if group:
                return group[-1]
        return None

    def _break_deadlock(self, plan: StepBuilder) -> None:
        """Nobody can move: the oldest is stuck behind others that hold what it needs. Preempt from the newest.

        The last resort is to start a request again although it was folded: it is folded again at the same tokens. One
        in pressure mode may stand in its own way, when it was asked to fold too late; it then folds from the start.
        """
        willing = [seq for seq in self.running[1:] if self.can_preempt(seq)]
        others = [seq for seq in self.running if seq not in willing]
        if not others[0].policy.under_pressure:
            del others[0]  # alone, it would fit
        for victim in [*reversed(willing), *reversed(others)]:
            self.preempt(victim, restart=victim in others)
            for seq in list(self.running):
                self._plan_chunk(seq, plan)
            if plan.seqs:
                break

    def can_preempt(self, seq: Sequence) -> bool:
        """Folded rows need a place in host memory, no window, and no further fold in flight."""
        kv = seq.kv
        return not kv.folded or (not kv.ticket and not kv.window_slot and self.manager.fits_host(kv))

    def preempt(self, seq: Sequence, restart: bool = False) -> None:
        """Take a running sequence that `can_preempt` out of the batch, between steps.

        Nothing that was generated is lost: what evicted nothing is recomputed, unless swapping is preferred; what
        evicted is swapped, for recomputing it might keep other rows.

        restart   recompute in any case, and fold from the start if it is in pressure mode
        """
        kv = seq.kv
        self.running.remove(seq)
        swapped = None
        if restart:
            seq.policy = replace(seq.policy, under_pressure=False)
        elif kv.folded or (self.config.preemption == "swap" and not kv.window_slot and not kv.ticket):
            swapped = self.manager.swap_out(kv)
            assert swapped or not kv.folded, "a folded sequence can only be swapped"
        if swapped:
            seq.swapped = swapped
            seq.status = Status.SWAPPED
            self.stats.swaps += 1
        else:
            self.stats.tokens_lost += kv.num_tokens
            self.manager.release(kv)
            seq.state, seq.dropped, seq.status = None, kv, Status.WAITING
        seq.num_preemptions += 1
        self.stats.preemptions += 1
        self.add(seq)

    def _admit(self, plan: StepBuilder) -> None:
        """First come, first served within a priority; the head of the queue is never overtaken, even while the token
        is in flight that it was drawing when it was preempted.

        With nobody running, a request in pressure mode that finds no room never will: it folds from the start.
        """
        config, manager = self.config, self.manager
        while self.waiting and len(self.running) < config.max_num_seqs and plan.tokens_left:
            seq = self.waiting[0]
            if seq.num_drawing or not self._has_window_for(seq):
                return
            # each running sequence without a reservation should be able to open one more page
            margin = manager.geometry.num_groups * sum(not kv.reserved for kv in manager.live)
            if seq.swapped:
                is_back = manager.swap_in(seq.swapped, margin)
                if not is_back and not self.running and seq.policy.under_pressure and not seq.kv.folded:
                    manager.discard(seq.swapped)
                    seq.state, seq.swapped, seq.status = None, None, Status.WAITING
                    seq.policy = replace(seq.policy, under_pressure=False)
                    continue
                if not is_back:
                    return
                manager.discard(seq.swapped)
                seq.state, seq.swapped = seq.swapped.kv, None
            else:
                salt = None if seq.request.sampling.prompt_logprobs is not None else seq.request.cache_salt
                lengths = seq.prompt_len, seq.last
                # what was computed must come out the same again; only what was resumed has nothing to go back to
                resumes = seq.keeps_turn and (seq.dropped is None or seq.dropped.trunk is not None)
                seq.state = manager.admit(seq.policy, seq.tokens, *lengths, salt, margin, resumes)
                if seq.state is None and not self.running and seq.policy.under_pressure:
                    seq.policy = replace(seq.policy, under_pressure=False)
                    continue
                if seq.state is None:
                    return
                if seq.num_cached is None:  # what a resumed request finds of its own is not a hit
                    seq.num_cached, seq.started = seq.kv.num_cached, time.perf_counter()
                    self.stats.prefix_queries += seq.prompt_len
                    self.stats.prefix_hits += seq.kv.num_cached
                    self.stats.resumed += seq.kv.trunk is not None
            self.waiting.pop(0)
            seq.status = Status.RUNNING
            insort(self.running, seq, key=lambda s: s.order)
            self._plan_chunk(seq, plan)

    def _has_window_for(self, seq: Sequence) -> bool:
        """Always, if windows are lent just in time; lent for life, no more requests that need one run than there are
        (hybrid and constrained scheduling; Zipage, arXiv 2603.08743)."""
        if self.config.kv_window_lending == "just-in-time" or not seq.policy.needs_window:
            return True
        return sum(s.policy.needs_window for s in self.running) < self.manager.geometry.window_slots

    # ---- results

    def update(self, result: StepResult) -> list[Sequence]:
        """Take in the oldest step in flight. Returns the sequences that got a token or finished.

        Results belong to sequences, not to slots: whatever became of one since the step was planned, its token counts.
        """
        step, touched = self._in_flight.popleft(), []
        for i, entries in result.prompt_logprobs.items():
            if not step.seqs[i].finished:
                start = step.chunks[i].start
                step.seqs[i].prompt_logprobs[start : start + len(entries)] = entries
        failed = step.of_slots(result.failed)
        results = step.by_chunk(result.ids), step.by_chunk(result.logprobs)
        for seq, kv, drawn, new, logprob in zip(step.seqs, step.kvs, step.draws, *results, strict=True):
            if seq.finish_reason is not None:
                continue  # it ended, or was aborted, while the step was in flight
            tokens, output = seq.tokens, seq.output
            if drawn and seq.max_tokens:
                seq.num_drawing -= 1
                if new is not None:
                    tokens.append(new)
                    output.append(new)
                    if seq.grammar:
                        seq.grammar.accept(new)
            if 0 <= kv.num_indexed < len(tokens) // kv.page_size and seq.runs_on(kv):
                self.manager.index(kv, tokens)
            if logprob is not None and drawn:
                seq.logprobs.append(logprob)
            if failed and kv in failed and seq.state is kv:
                seq.error = failed[kv]  # what later steps draw for it is dropped
                self.finish(seq, FinishReason.ABORT)
                touched.append(seq)
            elif drawn:
                if new is None or new in seq.stop_ids or len(output) >= seq.max_tokens or seq.grammar:
                    self._finish_if_done(seq, new)
                touched.append(seq)
        return touched

    def _finish_if_done(self, seq: Sequence, new: int | None) -> None:
        """Whether token `new` (None: there was none to draw) ends the sequence."""
        if seq.max_tokens == 0:
            self.finish(seq, FinishReason.LENGTH)
        elif new is None:
            seq.error = (seq.grammar and seq.grammar.error) or "the model's logits were not finite"
            self.finish(seq, FinishReason.ABORT)
        elif new in seq.stop_ids and len(seq.output) >= seq.request.sampling.min_tokens:
            self.finish(seq, FinishReason.STOP, new if new in seq.request.sampling.stop_token_ids else None)
        elif seq.grammar and seq.grammar.complete:
            self.finish(seq, FinishReason.STOP)
        elif len(seq.output) >= seq.max_tokens:
            self.finish(seq, FinishReason.LENGTH)
