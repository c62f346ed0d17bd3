"""From named tensors to a decoder: read, check, convert, fuse and pack, one tensor at a time."""

import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from pagefold.models.decoder import Decoder, Layer, Weights
from pagefold.models.layers import Linear, RMSNorm
from pagefold.models.spec import ModelSpec

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# field of a Layer <- modules whose rows it holds, in order
_LINEARS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_NORMS = {
    "attention_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
    "qk_norm": ("self_attn.q_norm", "self_attn.k_norm"),
}
_FIELD_OF = {module: field for part in (_LINEARS, _NORMS) for field, modules in part.items() for module in modules}


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """{name inside "model.layers.N.": shape} of a layer's tensors, in Hugging Face's names."""
    hidden, ffn = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if spec.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (spec.head_dim,), "self_attn.k_norm.weight": (spec.head_dim,)}
    for module, rows, columns, bias in (
        ("self_attn.q_proj", q, hidden, spec.qkv_bias),
        ("self_attn.k_proj", kv, hidden, spec.qkv_bias),
        ("self_attn.v_proj", kv, hidden, spec.qkv_bias),
        ("self_attn.o_proj", hidden, q, spec.o_bias),
        ("mlp.gate_proj", ffn, hidden, spec.mlp_bias),
        ("mlp.up_proj", ffn, hidden, spec.mlp_bias),
        ("mlp.down_proj", hidden, ffn, spec.mlp_bias),
    ):
        shapes[f"{module}.weight"] = (rows, columns)
        if bias:
            shapes[f"{module}.bias"] = (rows,)
    return shapes


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """{Hugging Face name: shape} of the whole model, the head included even if it is tied."""
    shapes: dict[str, tuple[int, ...]] = {EMBED: (spec.vocab_size, spec.hidden_size)}
    for index in range(spec.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer_shapes(spec).items()}
    return shapes | {NORM: (spec.hidden_size,), HEAD: (spec.vocab_size, spec.hidden_size)}


def load_decoder(
    spec: ModelSpec,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    max_model_len: int | None = None,
    device: torch.device | str = "cpu",
) -> Decoder:
    """Build a decoder on `device` from (Hugging Face name, tensor) pairs in any order; each is let go once packed.

    A tied model needs one of embedding and head, and may bring both. ValueError: a tensor of another shape or not of
    floating point, one that comes twice, or, all in one message, those that are missing and those that have no use.
    """
    shapes, unused = tensor_shapes(spec), []
    missing = set(shapes)
    layers = [_LayerBuilder(spec, dtype) for _ in range(spec.num_layers)]
    top: dict[str, Tensor] = {}
    head: Linear | None = None
    for name, tensor in tensors:
        if name in shapes:
            _check(name, tensor, shapes[name], missing)
            missing.remove(name)
            tensor = tensor.detach().to(device)
            if name == HEAD and not spec.tie_word_embeddings:
                head = Linear(tensor.to(dtype))
            elif name in (EMBED, NORM, HEAD):
                top[name] = tensor.to(dtype)
            else:
                index, rest = name.removeprefix("model.layers.").split(".", 1)
                layers[int(index)].add(rest, tensor)
        elif not name.endswith("rotary_emb.inv_freq"):
            unused.append(name)
        del tensor  # before the next one is read
    if spec.tie_word_embeddings and not missing >= {EMBED, HEAD}:
        missing -= {EMBED, HEAD}
    if missing or unused:
        lists = (("missing", [name for name in shapes if name in missing]), ("unused", unused))
        text = "; ".join(f"{what}: {', '.join(names)}" for what, names in lists if names)
        raise ValueError(f"weights do not fit the {spec.family} model: {text}")
    norm = _norm(top.pop(NORM), spec, dtype)
    embed = top[EMBED] if EMBED in top else top[HEAD]
    weights = Weights(embed, [layer.done() for layer in layers], norm, head or Linear(top.get(HEAD, embed)))
    return Decoder(spec, weights, dtype, max_model_len)


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], missing: set[str]) -> None:
    if name not in missing:
        raise ValueError(f"{name}: given twice")
    if tensor.shape != shape:
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected {list(shape)}")
    if not tensor.is_floating_point():
        raise ValueError(f"{name}: got dtype {tensor.dtype}, expected floating point")


class _LayerBuilder:
    """Collects one layer's tensors; a field is built as soon as all of its parts are there."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype):
        self.spec, self.dtype = spec, dtype
        self.names = layer_shapes(spec)
        self.pending: dict[str, Tensor] = {}
        self.fields: dict[str, Any] = {"qk_norm": None}

    def add(self, name: str, tensor: Tensor) -> None:
        self.pending[name] = tensor
        field = _FIELD_OF[name.rpartition(".")[0]]
        modules = _LINEARS.get(field) or _NORMS[field]
        wanted = [f"{module}.{kind}" for kind in ("weight", "bias") for module in modules]
        wanted = [part for part in wanted if part in self.names]
        if all(part in self.pending for part in wanted):
            parts = [self.pending.pop(part) for part in wanted]
            self.fields[field] = self._build(field, parts[: len(modules)], parts[len(modules) :])

    def _build(self, field: str, weights: list[Tensor], biases: list[Tensor]) -> Linear | RMSNorm:
        if field in _LINEARS:
            return Linear(_joined(weights).to(self.dtype), _joined(biases).to(self.dtype) if biases else None)
        joined = torch.stack(weights) if field == "qk_norm" else weights[0]
        return _norm(joined, self.spec, self.dtype)

    def done(self) -> Layer:
        return Layer(**self.fields)


def _norm(weight: Tensor, spec: ModelSpec, dtype: torch.dtype) -> RMSNorm:
    return RMSNorm(weight.to(torch.promote_types(dtype, torch.float32), copy=True), spec.rms_norm_eps)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def safetensors_tensors(directory: str | Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a model directory: `model.safetensors`, or the shards its index lists.

    Tensors are read one by one into memory of their own; nothing is mapped, so the files never count as resident.
    FileNotFoundError names a file that is not there, ValueError one that is damaged.
    """
    directory = Path(directory)
    index = directory / INDEX
    if not index.exists():
        if not (directory / SINGLE).exists():
            raise FileNotFoundError(f"{directory}: holds neither {SINGLE} nor {INDEX}")
        return _read_file(directory / SINGLE)
    try:
        listed: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
        shards = sorted({str(shard) for shard in listed.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: not a safetensors index ({error!r})") from None
    for shard in shards:
        if Path(shard).name != shard:
            raise ValueError(f"{index}: shard {shard!r} is not a plain file name")
        if not (directory / shard).exists():
            raise FileNotFoundError(f"{directory / shard}: missing, though {INDEX} lists it")
    return (pair for shard in shards for pair in _read_file(directory / shard))


def _read_file(path: Path) -> Iterator[tuple[str, Tensor]]:
    """A safetensors file: a length (u64), a JSON header of that length, then the tensors' bytes."""
    with path.open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        start = 8 + int.from_bytes(file.read(8), "little")
        if start > file_bytes:
            raise ValueError(f"{path}: damaged or cut short, its header would end at byte {start} of {file_bytes}")
        try:
            header = json.loads(file.read(start - 8))
            header.pop("__metadata__", None)
            entries = [(name, e["dtype"], list(e["shape"]), *map(int, e["data_offsets"])) for name, e in header.items()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: damaged header ({error!r})") from None
        for name, dtype, shape, begin, end in sorted(entries, key=lambda entry: entry[3]):
            if dtype not in _DTYPES:
                raise ValueError(f"{path}: {name} is stored as {dtype}, supported: {', '.join(_DTYPES)}")
            if not 0 <= begin <= end or end - begin != math.prod(shape) * _DTYPES[dtype].itemsize:
                raise ValueError(f"{path}: damaged header, {name} of shape {shape} has bytes [{begin}, {end})")
            if start + end > file_bytes:
                raise ValueError(f"{path}: cut short, {name} ends at byte {start + end} of {file_bytes}")
            file.seek(start + begin)
            yield name, _read_tensor(file, shape, _DTYPES[dtype])


def _read_tensor(file: BinaryIO, shape: list[int], dtype: torch.dtype) -> Tensor:
    data = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    file.readinto(data.numpy().data)  # type: ignore[attr-defined] - a buffered file has it
    return data.view(dtype).view(shape)


def dummy_tensors(
    spec: ModelSpec, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Random weights of the spec, the same values for a seed and kind of device in every dtype (up to rounding).

    Matrices have standard deviation 1/sqrt(columns), which keeps activations near unit size at any width, biases
    0.02; norms are 1. A tied model brings no head.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for name, shape in tensor_shapes(spec).items():
        if name == HEAD and spec.tie_word_embeddings:
            continue
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape, dtype=dtype, device=device)
        else:
            std = 0.02 if len(shape) == 1 else shape[-1] ** -0.5
            yield name, torch.randn(shape, generator=generator, device=device).mul_(std).to(dtype)
