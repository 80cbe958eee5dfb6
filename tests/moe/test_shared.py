"""One ExpertParallel a group and its settings, and groups and meshes in place of communicators."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import thinwire as tw
from tests.helpers.speeds import exhaustive_but
from thinwire.comm import Communicator, as_communicator
from thinwire.comm.threads import ThreadWorld
from thinwire.errors import ArgumentError, ConfigMismatch, LaneError, PeerTimeout, ThinwireError
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

pytest.importorskip("numba", reason="CPU ranks need numba")

SIZES = (4, 2, 64, 16)


def check_round(ep: ExpertParallel) -> None:
    """Each token comes back twice as large, wherever its two experts are."""
    x, ids = torch.randn(5, 64), torch.tensor([[0, 3]] * 5)
    d = ep.dispatch(x, ids, torch.full((5, 2), 0.5))
    torch.testing.assert_close(ep.combine(d.tokens * 2, d), x * 2)


def shared_by_all(comm: Communicator) -> None:
    first = ExpertParallel.shared(comm, *SIZES, wire="none")
    assert ExpertParallel.shared(comm, *SIZES, wire="none", combine_wire="none", lanes=1) is first
    assert ExpertParallel.shared(comm, 4, 2, 64, max_tokens=16, wire=tw.WireFormat.parse("none")) is first
    assert ExpertParallel.shared(comm, *SIZES) is ExpertParallel.shared(comm, *SIZES, wire="int8+h64") is not first
    others = [ExpertParallel.shared(comm, *SIZES, wire="none", **other) for other in ({"lanes": 2}, {"align": 4})]
    with comm.split(groups=[range(comm.size)]) as part:
        of_part = ExpertParallel.shared(part, *SIZES, wire="none")
        for ep in (first, *others, of_part):
            check_round(ep)
        assert len({id(ep) for ep in (first, *others, of_part)}) == 4
    with pytest.raises(LaneError, match="closed"):  # with its communicator
        check_round(of_part)
    first.close()
    second = ExpertParallel.shared(comm, *SIZES, wire="none")
    assert second is not first and ExpertParallel.shared(comm, *SIZES, wire="none") is second
    check_round(second)
    assert ExpertParallel.shared(comm, 4, 2, 64, 9, wire="none") is second  # it has room for more
    larger = ExpertParallel.shared(comm, 4, 2, 64, 41, wire="none")
    assert larger is not second
    larger.close()
    own = ExpertParallel(comm, *SIZES, wire="none")  # nobody else's
    assert ExpertParallel.shared(comm, *SIZES, wire="none") is second is not own
    own.close()
    with pytest.raises(TypeError, match="wires"):
        ExpertParallel.shared(comm, *SIZES, wires="none")
    assert "shared ExpertParallel: 4" in comm.explain()
    comm.close()
    assert all(ep._closed for ep in (second, *others))
    with pytest.raises(ThinwireError, match="this communicator is closed"):
        ExpertParallel.shared(comm, *SIZES, wire="none")


@pytest.mark.parametrize("mode", exhaustive_but(["thread"], ["thread", "process"]))
def test_calls_with_the_same_settings_get_one_object_until_it_is_closed(mode: str) -> None:
    run_ranks(shared_by_all, 2, mode=mode)


def shared_with_others(comm: Communicator) -> None:
    with pytest.raises(ConfigMismatch, match="lanes"):
        ExpertParallel.shared(comm, *SIZES, wire="none", lanes=1 + comm.rank)
    check_round(ExpertParallel.shared(comm, *SIZES, wire="none"))  # nothing was kept
    if comm.rank == 0:
        ExpertParallel.shared(comm, *SIZES, wire="none")  # sends nothing
    comm.barrier()
    with pytest.raises(PeerTimeout):
        if comm.rank == 0:
            ExpertParallel.shared(comm, *SIZES, wire="none", align=2)
        else:
            check_round(ExpertParallel.shared(comm, *SIZES, wire="none"))


def test_ranks_that_ask_for_different_ones_are_told() -> None:
    comms = Communicator.of_threads(ThreadWorld(2), timeout=1.0)
    run_ranks(lambda comm: shared_with_others(comms[comm.rank]), 2, mode="thread")


def rebuilt(comm: Communicator) -> None:
    ep = ExpertParallel.shared(comm, *SIZES, wire="none")
    other = ExpertParallel.shared(comm, *SIZES, wire="none", lanes=2)
    comm.barrier()
    if comm.rank == 2:
        return
    ep.rebuild([2])
    assert ep.comm.size == 2 and comm.closed
    check_round(ep)
    assert ExpertParallel.shared(ep.comm, *SIZES, wire="none") is ep
    made = ExpertParallel.shared(ep.comm, *SIZES, wire="none", lanes=2)
    assert made is not other, "that one is of all ranks, one of which is gone"
    check_round(made)
    ep.comm.close()
    assert ep._closed and made._closed and other._closed


@pytest.mark.parametrize("mode", exhaustive_but(["thread"], ["thread", "process"]))
def test_what_was_rebuilt_is_shared_by_the_ranks_that_are_left(mode: str) -> None:
    run_ranks(rebuilt, 3, mode=mode)


def rebuilt_elsewhere(comm: Communicator) -> None:
    ep = ExpertParallel.shared(comm, *SIZES, wire="none")
    with comm.split(groups=[range(comm.size)]) as part:
        ep.rebuild(part)
        again = ExpertParallel.shared(comm, *SIZES, wire="none")
        assert again is not ep and ExpertParallel.shared(part, *SIZES, wire="none") is not ep
        comm.attached("ExpertParallel").close()
        assert again._closed is False and ep._closed is False, "both groups are there"
        check_round(ep)
    ep.close()


def test_what_was_rebuilt_onto_another_group_is_shared_no_longer() -> None:
    run_ranks(rebuilt_elsewhere, 2, mode="thread")


# --- groups and meshes ------------------------------------------------------------------------------------------------


def pass_groups(comm: Communicator) -> None:
    comm = tw.init(timeout=17.0)
    world, half = dist.group.WORLD, [comm.rank // 2 * 2, comm.rank // 2 * 2 + 1]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    part = mesh["ep"]
    assert as_communicator(world) is comm, "what init made is the communicator of its group"
    ep = ExpertParallel.shared(part, *SIZES, wire="none")
    assert ExpertParallel.shared(mesh.get_group("ep"), *SIZES, wire="none") is ep
    assert ep.comm.size == 2 and ep.comm.group is part.get_group()
    assert ep.comm.timeout == comm.timeout
    check_round(ep)
    with ExpertParallel(part, *SIZES, wire="none") as own:
        assert own is not ep and own.comm is ep.comm
        own.rebuild(mesh["dp"])
        assert own.comm.group is mesh.get_group("dp") and own.comm is not as_communicator(mesh["dp"])
        check_round(own)
    x = torch.full((8,), float(comm.rank))
    for group in (part, part.get_group()):
        assert tw.all_reduce(x, wire="none", comm=group).tolist() == [float(sum(half))] * 8
        assert tw.all_gather(x[:1], wire="none", comm=group).tolist() == half
        assert tw.reduce_scatter(x, wire="none", comm=group).tolist() == [float(sum(half))] * 4
        assert tw.all_to_all_v(x[:2], [1, 1], [1, 1], wire="none", comm=group).tolist() == half
        layouts = (tw.Layout((2,), ("ep",))("ep"), tw.Layout((2,), ("ep",))("None"))
        assert tw.redistribute(x[:1], *layouts, wire="none", comm=group).tolist() == half
        assert tw.AllReduceState(group).comm is ep.comm
    assert tw.all_reduce(x, wire="none", comm=world).tolist() == [6.0] * 8


def pass_what_is_no_group(comm: Communicator) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    nameless = init_device_mesh("cpu", (2, 2))
    x = torch.ones(8)
    refused = {
        r"2 axes, \('dp', 'ep'\), expected one of one axis: choose it by name, such as mesh\['ep'\]": mesh,
        r"2 axes, \(2, 2\), expected one of one axis: name its axes": nameless,
        "comm is 'gloo', expected a Communicator": "gloo",
        "comm is 3, expected": 3,
        "comm is a Size, expected": torch.Size([2]),
    }
    for message, group in refused.items():
        for call in (
            lambda: ExpertParallel(group, *SIZES),  # noqa: B023
            lambda: ExpertParallel.shared(group, *SIZES),  # noqa: B023
            lambda: tw.all_reduce(x, comm=group),  # noqa: B023
            lambda: tw.all_to_all_v(x, [2] * 4, [2] * 4, comm=group),  # noqa: B023
            lambda: tw.AllReduceState(group),  # noqa: B023
        ):
            with pytest.raises(ArgumentError, match=message):
                call()
    with ExpertParallel(comm, *SIZES, wire="none") as ep, pytest.raises(ArgumentError, match="2 axes"):
        ep.rebuild(mesh)
    some = dist.new_group([0, 1])
    if comm.rank > 1:
        with pytest.raises(ThinwireError, match="no process group that this rank belongs to|expected a Communicator"):
            as_communicator(some)
    else:
        made = as_communicator(some)
        assert as_communicator(some) is made
        ep = ExpertParallel.shared(some, *SIZES, wire="none")
        dist.destroy_process_group(some)
        for group in (some, made):
            with pytest.raises(ThinwireError, match="no process group|is closed"):
                ExpertParallel.shared(group, *SIZES, wire="none")
        ep.close()
    comm.barrier()
    again = dist.new_group([0, 1])
    if comm.rank < 2:
        check_round(ExpertParallel.shared(again, *SIZES, wire="none"))
        closed = as_communicator(again)
        closed.close()
        renewed = as_communicator(again)
        assert renewed is not closed and ExpertParallel.shared(again, *SIZES, wire="none").comm is renewed


@pytest.mark.parametrize("check", [pass_groups, pass_what_is_no_group], ids=["accepted", "refused"])
def test_a_group_or_a_mesh_of_one_axis_stands_for_its_communicator(check) -> None:
    run_ranks(check, 4)
