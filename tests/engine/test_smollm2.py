"""The built-in model through the engine against transformers, both in float32 and made of the same tensors."""

import numpy as np
import pytest
import torch

from pagefold.core.config import EngineConfig
from pagefold.core.types import SamplingParams
from pagefold.engine.build import Loaded, build_engine, load_model
from pagefold.models.sources import resolve
from tests.engine.tiny import assert_drained, greedy, run

pytestmark = pytest.mark.smollm2

OPTIONS = {"model": "smollm2", "dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 400 << 20}
PROBES = [0, 1, 31, 32, 500, 1023, 1024, 1999]  # around pages and chunks, up to 2,000 tokens
ROUNDING = 1e-4  # of a logit: what two float32 programs may differ by
QUESTIONS = [
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "What is 17 times 23? Think step by step.",
    "Explain how a bicycle stays upright.",
    "List five uses of a paper clip.",
    "Translate 'good morning' into French, German and Spanish.",
    "Write a Python function that reverses a list.",
    "Who was Ada Lovelace?",
]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_model(EngineConfig.from_options(**OPTIONS))


@pytest.fixture(scope="module")
def peer():
    transformers = pytest.importorskip("transformers")
    source = resolve("smollm2")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**source.config())).float().eval()
    state = {name: tensor.float() for name, tensor in source.tensors()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def engine_of(loaded: Loaded, **options):
    return build_engine(EngineConfig.from_options(**OPTIONS | options), loaded)


def long_prompt(loaded: Loaded, length: int) -> list[int]:
    """Ordinary text with some structure, so that attention has something to look at."""
    text = " ".join(
        f"{i}. The {i % 7}th box holds {i * 37 % 101} stones, and box {i * 5 % 89} is empty." for i in range(400)
    )
    return loaded.tokenizer.encode(text)[:length]


def test_full_kv_logits_are_those_of_transformers_up_to_2000_tokens(loaded, peer, monkeypatch):
    """Chunked prefill through pages; the logits are caught where the runner hands them to the sampler."""
    engine = engine_of(loaded, max_num_batched_tokens=300)
    tokens = long_prompt(loaded, 2000)
    rows: dict[int, torch.Tensor] = {}
    launch, rank = engine.runner.launch, engine.runner.sampler.prompt_logprobs
    first = 0

    def watched(plan):
        nonlocal first
        first = plan.chunks[0].start
        return launch(plan)

    def caught(logits, targets, k):
        rows.update({first + i: logits[i].clone() for i in range(len(targets)) if first + i in PROBES})
        return rank(logits, targets, k)

    monkeypatch.setattr(engine.runner, "launch", watched)
    monkeypatch.setattr(engine.runner.sampler, "prompt_logprobs", caught)
    (output,) = run(engine, [[*tokens, 0]], [greedy(1, prompt_logprobs=0)])
    assert sorted(rows) == PROBES
    with torch.inference_mode():
        hidden = peer.model(torch.tensor([tokens])).last_hidden_state[0]
        want = peer.lm_head(hidden[PROBES])
    for position, logits in zip(PROBES, want, strict=True):
        torch.testing.assert_close(rows[position], logits, atol=1e-3, rtol=0)
    lines = torch.log_softmax(want[:-1], -1)[range(len(PROBES) - 1), [tokens[p + 1] for p in PROBES[:-1]]]
    got = [output.prompt_logprobs[p + 1].logprobs[0] for p in PROBES[:-1]]
    np.testing.assert_allclose(got, lines.numpy(), atol=1e-3)
    assert_drained(engine)


@pytest.mark.slow
def test_200_greedy_tokens_of_8_chats_are_those_of_transformers(loaded, peer):
    """Served together. Transformers reads each answer at once: the token drawn at each place must be its own argmax, or
    tie with it within the rounding of float32."""
    engine = engine_of(loaded)
    prompts = [loaded.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in QUESTIONS]
    outputs = run(engine, prompts, [SamplingParams(temperature=0, max_tokens=200)] * 8)
    total = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        (choice,) = output.outputs
        assert len(choice.token_ids) == 200 or choice.finish_reason == "stop"
        with torch.inference_mode():
            logits = peer(torch.tensor([prompt + choice.token_ids])).logits[0, len(prompt) - 1 : -1]
        drawn = logits.gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
        assert float((logits.amax(1) - drawn).max()) < ROUNDING
        total += len(choice.token_ids)
    assert total > 600
    assert_drained(engine)


def test_a_budget_beyond_the_length_gives_the_tokens_of_full_kv_on_real_weights(loaded):
    prompts = [loaded.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in QUESTIONS[:2]]
    params = [SamplingParams(temperature=0, max_tokens=48)] * 2
    want = [o.outputs[0].token_ids for o in run(engine_of(loaded), prompts, params)]
    engine = engine_of(loaded, kv_eviction="zipage", kv_budget=512)
    assert [o.outputs[0].token_ids for o in run(engine, prompts, params)] == want
    assert_drained(engine)
