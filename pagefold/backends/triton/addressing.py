"""Where a head's rows are: the addressing rule of `backends/base.py`, for kernels. Addresses are int64, rows of one
column may be int32."""

from pagefold.store.shim import jit, tl


@jit
def tile_pages(pages, i_t, stop, PS: tl.constexpr, N: tl.constexpr, FEW: tl.constexpr = 4):
    """Pages of the rows [i_t, i_t + N) of a head, i_t a multiple of PS or of N: a tuple if they are FEW, so that
    threads need not exchange them, else int32[N]."""
    if PS * FEW >= N:
        few = ()
        for j in tl.static_range((N + PS - 1) // PS):
            few = few + (tl.load(pages + i_t // PS + j, mask=i_t + j * PS < stop, other=0),)
        return few
    else:
        place = i_t // PS + tl.arange(0, N) // PS
        return tl.load(pages + place, mask=place * PS < stop, other=0)


@jit
def tile_rows(page, i_t, base, PS: tl.constexpr, N: tl.constexpr, FEW: tl.constexpr = 4):
    """Flat rows [N] of the rows [i_t, i_t + N) of a head, given their pages; `base` is column * num_pages, int64, or 0
    for int32 rows of a column."""
    o_n = tl.arange(0, N)
    if PS >= N:
        return (base + page[0]) * PS + tl.multiple_of(i_t % PS, N) + o_n
    elif PS * FEW >= N:
        row = (base + page[0]) * PS + o_n
        for j in tl.static_range(1, N // PS):
            row = tl.where(o_n >= j * PS, (base + page[j]) * PS + o_n - j * PS, row)
        return row
    else:
        return (base + page) * PS + o_n % PS


@jit
def tier_rows(n, line, cold, PS: tl.constexpr, TIER: tl.constexpr, NUM_TIERS: tl.constexpr):
    """(first, stop) of the rows of a group of n rows that lie in a tier: the cold ones come first."""
    first, stop = 0, n
    if NUM_TIERS == 2:
        border = tl.load(cold + line) * PS
        if TIER == 1:
            stop = tl.minimum(border, n)
        else:
            first = border
    return first, stop


@jit
def piece_channels(D: tl.constexpr, P: tl.constexpr, PAIRS: tl.constexpr, p: tl.constexpr):
    """Channels of piece p of a row, int32[D / P]; see `DeviceCodec`."""
    return p % PAIRS + p // PAIRS * (D * PAIRS // P) + tl.arange(0, D // P) * PAIRS
