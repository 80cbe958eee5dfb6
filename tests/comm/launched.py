"""A program for the launchers' tests: every rank joins, and rank 0 prints what all of them found.

It does not close its communicator: the end of the process must be orderly all the same.
"""

from __future__ import annotations

from thinwire.comm import init


def main() -> None:
    comm = init(device="cpu")
    facts = comm.all_gather_object((comm.rank, comm.size, comm.explain().splitlines()[1].strip()))
    if comm.rank == 0:
        print(facts)


if __name__ == "__main__":
    main()
