"""Where standbys are, what is believed of what they say, and what ranks agree on whose links are cut."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from thinwire import first_run
from thinwire.comm.agreement import boards, standby
from thinwire.comm.agreement.boards import CONNECT_SECONDS, LOST, Address, Boards, Notes, Unanswered
from thinwire.comm.agreement.standby import Standby
from thinwire.errors import PeerTimeout, ThinwireError
from thinwire.fields import decode


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
    opened = Standby.open(0, gathers([[HERE, "x"], PEER]), 1.0)
    assert opened.describe().startswith("standby: 127.0.0.1:")
    assert opened._addresses[0] == Standby.open(0, gathers([[HERE, "x"], PEER]), 1.0)._addresses[0]  # one a process


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
    opened = Standby.open(0, gathers([["another boot", "x"], ["", 0, "it said so"]]), 1.0)
    assert told in opened.describe()
    ranks, remark = opened.agree([1])
    assert ranks == () and "who is lost is not known, as rank 0 has no standby: " in remark
    with pytest.raises(PeerTimeout, match="the ranks cannot meet, as rank 0 has no standby: "):
        opened.meet([], 1.0)


def test_ranks_of_several_hosts_use_the_address_that_faces_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # routed, not sent
        except OSError:
            pytest.skip("no network but the loopback interface")
        own = probe.getsockname()[0]
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    opened = Standby.open(0, gathers([["another boot", "x"], ["192.0.2.2", 1, ""]]), 1.0)
    assert opened.describe().startswith(f"standby: {own}:")


@pytest.mark.parametrize(
    "nonsense",
    [b"[]", b"not JSON", b'{"lost":1e9}'],
)
def test_nonsense_on_a_board_names_nobody(nonsense: bytes) -> None:
    """Who sends it has not answered, and where no other answers this rank may be alone."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        own, server_end = Boards("127.0.0.1"), Address("127.0.0.1", server.getsockname()[1], "")
        rank_1 = Standby(1, [server_end, own.address], "token", own, 1.0)

        def answer() -> None:
            while True:
                with server.accept()[0] as connection:
                    if not connection.recv(1000):
                        return
                    connection.sendall(nonsense + b"\n")

        answering = pool.submit(answer)
        assert rank_1.agree([0]).ranks == (0,)
        socket.create_connection(server_end[:2]).close()
        answering.result()


class Linked(Standby):
    """A rank of several in this process, whose boards are its own, and whose links can be cut."""

    cut: frozenset[int] = frozenset()  # ranks that it does not reach
    dead = False

    @classmethod
    def several(cls, number: int, quorum: str = "any", timeout: float = 1.0) -> list[Linked]:
        """Of one communicator."""
        own = [Boards("127.0.0.1") for _ in range(number)]
        addresses = [board.address for board in own]
        return [cls(rank, addresses, "token", own[rank], timeout, quorum) for rank in range(number)]

    def _pin(self, rank: int, key: str = "", note: Iterable[int] = ()) -> Notes:
        if rank in self.cut:
            raise Unanswered("cut off")
        return super()._pin(rank, key, note)


def test_who_is_given_up_while_it_compiles_is_said_to() -> None:
    rank_0, rank_1 = Linked.several(2, timeout=0.2)
    with first_run.working("compiling a kernel for dispatch"):  # all ranks, which are in one process here
        assert rank_0.ask_for_work(set()) == "compiling a kernel for dispatch"
        ranks, remark = rank_0.agree([1])
    assert ranks == (1,) and remark.endswith("rank 1 is lost; rank 1 is compiling a kernel for dispatch"), remark
    first_run._last_work = -math.inf, ""
    assert rank_0.ask_for_work(set()) == "" and rank_1.ask_for_work(set()) == ""


def cut_between(ranks: list[Linked], *parts: Iterable[int]) -> None:
    """Cuts all links between parts, in both directions; without any, none is cut any more."""
    for rank in ranks:
        rank.cut = frozenset(peer for part in parts if rank.rank not in part for peer in part)


def end(rank: Linked) -> None:
    """Ends its process, as far as others see."""
    own = rank._own
    assert own is not None
    own._listener.shutdown(socket.SHUT_RDWR)


def vote(ranks: Iterable[Linked], missed: list[list[int]], pause: float = 0.0) -> list[tuple[int, ...]]:
    """What each agrees on, each a pause after the one before it."""

    def agree(place: int, rank: Linked) -> tuple[int, ...]:
        time.sleep(place * pause)
        return rank.agree(missed[place]).ranks

    with ThreadPoolExecutor(8) as pool:
        return [*pool.map(agree, range(len(missed)), ranks)]


def meet(ranks: Iterable[Linked], timeout: float = 2.0) -> list[list[int] | str]:
    """The members of the meeting that each comes to, or the error."""

    def come(rank: Linked) -> list[int] | str:
        try:
            return rank.meet([], timeout).members
        except ThinwireError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        return [*pool.map(come, ranks)]


def meet_and_confirm(ranks: Iterable[Linked], timeout: float = 2.0) -> list[list[int] | str]:
    """The same, and those who come to one go on."""

    def come(rank: Linked) -> list[int] | str:
        try:
            meeting = rank.meet(rank.agree([]).ranks, timeout)
        except ThinwireError as error:
            return str(error)
        return meeting.members if meeting.confirm(True) else "not confirmed"

    with ThreadPoolExecutor(8) as pool:
        return [*pool.map(come, ranks)]


@pytest.fixture
def no_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that loses them."""
    monkeypatch.setattr(boards, "leave", lambda *arguments: None)


def test_a_rank_that_was_cut_off_is_told_and_the_others_go_on(no_letters: None) -> None:
    first, *others = ranks = Linked.several(3, timeout=0.2)
    cut_between(ranks, [0], [1, 2])
    assert vote(ranks, [[1, 2], [0], [0]]) == [(), (0,), (0,)], "none goes on alone"
    assert meet(others) == [[1, 2], [1, 2]]
    assert "none goes on alone while others may be alive" in str(meet([first], 0.5)[0])
    cut_between(ranks)
    assert first.agree([]).ranks == (0,)
    assert "rank 0 of 3 is itself one of the ranks that are lost" in str(meet([first])[0])


def test_a_link_that_comes_back_in_the_vote_leaves_all_ranks() -> None:
    ranks = Linked.several(3, timeout=3.0)
    cut_between(ranks, [0], [1, 2])
    with ThreadPoolExecutor(1) as pool:
        voting = pool.submit(vote, ranks, [[1, 2], [0], [0]])
        time.sleep(0.2)
        cut_between(ranks)
        assert voting.result() == [()] * 3


def test_a_rank_that_is_late_by_more_than_the_others_wait_is_no_reason_to_go_on_without_it() -> None:
    """The first has nobody to agree with meanwhile, as the third is lost."""
    first, second, third = Linked.several(3, timeout=3.0)
    third.cut = frozenset({0, 1})
    first.cut = second.cut = frozenset({2})
    assert vote([first, second], [[1, 2], [2]], pause=1.5) == [(2,), (2,)]


def test_who_heard_of_a_death_at_once_waits_for_a_rank_that_hears_of_it_when_its_time_is_up() -> None:
    """That one began to wait later, and gives the others some grace before it votes."""
    first, second, third = Linked.several(3, timeout=0.5)
    third.cut = frozenset({0, 1})
    first.cut = second.cut = frozenset({2})
    assert vote([first, second], [[2], [2]], pause=0.9) == [(2,), (2,)]


def test_hosts_out_of_reach_do_not_draw_out_a_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request takes as long as a connection may, and a vote needs some looks at who has come."""
    ranks, reach = Linked.several(4), boards.ask
    far = [rank._addresses[rank.rank] for rank in ranks[:2]]

    def ask(address: Address, *arguments: Any) -> Notes:
        if address not in far:
            return reach(address, *arguments)
        time.sleep(CONNECT_SECONDS)
        raise Unanswered("timed out")

    monkeypatch.setattr(boards, "ask", ask)
    begin = time.monotonic()
    assert vote(ranks[2:], [[0, 1]] * 2) == [(0, 1)] * 2
    assert time.monotonic() - begin < 1.8, "as calls end within the timeout and two seconds"


def test_of_two_verdicts_that_cross_the_stronger_holds_on_all_that_learn_of_it(no_letters: None) -> None:
    """More ranks, or else the lowest."""
    for parts in ([[0, 1], [2, 3, 4]], [[0, 1], [2, 3]]):
        number = sum(map(len, parts))
        ranks = Linked.several(number)
        cut_between(ranks, *parts)
        missed = [next(other for other in parts if rank not in other) for rank in range(number)]
        assert vote(ranks, missed) == [tuple(part) for part in missed], "halves that see nothing of each other"
        cut_between(ranks)
        weaker, stronger = sorted(parts, key=len) if number == 5 else (parts[1], parts[0])
        assert vote(ranks, [[]] * number) == [tuple(weaker)] * number
        found = meet(ranks)
        assert [found[rank] for rank in stronger] == [stronger] * len(stronger)
        assert all("is itself one of the ranks that are lost" in str(found[rank]) for rank in weaker)


def test_most_ranks_are_not_ended_by_a_letter_of_few() -> None:
    ranks = Linked.several(5)
    cut_between(ranks, [0, 1], [2, 3, 4])
    assert vote(ranks[:2], [[2], [3, 4]]) == [(2, 3, 4)] * 2, "letters reach the others"
    assert vote(ranks[2:], [[0], [1], [0, 1]]) == [(0, 1)] * 3
    cut_between(ranks)
    assert vote(ranks, [[]] * 5) == [(0, 1)] * 5


def test_many_lost_ranks_below_do_not_keep_the_others_apart() -> None:
    ranks = Linked.several(19)
    for rank in ranks[:17]:
        end(rank)
    assert vote(ranks[17:], [[0], [1]]) == [tuple(range(17))] * 2
    assert meet_and_confirm(ranks[17:]) == [[17, 18]] * 2


def test_ranks_that_have_tried_in_vain_meet_in_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = ranks = Linked.several(3, timeout=0.2)
    end(third)
    assert vote(ranks[:2], [[2], [2]]) == [(2,)] * 2
    monkeypatch.setattr(first, "_are_enough", lambda present: len(present) > 1)
    for _ in range(2):
        assert "none goes on alone" in str(meet([first], 0.2)[0])
    assert not second.meet([], 0.2).confirm(True), "the first was here, and has gone again"
    assert meet_and_confirm(ranks[:2]) == [[0, 1]] * 2


def test_a_rank_that_the_others_have_left_out_is_told_when_they_have_ended() -> None:
    ranks = Linked.several(4)
    assert vote(ranks, [[1], [0], [0], [0]]) == [()] * 4
    assert meet_and_confirm(ranks[:3], 0.5) == [[0, 1, 2]] * 3
    for rank in ranks[:3]:
        end(rank)
    assert "rank 3 of 4 is not among those that go on, ranks 0, 1, 2: it came too late" in str(meet([ranks[3]])[0])


def test_a_rank_that_few_have_named_goes_on_with_more_that_outvote_them(no_letters: None) -> None:
    ranks = Linked.several(5)
    cut_between(ranks, [0, 1], [2, 3, 4])
    assert vote(ranks[:2], [[2, 3, 4]] * 2) == [(2, 3, 4)] * 2
    cut_between(ranks, [0, 1, 2], [3, 4])
    assert ranks[2].agree([0]).ranks == (2, 3, 4)
    cut_between(ranks, [0, 1], [2, 3, 4])
    vote(ranks[3:], [[0, 1]] * 2)
    cut_between(ranks)
    assert meet_and_confirm(ranks)[2:] == [[2, 3, 4]] * 3


def test_with_a_majority_as_quorum_no_half_goes_on() -> None:
    ranks = Linked.several(4, "majority", timeout=0.2)
    cut_between(ranks, [0, 1], [2, 3])
    assert vote(ranks, [[2], [3], [0], [1]]) == [()] * 4
    for found in meet(ranks, 0.3):
        assert 'no majority of those that may be alive has met, and quorum is "majority"' in str(found)
    end(ranks[3])  # and is known to have ended to rank 2 alone
    cut_between(ranks, [0, 1, 3], [2])
    assert vote(ranks[:2], [[2], [2, 3]]) == [(2, 3)] * 2, "two of three"


def test_a_rank_alone_goes_on_where_no_more_than_one_other_may_be_alive() -> None:
    first, second, third = Linked.several(3)
    end(second)
    first.cut = frozenset({2})
    assert first.agree([1, 2]).ranks == (1, 2)
    assert meet([first]) == [[0]]


def test_who_has_given_up_and_misses_nobody_waits_for_nobody() -> None:
    first, *others = Linked.several(3, timeout=60.0)
    begin = time.monotonic()
    assert first.agree([]).ranks == () and time.monotonic() - begin < 30.0
    assert vote(others, [[0], [0]]) == [()] * 2, "it has said that it is there"


def test_who_has_given_up_and_misses_nobody_makes_no_verdict() -> None:
    """It would be the strongest, and hold when this rank has ended."""
    first, second = Linked.several(2)
    assert first.agree([]).ranks == ()
    end(first)
    assert second.agree([0]).ranks == (0,)


def test_who_misses_nobody_and_meets_one_that_does_learns_who_is_lost() -> None:
    """Its own half second begins first, and is over first."""
    first, second, _, last = Linked.several(4)
    end(last)
    assert vote([second, first], [[3], []], pause=0.3) == [(3,)] * 2


def test_the_last_to_vote_finds_the_verdict_of_those_that_have_ended_meanwhile() -> None:
    first, second, _, last = Linked.several(4)
    assert vote([first, second], [[2], [2]]) == [(2,), (2,)]
    last.cut = frozenset({0, 1, 2})
    assert last.agree([0, 1]).ranks == (2,)


def test_a_verdict_that_was_left_in_a_letter_is_found_by_who_wakes() -> None:
    for number in (2, 3):
        ranks = Linked.several(number)
        boards.leave(ranks[0]._addresses[0], "token", LOST, [0])
        for rank in ranks[1:]:
            end(rank)
        assert ranks[0].agree([1]).ranks == (0,), "and does not go on alone"


STOPPED = """
import sys
from thinwire.comm.agreement.boards import Boards
boards = Boards("127.0.0.1")
boards.open("token")
print(boards.address.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.exhaustive
def test_a_process_that_is_stopped_holds_nobody_up() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        rank_0 = Address("127.0.0.1", int(process.stdout.readline()), "")
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        own = [Boards("127.0.0.1") for _ in range(2)]
        addresses = [rank_0, *(board.address for board in own)]
        rank_1, rank_2 = (Standby(rank, addresses, "token", own[rank - 1], 5.0) for rank in (1, 2))
        begin = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            told = [*pool.map(lambda rank: rank.agree([0]).ranks, (rank_1, rank_2))]
        assert told == [(0,), (0,)] and time.monotonic() - begin < 5.0
    finally:
        process.kill()
        process.communicate()
