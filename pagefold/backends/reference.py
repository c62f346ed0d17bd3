"""The truth about page bytes, one row or one page at a time. Read this first; every other backend is tested against it.

Attention and window scores are computed in float64, whatever the rows are stored in.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pagefold.backends.base import ForwardInputs, HeadTurn, JobBatch, KVView
from pagefold.backends.torch_ops import TorchOps, turned_heads
from pagefold.evict.expectation import expected_logits, turned, turns
from pagefold.evict.select import select_ragged
from pagefold.store.pagestore import PageStore


def locate(kv: KVView, slot: int, group: int, row: int) -> tuple[PageStore, int, int]:
    """(store, page, index in the page) of a row of one group: the addressing rule."""
    place, index = divmod(row, kv.page_size)
    tier = 1 if place < int(kv.cold[slot, group]) else 0
    return kv.tiers[tier], int(kv.page_table[slot, group, place]), index


def read(kv: KVView, slot: int, group: int, column: int, rows: range, role: str, out: torch.dtype) -> Tensor:
    """Decoded rows out[len(rows), D] of one head, role "k" or "v"."""
    result = torch.zeros(len(rows), kv.window.shape[-1], dtype=out)
    row = rows.start
    while row < rows.stop:
        store, page, index = locate(kv, slot, group, row)
        until = min(rows.stop, row + kv.page_size - index)  # the rows of this page
        part = slice(index, index + until - row)
        codec = store.format.k if role == "k" else store.format.v
        data = store.planes[f"{role}_data"][page, column, part]
        scale = store.planes[f"{role}_scale"][page, column, part]
        result[row - rows.start : until - rows.start] = codec.decode(data, scale, out)
        row = until
    return result


def write(store: PageStore, page: int, column: int, index: int, role: str, x: Tensor) -> None:
    """Encode one row x[D]."""
    codec = store.format.k if role == "k" else store.format.v
    store.planes[f"{role}_data"][page, column, index], store.planes[f"{role}_scale"][page, column, index] = (
        codec.encode(x)
    )


def heads_of(kv: KVView, jobs: JobBatch, columns: slice) -> Iterator[tuple[int, int, int, int, int, int, int]]:
    """(j, c, slot, group, column, layer, head) for each job and each column of the slice."""
    num_columns = kv.members.shape[1]
    for j in range(len(jobs.slots)):
        slot, group = int(jobs.slots[j]), int(jobs.groups[j])
        for c, column in enumerate(range(num_columns)[columns]):
            layer, head = kv.members[group, column].tolist()
            yield j, c, slot, group, column, layer, head


def source_rows(kv: KVView, jobs: JobBatch, j: int) -> range:
    """The rows of the group that job j reads."""
    first = int(jobs.first_page[j]) * kv.page_size
    return range(first, first + int(jobs.num_src[j]))


class Reference(TorchOps):
    name = "reference"

    def append(self, kv: KVView, layer: int, qkv: Tensor, fwd: ForwardInputs, turn: HeadTurn | None) -> Tensor:
        q, k, v = turned_heads(qkv, kv.group_of.shape[1], fwd.positions, turn)
        token = 0
        for slot, q_len, seq_len in zip(fwd.host_slots, fwd.host_q_lens, fwd.host_seq_lens):
            for position in range(seq_len - q_len, seq_len):
                for head in range(k.shape[1]):
                    group, column = int(kv.group_of[layer, head]), int(kv.column_of[layer, head])
                    row = position - int(kv.evicted[slot, group])
                    store, page, index = locate(kv, slot, group, row)
                    write(store, page, column, index, "k", k[token, head])
                    write(store, page, column, index, "v", v[token, head])
                    for name, plane in store.planes.items():
                        if name.startswith("state."):
                            plane[page, column, index] = 0
                token += 1
        for query, slot, index in zip(q, fwd.window_slots, fwd.window_index):
            if slot > 0:
                kv.window[layer, slot, index] = query.to(kv.window.dtype)
        return q

    def attend(self, kv: KVView, layer: int, q: Tensor, fwd: ForwardInputs, scale: float) -> Tensor:
        out = torch.empty_like(q)
        num_heads = kv.group_of.shape[1]
        per_head = q.shape[1] // num_heads
        first = 0
        for slot, q_len, seq_len in zip(fwd.host_slots, fwd.host_q_lens, fwd.host_seq_lens):
            for head in range(num_heads):
                group, column = int(kv.group_of[layer, head]), int(kv.column_of[layer, head])
                n = seq_len - int(kv.evicted[slot, group])
                keys = read(kv, slot, group, column, range(n), "k", torch.float64)
                values = read(kv, slot, group, column, range(n), "v", torch.float64)
                for j in range(q_len):
                    seen = n - q_len + j + 1
                    for query_head in range(head * per_head, (head + 1) * per_head):
                        logits = keys[:seen] @ q[first + j, query_head].double() * scale
                        out[first + j, query_head] = (torch.softmax(logits, 0) @ values[:seen]).to(q.dtype)
            first += q_len
        return out

    def window_scores(self, kv: KVView, jobs: JobBatch, columns: slice, scale: float, across: str = "max") -> Tensor:
        num_columns = len(range(kv.members.shape[1])[columns])
        scores = torch.zeros(len(jobs.slots), num_columns, jobs.max_src, dtype=kv.row_dtype)
        num_window = kv.window.shape[2]
        per_head = kv.window.shape[3] // kv.group_of.shape[1]
        for j, c, slot, group, column, layer, head in heads_of(kv, jobs, columns):
            n, rows = int(jobs.num_rows[j]), source_rows(kv, jobs, j)
            keys = read(kv, slot, group, column, range(n), "k", torch.float64)
            total = torch.zeros(n, dtype=torch.float64)
            for u in range(num_window):
                seen = n - (num_window - 1 - u) * kv.window_stride  # the row of query u's token is the last it sees
                if seen < 1:
                    continue
                weights = torch.zeros(per_head, n, dtype=torch.float64)
                for r in range(per_head):
                    query = kv.window[layer, int(jobs.window_slots[j]), u, head * per_head + r].double()
                    weights[r, :seen] = torch.softmax(keys[:seen] @ query * scale, 0)
                total += weights.amax(0) if across == "max" else weights.mean(0)
            scores[j, c, : len(rows)] = (total / num_window)[rows.start : rows.stop]
        return scores

    def expected_logits(self, kv: KVView, jobs: JobBatch, columns: slice, scale: float, horizon: int) -> Tensor:
        num_columns = len(range(kv.members.shape[1])[columns])
        num_window, num_heads = kv.window.shape[2:4]
        per_head = num_heads // kv.group_of.shape[1]
        logits = torch.zeros(len(jobs.slots), num_columns, per_head, jobs.max_src, dtype=kv.row_dtype)
        factors = turns(kv.inv_freq, num_window, kv.window_stride, horizon)
        for j, c, slot, group, column, layer, head in heads_of(kv, jobs, columns):
            rows = source_rows(kv, jobs, j)
            keys = read(kv, slot, group, column, rows, "k", torch.float64)
            queries = kv.window[layer, int(jobs.window_slots[j])].double().unflatten(1, (-1, per_head))[:, head]
            logits[j, c, :, : len(rows)] = expected_logits(turned(queries, factors), keys, scale)
        return logits

    def read_rows(self, kv: KVView, jobs: JobBatch, columns: slice, role: str) -> Tensor:
        num_columns = len(range(kv.members.shape[1])[columns])
        shape = (len(jobs.slots), num_columns, jobs.max_src, kv.window.shape[-1])
        result = torch.zeros(shape, dtype=kv.row_dtype)
        for j, c, slot, group, column, _, _ in heads_of(kv, jobs, columns):
            rows = source_rows(kv, jobs, j)
            result[j, c, : len(rows)] = read(kv, slot, group, column, rows, role, kv.row_dtype)
        return result

    def read_lengths(self, kv: KVView, jobs: JobBatch, columns: slice, role: str) -> Tensor:
        return self.read_rows(kv, jobs, columns, role).square().sum(-1).sqrt()

    def read_state(self, kv: KVView, jobs: JobBatch, columns: slice, name: str) -> Tensor:
        num_columns = len(range(kv.members.shape[1])[columns])
        width = kv.tiers[0].layout[f"state.{name}"].width
        result = torch.zeros(len(jobs.slots), num_columns, jobs.max_src, width, dtype=torch.float32)
        for j, c, slot, group, column, _, _ in heads_of(kv, jobs, columns):
            for place, row in enumerate(source_rows(kv, jobs, j)):
                store, page, index = locate(kv, slot, group, row)
                result[j, c, place] = store.planes[f"state.{name}"][page, column, index].float()
        return result

    def crowding(self, kv: KVView, jobs: JobBatch, columns: slice, threshold: float, block: int | None) -> Tensor:
        result = torch.zeros(
            len(jobs.slots), len(range(kv.members.shape[1])[columns]), jobs.max_src, dtype=kv.row_dtype
        )
        for j, c, slot, group, column, _, _ in heads_of(kv, jobs, columns):
            rows = source_rows(kv, jobs, j)
            keys = read(kv, slot, group, column, rows, "k", torch.float64)
            keys = torch.nn.functional.normalize(keys, dim=-1, eps=1e-6)
            for start in range(0, len(rows), block or len(rows)):
                some = keys[start : start + (block or len(rows))]
                cosines = (some @ some.mT).fill_diagonal_(0)
                for of_one in cosines.T:
                    similar = (of_one > threshold).nonzero()[:, 0]
                    of_one[similar[-1:]] = 0
                result[j, c, start : start + len(some)] = cosines.sum(1)
        return result

    def select_rows(self, kv: KVView, jobs: JobBatch, scores: Tensor, sink_tokens: int, window: int) -> Tensor:
        counts = (jobs.dst_pages != 0).sum(1) * kv.page_size
        return select_ragged(scores, jobs.num_src, jobs.num_rows, counts.tolist(), sink_tokens, window)

    def compact(self, kv: KVView, jobs: JobBatch, columns: slice, keep: Tensor, state: dict[str, Tensor]) -> None:
        dst = kv.tiers[jobs.dst_tier]
        for j, c, slot, group, column, _, _ in heads_of(kv, jobs, columns):
            first = source_rows(kv, jobs, j).start
            for place, chosen in enumerate(keep[j, c].tolist()):
                if jobs.dst_pages[j, place // kv.page_size] == 0:
                    break
                src, src_page, src_index = locate(kv, slot, group, first + chosen)
                page, index = int(jobs.dst_pages[j, place // kv.page_size]), place % kv.page_size
                for role, old, new in (("k", src.format.k, dst.format.k), ("v", src.format.v, dst.format.v)):
                    names = (f"{role}_data", f"{role}_scale")
                    data, scale = (src.planes[name][src_page, column, src_index] for name in names)
                    if old == new:
                        dst.planes[names[0]][page, column, index] = data
                        dst.planes[names[1]][page, column, index] = scale
                    else:
                        write(dst, page, column, index, role, old.decode(data, scale, kv.row_dtype))
                for name, plane in dst.planes.items():
                    if name.startswith("state."):
                        given = state.get(name.removeprefix("state."))
                        stored = src.planes[name][src_page, column, src_index]
                        plane[page, column, index] = stored if given is None else given[j, c, chosen].to(plane.dtype)

    def copy_pages(self, src: PageStore, src_pages: Tensor, dst: PageStore, dst_pages: Tensor) -> None:
        for src_page, dst_page in zip(src_pages.tolist(), dst_pages.tolist()):
            for name, plane in dst.planes.items():
                plane[dst_page] = src.planes[name][src_page]
