"""Every rank keeps its last operations, writes them when peers do not answer, and the files say who stopped where."""

from __future__ import annotations

import json
import os
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import torch
import torch.distributed as dist

import thinwire as tw
from tests.helpers import mortal
from tests.helpers.speeds import exhaustive_but
from thinwire.comm import recorder as recorder_module
from thinwire.comm.call import Recorder
from thinwire.comm.communicator import Communicator
from thinwire.comm.recorder import VARIABLE, write_file
from thinwire.errors import ArgumentError, PeerTimeout, RoutingError, ThinwireError
from thinwire.flight import DONE, FAILED, INTERRUPTED, POSTED, RING, UNDER_WAY, Flight, read_flight
from thinwire.fused.pulled_legs import NAME
from thinwire.testing import run_ranks
from thinwire.tools.commands.inspect import report

#: Seconds that a rank waits for its peers.
TIMEOUT = 0.5


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where all files go; ranks inherit it."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def recorder() -> Recorder:
    return Recorder(0, 2, "a test", "none", 1.0)


def written(made: Recorder) -> Flight:
    return read_flight(made.write("asked for"))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("thinwire-*.json"))


def verdict(paths: list[Path] | list[str]) -> str:
    return report([read_flight(path) for path in paths]).splitlines()[0]


# ---------------------------------------------------------------------------------------------------------------------
# The ring


def test_the_ring_keeps_the_last_operations_in_order() -> None:
    made = recorder()
    for number in range(RING + 44):
        with made.begin("barrier", (number, 2), torch.float32):
            pass
    operations = written(made).operations
    assert [operation.number for operation in operations] == list(range(45, RING + 45))
    assert operations[0].shape == (44, 2) and operations[0].dtype == "float32"
    assert all(0 < operation.start_ns <= operation.end_ns and operation.state == DONE for operation in operations)


def test_a_call_within_another_is_no_entry_but_says_where_it_is() -> None:
    made = recorder()
    with made.begin("split"):
        with made.begin("require_same"), made.begin("all_gather_object"):
            (outer,) = written(made).operations
    assert (outer.name, outer.state, outer.inside) == ("split", UNDER_WAY, "all_gather_object")
    (outer,) = written(made).operations
    assert (outer.name, outer.state, outer.inside) == ("split", DONE, None)


@pytest.mark.parametrize(("error", "state"), [(ValueError(), FAILED), (KeyboardInterrupt(), INTERRUPTED)])
def test_a_call_that_raised_says_what_and_the_next_one_is_by_itself(error: BaseException, state: str) -> None:
    made = recorder()
    with pytest.raises(type(error)), made.begin("one"), made.begin("within"):
        raise error
    with made.begin("two"):
        pass
    one, two = written(made).operations
    assert (one.state, one.failure, one.inside) == (state, type(error).__name__, "within")
    assert (two.number, two.name, two.state) == (2, "two", DONE)


def test_what_is_waited_for_later_ends_then_even_when_the_ring_has_moved_on() -> None:
    made = recorder()
    with made.begin("all_reduce") as call:
        waiting = call.posted()
    assert written(made).operations[0].state == POSTED
    with waiting:
        assert written(made).operations[0].state == UNDER_WAY
    assert written(made).operations[0].state == DONE
    with made.begin("reduce") as call:
        waiting = call.posted()
    for _ in range(RING):
        with made.begin("barrier"):
            pass
    before = written(made).operations
    with pytest.raises(ValueError), waiting:
        raise ValueError
    assert written(made).operations == before and {each.name for each in before} == {"barrier"}


# ---------------------------------------------------------------------------------------------------------------------
# What is recorded


def call_everything(comm: Communicator, transport: str) -> str:
    x, options = torch.ones(4, 64), {"comm": comm, "transport": transport}
    # The first calls open the transports; what they do within is not an entry.
    tw.all_reduce(x, wire="int8", gather_wire="int4", **options)
    tw.all_reduce(x, "max", wire="none", **options)
    work: Any = tw.reduce_scatter(x, wire="int8", async_op=True, **options)
    work.wait()
    tw.all_gather(x, wire="int8", **options)
    tw.all_gather(x, wire="none", **options)
    tw.all_gather_v(x[: 1 + comm.rank], [1, 2], wire="none", **options)
    tw.all_gather_v(x[: 1 + comm.rank], wire="int8", **options)
    for _ in range(2):
        tw.all_to_all_v(
            x, [1, 3] if comm.rank else [2, 2], [2, 1] if comm.rank == 0 else [2, 3], wire="int8", **options
        )
    tw.all_to_all_v(x, [2, 2], wire="none", **options)
    tw.int8_all_to_all_reduce(x.to(torch.int8), 0.5, **options)
    layout = tw.Layout((2,), ("dp",))
    tw.redistribute(x, layout("dp", "None"), layout("None", "dp"), wire="none", **options)
    with tw.ExpertParallel(comm, 4, 2, 64, 8, wire="int8", combine_wire="none", transport=transport) as ep:
        ids, weights = torch.tensor([[0, 3]] * 4), torch.ones(4, 2)
        d = ep.dispatch(x, ids, weights)
        ep.combine(d.tokens, d)
        ep.dispatch(x, ids, weights).abandon()
        ep.dispatch(x, ids, weights)
        ep.rebuild(comm)
    comm.barrier()
    comm.exchange_counts([1, 2])
    comm.all_gather_object("x")
    comm.all_gather_data("x", str)
    comm.require_same("the test", {"a": 1})
    comm.split(groups=[[0], [1]]).close()
    rows = list(torch.zeros(2, 3))
    mine = rows if comm.rank == 0 else None
    comm.all_reduce(x, "max")
    comm.reduce(x, 1)
    comm.reduce_scatter(rows[0], [torch.ones(3)] * 2)
    comm.broadcast(x, 1)
    comm.all_gather(rows, torch.ones(3))
    comm.gather(torch.ones(3), mine, 0)
    comm.scatter(torch.ones(3), mine, 0)
    comm.all_to_all(rows, list(torch.ones(2, 3)))
    comm.all_to_all_v(torch.ones(2), torch.ones(2), [1, 1], [1, 1])
    comm.all_reduce(x, async_op=True).wait()
    return str(comm.flight_recorder())


RECORDED = [
    "all_reduce", "all_reduce", "reduce_scatter", "all_gather", "all_gather", "all_gather_v", "all_gather_v",
    "all_to_all_v", "all_to_all_v", "all_to_all_v", "int8_all_to_all_reduce", "redistribute",
    "ExpertParallel", "dispatch", "combine", "dispatch", "abandon", "dispatch", "rebuild",
    "barrier", "exchange_counts", "all_gather_object", "all_gather_data", "require_same", "split",
    "all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter",
    "all_to_all", "all_to_all_v", "all_reduce",
]  # fmt: skip


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_every_public_operation_is_recorded_alike_on_all_ranks(transport: str) -> None:
    flights = [read_flight(path) for path in run_ranks(call_everything, 2, transport, mode="thread")]
    assert len({flight.communicator for flight in flights}) == 1 and len(flights[0].communicator) == 16
    for rank, flight in enumerate(flights):
        assert (flight.rank, flight.size, flight.backend) == (rank, 2, "threads")
        assert [operation.name for operation in flight.operations] == RECORDED
        assert [operation.number for operation in flight.operations] == list(range(1, len(RECORDED) + 1))
        assert {operation.state for operation in flight.operations} == {DONE}
        by_place = dict(enumerate(flight.operations))
        assert by_place[0].wires == ("int8", "int4") and by_place[0].shape == (4, 64) and by_place[0].dtype == "float32"
        for place in (0, 2, 3, 7, 8, 10, 13, 14, 16):
            assert by_place[place].transport == transport, by_place[place]
        assert by_place[5].details == by_place[6].details == {"counts": (1, 2)}
        sent, received = ((1, 3), (2, 3)) if rank else ((2, 2), (2, 1))
        assert by_place[7].details == by_place[8].details == {"send_counts": sent, "recv_counts": received}
        assert by_place[8].wires == ("int8",)
        assert by_place[11].shape == (8, 64) and by_place[11].details["from"] != by_place[11].details["to"]
        assert by_place[13].details == {"lane": 0, "epoch": 1} and by_place[13].wires == ("int8",)
        assert by_place[16].details == {"lane": 0, "epoch": 2} and by_place[16].wires == ("none",)
        assert by_place[23].details == {"what": "the test"}
        assert by_place[25].details == {"op": "max"} and by_place[26].details == {"op": "sum", "dst": 1}
    assert report(flights).startswith(f"no rank stopped: all came to the end of operation {len(RECORDED)}\n")


def refuse_then_go_on(comm: Communicator) -> str:
    x = torch.ones(4, 2)
    tw.all_to_all_v(x, [2, 2], [2, 2], wire="none", comm=comm)
    if comm.rank == 0:  # what one rank alone refuses
        with pytest.raises(ArgumentError):
            comm.broadcast(x, 7)
        for counts in ([3, 2], [1, 2]):
            with pytest.raises(ThinwireError):
                tw.all_to_all_v(x, counts, [2, 2], wire="none", comm=comm)
        with pytest.raises(ThinwireError):
            tw.all_reduce(x.requires_grad_(), out=torch.empty_like(x), comm=comm)
    comm.barrier()
    return str(comm.flight_recorder())


def test_a_call_that_is_refused_before_anything_was_sent_takes_no_number() -> None:
    for path in run_ranks(refuse_then_go_on, 2, mode="thread"):
        operations = read_flight(path).operations
        assert [(each.number, each.name) for each in operations] == [(1, "all_to_all_v"), (2, "barrier")]


def close_by_dispatching(comm: Communicator) -> str:
    x, ids, weights = torch.ones(4, 64), torch.tensor([[0, 3]] * 4), torch.ones(4, 2)
    with tw.ExpertParallel(comm, 4, 2, 64, 8, transport="direct") as ep:
        d = ep.dispatch(x, ids, weights)
        if comm.rank == 0:
            with pytest.raises(RoutingError, match="rank 1 left this round open"):
                ep.combine(d.tokens, d)
        ep.dispatch(x, ids, weights).abandon()
    return str(comm.flight_recorder())


def test_a_dispatch_that_closes_a_round_counts_as_much_as_a_combine_and_a_dispatch() -> None:
    flights = [read_flight(path) for path in run_ranks(close_by_dispatching, 2, mode="thread")]
    names = [[operation.name for operation in flight.operations] for flight in flights]
    ends = ["dispatch", "abandon"]
    assert names == [["ExpertParallel", "dispatch", end, *ends] for end in ("combine", "abandon")]
    assert "stopped" in report(flights)


# ---------------------------------------------------------------------------------------------------------------------
# Who stopped where


def short(comm: Communicator, timeout: float = TIMEOUT) -> Communicator:
    return Communicator(dist.new_group(timeout=timedelta(seconds=timeout)), timeout=timeout)


def all_reduce(comm: Communicator, transport: str, size: int = 512) -> None:
    tw.all_reduce(torch.ones(size), comm=comm, transport=transport)


def expect_timeout(call: Callable[[], object]) -> str:
    """The path that the error names."""
    with pytest.raises(PeerTimeout) as caught:
        call()
    (note,) = caught.value.__notes__
    return note.partition(" are in ")[2].partition(";")[0]


def lose_a_rank(comm: Communicator, transport: str, how: str, folder: Path) -> None:
    os.environ[VARIABLE] = str(folder)
    pids = comm.all_gather_object(os.getpid())
    group = short(comm, 20.0)  # what makes memory, and loads kernels, may take its time
    for _ in range(3):
        all_reduce(group, transport)
    group._exchange.timeout = TIMEOUT
    if transport == "direct":
        group.attached(NAME).timeout = TIMEOUT
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    path = Path(expect_timeout(lambda: all_reduce(group, transport)))
    assert path.exists() and f"rank{comm.rank}-of-3-pid{os.getpid()}" in path.name
    if how == "stopped" and comm.rank == 0:
        while not list(folder.glob("*rank2-of-3*.json")):  # until it has given up, too
            time.sleep(0.01)
        os.kill(pids[1], signal.SIGCONT)


@pytest.mark.parametrize("transport", ["direct", "staged"])
@pytest.mark.parametrize("how", exhaustive_but(["killed"], ["killed", "stopped"]))
def test_the_files_of_the_survivors_name_the_rank_that_is_gone(
    transport: str, how: str, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with mortal.ranks(tmp_path_factory.mktemp("case"), 3, lose_a_rank, transport, how, folder) as case:
        case.told([0, 2] if how == "killed" else [0, 1, 2])
    found = {read_flight(path).rank: path for path in files(folder)}
    assert sorted(found) == ([0, 2] if how == "killed" else [0, 1, 2])
    what = f"operation 5, all_reduce of float32 [512] as int8+h64 ({transport})"
    told = f"{what}, in which ranks 0, 2 waited: no file of rank 1"
    assert verdict([found[0], found[2]]) == f"rank 1 stopped in or before {told}"
    if how == "stopped":  # it wrote a file later
        assert verdict([*found.values()]) == f"rank 1 stopped before {what}, and called it when ranks 0, 2 had given up"


def disagree(comm: Communicator, calls: tuple[tuple[str, int], ...]) -> None:
    group = short(comm)
    group.barrier()
    name, size = calls[comm.rank]
    x = torch.ones(size)

    def call() -> None:
        if name == "all_to_all_v":
            each = [size // 3] * 3
            tw.all_to_all_v(x, each, each, comm=group, wire="none", transport="staged")
        else:
            getattr(tw, name)(x, comm=group, transport="staged")

    expect_timeout(call)


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        (
            (("all_reduce", 6), ("all_gather", 6), ("all_reduce", 6)),
            "rank 1 called all_gather of float32 [6] as int8+h64 (staged) as operation 3, where ranks 0, "
            "2 called all_reduce of float32 [6] as int8+h64 (staged)",
        ),
        (
            (("all_reduce", 6), ("all_reduce", 6), ("all_reduce", 9000)),
            "rank 2 called all_reduce of float32 [9000] as int8+h64 (staged) as operation 3, where ranks 0, 1 called "
            "all_reduce of float32 [6] as int8+h64 (staged)",
        ),
        (
            (("all_to_all_v", 9), ("all_to_all_v", 9), ("all_to_all_v", 6)),
            "operation 3, all_to_all_v: rank 0 sends rank 2 3 rows, but rank 2 expects 2 from rank 0",
        ),
    ],
    ids=["another operation", "other sizes", "other counts"],
)
def test_ranks_that_disagree_are_named_with_what_they_called(
    calls: tuple[tuple[str, int], ...], told: str, folder: Path
) -> None:
    run_ranks(disagree, 3, calls)
    assert verdict(files(folder)) == told


def leave_early(comm: Communicator) -> None:
    group = short(comm)
    group.barrier()
    if comm.rank == 2:
        group.flight_recorder()
        time.sleep(2 * TIMEOUT)
    else:
        expect_timeout(group.barrier)


@pytest.mark.exhaustive
def test_a_rank_that_never_called_is_named_with_the_last_that_it_did(folder: Path) -> None:
    run_ranks(leave_early, 3)
    assert verdict(files(folder)) == (
        "rank 2 stopped before operation 3, barrier, in which ranks 0, 1 waited: the last of rank 2 is operation 2, "
        "barrier, done"
    )


def meet_without_rank_1(comm: Communicator) -> None:
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    if comm.rank == 1:
        time.sleep(2 * TIMEOUT)
    else:
        expect_timeout(lambda: Communicator(group, timeout=TIMEOUT))


def test_ranks_that_never_met_have_files_too(folder: Path) -> None:
    run_ranks(meet_without_rank_1, 3)
    assert all("unmet" in path.name for path in files(folder))
    assert verdict(files(folder)) == (
        "rank 1 stopped in or before operation 1, Communicator, in which ranks 0, 2 waited: no file of rank 1"
    )


def time_out_twice(comm: Communicator) -> tuple[list[str], list[str]]:
    group, notes = short(comm), []
    if comm.rank == 0:
        for _ in range(2):
            with pytest.raises(PeerTimeout) as caught:
                group.barrier()
            notes.append(caught.value.__notes__)
        before = read_flight(notes[0][0].partition(" are in ")[2].partition(";")[0])
        assert before.operations[-1].number == 2, "the second one wrote as well"
    else:
        time.sleep(3 * TIMEOUT)
    return notes[0] if notes else [], notes[1] if notes else []


@pytest.mark.exhaustive
def test_only_the_first_timeout_of_a_communicator_writes_and_later_ones_say_where() -> None:
    (first, second), _ = run_ranks(time_out_twice, 2)
    assert first == second and len(first) == 1 and "thinwire inspect" in first[0]


# ---------------------------------------------------------------------------------------------------------------------
# Where files go


def timed_out_alone() -> PeerTimeout:
    made = recorder()
    with pytest.raises(PeerTimeout) as caught, made.begin("barrier"):
        raise PeerTimeout("nobody came", ranks=[1], epoch=4, phase="headers")
    return caught.value


def test_a_file_that_cannot_be_written_hides_no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/dev/null/x")
    error = timed_out_alone()
    assert error.ranks == (1,) and str(error) == "nobody came"
    (note,) = error.__notes__
    assert note.startswith("the last operations of rank 0 of 2 could not be written: NotADirectoryError: ")


def test_a_timeout_leaves_what_it_says_of_peers(folder: Path) -> None:
    timed_out_alone()
    (path,) = files(folder)
    (operation,) = read_flight(path).operations
    assert (operation.failure, operation.blamed) == ("PeerTimeout", (1,))
    assert operation.phase == "headers" and json.loads(path.read_text())["operations"][0]["epoch"] == 4
    assert read_flight(path).reason == "PeerTimeout: nobody came"


def test_ranks_to_blame_are_those_of_the_communicator_that_timed_out(folder: Path) -> None:
    part, whole = recorder(), Recorder(3, 4, "a test", "none", 1.0)
    part.communicator, whole.communicator = "aa" * 8, "bb" * 8
    with pytest.raises(PeerTimeout) as caught, whole.begin("redistribute"), part.begin("all_reduce"):
        raise PeerTimeout("nobody came", ranks=[1])
    found = {read_flight(path).communicator: read_flight(path).operations[0] for path in files(folder)}
    assert [found[each.communicator].blamed for each in (part, whole)] == [(1,), ()]
    assert {operation.failure for operation in found.values()} == {"PeerTimeout"}
    assert len(caught.value.__notes__) == 2


def test_the_default_folder_is_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"thinwire-{os.geteuid()}"
    path = write_file("a.json", b"{}")
    assert path == own / "a.json" and path.read_bytes() == b"{}"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    path.unlink()
    other = tmp_path / "other"
    other.write_text("kept")
    path.symlink_to(other)
    assert write_file("a.json", b"[]").read_bytes() == b"[]" and other.read_text() == "kept" and not path.is_symlink()
    own.chmod(0o755)
    with pytest.raises(PermissionError, match=r"has mode 0755; expected a folder of user \d+ with mode 0700"):
        write_file("b.json", b"")
    path.unlink()
    own.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        write_file("b.json", b"")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_default_folder_keeps_the_newest_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(recorder_module, "_MOST_KEPT", 2)
    for number in range(4):
        path = write_file(f"{number}.json", b"")
        os.utime(path, (number, number))
    assert sorted(found.name for found in path.parent.iterdir()) == ["2.json", "3.json"]


def test_off_writes_nothing(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv(VARIABLE, "off")

    def call(comm: Communicator) -> str:
        assert not comm.recorder.writes
        tw.all_reduce(torch.ones(4), comm=comm)
        comm.all_reduce(torch.ones(4), async_op=True).wait()
        with pytest.raises(ThinwireError, match='THINWIRE_FLIGHT_RECORDER was "off"'):
            comm.flight_recorder()
        if comm.rank == 0:
            with pytest.raises(PeerTimeout) as caught:
                Communicator.barrier(comm)
            assert not hasattr(caught.value, "__notes__")
        return comm.explain()

    assert all("flight recorder: off" in text for text in run_ranks(call, 2, mode="thread"))
    assert not list(folder.iterdir())


# ---------------------------------------------------------------------------------------------------------------------
# SIGUSR1


def signalled_while_waiting(comm: Communicator, operation: str, folder: str) -> None:
    pids = comm.all_gather_object(os.getpid())
    group = tw.init()
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: tw.all_reduce(torch.ones(64), comm=group, transport="direct"),
        "all_to_all_v": lambda: tw.all_to_all_v(torch.ones(4), [2, 2], [2, 2], comm=group, transport="direct"),
    }
    assert "SIGUSR1: writes the flight recorder" in group.explain()
    for _ in range(2):
        calls[operation]()
    if comm.rank == 1:
        deadline = time.monotonic() + 30
        while not any(holds(path, operation) for path in files(Path(folder))):
            assert time.monotonic() < deadline
            os.kill(pids[0], signal.SIGUSR1)
            time.sleep(0.1)
    calls[operation]()
    group.close()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def holds(path: Path, name: str) -> bool:
    last = read_flight(path).operations[-1:]
    return any((each.name, each.state) == (name, UNDER_WAY) for each in last)


@pytest.mark.parametrize("operation", ["all_reduce", "all_to_all_v"])
def test_the_signal_writes_the_file_of_a_rank_that_waits(operation: str, folder: Path) -> None:
    run_ranks(signalled_while_waiting, 2, operation, str(folder))


def interrupted_while_waiting(comm: Communicator) -> None:
    pids = comm.all_gather_object(os.getpid())
    group = short(comm, 20.0)
    all_reduce(group, "direct")
    if comm.rank == 1:
        time.sleep(0.5)
        os.kill(pids[0], signal.SIGINT)
    else:
        with pytest.raises(KeyboardInterrupt):
            all_reduce(group, "direct")
        last = read_flight(group.flight_recorder()).operations[-1]
        assert (last.name, last.number, last.state) == ("all_reduce", 3, INTERRUPTED)
        assert last.failure == "KeyboardInterrupt" and last.start_ns < last.end_ns
    comm.barrier()


def test_a_call_that_was_interrupted_is_recorded_as_that() -> None:
    run_ranks(interrupted_while_waiting, 2)


def signalled_within_gloo(comm: Communicator, folder: str) -> None:
    pids = comm.all_gather_object(os.getpid())
    group = tw.init()
    if comm.rank == 1:
        time.sleep(0.3)  # until rank 0 waits, most likely
        os.kill(pids[0], signal.SIGUSR1)
        time.sleep(0.3)
    x = torch.ones(8)
    assert tw.all_reduce(x, comm=group, transport="staged", wire="none").tolist() == [2.0] * 8
    group.barrier()
    if comm.rank == 0:
        # Of the communicator that the rank began with, too.
        assert [read_flight(path).reason for path in files(Path(folder))] == ["SIGUSR1"] * 2
    group.barrier()


def test_the_signal_disturbs_no_wait_within_gloo_and_is_obeyed_after_it(folder: Path) -> None:
    run_ranks(signalled_within_gloo, 2, str(folder))


def keep_the_users_handler(comm: Communicator) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    group = tw.init()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert seen == [signal.SIGUSR1] and "SIGUSR1" not in group.explain()
    group.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert seen == [signal.SIGUSR1] * 2
    signal.signal(signal.SIGUSR1, before)
    # One that is set later stays, too.
    group = tw.init()
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert callable(handler)
    group.close()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    signal.signal(signal.SIGUSR1, before)
    thread = threading.Thread(target=lambda: tw.init(domain="from a thread"))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    tw.init().close()


def test_a_handler_that_is_somebody_elses_stays() -> None:
    run_ranks(keep_the_users_handler, 1)


def _profiled(comm: Communicator, transport: str) -> list[tuple[str, str]]:
    """The ranges of some calls in torch's profiler, each with the one around it."""
    x, ids, weights = torch.randn(4, 64), torch.tensor([[0, 1]] * 4), torch.ones(4, 2)
    with tw.ExpertParallel(comm, 2, 2, 64, 4, transport=transport) as ep, torch.profiler.profile() as recorded:
        d = ep.dispatch(x, ids, weights)
        ep.combine(d.tokens, d)
        tw.all_reduce(x, wire="int8", comm=comm, transport=transport)
        comm.all_reduce(torch.ones(3), async_op=True).wait()
        with pytest.raises(ThinwireError), comm.call("broken"):
            comm.recorder.phase("in vain")
            raise ThinwireError
    comm.barrier()  # of which no profiler asks
    assert comm.recorder._ranges == []
    ranges = [event for event in recorded.events() if event.name.startswith("thinwire ")]
    found = []
    for event in ranges:
        around = [
            other for other in ranges
            if other is not event and other.time_range.start <= event.time_range.start
            and event.time_range.end <= other.time_range.end
        ]  # fmt: skip
        assert len(around) < 2, "phases follow one another"
        found.append((around[0].name.removeprefix("thinwire ") if around else "", event.name.removeprefix("thinwire ")))
    return found


@pytest.mark.parametrize(
    ("transport", "dispatch"),
    [
        ("direct", ["quantise and store", "wait for peers", "routing"]),
        ("staged", ["plan", "exchange counts", "pack", "post", "wait for peers", "unpack", "routing"]),
    ],
)
def test_calls_and_their_phases_are_ranges_of_torchs_profiler(transport: str, dispatch: list[str]) -> None:
    for found in run_ranks(_profiled, 2, transport, timeout=120):
        calls = [name for around, name in found if not around]
        assert calls == ["dispatch", "unpack", "combine", "all_reduce", "all_reduce", "wait for all_reduce", "broken"]
        assert [name for around, name in found if around == "dispatch"] == dispatch
        assert {"wait for peers", "sum at home"} <= {name for around, name in found if around == "combine"}
