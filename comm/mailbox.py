"""A word that is left for a rank which does not listen now: that the others go on without it.

Its standby store answers nobody while its process is stopped, and the others may have ended when it wakes. A datagram
waits in the receiver's kernel, which takes it in whatever the process does, and nobody has to be there any more when it
is read.
"""

from __future__ import annotations

import contextlib
import socket

_TRIES = 5
_MOST_BYTES = 1 << 16
_MOST_AT_ONCE = 4096  # read, of what a stranger may send without an end; the system keeps fewer


class Mailbox:
    """One process's, which anybody may write to who can reach it. It lives as long as the process.

    Raises:
        OSError: the port is another program's.
    """

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.socket(_family(host), socket.SOCK_DGRAM)
        self._kept: dict[bytes, bytes | None] = {}  # the first word of each token that is expected
        try:
            self._socket.bind((host, port))
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    def expect(self, token: str) -> None:
        """Words under this token are kept from now on; all others are thrown away."""
        self._kept.setdefault(_key(token), None)

    def read(self, token: str) -> bytes | None:
        """The first word that was left under a token that is expected, if one was; it stays."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MOST_AT_ONCE):
                key, _, word = self._socket.recv(_MOST_BYTES).partition(b" ")
                if key in self._kept and self._kept[key] is None:
                    self._kept[key] = word
        return self._kept.get(_key(token))


def listen(host: str) -> tuple[socket.socket, Mailbox]:
    """A listener for connections, and a mailbox, at the same free port of one of this host's addresses.

    Raises:
        OSError: there is no such address, or no such port.
    """
    for tries_left in reversed(range(_TRIES)):
        listener = socket.socket(_family(host))
        try:
            listener.bind((host, 0))
            listener.listen(128)
            return listener, Mailbox(host, listener.getsockname()[1])
        except OSError:  # the port may be another program's for datagrams
            listener.close()
            if not tries_left:
                raise
    raise AssertionError("unreachable")


def leave(host: str, port: int, token: str, word: bytes) -> None:
    """Leaves a word at a process's mailbox. Waits for nothing; where it does not arrive, nobody hears of that."""
    # Whom it is for is lost: there may be no process, no host and no way to it any more.
    with contextlib.suppress(OSError), socket.socket(_family(host), socket.SOCK_DGRAM) as sender:
        sender.sendto(_key(token) + b" " + word, (host, port))


def _key(token: str) -> bytes:
    return token.encode(errors="surrogatepass").replace(b" ", b"")  # a peer could have made it up


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
