"""Threads that share the rows of a large call: each row once, the same bits for any number of them."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import threading

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import torch

from tests.helpers.wires import DTYPES, WIRES, assert_same_bits, magnitudes
from thinwire.triton_kernels.cpu import pack
from thinwire.triton_kernels.cpu.pack import pack_rows, unpack_rows
from thinwire.wire import WireFormat

POISON = 0xA5
INT8 = WireFormat.parse("int8")


@pytest.fixture
def always(monkeypatch):
    """Threads for the smallest calls, too."""
    monkeypatch.setattr(pack, "BYTES_PER_THREAD", 1)


def first_of(words):
    """The number of the first word of a pack."""
    return -words.ctypes.data % 64 // 4


def index_or_none(random_numbers, rows, distinct):
    """In some calls an index, with gaps between its numbers."""
    if random_numbers.random() < 0.5:
        return None
    numbers = random_numbers.sample(range(rows), rows) if distinct else random_numbers.choices(range(rows), k=rows)
    table = torch.zeros(rows, 2, dtype=torch.int64)
    table[:, 0] = torch.tensor(numbers, dtype=torch.int64)
    return table[:, 0]


@pytest.mark.parametrize("spec", WIRES)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, 20))])
def test_any_number_of_threads_gives_the_same_bits(spec, seed, always):
    chosen, wire = random.Random(f"{spec} {seed}"), WireFormat.parse(spec)
    generator = torch.Generator().manual_seed(seed)
    for dtype in DTYPES:
        rows, hidden, threads = chosen.choice([1, 2, 7, 100]), chosen.choice([1, 42, 431, 1024]), chosen.randint(2, 9)
        x = magnitudes(rows, hidden + 3, dtype, generator)[:, 2:-1]
        index = index_or_none(chosen, rows, distinct=False)
        records = [torch.full((rows + 1, wire.row_bytes(hidden, dtype)), POISON, dtype=torch.uint8) for _ in range(2)]
        for number, made in zip((1, threads), records, strict=True):
            pack_rows(x, wire, index, made[:rows], threads=number)
        assert torch.equal(*records), (dtype, rows, hidden, threads)
        record_index = index_or_none(chosen, rows, distinct=False)
        row_index = index_or_none(chosen, rows, distinct=True)
        outs = [torch.zeros(rows + 1, hidden + 5, dtype=dtype) for _ in range(2)]
        for number, out in zip((1, threads), outs, strict=True):
            unpack_rows(records[0][:rows], wire, record_index, row_index, out[:rows, 3 : 3 + hidden], threads=number)
        assert_same_bits(f"{dtype}", *outs)


def test_a_call_gets_threads_by_its_bytes():
    row = pack.BYTES_PER_THREAD // 64
    assert [pack.threads_for(count, row, 4) for count in (0, 127, 128, 4096)] == [1, 1, 2, 4]
    assert pack.threads_for(1, 1 << 40, 4) == 1


def test_threads_of_small_stacks_are_not_used():
    before = threading.stack_size(32 << 10)
    try:
        assert pack.threads_for(1 << 20, 1 << 10, 4) == 1
        threading.stack_size(128 << 10)
        assert pack.threads_for(1 << 20, 1 << 10, 4) == 4
    finally:
        threading.stack_size(before)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_fewer_threads_than_wanted_are_told_once_and_do_it_all(error, always, monkeypatch, caplog):
    def refuse(*arguments):
        raise error

    monkeypatch.setattr(pack.threading.Thread, "start", refuse)
    x = torch.randn(50, 300)
    records, expected = (torch.empty(50, INT8.row_bytes(300), dtype=torch.uint8) for _ in range(2))
    pack_rows(x, INT8, None, expected)
    with caplog.at_level(logging.WARNING, logger="thinwire"):
        for _ in range(2):
            pack_rows(x, INT8, None, records.fill_(POISON), threads=3)
            assert torch.equal(records, expected)
    assert caplog.messages == [f"1 of 3 threads share the rows of large calls: {error!r}"]


LATE = """
import torch
from thinwire.triton_kernels.cpu import pack
from thinwire.triton_kernels.cpu.pack import pack_rows
from thinwire.wire import WireFormat

pack.BYTES_PER_THREAD = 1
wire = WireFormat.parse("int8")
x, records = torch.randn(50, 300), torch.empty(50, wire.row_bytes(300), dtype=torch.uint8)
pack_rows(x, wire, None, records, threads=3)

class Late:
    def __del__(self, call=pack_rows, arguments=(x, wire, None, records, 3)):
        call(*arguments)
        print("done", flush=True)

late = Late()
"""


@pytest.mark.exhaustive
def test_a_call_while_python_ends_is_a_call():
    ended = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("done\n", "")
