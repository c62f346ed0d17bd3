"""32-bit rows."""

from typing import ClassVar

import torch

from pagefold.store.format import FORMATS
from pagefold.store.plain import PlainCodec, load_plain, store_plain
from pagefold.store.shim import DeviceCodec

_C_LOAD = """
static inline float LOAD(const void *data, const void *scale, int64_t row, float *restrict x) {
    memcpy(x, (const float *)data + row * D, sizeof(float) * D);
    return 1.0f;
}
"""

_C_STORE = """
static inline void STORE(void *data, void *scale, int64_t row, float *restrict x) {
    memcpy((float *)data + row * D, x, sizeof(float) * D);
}
"""


@FORMATS.add
class Float32:
    """1024 bytes of K and V at D = 128."""

    name: ClassVar[str] = "fp32"
    k = v = PlainCodec(
        torch.float32,
        _C_LOAD,
        _C_STORE,
        device=DeviceCodec(load_plain, store_plain, torch.float32, options=(torch.inf,)),
    )
