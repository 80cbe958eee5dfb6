"""FSDP2 in wire formats beside stock FSDP2: gradients, losses, bytes, and what is refused."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401, which registers the backend "fake"

import thinwire as tw
from tests.helpers.wires import relative_error
from thinwire.comm.communicator import Communicator
from thinwire.comm.recorder import NAME
from thinwire.errors import ArgumentError, TransportUnavailable, WireFormatError
from thinwire.integrations import fsdp
from thinwire.testing import run_ranks

Wires = tuple[str | None, str | None] | None
#: No size is a multiple of another, nor of the ranks.
UNEVEN = (51, 131, 33, 7)
STAGED = {"THINWIRE_BACKEND": "torch"}
POLICIES: dict[str, Any] = {
    "float32": {},
    "bfloat16, reduced in float32": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
    "float16": {"mp_policy": MixedPrecisionPolicy(torch.float16)},  # whose gradients FSDP divides, and sums
    "kept after forward": {"reshard_after_forward": False},
}


def _net(widths: tuple[int, ...] = UNEVEN) -> nn.Sequential:
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for width, following in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(width, following), nn.LayerNorm(following), nn.GELU()]
    return nn.Sequential(*layers[:-2])


def _shard(net: nn.Sequential, mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)  # LayerNorms are left for this group


def _mesh(comm: Communicator) -> DeviceMesh:
    torch.set_num_threads(1)
    return DeviceMesh.from_group(comm.group, "cpu")


def _x(comm: Communicator, rows: int = 24, width: int = UNEVEN[0]) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(5 + comm.rank))


def _backward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = net(x)
    y.float().square().mean().backward()
    return y.detach()


def _gradients(net: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.full_tensor() for parameter in net.parameters()]  # type: ignore[union-attr]


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _exact(comm: Communicator, name: str, tolerance: float) -> None:
    """Two micro-batches, of which the first is kept back, and another step: outputs and gradients are stock's."""
    results = []
    for wires in (None, ("none", "none"), ("none", None), (None, "none")):
        net = _shard(_net(), _mesh(comm), **POLICIES[name])
        if wires is not None:
            fsdp.quantize(net, *wires)
        net.set_requires_gradient_sync(False)  # type: ignore[operator]
        outputs = [_backward(net, _x(comm))]
        net.set_requires_gradient_sync(True)  # type: ignore[operator]
        outputs += [_backward(net, _x(comm) + 1), _backward(net, _x(comm) - 1)]
        results.append((outputs, _gradients(net)))
    (outputs, gradients), *others = results
    for found, got in others:
        for y, want in zip(found, outputs, strict=True):
            assert torch.equal(y, want), name
        error = relative_error(_flat(gradients), _flat(got))
        assert error <= tolerance and (tolerance or torch.equal(_flat(gradients), _flat(got))), (name, error)


@pytest.mark.parametrize("name", ["float32", pytest.param("bfloat16", marks=pytest.mark.exhaustive)])
def test_two_ranks_get_stocks_bits_with_none(name: str) -> None:
    run_ranks(_exact, 2, name, 0.0, timeout=120)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_with_none_are_stocks_but_for_the_order_of_sums(name: str, ranks: int) -> None:
    # Stock adds up 16-bit gradients in 16 bits, thinwire in float32.
    run_ranks(_exact, ranks, name, 0.0 if ranks == 2 else {"bfloat16": 5e-3, "float16": 1e-3}.get(name, 1e-6))


def _quantised(comm: Communicator) -> None:
    """The errors of gradients of a model, of a leg at a time and of both."""
    x, errors = _x(comm, 64, 256), {}
    wanted: torch.Tensor | None = None
    for wires in (None, (None, "int8"), (None, "int8+h64"), ("int8", None), ("int8", "int8")):
        net = _shard(_net((256, 1024, 256, 256)), _mesh(comm))
        if wires is not None:
            fsdp.quantize(net, *wires)
        _backward(net, x)
        got = _flat(_gradients(net))
        if wanted is None:
            wanted = got
        errors[wires] = relative_error(wanted, got)
    print({wires: f"{error:.4f}" for wires, error in errors.items()})
    assert 0.003 < errors[None, "int8"] <= 0.005 and 0.003 < errors[None, "int8+h64"] <= 0.005, errors
    assert 0.003 < errors["int8", None] < 0.012 and errors["int8", "int8"] < 0.015, errors


def test_int8_changes_gradients_by_half_a_percent() -> None:
    run_ranks(_quantised, 2, timeout=120)


def _parameters(comm: Communicator) -> None:
    """Unsharded, all ranks have the same bits, which are not the sharded ones; these stay as they were."""
    before = [parameter.detach().clone() for parameter in _net().parameters()]
    net = _shard(_net(), _mesh(comm))
    fsdp.quantize(net, "int8", None)
    assert isinstance(net, FSDPModule)
    net(_x(comm))
    net.reshard()
    for exact, parameter in zip(before, net.parameters(), strict=True):
        assert isinstance(parameter, DTensor) and torch.equal(parameter.full_tensor(), exact)
    net.unshard()
    for layer in net:
        if isinstance(layer, FSDPModule):
            layer.unshard()
    arrived = [parameter.detach().clone() for parameter in net.parameters()]
    for theirs in comm.all_gather_object(arrived):
        assert all(torch.equal(ours, other) for ours, other in zip(arrived, theirs, strict=True)), "ranks part"
    error = relative_error(_flat(before), _flat(arrived))
    assert 0.001 < error < 0.008, error


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_all_ranks_compute_with_the_same_parameters_and_keep_their_exact_ones(ranks: int) -> None:
    run_ranks(_parameters, ranks)


def _train(comm: Communicator, wires: Wires, steps: int) -> float:
    """The mean loss of the last 50 of some steps in bfloat16, on digits."""
    images, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    _shard(net, _mesh(comm), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    if wires is not None:
        fsdp.quantize(net, *wires)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(steps):
        batch = torch.randperm(len(x), generator=generator)[: 64 * comm.size].chunk(comm.size)[comm.rank]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x[batch]).float(), y[batch])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    last = losses[-50:]
    return sum(comm.all_gather_object(sum(last))) / len(last) / comm.size


def _losses(comm: Communicator, steps: int) -> dict[str, float]:
    found = {"at first": _train(comm, None, 1), "stock": _train(comm, None, steps)}
    for gather, scatter in ((None, "int8"), ("int8", None), ("int8", "int8"), ("int8+h64", "int8+h64")):
        found[f"{gather}, {scatter}"] = _train(comm, (gather, scatter), steps)
    return found


@pytest.mark.exhaustive
def test_two_hundred_steps_end_with_the_loss_of_stock() -> None:
    found = run_ranks(_losses, 2, 200, timeout=300)[0]
    print({name: round(loss, 5) for name, loss in found.items()})
    first, stock = found.pop("at first"), found.pop("stock")
    assert stock < 0.15 * first, "the network does not learn"
    for name, loss in found.items():
        assert loss != stock and abs(loss - stock) <= 0.01 * stock, (name, loss, stock)


def _bytes(comm: Communicator) -> dict[str, list[int]]:
    """Bytes sent to others in each call of each leg, in a step."""
    net = _shard(_net((256, 1024, 512)), _mesh(comm), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    fsdp.quantize(net)
    _backward(net, _x(comm, 4, 256))
    found: dict[str, list[int]] = {"all_gather": [], "reduce_scatter": []}
    post = Communicator.post

    def counting(self: Communicator, sends: Any, *arguments: Any, **options: Any) -> Any:
        assert self.recorder.current is not None
        found[str(self.recorder.current[NAME])].append(sum(sent.numel() for sent in sends if sent is not None))
        return post(self, sends, *arguments, **options)

    Communicator.post = counting  # type: ignore[method-assign]
    _backward(net, _x(comm, 4, 256))
    Communicator.post = post  # type: ignore[method-assign]
    return found


def test_a_step_sends_half_the_bytes() -> None:
    found = run_ranks(_bytes, 2, timeout=120, env=STAGED)[0]
    layers = [256 * 1024 + 1024, 1024 * 512 + 512]
    # The last group has the LayerNorm, and is not gathered again in backward.
    elements = {"all_gather": 2 * sum(layers) + 2 * 1024, "reduce_scatter": sum(layers) + 2 * 1024}
    for (leg, sent), calls in zip(found.items(), (5, 3), strict=True):
        before = elements[leg] // 2 * 2  # half of bfloat16 elements
        assert len(sent) == calls and 1.92 < before / sum(sent) < 2 / (1 + 2 / 128), found  # scales, and padding


class _Packed(nn.Module):
    """Parameters of several dtypes, which FSDP sends as bytes, or of one that is no float to quantise."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        for place, dtype in enumerate(dtypes):
            values = torch.randint(-100, 100, (11, 5), generator=generator).float() / 3
            self.register_parameter(f"p{place}", nn.Parameter(values.to(dtype), requires_grad=dtype == torch.float32))

    def forward(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters()]


def _packed(comm: Communicator) -> None:
    for dtypes in (
        (torch.float32, torch.bfloat16, torch.int8),
        (torch.int8,),
        (torch.int32,),
        (torch.uint8, torch.uint8),
        (torch.float8_e4m3fn,),
    ):
        exact = _Packed(*dtypes)()
        model = fully_shard(_Packed(*dtypes), mesh=_mesh(comm))
        fsdp.quantize(model)
        for want, got in zip(exact, model(), strict=True):
            assert want.dtype == got.dtype and torch.equal(want.view(torch.uint8), got.view(torch.uint8)), dtypes
    model = fully_shard(_Packed(torch.float32), mesh=_mesh(comm))
    fsdp.quantize(model)
    assert not torch.equal(model()[0], _Packed(torch.float32)()[0]), "nothing is quantised"
    model = fully_shard(_Packed(torch.float64), mesh=_mesh(comm))
    fsdp.quantize(model)
    with pytest.raises(WireFormatError, match="float64 tensor cannot travel as"):
        model()


def test_integers_bytes_and_8_bit_floats_travel_exactly() -> None:
    run_ranks(_packed, 2)


def _variants(comm: Communicator) -> None:
    """Ways to run FSDP that change nothing: gathers under way during others, another group, only sums."""

    def run(wires: tuple[str, str] | None, *names: str, value: Any = True) -> torch.Tensor:
        net = _shard(_net(), _mesh(comm))
        if wires is not None:
            fsdp.quantize(net, *wires)
        layers: list[Any] = [layer for layer in net if isinstance(layer, FSDPModule)]
        for name in names:
            if name == "prefetch":
                for layer, following in zip(layers, layers[1:], strict=False):
                    layer.set_modules_to_forward_prefetch([following])
            else:
                for layer in (net, *layers):
                    getattr(layer, name)(value)
        outputs = [_backward(net, _x(comm)) for _ in range(2)]
        return _flat([*outputs, *_gradients(net)])

    int8, none = ("int8", "int8"), ("none", "none")
    plain = run(int8)
    assert not torch.equal(plain, run(None))
    assert torch.equal(plain, run(int8, "_set_unshard_async_op"))
    assert torch.equal(plain, run(int8, "_set_unshard_async_op", "prefetch"))
    assert torch.equal(plain, run(int8, "set_separate_reduce_scatter_group"))
    assert torch.equal(plain, run(int8, "set_force_sum_reduction_for_comms"))
    # Another factor than the number of ranks is PREMUL_SUM, which Gloo does not have.
    stock, y = run(None), _net()(_x(comm)).numel() * 2
    assert torch.equal(run(none, "set_gradient_divide_factor", value=4.0 * comm.size)[y:], stock[y:] / 4)


@pytest.mark.parametrize("env", [{}, STAGED], ids=["direct", "staged"])
def test_gathers_in_advance_and_other_reductions_change_nothing(env: dict[str, str]) -> None:
    run_ranks(_variants, 2, env=env, timeout=120)


def _open_gathers(comm: Communicator) -> None:
    """A gather that was posted is waited for by FSDP, and by the next call."""
    group, wire = comm.group, fsdp.resolve_wire("int8")
    leg = fsdp._AllGather(wire, {}, None)
    x = torch.randn(5000, generator=torch.Generator().manual_seed(comm.rank))
    outputs = [leg.allocate([5000 * comm.size], dtype=x.dtype, device=x.device) for _ in range(2)]
    works = [leg(output, x, group, async_op=True) for output in outputs]
    assert all(isinstance(work, dist.Work) and work.wait() and work.wait() for work in works)
    wanted = torch.empty_like(outputs[0])
    assert leg(wanted, x, group) is None
    assert torch.equal(outputs[0], wanted) and torch.equal(outputs[1], wanted)
    scatter, totals = fsdp._ReduceScatter(fsdp.resolve_wire("none"), {}, None), []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp(dist.ReduceOp.AVG)):
        totals.append(torch.empty(5000))
        scatter(totals[-1], wanted.clone(), group, op)
    assert torch.equal(totals[0], wanted.view(2, -1)[comm.rank] * 2)
    assert torch.equal(totals[1], totals[0] / 2) and torch.equal(totals[2], totals[1])
    with pytest.raises(ArgumentError, match=r"expected ReduceOp.SUM, AVG or PREMUL_SUM\(factor\)"):
        scatter(totals[0], wanted, group, dist.ReduceOp.MAX)


@pytest.mark.parametrize("env", [{}, STAGED], ids=["direct", "staged"])
def test_a_gather_under_way_is_a_work_of_torchs(env: dict[str, str]) -> None:
    run_ranks(_open_gathers, 2, env=env)


def _feedback(comm: Communicator) -> None:
    """Over many steps, the means of constant gradients come to the exact ones, where none is lost for good."""
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(comm.size * 5000, generator=generator)
    exact = torch.stack(comm.all_gather_object(x)).mean(0).chunk(comm.size)[comm.rank]
    out, errors = torch.empty(5000), {}
    for feedback in (False, True):
        leg, total = fsdp._ReduceScatter(fsdp.resolve_wire("int4"), {}, None, feedback), torch.zeros(5000)
        for _ in range(50):
            leg(out, x.clone(), comm.group, dist.ReduceOp.AVG)
            total += out
        errors[feedback] = relative_error(exact, total / 50)
    assert errors[False] > 0.08 and errors[True] < 0.01, errors
    assert leg._lost.nbytes == x.nbytes and leg._lost.any()
    spoilt = x.clone()
    spoilt[7] = float("inf")
    leg(out, spoilt, comm.group, dist.ReduceOp.AVG)
    leg(out, x.clone(), comm.group, dist.ReduceOp.AVG)
    assert out.isfinite().all()  # a step that overflowed is over with that step
    # Other parameters with gradients have lost nothing yet.
    fresh, again = torch.empty(4000), torch.empty(4000)
    leg(again, x[: 4000 * comm.size].clone(), comm.group, dist.ReduceOp.AVG)
    fsdp._ReduceScatter(leg._wire, {}, None)(fresh, x[: 4000 * comm.size].clone(), comm.group, dist.ReduceOp.AVG)
    assert torch.equal(fresh, again)
    # A model's groups each remember their own.
    net = _shard(_net(), _mesh(comm))
    fsdp.quantize(net, None, "int4", error_feedback=True)
    gradients = []
    for _ in range(20):
        net.zero_grad()
        _backward(net, _x(comm))
        gradients.append(_flat(_gradients(net)))
    stock = _shard(_net(), _mesh(comm))
    _backward(stock, _x(comm))
    wanted = _flat(_gradients(stock))
    assert relative_error(wanted, torch.stack(gradients).mean(0)) < 0.2 * relative_error(wanted, gradients[0])


def test_error_feedback_makes_up_for_what_was_lost() -> None:
    run_ranks(_feedback, 2, timeout=120)


def _late(comm: Communicator) -> None:
    """The first call of a group waits for a rank that is late for longer than a call may wait."""
    tw.init(domain="impatient", timeout=1.0)
    group = dist.new_group()
    if comm.rank == 1:
        time.sleep(2.5)
    out = torch.empty(4 * comm.size)
    fsdp._AllGather(fsdp.resolve_wire("none"), {}, None)(out, torch.full((4,), float(comm.rank)), group)
    assert torch.equal(out, torch.arange(comm.size).repeat_interleave(4).float())


@pytest.mark.exhaustive
def test_ranks_may_build_their_models_at_different_speeds() -> None:
    run_ranks(_late, 2)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.norm = nn.Linear(48, 97), nn.Linear(97, 48), nn.LayerNorm(48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


def _compiled(comm: Communicator) -> None:
    results, graphs = [], 0

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    for compiled in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(*(_Block() for _ in range(3)))
        for block in net:
            if compiled:
                block.compile(backend=backend)
            fully_shard(block, mesh=_mesh(comm))
        fully_shard(net, mesh=_mesh(comm))
        fsdp.quantize(net)
        outputs = [_backward(net, _x(comm, 8, 48)) for _ in range(2)]
        results.append(_flat([*outputs, *_gradients(net)]))
    assert graphs > 0 and torch.equal(*results)


@pytest.mark.exhaustive
def test_compiled_blocks_give_the_same_bits() -> None:
    run_ranks(_compiled, 2)


def _two_axes(comm: Communicator, after_forward: bool | int) -> None:
    """Of 2 x 2 ranks, shards travel within the second axis, and their sums by torch between those of the first."""
    torch.set_num_threads(1)
    whole = after_forward is not True
    mesh = _mesh(comm) if whole else init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results = []
    for wires in (None, ("none", "none"), (None, "int8"), ("int8", "int8")):
        net = _shard(_net((256, 1024, 256)), mesh, reshard_after_forward=after_forward)
        if wires is not None:
            fsdp.quantize(net, *wires)
        _backward(net, _x(comm, 32, 256))
        results.append(_flat(_gradients(net)))
    stock, *others = results
    exact, scattered, both = (relative_error(stock, found) for found in others)
    print(exact, scattered, both)
    assert exact <= 1e-6 and 0.002 < scattered <= 0.005 < both < 0.015


@pytest.mark.exhaustive
@pytest.mark.parametrize("after_forward", [True, 2], ids=["replicated", "in twos after forward"])
def test_four_ranks_on_meshes_of_two_axes(after_forward: bool | int) -> None:
    run_ranks(_two_axes, 4, after_forward, timeout=120)


class _Bitsandbytes(nn.Linear):
    """As a Linear4bit whose weights are kept in a float's bits."""


_Bitsandbytes.__module__ = "bitsandbytes.nn.modules"


def _budget(comm: Communicator) -> None:
    """Programs of kernels in the hooks, by default and as asked for; and outside of them."""
    for given, programs in ({}, 32), ({"num_programs": 5}, 5):
        net, seen = _shard(_net(), _mesh(comm)), []
        legs = {name: getattr(fsdp, name) for name in ("all_gather", "reduce_scatter")}

        def watched(name: str, legs: Any = legs, seen: Any = seen) -> Any:
            return lambda *x, comm, **more: seen.append((name, comm.num_programs)) or legs[name](*x, comm=comm, **more)

        with mock.patch.multiple(fsdp, **{name: watched(name) for name in legs}):
            fsdp.quantize(net, **given)
            _backward(net, _x(comm))
        assert {*seen} == {("all_gather", programs), ("reduce_scatter", programs)}
    assert comm.num_programs is None
    with pytest.raises(ArgumentError, match="num_programs is 0, expected an int of at least 1, or None"):
        fsdp.quantize(net, num_programs=0)


def test_hooks_leave_most_of_a_gpu_to_the_model() -> None:
    run_ranks(_budget, 2)


def _refusals(comm: Communicator) -> None:
    with pytest.raises(ArgumentError, match="nothing in this Sequential is sharded: call .*fully_shard"):
        fsdp.quantize(_net())
    net = _shard(_net(), _mesh(comm))
    with pytest.raises(WireFormatError, match="int9"):
        fsdp.quantize(net, reduce_scatter="int9")
    for wire in ("none", None):
        with pytest.raises(ArgumentError, match=f"reduce_scatter={wire!r}, which loses nothing"):
            fsdp.quantize(net, "int8", wire, error_feedback=True)
    fsdp.quantize(net[0], None)  # of what was refused nothing was done
    with pytest.raises(ArgumentError, match=r"module '0' was quantised before, as \(None, .*int8"):
        fsdp.quantize(net)
    packed = fully_shard(nn.Sequential(_Bitsandbytes(4, 4)), mesh=_mesh(comm))
    with pytest.raises(ArgumentError, match="module '0' is bitsandbytes' _Bitsandbytes, whose torch.float32 weight"):
        fsdp.quantize(packed)
    fsdp.quantize(packed, None)
    placed = FSDPMeshInfo(DeviceMesh.from_group(dist.new_group([0]), "cpu"), shard_mesh_dim=0)
    several = fully_shard(
        nn.Linear(4, 4),
        mesh=_mesh(comm),
        shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), placed) if p.dim() == 1 else None,
    )
    with pytest.raises(ArgumentError, match="module '' cannot be quantised: .*multiple param groups"):
        fsdp.quantize(several)
    group = dist.new_group([0], backend="fake")
    with pytest.raises(TransportUnavailable, match="'cpu': 'fake'.* accepted: gloo for the CPU"):
        fsdp._AllGather(fsdp.resolve_wire("int8"), {}, None)(torch.empty(4), torch.ones(4), group)


def test_what_cannot_be_quantised_is_refused_by_name() -> None:
    run_ranks(_refusals, 1)
