"""CUDA graphs of ranks that may be threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from thinwire.comm.communicator import Communicator

_T = TypeVar("_T")


def capture(comm: Communicator, step: Callable[[], _T]) -> tuple[torch.cuda.CUDAGraph, _T]:
    """A graph of `step`, and what it returned, once nothing is under way on any rank. Collective.

    Rank by rank, each on a stream of its own: `torch.cuda.graph` would give all threads one stream, and a capture may
    not meet another's wait for the device, with which it begins.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    for rank in range(comm.size):
        comm.barrier()
        if rank == comm.rank:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result = step()
    comm.barrier()
    return graph, result
