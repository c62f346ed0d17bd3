"""Answers that must have a form have it, whatever the model would rather say; forms that make no sense are refused."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance")

from pagefold.core.types import InputError, Request, SampleSpec, SamplingParams
from pagefold.engine import grammar
from pagefold.engine.grammar import GrammarCompiler, Matcher, fill_masks
from pagefold.runner.device_sampler import DeviceSampler
from pagefold.runner.sampler import Sampler, has_edits, mask_bits
from tests.engine.tiny import BOS, EOS, assert_drained, drain, greedy, prompt_of, seeded, tiny_engine, tiny_tokenizer

VOCAB = 260
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer(), VOCAB, [EOS])


def compile_now(compiler: GrammarCompiler, kind: str, text: str) -> Matcher:
    return compiler.submit(kind, text).result(timeout=60)


def answers(matcher: Matcher, params: list[SamplingParams], **options):
    """What an engine says under the grammar, a request for each of `params` beside one that is free."""
    engine = tiny_engine(**options)
    for i, sampling in enumerate(params):
        engine.add(Request(str(i), tuple(prompt_of(9, i)), sampling), grammar=matcher)
    engine.add(Request("free", tuple(prompt_of(9, 99)), greedy(20)))
    done = drain(engine)
    engine.manager.prefix and engine.manager.prefix.clear()
    assert_drained(engine)
    return [done[str(i)].outputs[0] for i in range(len(params))], done["free"].outputs[0]


def json_params(num: int, max_tokens: int = 300) -> list[SamplingParams]:
    return [SamplingParams(temperature=1.0, seed=i, max_tokens=max_tokens) for i in range(num)]


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_every_answer_meets_its_schema_and_ends_with_it(compiler, plan_ahead):
    outputs, _ = answers(
        compile_now(compiler, "json_schema", json.dumps(SCHEMA)), json_params(6), plan_ahead=plan_ahead
    )
    for output in outputs:
        assert output.finish_reason == "stop" and output.stop_reason is None and output.error is None
        value = json.loads(output.text)
        assert set(value) <= {"name", "age", "tags"} and len(value["name"]) <= 8 and 0 <= value["age"] <= 99
        assert set(value.get("tags", [])) <= {"x", "yy"}
        assert tiny_tokenizer().decode(output.token_ids) == output.text  # the token that completes it is shown


def test_planning_ahead_and_preemption_change_nothing(compiler):
    matcher = compile_now(compiler, "json_schema", json.dumps(SCHEMA))
    params = json_params(4, max_tokens=100)
    expected, free = answers(matcher, params)
    for options in ({"plan_ahead": True}, {"num_pages": 30, "max_num_batched_tokens": 5, "plan_ahead": True}):
        outputs, beside = answers(matcher, params, **options)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
        assert beside.token_ids == free.token_ids
    assert sum(output.kv.preemptions for output in outputs) > 0


@settings(max_examples=15)
@given(
    st.sampled_from(["(ab|c)+d", "[0-9]{2,5}(\\.[0-9])?", "é+|😀", "x?y?z?w", "a.{3}b", "[^a]{4}"]), st.integers(0, 99)
)
def test_every_answer_matches_its_expression(compiler, expression, seed):
    sampling = [SamplingParams(temperature=1.0, seed=seed, max_tokens=400), greedy(400)]
    for output in answers(compile_now(compiler, "regex", expression), sampling)[0]:
        if output.finish_reason == "stop":
            assert re.fullmatch(expression, output.text), output.text
        else:
            assert len(output.token_ids) == 400  # it went on and on, which "+" allows


def test_a_grammar_and_its_copies_do_not_share_their_state(compiler):
    """n continuations, and the same text compiled again."""
    engine = tiny_engine()
    matcher = compile_now(compiler, "regex", "[a-f]{6}")
    for id in ("a", "b"):
        engine.add(Request(id, (BOS,), SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=20)), grammar=matcher)
        matcher = compile_now(compiler, "regex", "[a-f]{6}")
    for output in drain(engine).values():
        assert all(re.fullmatch("[a-f]{6}", choice.text) for choice in output.outputs)


def test_an_end_is_allowed_only_where_the_grammar_allows_it(compiler):
    """The model would rather end at once; and where the grammar allows more, its end token ends the answer."""
    eager = SamplingParams(temperature=0.0, max_tokens=30, logit_bias={EOS: 100.0})
    (output,), _ = answers(compile_now(compiler, "regex", "ab?"), [eager])
    assert (output.text, output.finish_reason, output.token_ids[1:]) == ("a", "stop", [EOS])
    free = replace(eager, logit_bias=None, seed=1, temperature=1.0, max_tokens=400)
    (output,), _ = answers(compile_now(compiler, "json_object", ""), [free])
    assert isinstance(json.loads(output.text), dict) and output.finish_reason == "stop"


def test_an_answer_cut_off_by_max_tokens_says_length(compiler):
    (output,), _ = answers(compile_now(compiler, "regex", "a{50}"), [greedy(7)])
    assert (output.text, output.finish_reason) == ("aaaaaaa", "length")


def test_a_limit_met_on_the_way_ends_the_request_with_an_error(compiler, monkeypatch):
    matcher = compile_now(compiler, "regex", "a{50}")
    monkeypatch.setattr(Matcher, "error", "too complex")
    (output,), free = answers(matcher, [greedy(7)])
    assert (output.finish_reason, output.error) == ("abort", "too complex")
    assert free.finish_reason == "length"


@pytest.mark.parametrize(
    ("kind", "text", "field", "words"),
    [
        ("json_schema", '{"type":"strin"}', "response_format", "strin"),
        ("json_schema", "{", "response_format", "EOF"),
        ("json_schema", "", "response_format", "empty"),
        ("json_schema", '{"not":{"type":"string"}}', "response_format", "not"),
        ("json_schema", '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}}', "response_format", "no answer"),
        ("json_schema", '{"enum":[]}', "response_format", "nsatisfiable"),
        ("json_schema", '{"description":"' + "x" * 10_000_000 + '"}', "response_format", "bytes"),
        ("json_schema", '{"allOf":[' * 3000 + "{}" + "]}" * 3000, "response_format", "recursion"),
        ("regex", "(", "structured_outputs.regex", "unclosed"),
        ("regex", "", "structured_outputs.regex", "empty"),
        ("regex", "(?=a)b", "structured_outputs.regex", "look-around"),
        ("grammar", "", "structured_outputs.grammar", "empty"),
        ("grammar", "start: start", "structured_outputs.grammar", "no answer"),
        ("grammar", "start: nowhere", "structured_outputs.grammar", "nowhere"),
        ("structural_tag", "[]", "response_format", "structural tag"),
        ("poem", "x", "response_format", "json_schema"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_38_39_a_form_that_makes_no_sense_is_refused(compiler, kind, text, field, words):
    with pytest.raises(InputError, match=f"(?s){re.escape(words)}") as refused:
        compile_now(compiler, kind, text)
    assert refused.value.field == field and len(str(refused.value)) < 2000


def test_39_a_pattern_with_a_needless_escape_is_kept_to(compiler):
    (output,), _ = answers(compile_now(compiler, "json_schema", '{"type":"string","pattern":"^a\\\\!$"}'), [greedy(20)])
    assert output.text == '"a!"'


@pytest.mark.parametrize("terminals", [False, True])
def test_38_rules_that_nest_as_deep_as_a_text_can_hold_do_not_kill_the_process(compiler, terminals):
    names = ["".join(chr(65 + int(d)) for d in str(i)) for i in range(3600)]
    names = names if terminals else [name.lower() for name in names]
    rules = [f'{a}: {b} "a"' for a, b in zip(names, names[1:], strict=False)]
    text = "\n".join([f"start: {names[0]}", *rules, f'{names[-1]}: "b"'])
    assert 50_000 < len(text) <= grammar.MAX_TEXT_BYTES
    (output,), _ = answers(compile_now(compiler, "grammar", text), [greedy(5)])
    assert output.text == "baaaa"


def test_whitespace_does_not_go_on_for_ever(compiler):
    blanks = SamplingParams(temperature=0.0, max_tokens=200, logit_bias={tiny_tokenizer().encode_plain(" ")[0]: 100.0})
    (output,), _ = answers(compile_now(compiler, "json_schema", '{"type":"object","maxProperties":0}'), [blanks])
    assert json.loads(output.text) == {} and output.finish_reason == "stop"


def test_a_structural_tag_frees_the_text_around_it(compiler):
    tag = {"triggers": ["<f"], "structures": [{"begin": "<f=add>", "schema": {"type": "integer"}, "end": "</f>"}]}
    matcher = compile_now(compiler, "structural_tag", json.dumps(tag))
    for token in tiny_tokenizer().encode_plain("so: <f=add>42"):
        matcher.accept(token)
    spec = spec_of(0)
    fill_masks([(matcher, spec)])
    allowed = {chr(i) for i in range(256) if spec.mask is not None and mask_bits(spec.mask, VOCAB)[byte_id(i)]}
    assert allowed == set("0123456789<")


def byte_id(byte: int) -> int:
    return tiny_tokenizer().encode_plain(chr(byte))[-1]


# masks, on both samplers


def spec_of(row: int, mask: np.ndarray | None = None, **params) -> SampleSpec:
    params = {"temperature": 0.0 if row % 2 else 0.8} | params
    return SampleSpec(SamplingParams(**params), row, 1, (0,), [], frozenset({7}), (), mask)


def pack(allowed: set[int], vocab: int) -> np.ndarray:
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


@pytest.mark.parametrize("vocab", [260, 64, 65, 97])
def test_both_samplers_keep_to_the_mask_alike(vocab):
    """The edited logits of the device sampler, which runs on any device up to the draw, and of the host's."""
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.normal(size=(8, vocab + 3)).astype(np.float32))
    masks = [set(rng.choice(vocab, size=n, replace=False).tolist()) for n in (1, 2, 30, vocab, 5, 5)]
    specs = [spec_of(i, pack(allowed, vocab)) for i, allowed in enumerate(masks)]
    specs[4].params = SamplingParams(allowed_token_ids=tuple(sorted(masks[4])[:2] + [0]), min_tokens=1, max_tokens=5)
    specs += [spec_of(6), spec_of(7, logit_bias={3: 50.0})]
    allowed = [*masks, set(range(vocab)), {3}]
    allowed[4] &= {*sorted(masks[4])[:2], 0}

    rows = [row for row, spec in enumerate(specs) if has_edits(spec, 0)]
    assert rows == [0, 1, 2, 3, 4, 5, 7]
    device = DeviceSampler(vocab, "cpu")
    edits = device._edits({row: specs[row] for row in rows})
    edited = device._edit(logits, torch.zeros(8, dtype=torch.int64), type(edits)(*map(torch.from_numpy, edits)))
    for i, row in enumerate(rows[:-1]):
        assert set(torch.isfinite(edited[i]).nonzero().ravel().tolist()) == allowed[row]
        finite = edited[i].isfinite()
        assert torch.equal(edited[i][finite], logits[row, :vocab][finite])
    ids, _ = Sampler(vocab).sample(logits, specs)
    for row, (id, ok) in enumerate(zip(ids, allowed, strict=True)):
        assert id in ok
        if specs[row].params.greedy and row in rows:
            assert id == int(edited[rows.index(row)].argmax())


def test_a_mask_that_allows_nothing_gives_no_id():
    spec = spec_of(0, pack(set(), 64))
    assert Sampler(64).sample(torch.zeros(1, 64), [spec])[0] == [None]
    device = DeviceSampler(64, "cpu")
    edits = device._edits({0: spec})
    edited = device._edit(
        torch.zeros(1, 64), torch.zeros(1, dtype=torch.int64), type(edits)(*map(torch.from_numpy, edits))
    )
    assert edited[0].max() == -math.inf or edited[0].isnan().any()


def test_seeded_answers_do_not_depend_on_neighbours(compiler):
    matcher = compile_now(compiler, "regex", "[a-z]{20}")
    alone, _ = answers(matcher, [seeded(20, 5)])
    crowd, _ = answers(matcher, [seeded(20, 5), *(replace(seeded(20, i), top_k=3) for i in range(3))])
    assert alone[0].token_ids == crowd[0].token_ids
