"""Where bytes live: the tensors of one tier, indexed by page."""

import math

import numpy as np
import torch
from torch import Tensor

from pagefold.store.format import FormatPair, Plane
from pagefold.store.mapped import mapped_zeros

ALIGNED = 256  # bytes: where a plane starts in memory that it shares with others


def _zeros(num_columns: int, num_pages: int, page_size: int, plane: Plane, device: torch.device | str) -> Tensor:
    """Zeroed storage of one plane. In host memory it comes from numpy, which leaves pages untouched, and so takes no
    memory for them, until they are written; torch would fill them."""
    shape = (num_columns, num_pages, page_size, plane.width)
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=plane.dtype, device=device)
    storage = np.zeros((*shape[:3], plane.bytes_per_row), np.uint8)
    return torch.from_numpy(storage).view(plane.dtype) if plane.width else torch.zeros(shape, dtype=plane.dtype)


def _mapped(num_columns: int, num_pages: int, page_size: int, layout: dict[str, Plane]) -> dict[str, Tensor]:
    """Zeroed storage of all planes in host memory that a device reads and writes, locked at once."""
    shape = num_columns, num_pages, page_size
    sizes = [math.prod(shape) * plane.bytes_per_row for plane in layout.values()]
    memory = torch.from_numpy(mapped_zeros(sum(-(-size // ALIGNED) * ALIGNED for size in sizes)))
    found, start = {}, 0
    for (name, plane), size in zip(layout.items(), sizes, strict=True):
        found[name] = memory[start : start + size].view(plane.dtype).view(*shape, plane.width)
        start += -(-size // ALIGNED) * ALIGNED
    return found


class PageStore:
    """The planes of one tier: ``planes[name][page, column, index]`` is a row's entry in that plane.

        k_data, k_scale, v_data, v_scale   as the codecs of `format` say
        state.NAME                         per-row memory of a scorer; travels with the row, 0 when a row is appended

    Storage keeps each column's rows of consecutive pages together (column, page, index), so that a head's rows on a
    run of pages are one contiguous block; the index order above is a view. Page 0 is never owned by anyone: padding
    and unused table entries point at it.

    mapped   in host memory that kernels of a device read and write too; see `pagefold.store.mapped`
    """

    def __init__(
        self,
        format: FormatPair,
        num_pages: int,
        num_columns: int,
        page_size: int,
        head_dim: int,
        state: dict[str, Plane],
        device: torch.device | str = "cpu",
        mapped: bool = False,
    ):
        self.format = format
        self.num_pages = num_pages
        self.num_columns = num_columns
        self.page_size = page_size
        self.head_dim = head_dim
        k_data, k_scale = format.k.planes(head_dim)
        v_data, v_scale = format.v.planes(head_dim)
        layout = {"k_data": k_data, "k_scale": k_scale, "v_data": v_data, "v_scale": v_scale}
        layout |= {f"state.{name}": plane for name, plane in state.items()}
        self.layout = layout
        shape = num_columns, num_pages, page_size
        storage = (
            _mapped(*shape, layout)
            if mapped
            else {name: _zeros(*shape, plane, device) for name, plane in layout.items()}
        )
        self.planes: dict[str, Tensor] = {name: plane.transpose(0, 1) for name, plane in storage.items()}

    def rows(self, name: str) -> Tensor:
        """A plane as [num_columns * num_pages * page_size, width]: row (page, column, index)
        is entry (column * num_pages + page) * page_size + index. A view, float8 as bytes (torch cannot scatter it)."""
        plane = self.planes[name].transpose(0, 1).flatten(0, 2)
        return plane.view(torch.uint8) if plane.dtype == torch.float8_e4m3fn else plane

    def pages(self, name: str) -> Tensor:
        """A plane as [num_columns * num_pages, page_size, width], a block for each (column, page)."""
        return self.planes[name].transpose(0, 1).flatten(0, 1)

    @staticmethod
    def bytes_per_page(
        format: FormatPair, num_columns: int, page_size: int, head_dim: int, state: dict[str, Plane]
    ) -> int:
        row = format.bytes_per_row(head_dim) + sum(plane.bytes_per_row for plane in state.values())
        return row * num_columns * page_size

    def poison(self, pages: Tensor) -> None:
        """Fill pages with values that no correct read ever sees: NaN where the plane can hold it, else all ones."""
        for plane in self.planes.values():
            if plane.is_floating_point():
                plane[pages] = torch.nan
            else:
                plane[pages] = 0xFF
