"""Host memory that the kernels of a device read and write where it lies, over the bus."""

import contextlib
import mmap
import weakref
from typing import Any

import numpy as np
import torch


def mapped_zeros(num_bytes: int) -> np.ndarray:
    """uint8[num_bytes], zeroed and page-locked: one address for the host and for kernels. It is given back when nothing
    looks at it any more. Raises MemoryError if the system does not lock so much."""
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # large pages are locked in a fraction of the time
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8, num_bytes)
    if num_bytes:
        runtime: Any = torch.cuda.cudart()
        address = array.ctypes.data
        if int(error := runtime.cudaHostRegister(address, num_bytes, 0)):
            with contextlib.suppress(RuntimeError):  # the next launch would report it once more
                torch.zeros(1, device="cuda")
            raise MemoryError(f"{num_bytes} bytes of host memory cannot be locked for the device: {error}")
        weakref.finalize(array, runtime.cudaHostUnregister, address)
    return array
