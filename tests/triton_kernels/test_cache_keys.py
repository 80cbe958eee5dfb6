"""Triton's keys of kernels do not depend on what a process launched before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="the keys are Triton's")

import torch

from thinwire.comm.communicator import Communicator
from thinwire.fused.backend import _triton
from thinwire.fused.transport import _why_not
from thinwire.testing import run_ranks
from thinwire.triton_kernels.collective import gather_recv_kernel, reduce_kernel
from thinwire.triton_kernels.combine import send_sums_kernel, sum_home_kernel
from thinwire.triton_kernels.dispatch import send_tokens_kernel, wait_kernel
from thinwire.triton_kernels.launch import settle_cache_keys
from thinwire.triton_kernels.pack import pack_kernel, unpack_kernel
from thinwire.triton_kernels.permute import gather_kernel

KERNELS = [
    gather_recv_kernel, reduce_kernel, send_sums_kernel, sum_home_kernel, send_tokens_kernel, wait_kernel, pack_kernel,
    unpack_kernel, gather_kernel,
]  # fmt: skip


def _keys(comm: Communicator, first: int, settled: bool) -> list[str]:
    """Of all kernels, once one of them was looked at before the others."""
    if settled:
        settle_cache_keys()
    rest = KERNELS[first:] + KERNELS[:first]
    keys = {kernel.__name__: kernel.cache_key for kernel in rest}
    return [keys[kernel.__name__] for kernel in KERNELS]


def test_keys_are_the_same_whichever_kernel_comes_first() -> None:
    keys = [run_ranks(_keys, 1, first, True)[0] for first in (0, 4)]
    assert keys[0] == keys[1]


def _constants_compared(comm: Communicator) -> int:
    settle_cache_keys()
    return sum(len(kernel.used_global_vals) for kernel in KERNELS)


def test_launches_compare_no_constants() -> None:
    assert run_ranks(_constants_compared, 1) == [0]


def _hashed(comm: Communicator, door: str) -> list[bool]:
    device: Any = torch.device("cuda")
    if door == "backend":
        _triton(device, "tensors on cuda")
    else:
        assert _why_not(SimpleNamespace(device=device)) is None
    return [kernel.hash is not None for kernel in KERNELS]


@pytest.mark.parametrize("door", ["backend", "direct transport"])
def test_they_are_settled_before_a_gpu_is_given_anything(door: str) -> None:
    assert all(run_ranks(_hashed, 1, door)[0])
