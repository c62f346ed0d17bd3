"""Single rows read, moved and turned between frames: kernels, and the backend's calls that launch them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from pagefold.backends.base import JobBatch, KVView
from pagefold.backends.triton.plan import device_codec, reading
from pagefold.store.format import RowCodec
from pagefold.store.lowbit import device_hadamard
from pagefold.store.pagestore import PageStore
from pagefold.store.shim import jit, tl, triton

ROWS = 16  # of a program that decodes them
COPIED_ROWS = 64  # of one that does not


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


@jit
def source_rows(
    i, ok, tables, first_column, num_groups, max_pages, num_pages, cold_pages, PS: tl.constexpr, NUM_TIERS: tl.constexpr
):
    """(flat rows int64, whether they are cold ones) of source rows i of job `program_id(2)`, in the column
    first_column + `program_id(1)`.

    tables   page_table, cold, and slots, groups, first_page of the jobs
    """
    i_j = tl.program_id(2)
    line = tl.load(tables[2] + i_j) * num_groups + tl.load(tables[3] + i_j)
    place = i // PS + tl.load(tables[4] + i_j)
    page = tl.load(tables[0] + line * max_pages + place, mask=ok, other=0)
    column = (first_column + tl.program_id(1)).to(tl.int64)
    if NUM_TIERS == 2:
        is_cold = place < tl.load(tables[1] + line)
        pages = tl.where(is_cold, cold_pages, num_pages)
    else:
        is_cold = place < 0
        pages = num_pages
    return (column * pages + page) * PS + i % PS, is_cold


WHERE = ("first_column", "num_groups", "max_pages", "num_pages", "cold_pages")  # integers of `source_rows`


@jit(do_not_specialize=[*WHERE, "max_src"])
def read_rows(
    data,
    scale,
    out,
    num_src,
    tables,
    first_column,
    num_groups,
    max_pages,
    num_pages,
    cold_pages,
    max_src,
    TIER: tl.constexpr,
    NUM_TIERS: tl.constexpr,
    PS: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    ROTATE: tl.constexpr,
    LOAD: tl.constexpr,
    PIECES: tl.constexpr,
    BIAS: tl.constexpr,
    GAIN: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Grid (tiles of rows, C, J): source rows of one tier, decoded, to out float32[J, C, max_src, D]."""
    i_j = tl.program_id(2)
    i = tl.program_id(0) * N + tl.arange(0, N)
    ok = i < tl.load(num_src + i_j)
    row, is_cold = source_rows(i, ok, tables, first_column, num_groups, max_pages, num_pages, cold_pages, PS, NUM_TIERS)
    ok &= is_cold == (TIER == 1)
    x = decoded(data, scale, row, ok, N, D, ROTATE, LOAD, PIECES, BIAS, GAIN, SCALED)
    to = (i_j.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * max_src + i
    tl.store(out + to[:, None] * D + tl.arange(0, D)[None, :], x, mask=ok[:, None])


@jit(do_not_specialize=[*WHERE, "max_src"])
def read_states(
    hot,
    cold,
    out,
    num_src,
    tables,
    first_column,
    num_groups,
    max_pages,
    num_pages,
    cold_pages,
    max_src,
    NUM_TIERS: tl.constexpr,
    PS: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
):
    """Grid (tiles of rows, C, J): a state plane of the source rows, to out float32[J, C, max_src, WIDTH]; 0 past the
    end of a job."""
    i_j = tl.program_id(2)
    i = tl.program_id(0) * N + tl.arange(0, N)
    ok = i < tl.load(num_src + i_j)
    row, is_cold = source_rows(i, ok, tables, first_column, num_groups, max_pages, num_pages, cold_pages, PS, NUM_TIERS)
    o_w = tl.arange(0, triton.next_power_of_2(WIDTH))
    inside, at = (o_w < WIDTH)[None, :], row[:, None] * WIDTH + o_w[None, :]
    x = tl.load(hot + at, mask=inside & (ok & (is_cold == False))[:, None], other=0.0).to(tl.float32)  # noqa: E712
    if NUM_TIERS == 2:
        x += tl.load(cold + at, mask=inside & (ok & is_cold)[:, None], other=0.0).to(tl.float32)
    to = (i_j.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * max_src + i
    tl.store(out + to[:, None] * WIDTH + o_w[None, :], x, mask=inside & (i < max_src)[:, None])


@jit
def copy_words(src, dst, row, to, ok, WIDTH: tl.constexpr):
    """Rows `row` of one plane, WIDTH words each, become rows `to` of another."""
    o_w = tl.arange(0, triton.next_power_of_2(WIDTH))
    mask = ok[:, None] & (o_w < WIDTH)[None, :]
    x = tl.load(src + row[:, None] * WIDTH + o_w[None, :], mask=mask)
    tl.store(dst + to[:, None] * WIDTH + o_w[None, :], x, mask=mask)


@jit(do_not_specialize=[*WHERE, "max_src", "num_keep", "dst_pages"])
def move_rows(
    keep,
    to_pages,
    tables,
    planes,
    others,
    values,
    states,
    k_rows,
    v_rows,
    first_column,
    num_groups,
    max_pages,
    num_pages,
    cold_pages,
    max_src,
    num_keep,
    dst_pages,
    DST_TIER: tl.constexpr,
    NUM_TIERS: tl.constexpr,
    PS: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    WIDTHS: tl.constexpr,
    MOVED: tl.constexpr,
    STATE_WIDTHS: tl.constexpr,
    RECODE_K: tl.constexpr,
    RECODE_V: tl.constexpr,
    K_ROTATE: tl.constexpr,
    LOAD_K: tl.constexpr,
    K_PIECES: tl.constexpr,
    K_BIAS: tl.constexpr,
    K_GAIN: tl.constexpr,
    K_SCALED: tl.constexpr,
    STORE_K: tl.constexpr,
    K_OPTIONS: tl.constexpr,
    V_ROTATE: tl.constexpr,
    LOAD_V: tl.constexpr,
    V_PIECES: tl.constexpr,
    V_BIAS: tl.constexpr,
    V_GAIN: tl.constexpr,
    V_SCALED: tl.constexpr,
    STORE_V: tl.constexpr,
    V_OPTIONS: tl.constexpr,
):
    """Grid (tiles of kept rows, C, J): rows keep int64[J, C, num_keep] go to the pages to_pages int64[J, num_keep / PS]
    of one tier, which has dst_pages in all.

    planes           what is copied as it is, WIDTHS words a row, from the rows of the same tier
    others           the same planes of the other tier; copied from where MOVED says so
    values, states   float32[J, C, max_src, STATE_WIDTHS] and the planes that they go to
    k_rows, v_rows   (data, scale of the other tier, data, scale of the destination), where rows are encoded anew
    """
    i_c, i_j = tl.program_id(1), tl.program_id(2)
    i = tl.program_id(0) * N + tl.arange(0, N)
    to_page = tl.load(to_pages + i_j * (num_keep // PS) + i // PS, mask=i < num_keep, other=0)
    ok = to_page != 0
    i_head = i_j.to(tl.int64) * tl.num_programs(1) + i_c
    chosen = tl.load(keep + i_head * num_keep + i, mask=ok, other=0)
    row, is_cold = source_rows(
        chosen, ok, tables, first_column, num_groups, max_pages, num_pages, cold_pages, PS, NUM_TIERS
    )
    to = ((first_column + i_c).to(tl.int64) * dst_pages + to_page) * PS + i % PS
    stays = ok & (is_cold == (DST_TIER == 1))
    moves = ok & (is_cold != (DST_TIER == 1))
    for p in tl.static_range(len(WIDTHS)):
        copy_words(planes[p], planes[p], row, to, stays, WIDTHS[p])
        if MOVED[p]:
            copy_words(others[p], planes[p], row, to, moves, WIDTHS[p])
    for p in tl.static_range(len(STATE_WIDTHS)):
        o_w = tl.arange(0, triton.next_power_of_2(STATE_WIDTHS[p]))
        mask = ok[:, None] & (o_w < STATE_WIDTHS[p])[None, :]
        at = (i_head * max_src + chosen)[:, None] * STATE_WIDTHS[p] + o_w[None, :]
        x = tl.load(values[p] + at, mask=mask).to(states[p].dtype.element_ty)
        tl.store(states[p] + to[:, None] * STATE_WIDTHS[p] + o_w[None, :], x, mask=mask)
    if RECODE_K:
        x = decoded(k_rows[0], k_rows[1], row, moves, N, D, K_ROTATE, LOAD_K, K_PIECES, K_BIAS, K_GAIN, K_SCALED)
        STORE_K(k_rows[2], k_rows[3], to, moves, x, D, K_OPTIONS)
    if RECODE_V:
        x = decoded(v_rows[0], v_rows[1], row, moves, N, D, V_ROTATE, LOAD_V, V_PIECES, V_BIAS, V_GAIN, V_SCALED)
        STORE_V(v_rows[2], v_rows[3], to, moves, x, D, V_OPTIONS)


def codec_of(store: PageStore, role: str) -> RowCodec:
    return store.format.k if role == "k" else store.format.v


def words_of(store: PageStore, name: str) -> Tensor:
    """A plane as rows of the widest integers that a row is made of."""
    rows = store.rows(name).view(torch.uint8)
    for dtype in (torch.int64, torch.int32, torch.int16):
        if rows.shape[-1] % dtype.itemsize == 0:
            return rows.view(dtype)
    return rows


def by_tier(
    kv: KVView, jobs: JobBatch, columns: slice, role: str, out: Tensor
) -> Iterator[tuple[tuple, RowCodec, dict[str, int]]]:
    """For kernels that turn source rows into something of their own, a launch a tier: their arguments up to `max_src`,
    the tier's codec, and its constants. `out` is float32[J, C, max_src or more, ...]."""
    numbers = where(kv, jobs, columns)
    for tier, store in enumerate(kv.tiers):
        args = store.rows(f"{role}_data"), store.rows(f"{role}_scale"), out, jobs.num_src, *numbers, out.shape[2]
        constants = {"TIER": tier, "NUM_TIERS": len(kv.tiers), "PS": kv.page_size, "D": store.head_dim}
        yield args, codec_of(store, role), constants


class TritonRows:
    """The compactor's part of the backend: what scorers read, and rows on the move."""

    def read_rows(self, kv: KVView, jobs: JobBatch, columns: slice, role: str) -> Tensor:
        shape = (len(jobs.slots), width_of(kv, columns), jobs.max_src, kv.window.shape[-1])
        out = torch.zeros(shape, dtype=torch.float32, device=jobs.slots.device)
        grid = triton.cdiv(jobs.max_src, ROWS), shape[1], shape[0]
        for args, codec, constants in by_tier(kv, jobs, columns, role, out):
            read_rows[grid](*args, N=ROWS, **constants, **decoding(codec, shape[3]))
        return out

    def read_state(self, kv: KVView, jobs: JobBatch, columns: slice, name: str) -> Tensor:
        width = kv.tiers[0].layout[f"state.{name}"].width
        shape = (len(jobs.slots), width_of(kv, columns), jobs.max_src, width)
        out = torch.empty(shape, dtype=torch.float32, device=jobs.slots.device)
        tile = 512
        read_states[(triton.cdiv(jobs.max_src, tile), shape[1], shape[0])](
            kv.tiers[0].rows(f"state.{name}"),
            kv.tiers[-1].rows(f"state.{name}"),
            out,
            jobs.num_src,
            *where(kv, jobs, columns),
            jobs.max_src,
            NUM_TIERS=len(kv.tiers),
            PS=kv.page_size,
            WIDTH=width,
            N=tile,
        )
        return out

    def compact(self, kv: KVView, jobs: JobBatch, columns: slice, keep: Tensor, state: dict[str, Tensor]) -> None:
        dst, src = kv.tiers[jobs.dst_tier], kv.tiers[-1 - jobs.dst_tier]
        recoded = [role for role in ("k", "v") if codec_of(src, role) != codec_of(dst, role)]
        given = [f"state.{name}" for name in state]
        copied = [name for name, plane in dst.planes.items() if plane.shape[-1] and name not in given]
        moved = [len(kv.tiers) == 2 and name[0] not in recoded for name in copied]
        constants = {"RECODE_K": "k" in recoded, "RECODE_V": "v" in recoded}
        for role in ("k", "v"):
            names = f"LOAD_{role.upper()}", f"STORE_{role.upper()}"
            options = decoding(codec_of(src, role), dst.head_dim)
            new = device_codec(codec_of(dst, role))
            constants |= {names[0]: options.pop("LOAD"), names[1]: new.store}
            constants |= {f"{role.upper()}_{name}": value for name, value in options.items()}
            constants[f"{role.upper()}_OPTIONS"] = new.options
        num_jobs, width, num_keep = keep.shape
        tables, *numbers = where(kv, jobs, columns)
        rows = ROWS if recoded else COPIED_ROWS
        move_rows[(triton.cdiv(num_keep, rows), width, num_jobs)](
            keep.contiguous(),
            jobs.dst_pages,
            tables,
            tuple(words_of(dst, name) for name in copied),
            tuple(words_of(src if moves else dst, name) for name, moves in zip(copied, moved)),
            tuple(values.contiguous() for values in state.values()),
            tuple(dst.rows(name) for name in given),
            *(
                tuple(store.rows(f"{role}_{part}") for store in (src, dst) for part in ("data", "scale"))
                for role in ("k", "v")
            ),
            *numbers,
            jobs.max_src,
            num_keep,
            dst.num_pages,
            DST_TIER=jobs.dst_tier,
            NUM_TIERS=len(kv.tiers),
            PS=kv.page_size,
            D=dst.head_dim,
            N=rows,
            WIDTHS=tuple(words_of(dst, name).shape[-1] for name in copied),
            MOVED=tuple(moved),
            STATE_WIDTHS=tuple(dst.layout[name].width for name in given),
            **constants,
        )


def decoding(codec: RowCodec, head_dim: int) -> dict:
    """Constants of a kernel that decodes rows into the model's frame."""
    constants = reading(codec, head_dim)
    return {name: constants[name] for name in ("LOAD", "PIECES", "BIAS", "GAIN", "SCALED")} | {"ROTATE": codec.rotate}


def rotates(kv: KVView) -> bool:
    """Whether a tier stores K in a rotated frame."""
    return any(store.format.k.rotate for store in kv.tiers)


def width_of(kv: KVView, columns: slice) -> int:
    return len(range(kv.members.shape[1])[columns])


def where(kv: KVView, jobs: JobBatch, columns: slice) -> tuple:
    """What `source_rows` takes: the tables, and WHERE."""
    tables = (kv.page_table, kv.cold, jobs.slots, jobs.groups, jobs.first_page)
    first_column = range(kv.members.shape[1])[columns].start
    return tables, first_column, *kv.page_table.shape[1:], kv.tiers[0].num_pages, kv.tiers[-1].num_pages
