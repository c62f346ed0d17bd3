"""Layers by the format of their rows: which columns of a page they have, the stores and the view of each part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pagefold.backends.base import KVView
from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError
from pagefold.kv.layout import HeadLayout, set_apart
from pagefold.models.spec import ModelSpec
from pagefold.store.format import FormatPair, Plane, parse_format
from pagefold.store.pagestore import PageStore

FORMAT_OF = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@dataclass(frozen=True)
class Part:
    """Layers whose rows have one format in each tier.

    layers    ascending
    columns   of every page: those of the layers' heads
    formats   of each tier
    """

    layers: list[int]
    columns: slice
    formats: list[FormatPair]

    @property
    def num_columns(self) -> int:
        return self.columns.stop - self.columns.start

    def bytes_per_page(self, tier: int, page_size: int, head_dim: int, state: dict[str, Plane]) -> int:
        return PageStore.bytes_per_page(self.formats[tier], self.num_columns, page_size, head_dim, state)

    def stores(
        self,
        counts: Sequence[int],
        page_size: int,
        head_dim: int,
        state: dict[str, Plane],
        device: torch.device | str,
        mapped: bool = False,
    ) -> list[PageStore]:
        """A store of so many pages for each tier."""
        return [
            PageStore(fmt, pages, self.num_columns, page_size, head_dim, state, device, mapped)
            for fmt, pages in zip(self.formats, counts, strict=True)
        ]


def build_parts(
    config: EngineConfig, spec: ModelSpec, layout: HeadLayout, dtype: torch.dtype
) -> tuple[HeadLayout, list[Part]]:
    """The layout with the skipped layers set apart, and its parts: of all other layers, and of these if there are any.

    Raises InputError for a format that is unknown, and for layers that are, or that the layout cannot set apart.
    """
    cache, width = config.cache, layout.heads_per_page
    names = [cache.kv_format] if cache.kv_cold_format is None else [cache.kv_format, cache.kv_cold_format]
    formats = [_format(field, name, dtype) for field, name in zip(("kv_format", "kv_cold_format"), names, strict=False)]
    skipped = config.skipped_layers(spec.num_layers)
    if not skipped:
        return layout, [Part(list(range(spec.num_layers)), slice(0, width), formats)]
    others = [layer for layer in range(spec.num_layers) if layer not in skipped]
    if not others:
        raise InputError("kv_format_skip_layers", "names every layer: give kv_format instead")
    try:
        layout = set_apart(layout, skipped)
    except ValueError as error:
        raise InputError("kv_format_skip_layers", str(error)) from None
    first = width - len(skipped) * spec.num_kv_heads // layout.num_groups
    skip = [_format("kv_skip_format", cache.kv_skip_format, dtype)] * len(formats)
    return layout, [Part(others, slice(0, first), formats), Part(skipped, slice(first, width), skip)]


def _format(field: str, name: str, dtype: torch.dtype) -> FormatPair:
    """ "auto" stores rows in the model's own precision."""
    try:
        return parse_format(FORMAT_OF[dtype] if name == "auto" else name)
    except ValueError as error:
        raise InputError(field, str(error)) from None


NARROW = 4  # bits of a channel


def doubtful_keys(spec: ModelSpec, parts: Sequence[Part]) -> str | None:
    """What to say of keys of 4 bits or less in a model that adds a bias to them; None if there is nothing to say.

    The bias makes channels so wide that the rotation spreads them over all codes: Qwen2.5-Coder-0.5B's perplexity goes
    from 64 to 261 with int4 rows, and to 64.6 with 8-bit keys and 4-bit values.
    """
    bits = lambda pair: 8 * pair.k.planes(spec.head_dim)[0].bytes_per_row / spec.head_dim  # noqa: E731
    names = {pair.name for part in parts for pair in part.formats if bits(pair) <= NARROW}
    if not spec.qkv_bias or not names:
        return None
    return (
        f"kv_format: keys in {' and '.join(sorted(names))} lose much in models whose keys have a bias, as this one's; "
        "k=int8,v=int4 loses little"
    )


def formats_of(parts: Sequence[Part], tier: int) -> str:
    """In words: "int4", or "int4, layers 0, 1 in bf16"."""
    names = [part.formats[tier].name for part in parts]
    if len(parts) == 1:
        return names[0]
    return f"{names[0]}, layers {', '.join(map(str, parts[1].layers))} in {names[1]}"


def view_in_parts(whole: KVView, parts: Sequence[Part]) -> KVView:
    """Views of the parts of a cache, given the view of all columns; without stores. What is not theirs they share."""
    if len(parts) == 1:
        return whole
    views = [
        replace(
            whole,
            tiers=[],
            column_of=(whole.column_of - part.columns.start).clamp(min=0),
            members=whole.members[:, part.columns].contiguous(),
        )
        for part in parts
    ]
    return replace(views[0], apart=views[1], layers_apart=frozenset(parts[1].layers))
