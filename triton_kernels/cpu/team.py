"""A team of threads for the rows of one large call: rows are independent, so any number of threads gives the same bits.

The work of a call is cut into *chunks*, which are numbered. All threads of a team run the same kernel, and in it each
takes the lowest number that is left until none is: `claim`, then the work, then `finish`. `wait_for_team` returns once
all chunks are done.

Why nothing is done twice, left out, or still under way when the call returns:

* NEXT only grows, by one, in one step, by the thread that saw it below LIMIT: each number goes to one thread.
* DONE grows by one behind each chunk's last store, with release. `wait_for_team` reads it with acquire: when it has
  come to LIMIT, every chunk was done, and the caller sees and may publish what all threads stored.
* `claim`, work and `wait_for_team` lie in one call of machine code, in the caller's thread too, and Python raises a
  KeyboardInterrupt only behind such a call. One that comes before it, while threads are started, does not skip it: it
  is in a `finally`, and from there to the call Python does not look for signals.
* Only claimed work touches the caller's memory. A thread that starts late, even after the call has returned, finds no
  number left; all it looks at is the team's words, which its argument keeps. So a call waits for the chunks that others
  have taken, never for a thread that did not get to run.

Threads are started for the call and end with it. A pool would begin 20 us sooner, but would have to be owned by
something, closed, and made anew after a fork. numba's own parallel loops are no choice: its workqueue ends the process
if two threads enter it, which ranks that are threads do, and the other layers have to be installed.
"""

from __future__ import annotations

from _thread import start_new_thread
from typing import Any

import numpy as np

from thinwire.log import LOGGER
from thinwire.triton_kernels.cpu.compat import device
from thinwire.triton_kernels.cpu.ir.atomics import (
    add_release,
    compare_and_swap,
    load_acquire,
    monotonic_ns,
)
from thinwire.triton_kernels.cpu.ir.intrinsics import load_int32
from thinwire.triton_kernels.cpu.signal import SPINS, let_others_run

#: Bytes of rows that are worth a thread. One takes 25 us of the caller's time, and as long again until it runs. With
#: half as many bytes it is worth that on an idle core, and a loss of a sixth where another process keeps the core busy.
BYTES_PER_THREAD = 4 << 20
_CHUNKS_PER_THREAD = 8  # who starts late, or has a slower core, takes fewer

_LINE = 64
# Words on lines of their own, in bytes from where the team begins: each changes at another rate.
_LIMIT, _NEXT, _DONE = (line * _LINE for line in range(3))
_ROWS_PER_CHUNK = _LIMIT + 4
_TEAM_BYTES = 4 * _LINE  # of which up to one is left out, for alignment
_ONE = np.int32(1)


@device
def team_at(words):
    """The address of a team, which begins at a cache line."""
    address = np.int64(words.ctypes.data)
    return address + (-address & (_LINE - 1))


@device
def claim(team):
    """The number of a chunk that is this thread's to do now; -1 when none is left."""
    while True:
        number = load_acquire(team + _NEXT)
        if number >= load_acquire(team + _LIMIT):
            return np.int64(-1)
        if compare_and_swap(team + _NEXT, number, number + _ONE):
            return np.int64(number)


@device
def rows_of_chunk(team, number, count):
    """The first row of a chunk and the one behind its last, of `count` rows."""
    rows = np.int64(load_int32(team + _ROWS_PER_CHUNK))
    return number * rows, min(count, (number + 1) * rows)


@device
def finish(team):
    """Says that a chunk is done."""
    add_release(team + _DONE, _ONE)


@device
def wait_for_team(team):
    """Returns when all chunks are done."""
    begun = monotonic_ns()
    looks = 0
    while load_acquire(team + _DONE) != load_acquire(team + _LIMIT):
        looks += 1
        if looks > SPINS:
            let_others_run(monotonic_ns() - begun)


def threads_for(num_bytes: int, threads: int) -> int:
    """How many of the threads that a rank may use are worth it for rows of so many bytes."""
    return max(1, min(threads, num_bytes // BYTES_PER_THREAD))


def run_in_team(threads: int, count: int, kernel: Any, *arguments: object) -> None:
    """Runs `kernel(*arguments, words)` in so many threads, this one among them, for `count` rows in all.

    Where the system has no more threads there are fewer, and the log says so: the result is the same.
    """
    rows = -(-count // (threads * _CHUNKS_PER_THREAD))
    words = np.zeros(_TEAM_BYTES // 4, np.int32)
    first = -words.ctypes.data % _LINE // 4
    arguments = (*arguments, words)
    kernel(*arguments)  # there are no chunks yet; now it is compiled
    words[first + _LIMIT // 4], words[first + _ROWS_PER_CHUNK // 4] = -(-count // rows), rows
    try:
        for started in range(1, threads):
            try:
                start_new_thread(kernel, arguments)
            except RuntimeError as error:
                LOGGER.warning("%d of %d threads share the rows of a call: %s", started, threads, error)
                break
    finally:
        kernel(*arguments)
