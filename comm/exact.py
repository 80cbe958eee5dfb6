"""The collectives that move or reduce a tensor exactly, by torch.distributed's conventions.

Arguments are those of the function of that name in `torch.distributed`, with ranks of *this group*, and results are
written in place. Sizes, dtypes and the operation are the same on all ranks, as each function says; Gloo's ranks and
threads that disagree get `PeerTimeout`. Tensors live on the communicator's device, have any strides, and no history in
autograd. Everything that can be seen on this rank alone is checked before anything is sent.

Every call returns a `thinwire.comm.work.Work`. With `async_op=True` it may be pending; do not touch the tensors before
its `wait()`. `all_reduce` and `reduce` of more than 64 KiB take two steps. The second step is taken in `wait()`, or in
this communicator's next call. There, all ranks must wait in the same order for works of different communicators, and
for anything else that needs their peers.

Everything consists of sends and receives, which match by length, order and label: Gloo's own collectives end the
*process* of a rank whose tensor is shorter than its peers'.

Sums and products go in rank order, rank 0 first, so that every rank and every backend gets the same bits. float16 and
bfloat16 are accumulated in float32 and rounded once, at the end; all else is accumulated in its own dtype, so integers
wrap and bool adds as *or* and multiplies as *and*, as in torch. The smaller or larger of a NaN and a number is NaN.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.exchange import Buffers, Exchange, Posted
from thinwire.comm.host_collectives import HostCollectives, collective
from thinwire.comm.tensors import is_int, require_writable
from thinwire.comm.work import Step, Work
from thinwire.errors import ArgumentError, CountsError
from thinwire.octets import as_bytes

#: Up to this size a reduction takes one step, in which each rank sends its whole tensor to those that want the result.
ONE_STEP_BYTES = 2**16

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)
_REAL = (*_FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

#: By name: torch's operation, what it does to two ranks' encoded tensors, and the dtypes that have it.
_OPERATIONS: dict[str, tuple[object, Callable[..., Tensor], tuple[torch.dtype, ...]]] = {
    "sum": (dist.ReduceOp.SUM, torch.add, (*_REAL, *_COMPLEX)),
    "prod": (dist.ReduceOp.PRODUCT, torch.mul, _REAL),
    "min": (dist.ReduceOp.MIN, torch.minimum, _REAL),
    "max": (dist.ReduceOp.MAX, torch.maximum, _REAL),
    "avg": (dist.ReduceOp.AVG, torch.add, (*_FLOATS, *_COMPLEX)),
    # Of 0 and 1, the largest says whether any is set, and the smallest whether all are.
    "logical_or": (None, torch.maximum, (*_REAL, *_COMPLEX)),
    "logical_and": (None, torch.minimum, (*_REAL, *_COMPLEX)),
}


class Collectives(HostCollectives):
    """The exact collectives of a `Communicator` that take tensors. With `async_op` they return at once.

    All of them raise:
        CountsError: shapes, counts or lengths of lists do not match; nothing was sent.
        ArgumentError: another argument is not accepted, such as the rank, `op`, the dtype or the device. Nothing was
            sent.
        ThinwireError: the communicator is closed.
        PeerTimeout: a peer did not take part in time, made another call, or is gone; with `async_op`, from `wait()`. No
            further call is possible over this group.
    """

    @collective
    def all_reduce(self, tensor: Tensor, op: object = "sum", async_op: bool = False) -> Work[None]:
        """Exact, in place: replaces `tensor` by all ranks' reduction. `thinwire.all_reduce` quantises, into a new
        tensor.

        Args:
            tensor: one shape and dtype on all ranks.
            op: "sum", "prod", "min", "max", "avg" (not of integers), "logical_or" or "logical_and" (1 or 0, in the
                tensor's dtype), or torch's ReduceOp. Complex tensors have sums, averages and logical operations.
        """
        return self._reduce("all_reduce", self._check("tensor", tensor, written=True), None, op, async_op)

    @collective
    def reduce(self, tensor: Tensor, dst: int, op: object = "sum", async_op: bool = False) -> Work[None]:
        """As `all_reduce`, but only at rank `dst`; other ranks' tensors stay unchanged."""
        root = self._check_rank("dst", dst)
        return self._reduce("reduce", self._check("tensor", tensor, written=root == self.rank), root, op, async_op)

    @collective
    def reduce_scatter(
        self, output: Tensor, input_list: Sequence[Tensor], op: object = "sum", async_op: bool = False
    ) -> Work[None]:
        """Exact: fills `output` with all ranks' `input_list[rank]`, reduced. `thinwire.reduce_scatter` quantises.

        Args:
            output: same shape and dtype as `input_list[rank]`; may be that tensor.
            input_list: one tensor a rank; `input_list[r]` has the same shape on all ranks.
            op: as for `all_reduce`.
        """
        data = self._check("output", output, written=True)
        inputs = self._check_list("input_list", input_list, ("output", data), [self.rank])
        reduction = Reduction.of(op, data.dtype)
        steps = _reduce_scatter(self._exchange, reduction, data, inputs)
        return self._run("reduce_scatter", data, steps, async_op, ("op", reduction.name))

    @collective
    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False) -> Work[None]:
        """Fills `tensor` with rank `src`'s, which sends to each rank by itself. One shape and dtype; any dtype."""
        has_it = self._check_rank("src", src) == self.rank
        data = self._check("tensor", tensor, written=not has_it)
        sends = self._to_all(data) if has_it else self._only(None, data)
        receives = self._only(None if has_it else src, data)
        return self._move("broadcast", data, sends, receives, async_op, ("src", src))

    @collective
    def all_gather(self, tensor_list: Sequence[Tensor], tensor: Tensor, async_op: bool = False) -> Work[None]:
        """Exact: fills `tensor_list[r]` with rank r's `tensor`. `thinwire.all_gather` quantises.

        One shape and dtype on all ranks; any dtype.
        """
        data = self._check("tensor", tensor)
        outputs = self._check_list("tensor_list", tensor_list, ("tensor", data), range(self.size), written=True)
        return self._move("all_gather", data, self._to_all(data), outputs, async_op)

    @collective
    def gather(
        self, tensor: Tensor, gather_list: Sequence[Tensor] | None = None, dst: int = 0, async_op: bool = False
    ) -> Work[None]:
        """Fills rank `dst`'s `gather_list[r]` with rank r's `tensor`.

        One shape and dtype on all ranks; any dtype. `gather_list` is a list on rank `dst`, None on the others.
        """
        data = self._check("tensor", tensor)
        sends = self._only(self._check_rank("dst", dst), data)
        receives = self._check_list_of_root("gather_list", gather_list, data, "dst", dst, written=True)
        return self._move("gather", data, sends, receives, async_op, ("dst", dst))

    @collective
    def scatter(
        self, tensor: Tensor, scatter_list: Sequence[Tensor] | None = None, src: int = 0, async_op: bool = False
    ) -> Work[None]:
        """Fills `tensor` with rank `src`'s `scatter_list[rank]`.

        One shape and dtype on all ranks; any dtype. `scatter_list` is a list on rank `src`, None on the others.
        """
        data = self._check("tensor", tensor, written=True)
        receives = self._only(self._check_rank("src", src), data)
        sends = self._check_list_of_root("scatter_list", scatter_list, data, "src", src)
        return self._move("scatter", data, sends, receives, async_op, ("src", src))

    @collective
    def all_to_all(
        self, output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], async_op: bool = False
    ) -> Work[None]:
        """Exact: sends `input_tensor_list[r]` to rank r, and fills `output_tensor_list[r]` from there.

        Args:
            output_tensor_list, input_tensor_list: one tensor a rank, all of one dtype; any dtype. Shapes may differ: a
                rank sends another as many elements as the other expects.
        """
        outputs = self._check_list("output_tensor_list", output_tensor_list, written=True)
        inputs = self._check_list("input_tensor_list", input_tensor_list, ("output_tensor_list[0]", outputs[0]))
        sent, received = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))
        self._check_own("input_tensor_list", sent, "output_tensor_list", received, "elements")
        counts = ("send_counts", sent, "recv_counts", received)
        return self._move("all_to_all", inputs[self.rank], inputs, outputs, async_op, counts)

    @collective
    def all_to_all_v(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work[None]:
        """Exact: sends each rank its rows of `input`, fills `output` by rank. `thinwire.all_to_all_v` quantises.

        This is torch's `all_to_all_single`. `thinwire.all_to_all_v` also has displacements and wire formats, and can
        exchange the counts.

        Args:
            output, input: at least one dimension, equal after the first; the same dtype, any dtype.
            output_split_sizes: rows of dim 0 from each rank; None means equal shares.
            input_split_sizes: rows of dim 0 for each rank; None means equal shares.
        """
        data, target = self._check("input", input), self._check("output", output, written=True)
        if data.dtype != target.dtype:
            raise ArgumentError(f"output is {target.dtype}, but input is {data.dtype}; expected one dtype")
        sends = self._check_splits("input_split_sizes", input_split_sizes, "input", data)
        receives = self._check_splits("output_split_sizes", output_split_sizes, "output", target)
        if data.shape[1:] != target.shape[1:]:
            raise CountsError(
                f"output has rows of shape {tuple(target.shape[1:])}, but input has {tuple(data.shape[1:])}"
            )
        self._check_own("input_split_sizes", sends, "output_split_sizes", receives, "rows")
        counts = ("send_counts", sends, "recv_counts", receives)
        return self._move("all_to_all_v", data, data.split(sends), target.split(receives), async_op, counts)

    def _check(self, name: str, tensor: Tensor, written: bool = False) -> Tensor:
        """Checks a tensor; returns it cut off from autograd: what a collective writes has no history."""
        self.check_device(name, tensor)
        if tensor.is_conj() or tensor.is_neg():
            raise ArgumentError(f"{name} is a conjugate or negative view; pass resolve_conj() or resolve_neg() of it")
        if written:
            require_writable(name, tensor)
        return tensor.detach()

    def _check_list(
        self,
        name: str,
        tensors: object,
        like: tuple[str, Tensor] | None = None,
        alike: Sequence[int] = (),
        written: bool = False,
    ) -> list[Tensor]:
        """Checks one tensor a rank, of the dtype of `like` or of the first; those of ranks `alike` have its shape."""
        size = self.size
        if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
            raise ArgumentError(
                f"{name} is a {type(tensors).__name__}, expected a list of {size} tensors, one for each rank"
            )
        if len(tensors) != size:
            raise CountsError(f"{name} has {len(tensors)} tensors, expected one for each of the {size} ranks")
        checked = [self._check(f"{name}[{rank}]", tensor, written) for rank, tensor in enumerate(tensors)]
        like_name, model = (f"{name}[0]", checked[0]) if like is None else like
        for rank, tensor in enumerate(checked):
            if tensor.dtype != model.dtype:
                raise ArgumentError(
                    f"{name}[{rank}] is {tensor.dtype}, but {like_name} is {model.dtype}; expected one dtype"
                )
            if rank in alike and tensor.shape != model.shape:
                raise CountsError(
                    f"{name}[{rank}] has shape {tuple(tensor.shape)}, expected {like_name}'s, {tuple(model.shape)}"
                )
        return checked

    def _check_list_of_root(
        self, name: str, tensors: object, tensor: Tensor, root_name: str, root: int, written: bool = False
    ) -> Buffers:
        """Checks a list that rank `root` alone passes."""
        if (tensors is not None) != (self.rank == root):
            found = "None" if tensors is None else "a list"
            raise ArgumentError(
                f"{name} is {found} on rank {self.rank}, and {root_name} is {root}: expected a list on rank {root}, "
                "None on all others"
            )
        if tensors is None:
            return self._only(None, tensor)
        return self._check_list(name, tensors, ("tensor", tensor), range(self.size), written)

    def _check_splits(self, name: str, splits: object, tensor_name: str, tensor: Tensor) -> list[int]:
        """Returns how many rows of dim 0 belong to each rank; equal shares for None."""
        size = self.size
        if tensor.dim() == 0:
            raise CountsError(f"{tensor_name} has no dimensions, expected at least one, which is split")
        rows = tensor.shape[0]
        if splits is None or (isinstance(splits, Sequence) and not len(splits)):  # torch takes [] for equal shares, too
            if rows % size:
                unequal = f"{rows} rows, which {size} ranks cannot share equally"
                raise CountsError(f"{tensor_name} has {unequal}; pass {name}")
            return [rows // size] * size
        if not isinstance(splits, Sequence) or len(splits) != size:
            raise CountsError(f"{name} is {splits!r}, expected {size} ints, one for each rank")
        for rank, share in enumerate(splits):
            if isinstance(share, bool) or not isinstance(share, int) or share < 0:
                raise CountsError(f"{name}[{rank}] is {share!r}, expected an int of at least 0")
        if sum(splits) != rows:
            raise CountsError(f"{name} is {list(splits)!r}, {sum(splits)} rows in all, but {tensor_name} has {rows}")
        return list(splits)

    def _check_own(self, sent_name: str, sent: list[int], received_name: str, received: list[int], of: str) -> None:
        """Checks that a rank sends itself as much as it expects from itself."""
        rank = self.rank
        if sent[rank] != received[rank]:
            raise CountsError(
                f"{sent_name}[{rank}] has {sent[rank]} {of}, but {received_name}[{rank}] has {received[rank]}, "
                f"expected as many: it is what rank {rank} sends to itself"
            )

    def _check_rank(self, name: str, rank: int) -> int:
        if not is_int(rank, 0, self.size - 1):
            raise ArgumentError(f"{name} is {rank!r}, expected a rank of this group, an int from 0 to {self.size - 1}")
        return rank

    def _only(self, rank: int | None, tensor: Tensor) -> list[Tensor | None]:
        """Returns a list with the tensor for one rank, or for none."""
        return [tensor if peer == rank else None for peer in range(self.size)]

    def _to_all(self, tensor: Tensor) -> list[Tensor | None]:
        return [tensor.contiguous()] * self.size

    def _move(
        self,
        name: str,
        tensor: Tensor,
        sends: Buffers,
        receives: Buffers,
        async_op: bool,
        details: tuple[Any, ...] = (),
    ) -> Work[None]:
        steps = _move(self._exchange, sends, receives, f"{name} {tensor.dtype}")
        return self._run(name, tensor, steps, async_op, details)

    def _reduce(self, name: str, tensor: Tensor, dst: int | None, op: object, async_op: bool) -> Work[None]:
        reduction = Reduction.of(op, tensor.dtype)
        details = ("op", reduction.name) if dst is None else ("op", reduction.name, "dst", dst)
        steps = _reduce(self._exchange, reduction, tensor, dst)
        return self._run(name, tensor, steps, async_op, details, takes_two_steps(self._exchange, tensor))

    def _run(
        self,
        name: str,
        tensor: Tensor,
        steps: Iterator[Step],
        async_op: bool,
        details: tuple[Any, ...] = (),
        posts_later: bool = False,
    ) -> Work[None]:
        """Posts the first step, and waits unless `async_op`. `posts_later`: some steps are not posted before `wait`."""
        self.require_open()
        self.check_exchange()
        with self.call(name, tensor.shape, tensor.dtype, (), self.backend, details) as call:
            work = Work(steps, lambda: None, self.device, call.posted() if async_op else None)
            if not async_op:
                work.wait()
            elif posts_later:
                self._unfinished.append(work)
            return work


@contextlib.contextmanager
def _default_arithmetic() -> Iterator[None]:
    """Puts aside what this thread has set of rounding and subnormal numbers.

    Small sums are made at every rank, and a library or `torch.set_flush_denormal` may have changed a thread's
    arithmetic at some. Larger ones are made once, at one rank.
    """
    before = ctypes.create_string_buffer(256)  # more than a fenv_t of any C library of Linux
    _LIBM.fegetenv(before)
    _LIBM.fesetenv(ctypes.c_void_p(-1))  # their FE_DFL_ENV
    try:
        yield
    finally:
        _LIBM.fesetenv(before)


_LIBM = ctypes.CDLL(None)


@dataclass(frozen=True)
class Reduction:
    """One of the operations, for the caller's tensors of one dtype."""

    name: str
    dtype: torch.dtype

    @classmethod
    def of(cls, op: object, dtype: torch.dtype) -> Reduction:
        """Looks `op` up, a name or a `torch.distributed.ReduceOp`; or ArgumentError.

        >>> Reduction.of("sum", torch.float32) == Reduction.of(dist.ReduceOp.SUM, torch.float32)
        True
        """
        name = op if isinstance(op, str) else None
        if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
            # The first equals the second, but neither hashes like it nor the other way round.
            name = next((name for name, (native, *_) in _OPERATIONS.items() if op == native), None)
        if name not in _OPERATIONS:
            known = ", ".join(_OPERATIONS)
            raise ArgumentError(f"op is {op!r}, expected one of {known}, or torch's ReduceOp of that name")
        *_, dtypes = _OPERATIONS[name]
        if dtype not in dtypes:
            raise ArgumentError(f"op {name!r} does not take {dtype}; it takes {', '.join(str(d)[6:] for d in dtypes)}")
        return cls(name, dtype)

    @_default_arithmetic()
    def encode(self, tensor: Tensor) -> Tensor:
        """Returns what travels: the tensor, or 0 and 1 where the operation only asks which elements are not zero."""
        return (tensor != 0).to(torch.uint8) if self.name.startswith("logical") else tensor

    @_default_arithmetic()
    def combine(self, shares: Sequence[Tensor]) -> Tensor:
        """Reduces encoded shares in rank order. None is changed; the result of a single one may be itself."""
        carried = shares[0].dtype
        _, function, _ = _OPERATIONS[self.name]
        total = shares[0].to(_WIDE.get(carried, carried))
        for turn, share in enumerate(shares[1:]):
            # The first turn makes a tensor, as `total` is the caller's still.
            total = function(total, share.to(total.dtype), out=total if turn else None)
        if self.name == "avg":
            total = torch.div(total, len(shares))
        return total.to(carried)


def takes_two_steps(exchange: Exchange, tensor: Tensor) -> bool:
    """Whether a reduction deals a tensor out before it is combined; the same on all ranks."""
    return exchange.size > 1 and tensor.nbytes > ONE_STEP_BYTES


def _reduce(exchange: Exchange, reduction: Reduction, tensor: Tensor, dst: int | None) -> Iterator[Step]:
    """Combines all ranks' tensors, at `dst`, or everywhere for None.

    Small ones go to every rank that wants the result, in one step. Of others every rank combines a slice of its own and
    hands it on: each rank sends and receives `2 (size - 1) / size` of the tensor, as in a ring, but in two steps. The
    result is the same to the last bit.
    """
    rank, size = exchange.rank, exchange.size
    whole = reduction.encode(tensor).contiguous().view(-1)
    # With the size: tensors that differ in it may have slices that do not.
    label = f"{'all_reduce' if dst is None else 'reduce'} {reduction.name} {reduction.dtype} {whole.numel()}"
    wants = [dst in (None, peer) for peer in range(size)]
    slices: Buffers = [whole if wanted else None for wanted in wants]
    if two_steps := takes_two_steps(exchange, tensor):
        ends = [whole.numel() * peer // size for peer in range(size + 1)]
        slices = [whole[begin:end] for begin, end in itertools.pairwise(ends)]
    own, nothing = slices[rank], [None] * size
    shares = [] if own is None else _like(own, rank, size)
    yield _post(exchange, slices, shares or nothing, label)
    if own is None:
        return
    total = reduction.combine(shares)
    # `whole` may be the tensor's own memory: only a rank that shall have the result may write to it.
    if two_steps:
        results = [total if wanted else None for wanted in wants]
        yield _post(exchange, results, slices if wants[rank] else nothing, label)
    if not wants[rank]:
        return
    own.copy_(total)
    if whole.data_ptr() != tensor.data_ptr() or whole.dtype != tensor.dtype:
        tensor.copy_(whole.view(tensor.shape))


def _reduce_scatter(
    exchange: Exchange, reduction: Reduction, output: Tensor, inputs: Sequence[Tensor]
) -> Iterator[Step]:
    """`inputs[r]`, of the shape of rank r's output, goes there; what arrives is combined in rank order."""
    carried = [reduction.encode(tensor) for tensor in inputs]
    shares = _like(carried[exchange.rank], exchange.rank, exchange.size)
    yield _post(exchange, carried, shares, f"reduce_scatter {reduction.name} {reduction.dtype}")
    output.copy_(reduction.combine([share.reshape(output.shape) for share in shares]))


def _move(exchange: Exchange, sends: Buffers, receives: Buffers, label: str) -> Iterator[Step]:
    """`sends[r]` goes to rank r and `receives[r]` comes from there, this rank's own included; of any strides."""
    if _lands_on_what_leaves(exchange.rank, sends, receives):
        # What arrives early would be sent on, in place of what was there.
        sends = [None if buffer is None else buffer.clone() for buffer in sends]
    recv_buffer = [
        target if target is None or target.is_contiguous() else target.new_empty(target.shape) for target in receives
    ]
    own, place = sends[exchange.rank], receives[exchange.rank]
    if own is not None and place is not None:
        place.copy_(own.reshape(place.shape))
    yield _post(exchange, sends, recv_buffer, label)
    for peer, (target, arrived) in enumerate(zip(receives, recv_buffer, strict=True)):
        if peer != exchange.rank and target is not None and arrived is not None and arrived is not target:
            target.copy_(arrived)


def _lands_on_what_leaves(rank: int, sends: Buffers, receives: Buffers) -> bool:
    """Whether some byte is received where one is sent from. A rank's own share may stay where it is."""
    own, place = sends[rank], receives[rank]
    stays = own is not None and place is not None and own.data_ptr() == place.data_ptr()
    sent = [extent(buffer) for buffer in sends if buffer is not None and buffer.numel()]
    received = [
        extent(buffer)
        for peer, buffer in enumerate(receives)
        if buffer is not None and buffer.numel() and not (peer == rank and stays)
    ]
    return any(start < stop and first < last for first, stop in sent for start, last in received)


def extent(tensor: Tensor) -> tuple[int, int]:
    """Returns the addresses of a tensor's first byte and of the one behind its last; of any strides."""
    start = tensor.data_ptr()
    if tensor.is_contiguous() or not tensor.numel():
        return start, start + tensor.nbytes
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def _like(own: Tensor, rank: int, size: int) -> list[Tensor]:
    """Makes room for every rank's share, of the shape of this rank's own, which is its own place."""
    return [own if peer == rank else own.new_empty(own.shape) for peer in range(size)]


def _post(exchange: Exchange, sends: Buffers, receives: Buffers, label: str) -> Posted:
    """Posts the bytes of all but this rank's own entries."""
    sent, received = (
        [None if peer == exchange.rank or t is None else as_bytes(t.contiguous()) for peer, t in enumerate(tensors)]
        for tensors in (sends, receives)
    )
    return exchange.post(sent, received, label)
