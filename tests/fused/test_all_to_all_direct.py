"""The direct all-to-all-v between real ranks: when it is taken, what it leaves alone, and peers that die or stop."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import torch
import torch.distributed as dist

import thinwire as tw
from tests.helpers.speeds import exhaustive_but
from tests.helpers.wires import DTYPES, WIRES, assert_same_bits, magnitudes
from thinwire.comm.communicator import Communicator
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.comm.work import Work
from thinwire.errors import CapacityError, ConfigMismatch, CountsError, PeerTimeout, ThinwireError, TransportUnavailable
from thinwire.fused import transport
from thinwire.fused.all_to_all import all_to_all_v, open_channel
from thinwire.fused.ops import all_reduce
from thinwire.fused.pulled_legs import NAME, PulledLegs, open_legs
from thinwire.fused.transport import Staged, open_direct
from thinwire.testing import run_ranks
from thinwire.wire import WireFormat

TIMEOUT = 1.0
LONGER = 3.0  # of a communicator that is made anew, on a busy machine too


def _both_transports(comm: Communicator, piece_bytes: int | None) -> None:
    open_channel(comm, None, piece_bytes)
    rng = random.Random(comm.size)  # the same on every rank
    generator = torch.Generator().manual_seed(comm.rank)
    for spec in WIRES:
        for dtype in DTYPES:
            counts = [[rng.choice([0, 1, 4, 9]) for _ in range(comm.size)] for _ in range(comm.size)]
            sent, received = counts[comm.rank], [row[comm.rank] for row in counts]
            x = magnitudes(max(1, sum(sent)), rng.choice([1, 40, 700]), dtype, generator)
            x[0, 0] = float("nan")
            results = [
                all_to_all_v(x, sent, known, wire=spec, comm=comm, transport=transport)
                for transport, known in (("staged", received), ("direct", received), ("direct", None), ("auto", None))
            ]
            for result in results[1:]:
                assert_same_bits(f"{spec} {dtype}", results[0], result)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "mode", "piece_bytes"), [(2, "process", None), (3, "thread", 640), (5, "thread", None)]
)
def test_both_transports_give_the_same_bits(size: int, mode: str, piece_bytes: int | None) -> None:
    run_ranks(_both_transports, size, piece_bytes, mode=mode, timeout=120)


# ---------------------------------------------------------------------------------------------------------------------
# The choice


def _says_why(comm: Communicator) -> list[str]:
    if comm.rank == 1:
        os.environ["THINWIRE_BACKEND"] = "torch"
    with pytest.raises(TransportUnavailable) as caught:
        all_to_all_v(torch.zeros(4, 8), comm=comm, transport="direct")
    moved = all_to_all_v(torch.ones(4, 8), comm=comm)  # alike on all ranks, or it would not return
    assert isinstance(moved, torch.Tensor) and moved.shape == (4, 8)
    return [str(caught.value), comm.explain().splitlines()[-1].strip()]


def test_one_rank_that_cannot_makes_all_take_the_staged_transport_and_say_so() -> None:
    reason = "it needs the numba backend and THINWIRE_BACKEND=torch on rank 1"
    expected = [f"all_to_all_v cannot take the direct transport: {reason}", f"{NAME}: staged, as {reason}"]
    assert run_ranks(_says_why, 2, timeout=120) == [expected] * 2


def _on_amd(comm: Communicator) -> None:
    asked, gpu = transport.why_not_by_default, SimpleNamespace(device=torch.device("cuda"))
    assert asked(comm) is asked(gpu) is None
    with mock.patch.object(torch.version, "hip", "7.0"):
        assert asked(comm) is None  # a CPU rank
        why = asked(gpu)
    x = torch.ones(4, 8)
    with (
        mock.patch.multiple(transport, why_not_by_default=lambda comm: why),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        all_to_all_v(x, [2, 2], comm=comm)
        tw.all_reduce(x, comm=comm)
        with tw.ExpertParallel(comm, 4, 1, 8, 4) as ep:
            assert "staged" in ep.explain() and "is not proven on AMD GPUs" in ep.explain()
        told = comm.explain()
        for name in ("all_to_all_v", "all_reduce"):
            assert f"{name}: staged, as the direct transport is not proven on AMD GPUs" in told
        assert not said and comm.attached(NAME) is None
        all_to_all_v(x, [2, 2], comm=comm, transport="direct")
        assert f"{NAME}: direct" in comm.explain()
    assert [str(warning.message) for warning in said] == [f"all_to_all_v: {why}"]


def test_on_amd_the_direct_transport_is_taken_by_name_alone() -> None:
    run_ranks(_on_amd, 2)


def _explained(comm: Communicator) -> str:
    all_to_all_v(torch.zeros(4, 8), comm=comm, transport="staged")
    assert "all_to_all_v" not in comm.explain()
    all_to_all_v(torch.zeros(4, 8), comm=comm)
    return comm.explain().splitlines()[-1]


def test_the_choice_is_explained() -> None:
    line = f"  {NAME}: direct, 4.0 MiB of shared memory, pieces of 524288 bytes"
    assert run_ranks(_explained, 2, mode="thread") == [line] * 2


def _other_pieces(comm: Communicator) -> None:
    with pytest.raises(ConfigMismatch, match="piece_bytes: 1280 on rank 0; 1408 on rank 1"):
        open_channel(comm, None, 1280 + 128 * comm.rank)
    all_to_all_v(torch.zeros(4, 8), comm=comm, transport="direct")


def test_ranks_with_other_pieces_are_told() -> None:
    run_ranks(_other_pieces, 2, mode="thread")


def _wide_records(comm: Communicator) -> None:
    wire = WireFormat("int8", 128, 1 << 20)
    x = torch.randn(2 * comm.size, 1024)
    with pytest.raises(CapacityError, match="a record of 1024 elements takes 1048576 bytes"):
        all_to_all_v(x.view(-1), comm=comm, wire=wire)
    results = [all_to_all_v(x, comm=comm, wire=wire, transport=transport) for transport in ("direct", "staged")]
    assert_same_bits("long records", results[0], results[1])  # type: ignore[arg-type]


def test_a_flat_tensor_whose_records_are_longer_than_a_piece_is_refused() -> None:
    run_ranks(_wide_records, 2, mode="thread")


class _Forbidden(ThinwireError):
    """Another exception would be one from outside, which ends the communicator."""


def _forbid(*args: object, **kwargs: object) -> None:
    raise _Forbidden


def _alone(comm: Communicator) -> None:
    """After the first call the process group is not asked for anything."""
    x = torch.arange(4.0 * comm.size * 700).view(4 * comm.size, 700)
    ones = [1] * comm.size
    all_to_all_v(x, comm=comm)
    named = [name for name in dir(dist) if callable(getattr(dist, name)) and name[0].islower()]
    kept = {name: getattr(dist, name) for name in named}
    for name in named:
        setattr(dist, name, _forbid)
    comm.post = _forbid  # type: ignore[method-assign,assignment]
    try:
        with pytest.raises(_Forbidden):
            all_to_all_v(x, ones, comm=comm, transport="staged")
        for wire in ("none", "int8"):
            all_to_all_v(x, comm=comm, wire=wire)
            all_to_all_v(x, ones, comm=comm, wire=wire)
            all_to_all_v(x.view(-1), ones, ones, comm=comm, wire=wire)
            pending = all_to_all_v(x, ones, comm=comm, wire=wire, async_op=True)
            assert isinstance(pending, Work)
            pending.wait()
            with pytest.raises(CountsError, match="overlap"):
                all_to_all_v(x, ones, recv_displs=[0] * comm.size, comm=comm, wire=wire)
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
        del comm.post  # type: ignore[misc]


def test_calls_after_the_first_leave_the_process_group_alone() -> None:
    run_ranks(_alone, 2, timeout=120)


def _overtaken(comm: Communicator) -> None:
    """Long segments move in `wait()`, which some ranks reach before another call and some after it."""
    open_channel(comm, None, 1280)
    x = torch.arange(comm.size * 200.0).view(-1, 1).expand(-1, 64) + comm.rank
    for other in (comm.barrier, lambda: comm.all_gather_object(comm.rank), lambda: all_to_all_v(x, comm=comm)):
        pending = all_to_all_v(x, [200] * comm.size, wire="none", comm=comm, async_op=True)
        assert isinstance(pending, Work)
        if comm.rank % 2:
            other()
        got = pending.wait()
        if not comm.rank % 2:
            other()
        rows = torch.arange(200.0 * comm.rank, 200.0 * (comm.rank + 1))
        assert torch.equal(got[:, 0], torch.cat([rows + source for source in range(comm.size)]))


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_ranks_may_wait_before_or_after_other_calls_on_the_communicator(mode: str) -> None:
    run_ranks(_overtaken, 3, mode=mode, timeout=120)


# ---------------------------------------------------------------------------------------------------------------------
# Peers that die or stop


def _call(comm: Communicator, rows: int, wire: str) -> None:
    all_to_all_v(torch.ones(rows * comm.size, 512), [rows] * comm.size, wire=wire, comm=comm)


def _until_timeout(comm: Communicator, rows: int, wire: str) -> tuple[float, tuple[int, ...]]:
    """Calls until that fails. How long the last one took, and whom it blames."""
    while True:
        started = time.monotonic()
        try:
            _call(comm, rows, wire)
        except PeerTimeout as error:
            waited = time.monotonic() - started
            # It is not hushed up by taking the other transport.
            with pytest.raises(PeerTimeout, match="cannot be used any more"):
                _call(comm, rows, wire)
            assert "failed" in comm.explain()
            return waited, error.ranks


def _as_a_child(body: Callable[..., Any], *args: Any) -> int:
    """Runs `body` in a fork of this rank, which can be killed and stopped without the rank's end. Returns its number.

    What the rank has mapped, the child has mapped too: to its peers it is the rank.
    """
    child = os.fork()
    if child:
        return child
    try:
        body(*args)
    finally:
        os._exit(0)


def _with_a_victim(comm: Communicator, number: int, rows: int, wire: str) -> tuple[float, tuple[int, ...]] | None:
    patient = comm
    open_channel(patient)  # ranks load the kernels now, which may take longer than the impatient one waits
    comm = Communicator(comm.group, timeout=LONGER)
    _call(comm, rows, wire)
    if comm.rank != 1:
        outcome = _until_timeout(comm, rows, wire)
        patient.barrier()
        return outcome
    child = _as_a_child(_until_timeout, comm, rows, wire)
    time.sleep(0.3)
    os.kill(child, number)
    patient.barrier()
    if number == signal.SIGSTOP:
        # It wakes when the others are done with it, finds their reports, and gives up too.
        os.kill(child, signal.SIGCONT)
        limit = time.monotonic() + LONGER + 2
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            assert time.monotonic() < limit, "the rank that was woken hangs"
            time.sleep(0.01)
    else:
        os.waitpid(child, 0)
    return None


@pytest.mark.parametrize(
    "number", exhaustive_but([signal.SIGSTOP], [signal.SIGKILL, signal.SIGSTOP]), ids=["killed", "stopped"]
)
@pytest.mark.parametrize(
    ("rows", "wire"), exhaustive_but([(2000, "int8")], [(1, "none"), (2000, "int8")], True), ids=["one row", "pieces"]
)
def test_survivors_name_a_rank_that_was(number: signal.Signals, rows: int, wire: str) -> None:
    for outcome in run_ranks(_with_a_victim, 3, number, rows, wire, timeout=120)[::2]:
        assert outcome is not None
        waited, blamed = outcome
        assert blamed == (1,) and waited <= LONGER + 2


def _make_fails_on_one(comm: Communicator) -> str:
    memories = []

    def make(memory: SymmetricMemory, _: bool) -> Staged:
        memories.append(memory)
        if comm.rank == 1:
            raise MemoryError("no room for tables")
        return Staged("a test", "made")

    with pytest.raises(TransportUnavailable) as caught:
        open_direct(comm, "a test", 4096, {}, make, Staged)
    with pytest.raises(ThinwireError, match="closed"):
        _ = memories[0].local
    comm.barrier()  # and the group can still be used
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_rank_that_cannot_use_its_memory_tells_the_others(mode: str) -> None:
    told = "TransportUnavailable: a test: rank 1 could not use its memory: MemoryError: no room for tables"
    assert run_ranks(_make_fails_on_one, 3, mode=mode) == [told] * 3


def _other_first_calls(comm: Communicator) -> str:
    x = torch.arange(8.0)
    try:
        all_to_all_v(x, [4, 4], [4, 4], comm=comm) if comm.rank else all_reduce(x, comm=comm)
    except ThinwireError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_ranks_whose_first_direct_calls_are_of_other_operations_are_told_which() -> None:
    reduces, moves = run_ranks(_other_first_calls, 2, mode="thread")
    assert reduces.startswith("ConfigMismatch: the ranks do different things:\n  rank 0: all_reduce of 8 float32")
    assert reduces.endswith("rank 1: all_to_all_v")
    assert moves.startswith("CountsError: rank 0 is in all_reduce of 8 float32") and "rank 1 in all_to_all_v" in moves


def _looks(comm: Communicator) -> int:
    legs = open_legs(comm)
    assert isinstance(legs, PulledLegs)
    return legs.board.looks


@pytest.mark.parametrize(
    ("cores", "crowded"),
    [([[0], [0]], True), ([[0], [1]], False), ([[3, 5], [3, 5]], False)],
    ids=["of one core", "bound to a core each", "of two cores"],
)
def test_ranks_look_once_where_they_outnumber_cores(
    cores: list[list[int]], crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_ranks = cores.copy()
    monkeypatch.setattr(transport, "_own_cores", of_ranks.pop)
    assert [looks == 1 for looks in run_ranks(_looks, 2, mode="thread")] == [crowded] * 2
