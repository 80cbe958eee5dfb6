"""Sizes, wires and the group of expert parallelism: what everything in it reads, and nothing changes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from thinwire.comm.communicator import Communicator
from thinwire.comm.host_collectives import Setting
from thinwire.comm.tensors import is_int, is_seconds
from thinwire.errors import RoutingError, TransportUnavailable
from thinwire.fused.backend import Backend, select_backend
from thinwire.fused.codec import FLOAT_DTYPES
from thinwire.fused.transport import check_transport
from thinwire.moe.routing import expert_range
from thinwire.version import VERSION
from thinwire.wire import WIRE_VERSION, WireFormat

_MAX_TOP_K = 32


@dataclass(frozen=True)
class ParallelConfig:
    """The arguments of :class:`thinwire.ExpertParallel`, where they are described, with the wire formats looked up."""

    comm: Communicator
    num_experts: int
    top_k: int
    hidden_size: int
    max_tokens: int
    wire: WireFormat
    combine_wire: WireFormat
    grad_wire: WireFormat
    transport: str
    lanes: int
    align: int
    num_programs: int | None
    timeout: float | None
    dtype: torch.dtype | None
    grows: bool = False  # max_tokens is what there is room for by now

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "hidden_size", "lanes", "align", "num_programs"):
            value = getattr(self, name)
            if (value is not None or name != "num_programs") and not is_int(value, 1):
                raise RoutingError(f"{name} is {value!r}; an int of at least 1, and below 2**31, is needed")
        if not is_int(self.max_tokens, 0):
            raise RoutingError(f"max_tokens is {self.max_tokens!r}; an int of at least 0, and below 2**31, is needed")
        if self.top_k > _MAX_TOP_K:
            raise RoutingError(f"top_k is {self.top_k}; at most {_MAX_TOP_K} experts a token are supported")
        if self.timeout is not None and not is_seconds(self.timeout):
            raise RoutingError(
                f"timeout is {self.timeout!r}; a finite number of seconds above 0, at most 1e9, is needed"
            )
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype in FLOAT_DTYPES):
            raise RoutingError(f"dtype is {self.dtype!r}; float32, float16, bfloat16 or None is needed")
        check_transport(self.transport)
        if not isinstance(self.comm, Communicator):
            raise TransportUnavailable(
                f"comm is {self.comm!r}; a Communicator is needed, such as thinwire.init() returns"
            )

    @cached_property
    def dispatch_backend(self) -> Backend:
        """The kernels of the dispatch leg."""
        return select_backend(self.comm.device, self.wire)

    @cached_property
    def combine_backend(self) -> Backend:
        """The kernels of the combine leg."""
        return select_backend(self.comm.device, self.combine_wire)

    @cached_property
    def grad_backend(self) -> Backend:
        """The kernels of both legs of backward."""
        return select_backend(self.comm.device, self.grad_wire)

    @property
    def local_experts(self) -> range:
        """The experts that this rank owns."""
        return expert_range(self.num_experts, self.comm.size, self.comm.rank)

    @property
    def peer_timeout(self) -> float:
        """Seconds that a round of the direct transport may wait for a peer."""
        return self.comm.timeout if self.timeout is None else self.timeout

    def settings(self, generation: int) -> dict[str, Setting]:
        """What ranks must agree on."""
        names = ("num_experts", "top_k", "hidden_size", "max_tokens", "grows", "lanes", "align", "transport")
        return {name: getattr(self, name) for name in names} | {
            "wire": str(self.wire),
            "wire_alignment": self.wire.alignment,
            "combine_wire": str(self.combine_wire),
            "combine_wire_alignment": self.combine_wire.alignment,
            "grad_wire": str(self.grad_wire),
            "grad_wire_alignment": self.grad_wire.alignment,
            "wire_version": WIRE_VERSION,
            "dtype": str(self.dtype),
            "generation": generation,
            "thinwire": VERSION,
        }
