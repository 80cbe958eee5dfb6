"""The Python blocks of the pages: what they are, which of them are one program, and running programs."""

from __future__ import annotations

import os
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import thinwire as tw
from thinwire.comm.launch.bootstrap import current_domains

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^```([\w-]*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PYTHON = ("python", "py", "python3", "pycon")


@dataclass(frozen=True)
class Block:
    """A Python block of a page.

    Attributes:
        page: its path in the clone.
        line: the page's line of its first line of code.
        output: what the page says that it prints: the next `text` block, if that comes before the next Python block.
    """

    page: str
    line: int
    code: str
    output: str | None

    @property
    def is_script(self) -> bool:
        """A program of its own, which starts ranks by itself."""
        return 'if __name__ == "__main__":' in self.code


def blocks_of(page: str, text: str) -> list[Block]:
    """In the page's order."""
    found: list[Block] = []
    waiting = False
    for fence in _FENCE.finditer(text):
        if fence[1] in _PYTHON:
            found.append(Block(page, text[: fence.start()].count("\n") + 2, fence[2], None))
            waiting = True
        elif fence[1] == "text" and waiting:
            found[-1] = Block(found[-1].page, found[-1].line, found[-1].code, fence[2])
            waiting = False
    return found


def programs_of(blocks: list[Block]) -> list[list[Block]]:
    """Blocks that go on from each other: one that imports thinwire, as a file does, begins the next program."""
    programs: list[list[Block]] = []
    for block in blocks:
        if not programs or block.page != programs[-1][0].page or "thinwire as tw" in block.code:
            programs.append([])
        programs[-1].append(block)
    return programs


def run_program(blocks: list[Block]) -> tuple[list[str], str]:
    """Runs blocks one after the other; returns what each printed, and the traceback of one that raised.

    `print` alone is caught: ranks may be threads of this process.
    """
    printed: list[str] = []

    def write(*values: object, flush: bool = False) -> None:
        printed[-1] += " ".join(map(str, values)) + "\n"

    names: dict[str, Any] = {"__name__": "__main__", "print": write}
    try:
        for block in blocks:
            printed.append("")
            # Line numbers in a traceback are the page's.
            exec(compile("\n" * (block.line - 1) + block.code, block.page, "exec", dont_inherit=True), names)
    except Exception:
        return printed, traceback.format_exc()
    finally:
        torch.set_default_device(None)
    return printed, ""


def run_programs(
    comm: tw.Communicator, programs: list[list[Block]], ports: list[int], folder: str
) -> list[tuple[list[str], str]]:
    """A rank of `run_ranks` runs programs as it would under torchrun: in each it joins the others anew.

    Programs behind one that raised are not run, as other ranks may be elsewhere.

    Args:
        ports: of a `torch.distributed.TCPStore` on this host for each program, as torchrun has one. A store keeps what
            an earlier process group left in it, so none is used twice.
    """
    rank, size = comm.rank, comm.size
    comm.close()
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
    os.chdir(folder)
    sys.argv = ["program.py", "checkpoints"]
    results = []
    for blocks, port in zip(programs, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        results.append(run_program(blocks))
        if results[-1][1]:
            break
        world = current_domains().find(None)
        if world is not None:  # the program left it open
            world.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    return results
