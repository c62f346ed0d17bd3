"""What an import costs: names must be cheap, and integers must not drag tensors in."""

import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "pagefold",
        "pagefold.core.config",
        "pagefold.core.registry",
        "pagefold.core.types",
        "pagefold.kv.layout",
        "pagefold.kv.manager",
        "pagefold.engine.scheduler",
        "pagefold.cli",
    ],
)
def test_importing_pulls_no_heavy_library(module):
    """`pagefold --help`, the scheduler and its tests never wait for torch."""
    assert find_spec(module), f"{module} is gone"
    code = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'transformers', 'triton', 'matplotlib', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'imported: {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
