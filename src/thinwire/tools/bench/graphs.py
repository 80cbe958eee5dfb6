"""Calls as CUDA graphs, whose times are those of kernels: launched one by one, small ones wait for Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thinwire.comm import Communicator
from thinwire.errors import ThinwireError
from thinwire.tools.bench.contender import Contender

#: What is said of calls that a graph replays.
GRAPH = "CUDA graph"
_DEVICES = ("cuda",)


class _Graph:
    """A part of a call: what it is first called with is captured, and replayed from then on, with the same result."""

    def __init__(self, part: Callable[..., Any], stream: torch.cuda.Stream) -> None:
        self._part, self._stream = part, stream
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *arguments: Any) -> Any:
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._result = self._part(*arguments)
            self._graph = graph
        else:
            self._graph.replay()
        return self._result


def how_called(comm: Communicator, contenders: Sequence[Contender], eager: bool) -> dict[str, str]:
    """On a GPU, makes graphs of calls that can be captured; says of each contender how it is called. Collective.

    What another library's calls are compared with is called as these are, from Python.
    """
    if comm.device.type not in _DEVICES:
        return {}
    beside = next((other.implementation for other in contenders if not other.parts and other.transport is None), None)
    called = {}
    for contender in contenders:
        if eager:
            reason = "--eager says"
        elif not contender.parts:
            reason = "the host takes part" if contender.transport else "another library is called so"
        elif beside is not None:
            reason = f"{beside} is, beside it"
        else:
            reason = _capture(comm, contender)
        called[contender.label] = f"Python, as {reason}" if reason else GRAPH
    return called


def _capture(comm: Communicator, contender: Contender) -> str:
    """Gives "", or why no rank has graphs. Collective.

    Rank by rank: a capture begins with a wait for the device, which may not meet another capture.
    """
    parts, reason = list(contender.parts), ""
    for rank in range(comm.size):
        comm.barrier()
        if rank == comm.rank:
            stream = torch.cuda.Stream()
            contender.parts[:] = [_Graph(part, stream) for part in parts]
            try:
                contender.call()
            except (ThinwireError, RuntimeError) as error:  # torch's, of what cannot be captured
                reason = f"capturing failed on rank {rank}: {error!r}"[:200]
    reason = next(filter(None, comm.all_gather_object(reason)), "")
    if reason:
        contender.parts[:] = parts
    return reason
