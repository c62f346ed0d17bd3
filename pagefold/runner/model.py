"""What the runner needs of a model."""

from typing import Protocol

from torch import Tensor

from pagefold.backends.base import Backend, ForwardInputs, KVView


class Model(Protocol):
    """
    scale     softmax scale of its attention
    forward   hidden states [T, hidden] of a batch, whose K and V it stores through the backend
    logits    [N, vocab] of some of them, in any precision
    """

    scale: float

    def forward(self, fwd: ForwardInputs, kv: KVView, backend: Backend) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...
