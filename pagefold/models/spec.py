"""What a model is, as numbers: read from a Hugging Face config; whatever is not supported is refused by name.

Standard library only, so that a config can be checked without loading torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagefold.core.types import InputError

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "freq_factors")

# keys that some config classes do not default to what the shape implies, so a config has to give them
_REQUIRED = {
    "llama": (),
    "mistral": ("num_key_value_heads",),
    "qwen2": ("num_key_value_heads",),
    "qwen3": ("num_key_value_heads", "head_dim"),
}
# attributes that change the maths, each with the value at which it does not
_NEUTRAL = {
    "partial_rotary_factor": 1,
    "attention_multiplier": 1,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "logits_scaling": 1,
    "logit_scale": 1,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "query_pre_attn_scalar": 0,
    "clip_qkv": 0,
    "num_experts": 0,
    "num_local_experts": 0,
}
_ROPE_KEYS = {
    "factor": float,
    "attention_factor": float,
    "beta_fast": float,
    "beta_slow": float,
    "mscale": float,
    "mscale_all_dim": float,
    "truncate": bool,
    "low_freq_factor": float,
    "high_freq_factor": float,
    "factors": tuple,
}
_ROPE_KEYS_READ_ELSEWHERE = {
    "rope_type",
    "type",
    "rope_theta",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "finetuned",  # written by early YaRN checkpoints, never read by any model
}


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding: which frequencies, and for how many tokens they are meant.

    rope_type           one of `ROPE_TYPES`
    theta               base of the wavelengths
    original_max_position_embeddings   context in tokens that the frequencies were trained for, before any scaling
    factor              how many times longer the scaled context is (all types but "default" and "freq_factors")
    attention_factor    multiplies cos and sin (yarn); None derives it from factor, mscale and mscale_all_dim
    beta_fast, beta_slow, truncate       rotations that bound yarn's ramp, and whether its ends are whole dimensions
    low_freq_factor, high_freq_factor    bounds of llama3's ramp, as fractions of the original context
    factors             float[head_dim / 2] divisors of the frequencies ("freq_factors": how GGUF files store llama3)
    """

    original_max_position_embeddings: int
    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    factors: tuple[float, ...] = ()

    def __post_init__(self):
        if self.rope_type not in ROPE_TYPES:
            raise InputError("rope_type", f"got {self.rope_type!r}, must be one of {', '.join(ROPE_TYPES)}")
        for name in ("theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
            if getattr(self, name) <= 0:
                raise InputError(f"rope {name}", f"got {getattr(self, name)!r}, must be > 0")
        if self.rope_type == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            bounds = (
                f"got {self.low_freq_factor!r}, must lie between 0 and high_freq_factor ({self.high_freq_factor!r})"
            )
            raise InputError("rope low_freq_factor", bounds)

    @property
    def scaled_length(self) -> int:
        """Tokens that the scaled frequencies reach: factor * original."""
        return int(self.factor * self.original_max_position_embeddings)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer: pre-norm blocks of grouped-query attention and a gated SiLU MLP.

    The families differ only by these flags:

        qkv_bias, o_bias, mlp_bias   which projections carry a bias
        qk_norm                      RMSNorm of each query and key head before RoPE (Qwen3)
        tie_word_embeddings          the output head is the embedding
        sliding_window               tokens a query sees in the layers that look at least far; None: all of them
        dtype                        precision the checkpoint was published in, as the config spells it
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeSpec
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    hidden_act: str = "silu"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self):
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        )
        for name in (*sizes, "max_position_embeddings"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InputError(name, f"got {value!r}, must be an integer >= 1")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                "num_heads", f"got {self.num_heads}, must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise InputError("head_dim", f"got {self.head_dim}, must be even: RoPE rotates pairs")
        if self.hidden_act != "silu":
            raise InputError("hidden_act", f"got {self.hidden_act!r}, only 'silu' is supported")
        if self.rope.factors and len(self.rope.factors) != self.head_dim // 2:
            raise InputError(
                "rope factors", f"got {len(self.rope.factors)}, must be head_dim / 2 ({self.head_dim // 2})"
            )

    @property
    def max_model_len(self) -> int:
        """The model's context in tokens, if the user asks for none.

        Linear and yarn scaling multiply the original context; llama3 configs state the scaled one. Dynamic scaling
        starts at the original context, where it changes nothing (see `max_context`). With an active sliding window
        the context ends at the window, within which windowed and full attention are the same.
        """
        rope = self.rope
        return self._windowed(
            rope.scaled_length if rope.rope_type in ("linear", "yarn") else self.max_position_embeddings
        )

    @property
    def max_context(self) -> int:
        """The largest context in tokens that may be asked for.

        Beyond `max_model_len` only with dynamic scaling, whose frequencies depend on the context that is asked for.
        """
        if self.rope.rope_type == "dynamic":
            return self._windowed(max(self.max_position_embeddings, self.rope.scaled_length))
        return self.max_model_len

    def _windowed(self, tokens: int) -> int:
        return min(tokens, self.sliding_window or tokens)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelSpec":
        """Read a config.json, in the spelling of transformers 4 or 5. `InputError` (a ValueError) names what is
        missing, unknown or unsupported."""
        family = _family(config)
        _refuse_unsupported(config)
        for key in _REQUIRED[family]:
            _need(config, key)
        num_heads, hidden_size = _need(config, "num_attention_heads"), _need(config, "hidden_size")
        max_position_embeddings = _need(config, "max_position_embeddings")
        eos = config.get("eos_token_id")
        attention_bias = family in ("llama", "qwen3") and bool(config.get("attention_bias"))
        return cls(
            family=family,
            vocab_size=_need(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_need(config, "intermediate_size"),
            num_layers=_need(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or hidden_size // num_heads,
            max_position_embeddings=max_position_embeddings,
            rope=_rope(config, max_position_embeddings),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(config.get("tie_word_embeddings")),
            qkv_bias=attention_bias or family == "qwen2",
            o_bias=attention_bias,
            mlp_bias=family == "llama" and bool(config.get("mlp_bias")),
            qk_norm=family == "qwen3",
            sliding_window=_active_window(config, family),
            hidden_act=config.get("hidden_act", "silu"),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        )


def _need(config: Mapping[str, Any], key: str) -> Any:
    if key not in config:
        raise InputError(key, "missing from the model's config")
    return config[key]


def _family(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    name = names[0] if names else next((a for a, f in FAMILIES.items() if f == config.get("model_type")), None)
    if name not in FAMILIES:
        got = name or config.get("model_type")
        raise InputError("architectures", f"{got!r} is not supported, must be one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unnamed")
        raise InputError("quantization_config", f"weights quantized by {method!r} are not supported")
    for key, neutral in _NEUTRAL.items():
        if config.get(key) not in (None, neutral):
            raise InputError(key, f"got {config[key]!r}, only {neutral!r} is supported")
    for kind in config.get("layer_types") or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise InputError("layer_types", f"{kind!r} is not supported, only full_attention and sliding_attention")


def _active_window(config: Mapping[str, Any], family: str) -> int | None:
    """The sliding window, if any layer uses it. Mistral: all layers; others: if switched on, the layers listed."""
    window = config.get("sliding_window")
    if not window or family == "mistral":
        return window or None
    if not config.get("use_sliding_window"):
        return None
    kinds, first = config.get("layer_types"), config.get("max_window_layers", 0 if family == "llama" else 28)
    used = "sliding_attention" in kinds if kinds else first < _need(config, "num_hidden_layers")
    return window if used else None


def _rope(config: Mapping[str, Any], max_position_embeddings: int) -> RopeSpec:
    """`rope_scaling` beside `rope_theta` (transformers 4) or `rope_parameters` (5), with `type` or `rope_type`."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    for key, value in given.items():
        if isinstance(value, Mapping):
            raise InputError("rope_parameters", f"one set for each layer type ({key!r}, ...) is not supported")
        if key not in _ROPE_KEYS and key not in _ROPE_KEYS_READ_ELSEWHERE:
            raise InputError("rope_parameters", f"unknown key {key!r}; known: {', '.join(_ROPE_KEYS)}")
    if given.get("partial_rotary_factor") not in (None, 1):
        raise InputError("partial_rotary_factor", f"got {given['partial_rotary_factor']!r}, only 1 is supported")
    rope_type = given.get("rope_type") or given.get("type") or "default"
    options = {key: parse(given[key]) for key, parse in _ROPE_KEYS.items() if given.get(key) is not None}
    original = max_position_embeddings
    if rope_type in ("yarn", "llama3"):
        original = (
            config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings") or original
        )
    if rope_type == "yarn":
        options.setdefault("factor", max_position_embeddings / original)
    required = {"linear": ["factor"], "dynamic": ["factor"], "freq_factors": ["factors"]}
    required["llama3"] = ["factor", "low_freq_factor", "high_freq_factor"]
    for key in required.get(rope_type, []):
        if key not in options:
            raise InputError(f"rope {key}", f"missing, rope_type {rope_type!r} needs it")
    theta = given.get("rope_theta") or config.get("rope_theta") or 10000.0
    return RopeSpec(rope_type=rope_type, theta=float(theta), original_max_position_embeddings=original, **options)
