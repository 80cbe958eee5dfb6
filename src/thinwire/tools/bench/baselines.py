"""What collectives are compared with: the process group's own, Open MPI's, quantising by hand, and a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from thinwire.comm import Communicator
from thinwire.tools.bench import checks, mpi
from thinwire.tools.bench.checks import Verdict
from thinwire.tools.bench.contender import Candidate, Contender, NotHere, of_collective
from thinwire.tools.bench.mpi import OpenMPI
from thinwire.tools.bench.problems import AllGather, AllReduce, AllToAll, Problem, ReduceScatter, Sum
from thinwire.wire import WireFormat

COPY, SYMMETRIC_MEMORY = "copy", "torch symmetric memory"
EXACT = WireFormat.parse("none")
_SCALE_BYTES = 2
#: What torch's kernels over symmetric memory load at once.
_ALIGNMENT = 16
#: PyTorch 2.13 has new names for both, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_name(comm: Communicator) -> str | None:
    """What the process group's own collectives are called, "gloo" or "nccl"; None where ranks are threads."""
    return None if comm.in_process else str(dist.get_backend(comm.group))


def copy(source: torch.Tensor, target: torch.Tensor, operations: tuple[str, ...]) -> Candidate:
    """A plain copy of as many bytes, for what memory allows; measured as each of the operations."""

    parts: list[Callable[..., Any]] = [partial(target.copy_, source)]

    def run() -> Mapping[str, torch.Tensor]:
        parts[0]()
        return dict.fromkeys(operations, target)

    def judge(operation: str, got: torch.Tensor) -> Verdict:
        return checks.compare(got, source, 0.0)

    sent = dict.fromkeys(operations, 0.0)
    made = partial(Contender, COPY, "none", None, run, judge, sent, (target,), parts=parts)
    return Candidate(COPY, "none", None, made)


def _exact(name: str, problem: Problem, call: Callable[[], object]) -> Contender:
    """Of exact collectives: what is moved arrives to the last bit, sums are rounded in some order."""
    judge = problem.judge_rounded if isinstance(problem, Sum) else partial(problem.judge, wire=EXACT)
    return of_collective(name, problem, call, judge, problem.logical_bytes)


def of_group(problem: Problem, name: str) -> Candidate:
    """The process group's own collective, in the tensor's dtype."""
    return Candidate(name, "none", None, lambda: _exact(name, problem, _group_call(problem)))


def _group_call(problem: Problem) -> Callable[[], object]:
    x, out, group = problem.x, problem.out, problem.comm.group
    if isinstance(problem, AllToAll):
        return partial(dist.all_to_all_single, out, x, problem.recv_counts, problem.send_counts, group=group)
    if isinstance(problem, AllGather):
        return partial(_all_gather, out, x, group=group)
    if isinstance(problem, ReduceScatter):
        return partial(_reduce_scatter, out, x, group=group)

    def all_reduce() -> None:
        out.copy_(x)  # it works in place, and sums of sums would overflow
        dist.all_reduce(out, group=group)

    return all_reduce


def of_mpi(problem: Problem, world: OpenMPI) -> Candidate:
    """Open MPI's collective; sums of 16-bit floats are sums of float32, which the wire's name then says."""
    x, out, dtype = problem.x, problem.out, problem.dtype
    if not isinstance(problem, Sum):
        if isinstance(problem, AllToAll):
            call = world.all_to_all_v(x, problem.send_counts, out, problem.recv_counts)
        else:
            call = world.all_gather(x, out)
        return Candidate(mpi.NAME, "none", None, lambda: _exact(mpi.NAME, problem, call))
    sum_dtype = world.sum_dtype(dtype)
    wire = "none" if sum_dtype == dtype else str(sum_dtype).removeprefix("torch.")

    def make() -> Contender:
        wide, wide_out = x.to(sum_dtype), out.to(sum_dtype)
        reduce = world.reduce_scatter if isinstance(problem, ReduceScatter) else world.all_reduce
        call, sent = reduce(wide, wide_out), problem.logical_bytes * sum_dtype.itemsize / dtype.itemsize
        return of_collective(mpi.NAME, problem, call, problem.judge_rounded, sent, wire, x=wide, out=wide_out)

    return Candidate(mpi.NAME, wire, None, make)


def of_symmetric_memory(problem: Problem) -> Candidate:
    """`torch.ops.symm_mem.two_shot_all_reduce_`, of float32 and bfloat16.

    It works in place, on memory of its own: a call copies the tensor there first, and the sum out of it. For ranks that
    are processes with a GPU each.
    """
    return Candidate(SYMMETRIC_MEMORY, "none", None, lambda: _two_shot(problem))


def _two_shot(problem: Problem) -> Contender:
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

    def call() -> None:
        buffer.copy_(x)
        reduce(buffer, "sum", comm.group.group_name)
        out.copy_(buffer)

    return of_collective(SYMMETRIC_MEMORY, problem, call, problem.judge_rounded, problem.logical_bytes)


class SeparateInt8:
    """int8 with a bfloat16 scale for each group of consecutive elements, scales behind the elements of a row.

    Raises:
        NotHere: another format.
    """

    def __init__(self, wire: WireFormat) -> None:
        if wire.name != "int8" or wire.row_scale or wire.rotated:
            raise NotHere("written for int8 in groups alone")
        self.group, self.qmax = wire.group, wire.qmax

    def row_bytes(self, width: int) -> int:
        """Of an encoded row of so many elements."""
        groups = -(-width // self.group)
        return groups * (self.group + _SCALE_BYTES)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, width] floats to uint8 [rows, row_bytes]."""
        count, width = rows.shape
        num_groups = -(-width // self.group)
        padded = torch.nn.functional.pad(rows, (0, -width % self.group)) if width % self.group else rows
        groups = padded.float().reshape(count, num_groups, self.group)
        scales = (groups.abs().amax(-1, keepdim=True) / self.qmax).bfloat16()
        quantized = (groups / scales.float().clamp_min(1e-38)).round().clamp(-self.qmax, self.qmax).to(torch.int8)
        payload = quantized.reshape(count, num_groups * self.group).view(torch.uint8)
        return torch.cat([payload, scales.reshape(count, num_groups).view(torch.uint8)], 1)

    def decode(self, encoded: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Back to [rows, width]."""
        count, groups = encoded.shape[0], -(-width // self.group)
        payload = encoded[:, : groups * self.group].contiguous().view(torch.int8)
        scales = encoded[:, groups * self.group :].contiguous().view(torch.bfloat16)
        floats = payload.view(count, groups, self.group).float() * scales.float().view(count, groups, 1)
        return floats.view(count, groups * self.group)[:, :width].to(dtype)


def quantized_by_hand(problem: Problem, wire: str, group: str) -> Candidate:
    """Quantises, calls the process group's collective, dequantises; each in torch operations of its own."""
    name = f"quantize, {group}"
    return Candidate(name, wire, None, lambda: _quantized(problem, SeparateInt8(WireFormat.parse(wire)), wire, name))


def _quantized(problem: Problem, codec: SeparateInt8, wire: str, name: str) -> Contender:
    comm, x, out, parsed = problem.comm, problem.x, problem.out, WireFormat.parse(wire)
    size, group = comm.size, comm.group

    def exchange(rows: torch.Tensor, recv_counts: list[int] | None, send_counts: list[int] | None) -> torch.Tensor:
        received = rows.new_empty(sum(recv_counts) if recv_counts else len(rows), rows.shape[1])
        dist.all_to_all_single(received, rows, recv_counts, send_counts, group=group)
        return received

    def gather(row: torch.Tensor) -> torch.Tensor:
        received = row.new_empty(size, row.shape[1])
        _all_gather(received, row, group=group)
        return received

    if isinstance(problem, AllToAll):
        width, sent = problem.width, problem.leaving * codec.row_bytes(problem.width)

        def call() -> None:
            received = exchange(codec.encode(x), problem.recv_counts, problem.send_counts)
            out.copy_(codec.decode(received, width, x.dtype))

    elif isinstance(problem, AllGather):
        share, sent = problem.share, (size - 1) * codec.row_bytes(problem.share)

        def call() -> None:
            out.copy_(codec.decode(gather(codec.encode(x[None])), share, x.dtype).view(-1))

    elif isinstance(problem, ReduceScatter):
        share, sent = problem.share, (size - 1) * codec.row_bytes(problem.share)

        def call() -> None:
            received = exchange(codec.encode(x.view(size, share)), None, None)
            out.copy_(codec.decode(received, share, torch.float32).sum(0))

    else:
        assert isinstance(problem, AllReduce)
        # Whole groups for each rank, so that scales belong to the same elements everywhere.
        share = -(-problem.elements // (size * codec.group)) * codec.group
        sent, missing = 2 * (size - 1) * codec.row_bytes(share), size * share - problem.elements

        def call() -> None:
            received = exchange(codec.encode(torch.nn.functional.pad(x, (0, missing)).view(size, share)), None, None)
            total = codec.decode(received, share, torch.float32).sum(0, keepdim=True)
            out.copy_(codec.decode(gather(codec.encode(total)), share, x.dtype).view(-1)[: problem.elements])

    def judge(got: torch.Tensor) -> Verdict:
        if not isinstance(problem, Sum):
            return problem.judge(got, parsed)
        counts = [max(0, min(share, problem.elements - rank * share)) for rank in range(size)]
        return problem.judge_quantized(got, parsed, counts, -(-share // codec.group) * codec.group)

    return of_collective(name, problem, call, judge, sent, wire)
