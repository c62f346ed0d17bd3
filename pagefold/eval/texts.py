"""Texts to measure on, cut into windows of token ids, and shares of them."""

from collections.abc import Sequence
from fractions import Fraction
from importlib.resources import files
from pathlib import Path

from pagefold.core.types import InputError
from pagefold.models.tokenizer import Tokenizer

DEFAULT_TEXT = "persuasion"


def load_text(source: str = DEFAULT_TEXT) -> str:
    """The text of a UTF-8 file, or "persuasion": the first 100 KB of Jane Austen's novel (1818), which come along."""
    path = files("pagefold.eval") / "data" / "persuasion.txt" if source == DEFAULT_TEXT else Path(source)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("text", f"{source}: {error}") from None


def encode_text(tokenizer: Tokenizer | None, text: str) -> list[int]:
    """Ids of the text alone, with no BOS."""
    if tokenizer is None:
        raise InputError("model", "has no tokenizer, and texts are to be read")
    return tokenizer.encode(text, add_special_tokens=False)


def cut_windows(ids: Sequence[int], window: int, prefix: Sequence[int] = ()) -> list[list[int]]:
    """Windows of at most `window` tokens that do not overlap, each beginning with `prefix` (a model's BOS).

    The last may be shorter; one that would have nothing to predict is dropped.
    """
    step = window - len(prefix)
    if step < 2:
        raise InputError("window", f"got {window}, must be at least {len(prefix) + 2}")
    parts = (ids[start : start + step] for start in range(0, len(ids), step))
    return [[*prefix, *part] for part in parts if len(part) > 1]


def parse_share(text: str, field: str) -> Fraction:
    """A share in (0, 1], written "1/4" or "0.25"; InputError naming `field` otherwise."""
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share <= 1:
        raise InputError(field, f"got {text!r}, must be a share in (0, 1], such as 1/4")
    return share


def share_rows(num_tokens: int, share: Fraction, page_size: int) -> int:
    """Rows kept per head for a share of the tokens, rounded to whole pages, at least one."""
    return max(1, round(num_tokens * share / page_size)) * page_size
