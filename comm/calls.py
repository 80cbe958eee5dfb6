"""The wrapper of every public operation: what a communicator offers to the operations over it.

    with comm.call("all_gather", x.shape, x.dtype, wire, transport) as call:
        call.takes("direct")
        return comm.deliver(call, finish, x.device, async_op)

An operation begins its call after all checks that this rank alone can fail, and before anything is sent. The call first
finishes pending work of earlier calls, and records itself. An exception from outside in any of this ends the
communicator at this rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch

from thinwire.comm.call import Call, Recorder
from thinwire.comm.resources.result_memory import ResultMemory
from thinwire.comm.tensors import is_int
from thinwire.comm.work import Work
from thinwire.errors import ArgumentError

_T = TypeVar("_T")


def checked_programs(number: object) -> int | None:
    """`num_programs` as it was passed; ArgumentError for what is no number of programs."""
    if number is None or is_int(number, 1):
        return cast(int | None, number)
    raise ArgumentError(f"num_programs is {number!r}, expected an int of at least 1, or None")


class Attachment:
    """An object kept with a communicator: it has a line for `explain`, and an end.

    `settle` finishes pending calls before anything else travels. Otherwise a rank could wait here for a peer that waits
    for the rest of this rank's rows. A pending call's errors surface in its own wait.
    """

    outlives_shrink = False  # whether it moves to what `shrink` makes of the communicator
    under_way: object = None  # a pending call, which `settle` ends

    def describe(self) -> str:
        raise NotImplementedError

    def settle(self) -> None:
        return

    def leave_to_parent(self) -> None:
        """In a process that was just forked: nobody calls it there any more."""
        return

    def close(self) -> None:
        return


class Calls:
    """What a communicator is to the operations over it."""

    result_memory: ResultMemory  # where new results lie
    prepared: dict[object, Any]  # what operations keep for calls that differ in their tensors alone
    num_programs: int | None = None  # see `programs`
    recorder: Recorder  # for what is no call, or outlives it
    _attachments: dict[str, Attachment]
    _unfinished: list[Work[None]]  # collectives with steps that are still to be posted

    @contextlib.contextmanager
    def programs(self, number: int | None) -> Iterator[None]:
        """Within it, kernels of collectives on a GPU have at most so many programs: fewer multiprocessors are taken.

        None: four a multiprocessor. The transport has to be direct; kernels that wait have one program in any case.

        Raises:
            ArgumentError: another number.
        """
        before, self.num_programs = self.num_programs, checked_programs(number)
        try:
            yield
        finally:
            self.num_programs = before

    def call(
        self,
        name: str,
        shape: Sequence[int] | None = None,
        dtype: object = None,
        wires: object = (),
        transport: str | None = None,
        details: tuple[Any, ...] = (),
        numbered: bool = True,
    ) -> Call:
        """Begins an operation that passed this rank's checks. Everything that peers may notice happens in this `with`
        block.

        Args:
            shape: a tensor's, as a torch.Size. Like the other arguments, it must not hold the tensor.
            wires: a wire format or several.
            transport: the one used; or the one requested, if `takes` names it later.
            details: names and values in turn: ints, text, tuples of ints, or objects that become text later.
            numbered: whether all ranks make this call.

        Raises:
            ThinwireError: the communicator has ended at this rank, or another thread is in a call; nothing was begun.
        """
        self.settle()
        return Call(self.recorder, (name, shape, dtype, wires, transport, details), numbered)

    def deliver(self, call: Call, finish: Callable[[], _T], device: torch.device, async_op: bool) -> _T | Work[_T]:
        """An operation's result: what `finish` makes on the device, or a Work whose `wait()` calls `finish`."""
        return Work((), finish, device, call.posted()) if async_op else finish()

    def settle(self) -> None:
        """Ends what is under way of earlier calls, as peers may wait for it.

        Raises:
            ThinwireError: it has ended at this rank, in a child or by an interrupt. Or another thread is in a call.
        """
        self.recorder.take_turn()
        try:
            if self._unfinished:
                self._settle_collectives()
            for attachment in self._attachments.values():
                if attachment.under_way is not None:
                    attachment.settle()
        except BaseException as error:
            self.recorder.ended_by(error)
            raise
        finally:
            self.recorder.end_turn()

    def _settle_collectives(self) -> None:
        while self._unfinished:
            self._unfinished[0].settle()
            del self._unfinished[0]  # not before: `close` in another thread ends it
