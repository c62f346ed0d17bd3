"""What every test shares: one thread per worker, fixed seeds, small hypothesis budgets, the built-in model, and the
examples of the documents as plug-ins."""

import importlib.metadata
import os
import random
import re
import sys
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

from pagefold.core.registry import Registry
from tests.interpreted import INTERPRETED

DOCS = Path(__file__).parents[1] / "docs"

hypothesis.settings.register_profile(
    "default", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("default")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

if INTERPRETED and importlib.metadata.version("triton").startswith("3.6."):
    import interpreter

    interpreter.hurry()


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # keywords hold the name of the folder, too
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def seeds():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def small_device(monkeypatch):
    """Programs that a device runs at once are interpreted one after the other."""
    if INTERPRETED:
        from pagefold.backends.triton import plan

        monkeypatch.setattr(plan, "multiprocessors", lambda: 4)


@pytest.fixture
def drop_in(tmp_path, monkeypatch):
    """Save a page's example under the name the page gives it, in a folder that the registry takes for its own."""

    def drop(page: str, registry: Registry) -> str:
        text = (DOCS / page).read_text()
        (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        (folder, name) = re.findall(r"`(pagefold/[\w/]+)/(\w+)\.py`:", text)[-1]
        assert folder.replace("/", ".") == registry.package
        assert name not in registry.names(), f"{page} shows {name}, which is built in"
        (tmp_path / f"{name}.py").write_text(code)
        package = importlib.import_module(registry.package)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
        monkeypatch.setattr(registry, "_items", dict(registry._items))
        monkeypatch.setattr(registry, "_loaded", False)
        dropped.append(f"{registry.package}.{name}")
        assert name in registry.names()
        return name

    dropped: list[str] = []
    yield drop
    for module in dropped:
        sys.modules.pop(module, None)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Path of the built-in model's GGUF file; mark the test `smollm2`. `make` has put it into the cache."""
    from pagefold.models.sources import resolve

    return resolve("smollm2").path
