"""A folded request through the whole engine, against a slow model that keeps explicit lists of rows."""

import numpy as np
import pytest
import torch

from pagefold.core.types import Request
from pagefold.evict.scorer import SCORERS
from tests.engine.conftest import LAYOUT_SPECS
from tests.engine.dense import Folding, dense_greedy, dense_logits
from tests.engine.tiny import assert_drained, greedy, prompt_of, run, tiny_engine

PROMPT = prompt_of(37)
OUTPUT = 44
VARIANTS = [
    {},
    {"kv_lag": 1},
    {"kv_buffer": 8, "kv_lag": 4, "kv_window": 4},
    {"kv_buffer": 8, "kv_lag": 1, "kv_window_stride": 3},
    {"kv_buffer": 8, "kv_prefill_buffer": 8},
    {"kv_buffer": 4, "kv_prefill_buffer": 16, "kv_lag": 1, "kv_sink_tokens": 5},
]


def folding_of(engine) -> Folding:
    """The engine's own policy, as the dense model understands it."""
    policy, layout = engine.policies.default, engine.policies.layout
    return Folding(
        scorer=policy.scorer,
        groups=[[tuple(cell) for cell in group] for group in layout.members().tolist()],
        budgets=policy.budget.tolist(),
        page_size=engine.manager.geometry.page_size,
        period=policy.period,
        prefill_period=policy.prefill_period,
        window=policy.window,
        stride=policy.stride,
        sink_tokens=policy.sink_tokens,
        lag=policy.lag,
    )


def assert_same(engine, prompt: list[int], max_tokens: int) -> None:
    output = run(engine, [prompt], [greedy(max_tokens)])[0]
    want, dense = dense_greedy(prompt, max_tokens, folding_of(engine))
    assert output.outputs[0].token_ids == want
    assert dense.num_folds > 3
    assert output.kv.rows_kept == np.mean([len(rows.k) for rows in dense.rows.values()])
    assert_drained(engine)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: ",".join(f"{k[3:]}={v[k]}" for k in v) or "plain")
@pytest.mark.parametrize("scorer", [*SCORERS.names(), "zipage:redundancy=full,pool=always", "zipage:block=8"])
def test_every_token_of_a_folded_request_is_that_of_the_dense_model(scorer, variant):
    assert_same(tiny_engine(kv_eviction=scorer, max_num_batched_tokens=11, **variant), PROMPT, OUTPUT)


@pytest.mark.parametrize("scorer", ["zipage", "snapkv", "keydiff"])
@pytest.mark.parametrize("layout", LAYOUT_SPECS)
def test_every_head_of_an_uneven_layout_keeps_its_own_rows(layout, scorer, layout_of):
    assert_same(tiny_engine(kv_eviction=scorer, kv_layout=layout_of(layout), kv_lag=1), PROMPT, OUTPUT)


def test_the_rows_in_the_pages_are_those_that_the_dense_model_keeps():
    """Not only the tokens: every kept key and value, head by head, in order."""
    engine = tiny_engine(kv_eviction="zipage", kv_buffer=8, kv_prefill_buffer=8, kv_budget=16)
    engine.add(Request("a", tuple(PROMPT), greedy(30)))
    seq = engine.scheduler.waiting[0]
    while len(seq.output) < 25:
        engine.step()
    _, dense = dense_greedy(PROMPT, 25, folding_of(engine))
    (store,), kv = engine.runner.kv.tiers, seq.kv
    for column, rows in enumerate(dense.rows.values()):
        n = len(rows.k)
        pages = torch.from_numpy(kv.pages[0, : -(-n // 4)].astype(np.int64))
        for plane, want in (("k_data", rows.k), ("v_data", rows.v)):
            torch.testing.assert_close(store.planes[plane][pages, column].flatten(0, 1)[:n], want)


def test_prompt_logits_of_a_prompt_that_is_folded_while_it_is_read_are_those_of_the_dense_model():
    engine = tiny_engine(kv_eviction="snapkv", kv_buffer=8, kv_prefill_buffer=8, max_num_batched_tokens=7)
    output = run(engine, [PROMPT], [greedy(1, prompt_logprobs=0)])[0]
    want = torch.log_softmax(dense_logits(PROMPT, folding_of(engine)), -1)
    got = [entry.logprobs[0] for entry in (output.prompt_logprobs or ())[1:] if entry]
    np.testing.assert_allclose(got, want[range(len(PROMPT) - 1), PROMPT[1:]].numpy(), atol=1e-9)
