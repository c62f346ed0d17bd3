"""The engine on a GPU: captured steps, planning ahead and folding change no token, and nothing is left behind."""

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from pagefold.core.config import EngineConfig
from pagefold.core.types import Request, SamplingParams
from pagefold.engine.build import DTYPES, Loaded, build_engine
from pagefold.engine.engine import Engine
from pagefold.models.tiny import tiny_spec
from pagefold.models.weights import dummy_tensors, load_decoder
from tests.engine.tiny import assert_drained, drain, greedy, run, seeded

pytestmark = pytest.mark.gpu
EOS = 257
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "backend": "triton",
    "max_model_len": 512,
    "page_size": 16,
    "num_pages": 400,
    "kv_swap_bytes": 1 << 24,
    "kv_budget": 32,
    "kv_window": 8,
    "kv_buffer": 16,
    "max_num_seqs": 24,
    "max_num_batched_tokens": 256,
}
FOLDED = {"kv_eviction": "zipage"}


@cache
def loaded(dtype: str, device: str) -> Loaded:
    """The same weights on either device, large enough for every row of the cache to matter."""
    spec = tiny_spec(
        "qwen3", hidden_size=256, intermediate_size=512, num_heads=8, num_kv_heads=2, head_dim=64, eos_token_ids=(EOS,)
    )
    tensors = ((name, t * 2 if "proj" in name else t) for name, t in dummy_tensors(spec, 0, DTYPES[dtype]))
    return Loaded(load_decoder(spec, tensors, DTYPES[dtype], None, device), spec, None, (EOS,))


def engine_of(**options: Any) -> Engine:
    config = EngineConfig.from_options(**OPTIONS | options)
    return build_engine(config, loaded(config.model.dtype, "cpu" if config.model.backend == "cpu" else "cuda"))


def work(num: int, seed: int = 0) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 200 tokens, answers of 1 to 120; greedy and drawn ones, some with penalties."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 200))] for _ in range(num)]
    params = []
    for i in range(num):
        length = rng.randint(1, 120)
        params.append(
            [
                greedy(length),
                seeded(length, i),
                seeded(length, i, top_k=20, top_p=0.9),
                greedy(length, repetition_penalty=1.3, frequency_penalty=0.5),
                greedy(length, ignore_eos=False, min_tokens=min(3, length), logprobs=2),
            ][i % 5]
        )
    return prompts, params


def tokens_of(engine: Engine, prompts, params) -> list[list[int]]:
    outputs = run(engine, prompts, params)
    assert_drained(engine)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("folded", [{}, FOLDED], ids=["full", "zipage"])
def test_captured_steps_and_planning_ahead_change_no_token(folded):
    prompts, params = work(60)
    plain = tokens_of(engine_of(enforce_eager=True, plan_ahead=False, **folded), prompts, params)
    for options in ({"plan_ahead": False}, {"enforce_eager": True}, {}):
        assert tokens_of(engine_of(**folded, **options), prompts, params) == plain


@pytest.mark.parametrize("folded", [{}, FOLDED], ids=["full", "zipage"])
def test_tokens_are_those_of_the_cpu(folded):
    prompts, params = work(20, seed=1)
    params = [greedy(p.max_tokens or 1) for p in params]
    on_gpu = tokens_of(engine_of(**folded), prompts, params)
    on_cpu = tokens_of(engine_of(backend="cpu", **folded), prompts, params)
    assert on_gpu == on_cpu


def test_short_pages_preempt_and_swap_without_changing_a_token():
    prompts, params = work(40, seed=2)
    ample = tokens_of(engine_of(**FOLDED), prompts, params)
    for options in ({"num_pages": 60}, {"num_pages": 60, "preemption": "swap", "kv_evict_when": "always"}):
        assert tokens_of(engine_of(**FOLDED | options), prompts, params) == ample


@pytest.mark.parametrize("options", [{}, FOLDED | {"kv_lag": 4, "num_pages": 90}], ids=["full", "zipage, tight"])
def test_a_thousand_requests_with_aborts_leave_nothing_behind(options):
    engine, rng = engine_of(**options), np.random.default_rng(0)
    prompts, params = work(1000, seed=3)
    waiting, alive = list(range(1000)), []
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), int(rng.integers(0, 12)))):
            i = waiting.pop()
            engine.add(Request(f"{i}", tuple(prompts[i]), params[i]))
            alive.append(i)
        if alive and rng.random() < 0.2:
            engine.abort(f"{alive.pop(int(rng.integers(len(alive))))}")
        finished = {int(output.request_id) for output in engine.step() if output.finished}
        alive = [i for i in alive if i not in finished]
    assert_drained(engine)


def test_rows_of_a_model_that_overflows_end_that_request_only():
    engine = engine_of()
    engine.add(Request("good", (1, 2, 3), greedy(20)))
    engine.add(Request("bad", tuple(range(40)), greedy(20)))
    engine.step()
    bad = next(seq for seq in engine.scheduler.running if seq.request.id == "bad")
    engine.runner.kv.tiers[0].poison(torch.tensor(bad.kv.pages[0, :1].tolist(), device="cuda"))
    done = drain(engine)
    assert done["bad"].outputs[0].finish_reason == "abort"
    assert len(done["good"].outputs[0].token_ids) == 20
    assert_drained(engine)


@pytest.mark.smollm2
def test_smollm2_writes_what_the_cpu_backend_writes():
    """Greedy, float32 on both sides, 20 prompts: 64 tokens each are the same."""
    from pagefold.engine.llm import LLM

    questions = [f"Write a short story about {thing}." for thing in ("rain", "a fox", "bread", "a clock", "the sea")]
    prompts = [
        f"{start} {question}" for start in ("", "Hello!", "Please:", "In plain words:") for question in questions
    ]
    answers = []
    for backend in ("cpu", "triton"):
        llm = LLM("smollm2", backend=backend, dtype="float32", kv_cache_memory_bytes=1 << 30, max_model_len=2048)
        talks = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(talks, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
