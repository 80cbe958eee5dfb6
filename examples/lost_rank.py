"""One of three ranks ends in the midst of its work; the files of the others say where.

    python examples/lost_rank.py

It prints what `thinwire inspect` prints of the files. docs/flight_recorder.md shows that.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

import torch

import thinwire as tw
from thinwire.tools.cli import main


def work(comm: tw.Communicator) -> None:
    """One rank. Rank 1 ends in its second step, as if the system had killed it, and the others get PeerTimeout."""
    x = torch.ones(1024)
    for step in range(2):
        tw.all_reduce(x, comm=comm, transport="staged")
        if comm.rank == 1 and step == 1:
            time.sleep(0.5)  # the others have what they need of it
            os._exit(9)
        comm.barrier()


def run() -> None:
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(tw.testing.RankError):
            tw.testing.run_ranks(work, 3, env={"THINWIRE_FLIGHT_RECORDER": folder})
        main(["inspect", *map(str, sorted(Path(folder).glob("*.json")))])


if __name__ == "__main__":
    run()
