"""Where a head's rows are: the addressing rule of `backends/base.py`, for kernels. All addresses are int64."""

from pagefold.store.shim import jit, tl


@jit
def tile_pages(pages, i_t, stop, PS: tl.constexpr, N: tl.constexpr):
    """Pages of the rows [i_t, i_t + N) of a head, i_t a multiple of PS or of N: one, or int32[N]."""
    if PS >= N:
        return tl.load(pages + i_t // PS, mask=i_t < stop, other=0)
    else:
        place = i_t // PS + tl.arange(0, N) // PS
        return tl.load(pages + place, mask=place * PS < stop, other=0)


@jit
def tile_rows(page, i_t, base, PS: tl.constexpr, N: tl.constexpr):
    """Flat rows int64[N] of the rows [i_t, i_t + N) of a head, given their pages; `base` is column * num_pages."""
    if PS >= N:
        return (base + page) * PS + tl.multiple_of(i_t % PS, N) + tl.arange(0, N)
    else:
        return (base + page) * PS + tl.arange(0, N) % PS


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
