"""The calls of ranks, which decide the kernels that they launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from thinwire.errors import TransportUnavailable
from thinwire.moe.config import ParallelSettings
from thinwire.tools.warmup.exchanges import launch_all_to_all_v, launch_collectives
from thinwire.tools.warmup.rounds import launch_direct, launch_int8_experts, launch_staged
from thinwire.triton_kernels.int8_weights import require_int8_sums
from thinwire.triton_kernels.support import require_wire_support

if TYPE_CHECKING:
    from argparse import Namespace

    from triton.backends.compiler import GPUTarget


@dataclass(frozen=True)
class Configuration:
    """What ranks will call.

    Attributes:
        settings: ExpertParallel's arguments; lanes with and without `dtype` are both compiled for.
        ranks: of the group.
        dtype: of tokens.
        gradients: whether a dispatch will want gradients.
        int8_experts: elements between the two products of `tw.Int8Experts`; 0: there are none.
        collectives, all_to_all_v: whether these are called too, in the wire format of dispatch and with rows of its
            size.
    """

    settings: ParallelSettings
    ranks: int
    dtype: torch.dtype
    gradients: bool = False
    int8_experts: int = 0
    collectives: bool = False
    all_to_all_v: bool = False

    @classmethod
    def of(cls, options: Namespace) -> Configuration:
        """The configuration that the options of `thinwire warmup` describe.

        Raises:
            ArgumentError, RoutingError, WireFormatError: as ExpertParallel and `tw.init`.
        """
        dtype: torch.dtype = getattr(torch, options.dtype)
        settings = ParallelSettings.of(
            options.experts, options.top_k, options.hidden, options.max_tokens, wire=options.wire,
            combine_wire=options.combine_wire, grad_wire=options.grad_wire, transport=options.transport,
            lanes=options.lanes, align=options.align, invariant=options.invariant, num_programs=None, timeout=None,
            dtype=dtype,
        )  # fmt: skip
        beside = options.gradients, options.int8_experts, options.collectives, options.all_to_all_v
        return cls(settings, options.ranks, dtype, *beside)

    def describe(self) -> str:
        """One line."""
        settings, name = self.settings, str(self.dtype).removeprefix("torch.")
        return (
            f"{self.ranks} ranks, {settings.num_experts} experts, top-{settings.top_k}, hidden {settings.hidden_size}, "
            f"{settings.max_tokens} tokens a rank, {name}; {settings.wire} out, {settings.combine_wire} back"
            + ", invariant" * settings.invariant
            + f", gradients in {settings.grad_wire}" * self.gradients
            + f", int8 experts of {self.int8_experts}" * (self.int8_experts > 0)
            + ", collectives" * self.collectives
            + ", all-to-all-v" * self.all_to_all_v
        )

    def require(self, target: GPUTarget) -> None:
        """Raises the errors of ranks on such GPUs, before any compiling: TransportUnavailable, WireFormatError."""
        settings = self.settings
        why = settings.why_staged(self.ranks)
        if why is not None and settings.transport == "direct":
            raise TransportUnavailable(f"ExpertParallel cannot take the direct transport: {why}")
        if target.backend == "cuda":
            for wire in (settings.wire, settings.combine_wire, settings.grad_wire):
                require_wire_support(wire, divmod(int(target.arch), 10))
        if self.int8_experts:
            columns = settings.wire.columns(settings.hidden_size)
            require_int8_sums(replace(settings.wire, rotated=False), columns)

    def launch(self) -> None:
        """Launches each of its kernels at least once; for `collect`."""
        settings, dtype = self.settings, self.dtype
        if settings.transport == "staged" or settings.why_staged(self.ranks) is not None:
            launch_staged(settings, self.ranks, dtype, self.gradients)
        else:
            for room in (dtype, None):
                lanes = replace(settings, dtype=room)
                launch_direct(lanes, self.ranks, dtype)
                if self.gradients:
                    launch_direct(lanes.of_backward, self.ranks, dtype, backward=True)
        if self.int8_experts:
            launch_int8_experts(settings, self.ranks, dtype, self.int8_experts)
        if self.collectives:
            launch_collectives(self.ranks, settings.wire, dtype)
        if self.all_to_all_v:
            launch_all_to_all_v(self.ranks, settings.hidden_size, settings.wire, dtype)
