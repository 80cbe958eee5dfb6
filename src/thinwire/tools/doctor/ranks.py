"""Starts ranks and says what worked among them: shared memory, the transport that `auto` picks, a round, a sum."""

from __future__ import annotations

import os
import re
import socket
import sys
from typing import Any

from thinwire.tools.doctor.finding import Finding, judged, run_programs

_ONE_RANK = (sys.executable, "-m", "thinwire.tools.doctor.one_rank")
STEPS = ("meeting", "shared memory", "transport", "round", "all-reduce")
#: What to do about a message, by words that are in it.
_BY_WORDS = {
    "Too many open files": "raise the limit on open files: ulimit -n 65536",
    "No usable temporary directory": "set TMPDIR to a folder that can be written; a limit on file size (ulimit -f) "
    "forbids that everywhere",
    "File too large": "a limit on file size (ulimit -f) hits memory that ranks share, and caches of kernels: lift it",
    "differ from the exact": "do not trust results of this machine, and report it; if they are exact with "
    "THINWIRE_BACKEND=torch, which takes the staged transport, it is shared memory or its kernels",
    "killed by signal 9": "memory ran out, or somebody ended it: see dmesg, and the control group's limit",
    "did not come back": "run it again, as kernels that had to be compiled are in the cache then; if it hangs again, "
    "report it",
}
#: The same by what failed.
_BY_STEP = {
    "meeting": "ranks of one host meet over the loopback interface: see that it is up, and that nothing keeps "
    "processes from 127.0.0.1",
    "shared memory": "the message says what was refused; `auto` takes the staged transport meanwhile, which is slower",
    "transport": "the message says what is missing; docs/launch.md has a table of causes",
    "round": "the message says what failed; docs/launch.md has a table of causes",
    "all-reduce": "the message says what failed; docs/launch.md has a table of causes",
}


def _advice(step: str, text: str) -> str:
    command = re.search(r"pip install [\w\[\]',.-]+", text)
    if command is not None:
        return "unset NUMBA_DISABLE_JIT" if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0") else command[0]
    return next((advice for words, advice in _BY_WORDS.items() if words in text), _BY_STEP[step])


def examine_threads(device: str, ranks: int, seconds: float) -> list[Finding]:
    """Examines ranks that are threads of one process."""
    ((lines, ending),) = run_programs([[*_ONE_RANK, device, "threads", str(ranks)]], seconds)
    return _findings(lines, [f"the process {ending}"] if ending else [], ranks, posix_heap=False)


def examine_processes(device: str, ranks: int, seconds: float) -> list[Finding]:
    """Examines ranks that are processes of this host, with a GPU each if the device is "cuda"."""
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", 0))
        except OSError as error:
            text = f"127.0.0.1 cannot be listened on: {error.strerror}"
            return [Finding("problem", "meeting", text, _BY_STEP["meeting"])]
        port = listener.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "THINWIRE_FLIGHT_RECORDER": "off"}
    commands = [[*_ONE_RANK, device, str(rank), str(ranks)] for rank in range(ranks)]
    told = run_programs(commands, seconds, **where)
    endings = [f"rank {rank} {ending}" for rank, (_, ending) in enumerate(told) if ending]
    return _findings([line for lines, _ in told for line in lines], endings, ranks, posix_heap=device == "cpu")


def _findings(lines: list[dict[str, Any]], endings: list[str], ranks: int, posix_heap: bool) -> list[Finding]:
    """Makes a finding for each step that a rank told of, and one for ranks that did not come back."""
    findings = []
    for step in STEPS:
        told = [line for line in lines if line.get("step") == step]
        failed = [line for line in told if not line["ok"]]
        if failed:
            findings.append(_failure(step, failed[0]["text"], posix_heap))
        elif len(told) == ranks:
            slowest = max(line["seconds"] for line in told)
            took = f" ({slowest:.1f} s, kernels loaded or compiled)" if slowest >= 0.1 else ""
            text = told[0]["text"] + took
            staged = step == "transport" and text.startswith("staged")
            slower = "works, and is slower: see why the direct one is not available"
            findings.append(judged(not staged, step, text, slower))
        elif endings:
            text = f"not over, as {'; '.join(endings)}"
            findings.append(Finding("problem", step, text, _advice(step, text)))
            return findings
    return findings


def _failure(step: str, text: str, posix_heap: bool) -> Finding:
    if step == "shared memory" and "no peer-to-peer access" in text:
        return Finding("note", step, text, "`auto` takes the staged transport here")
    cause = posix_cause() if step == "shared memory" and posix_heap else None
    if cause is None:
        return Finding("problem", step, text, _advice(step, text))
    why, advice = cause
    return Finding("problem", step, f"{text}; {why}", advice)


def posix_cause() -> tuple[str, str] | None:
    """Why processes cannot share memory, and what to do about it, if that can be seen without ranks."""
    ((causes, ending),) = run_programs([[sys.executable, "-m", "thinwire.tools.doctor.posix"]], 60)
    if ending:
        return f"the step by step look at it {ending}", _BY_STEP["shared memory"]
    return (causes[0]["cause"], causes[0]["advice"]) if causes else None
