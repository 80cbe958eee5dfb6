"""The inputs that fuzzing led to, and changes of them: each is taken, and as promised then, or refused by name."""

from __future__ import annotations

import random
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire.fields import OneOf, decode, encode
from verification.fuzz.__main__ import CORPUS, MOST_BYTES, main
from verification.fuzz.change import changed_bytes
from verification.fuzz.targets import SHAPES, TARGETS, Target

ALL_ARE_TAKEN = {"meeting_store"}  # in which any bytes are a name
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
    assert seen == ({True} if name in ALL_ARE_TAKEN else {True, False})
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


_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=20)
_VALUES: dict[Any, st.SearchStrategy[Any]] = {
    str: _TEXT,
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    None: st.none(),
}


def _values(shape: Any) -> st.SearchStrategy[Any]:
    """What has a shape, as `decode` gives it."""
    if isinstance(shape, list):
        return st.lists(_values(shape[0]), max_size=5)
    if isinstance(shape, tuple):
        return st.tuples(*map(_values, shape)).map(list)
    if isinstance(shape, dict):
        return st.dictionaries(_TEXT, _values(shape[str]), max_size=4)
    if isinstance(shape, OneOf):
        return st.one_of(*map(_values, shape.shapes))
    return _VALUES[shape] if shape in _VALUES else st.one_of(st.none(), _TEXT)  # str | None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_fits_a_shape_arrives_as_it_was(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    value = data.draw(_values(shape))
    assert decode(encode(value, shape), shape, "rank 0") == value


def test_a_defect_shows_and_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a target that believes in a length, so that it is known that one would be seen."""
    path = tmp_path / "input"
    path.write_bytes(b"int8")
    monkeypatch.setattr(sys, "argv", ["fuzz", "wire_string", "--input", str(path)])
    assert main() == 0
    monkeypatch.setitem(TARGETS, "wire_string", Target(lambda data: bool(data[99]), None))
    with pytest.raises(IndexError):
        main()
