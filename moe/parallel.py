"""Expert parallelism: a token travels once to each rank that owns one of its experts, and weighted sums travel back.

    d = ep.dispatch(x, topk_ids, topk_weights)
    expert_out = experts(d.tokens, d.expert_counts)
    y = ep.combine(expert_out, d)

Both legs are quantised. An expert's rank adds up its experts' weighted outputs of a token in float32 and quantises the
sum once; the token's home dequantises one record a rank and adds them in ascending rank.
"""

from __future__ import annotations

import torch

from thinwire.comm.communicator import Communicator
from thinwire.errors import CapacityError, LaneError, RoutingError, TransportUnavailable
from thinwire.fused.backend import select_backend
from thinwire.fused.codec import FLOAT_DTYPES, resolve_wire
from thinwire.fused.staged import StagedExchange, dense_segments
from thinwire.moe.dispatched import Dispatched, Traffic
from thinwire.moe.plan import ArrivalPlan, SendPlan, merge_repeated_experts
from thinwire.moe.routing import expert_range
from thinwire.version import VERSION
from thinwire.wire import WIRE_VERSION, WireFormat

__all__ = ["ExpertParallel"]

_TRANSPORTS = ("auto", "staged")
_MAX_TOP_K = 32


class ExpertParallel:
    """Dispatch and combine over a group whose ranks own the experts in contiguous blocks.

    The constructor is collective. One object serves all layers of a model that have these sizes.

    Args:
        comm: the group.
        num_experts: experts in all; the first `num_experts % comm.size` ranks own one more.
        top_k: experts a token may name, at most 32.
        hidden_size: elements of a token.
        max_tokens: the most tokens a rank dispatches at once; the same on every rank.
        wire: the dispatch leg's format, such as `"int8"` (see WireFormat); None means THINWIRE_WIRE, else int8.
        combine_wire: the combine leg's; None means `wire`.
        transport: `"auto"` or `"staged"`.
        lanes: rounds that may be open at once.
        align: every expert's rows begin at a multiple of this in `Dispatched.tokens`.

    Raises:
        ConfigMismatch: on every rank, when ranks passed different settings.
        RoutingError: sizes that make no sense.
        TransportUnavailable: a transport or backend that is not there, or a group that cannot move the tensors.

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
        comm: Communicator,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        max_tokens: int,
        *,
        wire: str | WireFormat | None = None,
        combine_wire: str | WireFormat | None = None,
        transport: str = "auto",
        lanes: int = 1,
        align: int = 1,
    ) -> None:
        sizes = {"num_experts": num_experts, "top_k": top_k, "hidden_size": hidden_size, "lanes": lanes, "align": align}
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise RoutingError(f"{name} is {value!r}; an int of at least 1 is needed")
        if not isinstance(max_tokens, int) or max_tokens < 0:
            raise RoutingError(f"max_tokens is {max_tokens!r}; an int of at least 0 is needed")
        if top_k > _MAX_TOP_K:
            raise RoutingError(f"top_k is {top_k}; at most {_MAX_TOP_K} experts a token are supported")
        if transport not in _TRANSPORTS:
            raise TransportUnavailable(f"transport {transport!r} is not available; accepted: {', '.join(_TRANSPORTS)}")
        if not isinstance(comm, Communicator):
            raise TransportUnavailable(f"comm is {comm!r}; a Communicator is needed, such as thinwire.init() returns")
        comm.check_exchange()
        self.comm = comm
        self.num_experts, self.top_k, self.hidden_size, self.max_tokens = num_experts, top_k, hidden_size, max_tokens
        self.wire = resolve_wire(wire)
        self.combine_wire = self.wire if combine_wire is None else resolve_wire(combine_wire)
        self.transport = "staged"
        self.align = align
        self.local_experts = expert_range(num_experts, comm.size, comm.rank)
        self._dispatch_backend = select_backend(comm.device, self.wire)
        self._combine_backend = select_backend(comm.device, self.combine_wire)
        self._open_rounds: list[Dispatched | None] = [None] * lanes
        self._closed = False
        settings: dict[str, str | int | float | bool | None] = {
            **sizes,
            "max_tokens": max_tokens,
            "wire": str(self.wire),
            "wire_alignment": self.wire.alignment,
            "combine_wire": str(self.combine_wire),
            "combine_wire_alignment": self.combine_wire.alignment,
            "wire_version": WIRE_VERSION,
            "transport": self.transport,
            "thinwire": VERSION,
        }
        comm.require_same("ExpertParallel", settings)

    def dispatch(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *, lane: int = 0
    ) -> Dispatched:
        """Sends each token to the ranks that own its experts. Collective; ranks may have any number of tokens.

        A round that is still open on the lane is over with this call.

        Args:
            x: [tokens, hidden_size] float32, float16 or bfloat16.
            topk_ids: int32 or int64 [tokens, top_k], global expert ids, -1 for none. A repeated id counts once, with
                its weights added in ascending k.
            topk_weights: float [tokens, top_k].
            lane: which of the `lanes`.

        Raises:
            RoutingError: shapes, dtypes or ids that do not fit; gradients wanted; ranks with tokens of different
                dtypes (on all of them).
            TransportUnavailable: tensors on another kind of device than the communicator's.
            CapacityError: more than max_tokens tokens.
            LaneError: no such lane, or closed.
            PeerTimeout: a peer did not answer in time.
        """
        self._check_lane(lane)
        self._check_tokens(x, topk_ids, topk_weights)
        x = x if x.stride(1) == 1 else x.contiguous()
        ids, weights = merge_repeated_experts(topk_ids, topk_weights)
        sends = SendPlan.of(ids, self.num_experts, self.comm.size)
        self._open_rounds[lane] = None
        recv_counts = self._exchange_counts(sends.counts, x.dtype)
        row_bytes, record_bytes = self.wire.row_bytes(self.hidden_size, x.dtype), self._message_bytes(x.dtype)
        id_words = slice(row_bytes // 4, row_bytes // 4 + self.top_k)
        weight_words = slice(id_words.stop, id_words.stop + self.top_k)
        slots = dense_segments(sends.counts)

        def pack(start: int, stop: int, records: torch.Tensor) -> None:
            tokens = sends.tokens[slots.row_index(start, stop, x.device)]
            self._dispatch_backend.pack_rows(x, self.wire, tokens, records[:, :row_bytes])
            tail = records.view(torch.int32)
            tail[:, id_words] = ids[tokens]
            tail[:, weight_words] = weights[tokens].view(torch.int32)
            tail[:, weight_words.stop :] = 0

        label = f"dispatch {self.wire!r} {x.dtype}"
        arrived = StagedExchange.post(self.comm, sends.counts, recv_counts, record_bytes, pack, label).wait()
        words = arrived.view(torch.int32)
        arrival = ArrivalPlan.of(
            words[:, id_words], words[:, weight_words].view(torch.float32), self.local_experts, self.align
        )
        dispatched = Dispatched(self, lane, x.dtype, sends, recv_counts, arrived[:, :row_bytes], arrival)
        self._open_rounds[lane] = dispatched
        return dispatched

    def combine(self, expert_out: torch.Tensor, d: Dispatched, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Sends each token's weighted sum home and adds what comes back. Collective; ends the round.

        Args:
            expert_out: [rows, hidden_size] float32, float16 or bfloat16, in the order of `d.tokens` (or of what
                `d.gather` returned).
            d: the round.
            out: [tokens, hidden_size] in x's dtype, filled in place.

        Returns:
            [tokens, hidden_size] in x's dtype; zero for a token without experts.

        Raises:
            LaneError: the round is over, or not this object's.
            RoutingError: shapes or dtypes that do not fit; gradients wanted.
            TransportUnavailable: tensors on another kind of device than the communicator's.
            PeerTimeout: a peer did not answer in time.
        """
        self._require_open(d)
        self._check_expert_out(expert_out, d)
        tokens = d._sends.record_index.shape[0]
        if out is not None:
            self.comm.check_device("out", out)
            if out.shape != (tokens, self.hidden_size) or out.dtype != d._dtype or not out.is_contiguous():
                raise RoutingError(
                    f"out is {out.dtype} {list(out.shape)}, strides {list(out.stride())}; contiguous {d._dtype} "
                    f"[{tokens}, {self.hidden_size}] is needed"
                )
        return self._send_home(expert_out if expert_out.stride(1) == 1 else expert_out.contiguous(), d, out)

    def _send_home(self, expert_out: torch.Tensor, d: Dispatched, out: torch.Tensor | None) -> torch.Tensor:
        """`combine` after its checks; rows that expert_out does not have add nothing."""
        self._open_rounds[d.lane] = None
        if out is None:
            tokens = d._sends.record_index.shape[0]
            out = torch.empty(tokens, self.hidden_size, dtype=d._dtype, device=self.comm.device)
        positions = torch.where(d._arrival.positions < expert_out.shape[0], d._arrival.positions, -1)
        slots = dense_segments(d._recv_counts)

        def pack(start: int, stop: int, records: torch.Tensor) -> None:
            chosen = slots.row_index(start, stop, positions.device)
            self._combine_backend.pack_weighted_sums(
                expert_out, positions[chosen], d._arrival.weights[chosen], self.combine_wire, d._dtype, records
            )

        row_bytes = self.combine_wire.row_bytes(self.hidden_size, d._dtype)
        label = f"combine {self.combine_wire!r} {d._dtype}"
        home = StagedExchange.post(self.comm, d._recv_counts, d._sends.counts, row_bytes, pack, label).wait()
        self._combine_backend.sum_records(home, d._sends.record_index, self.combine_wire, out)
        return out

    @property
    def memory_bytes(self) -> int:
        """Bytes held between calls: none, since the staged transport allocates what a call needs."""
        return 0

    def explain(self) -> str:
        """What was chosen, and why."""
        backend = self._dispatch_backend
        return "\n".join(
            (
                f"transport: {self.transport} (the only one in this version)",
                f"wire: {self.wire} out, {self.combine_wire} back",
                f"kernels: {backend.name} ({backend.reason})",
                f"experts: {self.num_experts} over {self.comm.size} ranks, here {self.local_experts}",
                self.comm.explain(),
            )
        )

    def close(self) -> None:
        """Ends every round; the object cannot be used afterwards. The communicator stays open."""
        self._open_rounds = [None] * len(self._open_rounds)
        self._closed = True

    def __enter__(self) -> ExpertParallel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _exchange_counts(self, counts: list[int], dtype: torch.dtype) -> list[int]:
        """The peers' counts; with them everyone learns everyone's dtype, which must be the same."""
        kinds = len(FLOAT_DTYPES)
        received = self.comm.exchange_counts([count * kinds + FLOAT_DTYPES.index(dtype) for count in counts])
        for peer, value in enumerate(received):
            if FLOAT_DTYPES[value % kinds] != dtype:
                raise RoutingError(
                    f"rank {self.comm.rank} dispatches {dtype} tokens, rank {peer} {FLOAT_DTYPES[value % kinds]}; all "
                    "ranks of a round need the same dtype"
                )
        return [value // kinds for value in received]

    def _message_bytes(self, dtype: torch.dtype) -> int:
        """A dispatched record with the token's expert ids and weights behind it; kernels need a multiple of 16."""
        return -(-(self.wire.row_bytes(self.hidden_size, dtype) + 8 * self.top_k) // 16) * 16

    def _traffic(self, rows: int, dtype: torch.dtype, record_bytes: int) -> Traffic:
        return Traffic(rows, rows * self.hidden_size * dtype.itemsize, rows * record_bytes)

    def _check_lane(self, lane: int) -> None:
        if self._closed:
            raise LaneError("this ExpertParallel is closed")
        if not isinstance(lane, int) or not 0 <= lane < len(self._open_rounds):
            last = len(self._open_rounds) - 1
            raise LaneError(f"there is no lane {lane!r}; this ExpertParallel has lanes 0 ... {last}")

    def _require_open(self, d: Dispatched) -> None:
        if not isinstance(d, Dispatched):
            raise LaneError(f"d is a {type(d).__name__}; what dispatch returned is needed")
        if d._ep is not self:
            raise LaneError("this round was dispatched by another ExpertParallel")
        if self._closed or self._open_rounds[d.lane] is not d:
            raise LaneError(
                f"this round on lane {d.lane} is over: it was combined or abandoned, or a later dispatch took its lane"
            )

    def _check_tokens(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        for name, tensor in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            self.comm.check_device(name, tensor)
        if x.dtype not in FLOAT_DTYPES or x.dim() != 2 or x.shape[1] != self.hidden_size:
            raise RoutingError(
                f"x is {x.dtype} {list(x.shape)}; float32, float16 or bfloat16 [tokens, {self.hidden_size}] is needed"
            )
        if x.shape[0] > self.max_tokens:
            raise CapacityError(f"{x.shape[0]} tokens were passed; this ExpertParallel was made for {self.max_tokens}")
        shape = (x.shape[0], self.top_k)
        if topk_ids.dtype not in (torch.int32, torch.int64) or topk_ids.shape != shape:
            raise RoutingError(
                f"topk_ids is {topk_ids.dtype} {list(topk_ids.shape)}; int32 or int64 {list(shape)} is needed"
            )
        if not topk_weights.is_floating_point() or topk_weights.shape != shape:
            raise RoutingError(
                f"topk_weights is {topk_weights.dtype} {list(topk_weights.shape)}; floats {list(shape)} are needed"
            )
        if topk_ids.numel() and not (-1 <= int(topk_ids.min()) and int(topk_ids.max()) < self.num_experts):
            raise RoutingError(
                f"topk_ids runs from {int(topk_ids.min())} to {int(topk_ids.max())}; experts are 0 ... "
                f"{self.num_experts - 1}, and -1 stands for none"
            )
        if torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad):
            raise RoutingError("dispatch has no backward: call it under torch.no_grad() or torch.inference_mode()")

    def _check_expert_out(self, expert_out: torch.Tensor, d: Dispatched) -> None:
        self.comm.check_device("expert_out", expert_out)
        accepted = [d._arrival.num_rows] if d._capacity is None else [d._arrival.num_rows, d._capacity]
        right_shape = expert_out.dim() == 2 and expert_out.shape[1] == self.hidden_size
        if expert_out.dtype not in FLOAT_DTYPES or not right_shape or expert_out.shape[0] not in accepted:
            raise RoutingError(
                f"expert_out is {expert_out.dtype} {list(expert_out.shape)}; float32, float16 or bfloat16 "
                f"[{' or '.join(map(str, accepted))}, {self.hidden_size}], a row for each of the round's tokens, is "
                "needed"
            )
        if torch.is_grad_enabled() and expert_out.requires_grad:
            raise RoutingError("combine has no backward: call it under torch.no_grad() or torch.inference_mode()")
