"""A collective under way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch

__all__ = ["Step", "Work"]


class Step(Protocol):
    """Something that can be waited for, in bounded time."""

    def wait(self) -> None: ...


class Work:
    """A collective, under way after `async_op=True` and else done. Call :meth:`wait` before touching its tensors.

    Args:
        steps: posts a step each time that it is asked for one, once the one before is done, and does what is left to do
            when it is asked for one more. The first is asked for at once.
    """

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps
        self._failure: BaseException | None = None
        self._inference = torch.is_inference_mode_enabled()
        self._step = next(steps, None)

    def wait(self) -> None:
        """Until the collective is done on this rank. Calling it again does nothing.

        On CUDA this orders the current stream after it; between processes it does not block the host.

        Raises:
            PeerTimeout: a peer had not done its part after the communicator's timeout, or its connection was lost.
        """
        if self._failure is not None:
            raise self._failure
        try:
            # Tensors that were made in inference mode can be written in it only.
            with torch.inference_mode() if self._inference else contextlib.nullcontext():
                while self._step is not None:
                    self._step.wait()
                    self._step = next(self._steps, None)
        except BaseException as error:
            self._failure = error
            raise

    def give_up(self, error: Exception) -> None:
        """Makes `wait` raise the error, unless the collective is done."""
        if self._step is not None and self._failure is None:
            self._failure = error

    def settle(self) -> None:
        """As `wait`, but what went wrong is for `wait` to say."""
        try:
            self.wait()
        except Exception as error:
            error.__traceback__ = None  # it would hold the caller's tensors
