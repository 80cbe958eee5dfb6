"""Sizes, wires and the group of expert parallelism: what everything in it reads, and nothing changes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from thinwire.comm import Communicator, as_communicator
from thinwire.comm.host_collectives import Setting
from thinwire.comm.tensors import is_int, is_seconds
from thinwire.errors import ArgumentError, RoutingError
from thinwire.fields import shown
from thinwire.fused.backend import Backend, reference_backend, select_backend
from thinwire.fused.codec import FLOAT_DTYPES, resolve_wire
from thinwire.fused.transport import check_transport
from thinwire.moe.routing import expert_range, owners_in
from thinwire.triton_kernels.round_layout import SIGNAL_DTYPE, SIGNAL_END, RoundLayout
from thinwire.triton_kernels.signal import MAX_WORLD
from thinwire.wire import BLOCK, WireFormat

if TYPE_CHECKING:
    from typing_extensions import Self

    from thinwire.triton_kernels.cpu.lane import PulledLayout

_MAX_TOP_K = 32
ROUND_DTYPES = (*FLOAT_DTYPES, torch.float64)  # the last one is for comparisons: staged, exact, in plain torch


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """The arguments of `thinwire.ExpertParallel` but for its group, with the wire formats looked up.

    They are described there. What is to be allocated follows from them, and is known before there is a group.
    """

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
    invariant: bool = False
    num_programs: int | None
    timeout: float | None
    dtype: torch.dtype | None

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "hidden_size", "lanes", "align", "num_programs", "max_tokens"):
            value, least = getattr(self, name), int(name != "max_tokens")
            if (value is not None or name != "num_programs") and not is_int(value, least):
                raise RoutingError(f"{name} is {value!r}; an int of at least {least}, and below 2**31, is needed")
        if self.top_k > min(self.num_experts, _MAX_TOP_K):
            raise RoutingError(
                f"top_k is {self.top_k}; expected 1 to {min(self.num_experts, _MAX_TOP_K)}: of {self.num_experts} "
                f"experts a token names at most {_MAX_TOP_K}"
            )
        if self.timeout is not None and not is_seconds(self.timeout):
            raise RoutingError(
                f"timeout is {self.timeout!r}; a finite number of seconds above 0, at most 1e9, is needed"
            )
        if not isinstance(self.invariant, bool):
            raise RoutingError(f"invariant is {self.invariant!r}; True or False is needed")
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype in ROUND_DTYPES):
            raise RoutingError(f"dtype is {self.dtype!r}; float32, float16, bfloat16, float64 or None is needed")
        wires = self.wire, self.combine_wire, self.grad_wire
        if self.is_double and any(wire.quantized for wire in wires):
            raise RoutingError(
                "dtype is torch.float64, of which all formats have to be 'none'; wire, combine_wire and grad_wire are "
                + ", ".join(map(str, wires))
            )
        check_transport(self.transport)

    @classmethod
    def of(
        cls,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        max_tokens: int,
        *,
        wire: str | WireFormat | None,
        combine_wire: str | WireFormat | None,
        grad_wire: str | WireFormat | None,
        **rest: Any,
    ) -> Self:
        """Checks what was passed, and looks up its formats. The rest has the names of the fields."""
        wire = resolve_wire(wire, hidden_size if is_int(hidden_size, 1) else BLOCK)
        return cls(
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=hidden_size,
            max_tokens=max_tokens,
            wire=wire,
            combine_wire=wire if combine_wire is None else resolve_wire(combine_wire),
            grad_wire=resolve_wire("none" if grad_wire is None else grad_wire),
            **rest,
        )

    @property
    def is_double(self) -> bool:
        """Whether tokens, router weights and sums are float64."""
        return self.dtype == torch.float64

    @cached_property
    def row_dtypes(self) -> tuple[torch.dtype, ...]:
        """Of rows that experts may give back; of tokens, too, where `dtype` is None."""
        return (torch.float64,) if self.is_double else FLOAT_DTYPES

    def describe_dtypes(self) -> str:
        """Says in words which dtypes rows may have."""
        return "float64" if self.is_double else "float32, float16 or bfloat16"

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of router weights and their gradients, as they travel."""
        return torch.float64 if self.is_double else torch.float32

    @property
    def of_backward(self) -> Self:
        """Settings of the lanes on which gradients travel, whose sums are a rank's in any case."""
        return replace(self, wire=self.grad_wire, combine_wire=self.grad_wire, invariant=False)

    def why_staged(self, world: int) -> str | None:
        """What keeps so many ranks from the direct transport with these settings; None if nothing does."""
        if world > MAX_WORLD:
            return f"it takes up to {MAX_WORLD} ranks, and here are {world}"
        if self.invariant and world * self.max_tokens * self.top_k >= 1 << 31:
            return "its kernels count fewer than 2**31 rows of experts"
        return "its kernels do not take float64" if self.is_double else None

    def lane_layout(self, world: int, *, weight_grads: bool = False) -> RoundLayout:
        """Of each lane on the direct transport over so many ranks; see `RoundLayout.of`."""
        return RoundLayout.of(**self._layout_settings(world, weight_grads))

    def pulled_layout(self, world: int, *, weight_grads: bool = False, **others: Any) -> PulledLayout:
        """Of each lane of CPU ranks, whose peers read there; see `PulledLayout`, which has the others."""
        from thinwire.triton_kernels.cpu.lane import PulledLayout  # it loads numba

        return PulledLayout(**(self._layout_settings(world, weight_grads) | others))

    def _layout_settings(self, world: int, weight_grads: bool) -> dict[str, Any]:
        return {
            "world": world, "num_experts": self.num_experts, "top_k": self.top_k, "hidden": self.hidden_size,
            "max_tokens": self.max_tokens, "wire": self.wire, "combine_wire": self.combine_wire, "dtype": self.dtype,
            "weight_grads": weight_grads, "invariant": self.invariant,
        }  # fmt: skip

    def dispatch_bytes(self, transport: str, world: int, tokens: int, dtype: torch.dtype) -> tuple[int, int]:
        """What a rank with so many tokens sends to dispatch them: bytes for each record, and bytes beside all records.

        Beside them, on the direct transport, are the ids and weights of all tokens and one line, to each peer.
        """
        if transport == "staged":
            return self.message_bytes(dtype), 0
        to_each_peer = tokens * self.top_k * 8 + 4 * (1 + SIGNAL_DTYPE)
        return self.wire.row_bytes(self.hidden_size, dtype), (world - 1) * to_each_peer

    def combine_bytes(self, transport: str, world: int, dtype: torch.dtype) -> tuple[int, int]:
        """What a rank sends to combine: bytes for each record, and bytes beside all records."""
        beside = (world - 1) * (1 if transport == "staged" else 4 * (1 + SIGNAL_END))
        return self.combine_wire.row_bytes(self.hidden_size, dtype), beside

    def message_bytes(self, dtype: torch.dtype) -> int:
        """Of a record that is dispatched on the staged transport, and of what travels behind it.

        That is the token's ids, weights and number; kernels need a multiple of 16.
        """
        tail = (4 + self.weight_dtype.itemsize) * self.top_k + 4
        return -(-(self.wire.row_bytes(self.hidden_size, dtype) + tail) // 16) * 16


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(ParallelSettings):
    """Settings with their group, and what follows from that.

    `expert_map` is a tuple once it is checked, None for contiguous blocks. With it ids become *places* as a dispatch
    begins: experts by owner, then by id, so that a rank's are contiguous. Kernels and messages know places only.
    """

    comm: Communicator
    expert_map: Sequence[int] | torch.Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "comm", as_communicator(self.comm))  # last, as others may have to be met for it
        if self.expert_map is not None:
            object.__setattr__(self, "expert_map", self._checked_map())

    def _checked_map(self) -> tuple[int, ...] | None:
        ranks = range(self.comm.size)
        owners = owners_in(self.expert_map, self.num_experts, self.comm.size)
        owned = [len(expert_range(self.num_experts, self.comm.size, rank)) for rank in ranks]
        if (given := [owners.count(rank) for rank in ranks]) != owned:
            raise ArgumentError(
                f"expert_map gives the ranks {shown(given)} experts, expected {shown(owned)}, as many as without a map"
            )
        if owners == sorted(owners):
            return None
        if self.invariant:
            raise ArgumentError(
                "expert_map is given with invariant=True, expected None or contiguous blocks: rows are then added in "
                "ascending expert id, which kernels know in such blocks only"
            )
        return tuple(owners)

    @cached_property
    def dispatch_backend(self) -> Backend:
        """The kernels of the dispatch leg."""
        return self._backend(self.wire)

    @cached_property
    def combine_backend(self) -> Backend:
        """The kernels of the combine leg."""
        return self._backend(self.combine_wire)

    @cached_property
    def grad_backend(self) -> Backend:
        """The kernels of both legs of backward."""
        return self._backend(self.grad_wire)

    def _backend(self, wire: WireFormat) -> Backend:
        if self.is_double:
            return reference_backend("float64")
        return select_backend(self.comm.device, wire, self.comm.cpu_share.threads)

    def as_floats(self, expert_out: torch.Tensor) -> torch.Tensor:
        """Experts' rows, with records in `combine_wire` as float32, in which a host's sums over two levels are."""
        if expert_out.dtype != torch.uint8:
            return expert_out
        rows = expert_out.new_empty(len(expert_out), self.hidden_size, dtype=torch.float32)
        self.combine_backend.unpack_rows(expert_out, self.combine_wire, None, None, rows)
        return rows

    @property
    def local_places(self) -> range:
        """The places of the experts that this rank owns."""
        return expert_range(self.num_experts, self.comm.size, self.comm.rank)

    @property
    def local_experts(self) -> range | tuple[int, ...]:
        """Their ids, ascending."""
        if self.expert_map is None:
            return self.local_places
        return tuple(expert for expert, owner in enumerate(self.expert_map) if owner == self.comm.rank)

    def places_of_ids(self) -> torch.Tensor | None:
        """int32 [num_experts + 3], the place of each id; None where both are the same.

        Behind them is what ids from -2 on and `num_experts` become: the same, none or out of range as before.
        """
        if self.expert_map is None:
            return None
        places = torch.tensor(self.expert_map, device="cpu").argsort(stable=True).argsort().tolist()
        return torch.tensor([*places, self.num_experts, -2, -1], dtype=torch.int32, device=self.comm.device)

    @property
    def peer_timeout(self) -> float:
        """Seconds that a round of the direct transport may wait for a peer."""
        return self.comm.timeout if self.timeout is None else self.timeout

    def settings(self, generation: int) -> dict[str, Setting]:
        """What ranks must agree on."""
        names = ("num_experts", "top_k", "hidden_size", "max_tokens", "lanes", "align", "invariant", "transport")
        found: dict[str, Setting] = {name: getattr(self, name) for name in names}
        owners = self.expert_map  # of many experts more than can be sent
        digest = hashlib.sha256(repr(owners).encode()).hexdigest()[:16]
        found["expert_map"] = None if owners is None else f"{shown(owners)}, SHA-256 {digest}"
        for name in ("wire", "combine_wire", "grad_wire"):
            wire = getattr(self, name)
            found |= {name: str(wire), f"{name}_alignment": wire.alignment}
        return found | {"dtype": str(self.dtype), "generation": generation}
