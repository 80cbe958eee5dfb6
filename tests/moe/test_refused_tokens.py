"""One rank's tokens are refused: the others are told which rank's, at once, and all go on. And what users overwrite."""

from __future__ import annotations

import time

import pytest
import torch

from tests.helpers.hosts import for_transport
from tests.helpers.speeds import exhaustive_but
from thinwire.comm.communicator import Communicator
from thinwire.errors import ArgumentError, CapacityError, RoutingError, ThinwireError
from thinwire.moe.layer import MoELayer
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

pytest.importorskip("numba", reason="CPU ranks need numba")

NUM_EXPERTS, TOP_K, HIDDEN, MOST = 5, 2, 32, 4
TIMEOUT = 20.0
INTERPRETED = {"TRITON_INTERPRET": "1", "THINWIRE_BACKEND": "triton"}


def _make(comm: Communicator, transport: str) -> ExpertParallel:
    comm = for_transport(comm, transport)
    return ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MOST, wire="none", transport=transport, timeout=TIMEOUT)


def _good(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.arange(MOST * TOP_K).view(MOST, TOP_K) % NUM_EXPERTS
    return torch.full((MOST, HIDDEN), comm.rank + 1.0), ids, torch.full((MOST, TOP_K), 0.5)


def _whole_round(ep: ExpertParallel) -> None:
    x, ids, weights = _good(ep.comm)
    d = ep.dispatch(x, ids, weights)
    assert torch.equal(ep.combine(d.tokens * 2, d), x * 2)


def _refused(comm: Communicator, transport: str) -> None:
    x, ids, weights = _good(comm)
    with _make(comm, transport) as ep:
        assert ep.transport == transport
        wrong: list[tuple[tuple[object, ...], type[ThinwireError], str]] = [
            ((x, ids + NUM_EXPERTS, weights), RoutingError, "topk_ids runs from"),
            ((x, ids - 2, weights), RoutingError, "topk_ids runs from -2"),
            ((x[:, :-1], ids, weights), RoutingError, "x is"),
            ((torch.cat([x, x]), torch.cat([ids, ids]), torch.cat([weights, weights])), CapacityError, "8 tokens"),
            ((x.numpy(), ids, weights), ArgumentError, "x is a ndarray"),
            ((x.to_sparse(), ids, weights), ThinwireError, "x is a Tensor of layout torch.sparse_coo"),
        ]
        for number, (arguments, error, message) in enumerate(wrong):
            odd = number % comm.size
            if number % 2:  # over an open round, which is over then on all ranks
                ep.dispatch(*_good(comm))
            start = time.monotonic()
            if comm.rank == odd:
                with pytest.raises(error, match=message):
                    ep.dispatch(*arguments)  # type: ignore[arg-type]
            else:
                what = "more tokens than max_tokens" if error is CapacityError else message.split()[0]
                with pytest.raises(RoutingError, match=rf"rank {odd} refused what .*there \({what} on rank {odd}\)"):
                    ep.dispatch(*_good(comm))
            assert time.monotonic() - start < TIMEOUT / 2
            if number != 2:  # and once two refusals, one after the other
                _whole_round(ep)
        _whole_round(ep)


@pytest.mark.parametrize("transport", ["direct", "staged", "two_level"])
@pytest.mark.parametrize("mode", exhaustive_but(["thread"], ["process", "thread"]))
def test_the_peers_of_a_rank_whose_tokens_are_refused_are_told(transport: str, mode: str) -> None:
    run_ranks(_refused, 3, transport, mode=mode, timeout=100)


@pytest.mark.exhaustive
def test_tritons_kernels_tell_them_too() -> None:
    run_ranks(_refused, 2, "direct", env=INTERPRETED, timeout=200)


def _layer_refuses(comm: Communicator, transport: str) -> None:
    with _make(comm, transport) as ep, torch.no_grad():
        layer = MoELayer(HIDDEN, 8, NUM_EXPERTS, TOP_K).shard(ep)
        x = torch.randn(2, HIDDEN)
        wrong: list[tuple[object, type[Exception], str]] = [
            (x[:, :-1], RoutingError, "x must be floating point"),
            (x.numpy(), ThinwireError, "x is a ndarray"),
            (x.double(), RuntimeError, "dtype"),  # which is the router's to say
        ]
        for number, (tokens, error, message) in enumerate(wrong):
            odd = number % comm.size
            start = time.monotonic()
            if comm.rank == odd:
                with pytest.raises(error, match=message):
                    layer(tokens)
            else:
                why = r"\(x on rank" if message.startswith("x ") else "and raised why"
                with pytest.raises(RoutingError, match=f"rank {odd} refused what dispatch was given there,? ?{why}"):
                    layer(x)
            assert time.monotonic() - start < TIMEOUT / 2
            assert layer(x).shape == x.shape
    with pytest.raises(RoutingError, match="x must be floating point"):
        layer(x[:, :-1])  # of a closed one nobody is told


@pytest.mark.parametrize("transport", ["direct", "staged", "two_level"])
def test_the_peers_of_a_rank_whose_layer_refuses_its_input_are_told(transport: str) -> None:
    run_ranks(_layer_refuses, 2, transport, mode="thread", timeout=100)


def _frozen_on_one(comm: Communicator, transport: str) -> None:
    with _make(comm, transport) as ep:
        layer = MoELayer(HIDDEN, 8, NUM_EXPERTS, TOP_K).shard(ep)
        layer.requires_grad_(False)
        layer.experts.requires_grad_(comm.rank == 1)
        x = torch.randn(2, HIDDEN)
        with pytest.raises(RoutingError, match="no gradients of layer 1.*gradients enabled|enabled.*no gradients"):
            layer(x)
        layer.experts.requires_grad_()
        layer(x).sum().backward()
        assert all(weight.grad is not None for weight in layer.experts.parameters())


@pytest.mark.parametrize("transport", ["direct", "staged", "two_level"])
def test_experts_that_are_frozen_on_some_ranks_are_refused_at_dispatch(transport: str) -> None:
    """Or the others' backward would wait for these ranks in vain."""
    run_ranks(_frozen_on_one, 2, transport, mode="thread", timeout=100)


def _all_refused(comm: Communicator, transport: str) -> None:
    x, ids, weights = _good(comm)
    with _make(comm, transport) as ep:
        for _ in range(3):
            with pytest.raises(RoutingError, match="topk_ids runs from"):
                ep.dispatch(x, ids + 9, weights)
        _whole_round(ep)


@pytest.mark.parametrize("transport", ["direct", "staged", "two_level"])
def test_all_ranks_may_refuse(transport: str) -> None:
    run_ranks(_all_refused, 2, transport, mode="thread")


def _written_into(comm: Communicator, transport: str, hostile: int) -> None:
    """Processes, as a wrong address would end this one."""
    with _make(comm, transport) as ep:
        for name in ("index", "expert_offsets", "expert_counts"):
            x, ids, weights = _good(comm)
            d = ep.dispatch(x, ids, weights)
            used = d.tokens.shape[0]
            seen = getattr(d, name)
            seen.fill_(hostile)
            d._tokens = None
            for capacity in (used, used + 3):
                try:
                    rows, _ = d.gather(capacity)
                    assert rows.shape == (capacity, HIDDEN)
                except RoutingError as error:
                    assert "written into" in str(error)
            try:
                assert d.tokens.shape[1] == HIDDEN
            except RoutingError as error:
                assert "into" in str(error)
            # What goes home depends on none of them.
            assert torch.equal(ep.combine(torch.ones(used, HIDDEN), d), torch.ones(MOST, HIDDEN))
        _whole_round(ep)


@pytest.mark.parametrize("transport", ["direct", "staged"])
@pytest.mark.parametrize("hostile", exhaustive_but([2**40], [2**40, -(2**62), 2**63 - 1, -2]))
def test_what_users_write_into_a_round_is_no_address(transport: str, hostile: int) -> None:
    run_ranks(_written_into, 1, transport, hostile)


@pytest.mark.exhaustive
@pytest.mark.parametrize("hostile", [2**40, -(2**62), 2**63 - 1])
def test_what_users_write_into_a_round_is_no_address_of_tritons_kernels(hostile: int) -> None:
    run_ranks(_written_into, 1, "direct", hostile, env=INTERPRETED, timeout=200)
