"""RoPE: transformers' frequencies for every type, and a rotation that is one."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pagefold.backends.torch_ops import rotated
from pagefold.models.rope import attention_factor, cos_sin, inv_freq
from pagefold.models.spec import ModelSpec, RopeSpec

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn_ramp": {
        "rope_type": "yarn",
        "factor": 40.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
    "yarn_given": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [512, 4096, 9000])
def test_case_50_frequencies_are_those_of_transformers(name, length):
    config = LlamaConfig(**BASE, rope_scaling=dict(SCALINGS[name]))
    want, want_factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, seq_len=length)
    spec = ModelSpec.from_hf(BASE | {"rope_scaling": SCALINGS[name]})
    torch.testing.assert_close(inv_freq(spec.rope, spec.head_dim, length), want, rtol=1e-6, atol=0)
    assert attention_factor(spec.rope) == pytest.approx(want_factor)


def test_dynamic_scaling_changes_nothing_within_the_original_context():
    plain = RopeSpec(original_max_position_embeddings=64)
    dynamic = RopeSpec(original_max_position_embeddings=64, rope_type="dynamic", factor=4.0)
    assert torch.equal(inv_freq(dynamic, 16, 64), inv_freq(plain, 16, 64))
    assert not torch.equal(inv_freq(dynamic, 16, 65), inv_freq(plain, 16, 65))


def test_freq_factors_divide_each_frequency():
    factors = (1.0, 1.0, 2.5, 8.0)
    plain = RopeSpec(original_max_position_embeddings=64)
    scaled = RopeSpec(original_max_position_embeddings=64, rope_type="freq_factors", factors=factors)
    torch.testing.assert_close(inv_freq(scaled, 8, 64) * torch.tensor(factors), inv_freq(plain, 8, 64))


def test_rotation_turns_pairs_by_position_times_frequency():
    rope = RopeSpec(original_max_position_embeddings=64)
    freq = inv_freq(rope, 16, 64)
    x = torch.randn(5, 3, 16, dtype=torch.float64)
    positions = torch.tensor([0, 1, 7, 7, 63])
    turned = rotated(x, cos_sin(rope, freq, 64, torch.float64)[positions])

    pairs, angles = torch.complex(x[..., :8], x[..., 8:]), positions[:, None, None] * freq.double()
    want = pairs * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(turned, torch.cat((want.real, want.imag), -1))
    assert torch.equal(turned[0], x[0])


def test_scores_of_rotated_heads_depend_on_distance_only():
    rope = RopeSpec(original_max_position_embeddings=512)
    table = cos_sin(rope, inv_freq(rope, 32, 512), 512, torch.float64)
    q, k = torch.randn(2, 32, dtype=torch.float64)
    score = lambda i, j: (rotated(q[None, None], table[[i]]) * rotated(k[None, None], table[[j]])).sum()  # noqa: E731
    torch.testing.assert_close(score(40, 3), score(437, 400))
