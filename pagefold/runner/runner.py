"""Executes step plans: the device tables, one forward pass, the draws, the compactions."""

import logging
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pagefold.backends.base import Backend, KVView
from pagefold.backends.upload import upload
from pagefold.core.types import Move, Samples, StepPlan, StepResult, SwapOp, TableEdits, TokenLogprobs
from pagefold.runner.compressor import Compressor
from pagefold.runner.graphs import DecodeGraphs
from pagefold.runner.inputs import batch_of, forward_inputs
from pagefold.runner.model import Model
from pagefold.runner.sampling import Draw, PromptRanks, StepSampler
from pagefold.store.pagestore import PageStore

logger = logging.getLogger("pagefold")

RANKED_ROWS = 512  # of a prompt, whose logits are held at a time


@dataclass
class Launched:
    """A step that may still be running on the device.

    samples   as in the plan
    draw      of those that are not None
    ranks     {index of a chunk: log-probabilities of its part of a prompt, in slices}
    failed    {slot: what went wrong} where the jobs of the step failed
    """

    step: int
    samples: Samples
    draw: Draw | None
    ranks: dict[int, list[PromptRanks]]
    failed: dict[int, str] = field(default_factory=dict)

    def result(self) -> StepResult:
        """Wait for the step and return what it drew."""
        ids: list[int | None] = [None] * len(self.samples)
        logprobs: list[TokenLogprobs | None] = [None] * len(self.samples)
        if self.draw:
            drawn = self.draw.result()
            if len(drawn[0]) == len(ids):
                ids, logprobs = drawn
            else:
                for n, token, entry in zip(self.samples.drawn, *drawn, strict=True):
                    ids[n], logprobs[n] = token, entry
        return StepResult(
            self.step,
            ids,
            logprobs,
            {i: [entry for part in parts for entry in part.result()] for i, parts in self.ranks.items()},
            self.failed,
        )


class ModelRunner:
    """Turns plans into results, and nothing else: no decision is taken here.

    Steps are launched in the order of their plans. A plan may be launched before the one before it was waited for: a
    token it does not know yet (-1) is the one drawn last for that slot, which never leaves the device in between.

    model     forward pass and head
    backend   whoever touches page bytes
    kv        the stores and tables
    host      for each part of the view, one store per tier in host memory, for swapped requests and trunks
    graphs    captured passes of decode batches (see `capture`), or None
    overlap   jobs run beside the steps until their commit, on a device
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        kv: KVView,
        host: list[list[PageStore]],
        sampler: StepSampler,
        overlap: bool = False,
    ):
        self.model = model
        self.backend = backend
        self.kv = kv
        self.host = host
        self.sampler = sampler
        self.compressor = Compressor(backend, kv, model.scale, overlap=overlap, graphs=True)
        self.graphs: DecodeGraphs | None = None
        self.device = kv.page_table.device
        self._drawn = torch.zeros(len(kv.page_table), dtype=torch.int64, device=self.device)  # by slot
        self._evicted = np.zeros(kv.evicted.shape, np.int32)  # the same on the host

    @torch.inference_mode()
    def capture(self, sizes: list[int], max_model_len: int) -> None:
        """Capture decode batches of these sizes."""
        self.graphs = DecodeGraphs(self.model, self.backend, self.kv, sizes, max_model_len, self._drawn)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        self.compressor.before_edits(plan.edits, plan.swaps)
        self._apply(plan.edits)
        for op in plan.swaps:
            self.swap(op)
        if not plan.chunks:
            return Launched(plan.step, plan.samples, None, {})
        batch = batch_of(plan, self.kv.window_stride)
        if self.graphs and self.graphs.fits(batch):
            hidden, last, slots = self.graphs.replay(batch)
        else:
            fwd = forward_inputs(batch, self._drawn, self._evicted)
            hidden = self.model.forward(fwd, self.kv, self.backend)
            hidden, last, slots = hidden[fwd.logits_at], fwd.tokens[fwd.logits_at], fwd.slots
        ends = batch.num_logits.cumsum()
        ranks = {}
        for i, (targets, k) in plan.prompt_targets.items():
            first = ends[i] - batch.num_logits[i]
            ranks[i] = self._rank(hidden[first : first + len(targets)], targets, k)
        specs, draw = plan.samples.only_drawn(), None
        if specs:
            if len(specs) < len(ends) or len(specs) < len(hidden):
                # the last row of a chunk's logits is drawn from; the others are the prompt's
                chunks = np.flatnonzero(batch.num_logits)[plan.samples.drawn]
                rows, slots = upload([ends[chunks] - 1, batch.slots[chunks]], self.device)
                hidden, last = hidden[rows], last[rows]
            draw = self.sampler.launch(self.model.logits(hidden), specs, last)
            self._drawn.index_copy_(0, slots, draw.ids.clamp(min=0))
        return Launched(plan.step, plan.samples, draw, ranks, self._fold(plan))

    def warm_up_swaps(self) -> None:
        """Compile what they launch, by copies of garbage, so that no request waits for it."""
        garbage = np.zeros(1, np.int32)
        for tier in range(len(self.host[0])):
            for move in (Move.OUT, Move.IN):
                self.swap(SwapOp(tier, move, garbage, garbage))

    def swap(self, op: SwapOp) -> None:
        """In the order of the steps: what follows may overwrite what has left, and reads what has come."""
        src_pages, dst_pages = upload([op.src_pages, op.dst_pages], self.device)
        for part, host in zip(self.kv.parts, self.host, strict=True):
            src = (host if op.move is Move.IN else part.tiers)[op.tier]
            dst = (host if op.move is Move.OUT else part.tiers)[op.tier]
            self.backend.copy_pages(src, src_pages, dst, dst_pages)

    def _fold(self, plan: StepPlan) -> dict[int, str]:
        """Run the jobs. If they fail, say so for the slots that they are of: nobody else reads what they write."""
        try:
            self.compressor.run(plan.jobs, plan.policies)
        except Exception as error:
            logger.exception("compaction failed")
            return {job.slot: f"compaction failed: {error}" for job in plan.jobs}
        return {}

    def _rank(self, hidden: Tensor, targets: list[int], k: int) -> list[PromptRanks]:
        """Log-probabilities of a part of a prompt, a slice at a time: logits of a whole chunk would be gigabytes."""
        return [
            self.sampler.prompt_logprobs(
                self.model.logits(hidden[i : i + RANKED_ROWS]), targets[i : i + RANKED_ROWS], k
            )
            for i in range(0, len(targets), RANKED_ROWS)
        ]

    def _apply(self, edits: TableEdits) -> None:
        if not len(edits.pages) and not len(edits.lengths):
            return
        kv = self.kv
        num_groups, max_pages = kv.page_table.shape[1:]
        slot, group, index, page = edits.pages.T.astype(np.int64)
        owner, part, rows, cold = edits.lengths.T.astype(np.int64)
        at = (slot * num_groups + group) * max_pages + index, owner * num_groups + part
        pages_at, lengths_at, *values = upload([*at, page, rows, cold], self.device)
        page, evicted, cold = (_as_int32(column) for column in values)
        if len(page):
            kv.page_table.view(-1).index_copy_(0, pages_at, page)
        if len(evicted):
            self._evicted[owner, part] = rows
            kv.evicted.view(-1).index_copy_(0, lengths_at, evicted)
            kv.cold.view(-1).index_copy_(0, lengths_at, cold)


def _as_int32(x: Tensor) -> Tensor:
    """Small numbers of int64[N], without a copy: their low halves."""
    return x.view(torch.int32)[::2]
