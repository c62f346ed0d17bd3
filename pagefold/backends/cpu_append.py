"""Appending on the CPU: a C kernel, compiled at first use, that makes the new heads ready and stores them.

A kernel is made for one model shape and the codecs of the hot tier. A codec brings its row encoder,
`RowCodec.c_store`: the source of

    static inline void STORE(void *data, void *scale, int64_t row, float *restrict x)

which encodes x, a row in the model's frame that it may overwrite, to the same bytes as the codec's `encode`. It may
use the constant D, the conversions of `native.prelude`, and

    only_finite(x)      every NaN a 0, everything else within +-65504
    largest(x)          the largest magnitude
    hadamard(x)         the transform of the row, in place, by the same sums as in torch
    half_above(y)       bits of the least positive float16 >= y

Without a compiler, or for a format without an encoder, `bind` returns None and appending stays with torch.
"""

import ctypes

import torch
from torch import Tensor

from pagefold.backends import cpu_cache, native
from pagefold.backends.base import ForwardInputs, HeadTurn, KVView


class Batch(ctypes.Structure):
    """`struct batch`: the addresses of one step, the same for every layer."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("slots", "positions", "window_slots", "window_index")]
    _fields_ += [("num_tokens", ctypes.c_int64)]

    @classmethod
    def of(cls, fwd: ForwardInputs, slots: Tensor) -> "Batch":
        """`slots` int64[T]: the slot of each token."""
        tensors = [slots, fwd.positions, fwd.window_slots, fwd.window_index]
        if not fwd.keeps_window:
            tensors = tensors[:2]
        tensors = [tensor.contiguous() for tensor in tensors]
        pointers = [tensor.data_ptr() for tensor in tensors] + [None] * (4 - len(tensors))
        batch = cls(*pointers, len(slots))
        batch.tensors = tensors  # keeps them alive
        return batch


class AppendKernel:
    """The kernel of one KVView, for heads of the model's dtype."""

    def __init__(self, library: ctypes.CDLL, kv: KVView):
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._append = library.append
        self._append.argtypes = [pointer, pointer, size, pointer, pointer, pointer, pointer, ctypes.c_float, size]
        self._append.restype = None
        self._cache = cpu_cache.CachePointers(kv)
        self.dtype = kv.window.dtype
        self._num_heads = kv.window.shape[3]

    def __call__(self, layer: int, qkv: Tensor, batch: Batch, turn: HeadTurn | None) -> Tensor:
        qkv = qkv.contiguous()
        queries = qkv.new_empty(len(qkv), self._num_heads, qkv.shape[2])
        table = weight = None
        if turn is not None:
            table = turn.cos_sin.data_ptr()
            weight = None if turn.weight is None else turn.weight.data_ptr()
        self._append(
            self._cache.address,
            ctypes.addressof(batch),
            layer,
            qkv.data_ptr(),
            queries.data_ptr(),
            table,
            weight,
            turn.eps if turn else 0.0,
            torch.get_num_threads(),
        )
        return queries


def source_of(kv: KVView) -> str | None:
    """C source for the hot tier's codecs, or None if one of them has no encoder."""
    k, v, head_dim = kv.tiers[0].format.k, kv.tiers[0].format.v, kv.window.shape[-1]
    if head_dim % 2 or not (k.c_store and v.c_store):
        return None
    per_head = kv.window.shape[3] // kv.group_of.shape[1]
    parts = [
        native.prelude(kv.window.dtype),
        f"#define D {head_dim}\n#define R {per_head}\n#define ORTHONORMAL {head_dim**-0.5!r}f",
        cpu_cache.STRUCTS,
        _ROWS,
        f"#define STORE store_k\n{k.c_store}\n#undef STORE\n#define STORE store_v\n{v.c_store}\n#undef STORE",
        _APPEND,
    ]
    return "\n".join(parts)


def bind(kv: KVView) -> AppendKernel | None:
    """The kernel for this cache, or None where torch has to do: float64, no encoder, no compiler."""
    source = source_of(kv) if cpu_cache.readable(kv) else None
    library = native.build(source, native.STRICT) if source else None
    return AppendKernel(library, kv) if library else None


_ROWS = r"""
struct batch { const int64_t *slots, *positions, *window_slots, *window_index; int64_t num_tokens; };

static inline void only_finite(float *restrict x) {
    for (int d = 0; d < D; d++) {
        float y = x[d] == x[d] ? x[d] : 0.0f;
        y = y > 65504.0f ? 65504.0f : y;
        x[d] = y < -65504.0f ? -65504.0f : y;
    }
}

static inline float largest(const float *restrict x) {
    float most = 0;
#pragma omp simd reduction(max : most)
    for (int d = 0; d < D; d++) most = fabsf(x[d]) > most ? fabsf(x[d]) : most;
    return most;
}

static inline void hadamard(float *restrict x) {
    float y[D];
    for (int width = 1; width < D; width *= 2) {
        for (int j = 0; j < D / 2; j++) {
            y[j] = x[2 * j] + x[2 * j + 1];
            y[j + D / 2] = x[2 * j] - x[2 * j + 1];
        }
        memcpy(x, y, sizeof y);
    }
    for (int d = 0; d < D; d++) x[d] *= ORTHONORMAL;
}

static inline uint16_t half_above(float x) {
    x = x < 0x1p-24f ? 0x1p-24f : x > 65504.0f ? 65504.0f : x;
    uint16_t near = float_to_half(x);
    return near + (half_to_float(near) < x);
}
"""

_APPEND = r"""
enum { WORTH_THREADS = 1 << 13 };  // numbers to store that take longer than a thread to wake up

/* One head, as attention needs it: normed by `weight`, turned by the cosines and sines of its position. */
static inline void ready(const number *restrict head, const float *weight, const float *turn, float eps,
                         number *restrict out) {
    if (!turn) {
        memcpy(out, head, D * sizeof *head);
        return;
    }
    float x[D];
    for (int d = 0; d < D; d++) x[d] = wide(head[d]);
    if (weight) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int d = 0; d < D; d++) sum += x[d] * x[d];
        float scale = 1 / sqrtf(sum / D + eps);
        for (int d = 0; d < D; d++) x[d] = x[d] * scale * weight[d];
    }
    const float *cosine = turn, *sine = turn + D / 2;
    for (int d = 0; d < D / 2; d++) {
        out[d] = narrow(x[d] * cosine[d] - x[d + D / 2] * sine[d]);
        out[d + D / 2] = narrow(x[d + D / 2] * cosine[d] + x[d] * sine[d]);
    }
}

static inline void store(const struct cache *c, int64_t row, const number *restrict k, const number *restrict v) {
    const struct planes *hot = &c->tiers[0];
    float x[D];
    for (int d = 0; d < D; d++) x[d] = wide(k[d]);
    store_k(hot->k_data, hot->k_scale, row, x);
    for (int d = 0; d < D; d++) x[d] = wide(v[d]);
    store_v(hot->v_data, hot->v_scale, row, x);
    for (int64_t s = 0; s < c->num_states; s++)
        memset(c->states[s].rows + row * c->states[s].bytes, 0, c->states[s].bytes);
}

/* qkv: number[num_tokens, num_heads * (R + 2), D]; queries: number[num_tokens, num_heads * R, D].
   cos_sin: float[positions, 2, D / 2] or NULL; weight: float[2, D] or NULL. */
void append(const struct cache *c, const struct batch *b, int64_t layer, const number *qkv, number *queries,
            const float *cos_sin, const float *weight, float eps, int64_t threads) {
    int64_t heads = c->num_heads, num_q = heads * R, mask = (1 << c->page_shift) - 1;
    const int32_t *group_of = c->group_of + layer * heads, *column_of = c->column_of + layer * heads;
    const float *k_weight = weight ? weight + D : NULL;
#pragma omp parallel for schedule(static) num_threads((int)threads) if (b->num_tokens * heads * D >= WORTH_THREADS)
    for (int64_t t = 0; t < b->num_tokens; t++) {
        const number *q = qkv + t * (num_q + 2 * heads) * D, *k = q + num_q * D, *v = k + heads * D;
        const float *turn = cos_sin ? cos_sin + b->positions[t] * D : NULL;
        number *query = queries + t * num_q * D, key[D];
        for (int64_t h = 0; h < num_q; h++) ready(q + h * D, weight, turn, eps, query + h * D);
        if (b->window_slots && b->window_slots[t]) {
            int64_t place = (layer * c->window_slots + b->window_slots[t]) * c->window_width + b->window_index[t];
            memcpy(c->window + place * num_q * D, query, num_q * D * sizeof *query);
        }
        for (int64_t h = 0; h < heads; h++) {
            int64_t at = b->slots[t] * c->num_groups + group_of[h], row = b->positions[t] - c->evicted[at];
            int64_t page = c->page_table[at * c->max_pages + (row >> c->page_shift)];
            int64_t block = column_of[h] * c->tiers[0].num_pages + page;
            ready(k + h * D, k_weight, turn, eps, key);
            store(c, (block << c->page_shift) + (row & mask), key, v + h * D);
        }
    }
}
"""
