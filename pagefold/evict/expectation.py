"""What queries to come are expected to say of rows, in plain torch (Expected Attention, arXiv 2510.00636)."""

import torch
from torch import Tensor


def turns(inv_freq: Tensor, window: int, stride: int, horizon: int) -> Tensor:
    """How RoPE would turn the window's queries further if they came in the next `horizon` positions, on average.

    complex128[w, D / 2], a factor of each pair of channels of each query. Query u is (w - 1 - u) * stride tokens older
    than the last one, so with angle a of a pair per position its factor is

        sum_{h = 1..H} e^(i a (h + age)) / H = e^(i a (age + (H + 1) / 2)) sin(H a / 2) / (H sin(a / 2))
    """
    angle = inv_freq.double()
    age = torch.arange(window - 1, -1, -1, device=angle.device, dtype=angle.dtype)[:, None] * stride
    length = (horizon * angle / 2).sin() / (horizon * (angle / 2).sin()).where(angle > 0, 1.0)
    phase = angle * (age + (horizon + 1) / 2)
    return torch.polar(torch.ones_like(phase), phase) * length.where(angle > 0, 1.0)


def turned(queries: Tensor, factors: Tensor) -> Tensor:
    """Queries [..., w, R, D] times `turns`: the pairs are (x[i], x[i + D / 2]), the half-split form of RoPE."""
    first, second = queries.chunk(2, dim=-1)
    cos, sin = (part.to(queries.dtype)[:, None] for part in (factors.real, factors.imag))
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def expected_logits(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """float[..., R, N] of queries [..., w, R, D], turned, and keys [..., N, D]: the mean of the logits plus half
    their variance, the logarithm of E[exp(logit)] if they are normal."""
    rows = []
    for head in range(queries.shape[-2]):  # so that logits of one head are held at a time
        variance, mean = torch.var_mean(queries[..., head, :] @ keys.mT * scale, dim=-2, correction=0)
        rows.append(mean + variance / 2)
    return torch.stack(rows, -2)
