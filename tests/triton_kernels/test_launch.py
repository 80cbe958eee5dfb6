"""Launches of kernels that a `Launcher` has kept launch what Triton would, on a GPU that is not there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("triton", reason="launching kernels needs Triton")

import torch
import triton
import triton.language as tl
from triton.runtime import JITFunction

from tests.helpers.rounds import make_lanes
from tests.helpers.stub_driver import Launched, StubDriver, needs_stub, stub_driver
from thinwire import first_run
from thinwire.comm.communicator import Communicator
from thinwire.testing import run_ranks
from thinwire.triton_kernels import all_to_all_v, collective, combine, dispatch, permute
from thinwire.triton_kernels.launch import Launcher
from thinwire.triton_kernels.leg_layout import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    SIGNATURE_WORDS,
    Endpoint,
    Job,
    LegLayout,
)
from thinwire.triton_kernels.record import RecordLayout
from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH
from thinwire.triton_kernels.small_collective import in_one_launch
from thinwire.wire import WireFormat

pytestmark = needs_stub
COUNTS = (0, 1, 2, 16, -1, -(2**31), 2**31 - 1, 2**31, -(2**31) - 1, 2**40, 2**63 - 1, 2**63)
STRIDES = (0, 1, 2, 8, 16, 17, 32, -16, 2**31 - 1, 2**31, 2**31 + 16, 2**40, 2**40 + 1)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8)


@triton.jit(do_not_specialize=["first", "second"])
def copy(x_ptr, other_ptr, stride, first, second, staying_ptr, fixed, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    if other_ptr is not None:
        tl.store(other_ptr, first)
    values = tl.load(x_ptr + places * stride, mask=places < first)
    tl.store(staying_ptr + places + fixed, values.to(tl.int32), mask=places < second)


def launcher(staying: torch.Tensor, fixed: int = 3, counts: tuple[str, ...] = ("first", "second")) -> Launcher:
    given = {"staying_ptr": staying, "fixed": fixed, "BLOCK": 16}
    return Launcher(copy, ("x_ptr", "other_ptr"), ("stride",), counts, given, staying, True, num_warps=1)


def differing(stub: StubDriver, staying: torch.Tensor, launch: Launcher, given: tuple[Any, ...]) -> str | None:
    """What the driver was told twice by a launcher, and then by Triton, if that was not all the same.

    Kernels are given uint8 as int8.
    """
    tensors, strides, counts = given
    first = stub.num_launches
    launch(2, 1, *given)
    launch(2, 1, *given)
    in_bytes = [x.view(torch.int8) if x is not None and x.dtype == torch.uint8 else x for x in tensors]
    copy[(2, 1)](*in_bytes, *strides, *counts, staying, 3, BLOCK=16, num_warps=1)
    one, two, wanted = stub.launched(first)
    return None if one == two == wanted else f"{given}: {one}, {two}, Triton: {wanted}"


def problems(comm: Communicator, thorough: bool) -> list[str]:
    """Of values of each argument, with the same launcher, in an order in which each kind has been seen before."""
    memory = torch.zeros(4096, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :]
    staying = torch.zeros(16, dtype=torch.int32)
    xs = [memory[offset:].view(dtype) for dtype in DTYPES for offset in (0, 8, 16) if offset % dtype.itemsize == 0]
    given: list[tuple[Any, ...]] = [((x, None), (16,), (1, count)) for x in xs[:2] for count in (5, 2**40)]
    if thorough:
        given += [((x, other), (16,), (1, 16)) for x in xs for other in (None, xs[0], xs[1])]
        given += [((xs[0], None), (stride,), (5, 5)) for stride in STRIDES]
        given += [((xs[0], None), (16,), (first, second)) for first in COUNTS for second in (7, 2**40)]
        given += [((xs[0], None), (16,), (7, second)) for second in COUNTS]
    with stub_driver() as stub:
        launch = launcher(staying)
        found = [differing(stub, staying, launch, values) for values in [*given, *reversed(given)]]
    return [problem for problem in found if problem is not None]


@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["few", "all"])
def test_no_kernel_is_launched_with_what_another_was_compiled_for(thorough: bool) -> None:
    assert run_ranks(problems, 1, thorough, timeout=300)[0] == []


def kernels_said(comm: Communicator) -> list[str]:
    said: list[str] = []

    @contextlib.contextmanager
    def say(kernel: str) -> Iterator[None]:
        said.append(kernel)
        yield

    staying, x = torch.zeros(16, dtype=torch.int32), torch.zeros(64)
    with stub_driver(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_run, "compiling", say)
        launch = launcher(staying)
        for offset in (0, 0, 1, 0, 1):
            launch(2, 1, (x[offset:], None), (16,), (1, 5))
    return said


def test_each_new_kernel_is_said_once() -> None:
    assert run_ranks(kernels_said, 1)[0] == ["copy"] * 2  # of two alignments


def asked(comm: Communicator) -> tuple[list[int], list[int], list[Launched]]:
    """How often Triton was asked: for two launches, for two with a hook, for two where another device is current."""
    staying, x, times = torch.zeros(16, dtype=torch.int32), torch.zeros(64), []
    run, hooked = JITFunction.run, []

    def counted(kernel: Any, *args: Any, **named: Any) -> Any:
        times.append(stub.num_launches)
        return run(kernel, *args, **named)

    with stub_driver() as stub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", counted)
        launch = launcher(staying)
        first, numbers = stub.num_launches, []

        def twice() -> None:
            times.clear()
            for _ in range(2):
                launch(2, 1, (x, None), (16,), (1, 1))
            numbers.append(len(times))

        twice()
        hook = triton.knobs.runtime.launch_enter_hook
        hook.add(lambda metadata: hooked.append(metadata.get()["stream"]))
        twice()
        hook.calls.clear()
        stub.stream += 1
        twice()
        stub.device = 1
        twice()
        return numbers, hooked, stub.launched(first)


def test_triton_is_asked_once_and_where_there_are_hooks_and_streams_are_the_current_ones() -> None:
    numbers, hooked, launched = run_ranks(asked, 1)[0]
    assert numbers == [1, 2, 0, 1]
    assert len(hooked) == 2
    streams = [launch.stream - launched[0].stream for launch in launched]
    assert streams == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [launch.device for launch in launched] == [0] * 6 + [1] * 2


def of_a_round() -> Callable[[], None]:
    """Every kernel of a round."""
    lane = make_lanes(8, 64, 4, 256, 16)[3]
    x, ids = torch.randn(5, 256).bfloat16(), torch.randint(-1, 64, (5, 4))
    weights, rows, dropped = torch.rand(5, 4), torch.randn(64, 256).bfloat16(), torch.empty((), dtype=torch.bool)

    def launch() -> None:
        dispatch.send_tokens(lane, x, ids, weights, tag=5)
        dispatch.wait(lane, DISPATCH, 10.0, 1.0)
        permute.route(lane)
        permute.gather(lane, rows, dropped)
        combine.send_sums(lane, rows, torch.bfloat16)
        dispatch.wait(lane, COMBINE, 10.0, 1.0)
        combine.sum_home(lane, x)
        dispatch.close_round(lane)

    return launch


def _end() -> Endpoint:
    layout = LegLayout.of(8, 4096, 2)
    return Endpoint.of(layout, 3, torch.zeros(layout.NUM_BYTES, dtype=torch.uint8), torch.arange(8) * 2**32)


def of_collectives() -> Callable[[], None]:
    """Every kernel of collectives, with a signature of 64 bits and tensors that begin anywhere."""
    end, wire = _end(), WireFormat.parse("int8")
    x, part = torch.zeros(8 * 1024 + 1).bfloat16(), torch.zeros(1025).bfloat16()
    parts = torch.stack((torch.full((8,), 1024), torch.arange(8) * 1024))

    def launch() -> None:
        for number, (op, first) in enumerate(((ALL_REDUCE, 0), (REDUCE_SCATTER, 1), (ALL_GATHER, 1))):
            job = Job(op, (2**62 + number, -1, 1, 16), parts, 1, 1024, wire, wire, torch.bfloat16, 2)
            collective.send(end, job, (part if op == ALL_GATHER else x)[first:], 0)
            if op != ALL_GATHER:
                collective.reduce(end, job, part[first:] if op == REDUCE_SCATTER else None, 0, 10.0, 1.0)
            if op != REDUCE_SCATTER:
                collective.gather_recv(end, job, x[first:], 0, 10.0, 1.0)
            shared = part if op == ALL_GATHER else x, part if op == REDUCE_SCATTER else x
            in_one_launch(end, job, *(tensor[first:] for tensor in shared), 10.0, 1.0, 8)

    return launch


def of_all_to_all_v() -> Callable[[], None]:
    """Every kernel of all-to-all-v, with counts of 32 and of 64 bits."""
    end, wire = _end(), WireFormat.parse("int8")
    rows, exact = torch.zeros(9, 256).bfloat16(), torch.zeros(512, dtype=torch.uint8)
    layout, signature = RecordLayout.of(wire, 256, torch.bfloat16), torch.arange(SIGNATURE_WORDS)

    def launch() -> None:
        for count in (1, 16, 2**40, 2**41):
            all_to_all_v.note(end, ([count] * 8, [0] * 8), ([3] * 8, [count] * 8), 1, 7)
        for number in (0, 1):
            for form, moved, step in ((layout, rows, 256), (None, exact, 16), (None, exact[1:], 17)):
                all_to_all_v.send(end, moved, step, form, False, signature, number, 2)
                all_to_all_v.recv(end, moved, step, form, False, number, 2)
            for reason in (all_to_all_v.HEADERS, all_to_all_v.ROOM, all_to_all_v.PIECES):
                all_to_all_v.wait(end, reason, number, signature, True, 10.0, 1.0)

    return launch


def three_times(
    comm: Communicator, made: Callable[[], Callable[[], None]]
) -> tuple[list[Launched], list[Launched], list[Launched], int]:
    """What the driver is told: the first time, the second, and by Triton alone; how often Triton was asked then."""
    with stub_driver() as stub, pytest.MonkeyPatch.context() as patch:
        launch, asked_for = made(), []
        run_kernel = JITFunction.run

        def counted(kernel: Any, *args: Any, **named: Any) -> Any:
            asked_for.append(kernel)
            return run_kernel(kernel, *args, **named)

        patch.setattr(JITFunction, "run", counted)

        def run() -> list[Launched]:
            asked_for.clear()
            first = stub.num_launches
            launch()
            return stub.launched(first)

        ours = run(), run()
        times = len(asked_for)
        patch.setattr(Launcher, "__call__", by_triton)
        return *ours, run(), times


def by_triton(launch: Launcher, programs: int, blocks: int = 1, *changing: Any) -> None:
    launch._launch_by_triton(programs, blocks, *(*changing, (), (), ())[:3])


@pytest.mark.parametrize(
    ("made", "launches"),
    [
        pytest.param(of_a_round, 9, marks=pytest.mark.exhaustive),
        pytest.param(of_collectives, 5 + 3 + 3 + 3, marks=pytest.mark.exhaustive),
        (of_all_to_all_v, 4 + 2 * (3 * 2 + 3)),
    ],
)
def test_kernels_are_launched_as_by_triton(made: Callable[[], Callable[[], None]], launches: int) -> None:
    first, second, tritons, asked_again = run_ranks(three_times, 1, made, timeout=300)[0]
    assert len(first) == launches
    assert first == second == tritons
    assert asked_again == 0


def profiled(comm: Communicator) -> list[int]:
    """Which function was launched before, while and after a profiler has its own compiled, and which by Triton then."""
    staying, x = torch.zeros(16, dtype=torch.int32), torch.zeros(64)
    knobs = triton.knobs

    def hook(metadata: Any) -> None:
        """A profiler's."""

    with stub_driver() as stub:
        launch = launcher(staying)
        launch(2, 1, (x, None), (16,), (1, 1))
        knobs.runtime.launch_enter_hook.add(hook)
        knobs.compilation.instrumentation_mode = "a profiler's"
        launch(2, 1, (x, None), (16,), (1, 1))
        knobs.runtime.launch_enter_hook.remove(hook)
        knobs.compilation.instrumentation_mode = ""
        launch(2, 1, (x, None), (16,), (1, 1))
        copy[(2, 1)](x, None, 16, 1, 1, staying, 3, BLOCK=16, num_warps=1)
        return [launched.function for launched in stub.launched(0)]


def test_what_was_compiled_for_a_profiler_is_not_launched_without_it() -> None:
    before, profiled_one, after, by_triton = run_ranks(profiled, 1)[0]
    assert before == after == by_triton != profiled_one


def hooks_of_other_kinds(comm: Communicator) -> tuple[list[object], int]:
    staying, x, hooked = torch.zeros(16, dtype=torch.int32), torch.zeros(64), []
    with stub_driver() as stub, pytest.MonkeyPatch.context() as patch:
        launch = launcher(staying)
        for hook in (None, hooked.append):
            patch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
            for _ in range(2):
                launch(2, 1, (x, None), (16,), (1, 1))
        return [metadata.get()["name"] for metadata in hooked], stub.num_launches


def test_a_hook_may_also_be_a_function_or_none() -> None:
    assert run_ranks(hooks_of_other_kinds, 1)[0] == (["copy", "copy"], 4)


def test_parameters_in_another_order_and_counts_that_are_specialised_on_are_refused() -> None:
    staying = torch.zeros(16, dtype=torch.int32)
    with pytest.raises(ValueError, match="first"):
        launcher(staying, counts=("second", "first"))
    with pytest.raises(ValueError, match="do_not_specialize"):
        Launcher(copy, ("x_ptr", "other_ptr"), (), ("stride",), {}, staying, True)
