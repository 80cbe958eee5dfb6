"""What `thinwire warmup` compiles is what ranks on such a GPU look for: Triton's own keys, and its own cache."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

import torch
import triton

import thinwire as tw
from tests.helpers.round_kernels import rounds_of_triton
from tests.helpers.rounds import make_lanes
from tests.helpers.speeds import exhaustive_but
from tests.helpers.stub_driver import needs_stub, stub_driver
from thinwire.comm.communicator import Communicator
from thinwire.comm.memory.symmetric import allocate
from thinwire.fused.channel import channel_layout
from thinwire.fused.collective import DirectCollectives, collective_layout
from thinwire.fused.device_channel import DeviceChannel
from thinwire.moe.config import ParallelSettings
from thinwire.testing import run_ranks
from thinwire.tools.warmup.compile import _Later, collect, find_target
from thinwire.tools.warmup.configuration import Configuration
from thinwire.tools.warmup.cpu import cpu_kernels
from thinwire.triton_kernels import LAUNCHES_VARIABLE, combine, dispatch, permute
from thinwire.triton_kernels.expert_gemm import INNER_WIRE, expert_gemm
from thinwire.triton_kernels.int8_weights import Int8Weights
from thinwire.triton_kernels.launch import settle_cache_keys
from thinwire.triton_kernels.list_records import list_records
from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH
from thinwire.wire import WireFormat

SIZES = "--ranks 4 --experts 13 --top-k 3 --hidden 512 --max-tokens 24".split()


@dataclass(frozen=True)
class Sizes:
    """Of a round; 13 experts on 4 ranks, one of which owns more."""

    wire: str = "int8"
    dtype: torch.dtype = torch.bfloat16
    id_dtype: torch.dtype = torch.int64
    align: int = 1
    backward: bool = False
    rank: int = 0

    def configuration(self, **changed: Any) -> Configuration:
        settings = ParallelSettings.of(
            13, 3, 512, 24, wire=self.wire, combine_wire=None, grad_wire=self.wire, transport="auto", lanes=1,
            align=self.align, num_programs=None, timeout=None, dtype=self.dtype,
        )  # fmt: skip
        made = Configuration(settings, 4, self.dtype, self.backward)
        return replace(made, settings=replace(settings, **changed))

    def __call__(self, comm: Communicator | None = None) -> None:
        """Launches one round of one rank, on tensors that have memory."""
        lane = make_lanes(
            4, 13, 3, 512, 24, self.wire, align=self.align, dtype=self.dtype,
            weight_grads=self.backward,
        )[self.rank]  # fmt: skip
        x, ids = torch.zeros(7, 512, dtype=self.dtype), torch.zeros(7, 3, dtype=self.id_dtype)
        grads = (lane.weights, ids.float()) if self.backward else (None, None)
        dispatch.send_tokens(lane, x, ids, ids.float(), tag=9)
        dispatch.wait(lane, DISPATCH, 30.0, 1.0)
        permute.route(lane)
        records = torch.zeros(31, 3, dtype=torch.int64), torch.zeros(31, 3), torch.zeros(31, 2, dtype=torch.int64)
        list_records(lane, *records)
        permute.gather(lane, x.new_zeros(31, 512), torch.tensor(False))
        combine.send_sums(lane, torch.zeros(33, 512), self.dtype, None, grads[0])
        dispatch.wait(lane, COMBINE, 30.0, 1.0)
        combine.sum_home(lane, x, grads[1])
        dispatch.close_round(lane)


def _collected(comm: Communicator, configuration: Configuration) -> set[str]:
    return set(collect(configuration.launch, find_target("sm_90")))


def _asked_for(comm: Communicator, call: Callable[[Communicator], None]) -> set[str]:
    """Keys of what a rank launches, as Triton makes them on a GPU, for which the stub stands."""
    settle_cache_keys()  # as ranks do with a GPU
    with stub_driver(), triton.AsyncCompileMode(_Later()) as mode:
        call(comm)
    return {sha256(key.encode()).hexdigest() for key in mode.future_kernels}


def _round(comm: Communicator) -> None:
    with (
        rounds_of_triton(),
        tw.ExpertParallel(comm, 13, 3, 512, 24, wire="int8", transport="direct", timeout=30) as ep,
    ):
        rounds: Any = ep._assembly.rounds
        rounds.on_gpu = True
        d = ep.dispatch(torch.zeros(7, 512).bfloat16(), torch.zeros(7, 3, dtype=torch.int64), torch.zeros(7, 3))
        rows, _ = d.gather(16)
        ep.combine(rows, d)
        rounds.on_gpu = False


def _collectives(comm: Communicator) -> None:
    layout = collective_layout(1, on_gpu=True)
    transport = DirectCollectives(allocate(comm, layout.NUM_BYTES), layout, 0, 30.0)
    comm.attached("collectives", lambda: transport)
    transport.on_gpu = True
    with mock.patch("thinwire.fused.collective.uses_triton", lambda _: True):
        for size in (100, 70_000, 700_000):  # the first two in one launch
            x = torch.zeros(size).bfloat16()
            tw.all_reduce(x, wire="int8", comm=comm, transport="direct")
            tw.all_reduce(x, wire="int8", gather_wire="none", comm=comm, transport="direct")
            tw.all_gather(x, wire="int8", comm=comm, transport="direct")
            tw.reduce_scatter(x, wire="int8", comm=comm, transport="direct")
    transport.on_gpu = False


def _channel(comm: Communicator) -> None:
    layout = channel_layout(1, on_gpu=True)
    channel = DeviceChannel(allocate(comm, layout.NUM_BYTES), layout, 0, 30.0)
    comm.attached("all_to_all_v", lambda: channel)
    channel.on_gpu, channel.always_looks = True, False
    with mock.patch("thinwire.fused.all_to_all.uses_triton", lambda _: True):
        for wire in ("int8", "none"):
            tw.all_to_all_v(torch.zeros(40_000, 512).bfloat16(), [40_000], [40_000], wire=wire, comm=comm)
    channel.on_gpu = False


def _int8_experts(comm: Communicator) -> None:
    wire, experts, offsets = WireFormat.parse("int8"), torch.randn(13, 512, 96), torch.zeros(14, dtype=torch.int64)
    for rows in (7, 4000):
        records = torch.zeros(rows, wire.row_bytes(512), dtype=torch.uint8)
        inner = torch.zeros(rows, INNER_WIRE.row_bytes(96), dtype=torch.uint8)
        index, out = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, 512).bfloat16()
        expert_gemm(records, wire, index, offsets, Int8Weights.of(experts, experts), inner, INNER_WIRE)
        expert_gemm(records, wire, index, offsets, Int8Weights.of(experts, activate=True), inner, INNER_WIRE)
        expert_gemm(inner, INNER_WIRE, None, offsets, Int8Weights.of(experts.transpose(1, 2)), out)


ROUNDS = [
    Sizes(),
    Sizes(rank=3),
    Sizes(dtype=torch.float16),
    Sizes("none", torch.float32, torch.int32, align=16),
    Sizes("int8:row", backward=True),
]
#: Calls, what they need, and how many kernels they launch at least.
CALLS: list[tuple[Callable[[Communicator], None], dict[str, Any], int]] = [
    (_round, {}, 10),
    (_collectives, {"collectives": True}, 18),
    (_channel, {"all_to_all_v": True}, 9),
    (_int8_experts, {"int8_experts": 96}, 6),
]


def _found(call: Callable[[Communicator], None], configuration: Configuration) -> tuple[set[str], set[str]]:
    """The kernels that a call asks for, and those that are compiled ahead."""
    env = {LAUNCHES_VARIABLE: "one"}
    (collected,) = run_ranks(_collected, 1, configuration, env=env)
    (asked,) = run_ranks(_asked_for, 1, call, env=env)
    return asked, collected


@pytest.mark.parametrize("sizes", exhaustive_but(ROUNDS[:1], ROUNDS), ids=str)
@needs_stub
def test_every_kernel_of_a_round_is_among_them_by_its_key(sizes: Sizes) -> None:
    asked, collected = _found(sizes, sizes.configuration())
    assert len(asked) == 10 and asked <= collected


@pytest.mark.parametrize(("call", "beside", "least"), CALLS, ids=[call.__name__ for call, *_ in CALLS])
@needs_stub
def test_calls_of_the_library_ask_for_nothing_else(
    call: Callable[[Communicator], None], beside: dict[str, Any], least: int
) -> None:
    asked, collected = _found(call, replace(Sizes().configuration(), ranks=1, **beside))
    assert len(asked) >= least and asked <= collected


@pytest.mark.parametrize("changed", [{"max_tokens": 25}, {"align": 2}, {"num_experts": 14}], ids=str)
@needs_stub
def test_what_kernels_know_at_compile_time_must_be_what_ranks_have(changed: dict[str, int]) -> None:
    asked, collected = _found(Sizes(), Sizes().configuration(**changed))
    assert not asked <= collected


def _compiled(comm: Communicator, sizes: Sizes, folder: str) -> list[tuple[str, bool]]:
    """What a rank launches from such a cache, and whether it was there."""
    found: list[tuple[str, bool]] = []

    def listen(*, src: Any, cache_hit: bool, **rest: object) -> None:
        found.append((src.name, cache_hit))

    settle_cache_keys()
    triton.knobs.cache.dir, triton.knobs.compilation.listener = folder, listen
    with stub_driver() as stub:
        before = stub.num_launches
        sizes()
        assert stub.num_launches - before == len(found)
    return found


def _warmed(*options: str, cache: Path | None = None) -> str:
    """What the command prints."""
    command = [sys.executable, "-m", "thinwire", "warmup", *SIZES, *options]
    environment = os.environ | ({} if cache is None else {"TRITON_CACHE_DIR": str(cache)})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive
@needs_stub
def test_a_round_after_it_compiles_nothing_and_before_it_everything(tmp_path: Path) -> None:
    options, cache = ["--wire", "int8", "--arch", "sm_90", "--jobs", "2"], tmp_path / "cache"
    printed = _warmed(*options, cache=cache)
    assert f"MiB in {cache}" in printed and " and 0 found there" in printed
    for folder, there in (cache, True), (tmp_path / "other", False):
        (found,) = run_ranks(_compiled, 1, Sizes(), str(folder))
        assert len(found) == 10 and all(hit == there for _, hit in found), found
    assert "\n0 compiled and " in _warmed(*options, cache=cache)


@pytest.mark.exhaustive
def test_kernels_for_cpu_ranks_are_all_there_after_it() -> None:
    _warmed("--heap", "posix")
    found = re.search(r"of any sizes: 0 compiled and (\d+) found there", _warmed("--heap", "posix"))
    assert found is not None and int(found[1]) == len(cpu_kernels()) > 20
