"""What only a device shows: the compiled kernels, bfloat16 products, long sequences, captured graphs."""

import dataclasses
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from pagefold.backends.base import ForwardInputs, HeadTurn, JobBatch, KVView
from pagefold.backends.reference import Reference
from pagefold.backends.torch_ops import TorchOps, turned_heads
from pagefold.backends.triton.backend import TritonBackend
from pagefold.backends.triton.plan import DecodeShape
from pagefold.store.format import FORMATS, Plane, parse_format
from pagefold.store.mapped import mapped_zeros
from pagefold.store.pagestore import PageStore
from tests.backend.cases import (
    Case,
    bytes_of,
    make_batch,
    make_jobs,
    make_keep,
    make_view,
    new_queries,
    new_tokens,
    of_sources,
)

pytestmark = pytest.mark.gpu

STATE = {"score": Plane(torch.float32, 1)}
ONE_TIER = [(name, None) for name in FORMATS.names() if name != "fp64"]
TIERS = [*ONE_TIER, ("bf16", "int4"), ("int4", "k4v2"), ("fp8", "int4")]
LENGTHS = (1, 130, 64, 700)
DECODE = [(4, 1), (1, 1), (3, 1), (2, 1)]
MIXED = [(4, 200), (1, 1), (2, 7), (3, 33)]


def moved(value, device: str = "cuda"):
    """A copy of a cache, a batch or jobs with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, PageStore):
        state = {
            name.removeprefix("state."): plane for name, plane in value.layout.items() if name.startswith("state.")
        }
        twin = PageStore(
            value.format, value.num_pages, value.num_columns, value.page_size, value.head_dim, state, device
        )
        for name, plane in value.planes.items():
            twin.planes[name].copy_(plane)
        return twin
    if isinstance(value, (KVView, ForwardInputs, JobBatch)):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return type(value)(**{name: moved(field, device) for name, field in fields.items()})
    if isinstance(value, list) and value and isinstance(value[0], PageStore):
        return [moved(item, device) for item in value]
    return value


def relative(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours.cpu().double() - truth.double()).norm() / truth.double().norm())


def check_attention(case: Case, chunks: list[tuple[int, int]]) -> None:
    """Against the reference; a chunk is cut to the tokens that each of its groups still stores."""
    view = make_view(case)
    stored = [min(case.lengths[slot - 1] - int(view.evicted[slot].max()), q_len) for slot, q_len in chunks]
    batch = make_batch(view, case, [(slot, q_len) for (slot, _), q_len in zip(chunks, stored)])
    q = new_queries(view, case, batch)
    scale = case.head_dim**-0.5
    ours = TritonBackend().attend(moved(view), 1, q.cuda(), moved(batch), scale)
    assert relative(ours, Reference().attend(view, 1, q, batch, scale)) < 1e-2
    assert torch.isfinite(ours).all()


@pytest.mark.parametrize("chunks", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("head_dim, per_head, page_size", [(64, 3, 16), (128, 4, 64)])
@pytest.mark.parametrize("hot, cold", TIERS)
@pytest.mark.parametrize("layout", ["uniform", "mixed"])
def test_attention(layout, hot, cold, head_dim, per_head, page_size, chunks):
    check_attention(Case(layout, hot, cold, LENGTHS, page_size, per_head, head_dim, dtype=torch.bfloat16), chunks)


@pytest.mark.parametrize("page_size", [8, 32, 128, 256])
@pytest.mark.parametrize("hot, cold", [("bf16", None), ("bf16", "int4")])
def test_attention_whatever_the_page_size(hot, cold, page_size):
    check_attention(Case("mixed", hot, cold, LENGTHS, page_size, 4, 128, dtype=torch.bfloat16), MIXED)


@pytest.mark.parametrize("hot, cold", TIERS)
def test_append(hot, cold):
    """Bytes equal the reference's, but for ties that another order of summation may break otherwise."""
    case = Case("mixed", hot, cold, LENGTHS, 16, 2, 64, dtype=torch.bfloat16, state=STATE)
    truth = make_view(case)
    ours = moved(truth)
    batch = make_batch(truth, case, [(4, 90), (2, 1), (3, 2), (1, 1)], window=True)
    tokens = new_tokens(truth, case, batch)
    TritonBackend().append(ours, 1, tokens.cuda(), moved(batch), None)
    Reference().append(truth, 1, tokens, batch, None)
    theirs = bytes_of(truth)
    for name, found in bytes_of(moved(ours, "cpu")).items():
        different = int((found != theirs[name]).sum())
        assert different <= 2e-3 * 4 * 94 * 64, name


def wide_view(format: str, num_tokens: int) -> tuple[KVView, ForwardInputs]:
    """An empty cache of 3 layers of a model of 32 query heads, and a sequence that is stored all at once; the last 16
    of its tokens, or fewer, are kept in window slot 1."""
    pages = -(-num_tokens // 64)
    store = PageStore(parse_format(format), pages + 1, 24, 64, 128, STATE, "cuda")
    table = torch.zeros(2, 1, pages, dtype=torch.int32, device="cuda")
    table[1] = torch.randperm(pages, device="cuda").int() + 1
    zeros = torch.zeros(2, 1, dtype=torch.int32, device="cuda")
    columns = torch.arange(24, dtype=torch.int32, device="cuda").view(3, 8)
    members = torch.stack((columns // 8, columns % 8), -1).view(1, 24, 2)
    window = torch.full((3, 2, 16, 32, 128), 7.0, dtype=torch.bfloat16, device="cuda")
    tables = (table, zeros, zeros.clone(), torch.zeros_like(columns), columns, members)
    view = KVView([store], *tables, window, torch.ones(64, device="cuda"), 64)
    case = Case(hot=format, lengths=(num_tokens,), num_window=16, head_dim=128)
    return view, moved(make_batch(view, case, [(1, num_tokens)], window=True))


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("num_tokens", [1, 7, 256, 4096])
@pytest.mark.parametrize("format", [name for name, _ in ONE_TIER])
def test_append_turns_queries_and_keys(format, num_tokens, norm):
    """As torch does on the device, up to a last digit of bfloat16 here and there."""
    torch.manual_seed(0)
    view, batch = wide_view(format, num_tokens)
    qkv = torch.randn(num_tokens, 48, 128, device="cuda", dtype=torch.bfloat16) * 3
    angles = torch.arange(num_tokens, device="cuda")[:, None] * 1e6 ** -torch.linspace(0, 1, 64, device="cuda")
    weight = torch.rand(2, 128, device="cuda") + 0.5 if norm else None
    turn = HeadTurn(torch.stack((angles.cos(), angles.sin()), 1), weight, 1e-6)
    queries, keys, values = turned_heads(qkv.clone(), 8, batch.positions, turn)
    store, backend = view.tiers[0], TritonBackend()
    store.planes["state.score"].fill_(1.0)
    q = backend.append(view, 2, qkv, batch, turn)

    def digits(ours: torch.Tensor, truth: torch.Tensor) -> None:
        torch.testing.assert_close(ours, truth, rtol=2**-7, atol=1e-3)
        assert (ours != truth).float().mean() < 1e-2

    digits(q, queries)
    kept = min(num_tokens, 16)
    assert torch.equal(view.window[2, 1, :kept], q[-kept:])
    assert (view.window[:2] == 7).all() and (view.window[2, 0] == 7).all() and (view.window[2, 1, kept:] == 7).all()
    pages = view.page_table[1, 0].long()
    for role, codec, truth in (("k", store.format.k, keys), ("v", store.format.v, values)):
        data, scale = (
            store.planes[f"{role}_{part}"][pages, 16:].transpose(1, 2).flatten(0, 1) for part in ("data", "scale")
        )
        ours = codec.decode(data, scale, torch.float32)[:num_tokens]
        assert relative(ours, codec.decode(*codec.encode(truth), torch.float32).cpu()) < 1e-2
    cleared = store.planes["state.score"][pages, 16:].transpose(1, 2).flatten(0, 1)
    assert (cleared[:num_tokens] == 0).all() and (cleared[num_tokens:] == 1).all()
    assert (store.planes["state.score"][:, :16] == 1).all(), "rows of other layers"
    scale = 128**-0.5
    assert torch.equal(backend.attend(view, 2, q, batch, scale), backend.attend(view, 2, q.clone(), batch, scale))


@pytest.mark.parametrize("num_tokens", [1, 7, 256, 4096])
@pytest.mark.parametrize("hidden, inner", [(1024, 3072), (2560, 9728), (8192, 12288)])
def test_layer_arithmetic(hidden, inner, num_tokens):
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 3  # noqa: E731
    x, delta, gate_up = make(num_tokens, hidden), make(num_tokens, hidden), make(num_tokens, 2 * inner)
    weight = torch.rand(hidden, device="cuda") + 0.5
    ours, theirs = TritonBackend(), TorchOps()
    check = lambda a, b: torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-5)  # noqa: E731
    check(ours.rms_norm(x, weight, 1e-6), theirs.rms_norm(x, weight, 1e-6))
    check(ours.silu_mul(gate_up), theirs.silu_mul(gate_up))
    other = x.clone()
    check(ours.add_rms_norm(x, delta, weight, 1e-6), theirs.add_rms_norm(other, delta, weight, 1e-6))
    assert torch.equal(x, other)


@pytest.mark.parametrize("hot, cold", TIERS)
@pytest.mark.parametrize("across, stride", [("max", 1), ("mean", 7)])
def test_what_scorers_read(hot, cold, across, stride):
    case = Case("mixed", hot, cold, LENGTHS, 16, 4, 128, num_window=16, state=STATE, stride=stride)
    view = make_view(case)
    jobs = make_jobs(view, case, dst_tier=0)
    gpu, backend = moved(view), TritonBackend()
    args = (slice(None), 128**-0.5)
    scores = backend.window_scores(gpu, moved(jobs), *args, across)
    truth = Reference().window_scores(view, jobs, *args, across)
    assert relative(scores, truth) < 1e-2
    logits = of_sources(backend.expected_logits(gpu, moved(jobs), *args, 300), moved(jobs))
    truth = Reference().expected_logits(view, jobs, *args, 300)
    assert relative(logits, truth) < 1e-2
    for role in ("k", "v"):
        rows = backend.read_rows(gpu, moved(jobs), slice(1, 2), role)
        assert relative(rows, Reference().read_rows(view, jobs, slice(1, 2), role)) < 1e-5
        lengths = backend.read_lengths(gpu, moved(jobs), slice(1, 2), role)
        assert relative(lengths, Reference().read_lengths(view, jobs, slice(1, 2), role)) < 1e-5
    state = backend.read_state(gpu, moved(jobs), slice(None), "score")
    assert torch.equal(state.cpu(), Reference().read_state(view, jobs, slice(None), "score"))


@pytest.mark.parametrize("hot, cold", TIERS)
def test_compaction_within_a_tier_is_exact(hot, cold):
    case = Case("by_layer", hot, cold, LENGTHS, 16, 2, 64, state=STATE)
    for dst_tier in range(1 + case.two_tiers):
        view = make_view(case)
        gpu = moved(view)
        jobs = make_jobs(view, case, dst_tier, keep_pages=2)
        keep = make_keep(jobs, view.members.shape[1], 32)
        TritonBackend().compact(gpu, moved(jobs), slice(None), keep.cuda(), {})
        Reference().compact(view, jobs, slice(None), keep, {})
        theirs = bytes_of(view)
        for name, found in bytes_of(moved(gpu, "cpu")).items():
            different = int((found != theirs[name]).sum())
            assert different <= (2e-3 * keep.numel() * 64 if case.two_tiers else 0), name


def test_pages_go_to_host_memory_and_back():
    store = moved(make_view(Case(hot="int4", state=STATE)).tiers[0])
    before = moved(store, "cpu")
    host = PageStore(store.format, 8, store.num_columns, store.page_size, store.head_dim, STATE, mapped=True)
    src, there = torch.tensor([3, 9, 4]).cuda(), torch.tensor([1, 2, 5]).cuda()
    backend = TritonBackend()
    backend.copy_pages(store, src, host, there)
    store.poison(src)
    backend.copy_pages(host, there, store, src)
    for name, plane in store.planes.items():
        assert torch.equal(
            plane.cpu().contiguous().view(torch.uint8), before.planes[name].contiguous().view(torch.uint8)
        )


def test_mapped_memory_is_given_back_with_its_last_view():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    size, before = 1 << 28, resident()
    for _ in range(8):
        tensor = torch.from_numpy(mapped_zeros(size))
        view = tensor[5:]
        del tensor
        assert view.is_pinned() and not view.any()
        view.fill_(1)
    assert resident() < before + 2 * size


def long_view(format: str, length: int, batch: int = 1) -> tuple[KVView, Case]:
    """One layer of 2 heads, random rows encoded on the device, pages in random order."""
    torch.manual_seed(0)
    case = Case(hot=format, lengths=(length,) * batch, page_size=64, per_head=4, head_dim=128, dtype=torch.float16)
    pair, pages = parse_format(format), length // 64
    store = PageStore(pair, batch * pages + 1, 2, 64, 128, {}, "cuda")
    for role, codec in (("k", pair.k), ("v", pair.v)):
        for column in range(2):
            for some in torch.arange(1, batch * pages + 1, device="cuda").split(256):
                rows = torch.randn(len(some), 64, 128, device="cuda")
                for part, encoded in zip(("data", "scale"), codec.encode(rows)):
                    store.planes[f"{role}_{part}"][some, column] = encoded
    table = torch.zeros(batch + 1, 1, pages, dtype=torch.int32, device="cuda")
    table[1:] = torch.randperm(batch * pages, device="cuda").view(batch, 1, pages).int() + 1
    zeros = torch.zeros(batch + 1, 1, dtype=torch.int32, device="cuda")
    columns = torch.arange(2, dtype=torch.int32, device="cuda")[None]
    members = torch.tensor([[[0, 0], [0, 1]]], dtype=torch.int32, device="cuda")
    window = torch.zeros(1, 2, 16, 8, 128, dtype=torch.float16, device="cuda")
    tables = (table, zeros, zeros.clone(), torch.zeros_like(columns), columns, members)
    return KVView([store], *tables, window, torch.ones(64, device="cuda"), 64), case


def exact(view: KVView, q: torch.Tensor, scale: float, length: int) -> torch.Tensor:
    """float64 attention of the last token of q over the first `length` rows of sequence 1."""
    store, out = view.tiers[0], []
    pages = view.page_table[1, 0].long()
    for head in range(2):
        k, v = (
            codec.decode(*(store.planes[f"{role}_{part}"][pages, head] for part in ("data", "scale")), torch.float64)
            for role, codec in (("k", store.format.k), ("v", store.format.v))
        )
        k, v = (x.flatten(0, 1)[:length] for x in (k, v))
        out.append(torch.softmax(q[-1, 4 * head : 4 * head + 4].double() @ k.T * scale, -1) @ v)
    return torch.cat(out).cpu()


def check_last_token(view: KVView, case: Case, q: torch.Tensor, scale: float, limit: float) -> None:
    """As the only new token, and as the last of two, which is another kernel."""
    truth = exact(view, q, scale, case.lengths[0])
    for num_new in (1, 2):
        batch = moved(make_batch(view, case, [(1, num_new)]))
        ours = TritonBackend().attend(view, 0, q[-num_new:], batch, scale)[-1]
        assert relative(ours, truth) < limit


@pytest.mark.parametrize("scale", [0.002, 0.088, 0.3], ids=["flat", "usual", "peaked"])
@pytest.mark.parametrize("length", [64, 4096, 32768, 131072])
@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8", "int8", "int4", "k4v2"])
def test_long_attention_stays_exact(format, length, scale):
    """Flat attention over long sequences is where a bias left in the accumulators would show."""
    view, case = long_view(format, length)
    q = torch.randn(2, 8, 128, device="cuda", dtype=torch.bfloat16 if format == "bf16" else torch.float16)
    check_last_token(view, case, q, scale, 5e-3 if format == "bf16" else 2e-3)


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8", "int8", "int4", "k4v2"])
def test_a_row_that_takes_the_attention_does_not_hide_the_others(format):
    """Its own values are 0, so the output is that of weights of a millionth: too small for float16 as they are."""
    view, case = long_view(format, 4096)
    store, page = view.tiers[0], int(view.page_table[1, 0, 0])
    dtype = torch.bfloat16 if format == "bf16" else torch.float16
    q = torch.randn(128, device="cuda").to(dtype).expand(2, 8, 128).contiguous()
    scale = 0.088
    key = 14 * q[0, 0].float() / (scale * q[0, 0].float().square().sum())
    for role, codec, row in (("k", store.format.k, key), ("v", store.format.v, torch.zeros_like(key))):
        for part, encoded in zip(("data", "scale"), codec.encode(row.expand(2, 128))):
            store.planes[f"{role}_{part}"][page, :, 0] = encoded
    check_last_token(view, case, q, scale, 5e-3 if format == "bf16" else 2e-3)


def captured(work: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of `work`, which has run once before, and its result, which a replay overwrites."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, work()


@pytest.mark.parametrize("format", ["bf16", "int4"])
def test_a_captured_graph_serves_other_lengths_and_slots(format):
    """Captured at the longest lengths; replayed after slots, lengths and positions change in place."""
    view, case = long_view(format, 4096, batch=3)
    backend = TritonBackend(DecodeShape(tile=64, warps=2, stages=2, programs=64))
    batch = moved(make_batch(view, case, [(1, 1), (2, 1), (3, 1)]))
    qkv = torch.randn(3, 12, 128, device="cuda", dtype=torch.float16)

    def step() -> torch.Tensor:
        batch.plan = None
        q = backend.append(view, 0, qkv, batch, None)
        return backend.attend(view, 0, q, batch, 0.088)

    graph, out = captured(step)
    for lengths, slots in (((5, 700, 4096), (2, 3, 1)), ((1, 65, 1), (3, 1, 0))):
        batch.seq_lens.copy_(torch.tensor(lengths))
        batch.positions.copy_(torch.tensor(lengths) - 1)
        batch.slots.copy_(torch.tensor(slots))
        qkv.normal_()
        graph.replay()
        eager = dataclasses.replace(
            batch, plan=None, host_seq_lens=list(lengths), host_slots=list(slots), slots=batch.slots.clone()
        )
        queries = qkv[:, :8].contiguous()
        assert relative(out[:2], backend.attend(view, 0, queries, eager, 0.088)[:2].cpu()) < 2e-3


def test_a_captured_graph_deals_the_rows_of_uneven_heads_anew():
    case = Case("mixed", "bf16", None, (900, 1500, 2000), 16, 4, 128, dtype=torch.bfloat16)
    view, chunks, backend = make_view(case), [(1, 1), (2, 1), (3, 1)], TritonBackend()
    batch, q = make_batch(view, case, chunks), torch.randn(3, 8, 128, dtype=torch.bfloat16)
    on_device, there, there_q = moved(view), moved(batch), q.cuda()

    def attend() -> torch.Tensor:
        there.plan = None
        return backend.attend(on_device, 1, there_q, there, 0.088)

    graph, out = captured(attend)
    for lengths in ((900, 1500, 2000), (900, 40, 33), (64, 64, 1999)):
        other = make_batch(view, dataclasses.replace(case, lengths=lengths), chunks)
        there.seq_lens.copy_(other.seq_lens)
        graph.replay()
        assert relative(out, Reference().attend(view, 1, q, other, 0.088)) < 1e-2
