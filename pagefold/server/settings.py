"""How the HTTP front serves: addresses, keys, limits. The engine's options are `EngineConfig`'s."""

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError

API_KEY_VARIABLE = "PAGEFOLD_API_KEY"
REASONING_PARSERS = ("qwen3", "deepseek_r1", "none")
TOOL_PARSERS = ("hermes", "llama3_json", "deepseek_v3", "deepseek_v31")
GENERATION_CONFIGS = ("auto", "none")


def _option(default: Any, text: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class ServerSettings:
    """Each field has one flat name: with dashes, its flag of `pagefold serve`; as it is, its key in the config file."""

    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = _option(8000, "port to listen on")
    api_key: tuple[str, ...] = _option((), f"key that clients must send; may be repeated; also ${API_KEY_VARIABLE}")
    served_model_name: tuple[str, ...] = _option((), "name in the API; may be repeated; default: the model as given")
    chat_template: str | None = _option(None, "file with a Jinja chat template, instead of the model's own")
    generation_config: str = _option(
        "auto", "sampling defaults: 'auto' takes the model's generation_config.json", GENERATION_CONFIGS
    )
    enable_auto_tool_choice: bool = _option(False, "let the model decide when tools are called (tool_choice 'auto')")
    tool_call_parser: str | None = _option(
        None, "how tool calls are read out of the text; default: as the chat template shows them", TOOL_PARSERS
    )
    reasoning_parser: str | None = _option(
        None, "how reasoning is told from the answer; default: by the chat template", REASONING_PARSERS
    )
    max_queue: int = _option(1024, "requests that may wait or run at once; one more is answered with 429")
    max_request_bytes: int = _option(16 << 20, "largest body of a request; a larger one is answered with 413")
    drain_timeout: float = _option(30.0, "seconds that running requests get to finish when the server is told to end")
    metrics_prefix: str = _option("pagefold", "prefix of metric names; 'vllm' for dashboards made for it")
    allowed_origins: tuple[str, ...] = _option((), "web origin that may call the API (CORS); may be repeated")
    root_path: str = _option("", "path that a proxy in front strips from addresses")
    disable_log_requests: bool = _option(False, "log no line per request")
    disable_ui: bool = _option(False, "do not serve the page at /ui")
    log_level: str = _option("info", "least severe messages to print", ("debug", "info", "warning", "error"))
    log_json: bool = _option(False, "print messages as JSON, one object a line")

    def __post_init__(self):
        for leaf in dataclasses.fields(self):
            self._check(leaf, getattr(self, leaf.name))
        for name, low, high in (("port", 0, 65535), ("max_queue", 1, None), ("max_request_bytes", 1, None)):
            value = getattr(self, name)
            if value < low or (high is not None and value > high):
                limit = f">= {low}" if high is None else f"in [{low}, {high}]"
                raise InputError(name, f"got {value}, must be an integer {limit}")
        if not 0 <= self.drain_timeout < math.inf:
            raise InputError("drain_timeout", f"got {self.drain_timeout}, must be a number of seconds >= 0")
        if not all(self.api_key):
            raise InputError("api_key", "got an empty key, must be text that clients can send")
        if not self.metrics_prefix.isidentifier():
            raise InputError("metrics_prefix", f"got {self.metrics_prefix!r}, must be letters, digits and _")
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            raise InputError("chat_template", f"got {self.chat_template!r}, which is no file")

    def _check(self, leaf: dataclasses.Field, value: Any) -> None:
        """Config files can hold anything. Lists, and one value for a list, become tuples."""
        if isinstance(leaf.default, tuple):
            value = (value,) if isinstance(value, str) else value
            if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
                raise InputError(leaf.name, f"got {value!r}, must be text or a list of texts")
            object.__setattr__(self, leaf.name, tuple(value))  # frozen, normalised once
            return
        kind = str if leaf.default is None else type(leaf.default)
        words = {str: "text", bool: "true or false", int: "an integer", float: "a number"}[kind]
        fits = type(value) is kind or (kind is float and type(value) is int) or (value is None is leaf.default)
        if not fits:
            raise InputError(leaf.name, f"got {value!r}, must be {words}")
        if leaf.metadata["choices"] and value is not None and value not in leaf.metadata["choices"]:
            raise InputError(leaf.name, f"got {value!r}, must be one of {', '.join(leaf.metadata['choices'])}")


def parse_options(flags: Mapping[str, Any], file: str | None = None) -> tuple[ServerSettings, EngineConfig]:
    """Settings and engine options from a config file and from flags, which win.

    flags   by field name, only those that were given
    file    YAML or JSON with the same names, dashes or underscores

    Raises InputError for an unknown name or a bad value. Keys of the environment count beside those given.
    """
    options = (read_config(file) if file else {}) | dict(flags)
    names = [leaf.name for leaf in dataclasses.fields(ServerSettings)]
    mine = {name: options.pop(name) for name in names if name in options}
    engine = {leaf.name for leaf in EngineConfig.leaves()}
    if unknown := sorted(set(options) - engine):
        raise InputError(unknown[0], f"unknown option; known: {', '.join(sorted([*engine, *names]))}")
    settings, config = ServerSettings(**mine), EngineConfig.from_options(**options)
    if extra := os.environ.get(API_KEY_VARIABLE):
        settings = dataclasses.replace(settings, api_key=(*settings.api_key, extra))
    return settings, config


def read_config(path: str) -> dict[str, Any]:
    """Options out of a YAML or JSON file (which is YAML), by field name."""
    import yaml

    try:
        options = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError("config", f"{path} cannot be read: {error}") from None
    if options is None:
        return {}
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise InputError("config", f"{path} must hold option names and their values")
    return {name.replace("-", "_"): value for name, value in options.items()}
