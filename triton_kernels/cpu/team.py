"""A team of threads for the rows of one large call: rows are independent, so any number of threads gives the same bits.

The work of a call is cut into *chunks*, which are numbered. All threads of a team run the same kernel, and in it each
takes the lowest number that is left until none is (`do_rows`): `begin` or `claim`, then the work, then `finish`. The
thread that leads, the caller's, then waits until all chunks are done: `wait_for_team`.

Why nothing is done twice, left out, or still under way when the call returns:

* NEXT only grows, by one, in one step, by the thread that saw it below LIMIT: each number goes to one thread.
* DONE grows by one behind each chunk's last store, with release. `wait_for_team` reads it with acquire: when it has
  come to LIMIT, every chunk was done, and the caller sees and may publish what all threads stored.
* `begin`, work and `wait_for_team` lie in one call of machine code, in the caller's thread too, and Python raises a
  KeyboardInterrupt only behind such a call. One that comes before it, while threads are started, does not skip it: it
  is in a `finally`, and from there to the call Python does not look for signals. A function of `sys.settrace` may raise
  there nevertheless, but Python has then removed it: from a second `finally` around the first nothing keeps the call,
  which is over at once where the first was made.
* Only claimed work touches the caller's memory. A thread that starts late, even after the call has returned, finds no
  number left; all it looks at is the team's words, which its argument keeps. So a call waits for the chunks that others
  have taken, never for a thread that did not get to run.
* A signal handler that runs while threads are started may fork, and return in the child, where nobody finishes what
  they had claimed. Python runs it only outside of the kernel, so `begin` sees in time that the process is another than
  PROCESS: the leading thread then does all chunks over, alone, to the same bytes. A thread that the child started takes
  none, before or after: it sees it too.

A call that waits between pieces of work cannot count chunks beforehand. It leads a *standing* team: it posts the chunks
of a piece (`post`), works with the others, and returns from `wait_for_team` before it posts more. LIMIT grows too,
then, by the leading thread alone, and what of the above follows from a LIMIT that stays follows from one that grows:

* What says what the chunks are is written before LIMIT grows, with release, and not again before all of them are done.
  Who has claimed one has read that LIMIT, with acquire: it sees what is meant, and nobody changes it meanwhile.
* Nothing is posted but in the leading thread's call of machine code, and nothing posted is left over when that returns.
  So wherever Python may raise or fork in that thread, there is nothing that others have taken, and a child that goes on
  with the call makes a team of its own.
* A thread without work waits until LIMIT is negative: the leading thread sets it so at the end (`dismiss`), and Python
  once more in a `finally`, for what is raised before. Should a trace function end that, its threads go all the same
  when nothing was posted for a second. A leading thread that only took so long goes on without them.

Threads are started for the call and end with it. A pool would begin 20 us sooner, but would have to be owned by
something, closed, and made anew after a fork. numba's own parallel loops are no choice: its workqueue ends the process
if two threads enter it, which ranks that are threads do, and the other layers have to be installed.
"""

from __future__ import annotations

import os
from _thread import stack_size, start_new_thread
from functools import lru_cache
from typing import Any

import numpy as np

from thinwire.log import LOGGER
from thinwire.triton_kernels.cpu.compat import device
from thinwire.triton_kernels.cpu.ir.atomics import (
    add_release,
    compare_and_swap,
    load_acquire,
    monotonic_ns,
    process_id,
    store_release,
)
from thinwire.triton_kernels.cpu.ir.intrinsics import load_int32, store_int32
from thinwire.triton_kernels.cpu.signal import SPINS, let_others_run

#: Bytes of rows that are worth a thread. One takes 25 us of the caller's time, and as long again until it runs. With
#: half as many bytes it is worth that on an idle core, and a loss of a sixth where another process keeps the core busy.
BYTES_PER_THREAD = 4 << 20
_CHUNKS_PER_THREAD = 8  # who starts late, or has a slower core, takes fewer

_LINE = 64
# Words on lines of their own, in bytes from where the team begins: each changes at another rate.
_LIMIT, _NEXT, _DONE = (line * _LINE for line in range(3))
_ROWS_PER_CHUNK, _PROCESS, _FIRST, _THREADS = _LIMIT + 4, _LIMIT + 8, _LIMIT + 12, _LIMIT + 16
#: Where a line is that the leading thread of a standing team writes before it posts chunks, to say what they are.
JOB = 3 * _LINE
_TEAM_BYTES = 5 * _LINE  # of which up to one is left out, for alignment
_ZERO, _ONE, _DISMISSED = np.int32(0), np.int32(1), np.int32(-1)
_LEAST_STACK_BYTES = 128 << 10  # of a thread; kernels keep 32 KiB of a row there, and 20 KiB of records
_LONGEST_IDLE_NS = 1_000_000_000


@device
def team_at(words):
    """The address of a team, which begins at a cache line."""
    address = np.int64(words.ctypes.data)
    return address + (-address & (_LINE - 1))


@device
def begin(team, leads):
    """A thread's first chunk, as `claim`; `leads` says whether it is the caller's."""
    if load_int32(team + _PROCESS) != process_id():
        if not leads:
            return np.int64(-1)
        store_int32(team + _NEXT, _ZERO)
        store_int32(team + _DONE, _ZERO)
    return claim(team)


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
    """The first row of a chunk and the one behind its last, of `count` rows: all, or those that were posted last."""
    rows = np.int64(load_int32(team + _ROWS_PER_CHUNK))
    number -= np.int64(load_int32(team + _FIRST))
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


@device
def do_rows(words, member, count, work, where):
    """Runs `work(where, first, stop)` for the rows of each chunk that this thread takes, and if it leads, waits.

    `where` holds addresses and numbers; what lies at the addresses is the work's to look at, and nobody else's.
    """
    team, leads = team_at(words), member == 0
    chunk = begin(team, leads)
    while chunk >= 0:
        first, stop = rows_of_chunk(team, chunk, count)
        work(where, first, stop)
        finish(team)
        chunk = claim(team)
    if leads:
        wait_for_team(team)


@device
def post(team, count):
    """Posts `count` rows, a chunk for each thread.

    For the thread that leads a standing team, when all that it posted before is done. More and smaller chunks would let
    a faster core do more, but a piece takes some ten microseconds, and each further chunk a fifth of one.
    """
    rows = -(-count // load_int32(team + _THREADS))
    limit = load_int32(team + _LIMIT)
    store_int32(team + _ROWS_PER_CHUNK, np.int32(rows))
    store_int32(team + _FIRST, limit)
    store_release(team + _LIMIT, np.int32(limit + -(-count // rows)))


@device
def dismiss(team):
    """Lets the threads of a standing team go."""
    store_release(team + _LIMIT, _DISMISSED)


@device
def wait_for_work(team):
    """As `claim`, for a thread that does not lead its standing team: waits for work. -1 when dismissed."""
    begun = monotonic_ns()
    looks = 0
    while True:
        limit = load_acquire(team + _LIMIT)  # before the look for a chunk: what is posted behind it ends the wait
        if limit < 0:
            return np.int64(-1)
        chunk = claim(team)
        if chunk >= 0:
            return chunk
        while load_acquire(team + _LIMIT) == limit:
            looks += 1
            if looks > SPINS:
                waited = monotonic_ns() - begun
                if waited > _LONGEST_IDLE_NS:
                    return np.int64(-1)
                let_others_run(waited)


def threads_for(count: int, row_bytes: int, threads: int) -> int:
    """How many of the threads that a rank may use are worth it for `count` rows.

    One where `threading.stack_size` gives new threads too little for kernels: they would overrun it.
    """
    if count * row_bytes < 2 * BYTES_PER_THREAD or 0 < stack_size() < _LEAST_STACK_BYTES:
        return 1
    return max(1, min(threads, count, count * row_bytes // BYTES_PER_THREAD))


def run_in_team(threads: int, count: int, kernel: Any, *arguments: object) -> None:
    """Runs `kernel(*arguments, words, member)` in so many threads, for `count` rows, of which there is one at least.

    Members are numbered: 0 is this thread, which leads, and no two have the same number. Where the system has no more
    threads there are fewer, and the log says so once: the result is the same.
    """
    rows = -(-count // (threads * _CHUNKS_PER_THREAD))
    words, first = _new_team(threads)
    leading = *arguments, words, 0
    kernel(*leading)  # there are no chunks yet; now it is compiled
    words[first + _LIMIT // 4], words[first + _ROWS_PER_CHUNK // 4] = -(-count // rows), rows
    try:
        try:
            _start(threads, kernel, *arguments, words)
        finally:
            kernel(*leading)
    finally:
        kernel(*leading)


def run_standing_team(threads: int, kernel: Any, *arguments: object) -> Any:
    """What `kernel(*arguments, words, member)` gives in this thread, which leads as member 0; the others end with it.

    The kernel has been compiled. Where the system has no more threads there are fewer, as for `run_in_team`.
    """
    words, first = _new_team(threads)
    try:
        _start(threads, kernel, *arguments, words)
        return kernel(*arguments, words, 0)
    finally:
        words[first + _LIMIT // 4] = _DISMISSED


def _new_team(threads: int) -> tuple[np.ndarray, int]:
    """The words of a team of this process without chunks, and the number of the first that lies in it."""
    words = np.zeros(_TEAM_BYTES // 4, np.int32)
    # `words.ctypes` imports, which fails while Python ends.
    first = -words.__array_interface__["data"][0] % _LINE // 4
    words[first + _PROCESS // 4], words[first + _THREADS // 4] = os.getpid(), threads
    return words, first


def _start(threads: int, kernel: Any, *arguments: object) -> None:
    for member in range(1, threads):
        try:
            start_new_thread(kernel, (*arguments, member))
        except (RuntimeError, MemoryError) as error:
            _warn(f"{member} of {threads} threads share the rows of large calls: {error!r}")
            return


@lru_cache(maxsize=16)
def _warn(message: str) -> None:
    """Once for each message."""
    LOGGER.warning(message)
