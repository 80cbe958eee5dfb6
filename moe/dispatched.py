"""One round of expert parallelism, between dispatch and combine, and what expert parallelism asks of a transport."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from thinwire.comm.exchange import name_ranks
from thinwire.comm.recorder.flight_recorder import Call
from thinwire.comm.recorder.trace_events import Traffic
from thinwire.comm.tensors import is_transforming, overwrite
from thinwire.compiler import opaque
from thinwire.errors import CapacityError, LaneError, RoutingError
from thinwire.fused.codec import WireRows
from thinwire.moe.config import ParallelConfig
from thinwire.moe.gradients import Link, RoundGradients, Wants
from thinwire.moe.quantized import QuantizedRows, combined_records, require_rows
from thinwire.moe.received import Received
from thinwire.triton_kernels.round_layout import ABANDONED, LEFT_OPEN

_MOST_ACCEPTED = 1024  # shapes and dtypes that are remembered
_STRIDED = torch.strided
#: What experts give back.
ExpertRows = torch.Tensor | WireRows


class Dispatched(Received):
    """Tokens that arrived for this rank's experts: one round, from `dispatch` to `combine`.

    On the direct transport rows and index are the lane's own, on CUDA counts and offsets too: the next dispatch on the
    lane overwrites them, their shapes never change, and kernels read them without synchronising with the host.

    Attributes:
        rows: uint8 [records, row_bytes], the records as they arrived. Staged: by source rank, then token. Direct: one
            for every token that could come, `source rank * max_tokens + token`; `index` says which came.
        index: int64 [rows of `tokens`], the record of each row, by expert, then source rank, then token; -1 where the
            row is padding. On the direct transport there are as many entries as could ever be needed, -1 at the end.
        expert_counts: int64 [local experts], rows of each expert, without padding.
        expert_offsets: int64 [local experts + 1], where each expert's rows begin in `tokens`, with padding to `align`.
        lane: the lane of the round.
    """

    def __init__(self, rounds: Rounds, lane: int, x: torch.Tensor) -> None:
        self._rounds = rounds
        self._dtype = x.dtype
        self._num_sent = x.shape[0]  # tokens that this rank dispatched
        self.lane = lane

    @property
    @opaque
    def quantized(self) -> QuantizedRows:
        """What arrived, in int8 as it lies, for experts that eat int8. Does not wait for the device.

        Those that make int8 rows give them to `combine` as WireRows. Rows have no gradient. On the direct transport
        they are the lane's own, like all tensors here.

        Raises:
            LaneError: the round is over.
            WireFormatError: the wire of dispatch is not int8.
            RoutingError: x wants a gradient; or the transport is direct and `integrity` is "checksum": what is read in
                place is compared with nothing.
        """
        self._require_open()
        config = self._rounds.config
        if self._link is not None and self._link.wants_rows and torch.is_grad_enabled():
            raise RoutingError("int8 rows have no gradient, and x wants one: use d.tokens, or call under no_grad()")
        if config.comm.integrity != "none" and self._rounds.name == "direct":
            raise RoutingError(
                f"integrity is {config.comm.integrity!r}, and rows that are read in place are compared with nothing on "
                "the direct transport: use d.tokens or d.gather, or pass transport='staged'"
            )
        return QuantizedRows.of(self.rows, self.index, config.wire, config.hidden_size)

    @opaque
    def abandon(self) -> None:
        """Ends the round as a `combine` to which no expert of this rank adds anything; the result is thrown away.

        Peers may combine meanwhile: what they sent here adds nothing.

        Raises:
            LaneError: the round is over.
            PeerTimeout: a peer did not answer in time.
        """
        self._require_open()
        with self._call("abandon", ()):
            self._rounds.open_rounds[self.lane] = None
            self._rounds.close_round(self.lane, ABANDONED)

    @property
    @abstractmethod
    def dispatch_traffic(self) -> Traffic:
        """What this rank sent to dispatch its tokens. Waits for the device.

        Raises:
            LaneError: on the direct transport, when the lane has gone on to a later round.
        """

    @property
    @abstractmethod
    def combine_traffic(self) -> Traffic:
        """What this rank sends back for the tokens that it received. Waits for the device.

        Raises:
            LaneError: on the direct transport, when the lane has gone on to a later round.
        """

    @abstractmethod
    def _begin_combine(self, expert_out: torch.Tensor, out: torch.Tensor, weighted: bool) -> Callable[[], None]:
        """Sends the weighted sums of what was checked home; what is returned waits, and fills `out` at home."""

    def _traffic(self, counts: Sequence[int], record_bytes: int, beside: int = 0) -> Traffic:
        """Of a leg with so many records for each rank, and so many bytes beside them."""
        config = self._rounds.config
        rows = sum(counts) - counts[config.comm.rank]
        return Traffic(rows, rows * config.hidden_size * self._dtype.itemsize, rows * record_bytes + beside)

    def _check_combine(self, expert_out: ExpertRows, out: torch.Tensor | None, weighted: object) -> torch.Tensor:
        """What `combine` refuses before anything is sent. Returns the rows: floats, or records of the combine wire."""
        if not isinstance(weighted, bool):
            raise RoutingError(f"weighted is {weighted!r}; True or False is needed")
        config = self._rounds.config
        require_rows(expert_out)
        if isinstance(expert_out, WireRows):
            rows = combined_records(expert_out, config.combine_wire, config.comm)
            dtypes: tuple[torch.dtype, ...] = (torch.uint8,)
            if torch.is_grad_enabled() and self._link is not None:
                raise RoutingError(
                    "expert_out is quantised rows, which have no gradient, and x or topk_weights wants one: give float "
                    "rows, or combine under torch.no_grad()"
                )
        else:
            config.comm.check_device("expert_out", expert_out)
            rows, dtypes = expert_out, config.row_dtypes
        given = expert_out.shape
        known = (self._num_records, self._record_capacity) if weighted else (self._num_rows, self._capacity)
        if known == (None, None) and not self._rounds.on_gpu:
            known = self._read_num_records() if weighted else self._read_num_rows(), None
        right_shape = len(given) == 2 and given[1] == config.hidden_size
        # On CUDA the host may not know how many rows there are, and experts may read rows through index themselves.
        right_rows = right_shape and (
            given[0] in known or known == (None, None) or (not weighted and given[0] == self.index.shape[0])
        )
        if rows.dtype not in dtypes or not right_rows:
            accepted = [number for number in known if number is not None]
            count = " or ".join(map(str, accepted)) or "rows"
            whose = "records, as weighted is True," if weighted else "tokens,"
            others = f", or WireRows in {str(config.combine_wire)!r}," if config.combine_wire.quantized else ""
            raise RoutingError(
                f"expert_out is {rows.dtype} {list(given)}; {config.describe_dtypes()}{others} [{count}, "
                f"{config.hidden_size}], a row for each of the round's {whose} is needed"
            )
        if rows.requires_grad and self._link is None and torch.is_grad_enabled():
            raise RoutingError(
                "expert_out wants a gradient, and this round was dispatched without: let x or topk_weights want one, "
                "on every rank (x.detach().requires_grad_()), or combine under torch.no_grad()"
            )
        if out is None:
            return rows
        config.comm.check_device("out", out)
        shape = (self._num_sent, config.hidden_size)
        if out.shape != shape or out.dtype != self._dtype or not out.is_contiguous() or out.is_neg():
            raise RoutingError(
                f"out is {out.dtype} {list(out.shape)}, strides {list(out.stride())}, neg {out.is_neg()}; contiguous "
                f"{self._dtype} {list(shape)} is needed"
            )
        if (out.requires_grad or self._link is not None) and torch.is_grad_enabled():
            raise RoutingError("what combine fills in place has no gradient: leave out away, or call under no_grad()")
        overwrite("out", out)
        return rows

    def _gather_linked(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        comm = self._rounds.config.comm
        if self._link is None and not comm.traced:
            return self._gather(capacity)
        with comm.recorder.aside("unpack"):
            return super()._gather_linked(capacity)

    def _tell_traffic(self, leg: str) -> None:
        """Tells a trace what was sent in a leg that is over; on CUDA, direct ones would have to wait for it."""
        if self._rounds.config.comm.traced and not self._rounds.on_gpu:
            self._rounds.config.comm.sent(getattr, self, f"{leg}_traffic")

    def _call(self, name: str, shape: Sequence[int]) -> Call:
        """Begins the round's end."""
        rounds = self._rounds
        wire, place = rounds.config.combine_wire, rounds.place(self.lane)
        return rounds.config.comm.call(name, shape, self._dtype, wire, rounds.name, place)

    def _require_open(self) -> None:
        if self._rounds.open_rounds[self.lane] is not self:
            raise LaneError(
                f"this round on lane {self.lane} is over: it was combined or abandoned, or a later dispatch took its "
                "lane"
            )


class Started:
    """A leg of which this rank has sent its part, until it is finished or a later dispatch takes the lane."""

    end: Callable[[], Any]  # waits for the peers' part

    def __init__(self, rounds: Rounds, lane: int) -> None:
        self._rounds = rounds
        self.lane = lane

    def finish(self) -> Any:
        """Waits for the peers' part, which they do not number as a call."""
        rounds = self._rounds
        with rounds.config.comm.call("finish", transport=rounds.name, details=rounds.place(self.lane), numbered=False):
            rounds.open_rounds[self.lane] = None  # not before: an interrupt would lose what peers still have to read
            return self.end()


class StartedDispatch(Started):
    """What `ExpertParallel.dispatch_start` returns, for `dispatch_finish`."""

    d: Dispatched  # at the end
    wants: Wants
    gradients: RoundGradients | None = None  # if something wants one, and what their plan needs then
    link: Link | None = None  # to autograd's graph; compiled code has its own
    graph: tuple[torch.Tensor, torch.Tensor]

    def begin(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, layer: int, whole: bool
    ) -> None:
        """Sends this rank's part on a free lane; if `whole`, waits for the peers' too."""
        rounds, lane, config = self._rounds, self.lane, self._rounds.config
        with config.comm.call("dispatch", x.shape, x.dtype, config.wire, rounds.name, rounds.place(lane, 1)):
            self.end = rounds.begin(lane, x, topk_ids, topk_weights, self.wants.tag(layer))
            if whole:
                self.d = self.end()
        if whole:
            self.d._tell_traffic("dispatch")

    def keep(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, compiled: bool) -> None:
        """Keeps what the gradients' plan needs, which callers may overwrite, and takes a place in the graph."""
        ids = topk_ids.clone()
        self.gradients = RoundGradients(ids, self._rounds.config.comm.recorder)
        self.graph = ids, topk_weights.detach().float().clone()
        if not compiled:
            self.link = Link.of(x, topk_weights, self.gradients)


class StartedCombine(Started):
    """What `ExpertParallel.combine_start` returns, for `combine_finish`."""

    out: torch.Tensor  # filled at the end


class Rounds:
    """The rounds of one transport, which was chosen for a reason."""

    name: str  # the transport's
    on_gpu = False  # whether calls return before the device is done, of which the host then knows nothing

    def __init__(self, config: ParallelConfig, reason: str) -> None:
        self.config = config
        self.reason = reason
        self.closed = False
        # What each lane is in use for: a round that may be read and combined, or a leg that is to be finished.
        self.open_rounds: list[Dispatched | Started | None] = [None] * config.lanes
        self.rounds_begun = [0] * config.lanes
        self._accepted: set[object] = set()  # shapes and dtypes of tokens that were dispatched on the CPU
        self._ids_are_experts: Callable[[torch.Tensor, int], bool] | None = None  # where there is a kernel for it

    def begin(
        self, lane: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, tag: int
    ) -> Callable[[], Dispatched]:
        """Begins a round on a lane on which none is open, whose arguments were checked.

        What is returned waits for the peers' part. `tag` is a `Wants.tag`; ranks with different ones raise
        RoutingError here or there, and nothing is taken.
        """
        raise NotImplementedError

    def refuse(self, lane: int) -> None:
        """Tells the peers, who are in a dispatch or come to it, that this rank's arguments were refused."""
        raise NotImplementedError

    def is_open(self, lane: int) -> bool:
        """Whether a round was dispatched on the lane and not combined."""
        raise NotImplementedError

    def close_round(self, lane: int, end: int) -> None:
        """Ends the open round without sums of this rank: ABANDONED, or LEFT_OPEN for the next dispatch on the lane."""
        raise NotImplementedError

    def leave_open(self, lane: int) -> None:
        """Before a dispatch on a lane with an open round: numbers of calls match those of peers that combine it."""
        self.open_rounds[lane] = None
        if self.is_open(lane):
            with self.config.comm.call("abandon", None, None, self.config.combine_wire, self.name, self.place(lane)):
                self.close_round(lane, LEFT_OPEN)

    def call_backward(self, name: str, shape: Sequence[int], dtype: torch.dtype, wire: object, place: Any) -> Call:
        """Begins a leg of backward of the round that had this place."""
        if self.closed:
            raise LaneError(f"{name}: the ExpertParallel of this round was closed, or rebuilt, since")
        return self.config.comm.call(name, shape, dtype, wire, self.name, place)

    def place(self, lane: int, ahead: int = 0) -> tuple[object, ...]:
        """Details of the flight recorder: the lane, and the number of its round; `ahead` of the next."""
        return "lane", lane, "epoch", self.rounds_begun[lane] + ahead

    def describe(self) -> str:
        """What it is and why, for `explain`."""
        raise NotImplementedError

    @property
    def lost(self) -> tuple[int, ...] | None:
        """The ranks that a wait of its own named; None where it did not, or leaves waiting to the communicator."""
        return None

    @property
    def memory_bytes(self) -> int:
        """Bytes held between calls."""
        return 0

    def check(self) -> None:
        """Raises what went wrong on the device since the last call."""

    def close(self) -> None:
        """Gives back what it holds."""
        self.closed = True

    def check_tokens(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        """What `dispatch` refuses before anything is sent."""
        config = self.config
        plain = _is_plain(x) and _is_plain(topk_ids) and _is_plain(topk_weights)
        if plain and not self.on_gpu and not is_transforming():
            # Shapes and dtypes are looked at once: a decode step is over in microseconds.
            kind = x.shape, x.dtype, topk_ids.shape, topk_ids.dtype, topk_weights.shape, topk_weights.dtype
            if kind not in self._accepted:
                self._check_kinds(x, topk_ids, topk_weights)
                if len(self._accepted) >= _MOST_ACCEPTED:
                    self._accepted.clear()
                self._accepted.add(kind)
        else:
            self._check_kinds(x, topk_ids, topk_weights)
        # On CUDA the ids' range would cost a synchronisation: the direct kernels look at it, and `check` tells.
        if self.on_gpu or not topk_ids.numel():
            return
        look = self._ids_are_experts
        if look is not None and topk_ids.is_contiguous() and not topk_ids.is_neg():
            if look(topk_ids, config.num_experts):
                return
        lowest, highest = (int(bound) for bound in topk_ids.aminmax())
        if lowest < -1 or highest >= config.num_experts:
            raise RoutingError(
                f"topk_ids runs from {lowest} to {highest}; experts are 0 ... {config.num_experts - 1}, and -1 "
                "stands for none"
            )

    def _check_kinds(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        config = self.config
        check_device = config.comm.check_device
        check_device("x", x)
        check_device("topk_ids", topk_ids)
        check_device("topk_weights", topk_weights)
        dtypes = config.row_dtypes if config.dtype is None else (config.dtype,)
        given = x.shape
        if x.dtype not in dtypes or len(given) != 2 or given[1] != config.hidden_size:
            accepted = config.describe_dtypes() if config.dtype is None else config.dtype
            raise RoutingError(f"x is {x.dtype} {list(x.shape)}; {accepted} [tokens, {config.hidden_size}] is needed")
        tokens = given[0]
        if tokens > config.max_tokens:
            raise CapacityError(
                f"{tokens} tokens were passed; this ExpertParallel has room for {config.max_tokens}: ensure_capacity "
                "makes more"
            )
        shape = (tokens, config.top_k)
        if topk_ids.dtype not in (torch.int32, torch.int64) or topk_ids.shape != shape:
            raise RoutingError(
                f"topk_ids is {topk_ids.dtype} {list(topk_ids.shape)}; int32 or int64 {list(shape)} is needed"
            )
        if not topk_weights.is_floating_point() or topk_weights.shape != shape:
            raise RoutingError(
                f"topk_weights is {topk_weights.dtype} {list(topk_weights.shape)}; floats {list(shape)} are needed"
            )


def left_open(lane: int, ranks: Iterable[int]) -> RoutingError:
    """What a combine comes to if ranks have left the round open."""
    return RoutingError(
        f"lane {lane}: {name_ranks(ranks)} left this round open and went on to the next dispatch, so the sums of the "
        "experts there are missing; the round is over, and all ranks may go on"
    )


def _is_plain(tensor: object) -> bool:
    """Whether it is a dense CPU tensor, and of no class of its own."""
    return type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout is _STRIDED and not tensor.is_nested
