"""The CPU backend's C kernels compute what torch does: norms, activations, and every format's append, byte for byte."""

import logging

import pytest
import torch

from pagefold.backends import cpu_append, cpu_layers, cpu_linear, native
from pagefold.backends.cpu import CpuBackend
from pagefold.backends.reference import Reference
from pagefold.backends.registry import make_backend
from pagefold.backends.torch_ops import TorchOps, turned_heads
from pagefold.store.format import FORMATS, Plane
from pagefold.store.lowbit import MidRiseCodec
from tests.backend.cases import Case, bytes_of, copy_of, make_batch, make_turn, make_view, new_tokens

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SHAPES = pytest.mark.parametrize("num_tokens, width", [(1, 64), (3, 2048), (1000, 576), (7, 50), (2, 1)])
HOT = pytest.mark.parametrize("hot", [name for name in FORMATS.names() if name != "fp64"])
STATE = {"score": Plane(torch.float32, 1), "pair": Plane(torch.float16, 2)}
# of a number: one step of its dtype, or what two orders of a sum differ by
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}

needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C compiler")


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    torch.testing.assert_close(a.double(), b.double(), atol=1e-6, rtol=ROUNDING[a.dtype])


def random(num_tokens: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(seed)).mul(3).to(dtype)


@needs_compiler
@DTYPES
@SHAPES
def test_norms_are_those_of_torch(dtype, num_tokens, width):
    assert cpu_layers.bind(dtype) is not None
    x, weight = random(num_tokens, width, dtype), torch.rand(width, generator=torch.Generator().manual_seed(1)) + 0.5
    before = x.clone()
    close(CpuBackend().rms_norm(x, weight, 1e-5), TorchOps().rms_norm(x, weight, 1e-5))
    assert torch.equal(x, before)


@needs_compiler
@DTYPES
@SHAPES
def test_the_residual_sum_is_rounded_before_its_norm(dtype, num_tokens, width):
    x, delta = random(num_tokens, width, dtype), random(num_tokens, width, dtype, seed=2)
    ours, theirs, weight, before = x.clone(), x.clone(), torch.ones(width), delta.clone()
    result = CpuBackend().add_rms_norm(ours, delta, weight, 1e-6)
    close(result, TorchOps().add_rms_norm(theirs, delta, weight, 1e-6))
    assert torch.equal(ours, theirs) and torch.equal(delta, before)


@needs_compiler
@DTYPES
@SHAPES
def test_silu_is_that_of_torch(dtype, num_tokens, width):
    x = random(num_tokens, 2 * width, dtype)
    close(CpuBackend().silu_mul(x), TorchOps().silu_mul(x))


@needs_compiler
def test_silu_holds_over_the_whole_range():
    gate = torch.cat([torch.linspace(-100, 100, 20001), torch.tensor([0.0, -0.0, 1e-30, 1e30, -1e30, torch.inf])])[None]
    x = torch.cat([gate, torch.ones_like(gate)], 1)
    close(CpuBackend().silu_mul(x), TorchOps().silu_mul(x))


@needs_compiler
@DTYPES
def test_nan_shows_in_the_row_it_came_from(dtype):
    x = random(3, 64, dtype)
    x[1, 5] = torch.nan
    for result in (CpuBackend().rms_norm(x, torch.ones(64), 1e-5), CpuBackend().silu_mul(x)):
        assert result[1].isnan().any() and not result[[0, 2]].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_and_float64_activations_take_the_torch_path(dtype):
    x, weight = random(6, 64, dtype)[::2], torch.ones(64)
    close(CpuBackend().rms_norm(x, weight, 1e-5), TorchOps().rms_norm(x, weight, 1e-5))
    close(CpuBackend().silu_mul(x), TorchOps().silu_mul(x))
    wide = x.double()
    assert torch.equal(
        CpuBackend().rms_norm(wide, weight.double(), 1e-5), TorchOps().rms_norm(wide, weight.double(), 1e-5)
    )
    assert torch.equal(CpuBackend().silu_mul(wide), TorchOps().silu_mul(wide))


@needs_compiler
@HOT
@DTYPES
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_append_turns_and_stores_the_bytes_of_torch(hot, dtype, head_dim):
    """Long and short chunks, scorers' state and the window's queries; without a norm even the turn is exact."""
    case = Case(
        "mixed", hot, lengths=(300, 1, 33), head_dim=head_dim, per_head=3, page_size=32, dtype=dtype, state=STATE
    )
    ours = make_view(case)
    theirs = copy_of(ours)
    assert cpu_append.bind(ours) is not None
    chunks, turn = [(1, 250), (2, 1), (3, 30)], make_turn(case, 300, norm=False)
    tokens = new_tokens(ours, case, make_batch(ours, case, chunks))
    queries = CpuBackend().append(ours, 1, tokens.clone(), make_batch(ours, case, chunks, window=True), turn)
    torch_backend, batch = CpuBackend(), make_batch(theirs, case, chunks, window=True)
    torch_backend._bind(theirs).append = None
    expected = torch_backend.append(theirs, 1, tokens.clone(), batch, turn)
    assert queries.is_contiguous() and torch.equal(queries, expected)
    mine, reference = bytes_of(ours), bytes_of(theirs)
    assert all(torch.equal(mine[name], reference[name]) for name in reference)


@needs_compiler
@DTYPES
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_append_norms_heads_before_it_turns_them(dtype, head_dim):
    case = Case("by_layer", "fp32", lengths=(40,), head_dim=head_dim, dtype=dtype)
    view, turn = make_view(case), make_turn(case, 40, norm=True)
    batch = make_batch(view, case, [(1, 9)])
    tokens = new_tokens(view, case, batch)
    q, k, _ = turned_heads(tokens, 2, batch.positions, turn)
    close(CpuBackend().append(view, 0, tokens.clone(), batch, turn), q.contiguous())
    for position in range(31, 40):
        for head in range(2):
            group, column = int(view.group_of[0, head]), int(view.column_of[0, head])
            row = position - int(view.evicted[1, group])
            page = view.page_table[1, group, row // 8]
            stored = view.tiers[0].planes["k_data"][page, column, row % 8]
            close(stored.to(dtype), k[position - 31, head])


@pytest.mark.parametrize("num_rows", [1, 7, 16, 17, 129, 300])
@pytest.mark.parametrize("num_outputs, width", [(16, 2), (48, 64), (576, 1536)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_exact_to_one_rounding_and_rows_are_alone(num_rows, num_outputs, width, with_bias):
    weight = random(num_outputs, width, torch.bfloat16, seed=5)
    bias = random(1, num_outputs, torch.bfloat16, seed=6)[0] if with_bias else None
    linear = cpu_linear.bind(weight, bias)
    if linear is None:
        pytest.skip("no AVX512-BF16, or AMX")
    x = random(num_rows, width, torch.bfloat16)
    result, wide = linear(x), x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), wide, atol=1e-5 * width, rtol=2.0**-8)
    for row in (0, num_rows // 2, num_rows - 1):
        assert torch.equal(linear(x[row : row + 1])[0], result[row])


@pytest.mark.parametrize(
    "weight", [torch.ones(24, 8, dtype=torch.bfloat16), torch.ones(16, 7, dtype=torch.bfloat16), torch.ones(16, 8)]
)
def test_products_of_other_shapes_and_dtypes_are_not_taken(weight):
    assert cpu_linear.bind(weight, None) is None


def extreme_rows(head_dim: int) -> torch.Tensor:
    """Rows where rounding and clipping are at their limits: float32[rows, D]."""
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, 65504.0, 65520.0, 1e-40, -0.0])
    powers = 2.0 ** torch.arange(-30, 20)
    rows = [torch.zeros(head_dim), torch.full((head_dim,), 3.0), torch.full((head_dim,), -1e-40)]
    rows += [torch.randn(head_dim) * scale for scale in powers]
    rows += [torch.randint(-8, 9, (head_dim,)) * scale for scale in (1.0, 0.5, 2.0**-10)]  # ties
    rows += [torch.randn(head_dim).index_fill(0, torch.tensor([i]), float(x)) for i, x in enumerate(special)]
    return torch.stack(rows)


@needs_compiler
@HOT
def test_extreme_rows_are_stored_as_torch_stores_them(hot):
    """Scaled formats byte by byte; plain ones may keep another NaN."""
    torch.manual_seed(3)
    rows = extreme_rows(64)
    case = Case("uniform", hot, lengths=(len(rows),), head_dim=64)
    view, batch = make_view(case), None
    view.evicted.zero_()
    batch = make_batch(view, case, [(1, len(rows))])
    tokens = torch.zeros(len(rows), 8, 64)
    tokens[:, 4], tokens[:, 6] = rows, rows.flip(1)
    CpuBackend().append(view, 0, tokens.clone(), batch, None)
    store, pages = view.tiers[0], view.page_table[1, 0].long()
    for role, codec, x in (("k", store.format.k, rows), ("v", store.format.v, rows.flip(1))):
        for part, expected in zip(("data", "scale"), codec.encode(x)):
            plane = store.planes[f"{role}_{part}"][pages, int(view.column_of[0, 0])].flatten(0, 1)[: len(rows)]
            if codec.planes(64)[1].width:
                assert torch.equal(plane.view(torch.uint8), expected.view(torch.uint8))
            else:
                torch.testing.assert_close(plane, expected, atol=0, rtol=0, equal_nan=True)


@needs_compiler
def test_many_random_rows_pick_the_same_clip():
    """The clip with the least error decides a row's bytes: sums of errors must not depend on who adds them up."""
    for name in ("int4", "k4v2"):
        case = Case("uniform", name, lengths=(2000,), head_dim=128)
        ours = make_view(case)
        theirs = copy_of(ours)
        batch = make_batch(ours, case, [(1, 2000)])
        tokens = new_tokens(ours, case, batch)
        CpuBackend().append(ours, 0, tokens.clone(), batch, None)
        torch_backend, batch = CpuBackend(), make_batch(theirs, case, [(1, 2000)])
        torch_backend._bind(theirs).append = None
        torch_backend.append(theirs, 0, tokens.clone(), batch, None)
        assert isinstance(ours.tiers[0].format.v, MidRiseCodec)
        assert torch.equal(bytes_of(ours)["0.k_data"], bytes_of(theirs)["0.k_data"])
        assert torch.equal(bytes_of(ours)["0.v_data"], bytes_of(theirs)["0.v_data"])


@needs_compiler
def test_conversions_without_the_processors_instructions(tmp_path):
    """Where there is no F16C, all 2^16 halves and the borders between them convert as in torch."""
    import ctypes

    source = native.prelude(torch.float16).replace("defined(__F16C__)", "0") + (
        "void to(const float *x, uint16_t *h, int64_t n) { for (int64_t i = 0; i < n; i++) h[i] = narrow(x[i]); }\n"
        "void from(const uint16_t *h, float *x, int64_t n) { for (int64_t i = 0; i < n; i++) x[i] = wide(h[i]); }\n"
    )
    library = native.build(source, native.STRICT)
    halves = torch.arange(1 << 16).to(torch.int16).view(torch.float16)
    floats = torch.empty(1 << 16)
    pointers = lambda *tensors: [ctypes.c_void_p(t.data_ptr()) for t in tensors]  # noqa: E731
    library.__getattr__("from")(*pointers(halves, floats), ctypes.c_int64(1 << 16))
    torch.testing.assert_close(floats, halves.float(), atol=0, rtol=0, equal_nan=True)
    finite = halves[halves.isfinite()].float().sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    borders = torch.cat([finite, middle, *(middle.nextafter(torch.tensor(s)) for s in (-torch.inf, torch.inf))])
    borders = torch.cat([borders, torch.tensor([65519.9, 65520.0, 1e9, torch.inf, -torch.inf, 1e-30, -1e-30])])
    found = torch.empty(len(borders), dtype=torch.float16)
    library.to(*pointers(borders, found), ctypes.c_int64(len(borders)))
    assert torch.equal(found.view(torch.int16), borders.half().view(torch.int16))


def test_without_a_compiler_everything_runs_in_torch(monkeypatch, caplog):
    """One warning for all kernels, and the same numbers."""
    memos = (native.build, native._warn, cpu_layers.bind)
    monkeypatch.setattr(native, "compiler", lambda: None)
    for memo in memos:
        memo.cache_clear()
    case = Case("by_layer", "int4", state=STATE)
    ours = make_view(case)
    theirs = copy_of(ours)
    chunks, turn = [(5, 3), (2, 1)], make_turn(case, 45, norm=True)
    tokens = new_tokens(ours, case, make_batch(ours, case, chunks))
    with caplog.at_level(logging.WARNING):
        backend = make_backend("cpu")
        queries = backend.append(ours, 0, tokens.clone(), make_batch(ours, case, chunks, window=True), turn)
        normed, gated = backend.rms_norm(tokens[0], torch.ones(16), 1e-5), backend.silu_mul(tokens[0])
    monkeypatch.undo()
    for memo in memos:
        memo.cache_clear()
    assert [record.message for record in caplog.records if "no C compiler" in record.message] == [
        "no C compiler found: the CPU backend's kernels run in torch, which is slower"
    ]
    expected = Reference().append(theirs, 0, tokens.clone(), make_batch(theirs, case, chunks, window=True), turn)
    assert torch.equal(queries, expected)
    assert all(torch.equal(a, b) for a, b in zip(bytes_of(ours).values(), bytes_of(theirs).values()))
    close(make_backend("cpu").rms_norm(tokens[0], torch.ones(16), 1e-5), normed)
    close(make_backend("cpu").silu_mul(tokens[0]), gated)
