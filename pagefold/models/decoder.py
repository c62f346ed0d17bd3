"""The decoder: one class for Llama, Mistral, Qwen2 and Qwen3, whose differences are flags of the spec."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, dtype

from pagefold.backends.base import Backend, ForwardInputs, HeadTurn, KVView
from pagefold.models.layers import Linear, RMSNorm
from pagefold.models.rope import cos_sin, inv_freq
from pagefold.models.spec import ModelSpec


@dataclass
class Layer:
    """One block.

    qkv        [(Hq + 2 H) D, hidden]: rows of all query heads, then key heads, then value heads
    qk_norm    weight [2, D], or None
    gate_up    [2 F, hidden]: rows of the gate, then of what it scales
    """

    attention_norm: RMSNorm
    qkv: Linear
    qk_norm: RMSNorm | None
    o: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


@dataclass
class Weights:
    """embed: [vocab, hidden]; a tied head holds the same values, on a CPU in a layout of its own."""

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

    def __init__(self, spec: ModelSpec, weights: Weights, dtype: dtype, max_model_len: int | None = None):
        self.spec = spec
        self.weights = weights
        self.dtype = dtype
        self.device = weights.embed.device
        self.max_model_len = max_model_len or spec.max_model_len
        self.scale = spec.head_dim**-0.5
        self.inv_freq = inv_freq(spec.rope, spec.head_dim, self.max_model_len).to(self.device)
        table = cos_sin(spec.rope, self.inv_freq, self.max_model_len, weights.norm.weight.dtype)
        self._turns = [HeadTurn(table, *(layer.qk_norm or (None, 0.0))) for layer in weights.layers]

    def forward(self, fwd: ForwardInputs, kv: KVView, backend: Backend) -> Tensor:
        """Run the batch through all layers and store its K and V. Returns [T, hidden], the final norm applied."""
        layers, head_dim = self.weights.layers, self.spec.head_dim
        x = F.embedding(fwd.tokens, self.weights.embed)
        if len(x) <= backend.few_tokens:
            return self._forward_few(x, fwd, kv, backend)
        h = backend.rms_norm(x, *layers[0].attention_norm)
        for index, layer in enumerate(layers):
            qkv = layer.qkv(h).view(len(x), -1, head_dim)
            own = kv.of(index)
            q = backend.append(own, index, qkv, fwd, self._turns[index])
            out = backend.attend(own, index, q, fwd, self.scale)
            h = backend.add_rms_norm(x, layer.o(out.view(len(x), -1)), *layer.mlp_norm)
            delta = layer.down(backend.silu_mul(layer.gate_up(h)))
            after = layers[index + 1].attention_norm if index + 1 < len(layers) else self.weights.norm
            h = backend.add_rms_norm(x, delta, *after)
        return h

    def _forward_few(self, x: Tensor, fwd: ForwardInputs, kv: KVView, backend: Backend) -> Tensor:
        """The same for so few tokens that reading the weights is all that counts."""
        for index, layer in enumerate(self.weights.layers):
            own, qkv = kv.of(index), backend.product(x, layer.qkv.weight, layer.qkv.bias, norm=layer.attention_norm)
            q = backend.append(own, index, qkv.view(len(x), -1, self.spec.head_dim), fwd, self._turns[index])
            out = backend.attend(own, index, q, fwd, self.scale).view(len(x), -1)
            backend.product(out, layer.o.weight, layer.o.bias, add_to=x)
            h = backend.product(x, layer.gate_up.weight, layer.gate_up.bias, norm=layer.mlp_norm, gate=True)
            backend.product(h, layer.down.weight, layer.down.bias, add_to=x)
        return backend.rms_norm(x, *self.weights.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab] of rows hidden[N, hidden] of `forward`'s result, in the model's dtype."""
        return self.weights.head(hidden)
