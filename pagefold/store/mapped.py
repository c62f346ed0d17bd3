"""Host memory that the kernels of a device read and write where it lies, over the bus."""

import contextlib
import mmap
import weakref
from typing import Any

import numpy as np
import torch


def mapped_zeros(num_bytes: int) -> np.ndarray:
    """uint8[num_bytes], zeroed and page-locked: one address for the host and for kernels. It is given back when nothing
    looks at it any more. Raises MemoryError if there is not so much, or the system does not lock it."""
    try:
        memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes of host memory cannot be had: {error}") from None
    # large pages are locked in a fraction of the time; a child process would be given copies of locked ones
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(getattr(mmap, advice))
    array = np.frombuffer(memory, np.uint8, num_bytes)
    if num_bytes:
        runtime: Any = torch.cuda.cudart()
        address = array.ctypes.data
        if int(error := runtime.cudaHostRegister(address, num_bytes, 0)):
            with contextlib.suppress(RuntimeError):  # the next launch would report it once more
                torch.zeros(1, device="cuda")
            raise MemoryError(f"{num_bytes} bytes of host memory cannot be locked for the device: {error}")
        weakref.finalize(array, _give_back, runtime, address).atexit = False  # the process's end does it
    return array


def _give_back(runtime: Any, address: int) -> None:
    torch.cuda.synchronize()  # a kernel may still be writing there
    runtime.cudaHostUnregister(address)
