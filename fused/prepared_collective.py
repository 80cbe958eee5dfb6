"""What all-reduce, reduce-scatter and all-gather have in common: one call of them, and which way it goes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from thinwire.comm import Communicator
from thinwire.comm.exact import Reduction
from thinwire.comm.work import Work
from thinwire.errors import WireFormatError
from thinwire.fused.codec import FLOAT_DTYPES, resolve_wire
from thinwire.fused.collective import DirectCollectives, open_collectives
from thinwire.fused.counts import Segments
from thinwire.fused.prepared import PreparedCall, check_out
from thinwire.fused.staged_collective import StagedCollectives
from thinwire.fused.transport import choose
from thinwire.fused.two_level import TwoLevelCollectives, open_two_levels
from thinwire.triton_kernels.leg_layout import ALL_GATHER
from thinwire.wire import WireFormat

if TYPE_CHECKING:
    from thinwire.fused.pulled_legs import PulledLegs

    Carrier = DirectCollectives | PulledLegs | StagedCollectives | TwoLevelCollectives


class PreparedCollective(PreparedCall):
    """One of the collectives, with `prepare` still to say what its tensors are.

    Args:
        op: ALL_REDUCE, REDUCE_SCATTER or ALL_GATHER.
        wires: of its legs; one, where they have the same. An all-gather has a first leg that nothing travels on.
        reduction: what it does to the ranks' tensors, if anything.

    Attributes:
        exactly: whether it is torch.distributed's affair: a reduction without a quantised leg, and no sum of floats.
    """

    parts: Segments  # elements of every rank's part
    row: int  # elements of a row
    out_shape: tuple[int, ...]
    place: int  # bytes from where x begins to where an output may begin that shares its memory
    details: tuple[object, ...] = ()  # for the flight recorder
    job: Any = None  # of the direct transport
    _carrier: Carrier | None = None

    def __init__(
        self,
        comm: Communicator,
        what: str,
        op: int,
        x: torch.Tensor,
        wires: Sequence[str | WireFormat | None],
        transport: str,
        reduction: object = "sum",
    ) -> None:
        super().__init__(comm, what, x, [resolve_wire(wire) for wire in wires], transport)
        self.op, self.reduction = op, reduction
        self._legs = self.wires[-1:] if op == ALL_GATHER else self.wires
        self.exactly = op != ALL_GATHER and self._reduces_exactly(Reduction.of(reduction, x.dtype).name)

    def _reduces_exactly(self, name: str) -> bool:
        quantized = [wire for wire in self.wires if wire.quantized]
        if name != "sum" and quantized:
            raise WireFormatError(
                f"{self.what}: op {name!r} cannot be quantised ({quantized[0]}), only a sum can; "
                'pass wire="none" for it'
            )
        return not quantized and (name != "sum" or self.dtype not in FLOAT_DTYPES)

    @abstractmethod
    def staged(self, comm: Communicator, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        """Begins a call through the process group, of flat tensors; what it returns ends the call."""

    def reduced(self, comm: Communicator, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        """The same of a reduction that is torch.distributed's affair."""
        raise NotImplementedError

    @property
    def described(self) -> str:
        """All that ranks must agree on, the same text on ranks that do."""
        what = self.what.removesuffix("_v")
        return f"{what} of {self.parts.counts} {self.dtype} in rows of {self.row} as {self.wires}"

    def run(
        self, comm: Communicator, x: torch.Tensor, out: torch.Tensor | None, async_op: bool
    ) -> torch.Tensor | Work[torch.Tensor]:
        """See `PreparedCall.run`."""
        if out is not None:
            check_out(self.what, x, out, self.out_shape, self.place)
        with comm.call(self.what, self.shape, self.dtype, self._legs, self.transport, self.details) as call:
            carrier = self._carrier or self._choose(comm)
            call.takes(carrier.name)
            target = comm.result_memory.new_empty(x, self.out_shape) if out is None else out
            finish = carrier.begin(comm, self, x, target)

            def end() -> torch.Tensor:
                if finish is not None:
                    with torch.no_grad():
                        finish()
                return target

            return comm.deliver(call, end, target.device, async_op)

    def _choose(self, comm: Communicator) -> Carrier:
        if self.exactly:
            self._carrier = StagedCollectives(self.what, "torch.distributed reduces")
        else:
            open_ = open_two_levels if len(comm.hosts) > 1 else open_collectives
            self._carrier = choose(
                self.what, self.transport, comm, self.wires, lambda: open_(comm, wires=self.wires), StagedCollectives
            )
        return self._carrier
