"""`testing.preload`: ranks start with modules imported, under their own environment; the tests' have all kernels."""

from __future__ import annotations

import importlib
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import popen_forkserver

import pytest

from tests.test_testing import HANG_BOUND, assert_all_end, die_on, say_hello, wait_for_ever_unless
from thinwire import testing
from thinwire._rank_process import ServedProcess
from thinwire.errors import ThinwireError
from thinwire.testing import RankError, RanksTimeout, run_ranks

SOURCE = """
import os
AT_IMPORT = {name: os.environ.get(name) for name in ("TRITON_THINWIRE_TEST", "THINWIRE_TEST")}
IMPORTER = os.getpid()
def seen(comm):
    now = {name: os.environ.get(name) for name in AT_IMPORT}
    return AT_IMPORT, now, IMPORTER, os.getpid(), os.environ.get("PYTHONPATH")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that is preloaded, and says what it saw."""
    (tmp_path / "preloaded_by_a_test.py").write_text(SOURCE)
    (tmp_path / "dies_when_imported.py").write_text("raise SystemExit('a reason to end')")
    (tmp_path / "lacks_something.py").write_text("import a_module_that_there_is_not")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("preloaded_by_a_test")
    testing.preload("tests.helpers.warm")
    del sys.modules["preloaded_by_a_test"]


@pytest.mark.exhaustive
def test_ranks_share_one_import_under_what_triton_and_numba_read_then(module, monkeypatch):
    monkeypatch.setenv("THINWIRE_TEST", "of the parent")
    testing.preload("preloaded_by_a_test")
    first = run_ranks(module.seen, 2)
    monkeypatch.setenv("THINWIRE_TEST", "changed")
    first += run_ranks(module.seen, 1)
    other = run_ranks(module.seen, 2, env={"TRITON_THINWIRE_TEST": "of the ranks"})
    path = os.environ.get("PYTHONPATH")
    for results, triton in ((first, None), (other, "of the ranks")):
        assert len({importer for _, _, importer, _, _ in results}) == 1, "each rank imported it for itself"
        for at_import, now, importer, rank, rank_path in results:
            assert at_import == {"TRITON_THINWIRE_TEST": triton, "THINWIRE_TEST": at_import["THINWIRE_TEST"]}
            assert now["TRITON_THINWIRE_TEST"] == triton
            assert importer not in (rank, os.getpid()) and rank_path == path
    assert len({importer for _, _, importer, _, _ in first + other}) == 2
    assert [now["THINWIRE_TEST"] for _, now, _, _, _ in first] == ["of the parent"] * 2 + ["changed"]
    assert "TRITON_THINWIRE_TEST" not in os.environ and os.environ.get("PYTHONPATH") == path
    server = other[0][2]
    os.kill(server, signal.SIGKILL)
    assert_all_end([server])
    ((_, _, importer, _, _),) = run_ranks(module.seen, 1, env={"TRITON_THINWIRE_TEST": "of the ranks"})
    assert importer != server, "there is another server where one was killed"


@pytest.mark.exhaustive
def test_a_module_that_cannot_be_imported_is_named_by_the_ranks(module):
    testing.preload("lacks_something")
    with pytest.raises(RankError, match="No module named 'a_module_that_there_is_not'"):
        run_ranks(module.seen, 1)


@pytest.mark.exhaustive
def test_a_server_that_ends_while_it_imports_is_reported(module):
    testing.preload("dies_when_imported")
    with pytest.raises(ThinwireError, match="ended while it imported torch, torch.distributed, dies_when_imported"):
        run_ranks(module.seen, 1)


@pytest.mark.exhaustive
def test_ranks_of_a_server_end_print_and_time_out_as_others_do(tmp_path, capfd):
    run_ranks(say_hello, 2)
    captured = capfd.readouterr()
    assert captured.out.count("rank 0 says hello") == captured.out.count("rank 1 says hello") == 1
    assert captured.err.count("so does its child") == 2
    with pytest.raises(RankError) as died:
        run_ranks(die_on, 2, 1, "signal")
    assert died.value.failures == {1: "killed by SIGKILL, before fn had returned"}
    with pytest.raises(RanksTimeout) as late:
        run_ranks(wait_for_ever_unless, 2, 1, str(tmp_path), timeout=5.0)
    assert late.value.ranks == [0] and str(late.value).count("in sleep_in_a_named_function") == 1
    pids = [int(pid) for file in tmp_path.glob("*.pids") for pid in file.read_text().split()]
    assert len(pids) == 4
    assert_all_end(pids, HANG_BOUND)


def loaded(comm):
    from tests.helpers.warm import load_kernels, loaded_kernels

    before = loaded_kernels()
    return before, load_kernels(), {"numba", "triton"} <= set(sys.modules)


def test_the_ranks_of_tests_start_with_every_kernel_loaded():
    pytest.importorskip("numba", reason="the CPU kernels need numba")
    ((before, missing, imported),) = run_ranks(loaded, 1)
    assert missing == [] and len(before) > 10 and imported


def interpreted(comm):
    from thinwire.triton_kernels import signal as kernels

    return os.environ["TRITON_INTERPRET"], kernels.INTERPRETED


@pytest.mark.exhaustive
def test_the_ranks_of_tests_interpret_triton_where_they_are_told_to():
    pytest.importorskip("triton", reason="interpreting kernels needs Triton")
    assert run_ranks(interpreted, 2, env={"TRITON_INTERPRET": "1"}) == [("1", True)] * 2


def test_two_threads_that_look_at_a_process_at_once_see_the_same_exit_status(monkeypatch):
    """As where one waits for its own and another starts one, in which multiprocessing looks at all that there are."""
    testing._prepare_server(testing._preloaded, dict(os.environ))
    process = ServedProcess([*testing._PRELOAD, *testing._preloaded], os.environ, target=int)
    with testing._without_main():
        process.start()
    assert multiprocessing.connection.wait([process.sentinel], HANG_BOUND)
    read, first_reads = popen_forkserver.forkserver.read_signed, threading.Event()

    def slowly(sentinel):
        status = read(sentinel)
        assert multiprocessing.connection.wait([sentinel], HANG_BOUND)  # its end
        first_reads.set()
        time.sleep(0.2)
        return status

    monkeypatch.setattr(popen_forkserver.forkserver, "read_signed", slowly)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: process.exitcode)
        first_reads.wait(HANG_BOUND)
        second = pool.submit(lambda: process.exitcode)
        assert (first.result(), second.result()) == (0, 0)
    process.close()
