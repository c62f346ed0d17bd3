"""docs/grafana-dashboard.json asks only for metrics that the server has."""

import json
import re
from collections import defaultdict
from itertools import combinations
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from pagefold.server.metrics import Metrics

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana-dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


class Stats(defaultdict):
    """An engine's answer that has whatever is asked of it."""

    def __init__(self):
        super().__init__(lambda: 1)
        self["kv"] = [defaultdict(lambda: 1)]
        self["finished"] = {"stop": 1}
        self["step_tokens"] = {"bounds": [1], "counts": [1, 1], "sum": 2}
        for name in ("live", "rows", "tokens", "prefix_cache", "compaction"):
            self[name] = defaultdict(lambda: 1)


def test_every_metric_of_the_dashboard_is_served_under_both_prefixes():
    for prefix in ("pagefold", "vllm"):
        metrics = Metrics(prefix, "model")
        served = set(re.findall(rf"^{prefix}:(\w+)", metrics.render(Stats()).decode(), re.MULTILINE))
        served |= {name for family in metrics.registry.collect() for name in _sample_names(family, prefix)}
        asked = {name for panel in PANELS for target in panel["targets"] for name in metrics_of(target["expr"])}
        assert len(asked) > 20
        assert asked <= served, sorted(asked - served)


def _sample_names(family, prefix: str) -> set[str]:
    """Names that a family has once it has counted something."""
    name = family.name.removeprefix(f"{prefix}:")
    return {f"{name}_total"} if family.type == "counter" else set()


def metrics_of(query: str) -> list[str]:
    return re.findall(r"\$\{prefix\}:(\w+)", query)


def test_queries_are_balanced_and_filter_by_model():
    for panel in PANELS:
        for target in panel["targets"]:
            query = target["expr"]
            assert all(query.count(left) == query.count(right) for left, right in ("()", "{}", "[]")), query
            assert query.count('{model_name=~"$model"}') == len(metrics_of(query)) > 0, query


def test_panels_have_words_units_and_a_place_of_their_own():
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert panel["description"].endswith(".") and panel["fieldConfig"]["defaults"]["unit"]
    for a, b in combinations([panel["gridPos"] for panel in DASHBOARD["panels"]], 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart |= a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart, (a, b)
        assert a["x"] + a["w"] <= 24
