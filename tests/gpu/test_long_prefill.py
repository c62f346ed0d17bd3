"""Long chunks on a device: cuDNN over decoded blocks, merged with the paged kernel, against float32 attention."""

import time
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from pagefold.backends.base import ForwardInputs, KVView
from pagefold.backends.triton import long_prefill
from pagefold.backends.triton.backend import TritonBackend, _query_frames
from pagefold.backends.triton.long_prefill import LongPrefill, attend_long, gather_rows, prefix_attention
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


def attend(view: KVView, q: torch.Tensor, batch: ForwardInputs) -> torch.Tensor:
    backend, out = TritonBackend(), torch.full_like(q, torch.nan)
    shapes = [backend._shapes(view, tier)[1] for tier in range(len(view.tiers))]
    for chunk in LongPrefill().plan(view, batch):
        attend_long(view, 0, q, _query_frames(view, q), chunk, shapes, SCALE, out)
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


@pytest.mark.parametrize("length", [65536, 131072])
@pytest.mark.parametrize("format", ["bf16", "int4"])
def test_8192_new_tokens_of_a_long_sequence(monkeypatch, capsys, format, length):
    view, case = long_cache(format, None, length, [0], [0] * HEADS)
    batch = moved(make_batch(view, case, [(1, 8192)]))
    q = torch.randn(8192, HEADS * PER_HEAD, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    ours, tokens = attend(view, q, batch), [0, 1, 100, 4095, 8191]
    assert error(ours[tokens], exact(view, q, length, tokens)) < 5e-3
    assert torch.isfinite(ours).all()
    monkeypatch.setattr(long_prefill, "has_prefix_attention", lambda kv: False)
    paged = TritonBackend()
    flops = 4 * q.shape[1] * HEAD_DIM * 8192 * (length - 4096)
    only_paged = flops / milliseconds(lambda: paged.attend(view, 0, q, batch, SCALE)) / 1e9
    monkeypatch.undo()
    batch.plan = None
    (chunk,) = LongPrefill().plan(view, batch)
    shapes, out = [paged._shapes(view, 0)[1]], torch.empty_like(q)
    queries = _query_frames(view, q)
    both = flops / milliseconds(lambda: attend_long(view, 0, q, queries, chunk, shapes, SCALE, out)) / 1e9
    with capsys.disabled():
        print(f"\n{format}, 8192 of {length}: {both:.0f} TFLOP/s, the paged kernel alone {only_paged:.0f}")


def test_new_shapes_are_paid_for_once(capsys):
    """Seconds of the first call for each shape of queries and rows, and of the next."""
    took = []
    for num_rows in (8192, 16384, 32768, 65536):
        for num_queries in (1024, 8192):
            q = torch.randn(num_queries, 32, 128, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
            k = torch.randn(8, num_rows, 128, dtype=torch.bfloat16, device="cuda")
            times = []
            for _ in range(2):
                torch.cuda.synchronize()
                start = time.perf_counter()
                prefix_attention(q, k, k, SCALE)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            took.append((num_queries, num_rows, *times))
    assert all(again < 0.1 for *_, again in took)
    with capsys.disabled():
        print()
        for num_queries, num_rows, first, again in took:
            print(f"{num_queries} queries, {num_rows} rows: first {first * 1e3:.0f} ms, again {again * 1e3:.1f} ms")


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
    heads, slot = torch.tensor([1, 6], device="cuda"), torch.tensor([1], device="cuda")
    planes = [[view.tiers[0].rows(name) for name in ("k_data", "k_scale", "v_data", "v_scale")]]
    k, v = gather_rows(view, planes, 0, slot, heads, 8192, 8192, torch.bfloat16)
    pages = view.page_table[1, 0, 128:256].long()
    for role, ours in (("k", k), ("v", v)):
        data, scale = (view.tiers[0].planes[f"{role}_{part}"][pages][:, heads] for part in ("data", "scale"))
        truth = view.tiers[0].format.k.decode(data, scale, torch.float32).transpose(0, 1).flatten(1, 2)
        assert error(ours, truth) < 3e-3
