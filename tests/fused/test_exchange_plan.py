"""A plan's rows go where it says and come back added up, any number of times, with the gradients of the transpose."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("numba", reason="CPU ranks need numba")

import thinwire as tw
from thinwire.comm.communicator import Communicator
from thinwire.fused import exchange_plan
from thinwire.fused.backend import select_backend
from thinwire.fused.direct_transport import DirectTransport
from thinwire.testing import run_ranks
from thinwire.wire import WireFormat


def drawn(seed: int, rank: int, size: int) -> tuple[int, torch.Tensor, list[int]]:
    """Rows of x, and of those the ones that go to each rank: some to none, some to several, some twice to one."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    empty = seed % 3 == 0 and rank == seed // 3 % size  # then a rank has no rows
    num_rows = 0 if empty else int(torch.randint(4, 40, (), generator=generator))
    counts = [int(n) for n in torch.randint(0, 30, (size,), generator=generator)] if num_rows else [0] * size
    return num_rows, torch.randint(0, max(num_rows, 1), (sum(counts),), generator=generator), counts


def values(seed: int, rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7 * seed + rank)).to(dtype)


def all_to_all(parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.cat([parts[source][target] for source in range(len(parts))]) for target in range(len(parts))]


def expected(seed: int, size: int, xs: list[torch.Tensor], ys: list[torch.Tensor]) -> Any:
    """Of all ranks: what comes there of xs, and home of ys, in float32 and in order."""
    plans = [drawn(seed, rank, size) for rank in range(size)]
    there = all_to_all([list(x[rows].split(counts)) for x, (_, rows, counts) in zip(xs, plans, strict=True)])
    received = [[plans[source][2][target] for source in range(size)] for target in range(size)]
    homes = []
    came = all_to_all([list(y.split(counts)) for y, counts in zip(ys, received, strict=True)])
    for (num_rows, rows, _), arrived in zip(plans, came, strict=True):
        home = torch.zeros(num_rows, *arrived.shape[1:])
        for row, term in zip(rows.tolist(), arrived.float(), strict=True):  # one after the other
            home[row] += term
        homes.append(home.to(arrived.dtype))
    return there, homes, received


def exchange(comm: Communicator, seed: int, tail: tuple[int, ...], dtype: torch.dtype, transport: str) -> None:
    size, rank = comm.size, comm.rank
    num_rows, rows, counts = drawn(seed, rank, size)
    index = rows.int() if seed % 2 else rows
    plan = tw.ExchangePlan(index, torch.tensor(counts), comm, num_rows=num_rows, transport=transport)
    assert (plan.num_rows, plan.send_counts) == (num_rows, counts)
    xs = [values(seed, other, drawn(seed, other, size)[0], *tail, dtype=dtype) for other in range(size)]
    incoming = [sum(drawn(seed, source, size)[2][target] for source in range(size)) for target in range(size)]
    ys = [values(seed + 1, other, incoming[other], *tail, dtype=dtype) for other in range(size)]
    there, home, received = expected(seed, size, xs, ys)
    assert plan.recv_counts == received[rank]
    for _ in range(2):  # in any order and number
        assert torch.equal(plan.back(ys[rank], wire="none"), home[rank])
        assert torch.equal(plan.there(xs[rank], wire="none"), there[rank])
        assert torch.equal(plan.there(xs[rank], wire="none"), there[rank])
    pending: Any = plan.there(xs[rank], wire="none", async_op=True)
    returning: Any = plan.back(ys[rank], wire="none", async_op=True)
    assert torch.equal(pending.wait(), there[rank]) and torch.equal(returning.wait(), home[rank])
    assert torch.equal(returning.wait(), home[rank])  # and again
    out = torch.full((incoming[rank] + 2, *tail), 5.0, dtype=dtype)
    plan.there(xs[rank], wire="none", out=out)
    assert torch.equal(out[:-2], there[rank]) and bool((out[-2:] == 5).all())
    given = tw.ExchangePlan(rows, counts, comm, num_rows=num_rows, recv_counts=received[rank], transport=transport)
    assert torch.equal(given.there(xs[rank], wire="none"), there[rank])
    quantized: Any = tw.all_to_all_v(xs[rank][rows], counts, received[rank], wire="int8", comm=comm)
    assert torch.equal(plan.there(xs[rank], wire="int8"), quantized)  # type: ignore[arg-type]
    assert tail in ((1,), ()) or not incoming[rank] or not torch.equal(quantized, there[rank])
    x, y = xs[rank].clone().requires_grad_(), ys[rank].clone().requires_grad_()
    # Each is the other's transpose, and its backward.
    (plan.there(x, wire="int8", grad_wire="none") * ys[rank]).sum().backward()  # type: ignore[operator]
    (plan.back(y, wire="int8", grad_wire="none") * xs[rank]).sum().backward()
    assert x.grad is not None and y.grad is not None
    assert torch.equal(x.grad, home[rank]) and torch.equal(y.grad, there[rank])


@pytest.mark.parametrize("transport", ["auto", "staged"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rows_travel_as_planned_and_add_up_at_home(seed: int, transport: str) -> None:
    tail, dtype = [((8,), torch.float32), ((3, 5), torch.bfloat16), ((), torch.float16)][seed]
    run_ranks(exchange, 2 + seed % 2, seed, tail, dtype, transport, mode="thread")


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(3, 11))
def test_rows_travel_as_planned_on_any_number_of_ranks(seed: int, size: int) -> None:
    tail = [(1,), (7,), (130,), (4, 4)][seed % 4]
    dtype = [torch.float32, torch.bfloat16, torch.float16][seed % 3]
    run_ranks(exchange, size, seed, tail, dtype, "auto", mode="process" if seed % 2 else "thread")


def strided(comm: Communicator) -> None:
    strides = []

    def select(*arguments: Any) -> Any:
        backend = select_backend(*arguments)

        def sum_records(records: torch.Tensor, *rest: Any) -> None:
            strides.append(records.stride(0))
            backend.sum_records(records, *rest)

        return replace(backend, sum_records=sum_records)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_plan, "select_backend", select)
        for tail in ((1,), (3, 5), (130,)):
            exchange(comm, 1, tail, torch.bfloat16, "auto")
    assert strides and not any(stride % 16 for stride in strides)


def test_kernels_get_records_of_the_stride_that_they_take() -> None:
    """On GPUs they load 16 bytes at once."""
    run_ranks(strided, 2)


class ChannelOfGpu(DirectTransport):
    """What a plan asks of a channel on a GPU."""

    on_gpu = True

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def load_kernels(self, key: Hashable, launch: Callable[[], None], lane: int = 0) -> None:
        self.log.append("load")
        launch()
        self.log.append("loaded")


def loading(comm: Communicator) -> None:
    log: list[Any] = []
    exchange, summed = exchange_plan.all_to_all_v, []

    def all_to_all_v(*arguments: Any, **named: Any) -> Any:
        log.append("exchange")
        return exchange(*arguments, **named)

    def select(*arguments: Any) -> Any:
        def sum_records(records: torch.Tensor, index: torch.Tensor, wire: WireFormat, out: torch.Tensor) -> None:
            log.append("sum")
            summed.append((records.stride(), records.dtype, index.shape[1], out.stride(), out.dtype))
            select_backend(*arguments).sum_records(records, index, wire, out)

        return replace(select_backend(*arguments), sum_records=sum_records)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_plan, "open_channel", lambda *_: ChannelOfGpu(log))
        patch.setattr(exchange_plan, "all_to_all_v", all_to_all_v)
        patch.setattr(exchange_plan, "select_backend", select)
        plan = tw.ExchangePlan(torch.tensor([1, 0, 1]), [1, 2], comm, num_rows=2)
        y = torch.ones(sum(plan.recv_counts), 5, dtype=torch.bfloat16)
        home: Any = plan.back(y, wire="none")
    assert home[:, 0].tolist() == [1, 2]
    assert log == ["load", "sum", "loaded", "exchange", "sum"]
    assert summed[0] == summed[1]  # what Triton compiles a kernel for


def test_the_kernel_that_sums_is_loaded_before_peers_wait() -> None:
    """Ranks may be threads of one GPU, where a load waits for all kernels, and so for peers that wait for this rank."""
    run_ranks(loading, 2)


def in_order(comm: Communicator) -> None:
    """Without rows a plan is an all-to-all-v."""
    counts = [2, 1] if comm.rank == 0 else [0, 3]
    plan = tw.ExchangePlan(None, counts, comm)
    x = torch.arange(12.0).view(3, 4) + 100 * comm.rank
    there: Any = plan.there(x, wire="none")
    assert torch.equal(there, tw.all_to_all_v(x, counts, wire="none", comm=comm))  # type: ignore[arg-type]
    assert torch.equal(plan.back(there, wire="none"), x)
    assert torch.equal(plan.back(plan.there(x.double(), wire="none"), wire="none"), x.double())  # type: ignore[arg-type]
    words = torch.arange(3, dtype=torch.int32) + 10 * comm.rank  # any dtype goes there
    assert plan.there(words, wire="none").tolist() == ([0, 1] if comm.rank == 0 else [2, 10, 11, 12])  # type: ignore[union-attr]


def test_a_plan_without_rows_is_an_all_to_all_v() -> None:
    run_ranks(in_order, 2, mode="thread")


def compiled(comm: Communicator) -> None:
    plan = tw.ExchangePlan(torch.tensor([0, 1, 0, 2]), [3, 1] if comm.rank else [2, 2], comm, num_rows=3)

    def layer(x: torch.Tensor) -> torch.Tensor:
        there = plan.there(x * 2, wire="none") + 1  # type: ignore[operator]
        return plan.back(there * there, wire="none").sin()

    x = values(3, comm.rank, 3, 8)
    results = []
    for call in (layer, torch.compile(layer, backend="aot_eager")):
        each = x.clone().requires_grad_()
        y = call(each)
        y.square().sum().backward()
        results.append((y.detach(), each.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])  # type: ignore[arg-type]


def test_compiled_code_calls_a_plan_with_the_same_results() -> None:
    run_ranks(compiled, 2)
