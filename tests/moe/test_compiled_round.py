"""Rounds in compiled code: they are what they are in Python, to the last bit, in the same order, and fail alike."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from tests.helpers.speeds import exhaustive_but
from thinwire.moe import compiled_round
from thinwire.moe.compiled_round import CompiledRound
from thinwire.moe.gradients import NO_WANTS, RoundGradients
from thinwire.moe.legs import StartedCombine
from thinwire.testing import run_ranks

EXPERTS, TOP_K, HIDDEN, CAPACITY = 8, 2, 32, 48
SIZES = (6, 9, 0, 1, 9)  # torch.compile takes 0 and 1 for cases of their own
TRANSPORTS = ("direct", "staged")

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Function = Callable[..., Any]


def _parallel(comm: tw.Communicator, transport: str, **options: Any) -> tw.ExpertParallel:
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "max_tokens": 16}
    return tw.ExpertParallel(comm, **sizes, transport=transport, timeout=60, **options)  # type: ignore[arg-type]


def _batch(size: int, seed: int, grad: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, weights = torch.randn(size, HIDDEN, generator=generator), torch.rand(size, TOP_K, generator=generator)
    ids = torch.rand(size, EXPERTS, generator=generator).topk(TOP_K).indices
    return x.requires_grad_(grad), ids, weights.requires_grad_(grad)


def _compiled(function: Function, backend: str, whole: bool = True) -> Function:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=whole)


def _gradients(function: Function, batch: Batch, *more: torch.Tensor) -> list[torch.Tensor]:
    """Results and gradients of a function of a batch, whose results are all differentiated."""
    x, ids, weights = batch
    wanted = [tensor.detach().clone().requires_grad_() for tensor in (x, weights, *more)]
    found = function(wanted[0], ids, wanted[1])
    found = found if isinstance(found, tuple) else (found,)
    sum(result.square().sum() for result in found if result.requires_grad).backward()
    return [*(result.detach() for result in found), *(tensor.grad for tensor in wanted if tensor.grad is not None)]


def _assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def _assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Of gradients that several rounds add to, which a graph adds up among themselves first; terms may cancel."""
    for one, other in zip(found, expected, strict=True):
        scale = float(other.abs().max()) if other.is_floating_point() else 0.0
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * max(1.0, scale))


def _gathered(ep: tw.ExpertParallel) -> Function:
    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # What operators get are intermediate values, which nothing else holds.
        d = ep.dispatch(x * 2, ids + 0, weights * 0.5)
        rows, overflow = d.gather(CAPACITY)
        return ep.combine(rows * rows, d) + x, overflow, d.expert_counts, d.expert_offsets

    return layer


def _with_tokens(ep: tw.ExpertParallel) -> Function:
    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        d = ep.dispatch(x * 2, ids + 0, weights * 0.5)
        return ep.combine(d.tokens * d.tokens, d) + x

    return layer


def _whole_graphs(comm: tw.Communicator, transport: str, backend: str) -> None:
    ep = _parallel(comm, transport, wire="int8")
    layer = _gathered(ep)
    compiled = _compiled(layer, backend)
    for size in SIZES:
        batch = _batch((size + 3 * comm.rank) % 12, comm.rank)
        _assert_equal(_gradients(compiled, batch), _gradients(layer, batch))
        with torch.no_grad():
            _assert_equal([*compiled(*batch)], [*layer(*batch)])
    gc.collect()
    ep.dispatch(*_batch(3, comm.rank, grad=False))
    assert len(compiled_round._rounds) <= 1, "rounds are kept which no graph needs"


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_compiled_rounds_are_pythons_to_the_last_bit(transport: str, backend: str, tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run_ranks(_whole_graphs, 2, transport, backend, timeout=600, env=env)


# ---------------------------------------------------------------------------------------------------------------------
# Order


@contextmanager
def _recorded(ep: tw.ExpertParallel) -> Iterator[list[tuple[str, int]]]:
    """The legs that this rank runs, each with the number of its round's tokens."""
    legs: list[tuple[str, int]] = []

    def watch(owner: Any, name: str, leg: str, tokens: Callable[..., int]) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            legs.append((leg, tokens(*args)))
            return original(*args, **kwargs)

        patch.setattr(owner, name, watched)

    with pytest.MonkeyPatch.context() as patch:
        watch(ep, "_begin_round", "dispatch", lambda tokens, *_: len(tokens[0]))
        watch(StartedCombine, "_send", "combine", lambda self, rows, d, *_: d._num_sent)
        watch(RoundGradients, "of_experts", "backward of combine", lambda self, dy, *_: len(dy))
        watch(RoundGradients, "of_tokens", "backward of dispatch", lambda self: len(self._ids))
        yield legs


def _many_rounds(ep: tw.ExpertParallel, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    def layer(first: int, scale: float, lane: int = 0) -> torch.Tensor:
        d = ep.dispatch(x[first:], ids[first:], weights[first:], lane=lane)
        return ep.combine((d.gather(CAPACITY)[0] * scale).sin(), d)

    # Of what rounding gets nothing is made, and this round's legs of backward are the last.
    d = ep.dispatch(x[6:].round(), ids[6:], weights[6:].detach())
    rounded = ep.combine(d.gather(CAPACITY)[0] * 0.125, d).square().sum()
    identical = layer(0, 1.0).sum() + layer(0, 1.0).sum()
    layer(1, 1.0)  # unused
    independent = layer(2, 1.0).square().sum() + layer(3, 2.0, lane=1).square().sum()
    early, late = ep.dispatch(x[4:], ids[4:], weights[4:]), ep.dispatch(x[5:], ids[5:], weights[5:], lane=1)
    rows = [late.gather(CAPACITY)[0] * 3, early.gather(CAPACITY)[0] * 5]
    both = ep.combine(rows[1], early).sum() + ep.combine(rows[0], late).sum()
    return rounded + identical + independent + both


def _orders(comm: tw.Communicator, transport: str, backend: str) -> list[tuple[str, int]]:
    ep = _parallel(comm, transport, wire="none", lanes=2)  # int8 would make much of the last bit of a sine
    function = partial(_many_rounds, ep)
    batch = _batch(9, comm.rank)
    runs = []
    for each in (function, _compiled(function, backend)):
        with _recorded(ep) as legs:
            # The second forward comes before the first one's backward, on what both of them were compiled to.
            found = _gradients(lambda *args, each=each: (each(*args), each(*args)), batch)
            with torch.no_grad():
                found.append(each(*batch))
        runs.append((legs, found))
    assert runs[1][0] == runs[0][0]
    _assert_close(runs[1][1], runs[0][1])
    return runs[0][0]


@pytest.mark.parametrize(
    ("transport", "backend"),
    exhaustive_but(
        [("direct", "aot_eager")],
        [(transport, backend) for transport in TRANSPORTS for backend in ("aot_eager", "inductor")],
        several=True,
    ),
)
def test_compiled_rounds_keep_pythons_order(transport: str, backend: str) -> None:
    env = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    first, second = run_ranks(_orders, 2, transport, backend, timeout=600, env=env)
    assert first == second
    assert [leg for leg, _ in first].count("backward of dispatch") == 2 * 7, "the unused round has none"


def _checkpoints(comm: tw.Communicator, transport: str, backend: str) -> None:
    ep = _parallel(comm, transport, wire="none")
    layer = _gathered(ep)

    def two(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = checkpoint(layer, x, ids, weights, use_reentrant=False)[0]
        return layer(checkpoint(layer, y, ids, weights, use_reentrant=False)[0].sin(), ids, weights)[0]

    batch = _batch(7, comm.rank)
    compiled = _compiled(two, backend)
    with _recorded(ep) as legs:
        found = _gradients(lambda *args: (compiled(*args), compiled(*args)), batch)
    _assert_close(found, _gradients(lambda *args: (two(*args), two(*args)), batch))
    forward, backward = ["dispatch", "combine"] * 6, ["backward of combine", "backward of dispatch"] * 6
    assert [leg for leg, _ in legs] == forward + backward, "a graph keeps what legs have given"
    # Around a graph, all of it is run anew.
    found = _gradients(partial(checkpoint, _compiled(layer, backend), use_reentrant=False), batch)
    _assert_close(found, _gradients(layer, batch))


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_checkpoints_in_compiled_code(transport: str, backend: str, tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run_ranks(_checkpoints, 2, transport, backend, timeout=600, env=env)


# ---------------------------------------------------------------------------------------------------------------------
# Between graphs


def _breaks(comm: tw.Communicator, transport: str) -> None:
    ep = _parallel(comm, transport, wire="int8", lanes=2)
    batch = _batch(7, comm.rank)
    wide = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))

    def by_record(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        d = ep.dispatch(x, ids, weights)
        assert int(d.expert_counts.sum()) == len(d.expert_ids) == len(d.source) == len(d.tokens)
        return ep.combine(d.records * d.record_weights.sum(1, keepdim=True) * wide, d, weighted=True)

    def weighed(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        d = ep.dispatch(x, ids, weights)
        return ep.combine(d.tokens * d.weights.unsqueeze(1), d)

    def by_records(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        d = ep.dispatch(x, ids, weights)
        records = d.gather_records(CAPACITY)
        return ep.combine(records.tokens * records.weights.sum(1, keepdim=True) * wide, d, weighted=True)

    for function in (by_record, weighed, by_records, _with_tokens(ep)):
        _assert_equal(_gradients(_compiled(function, "aot_eager", whole=False), batch), _gradients(function, batch))

    with pytest.raises(torch._dynamo.exc.Unsupported, match="kernels get addresses of tensors"):
        _compiled(_with_tokens(ep), "eager")(*batch)
    begin = _compiled(lambda *args: ep.dispatch(*args), "eager", whole=False)
    d = begin(*batch)
    assert isinstance(d, CompiledRound) and isinstance(d, tw.Dispatched)
    same = ep.dispatch(*batch, lane=1)
    with torch.no_grad():  # or there would be no quantised rows
        for name in {*dir(tw.Dispatched), *tw.Dispatched.__annotations__} - {"abandon", "lane"}:
            if name.startswith("_"):
                continue
            one, other = (getattr(each, name) for each in (d, same))
            one, other = (one(3), other(3)) if name.startswith("gather") else (one, other)
            assert type(one) is type(other)
            if name == "index":
                used = int(same.expert_offsets[-1])
                assert torch.equal(one[:used], other[:used])
            elif isinstance(one, tuple):
                _assert_equal([*one], [*other])
            elif isinstance(one, torch.Tensor) and name != "rows":
                assert torch.equal(one, other), name
            elif name.endswith("traffic"):
                assert one == other
    assert d.is_open and same.is_open
    with pytest.raises(AttributeError, match="no attribute 'token'"):
        _ = d.token
    d.abandon()
    same.abandon()
    assert not d.is_open and not same.is_open
    with pytest.raises(tw.LaneError, match="is over"):
        d.gather(3)

    # A round that Python began, in compiled code.
    d = ep.dispatch(*batch)
    y = _compiled(lambda d: ep.combine(d.tokens * 2, d) + 1, "eager", whole=False)(d)
    d = ep.dispatch(*batch)
    assert torch.equal(y, ep.combine(d.tokens * 2, d) + 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rounds_that_cross_from_graph_to_graph(transport: str) -> None:
    run_ranks(_breaks, 2, transport, timeout=300)


def _ended_in_python(comm: tw.Communicator, transport: str) -> None:
    ep = _parallel(comm, transport, wire="int8")
    batch = _batch(7, comm.rank)

    def layer(begin: Function, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        d = begin(x * 2, ids, weights)
        rows, _ = d.gather(CAPACITY)
        return ep.combine(rows * rows, d) + x

    def filled(begin: Function) -> torch.Tensor:
        d, out = begin(*batch), torch.empty(7, HIDDEN)
        rows, _ = d.gather(CAPACITY)
        assert ep.combine(rows * rows, d, out=out) is out
        return out

    begin = _compiled(lambda *args: ep.dispatch(*args), "aot_eager")
    _assert_equal(_gradients(partial(layer, begin), batch), _gradients(partial(layer, ep.dispatch), batch))
    with torch.no_grad():
        assert torch.equal(filled(begin), filled(ep.dispatch))


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_round_that_compiled_code_began_and_python_ends(transport: str) -> None:
    run_ranks(_ended_in_python, 2, transport, timeout=300)


def _layer(comm: tw.Communicator, backend: str) -> None:
    torch.manual_seed(0)
    layer = tw.MoELayer(HIDDEN, 16, EXPERTS, TOP_K).shard(_parallel(comm, "direct"))
    compiled = _compiled(layer, backend, whole=False)
    x = torch.randn(5, HIDDEN)
    found = []
    for each in (layer, compiled):
        layer.zero_grad()
        wanted = x.clone().requires_grad_()
        y = each(wanted)
        y.square().sum().backward()
        found.append([y.detach(), wanted.grad, *(weight.grad.clone() for weight in layer.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_layer(backend: str, tmp_path: Path) -> None:
    run_ranks(_layer, 2, backend, timeout=600, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def _errors(comm: tw.Communicator, transport: str) -> None:
    ep = _parallel(comm, transport, wire="int8")
    batch, plain = _batch(7, comm.rank), _batch(7, comm.rank, grad=False)
    own = torch.ones(CAPACITY, HIDDEN, requires_grad=True)

    def twice(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        d = ep.dispatch(x, ids, weights)
        rows, _ = d.gather(CAPACITY)
        return ep.combine(rows, d) + ep.combine(rows, d)

    def short(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        d = ep.dispatch(x, ids, weights)
        return ep.combine(d.gather(CAPACITY)[0][:7], d)

    def alone(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        d = ep.dispatch(x, ids, weights)
        return ep.combine(d.gather(CAPACITY)[0] * own, d)

    def into(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        d = ep.dispatch(x, ids, weights)
        out = torch.empty_like(x)
        assert ep.combine(d.gather(CAPACITY)[0] * 2, d, out=out) is out
        return out * 1

    def over(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        d = ep.dispatch(x, ids, weights)
        ep.dispatch(x, ids, weights)
        return d.gather(CAPACITY)[0]

    def late(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            d = ep.dispatch(x, ids, weights)
        return ep.combine(d.gather(CAPACITY)[0], d)

    refused: list[tuple[type[Exception], str, Function, Batch]] = [
        (tw.RoutingError, r"x is torch.float32 \[7, 31\]", lambda x, *rest: ep.dispatch(x[:, 1:], *rest), batch),
        (tw.RoutingError, "topk_ids runs from", lambda x, ids, w: ep.dispatch(x, ids + 100, w), batch),
        (tw.CapacityError, "-1 is negative", lambda *args: ep.dispatch(*args).gather(-1), plain),
        (tw.LaneError, "no lane 3", lambda *args: ep.dispatch(*args, lane=3).expert_counts, plain),
        (tw.LaneError, "is over: it was combined", twice, batch),
        (tw.LaneError, "is over: .*a later dispatch", over, batch),
        (tw.RoutingError, r"expert_out is torch.float32 \[7, 32\]", short, batch),
        (tw.RoutingError, "fills in place", into, batch),
        (tw.RoutingError, "was dispatched without", late, batch),
    ]
    for kind, match, function, arguments in refused:
        for each in (
            function,
            _compiled(function, "aot_eager", whole=function.__name__ not in ("<lambda>", "into", "late")),
        ):
            with pytest.raises(kind, match=match):
                each(*arguments)
    found = []
    for each in (alone, _compiled(alone, "aot_eager", whole=True)):  # experts alone are trained
        each(*plain).square().sum().backward()
        assert own.grad is not None
        found.append(own.grad)
        own.grad = None
    _assert_equal(found[:1], found[1:])
    with torch.no_grad():
        _assert_equal([_compiled(into, "aot_eager", whole=False)(*batch)], [into(*batch)])

    # One rank's tokens are refused: the others hear of it, and all go on.
    layer = _gathered(ep)
    compiled = _compiled(layer, "aot_eager")
    x, ids, weights = batch
    match = "topk_ids runs from" if comm.rank else "rank 1 refused"
    with pytest.raises(tw.RoutingError, match=match):
        compiled(x, ids + 100 * comm.rank, weights)
    _assert_equal(_gradients(compiled, batch), _gradients(layer, batch))

    y = compiled(*batch)[0].sum()
    ep.close()
    with pytest.raises(tw.LaneError, match="was closed"):
        y.backward()
    with pytest.raises(tw.LaneError, match="is closed"):
        compiled(*batch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_errors_come_out_of_compiled_code_as_themselves(transport: str) -> None:
    run_ranks(_errors, 2, transport, timeout=300)


def _error_of_backward(comm: tw.Communicator) -> None:
    ep = _parallel(comm, "direct")
    y = _compiled(_gathered(ep), "eager")(*_batch(7, comm.rank))[0].sum()
    ep.close()
    with pytest.raises(tw.LaneError, match="was closed"):
        y.backward()


@pytest.mark.exhaustive
def test_an_error_of_backward_is_itself_where_autograd_runs_the_operators() -> None:
    run_ranks(_error_of_backward, 2, timeout=300)


@pytest.mark.exhaustive
def test_what_interrupts_a_compiled_backward_between_its_legs_ends_the_communicator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of(ep: tw.ExpertParallel, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        d = ep.dispatch(x, ids, weights)
        return ep.combine(d.gather(CAPACITY)[0] * 2, d)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with tw.init() as comm, tw.ExpertParallel(comm, 2, 1, HIDDEN, 8, wire="none") as ep:
        x = torch.randn(4, HIDDEN, requires_grad=True)
        batch = x, torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
        y = torch.compile(of, backend="aot_eager")(ep, *batch)
        monkeypatch.setattr(RoundGradients, "add_rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            y.sum().backward()
        with pytest.raises(tw.ThinwireError, match="has ended at this rank"):
            ep.dispatch(*batch)


def _several(comm: tw.Communicator, transport: str) -> None:
    """One compiled function of several objects, with different numbers of experts, and one that finds its own."""

    def of(ep: tw.ExpertParallel, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        d = ep.dispatch(x, ids, weights)
        return ep.combine(d.gather(CAPACITY)[0] * 2, d)

    def shared(*batch: torch.Tensor) -> torch.Tensor:
        ep = tw.ExpertParallel.shared(comm, 4, 1, HIDDEN, 8, wire="none", transport=transport)
        return of(ep, *batch)

    x, ids, weights = torch.randn(4, HIDDEN), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    options: dict[str, Any] = {"wire": "none", "transport": transport}
    parallels = [tw.ExpertParallel(comm, number, 1, HIDDEN, 8, **options) for number in (4, 6)]
    for dynamic in (None, True):
        torch._dynamo.reset()
        compiled = torch.compile(of, backend="aot_eager", dynamic=dynamic)
        for ep in parallels:
            assert torch.equal(compiled(ep, x, ids, weights), 2 * x)
    assert torch.equal(torch.compile(shared, backend="aot_eager")(x, ids, weights), 2 * x)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_compiled_function_serves_several_objects_and_may_ask_for_a_shared_one(transport: str) -> None:
    run_ranks(_several, 1, transport, timeout=300)


def test_an_expert_parallel_that_is_gone_and_a_ticket_of_no_round() -> None:
    class Gone:
        pass

    handle = compiled_round.register(Gone())
    gc.collect()
    x, ids, weights = _batch(2, 0, grad=False)
    with pytest.raises(tw.LaneError, match=f"no ExpertParallel {handle} in this process"):
        torch.ops.thinwire.dispatch(compiled_round.ORDER, None, x, ids, weights, handle, 0, 0, 0, EXPERTS)
    ticket = torch.tensor([2.0**40], dtype=torch.float64)
    with pytest.raises(tw.LaneError, match="this round is over"):
        torch.ops.thinwire.gather(compiled_round.ORDER, ticket, 3, HIDDEN, x.dtype, x.device, 0)
    with pytest.raises(tw.LaneError, match="way of this round's gradients is not known"):
        torch.ops.thinwire.gather_backward(compiled_round.ORDER, ticket, x)


# ---------------------------------------------------------------------------------------------------------------------
# What torch asks of operators


def _opcheck(comm: tw.Communicator, transport: str) -> None:
    ep = _parallel(comm, transport, wire="int8")
    ops, order = torch.ops.thinwire, compiled_round.ORDER.clone()
    x, ids, weights = _batch(7, comm.rank, grad=False)
    of_tokens = HIDDEN, x.dtype, x.device
    wants = 7  # rows, weights and experts

    def check(operator: Any, *args: Any) -> None:
        """Of inputs without gradients, as torch has it for operators that write."""
        for part in ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"):
            torch.library.opcheck(operator, args, test_utils=part)

    def begin() -> torch.Tensor:
        return ops.dispatch(order, None, x, ids, weights, ep._handle, 0, 0, wants, len(ep.local_experts))[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_round, "_numbers", itertools.repeat(1))  # or no ticket would be that of the call before
        check(ops.dispatch.default, order, None, x, ids, weights, ep._handle, 0, 0, wants, len(ep.local_experts))
    ticket = begin()
    check(ops.gather.default, order, ticket, CAPACITY, *of_tokens, wants)
    rows, _ = ops.gather(order, ticket, CAPACITY, *of_tokens, wants)
    check(ops.gather_backward.default, order, ticket, rows)
    check(ops.combine_backward.default, order, ticket, x, rows, CAPACITY)
    check(ops.dispatch_backward.default, order, ticket, 7, HIDDEN, TOP_K, x.dtype, x.device, wants)

    def new_round() -> tw.Dispatched:
        d = ep._begin_round((x, ids, weights), 0, 0, True, NO_WANTS).d
        d.gather(CAPACITY)
        return d

    with pytest.MonkeyPatch.context() as patch:
        # A combine ends its round, and opcheck calls it again: here is a round for each.
        patch.setattr(compiled_round, "_open_round", lambda _: new_round())
        check(ops.combine.default, order, ticket, rows, ep._handle, 7, *of_tokens[:2], wants)


@pytest.mark.parametrize("transport", exhaustive_but(["direct"], TRANSPORTS))
def test_opcheck(transport: str) -> None:
    run_ranks(_opcheck, 1, transport, timeout=300)
