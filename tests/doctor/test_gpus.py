"""What the doctor says of GPUs, with torch answering as told: it is passed on, and what is missing is said."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from thinwire.tools.doctor import looks


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = [
        SimpleNamespace(name=name, major=major, minor=0, multi_processor_count=132)
        for name, major in (("New", 9), ("Old", 7))
    ]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, answer in (
        ("is_available", lambda: True),
        ("device_count", lambda: 2),
        ("get_device_properties", properties.__getitem__),
        ("mem_get_info", lambda index: (1 << 30, 80 << 30)),
        ("can_device_access_peer", lambda a, b: a < b),
    ):
        monkeypatch.setattr(torch.cuda, name, answer)


def test_each_gpu_is_named_and_what_is_missing_noted(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    new, old, access, links = looks.gpus()
    assert (new.name, new.mark) == ("cuda:0", "ok") and "New, compute capability 9.0" in new.text
    assert "1.0 GiB of 80.0 GiB free" in new.text
    assert (old.name, old.mark) == ("cuda:1", "note") and "8.0 and newer" in old.advice
    assert (access.mark, access.text) == ("note", "not from cuda:1 to 0")
    assert links.text == "unknown: nvidia-smi not found"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    assert [*looks.gpus()][2].text == "all 2 directions"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_with_the_reason() -> None:
    (finding,) = looks.gpus()
    assert finding.text.startswith("no GPU: torch.cuda.is_available() is False; torch is ")
