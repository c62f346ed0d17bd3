"""Triton, or an inert stand-in where it is missing, so that a format's device functions can sit beside its codec."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor


class _Inert:
    """Whatever is asked of it, it is there and does nothing; as a decorator it leaves functions alone."""

    def __getattr__(self, name: str) -> "_Inert":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else self


if TYPE_CHECKING:
    triton: Any = None

    class tl(Any):
        constexpr: TypeAlias = Any

else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = tl = _Inert()

HAS_TRITON = not isinstance(triton, _Inert)
jit: Any = triton.jit


@jit
def load_tile(data, row, ok, WIDTH: tl.constexpr, ACROSS: tl.constexpr):
    """Rows of WIDTH elements as a tile [N, WIDTH], or, ACROSS, as [WIDTH, N]: loaded so, not transposed later, because
    only then do asynchronous copies fill shared memory ahead of the loop."""
    o, first = tl.arange(0, WIDTH), row.to(tl.int64) * WIDTH
    if ACROSS:
        return tl.load(data + first[None, :] + o[:, None], mask=ok[None, :], other=0)
    else:
        return tl.load(data + first[:, None] + o[None, :], mask=ok[:, None], other=0)


@dataclass(frozen=True)
class DeviceCodec:
    """How kernels read and write rows of a codec.

    A row is read as P tiles, its *pieces*, so that what is packed into a byte never has to be put in order. Piece p
    holds D / P channels, and

        channel(p, j) = p % pairs + p // pairs * (D * pairs / P) + j * pairs,       0 <= j < D / P
        number        = (entry - bias[p]) * gain[p] * scale of the row

        load    jit (data, row[N], ok[N], D, ACROSS, MMA) -> P tiles [N, D / P], or with ACROSS [D / P, N], of dtype
                MMA; bytes of rows that are not ok read as 0
        store   jit (data, scale, row[N], ok[N], x[N, D], D, OPTIONS): encode and write float32 rows of the model's
                frame, the same bytes as the codec's `encode`
        mma     operands of matrix products with these rows
        pairs   neighbouring channels that share a 16-bit word
        bias    of all pieces, or of none
        options constants of `store`
        lengths_alone   lengths of rows are better read by themselves than taken where rows are multiplied
    """

    load: Callable
    store: Callable
    mma: torch.dtype
    pairs: int = 1
    bias: tuple[float, ...] = (0.0,)
    gain: tuple[float, ...] = (1.0,)
    options: tuple[float, ...] = ()
    lengths_alone: bool = False

    def __post_init__(self):
        if any(self.bias) != all(self.bias):
            raise ValueError(f"bias: got {self.bias}, kernels look at the first to see whether there is any")

    @property
    def num_pieces(self) -> int:
        return len(self.bias)

    def numbers(self, pieces: list[Tensor]) -> Tensor:
        """float32[N, D] from the pieces of N rows, before the rows' scales: what the layout above means."""
        shifted = [(piece.float() - bias) * gain for piece, bias, gain in zip(pieces, self.bias, self.gain)]
        parts = torch.stack(shifted, 1).unflatten(1, (-1, self.pairs))  # [N, parts, pairs, D / P]
        return parts.transpose(2, 3).flatten(1)


class DeviceRowCodec(Protocol):
    """A row codec that kernels can read; `device` is None where they cannot."""

    device: DeviceCodec | None
