"""From a `StepPlan` to the tensors of one forward pass."""

import numpy as np
import torch

from pagefold.backends.base import ForwardInputs
from pagefold.core.types import StepPlan


def forward_inputs(plan: StepPlan, drawn: torch.Tensor) -> ForwardInputs:
    """Tokens, positions, chunk bounds, rows that want logits, and where the windows' queries go.

    Query j of a window is the query of token window_start + j; the tokens of a chunk before window_start are not kept.

    drawn   int64[slots], the token drawn last for each slot: what a plan calls -1
    """
    starts = np.array([c.start for c in plan.chunks], np.int64)
    lens = np.array([c.num_tokens for c in plan.chunks], np.int64)
    q_start = np.concatenate([[0], np.cumsum(lens)])
    offset = np.arange(q_start[-1]) - np.repeat(q_start[:-1], lens)
    positions = np.repeat(starts, lens) + offset
    logits_at = np.concatenate(
        [np.arange(end - c.num_logits, end) for c, end in zip(plan.chunks, q_start[1:], strict=True)]
    )
    window_slot = np.repeat(np.array([c.window_slot for c in plan.chunks], np.int64), lens)
    window_index = positions - np.repeat(np.array([c.window_start for c in plan.chunks], np.int64), lens)
    kept = (window_slot > 0) & (window_index >= 0)
    tensor = lambda a: torch.from_numpy(np.ascontiguousarray(a, np.int64)).to(drawn.device)  # noqa: E731
    slots, seq_lens = [c.slot for c in plan.chunks], (starts + lens).tolist()
    tokens = tensor(plan.tokens)
    if (plan.tokens < 0).any():
        tokens = torch.where(tokens < 0, drawn[tensor(np.repeat(slots, lens))], tokens)
    return ForwardInputs(
        tokens=tokens,
        positions=tensor(positions),
        q_start=tensor(q_start),
        slots=tensor(slots),
        seq_lens=tensor(seq_lens),
        logits_at=tensor(logits_at),
        window_slots=tensor(np.where(kept, window_slot, 0)),
        window_index=tensor(np.where(kept, window_index, 0)),
        keeps_window=bool(kept.any()),
        host_q_lens=lens.tolist(),
        host_slots=slots,
        host_seq_lens=seq_lens,
    )
