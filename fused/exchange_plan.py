"""A plan of an exchange: which rows go to which rank, settled once, for any number of exchanges either way.

    plan = tw.ExchangePlan(rows, send_counts, comm, num_rows=len(x))
    there = plan.there(x, wire="int8")     # x[rows] at their ranks
    home = plan.back(there, wire="int8")   # each row of x gets the sum of what its copies became

The two are each other's transpose, and so each other's backward. Rows travel by `all_to_all_v`, which chooses the
transport, checks and counts them; on the way back, the kernel that sums records at home after a combine adds them up.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import torch

from thinwire.comm import Group, communicator_or_default
from thinwire.comm.work import Work
from thinwire.compiler import opaque
from thinwire.errors import ArgumentError, CountsError, WireFormatError
from thinwire.fused.all_to_all import all_to_all_v, open_channel
from thinwire.fused.backend import select_backend
from thinwire.fused.call import in_memory
from thinwire.fused.codec import resolve_wire, wire_of_rows
from thinwire.fused.counts import Counts, parse_integers
from thinwire.fused.direct_transport import DirectTransport
from thinwire.fused.gradients import require_linear, wants_gradient, with_gradient
from thinwire.fused.transport import check_transport, why_not_by_default
from thinwire.wire import WireFormat

_EXACT = WireFormat("none")
_SUMMED = (torch.float32, torch.float16, torch.bfloat16)
_opaque = partial(opaque, find_recorder=lambda arguments, _: arguments[0].comm.recorder)


class ExchangePlan:
    """Which rows go to which rank, and how many come. Making one is collective, unless `recv_counts` are given.

    Calls of `there` and `back` are collective. They can follow each other in any order and number. torch.compile calls
    them between two graphs. A plan holds no rows of x; it ends with its communicator. On CUDA, making it and its first
    return wait for the device.

    Args:
        rows: int64 or int32 [sum(send_counts)], the rows of x to send: those for rank 0, then those for rank 1, and so
            on. A row may go to several ranks, or to one several times. None: x has sum(send_counts) rows, in order.
        send_counts: rows for each rank, list of ints or integer tensor [size].
        comm: a communicator, a process group, or a DeviceMesh of one axis; None means the one that `init` made.
        num_rows: rows of x; to be passed with `rows`.
        recv_counts: rows from each rank, passed on all ranks or on none. None: ranks exchange their counts.
        transport: "auto", "direct" or "staged", as in `all_to_all_v`.

    Attributes:
        comm: the communicator.
        rows: int64, or None. num_rows: rows of x.
        send_counts, recv_counts: lists of ints.

    Raises:
        CountsError: counts that are no counts or do not fit, or `rows` without `num_rows`. As the next two, on the rank
            that passed them; its peers wait for its counts, and get PeerTimeout.
        ArgumentError: rows of another dtype or shape, or outside of num_rows.
        TransportUnavailable: an unknown transport, or rows on another kind of device.

    >>> import thinwire as tw
    >>> comm = tw.init()
    >>> plan = tw.ExchangePlan(torch.tensor([2, 0, 2]), [3], comm, num_rows=3)
    >>> there = plan.there(torch.tensor([[1.0], [2.0], [3.0]]), wire="none")
    >>> there.tolist(), plan.back(there, wire="none").tolist()
    ([[3.0], [1.0], [3.0]], [[1.0], [0.0], [6.0]])
    >>> comm.close()
    """

    def __init__(
        self,
        rows: torch.Tensor | None,
        send_counts: Counts,
        comm: Group | None = None,
        *,
        num_rows: int | None = None,
        recv_counts: Counts | None = None,
        transport: str = "auto",
    ) -> None:
        check_transport(transport)
        self.comm = communicator_or_default(comm)
        self._exchange = partial(all_to_all_v, comm=self.comm, transport=transport)
        self._may_be_direct = transport != "staged" and (transport == "direct" or not why_not_by_default(self.comm))
        size, rank = self.comm.size, self.comm.rank
        self.send_counts = parse_integers(send_counts, size, "send_counts")
        sent = sum(self.send_counts)
        if rows is None and num_rows is None:
            num_rows = sent
        if isinstance(num_rows, bool) or not isinstance(num_rows, int) or num_rows < 0:
            raise CountsError(f"num_rows is {num_rows!r}; with rows, an int of at least 0 is needed")
        if rows is None and num_rows != sent:
            raise CountsError(f"num_rows is {num_rows} and send_counts add up to {sent}; without rows they are equal")
        self.num_rows = num_rows
        self.rows = None if rows is None else self._parse_rows(rows, sent, num_rows)
        if recv_counts is None:
            self.recv_counts: list[int] = self.comm.exchange_counts(self.send_counts)
        else:
            self.recv_counts = parse_integers(recv_counts, size, "recv_counts")
            if self.recv_counts[rank] != self.send_counts[rank]:
                raise CountsError(
                    f"rank {rank} sends itself {self.send_counts[rank]} rows but expects {self.recv_counts[rank]}"
                )

    def _parse_rows(self, rows: torch.Tensor, sent: int, num_rows: int) -> torch.Tensor:
        self.comm.check_device("rows", rows)
        if rows.dtype not in (torch.int64, torch.int32) or rows.shape != (sent,):
            raise ArgumentError(f"rows is {rows.dtype} {list(rows.shape)}; accepted: int64 or int32 [{sent}]")
        if sent and not 0 <= int(rows.min()) <= int(rows.max()) < num_rows:
            raise ArgumentError(f"rows has {int(rows.min())} ... {int(rows.max())}; accepted: 0 ... {num_rows - 1}")
        return rows.long().clone()  # callers may write into theirs

    @_opaque
    def there(
        self,
        x: torch.Tensor,
        *,
        wire: str | WireFormat | None = None,
        grad_wire: str | WireFormat = "none",
        out: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> torch.Tensor | Work[torch.Tensor]:
        """Sends rows to their ranks, and gives those that came: [sum(recv_counts), ...], by source rank.

        Args:
            x: [num_rows, ...], of what the wire carries; `none` carries any dtype.
            wire: the format in transit; None means THINWIRE_WIRE, else int8+h64, or int8 where a row is
                no multiple of 64.
            grad_wire: the format of what travels in backward.
            out, async_op: as in `all_to_all_v`.

        Raises:
            CountsError: x does not have num_rows rows.
            WireFormatError, PeerTimeout, TransportUnavailable and others: as `all_to_all_v`.
        """
        self._check("x", x, self.num_rows)
        if not wants_gradient(x):
            return self._send(x, wire, out, async_op)
        require_linear("ExchangePlan.there", out, async_op)
        self._require_summed("x, which wants gradients,", x)
        back = partial(self._return, wire=resolve_wire(grad_wire))
        return with_gradient(x, partial(self._send, wire=wire), back)

    @_opaque
    def back(
        self,
        y: torch.Tensor,
        *,
        wire: str | WireFormat | None = None,
        grad_wire: str | WireFormat = "none",
        async_op: bool = False,
    ) -> torch.Tensor | Work[torch.Tensor]:
        """Returns rows to where they came from, and adds them up there: [num_rows, ...].

        What arrives has y's dtype, also after a quantised wire. It is added up in float32, in ascending rank, and
        rounded to y's dtype. Rows that went nowhere are zero. A plan without rows adds nothing.

        Args:
            y: float32, float16 or bfloat16 [sum(recv_counts), ...]; any dtype if the plan has no rows.
            wire, grad_wire, async_op: as in `there`.

        Raises:
            CountsError: y does not have as many rows as came.
            WireFormatError: y has another dtype.
            PeerTimeout, TransportUnavailable and others: as `all_to_all_v`.
        """
        self._check("y", y, sum(self.recv_counts))
        self._require_summed("y", y)
        if not wants_gradient(y):
            return self._return(y, wire_of_rows(wire, y), async_op)
        require_linear("ExchangePlan.back", None, async_op)
        there = partial(self._send, wire=resolve_wire(grad_wire))
        return with_gradient(y, partial(self._return, wire=wire_of_rows(wire, y)), there)

    def _require_summed(self, name: str, y: torch.Tensor) -> None:
        if self.rows is not None and y.dtype not in _SUMMED:
            raise WireFormatError(f"{name} is {y.dtype}; what is added up must be float32, float16 or bfloat16")

    def _check(self, name: str, x: torch.Tensor, num_rows: int) -> None:
        self.comm.check_device(name, x)
        if x.dim() < 1 or x.shape[0] != num_rows:
            raise CountsError(f"{name} is {x.dtype} {list(x.shape)}; this plan is for [{num_rows}, ...]")

    def _send(
        self, x: torch.Tensor, wire: str | WireFormat | None, out: torch.Tensor | None = None, async_op: bool = False
    ) -> Any:
        picked = x.detach() if self.rows is None else x.detach().index_select(0, self.rows)
        return self._exchange(picked, self.send_counts, self.recv_counts, wire=wire, out=out, async_op=async_op)

    def _return(self, y: torch.Tensor, wire: WireFormat, async_op: bool = False) -> Any:
        if self.rows is not None and self._may_be_direct:
            self._load_sum(y, wire)
        arrived: Any = self._exchange(y.detach(), self.recv_counts, self.send_counts, wire=wire, async_op=async_op)
        return Work([arrived], lambda: self._sum(arrived.wait()), y.device) if async_op else self._sum(arrived)

    def _load_sum(self, y: torch.Tensor, wire: WireFormat) -> None:
        """Loads the kernel that sums, before peers wait for this rank: see `DirectTransport.load_kernels`."""
        channel, width = open_channel(self.comm, wire), y.shape[1:].numel()
        if isinstance(channel, DirectTransport) and channel.on_gpu and width:
            copies = self._copies

            def launch() -> None:
                nothing = copies.new_full((1, copies.shape[1]), -1)
                self._add_up(y.new_empty(1, width), nothing, y.new_empty(1, width))

            channel.load_kernels(("sum", y.dtype, width, copies.shape[1]), launch)

    def _sum(self, arrived: torch.Tensor) -> torch.Tensor:
        """[sum(send_counts), ...] -> [num_rows, ...], as `sum_records` adds up exact records."""
        if self.rows is None:
            return arrived
        tail = arrived.shape[1:]
        out = self.comm.result_memory.new_empty(arrived, (self.num_rows, *tail), arrived.dtype)
        width = tail.numel()
        if not width or not self.num_rows:
            return out
        self._add_up(arrived.view(len(arrived), width), self._copies, out.view(-1, width))
        return out

    def _add_up(self, rows: torch.Tensor, copies: torch.Tensor, out: torch.Tensor) -> None:
        """out[i] = the sum of rows[copies[i]], each [n, width], of the same dtype."""
        missing = _EXACT.row_bytes(rows.shape[1], rows.dtype) // rows.dtype.itemsize - rows.shape[1]
        if missing or not in_memory(rows):  # records are padded
            rows = torch.nn.functional.pad(rows, (0, missing))
        backend = select_backend(rows.device, _EXACT, self.comm.cpu_share.threads)
        backend.sum_records(rows.view(torch.uint8), copies, _EXACT, out)

    @cached_property
    def _copies(self) -> torch.Tensor:
        """int64 [num_rows, most copies]: where each row was sent, in order, -1 behind them."""
        assert self.rows is not None
        order = self.rows.argsort(stable=True)
        counts = torch.bincount(self.rows, minlength=self.num_rows)
        most = int(counts.max()) if len(order) else 1
        copies = torch.full((self.num_rows, most), -1, dtype=torch.int64, device=order.device)
        ordinal = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[self.rows[order]]
        copies[self.rows[order], ordinal] = order
        return copies
