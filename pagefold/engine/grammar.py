"""Answers that must have a form: JSON schemas, regular expressions and grammars, as masks of the ids allowed next.

Grammars are compiled off the engine's thread and within limits, and checked before a request starts. One that does not
compile is refused; one whose limits are met on the way ends its request with an error. Nothing goes on without its
grammar.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, Protocol

import numpy as np

from pagefold.core.types import STRUCTURED_OUTPUTS, InputError, SampleSpec

FIELDS = {
    "json_object": "response_format",
    "json_schema": "response_format",
    "structural_tag": "response_format",
    "regex": "structured_outputs.regex",
    "grammar": "structured_outputs.grammar",
}
MAX_JSON_BYTES, MAX_TEXT_BYTES = 1 << 18, 1 << 16  # of schemas, and of what nests more with fewer letters
STACK_BYTES = 1 << 28  # of a compiling thread: compilers recurse as deep as texts of these sizes can nest
NUM_THREADS = 2
COMPILED_KEPT = 128
WHITESPACE = r"[ \n\t]{0,32}"  # between the parts of JSON: a model that indents for ever says nothing more


class Vocabulary(Protocol):
    """What is needed of a tokenizer.

    token_bytes    what an id adds to a text
    special_ids    control tokens, which no grammar spells out
    encode_plain   a text without control tokens
    """

    bos_token_id: int | None

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, id: int) -> bytes: ...

    def encode_plain(self, text: str) -> list[int]: ...


class Matcher:
    """Follows one answer through its grammar.

    compiled     an `llguidance.LLMatcher`
    vocab_size   of the logits
    """

    def __init__(self, compiled: Any, vocab_size: int):
        self._matcher = compiled
        self.vocab_size = vocab_size

    def copy(self) -> "Matcher":
        return Matcher(self._matcher.deep_copy(), self.vocab_size)

    def accept(self, token: int) -> None:
        """The answer goes on with this id."""
        self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """The answer has its form, and nothing can follow it."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why there is no telling any more what may follow: a limit was met, or an id that was not allowed."""
        if not self._matcher.is_error():
            return None
        return f"the answer cannot be kept to its grammar: {_reason(self._matcher)}"


def form_of(field: str, way: str, value: Any) -> tuple[str, str]:
    """(kind, text) for `GrammarCompiler.submit` of one of `STRUCTURED_OUTPUTS` and its value.

    json is a schema, as a dict or as its text; choice a list of texts; json_object true; the others are texts.
    Raises InputError, naming `field`, for a value of another type.
    """
    if way not in STRUCTURED_OUTPUTS:
        raise InputError(field, f"unknown; known: {', '.join(STRUCTURED_OUTPUTS)}")
    match way, value:
        case "json", dict() | str():
            return "json_schema", value if isinstance(value, str) else json.dumps(value)
        case "choice", []:
            raise InputError(field, "is empty: there must be at least one choice")
        case "choice", list() if all(isinstance(text, str) for text in value):
            return "regex", "|".join(map(re.escape, value))
        case "json_object", True:
            return "json_object", ""
        case (("regex" | "grammar" | "structural_tag"), str()):
            return way, value
    wanted = {"json": "a JSON schema", "choice": "a list of texts", "json_object": "true"}.get(way, "text")
    raise InputError(field, f"got {value!r}, must be {wanted}")


def fill_masks(rows: Sequence[tuple[Matcher, SampleSpec]]) -> None:
    """Set the masks of specs whose sequences follow a grammar; all bits are 0 where the matcher has an error."""
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask, fill_next_token_bitmask_par

    words = allocate_token_bitmask(len(rows), rows[0][0].vocab_size)
    sound = [(matcher._matcher, i) for i, (matcher, _) in enumerate(rows) if not matcher.error]
    if len(sound) == 1:
        fill_next_token_bitmask(sound[0][0], words, sound[0][1])
    elif sound:
        fill_next_token_bitmask_par(_executor(), sound, words)
    for (matcher, spec), mask in zip(rows, words, strict=True):
        if matcher.error:
            mask[:] = 0
        spec.mask = mask.view(np.uint32)


@cache
def _executor() -> Any:
    from llguidance import LLExecutor

    return LLExecutor()


class GrammarCompiler:
    """Makes matchers for one tokenizer. Making the compiler takes about a second for a large vocabulary.

    vocab_size   of the logits; ids that the tokenizer does not know are never allowed
    """

    def __init__(self, tokenizer: Vocabulary, vocab_size: int, eos_token_ids: Sequence[int]):
        from llguidance import LLTokenizer

        vocabulary: Any = _Wrapper(tokenizer, vocab_size, eos_token_ids)
        self._tokenizer = LLTokenizer(vocabulary, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self._compiled: OrderedDict[tuple[str, str], Matcher] = OrderedDict()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        usual = threading.stack_size(STACK_BYTES)  # of threads that start now: have all of them start
        meeting = threading.Barrier(NUM_THREADS)
        list(self._threads.map(lambda _: meeting.wait(), range(NUM_THREADS)))
        threading.stack_size(usual)

    def submit(self, kind: str, text: str) -> "Future[Matcher]":
        """Have another thread compile a grammar of a kind that is in `FIELDS`.

        The result is a matcher in its first state, or an InputError that names the field of the request and says why.
        """
        return self._threads.submit(self._matcher, kind, text)

    def _matcher(self, kind: str, text: str) -> Matcher:
        if kind not in FIELDS:
            raise InputError("response_format", f"got {kind!r}, must be one of {', '.join(FIELDS)}")
        field, size = FIELDS[kind], len(text.encode(errors="replace"))
        limit = MAX_JSON_BYTES if field == "response_format" else MAX_TEXT_BYTES
        if size > limit:
            raise InputError(field, f"has {size} bytes, at most {limit} are compiled")
        if (found := self._compiled.get((kind, text))) is None:
            found = self._compiled[kind, text] = Matcher(self._compile(kind, field, text), self._tokenizer.vocab_size)
            while len(self._compiled) > COMPILED_KEPT:
                self._compiled.popitem(last=False)
        return found.copy()

    def _compile(self, kind: str, field: str, text: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        try:
            limits = LLParserLimits(verbose_errors=False)
            matcher = LLMatcher(self._tokenizer, _source(kind, text), log_level=0, limits=limits)
        except (ValueError, TypeError, KeyError, AssertionError, RecursionError) as error:
            raise InputError(field, f"is no {kind.replace('_', ' ')}: {error}") from None
        if matcher.is_error():
            raise InputError(field, f"does not compile: {_reason(matcher)}")
        tried = matcher.deep_copy()
        tried.compute_bitmask()  # only now does it show if nothing can begin an answer
        if tried.is_error() or tried.is_stopped():
            raise InputError(field, "is met by no answer but an empty one, if by any")
        return matcher


def _reason(matcher: Any) -> str:
    """The error of an `LLMatcher`, without the state dumped after it."""
    return matcher.get_error().split("\n<")[0].strip()


def _source(kind: str, text: str) -> str:
    """What llguidance calls a grammar."""
    from llguidance import LLMatcher, StructTag

    options: Any = {"whitespace_pattern": WHITESPACE}
    if kind == "json_object":
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=options)
    if not text:
        raise ValueError("it is empty")
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, overrides=options)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(text)
    # {"triggers": ["<fn"], "structures": [{"begin": "<fn=add>", "schema": {...}, "end": "</fn>"}]}
    wanted = json.loads(text)
    tags = [
        StructTag(
            trigger=max((t for t in wanted["triggers"] if tag["begin"].startswith(t)), key=len),
            begin=tag["begin"],
            grammar=dict(tag["schema"]),
            end=tag["end"],
        )
        for tag in wanted["structures"]
    ]
    return StructTag.to_grammar(tags, assume_special=False)


class _Wrapper:
    """A tokenizer as llguidance wants one."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Vocabulary, vocab_size: int, eos_token_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = eos_token_ids[0], tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(id) for id in range(vocab_size)]
        self.special_token_ids = sorted(id for id in tokenizer.special_ids if id < vocab_size)

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode_plain(text if isinstance(text, str) else text.decode(errors="replace"))
