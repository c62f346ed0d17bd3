"""Answers under folding: which problems a model still solves when its cache keeps a part of each answer's rows.

A task's problems are given to one engine, greedily, once for each configuration: all rows kept, and each scorer at each
budget. Budgets are shares of *the length*: the tokens of the prompt and of the answer from the full cache, problem by
problem. So a problem is first answered in full, and joins the batch again, folded, as soon as its length is known.

Finished samples are lines of a file; a run that is started again continues after them.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError, Request, SamplingParams
from pagefold.engine.build import Loaded, build_engine, build_layout
from pagefold.engine.engine import Engine
from pagefold.engine.outputs import RequestOutput
from pagefold.engine.parts import build_parts
from pagefold.engine.policy import build_scorer
from pagefold.eval.texts import parse_share, share_rows

FULL = "full"


@dataclass(frozen=True)
class Answer:
    """What a model said: ids, with the EOS that ended them, and their text ("" without a tokenizer)."""

    token_ids: Sequence[int]
    text: str


@dataclass(frozen=True)
class Task:
    """Problems, and who judges the answers.

    settings     what makes the problems what they are, as JSON holds it; two tasks with equal settings are equal
    prompts      token ids of each problem
    max_tokens   of an answer
    check        (problem, answer) -> marks, "passed" among them; may run in any thread
    """

    name: str
    settings: dict[str, Any]
    prompts: Sequence[tuple[int, ...]]
    max_tokens: int
    check: Callable[[int, Answer], dict[str, bool]]


@dataclass(frozen=True)
class Variant:
    """A configuration under test.

    name      as it is shown
    scorer    "none", or a scorer spec
    share     part of the length that is kept; "" where nothing is evicted
    options   engine options on top of the common ones: a row format, a head layout
    """

    name: str = FULL
    scorer: str = "none"
    share: str = ""
    options: dict[str, Any] = field(default_factory=dict)


def make_variants(
    scorers: Iterable[str], shares: Iterable[str], formats: Iterable[str] = (), layouts: Iterable[str] = ()
) -> list[Variant]:
    """The full cache, each scorer at each share, the full cache in each format, the scorers again in each layout."""
    folded = [Variant(f"{scorer} {share}", scorer, share) for share in shares for scorer in scorers]
    variants = [Variant(), *folded]
    variants += [Variant(f"{FULL} {name}", options={"kv_format": name}) for name in formats]
    for layout in layouts:
        variants += [Variant(f"{v.name} {layout}", v.scorer, v.share, {"kv_layout": layout}) for v in folded]
    for v in variants:
        if v.share:
            parse_share(v.share, "budgets")
        build_scorer(v.scorer, "scorers")
    return variants


# ---- samples


class Samples:
    """Finished samples in memory, and in a file with one JSON object a line, the settings on the first.

    Raises InputError if the file holds samples of other settings.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]):
        self.settings: dict[str, Any] = json.loads(json.dumps(settings, default=str))
        self._done: dict[tuple[str, int], dict[str, Any]] = {}
        self._file = None
        if path is None:
            return
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
        lines.pop() if lines else None  # nothing, or a line that was being written
        if lines:
            self._load(path, lines)
        draft = path.with_name(path.name + ".part")
        draft.write_text("".join(f"{line}\n" for line in lines or [json.dumps(self.settings)]), encoding="utf-8")
        os.replace(draft, path)
        self._file = path.open("a", encoding="utf-8")

    def _load(self, path: Path, lines: list[str]) -> None:
        try:
            settings, *samples = map(json.loads, lines)
            self._done = {(s["variant"], s["problem"]): s for s in samples}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError("samples", f"{path} holds no samples of this command ({error!r})") from None
        if settings != self.settings:
            names = [n for n in {**settings, **self.settings} if settings.get(n) != self.settings.get(n)]
            raise InputError("samples", f"{path} holds samples of another run, which differs in {', '.join(names)}")

    def add(self, sample: dict[str, Any]) -> None:
        self._done[sample["variant"], sample["problem"]] = sample
        if self._file:
            self._file.write(json.dumps(sample) + "\n")
            self._file.flush()

    def get(self, variant: str, problem: int) -> dict[str, Any] | None:
        return self._done.get((variant, problem))

    def of(self, variant: str, num_problems: int) -> list[dict[str, Any]]:
        """The samples of a variant that is finished, by problem."""
        return [self._done[variant, problem] for problem in range(num_problems)]


# ---- running


def run_answers(
    loaded: Loaded,
    options: dict[str, Any],
    task: Task,
    variants: Sequence[Variant],
    path: Path | None = None,
    use_tqdm: bool = True,
) -> Samples:
    """Answer every problem in every variant that has not been answered yet.

    options    engine options common to all, `model` included
    variants   the first is the full cache
    path       file of finished samples, read and continued
    """
    check_engines(loaded, ({**options, **group[0].options} for group in by_engine(variants)))
    settings = {"task": task.name, **task.settings, "max_tokens": task.max_tokens, **options}
    samples = Samples(path, {**settings, "dtype": str(loaded.decoder.dtype).removeprefix("torch.")})
    total = len(variants) * len(task.prompts)
    done = sum(samples.get(v.name, i) is not None for v in variants for i in range(len(task.prompts)))
    with tqdm(total=total, initial=done, desc=task.name, disable=not use_tqdm, dynamic_ncols=True) as bar:
        for group in by_engine(variants):
            if any(samples.get(v.name, i) is None for v in group for i in range(len(task.prompts))):
                config = engine_config({**options, **group[0].options}, group)
                _Run(build_engine(config, loaded), config, task, group, samples).run(bar.update)
    return samples


def by_engine(variants: Iterable[Variant]) -> list[list[Variant]]:
    """The variants that one engine can serve together: those whose options are equal."""
    groups: dict[str, list[Variant]] = defaultdict(list)
    for variant in variants:
        groups[json.dumps(variant.options)].append(variant)
    return list(groups.values())


def engine_config(options: dict[str, Any], variants: Sequence[Variant]) -> EngineConfig:
    """Options of an engine that can serve all the variants: it is started with the scorer that stores the most."""
    scorers = {v.scorer: build_scorer(v.scorer, "scorers") for v in variants}
    needs = lambda spec: (len(s.state), s.needs_window, True) if (s := scorers[spec]) else (0, False, False)  # noqa: E731
    return EngineConfig.from_options(**options, kv_eviction=max(scorers, key=needs))


def check_engines(loaded: Loaded, all_options: Iterable[dict[str, Any]]) -> None:
    """Raise the InputError that an engine with such options would, for its layout or format: before hours of work."""
    for options in all_options:
        config = EngineConfig.from_options(**options)
        build_parts(config, loaded.spec, build_layout(config, loaded.spec), loaded.decoder.dtype)


class _Run:
    """The variants of one engine: requests in, samples out."""

    def __init__(self, engine: Engine, config: EngineConfig, task: Task, variants: Sequence[Variant], samples: Samples):
        self.engine, self.config, self.task, self.samples = engine, config, task, samples
        self._running: dict[str, tuple[Variant, int, int | None]] = {}
        self._waiting: dict[int, list[Variant]] = {}  # for the problem's length
        for problem in range(len(task.prompts)):
            for variant in (v for v in variants if samples.get(v.name, problem) is None):
                self._submit(variant, problem)

    def _submit(self, variant: Variant, problem: int, length: int | None = None) -> None:
        full = self.samples.get(FULL, problem)
        length = full["prompt_tokens"] + full["tokens"] if full else length
        if variant.share and length is None:
            self._waiting.setdefault(problem, []).append(variant)
            return
        budget = self._budget(variant.share, length) if variant.share and length else None
        sampling = SamplingParams(
            temperature=0.0, max_tokens=self.task.max_tokens, kv_eviction=variant.scorer, kv_budget=budget
        )
        request = Request(f"{variant.name} {problem}", self.task.prompts[problem], sampling)
        self.engine.add(request)
        self._running[request.id] = variant, problem, budget

    def _budget(self, share: str, length: int) -> int:
        """Rows per head: the share of the length in whole pages, and at least one row more than is protected."""
        evict, size = self.config.eviction, self.config.cache.page_size
        least = math.ceil((evict.kv_window + evict.kv_sink_tokens + 1) / size) * size
        return max(least, share_rows(length, parse_share(share, "budgets"), size))

    def run(self, advance: Callable[[int], object]) -> None:
        checks: dict[Future, dict[str, Any]] = {}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            while self.engine.has_work or checks:
                if not self.engine.has_work:
                    wait(checks, return_when=FIRST_COMPLETED)
                for output in self.engine.step() if self.engine.has_work else ():
                    if output.finished:
                        sample, answer = self._take(output)
                        checks[pool.submit(self.task.check, sample["problem"], answer)] = sample
                for check in [check for check in checks if check.done()]:
                    self.samples.add({**checks.pop(check), **check.result()})
                    advance(1)

    def _take(self, output: RequestOutput) -> tuple[dict[str, Any], Answer]:
        """The sample of a finished request, not judged yet. After the full one, folded ones are submitted."""
        variant, problem, budget = self._running.pop(output.request_id)
        said, kv = output.outputs[0], output.kv
        if said.error:
            raise RuntimeError(f"{variant.name}, problem {problem}: {said.error}")
        sample = {
            "variant": variant.name,
            "problem": problem,
            "prompt_tokens": len(output.prompt_token_ids),
            "tokens": len(said.token_ids),
            "finish_reason": said.finish_reason,
            "budget": budget,
            "compactions": kv.compactions,
            "rows_kept": kv.rows_kept,
            "rows_evicted": kv.rows_evicted,
            "answer": said.text or list(said.token_ids),
        }
        if variant.name == FULL:
            for folded in self._waiting.pop(problem, ()):
                self._submit(folded, problem, sample["prompt_tokens"] + sample["tokens"])
        return sample, Answer(said.token_ids, said.text)
