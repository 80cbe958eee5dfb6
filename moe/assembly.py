"""What of an ExpertParallel depends on its group: the transport and its lanes, allocated, made anew and given back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import NoReturn, TypeVar

import torch

from thinwire.comm import Communicator, Group
from thinwire.comm.exchange import name_ranks
from thinwire.comm.groups import group_of
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.comm.tensors import is_int
from thinwire.compiler import opaque
from thinwire.errors import CapacityError, LaneError, RoutingError, ThinwireError, TransportUnavailable
from thinwire.fused.transport import Refusal, choose, open_direct
from thinwire.moe.config import ParallelConfig
from thinwire.moe.direct import DirectRounds
from thinwire.moe.direct_gradients import BackwardRounds
from thinwire.moe.dispatched import Rounds, Started
from thinwire.moe.gradients import MOST_LAYERS
from thinwire.moe.staged import StagedRounds

_MOST_GENERATIONS = 1 << 31
_Kind = TypeVar("_Kind", bound=DirectRounds)


class Assembly:
    """The base of `thinwire.ExpertParallel`, which says what its parts are for."""

    _parent: int | None = None  # the process that it is of, in one that was forked from there

    def __init__(self, config: ParallelConfig) -> None:
        self.num_experts, self.top_k, self.hidden_size = config.num_experts, config.top_k, config.hidden_size
        self.wire, self.combine_wire, self.grad_wire = config.wire, config.combine_wire, config.grad_wire
        self.lanes, self.align, self.num_programs, self.dtype = (
            config.lanes, config.align, config.num_programs, config.dtype,
        )  # fmt: skip
        self._closed = False
        self._num_layers = 0  # that have a number
        with config.comm.call("ExpertParallel"):
            self._assemble(config, generation=0)

    def _assemble(self, config: ParallelConfig, generation: int) -> None:
        """Everything that depends on the group. Collective."""
        self._config, self._generation = config, generation
        self.comm, self.timeout, self.local_experts = config.comm, config.peer_timeout, config.local_experts
        self.num_local_experts = len(self.local_experts)  # of a range torch.compile makes symbols
        self.dispatch_backend, self.combine_backend = config.dispatch_backend, config.combine_backend
        self.grad_backend = config.grad_backend
        self.comm.require_same("ExpertParallel", config.settings(generation))
        self._backward: BackwardRounds | None = None

        def direct() -> DirectRounds | Refusal:
            return self._open_direct(DirectRounds)

        found = choose("ExpertParallel", config.transport, self.comm, [], direct, no_memory=CapacityError)
        if isinstance(found, Refusal):
            reason = found.reason if config.transport == "staged" else f"direct is not available: {found.reason}"
            self._rounds: Rounds = StagedRounds(config, reason)
        else:
            self._rounds = found
        self.transport = self._rounds.name
        facts = self._facts()  # of which `open_direct` has told the first, where it was tried
        self.comm.log(f"ExpertParallel: {'; '.join(facts if config.transport == 'staged' else facts[1:])}")

    def _open_direct(
        self, kind: type[_Kind], config: ParallelConfig | None = None, generation: int | None = None, begun: int = 0
    ) -> _Kind | Refusal:
        """Lanes for forward or for backward; see `DirectLanes.begin_at`. Collective."""
        config = config or self._config
        if (why := config.why_staged(self.comm.size)) is not None:
            return Refusal("ExpertParallel", why)
        backward = kind is BackwardRounds
        config = config.of_backward if backward else config
        checksums = self.comm.integrity != "none"
        layout = config.lane_layout(self.comm.size, checksums=checksums, weight_grads=backward)
        reason = "as asked for" if config.transport == "direct" else "every rank can map every peer's memory"

        def make(memory: SymmetricMemory, _: bool) -> _Kind:
            lanes = kind(config, layout, memory, reason)
            lanes.begin_at(begun)
            return lanes

        return open_direct(
            self.comm,
            "ExpertParallel",
            self.lanes * layout.NUM_BYTES,
            {},
            make,
            self._generation if generation is None else generation,
        )

    def next_layer(self) -> int:
        """A number for one more layer of a model, for `dispatch`; the same on all ranks that make as many layers."""
        self._num_layers += 1
        return self._num_layers % MOST_LAYERS

    @property
    def max_tokens(self) -> int:
        """Tokens that a rank may dispatch at once without more room being made, as `ensure_capacity` does."""
        return self._config.max_tokens

    @property
    def memory_bytes(self) -> int:
        """Bytes held between calls: lanes of the direct transport, none if staged.

        The same before and after each call, but for `ensure_capacity`, and the first dispatch that wants gradients,
        which adds as many lanes.
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

    @opaque
    def ensure_capacity(self, max_tokens: int) -> None:
        """Makes room for dispatches of as many tokens as the rank needs that asks for most. Collective.

        Nothing happens where there is room. Otherwise the direct transport allocates all lanes anew, those of backward
        too, and then gives the old ones back: for a moment it holds both. Backward of earlier rounds may still come. On
        CUDA this waits for the device, and graphs that were captured are of no use after it. The staged transport has
        no lanes, and only takes note.

        Args:
            max_tokens: what this rank is going to dispatch at most.

        Raises:
            RoutingError: not an int of at least 0; nothing was sent.
            LaneError: on every rank, where a lane is in use on one: nothing was changed. Or closed.
            CapacityError: on every rank: there is no memory for that; lanes are as before.
            PeerTimeout: a rank did not come. Then this object is of use for `rebuild` and `close` alone.
        """
        self._require_not_closed()
        if not is_int(max_tokens, 0):
            raise RoutingError(f"max_tokens is {max_tokens!r}; an int of at least 0, and below 2**31, is needed")
        with self.comm.call("ensure_capacity"):
            self._make_room(max_tokens)

    def _make_room(self, need: int) -> None:
        """The same. All that peers store into the old lanes is stored when they come here."""
        if self.comm.device.type == "cuda":
            torch.cuda.synchronize(self.comm.device)
        rounds = self._rounds
        in_use = [(lane, isinstance(use, Started)) for lane, use in enumerate(rounds.open_rounds) if use is not None]
        begun = max(rounds.rounds_begun) % 2**31
        told = self.comm.all_gather_data((need, *(in_use or [(-1, False)])[0], begun), (int, int, bool, int))
        for rank, (asked, _, _, number) in enumerate(told):
            if not is_int(asked, 0) or not is_int(number, 0):
                raise ThinwireError(f"rank {rank} asks for {asked} tokens, after {number} rounds; each is below 2**31")
        most = max(asked for asked, *_ in told)
        if most <= self.max_tokens:
            return
        users: dict[str, list[int]] = {}
        for rank, (_, lane, started, _) in enumerate(told):
            if lane >= 0:
                what = "what was started is not finished" if started else "a round is open"
                users.setdefault(f"on lane {lane} {what} at", []).append(rank)
        if users:
            raise LaneError(
                f"room for {most} tokens a rank instead of {self._config.max_tokens} is made while no lane is in use, "
                f"and {'; '.join(f'{what} {name_ranks(ranks)}' for what, ranks in users.items())}: combine, finish or "
                "abandon first, or call ensure_capacity before the first dispatch"
            )
        config = replace(self._config, max_tokens=most)
        if isinstance(rounds, DirectRounds):
            self._replace_lanes(rounds, config, max(number for *_, number in told))
        else:
            self._config = rounds.config = config

    def _replace_lanes(self, rounds: DirectRounds, config: ParallelConfig, begun: int) -> None:
        forward = self._larger(DirectRounds, config, begun)
        old = [rounds]
        if self._backward is not None:
            try:
                backward = self._larger(BackwardRounds, config)
            except BaseException:
                forward.close()
                raise
            old.append(self._backward)
            self._backward.successor = backward
            self._backward = backward
        self._generation, before = self._generation + 1, self._config.max_tokens
        self._rounds, self._config = forward, config
        for lanes in old:
            lanes.close()
        self.comm.log(f"lanes grew: room for {config.max_tokens} tokens a rank instead of {before}")

    def _larger(self, kind: type[_Kind], config: ParallelConfig, begun: int = 0) -> _Kind:
        lanes = self._open_direct(kind, config, self._generation + 1, begun)
        if isinstance(lanes, Refusal):
            error = CapacityError if lanes.no_memory else TransportUnavailable
            raise error(
                f"no room for {config.max_tokens} tokens a rank: {lanes.reason}; lanes are as before, for "
                f"{self._config.max_tokens}"
            )
        return lanes

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
            comm = Communicator(group_of(group)[0], **self.comm.settings._asdict())
        if self.comm.device.type == "cuda":
            torch.cuda.synchronize(self.comm.device)
        with comm.call("rebuild"):
            told = comm.all_gather_data((self._generation, self._config.max_tokens), (int, int))
            for rank, (generation, room) in enumerate(told):
                if not 0 <= generation < _MOST_GENERATIONS:
                    raise ThinwireError(
                        f"rank {rank} is at generation {generation}, expected 0 to {_MOST_GENERATIONS - 1}"
                    )
                if not is_int(room, 0):
                    raise ThinwireError(f"rank {rank} has room for {room} tokens, expected 0 to 2**31 - 1")
            self.close()
            # Some ranks may have more room: those of another group, or those at which ensure_capacity came through.
            most = max(room for _, room in told)
            config = replace(self._config, comm=comm, max_tokens=most)
            self._assemble(config, max(generation for generation, _ in told) + 1)
        self._closed = False

    @property
    def _lost(self) -> tuple[int, ...] | None:
        lost = self._rounds.lost
        return self._backward.lost if lost is None and self._backward is not None else lost

    def explain(self) -> str:
        """What was chosen, and why."""
        return "\n".join((*self._facts(), self.comm.explain()))

    def _facts(self) -> tuple[str, ...]:
        backend = self.dispatch_backend
        return (
            self._rounds.describe(),
            f"wire: {self.wire} out, {self.combine_wire} back, {self.grad_wire} for gradients",
            f"kernels: {backend.name} ({backend.reason})",
            f"experts: {self.num_experts} over {self.comm.size} ranks, here {self.local_experts}",
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
        self.comm.result_memory.clear()

    def leave_to_parent(self) -> None:
        """In a process that was just forked: it is closed here, and its memory is left alone."""
        if not self._closed:
            self._closed, self._parent = True, os.getppid()
            self._rounds.open_rounds[:] = [None] * self.lanes

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "an ExpertParallel cannot be copied or pickled, as it holds memory that peers write to: share the object "
            "itself, as one serves all layers of these sizes, or construct another one on all ranks; of a sharded "
            "MoELayer copy the state_dict()"
        )

    def _settle(self, lane: int) -> Rounds:
        """Ends what peers may wait for: calls under way, and a leg on the lane that was started. Gives the rounds."""
        self.comm.settle()
        started = self._rounds.open_rounds[lane]
        if isinstance(started, Started):
            with contextlib.suppress(RoutingError):  # of a leg that nobody asks for any more
                started.finish()
        return self._rounds  # which may be others after that

    def _require_not_closed(self) -> None:
        if self._parent is not None:
            raise LaneError(f"this ExpertParallel is of process {self._parent}, from which this one was forked")
        if self._closed:
            raise LaneError("this ExpertParallel is closed")

    def _require_lane(self, lane: object) -> None:
        if not isinstance(lane, int) or isinstance(lane, bool) or not 0 <= lane < self.lanes:
            raise LaneError(f"there is no lane {lane!r}; this ExpertParallel has lanes 0 ... {self.lanes - 1}")
