"""A Hugging Face directory of a model small enough to be served in a test: bytes for tokens, random weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from pagefold.models.spec import ModelSpec
from pagefold.models.weights import dummy_tensors
from tests.engine.tiny import SPECIALS, TEMPLATE, tiny_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "dtype": "float32",
}


def write_model_dir(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(dict(dummy_tensors(ModelSpec.from_hf(CONFIG), 0, torch.float32)), directory / "model.safetensors")
    tiny_tokenizer()._backend.save(str(directory / "tokenizer.json"))
    tokens = {"bos_token": SPECIALS[0], "eos_token": SPECIALS[1], "add_bos_token": True, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokens))
    return directory
