"""torch's own operations over symmetric memory, on CUDA: all-reduce in one step and in two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from thinwire.tools.bench.checks import Verdict
from thinwire.tools.bench.contender import Candidate, Contender, NotHere
from thinwire.tools.bench.problems import AllReduce, Problem

NAME = "torch symmetric memory"
#: What their kernels load at once.
_ALIGNMENT = 16


def of_symmetric_memory(problem: Problem) -> Candidate:
    """`torch.ops.symm_mem.two_shot_all_reduce_`, of float32 and bfloat16.

    It works in place, on memory of its own: a call copies the tensor there first, and the sum out of it. For ranks that
    are processes with a GPU each.
    """
    return Candidate(NAME, "none", None, lambda: _all_reduce(problem))


def _all_reduce(problem: Problem) -> Contender:
    comm, x, out = problem.comm, problem.x, problem.out
    if not isinstance(problem, AllReduce):
        raise NotHere("compared in all_reduce alone")
    if problem.dtype not in (torch.float32, torch.bfloat16) or x.nbytes % (_ALIGNMENT * comm.size):
        raise NotHere(f"takes float32 and bfloat16, in multiples of {_ALIGNMENT} bytes for each rank")
    from torch.distributed import _symmetric_memory

    operations: Any = torch.ops.symm_mem
    try:
        buffer = _symmetric_memory.empty(x.shape, dtype=x.dtype, device=x.device)
        _symmetric_memory.rendezvous(buffer, comm.group.group_name)
    except RuntimeError as error:
        raise NotHere(str(error).splitlines()[0]) from error
    reduce: Callable[..., object] = operations.two_shot_all_reduce_

    def run() -> Mapping[str, torch.Tensor]:
        buffer.copy_(x)
        reduce(buffer, "sum", comm.group.group_name)
        out.copy_(buffer)
        return {problem.operation: out}

    def judge(operation: str, got: torch.Tensor) -> Verdict:
        return problem.judge_rounded(got)

    return Contender(NAME, "none", None, run, judge, {problem.operation: problem.logical_bytes}, (out,))
