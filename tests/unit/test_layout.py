"""A layout is a bijection between heads and page columns, and its budgets are whole pages that respect the floor."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefold.kv.layout import LAYOUTS, HeadLayout, set_apart


@st.composite
def layouts(draw):
    groups, per_page = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    cells = groups * per_page
    heads = draw(st.sampled_from([h for h in range(1, cells + 1) if cells % h == 0]))
    place = np.array(draw(st.permutations(range(cells))), np.int32).reshape(-1, heads)
    weight = np.array(draw(st.lists(st.floats(0.01, 5.0), min_size=groups, max_size=groups)))
    return HeadLayout(place // per_page, place % per_page, weight / weight.mean())


@given(layouts())
def test_members_is_the_inverse_of_the_tables(layout):
    members = layout.members()
    assert members.shape == (layout.num_groups, layout.heads_per_page, 2)
    for group in range(layout.num_groups):
        for column in range(layout.heads_per_page):
            layer, head = members[group, column]
            assert (layout.group_of[layer, head], layout.column_of[layer, head]) == (group, column)


@given(layouts(), st.integers(0, 2**31))
def test_no_two_heads_share_a_place_on_any_pages(layout, seed):
    """(page, column) of all heads, for any disjoint page tables of the groups, covers those pages exactly once."""
    pages = np.random.default_rng(seed).permutation(layout.num_groups * 3).reshape(layout.num_groups, 3)
    place = pages[layout.group_of] * layout.heads_per_page + layout.column_of[..., None]
    assert np.array_equal(np.sort(place, axis=None), np.arange(pages.size * layout.heads_per_page))


@settings(max_examples=200)
@given(layouts(), st.integers(1, 5000), st.sampled_from([1, 4, 16, 32]), st.integers(0, 200))
def test_budgets_are_whole_pages_at_or_above_the_floor(layout, budget, page_size, floor):
    rows = layout.budgets(budget, page_size, floor)
    assert rows.dtype == np.int32 and rows.shape == (layout.num_groups,)
    assert (rows % page_size == 0).all() and (rows >= max(floor, 1)).all()
    wanted = layout.weight * budget
    richer, poorer = np.nonzero(wanted[:, None] > wanted[None, :])
    assert (rows[richer] >= rows[poorer]).all()  # who wants more never gets less
    if (wanted >= max(floor, page_size)).all():
        # No group is at the floor: each is rounded to a page below or above its part of all pages.
        assert (abs(rows - layout.weight * rows.mean()) < page_size + 1e-6).all()


@settings(max_examples=200)
@given(layouts(), st.integers(1, 5000), st.sampled_from([1, 4, 16, 32]), st.integers(0, 200))
def test_every_layout_keeps_as_many_rows_as_the_uniform_one(layout, budget, page_size, floor):
    """Whatever the weights, rounding and the floor do: layouts are compared at equal memory."""
    (plain,) = LAYOUTS.build("uniform").build(1, 1).budgets(budget, page_size, floor)
    assert layout.budgets(budget, page_size, floor).mean() == plain


def test_uniform_is_one_group_with_the_plain_budget():
    layout = LAYOUTS.build("uniform").build(3, 2)
    assert layout.num_groups == 1 and layout.heads_per_page == 6
    assert layout.members()[0].tolist() == [[layer, head] for layer in range(3) for head in range(2)]
    assert layout.budgets(1024, 32, 20).tolist() == [1024]
    assert layout.budgets(8, 32, 40).tolist() == [64]


@pytest.mark.parametrize(
    ("group_of", "column_of", "weight", "message"),
    [
        ([[0, 0], [1, 1]], [[0, 1], [0, 0]], [1.0, 1.0], "bijection"),
        ([[0, 0], [1, 0]], [[0, 1], [0, 2]], [1.0, 1.0], "bijection"),
        ([[0, 1], [2, 0]], [[0, 0], [0, 1]], [1.0, 1.0, 1.0], "bijection"),
        ([[0, 0], [1, 1]], [[0, 1], [0, 1]], [1.0, 0.0], "positive"),
    ],
)
def test_broken_tables_are_refused(group_of, column_of, weight, message):
    with pytest.raises(ValueError, match=message):
        HeadLayout(np.array(group_of), np.array(column_of), np.array(weight))


@given(st.data())
def test_layers_are_set_apart_in_the_last_columns_of_every_group(data):
    """The layout stays a bijection, budgets keep their mean, and heads that want alike stay together."""
    layout = data.draw(layouts())
    (num_layers, num_heads), groups, per_page = layout.group_of.shape, layout.num_groups, layout.heads_per_page
    layers = data.draw(st.sets(st.integers(0, num_layers - 1), max_size=num_layers))
    if len(layers) * num_heads % groups:
        with pytest.raises(ValueError, match=f"got {len(layers)} layers, must be a multiple of"):
            set_apart(layout, layers)
        return
    found = set_apart(layout, layers)
    apart = np.isin(np.arange(num_layers), list(layers))
    first = per_page - len(layers) * num_heads // groups
    assert (found.column_of[apart] >= first).all() and (found.column_of[~apart] < first).all()
    assert found.weight.mean() == pytest.approx(1)
    for kind in (apart, ~apart):
        before, after = layout.weight[layout.group_of[kind]], found.group_of[kind]
        if not np.array_equal(found.group_of, layout.group_of):
            tops = [before[after == group].max() for group in range(groups)]
            assert tops == sorted(tops)


def test_groups_that_can_spare_the_layers_stay_what_they_are():
    columns = np.arange(6, dtype=np.int32).reshape(3, 2)
    uniform = HeadLayout(np.zeros_like(columns), columns, np.ones(1))
    found = set_apart(uniform, [0])
    assert found.column_of.tolist() == [[4, 5], [0, 1], [2, 3]] and (found.group_of == 0).all()
