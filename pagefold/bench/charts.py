"""Charts of what engines held while they ran."""

from collections.abc import Mapping, Sequence
from pathlib import Path

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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

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
