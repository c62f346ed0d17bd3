"""Straight-line programs: worked out right, drawn as described, and learnt by a model that both engines can read."""

import json

import pytest
import torch

from pagefold.core.types import InputError, SamplingParams
from pagefold.engine.llm import LLM
from pagefold.eval import chains
from pagefold.eval.train_chains import (
    COLUMNS,
    JUDGED,
    Curriculum,
    Programs,
    Trainer,
    ask,
    loss_of,
    score,
    train,
)
from pagefold.eval.train_options import TrainOptions

TINY = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 48, "device": "cpu"}


def draw(num: int, lines: int, seed: int = 0) -> torch.Tensor:
    return chains.draw_programs(num, lines, torch.Generator().manual_seed(seed))


def spell(ids: torch.Tensor) -> list[str]:
    """One word per id: v3 is a variable, 3 a number."""
    marks = {getattr(chains, name): name for name in ("BOS", "EOS", "ASK", "THINK")}
    marks |= {chains.EQUALS: "=", chains.SEMICOLON: ";", chains.PLUS: "+", chains.MINUS: "-", chains.TIMES: "*"}
    words = []
    for id in ids.tolist():
        named = f"v{id - chains.NAMES}" if id >= chains.NAMES else str(id - chains.VALUES)
        words.append(marks.get(id, named))
    return words


@pytest.mark.parametrize("lines", [1, 2, 7, 100])
def test_an_answer_is_what_python_works_out(lines):
    for program in draw(20, lines):
        prompt, answer = (spell(part) for part in chains.split_answer(program))
        assert len(prompt) == chains.prompt_length(lines) and len(answer) == chains.answer_length(lines)
        assert prompt[0] == "BOS" and prompt[-1] == "THINK" and prompt[-3] == "ASK"
        values: dict[str, int] = {}
        expected = []
        for line in " ".join(prompt[1:-3]).removesuffix(";").split(";"):
            name, _, a, op, b = line.split()
            a, b = (values[x] if x in values else int(x) for x in (a, b))
            assert name not in values
            values[name] = eval(f"{a} {op} {b}") % chains.MODULUS
            expected += [name, "=", str(a), op, str(b), "=", str(values[name]), ";"]
        assert answer == [*expected, "ASK", prompt[-2], "=", str(values[prompt[-2]]), "EOS"]


def test_operands_are_recent_hubs_or_from_anywhere():
    """So that a cache must keep what is used often: a third of the lookups go back over a dozen lines."""
    lines = 100
    prompt = draw(200, lines)[:, 1 : 1 + 6 * lines].view(-1, lines, 6)
    names, operands = prompt[:, :, 0], prompt[:, :, [2, 4]]
    line, _ = (t.expand_as(operands) for t in (torch.arange(lines)[:, None], operands))
    used = operands >= chains.NAMES
    source = (operands[..., None] == names[:, None, None]).int().argmax(-1)
    back = (line - source)[used].float()
    assert used.float().mean().item() == pytest.approx(0.86, abs=0.01)
    assert 0.35 < (back <= 3).float().mean() < 0.45
    assert 0.35 < (back > 12).float().mean() < 0.45
    uses = torch.zeros(200, lines).scatter_add_(1, source.flatten(1), used.flatten(1).float())
    assert uses.topk(6, dim=1).values.sum() > 0.25 * used.sum()


def test_a_seed_fixes_the_programs_and_too_many_lines_are_refused():
    assert torch.equal(draw(3, 9), draw(3, 9)) and not torch.equal(draw(3, 9), draw(3, 9, seed=1))
    with pytest.raises(InputError, match=r"lines: got 225, must be in \[1, 224\]"):
        draw(1, 225)


def test_questions_ask_for_what_the_answer_worked_out():
    programs = draw(5, 30)
    asked = ask(programs, 30, torch.Generator().manual_seed(1))
    assert torch.equal(asked[:, : programs.shape[1]], programs)
    for program, questions in zip(programs, asked[:, programs.shape[1] :].unflatten(1, (16, 3)), strict=True):
        lines = chains.split_answer(program)[1][:-5].view(-1, 8)
        values = dict(zip(lines[:, 0].tolist(), lines[:, 6].tolist(), strict=True))
        for mark, name, value in questions.tolist():
            assert mark == chains.THINK and values[name] == value


def test_each_kind_of_token_is_scored_apart():
    ids = ask(draw(4, 3), 3, torch.Generator().manual_seed(0))
    targets = ids[:, chains.prompt_length(3) :]
    logits = torch.nn.functional.one_hot(targets, chains.VOCAB).float()
    assert score(logits, targets, 3).tolist() == [1.0] * 11
    logits[0, 6] = logits[1, -1] = 0.0  # the first program's first result, the second's last question
    expected = dict.fromkeys((*range(len(COLUMNS)), "whole"), 1.0)
    expected |= {COLUMNS.index("result"): 1 - 1 / 12, COLUMNS.index("recall"): 1 - 1 / 12, "whole": 1 - 1 / 4}
    assert score(logits, targets, 3).tolist() == pytest.approx(list(expected.values()))
    assert loss_of(logits, targets, 3) > loss_of(50 * logits, targets, 3)


def test_lines_are_added_only_when_the_weakest_kind_passes():
    curriculum = Curriculum(4, 6, seed=0)
    good, weak = torch.ones(11), torch.ones(11)
    weak[6] = 0.98
    assert not any(curriculum.record(weak) for _ in range(3 * JUDGED))
    good[-2:] = 0.0  # the end and whole answers do not count
    assert [curriculum.record(good) for _ in range(JUDGED)] == [False] * (JUDGED - 1) + [True]
    assert curriculum.lines == 5 and curriculum.accuracy.isnan().all()
    for _ in range(JUDGED):
        curriculum.record(good)
    assert curriculum.lines == 6 == curriculum.most
    assert not any(curriculum.record(good) for _ in range(2 * JUDGED))


def test_no_batch_comes_twice_and_shorter_ones_are_mixed_in():
    programs = Programs(200, torch.Generator().manual_seed(0))
    batches = [programs.take(2) for _ in range(40)]
    assert all(batch.shape == (5, 37 + 6) for batch in batches)
    assert len({tuple(row.tolist()) for batch in batches for row in batch}) == 200
    curriculum = Curriculum(10, 10, seed=0)
    drawn = [curriculum.next_lines() for _ in range(1000)]
    assert set(drawn) == set(range(2, 11)) and 450 < drawn.count(10) < 550


def test_the_learning_rate_rises_stays_and_falls_to_nothing_once_programs_are_long():
    trainer = Trainer(TrainOptions(**TINY, lr=1e-3, warmup=10, decay_from=0.5))
    assert trainer.learning_rate(0.0) == pytest.approx(1e-4)
    trainer.steps = 50
    assert [trainer.learning_rate(x) for x in (0.1, 0.5, 0.75, 1.0)] == pytest.approx([1e-3, 1e-3, 5e-4, 3e-4])
    trainer.curriculum.lines = trainer.curriculum.most
    assert [trainer.learning_rate(x) for x in (0.1, 0.5, 0.75, 1.0)] == pytest.approx([1e-3, 1e-3, 5e-4, 0.0])


def test_steps_learn_and_what_is_saved_continues_as_the_trainer_does(tmp_path):
    """The checkpoint is read by the engine and by transformers, and both give the trainer's logits."""
    from transformers import AutoModelForCausalLM

    trainer = Trainer(TrainOptions(**TINY, first_lines=2, most_lines=3, tokens=1000, lr=3e-3, warmup=5))
    losses = []
    for _ in range(60):
        ids = trainer.programs.take(2)
        losses.append(loss_of(*trainer.predict(ids, 2), 2).item())
        trainer.step(0.0)
    assert losses[-1] < 0.6 * losses[0]

    trainer.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.copy_(p.bfloat16())
        ids = draw(3, 3, seed=7)
        logits = trainer.predict(ids, 3)[0]
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(ids[:, :-1]).logits
    torch.testing.assert_close(theirs[:, -logits.shape[1] :], logits, rtol=1e-4, atol=1e-4)
    llm = LLM(str(tmp_path), dtype="float32", backend="cpu", num_pages=64)
    assert llm.tokenizer is None
    prompts = [row[:-5].tolist() for row in ids]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    assert [o.outputs[0].token_ids[0] for o in outputs] == logits[:, -5].argmax(-1).tolist()


def test_training_keeps_to_its_time_and_reports(tmp_path):
    lines: list[str] = []
    whole = train(TrainOptions(**TINY, minutes=0.02, most_lines=10, tokens=500), tmp_path / "out", lines.append)
    assert list(whole) == [2, 5, 10] and all(0 <= share <= 1 for share in whole.values())
    assert lines[0] == "0.03M parameters" and "10 lines" in lines[-1]
    assert {"config.json", "model.safetensors"} == {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minutes": 0}, "minutes: got 0, must be > 0"),
        ({"first_lines": 9, "most_lines": 5}, r"first_lines: got 9, must be in \[2, most_lines \(5\)\]"),
        ({"decay_from": 1.0}, "decay_from: got 1.0, must be below 1"),
        ({"heads": 6, "kv_heads": 4}, r"kv_heads: got 4, must divide heads \(6\)"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        TrainOptions(**options)
