"""Calls that share memory, one after the other, on whatever CUDA streams their callers use."""

from __future__ import annotations

import torch

__all__ = ["StreamTurns"]


class StreamTurns:
    """The stream of the last call. While a graph is captured, the order of streams is the caller's affair.

    Args:
        device: of the calls. On the CPU there are no streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None

    @property
    def capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def take(self) -> torch.cuda.Stream | None:
        """The current stream, once it waits for what the last call launched on another."""
        if self._device.type != "cuda":
            return None
        stream = torch.cuda.current_stream(self._device)
        if self.capturing:
            return stream  # an eager call that waited for it would join the capture
        if self._last is not None and stream != self._last:
            stream.wait_stream(self._last)
        self._last = stream
        return stream
