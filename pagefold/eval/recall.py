"""Recall over many turns: pass keys are scattered in a long first turn, and later turns ask for one after the other.

    user        [prose ...] The pass key of the blue lamp is 48213. [... prose] Remember every pass key.      history
    assistant   I will.                                                                                       history
    user        What is the pass key of the blue lamp?
    assistant   The pass key of the blue lamp is 48213.          as far as "is" it is given, the rest is answered
    user        What is the pass key of the green kettle?        ...

The history has a whole number of pages, and a fold falls on its end: what is dropped there is chosen before any
question is known. Each turn is a request of its own, whose prompt is the conversation so far with the answers that the
engine gave. It resumes from the rows that the turn before left folded (its trunk), and is folded again as it grows.
"""

import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError, Request, SamplingParams
from pagefold.engine.build import Loaded, build_engine
from pagefold.engine.engine import Engine
from pagefold.engine.outputs import RequestOutput
from pagefold.eval.answers import Samples, Variant, by_engine, check_engines, engine_config
from pagefold.eval.statistics import wilson
from pagefold.eval.texts import parse_share, share_rows
from pagefold.models.tokenizer import Tokenizer

# fmt: off
COLOURS = [
    "red", "blue", "green", "yellow", "black", "white", "brown", "silver",
    "golden", "purple", "orange", "grey", "pink", "copper", "ivory", "violet",
]
THINGS = [
    "lamp", "kettle", "chair", "ladder", "bottle", "mirror", "basket", "candle",
    "drum", "anchor", "bell", "piano", "carpet", "bucket", "violin", "shovel",
]
# fmt: on
STOPS = (".", ";", "!", "?")  # a hidden sentence comes after one of these
REMEMBER, PROMISE = "\n\nRemember every pass key in this text.", "I will."
QUESTION, CUE = "What is the pass key of the {}?", "The pass key of the {} is"
ANSWER_TOKENS = 10
MEANS = ("prompt_tokens", "cached_tokens", "resumed_tokens")


@dataclass(frozen=True)
class Frame:
    """What stands around the words of a conversation, as token ids: before the first user's, between a user's and an
    assistant's, and between an assistant's and the next user's."""

    head: tuple[int, ...]
    to_assistant: tuple[int, ...]
    to_user: tuple[int, ...]


@dataclass(frozen=True)
class Talk:
    """One conversation.

    history     token ids up to the end of the assistant's first words
    questions   token ids of each later turn, from the end of the answer before to where the answer begins
    names, keys what each turn asks for, and the five digits that are right, as text
    depths      where its sentence is: 0 is the beginning of the prose, 1 its end
    """

    history: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    keys: tuple[str, ...]
    depths: tuple[float, ...]


def make_frame(tokenizer: Tokenizer) -> Frame:
    """The chat template's frame, or empty lines for a model that has none.

    Raises InputError for a template that does not show every turn as it was said, once.
    """
    if tokenizer.chat_template is None:
        between = tuple(tokenizer.encode_plain("\n\n"))
        return Frame(tuple(tokenizer.encode("")), between, between)

    def render(*words: str) -> list[int]:
        roles = ("user", "assistant", "user")
        return tokenizer.apply_chat_template([{"role": r, "content": w} for r, w in zip(roles, words, strict=True)])

    base, places, (probe, *_) = render("x", "x", "x"), [], tokenizer.encode_plain("x")
    for varied in (("y", "x", "x"), ("x", "y", "x"), ("x", "x", "y")):
        ids = render(*varied)
        places.append([i for i, pair in enumerate(zip(base, ids, strict=False)) if pair[0] != pair[1]])
    if any(len(place) != 1 or base[place[0]] != probe for place in places):
        raise InputError("model", "has a chat template that does not show earlier turns as they were said")
    (first,), (second,), (third,) = places
    return Frame(tuple(base[:first]), tuple(base[first + 1 : second]), tuple(base[second + 1 : third]))


def make_talk(
    tokenizer: Tokenizer, prose: Sequence[int], length: int, num_keys: int, num_turns: int, trial: int
) -> Talk:
    """A history of `length` tokens that hides `num_keys` keys in a stretch of `prose` (token ids), and `num_turns`
    questions, each for another key. The same arguments make the same conversation, on any machine.

    Raises InputError naming `keys`, `turns` or `tokens`.
    """
    if not 1 <= num_keys <= len(COLOURS):
        raise InputError("keys", f"got {num_keys}, must be in [1, {len(COLOURS)}]")
    if not 1 <= num_turns <= num_keys:
        raise InputError("turns", f"got {num_turns}, must be in [1, {num_keys}], the number of keys")
    draw, frame = random.Random(f"{length} {num_keys} {num_turns} {trial}"), make_frame(tokenizer)
    names = [" ".join(pair) for pair in zip(draw.sample(COLOURS, num_keys), draw.sample(THINGS, num_keys), strict=True)]
    keys = [str(draw.randrange(10000, 100000)) for _ in names]
    plain = tokenizer.encode_plain
    hidden = [plain(f" The pass key of the {name} is {key}.") for name, key in zip(names, keys, strict=True)]
    end = (*plain(REMEMBER), *frame.to_assistant, *plain(PROMISE))
    num_prose = length - len(frame.head) - sum(map(len, hidden)) - len(end)
    if not 1 <= num_prose <= len(prose):
        least, most = length - num_prose + 1, length - num_prose + len(prose)
        raise InputError(
            "tokens", f"got {length}, must lie between {least} and {most} for this text and {num_keys} keys"
        )
    start = draw.randrange(len(prose) - num_prose + 1)
    hay = prose[start : start + num_prose]
    stops = [i for i, token in enumerate(hay, 1) if tokenizer.decode([token]).endswith(STOPS)]
    if len(stops) < num_keys:
        raise InputError("keys", f"got {num_keys}, and {num_prose} tokens of this text have room for {len(stops)}")
    places = draw.sample(stops, num_keys)
    history, done = [*frame.head], 0
    for at, ids in sorted(zip(places, hidden, strict=True)):
        history += [*hay[done:at], *ids]
        done = at
    history += [*hay[done:], *end]
    asked = draw.sample(range(num_keys), num_turns)
    questions = [
        (*frame.to_user, *plain(QUESTION.format(names[i])), *frame.to_assistant, *plain(CUE.format(names[i])))
        for i in asked
    ]
    pick = lambda of: tuple(of[i] for i in asked)  # noqa: E731
    return Talk(tuple(history), tuple(questions), pick(names), pick(keys), tuple(places[i] / num_prose for i in asked))


# ---- running


def run_recall(
    loaded: Loaded,
    options: dict[str, Any],
    talks: Sequence[Talk],
    variants: Sequence[Variant],
    path: Path | None = None,
    use_tqdm: bool = True,
) -> Samples:
    """Hold every conversation in every variant in which it has not been held yet. Samples are numbered conversation by
    conversation, turn by turn.

    options    engine options common to all, `model` included; without `kv_prefill_buffer` a history is folded once, at
               its end
    variants   budgets are shares of the history
    path       file of finished samples, read and continued
    """
    options = fold_options(options, len(talks[0].history))
    check_engines(loaded, ({**options, **group[0].options} for group in by_engine(variants)))
    told = hashlib.sha256(repr(talks).encode()).hexdigest()[:16]
    facts = {"task": "recall", "conversations": told, **options}
    samples = Samples(path, {**facts, "dtype": str(loaded.decoder.dtype).removeprefix("torch.")})
    turns = len(talks[0].keys)
    held = lambda variant, talk: samples.get(variant.name, talk * turns + turns - 1) is not None  # noqa: E731
    pairs = [(variant, talk) for variant in variants for talk in range(len(talks))]
    done = sum(held(*pair) for pair in pairs)
    with tqdm(total=len(pairs) * turns, initial=done * turns, desc="recall", disable=not use_tqdm) as bar:
        for group in by_engine(variants):
            due = [(variant, talk) for variant, talk in pairs if variant in group and not held(variant, talk)]
            if due:
                config = engine_config({**options, **group[0].options}, group)
                _Run(build_engine(config, loaded), config, talks, due, samples).run(bar.update)
    return samples


def fold_options(options: dict[str, Any], length: int) -> dict[str, Any]:
    """The options, with a fold on the end of a history of so many tokens. InputError if it cannot fall there."""
    config = EngineConfig.from_options(**options)
    own = {"kv_buffer": config.period, "kv_prefill_buffer": config.eviction.kv_prefill_buffer or length}
    step = config.eviction.kv_prefill_buffer or config.period
    if length % step:
        name = "kv_prefill_buffer" if config.eviction.kv_prefill_buffer else "kv_buffer"
        raise InputError("tokens", f"got {length}, must be a multiple of {name} ({step})")
    if not config.keep_turns:
        raise InputError("kv_keep_turns", "got False, and later turns resume from what earlier ones left")
    return {**options, **own}


class _Run:
    """The conversations of one engine: all at once, each turn as soon as the one before is answered."""

    def __init__(
        self,
        engine: Engine,
        config: EngineConfig,
        talks: Sequence[Talk],
        due: Sequence[tuple[Variant, int]],
        samples: Samples,
    ):
        self.engine, self.config, self.talks, self.samples = engine, config, talks, samples
        self._running: dict[str, tuple[Variant, int, int]] = {}
        self._said: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)  # in conversations that go on
        for variant, talk in due:
            self._ask(variant, talk, -1, talks[talk].history)

    def _budget(self, variant: Variant, talk: int) -> int | None:
        if not variant.share:
            return None
        length = len(self.talks[talk].history)
        return share_rows(length, parse_share(variant.share, "budgets"), self.config.cache.page_size)

    def _ask(self, variant: Variant, talk: int, turn: int, prompt: tuple[int, ...]) -> None:
        """Turn -1 is the history: its rows are wanted, its answer is not, but for a token that is stored behind them:
        folds are launched when the next token is computed."""
        if turn < 0:
            how: dict[str, Any] = {"max_tokens": 2, "ignore_eos": True}
        else:
            how = {"max_tokens": ANSWER_TOKENS, "stop": (".", "\n")}
        folding = {"kv_eviction": variant.scorer, "kv_budget": self._budget(variant, talk)}
        sampling = SamplingParams(temperature=0.0, **how, **folding)
        request = Request(f"{variant.name} {talk} {turn}", prompt, sampling)
        self.engine.add(request)
        self._running[request.id] = variant, talk, turn

    def run(self, advance: Callable[[int], object]) -> None:
        while self.engine.has_work:
            for output in self.engine.step():
                if output.finished:
                    advance(self._take(output))

    def _take(self, output: RequestOutput) -> int:
        """Note an answer and ask on; a conversation's samples are written when it is over. Returns turns answered."""
        variant, talk, turn = self._running.pop(output.request_id)
        answer, prompt, questions = output.outputs[0], tuple(output.prompt_token_ids), self.talks[talk].questions
        if answer.error:
            raise RuntimeError(f"{variant.name}, conversation {talk}, turn {turn + 1}: {answer.error}")
        ids: list[int] = []
        if turn >= 0:
            ids = [id for id in answer.token_ids if id not in self.engine.eos_token_ids]
            self._said[variant.name, talk].append(self._sample(variant, talk, turn, output))
        if turn + 1 < len(questions):
            self._ask(variant, talk, turn + 1, (*prompt, *ids, *questions[turn + 1]))
        else:
            for sample in self._said.pop((variant.name, talk)):
                self.samples.add(sample)
        return int(turn >= 0)

    def _sample(self, variant: Variant, talk: int, turn: int, output: RequestOutput) -> dict[str, Any]:
        asked, answer, kv = self.talks[talk], output.outputs[0], output.kv
        return {
            "variant": variant.name,
            "problem": talk * len(asked.keys) + turn,
            "talk": talk,
            "turn": turn,
            "name": asked.names[turn],
            "depth": asked.depths[turn],
            "passed": asked.keys[turn] in answer.text,
            "prompt_tokens": len(output.prompt_token_ids),
            "cached_tokens": output.num_cached_tokens,
            "resumed_tokens": kv.resumed_tokens,
            "tokens": len(answer.token_ids),
            "budget": self._budget(variant, talk),
            "compactions": kv.compactions,
            "rows_kept": kv.rows_kept,
            "rows_evicted": kv.rows_evicted,
            "answer": answer.text,
        }


# ---- figures


def turns_of(
    samples: Samples, variants: Sequence[Variant], num_talks: int, num_turns: int
) -> list[list[dict[str, Any]]]:
    """For each variant and turn, as JSON holds it: `passed`, [share, low, high] with Wilson's interval over the
    conversations, and the mean prompt in tokens, how many of them were not computed (`cached_tokens`), and how many of
    these are folded rows of the turn before (`resumed_tokens`)."""
    figures = []
    for variant in variants:
        mine = samples.of(variant.name, num_talks * num_turns)
        figures.append([])
        for turn in range(num_turns):
            here = [sample for sample in mine if sample["turn"] == turn]
            means = {n: sum(s[n] for s in here) / num_talks for n in MEANS}
            figures[-1].append({"passed": wilson(sum(s["passed"] for s in here), num_talks), **means})
    return figures
