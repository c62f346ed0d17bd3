"""Random caches, batches and compaction jobs for tests of backends, with every byte that must not be read poisoned."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagefold.backends.base import ForwardInputs, HeadTurn, JobBatch, KVView
from pagefold.store.format import Plane, parse_format
from pagefold.store.pagestore import PageStore

# (layer, head) -> group, column: one group of everything; whole layers per group; groups that mix layers and heads.
LAYOUTS = {
    "uniform": ([[0, 0], [0, 0]], [[0, 1], [2, 3]]),
    "by_layer": ([[1, 1], [0, 0]], [[1, 0], [0, 1]]),
    "mixed": ([[2, 0], [3, 2], [1, 0], [3, 1]], [[1, 1], [0, 0], [1, 0], [1, 0]]),
}


@dataclass
class Case:
    """What a random cache looks like.

    layout       a key of LAYOUTS
    lengths      tokens of each sequence
    evicted      pages dropped so far from each group, cut to what the shortest sequence has full
    cold         pages in the cold tier, likewise
    stride       tokens from one query of a window to the next
    """

    layout: str = "uniform"
    hot: str = "fp32"
    cold: str | None = None
    lengths: tuple[int, ...] = (1, 7, 8, 9, 45)
    page_size: int = 8
    per_head: int = 2
    head_dim: int = 16
    num_window: int = 4
    stride: int = 1
    dtype: torch.dtype = torch.float32
    state: dict[str, Plane] = field(default_factory=dict)
    seed: int = 0

    @property
    def two_tiers(self) -> bool:
        return self.cold is not None


def members_of(group_of: Tensor, column_of: Tensor) -> Tensor:
    """int32[G, Hp, 2]: (layer, head) of each (group, column)."""
    num_groups = int(group_of.max()) + 1
    members = torch.zeros(num_groups, group_of.numel() // num_groups, 2, dtype=torch.int32)
    for layer, head in torch.cartesian_prod(*(torch.arange(n) for n in group_of.shape)).tolist():
        members[group_of[layer, head], column_of[layer, head]] = torch.tensor([layer, head], dtype=torch.int32)
    return members


def make_view(case: Case) -> KVView:
    """A cache of `case.lengths` tokens in slots 1, 2, ...; pages are scattered, free ones and page 0 poisoned."""
    rng = torch.Generator().manual_seed(case.seed)
    group_of, column_of = (torch.tensor(table, dtype=torch.int32) for table in LAYOUTS[case.layout])
    members = members_of(group_of, column_of)
    num_groups, num_columns = members.shape[:2]
    num_slots, page_size = len(case.lengths) + 1, case.page_size
    max_pages = max(case.lengths) // page_size + 3
    num_pages = num_slots * num_groups * max_pages + 40
    tiers = [
        PageStore(parse_format(spec), num_pages, num_columns, page_size, case.head_dim, case.state)
        for spec in (case.hot, case.cold)
        if spec
    ]
    page_table = torch.zeros(num_slots, num_groups, max_pages, dtype=torch.int32)
    evicted = torch.zeros(num_slots, num_groups, dtype=torch.int32)
    cold = torch.zeros(num_slots, num_groups, dtype=torch.int32)
    free = [(torch.randperm(num_pages - 1, generator=rng) + 1).tolist() for _ in tiers]
    for slot, length in enumerate(case.lengths, start=1):
        for group in range(num_groups):
            dropped = min(group % 3, (length - 1) // page_size)
            full = length // page_size - dropped
            num_cold = min(1 + group % 2, max(full - 1, 0)) if case.two_tiers else 0
            evicted[slot, group], cold[slot, group] = dropped * page_size, num_cold
            for place in range(max_pages - 1):
                page_table[slot, group, place] = free[1 if place < num_cold else 0].pop()
    num_heads = group_of.shape[1]
    shape = (len(group_of), 3, case.num_window, num_heads * case.per_head, case.head_dim)
    window = torch.randn(shape, generator=rng).to(case.dtype)
    view = KVView(
        tiers,
        page_table,
        evicted,
        cold,
        group_of,
        column_of,
        members,
        window,
        10000.0 ** -(torch.arange(0, case.head_dim, 2) / case.head_dim),
        page_size,
        case.stride,
    )
    _fill(view, case, rng)
    return view


def _fill(view: KVView, case: Case, rng: torch.Generator) -> None:
    """Poison everything, then write the rows that exist and a random state for each."""
    for store in view.tiers:
        store.poison(torch.arange(store.num_pages))
    for slot, length in enumerate(case.lengths, start=1):
        for group in range(view.page_table.shape[1]):
            n = length - int(view.evicted[slot, group])
            for place in range(-(-n // case.page_size)):
                store = view.tiers[1 if place < int(view.cold[slot, group]) else 0]
                rows = slice(0, min(case.page_size, n - place * case.page_size))
                page = int(view.page_table[slot, group, place])
                shape = (store.num_columns, rows.stop, case.head_dim)
                for role, codec in (("k", store.format.k), ("v", store.format.v)):
                    encoded = codec.encode(torch.randn(shape, generator=rng).to(view.row_dtype))
                    for part, values in zip(("data", "scale"), encoded):
                        store.planes[f"{role}_{part}"][page, :, rows] = values
                for name, plane in store.planes.items():
                    if name.startswith("state."):
                        plane[page, :, rows] = torch.rand(plane[page, :, rows].shape, generator=rng).to(plane.dtype)


def make_batch(view: KVView, case: Case, chunks: list[tuple[int, int]], window: bool = False) -> ForwardInputs:
    """The last q_len tokens of sequences: `chunks` is (slot, q_len). With `window`, window slot 1 keeps queries."""
    slots, q_lens = [slot for slot, _ in chunks], [q_len for _, q_len in chunks]
    seq_lens = [case.lengths[slot - 1] for slot in slots]
    starts = torch.tensor([0, *q_lens]).cumsum(0)
    num_tokens = sum(q_lens)
    positions = torch.cat([torch.arange(length - q_len, length) for length, q_len in zip(seq_lens, q_lens)])
    kept = torch.full_like(positions, -1)  # place in the window of each token
    if window:
        last = min(q_lens[0], case.num_window)
        kept[q_lens[0] - last : q_lens[0]] = torch.arange(last)
    return ForwardInputs(
        tokens=torch.zeros(num_tokens, dtype=torch.int64),
        positions=positions,
        q_start=starts,
        slots=torch.tensor(slots),
        seq_lens=torch.tensor(seq_lens),
        logits_at=starts[1:] - 1,
        window_slots=torch.where(kept >= 0, 1, 0),
        window_index=kept.clamp(min=0),
        keeps_window=window,
        host_q_lens=q_lens,
        host_slots=slots,
        host_seq_lens=seq_lens,
    )


def make_jobs(view: KVView, case: Case, dst_tier: int, keep_pages: int = 1, first_page: int = 0) -> JobBatch:
    """A compaction of every group of every sequence with enough full pages, onto pages that no table names."""
    found = []
    for slot, length in enumerate(case.lengths, start=1):
        for group in range(view.page_table.shape[1]):
            n = length - int(view.evicted[slot, group])
            num_src = (n // case.page_size - first_page) * case.page_size
            if num_src >= keep_pages * case.page_size and n >= case.num_window:
                found.append((slot, group, num_src, n, length))
    slots, groups, num_src, num_rows, num_tokens = (torch.tensor(column) for column in zip(*found))
    used = set(view.page_table.flatten().tolist())
    fresh = [page for page in range(1, view.tiers[dst_tier].num_pages) if page not in used]
    return JobBatch(
        slots=slots,
        groups=groups,
        first_page=torch.full_like(slots, first_page),
        num_src=num_src,
        num_rows=num_rows,
        num_tokens=num_tokens,
        window_slots=1 + slots % 2,
        dst_pages=torch.tensor(fresh[: len(found) * keep_pages]).view(len(found), keep_pages),
        dst_tier=dst_tier,
        max_src=int(num_src.max()),
        max_rows=int(num_rows.max()),
    )


def make_keep(jobs: JobBatch, num_columns: int, num_keep: int, seed: int = 0) -> Tensor:
    """int64[J, C, n]: ascending random source rows of each job and column."""
    rng = torch.Generator().manual_seed(seed)
    keep = torch.zeros(len(jobs.slots), num_columns, num_keep, dtype=torch.int64)
    for j, num_src in enumerate(jobs.num_src.tolist()):
        for c in range(num_columns):
            keep[j, c] = torch.randperm(num_src, generator=rng)[:num_keep].sort().values
    return keep


def new_tokens(view: KVView, case: Case, fwd: ForwardInputs, seed: int = 1) -> Tensor:
    """Random qkv [T, Hq + 2 H, D] of a batch, in the model's dtype."""
    rng = torch.Generator().manual_seed(seed)
    num_heads = view.group_of.shape[1] * (case.per_head + 2)
    return torch.randn(len(fwd.tokens), num_heads, case.head_dim, generator=rng).to(case.dtype)


def new_queries(view: KVView, case: Case, fwd: ForwardInputs, seed: int = 1) -> Tensor:
    """Random q [T, Hq, D] of a batch."""
    return new_tokens(view, case, fwd, seed)[:, : view.group_of.shape[1] * case.per_head].contiguous()


def of_sources(x: Tensor, jobs: JobBatch) -> Tensor:
    """x [J, ..., N], 0 past the last source row of each job."""
    valid = torch.arange(jobs.max_src, device=x.device) < jobs.num_src[:, None]
    return x.where(valid.view(len(x), *[1] * (x.ndim - 2), -1), 0)


def make_turn(case: Case, max_positions: int, norm: bool) -> HeadTurn:
    """Random norm weights and the angles of positions."""
    rng = torch.Generator().manual_seed(7)
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    angles = torch.arange(max_positions)[:, None] * 0.5 ** torch.arange(case.head_dim // 2)
    cos_sin = torch.stack((angles.cos(), angles.sin()), 1).to(wide)
    return HeadTurn(cos_sin, torch.rand(2, case.head_dim, generator=rng).to(wide) if norm else None, 1e-5)


def copy_of(view: KVView) -> KVView:
    """The same cache in other memory."""
    tiers = []
    for store in view.tiers:
        state = {
            name.removeprefix("state."): plane for name, plane in store.layout.items() if name.startswith("state.")
        }
        twin = PageStore(store.format, store.num_pages, store.num_columns, store.page_size, store.head_dim, state)
        for name, plane in store.planes.items():
            twin.planes[name].copy_(plane)
        tiers.append(twin)
    tables = (view.page_table.clone(), view.evicted.clone(), view.cold.clone())
    return KVView(
        tiers, *tables, view.group_of, view.column_of, view.members, view.window.clone(), view.inv_freq, view.page_size
    )


def bytes_of(view: KVView) -> dict[str, Tensor]:
    """Every plane of every tier as bytes, and the window: for comparing caches bit by bit."""
    found = {
        f"{tier}.{name}": plane.contiguous().view(torch.uint8) if plane.shape[-1] else torch.empty(0)
        for tier, store in enumerate(view.tiers)
        for name, plane in store.planes.items()
    }
    return found | {"window": view.window.contiguous().view(torch.uint8)}
