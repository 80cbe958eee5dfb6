"""Symmetric memory: one buffer a rank, all of one size, which every rank of the group can load from and store to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thinwire.comm.communicator import Communicator
from thinwire.comm.memory.cuda_heap import CudaHeap
from thinwire.comm.memory.heap import Heap, PosixHeap, StillWaiting
from thinwire.errors import CapacityError, PeerTimeout, ThinwireError, TransportUnavailable
from thinwire.fields import MOST_TEXT, OneOf

#: By kind: "threads" is of ranks that are threads, or of one alone with a GPU.
HEAPS: dict[str, type[Heap]] = {heap.kind: heap for heap in (Heap, PosixHeap, CudaHeap)}

#: What a step may raise, by the name that peers are told.
_KINDS: dict[str, type[ThinwireError]] = {
    kind.__name__: kind for kind in (StillWaiting, CapacityError, TransportUnavailable)
}


class SymmetricMemory:
    """A rank's buffer and the addresses of all ranks' buffers. Made by `allocate`.

    Attributes:
        kind: "posix", "cuda" or "threads".
        num_bytes: of each rank's buffer.
        memory_bytes: bytes that this rank holds: the buffer, its heap's overhead, and the addresses of all buffers.
            PyTorch's rounding on CUDA is not included.
        generation: what `allocate` was given.
    """

    def __init__(
        self,
        kind: str,
        generation: int,
        local: torch.Tensor,
        buffer_ptrs: list[int],
        mappings: list[Any],
    ) -> None:
        self.kind = kind
        self.num_bytes = local.numel()
        self.memory_bytes = held_bytes(kind, self.num_bytes, len(buffer_ptrs))
        self.generation = generation
        self._local: torch.Tensor | None = local
        self._bases: torch.Tensor | None = torch.tensor(buffer_ptrs, dtype=torch.int64, device=local.device)
        self._mappings = mappings

    @property
    def local(self) -> torch.Tensor:
        """This rank's buffer: uint8 [num_bytes] on the communicator's device, zero at first.

        It stays readable for as long as any tensor made from it, past `close` too.

        Raises:
            ThinwireError: the memory was closed.
        """
        return self._require_open(self._local)

    @property
    def buffer_ptrs(self) -> torch.Tensor:
        """int64 [size] on the communicator's device: where each rank's buffer begins in this rank's address space.

        Raises:
            ThinwireError: the memory was closed.
        """
        return self._require_open(self._bases)

    def among(self, ranks: Sequence[int]) -> SymmetricMemory:
        """This memory with the buffers of these ranks alone, to be used in place of this one."""
        return SymmetricMemory(
            self.kind, self.generation, self.local, self.buffer_ptrs[list(ranks)].tolist(), self._mappings
        )

    def held(self) -> object:
        """Keeps all of it mapped, even past `close`, for code that is still using it."""
        return self.local, self.buffer_ptrs, list(self._mappings)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._local is None

    def close(self) -> None:
        """Frees the peers' buffers now, and this rank's own once no tensor made from it is left. Not collective.

        Peers that have not closed yet may go on using this rank's buffer. This rank must no longer use `buffer_ptrs`.
        On CUDA it waits for all work queued on the device. May be called again.
        """
        if self._local is None:
            return
        if self._local.device.type == "cuda":
            # Kernels of any stream may still store to what is about to be unmapped.
            torch.cuda.synchronize(self._local.device)
        # A mapping ends with its last reference. mmap.close() would end it under tensors that use it.
        self._local = self._bases = None
        self._mappings.clear()

    def __enter__(self) -> SymmetricMemory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"SymmetricMemory({self.kind!r}, num_bytes={self.num_bytes}, generation={self.generation}{state})"

    def _require_open(self, tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is None:
            raise ThinwireError("this symmetric memory is closed")
        return tensor


def allocate(
    comm: Communicator, num_bytes: int, generation: int = 0, ranks: Sequence[int] | None = None
) -> SymmetricMemory:
    """Gives every rank a zeroed buffer and the addresses of all of them. Collective; blocks the host.

    Args:
        comm: the ranks. Its device decides the heap, and whether the ranks are threads of one process.
        num_bytes: of each rank's buffer, at least 1; the same on all ranks.
        generation: a number for the caller's use, the same on all ranks.
        ranks: those that map each other's buffers, this one among them, such as one host's; None means all. For the
            others `buffer_ptrs` has this rank's own address. All ranks of the communicator call this together.

    Raises:
        ConfigMismatch: ranks asked for different things.
        TransportUnavailable: some rank cannot map some peer's buffer, and why.
        CapacityError: what was asked for is not there, with both figures.
        ThinwireError: sizes that make no sense.
        PeerTimeout: a peer did not take part.

        All but PeerTimeout are the same on every rank, and leave nothing allocated.

    >>> import thinwire as tw
    >>> with tw.init() as comm, allocate(comm, 4096) as memory:
    ...     memory.kind, memory.local.shape, memory.buffer_ptrs.tolist() == [memory.local.data_ptr()]
    ('posix', torch.Size([4096]), True)
    """
    _check_request(comm, num_bytes, generation)
    heap = _choose_heap(comm)(comm, num_bytes, range(comm.size) if ranks is None else ranks)
    try:
        # Not as inference tensors, which nobody could write to later.
        with torch.inference_mode(False):
            buffer_ptrs: list[int] = []
            facts = _on_all_ranks(comm, heap.inspect, heap.fact)
            offers = _on_all_ranks(comm, lambda: heap.create(facts), heap.offer)
            _on_all_ranks(comm, lambda: buffer_ptrs.extend(heap.attach(offers)), None)
            for step in heap.trials(buffer_ptrs):
                _on_all_ranks(comm, step, None)
            assert heap.local is not None
            comm.log(f"symmetric memory: {heap.kind} heap, {num_bytes / 2**20:.1f} MiB a rank, generation {generation}")
            return SymmetricMemory(heap.kind, generation, heap.local, buffer_ptrs, heap.mappings)
    except BaseException:
        # Not left to the end of `heap`: the error's traceback would keep it.
        heap.mappings.clear()
        raise
    finally:
        heap.local = None
        heap.finish()


def held_bytes(kind: str, num_bytes: int, world: int) -> int:
    """`SymmetricMemory.memory_bytes` of a heap of that kind, for a buffer of `num_bytes` on each of `world` ranks.

    >>> held_bytes("threads", 100, 2), held_bytes("cuda", 100, 2)
    (116, 116)
    """
    return HEAPS[kind].held_bytes(num_bytes) + world * torch.int64.itemsize


def _check_request(comm: Communicator, num_bytes: int, generation: int) -> None:
    request = {"num_bytes": num_bytes, "generation": generation}
    # What is no int is compared by its text, so that ranks which pass the same nonsense get the same error.
    described = {name: value if isinstance(value, int) else repr(value) for name, value in request.items()}
    comm.require_same("symmetric memory", described)
    for name, value, least in (("num_bytes", num_bytes, 1), ("generation", generation, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ThinwireError(f"{name} of symmetric memory is {value!r}, expected an int of at least {least}")


def _on_all_ranks(comm: Communicator, step: Callable[[], object], shape: Any) -> list[Any]:
    """Runs a step on every rank and returns all results; what it raised on the first rank that failed, all raise.

    Ranks that only waited for others come last. `shape` is a result's, see `thinwire.fields`.
    """
    result: object = None
    error: ThinwireError | None = None
    try:
        result = step()
    except PeerTimeout:
        raise
    except (CapacityError, TransportUnavailable) as problem:
        error = problem
    except Exception as problem:
        # Of the system or of torch's private functions: the peers must hear of it all the same.
        error = TransportUnavailable(
            f"rank {comm.rank} could not make symmetric memory: {type(problem).__name__}: {problem}"
        )
        error.__cause__ = problem
    own: tuple[object, ...] = (result,)
    if error is not None:
        own = next(name for name, kind in _KINDS.items() if isinstance(error, kind)), str(error)[:MOST_TEXT]
    try:
        outcomes = comm.all_gather_data(own, OneOf((str, str), (shape,)))
    except PeerTimeout as timeout:
        if error is not None:  # for which the peers may be waiting where they cannot hear of it, as in torch
            notes: list[str] = getattr(timeout, "__notes__", [])
            timeout.__notes__ = [*notes, f"before that: {error}"]  # add_note, which Python 3.10 lacks
        raise
    for rank, outcome in sorted(enumerate(outcomes), key=lambda told: told[1][0] == StillWaiting.__name__):
        if len(outcome) == 2:
            kind, text = outcome
            raise error if error is not None and rank == comm.rank else _KINDS[kind](text)
    return [result for (result,) in outcomes]


def _choose_heap(comm: Communicator) -> type[Heap]:
    if comm.in_process or (comm.size == 1 and comm.device.type == "cuda"):
        return Heap
    return CudaHeap if comm.device.type == "cuda" else PosixHeap
