"""Kernels that start before the one in front of them has ended (programmatic dependent launch).

Such a kernel is launched with `launch_pdl` and has every one of its programs wait before it reads or writes anything
that a kernel in front touches; so the end of a kernel means the end of all in front of it. Weights may be read earlier.

Others fetch: kernels between matrix products are short and wait for each other more than for bytes, so programs of
theirs that do nothing else ask the L2 cache for the first part of the weight that the next product reads.
"""

import functools

import torch

from pagefold.backends.triton.plan import interpreted
from pagefold.store.shim import jit, tl


@functools.cache
def starts_ahead(device: torch.device) -> bool:
    """Whether a device can: from compute capability 9.0 on."""
    return not interpreted() and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@jit
def start_next_and_wait():
    """Let the kernel behind start, now that all programs of this one have, and wait for those in front."""
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()


@jit
def fetch_only(start, num_bytes, PROGRAMS: tl.constexpr, AHEAD: tl.constexpr):
    """All that the first PROGRAMS programs of a grid do: ask the L2 cache for a part each of num_bytes."""
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
    THREADS: tl.constexpr = tl.extra.cuda.num_threads()
    piece = num_bytes // (PROGRAMS * THREADS * 16) * 16
    index = tl.program_id(0) * THREADS + tl.arange(0, THREADS)
    at = start.to(tl.pointer_type(tl.int8)) + index.to(tl.int64) * piece
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [at, tl.zeros([THREADS], tl.int32) + piece],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    if AHEAD:
        tl.extra.cuda.gdc_wait()
