"""Loops and branches for code that writes LLVM IR."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from thinwire.triton_kernels.cpu.compat import ir
from thinwire.triton_kernels.cpu.ir.vectors import constant


@contextmanager
def loop(builder: Any, count: Any) -> Iterator[Any]:
    """Counts from 0 to `count`. LLVM is told not to unroll: blocks are wide enough, and the code would triple."""
    with steps(builder, count, constant(1)) as (index, _):
        yield index


@contextmanager
def steps(builder: Any, count: Any, step: Any) -> Iterator[tuple[Any, Any]]:
    """Counts from 0 to `count` by `step`: (how often, where). No division, which takes as long as a group does."""
    before = builder.basic_block
    head, body, end = (builder.append_basic_block(f"loop.{name}") for name in ("head", "body", "end"))
    builder.branch(head)
    builder.position_at_end(head)
    number, position = builder.phi(ir.IntType(64)), builder.phi(ir.IntType(64))
    for counter in (number, position):
        counter.add_incoming(constant(0), before)
    builder.cbranch(builder.icmp_signed("<", position, count), body, end)
    builder.position_at_end(body)
    yield number, position
    for counter, by in ((number, constant(1)), (position, step)):
        counter.add_incoming(builder.add(counter, by, flags=["nuw", "nsw"]), builder.basic_block)
    builder.branch(head).set_metadata("llvm.loop", _not_unrolled(builder.module))
    builder.position_at_end(end)


@contextmanager
def groups_of(builder: Any, columns: Any, group: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Loops over groups: (number, first column, columns)."""
    with steps(builder, columns, group) as (number, first):
        left = builder.sub(columns, first)
        yield number, first, builder.select(builder.icmp_signed("<", left, group), left, group)


def _not_unrolled(module: Any) -> Any:
    wish = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    identity = module.add_metadata([ir.MetaDataString(module, "thinwire"), wish])
    identity.operands = (identity, wish)  # a loop's metadata begins with a reference to itself
    return identity


def switch(builder: Any, selectors: list[Any], emit: Callable[..., None], cases: Iterable[tuple[int, ...]]) -> None:
    """Emits `emit(*codes)` for each of `cases`; the kernel runs the one that equals `selectors`.

    One switch within another, so that a selector that turns out to be constant drops the other cases early.
    """
    if not selectors:
        emit()
        return
    cases = list(cases)
    end = builder.append_basic_block("switch.end")
    instruction = builder.switch(selectors[0], end)
    for code in dict.fromkeys(case[0] for case in cases):
        block = builder.append_basic_block("switch.case")
        instruction.add_case(constant(code), block)
        builder.position_at_end(block)
        switch(builder, selectors[1:], partial(emit, code), [case[1:] for case in cases if case[0] == code])
        builder.branch(end)
    builder.position_at_end(end)
