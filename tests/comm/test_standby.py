"""Where standby stores listen, what is believed of what they say, and that a stopped one holds nobody up."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from thinwire.comm import mailbox, standby
from thinwire.comm.plain import decode
from thinwire.comm.standby import Standby
from thinwire.errors import PeerTimeout, ThinwireError


def gathers(*peers: list[Any]) -> Callable[[object, Any], list[Any]]:
    """An `all_gather_data` in which each peer says one thing after the other, after this rank."""
    turns = iter(zip(*peers, strict=True)) if peers else iter([(), ()])

    def gather(value: object, shape: Any) -> list[Any]:
        said = [value, *next(turns)]
        return [decode(json.dumps(entry).encode(), shape, f"rank {rank}") for rank, entry in enumerate(said)]

    return gather


HERE = standby._network()
PEER = ["127.0.0.1", 1, ""]  # nobody listens there


def test_ranks_of_one_host_use_its_loopback_interface() -> None:
    opened = Standby.open(0, gathers([[HERE, "x"], PEER]))
    assert opened.describe().startswith("standby store: 127.0.0.1:")
    assert opened._addresses[0] == Standby.open(0, gathers([[HERE, "x"], PEER]))._addresses[0]  # one a process


@pytest.mark.parametrize(
    ("master", "told"),
    [
        (None, "none, as the ranks are on several hosts, and MASTER_ADDR, which says in which network, is not set"),
        ("127.0.0.1", "none, as MASTER_ADDR, 127.0.0.1, is reached by the loopback interface"),
        ("no such host.invalid", "none, as "),
    ],
)
def test_without_a_network_in_common_there_is_none_and_the_reason_is_told(
    master: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    if master is not None:
        monkeypatch.setenv("MASTER_ADDR", master)
    opened = Standby.open(0, gathers([["another boot", "x"], ["", 0, "it said so"]]))
    assert told in opened.describe()
    ranks, remark = opened.agree([1])
    assert ranks == () and "no standby store could be asked (rank 0: " in remark and "rank 1: it said so" in remark
    with pytest.raises(PeerTimeout, match="the ranks cannot meet, as no standby store could be asked"):
        opened.meet([], 1.0)


def test_ranks_of_several_hosts_use_the_address_that_faces_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # routed, not sent
        except OSError:
            pytest.skip("no network but the loopback interface")
        own = probe.getsockname()[0]
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    opened = Standby.open(0, gathers([["another boot", "x"], ["", 0, "none"]]))
    assert opened.describe().startswith(f"standby store: {own}:")
    assert opened.agree([1]).ranks == (1,)


@pytest.mark.parametrize(
    ("peer", "told"),
    [
        (["example.com", 80, ""], "rank 1 says its standby store is at 'example.com', no address"),
        (["fe80::1%" + "x" * 64, 80, ""], "no address"),
        (["fe80::1%a..b", 80, ""], "no address"),
        (["::1%\ud800", 80, ""], "no address"),
        (["127.0.0.1", 0, ""], "rank 1 says its standby store is at port 0"),
        (["127.0.0.1", 65536, ""], "at port 65536"),
        (["127.0.0.1", "80", ""], "rank 1 sent"),
        ("127.0.0.1:80", "rank 1 sent"),
    ],
)
def test_addresses_that_are_none_are_refused(peer: Any, told: str) -> None:
    with pytest.raises(ThinwireError, match=told):
        Standby.open(0, gathers([[HERE, "x"], peer]))


@pytest.mark.parametrize(("key", "ranks"), [("missed/1", ()), ("lost", ())])
@pytest.mark.parametrize("nonsense", ["[2]", "[-1]", "[true]", "{}", "not JSON", "[" * 9999, "[1e9]"])
def test_nonsense_in_a_store_names_nobody_and_is_told(key: str, ranks: tuple[int, ...], nonsense: str) -> None:
    opened = Standby.open(0, gathers([[HERE, "x"], PEER]))
    opened._token = f"{key} {nonsense[:9]}"
    opened._connect(0).set(key, nonsense)
    found, remark = opened.agree([1])
    assert found == ranks and "who is lost is not known" in remark and "sent" in remark


@pytest.mark.exhaustive
def test_who_wakes_while_the_others_vote_elsewhere_waits_for_their_verdict() -> None:
    """They skipped this rank's store, which did not answer then, and ask at rank 1's."""
    own, others = (dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2))
    addresses = [standby._Address("127.0.0.1", store.port, "") for store in (own, others, others)]
    there = dist.PrefixStore("token", others)
    there.set("missed/1", "[0]")
    deciding = threading.Timer(standby.REPORT_SECONDS + 0.25, there.set, ("lost", "[0]"))
    deciding.start()
    try:
        assert Standby(0, addresses, "token", own).agree([1, 2]).ranks == (0,)
    finally:
        deciding.join()


class Linked(Standby):
    """A rank of several in this process, whose stores and mailboxes are its own, and whose links can be cut."""

    cut: frozenset[int] = frozenset()  # ranks whose stores it does not reach

    @classmethod
    def several(cls, number: int) -> list[Linked]:
        """Of one communicator."""
        made = []
        for _ in range(number):
            listener, letters = mailbox.listen("127.0.0.1")
            port, descriptor = listener.getsockname()[1], listener.detach()
            store = dist.TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
            )
            made.append((store, letters, standby._Address("127.0.0.1", port, "")))
        addresses = [address for *_, address in made]
        return [cls(rank, addresses, "token", store, letters) for rank, (store, letters, _) in enumerate(made)]

    def _require_listening(self, address: standby._Address) -> None:
        if self._addresses.index(address) in self.cut:
            raise standby._Unanswered("cut off")
        super()._require_listening(address)


def vote(ranks: list[Linked], missed: list[list[int]]) -> list[tuple[int, ...]]:
    """What each agrees on, all at once."""
    with ThreadPoolExecutor(3) as pool:
        return [found.ranks for found in pool.map(lambda rank, misses: rank.agree(misses), ranks, missed)]


def test_of_two_verdicts_that_cross_the_one_with_more_survivors_holds() -> None:
    """Rank 0 was cut off, and votes alone; its letters arrive when the others vote."""
    first, *others = ranks = Linked.several(3)
    first.cut = frozenset({1, 2})
    for other in others:
        other.cut = frozenset({0})
    assert first.agree([1, 2]).ranks == (1, 2), "nobody answers it"
    assert vote(others, [[0], [0]]) == [(0,), (0,)], "what one rank has agreed on with itself does not end two"
    for rank in ranks:
        rank.cut = frozenset()
    assert vote(ranks, [[1, 2], [0], [0]]) == [(0,)] * 3, "and that one learns of it"


def test_the_last_to_vote_finds_the_verdict_of_those_that_have_ended_meanwhile() -> None:
    first, second, _, last = Linked.several(4)
    assert vote([first, second], [[2], [2]]) == [(2,), (2,)]
    last.cut = frozenset({0, 1, 2})
    assert last.agree([0, 1]).ranks == (2,)


STORE = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_process() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process with a store, and its port."""
    process = subprocess.Popen([sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


@pytest.mark.exhaustive
def test_a_store_that_is_stopped_before_or_during_the_vote_holds_nobody_up(
    other_process: tuple[subprocess.Popen[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, port = other_process
    client = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=5))

    def open_second() -> Standby:
        addresses = [standby._Address("127.0.0.1", port, ""), standby._Address("127.0.0.1", 2, "")]
        return Standby(1, addresses, "token", standby._serve("127.0.0.1").store)

    vote = Standby._vote

    def stop_then_vote(self: Standby, store: dist.Store, missed: list[int], known: bytes | None) -> bytes:
        if self.rank == 1 and not stopped:
            process.send_signal(signal.SIGSTOP)
            stopped.append(time.monotonic())
        return vote(self, store, missed, known)

    stopped: list[float] = []
    monkeypatch.setattr(Standby, "_vote", stop_then_vote)
    for _ in range(2):  # during, before
        begin = time.monotonic()
        assert open_second().agree([0]).ranks == (0,)
        assert time.monotonic() - begin < 10.0
    process.send_signal(signal.SIGCONT)
    del client
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert open_second().agree([]).ranks == (0,)  # its process has ended
