"""How many pages a sequence can ever need: what admission promises, and what is refused because it could never run."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

import numpy as np

from pagefold.core.types import InputError
from pagefold.kv.ledger import Ledger
from pagefold.kv.pool import PagePool
from pagefold.kv.state import COLD, HOT, FoldPolicy, RowCounts


@dataclass(frozen=True)
class KVGeometry:
    """Sizes that follow from the configuration and the model.

    num_pages        pages per tier, page 0 included (one tier, or hot and cold)
    num_host_pages   pages per tier of the host store, for preempted requests and trunks
    bytes_per_page   per tier
    num_groups       page-table rows per sequence
    page_size        rows per page
    max_seqs         sequences that run at once
    window_slots     query windows to lend
    num_trunk_pages  how many of the host pages trunks may take, per tier
    """

    num_pages: tuple[int, ...]
    num_host_pages: tuple[int, ...]
    bytes_per_page: tuple[int, ...]
    num_groups: int
    page_size: int
    max_seqs: int
    window_slots: int
    num_trunk_pages: tuple[int, ...] = (0, 0)


def peak_pages(policy: FoldPolicy, size: int, prompt_len: int, last: int, start: RowCounts | None = None) -> list[int]:
    """Most pages of `size` rows per tier that a sequence ever holds between compactions (their destinations not
    counted).

    Rows of a head stay within budget + period + lag, or the prompt's length (to the next event, and lag) before the
    first fold is visible; or, where prompts are folded on the way, within budget + prefill period.

    last    no token from this number on is stored
    start   what a sequence that resumes begins with; its first event is the next one from there
    """
    groups = len(policy.budget)
    evicted, cold, fixed = start or RowCounts(np.zeros(groups, np.int32), np.zeros(groups, np.int32), 0)
    pages = lambda rows: np.minimum(-(-np.asarray(rows) // size), -(-(last - evicted) // size)).clip(0)  # noqa: E731
    prompt = -(-prompt_len // policy.period) * policy.period - evicted - cold * size
    if not policy.evicts:
        hot, in_cold = np.full(groups, last), np.zeros(groups)
        if policy.cold_after is not None:
            hot = np.maximum(prompt, policy.cold_after + size + policy.period) + policy.lag
            in_cold = np.full(groups, max(0, last - policy.cold_after))
        return [int(pages(hot).sum()), int(pages(in_cold).sum())]
    decode = policy.budget + policy.period + policy.lag
    if policy.cold_after is not None:
        decode = np.minimum(policy.budget, policy.cold_after + size) + policy.period + policy.lag
    if step := policy.prefill_period:
        first = (fixed // step + 1) * step - evicted - cold * size
        prompt = np.minimum(prompt, np.maximum(policy.budget + step, first))
    in_cold = 0 if policy.cold_after is None else int(np.maximum(pages(policy.budget), cold).sum())
    return [int(pages(np.maximum(decode, prompt + policy.lag)).sum()), in_cold]


def copied_pages(policy: FoldPolicy, size: int, last: int) -> list[int]:
    """Destination pages per tier of one whole compaction; none if the sequence ends before it is over budget."""
    need = [0, 0]
    if policy.evicts:
        folded = policy.budget[policy.budget + size < last]
        need[HOT if policy.cold_after is None else COLD] = int((folded // size).sum())
    return need


def check_fits(geometry: KVGeometry, policy: FoldPolicy, prompt_len: int, last: int) -> None:
    """Refuse a request that could never run, saying the largest that could.

    Raises InputError naming `kv_budget`, `kv_prefill_buffer`, `prompt` or `max_tokens`.
    """
    size, copies = geometry.page_size, copied_pages(policy, geometry.page_size, last)
    peak = lambda prompt, last: peak_pages(policy, size, prompt, last)  # noqa: E731
    for tier, num_pages in enumerate(geometry.num_pages):
        room = num_pages - 1 - copies[tier]
        need = peak(prompt_len, last)[tier]
        if need <= room:
            continue
        if policy.evicts and (policy.prefill_period or peak(0, last)[tier] > room):
            facts = f"needs {need + copies[tier]} pages while folding, {num_pages - 1} in the pool"
            if policy.prefill_period and peak(0, last)[tier] <= room:
                raise InputError("kv_prefill_buffer", f"got {policy.prefill_period} tokens, {facts}")
            raise InputError("kv_budget", f"got {int(policy.budget.mean())} rows a head, {facts}")
        per_row = geometry.bytes_per_page[tier] // size
        most = max(0, room // geometry.num_groups * size)
        facts = (
            f"{need + copies[tier]} pages needed, {num_pages - 1} in the pool "
            f"({size} rows a page, {per_row} bytes a row and group)"
        )
        if peak(prompt_len, prompt_len + 1)[tier] > room:
            limit = f"got {prompt_len} tokens, the largest that fits is {max(0, most - 1)}"
            raise InputError("prompt", f"{limit}: {facts}")
        raise InputError("max_tokens", f"got {last - prompt_len + 1}, at most {most - prompt_len + 1} fit: {facts}")


def fits_tokens(pools: list[PagePool], policy: FoldPolicy, size: int, prompt_len: int, most: int) -> int:
    """Tokens, at most `most`, of the longest never-evicting sequence with this prompt that the pools hold."""

    def too_long(last: int) -> bool:
        return any(n >= p.num_pages for n, p in zip(peak_pages(policy, size, prompt_len, last), pools))

    return prompt_len - 1 + bisect_left(range(prompt_len, most + 1), True, key=too_long)


def fits_requests(geometry: KVGeometry, policy: FoldPolicy, prompt_len: int, last: int) -> int:
    """Sequences of this length that run together without a preemption or a wait for pages, if each comes when the
    prompts of those before it are folded."""
    size = geometry.page_size
    peaks, settled = (peak_pages(policy, size, length, last) for length in (prompt_len, 0))
    hot, cold = copied_pages(policy, size, last)

    def too_many(count: int) -> bool:
        spare = Ledger.spare_for(Counter({(policy.lag + 1, policy.period, hot, cold): count}))
        needs = (peak + (count - 1) * each + kept for peak, each, kept in zip(peaks, settled, spare))
        return any(need >= num_pages for need, num_pages in zip(needs, geometry.num_pages))

    return bisect_left(range(1, geometry.max_seqs + 1), True, key=too_many)
