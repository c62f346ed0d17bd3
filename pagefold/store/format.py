"""What one stored row is in bytes. A page format is a pair of row codecs, one for K and one for V."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor, dtype

from pagefold.core.registry import Registry

FORMATS = Registry("format", "pagefold.store.formats")


@dataclass(frozen=True)
class Plane:
    """One tensor of a store: `width` elements of `dtype` for each row of each column of each page."""

    dtype: dtype
    width: int

    @property
    def bytes_per_row(self) -> int:
        return self.width * self.dtype.itemsize


class RowCodec(Protocol):
    """Codec of one row of K or of V. Its statistics never involve another row, so rows move without re-encoding.

    rotate    rows are stored in the frame of an orthonormal Hadamard transform: `encode` applies it, `decode` undoes
              it. Attention may instead rotate the query and read `decode_stored` (K), or un-rotate its output (V).
    c_load    C source of a row loader for the compiled CPU kernel (see `pagefold/backends/cpu_decode.py`), or "" if
              there is none: then the CPU backend decodes rows with torch.
    c_store   C source of a row encoder likewise (see `pagefold/backends/cpu_append.py`), or "".
    """

    rotate: bool
    c_load: str
    c_store: str

    def planes(self, head_dim: int) -> tuple[Plane, Plane]:
        """(data, scale) planes of a row; the scale plane's width may be 0."""
        ...

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """float[..., D] -> (data, scale): the definition of the codec."""
        ...

    def decode_stored(self, data: Tensor, scale: Tensor, out: dtype) -> Tensor:
        """(data, scale) -> out[..., D] in the frame the row is stored in."""
        ...

    def decode(self, data: Tensor, scale: Tensor, out: dtype) -> Tensor:
        """(data, scale) -> out[..., D] in the model's frame."""
        ...


class PageFormat(Protocol):
    """A registered name for a pair of row codecs."""

    name: ClassVar[str]
    k: ClassVar[RowCodec]
    v: ClassVar[RowCodec]


@dataclass(frozen=True)
class FormatPair:
    """The codecs of one tier, as built by `parse_format`."""

    name: str
    k: RowCodec
    v: RowCodec

    def bytes_per_row(self, head_dim: int) -> int:
        """Bytes of K and V of one token for one head, scales included."""
        return sum(p.bytes_per_row for codec in (self.k, self.v) for p in codec.planes(head_dim))


def parse_format(spec: str) -> FormatPair:
    """``"int4"``, or ``"k=int4,v=fp8"`` for the K codec of one format with the V codec of another."""
    if "=" not in spec:
        both = FORMATS.build(spec)
        return FormatPair(spec, both.k, both.v)
    parts = {side: name for side, _, name in (item.partition("=") for item in spec.split(","))}
    if set(parts) != {"k", "v"}:
        raise ValueError(f"format {spec!r}: expected a name or 'k=NAME,v=NAME'")
    return FormatPair(spec, FORMATS.build(parts["k"]).k, FORMATS.build(parts["v"]).v)
