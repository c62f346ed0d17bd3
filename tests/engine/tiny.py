"""Engines small enough to be built by the hundred: two random layers in float64, bytes for tokens.

Rows are stored in float64 too, so that rounding cannot flip an argmax: what differs, differs for a reason.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from pagefold.core.config import EngineConfig
from pagefold.core.types import Request, SamplingParams
from pagefold.engine.build import DTYPES, Loaded, build_engine
from pagefold.engine.engine import Engine
from pagefold.engine.llm import LLM
from pagefold.engine.outputs import RequestOutput
from pagefold.kv.profile import HeadProfile, save_profile
from pagefold.models.spec import ModelSpec
from pagefold.models.tiny import tiny_spec
from pagefold.models.tokenizer import Tokenizer
from pagefold.models.weights import dummy_tensors, load_decoder

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIALS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_MODEL_LEN = 512
OPTIONS: dict[str, Any] = {
    "dtype": "float64",
    "kv_format": "auto",
    "backend": "cpu",
    "max_model_len": MAX_MODEL_LEN,
    "page_size": 4,
    "num_pages": 400,
    "kv_swap_bytes": 1 << 22,
    "kv_budget": 12,
    "kv_window": 3,
    "kv_sink_tokens": 1,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}


@cache
def tiny_tokenizer(eos: tuple[int, ...] = (EOS,)) -> Tokenizer:
    """256 bytes, BOS, EOS and the ChatML marks; `encode` puts BOS in front."""
    vocab = {char: id for id, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return Tokenizer(
        backend,
        eos_token_ids=eos,
        bos_token_id=BOS,
        add_bos=True,
        chat_template=TEMPLATE,
        template_tokens={"bos_token": SPECIALS[0], "eos_token": SPECIALS[1]},
    )


def tiny_tensors(spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights large enough for every row of the cache to matter to the next token."""
    return ((name, t * 2 if "proj" in name else t) for name, t in dummy_tensors(spec, 0, torch.float64))


@cache
def tiny_loaded(dtype: str = "float64", eos: tuple[int, ...] = (EOS,)) -> Loaded:
    spec = tiny_spec(tie_word_embeddings=False, eos_token_ids=eos)
    return Loaded(load_decoder(spec, tiny_tensors(spec), DTYPES[dtype]), spec, tiny_tokenizer(eos), eos)


def tiny_engine(eos: tuple[int, ...] = (EOS,), **options: Any) -> Engine:
    """An engine on the tiny model; `options` are those of `EngineConfig`, on top of `OPTIONS`."""
    config = EngineConfig.from_options(**OPTIONS | options)
    return build_engine(config, tiny_loaded(config.model.dtype, eos))


def tiny_llm(eos: tuple[int, ...] = (EOS,), **options: Any) -> LLM:
    """The offline API around the tiny model."""
    options = OPTIONS | options
    with patch("pagefold.engine.build.load_model", lambda _: tiny_loaded(options["dtype"], eos)):
        return LLM("tiny", **options)


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Greedy, and not ended by an EOS that the random model happens to draw."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | options)


def seeded(max_tokens: int, seed: int, **options: Any) -> SamplingParams:
    return greedy(max_tokens, temperature=0.9, seed=seed, **options)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random bytes behind a BOS."""
    return [BOS, *np.random.default_rng(seed).integers(0, 256, length - 1).tolist()]


def run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
    """Serve all prompts together until the engine is empty; outputs in the order of the prompts."""
    for i, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        engine.add(Request(f"run-{i}", tuple(prompt), sampling))
    done = drain(engine)
    return [done[f"run-{i}"] for i in range(len(prompts))]


def drain(engine: Engine, max_steps: int = 20_000) -> dict[str, RequestOutput]:
    """Step until the engine is empty. Returns the finished requests by id."""
    done = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return done
        done |= {output.request_id: output for output in engine.step() if output.finished}
    raise AssertionError(f"not done after {max_steps} steps")


def alone(prompt: list[int], sampling: SamplingParams, **options: Any) -> RequestOutput:
    """The output of one request in an engine of its own."""
    return run(tiny_engine(**options), [prompt], [sampling])[0]


def assert_drained(engine: Engine) -> None:
    """Nothing is held once every request is gone: no page, reference, window, slot, host page or record."""
    manager = engine.manager
    manager.check()
    assert not engine.has_work and not manager.live
    assert not engine._served and not engine._owner
    for pool in [*manager.pools, *manager.host_pools]:
        assert pool.num_held == 0 and not pool.refs.any() and not pool.reserved.any() and pool.surplus == 0
        pool.check()
    assert manager.num_windows_free == manager.geometry.window_slots


def write_profile(path: Path) -> Path:
    """A made-up head profile of the tiny model: every head wants another share."""
    mean = np.array([[0.9, 0.3], [0.5, 0.7]], np.float32)
    meta = {"model": "tiny", "scorer": "none", "budget": 1, "tokens": [1, 1], "samples": 1}
    save_profile(path, HeadProfile(mean, np.zeros_like(mean), meta))
    return path
