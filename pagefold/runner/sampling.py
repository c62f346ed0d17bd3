"""What the runner asks of a sampler, and the sampler of the host behind it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from pagefold.core.types import Samples, TokenLogprobs
from pagefold.runner.sampler import Sampler, at_least_float32

T = TypeVar("T")
Drawn = tuple[list[int | None], list[TokenLogprobs | None]]


class Draw(Protocol):
    """Tokens that may still be being drawn.

    ids   int64[N] on the device; not a token where a row has no distribution
    """

    ids: Tensor

    def result(self) -> Drawn: ...


class PromptRanks(Protocol):
    """Log-probabilities of a prompt that may still be being computed."""

    def result(self) -> list[TokenLogprobs]: ...


class StepSampler(Protocol):
    """Draws one token per row of logits [N, >= vocab_size].

    specs  one per row, none of them None
    last   int64[N], the token before the one drawn: a spec of a step that was planned ahead may lack it
    """

    def launch(self, logits: Tensor, specs: Samples, last: Tensor) -> Draw: ...

    def prompt_logprobs(self, logits: Tensor, targets: Sequence[int], k: int) -> PromptRanks: ...


class Ready(Generic[T]):
    """A result that needs no waiting."""

    def __init__(self, value: T):
        self._value = value

    def result(self) -> T:
        return self._value


class _HostDraw(Ready[Drawn]):
    def __init__(self, drawn: Drawn):
        super().__init__(drawn)
        self.ids = torch.tensor([-1 if token is None else token for token in drawn[0]], dtype=torch.int64)


class HostSampler:
    """`Sampler` as a `StepSampler`: it waits for the logits and draws at once."""

    def __init__(self, vocab_size: int):
        self._sampler = Sampler(vocab_size)

    def launch(self, logits: Tensor, specs: Samples, last: Tensor) -> _HostDraw:
        whole = []
        for spec, token in zip(specs, last.tolist(), strict=True):
            assert spec is not None
            known = len(spec.prompt) + len(spec.output)
            whole.append(spec if known == spec.position else replace(spec, output=[*spec.output, token]))
        return _HostDraw(self._sampler.sample(at_least_float32(logits), whole))

    def prompt_logprobs(self, logits: Tensor, targets: Sequence[int], k: int) -> Ready[list[TokenLogprobs]]:
        return Ready(self._sampler.prompt_logprobs(at_least_float32(logits), targets, k))
