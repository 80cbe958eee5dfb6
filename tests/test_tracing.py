"""`tw.trace`: files that load, events that lie within each other, and figures that are those of the rounds."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import defaultdict
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire.comm.recorder import flight_recorder, trace_events, trace_file
from thinwire.comm.recorder.clocks import compare_clocks
from thinwire.comm.recorder.flight_recorder import FlightRecorder, trace_recorders
from thinwire.comm.recorder.trace_events import Trace, Track
from thinwire.errors import ArgumentError, PeerTimeout, ThinwireError
from thinwire.testing import RankError, run_ranks

HIDDEN = 64
DIRECT = ["quantise and store", "wait for peers", "routing"]
STAGED = ["plan", "exchange counts", "pack", "post", "wait for peers", "unpack", "routing"]


def _rounds(comm: tw.Communicator, transport: str, number: int = 2) -> list[tuple[int, ...]]:
    """What dispatches and combines of some rounds say that they sent."""
    generator, sent = torch.Generator().manual_seed(comm.rank), []
    with tw.ExpertParallel(comm, 5, 2, HIDDEN, 16, wire="int8", transport=transport) as ep:
        for tokens in range(3 + comm.rank, 3 + comm.rank + number):
            x = torch.randn(tokens, HIDDEN, generator=generator)
            ids = torch.randint(0, 5, (tokens, 2), generator=generator)
            d = ep.dispatch(x, ids, torch.rand(tokens, 2, generator=generator))
            sent += [astuple(d.dispatch_traffic), astuple(d.combine_traffic)]
            ep.combine(d.tokens * 2, d)
    return sent


def _traced_rounds(comm: tw.Communicator, transport: str, path: str) -> list[tuple[int, ...]]:
    with tw.trace(path):
        sent = _rounds(comm, transport)
        tw.all_reduce(torch.ones(5000), comm=comm, transport=transport)
        comm.all_reduce(torch.ones(3), async_op=True).wait()
        return sent


def _events(path: Path) -> dict[int, list[dict[str, Any]]]:
    """Each rank's events, those that last longer first where two begin together."""
    by_rank = defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            # In whole nanoseconds, which sums of microseconds are not.
            event["start"], event["end"] = round(event["ts"] * 1000), round(event["ts"] * 1000 + event["dur"] * 1000)
            by_rank[event["pid"]].append(event)
    return {rank: sorted(events, key=lambda each: (each["start"], -each["end"])) for rank, events in by_rank.items()}


def _inside(events: list[dict[str, Any]], outer: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        event
        for event in events
        if event is not outer and event["tid"] == outer["tid"]
        and outer["start"] <= event["start"] and event["end"] <= outer["end"]
    ]  # fmt: skip


def _metadata(path: Path) -> dict[int, dict[str, Any]]:
    events = json.loads(path.read_text())["traceEvents"]
    return {event["pid"]: event["args"] for event in events if event["name"] == "thinwire_rank"}


def _check(path: Path, transport: str, sent: list[list[tuple[int, ...]]]) -> None:
    by_rank = _events(path)
    assert sorted(by_rank) == list(range(len(sent)))
    for rank, events in by_rank.items():
        open_in: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for event in events:
            assert event["dur"] >= 0
            around = open_in[event["tid"]]
            while around and around[-1]["end"] <= event["start"]:
                around.pop()
            assert not around or event["end"] <= around[-1]["end"], f"{event} and {around[-1]} overlap"
            around.append(event)
        legs = [event for event in events if event["name"] in ("dispatch", "combine")]
        told = [tuple(leg["args"][name] for name in ("rows", "logical_bytes", "wire_bytes")) for leg in legs]
        assert told == sent[rank]
        for leg in legs:
            phases = [event["name"] for event in _inside(events, leg) if event["cat"] == "phase"]
            if leg["name"] == "dispatch":
                assert phases == (DIRECT if transport == "direct" else STAGED)
            assert "wait for peers" in phases
        assert {"all_reduce", "wait for all_reduce", "unpack"} <= {event["name"] for event in events}
    stores, waits = (
        {
            (rank, leg["args"]["epoch"]): next(each for each in _inside(events, leg) if each["name"] in names)
            for rank, events in by_rank.items()
            for leg in events
            if leg["name"] == "dispatch"
        }
        for names in (("quantise and store", "pack"), ("wait for peers",))
    )
    for (rank, epoch), wait in waits.items():
        for peer in by_rank:
            assert stores[peer, epoch]["start"] < wait["end"], f"round {epoch}: rank {rank} did not wait for {peer}"


@pytest.mark.parametrize(
    ("transport", "mode"),
    [
        ("direct", "thread"),
        pytest.param("direct", "process", marks=pytest.mark.exhaustive),
        ("staged", "process"),
        ("staged", "thread"),
    ],
)
def test_all_ranks_events_nest_and_say_what_the_rounds_say(transport: str, mode: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for _ in range(2):  # the second is written over the first
        sent = run_ranks(_traced_rounds, 2, transport, str(path), mode=mode)
        _check(path, transport, sent)
        assert {told["ranks"] for told in _metadata(path).values()} == {2}
        assert {told["dropped_events"] for told in _metadata(path).values()} == {0}


def test_the_environment_traces_processes_and_a_rank_that_is_killed_leaves_out_its_own_events_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.json"
    environment = {trace_events.VARIABLE: str(path)}
    sent = run_ranks(_rounds, 2, "staged", env=environment)
    assert len(sent) == 2 and sorted(_events(path)) == [0, 1]
    with pytest.raises(RankError, match="rank 1 of 3 failed|rank 1 first"):
        run_ranks(_rounds_and_death, 3, "staged", env=environment)
    by_rank = _events(path)
    assert sorted(by_rank) == [0, 2], "what ranks 0 and 1 wrote in the run before is gone"
    for events in by_rank.values():
        (barrier,) = (event for event in events if event["name"] == "barrier")
        assert barrier["args"]["failure"] == "PeerTimeout" and barrier["args"]["blamed"] == [1]
        assert [event["name"] for event in events if event["cat"] == "call"].count("dispatch") == 2


def _rounds_and_death(comm: tw.Communicator, transport: str) -> None:
    _rounds(comm, transport)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerTimeout):
        comm.barrier()


def test_an_exception_ends_the_block_and_leaves_the_events(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def rank(comm: tw.Communicator) -> None:
        with tw.trace(path):
            comm.barrier()
            raise KeyError

    with pytest.raises(RankError):
        run_ranks(rank, 2, mode="thread")
    assert {r: [event["name"] for event in events] for r, events in _events(path).items()} == {
        0: ["barrier"],
        1: ["barrier"],
    }


def test_ranks_of_a_split_are_those_of_the_world(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def rank(comm: tw.Communicator) -> None:
        with tw.trace(path), comm.split(groups=[[0, 2], [3, 1]]) as half, half.split(groups=[[1, 0]]) as turned:
            turned.barrier()

    run_ranks(rank, 4, mode="thread")
    assert [[event["name"] for event in events].count("barrier") for _, events in sorted(_events(path).items())] == [
        1
    ] * 4


def _traced_twice(comm: tw.Communicator, path: str) -> None:
    with comm.split(groups=[[0, 1], [2]]) as part:
        for calls in (2, 1) if comm.rank < 2 else ():
            part.barrier()
            with tw.trace(path):
                for _ in range(calls):
                    part.barrier()


def test_a_later_trace_is_written_over_an_earlier_one_also_where_nobody_calls_the_largest_group(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run_ranks(_traced_twice, 3, str(path))
    found = {rank: [event["name"] for event in events] for rank, events in _events(path).items()}
    assert found == {0: ["barrier"], 1: ["barrier"]}


def _traced_elsewhere_before(comm: tw.Communicator, path: Path) -> None:
    with comm.split(groups=[[0], [1]]) as part:
        if comm.rank == 0:
            with tw.trace(path.with_name("other")):
                part.barrier()
        else:
            while not (path.exists() and path.stat().st_size):  # rank 0 ends its trace before this one begins
                time.sleep(0.005)
        with tw.trace(path):
            part.barrier()


def test_a_rank_that_traced_to_another_file_before_is_in_this_one_with_the_others(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run_ranks(_traced_elsewhere_before, 2, path, timeout=20)
    assert sorted(_events(path)) == [0, 1]


def test_traces_of_ranks_that_are_threads_have_names_of_their_own_whichever_rank_is_looked_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [FlightRecorder(rank, 2, "a test", "threads", 1.0, (rank, rank, 2)) for rank in range(2)]
    names = set()
    for order in (ranks, ranks[::-1], ranks):
        monkeypatch.setattr(flight_recorder, "_recorders", order)
        trace = Trace(tmp_path / "trace.json")
        trace_recorders(trace)
        names.add(trace.run)
        trace_recorders(trace)  # the other rank's block
    assert len(names) == 3 and ranks[0].name_trace(trace.path).endswith(" 0 4")


def test_old_events_go_and_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_events, "MOST_EVENTS", 5)
    path = tmp_path / "trace.json"

    def rank(comm: tw.Communicator) -> None:
        with tw.trace(path):
            for _ in range(7):
                comm.barrier()

    run_ranks(rank, 2, mode="thread")
    assert {r: (told["dropped_events"], len(_events(path)[r])) for r, told in _metadata(path).items()} == {
        0: (2, 5),
        1: (2, 5),
    }


def test_without_a_trace_nothing_is_collected(tmp_path: Path) -> None:
    def rank(comm: tw.Communicator) -> None:
        with tw.trace(tmp_path / "trace.json"):
            comm.barrier()
        comm.barrier()
        assert comm.recorder.track is None and comm.recorder._span is None

    run_ranks(rank, 2, mode="thread")
    assert [len(events) for events in _events(tmp_path / "trace.json").values()] == [1, 1]


def test_one_object_serves_all_ranks_that_are_threads(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    shared = tw.trace(path)

    def rank(comm: tw.Communicator) -> None:
        with shared, shared:
            comm.barrier()

    run_ranks(rank, 2, mode="thread")
    assert trace_events.current_trace() is None
    assert [len(events) for events in _events(path).values()] == [1, 1]


def test_the_environment_traces_threads_and_an_earlier_run_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    monkeypatch.setenv(trace_events.VARIABLE, str(path))
    for _ in range(2):
        monkeypatch.setattr(trace_events, "_process", trace_events._Process())  # as in another process
        run_ranks(lambda comm: comm.barrier(), 2, mode="thread")
        assert [len(events) for events in _events(path).values()] == [1, 1]


def test_a_trace_that_another_thread_ends_meanwhile_takes_no_call_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Track | None] = []

    def take_away(recorder: FlightRecorder) -> Track | None:
        seen.append(None if len(seen) % 2 else Track(0, 1))
        return seen[-1]

    recorder = FlightRecorder(0, 1, "a test", "threads", 1.0)
    monkeypatch.setattr(FlightRecorder, "track", property(take_away))
    with recorder.begin("barrier"), recorder.aside("unpack"):
        pass


def test_a_clock_that_is_off_is_found_within_the_uncertainty_told() -> None:
    off = 5_000_000_000

    def rank(comm: tw.Communicator) -> trace_events.Clock:
        return compare_clocks(comm._exchange, comm.device, lambda: trace_events.monotonic_ns() + comm.rank * off)

    for number, clock in enumerate(run_ranks(rank, 3, mode="thread")):
        assert abs(clock.offset_ns + number * off) <= clock.uncertainty_ns <= 1_000_000_000
        assert bool(clock.uncertainty_ns) == bool(number)


def test_ranks_of_several_hosts_are_written_in_one_time(tmp_path: Path) -> None:
    path, off = tmp_path / "trace.json", 3_000_000_000
    for rank in range(2):  # each with a clock of its own, that of rank 1 ahead
        trace = Trace(path)
        trace.run = "a run"
        trace.set_clock(trace_events.Clock(-off * rank, 70, "a test's"), 2)
        event = trace_events.Event("barrier", "call", 10_000 + off * rank, thread=1)
        event.end_ns = event.start_ns + 500
        track = trace.track(None, rank, 2)
        track._events.append(event)
        trace_file.write_track(trace, track)
    assert [(events[0]["start"], events[0]["end"]) for events in _events(path).values()] == [(10_000, 10_500)] * 2
    assert _metadata(path)[1]["clock"] == {"offset_ns": -off, "uncertainty_ns": 70, "source": "a test's"}


def test_a_file_whose_last_writer_was_killed_while_it_wrote_is_made_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path)
    trace.name_run("a run")
    first, second = trace.track(0, 0, 2), trace.track(1, 1, 2)
    for track in (first, second):
        track.open("barrier").close()
    trace_file.write_track(trace, first)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    trace_file.write_track(trace, second)
    assert [event["pid"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"] == [1]
    assert len(_metadata(path)) == 2


@pytest.mark.parametrize("path", ["", 3, None])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(ArgumentError, match="expected the name of a file"), tw.trace(path):
        pass


def test_files_that_cannot_be_written_or_hold_something_else_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "notes"
    other.write_text("keep me")
    with pytest.raises(ThinwireError, match="which is not a trace"), tw.trace(other):
        pass
    assert other.read_text() == "keep me"
    with pytest.raises(ThinwireError, match="cannot be written: No such file"), tw.trace(tmp_path / "no" / "folder"):
        pass
    with tw.trace(tmp_path / "a"), pytest.raises(ArgumentError, match="is under way"), tw.trace(tmp_path / "b"):
        pass
    with pytest.raises(ThinwireError, match="cannot be written: embedded null byte"), tw.trace("a\0b"):
        pass
    with pytest.raises(ThinwireError, match="no regular file"), tw.trace("/dev/null"):
        pass
    monkeypatch.setenv("THINWIRE_FLIGHT_RECORDER", "off")
    with pytest.raises(ThinwireError, match="unset one of them"), tw.trace(tmp_path / "c"):
        pass


def test_phases_are_shown_in_profilers_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", shown.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: shown.append("."))
    span = Track(0, 1).open("dispatch")
    span.phase("store")
    span.phase("wait")
    span.close()
    assert ", ".join(shown) == "thinwire dispatch, thinwire store, ., thinwire wait, ., ."
    assert "torch.cuda.nvtx" in sys.modules
