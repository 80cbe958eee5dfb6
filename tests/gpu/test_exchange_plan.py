"""A plan of an exchange on a GPU: rows and sums are those of the CPU, to the last bit, and so are gradients."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="compiled kernels need Triton")

import torch

from tests.gpu.sharing import on_host, run_on_one_gpu, sharing
from tests.helpers.wires import assert_same_bits
from thinwire.comm.communicator import Communicator
from thinwire.fused.exchange_plan import ExchangePlan
from thinwire.testing import run_ranks

HIDDEN = 200


def _exchange(comm: Communicator) -> list[torch.Tensor]:
    """What comes there and home of drawn rows, with their gradients; some rows go nowhere, some to all ranks."""
    generator = torch.Generator().manual_seed(comm.rank)
    num_rows = 5 + 3 * comm.rank
    counts = [int(n) for n in torch.randint(0, 9, (comm.size,), generator=generator)]
    rows = torch.randint(0, num_rows - 1, (sum(counts),), generator=generator)
    plan = ExchangePlan(rows.to(comm.device), counts, comm, num_rows=num_rows)
    found = []
    dtypes = (torch.float32, torch.bfloat16)
    # All copies from the host before the first exchange: they wait for the stream, and may keep threads from launching.
    xs = [torch.randn(num_rows, HIDDEN, generator=generator).to(dtype).to(comm.device) for dtype in dtypes]
    for x in xs:
        x.requires_grad_()
        for wire in ("none", "int8"):
            there = plan.there(x, wire=wire, grad_wire=wire)
            assert isinstance(there, torch.Tensor)
            home = plan.back(there * 2, wire=wire, grad_wire=wire)
            assert isinstance(home, torch.Tensor)
            (gradient,) = torch.autograd.grad(home, x, torch.ones_like(home))
            found += [there.detach(), home.detach(), gradient]
    return [on_host(tensor) for tensor in found]


@sharing
def test_rows_and_sums_are_those_of_the_cpu(mode: str) -> None:
    on_gpu = run_on_one_gpu(mode, _exchange)
    on_cpu = run_ranks(_exchange, len(on_gpu), mode="thread", timeout=300)
    for rank, (ours, theirs) in enumerate(zip(on_gpu, on_cpu, strict=True)):
        for number, (got, expected) in enumerate(zip(ours, theirs, strict=True)):  # type: ignore[call-overload]
            assert expected.any() and got.shape == expected.shape
            assert_same_bits(f"rank {rank}, {number}", expected, got)
