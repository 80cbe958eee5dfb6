"""Communicators over some of a communicator's ranks that are kept with it."""

from __future__ import annotations

from thinwire.comm.communicator import Communicator

__all__ = ["shared_split"]

Groups = tuple[tuple[int, ...], ...]


def shared_split(comm: Communicator, groups: Groups) -> Communicator:
    """As `comm.split` with these groups, but the same one at every call, and closed together with `comm`.

    Only the first call is collective.
    """
    return comm.attached(f"split {groups}", lambda: _SharedSplit(comm.split(groups=groups), groups)).communicator


class _SharedSplit:
    """A communicator as an attachment of the one that it was split from."""

    def __init__(self, communicator: Communicator, groups: Groups) -> None:
        self.communicator = communicator
        self._sizes = f"{len(groups)} groups, this rank in one of {communicator.size}"

    def describe(self) -> str:
        """One line for `Communicator.explain`."""
        return f"split: {self._sizes}"

    def settle(self) -> None:
        """Nothing is under way between calls of those who share it."""

    def close(self) -> None:
        """Closes the communicator."""
        self.communicator.close()
