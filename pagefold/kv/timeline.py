"""Whether a request that is bounded, but cannot be promised its bound yet, will find the pages it grows into.

A request with a short prompt takes hundreds of steps to grow to its bound, and others end meanwhile: at the latest when
they have all the tokens they may have. Lengths and folds are functions of token counts, so what will be held is known
ahead, and pages need not wait idle for it.
"""

from collections.abc import Sequence

import numpy as np

from pagefold.kv.state import HOT, KVState


def fits_in_time(new: KVState, live: Sequence[KVState], room: int) -> bool:
    """Whether at every token from now on what `new` and the other sequences without a promise will have taken is at
    most the `room` there is and what those that end give back.

    Each sequence is taken to get a token a step, and to end as late as it may, a period later to be sure. If that is
    wrong, somebody waits, or is preempted; who was promised its pages does not rely on this.
    """
    everyone = [*live, new]
    size, groups = new.page_size, new.num_groups
    tokens = np.array([max(kv.num_tokens, kv.prompt_len) for kv in everyone])
    ends = np.array([kv.last - kv.num_tokens + kv.policy.period for kv in everyone])
    held = np.array([kv.held[HOT] for kv in everyone])
    promised = np.array([max(kv.reserve[HOT], kv.held[HOT]) if kv.reserved else 0 for kv in everyone])
    bounded = [kv.policy.evicts and kv.fold_from is not None for kv in everyone]
    most = np.array([kv.bound[HOT] if b else -(-kv.last // size) * groups for kv, b in zip(everyone, bounded)])
    # what is taken is largest just before somebody ends, or when somebody stops growing
    moments = np.unique(np.concatenate([ends - 1, (most // groups + 1) * size - tokens]).clip(0))[:, None]
    ended = moments >= ends
    grown = np.clip(-(-(tokens + moments) // size) * groups, held, np.maximum(most, held)) - held
    taken = np.where(ended, -held, grown)  # of those without a promise
    taken[:, promised > 0] = np.where(ended, -promised, 0)[:, promised > 0]
    return bool((taken.sum(1) <= room).all())
