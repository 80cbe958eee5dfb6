"""Every error thinwire raises on purpose.

Each derives from `ThinwireError` and from the nearest builtin, so that callers may catch either. Each message
says what was wrong, where, and what would be accepted. All but `PeerTimeout` and `IntegrityError`
are raised before any row is sent; what depends on a peer's counts is raised after those were exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "ArgumentError",
    "CapacityError",
    "CheckpointError",
    "ConfigMismatch",
    "CountsError",
    "IntegrityError",
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
    """Base of all of them."""


class ArgumentError(ThinwireError, ValueError):
    """An argument that the call cannot take: a rank that is not there, an unknown operation, a dtype it does not do."""


class WireFormatError(ThinwireError, ValueError):
    """An unknown wire format, or one that cannot carry the tensor it was asked to carry."""


class RoutingError(ThinwireError, ValueError):
    """Tokens, expert ids or router weights that a dispatch or combine cannot take."""


class CountsError(ThinwireError, ValueError):
    """Counts or displacements that do not fit the tensors, each other, or the peers' own."""


class CapacityError(ThinwireError, ValueError):
    """More rows than the space that was set aside for them."""


class ConfigMismatch(ThinwireError, RuntimeError):
    """Ranks constructed the same object with different settings."""


class LayoutError(ThinwireError, ValueError):
    """Axes, sizes or shapes that do not fit a device matrix, a tensor, or each other."""


class RankTableError(ThinwireError, ValueError):
    """A rank table that cannot be read, or is at odds with itself or with the process that reads it."""


class LaneError(ThinwireError, RuntimeError):
    """A round was used after its lane had moved on, or twice."""


class PeerTimeout(ThinwireError, TimeoutError):
    """A peer did not answer in time, or is gone.

    Attributes:
        ranks: those that are lost, ascending; empty where that is not known, and where ranks expect different messages.
            The same on all ranks that raise it, unless the group was still being made; on the direct transport on CUDA,
            unless several died at once, or ranks called operations whose memories differ.
        lane: the lane of the round that ended, if it was one's.
        epoch: that round's number on its lane.
        phase: what was waited for, such as "dispatch".
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


class IntegrityError(ThinwireError, RuntimeError):
    """What arrived is not what was sent, by its checksums; only with `integrity="checksum"`.

    Nothing was returned of it. What raised this, a communicator, cannot be used any more.

    Attributes:
        rank: the sender; the lowest one, where several are concerned.
        rows: of its rows the stretches that differ, and may hold some that do not; bytes, where a message has no rows.
        call: the number of the message among those from that rank.
    """

    def __init__(self, message: str, *, rank: int = -1, rows: Iterable[range] = (), call: int = -1) -> None:
        # Defaults are for copies and pickles, which give the message alone, and the attributes after that.
        super().__init__(message)
        self.rank, self.rows, self.call = rank, tuple(rows), call


class TransportUnavailable(ThinwireError, RuntimeError):
    """What would carry out the request is not installed or not supported on this device."""


class CheckpointError(ThinwireError, ValueError):
    """A checkpoint that lacks a tensor, holds one of another shape or dtype, or is at odds with itself."""
