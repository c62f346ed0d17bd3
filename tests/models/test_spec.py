"""Reading a config: every supported spelling gives the same numbers, and everything else is refused by name."""

import subprocess
import sys

import pytest

from pagefold.models.spec import FAMILIES, ModelSpec
from pagefold.models.tiny import tiny_spec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "eos_token_id": [2, 7],
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
QWEN2_SLIDING = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 256, "use_sliding_window": True}


def read(**changes):
    return ModelSpec.from_hf({key: value for key, value in (LLAMA | changes).items() if value is not ...})


def test_plain_config():
    spec = read()
    assert (spec.family, spec.head_dim, spec.num_kv_heads, spec.rope.theta) == ("llama", 16, 2, 5e5)
    assert (spec.eos_token_ids, spec.bos_token_id, spec.dtype) == ((2, 7), 1, "bfloat16")
    assert spec.max_model_len == spec.max_context == 1024
    assert read(eos_token_id=5).eos_token_ids == (5,)
    assert read(eos_token_id=None).eos_token_ids == ()
    assert read(num_key_value_heads=None).num_kv_heads == 4
    assert read(head_dim=24).head_dim == 24
    assert read(architectures=None, model_type="llama") == spec


@pytest.mark.parametrize(
    ("architecture", "flags"),
    [
        ("LlamaForCausalLM", {"qkv_bias", "o_bias", "mlp_bias"}),
        ("MistralForCausalLM", set()),
        ("Qwen2ForCausalLM", {"qkv_bias"}),
        ("Qwen3ForCausalLM", {"qkv_bias", "o_bias", "qk_norm"}),
    ],
)
def test_each_family_heeds_only_its_own_flags(architecture, flags):
    spec = read(architectures=[architecture], attention_bias=True, mlp_bias=True, head_dim=16)
    assert {name for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm") if getattr(spec, name)} == flags
    assert spec.family == FAMILIES[architecture]


@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_case_50_both_rope_spellings_are_one_spec(kind):
    old = read(rope_scaling=LLAMA3 | {kind: "llama3"})
    new = read(rope_theta=..., rope_parameters=LLAMA3 | {kind: "llama3", "rope_theta": 5e5})
    assert old == new
    assert (old.rope.rope_type, old.rope.original_max_position_embeddings, old.rope.factor) == ("llama3", 128, 8.0)
    assert read(rope_scaling=None) == read(rope_parameters={"rope_type": "default", "rope_theta": 5e5})


@pytest.mark.parametrize(
    ("scaling", "default", "largest"),
    [
        ({"type": "linear", "factor": 4.0}, 4096, 4096),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048, 2048),
        ({"type": "yarn", "factor": None, "original_max_position_embeddings": 256}, 1024, 1024),
        ({"type": "dynamic", "factor": 2.0}, 1024, 2048),
        (LLAMA3 | {"type": "llama3"}, 1024, 1024),
    ],
)
def test_scaling_extends_the_context(scaling, default, largest):
    spec = read(rope_scaling=scaling)
    assert (spec.max_model_len, spec.max_context) == (default, largest)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 256}, 256),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 256}, None),
        (QWEN2_SLIDING | {"use_sliding_window": False}, None),
        (QWEN2_SLIDING, None),
        (QWEN2_SLIDING | {"max_window_layers": 2}, None),
        (QWEN2_SLIDING | {"max_window_layers": 1}, 256),
        (QWEN2_SLIDING | {"layer_types": ["full_attention", "sliding_attention"]}, 256),
    ],
)
def test_an_active_sliding_window_bounds_the_context(changes, window):
    spec = read(**changes)
    assert spec.sliding_window == window
    assert spec.max_model_len == (window or 1024)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None, "model_type": "gemma3"}, "gemma3"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor.*0.5"),
        ({"attention_multiplier": 0.3}, "attention_multiplier.*0.3"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type.*longrope"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "short_factor": [1.0]}}, "short_factor"),
        ({"rope_scaling": {"type": "linear"}}, "rope factor.*linear"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor.*llama3"),
        ({"rope_scaling": LLAMA3 | {"type": "llama3", "low_freq_factor": 4.0}}, "low_freq_factor.*4.0"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer type.*full_attention"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor.*0.25"),
        ({"rope_scaling": {"type": "freq_factors", "factors": [1.0, 2.0]}}, "rope factors.*2.*8"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types.*linear_attention"),
        ({"hidden_size": ...}, "hidden_size.*missing"),
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": ...}, "num_key_value_heads.*missing"),
        ({"num_key_value_heads": 3}, "num_heads.*4.*3"),
        ({"head_dim": 15}, "head_dim.*15"),
        ({"vocab_size": 0}, "vocab_size.*0"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=words):
        read(**changes)


def test_reading_a_config_loads_no_torch():
    code = "import sys, pagefold.models.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tiny_specs_exist_for_every_family_and_take_overrides():
    for family in FAMILIES.values():
        assert tiny_spec(family, num_layers=3, max_position_embeddings=64).max_model_len == 64
