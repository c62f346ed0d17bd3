"""Profiles survive a file, refuse what is wrong, and give groups whose budgets cover their members at little waste."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pagefold.core.types import InputError
from pagefold.kv.layout import LAYOUTS
from pagefold.kv.profile import (
    HeadProfile,
    group_cells,
    load_profile,
    over_allocation,
    profile_report,
    rank_stability,
    save_profile,
    spread,
)

DATA = Path(__file__).parent / "data"
QWEN_SNAPKV = DATA / "qwen3-4b-instruct-2507__snapkv__crosslayer.npz"
QWEN_KEYDIFF = DATA / "qwen3-4b-instruct-2507__keydiff__crosslayer.npz"
LLAMA_KEYDIFF = DATA / "llama-3.1-8b-instruct__keydiff__crosslayer.npz"
META = {"model": "tiny", "scorer": "snapkv", "budget": 512, "tokens": [100, 200], "samples": 3}

# Mean reserved share (mean + 2 std) of the heads, and of groups of four that take their largest member's: adjacent,
# sorted in each layer, sorted over all layers. Published statistics of the same files.
PUBLISHED = {
    QWEN_SNAPKV: (0.2754, 0.4588, 0.3894, 0.2804),
    QWEN_KEYDIFF: (0.2417, 0.4678, 0.3723, 0.2470),
    LLAMA_KEYDIFF: (0.2224, 0.4394, 0.3562, 0.2293),
}


def tiny_profile(seed: int = 0, layers: int = 3, heads: int = 4) -> HeadProfile:
    draw = np.random.default_rng(seed)
    samples = np.clip(draw.uniform(0, 0.5, (layers, heads)) + draw.normal(0, 0.02, (3, layers, heads)), 0, 1)
    return HeadProfile.from_samples(samples.astype(np.float32), META)


def save_raw(path: Path, meta: object, **fields: Any) -> Path:
    with open(path, "wb") as file:
        np.savez(file, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **fields)
    return path


@st.composite
def profiles(draw):
    shape = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 4, 6]))
    share = arrays(np.float32, shape, elements=st.sampled_from([0.0, 0.01, 0.125, 0.5, 0.97, 1.0]))
    return HeadProfile(draw(share), draw(share) / 4, META)


def test_a_profile_survives_a_file(tmp_path):
    profile = tiny_profile()
    path = tmp_path / "profile"  # no suffix: the name is taken as it is
    save_profile(path, profile)
    loaded = load_profile(path)
    assert np.array_equal(loaded.mean, profile.mean) and np.array_equal(loaded.std, profile.std)
    assert loaded.samples is not None and profile.samples is not None
    assert np.array_equal(loaded.samples, profile.samples)
    assert loaded.meta == profile.meta


def test_files_that_are_not_profiles_are_refused_by_name(tmp_path):
    grid = np.full((3, 4), 0.5, np.float32)
    good = {**META, "format_version": 1}
    text = tmp_path / "text"
    text.write_text("hello")
    (tmp_path / "empty").write_bytes(b"")
    np.save(tmp_path / "array.npy", grid)
    meta_without = lambda name: {k: v for k, v in good.items() if k != name}  # noqa: E731
    cases = {
        "no such file": tmp_path / "nowhere",
        r"text: not an NPZ file": text,
        r"empty: not an NPZ file": tmp_path / "empty",
        r"array.npy: not an NPZ file": tmp_path / "array.npy",
        "lacks the field 'std'": save_raw(tmp_path / "a", good, mean=grid),
        "format_version 2, this version reads 1": save_raw(
            tmp_path / "b", {**good, "format_version": 2}, mean=grid, std=grid
        ),
        "format_version None": save_raw(tmp_path / "c", META, mean=grid, std=grid),
        "meta lacks scorer": save_raw(tmp_path / "d", meta_without("scorer"), mean=grid, std=grid),
        "meta needs budget or ratio": save_raw(tmp_path / "e", meta_without("budget"), mean=grid, std=grid),
        r"mean \(3, 4\) and std \(4, 3\)": save_raw(tmp_path / "f", good, mean=grid, std=grid.T),
        r"mean has values in \[1.5, 1.5\]": save_raw(tmp_path / "g", good, mean=grid * 3, std=grid),
        "std has values in": save_raw(tmp_path / "h", good, mean=grid, std=grid * np.nan),
        "samples .* must be": save_raw(tmp_path / "i", good, mean=grid, std=grid, samples=grid[None, :2]),
        "meta is not a JSON object": save_raw(tmp_path / "j", 7, mean=grid, std=grid),
    }
    for message, path in cases.items():
        with pytest.raises(InputError, match=message):
            load_profile(path)


def test_a_profile_of_another_model_is_refused():
    with pytest.raises(InputError, match=r"measured on 36 layers x 8 KV heads \(Qwen/.*\), the model has 32 x 8"):
        LAYOUTS.build(f"clustered:profile={QWEN_SNAPKV}").build(32, 8)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("clustered", "profile: the clustered layout needs a profile file"),
        (f"clustered:profile={QWEN_SNAPKV},heads_per_page=0", "heads_per_page: got 0"),
        (
            f"clustered:profile={QWEN_SNAPKV},heads_per_page=5",
            "heads_per_page: got 5, must divide the 288 KV heads of all",
        ),
        (
            f"clustered:profile={QWEN_SNAPKV},heads_per_page=16,scope=layer",
            "heads_per_page: got 16, must divide the 8 KV heads",
        ),
        (f"clustered:profile={QWEN_SNAPKV},scope=all", "scope: got 'all', must be one of cross, layer"),
        (f"clustered:profile={QWEN_SNAPKV},alpha=-1", "alpha: got -1.0, must be a finite number >= 0"),
    ],
)
def test_bad_options_are_named(spec, message):
    with pytest.raises(InputError, match=message):
        LAYOUTS.build(spec).build(36, 8)


@settings(max_examples=100, deadline=None)
@given(profiles(), st.sampled_from(["cross", "layer"]), st.data())
def test_groups_cover_their_members_and_are_sorted_cuts(tmp_path_factory, profile, scope, data):
    layers, heads = profile.mean.shape
    together = heads if scope == "layer" else layers * heads
    per_page = data.draw(st.sampled_from([n for n in range(1, together + 1) if together % n == 0]))
    path = tmp_path_factory.mktemp("profiles") / "profile"
    save_profile(path, profile)
    layout = LAYOUTS.build(f"clustered:profile={path},heads_per_page={per_page},scope={scope}").build(layers, heads)

    shares = profile.shares(2.0)
    members = layout.members()
    share_of = shares[members[..., 0], members[..., 1]]  # [G, Hp]
    assert layout.heads_per_page == per_page
    assert layout.weight.mean() == pytest.approx(1.0)
    # Weights are in proportion to the largest member, so every head gets at least its own share of the reserve.
    largest = np.maximum(share_of.max(1), 1e-6)
    np.testing.assert_allclose(layout.weight / layout.weight.max(), largest / largest.max())
    cells = members[..., 0] * heads + members[..., 1]
    assert (np.diff(cells, axis=1) > 0).all()  # columns in order of (layer, head)
    if scope == "layer":
        assert (members[..., 0] == members[:, :1, 0]).all()
    else:
        # A cut of one sorted list: no member of a group wants more than any member of the group before.
        assert (share_of[1:].max(1, initial=0) <= share_of[:-1].min(1, initial=1)).all()
        assert list(group_cells(shares, per_page, "cross").ravel()) == list(cells.ravel())


def test_equal_heads_stay_in_order():
    groups = group_cells(np.full((2, 4), 0.3), 2, "cross")
    assert groups.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_profiles_give_the_published_reserves(path):
    profile = load_profile(path)
    shares = profile.shares(2.0)
    reserve, *allocated = PUBLISHED[path]
    assert shares.mean() == pytest.approx(reserve, abs=1e-4)
    for scope, expected in zip(("adjacent", "layer", "cross"), allocated, strict=True):
        groups = group_cells(shares, 4, scope)
        assert shares.ravel()[groups].max(1).mean() == pytest.approx(expected, abs=1e-4)
        assert over_allocation(shares, groups) == pytest.approx(1 - reserve / expected, abs=1e-3)
    # Grouping over all layers wastes little, adjacent heads a lot.
    assert over_allocation(shares, group_cells(shares, 4, "cross")) < 0.05
    assert over_allocation(shares, group_cells(shares, 4, "adjacent")) > 0.35


@pytest.mark.parametrize("scope", ["cross", "layer"])
def test_real_budgets_add_up_to_what_was_asked_for(scope):
    """Exactly, and what the floor gives to the least the others lack."""
    page_size, budget = 16, 1024
    layout = LAYOUTS.build(f"clustered:profile={LLAMA_KEYDIFF},scope={scope}").build(32, 8)
    rows, floored = (layout.budgets(budget, page_size, floor) for floor in (0, 20))
    assert rows.mean() == floored.mean() == budget
    assert floored.min() >= 32
    assert (floored <= np.maximum(rows, 32)).all()
    assert rows.max() / rows.min() > 4  # uneven indeed


def test_report_gives_the_published_figures():
    report = profile_report(load_profile(QWEN_KEYDIFF), 4)
    expected = {
        "cv": 1.569,
        "cv_within_layer": 1.307,
        "cv_across_layers": 0.9725,
        "near_empty": 0.4861,
        "top_tenth": 0.4605,
    }
    assert {name: report[name] for name in expected} == pytest.approx(expected, abs=1e-3)
    assert report["reserve"] == pytest.approx(1.559, abs=1e-3)
    assert report["over_allocation_cross"] < report["over_allocation_layer"] < report["over_allocation_adjacent"]
    assert "spearman_mean" not in report  # the condensed files hold no samples


def test_rank_stability_is_spearmans_correlation_with_the_mean():
    rows = np.array([[0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]])[:, None]
    mean, least = rank_stability(rows)
    assert (mean, least) == (pytest.approx(1 / 3), pytest.approx(-1.0))
    # Ties share a rank: (1.5, 1.5, 3) against (1, 2, 3) correlate by sqrt(3) / 2.
    tied, _ = rank_stability(np.array([[0.1, 0.1, 0.5], [0.0, 0.2, 0.5]])[:, None])
    assert tied == pytest.approx((np.sqrt(3) / 2 + 1) / 2)
    report = profile_report(tiny_profile(), 4)
    assert 0 < report["spearman_min"] <= report["spearman_mean"] <= 1


def test_degenerate_profiles_have_figures_too():
    empty = HeadProfile(np.zeros((2, 2)), np.zeros((2, 2)), META)
    report = profile_report(empty, 2)
    assert report["over_allocation_cross"] == 0 and report["reserve"] == 1 and report["near_empty"] == 1
    assert spread(np.full((2, 2), 0.5))["cv"] == 0
