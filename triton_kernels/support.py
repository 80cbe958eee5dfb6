"""Which wire formats a GPU supports."""

from __future__ import annotations

from thinwire.errors import TransportUnavailable
from thinwire.wire import WireFormat

_FP8_CAPABILITY = (8, 9)


def require_wire_support(wire: WireFormat, capability: tuple[int, int]) -> None:
    """Refuses a wire format that a CUDA device of this compute capability does not support.

    The codec's e4m3 arithmetic is integer arithmetic and would compile for sm_80; Triton's own float8 type does not,
    nor do experts that compute in float8, so the error advises int8 there: as many bytes, a quarter of the error.

    Raises:
        TransportUnavailable: `fp8` below compute capability 8.9.

    >>> require_wire_support(WireFormat.parse("int8"), (8, 0))
    """
    if wire.name == "fp8" and capability < _FP8_CAPABILITY:
        raise TransportUnavailable(
            f"wire format {str(wire)!r} needs a GPU of compute capability 8.9 or newer, this one has "
            f"{capability[0]}.{capability[1]}; use int8, which takes as many bytes with a quarter of the error"
        )
