"""The steps of shared memory between processes one by one, to name the one that fails and why. Needs no torch.

    python -m thinwire.tools.doctor.posix

prints as JSON why the step fails, and what to do about it; nothing where all work. They are the steps of
`thinwire.comm.memory.heap.PosixHeap`, with a megabyte; another process opens the file, as a peer does.
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

from thinwire.tools.doctor.finding import read_text

_NUM_BYTES = 1 << 20
_PR_GET_DUMPABLE = 3
_OPEN = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR))"
_BY_PEER = "open through /proc"


def first_failure() -> tuple[str, int] | None:
    """Takes the steps; returns the one that fails, and the error's number."""
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
        return step, error.errno or 0
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    done = subprocess.run([sys.executable, "-c", _OPEN, path], capture_output=True, text=True, timeout=30)
    number = re.search(r"\[Errno (\d+)\]", done.stderr)
    return (_BY_PEER, int(number[1]) if number else 0) if done.returncode else None


def explain(step: str, number: int) -> tuple[str, str]:
    """The cause of a failure in this process, and what to do about it.

    >>> explain("memfd_create", errno.EMFILE)
    ('memfd_create gave EMFILE (Too many open files): no file can be opened any more', 'ulimit -n 65536')
    """
    cause, advice = _cause(step, number)
    return f"{step} gave {errno.errorcode.get(number, str(number))} ({os.strerror(number)}): {cause}", advice


def _cause(step: str, number: int) -> tuple[str, str]:
    status = read_text("/proc/self/status")
    if number in (errno.EMFILE, errno.ENFILE):
        return "no file can be opened any more", "ulimit -n 65536"
    if step == "memfd_create":
        filtered = re.search(r"^Seccomp:\s*2", status, re.MULTILINE)
        who = "a seccomp filter" if filtered else "the kernel or a preloaded library"
        return f"{who} refuses it", "let the container's seccomp profile allow memfd_create, and unset LD_PRELOAD"
    if number == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        advice = "a file in memory counts: ulimit -f unlimited, in the shell or the service that starts ranks"
        return f"the limit on file size, RLIMIT_FSIZE, is {limit} bytes", advice
    if number in (errno.ENOMEM, errno.ENOSPC, errno.EDQUOT):
        known = f"RLIMIT_AS {resource.getrlimit(resource.RLIMIT_AS)[0]}"
        return f"no memory is left ({known})", "raise the control group's limit or ulimit -v, or end what holds memory"
    if step != _BY_PEER:
        return "something outside of thinwire refuses it", "look for a seccomp profile or a security module that does"
    if not status:
        return "/proc is not mounted here", "mount /proc in the container that ranks run in"
    if ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) != 1:
        advice = "start ranks without what clears it: a set-user-id or unreadable executable, or a library"
        return "processes are not dumpable (PR_SET_DUMPABLE is 0): others need CAP_SYS_PTRACE to see files", advice
    advice = (
        "run all ranks as one user, in one pid namespace, and without a profile (AppArmor, SELinux) that forbids it"
    )
    return "a process may not open another one's file", advice


if __name__ == "__main__":
    if (failure := first_failure()) is not None:
        cause, advice = explain(*failure)
        print(json.dumps({"cause": cause, "advice": advice}))
