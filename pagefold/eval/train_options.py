"""The options of `pagefold eval train-chains`. No torch here: the command line is made of them."""

from dataclasses import dataclass, field, fields
from typing import Any

from pagefold.core.types import InputError

GROWING = 0.3  # of the peak, the least learning rate while lines are still added


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainOptions:
    """What is trained, and how; each field is a flag of the command line. Raises InputError for what cannot be."""

    minutes: float = _option(8.0, "wall time of training")
    first_lines: int = _option(2, "lines of the first programs")
    most_lines: int = _option(100, "lines to grow to")
    tokens: int = _option(16384, "tokens of a step")
    lr: float = _option(1e-3, "peak learning rate")
    warmup: int = _option(200, "steps in which it rises to the peak")
    decay_from: float = _option(
        0.6, f"share of the minutes after which it falls, linearly to 0; to {GROWING} of it while lines are added"
    )
    seed: int = _option(0, "seed of the weights and the programs")
    hidden: int = _option(384, "width of the model")
    layers: int = _option(8, "its layers")
    heads: int = _option(6, "query heads of a layer")
    kv_heads: int = _option(2, "KV heads of a layer")
    head_dim: int = _option(64, "width of a head")
    intermediate: int = _option(1024, "width between the two products of an MLP")
    rope_theta: float = _option(10000.0, "base of the rotary frequencies")
    device: str = _option("cuda", "torch device")
    compile: bool = _option(False, "compile the model; pays on a GPU if training takes minutes")

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, (int, float)) and f.name not in ("compile", "seed") and not value > 0:
                raise InputError(f.name, f"got {value}, must be > 0")
        if not 2 <= self.first_lines <= self.most_lines:
            raise InputError("first_lines", f"got {self.first_lines}, must be in [2, most_lines ({self.most_lines})]")
        if not self.decay_from < 1:
            raise InputError("decay_from", f"got {self.decay_from}, must be below 1")
        if self.heads % self.kv_heads:
            raise InputError("kv_heads", f"got {self.kv_heads}, must divide heads ({self.heads})")
