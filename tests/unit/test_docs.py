"""The example of each `add-a-*` page works when it is saved where the page says; promises name tests that exist."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from pagefold.evict.scorer import SCORERS, ScoreContext
from pagefold.kv.layout import LAYOUTS
from pagefold.store.format import FORMATS, parse_format
from pagefold.store.pagestore import PageStore

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_of_promises_names_tests_that_exist():
    text, root = (DOCS / "invariants-heads.md").read_text(), DOCS.parent
    files = set(re.findall(r"tests/\w+/\w+\.py", text))
    assert len(files) > 10 and all((root / file).is_file() for file in files)
    code = "".join(path.read_text() for path in (root / "tests").rglob("*.py"))
    named = set(re.findall(r"\btest_\w+(?=`)", text)) - {Path(file).stem for file in files}
    assert len(named) > 20 and [name for name in sorted(named) if f"def {name}(" not in code] == []


class Rows:
    """Rows that a backend would have read: J jobs, C heads, N rows, D channels, a window of w queries."""

    def __init__(self, J: int = 2, C: int = 3, N: int = 8, D: int = 16, w: int = 4):
        self._attention = torch.rand(J, C, N)
        self._keys, self._values = torch.randn(2, J, C, N, D)
        self._queries = torch.randn(J, C, w, 2, D)

    def attention(self, across: str = "max") -> torch.Tensor:
        return self._attention

    def queries(self) -> torch.Tensor:
        return self._queries

    def keys(self) -> torch.Tensor:
        return self._keys

    def values(self) -> torch.Tensor:
        return self._values

    def key_lengths(self) -> torch.Tensor:
        return self.keys().norm(dim=-1)

    def value_lengths(self) -> torch.Tensor:
        return self.values().norm(dim=-1)

    def state(self, name: str) -> torch.Tensor:
        raise AssertionError(f"the example keeps no state, but asked for {name!r}")


def context(rows: Rows) -> ScoreContext:
    J, C, N = rows.attention().shape
    return ScoreContext(
        rows=rows,
        num_src=torch.full((J,), N),
        num_rows=torch.full((J,), N),
        num_dropped=torch.ones(J, dtype=torch.int64),
        num_tokens=torch.full((J,), N),
        first=torch.ones(J, dtype=torch.bool),
        layers=torch.zeros(J, C, dtype=torch.int64),
        heads=torch.arange(C).expand(J, C),
        inv_freq=torch.ones(8),
        scale=0.25,
        sink_tokens=1,
        window=4,
    )


def test_the_scorer_example_ranks_rows_by_what_they_hold(drop_in):
    name = drop_in("add-a-scorer.md", SCORERS)
    rows = Rows()
    scores = SCORERS.build(name).score(context(rows))
    assert scores.shape == rows.attention().shape
    assert scores.dtype == torch.float32
    assert torch.isfinite(scores).all()
    assert torch.equal(SCORERS.build(f"{name}:power=0").score(context(rows)), rows.attention())

    rows._values[:, :, 5] = 0
    assert (SCORERS.build(name).score(context(rows)).argmin(-1) == 5).all()


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (2, 3), (30, 3)])
def test_the_layout_example_places_every_head_once(drop_in, layers, heads):
    name = drop_in("add-a-layout.md", LAYOUTS)
    layout = LAYOUTS.build(f"{name}:slope=0").build(layers, heads)
    assert layout.group_of.dtype == layout.column_of.dtype == np.int32
    assert sorted(map(tuple, layout.members().reshape(-1, 2))) == [(i, j) for i in range(layers) for j in range(heads)]
    assert layout.weight == pytest.approx(np.ones(layers))


def test_the_layout_example_keeps_the_mean_budget(drop_in):
    name = drop_in("add-a-layout.md", LAYOUTS)
    layout = LAYOUTS.build(f"{name}:slope=0.5").build(8, 2)
    assert layout.weight.mean() == pytest.approx(1)
    budgets = layout.budgets(budget=256, page_size=16, floor=20)
    assert budgets[0] > budgets[-1]
    with pytest.raises(ValueError, match="slope"):
        LAYOUTS.build(f"{name}:slope=1").build(8, 2)


def test_the_format_example_round_trips_rows(drop_in):
    pair = parse_format(drop_in("add-a-format.md", FORMATS))
    x = torch.randn(2, 5, 64)
    for codec in (pair.k, pair.v):
        planes = codec.planes(64)
        stored = codec.encode(x)
        for plane, tensor in zip(planes, stored, strict=True):
            assert tensor.dtype == plane.dtype
            assert tensor.shape == (2, 5, plane.width)
        back = codec.decode(*stored, torch.float32)
        step = x.abs().amax(-1, keepdim=True) / 127
        assert ((back - x).abs() <= 0.51 * step).all()
        assert all(torch.equal(a[1, 3], b[0]) for a, b in zip(stored, codec.encode(x[1, 3:4]), strict=True))


def test_the_format_example_encodes_any_input(drop_in):
    pair = parse_format(drop_in("add-a-format.md", FORMATS))
    rows = torch.zeros(5, 64)
    rows[1, 3], rows[2, 3], rows[3] = torch.nan, torch.inf, 1e38
    rows[4, 0] = 1e-12
    back = pair.k.decode(*pair.k.encode(rows), torch.float32)
    assert torch.isfinite(back).all()
    assert (back[0] == 0).all()


def test_the_format_example_fits_a_store_and_the_bytes_its_page_states(drop_in):
    pair = parse_format(drop_in("add-a-format.md", FORMATS))
    assert pair.bytes_per_row(64) == 2 * 66
    store = PageStore(pair, num_pages=3, num_columns=2, page_size=4, head_dim=64, state={})
    store.poison(torch.tensor([1]))
    assert store.planes["k_scale"][1].isnan().all()


def test_every_invariant_has_tests_and_they_exist():
    text, root = (DOCS / "invariants.md").read_text(), DOCS.parent
    rows = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 24))
    assert all("::test_" in held_by for _, held_by in rows)
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        assert re.search(rf"^def {name}\(", (root / path).read_text(), re.MULTILINE), f"{path}::{name}"
