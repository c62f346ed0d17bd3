"""Norms and activations on the CPU: C kernels, compiled at first use for one dtype of activations.

Without a compiler, and in float64, `library` returns None and they stay with torch.
"""

import ctypes
import functools

import torch
from torch import Tensor

from pagefold.backends import native


class LayerKernels:
    """The arithmetic of `TorchOps` for contiguous activations of one dtype."""

    def __init__(self, library: ctypes.CDLL):
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._rms_norm, self._silu_mul = library.rms_norm, library.silu_mul
        self._rms_norm.argtypes = [pointer, pointer, pointer, pointer, size, size, ctypes.c_float, size]
        self._silu_mul.argtypes = [pointer, pointer, size, size, size]
        self._rms_norm.restype = self._silu_mul.restype = None

    def rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """The norm of x[T, n], or of x + delta, which x becomes; weight is float32[n]."""
        out = torch.empty_like(x)
        add = None if delta is None else delta.data_ptr()
        num_threads = torch.get_num_threads()
        self._rms_norm(x.data_ptr(), add, weight.data_ptr(), out.data_ptr(), *x.shape, eps, num_threads)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        num_tokens, width = gate_up.shape
        out = gate_up.new_empty(num_tokens, width // 2)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), num_tokens, width // 2, torch.get_num_threads())
        return out


@functools.cache
def bind(dtype: torch.dtype) -> LayerKernels | None:
    """The kernels for activations of this dtype, or None where torch has to do: float64, no compiler."""
    library = native.build(native.prelude(dtype) + _SOURCE, native.FLAGS) if dtype in native.DTYPES else None
    return LayerKernels(library) if library else None


_SOURCE = r"""
enum { WORTH_THREADS = 1 << 14 };  // numbers that take longer to work on than a thread to wake up

/* Sum of squares of x[n], or of x + delta, which x becomes. */
static inline float squares(number *restrict x, const number *restrict delta, int64_t n) {
    float sum = 0;
    if (delta)
        for (int64_t i = 0; i < n; i++) x[i] = narrow(wide(x[i]) + wide(delta[i]));
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += wide(x[i]) * wide(x[i]);
    return sum;
}

void rms_norm(number *x, const number *delta, const float *restrict weight, number *out, int64_t num_tokens,
              int64_t n, float eps, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads) if (num_tokens * n >= WORTH_THREADS)
    for (int64_t t = 0; t < num_tokens; t++) {
        number *restrict row = x + t * n, *restrict normed = out + t * n;
        float scale = 1 / sqrtf(squares(row, delta ? delta + t * n : NULL, n) / n + eps);
        for (int64_t i = 0; i < n; i++) normed[i] = narrow(wide(row[i]) * scale * weight[i]);
    }
}

/* e^x for |x| < 87, and its value at that bound beyond: x is a whole number of ln 2, which is split so that their
   product is exact, and a rest for the series. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 87.0f ? 87.0f : x;
    float whole = (x * 1.44269504089f + 12582912.0f) - 12582912.0f;
    float t = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float y = 1 + t * (1 + t * (0.5f + t * (1.f / 6 + t * (1.f / 24 + t * (1.f / 120 + t * (1.f / 720))))));
    return y * float_of_bits((uint32_t)((int32_t)whole + 127) << 23);
}

/* gate_up: number[num_tokens, 2 n]; out: number[num_tokens, n]. */
void silu_mul(const number *gate_up, number *out, int64_t num_tokens, int64_t n, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads) if (num_tokens * n >= WORTH_THREADS)
    for (int64_t t = 0; t < num_tokens; t++) {
        const number *restrict gate = gate_up + t * 2 * n, *restrict up = gate + n;
        number *restrict row = out + t * n;
        for (int64_t i = 0; i < n; i++) {
            float x = wide(gate[i]);
            row[i] = narrow(x / (1 + exponential(-x)) * wide(up[i]));
        }
    }
}
"""
