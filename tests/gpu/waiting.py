"""That calls do not wait for the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from thinwire.comm.communicator import Communicator


@contextlib.contextmanager
def waiting_refused(comm: Communicator) -> Iterator[None]:
    """torch raises where the host would wait for the device. Collective: for ranks that are threads it is one mode."""
    comm.barrier()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
        comm.barrier()  # before some thread may wait again, and so that none takes the mode back from others
    finally:
        torch.cuda.set_sync_debug_mode("default")
