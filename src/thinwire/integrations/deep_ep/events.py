"""Events as DeepEP's: points on the stream that is current on CUDA. On a CPU there is nothing to wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class EventHandle:
    """A point on the stream that is current when it is made."""

    def __init__(self) -> None:
        self._event = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None

    def current_stream_wait(self) -> None:
        """The stream that is current now waits for that point."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """An event, and a hook that is called once after a wait for it. Used as a context, it waits at the end."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event, self.extra_tensors, self._release = event, extra_tensors, False
        self.hook_after_wait: Callable[[], object] | None = None

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """As `EventHandle.current_stream_wait`; with release_handle the event is dropped."""
        if self.event is not None:
            self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        self.event = None if release_handle else self.event

    def register_hook_after_wait(self, hook_after_wait: Callable[[], object]) -> None:
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        self._release = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.current_stream_wait(self._release)


def done(*previous: Any) -> EventOverlap:
    """What a call returns. The current stream first waits for the events before it, but calls no hooks of theirs."""
    for each in previous:
        event = getattr(each, "event", each)
        if event is not None:
            event.current_stream_wait()
    return EventOverlap(EventHandle())
