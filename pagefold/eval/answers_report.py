"""Figures of answers under folding: pass@1 with its interval, what is kept of the full cache's, who beats whom."""

import itertools
import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from pagefold.core.types import InputError
from pagefold.eval.answers import FULL, Samples, Variant
from pagefold.eval.perplexity import BLIND, LOOKS
from pagefold.eval.shown import short_name
from pagefold.eval.statistics import bootstrap, mcnemar, wilson

SURE = 0.05  # p-value below which a difference is called one


def summarise(samples: Samples, variants: Sequence[Variant], num_problems: int) -> list[dict[str, Any]]:
    """One record per variant, as JSON holds it:

    marks      {mark: [share, low, high]}, "passed" first: pass@1 and its like, with Wilson's intervals
    kept       [ratio, low, high]: problems passed, as a share of those that the full cache passes; bootstrapped over
               problems, the same ones for both; None if it passes none
    won, lost  problems that only this variant, or only the full cache, passes; p of McNemar's exact test
    rows       mean budget; held: mean rows per head at an answer's end
    tokens     of a mean answer; compactions: mean per answer
    passed     what each problem came to, 0 or 1
    """
    full = _passed(samples.of(FULL, num_problems))
    records = []
    for v in variants:
        mine = samples.of(v.name, num_problems)
        passed = _passed(mine)
        marks = [name for name, value in mine[0].items() if isinstance(value, bool)]
        won, lost = _only(passed, full)
        budgets = [s["budget"] for s in mine if s["budget"] is not None]
        records.append(
            {
                "name": v.name,
                "scorer": v.scorer,
                "share": v.share,
                "options": v.options,
                "problems": num_problems,
                "marks": {name: wilson(sum(s[name] for s in mine), num_problems) for name in marks},
                "kept": kept(passed, full),
                "won": won,
                "lost": lost,
                "p": mcnemar(won, lost),
                "rows": float(np.mean(budgets)) if budgets else None,
                "held": float(np.mean([s["rows_kept"] for s in mine])),
                "tokens": float(np.mean([s["tokens"] for s in mine])),
                "compactions": float(np.mean([s["compactions"] for s in mine])),
                "passed": passed.tolist(),
            }
        )
    return records


def _passed(samples: Sequence[dict[str, Any]]) -> np.ndarray:
    return np.array([s["passed"] for s in samples], np.int64)


def _only(mine: np.ndarray, other: np.ndarray) -> tuple[int, int]:
    """Problems that only the one, and only the other passes."""
    return int(((mine == 1) & (other == 0)).sum()), int(((mine == 0) & (other == 1)).sum())


def kept(passed: np.ndarray, full: np.ndarray) -> list[float] | None:
    """[ratio, low, high] of problems passed; None if the full cache passes none."""
    if not full.any():
        return None

    def ratio(counts: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return (counts @ passed) / (counts @ full)

    return bootstrap(ratio, len(full))


def save_json(path: Path, settings: dict[str, Any], records: Sequence[dict[str, Any]], lines: Sequence[str]) -> None:
    path.write_text(json.dumps({"settings": settings, "results": records, "verdicts": lines}, indent=1) + "\n")


def answers_table(title: str, records: Sequence[dict[str, Any]]) -> Table:
    """A row per variant; shares in per cent, with their 95 % intervals."""
    table = Table(title=title)
    table.add_column("configuration", no_wrap=True)
    extra = [name for name in records[0]["marks"] if name != "passed"]
    shares = ("pass@1, %", *(f"{name}, %" for name in extra), "kept of full, %")
    for name in ("rows", "held", *shares, "won/lost, p", "tokens"):
        table.add_column(name, justify="right")
    for r in records:
        rows = "all" if r["rows"] is None else f"{r['rows']:.0f}"
        marks = [_percent(r["marks"][name]) for name in ("passed", *extra)]
        apart = "" if r["name"] == FULL else f"{r['won']}/{r['lost']}, {r['p']:.2g}"
        against = "" if r["name"] == FULL or not r["kept"] else _percent(r["kept"])
        table.add_row(short_name(r["name"]), rows, f"{r['held']:.0f}", *marks, against, apart, f"{r['tokens']:.0f}")
    return table


def _percent(interval: Sequence[float]) -> str:
    value, low, high = (f"{100 * x:.1f}" for x in interval)
    return f"{value} [{low}, {high}]"


def verdicts(records: Sequence[dict[str, Any]]) -> list[str]:
    """By McNemar's test on the same problems: do the scorers that look at attention beat those that do not, a line per
    budget and layout; and does each layout beat the common one, a line per layout and budget?"""
    groups: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for r in (r for r in records if r["share"]):
        groups.setdefault((r["share"], " ".join(r["options"].values())), {})[r["scorer"]] = r
    lines = []
    for (share, where), here in groups.items():
        looks, blind = ([spec for spec in here if spec.partition(":")[0] in names] for names in (LOOKS, BLIND))
        parts = [_duel(*pair, here[pair[0]], here[pair[1]]) for pair in itertools.product(looks, blind)]
        if parts:
            lines.append(f"budget {share}{where and ' ' + where}: {'; '.join(parts)}")
    return [short_name(line) for line in (*lines, *_layout_verdicts(records))]


def _layout_verdicts(records: Sequence[dict[str, Any]]) -> list[str]:
    """One line per layout and budget: does it beat the common one under the same scorer, on the same problems?"""
    plain = {(r["scorer"], r["share"]): r for r in records if r["share"] and not r["options"]}
    groups: dict[tuple[str, str], list[str]] = {}
    for r in (r for r in records if r["share"] and list(r["options"]) == ["kv_layout"]):
        rival = plain[r["scorer"], r["share"]]
        part = _duel(r["scorer"], "itself", r, rival) + f" with {r['held']:.0f} rows held for {rival['held']:.0f}"
        groups.setdefault((r["options"]["kv_layout"], r["share"]), []).append(part)
    return [f"{layout} at {share}: {'; '.join(parts)}" for (layout, share), parts in groups.items()]


def _duel(name: str, rival_name: str, mine: dict[str, Any], rival: dict[str, Any]) -> str:
    won, lost = _only(*(np.array(r["passed"]) for r in (mine, rival)))
    p = mcnemar(won, lost)
    word = "ties with" if p >= SURE else "beats" if won > lost else "loses to"
    return f"{name} {word} {rival_name} ({won} won, {lost} lost, p {p:.2g})"


def draw_chart(title: str, records: Sequence[dict[str, Any]], path: Path) -> None:
    """pass@1 over the kept share of the length: a line per scorer (and layout), a level per full cache.

    Raises InputError if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("chart", "needs matplotlib: pip install 'pagefold[bench]'") from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    folded: dict[str, list[dict[str, Any]]] = {}
    for r in (r for r in records if r["share"]):
        folded.setdefault(" ".join([r["scorer"], *r["options"].values()]), []).append(r)
    for i, (name, mine) in enumerate(folded.items()):
        apart = 1.02 ** (i - (len(folded) - 1) / 2)  # for the bars' sake
        x = [float(Fraction(r["share"])) * apart for r in mine]
        value, low, high = (100 * np.array([r["marks"]["passed"] for r in mine])).T
        axes.errorbar(x, value, (value - low, high - value), fmt="o-", color=f"C{i}", capsize=2, label=short_name(name))
    for i, r in enumerate(r for r in records if not r["share"]):
        level = 100 * r["marks"]["passed"][0]
        axes.axhline(level, color=f"C{len(folded) + i}", ls="--", lw=1, label=r["name"])
    shares = {r["share"]: float(Fraction(r["share"])) for r in records if r["share"]}
    if shares:
        axes.set_xscale("log")
        axes.set_xticks(list(shares.values()), list(shares), minor=False)
        axes.minorticks_off()
    axes.set_xlabel("kept share of the length (prompt and full answer)")
    axes.set_ylabel("pass@1, % (95 % interval)")
    axes.set_ylim(-2, 102)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    axes.set_title(title, fontsize="medium")
    figure.savefig(path, dpi=150)
