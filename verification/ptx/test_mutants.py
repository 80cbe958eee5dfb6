"""Kernels with one piece of synchronisation less: a race, wrong bytes, or threads that wait for ever.

A few of each scenario's; all of them are in the table that `python -m verification.ptx.mutants` writes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

from thinwire import triton_kernels
from verification.ptx.mutants import REDUNDANT, mutants_of, redundant, run_mutant
from verification.ptx.mutations import mutations_of

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "ahead_of_time" / "mutants.txt"


@pytest.mark.parametrize(
    ("scenario", "step"),
    [
        ("collectives", 15),
        ("small collectives", 30),
        pytest.param("all-to-all-v", 15, marks=pytest.mark.exhaustive),
        pytest.param("round", 9, marks=pytest.mark.exhaustive),
    ],
)
def test_without_a_piece_of_synchronisation_something_breaks(scenario: str, step: int) -> None:
    mutants = [mutant for mutant in mutants_of(scenario) if not redundant(str(mutant.mutation))]
    assert len(mutants) > step
    survivors = [mutant for mutant in mutants[::step] if run_mutant(mutant) == "nothing"]
    assert not survivors, [str(mutant.mutation) for mutant in survivors]


def test_the_table_gives_a_reason_for_each_change_of_which_nothing_comes() -> None:
    lines = TABLE.read_text().splitlines()
    reasons = [lines[number + 1].strip() for number, line in enumerate(lines) if line.startswith("  nothing")]
    assert set(reasons) == set(REDUNDANT.values())
    chain = (
        "load_flags < behind < wait_for_all < wait_kernel: ld.acquire.sys.global.b32 becomes ld.relaxed.sys.global.b32"
    )
    assert f"  race    {chain}" in lines  # but for the look at the own flag


def test_each_change_takes_away_one_step() -> None:
    ptx = """\
.loc 1 2 3 // nowhere.py:2:3
\t@%p1 atom.global.sys.acq_rel.add.u32 %r1, [ %rd1 + 0 ], %r2;
\tbar.sync \t0;
\tld.global.gpu.acquire.b32 %r1, [ %rd1 + 0 ];
\tst.global.b32 [ %rd1 + 0 ], %r1;
\tfence.acq_rel.gpu;
"""
    changed = [mutation.apply(ptx).split("\n") for mutation in mutations_of(ptx)]
    differing = [sum(line != old for line, old in zip(new, ptx.split("\n"), strict=True)) for new in changed]
    assert differing == [1] * 7
    names = [str(mutation).split(": ")[1] for mutation in mutations_of(ptx)]
    atom, load = "atom.global.sys.acq_rel.add.u32 becomes atom.global.", "ld.global.gpu.acquire.b32 becomes ld.global."
    assert names == [
        f"{atom}gpu.acq_rel.add.u32",
        f"{atom}sys.acquire.add.u32",
        f"{atom}sys.release.add.u32",
        "bar.sync 0 is taken out",
        f"{load}cta.acquire.b32",
        f"{load}gpu.relaxed.b32",
        "fence.acq_rel.gpu is taken out",
    ]


def test_places_are_those_of_sources_here_where_the_kernel_was_compiled_elsewhere() -> None:
    signal = Path(triton_kernels.__file__).parent / "signal.py"
    line = next(n for n, text in enumerate(signal.read_text().splitlines(), 1) if text.startswith("def publish("))
    ptx = f""".file 1 "/a/clone/that/is/gone/src/thinwire/triton_kernels/signal.py"
.loc 1 {line + 1} 5 // signal.py:{line + 1}:5
\tbar.sync \t0;
"""
    assert [mutation.place for mutation in mutations_of(ptx)] == ["publish"]
