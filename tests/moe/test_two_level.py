"""Rounds over two levels: what experts see is what they see on one, and what comes home is as near."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.hosts import on_hosts
from tests.helpers.speeds import exhaustive_but
from tests.helpers.wires import assert_same_bits
from thinwire import ExpertParallel
from thinwire.comm import Communicator
from thinwire.comm.hosts import Hosts, forwarder, hosts_of, served_by
from thinwire.errors import CapacityError, LaneError, PeerTimeout, TransportUnavailable
from thinwire.fused import staged
from thinwire.moe.two_level import TwoLevelRounds
from thinwire.testing import RankError, run_ranks
from thinwire.wire import WireFormat

pytest.importorskip("numba", reason="CPU ranks need numba")

EXPERTS, TOP_K, HIDDEN, TOKENS = 12, 4, 256, 40
SIZES = (EXPERTS, TOP_K, HIDDEN, TOKENS)
TWO_BY_TWO = ((0, 1), (2, 3))
OTHERS = (((0,), (1, 2, 3)), ((0, 2), (1, 3)), ((0, 1), (2, 3), (4, 5)), ((0, 1, 2, 3), (4, 5, 6, 7)))
SEEN = (
    "tokens", "weights", "expert_ids", "source", "records", "record_ids", "record_weights", "record_source",
    "expert_counts", "expert_offsets",
)  # fmt: skip
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def batch(rank: int, number: int, dtype: torch.dtype, sizes: tuple[int, int, int, int] = SIZES) -> Batch:
    """Some ids are missing or repeat; ranks have different numbers of tokens, one none."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    experts, top_k, hidden, most = sizes
    count = (most, most // 6, 0, most // 2 + 3)[(number + rank) % 4]
    ids = torch.randint(-1, experts, (count, top_k), generator=generator)
    x = torch.randn(count, hidden, generator=generator).to(dtype)
    return x, ids, torch.rand(count, top_k, generator=generator)


def as_on_one_level(
    comm: Communicator, hosts: Hosts, wire: str, dtype: torch.dtype, sizes: tuple[int, int, int, int] = SIZES
) -> list[list[float]]:
    """Of what comes home, by experts whose outputs are random: squared errors on one level and two, and the norm."""
    two, figures = on_hosts(comm, hosts), []
    with (
        ExpertParallel(comm, *sizes, wire="none", transport="direct") as exact,
        ExpertParallel(comm, *sizes, wire=wire, transport="direct") as one_level,
        ExpertParallel(two, *sizes, wire=wire, transport="two_level") as ep,
    ):
        assert ep.transport == "two_level"
        for number in range(4):
            x, ids, weights = batch(comm.rank, number, dtype, sizes)
            d, expected = ep.dispatch(x, ids, weights), one_level.dispatch(x, ids, weights)
            for name in SEEN:
                seen, on_one = getattr(d, name), getattr(expected, name)
                assert seen.dtype == on_one.dtype and torch.equal(seen, on_one), name
            rows = torch.randn(d.tokens.shape, generator=torch.Generator().manual_seed(number + 9)).to(dtype)
            wide = exact.dispatch(x.float(), ids, weights)
            right = exact.combine(rows.float(), wide).double()
            y = ep.combine(rows, d)
            found = one_level.combine(rows, expected) - right, y - right, right
            figures.append([float(each.square().sum()) for each in found])
            assert not y[(ids < 0).all(1)].any()
            d = ep.dispatch(x, ids, weights)
            out = torch.full_like(y, 7.0)
            assert_same_bits("again", y, ep.combine(rows, d, out=out))
    return figures


def _errors(size: int, hosts: Hosts, wire: str, dtype: torch.dtype) -> tuple[float, float]:
    """Relative to the norm, over all ranks' rounds: on one level, and on two."""
    ranks = run_ranks(as_on_one_level, size, hosts, wire, dtype, mode="thread", timeout=200)
    one, two, norm = torch.tensor(ranks).sum((0, 1)).sqrt().tolist()
    return one / norm, two / norm


GATES = {"none": 0.0045, "int8": 0.0070, "int8:row": 0.012, "fp8": 0.04, "int8+h64": 0.0070, "int4+h64": 0.16}


@pytest.mark.parametrize("wire", exhaustive_but(["int8"], [*GATES]))
@pytest.mark.parametrize("hosts", exhaustive_but([TWO_BY_TWO, OTHERS[0]], [TWO_BY_TWO, *OTHERS]), ids=str)
def test_experts_see_what_they_see_on_one_level(hosts: Hosts, wire: str) -> None:
    size = sum(map(len, hosts))
    one, two = _errors(size, hosts, wire, torch.bfloat16)
    assert two <= GATES[wire] and two <= 1.1 * one, (one, two)


def test_exact_float32_rounds_differ_in_the_order_of_sums_alone() -> None:
    assert _errors(4, TWO_BY_TWO, "none", torch.float32)[1] <= 1e-7


@pytest.mark.parametrize(("hidden", "top_k"), [(1, 1), (20, 1), (16, 2)])
@pytest.mark.parametrize("wires", [("none", "none"), ("int6+h64", "int10"), (WireFormat("int8", 128, 16), "int4")])
def test_small_rows_and_one_expert_a_token(wires: tuple[Any, str], hidden: int, top_k: int) -> None:
    run_ranks(_small, 4, hidden, top_k, *wires, mode="thread", timeout=60)


def _small(comm: Communicator, hidden: int, top_k: int, wire: Any, combine_wire: str) -> None:
    """As staged, but for the rounding of sums. A rank has no tokens, so its ids of one column have a stride of 0."""
    x, ids, weights = batch(comm.rank, 0, torch.float32, (4, top_k, hidden, 7))
    homes, grads = [], []
    for transport in ("staged", "two_level"):
        with ExpertParallel(
            on_hosts(comm, TWO_BY_TWO), 4, top_k, hidden, 7, wire=wire, combine_wire=combine_wire, transport=transport
        ) as ep:
            inputs = x.clone().requires_grad_(), ids, weights.clone().requires_grad_()
            d = ep.dispatch(*inputs)
            y = ep.combine(d.tokens * 2, d)
            y.sum().backward()
            homes.append(y.detach())
            grads.append((inputs[0].grad, inputs[2].grad))
    torch.testing.assert_close(homes[1], homes[0], rtol=0, atol=0.15 * float(homes[0].abs().amax() if len(x) else 0))
    torch.testing.assert_close(grads[1], grads[0])


def test_no_rank_is_signalled_before_its_last_piece_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = TwoLevelRounds._forward

    def late(rounds: TwoLevelRounds, *piece: Any) -> Any:
        if rounds.rank == 0:  # rank 1, whose host it is too, has nothing else to wait for
            time.sleep(0.02)
        return forward(rounds, *piece)

    monkeypatch.setattr(staged, "PIECE_BYTES", (2048, 4096))  # of 5 records, and of 10
    monkeypatch.setattr(TwoLevelRounds, "_forward", late)
    run_ranks(as_on_one_level, 4, TWO_BY_TWO, "int8", torch.bfloat16, mode="thread", timeout=60)


def _crossing(comm: Communicator) -> tuple[list[int], list[int], list[int]]:
    """What a rank posts to each peer in dispatch, and in combine, of tokens that reach both hosts."""
    two, posted = on_hosts(comm, TWO_BY_TWO), [0] * comm.size
    post = two._exchange.post

    def counted(sends, receives, *rest):  # type: ignore[no-untyped-def]
        for peer, buffer in enumerate(sends):
            posted[peer] += 0 if buffer is None else buffer.numel()
        return post(sends, receives, *rest)

    two._exchange.post = counted  # type: ignore[method-assign]
    with ExpertParallel(two, *SIZES, wire="int8") as ep:
        x = torch.randn(TOKENS, HIDDEN)
        posted[:] = [0] * comm.size
        d = ep.dispatch(x, torch.tensor([[0, 3, 6, 9]]).expand(TOKENS, -1), torch.ones(TOKENS, TOP_K))
        dispatched, traffic = list(posted), d.dispatch_traffic
        posted[:] = [0] * comm.size
        ep.combine(d.tokens, d)
        message = ep._assembly.config.message_bytes(torch.float32)
        within = TOKENS * (message + ep.wire.row_bytes(HIDDEN)) + 8 * TOKENS * TOP_K + 12
        assert (traffic.rows, traffic.wire_bytes) == (2 * TOKENS, within)
        assert d.combine_traffic.wire_bytes == 2 * TOKENS * 4 * HIDDEN + TOKENS * ep.wire.row_bytes(HIDDEN)
        return dispatched, list(posted), [TOKENS * message, TOKENS * ep.wire.row_bytes(HIDDEN)]


def test_a_token_crosses_once_a_host_and_so_does_its_sum() -> None:
    for rank, (there, back, (messages, sums)) in enumerate(run_ranks(_crossing, 4)):
        partner = (rank + 2) % 4
        for peer in range(4):
            if peer != rank:  # beside the rows: a count for each, and how each ends the round
                assert there[peer] - 8 == (messages if peer == partner else 0)
                assert back[peer] - 1 == (sums if peer == partner else 0)


def _records_of_experts(comm: Communicator) -> None:
    """Rows that are quantised already, a row an expert or a record, come home as their float32 form would."""
    from thinwire import dequantize, quantize

    with ExpertParallel(on_hosts(comm, TWO_BY_TWO), *SIZES, wire="int8") as ep:
        for weighted in (False, True):
            homes = []
            for quantised in (False, True):
                d = ep.dispatch(*batch(comm.rank, 1, torch.bfloat16))
                rows = quantize(torch.sin((d.records if weighted else d.tokens).float()), "int8")
                given = rows if quantised else dequantize(rows, torch.float32)
                homes.append(ep.combine(given, d, weighted=weighted))
            assert_same_bits(f"weighted {weighted}", *homes)


def test_quantised_rows_come_home_as_their_float_form() -> None:
    run_ranks(_records_of_experts, 4, mode="thread", timeout=100)


def _refusals(comm: Communicator) -> list[str]:
    told = []
    with pytest.raises(TransportUnavailable) as one_host:
        ExpertParallel(comm, *SIZES, transport="two_level")
    two = on_hosts(comm, TWO_BY_TWO)
    with pytest.raises(TransportUnavailable) as direct:
        ExpertParallel(two, *SIZES, transport="direct")
    with pytest.raises(TransportUnavailable) as invariant:
        ExpertParallel(two, *SIZES, transport="two_level", invariant=True)
    told += [str(error.value) for error in (one_host, direct, invariant)]
    for options in ({"invariant": True}, {"dtype": torch.float64, "wire": "none"}):
        with ExpertParallel(two, *SIZES, **options) as ep:  # type: ignore[arg-type]
            assert ep.transport == "staged"
    with pytest.raises(CapacityError):
        ExpertParallel(two, EXPERTS, TOP_K, HIDDEN, 2**30, transport="two_level")
    with ExpertParallel(two, *SIZES) as ep:
        told.append(ep.explain())
        assert ep.transport == "two_level"
    each = on_hosts(comm, ((0,), (1,), (2,), (3,)))
    with ExpertParallel(each, *SIZES) as ep:
        assert ep.transport == "staged" and "its ranks are on several hosts" in ep.explain()
    return told


def test_what_cannot_take_two_levels_says_why() -> None:
    for one_host, direct, invariant, explained in run_ranks(_refusals, 4):
        assert one_host == "ExpertParallel cannot take two levels: its ranks are on one host"
        assert "its ranks are on several hosts: 2, of ranks 0-1 and 2-3" in direct
        assert "with invariant=True each expert's row goes home" in invariant
        assert "transport: two_level" in explained and "hosts: 2, of ranks 0-1 and 2-3" in explained


def _named_hosts(comm: Communicator, names: str) -> tuple[Hosts, str]:
    os.environ["THINWIRE_HOST"] = names[comm.rank]
    with comm.split(groups=[range(comm.size)]) as own, ExpertParallel(own, *SIZES, wire="none") as ep:
        x, ids, weights = batch(comm.rank, 0, torch.float32)
        d = ep.dispatch(x, ids, weights)
        ep.combine(d.tokens, d)
        return own.hosts, ep.transport


def test_the_environment_names_hosts() -> None:
    assert run_ranks(_named_hosts, 4, "abab") == [(((0, 2), (1, 3)), "two_level")] * 4
    assert run_ranks(_named_hosts, 2, "aa") == [(((0, 1),), "direct")] * 2
    with pytest.raises(RankError, match="THINWIRE_HOST is 'xx.*at most 100 printable characters"):
        run_ranks(_named_hosts, 2, "aa", env={"THINWIRE_HOST": "x" * 101})


def test_forwarders_serve_every_rank_once_in_each_host() -> None:
    for hosts in (TWO_BY_TWO, *OTHERS, hosts_of(["c", "a", "b", "a", "a", "c", "a"])):
        everyone = sorted(rank for members in hosts for rank in members)
        for number, members in enumerate(hosts):
            served = [rank for member in members for rank in served_by(hosts, member)]
            assert sorted(served) == everyone
            assert all(served_by(hosts, member)[0] == member for member in members)
            assert all(forwarder(hosts, rank, number) in members for rank in everyone)


def _hostile_messages(comm: Communicator) -> None:
    """A peer's message holds anything: it becomes no address, and ranks go on."""
    two = on_hosts(comm, TWO_BY_TWO)
    with ExpertParallel(two, *SIZES, wire="int8", transport="two_level") as ep:
        forward = ep._assembly.rounds._forward  # type: ignore[attr-defined]

        def spoilt(end, messages, row_bytes):  # type: ignore[no-untyped-def]
            generator = torch.Generator().manual_seed(comm.rank)
            messages.copy_(torch.randint(0, 256, messages.shape, dtype=torch.uint8, generator=generator))
            return forward(end, messages, row_bytes)

        for number in range(6):
            ep._assembly.rounds._forward = spoilt if number % 2 else forward  # type: ignore[attr-defined]
            d = ep.dispatch(*batch(comm.rank, number, torch.bfloat16))
            y = ep.combine(d.tokens, d)
            assert number % 2 or torch.isfinite(y).all()


def test_a_spoilt_message_is_no_address() -> None:
    run_ranks(_hostile_messages, 4)


def _rebuilt(comm: Communicator) -> str:
    """A host's ranks go on by themselves, on one level."""
    two = on_hosts(Communicator(comm.group, timeout=2.0), TWO_BY_TWO)
    ep = ExpertParallel(two, *SIZES, wire="int8")
    assert ep.transport == "two_level"
    mine = batch(comm.rank, 0, torch.bfloat16)
    ep.combine(ep.dispatch(*mine).tokens, ep._assembly.rounds.open_rounds[0])  # type: ignore[arg-type]
    if comm.rank >= 2:
        return ""
    with pytest.raises(PeerTimeout) as caught:
        ep.dispatch(*mine)
    assert caught.value.ranks == (2, 3), caught.value
    ep.rebuild()
    d = ep.dispatch(*mine)
    ep.combine(d.tokens, d)
    assert ep.comm.hosts == ((0, 1),)
    return ep.transport


def test_a_host_that_is_left_goes_on_on_one_level() -> None:
    assert run_ranks(_rebuilt, 4, timeout=60) == ["direct", "direct", "", ""]


def _closed_in_its_wait(comm: Communicator, leg: str) -> None:
    """A signal handler closes what waits for the network, or for the parts of its host."""
    two = on_hosts(Communicator(comm.group, timeout=3.0), TWO_BY_TWO)
    ep = ExpertParallel(two, *SIZES, wire="int8")
    mine = batch(0, 0, torch.bfloat16)
    d = ep.dispatch(*mine)
    ep.combine(d.tokens, d)
    if leg == "combine":
        d = ep.dispatch(*mine)
    if comm.rank != 1:
        signal.signal(signal.SIGALRM, lambda *_: ep.close())
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises((LaneError, PeerTimeout)):
            ep.combine(d.tokens, d) if leg == "combine" else ep.dispatch(*mine)
    elif leg == "dispatch":  # in which its partner waits for its records

        def late(*arguments: object) -> None:
            time.sleep(1.5)
            backend.pack_rows(*arguments)

        config = ep._assembly.rounds.config
        backend = config.dispatch_backend
        config.__dict__["dispatch_backend"] = replace(backend, pack_rows=late)
        ep.dispatch(*mine)  # to which all have sent their part
    with contextlib.suppress(PeerTimeout):
        two.barrier()


@pytest.mark.exhaustive
@pytest.mark.parametrize("leg", ["dispatch", "combine"])
def test_who_closes_it_in_a_wait_ends_that(leg: str) -> None:
    run_ranks(_closed_in_its_wait, 4, leg, timeout=60)


def _hangs(*_: object) -> None:
    time.sleep(12)
    raise TypeError


def _hung(comm: Communicator, where: str) -> tuple[int, ...]:
    """Rank 0 hangs before it forwards, or before it combines, and lives."""
    hosts = ((0, 1, 2), (3, 4, 5))
    ep = ExpertParallel(on_hosts(Communicator(comm.group, timeout=2.0), hosts), *SIZES, wire="int8")
    d = ep.dispatch(*batch(comm.rank, 0, torch.bfloat16))
    ep.combine(d.tokens, d)
    if comm.rank == 0:
        if where == "forward":
            ep._assembly.rounds._forward = _hangs  # type: ignore[attr-defined]
            with pytest.raises(TypeError):
                ep.dispatch(*batch(comm.rank, 1, torch.bfloat16))
        else:
            ep.dispatch(*batch(comm.rank, 1, torch.bfloat16))
            time.sleep(12)
        return (0,)
    with pytest.raises(PeerTimeout) as caught:
        d = ep.dispatch(*batch(comm.rank, 1, torch.bfloat16))
        ep.combine(d.tokens, d)
    return caught.value.ranks


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["forward", "experts"])
def test_a_rank_that_hangs_is_named_and_its_host_is_not(where: str) -> None:
    # Who is stuck must say so within half a second of the others, which other tests on these cores may prevent.
    assert any(run_ranks(_hung, 6, where, timeout=90) == [(0,)] * 6 for _ in range(2))


def _abandoned(comm: Communicator) -> None:
    """A rank that abandons a round adds nothing to it, and neither do its sums of the round before."""
    with (
        ExpertParallel(comm, *SIZES, wire="none", transport="direct") as one_level,
        ExpertParallel(on_hosts(comm, TWO_BY_TWO), *SIZES, wire="none", transport="two_level") as ep,
    ):
        mine = batch(comm.rank, 0, torch.float32)
        for number in range(3):
            homes = []
            for each in (one_level, ep):
                d = each.dispatch(*mine)
                if number == 1 and comm.rank == 1:
                    d.abandon()
                else:
                    homes.append(each.combine(d.tokens * 3 + 1, d))
            torch.testing.assert_close(*homes or (0, 0), rtol=1e-5, atol=1e-5)


def test_a_rank_that_abandons_a_round_adds_nothing() -> None:
    run_ranks(_abandoned, 4, mode="thread", timeout=60)
