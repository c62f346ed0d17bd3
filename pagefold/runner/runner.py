"""Executes step plans: the device tables, one forward pass, the draws, the compactions."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagefold.backends.base import Backend, ForwardInputs, KVView
from pagefold.core.types import StepPlan, StepResult, SwapOp, TableEdits, TokenLogprobs
from pagefold.runner.compressor import Compressor
from pagefold.runner.inputs import forward_inputs
from pagefold.runner.sampler import Sampler
from pagefold.store.pagestore import PageStore


class Model(Protocol):
    """What the runner needs of a model."""

    scale: float

    def forward(self, fwd: ForwardInputs, kv: KVView, backend: Backend) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Launched:
    """A step that may still be running on the device."""

    def __init__(self, result: StepResult):
        self._result = result

    def result(self) -> StepResult:
        """Wait for the step and return what it drew."""
        return self._result


class ModelRunner:
    """Turns a plan into a result, and nothing else: no decision is taken here.

    Steps are launched in the order of their plans. A plan may be launched before the one before it was waited for: a
    token it does not know yet (-1) is the one drawn last for that slot, which never leaves the device in between.

    model     forward pass and head
    backend   whoever touches page bytes
    kv        the stores and tables
    host      one store per tier in host memory, for swapped requests
    """

    def __init__(self, model: Model, backend: Backend, kv: KVView, host: list[PageStore], vocab_size: int):
        self.model = model
        self.backend = backend
        self.kv = kv
        self.host = host
        self.sampler = Sampler(vocab_size)
        self.compressor = Compressor(backend, kv, model.scale)
        self._drawn = torch.zeros(len(kv.page_table), dtype=torch.int64, device=kv.page_table.device)  # by slot

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        self._apply(plan.edits)
        self._swap(plan.swaps)
        if not plan.chunks:
            return Launched(StepResult(plan.step, [], [], {}))
        fwd = forward_inputs(plan, self._drawn)
        hidden = self.model.forward(fwd, self.kv, self.backend)
        logits = self.model.logits(hidden[fwd.logits_at])
        result = self._sample(plan, logits.to(torch.promote_types(logits.dtype, torch.float32)))
        self.compressor.run(plan.jobs, plan.policies)
        return Launched(result)

    def _apply(self, edits: TableEdits) -> None:
        """Edits are in order and later ones win, which numpy's assignment guarantees and torch's does not."""
        table, evicted, cold = (t.numpy() for t in (self.kv.page_table, self.kv.evicted, self.kv.cold))
        slot, group, index, page = edits.pages.T
        table[slot, group, index] = page
        slot, group, rows, pages = edits.lengths.T
        evicted[slot, group] = rows
        cold[slot, group] = pages

    def _swap(self, swaps: list[SwapOp]) -> None:
        for op in swaps:
            device, host = self.kv.tiers[op.tier], self.host[op.tier]
            src, dst = (device, host) if op.to_host else (host, device)
            ids = [torch.from_numpy(np.asarray(pages, np.int64)) for pages in (op.src_pages, op.dst_pages)]
            self.backend.copy_pages(src, ids[0], dst, ids[1])

    def _sample(self, plan: StepPlan, logits: Tensor) -> StepResult:
        """The last row of each chunk's logits is drawn from; the others are the prompt's."""
        wanted = [(i, chunk) for i, chunk in enumerate(plan.chunks) if chunk.num_logits]
        ends = np.cumsum([chunk.num_logits for _, chunk in wanted])
        prompt: dict[int, list[TokenLogprobs]] = {}
        for (i, chunk), end in zip(wanted, ends, strict=True):
            if i in plan.prompt_targets:
                targets, k = plan.prompt_targets[i]
                first = end - chunk.num_logits
                prompt[i] = self.sampler.prompt_logprobs(logits[first : first + len(targets)], targets, k)
        drawn = [n for n, spec in enumerate(plan.samples) if spec is not None]
        ids: list[int | None] = [None] * len(wanted)
        logprobs: list[TokenLogprobs | None] = [None] * len(wanted)
        if drawn:
            specs = [spec for spec in plan.samples if spec is not None]
            rows = logits if len(drawn) == len(logits) else logits[torch.from_numpy(ends[drawn] - 1)]
            for n, token, logprob in zip(drawn, *self.sampler.sample(rows, specs), strict=True):
                ids[n], logprobs[n] = token, logprob
                self._drawn[wanted[n][1].slot] = token or 0
        return StepResult(plan.step, ids, logprobs, prompt)
