"""A variable that cannot be used on one rank, or another version there, is told to all ranks when they meet."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

import thinwire as tw
from thinwire.comm import Communicator
from thinwire.errors import ArgumentError, ConfigMismatch, ThinwireError
from thinwire.testing import run_ranks

UNUSABLE = {
    "THINWIRE_WIRE": ("int9", "unknown wire format 'int9'; accepted: none, int8"),
    "THINWIRE_BACKEND": ("cuda", "names no backend; accepted: triton, numba, torch"),
    "THINWIRE_ARRIVE_SCOPE": ("cta", "'cta' in the environment; accepted: gpu, sys"),
    "THINWIRE_COLLECTIVE_LAUNCHES": ("2", "'2' in the environment; accepted: several, one"),
    "THINWIRE_CPU_THREADS": ("many", "expected 1 to 1024"),
    "THINWIRE_LOG": ("loud", "expected one of debug, info, warning, error"),
}


def _meet(comm: Communicator) -> list[str]:
    told = []
    for name, (value, _) in UNUSABLE.items():
        if comm.rank == 1:
            os.environ[name] = value
        with pytest.raises(ThinwireError) as caught:
            Communicator(comm.group, timeout=2.0)
        told.append(f"{type(caught.value).__name__}: {caught.value}")
        os.environ.pop(name, None)
        comm.barrier()
    Communicator(comm.group).barrier()
    return told


def test_a_variable_that_one_rank_cannot_use_is_told_to_all_with_its_rank() -> None:
    first, second = run_ranks(_meet, 2)
    assert first == second
    for text, (name, (_, accepted)) in zip(first, UNUSABLE.items(), strict=True):
        assert text.startswith("ArgumentError: rank 1: ") and name in text and accepted in text


def test_alone_it_is_told_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_WIRE", "int9")
    for join in (tw.init, lambda: run_ranks(lambda comm: None, 1, mode="thread")):
        with pytest.raises(ArgumentError, match="THINWIRE_WIRE in the environment: unknown wire format 'int9'"):
            join()
    assert not dist.is_initialized()


def _other_version(comm: Communicator, name: str, other: object) -> str:
    if comm.rank == 1:
        for module in [module for key, module in sys.modules.items() if key.startswith("thinwire")]:
            if hasattr(module, name):
                setattr(module, name, other)
    with pytest.raises(ConfigMismatch) as caught:
        Communicator(comm.group, timeout=2.0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "other", "told"), [("WIRE_VERSION", 99, "wire_version: 2 on rank 0; 99"), ("VERSION", "9.9", "'9.9'")]
)
def test_ranks_of_another_version_make_no_communicator(name: str, other: object, told: str) -> None:
    first, second = run_ranks(_other_version, 2, name, other)
    assert first == second and told in first and "on rank 1" in first


_WITHOUT_JIT = """
import torch, thinwire as tw
with tw.init(device="cpu", timeout=60) as comm:
    x = torch.arange(64.0).view(2, 32)
    try:
        tw.all_reduce(x, comm=comm, transport="direct")
    except tw.TransportUnavailable as error:
        print(error)
    print(tw.all_reduce(x, comm=comm)[1, -1].item(), "all_reduce" in comm.explain())
    with tw.ExpertParallel(comm, 2, 1, 32, 8) as ep:
        d = ep.dispatch(x, torch.tensor([[0], [1]]), torch.ones(2, 1))
        print(ep.transport, ep.combine(d.tokens, d).shape)
    if comm.rank:
        print(tw.dequantize(tw.quantize(torch.ones(2, 32)))[0, 0].item())
"""


def test_a_rank_whose_numba_compiles_nothing_has_all_stage_and_says_why() -> None:
    pytest.importorskip("numba", reason="ranks of the CPU need numba")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    ranks = []
    for rank in range(2):
        environ = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environ |= {"NUMBA_DISABLE_JIT": "1"} if rank else {}
        program = [sys.executable, "-c", _WITHOUT_JIT]
        ranks.append(subprocess.Popen(program, env=environ, text=True, stdout=-1, stderr=-1))
    (first, _), (second, errors) = (rank.communicate(timeout=180) for rank in ranks)
    expected = "cannot take the direct transport: NUMBA_DISABLE_JIT is set on rank 1\n126."
    assert expected in first and second.startswith(first.partition("\n")[0]), errors
    assert "staged torch.Size([2, 32])" in first and second.endswith("0.99993896484375\n"), errors
