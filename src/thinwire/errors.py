"""Every error thinwire raises on purpose.

Each derives from `ThinwireError` and from the nearest builtin, so that callers may catch either. Each message says what
was wrong, where, and what is accepted. All but `PeerTimeout` are raised before any row is sent;
errors that depend on a peer's counts are raised after the counts were exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "ArgumentError",
    "CapacityError",
    "CheckpointError",
    "ConfigMismatch",
    "CountsError",
    "LaneError",
    "LayoutError",
    "PeerTimeout",
    "RankTableError",
    "RoutingError",
    "ThinwireError",
    "TransportUnavailable",
    "WireFormatError",
]


class ThinwireError(Exception):
    """Base of all errors here."""


class ArgumentError(ThinwireError, ValueError):
    """An argument that the call does not accept, such as a rank out of range, an unknown operation, or an unsupported
    dtype."""


class WireFormatError(ThinwireError, ValueError):
    """An unknown wire format, or one that cannot carry the given tensor."""


class RoutingError(ThinwireError, ValueError):
    """Tokens, expert ids or router weights that a dispatch or combine does not accept."""


class CountsError(ThinwireError, ValueError):
    """Counts or displacements that do not match the tensors, each other, or the peers'."""


class CapacityError(ThinwireError, ValueError):
    """More rows than there is space for."""


class ConfigMismatch(ThinwireError, RuntimeError):
    """Ranks constructed the same object with different settings."""


class LayoutError(ThinwireError, ValueError):
    """Axes, sizes or shapes that do not match a device matrix, a tensor, or each other."""


class RankTableError(ThinwireError, ValueError):
    """A rank table that cannot be read, or contradicts itself or the process that reads it."""


class LaneError(ThinwireError, RuntimeError):
    """A round was used after its lane had moved on, or twice."""


class PeerTimeout(ThinwireError, TimeoutError):
    """A peer did not answer in time, or is gone.

    Attributes:
        ranks: the lost ranks, ascending. Empty if they are not known, or if ranks expect different messages. The same
            on all ranks that raise it, unless the group was still being made; on the direct transport on CUDA, unless
            several died at once, or ranks called operations whose memories differ.
        lane: the lane of the round that ended, if it was a round.
        epoch: the number of that round on its lane; of all-to-all-v's calls, or of the collectives' legs.
        phase: the phase whose wait ended: "dispatch" or "combine", "headers" or "pieces", "rows" or "sums".
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: Iterable[int] = (),
        lane: int | None = None,
        epoch: int | None = None,
        phase: str | None = None,
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(sorted(set(ranks)))
        self.lane = lane
        self.epoch = epoch
        self.phase = phase


class TransportUnavailable(ThinwireError, RuntimeError):
    """The requested transport or feature is not installed, or not supported on this device."""


class CheckpointError(ThinwireError, ValueError):
    """A checkpoint that lacks a tensor, has one of another shape or dtype, or contradicts itself."""
