"""Notice boards, on which a process answers questions about its communicators, whatever else it does; and verdicts.

Each communicator has a board in each of its processes: notes, which are lists of ranks under a key. A request is one
line of JSON, `[name of the board, key, note]`: the note is pinned there, or nothing is where the key is empty, and the
answer is the whole board. A note stays as it was first pinned; but of verdicts, key `LOST`, the stronger stays, and of
reports whom a rank misses the newest.

Requests come over TCP, and a thread of this process answers them. A *letter* is the same line in a datagram at the same
port. Nothing needs to run to receive it: it waits in the kernel while the process is stopped, even if its sender has
ended.
Anyone who can reach the address may connect, but learns and changes nothing without the name of a board.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Collection, Sequence
from typing import NamedTuple

from thinwire import first_run
from thinwire.comm.exchange import name_ranks
from thinwire.errors import ThinwireError
from thinwire.fields import decode, encode

LOST = "lost"
AT_WORK = "at work/"  # begins a key, of what the process compiles or loads just now; nobody pins it
CONNECT_SECONDS = 0.2  # for a host that is there; connections are taken in by its kernel
ANSWER_SECONDS = 0.5  # for a process that is not stopped

Notes = dict[str, list[int]]

LOOK_SECONDS = 0.02  # between two looks at who has come
_REPORT_SECONDS = 0.5
_LEAST_LOOKS = 10
_MORE_SECONDS = 1.0  # at most, for these

_REQUEST = (str, str, [int])
_TRIES = 5
_MOST_BYTES = 1 << 16  # of a request
_MOST_ANSWER = 1 << 20


class ReportTime:
    """The time that ranks get to say whom they miss: half a second after the last that has.

    The clock runs on where a busy host lets nobody run, so there is also a least number of looks at who has come.
    """

    def __init__(self) -> None:
        self._came: object = None
        self._since, self._looks = 0.0, 0

    def is_over(self, came: object) -> bool:
        """Takes a look. `came` is equal to that of the look before if nobody has come since."""
        now = time.monotonic()
        if came != self._came:
            self._came, self._since, self._looks = came, now, 0
        self._looks += 1
        passed = now - self._since - _REPORT_SECONDS
        return passed > 0 and (self._looks > _LEAST_LOOKS or passed > _MORE_SECONDS)


class Verdict(NamedTuple):
    """The lost ranks, the same on every rank that asked, and the text that explains it."""

    ranks: tuple[int, ...]
    remark: str


def stronger(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """Which of two verdicts on who is lost holds, on all that know of both.

    It is the one that leaves more ranks, or of two that leave as many, the one that leaves the lowest rank in which
    they differ.

    >>> stronger([1, 2], [0]), stronger([0, 1], [2, 3])
    ((0,), (2, 3))
    """
    return min(tuple(sorted({*one})), tuple(sorted({*other})), key=lambda lost: (len(lost), [-rank for rank in lost]))


def verdict_at(rank: int, ranks: Collection[int]) -> Verdict:
    """That `ranks` are lost, as `rank` tells it.

    >>> verdict_at(0, [1])
    Verdict(ranks=(1,), remark='the ranks agree that rank 1 is lost')
    """
    names = name_ranks(ranks)
    if not ranks:
        remark = (
            "nobody is lost: all ranks that were missed have answered, so they called something else, or with other "
            "sizes"
        )
    elif rank in ranks:
        remark = f"the others have given up {names}, which is this rank" + " among others" * (len(ranks) > 1)
    else:
        remark = f"the ranks agree that {names} {'are' if len(ranks) > 1 else 'is'} lost"
    return Verdict(tuple(sorted(ranks)), remark)


class Unanswered(Exception):
    """A process does not answer."""


class Stopped(Unanswered):
    """Its kernel takes connections in, and it does not answer."""


class Gone(Unanswered):
    """It has ended."""


class Address(NamedTuple):
    """Where a process's boards are."""

    host: str  # empty where there are none
    port: int
    reason: str  # why there are none


class Boards:
    """All boards of this process at one of its addresses. They live as long as the process: peers may ask to the end.

    Raises:
        OSError, RuntimeError: there is no such address, no free port, or no thread available.
    """

    def __init__(self, host: str) -> None:
        self._boards: dict[str, Notes] = {}
        self._lock = threading.RLock()  # of a thread that a signal handler may interrupt
        self._listener, self._letters = _listen(host)
        self.address = Address(host, self._listener.getsockname()[1], "")
        sockets_of_rank.update((self._listener, self._letters))
        try:
            threading.Thread(target=self._serve, name="thinwire boards", daemon=True).start()
        except BaseException:
            self._listener.close()
            self._letters.close()
            raise

    def open(self, name: str) -> None:
        """Begins a board, if it has not begun. Requests for others are dropped."""
        with self._lock:
            self._boards.setdefault(name, {})

    def pin(self, name: str, key: str = "", note: list[int] | None = None) -> Notes:
        """All notes of a board, after letters were read, and a note pinned if there is a key."""
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                while True:
                    letter = self._letters.recv(_MOST_BYTES)
                    with contextlib.suppress(ThinwireError, KeyError):
                        self._pin(*decode(letter, _REQUEST, "a letter"))
            return dict(self._pin(name, key, note or []))

    def _pin(self, name: str, key: str, note: list[int]) -> Notes:
        notes = self._boards[name]
        if key == LOST:
            notes[key] = list(stronger(notes.get(key, note), note))
        elif key.startswith("missed/"):
            notes[key] = note
        elif key:
            notes.setdefault(key, note)
        return notes

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                for event, _ in selector.select():
                    ready = event.fileobj
                    assert isinstance(ready, socket.socket)
                    if ready is not self._listener:
                        if not self._answer(ready, event.data):
                            selector.unregister(ready)
                            ready.close()
                        continue
                    try:
                        connection = self._listener.accept()[0]
                    except OSError:  # nobody is there any more, or no descriptor is
                        time.sleep(0.01)
                    else:
                        connection.setblocking(False)
                        sockets_of_rank.add(connection)
                        selector.register(connection, selectors.EVENT_READ, bytearray())  # what has come

    def _answer(self, connection: socket.socket, request: bytearray) -> bool:
        """Whether the rest of a request is still to come; else it was answered, or deserves no answer."""
        with contextlib.suppress(OSError, ThinwireError, KeyError):
            more = connection.recv(_MOST_BYTES)
            request += more
            if not request.endswith(b"\n"):
                return bool(more) and len(request) < _MOST_BYTES
            notes = self.pin(*decode(bytes(request), _REQUEST, "a request"))
            if work := first_run.work_here():
                notes[f"{AT_WORK}{work}"] = []
            connection.sendall(encode(notes, {str: [int]}) + b"\n")
        return False


def ask(address: Address, name: str, key: str = "", note: list[int] | None = None) -> Notes:
    """Gives all notes of another process's board, after pinning a note there if there is a key.

    Raises:
        Gone, Stopped: the process has ended, or does not answer while its host does.
        Unanswered: its host does not answer, or the answer is no board.
    """
    if not address.host:
        raise Unanswered(address.reason)
    try:
        connection = socket.create_connection(address[:2], timeout=CONNECT_SECONDS)
    except ConnectionRefusedError:
        raise Gone("its process has ended") from None
    except OSError as error:
        raise Unanswered(str(error)) from None
    with connection:
        answer, end = bytearray(), time.monotonic() + ANSWER_SECONDS
        try:
            connection.sendall(_line(name, key, note or []))
            while not answer.endswith(b"\n") and len(answer) <= _MOST_ANSWER:
                connection.settimeout(max(end - time.monotonic(), 0.001))
                more = connection.recv(1 << 16)
                if not more:
                    raise Unanswered("it closed the connection")
                answer += more
        except TimeoutError:
            raise Stopped(f"no answer within {ANSWER_SECONDS:g} s") from None
        except OSError as error:
            raise Unanswered(str(error)) from None
    try:
        notes: Notes = decode(bytes(answer), {str: [int]}, "it")
    except ThinwireError as error:
        raise Unanswered(str(error)) from None
    return notes


def has_ended(address: Address) -> bool:
    """Whether the process whose boards are there has ended. One that is stopped, or out of reach, has not."""
    try:
        socket.create_connection(address[:2], timeout=CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


_own_boards: dict[tuple[int, str], Boards] = {}  # by process, as a fork has no thread that serves them
_starting = threading.Lock()


def serve(host: str) -> Boards:
    """This process's boards at one of its addresses."""
    with _starting:
        key = os.getpid(), host
        if key not in _own_boards:
            _own_boards[key] = Boards(host)
        return _own_boards[key]


def leave(address: Address, name: str, key: str, note: list[int]) -> None:
    """Leaves a letter, without waiting or checking that it arrives."""
    # There may be no process, no host and no way to it any more.
    with contextlib.suppress(OSError), socket.socket(_family(address.host), socket.SOCK_DGRAM) as sender:
        sender.sendto(_line(name, key, note), address[:2])


def listener_at(host: str) -> socket.socket:
    """A socket that listens at a free port of one of this host's addresses."""
    listener = socket.socket(_family(host))
    try:
        listener.bind((host, 0))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def _listen(host: str) -> tuple[socket.socket, socket.socket]:
    """A listener for connections, and a socket for datagrams at the same free port, which wait for nothing."""
    for tries_left in reversed(range(_TRIES)):
        listener = listener_at(host)
        letters = socket.socket(_family(host), socket.SOCK_DGRAM)
        try:
            letters.bind((host, listener.getsockname()[1]))
        except OSError:  # the port is another program's for datagrams
            listener.close()
            letters.close()
            if not tries_left:
                raise
        else:
            listener.setblocking(False)
            letters.setblocking(False)
            return listener, letters
    raise AssertionError("unreachable")


def _line(name: str, key: str, note: list[int]) -> bytes:
    return encode((name, key, note), _REQUEST) + b"\n"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


sockets_of_rank: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for inherited in list(sockets_of_rank):  # else the rank would seem to live as long as its children
        inherited.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
