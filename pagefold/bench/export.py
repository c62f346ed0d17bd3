"""A model as a Hugging Face directory, for engines that read nothing else."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from pagefold.core.types import InputError
from pagefold.engine.build import DTYPES
from pagefold.models.sources import ModelSource, resolve

COPIED = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges*", "*.jinja", "*.model")


def export_hf(model: str, directory: str | Path, dtype: str = "float32") -> Path:
    """Write config, weights in `dtype`, tokenizer and EOS ids of any model that `resolve` finds; returns `directory`.

    All tensors are in memory at once. Raises InputError if the model has what no Hugging Face config can say.
    """
    if dtype not in DTYPES:
        raise InputError("dtype", f"got {dtype!r}, must be one of {', '.join(DTYPES)}")
    source, directory = resolve(model), Path(directory)
    config = source.config()
    if (config.get("rope_parameters") or {}).get("rope_type") == "freq_factors":
        raise InputError("model", f"{model!r} gives RoPE by frequency, which a Hugging Face config cannot say")
    directory.mkdir(parents=True, exist_ok=True)
    config = {name: value for name, value in config.items() if value is not None}
    _write_json(directory / "config.json", config | {"dtype": dtype, "torch_dtype": dtype})
    _write_json(directory / "generation_config.json", source.generation_config())
    _write_weights(source, directory / "model.safetensors", DTYPES[dtype])
    _write_tokenizer(source, directory)
    return directory


def _write_weights(source: ModelSource, path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in source.tensors(dtype)}
    save_file(tensors, path, metadata={"format": "pt"})


def _write_tokenizer(source: ModelSource, directory: Path) -> None:
    if source.kind == "hf":
        for pattern in COPIED:
            for path in source.path.glob(pattern):
                shutil.copy(path, directory / path.name)
        return
    tokenizer = source.tokenizer()
    backend = tokenizer._backend
    backend.save(str(directory / "tokenizer.json"))
    config = {"add_bos_token": tokenizer.add_bos, "chat_template": tokenizer.chat_template}
    if tokenizer.bos_token_id is not None:
        config["bos_token"] = backend.id_to_token(tokenizer.bos_token_id)
    if tokenizer.eos_token_ids:
        config["eos_token"] = backend.id_to_token(tokenizer.eos_token_ids[0])
    _write_json(directory / "tokenizer_config.json", {k: v for k, v in config.items() if v is not None})


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
