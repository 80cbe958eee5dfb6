"""Where the ranks of one host meet: a store and connections that listen to nobody outside of it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

from thinwire.comm.exchange import name_ranks
from thinwire.comm.groups import endless_in_children
from thinwire.comm.waiting import call_within
from thinwire.errors import ThinwireError

#: Gloo's variable: the interface whose address it listens on and tells its peers.
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"

_POLL_SECONDS, _ANSWER_SECONDS = 0.02, 1.0
_started: dict[tuple[str, int], dist.TCPStore] = {}  # by this process, as rank 0


def is_loopback(host: str) -> bool:
    """Whether a host leads no further than where it is read: a loopback address, or "localhost".

    Other names are not looked up. A host's own name may lead to 127.0.1.1 on that host, and to it from all others.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "10.0.0.1", "node7")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Unmet(Exception):
    """Ranks did not come in time.

    Attributes:
        missing: those of which that is known.
    """

    def __init__(self, text: str, missing: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.missing = tuple(missing)


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


def serve(host: str, port: int, size: int, limit: timedelta) -> dist.Store | None:
    """Rank 0's store of a world of several hosts, which listens at all addresses, once all ranks are there.

    None: somebody listens at the port already, maybe an earlier store of this process, which torch finds.

    Raises:
        Unmet: this host does not reach itself at that address.
        DistStoreError: ranks that did not come.
    """
    both = socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError:
        return None
    with listener:
        failure = _why_unreachable(host, port, limit)
        if failure:
            raise Unmet(f"this host does not reach itself there ({failure}): is MASTER_ADDR its address?")
        descriptor = listener.detach()  # which the store closes
    return dist.TCPStore(host, port, size, is_master=True, timeout=limit, master_listen_fd=descriptor)


def _why_unreachable(host: str, port: int, limit: timedelta) -> str:
    deadline, failure = time.monotonic() + limit.total_seconds(), "no time"
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), timeout=remaining).close()
            return ""
        except (OSError, UnicodeError) as error:  # UnicodeError: what cannot be a host's name
            failure = getattr(error, "strerror", None) or str(error)
            time.sleep(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
    return failure


def meet(host: str, port: int, rank: int, size: int, limit: timedelta) -> dist.Store:
    """A store of one world, once all its ranks are there. Collective; rank 0's process keeps what listens.

    A place may be met at again, by ranks that come back from the last world at their own times. What that one left in
    the store would lead them astray, so rank 0 gives each world a name, and tells it to those that wait for one; or it
    tells them who is missing.

    Args:
        host: see `is_loopback`.
        limit: of each wait.

    Raises:
        ThinwireError: rank 0 cannot listen there.
        Unmet: ranks that did not come.
        DistNetworkError: rank 0 ended meanwhile.
    """
    if rank == 0 and (host, port) not in _started:
        _started[host, port] = start_store(host, port)
    deadline = time.monotonic() + limit.total_seconds()
    store = reach(host, port, limit)
    name = secrets.token_hex(8)
    if rank:
        store.set(f"request {rank}", name)
        answer, no_answer = f"world for {name}", f"missing for {name}"
        while not store.check([answer]):
            late = time.monotonic() > deadline + _ANSWER_SECONDS  # rank 0 knows more, if it is there
            if late or store.check([no_answer]):
                told = store.get(no_answer).decode(errors="replace") if store.check([no_answer]) else ""
                store.delete_key(f"request {rank}")  # of a rank that waits no longer
                raise _missing([int(text) for text in told.split() if text.isdecimal() and int(text) < size])
            time.sleep(_POLL_SECONDS)
        return dist.PrefixStore(store.get(answer).decode(errors="replace"), store)
    waited_for = set(range(1, size))
    while waited_for := {peer for peer in waited_for if not store.check([f"request {peer}"])}:
        if time.monotonic() > deadline:
            missing = sorted(waited_for)
            for peer in {*range(1, size)} - waited_for:
                store.set(f"missing for {_take(store, peer)}", " ".join(map(str, missing)))
            time.sleep(4 * _POLL_SECONDS)  # they ask before this process ends, and the store with it
            raise _missing(missing)
        time.sleep(_POLL_SECONDS)
    for peer in range(1, size):
        store.set(f"world for {_take(store, peer)}", name)
    return dist.PrefixStore(name, store)


def _take(store: dist.Store, peer: int) -> str:
    name = store.get(f"request {peer}").decode(errors="replace")
    store.delete_key(f"request {peer}")
    return name


def _missing(ranks: Sequence[int]) -> Unmet:
    if not ranks:
        return Unmet("rank 0 gave no answer")
    return Unmet(f"{name_ranks(ranks)} did not come", ranks)


def start_store(host: str, port: int) -> dist.TCPStore:
    """A store that listens on one loopback address. TCPStore by itself listens on all addresses that there are.

    Args:
        host: see `is_loopback`.
        port: 0 means any that is free; the store's `port` is the one that it is.

    Raises:
        ThinwireError: the address cannot be listened on, as when another program does.
    """
    listener = _listen(host, port)
    port = listener.getsockname()[1]
    # The store closes the file that it is handed.
    return endless_in_children(
        dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    )


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
    raise ThinwireError(
        f"rank 0 cannot listen at {host}:{port}: {failure}; set MASTER_ADDR to an address of this host, and "
        "MASTER_PORT to a port that is free there"
    ) from failure


def loopback_interface() -> str | None:
    """The loopback interface's name; None where none is known by its name."""
    interfaces = {interface for _, interface in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in interfaces), None)


@contextlib.contextmanager
def gloo_on_loopback(wanted: bool) -> Iterator[None]:
    """Has groups that are made meanwhile connect over loopback, if wanted, and GLOO_SOCKET_IFNAME does not say where.

    Gloo would take the interface of the host's name, which others may reach, or which may be down or filtered. The
    environment is the only place where it can be told, and is afterwards as it was.
    """
    interface = loopback_interface()
    if not wanted or interface is None or INTERFACE_VARIABLE in os.environ:
        yield
        return
    os.environ[INTERFACE_VARIABLE] = interface
    try:
        yield
    finally:
        os.environ.pop(INTERFACE_VARIABLE, None)
