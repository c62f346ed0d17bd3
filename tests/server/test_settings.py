"""`pagefold serve`: flags, the config file and the environment come together, and nonsense is named."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import pytest

from pagefold.cli import main
from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError
from pagefold.server.settings import ServerSettings, parse_options
from pagefold.server.stats import option_table
from tests.engine.tiny import OPTIONS, tiny_engine


@pytest.fixture
def served(monkeypatch):
    """What `serve` is called with; it returns 7."""
    calls = []
    app = SimpleNamespace(serve=lambda settings, config: calls.append((settings, config)) or 7)
    monkeypatch.setitem(sys.modules, "pagefold.server.app", app)
    monkeypatch.delenv("PAGEFOLD_API_KEY", raising=False)
    return calls


def write(path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_without_flags_the_defaults_serve(served):
    assert main(["serve"]) == 7
    assert served == [(ServerSettings(), EngineConfig())]


def test_every_setting_is_a_flag_and_a_key_of_the_file(served, tmp_path):
    template = write(tmp_path / "chat.jinja", "{{ messages }}")
    values = {"api_key": ["k", "l"], "served_model_name": ["m"], "allowed_origins": ["http://x"]}
    values |= {
        "chat_template": template,
        "tool_call_parser": "hermes",
        "reasoning_parser": "none",
        "log_level": "error",
    }
    values |= {"generation_config": "none", "metrics_prefix": "vllm", "root_path": "/v", "host": "::1"}
    for leaf in dataclasses.fields(ServerSettings):
        if isinstance(leaf.default, bool):
            values[leaf.name] = not leaf.default
        elif isinstance(leaf.default, (int, float)):
            values[leaf.name] = 5
    assert set(values) == {leaf.name for leaf in dataclasses.fields(ServerSettings)}
    argv = ["serve", "some/model", "--kv-budget", "64"]
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        for item in value if isinstance(value, list) else [value]:
            argv += [flag] if isinstance(item, bool) else [flag, str(item)]
    file = write(tmp_path / "c.json", json.dumps(values | {"model": "some/model", "kv-budget": 64}))
    assert main(argv) == 7 and main(["serve", "--config", file]) == 7
    assert served[0] == served[1]
    settings, config = served[0]
    assert settings.api_key == ("k", "l") and config.model.model == "some/model" and config.eviction.kv_budget == 64


def test_flags_win_over_the_file_and_the_environment_adds_a_key(served, tmp_path, monkeypatch):
    text = "model: from/file\nport: 1234\nkv-eviction: keydiff\napi_key: [a]\nenable-prefix-caching: false\n"
    monkeypatch.setenv("PAGEFOLD_API_KEY", "secret")
    assert main(["serve", "--config", write(tmp_path / "c.yaml", text), "--port", "99"]) == 7
    settings, config = served[0]
    assert (settings.port, settings.api_key) == (99, ("a", "secret"))
    assert (config.model.model, config.eviction.kv_eviction) == ("from/file", "keydiff")
    assert config.cache.enable_prefix_caching is False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 80", ["prot", "unknown option", "port", "kv_budget"]),
        ("port: eighty", ["port", "'eighty'", "integer"]),
        ("port: 70000", ["port", "70000", "65535"]),
        ("port: true", ["port", "True"]),
        ("kv_budget: 0", ["kv_budget", "got 0"]),
        ("api_key: ''", ["api_key", "empty"]),
        ("api_key: [1]", ["api_key", "[1]", "texts"]),
        ("max_queue: 0", ["max_queue", "got 0"]),
        ("drain_timeout: .nan", ["drain_timeout", "nan"]),
        ("metrics_prefix: a-b", ["metrics_prefix", "a-b"]),
        ("tool_call_parser: poem", ["tool_call_parser", "poem", "hermes"]),
        ("chat_template: /no/such/file", ["chat_template", "no file"]),
        ("- 1", ["config", "names"]),
        ("a: [", ["config", "cannot be read"]),
        (None, ["config", "cannot be read"]),
    ],
)
def test_nonsense_is_one_line_that_names_the_field(served, tmp_path, capsys, text, words):
    path = tmp_path / "c.yaml"
    if text is not None:
        write(path, text)
    assert main(["serve", "--config", str(path)]) == 2 and not served
    error = capsys.readouterr().err
    assert all(word in error for word in words), error
    assert error.startswith("error: ")


def test_a_setting_given_in_python_is_checked_too():
    with pytest.raises(InputError, match="log_level"):
        ServerSettings(log_level="loud")
    with pytest.raises(InputError, match="nothing_like_it"):
        parse_options({"nothing_like_it": 1})


@pytest.mark.parametrize("scorer, shown", [("none", []), ("snapkv", [("auto", OPTIONS["page_size"])])])
def test_the_start_up_table_tells_a_period_only_where_rows_are_evicted(scorer, shown):
    asked = EngineConfig.from_options(**OPTIONS | {"kv_eviction": scorer})
    rows = option_table(asked, tiny_engine(kv_eviction=scorer))
    assert [(row["asked"], row["got"]) for row in rows if row["option"] == "kv_buffer"] == shown
