"""Chats of many turns: this engine with what it keeps of each turn, other ways of serving them, and vLLM beside them.

Every engine runs in a process of its own. This file is also the program of that process.
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pagefold.bench.charts import rounds_chart
from pagefold.bench.export import export_hf
from pagefold.bench.measure import compaction_seconds, run_apart
from pagefold.bench.peers import PeerHome, run_chats_on_vllm
from pagefold.bench.turns import Answer, Chats, Progress, run_chats
from pagefold.bench.workloads import PEER_OPTIONS, device_of, engine_name
from pagefold.core.config import EngineConfig
from pagefold.core.types import Request, SamplingParams
from pagefold.engine.build import build_engine, choose_device, choose_dtype
from pagefold.engine.engine import Engine
from pagefold.engine.scheduler import Stats
from pagefold.kv.bounds import peak_pages
from pagefold.models.sources import resolve
from pagefold.models.spec import ModelSpec

RIVALS: dict[str, dict[str, Any]] = {  # other ways to serve the same chats with this engine
    "full": {"kv_eviction": "none", "kv_keep_bytes": 0},
    "anew": {"kv_keep_turns": False, "kv_keep_bytes": 0},
}
FOOTPRINT_TOKENS = (1, 1000)  # after folding


# ---- results


@dataclass(frozen=True)
class Round:
    """The turns of one number, over all conversations.

    wall_s           seconds from the first question to the last answer
    tok_s            output tokens per second of them
    prompt_tokens    of all histories, `cached_tokens` of them not computed
    """

    wall_s: float
    ttft_median_s: float
    ttft_p99_s: float
    tok_s: float
    prompt_tokens: int
    cached_tokens: int


def rounds_of(answers: Sequence[Answer]) -> list[Round]:
    rounds = []
    for turn in range(max(answer.turn for answer in answers) + 1):
        here = [answer for answer in answers if answer.turn == turn]
        ttft = sorted(answer.ttft_s for answer in here)
        wall_s = max(answer.last_s for answer in here) - min(answer.asked_s for answer in here)
        rounds.append(
            Round(
                wall_s=wall_s,
                ttft_median_s=statistics.median(ttft),
                ttft_p99_s=ttft[min(len(ttft) - 1, int(0.99 * len(ttft)))],
                tok_s=sum(answer.output_len for answer in here) / wall_s,
                prompt_tokens=sum(answer.prompt_len for answer in here),
                cached_tokens=sum(answer.cached for answer in here),
            )
        )
    return rounds


@dataclass(frozen=True)
class ChatResult:
    """How one engine served the chats.

    total_s      seconds from the first question to the last answer, loading and warm-up excluded
    tok_s        output tokens per second of them
    preemptions  None if a peer does not tell
    ours         what only this engine tells: requests that `resumed`, swaps, peak_pages of num_pages, rows_kept of
                 rows_seen (per head, at the end, summed over the requests), trunks and bytes of them in host memory,
                 `folding_s` that compactions took until the first round ended, and their `folding_share` of it, and
                 the `footprint`: pages one request holds so many tokens after its first fold, and the bound it was
                 promised
    note         "" after a good run, else what is wrong
    """

    name: str
    total_s: float = 0.0
    tok_s: float = 0.0
    init_s: float = 0.0
    rounds: list[Round] = field(default_factory=list)
    preemptions: int | None = None
    version: str = ""
    device: str = ""
    ours: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def ok(self) -> bool:
        return not self.note

    @property
    def later_ttft_s(self) -> float:
        """Median time to first token of the rounds after the first: the median of their medians."""
        later = self.rounds[1:] or self.rounds
        return statistics.median(each.ttft_median_s for each in later)


def _result(name: str, answers: list[Answer], chats: Chats, **facts: Any) -> ChatResult:
    total_s = max(answer.last_s for answer in answers)
    tokens = sum(answer.output_len for answer in answers)
    short = [a for a in answers if a.output_len != chats.output_len]
    facts["note"] = f"turn {short[0].turn} of chat {short[0].chat} got {short[0].output_len} tokens" if short else ""
    return ChatResult(name, total_s, tokens / total_s, rounds=rounds_of(answers), **facts)


# ---- one engine, in this process


def measure(
    name: str, options: dict[str, Any], chats: Chats, footprint: Sequence[int] = FOOTPRINT_TOKENS
) -> ChatResult:
    """Load, warm up, run the chats, see what one request holds."""
    start = perf_counter()
    engine = build_engine(EngineConfig.from_options(**options))
    init_s = perf_counter() - start
    _serve(engine, chats.warm_up())
    engine.manager.forget_all()
    engine.scheduler.stats = stats = Stats()
    answers, kept, seen, folding_s = _serve(engine, chats)
    manager = engine.manager
    hosted = [trunk for trunk in manager.trunks if trunk.on_host]
    ours = {
        "resumed": stats.resumed,
        "swaps": stats.swaps,
        "peak_running": stats.peak_running,
        "peak_pages": stats.peak_pages,
        "num_pages": sum(pool.num_pages - 1 for pool in manager.pools),
        "rows_kept": kept,
        "rows_seen": seen,
        "folding_s": folding_s,
        "folding_share": folding_s / rounds_of(answers)[0].wall_s,
        "trunks": len(manager.trunks),
        "trunk_host_bytes": sum(
            size * len(trunk.tier_pages(tier))
            for trunk in hosted
            for tier, size in enumerate(manager.geometry.bytes_per_page)
        ),
    }
    if engine.policies.default.evicts and footprint:
        ours["footprint"] = measure_footprint(engine, chats.turns[0][0], footprint)
    device = torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""
    return _result(name, answers, chats, init_s=init_s, preemptions=stats.preemptions, device=device, ours=ours)


def _serve(engine: Engine, chats: Chats) -> tuple[list[Answer], float, int, float]:
    """The answers, rows per head that were kept and seen at the requests' ends, and seconds that compactions took until
    all first turns were answered."""
    how: dict[str, Any] = {"temperature": chats.temperature, "ignore_eos": True, "detokenize": False}
    sampling, kept, seen = SamplingParams(max_tokens=chats.output_len, **how), 0.0, 0
    first_turns, folding_s = len(chats.turns), -compaction_seconds(engine)

    def step() -> list[Progress]:
        nonlocal kept, seen, first_turns, folding_s
        outputs = engine.step()
        for output in outputs:
            if output.finished:
                kept, seen = kept + output.kv.rows_kept, seen + output.kv.tokens
                if output.request_id.endswith(".0"):
                    first_turns -= 1
                    folding_s += 0.0 if first_turns else compaction_seconds(engine)
        return [
            Progress(out.request_id, out.outputs[0].token_ids, out.finished, out.num_cached_tokens) for out in outputs
        ]

    answers = run_chats(chats, lambda id, prompt: engine.add(Request(id, tuple(prompt), sampling)), step)
    return answers, kept, seen, folding_s


def measure_footprint(engine: Engine, prompt: list[int], after: Sequence[int]) -> dict[str, Any]:
    """Pages that a request alone holds so many tokens after its first fold in decoding, as {"held": {after: pages}},
    and what it is promised from then on, as "reserved"."""
    room = engine.max_model_len - len(prompt)
    after = [count for count in after if count + engine.config.period < room]
    sampling = SamplingParams(max_tokens=max(after, default=0) + engine.config.period + 1, ignore_eos=True)
    engine.add(Request("footprint", tuple(prompt), replace(sampling, kv_keep_turns=False, detokenize=False)))
    seq, held, of_prompt, folded_at = engine.scheduler.waiting[0], {}, None, None
    while engine.has_work:
        engine.step()
        if seq.finished or seq.state is None:
            continue
        kv = seq.kv
        if kv.num_tokens < kv.prompt_len:
            continue
        of_prompt = kv.num_compactions if of_prompt is None else of_prompt  # its last piece may not be folded yet
        if folded_at is None and kv.num_compactions > of_prompt:
            folded_at = kv.num_tokens
        if folded_at is not None and kv.num_tokens - folded_at in after:
            held.setdefault(kv.num_tokens - folded_at, sum(kv.held))
    bound = sum(peak_pages(seq.policy, engine.config.cache.page_size, 0, seq.last))
    return {"held": {str(count): pages for count, pages in held.items()}, "reserved": bound}


# ---- one engine, in a process of its own


def run_engine(name: str, options: dict[str, Any], chats: Chats, threads: int, footprint: Sequence[int]) -> ChatResult:
    """`measure` in a fresh process. One that fails is a result with a note."""
    work = {"name": name, "options": options, "chats": asdict(chats), "footprint": list(footprint), "threads": threads}
    facts: dict[str, Any] = {"name": name} | run_apart("pagefold.bench.multiturn", work, threads)
    facts["rounds"] = [Round(**each) for each in facts.get("rounds", ())]
    return ChatResult(**facts)


def _child(job_file: str, answer_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(job["threads"])
    result = measure(job["name"], job["options"], Chats(**job["chats"]), job["footprint"])
    Path(answer_file).write_text(json.dumps(asdict(result)))


def run_vllm(
    chats: Chats, options: dict[str, Any], dtype: str, home: PeerHome, threads: int, own: dict[str, Any]
) -> ChatResult:
    """vLLM on the same chats with the same memory; `own` are keywords for its engine beside those."""
    device = device_of(options)
    passed = PEER_OPTIONS if device == "cuda" else ("load_format", "max_num_seqs", "max_model_len")
    given = {name: options[name] for name in passed if options.get(name) not in (None, "auto")}
    given |= {"enable_prefix_caching": True} | own
    with tempfile.TemporaryDirectory(prefix="pagefold-export-") as folder:
        model = options["model"]
        directory = Path(model) if options.get("load_format") == "dummy" and Path(model).is_dir() else None
        directory = directory or export_hf(model, folder, dtype)
        job = {"chats": asdict(chats), "model": str(directory.resolve()), "dtype": dtype, "options": given}
        facts = run_chats_on_vllm(job, home, device, threads)
    if "note" in facts:
        return ChatResult("vllm", note=facts["note"])
    answers = [Answer(**answer) for answer in facts.pop("answers")]
    return _result("vllm", answers, chats, **facts)


# ---- all of them


def engine_options(options: dict[str, Any], chats: Chats) -> tuple[dict[str, Any], str]:
    """What is asked for, and the context and running requests that the chats need; and the precision."""
    dtype = options.get("dtype", "auto")
    if dtype == "auto":
        dtype = str(choose_dtype(dtype, choose_device(options.get("backend", "auto")))).removeprefix("torch.")
    needed = {"max_model_len": chats.max_len + 2 * max(FOOTPRINT_TOKENS), "max_num_seqs": len(chats.turns)}
    if "max_model_len" not in options:
        most = ModelSpec.from_hf(resolve(options["model"]).config()).max_model_len
        needed["max_model_len"] = max(chats.max_len, min(needed["max_model_len"], most))
    return needed | options | {"dtype": dtype}, dtype


def run_multiturn(
    options: dict[str, Any],
    chats: Chats,
    against: Sequence[str] = (),
    peers: dict[str, PeerHome] | None = None,
    peer_options: dict[str, Any] | None = None,
    threads: int | None = None,
    json_file: str | None = None,
    chart: str | None = None,
    footprint: Sequence[int] = FOOTPRINT_TOKENS,
) -> bool:
    """Run every engine, print the tables, write the figures; True if every engine of ours did its work."""
    console = Console() if sys.stdout.isatty() else Console(width=180)
    threads = threads or len(os.sched_getaffinity(0))
    options, dtype = engine_options(options, chats)
    runs = {engine_name(options): options}
    for way in against:
        own = options | RIVALS[way]
        runs["full" if way == "full" else f"{engine_name(own)}, {way}"] = own
    results = []

    def note(result: ChatResult) -> None:
        """Figures are on disk as soon as an engine is done: the next one may take long, or be stopped."""
        results.append(result)
        if json_file:
            report = {"engines": runs, "peer_options": peer_options or {}, "dtype": dtype, "chats": _shape(chats)}
            report |= {"results": [asdict(each) for each in results]}
            Path(json_file).write_text(json.dumps(report, indent=1) + "\n")

    for name, own in runs.items():
        with console.status(f"pagefold, {name}"):
            note(run_engine(name, own, chats, threads, footprint))
    ours = list(results)
    for home in (peers or {}).values():
        with console.status("vllm"):
            note(run_vllm(chats, options, dtype, home, threads, peer_options or {}))
    where = device_of(options)
    for table in tables(chats, results, f"{dtype}, {where if where == 'cuda' else f'{threads} threads'}"):
        console.print(table)
    for result in results:
        if not result.ok:
            console.print(f"{label_of(result)}: {result.note}", markup=False)
    if chart:
        good = {label_of(result): result for result in results if result.ok}
        medians = {name: [each.ttft_median_s for each in result.rounds] for name, result in good.items()}
        totals = {name: result.total_s for name, result in good.items()}
        rounds_chart(chart, f"{len(chats.turns)} chats of {chats.num_rounds} turns", medians, totals)
    return all(result.ok for result in ours)


def _shape(chats: Chats) -> dict[str, Any]:
    lengths = [[len(turn) for turn in turns] for turns in chats.turns]
    shape = {"turn_lens": lengths, "output_len": chats.output_len, "temperature": chats.temperature}
    return shape | {"think_s": chats.think_s}


def label_of(result: ChatResult) -> str:
    return f"vllm {result.version}".strip() if result.name == "vllm" else f"pagefold, {result.name}"


def tables(chats: Chats, results: list[ChatResult], where: str) -> list[Table]:
    """What each engine needed in all, and round by round."""
    rivals = [result for result in results[1:] if result.ok]
    total = Table(title=f"{len(chats.turns)} chats of {chats.num_rounds} turns ({where})", title_justify="left")
    for name in ("engine", "total s", "tok/s", "later TTFT s", "cached", "resumed", "preempted", "pool at most"):
        total.add_column(name, justify="left" if name == "engine" else "right")
    for name in (
        "rows kept/seen",
        "folding of round 1",
        "pages after 1, 1000",
        *(f"x {label_of(rival)}" for rival in rivals),
    ):
        total.add_column(name, justify="right")
    rounds = Table(
        title="by round: median / 99th percentile of the time to first token, s; tok/s", title_justify="left"
    )
    for name in ("engine", *map(str, range(1, chats.num_rounds + 1))):
        rounds.add_column(name, justify="left" if name == "engine" else "right")
    for result in filter(lambda result: result.ok, results):
        prompt, cached = (
            sum(getattr(each, f"{what}_tokens") for each in result.rounds) for what in ("prompt", "cached")
        )
        cells = [label_of(result), f"{result.total_s:.2f}", f"{result.tok_s:.1f}", f"{result.later_ttft_s:.3f}"]
        cells += [f"{cached / prompt:.0%}", *_own_cells(result)]
        total.add_row(*cells, *(f"{rival.total_s / result.total_s:.2f}" for rival in rivals))
        each = [f"{r.ttft_median_s:.3f} / {r.ttft_p99_s:.3f}; {r.tok_s:.0f}" for r in result.rounds]
        rounds.add_row(label_of(result), *each)
    return [total, rounds]


def _own_cells(result: ChatResult) -> list[str]:
    ours, preempted = result.ours, "" if result.preemptions is None else f"{result.preemptions}"
    if not ours:
        return ["", preempted, "", "", "", ""]
    footprint = ours.get("footprint")
    held = f"{', '.join(map(str, footprint['held'].values()))} of {footprint['reserved']}" if footprint else ""
    pool = f"{ours['peak_pages']} of {ours['num_pages']}"
    rows, folding = f"{ours['rows_kept'] / ours['rows_seen']:.0%}", f"{ours['folding_share']:.1%}"
    return [f"{ours['resumed']}", preempted, pool, rows, folding, held]


if __name__ == "__main__":
    _child(*sys.argv[1:])
