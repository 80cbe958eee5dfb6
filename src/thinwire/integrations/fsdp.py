"""FSDP2 (`fully_shard`) gathers parameters and reduce-scatters gradients in int8: docs/integrations-fsdp.md.

fully_shard(model)  # and its layers before
thinwire.integrations.fsdp.quantize(model)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from thinwire.comm import Communicator, as_communicator
from thinwire.comm.call import checked_programs
from thinwire.compiler import opaque
from thinwire.errors import ArgumentError
from thinwire.fused.codec import resolve_wire
from thinwire.fused.ops import all_gather, reduce_scatter
from thinwire.fused.staged_collective import arrived
from thinwire.wire import WireFormat

_MARK = "_thinwire_wires"  # of a module that has them


def quantize(
    model: torch.nn.Module,
    all_gather: str | WireFormat | None = "int8+h64",
    reduce_scatter: str | WireFormat | None = "int8+h64",
    error_feedback: bool = False,
    num_programs: int | None = 32,
) -> None:
    """Sends what FSDP2 sends between ranks in a wire format; once, on every rank alike, after `fully_shard`.

    Args:
        model: a module that `fully_shard` was applied to, or that has such modules.
        all_gather: the format of parameters; None leaves them to torch. Integers, 8-bit floats and parameters of mixed
            dtypes travel exactly.
        reduce_scatter: the format of gradients, which are summed in float32; None leaves them to torch.
        error_feedback: whether to add what quantising gradients lost to the next step's. It costs each rank a tensor
            as large as the gradients of the whole model, in the dtype of the reduction.
        num_programs: programs of each kernel on a GPU at most, so that the model's own kernels have the rest of it;
            None means four a multiprocessor.

    Raises:
        ArgumentError: nothing in the model is sharded, or some of it was quantised before; bitsandbytes keeps 4-bit
            weights in a float dtype; error feedback for what loses nothing; or torch refuses, as it does for a module
            whose parameters are on several meshes.
        WireFormatError: a format is unknown.
    """
    gather_wire, scatter_wire = (None if wire is None else resolve_wire(wire) for wire in (all_gather, reduce_scatter))
    checked_programs(num_programs)
    if error_feedback and not (scatter_wire is not None and scatter_wire.quantized):
        raise ArgumentError(f"error_feedback=True with reduce_scatter={reduce_scatter!r}, which loses nothing")
    sharded = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    if not sharded:
        raise ArgumentError(
            f"nothing in this {type(model).__name__} is sharded: call torch.distributed.fsdp.fully_shard on its layers "
            "and on itself first (FullyShardedDataParallel, which is FSDP1, cannot be quantised)"
        )
    if again := [name for name, module in sharded.items() if hasattr(module, _MARK)]:
        raise ArgumentError(f"module {again[0]!r} was quantised before, as {getattr(sharded[again[0]], _MARK)}")
    for name, module in model.named_modules() if gather_wire is not None and gather_wire.quantized else ():
        weight = getattr(module, "weight", None)
        if type(module).__module__.startswith("bitsandbytes.") and weight is not None and weight.is_floating_point():
            raise ArgumentError(
                f"module {name!r} is bitsandbytes' {type(module).__name__}, whose {weight.dtype} weight may hold "
                "packed integers: pass all_gather=None"
            )
    groups: dict[dist.ProcessGroup, Communicator] = {}
    for name, module in sharded.items():
        try:
            if gather_wire is not None:
                module.set_custom_all_gather(_AllGather(gather_wire, groups, num_programs))
            if scatter_wire is not None:
                module.set_custom_reduce_scatter(_ReduceScatter(scatter_wire, groups, num_programs, error_feedback))
        except ValueError as error:
            raise ArgumentError(f"module {name!r} cannot be quantised: {error}") from error
        setattr(module, _MARK, (gather_wire, scatter_wire))


class _Leg:
    """What a module's parameters or gradients travel by. `groups`: the communicators of process groups, for all."""

    def __init__(
        self, wire: WireFormat, groups: dict[dist.ProcessGroup, Communicator], programs: int | None,
        feedback: bool = False,
    ) -> None:  # fmt: skip
        self._wire, self._groups, self._programs, self._feedback = wire, groups, programs, feedback
        self._lost: torch.Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Plain memory, which FSDP may free."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _communicator(self, group: dist.ProcessGroup, device: torch.device) -> Communicator:
        comm = self._groups.get(group)
        if comm is None or comm.closed:
            # Ranks build their models at different speeds, so here they wait as long as the group itself allows.
            dist.barrier(group)
            comm = self._groups[group] = as_communicator(DeviceMesh.from_group(group, device.type))
        return comm


class _AllGather(_Leg, AllGather):
    @opaque
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        comm = self._communicator(group, input_tensor.device)
        # FSDP sends parameters of mixed dtypes as bytes.
        wire = self._wire if input_tensor.is_floating_point() and input_tensor.itemsize > 1 else "none"
        with comm.programs(self._programs):
            work = all_gather(input_tensor, out=output_tensor, wire=wire, comm=comm, async_op=async_op)
        return _Pending(work.wait) if async_op else None  # type: ignore[union-attr]


class _ReduceScatter(_Leg, ReduceScatter):
    @opaque
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        comm = self._communicator(group, input_tensor.device)
        name = next((name for name in ("SUM", "AVG", "PREMUL_SUM") if op == getattr(dist.ReduceOp, name)), None)
        if name is None:
            raise ArgumentError(f"reduce-scatter got {op!r}, expected ReduceOp.SUM, AVG or PREMUL_SUM(factor)")
        factor = {"SUM": 1.0, "AVG": 1 / comm.size}.get(name) or float(op.__getstate__()[1])
        if self._feedback:
            self._add_lost(input_tensor, comm)
        with comm.programs(self._programs):
            reduce_scatter(input_tensor, out=output_tensor, wire=self._wire, comm=comm)
        output_tensor.mul_(factor)

    def _add_lost(self, x: torch.Tensor, comm: Communicator) -> None:
        """Adds what quantising lost in the last step, and keeps what it is about to lose."""
        if self._lost is not None and self._lost.shape == x.shape:  # else other parameters have gradients now
            x += self._lost
        sent = torch.cat([arrived(part, 1, self._wire, comm.cpu_share.threads) for part in x.chunk(comm.size)])
        self._lost = torch.sub(x, sent, out=sent).nan_to_num_(0.0, 0.0, 0.0)  # a step that overflowed leaves nothing


class _Pending(dist.Work):
    """A gather under way, as FSDP waits for torch's works alone."""

    def __init__(self, wait: Callable[[], object]) -> None:
        super().__init__()
        self._wait = wait

    def wait(self, timeout: object = None) -> bool:
        self._wait()
        return True
