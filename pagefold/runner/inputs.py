"""From a `StepPlan` to the numbers of one forward pass."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagefold.backends.base import ForwardInputs
from pagefold.backends.upload import upload
from pagefold.core.types import StepPlan


@dataclass
class Batch:
    """A plan's chunks as columns, in host memory, all integers. `ForwardInputs` says what they mean.

    tokens   -1 is the token drawn last for the slot
    """

    tokens: np.ndarray
    positions: np.ndarray
    window_slots: np.ndarray
    window_index: np.ndarray
    slots: np.ndarray
    q_lens: np.ndarray
    seq_lens: np.ndarray
    num_logits: np.ndarray

    @property
    def single_tokens(self) -> bool:
        """Every chunk is one token whose logits are wanted: the shape of decoding."""
        return bool((self.q_lens == 1).all() and (self.num_logits == 1).all())


def batch_of(plan: StepPlan, window_stride: int) -> Batch:
    """Query j of a window is that of token window_start + j * window_stride; those of other tokens are not kept."""
    slots, starts, lens, num_logits, window_slot, window_start = plan.chunks.columns
    positions = starts
    if len(plan.tokens) > len(slots):  # else each chunk is one token
        chunk = np.repeat(np.arange(len(lens)), lens)  # of each token
        positions = np.arange(len(chunk)) + (starts - (lens.cumsum() - lens))[chunk]
        window_slot, window_start = window_slot[chunk], window_start[chunk]
    window_index, between = np.divmod(positions - window_start, window_stride)
    kept = (window_slot > 0) & (window_index >= 0) & (between == 0)
    return Batch(
        tokens=plan.tokens,
        positions=positions,
        window_slots=window_slot * kept,
        window_index=window_index * kept,
        slots=slots,
        q_lens=lens,
        seq_lens=starts + lens,
        num_logits=num_logits,
    )


def forward_inputs(batch: Batch, drawn: Tensor, evicted: np.ndarray) -> ForwardInputs:
    """The batch on the device.

    drawn     int64[slots], the token drawn last for each slot
    evicted   int32[slots, G], on the host
    """
    ends = batch.q_lens.cumsum()
    logits_at = np.repeat(ends - batch.num_logits.cumsum(), batch.num_logits) + np.arange(batch.num_logits.sum())
    columns = batch.tokens, batch.positions, batch.window_slots, batch.window_index, batch.slots, batch.seq_lens
    later = np.repeat(batch.slots, batch.q_lens)  # of each token
    *moved, q_start, logits_at, later = upload([*columns, np.append(0, ends), logits_at, later], drawn.device)
    tokens, positions, window_slots, window_index, slots, seq_lens = moved
    return ForwardInputs(
        tokens=torch.where(tokens < 0, drawn[later], tokens),
        positions=positions,
        q_start=q_start,
        slots=slots,
        seq_lens=seq_lens,
        logits_at=logits_at,
        window_slots=window_slots,
        window_index=window_index,
        keeps_window=bool(batch.window_slots.any()),
        host_q_lens=batch.q_lens.tolist(),
        host_slots=batch.slots.tolist(),
        host_seq_lens=batch.seq_lens.tolist(),
        host_evicted=evicted,
    )
