"""`wire="auto"`: small messages go unquantised, since quantising costs more time there than it saves.

From which size on quantising pays is measured in the first call that asks, by all ranks together, separately for each
operation, dtype and transport. All ranks decide from the same samples: with thresholds of their own they would take
different paths. The result is stored, and rank 0's file serves all in the next run on the same kind of machine.

    THINWIRE_CACHE        the folder that results are stored in; by default thinwire, in the user's cache folder
    THINWIRE_AUTO_BYTES   the threshold itself, for all operations, on all ranks; nothing is measured then
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from thinwire.comm import Communicator
from thinwire.comm.host_collectives import Attachment
from thinwire.comm.plain import OneOf, unique_keys
from thinwire.comm.tensors import read_int
from thinwire.errors import ThinwireError, WireFormatError
from thinwire.fused.backend import BACKEND_VARIABLE
from thinwire.fused.codec import FLOAT_DTYPES, resolve_wire
from thinwire.fused.transport import check_transport
from thinwire.triton_kernels.cpu import HAS_NUMBA
from thinwire.version import VERSION
from thinwire.wire import WireFormat

AUTO = "auto"
CACHE_VARIABLE = "THINWIRE_CACHE"
THRESHOLD_VARIABLE = "THINWIRE_AUTO_BYTES"

_KEY = "size_switch"
_FILE = "size_switch.json"
_STORED = [OneOf(int, None)]  # the shape of what is on file: nothing, or one threshold
#: Bytes of a rank's tensor that are tried.
SIZES = tuple(1 << power for power in range(12, 25, 2))
ROUNDS = 7


def is_auto(wire: object) -> bool:
    """Whether a wire was passed as "auto"; anything may be passed."""
    return isinstance(wire, str) and wire == AUTO


def resolve_wires(
    comm: Communicator,
    function: Callable[..., object],
    x: torch.Tensor,
    wires: Sequence[str | WireFormat | None],
    transport: str,
    alike: bool = True,
) -> list[WireFormat]:
    """The formats of a call's legs. Collective where one is "auto" and its threshold is not known yet.

    Args:
        function: the operation; it is measured with x, wire, comm and transport.
        x: a rank's tensor.
        wires: of the legs, as passed.
        alike: whether all ranks' messages have one size.
    """
    if not any(map(is_auto, wires)):
        return [resolve_wire(wire) for wire in wires]
    if not alike:
        raise WireFormatError(
            f'{function.__name__}: wire="auto" needs messages of one size on all ranks, which would take different '
            "paths otherwise; pass a wire format"
        )
    check_transport(transport)
    format_ = resolve_wire(None)
    chosen = format_ if format_.quantized else WireFormat.parse("int8")
    if x.dtype not in FLOAT_DTYPES:
        chosen = WireFormat("none")
    else:
        switch = comm.attached(_KEY, lambda: SizeSwitch(comm))
        threshold = switch.threshold(function, x.dtype, transport, chosen)
        if threshold is None or x.nbytes < threshold:
            chosen = WireFormat("none")
    return [chosen if is_auto(wire) else resolve_wire(wire) for wire in wires]


class SizeSwitch(Attachment):
    """The thresholds of one communicator."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._machine = _machine(comm)
        self._thresholds: dict[str, int | None] = {}
        self._origins: dict[str, str] = {}

    def threshold(
        self, function: Callable[..., object], dtype: torch.dtype, transport: str, wire: WireFormat
    ) -> int | None:
        """Bytes from which on a message is quantised; None: never."""
        what = function.__name__
        key = f"{what} {str(dtype).removeprefix('torch.')} {transport} {wire}"
        if key not in self._thresholds:
            comm = self._comm
            if comm.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise ThinwireError(
                    f'{what}: the first call with wire="auto" measures, which a CUDA graph cannot capture: make one '
                    "before"
                )
            with comm._settled_recorder().begin("choose_wire", details=("call", key)):
                self._find_threshold(key, function, dtype, transport, wire)
            comm._log(f'wire="auto": quantised from so many bytes on: {self._describe(key)}')
        return self._thresholds[key]

    def _find_threshold(
        self, key: str, function: Callable[..., object], dtype: torch.dtype, transport: str, wire: WireFormat
    ) -> None:
        """Measures a threshold, unless it is known otherwise. Collective."""
        comm, forced = self._comm, os.environ.get(THRESHOLD_VARIABLE)
        comm.require_same('wire="auto"', {THRESHOLD_VARIABLE: forced, "call": key})
        if forced:
            threshold = read_int(forced)
            if threshold is None:
                raise ThinwireError(
                    f"{THRESHOLD_VARIABLE} is {forced!r} in the environment, expected a number of bytes"
                )
            self._thresholds[key], self._origins[key] = threshold, f"as {THRESHOLD_VARIABLE} says"
            return
        # Everyone learns what rank 0 has on file.
        stored = comm.all_gather_data(self._load(key), _STORED)[0]
        if len(stored) > 1 or not all(_is_threshold(value) for value in stored):
            raise ThinwireError(f"rank 0 has {stored[:3]} on file for {key}, expected one number of bytes or none")
        if stored:
            self._thresholds[key], self._origins[key] = stored[0], "measured in an earlier run"
        else:
            call = functools.partial(function, comm=comm, transport=transport)
            samples = _measure(comm, dtype, wire, call)
            self._thresholds[key] = crossover(samples)
            self._origins[key] = "measured" + self._store(key, samples)

    def _load(self, key: str) -> list[int | None]:
        """The threshold on file, at rank 0, or nothing."""
        if self._comm.rank != 0:
            return []
        found = _read(_file()).get(self._machine, {}).get(key)
        if not isinstance(found, dict) or "threshold" not in found or not _is_threshold(found["threshold"]):
            return []
        return [found["threshold"]]

    def _store(self, key: str, samples: dict[int, tuple[float, float]]) -> str:
        """Keeps what was measured, at rank 0. Returns what is to be said of it."""
        if self._comm.rank != 0:
            return ", kept by rank 0"
        path = _file()
        if path is None:
            return f", not stored: there is no home folder, set {CACHE_VARIABLE}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = _read(path)
            content.setdefault(self._machine, {})[key] = {
                "threshold": crossover(samples),
                "seconds": {str(size): list(pair) for size, pair in samples.items()},
            }
            with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=path.parent) as folder:
                whole = Path(folder) / path.name
                whole.write_text(json.dumps(content, indent=1))
                os.replace(whole, path)  # whole, or not at all
        except OSError as error:
            return f", not stored: {error}"
        return f", kept in {path}"

    def describe(self) -> str:
        """Lines for `Communicator.explain`."""
        lines = ['wire="auto": quantised from so many bytes on']
        return "\n".join([*lines, *(f"  {self._describe(key)}" for key in self._thresholds)])

    def _describe(self, key: str) -> str:
        threshold = self._thresholds[key]
        return f"{key}: {'never' if threshold is None else threshold}, {self._origins[key]}"


def _is_threshold(value: object) -> bool:
    return value is None or (type(value) is int and 0 <= value < 2**63)


def crossover(samples: dict[int, tuple[float, float]]) -> int | None:
    """The smallest size from which on quantised messages were faster than exact ones; None if the largest was not.

    Args:
        samples: bytes to seconds of an exact and of a quantised call.

    >>> crossover({1024: (1.0, 2.0), 4096: (3.0, 2.0), 16384: (9.0, 4.0)})
    4096
    >>> crossover({1024: (1.0, 0.5), 4096: (1.0, 2.0)}) is None
    True
    """
    found = None
    for size in sorted(samples, reverse=True):
        exact, quantized = samples[size]
        if quantized >= exact:
            break
        found = size
    return found


def _measure(
    comm: Communicator, dtype: torch.dtype, wire: WireFormat, call: Callable[..., object]
) -> dict[int, tuple[float, float]]:
    """Seconds of exact and quantised calls on the slowest rank, medians of rounds in turn; the same on all ranks."""
    ways = WireFormat("none"), wire
    own: list[list[float]] = [[] for _ in range(len(SIZES) * len(ways))]  # by size, and for each size by way
    with torch.no_grad():
        for place, size in enumerate(SIZES):
            rows = max(1, size // dtype.itemsize // comm.size)
            x = torch.ones(comm.size * rows, dtype=dtype, device=comm.device)
            for number in range(-1, ROUNDS):
                for way, format_ in enumerate(ways):
                    _synchronise(comm)
                    start = time.perf_counter()
                    call(x, wire=format_)
                    _synchronise(comm)
                    if number >= 0:  # the first call compiles
                        own[len(ways) * place + way].append(time.perf_counter() - start)
    everyone = comm.all_gather_data(own, [[float]])
    for rank, samples in enumerate(everyone):
        if [len(taken) for taken in samples] != [ROUNDS] * len(own) or min(map(min, samples)) < 0:
            raise ThinwireError(
                f"rank {rank} sent what is no measurement; expected {len(own)} lists of {ROUNDS} seconds of at least 0"
            )
    # A call takes as long as on its slowest rank.
    medians = [statistics.median(map(max, zip(*of_ranks, strict=True))) for of_ranks in zip(*everyone, strict=True)]
    return {size: (medians[2 * place], medians[2 * place + 1]) for place, size in enumerate(SIZES)}


def _synchronise(comm: Communicator) -> None:
    if comm.device.type == "cuda":
        torch.cuda.current_stream(comm.device).synchronize()


def _file() -> Path | None:
    """Where results are kept; None where there is no home for them."""
    folder = os.environ.get(CACHE_VARIABLE)
    if folder:
        return Path(folder) / _FILE
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinwire" / _FILE
    except RuntimeError:  # a user without an entry, as in some containers
        return None


def _read(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    with contextlib.suppress(OSError, ValueError, RecursionError):  # what cannot be read is measured anew
        content = json.loads(path.read_text(), object_pairs_hook=unique_keys)
        if isinstance(content, dict):
            return {machine: entry for machine, entry in content.items() if isinstance(entry, dict)}
    return {}


def _machine(comm: Communicator) -> str:
    """What a threshold holds for: it says little of other machines, ranks placed otherwise, or another version."""
    device = torch.cuda.get_device_name(comm.device) if comm.device.type == "cuda" else "cpu"
    kind = "threads" if comm.in_process else "processes"
    hosts = comm.all_gather_data(platform.node(), str)
    placed = " ".join(f"{host} x {hosts.count(host)}" for host in dict.fromkeys(hosts))
    backend = os.environ.get(BACKEND_VARIABLE) or ("numba" if HAS_NUMBA else "no numba")
    if comm.integrity != "none":
        kind += f", integrity {comm.integrity}"
    return (
        f"{placed}, {os.cpu_count()} processors, {device}, {kind}, {backend}, thinwire {VERSION}, "
        f"torch {torch.__version__}"
    )
