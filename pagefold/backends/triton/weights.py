"""Softmax weights that float16 can hold."""

from pagefold.store.shim import jit, tl


@jit
def weight_reference(s, row_scale, ROWS: tl.constexpr, SCALED: tl.constexpr):
    """Least m for which weights 2^(s - m), times the scale of their rows, stay below 2^15; ROWS is the axis of rows.

    So float16 holds with all its digits what is 2^-29 of that. Relative to the largest s, with small scales and a few
    rows that take most of the attention, the many others would vanish. log2(x) <= min(x, 16) for every float16 x.
    """
    if SCALED:
        s += tl.minimum(row_scale, 16.0)
    return tl.max(s, ROWS) - 15.0
