"""GGUF files give back the model they were made from, or say what is wrong with them."""

import dataclasses
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st

from pagefold.core.types import InputError
from pagefold.models import gguf_file
from pagefold.models.gguf_file import GGUFFile
from pagefold.models.spec import ModelSpec
from pagefold.models.tiny import tiny_spec
from pagefold.models.weights import dummy_tensors, load_decoder

GGUF_NAMES = {hf: name for name, hf in (gguf_file._TOP_NAMES | gguf_file._BLOCK_NAMES).items()}


def gguf_name(name: str) -> str:
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, _, layer, *middle, kind = name.split(".")
    return f"blk.{layer}.{GGUF_NAMES['.'.join(middle)]}.{kind}"


def permute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order of q and k in llama.cpp's Llama files: each head's two halves interleaved."""
    halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def write_gguf(
    path, spec: ModelSpec, tensors: dict[str, torch.Tensor], type=Type.F32, arch=None, metadata=(), extra=()
):
    """What llama.cpp's converter writes for `spec`: matrices in `type`, vectors in F32."""
    arch = arch or spec.family
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    for key, value in dict(metadata).items():
        writer.add_key_value(f"{arch}.{key}", value, value_type(value))
    for name, tensor in tensors.items():
        array = tensor.float().numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            array = permute(array, spec.num_heads if "q_proj" in name else spec.num_kv_heads)
        add(writer, gguf_name(name), array, type if array.ndim > 1 else Type.F32)
    for name, array in dict(extra).items():
        add(writer, name, array, Type.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def value_type(value) -> gguf.GGUFValueType:
    return {str: gguf.GGUFValueType.STRING, float: gguf.GGUFValueType.FLOAT32, int: gguf.GGUFValueType.UINT32}[
        type(value)
    ]


def add(writer: gguf.GGUFWriter, name: str, array: np.ndarray, type: Type) -> None:
    if type in (Type.F32, Type.F16):
        writer.add_tensor(name, array.astype(np.float32 if type == Type.F32 else np.float16))
    else:
        writer.add_tensor(name, gguf.quantize(array, type), raw_dtype=type)


def weights(spec: ModelSpec) -> dict[str, torch.Tensor]:
    return {
        name: torch.randn(tensor.shape) if tensor.ndim == 1 else tensor
        for name, tensor in dummy_tensors(spec, 0, torch.float32)
    }


@pytest.mark.parametrize("type", [Type.F32, Type.F16, Type.BF16], ids=lambda t: t.name)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_equals_the_model_it_was_made_from_case_52(tmp_path, family, tied, type):
    spec = tiny_spec(family, tie_word_embeddings=tied, rms_norm_eps=1e-5)
    original = weights(spec)
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", spec, original, type))

    dtype = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}[type]
    found = dict(file.tensors())
    assert found.keys() == original.keys()
    for name, tensor in original.items():
        expected = tensor.to(dtype).float() if tensor.ndim > 1 else tensor
        assert torch.equal(found[name], expected), name
    read = ModelSpec.from_hf(file.config())
    assert read == dataclasses.replace(spec, dtype=str(dtype).removeprefix("torch."))
    load_decoder(read, file.tensors(torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize("type", [Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1], ids=lambda t: t.name)
def test_quantised_weights_are_near_the_original(tmp_path, monkeypatch, type):
    monkeypatch.setattr(gguf_file, "_CHUNK_ELEMENTS", 300)  # several chunks a tensor, the last one partial
    spec = tiny_spec("llama")
    original = weights(spec)
    found = dict(GGUFFile(write_gguf(tmp_path / "m.gguf", spec, original, type)).tensors())
    num_levels = 2 ** int(type.name[1])
    for name, tensor in original.items():
        step = 2 * tensor.abs().max() / num_levels if tensor.ndim > 1 else 0.0
        assert (found[name] - tensor).abs().max() <= 1.05 * step, name


@pytest.mark.parametrize("type", [Type.Q4_K, Type.Q5_K, Type.Q6_K], ids=lambda t: t.name)
def test_chunks_of_k_quants_join_to_the_whole(tmp_path, monkeypatch, type):
    monkeypatch.setattr(gguf_file, "_CHUNK_ELEMENTS", 1000)
    block_bytes = gguf.GGML_QUANT_SIZES[type][1]
    raw = np.random.default_rng(0).integers(0, 60, (7, 2 * block_bytes), dtype=np.uint8)  # small bytes: finite scales
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ((name, tensor),) = GGUFFile(tmp_path / "m.gguf").tensors()
    assert name == "model.layers.0.mlp.up_proj.weight"
    assert tensor.isfinite().all() and tensor.std() > 0
    assert torch.equal(tensor, torch.from_numpy(gguf.dequantize(raw, type)))


FACTORS = np.linspace(1, 8, 8, dtype=np.float32)


@pytest.mark.parametrize(
    ("metadata", "extra", "expected"),
    [
        ({}, {}, {"rope_type": "default"}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "none"}, {}, {"rope_type": "default"}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 512},
            {},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        ),
        ({}, {"rope_freqs.weight": FACTORS}, {"rope_type": "freq_factors", "factors": FACTORS.tolist()}),
    ],
)
def test_rope_scaling_reaches_the_config_case_50(tmp_path, metadata, extra, expected):
    spec = tiny_spec("llama")
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", spec, weights(spec), metadata=metadata, extra=extra))
    assert file.config()["rope_parameters"] == {"rope_theta": 10000.0, **expected}
    ModelSpec.from_hf(file.config())
    assert "rope_freqs.weight" not in dict(file.tensors())


@pytest.mark.parametrize(
    ("arch", "metadata", "extra", "message"),
    [
        ("mamba", {}, {}, "architecture 'mamba' is not supported, only llama, qwen2, qwen3"),
        ("llama", {"expert_count": 8}, {}, "expert_count"),
        ("llama", {"rope.scaling.type": "longrope"}, {}, "rope scaling 'longrope'"),
        ("llama", {}, {"rope_freqs.weight": FACTORS[:3]}, "rope_freqs.weight has 3 values, expected 8"),
        ("llama", {"attention.value_length": 8}, {}, "value heads of 8 with key heads of 16"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, monkeypatch, arch, metadata, extra, message):
    monkeypatch.setattr(gguf.GGUFWriter, "add_value_length", lambda *_: None)  # so that `metadata` can set it
    spec = tiny_spec("llama")
    path = write_gguf(tmp_path / "m.gguf", spec, weights(spec), arch=arch, metadata=metadata, extra=extra)
    with pytest.raises(InputError, match=message) as error:
        GGUFFile(path).config()
    assert str(path) in str(error.value)


def test_an_unsupported_tensor_type_is_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 66), np.uint8), raw_dtype=Type.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InputError, match=r"'token_embd.weight' has type IQ2_XXS, which is not supported, only F32"):
        GGUFFile(tmp_path / "m.gguf")


def test_an_unknown_tensor_keeps_its_name_so_that_the_loader_reports_it(tmp_path):
    spec = tiny_spec("llama")
    extra = {"blk.0.surprise.weight": np.ones(4, np.float32)}
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", spec, weights(spec), extra=extra))
    with pytest.raises(ValueError, match="unused: blk.0.surprise.weight"):
        load_decoder(ModelSpec.from_hf(file.config()), file.tensors(), torch.float32)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    spec = tiny_spec("llama", vocab_size=32)
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", spec, weights(spec))
    return path.read_bytes()


@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused_with_its_name(tmp_path_factory, whole, share):
    path = tmp_path_factory.getbasetemp() / "cut.gguf"
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(InputError, match=r"cut\.gguf: (truncated|cannot be read).*"):
        GGUFFile(path)


@given(position=st.integers(0, 1500), value=st.integers(0, 255))
def test_a_damaged_header_is_read_or_refused_never_a_crash(tmp_path_factory, whole, position, value):
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(whole[:position] + bytes([value]) + whole[position + 1 :])
    try:
        GGUFFile(path)
    except InputError as error:
        assert "damaged.gguf" in str(error)


def test_a_part_of_a_split_model_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m-00001-of-00003.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(InputError, match="one of 3 parts"):
        GGUFFile(tmp_path / "m-00001-of-00003.gguf")


def test_what_is_no_gguf_file_says_so(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"PK\3\4 a zip file" * 10)
    with pytest.raises(InputError, match=r"m\.gguf: not a GGUF file: it begins with b'PK"):
        GGUFFile(tmp_path / "m.gguf")
    with pytest.raises(InputError, match=r"absent\.gguf: cannot be read"):
        GGUFFile(tmp_path / "absent.gguf")


@pytest.mark.smollm2
def test_loading_smollm2_needs_little_more_memory_than_its_weights(smollm2):
    script = (
        "import resource, sys, torch\n"
        "from pagefold.models.gguf_file import GGUFFile\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "kept = dict(GGUFFile(sys.argv[1]).tensors(torch.bfloat16))\n"
        "assert sum(t.numel() for t in kept.values()) == 134_515_008\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    grown = subprocess.run([sys.executable, "-c", script, smollm2], check=True, capture_output=True, text=True).stdout
    assert int(grown) / 1024 < 1.25 * 2 * 134_515_008 / 2**20
