"""The option `integrity` of communicators that are processes: who has it, what they agree on, how they go on."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("numba", reason="ranks of the CPU need numba")

import torch
import torch.distributed as dist

import thinwire as tw
from tests.helpers.tampering import Arrival, tamper_with
from thinwire.comm.communicator import Communicator
from thinwire.comm.integrity import VARIABLE, Rows
from thinwire.errors import (
    ArgumentError,
    ConfigMismatch,
    IntegrityError,
    PeerTimeout,
    ThinwireError,
)
from thinwire.testing import run_ranks

CHECKED = {VARIABLE: "checksum"}


def inherited(comm: Communicator) -> list[str]:
    group = [[0], [1]]
    with (
        Communicator(comm.group) as again,
        Communicator(comm.group, integrity="none") as without,
        without.split(groups=group) as part,
        comm.split(groups=group) as other,
    ):
        domain, plain = tw.init(domain="a"), tw.init(domain="b", integrity="none")
        with pytest.raises(ThinwireError, match="integrity='none'"):
            tw.init(domain="a", integrity="none")
        named = [c.integrity for c in (comm, again, without, part, other, domain, plain)]
    assert "integrity: checksum" in comm.explain()
    return named


def test_it_comes_from_the_environment_and_is_handed_on() -> None:
    expected = ["checksum", "checksum", "none", "none", "checksum", "checksum", "none"]
    assert run_ranks(inherited, 2, env=CHECKED) == [expected] * 2


def mixed(comm: Communicator) -> str:
    with pytest.raises(ConfigMismatch) as caught:
        Communicator(comm.group, integrity=("none", "checksum")[comm.rank])
    comm.barrier()
    return str(caught.value)


def test_ranks_that_disagree_are_told_so() -> None:
    (first, second) = run_ranks(mixed, 2)
    assert first == second and "'none' on rank 0; 'checksum' on rank 1" in first


def test_what_is_no_mode_is_refused_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="integrity is 'crc', expected one of: none, checksum"):
        tw.init(integrity="crc")
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ArgumentError, match="THINWIRE_INTEGRITY in the environment is 'yes'"):
        tw.init()
    assert not dist.is_initialized()


def flip_in_all_reduce(seen: list[Arrival]) -> None:
    if seen[-1].label.startswith("scatter"):
        seen[-1].octets[77] ^= 4


def go_on(comm: Communicator) -> tuple[str, int, str]:
    short, x = Communicator(comm.group, timeout=2.0, integrity="checksum"), torch.randn(5000)
    if comm.rank == 1:
        tamper_with(short, flip_in_all_reduce)
        with pytest.raises(IntegrityError, match="scatter: all_reduce"):
            tw.all_reduce(x, comm=short)
    else:
        with pytest.raises(PeerTimeout) as caught:
            tw.all_reduce(x, comm=short)
        assert caught.value.ranks == (), caught.value
    time.sleep(1.0 if comm.rank == 1 else 0.0)
    with short.shrink() as left:
        total = tw.all_reduce(torch.ones(4), wire="none", comm=left)
        return short.explain().splitlines()[0], int(total[0]), left.integrity


def test_all_ranks_go_on_after_a_corrupted_message() -> None:
    for rank, told in enumerate(run_ranks(go_on, 3)):
        assert told == (f"communicator: rank {rank} of 3, closed", 3, "checksum")


def test_rows_are_named_within_their_message() -> None:
    assert Rows(1).name([0, 1, 4], 20000) == (range(0, 8192), range(16384, 20000))
    assert Rows(4100, 7).name([0, 2, 3], 4 * 4100) == (range(7, 8), range(9, 11))
    assert Rows(1000).name([1], 5500) == (range(4, 6),)
