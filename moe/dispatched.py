"""One round of expert parallelism, between dispatch and combine: what experts see of it, and what they may give back.

A *record* is a token that came from one rank, whatever number of this rank's experts it is for. Expert-major, it is a
row for each of them, `tokens`; token-major, it is one row, `records`. Both have a compact form, the same on every
transport, whose size the host must know, and a fixed one, which needs no synchronisation and may be captured in a CUDA
graph. A lane of the direct transport has a place for every token that could come, and most are empty. The fixed form of
records is not those places, but what came, in order, and zeros behind it: so experts in fixed shapes choose how many
rows they pay for. Kernels that read records in place have `rows` and `index`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from thinwire.comm.tensors import overwrite
from thinwire.compiler import opaque
from thinwire.errors import ArgumentError, LaneError, RoutingError, WireFormatError
from thinwire.fused.codec import WireRows, readable_records
from thinwire.moe.gradients import Link
from thinwire.moe.received import Arrived, QuantizedRows, Records, RowRouting, check_capacity, experts_of, take
from thinwire.moe.round_transport import OnLane, Rounds
from thinwire.triton_kernels.round_layout import ABANDONED
from thinwire.wire import Traffic

#: What experts give back.
ExpertRows = torch.Tensor | WireRows


class Dispatched(OnLane, ABC):
    """Tokens that arrived for this rank's experts: one round, from `dispatch` to `combine`.

    On the direct transport the index is the lane's own, on CUDA rows, counts and offsets too: the next dispatch on the
    lane overwrites them, their shapes never change, and kernels read them without synchronising with the host. On CPU
    ranks records lie in the peers' memory, and rows are a copy, made when they are first asked for.

    Attributes:
        rows: uint8 [records, row_bytes], the records as they arrived. Staged: by source rank, then token. Direct: one
            for every token that could come, `source rank * max_tokens + token`; `index` says which came.
        index: int64 [rows of `tokens`], the record of each row, by expert, then source rank, then token; -1 where the
            row is padding. On the direct transport there are as many entries as could ever be needed, -1 at the end.
        expert_counts: int64 [local experts], rows of each expert, without padding.
        expert_offsets: int64 [local experts + 1], where each expert's rows begin in `tokens`, with padding to `align`.
        lane: the lane of the round.
    """

    rows: torch.Tensor
    index: torch.Tensor
    expert_counts: torch.Tensor
    expert_offsets: torch.Tensor

    _how_over = "it was combined"

    # Of a round as it begins; on the class, as setting each would be a good part of making one.
    _tokens: torch.Tensor | None = None
    _records: torch.Tensor | None = None
    _num_rows: int | None = None  # of `tokens`, once the host knows
    _num_records: int | None = None
    _capacity: int | None = None  # of what was gathered in a fixed shape
    _record_capacity: int | None = None
    _known: Arrived | None = None
    _link: Link | None = None  # to the graph, where gradients are enabled, unless compiled code has its own
    _has_gradients = False

    def __init__(self, rounds: Rounds, lane: int, x: torch.Tensor) -> None:
        self._rounds = rounds
        self._dtype = x.dtype
        self._num_sent = x.shape[0]  # tokens that this rank dispatched
        self.lane = lane

    def __repr__(self) -> str:
        state = "open" if self.is_open else "over"
        return (
            f"Dispatched({self._num_sent} tokens of {self._dtype} sent, {self._rounds.name}, lane {self.lane}, {state})"
        )

    @property
    def is_open(self) -> bool:
        """Whether it is still to be combined: not combined, abandoned, overtaken on its lane, or closed."""
        return self._rounds.open_rounds[self.lane] is self

    @property
    def _wants_gradients(self) -> bool:
        """Whether x or topk_weights wants a gradient, and autograd knows the round."""
        return self._link is not None and self._link.wants.of_tokens

    # -----------------------------------------------------------------------------------------------------------------
    # By expert

    @property
    @opaque
    def tokens(self) -> torch.Tensor:
        """The experts' input: [expert_offsets[-1], hidden] in x's dtype, expert-sorted, padding rows zero.

        They have a gradient where x wants one.

        How many rows there are must be known on the host for that, so on CUDA this waits for the device; `gather` does
        not.

        Raises:
            LaneError: the round is over.
            PeerTimeout: on CUDA, a peer did not answer the dispatch in time.
        """
        self._require_open()
        if self._tokens is None or (self._link is not None and self._link.lacks_gradient(self._tokens)):
            self._num_rows = self._read_num_rows()
            self._tokens, _ = self._gather_linked(self._num_rows)
        return self._tokens

    @opaque
    def gather(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts' input in a fixed shape. Does not wait for the device.

        Rows from `expert_offsets[-1]` on are nobody's, and `combine` never reads them. They hold anything, NaN among
        it, and cost nothing; only where gradients are enabled are they zero, as NaN would reach weights through
        gradients of zero. What adds up all rows needs them zeroed before: `rows_of_nobody =
        torch.arange(capacity) >= d.expert_offsets[-1]; tokens.masked_fill_(rows_of_nobody[:, None], 0)`.

        Args:
            capacity: rows of the result. Rows past it are dropped: they add nothing to `combine`.

        Returns:
            tokens [capacity, hidden], with zeros in padding rows before `expert_offsets[-1]`, and whether rows were
            dropped: bool [], on the device.

        Raises:
            LaneError: the round is over.
            CapacityError: a negative capacity, or more rows than there is memory for.
        """
        self._require_open()
        check_capacity(capacity, self._row_bytes)
        gathered = self._gather_linked(capacity)
        self._capacity = capacity
        return gathered

    @property
    @opaque
    def weights(self) -> torch.Tensor:
        """The router weight of each row of `tokens`: float32 [rows], 0 where it is padding.

        What an expert named twice was given is added up. They have a gradient where topk_weights wants one; `combine`
        applies them itself, and theirs comes beside that. Waits and raises as `tokens`.
        """
        return self._routing().weights

    @property
    @opaque
    def expert_ids(self) -> torch.Tensor:
        """The expert of each row of `tokens`: int64 [rows], counted from this rank's first, -1 where it is padding.

        So they index what a rank has of its experts, and `ep.local_experts`, which has the global ids. Waits and raises
        as `tokens`.
        """
        return self._routing().expert_ids

    @property
    @opaque
    def source(self) -> torch.Tensor:
        """Where each row of `tokens` came from: int64 [rows, 2], rank and number of the token there, -1 for padding.

        On the staged transport the number is what that rank says; it is not compared with anything. Waits and raises as
        `tokens`.
        """
        return self._routing().source

    @opaque
    def gather_routing(self, capacity: int) -> RowRouting:
        """`weights`, `expert_ids` and `source` of the rows that `gather(capacity)` returns. Does not wait.

        Raises:
            LaneError: the round is over.
            CapacityError: a negative capacity, or more rows than there is memory for.
        """
        self._require_open()
        check_capacity(capacity, self._row_bytes)
        found = self._arrived.of_rows(self.index, self.expert_offsets, capacity)
        if self._link is None:
            return found
        rows = torch.arange(capacity, device=self.index.device)
        return found._replace(weights=self._link.weights(found.weights, (rows, capacity)))

    def _routing(self) -> RowRouting:
        self._require_open()
        if self._num_rows is None:
            self._num_rows = self._read_num_rows()
        return self.gather_routing(self._num_rows)

    def _gather_linked(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        gather = functools.partial(self._gather, capacity, self._has_gradients)
        with self._rounds.config.comm.recorder.aside("unpack"):
            return gather() if self._link is None else self._link.gather(gather)

    # -----------------------------------------------------------------------------------------------------------------
    # By token

    @property
    @opaque
    def records(self) -> torch.Tensor:
        """The tokens that came, one row a record: [records, hidden] in x's dtype, by source rank, then token.

        The same on both transports. They have a gradient where x wants one. `combine(..., weighted=True)` takes a row
        for each of them. How many there are must be known on the host, so on CUDA this waits for the device;
        `gather_records` does not.

        Raises:
            LaneError: the round is over.
            PeerTimeout: on CUDA, a peer did not answer the dispatch in time.
        """
        self._require_open()
        if self._records is None or (self._link is not None and self._link.lacks_gradient(self._records)):
            self._records = self._gather_records(self._arrived.first(self._read_num_records()))
        return self._records

    @property
    @opaque
    def record_ids(self) -> torch.Tensor:
        """The experts of each of `records` on this rank: int64 [records, top_k], ascending, -1 behind them.

        They are counted from this rank's first, as `expert_ids`. An expert of another rank is none of them. Waits and
        raises as `records`.
        """
        return self._record_routing().expert_ids

    @property
    @opaque
    def record_weights(self) -> torch.Tensor:
        """Their router weights: float32 [records, top_k], 0 where there is no expert.

        They have a gradient where topk_weights wants one. Waits and raises as `records`.
        """
        return self._record_routing().weights

    @property
    @opaque
    def record_source(self) -> torch.Tensor:
        """Where each of `records` came from: int64 [records, 2], rank and number of the token there.

        Waits and raises as `records`.
        """
        return self._record_routing().source

    @opaque
    def gather_records(self, capacity: int) -> Records:
        """The records in a fixed shape, and all that is known of them. Does not wait for the device.

        Args:
            capacity: rows of the result. Records past it are dropped: they add nothing to `combine`. On the direct
                transport no more than `rows.shape[0]` ever come.

        Raises:
            LaneError: the round is over.
            CapacityError: a negative capacity, or more rows than there is memory for.
        """
        self._require_open()
        check_capacity(capacity, self._row_bytes)
        chosen = self._arrived.first(capacity)
        tokens = self._gather_records(chosen)
        overflow = self._arrived.number > capacity
        weights, expert_ids, source = self._routing_of(chosen)
        self._record_capacity = capacity
        return Records(tokens, expert_ids, weights, source, overflow)

    def _read_num_records(self) -> int:
        """How many came, on the host."""
        if self._num_records is None:
            self._num_rows = self._read_num_rows()  # waits, and raises what kernels reported
            self._num_records = int(self._arrived.number)
        return self._num_records

    def _record_routing(self) -> RowRouting:
        self._require_open()
        return self._routing_of(self._arrived.first(self._read_num_records()))

    def _routing_of(self, chosen: torch.Tensor) -> RowRouting:
        positions, weights, source = self._arrived.at(chosen)
        if self._link is not None:
            weights = self._link.weights(weights, (positions, self._most_rows))
        return RowRouting(weights, experts_of(positions, self.expert_offsets), source)

    def _gather_records(self, chosen: torch.Tensor) -> torch.Tensor:
        if self._link is None:
            return self._unpack(chosen)
        overflow = torch.zeros((), dtype=torch.bool, device=chosen.device)
        return self._link.gather(lambda: (self._unpack(chosen), overflow), self._places_of(chosen))[0]

    def _places_of(self, chosen: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Gradients travel by row of an expert: a record's is that of its first, and the others add nothing to it."""
        return take(self._arrived.positions, chosen, -1)[:, 0], self._most_rows

    @property
    def _row_bytes(self) -> int:
        """Of main memory for a row that is gathered, with all that is known of it."""
        config = self._rounds.config
        return (config.hidden_size * self._dtype.itemsize + 16 * config.top_k + 48) * self.index.is_cpu

    @property
    def _most_rows(self) -> int:
        return self.index.shape[0] if self._num_rows is None else self._num_rows

    @property
    @opaque
    def quantized(self) -> QuantizedRows:
        """What arrived, in int8 as it lies, for experts that eat int8. Does not wait for the device.

        Those that make int8 rows give them to `combine` as WireRows. Rows have no gradient. On CUDA's direct transport
        they are the lane's own, like all tensors here.

        Raises:
            LaneError: the round is over.
            WireFormatError: the wire of dispatch is not int8.
            RoutingError: x wants a gradient.
        """
        self._require_open()
        config = self._rounds.config
        if self._link is not None and self._link.wants.rows and torch.is_grad_enabled():
            raise RoutingError("int8 rows have no gradient, and x wants one: use d.tokens, or call under no_grad()")
        return QuantizedRows.of(self.rows, self.index, config.wire, config.hidden_size)

    # -----------------------------------------------------------------------------------------------------------------
    # Its end

    @functools.partial(opaque, find_recorder=lambda arguments, _: arguments[0]._rounds.config.comm.recorder)
    def abandon(self) -> None:
        """Ends the round as a `combine` to which no expert of this rank adds anything; the result is thrown away.

        Peers may combine meanwhile: what they sent here adds nothing.

        Raises:
            LaneError: the round is over.
            PeerTimeout: a peer did not answer in time.
        """
        self._require_open()
        with self._rounds.call("abandon", self.lane, (), self._dtype):
            self._rounds.open_rounds[self.lane], self._how_over = None, "it was abandoned"
            self._rounds.close_round(self.lane, ABANDONED)

    def _check_combine(self, expert_out: ExpertRows, out: torch.Tensor | None, weighted: object) -> torch.Tensor:
        """What `combine` refuses before anything is sent. Returns the rows: floats, or records of the combine wire."""
        if not isinstance(weighted, bool):
            raise RoutingError(f"weighted is {weighted!r}; True or False is needed")
        config = self._rounds.config
        if weighted and config.invariant:
            raise RoutingError("weighted is True; with invariant=True each expert's row goes home: False is needed")
        rows, dtypes = self._check_kind(expert_out)
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
        wanted = rows.requires_grad or self._wants_gradients
        if isinstance(out, torch.Tensor) and torch.is_grad_enabled() and (out.requires_grad or wanted):
            raise RoutingError("what combine fills in place has no gradient: leave out away, or call under no_grad()")
        # Alike on all ranks, whatever rows each has: where one refuses alone, the others wait for it.
        if self._link is None and torch.is_grad_enabled() and rows.is_floating_point():
            raise RoutingError(
                "gradients are enabled, and this round was dispatched without: dispatch with gradients enabled on all "
                "ranks, or combine under torch.no_grad(), too"
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
        overwrite("out", out)
        return rows

    def _check_kind(self, expert_out: ExpertRows) -> tuple[torch.Tensor, tuple[torch.dtype, ...]]:
        """The rows that experts give back, and the dtypes they may have."""
        config, wire = self._rounds.config, self._rounds.config.combine_wire
        if isinstance(expert_out, QuantizedRows):
            raise ArgumentError(
                "expert_out is a QuantizedRows, which has a row for each record; accepted: a float tensor, or "
                "WireRows, with a row for each row of an expert"
            )
        if not isinstance(expert_out, WireRows):
            config.comm.check_device("expert_out", expert_out)
            return expert_out, config.row_dtypes
        if expert_out.wire != wire or not wire.quantized:
            accepted = f"{wire!r}" if wire.quantized else "none but float rows, as the combine wire is 'none'"
            raise WireFormatError(
                f"expert_out has rows in {expert_out.wire!r}, which combine does not take; accepted: {accepted}"
            )
        config.comm.check_device("expert_out.records", expert_out.records)
        rows = readable_records(expert_out)
        if torch.is_grad_enabled() and self._wants_gradients:
            raise RoutingError(
                "expert_out is quantised rows, which have no gradient, and x or topk_weights wants one: give float "
                "rows, or combine under torch.no_grad()"
            )
        return rows, (torch.uint8,)

    # -----------------------------------------------------------------------------------------------------------------
    # What a transport gives

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

    def _traffic(self, counts: Sequence[int], record_bytes: int, beside: int = 0) -> Traffic:
        """Of a leg of this round; see `Traffic.of`."""
        config = self._rounds.config
        return Traffic.of(counts, config.comm.rank, config.hidden_size, self._dtype, record_bytes, beside)

    def _require_open(self) -> None:
        if not self.is_open:
            raise LaneError(f"this round on lane {self.lane} is over: {self._how_over}")

    @property
    def _arrived(self) -> Arrived:
        if self._known is None:
            self._known = self._read_arrived()
        return self._known

    @abstractmethod
    def _read_num_rows(self) -> int:
        """Rows of the experts' input with padding, on the host."""

    @abstractmethod
    def _read_arrived(self) -> Arrived:
        """What it knows of the records. Does not wait for the device."""

    @abstractmethod
    def _gather(self, capacity: int, zero_tail: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """What `gather` returns; `zero_tail`: with zeros in the rows that are nobody's."""

    @abstractmethod
    def _unpack(self, chosen: torch.Tensor) -> torch.Tensor:
        """The first records that came, by number, int64 [n], dequantised: [n, hidden] in x's dtype, zero for -1."""

    @abstractmethod
    def _begin_combine(self, expert_out: torch.Tensor, out: torch.Tensor, weighted: bool) -> Callable[[], None]:
        """Sends the weighted sums of what was checked home; what is returned waits, and fills `out` at home."""
