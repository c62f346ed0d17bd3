"""Kernels in Triton's interpreter, which must be chosen before they are defined: so a file of such tests starts itself
again in a process of its own, from a test of the plain run."""

import os
import subprocess
import sys

import numpy as np
import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
plain = pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")


def assert_passes_interpreted(file: str, *options: str) -> None:
    """Run the tests of a file with the interpreter on, with more options of pytest."""
    triton = pytest.importorskip("triton", reason="needs the package triton")
    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton 3.6 needs numpy < 2.4")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, *options]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(command, check=False, env=env, capture_output=True, text=True)
    assert run.returncode == 0 and "passed" in run.stdout, run.stdout[-4000:]
