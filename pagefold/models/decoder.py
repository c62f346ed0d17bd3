"""The decoder: one class for Llama, Mistral, Qwen2 and Qwen3, whose differences are flags of the spec."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pagefold.backends.base import Backend, ForwardInputs, KVView
from pagefold.models.layers import Linear, RMSNorm
from pagefold.models.rope import Rotary, rotate_
from pagefold.models.spec import ModelSpec


@dataclass
class Layer:
    """One block.

    qkv        [(Hq + 2 H) D, hidden]: rows of all query heads, then key heads, then value heads
    qk_norm    weight [Hq + H, D], or None
    """

    attention_norm: RMSNorm
    qkv: Linear
    qk_norm: RMSNorm | None
    o: Linear
    mlp_norm: RMSNorm
    gate: Linear
    up: Linear
    down: Linear


@dataclass
class Weights:
    """embed: [vocab, hidden]; a tied head holds the same values in a layout of its own."""

    embed: Tensor
    layers: list[Layer]
    norm: RMSNorm
    head: Linear


class Decoder:
    """Hidden states and logits of a batch of chunks; the cache belongs to the backend.

    scale       what attention scores are multiplied by before the softmax
    inv_freq    float32[D/2], RoPE frequencies in radians per token
    max_model_len   tokens the RoPE table reaches: positions are below it (default: `spec.max_model_len`)
    """

    def __init__(self, spec: ModelSpec, weights: Weights, dtype: torch.dtype, max_model_len: int | None = None):
        self.spec = spec
        self.weights = weights
        self.dtype = dtype
        self.max_model_len = max_model_len or spec.max_model_len
        self.scale = spec.head_dim**-0.5
        self.rotary = Rotary(spec.rope, spec.head_dim, self.max_model_len, dtype)
        self.inv_freq = self.rotary.inv_freq

    def forward(self, fwd: ForwardInputs, kv: KVView, backend: Backend) -> Tensor:
        """Run the batch through all layers and store its K and V. Returns [T, hidden] before the final norm, which
        `logits` applies to the rows it is given."""
        x = F.embedding(fwd.tokens, self.weights.embed)
        cos, sin = self.rotary(fwd.positions)
        for index, layer in enumerate(self.weights.layers):
            q, k, v = self._qkv(layer, x, cos, sin)
            backend.append(kv, index, q, k, v, fwd)
            out = backend.attend(kv, index, q, fwd, self.scale)
            x = layer.o.plus(out.flatten(1).to(x.dtype), x)
            h = layer.mlp_norm(x)
            x = layer.down.plus(layer.up.times(h, layer.gate.silu(h)), x)
        return x

    def _qkv(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys (normed, rotated) and values, as [T, heads, D] views of shared memory."""
        num_heads, num_kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        num_qk = num_heads + num_kv_heads
        qkv = layer.qkv(layer.attention_norm(x)).view(-1, num_qk + num_kv_heads, self.spec.head_dim)
        qk = qkv[:, :num_qk]
        if layer.qk_norm:
            qk = layer.qk_norm(qk)
        rotate_(qk, cos, sin)
        return qk[:, :num_heads], qk[:, num_heads:], qkv[:, num_qk:]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of rows hidden[N, hidden] of `forward`'s result: float32[N, vocab], or float64 for a float64 model."""
        out = self.weights.head(self.weights.norm(hidden))
        return out if out.dtype == torch.float64 else out.float()
