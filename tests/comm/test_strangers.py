"""Whoever reaches the place where ranks meet can be a rank. What it sends is never run, and the others are told."""

from __future__ import annotations

import pickle
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
from tests.comm.test_meeting import free_port, leave
from thinwire.comm import Communicator
from thinwire.comm.agreement.meeting import meet, store_at
from thinwire.comm.exchange import _message_tag
from thinwire.comm.host_collectives import SHORT
from thinwire.errors import ThinwireError
from thinwire.testing import run_ranks

LIMIT = 5.0


class _Payload:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.path), "w")


class _Stranger:
    """Rank 1 of 2, made of nothing but sends and receives; as the ranks' own, they match by their tags.

    It says of itself whatever rank 0 says of itself, which is always what rank 0 wants to hear.
    """

    def __init__(self) -> None:
        self.sent = self.received = 0
        self.under_way: list[Any] = []  # which ends with its last reference

    def receive(self, num_bytes: int, label: str) -> torch.Tensor:
        row = torch.zeros(num_bytes, dtype=torch.uint8)
        tag = _message_tag(self.received, num_bytes, f"{label} 0")
        dist.irecv(row, src=0, tag=tag).wait(timedelta(seconds=LIMIT))
        self.received += 1
        return row

    def send(self, row: torch.Tensor, *labels: str, announced: int = 0) -> None:
        for label in labels:
            tag = _message_tag(self.sent, announced or row.numel(), f"{label} 0")
            self.under_way.append((dist.isend(row, dst=0, tag=tag), row))
        self.sent += 1

    def echo(self, num_bytes: int, label: str) -> torch.Tensor:
        row = self.receive(num_bytes, label)
        self.send(row, label)
        return row

    def echo_gathered(self) -> None:
        length = int(self.echo(8, "counts").view(torch.int64))
        self.echo(length, "data")

    def attack(self, message: bytes, missing: int = 0) -> None:
        """Answers with this message in place of data, of which so many bytes were announced that do not come."""
        if self.received < 2:  # in the constructor, where nothing is announced
            self.receive(SHORT, "data")
            self.send(torch.frombuffer(bytearray(message.ljust(SHORT)), dtype=torch.uint8), "data")
            return
        announced = len(message) + missing
        length = int(self.receive(8, "counts").view(torch.int64))
        self.send(torch.tensor([announced]).view(torch.uint8), "counts")
        row = torch.zeros(length, dtype=torch.uint8)
        for label in ("data", "objects"):  # under either name that a rank may know of
            tag = _message_tag(self.received, length, f"{label} 0")
            self.under_way.append((dist.irecv(row, src=0, tag=tag), row))
        row = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        self.send(row, "data", "objects", announced=announced)


def _settings(stranger: _Stranger) -> None:
    stranger.echo(32, "settings")


def _other_settings(stranger: _Stranger) -> None:
    stranger.send(~stranger.receive(32, "settings"), "settings")


def _gather(stranger: _Stranger) -> None:
    stranger.echo_gathered()


def _meet_once(stranger: _Stranger) -> None:
    stranger.echo(SHORT, "data")


def _meet(stranger: _Stranger) -> None:
    """As the constructor of a communicator does: hosts, and where the standbys are."""
    _meet_once(stranger)
    _meet_once(stranger)


def _nothing(world: Communicator) -> None:
    pytest.fail("init took the stranger for a rank")


def _make_expert_parallel(world: Communicator) -> None:
    tw.ExpertParallel(world, 4, 2, 64, 16)


def _all_reduce(world: Communicator) -> None:
    tw.all_reduce(torch.ones(64), comm=world)


def _all_to_all_v(world: Communicator) -> None:
    tw.all_to_all_v(torch.ones(2, 4), [1, 1], [1, 1], comm=world)


def _compared_all_to_all_v(world: Communicator) -> None:
    tw.all_to_all_v(torch.ones(2, 4), [1, 1], [1, 1], transport="staged", check=True, comm=world)


def _compared_scales(world: Communicator) -> None:
    tw.int8_all_to_all_reduce(torch.ones(2, 4, dtype=torch.int8), 1.0, comm=world, check=True)


def _rebuild(world: Communicator) -> None:
    tw.ExpertParallel(world, 4, 2, 64, 16, transport="staged").rebuild(world)


def _split(world: Communicator) -> None:
    world.split(groups=[[0, 1]])


Step = Callable[[_Stranger], None]

#: What `init` exchanges, and what the direct transport's construction exchanges: reasons against it, settings, settings
#: of the memory, facts, offers, addresses, what each rank made of it.
INIT: tuple[Step, ...] = (_meet, _settings)
DIRECT: tuple[Step, ...] = (_gather, _settings, _settings, _gather, _gather, _gather, _gather)


def _cases() -> dict[str, tuple[Callable[[Communicator], None], tuple[Step, ...]]]:
    cases: dict[str, tuple[Callable[[Communicator], None], tuple[Step, ...]]] = {
        "hosts of init": (_nothing, ()),
        "standbys of init": (_nothing, (_meet_once,)),
        "settings of init": (_nothing, (_meet, _other_settings)),
        "settings of ExpertParallel": (_make_expert_parallel, (*INIT, _other_settings)),
        "settings of a split": (_split, (*INIT, _other_settings)),
        "generations": (_rebuild, (*INIT, _settings)),
        "counts": (_compared_all_to_all_v, INIT),
        "scales": (_compared_scales, INIT),
    }
    for number, step in enumerate(DIRECT):
        before = (*INIT, *DIRECT[:number], *((_other_settings,) if step is _settings else ()))
        name = f"step {number} of the direct transport"
        cases[f"{name}, all_reduce"] = (_all_reduce, before)
        cases[f"{name}, all_to_all_v"] = (_all_to_all_v, before)
        cases[f"{name}, ExpertParallel"] = (_make_expert_parallel, (*INIT, _settings, *before[len(INIT) :]))
    return cases


CASES = _cases()


def _meet_a_stranger(comm: Communicator, name: str, port: int, folder: str, missing: int = 0) -> str:
    call, steps = CASES[name]
    made, ended = Path(folder) / "made", Path(folder) / "ended"
    leave(comm, "127.0.0.1", port)
    if comm.rank == 0:
        try:
            with pytest.raises(ThinwireError) as caught:
                call(tw.init(device="cpu", timeout=LIMIT))
        finally:
            ended.touch()
        assert not made.exists(), f"{made.name} was made: a stranger's code ran"
        return f"{type(caught.value).__name__}: {caught.value}"
    patience = timedelta(seconds=30)  # on a busy machine a server may answer late
    store = meet(store_at("127.0.0.1", port, 1, patience), 1, 2, patience).store
    dist.init_process_group("gloo", store=store, rank=1, world_size=2, timeout=timedelta(seconds=LIMIT))
    stranger = _Stranger()
    for step in steps:
        step(stranger)
    try:
        stranger.attack(b'"' if missing else pickle.dumps(_Payload(made)), missing)
    except RuntimeError:  # at the first of two messages rank 0 may have ended all, before the second was sent
        assert ended.exists()
    deadline = time.monotonic() + 3 * LIMIT
    while not ended.exists() and time.monotonic() < deadline:  # or rank 0 could see no more than a lost connection
        time.sleep(0.01)
    return ""


def _is_usual(name: str) -> bool:
    return not name.endswith(("all_reduce", "all_to_all_v"))


@pytest.mark.parametrize(
    "name", [name if _is_usual(name) else pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES]
)
def test_what_a_stranger_sends_is_not_run(name: str, tmp_path: Path) -> None:
    told, _ = run_ranks(_meet_a_stranger, 2, name, free_port(), str(tmp_path))
    assert "rank 1 sent" in told and "not JSON" in told, told


def test_what_is_missing_of_a_message_reads_as_zeros(tmp_path: Path) -> None:
    told, _ = run_ranks(_meet_a_stranger, 2, "counts", free_port(), str(tmp_path), 40)
    assert "rank 1 sent 41 bytes: not JSON: 'Invalid control character" in told, told
