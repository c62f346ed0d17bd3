"""Long chunks on a device: cuDNN over decoded blocks and a causal square, merged, against float32 attention."""

import time
from itertools import pairwise

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from pagefold.backends.base import ForwardInputs, KVView
from pagefold.backends.triton import long_prefill
from pagefold.backends.triton.backend import TritonBackend
from pagefold.backends.triton.long_prefill import Cover, LongPrefill, attend_long, attention, gather_rows, warm_up
from pagefold.store.format import parse_format
from pagefold.store.pagestore import PageStore
from tests.backend.cases import Case, make_batch, members_of
from tests.gpu.test_kernels import moved

pytestmark = pytest.mark.gpu

HEADS, PER_HEAD, HEAD_DIM, PAGE = 8, 4, 128, 64
SCALE = HEAD_DIM**-0.5


@pytest.fixture(autouse=True)
def needs_cudnn_attention():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")


def long_cache(hot: str, cold: str | None, length: int, evicted: list[int], group_of: list[int]) -> tuple[KVView, Case]:
    """One sequence in one layer of 8 KV heads, random rows encoded on the device, pages in random order.

    evicted    rows dropped of each group
    group_of   of each head
    """
    torch.manual_seed(0)
    case = Case(lengths=(length,), page_size=PAGE, per_head=PER_HEAD, head_dim=HEAD_DIM, dtype=torch.bfloat16)
    num_groups, max_pages = len(evicted), length // PAGE + 2
    columns = [group_of[:head].count(group) for head, group in enumerate(group_of)]
    groups, columns = (torch.tensor([x], dtype=torch.int32) for x in (group_of, columns))
    num_pages, width = num_groups * max_pages + 1, HEADS // num_groups
    stores = [
        PageStore(parse_format(name), num_pages, width, PAGE, HEAD_DIM, {}, "cuda") for name in (hot, cold) if name
    ]
    for store in stores:
        for role, codec in (("k", store.format.k), ("v", store.format.v)):
            for column in range(width):
                for some in torch.arange(1, num_pages, device="cuda").split(512):
                    rows = torch.randn(len(some), PAGE, HEAD_DIM, device="cuda")
                    for part, encoded in zip(("data", "scale"), codec.encode(rows)):
                        store.planes[f"{role}_{part}"][some, column] = encoded
    table = torch.zeros(2, num_groups, max_pages, dtype=torch.int32, device="cuda")
    table[1] = torch.randperm(num_pages - 1, device="cuda").view(num_groups, -1).int() + 1
    dropped, in_cold = torch.zeros(2, 2, num_groups, dtype=torch.int32)
    dropped[1] = torch.tensor(evicted)
    in_cold[1] = torch.arange(1, num_groups + 1) * 77 if cold else 0
    window = torch.zeros(1, 2, 16, HEADS * PER_HEAD, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    tables = (table, dropped.cuda(), in_cold.cuda(), groups.cuda(), columns.cuda(), members_of(groups, columns).cuda())
    return KVView(stores, *tables, window, torch.ones(HEAD_DIM // 2, device="cuda"), PAGE), case


def planes_of(view: KVView) -> list[list[torch.Tensor]]:
    return [[store.rows(name) for name in ("k_data", "k_scale", "v_data", "v_scale")] for store in view.tiers]


def attend(view: KVView, q: torch.Tensor, batch: ForwardInputs) -> torch.Tensor:
    out, planes = torch.full_like(q, torch.nan), planes_of(view)
    for chunk in LongPrefill().plan(view, batch):
        attend_long(view, planes, 0, q, chunk, SCALE, out)
    return out


def exact(view: KVView, q: torch.Tensor, length: int, tokens: list[int]) -> torch.Tensor:
    """float32[tokens, Hq, D] attention of some tokens of the chunk q."""
    out, slot = [], 1
    for head in range(HEADS):
        group, column = int(view.group_of[0, head]), int(view.column_of[0, head])
        n, cold = length - int(view.evicted[slot, group]), int(view.cold[slot, group])
        k, v = [], []
        for store, pages in ((view.tiers[-1], slice(0, cold)), (view.tiers[0], slice(cold, -(-n // PAGE)))):
            chosen = view.page_table[slot, group, pages].long()
            for role, rows in (("k", k), ("v", v)):
                codec = store.format.k if role == "k" else store.format.v
                data, scale = (store.planes[f"{role}_{part}"][chosen, column] for part in ("data", "scale"))
                rows.append(codec.decode(data, scale, torch.float32).flatten(0, 1))
        k, v = torch.cat(k)[:n], torch.cat(v)[:n]
        logits = q[tokens, head * PER_HEAD : (head + 1) * PER_HEAD].float() @ k.T * SCALE
        hidden = torch.arange(n, device="cuda") > (n - len(q) + torch.tensor(tokens, device="cuda"))[:, None]
        out.append(torch.softmax(logits.masked_fill_(hidden[:, None], -torch.inf), -1) @ v)
    return torch.cat(out, 1)


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours.float() - truth).norm() / truth.norm())


def milliseconds(call) -> float:
    call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
    for event in events:
        event.record()
        call()
    torch.cuda.synchronize()
    return min(a.elapsed_time(b) for a, b in pairwise(events))


@pytest.mark.parametrize("q_len, length", [(8192, 8192), (8192, 65536), (8192, 131072), (8191, 66559), (16384, 65536)])
@pytest.mark.parametrize("format", ["bf16", "fp8", "int4"])
def test_new_tokens_of_a_long_sequence(monkeypatch, capsys, format, q_len, length):
    view, case = long_cache(format, None, length, [0], [0] * HEADS)
    batch = moved(make_batch(view, case, [(1, q_len)]))
    q = torch.randn(q_len, HEADS * PER_HEAD, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    ours, tokens = attend(view, q, batch), [0, 1, 100, 4095, q_len - 1]
    assert error(ours[tokens], exact(view, q, length, tokens)) < 5e-3
    assert torch.isfinite(ours).all()
    monkeypatch.setattr(long_prefill, "has_attention", lambda kv: False)
    paged = TritonBackend()
    flops = 4 * q.shape[1] * HEAD_DIM * q_len * (length - q_len / 2)
    only_paged = flops / milliseconds(lambda: paged.attend(view, 0, q, batch, SCALE)) / 1e9
    monkeypatch.undo()
    batch.plan = None
    chunks, planes, out = LongPrefill().plan(view, batch), planes_of(view), torch.empty_like(q)

    def by_library() -> None:
        for chunk in chunks:
            attend_long(view, planes, 0, q, chunk, SCALE, out)

    took = milliseconds(by_library)
    torch.cuda.synchronize()
    start = time.perf_counter()
    by_library()
    launched = (time.perf_counter() - start) * 1e3
    with capsys.disabled():
        print(
            f"\n{format}, {q_len} of {length}: {took:.2f} ms, {flops / took / 1e9:.0f} TFLOP/s, launched in "
            f"{launched:.2f} ms; the paged kernel {only_paged:.0f} TFLOP/s"
        )


def test_pieces_of_the_work(capsys):
    """Milliseconds of each kernel around the library's, and of the library's in the layouts it is given."""
    view, case = long_cache("int4", None, 65536, [0], [0] * HEADS)
    batch = moved(make_batch(view, case, [(1, 8100)]))
    (chunk,) = LongPrefill().plan(view, batch)
    (cover,), planes = chunk.covers[0], planes_of(view)
    q = torch.randn(8100, HEADS * PER_HEAD, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    decode = lambda: gather_rows(view, planes, 0, 1, cover, 0, 32768, 65536, q.dtype)  # noqa: E731
    k, v = (rows.transpose(0, 1) for rows in decode())
    of_blocks, of_square = long_prefill._queries(view, q, cover)
    size = of_square.shape[1]
    square = lambda: attention(of_square, k[:, :size], v[:, :size], SCALE, True)  # noqa: E731
    block = lambda: attention(of_blocks, k, v, SCALE, False)  # noqa: E731
    headed = [rows.contiguous() for rows in (k, v)]
    took = {
        "32768 rows decoded": decode,
        f"8100 queries placed twice, rest up to {int(cover.rest.max())}": lambda: long_prefill._queries(view, q, cover),
        "8192 queries, 32768 rows, heads inside rows": block,
        "8192 queries, 32768 rows, rows inside heads": lambda: attention(of_blocks, *headed, SCALE, False),
        f"square of {size}": square,
        "three parts merged": lambda: long_prefill._merge(view, [parts[0], *parts], cover, out),
    }
    parts, out = [block(), square()], torch.empty_like(q)
    with capsys.disabled():
        print()
        for name, call in took.items():
            print(f"{name}: {milliseconds(call):.3f} ms")


def test_requests_wait_for_no_plan_after_warming_up(capsys):
    """Seconds of the first call for lengths of chunks and prefixes that nobody asked for before."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    view, case = long_cache("bf16", None, 131072, [0], [0] * HEADS)
    warm_up(view, 8192, 131072)
    torch.cuda.synchronize()
    warmed, took = time.perf_counter() - start, []
    for q_len, past in [(8192, 0), (8192, 122880), (7000, 20000), (8100, 99999), (1500, 65535), (8191, 1024)]:
        q = torch.randn(q_len, HEADS * PER_HEAD, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        chunk = LongPrefill().chunk(view, 0, 1, slice(0, q_len), np.array([past]))
        for _ in range(2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            attend_long(view, planes_of(view), 0, q, chunk, SCALE, torch.empty_like(q))
            torch.cuda.synchronize()
            took.append(time.perf_counter() - start)
    with capsys.disabled():
        print(
            f"\nwarmed up, cache made, in {warmed:.1f} s; first and next calls, ms:", [f"{t * 1e3:.1f}" for t in took]
        )
    assert all(first < again + 0.05 for first, again in zip(took[::2], took[1::2]))


def test_several_long_chunks_beside_decodes_and_short_chunks():
    view, case = long_cache("int4", None, 40000, [0], [0] * HEADS)
    batch = moved(make_batch(view, case, [(1, 1), (1, 9000), (1, 300), (1, 8192), (1, 1)]))
    q = torch.randn(len(batch.tokens), HEADS * PER_HEAD, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    out, first = TritonBackend().attend(view, 0, q, batch, SCALE), 0
    for q_len in batch.host_q_lens:
        tokens = sorted({0, q_len // 2, q_len - 1})
        part = slice(first, first + q_len)
        assert error(out[part][tokens], exact(view, q[part], 40000, tokens)) < 5e-3
        first += q_len


@pytest.mark.parametrize("hot, cold", [("bf16", "int4"), ("fp8", None), ("k4v2", None), ("int4", "k4v2")])
def test_uneven_groups_and_tiers(hot, cold):
    """Heads of one layer in four groups that have dropped 0, 64, 9000 and all but 1456 rows; queries are padded."""
    length, q_len = 30000, 1300
    evicted = [0, 64, 9024, length // PAGE * PAGE - 1408]
    view, case = long_cache(hot, cold, length, evicted, [0, 1, 2, 3, 3, 1, 2, 0])
    view.cold.clamp_(max=((length - view.evicted) // PAGE - 1)[:, :].clamp(min=0))
    batch = moved(make_batch(view, case, [(1, q_len)]))
    q = torch.randn(q_len, HEADS * PER_HEAD, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    tokens = [0, 3, 640, q_len - 1]
    assert error(attend(view, q, batch)[tokens], exact(view, q, length, tokens)) < 5e-3


def test_a_block_holds_the_rows_as_decoded():
    view, _ = long_cache("int4", None, 20000, [0], [0] * HEADS)
    heads = torch.tensor([1, 6], device="cuda")
    cover = Cover(heads, torch.tensor([100, 100], device="cuda"), True, False, 16284, 1024, [])
    k, v = gather_rows(view, planes_of(view), 0, 1, cover, 8192, 8192, 16284, torch.bfloat16)
    pages = view.page_table[1, 0, 128:256].long()
    for role, ours in (("k", k), ("v", v)):
        data, scale = (view.tiers[0].planes[f"{role}_{part}"][pages][:, heads] for part in ("data", "scale"))
        truth = view.tiers[0].format.k.decode(data, scale, torch.float32).transpose(1, 2).flatten(0, 1)
        assert error(ours, truth) < 3e-3
    k, v = gather_rows(view, planes_of(view), 0, 1, cover, 8192, 8192, 12000, torch.bfloat16)
    past = 12100 - 8192
    assert k[past - 1].any() and v[past - 1].any() and not k[past:].any() and not v[past:].any()
