"""Communicators of some of the ranks, made once and kept with the one that they were split from."""

from __future__ import annotations

from thinwire.comm.calls import Attachment
from thinwire.comm.communicator import Communicator

Groups = tuple[tuple[int, ...], ...]


class _SharedSplit(Attachment):
    """A communicator as an attachment of the one that it was split from."""

    def __init__(self, communicator: Communicator, groups: Groups) -> None:
        self.communicator, self.groups = communicator, groups

    def describe(self) -> str:
        return f"split: {len(self.groups)} groups, this rank in one of {self.communicator.size}"

    def close(self) -> None:
        self.communicator._close_all()


def shared_split(comm: Communicator, groups: Groups) -> Communicator:
    """As `comm.split`, but only the first call with these groups makes one; closed together with `comm`."""
    return comm.attached(f"split {groups}", lambda: _SharedSplit(comm.split(groups=groups), groups)).communicator
