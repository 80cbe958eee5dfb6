"""The examples run as they say."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive
ROOT = Path(__file__).parents[1]


def _output(name: str) -> str:
    done = subprocess.run([sys.executable, str(ROOT / "examples" / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_sharded_layer_gives_what_the_whole_one_gives() -> None:
    shown = re.findall(r"(\w+): relative error .*? outputs (.*)", _output("sharded_layer.py"))
    errors = {wire: figures.split(", ") for wire, figures in shown}
    assert all(float(error) < 1e-6 for error in errors["none"])
    assert all(0.004 < float(error) < 0.012 for error in errors["int8"])


def test_a_layer_of_ones_own_learns_as_it_does_on_one_rank() -> None:
    shown = re.findall(r"^(\d) ranks, (\w+), (\w+): loss (.*)$", _output("own_layer.py"), re.MULTILINE)
    assert [(ranks, name, wire) for ranks, name, wire, _ in shown] == [
        ("1", "OwnLayer", "none"), ("3", "OwnLayer", "none"), ("3", "OwnLayer", "int8"), ("3", "ByToken", "int8"),
    ]  # fmt: skip
    alone, exact, *quantized = ([float(loss) for loss in losses.split(", ")] for *_, losses in shown)
    assert len(alone) == 4 and alone[-1] < alone[0] / 4
    assert all(abs(a - b) < 1e-4 for a, b in zip(alone, exact, strict=True))
    assert all(abs(a - b) < 0.01 for losses in quantized for a, b in zip(alone, losses, strict=True))


def test_a_training_is_resumed_on_another_number_of_ranks(tmp_path: Path) -> None:
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"), "OMP_NUM_THREADS": "1"
    }  # fmt: skip

    def losses(ranks: int, steps: int, name: str) -> list[float]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        script = [str(ROOT / "examples" / "train_and_resume.py"), str(tmp_path / name), "--steps", str(steps)]
        done = subprocess.run([*command, *script], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]

    whole = losses(2, 40, "whole")
    assert len(whole) == 4 and whole[-1] < 0.6 * whole[0]
    assert losses(2, 20, "parts") == whole[:2]
    for got, want in zip(losses(3, 40, "parts"), whole[2:], strict=True):
        assert abs(got - want) < 0.01
    for number, ranks in ((signal.SIGKILL, [1]), (signal.SIGTERM, [0, 1])):
        name = number.name
        processes = _ranks(tmp_path / name, environment)
        before = []
        while len(before) < 2:  # lines of 10 steps
            assert (line := processes[0].stdout.readline()), "the training has ended"
            before.append(float(line.split()[-1]))
        for rank in ranks:
            processes[rank].send_signal(number)
        before += [float(line.split()[-1]) for line in processes[0].stdout]
        ended = [process.wait() for process in processes]
        assert ended == [0, 0] if number == signal.SIGTERM else ended[1] == -signal.SIGKILL
        after = losses(2, 40, name)
        assert before + after[len(after) + len(before) - 4 :] == whole and before[: 4 - len(after)] + after == whole


def _ranks(path: Path, environment: dict[str, str]) -> list[subprocess.Popen[str]]:
    """Two of the training, which saves every 3 steps."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    command = [sys.executable, str(ROOT / "examples" / "train_and_resume.py"), str(path), "--steps", "40"]
    return [
        subprocess.Popen(
            [*command, "--every", "3"], env=environment | world | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in "01"
    ]  # fmt: skip


def test_the_sharded_product_gives_what_the_whole_one_gives() -> None:
    shown = re.findall(r"^ +\d  .* (\S+), (\S+)$", _output("layout_matmul.py"), re.MULTILINE)
    assert len(shown) == 8
    for exact, quantized in shown:
        assert float(exact) < 1e-6 and 0.004 < float(quantized) < 0.0075


def test_the_sharded_network_learns_as_the_whole_one_does() -> None:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    rows = re.findall(r"^ *\d+ +(\d\.\d+) +(\d\.\d+) +(\d\.\d+)", _output("layout_train.py"), re.MULTILINE)
    assert len(rows) > 3
    losses = [[float(loss) for loss in row] for row in rows]
    for unsharded, exact, quantized in losses:
        assert abs(exact - unsharded) < 1e-4 and abs(quantized - unsharded) < 0.01
    assert losses[-1][0] < losses[0][0] / 4
