"""All-to-all-v and the collectives of CPU ranks of one host, which pull: memory, prepared legs, and calls under way.

A leg (`thinwire.triton_kernels.cpu.pull`) takes a part of a tensor to each rank, piece by piece. An all-gather is a
leg on which all get the same, a reduce-scatter one that is summed, an all-reduce the second with the first behind it. A
rank packs a piece while its peers read the one before. Every rank takes the pieces of a leg in the same order, and
packs none before it has taken all but the last few: so there is always one that can go on.

*Ranks that disagree stay in step.* A leg's first lines say what each rank is doing, and how many lines come whatever
the others do. In an all-to-all-v who expected another count, dtype, row or wire drops what that peer sends in this call
and raises `CountsError`. In a collective all ranks find the mismatch in the first lines, and raise `ConfigMismatch`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from thinwire.comm.call import Recorder
from thinwire.comm.communicator import Communicator
from thinwire.comm.exchange import Exchange
from thinwire.comm.host_collectives import Setting
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.errors import CapacityError, ConfigMismatch, CountsError, ThinwireError
from thinwire.fused.call import CollectiveCall, RowCall, flat, in_memory
from thinwire.fused.channel import FLAT_ROW, Place, RecvBuffer, Transfer, outgoing_rows
from thinwire.fused.counts import Segments, dense_segments
from thinwire.fused.direct_transport import CLOSED
from thinwire.fused.partition import describe_mismatch, describe_signature, longest_record
from thinwire.fused.partition import signature_of as signature_of_parts
from thinwire.fused.pulled import PulledTransport
from thinwire.fused.row_signature import describe_difference, signature_of
from thinwire.fused.transport import Staged, open_direct
from thinwire.triton_kernels.cpu import pull
from thinwire.triton_kernels.cpu.codec import dtype_code, record_layout
from thinwire.triton_kernels.cpu.lines import board_bytes
from thinwire.triton_kernels.cpu.sums import scratch_bytes
from thinwire.triton_kernels.leg_layout import ALL_GATHER, MOST_ROWS, REDUCE_SCATTER
from thinwire.triton_kernels.signal import MAX_WORLD
from thinwire.wire import WireFormat

NAME = "all_to_all_v and collectives"  # for people
_ALIGNMENT = 128
#: Bytes of a piece for each peer, and of all slots of a rank's memory.
_PIECE_BYTES, _MOST_BYTES = 512 << 10, 64 << 20
_ROWS, _COLLECTIVE = 0, 1  # kinds of calls
_BEHIND = 1 << 62  # in a signature: of the second leg of a call
_AHEAD = 2  # pieces that are packed before the first is taken
_MOST_JOBS = 1024  # that are remembered
_MOST_LINES = 1 << 40  # that a peer is believed to promise


def open_legs(comm: Communicator, ranks: Sequence[int] | None = None, piece: int | None = None) -> PulledLegs | Staged:
    """What all-to-all-v and the collectives of CPU ranks pull through, or what knows why there is none. Collective.

    Args:
        ranks: see `open_direct`.
        piece: bytes of a piece, instead of `piece_bytes`; looked at in the first call only.

    Raises:
        CapacityError: another number of bytes.
        ConfigMismatch, PeerTimeout: see `open_direct`.
    """

    def new() -> PulledLegs | Staged:
        here = range(comm.size) if ranks is None else ranks
        size = piece_bytes(len(here)) if piece is None else piece
        if size < _ALIGNMENT or size % _ALIGNMENT:
            raise CapacityError(f"pieces of {size} bytes: expected a positive multiple of {_ALIGNMENT}")
        if len(here) > MAX_WORLD:
            return Staged(NAME, f"a group of {len(here)} ranks; direct legs take 1 to {MAX_WORLD}")

        def make(memory: SymmetricMemory, crowded: bool) -> PulledLegs:
            of_comm = comm.timeout, comm.voters, comm.recorder
            legs = PulledLegs(memory.among(here), here.index(comm.rank), size, crowded, *of_comm)
            legs.members, legs.size = here, comm.size
            return legs

        # The kernels of another rank may be Triton's, interpreted.
        settings: dict[str, Setting] = {"kernels": "numba", "piece_bytes": size}
        return open_direct(comm, NAME, memory_bytes(len(here), size), settings, make, Staged, ranks=ranks)

    return comm.attached(NAME if ranks is None else f"{NAME} in this host", new)


def piece_bytes(world: int) -> int:
    """Bytes of a peer's share of a slot, a multiple of 128.

    >>> piece_bytes(2), piece_bytes(72)
    (524288, 232960)
    """
    return min(_PIECE_BYTES, _MOST_BYTES // (pull.SLOTS * world) // _ALIGNMENT * _ALIGNMENT)


def memory_bytes(world: int, piece: int) -> int:
    """Bytes of each rank's shared memory, for pieces of so many bytes."""
    return pull.aligned_slots(board_bytes(world, 1)) + pull.SLOTS * world * piece


class Leg:
    """A leg but for its tensors.

    Args:
        x: dtype and element size of what travels.
        wire, each, hidden: the form of a record: of `each` of what is counted, `hidden` elements.
        step, size: bytes between two units (rows, or elements of a 1-D tensor), in x and in the output.
        sends, receives: parts, in what is counted; None: not known yet, see `expect`.
        kind, signature, promise: what its lines say.
        once: whether all ranks get the same part.
        sums: the dtype of what is summed; None: rows are taken as they are.
        then: the leg behind this one.
    """

    def __init__(
        self,
        legs: PulledLegs,
        dtype: torch.dtype,
        wire: WireFormat,
        each: int,
        hidden: int,
        step: int,
        size: int,
        sends: Segments,
        receives: Segments | None,
        kind: int,
        signature: Sequence[int],
        *,
        exact: bool = False,
        room: int = 0,
        promise: int = 0,
        once: bool = False,
        sums: torch.dtype | None = None,
        then: Leg | None = None,
    ) -> None:
        world, layout = legs.world, (0,) * 6 if exact else record_layout(wire, hidden, dtype)
        self.sums, self.then, self.kind, self.signature = sums is not None, then, kind, tuple(signature)
        self.units = legs.piece if exact else legs.piece // max(room, layout[-1])
        self.exact, self.each, self.size = exact, each, size
        self._scratch = torch.empty(scratch_bytes(hidden, world) if self.sums else 1, dtype=torch.uint8, device="cpu")
        codes = (0, 0) if exact else (dtype_code(dtype), dtype_code(sums or dtype))
        behind = 0 if then is None else then.address, self._scratch.data_ptr()
        self._numbers: Any = np.array(
            [
                0, 0, step, size, int(exact), each, self.units, *codes, *layout, promise | kind << pull.KIND_BITS,
                *signature, int(once), *behind, *sends.counts, *sends.displs, *[0] * (3 * world),
            ],
            np.int64,
        )  # fmt: skip
        self.address: int = self._numbers.ctypes.data
        self.words = memoryview(self._numbers.data)  # of which a word is written sooner
        self.per_peer = self._numbers[len(pull.LEG) :].reshape(-1, world)
        self.pieces_out = max(map(self.pieces, sends.counts))
        self.wanted = np.zeros((0, world), np.int64)
        if receives is not None:
            self.expect(receives)

    def pieces(self, count: int) -> int:
        """Pieces of a part."""
        return max(1, -(-(count * self.size if self.exact else -(-count // self.each)) // self.units))

    def expect(self, receives: Segments) -> None:
        """Says what comes, where it was not known before."""
        self.per_peer[pull.RECV_COUNT], self.per_peer[pull.RECV_PLACE] = receives.counts, receives.displs
        self.await_pieces([self.pieces(count) for count in receives.counts])

    def await_pieces(self, pieces: Sequence[int]) -> None:
        """So many pieces come from each rank."""
        steps = np.arange(max(*pieces, self.pieces_out))[:, None]
        self.wanted = np.where(steps < np.array(pieces)[None], 0, -1).astype(np.int64)
        self.rows = [self.wanted[step].ctypes.data for step in range(len(self.wanted))]


class PulledLegs(PulledTransport):
    """One rank's memory for legs, and the call under way; see `PulledTransport`. A Transport of collectives.

    Attributes:
        rows: what all-to-all-v takes as its transport.
    """

    phases = ("pieces", "sums")
    under_way: Transfer | None = None

    def __init__(
        self,
        memory: SymmetricMemory,
        rank: int,
        piece: int,
        crowded: bool,
        timeout: float,
        voters: Exchange | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(NAME, memory, rank, timeout, voters, 1, crowded, recorder)
        self.piece = piece
        slots = pull.aligned_slots(self.board.num_bytes)
        self._pool_words = pull.pool_words(self.board.address, self.world, slots, self.piece, memory.num_bytes)
        self._pool: int = self._pool_words.ctypes.data
        self._needed = self._pool + 8 * len(pull.POOL)
        self._everyone = self.everyone.ctypes.data
        self._calls = 0
        self._jobs: dict[tuple[object, ...], Leg] = {}
        self.rows = PulledRows(self)

    def describe(self) -> str:
        """One line for `Communicator.explain`."""
        failed = "" if self.failure is None else ", failed"
        size = self.memory.num_bytes / 2**20
        return f"{NAME}: direct, {size:.1f} MiB of shared memory, pieces of {self.piece} bytes{failed}"

    def settle(self) -> None:
        """Ends the call under way, if there is one; what it comes to is for its own `wait` to say."""
        if self.under_way is not None:
            self.complete(self.under_way)

    def leave_to_parent(self) -> None:
        """See `DirectTransport.leave_to_parent`."""
        self._cut_off()
        super().leave_to_parent()

    def close(self) -> None:
        """See `PulledTransport.close`."""
        self._cut_off()
        super().close()

    def _cut_off(self) -> None:
        transfer = self.under_way
        if transfer is not None:
            transfer.error = transfer.error or ThinwireError(CLOSED)  # first: another thread may be waiting for it
        self.under_way = None

    # -----------------------------------------------------------------------------------------------------------------
    # Collectives

    def job(
        self,
        op: int,
        parts: Segments,
        row: int,
        wire: WireFormat,
        gather_wire: WireFormat,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
        signature: tuple[int, int, int, int] | None = None,
    ) -> Leg:
        """The legs of a collective, whose tensors are flat.

        Args:
            op: ALL_REDUCE, REDUCE_SCATTER or ALL_GATHER.
            parts: elements of each rank's part of the whole tensor.
            row: elements of a record.
            wire, gather_wire: formats of the scattered rows and of the gathered ones.
            out_dtype: of a REDUCE_SCATTER's sums, if not dtype.
            signature: of the call that this is a part of, if it is one; that is what ranks then compare.

        Raises:
            CapacityError: a row's record is longer than a piece.
        """
        key = (op, *parts.counts, *parts.displs, row, wire, gather_wire, dtype, out_dtype, signature)
        job = self._jobs.get(key)
        if job is None:
            own, size = parts.counts[self.rank], dtype.itemsize
            same = Segments([own] * self.world, [0] * self.world)
            told = signature or signature_of_parts(op, parts, row, dtype, wire, gather_wire)
            room = longest_record(row, dtype, (wire, gather_wire), self.piece)
            form = row, row, size, size  # elements of a record, and bytes of each
            kinds: dict[str, Any] = {"kind": _COLLECTIVE, "room": room}
            if op != REDUCE_SCATTER:
                # What is gathered behind a scatter says so: else a rank that is a leg ahead would look alike.
                own_told = told if op == ALL_GATHER else (told[0] ^ _BEHIND, *told[1:])
                most = 2 if op == ALL_GATHER and -(-own // row) > self.piece // room else 1
                job = Leg(
                    self, dtype, gather_wire, *form, same, parts, signature=own_told, once=True, promise=most, **kinds
                )
            if op != ALL_GATHER:
                job = Leg(
                    self, dtype, wire, *form, parts, same, signature=told, promise=1, sums=out_dtype or dtype,
                    then=job, **kinds,
                )  # fmt: skip
            assert job is not None
            if len(self._jobs) >= _MOST_JOBS:
                self._jobs.clear()
            self._jobs[key] = job
        return job

    def begin(self, comm: Communicator, call: CollectiveCall, x: torch.Tensor, out: torch.Tensor) -> None:
        """The whole call of a collective, of any dense x; see `StagedCollectives.begin`."""
        if call.job is None:
            call.job = self.job(call.op, call.parts, call.row, call.wires[0], call.wires[-1], call.dtype)
        self.run(call.job, x if in_memory(x) else flat(x.detach()), out)

    def run(self, leg: Leg, x: torch.Tensor, out: torch.Tensor) -> None:
        """A whole call of a collective, of tensors without gaps; out may be x, or lie where its part of x does.

        Raises:
            ConfigMismatch: ranks called something else. All of them raise it, and may go on.
            PeerTimeout: see `await_peers`.
        """
        if self.under_way is not None:
            self.settle()
        self.require_usable()
        self._calls += 1
        board = self.board  # which keeps the memory mapped
        then, rows, pool, address = leg.then, leg.rows, self._pool, leg.address
        leg.words[0], leg.words[1] = x.data_ptr(), out.data_ptr()
        if then is not None:
            then.words[1] = out.data_ptr()
        done = pull.NOTHING
        if len(rows) == 1:
            behind = rows[0] if then is None else then.rows[0]
            done = pull.whole_kernel(pool, address, rows[0], behind, leg.sums, board.looks)
            if done == pull.ALL:
                return
        ahead = int(len(rows) > 1 and not leg.sums)  # a piece is packed while peers read the one before
        for number in range(-ahead, len(rows)):
            if number + ahead < len(rows) and done < pull.PACKED:
                self._pack(leg, number + ahead)
            if number < 0:
                continue
            if done < pull.TAKEN:
                self._take(leg, number)
            if then is not None:
                self.await_peers(pull.CHANNEL, then.rows[number], self._calls, 1)
                if pull.take_kernel(pool, then.address, number, then.rows[number]) == pull.DIFFERS:
                    self._fail_of_nonsense()

    def _take(self, leg: Leg, number: int) -> None:
        wanted = leg.rows[number]
        self.await_peers(pull.CHANNEL, wanted, self._calls, 0)
        kernel = pull.sum_kernel if leg.sums else pull.take_kernel
        while (done := kernel(self._pool, leg.address, number, wanted)) == pull.BUSY:
            self.await_peers(pull.CHANNEL, self._needed, self._calls, 0)
        if done == pull.DIFFERS:
            self._raise_mismatch(leg, number)

    def _pack(self, leg: Leg, number: int) -> None:
        while pull.send_kernel(self._pool, leg.address, number) == pull.BUSY:
            self.await_peers(pull.CHANNEL, self._needed, self._calls, 0)

    def _raise_mismatch(self, leg: Leg, number: int) -> NoReturn:
        """All ranks are here, before anyone packed more than it has promised."""
        heads = self._heads()
        wrong = [peer for peer, head in enumerate(heads) if not head.is_like(leg.kind, leg.signature)]
        if number or not wrong:
            self._fail_of_nonsense()
        self._drop([head.lines for head in heads])
        raise ConfigMismatch(describe_mismatch(self.members, self.rank, [head.describe() for head in heads], wrong))

    def _drop(self, lines: Sequence[int]) -> None:
        """Takes so many lines of each rank, as they come, and reads nothing."""
        for number in range(max(lines)):
            wanted = np.array([0 if number < count else -1 for count in lines], np.int64)
            self.await_peers(pull.CHANNEL, wanted.ctypes.data, self._calls, 0)
            pull.drop_kernel(self._pool, wanted.ctypes.data)

    def _fail_of_nonsense(self) -> NoReturn:
        self.board.leave()  # or peers would wait for this rank
        self.fail(ThinwireError(f"{NAME}: a peer's line is none that its call can have: its memory was written into"))

    def _heads(self) -> list[_Head]:
        """Reads what each rank's next line says."""
        return [_Head(*numbers) for numbers in self.board.next_lines(pull.CHANNEL)]

    # -----------------------------------------------------------------------------------------------------------------
    # Rows

    def send(self, transfer: Transfer, wait: bool) -> Transfer:
        """Begins an all-to-all-v, and with `wait` ends it; what is under way is ended first."""
        if self.under_way is not None:
            self.settle()
        self.require_usable()
        self._calls += 1
        leg, buffer = transfer.route, transfer.recv_buffer
        assert transfer.x is not None
        board = self.board  # which keeps the memory mapped
        leg.words[0] = transfer.x.data_ptr()
        if buffer is not None:
            leg.words[1] = buffer.memory.data_ptr()
        if wait and buffer is not None and len(leg.rows) == 1:
            done = pull.whole_kernel(self._pool, leg.address, leg.rows[0], leg.rows[0], False, board.looks)
            if done == pull.ALL:
                transfer.result, transfer.x = buffer.output(), None
                return transfer
            transfer.packed = int(done == pull.PACKED)
        self.under_way = transfer
        while transfer.packed < min(_AHEAD, leg.pieces_out):
            if pull.send_kernel(self._pool, leg.address, transfer.packed) == pull.BUSY:
                break
            transfer.packed += 1
        del board
        if wait:
            self.complete(transfer)
        return transfer

    def complete(self, transfer: Transfer) -> None:
        """Ends a call if that has not happened; what it comes to is for its own `wait` to say."""
        if transfer is not self.under_way:
            return
        try:
            board = self.board  # which keeps the memory mapped
            self._move(transfer)
            del board
        except ThinwireError as error:
            transfer.error = transfer.error or error
        if transfer.error is None:
            assert transfer.recv_buffer is not None
            try:
                transfer.result = transfer.recv_buffer.output()
            except Exception as error:  # for its own `wait`: this may be a later call's
                transfer.error = error
        if transfer is self.under_way:
            self.under_way = None
        transfer.x = transfer.place = None

    def _move(self, transfer: Transfer) -> None:
        leg: Leg = transfer.route
        if transfer.recv_buffer is None:
            self._learn_counts(transfer)
        pool, address, calls = self._pool, leg.address, self._calls
        surplus: list[int] = []
        if transfer.error is not None:  # there is nowhere to put the rows
            surplus = self._drop_peers(leg, range(self.world))
        while transfer.taken < len(leg.rows):
            while transfer.packed < min(transfer.taken + _AHEAD, leg.pieces_out):
                self._pack(leg, transfer.packed)
                transfer.packed += 1
            wanted = leg.rows[transfer.taken]
            self.await_peers(pull.CHANNEL, wanted, calls, 0)
            if pull.take_kernel(pool, address, transfer.taken, wanted) != pull.DIFFERS:
                transfer.taken += 1
                continue
            wrong, difference = self._differences(leg)
            if transfer.taken or not wrong:
                self._fail_of_nonsense()
            transfer.error = CountsError(difference)
            surplus = self._drop_peers(leg, wrong)
        if surplus:
            self._drop(surplus)
            leg.per_peer[pull.DROPPED] = 0
            leg.expect(Segments(*(leg.per_peer[row].tolist() for row in (pull.RECV_COUNT, pull.RECV_PLACE))))

    def _learn_counts(self, transfer: Transfer) -> None:
        """Waits for all first lines, which have the counts, and finds a place for the rows."""
        leg: Leg = transfer.route
        if not transfer.packed:
            self._pack(leg, 0)
            transfer.packed = 1
        self.await_peers(pull.CHANNEL, self._everyone, self._calls, 0)
        heads = self._heads()
        counts = [head.count if 0 <= head.count <= MOST_ROWS else 0 for head in heads]
        counts = [n if self._is_possible(leg, n, head) else 0 for n, head in zip(counts, heads, strict=True)]
        assert transfer.place is not None
        try:
            transfer.recv_buffer = transfer.place(counts)
        except Exception as error:
            transfer.error = error
            leg.expect(dense_segments(counts))
        else:
            leg.words[1] = transfer.recv_buffer.memory.data_ptr()
            leg.expect(transfer.recv_buffer.segments)

    @staticmethod
    def _is_possible(leg: Leg, count: int, head: _Head) -> bool:
        """Whether a peer that is in the same call sends so many rows in so many pieces."""
        return head.is_like(leg.kind, leg.signature) and head.lines == leg.pieces(count)

    def _differences(self, leg: Leg) -> tuple[list[int], str]:
        """The peers whose first lines are not what was expected, and how they differ."""
        expected, wrong, told = leg.per_peer[pull.RECV_COUNT].tolist(), [], []
        for peer, head in enumerate(self._heads()):
            alike = head.is_like(leg.kind, leg.signature)
            if alike and head.count == expected[peer]:
                continue
            wrong.append(peer)
            if head.kind != leg.kind:
                told.append(f"rank {peer} is in {head.describe()}, but rank {self.rank} in all_to_all_v")
                continue
            header = [head.lines - 1, head.count, *head.signature]
            told.append(describe_difference(self.rank, peer, header, expected[peer], [*leg.signature]))
        return wrong, "; ".join(told)

    def _drop_peers(self, leg: Leg, peers: Sequence[int]) -> list[int]:
        """From now on drops what comes from some ranks in this call, which is as much as their first lines say.

        Gives how many lines of each come after this leg's last step, see `_drop`.
        """
        heads, counts = self._heads(), leg.per_peer[pull.RECV_COUNT].tolist()
        leg.per_peer[pull.DROPPED, list(peers)] = 1
        pieces = [0 if peer in peers else leg.pieces(count) for peer, count in enumerate(counts)]
        steps = max(*pieces, leg.pieces_out)  # not as many as some peer says that it takes: there may be no end of them
        lines = [heads[peer].lines if peer in peers else own for peer, own in enumerate(pieces)]
        leg.await_pieces([min(count, steps) for count in lines])
        return [count - min(count, steps) for count in lines]


class _Head:
    """What a leg's first line says of its sender."""

    def __init__(self, count: int, place: int, promise: int, *signature: int) -> None:
        self.count, self.signature = count, signature
        self.kind = promise >> pull.KIND_BITS
        lines = promise & ((1 << pull.KIND_BITS) - 1)
        self.lines = lines if 1 <= lines <= _MOST_LINES else 1

    def is_like(self, kind: int, signature: Sequence[int]) -> bool:
        return self.kind == kind and self.signature == tuple(signature)

    def describe(self) -> str:
        """For people."""
        return describe_signature(self.signature) if self.kind == _COLLECTIVE else "all_to_all_v"


class PulledRows:
    """All-to-all-v over legs that are the collectives', too; a Transport."""

    name, reason = "direct", ""
    lack: type[ThinwireError] | None = None

    def __init__(self, legs: PulledLegs) -> None:
        self._legs = weakref.proxy(legs)

    def describe(self) -> str:
        """See `PulledLegs.describe`."""
        return str(self._legs.describe())

    def begin(
        self,
        comm: Communicator,
        call: RowCall,
        x: torch.Tensor,
        recv_buffer: RecvBuffer | None,
        place: Place | None,
        wait: bool,
    ) -> Callable[[], torch.Tensor]:
        """Begins a call that is then waited for: into `recv_buffer`, or the one that `place` gives for counts."""
        legs, leg = self._legs, call.route
        if leg is None or not in_memory(x):
            plain, wire, dtype, width = in_memory(x), call.wire, x.dtype, math.prod(call.tail)
            exact = not wire.quantized or not width
            each = FLAT_ROW if x.dim() == 1 and not exact else 1
            record_bytes = 0 if exact else wire.row_bytes(each * width, dtype)
            wide = record_bytes if record_bytes > legs.piece else 0
            size = wide or width * x.itemsize
            x, step, sends, recv_buffer, place = outgoing_rows(call, x, size, wide, legs.piece, recv_buffer, place)
            receives = None if recv_buffer is None else recv_buffer.segments
            signature, once = signature_of(call.tail, dtype, wire), len({*zip(*sends, strict=True)}) == 1
            leg = Leg(
                legs, dtype, wire, each, each * width, step, size, sends, receives, _ROWS, signature,
                exact=exact or wide > 0, once=once,
            )  # fmt: skip
            # Not of a call whose counts a check has told: the next one's may be others.
            if plain and not wide and (recv_buffer is None or receives is call.receives):
                call.route = leg
        return legs.send(Transfer(legs, leg, x, recv_buffer, place), wait).wait
