"""Where ranks meet: a store, each other's addresses, and the network interface that leads to them.

Ranks that meet at a loopback address listen to nobody outside of their host.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from thinwire.comm.agreement import boards
from thinwire.comm.agreement.boards import Address
from thinwire.comm.exchange import name_ranks
from thinwire.comm.groups import endless_in_children
from thinwire.comm.hosts import LOOPBACK, facing_address, interface_of, is_loopback
from thinwire.comm.waiting import LOOK_SECONDS, call_within
from thinwire.errors import ThinwireError

#: Gloo's variable: the interface whose address it listens on and tells its peers.
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"

_POLL_SECONDS, _MOST_POLL_SECONDS, _ANSWER_SECONDS = 0.02, 0.5, 1.0
_STORE_LIMIT = timedelta(minutes=5)  # torch's own
_OWN_SECONDS = 10.0  # in which this host finds itself at its own address, if it ever does
_started: dict[tuple[str, int], dist.TCPStore] = {}  # by this process, as rank 0
_started_jobs: dict[str, dist.TCPStore] = {}


class Unmet(Exception):
    """Ranks did not come in time.

    Attributes:
        missing: those of which that is known.
    """

    def __init__(self, text: str, missing: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.missing = tuple(missing)


class World(NamedTuple):
    """Ranks that have met.

    Attributes:
        store: theirs alone.
        interface: this host's network interface by which they reach it, if one is known.
        watched: addresses of notice boards of other ranks, which say if they have ended.
    """

    store: dist.Store
    interface: str | None
    watched: dict[int, Address]

    def look(self) -> None:
        """Raises Unmet if a rank has ended."""
        ended = [rank for rank, address in self.watched.items() if boards.has_ended(address)]
        if ended:
            raise Unmet(f"{name_ranks(ended)} ended meanwhile", ended)


def store_at(host: str, port: int, rank: int, limit: timedelta) -> dist.TCPStore:
    """The store at a place where ranks meet, which rank 0's process starts and keeps.

    Raises:
        ThinwireError: rank 0 cannot listen there.
        Unmet: nobody is there, or this host, as rank 0's, does not reach itself there.
    """
    if rank == 0 and (host, port) not in _started:
        _started[host, port] = start_store(host, port) if is_loopback(host) else _start_open_store(host, port, limit)
    return reach(host, port, limit)


def store_of_job(job: str, rank: int, limit: timedelta) -> dist.TCPStore:
    """The store of one host's ranks, which they find by their job's name; it listens on loopback, at any port.

    Rank 0 tells the port to processes of the same user, at a socket that has a name and no file: it ends with rank 0.
    """
    user = os.getuid()
    name = f"\0thinwire {hashlib.sha256(f'{user} {job}'.encode()).hexdigest()[:32]}"
    if rank == 0:
        if job not in _started_jobs:
            listener, store = socket.socket(socket.AF_UNIX), start_store(LOOPBACK, 0)
            boards.sockets_of_rank.add(listener)
            try:
                listener.bind(name)
            except OSError as error:
                raise ThinwireError(f"another rank 0 is in this job, {job} ({error}): {_SET_PLACE}") from error
            listener.listen(128)
            threading.Thread(target=_tell_port, args=(listener, store.port), name="thinwire job", daemon=True).start()
            _started_jobs[job] = store
        return reach(LOOPBACK, _started_jobs[job].port, limit)
    end = time.monotonic() + limit.total_seconds()
    while (left := end - time.monotonic()) > 0:
        with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):  # it has not come yet
            connection.settimeout(left)
            connection.connect(name)
            told = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
            if told != user:
                raise Unmet(f"user {told} listens where rank 0 should: {_SET_PLACE}", [0])
            port = connection.recv(16).decode()
            if port:
                return reach(LOOPBACK, int(port), timedelta(seconds=max(0.001, end - time.monotonic())))
        time.sleep(_POLL_SECONDS)
    raise Unmet(f"rank 0 did not come to this host, for job {job}; else {_SET_PLACE}", [0])


_SET_PLACE = "set MASTER_ADDR and MASTER_PORT on every rank"


def _tell_port(listener: socket.socket, port: int) -> None:
    while True:
        with contextlib.suppress(OSError), listener.accept()[0] as connection:
            connection.sendall(str(port).encode())


def reach(host: str, port: int, limit: timedelta) -> dist.TCPStore:
    """A client of the store there, once it answers. torch's stores try as well, and print pages where they fail.

    Raises:
        Unmet: nobody listens there, or answers, within the limit.
    """
    deadline = time.monotonic() + limit.total_seconds()
    failure = _why_unreachable(host, port, limit)
    if failure:
        raise Unmet(f"nobody listens there ({failure}): rank 0 was not started, or listens elsewhere", [0])
    try:
        return call_within(
            max(_ANSWER_SECONDS, deadline - time.monotonic()),
            lambda: dist.TCPStore(host, port, is_master=False, timeout=limit),
        )
    except TimeoutError:
        raise Unmet(
            "something listens there but does not answer: rank 0 is stopped, or it is another program", [0]
        ) from None


def _why_unreachable(host: str, port: int, limit: timedelta) -> str:
    begun = time.monotonic()
    deadline, failure = begun + limit.total_seconds(), "no time"
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), timeout=remaining).close()
            return ""
        except (OSError, UnicodeError) as error:  # UnicodeError: what cannot be a host's name
            failure = getattr(error, "strerror", None) or str(error)
            if isinstance(error, socket.gaierror):
                failure = f"the name cannot be looked up: {failure}"
            _pause(begun, deadline)
    return failure


def _pause(begun: float, deadline: float) -> None:
    """Between two looks: longer ones where it lasts, as many ranks may ask one store."""
    now = time.monotonic()
    time.sleep(max(0.0, min(max(_POLL_SECONDS, (now - begun) / 20), _MOST_POLL_SECONDS, deadline - now)))


def meet(store: dist.Store, rank: int, size: int, limit: timedelta, host: str | None = None) -> World:
    """The world of all ranks, once they are there. Collective.

    A place may be met at again, by ranks that come back from the last world at their own times. What that one left in
    the store would lead them astray, so rank 0 gives each world a name, and tells it to those that wait for one; or it
    tells them who is missing.

    Args:
        limit: of each wait.
        host: where the ranks meet.

    Raises:
        Unmet: ranks that did not come, or that have ended.
        DistNetworkError: rank 0 ended meanwhile.
    """
    begun = time.monotonic()
    deadline = begun + limit.total_seconds()
    own, name = _own_address(host or LOOPBACK), secrets.token_hex(8)
    if rank:
        store.set(f"request {rank}", " ".join((name, own.host, str(own.port))))
        answer, no_answer = f"world for {name}", f"missing for {name}"
        while not store.check([answer]):
            late = time.monotonic() > deadline + _ANSWER_SECONDS  # rank 0 knows more, if it is there
            if late or store.check([no_answer]):
                told = store.get(no_answer).decode() if store.check([no_answer]) else ""
                store.set(f"request {rank}", "")  # of a rank that waits no longer
                raise _missing([int(text) for text in told.split()])
            _pause(begun, deadline + 2 * _ANSWER_SECONDS)
        name = store.get(answer).decode()
        lines = store.get(f"addresses of {name}").decode().split("\n")
        return _world(name, store, rank, own, [_as_address(line) for line in lines])
    came: dict[int, tuple[str, Address]] = {}
    next_look = begun + LOOK_SECONDS
    while len(came) < size - 1:
        for peer in range(1, size):
            request, _, address = _request(store, peer).partition(" ")
            if request:
                came[peer] = request, _as_address(address)
            else:
                came.pop(peer, None)  # it waits no longer
        now, ended = time.monotonic(), list[int]()
        if now > next_look:
            ended = [peer for peer, (_, address) in came.items() if address.host and boards.has_ended(address)]
            next_look = now + LOOK_SECONDS
        if ended or (now > deadline and len(came) < size - 1):
            missing = ended or sorted({*range(1, size)} - came.keys())
            for request, _ in came.values():
                store.set(f"missing for {request}", " ".join(map(str, missing)))
            until = now + 2 * _MOST_POLL_SECONDS  # they read it before this process ends, and the store with it
            while any(_request(store, peer) for peer in came.keys() - {*ended}) and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
            for peer in came:
                store.set(f"request {peer}", "")
            raise Unmet(f"{name_ranks(ended)} ended before all had come", ended) if ended else _missing(missing)
        _pause(begun, deadline)
    addresses = [own, *(came[peer][1] for peer in range(1, size))]
    store.set(f"addresses of {name}", "\n".join(f"{address.host} {address.port}" for address in addresses))
    for peer, (request, _) in came.items():
        store.set(f"request {peer}", "")
        store.set(f"world for {request}", name)
    return _world(name, store, rank, own, addresses)


def _request(store: dist.Store, peer: int) -> str:
    """Reads what a rank asks for; empty while it does not."""
    return store.get(f"request {peer}").decode() if store.check([f"request {peer}"]) else ""


def _world(name: str, store: dist.Store, rank: int, own: Address, addresses: list[Address]) -> World:
    far = {peer: address for peer, address in enumerate(addresses) if address.host and not is_loopback(address.host)}
    watched, host = far, own.host or LOOPBACK
    if not far:  # all on one host
        watched = {peer: address for peer, address in enumerate(addresses) if address.host}
    elif is_loopback(host):  # the name of the place stands for a loopback address here, and others come from elsewhere
        host = facing_address(next(iter(far.values())).host)
    watched = {peer: address for peer, address in watched.items() if peer != rank}
    return World(dist.PrefixStore(name, store), interface_of(host), watched)


def _own_address(host: str) -> Address:
    """Of this process's notice boards, where those see it that meet at a host; an empty one if it has none."""
    try:
        return boards.serve(LOOPBACK if is_loopback(host) else facing_address(host)).address
    except (OSError, RuntimeError) as error:
        return Address("", 0, str(error))


def _as_address(text: str) -> Address:
    """Reads the address that a peer told."""
    host, _, port = text.partition(" ")
    return Address(host, int(port), "")


def _missing(ranks: Sequence[int]) -> Unmet:
    if not ranks:
        return Unmet("rank 0 gave no answer")
    return Unmet(f"{name_ranks(ranks)} did not come", ranks)


def _start_open_store(host: str, port: int, limit: timedelta) -> dist.TCPStore:
    """A store of several hosts' ranks, which listens at all addresses, if this host reaches itself at that one."""
    both = socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    with listener:
        failure = _why_unreachable(host, port, min(limit, timedelta(seconds=_OWN_SECONDS)))
        if failure:
            raise Unmet(f"this host does not reach itself there ({failure}): is MASTER_ADDR its address?")
        return store_behind(listener, LOOPBACK)


def start_store(host: str, port: int) -> dist.TCPStore:
    """A store that listens on one loopback address. TCPStore by itself listens on all addresses that there are.

    Args:
        host: see `is_loopback`.
        port: 0 means any that is free; the store's `port` is the one that it is.

    Raises:
        ThinwireError: the address cannot be listened on, as when another program does.
    """
    return store_behind(_listen(host, port), host)


def store_behind(listener: socket.socket, host: str, limit: timedelta = _STORE_LIMIT) -> dist.TCPStore:
    """A store that this process serves with a listener, and that closes it at its end; `limit` is of its waits."""
    port, file = listener.getsockname()[1], listener.detach()
    return endless_in_children(dist.TCPStore(host, port, None, True, limit, False, master_listen_fd=file))


def _listen(host: str, port: int) -> socket.socket:
    failure: OSError | None = None
    try:
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                return socket.create_server(address[:2], family=family)
            except OSError as error:
                # "localhost" may stand for an IPv6 address that this machine does not have. One that is taken is not
                # passed over: peers would meet whoever took it.
                failure = error
                if error.errno == errno.EADDRINUSE:
                    break
    except socket.gaierror as error:
        failure = error
    assert failure is not None
    raise _cannot_listen(host, port, failure) from failure


def _cannot_listen(host: str, port: int, failure: OSError) -> ThinwireError:
    return ThinwireError(
        f"rank 0 cannot listen at {host}:{port}: {failure}; set MASTER_ADDR to an address of this host, and "
        "MASTER_PORT to a port that is free there"
    )


@contextlib.contextmanager
def gloo_over(interface: str | None) -> Iterator[None]:
    """Has groups that are made meanwhile connect over an interface, if GLOO_SOCKET_IFNAME does not say over which.

    Gloo would take that of the host's name, which others may not reach, or more than are wanted, or which may be down.
    The environment is the only place where it can be told, and is afterwards as it was.
    """
    if interface is None or INTERFACE_VARIABLE in os.environ:
        yield
        return
    os.environ[INTERFACE_VARIABLE] = interface
    try:
        yield
    finally:
        os.environ.pop(INTERFACE_VARIABLE, None)
