"""The channel of the direct all-to-all-v for CPU ranks: memory, numba's kernel, and the state of calls.

The protocol is that of `thinwire.fused.channel`, the kernel is in `thinwire.triton_kernels.cpu.all_to_all_v`.

A small call takes microseconds, and most of them are Python's. So the plainest calls have a short way, `send_plainly`:
it looks at little, and leaves whatever is not plain, or wrong, to the thorough way. What calls that are alike have in
common is decided in the first of them, and kept.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from thinwire.comm.communicator import Communicator
from thinwire.comm.exchange import Exchange
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.comm.resources.result_memory import LEAST_BYTES
from thinwire.comm.tensors import overwrite
from thinwire.errors import CountsError, ThinwireError
from thinwire.fused.channel import FLAT_ROW, Channel, RecvBuffer, RowFormat, Transfer, signature_of, traffic_of
from thinwire.fused.codec import resolve_wire
from thinwire.fused.counts import Segments, dense_segments
from thinwire.fused.transport import CLOSED
from thinwire.triton_kernels.checksum_seed import CHECKSUM_BYTES
from thinwire.triton_kernels.exchange_layout import CHECKED_BYTES, ExchangeLayout
from thinwire.triton_kernels.signal import CORRUPTED, MISMATCHED, RUNNING, SIGNAL_LINE_BYTES, TIMED_OUT
from thinwire.wire import WireFormat

TensorGuards: Any
try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # it is torch's own, which may take it away
    TensorGuards = None

_INTS = frozenset([int])
_CONTIGUOUS = torch.contiguous_format  # x may have odd strides, where a size is 1
_MOST_KEPT = 1024  # forms of rows, and kinds of plain calls
_MOST_ROWS = 1 << 40  # of a new output; more is nonsense, but torch has other words for what fits 64 bits and what not
_COPIED_FOR_ONE = 4  # bytes of exact rows that are as much work as one that is quantised: memory limits copies first
_PLACED_BY_THE_KERNEL = Segments([], [])
_RECV_COUNT, _RECV_DISPL = 2, 3  # rows of the kernel's `peers`


class _Kind(NamedTuple):
    """What plain calls of one shape, dtype, wire and shape of the output have in common, with the counts of the last.

    It holds no tensor, and nothing that a caller could change.
    """

    alike: Callable[..., bool]  # whether tensors are as x was, and `out` where it was given, but for what they hold
    named: str | WireFormat
    makes_output: bool
    given_send_counts: list[int] | None
    given_recv_counts: list[int] | None
    send_counts: list[int]
    wire: WireFormat
    shape: torch.Size
    out_shape: torch.Size
    x_bytes: int
    out_bytes: int
    num_bytes: int  # of x or the output, the larger
    words: memoryview  # what such a call brings, but for the addresses
    recorded: tuple[Any, ...]  # by the flight recorder


def _guard(tensors: list[torch.Tensor]) -> Callable[..., bool]:
    """Says in one question whether others are of the same type, dtype, sizes, strides, and keys of dispatch.

    The keys tell the device and the layout, negative views, autograd's modes, and all else that torch looks at.
    torch.compile's graphs are guarded by the same; no tensor is held. Where torch has no such guards, one thing after
    the other is asked for, which takes a microsecond more.
    """
    if TensorGuards is None:
        forms = [*map(_form, tensors)]
        return lambda *others: [*map(_form, others)] == forms
    sizes, strides = ([[*of(tensor)] for tensor in tensors] for of in (torch.Tensor.size, torch.Tensor.stride))
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = guards.check
    return check


def _form(tensor: Any) -> tuple[Any, ...] | None:
    """What `_guard` compares; None of what is no plain tensor."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.requires_grad, tensor.is_neg()


class HostChannel(Channel):
    """A channel of CPU ranks, with numba's kernel."""

    def __init__(
        self,
        memory: SymmetricMemory,
        layout: ExchangeLayout,
        rank: int,
        timeout: float,
        voters: Exchange | None = None,
        threads: int = 1,
        crowded: bool = False,
    ) -> None:
        """As `Channel`.

        Args:
            threads: for the rows of one large call.
            crowded: ranks outnumber cores, and who waits keeps the awaited one from its core.
        """
        from thinwire.triton_kernels.cpu import all_to_all_v as kernels  # here, as loading numba takes a while
        from thinwire.triton_kernels.cpu.signal import SPINS
        from thinwire.triton_kernels.cpu.team import BYTES_PER_THREAD, threads_for

        super().__init__(memory, layout, rank, timeout, voters)
        self.threads, self._threads_for = threads, threads_for
        self._shared_bytes = 2 * BYTES_PER_THREAD if threads > 1 else sys.maxsize
        self._kernels, self._kernel, self._post = kernels, kernels.move, kernels.POST
        world, scalars = layout.WORLD, len(kernels.SCALARS)
        words: Any = np.zeros(scalars + len(kernels.PEERS) * world, np.int64)
        self._words, self._address = memoryview(words).cast("B").cast("q"), words.ctypes.data
        self._call = words[:scalars]
        self._peers = words[scalars:].reshape(-1, world)
        # What a call brings lies in one stretch, and is written at once.
        first = kernels.SCALARS.index("discard")
        self._x_word, self._out_word, self._exact_word = map(kernels.SCALARS.index, ("x", "out", "exact"))
        self._brought, self._brought_at = struct.Struct(f"{scalars - first + 4 * world}q"), 8 * first
        self._brought_words = slice(first, scalars + 4 * world)
        self._expects_anything = (-1,) * world + (0,) * world
        self._spare: Transfer | None = None  # of `send_plainly`
        self._kinds: dict[object, _Kind] = {}
        self._brings: _Kind | None = None  # whose words the kernel has
        self._regions: Any = None  # which the kernel has the address of
        self._region_memory: list[object] = []
        self._plainly = kernels.POST | kernels.DRAIN
        for name, value in {
            "world": world,
            "rank": rank,
            "half_lines": world * SIGNAL_LINE_BYTES,
            "half_bytes": world * layout.SLOT_BYTES,
            "slot_bytes": layout.SLOT_BYTES,
            "slots": layout.SLOTS,
            "timeout": min(round(timeout * 1e9), 2**62),
            "grace": round(self.grace * 1e9),
            "buffer_ptrs": memory.buffer_ptrs.data_ptr(),
            "stuck": layout.STUCK,
            "report": self.report.ctypes.data,
            "looks": 1 if crowded else SPINS,
            "halves": layout.HALVES,
            "checksums": layout.CHECKSUMS,
            "slot_checksum_bytes": layout.SLOT_ROWS * CHECKSUM_BYTES,
        }.items():
            self._call[kernels.SCALARS.index(name)] = value
        there, here, peers = memory.buffer_ptrs.numpy(), memory.local.data_ptr(), np.arange(world)
        for name, offset, size in (
            ("header", layout.HEADERS, SIGNAL_LINE_BYTES),
            ("tail", layout.TAILS, SIGNAL_LINE_BYTES),
            ("head", layout.HEADS, SIGNAL_LINE_BYTES),
            ("parity", layout.HALVES, layout.SLOT_BYTES),
            ("ring", layout.RINGS, layout.SLOTS * layout.SLOT_BYTES),
        ):
            self._peers[kernels.PEERS.index(f"{name}_there")] = there + offset + rank * size
            self._peers[kernels.PEERS.index(f"{name}_here")] = here + offset + peers * size
        self._peers[kernels.PEERS.index("answer")] = kernels.AGREES  # before the first call there is none to end
        self._kernel(self._address, 0)  # compiles, or loads what was compiled: nobody waits for it later
        if threads > 1:
            kernels.move_in_team(1, self._call, self._peers, 0)

    def use_regions(self, regions: list[tuple[int, ...]], memory: list[object]) -> None:
        """From now on exact rows are stored straight into outputs that lie in one of these, and in peers' outputs.

        Not while a call is under way. After an exception from outside, at whatever line, the kernel has these, or none.

        Args:
            regions: the number of each, the same on all ranks and never 0; its bytes; where each rank's begins here.
            memory: what keeps them mapped.
        """
        # One row at least: the kernel goes by its address, and must go on telling peers once there are none.
        table = np.zeros((max(1, len(regions)), self._kernels.REGION_PTRS + self.world), np.int64)
        table[: len(regions)] = np.array(regions).reshape(len(regions), table.shape[1])
        at, count = (self._kernels.SCALARS.index(name) for name in ("regions", "num_regions"))
        self._call[count] = 0  # first: no address may be there with another table's length, or of one that is gone
        self._regions, self._region_memory = table, memory
        self._call[at] = table.ctypes.data
        self._call[count] = len(regions)

    @property
    def straight_segments(self) -> int:
        """Segments that peers have stored straight into outputs of this rank."""
        return int(self._peers[self._kernels.PEERS.index("straight")].sum())

    def _new_row_format(self, tail: torch.Size, dtype: torch.dtype, wire: WireFormat) -> RowFormat:
        row_elements = math.prod(tail)
        if len(self._row_formats) >= _MOST_KEPT:
            self._row_formats.clear()
        signature = signature_of(tail, dtype, wire)
        step = row_elements * dtype.itemsize
        piece_bytes = self.layout.SLOT_BYTES
        turn = CHECKED_BYTES if self.layout.CHECKSUMS else piece_bytes
        if not wire.quantized or not row_elements:
            return RowFormat(step, 0, (1, 1, step, piece_bytes, turn, 0, 0, 1, 0, 1, 0, 0, *signature))
        from thinwire.triton_kernels.cpu.codec import dtype_code, record_layout

        counts_per_row = 1 if tail else FLAT_ROW
        layout = record_layout(wire, row_elements * counts_per_row, dtype)
        record_bytes = layout[-1]
        if record_bytes > piece_bytes:
            return RowFormat(
                record_bytes, record_bytes, (1, 1, record_bytes, piece_bytes, turn, 0, *layout, *signature)
            )
        per_piece, code = self.layout.rows_per_slot(record_bytes), dtype_code(dtype)
        turn = 1 if self.layout.CHECKSUMS else per_piece
        return RowFormat(step, 0, (0, counts_per_row, record_bytes, per_piece, turn, code, *layout, *signature))

    def _begin(self, transfer: Transfer, wait: bool) -> None:
        row_format, sends, recv_buffer = transfer.row_format, transfer.sends, transfer.recv_buffer
        assert transfer.x is not None
        address, expected = 0, self._expects_anything
        self._brings = None
        if recv_buffer is not None:
            address = recv_buffer.memory.data_ptr()
            expected = (*recv_buffer.segments.counts, *recv_buffer.segments.displs)
        self._brought.pack_into(
            self._words, self._brought_at,
            0, transfer.x.data_ptr(), transfer.step, address, row_format.step, *row_format.words,
            *sends.counts, *sends.displs, *expected,
        )  # fmt: skip
        self._under_way = transfer
        if not wait:
            self._kernel(self._address, self._post)
        elif recv_buffer is None:
            self.complete(transfer, self._post)
        elif self._launch(self._plainly, _num_bytes(transfer.x, recv_buffer.memory)) != RUNNING:
            self.complete(transfer, self._kernels.RESUME)  # it says again what it said, or goes on after a pause
        else:
            self._under_way = transfer.x = None  # the usual case, without the detour
            transfer.result = recv_buffer.output()

    def send_plainly(
        self,
        x: Any,
        send_counts: Any,
        recv_counts: Any,
        out: Any,
        wire: str | WireFormat,
        comm: Communicator,
    ) -> torch.Tensor | None:
        """One whole call, whose arguments have not been checked; raises as `Transfer.wait`.

        It takes contiguous tensors, lists of ints, or equal splits, and rows of a form that was sent before.

        Args:
            wire: a format or its name, of any text.

        Returns:
            The output, filled: `out`, or a new tensor if that is None. None: not done, and not begun either.
        """
        if self._under_way is not None or self.failure is not None or self.closed:
            return None
        if send_counts is not None and (
            type(send_counts) is not list
            or type(recv_counts) is not list
            or not _INTS.issuperset(map(type, send_counts + recv_counts))
        ):
            return None
        kind = self._brings
        if (
            kind is None
            or (out is None) is not kind.makes_output
            or not (kind.alike(x) if out is None else kind.alike(x, out))
            or wire != kind.named
            or send_counts != kind.given_send_counts
            or recv_counts != kind.given_recv_counts
        ):
            kind = self._kind_of(x, send_counts, recv_counts, out, wire)
            if kind is None:
                return None
            self._brings = None
            self._words[self._brought_words] = kind.words
            self._brings = kind
        x_address = x.data_ptr()
        if out is None:
            try:
                if kind.out_shape == kind.shape and x.nbytes < LEAST_BYTES:  # at half the cost
                    out = torch.empty_like(x, memory_format=_CONTIGUOUS)
                else:
                    out = comm.result_memory.new_empty(x, kind.out_shape)
            except RuntimeError:  # no memory
                return None
            out_address = out.data_ptr()
        else:
            out_address = out.data_ptr()
            if x_address < out_address + kind.out_bytes and out_address < x_address + kind.x_bytes:
                return None
            overwrite("out", out)
        words, recorder = self._words, comm.recorder
        words[self._x_word], words[self._out_word] = x_address, out_address
        outer = recorder.current
        try:
            recorder.enter(kind.recorded)
            # Whatever interrupts this, the next call finds what there is to end. One that ended as it should serves the
            # next call too; it is nobody else's.
            transfer, self._spare = self._spare, None
            if transfer is None:
                transfer = Transfer(self, None, None, 0, _PLACED_BY_THE_KERNEL, None)
            transfer.x, transfer.out = x, out
            self._under_way = transfer
            if recorder.track is not None:
                recorder.sent(traffic_of(x, kind.send_counts, self.rank, kind.wire))
            if kind.num_bytes < self._shared_bytes:  # without another call, which small ones notice
                status = self._kernel(self._address, self._plainly)
            else:
                status = self._launch(self._plainly, kind.num_bytes)
            if status == RUNNING:
                self._under_way = transfer.x = transfer.out = None  # it shall hold no tensors
                self._spare = transfer
            else:
                self.complete(transfer, self._kernels.RESUME)  # it says again what it said, or goes on after a pause
                transfer.wait()
        except BaseException as error:
            recorder.leave(outer, error)
            raise
        recorder.leave(outer)
        return out

    def _kind_of(
        self,
        x: Any,
        send_counts: list[int] | None,
        recv_counts: list[int] | None,
        out: Any,
        named: str | WireFormat,
    ) -> _Kind | None:
        """What is kept of a plain call; None where it is none, or wrong."""
        given = [x] if out is None else [x, out]
        for tensor in given:
            if type(tensor) is not torch.Tensor or not tensor.is_cpu or tensor.layout is not torch.strided:
                return None
            if tensor.is_neg() or tensor.is_nested or not tensor.is_contiguous():
                return None
        shape, dtype, given_shape = x.shape, x.dtype, given[-1].shape
        if x.requires_grad or given[-1].requires_grad or given[-1].dtype is not dtype:
            return None
        key = shape, dtype, named, out is None, given_shape, send_counts is None
        kind = self._kinds.get(key)
        if kind is not None and send_counts == kind.given_send_counts and recv_counts == kind.given_recv_counts:
            if not kind.alike(*given):  # of another mode of autograd's, for instance
                kind = self._kinds[key] = kind._replace(alike=_guard(given))
            return kind
        wire, world, tail = resolve_wire(named), self.layout.WORLD, shape[1:]
        row_format = self._row_formats.get((tail, dtype, wire))
        if row_format is None or row_format.record_bytes or dtype.is_complex or not shape:
            return None
        if send_counts is None or recv_counts is None:
            if shape[0] % world:
                return None
            sends = receives = [shape[0] // world] * world
        else:
            sends, receives = send_counts[:], recv_counts[:]  # the caller may change its lists
        if not len(sends) == len(receives) == world or min(sends) < 0 or min(receives) < 0:
            return None
        rows = sum(receives)
        if rows > _MOST_ROWS:
            return None
        out_shape = torch.Size((rows, *tail)) if out is None else given_shape
        if len(out_shape) != len(shape) or out_shape[1:] != tail:
            return None
        if sum(sends) > shape[0] or rows > out_shape[0] or sends[self.rank] != receives[self.rank]:
            return None
        words = self._brought.pack(
            0, 0, row_format.step, 0, row_format.step, *row_format.words,
            *sends, *dense_segments(sends).displs, *receives, *dense_segments(receives).displs,
        )  # fmt: skip
        if len(self._kinds) >= _MOST_KEPT:
            self._kinds.clear()
        kind = self._kinds[key] = _Kind(
            _guard(given),
            named,
            out is None,
            None if send_counts is None else sends,
            None if recv_counts is None else receives,
            sends,
            wire,
            shape,
            out_shape,
            shape[0] * row_format.step,
            out_shape[0] * row_format.step,
            max(x.nbytes, out_shape.numel() * x.itemsize),
            memoryview(words).cast("q"),
            ("all_to_all_v", shape, dtype, wire, "direct", ("send_counts", sends, "recv_counts", receives)),
        )
        return kind

    def _drain(self, transfer: Transfer, todo: int) -> torch.Tensor:
        recv_buffer = transfer.recv_buffer
        if transfer.out is not None:
            recv_buffer = RecvBuffer(_PLACED_BY_THE_KERNEL, transfer.out)
        if recv_buffer is None and transfer.error is None:
            assert transfer.place is not None
            self._move(todo | self._kernels.HEADERS)
            if transfer is not self._under_way:
                return transfer.wait()
            try:
                recv_buffer = transfer.place(self._peers[_RECV_COUNT].tolist())
            except Exception as error:
                transfer.error = error  # for whoever goes on with what follows
            else:
                self._call[self._kernels.SCALARS.index("out")] = recv_buffer.memory.data_ptr()
                self._peers[_RECV_DISPL] = recv_buffer.segments.displs
                todo, transfer.recv_buffer = 0, recv_buffer
        if recv_buffer is None:
            assert transfer.error is not None
            self._drop()
            raise transfer.error
        assert transfer.x is not None
        self._move(todo | self._kernels.DRAIN, _num_bytes(transfer.x, recv_buffer.memory))
        return recv_buffer.output()

    def _move(self, todo: int, num_bytes: int = 0) -> None:
        """Runs the kernel and raises what it found. If peers sent what was not expected, the call is then over."""
        status = self._run(todo, num_bytes)
        if status == self._kernels.LEFT:
            raise ThinwireError(CLOSED)
        if status in (TIMED_OUT, CORRUPTED):
            self.raise_findings()
        if status == MISMATCHED:
            signature = self._kernels.SCALARS.index("signature0")
            wrong = self._peers[self._kernels.PEERS.index("answer")] == self._kernels.DIFFERS
            counts, expected = self._peers[_RECV_COUNT].tolist(), self._call[signature : signature + 4].tolist()
            error = CountsError(self.differences(wrong, counts, expected))
            self._drop()
            raise error

    def _drop(self) -> None:
        """Takes in what is still to come in this call, and keeps none of it."""
        self._brings = None
        self._call[self._kernels.SCALARS.index("discard")] = 1
        if self._run(self._kernels.DRAIN) == TIMED_OUT:
            self.failure = self.timed_out()

    def _run(self, todo: int, num_bytes: int = 0) -> int:
        transfer = self._under_way
        status = self._launch(todo, num_bytes)
        while status == self._kernels.PAUSED:
            if transfer is not self._under_way:
                return RUNNING  # a signal handler's call has ended this one
            status = self._launch((todo & ~self._post) | self._kernels.RESUME, num_bytes)
        return status

    def _launch(self, todo: int, num_bytes: int) -> int:
        """What the kernel returns. It runs in as many threads as so many bytes of rows are worth."""
        if num_bytes >= self._shared_bytes:
            work = num_bytes // _COPIED_FOR_ONE if self._words[self._exact_word] else num_bytes
            threads = self._threads_for(work, 1, self.threads)
            if threads > 1:
                self._words[self._kernels.STARTING] = todo & self._post
                return self._kernels.move_in_team(threads, self._call, self._peers, todo)
        status: int = self._kernel(self._address, todo)
        return status

    def open_epoch(self) -> int:
        """The number of the call under way."""
        return int(self._call[self._kernels.SCALARS.index("epoch")])

    def leave_to_parent(self) -> None:
        super().leave_to_parent()
        self._call[self._kernels.STATUS] = self._kernels.LEFT

    def close(self) -> None:
        """See `DirectTransport.close`. A call under way ends at the peers, too, unless they need nothing more for it.

        What a peer was storing into its output at that moment may still arrive: at most a piece. The call may be in the
        kernel just now, in another thread, or below a signal handler: it ends with ThinwireError.
        """
        if not self.closed:
            self._kernel(self._address, self._kernels.LEAVE)  # a call that is about to reach the kernel finds it, too
            transfer = self._under_way
            if transfer is not None:  # for the kernel, until it has seen that it is over
                transfer.memory = self.memory.held(), self._regions, self._region_memory
            self._region_memory = []
        super().close()


def _num_bytes(x: torch.Tensor, out: torch.Tensor) -> int:
    """Of the larger one."""
    return max(x.nbytes, out.nbytes)
