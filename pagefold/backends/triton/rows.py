"""Single rows read, moved and turned between frames: kernels, and the backend's calls that launch them."""

import torch
from torch import Tensor

from pagefold.backends.base import JobBatch, KVView
from pagefold.backends.triton.plan import device_codec, next_power_of_2, reading
from pagefold.store.format import RowCodec
from pagefold.store.lowbit import device_hadamard
from pagefold.store.pagestore import PageStore
from pagefold.store.shim import jit, tl, triton

ROWS = 16  # items a program handles


@jit(do_not_specialize=["num_rows"])
def rotate_rows(x, out, num_rows, D: tl.constexpr, N: tl.constexpr):
    """out[num_rows, D] = Hadamard transform of x[num_rows, D]."""
    i = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    ok = i < num_rows
    at = i[:, None] * D + tl.arange(0, D)[None, :]
    b_x = tl.load(x + at, mask=ok[:, None], other=0.0).to(tl.float32)
    tl.store(out + at, device_hadamard(b_x, N, D), mask=ok[:, None])


@jit
def piece_numbers(x, p: tl.constexpr, BIAS: tl.constexpr, GAIN: tl.constexpr):
    return (x[p] - BIAS[p]) * GAIN[p]


@jit
def pair_numbers(x, p: tl.constexpr, BIAS: tl.constexpr, GAIN: tl.constexpr):
    """Pieces p and p + 1, whose channels are neighbours."""
    return tl.interleave(piece_numbers(x, p, BIAS, GAIN), piece_numbers(x, p + 1, BIAS, GAIN))


@jit
def decoded(
    data,
    scale,
    row,
    ok,
    N: tl.constexpr,
    D: tl.constexpr,
    ROTATE: tl.constexpr,
    LOAD: tl.constexpr,
    PIECES: tl.constexpr,
    BIAS: tl.constexpr,
    GAIN: tl.constexpr,
    SCALED: tl.constexpr,
):
    """float32[N, D] of rows in the model's frame: pieces side by side, pairs of channels first, then parts of a row."""
    x = LOAD(data, row, ok, D, False, tl.float32)
    if PIECES == 1:
        whole = piece_numbers(x, 0, BIAS, GAIN)
    elif PIECES == 2:
        whole = pair_numbers(x, 0, BIAS, GAIN)
    elif PIECES == 4:
        halves = tl.join(pair_numbers(x, 0, BIAS, GAIN), pair_numbers(x, 2, BIAS, GAIN))
        whole = tl.reshape(tl.permute(halves, (0, 2, 1)), (N, D))
    else:
        even = tl.join(pair_numbers(x, 0, BIAS, GAIN), pair_numbers(x, 4, BIAS, GAIN))
        odd = tl.join(pair_numbers(x, 2, BIAS, GAIN), pair_numbers(x, 6, BIAS, GAIN))
        whole = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), (N, D))
    if SCALED:
        whole = whole * tl.load(scale + row, mask=ok, other=0.0).to(tl.float32)[:, None]
    if ROTATE:
        whole = device_hadamard(whole, N, D)
    return whole


@jit(do_not_specialize=["num_rows"])
def read_rows(
    data,
    scale,
    rows,
    tiers,
    out,
    num_rows,
    TIER: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    ROTATE: tl.constexpr,
    LOAD: tl.constexpr,
    PIECES: tl.constexpr,
    BIAS: tl.constexpr,
    GAIN: tl.constexpr,
    SCALED: tl.constexpr,
):
    """out[i] = row rows[i] of a plane, decoded, where tiers[i] == TIER."""
    i = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    ok = (i < num_rows) & (tl.load(tiers + i, mask=i < num_rows, other=-1) == TIER)
    row = tl.load(rows + i, mask=ok, other=0)
    x = decoded(data, scale, row, ok, N, D, ROTATE, LOAD, PIECES, BIAS, GAIN, SCALED)
    tl.store(out + i[:, None] * D + tl.arange(0, D)[None, :], x, mask=ok[:, None])


@jit(do_not_specialize=["num_rows"])
def recode_rows(
    data,
    scale,
    to_data,
    to_scale,
    rows,
    to_rows,
    tiers,
    num_rows,
    TIER: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    ROTATE: tl.constexpr,
    LOAD: tl.constexpr,
    PIECES: tl.constexpr,
    BIAS: tl.constexpr,
    GAIN: tl.constexpr,
    SCALED: tl.constexpr,
    STORE: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Row rows[i] of one plane, decoded, becomes row to_rows[i] of another, encoded, where tiers[i] == TIER."""
    i = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    ok = (i < num_rows) & (tl.load(tiers + i, mask=i < num_rows, other=-1) == TIER)
    row = tl.load(rows + i, mask=ok, other=0)
    x = decoded(data, scale, row, ok, N, D, ROTATE, LOAD, PIECES, BIAS, GAIN, SCALED)
    STORE(to_data, to_scale, tl.load(to_rows + i, mask=ok, other=0), ok, x, D, OPTIONS)


@jit(do_not_specialize=["num_rows"])
def copy_rows(
    src,
    dst,
    rows,
    to_rows,
    tiers,
    num_rows,
    width,
    TIER: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
):
    """dst[to_rows[i]] = src[rows[i]], `width` words each (WIDTH, the next power of two), where tiers[i] == TIER."""
    i = (tl.program_id(0) * N + tl.arange(0, N)).to(tl.int64)
    ok = (i < num_rows) & (tl.load(tiers + i, mask=i < num_rows, other=-1) == TIER)
    row, to = tl.load(rows + i, mask=ok, other=0), tl.load(to_rows + i, mask=ok, other=0)
    o_w = tl.arange(0, WIDTH)
    mask = ok[:, None] & (o_w < width)[None, :]
    x = tl.load(src + row[:, None] * width + o_w[None, :], mask=mask)
    tl.store(dst + to[:, None] * width + o_w[None, :], x, mask=mask)


def _codec(store: PageStore, role: str) -> RowCodec:
    return store.format.k if role == "k" else store.format.v


def _words(store: PageStore, name: str) -> Tensor:
    """A plane as rows of the widest integers that a row is made of."""
    rows = store.rows(name).view(torch.uint8)
    for dtype in (torch.int64, torch.int32, torch.int16):
        if rows.shape[-1] % dtype.itemsize == 0:
            return rows.view(dtype)
    return rows


class TritonRows:
    """The compactor's part of the backend: what scorers read, and rows and pages on the move."""

    def read_rows(self, kv: KVView, jobs: JobBatch, columns: slice, role: str) -> Tensor:
        every = torch.arange(jobs.max_src, device=jobs.slots.device).expand(len(jobs.slots), _width(kv, columns), -1)
        rows, tiers = _source(kv, jobs, columns, every)
        out = torch.zeros(*every.shape, kv.window.shape[-1], dtype=torch.float32, device=rows.device)
        for tier, store in enumerate(kv.tiers):
            read_rows[(triton.cdiv(rows.numel(), ROWS),)](
                store.rows(f"{role}_data"),
                store.rows(f"{role}_scale"),
                rows,
                tiers,
                out,
                rows.numel(),
                TIER=tier,
                D=out.shape[-1],
                N=ROWS,
                **_decoding(_codec(store, role), out.shape[-1]),
            )
        return out

    def read_state(self, kv: KVView, jobs: JobBatch, columns: slice, name: str) -> Tensor:
        every = torch.arange(jobs.max_src, device=jobs.slots.device).expand(len(jobs.slots), _width(kv, columns), -1)
        rows, tiers = _source(kv, jobs, columns, every)
        found = [
            store.rows(f"state.{name}")[torch.where(tiers == tier, rows, 0)] for tier, store in enumerate(kv.tiers)
        ]
        state = found[0] if len(found) == 1 else torch.where((tiers == 1)[..., None], found[1], found[0])
        return state.float().masked_fill((tiers < 0)[..., None], 0)

    def compact(self, kv: KVView, jobs: JobBatch, columns: slice, keep: Tensor, state: dict[str, Tensor]) -> None:
        dst = kv.tiers[jobs.dst_tier]
        rows, tiers = _source(kv, jobs, columns, keep)
        place = torch.arange(keep.shape[2], device=keep.device)
        page = jobs.dst_pages[:, None, place // kv.page_size].long()
        to = (_column_ids(kv, columns)[:, None] * dst.num_pages + page) * kv.page_size + place % kv.page_size
        to = to.contiguous()
        for tier, src in enumerate(kv.tiers):
            moved = [name for name in dst.planes if name.startswith("state.")]
            for role in ("k", "v"):
                names = (f"{role}_data", f"{role}_scale")
                if _codec(src, role) == _codec(dst, role):
                    moved += names
                else:
                    self._recode(src, dst, role, rows, to, tiers, tier)
            for name in moved:
                if dst.planes[name].shape[-1]:
                    words = _words(src, name)
                    copy_rows[(triton.cdiv(rows.numel(), ROWS),)](
                        words,
                        _words(dst, name),
                        rows,
                        to,
                        tiers,
                        rows.numel(),
                        words.shape[-1],
                        TIER=tier,
                        WIDTH=next_power_of_2(words.shape[-1]),
                        N=ROWS,
                    )
        for name, values in state.items():
            kept = values.gather(2, keep[..., None].expand(-1, -1, -1, values.shape[-1])).flatten(0, 2)
            plane = dst.rows(f"state.{name}")
            plane.index_copy_(0, to.flatten(), kept.to(plane.dtype))

    def _recode(
        self, src: PageStore, dst: PageStore, role: str, rows: Tensor, to: Tensor, tiers: Tensor, tier: int
    ) -> None:
        new = device_codec(_codec(dst, role))
        recode_rows[(triton.cdiv(rows.numel(), ROWS),)](
            src.rows(f"{role}_data"),
            src.rows(f"{role}_scale"),
            dst.rows(f"{role}_data"),
            dst.rows(f"{role}_scale"),
            rows,
            to,
            tiers,
            rows.numel(),
            TIER=tier,
            D=src.head_dim,
            N=ROWS,
            **_decoding(_codec(src, role), src.head_dim),
            STORE=new.store,
            OPTIONS=new.options,
        )

    def copy_pages(self, src: PageStore, src_pages: Tensor, dst: PageStore, dst_pages: Tensor) -> None:
        """One of the stores may be in the host's memory."""
        for name, plane in dst.planes.items():
            if plane.shape[-1]:
                pages = _words(src, name).view(src.num_columns, src.num_pages, -1)
                chosen = pages.index_select(1, src_pages.to(pages.device).long())
                into = _words(dst, name).view(dst.num_columns, dst.num_pages, -1)
                into.index_copy_(1, dst_pages.to(into.device).long(), chosen.to(into.device))


def _decoding(codec: RowCodec, head_dim: int) -> dict:
    """Constants of a kernel that decodes rows into the model's frame."""
    constants = reading(codec, head_dim)
    return {name: constants[name] for name in ("LOAD", "PIECES", "BIAS", "GAIN", "SCALED")} | {"ROTATE": codec.rotate}


def _width(kv: KVView, columns: slice) -> int:
    return len(range(kv.members.shape[1])[columns])


def _column_ids(kv: KVView, columns: slice) -> Tensor:
    return torch.arange(kv.members.shape[1], device=kv.members.device)[columns]


def _source(kv: KVView, jobs: JobBatch, columns: slice, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, tiers) of source rows `chosen` int64[J, C, n]: flat row in the planes of its tier, int64[J, C, n] each.
    Past the end of a job the tier is -1."""
    place = jobs.first_page[:, None, None] + chosen // kv.page_size
    ok = chosen < jobs.num_src[:, None, None]
    tables = kv.page_table[jobs.slots, jobs.groups][:, None].expand(-1, chosen.shape[1], -1)
    page = tables.gather(2, place.clamp(max=tables.shape[2] - 1)).long()
    cold = place < kv.cold[jobs.slots, jobs.groups, None, None]
    num_pages = torch.where(cold, kv.tiers[-1].num_pages, kv.tiers[0].num_pages)
    rows = (_column_ids(kv, columns)[:, None] * num_pages + page) * kv.page_size + chosen % kv.page_size
    return rows, torch.where(ok, cold.long(), -1)
