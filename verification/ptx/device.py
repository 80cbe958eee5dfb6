"""The GPUs of all ranks: launchers run as they are, and what they launch runs here, as the PTX that Triton makes of it.

A device runs a rank's launches one after the other, and those of different ranks together:

    device = Device(ranks=2, races=True)
    device.register("rank 0's buffer", buffer)       # what kernels reach through addresses alone
    with device.patch(queued=True):
        for device.rank, lane in enumerate(lanes):
            send_tokens(lane, ...)
    device.run_queued()
    assert not device.races.found

Compiled kernels come from Triton's own cache, in `TRITON_CACHE_DIR`, by the source of the kernel and of all that it
calls, the types, constants and alignment of its arguments, the options, the GPU, and Triton itself.

What this cannot tell: what the assembler makes of the PTX, and the schedules that were not drawn. Times are reckoned.
Kernels of a rank follow each other as on one stream; memory is consistent for all at once, so that a missing order is a
race and seldom a wrong value.
"""

from __future__ import annotations

import itertools
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime import JITFunction

from verification.ahead_of_time.harness import Launch, compile_launch
from verification.ptx.block import Block
from verification.ptx.errors import PtxError
from verification.ptx.latencies import L2_BYTES
from verification.ptx.memory import GlobalMemory
from verification.ptx.meter import Clock, Launched
from verification.ptx.program import Program, parse
from verification.ptx.races import Races
from verification.ptx.state import State

#: Changes a kernel's PTX, given its name, before it runs.
Edit = Callable[[str, str], str]


@dataclass(frozen=True)
class _Prepared:
    """A launch that is compiled and has its arguments."""

    program: Program
    shared_bytes: int
    arguments: dict[str, int]
    grid: tuple[int, ...]  # three numbers

    @property
    def programs(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


def _is_constant(kernel: Any, name: str, value: Any) -> bool:
    """Whether Triton compiles an argument into the kernel."""
    parameter = kernel.params[kernel.arg_names.index(name)]
    one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
    return parameter.is_constexpr or value is None or one


def _bits(value: Any) -> int:
    """An argument as a parameter holds it."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return struct.unpack("<I", struct.pack("<f", value))[0] if isinstance(value, float) else int(value)


class Device:
    """A GPU for each rank, all in this process.

    Args:
        target: what to compile for, of `verification.ahead_of_time.harness.TARGETS`, NVIDIA's.
        ranks: how many.
        races: look for data races, which `races.found` then has.
        edit: changes a kernel's PTX before it runs.
        seed: of the order in which programs, and warps with "any order", go on.
        warps: "together", each program's all at once, or "any order", one at a time.
        metered: take the time and the bytes of launches, with warps "together".

    Attributes:
        rank: whose launches those to come are.
        chosen: which programs of a launch run, by its kernel and how many there are; None: all.
        meters: of the launches that were metered, in their order.
        l2_bytes: larger tensors are not in the L2 cache, where times are taken.
        compiled: what Triton made of each kernel, by its name, for the last launch of it.
        clock_step: nanoseconds that go by from one look at the global timer to the next.
        most_steps: turns that programs of one run may take before it counts as stuck.
        launches: of each kernel.
        instructions: that warps have executed, by name.
        executed: how often warps have executed each instruction of a kernel's code.
    """

    def __init__(
        self, target: str = "sm_90", ranks: int = 1, races: bool = False, edit: Edit | None = None, seed: int = 0,
        warps: str = "together", metered: bool = False,
    ) -> None:  # fmt: skip
        if warps not in ("together", "any order"):
            raise ValueError(f'expected warps "together" or in "any order", got {warps!r}')
        self.target, self.ranks, self.edit = target, ranks, edit
        self.memory = GlobalMemory()
        self.races = Races(self.memory.name_of) if races else None
        self.metered = metered
        self.meters: list[Launched] = []
        self.l2_bytes = L2_BYTES
        self.rank = 0
        self.chosen: Callable[[str, int], Sequence[int]] | None = None
        self.compiled: dict[str, Any] = {}
        self.clock_step = 1000
        self.most_steps = 5_000_000
        self.launches: Counter[str] = Counter()
        self.instructions: Counter[str] = Counter()
        self.executed: dict[Program, np.ndarray] = {}
        self._any_order = warps == "any order"
        self._random = random.Random(seed)
        self._now = 0
        self._queue: list[tuple[int, _Prepared | Callable[[], Iterator[None] | None]]] = []

    def register(self, name: str, tensor: torch.Tensor) -> None:
        """Lets kernels reach a tensor's memory, and names it in messages. Arguments of launches need not be."""
        self.memory.add(tensor, name)

    @contextmanager
    def patch(self, queued: bool = False) -> Iterator[None]:
        """Within it, what launchers launch runs here: at once, or, `queued`, in `run_queued`."""

        def run(kernel: Any, *positional: Any, grid: Any, warmup: bool, **named: Any) -> None:
            arguments = dict(zip(kernel.arg_names, positional, strict=False))
            arguments |= {name: value for name, value in named.items() if name in kernel.arg_names}
            options = {name: value for name, value in named.items() if name not in kernel.arg_names}
            compiled = compile_launch(Launch(kernel, arguments, options), self.target)
            self.compiled[compiled.metadata.name] = compiled
            ptx = compiled.asm["ptx"]
            self.launch(
                self.edit(compiled.metadata.name, ptx) if self.edit else ptx,
                {name: value for name, value in arguments.items() if not _is_constant(kernel, name, value)},
                grid(arguments) if callable(grid) else grid,
                compiled.metadata.shared,
                queued,
            )

        with mock.patch.object(JITFunction, "run", run):
            yield

    def call(self, function: Callable[[], Iterator[None] | None]) -> None:
        """Queues what the host, or somebody else's kernel, does between launches of this rank, maybe in turns."""
        self._queue.append((self.rank, function))

    def launch(
        self, ptx: str, arguments: dict[str, Any], grid: tuple[int, ...] = (1,), shared_bytes: int = 0,
        queued: bool = False,
    ) -> None:  # fmt: skip
        """Launches the kernel in a PTX file on GPU `rank`.

        Args:
            arguments: tensors and numbers, in the order of its parameters, with names for messages.
            shared_bytes: of shared memory, beside what the PTX itself declares.
        """
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"expected a rank below {self.ranks}, got {self.rank}")
        program = parse(ptx)
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                self.memory.add(value, name)
        # Behind a kernel's own parameters Triton puts pointers to scratch memory, which these kernels do not use.
        values = itertools.chain(map(_bits, arguments.values()), itertools.repeat(0))
        bound = dict(zip((name for name, _ in program.parameters), values, strict=False))
        launch = _Prepared(program, shared_bytes, bound, (*grid, 1, 1)[:3])
        if queued:
            self._queue.append((self.rank, launch))
        else:
            self._run([(self.rank, launch)])

    def run_queued(self) -> None:
        """Runs what is queued: a rank's launches in their order, different ranks' together."""
        launches, self._queue = self._queue, []
        self._run(launches)

    def begin_queued(self) -> Iterator[None]:
        """What is queued of the current rank, to be run turn by turn by who takes them; without races."""
        launches, self._queue = self._queue, []
        return self._stream(self.rank, [launch for _, launch in launches])

    def look_at_clock(self) -> int:
        """What the global timer says, in nanoseconds."""
        self._now += self.clock_step
        return self._now

    def _run(self, launches: list[tuple[int, _Prepared | Callable[[], Iterator[None] | None]]]) -> None:
        if self.races is not None:
            self.races.memory.resize(self.memory.size)
            for rank, launch in launches:
                if isinstance(launch, _Prepared):
                    self.races.reserve(rank, launch.programs * launch.program.threads)
        streams = [
            self._stream(rank, [mine for other, mine in launches if other == rank]) for rank in range(self.ranks)
        ]
        with np.errstate(all="ignore"):
            steps = 0
            while streams:
                stream = self._random.choice(streams)
                steps += 1
                if steps > self.most_steps:
                    raise PtxError(f"no end after {self.most_steps} turns")
                if next(stream, self) is self:
                    streams.remove(stream)

    def _choose(self, running: dict[Iterator[None], Block]) -> Iterator[None]:
        """Who goes on."""
        if self.metered:  # in the order of their times, as a look that comes too early takes time for nothing
            return min(running, key=lambda turn: running[turn].clock.cycles)
        return self._random.choice(list(running))

    def _stream(self, rank: int, launches: list[_Prepared | Callable[[], Iterator[None] | None]]) -> Iterator[None]:
        """A rank's launches; its turns are those of its programs."""
        for launch in launches:
            if not isinstance(launch, _Prepared):
                yield from launch() or ()
                continue
            self.launches[launch.program.name] += 1
            clocks = None
            if self.races is not None:
                clocks = self.races.begin(rank, launch.programs, launch.program.threads)
            meter = Launched(launch.program.name, rank, launch.programs, self.l2_bytes) if self.metered else None
            numbers: Sequence[int] = range(launch.programs)
            if self.chosen is not None:
                numbers = self.chosen(launch.program.name, launch.programs)
            blocks = []
            for number in numbers:
                width, height, _ = launch.grid
                place = (number % width, number // width % height, number // width // height)
                state = State(
                    launch.program, launch.arguments, place, launch.grid, self.memory, launch.shared_bytes, self.races,
                    clocks[number] if clocks else None, self.look_at_clock,
                )  # fmt: skip
                blocks.append(Block(state, self._random if self._any_order else None, meter and Clock(state, meter)))
            running = {block.run(): block for block in blocks}
            while running:
                turn = self._choose(running)
                if next(turn, self) is self:
                    del running[turn]
                else:
                    yield
            for block in blocks:
                self.instructions += block.counts
                executed = self.executed.setdefault(launch.program, np.zeros(len(launch.program.code), np.int64))
                executed += block.executed
            if meter:
                meter.end({number: block.clock for number, block in zip(numbers, blocks, strict=True)})
                self.meters.append(meter)
            if self.races is not None and clocks is not None:
                self.races.end(clocks)
