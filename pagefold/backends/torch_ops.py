"""The arithmetic between matrix products in plain torch: the truth that fused kernels are tested against."""

from typing import Protocol

import torch
from torch import Tensor

from pagefold.backends.base import HeadTurn, KVView


def rms_normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * weight / sqrt(mean(x^2) + eps) over the last dimension (arXiv 1910.07467), computed in weight's dtype."""
    wide = x.to(weight.dtype)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Heads x[T, H, D] turned by cos_sin[T, 2, D / 2], channel i with i + D / 2 (RoFormer, arXiv 2104.09864)."""
    cos, sin = cos_sin[:, None].unbind(2)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def split_heads(qkv: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv[T, Hq + 2 H, D] as views of queries, keys and values."""
    q, k, v = qkv.split((qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), 1)
    return q, k, v


def turned_heads(
    qkv: Tensor, num_kv_heads: int, positions: Tensor, turn: HeadTurn | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys as attention needs them, and values: [T, heads, D] each, in qkv's dtype."""
    q, k, v = split_heads(qkv, num_kv_heads)
    if turn is None:
        return q, k, v
    cos_sin = turn.cos_sin[positions]
    ready = []
    for index, x in enumerate((q, k)):
        wide = x.to(cos_sin.dtype)
        if turn.weight is not None:
            wide = rms_normed(wide, turn.weight[index], turn.eps)
        ready.append(rotated(wide, cos_sin).to(x.dtype))
    return ready[0], ready[1], v


class _Ops(Protocol):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...


def plain_product(
    ops: _Ops,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None,
    gate: bool,
    add_to: Tensor | None,
) -> Tensor:
    """`Backend.product`, one operation after the other."""
    out = torch.nn.functional.linear(ops.rms_norm(x, *norm) if norm else x, weight, bias)
    out = ops.silu_mul(out) if gate else out
    return out if add_to is None else add_to.add_(out)


class TorchOps:
    """The layers' part of a backend, and nothing to warm up."""

    def warm_up(self, kv: KVView, max_tokens: int, max_model_len: int) -> None:
        pass

    few_tokens = 0

    def max_window(self, per_head: int) -> int | None:
        return None

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        norm: tuple[Tensor, float] | None = None,
        gate: bool = False,
        add_to: Tensor | None = None,
    ) -> Tensor:
        return plain_product(self, x, weight, bias, norm, gate, add_to)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_normed(x, weight, eps).to(x.dtype)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(x.add_(delta), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
