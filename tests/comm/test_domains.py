"""Domains are independent communicators over the same ranks, one for each name."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from tests.comm.test_bootstrap import alone as alone
from thinwire.comm import default_communicator
from thinwire.errors import ConfigMismatch, PeerTimeout, ThinwireError
from thinwire.testing import RanksTimeout, run_ranks


def use_two(comm):
    a, b = tw.init(domain="a"), tw.init(domain="b", timeout=7.0)
    assert a is not b and default_communicator() is b
    assert tw.init(domain="a") is a and default_communicator() is a
    assert (a.rank, a.size, b.rank, b.size) == (comm.rank, comm.size) * 2 and b.timeout == 7.0
    world = tw.init()
    assert world is not a and world is not b and tw.init() is world is default_communicator()
    assert "domain 'a'" in a.explain() and "domain: 'a'\n  domain: 'b'" in world.explain()
    # Messages of one do not match those of another, whatever the order in which they are waited for.
    works, tensors = [], []
    order = (a, b, world) if comm.rank % 2 else (world, b, a)
    for number, domain in enumerate(order):
        weight = 1.0 + (a, b, world).index(domain)
        tensors.append((torch.full((50,), weight * (comm.rank + 1)), weight))
        works.append(domain.all_reduce(tensors[number][0], async_op=True))
    for work in works:
        work.wait()
    total = sum(range(1, comm.size + 1))
    for tensor, weight in tensors:
        assert bool((tensor == weight * total).all())
    b.close()
    assert default_communicator() is world and not a.closed
    again = tw.init(domain="b")
    assert again is not b and again.all_gather_object(comm.rank) == list(range(comm.size))
    with pytest.raises(ThinwireError, match=r"close\(\) that one before asking for timeout=3.0"):
        tw.init(domain="a", timeout=3.0)
    comm.barrier()
    world.close()
    assert a.closed and again.closed
    with pytest.raises(ThinwireError, match="no default communicator"):
        default_communicator()
    return True


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_domains_are_independent_and_found_again_by_name(mode):
    assert all(run_ranks(use_two, 3, mode=mode))


def test_threads_cannot_have_another_device_in_a_domain():
    def ask(comm):
        with pytest.raises(ThinwireError, match="device is 'cuda', but these ranks are threads"):
            tw.init(domain="a", device="cuda")
        return tw.init(domain="a", device="cpu").size

    assert run_ranks(ask, 2, mode="thread") == [2, 2]


def disagree(comm):
    told = []
    for names in (("a", "a", "b"), (None, "c", "c")):
        if names[0] is None:
            tw.init()  # made now, so that the second round is about the name alone
        if names[comm.rank] is None:
            with pytest.raises(ConfigMismatch) as caught:
                tw.init(domain="d")
        else:
            with pytest.raises(ConfigMismatch) as caught:
                tw.init(domain=names[comm.rank])
        told.append(str(caught.value))
    return told, tw.init(domain="e").all_gather_object(comm.rank)


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_ranks_that_open_different_domains_are_told_and_go_on(mode):
    for told, ranks in run_ranks(disagree, 3, mode=mode):
        assert told == [
            "thinwire.init: the ranks' settings differ\n  domain: 'a' on ranks 0, 1; 'b' on rank 2",
            "thinwire.init: the ranks' settings differ\n  domain: 'd' on rank 0; 'c' on ranks 1, 2",
        ]
        assert ranks == [0, 1, 2]


def differ_at_first(comm):
    with pytest.raises(ConfigMismatch, match="domain: None on rank 0; 'a' on rank 1"):
        tw.init(**({"domain": "a"} if comm.rank else {}))
    return tw.init(domain="a").size


def test_a_first_init_without_a_domain_does_not_meet_one_with_a_domain():
    assert run_ranks(differ_at_first, 2) == [2, 2]


def lose_one(comm):
    short, other = tw.init(domain="short", timeout=0.3), tw.init(domain="other", timeout=60.0)
    if comm.rank == 1:
        time.sleep(1.0)
    begin = time.monotonic()
    with pytest.raises(PeerTimeout):
        short.barrier()
    assert time.monotonic() - begin < 2.5
    return other.all_gather_object(comm.rank), tw.init().all_gather_object(comm.rank)


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_domain_that_failed_leaves_the_others_alone(mode):
    assert run_ranks(lose_one, 2, mode=mode) == [([0, 1], [0, 1])] * 2


def test_a_world_of_one_has_domains_too(alone):
    a = tw.init(domain="a", device="cpu")
    x = torch.ones(3)
    a.all_reduce(x)
    assert default_communicator() is a and x.tolist() == [1.0] * 3
    world = tw.init(device="cpu")
    assert world.group is dist.group.WORLD and a.group is not world.group
    a.close()
    assert dist.is_initialized() and not world.closed and default_communicator() is world
    assert "domain: 'a', closed" in world.explain()
    world.close()
    assert not dist.is_initialized()


def test_a_domain_of_a_world_that_is_closed_meanwhile_is_closed_too(alone, monkeypatch):
    tw.init(device="cpu")
    derive, made = tw.Communicator._derive, []

    def close_meanwhile(world, *others):
        made.append(derive(world, *others))
        world.close()
        return made[0]

    monkeypatch.setattr(tw.Communicator, "_derive", close_meanwhile)
    with pytest.raises(ThinwireError, match="closed"):
        tw.init(domain="a", device="cpu")
    assert made[0].closed


def fail_in_a_domain(comm):
    inner = tw.init(domain="inner")
    if comm.rank == 0:
        raise RuntimeError("on purpose")
    begin = time.monotonic()
    with pytest.raises(PeerTimeout):
        inner.barrier()
    assert time.monotonic() - begin < 1.5  # before run_ranks gives up
    raise AssertionError("told")


def test_a_thread_that_raises_ends_its_peers_waits_in_domains():
    with pytest.raises(Exception, match="on purpose") as caught:
        run_ranks(fail_in_a_domain, 2, mode="thread")
    assert "AssertionError: told" in caught.value.failures[1]


@pytest.mark.exhaustive
def test_a_wait_in_a_domain_ends_when_run_ranks_gives_up():
    released, ended = threading.Event(), []

    def stick(comm):
        inner = tw.init(domain="inner")
        if comm.rank == 0:
            released.wait(20.0)
            return
        with pytest.raises(PeerTimeout):
            inner.barrier()
        ended.append(comm.rank)

    with pytest.raises(RanksTimeout):
        run_ranks(stick, 2, mode="thread", timeout=1.0)
    released.set()
    assert ended == [1]
