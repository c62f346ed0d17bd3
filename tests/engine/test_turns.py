"""Chats on a real model: each turn resumes from the folded rows of the one before, through the ordinary API."""

from typing import Any

import pytest

from pagefold.core.types import InputError, Request
from pagefold.engine.engine import Engine
from pagefold.engine.llm import LLM
from pagefold.engine.outputs import RequestOutput
from tests.engine.tiny import (
    assert_drained,
    drain,
    greedy,
    prompt_of,
    run,
    seeded,
    tiny_engine,
    tiny_llm,
    tiny_tokenizer,
)

NEW = [prompt_of(length, seed)[1:] for seed, length in enumerate([40, 12, 19, 9], 10)]
FOLDS: list[dict[str, Any]] = [
    {"kv_eviction": "zipage"},  # a plane of scores travels with the rows
    {"kv_eviction": "snapkv", "kv_lag": 1, "kv_layout": "clustered:profile={profile},heads_per_page=1"},
    {"kv_eviction": "keydiff", "kv_format": "int4", "kv_buffer": 8, "kv_prefill_buffer": 8},
    {"kv_eviction": "recency", "kv_cold_format": "int4", "kv_cold_after": 6},
]


def talk(engine: Engine, sampling=None, salt: str = "") -> list[RequestOutput]:
    """One conversation, each turn after the one before has ended."""
    history, turns = [], []
    for number, new in enumerate(NEW):
        history = history + new
        engine.add(Request(f"{salt}-{number}", tuple(history), sampling or greedy(14), cache_salt=salt))
        turns.append(drain(engine)[f"{salt}-{number}"])
        history = history + turns[-1].outputs[0].token_ids
    return turns


def tokens_of(turns: list[RequestOutput]) -> list[list[int]]:
    return [turn.outputs[0].token_ids for turn in turns]


@pytest.mark.parametrize("fold", FOLDS, ids=lambda fold: fold["kv_eviction"])
def test_turns_say_the_same_whatever_the_chunks_and_wherever_the_trunk_is(fold, layout_of):
    fold = fold | {"kv_layout": layout_of(fold.get("kv_layout", "uniform"))}
    want = talk(tiny_engine(**fold))
    assert all(turn.kv.resumed_tokens == turn.num_cached_tokens > 40 for turn in want[1:])
    for world in (
        {"max_num_batched_tokens": 3, "plan_ahead": True},
        {"enable_prefix_caching": False, "kv_keep_turns": True, "kv_window_slots": 1},
        {"kv_keep_bytes": 1 << 22, "move": True},
    ):
        moves = world.pop("move", False)
        engine = tiny_engine(**fold | world)
        if moves:
            engine.scheduler.finish = move_after(engine, engine.scheduler.finish)
        assert tokens_of(talk(engine)) == tokens_of(want)
        assert_drained(engine)
        assert any(trunk.on_host for trunk in engine.manager.trunks) == moves


def move_after(engine: Engine, finish):
    """Whenever a request ends, others take the whole pool at once."""

    def finished(*args) -> None:
        finish(*args)
        for tier, pool in enumerate(engine.manager.pools):
            engine.manager.trunks.make_room(tier, pool.num_pages - 1)

    return finished


@pytest.fixture(scope="module")
def layout_of(tmp_path_factory):
    from tests.engine.tiny import write_profile

    profile = write_profile(tmp_path_factory.mktemp("profile") / "profile.npz")
    return lambda layout: layout.format(profile=profile)


@pytest.mark.parametrize("lag", [0, 1])
def test_an_answer_cut_in_two_is_the_answer_in_one(lag):
    """P22 and P23: positions go on at the true index, and rows are those that were there."""
    options = {"kv_eviction": "zipage", "kv_lag": lag, "kv_buffer": 8}
    prompt = prompt_of(30)
    (whole,) = run(tiny_engine(**options), [prompt], [greedy(40)])
    for first in (12, 13, 18, 25):  # an event at the very end of the first part is only the whole request's
        engine = tiny_engine(**options)
        (part,) = run(engine, [prompt], [greedy(first)])
        rest = prompt + part.outputs[0].token_ids
        (more,) = run(engine, [rest], [greedy(40 - first)])
        assert more.kv.resumed_tokens > 30
        assert part.outputs[0].token_ids + more.outputs[0].token_ids == whole.outputs[0].token_ids
        assert more.kv.rows_kept == whole.kv.rows_kept and more.kv.compactions == whole.kv.compactions


def test_without_trunks_every_turn_is_computed_anew_and_the_usage_says_which_it_was():
    options = {"kv_eviction": "snapkv", "kv_budget": 8}
    anew = talk(tiny_engine(kv_keep_turns=False, **options))
    engine = tiny_engine(**options)
    assert tokens_of(talk(engine, greedy(14, kv_keep_turns=False), "own")) == tokens_of(anew)
    assert all(turn.kv.resumed_tokens == 0 for turn in anew)
    kept = talk(tiny_engine(**options))
    assert tokens_of(kept)[0] == tokens_of(anew)[0] and tokens_of(kept) != tokens_of(anew)
    assert kept[-1].kv.rows_evicted > 40 and kept[-1].kv.rows_kept < 20


def test_salts_keep_chats_apart():
    engine = tiny_engine(kv_eviction="snapkv")
    first, other = talk(engine, salt="a"), talk(engine, salt="b")
    assert [turn.num_cached_tokens for turn in first] == [turn.num_cached_tokens for turn in other]
    assert first[0].num_cached_tokens == 0


def test_branches_of_one_turn_draw_on_their_own():
    engine = tiny_engine(kv_eviction="zipage")
    (first,) = run(engine, [NEW[0]], [greedy(14)])
    history = NEW[0] + first.outputs[0].token_ids + NEW[1]
    (branches,) = run(engine, [history], [seeded(12, 3, n=3)])
    assert branches.kv.resumed_tokens > 40 and len({tuple(c.token_ids) for c in branches.outputs}) == 3
    alone = tiny_engine(kv_eviction="zipage")
    run(alone, [NEW[0]], [greedy(14)])
    (again,) = run(alone, [history], [seeded(12, 3, n=3)])
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in branches.outputs]


def test_a_step_that_fails_leaves_no_trunk_behind(monkeypatch):
    engine = tiny_engine(kv_eviction="recency")
    run(engine, [NEW[0]], [greedy(14)])
    assert len(engine.manager.trunks) == 1
    engine.add(Request("bad", tuple(NEW[1]), greedy(3)))
    monkeypatch.setattr(engine.runner, "launch", lambda plan: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert len(engine.manager.trunks) == 0
    assert_drained(engine)


@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_a_budget_may_be_a_share_of_the_prompt(ratio):
    """Per engine and per request; later turns resume though their budgets are larger."""
    options = {"kv_eviction": "recency", "kv_buffer": 8}
    by_engine = tiny_engine(kv_budget_ratio=ratio, **options)
    turns = talk(by_engine)
    for turn in turns:
        share = ratio * len(turn.prompt_token_ids)
        assert share - 4 <= turn.kv.rows_kept <= share + 4 + 8
    assert all(turn.kv.resumed_tokens for turn in turns[1:])
    assert tokens_of(talk(tiny_engine(**options), greedy(14, kv_budget_ratio=ratio))) == tokens_of(turns)
    (fixed,) = run(by_engine, [NEW[0]], [greedy(14, kv_budget=8)])
    assert fixed.kv.rows_kept <= 16
    (least,) = run(by_engine, [NEW[3][:3]], [greedy(30, kv_budget_ratio=0.01)])
    assert least.kv.rows_kept >= by_engine.config.eviction.kv_window + by_engine.config.eviction.kv_sink_tokens


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_budget_ratio": 0}, r"kv_budget_ratio: got 0, must be a number in \(0, 1\]"),
        ({"kv_budget_ratio": 1.5}, "kv_budget_ratio"),
        ({"kv_budget_ratio": 0.5, "kv_budget": 9}, "kv_budget_ratio: got 0.5, and kv_budget=9"),
        ({"kv_keep_turns": 1}, "kv_keep_turns"),
    ],
)
def test_what_a_request_may_not_ask_for(options, words):
    with pytest.raises(InputError, match=words):
        greedy(1, **options)


def test_what_an_engine_may_not_be_told():
    for options, words in (
        ({"kv_budget_ratio": 2.0}, "kv_budget_ratio"),
        ({"kv_keep_turns": False, "kv_keep_bytes": 1}, "kv_keep_bytes: got 1, and kv_keep_turns is off"),
        ({"enable_prefix_caching": False, "kv_keep_bytes": 1}, "kv_keep_bytes"),
    ):
        with pytest.raises(InputError, match=words):
            tiny_engine(**options)


def test_a_prompt_larger_than_the_pool_is_served_and_folded_on_the_way():
    """Tangram P9: 300 tokens through a pool of 40 rows."""
    prompt = prompt_of(300, 4)
    fold = {"kv_eviction": "snapkv", "kv_prefill_buffer": 8}
    (want,) = run(tiny_engine(**fold), [prompt], [greedy(20)])
    for world in ({"num_pages": 10}, {"num_pages": 10, "max_num_batched_tokens": 3}):
        engine = tiny_engine(**fold | world)
        (got,) = run(engine, [prompt], [greedy(20)])
        assert tokens_of([got]) == tokens_of([want])
        assert got.kv.peak_bytes <= 6 * engine.manager.geometry.bytes_per_page[0]
    with pytest.raises(InputError, match="kv_prefill_buffer: got 8 tokens, needs 8 pages while folding, 7 in the pool"):
        tiny_engine(**fold | {"num_pages": 7}).add(Request("a", tuple(prompt), greedy(20)))


def test_chats_through_the_text_api_resume():
    llm = tiny_llm(kv_eviction="zipage", kv_budget=8)
    messages = [{"role": "user", "content": "a long question, longer than what is kept of it"}]
    letters = tiny_tokenizer().encode("abcdefghij", add_special_tokens=False)  # which are spelled one way only
    say = greedy(12, allowed_token_ids=tuple(letters))
    (first,) = llm.chat(messages, say, use_tqdm=False)
    messages += [{"role": "assistant", "content": first.outputs[0].text}, {"role": "user", "content": "and?"}]
    (second,) = llm.chat(messages, say, use_tqdm=False)
    assert second.num_cached_tokens > len(first.prompt_token_ids)


@pytest.mark.smollm2
def test_a_chat_with_smollm2_resumes_and_goes_on_as_text(smollm2):
    llm = LLM("smollm2", kv_eviction="snapkv", kv_budget_ratio=0.5, max_model_len=1024, page_size=16, num_pages=64)
    question = "Name three rivers of Europe. " * 12
    messages, say = [{"role": "user", "content": question}], greedy(40, ignore_eos=False)
    for _ in range(3):
        (answer,) = llm.chat(messages, say, use_tqdm=False)
        messages += [{"role": "assistant", "content": answer.outputs[0].text}, {"role": "user", "content": "And more?"}]
    assert answer.kv.resumed_tokens > 150 and answer.kv.rows_kept < 0.7 * answer.kv.tokens
    assert answer.outputs[0].text.strip()
