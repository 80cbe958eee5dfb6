"""`wire="auto"`: small messages go unquantised, since quantising costs more time there than it saves.

From which size on quantising pays depends on the operation, the ranks and what is between them: `thinwire bench` shows
it. THINWIRE_AUTO_BYTES sets it, for all operations; it must be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.comm import Communicator
from thinwire.errors import WireFormatError
from thinwire.fused.codec import FLOAT_DTYPES, resolve_wire
from thinwire.wire import WireFormat


def is_auto(wire: object) -> bool:
    """Whether a wire was passed as "auto"; anything may be passed."""
    return isinstance(wire, str) and wire == "auto"


def resolve_wires(
    comm: Communicator, what: str, x: torch.Tensor, wires: Sequence[str | WireFormat | None], alike: bool = True
) -> list[WireFormat]:
    """The formats of a call's legs, where "auto" is `none` below `comm.auto_bytes` of x, and of what is no float.

    Args:
        what: the operation's name.
        x: a rank's tensor.
        wires: of the legs, as passed.
        alike: whether all ranks' messages have one size.

    Raises:
        WireFormatError: a wire that is none; "auto" for messages of different sizes.
    """
    if not any(map(is_auto, wires)):
        return [resolve_wire(wire) for wire in wires]
    if not alike:
        raise WireFormatError(
            f'{what}: wire="auto" needs messages of one size on all ranks, which would take different paths otherwise; '
            "pass a wire format"
        )
    chosen = resolve_wire(None)
    if x.dtype not in FLOAT_DTYPES or x.nbytes < comm.auto_bytes:
        chosen = WireFormat("none")
    elif not chosen.quantized:
        chosen = WireFormat.parse("int8")
    return [chosen if is_auto(wire) else resolve_wire(wire) for wire in wires]
