"""What is decided on the host: kernel shapes, constants of the codecs, splits, and the index tables of a batch."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from pagefold.backends.base import ForwardInputs, KVView
from pagefold.backends.upload import upload
from pagefold.store.format import FORMATS, RowCodec
from pagefold.store.shim import DeviceCodec, DeviceRowCodec, tl, triton


@dataclass(frozen=True)
class Shape:
    """How a kernel over rows is launched.

    tile       rows at a time; may span several pages or be a part of one
    warps      of a program
    stages     of the software pipeline: tiles in flight, plus one
    """

    tile: int
    warps: int
    stages: int


@dataclass(frozen=True)
class DecodeShape(Shape):
    """
    programs   that run at once (16 warps of programs for each multiprocessor fit beside their registers and shared
               memory), for which rows are dealt out or split
    min_rows   of a split, so that short sequences are not split for nothing, where the device is full without
    heads      least number of query heads in a product; the matrix units take 8
    """

    programs: int = 528
    min_rows: int = 256
    heads: int = 8


@functools.cache
def multiprocessors() -> int:
    """Of the device; those of an H200 where there is none."""
    return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 132


@functools.cache
def multiplies_in_shared_memory() -> bool:
    """Whether matrix units take both operands from there, and not from registers, as those of an H200 do, and of what
    there is where there is no device."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(0)[0] in (9, 10)


# Shapes of decode by the number of pieces of a row of V: tile, warps, stages, warps of programs aimed at for each
# multiprocessor, least rows of a split. Channels of a piece are what warps share; with less than 16 each they do the
# same work twice. Rows that are read as one piece are wide, so that two stages of them are as many bytes in flight as
# three of packed ones.
DECODE = {1: (64, 4, 2, 16, 256), 2: (64, 4, 3, 16, 256), 4: (64, 2, 3, 16, 256), 8: (32, 1, 3, 12, 256)}


def decode_shape(v: DeviceCodec, head_dim: int) -> DecodeShape:
    """What suits rows of V, on the device that is there."""
    tile, warps, stages, filled, min_rows = DECODE[max(pieces for pieces in DECODE if pieces <= v.num_pieces)]
    warps = max(1, min(warps, head_dim // v.num_pieces // 16))
    return DecodeShape(tile, warps, stages, multiprocessors() * filled // warps, min_rows)


def prefill_shape(v: DeviceCodec, head_dim: int) -> Shape:
    """Rows of one piece cost nothing to unpack and are waited for: a stage more. Those of many are short, and longer
    tiles spread what is done once a tile. Four warps for pieces of eight channels are beyond Triton 3.6."""
    warps = 8 if head_dim >= 128 or v.num_pieces == 8 else 4
    return Shape(tile=128 if v.num_pieces >= 4 else 64, warps=warps, stages=3 if v.num_pieces == 1 else 2)


def interpreted() -> bool:
    """Kernels run in Triton's interpreter, where products of bfloat16 are silently wrong: use float32."""
    return bool(triton.knobs.runtime.interpret)


def device_codec(codec: RowCodec) -> DeviceCodec:
    device = _device_of(codec)
    if device is None:
        built = {name: FORMATS.build(name) for name in FORMATS.names()}
        known = [name for name, both in built.items() if _device_of(both.k) and _device_of(both.v)]
        raise ValueError(f"backend triton: no kernels for {codec}; use one of {', '.join(known)}")
    return device


def _device_of(codec: RowCodec) -> DeviceCodec | None:
    return getattr(cast(DeviceRowCodec, codec), "device", None)


def mma_dtype(codec: DeviceCodec) -> Any:
    if interpreted():
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[codec.mma]


def reading(codec: RowCodec, head_dim: int, role: str = "") -> dict[str, Any]:
    """Constants of a kernel that multiplies rows of a codec; `role` "K" or "V" makes their names differ."""
    device = device_codec(codec)
    constants = {
        "LOAD": device.load,
        "PIECES": device.num_pieces,
        "PAIRS": device.pairs,
        "BIAS": device.bias,
        "GAIN": device.gain,
        "SCALED": codec.planes(head_dim)[1].width > 0,
        "MMA": mma_dtype(device),
    }
    if not role:
        return constants
    return {f"LOAD_{role}" if name == "LOAD" else f"{role}_{name}": value for name, value in constants.items()}


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def tile_tokens(kv: KVView) -> int:
    """Tokens of a tile of queries in prefill: 128 rows with the query heads of a KV head."""
    per_head = kv.window.shape[3] // kv.group_of.shape[1]
    return max(1, 128 // next_power_of_2(per_head))


def least_rows(shape: DecodeShape, programs: int) -> int:
    """Rows of a split at least, whole tiles; `programs` attend to one split each. Where they are too few to fill the
    device, a tile a split: the tiles that a program reads one after the other would be all the time."""
    tiles = -(-shape.min_rows // shape.tile)
    return shape.tile * (1 if programs * tiles < shape.programs else tiles)


def num_splits(shape: DecodeShape, programs: int, max_rows: int) -> int:
    """Splits of a head's rows where they are not dealt out: about three for each place on the device, rather fewer, as
    whole heads need no merging; none shorter than `least_rows`. The factor is measured."""
    return max(1, min(int(2.6 * shape.programs / programs), max_rows // least_rows(shape, programs)))


@dataclass
class DecodePart:
    """The chunks of one token: their tokens, slots and lengths, int64[b] each, and the splits of each head's rows."""

    tokens: Tensor
    slots: Tensor
    seq_lens: Tensor
    max_rows: int


@dataclass
class PrefillPart:
    """The longer chunks, cut into tiles of queries: chunk, first token in the chunk, and first partial result.

    tokens   int64[n]   tokens of the batch, in the order of the partial results
    """

    tile_chunk: Tensor
    tile_first: Tensor
    tile_token: Tensor
    tokens: Tensor


@dataclass
class BatchPlan:
    """Tables of one batch, the same for every layer.

    planes        of each tier: rows of k_data, k_scale, v_data, v_scale
    token_slots   int64[T]
    appended      what `append` returned last, and the same queries in the rotated frame, if a tier stores K in it
    long          chunks that `long_prefill` attends to
    deal          how the rows of `decode` are cut, once a layer has attended; where heads are of unequal lengths
    """

    kv: KVView
    planes: list[list[Tensor]]
    token_slots: Tensor
    decode: DecodePart | None
    prefill: PrefillPart | None
    appended: tuple[Tensor, Tensor] | None = None
    long: Sequence[Any] = ()
    deal: Any = None


def plan_batch(kv: KVView, fwd: ForwardInputs, apart: Sequence[int] = ()) -> BatchPlan:
    """`apart` are chunks that get no part of their own.

    Of a batch of single tokens, padding included, every table is an input as it is: nothing is copied to the device,
    and the lengths on the host only bound the number of splits. So a captured graph stays valid for other lengths.
    The tables of any other batch are made here and go to the device in one copy."""
    names = ("k_data", "k_scale", "v_data", "v_scale")
    planes = [[store.rows(name) for name in names] for store in kv.tiers]
    q_lens, slots, seq_lens = (np.array(x, np.int64) for x in (fwd.host_q_lens, fwd.host_slots, fwd.host_seq_lens))
    if (q_lens == 1).all():
        part = DecodePart(fwd.q_start[:-1], fwd.slots, fwd.seq_lens, int(seq_lens.max()))
        return BatchPlan(kv, planes, fwd.slots, part, None)
    starts = q_lens.cumsum() - q_lens
    single, long = np.flatnonzero(q_lens == 1), np.setdiff1d(np.flatnonzero(q_lens > 1), apart)
    tables = [np.repeat(slots, q_lens), starts[single], slots[single], seq_lens[single]]
    tables += _prefill_tables(long, starts[long], q_lens[long], seq_lens[long], tile_tokens(kv))
    token_slots, *of_single, chunk, first, place, tokens = upload(tables, fwd.slots.device)
    decode = DecodePart(*of_single, max_rows=int(seq_lens[single].max())) if len(single) else None
    prefill = PrefillPart(chunk, first, place, tokens) if len(long) else None
    return BatchPlan(kv, planes, token_slots, decode, prefill)


def _prefill_tables(
    chunks: np.ndarray, starts: np.ndarray, q_lens: np.ndarray, seq_lens: np.ndarray, tile: int
) -> list[np.ndarray]:
    """The tables of `PrefillPart` for chunks of a batch, given their first tokens in it; longest tiles first."""
    partial_starts = q_lens.cumsum() - q_lens  # of each chunk among the partial results
    num_tiles = -(-q_lens // tile)
    each = np.repeat(np.arange(len(chunks)), num_tiles)
    first = (np.arange(len(each)) - (num_tiles.cumsum() - num_tiles)[each]) * tile
    order = np.argsort((q_lens - seq_lens)[each] - first, kind="stable")
    each, first = each[order], first[order]
    tokens = np.arange(q_lens.sum()) + np.repeat(starts - partial_starts, q_lens)
    return [chunks[each], first, partial_starts[each] + first, tokens]
