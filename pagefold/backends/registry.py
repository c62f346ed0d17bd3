"""Backends by name. Imports happen on demand, so that one backend's needs do not burden another."""

import importlib

from pagefold.backends.base import Backend

_BACKENDS = {
    "reference": "pagefold.backends.reference:Reference",
    "cpu": "pagefold.backends.cpu:CpuBackend",
    "triton": "pagefold.backends.triton.backend:TritonBackend",
}


def make_backend(name: str) -> Backend:
    path = _BACKENDS.get(name)
    if path is None:
        raise ValueError(f"backend: got {name!r}, must be one of {', '.join(_BACKENDS)}")
    module, _, cls = path.partition(":")
    return getattr(importlib.import_module(module), cls)()


def testable_backends() -> list[str]:
    """Names of the backends that take tensors in host memory, the reference first. (Kernels for a GPU take them only in
    Triton's interpreter, and have tests of their own.)"""
    return [name for name in _BACKENDS if name != "triton"]
