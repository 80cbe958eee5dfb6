"""Two hosts on one machine: ranks in each of two network namespaces, joined by a link of limited rate.

The namespaces have no names: each belongs to its ranks' processes and ends with them, and with it ends the link. A rank
ends when its standard input does, so nothing stays behind, whichever way the caller ends: by an error, by Ctrl-C, or
killed.

What the kernel does with a packet on its way to the other host runs on this machine's processors too. On a machine of
few cores a fast link is therefore slower than its rate, and slower than between two real hosts.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from thinwire.errors import ThinwireError

_TOOLS = ("unshare", "nsenter", "ip", "tc")
INTERFACE = "tw0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_PORT = 29577
_LATENCY = "50ms"  # what the queue before the link holds; beyond that packets are dropped
_STARTING = 30.0  # seconds that a namespace may take
_POLL_SECONDS = 0.01
_RATE = re.compile(r"(\d+(?:\.\d+)?)(mbit|gbit)")
#: Where `ip` and `tc` are, which an ordinary user's PATH may leave out.
_SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")


class LinkUnavailable(ThinwireError, RuntimeError):
    """There can be no such link here; the message says why."""


def run_on_two_hosts(
    function: str, settings: dict[str, Any], *, rate: str, timeout: float = 300.0, ranks_per_host: int = 1
) -> list[Any]:
    """Runs `function(comm, **settings)` on two hosts whose only connection is a link of `rate` each way.

    Args:
        function: "module:name"; ranks import it by that. What it returns must fit into JSON.
        settings: keyword arguments, which must fit into JSON too.
        rate: bits a second, such as "500mbit" or "10gbit".
        timeout: seconds for everything.
        ranks_per_host: ranks of each host, of which the first host has the first ones.

    Returns:
        Each rank's result.

    Raises:
        ValueError: a rate that is none, or no rank on a host.
        LinkUnavailable: this is not root, a tool is missing, or the kernel refuses; nothing was run.
        ThinwireError: a rank failed; what it said is on standard error.
        TimeoutError: the ranks had not finished in time, and were killed.
    """
    burst = burst_bytes(rate)
    if ranks_per_host < 1:
        raise ValueError(f"ranks_per_host is {ranks_per_host!r}, expected an int of at least 1")
    _require_tools()
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="thinwire-link-") as folder, contextlib.ExitStack() as ended:
        results = [Path(folder) / f"rank{rank}.json" for rank in range(2 * ranks_per_host)]
        hosts = [ended.enter_context(_rank(host * ranks_per_host, ranks_per_host)) for host in range(2)]
        _join(hosts, rate, burst)
        ranks: list[subprocess.Popen[str]] = []
        for rank in range(len(results)):
            host, is_first = hosts[rank // ranks_per_host], rank % ranks_per_host == 0
            ranks.append(host if is_first else ended.enter_context(_rank(rank, ranks_per_host, host)))
        for process, result in zip(ranks, results, strict=True):
            assert process.stdin is not None
            job = {"function": function, "settings": settings, "result": str(result), "timeout": timeout}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        _wait(ranks, deadline)
        return [json.loads(result.read_text()) for result in results]


def or_skipped(main: Callable[[Sequence[str] | None], None]) -> Callable[..., None]:
    """A script's `main`, which says so where there can be no link, and does nothing else."""

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> None:
        try:
            main(arguments)
        except LinkUnavailable as reason:
            print(f"skipped: {reason}")

    return run


def burst_bytes(rate: str) -> int:
    """What may pass a link of this rate at once after a pause: what it carries in a millisecond.

    That much of every transfer is for nothing. Less than two packets, which are 64 KiB here, would lower the rate.

    >>> burst_bytes("1gbit"), burst_bytes("2.5mbit")
    (131072, 131072)
    >>> burst_bytes("10gbit")
    1250000
    """
    return max(1 << 17, int(bits_per_second(rate) / 8000))


def bits_per_second(rate: str) -> float:
    """What a rate says; or ValueError, where it is none.

    >>> bits_per_second("2.5gbit")
    2500000000.0
    """
    match = _RATE.fullmatch(rate)
    if match is None:
        raise ValueError(f"rate {rate!r} is none; accepted: a number and mbit or gbit, such as 10gbit")
    return float(match[1]) * {"mbit": 1e6, "gbit": 1e9}[match[2]]


def congestion_control() -> str:
    """Which of TCP's ways to share a link the ranks use: this kernel's default."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def _require_tools() -> None:
    _find_tools()
    if os.geteuid() != 0:
        raise LinkUnavailable(f"network namespaces need root; this is user {os.geteuid()}")


def _find_tools() -> dict[str, str]:
    """The path of each tool."""
    if not sys.platform.startswith("linux"):
        raise LinkUnavailable(f"network namespaces need Linux; this is {sys.platform}")
    folders = os.pathsep.join([os.environ.get("PATH", ""), *_SYSTEM_FOLDERS])
    found = {tool: shutil.which(tool, path=folders) for tool in _TOOLS}
    missing = [tool for tool, path in found.items() if path is None]
    if missing:
        raise LinkUnavailable(f"{', '.join(missing)} not found; they come with iproute2 and util-linux")
    return {tool: path for tool, path in found.items() if path is not None}


@contextlib.contextmanager
def _rank(rank: int, ranks_per_host: int, host: subprocess.Popen[str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A rank's process in a namespace of its own, or in that of `host`; it waits for its job on standard input."""
    tools = _find_tools()
    into = (tools["unshare"],) if host is None else (tools["nsenter"], "--target", str(host.pid))
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(2 * ranks_per_host),
        "LOCAL_RANK": str(rank % ranks_per_host),
        "THINWIRE_HOST": f"host {rank // ranks_per_host}",
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it would warn that these addresses have no names
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    process = subprocess.Popen(
        [*into, "--net", sys.executable, "-m", "benchmarks.link"],
        stdin=subprocess.PIPE,
        env=environment,
        text=True,
        start_new_session=True,  # Ctrl-C is for the caller, which then ends its ranks
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _join(hosts: Sequence[subprocess.Popen[str]], rate: str, burst: int) -> None:
    tools = _find_tools()
    for host in hosts:
        _await_namespace(host)
    _command(tools["ip"], "link", "add", INTERFACE, "netns", str(hosts[0].pid), "type", "veth", "peer", "name",
             INTERFACE, "netns", str(hosts[1].pid))  # fmt: skip
    for host, address in zip(hosts, ADDRESSES, strict=True):
        inside = (tools["nsenter"], "--target", str(host.pid), "--net")
        _command(*inside, tools["ip"], "address", "add", f"{address}/24", "dev", INTERFACE)
        _command(*inside, tools["ip"], "link", "set", "lo", "up")
        _command(*inside, tools["ip"], "link", "set", INTERFACE, "up")
        _command(*inside, tools["tc"], "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", rate, "burst",
                 str(burst), "latency", _LATENCY)  # fmt: skip


def _await_namespace(host: subprocess.Popen[str]) -> None:
    """Until the process has left this process's namespace for its own."""
    ours, deadline = os.readlink("/proc/self/ns/net"), time.monotonic() + _STARTING
    while host.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{host.pid}/ns/net") != ours:
                return
        time.sleep(_POLL_SECONDS)
    raise LinkUnavailable(
        "unshare --net could not make a network namespace (its message is above); a container needs --privileged, or "
        "--cap-add SYS_ADMIN --cap-add NET_ADMIN"
    )


def _command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise LinkUnavailable(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")


def _wait(ranks: Sequence[subprocess.Popen[str]], deadline: float) -> None:
    running = dict(enumerate(ranks))
    while running:
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {', '.join(map(str, running))} had not finished in time and were killed")
        for rank, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            if code:
                raise ThinwireError(f"rank {rank} ended with exit code {code}; what it said is above")
            del running[rank]
        time.sleep(_POLL_SECONDS)


def _rank_main() -> None:
    """A rank's process: reads its job, which comes once the link is up, and leaves its result in the job's file."""
    line = sys.stdin.readline()
    if not line:
        return  # the caller ended before it had a job
    job = json.loads(line)
    folder = Path(job["result"]).parent
    threading.Thread(target=_end_with_caller, args=(folder,), daemon=True).start()
    import torch

    import thinwire

    torch.set_num_threads(1)
    module, _, name = job["function"].partition(":")
    with thinwire.init(device="cpu", timeout=job["timeout"]) as comm:
        result = getattr(importlib.import_module(module), name)(comm, **job["settings"])
    Path(job["result"]).write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    # While Python ends, a thread that needs it, such as Gloo's that lets go of the last tensors, aborts the process.
    os._exit(0)


def _end_with_caller(folder: Path) -> None:
    sys.stdin.read()
    shutil.rmtree(folder, ignore_errors=True)  # in the place of a caller that was killed
    os._exit(1)


if __name__ == "__main__":
    _rank_main()
