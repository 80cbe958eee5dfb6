"""What is compiled before a call of the direct transport waits for anybody, on a stand-in for a GPU.

Tensors are the CPU's, launches are recorded, and torch.cuda is replaced as far as the transport asks it. So these tests
say which kernels would be launched when, and what the host would wait for; not what a GPU does.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton", reason="compiled kernels need Triton")

import torch
from torch.overrides import TorchFunctionMode
from triton.runtime import JITFunction

import thinwire as tw
from tests.helpers.round_kernels import rounds_of_triton
from thinwire.comm.communicator import Communicator
from thinwire.comm.memory.symmetric import allocate
from thinwire.errors import ThinwireError
from thinwire.fused.channel import channel_layout
from thinwire.fused.collective import DirectCollectives, collective_layout
from thinwire.fused.device_channel import DeviceChannel
from thinwire.fused.direct_transport import DirectTransport, compiled_for
from thinwire.fused.pulled_legs import open_legs
from thinwire.moe.direct import DirectRounds
from thinwire.moe.dispatched import Dispatched
from thinwire.testing import run_ranks
from thinwire.triton_kernels.launch import Launcher
from thinwire.triton_kernels.round_layout import ABANDONED
from verification.ahead_of_time.harness import Launch, specialise

HIDDEN, TOKENS = 96, 40
TIMEOUT = 30.0


class Stream(torch.Stream):
    """A stream that is not there, and what it waited for. It compares as CUDA's do: it is not unequal to None."""

    def __new__(cls) -> Stream:
        return super().__new__(cls, device="cpu")

    def __init__(self) -> None:
        self.waited: list[Stream] = []
        self.cuda_stream = id(self)

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)

    def synchronize(self) -> None:
        pytest.fail("the host waits for a stream")


class _NothingWaits(TorchFunctionMode):
    """Fails where the host would wait for a stream: also an element that is assigned a number is copied from there."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = (torch.Tensor.__setitem__, torch.Tensor.cpu, torch.Tensor.item, torch.Tensor.tolist)
        assert function not in waits, f"{function.__name__} waits for the stream"
        return function(*args, **(kwargs or {}))


class Device:
    """A GPU that is not there: what was launched on it, first for preparing, and then for the call itself."""

    def __init__(self) -> None:
        self.prepared: list[Launch] = []
        self.launched: list[Launch] = []
        self.capturing = False
        self.stream = Stream()
        self.transport: Any = None
        self._into = self.launched

    def run(self, kernel: Any, *positional: Any, grid: Any, warmup: bool, **named: Any) -> None:
        arguments = dict(zip(kernel.arg_names, positional, strict=False))
        arguments |= {name: value for name, value in named.items() if name in kernel.arg_names}
        options = {name: value for name, value in named.items() if name not in kernel.arg_names}
        self._into.append(Launch(kernel, arguments, options))

    def load_kernels(self, transport: DirectTransport, key: object, launch: Callable[[], None], lane: int = 0) -> None:
        def marked() -> None:
            self._into = self.prepared
            with _NothingWaits():
                launch()
            self._into = self.launched

        _load_kernels(transport, key, marked, lane)

    def seconds_of_waits(self) -> list[float]:
        """Time limits of the waits of calls, without what was only prepared."""
        names = "timeout_ns"
        return [launch.arguments[names] / 1e9 for launch in self.launched if names in launch.arguments]


_load_kernels = DirectTransport.load_kernels


def _kind(launch: Launch) -> str:
    """What the just-in-time compiler would compile for a launch."""
    return repr((launch.kernel.__name__, specialise(launch, "sm_90"), launch.options))


@contextlib.contextmanager
def _round(comm: Communicator) -> Iterator[tuple[DirectTransport, Callable[[torch.dtype, int], object]]]:
    with (
        rounds_of_triton(),
        tw.ExpertParallel(comm, 4, 2, HIDDEN, TOKENS, transport="direct", timeout=TIMEOUT) as ep,
    ):
        rounds: Any = ep._assembly.rounds
        ids, weights = torch.zeros(TOKENS, 2, dtype=torch.int64), torch.zeros(TOKENS, 2)

        def call(dtype: torch.dtype, first: int) -> None:
            x = torch.zeros(TOKENS * HIDDEN + 16, dtype=dtype)[first:][: TOKENS * HIDDEN].view(TOKENS, HIDDEN)
            d = ep.dispatch(x, ids, weights)
            rows, _ = d.gather(TOKENS)
            # What experts gave may begin anywhere, and lie apart.
            expert_out = torch.zeros(TOKENS, HIDDEN + 11, dtype=dtype)[:, first : HIDDEN + first]
            ep.combine(expert_out, d, out=x if first else None)

        yield rounds, call


@contextlib.contextmanager
def _collectives(comm: Communicator) -> Iterator[tuple[DirectTransport, Callable[[torch.dtype, int], object]]]:
    layout = collective_layout(1, 1 << 16)
    transport = DirectCollectives(allocate(comm, layout.NUM_BYTES), layout, 0, TIMEOUT)
    comm.attached("collectives", lambda: transport)

    def call(dtype: torch.dtype, first: int) -> None:
        x = torch.zeros(1 << 20, dtype=dtype)[first:]
        options = {"wire": "int8", "comm": comm, "transport": "direct"}
        tw.all_reduce(x, out=x, **options)
        tw.all_gather(x, **options)
        tw.reduce_scatter(x, **options)

    with mock.patch("thinwire.fused.collective.uses_triton", lambda comm: True):
        yield transport, call


@contextlib.contextmanager
def _channel(comm: Communicator) -> Iterator[tuple[DirectTransport, Callable[[torch.dtype, int], object]]]:
    layout = channel_layout(1, 1 << 16)
    channel = DeviceChannel(allocate(comm, layout.NUM_BYTES), layout, 0, TIMEOUT)
    channel.always_looks = False
    comm.attached("all_to_all_v", lambda: channel)

    def call(dtype: torch.dtype, first: int) -> None:
        for wire, width in (("int8", HIDDEN), ("int8", HIDDEN - 1), ("none", HIDDEN)):
            x = torch.zeros(width * TOKENS + 16, dtype=dtype)[first:][: width * TOKENS].view(TOKENS, width)
            tw.all_to_all_v(x, [TOKENS], [TOKENS], wire=wire, comm=comm, transport="direct")

    with mock.patch("thinwire.fused.all_to_all.uses_triton", lambda comm: True):
        yield channel, call


def _rounds_of(comm: Communicator) -> object:
    with rounds_of_triton(), tw.ExpertParallel(comm, 4, 2, HIDDEN, TOKENS, transport="direct") as ep:
        return ep._assembly.rounds


@contextlib.contextmanager
def _device_of(transport: DirectTransport) -> Iterator[Device]:
    """A device for a transport whose tensors are the CPU's."""
    device = Device()
    stand_ins = {
        "is_current_stream_capturing": lambda: device.capturing,
        "current_stream": lambda of=None: device.stream,
        "synchronize": lambda of=None: pytest.fail("the host waits for the device"),
        "Stream": lambda of=None: pytest.fail("a stream of torch's pool may be the one that a rank waits on"),
    }
    with contextlib.ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        raw_stream = "_cuda_getCurrentRawStream"  # which torch has where it is made for CUDA
        stack.enter_context(
            mock.patch.object(torch._C, raw_stream, lambda index: device.stream.cuda_stream, create=True)
        )
        stack.enter_context(mock.patch.object(JITFunction, "run", lambda *given, **named: device.run(*given, **named)))
        stack.enter_context(
            mock.patch.object(DirectTransport, "load_kernels", lambda *given: device.load_kernels(*given))
        )
        transport.on_gpu, device.transport = True, transport
        yield device
        transport.on_gpu = False


@pytest.fixture(params=[_round, _collectives, _channel], ids=["round", "collectives", "channel"])
def on_a_device(request: pytest.FixtureRequest) -> Iterator[tuple[Device, Callable[[torch.dtype, int], object]]]:
    """The device, and calls of a dtype whose tensors begin so many elements past a boundary."""
    with tw.init() as comm, request.param(comm) as (transport, call), _device_of(transport) as device:
        yield device, call


@pytest.fixture
def lanes_on_a_device() -> Iterator[tuple[Device, DirectRounds]]:
    """The device, and two lanes for gradients."""
    with (
        tw.init() as comm,
        rounds_of_triton(),
        tw.ExpertParallel(comm, 4, 2, HIDDEN, TOKENS, lanes=2, transport="direct") as ep,
    ):
        rounds: Any = ep._assembly._open(backward=True)
        with _device_of(rounds) as device:
            yield device, rounds
        rounds.close()


def _begin(rounds: DirectRounds, lane: int, tokens: int) -> Callable[[], Dispatched]:
    ids = torch.zeros(tokens, 2, dtype=torch.int64)
    return rounds.begin(lane, torch.zeros(tokens, HIDDEN), ids, torch.zeros(tokens, 2), 0)


def test_whatever_a_call_launches_was_compiled_before(on_a_device: Any) -> None:
    device, call = on_a_device
    for dtype in (torch.bfloat16, torch.float32):
        for first in (0, 1, 8):
            device.launched.clear()
            call(dtype, first)
            missing = {_kind(launch) for launch in device.launched} - {_kind(launch) for launch in device.prepared}
            assert device.launched and not missing, (dtype, first)


def test_a_call_that_was_never_made_cannot_be_captured(on_a_device: Any) -> None:
    device, call = on_a_device
    device.capturing = True
    with pytest.raises(ThinwireError, match="make a call like this one before a CUDA graph of it is captured"):
        call(torch.bfloat16, 0)
    assert not device.launched and not device.prepared
    device.capturing = False
    call(torch.bfloat16, 0)
    device.prepared.clear()
    device.capturing = True
    call(torch.bfloat16, 0)
    assert device.launched and not device.prepared


def test_preparing_takes_no_second_output_and_leaves_the_calls_alone(on_a_device: Any) -> None:
    device, call = on_a_device
    call(torch.bfloat16, 0)
    call(torch.bfloat16, 1)
    prepared, theirs = (
        [out for launch in launches if (out := launch.arguments.get("out_ptr")) is not None]
        for launches in (device.prepared, device.launched)
    )
    assert prepared and theirs and all(out.numel() <= HIDDEN for out in prepared)
    assert not {out.data_ptr() for out in prepared} & {out.data_ptr() for out in theirs}


def test_peers_that_compile_get_more_time_and_others_none(on_a_device: Any) -> None:
    device, call = on_a_device
    call(torch.bfloat16, 0)
    assert set(device.seconds_of_waits()) == {TIMEOUT + 120}
    device.launched.clear()
    call(torch.bfloat16, 0)
    assert set(device.seconds_of_waits()) == {TIMEOUT}


def test_rows_that_a_kernel_is_compiled_anew_for_are_told_apart() -> None:
    row, column = torch.zeros(100), torch.zeros(128, 1)
    for one, other in ((row.expand(4, 100), row.repeat(4, 1)), (column.T, torch.zeros(1, 128))):
        assert one.shape == other.shape and compiled_for(one) != compiled_for(other)


def test_a_call_on_another_stream_comes_behind_the_last_one_but_in_a_capture(on_a_device: Any) -> None:
    device, call = on_a_device
    first, second, captured = device.stream, Stream(), Stream()
    call(torch.bfloat16, 0)
    assert not first.waited
    device.stream = second
    call(torch.bfloat16, 0)
    call(torch.bfloat16, 0)
    assert second.waited == [first]
    device.stream, device.capturing = captured, True
    call(torch.bfloat16, 0)
    device.stream, device.capturing = second, False
    call(torch.bfloat16, 0)
    assert not captured.waited and second.waited == [first]


def test_a_round_that_is_closed_on_another_stream_comes_behind_its_dispatch(lanes_on_a_device: Any) -> None:
    device, rounds = lanes_on_a_device
    first, second = device.stream, Stream()
    _begin(rounds, 0, TOKENS)()
    device.stream = second
    waited: list[int] = []
    rounds.kernels = replace(rounds.kernels, close_round=lambda lane, end: waited.append(len(second.waited)))
    rounds.close_round(0, ABANDONED)
    assert waited == [1] and second.waited == [first]


def test_a_call_that_is_under_way_keeps_its_time_when_one_on_another_lane_begins(lanes_on_a_device: Any) -> None:
    device, rounds = lanes_on_a_device
    end = _begin(rounds, 0, TOKENS)
    other_end = _begin(rounds, 1, TOKENS)
    for finish in (end, other_end):
        finish()
    assert device.seconds_of_waits() == [rounds.timeout + 120, rounds.timeout]


def test_a_rank_that_loaded_kernels_lets_threads_that_share_the_device_come_as_far(on_a_device: Any) -> None:
    device, call = on_a_device
    theirs: dict[int, int] = {}
    device.transport.peers_calls = [device.transport.calls, theirs]
    seen: list[tuple[int, int]] = []

    def come() -> None:
        for steps in (1, 1 << 30):  # as far as the call, and with their kernels loaded, to the end
            time.sleep(0.2)
            seen.append((len(device.prepared), len(device.launched)))
            theirs[0] = steps

    peer = threading.Thread(target=come)
    peer.start()
    call(torch.bfloat16, 0)
    peer.join()
    assert seen[0] == (0, 0) and seen[1][0] > 0 and seen[1][1] == 0 and device.launched
    theirs.clear()
    call(torch.bfloat16, 0)  # with kernels that were loaded before


class _SharedDevice:
    """A GPU of ranks that are threads: a call's kernels end once every rank's have begun, and a load waits for them.

    As on an H100: loading waits for all that was launched before it, and what is launched meanwhile begins after it.
    """

    def __init__(self, ranks: int) -> None:
        self._changed = threading.Condition()
        self._begun: list[set[int]] = []  # ranks, of each call
        self._launched: list[tuple[int, int]] = []  # that have not begun
        self._ranks, self._loading = ranks, False

    def launch(self, rank: int, call: int) -> None:
        with self._changed:
            self._launched.append((rank, call))
            self._begin()

    def load(self) -> None:
        with self._changed:
            self._loading = True
            ended = self._changed.wait_for(lambda: all(len(ranks) == self._ranks for ranks in self._begun), 2.0)
            self._loading = False
            self._begin()
        assert ended, "a load waited for kernels that wait for one which was launched during the load"

    def _begin(self) -> None:
        if self._loading:
            return
        for rank, call in self._launched:
            while len(self._begun) <= call:
                self._begun.append(set())
            self._begun[call].add(rank)
        self._launched.clear()
        self._changed.notify_all()


class _Sharing(DirectTransport):
    """What `load_kernels` needs of a transport."""

    capturing = False  # type: ignore[assignment]

    def __init__(self) -> None:
        self.on_gpu, self._thread = True, threading.get_ident()
        self.calls, self._loaded, self._loading = {}, set(), set()

    def wait_seconds(self, lane: int = 0) -> float:
        return 4.0


@pytest.mark.parametrize("late", ["before loading", "before launching", "after launching"])
def test_threads_that_share_a_device_load_while_nothing_waits_there(late: str) -> None:
    ranks, calls = 3, 6
    device, meeting = _SharedDevice(ranks), threading.Barrier(ranks)
    transports: list[_Sharing | None] = [None] * ranks

    def run(rank: int) -> None:
        def wait_at(place: str) -> None:
            if rank == 1 and place == late:
                time.sleep(0.02)

        transport = transports[rank] = _Sharing()
        meeting.wait()
        transport.peers_calls = [end.calls for end in transports if end is not None]
        for call in range(calls):
            wait_at("before loading")
            transport.load_kernels(call // 2 * 2 + (call == 5), device.load)
            wait_at("before launching")
            device.launch(rank, call)
            wait_at("after launching")

    with ThreadPoolExecutor(ranks) as threads:
        for ended in [threads.submit(run, rank) for rank in range(ranks)]:
            ended.result()


def test_a_call_whose_kernels_could_not_be_loaded_can_be_made_again() -> None:
    transport = _Sharing()
    transport.peers_calls = [transport.calls]
    with pytest.raises(MemoryError):
        transport.load_kernels("a kernel", mock.Mock(side_effect=MemoryError))
    assert transport.calls == {0: 0}
    transport.load_kernels("a kernel", lambda: None)
    assert transport.calls == {0: 2}


@pytest.mark.parametrize("opened", [_collectives, _channel])
def test_what_is_kept_for_launches_goes_when_the_memory_is_closed(opened: Any) -> None:
    with tw.init() as comm, opened(comm) as (transport, call), _device_of(transport) as device:
        call(torch.bfloat16, 0)
        launchers = [weakref.ref(kept) for kept in transport._end.kept.values() if isinstance(kept, Launcher)]
        assert launchers
        device.prepared.clear(), device.launched.clear()
        gc.disable()  # memory that is left to the collector may be there for long
        try:
            transport.close()
            assert not any(launcher() for launcher in launchers)
        finally:
            gc.enable()


def test_in_another_thread_than_the_ranks_own_it_waits_for_nobody(on_a_device: Any) -> None:
    device, call = on_a_device
    device.transport.peers_calls = [device.transport.calls, {}]
    autograds = threading.Thread(target=call, args=(torch.bfloat16, 0))
    autograds.start()
    autograds.join(TIMEOUT / 2)
    assert not autograds.is_alive() and device.launched


def test_a_round_that_is_closed_counts_as_far_as_one_that_is_combined(lanes_on_a_device: Any) -> None:
    device, rounds = lanes_on_a_device
    rounds.peers_calls = [rounds.calls]
    _begin(rounds, 0, TOKENS)()
    rounds.close_round(0, ABANDONED)
    assert rounds.calls == {0: 4}


@pytest.mark.parametrize("open_end", [open_legs, _rounds_of])
def test_a_rank_that_closes_is_not_waited_for(on_a_device: Any, open_end: Callable[[Communicator], Any]) -> None:
    device, call = on_a_device
    ends = run_ranks(open_end, 2, mode="thread")
    assert [id(calls) for calls in ends[0].peers_calls] == [id(end.calls) for end in ends]
    device.transport.peers_calls = ends[0].peers_calls  # they closed when their ranks ended
    call(torch.bfloat16, 0)
    assert device.launched


def test_gradients_of_no_tokens_are_prepared_too(lanes_on_a_device: Any) -> None:
    device, rounds = lanes_on_a_device
    _begin(rounds, 0, 0)()
    grads = torch.zeros_like(rounds.lanes[0].weights), torch.empty(0, 2)
    rounds.begin_combine(0, torch.zeros(TOKENS, HIDDEN), torch.float32, torch.empty(0, HIDDEN), grads)()
    assert "sum_home_kernel" in {launch.kernel.__name__ for launch in device.prepared}
    assert [launch.kernel.__name__ for launch in device.launched][-2:] == ["send_sums_kernel", "wait_kernel"]
