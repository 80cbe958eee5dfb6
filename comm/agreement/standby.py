"""How ranks agree on who is lost, and meet again without them, whoever it is.

Rank 0's process often holds the only store through which ranks can meet. So every process keeps notice boards
(`thinwire.comm.agreement.boards`), whose address the others learn while all are well; a rank's board of a communicator
is its *standby* there. Once something fails, each rank goes to the lowest rank whose standby answers, pins there whom
it misses, and what is first concluded from that is the verdict. Links may be cut, and there may be several such places:
so a rank concludes nothing by itself while several others may be alive, and of two verdicts the stronger holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from thinwire import first_run
from thinwire.comm.agreement import boards
from thinwire.comm.agreement.boards import CONNECT_SECONDS, LOST, Address, Boards, Gone, Notes, Stopped, Unanswered
from thinwire.comm.agreement.meeting import store_behind
from thinwire.comm.exchange import name_ranks
from thinwire.comm.hosts import LOOPBACK, facing_address, is_loopback
from thinwire.comm.waiting import call_within
from thinwire.errors import ArgumentError, PeerTimeout, ThinwireError

_T = TypeVar("_T")

QUORUMS = ("any", "majority")

#: Seconds, beyond its timeout, for which a rank that finds nobody waits for a second one. A broken connection tells it
#: of a death at once; the others may wait for a flag until their time is up. They come later by their own lag, half a
#: second at most, by the quarter of one that they give others before they vote, and by a look of theirs and one here.
#: Half a second for the vote still fits, for a call that is to end within the timeout and two seconds.
_WITNESS_SECONDS = 1.0
_MORE_SECONDS = 5.0  # at most, for a vote whose time is up while ranks still come
_SILENT_SECONDS = 1.0  # until a process is asked again that has left several requests unanswered
#: The same of a host that is out of reach. As each request takes that long, too, a rank spends half of a vote on them,
#: has its looks in time, and still finds soon that a link is back.
_OUT_OF_REACH_SECONDS = CONNECT_SECONDS
_PATIENCE_SECONDS = 2.0  # with the host of a meeting, which may be busy, or behind a link that comes back
_MOST_THREADS = 16


def resolve_quorum(quorum: str | None) -> str:
    """One of QUORUMS, the first for None; ArgumentError for anything else."""
    if quorum is not None and quorum not in QUORUMS:
        raise ArgumentError(f"quorum is {quorum!r}, expected None, {' or '.join(map(repr, QUORUMS))}")
    return quorum or QUORUMS[0]


class Standby:
    """One rank's end of the boards of a communicator. Its calls block, in bounded time.

    Args:
        rank: this rank.
        addresses: of each rank's boards.
        token: the name of its boards, which only the ranks are told.
        own: this process's boards, if it has some.
        timeout: seconds for which a rank that finds nobody waits for another one, and one more.
        quorum: see `Communicator`.

    Attributes:
        name: the same on all ranks, and of no other communicator; it does not give the token away.
    """

    def __init__(
        self, rank: int, addresses: list[Address], token: str, own: Boards | None, timeout: float, quorum: str = "any"
    ) -> None:
        self.name = hashlib.sha256(token.encode()).hexdigest()[:16]
        self.rank, self.size = rank, len(addresses)
        self._addresses, self._token, self._own, self._timeout, self._quorum = addresses, token, own, timeout, quorum
        if own is not None:
            own.open(token)
        _open[id(self)] = self
        self._missed: set[int] = set()  # by this rank
        self._told: set[int] = set()  # who was lost by verdicts so far
        self._ended: set[int] = set()  # processes
        self._at_work: dict[int, str] = {}  # by rank, what it compiled or loaded when it answered last
        self._silent: dict[int, tuple[int, float]] = {}  # requests that were not answered, and when to ask again

    @classmethod
    def open(
        cls, rank: int, gather: Callable[[object, Any], list[Any]], timeout: float, quorum: str = "any"
    ) -> Standby:
        """Collective over the ranks of a communicator. `gather` is as its `all_gather_data`."""
        places = gather([_network(), secrets.token_hex(16)], (str, str))
        shared = len({network for network, _ in places}) == 1 and bool(places[0][0])
        own, address = None, Address("", 0, "")
        try:
            own = boards.serve(LOOPBACK if shared else _facing_address())
            address = own.address
        except (OSError, RuntimeError, ValueError, Unanswered) as error:
            address = Address("", 0, str(error))
        addresses = [Address(*entry) for entry in gather(list(address), (str, int, str))]
        return cls(rank, addresses, places[0][1], own, timeout, quorum)

    @property
    def can_agree(self) -> bool:
        """Whether every rank has one, as it should be."""
        return all(address.host for address in self._addresses)

    def describe(self) -> str:
        """For `Communicator.explain`."""
        own = self._addresses[self.rank]
        return f"standby: {own.host}:{own.port}" if own.host else f"standby: none, as {own.reason}"

    # -----------------------------------------------------------------------------------------------------------------
    # Who is lost

    def agree(self, suspects: Iterable[int]) -> boards.Verdict:
        """Agrees with the other ranks on who is lost; each calls it with those that it misses.

        Lost is whose process has ended, and who was missed by one of them and is not among them. While none of those
        who came misses anybody, this rank says that it is there, and concludes nothing. The first verdict holds for all
        that come later, unless a stronger one was made where they could not see it.
        """
        if not self.can_agree:
            return boards.Verdict((), f"who is lost is not known, as {self._reason()}")
        self._missed |= {*suspects}
        lost = self._settle(self._timeout + _WITNESS_SECONDS if self._missed else 0.0)
        self._told |= {*(lost or ())}
        ranks, remark = boards.Verdict((), self._alone()) if lost is None else boards.verdict_at(self.rank, lost)
        at_work = [f"rank {rank} is {work}" for rank, work in self._at_work.copy().items() if rank in self._missed]
        return boards.Verdict(ranks, "; ".join([remark, *at_work]))

    def ask_for_work(self, asked: set[Address]) -> str:
        """Asks ranks what they compile or load; empty: none does. Adds the addresses that were asked to `asked`."""
        self._silent.clear()  # a busy host may have left requests unanswered
        ranks = [rank for rank, address in enumerate(self._addresses) if address not in asked]
        asked.update(self._addresses)
        keys = (key for notes in self._ask_all(ranks).values() for key in notes if key.startswith(boards.AT_WORK))
        return next((key.removeprefix(boards.AT_WORK) for key in keys), "")

    def find_ended(self, ranks: Iterable[int]) -> list[int]:
        """Those of some ranks whose processes have ended, and any that a verdict names."""
        for rank in {*ranks} - self._ended - {self.rank}:
            if self._addresses[rank].host and boards.has_ended(self._addresses[rank]):
                self._ended.add(rank)
        return sorted(self._ended.intersection(ranks).union(self._known() or () if self._own is not None else ()))

    def _settle(self, limit: float) -> tuple[int, ...] | None:
        """The strongest verdict that this rank can learn of; None: there is none yet, and it may not make one alone.

        Args:
            limit: seconds to wait for ranks enough.
        """
        known = self._known()
        if known is None:
            known = self._vote(range(self.size), limit)
        if known is None:
            return None
        for board in self._ask_all(range(self.size)).values():  # others may have been cut off, and have made one
            known = boards.stronger(known, board.get(LOST, known))
        if self.rank in known and 2 * len(known) > self.size:  # those who are lost together could outvote the others
            known = self._vote(known, 0.0) or known
        if self.rank not in known:
            self._pin(self.rank, LOST, known)
            for rank, address in enumerate(self._addresses):
                if rank != self.rank:  # who is stopped, or votes when this process has ended, finds it
                    boards.leave(address, self._token, LOST, list(known))
        return known

    def _vote(self, among: Collection[int], limit: float) -> tuple[int, ...] | None:
        """Reports whom this rank misses to the lowest rank that answers, and gives the verdict that is made there.

        Each look begins at the lowest rank anew, as links come back.
        """
        end, report_time = time.monotonic() + limit, boards.ReportTime()
        while True:
            host, board = self._report(among)
            reports = {rank: board[f"missed/{rank}"] for rank in range(self.size) if f"missed/{rank}" in board}
            others = self._ask_all({*range(self.size)} - reports.keys() - {host})
            known = self._known()
            for notes in [board, *others.values()]:
                if LOST in notes:
                    known = tuple(notes[LOST]) if known is None else boards.stronger(known, notes[LOST])
            if known is not None and (self.rank not in known or len(among) == self.size):
                return known
            is_over = report_time.is_over((host, len(reports)))
            if time.monotonic() > end + _MORE_SECONDS:  # links that come and go would begin it anew for ever
                return known
            if is_over or len(reports.keys() | self._ended) == self.size:
                missed = {rank for report in reports.values() for rank in report}
                lost = sorted((missed | self._ended) - reports.keys())
                may_conclude = self._are_enough(reports) and (missed or limit > 0)
                if may_conclude and (known is None or len(lost) < len(known)):
                    with contextlib.suppress(Unanswered):  # it has ended just now
                        if all(f"missed/{rank}" not in self._pin(host) for rank in lost):  # nor while others were asked
                            return tuple(self._pin(host, LOST, lost).get(LOST, lost))
                elif is_over and time.monotonic() > end:
                    return known
            time.sleep(boards.LOOK_SECONDS)

    def _report(self, among: Collection[int]) -> tuple[int, Notes]:
        """The lowest of some ranks that answers, and its board, where this rank's report is then."""
        key, missed = f"missed/{self.rank}", sorted(self._missed)
        lower = [rank for rank in sorted(among) if rank < self.rank and rank not in self._ended]
        for first in range(0, len(lower), _MOST_THREADS):
            for rank in self._ask_all(lower[first : first + _MOST_THREADS]):
                with contextlib.suppress(Unanswered):  # it has ended just now
                    return rank, self._pin(rank, key, missed)
        return self.rank, self._pin(self.rank, key, missed)

    def _known(self) -> tuple[int, ...] | None:
        """The verdict on this rank's own board, where others pin it too, and leave it in letters."""
        lost = self._pin(self.rank).get(LOST)
        return None if lost is None else tuple(lost)

    def _are_enough(self, present: Collection[int]) -> bool:
        """Whether ranks that are together may go on without the others."""
        absent = self.size - len({*present} | self._ended)  # and may be alive
        return len(present) > absent if self._quorum == "majority" else len(present) > 1 or absent <= 1

    def _alone(self) -> str:
        if self._quorum == "majority":
            return 'who is lost is not known: no majority of those that may be alive has met, and quorum is "majority"'
        return "who is lost is not known: no other rank has answered, and none goes on alone while others may be alive"

    # -----------------------------------------------------------------------------------------------------------------
    # Who goes on

    def meet(self, lost: Collection[int], timeout: float) -> Meeting:
        """Waits for all ranks but those `lost`, or whose processes have ended. Who came is the same on all that did.

        Raises:
            PeerTimeout: ranks have no standby, or too few have come to go on.
            ThinwireError: this rank is among the lost, or the others went on without it.
        """
        if not self.can_agree:
            raise PeerTimeout(f"rank {self.rank} of {self.size}: the ranks cannot meet, as {self._reason()}")
        own = {*lost} - self._told  # others may have changed with a stronger verdict
        self._require_not_in(own)  # before a verdict, which is for good
        self._missed |= own
        verdict = self._settle(timeout)
        if verdict is None:
            raise PeerTimeout(f"rank {self.rank} of {self.size}: {self._alone()}")
        self._require_not_in(verdict)
        awaited = {*range(self.size)} - {*own, *verdict}
        failures = []
        for host in range(self.size):
            if host in verdict or host in self._ended:
                continue
            try:
                attempt, members = self._meet(host, awaited, timeout)
            except Unanswered as error:
                failures.append(f"rank {host}: {error}")
                continue
            self._require_in(members)
            return Meeting(self, host, attempt, members, timeout)
        raise PeerTimeout(
            f"rank {self.rank} of {self.size}: the ranks cannot meet, as no standby answers ({'; '.join(failures)})"
        )

    def _meet(self, host: int, awaited: set[int], timeout: float) -> tuple[int, list[int]]:
        """Which attempt to meet at a host this is, by its board, and who is in it."""
        attempt, end = 0, time.monotonic() + timeout
        while True:
            for notes in (self._pin(self.rank), board := self._pin_patiently(host)):
                for key in [key for key in notes if key.startswith("outcome/") and notes[key]]:
                    self._require_in(notes[key])
            while f"outcome/{attempt}" in board:
                attempt += 1
            board = self._pin_patiently(host, f"here/{attempt}/{self.rank}")
            decided = f"members/{attempt}"
            if decided in board:
                return attempt, board[decided]
            self._require_not_in(board.get(LOST, ()))
            here = [rank for rank in sorted(awaited) if f"here/{attempt}/{rank}" in board]
            self._ask_all(awaited.difference(here))
            if awaited <= {*here, *self._ended} or time.monotonic() > end:
                if self._are_enough(here):
                    return attempt, self._pin_patiently(host, decided, here).get(decided, here)
                raise PeerTimeout(f"rank {self.rank} of {self.size}: {self._alone()}")
            time.sleep(boards.LOOK_SECONDS)

    def _require_in(self, members: Collection[int]) -> None:
        if self.rank not in members:
            raise ThinwireError(
                f"rank {self.rank} of {self.size} is not among those that go on, {name_ranks(members)}: it came too "
                "late"
            )

    def _require_not_in(self, lost: Collection[int]) -> None:
        if self.rank in lost:
            raise ThinwireError(
                f"rank {self.rank} of {self.size} is itself one of the ranks that are lost, {name_ranks(lost)}; it "
                "cannot shrink with the others"
            )

    # -----------------------------------------------------------------------------------------------------------------
    # Boards

    def _reason(self) -> str:
        without = next(rank for rank, address in enumerate(self._addresses) if not address.host)
        return f"rank {without} has no standby: {self._addresses[without].reason}"

    def _pin(self, rank: int, key: str = "", note: Iterable[int] = ()) -> Notes:
        """A rank's board, with a note pinned there if there is a key; or Unanswered."""
        if rank == self.rank:
            assert self._own is not None
            return self._own.pin(self._token, key, list(note))
        try:
            notes = boards.ask(self._addresses[rank], self._token, key, list(note))
        except Gone:
            self._ended.add(rank)
            raise
        except Unanswered as error:
            unanswered = self._silent.get(rank, (0, 0.0))[0] + 1
            pause = _SILENT_SECONDS if isinstance(error, Stopped) else _OUT_OF_REACH_SECONDS
            self._silent[rank] = unanswered, time.monotonic() + pause * (unanswered > 1)
            raise
        self._silent.pop(rank, None)
        self._at_work.pop(rank, None)
        for key in notes:
            if key.startswith(boards.AT_WORK):
                self._at_work[rank] = key.removeprefix(boards.AT_WORK)
        return notes

    def _pin_patiently(self, rank: int, key: str = "", note: Iterable[int] = ()) -> Notes:
        """Pins as `_pin` does, and asks again for a while if no answer comes."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                return self._pin(rank, key, note)
            except Unanswered as error:
                if isinstance(error, Gone) or time.monotonic() > end:
                    raise
            time.sleep(boards.LOOK_SECONDS)

    def _ask_all(self, ranks: Iterable[int]) -> dict[int, Notes]:
        """The boards of those that answer, in ascending rank; who has ended is known then."""
        now = time.monotonic()
        asked = [
            rank for rank in sorted({*ranks} - self._ended - {self.rank}) if self._silent.get(rank, (0, 0.0))[1] <= now
        ]

        def ask(rank: int) -> Notes | None:
            try:
                return self._pin(rank)
            except Unanswered:
                return None

        try:
            with ThreadPoolExecutor(min(len(asked), _MOST_THREADS) or 1) as pool:
                answers = [*pool.map(ask, asked)]
        except RuntimeError:  # no more threads are to be had
            answers = [ask(rank) for rank in asked]
        return {rank: notes for rank, notes in zip(asked, answers, strict=True) if notes is not None}


class Meeting:
    """Ranks that are about to go on together.

    Attributes:
        members: the ranks that came, ascending.
    """

    def __init__(self, standby: Standby, host: int, attempt: int, members: list[int], timeout: float) -> None:
        self.members = members
        self._standby, self._host, self._attempt, self._timeout = standby, host, attempt, timeout

    def make(self, make_group: Callable[[dist.Store], _T]) -> _T:
        """Makes a group with a store that all members share, and that lives as long as the first of them.

        Raises:
            PeerTimeout: it is not made in time.
        """
        return join(
            lambda: make_group(self._store()), self._timeout, f"{name_ranks(self.members)} of {self._standby.size}"
        )

    def _store(self) -> dist.Store:
        standby, key, limit = self._standby, f"port/{self._attempt}", timedelta(seconds=self._timeout)
        host = standby._addresses[self.members[0]].host
        if standby.rank == self.members[0]:
            store = store_behind(boards.listener_at(host), host, limit)
            standby._pin_patiently(self._host, key, [store.port])
            return store
        end = time.monotonic() + self._timeout
        while not (told := standby._pin_patiently(self._host).get(key)):
            if time.monotonic() > end:
                raise Unanswered(f"rank {self.members[0]} has made no store")
            time.sleep(boards.LOOK_SECONDS)
        return dist.TCPStore(host, told[0], wait_for_workers=False, timeout=limit)

    def confirm(self, made: bool) -> bool:
        """Whether every member has made it: without that, some could go on by themselves, and leave others behind."""
        standby, outcome, end = self._standby, f"outcome/{self._attempt}", time.monotonic() + self._timeout
        key = f"made/{self._attempt}"
        try:
            board = standby._pin_patiently(self._host, f"{key}/{standby.rank}" if made else "")
            while made and outcome not in board:
                missing = {rank for rank in self.members if f"{key}/{rank}" not in board}
                standby._ask_all(missing)
                if missing <= standby._ended or time.monotonic() > end:
                    made = not missing
                    break
                time.sleep(boards.LOOK_SECONDS)
                board = standby._pin_patiently(self._host)
            # Who is to go on is in the note: all, or nobody.
            members = standby._pin_patiently(self._host, outcome, self.members if made else [])[outcome]
            for rank in range(standby.size) if members else ():  # whoever comes when all have ended, or the host has
                boards.leave(standby._addresses[rank], standby._token, outcome, members)
            return bool(members)
        except Unanswered:
            return bool(standby._pin(standby.rank).get(outcome))  # all had made it, and the host has gone on and ended


def join(make_group: Callable[[], _T], timeout: float, members: str, look: Callable[[], None] = lambda: None) -> _T:
    """Makes a group; PeerTimeout if it is not made in time, whatever the store's host does. `look` may raise."""
    try:
        return call_within(timeout + 2 * CONNECT_SECONDS, make_group, look)
    except ThinwireError:
        raise
    except (TimeoutError, Unanswered, RuntimeError) as error:  # the last are torch's own
        reason = str(error).partition("\n")[0]
        raise PeerTimeout(f"a group of {members} could not be made within {timeout:g} s: {reason}") from error


_open: weakref.WeakValueDictionary[int, Standby] = weakref.WeakValueDictionary()


def _ask_peers() -> str:
    """Asks the ranks of all communicators of this process what they compile or load; empty: none does."""
    asked = set[Address]()
    found = (reference() for reference in _open.valuerefs())
    return next(filter(None, (standby.ask_for_work(asked) for standby in found if standby is not None)), "")


first_run.ask_peers = _ask_peers


def _network() -> str:
    """Identifies this host's loopback interface; empty where that cannot be known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not Linux
        return ""


def _facing_address() -> str:
    """The address of this host that others see, if they meet at MASTER_ADDR."""
    master = os.environ.get("MASTER_ADDR")
    if not master:
        raise Unanswered("the ranks are on several hosts, and MASTER_ADDR, which says in which network, is not set")
    host = facing_address(master.strip().strip("[]"))
    if is_loopback(host):
        raise Unanswered(f"MASTER_ADDR, {master}, is reached by the loopback interface, and ranks are on other hosts")
    return host
