"""`thinwire doctor`: what breaks is named with its cause, and whatever a look does, there is a report."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from thinwire.testing import run_ranks
from thinwire.tools.cli import main
from thinwire.tools.commands import doctor
from thinwire.tools.doctor import finding as programs
from thinwire.tools.doctor import looks, one_rank, posix, ranks
from thinwire.tools.doctor.finding import Finding

# Each ends in a process in which shared memory between processes cannot be had, and runs `argv` there.
_SECCOMP = """
import ctypes, os, sys
class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]
class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction))]
number = {"x86_64": 319, "aarch64": 279}[os.uname().machine]  # memfd_create
load, equal, give, refuse, allow = 0x20, 0x15, 0x06, 0x00050000 | 1, 0x7FFF0000
code = (Instruction * 4)((load, 0, 0, 0), (equal, 0, 1, number), (give, 0, 0, refuse), (give, 0, 0, allow))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, ctypes.byref(Program(4, code))) == 0  # PR_SET_SECCOMP
"""
_RUN = "import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
_BROKEN = {
    "file size": "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n" + _RUN,
    "seccomp": _SECCOMP + _RUN,
    # The flag does not outlive an exec.
    "not dumpable": (
        "import ctypes, runpy, sys; libc = ctypes.CDLL(None); libc.prctl(24, 19, 0, 0, 0); libc.prctl(4, 0, 0, 0, 0)\n"
        "sys.argv = sys.argv[1:]; runpy.run_module(sys.argv[1], run_name='__main__')"
    ),
}
_CAUSE = {
    "file size": "posix_fallocate gave EFBIG (File too large): the limit on file size, RLIMIT_FSIZE, is 0 bytes",
    "seccomp": "memfd_create gave EPERM (Operation not permitted): a seccomp filter refuses it",
    "not dumpable": "open through /proc gave EACCES (Permission denied): processes are not dumpable",
}


def run_broken(how: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _BROKEN[how], "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("how", _BROKEN)
def test_the_step_that_fails_is_named_with_its_cause(how: str) -> None:
    if how == "seccomp" and platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("the number of memfd_create is not known here")
    told = json.loads(run_broken(how, "thinwire.tools.doctor.posix").stdout)
    assert told["cause"].startswith(_CAUSE[how]) and told["advice"]
    assert posix.first_failure() is None, "here nothing is broken"


@pytest.mark.exhaustive
def test_the_report_names_what_broke_shared_memory_and_what_to_do() -> None:
    done = run_broken("file size", "thinwire", "doctor", "--json", "-")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    (processes,) = (each["findings"] for each in report["sections"] if each["name"] == "2 CPU ranks, processes")
    by_name = {finding["name"]: finding for finding in processes}
    found = by_name["shared memory"]
    assert found["mark"] == "problem" and _CAUSE["file size"] in found["text"] and "ulimit -f" in found["advice"]
    assert "File too large" in by_name["transport"]["text"] and report["problems"] >= 1


# ---------------------------------------------------------------------------------------------------------------------
# Looks that go wrong

_LINE = json.dumps({"mark": "ok", "name": "first", "text": "fine", "advice": ""})


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import time; time.sleep(20); print('{}')", "did not come back within 1 s"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by signal 11"),
        ("raise ValueError('odd')", "failed, saying: ValueError: odd"),
    ],
)
def test_a_program_that_hangs_or_dies_is_said_and_what_it_told_is_kept(code: str, said: str) -> None:
    program = f"print({_LINE!r}, flush=True); print('not JSON', flush=True); {code}"
    ((lines, ending),) = programs.run_programs([[sys.executable, "-S", "-c", program]], 1.0)
    assert lines == [json.loads(_LINE)] and said in ending


def test_what_is_compiled_is_shown_and_takes_no_time_of_the_limit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(programs, "_MOST_BETWEEN_LINES", 5.0)
    monkeypatch.setattr(programs.Process, "last_shown", time.monotonic())
    program = f"import sys, time; time.sleep(2); sys.stderr.write('odd\\nthinwire: compiling\\n'); print({_LINE!r})"
    assert programs.run_programs([[sys.executable, "-S", "-c", program]], 0.5) == [([json.loads(_LINE)], "")]
    assert capfd.readouterr().err == "thinwire: compiling\n"


def test_a_program_that_cannot_be_started_is_said() -> None:
    sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(99)"]
    missing = [], "could not be started: No such file or directory"
    assert programs.run_programs([sleeps, ["/nowhere/python"], sleeps], 99.0) == [([], ""), missing]


def test_a_look_that_raises_or_ends_badly_is_a_problem_beside_what_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unlucky() -> None:
        raise PermissionError(13, "Permission denied", "/sys/odd")

    looks.tell(unlucky)  # type: ignore[arg-type]
    finding = Finding(**json.loads(capsys.readouterr().out))
    assert finding.mark == "problem" and finding.name == "unlucky" and "/sys/odd" in finding.text
    monkeypatch.setattr(looks, "run_programs", lambda *_: [([json.loads(_LINE)], "was killed by signal 11")])
    fine, problem = looks.look("gpus", 1.0)
    assert fine.mark == "ok" and problem.mark == "problem"
    assert "was killed by signal 11; the last thing it told: first" in problem.text


# ---------------------------------------------------------------------------------------------------------------------
# Ranks


def steps(capsys: pytest.CaptureFixture[str], size: int = 2) -> dict[str, list[dict]]:
    run_ranks(one_rank.examine, size, mode="thread")
    told: dict[str, list[dict]] = {}
    for line in capsys.readouterr().out.splitlines():
        told.setdefault(json.loads(line)["step"], []).append(json.loads(line))
    return told


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sound_ranks_take_every_step(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    told = steps(capsys, size)
    assert tuple(told) == ranks.STEPS
    assert all(line["ok"] for lines in told.values() for line in lines) and all(len(told[s]) == size for s in told)
    assert told["transport"][0]["text"].startswith("direct (every rank can map every peer's memory)")


def test_a_round_with_one_wrong_element_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    combine = one_rank.tw.ExpertParallel.combine

    def off_by_a_bit(self, rows, d, **kwargs):
        y = combine(self, rows, d, **kwargs)
        if self.comm.rank == 1:
            y[7, 100] += y[7, 100].abs() * 2**-20 + 2**-20
        return y

    monkeypatch.setattr(one_rank.tw.ExpertParallel, "combine", off_by_a_bit)
    told = steps(capsys)
    assert [line["ok"] for line in sorted(told["round"], key=lambda line: line["rank"])] == [True, False]
    assert any("1 of 12288 elements differ from the exact result at rank 1" in line["text"] for line in told["round"])


def test_what_failed_at_one_rank_is_a_problem_with_advice_that_fits() -> None:
    meeting = [{"rank": rank, "step": "meeting", "ok": True, "text": "met", "seconds": 0.0} for rank in (0, 1)]
    lost = {"rank": 1, "step": "shared memory", "ok": False, "text": "OSError: Too many open files", "seconds": 0.0}
    fine, problem = ranks._findings([*meeting, lost], [], 2, posix_heap=False)
    assert (fine.mark, problem.mark) == ("ok", "problem") and "ulimit -n" in problem.advice
    wrong = lost | {"step": "round", "text": "ThinwireError: 1 of 12 elements differ from the exact result at rank 1"}
    assert "do not trust" in ranks._findings([*meeting, wrong], [], 2, posix_heap=False)[-1].advice
    lacking = lost | {
        "step": "transport",
        "text": "TransportUnavailable: kernels need numba: pip install numba (or not)",
    }
    assert ranks._findings([*meeting, lacking], [], 2, posix_heap=False)[-1].advice == "pip install numba"
    *_, ended = ranks._findings(meeting, ["rank 1 was killed by signal 9, saying: nothing"], 2, posix_heap=False)
    assert ended.name == "shared memory" and "memory ran out" in ended.advice


# ---------------------------------------------------------------------------------------------------------------------
# The report


def test_a_cause_is_one_problem_to_which_others_point() -> None:
    causes: dict[str, str] = {}
    lacking = [Finding("problem", step, "no numba", "pip install numba") for step in ("transport", "round")]
    other = Finding("problem", "all-reduce", "2 elements differ", "report it")
    first = doctor.merge_causes("processes", [Finding("ok", "meeting", "met"), *lacking, other], causes)
    assert [finding.mark for finding in first] == ["ok", "problem", "info", "problem"]
    assert first[1] is lacking[0] and first[2].text == "not possible: the problem of transport of 'processes'"
    second = doctor.merge_causes("threads", lacking, causes)
    assert [(each.mark, each.text) for each in second] == [("info", first[2].text)] * 2


def test_what_is_not_there_is_not_called_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")  # no nvidia-smi
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(looks.os.path, "exists", lambda path: False)
    found = {finding.name: finding for finding in looks.versions()}
    assert found["NCCL"].mark == found["driver"].mark == "info" and found["driver"].text.startswith("none found")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (finding,) = looks.gpus()
    assert finding.text.startswith("no GPU: torch.cuda.is_available() is False; torch is ")


def test_each_gpu_is_named_and_what_is_missing_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = [
        SimpleNamespace(name=name, major=major, minor=0, multi_processor_count=132)
        for name, major in (("New", 9), ("Old", 7))
    ]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, answer in (
        ("is_available", lambda: True),
        ("device_count", lambda: 2),
        ("get_device_properties", properties.__getitem__),
        ("mem_get_info", lambda index: (1 << 30, 80 << 30)),
        ("can_device_access_peer", lambda a, b: a < b),
    ):
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setenv("PATH", "")
    new, old, access, links = looks.gpus()
    assert (new.name, new.mark) == ("cuda:0", "ok") and "New, compute capability 9.0" in new.text
    assert "1.0 GiB of 80.0 GiB free" in new.text
    assert (old.name, old.mark) == ("cuda:1", "note") and "8.0 and newer" in old.advice
    assert (access.mark, access.text) == ("note", "not from cuda:1 to 0")
    assert links.text == "unknown: nvidia-smi not found"


@pytest.mark.parametrize(("mark", "status"), [("ok", 0), ("info", 0), ("note", 0), ("problem", 1)])
def test_only_a_problem_makes_the_exit_status_1(
    mark: str, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [Finding("ok", "a", "fine"), Finding(mark, "b", "word " * 60, "do this" if mark != "ok" else "")]
    monkeypatch.setattr(doctor, "sections", lambda: iter([("part", findings)]))
    file = tmp_path / "report.json"
    assert main(["doctor", "--json", str(file)]) == status
    text = capsys.readouterr().out
    assert all(len(line) <= 120 for line in text.splitlines()) and ("-> do this" in text) == (mark != "ok")
    assert main(["doctor", "--json", "-"]) == status
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())
    assert json.loads(file.read_text())["sections"][0]["findings"][1]["mark"] == mark
    assert main(["doctor", "--json", os.path.join(os.sep, "nowhere", "report.json")]) == 2
    assert "/nowhere/report.json" in capsys.readouterr().err
