"""What `run_ranks` promises: fresh processes or threads, a time limit that holds, failures that explain themselves."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from thinwire import testing
from thinwire.comm import Communicator, default_communicator, init
from thinwire.comm.threads import ThreadWorld
from thinwire.errors import PeerTimeout, ThinwireError, TransportUnavailable
from thinwire.testing import RankError, RanksTimeout, run_ranks

HANG_BOUND = 60.0  # seconds; far above what anything here takes


def facts(comm, tensor, suffix=""):
    loaded = sorted({"triton", "numba"} & set(sys.modules))
    return {
        "place": (comm.rank, comm.size),
        "pid": os.getpid(),
        "tensor": tensor * comm.rank,
        "suffix": suffix,
        "threads": torch.get_num_threads(),
        "loaded": loaded,
        "interface": os.environ["GLOO_SOCKET_IFNAME"],
    }


def raise_on(comm, ranks):
    if comm.rank in ranks:
        time.sleep(0.3 * ranks.index(comm.rank))
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError(f"rank {comm.rank} is unhappy\nin two lines") from error
    time.sleep(HANG_BOUND)


def die_on(comm, rank, how):
    if comm.rank == rank:
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)
    return comm.rank


def wait_for_ever_unless(comm, rank, folder):
    child = subprocess.Popen(["sleep", str(2 * HANG_BOUND)])
    (Path(folder) / f"{comm.rank}.pids").write_text(f"{os.getpid()} {child.pid}")
    if comm.rank == rank:
        child.kill()
        child.wait()
        return
    sleep_in_a_named_function()


def sleep_in_a_named_function():
    time.sleep(2 * HANG_BOUND)


def start_ranks_and_be_killed(comm, folder):
    def be_killed():
        while len([file for file in Path(folder).glob("*.pids") if file.stat().st_size]) < 2:
            time.sleep(0.02)
        (Path(folder) / "seen").write_text(str(len(list(Path(os.environ["TMPDIR"]).glob("thinwire-ranks-*")))))
        for file in Path(folder).glob("*.pids"):
            os.kill(int(file.read_text().split()[1]), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=be_killed).start()
    run_ranks(wait_for_ever_unless, 2, None, folder)


def give_back_what_cannot_be_sent(comm):
    return threading.Lock() if comm.rank == 1 else None


def large_tensor(comm, tensor):
    return tensor + comm.rank


def say_hello(comm):
    print(f"rank {comm.rank} says hello")
    os.system("echo so does its child >&2")


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # a grandchild that nobody has reaped yet has ended all the same


def assert_all_end(pids, seconds=10.0):
    deadline = time.monotonic() + seconds
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {running}"
        time.sleep(0.02)


@pytest.fixture(scope="module", autouse=True)
def fork_server_of_users():
    """Ranks as users get them: the other tests' come from a server that has imported more.

    The first call of a process imports torch; the time limits below are meant for the others.
    """
    testing.preload()
    run_ranks(die_on, 1, None, "")
    yield
    testing.preload("tests.helpers.warm")


@pytest.fixture
def nothing_starts(monkeypatch):
    def refuse(*_):
        raise AssertionError("a process was started")

    monkeypatch.setattr(testing, "_start", refuse)


@pytest.mark.parametrize("world_size", [1, 3])
def test_results_come_in_rank_order_from_separate_fresh_processes(world_size):
    tensor = torch.arange(6.0).view(2, 3).t()  # strided
    results = run_ranks(facts, world_size, tensor, "x")
    assert [result["place"] for result in results] == [(rank, world_size) for rank in range(world_size)]
    assert len({os.getpid(), *(result["pid"] for result in results)}) == world_size + 1
    for rank, result in enumerate(results):
        assert torch.equal(result["tensor"], tensor * rank)
        assert result["suffix"] == "x"
        assert result["loaded"] == []
        assert 1 <= result["threads"] <= max(1, (os.cpu_count() or 1) // world_size)
        assert result["interface"] == os.environ.get("GLOO_SOCKET_IFNAME", result["interface"]) != ""


def test_a_partial_of_an_importable_function_is_accepted():
    results = run_ranks(functools.partial(facts, suffix="y"), 1, torch.ones(1))
    assert results[0]["suffix"] == "y"


def test_environment_is_in_force_before_the_functions_module_is_imported(tmp_path, monkeypatch):
    source = "import os\nSEEN = [os.environ.get(f'THINWIRE_TEST_{x}') for x in 'ABC']\ndef seen(comm): return SEEN\n"
    (tmp_path / "reads_environment.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("THINWIRE_TEST_A", "from the parent")
    monkeypatch.setenv("THINWIRE_TEST_B", "from the parent")
    module = importlib.import_module("reads_environment")
    results = run_ranks(module.seen, 2, env={"THINWIRE_TEST_B": "from env", "THINWIRE_TEST_C": "from env"})
    assert results == [["from the parent", "from env", "from env"]] * 2
    assert "THINWIRE_TEST_C" not in os.environ


def test_repeated_runs_leave_no_shared_memory_descriptors_threads_or_processes():
    tensor = torch.zeros(1 << 18)

    def resources():
        shared = sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else []
        return shared, len(os.listdir("/proc/self/fd")), threading.active_count()

    def run():
        results = run_ranks(large_tensor, 2, tensor)
        assert [float(result[0]) for result in results] == [0.0, 1.0]

    run()
    before = resources()
    for _ in range(3):
        run()
    shared, descriptors, threads = resources()
    assert shared == before[0] and descriptors <= before[1] and threads <= before[2]  # one may end late


def test_the_whole_traceback_of_a_failing_rank_is_shown():
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(raise_on, 3, [1])
    assert time.monotonic() - begin < HANG_BOUND / 2
    message = str(caught.value)
    assert list(caught.value.failures) == [1]
    assert message.startswith("rank 1 of 3 failed\n")
    assert "KeyError: 'missing'" in message
    assert "The above exception was the direct cause of the following exception" in message
    assert 'raise ValueError(f"rank {comm.rank} is unhappy' in message
    assert "ValueError: rank 1 is unhappy\nin two lines" in message
    assert "ranks 0, 2: not finished 2 s later, and killed" in message


def test_several_failing_ranks_are_all_shown_the_first_one_first():
    with pytest.raises(RankError) as caught:
        run_ranks(raise_on, 2, [1, 0])
    assert list(caught.value.failures) == [1, 0]
    message = str(caught.value)
    assert message.startswith("ranks 1, 0 of 2 failed, rank 1 first\n")
    assert message.index("ValueError: rank 1 is unhappy") < message.index("ValueError: rank 0 is unhappy")


@pytest.mark.parametrize(("how", "told"), [("signal", "killed by SIGKILL"), ("exit", "ended with exit code 3")])
def test_a_rank_that_dies_is_named_with_how_it_died(how, told):
    with pytest.raises(RankError) as caught:
        run_ranks(die_on, 2, 1, how)
    assert caught.value.failures == {1: f"{told}, before fn had returned"}
    assert f"--- rank 1 ---\n{told}" in str(caught.value)


def test_the_time_limit_ends_every_rank_and_what_it_started_and_shows_where_they_were(tmp_path):
    begin = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        run_ranks(wait_for_ever_unless, 3, 1, str(tmp_path), timeout=8.0)
    assert time.monotonic() - begin < HANG_BOUND / 2
    assert isinstance(caught.value, RanksTimeout)
    assert caught.value.ranks == [0, 2]
    message = str(caught.value)
    assert message.startswith("ranks 0, 2 of 3 had not finished after 8 s")
    assert message.count("in sleep_in_a_named_function") == 2
    pids = [int(pid) for file in tmp_path.glob("*.pids") for pid in file.read_text().split()]
    assert len(pids) == 6
    assert_all_end(pids)


def test_functions_that_ranks_cannot_import_are_refused_before_anything_starts(nothing_starts):
    def nested(comm):
        return comm.rank

    for fn in (nested, lambda comm: comm.rank, functools.partial(nested)):
        with pytest.raises(RankError, match='pass mode="thread", or define it with def in a module or script'):
            run_ranks(fn, 2)


def test_a_function_of_a_module_that_is_on_no_path_is_refused_before_anything_starts(nothing_starts, monkeypatch):
    module = type(sys)("made_up_module")
    exec("def fn(comm): return comm.rank", module.__dict__)
    monkeypatch.setitem(sys.modules, "made_up_module", module)
    with pytest.raises(RankError, match="cannot find a module 'made_up_module'"):
        run_ranks(module.fn, 2)


def test_arguments_that_cannot_be_sent_are_named_before_anything_starts(nothing_starts):
    with pytest.raises(RankError, match="argument 1, a lock, cannot be sent"):
        run_ranks(facts, 2, torch.ones(1), threading.Lock())


def test_results_that_cannot_be_sent_are_named():
    with pytest.raises(RankError, match="rank 1's result, a lock, cannot be sent back"):
        run_ranks(give_back_what_cannot_be_sent, 2)


def test_what_ranks_print_appears_where_the_parent_prints_now(capfd):
    run_ranks(say_hello, 2)
    captured = capfd.readouterr()
    assert captured.out.count("rank 0 says hello") == captured.out.count("rank 1 says hello") == 1
    assert captured.err.count("so does its child") == 2


@pytest.mark.exhaustive
def test_functions_and_classes_of_a_script_work_and_its_imports_see_the_environment(tmp_path):
    (tmp_path / "reads_at_import.py").write_text("import os\nSEEN = os.environ.get('THINWIRE_TEST_A')\n")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            from reads_at_import import SEEN
            from thinwire.testing import run_ranks

            class Box:
                def __init__(self, value):
                    self.value = value

            def add_rank(comm, box):
                return Box((box.value + comm.rank, SEEN))

            if __name__ == "__main__":
                results = run_ranks(add_rank, 2, Box(5), env={"THINWIRE_TEST_A": "set"})
                print([box.value for box in results])
            """
        )
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=HANG_BOUND, env=environ, check=False
    )
    assert done.stdout == "[(5, 'set'), (6, 'set')]\n", done.stderr


def test_a_function_that_comes_from_no_file_is_refused_before_anything_starts(nothing_starts, monkeypatch):
    main = type(sys)("__main__")  # as for `python -c`, and where code is typed in
    exec("def fn(comm): return comm.rank", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(RankError, match="fn was typed in, or read from standard input or -c"):
        run_ranks(main.fn, 2)


def test_a_function_that_is_typed_in_is_told_to_take_threads_which_work():
    typed = """
from thinwire.testing import run_ranks
def fn(comm): return comm.size + comm.rank

run_ranks(fn, 2)
run_ranks(fn, 2, mode="thread")
"""
    done = subprocess.run([sys.executable, "-i"], input=typed, capture_output=True, text=True, timeout=HANG_BOUND)
    assert 'fn was typed in, or read from standard input or -c; pass mode="thread"' in done.stderr
    assert done.stdout.splitlines()[-1] == "[2, 3]", done.stderr


def interrupt_itself(comm):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(HANG_BOUND)


def test_a_rank_that_is_interrupted_by_itself_raises():
    """Its start has SIGINT blocked, and its function has not."""
    with pytest.raises(RankError, match="KeyboardInterrupt"):
        run_ranks(interrupt_itself, 1)


def test_ranks_end_when_their_parent_is_killed_and_leave_nothing(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with pytest.raises(RankError, match="killed by SIGKILL"):
        run_ranks(start_ranks_and_be_killed, 1, str(tmp_path), env={"TMPDIR": str(temporary)})
    assert (tmp_path / "seen").read_text() == "1", "ranks answer in a folder"
    assert_all_end([int(file.read_text().split()[0]) for file in tmp_path.glob("*.pids")])
    assert list(temporary.rglob("*")) == []


def look_for_a_secret(comm, folder):
    comm.barrier()
    files = [file for file in Path(folder).rglob("*") if file.is_file()]
    return len(files), [file.name for file in files if b"0123-4567" in file.read_bytes()]


def test_no_file_with_a_name_holds_the_environment(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for num_files, found in run_ranks(look_for_a_secret, 2, str(tmp_path), env={"SECRET": "0123-4567"}):
        assert num_files >= 2 and found == []


# --- ranks that are threads -------------------------------------------------------------------------------------------


def test_threads_run_any_callable_on_the_very_arguments_and_give_back_the_very_results():
    caller, shared, locks = threading.current_thread(), [], [threading.Lock() for _ in range(3)]
    num_threads = torch.get_num_threads()

    def fn(comm, argument):
        assert argument is shared and threading.current_thread() is not caller
        assert torch.get_num_threads() == num_threads
        argument.append((comm.rank, comm.size, comm.device, os.getpid()))
        comm.barrier()
        return locks[comm.rank]

    before = threading.active_count()
    results = run_ranks(fn, 3, shared, mode="thread")
    assert all(result is lock for result, lock in zip(results, locks, strict=True))
    assert sorted(shared, key=str) == [(rank, 3, torch.device("cpu"), os.getpid()) for rank in range(3)]
    assert torch.get_num_threads() == num_threads
    assert threading.active_count() == before


def test_threads_that_fail_are_all_shown_the_first_one_first():
    def fn(comm):
        if comm.rank == 1:
            try:
                {}["missing"]
            except KeyError as error:
                raise ValueError("rank 1 is unhappy\nin two lines") from error
        if comm.rank == 0:
            comm.barrier()
        return comm.rank

    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(fn, 3, mode="thread")
    assert time.monotonic() - begin < HANG_BOUND / 2
    message = str(caught.value)
    assert list(caught.value.failures) == [1, 0]
    assert message.startswith("ranks 1, 0 of 3 failed, rank 1 first\n")
    assert "KeyError: 'missing'" in message and "ValueError: rank 1 is unhappy\nin two lines" in message
    assert "PeerTimeout: rank 0 of 3: gave up waiting for ranks 1, 2: rank 1 raised ValueError: rank 1 is" in message


def test_what_ends_a_thread_in_any_way_is_a_failure():
    def fn(comm):
        if comm.rank == 0:
            sys.exit("enough")
        pytest.skip("not here")

    with pytest.raises(RankError) as caught:
        run_ranks(fn, 2, mode="thread")
    assert "SystemExit: enough" in caught.value.failures[0] and "Skipped: not here" in caught.value.failures[1]


def test_a_thread_that_goes_on_after_a_failure_is_left_behind_and_its_peers_are_not():
    release, ended = threading.Event(), threading.Event()

    def fn(comm):
        if comm.rank == 0:
            raise ValueError("first")
        if comm.rank == 2:
            with pytest.raises(PeerTimeout, match="gave up waiting for rank 1: run_ranks gave up") as caught:
                comm.post([None] * 3, [None, torch.zeros(1, dtype=torch.uint8), None]).wait()
            assert caught.value.ranks == (1,)
            return
        release.wait(HANG_BOUND)
        with pytest.raises(PeerTimeout, match="cannot be used any more"):
            comm.barrier()
        assert threading.current_thread().daemon
        ended.set()

    begin = time.monotonic()
    with pytest.raises(RankError, match=r"ranks 1, 2: not finished 2 s later, and cannot be killed") as caught:
        run_ranks(fn, 3, mode="thread")
    assert time.monotonic() - begin < HANG_BOUND / 2
    assert list(caught.value.failures) == [0]
    release.set()
    assert ended.wait(HANG_BOUND)


def test_the_time_limit_of_threads_shows_where_they_were_and_ends_their_waits():
    released, ends = threading.Event(), []

    def wait_in_a_named_function():
        released.wait(HANG_BOUND)

    def fn(comm):
        if comm.rank == 0:
            return
        if comm.rank == 1:
            wait_in_a_named_function()
        try:
            comm.barrier()
        except PeerTimeout as error:
            ends.append((comm.rank, error.ranks))

    begin = time.monotonic()
    with pytest.raises(RanksTimeout) as caught:
        run_ranks(lambda comm: comm.rank == 0 or fn(comm), 2, mode="thread", timeout=0.5)
    assert caught.value.ranks == [1]
    with pytest.raises(RanksTimeout) as caught:
        run_ranks(lambda comm: fn(comm) if comm.rank else comm.share_objects(0), 3, mode="thread", timeout=0.5)
    assert time.monotonic() - begin < HANG_BOUND / 2
    assert caught.value.ranks == [0, 1, 2]
    message = str(caught.value)
    assert message.startswith("ranks 0, 1, 2 of 3 had not finished after 0.5 s; threads cannot be killed")
    assert message.count("in wait_in_a_named_function") == 1 and message.count("in share_objects") >= 1
    assert message.count("--- rank 1: had not returned ---") == 1
    assert ends == [(2, (1,))]  # at once; and the one to blame is the one that was not waiting
    released.set()


def test_each_rank_thread_has_a_default_communicator_of_its_own():
    with pytest.raises(ThinwireError, match="no default communicator"):
        default_communicator()

    def fn(comm):
        assert default_communicator() is init() is init(device="cpu", rank=comm.rank, world_size=2) is comm
        with pytest.raises(ThinwireError, match="before asking for world_size=5"):
            init(rank=comm.rank, world_size=5)
        comm.barrier()
        comm.close()
        with pytest.raises(ThinwireError, match="its communicator is closed"):
            init()
        with pytest.raises(ThinwireError, match="no default communicator"):
            default_communicator()

    run_ranks(fn, 2, mode="thread")
    with pytest.raises(ThinwireError, match="no default communicator"):
        default_communicator()


def place(comm):
    return comm.rank, comm.size


def test_rank_threads_can_start_ranks_of_their_own():
    def inner(comm, outer):
        assert default_communicator() is comm
        return outer, comm.all_gather_object(comm.rank)

    def fn(comm):
        found = run_ranks(inner, 2, comm.rank, mode="thread")
        assert default_communicator() is comm
        comm.barrier()
        return found, run_ranks(place, 1) if comm.rank == 0 else None

    first, second = run_ranks(fn, 2, mode="thread")
    assert first == ([(0, [0, 1])] * 2, [(0, 1)]) and second == ([(1, [0, 1])] * 2, None)


def test_ranks_within_ranks_are_given_up_together_with_them():
    errors = []

    def innermost(comm):
        comm.post(
            [None] * 2, [None if peer == comm.rank else torch.zeros(1, dtype=torch.uint8) for peer in range(2)]
        ).wait()

    def fn(comm):
        if comm.rank == 1:
            raise ValueError("first")
        try:
            run_ranks(innermost, 2, mode="thread")
        except RankError as error:
            errors.append(error)

    begin = time.monotonic()
    with pytest.raises(RankError, match="ValueError: first"):
        run_ranks(fn, 2, mode="thread")
    assert time.monotonic() - begin < 15.0  # far less than the 30 s that the inner ranks would wait
    assert_soon(lambda: len(errors) == 1)
    assert list(errors[0].failures) and "run_ranks gave up" in str(errors[0])


def assert_soon(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_threads_that_want_a_gpu_say_when_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(TransportUnavailable, match="3 ranks need a GPU, but 0 are visible"):
        run_ranks(place, 3, mode="thread", device="cuda")
    with pytest.raises(TransportUnavailable, match="3 ranks need a GPU each, but 0 are visible"):
        run_ranks(place, 3, device="cuda")


def test_an_interrupted_run_ends_its_threads_waits():
    """What Ctrl-C does: the caller leaves, and nobody waits on."""
    ended = []

    def fn(comm):
        comm.barrier()  # both were started
        if comm.rank == 0:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            release.wait(HANG_BOUND)
        try:
            comm.barrier()
        except PeerTimeout as error:
            ended.append(str(error))

    release = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(fn, 2, mode="thread")
    release.set()
    assert_soon(lambda: len(ended) == 2)
    assert all("run_ranks gave up" in text for text in ended)


def test_communicators_of_threads_need_no_run_ranks():
    first, second = Communicator.of_threads(ThreadWorld(2), timeout=5.0)
    received = torch.zeros(3, dtype=torch.uint8)
    pending = first.post([None, torch.arange(3, dtype=torch.uint8)], [None, None])
    second.post([None, None], [received, None]).wait()
    pending.wait()
    assert received.tolist() == [0, 1, 2]
