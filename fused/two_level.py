"""All-gather, reduce-scatter and all-reduce on two levels: legs between hosts around exact legs within each of them.

Ranks at the same place of their hosts form a *rail*: they alone exchange messages between hosts, through the process
group. So rows cross once. Within a host ranks read each other's memory, as on the direct transport:

    all-gather       a rank's records go along its rail; who gets them passes them on in its host, as they are
    reduce-scatter   a host sums its ranks' rows, each rank those for its rail; the sums go along the rail
    all-reduce       the second, then the first, of what the second gives

Sums in a host are float32, of what ranks passed, in ascending rank. So a wire's errors are as many as on one level: one
of a reduce-scatter, two of an all-reduce. On H hosts a rank sends each part, or its own, to H - 1 ranks of other hosts;
on one level to all of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from thinwire.comm.call import Attachment
from thinwire.comm.communicator import Communicator
from thinwire.comm.hosts import describe
from thinwire.errors import ThinwireError
from thinwire.fused.call import CollectiveCall, flat
from thinwire.fused.collective import KEY
from thinwire.fused.counts import Segments, dense_segments
from thinwire.fused.partition import row_elements, signature_of
from thinwire.fused.staged import cut_pieces
from thinwire.fused.staged_collective import GatherLeg, ScatterLeg, StagedCollectives
from thinwire.fused.transport import Staged, uses_triton, why_not_two_levels
from thinwire.triton_kernels.leg_layout import ALL_GATHER, REDUCE_SCATTER
from thinwire.wire import EXACT, WireFormat

if TYPE_CHECKING:
    from thinwire.fused.pulled_legs import PulledLegs


def open_two_levels(comm: Communicator, wires: Sequence[WireFormat] = ()) -> StagedCollectives | TwoLevelCollectives:
    """What carries out the collectives of a communicator of several hosts. Made at the first call, by all ranks.

    Args:
        wires: as of `open_collectives`.

    Raises:
        TransportUnavailable, ConfigMismatch, PeerTimeout: see `open_collectives`.
    """

    def new() -> StagedCollectives | TwoLevelCollectives:
        why_not, here = why_not_two_levels(comm), next(members for members in comm.hosts if comm.rank in members)
        if comm.device.type != "cpu":
            why_not = f"two levels of collectives are for CPU ranks, and its tensors live on {comm.device}"
        if why_not is None and len({*map(len, comm.hosts)}) > 1:
            why_not = f"its hosts have different numbers of ranks: {describe(comm.hosts)}"
        if why_not is not None:
            return StagedCollectives(KEY, why_not)
        if uses_triton(comm):
            return StagedCollectives(KEY, "two levels of collectives are for numba's kernels")
        from thinwire.fused.pulled_legs import open_legs  # here, as loading numba takes a while

        legs = open_legs(comm, here)
        if isinstance(legs, Staged):
            return StagedCollectives.instead_of(KEY, legs)
        return TwoLevelCollectives(comm, legs)

    return comm.attached(KEY, new)


class TwoLevelCollectives(Attachment):
    """Collectives on two levels; a Transport.

    Args:
        within: those of this rank's host.
    """

    name = "two_level"
    lack: type[ThinwireError] | None = None

    def __init__(self, comm: Communicator, within: PulledLegs) -> None:
        self._within, self._here, self._hosts = within, within.members, comm.hosts
        self._rail = [members[within.rank] for members in comm.hosts]
        self.reason = f"its ranks are on several hosts: {describe(comm.hosts)}"

    def describe(self) -> str:
        """One line for `Communicator.explain`."""
        return f"{KEY}: two levels, staged between hosts; in this one {self._within.describe()}"

    def begin(self, comm: Communicator, call: CollectiveCall, x: torch.Tensor, out: torch.Tensor) -> None:
        """The whole call; see `StagedCollectives.begin`. Waits here: later calls use the same memory in the host."""
        x, out = flat(x.detach()), out.detach().view(-1)
        if not out.numel():
            return
        with torch.no_grad():
            if call.op == ALL_GATHER:
                self._gather(comm, call, x, out)
                return
            sums = self._scatter(comm, call, x)
            if call.op == REDUCE_SCATTER:
                sums.sum_into(out)
            else:
                self._gather(comm, call, sums, out)

    def _scatter(self, comm: Communicator, call: CollectiveCall, x: torch.Tensor) -> ScatterLeg:
        """Starts sending this host's sums of the rail's parts to the parts' owners; x may then be overwritten."""
        parts = call.parts
        own = dense_segments([count if rank in self._rail else 0 for rank, count in enumerate(parts.counts)])
        sums = comm.result_memory.new_empty(x, (own.rows,), torch.float32)
        targets = own.cut(sums)
        for members, target in zip(self._hosts, self._rail, strict=True):
            self._run(call, REDUCE_SCATTER, _of(parts, members), call.row, x, targets[target])
        return ScatterLeg(comm, sums, own, call.row, call.wires[0], call.described, self._rail)

    def _gather(
        self, comm: Communicator, call: CollectiveCall, source: torch.Tensor | ScatterLeg, out: torch.Tensor
    ) -> None:
        """Sends this rank's part to everyone, or the sums of what the leg brings, and fills `out` with all parts."""
        parts, row, wire, dtype = call.parts, call.row, call.wires[-1], call.dtype
        if isinstance(source, torch.Tensor) and not wire.quantized:  # of any dtype
            source, out, dtype = source.view(torch.uint8), out.view(torch.uint8), torch.uint8
            parts = dense_segments([count * call.dtype.itemsize for count in parts.counts])
            row = row_elements(max(parts.counts))
        leg_of = _ByteLeg if dtype == torch.uint8 else GatherLeg
        leg = leg_of(comm, parts, row, wire, dtype, source, call.described, self._rail)
        slots, received = dense_segments(leg.counts(parts)), leg.exchange.received
        records = comm.result_memory.new_empty(received, (slots.rows, leg.record_bytes))
        # The own host's while the others' are on their way.
        self._pass_on(call, self._here, slots, leg.slots.cut(received)[comm.rank], records)
        arrivals = leg.exchange.arrivals()
        # A rail's last parts may be shorter than another's; pieces are alike, so that a host's ranks stay in step.
        for start, stop in cut_pieces(max(slots.counts), leg.piece_record_bytes, comm.backend):
            next(arrivals, None)
            arrived = slots.within(start, stop)
            of_rail = leg.slots.within(start, stop).cut(received)
            for members, source_rank in zip(self._hosts, self._rail, strict=True):
                if members != self._here:
                    self._pass_on(call, members, arrived, of_rail[source_rank], records)
            for rows, part in zip(arrived.cut(records), parts.cut(out), strict=True):
                leg.unpack(rows, part, start)

    def _pass_on(
        self,
        call: CollectiveCall,
        members: Sequence[int],
        slots: Segments,
        own: torch.Tensor,
        records: torch.Tensor,
    ) -> None:
        """Passes records of a host's ranks on to this host: each rank those of its rail, `own`, into `records`."""
        words = records.shape[1] // 4
        parts = _of(Segments(*([words * number for number in numbers] for numbers in slots)), members)
        if any(parts.counts):
            self._run(call, ALL_GATHER, parts, words, *(rows.view(-1).view(torch.float32) for rows in (own, records)))

    def _run(
        self, call: CollectiveCall, op: int, parts: Segments, row: int, x: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Runs a leg within the host, of exact rows and with float32 sums."""
        # Ranks compare the whole call: a rail compares its own, and records of other formats may be as long.
        signature = signature_of(call.op, call.parts, call.row, call.dtype, call.wires[0], call.wires[-1])
        job = self._within.job(op, parts, row, EXACT, EXACT, x.dtype, torch.float32, signature)
        self._within.run(job, x, out)


class _ByteLeg(GatherLeg):
    """Gathers bytes, which are records as they are."""

    def pack(self, part: torch.Tensor, start: int, stop: int, records: torch.Tensor) -> None:
        """See `_Rows.pack`."""
        rows = part[start * self.row : stop * self.row]
        records.view(-1)[: rows.numel()] = rows

    def unpack(self, records: torch.Tensor, part: torch.Tensor, start: int) -> None:
        """See `_Rows.unpack`."""
        rows = part[start * self.row :][: records.numel()]
        rows.copy_(records.view(-1)[: rows.numel()])


def _of(parts: Segments, ranks: Sequence[int]) -> Segments:
    """Picks the parts of some ranks."""
    return Segments([parts.counts[rank] for rank in ranks], [parts.displs[rank] for rank in ranks])
