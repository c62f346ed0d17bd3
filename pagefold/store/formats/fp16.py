"""float16 rows."""

from typing import ClassVar

import torch

from pagefold.store.format import FORMATS
from pagefold.store.plain import PlainCodec, load_plain, store_plain
from pagefold.store.shim import DeviceCodec

_C_LOAD = """
static inline float LOAD(const void *data, const void *scale, int64_t row, float *restrict x) {
    const uint16_t *restrict stored = (const uint16_t *)data + row * D;
    int d = 0;
#if defined(__AVX512F__)
    for (; d + 16 <= D; d += 16)
        _mm512_storeu_ps(x + d, _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(stored + d))));
#elif defined(__F16C__)
    for (; d + 8 <= D; d += 8)
        _mm256_storeu_ps(x + d, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(stored + d))));
#endif
    for (; d < D; d++) x[d] = half_to_float(stored[d]);
    return 1.0f;
}
"""

_C_STORE = """
static inline void STORE(void *data, void *scale, int64_t row, float *restrict x) {
    uint16_t *restrict stored = (uint16_t *)data + row * D;
    for (int d = 0; d < D; d++) {
        float y = x[d] > 65504.0f ? 65504.0f : x[d];
        stored[d] = float_to_half(y < -65504.0f ? -65504.0f : y);
    }
}
"""


@FORMATS.add
class Float16:
    """512 bytes of K and V at D = 128."""

    name: ClassVar[str] = "fp16"
    k = v = PlainCodec(
        torch.float16, _C_LOAD, _C_STORE, device=DeviceCodec(load_plain, store_plain, torch.float16, options=(65504.0,))
    )
