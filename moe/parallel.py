"""Expert parallelism: a token travels once to each rank that owns one of its experts, and weighted sums travel back.

    d = ep.dispatch(x, topk_ids, topk_weights)
    expert_out = experts(d.tokens, d.expert_counts)
    y = ep.combine(expert_out, d)

Both legs are quantised. An expert's rank adds up its experts' weighted outputs of a token in float32 and quantises the
sum once; the token's home dequantises one record a rank and adds them in ascending rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from thinwire.comm import Communicator, Group
from thinwire.comm.call import Recorder
from thinwire.comm.groups import group_of
from thinwire.comm.tensors import is_transforming, require_dense
from thinwire.compiler import compiled_as, opaque
from thinwire.errors import LaneError, RoutingError, ThinwireError
from thinwire.moe import compiled_round
from thinwire.moe.assembly import Assembly, ends_with, shared
from thinwire.moe.config import ParallelConfig
from thinwire.moe.dispatched import Dispatched, ExpertRows
from thinwire.moe.gradients import MOST_LAYERS, Wants
from thinwire.moe.legs import Started, StartedCombine, StartedDispatch, Tokens
from thinwire.moe.round_transport import CLOSED, OVERTAKEN, Rounds, refusal_of
from thinwire.wire import WireFormat

_MOST_GENERATIONS = 1 << 31


def _recorder_of(arguments: tuple[Any, ...], _: object) -> Recorder:
    recorder: Recorder = arguments[0].comm.recorder
    return recorder


#: A method that peers call, too. See `opaque`.
_called_by_all = functools.partial(opaque, find_recorder=_recorder_of)


class ExpertParallel:
    """Dispatch and combine over a group whose ranks own the experts, in contiguous blocks or as a map says.

    The constructor is collective. One object serves all layers of a model that have these sizes: see `shared`.

    Args:
        comm: the group: a communicator, a process group, or a DeviceMesh of one axis.
        num_experts: experts in all; the first `num_experts % comm.size` ranks own one more.
        top_k: experts a token may name, at most 32 and no more than there are.
        hidden_size: elements of a token.
        max_tokens: the most tokens a rank dispatches at once; the same on every rank.
        wire: the dispatch leg's format, such as `"int8"` (see WireFormat); None means THINWIRE_WIRE, else int8+h64,
            or int8 where `hidden_size` is no multiple of 64.
        combine_wire: the combine leg's; None means `wire`.
        grad_wire: of both legs of backward; "none", or None, sends gradients in the tokens' dtype.
        transport: `"direct"`: kernels store into the peers' memory, or on CPU ranks read it; it is allocated here.
            `"staged"`: records travel through the process group. `"two_level"`: direct within a host, and staged
            between hosts, where a token goes once to each. `"auto"`: the first of direct, two levels and staged that
            all ranks can take, on GPUs without two levels, which have run on none yet; `explain()` says why. Hosts are
            those of the communicator (`comm.hosts`).
        lanes: rounds that may be open at once.
        align: every expert's rows begin at a multiple of this in `Dispatched.tokens`.
        invariant: whether the result of `combine` is independent of where experts are. Each expert's weighted row goes
            home by itself and is added in ascending expert id: the bits are the same on any number of ranks, on either
            transport and in any batch, if the experts' rows are, and none was dropped. Otherwise a rank's experts are
            summed first, in fewer bytes and less memory.
        num_programs: programs of the direct kernels that send rows, fewer to leave multiprocessors to other work; None
            means four a multiprocessor. Of no effect on the CPU.
        timeout: seconds that a round of the direct transport may wait for a peer; None means the communicator's. The
            staged transport waits as long as the communicator does.
        expert_map: the rank that owns each expert, a sequence or an integer tensor [num_experts], the same on all
            ranks; each rank owns as many as without. None: contiguous blocks. `local_experts` has a rank's own in
            ascending id, the order of `Dispatched.tokens` and `expert_counts`. There is no map with `invariant`.
        dtype: the only dtype that tokens will have; None means any of float32, float16 and bfloat16. It spares memory
            with the direct transport and wire format `none`. float64, router weights included, is for comparisons:
            staged, in plain torch, with the format `none` alone.

    Raises:
        ConfigMismatch: on every rank, when ranks passed different settings.
        RoutingError: sizes that make no sense.
        ArgumentError: `expert_map` has another length, a rank that is none, or other numbers of experts for the ranks.
        TransportUnavailable: a transport or backend that is not there, or a group that cannot move the tensors.
        CapacityError: direct or two levels were asked for, and the memory is not there; both figures are given.

    >>> import thinwire as tw
    >>> with tw.init() as comm, tw.ExpertParallel(comm, 4, 2, 64, 16, wire="none") as ep:
    ...     x = torch.ones(3, 64)
    ...     d = ep.dispatch(x, torch.tensor([[0, 1], [3, -1], [-1, -1]]), torch.full((3, 2), 0.5))
    ...     y = ep.combine(d.tokens * 2, d)
    >>> d.expert_counts.tolist(), y[:, 0].tolist()
    ([1, 1, 0, 1], [2.0, 1.0, 0.0])
    """

    def __init__(
        self,
        comm: Group,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        max_tokens: int,
        *,
        wire: str | WireFormat | None = None,
        combine_wire: str | WireFormat | None = None,
        grad_wire: str | WireFormat | None = "none",
        transport: str = "auto",
        lanes: int = 1,
        align: int = 1,
        invariant: bool = False,
        num_programs: int | None = None,
        timeout: float | None = None,
        dtype: torch.dtype | None = None,
        expert_map: Sequence[int] | torch.Tensor | None = None,
    ) -> None:
        config = ParallelConfig.of(
            num_experts, top_k, hidden_size, max_tokens, wire=wire, combine_wire=combine_wire, grad_wire=grad_wire,
            transport=transport, lanes=lanes, align=align, invariant=invariant, num_programs=num_programs,
            timeout=timeout, dtype=dtype, expert_map=expert_map, comm=comm,
        )  # fmt: skip
        self.num_experts, self.top_k, self.hidden_size = config.num_experts, config.top_k, config.hidden_size
        self.max_tokens = config.max_tokens
        self.wire, self.combine_wire, self.grad_wire = config.wire, config.combine_wire, config.grad_wire
        self.lanes, self.align, self.invariant, self.num_programs, self.dtype = (
            config.lanes, config.align, config.invariant, config.num_programs, config.dtype,
        )  # fmt: skip
        self._closed = False
        self._num_layers = 0  # that have a number
        with config.comm.call("ExpertParallel"):
            self._assemble(config, generation=0)
        self._handle = compiled_round.register(self)

    def _assemble(self, config: ParallelConfig, generation: int) -> None:
        """Everything that depends on the group. Collective."""
        self._assembly = Assembly(config, generation)
        self.transport = self._assembly.rounds.name
        self.comm, self.timeout, self.local_experts = config.comm, config.peer_timeout, config.local_experts
        self.num_local_experts = len(self.local_experts)  # of a range torch.compile makes symbols
        self.dispatch_backend, self.combine_backend = config.dispatch_backend, config.combine_backend
        self.grad_backend = config.grad_backend
        ends_with(config.comm, self)

    shared: classmethod[ExpertParallel, ..., ExpertParallel] = classmethod(shared)  # torch.compile wants its name

    def __enter__(self) -> ExpertParallel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @compiled_as(compiled_round.dispatch, find_recorder=_recorder_of)
    def dispatch(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *, lane: int = 0, layer: int = 0
    ) -> Dispatched:
        """Sends each token to the ranks that own its experts. Collective; ranks may have any number of tokens.

        A round that is still open on the lane is over with this call. Ranks that combine it lack this one's sums, so
        their `combine` raises RoutingError, which names this rank, and all may go on; `abandon` says that none are due.
        On CUDA with the direct transport
        this launches kernels and does not wait for them: it may be captured in a CUDA graph, and a PeerTimeout, or a
        RoutingError for ids out of range or dtypes that differ, is raised by a later call on the lane or by `check`.

        Args:
            x: [tokens, hidden_size] float32, float16 or bfloat16; float64 if that is `dtype`. It or topk_weights may
                want a gradient, as on all ranks; the first such dispatch allocates lanes for backward, if transport is
                direct.
            topk_ids: int32 or int64 [tokens, top_k], global expert ids, -1 for none. A repeated id counts once, with
                its weights added in ascending k.
            topk_weights: float [tokens, top_k].
            lane: which of the `lanes`.
            layer: the same on all ranks, 0 to 65535: which of a model's layers this is, so that a rank which has left
                one out does not meet the others in another. `MoELayer` passes a number of its own.

        Raises:
            RoutingError: shapes, dtypes or ids that do not fit; ranks with tokens of different dtypes or layers, or
                that want different gradients (on all of them). On the CPU also, what another rank refused: that rank
                raises what is wrong, the others name it, nothing was taken, and all may go on.
            ArgumentError: what is no dense tensor with values of its own, on the communicator's kind of device.
            CapacityError: more than max_tokens tokens.
            LaneError: no such lane, or closed.
            PeerTimeout: a peer did not answer in time.
        """
        return self._begin_round((x, topk_ids, topk_weights), lane, layer, whole=True).d

    @_called_by_all
    def dispatch_start(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *, lane: int = 0, layer: int = 0
    ) -> StartedDispatch:
        """The first half of `dispatch`, with its arguments: sends this rank's part, and does not wait for the peers'.

        What is done until `dispatch_finish`, on other lanes too, overlaps with it. With the direct transport all of
        this rank's tokens are where the peers read them on return, or on CUDA on their way there. Staged ranks exchange
        counts here, which waits for all of them, and pack all records; gloo's threads or NCCL then move them. All
        arguments may be overwritten then, on CUDA by what is launched later. A later dispatch on the lane ends what was
        started, as it ends a round, on every rank. Over two levels the second halves exchange messages, too: ranks
        finish what they have started in the same order.

        It raises what `dispatch` does, but for what is wrong at other ranks: with the direct transport
        `dispatch_finish` raises that.
        """
        return self._begin_round((x, topk_ids, topk_weights), lane, layer, whole=False)

    @_called_by_all
    def dispatch_finish(self, started: StartedDispatch) -> Dispatched:
        """The second half: waits for the peers' part. All ranks start and finish in the same order.

        Raises:
            LaneError: it was finished before, a later dispatch took its lane, or it is not this object's.
            RoutingError, PeerTimeout: as `dispatch`. It is over then.
        """
        return self._open(started, self._finish(started, StartedDispatch, "dispatch"))

    def _begin_round(
        self, tokens: Tokens, lane: int, layer: int, whole: bool, wants: Wants | None = None
    ) -> StartedDispatch:
        """`dispatch_start`, or if `whole` all of `dispatch`. `wants` is for compiled code, whose tensors do not say."""
        self._require_not_closed()
        self._require_lane(lane)
        if type(layer) is not int or not 0 <= layer < MOST_LAYERS:
            raise RoutingError(f"layer is {layer!r}; an int of 0 to {MOST_LAYERS - 1} is needed")
        if is_transforming():  # in which peers cannot be told either
            for name, tensor in zip(("x", "topk_ids", "topk_weights"), tokens, strict=True):
                require_dense(name, tensor)
        try:
            self._assembly.rounds.check_tokens(*tokens)
            wants = Wants.of(tokens[0], tokens[2]) if wants is None else wants
        except ThinwireError as error:
            self.refuse(error, lane=lane)
            raise
        started = StartedDispatch(self._settle(lane), lane, wants)
        started.begin(tokens, layer, whole)
        if whole:
            self._open(started, started.d)
        return started

    def _open(self, started: StartedDispatch, d: Dispatched) -> Dispatched:
        if started.gradients is not None:
            started.gradients.plan = self._assembly.gradient_plan(d, started.wants, *started.graph)
            d._link, d._has_gradients = started.link, True
        d._rounds.open_rounds[d.lane] = d
        return d

    def _finish(self, started: Started, kind: type[Started], name: str) -> Any:
        if not isinstance(started, kind):
            raise LaneError(f"started is a {type(started).__name__}; what {name}_start returned is needed")
        rounds, lane = self._assembly.rounds, started.lane
        if started._rounds is not rounds:
            raise LaneError(f"this {name} was started by another ExpertParallel, or is over since rebuild")
        if rounds.open_rounds[lane] is not started:
            raise LaneError(f"this {name} on lane {lane} is over: {started._how_over}")
        with torch.no_grad():
            return started.finish()

    @opaque
    def refuse(self, error: Exception, *, lane: int = 0) -> None:
        """In place of a dispatch: tells the peers that this rank has no tokens for it; why is for the caller to raise.

        On the CPU their dispatch raises RoutingError with this rank's number, nothing is taken, and all may go on. With
        the direct transport or two levels on CUDA nobody is told, as their lanes would be of no use after that; nor by
        a closed one.
        Other errors surface in the next call.

        Args:
            error: what the flight recorder says of it.
            lane: which of the `lanes`.

        Raises:
            LaneError: no such lane.
        """
        self._require_lane(lane)
        if self._closed or (self.transport != "staged" and self.comm.device.type == "cuda"):
            return
        with contextlib.suppress(ThinwireError):
            rounds = self._settle(lane)
            rounds.leave_open(lane)
            with rounds.call("dispatch", lane, ahead=1) as call:
                rounds.refuse(lane, refusal_of(error))
                call.failed(error)

    @compiled_as(compiled_round.combine)  # through which checkpointing stops a recomputation, after the call
    def combine(
        self, expert_out: ExpertRows, d: Dispatched, *, weighted: bool = False, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sends each token's weighted sum home, or with `invariant` its weighted rows, and adds what comes back.

        Collective; ends the round.

        Args:
            expert_out: [rows, hidden_size] float32, float16 or bfloat16, in the order of `d.tokens` (or of what
                `d.gather` returned). Or WireRows in `combine_wire`: as their float32 form, but kept if `weighted`.
            d: the round.
            weighted: expert_out has a row for each of `d.records` (or of what `d.gather_records` returned) instead, in
                which its experts here are weighted and summed already. Ranks need not agree on it.
            out: [tokens, hidden_size] in x's dtype, filled in place.

        Returns:
            [tokens, hidden_size] in x's dtype; zero for a token without experts. On CUDA with the direct transport the
            result of a round that failed is NaN.

        Raises:
            LaneError: the round is over, or not this object's.
            RoutingError: shapes or dtypes that do not fit; `out`, or WireRows, where there are gradients; `weighted`
                with `invariant`. Or a rank has left the round open, and has gone on to its next dispatch: the sums of
                its experts are missing, and the round is over.
            WireFormatError, ArgumentError: WireRows in another format, or that are not what they say of themselves.
            TransportUnavailable, PeerTimeout: as `dispatch`.
        """
        return self._begin_combine(expert_out, d, out, weighted, whole=True).out

    @opaque
    def combine_start(
        self, expert_out: ExpertRows, d: Dispatched, *, weighted: bool = False, out: torch.Tensor | None = None
    ) -> StartedCombine:
        """The first half of `combine`, with its arguments: sends this rank's sums, and does not wait for the peers'.

        The round is over, and its lane is not free until `combine_finish`: a dispatch on it ends what was started.
        expert_out may be overwritten on return, on CUDA by what is launched later; where router weights want a gradient
        autograd keeps it, and refuses to go on if it was. `out` is filled by `combine_finish`.

        It raises what `combine` does.
        """
        return self._begin_combine(expert_out, d, out, weighted, whole=False)

    @_called_by_all
    def combine_finish(self, started: StartedCombine) -> torch.Tensor:
        """The second half: waits for the peers' sums, and adds up what came home. Returns what `combine` does.

        Raises:
            LaneError: it was finished before, a later dispatch took its lane, or it is not this object's.
            RoutingError, PeerTimeout: as `combine`. It is over then.
        """
        self._finish(started, StartedCombine, "combine")
        return started.out

    def _begin_combine(
        self, expert_out: ExpertRows, d: Dispatched, out: torch.Tensor | None, weighted: bool, whole: bool
    ) -> StartedCombine:
        """`combine_start`, or if `whole` all of `combine`."""
        if isinstance(d, compiled_round.CompiledRound):
            d = compiled_round.uncompiled(d)
        if not isinstance(d, Dispatched):
            raise LaneError(f"d is a {type(d).__name__}; what dispatch returned is needed")
        if d._rounds is not self._assembly.rounds:
            raise LaneError("this round was dispatched by another ExpertParallel, or is over since rebuild")
        started = StartedCombine(d._rounds, d.lane)
        started.begin(expert_out, d, out, weighted, whole)
        return started

    def next_layer(self) -> int:
        """A number for one more layer of a model, for `dispatch`; the same on all ranks that make as many layers."""
        self._num_layers += 1
        return self._num_layers % MOST_LAYERS

    @property
    def memory_bytes(self) -> int:
        """Bytes held between calls: lanes of the direct transport and of two levels, none if staged.

        The same before and after each call, but for the first dispatch that wants gradients, which adds as many lanes.
        """
        return sum(rounds.memory_bytes for rounds in self._assembly.all_rounds)

    @opaque
    def check(self) -> None:
        """Waits for what was launched on the current stream, and raises what went wrong on the device.

        Raises:
            PeerTimeout: a peer did not answer in time.
            RoutingError: ids out of range, or dtypes that differ between ranks, in an earlier dispatch.
        """
        self._require_not_closed()
        for rounds in self._assembly.all_rounds:
            rounds.check()

    def rebuild(
        self, group: Group | Iterable[int] | None = None, *, expert_map: Sequence[int] | torch.Tensor | None = None
    ) -> None:
        """Goes on with the ranks that are left after a PeerTimeout, or with another group. Collective over them.

        Waits for the device, ends every round, and allocates new memory: the old one may still be written to by a peer
        that was given up and wakes. `comm`, `local_experts` and, with transport `"auto"`, the transport may be others
        afterwards. The old communicator stays the caller's.

        Args:
            group: None: `comm.shrink()`, without the ranks that a PeerTimeout of this object, or of its communicator,
                has named. Ranks, such as a PeerTimeout's `ranks`: `comm.shrink(ranks)`, without these. Otherwise a
                communicator, or a process group that is given this one's device and timeout. `comm`: the
                same ranks, with another map.
            expert_map: of the new group, as the constructor's; None: contiguous blocks, whatever was before.

        Raises:
            ArgumentError: ranks that this one's communicator does not have; a map that is refused, before the old
                memory is given back.
            ThinwireError: this rank is one of those that are lost, or the others go on without it.
            PeerTimeout: another rank was lost meanwhile; this object is as before if that was in `shrink`.
            ConfigMismatch, TransportUnavailable, CapacityError: as the constructor; the object is closed then.
        """
        if self.comm.forked or not self.comm.closed:  # with which it ended, and may go on with another
            self._require_not_closed()
        if isinstance(group, Communicator):
            comm = group
        elif group is None or isinstance(group, Iterable):
            known = (lost for rounds in self._assembly.all_rounds if (lost := rounds.lost) is not None)
            comm = self.comm.shrink(next(known, None) if group is None else group)
        else:
            comm = Communicator(group_of(group)[0], **self.comm.settings._asdict())
        if self.comm.device.type == "cuda":
            torch.cuda.synchronize(self.comm.device)
        config = replace(self._assembly.config, comm=comm, expert_map=expert_map)
        with comm.call("rebuild"):
            told = comm.all_gather_data(self._assembly.generation, int)
            for rank, generation in enumerate(told):
                if not 0 <= generation < _MOST_GENERATIONS:
                    raise ThinwireError(
                        f"rank {rank} is at generation {generation}, expected 0 to {_MOST_GENERATIONS - 1}"
                    )
            self.close()
            self._assemble(config, max(told) + 1)
        self._closed = False

    def explain(self) -> str:
        """What was chosen, and why."""
        return "\n".join((*self._assembly.facts(), self.comm.explain()))

    def close(self) -> None:
        """Ends every round and gives memory back; the communicator stays open. May be called again."""
        if self.comm.forked or self._assembly.rounds.closed:
            return
        self.end()
        for rounds in self._assembly.all_rounds:
            rounds.close()
        self.comm.result_memory.clear()

    def end(self) -> None:
        """Refuses calls from now on, as its communicator is closed. One under way, in another thread, may go on."""
        open_rounds, self._closed = self._assembly.rounds.open_rounds, True
        for lane, use in enumerate(open_rounds):
            if use is not None:
                use._how_over, open_rounds[lane] = CLOSED, None

    def __repr__(self) -> str:
        state = "closed" if self._closed else self.transport
        return (
            f"ExpertParallel(num_experts={self.num_experts}, top_k={self.top_k}, hidden_size={self.hidden_size}, "
            f"max_tokens={self.max_tokens}, wire='{self.wire}', rank {self.comm.rank} of {self.comm.size}, {state})"
        )

    def __deepcopy__(self, memo: object) -> ExpertParallel:
        """Itself: a copy of a layer, such as an average of its weights, has weights of its own, and shares this."""
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "an ExpertParallel cannot be copied or pickled, as it holds memory that peers write to: share the object "
            "itself, as one serves all layers of these sizes, or construct another one on all ranks; copy.deepcopy() "
            "of a layer shares it, and save_checkpoint() saves a layer"
        )

    def _settle(self, lane: int) -> Rounds:
        """Ends what peers may wait for: calls under way, and a leg on the lane that was started. Gives the rounds."""
        started = self._assembly.rounds.open_rounds[lane]
        if isinstance(started, Started):
            self.comm.settle()
            started._how_over = OVERTAKEN
            with contextlib.suppress(RoutingError):  # of a leg that nobody asks for any more
                started.finish()
        return self._assembly.rounds  # which may be others after that

    def _require_not_closed(self) -> None:
        if self._closed or self.comm.forked:
            try:
                self.comm.require_open()
            except ThinwireError as error:
                raise LaneError(f"this ExpertParallel is closed, as {error}") from None
            raise LaneError("this ExpertParallel is closed")

    def _require_lane(self, lane: object) -> None:
        if not isinstance(lane, int) or isinstance(lane, bool) or not 0 <= lane < self.lanes:
            raise LaneError(f"there is no lane {lane!r}; this ExpertParallel has lanes 0 ... {self.lanes - 1}")
