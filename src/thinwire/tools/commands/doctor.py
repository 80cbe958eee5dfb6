"""`thinwire doctor`: its options, all looks in turn, and the report."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

from thinwire.files import write_file
from thinwire.tools.doctor.finding import Finding
from thinwire.tools.doctor.looks import look
from thinwire.tools.doctor.ranks import examine_processes, examine_threads
from thinwire.tools.progress import Progress
from thinwire.version import VERSION

SUMMARY = "check what works on this machine, and say how to fix the rest"
DESCRIPTION = """\
Checks versions, GPUs, limits and caches, tries each kind of shared memory, and runs a round and an
all-reduce on a few ranks. The report says what works, what does not and why, and what to do about
it. Every check has its own time limit. The exit status is 1 if something that should work is
broken.

  thinwire doctor
  thinwire doctor --json findings.json"""

FORMAT, FORMAT_VERSION = "thinwire doctor", 1
_LOOK_SECONDS, _RANKS_SECONDS = 60.0, 240.0  # kernels that are not in the cache are compiled within the second
_WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--json", metavar="FILE", help="Also write the findings to this file; with - print only that.")


def sections() -> Iterator[tuple[str, list[Finding]]]:
    """Each section as it is found; standard error says meanwhile what is looked at."""
    began = time.monotonic()
    causes: dict[str, str] = {}  # the first place of each problem

    def found(title: str, examine: Callable[..., list[Finding]], *arguments: str | float) -> tuple[str, list[Finding]]:
        with Progress(sys.stderr, began) as progress:
            progress.stage(f"looking at: {title} ...")
            return title, merge_causes(title, examine(*arguments), causes)

    yield found("software", look, "software", _LOOK_SECONDS)
    yield found("host", look, "host", _LOOK_SECONDS)
    yield (gpus := found("GPUs", look, "gpus", _LOOK_SECONDS))
    yield found("2 CPU ranks, processes", examine_processes, "cpu", 2, _RANKS_SECONDS)
    yield found("2 CPU ranks, threads", examine_threads, "cpu", 2, _RANKS_SECONDS)
    count = sum(finding.name.startswith("cuda:") for finding in gpus[1])
    if count:
        yield found("2 ranks on one GPU, threads", examine_threads, "cuda", 2, _RANKS_SECONDS)
    if count > 1:
        yield found(f"{count} ranks, a GPU each", examine_processes, "cuda", count, _RANKS_SECONDS)


def merge_causes(title: str, findings: list[Finding], causes: dict[str, str]) -> list[Finding]:
    """The findings of a section, in which a problem with a text that was told before only points there.

    Args:
        causes: where each text was told first; those of this section are added.
    """
    merged = []
    for finding in findings:
        if finding.mark == "problem":
            first = causes.setdefault(finding.text, f"{finding.name} of {title!r}")
            if first != f"{finding.name} of {title!r}":
                finding = Finding("info", finding.name, f"not possible: the problem of {first}")
        merged.append(finding)
    return merged


def describe(title: str, findings: list[Finding]) -> str:
    """A section as text."""
    lines = [title]
    for finding in findings:
        indent = " " * 33
        text = f"  {finding.mark:8} {finding.name:21} {finding.text}"
        lines += textwrap.wrap(text, _WIDTH, subsequent_indent=indent, drop_whitespace=True) or [text]
        if finding.advice:
            lines += textwrap.wrap(f"{indent}-> {finding.advice}", _WIDTH, subsequent_indent=f"{indent}   ")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> int:
    """Prints the report as it comes; 1 if there is a problem."""
    found, target = [], options.json
    for title, findings in sections():
        found.append((title, findings))
        if target != "-":
            print(describe(title, findings) + "\n", flush=True)
    counts = {mark: sum(f.mark == mark for _, findings in found for f in findings) for mark in ("problem", "note")}
    if target != "-":
        print(", ".join(f"{number} {mark}{'s' * (number != 1)}" for mark, number in counts.items()))
    if target is not None:
        content = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "thinwire": VERSION,
            "problems": counts["problem"],
            "sections": [{"name": title, "findings": [asdict(f) for f in findings]} for title, findings in found],
        }
        text = json.dumps(content, indent=1)
        if target == "-":
            print(text)
        else:
            write_file(target, f"{text}\n".encode())
    return 1 if counts["problem"] else 0
