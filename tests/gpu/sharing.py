"""Ranks that share the one GPU: threads of this process, or processes that map each other's memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from thinwire.comm.communicator import Communicator
from thinwire.testing import run_ranks

#: Processes that share a GPU find each other through gloo; torch wants to be told that they share it.
SHARED_GPU = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
#: For tests of both.
sharing = pytest.mark.parametrize("mode", ["threads", "processes"])


def on_the_gpu(comm: Communicator, fn: Callable[..., object], *args: object) -> object:
    """Runs `fn` with a communicator whose tensors live on the one GPU that these processes share."""
    with Communicator(comm.group, device="cuda:0", timeout=comm.timeout) as on_gpu:
        return fn(on_gpu, *args)


def run_on_one_gpu(mode: str, fn: Callable[..., object], *args: object) -> list[object]:
    """The results of `fn` on 8 ranks that are threads, or on 4 ranks that are processes, of one GPU."""
    if mode == "threads":
        return run_ranks(fn, 8, *args, mode="thread", device="cuda", timeout=300)
    return run_ranks(on_the_gpu, 4, fn, *args, env=SHARED_GPU, timeout=300)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, made once the stream is done: one that waits keeps other threads, which are ranks, from launching."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor.cpu()
