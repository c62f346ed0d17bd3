"""The cache as C sees it: structures that the kernels for attention and for appending have in common."""

import ctypes

import torch

from pagefold.backends import native
from pagefold.backends.base import KVView
from pagefold.store.pagestore import PageStore

_PLANES = ("k_data", "k_scale", "v_data", "v_scale")
_TABLES = ("page_table", "evicted", "cold", "group_of", "column_of")
_NUMBERS = ("num_groups", "max_pages", "num_heads", "page_shift", "window_slots", "window_width", "num_states")


class _Planes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in _PLANES]
    _fields_ += [(name, ctypes.c_int64) for name in ("num_pages", "v_bytes")]


class _State(ctypes.Structure):
    _fields_ = [("rows", ctypes.c_void_p), ("bytes", ctypes.c_int64)]


class _Cache(ctypes.Structure):
    _fields_ = [("tiers", _Planes * 2)]
    _fields_ += [(name, ctypes.c_void_p) for name in (*_TABLES, "window", "states")]
    _fields_ += [(name, ctypes.c_int64) for name in _NUMBERS]


STRUCTS = r"""
struct planes { char *k_data, *k_scale, *v_data, *v_scale; int64_t num_pages, v_bytes; };
struct state_plane { char *rows; int64_t bytes; };  // of the hot tier; bytes of a row
struct cache {
    struct planes tiers[2];
    const int32_t *page_table, *evicted, *cold, *group_of, *column_of;
    number *window;
    const struct state_plane *states;
    int64_t num_groups, max_pages, num_heads, page_shift, window_slots, window_width, num_states;
};
"""


def readable(kv: KVView) -> bool:
    """Whether kernels can work on this cache: it is in host memory, its tables are as they expect, and the model does
    not compute in float64."""
    tables = [getattr(kv, name) for name in _TABLES]
    plain = all(t.device.type == "cpu" and t.dtype == torch.int32 and t.is_contiguous() for t in tables)
    return plain and kv.window.is_contiguous() and kv.window.dtype in native.DTYPES


class CachePointers:
    """`struct cache` of one KVView. Its pointers are taken once, for the tensors of a view stay where they are."""

    def __init__(self, kv: KVView):
        self._kv = kv  # keeps the tensors alive
        states = [self._state(kv.tiers[0], name) for name in kv.tiers[0].layout if name.startswith("state.")]
        self._states = (_State * len(states))(*states)
        self._cache = cache = _Cache()
        for tier, store in enumerate(kv.tiers):
            pointers = [store.planes[name].data_ptr() for name in _PLANES]
            cache.tiers[tier] = _Planes(*pointers, store.num_pages, store.layout["v_data"].bytes_per_row)
        for name in (*_TABLES, "window"):
            setattr(cache, name, getattr(kv, name).data_ptr())
        cache.states = ctypes.addressof(self._states)
        _, cache.num_groups, cache.max_pages = kv.page_table.shape
        _, cache.window_slots, cache.window_width = kv.window.shape[:3]
        cache.num_heads = kv.group_of.shape[1]
        cache.page_shift = kv.page_size.bit_length() - 1
        cache.num_states = len(states)
        self.address = ctypes.addressof(cache)

    @staticmethod
    def _state(store: PageStore, name: str) -> _State:
        return _State(store.planes[name].data_ptr(), store.layout[name].bytes_per_row)
