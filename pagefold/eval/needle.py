"""Passkey retrieval: a number is hidden in prose, and the model is to complete the sentence that repeats it.

    [prose ... ] The pass key is 52813. Remember it. 52813 is the pass key. [ ... prose] What is the pass key?   body
    The pass key is                                                                                            cue

The body has a whole number of pages, and the last fold falls on its end: the fold has seen the question, and the
answer is read from what it kept. With `kv_prefill_buffer` rows are folded all along, before the question is known.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError, Request, SamplingParams
from pagefold.engine.build import Loaded, build_engine
from pagefold.eval.texts import parse_share, share_rows
from pagefold.models.tokenizer import Tokenizer

QUESTION = "\n\nWhat is the pass key? "
CUE = "The pass key is"
ANSWER_TOKENS = 10


@dataclass(frozen=True)
class Needle:
    """One trial.

    length     tokens of the body
    depth      where the passkey was put: 0 is the beginning of the prose, 1 its end
    key        five digits, as text
    prompt     token ids of the body and the cue
    """

    length: int
    depth: float
    key: str
    prompt: tuple[int, ...]


def make_needle(tokenizer: Tokenizer, prose: Sequence[int], length: int, depth: float, trial: int) -> Needle:
    """Hide a key in a stretch of `prose` (token ids). The same arguments make the same prompt, on any machine.

    The sentence is put after the full stop that is nearest to `depth`, or at an end of the prose.
    """
    draw = random.Random(f"{length} {depth} {trial}")
    key = str(draw.randrange(10000, 100000))
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    bos, hidden = tokenizer.encode(""), encode(f" The pass key is {key}. Remember it. {key} is the pass key.")
    question, cue = encode(QUESTION), encode(CUE)
    num_prose = length - len(bos) - len(hidden) - len(question)
    if num_prose < 1 or num_prose > len(prose):
        least, most = length - num_prose + 1, length - num_prose + len(prose)
        raise InputError("lengths", f"got {length}, must lie between {least} and {most} for this text")
    start = draw.randrange(len(prose) - num_prose + 1)
    hay = list(prose[start : start + num_prose])
    stops = [i for i, token in enumerate(hay, 1) if tokenizer.decode([token]).endswith(".")]
    at = min([0, *stops, num_prose], key=lambda i: abs(i - depth * num_prose))
    return Needle(length, depth, key, (*bos, *hay[:at], *hidden, *hay[at:], *question, *cue))


def run_needle(
    loaded: Loaded,
    options: dict[str, Any],
    prose: Sequence[int],
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    use_tqdm: bool = True,
    share: str | None = None,
) -> dict[int, dict[float, int]]:
    """Keys found, of `trials`, per length and depth, by greedy decoding.

    options   engine options; without `kv_prefill_buffer` a prompt is folded once, after its question
    share     rows kept per head as a share of the length ("1/4"), instead of the option `kv_budget`
    """
    if loaded.tokenizer is None:
        raise InputError("model", "has no tokenizer, and texts are to be read")
    found: dict[int, dict[float, int]] = {}
    total = len(lengths) * len(depths) * trials
    with tqdm(total=total, desc="needles", disable=not use_tqdm, dynamic_ncols=True) as bar:
        for length in lengths:
            config = _config(options, length, share)
            needles = [make_needle(loaded.tokenizer, prose, length, d, i) for d in depths for i in range(trials)]
            hits = _search(loaded, config, needles, bar.update)
            found[length] = {d: sum(hit for n, hit in zip(needles, hits, strict=True) if n.depth == d) for d in depths}
    return found


def _config(options: dict[str, Any], length: int, share: str | None) -> EngineConfig:
    own, size = dict(options), EngineConfig.from_options(**options).cache.page_size
    own["kv_buffer"] = own.get("kv_buffer") or size  # on any device
    if share is not None:
        own["kv_budget"] = share_rows(length, parse_share(share, "share"), size)
    if own.get("kv_prefill_buffer") is None:
        own["kv_prefill_buffer"] = length
    config = EngineConfig.from_options(**own)
    if length % config.period:
        raise InputError("lengths", f"got {length}, must be a multiple of kv_buffer ({config.period})")
    return config


def _search(
    loaded: Loaded, config: EngineConfig, needles: Sequence[Needle], advance: Callable[[int], object]
) -> list[bool]:
    engine = build_engine(config, loaded)
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
    for i, needle in enumerate(needles):
        engine.add(Request(str(i), needle.prompt, sampling))
    hits = [False] * len(needles)
    while engine.has_work:
        for output in (o for o in engine.step() if o.finished):
            i = int(output.request_id)
            hits[i] = needles[i].key in output.outputs[0].text
            advance(1)
    return hits
