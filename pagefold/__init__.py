"""Language models in a fraction of the KV memory: fewer rows, uneven heads, smaller rows."""

import importlib

_PUBLIC = {
    "LLM": "pagefold.engine.llm",
    "RequestOutput": "pagefold.engine.outputs",
    "CompletionOutput": "pagefold.engine.outputs",
    "SamplingParams": "pagefold.core.types",
    "InputError": "pagefold.core.types",
    "EngineConfig": "pagefold.core.config",
}
__all__ = ["LLM", "CompletionOutput", "EngineConfig", "InputError", "RequestOutput", "SamplingParams"]  # noqa: F822
__version__ = "0.1.0.dev0"


def __getattr__(name: str):
    """Public names are imported when they are first used, so that `import pagefold` pulls no torch."""
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'pagefold' has no attribute {name!r}")
