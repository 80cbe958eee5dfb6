"""What `thinwire warmup` compiles is what ranks on such a GPU look for: Triton's own keys, and its own cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

import torch
import triton

from tests.rounds import make_lanes
from tests.speeds import exhaustive_but
from tests.stub_driver import stub_driver
from thinwire.cli import main
from thinwire.comm.communicator import Communicator
from thinwire.moe.config import ParallelSettings
from thinwire.testing import run_ranks
from thinwire.triton_kernels import combine, dispatch, permute
from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH
from thinwire.warmup.collect import _Later, collect
from thinwire.warmup.launches import Configuration
from thinwire.warmup.target import find_target

needs_stub = pytest.mark.skipif(
    shutil.which("cc") is None or torch.cuda.is_available(), reason="the stub needs a C compiler, and no CUDA driver"
)
SIZES = "--ranks 4 --experts 13 --top-k 3 --hidden 512 --max-tokens 24".split()


@dataclass(frozen=True)
class Sizes:
    """Of a round; 13 experts on 4 ranks, one of which owns more."""

    wire: str = "int8"
    dtype: torch.dtype = torch.bfloat16
    id_dtype: torch.dtype = torch.int64
    align: int = 1
    checksums: bool = False
    backward: bool = False

    def configuration(self, **changed: Any) -> Configuration:
        settings = ParallelSettings.of(
            13, 3, 512, 24, wire=self.wire, combine_wire=None, grad_wire=self.wire, transport="auto", lanes=1,
            align=self.align, num_programs=None, timeout=None, dtype=self.dtype,
        )  # fmt: skip
        made = Configuration(settings, 4, (self.dtype,), self.checksums, self.backward)
        return replace(made, settings=replace(settings, **changed))

    def launch(self, rank: int = 0) -> None:
        """One round of one rank, on tensors that have memory."""
        lane = make_lanes(
            4, 13, 3, 512, 24, self.wire, align=self.align, dtype=self.dtype, checksums=self.checksums,
            weight_grads=self.backward,
        )[rank]  # fmt: skip
        x, ids = torch.zeros(7, 512, dtype=self.dtype), torch.zeros(7, 3, dtype=self.id_dtype)
        grads = (lane.weights, ids.float()) if self.backward else (None, None)
        dispatch.send_tokens(lane, x, ids, ids.float(), tag=9)
        dispatch.wait(lane, DISPATCH, 30.0, 1.0)
        permute.route(lane)
        permute.gather(lane, x.new_zeros(31, 512), torch.tensor(False))
        combine.send_sums(lane, torch.zeros(33, 512), self.dtype, None, grads[0])
        dispatch.wait(lane, COMBINE, 30.0, 1.0)
        combine.sum_home(lane, x, grads[1])
        dispatch.close_round(lane)


ROUNDS = [
    Sizes(),
    Sizes(checksums=True, dtype=torch.float16),
    Sizes("none", torch.float32, torch.int32, align=16),
    Sizes("int8:row", backward=True),
]


def _collected(comm: Communicator, configuration: Configuration) -> set[str]:
    return set(collect(configuration.launch, find_target("sm_90")))


def _wanted(comm: Communicator, sizes: Sizes, rank: int) -> set[str]:
    """Keys of what a rank launches, as Triton makes them on a GPU, for which the stub stands."""
    with stub_driver(), triton.AsyncCompileMode(_Later()) as mode:
        sizes.launch(rank)
    return {sha256(key.encode()).hexdigest() for key in mode.future_kernels}


def _compiled(comm: Communicator, sizes: Sizes, folder: str) -> list[tuple[str, bool]]:
    """What a rank launches from such a cache, and whether it was there."""
    found: list[tuple[str, bool]] = []

    def listen(*, src: Any, cache_hit: bool, **rest: object) -> None:
        found.append((src.name, cache_hit))

    triton.knobs.cache.dir, triton.knobs.compilation.listener = folder, listen
    with stub_driver() as stub:
        before = stub.num_launches
        sizes.launch()
        assert stub.num_launches - before == len(found)
    return found


@pytest.mark.parametrize("rank", exhaustive_but([0], [0, 3]))
@pytest.mark.parametrize("sizes", exhaustive_but(ROUNDS[:1], ROUNDS), ids=str)
@needs_stub
def test_every_kernel_of_a_round_is_among_them_by_its_key(sizes: Sizes, rank: int) -> None:
    (collected,) = run_ranks(_collected, 1, sizes.configuration())
    (wanted,) = run_ranks(_wanted, 1, sizes, rank)
    assert len(wanted) == 10 + sizes.checksums and wanted <= collected


@pytest.mark.parametrize("changed", [{"max_tokens": 25}, {"align": 2}, {"num_experts": 14}], ids=str)
@needs_stub
def test_what_kernels_know_at_compile_time_must_be_what_ranks_have(changed: dict[str, int]) -> None:
    (collected,) = run_ranks(_collected, 1, Sizes().configuration(**changed))
    (wanted,) = run_ranks(_wanted, 1, Sizes(), 0)
    assert not wanted <= collected


@pytest.mark.exhaustive
@needs_stub
def test_a_round_after_it_compiles_nothing_and_before_it_everything(tmp_path: Path) -> None:
    sizes, folder = Sizes(), tmp_path / "cache"
    command = [sys.executable, "-m", "thinwire", "warmup", *SIZES, "--arch", "sm_90", "--jobs", "2"]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_CACHE_DIR": str(folder)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert f"MiB in {folder}" in done.stdout and " and 0 found there" in done.stdout
    (found,) = run_ranks(_compiled, 1, sizes, str(folder))
    assert len(found) == 10 and all(hit for _, hit in found), found
    (found,) = run_ranks(_compiled, 1, sizes, str(tmp_path / "other"))
    assert len(found) == 10 and not any(hit for _, hit in found), found
    again = subprocess.run(
        command, env=os.environ | {"TRITON_CACHE_DIR": str(folder)}, capture_output=True, text=True, timeout=300
    )
    assert again.returncode == 0 and "\n0 compiled and " in again.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arch", "h100"], "arch is 'h100', expected one such as sm_90"),
        (["--arch", "gfx942"], "arch is 'gfx942', and this PyTorch is not for ROCm: expected one such as sm_90"),
        (["--arch", "sm_80", "--wire", "fp8"], "wire format 'fp8' needs a GPU of compute capability 8.9 or newer"),
        (["--arch", "sm_90", "--wire", "int9"], "int9"),
        (["--arch", "sm_90", "--jobs", "0"], "jobs is 0, expected an int of at least 1"),
        (["--arch", "sm_90", "--ranks", "73", "--transport", "direct"], "takes up to 72 ranks, and here are 73"),
        ([], "no GPU to compile for: name an arch, such as sm_90"),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_is_refused_by_name_before_anything_is(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["warmup", *SIZES, *options]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
