"""The longest way through machine code, its loops and its accesses, of texts whose answers are plain to see."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

from verification.ahead_of_time.sass import Code, bytes_moved, instructions_of


def _code(*lines: str) -> Code:
    """A kernel of these instructions; a target is written as the number of a line."""
    text = "\n".join(f"        /*{16 * number:04x}*/   {line} ;" for number, line in enumerate(lines))
    return Code(instructions_of(text))


def _names(way: list) -> list[str]:
    return [instruction.name for instruction in way]


def test_of_two_branches_the_longer_one_counts() -> None:
    code = _code(
        "MOV R1, R2", "@P0 BRA 0x40", "FADD R1, R1, R2", "BRA 0x60", "FMUL R1, R1, R2", "FMUL R1, R1, R3", "EXIT"
    )
    assert _names(code.longest_way()) == ["MOV", "BRA", "FMUL", "FMUL", "EXIT"]
    assert not code.loops and code.row_loop() is None


def test_a_loop_counts_once_and_the_way_goes_on_behind_it() -> None:
    code = _code("MOV R1, R2", "FADD R1, R1, R2", "ISETP P0, R1", "@P0 BRA 0x10", "FMUL R1, R1, R2", "EXIT", "BRA 0x60")
    assert {head: sorted(body) for head, body in code.loops.items()} == {1: [1, 2, 3]}
    assert _names(code.longest_way()) == ["MOV", "FADD", "ISETP", "BRA", "FMUL", "EXIT"]
    assert _names(code.longest_way(1, code.loops[1])) == ["FADD", "ISETP", "BRA"]


def test_a_loop_that_is_left_from_its_head_counts_as_well() -> None:
    code = _code("ISETP P0, R1", "@P0 BRA 0x40", "FADD R1, R1, R2", "BRA 0x0", "FMUL R1, R1, R2", "EXIT")
    assert _names(code.longest_way()) == ["ISETP", "BRA", "FADD", "BRA", "FMUL", "EXIT"]
    code = _code("ISETP P0, R1", "@P0 BRA 0x40", "FADD R1, R1, R2", "EXIT", "FMUL R1, R1, R2", "BRA 0x0")
    assert _names(code.longest_way()) == ["ISETP", "BRA", "FMUL", "BRA", "FADD", "EXIT"]


def test_a_call_that_never_returns_is_a_branch() -> None:
    slow = ["FADD R1, R1, R2", "RET.REL.NODEC R14 0x0"]
    code = _code("MOV R1, R2", "CALL.REL.NOINC 0x40", "FMUL R1, R1, R2", "EXIT", *slow)
    assert _names(code.longest_way()) == ["MOV", "CALL.REL.NOINC", "FMUL", "EXIT"]
    loop = ["FADD R1, R1, R2", "@P0 CALL.REL.NOINC 0x30", "BRA 0x0"]
    code = _code(*loop, "FMUL R1, R1, R2", "EXIT")
    assert sorted(code.loops[0]) == [0, 1, 2]
    assert _names(code.longest_way()) == ["FADD", "CALL.REL.NOINC", "BRA", "FMUL", "EXIT"]


def test_the_row_loop_is_the_innermost_part_of_the_longest_that_moves_as_much() -> None:
    waits = ["LDG.E.128 R1, [R2.64]", "@P0 BRA 0x0"]
    rows = [
        "MOV R0, R1",
        "LDG.E.128 R1, [R2.64]",
        "FADD R1, R1, R2",
        "STG.E.64 [R2.64], R1",
        "@P1 BRA 0x30",
        "@P2 BRA 0x20",
    ]
    code = _code(*waits, *rows, "EXIT")
    head = code.row_loop()
    assert head == 3
    assert bytes_moved(code.longest_way(head, code.loops[head])) == 24


def test_predicates_and_widths_are_read() -> None:
    load, byte, word = instructions_of(
        "/*0000*/ @!P0 LDG.E.128.CONSTANT R4, desc[UR12][R10.64] ;\n"
        "/*0010*/ STG.E.U8 [R2.64], R1 ;\n"
        "/*0020*/ LDS R1, [R2] ;"
    )
    assert (load.predicate, load.access_bytes, byte.access_bytes, word.access_bytes) == ("!P0", 16, 1, 4)
