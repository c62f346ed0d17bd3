"""Head profiles: how many of its rows each KV head wants to keep, measured once for a model and a scorer.

A profile file is an NPZ of format version 1 with these entries:

    mean      float32[L, H]      share of the evictable rows (not sinks, not window) that head (layer, head) keeps
    std       float32[L, H]      its standard deviation over the samples
    samples   float32[S, L, H]   optional: the share in each sample
    meta      uint8[bytes]       JSON: format_version, model, scorer, budget (rows) or ratio (kept share of all rows),
                                 tokens (shortest and longest sample), samples (how many)

The condensed profiles published with Tangram (arXiv 2606.06302), with entries evict_mean and evict_std, are read too.
"""

import json
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pagefold.core.types import InputError

FORMAT_VERSION = 1
META = ("model", "scorer", "tokens", "samples")


@dataclass(frozen=True)
class HeadProfile:
    """Mean and standard deviation over sample prompts of each head's kept share of the evictable rows.

        mean, std   float[L, H]      mean in [0, 1], std >= 0
        meta        what was measured: see the file format
        samples     float[S, L, H]   shares in the single samples, None where they were not kept

    Raises InputError if a field is missing, or holds a value out of range.
    """

    mean: np.ndarray
    std: np.ndarray
    meta: dict
    samples: np.ndarray | None = None
    path: str = field(default="", compare=False)  # for messages

    def __post_init__(self):
        if self.mean.ndim != 2 or self.mean.shape != self.std.shape:
            raise self._error(f"mean {self.mean.shape} and std {self.std.shape} must both be (layers, heads)")
        if not ((self.mean >= 0) & (self.mean <= 1)).all():
            raise self._error(f"mean has values in [{self.mean.min()}, {self.mean.max()}], must lie in [0, 1]")
        if not ((self.std >= 0) & (self.std <= 1)).all():
            raise self._error(f"std has values in [{self.std.min()}, {self.std.max()}], must lie in [0, 1]")
        if self.samples is not None and self.samples.shape[1:] != self.mean.shape:
            raise self._error(f"samples {self.samples.shape} must be (samples, {', '.join(map(str, self.mean.shape))})")
        missing = [name for name in META if name not in self.meta]
        if missing:
            raise self._error(f"meta lacks {', '.join(missing)}")
        if "budget" not in self.meta and "ratio" not in self.meta:
            raise self._error("meta needs budget or ratio")

    def _error(self, message: str) -> InputError:
        return InputError("profile", f"{self.path}: {message}" if self.path else message)

    @classmethod
    def from_samples(cls, samples: np.ndarray, meta: dict) -> "HeadProfile":
        """A profile of measured shares float[S, L, H]; `meta["samples"]` is filled in."""
        return cls(samples.mean(0), samples.std(0), {**meta, "samples": len(samples)}, samples)

    def shares(self, alpha: float) -> np.ndarray:
        """float64[L, H]: share of the evictable rows to reserve, min(1, mean + alpha * std) (Tangram, section 4.1)."""
        return np.minimum(1.0, self.mean.astype(np.float64) + alpha * self.std)

    def require_shape(self, num_layers: int, num_heads: int) -> None:
        """Raise InputError unless the profile was measured on a model of this shape."""
        if self.mean.shape != (num_layers, num_heads):
            layers, heads = self.mean.shape
            found = f"measured on {layers} layers x {heads} KV heads ({self.meta['model']})"
            raise self._error(f"{found}, the model has {num_layers} x {num_heads}")


def save_profile(path: str | Path, profile: HeadProfile) -> None:
    """Write a profile file."""
    meta = json.dumps({**profile.meta, "format_version": FORMAT_VERSION}).encode()
    arrays: dict[str, Any] = {"meta": np.frombuffer(meta, np.uint8)}
    for name, array in (("mean", profile.mean), ("std", profile.std), ("samples", profile.samples)):
        if array is not None:
            arrays[name] = array.astype(np.float32)
    with open(path, "wb") as file:
        np.savez_compressed(file, **arrays)


def load_profile(path: str | Path) -> HeadProfile:
    """Read a profile file, ours or one of Tangram's condensed ones. Raises InputError that names what is wrong."""

    def fail(message: str) -> InputError:
        return InputError("profile", f"{path}: {message}")

    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise fail("no such file") from None
    except (OSError, EOFError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise fail(f"not an NPZ file ({error})") from None
    try:
        meta = dict(json.loads(arrays["meta"].tobytes()))
        if "evict_mean" in arrays:
            if len(meta["base_ratios"]) != 1:
                raise fail(f"holds ratios {meta['base_ratios']}, must hold one")
            return HeadProfile(arrays["evict_mean"][0], arrays["evict_std"][0], _published_meta(meta), path=str(path))
        version = meta.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise fail(f"format_version {version}, this version reads {FORMAT_VERSION}")
        return HeadProfile(arrays["mean"], arrays["std"], meta, arrays.get("samples"), str(path))
    except KeyError as error:
        raise fail(f"lacks the field {error}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, TypeError):
        raise fail("meta is not a JSON object") from None


def _published_meta(meta: dict) -> dict:
    """What our files say of a measurement, from the meta of a file published with Tangram."""
    return {
        "model": meta["model"],
        "scorer": meta["scorer"],
        "ratio": meta["base_ratios"][0],
        "tokens": meta["ctx_len"],
        "samples": meta["samples"],
        "source": f"{meta['source_repo']} {meta['source_commit']} ({meta['licence']})",
    }


def group_cells(shares: np.ndarray, heads_per_page: int, scope: str) -> np.ndarray:
    """Cut the heads into groups of `heads_per_page` with shares alike.

    shares   float[L, H]
    scope    "cross": sorted over all layers; "layer": sorted inside each layer; "adjacent": not sorted at all
    Returns int64[L * H / heads_per_page, heads_per_page]: cells layer * H + head, ascending in a group. Groups come in
    order of falling share ("layer": layer after layer); equal shares are in order of (layer, head).
    Raises InputError if `heads_per_page` does not divide the heads that are sorted together.
    """
    layers, heads = shares.shape
    together, what = (heads, "KV heads of a layer") if scope == "layer" else (layers * heads, "KV heads of all layers")
    if together % heads_per_page:
        raise InputError("heads_per_page", f"got {heads_per_page}, must divide the {together} {what}")
    if scope == "adjacent":
        cells = np.arange(layers * heads)
    elif scope == "layer":
        cells = np.argsort(-shares, axis=1, kind="stable") + heads * np.arange(layers)[:, None]
    else:
        cells = np.argsort(-shares, axis=None, kind="stable")
    return np.sort(cells.reshape(-1, heads_per_page), axis=1)


def over_allocation(shares: np.ndarray, groups: np.ndarray) -> float:
    """Part of the reserved rows that no head asked for, in [0, 1): every member gets its group's largest share."""
    members = shares.ravel()[groups]
    reserved = members.max(1).sum() * groups.shape[1]
    return 1.0 - float(members.sum() / reserved) if reserved else 0.0


def spread(shares: np.ndarray) -> dict[str, float]:
    """How unequal the heads are. float[L, H] -> figures by name.

    cv                 standard deviation / mean over all heads
    cv_within_layer    the same inside a layer, averaged over the layers
    cv_across_layers   the same of the layers' means
    near_empty         part of the heads that keep under 1 % of the evictable rows
    top_tenth          part of all kept rows that the tenth of the heads with the largest shares holds
    """
    cv = lambda x: float(x.std() / x.mean()) if x.mean() else 0.0  # noqa: E731
    largest = np.sort(shares, axis=None)[::-1]
    tenth = largest[: max(1, largest.size // 10)]
    return {
        "cv": cv(shares),
        "cv_within_layer": float(np.mean([cv(layer) for layer in shares])),
        "cv_across_layers": cv(shares.mean(1)),
        "near_empty": float((shares < 0.01).mean()),
        "top_tenth": float(tenth.sum() / largest.sum()) if largest.sum() else 0.0,
    }


def rank_stability(samples: np.ndarray) -> tuple[float, float]:
    """Spearman's rank correlation of each sample (float[S, L, H]) with the mean of all: (mean, least)."""
    flat = samples.reshape(len(samples), -1)
    mean = _ranks(flat.mean(0))
    correlations = [_correlation(_ranks(sample), mean) for sample in flat]
    return float(np.mean(correlations)), float(np.min(correlations))


def _ranks(x: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[inverse]


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation; 0 where one side is constant."""
    x, y = x - x.mean(), y - y.mean()
    scale = np.sqrt((x * x).sum() * (y * y).sum())
    return float((x * y).sum() / scale) if scale else 0.0


def profile_report(profile: HeadProfile, heads_per_page: int, alpha: float = 2.0) -> dict[str, float]:
    """What a profile is worth: figures by name.

    The figures of `spread`, of the mean; `reserve`, mean of the reserved shares over the mean of the shares; and
    `over_allocation_SCOPE` for each way of grouping that `heads_per_page` allows; with samples also
    `spearman_mean` and `spearman_min` of `rank_stability`.
    """
    shares = profile.shares(alpha)
    report = spread(profile.mean.astype(np.float64))
    report["reserve"] = float(shares.mean() / profile.mean.mean()) if profile.mean.any() else 1.0
    scopes = ["adjacent", "cross"] + (["layer"] if shares.shape[1] % heads_per_page == 0 else [])
    for scope in scopes:
        report[f"over_allocation_{scope}"] = over_allocation(shares, group_cells(shares, heads_per_page, scope))
    if profile.samples is not None:
        report["spearman_mean"], report["spearman_min"] = rank_stability(profile.samples)
    return report
