"""What row formats cost: needles found, and divergence from rows in the engine's own precision."""

from collections.abc import Sequence
from typing import Any

from pagefold.core.config import EngineConfig
from pagefold.engine.build import load_model
from pagefold.eval.needle import run_needle
from pagefold.eval.perplexity import BASELINE, Variant, run_perplexity
from pagefold.eval.texts import encode_text, load_text

DEPTHS, TRIALS = (0.1, 0.5, 0.9), 2
WINDOW, WINDOWS = 2048, 4
POOL_BYTES = 4 << 30  # at most: pools of several engines follow each other
NEEDLE_STEP = 512  # lengths of needles are multiples of it


def format_quality(options: dict[str, Any], formats: Sequence[str], context: int) -> dict[str, dict[str, Any]]:
    """For each format, {"needles": "found of all at so many tokens", "KL": nats per token from rows in the engine's own
    precision, "perplexity", "perplexity of full"}, on the text that comes along.

    options   engine options, weights included; the format and the length of the context are set here
    context   tokens of a prompt with a needle, or as many as the text has
    """
    loaded = load_model(EngineConfig.from_options(**options | {"max_model_len": context}))
    text = encode_text(loaded.tokenizer, load_text())
    window = min(WINDOW, context)
    own = options | {"max_model_len": context}
    if own.get("num_pages") is None:
        own["kv_cache_memory_bytes"] = min(own.get("kv_cache_memory_bytes") or POOL_BYTES, POOL_BYTES)
    variants = [Variant(BASELINE), *(Variant(format, {"kv_format": format}) for format in formats)]
    full, *records = run_perplexity(loaded, own, text[: WINDOWS * window], window, variants, use_tqdm=False)
    length = min(context - NEEDLE_STEP, len(text)) // NEEDLE_STEP * NEEDLE_STEP
    found = {}
    for format, record in zip(formats, records, strict=True):
        found[format] = {
            "KL": round(record["overall"]["kl"][0], 5),
            "perplexity": record["overall"]["perplexity"][0],
            "perplexity of full": full["overall"]["perplexity"][0],
        }
        if length:
            hits = run_needle(loaded, own | {"kv_format": format}, text, [length], DEPTHS, TRIALS, use_tqdm=False)
            num = sum(sum(row.values()) for row in hits.values())
            found[format]["needles"] = f"{num} of {len(DEPTHS) * TRIALS} at {length}"
    return found
