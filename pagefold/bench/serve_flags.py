"""The flags of `pagefold bench serve` that have servers started: what they are and what they mean."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from pagefold.core.types import InputError

if TYPE_CHECKING:
    from pagefold.bench.serve_load import ServeBench


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("servers that are started, measured one by one, and ended again")
    group.add_argument("--serve", metavar="MODEL", help="measure our server of this model, and the engine offline")
    options = "engine options of --serve, such as load_format and max_num_seqs"
    group.add_argument("--serve-options", type=_object, default={}, metavar="JSON", help=options)
    group.add_argument("--offline", action=argparse.BooleanOptionalAction, default=True, help="(default: yes)")
    group.add_argument("--peer", action="append", default=[], choices=["vllm"], help="also measure this one's server")
    group.add_argument("--peer-python", metavar="PATH", help="interpreter that has the peer; default: this one")
    group.add_argument("--peer-path", metavar="PATH", help="folder of its packages: the PYTHONPATH of its processes")
    options = "more options of the peer's server, which has those of --serve-options that both know"
    group.add_argument("--peer-options", type=_object, default={}, metavar="JSON", help=options)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a JSON object")
    return value


def run_if_asked(args: argparse.Namespace, bench: "ServeBench") -> bool | None:
    """Whether our server worked; None if no server is to be started. Raises InputError for flags that need one."""
    if args.serve is None:
        for name in ("peer", "serve_options", "peer_options", "peer_python", "peer_path"):
            if getattr(args, name):
                raise InputError(name, "is for servers that are started here; needs --serve")
        return None
    from pagefold.bench.peers import PeerHome
    from pagefold.bench.serve_compare import Contest, run_contest
    from pagefold.bench.serve_report import parse_goodput

    peers = {name: PeerHome(args.peer_python, args.peer_path) for name in args.peer}
    contest = Contest(args.serve, args.serve_options, peers, args.peer_options, args.offline)
    return run_contest(bench, contest, parse_goodput(args.goodput), args.json)
