"""Gradients of rounds against those of the unsharded model in plain torch, and what happens where there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.helpers.files import unnumbered
from tests.helpers.hosts import for_transport
from tests.helpers.speeds import exhaustive_but
from thinwire.comm.communicator import Communicator
from thinwire.errors import LaneError, PeerTimeout, RoutingError
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.layer import MoELayer
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

pytest.importorskip("numba", reason="CPU ranks need numba")

NUM_EXPERTS, TOP_K, HIDDEN, MOST = 7, 3, 72, 9
KINDS = ("ragged", "empty_first", "one_expert", "one_token")
TRANSPORTS = ("direct", "staged", "two_level")

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _inputs(rank: int, kind: str, seed: int = 0) -> Inputs:
    """A rank's x, weights and experts, which want gradients, and ids: some missing, some twice."""
    generator = torch.Generator().manual_seed(31 * seed + rank)
    count = {"ragged": (5 * rank + 4) % 9, "empty_first": 5 * (rank > 0), "one_expert": 4, "one_token": rank == 1}[kind]
    x = torch.randn(int(count), HIDDEN, generator=generator)
    ids = torch.randint(-1, NUM_EXPERTS, (len(x), TOP_K), generator=generator)
    if kind == "one_expert":
        ids[:] = NUM_EXPERTS - 1
    if len(x) > 2:
        ids[1] = -1
        ids[2, 1] = ids[2, 0]
    weights = torch.rand(len(x), TOP_K, generator=generator)
    experts = torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(3)) / HIDDEN**0.5
    return x.requires_grad_(), ids, weights.requires_grad_(), experts.requires_grad_()


def _target(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1000 + rank))


def _unsharded(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    for expert in range(NUM_EXPERTS):
        weight = (weights * (ids == expert)).sum(1, keepdim=True)
        y = y + weight * (x @ experts[expert]).tanh()
    return y


def _run_experts(d: Dispatched, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    pieces, end = [rows[:0]], 0
    for expert, (start, count) in enumerate(zip(d.expert_offsets.tolist(), d.expert_counts.tolist(), strict=False)):
        pieces += [torch.zeros(start - end, HIDDEN), (rows[start : start + count] @ experts[expert]).tanh()]
        end = start + count
    return torch.cat([*pieces, torch.zeros(len(rows) - end, HIDDEN)])


def _make(comm: Communicator, transport: str, **options: Any) -> ExpertParallel:
    comm = for_transport(comm, transport)
    return ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MOST, **{"wire": "none", "transport": transport, **options})


def _sharded(ep: ExpertParallel, inputs: Inputs, lane: int = 0, capacity: int | None = None) -> torch.Tensor:
    x, ids, weights, experts = inputs
    d = ep.dispatch(x, ids, weights, lane=lane)
    rows = d.tokens if capacity is None else d.gather(capacity)[0]
    return ep.combine(_run_experts(d, rows, experts[ep.local_experts.start : ep.local_experts.stop]), d)


def _expected(comm: Communicator, kind: str, model: Callable[[Inputs], torch.Tensor]) -> list[torch.Tensor | None]:
    """This rank's gradients of x and weights, and those of the experts from all ranks' tokens."""
    own: list[torch.Tensor | None] = []
    of_experts = torch.zeros(NUM_EXPERTS, HIDDEN, HIDDEN)
    for rank in range(comm.size):
        inputs = _inputs(rank, kind)
        y = model(inputs)
        (y * _target(rank, len(y))).sum().backward()
        if inputs[3].grad is not None:
            of_experts += inputs[3].grad
        if rank == comm.rank:
            own = [inputs[0].grad, inputs[2].grad]
    return [*own, of_experts]


def _error(name: str, expected: torch.Tensor, got: torch.Tensor | None) -> float:
    """The largest difference, relative to the largest gradient."""
    assert got is not None and got.shape == expected.shape and got.dtype == expected.dtype, name
    if not expected.numel() or not expected.any():
        assert not got.any(), name
        return 0.0
    return float((got - expected).abs().max() / expected.abs().max())


def _compare(comm: Communicator, kind: str, model: Any, sharded: Any, bound: float = 1e-6) -> None:
    expected = _expected(comm, kind, model)
    inputs = _inputs(comm.rank, kind)
    y = sharded(inputs)
    (y * _target(comm.rank, len(y))).sum().backward()
    for name, want, got in zip(("x", "weights", "experts"), expected, (inputs[0], inputs[2], inputs[3]), strict=True):
        grad = got.grad
        if name == "experts":
            # Only the rank that owns an expert has its gradient.
            grad = torch.zeros_like(want) if grad is None else grad
            total = grad.clone()
            comm.all_reduce(total)
            assert torch.equal(total[grad != 0], grad[grad != 0])
            grad = total
        assert _error(name, want, grad) <= bound, f"{kind}: {name}: {_error(name, want, grad)}"


def _one_layer(comm: Communicator, transport: str) -> None:
    for align in (1, 4):
        with _make(comm, transport, align=align) as ep:
            assert ep.transport == transport
            for kind in KINDS:
                _compare(comm, kind, lambda inputs: _unsharded(*inputs), lambda inputs: _sharded(ep, inputs))
                _compare(
                    comm, kind, lambda inputs: _unsharded(*inputs), lambda inputs: _sharded(ep, inputs, capacity=200)
                )


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", exhaustive_but([3], [1, 2, 3, 4]))
def test_gradients_are_those_of_the_unsharded_model(size: int, transport: str) -> None:
    if size > 1 or transport != "two_level":  # which needs two hosts
        run_ranks(_one_layer, size, transport, mode="thread", timeout=100)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("transport", "backend"), [("direct", "numba"), ("staged", "numba"), ("staged", "torch")])
def test_gradients_of_processes_are_those_of_the_unsharded_model(transport: str, backend: str) -> None:
    run_ranks(_one_layer, 3, transport, env={"THINWIRE_BACKEND": backend}, timeout=100)


def _by_record(ep: ExpertParallel, inputs: Inputs, capacity: int | None) -> torch.Tensor:
    """The layer over one row a record, weighted here; with a capacity in a fixed shape."""
    x, ids, weights, experts = inputs
    d = ep.dispatch(x, ids, weights)
    if capacity is None:
        rows, local, factors = d.records, d.record_ids, d.record_weights
    else:
        rows, local, factors, *_ = d.gather_records(capacity)
    total = torch.zeros(rows.shape)
    for expert in range(len(ep.local_experts)):
        weight = (factors * (local == expert)).sum(1, keepdim=True)
        total = total + weight * (rows @ experts[ep.local_experts.start + expert]).tanh()
    return ep.combine(total, d, weighted=True)


def _records_layer(comm: Communicator, transport: str) -> None:
    for align in (1, 4):
        with _make(comm, transport, align=align) as ep:
            for kind in KINDS:
                for capacity in (None, 50):

                    def sharded(inputs: Inputs, capacity: int | None = capacity) -> torch.Tensor:
                        return _by_record(ep, inputs, capacity)

                    _compare(comm, kind, lambda inputs: _unsharded(*inputs), sharded)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", exhaustive_but([3], [1, 2, 3, 4]))
def test_gradients_of_weighted_records_are_those_of_the_unsharded_model(size: int, transport: str) -> None:
    if size > 1 or transport != "two_level":  # which needs two hosts
        run_ranks(_records_layer, size, transport, mode="thread", timeout=100)


def _weights_of_rows(comm: Communicator, transport: str) -> None:
    """What is done with d.weights beside the round adds to the weights' gradients; only they want one here."""
    with _make(comm, transport, align=4) as ep:
        x, ids, weights, experts = inputs = _inputs(comm.rank, "ragged")
        mine = experts[ep.local_experts.start : ep.local_experts.stop].detach()
        x.requires_grad_(False)
        for both in (True, False):
            weights.grad = None
            d = ep.dispatch(x, ids, weights)
            aside = (d.weights * (d.source[:, 1] + 1)).square().sum() + d.gather_routing(2).weights.sum() * 0
            y = ep.combine(_run_experts(d, d.tokens, mine), d)
            (aside + (y.sum() if both else 0 * y.sum())).backward()
            merged = torch.where(ids[:, :, None] == ids[:, None], weights.detach()[:, None], 0.0).sum(2)
            expected = 2 * merged * (torch.arange(len(x)) + 1).unsqueeze(1) ** 2 * (ids >= 0)
            if both:
                got, weights.grad = weights.grad, None
                _unsharded(*(tensor.detach() for tensor in inputs[:2]), weights, experts).sum().backward()
                assert weights.grad is not None
                expected, weights.grad = expected + weights.grad, got
            assert _error("weights", expected, weights.grad) <= 1e-6


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_that_experts_see_have_a_gradient(transport: str) -> None:
    run_ranks(_weights_of_rows, 2, transport, mode="thread", timeout=100)


def _disagree(comm: Communicator, transport: str) -> None:
    x, ids, weights, _ = _inputs(comm.rank, "one_expert")
    with _make(comm, transport) as ep:
        with pytest.raises(RoutingError, match="gradients"):
            ep.dispatch(x.detach() if comm.rank else x, ids, weights)
        with torch.no_grad():
            d = ep.dispatch(x, ids, weights)
        with pytest.raises(RoutingError, match="dispatched without"):
            ep.combine(d.tokens, d)  # whether this rank's rows want a gradient or not
        d = ep.dispatch(x, ids, weights)
        with pytest.raises(RoutingError, match="leave out away"):
            ep.combine(d.tokens, d, out=torch.empty(x.shape))
        ep.combine(d.tokens, d).sum().backward()
        assert x.grad is not None and weights.grad is not None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_want_different_gradients_are_told(transport: str) -> None:
    run_ranks(_disagree, 2, transport, mode="thread")


@pytest.mark.exhaustive
def test_gradients_through_tritons_kernels_are_those_of_the_unsharded_model() -> None:
    env = {"TRITON_INTERPRET": "1", "THINWIRE_BACKEND": "triton"}
    run_ranks(_one_layer, 2, "direct", env=env, timeout=280)


# ---------------------------------------------------------------------------------------------------------------------
# Order: several rounds, several lanes, recomputation


def _three(layer: Callable[..., torch.Tensor], inputs: Inputs) -> torch.Tensor:
    """One layer after two that do not depend on each other."""
    x, ids, weights, experts = inputs
    first = layer((x, ids, weights, experts))
    second = layer((x.cos(), ids.flip(1), weights.flip(1), experts))
    return layer((first - second, ids.roll(1, 1), weights, experts)) + first


def _two_lanes(ep: ExpertParallel, inputs: Inputs) -> torch.Tensor:
    """The same with both first layers under way at once."""
    x, ids, weights, experts = inputs
    mine = experts[ep.local_experts.start : ep.local_experts.stop]
    both = ((x, ids, weights), (x.cos(), ids.flip(1), weights.flip(1)))
    rounds = [ep.dispatch(*tokens, lane=lane) for lane, tokens in enumerate(both)]
    first, second = (ep.combine(_run_experts(d, d.tokens, mine), d) for d in rounds)
    return _sharded(ep, (first - second, ids.roll(1, 1), weights, experts)) + first


def _recomputed(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *arguments: checkpoint(function, *arguments, use_reentrant=False)


def _several_rounds(comm: Communicator, transport: str, kind: str) -> None:
    def unsharded(inputs: Inputs) -> torch.Tensor:
        return _three(lambda some: _unsharded(*some), inputs)

    with _make(comm, transport, lanes=2) as ep:

        def layer(inputs: Inputs) -> torch.Tensor:
            return _sharded(ep, inputs)

        for sharded in (
            lambda inputs: _three(layer, inputs),
            lambda inputs: _two_lanes(ep, inputs),
            lambda inputs: _three(_recomputed(layer), inputs),
            _recomputed(lambda inputs: _three(layer, inputs)),
            _recomputed(lambda inputs: _two_lanes(ep, inputs)),
            _recomputed(lambda inputs: _three(_recomputed(layer), inputs)),
        ):
            _compare(comm, kind, unsharded, sharded, bound=3e-6)


@pytest.mark.parametrize("transport", exhaustive_but(["direct"], TRANSPORTS))
@pytest.mark.parametrize("kind", exhaustive_but(["empty_first"], ["empty_first", "ragged"]))
def test_several_rounds_and_lanes_and_recomputations_run_backward_in_order(kind: str, transport: str) -> None:
    run_ranks(_several_rounds, 3, transport, kind, mode="thread", timeout=100)


def _frozen(comm: Communicator, transport: str) -> None:
    """What wants no gradient gets none, and what does gets the same; recomputed or not."""
    with _make(comm, transport) as ep:
        for wanted in (
            (True, False, True), (False, True, True), (False, False, True), (True, False, False), (False, True, False),
        ):  # fmt: skip
            for sharded in (lambda inputs: _sharded(ep, inputs), _recomputed(lambda inputs: _sharded(ep, inputs))):
                expected = _expected(comm, "ragged", lambda inputs: _unsharded(*inputs))
                inputs = _inputs(comm.rank, "ragged")
                trained = (inputs[0], inputs[2], inputs[3])
                for tensor, wants in zip(trained, wanted, strict=True):
                    tensor.requires_grad_(wants)
                y = sharded(inputs)
                (y * _target(comm.rank, len(y))).sum().backward()
                for number, (want, tensor, wants) in enumerate(zip(expected, trained, wanted, strict=True)):
                    if not wants:
                        assert tensor.grad is None
                    elif number < 2:
                        assert want is not None and _error("frozen", want, tensor.grad) <= 1e-6
                    elif len(ep.local_experts):
                        mine = slice(ep.local_experts.start, ep.local_experts.stop)
                        assert want is not None and tensor.grad is not None
                        assert _error("frozen", want[mine], tensor.grad[mine]) <= 1e-6


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_frozen_inputs_get_no_gradient(transport: str) -> None:
    run_ranks(_frozen, 2, transport, mode="thread", timeout=100)


def _experts_alone(comm: Communicator, transport: str, by_record: bool) -> None:
    """In a loop that leaves out experts without rows, so that the output of a rank without any wants no gradient."""
    with _make(comm, transport, lanes=2) as ep:
        first, wanted = ep.local_experts.start if len(ep.local_experts) else 0, []
        for kind in KINDS * 2:  # of the second ones some ranks have rows that had none
            expected = _expected(comm, kind, lambda inputs: _unsharded(*inputs))[2]
            x, ids, weights, experts = _inputs(comm.rank, kind)
            d = ep.dispatch(x.detach(), ids, weights.detach(), lane=len(wanted) % 2)
            counts = d.expert_counts.tolist()
            parts = [
                (part @ experts[first + place]).tanh() for place, part in enumerate(d.tokens.split(counts)) if len(part)
            ]
            rows = torch.cat(parts) if parts else d.tokens
            if by_record:
                of_records = d.record_ids[:, 0] >= 0
                y = ep.combine(d.records[of_records] * experts[first, 0, 0], d, weighted=True)
            else:
                y = ep.combine(rows, d)
            (y * _target(comm.rank, len(y))).sum().backward()
            wanted.append(bool(parts))
            if not by_record and experts.grad is not None:
                mine = slice(first, first + len(ep.local_experts))
                assert expected is not None and _error(kind, expected[mine], experts.grad[mine]) <= 1e-6
            assert by_record or (experts.grad is not None) == bool(parts)
        with torch.no_grad():
            d = ep.dispatch(x, ids, weights)
            assert not ep.combine(d.tokens, d).requires_grad
        out = torch.empty(x.shape)
        d = ep.dispatch(x.detach(), ids, weights.detach())
        assert ep.combine(d.tokens, d, out=out) is out and not out.requires_grad  # nothing wants one


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("by_record", [False, True], ids=["rows", "records"])
def test_experts_alone_are_trained_on_ranks_with_and_without_rows(by_record: bool, transport: str) -> None:
    run_ranks(_experts_alone, 3, transport, by_record, mode="thread", timeout=100)


def _without_experts(comm: Communicator, transport: str) -> None:
    """One expert, so other ranks have no tensors of experts to save, and nothing of theirs asks for a recomputation."""
    comm = for_transport(comm, transport)
    with ExpertParallel(comm, 1, 1, HIDDEN, MOST, wire="none", transport=transport, timeout=5.0) as ep:
        x, ids, weights, experts = _inputs(comm.rank, "one_expert")
        rounds = []

        def layer(x: torch.Tensor) -> torch.Tensor:
            d = ep.dispatch(x, torch.zeros(len(x), 1, dtype=torch.int64), weights.detach()[:, :1])
            rounds.append(d)
            return ep.combine(_run_experts(d, d.tokens, experts[: len(ep.local_experts)]), d)

        recomputed = checkpoint(layer, x, use_reentrant=False)
        recomputed.sum().backward()
        assert len(rounds) == 2, "it was not recomputed"
        first, x.grad = x.grad, None
        layer(x).sum().backward()
        assert first is not None and x.grad is not None and torch.equal(first, x.grad)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_without_experts_recompute_too(transport: str) -> None:
    run_ranks(_without_experts, 2, transport, mode="thread", timeout=20)


def _islands(comm: Communicator, transport: str) -> None:
    with _make(comm, transport) as ep:
        x, ids, weights, experts = inputs = _inputs(comm.rank, "one_expert")
        with torch.no_grad():
            assert not _sharded(ep, inputs).requires_grad
        d = ep.dispatch(x, ids, weights)
        with torch.no_grad():
            assert not d.tokens.requires_grad
            assert not ep.combine(d.tokens, d).requires_grad
        # Rows that were looked at before are gathered again.
        d = ep.dispatch(x, ids, weights)
        with torch.no_grad():
            d.tokens.sum()
        assert d.tokens.requires_grad
        y = ep.combine(d.tokens, d)
        y.sum().backward(retain_graph=True)
        assert x.grad is not None
        first, x.grad = x.grad, None
        y.sum().backward()  # the plan serves as often as the graph does
        assert x.grad is not None and torch.equal(first, x.grad)
        # Only a part of the graph: the round's second leg is left out, on every rank.
        x.grad = None
        d = ep.dispatch(x, ids, weights)
        expert_out = d.tokens * 2
        y = ep.combine(expert_out, d)
        (part,) = torch.autograd.grad(y.sum(), expert_out, retain_graph=True)
        assert part.shape == expert_out.shape
        y.sum().backward()
        assert x.grad is not None and torch.equal(x.grad, 2 * first)
        # Rows that are gathered twice, of which the second time some do not fit.
        x.grad = None
        d = ep.dispatch(x, ids, weights)
        fewer, _ = d.gather(len(d.tokens) // 2)
        padded = torch.cat([fewer, torch.zeros(len(d.tokens) - len(fewer), HIDDEN)])
        ep.combine(d.tokens + padded, d).sum().backward()
        both, x.grad = x.grad, None
        d = ep.dispatch(x, ids, weights)
        kept = torch.arange(len(d.tokens)).unsqueeze(1) < len(fewer)
        ep.combine(d.tokens * torch.where(kept, 2.0, 1.0), d).sum().backward()
        assert both is not None and x.grad is not None and torch.equal(both, x.grad)
        # The rows alone, without what they come to.
        x.grad = None
        d = ep.dispatch(x, ids, weights)
        rows = d.tokens
        d.abandon()
        rows.sum().backward()
        assert x.grad is not None and torch.equal(x.grad, (ids >= 0).any(1, keepdim=True).expand(x.shape).float())
        # A graph that outlives its object.
        d = ep.dispatch(x, ids, weights)
        y = ep.combine(d.tokens, d)
    with pytest.raises(LaneError, match="closed"):
        y.sum().backward()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_parts_of_a_graph(transport: str) -> None:
    run_ranks(_islands, 2, transport, mode="thread", timeout=60)


def _out_of_order(comm: Communicator, transport: str) -> None:
    ep = _make(Communicator(comm.group, timeout=2.0) if transport == "staged" else comm, transport)
    x, ids, weights, experts = _inputs(comm.rank, "one_expert")
    both = [_sharded(ep, (x, ids, weights, experts)) for _ in range(2)]
    with pytest.raises((RoutingError, PeerTimeout)) as caught:
        both[comm.rank].sum().backward()
    assert caught.type is (RoutingError if transport == "direct" else PeerTimeout), caught.value
    if transport == "direct":
        assert "of round 1" in str(caught.value) and "of round 2" in str(caught.value)
        _sharded(ep, (x, ids, weights, experts)).sum().backward()
        assert x.grad is not None  # and all may go on


@pytest.mark.parametrize(
    ("transport", "mode"), [("direct", "thread"), pytest.param("staged", "process", marks=pytest.mark.exhaustive)]
)
def test_ranks_that_run_backward_of_different_rounds_exchange_nothing(transport: str, mode: str) -> None:
    run_ranks(_out_of_order, 2, transport, mode=mode, timeout=60)


# ---------------------------------------------------------------------------------------------------------------------
# Wires and dtypes


def _quantized(comm: Communicator, transport: str, wires: dict[str, str], dtype: torch.dtype) -> list[float]:
    """Squared errors and squares of gradients of x, weights and experts."""
    expected = _expected(comm, "ragged", lambda inputs: _unsharded(*inputs))
    x, ids, weights, experts = _inputs(comm.rank, "ragged")
    with _make(comm, transport, **wires) as ep:
        y = _sharded(ep, (x.to(dtype), ids, weights, experts.to(dtype)))
        assert y.dtype == dtype
        (y.float() * _target(comm.rank, len(y))).sum().backward()
    mine = slice(ep.local_experts.start, ep.local_experts.stop)
    figures = []
    for want, got in zip(expected, (x.grad, weights.grad, experts.grad), strict=True):
        assert want is not None and got is not None
        if want.dim() == 3:
            want, got = want[mine], got[mine]
        figures += [float((got - want).square().sum()), float(want.square().sum())]
    return figures


@pytest.mark.parametrize(
    ("wires", "dtype"),
    [
        ({"grad_wire": "int8"}, torch.float32),
        ({"wire": "int8"}, torch.float32),
        ({"wire": "int8", "grad_wire": "int8"}, torch.float32),
        ({"grad_wire": "int8:row"}, torch.float16),
        ({}, torch.bfloat16),
    ],
)
def test_gradients_of_quantised_wires_are_within_two_percent(wires: dict[str, str], dtype: torch.dtype) -> None:
    direct, staged = (
        run_ranks(_quantized, 3, name, wires, dtype, mode="thread", timeout=60) for name in TRANSPORTS[:2]
    )
    assert direct == staged
    total = torch.tensor(staged).view(3, 3, 2).sum(0)
    errors = (total[:, 0] / total[:, 1]).sqrt()
    print(f"{wires}, {dtype}: relative errors of x, weights and experts {errors.tolist()}")
    assert (errors <= 0.02).all() and (errors > 1e-4).all(), errors.tolist()


def _layer(comm: Communicator, transport: str, weights: dict[str, torch.Tensor]) -> None:
    """A layer whose experts alone are trained, and one of which everything is."""
    for frozen in (False, True):
        whole, sharded = (MoELayer(HIDDEN, 16, NUM_EXPERTS, TOP_K) for _ in range(2))
        for layer in (whole, sharded):
            layer.load_state_dict(weights)
            layer.router.requires_grad_(not frozen)
        with _make(comm, transport) as ep:
            sharded.shard(ep)
            xs = [_inputs(rank, "empty_first")[0].detach().requires_grad_(not frozen) for rank in range(comm.size)]
            own = xs[comm.rank].detach().clone().requires_grad_(not frozen)
            for rank, x in enumerate(xs):
                (whole(x) * _target(rank, len(x))).sum().backward()
            (sharded(own) * _target(comm.rank, len(own))).sum().backward()
        mine = slice(sharded.local_experts.start, sharded.local_experts.stop)
        for name, weight in sharded.experts.named_parameters():
            grad = whole.experts.get_parameter(unnumbered(name)).grad
            assert grad is not None and _error(name, grad[mine], weight.grad) <= 1e-6
        if frozen:
            assert own.grad is None
            continue
        assert xs[comm.rank].grad is not None and _error("x", xs[comm.rank].grad, own.grad) <= 1e-6
        total = torch.zeros_like(sharded.router.weight)
        total += sharded.router.weight.grad if sharded.router.weight.grad is not None else 0
        comm.all_reduce(total)
        assert whole.router.weight.grad is not None and _error("router", whole.router.weight.grad, total) <= 1e-6


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sharded_layer_trains_as_the_unsharded_one(transport: str) -> None:
    torch.manual_seed(5)  # here: threads share torch's random numbers
    weights = MoELayer(HIDDEN, 16, NUM_EXPERTS, TOP_K).state_dict()
    run_ranks(_layer, 3, transport, weights, mode="thread", timeout=60)


class _Model(torch.nn.Module):
    """Two sharded layers between dense ones, whose gradients DistributedDataParallel averages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.dense = torch.nn.Linear(HIDDEN, HIDDEN)
        self.layers = torch.nn.ModuleList(MoELayer(HIDDEN, 16, NUM_EXPERTS, TOP_K) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dense(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def _data_parallel(comm: Communicator, transport: str) -> None:
    whole, model = _Model(), _Model()
    counts = [5, 0, 7][: comm.size]
    xs = [
        torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(rank)) for rank, count in enumerate(counts)
    ]
    sum((whole(x) * _target(rank, len(x))).sum() for rank, x in enumerate(xs)).backward()  # type: ignore[union-attr]
    with _make(comm, transport) as ep:
        for layer in model.layers:
            layer.shard(ep)
        experts = [name for name, _ in model.named_parameters() if ".experts." in name]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
        parallel = DistributedDataParallel(model, process_group=comm.group, bucket_cap_mb=0.01)
        for _ in range(2):
            model.zero_grad()
            (parallel(xs[comm.rank]) * _target(comm.rank, len(xs[comm.rank]))).sum().backward()
        mine = slice(ep.local_experts.start, ep.local_experts.stop)
    for name, weight in model.named_parameters():
        want = whole.get_parameter(unnumbered(name)).grad
        assert want is not None and weight.grad is not None
        got = (
            weight.grad if name in experts else weight.grad * comm.size
        )  # of which DistributedDataParallel has the mean
        assert _error(name, want[mine] if name in experts else want, got) <= 3e-6, name


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_model_in_distributed_data_parallel_trains_as_one_process(transport: str) -> None:
    run_ranks(_data_parallel, 3, transport, timeout=100)


def _lost(comm: Communicator) -> None:
    ep = _make(comm, "direct", timeout=1.0)
    x, ids, weights, experts = inputs = _inputs(comm.rank, "one_expert")
    y, old = _sharded(ep, inputs), _sharded(ep, inputs)
    if comm.rank == 2:
        return
    with pytest.raises(PeerTimeout, match="backward of combine") as caught:
        y.sum().backward()
    assert caught.value.ranks == (2,)
    ep.rebuild()
    with pytest.raises(LaneError, match="rebuilt"):
        old.sum().backward()
    _compare(ep.comm, "ragged", lambda inputs: _unsharded(*inputs), lambda inputs: _sharded(ep, inputs))


def test_a_rank_that_is_lost_in_backward_is_named_and_the_others_train_on() -> None:
    run_ranks(_lost, 3, mode="thread", timeout=60)
