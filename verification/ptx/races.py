"""Data races of kernels that run here, found by happens-before under the PTX memory model.

Two accesses of a byte conflict if they are by different threads and one of them writes. They are a race unless one
happens before the other, or both are morally strong: strong (atomic, or with .relaxed, .acquire, .release or
.volatile), of one size, and each with a scope that has the other's thread in it; or both are one instruction of one
program that stores the same bits, as compilers do with what several threads hold. What happens before what:

1. what a thread does, in its order;
2. what is in front of a barrier (`bar.sync`, `bar.warp.sync`) and what is behind it, for the threads that take part;
3. a release and the acquire that observes it, with scopes that include each other's thread. A release is a store or
   atomic with .release or .acq_rel, or a fence and a later strong write of the same thread; an acquire is a load or
   atomic with .acquire or .acq_rel, or a strong read and a later fence. Read-modify-writes keep a release in front of
   them observable through their own word; any other write there ends that;
4. all of a kernel and all of the next of the same rank.

and whatever follows by transitivity. Nothing else orders: no shuffle, no order of addresses, no time that passes, no
order of programs of a grid.

Every thread has a clock: what it knows of each other thread, as an epoch up to which all of that one's accesses happen
before what it does now. Threads of a program share the number of their epoch, which goes on at every release, fence and
barrier of any of them; and they share what they know, but for what some have learned since the last barrier of all.
An access is checked against those before it that a later one may still race with (`shadow.py`), and then joins them.
An older one leaves when whatever races with it also races with the newer: it happens before the newer or is the same
threads', the newer is no stronger, and is a write if it was.

What this sees is the order of one run. Accesses that are not ordered in it are races whenever they came, so chance
matters only for which branches are taken and which release an acquire observes. A run without a race says nothing of
the runs that were not made. Asynchronous copies (`cp.async`) write when they are issued and when they are waited for;
the asynchronous proxy has no clock of its own. What the host does is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from verification.ptx.shadow import Shadow

SCOPES = {None: 0, "cta": 1, "cluster": 1, "gpu": 2, "sys": 3}
_LANES = np.arange(32, dtype=np.uint32)
_Row = np.ndarray  # what one thread knows of each: int32, never written to once somebody else may have it


class Threads:
    """The clocks of the threads of one program of a grid."""

    def __init__(self, rank: int, number: int, slots: np.ndarray, known: _Row, epoch: int) -> None:
        self.rank, self.number, self.slots = rank, number, slots
        self.known = known  # what all of them know
        self.epoch = epoch
        self.learned: dict[int, _Row] = {}  # what a thread knows that not all do, and all that `known` has
        self.fences: dict[int, tuple[_Row, str]] = {}  # of a thread's last fence: what it released, and its scope
        self.observed: dict[int, list[_Row]] = {}  # what a thread read without acquiring it, for a later fence

    def row(self, thread: int) -> _Row:
        return self.learned.get(thread, self.known)

    def learn(self, thread: int, row: _Row) -> None:
        self.learned[thread] = np.maximum(self.row(thread), row)

    def releasable(self, thread: int) -> _Row:
        """What another thread knows that happens behind all that this one has done."""
        row = self.row(thread).copy()
        row[self.slots[thread]] = self.epoch
        return row

    def alike(self, threads: np.ndarray) -> Iterator[tuple[_Row, np.ndarray]]:
        """Places in `threads`, by what these know."""
        if not self.learned:
            yield self.known, np.arange(len(threads))
            return
        by_row: dict[int, tuple[_Row, list[int]]] = {}
        for place, thread in enumerate(threads.tolist()):
            row = self.row(thread)
            by_row.setdefault(id(row), (row, []))[1].append(place)
        for row, places in by_row.values():
            yield row, np.array(places)

    def barrier(self, threads: np.ndarray) -> None:
        """These threads, by their numbers in the program, meet."""
        row = self.known.copy()
        for thread in set(threads.tolist()) & self.learned.keys():
            np.maximum(row, self.learned[thread], out=row)
        row[self.slots[threads]] = self.epoch
        self.epoch += 1
        if len(threads) == len(self.slots):
            self.known = row
            self.learned.clear()
        else:
            self.learned |= dict.fromkeys(threads.tolist(), row)

    def fence(self, threads: np.ndarray, scope: str) -> None:
        for thread in threads.tolist():
            for row in self.observed.pop(thread, ()):
                self.learn(thread, row)
            self.fences[thread] = self.releasable(thread), scope
        self.epoch += 1


class Races:
    """The detector; `found` has a message for each pair of places in kernels that race, by kind and places.

    Args:
        name_of: what to call the byte at an offset of global memory.
    """

    def __init__(self, name_of: Callable[[int], str]) -> None:
        self.found: dict[tuple[str, str, str], str] = {}
        self.memory = Shadow()
        self._name_of = name_of
        self._sites: dict[str, int] = {}
        self._streams: dict[int, _Row] = {}  # by rank: what is known between two of its kernels
        self._epochs: dict[int, int] = {}
        self._slots: dict[int, np.ndarray] = {}  # of a rank's threads; each warp's are 32 in a row
        self._rank_of = np.zeros(0, np.int32)
        self._program_of = np.zeros(0, np.int32)
        self._programs = 0

    # ---------------------------------------------------------------- kernels

    def reserve(self, rank: int, threads: int) -> None:
        """Makes room for a launch of so many threads in all, while no kernel runs."""
        slots = self._slots.get(rank, np.zeros(0, np.int64))
        if threads <= len(slots):
            return
        first, more = len(self._rank_of), threads - len(slots)
        self._slots[rank] = np.append(slots, np.arange(first, first + more))
        self._rank_of = np.append(self._rank_of, np.full(more, rank, np.int32))
        self._program_of = np.append(self._program_of, np.full(more, -1, np.int32))

        def longer(row: _Row) -> _Row:
            return np.append(row, np.zeros(first + more - len(row), np.int32))

        self._streams = {rank: longer(row) for rank, row in self._streams.items()}
        for releases in self.memory.released.values():
            releases[:] = [(longer(row), *rest) for row, *rest in releases]

    def begin(self, rank: int, programs: int, threads: int) -> list[Threads]:
        """A kernel of a rank begins, behind the one before it."""
        known = self._streams.get(rank)
        if known is None:
            known = np.zeros(len(self._rank_of), np.int32)
        epoch = self._epochs.get(rank, 1)
        begun = []
        for program in range(programs):
            slots = self._slots[rank][program * threads : (program + 1) * threads]
            self._programs += 1
            self._program_of[slots] = self._programs
            begun.append(Threads(rank, self._programs, slots, known, epoch))
        return begun

    def end(self, begun: list[Threads]) -> None:
        """All programs of a kernel have ended."""
        row = np.maximum.reduce([each.known for each in begun])
        for each in begun:
            for learned in each.learned.values():
                np.maximum(row, learned, out=row)
            row[each.slots] = each.epoch
        self._streams[begun[0].rank] = row
        self._epochs[begun[0].rank] = 1 + max(each.epoch for each in begun)

    # ---------------------------------------------------------------- accesses

    def access(
        self, shadow: Shadow, by: Threads, threads: np.ndarray, offsets: np.ndarray, width: int, count: int,
        scope: str | None, site: str, written: np.ndarray | None,
    ) -> None:  # fmt: skip
        """Each of `threads` accesses `count` elements of `width` bytes from its offset on.

        `scope` is None for a weak access. `written` are the bytes of a write, uint8 [threads, width * count], or None
        for a read. What was released at a word is hidden by a weak write of it.
        """
        write = written is not None
        strength = 0 if scope is None else SCOPES[scope] + 4 * (width.bit_length() - 1)
        number = self._sites.setdefault(site, len(self._sites))
        span = width * count
        for row, places in by.alike(threads):
            slots = by.slots[threads[places]]
            warps, lanes = slots & ~31, np.uint32(1) << (slots & 31).astype(np.uint32)
            cells = shadow.cells(offsets[places], span)
            if write and strength == 0 and shadow.synchronised[cells].any():
                for hidden in np.unique(cells[shadow.synchronised[cells]]).tolist():
                    del shadow.released[hidden]
                    shadow.synchronised[hidden] = False
            values = written[places].ravel() if written is not None else np.zeros(len(cells), np.uint8)
            what = shadow, by, row, write, strength, number
            ordered = np.sort(offsets[places])
            if (np.diff(ordered) >= span).all():
                self._join(cells, np.repeat(warps, span), np.repeat(lanes, span), values, offsets[places], span, *what)
                continue
            for warp in np.unique(warps).tolist():
                of_warp = warps == warp
                cells_, inverse = np.unique(cells.reshape(-1, span)[of_warp].ravel(), return_inverse=True)
                together = np.zeros(len(cells_), np.uint32)
                np.bitwise_or.at(together, inverse, np.repeat(lanes[of_warp], span))
                first = np.unique(inverse, return_index=True)[1]
                starts = offsets[places][of_warp]
                where = (starts[:, None] + np.arange(span)).ravel()[first]
                values_ = values.reshape(-1, span)[of_warp].ravel()
                if write and strength == 0 and (different := values_ != values_[first][inverse]).any():
                    self._report("write-write", number, number, by, int(where[inverse[different][0]]), shadow)
                self._join(cells_, np.full(len(cells_), warp), together, values_[first], where, 1, *what)

    def _join(
        self, cells: np.ndarray, warps: np.ndarray, lanes: np.ndarray, values: np.ndarray, offsets: np.ndarray,
        span: int, shadow: Shadow, by: Threads, row: _Row, write: bool, strength: int, site: int,
    ) -> None:  # fmt: skip
        """Checks accesses of distinct cells against those before, and puts them among them."""
        single = (lanes & (lanes - np.uint32(1))) == 0
        fewest = row.reshape(-1, 32).min(1) if len(row) else row
        entries = shadow.head[cells]
        open_ = np.flatnonzero(entries >= 0)
        entries, before = entries[open_], np.full(len(open_), -1, np.int32)
        while open_.size:
            unknown = np.zeros(len(entries), np.uint32)
            late = np.flatnonzero(fewest[shadow.warp[entries] >> 5] < shadow.epoch[entries])
            if late.size:
                there = entries[late]
                behind = row[shadow.warp[there][:, None] + _LANES] < shadow.epoch[there][:, None]
                unknown[late] = (behind.astype(np.uint32) << _LANES).sum(1, dtype=np.uint32) & shadow.lanes[there]
            same_warp = shadow.warp[entries] == warps[open_]
            own = same_warp & single[open_] & (unknown & ~lanes[open_] == 0)
            ordered = (unknown == 0) | own
            wrote = shadow.write[entries]
            conflicts = np.flatnonzero(~ordered & (wrote | write))
            if conflicts.size:
                there = entries[conflicts]
                # Several threads hold it, and each stores it.
                same = (shadow.site[there] == site) & (self._program_of[shadow.warp[there]] == by.number)
                same &= shadow.write[there] & (shadow.value[there] == values[open_[conflicts]]) & (strength == 0)
                conflicts = conflicts[~(same | self._strong(shadow, there, by, strength))]
                for place in conflicts[:64].tolist():
                    kind = ("write-" if wrote[place] else "read-") + ("write" if write else "read")
                    other = int(shadow.site[entries[place]])
                    self._report(
                        kind, site, other, by, int(offsets[open_[place] // span] + open_[place] % span), shadow
                    )
            redone = same_warp & (shadow.lanes[entries] & ~lanes[open_] == 0)
            gone = (ordered | redone) & (write | ~wrote)
            if strength:
                gone &= shadow.strength[entries] == strength
            following = shadow.next[entries]
            if gone.any():
                shadow.remove(entries[gone], before[gone], cells[open_[gone]])
            before = np.where(gone, before, entries)
            further = following >= 0
            open_, entries, before = open_[further], following[further], before[further]
        shadow.add(
            cells, warp=warps, lanes=lanes, epoch=by.epoch, strength=strength, write=write, site=site, value=values
        )

    def _strong(self, shadow: Shadow, entries: np.ndarray, by: Threads, strength: int) -> np.ndarray:
        """Which accesses and the one of this strength are morally strong to each other."""
        theirs, warps = shadow.strength[entries], shadow.warp[entries]
        needed = np.where(self._rank_of[warps] == by.rank, 2, 3)
        needed[self._program_of[warps] == by.number] = 1
        return (theirs > 0) & (theirs >> 2 == strength >> 2) & (theirs & 3 >= needed) & (strength & 3 >= needed)

    def _report(self, kind: str, site: int, other: int, by: Threads, offset: int, shadow: Shadow) -> None:
        names = list(self._sites)
        where = self._name_of(offset) if shadow is self.memory else f"shared memory+{offset:#x}"
        self.found.setdefault(
            (kind, names[other], names[site]),
            f"{kind} race at {where}: {names[other]}, and then, on rank {by.rank}, {names[site]}",
        )

    # ---------------------------------------------------------------- synchronisation

    def release(
        self, shadow: Shadow, by: Threads, thread: int, offset: int, scope: str, order: str, keeps: bool
    ) -> None:
        """A strong write by a thread has happened. `keeps`: it is a read-modify-write, or its compare has failed."""
        cell = int(shadow.cells(np.array([offset]), 1)[0])
        earlier = shadow.released.get(cell, []) if keeps else []
        if order in ("release", "acq_rel"):
            earlier = [*earlier, (by.releasable(thread), SCOPES[scope], by, thread)]
            by.epoch += 1
        elif thread in by.fences:
            row, fenced = by.fences[thread]
            earlier = [*earlier, (row, min(SCOPES[scope], SCOPES[fenced]), by, thread)]
        shadow.released[cell] = earlier
        shadow.synchronised[cell] = True

    def acquire(self, shadow: Shadow, by: Threads, thread: int, offset: int, scope: str, order: str) -> None:
        """A strong read by a thread happens."""
        cell = int(shadow.cells(np.array([offset]), 1)[0])
        for row, released, other, source in shadow.released.get(cell, ()):
            needed = 1 if other.number == by.number else 2 if other.rank == by.rank else 3
            if min(released, SCOPES[scope]) < needed or (other is by and source == thread):
                continue
            if order in ("acquire", "acq_rel"):
                by.learn(thread, row)
            else:
                by.observed.setdefault(thread, []).append(row)
