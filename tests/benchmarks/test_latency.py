"""What is reckoned from a launch that was metered."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="kernels are compiled")

from benchmarks.latency import FIRST, H100, LAUNCH, SM_90, reckon
from verification.ptx.meter import Launched


def test_a_launch_takes_its_waves_its_instructions_and_its_bytes() -> None:
    cycles = {0: 1000.0, 4: 3000.0, 9: 9000.0}
    launch = Launched("some_kernel", 0, programs=10, cycles=cycles, instructions=3 * 4 * SM_90.count, code=100)
    line = reckon(launch, resident=4, seconds_of_bytes=2e-6, flight=1e-6)
    path = 1e6 * (2 * 3000 + 9000) / H100.clock  # two waves of usual programs, and the longest
    assert line["waves"] == 3 and line["path"] == pytest.approx(path)
    assert line["issue"] == pytest.approx(1e6 * 10 / H100.clock)
    assert line["least"] == pytest.approx(1 + path)
    assert line["most"] == pytest.approx(1e6 * LAUNCH + 1 + path + 1e6 * 100 * FIRST / H100.clock + 2)
