"""A training that is killed or told to stop is resumed, on another number of ranks too, and learns as it would have."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.exhaustive
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
