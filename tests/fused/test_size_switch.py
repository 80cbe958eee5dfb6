"""wire="auto": one threshold for all ranks, measured once, stored, shown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import torch

from thinwire.comm.communicator import Communicator
from thinwire.errors import ConfigMismatch, ThinwireError, WireFormatError
from thinwire.fused import size_switch
from thinwire.fused.all_gather import all_gather, all_gather_v
from thinwire.fused.all_reduce import all_reduce
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.reduce_scatter import reduce_scatter
from thinwire.fused.size_switch import CACHE_VARIABLE, THRESHOLD_VARIABLE, SizeSwitch
from thinwire.testing import run_ranks


def _is_exact(comm: Communicator, size: int) -> bool:
    """Whether an "auto" all-reduce of `size` float32 elements came out exactly."""
    x = torch.linspace(0.1, 3.7, size)
    exact = all_reduce(x, wire="none", comm=comm)
    quantized = all_reduce(x, wire="int8", comm=comm)
    got = all_reduce(x, wire="auto", comm=comm)
    assert torch.equal(got, exact) or torch.equal(got, quantized)
    return torch.equal(got, exact)


def _forced(comm: Communicator) -> list[bool]:
    found = [_is_exact(comm, size) for size in (250, 2500)]
    x = torch.linspace(0.1, 3.7, comm.size * 500)
    for call in (all_gather, reduce_scatter, all_to_all_v):
        for tensor, spec in ((x, "int8" if x.nbytes >= 4000 else "none"), (x[: comm.size * 2], "none")):
            assert torch.equal(call(tensor, wire="auto", comm=comm), call(tensor, wire=spec, comm=comm))
    largest = all_reduce(x, op="max", wire="auto", gather_wire="auto", comm=comm)  # only sums are quantised
    assert torch.equal(largest, all_reduce(x, op="max", wire="none", comm=comm))
    assert torch.equal(largest, all_reduce(x, op="max", wire="none", gather_wire="auto", comm=comm))
    assert f"all_reduce float32 auto int8: 4000, as {THRESHOLD_VARIABLE} says" in comm.explain()
    return found


@pytest.mark.parametrize("mode", ("process", "thread"))
def test_small_messages_go_exactly_and_large_ones_quantised(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mode == "process":
        assert run_ranks(_forced, 2, env={THRESHOLD_VARIABLE: "4000"}) == [[True, False]] * 2
    else:
        monkeypatch.setenv(THRESHOLD_VARIABLE, "\x1f4000 ")  # which strip() takes for spaces, and int() does not
        assert run_ranks(_forced, 2, mode=mode) == [[True, False]] * 2


def _measured(comm: Communicator) -> tuple[int | None, str]:
    _is_exact(comm, 1000)
    switch = comm.attached("size_switch")
    assert isinstance(switch, SizeSwitch)
    (threshold,) = switch._thresholds.values()
    return threshold, comm.explain()


def test_a_threshold_is_measured_agreed_on_stored_and_found_again(tmp_path: Path) -> None:
    env = {CACHE_VARIABLE: str(tmp_path)}
    first = run_ranks(_measured, 3, env=env)
    assert len({threshold for threshold, _ in first}) == 1, "ranks would take different paths"
    assert f"kept in {tmp_path}" in first[0][1] and "kept by rank 0" in first[1][1]
    (entries,) = json.loads((tmp_path / "size_switch.json").read_text()).values()
    (entry,) = entries.values()
    assert entry["threshold"] == first[0][0]
    assert [int(size) for size in entry["seconds"]] == list(size_switch.SIZES)
    # What is on file is what counts, at rank 0.
    text = (tmp_path / "size_switch.json").read_text()
    content = json.loads(text)
    next(iter(next(iter(content.values())).values()))["threshold"] = 123456
    (tmp_path / "size_switch.json").write_text(json.dumps(content))
    again = run_ranks(_measured, 3, env=env)
    assert [threshold for threshold, _ in again] == [123456] * 3
    assert "123456, measured in an earlier run" in again[2][1]
    # A file that is none does not stop anyone, nor does a folder that cannot be.
    for nonsense in (b"{", b"\xff\xfe", b"[1]", json.dumps(dict.fromkeys(content, 7)).encode()):
        (tmp_path / "size_switch.json").write_bytes(nonsense)
        assert "kept in" in run_ranks(_measured, 1, env=env)[0][1]
    (tmp_path / "of folders" / "size_switch.json").mkdir(parents=True)
    explained = run_ranks(_measured, 1, env={CACHE_VARIABLE: str(tmp_path / "of folders")})[0][1]
    assert "not stored" in explained and len(list((tmp_path / "of folders").iterdir())) == 1
    (tmp_path / "taken").write_text("")
    explained = run_ranks(_measured, 1, env={CACHE_VARIABLE: str(tmp_path / "taken" / "deeper")})[0][1]
    assert "not stored" in explained


def _refused(comm: Communicator) -> None:
    x = torch.ones(comm.size * 4)
    with pytest.raises(WireFormatError, match="messages of one size on all ranks"):
        all_gather_v(x, wire="auto", comm=comm)
    with pytest.raises(WireFormatError, match="messages of one size on all ranks"):
        all_to_all_v(x, [4] * comm.size, wire="auto", comm=comm)
    assert torch.equal(all_reduce(x.long(), wire="auto", comm=comm), x.long() * comm.size), "integers go exactly"


def test_messages_of_different_sizes_are_refused() -> None:
    run_ranks(_refused, 2, mode="thread")


def _bad_threshold(comm: Communicator) -> None:
    with pytest.raises(ThinwireError, match="expected a number of bytes"):
        all_reduce(torch.ones(4), wire="auto", comm=comm)


def test_a_threshold_that_is_none_is_refused() -> None:
    run_ranks(_bad_threshold, 1, env={THRESHOLD_VARIABLE: "4k"})


def _differing(comm: Communicator) -> None:
    import os

    os.environ[THRESHOLD_VARIABLE] = str(1000 * comm.rank)
    with pytest.raises(ConfigMismatch, match=THRESHOLD_VARIABLE):
        all_reduce(torch.ones(4), wire="auto", comm=comm)


def _liar(comm: Communicator, shape: list[Any], lie: Any) -> None:
    """Rank 0 sends something else of this shape."""
    honest = comm.all_gather_data
    if comm.rank == 0:
        comm.all_gather_data = lambda own, wanted: honest(lie if wanted == shape else own, wanted)  # type: ignore[method-assign]
    with pytest.raises(ThinwireError) as caught:
        all_reduce(torch.ones(4), wire="auto", comm=comm)
    assert re.match(
        r"rank 0 (has .* on file|sent what is no measurement; expected 2 lists of 2 seconds)", str(caught.value)
    )


SAMPLES = [[]], [[1.0], [1.0]], [[1.0, 1.0]], [[1.0, 1.0], [1.0, -1.0]], [[1.0, 1.0]] * 3


@pytest.mark.parametrize("lie", SAMPLES, ids=str)
def test_measurements_that_are_none_are_refused(lie: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(size_switch, "SIZES", (4096,))
    monkeypatch.setattr(size_switch, "ROUNDS", 2)
    run_ranks(_liar, 2, [[float]], lie, mode="thread")


@pytest.mark.parametrize("lie", [[1, 2], [-1], [None, None]], ids=str)
def test_thresholds_on_file_that_are_none_are_refused(lie: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(_liar, 2, size_switch._STORED, lie, mode="thread")


def test_ranks_that_are_told_different_thresholds_all_refuse() -> None:
    run_ranks(_differing, 2)
