"""A pending collective."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

import torch

from thinwire.comm.call import PendingCall
from thinwire.compiler import opaque
from thinwire.errors import ThinwireError

_T = TypeVar("_T")


class Step(Protocol):
    """Something that can be waited for, in bounded time."""

    def wait(self) -> object: ...


class Work(Generic[_T]):
    """A call: pending after `async_op=True`, otherwise done. Call `wait` before touching its tensors.

    Args:
        steps: posts a step each time that it is asked for one, once the one before is done, and does what is left to do
            when it is asked for one more. The first is asked for at once.
        finish: makes the result, once all steps are done.
        device: where `finish` works; on CUDA it does so on the stream that is current now. None: on the CPU.
        recorded: ends the call's entry in the flight recorder.
    """

    def __init__(
        self,
        steps: Iterable[Step],
        finish: Callable[[], _T],
        device: torch.device | None = None,
        recorded: PendingCall | None = None,
    ) -> None:
        self._steps = iter(steps)
        self._finish: Callable[[], _T] | None = finish
        self._failure: BaseException | None = None
        self._recorded = recorded
        self._inference = torch.is_inference_mode_enabled()
        self._stream = torch.cuda.current_stream(device) if device is not None and device.type == "cuda" else None
        self._step = next(self._steps, None)

    @opaque
    def wait(self) -> _T:
        """Waits until the call is done on this rank, and returns its result: the filled output, if there is one.

        May be called again. An exception from outside, such as a KeyboardInterrupt, ends the communicator, as in any
        call. On CUDA it orders the current stream after the call; between processes it does not block the host.

        Raises:
            PeerTimeout: a peer did not do its part within the communicator's timeout, or its connection was lost.
            CountsError: in all_to_all_v on the direct transport, a peer sent something other than expected.
            ThinwireError: another thread is in a call on the communicator; call it again. Or the communicator has ended
                at this rank.
        """
        if self._failure is not None:
            raise self._failure
        if self._finish is not None:
            self._end()
            if self._failure is not None:  # another thread has closed the communicator meanwhile
                raise self._failure
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            if isinstance(self._result, torch.Tensor):
                self._result.record_stream(current)
        return self._result

    def _end(self) -> None:
        if self._recorded is not None:
            self._recorded.take_turn()  # not below: that another thread has it does not end the call
        try:
            # Tensors that were made in inference mode can be written in it only.
            mode = torch.inference_mode() if self._inference else torch.no_grad()
            # torch.cuda.stream(None) would initialise CUDA in ranks of the CPU.
            stream = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
            with self._recorded or contextlib.nullcontext(), mode, stream:
                while self._step is not None:
                    self._step.wait()
                    self._step = next(self._steps, None)
                if self._finish is not None:  # as it is not if another thread was here since it was looked at
                    self._result = self._finish()
                self._let_go()
        except BaseException as error:
            try:
                self._fail(error)
            except BaseException as second:  # from outside, before anything has ended
                self._fail(second)
                raise
            raise
        finally:
            if self._recorded is not None:
                self._recorded.end_turn()

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, ThinwireError):
            self._failure = without_traceback(error)
        else:
            name = type(error).__name__
            self._failure = ThinwireError(f"this call has ended at this rank, as {name} came in its wait")
        self._let_go()
        if self._recorded is not None:
            self._recorded.ended_by(error)

    def _let_go(self) -> None:
        self._finish, self._steps, self._step = None, iter(()), None  # they hold the caller's tensors

    def give_up(self, error: Exception) -> None:
        """Makes `wait` raise the error, unless the call is done."""
        if self._finish is not None and self._failure is None:
            self._failure = error
            self._let_go()
            if self._recorded is not None:
                self._recorded.end(error)

    def settle(self) -> None:
        """Waits, and leaves the call's own errors to `wait`. An exception from outside is raised."""
        if self._failure is None:
            try:
                self.wait()
            except ThinwireError as error:
                error.__traceback__ = None  # it would hold the caller's tensors


_E = TypeVar("_E", bound=BaseException)


def without_traceback(error: _E) -> _E:
    """Copies an error without its traceback, whose frames hold the caller's tensors."""
    kept = type(error).__new__(type(error), *error.args)
    kept.args = error.args  # which an OSError forgets until it is initialised
    kept.__dict__.update(error.__dict__)
    return kept
