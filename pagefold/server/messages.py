"""What the HTTP front and the engine process say to each other. Sent as MessagePack; every field is plain data."""

from typing import Any

import msgspec
from msgspec import Struct


class Grammar(Struct):
    """What an answer must look like.

    kind   "json_object" (any JSON object), "json_schema", "regex", "grammar" (Lark, as llguidance reads it) or
           "structural_tag"
    text   the schema, expression or grammar; empty for "json_object"
    """

    kind: str
    text: str


# ---- front to engine


class Generate(Struct, tag=True):
    """Continue a prompt.

    id         unique among the requests being served
    prompt     token ids
    sampling   fields of `SamplingParams`; the engine checks them
    """

    id: str
    prompt: list[int]
    sampling: dict[str, Any]
    priority: int = 0
    cache_salt: str = ""
    grammar: Grammar | None = None


class Abort(Struct, tag=True):
    """Stop these requests wherever they are; unknown ids are ignored."""

    ids: list[str]


class Ask(Struct, tag=True):
    """A question that an `Answer` with the same `seq` follows: stats, pool, reset_prefix_cache, ping or drain."""

    seq: int
    what: str


# ---- engine to front


class Logprobs(Struct):
    """Log-probabilities at one position: the chosen id first, then the best alternatives, best first (rank from 1)."""

    ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class Delta(Struct, omit_defaults=True):
    """What one continuation of a request got since the delta before.

    index               which of the `n` continuations
    text                new text; held back while it may become a stop string or is half a character
    logprobs            one per new token, if asked for
    finish_reason       "stop", "length" or "abort", in the continuation's last delta
    stop_reason         the stop string or stop token id that ended it
    error               why it failed, if it did
    kv                  what it held in KV memory, when it finished: tokens, rows_kept, rows_evicted, compactions,
                        bytes, peak_bytes, preemptions
    prompt_logprobs     of the whole prompt, the first token's None: in the first delta of continuation 0
    num_cached_tokens   tokens of the prompt that were in the prefix cache
    queue_s, prefill_s  seconds it waited for its first step, and from then to its first token: in its first delta
    last                every continuation of the request has ended: nothing more will come
    """

    id: str
    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    kv: dict[str, Any] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    num_cached_tokens: int = 0
    queue_s: float | None = None
    prefill_s: float | None = None
    last: bool = False


class Deltas(Struct, tag=True):
    """What one step of the engine produced."""

    items: list[Delta]


class Refused(Struct, tag=True):
    """A request that cannot be served, and which of its fields is to blame."""

    id: str
    field: str
    message: str


class Answer(Struct, tag=True):
    """The answer to the `Ask` with this `seq`, or why there is none."""

    seq: int
    value: Any
    error: str | None = None


class Ready(Struct, tag=True):
    """The engine serves.

    facts   max_model_len, vocab_size, `options` (rows of option, asked, got, why), `memory` (lines), `defaults` (of
            the sampling, from the model's generation_config.json)
    """

    facts: dict[str, Any]


class Fatal(Struct, tag=True):
    """The engine cannot go on, or could not start; `field` names the option to blame, if one is."""

    message: str
    field: str | None = None


ToEngine = Generate | Abort | Ask
ToFront = Deltas | Refused | Answer | Ready | Fatal

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_front = msgspec.msgpack.Decoder(ToFront).decode
