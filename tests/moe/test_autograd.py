"""What autograd may ask of a round, and what is refused in words because it would come out wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import torch
from torch.autograd import forward_ad

import thinwire as tw
import thinwire.compiler
from tests.helpers.hosts import for_transport
from thinwire.comm.communicator import Communicator
from thinwire.errors import ArgumentError, RoutingError, WireFormatError
from thinwire.testing import run_ranks

HIDDEN = 32
each_transport = pytest.mark.parametrize("transport", ["direct", "staged", "two_level"])


def test_backward_of_each_node_computes_without_autocast() -> None:
    """Those that derive from GraphNode do; no file of the package has another kind."""
    root = Path(thinwire.compiler.__file__).parent
    rooms = [root, *(root.parents[1] / room for room in ("comm", "fused", "moe", "triton_kernels"))]
    found = [path.name for room in rooms for path in room.rglob("*.py") if "autograd.Function)" in path.read_text()]
    assert found == ["compiler.py"]

    class Dtypes(thinwire.compiler.GraphNode):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return torch.linalg.vecdot(grads[0], grads[0])[:, None].expand(2, 2) + 2**-20

    x = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        Dtypes.apply(x).sum().backward()
        assert thinwire.compiler.opaque(lambda: torch.linalg.vecdot(x, x))().dtype == torch.float32
        assert torch.linalg.vecdot(x, x).dtype == torch.bfloat16  # as before
    assert x.grad is not None and float(x.grad[0, 0]) == 2 + 2**-20


def _dots_in_16_bits(comm: Communicator, transport: str) -> None:
    """They travel as the bits that they are."""
    with _parallel(comm, transport) as ep:
        weights = torch.rand(2, 1, requires_grad=True)
        d = ep.dispatch(torch.ones(2, HIDDEN), torch.tensor([[0], [3]]), weights)
        y = ep.combine(d.tokens, d)
        with pytest.raises(RoutingError, match=r"weight_grads is torch.bfloat16.*accepted: torch.float32"):
            y.sum().backward()


@each_transport
def test_gradients_of_router_weights_in_another_dtype_are_refused(transport: str) -> None:
    with mock.patch.object(torch.linalg, "vecdot", lambda a, b: (a * b).sum(1).bfloat16()):
        run_ranks(_dots_in_16_bits, 2, transport, mode="thread")


def _parallel(comm: Communicator, transport: str, top_k: int = 1) -> tw.ExpertParallel:
    comm = for_transport(comm, transport)
    return tw.ExpertParallel(comm, 3 * comm.size, top_k, HIDDEN, 8, wire="none", transport=transport)


def _counts_of_layers(comm: Communicator, transport: str) -> list[list[int]]:
    """Counts and offsets of three rounds that are kept, and one of them saved in a graph."""
    kept, x = [], torch.ones(4, HIDDEN, requires_grad=True)
    with _parallel(comm, transport) as ep:
        for number in (1, 2, 3):
            ids = torch.full((4, 1), 3 * comm.rank + number - 1)
            d = ep.dispatch(x, ids, torch.ones(4, 1))
            kept.append((d.expert_counts, d.expert_offsets))
            mean = torch.segment_reduce(d.tokens, "mean", lengths=d.expert_counts, unsafe=True).nan_to_num()
            ep.combine(d.tokens, d)
            if number == 1:
                first = mean.sum()
        first.backward()
    assert torch.equal(x.grad, torch.full((4, HIDDEN), 0.25))
    assert all(torch.equal(offsets[1:], counts.cumsum(0)) for counts, offsets in kept)
    return [counts.tolist() for counts, _ in kept]


@each_transport
def test_counts_of_earlier_rounds_stay_what_they_are(transport: str) -> None:
    assert run_ranks(_counts_of_layers, 2, transport, mode="thread") == [[[4, 0, 0], [0, 4, 0], [0, 0, 4]]] * 2


def _partial_backward(comm: Communicator, transport: str) -> None:
    """The rows' gradients first, by themselves, and then another loss of theirs."""
    with _parallel(comm, transport, 2) as ep:
        x, weights = torch.ones(4, HIDDEN, requires_grad=True), torch.rand(4, 2, requires_grad=True)
        d = ep.dispatch(x, torch.arange(2).expand(4, 2).contiguous(), weights)
        tokens = d.tokens
        y = ep.combine(tokens * 3, d)
        (of_tokens,) = torch.autograd.grad(y.sum(), tokens, retain_graph=True)
        assert of_tokens.any() or not len(tokens)
        tokens.sum().backward(retain_graph=True)
        assert weights.grad is None or not weights.grad.any(), "the sum of tokens does not depend on router weights"
        assert torch.equal(x.grad, torch.full((4, HIDDEN), 2.0))
        weights.grad = x.grad = None
        y.sum().backward()
        torch.testing.assert_close(weights.grad, torch.full((4, 2), 3.0 * HIDDEN))
        torch.testing.assert_close(x.grad, (3 * weights.detach().sum(1, keepdim=True)).expand(4, HIDDEN))


@each_transport
def test_router_weights_get_nothing_of_an_earlier_backward_of_a_part(transport: str) -> None:
    run_ranks(_partial_backward, 2, transport, mode="thread")


def _double(comm: Communicator, transport: str) -> None:
    """A gradient penalty whose incoming gradients want none: frozen, linear experts, and router weights that train."""
    with _parallel(comm, transport) as ep:
        x, weights = torch.ones(4, HIDDEN, requires_grad=True), torch.rand(4, 1, requires_grad=True)
        d = ep.dispatch(x, torch.zeros(4, 1, dtype=torch.int64), weights)
        y = ep.combine(d.tokens * 3, d)
        with pytest.raises(RoutingError, match="no second derivatives: call backward without create_graph=True"):
            torch.autograd.grad(y.sum(), x, create_graph=True)
        y.sum().backward()
        assert weights.grad is not None and weights.grad.any()


@each_transport
def test_second_derivatives_are_refused_before_they_are_incomplete(transport: str) -> None:
    run_ranks(_double, 2, transport, mode="thread")


def _calls(comm: Communicator, ep: tw.ExpertParallel, transport: str) -> dict[str, Callable[..., Any]]:
    options: dict[str, Any] = {"comm": comm, "transport": transport, "wire": "none"}
    ids, ones = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    plain = torch.ones(4, HIDDEN)

    def combine(x: torch.Tensor) -> torch.Tensor:
        d = ep.dispatch(plain, ids, ones)
        try:
            return ep.combine(x[:1].expand(len(d.tokens), HIDDEN), d)
        finally:
            d.abandon() if ep._assembly.rounds.open_rounds[0] is d else None

    return {
        "all_to_all_v": lambda x: tw.all_to_all_v(x, **options),
        "all_to_all_v of counts": lambda x: tw.all_to_all_v(x, [2, 2], [2, 2], **options),
        "all_gather": lambda x: tw.all_gather(x, **options),
        "all_gather_v": lambda x: tw.all_gather_v(x, [4, 4], **options),
        "reduce_scatter": lambda x: tw.reduce_scatter(x, **options),
        "all_reduce": lambda x: tw.all_reduce(x, **options),
        "dispatch": lambda x: ep.dispatch(x, ids, ones).tokens,
        "weights of a dispatch": lambda x: ep.dispatch(plain, ids, x[:, :1].contiguous()).tokens,
        "combine": combine,
        "exact all_reduce": lambda x: comm.all_reduce(x),
        "exact broadcast": lambda x: comm.broadcast(x, 0),
        "quantize": lambda x: tw.quantize(x, "int8").records,
    }


def _transforms(comm: Communicator, transport: str) -> None:
    x = torch.ones(4, HIDDEN)
    with _parallel(comm, transport) as ep:
        calls = _calls(comm, ep, transport)
        for name, call in calls.items():
            if name != "combine":
                call(x.clone())  # so that what small calls keep is there
            with forward_ad.dual_level():
                with pytest.raises((ArgumentError, RoutingError), match="tangent of forward-mode"):
                    call(forward_ad.make_dual(x.clone(), torch.ones_like(x)))
            with pytest.raises((ArgumentError, RoutingError), match="in a transform of torch.func"):
                torch.func.vmap(call)(x.expand(2, 4, HIDDEN))
            with pytest.raises((ArgumentError, RoutingError), match="in a transform of torch.func"):
                torch.func.jvp(call, (x,), (x,))
            if not name.startswith(("exact", "quantize")):
                assert torch.equal(tw.all_reduce(x, comm=comm, wire="none", transport=transport), comm.size * x)
        assert comm.all_gather_data(comm.rank, int) == [0, 1], "the communicator is as it was"


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_forward_mode_and_transforms_of_torch_func_are_refused_before_anything_is_sent(transport: str) -> None:
    run_ranks(_transforms, 2, transport, timeout=60)  # levels of forward mode are of a process, and not of a thread


def _outputs(comm: Communicator, transport: str) -> None:
    options: dict[str, Any] = {"comm": comm, "transport": transport}
    x = torch.ones(4, HIDDEN)
    with _parallel(comm, transport) as ep:

        def combine(out: torch.Tensor, wire: str) -> None:
            d = ep.dispatch(x, torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1))
            try:
                ep.combine(d.tokens, d, out=out)
            finally:
                d.abandon() if ep._assembly.rounds.open_rounds[0] is d else None

        calls: dict[str, tuple[int, Callable[..., Any]]] = {
            "combine": (4, combine),
            "all_to_all_v": (4, lambda out, wire: tw.all_to_all_v(x, out=out, wire=wire, **options)),
            "counts": (4, lambda out, wire: tw.all_to_all_v(x, [2, 2], [2, 2], out=out, wire=wire, **options)),
            "all_gather": (8, lambda out, wire: tw.all_gather(x, out=out, wire=wire, **options)),
            "all_gather_v": (8, lambda out, wire: tw.all_gather_v(x, [4, 4], out=out, wire=wire, **options)),
            "reduce_scatter": (2, lambda out, wire: tw.reduce_scatter(x, out=out, wire=wire, **options)),
            "all_reduce": (4, lambda out, wire: tw.all_reduce(x, out=out, wire=wire, **options)),
        }
        for wire in ("none", "int8"):
            for name, (rows, call) in calls.items():
                for _ in range(2):  # the second time, small calls take what the first one has kept
                    weight, buffer = torch.ones(rows, HIDDEN, requires_grad=True), torch.full((rows, HIDDEN), 5.0)
                    loss = (weight * buffer).sum()
                    call(buffer, wire)
                    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                        loss.backward()
                    leaf = torch.zeros(rows, HIDDEN, requires_grad=True)
                    for out in (leaf, leaf * 2):
                        with pytest.raises((WireFormatError, RoutingError), match="gradient"):
                            call(out, wire)
                        with torch.no_grad():
                            call(out, wire)
                    assert name and leaf.any()


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_autograd_sees_that_an_output_is_overwritten(transport: str) -> None:
    run_ranks(_outputs, 2, transport, mode="thread", timeout=60)


def _another_order(comm: Communicator) -> None:
    """The ranks of the new group own other experts than the layer holds."""
    with _parallel(comm, "staged") as ep:
        layer = tw.MoELayer(HIDDEN, 8, 6, 1).shard(ep)
        layer(torch.ones(4, HIDDEN))
        ep.rebuild(comm.split(groups=[[1, 0]]))
        mine, others = (f"range({start}, {start + 3})" for start in (3 * comm.rank, 3 - 3 * comm.rank))
        with pytest.raises(RoutingError) as caught:
            layer(torch.ones(4, HIDDEN))
        assert mine.replace("(", "(") in str(caught.value) and others in str(caught.value)


def test_a_layer_whose_experts_are_others_after_rebuild_is_refused() -> None:
    run_ranks(_another_order, 2, mode="thread")
