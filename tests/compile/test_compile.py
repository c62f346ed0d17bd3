"""Every kernel, as the backend launches it, compiles for real devices on a machine that has none, within its limits.

The backend runs on host tensors with its kernels replaced by recorders; what they were given is compiled ahead of time.
"""

# ruff: noqa: E402 - what is imported depends on Triton being there and compiling

import contextlib
import dataclasses
import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs the package triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted, not compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pagefold.backends.triton import backend, deal, layer_ops, pages, rows, window
from pagefold.backends.triton.backend import TritonBackend
from pagefold.store.format import Plane, parse_format
from tests.backend.cases import Case, make_batch, make_jobs, make_keep, make_turn, make_view, new_queries, new_tokens

POINTER = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
}
MODULES = (backend, deal, layer_ops, pages, rows, window)  # where kernels are launched
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED = {80: 166912, 90: 232448}  # bytes a program may use


@dataclasses.dataclass
class Launch:
    kernel: triton.JITFunction
    args: dict

    def compile(self, capability: int):
        signature, constants, attributes = {}, {}, {}
        for i, param in enumerate(self.kernel.params):
            value = self.args[param.name]
            if param.is_constexpr:
                signature[param.name], constants[(i,)] = "constexpr", value
            elif isinstance(value, tuple):
                signature[param.name] = tuple(POINTER[part.dtype] for part in value)
                attributes |= {(i, j): [["tt.divisibility", 16]] for j in range(len(value))}
            elif isinstance(value, torch.Tensor):
                signature[param.name] = POINTER[value.dtype]
                attributes[(i,)] = [["tt.divisibility", 16]]
            else:
                signature[param.name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0 and not param.do_not_specialize:
                    attributes[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=attributes)
        names = ("num_warps", "num_stages", *(["maxnreg"] if capability >= 90 else []))
        options = {name: self.args[name] for name in names if name in self.args}
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


class Recorder:
    """Stands for a kernel: keeps what it is launched with."""

    def __init__(self, kernel, launches: list[Launch]):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        assert all(0 < size < 65536 for size in grid[1:]) and grid[0] > 0
        return lambda *args, **options: self.launches.append(
            Launch(self.kernel, dict(zip(self.kernel.arg_names, args, strict=False)) | options)
        )


@contextlib.contextmanager
def recording(monkeypatch):
    """Lists what is launched inside, instead of launching it."""
    found: list[Launch] = []
    with monkeypatch.context() as patch:
        for module in MODULES:
            for name, value in list(vars(module).items()):
                if isinstance(value, triton.JITFunction):
                    patch.setattr(module, name, Recorder(value, found))
        yield found


def launches_of(monkeypatch, call: str, hot: str, cold: str | None, head_dim: int, page_size: int = 64) -> list[Launch]:
    """What one call of the backend launches, for a bfloat16 model with 4 query heads per KV head, and several groups of
    heads, but for "decode evenly", whose rows are not dealt out."""
    state = {"score": Plane(torch.float32, 1)} if call in ("append", "compact") else {}
    layout = "uniform" if call == "decode evenly" else "mixed"
    case = Case(layout, hot, cold, (300, 700), page_size, 4, head_dim, num_window=16, dtype=torch.bfloat16, state=state)
    view = make_view(case)
    chunks = [(2, 9), (1, 1)] if call == "prefill" else [(2, 1), (1, 1)]
    batch = make_batch(view, case, chunks, window=call == "append")
    q, tokens = new_queries(view, case, batch), new_tokens(view, case, batch)
    jobs = make_jobs(view, case, dst_tier=1 if cold else 0)
    ours, columns = TritonBackend(), slice(None)
    with recording(monkeypatch) as found, monkeypatch.context() as patch:
        if call == "decode evenly":
            patch.setattr(backend, "is_dealt", lambda *_: False)
        match call:
            case "decode" | "decode evenly" | "prefill":
                ours.attend(view, 1, q, batch, 0.1)
            case "append":
                ours.append(view, 1, tokens, batch, make_turn(case, 700, norm=True))
            case "window_scores":
                ours.window_scores(view, jobs, columns, 0.1)
            case "expected_logits":
                ours.expected_logits(view, jobs, columns, 0.1, 512)
            case "read_rows":
                ours.read_rows(view, jobs, columns, "v")
            case "compact":
                ours.compact(view, jobs, columns, make_keep(jobs, view.members.shape[1], page_size), {})
    assert found
    return found


def instructions(cubin: bytes, folder: Path) -> tuple[list[str], int]:
    """(opcodes of the longest loop, or of all if there is none, registers), from the machine code."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    text = subprocess.run([TOOLS / "nvdisasm", "-c", path], capture_output=True, text=True, check=True).stdout
    usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", path], capture_output=True, text=True, check=True).stdout
    labels, ops, loop = {}, [], (0, 0)
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(ops)
        elif op := re.match(r"\s+(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)(.*);", line):
            ops.append(op[1])
            target = re.search(r"\.L_x_\d+", op[2]) if op[1].startswith("BRA") else None
            start = labels.get(target[0], len(ops)) if target else len(ops)
            loop = max(loop, (start, len(ops)), key=lambda span: span[1] - span[0])
    if loop[1] - loop[0] <= 1:  # a branch to itself is what fills a program up behind its end
        loop = (0, len(ops))
    return ops[slice(*loop)], int(re.search(r"REG:(\d+)", usage)[1])


CALLS = ["decode", "decode evenly", "prefill", "append", "window_scores", "expected_logits", "read_rows", "compact"]
TIERS = [
    ("fp32", None),
    ("bf16", None),
    ("fp16", None),
    ("fp8", None),
    ("int8", None),
    ("int4", None),
    ("k4v2", None),
    ("bf16", "int4"),
]


SHAPES = [
    (128, 90),
    pytest.param(64, 90, marks=pytest.mark.sweep),
    pytest.param(128, 80, marks=pytest.mark.sweep),
]


@pytest.mark.slow
@pytest.mark.parametrize("head_dim, capability", SHAPES)
@pytest.mark.parametrize("hot, cold", TIERS)
@pytest.mark.parametrize("call", CALLS)
def test_kernels_compile_within_the_limits_of_the_device(monkeypatch, tmp_path, call, hot, cold, head_dim, capability):
    if capability < 89 and "fp8" in (hot, cold):
        pytest.skip("e4m3 needs compute capability 8.9")
    for launch in launches_of(monkeypatch, call, hot, cold, head_dim):
        compiled = launch.compile(capability)
        assert compiled.metadata.shared <= SHARED[capability]
        loop, _ = instructions(compiled.asm["cubin"], tmp_path)
        count = lambda *names: sum(op.startswith(names) for op in loop)  # noqa: B023, E731
        # float32 is there for exactness; a few in a long loop cost nothing
        assert hot == "fp32" or count("LDL", "STL") <= 0.02 * len(loop), f"{launch.kernel.__name__} spills"
        # ptxas 12.8 restores some spilled descriptors of matrix operands wrongly; a page number is one R2UR
        assert not count("HGMMA") or count("R2UR") <= 2, f"{launch.kernel.__name__} spills descriptors"


@pytest.mark.parametrize("format", ["bf16", "fp8", "int4"])
def test_the_decode_loop_is_as_short_where_rows_are_dealt_out(monkeypatch, tmp_path, format):
    loops = []
    for call in ("decode", "decode evenly"):
        launches = launches_of(monkeypatch, call, format, None, 128)
        assert any(launch.kernel.__name__ == "deal_rows" for launch in launches) == (call == "decode")
        (split,) = [launch for launch in launches if launch.kernel.__name__ == "decode_split"]
        loops.append(len(instructions(split.compile(90).asm["cubin"], tmp_path)[0]))
    assert loops[0] <= 1.02 * loops[1]


@pytest.mark.parametrize("call", ["decode", "decode evenly", "prefill", "window_scores", "expected_logits"])
@pytest.mark.parametrize("format", ["bf16", "int4"])
def test_places_of_rows_are_counted_in_64_bits(monkeypatch, call, format):
    """A column of a large device holds more than 2^31 numbers."""
    kernels = "decode_split", "prefill_tile", "window_sums", "window_weights", "expect_rows"
    launches = launches_of(monkeypatch, call, format, None, 128)
    for launch in [launch for launch in launches if launch.kernel.__name__ in kernels]:
        code = launch.compile(90).asm["ttir"]
        assert not re.findall(r"arith.muli .* : tensor<(?:\d+x1|1x\d+)xi32>", code), launch.kernel.__name__


# lane-instructions of the decode loop for each byte of K and V. An H200 can issue 7.8 for each byte that it reads, at
# 1.98 GHz and 4.3 TB/s; what a kernel stays below that is what it has left to hide latency. k4v2 has tiles of 32 rows,
# which take more for each byte than 64 and less time.
BUDGET = {"bf16": 1.0, "fp8": 2.6, "int8": 2.55, "int4": 3.75, "k4v2": 5.1}


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("format", BUDGET)
def test_decode_loops_stay_within_their_instruction_budget(monkeypatch, tmp_path, format, page_size):
    """And use tensor cores, wide asynchronous loads, no conversions from integers, no byte-wide access to codes; what
    is loaded in one round is not used before the next."""
    launch = next(
        launch
        for launch in launches_of(monkeypatch, "decode evenly", format, None, 128, page_size)
        if launch.kernel.__name__ == "decode_split"
    )
    compiled = launch.compile(90)
    loop, registers = instructions(compiled.asm["cubin"], tmp_path)
    per_byte = len(loop) * launch.args["num_warps"] * 32 / (launch.args["N"] * parse_format(format).bytes_per_row(128))
    assert per_byte <= BUDGET[format] * (1.1 if page_size < launch.args["N"] else 1)
    assert registers < 255
    assert any(op.startswith("HMMA") for op in loop) and any(op.startswith("LDGSTS") and "128" in op for op in loop)
    assert not [op for op in loop if re.match(r"I2F|LDS\.U8|LDG\.E\.U8|LDL|STL", op)]
    body = re.search(r"scf\.for .*?scf\.yield [^\n]*", compiled.asm["ttgir"], re.DOTALL)
    assert body
    *work, handed_on = body[0].splitlines()
    loaded = re.findall(r"(%\w+) = tt\.load ", body[0])
    assert loaded
    for name in loaded:
        uses = [line for line in work if re.search(rf"(?<!^){name}\b(?! = )", line.strip())]
        assert not uses and re.search(rf"{name}\b", handed_on), f"{name} is waited for"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("num_tokens", [1, 512, 8192])
@pytest.mark.parametrize("format", ["bf16", "fp8", "int8", "int4", "k4v2"])
def test_append_never_spills(monkeypatch, tmp_path, format, num_tokens, capability):
    """With the tile of a batch of so many tokens of a model with 32 query heads. Nor does it call the slow ways of
    division, or rotate heads through shared memory: the norm's weights and scales may go that way once."""
    if capability < 89 and format == "fp8":
        pytest.skip("e4m3 needs compute capability 8.9")
    tile = backend.append_tile(num_tokens, 32, 8, parse_format(format).k.rotate)
    monkeypatch.setattr(backend, "append_tile", lambda *_: tile)
    (launch,) = launches_of(monkeypatch, "append", format, None, 128)
    ops, registers = instructions(launch.compile(capability).asm["cubin"], tmp_path)
    assert registers <= 128 and not [op for op in ops if op.startswith(("LDL", "STL"))]
    assert not [op for op in ops if op.startswith(("CALL", "FCHK", "F2I"))]
    assert sum(op.startswith(("LDS", "STS")) for op in ops) <= (0 if num_tokens == 1 else 16)
    assert num_tokens == 1 or any(op.startswith("LDG.E") and "128" in op for op in ops)


@pytest.mark.parametrize(
    "format, budget", [("bf16", 420), ("fp8", 760), ("int8", 1050), ("int4", 1550), ("k4v2", 1650)]
)
def test_appends_of_one_token_stay_within_their_instruction_budget(monkeypatch, tmp_path, format, budget):
    """Of a query, a key and a value, norms, rotations and tables included."""
    (launch,) = launches_of(monkeypatch, "append", format, None, 128)
    ops, _ = instructions(launch.compile(90).asm["cubin"], tmp_path)
    assert launch.args["BT"] * launch.args["BH"] == launch.args["num_warps"] == 1
    assert len([op for op in ops if op != "NOP"]) <= budget


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("num_tokens", [1, 4096])
@pytest.mark.parametrize("hidden, inner", [(1024, 3072), (2560, 9728), (8192, 12288)])
def test_elementwise_kernels_move_16_bytes_at_a_time(monkeypatch, tmp_path, hidden, inner, num_tokens, capability):
    x, weight = torch.zeros(num_tokens, hidden, dtype=torch.bfloat16), torch.ones(hidden)
    with recording(monkeypatch) as found:
        ours = TritonBackend()
        ours.rms_norm(x, weight, 1e-6)
        ours.add_rms_norm(x, x, weight, 1e-6)
        ours.silu_mul(torch.zeros(num_tokens, 2 * inner, dtype=torch.bfloat16))
    assert len(found) == 3
    for launch in found:
        ops, registers = instructions(launch.compile(capability).asm["cubin"], tmp_path)
        moves = [op for op in ops if op.startswith(("LDG", "STG", "LDL", "STL"))]
        assert registers <= 64 and moves and all("128" in op for op in moves)


@pytest.mark.parametrize("format", ["bf16", "fp8", "int4"])
def test_pages_move_16_bytes_at_a_time(monkeypatch, tmp_path, format):
    """Also to and from the host's memory, where narrow words would leave the bus idle."""
    store = make_view(Case("mixed", format, None, (300,), 64, 4, 128, state={"score": Plane(torch.float32, 1)})).tiers[
        0
    ]
    ids = torch.arange(1, 3)
    with recording(monkeypatch) as found:
        TritonBackend().copy_pages(store, ids, store, ids)
    (launch,) = found
    ops, registers = instructions(launch.compile(90).asm["cubin"], tmp_path)
    assert registers <= 64 and not [op for op in ops if op.startswith(("LDL", "STL"))]
    assert sum(op.startswith("LDG.E.128") for op in ops) >= 4
