"""The CPU codec against the plain-torch reference: equal to the last bit."""

from __future__ import annotations

import importlib
import itertools
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import numba
import numpy as np
import torch

from tests.helpers.speeds import exhaustive_but
from tests.helpers.wires import DTYPES, WIRES, assert_same_bits, magnitudes
from thinwire.triton_kernels.codec_reference import dequantize_reference, quantize_reference, rotated_reference
from thinwire.triton_kernels.cpu import codec, compat, pack, sums
from thinwire.triton_kernels.cpu.compat import device, kernel
from thinwire.triton_kernels.cpu.ir import vectors
from thinwire.wire import FORMATS, WireFormat

ROOT = Path(__file__).parents[3]
HIDDENS = (1, 7, 16, 127, 128, 129, 257, 4096, 5121, 7168)
POISON = 0xA5
GUARD = 32  # bytes behind each record and each row
QUANTIZED = tuple(spec for spec in WIRES if spec != "none")

every_wire = pytest.mark.parametrize("spec", WIRES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def poisoned_records(rows: int, wire: WireFormat, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Records to be written, and the same with the guard bytes behind each of them and behind the last."""
    size = wire.row_bytes(hidden, dtype)
    memory = torch.full((rows + 1, size + GUARD), POISON, dtype=torch.uint8)
    return memory[:rows, :size], memory


def poisoned_rows(rows: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows to be written, and the same with guard elements around them."""
    memory = torch.full((rows + 1, hidden + GUARD // dtype.itemsize), 7.0, dtype=dtype)
    return memory[:rows, :hidden], memory


def quantized(x: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    """The records of x, after checking that nothing else was written."""
    records, memory = poisoned_records(x.shape[0], wire, x.shape[1], x.dtype)
    pack.pack_rows(x, wire, None, records)
    assert (memory[:-1, records.shape[1] :] == POISON).all() and (memory[-1] == POISON).all(), "written past a record"
    return records


def dequantized(records: torch.Tensor, wire: WireFormat, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """The rows of records, after checking that nothing else was written."""
    out, memory = poisoned_rows(records.shape[0], hidden, dtype)
    pack.unpack_rows(records, wire, None, None, out)
    assert (memory[:-1, hidden:] == 7.0).all() and (memory[-1] == 7.0).all(), "written past a row"
    return out


def assert_equals_reference(name: str, x: torch.Tensor, wire: WireFormat) -> None:
    expected = quantize_reference(x, wire)
    records = quantized(x, wire)
    differs = (records != expected).nonzero()
    assert not differs.numel(), f"records of {name}: {len(differs)} bytes differ, first at {differs[0].tolist()}"
    for dtype in DTYPES if wire.quantized else (x.dtype,):
        rows = dequantize_reference(expected, wire, x.shape[1], dtype)
        back = dequantized(expected, wire, x.shape[1], dtype)
        assert_same_bits(f"{name} to {dtype}", rows, back, any_nan=not wire.quantized)


@every_dtype
@every_wire
def test_rows_of_every_magnitude_and_length(spec: str, dtype: torch.dtype) -> None:
    wire = WireFormat.parse(spec)
    generator = torch.Generator().manual_seed(len(spec))
    for rows, hidden in [(5, hidden) for hidden in HIDDENS] + [(0, 129), (1, 129), (0, 7168), (1, 7168)]:
        x = magnitudes(max(rows, 2), hidden, dtype, generator)[-rows or 2 :]
        assert x.shape == (rows, hidden)
        assert_equals_reference(f"{spec} {dtype} [{rows}, {hidden}]", x, wire)


@every_dtype
@pytest.mark.parametrize("hidden", [8192, 8193, 20_000])
def test_rotated_rows_of_one_scale_in_one_tile_and_in_several(hidden: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, hidden, generator=torch.Generator().manual_seed(hidden)).to(dtype)
    assert_equals_reference(f"{dtype} {hidden}", x, WireFormat.parse("int8:row+h64"))


@every_dtype
@every_wire
def test_rows_that_lie_apart(spec: str, dtype: torch.dtype) -> None:
    wire = WireFormat.parse(spec)
    for rows, hidden in ((3, 5), (4, 300)):
        x = torch.randn(2 * rows, hidden + 3).to(dtype)[::2, 1 : hidden + 1]
        assert_equals_reference(f"{spec} strided", x, wire)
    assert_equals_reference(f"{spec} repeated", torch.randn(1, 200).to(dtype).expand(3, 200), wire)


@every_dtype
@pytest.mark.parametrize("spec", QUANTIZED)
def test_nan_and_infinity_at_every_position_spoil_their_group_alone(spec: str, dtype: torch.dtype) -> None:
    wire = WireFormat.parse(spec)
    group = wire.group or 96
    hidden = group if wire.row_scale else group + 37  # one group more, a short one
    # With the infinities in turn: every position of a group of 1024 is a row of 1024.
    for value in (torch.nan, torch.inf, -torch.inf) if group <= 128 else (torch.nan, -torch.inf):
        x = torch.randn(hidden, hidden).to(dtype)
        x.fill_diagonal_(value)
        expected = quantize_reference(x, wire)
        records = quantized(x, wire)
        assert torch.equal(records, expected), value
        rows = dequantized(records, wire, hidden, dtype)
        columns = torch.arange(hidden) // group
        assert torch.equal(rows.isnan(), columns[:, None] == columns[None, :])
        assert_same_bits(str(value), dequantize_reference(expected, wire, hidden, dtype), rows, any_nan=False)


@every_dtype
@pytest.mark.parametrize("spec", QUANTIZED)
def test_the_ends_of_the_range(spec: str, dtype: torch.dtype) -> None:
    wire = WireFormat.parse(spec)
    largest = torch.finfo(dtype).max
    tiny = torch.tensor([0.0, -0.0, 2.0**-110, 2.0**-110 * (1 - 2.0**-8), 2.0**-126, 2.0**-133, 1e-45, 1e-30, 6e-8])
    rows = [
        torch.full((150,), largest, dtype=dtype),
        torch.full((150,), -largest, dtype=dtype),
        torch.tensor([largest, -largest, 1.0]).repeat(50).to(dtype),
        *(torch.full((150,), float(value)).to(dtype) for value in tiny),
        *(torch.tensor([float(value), 0.0, -float(value)]).repeat(50).to(dtype) for value in tiny),
        torch.cat((torch.zeros(64), torch.randn(86))).to(dtype),
    ]
    x = torch.stack(rows)
    assert_equals_reference(spec, x, wire)
    sure = x.abs().amax(1) < 2.0**122 if wire.rotated else torch.ones(len(x), dtype=torch.bool)
    assert dequantized(quantized(x[sure], wire), wire, 150, dtype).isfinite().all()


@pytest.mark.parametrize("spec", QUANTIZED)
def test_ties_round_half_to_even(spec: str) -> None:
    wire = WireFormat.parse(spec)
    largest = 1 << FORMATS[wire.name].bits - 1
    steps = torch.arange(-largest, largest) + 0.5
    if wire.name == "fp8":  # between codes, subnormal ones too
        exponents = torch.exp2(torch.arange(-20, 9).float())
        steps = torch.cat((exponents * 1.0625, exponents * 1.1875, torch.arange(8) / 512 + 1 / 1024))
    # The largest element of each group makes its scale exactly 1, so that ties stay ties.
    groups = steps.clamp(-wire.qmax, wire.qmax).split(15)
    x = torch.cat([torch.cat((torch.tensor([wire.qmax]), group, torch.zeros(15 - len(group)))) for group in groups])
    if wire.rotated:  # what has these values when it is rotated
        x = torch.nn.functional.pad(x, (0, -len(x) % 64))
        x = rotated_reference(x[None], back=True)[0] / 64
    one = quantize_reference(x[None], wire)[0, wire.scales_offset(len(x)) :][: wire.scale_bytes]
    assert one.view(torch.float32 if wire.row_scale else torch.bfloat16).item() == (2.0**-6 if wire.rotated else 1.0)
    assert_equals_reference(spec, x[None], wire)


@every_dtype
@pytest.mark.parametrize("spec", QUANTIZED)
def test_records_of_any_bytes(spec: str, dtype: torch.dtype) -> None:
    wire = WireFormat.parse(spec)
    generator = torch.Generator().manual_seed(1)
    for hidden in (7, 129, 1500):
        records = torch.randint(0, 256, (64, wire.row_bytes(hidden)), dtype=torch.uint8, generator=generator)
        expected = dequantize_reference(records, wire, hidden, dtype)
        assert_same_bits(spec, expected, dequantized(records, wire, hidden, dtype))


@pytest.mark.parametrize("spec", QUANTIZED)
def test_products_that_are_subnormal_are_rounded(spec: str) -> None:
    # An instruction for bfloat16 makes zeros of them, so rows with such scales must not come to it.
    wire = WireFormat.parse(spec)
    patterns = [*range(0x100), *range(0x100, 0x1000, 0x39), 0x3F80]
    scales = torch.tensor(patterns, dtype=torch.int16).view(torch.bfloat16)
    records = torch.randint(0, 256, (len(patterns), wire.row_bytes(150)), dtype=torch.uint8)
    of_rows = records[:, wire.scales_offset(150) :].view(torch.float32 if wire.row_scale else torch.bfloat16)
    of_rows.copy_(torch.where(torch.rand(of_rows.shape) < 0.5, scales[:, None], scales[:, None] * -1))
    for dtype in DTYPES:
        expected = dequantize_reference(records, wire, 150, dtype)
        assert_same_bits(f"{spec} to {dtype}", expected, dequantized(records, wire, 150, dtype))


@every_dtype
def test_every_fp8_code_comes_back(dtype: torch.dtype) -> None:
    wire = WireFormat.parse("fp8")
    codes = list(range(256))
    record = torch.zeros(1, wire.row_bytes(len(codes)), dtype=torch.uint8)
    record[0, : len(codes)] = torch.tensor(codes, dtype=torch.uint8)
    scales = record[:, wire.scales_offset(len(codes)) :].view(torch.bfloat16)
    scales[:, :2] = 1.0
    x = dequantized(record, wire, len(codes), dtype)
    assert_same_bits("codes", dequantize_reference(record, wire, len(codes), dtype), x)
    assert_equals_reference("codes", x, wire)


@pytest.mark.exhaustive
def test_a_kernel_elsewhere_quantises_into_mapped_memory() -> None:
    wire = WireFormat.parse("int8")
    x = torch.randn(1, 300).bfloat16()
    layout = codec.record_layout(wire, 300, x.dtype)
    row_function = codec.quantize_row

    @numba.njit
    def write(source, target, dtype, layout):
        row_function(source, dtype, target, layout)

    size = wire.row_bytes(300)
    with mmap.mmap(-1, size) as memory:
        view = np.frombuffer(memory, dtype=np.uint8)
        write(x.data_ptr(), view.ctypes.data, codec.dtype_code(x.dtype), layout)
        written = torch.from_numpy(view.copy())
        del view
    assert torch.equal(written[None], quantize_reference(x, wire))


# ---------------------------------------------------------------------------------------------------------------------
# What the compiler made of it

_LAYOUT = "UniTuple(int64, 6)"
_SIGNATURES = {
    pack.pack_kernel: f"void({'int64, ' * 7}{_LAYOUT})",
    pack.unpack_kernel: f"void({'int64, ' * 8}{_LAYOUT})",
    sums.pack_weighted_sums_kernel: f"void({'int64, ' * 10}{_LAYOUT}, int64)",
    sums.sum_records_kernel: f"void({'int64, ' * 8}{_LAYOUT}, int64)",
}
_FUSED_INSTRUCTION = re.compile(r"\bv?fn?m(?:add|sub|l[as])\w*")
_FLAGGED = re.compile(r"\bf(?:add|sub|mul|div|neg)\s+(?:\w+\s+)*?(?:fast|reassoc|contract|nnan|ninf|nsz|arcp|afn)\b.*")
_FUSED_CALL = re.compile(r"@llvm\.fma.*")


def _contractions(dispatcher: object) -> list[str]:
    signature = dispatcher.signatures[0]
    ir, assembly = dispatcher.inspect_llvm(signature), dispatcher.inspect_asm(signature)
    assert "fmul" in ir and "ret" in assembly, "not the whole kernel was looked at"
    return [*_FUSED_INSTRUCTION.findall(assembly), *_FLAGGED.findall(ir), *_FUSED_CALL.findall(ir)]


@pytest.mark.parametrize(
    "entry", exhaustive_but([pack.pack_kernel], _SIGNATURES), ids=lambda entry: entry.py_func.__name__
)
def test_no_product_is_fused_into_a_sum(entry: object) -> None:
    options = {name: value for name, value in entry.targetoptions.items() if name != "nopython"}
    fresh = numba.njit(**options)(entry.py_func)  # a kernel from the cache has no IR to look at
    fresh.compile(_SIGNATURES[entry])
    assert _contractions(fresh) == []


def test_a_fused_product_would_be_seen() -> None:
    @numba.njit("void(float32[::1], float32[::1])", fastmath={"contract"})
    def fused(x, y):
        for i in range(x.size):
            y[i] = x[i] * y[i] + x[0]

    assert _contractions(fused)


def test_the_source_text_of_the_folder_is_part_of_the_cache_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_that_doubles.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    double = importlib.import_module("module_that_doubles").double
    missed = []
    for fingerprint in (1, 1, 2, 1):
        monkeypatch.setattr(compat, "FINGERPRINT", fingerprint)
        made = kernel(double)
        assert made(21) == 42
        missed.append(sum(made.stats.cache_misses.values()))
    assert missed == [1, 0, 1, 0]


def test_a_kernel_that_cannot_be_cached_still_compiles() -> None:
    namespace: dict[str, object] = {}
    exec("def double(x):\n    return 2 * x", namespace)  # a function without a file has nowhere to be cached
    assert kernel(namespace["double"])(21) == 42
    assert device(namespace["double"])(21) == 42


# ---------------------------------------------------------------------------------------------------------------------
# Other machines


#: What kernels do without where a processor lacks it: instructions that must then be gone from them.
_ABSENT = {
    # Neither the instructions nor the compiler's own library functions, which no numba process links to.
    "converts_halves": r"vcvtph2ps|vcvtps2ph|hfsf2|sfhf2|_h2f_|_f2h_",
    "rounds_pairs_to_bfloat16": r"vcvtne2?ps2bf16|truncsfbf2",
    "gathers_bytes": r"vperm[it]2b",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("lacking", _ABSENT)
def test_a_processor_that_lacks_instructions_gives_the_same_bits(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, lacking, lambda: False)
    for name in ("pack_kernel", "unpack_kernel"):
        monkeypatch.setattr(pack, name, numba.njit(nogil=True, error_model="numpy")(getattr(pack, name).py_func))
    generator = torch.Generator().manual_seed(0)
    exponents = torch.linspace(-30, 18, 40).view(-1, 1)
    wide = (torch.rand(40, 150, generator=generator) - 0.5) * torch.exp2(exponents)
    for dtype, spec in itertools.product(DTYPES, ("int8", "int4", "fp8:32")):
        wire = WireFormat.parse(spec)
        x = magnitudes(40, 150, dtype, generator)
        x[3, 5], x[4, 6] = torch.nan, torch.inf
        assert_equals_reference(spec, x, wire)
        records = quantize_reference(wide, wire)
        got = dequantized(records, wire, 150, dtype)
        assert_same_bits(spec, dequantize_reference(records, wire, 150, dtype), got)
    for entry in (pack.pack_kernel, pack.unpack_kernel):
        assembly = entry.inspect_asm(entry.signatures[0])
        assert not re.search(_ABSENT[lacking], assembly)


@pytest.mark.exhaustive
def test_without_numba_everything_imports_and_says_what_to_install() -> None:
    program = """
import sys
sys.modules["numba"] = sys.modules["llvmlite"] = None
import torch
import thinwire.fused
from thinwire.errors import TransportUnavailable
from thinwire.triton_kernels.cpu import codec, compat, pack, sums
from thinwire.wire import FORMATS, WireFormat
wire, x, records = WireFormat.parse("int8"), torch.zeros(1, 8), torch.zeros(1, 32, dtype=torch.uint8)
index = torch.zeros(1, 1, dtype=torch.int64)
for call in (
    lambda: pack.pack_rows(x, wire, None, records),
    lambda: pack.unpack_rows(records, wire, None, None, x),
    lambda: sums.pack_weighted_sums(x, index, torch.ones(1, 1), wire, x.dtype, records),
    lambda: sums.sum_records(records, index, wire, x),
    lambda: codec.quantize_row(0, 0, 0, ()),
):
    try:
        call()
    except TransportUnavailable as error:
        assert "pip install numba" in str(error), error
    else:
        raise AssertionError("ran without numba")
print("refused")
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["refused"], done.stderr
