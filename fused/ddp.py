"""Averaging gradients in int8: a communication hook for DistributedDataParallel.

    model = DistributedDataParallel(net)
    model.register_comm_hook(AllReduceState(comm), all_reduce_hook)

Gradients are divided by the world size and summed by `thinwire.all_reduce`, bucket by bucket, so that all ranks
take the same step to the last bit. With error feedback, what quantising a rank's gradient lost in one step is added to
its gradient in the next: errors then cancel over time instead of adding up. That costs a tensor as large as the
gradients, and another pass over them.
"""

# No `from __future__ import annotations`: DistributedDataParallel looks at the hook's annotations themselves.
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from thinwire.comm import Communicator, communicator_or_default
from thinwire.comm.call import checked_programs
from thinwire.compiler import opaque, require_flag
from thinwire.errors import ArgumentError
from thinwire.fused.codec import require_float, resolve_wire
from thinwire.fused.ops import all_reduce
from thinwire.fused.staged_collective import arrived
from thinwire.fused.transport import check_transport
from thinwire.wire import WireFormat


@dataclass
class AllReduceState:
    """What the hook is registered with.

    Attributes:
        comm: a communicator over the ranks of the model's process group, or that group itself.
        wire: the format in which gradients travel; None means THINWIRE_WIRE, else int8+h64.
        gather_wire: the format in which their averages travel; None means `wire`.
        error_feedback: whether to add what quantising lost to the next step's gradients. It is the first leg's loss;
            the second leg's is the same on all ranks, and stays.
        transport: "auto", "direct" or "staged".
        num_programs: programs of each kernel on a GPU at most, so that backward has the rest of it; None means four a
            multiprocessor.
    """

    comm: Communicator
    wire: str | WireFormat | None = None
    gather_wire: str | WireFormat | None = None
    error_feedback: bool = False
    transport: str = "auto"
    num_programs: int | None = 32
    _lost: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.comm = communicator_or_default(self.comm)
        check_transport(self.transport)
        checked_programs(self.num_programs)
        require_flag("error_feedback", self.error_feedback)
        self.wire = resolve_wire(self.wire)
        self.gather_wire = self.wire if self.gather_wire is None else resolve_wire(self.gather_wire)

    def lost(self, bucket: dist.GradBucket) -> torch.Tensor:
        """What the last step lost of a bucket's gradients; zeros at first, and after buckets were made anew."""
        parameters, found = self._lost.get(bucket.index(), ([], None))
        now = bucket.parameters()
        if found is None or [*map(id, parameters)] != [*map(id, now)]:
            found = torch.zeros_like(bucket.buffer())
            self._lost[bucket.index()] = (now, found)
        return found


@opaque
def all_reduce_hook(state: AllReduceState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients over the ranks; for `DistributedDataParallel.register_comm_hook`.

    Args:
        state: of this model alone.
        bucket: float32, float16 or bfloat16 gradients.

    Raises:
        ArgumentError: another state or bucket, or sparse gradients.
        WireFormatError: gradients that the wire cannot carry.
        PeerTimeout: a peer did not answer within the communicator's timeout.
    """
    if not isinstance(state, AllReduceState):
        raise ArgumentError(f"state is a {type(state).__name__}, expected an AllReduceState")
    if not callable(getattr(bucket, "buffer", None)):
        raise ArgumentError(f"bucket is a {type(bucket).__name__}, expected the GradBucket of DistributedDataParallel")
    gradients = bucket.buffer()
    if gradients.layout is not torch.strided:
        raise ArgumentError(
            f"bucket {bucket.index()} of DistributedDataParallel has gradients of layout {gradients.layout}, such as "
            "those of nn.Embedding(sparse=True), and all_reduce_hook takes dense ones: pass sparse=False there, or "
            "have _set_params_and_buffers_to_ignore_for_model leave that parameter to you"
        )
    wire, comm = resolve_wire(state.wire), state.comm
    require_float(gradients, wire, "all_reduce_hook")
    gradients.div_(comm.size)
    if state.error_feedback and wire.quantized:
        lost = state.lost(bucket)
        gradients.add_(lost)
        torch.sub(gradients, arrived(gradients, comm.size, wire, comm.cpu_share.threads), out=lost)
        lost.nan_to_num_(0.0, 0.0, 0.0)  # a step whose gradients overflowed is over with that step
    gather_wire, transport = state.gather_wire, state.transport
    with comm.programs(state.num_programs):
        all_reduce(gradients, out=gradients, wire=wire, gather_wire=gather_wire, comm=comm, transport=transport)
    on_gpu = gradients.device.type == "cuda"
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[gradients.device] if on_gpu else None)
    future.set_result(gradients)
    return future
