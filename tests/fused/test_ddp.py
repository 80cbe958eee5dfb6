"""DistributedDataParallel with the int8 hook: ranks stay together, and learn as well as without."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")
datasets = pytest.importorskip("sklearn.datasets", reason="the digits come with scikit-learn")

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.helpers.wires import relative_error
from thinwire.comm.communicator import Communicator
from thinwire.errors import ArgumentError
from thinwire.fused import ddp
from thinwire.fused.codec import dequantize, quantize
from thinwire.fused.ddp import AllReduceState, all_reduce_hook
from thinwire.fused.staged_collective import arrived
from thinwire.testing import run_ranks
from thinwire.wire import WireFormat

STEPS = 120


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def _train(comm: Communicator, state: AllReduceState | None) -> tuple[list[float], list[torch.Tensor]]:
    """Losses on all digits, every twenty steps, and the parameters at the end."""
    images, labels = datasets.load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    net = _net()
    model = DistributedDataParallel(net, process_group=comm.group, bucket_cap_mb=0.02)
    if state is not None:
        model.register_comm_hook(state, all_reduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for step in range(STEPS):
        batch = torch.randperm(len(x), generator=generator)[: 64 * comm.size].chunk(comm.size)[comm.rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        if step % 20 == 19:
            with torch.no_grad():
                losses.append(float(nn.functional.cross_entropy(net(x), y)))
    return losses, [parameter.detach().clone() for parameter in net.parameters()]


def _compare(comm: Communicator) -> dict[str, list[float]]:
    found = {}
    plain, reference = _train(comm, None)
    found["plain"] = plain
    for name, state in (
        ("none", AllReduceState(comm, "none")),
        ("int8, 16-bit gather", AllReduceState(comm, "int8", "none")),
        ("int8", AllReduceState(comm)),
        ("int8, staged", AllReduceState(comm, transport="staged")),
        ("int4 with error feedback", AllReduceState(comm, "int4", error_feedback=True)),
        ("int6+h64 with error feedback", AllReduceState(comm, "int6+h64", error_feedback=True)),
    ):
        found[name], parameters = _train(comm, state)
        for other in comm.all_gather_object(parameters):
            assert all(torch.equal(a, b) for a, b in zip(parameters, other, strict=True)), f"{name}: ranks part"
        same = all(torch.equal(a, b) for a, b in zip(parameters, reference, strict=True))
        assert name == "none" or not same, f"{name}: nothing was quantised"
    assert found["int8"] == found["int8, staged"]
    return found


@pytest.mark.exhaustive
def test_ranks_with_the_hook_stay_together_and_learn_as_without() -> None:
    found = run_ranks(_compare, 2, timeout=180)[0]
    print({name: [round(loss, 5) for loss in losses] for name, losses in found.items()})
    plain = found.pop("plain")
    assert plain[-1] < 0.15 * plain[0], "the network does not learn"
    for name, losses in found.items():
        tolerance = 1e-4 if name == "none" else 0.05 if "int4" in name else 0.01
        assert abs(losses[-1] - plain[-1]) <= tolerance * plain[-1], (name, losses, plain)


class Bucket:
    """A bucket of gradients, as far as the hook looks at one."""

    def __init__(self, gradient: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        self._gradient, self._parameters = gradient.clone(), parameters

    def buffer(self) -> torch.Tensor:
        return self._gradient

    def index(self) -> int:
        return 0

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters


def _feedback(comm: Communicator, wire: str, lost: float, left: float) -> None:
    """Averages over many steps of a constant gradient come to the exact one, and without feedback they do not."""
    generator = torch.Generator().manual_seed(comm.rank)
    gradient = torch.randn(5000, generator=generator)
    exact = torch.stack(comm.all_gather_object(gradient)).mean(0)

    parameters = [torch.empty(2000), torch.empty(3000)]
    errors = {}
    for feedback in (False, True):
        state = AllReduceState(comm, wire, "none", error_feedback=feedback)
        total = torch.zeros_like(gradient)
        for _ in range(50):
            total += all_reduce_hook(state, Bucket(gradient, parameters)).wait()  # type: ignore[arg-type]
        errors[feedback] = relative_error(exact, total / 50)
    assert errors[False] > 0.9 * lost and errors[True] < left * errors[False], errors
    # A step that overflowed is over with that step.
    spoilt = gradient.clone()
    spoilt[7] = float("inf")
    assert all_reduce_hook(state, Bucket(spoilt, parameters)).wait().isnan().any()  # type: ignore[arg-type]
    assert all_reduce_hook(state, Bucket(gradient, parameters)).wait().isfinite().all()  # type: ignore[arg-type]
    # A bucket that was made anew has lost nothing yet, be it as long as the one before.
    assert state.lost(Bucket(gradient, parameters)).any()  # type: ignore[arg-type]
    assert not state.lost(Bucket(gradient, parameters[::-1])).any()  # type: ignore[arg-type]


# After 50 steps one step's error is left, a fiftieth. That of int4 is larger: what it lost makes the next groups wider.
@pytest.mark.parametrize(
    ("wire", "lost", "left"),
    [("int4", 0.097, 0.1), ("int8", 0.0065, 0.025), ("int8+h64", 0.0065, 0.025), ("int6+h64", 0.0265, 0.025)],
)
def test_error_feedback_makes_up_for_what_was_lost(wire: str, lost: float, left: float) -> None:
    run_ranks(_feedback, 2, wire, lost, left, mode="thread")


def _residuals(comm: Communicator, wire: str) -> None:
    """Gradients and earlier residuals, less the residuals that ranks keep, add up to the result: nothing is lost."""
    parameters = [torch.empty(0)]
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.005)):
        for transport in ("direct", "staged"):
            state = AllReduceState(comm, wire, "none", error_feedback=True, transport=transport)
            generator = torch.Generator().manual_seed(comm.rank)
            for step in range(3):
                gradient = torch.randn(9001, generator=generator).to(dtype)
                before = state.lost(Bucket(gradient, parameters)).double()  # type: ignore[arg-type]
                got = all_reduce_hook(state, Bucket(gradient, parameters)).wait()  # type: ignore[arg-type]
                after = state.lost(Bucket(gradient, parameters)).double()  # type: ignore[arg-type]
                assert all(torch.equal(other, got) for other in comm.all_gather_object(got)), "ranks part"
                sent = gradient.double() / comm.size + before - after
                wanted = torch.stack(comm.all_gather_object(sent)).sum(0)
                name = f"{dtype} {transport} step {step}"
                assert relative_error(wanted, got) < tolerance, (name, relative_error(wanted, got))
                assert relative_error(sent + after, sent) > 0.005, f"{name}: nothing was lost"


@pytest.mark.parametrize("wire", ["int8", "int8+h64", "int6+h64"])
def test_a_residual_is_what_was_not_sent(wire: str) -> None:
    run_ranks(_residuals, 3, wire, mode="thread")


def _beside_outliers(comm: Communicator, wire: str) -> list[float]:
    """Errors of the quiet channels of a constant gradient, averaged over one step and over five."""
    generator = torch.Generator().manual_seed(comm.rank)
    gradient = torch.randn(40, 512, generator=generator)
    loud = torch.zeros(512, dtype=torch.bool)
    loud[[3, 100, 301, 440]] = True
    gradient[:, loud] *= 50
    exact = torch.stack(comm.all_gather_object(gradient)).mean(0)
    state, parameters = AllReduceState(comm, wire, "none", error_feedback=True), [torch.empty(0)]
    total, errors = torch.zeros_like(gradient), []
    for step in range(1, 6):
        got = all_reduce_hook(state, Bucket(gradient.view(-1), parameters)).wait()  # type: ignore[arg-type]
        total += got.view_as(total)
        errors.append(relative_error(exact[:, ~loud], total[:, ~loud] / step))
    return [errors[0], errors[-1]]


@pytest.mark.parametrize(("wire", "one_step", "five_steps"), [("int8", 0.018, 0.0036), ("int6", 0.072, 0.0145)])
def test_a_rotation_spares_the_gradients_beside_outliers(wire: str, one_step: float, five_steps: float) -> None:
    rotated = run_ranks(_beside_outliers, 2, f"{wire}+h64", mode="thread")[0]
    plain = run_ranks(_beside_outliers, 2, wire, mode="thread")[0]
    assert rotated[0] < one_step and rotated[1] < five_steps, rotated
    assert all(5 * ours < theirs for ours, theirs in zip(rotated, plain, strict=True)), (rotated, plain)


def test_what_arrives_is_what_quantising_leaves() -> None:
    x = torch.randn(5001)
    wire = WireFormat.parse("int8")
    parts = [x[:2048], x[2048:4096], x[4096:]]
    expected = []
    for part in parts:
        padded = torch.cat((part, torch.zeros(-part.numel() % 1024))).view(-1, 1024)
        expected.append(dequantize(quantize(padded, wire)).view(-1)[: part.numel()])
    assert torch.equal(arrived(x, 3, wire), torch.cat(expected))


@pytest.mark.parametrize(("given", "programs"), [({}, 32), ({"num_programs": 7}, 7), ({"num_programs": None}, None)])
def test_the_hook_leaves_most_of_a_gpu_to_backward(given: dict[str, Any], programs: int | None) -> None:
    with tw.init() as comm, mock.patch.object(ddp, "all_reduce") as reduce:
        reduce.side_effect = lambda *_, **__: seen.append(comm.num_programs)
        seen: list[int | None] = []
        all_reduce_hook(AllReduceState(comm, **given), mock.Mock(buffer=lambda: torch.ones(4)))
        assert seen == [programs] and comm.num_programs is None


def _sparse(comm: Communicator) -> None:
    model = DistributedDataParallel(nn.Embedding(4, 3, sparse=True), process_group=comm.group)
    model.register_comm_hook(AllReduceState(comm), all_reduce_hook)
    with pytest.raises(ArgumentError, match="bucket 0 .*sparse_coo.*all_reduce_hook .*sparse=False"):
        model(torch.tensor([1])).sum().backward()


def test_sparse_gradients_are_refused_with_what_to_do() -> None:
    run_ranks(_sparse, 1)
