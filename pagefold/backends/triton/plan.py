"""What is decided on the host: kernel shapes, constants of the codecs, splits, and the index tables of a batch."""

import functools
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from pagefold.backends.base import ForwardInputs, KVView
from pagefold.store.format import RowCodec
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
    programs   aimed at, so that the device is full: rows are split until there are as many (16 warps of programs for
               each multiprocessor fit beside their registers and shared memory)
    min_rows   of a split, so that short sequences are not split for nothing
    heads      least number of query heads in a product; the matrix units take 8
    """

    programs: int = 528
    min_rows: int = 256
    heads: int = 8


@functools.cache
def multiprocessors() -> int:
    """Of the device; those of an H200 where there is none."""
    return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 132


def decode_shape(v: DeviceCodec, head_dim: int) -> DecodeShape:
    """Channels of a piece of V are what warps share; with less than 16 each they do the same work twice."""
    warps = max(1, min(4, head_dim // v.num_pieces // 32))
    return DecodeShape(tile=64, warps=warps, stages=3, programs=multiprocessors() * 16 // warps)


def prefill_shape(head_dim: int) -> Shape:
    return Shape(tile=64, warps=8 if head_dim >= 128 else 4, stages=2)


def interpreted() -> bool:
    """Kernels run in Triton's interpreter, where products of bfloat16 are silently wrong: use float32."""
    return bool(triton.knobs.runtime.interpret)


def device_codec(codec: RowCodec) -> DeviceCodec:
    device = getattr(cast(DeviceRowCodec, codec), "device", None)
    if device is None:
        raise ValueError(f"backend triton: no kernels for {codec}; use one of bf16, fp16, fp32, fp8, int4, k4v2")
    return device


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

    token_slots   int64[T]
    """

    kv: KVView
    token_slots: Tensor
    decode: DecodePart | None
    prefill: PrefillPart | None


def plan_batch(kv: KVView, fwd: ForwardInputs, tile_tokens: int) -> BatchPlan:
    """Of a batch of single tokens, padding included, every table is an input as it is: nothing is copied to the device,
    and the lengths on the host only bound the number of splits. So a captured graph stays valid for other lengths."""
    q_lens = fwd.host_q_lens
    if all(q_len == 1 for q_len in q_lens):
        part = DecodePart(fwd.q_start[:-1], fwd.slots, fwd.seq_lens, max(fwd.host_seq_lens))
        return BatchPlan(kv, fwd.slots, part, None)
    device = fwd.slots.device
    tensor = lambda values: torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)  # noqa: E731
    token_slots = tensor([slot for slot, q_len in zip(fwd.host_slots, q_lens) for _ in range(q_len)])
    starts = [0]
    for q_len in q_lens:
        starts.append(starts[-1] + q_len)
    single = [b for b, q_len in enumerate(q_lens) if q_len == 1]
    decode = None
    if single:
        index = tensor(single)
        longest = max(fwd.host_seq_lens[b] for b in single)
        decode = DecodePart(tensor([starts[b] for b in single]), fwd.slots[index], fwd.seq_lens[index], longest)
    tiles, tokens = [], []
    for b, q_len in enumerate(q_lens):
        if q_len > 1:
            tiles += [(b, first, len(tokens) + first) for first in range(0, q_len, tile_tokens)]
            tokens += range(starts[b], starts[b + 1])
    tiles.sort(key=lambda tile: -(fwd.host_seq_lens[tile[0]] - q_lens[tile[0]] + tile[1]))  # longest first
    chunk, first, token = (tensor(column) for column in zip(*tiles))
    return BatchPlan(kv, token_slots, decode, PrefillPart(chunk, first, token, tensor(tokens)))
