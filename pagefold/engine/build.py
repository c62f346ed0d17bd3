"""From a configuration to a running engine: the model, the stores, the tables."""

import logging
import math
from dataclasses import dataclass, replace

import torch

from pagefold.backends.base import Backend, KVView
from pagefold.backends.registry import make_backend
from pagefold.core.config import GPU_PERIOD, EngineConfig
from pagefold.core.types import InputError
from pagefold.engine.engine import Engine
from pagefold.engine.memory import describe, measure
from pagefold.engine.parts import Part, build_parts, doubtful_keys, view_in_parts
from pagefold.engine.policy import PolicyMaker, usual_folds
from pagefold.kv.bounds import KVGeometry
from pagefold.kv.layout import LAYOUTS, HeadLayout
from pagefold.kv.manager import KVManager
from pagefold.models.decoder import Decoder
from pagefold.models.sources import resolve
from pagefold.models.spec import ModelSpec
from pagefold.models.tokenizer import Tokenizer
from pagefold.models.weights import dummy_tensors, load_decoder
from pagefold.runner.device_sampler import DeviceSampler
from pagefold.runner.graphs import graph_sizes
from pagefold.runner.runner import ModelRunner
from pagefold.runner.sampling import HostSampler, StepSampler
from pagefold.store.pagestore import PageStore

logger = logging.getLogger("pagefold")

DEFAULT_KV_BYTES = 1 << 30  # on a CPU
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass
class Loaded:
    """A model in memory."""

    decoder: Decoder
    spec: ModelSpec
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]


def choose_device(backend: str) -> torch.device:
    """The first GPU for the triton backend, which "auto" is where there is one. InputError if there is none."""
    if backend == "auto" and torch.cuda.is_available() or backend == "triton":
        if not torch.cuda.is_available():
            raise InputError("backend", "got 'triton', which needs a CUDA device, and none is visible")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 where the processor multiplies it natively, else float32."""
    if name == "auto":
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        if device.type == "cuda":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float32
    return DTYPES[name]


def load_model(config: EngineConfig) -> Loaded:
    """Find the model, read its weights (or make random ones) and its tokenizer."""
    source = resolve(config.model.model)
    spec = ModelSpec.from_hf(source.config())
    device = choose_device(config.model.backend)
    dtype = choose_dtype(config.model.dtype, device)
    max_len = _max_model_len(config, spec)
    if config.model.load_format == "dummy":
        tensors = dummy_tensors(spec, config.model.seed, dtype, device)
    else:
        tensors = source.tensors()
    decoder = load_decoder(spec, tensors, dtype, max_len, device)
    tokenizer = None
    if config.model.tokenizer is not None:
        tokenizer = resolve(config.model.tokenizer).tokenizer()
    elif source.has_tokenizer:
        tokenizer = source.tokenizer()
    eos = tokenizer.eos_token_ids if tokenizer else spec.eos_token_ids
    return Loaded(decoder, spec, tokenizer, tuple(eos) or spec.eos_token_ids)


def _max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    max_model_len = config.model.max_model_len or spec.max_model_len
    if max_model_len > spec.max_context:
        raise InputError("max_model_len", f"got {max_model_len}, the model's context holds {spec.max_context}")
    return max_model_len


def build_engine(config: EngineConfig, loaded: Loaded | None = None) -> Engine:
    """Everything from the options. `loaded` reuses a model that is in memory already."""
    loaded = loaded or load_model(config)
    spec, decoder = loaded.spec, loaded.decoder
    config = for_device(config, decoder.device)
    max_model_len = _max_model_len(config, spec)
    if max_model_len > decoder.max_model_len:
        raise InputError("max_model_len", f"got {max_model_len}, the model was loaded for {decoder.max_model_len}")
    layout, parts = build_parts(config, spec, build_layout(config, spec), decoder.dtype)
    policies = PolicyMaker(config, layout)
    backend = build_backend(config, decoder.device)
    if policies.has_window:
        check_window(config.eviction.kv_window, spec.num_heads // spec.num_kv_heads, backend)
    geometry = build_geometry(config, spec, layout, parts, policies, DEFAULT_KV_BYTES)
    kv = view_in_parts(build_view(config, spec, layout, geometry, decoder, max_model_len, policies.has_window), parts)

    def stores(counts: tuple[int, ...], device: torch.device | str, mapped: bool = False) -> list[list[PageStore]]:
        return [part.stores(counts, kv.page_size, spec.head_dim, policies.state, device, mapped) for part in parts]

    def allocate(counts: tuple[int, ...]) -> None:
        for view in kv.parts:
            view.tiers = []  # first, as both do not fit
        for view, tiers in zip(kv.parts, stores(counts, decoder.device), strict=True):
            view.tiers = tiers

    budget = None
    if decoder.device.type == "cuda":
        allocate((2,) * len(geometry.num_pages))  # page 0 is all that the probe needs
        budget = measure(decoder, backend, kv, config, geometry, max_model_len)
        geometry = build_geometry(config, spec, layout, parts, policies, budget.kv_bytes)
    allocate(geometry.num_pages)
    try:
        host = stores(geometry.num_host_pages, "cpu", mapped=decoder.device.type == "cuda")
    except MemoryError as error:
        cache = config.cache
        asked = {"kv_swap_bytes": cache.kv_swap_bytes, "kv_keep_bytes": cache.kv_keep_bytes}
        field = max(asked, key=lambda name: asked[name])
        raise InputError(field, f"got {asked[field]}, which is more than this machine gives: {error}") from None
    sampler = build_sampler(spec, decoder)
    runner = ModelRunner(decoder, backend, kv, host, sampler, overlap=config.eviction.kv_lag > 0)
    if decoder.device.type == "cuda" and not config.model.enforce_eager:
        most = min(config.scheduler.max_num_seqs, config.scheduler.tokens_per_step)
        runner.capture(graph_sizes(most), max_model_len)
    if decoder.device.type == "cuda":
        runner.warm_up_swaps()
    folds = usual_folds(policies.default, geometry.page_size, max_model_len)
    if decoder.device.type == "cuda" and folds:
        runner.compressor.warm_up(folds, policies.default.score)
    logger.info("%s", describe(config, spec, geometry, parts, kv, budget))
    if doubt := doubtful_keys(spec, parts):
        logger.warning("%s", doubt)
    manager = KVManager(geometry, config.cache.enable_prefix_caching)
    return Engine(
        config, runner, manager, policies, loaded.tokenizer, spec.vocab_size, max_model_len, loaded.eos_token_ids
    )


def for_device(config: EngineConfig, device: torch.device) -> EngineConfig:
    """The configuration with what depends on the device filled in."""
    on_gpu, scheduler = device.type == "cuda", config.scheduler
    if scheduler.plan_ahead is None:
        scheduler = replace(scheduler, plan_ahead=on_gpu)
    if scheduler.max_num_batched_tokens is None and on_gpu:
        scheduler = replace(scheduler, max_num_batched_tokens=8192)
    evict, every = config.eviction, GPU_PERIOD
    if evict.kv_buffer is None:
        fits = every % config.cache.page_size == 0 and (evict.kv_prefill_buffer or every) % every == 0
        evict = replace(evict, kv_buffer=every if on_gpu and fits else config.period)
    return replace(config, scheduler=scheduler, eviction=evict)


def build_layout(config: EngineConfig, spec: ModelSpec) -> HeadLayout:
    try:
        return LAYOUTS.build(config.cache.kv_layout).build(spec.num_layers, spec.num_kv_heads)
    except (ValueError, OSError) as error:
        raise InputError("kv_layout", str(error)) from None


def check_window(window: int, per_head: int, backend: Backend) -> None:
    """Raises InputError for a window of more queries than the backend scores rows by."""
    limit = backend.max_window(per_head)
    if limit is not None and window > limit:
        raise InputError("kv_window", f"got {window}, must be at most {limit} with backend {backend.name}")


def build_backend(config: EngineConfig, device: torch.device) -> Backend:
    """The one asked for, or the fastest for the device that holds the model."""
    name = config.model.backend
    if name == "auto":
        name = "triton" if device.type == "cuda" else "cpu"
    return make_backend(name)


def build_sampler(spec: ModelSpec, decoder: Decoder) -> StepSampler:
    if decoder.device.type == "cuda":
        return DeviceSampler(spec.vocab_size, decoder.device)
    return HostSampler(spec.vocab_size)


MOST_ROWS = 2**31 - 1  # of a column of all pages: kernels count them in 32 bits


def build_geometry(
    config: EngineConfig,
    spec: ModelSpec,
    layout: HeadLayout,
    parts: list[Part],
    policies: PolicyMaker,
    default_bytes: int,
) -> KVGeometry:
    """Pages per tier from bytes (`default_bytes`, if the options name none), or as told. Page 0 of each tier is
    padding's."""
    cache = config.cache
    per_page = tuple(
        sum(part.bytes_per_page(tier, cache.page_size, spec.head_dim, policies.state) for part in parts)
        for tier in range(len(parts[0].formats))
    )
    shares = (1.0,) if len(per_page) == 1 else (1 - cache.kv_cold_share, cache.kv_cold_share)
    if cache.num_pages is not None:
        pages = tuple(math.ceil(cache.num_pages * share / shares[0]) + 1 for share in shares)
    else:
        total = cache.kv_cache_memory_bytes or default_bytes
        pages = tuple(int(total * share) // size for share, size in zip(shares, per_page, strict=True))
        if min(pages) < 2:
            need = max(math.ceil(2 * size / share) for share, size in zip(shares, per_page, strict=True))
            raise InputError("kv_cache_memory_bytes", f"got {total}, two pages a tier take {need}")
    if max(pages) * cache.page_size > MOST_ROWS:
        field = "kv_cache_memory_bytes" if cache.num_pages is None else "num_pages"
        raise InputError(
            field,
            f"makes {max(pages)} pages of {cache.page_size} rows, {MOST_ROWS} rows fit; share pages among more heads",
        )
    swapped = (
        min(p, cache.kv_swap_bytes // len(per_page) // size + 1) for p, size in zip(pages, per_page, strict=True)
    )
    kept = tuple(cache.kv_keep_bytes // len(per_page) // size for size in per_page)
    return KVGeometry(
        num_pages=pages,
        num_host_pages=tuple(map(sum, zip(swapped, kept, strict=True))),
        num_trunk_pages=kept,
        bytes_per_page=per_page,
        num_groups=layout.num_groups,
        page_size=cache.page_size,
        max_seqs=config.scheduler.max_num_seqs,
        window_slots=config.window_slots if policies.has_window else 0,
    )


def build_view(
    config: EngineConfig,
    spec: ModelSpec,
    layout: HeadLayout,
    geometry: KVGeometry,
    decoder: Decoder,
    max_model_len: int,
    has_window: bool,
) -> KVView:
    """The device side of the cache, without its stores. Slot 0, window slot 0 and page 0 are garbage rooms."""
    slots, groups = geometry.max_seqs + 1, geometry.num_groups
    width = config.eviction.kv_window if has_window else 0
    device = decoder.device
    ints = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=device)  # noqa: E731
    return KVView(
        tiers=[],
        page_table=ints(slots, groups, math.ceil(max_model_len / geometry.page_size) + 1),
        evicted=ints(slots, groups),
        cold=ints(slots, groups),
        group_of=torch.from_numpy(layout.group_of).to(device),
        column_of=torch.from_numpy(layout.column_of).to(device),
        members=torch.from_numpy(layout.members()).to(device),
        window=torch.zeros(
            (spec.num_layers, geometry.window_slots + 1, width, spec.num_heads, spec.head_dim),
            dtype=decoder.dtype,
            device=device,
        ),
        inv_freq=decoder.inv_freq,
        page_size=geometry.page_size,
        window_stride=config.eviction.kv_window_stride,
    )
