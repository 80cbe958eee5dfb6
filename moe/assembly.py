"""What of an ExpertParallel depends on its group: the transport and its lanes, allocated, made anew and given back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NoReturn

import torch

from thinwire.comm import Communicator, Group
from thinwire.comm.groups import group_of
from thinwire.compiler import opaque
from thinwire.errors import CapacityError, LaneError, ThinwireError
from thinwire.fused.transport import Refusal, choose, open_direct
from thinwire.moe.config import ParallelConfig
from thinwire.moe.direct import DirectRounds
from thinwire.moe.direct_gradients import BackwardRounds
from thinwire.moe.dispatched import Rounds
from thinwire.moe.staged import StagedRounds
from thinwire.triton_kernels.round_layout import RoundLayout
from thinwire.triton_kernels.signal import MAX_WORLD

_MOST_GENERATIONS = 1 << 31


class Assembly:
    """The base of :class:`thinwire.ExpertParallel`, which says what its parts are for."""

    def __init__(self, config: ParallelConfig) -> None:
        self.num_experts, self.top_k, self.hidden_size = config.num_experts, config.top_k, config.hidden_size
        self.wire, self.combine_wire, self.grad_wire = config.wire, config.combine_wire, config.grad_wire
        self.lanes, self.align, self.num_programs, self.dtype = (
            config.lanes, config.align, config.num_programs, config.dtype,
        )  # fmt: skip
        self.max_tokens = config.max_tokens
        self._closed = False
        with config.comm._settled_recorder().begin("ExpertParallel"):
            self._assemble(config, generation=0)

    def _assemble(self, config: ParallelConfig, generation: int) -> None:
        """Everything that depends on the group. Collective."""
        self._config, self._generation = config, generation
        self.comm, self.timeout, self.local_experts = config.comm, config.peer_timeout, config.local_experts
        self.dispatch_backend, self.combine_backend = config.dispatch_backend, config.combine_backend
        self.grad_backend = config.grad_backend
        self.comm.require_same("ExpertParallel", config.settings(generation))
        self._backward: DirectRounds | None = None
        found = choose("ExpertParallel", config.transport, self.comm, [], self._open_direct, no_memory=CapacityError)
        if isinstance(found, Refusal):
            reason = found.reason if config.transport == "staged" else f"direct is not available: {found.reason}"
            self._rounds: Rounds = StagedRounds(config, reason)
        else:
            self._rounds = found
        self.transport = self._rounds.name

    def _open_direct(self, kind: type[DirectRounds] = DirectRounds) -> DirectRounds | Refusal:
        """Lanes for forward or for backward. Collective."""
        if self.comm.size > MAX_WORLD:
            return Refusal("ExpertParallel", f"it takes up to {MAX_WORLD} ranks, and here are {self.comm.size}")
        config = self._config
        if config.is_double:
            return Refusal("ExpertParallel", "its kernels do not take float64")
        if backward := kind is BackwardRounds:
            config = replace(config, wire=config.grad_wire, combine_wire=config.grad_wire)
        layout = RoundLayout.of(
            world=self.comm.size,
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden=self.hidden_size,
            max_tokens=self.max_tokens,
            wire=config.wire,
            combine_wire=config.combine_wire,
            dtype=self.dtype,
            checksums=self.comm.integrity != "none",
            weight_grads=backward and self.comm.integrity == "none",
        )
        reason = "as asked for" if config.transport == "direct" else "every rank can map every peer's memory"
        return open_direct(
            self.comm,
            "ExpertParallel",
            self.lanes * layout.NUM_BYTES,
            {},
            lambda memory: kind(config, layout, memory, reason),
            self._generation,
        )

    @property
    def memory_bytes(self) -> int:
        """Bytes held between calls: lanes of the direct transport, none if staged.

        The same before and after each call, but for the first dispatch that wants gradients, which adds as many lanes.
        """
        return self._rounds.memory_bytes + (0 if self._backward is None else self._backward.memory_bytes)

    @opaque
    def check(self) -> None:
        """Waits for what was launched on the current stream, and raises what went wrong on the device.

        Raises:
            PeerTimeout: a peer did not answer in time.
            IntegrityError: what arrived in an earlier call is not what was sent.
            RoutingError: ids out of range, or dtypes that differ between ranks, in an earlier dispatch.
        """
        self._require_not_closed()
        self._rounds.check()
        if self._backward is not None:
            self._backward.check()

    def rebuild(self, group: Group | Iterable[int] | None = None) -> None:
        """Goes on with the ranks that are left after a PeerTimeout, or with another group. Collective over them.

        Waits for the device, ends every round, and allocates new memory: the old one may still be written to by a peer
        that was given up and wakes. `comm`, `local_experts` and, with transport `"auto"`, the transport may be others
        afterwards. The old communicator stays the caller's.

        Args:
            group: None: `comm.shrink()`, without the ranks that a PeerTimeout of this object, or of its communicator,
                has named. Ranks, such as a PeerTimeout's `ranks`: `comm.shrink(ranks)`, without these. Otherwise a
                communicator, or a process group that is given this one's device, timeout and integrity.

        Raises:
            ArgumentError: ranks that this one's communicator does not have.
            ThinwireError: this rank is one of those that are lost, or the others go on without it.
            PeerTimeout: another rank was lost meanwhile; this object is as before if that was in `shrink`.
            ConfigMismatch, TransportUnavailable, CapacityError: as the constructor; the object is closed then.
        """
        self._require_not_closed()
        if isinstance(group, Communicator):
            comm = group
        elif group is None or isinstance(group, Iterable):
            comm = self.comm.shrink(self._lost if group is None else group)
        else:
            old = self.comm
            comm = Communicator(group_of(group)[0], device=old.device, timeout=old.timeout, integrity=old.integrity)
        if self.comm.device.type == "cuda":
            torch.cuda.synchronize(self.comm.device)
        with comm._settled_recorder().begin("rebuild"):
            generations = comm.all_gather_data(self._generation, int)
            for rank, generation in enumerate(generations):
                if not 0 <= generation < _MOST_GENERATIONS:
                    raise ThinwireError(
                        f"rank {rank} is at generation {generation}, expected 0 to {_MOST_GENERATIONS - 1}"
                    )
            self.close()
            self._assemble(replace(self._config, comm=comm), max(generations) + 1)
        self._closed = False

    @property
    def _lost(self) -> tuple[int, ...] | None:
        lost = self._rounds.lost
        return self._backward.lost if lost is None and self._backward is not None else lost

    def explain(self) -> str:
        """What was chosen, and why."""
        backend = self.dispatch_backend
        return "\n".join(
            (
                self._rounds.describe(),
                f"wire: {self.wire} out, {self.combine_wire} back, {self.grad_wire} for gradients",
                f"kernels: {backend.name} ({backend.reason})",
                f"experts: {self.num_experts} over {self.comm.size} ranks, here {self.local_experts}",
                self.comm.explain(),
            )
        )

    def close(self) -> None:
        """Ends every round and gives memory back; the communicator stays open. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._rounds.open_rounds[:] = [None] * self.lanes
        self._rounds.close()
        if self._backward is not None:
            self._backward.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "an ExpertParallel cannot be copied or pickled, as it holds memory that peers write to: share the object "
            "itself, as one serves all layers of these sizes, or construct another one on all ranks; of a sharded "
            "MoELayer copy the state_dict()"
        )

    def _require_not_closed(self) -> None:
        if self._closed:
            raise LaneError("this ExpertParallel is closed")

    def _require_lane(self, lane: object) -> None:
        if not isinstance(lane, int) or isinstance(lane, bool) or not 0 <= lane < self.lanes:
            raise LaneError(f"there is no lane {lane!r}; this ExpertParallel has lanes 0 ... {self.lanes - 1}")
