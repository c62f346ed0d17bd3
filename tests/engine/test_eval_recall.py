"""Recall over turns: keys lie where the history says, turns go on from folded rows, and all are asked alike."""

import argparse
import json
import re

import pytest

from pagefold.cli import main
from pagefold.core.types import InputError
from pagefold.eval import recall
from pagefold.eval.answers import FULL, make_variants
from pagefold.eval.answers_report import answers_table, summarise, verdicts
from pagefold.eval.cli import add_parsers
from pagefold.eval.recall import CUE, QUESTION, Talk, fold_options, make_frame, make_talk, run_recall, turns_of
from pagefold.eval.recall_cli import turns_table
from pagefold.eval.texts import encode_text, load_text
from pagefold.models.tokenizer import Tokenizer
from tests.engine.tiny import tiny_loaded, tiny_tokenizer, write_profile

TOKENIZER = tiny_tokenizer()
PROSE = encode_text(TOKENIZER, load_text()[1000:6000])
LENGTH, KEYS, TURNS = 1280, 3, 2
OPTIONS = {"model": "tiny", "page_size": 16, "kv_window": 8, "kv_sink_tokens": 1, "num_pages": 4000, "max_num_seqs": 32}


def talk_of(
    trial: int = 0, keys: int = KEYS, turns: int = TURNS, length: int = LENGTH, tokenizer: Tokenizer = TOKENIZER
) -> Talk:
    return make_talk(tokenizer, PROSE, length, keys, turns, trial)


def plain_tokenizer() -> Tokenizer:
    return Tokenizer(TOKENIZER._backend, eos_token_ids=(257,), bos_token_id=256, add_bos=True)


TALKS = [talk_of(trial) for trial in range(2)]


def run(variants, path=None, talks=TALKS, **options):
    return run_recall(tiny_loaded(), {**OPTIONS, **options}, talks, variants, path, use_tqdm=False)


# ---- conversations


def test_keys_are_hidden_after_sentences_of_the_history():
    talk = talk_of(keys=4, turns=4)
    text = TOKENIZER.decode(talk.history, skip_special_tokens=False)
    assert len(talk.history) == LENGTH
    for name, key, depth in zip(talk.names, talk.keys, talk.depths, strict=True):
        sentence = f" The pass key of the {name} is {key}."
        assert text.count(key) == 1 and text.count(sentence) == 1
        before = re.sub(r" The pass key of the \w+ \w+ is \d+\.", "", text.split(sentence)[0])
        assert before[-1] in ".;!?" and 0 < depth <= 1
    assert len(set(talk.names)) == len(set(talk.keys)) == 4
    prose = re.sub(r" The pass key of the \w+ \w+ is \d+\.", "", text)
    assert prose.split("user\n")[1].split("\n\nRemember")[0] in load_text()


@pytest.mark.parametrize("tokenizer", [TOKENIZER, plain_tokenizer()], ids=["chat", "plain"])
def test_a_conversation_reads_as_the_template_writes_it(tokenizer):
    talk = talk_of(tokenizer=tokenizer)
    ids = [*talk.history]
    for question in talk.questions:
        ids += [*question, *tokenizer.encode_plain(" 12345.")]
    said = tokenizer.decode(ids, skip_special_tokens=False)
    turns = [(QUESTION.format(name), f"{CUE.format(name)} 12345.") for name in talk.names]
    if tokenizer.chat_template is None:
        assert said.startswith("<|bos|>") and said.endswith("I will." + "".join(f"\n\n{q}\n\n{a}" for q, a in turns))
        return
    history = said.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
    words = [history, "I will.", *(words for turn in turns for words in turn)]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(words)]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert whole[: len(ids)] == ids


def test_conversations_are_the_same_every_time_and_differ_from_one_another():
    assert talk_of(1) == talk_of(1)
    assert len({talk.keys for talk in (talk_of(0), talk_of(1), talk_of(length=1296))}) == 3


def test_what_cannot_be_asked_is_refused():
    wrong: list[tuple[str, dict[str, int]]] = [
        ("keys", {"num_keys": 17}),
        ("turns", {"num_turns": 4}),
        ("turns", {"num_turns": 0}),
        ("tokens", {"length": 96}),
        ("tokens", {"length": 16000}),
        ("keys: got 16, and .* have room for", {"num_keys": 16, "num_turns": 1, "length": 1600}),
    ]
    for field, arguments in wrong:
        with pytest.raises(InputError, match=field):
            make_talk(
                TOKENIZER, PROSE, **{"length": LENGTH, "num_keys": KEYS, "num_turns": TURNS, "trial": 0} | arguments
            )
    with pytest.raises(InputError, match="tokens: got 1280, must be a multiple of kv_buffer"):
        fold_options({**OPTIONS, "kv_buffer": 192}, LENGTH)
    with pytest.raises(InputError, match="kv_keep_turns"):
        fold_options({**OPTIONS, "kv_keep_turns": False}, LENGTH)


def test_a_template_that_changes_earlier_turns_is_refused():
    first_only = "{% for m in messages %}{{ m.content if loop.last else '' }}{% endfor %}"
    tokenizer = plain_tokenizer()
    tokenizer.chat_template = first_only
    with pytest.raises(InputError, match="chat template"):
        make_frame(tokenizer)


# ---- running


def test_turns_go_on_from_the_folded_history(tmp_path):
    """The history is folded on its end, before a question is seen, and no turn computes it again."""
    layout = f"clustered:profile={write_profile(tmp_path / 'p.npz')},heads_per_page=2"
    variants = make_variants(["zipage", "recency"], ["1/4"], ["int4"], [layout])
    samples = run(variants)
    for variant in variants:
        mine = samples.of(variant.name, len(TALKS) * TURNS)
        assert [(s["talk"], s["turn"]) for s in mine] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        for s in mine:
            assert s["name"] == TALKS[s["talk"]].names[s["turn"]]
            if variant.share:
                assert s["resumed_tokens"] >= LENGTH and s["budget"] == LENGTH // 4
                assert s["rows_kept"] < LENGTH // 4 + 150 and s["rows_kept"] + s["rows_evicted"] > LENGTH
            else:
                assert s["rows_evicted"] == 0 and s["cached_tokens"] >= LENGTH - 16


def test_layouts_hold_as_many_rows(tmp_path):
    layout = f"clustered:profile={write_profile(tmp_path / 'p.npz')},heads_per_page=1"
    variants = make_variants(["recency"], ["1/4"], layouts=[layout])
    plain, clustered = summarise(run(variants), variants, len(TALKS) * TURNS)[1:]
    assert plain["rows"] == clustered["rows"] == LENGTH / 4
    assert clustered["held"] == pytest.approx(plain["held"], abs=2) and plain["held"] < LENGTH / 2


def test_a_budget_of_the_whole_conversation_changes_no_answer():
    samples = run(make_variants(["snapkv"], ["1", "1/8"]))
    answers = {name: [s["answer"] for s in samples.of(name, 4)] for name in (FULL, "snapkv 1", "snapkv 1/8")}
    assert answers[FULL] != answers["snapkv 1/8"]
    first = slice(0, 4, 2)  # later turns are folded once more, for the conversation outgrows its first turn
    assert answers["snapkv 1"][first] == answers[FULL][first]


def test_answers_are_judged_and_become_part_of_the_conversation(monkeypatch):
    """An engine that says the right key is right, in every turn, and is shown what it said."""
    engines = []
    real = recall.build_engine
    monkeypatch.setattr(recall, "build_engine", lambda *args: engines.append(real(*args)) or engines[-1])
    add, prompts = recall._Run._ask, {}

    def ask(self, variant, talk, turn, prompt):
        prompts[variant.name, talk, turn] = prompt
        add(self, variant, talk, turn, prompt)

    monkeypatch.setattr(recall._Run, "_ask", ask)
    samples = run(make_variants([], []))
    for sample in samples.of(FULL, 4):
        assert sample["passed"] == (TALKS[sample["talk"]].keys[sample["turn"]] in sample["answer"])
    for talk, told in enumerate(TALKS):
        first, second = prompts[FULL, talk, 0], prompts[FULL, talk, 1]
        assert first == told.history + told.questions[0] and second[: len(first)] == first
        answered = second[len(first) : len(second) - len(told.questions[1])]
        assert TOKENIZER.decode(answered).startswith(samples.of(FULL, 4)[talk * TURNS]["answer"])
    assert len(engines) == 1


def test_a_rerun_holds_only_what_is_missing(tmp_path, monkeypatch):
    path, asked = tmp_path / "samples.jsonl", []
    variants = make_variants(["recency"], ["1/4"])
    first = run(variants, path)
    whole = path.read_text()
    real = recall._Run._ask
    monkeypatch.setattr(recall._Run, "_ask", lambda self, *args: asked.append(args[:3]) or real(self, *args))
    run(variants, path)
    assert asked == []
    path.write_text("".join(line + "\n" for line in whole.split("\n")[:-2]))  # the last turn of all is gone
    again = run(variants, path)
    assert len({(variant.name, talk) for variant, talk, _ in asked}) == 1 and len(asked) == 1 + TURNS
    for variant in variants:
        assert [s["answer"] for s in again.of(variant.name, 4)] == [s["answer"] for s in first.of(variant.name, 4)]
    with pytest.raises(InputError, match="differs in conversations"):
        run(variants, path, [talk_of(7), talk_of(8)])


# ---- figures


def fill(samples, name: str, passed: list[int], held: float = 100.0) -> None:
    for i, mark in enumerate(passed):
        facts = {"prompt_tokens": 200, "cached_tokens": 150, "resumed_tokens": 100, "tokens": 7, "compactions": 1}
        place = {"problem": i, "talk": i // TURNS, "turn": i % TURNS}
        samples.add({"variant": name, **place, **facts, "budget": None, "rows_kept": held, "passed": bool(mark)})


def test_figures_by_turn_and_layouts_against_each_other():
    variants = make_variants(["zipage"], ["1/4"], layouts=["clustered:profile=p.npz"])
    samples = recall.Samples(None, {})
    fill(samples, FULL, [1] * 40)
    fill(samples, "zipage 1/4", [1, 0] * 20)
    fill(samples, "zipage 1/4 clustered:profile=p.npz", [1, 1] * 16 + [0, 0] * 4)
    records = summarise(samples, variants, 40)
    figures = turns_of(samples, variants, 20, TURNS)
    assert [turn["passed"][0] for turn in figures[1]] == [1, 0] and [t["passed"][0] for t in figures[2]] == [0.8, 0.8]
    assert figures[0][1]["passed"][1] == pytest.approx(0.839, abs=1e-3)  # Wilson for 20 of 20
    assert figures[0][0]["resumed_tokens"] == 100
    (line,) = verdicts(records)
    assert line == (
        "clustered:profile=p.npz at 1/4: zipage beats itself (16 won, 4 lost, p 0.012) with 100 rows held for 100"
    )
    for record, turns in zip(records, figures, strict=True):
        record["turns"] = turns
    assert turns_table(records).row_count == answers_table("t", records).row_count == 3
    json.dumps(records)


def test_the_command_has_its_flags():
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers())
    words = "eval recall tiny --tokens 512 --budgets 1/2 --layouts uniform;clustered:profile=p.npz --kv-keep-bytes 1000"
    args = parser.parse_args(words.split())
    assert args.layouts == ["uniform", "clustered:profile=p.npz"] and args.budgets == ["1/2"]
    assert (args.tokens, args.keys, args.turns, args.kv_keep_bytes) == (512, 8, 6, 1000)


def test_results_need_a_folder_that_exists(tmp_path, capsys):
    for command in ("eval recall", "eval humaneval", "eval chains"):
        for flag in ("--samples", "--json", "--chart"):
            assert main([*command.split(), "tiny", flag, str(tmp_path / "nowhere" / "file")]) == 2
            assert f"error: {flag}: got" in (said := capsys.readouterr().err) and "does not exist" in said
