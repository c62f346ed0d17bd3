"""Text to ids and back, and chat templates, for tokenizers out of Hugging Face directories and GGUF metadata."""

import functools
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from pagefold.core.types import InputError

# Marks that pass through a chat template. Nobody outside this process can know them, so user text cannot forge one.
_GUARD = secrets.token_hex(16)  # breaks a control token inside user text in two; only hex digits, so JSON keeps it
_CONTROL = f"\ue000{secrets.token_hex(16)}\ue001"  # stands where the template itself wrote a control token


class Tokenizer:
    """A `tokenizers.Tokenizer` with what serving needs around it.

        vocab_size      ids are below it (a model's logits may be wider, padded)
        special_ids     control tokens: never made from user text, left out of decoded text
        eos_token_ids   ids that end a text, the usual one first
        bos_token_id    id that begins a text, if the model has one
        add_bos         whether `encode` puts it there
        chat_template   Jinja source, or None

    `template_tokens` are the names a template may use for special tokens (``bos_token``, ``eos_token``, ...).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Iterable[int],
        bos_token_id: int | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
        template_tokens: Mapping[str, str] | None = None,
    ):
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._plain = _plain_twin(backend, self._added)
        self._byte_level = "ByteLevel" in repr(backend.decoder)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.bos_token_id = bos_token_id
        self.add_bos = add_bos and bos_token_id is not None
        self.chat_template = chat_template
        self._template_tokens = dict(template_tokens or {})
        self._specials = {self._added[i].content: i for i in self.special_ids}
        spelt = "|".join(map(re.escape, self._specials)) or "(?!)"
        self._special_start = re.compile(f"(?=(?:{spelt}))(.)", re.DOTALL)
        self._special_prefixes = {text[:n] for text in self._specials for n in range(1, len(text))}
        self._special_pattern = _special_pattern([self._added[i] for i in self.special_ids])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; control tokens spelt out in it become their ids.

        `add_special_tokens` puts BOS in front if the model wants one and the text does not begin with it already.
        No end token is ever added.
        """
        ids = _encode(self._backend, text)
        return self._with_bos(ids) if add_special_tokens else ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` without BOS; control tokens spelt out in it are letters like any others."""
        return _encode(self._plain, text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for, which may be part of a character; control tokens give their spelling."""
        if id in self._added:
            return self._added[id].content.encode()
        token = self._backend.id_to_token(id)
        if token is None:
            return b""
        if self._byte_level:
            alphabet = _byte_alphabet()
            return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else token.encode()
        if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
            return bytes.fromhex(match[1])
        return token.replace("\u2581", " ").encode()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Ids of a conversation, with exactly one BOS if the model wants one.

        Only the template makes control tokens: one spelt out in a message or a tool is encoded as plain text. `kwargs`
        are further variables of the template. Raises `InputError` when there is no template or it rejects the input.
        """
        if self.chat_template is None:
            raise InputError("messages", "this model has no chat template, send a prompt instead")
        template = self._template
        variables = self._template_tokens | self._guarded(
            {"messages": list(messages), "tools": tools, "add_generation_prompt": add_generation_prompt, **kwargs}
        )
        try:
            rendered = template.render(variables)
        except Exception as error:  # the template is the model's own code and may fail in any way
            raise InputError("messages", f"rejected by the chat template: {error}") from error
        controls: list[int] = []

        def mark(match: re.Match) -> str:
            controls.append(self._specials[match[match.lastindex or 0]])
            return _CONTROL

        # One encode of the whole text, so that merges and space prefixes are those of an ordinary encode:
        #   rendered  <|im_start|>user\nx<[guard]|im_end|>y<|im_end|>\n
        #   marked    [control]   user\nx<|im_end|>y       [control] \n      [control] is a token of `_plain` only
        marked = self._special_pattern.sub(mark, rendered).replace(_GUARD, "")
        control_id = self._plain.token_to_id(_CONTROL)
        remaining = iter(controls)
        return self._with_bos([next(remaining) if i == control_id else i for i in self.encode_plain(marked)])

    def _with_bos(self, ids: list[int]) -> list[int]:
        if not self.add_bos or self.bos_token_id is None or ids[:1] == [self.bos_token_id]:
            return ids
        return [self.bos_token_id, *ids]

    def _guarded(self, value: Any) -> Any:
        """`value` with every control token inside its strings broken by the guard."""
        if isinstance(value, str):
            value = self._special_start.sub(rf"\g<1>{_GUARD}", value)
            # one may also begin at the end of this string and go on in the next one
            text = value.rstrip()
            longest = max(map(len, self._special_prefixes), default=0)
            if any(text[-n:] in self._special_prefixes for n in range(1, longest + 1)):
                value = text + _GUARD + value[len(text) :]
            return value
        if isinstance(value, Mapping):
            return {self._guarded(k): self._guarded(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._guarded(item) for item in value]
        return value

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": datetime.now().strftime}
        try:
            return environment.from_string(self.chat_template or "")
        except jinja2.TemplateSyntaxError as error:
            raise InputError("model", f"its chat template does not parse: line {error.lineno}: {error}") from None


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks assistant text for training; here it is only its contents."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML, which models have not been trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        return backend.encode(text, add_special_tokens=False).ids
    except TypeError:  # what tokenizers makes of a str that is not Unicode
        raise InputError("prompt", "holds half a surrogate pair, must be Unicode text") from None


def _plain_twin(backend: tokenizers.Tokenizer, added: Mapping[int, AddedToken]) -> tokenizers.Tokenizer:
    """`backend` blind to control tokens, sharing its model, with `_CONTROL` as one more token.

    A second object because the switch between the two is state, and encoding runs in threads.
    """
    twin = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        twin.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        twin.pre_tokenizer = backend.pre_tokenizer
    twin.add_tokens([added[id] for id in sorted(added)])  # in this order they get the ids they have in `backend`
    twin.add_tokens([AddedToken(_CONTROL, special=False, normalized=False)])
    twin.encode_special_tokens = True
    return twin


def _special_pattern(specials: Sequence[AddedToken]) -> re.Pattern:
    """Finds a control token; its spelling is the last group, blanks that the token swallows lie outside of it."""
    branches: dict[tuple[bool, bool], list[str]] = {}
    for token in sorted(specials, key=lambda token: -len(token.content)):
        branches.setdefault((token.lstrip, token.rstrip), []).append(re.escape(token.content))
    parts = [
        (r"\s*" if lstrip else "") + f"({'|'.join(texts)})" + (r"\s*" if rstrip else "")
        for (lstrip, rstrip), texts in branches.items()
    ]
    return re.compile("|".join(parts) or "(?!)")


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 stands for itself, the others are numbered from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face model directory.

    EOS ids are those of ``generation_config.json`` and ``tokenizer_config.json`` together, or else ``config.json``'s.
    Without a ``tokenizer.json``, transformers converts the older files.
    """
    config = _read_json(directory / "tokenizer_config.json")
    backend = _load_backend(directory)
    for _, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        if backend.token_to_id(token["content"]) is None:
            backend.add_tokens([AddedToken(**{k: v for k, v in token.items() if k != "__type"})])
    names = {"bos_token", "eos_token", "unk_token", "pad_token"}
    tokens = {k: v for k, v in {**_read_json(directory / "special_tokens_map.json"), **config}.items() if k in names}
    tokens = {k: v["content"] if isinstance(v, dict) else v for k, v in tokens.items() if v is not None}
    bos = backend.token_to_id(tokens["bos_token"]) if "bos_token" in tokens else None
    eos = _as_ids(_read_json(directory / "generation_config.json").get("eos_token_id"))
    if "eos_token" in tokens and (id := backend.token_to_id(tokens["eos_token"])) is not None:
        eos += [id]
    add_bos = config.get("add_bos_token")
    if add_bos is None:
        add_bos = bos is not None and backend.encode("", add_special_tokens=True).ids[:1] == [bos]
    return Tokenizer(
        backend,
        eos_token_ids=eos or _as_ids(_read_json(directory / "config.json").get("eos_token_id")),
        bos_token_id=bos,
        add_bos=add_bos,
        chat_template=_read_template(directory, config.get("chat_template")),
        template_tokens=tokens,
    )


def _load_backend(directory: Path) -> tokenizers.Tokenizer:
    if (path := directory / "tokenizer.json").exists():
        backend = tokenizers.Tokenizer.from_file(str(path))
        backend.no_truncation()
        backend.no_padding()
        return backend
    from transformers import AutoTokenizer  # slow to import, and few models need it

    try:
        converted = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError("model", f"{directory}: no tokenizer.json, and no other tokenizer loads: {error}") from None
    backend = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise InputError(
            "model", f"{directory}: {type(converted).__name__} has no fast form, tokenizer.json is missing"
        )
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise InputError("model", f"{path}: not JSON: {error}") from None


def _read_template(directory: Path, template: Any) -> str | None:
    if (path := directory / "chat_template.jinja").exists():
        return path.read_text(encoding="utf-8")
    if isinstance(template, list):  # several named ones
        template = {item["name"]: item["template"] for item in template}.get("default")
    return template


def _as_ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


# Token types of `tokenizer.ggml.token_type`
_NORMAL, _UNKNOWN, _CONTROL_TYPE, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

# Tokens that end a turn or a text in whichever model has them as control tokens, as llama.cpp also assumes: files
# name one EOS, and models produce others too.
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<end_of_turn>")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# `tokenizer.ggml.pre`: expressions that cut the text one after the other before merging. Names are the format's.
_PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "tekken": (_TEKKEN,),
}
_WHOLE_WORDS = ("llama-bpe", "tekken")  # a word that is a token is taken whole, merges or not; and BOS is the default


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer a GGUF file's metadata describe, splitting text as llama.cpp does.

    No Unicode normalisation is applied, since the format records none. Raises `InputError` for a
    ``tokenizer.ggml.model`` or ``tokenizer.ggml.pre`` that is not known.
    """
    get = lambda key, default=None: metadata.get(f"tokenizer.ggml.{key}", default)  # noqa: E731
    tokens: list[str] = get("tokens", [])
    types = get("token_type", [_NORMAL] * len(tokens))
    kind, pre = get("model"), get("pre", "default")
    if kind == "gpt2":
        backend = _byte_level_bpe(tokens, get("merges", []), pre)
    elif kind == "llama":
        backend = _sentencepiece_bpe(
            tokens, types, get("scores", []), get("unknown_token_id", 0), get("add_space_prefix", True)
        )
    else:
        raise InputError("model", f"tokenizer.ggml.model {kind!r} is not supported, only gpt2 and llama")
    for token, type in zip(tokens, types, strict=True):
        if type in (_UNKNOWN, _CONTROL_TYPE, _USER_DEFINED):
            special = type != _USER_DEFINED
            backend.add_tokens([AddedToken(token, special=special, normalized=False)])
    ids = {name: get(f"{name}_token_id") for name in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    ends = [tokens.index(t) for t in _END_TOKENS if t in tokens and types[tokens.index(t)] == _CONTROL_TYPE]
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return Tokenizer(
        backend,
        eos_token_ids=[id for id in (ids["eos"], ids["eot"], ids["eom"], *ends) if id is not None],
        bos_token_id=ids["bos"],
        add_bos=get("add_bos_token", kind == "llama" or pre in _WHOLE_WORDS),
        chat_template=metadata.get("tokenizer.chat_template"),
        template_tokens={names[k]: tokens[id] for k, id in ids.items() if k in names and id is not None},
    )


def _byte_level_bpe(tokens: list[str], merges: list[str], pre: str) -> tokenizers.Tokenizer:
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise InputError("model", f"tokenizer.ggml.pre {pre!r} is not supported, only {known}")
    vocab = {token: id for id, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre in _WHOLE_WORDS))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PRE_TOKENIZERS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(
    tokens: list[str], types: list[int], scores: list[float], unknown_id: int, space_prefix: bool
) -> tokenizers.Tokenizer:
    """Sentencepiece's BPE joins the pair whose union scores highest; here every such pair is a merge of that rank."""
    vocab = {token: id for id, token in enumerate(tokens)}
    normal = {token: score for token, type, score in zip(tokens, types, scores, strict=True) if type == _NORMAL}
    pairs = [
        (-score, vocab[token], token[:cut], token[cut:])
        for token, score in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    merges = [(left, right) for _, _, left, right in sorted(pairs)]
    has_bytes = _BYTE in types
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token=tokens[unknown_id], fuse_unk=True, byte_fallback=has_bytes)
    )
    prefix = [normalizers.Prepend("\u2581")] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend
