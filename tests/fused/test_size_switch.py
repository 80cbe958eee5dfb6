"""wire="auto": one threshold for all ranks."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import torch

from thinwire.comm.communicator import Communicator
from thinwire.comm.environment import AUTO_VARIABLE
from thinwire.comm.launch.bootstrap import init
from thinwire.errors import ArgumentError, ConfigMismatch, WireFormatError
from thinwire.fused.all_gather import all_gather, all_gather_v
from thinwire.fused.all_reduce import all_reduce
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.reduce_scatter import reduce_scatter
from thinwire.testing import run_ranks


def _is_exact(comm: Communicator, size: int) -> bool:
    """Whether an "auto" all-reduce of `size` float32 elements came out exactly."""
    x = torch.linspace(0.1, 3.7, size)
    exact = all_reduce(x, wire="none", comm=comm)
    quantized = all_reduce(x, wire="int8", comm=comm)
    got = all_reduce(x, wire="auto", comm=comm)
    assert torch.equal(got, exact) or torch.equal(got, quantized)
    return torch.equal(got, exact)


def _forced(comm: Communicator) -> list[bool]:
    found = [_is_exact(comm, size) for size in (250, 2500)]
    x = torch.linspace(0.1, 3.7, comm.size * 500)
    for call in (all_gather, reduce_scatter, all_to_all_v):
        for tensor, spec in ((x, "int8" if x.nbytes >= 4000 else "none"), (x[: comm.size * 2], "none")):
            assert torch.equal(call(tensor, wire="auto", comm=comm), call(tensor, wire=spec, comm=comm))
    largest = all_reduce(x, op="max", wire="auto", gather_wire="auto", comm=comm)  # only sums are quantised
    assert torch.equal(largest, all_reduce(x, op="max", wire="none", comm=comm))
    assert torch.equal(largest, all_reduce(x, op="max", wire="none", gather_wire="auto", comm=comm))
    assert comm.auto_bytes == 4000
    return found


@pytest.mark.parametrize("mode", ("process", "thread"))
def test_small_messages_go_exactly_and_large_ones_quantised(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mode == "process":
        assert run_ranks(_forced, 2, env={AUTO_VARIABLE: "4000"}) == [[True, False]] * 2
    else:
        monkeypatch.setenv(AUTO_VARIABLE, "\x1f4000 ")  # which strip() takes for spaces, and int() does not
        assert run_ranks(_forced, 2, mode=mode) == [[True, False]] * 2


def _refused(comm: Communicator) -> None:
    x = torch.ones(comm.size * 4)
    with pytest.raises(WireFormatError, match="messages of one size on all ranks"):
        all_gather_v(x, wire="auto", comm=comm)
    with pytest.raises(WireFormatError, match="messages of one size on all ranks"):
        all_to_all_v(x, [4] * comm.size, wire="auto", comm=comm)
    assert torch.equal(all_reduce(x.long(), wire="auto", comm=comm), x.long() * comm.size), "integers go exactly"


def test_messages_of_different_sizes_are_refused() -> None:
    run_ranks(_refused, 2, mode="thread")


@pytest.mark.parametrize("wanted", ["4k", "²", "-1", "1.5", "9" * 5000, "many"])
def test_a_threshold_that_is_none_is_refused(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AUTO_VARIABLE, wanted)
    with pytest.raises(ArgumentError, match="expected a number of bytes"):
        init()


def _differing(comm: Communicator) -> None:
    os.environ[AUTO_VARIABLE] = str(1000 * comm.rank)
    with pytest.raises(ConfigMismatch, match=AUTO_VARIABLE):
        Communicator(comm.group)


def test_ranks_that_are_told_different_thresholds_all_refuse() -> None:
    run_ranks(_differing, 2)
