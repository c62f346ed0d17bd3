"""GGUF files, seen as a Hugging Face model: a config dict and a stream of tensors under Hugging Face names.

The header is parsed here (`gguf.GGUFReader` makes one numpy view per vocabulary entry, which takes seconds and
hundreds of megabytes for a vocabulary of 150,000); block formats are decoded by `gguf.quants`.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from pagefold.core.types import InputError

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TENSOR_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
_TYPE_NAMES = {kind.value: kind.name for kind in GGMLQuantizationType}
_PERMUTED = ("llama",)  # architectures whose q and k rows llama.cpp reorders for interleaved rotary pairs

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_CHUNK_ELEMENTS = 1 << 18  # weights decoded at once: 1 MB as float32, so a load needs little more than its result

# GGUF value types, in file order: struct codes of the scalars; 8 is a string, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class TensorInfo(NamedTuple):
    """One tensor of the file: `shape` outermost first (as torch has it), `offset` in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name that is not known is returned unchanged."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _BLOCK_NAMES:
        return name
    return f"model.layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.{match[3]}"


class GGUFFile:
    """An open GGUF file: its header in memory, its tensors read on demand.

        metadata   {key: value}, arrays as lists
        infos      {GGUF tensor name: TensorInfo}, in file order

    Opening checks that the whole file is there. Raises `InputError` naming the file and the byte where it is not
    what it should be, the architecture or the tensor type that is not supported.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.metadata, self.infos = _read_header(self.path)
        self.architecture = str(self.metadata["general.architecture"])
        if (num_files := self.metadata.get("split.count", 1)) > 1:
            raise _error(self.path, f"one of {num_files} parts of a model, join them with llama.cpp's gguf-split first")

    def config(self) -> dict[str, Any]:
        """A config.json-shaped dict. Tied embeddings and projection biases are read off the tensors present."""
        arch = self.architecture
        if self._get("expert_count", 0):
            raise _error(self.path, f"architecture {arch!r} with {arch}.expert_count > 0 is not supported")
        if "token_embd.weight" not in self.infos:
            raise _error(self.path, "tensor 'token_embd.weight' is missing")
        embedding = self.infos["token_embd.weight"]
        num_heads = self._get("attention.head_count")
        head_dim = self._get("attention.key_length", self._get("embedding_length") // num_heads)
        if (value_dim := self._get("attention.value_length", head_dim)) != head_dim:
            raise _error(self.path, f"value heads of {value_dim} with key heads of {head_dim} are not supported")
        config = {
            "architectures": [_ARCHITECTURES[arch]],
            "model_type": arch,
            "vocab_size": embedding.shape[0],
            "hidden_size": self._get("embedding_length"),
            "intermediate_size": self._get("feed_forward_length"),
            "num_hidden_layers": self._get("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._get("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "dtype": {"F32": "float32", "F16": "float16"}.get(embedding.type.name, "bfloat16"),
            "rms_norm_eps": self._get("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._get("context_length"),
            "tie_word_embeddings": "output.weight" not in self.infos,
            "attention_bias": "blk.0.attn_q.bias" in self.infos,
            "mlp_bias": "blk.0.ffn_up.bias" in self.infos,
            "rope_parameters": self._rope_parameters(head_dim),
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.metadata.get("tokenizer.ggml.eos_token_id"),
        }
        if window := self._get("attention.sliding_window", 0):
            config |= {"sliding_window": window, "use_sliding_window": True}
        if (rotary_dim := self._get("rope.dimension_count", head_dim)) != head_dim:
            config["partial_rotary_factor"] = rotary_dim / head_dim
        return config

    def tensors(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor in `dtype`) in file order, one at a time.

        Tensors this module has no Hugging Face name for keep their GGUF name, so that a strict loader reports them.
        `rope_freqs.weight` is left out: `config` has its values.
        """
        with open(self.path, "rb") as file:
            for info in self.infos.values():
                if info.name == _ROPE_FACTORS:
                    continue
                tensor = _read_tensor(file, info, dtype)
                if self.architecture in _PERMUTED and (match := re.search(r"\.attn_([qk])\.", info.name)):
                    key = "attention.head_count" if match[1] == "q" else "attention.head_count_kv"
                    tensor = _interleaved_to_halves(tensor, self._get(key, self._get("attention.head_count")))
                yield hf_name(info.name), tensor

    def _get(self, key: str, default: Any = None) -> Any:
        """A scalar of the architecture's own metadata; without a default it must be there."""
        name = f"{self.architecture}.{key}"
        value = self.metadata.get(name, default)
        if value is None:
            raise _error(self.path, f"metadata {name} is missing")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise _error(self.path, f"metadata {name} differs between layers, which is not supported")
            return value[0]
        return value

    def _rope_parameters(self, head_dim: int) -> dict[str, Any]:
        """`rope_parameters` as transformers 5 names them.

        Llama 3 files carry their scaling as one factor per frequency instead of its four parameters; they get
        ``rope_type="freq_factors"``: ``factors`` float[rotary_dim / 2] divide the inverse frequencies.
        """
        kind = self._get("rope.scaling.type", "none")
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self._get("rope.freq_base", 10000.0)}
        factor = self._get("rope.scaling.factor", self._get("rope.scale_linear", 1.0))
        if _ROPE_FACTORS in self.infos:
            if kind != "none":
                raise _error(self.path, f"{_ROPE_FACTORS} together with rope scaling {kind!r} is not supported")
            with open(self.path, "rb") as file:
                factors = _read_tensor(file, self.infos[_ROPE_FACTORS], torch.float32).tolist()
            if len(factors) != (expected := self._get("rope.dimension_count", head_dim) // 2):
                raise _error(self.path, f"{_ROPE_FACTORS} has {len(factors)} values, expected {expected}")
            return rope | {"rope_type": "freq_factors", "factors": factors}
        if kind == "yarn":
            rope |= {"rope_type": "yarn", "factor": factor}
            rope["original_max_position_embeddings"] = self._get("rope.scaling.original_context_length")
            for beta in ("beta_fast", "beta_slow"):
                if f"{self.architecture}.rope.scaling.yarn_{beta}" in self.metadata:
                    rope[beta] = self._get(f"rope.scaling.yarn_{beta}")
            if (scale := self._get("rope.scaling.attn_factor", 1.0)) != 1.0:
                rope["attention_factor"] = scale * (0.1 * math.log(factor) + 1.0)
        elif kind not in ("none", "linear"):
            raise _error(
                self.path, f"rope scaling {kind!r} is not supported, only none, linear, yarn and {_ROPE_FACTORS}"
            )
        elif factor != 1.0:
            rope |= {"rope_type": "linear", "factor": factor}
        return rope


def _error(path: Path, message: str) -> InputError:
    return InputError("model", f"{path}: {message}")


def _interleaved_to_halves(tensor: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of q and k rows: inside a head (x0 y0 x1 y1 ...) becomes (x0 x1 ... y0 y1 ...)."""
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _num_bytes(info: TensorInfo) -> int:
    block, block_bytes = GGML_QUANT_SIZES[info.type]
    return math.prod(info.shape) // block * block_bytes


def _read_tensor(file: Any, info: TensorInfo, dtype: torch.dtype) -> Tensor:
    cols = info.shape[-1]
    rows = math.prod(info.shape[:-1])
    row_bytes = _num_bytes(info) // rows
    out = torch.empty(rows, cols, dtype=dtype)
    step = max(1, _CHUNK_ELEMENTS // cols)
    file.seek(info.offset)
    for start in range(0, rows, step):
        raw = np.fromfile(file, np.uint8, min(step, rows - start) * row_bytes).reshape(-1, row_bytes)
        out[start : start + len(raw)] = torch.from_numpy(dequantize(raw, info.type))
    return out.view(info.shape)


class _Cursor:
    """Reads little-endian values of a mapped file in order; running past its end is an `InputError`."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.pos = 0

    def take(self, num_bytes: int, what: str) -> bytes:
        start, self.pos = self.pos, self.pos + num_bytes
        if self.pos > len(self.data):
            raise _error(
                self.path, f"truncated or corrupt: {what} at byte {start} needs {num_bytes} bytes, "
                f"the file ends at {len(self.data)}"
            )  # fmt: skip
        return self.data[start : self.pos]

    def scalar(self, code: str, what: str) -> Any:
        value = struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]
        return float(str(np.float32(value))) if code == "f" else value  # 1e-5 as it was meant, not 9.99999975e-06

    def string(self, what: str) -> str:
        start = self.pos
        try:
            return self.take(self.scalar("Q", what), what).decode()
        except UnicodeDecodeError:
            raise _error(self.path, f"corrupt: {what} at byte {start} is not UTF-8") from None

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            raise _error(self.path, f"corrupt: {what} at byte {self.pos} has unknown value type {kind}")
        item, count = self.scalar("I", what), self.scalar("Q", what)
        if item in _SCALARS:
            code = _SCALARS[item]
            raw = self.take(count * struct.calcsize("<" + code), what)
            return np.frombuffer(raw, np.dtype(code).newbyteorder("<")).tolist()
        if item != _STRING:
            raise _error(self.path, f"corrupt: {what} at byte {self.pos} has items of unknown type {item}")
        return [self.string(what) for _ in range(count)]


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(path, data)
            if cursor.take(4, "the magic number") != b"GGUF":
                raise _error(path, f"not a GGUF file: it begins with {bytes(data[:4])!r}")
            version = cursor.scalar("I", "the version")
            if version not in (2, 3):
                raise _error(path, f"GGUF version {version} (little-endian) is not supported, only 2 and 3")
            num_tensors, num_values = cursor.scalar("Q", "the tensor count"), cursor.scalar("Q", "the value count")
            metadata = {}
            for i in range(num_values):
                key = cursor.string(f"the name of value {i}")
                metadata[key] = cursor.value(cursor.scalar("I", key), key)
            if (architecture := str(metadata.get("general.architecture"))) not in _ARCHITECTURES:
                known = ", ".join(_ARCHITECTURES)
                raise _error(path, f"architecture {architecture!r} is not supported, only {known}")
            infos = [_read_info(cursor, f"tensor {i}") for i in range(num_tensors)]
            alignment = metadata.get("general.alignment", 32)
            if not isinstance(alignment, int) or alignment < 1:
                raise _error(path, f"corrupt: general.alignment is {alignment!r}, must be an integer >= 1")
            start = math.ceil(cursor.pos / alignment) * alignment
            infos = [info._replace(offset=start + info.offset) for info in infos]
            _check_extents(path, infos, len(data))
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise _error(path, f"cannot be read: {error}") from None
    return metadata, {info.name: info for info in infos}


def _read_info(cursor: _Cursor, what: str) -> TensorInfo:
    name = cursor.string(f"the name of {what}")
    num_dims = cursor.scalar("I", name)
    if not 1 <= num_dims <= 4:
        raise _error(cursor.path, f"corrupt: tensor {name!r} has {num_dims} dimensions, must be 1 to 4")
    shape = tuple(reversed([cursor.scalar("Q", name) for _ in range(num_dims)]))
    code, offset = cursor.scalar("I", name), cursor.scalar("Q", name)
    label = _TYPE_NAMES.get(code, f"number {code}")
    if label not in _TENSOR_TYPES:
        supported = ", ".join(_TENSOR_TYPES)
        raise _error(cursor.path, f"tensor {name!r} has type {label}, which is not supported, only {supported}")
    kind = GGMLQuantizationType(code)
    block = GGML_QUANT_SIZES[kind][0]
    if 0 in shape or shape[-1] % block:
        raise _error(
            cursor.path, f"corrupt: tensor {name!r} of type {label} has shape {shape}, rows are blocks of {block}"
        )
    return TensorInfo(name, shape, kind, offset)


def _check_extents(path: Path, infos: list[TensorInfo], file_bytes: int) -> None:
    for info in infos:
        if (end := info.offset + _num_bytes(info)) > file_bytes:
            raise _error(
                path, f"truncated: tensor {info.name!r} spans bytes {info.offset} to {end}, "
                f"the file ends at {file_bytes}"
            )  # fmt: skip
