"""The command line offers every option, answers nonsense in one line that names the field, and serves what is good."""

import dataclasses
import io
import json

import pytest

from pagefold.cli import ALIASES, build_parser, engine_options, main, sampling_options
from pagefold.core.config import EngineConfig
from pagefold.core.types import SamplingParams
from tests.model_dir import write_model_dir

TINY = ["--load-format", "dummy", "--dtype", "float32", "--num-pages", "64", "--kv-swap-bytes", "0"]
VALUES = {int: "64", float: "0.25", str: "none", dict: '{"5": 1.5}'}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return str(write_model_dir(tmp_path_factory.mktemp("model")))


def parse(*argv: str):
    return build_parser().parse_args(argv)


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize("verb", [["generate"], ["chat"], ["inspect"], ["bench", "throughput"]], ids=" ".join)
@pytest.mark.parametrize("leaf", [leaf for leaf in EngineConfig.leaves() if leaf.name != "model"], ids=lambda f: f.name)
def test_every_engine_option_is_a_flag(verb, leaf):
    flag = f"--{leaf.name.replace('_', '-')}"
    if leaf.type in (bool, bool | None):
        assert engine_options(parse(*verb, f"--no-{flag[2:]}"))[leaf.name] is False
        value = True
        given = [flag]
    else:
        kind = next(k for k in (int, float, str) if k is leaf.type or k in getattr(leaf.type, "__args__", ()))
        text = leaf.metadata["choices"][-1] if leaf.metadata["choices"] else VALUES[kind]
        value, given = kind(text), [flag, text]
    assert engine_options(parse(*verb, *given)) == {"model": "smollm2", leaf.name: value}
    for alias in ALIASES.get(leaf.name, []):
        assert engine_options(parse(*verb, alias, *given[1:]))[leaf.name] == value


def test_every_sampling_field_is_a_flag():
    argv, engine = ["generate"], {leaf.name for leaf in EngineConfig.leaves()}
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name not in engine]
    texts = {"stop": "x", "bad_words": "y", "logit_bias": VALUES[dict], "temperature": "0.5", "top_p": "0.5"}
    texts["structured_outputs"] = '{"regex": "a"}'
    for name in names:
        argv.append(f"--{name.replace('_', '-')}")
        if not isinstance(getattr(SamplingParams(), name), bool):
            argv.append(texts.get(name, "1"))
    options = sampling_options(parse(*argv))
    assert sorted(options) == sorted(names)
    sampling = SamplingParams(**options)
    assert sampling.stop == ("x",) and sampling.allowed_token_ids == (1,) and sampling.logit_bias == {5: 1.5}


def test_only_what_is_given_overrides_the_defaults():
    assert EngineConfig.from_options(**engine_options(parse("chat"))) == EngineConfig()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["generate", "--kv-budgt", "3"], ["--kv-budgt", "did you mean --kv-budget"]),
        (["generate", "--kv-budgt=3"], ["--kv-budgt", "did you mean --kv-budget"]),
        (["inspect", "--frobnicate"], ["--frobnicate", "known:", "--kv-eviction"]),
        (["bench", "throughput", "--kv-bud", "3"], ["--kv-bud"]),
        (["inspect", "smollm2", "more"], ["more", "unexpected"]),
        (["generate", "--kv-budget", "many"], ["--kv-budget", "'many'", "an integer"]),
        (["generate", "--logit-bias", "{"], ["--logit-bias", "a JSON object"]),
        (["generate"], ["prompt", "--input"]),
        (["generate", "--prompt", "x", "--kv-budget", "0"], ["kv_budget", "got 0", ">= 1"]),
        (["generate", "--prompt", "x", "--dtype", "int3"], ["dtype", "'int3'", "bfloat16"]),
        (["generate", "--prompt", "x", "--top-p", "7"], ["top_p", "7.0", "(0, 1]"]),
        (["generate", "--input", "no-such-file.jsonl"], ["input", "no-such-file.jsonl"]),
        (["inspect", "no-such-model"], ["model", "no-such-model"]),
        (["frobnicate"], ["frobnicate", "generate"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_nonsense_is_one_line_and_exit_code_2(capsys, argv, words):
    code, out, err = run(capsys, *argv)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert all(word in err for word in words), err


def test_ctrl_c_exits_130(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("pagefold.cli.build_parser", interrupted)
    assert main([]) == 130


def test_inspect_counts_bytes_pages_and_tokens(capsys, model_dir):
    """2 layers of 2 KV heads of 16 channels: 32 values a row, 4 rows a token, pages of 32 rows."""
    code, out, _ = run(capsys, "inspect", model_dir, "--kv-format", "bf16", "--num-pages", "10")
    lines = {line[:24].strip(): line[24:].strip() for line in out.splitlines() if line.startswith("  ")}
    assert code == 0
    assert lines["family"] == "llama" and lines["layers"] == "2" and lines["context"] == "512 tokens"
    assert lines["hot bytes per row"].startswith("64 ")
    assert lines["hot bytes per token"].startswith("256 ")
    assert lines["hot bytes per page"] == "8192"
    assert lines["hot pages"].startswith("10 ")
    assert lines["tokens, none evicted"].startswith("320 ")
    assert lines["requests of 512"].startswith("0 at once")
    assert "lam=" in lines["scorer zipage"] and "layout uniform" in lines and "format int4" in lines


def test_inspect_knows_that_folded_requests_stay_small(capsys, model_dir):
    _, out, _ = run(capsys, "inspect", model_dir, "--num-pages", "10", "--kv-eviction", "recency", "--kv-budget", "64")
    assert "3 at once: each holds up to 3 hot pages" in out


def test_generate_answers_good_lines_and_names_what_is_wrong_with_bad_ones(capsys, model_dir, tmp_path):
    lines = [
        {"prompt": "one", "temperature": 0},
        {"prompt": "two", "temperature": -1},
        {"messages": [{"role": "user", "content": "three"}], "max_tokens": 3, "n": 2},
        {"prompt_token_ids": [1, 2, 999]},
        {"prompt": "five", "tempereture": 0},
        {"prompt_token_ids": [1, 2, 3]},
        {"temperature": 0},
        {"prompt": "x" * 600},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([*map(json.dumps, lines), "nonsense"]))
    argv = [*TINY, "--max-tokens", "5", "--ignore-eos", "--input", str(source), "--output", str(target)]
    code, _, err = run(capsys, "generate", model_dir, *argv)
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert code == 0 and "6 of 9 requests were refused" in err
    assert [answer["index"] for answer in answers] == list(range(9))
    lengths = {a["index"]: [len(o["token_ids"]) for o in a["outputs"]] for a in answers if "outputs" in a}
    assert lengths == {0: [5], 2: [3, 3], 5: [5]}
    assert answers[0]["outputs"][0]["kv"]["tokens"] == answers[0]["prompt_tokens"] + 4
    faults = {a["index"]: a["error"]["param"] for a in answers if "error" in a}
    assert faults == {1: "temperature", 3: "prompt", 4: "tempereture", 6: "prompt", 7: "prompt", 8: "line 9"}


def test_generate_prints_the_text_of_a_prompt(capsys, model_dir):
    argv = [*TINY, "--prompt", "one", "--temperature", "0", "--max-tokens", "4", "--allowed-token-ids", "33"]
    code, out, _ = run(capsys, "generate", model_dir, *argv)
    assert code == 0 and out == "BBBB\n"  # 33 is the token of that byte


def test_chat_streams_counts_rows_and_forgets(capsys, model_dir, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/stats\n/nonsense\n/reset\n/quit\nnever read\n"))
    fold = ["--kv-eviction", "recency", "--kv-budget", "32", "--page-size", "16", "--kv-window", "4"]
    argv = [*fold, "--max-tokens", "80", "--ignore-eos", "--allowed-token-ids", "33"]
    code, out, _ = run(capsys, "chat", model_dir, *TINY, *argv)
    answer, stats, unknown = out.splitlines()
    assert code == 0 and answer == "B" * 80
    kept, seen = (int(stats.split()[i]) for i in (0, 6))
    assert 32 <= kept <= 48 and seen > 100
    assert "/nonsense" in unknown


def test_chat_goes_on_after_a_question_that_does_not_fit(capsys, model_dir, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 600 + "\nhi\n"))
    code, out, _ = run(
        capsys, "chat", model_dir, *TINY, "--max-tokens", "3", "--ignore-eos", "--allowed-token-ids", "33"
    )
    refusal, answer = out.splitlines()
    assert code == 0 and refusal.startswith("error: prompt") and answer == "BBB"
