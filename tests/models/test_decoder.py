"""The decoder against transformers: the same config and weights give the same logits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_model
from torch import Tensor

from pagefold.backends.base import ForwardInputs
from pagefold.backends.torch_ops import TorchOps, split_heads, turned_heads
from pagefold.models.spec import ModelSpec
from pagefold.models.tiny import tiny_decoder, tiny_spec
from pagefold.models.weights import dummy_tensors, load_decoder, safetensors_tensors

ORIGINAL = 32  # context before scaling
LENGTH = 48
PROBES = [0, 1, 7, 19, 31, 32, 40, 47]  # 8 positions, 3 of them past the original context
SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": ORIGINAL,
    "initializer_range": 0.15,
    "rope_theta": 10000.0,
}
SCALINGS = {
    "default": None,
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "llama-biases": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen2-tied": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
    "qwen3-biases": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"attention_bias": True}),
}


NO_PAGES: Any = SimpleNamespace(of=lambda layer: None)  # the backends here keep rows themselves


class DenseBackend(TorchOps):
    """Exact causal attention over K and V kept whole: {(layer, slot): [k, v]}."""

    name = "dense"

    def __init__(self, num_kv_heads: int):
        self.num_kv_heads = num_kv_heads
        self.rows: dict[tuple[int, int], list[Tensor]] = {}

    def chunks(self, fwd):
        start = 0
        for slot, num in zip(fwd.host_slots, fwd.host_q_lens, strict=True):
            yield slot, slice(start, start + num)
            start += num

    def append(self, kv, layer, qkv, fwd, turn):
        q, k, v = turned_heads(qkv, self.num_kv_heads, fwd.positions, turn)
        for slot, part in self.chunks(fwd):
            old = self.rows.get((layer, slot), [k[:0], v[:0]])
            self.rows[layer, slot] = [torch.cat((old[0], k[part])), torch.cat((old[1], v[part]))]
        return q

    def attend(self, kv, layer, q, fwd, scale):
        out = torch.empty_like(q)
        for slot, part in self.chunks(fwd):
            k, v = (rows.repeat_interleave(q.shape[1] // rows.shape[1], 1) for rows in self.rows[layer, slot])
            scores = torch.einsum("qhd,khd->hqk", q[part], k) * scale
            future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + scores.shape[2] - scores.shape[1])
            out[part] = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)
        return out


def inputs(*chunks: tuple[int, int, Tensor]) -> ForwardInputs:
    """A batch of (slot, start, tokens)."""
    none, lens = torch.zeros(0, dtype=torch.int64), [len(tokens) for _, _, tokens in chunks]
    ends = [start + len(tokens) for _, start, tokens in chunks]
    return ForwardInputs(
        tokens=torch.cat([tokens for _, _, tokens in chunks]),
        positions=torch.cat([torch.arange(start, start + len(tokens)) for _, start, tokens in chunks]),
        q_start=torch.tensor([0, *lens]).cumsum(0),
        slots=torch.tensor([slot for slot, _, _ in chunks]),
        seq_lens=torch.tensor(ends),
        logits_at=none,
        window_slots=none,
        window_index=none,
        keeps_window=False,
        host_q_lens=lens,
        host_slots=[slot for slot, _, _ in chunks],
        host_seq_lens=ends,
    )


def run(decoder, tokens: Tensor, steps: list[int]) -> Tensor:
    """Logits of one sequence computed in chunks of the given sizes."""
    backend, out, start = DenseBackend(decoder.spec.num_kv_heads), [], 0
    for num in steps:
        hidden = decoder.forward(inputs((1, start, tokens[start : start + num])), NO_PAGES, backend)
        out.append(decoder.logits(hidden))
        start += num
    return torch.cat(out)


def oracle(folder, family: str, **changes):
    """A random transformers model, saved in `folder`, and its config as a dict."""
    make_config, make_model, own = FAMILIES[family]
    torch.manual_seed(1)
    config = make_config(**(SIZES | own | changes), architectures=[make_model.__name__])
    model = make_model._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:  # norms are made 1 and biases 0: move them, or a mix-up would not show
                weight.add_(0.3 * torch.randn_like(weight))
    save_model(model, str(folder / "model.safetensors"))
    return model, config.to_dict()


def decoder_of(folder, config: dict, dtype=torch.float32, max_model_len: int | None = None):
    spec = ModelSpec.from_hf(config)
    return load_decoder(spec, safetensors_tensors(folder), dtype, max_model_len)


def assert_matches(model, decoder, steps, atol=1e-3):
    tokens = torch.randint(0, SIZES["vocab_size"], (sum(steps),), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        want = model(tokens[None]).logits[0]
    got = run(decoder, tokens, steps)
    probes = [p for p in PROBES if p < len(tokens)]
    torch.testing.assert_close(got[probes].double(), want[probes].double(), rtol=0, atol=atol)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_matches_transformers(family, tmp_path):
    model, config = oracle(tmp_path, family, max_position_embeddings=64)
    decoder = decoder_of(tmp_path, config)
    assert_matches(model, decoder, [LENGTH], atol=1e-4)
    assert_matches(model, decoder, [20, 9, *[1] * 19], atol=1e-4)


@pytest.mark.parametrize("spelling", ["rope_scaling/type", "rope_scaling/rope_type", "rope_parameters"])
@pytest.mark.parametrize("name", SCALINGS)
def test_case_50_every_rope_type_matches_transformers(name, spelling, tmp_path):
    """In both key spellings, in one prefill and in decode steps past the original context."""
    scaling = SCALINGS[name] and SCALINGS[name] | {"rope_type": name}
    model, config = oracle(tmp_path, "llama", rope_scaling=scaling and dict(scaling))
    if spelling != "rope_parameters":
        kind = spelling.partition("/")[2]
        config["rope_scaling"] = SCALINGS[name] and SCALINGS[name] | {kind: name}
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    decoder = decoder_of(tmp_path, config, max_model_len=LENGTH)
    assert_matches(model, decoder, [LENGTH])
    assert_matches(model, decoder, [20, *[1] * 28])


def test_dynamic_scaling_within_the_original_context_matches_transformers(tmp_path):
    model, config = oracle(tmp_path, "llama", rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    decoder = decoder_of(tmp_path, config)
    assert decoder.max_model_len == ORIGINAL
    assert_matches(model, decoder, [ORIGINAL], atol=1e-4)
    assert_matches(model, decoder, [7], atol=1e-4)


def test_a_context_no_longer_than_the_sliding_window_matches_transformers(tmp_path):
    model, config = oracle(tmp_path, "mistral", max_position_embeddings=64, sliding_window=LENGTH)
    decoder = decoder_of(tmp_path, config)
    assert decoder.max_model_len == LENGTH
    assert_matches(model, decoder, [LENGTH], atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float64, 1e-5), (torch.float32, 1e-4), (torch.bfloat16, 0.4), (torch.float16, 0.05)]
)
def test_every_precision_works(dtype, atol, tmp_path):
    model, config = oracle(tmp_path, "qwen3", max_position_embeddings=64)
    decoder = decoder_of(tmp_path, config, dtype)
    assert_matches(model.double(), decoder, [40, *[1] * 8], atol=atol)
    assert decoder.logits(torch.zeros(0, 64, dtype=dtype)).shape == (0, 160)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_neighbours_and_chunks_never_change_a_sequence(family):
    decoder = tiny_decoder(tiny_spec(family))
    mine, other = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(3))
    alone = run(decoder, mine, [24])

    backend = DenseBackend(decoder.spec.num_kv_heads)
    decoder.forward(inputs((1, 0, mine[:9]), (2, 0, other[:14])), NO_PAGES, backend)
    hidden = decoder.forward(inputs((2, 14, other[14:15]), (1, 9, mine[9:])), NO_PAGES, backend)
    torch.testing.assert_close(decoder.logits(hidden[1:]), alone[9:])


def test_the_backend_gets_heads_in_the_models_dtype():
    """[T, Hq + 2 H, D], queries first."""
    seen = []

    class Shapes(TorchOps):
        name = "shapes"

        def append(self, kv, layer, qkv, fwd, turn):
            seen.append((layer, qkv.shape, qkv.dtype))
            return split_heads(qkv, 2)[0].contiguous()

        def attend(self, kv, layer, q, fwd, scale):
            assert scale == 16**-0.5
            return q

    decoder = tiny_decoder(dtype=torch.bfloat16)
    hidden = decoder.forward(inputs((1, 0, torch.arange(5))), NO_PAGES, Shapes())
    assert (hidden.shape, hidden.dtype) == ((5, 64), torch.bfloat16)
    assert decoder.logits(hidden).dtype == torch.bfloat16
    assert seen == [(layer, (5, 8, 16), torch.bfloat16) for layer in range(2)]


def test_dummy_weights_are_a_function_of_the_seed():
    spec = tiny_spec("qwen2")
    first, again, other = (dict(dummy_tensors(spec, seed, torch.float32)) for seed in (5, 5, 6))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
