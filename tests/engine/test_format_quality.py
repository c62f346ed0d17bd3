"""What a format costs is measured through the engine: needles, and divergence from the engine's own precision."""

from unittest.mock import patch

from pagefold.eval import formats
from tests.engine.tiny import OPTIONS, tiny_loaded


def test_exact_rows_cost_nothing_and_smaller_ones_more(monkeypatch):
    monkeypatch.setattr(formats, "NEEDLE_STEP", 256)
    monkeypatch.setattr(formats, "TRIALS", 1)
    with patch.object(formats, "load_model", lambda _: tiny_loaded()):
        found = formats.format_quality(OPTIONS | {"model": "tiny"}, ["fp64", "fp8", "k=fp8,v=int4"], 512)
    assert found["fp64"]["KL"] == 0 and found["fp64"]["perplexity"] == found["fp64"]["perplexity of full"]
    assert 0 < found["fp8"]["KL"] < found["k=fp8,v=int4"]["KL"]
    assert {row["needles"] for row in found.values()} <= {f"{n} of 3 at 256" for n in range(4)}
