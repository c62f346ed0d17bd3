"""C kernels of the CPU backend: compiled at first use with the system's compiler, then kept in a cache folder.

Kernels are C source held in Python and built for one model shape, so that every loop has a constant length. Without a
compiler `build` returns None, and whoever asked falls back on torch.
"""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from pagefold.core.places import cache_folder

logger = logging.getLogger(__name__)

FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
# Every operation is rounded as it is written, so that bytes can equal those of torch.
STRICT = (*FLAGS, "-ffp-contract=off")
# Sums may be reordered, and code neither makes nor tests for NaN. Not -ffast-math: linking with it would switch the
# whole process to flushing denormals.
LOOSE = (*FLAGS, "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math", "-ffinite-math-only")

# What a kernel reads and writes activations as: `number`, with `wide` to float and `narrow` back.
_NUMBERS = {
    torch.float32: "typedef float number;\n#define wide(x) (x)\n#define narrow(x) (x)\n",
    torch.bfloat16: "typedef uint16_t number;\n#define wide bfloat16_to_float\n#define narrow float_to_bfloat16\n",
    torch.float16: "typedef uint16_t number;\n#define wide half_to_float\n#define narrow float_to_half\n",
}
DTYPES = frozenset(_NUMBERS)  # of activations; float64 stays with torch


def prelude(dtype: torch.dtype) -> str:
    """What every source begins with: headers, `number`, and conversions that round to the nearest, ties to even."""
    return _CONVERSIONS + _NUMBERS[dtype]


def compiler() -> str | None:
    """Path of the system's C compiler."""
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")


@functools.cache
def build(source: str, flags: tuple[str, ...]) -> ctypes.CDLL | None:
    """Compile `source` unless the cache has it, and load it; None, and a warning, if that fails."""
    path = compiler()
    if path is None:
        _warn("no C compiler found: the CPU backend's kernels run in torch, which is slower")
        return None
    key = hashlib.sha256("\n".join([source, path, *flags, _cpu()]).encode()).hexdigest()[:24]
    try:
        library = _cache_folder() / f"kernel-{key}.so"
        if not library.exists():
            _compile(path, source, flags, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.CalledProcessError) as error:
        detail = (getattr(error, "stderr", None) or str(error))[-2000:]
        _warn(f"the CPU backend's kernels run in torch, for one failed to build: {detail}")
        return None


@functools.cache
def _warn(message: str) -> None:
    logger.warning("%s", message)


def _compile(path: str, source: str, flags: tuple[str, ...], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        code, object_file, shared = (os.path.join(folder, name) for name in ("k.c", "k.o", "k.so"))
        Path(code).write_text(source)
        run = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
        run([path, *flags, "-fopenmp", "-c", code, "-o", object_file])
        run([path, "-shared", object_file, *_openmp(), "-o", shared])
        os.replace(shared, library)  # atomic: another process sees the whole file or none


def _openmp() -> list[str]:
    """Link against the OpenMP runtime that torch has loaded, so that both share one pool of threads."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        maps = []
    loaded = {line.split()[-1] for line in maps if "libgomp" in line}
    return [min(loaded)] if loaded else ["-fopenmp"]


def _cpu() -> str:
    """What -march=native depends on, so that a cache folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _cache_folder() -> Path:
    folder = cache_folder() / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="pagefold-kernels-"))


_CONVERSIONS = r"""
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

static inline float float_of_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t bits_of_float(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

static inline float bfloat16_to_float(uint16_t b) { return float_of_bits((uint32_t)b << 16); }
static inline uint16_t float_to_bfloat16(float x) {
    uint32_t bits = bits_of_float(x), nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : nearest;
}

static inline float half_to_float(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    if (magnitude >= 0x7c00u << 13) return float_of_bits(sign | (magnitude + (224u << 23)));
    float normal = float_of_bits(magnitude + (112u << 23)), subnormal = (h & 0x3ff) * 0x1p-24f;
    return float_of_bits(sign | bits_of_float(h & 0x7c00 ? normal : subnormal));
#endif
}
static inline uint16_t float_to_half(float x) {
#if defined(__F16C__)
    return _cvtss_sh(x, 0);
#else
    uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7e00;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520, half-way between the largest and the next power
    if (magnitude < 113u << 23)  // below 2^-14, the smallest normal: what lies above 1/2 in steps of 2^-24
        return sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - (126u << 23));
    return sign | ((magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13);
#endif
}
"""
