"""Triton 3.6's interpreter, less what it does over and over; its results stay."""

import dataclasses

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

patch_lang = interpreter._patch_lang
reduce_slowly = interpreter.ReduceOps.apply_impl
make_block_type = tl.core.block_type.__init__
NUMBERS = {
    dtype.name: interpreter._get_np_dtype(dtype)
    for dtype in (
        *(tl.int1, tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64),
        *(tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.float8e4nv, tl.float8e5),
    )
}


def patch_lang_once(fn):
    """Every call of a device function puts the interpreter's functions where they are already: all of `tl` is gone
    through for that. A kernel's launch has done it."""
    langs = [lang for lang in (tl, tl.core) if any(value is lang for value in fn.__globals__.values())]
    if any(tl.core.is_builtin(lang.load) for lang in langs):
        return patch_lang(fn)
    return interpreter._LangPatchScope()


def reduce_xor(self, input):
    """Sums and extremes are numpy's; XOR would be taken number by number, in Python."""
    if self.combine_fn != tl.standard._xor_combine:
        return reduce_slowly(self, input)
    data = np.bitwise_xor.reduce(input[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
    return self.to_tensor(data, input[0].dtype)


def np_dtype(dtype):
    """From a table that is made once."""
    scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return NUMBERS["uint64"] if isinstance(scalar, tl.pointer_type) else NUMBERS[scalar.name]


class Tuple(tl.core.tuple):
    """Each tensor's shape is one, and nobody asks for its type."""

    def __init__(self, args, type=None):
        self.values = list(args)
        self.given = type

    @property
    def type(self):
        if self.given is None:
            self.given = tl.core._type_for_tuple_values(self.values)
        elif not isinstance(self.given, tl.core.tuple_type):
            self.given = tl.core.tuple_type(self.given)
        return self.given

    @type.setter
    def type(self, given):
        self.given = given


blocks: dict[tuple, tuple] = {}


def block_type(self, element_ty, shape):
    """What is worked out of a shape is kept."""
    key = element_ty.name, *map(tl.core._unwrap_if_constexpr, shape)
    if key not in blocks:
        make_block_type(self, element_ty, shape)
        blocks[key] = self.shape, self.numel, self.name
    self.element_ty = element_ty
    self.shape, self.numel, self.name = blocks[key]


def hurry() -> None:
    # whether integers overflow is worked out at every step in 64 bits, and asserted with another option alone, debug
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = patch_lang_once
    interpreter._get_np_dtype = np_dtype
    interpreter.ReduceOps.apply_impl = reduce_xor
    tl.core.block_type.__init__ = block_type
    tl.core.tuple.__init__ = Tuple.__init__
    tl.core.tuple.type = Tuple.type
