"""`pagefold inspect`: what a model is and how much KV fits, from its config alone; no weights are read."""

import math

from rich.console import Console

from pagefold.core.config import EngineConfig
from pagefold.engine.build import (
    DEFAULT_KV_BYTES,
    build_geometry,
    build_layout,
    choose_device,
    choose_dtype,
)
from pagefold.engine.parts import Part, build_parts, formats_of
from pagefold.engine.policy import PolicyMaker
from pagefold.evict.scorer import SCORERS
from pagefold.kv.bounds import KVGeometry, peak_pages
from pagefold.kv.layout import LAYOUTS, HeadLayout
from pagefold.kv.state import FoldPolicy
from pagefold.models.sources import ModelSource, resolve
from pagefold.models.spec import ModelSpec
from pagefold.models.weights import tensor_shapes
from pagefold.store.format import FORMATS

TIERS = ("hot", "cold")


def print_inspection(config: EngineConfig) -> None:
    """Print the model, the bytes of a row, a token and a page, what fits in pages and in tokens, and the plug-ins."""
    source = resolve(config.model.model)
    spec, dtype = (
        ModelSpec.from_hf(source.config()),
        choose_dtype(config.model.dtype, choose_device(config.model.backend)),
    )
    layout, parts = build_parts(config, spec, build_layout(config, spec), dtype)
    policies = PolicyMaker(config, layout)
    geometry = build_geometry(config, spec, layout, parts, policies, DEFAULT_KV_BYTES)
    console = Console(highlight=False, soft_wrap=True)
    _print_facts(console, f"Model {source.name}", _model_facts(source, spec, str(dtype).removeprefix("torch.")))
    _print_facts(console, "KV rows and pages", _page_facts(config, layout, parts, geometry))
    _print_facts(console, "What fits", _capacity_facts(config, spec, geometry, policies.default))
    _print_facts(console, "Plug-ins, with their options", _plugin_facts())


def _print_facts(console: Console, title: str, facts: dict[str, str]) -> None:
    console.print(f"[bold]{title}[/bold]")
    for name, text in facts.items():
        console.print(f"  {name:<22} {text}", markup=False)


def _model_facts(source: ModelSource, spec: ModelSpec, dtype: str) -> dict[str, str]:
    shapes = tensor_shapes(spec)
    if spec.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return {
        "source": f"{source.kind}, {source.path}",
        "family": spec.family,
        "layers": f"{spec.num_layers}",
        "heads": f"{spec.num_heads} for queries, {spec.num_kv_heads} for keys and values, of {spec.head_dim} channels",
        "hidden size": f"{spec.hidden_size}, {spec.intermediate_size} in the MLP",
        "vocabulary": f"{spec.vocab_size} tokens",
        "context": f"{spec.max_model_len} tokens",
        "parameters": f"{sum(map(math.prod, shapes.values())) / 1e6:.1f} million",
        "dtype": f"{dtype} (published in {spec.dtype})",
    }


def _page_facts(config: EngineConfig, layout: HeadLayout, parts: list[Part], geometry: KVGeometry) -> dict[str, str]:
    size, heads = config.cache.page_size, layout.heads_per_page
    facts = {
        "layout": f"{config.cache.kv_layout}: {layout.num_groups} group(s) of {heads} heads, {size} rows a page",
    }
    for i, (tier, page_bytes) in enumerate(zip(TIERS, geometry.bytes_per_page, strict=False)):
        token = page_bytes * layout.num_groups // size
        row = f"{page_bytes / size / heads:g} (K and V of one token for one head, scales and scorer state included"
        facts |= {
            f"{tier} format": formats_of(parts, i),
            f"{tier} bytes per row": f"{row}; the mean of all layers)" if len(parts) > 1 else f"{row})",
            f"{tier} bytes per token": f"{token} (all heads of all layers)",
            f"{tier} bytes per page": f"{page_bytes}",
        }
    return facts


def _capacity_facts(config: EngineConfig, spec: ModelSpec, geometry: KVGeometry, policy: FoldPolicy) -> dict[str, str]:
    context = config.model.max_model_len or spec.max_model_len
    facts = {
        f"{tier} pages": f"{pages - 1} ({(pages - 1) * page_bytes / 1e6:.1f} MB)"
        for tier, pages, page_bytes in zip(TIERS, geometry.num_pages, geometry.bytes_per_page, strict=False)
    }
    hot_tokens = (geometry.num_pages[0] - 1) // geometry.num_groups * geometry.page_size
    facts["tokens, none evicted"] = f"{hot_tokens} in hot pages, over all requests"
    peaks = peak_pages(policy, geometry.page_size, 1, context)
    at_once = min((pages - 1) // peak for pages, peak in zip(geometry.num_pages, peaks, strict=False) if peak)
    held = " and ".join(f"{peak} {tier}" for tier, peak in zip(TIERS, peaks, strict=True) if peak)
    facts[f"requests of {context}"] = f"{at_once} at once: each holds up to {held} pages after a short prompt"
    if policy.evicts:
        facts["folding"] = f"{config.eviction.kv_eviction} to {config.eviction.kv_budget} rows a head"
    return facts


def _plugin_facts() -> dict[str, str]:
    facts = {}
    for registry in (SCORERS, LAYOUTS, FORMATS):
        for name in registry.names():
            options = ", ".join(f"{key}={value!r}" for key, value in registry.options(name).items())
            facts[f"{registry.kind} {name}"] = options
    return facts
