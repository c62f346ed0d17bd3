"""Models small enough for tests: random weights, two layers, a byte-sized vocabulary."""

from typing import Any

import torch

from pagefold.models.decoder import Decoder
from pagefold.models.spec import ModelSpec, RopeSpec
from pagefold.models.weights import dummy_tensors, load_decoder


def tiny_spec(family: str = "llama", **overrides: Any) -> ModelSpec:
    """A two-layer model of one of the four families; `overrides` replaces fields of the spec."""
    max_position_embeddings = overrides.get("max_position_embeddings", 2048)
    fields: dict[str, Any] = {
        "family": family,
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": max_position_embeddings,
        "rope": RopeSpec(original_max_position_embeddings=max_position_embeddings),
        "tie_word_embeddings": True,
        "qkv_bias": family == "qwen2",
        "qk_norm": family == "qwen3",
        "bos_token_id": 256,
        "eos_token_ids": (257,),
    }
    return ModelSpec(**fields | overrides)


def tiny_decoder(spec: ModelSpec | None = None, seed: int = 0, dtype: torch.dtype = torch.float64) -> Decoder:
    """Random weights for `spec` (default: `tiny_spec()`); float64, so that rounding cannot flip an argmax."""
    spec = spec or tiny_spec()
    return load_decoder(spec, dummy_tensors(spec, seed, dtype), dtype)
