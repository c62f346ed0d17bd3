"""bfloat16 rows."""

from typing import ClassVar

import torch

from pagefold.store.format import FORMATS
from pagefold.store.plain import PlainCodec, load_plain, store_plain
from pagefold.store.shim import DeviceCodec

_C_LOAD = """
static inline float LOAD(const void *data, const void *scale, int64_t row, float *restrict x) {
    const uint16_t *restrict stored = (const uint16_t *)data + row * D;
    for (int d = 0; d < D; d++) x[d] = float_of_bits((uint32_t)stored[d] << 16);
    return 1.0f;
}
"""

_C_STORE = """
static inline void STORE(void *data, void *scale, int64_t row, float *restrict x) {
    uint16_t *restrict stored = (uint16_t *)data + row * D;
    for (int d = 0; d < D; d++) stored[d] = float_to_bfloat16(x[d]);
}
"""


@FORMATS.add
class BFloat16:
    """512 bytes of K and V at D = 128."""

    name: ClassVar[str] = "bf16"
    k = v = PlainCodec(
        torch.bfloat16,
        _C_LOAD,
        _C_STORE,
        device=DeviceCodec(load_plain, store_plain, torch.bfloat16, options=(torch.inf,)),
    )
