"""Language models in a fraction of the KV memory: fewer rows, uneven heads, smaller rows."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagefold.core.config import EngineConfig
    from pagefold.core.types import InputError, SamplingParams
    from pagefold.engine.llm import LLM
    from pagefold.engine.outputs import CompletionOutput, RequestOutput

__all__ = ["LLM", "CompletionOutput", "EngineConfig", "InputError", "RequestOutput", "SamplingParams"]
__version__ = "0.1.0.dev0"

_HOMES = {
    "LLM": "pagefold.engine.llm",
    "RequestOutput": "pagefold.engine.outputs",
    "CompletionOutput": "pagefold.engine.outputs",
    "SamplingParams": "pagefold.core.types",
    "InputError": "pagefold.core.types",
    "EngineConfig": "pagefold.core.config",
}


def __getattr__(name: str):
    """Public names are imported when they are first used, so that `import pagefold` pulls no torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'pagefold' has no attribute {name!r}")
