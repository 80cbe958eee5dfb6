"""The steps of shared memory between processes one by one, to name the one that fails and why. Needs no torch.

    python -m thinwire.tools.doctor.posix

prints as JSON the step that fails, the error's number, and what is known of it; nothing where all work. They are the
steps of `thinwire.comm.memory.posix_heap`, with a megabyte; another process opens the file, as a peer does.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import re
import resource
import subprocess
import sys
from typing import NamedTuple

from thinwire.tools.doctor.finding import read_text

_NUM_BYTES = 1 << 20
_PR_GET_DUMPABLE = 3
_OPEN = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR))"


class Failure(NamedTuple):
    """The step that failed, and what the process could see of the reason."""

    step: str
    number: int  # errno's
    known: str


def first_failure() -> Failure | None:
    """Takes the steps."""
    step = "memfd_create"
    try:
        descriptor = os.memfd_create("thinwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        step = "posix_fallocate"
        os.posix_fallocate(descriptor, 0, _NUM_BYTES)
        step = "F_ADD_SEALS"
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        step = "mmap"
        mmap.mmap(descriptor, _NUM_BYTES).close()
    except OSError as error:
        return Failure(step, error.errno or 0, _known(step))
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    done = subprocess.run([sys.executable, "-c", _OPEN, path], capture_output=True, text=True, timeout=30)
    if done.returncode == 0:
        return None
    number = re.search(r"\[Errno (\d+)\]", done.stderr)
    return Failure("open through /proc", int(number[1]) if number else 0, _known("open through /proc"))


def _known(step: str) -> str:
    """What this process can see that bears on a step."""
    status = read_text("/proc/self/status")
    if step == "memfd_create":
        found = re.search(r"^Seccomp:\s*(\d)", status, re.MULTILINE)
        return f"Seccomp {found[1] if found else 'unknown'}"
    for name, limits in (("RLIMIT_FSIZE", "posix_fallocate"), ("RLIMIT_AS", "mmap")):
        if step == limits:
            return f"{name} {resource.getrlimit(getattr(resource, name))[0]}"
    if not status:
        return "no /proc"
    return "dumpable" if ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1 else "not dumpable"


def explain(failure: Failure) -> tuple[str, str]:
    """The cause, and what to do about it.

    >>> explain(Failure("memfd_create", errno.EMFILE, "Seccomp 0"))
    ('memfd_create gave EMFILE (Too many open files): no file can be opened any more', 'ulimit -n 65536')
    """
    cause, advice = _cause(*failure)
    name = errno.errorcode.get(failure.number, str(failure.number))
    return f"{failure.step} gave {name} ({os.strerror(failure.number)}): {cause}", advice


def _cause(step: str, number: int, known: str) -> tuple[str, str]:
    if number in (errno.EMFILE, errno.ENFILE):
        return "no file can be opened any more", "ulimit -n 65536"
    if step == "memfd_create":
        who = "a seccomp filter" if known == "Seccomp 2" else "the kernel or a preloaded library"
        return f"{who} refuses it", "let the container's seccomp profile allow memfd_create, and unset LD_PRELOAD"
    if number == errno.EFBIG:
        limit = known.removeprefix("RLIMIT_FSIZE ")
        advice = "a file in memory counts: ulimit -f unlimited, in the shell or the service that starts ranks"
        return f"the limit on file size, RLIMIT_FSIZE, is {limit} bytes", advice
    if number in (errno.ENOMEM, errno.ENOSPC, errno.EDQUOT):
        advice = "raise the control group's limit or ulimit -v, or end what holds memory"
        return f"no memory is left ({known})", advice
    if step == "open through /proc":
        if known == "no /proc":
            return "/proc is not mounted here", "mount /proc in the container that ranks run in"
        if known == "not dumpable":
            advice = "start ranks without what clears it: a set-user-id or unreadable executable, or a library"
            return "processes are not dumpable (PR_SET_DUMPABLE is 0): others need CAP_SYS_PTRACE to see files", advice
        advice = (
            "run all ranks as one user, in one pid namespace, and without a profile (AppArmor, SELinux) that forbids it"
        )
        return "a process may not open another one's file", advice
    return "something outside of thinwire refuses it", "look for a seccomp profile or a security module that does"


if __name__ == "__main__":
    if (failure := first_failure()) is not None:
        print(json.dumps(failure._asdict()))
