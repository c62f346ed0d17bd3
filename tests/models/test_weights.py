"""Loading: strict about names and shapes, easy on order and memory, clear about damaged files."""

import json
import random
import weakref

import pytest
import torch
from safetensors.torch import save_file

from pagefold.models.layers import Linear
from pagefold.models.tiny import tiny_spec
from pagefold.models.weights import dummy_tensors, load_decoder, safetensors_tensors, tensor_shapes

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def tensors_of(spec, seed=0, dtype=torch.float32):
    return dict(dummy_tensors(spec, seed, dtype))


def load(spec, tensors, dtype=torch.float32):
    return load_decoder(spec, tensors.items() if isinstance(tensors, dict) else tensors, dtype)


def logits(decoder):
    return decoder.logits(torch.randn(3, 64, generator=torch.Generator().manual_seed(0)))


def test_case_49_tied_head_loads_alike_with_and_without_its_tensor():
    spec = tiny_spec(tie_word_embeddings=True)
    without = tensors_of(spec)
    assert HEAD not in without
    want = logits(load(spec, without))
    both = without | {HEAD: without[EMBED].clone()}
    assert torch.equal(logits(load(spec, both)), want)
    del both[EMBED]  # some writers keep the other one of two tied tensors
    swapped = load(spec, both)
    assert torch.equal(logits(swapped), want) and torch.equal(swapped.weights.embed, without[EMBED])
    del both[HEAD]
    with pytest.raises(ValueError, match="missing: model.embed_tokens.weight, lm_head.weight"):
        load(spec, both)


def test_case_49_untied_without_head_names_the_tensor():
    spec = tiny_spec(tie_word_embeddings=False)
    tensors = tensors_of(spec)
    assert not torch.equal(tensors[HEAD], tensors[EMBED])
    del tensors[HEAD]
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
        load(spec, tensors)


def test_missing_and_unused_tensors_are_listed_in_one_error():
    spec = tiny_spec("qwen2")
    tensors = tensors_of(spec) | {"model.layers.9.mlp.up_proj.weight": torch.ones(1), "extra.bias": torch.ones(1)}
    del tensors["model.layers.1.self_attn.k_proj.bias"], tensors["model.norm.weight"]
    with pytest.raises(ValueError) as error:
        load(spec, tensors)
    missing, unused = str(error.value).split("; ")
    assert "model.layers.1.self_attn.k_proj.bias" in missing and "model.norm.weight" in missing
    assert "model.layers.9.mlp.up_proj.weight" in unused and "extra.bias" in unused


def test_a_bias_the_spec_does_not_know_is_not_dropped():
    with pytest.raises(ValueError, match=r"unused: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(tiny_spec("llama"), tensors_of(tiny_spec("qwen2", num_layers=2)))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(32, 65), r"k_proj\.weight: got shape \[32, 65\], expected \[32, 64\]"),
        (torch.ones(32, 64, dtype=torch.int8), r"k_proj\.weight: got dtype torch\.int8"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tensor, words):
    spec = tiny_spec()
    with pytest.raises(ValueError, match=words):
        load(spec, tensors_of(spec) | {"model.layers.0.self_attn.k_proj.weight": tensor})


def test_a_tensor_that_comes_twice_is_an_error():
    pairs = list(tensors_of(tiny_spec()).items())
    with pytest.raises(ValueError, match="embed_tokens.weight: given twice"):
        load(tiny_spec(), [*pairs, pairs[0]])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_order_and_rotary_buffers_do_not_matter(family):
    spec = tiny_spec(family)
    tensors = tensors_of(spec)
    shuffled = [*tensors.items(), ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8))]
    random.Random(4).shuffle(shuffled)
    first, second = load(spec, tensors, torch.float64), load(spec, shuffled, torch.float64)
    for a, b in zip(first.weights.layers, second.weights.layers, strict=True):
        assert torch.equal(a.qkv.weight, b.qkv.weight) and torch.equal(a.down.weight, b.down.weight)


def test_plain_weights_are_let_go_while_loading():
    """At no time is the memory of more than one layer's tensors (of the nine a layer has) still held."""
    spec, arrays, most = tiny_spec(num_layers=12), [], 0

    def stream():
        nonlocal most
        for name, tensor in dummy_tensors(spec, 0, torch.float32):
            array = tensor.numpy().copy()
            if ".layers." in name:
                arrays.append(weakref.ref(array))
            pair = name, torch.from_numpy(array)
            del array
            yield pair
            del pair
            most = max(most, sum(ref() is not None for ref in arrays))

    load(spec, stream(), torch.bfloat16)
    assert len(arrays) == 12 * 9 and most <= 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_weight_has_no_plain_copy(dtype):
    weight = torch.randn(40, 24).to(dtype)
    plain = weakref.ref(weight)
    linear = Linear(weight)
    del weight
    assert (plain() is None) == linear.packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_linear_layer_multiplies_in_its_dtype(dtype):
    generator = torch.Generator().manual_seed(0)
    w, b, x = (torch.randn(shape, generator=generator).to(dtype) for shape in ((40, 24), (40,), (7, 24)))
    wide = x.double() @ w.double().T + b.double()
    got = Linear(w, b)(x)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.double(), wide, rtol=0.02, atol={torch.float64: 1e-12, torch.float32: 1e-4}.get(dtype, 0.1)
    )


def write_shards(folder, tensors):
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, str(folder / shard), {"format": "pt"})
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("sharded", [False, True])
def test_safetensors_come_back_as_saved(dtype, sharded, tmp_path):
    tensors = tensors_of(tiny_spec("qwen3", tie_word_embeddings=False), dtype=dtype)
    if sharded:
        write_shards(tmp_path, tensors)
    else:
        save_file(tensors, str(tmp_path / "model.safetensors"), {"format": "pt"})
    back = dict(safetensors_tensors(tmp_path))
    assert back.keys() == tensors.keys()
    assert all(back[name].dtype == dtype and torch.equal(back[name], tensors[name]) for name in tensors)
    load(tiny_spec("qwen3", tie_word_embeddings=False), safetensors_tensors(tmp_path))


def test_a_missing_shard_is_named(tmp_path):
    write_shards(tmp_path, tensors_of(tiny_spec()))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002.safetensors"):
        safetensors_tensors(tmp_path)


def test_a_directory_without_weights_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        safetensors_tensors(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../b"}}'])
def test_a_bad_index_is_named(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match="index.json"):
        safetensors_tensors(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 8, 200, -4])
def test_a_file_cut_short_is_named(kept, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(tensors_of(tiny_spec()), str(path))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match="model.safetensors"):
        list(safetensors_tensors(tmp_path))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        7,
    ],
)
def test_a_header_that_lies_is_named(entry, tmp_path):
    header = json.dumps({"weight": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match="model.safetensors"):
        list(safetensors_tensors(tmp_path))


def test_shapes_cover_every_tensor_of_a_model():
    spec = tiny_spec("qwen3", tie_word_embeddings=False)
    assert {name: tuple(tensor.shape) for name, tensor in dummy_tensors(spec, 0, torch.float32)} == tensor_shapes(spec)
