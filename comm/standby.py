"""How ranks agree on who is lost, and meet again without them, whoever it is.

Rank 0's process often holds the only store through which ranks can meet. So every process that is in a communicator
keeps one of its own, a *standby*, whose address the others learn while all are well. Once something fails, the ranks
go through them in ascending rank, and what is written into the first that answers decides.

A standby is torch's TCPStore, which anybody may write to who can connect. It listens on the loopback interface where
all ranks share it, else on the address that faces MASTER_ADDR; keys begin with a token that only the ranks are told;
and everything that is read from one is checked.
"""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from thinwire.comm import mailbox
from thinwire.comm.exchange import name_ranks
from thinwire.comm.groups import endless_in_children
from thinwire.comm.plain import decode, encode
from thinwire.comm.verdict import REPORT_SECONDS, Verdict, verdict_at
from thinwire.comm.waiting import call_within
from thinwire.errors import PeerTimeout, ThinwireError

_T = TypeVar("_T")

CONNECT_SECONDS = 0.5  # for a standby to answer; a process that has ended refuses at once
_MOST_REASON = 150  # characters, which take up to 12 bytes each
_HOSTS = 2  # that hold a verdict, so that it outlives the first
_LOOPBACK = "127.0.0.1"
_MASTER_PORT = 29500  # any would do: nothing is sent to it


class _Unanswered(Exception):
    """A standby does not answer, or no longer."""


class _Gone(_Unanswered):
    """Its process has ended."""


class _Address(NamedTuple):
    host: str  # empty where there is none
    port: int
    reason: str  # why there is none


class Standby:
    """One rank's end of the standbys of a communicator. Its calls block, in bounded time.

    Args:
        rank: this rank.
        addresses: of each rank's standby.
        token: what the keys of this communicator begin with.
        store, letters: this process's own standby and mailbox, if it has them.

    Attributes:
        name: the same on all ranks, and of no other communicator; it does not give the token away.
    """

    def __init__(
        self,
        rank: int,
        addresses: list[_Address],
        token: str,
        store: dist.Store | None,
        letters: mailbox.Mailbox | None = None,
    ) -> None:
        self.name = hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()[:16]
        self.rank, self.size = rank, len(addresses)
        self._addresses, self._token, self._store, self._letters = addresses, token, store, letters
        if letters is not None:
            letters.expect(token)
        self._verdict: list[int] | None = None  # what this rank was told when it asked
        self._attempts = 0

    @classmethod
    def open(cls, rank: int, gather: Callable[[object, Any], list[Any]]) -> Standby:
        """Collective over the ranks of a communicator. `gather` is as its `all_gather_data`, for short values."""
        places = gather([_network(), secrets.token_hex(16)], (str, str))
        shared = len({network for network, _ in places}) == 1 and bool(places[0][0])
        store, letters, address = None, None, _Address("", 0, "")
        try:
            store, letters, address = _serve(_LOOPBACK if shared else _facing_address())
        except (OSError, RuntimeError, _Unanswered) as error:
            address = _Address("", 0, str(error)[:_MOST_REASON])
        told = [_Address(*entry) for entry in gather(list(address), (str, int, str))]
        return cls(rank, [_checked(peer, entry) for peer, entry in enumerate(told)], places[0][1], store, letters)

    @property
    def can_agree(self) -> bool:
        """Whether every rank has one, as it should be."""
        return all(address.host for address in self._addresses)

    def describe(self) -> str:
        """For `Communicator.explain`."""
        own = self._addresses[self.rank]
        return f"standby store: {own.host}:{own.port}" if own.host else f"standby store: none, as {own.reason}"

    # -----------------------------------------------------------------------------------------------------------------
    # Who is lost

    def agree(self, suspects: Iterable[int]) -> Verdict:
        """What the ranks agree on, of which some miss others; each calls it with those that it misses.

        Lost is whose process has ended, and who was missed by one of them and is not among them. The first verdict
        holds for good, also for all that come later. Where there are two, as the host of one was stopped or cut off,
        that with more survivors holds, and of as many that of the others. It is left at all ranks, for who wakes, or
        votes when the hosts have ended.
        """
        failures: list[str] = []
        first = self._verdict is None
        if self._verdict is None:
            self._verdict = self._ask(sorted(set(suspects)), failures)
            if self._verdict is None:
                remark = f"who is lost is not known, as no standby store could be asked ({'; '.join(failures)})"
                return Verdict((), remark)
        if self.rank not in self._verdict:
            self._verdict = self._verdict_on_this_rank(self._verdict) or self._verdict
        if first and self.rank not in self._verdict:
            for rank, address in enumerate(self._addresses):
                if rank != self.rank:
                    mailbox.leave(*address[:2], self._token, encode(self._verdict, [int]))
        return verdict_at(self.rank, self._verdict)

    def _ask(self, missed: list[int], failures: list[str]) -> list[int] | None:
        verdict: list[int] | None = None
        held = 0
        for host in range(self.size):
            if held == _HOSTS or (verdict is not None and host in verdict):
                continue
            try:
                store = self._connect(host)
                known = None if verdict is None else encode(sorted(verdict), [int])
                limit = REPORT_SECONDS + 2 * CONNECT_SECONDS
                said = _within(limit, functools.partial(self._vote, store, missed, known))
                verdict, held = self._ranks(said, f"the standby of rank {host}"), held + 1
            except (_Unanswered, ThinwireError) as error:
                failures.append(f"rank {host}: {error}")
        return verdict

    def _verdict_on_this_rank(self, verdict: list[int]) -> list[int] | None:
        """What the others have agreed on meanwhile, if that is that they are without this one, and they are no fewer.

        A rank that was stopped, and wakes, does not find them where they have voted: its own standby may come first.
        One that was cut off may have agreed with itself that all others are lost, and they go on all the same.
        """
        if 2 * len(verdict) >= self.size:
            for host in verdict:
                try:
                    store = self._connect(host)
                    said = _within(REPORT_SECONDS + CONNECT_SECONDS, functools.partial(self._verdict_in, store))
                    found = self._ranks(said, f"the standby of rank {host}")
                except (_Unanswered, ThinwireError):
                    continue  # one that is lost indeed
                if self.rank in found and len(found) <= len(verdict):
                    return found
        letter = self._letter()  # last: who has ended meanwhile has left it before
        return letter if letter is not None and self.rank in letter and len(letter) <= len(verdict) else None

    def _verdict_in(self, store: dist.Store) -> bytes:
        """What was agreed on there, once a vote that is under way is over."""
        deadline, reports = time.monotonic() + REPORT_SECONDS, [f"missed/{rank}" for rank in range(self.size)]
        while not store.check(["lost"]):
            if time.monotonic() > deadline or not any(store.check([report]) for report in reports):
                return encode([], [int])
            time.sleep(0.01)
        return store.get("lost")

    def _letter(self) -> list[int] | None:
        """The verdict that was left for this rank."""
        letter = None if self._letters is None else self._letters.read(self._token)
        if letter is None:
            return None
        try:
            return self._ranks(letter, "who left a verdict for this rank")
        except ThinwireError:
            return None  # nonsense says nothing

    def _vote(self, store: dist.Store, missed: list[int], known: bytes | None) -> bytes:
        if known is None:
            store.set(f"missed/{self.rank}", encode(missed, [int]).decode())
            reports, ended = self._collect(store, "missed", range(self.size), REPORT_SECONDS, "lost")
            lost = {rank for peer, report in reports.items() for rank in self._ranks(report, f"rank {peer}")}
            own, letter = sorted((lost | ended) - reports.keys()), self._letter()
            known = encode(letter if letter and len(letter) <= len(own) else own, [int])
        return store.compare_set("lost", "", known.decode())

    # -----------------------------------------------------------------------------------------------------------------
    # Who goes on

    def meet(self, lost: Collection[int], timeout: float) -> Meeting:
        """Waits for all ranks but those `lost`, or whose processes have ended. Who came is the same on all that did.

        Raises:
            PeerTimeout: no standby answers.
            ThinwireError: this rank is among the lost, or the others went on without it.
        """
        self._require_not_in(lost)  # before a verdict, which is for good
        agreed = self.agree(lost).ranks  # the ranks may have been told of different ones, and shall ask the same host
        self._require_not_in(agreed)
        attempt, self._attempts = self._attempts, self._attempts + 1
        failures = []
        for host in range(self.size):
            if host in agreed:
                continue
            try:
                store = self._connect(host)
                limit = timeout + 2 * CONNECT_SECONDS
                said = _within(limit, functools.partial(self._meet, store, attempt, {*lost, *agreed}, timeout))
            except _Unanswered as error:
                failures.append(f"rank {host}: {error}")
                continue
            members = self._ranks(said, f"the standby of rank {host}")
            if self.rank not in members:
                raise ThinwireError(
                    f"rank {self.rank} of {self.size} is not among those that go on, {name_ranks(members)}: it came "
                    "too late"
                )
            return Meeting(self, store, attempt, members, timeout)
        raise PeerTimeout(
            f"rank {self.rank} of {self.size}: the ranks cannot meet, as no standby store could be asked "
            f"({'; '.join(failures)})"
        )

    def _require_not_in(self, lost: Collection[int]) -> None:
        if self.rank in lost:
            raise ThinwireError(
                f"rank {self.rank} of {self.size} is itself one of the ranks that are lost, {name_ranks(lost)}; the "
                "others go on without it"
            )

    def _meet(self, store: dist.Store, attempt: int, lost: set[int], timeout: float) -> bytes:
        store.set(f"here/{attempt}/{self.rank}", "1")
        awaited = [rank for rank in range(self.size) if rank not in lost]
        here, _ = self._collect(store, f"here/{attempt}", awaited, timeout, f"members/{attempt}")
        return store.compare_set(f"members/{attempt}", "", encode(sorted(here.keys() | {self.rank}), [int]).decode())

    # -----------------------------------------------------------------------------------------------------------------
    # Stores

    def _connect(self, host: int, timeout: float = CONNECT_SECONDS) -> dist.Store:
        """A client of a rank's standby, which waits for so long for keys that are not there.

        Raises:
            _Unanswered: there is none, or none that answers.
        """
        if host == self.rank and self._store is not None:
            return dist.PrefixStore(self._token, self._store)
        address = self._addresses[host]
        self._require_listening(address)

        def connect() -> dist.Store:
            limit = timedelta(seconds=timeout)
            return dist.TCPStore(address.host, address.port, timeout=limit, wait_for_workers=False)

        return dist.PrefixStore(self._token, _within(CONNECT_SECONDS, connect))

    def _require_listening(self, address: _Address) -> None:
        if not address.host:
            raise _Unanswered(address.reason)
        try:
            socket.create_connection((address.host, address.port), timeout=CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            raise _Gone("its process has ended") from None
        except OSError as error:
            raise _Unanswered(str(error)) from None

    def _has_ended(self, rank: int) -> bool:
        try:
            self._require_listening(self._addresses[rank])
        except _Unanswered as error:
            return isinstance(error, _Gone)
        return False

    def _collect(
        self, store: dist.Store, prefix: str, awaited: Iterable[int], seconds: float, decided: str
    ) -> tuple[dict[int, bytes], set[int]]:
        """What ranks have written, and whose processes have ended; that is all, unless time is up, or it is decided."""
        deadline, missing, pause = time.monotonic() + seconds, set(awaited), 0.002
        found: dict[int, bytes] = {}
        ended: set[int] = set()
        while True:
            for rank in [rank for rank in missing if store.check([f"{prefix}/{rank}"])]:
                found[rank] = store.get(f"{prefix}/{rank}")
                missing.discard(rank)
            for rank in sorted(missing):
                if time.monotonic() < deadline and self._has_ended(rank):
                    ended.add(rank)
            missing -= ended
            if not missing or time.monotonic() > deadline or store.check([decided]):
                return found, ended
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _ranks(self, message: bytes, source: str) -> list[int]:
        """Ranks of this communicator, ascending, as somebody wrote them."""
        ranks: list[int] = decode(message, [int], source)
        if any(not 0 <= rank < self.size for rank in ranks):
            raise ThinwireError(f"{source} sent {ranks[:8]}, expected ranks from 0 to {self.size - 1}")
        return sorted(set(ranks))


class Meeting:
    """Ranks that are about to go on together.

    Attributes:
        members: the ranks that came, ascending.
    """

    def __init__(self, standby: Standby, store: dist.Store, attempt: int, members: list[int], timeout: float) -> None:
        self.members = members
        self._standby, self._store, self._attempt, self._timeout = standby, store, attempt, timeout

    def make(self, make_group: Callable[[dist.Store], _T]) -> _T:
        """What is made with a store that all members share, and that lives as long as the first of them.

        Raises:
            PeerTimeout: it is not made in time.
        """

        def make() -> _T:
            store = self._standby._connect(self.members[0], self._timeout)
            return make_group(dist.PrefixStore(f"group/{self._attempt}", store))

        return join(make, self._timeout, f"{name_ranks(self.members)} of {self._standby.size}")

    def confirm(self, made: bool) -> bool:
        """Whether every member has made it: without that, some could go on by themselves, and leave others behind."""
        standby, outcome = self._standby, f"outcome/{self._attempt}"

        def ask() -> bytes:
            every = made
            if made:
                self._store.set(f"made/{self._attempt}/{standby.rank}", "1")
                there, _ = standby._collect(self._store, f"made/{self._attempt}", self.members, self._timeout, outcome)
                every = len(there) == len(self.members)
            return self._store.compare_set(outcome, "", "yes" if every else "no")

        try:
            return _within(self._timeout + 2 * CONNECT_SECONDS, ask) == b"yes"
        except _Unanswered:
            return False


def join(make_group: Callable[[], _T], timeout: float, members: str) -> _T:
    """What is made, or PeerTimeout if that does not succeed in time, whatever the store's host does."""
    try:
        return _within(timeout + 2 * CONNECT_SECONDS, make_group)
    except _Unanswered as error:
        raise PeerTimeout(f"a group of {members} could not be made within {timeout:g} s: {error}") from error


class _OwnStore(NamedTuple):
    store: dist.Store
    letters: mailbox.Mailbox
    address: _Address


_own_stores: dict[tuple[int, str], _OwnStore] = {}  # by process, as a fork inherits the server's socket, not the server
_starting = threading.Lock()


def _serve(host: str) -> _OwnStore:
    """This process's standby at one of its addresses. It lives as long as the process: peers may ask it to the end."""
    with _starting:
        key = os.getpid(), host
        if key not in _own_stores:
            listener, letters = mailbox.listen(host)
            port, descriptor = listener.getsockname()[1], listener.detach()
            store = dist.TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor,
                timeout=timedelta(seconds=CONNECT_SECONDS),
            )  # fmt: skip
            _own_stores[key] = _OwnStore(endless_in_children(store), letters, _Address(host, port, ""))
        return _own_stores[key]


def _network() -> str:
    """What tells one host's loopback interface from another's; empty where that cannot be known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not Linux
        return ""


def _facing_address() -> str:
    """The address of this host that others see, if they meet at MASTER_ADDR."""
    master = os.environ.get("MASTER_ADDR")
    if not master:
        raise _Unanswered("the ranks are on several hosts, and MASTER_ADDR, which says in which network, is not set")
    family, kind, _, _, address = socket.getaddrinfo(master, _MASTER_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram's socket: it is only routed
        host = str(probe.getsockname()[0])
    if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        raise _Unanswered(f"MASTER_ADDR, {master}, is reached by the loopback interface, and ranks are on other hosts")
    return host


def _checked(peer: int, address: _Address) -> _Address:
    """A peer's address, which it could have made up."""
    if address.host:
        try:
            ipaddress.ip_address(address.host.partition("%")[0])
            address.host.encode("idna")  # as `socket` does with all of it, and fails with what is no OSError
        except ValueError:
            raise ThinwireError(f"rank {peer} says its standby store is at {address.host!r}, no address") from None
        if not 1 <= address.port <= 65535:
            raise ThinwireError(f"rank {peer} says its standby store is at port {address.port}")
    return address


def _within(seconds: float, call: Callable[[], _T]) -> _T:
    """What the call returns or raises, if it ends in time.

    Raises:
        _Unanswered: it did not, or the connection is lost.
    """
    try:
        return call_within(seconds, call)
    except TimeoutError:
        raise _Unanswered(f"no answer within {seconds:g} s") from None
    except ThinwireError:
        raise
    except RuntimeError as error:  # torch's own
        raise _Unanswered(str(error).partition("\n")[0]) from error
