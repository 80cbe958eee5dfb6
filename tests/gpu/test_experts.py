"""Experts on a GPU: products in int8 and a whole layer give the CPU's bits, and no step waits for the device."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("triton", reason="compiled kernels need Triton")

import torch

from tests.gpu.waiting import waiting_refused
from tests.helpers.expert_rows import CASES, check_products
from thinwire.comm.communicator import Communicator
from thinwire.moe.experts import GroupedExperts
from thinwire.moe.int8_experts import Int8Experts
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks
from thinwire.triton_kernels.expert_gemm import expert_gemm
from thinwire.triton_kernels.int8_weights import Int8Weights
from thinwire.wire import WireFormat

NUM_EXPERTS, TOP_K, HIDDEN, FF, MAX_TOKENS = 8, 2, 512, 256, 48


def _product_on_the_gpu(
    records: torch.Tensor,
    wire: WireFormat,
    index: torch.Tensor | None,
    offsets: torch.Tensor,
    weights: Int8Weights,
    out: torch.Tensor,
    *out_wire: WireFormat,
) -> None:
    """`expert_gemm` on copies of CPU tensors; what it writes, and what it leaves, comes back in `out`."""
    there = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="cuda").copy_(out)
    moved = dataclasses.replace(weights, payload=weights.payload.cuda(), scales=weights.scales.cuda())
    expert_gemm(records.cuda(), wire, None if index is None else index.cuda(), offsets.cuda(), moved, there, *out_wire)
    out.copy_(there)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}x{case[2]}")
def test_the_compiled_product_equals_the_reference_to_the_last_bit(case: tuple) -> None:
    check_products(_product_on_the_gpu, (case,))


def _rows(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    count = 0 if rank == 1 else MAX_TOKENS - rank
    x = torch.randn(count, HIDDEN, generator=generator).bfloat16()
    ids = torch.randint(-1, NUM_EXPERTS, (count, TOP_K), generator=generator)
    return x, ids, torch.rand(count, TOP_K, generator=generator)


def _experts(local: range, device: torch.device) -> GroupedExperts:
    generator = torch.Generator().manual_seed(7)
    whole = {
        name: torch.randn(NUM_EXPERTS, *shape, generator=generator) * shape[0] ** -0.5
        for name, shape in (("w_in", (HIDDEN, FF)), ("w_gate", (HIDDEN, FF)), ("w_out", (FF, HIDDEN)))
    }
    experts = GroupedExperts(len(local), HIDDEN, FF, gated=True)
    experts.load_state_dict({name: weight[local.start : local.stop] for name, weight in whole.items()})
    return experts.to(device)


def _layer(comm: Communicator) -> torch.Tensor:
    with ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, wire="int8") as ep:
        experts = Int8Experts(_experts(ep.local_experts, comm.device), rotated=False)
        d = ep.dispatch(*(tensor.to(comm.device) for tensor in _rows(comm.rank)))
        y = ep.combine(experts(d), d)
        ep.check()
        return y.cpu()


def test_a_layer_in_int8_gives_what_the_cpu_gives() -> None:
    on_gpu = run_ranks(_layer, 4, mode="thread", device="cuda", timeout=300)
    on_cpu = run_ranks(_layer, 4, mode="thread", timeout=300)
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert torch.equal(ours, theirs)


def _no_synchronisation(comm: Communicator, in_int8: bool) -> None:
    with ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, wire="int8", transport="direct") as ep:
        x, ids, weights = (tensor.to(comm.device) for tensor in _rows(comm.rank))
        exact = _experts(ep.local_experts, comm.device).bfloat16().requires_grad_(False)
        experts = Int8Experts(exact.float(), rotated=False)
        exact = exact.bfloat16()
        capacity = comm.size * MAX_TOKENS * TOP_K

        def step() -> None:
            d = ep.dispatch(x, ids, weights)
            rows = experts(d) if in_int8 else exact(d.gather(capacity)[0], d.expert_counts, d.expert_offsets)
            ep.combine(rows, d)

        step()
        ep.check()
        with waiting_refused(comm):
            for _ in range(3):
                step()
        ep.check()


@pytest.mark.parametrize("in_int8", [True, False])
def test_no_step_of_a_layer_waits_for_the_device(in_int8: bool) -> None:
    if not in_int8 and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("torch's grouped product reads the counts on the host on this GPU")
    run_ranks(_no_synchronisation, 4, in_int8, mode="thread", device="cuda", timeout=300)
