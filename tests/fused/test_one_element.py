"""A tensor of one element is contiguous to torch whatever its strides are, and moves like any other."""

from __future__ import annotations

import pytest
import torch

from thinwire.comm.communicator import Communicator
from thinwire.errors import ArgumentError
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.codec import dequantize, quantize
from thinwire.fused.ops import all_gather
from thinwire.moe.parallel import ExpertParallel
from thinwire.octets import as_bytes
from thinwire.testing import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)


def lone(value: float, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (1,)) -> torch.Tensor:
    """One element, with strides that no view of its bytes may have."""
    strides = (5, 7, 3)[: len(shape)]
    return torch.empty_strided(shape, strides, dtype=torch.float64).fill_(value).to(dtype)


def lone_tensors(rank: int) -> list[torch.Tensor]:
    tensors = [lone(rank, dtype, (1,) * dim) for dtype in DTYPES for dim in (1, 2, 3)]
    number = lone(0, torch.complex64).fill_(complex(3, rank))
    return [*tensors, (torch.arange(8.0).view(4, 2) + rank)[:1, 0], number.conj(), number.conj().imag]


def move(comm: Communicator, transport: str) -> None:
    """To the right-hand neighbour, into new tensors and into outputs with strides as odd, and to everyone."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sends, receives = [0] * comm.size, [0] * comm.size
    sends[right] = receives[left] = 1
    everyone = [lone_tensors(rank) for rank in range(comm.size)]
    for number, x in enumerate(everyone[comm.rank]):
        assert x.is_contiguous() and x.stride(-1) != 1
        expected = everyone[left][number].tolist()
        out = torch.empty_strided(x.shape, [stride + 2 for stride in x.stride()], dtype=x.dtype)
        for recv_counts, target in ((receives, None), (None, None), (receives, out)):
            got = all_to_all_v(x, sends, recv_counts, out=target, wire="none", comm=comm, transport=transport)
            assert isinstance(got, torch.Tensor) and got.tolist() == expected and target in (None, got)
        rows = all_gather(x, wire="none", comm=comm, transport=transport)
        assert isinstance(rows, torch.Tensor)
        assert rows.tolist() == [row for tensors in everyone for row in tensors[number].tolist()]
        if x.is_conj() or x.is_neg():
            continue
        gathered = [torch.empty_strided(x.shape, out.stride(), dtype=x.dtype) for _ in range(comm.size)]
        comm.all_gather(gathered, x)
        assert [tensor.tolist() for tensor in gathered] == [tensors[number].tolist() for tensors in everyone]
        comm.broadcast(x, 0)
        assert x.tolist() == everyone[0][number].tolist()


@pytest.mark.parametrize("transport", ["staged", "direct"])
@pytest.mark.parametrize("mode", ["thread", "process"])
def test_one_element_travels_whatever_its_strides(mode: str, transport: str) -> None:
    run_ranks(move, 2, transport, mode=mode)


@pytest.mark.exhaustive
def test_one_element_travels_through_the_device_channel() -> None:
    run_ranks(move, 2, "direct", env={"THINWIRE_BACKEND": "triton", "TRITON_INTERPRET": "1"}, timeout=120)


def dispatch(comm: Communicator, wire: str, transport: str) -> None:
    """One token of one element at every rank, for the other rank's expert."""
    with ExpertParallel(comm, comm.size, 1, 1, 4, wire=wire, transport=transport) as ep:
        for dtype in (torch.float32, torch.bfloat16):
            ids = lone((comm.rank + 1) % comm.size, torch.int64, (1, 1))
            d = ep.dispatch(lone(2.0, dtype, (1, 1)), ids, lone(0.5, shape=(1, 1)))
            y = ep.combine(lone(4.0, dtype, (1, 1)), d, out=lone(0.0, dtype, (1, 1)))
            assert abs(float(y) - 2.0) < 0.01


@pytest.mark.parametrize("transport", ["staged", "direct"])
@pytest.mark.parametrize("wire", ["none", "int8"])
def test_a_round_of_one_element(wire: str, transport: str) -> None:
    run_ranks(dispatch, 2, wire, transport, timeout=120)


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_one_element_is_quantised(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_BACKEND", backend)
    for spec in ("none", "int8", "int8:row", "int4", "fp8"):
        assert abs(float(dequantize(quantize(lone(2.0, shape=(1, 1)), spec))) - 2.0) < 0.1


def test_bytes_share_their_tensors_storage() -> None:
    for shape in ((), (1,), (1, 1), (0, 3), (2, 3)):
        x = torch.ones(shape, dtype=torch.int32)
        as_bytes(x).fill_(1)
        assert as_bytes(x).shape == (x.nbytes,) and (x == 0x01010101).all()
    for strided in (torch.ones(2, 3).t(), torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2).to_sparse()):
        with pytest.raises(ArgumentError):
            as_bytes(strided)
