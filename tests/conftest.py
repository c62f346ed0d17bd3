"""What every test shares: one thread per worker, fixed seeds, small hypothesis budgets, the built-in model."""

import os
import random
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

hypothesis.settings.register_profile(
    "default", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("default")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


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


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Path of the built-in model's GGUF file; mark the test `smollm2`. `make` has put it into the cache."""
    from pagefold.models.sources import resolve

    return resolve("smollm2").path
