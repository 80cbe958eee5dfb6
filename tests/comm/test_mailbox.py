"""What is left for a process that does not listen is there when it looks."""

from __future__ import annotations

import json
import socket
from contextlib import closing

import pytest

from thinwire.comm import mailbox, standby
from thinwire.comm.standby import Standby


def test_the_first_word_of_a_token_is_kept_and_others_are_not_mixed_with_it() -> None:
    listener, box = mailbox.listen("127.0.0.1")
    with closing(listener):
        host, port = listener.getsockname()
        for token in ("token", "another", "tok"):
            box.expect(token)
        assert box.read("token") is None
        for word in (b"first", b"second"):
            mailbox.leave(host, port, "token", word)
        mailbox.leave(host, port, "another", b"")
        assert box.read("token") == box.read("token") == b"first"
        assert box.read("another") == b"" and box.read("tok") is None


def test_a_port_that_is_taken_for_datagrams_is_not_taken_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        with pytest.raises(OSError):
            mailbox.Mailbox(*other.getsockname())
        tried: list[int] = []
        box = mailbox.Mailbox

        def first_taken(host: str, port: int) -> mailbox.Mailbox:
            tried.append(port)
            return box(host, port if len(tried) > 1 else other.getsockname()[1])

        monkeypatch.setattr(mailbox, "Mailbox", first_taken)
        listener, _ = mailbox.listen("127.0.0.1")
        with closing(listener):
            assert len(tried) == 2 and listener.getsockname()[1] == tried[1]


def test_strangers_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "_MOST_AT_ONCE", 4)
    listener, box = mailbox.listen("127.0.0.1")
    with closing(listener):
        box.expect("7")
        for number in range(9):
            mailbox.leave(*listener.getsockname(), f"{number}", b"x")
        assert [box.read("7"), box.read("7")] == [None, b"x"]  # so many at once
        assert box.read("8") is None and list(box._kept) == [b"7"]


def test_nobody_there_is_no_error() -> None:
    for host in ("127.0.0.1", "::1", "255.255.255.255"):
        mailbox.leave(host, 1, "token", b"word")


@pytest.mark.parametrize(
    ("word", "believed"),
    [
        *((word, tuple(json.loads(word))) for word in (b"[0]", b"[0, 2]", b"[1]")),
        *((word, None) for word in (b"[0, 9]", b"{}", b"", b"\xff")),
    ],
)
def test_a_verdict_with_no_fewer_survivors_is_believed_and_nonsense_is_not(
    word: bytes, believed: tuple[int, ...] | None
) -> None:
    store, letters, address = standby._serve("127.0.0.1")
    nobody = standby._Address("127.0.0.1", 2, "")
    token = f"a verdict {word!r}"
    mailbox.leave(address.host, address.port, token, word)
    woken = Standby(0, [address, nobody, nobody], token, store, letters)
    assert woken.agree([1]).ranks == (believed or (1, 2))  # whose processes have ended
