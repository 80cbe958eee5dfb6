"""Launches that do not ask Triton launch what Triton would, on a GPU that is not there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="launching kernels needs Triton")

import torch
import triton
import triton.language as tl
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import JITFunction

from tests.helpers.rounds import make_lanes
from tests.helpers.stub_driver import Launched, StubDriver, stub_driver
from thinwire.comm.communicator import Communicator
from thinwire.testing import run_ranks
from thinwire.triton_kernels import combine, dispatch, permute
from thinwire.triton_kernels.launch import Launcher, _lowest_launch
from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="Triton's launcher is compiled by a C compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stub is for machines without CUDA's driver"),
]
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


def hostile(comm: Communicator) -> list[str]:
    """Every value of each argument, with the same launcher, in an order in which each kind has been seen before."""
    memory = torch.zeros(4096, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :]
    staying = torch.zeros(16, dtype=torch.int32)
    xs = [memory[offset:].view(dtype) for dtype in DTYPES for offset in (0, 8, 16) if offset % dtype.itemsize == 0]
    given = [((x, other), (16,), (1, 16)) for x in xs for other in (None, xs[0], xs[1])]
    given += [((xs[0], None), (stride,), (5, 5)) for stride in STRIDES]
    given += [((xs[0], None), (16,), (first, second)) for first in COUNTS for second in (7, 2**40)]
    given += [((xs[0], None), (16,), (7, second)) for second in COUNTS]
    with stub_driver() as stub:
        launch = launcher(staying)
        found = [differing(stub, staying, launch, values) for values in [*given, *reversed(given)]]
    return [problem for problem in found if problem is not None]


@pytest.mark.exhaustive
def test_no_kernel_is_launched_with_what_another_was_compiled_for() -> None:
    assert run_ranks(hostile, 1, timeout=300)[0] == []


def few_values(comm: Communicator) -> list[str]:
    staying, x = torch.zeros(16, dtype=torch.int32), torch.zeros(64)
    with stub_driver() as stub:
        launch = launcher(staying)
        given = [((x[offset:], None), (16,), (1, count)) for offset in (0, 1) for count in (5, 2**40)]
        found = [differing(stub, staying, launch, values) for values in given]
        wrapped = [entry for entry in launch._compiled.values() if isinstance(entry[1], CudaLauncher)]
        # Of versions that do it otherwise, launches cost more, and somebody should know.
        found += [f"Triton's Python is called for {len(wrapped)} kinds of launch"] if wrapped else []
    return [problem for problem in found if problem is not None]


def test_an_alignment_or_a_width_that_is_new_gets_a_kernel_of_its_own() -> None:
    assert run_ranks(few_values, 1)[0] == []


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


def a_round(comm: Communicator) -> tuple[list[Launched], list[Launched], list[Launched]]:
    """What the driver is told of the kernels of a round: the first time, the second, and by Triton alone."""
    with stub_driver() as stub:
        lane = make_lanes(8, 64, 4, 256, 16)[3]
        x, ids = torch.randn(5, 256).bfloat16(), torch.randint(-1, 64, (5, 4))
        weights, rows, dropped = torch.rand(5, 4), torch.randn(64, 256).bfloat16(), torch.empty((), dtype=torch.bool)

        def run() -> list[Launched]:
            first = stub.num_launches
            dispatch.send_tokens(lane, x, ids, weights, tag=5)
            dispatch.wait(lane, DISPATCH, 10.0, 1.0)
            permute.route(lane)
            permute.gather(lane, rows, dropped)
            combine.send_sums(lane, rows, torch.bfloat16)
            dispatch.wait(lane, COMBINE, 10.0, 1.0)
            combine.sum_home(lane, x)
            dispatch.close_round(lane)
            return stub.launched(first)

        ours = run(), run()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Launcher, "__call__", by_triton)
            return *ours, run()


def by_triton(launch: Launcher, programs: int, blocks: int = 1, *changing: Any, now: object = None) -> None:
    launch._launch_by_triton(programs, blocks, *(*changing, (), (), ())[:3])


@pytest.mark.exhaustive
def test_kernels_of_a_round_are_launched_as_by_triton() -> None:
    first, second, tritons = run_ranks(a_round, 1, timeout=300)[0]
    assert len(first) == 10
    assert first == second == tritons


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


class _Wrapper:
    """What Triton makes for a kernel, around a function that launches; `order` says what that is given."""

    def __init__(self, order: Callable[..., tuple[Any, ...]]) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.order, self.called = order, 0
        self.launch: Any = lambda *values: self.launched.append(values)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        self.called += 1
        self.launch(*self.order((x, y, z, stream, function), rest[:4], rest[4:]))


@pytest.mark.parametrize("order,as_tuple,without", [
    (lambda start, always, arguments: (*start, False, *always, "signature", arguments), True, True),
    (lambda start, always, arguments: (*start, False, None, *always, *arguments), False, True),
    (lambda start, always, arguments: (*start, *always, object(), arguments), False, False),  # memory of its own
    (lambda start, always, arguments: (start[3], *start, *always, *arguments), False, False),
    (lambda start, always, arguments: (*start, *always, *reversed(arguments)), False, False),
    (lambda start, always, arguments: (*start[:3], start[4], start[3], *always, arguments), False, False),
])  # fmt: skip
def test_a_wrapper_is_left_out_where_it_adds_what_is_always_the_same(
    order: Callable[..., tuple[Any, ...]], as_tuple: bool, without: bool
) -> None:
    wrapper = _Wrapper(order)
    launch, between, packed = _lowest_launch(wrapper, "metadata")
    assert wrapper.launched == []
    assert packed == as_tuple
    assert (launch is wrapper.launch) == without
    arguments = 7, 8, 9
    launch(2, 3, 1, 4, 5, *between, *([arguments] if packed else arguments))
    wrapper(2, 3, 1, 4, 5, "metadata", None, None, None, *arguments)
    one, other = wrapper.launched
    assert [x for x in one if type(x) is not object] == [x for x in other if type(x) is not object]


def test_what_has_no_function_below_is_launched_as_it_is() -> None:
    assert _lowest_launch(print, "metadata") == (print, ("metadata", None, None, None), False)
