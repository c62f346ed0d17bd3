"""Charts of what engines did and held."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagefold.bench.measure import Sample

COLORS = ("#4d4d4d", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")  # told apart by colour-blind readers too


def timeline_chart(
    path: str | Path, title: str, timelines: Mapping[str, Sequence[Sample]], num_pages: Mapping[str, int]
) -> None:
    """Write a picture of two panels over time: requests running, and the share of the pool that is held.

    timelines   {run: its samples, one a step}
    num_pages   {run: pages in its pool}
    Needs matplotlib; raises ImportError without it.
    """
    pyplot = _pyplot()
    figure, (requests, pool) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 6.5), layout="constrained")
    for (name, timeline), color in zip(timelines.items(), COLORS, strict=False):
        seconds = [0.0, *(sample.seconds for sample in timeline)]
        running = [sample.running for sample in timeline]
        used = [100 * sample.pages / num_pages[name] for sample in timeline]
        style = {"where": "pre", "color": color, "linewidth": 1.6}
        requests.step(seconds, [running[0], *running], label=name, **style)
        pool.step(seconds, [used[0], *used], label=name, **style)
    requests.set_ylabel("requests running")
    pool.set_ylabel("pool held, %")
    pool.set_xlabel("seconds")
    pool.set_ylim(0, 105)
    requests.set_ylim(bottom=0)
    for axes in (requests, pool):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(left=0)
    requests.legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def bar_chart(path: str | Path, title: str, what: str, bars: Mapping[str, float], notes: Sequence[str]) -> None:
    """Write a picture of one bar for each name, the first on top.

    what    what the bars measure
    notes   what stands beside each of them
    Needs matplotlib; raises ImportError without it.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.42 * len(bars)), layout="constrained")
    drawn = axes.barh(list(bars), list(bars.values()), color=[COLORS[0], *[COLORS[1]] * (len(bars) - 1)])
    axes.bar_label(drawn, labels=list(notes), padding=4)
    axes.invert_yaxis()
    axes.set_xlabel(what)
    axes.set_xlim(0, 1.2 * max(bars.values(), default=1))
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def lines_chart(
    path: str | Path, title: str, along: str, panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]
) -> None:
    """Write a picture of panels side by side over a logarithmic axis.

    along    what that axis is
    panels   {what is shown: {line: its points, of at least one}}
    Needs matplotlib; raises ImportError without it.
    """
    pyplot = _pyplot()
    figure, all_axes = pyplot.subplots(1, len(panels), figsize=(5.5 * len(panels), 4.2), layout="constrained")
    for axes, (what, lines) in zip(all_axes, panels.items(), strict=True):
        for (name, points), color in zip(lines.items(), COLORS, strict=False):
            axes.plot(*zip(*points, strict=True), "o-", label=name, color=color, linewidth=1.6)
        axes.set_xscale("log", base=2)
        ticks = sorted({at for points in lines.values() for at, _ in points})
        axes.set_xticks(ticks, [f"{tick}" for tick in ticks])
        axes.set_xlabel(along)
        axes.set_ylabel(what)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def rounds_chart(
    path: str | Path, title: str, ttft_s: Mapping[str, Sequence[float]], total_s: Mapping[str, float]
) -> None:
    """Write a picture of two panels: the median time to first token by round, and the total time, of each engine.

    ttft_s    {engine: seconds, one a round}
    total_s   {engine: seconds}
    Needs matplotlib; raises ImportError without it.
    """
    pyplot = _pyplot()
    figure, (rounds, total) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    width = 0.8 / max(1, len(ttft_s))
    for i, (name, seconds) in enumerate(ttft_s.items()):
        color = COLORS[i % len(COLORS)]
        rounds.bar([n + i * width for n in range(len(seconds))], seconds, width, label=name, color=color)
        total.barh([len(ttft_s) - i], [total_s[name]], color=color)
        total.annotate(f" {total_s[name]:.1f} s", (total_s[name], len(ttft_s) - i), va="center")
    most = max(map(len, ttft_s.values()), default=0)
    rounds.set_xticks([n + 0.4 - width / 2 for n in range(most)], [str(n + 1) for n in range(most)])
    rounds.set_xlabel("round")
    rounds.set_ylabel("median time to first token, s")
    total.set_xlabel("total time, s")
    total.set_yticks([])
    total.margins(x=0.15)
    for axes in (rounds, total):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*rounds.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
