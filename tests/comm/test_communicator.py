"""Exchanges deliver every byte in order, settings are compared, and no wait outlasts its timeout."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from thinwire.comm import Communicator
from thinwire.comm.exchange import ADVICE
from thinwire.errors import ConfigMismatch, PeerTimeout, ThinwireError, TransportUnavailable
from thinwire.testing import RankError, run_ranks

SIZES = (0, 0, 1, 7, 513, 4096, 65537, 1_000_003)
SLACK = 2.0  # seconds past its timeout within which a wait must have ended


def message(seed, source, target, position):
    """The bytes that `source` sends to `target`, which both can work out; None where there are none."""
    if source == target:
        return None
    number = f"{seed}/{source}/{target}/{position}"
    size = random.Random(number).choice(SIZES)
    generator = torch.Generator().manual_seed(random.Random(number + "!").getrandbits(31))
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) if size else None


def exchange_at_random(comm, seed, num_posts):
    under_way = []
    for position in range(num_posts):
        sends = [message(seed, comm.rank, peer, position) for peer in range(comm.size)]
        expected = [message(seed, peer, comm.rank, position) for peer in range(comm.size)]
        receives = [None if row is None else torch.full_like(row, 255) for row in expected]
        under_way.append((comm.post(sends, receives), receives, expected))
    random.Random(seed).shuffle(under_way)
    for pending, receives, expected in under_way:
        pending.wait()
        pending.wait()  # a second time does nothing
        for row, right in zip(receives, expected, strict=True):
            assert (row is None and right is None) or torch.equal(row, right)


def check_everything(comm, seed):
    assert comm.device == torch.device("cpu") and comm.timeout == 30.0 and not comm.closed
    for turn in range(4):
        exchange_at_random(comm, f"{seed}/{turn}", 8)
        comm.barrier()
    counts = [[random.Random(f"{seed}/{a}/{b}").choice((0, 5, 2**63 - 1)) for b in range(comm.size)] for a in range(4)]
    received = comm.exchange_counts(counts[comm.rank])
    assert received == [counts[peer][comm.rank] for peer in range(comm.size)]
    objects = comm.all_gather_object({"rank": comm.rank, "text": "x" * 1000 * comm.rank})
    assert objects == [{"rank": rank, "text": "x" * 1000 * rank} for rank in range(comm.size)]
    comm.require_same("a thing", {"hidden": 7168, "wire": "int8", "scale": float("nan"), "bias": None, "flag": True})
    return comm.rank


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_random_exchanges_counts_objects_and_settings_arrive_as_sent(world_size):
    seed = random.randrange(2**32)
    assert run_ranks(check_everything, world_size, seed) == list(range(world_size)), f"seed {seed}"


def exchange_large(comm, num_bytes):
    peer = 1 - comm.rank
    sent, received = (
        torch.full((num_bytes,), comm.rank + 1, dtype=torch.uint8),
        torch.zeros(num_bytes, dtype=torch.uint8),
    )
    sent[-1] = 100 + comm.rank
    sends, receives = [None, None], [None, None]
    sends[peer], receives[peer] = sent, received
    comm.post(sends, receives).wait()
    return bool((received[:-1] == peer + 1).all()) and int(received[-1]) == 100 + peer


def test_large_messages_cross_each_other_without_deadlock():
    assert run_ranks(exchange_large, 2, 64_000_001) == [True, True]


def exchange_in_a_subgroup(comm):
    group = dist.new_group([0, 2])
    if comm.rank == 1:
        with pytest.raises(ThinwireError, match="only members may wrap a group"):
            Communicator(group)
        comm.barrier()
        return None
    with Communicator(group, timeout=7.5) as pair:
        place = (pair.rank, pair.size, pair.timeout, pair.exchange_counts([10 * comm.rank, 10 * comm.rank + 1]))
        exchange_at_random(pair, "pair", 5)
        assert "the process group that was passed" in pair.explain()
    assert pair.closed
    with pytest.raises(ThinwireError, match="closed"):
        pair.barrier()
    comm.barrier()  # the groups are the caller's: neither is gone
    Communicator(group).barrier()
    dist.destroy_process_group(group)
    return place


def test_subgroups_use_ranks_of_their_own_and_survive_close():
    assert run_ranks(exchange_in_a_subgroup, 3) == [(0, 2, 7.5, [0, 20]), None, (1, 2, 7.5, [1, 21])]


def post_and_forget(comm):
    peer, rows = 1 - comm.rank, []
    for value in range(20):
        rows.append(torch.zeros(100_000, dtype=torch.uint8))
        sends, receives = [None, None], [None, None]
        sends[peer], receives[peer] = torch.full((100_000,), value, dtype=torch.uint8), rows[-1]
        comm.post(sends, receives)
    gc.collect()
    comm.barrier()
    deadline = time.monotonic() + 20
    while not all(bool((row == value).all()) for value, row in enumerate(rows)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_exchange_that_nobody_waits_for_still_happens_and_disturbs_no_other():
    run_ranks(post_and_forget, 2)


MISMATCHES = [
    (
        [{"hidden": 64, "wire": "int8"}, {"hidden": 128, "wire": "int8"}, {"hidden": 64, "wire": "int8"}],
        "  hidden: 64 on ranks 0, 2; 128 on rank 1",
    ),
    ([{"flag": 1}, {"flag": True}, {"flag": 1.0}], "  flag: 1 on rank 0; True on rank 1; 1.0 on rank 2"),
    ([{}, {}, {"extra": "x"}], "  extra: (absent) on ranks 0, 1; 'x' on rank 2"),
]


def compare(comm):
    told = []
    for settings_by_rank, _ in MISMATCHES:
        with pytest.raises(ConfigMismatch) as caught:
            comm.require_same("ExpertParallel", settings_by_rank[comm.rank])
        told.append(str(caught.value))
        comm.require_same("ExpertParallel", settings_by_rank[0])  # the ranks are still in step
    return told


def test_every_rank_learns_which_setting_differs_and_who_has_what():
    expected = [f"ExpertParallel: the ranks' settings differ\n{text}" for _, text in MISMATCHES]
    assert run_ranks(compare, 3) == [expected] * 3


def wait_for(call, *arguments):
    """How long the call took to raise PeerTimeout, and what it said."""
    begin = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        call(*arguments)
    return time.monotonic() - begin, str(caught.value)


def stay_away(comm):
    found = []
    for absent in (0, 2):
        short = Communicator(dist.new_group(range(3)), timeout=0.5)
        if comm.rank == absent:
            time.sleep(1.0)
        call, *arguments = (short.exchange_counts, [0, 1, 2]) if absent == 0 else (short.barrier,)
        seconds, told = wait_for(call, *arguments)
        again, told_again = wait_for(short.barrier)
        assert again < SLACK and told.split(ADVICE)[0] in told_again
        found.append((absent, seconds, told))
        comm.barrier()
    return found


def test_a_rank_that_never_comes_is_named_by_all_others_within_the_timeout():
    for rank, found in enumerate(run_ranks(stay_away, 3)):
        for absent, seconds, told in found:
            assert seconds < 0.5 + SLACK
            if rank == absent:  # it finds that the others have given up
                assert "lost the connection" in told
            else:
                assert told.startswith(f"rank {rank} of 3: no answer from rank {absent} within 0.5 s")


def lose_a_peer(comm, folder):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = Path(folder) / "begun"
    if comm.rank == 0:
        time.sleep(0.5)  # until the loss is known before anything is posted
        begun.touch()
    while not begun.exists():
        time.sleep(0.01)
    if comm.rank == 2:
        time.sleep(0.05)  # rank 0 must not be gone by now, or it would be taken for a lost rank too
    seconds, told = wait_for(comm.barrier)
    (Path(folder) / str(comm.rank)).write_text(f"{seconds} {told}")


def test_a_killed_peer_is_noticed_long_before_the_timeout_and_it_alone_is_named(tmp_path):
    with pytest.raises(RankError) as caught:
        run_ranks(lose_a_peer, 3, str(tmp_path))
    assert list(caught.value.failures) == [1]
    for rank in (0, 2):
        seconds, _, told = (tmp_path / str(rank)).read_text().partition(" ")
        assert float(seconds) < 10.0
        assert told.startswith(f"rank {rank} of 3: lost the connection to rank 1,")


LENGTHS_BY_RANK = {"longer": ((8,), (4,)), "shorter": ((4,), (8,)), "order": ((100, 200), (200, 100))}


def disagree(comm):
    told = []
    for lengths_by_rank in LENGTHS_BY_RANK.values():
        short = Communicator(dist.new_group(range(2)), timeout=0.5)
        under_way = []
        for length in lengths_by_rank[comm.rank]:
            row, nothing = torch.zeros(length, dtype=torch.uint8), [None, None]
            under_way.append(short.post(nothing, [None, row]) if comm.rank == 0 else short.post([row, None], nothing))
        told.append([wait_for(pending.wait)[1] for pending in under_way])
    return told


def test_ranks_that_disagree_about_lengths_or_order_get_an_error_and_live():
    for told in run_ranks(disagree, 2):
        assert [len(texts) for texts in told] == [1, 1, 2]
        for text in (text for texts in told for text in texts):
            assert "another number of bytes" in text or "lost the connection" in text


def _cuda_over_gloo(comm: Communicator) -> None:
    comm.check_exchange()
    comm._device = torch.device("cuda", 0)
    with pytest.raises(TransportUnavailable, match="cuda:0 cannot travel through a Gloo group"):
        comm.check_exchange()


def test_a_gloo_group_is_refused_for_rows_on_a_gpu() -> None:
    run_ranks(_cuda_over_gloo, 1)
