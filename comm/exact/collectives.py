"""The collectives that move or reduce a tensor exactly, by torch.distributed's conventions.

Arguments are those of the function of that name in `torch.distributed`, with ranks of *this group*, and results are
written in place. Sizes, dtypes and the operation are the same on all ranks, as each function says; Gloo's ranks and
threads that disagree get `PeerTimeout`. Tensors live on the communicator's device, have any strides, and no history in
autograd. Everything that can be seen on this rank alone is checked before anything is sent.

Every call returns a `thinwire.comm.work.Work`. With `async_op=True` it may be pending; do not touch the tensors before
its `wait()`. `all_reduce` and `reduce` of more than 64 KiB take two steps over Gloo and between threads. The second
step is taken in `wait()`, or in this communicator's next call. There, all ranks must wait in the same order for works
of different communicators, and for anything else that needs their peers.

Over Gloo, and between threads, everything consists of sends and receives (`comm/exact/p2p.py`). Reductions go in rank
order, with the same bits on every rank (`comm/exact/reductions.py`). Over NCCL, `broadcast`, `all_gather`,
`reduce_scatter`, `reduce` and `all_reduce` are NCCL's own (`comm/exact/nccl.py`), with its order and its accuracy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from thinwire.comm.exact import nccl, p2p
from thinwire.comm.exact.reductions import Reduction
from thinwire.comm.exchange import Buffers
from thinwire.comm.host_collectives import HostCollectives, collective
from thinwire.comm.tensors import require_dense, require_writable
from thinwire.comm.work import Step, Work
from thinwire.errors import ArgumentError, CountsError


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
        return self._reduce(self._check("tensor", tensor, written=True), None, op, async_op)

    @collective
    def reduce(self, tensor: Tensor, dst: int, op: object = "sum", async_op: bool = False) -> Work[None]:
        """As `all_reduce`, but only at rank `dst`; other ranks' tensors stay unchanged."""
        root = self._check_rank("dst", dst)
        return self._reduce(self._check("tensor", tensor, written=root == self.rank), root, op, async_op)

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
        steps = self._reductions.reduce_scatter(self._exchange, reduction, data, inputs)
        return self._run("reduce_scatter", data, steps, async_op, ("op", reduction.name))

    @collective
    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False) -> Work[None]:
        """Fills `tensor` with rank `src`'s. The same shape and dtype on all ranks; any dtype.

        Over Gloo, `src` sends to each rank by itself.
        """
        data = self._check("tensor", tensor, written=self._check_rank("src", src) != self.rank)
        if self._on_nccl:
            return self._run("broadcast", data, nccl.broadcast(self._exchange, data, src), async_op, ("src", src))
        sends = self._to_all(data) if src == self.rank else self._nothing()
        receives = self._only(src, data) if src != self.rank else self._nothing()
        return self._move("broadcast", data, sends, receives, async_op, ("src", src))

    @collective
    def all_gather(self, tensor_list: Sequence[Tensor], tensor: Tensor, async_op: bool = False) -> Work[None]:
        """Exact: fills `tensor_list[r]` with rank r's `tensor`. `thinwire.all_gather` quantises.

        One shape and dtype on all ranks; any dtype.
        """
        data = self._check("tensor", tensor)
        outputs = self._check_list("tensor_list", tensor_list, ("tensor", data), range(self.size), written=True)
        if self._on_nccl:
            return self._run("all_gather", data, nccl.all_gather(self._exchange, outputs, data), async_op)
        return self._move("all_gather", data, self._to_all(data), outputs, async_op)

    @collective
    def all_gather_v(self, tensor_list: Sequence[Tensor], tensor: Tensor, async_op: bool = False) -> Work[None]:
        """Exact: as `all_gather`, for tensors of different shapes. `thinwire.all_gather_v` quantises.

        `tensor_list[r]` has the shape of rank r's `tensor`.
        """
        data = self._check("tensor", tensor)
        outputs = self._check_list("tensor_list", tensor_list, ("tensor", data), [self.rank], written=True)
        counts = ("counts", [output.numel() for output in outputs])
        return self._move("all_gather_v", data, self._to_all(data), outputs, async_op, counts)

    @collective
    def gather(
        self, tensor: Tensor, gather_list: Sequence[Tensor] | None = None, dst: int = 0, async_op: bool = False
    ) -> Work[None]:
        """Fills rank `dst`'s `gather_list[r]` with rank r's `tensor`.

        Args:
            tensor: one shape and dtype on all ranks; any dtype.
            gather_list: one tensor a rank, of that shape, on rank `dst`; None on the others.
            dst: the rank that gets them.
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

        Args:
            tensor: one shape and dtype on all ranks; any dtype.
            scatter_list: one tensor a rank, of that shape, on rank `src`; None on the others.
            src: the rank that has them.
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
        own, place = inputs[self.rank], outputs[self.rank]
        if own.numel() != place.numel():
            raise CountsError(
                f"input_tensor_list[{self.rank}] has {own.numel()} elements and output_tensor_list[{self.rank}] has "
                f"{place.numel()}, expected as many: it is what rank {self.rank} sends to itself"
            )
        sent, received = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))
        counts = ("send_counts", sent, "recv_counts", received)
        return self._move("all_to_all", own, inputs, outputs, async_op, counts)

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
        if sends[self.rank] != receives[self.rank]:
            raise CountsError(
                f"input_split_sizes[{self.rank}] is {sends[self.rank]} and output_split_sizes[{self.rank}] is "
                f"{receives[self.rank]}, expected the same: it is what rank {self.rank} sends to itself"
            )
        counts = ("send_counts", sends, "recv_counts", receives)
        return self._move("all_to_all_v", data, data.split(sends), target.split(receives), async_op, counts)

    @collective
    def send(self, tensor: Tensor, dst: int, tag: int = 0, async_op: bool = False) -> Work[None]:
        """Sends `tensor`, of any dtype, to rank `dst`, which calls `recv`. Returns once that rank receives it.

        Between two ranks, messages are received in the order in which they were sent, with the same tags.
        """
        data = self._check("tensor", tensor)
        sends = self._only(self._check_peer("dst", dst), data)
        return self._message("send", data, sends, self._nothing(), ("dst", dst, "tag", _check_tag(tag)), async_op)

    @collective
    def recv(self, tensor: Tensor, src: int, tag: int = 0, async_op: bool = False) -> Work[None]:
        """Fills `tensor` with what rank `src` sends: as many elements, of the same dtype, with the same tag."""
        data = self._check("tensor", tensor, written=True)
        receives = self._only(self._check_peer("src", src), data)
        return self._message("recv", data, self._nothing(), receives, ("src", src, "tag", _check_tag(tag)), async_op)

    @property
    def _on_nccl(self) -> bool:
        """Whether the backend's own collectives are to be used."""
        return self._exchange.backend == "nccl"

    @property
    def _reductions(self) -> ModuleType:
        return nccl if self._on_nccl else p2p

    def _check(self, name: str, tensor: object, written: bool = False) -> Tensor:
        """The tensor itself, cut off from autograd: what a collective writes has no history."""
        require_dense(name, tensor)
        assert isinstance(tensor, Tensor)
        if tensor.is_conj() or tensor.is_neg():
            raise ArgumentError(
                f"{name} is a conjugate or negative view; expected resolve_conj() or resolve_neg() of it"
            )
        if tensor.device.type != self.device.type:
            raise ArgumentError(
                f"{name} lives on {tensor.device}, but this communicator's tensors live on {self.device}"
            )
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
        """One tensor a rank, of the dtype of `like` or of the first one; those of ranks `alike` have its shape, too."""
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

    def _check_splits(self, name: str, splits: object, tensor_name: str, tensor: Tensor) -> list[int]:
        """How many rows of dim 0 belong to each rank; equal shares for None."""
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

    def _check_rank(self, name: str, rank: object) -> int:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.size:
            raise ArgumentError(f"{name} is {rank!r}, expected a rank of this group, an int from 0 to {self.size - 1}")
        return rank

    def _check_peer(self, name: str, rank: object) -> int:
        peer = self._check_rank(name, rank)
        if peer == self.rank:
            raise ArgumentError(f"{name} is {peer}, this rank itself; expected another one")
        return peer

    def _check_list_of_root(
        self, name: str, tensors: object, tensor: Tensor, root_name: str, root: int, written: bool = False
    ) -> Buffers:
        if (tensors is not None) != (self.rank == root):
            found = "None" if tensors is None else "a list"
            raise ArgumentError(
                f"{name} is {found} on rank {self.rank}, and {root_name} is {root}: expected a list on rank {root}, "
                "None on all others"
            )
        if tensors is None:
            return self._nothing()
        return self._check_list(name, tensors, ("tensor", tensor), range(self.size), written)

    def _nothing(self) -> list[Tensor | None]:
        return [None] * self.size

    def _only(self, rank: int, tensor: Tensor) -> list[Tensor | None]:
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
        steps = p2p.move(self._exchange, sends, receives, f"{name} {tensor.dtype}")
        return self._run(name, tensor, steps, async_op, details)

    def _message(
        self, name: str, tensor: Tensor, sends: Buffers, receives: Buffers, details: tuple[Any, ...], async_op: bool
    ) -> Work[None]:
        """One message between two ranks, of which the others know nothing."""
        steps = p2p.move(self._exchange, sends, receives, f"send {details[-1]} {tensor.dtype}")
        return self._run(name, tensor, steps, async_op, details, numbered=False)

    def _reduce(self, tensor: Tensor, dst: int | None, op: object, async_op: bool) -> Work[None]:
        reduction = Reduction.of(op, tensor.dtype)
        later = not self._on_nccl and p2p.takes_two_steps(self._exchange, tensor)
        name, root = ("all_reduce", ()) if dst is None else ("reduce", ("dst", dst))
        steps = self._reductions.reduce(self._exchange, reduction, tensor, dst)
        return self._run(name, tensor, steps, async_op, ("op", reduction.name, *root), posts_later=later)

    def _run(
        self,
        name: str,
        tensor: Tensor,
        collective: Iterator[Step],
        async_op: bool,
        details: tuple[Any, ...] = (),
        *,
        posts_later: bool = False,
        numbered: bool = True,
    ) -> Work[None]:
        """Posts the first step, and waits unless `async_op`.

        Args:
            name, tensor, details, numbered: for the flight recorder.
            posts_later: some steps are not posted before `wait`.
        """
        self.require_open()
        self.check_exchange()
        with self.call(name, tensor.shape, tensor.dtype, (), self.backend, details, numbered) as call:
            work = Work(collective, lambda: None, recorded=call.posted() if async_op else None)
            if not async_op:
                work.wait()
            elif posts_later:
                self._unfinished.append(work)
            return work


def _check_tag(tag: object) -> int:
    if isinstance(tag, bool) or not isinstance(tag, int):
        raise ArgumentError(f"tag is {tag!r}, expected an int")
    return tag
