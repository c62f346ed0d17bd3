"""The flags of `pagefold bench layouts`."""

import argparse
from typing import Any


def add_flags(parser: argparse.ArgumentParser) -> None:
    """`pagefold.bench.layouts` needs torch, so nothing of it is imported here."""
    group = parser.add_argument_group("work")
    text = "layout specs separated by ';', such as 'uniform;clustered:profile=FILE'; ratios are to the first"
    group.add_argument("--layouts", required=True, metavar="SPEC;...", help=text)
    text = "requests folded and decoding at once (default: 16)"
    group.add_argument("--num-requests", type=int, default=16, metavar="N", help=text)
    text = "of each prompt (default: 16384)"
    group.add_argument("--input-len", type=int, default=16384, metavar="TOKENS", help=text)
    group.add_argument("--json", metavar="FILE", help="write every figure")


def run(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Run the benchmark with these engine options."""
    from pagefold.bench import layouts

    specs = layouts.parse_layouts(args.layouts)
    layouts.run_layouts(options, specs, args.num_requests, args.input_len, args.json)
