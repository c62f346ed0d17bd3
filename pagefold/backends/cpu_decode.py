"""Decode attention on the CPU: a C kernel, compiled at first use, that reads rows as they are stored.

A kernel is made for one model shape and the codecs of its tiers. A codec brings its row loader, `RowCodec.c_load`: the
source of

    static inline float LOAD(const void *data, const void *scale, int64_t row, float *restrict x)

which puts the D stored numbers of a row into x, without their scale and in the frame they are stored in, and returns
the scale. It may use the constant D and the conversions of `native.prelude`. Nothing else in the kernel depends on the
format: rotations are undone on the query and the output.

Without a compiler, or for a format without a loader, `bind` returns None and attention stays with torch.
"""

import ctypes

import torch
from torch import Tensor

from pagefold.backends import cpu_cache, native
from pagefold.backends.base import KVView


def source_of(kv: KVView) -> str | None:
    """C source for the codecs of the tiers, or None if one of them has no loader or the shape does not fit."""
    codecs, head_dim = [(store.format.k, store.format.v) for store in kv.tiers], kv.window.shape[-1]
    if head_dim % 16 or not all(k.c_load and v.c_load for k, v in codecs):
        return None
    per_head = kv.window.shape[3] // kv.group_of.shape[1]
    parts = [
        native.prelude(kv.window.dtype),
        f"#define D {head_dim}\n#define R {per_head}\n#define TIERS {len(codecs)}",
    ]
    parts += [cpu_cache.STRUCTS, _PRELUDE]
    for tier, (k, v) in enumerate(codecs):
        parts += [
            f"#define LOAD load_k{tier}\n{k.c_load}\n#undef LOAD\n#define LOAD load_v{tier}\n{v.c_load}\n#undef LOAD",
            f"#define SEGMENT segment{tier}\n#define LOAD_K load_k{tier}\n#define LOAD_V load_v{tier}",
            f"#define ROTATE_K {int(k.rotate)}\n#define ROTATE_V {int(v.rotate)}",
            _SEGMENT,
            "#undef SEGMENT\n#undef LOAD_K\n#undef LOAD_V\n#undef ROTATE_K\n#undef ROTATE_V",
        ]
    return "\n".join([*parts, _ATTEND])


class DecodeKernel:
    """The kernel of one KVView, for queries of the model's dtype."""

    def __init__(self, library: ctypes.CDLL, kv: KVView):
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._attend = library.attend
        self._attend.argtypes = [pointer, size, pointer, pointer, size, pointer, pointer, ctypes.c_float, size]
        self._attend.restype = None
        self._cache = cpu_cache.CachePointers(kv)
        self._dtype = kv.window.dtype

    def __call__(self, layer: int, q: Tensor, slots: Tensor, seq_lens: Tensor, scale: float) -> Tensor:
        """Attention of one query a sequence, q [B, Hq, D], over the stored rows of slots int64[B]."""
        query = q.to(self._dtype).contiguous()
        out = torch.empty_like(query)
        self._attend(
            self._cache.address,
            layer,
            query.data_ptr(),
            out.data_ptr(),
            len(query),
            slots.data_ptr(),
            seq_lens.data_ptr(),
            scale,
            torch.get_num_threads(),
        )
        return out.to(q.dtype)


def bind(kv: KVView) -> DecodeKernel | None:
    """The kernel for this cache, or None where torch has to do: float64, no loader, no compiler."""
    source = source_of(kv) if cpu_cache.readable(kv) else None
    library = native.build(source, native.LOOSE) if source else None
    return DecodeKernel(library, kv) if library else None


_PRELUDE = r"""
enum { BLOCK = 64, PIECE = 256 };  // rows decoded at a time; rows of one unit of work

#if defined(__AVX512F__)
#define LANES 16
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif defined(__AVX__)
#define LANES 8
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define LANES 4
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#endif
typedef float lanes __attribute__((vector_size(LANES * 4)));
typedef float loose __attribute__((vector_size(LANES * 4), aligned(4)));  // at any address
typedef int32_t places __attribute__((vector_size(LANES * 4)));
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif
#define UNROLL _Pragma("GCC unroll 64")

/* Online softmax of R query heads: the largest score so far (base 2), the sum of weights and the weighted V. */
struct state { float top[R], sum[R], acc[R * D]; };

/* Consecutive rows of one page. */
struct run { int64_t row; int count; };

/* 2^x for x <= 0, and about 1e-38 below -126. */
static inline float exp2_below_one(float x) {
    x = x < -126.0f ? -126.0f : x;
    int32_t whole = (int32_t)(x - 0.5f);
    float t = (x - whole) * 0.69314718056f;
    float y = 1 + t * (1 + t * (0.5f + t * (1.f / 6 + t * (1.f / 24 + t * (1.f / 120 + t * (1.f / 720))))));
    return y * float_of_bits((uint32_t)(whole + 127) << 23);
}

/* Orthonormal Hadamard transform of R rows, in place. */
static void hadamard(float *x) {
    for (int r = 0; r < R; r++, x += D) {
        for (int width = 1; width < D; width *= 2)
            for (int i = 0; i < D; i += 2 * width)
                for (int j = i; j < i + width; j++) {
                    float a = x[j], b = x[j + width];
                    x[j] = a + b;
                    x[j + width] = a - b;
                }
        for (int d = 0; d < D; d++) x[d] *= 1 / sqrtf(D);
    }
}

/* The sums of LANES vectors as one vector: neighbours are added in pairs, log2(LANES) times. */
static inline lanes sums_of(const lanes *v) {
    lanes t[LANES];
    UNROLL for (int i = 0; i < LANES; i++) t[i] = v[i];
    UNROLL for (int n = LANES / 2; n; n /= 2)
        UNROLL for (int i = 0; i < n; i++)
            t[i] = SHUFFLE(t[2 * i], t[2 * i + 1], EVEN) + SHUFFLE(t[2 * i], t[2 * i + 1], ODD);
    return t[0];
}

/* Where rows [lo, hi) of a head lie, page by page; their bytes of V are asked for, to arrive while K is worked on. */
static inline int runs_of(const struct planes *s, const int32_t *pages, int64_t column, int shift, int64_t lo,
                          int64_t hi, struct run *runs) {
    int num_runs = 0;
    for (int64_t at = lo, until; at < hi; at = until) {
        until = ((at >> shift) + 1) << shift;
        until = until < hi ? until : hi;
        int64_t page = column * s->num_pages + pages[at >> shift], index = at - (at >> shift << shift);
        struct run run = {(page << shift) + index, (int)(until - at)};
        const char *v = (const char *)s->v_data + run.row * s->v_bytes, *end = v + run.count * s->v_bytes;
        for (; v < end; v += 64) __builtin_prefetch(v);
        runs[num_runs++] = run;
    }
    return num_runs;
}

/* p[r][i] = q[r] . x[i] */
static inline void dot_rows(const float *restrict q, const float *restrict x, float *restrict p) {
    for (int r = 0; r < R; r++)
        for (int i = 0; i < BLOCK; i += LANES) {
            lanes dots[LANES];
            UNROLL for (int k = 0; k < LANES; k++) {
                lanes dot = *(const loose *)(q + r * D) * *(const loose *)(x + (i + k) * D);
                UNROLL for (int d = LANES; d < D; d += LANES)
                    dot += *(const loose *)(q + r * D + d) * *(const loose *)(x + (i + k) * D + d);
                dots[k] = dot;
            }
            *(loose *)(p + r * BLOCK + i) = sums_of(dots);
        }
}

/* acc[r] += sum of p[r][i] * x[i] over n rows: TILE vectors of R heads stay in registers. */
#define VECTORS (D / LANES)
#define FITS(n) (VECTORS % (n) == 0 && R * (n) <= 20)
enum { TILE = FITS(8) ? 8 : FITS(4) ? 4 : FITS(2) ? 2 : 1 };
static inline void add_rows(const float *restrict p, const float *restrict x, int n, float *restrict acc) {
    for (int d = 0; d < D; d += TILE * LANES) {
        lanes a[R][TILE];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int t = 0; t < TILE; t++) a[r][t] = *(const loose *)(acc + r * D + d + t * LANES);
        for (int i = 0; i < n; i++)
            UNROLL for (int t = 0; t < TILE; t++) {
                lanes v = *(const loose *)(x + i * D + d + t * LANES);
                UNROLL for (int r = 0; r < R; r++) a[r][t] += p[r * BLOCK + i] * v;
            }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int t = 0; t < TILE; t++) *(loose *)(acc + r * D + d + t * LANES) = a[r][t];
    }
}
"""

_SEGMENT = r"""
/* Fold rows [lo, hi) of one head, all in this tier, into the state. q is scaled by log2(e) and in the model's frame. */
static void SEGMENT(const struct planes *s, const int32_t *pages, int64_t column, int shift, int64_t lo, int64_t hi,
                    const float *query, struct state *st) {
    float q[R * D], x[BLOCK * D] = {0}, p[R * BLOCK], k_scale[BLOCK] = {0}, v_scale[BLOCK];
    struct run runs[BLOCK];
    memcpy(q, query, sizeof q);
    if (ROTATE_K) hadamard(q);
    if (ROTATE_V) hadamard(st->acc);
    for (int64_t first = lo; first < hi; first += BLOCK) {
        int n = hi - first < BLOCK ? (int)(hi - first) : BLOCK;
        int num_runs = runs_of(s, pages, column, shift, first, first + n, runs);
        for (int j = 0, i = 0; j < num_runs; j++)
            for (int64_t row = runs[j].row; row < runs[j].row + runs[j].count; row++, i++)
                k_scale[i] = LOAD_K(s->k_data, s->k_scale, row, x + i * D);
        dot_rows(q, x, p);
        for (int j = 0, i = 0; j < num_runs; j++)
            for (int64_t row = runs[j].row; row < runs[j].row + runs[j].count; row++, i++)
                v_scale[i] = LOAD_V(s->v_data, s->v_scale, row, x + i * D);
        for (int r = 0; r < R; r++) {
            float *w = p + r * BLOCK, top = st->top[r], sum = 0;
            for (int i = 0; i < BLOCK; i++) w[i] *= k_scale[i];
            for (int i = n; i < BLOCK; i++) w[i] = -1e30f;
            for (int i = 0; i < BLOCK; i++) top = w[i] > top ? w[i] : top;
            for (int i = 0; i < BLOCK; i++) sum += w[i] = exp2_below_one(w[i] - top);
            float shrink = exp2_below_one(st->top[r] - top);
            for (int d = 0; d < D; d++) st->acc[r * D + d] *= shrink;
            st->sum[r] = st->sum[r] * shrink + sum;
            st->top[r] = top;
            for (int i = 0; i < n; i++) w[i] *= v_scale[i];
        }
        add_rows(p, x, n, st->acc);
    }
    if (ROTATE_V) hadamard(st->acc);
}
"""

_ATTEND = r"""
static int64_t num_rows(const struct cache *c, int64_t layer, int64_t slot, int64_t seq_len, int64_t head) {
    return seq_len - c->evicted[slot * c->num_groups + c->group_of[layer * c->num_heads + head]];
}

/* Rows [lo, hi) of one head. Leading pages are those of the cold tier. */
static void piece(const struct cache *c, int64_t layer, int64_t slot, int64_t head, int64_t lo, int64_t hi,
                  const float *q, struct state *st) {
    int64_t at = slot * c->num_groups + c->group_of[layer * c->num_heads + head];
    int64_t column = c->column_of[layer * c->num_heads + head];
    const int32_t *pages = c->page_table + at * c->max_pages;
    int shift = (int)c->page_shift;
    for (int r = 0; r < R; r++) st->top[r] = -1e30f;
    memset(st->sum, 0, sizeof st->sum);
    memset(st->acc, 0, sizeof st->acc);
#if TIERS == 2
    int64_t cold = (int64_t)c->cold[at] << shift;
    if (lo < cold) segment1(&c->tiers[1], pages, column, shift, lo, hi < cold ? hi : cold, q, st);
    lo = lo > cold ? lo : cold;
#endif
    if (lo < hi) segment0(&c->tiers[0], pages, column, shift, lo, hi, q, st);
}

static void merge(struct state *into, const struct state *from) {
    for (int r = 0; r < R; r++) {
        float top = into->top[r] > from->top[r] ? into->top[r] : from->top[r];
        float a = exp2_below_one(into->top[r] - top), b = exp2_below_one(from->top[r] - top);
        for (int d = 0; d < D; d++) into->acc[r * D + d] = into->acc[r * D + d] * a + from->acc[r * D + d] * b;
        into->sum[r] = into->sum[r] * a + from->sum[r] * b;
        into->top[r] = top;
    }
}

/* q, out: number[batch, num_heads * R, D].
   Work is cut at fixed rows of a head, so the result depends neither on the batch nor on the number of threads. */
void attend(const struct cache *c, int64_t layer, const number *q, number *out, int64_t batch, const int64_t *slots,
            const int64_t *seq_lens, float scale, int64_t threads) {
    int64_t items = batch * c->num_heads, *first = malloc((items + 1) * sizeof *first);
    first[0] = 0;
    for (int64_t i = 0; i < items; i++) {
        int64_t n = num_rows(c, layer, slots[i / c->num_heads], seq_lens[i / c->num_heads], i % c->num_heads);
        first[i + 1] = first[i] + (n + PIECE - 1) / PIECE;
    }
    int64_t units = first[items];
    struct state *states = malloc(units * sizeof *states);
    int64_t *item_of = malloc(units * sizeof *item_of);
    for (int64_t i = 0; i < items; i++)
        for (int64_t u = first[i]; u < first[i + 1]; u++) item_of[u] = i;
#pragma omp parallel num_threads((int)threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t u = 0; u < units; u++) {
            int64_t i = item_of[u], b = i / c->num_heads, head = i % c->num_heads;
            int64_t n = num_rows(c, layer, slots[b], seq_lens[b], head), lo = (u - first[i]) * PIECE;
            float scaled[R * D];
            for (int k = 0; k < R * D; k++) scaled[k] = wide(q[i * R * D + k]) * scale * 1.44269504089f;
            piece(c, layer, slots[b], head, lo, lo + PIECE < n ? lo + PIECE : n, scaled, &states[u]);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < items; i++) {
            struct state *st = &states[first[i]];
            for (int64_t u = first[i] + 1; u < first[i + 1]; u++) merge(st, &states[u]);
            for (int r = 0; r < R; r++)
                for (int d = 0; d < D; d++) out[(i * R + r) * D + d] = narrow(st->acc[r * D + d] / st->sum[r]);
        }
    }
    free(item_of);
    free(states);
    free(first);
}
"""
