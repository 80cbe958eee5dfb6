"""Weights of experts in int8, with a float32 scale for each output channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange

from thinwire.errors import WireFormatError
from thinwire.triton_kernels.codec_reference import rotated_reference
from thinwire.wire import BLOCK, WireFormat

_ALIGNMENT = 16  # bytes, of rows
_LONGEST_SUM = (2**31 - 1) // (128 * 127)  # terms that fit into int32, whatever bytes a peer sent
_SMALLEST_GROUP = 32  # what tensor cores take at a time


@dataclass(frozen=True)
class Int8Weights:
    """One product of all experts of a rank. Channel n of expert e is ``payload[e, n] * scales[e, n]``.

    Attributes:
        payload: int8 [experts, channels, columns], a channel's weights side by side, zero from `inward` on.
        scales: float32 [experts, channels].
        inward: weights of a channel; columns are that, rounded up to 16 bytes.
        gated: the first half of the channels is the gate's; half as many come out, ``silu(gate) * other``.
        activate: without a gate: whether SiLU is applied.

    Raises:
        WireFormatError: tensors of another shape or dtype, or with gaps, such as an assigned state_dict may bring.
            Kernels look at addresses alone.
    """

    payload: torch.Tensor
    scales: torch.Tensor
    inward: int
    gated: bool = False
    activate: bool = False

    def __post_init__(self) -> None:
        for tensor, dtype, shape in (
            (self.payload, torch.int8, (*self.scales.shape, self.inward + -self.inward % _ALIGNMENT)),
            (self.scales, torch.float32, self.payload.shape[:2]),
        ):
            if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
                raise WireFormatError(
                    f"weights of {self.inward} are {tensor.dtype} {list(tensor.shape)}, strides {tensor.stride()}; "
                    f"expected {dtype} {list(shape)} without gaps"
                )

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.payload.shape[1] // (1 + self.gated)

    @classmethod
    def of(
        cls,
        weights: torch.Tensor,
        gate: torch.Tensor | None = None,
        *,
        activate: bool = False,
        rotated: bool = False,
    ) -> Int8Weights:
        """Quantises weights [experts, inward, outward], and a gate of the same shape: ``s = amax / 127`` of a channel.

        `rotated`: for rows that are. Channels are rotated as rows are, so that a row's codes and scales, multiplied by
        them as they came, give the product of the row and the weights; `inward` becomes whole blocks of 64.

        >>> Int8Weights.of(torch.tensor([[[1.0], [-0.5]]])).payload[0, 0, :3].tolist()
        [127, -64, 0]
        """
        both = weights if gate is None else torch.cat((gate, weights), 2)
        channels = rearrange(both.detach().float(), "experts inward channels -> experts channels inward")
        if rotated:
            channels = torch.nn.functional.pad(channels, (0, -channels.shape[2] % BLOCK))
            channels = rotated_reference(channels.flatten(0, 1), back=False).view(channels.shape)
        if not channels.isfinite().all():
            raise WireFormatError("weights that are not finite have no int8 form")
        scales = channels.new_zeros(channels.shape[:2])
        if channels.numel():
            # By a tensor: on CUDA torch multiplies by the reciprocal of a number, and scales would have other bits.
            scales = channels.abs().amax(2) / channels.new_full((), 127.0)
        inverses = torch.where(scales > 0, 1 / scales, 0).nan_to_num(posinf=0)
        payload = (channels * inverses.unsqueeze(2)).round().clamp(-127, 127).to(torch.int8)
        padding = -channels.shape[2] % _ALIGNMENT
        payload = torch.nn.functional.pad(payload, (0, padding)).contiguous()
        return cls(payload, scales.contiguous(), channels.shape[2], gate is not None, activate)


def require_int8_sums(wire: WireFormat, hidden: int) -> None:
    """Refuses formats of rows that cannot be multiplied in int8.

    Raises:
        WireFormatError: not int8; groups of fewer than 32 elements; one scale for a row of more than 132,104.

    >>> require_int8_sums(WireFormat.parse("int8"), 7168)
    """
    if (
        wire.name != "int8"
        or wire.rotated
        or 0 < wire.group < _SMALLEST_GROUP
        or (wire.row_scale and hidden > _LONGEST_SUM)
    ):
        raise WireFormatError(
            f"rows of {hidden} elements in {str(wire)!r} cannot be multiplied in int8; accepted: int8, int8:N with N a "
            f"power of two from {_SMALLEST_GROUP} to 1024, and int8:row up to {_LONGEST_SUM} elements; if rotated, "
            "those formats without +h64"
        )
