"""The flags of `pagefold bench multiturn`."""

import argparse
import json
from dataclasses import replace
from typing import Any

from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError

RIVALS = ("full", "anew")


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a JSON object")
    return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    """`pagefold.bench.multiturn` needs torch, so nothing of it is imported here."""
    group = parser.add_argument_group(
        "chats (default: 48 of 4 turns, a published mix; each round after the one before)"
    )
    group.add_argument("--sessions", type=int, metavar="N", help="conversations (default: 48)")
    group.add_argument("--turns", type=int, metavar="N", help="turns of each (default: 4)")
    group.add_argument("--first-len", metavar="TOKENS", help="first turns, a number or a range (default: 12288:20480)")
    group.add_argument("--next-len", metavar="TOKENS", help="later turns (default: 512:2048)")
    text = 'instead: JSONL, a conversation a line, {"turns": [text or token ids, ...]}'
    group.add_argument("--dataset", metavar="FILE", help=text)
    group.add_argument("--output-len", type=int, default=256, metavar="TOKENS", help="of each answer (default: 256)")
    text = "mean seconds between an answer and the next turn, instead of rounds"
    group.add_argument("--think-time", type=float, metavar="S", help=text)
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="of the draws (default: 0, greedy)")
    text = "serve them also with every row kept (full), or folded and computed anew each turn (anew); may be repeated"
    group.add_argument("--against", action="append", default=[], choices=RIVALS, help=text)
    group.add_argument("--peer", action="append", default=[], choices=["vllm"], help="with its prefix cache on")
    group.add_argument("--peer-python", metavar="PATH", help="interpreter that has the peer; default: this one")
    group.add_argument("--peer-path", metavar="PATH", help="folder of the peer's packages: its PYTHONPATH")
    text = "keywords of the peer's engine beside the memory, context and running requests of ours"
    group.add_argument("--peer-options", type=_json, default={}, metavar="JSON", help=text)
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads; default: all cores")
    group.add_argument("--json", metavar="FILE", help="write every figure")
    group.add_argument("--chart", metavar="FILE", help="write a picture, PNG or SVG")


def run(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Run the benchmark with these engine options; the exit code."""
    from pagefold.bench import multiturn
    from pagefold.bench.chats import LARGEST_ID, parse_span, random_chats, read_chats
    from pagefold.bench.peers import PeerHome
    from pagefold.models.sources import resolve
    from pagefold.models.spec import ModelSpec

    EngineConfig.from_options(**options)
    if args.think_time is not None and args.think_time < 0:
        raise InputError("think_time", f"got {args.think_time}, must be >= 0")
    shape = {name: getattr(args, name) for name in ("sessions", "turns", "first_len", "next_len")}
    given: dict[str, Any] = {name: value for name, value in shape.items() if value is not None}
    if args.dataset:
        if given:
            raise InputError(next(iter(given)), "is not for chats that come from a file")
        source = resolve(args.model)
        tokenizer = source.tokenizer() if options.get("load_format") != "dummy" or source.has_tokenizer else None
        chats = read_chats(args.dataset, tokenizer, args.output_len)
    else:
        for name in given.keys() & {"first_len", "next_len"}:
            given[name] = parse_span(name, given[name])
        largest_id = min(LARGEST_ID, ModelSpec.from_hf(resolve(args.model).config()).vocab_size - 1)
        chats = random_chats(**given, output_len=args.output_len, largest_id=largest_id)
    chats = replace(chats, temperature=args.temperature, think_s=args.think_time)
    homes = {name: PeerHome(args.peer_python, args.peer_path) for name in dict.fromkeys(args.peer)}
    files = {"threads": args.threads, "json_file": args.json, "chart": args.chart}
    against = list(dict.fromkeys(args.against))
    return 0 if multiturn.run_multiturn(options, chats, against, homes, args.peer_options, **files) else 1
