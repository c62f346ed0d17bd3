"""What a row codec promises: bytes, errors, extremes, and that a row's bytes depend on the row alone."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagefold.store.format import FORMATS, parse_format
from pagefold.store.formats.int4 import INT4
from pagefold.store.formats.k4v2 import K4V2
from pagefold.store.lowbit import LARGEST, MidRiseCodec, hadamard
from pagefold.store.pagestore import PageStore

CODECS = {f"{name}.{role}": getattr(parse_format(name), role) for name in FORMATS.names() for role in "kv"}
ROTATED = {"4 bits": INT4, "2 bits": K4V2.v}


def decoded(codec, x: torch.Tensor) -> torch.Tensor:
    return codec.decode(*codec.encode(x), torch.float64)


def relative_error(codec, x: torch.Tensor) -> float:
    return float(((decoded(codec, x) - x).norm(dim=-1) / x.norm(dim=-1)).mean())


def outliers(num_rows: int, head_dim: int) -> torch.Tensor:
    x = torch.randn(num_rows, head_dim)
    x[:, :: head_dim // 4] *= 12
    return x


@pytest.mark.parametrize(
    "name, expected",
    [
        ("fp64", 2048),
        ("fp32", 1024),
        ("bf16", 512),
        ("fp16", 512),
        ("fp8", 260),
        ("int8", 260),
        ("int4", 132),
        ("k4v2", 100),
    ],
)
def test_bytes_per_row(name, expected):
    """K and V of one head at D = 128, scales included, and what a store really allocates."""
    pair = parse_format(name)
    assert pair.bytes_per_row(128) == expected
    store = PageStore(pair, num_pages=3, num_columns=2, page_size=4, head_dim=128, state={})
    assert sum(plane.nbytes for plane in store.planes.values()) == 3 * 2 * 4 * expected


@pytest.mark.parametrize("bits, codec", [(4, INT4), (2, K4V2.v)])
def test_packing_order_is_a_bijection_on_bytes(bits, codec):
    """Byte j holds channel j of each of the 8 / bits parts of a row, the first part in the lowest bits."""
    data = torch.arange(256, dtype=torch.uint8)[:, None]
    codes = codec.unpack(data)
    assert torch.equal(codec.pack(codes.float()), data)
    parts = list(itertools.product(range(2**bits), repeat=8 // bits))
    assert sorted(map(tuple, codes.tolist())) == parts
    assert codes[0b11100100].tolist() == ([4, 14] if bits == 4 else [0, 1, 2, 3])


@pytest.mark.parametrize("codec", ROTATED.values(), ids=ROTATED)
def test_rounding_stays_within_half_a_step(codec):
    """Values inside the grid move by half a step at most, those outside take its end."""
    y = hadamard(torch.randn(500, 64))
    data, scale = codec.encode(hadamard(y))
    stored = codec.decode_stored(data, scale, torch.float32)
    step = scale.float()
    inside = y.abs() <= (codec.middle + 0.5) * step
    assert ((stored - y).abs() <= step / 2 * (1 + 2**-9) + 1e-5)[inside].all()
    assert (stored.abs() == codec.middle * step)[~inside].all()
    assert (~inside).any()


@pytest.mark.parametrize("codec", ROTATED.values(), ids=ROTATED)
def test_codes_survive_decoding(codec):
    data, scale = codec.encode(torch.randn(300, 32))
    again = codec.codes(codec.decode_stored(data, scale, torch.float32), scale.float())
    assert torch.equal(codec.pack(again), data)


@pytest.mark.parametrize("codec", ROTATED.values(), ids=ROTATED)
def test_clip_search_is_never_worse_than_the_full_range(codec):
    x = outliers(500, 64)
    full = MidRiseCodec(codec.bits, (1.0,))
    worse = (decoded(codec, x) - x).norm(dim=-1) - (decoded(full, x) - x).norm(dim=-1)
    assert (worse <= 1e-4).all() and worse.mean() < 0


def test_errors_lie_in_their_bands():
    """Mean relative L2 error of Gaussian rows at D = 128, and what rotation buys on rows with outlier channels."""
    x = torch.randn(3000, 128)
    fp8, bits8, bits4, bits2 = (
        relative_error(codec, x) for codec in (parse_format("fp8").k, parse_format("int8").k, INT4, K4V2.v)
    )
    assert bits8 < fp8 / 4
    assert 0.0255 < fp8 < 0.0275
    assert 0.095 < bits4 < 0.105
    assert 0.335 < bits2 < 0.350
    x = outliers(3000, 128)
    raw = relative_error(INT4, hadamard(x))  # hadamard is its own inverse: this row is quantised as it is
    assert relative_error(INT4, x) < raw / 2.5


@pytest.mark.parametrize("head_dim", [2, 16, 64, 128, 256])
def test_hadamard_is_an_orthonormal_symmetric_involution(head_dim):
    matrix = hadamard(torch.eye(head_dim, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix, torch.eye(head_dim, dtype=torch.float64))
    torch.testing.assert_close(matrix, matrix.T)
    sylvester = torch.ones(1, 1, dtype=torch.float64)
    while len(sylvester) < head_dim:
        sylvester = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), sylvester)
    torch.testing.assert_close(matrix, sylvester / head_dim**0.5)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_rows_are_encoded_alone(codec):
    """A row's bytes are the same alone, in a batch, and in any shape."""
    for num_rows in (3, 32, 700):
        x = torch.randn(num_rows, 4, 64)
        data, scale = codec.encode(x)
        for i, j in ((0, 0), (num_rows - 1, 3), (num_rows // 2, 1)):
            alone = codec.encode(x[i, j])
            assert torch.equal(alone[0].view(torch.uint8), data[i, j].view(torch.uint8))
            assert torch.equal(alone[1], scale[i, j])
        turned = codec.encode(x.transpose(0, 1))[0].transpose(0, 1)
        assert torch.equal(turned.contiguous().view(torch.uint8), data.view(torch.uint8))


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_decode_is_decode_stored_in_the_models_frame(codec):
    data, scale = codec.encode(torch.randn(20, 64))
    stored = codec.decode_stored(data, scale, torch.float64)
    torch.testing.assert_close(codec.decode(data, scale, torch.float64), hadamard(stored) if codec.rotate else stored)
    for out in (torch.float32, torch.bfloat16, torch.float16):
        assert codec.decode(data, scale, out).dtype == codec.decode_stored(data, scale, out).dtype == out


EXTREMES = {
    "zero": torch.zeros(64),
    "constant": torch.full((64,), 3.0),
    "outlier": torch.cat([torch.tensor([3e4]), torch.full((63,), 1e-3)]),
    "denormal": torch.full((64,), 1e-40),
    "tiny": torch.randn(64) * 1e-7,
    "largest": torch.full((64,), LARGEST),
    "mixed largest": torch.tensor([LARGEST, -LARGEST]).repeat(32),
}


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("x", EXTREMES.values(), ids=EXTREMES)
def test_extreme_rows_stay_finite_and_close(codec, x):
    """Within the row's own magnitude, which two bits cannot do for a spike, what rotation makes of a constant row."""
    data, scale = codec.encode(x)
    assert torch.isfinite(scale).all() and (scale > 0).all()
    error = (codec.decode(data, scale, torch.float64) - x).norm()
    limit = 1.4 if codec == K4V2.v else 0.7
    assert error <= limit * x.double().norm() + 64**0.5 * 2.0**-24


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_nan_and_infinity_policy(codec):
    """Scaled formats take NaN for 0 and infinity for 65504: one bad number never spoils a row. Plain ones show NaN."""
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30] + [1.0] * 60)
    result = decoded(codec, x)
    if codec.planes(64)[1].width:
        assert torch.equal(result, decoded(codec, torch.tensor([0.0, LARGEST, -LARGEST, LARGEST] + [1.0] * 60)))
        assert torch.isfinite(result).all()
    else:
        assert result[0].isnan() and result[1] >= LARGEST and result[2] <= -LARGEST
        assert torch.isfinite(result[4:]).all()


@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=16, max_size=16))
def test_any_row_can_be_stored_in_a_scaled_format(values):
    for name in ("fp8", "int8", "int4", "k4v2"):
        codec = parse_format(name).v
        data, scale = codec.encode(torch.tensor(values))
        assert torch.isfinite(codec.decode(data, scale, torch.float32)).all() and (scale > 0).all()


@pytest.mark.parametrize("spec", ["int4", "k4v2", "k=bf16,v=int4"])
def test_rotated_formats_need_a_power_of_two(spec):
    with pytest.raises(ValueError, match="head_dim: got 80, must be a power of two"):
        PageStore(parse_format(spec), 2, 1, 8, 80, {})


def test_a_pair_takes_each_side_from_its_own_format():
    pair = parse_format("k=int4,v=fp8")
    assert pair.k == parse_format("int4").k and pair.v == parse_format("fp8").v
    assert pair.bytes_per_row(128) == 66 + 130
    for bad in ("k=int4", "k=int4,q=fp8"):
        with pytest.raises(ValueError, match="expected a name or"):
            parse_format(bad)
    with pytest.raises(ValueError, match="unknown format 'int5'; known: .*int4"):
        parse_format("k=int5,v=fp8")
