"""How much rows repeat each other, in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional as F

TILE_ELEMENTS = 1 << 17  # cosines held at a time: what a cache holds


def crowding_of_rows(keys: Tensor, valid: Tensor, threshold: float, block: int | None) -> Tensor:
    """`RowSource.crowding` of decoded keys float[J, C, N, D], of which `valid` (bool[J, 1, N]) is not padding."""
    num_rows = keys.shape[2]
    block = min(block or num_rows, num_rows)
    keys = F.normalize(keys, dim=-1, eps=1e-6).masked_fill(~valid[..., None], 0.0)
    keys = F.pad(keys, (0, 0, 0, -num_rows % block))
    blocks = keys.reshape(-1, block, keys.shape[-1])
    return crowding(blocks, threshold, TILE_ELEMENTS).view(*keys.shape[:3])[..., :num_rows]


def crowding(keys: Tensor, threshold: float, tile_elements: int) -> Tensor:
    """How much each row repeats the others of its block: the sum of its cosines with them.

    keys float[M, b, D] of length 1, all zeros on padding -> float[M, b].

    For each row, the newest other row more similar to it than `threshold` (>= 0) does not count that cosine: of rows
    that repeat each other the newest looks least redundant. Three identical keys give (2, 1, 0).
    About `tile_elements` cosines are held at a time, at least one column of a block.
    """
    num_blocks, block, _ = keys.shape
    out = keys.new_zeros(num_blocks, block)
    place = torch.arange(1, block + 1, dtype=torch.int32, device=keys.device)[:, None]
    some = max(1, tile_elements // (block * block))
    wide = max(1, min(block, tile_elements // block))
    for first in range(0, num_blocks, some):
        rows = keys[first : first + some]
        for start in range(0, block, wide):
            cosines = rows @ rows[:, start : start + wide].mT
            cosines.diagonal(-start, 1, 2).zero_()
            newest = ((cosines > threshold) * place).amax(1, keepdim=True)  # 0 where a column has no similar row
            out[first : first + some] += cosines.masked_fill_(newest == place, 0.0).sum(-1)
    return out
