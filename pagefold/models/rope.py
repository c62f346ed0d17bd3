"""Rotary position embedding (RoFormer, arXiv 2104.09864) in the half-split layout: channel i turns with i + D/2.

Each scaling gives one vector of frequencies for the whole engine, because stored keys are rotated and stay so.
"""

import math

import torch
from torch import Tensor

from pagefold.models.spec import RopeSpec


def inv_freq(rope: RopeSpec, head_dim: int, max_model_len: int) -> Tensor:
    """Radians per token of each channel pair, float32[head_dim / 2].

    `max_model_len` (tokens) matters to "dynamic" only. Its frequencies belong to one sequence length: up to the
    original context they are the plain ones; an engine built for longer sequences uses, at every position, those of
    a sequence of `max_model_len` tokens.
    """
    theta = rope.theta
    if rope.rope_type == "dynamic":
        theta = _dynamic_theta(rope, head_dim, max_model_len)
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "freq_factors":
        return plain / torch.tensor(rope.factors, dtype=torch.float32)
    if rope.rope_type == "yarn":
        kept = 1 - _yarn_ramp(rope, head_dim)
    elif rope.rope_type == "llama3":
        kept = _llama3_kept(rope, plain)
    else:
        return plain
    return plain / rope.factor * (1 - kept) + plain * kept


def _dynamic_theta(rope: RopeSpec, head_dim: int, max_model_len: int) -> float:
    """Base that stretches the slowest pair to `max_model_len` ("dynamic NTK", emozilla and bloc97)."""
    stretch = rope.factor * max(1.0, max_model_len / rope.original_max_position_embeddings) - (rope.factor - 1)
    return rope.theta * stretch ** (head_dim / (head_dim - 2))


def _yarn_ramp(rope: RopeSpec, head_dim: int) -> Tensor:
    """Share of interpolation of each pair: 0 for fast pairs, 1 for slow ones (YaRN, arXiv 2309.00071, section 3.2)."""

    def pair_that_turns(rotations: float) -> float:
        wavelength = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    return ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


def _llama3_kept(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Share of its plain frequency that each pair keeps: by how often it turns within the original context (Llama 3.1,
    arXiv 2407.21783)."""
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    return ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)


def attention_factor(rope: RopeSpec) -> float:
    """What cos and sin are multiplied by: YaRN's attention temperature, 1 for every other type."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return grown(rope.mscale) / grown(rope.mscale_all_dim)
    return grown(1.0)


def cos_sin(rope: RopeSpec, inv_freq: Tensor, max_model_len: int, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of every position, `attention_factor` worked in: dtype[max_model_len, 2, D / 2]."""
    angles = torch.arange(max_model_len, dtype=dtype, device=inv_freq.device)[:, None] * inv_freq.to(dtype)
    return torch.stack((angles.cos(), angles.sin()), 1).mul_(attention_factor(rope))
