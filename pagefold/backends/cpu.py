"""Vectorised torch, and C kernels for decode, appends, norms and activations where they can be built.

Attention of longer chunks gathers a sequence's rows and runs torch's flash attention, compactions are gathers and
scatters, and so are appends without a kernel. Rotated rows are read as they are stored: the query is rotated and the
output is un-rotated instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pagefold.backends import cpu_append, cpu_decode, cpu_layers
from pagefold.backends.base import ForwardInputs, HeadTurn, JobBatch, KVView
from pagefold.backends.torch_ops import TorchOps, turned_heads
from pagefold.evict.crowding import crowding_of_rows
from pagefold.evict.expectation import expected_logits, turned, turns
from pagefold.evict.select import select_ragged
from pagefold.store.format import RowCodec
from pagefold.store.lowbit import hadamard
from pagefold.store.pagestore import PageStore

MAX_SCORE_BYTES = 1 << 26  # of decoded keys at a time, in `window_scores`


@dataclass
class HeadSet:
    """The KV heads of a layer that belong to one group, so that they have pages and length in common."""

    group: int
    heads: Tensor  # int64[h]
    columns: Tensor  # int64[h]


class Bound:
    """What this backend derives from a KVView once: its layout as lists, and the kernels."""

    def __init__(self, kv: KVView):
        self.kv = kv
        self.head_sets: list[list[HeadSet]] = []
        for groups, columns in zip(kv.group_of, kv.column_of):
            sets = [(int(group), (groups == group).nonzero()[:, 0]) for group in groups.unique()]
            self.head_sets.append([HeadSet(group, heads, columns[heads].long()) for group, heads in sets])
        self.group_of, self.column_of = kv.group_of.long(), kv.column_of.long()
        hot = kv.tiers[0]
        self.hot_rows = {name: hot.rows(name) for name, plane in hot.layout.items() if plane.width}
        self.hot_state = [rows for name, rows in self.hot_rows.items() if name.startswith("state.")]
        self.decode = cpu_decode.bind(kv)
        self.append = cpu_append.bind(kv)


@dataclass
class Span:
    """One chunk for torch attention: tokens [first, first + q_len) of the batch."""

    first: int
    q_len: int
    pages: Tensor  # int64[G, pages of the sequence]
    num_rows: list[int]  # per group
    cold: list[int]  # per group


@dataclass
class Plan:
    """The addresses of one batch, the same for every layer.

    append   the new tokens, for the C kernel
    spans    chunks that torch attends to
    decode   (tokens, slots, seq_lens), int64 each, of the chunks of one token that the C kernel attends to, or None
    rows     L times int64[T * H], flat row in the hot planes for each new row; None until torch has to append
    """

    kv: KVView
    append: cpu_append.Batch
    spans: list[Span]
    decode: tuple[Tensor, Tensor, Tensor] | None
    rows: list[Tensor] | None = None


def _raw(plane: Tensor) -> Tensor:
    """float8 as bytes: torch cannot scatter it."""
    return plane.view(torch.uint8) if plane.dtype == torch.float8_e4m3fn else plane


def _codec(store: PageStore, role: str) -> RowCodec:
    return store.format.k if role == "k" else store.format.v


def gather(
    kv: KVView, role: str, pages: Tensor, cold: Tensor, columns: Tensor, out: torch.dtype, stored: bool
) -> Tensor:
    """Decoded rows of whole pages, out[J, C, p * page_size, D].

    pages    int64[J, p]
    cold     bool[J, p]   whether a page is one of the cold tier
    stored   keep the frame that rows are stored in
    """

    def read(store: PageStore, pages: Tensor) -> Tensor:
        block = columns[:, None] * store.num_pages + pages[..., None, :]  # [..., C, p]
        data, scale = (
            store.pages(f"{role}_{part}").index_select(0, block.flatten()).view(*block.shape, kv.page_size, -1)
            for part in ("data", "scale")
        )
        codec = _codec(store, role)
        return (codec.decode_stored if stored else codec.decode)(data, scale, out)

    if len(kv.tiers) == 1 or not cold.any():
        rows = read(kv.tiers[0], pages)
    elif cold.all():
        rows = read(kv.tiers[1], pages)
    else:
        shape = (len(pages), pages.shape[1], len(columns), kv.page_size, kv.window.shape[-1])
        rows = torch.empty(shape, dtype=out)
        for tier, store in enumerate(kv.tiers):
            where = cold == bool(tier)
            rows[where] = read(store, pages[where][:, None])[:, :, 0]
        rows = rows.transpose(1, 2)
    return rows.flatten(2, 3)


def _keep_frame(kv: KVView, role: str) -> bool:
    """All tiers store rows of this role in the same frame, so they can be read without un-rotating them."""
    return len({_codec(store, role).rotate for store in kv.tiers}) == 1


def _rotate(x: Tensor) -> Tensor:
    return hadamard(x if x.dtype == torch.float64 else x.float()).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Query j of q [h, R, q_len, D] sees the first n - q_len + j + 1 rows of k, v [h, n, D].

    The rows before the chunk need no mask and the chunk's own are a causal square: two flash attentions, merged by
    their log-sum-exp, so that no mask of q_len * n is ever made.
    """
    q_len, past = q.shape[2], k.shape[1] - q.shape[2]
    k, v = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in (k, v))

    def flash(rows: slice, causal: bool) -> tuple[Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k[:, :, rows], v[:, :, rows], 0.0, causal, scale=scale
        )

    if q_len == 1 or past == 0:
        return flash(slice(None), causal=q_len > 1)[0]
    (before, before_lse), (own, own_lse) = flash(slice(0, past), False), flash(slice(past, None), True)
    share = torch.sigmoid(before_lse - own_lse)[..., None].to(q.dtype)
    return torch.lerp(own, before, share)


def _new_rows(bound: Bound, fwd: ForwardInputs) -> list[Tensor]:
    """Where the new tokens' rows lie: `Plan.rows`."""
    kv = bound.kv
    slots = fwd.slots.repeat_interleave(torch.tensor(fwd.host_q_lens))
    row = fwd.positions[:, None] - kv.evicted[slots]  # [T, G]
    page = kv.page_table[slots[:, None], torch.arange(row.shape[1]), row // kv.page_size].long()
    base = page * kv.page_size + row % kv.page_size
    column_rows = kv.tiers[0].num_pages * kv.page_size
    rows = base[:, bound.group_of].transpose(0, 1) + (bound.column_of * column_rows)[:, None]
    return list(rows.flatten(1))


class CpuBackend(TorchOps):
    name = "cpu"

    def __init__(self):
        self._bound: list[Bound] = []  # of the views used last: those of a cache are two at most

    def _bind(self, kv: KVView) -> Bound:
        for bound in self._bound:
            if bound.kv is kv:
                return bound
        self._bound = [Bound(kv), *self._bound[:1]]
        return self._bound[0]

    def _plan(self, kv: KVView, fwd: ForwardInputs) -> Plan:
        plans = fwd.plan = fwd.plan or {}
        known = plans.get(id(kv))
        if isinstance(known, Plan):
            return known
        bound = self._bind(kv)
        q_lens = torch.tensor(fwd.host_q_lens)
        firsts = q_lens.cumsum(0) - q_lens
        ones = (q_lens == 1).nonzero()[:, 0] if bound.decode else q_lens[:0]
        decode = (firsts[ones], fwd.slots[ones], fwd.seq_lens[ones]) if len(ones) else None
        plan = Plan(kv, cpu_append.Batch.of(fwd, fwd.slots.repeat_interleave(q_lens)), [], decode)
        for b, (slot, q_len, seq_len) in enumerate(zip(fwd.host_slots, fwd.host_q_lens, fwd.host_seq_lens)):
            if q_len > 1 or not bound.decode:
                num_rows = [seq_len - evicted for evicted in kv.evicted[slot].tolist()]
                pages = kv.page_table[slot, :, : -(-max(num_rows) // kv.page_size)].long()
                plan.spans.append(Span(int(firsts[b]), q_len, pages, num_rows, kv.cold[slot].tolist()))
        plans[id(kv)] = plan
        return plan

    def append(self, kv: KVView, layer: int, qkv: Tensor, fwd: ForwardInputs, turn: HeadTurn | None) -> Tensor:
        plan, bound = self._plan(kv, fwd), self._bind(kv)
        if bound.append and qkv.dtype == bound.append.dtype:
            return bound.append(layer, qkv, plan.append, turn)
        if plan.rows is None:
            plan.rows = _new_rows(bound, fwd)
        q, k, v = turned_heads(qkv, kv.group_of.shape[1], fwd.positions, turn)
        codecs = kv.tiers[0].format
        for name, part in zip(("k_data", "k_scale", "v_data", "v_scale"), (*codecs.k.encode(k), *codecs.v.encode(v))):
            if name in bound.hot_rows:
                bound.hot_rows[name].index_copy_(0, plan.rows[layer], _raw(part).flatten(0, 1))
        for plane in bound.hot_state:
            plane.index_fill_(0, plan.rows[layer], 0)
        if fwd.keeps_window:
            kept = fwd.window_slots.nonzero()[:, 0]
            kv.window[layer, fwd.window_slots[kept], fwd.window_index[kept]] = q[kept].to(kv.window.dtype)
        return q

    def attend(self, kv: KVView, layer: int, q: Tensor, fwd: ForwardInputs, scale: float) -> Tensor:
        plan, bound = self._plan(kv, fwd), self._bind(kv)
        if plan.decode and bound.decode:
            tokens, slots, seq_lens = plan.decode
            if not plan.spans:
                return bound.decode(layer, q, slots, seq_lens, scale)
            out = torch.empty_like(q)
            out[tokens] = bound.decode(layer, q[tokens], slots, seq_lens, scale)
        else:
            out = torch.empty_like(q)
        for span in plan.spans:
            chunk = slice(span.first, span.first + span.q_len)
            for heads in bound.head_sets[layer]:
                self._attend_span(kv, heads, span, q[chunk], out[chunk], scale)
        return out

    def _attend_span(self, kv: KVView, heads: HeadSet, span: Span, q: Tensor, out: Tensor, scale: float) -> None:
        """Attention of one chunk, q [q_len, Hq, D], by the heads of one group."""
        num_rows, cold = span.num_rows[heads.group], span.cold[heads.group]
        pages = span.pages[heads.group, : -(-num_rows // kv.page_size)][None]
        is_cold = torch.arange(pages.shape[1])[None] < cold
        keep_k, keep_v = _keep_frame(kv, "k"), _keep_frame(kv, "v")
        k = gather(kv, "k", pages, is_cold, heads.columns, q.dtype, keep_k)[0, :, :num_rows]
        v = gather(kv, "v", pages, is_cold, heads.columns, q.dtype, keep_v)[0, :, :num_rows]
        num_heads = kv.group_of.shape[1]
        query = q.unflatten(1, (num_heads, -1)).permute(1, 2, 0, 3)[heads.heads]  # [h, R, q_len, D]
        if keep_k and _codec(kv.tiers[0], "k").rotate:
            query = _rotate(query)
        result = causal_attention(query, k, v, scale)
        if keep_v and _codec(kv.tiers[0], "v").rotate:
            result = _rotate(result)
        out.unflatten(1, (num_heads, -1))[:, heads.heads] = result.permute(2, 0, 1, 3)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        kernels = cpu_layers.bind(x.dtype)
        if kernels is None or not x.is_contiguous():
            return super().rms_norm(x, weight, eps)
        return kernels.rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        kernels = cpu_layers.bind(x.dtype)
        if kernels is None or not (x.is_contiguous() and delta.is_contiguous()):
            return super().add_rms_norm(x, delta, weight, eps)
        return kernels.rms_norm(x, delta, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        kernels = cpu_layers.bind(gate_up.dtype)
        if kernels is None or not gate_up.is_contiguous():
            return super().silu_mul(gate_up)
        return kernels.silu_mul(gate_up)

    def window_scores(self, kv: KVView, jobs: JobBatch, columns: slice, scale: float, across: str = "max") -> Tensor:
        num_columns, max_src = len(range(kv.members.shape[1])[columns]), jobs.max_src
        scores = torch.zeros(len(jobs.slots), num_columns, max_src, dtype=kv.row_dtype)
        num_pages = -(-int(jobs.num_rows.max()) // kv.page_size)
        job_bytes = num_columns * num_pages * kv.page_size * kv.window.shape[-1] * kv.row_dtype.itemsize
        at_once = max(1, MAX_SCORE_BYTES // job_bytes)
        for some in torch.arange(len(jobs.slots)).split(at_once):
            weights = self._window_attention(kv, jobs, some, columns, num_pages, scale, across)
            row = jobs.first_page[some, None] * kv.page_size + torch.arange(max_src)
            row = row.clamp(max=weights.shape[-1] - 1)[:, None].expand(-1, num_columns, -1)
            scores[some] = weights.gather(2, row)
        return scores.masked_fill_(~_valid(jobs), 0)

    def _window_attention(
        self, kv: KVView, jobs: JobBatch, some: Tensor, columns: slice, num_pages: int, scale: float, across: str
    ) -> Tensor:
        """float[J, C, num_pages * page_size] for jobs `some`: attention of the window over all rows of their groups."""
        slots, groups, num_rows = jobs.slots[some], jobs.groups[some], jobs.num_rows[some]
        queries = kv.queries(groups, jobs.window_slots[some], columns)
        keep = _keep_frame(kv, "k")
        if keep and _codec(kv.tiers[0], "k").rotate:
            queries = hadamard(queries)
        pages = kv.page_table[slots, groups, :num_pages].long()
        cold = torch.arange(num_pages) < kv.cold[slots, groups, None]
        keys = gather(kv, "k", pages, cold, _column_ids(kv, columns), kv.row_dtype, keep)
        num_window, per_head = queries.shape[2:4]
        logits = (queries.flatten(2, 3) @ keys.mT * scale).unflatten(2, (num_window, per_head))  # [J, C, w, R, n]
        seen = num_rows[:, None] - torch.arange(num_window - 1, -1, -1) * kv.window_stride  # [J, w]
        hidden = torch.arange(keys.shape[2]) >= seen[..., None]  # [J, w, n]
        logits.masked_fill_(hidden[:, None, :, None], -torch.inf)
        weights = torch.softmax(logits, -1).masked_fill_(hidden[:, None, :, None], 0)
        return (weights.amax(3) if across == "max" else weights.mean(3)).mean(2)

    def expected_logits(self, kv: KVView, jobs: JobBatch, columns: slice, scale: float, horizon: int) -> Tensor:
        queries = kv.queries(jobs.groups, jobs.window_slots, columns)
        factors = turns(kv.inv_freq, kv.window.shape[2], kv.window_stride, horizon)
        return expected_logits(turned(queries, factors), self.read_rows(kv, jobs, columns, "k"), scale)

    def read_rows(self, kv: KVView, jobs: JobBatch, columns: slice, role: str) -> Tensor:
        pages, cold = _source_pages(kv, jobs)
        rows = gather(kv, role, pages, cold, _column_ids(kv, columns), kv.row_dtype, stored=False)
        return rows[:, :, : jobs.max_src].masked_fill(~_valid(jobs)[..., None], 0)

    def read_lengths(self, kv: KVView, jobs: JobBatch, columns: slice, role: str) -> Tensor:
        return self.read_rows(kv, jobs, columns, role).norm(dim=-1)

    def read_state(self, kv: KVView, jobs: JobBatch, columns: slice, name: str) -> Tensor:
        pages, cold = _source_pages(kv, jobs)
        parts = []
        for store in kv.tiers:
            block = _column_ids(kv, columns)[:, None] * store.num_pages + pages.clamp(max=store.num_pages - 1)[:, None]
            parts.append(store.pages(f"state.{name}")[block])  # [J, C, p, page_size, width]
        state = parts[0] if len(parts) == 1 else torch.where(cold[:, None, :, None, None], parts[1], parts[0])
        return state.flatten(2, 3)[:, :, : jobs.max_src].float().masked_fill(~_valid(jobs)[..., None], 0)

    def crowding(self, kv: KVView, jobs: JobBatch, columns: slice, threshold: float, block: int | None) -> Tensor:
        return crowding_of_rows(self.read_rows(kv, jobs, columns, "k"), _valid(jobs), threshold, block)

    def select_rows(self, kv: KVView, jobs: JobBatch, scores: Tensor, sink_tokens: int, window: int) -> Tensor:
        counts = (jobs.dst_pages != 0).sum(1) * kv.page_size
        return select_ragged(scores, jobs.num_src, jobs.num_rows, counts.tolist(), sink_tokens, window)

    def compact(self, kv: KVView, jobs: JobBatch, columns: slice, keep: Tensor, state: dict[str, Tensor]) -> None:
        dst = kv.tiers[jobs.dst_tier]
        column = _column_ids(kv, columns)[:, None]  # [C, 1]
        place = jobs.first_page[:, None, None] + keep // kv.page_size
        tables = kv.page_table[jobs.slots, jobs.groups][:, None].expand(-1, keep.shape[1], -1)
        page = tables.gather(2, place).long()
        cold = (place < kv.cold[jobs.slots, jobs.groups, None, None]).flatten()
        to = jobs.dst_pages.repeat_interleave(kv.page_size, 1)[:, None]
        stays = (to != 0).expand(-1, keep.shape[1], -1).flatten()
        to = ((column * dst.num_pages + to) * kv.page_size + torch.arange(keep.shape[2]) % kv.page_size).flatten()
        for tier, src in enumerate(kv.tiers):
            row = ((column * src.num_pages + page) * kv.page_size + keep % kv.page_size).flatten()
            picked = ((cold == bool(tier)) & stays).nonzero()[:, 0]
            if len(picked):
                _move(src, dst, row[picked], to[picked], kv.row_dtype)
        for name, values in state.items():
            kept = values.gather(2, keep[..., None].expand(-1, -1, -1, values.shape[-1])).flatten(0, 2)
            plane = dst.rows(f"state.{name}")
            plane.index_copy_(0, to[stays], kept[stays].to(plane.dtype))

    def copy_pages(self, src: PageStore, src_pages: Tensor, dst: PageStore, dst_pages: Tensor) -> None:
        for name, plane in dst.planes.items():
            if plane.shape[-1]:
                chosen = _raw(src.planes[name]).transpose(0, 1).index_select(1, src_pages.long())
                _raw(plane).transpose(0, 1).index_copy_(1, dst_pages.long(), chosen)


def _move(src: PageStore, dst: PageStore, rows: Tensor, to: Tensor, row_dtype: torch.dtype) -> None:
    """Rows `rows` of one store become rows `to` of another: bytes where the codec is the same, else re-encoded."""

    def planes() -> Iterator[tuple[str, Tensor]]:
        for role in ("k", "v"):
            names, old, new = (f"{role}_data", f"{role}_scale"), _codec(src, role), _codec(dst, role)
            parts = [src.rows(name).index_select(0, rows) for name in names]
            if old != new:
                data, scale = (part.view(src.planes[name].dtype) for name, part in zip(names, parts))
                parts = [_raw(part) for part in new.encode(old.decode(data, scale, row_dtype))]
            yield from zip(names, parts)
        for name in dst.planes:
            if name.startswith("state."):
                yield name, src.rows(name).index_select(0, rows)

    for name, part in planes():
        if part.shape[-1]:
            dst.rows(name).index_copy_(0, to, part)


def _column_ids(kv: KVView, columns: slice) -> Tensor:
    return torch.arange(kv.members.shape[1])[columns]


def _source_pages(kv: KVView, jobs: JobBatch) -> tuple[Tensor, Tensor]:
    """Pages int64[J, p] of the source rows, and whether each is a cold one; page 0 of the hot tier past a job's end."""
    num_pages = -(-jobs.max_src // kv.page_size)
    offset = torch.arange(num_pages)
    place = jobs.first_page[:, None] + offset
    inside = offset * kv.page_size < jobs.num_src[:, None]
    tables = kv.page_table[jobs.slots, jobs.groups]
    pages = tables.gather(1, place.clamp(max=tables.shape[1] - 1)).long().masked_fill(~inside, 0)
    return pages, (place < kv.cold[jobs.slots, jobs.groups, None]) & inside


def _valid(jobs: JobBatch) -> Tensor:
    """bool[J, 1, N]: False where a job has no such source row."""
    return (torch.arange(jobs.max_src) < jobs.num_src[:, None])[:, None]
