"""`pagefold bench layouts`: every layout folds the same requests, and the figures are those of the engine's tables."""

import json

import numpy as np
import pytest
import torch

from pagefold.bench import layouts
from pagefold.cli import main
from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError
from pagefold.engine.build import build_engine, load_model
from pagefold.kv.profile import HeadProfile, save_profile
from tests.model_dir import write_model_dir

LEN, RATIO, PAGE = 192, 0.25, 4
CLUSTERED = "clustered:profile={},heads_per_page=1"


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> str:
    """A made-up one: every head wants another share, and so does each layer."""
    path, mean = tmp_path_factory.mktemp("profile") / "tiny.npz", np.array([[0.9, 0.7], [0.5, 0.3]], np.float32)
    meta = {"model": "tiny", "scorer": "none", "budget": 1, "tokens": [1, 1], "samples": 1}
    save_profile(path, HeadProfile(mean, np.zeros_like(mean), meta))
    return str(path)


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> dict:
    asked = {"model": str(write_model_dir(tmp_path_factory.mktemp("model"))), "dtype": "float32", "backend": "cpu"}
    asked |= {"kv_eviction": "snapkv", "kv_budget_ratio": RATIO, "kv_window": 3, "kv_sink_tokens": 1}
    return asked | {"page_size": PAGE, "num_pages": 2000, "max_num_batched_tokens": 128}


def prompts(count: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(0, 256, (count, LEN)).tolist()


def test_the_command_compares_layouts_with_as_many_rows(options, profile, tmp_path, capsys):
    path = tmp_path / "layouts.json"
    argv = ["bench", "layouts", options["model"], "--layouts", f"uniform; {CLUSTERED.format(profile)}"]
    argv += ["--num-requests", "3", "--input-len", str(LEN), "--json", str(path)]
    for name, value in options.items():
        argv += [f"--{name.replace('_', '-')}", str(value)] if name != "model" else []
    assert main(argv) == 0
    uniform, clustered = json.loads(path.read_text())["layouts"]
    assert (uniform["num_groups"], clustered["num_groups"]) == (1, 4)
    # budgets of 48 rows: 72, 56, 40 and 24 (shares .9, .7, .5, .3); three requests, a few tokens past their folds
    assert 3 * 4 * 48 < uniform["rows"] == clustered["rows"] <= 3 * 4 * (48 + PAGE + 1)
    assert uniform["row_bytes"] == uniform["rows"] * 2 * 16 * 4  # K and V of 16 channels in float32
    assert uniform["layer_rows"] == [uniform["rows"] // 2] * 2
    assert clustered["layer_rows"] == [uniform["rows"] // 2 - 96, uniform["rows"] // 2 + 96]
    assert uniform["rows_of_first"] == uniform["per_row_of_first"] == 1
    slower = clustered["attend_s"] / clustered["rows"] * uniform["rows"] / uniform["attend_s"]
    assert clustered["per_row_of_first"] == pytest.approx(slower)
    for layout in (uniform, clustered):
        assert set(layout["held"]) == {"0", "1"}  # the model's context ends before 1,000 tokens more
        assert all(
            layout["reserved"] - layout["num_groups"] <= n <= layout["reserved"] for n in layout["held"].values()
        )
        assert 0 < layout["folding_s"] < layout["prefill_s"] and 0 < layout["folding_share"] < 1
    out = capsys.readouterr().out
    assert "clustered:profile=tiny.npz,heads_per_page=1" in out and "3 requests of 192 tokens" in out


def test_attention_is_timed_over_the_rows_that_the_requests_hold(options, profile):
    """Attention to the batch gives what torch gives over the rows of the page tables, layer by layer."""
    config = EngineConfig.from_options(**options, kv_layout=CLUSTERED.format(profile), max_num_seqs=2)
    engine = build_engine(config, load_model(config))
    states = [seq.kv for seq in layouts.serve_until_folded(engine, prompts(2))]
    batch, kv = layouts.decode_batch(engine, states), engine.runner.kv
    assert layouts.attention_seconds(engine, states) > 0
    by_layer, _ = layouts.rows_held(engine, states)
    q = torch.randn(2, 4, 16)
    for layer in range(2):
        batch.plan, rows = None, 0
        out = engine.runner.backend.attend(kv, layer, q, batch, 0.25)
        for b, state in enumerate(states):
            assert state.ticket is None and state.evicted.all()
            for head in range(2):
                group, column = (int(x[layer, head]) for x in (kv.group_of, kv.column_of))
                n = state.num_tokens - int(kv.evicted[state.slot, group])
                pages = kv.page_table[state.slot, group, : -(-n // PAGE)].long()
                k, v = (kv.tiers[0].planes[name][pages, column].flatten(0, 1)[:n] for name in ("k_data", "v_data"))
                seen = torch.softmax(q[b, 2 * head : 2 * head + 2] @ k.T * 0.25, -1) @ v
                torch.testing.assert_close(out[b, 2 * head : 2 * head + 2], seen)
                rows += n
        assert rows == by_layer[layer]
    layouts.end_all(engine)
    assert not engine.has_work and engine.manager.pools[0].num_held == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kv_eviction": "none"}, "kv_eviction: is 'none'"),
        ({"num_pages": 60, "max_model_len": LEN + 8}, "num_requests: got 3, the engine does not run as many"),
    ],
)
def test_requests_that_are_not_folded_at_once_are_refused(given, words, options):
    config = EngineConfig.from_options(**options | given)
    with pytest.raises(InputError, match=words):
        layouts.measure_layout(load_model(config), options | given, prompts(3))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--layouts", "uniform;"], "layouts: got 'uniform;'"),
        (["--layouts", "uniform;spiral"], "spiral"),
        (["--layouts", "uniform", "--kv-layout", "uniform"], "kv_layout"),
        (["--layouts", "uniform", "--num-requests", "0"], "num_requests: got 0"),
        ([], "--layouts"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(argv, words, options, capsys):
    assert main(["bench", "layouts", options["model"], "--backend", "cpu", *argv]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error
