"""The inputs that fuzzing led to, and changes of them: each is taken, and as promised then, or refused by name."""

from __future__ import annotations

import random
import sys
import tracemalloc
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verification.fuzz.__main__ import CORPUS, MOST_BYTES, main
from verification.fuzz.change import changed_bytes
from verification.fuzz.targets import TARGETS, Target

NAMES = sorted(TARGETS)


def test_every_target_has_a_corpus_of_tens_of_small_files() -> None:
    assert [path.name for path in sorted(CORPUS.iterdir())] == NAMES
    for name in NAMES:
        sizes = [path.stat().st_size for path in (CORPUS / name).iterdir()]
        assert 3 < len(sizes) < 100 and max(sizes) <= MOST_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_the_corpus_holds_what_is_taken_and_what_is_refused(name: str) -> None:
    inputs = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    seen = {TARGETS[name].run(data) for data in inputs}
    tracemalloc.start()  # now that all is imported and compiled
    try:
        for data in inputs:
            TARGETS[name].run(data)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seen == {True, False}
    assert most < 32 << 20, "an input of a few thousand bytes takes as many millions"


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_input_is_taken_or_refused_by_name(name: str) -> None:
    inputs = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    change = TARGETS[name].change or changed_bytes

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.sampled_from(inputs), st.integers(0, 2**32), st.integers(1, 3))
    def run(data: bytes, seed: int, times: int) -> None:
        rng = random.Random(seed)
        for _ in range(times):
            data = change(rng, data)
        TARGETS[name].run(data[:MOST_BYTES])

    run()


def test_a_defect_shows_and_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a target that believes in a length, so that it is known that one would be seen."""
    path = tmp_path / "input"
    path.write_bytes(b"int8")
    monkeypatch.setattr(sys, "argv", ["fuzz", "wire_string", "--input", str(path)])
    assert main() == 0
    monkeypatch.setitem(TARGETS, "wire_string", Target(lambda data: bool(data[99]), None))
    with pytest.raises(IndexError):
        main()
