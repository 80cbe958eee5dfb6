"""A call under way, whose tensor comes with `wait()`."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Pending", "finished"]


class Pending:
    """A collective under way; `wait()` completes it.

    On CUDA what is left to do runs on the stream that posted it, and `wait()` makes the current stream wait for that;
    the host is not blocked.
    """

    def __init__(self, finish: Callable[[], torch.Tensor], device: torch.device) -> None:
        self._finish: Callable[[], torch.Tensor] | None = finish
        self._result: torch.Tensor | None = None
        self._inference = torch.is_inference_mode_enabled()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def wait(self) -> torch.Tensor:
        """The output, filled. May be called again.

        Raises:
            PeerTimeout: a peer did not answer within the communicator's timeout.
            CountsError: on the direct transport of all_to_all_v, a peer sent something else than was expected.
        """
        if self._result is None:
            if self._finish is None:
                raise RuntimeError("this call failed when it was waited for before")
            finish, self._finish = self._finish, None
            # Tensors that were made in inference mode can be written in it only; no stream: no change.
            mode = torch.inference_mode() if self._inference else torch.no_grad()
            with mode, torch.cuda.stream(self._stream):
                self._result = finish()
        if self._stream is not None:
            current = torch.cuda.current_stream(self._result.device)
            current.wait_stream(self._stream)
            self._result.record_stream(current)
        return self._result


def finished(result: torch.Tensor, async_op: bool) -> torch.Tensor | Pending:
    """What a call returns that is over, as far as the host is concerned."""
    return Pending(lambda: result, result.device) if async_op else result
