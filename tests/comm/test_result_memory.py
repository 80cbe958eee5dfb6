"""Memory of a result is used again when nothing refers to the result any more, and never before."""

from __future__ import annotations

import copy
import gc
import io
import mmap
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from thinwire.comm.result_memory import LEAST_BYTES, ResultMemory

LIKE = torch.empty(0)
SHAPE = (LEAST_BYTES // 4 // 1024 + 3, 1024)
BLOCK = 2 * LEAST_BYTES  # what it is rounded up to


def new(memory: ResultMemory, value: float = 1.0) -> torch.Tensor:
    return memory.new_empty(LIKE, SHAPE).fill_(value)


def saved_by_a_graph(result: torch.Tensor) -> object:
    return (torch.ones(SHAPE[1], requires_grad=True) * result).grad_fn


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the tensor": lambda result: result,
    "a view": lambda result: result[5:, 7],
    "a view of another dtype": lambda result: result.view(torch.uint8)[1],
    "a detached one": lambda result: result.detach(),
    "its data": lambda result: result.data,
    "a shallow copy": copy.copy,
    "a parameter": torch.nn.Parameter,
    "its storage": lambda result: result.untyped_storage(),
    "a tensor set to its storage": lambda result: torch.empty(0).set_(result),
    "a resized view": lambda result: result[1:].resize_(3),
    "a numpy array": lambda result: result.numpy(),
    "a view of a numpy array": lambda result: result[2].numpy()[3:],
    "a memoryview": lambda result: memoryview(result.numpy()),
    "a DLPack capsule": torch.utils.dlpack.to_dlpack,
    "a tensor of a DLPack capsule": lambda result: torch.from_dlpack(result.numpy()),
    "a graph": saved_by_a_graph,
    "a graph of a view": lambda result: saved_by_a_graph(result[:, :]),
    "a closure": lambda result: lambda: result,
    "a cycle": lambda result: [cycle := [result], cycle.append(cycle)],
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_what_refers_to_a_result_keeps_its_memory_from_being_used_again(hold: Callable[[torch.Tensor], Any]) -> None:
    memory = ResultMemory()
    result = new(memory)
    first, holder = result.data_ptr(), hold(result)
    del result
    others = [new(memory, 2.0) for _ in range(2)]
    assert first not in [other.data_ptr() for other in others]
    del holder
    gc.collect(1)
    assert new(memory).data_ptr() == first


def test_a_held_view_keeps_its_values() -> None:
    memory = ResultMemory()
    view = new(memory, 3.0)[1:]
    for value in range(4):
        new(memory, value)
    assert torch.all(view == 3.0)


def test_memory_is_used_again_for_results_of_about_the_same_size() -> None:
    memory = ResultMemory()
    first = memory.new_empty(LIKE, (8 * LEAST_BYTES // 4,)).data_ptr()
    assert memory.new_empty(LIKE, (7 * LEAST_BYTES,), torch.int8).data_ptr() == first
    assert memory.new_empty(LIKE, (3 * LEAST_BYTES,), torch.int8).data_ptr() != first  # too much of it would lie idle


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.float8_e4m3fn])
def test_a_result_is_a_tensor_like_any_other(dtype: torch.dtype) -> None:
    memory, shape = ResultMemory(), (5, LEAST_BYTES // 4)
    with torch.no_grad():
        result = memory.new_empty(LIKE, shape, dtype)
    assert (result.shape, result.dtype, result.is_contiguous()) == (shape, dtype, True)
    assert not result.requires_grad and not result._is_view() and not result.is_inference()
    assert result.untyped_storage().nbytes() == result.nbytes
    assert result.data_ptr() % LEAST_BYTES == 0


def test_a_result_that_was_made_under_no_grad_may_be_changed_where_gradients_are_wanted() -> None:
    with torch.no_grad():
        result = new(ResultMemory())
    result += torch.ones(SHAPE[1], requires_grad=True)
    assert result.requires_grad


def test_a_result_of_inference_mode_is_an_inference_tensor() -> None:
    memory = ResultMemory()
    with torch.inference_mode():
        assert new(memory).is_inference()
    assert not new(memory).is_inference()


def test_a_result_can_be_saved_and_loaded_and_pickled() -> None:
    result, file = new(ResultMemory(), 5.0), io.BytesIO()
    torch.save(result, file)
    assert file.tell() < result.nbytes + 10_000
    file.seek(0)
    for loaded in (torch.load(file), pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
        assert torch.equal(loaded, result) and loaded.data_ptr() != result.data_ptr()


def test_a_result_in_shared_memory_has_left_its_block() -> None:
    memory = ResultMemory()
    result = new(memory, 6.0)
    first = result.data_ptr()
    result.share_memory_()
    assert new(memory, 7.0).data_ptr() == first
    assert torch.all(result == 6.0)


def test_a_result_cannot_grow_and_is_none_the_worse_for_trying() -> None:
    result = new(ResultMemory(), 4.0)
    with pytest.raises(RuntimeError, match="not resizable"):
        result.resize_(2 * SHAPE[0], SHAPE[1])
    assert result.resize_(7, 11).sum() == 4.0 * 77


@pytest.mark.parametrize("shape", [(), (0, 3), (3,), (LEAST_BYTES // 4 - 1,)], ids=str)
def test_small_results_are_left_to_torch(shape: tuple[int, ...]) -> None:
    memory = ResultMemory()
    assert memory.new_empty(LIKE, shape).untyped_storage().resizable()
    assert memory.num_bytes == 0


def test_tensors_elsewhere_are_left_to_torch() -> None:
    memory = ResultMemory()
    assert memory.new_empty(LIKE.to("meta"), SHAPE).is_meta
    assert memory.num_bytes == 0


@pytest.mark.parametrize("rows", [1 << 45, 1 << 62, 1 << 70])
def test_what_cannot_be_allocated_is_refused_as_torch_does(rows: int) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        ResultMemory().new_empty(LIKE, (rows, 1024))


def test_no_more_is_kept_than_twice_what_was_in_use_at_once() -> None:
    memory = ResultMemory()
    for wanted, kept in ((20, 20), (44, 64), (12, 64), (8, 72), (104, 176), (48, 180)):  # MiB; 44 goes for 48
        memory.new_empty(LIKE, (wanted << 20,), torch.uint8)
        assert memory.num_bytes == kept << 20


def test_what_was_used_least_recently_goes_first() -> None:
    memory = ResultMemory(most_bytes=3 * BLOCK)
    results = [new(memory) for _ in range(3)]
    addresses = [result.data_ptr() for result in results]
    results.clear()
    again = [new(memory) for _ in range(2)]
    assert [result.data_ptr() for result in again] == addresses[:0:-1]
    again.clear()
    memory.new_empty(LIKE, (4 * BLOCK,), torch.uint8)  # wants more than all
    assert memory.num_bytes == 0
    results = [new(memory) for _ in range(3)]
    del results[1]
    wide = memory.new_empty(LIKE, (BLOCK + LEAST_BYTES,), torch.uint8)  # too large for the one that is idle, which goes
    held = {result.data_ptr() for result in (*results, wide)}
    assert memory.num_bytes == 2 * BLOCK + LEAST_BYTES and new(memory).data_ptr() not in held


def test_no_more_is_kept_than_the_limit_even_if_it_is_in_use() -> None:
    memory = ResultMemory(most_bytes=2 * BLOCK)
    results = [new(memory, value) for value in range(4)]
    assert memory.num_bytes == 2 * BLOCK
    assert [int(result[-1, -1]) for result in results] == [0, 1, 2, 3]
    assert ResultMemory(most_bytes=0).new_empty(LIKE, SHAPE).fill_(1.0).sum() == SHAPE[0] * SHAPE[1]


def test_what_is_not_kept_goes_back_to_the_system() -> None:
    memory = ResultMemory()
    mappings = _mapped(new(memory).data_ptr())
    assert mappings
    kept = new(memory, 8.0)
    memory.clear()
    assert memory.num_bytes == 0 and _mapped(kept.data_ptr()) and torch.all(kept == 8.0)
    address = kept.data_ptr()
    del kept
    assert not _mapped(address)


def _mapped(address: int) -> bool:
    with open("/proc/self/maps") as file:
        ranges = (line.split()[0].split("-") for line in file)
        return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def test_threads_never_share_a_block() -> None:
    memory, wrong = ResultMemory(), []

    def use(mark: int) -> None:
        for _ in range(50):
            result = new(memory, mark)
            view = result[::7]
            del result
            if not torch.all(view == mark):
                wrong.append(mark)

    threads = [threading.Thread(target=use, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert memory.num_bytes <= 8 * BLOCK  # of each, a result and the view of the one before


def test_a_result_may_die_on_any_thread() -> None:
    memory = ResultMemory()
    held = [new(memory)]
    first = held[0].data_ptr()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert new(memory).data_ptr() == first


def test_threads_at_it_together_never_hold_the_same_memory() -> None:
    memory, held, taken = ResultMemory(), {}, []

    def take_and_drop(number: int) -> None:
        for _ in range(200):
            mine = new(memory)
            address = mine.data_ptr()
            taken.append(held.setdefault(address, number) == number)
            del held[address], mine

    threads = [threading.Thread(target=take_and_drop, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 800 and all(taken)


def test_a_block_that_another_thread_took_since_it_was_seen_idle_is_left_to_it() -> None:
    memory, taken = ResultMemory(), []

    class Raced(dict):  # type: ignore[type-arg]
        def pop(self, block: Any, *default: Any) -> Any:
            if not taken:
                taken.append(block.lend(8))  # and put it back, before this thread takes it out
            return super().pop(block, *default)

    new(memory)
    memory._blocks = Raced(memory._blocks)
    mine = new(memory)
    assert taken and mine.data_ptr() != torch.frombuffer(taken[0], dtype=torch.uint8).data_ptr()
    assert len(memory._blocks) == 2 and all(block.in_use for block in memory._blocks)


def test_after_close_nothing_is_kept() -> None:
    memory = ResultMemory()
    result = new(memory)
    memory.close()
    assert memory.num_bytes == 0
    del result
    assert new(memory).untyped_storage().resizable() and memory.num_bytes == 0


_AT_EXIT = """
import torch
from thinwire.comm.result_memory import ResultMemory
memory = ResultMemory()
held = memory.new_empty(torch.empty(0), (1 << 20,)).fill_(1.0)
graph = (torch.ones(1 << 20, requires_grad=True) * memory.new_empty(torch.empty(0), (1 << 20,))).grad_fn
array = memory.new_empty(torch.empty(0), (1 << 20,)).numpy()
torch.never_cleared = memory.new_empty(torch.empty(0), (1 << 20,))
cycle = [memory.new_empty(torch.empty(0), (1 << 20,)), memory]; cycle.append(cycle)
"""

# On its own, and in one thread: of a pool of threads a forked child has only the wish to wait for it.
_FORKED = """
import os
import torch
from thinwire.comm.result_memory import ResultMemory

torch.set_num_threads(1)
memory, like = ResultMemory(), torch.empty(0)
new = lambda value: memory.new_empty(like, (1 << 20,)).fill_(value)
held, idle = new(1.0), new(2.0)
addresses = held.data_ptr(), idle.data_ptr()
del idle
told, tell = os.pipe()
child = os.fork()
if child == 0:
    again, other = new(3.0), new(4.0)
    assert again.data_ptr() == addresses[1] and other.data_ptr() not in addresses
    assert torch.all(held == 1.0)
    held.fill_(5.0)
    os.write(tell, b".")
    os._exit(0)
os.close(tell)
assert os.read(told, 1) == b"."
mine = new(6.0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.all(held == 1.0) and torch.all(mine == 6.0) and mine.data_ptr() == addresses[1]
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", [_FORKED, _AT_EXIT], ids=["forked", "at exit"])
def test_processes_that_fork_and_end_have_their_own_blocks(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_pages_are_private_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = []
    real = mmap.mmap

    def recording(*args: Any, **kwargs: Any) -> mmap.mmap:
        flags.append(kwargs["flags"])
        return real(*args, **kwargs)

    monkeypatch.setattr("thinwire.comm.result_memory.mmap.mmap", recording)
    new(ResultMemory())
    assert flags == [mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS]
