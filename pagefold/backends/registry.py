"""Backends by name. Imports happen on demand, so that one backend's needs do not burden another."""

import importlib

from pagefold.backends.base import Backend

_BACKENDS = {
    "reference": "pagefold.backends.reference:Reference",
    "cpu": "pagefold.backends.cpu:CpuBackend",
}


def make_backend(name: str) -> Backend:
    """A new backend; "auto" is the fastest one for this machine."""
    path = _BACKENDS.get("cpu" if name == "auto" else name)
    if path is None:
        raise ValueError(f"backend: got {name!r}, must be auto or one of {', '.join(testable_backends())}")
    module, _, cls = path.partition(":")
    return getattr(importlib.import_module(module), cls)()


def testable_backends() -> list[str]:
    """Names of the backends that can run on this machine, the reference first."""
    return list(_BACKENDS)
