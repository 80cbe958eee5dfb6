"""An optimiser takes from a file what it keeps itself, and nothing else, whatever a stranger wrote into it."""

from __future__ import annotations

import copy
import json
import math
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.errors import CheckpointError

OPTIMISERS = {
    "Adadelta": {}, "Adagrad": {}, "Adam": {}, "AdamW": {}, "Adamax": {}, "ASGD": {}, "Muon": {}, "NAdam": {},
    "RAdam": {}, "RMSprop": {}, "Rprop": {}, "SGD": {"momentum": 0.9},
}  # fmt: skip
FUSED = {f"{name} fused": {**OPTIMISERS[name], "fused": True} for name in ("Adagrad", "Adam", "AdamW", "SGD")}
ALL = OPTIMISERS | FUSED


def make(name: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 3, bias=False))
    return model, getattr(torch.optim, name.split()[0])(model.parameters(), lr=1e-3 * (1 + seed), **ALL[name])


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(torch.ones(2, 6)).square().sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def saved(name: str, path: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = make(name)
    step(model, optimizer)
    tw.save_checkpoint(model, path, optimizer=optimizer)
    return model, optimizer


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second) and first.dtype == second.dtype
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def refused(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a file is; then nothing has changed. Else a step can be made."""
    before = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
    try:
        tw.load_checkpoint(model, path, optimizer=optimizer)
    except CheckpointError:
        assert same(before, (dict(model.state_dict()), optimizer.state_dict()))
        return True
    step(model, optimizer)
    return False


@pytest.mark.parametrize("of_older_version", [False, True])
def test_of_all_pairs_of_optimisers_only_the_same_go_on(of_older_version: bool, tmp_path: Path) -> None:
    took = set()
    for first in OPTIMISERS:
        path = tmp_path / first
        trained = saved(first, path)
        if of_older_version:
            File(path).without_class().write(path)
        for second in OPTIMISERS:
            model, optimizer = make(second, seed=1)
            if not refused(path, model, optimizer):
                took.add((first, second))
                assert second != first or same(model.state_dict(), (step(*trained), trained[0].state_dict())[1])
    assert took == {(name, name) for name in OPTIMISERS}


class File:
    """A file's tensors as [dtype, shape, bytes], and its metadata, to be rewritten."""

    def __init__(self, path: Path) -> None:
        octets = path.read_bytes()
        (size,) = struct.unpack("<Q", octets[:8])
        header = json.loads(octets[8 : 8 + size])
        self.metadata = header.pop("__metadata__")
        self.settings = json.loads(self.metadata["thinwire.optimizer"])
        self.tensors = {
            name: [entry["dtype"], entry["shape"], octets[8 + size :][slice(*entry["data_offsets"])]]
            for name, entry in header.items()
        }

    def without_class(self) -> File:
        """As earlier versions wrote it."""
        del self.settings["class"], self.settings["tensors"]
        return self

    def write(self, path: Path) -> None:
        header, end, octets = {}, 0, b""
        for name, (dtype, shape, data) in self.tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + len(data)]}
            octets += data
        settings = {"thinwire.optimizer": json.dumps(self.settings)}
        text = json.dumps(header | {"__metadata__": self.metadata | settings}).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + octets)

    def states(self, numbers: bool) -> list[str]:
        """Names of those of the first parameter."""
        first = "optimizer/0.weight/"
        return [name for name in self.tensors if name.startswith(first) and numbers == (not self.tensors[name][1])]

    def rename(self, old: str, new: str) -> None:
        self.tensors = {new if name == old else name: value for name, value in self.tensors.items()}


def of_state(numbers: bool, change: Callable[[File, str], None]) -> Callable[[File], bool]:
    """A rewriting of each of the states that are numbers, or are not; whether there is one."""

    def rewrite(file: File) -> bool:
        for name in (found := file.states(numbers)):
            change(file, name)
        return bool(found)

    return rewrite


def set_to(key: int, value: Any) -> Callable[[File, str], None]:
    return lambda file, name: file.tensors[name].__setitem__(key, value)


def retyped(dtype: str, size: int) -> Callable[[File, str], None]:
    def change(file: File, name: str) -> None:
        file.tensors[name][0] = dtype
        file.tensors[name][2] = bytes(size * math.prod(file.tensors[name][1]))

    return change


def shaped(shape: list[int]) -> Callable[[File, str], None]:
    def change(file: File, name: str) -> None:
        file.tensors[name][1:] = [shape, b"\1" * 4 * math.prod(shape)]

    return change


def swap(file: File) -> bool:
    numbers, others = file.states(True), file.states(False)
    if numbers and others:
        tensors = file.tensors
        tensors[numbers[0]], tensors[others[0]] = tensors[others[0]], tensors[numbers[0]]
    return bool(numbers and others)


def flipped(name: str, place: int) -> str:
    return name[:place] + chr(ord(name[place]) ^ 1) + name[place + 1 :]


def rename_state(place: int) -> Callable[[File, str], None]:
    return lambda file, name: file.rename(name, flipped(name, place))


def setting(key: str, value: Any) -> Callable[[File], bool]:
    def rewrite(file: File) -> bool:
        file.settings["groups"][0][key] = value
        return True

    return rewrite


def number(value: float) -> Callable[[File], bool]:
    def rewrite(file: File) -> bool:
        steps = [name for name in file.states(True) if name.endswith("/step")]
        for name in steps:
            file.tensors[name][2] = struct.pack("<f", value)
        return bool(steps)

    return rewrite


def keep(file: File, test: Callable[[str], bool]) -> bool:
    count = len(file.tensors)
    file.tensors = {name: value for name, value in file.tensors.items() if test(name)}
    return len(file.tensors) < count


REWRITINGS: dict[str, Callable[[File], object]] = {
    "a number renamed": of_state(True, rename_state(-1)),
    "a tensor renamed": of_state(False, rename_state(-1)),
    "a parameter renamed": of_state(False, rename_state(10)),
    "optimizer renamed": of_state(False, rename_state(0)),
    "numbers dropped": lambda file: keep(file, lambda name: name not in file.states(True)),
    "tensors dropped": lambda file: keep(file, lambda name: name not in file.states(False)),
    "one parameter's dropped": lambda file: keep(file, lambda name: not name.startswith("optimizer/0.weight/")),
    "all dropped": lambda file: keep(file, lambda name: not name.startswith("optimizer/")),
    "one more": lambda file: file.tensors.update({"optimizer/0.weight/more": ["F32", [], bytes(4)]}) is None,
    "a tensor of that shape more": lambda file: (
        file.tensors.update({"optimizer/0.weight/more": ["F32", [4, 6], bytes(96)]}) is None
    ),
    "one of nothing": lambda file: file.tensors.update({"optimizer/9.weight/step": ["F32", [], bytes(4)]}) is None,
    "a tensor shrunk to a number": of_state(False, shaped([])),
    "a tensor shrunk to a row": of_state(False, shaped([6])),
    "a tensor of one element": of_state(False, shaped([1, 1])),
    "a tensor turned": of_state(False, shaped([6, 4])),
    "a tensor flat": of_state(False, shaped([24])),
    "a tensor without rows": of_state(False, shaped([0, 6])),
    "a number grown": of_state(True, shaped([4, 6])),
    "a number of one dimension": of_state(True, shaped([1])),
    "a number and a tensor swapped": swap,
    **{f"a number of {name}": of_state(True, retyped(name, size)) for name, size in (
        ("U32", 4), ("I32", 4), ("I64", 8), ("BOOL", 1), ("U8", 1))},
    **{f"a tensor of {name}": of_state(False, retyped(name, size)) for name, size in (
        ("F64", 8), ("F16", 2), ("I32", 4), ("U8", 1), ("C64", 8), ("F8_E4M3", 1))},
    **{f"{value} steps": number(value) for value in (math.nan, math.inf, -1.0, -3.0)},
    **{f"lr {str(value)[:8]}": setting("lr", value) for value in (
        math.nan, math.inf, -0.1, 10**400, 1e300, "x", None, True, [0.1], {}, [])},
    "lr renamed": lambda file: setting("mr", file.settings["groups"][0].pop("lr"))(file),
    "a setting more": setting("new", 1),
    "a setting of words more": setting("new", "x"),
    "a setting dropped": lambda file: file.settings["groups"][0].pop("weight_decay", None) is not None,
    "no settings": lambda file: file.settings["groups"].__setitem__(0, {}) is None,
    "more groups": lambda file: file.settings["groups"].append({}) is None,
    "betas out of range": lambda file: "betas" in file.settings["groups"][0] and setting("betas", [0.9, 9.9])(file),
    "another class": lambda file: file.settings.update({"class": "Mine"}) is None,
    "a class of no name": lambda file: file.settings.update({"class": [1]}) is None,
}  # fmt: skip
#: These say the same, or another number that a training could have had.
HARMLESS: dict[str, Callable[[File], object]] = {
    "a number of F64": of_state(True, lambda file, name: file.tensors.update(
        {name: ["F64", [], struct.pack("<d", *struct.unpack("<f", file.tensors[name][2]))]})),
    "other values": of_state(False, lambda file, name: set_to(2, b"\1" * 96)(file, name)),
    "a scheduler's setting": setting("initial_lr", 0.5),
    "another lr": setting("lr", 1),
    "fused elsewhere": setting("fused", "x"),
}  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_what_a_stranger_wrote_into_a_file_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    path, other = tmp_path / "saved", tmp_path / "rewritten"
    saved(name, path)
    took, tried = [], 0
    for what, rewrite in (REWRITINGS | HARMLESS).items():
        file = File(path)
        if not rewrite(file):
            continue
        file.write(other)
        tried += 1
        for fresh in (True, False):
            model, optimizer = make(name, seed=1)
            if not fresh:
                step(model, optimizer)
            if refused(other, model, optimizer) == (what in HARMLESS):
                took.append(f"{what}, {'fresh' if fresh else 'trained'}")
    assert not took and tried > 30


def test_a_tensor_shrunk_to_a_number_does_not_end_a_fused_optimiser(tmp_path: Path) -> None:
    """In a process of its own, as a fused kernel would write outside of its memory."""
    code = """if True:
        import sys, torch, thinwire as tw
        model = torch.nn.Linear(4096, 256, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True)
        if sys.argv[2] == "load":
            try: tw.load_checkpoint(model, sys.argv[1], optimizer=optimizer)
            except tw.CheckpointError as error: print(error)
        model(torch.ones(2, 4096)).sum().backward()
        optimizer.step()
        if sys.argv[2] == "save": tw.save_checkpoint(model, sys.argv[1], optimizer=optimizer)
    """
    path = tmp_path / "saved"
    subprocess.run([sys.executable, "-c", code, path, "save"], check=True)
    file = File(path)
    shaped([])(file, "optimizer/weight/momentum_buffer")
    file.write(path)
    done = subprocess.run([sys.executable, "-c", code, path, "load"], capture_output=True, text=True)
    assert done.returncode == 0 and "momentum_buffer of weight is torch.float32 []" in done.stdout


class Own(torch.optim.AdamW):
    """A class of a user's, with a constructor and attributes of its own."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        super().__init__(model.parameters(), lr=rate)
        self.first, self.steps = next(model.parameters()), 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.steps += 1
        with torch.no_grad():
            self.first.mul_(0.5)
            self.state[self.first]["norm"] = self.first.norm()


class Unfit(torch.optim.SGD):
    """What it keeps is in the way of its step."""

    def step(self, closure: Any = None) -> None:
        if closure is None:
            raise RuntimeError("no closure")


def test_an_optimiser_of_a_users_own_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    model = nn.Linear(6, 4)
    optimizer = Own(model, 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which replaces `step` of this very object
    step(model, optimizer)
    scheduler.step()
    before = copy.deepcopy(model.state_dict())
    tw.save_checkpoint(model, path, optimizer=optimizer)
    assert optimizer.steps == 1 and same(before, model.state_dict())
    again = nn.Linear(6, 4)
    fresh = Own(again, 0.2)
    tw.load_checkpoint(again, path, optimizer=fresh)
    with open(path, "r+b") as file:  # of which nothing is used any more
        file.write(bytes(path.stat().st_size))
    assert fresh.steps == 0 and same(before, again.state_dict())
    for each in ((model, optimizer), (again, fresh)):
        step(*each)
    assert same(model.state_dict(), again.state_dict())
    assert same(optimizer.state_dict()["state"], fresh.state_dict()["state"])


@pytest.mark.parametrize(
    ("make_optimizer", "what"),
    [
        (lambda model: Unfit(model.parameters(), 0.1), "Unfit with these settings .*no closure"),
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS with these settings cannot be stored"),
        (lambda model: torch.optim.Adafactor(model.parameters()), "Adafactor cannot .* as it keeps '..._var'"),
        (lambda model: torch.optim.SparseAdam(model.parameters()), "SparseAdam"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_is_not_saved_either(
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], what: str, tmp_path: Path
) -> None:
    model = nn.Linear(6, 4)
    optimizer = make_optimizer(model)
    with pytest.raises(CheckpointError, match=what):
        tw.save_checkpoint(model, tmp_path / "never", optimizer=optimizer)
    assert not list(tmp_path.iterdir())


class _Counting(torch.optim.SGD):
    """Counts its steps in a setting, in place, and draws noise."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 0.1)
        for group in self.param_groups:
            group["steps"] = torch.tensor(0.0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            torch.randn_like(group["params"][0])
        super().step(closure)


def test_saving_and_loading_steps_no_optimiser_and_draws_no_numbers(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    model.weight_of_codes = torch.nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    optimizer = _Counting(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    before = torch.get_rng_state()
    tw.save_checkpoint(model, tmp_path / "file", optimizer=optimizer)
    tw.load_checkpoint(model, tmp_path / "file", optimizer=optimizer)
    assert optimizer.param_groups[0]["steps"] == 1 and torch.equal(torch.get_rng_state(), before)
