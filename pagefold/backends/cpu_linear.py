"""Matrix products in bfloat16 for processors with AVX512-BF16: a C kernel, compiled at first use.

A decode step multiplies every weight by a handful of rows, so its time is that of reading the weights. The kernel keeps
up to 16 rows of sums in registers while it streams through the weights of 16 outputs, and asks for what comes next
early enough that reading and multiplying overlap, which oneDNN does not do for so few rows. Each output is one sum in
one order, in float32 and rounded once: a row's bits depend neither on the batch nor on the number of threads.
"""

import ctypes

import torch
from torch import Tensor

from pagefold.backends import native

OUTPUTS = 16  # of a block of weights: the lanes of a vector


def _suits(weight: Tensor) -> bool:
    """AMX, where there is some, multiplies faster than vectors do: oneDNN uses it."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    num_outputs, width = weight.shape
    vectors = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
    return vectors and num_outputs % OUTPUTS == 0 and width % 2 == 0


class LinearKernel:
    """x W^T + b of contiguous x[T, in].

    weight   bfloat16[out / 16, in / 2, 16, 2]: blocks of 16 outputs, in them pairs of inputs, output after output
    bias     bfloat16[out] or None
    """

    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None):
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._linear = library.linear
        self._linear.argtypes = [pointer, pointer, pointer, pointer, size, size, size, size]
        self._linear.restype = None
        self._num_outputs, self._width = weight.shape
        blocks = weight.reshape(self._num_outputs // OUTPUTS, OUTPUTS, self._width // 2, 2)
        self._weight, self._bias = blocks.transpose(1, 2).contiguous(), bias
        self._pointers = self._weight.data_ptr(), None if bias is None else bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(len(x), self._num_outputs)
        sizes = (len(x), self._num_outputs, self._width, torch.get_num_threads())
        self._linear(x.data_ptr(), *self._pointers, out.data_ptr(), *sizes)
        return out


def bind(weight: Tensor, bias: Tensor | None) -> LinearKernel | None:
    """The kernel for weight [out, in], or None where it does not apply: another dtype, processor or shape, no
    compiler."""
    library = native.build(_SOURCE, native.FLAGS) if _suits(weight) else None
    return LinearKernel(library, weight, bias) if library else None


_SOURCE = (
    native.prelude(torch.bfloat16)
    + r"""
enum { ROWS = 16, LANES = 16, CHUNK = 128, AHEAD = 4096 };  // rows of a tile, of a chunk; bytes asked for early
#define UNROLL _Pragma("GCC unroll 16")

/* Sums of a block of outputs for `rows` rows, whose pairs of inputs lie side by side: x[k / 2][rows]. */
static inline __attribute__((always_inline)) void tile(const int32_t *x, const number *w, const number *bias,
                                                       number *out, int64_t n, int64_t k, const int rows) {
    __m512 sum[ROWS], start = _mm512_setzero_ps();
    if (bias) start = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)bias)), 16);
    UNROLL for (int r = 0; r < rows; r++) sum[r] = start;
    for (int64_t i = 0; i < k / 2; i++, x += rows, w += 2 * LANES) {
        __m512bh weights = (__m512bh)_mm512_loadu_si512(w);
        _mm_prefetch((const char *)w + AHEAD, _MM_HINT_T0);
        UNROLL for (int r = 0; r < rows; r++)
            sum[r] = _mm512_dpbf16_ps(sum[r], (__m512bh)_mm512_set1_epi32(x[r]), weights);
    }
    UNROLL for (int r = 0; r < rows; r++)
        _mm256_storeu_si256((void *)(out + r * n), (__m256i)_mm512_cvtneps_pbh(sum[r]));
}

static void few(const int32_t *x, const number *w, const number *bias, number *out, int64_t n, int64_t k, int rows) {
#define CASE(r) case r: tile(x, w, bias, out, n, k, r); break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
        CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(16)
    }
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* x: number[num_rows, k]; out: number[num_rows, n]. A chunk of rows stays in the cache while all weights pass by. */
void linear(const number *x, const number *w, const number *bias, number *out, int64_t num_rows, int64_t n, int64_t k,
            int64_t threads) {
    int32_t *pairs = malloc(least(num_rows, CHUNK) * k * sizeof *x);
#pragma omp parallel num_threads((int)threads)
    for (int64_t first = 0; first < num_rows; first += CHUNK) {
        int64_t end = least(first + CHUNK, num_rows);
#pragma omp for schedule(static)
        for (int64_t t = first; t < end; t += ROWS) {
            int rows = (int)least(ROWS, end - t);
            int32_t *to = pairs + (t - first) * (k / 2);
            for (int r = 0; r < rows; r++)
                for (int64_t i = 0; i < k / 2; i++) memcpy(to + i * rows + r, x + (t + r) * k + 2 * i, sizeof *to);
        }
#pragma omp for schedule(static)
        for (int64_t j = 0; j < n; j += LANES)
            for (int64_t t = first; t < end; t += ROWS)
                few(pairs + (t - first) * (k / 2), w + j * k, bias ? bias + j : NULL, out + t * n + j, n, k,
                    (int)least(ROWS, end - t));
    }
    free(pairs);
}
"""
)
