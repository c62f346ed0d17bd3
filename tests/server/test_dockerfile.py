"""The Dockerfile is of one piece with the command line, the routes and the files that it names."""

import json
import re
from pathlib import Path

import pytest

from pagefold.cli import build_parser

ROOT = Path(__file__).parents[2]


def instructions() -> list[tuple[str, str]]:
    """(instruction, its arguments) of all stages, comments and line breaks gone."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]  # type: ignore[misc]


def last(name: str) -> str:
    return [text for instruction, text in instructions() if instruction == name][-1]


def test_the_server_does_not_run_as_root():
    users = [text for name, text in instructions() if name == "USER"]
    assert users and users[-1] not in ("root", "0")
    assert f"useradd --uid {users[-1]}" in last("RUN")


def test_the_entry_point_is_a_command_that_exists():
    program, *arguments = json.loads(last("ENTRYPOINT"))
    assert program == "pagefold"
    args = build_parser().parse_args([*arguments, "some/model", "--kv-eviction", "zipage"])
    assert (args.host, args.model) == ("0.0.0.0", "some/model")
    assert str(args.port) == last("EXPOSE")


def test_health_is_asked_for_where_it_is_answered():
    check = last("HEALTHCHECK")
    (port, path) = re.search(r"127\.0\.0\.1:(\d+)(/\w+)", check).groups()  # type: ignore[union-attr]
    assert port == last("EXPOSE")
    pytest.importorskip("fastapi")
    from pagefold.server.limits import OPEN_PATHS

    assert path in OPEN_PATHS, "it must be answered without a key"
    compile(json.loads(check[check.index("[") :])[2], "HEALTHCHECK", "exec")


def test_what_is_kept_between_runs_is_in_the_volume():
    volume = last("VOLUME")
    kept = dict(re.findall(r"(\w+(?:_HOME|_DIR))=(\S+)", last("ENV")))
    assert {"XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR"} <= kept.keys()
    assert all(path.split("/")[1] == volume.strip("/") for path in kept.values())


def test_what_is_copied_is_there_and_reaches_the_builder():
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [text.split()[:-1] for name, text in instructions() if name == "COPY" and "--from" not in text]
    assert sorted(sum(copied, [])) == sorted(allowed) == sorted(name for name in allowed if (ROOT / name).exists())
