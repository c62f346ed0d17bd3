"""Perplexity of a text, and divergence from the full cache, for row formats and for scorers at several budgets.

Every configuration reads the same windows by teacher forcing (see `teacher`) and is compared token by token with the
baseline: all rows kept, stored in the engine's own precision. Confidence intervals are 95 % percentile intervals of a
bootstrap over blocks of consecutive tokens, for neighbouring tokens are not independent.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from tqdm import tqdm

from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError
from pagefold.engine.build import Loaded
from pagefold.eval.answers import check_engines
from pagefold.eval.statistics import bootstrap
from pagefold.eval.teacher import Comparison, Teacher, compare
from pagefold.eval.texts import cut_windows, parse_share, share_rows

BLOCK_TOKENS = 128
BASELINE = "full"
LOOKS = ("zipage", "snapkv")  # scorers that look at attention ...
BLIND = ("random", "recency")  # ... and those that do not, which they have to beat


@dataclass(frozen=True)
class Variant:
    """One configuration under test.

    name      as it is shown
    options   engine options on top of the common ones
    share     part of the window that is kept, "" where nothing is evicted
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    share: str = ""


def make_variants(
    formats: Iterable[str],
    scorers: Iterable[str],
    shares: Iterable[str],
    window: int,
    page_size: int,
    buffer: int,
    layouts: Iterable[str] = (),
) -> list[Variant]:
    """The baseline, each format with all rows kept, and each scorer at each budget, folding every `buffer` tokens, in
    the common head layout and in each of `layouts`."""
    variants = [Variant(BASELINE)]
    variants += [Variant(f"{BASELINE} {fmt}", {"kv_format": fmt}) for fmt in formats]
    folded = []
    for share in shares:
        rows = share_rows(window, parse_share(share, "budgets"), page_size)
        for scorer in scorers:
            options = {"kv_eviction": scorer, "kv_budget": rows, "kv_buffer": buffer, "kv_prefill_buffer": buffer}
            folded.append(Variant(f"{scorer} {share}", options, share))
    variants += folded
    for layout in layouts:
        variants += [Variant(f"{v.name} {layout}", {**v.options, "kv_layout": layout}, v.share) for v in folded]
    return variants


def run_perplexity(
    loaded: Loaded,
    options: dict[str, Any],
    ids: Sequence[int],
    window: int,
    variants: Sequence[Variant],
    path: Path | None = None,
    use_tqdm: bool = True,
) -> list[dict[str, Any]]:
    """Measure each variant. Returns one record per variant, in order; see `summarise` for the figures.

    options   engine options common to all, `model` included
    ids       the text
    path      JSON file to which every record is saved as it is finished, and from which those with equal settings
              are taken instead of being measured again
    """
    bos = loaded.tokenizer.encode("") if loaded.tokenizer else []
    windows = cut_windows(ids, window, bos)
    if not windows:
        raise InputError("tokens", f"got {len(ids)} tokens of text, at least 2 are needed")
    check_engines(loaded, ({**options, **variant.options} for variant in variants))
    dtype = str(loaded.decoder.dtype).removeprefix("torch.")
    text = hashlib.sha256(np.array(ids, np.int64).tobytes()).hexdigest()[:16]
    known = load_records(path)
    records: list[dict[str, Any]] = []
    full: list[Tensor] | None = None
    for variant in tqdm(variants, desc="configurations", disable=not use_tqdm, dynamic_ncols=True):
        settings = {**options, "dtype": dtype, **variant.options, "text": text, "tokens": len(ids), "window": window}
        record = next((r for r in known if r["name"] == variant.name and r["settings"] == settings), None)
        if record is None:
            full = full or _read(loaded, options, windows, BASELINE, use_tqdm)
            tested = full if variant.name == BASELINE else None
            tested = tested or _read(loaded, {**options, **variant.options}, windows, variant.name, use_tqdm)
            rows = [compare(loaded.decoder, *both, w) for *both, w in zip(full, tested, windows, strict=True)]
            record = {"name": variant.name, "share": variant.share, "settings": settings, **summarise(rows)}
            known = [r for r in known if r["name"] != variant.name] + [record]
            save_records(path, known)
        records.append(record)
    return records


def _read(loaded: Loaded, options: dict, windows: list[list[int]], name: str, use_tqdm: bool) -> list[Tensor]:
    common = {"max_num_seqs": 16, "kv_window_slots": 16, "enable_prefix_caching": False}
    teacher = Teacher(loaded, EngineConfig.from_options(**common | options))
    total = sum(map(len, windows))
    with tqdm(total=total, desc=name, unit="tok", leave=False, disable=not use_tqdm, dynamic_ncols=True) as bar:
        return teacher.read(windows, lambda num_tokens: bar.update(num_tokens - bar.n))


def load_records(path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    try:
        return json.loads(path.read_text())["results"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError("json", f"{path} holds no results of this command ({error!r})") from None


def save_records(path: Path | None, records: list[dict[str, Any]]) -> None:
    """Written beside the file and moved over it, so that an interruption loses nothing."""
    if path is not None:
        draft = path.with_name(path.name + ".part")
        draft.write_text(json.dumps({"results": records}, indent=1) + "\n")
        os.replace(draft, path)


# Figures


def summarise(windows: Sequence[Comparison]) -> dict[str, Any]:
    """The figures of one configuration, as JSON holds them.

    overall, last_half   over all tokens, and over those in the second half of their window:
        tokens           how many were predicted
        perplexity, kl, kl_p99, agree   value with its interval [low, high]; kl in nats, kl_p99 its 99th percentile,
                         agree the share of tokens for which both caches rank the same token first
    blocks               {tokens, kl}: sums over blocks of the second halves, for paired comparisons
    """
    halves = _blocks([Comparison(*(x[len(x) // 2 :] for x in (w.nll, w.kl, w.agree))) for w in windows])
    sums = {"tokens": [len(b.kl) for b in halves], "kl": [float(b.kl.sum(dtype=np.float64)) for b in halves]}
    return {"overall": _figures(_blocks(windows)), "last_half": _figures(halves), "blocks": sums}


def _blocks(windows: Sequence[Comparison]) -> list[Comparison]:
    """Cut windows into about equal blocks of about `BLOCK_TOKENS` tokens."""
    blocks = []
    for w in windows:
        num = max(1, round(len(w.kl) / BLOCK_TOKENS))
        parts = zip(*(np.array_split(x, num) for x in (w.nll, w.kl, w.agree)), strict=True)
        blocks += [Comparison(*part) for part in parts]
    return blocks


def _figures(blocks: list[Comparison]) -> dict[str, Any]:
    sizes = np.array([len(b.kl) for b in blocks])
    figures: dict[str, Any] = {"tokens": int(sizes.sum())}
    for name, values, final in (
        ("perplexity", [b.nll for b in blocks], np.exp),
        ("kl", [b.kl for b in blocks], np.asarray),
        ("agree", [b.agree for b in blocks], np.asarray),
    ):
        sums = np.array([v.sum(dtype=np.float64) for v in values])
        figures[name] = bootstrap(lambda n, sums=sums, final=final: final((n @ sums) / (n @ sizes)), len(blocks))
    kl, block_of = np.concatenate([b.kl for b in blocks]), np.repeat(np.arange(len(blocks)), sizes)
    p99 = lambda counts: np.array([np.quantile(np.repeat(kl, n[block_of]), 0.99) for n in counts])  # noqa: E731
    figures["kl_p99"] = bootstrap(p99, len(blocks))
    return figures


def paired_gain(record: dict[str, Any], rival: dict[str, Any]) -> list[float]:
    """How much less KL a configuration has than its rival, in nats per token of the second halves: [mean, low, high].

    The same blocks are drawn for both, so what a block has in common for the two cancels out.
    """
    tokens = np.array(record["blocks"]["tokens"])
    gain = np.array(rival["blocks"]["kl"]) - np.array(record["blocks"]["kl"])
    return bootstrap(lambda n: (n @ gain) / (n @ tokens), len(tokens))


def verdicts(records: Sequence[dict[str, Any]]) -> list[str]:
    """A line per budget and layout: do the scorers that look at attention beat random and recency, beyond the interval?
    And a line per layout and budget: does it beat the layout that the budget's first record has?"""
    groups: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for r in (r for r in records if r["share"]):
        groups.setdefault((r["share"], _layout(r)), {})[r["settings"]["kv_eviction"]] = r
    lines, against, first = [], [], {}
    for (share, layout), here in groups.items():
        looks, blind = ([spec for spec in here if spec.partition(":")[0] in names] for names in (LOOKS, BLIND))
        parts = [_duel(*pair, here[pair[0]], here[pair[1]]) for pair in itertools.product(looks, blind)]
        where = f" in {layout}" if (common := first.setdefault(share, here)) is not here else ""
        if parts:
            clear = "yes" if all(" beats " in part for part in parts) else "no"
            rows = next(iter(here.values()))["settings"]["kv_budget"]
            question = f"do {' and '.join(looks)} beat {' and '.join(blind)}?"
            lines.append(f"budget {share} ({rows} rows){where}: {question} {clear}: {'; '.join(parts)}")
        if where:
            parts = [_duel(spec, "itself", r, common[spec]) for spec, r in here.items()]
            against.append(f"{layout} at {share}, against {_layout(next(iter(common.values())))}: {'; '.join(parts)}")
    return lines + against


def _layout(record: dict[str, Any]) -> str:
    return record["settings"].get("kv_layout", "uniform")


def _duel(name: str, rival_name: str, record: dict[str, Any], rival: dict[str, Any]) -> str:
    mean, low, high = paired_gain(record, rival)
    word = "beats" if low > 0 else "loses to" if high < 0 else "ties with"
    return f"{name} {word} {rival_name} ({mean:+.4f} nats [{low:+.4f}, {high:+.4f}])"
