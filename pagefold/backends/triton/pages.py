"""Whole pages on the move, within a device and between its memory and the host's."""

from torch import Tensor

from pagefold.backends.triton.plan import next_power_of_2
from pagefold.backends.triton.rows import words_of
from pagefold.store.pagestore import PageStore
from pagefold.store.shim import jit, tl

WORDS = 2048  # of a program at a time, at most: 16 bytes a lane, eight times, so that the bus is never idle


@jit(do_not_specialize=["num_src", "num_dst"])
def copy_blocks(src, dst, src_pages, dst_pages, num_src, num_dst, WIDTHS: tl.constexpr, N: tl.constexpr):
    """Grid (pages, columns): pages src_pages of one column, WIDTHS words each of planes src, go to dst_pages of dst."""
    column = tl.program_id(1).to(tl.int64)
    block = column * num_src + tl.load(src_pages + tl.program_id(0))
    to = column * num_dst + tl.load(dst_pages + tl.program_id(0))
    o_n = tl.arange(0, N)
    for p in tl.static_range(len(WIDTHS)):
        for start in range(0, WIDTHS[p], N):
            ok = start + o_n < WIDTHS[p]
            x = tl.load(src[p] + block * WIDTHS[p] + start + o_n, mask=ok)
            tl.store(dst[p] + to * WIDTHS[p] + start + o_n, x, mask=ok)


class TritonPages:
    """The runner's part of the backend."""

    def copy_pages(self, src: PageStore, src_pages: Tensor, dst: PageStore, dst_pages: Tensor) -> None:
        """One of the stores may be in the host's memory, if that is mapped. Pages are on the device."""
        names = [name for name, plane in src.planes.items() if plane.shape[-1]]
        words = [words_of(src, name) for name in names]
        widths = tuple(rows.shape[-1] * src.page_size for rows in words)
        if len(src_pages):
            copy_blocks[(len(src_pages), src.num_columns)](
                tuple(words),
                tuple(words_of(dst, name) for name in names),
                src_pages,
                dst_pages,
                src.num_pages,
                dst.num_pages,
                WIDTHS=widths,
                N=min(WORDS, next_power_of_2(max(widths))),
            )
