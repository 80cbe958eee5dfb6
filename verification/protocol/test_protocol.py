"""Every model of the protocol, broken variants included; and that models, document and sources name each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verification.protocol.check import CASES, DEADLOCK, GOAL, HOLDS, MODELS, Case, judge, missing_tools, run

ROOT = Path(__file__).parents[2]
FILES = sorted(MODELS.glob("*.pml"))

_needs_spin = pytest.mark.skipif(
    bool(missing_tools()), reason=f"checking the models needs {' and '.join(missing_tools())}"
)


@pytest.mark.exhaustive
@_needs_spin
@pytest.mark.parametrize("case", [pytest.param(case, id=f"{case.model}: {case.variant}") for case in CASES])
def test_spin_finds_what_is_expected_of(case: Case) -> None:
    result = run(case)
    assert not result.surprise, f"expected {case.expected!r}, found {result.found!r} in {result.states} states"
    assert result.states > 0


@pytest.mark.exhaustive
@_needs_spin
def test_a_rule_that_holds_is_not_taken_for_broken() -> None:
    whole = Case("rebuild", "as it should be", "REJOINS", "record_first[")
    assert run(whole).surprise
    broken = Case("rebuild", "taken for whole", "BROKEN_SAME_MEMORY", HOLDS)
    assert run(broken).surprise


_SEARCH = """
Full statespace search for:
State-vector 76 byte, depth reached 182, errors: {errors}
   {states} states, stored
  134.512\ttotal actual memory usage
unreached in proctype stream
\t({unreached} of 63 states)
"""
_WHOLE = _SEARCH.format(errors=0, states=226754, unreached=0)
_BEGUN = "Warning: Search not completed\n" + _SEARCH.format(errors=1, states=99, unreached=5)


@pytest.mark.parametrize(
    ("expected", "output", "surprise"),
    [
        pytest.param(HOLDS, _WHOLE, False, id="holds"),
        pytest.param(HOLDS, _SEARCH.format(errors=0, states=99, unreached=0), True, id="too few states"),
        pytest.param(HOLDS, _SEARCH.format(errors=0, states=226754, unreached=2), True, id="statements not executed"),
        pytest.param(HOLDS, "error: max search depth too small\n" + _WHOLE, True, id="depth limit"),
        pytest.param(HOLDS, "pan: reached -DMEMLIM bound\n" + _WHOLE, True, id="memory limit"),
        pytest.param(HOLDS, "pan: out of memory\n", True, id="out of memory"),
        pytest.param(HOLDS, "", True, id="nothing printed"),
        pytest.param(HOLDS, "pan:1: invalid end state (at depth 7)\n" + _BEGUN, True, id="unexpected deadlock"),
        pytest.param(DEADLOCK, "pan:1: invalid end state (at depth 7)\n" + _BEGUN, False, id="deadlock"),
        pytest.param(DEADLOCK, _WHOLE, True, id="missing deadlock"),
        pytest.param("row[", "pan:1: assertion violated (row[0]==1) (at depth 7)\n" + _BEGUN, False, id="assertion"),
        pytest.param("row[", "pan:1: assertion violated (sum[0]==1) (at depth 7)\n" + _BEGUN, True, id="another one"),
        pytest.param(
            "row[", "pan:1: assertion violated - invalid array index (at depth 7)\n" + _BEGUN, True, id="array index"
        ),
        pytest.param(GOAL, "pan:1: assertion violated  !(goal_reached) (at depth 7)\n" + _BEGUN, False, id="goal"),
        pytest.param(GOAL, _WHOLE, True, id="goal not reached"),
    ],
)
def test_a_verdict_is_read_from_what_the_verifier_prints(expected: str, output: str, surprise: bool) -> None:
    result = judge(Case("legs", "", "", expected, 1000 if expected == HOLDS else 0), output)
    assert result.surprise == surprise, result


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_macro_is_known_and_every_variant_is_checked(path: Path) -> None:
    text = path.read_text()
    named = set(re.findall(r"#\s*ifn?def (\w+)", text)) | set(re.findall(r"defined\((\w+)\)", text))
    used = {macro.split("=")[0] for case in CASES if case.model == path.stem for macro in case.macros.split()}
    assert used <= named, "a case sets a macro that the model does not look at"
    variants = {name for name in named if name.startswith(("BROKEN_", "GOAL_"))}
    assert variants and variants <= used, "a variant that no case checks"


# Such as: triton_kernels/signal.py publish
_REFERENCE = re.compile(r"((?:comm|fused|moe|triton_kernels)/[\w/]+\.py) (\w+)")


def _references() -> list[tuple[str, str]]:
    return sorted({reference for path in FILES for reference in _REFERENCE.findall(path.read_text())})


@pytest.mark.parametrize(("source", "function"), _references(), ids=lambda part: part)
def test_functions_that_models_stand_for_are_there(source: str, function: str) -> None:
    assert re.search(rf"^ *def {function}\(", (ROOT / source).read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_model_says_what_its_steps_stand_for(path: Path) -> None:
    assert len(set(_REFERENCE.findall(path.read_text()))) >= 3


def test_files_that_the_document_names_are_there() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    paths = re.findall(r"`((?:[\w]+/)+[\w.]+\.(?:py|pml|md))(?::\w+)?`", text)
    assert len(paths) > 10
    assert not [path for path in paths if not (ROOT / path).exists()]
