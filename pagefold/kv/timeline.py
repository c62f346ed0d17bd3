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
    size, groups = new.page_size, new.num_groups
    everyone = [*live, new]
    ends = np.array([kv.last - kv.num_tokens + kv.policy.period for kv in everyone])
    promised = np.array([max(kv.reserve[HOT], kv.held[HOT]) if kv.reserved else 0 for kv in everyone])
    rest, ends_of_rest = [everyone[i] for i in np.flatnonzero(promised == 0)], ends[promised == 0]
    tokens = np.array([max(kv.num_tokens, kv.prompt_len) for kv in rest])
    held = np.array([kv.held[HOT] for kv in rest])
    bounded = [kv.policy.evicts and kv.fold_from is not None for kv in rest]
    most = np.array([kv.bound[HOT] if b else -(-kv.last // size) * groups for kv, b in zip(rest, bounded)])
    # what is taken is largest just before somebody ends, or when somebody stops growing
    moments = np.unique(np.concatenate([ends - 1, (most // groups + 1) * size - tokens]).clip(0))
    order = ends.argsort()
    given_back = np.append(0, promised[order].cumsum())[np.searchsorted(ends[order], moments, "right")]
    ended = moments[:, None] >= ends_of_rest
    grown = np.clip(-(-(tokens + moments[:, None]) // size) * groups, held, np.maximum(most, held)) - held
    taken = np.where(ended, -held, grown).sum(1)  # by those without a promise
    return bool((taken - given_back <= room).all())
