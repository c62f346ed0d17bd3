"""Teacher forcing through the real cache: what the model predicts after each token of a text, folds and all.

The text is a prompt whose rows are folded while it is read (`kv_prefill_buffer`), so token t is predicted from what
the cache still holds at t. The engine hands back the model's last hidden states, a thousandth of the logits in size;
`compare` makes distributions of them, a block at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import torch
from torch import Tensor

from pagefold.backends.base import Backend, ForwardInputs, KVView
from pagefold.core.config import EngineConfig
from pagefold.core.types import Request, SamplingParams
from pagefold.engine.build import Loaded, build_engine
from pagefold.models.decoder import Decoder
from pagefold.runner.model import Model
from pagefold.runner.sampler import at_least_float32
from pagefold.runner.sampling import Ready

BLOCK_ROWS = 128  # distributions held at a time


class _Headless:
    """A model without its head: its logits are its hidden states."""

    def __init__(self, model: Model):
        self.scale = model.scale
        self._model = model

    def forward(self, fwd: ForwardInputs, kv: KVView, backend: Backend) -> Tensor:
        return self._model.forward(fwd, kv, backend)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


class _HandThrough:
    """In the sampler's place: rows of the prompt go to the request's output as they are."""

    def prompt_logprobs(self, logits: Tensor, targets: Sequence[int], k: int) -> Ready[list[Tensor]]:
        return Ready(list(logits))


class Teacher:
    """Reads texts with an engine of its own around a model that is in memory."""

    def __init__(self, loaded: Loaded, config: EngineConfig):
        eager = replace(config.model, enforce_eager=True)  # what a graph returns is overwritten by the next step
        self.engine = build_engine(replace(config, model=eager), loaded)
        runner = self.engine.runner
        runner.model, runner.sampler = _Headless(runner.model), _HandThrough()  # type: ignore[assignment]
        self._ids = count()

    def read(self, windows: Sequence[Sequence[int]], progress: Callable[[int], object] | None = None) -> list[Tensor]:
        """Hidden states that predict the tokens 1, 2, ... of each window: [len(window) - 1, hidden] in the model's
        dtype, the final norm applied.

        progress   told after every step how many tokens have been read
        Raises InputError if a window is longer than the context or the pool.
        """
        engine, done = self.engine, {}
        names = [f"{next(self._ids)}" for _ in windows]
        for name, window in zip(names, windows, strict=True):
            engine.add(Request(name, tuple(window), SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False)))
        num_read = 0
        while engine.has_work:
            for output in engine.step():
                assert output.prompt_logprobs is not None
                done[output.request_id] = torch.stack(output.prompt_logprobs[1:])  # type: ignore[arg-type]
                num_read += len(output.prompt_token_ids)
            if progress:
                progress(num_read + sum(seq.kv.num_tokens for seq in engine.scheduler.running if seq.kv))
        return [done[name] for name in names]


@dataclass(frozen=True)
class Comparison:
    """One model, two caches, token by token: float32[T] each, in nats.

    nll     minus the log-probability of the token that came, through the cache under test
    kl      Kullback-Leibler divergence of its prediction from the full cache's, KL(full || tested)
    agree   1 where both rank the same token first, else 0
    """

    nll: np.ndarray
    kl: np.ndarray
    agree: np.ndarray


@torch.inference_mode()
def compare(decoder: Decoder, full: Tensor, tested: Tensor, window: Sequence[int]) -> Comparison:
    """Score the predictions from hidden states [T, hidden] of one window of T + 1 tokens (see `Teacher.read`)."""
    parts = []
    targets = torch.tensor(window[1:], device=full.device)
    for first in range(0, len(targets), BLOCK_ROWS):
        rows = slice(first, first + BLOCK_ROWS)
        p, q = (log_probs(decoder, hidden[rows]) for hidden in (full, tested))
        nll = -q.gather(1, targets[rows, None])[:, 0]
        kl = (p.exp() * (p - q)).sum(-1)
        agree = p.argmax(-1) == q.argmax(-1)
        parts.append(torch.stack([nll.float(), kl.float(), agree.float()]).cpu().numpy())
    return Comparison(*np.concatenate(parts, axis=1))


def log_probs(decoder: Decoder, hidden: Tensor) -> Tensor:
    """Log-probabilities [N, vocab] after hidden states [N, hidden]; float32, or float64 for a float64 model."""
    logits = decoder.logits(hidden)[:, : decoder.spec.vocab_size]
    return at_least_float32(logits).log_softmax(-1)
