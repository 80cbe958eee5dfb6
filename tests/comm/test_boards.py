"""What is pinned on a process's boards stays there, for whoever knows their name."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from thinwire.comm.agreement import boards
from thinwire.comm.agreement.boards import LOST, Address, Boards, Gone, Stopped, Unanswered, ask, leave, serve


@pytest.fixture
def own() -> Boards:
    """This process's, with a board "board" that is new each time."""
    found = serve("127.0.0.1")
    found._boards.pop("board", None)
    found.open("board")
    return found


def test_a_note_stays_but_for_a_verdict_that_a_stronger_one_follows(own: Boards) -> None:
    for key, note, there in (
        ("members/0", [0, 1], [0, 1]),
        ("members/0", [0], [0, 1]),
        ("missed/1", [0], [0]),
        ("missed/1", [0, 2], [0, 2]),
        (LOST, [1, 2], [1, 2]),
        (LOST, [0], [0]),
        (LOST, [1, 2], [0]),
    ):
        assert ask(own.address, "board", key, note)[key] == own.pin("board")[key] == there


def test_a_letter_is_pinned_when_the_board_is_looked_at(own: Boards) -> None:
    for name in ("board", "another"):
        leave(own.address, name, LOST, [2])
    leave(own.address, "board", "missed/0", [])
    assert own.pin("board") == {LOST: [2], "missed/0": []}


def test_who_does_not_know_the_name_gets_no_answer(own: Boards) -> None:
    with pytest.raises(Unanswered, match="closed the connection"):
        ask(own.address, "another", LOST, [1])
    with pytest.raises(KeyError):
        own.pin("another")


@pytest.mark.parametrize("said", [b"[1]\n", b'["board","lost",[1]\n', b"x" * (1 << 17)])
def test_nonsense_is_not_answered(own: Boards, said: bytes) -> None:
    with contextlib.closing(socket.create_connection(own.address[:2], 5.0)) as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(said)
            assert stranger.recv(1) == b""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as stranger:
        stranger.sendto(said[:60000], own.address[:2])
    assert own.pin("board") == {}


def test_a_request_may_come_in_parts(own: Boards) -> None:
    with contextlib.closing(socket.create_connection(own.address[:2], 5.0)) as peer:
        for part in (b'["board","mis', b'sed/1",[2]', b"]\n"):
            peer.sendall(part)
            time.sleep(0.02)
        assert peer.recv(100) == b'{"missed/1":[2]}\n'


def test_nobody_there_is_no_error() -> None:
    for host in ("127.0.0.1", "::1", "255.255.255.255", ""):
        leave(Address(host, 1, ""), "board", LOST, [1])


def test_a_port_that_is_taken_for_datagrams_is_not_taken_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    listener_at, tried = boards.listener_at, list[socket.socket]()
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))

        def first_taken(host: str) -> socket.socket:
            tried.append(listener_at(host))
            if len(tried) == 1:
                other.bind(tried[0].getsockname())
            return tried[-1]

        monkeypatch.setattr(boards, "listener_at", first_taken)
        for end in boards._listen("127.0.0.1"):
            stack.enter_context(end)
        assert len(tried) == 2 and tried[0].fileno() == -1


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"", "closed the connection"),
        (b"[1]\n", "expected"),
    ],
)
def test_an_answer_that_is_no_board_is_none(said: bytes, told: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1], "")

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(100)
                connection.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Unanswered, match=told):
            ask(address, "board")
        thread.join()


PROCESS = """
import os, sys, time
from thinwire.comm.agreement.boards import Boards
boards = Boards("127.0.0.1")
boards.open("board")
if os.fork() == 0:
    time.sleep(60)
print(boards.address.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_process() -> Iterator[tuple[subprocess.Popen[str], Address]]:
    """A process with boards, which has a child, and where they are."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield process, Address("127.0.0.1", int(process.stdout.readline()), "")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_process_is_there_or_stopped_or_has_ended(other_process: tuple[subprocess.Popen[str], Address]) -> None:
    process, address = other_process
    assert ask(address, "board", "missed/1", []) == {"missed/1": []}
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(Stopped):
        ask(address, "board")
    leave(address, "board", LOST, [0])
    process.send_signal(signal.SIGCONT)
    for _ in range(50):  # a busy host
        with contextlib.suppress(Stopped):
            assert ask(address, "board") == {"missed/1": [], LOST: [0]}
            break
    process.kill()  # and not its child
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(Gone):
        ask(address, "board")
    with pytest.raises(Unanswered, match="why not"):
        ask(Address("", 0, "why not"), "board")
