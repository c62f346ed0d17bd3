"""Kernels that start before the one in front of them has ended (programmatic dependent launch).

Such a kernel is launched with `launch_pdl` and has every one of its programs wait before it reads or writes anything
that a kernel in front touches; so the end of a kernel means the end of all in front of it. Weights may be read earlier.
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
