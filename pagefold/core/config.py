"""Configuration: nested frozen sections, parsed once from flat options that are named as on the command line.

Every leaf has one flat name (`kv_budget`, `max_num_seqs`, ...), which is its keyword in `LLM(...)` and, with dashes,
its command-line flag. An unknown option is an error that lists the known ones.
"""

import dataclasses
import math
import typing
from dataclasses import dataclass, field

from pagefold.core.types import EVICT_WHEN, InputError, check_ratio, window_lead

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
BACKENDS = ("auto", "cpu", "reference", "triton")
LOAD_FORMATS = ("auto", "dummy")
PREEMPTIONS = ("recompute", "swap")
LENDING = ("just-in-time", "for-life")


def _option(default: object, text: str, choices: tuple[str, ...] | None = None) -> typing.Any:
    return field(default=default, metadata={"help": text, "choices": choices})


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < low):
        raise InputError(name, f"got {value!r}, must be an integer >= {low}")


@dataclass(frozen=True)
class ModelConfig:
    """Which weights are served, and in what precision they are computed."""

    model: str = _option("smollm2", "built-in name, Hugging Face directory or Hub id, or a .gguf file")
    tokenizer: str | None = _option(None, "tokenizer directory, if not the model's own")
    dtype: str = _option("auto", "precision of weights and activations", DTYPES)
    load_format: str = _option("auto", "'dummy' makes random weights from the config alone", LOAD_FORMATS)
    max_model_len: int | None = _option(None, "longest sequence in tokens; default: the model's context")
    seed: int = _option(0, "seed of dummy weights and of requests that name no seed")
    backend: str = _option("auto", "who computes attention and touches page bytes; 'triton' is the GPU's", BACKENDS)
    enforce_eager: bool = _option(False, "on a GPU: never capture decode steps in CUDA graphs")


@dataclass(frozen=True)
class CacheConfig:
    """How KV rows are stored and how many of them there is room for."""

    page_size: int = _option(32, "rows per page")
    kv_format: str = _option("auto", "row format of pages: a format name, or 'k=NAME,v=NAME'")
    kv_cold_format: str | None = _option(None, "row format of the cold tier; default: no cold tier")
    kv_cold_after: int = _option(1024, "rows of a head that stay hot when older ones are cooled, in tokens")
    kv_cold_share: float = _option(0.5, "share of the KV memory that the cold tier gets")
    kv_format_skip_layers: str | None = _option(None, "layers whose rows are in kv_skip_format, such as '0,1,-1'")
    kv_skip_format: str = _option("auto", "row format of these layers, in both tiers; 'auto': the model's precision")
    kv_layout: str = _option("uniform", "head layout spec, e.g. 'clustered:profile=FILE'")
    kv_cache_memory_bytes: int | None = _option(None, "bytes of KV pages; default: 1 GiB, on a GPU what is left of it")
    gpu_memory_utilization: float = _option(0.9, "share of a GPU's memory for weights, work space and KV pages")
    num_pages: int | None = _option(None, "pages of the hot tier, instead of a size in bytes")
    enable_prefix_caching: bool = _option(True, "reuse the pages of prompts that begin alike")
    kv_swap_bytes: int = _option(
        1 << 30, "host memory for preempted requests, in bytes; with a GPU, locked at the start"
    )
    kv_keep_turns: bool | None = _option(
        None, "keep what a folded request leaves, for requests that go on from it; default: with prefix caching"
    )
    kv_keep_bytes: int = _option(
        0, "host memory for what was kept and the pool has no room for, in bytes; with a GPU, locked at the start"
    )


# Tokens between compactions on a GPU, unless asked otherwise. Each moves a whole budget of rows: at every page that
# would be a fifth of a step, and so many tokens more are a tenth of a budget of 1024.
GPU_PERIOD = 128


@dataclass(frozen=True)
class EvictionConfig:
    """Which rows are dropped, and when. `kv_eviction`, the budget and `kv_evict_when` can be set per request."""

    kv_eviction: str = _option("none", "scorer spec, e.g. 'zipage' or 'snapkv:kernel=5'; 'none' keeps every row")
    kv_budget: int = _option(1024, "rows kept per head after a compaction")
    kv_budget_ratio: float | None = _option(None, "instead: rows kept per head as a share of the request's prompt")
    kv_buffer: int | None = _option(None, "tokens between compactions; default: one page, on a GPU 128")
    kv_window: int = _option(16, "recent rows that are always kept, and recent queries that score the others")
    kv_window_stride: int = _option(1, "tokens from one of these queries to the next")
    kv_sink_tokens: int = _option(4, "first rows that are always kept")
    kv_evict_when: str = _option("always", "'always' at the budget, or only under memory 'pressure'", EVICT_WHEN)
    kv_prefill_buffer: int | None = _option(None, "fold prompts every this many tokens; default: at their end")
    kv_lag: int = _option(0, "tokens from a compaction's launch to the step that sees it")


@dataclass(frozen=True)
class SchedulerConfig:
    """Who runs in a step."""

    max_num_seqs: int = _option(256, "requests running at once")
    max_num_batched_tokens: int | None = _option(None, "tokens computed in one step; default: 2048, on a GPU 8192")
    kv_window_slots: int | None = _option(None, "query windows to lend; default: as many as are needed")
    kv_window_lending: str = _option("just-in-time", "how long a request has its query window", LENDING)
    preemption: str = _option("recompute", "how requests that evicted nothing are preempted", PREEMPTIONS)
    plan_ahead: bool | None = _option(None, "launch a step before the last one's tokens are read; default: on a GPU")

    @property
    def tokens_per_step(self) -> int:
        return self.max_num_batched_tokens or 2048


@dataclass(frozen=True)
class EngineConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    eviction: EvictionConfig = field(default_factory=EvictionConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self):
        for section in self.sections():
            for leaf in dataclasses.fields(section):
                choices, value = leaf.metadata["choices"], getattr(section, leaf.name)
                if choices and value not in choices:
                    raise InputError(leaf.name, f"got {value!r}, must be one of {', '.join(choices)}")
                if isinstance(leaf.default, bool) and not isinstance(value, bool):
                    raise InputError(leaf.name, f"got {value!r}, must be true or false")
        cache, evict, sched = self.cache, self.eviction, self.scheduler
        _at_least("page_size", cache.page_size, 1)
        if cache.page_size & (cache.page_size - 1):
            raise InputError("page_size", f"got {cache.page_size}, must be a power of two")
        for name, value, low in (
            ("max_model_len", self.model.max_model_len, 1),
            ("kv_cold_after", cache.kv_cold_after, 0),
            ("kv_cache_memory_bytes", cache.kv_cache_memory_bytes, 1),
            ("num_pages", cache.num_pages, 2),
            ("kv_swap_bytes", cache.kv_swap_bytes, 0),
            ("kv_keep_bytes", cache.kv_keep_bytes, 0),
            ("kv_budget", evict.kv_budget, 1),
            ("kv_buffer", evict.kv_buffer, 1),
            ("kv_window", evict.kv_window, 1),
            ("kv_window_stride", evict.kv_window_stride, 1),
            ("kv_sink_tokens", evict.kv_sink_tokens, 0),
            ("kv_prefill_buffer", evict.kv_prefill_buffer, 1),
            ("kv_lag", evict.kv_lag, 0),
            ("max_num_seqs", sched.max_num_seqs, 1),
            ("max_num_batched_tokens", sched.max_num_batched_tokens, 1),
            ("kv_window_slots", sched.kv_window_slots, 1),
        ):
            _at_least(name, value, low)
        if cache.kv_skip_format != "auto" and cache.kv_format_skip_layers is None:
            raise InputError("kv_skip_format", f"got {cache.kv_skip_format!r} and no kv_format_skip_layers")
        check_ratio(evict.kv_budget_ratio)
        if cache.kv_keep_turns not in (None, True, False):
            raise InputError("kv_keep_turns", f"got {cache.kv_keep_turns!r}, must be true or false")
        if cache.kv_keep_bytes and not self.keep_turns:
            raise InputError("kv_keep_bytes", f"got {cache.kv_keep_bytes}, and kv_keep_turns is off")
        if sched.plan_ahead not in (None, True, False):
            raise InputError("plan_ahead", f"got {sched.plan_ahead!r}, must be true or false")
        if not 0 < cache.kv_cold_share < 1:
            raise InputError("kv_cold_share", f"got {cache.kv_cold_share}, must lie between 0 and 1")
        share = cache.gpu_memory_utilization
        if not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise InputError("gpu_memory_utilization", f"got {share!r}, must be a number in (0, 1]")
        for name, value in (("kv_buffer", evict.kv_buffer), ("kv_prefill_buffer", evict.kv_prefill_buffer)):
            if value is not None and value % cache.page_size:
                raise InputError(name, f"got {value}, must be a multiple of page_size ({cache.page_size})")
        if evict.kv_prefill_buffer is not None and evict.kv_prefill_buffer % self.period:
            got = evict.kv_prefill_buffer
            raise InputError("kv_prefill_buffer", f"got {got}, must be a multiple of kv_buffer ({self.period})")
        # A request must not need its next window while the one before is still being read. Where the period depends on
        # the device, this is looked at again once that is known (`for_device`).
        longest = evict.kv_buffer or max(cache.page_size, GPU_PERIOD)
        if evict.kv_eviction != "none" and self.lead + evict.kv_lag > longest:
            spans = f"{evict.kv_window} queries, one every {evict.kv_window_stride} tokens, span {self.lead}"
            limit = f"with kv_lag ({evict.kv_lag}) that must be at most kv_buffer ({longest})"
            raise InputError("kv_window", f"{spans}; {limit}")
        if evict.kv_lag >= longest:
            raise InputError("kv_lag", f"got {evict.kv_lag}, must be smaller than kv_buffer ({longest})")

    def skipped_layers(self, num_layers: int) -> list[int]:
        """Layers that `kv_format_skip_layers` names, ascending. Raises InputError for others than the model has."""
        text, found = self.cache.kv_format_skip_layers, set()
        for part in (text or "").split(",") if text is not None else ():
            try:
                layer = int(part)
            except ValueError:
                layer = num_layers
            if not -num_layers <= layer < num_layers:
                limit = f"must be integers in [{-num_layers}, {num_layers}) separated by commas"
                raise InputError("kv_format_skip_layers", f"got {text!r}, {limit}")
            found.add(layer % num_layers)
        return sorted(found)

    @property
    def keep_turns(self) -> bool:
        """Folded requests leave a trunk, unless they say otherwise."""
        keep = self.cache.kv_keep_turns
        return self.cache.enable_prefix_caching if keep is None else keep

    @property
    def period(self) -> int:
        """Tokens between compactions."""
        return self.eviction.kv_buffer or self.cache.page_size

    @property
    def lead(self) -> int:
        """Tokens before a compaction from whose first one on a window is needed."""
        return window_lead(self.eviction.kv_window, self.eviction.kv_window_stride)

    @property
    def window_slots(self) -> int:
        """Windows to lend. A request holds one for lead + lag of every period's tokens, so that share of the
        running requests needs one at a time; a quarter more keeps them from queueing for it."""
        if self.scheduler.kv_window_slots:
            return self.scheduler.kv_window_slots
        most, held = self.scheduler.max_num_seqs, self.lead + self.eviction.kv_lag
        return min(most, max(4, math.ceil(1.25 * most * held / self.period)))

    def sections(self) -> tuple:
        return self.model, self.cache, self.eviction, self.scheduler

    def options(self) -> dict[str, object]:
        """All leaves as flat options."""
        return {
            leaf.name: getattr(section, leaf.name)
            for section in self.sections()
            for leaf in dataclasses.fields(section)
        }

    @classmethod
    def from_options(cls, **options: object) -> "EngineConfig":
        """Build from flat options; unknown ones are an error that lists the known."""
        sections = {}
        for part in dataclasses.fields(cls):
            section = typing.cast(type, part.type)
            names = [leaf.name for leaf in dataclasses.fields(section)]
            sections[part.name] = section(**{name: options.pop(name) for name in names if name in options})
        if options:
            known = ", ".join(sorted(leaf.name for leaf in cls.leaves()))
            raise InputError(next(iter(options)), f"unknown option; known: {known}")
        return cls(**sections)

    @classmethod
    def leaves(cls) -> list[dataclasses.Field]:
        """The leaf fields of all sections, for help texts and command-line flags."""
        return [leaf for part in dataclasses.fields(cls) for leaf in dataclasses.fields(typing.cast(type, part.type))]
