"""What `pagefold bench capacity` measures, and its flags; cheap to import."""

import argparse
from dataclasses import dataclass

from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError


@dataclass(frozen=True)
class Growth:
    """What every engine is given.

    context         tokens of a user, prompt and output together
    output_len      of these, tokens to generate: all counts of users are measured on the way
    users           counts to measure, as far as they fit; the clean capacity is always measured
    steps           tokens of each user measured at a count
    clone_prompts   users after the first get copies of the first one's rows, on pages of their own, instead of reading
                    a prompt themselves
    """

    context: int = 131_072
    output_len: int = 1024
    users: tuple[int, ...] = (1, 2, 4, 8)
    steps: int = 128
    clone_prompts: bool = False

    def __post_init__(self):
        for field, value, low in (
            ("output_len", self.output_len, 1),
            ("context_lens", self.context, self.output_len + 2),
            ("steps", self.steps, 2),
            ("users", min(self.users, default=1), 1),
        ):
            if value < low:
                raise InputError(field, f"got {value}, must be an integer >= {low}")

    def check(self, config: EngineConfig) -> None:
        """Raise InputError if the engine's rows cannot be copied as asked."""
        moves = config.eviction.kv_eviction != "none" or config.cache.kv_cold_format is not None
        if self.clone_prompts and moves:
            raise InputError("clone_prompts", "needs rows that stay where they are: no eviction and no cold tier")

    @property
    def prompt_len(self) -> int:
        return self.context - self.output_len


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("work")
    add, whole = group.add_argument, Growth()
    add("--formats", default="bf16,fp8,int4,k4v2", help="row formats to compare (default: %(default)s)")
    text = "tokens of a user, prompt and output, one run for each (default: %(default)s)"
    add("--context-lens", default=str(whole.context), metavar="N,N", help=text)
    text = "counts of users to measure, besides the most that fit (default: %(default)s)"
    add("--users", default=",".join(map(str, whole.users)), metavar="N,N", help=text)
    add("--output-len", type=int, default=whole.output_len, metavar="N", help="of the context (default: %(default)s)")
    text = "tokens of each user measured at a count (default: %(default)s)"
    add("--steps", type=int, default=whole.steps, metavar="N", help=text)
    text = "copy the first user's rows to the others' pages, instead of having every user read a prompt"
    add("--clone-prompts", action="store_true", help=text)
    add("--peer", choices=["vllm"], help="run it beside, in bf16 and in fp8; it reads every prompt")
    add("--peer-python", metavar="PATH", help="interpreter that has the peer; default: this one")
    add("--peer-path", metavar="PATH", help="folder of the peer's packages")
    add("--threads", type=int, metavar="N", help="CPU threads; default: all cores")
    add("--json", metavar="FILE", help="write every figure")
    add("--chart", metavar="FILE", help="draw users against tokens per second (.png, .svg or .pdf)")


def numbers(field: str, text: str) -> tuple[int, ...]:
    """Integers of a list "1,2,4", at least one."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(field, f"got {text!r}, must be integers separated by commas") from None
    return tuple(dict.fromkeys(found))
