"""`thinwire doctor` where there is a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import torch


def test_each_gpu_is_named_and_ranks_on_it_take_every_step() -> None:
    done = subprocess.run([sys.executable, "-m", "thinwire", "doctor", "--json", "-"], capture_output=True, text=True)
    sections = {section["name"]: section["findings"] for section in json.loads(done.stdout)["sections"]}
    named = [finding["name"] for finding in sections["GPUs"]]
    assert [f"cuda:{index}" in named for index in range(torch.cuda.device_count())] == [
        True
    ] * torch.cuda.device_count()
    on_one = {finding["name"]: finding for finding in sections["2 ranks on one GPU, threads"]}
    assert on_one["round"]["mark"] == "ok", on_one
    assert on_one["all-reduce"]["mark"] == "ok", on_one
