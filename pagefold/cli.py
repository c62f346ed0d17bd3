"""The command line: `pagefold serve`, `generate`, `chat`, `inspect`, `bench`, `eval`, `profile`.

Engine and sampling flags are made from the fields of `EngineConfig` and `SamplingParams`, so they cannot drift apart.
Whatever needs torch is imported by the verb that uses it.
"""

import argparse
import contextlib
import dataclasses
import difflib
import json
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from pagefold import __version__
from pagefold.core.config import EngineConfig, ModelConfig
from pagefold.core.types import InputError, Request, SamplingParams

if typing.TYPE_CHECKING:
    from pagefold.engine.outputs import CompletionOutput

ALIASES = {  # as vLLM calls them
    "page_size": ["--block-size"],
    "num_pages": ["--num-gpu-blocks-override"],
    "random_input_len": ["--input-len"],
    "random_output_len": ["--output-len"],
}
PEERS = ("transformers", "vllm")
REFUSED, INTERRUPTED = 2, 130

CHAT_LACKS = frozenset({"n", "logprobs", "prompt_logprobs", "detokenize"})  # one answer, as text


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Input that cannot be served is one line on stderr and exit code 2."""
    try:
        args = build_parser().parse_args(argv)
        return args.func(args) or 0
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and which option was probably meant."""

    def __init__(self, **options: Any):
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        """Each subcommand refuses what it does not know itself, since only it knows its options."""
        known, extra = super().parse_known_args(args, namespace)
        if extra:
            option = extra[0].split("=")[0]
            if not option.startswith("-"):
                raise InputError(option, f"unexpected argument of {self.prog}")
            options = sorted(self._option_string_actions)
            close = difflib.get_close_matches(option, options, n=2, cutoff=0.7)
            hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(options)}"
            raise InputError(option, f"unknown option of {self.prog}; {hint}")
        return known, extra


def build_parser() -> argparse.ArgumentParser:
    from pagefold.bench import layouts_cli, multiturn_cli
    from pagefold.eval.cli import add_parsers

    parser = _Parser(prog="pagefold", description="Serve language models in a fraction of the KV memory.")
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")

    text = "answer requests over HTTP, as OpenAI's API does"
    _add_server_flags(_verb(verbs, "serve", _serve, text, default_model=argparse.SUPPRESS))  # the file may name it

    generate = _verb(verbs, "generate", _generate, "continue prompts")
    source = generate.add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", metavar="TEXT", help="prompt; may be given several times")
    fields = "prompt, messages or prompt_token_ids, and sampling fields"
    source.add_argument("--input", metavar="FILE", help=f"JSONL file of requests: {fields}")
    generate.add_argument("--output", metavar="FILE", help="JSONL file of answers; default: stdout")
    _add_sampling_flags(generate, max_tokens=256)

    chat = _verb(verbs, "chat", _chat, "talk to a model; /reset forgets, /stats counts KV rows, /quit ends")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    _add_sampling_flags(chat, without=CHAT_LACKS, max_tokens=512, temperature=0.7)

    _verb(verbs, "inspect", _inspect, "what a model is and how much KV fits, without loading weights")

    bench = verbs.add_parser("bench", help="measure speed").add_subparsers(required=True, metavar="COMMAND")
    _add_throughput_flags(_verb(bench, "throughput", _throughput, "output tokens per second, and peers beside it"))

    _add_capacity(bench)
    _add_gaps_flags(_verb(bench, "gaps", _gaps, "how long a GPU idles between decode steps"))
    _add_bench_serve(bench)
    multiturn_cli.add_flags(
        _verb(bench, "multiturn", _multiturn, "chats of many turns: time in all and to first tokens")
    )
    layouts_cli.add_flags(_verb(bench, "layouts", _layouts, "head layouts side by side: what uneven heads cost"))

    add_parsers(verbs)
    return parser


def _verb(
    verbs: Any,
    name: str,
    func: Callable[[argparse.Namespace], int | None],
    text: str,
    default_model: str = ModelConfig.model,
) -> _Parser:
    parser = verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.set_defaults(func=func)
    model = next(leaf for leaf in EngineConfig.leaves() if leaf.name == "model")
    parser.add_argument("model", nargs="?", default=default_model, help=f"{model.metadata['help']} ({model.default})")
    group = parser.add_argument_group("engine")
    for leaf in EngineConfig.leaves():
        if leaf is not model:
            _add_flag(group, leaf, leaf.metadata["help"], leaf.default)
    return parser


# ---- flags from fields


def _add_sampling_flags(parser: _Parser, without: frozenset[str] = frozenset(), **defaults: Any) -> None:
    """A flag per field of SamplingParams; those that the engine's flags set for all requests are not repeated."""
    group = parser.add_argument_group("sampling, as in pagefold.SamplingParams")
    engine = {leaf.name for leaf in EngineConfig.leaves()}
    parser.set_defaults(**defaults)
    for field in dataclasses.fields(SamplingParams):
        if field.name not in engine | without:
            _add_flag(group, field, "", defaults.get(field.name, field.default))


def _add_flag(group: Any, field: dataclasses.Field, text: str, default: object) -> None:
    """Values are only in the namespace if they were given (or set as a parser default)."""
    names = [f"--{field.name.replace('_', '-')}", *ALIASES.get(field.name, [])]
    shown = "" if default in (None, ()) else f"(default: {default})"
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    options["help"] = f"{text} {shown}".strip().replace("%", "%%")
    if field.type in (bool, bool | None):
        group.add_argument(*names, action=argparse.BooleanOptionalAction, **options)
        return
    kind, repeated = _kind_of(field.type)
    if repeated:
        options["action"] = "append"
    choices = field.metadata.get("choices")
    metavar = "{" + ",".join(choices) + "}" if choices else {int: "N", float: "X", str: "TEXT", dict: "JSON"}[kind]
    group.add_argument(*names, type=_parser_of(kind), metavar=metavar, **options)


def _kind_of(annotation: Any) -> tuple[type, bool]:
    """What one value of a field is (int, float, str or dict), and whether the field is a tuple of them."""
    if isinstance(annotation, types.UnionType):
        return _kind_of(next(kind for kind in typing.get_args(annotation) if kind is not types.NoneType))
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], True
    return typing.get_origin(annotation) or annotation, False


def _parser_of(kind: type) -> Callable[[str], Any]:
    words = {int: "an integer", float: "a number", dict: "a JSON object"}

    def parse(text: str) -> Any:
        try:
            return json.loads(text) if kind is dict else kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}, must be {words[kind]}") from None

    return parse


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `EngineConfig` that were given, and the model."""
    return {leaf.name: getattr(args, leaf.name) for leaf in EngineConfig.leaves() if hasattr(args, leaf.name)}


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    engine = {leaf.name for leaf in EngineConfig.leaves()}
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name not in engine]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


# ---- serve


def _add_server_flags(parser: _Parser) -> None:
    from pagefold.server.settings import ServerSettings

    group = parser.add_argument_group("server")
    for field in dataclasses.fields(ServerSettings):
        _add_flag(group, field, field.metadata["help"], field.default)
    group.add_argument("--config", metavar="FILE", help="YAML or JSON file of options by these names; flags win")


def _serve(args: argparse.Namespace) -> int:
    from pagefold.server.settings import ServerSettings, parse_options

    names = [field.name for field in dataclasses.fields(ServerSettings)]
    flags = engine_options(args) | {name: getattr(args, name) for name in names if hasattr(args, name)}
    try:
        settings, config = parse_options(flags, args.config)
        from pagefold.server.app import serve
    except ModuleNotFoundError as error:
        raise InputError("serve", f"needs {error.name}: pip install 'pagefold[server]'") from None
    return serve(settings, config)


# ---- generate


def _generate(args: argparse.Namespace) -> int:
    from pagefold.bench.workloads import prompt_tokens, read_requests, request_sampling
    from pagefold.engine.llm import LLM

    if not args.prompt and not args.input:
        raise InputError("prompt", "nothing to do, give --prompt or --input")
    options, defaults = engine_options(args), sampling_options(args)
    EngineConfig.from_options(**options)  # a bad option is told before a long file is read
    SamplingParams(**defaults)
    entries = [{"prompt": text} for text in args.prompt] if args.prompt else read_requests(args.input)
    with _opened(args.output) as out:
        llm = LLM(**options)
        answers: dict[int, dict[str, Any]] = {}
        for index, entry in enumerate(entries):
            try:
                if isinstance(entry, InputError):
                    raise entry
                tokens, sampling = prompt_tokens(entry, llm.tokenizer), request_sampling(entry, defaults)
                llm.engine.add(Request(str(index), tuple(tokens), sampling))
            except InputError as error:
                if args.prompt:
                    raise
                answers[index] = {"index": index, "error": {"message": str(error), "param": error.field}}
        refused, written = len(answers), 0
        for output in llm._steps(len(entries) - refused, use_tqdm=True):
            index = int(output.request_id)
            answers[index] = {
                "index": index,
                "prompt_tokens": len(output.prompt_token_ids),
                "cached_tokens": output.num_cached_tokens,
                "outputs": [_completion_facts(completion) for completion in output.outputs],
            }
            while written in answers:  # in the order of the requests, as early as possible
                _write_answer(out, answers.pop(written), plain=bool(args.prompt) and not args.output)
                written += 1
        for index in sorted(answers):
            _write_answer(out, answers[index], plain=False)
    if refused:
        print(f"{refused} of {len(entries)} requests were refused", file=sys.stderr)
    return 0


def _completion_facts(completion: "CompletionOutput") -> dict[str, Any]:
    facts = {f.name: getattr(completion, f.name) for f in dataclasses.fields(completion) if f.repr and f.name[0] != "_"}
    facts["logprobs"] = facts["logprobs"] and [dataclasses.asdict(entry) for entry in facts["logprobs"]]
    return facts | {"kv": dataclasses.asdict(completion.kv)}


def _write_answer(out: typing.TextIO, answer: dict[str, Any], plain: bool) -> None:
    if plain:
        text = "\n\n".join(completion["text"] for completion in answer["outputs"])
    else:
        text = json.dumps(answer, ensure_ascii=False)
    print(text, file=out, flush=True)


@contextlib.contextmanager
def _opened(path: str | None) -> Iterator[typing.TextIO]:
    if path is None:
        yield sys.stdout
        return
    try:
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - errors of opening only
    except OSError as error:
        raise InputError("output", f"{path} cannot be written: {error}") from None
    with file:
        yield file


# ---- chat


def _chat(args: argparse.Namespace) -> int:
    from pagefold.engine.llm import LLM

    sampling = SamplingParams(**sampling_options(args))
    llm = LLM(**engine_options(args))
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages, usage, turn = list(opening), None, 0
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        if line == "/quit":
            return 0
        if line == "/reset":
            messages = list(opening)
        elif line == "/stats":
            print(_usage_words(usage))
        elif line.startswith("/"):
            print(f"unknown command {line}; known: /reset, /stats, /quit")
        elif line:
            turn += 1
            try:
                answer, usage = _stream(llm, f"turn-{turn}", [*messages, {"role": "user", "content": line}], sampling)
            except InputError as error:
                print(f"error: {error}; /reset starts over")
                continue
            messages += [{"role": "user", "content": line}, {"role": "assistant", "content": answer}]


def _stream(llm: Any, request_id: str, messages: list[dict[str, str]], sampling: SamplingParams) -> tuple[str, Any]:
    """Print an answer as it comes; Ctrl-C ends it early. Returns its text and its KV usage."""
    tokens = llm.tokenizer.apply_chat_template(messages)
    llm.submit(Request(request_id, tuple(tokens), sampling))
    text, usage = "", None
    try:
        while llm.engine.has_work:
            for output in llm.engine.step():
                new = output.outputs[0].text
                print(new[len(text) :], end="", flush=True)
                text, usage = new, output.kv
    except KeyboardInterrupt:
        llm.engine.abort(request_id)
    print()
    return text, usage


def _usage_words(usage: Any) -> str:
    if usage is None:
        return "nothing was said yet"
    return (
        f"{usage.rows_kept:.0f} rows a head kept of {usage.tokens} seen, after {usage.compactions} compactions; "
        f"{usage.bytes / 1e6:.1f} MB of pages, {usage.peak_bytes / 1e6:.1f} MB at most"
    )


# ---- inspect and bench


def _inspect(args: argparse.Namespace) -> None:
    from pagefold.bench.inspection import print_inspection

    print_inspection(EngineConfig.from_options(**engine_options(args)))


def _add_throughput_flags(parser: _Parser) -> None:
    group = parser.add_argument_group("work (default: 8 random prompts, 128 tokens in, 128 out)")
    kind = group.add_mutually_exclusive_group()
    kind.add_argument("--suite", choices=["cpu"], help="W1 and W2, full and folded, in bfloat16 and float32")
    named = "a published mix of requests, for a GPU: random weights, and KV memory, context and running requests set"
    kind.add_argument("--workload", choices=["nano", "reason", "long"], help=named)
    kind.add_argument("--dataset", metavar="FILE", help="JSONL file of requests, as for `pagefold generate`")
    group.add_argument("--num-requests", type=_parser_of(int), metavar="N", help="also for nano and reason")
    group.add_argument("--users", type=_parser_of(int), metavar="N", help="requests of the workload long (default: 2)")
    group.add_argument("--input-len", type=_parser_of(int), default=128, metavar="TOKENS")
    group.add_argument("--output-len", type=_parser_of(int), default=128, metavar="TOKENS")
    greedy = "of the draws; default: 0, greedy, and 0.6 for the workloads"
    group.add_argument("--temperature", type=_parser_of(float), metavar="X", help=greedy)
    often = "ask each prompt N times, with as many fewer prompts: what they share is a prefix"
    group.add_argument("--samples", type=_parser_of(int), default=1, metavar="N", help=often)
    rows = group.add_mutually_exclusive_group()
    parts = "a full cache, a folded one, and that with one part off at a time (prefix cache, redundancy, ...)"
    rows.add_argument("--ablate", action="store_true", help=parts)
    lengths = "a full cache and a folded one at each output length, such as 2048,4096,8192"
    rows.add_argument("--sweep-output-len", metavar="TOKENS,...", help=lengths)
    group.add_argument("--chart", metavar="FILE", help="picture of --ablate or --sweep-output-len")
    group.add_argument("--peer", action="append", default=[], choices=PEERS, help="may be repeated")
    python = "interpreter that has the peers, or PEER=PATH for one of them; default: this one"
    group.add_argument("--peer-python", action="append", default=[], metavar="PATH", help=python)
    path = "folder of the peers' packages, or PEER=PATH for one of them: the PYTHONPATH of their processes"
    group.add_argument("--peer-path", action="append", default=[], metavar="PATH", help=path)
    group.add_argument("--threads", type=_parser_of(int), metavar="N", help="CPU threads; default: all cores")
    group.add_argument("--json", metavar="FILE", help="write every figure")


def _throughput(args: argparse.Namespace) -> int:
    from pagefold.bench import ablate, sweep, throughput, workloads
    from pagefold.bench.peers import PeerHome
    from pagefold.models.sources import resolve

    options = engine_options(args)
    EngineConfig.from_options(**options)
    pythons, paths = (_by_peer(args.peer, texts) for texts in (args.peer_python, args.peer_path))
    homes = {name: PeerHome(pythons[name], paths[name]) for name in dict.fromkeys(args.peer)}
    if args.users is not None and args.workload != "long":
        raise InputError("users", "is for the workload long")
    if args.num_requests is not None and args.workload == "long":
        raise InputError("num_requests", "the workload long has --users instead")
    if args.chart and not (args.ablate or args.sweep_output_len):
        raise InputError("chart", "is of --ablate or --sweep-output-len")
    if args.suite and (args.ablate or args.sweep_output_len or args.samples != 1):
        raise InputError("suite", "is fixed: it goes with none of --ablate, --sweep-output-len, --samples")
    temperature = args.temperature or 0.0
    if args.suite:
        cases = workloads.suite_cases(options)
    elif args.workload:
        users = 2 if args.users is None else args.users
        cases = [workloads.named_case(args.workload, options, args.num_requests, users, args.temperature)]
    elif args.dataset:
        tokenizer = resolve(args.model).tokenizer()
        work = workloads.dataset_workload(args.dataset, tokenizer, args.output_len)
        work = dataclasses.replace(work, temperature=temperature)
        cases = [workloads.single_case(args.dataset, options, work)]
    else:
        num_requests = 8 if args.num_requests is None else args.num_requests
        cases = [workloads.random_case(options, num_requests, args.input_len, args.output_len, temperature)]
    if args.samples != 1:
        work = workloads.sampled_workload(cases[0].workload, args.samples)
        cases = [dataclasses.replace(cases[0], workload=work)]
    if args.ablate:
        ablation = ablate.ablation_of(cases[0], options)
        ok = ablate.run_ablation(ablation, homes, args.threads, args.json, args.chart)
    elif args.sweep_output_len:
        swept = sweep.sweep_cases(cases[0], sweep.parse_lengths(args.sweep_output_len))
        ok = sweep.run_sweep(swept, homes, args.threads, args.json, args.chart)
    else:
        ok = throughput.run_throughput(cases, homes, args.threads, args.json)
    return 0 if ok else 1


def _by_peer(peers: Sequence[str], texts: Sequence[str]) -> dict[str, str | None]:
    """{peer: path} from texts that are PEER=PATH, or a path for all of them; later ones win."""
    found: dict[str, str | None] = dict.fromkeys(peers)
    for text in texts:
        name, equals, path = text.partition("=")
        found |= {name: path} if equals and name in PEERS else dict.fromkeys(found, text)
    return found


def _add_capacity(verbs: Any) -> None:
    from pagefold.bench.capacity_work import add_flags

    text = "users with long contexts that fit, format by format, and their speed"
    add_flags(_verb(verbs, "capacity", _capacity, text))


def _capacity(args: argparse.Namespace) -> int:
    from pagefold.bench.capacity_cli import run
    from pagefold.eval.formats import format_quality

    return run(engine_options(args), args, format_quality)


def _add_gaps_flags(parser: _Parser) -> None:
    group = parser.add_argument_group("work")
    running = "requests that decode at once; may be repeated (default: 256, and 1)"
    group.add_argument("--num-requests", action="append", type=_parser_of(int), metavar="N", help=running)
    group.add_argument("--input-len", type=_parser_of(int), default=128, metavar="TOKENS")
    group.add_argument("--steps", type=_parser_of(int), default=60, metavar="N", help="measured (default: 60)")
    group.add_argument("--temperature", type=_parser_of(float), default=0.6, metavar="X", help="(default: 0.6)")
    group.add_argument("--json", metavar="FILE", help="write every figure")


def _gaps(args: argparse.Namespace) -> None:
    from pagefold.bench import gaps

    numbers = args.num_requests or [256, 1]
    gaps.run_gaps(engine_options(args), numbers, args.input_len, args.steps, args.temperature, args.json)


def _multiturn(args: argparse.Namespace) -> int:
    from pagefold.bench import multiturn_cli

    return multiturn_cli.run(args, engine_options(args))


def _layouts(args: argparse.Namespace) -> None:
    from pagefold.bench import layouts_cli

    layouts_cli.run(args, engine_options(args))


def _add_bench_serve(verbs: Any) -> None:
    from pagefold.bench.serve_flags import add_flags
    from pagefold.bench.serve_load import ServeBench

    text = "load on an OpenAI-compatible server: latencies, throughput, goodput"
    parser = verbs.add_parser("serve", help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.set_defaults(func=_bench_serve)
    for field in dataclasses.fields(ServeBench):
        _add_flag(parser, field, field.metadata["help"], field.default)
    parser.add_argument("--api-key", metavar="TEXT", help="default: the environment's OPENAI_API_KEY")
    limits = "limits in milliseconds that a good request keeps, such as ttft:500 tpot:50"
    parser.add_argument("--goodput", nargs="+", action="extend", default=[], metavar="METRIC:MS", help=limits)
    parser.add_argument("--json", metavar="FILE", help="write every figure, under the keys of vLLM's result file")
    add_flags(parser)


def _bench_serve(args: argparse.Namespace) -> int:
    try:
        from pagefold.bench.serve import run_serve
    except ModuleNotFoundError as error:
        raise InputError("bench serve", f"needs {error.name}: pip install 'pagefold[bench]'") from None
    from pagefold.bench.serve_flags import run_if_asked
    from pagefold.bench.serve_load import ServeBench

    names = [field.name for field in dataclasses.fields(ServeBench)]
    bench = ServeBench(**{name: getattr(args, name) for name in names if hasattr(args, name)})
    if (worked := run_if_asked(args, bench)) is not None:
        return 0 if worked else 1
    api_key = args.api_key or os.environ.get("OPENAI_API_KEY")
    return 0 if run_serve(bench, api_key, args.goodput, args.json) else 1


if __name__ == "__main__":
    sys.exit(main())
