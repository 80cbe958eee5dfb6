"""The exact collectives equal numpy on every dtype and operation, refuse what they cannot take, and end their waits."""

from __future__ import annotations

import ctypes
import functools
import gc
import platform
import random
import threading
import time
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.speeds import exhaustive_but
from thinwire.comm import Communicator
from thinwire.comm.exact import ONE_STEP_BYTES, takes_two_steps
from thinwire.comm.threads import ThreadWorld
from thinwire.comm.work import Work
from thinwire.errors import PeerTimeout, ThinwireError
from thinwire.testing import run_ranks

SLACK = 2.0  # seconds past its timeout within which a wait must have ended
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, *COMPLEX)
MOVED = (*DTYPES, torch.float8_e4m3fn, torch.uint16)  # what has no arithmetic can travel
SHAPES = ((), (1,), (3,), (6, 7), (2, 0, 3), (257,), (5, 1, 41))
OPERATIONS = ("sum", "prod", "min", "max", "avg", "logical_or", "logical_and")
TORCH_NAMES = {"sum": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT, "max": dist.ReduceOp(dist.ReduceOp.MAX)}


def takes(op, dtype):
    if op in ("prod", "min", "max"):
        return dtype not in COMPLEX
    return op != "avg" or dtype in FLOATS + COMPLEX


def share(number, rank, dtype, shape):
    """What `rank` has, which every rank can work out; zeros among it."""
    generator = torch.Generator().manual_seed(random.Random(f"{number}/{rank}").getrandbits(31))
    if dtype in FLOATS + COMPLEX:
        values = torch.randn(shape, dtype=torch.complex128 if dtype in COMPLEX else torch.float64, generator=generator)
        return torch.where(torch.rand(shape, generator=generator) < 0.3, 0, values).to(dtype)
    low, high = (0, 2) if dtype == torch.bool else (-100, 100)
    drawn = torch.randint(low, high, shape, generator=generator)
    if dtype in (torch.float8_e4m3fn, torch.uint16):
        return drawn.abs().to(torch.uint8).to(dtype)
    return drawn.to(dtype)


def strided(tensor):
    """The same values with gaps between them."""
    wide = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
    wide[..., 1] = tensor
    return wide[..., 1]


def reduced(op, shares):
    """numpy's answer, accumulated in rank order; float16 and bfloat16 in float32, rounded once."""
    dtype = shares[0].dtype
    narrow = dtype in (torch.float16, torch.bfloat16)
    arrays = [(tensor.float() if narrow else tensor).numpy() for tensor in shares]
    if op.startswith("logical"):
        function = np.logical_or if op == "logical_or" else np.logical_and
        return torch.from_numpy(np.array(functools.reduce(function, (array != 0 for array in arrays)))).to(dtype)
    function = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    with np.errstate(all="ignore"):
        total = np.asarray(functools.reduce(function, arrays))
        if op == "avg":
            total = np.asarray(total / total.dtype.type(len(shares)))
    return torch.from_numpy(total).to(dtype)


def same(name, got, expected):
    assert got.dtype == expected.dtype and got.shape == expected.shape, name
    if got.dtype in COMPLEX:  # a complex number divided by a real one may be rounded either way
        assert torch.allclose(got, expected, rtol=1e-6, atol=1e-30), name
    elif got.numel():
        left, right = (
            tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for tensor in (got, expected)
        )
        if got.dtype in FLOATS:
            left, right = got + 0.0, expected + 0.0  # numpy's smaller of two zeros may have the other sign
        assert torch.equal(left, right), (name, got, expected)


def done(work, asynchronous):
    if asynchronous:
        work.wait()
    work.wait()  # a second time does nothing


def check_reductions(comm, seed):
    number = 0
    for dtype in DTYPES:
        for op in OPERATIONS:
            if not takes(op, dtype):
                continue
            number += 1
            shape, key = random.Random(f"{seed}/{number}").choice(SHAPES), f"{seed}/{number}/{dtype}/{op}"
            asynchronous = number % 3 == 0
            root = number % comm.size
            shares = [share(key, rank, dtype, shape) for rank in range(comm.size)]
            expected = reduced(op, shares)
            wanted = TORCH_NAMES.get(op, op) if number % 2 else op
            place = strided if number % 4 == 0 else torch.clone
            for name in ("all_reduce", "reduce"):
                mine = place(shares[comm.rank])
                more = {"dst": root} if name == "reduce" else {}
                done(getattr(comm, name)(mine, op=wanted, async_op=asynchronous, **more), asynchronous)
                same(
                    f"{name} {key}", mine, expected if name == "all_reduce" or comm.rank == root else shares[comm.rank]
                )
            inputs = [share(f"{key}/{target}", comm.rank, dtype, shape) for target in range(comm.size)]
            output = place(torch.zeros(shape, dtype=dtype))
            passed = [place(x) for x in inputs]
            done(comm.reduce_scatter(output, passed, wanted, asynchronous), asynchronous)
            for after, before in zip(passed, inputs, strict=True):
                same(f"reduce_scatter's input {key}", after, before)
            own = [share(f"{key}/{comm.rank}", rank, dtype, shape) for rank in range(comm.size)]
            same(f"reduce_scatter {key}", output, reduced(op, own))


def check_moves(comm, seed):
    rank, size = comm.rank, comm.size
    for number, dtype in enumerate(MOVED):
        key, asynchronous, root = f"{seed}/{dtype}", number % 3 == 0, number % size
        shape = random.Random(key).choice(SHAPES)
        place = strided if number % 4 == 1 else torch.clone
        shares = [share(key, peer, dtype, shape) for peer in range(size)]

        def empty(like, place=place):
            return place(torch.zeros_like(like))

        mine = place(shares[rank])
        done(comm.broadcast(mine, root, asynchronous), asynchronous)
        same(f"broadcast {key}", mine, shares[root])
        outputs = [empty(x) for x in shares]
        done(comm.all_gather(outputs, place(shares[rank]), asynchronous), asynchronous)
        for got, expected in zip(outputs, shares, strict=True):
            same(f"all_gather {key}", got, expected)
        outputs = [empty(x) for x in shares] if rank == root else None
        done(comm.gather(place(shares[rank]), outputs, root, asynchronous), asynchronous)
        for got, expected in zip(outputs or [], shares, strict=False):
            same(f"gather {key}", got, expected)
        mine = empty(shares[rank])
        done(comm.scatter(mine, shares if rank == root else None, root, asynchronous), asynchronous)
        same(f"scatter {key}", mine, shares[rank])
        check_uneven_moves(comm, key, dtype, asynchronous, place)


def check_uneven_moves(comm, key, dtype, asynchronous, place):
    rank, size = comm.rank, comm.size
    rows = [[random.Random(f"{key}/{a}/{b}").choice((0, 1, 5, 33)) for b in range(size)] for a in range(size)]
    sent = [[share(f"{key}/{a}/{b}", a, dtype, (rows[a][b], 3)) for b in range(size)] for a in range(size)]
    arriving = [sent[peer][rank] for peer in range(size)]
    outputs = [place(torch.zeros_like(x)) for x in arriving]
    done(comm.all_to_all(outputs, [place(x) for x in sent[rank]], asynchronous), asynchronous)
    for got, expected in zip(outputs, arriving, strict=True):
        same(f"all_to_all {key}", got, expected)
    output = place(torch.zeros_like(torch.cat(arriving)))
    counts = [len(x) for x in arriving]
    done(comm.all_to_all_v(output, place(torch.cat(sent[rank])), counts, rows[rank], asynchronous), asynchronous)
    same(f"all_to_all_v {key}", output, torch.cat(arriving))


def check_against_numpy(comm, seed):
    check_reductions(comm, seed)
    check_moves(comm, seed)


@pytest.mark.parametrize("mode", ["process", "thread"])
@pytest.mark.parametrize("world_size", exhaustive_but([1, 2, 3], [1, 2, 3, 4, 5]))
def test_every_collective_equals_numpy_on_every_dtype_and_operation(world_size, mode):
    seed = random.randrange(2**32)
    run_ranks(functools.partial(check_against_numpy, seed=seed), world_size, mode=mode, timeout=120.0)


def reduce_in_rank_order(comm):
    # 1e8 + 1 - 1e8 in float32 is 0 in this order and 1 in any other that begins with both large ones.
    values = (1e8, 1.0, -1e8, 0.0)
    found = []
    for dtype, scale in ((torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.float16, 1e-4)):
        mine = torch.tensor([values[comm.rank] * scale] * 9, dtype=dtype)
        comm.all_reduce(mine)
        found.append(mine.tolist())
    # 2048 + 1 + 1 + 1 is 2048 in float16, but 2051 before it is rounded: 2052.
    mine = torch.tensor([2048.0 if comm.rank == 0 else 1.0], dtype=torch.float16)
    comm.all_reduce(mine)
    nan = torch.tensor([float("nan") if comm.rank == 1 else 1.0])
    comm.all_reduce(nan, "max")
    return found, mine.item(), bool(nan.isnan())


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_sums_go_in_rank_order_and_narrow_floats_are_rounded_once(mode):
    results = run_ranks(reduce_in_rank_order, 4, mode=mode)
    assert results == [results[0]] * 4
    (exact, *narrow), rounded_once, nan = results[0]
    assert exact == [0.0] * 9 and rounded_once == 2052.0 and nan
    assert all(len(set(values)) == 1 for values in narrow)


def keep_several_under_way(comm):
    """Handles are waited for in any order, and some never; other calls come in between."""
    # Every other one is large enough to take two steps.
    tensors = [torch.full((1000 + i + i % 2 * 20_000,), float(comm.rank + i)) for i in range(6)]
    assert [takes_two_steps(comm._exchange, tensor) for tensor in tensors] == [False, True] * 3
    works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
    gathered = [torch.zeros(5) for _ in range(comm.size)]
    late = comm.all_gather(gathered, torch.full((5,), float(comm.rank)), async_op=True)
    order = list(range(4))  # nobody waits for the last ones
    random.Random(comm.rank).shuffle(order)
    for i in order:
        works[i].wait()
    comm.barrier()
    works[4].wait()
    late.wait()
    total = sum(range(comm.size))
    for i, tensor in enumerate(tensors):
        assert bool((tensor == total + i * comm.size).all()), i
    assert [row[0].item() for row in gathered] == list(range(comm.size))
    last = comm.all_reduce(tensors[1], async_op=True)
    objects = comm.all_gather_object(comm.rank)  # another call ends what is under way
    last.wait()
    return objects


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_several_under_way_may_be_waited_for_in_any_order(mode):
    assert run_ranks(keep_several_under_way, 3, mode=mode) == [[0, 1, 2]] * 3


def reduce_both_ways(comm, seed):
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        shares = [share(f"{seed}/{dtype}", rank, dtype, (ONE_STEP_BYTES + 77,)) for rank in range(comm.size)]
        op = "logical_or" if dtype == torch.bool else "sum"
        expected = reduced(op, shares)
        # Whole, in two steps, and in parts of one step each.
        whole, parts = shares[comm.rank].clone(), shares[comm.rank].clone()
        assert takes_two_steps(comm._exchange, whole)
        comm.all_reduce(whole, op)
        for part in parts.split(ONE_STEP_BYTES // dtype.itemsize // 2):
            assert not takes_two_steps(comm._exchange, part)
            comm.all_reduce(part, op)
        same("two steps", whole, expected)
        same("one step", parts, expected)
        for dst in range(comm.size):
            for place in (strided, torch.clone):
                mine = place(shares[comm.rank])
                comm.reduce(mine, dst, op)
                same(f"to {dst}", mine, expected if dst == comm.rank else shares[comm.rank])


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_large_and_small_reductions_give_the_same_bits(mode):
    run_ranks(reduce_both_ways, 4, random.randrange(2**32), mode=mode)


def test_what_went_wrong_between_two_steps_is_told_again_and_again():
    def two_steps():
        yield Nothing()
        raise PeerTimeout("the second one could not be posted")

    work = Work(two_steps(), lambda: None)
    work.settle()
    for _ in range(2):
        with pytest.raises(PeerTimeout, match="could not be posted"):
            work.wait()


class Nothing:
    """Something kept with a communicator, and a step that is done at once."""

    def describe(self):
        return "nothing"

    def settle(self):
        pass

    def close(self):
        pass

    def wait(self):
        pass


def test_whoever_uses_what_is_kept_with_a_communicator_ends_what_is_under_way_first():
    came = threading.Event()

    def use(comm):
        x = torch.ones(ONE_STEP_BYTES)
        work = comm.all_reduce(x, async_op=True)
        if comm.rank == 0:
            comm.attached("kept", Nothing)
            assert came.wait(20.0), "rank 1 waits for the second step of rank 0"
        work.wait()
        came.set()
        return x[-1].item()

    assert run_ranks(use, 3, mode="thread") == [3.0] * 3


def test_a_communicator_that_is_closed_gives_up_what_is_under_way():
    def close_early(comm):
        work = comm.all_reduce(torch.ones(ONE_STEP_BYTES), async_op=True)
        comm.close()
        with pytest.raises(ThinwireError, match="closed while a collective was under way"):
            work.wait()

    run_ranks(close_early, 3, mode="thread")


def test_tensors_that_want_gradients_are_written_and_get_no_history():
    def reduce(comm):
        leaf = torch.ones(3, requires_grad=True)
        rows = [torch.zeros(3) for _ in range(comm.size)]
        comm.all_reduce(leaf)
        comm.all_gather(rows, leaf * 2)
        return leaf.tolist(), leaf.grad_fn, rows[1].tolist(), rows[1].requires_grad

    assert run_ranks(reduce, 2, mode="thread") == [([2.0] * 3, None, [4.0] * 3, False)] * 2


LIBM = ctypes.CDLL(None)
FE_DOWNWARD = 0x400 if platform.machine() == "x86_64" else 0x800000  # of x86, and of ARM


def sums_in_other_arithmetic(comm):
    """Rank 1's thread flushes subnormal numbers, and then rounds downwards; sums of one step and of two."""
    found = []
    for setting in ("subnormals", "rounding"):
        if comm.rank == 1:
            torch.set_flush_denormal(True) if setting == "subnormals" else LIBM.fesetround(FE_DOWNWARD)
        for op in ("sum", "avg", "max"):
            for dtype, least in ((torch.float32, 2e-38), (torch.float64, 3e-308), (torch.bfloat16, 2e-38)):
                for count in (5, 4096, 40000):
                    generator = torch.Generator().manual_seed(comm.rank)
                    x = torch.randn(count, dtype=torch.float64, generator=generator)
                    x = (x * least if setting == "subnormals" else x).to(dtype)
                    comm.all_reduce(x, op)
                    found.append(x)
        if comm.rank == 1:
            kept = float(torch.full((), 1e-40) * 1) == 0 if setting == "subnormals" else LIBM.fegetround()
            assert kept, "what the thread had set is as it was"
            torch.set_flush_denormal(False)
            LIBM.fesetround(0)
    return found


def test_exact_sums_are_the_same_bits_where_one_rank_flushes_subnormals_or_rounds_otherwise():
    first, second = run_ranks(sums_in_other_arithmetic, 2, mode="thread")
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


CALLS = {
    "all_reduce": lambda comm, x, xs: comm.all_reduce(x),
    "all_reduce, later": lambda comm, x, xs: comm.all_reduce(x, async_op=True).wait(),
    "reduce": lambda comm, x, xs: comm.reduce(x, 0),
    "reduce_scatter": lambda comm, x, xs: comm.reduce_scatter(x, xs),
    "broadcast": lambda comm, x, xs: comm.broadcast(x, 1),
    "all_gather": lambda comm, x, xs: comm.all_gather(xs, x),
    "gather": lambda comm, x, xs: comm.gather(x, xs if comm.rank == 0 else None),
    "scatter": lambda comm, x, xs: comm.scatter(x, xs if comm.rank == 1 else None, 1),
    "all_to_all": lambda comm, x, xs: comm.all_to_all(xs, [x] * comm.size),
    "all_to_all_v": lambda comm, x, xs: comm.all_to_all_v(x, x.clone()),
}


def miss_a_rank(comm, names):
    shorts = [Communicator(dist.new_group(range(2)), timeout=0.3) for _ in names]
    told = []
    for name, short in zip(names, shorts, strict=True):
        if comm.rank == 0:
            x = torch.arange(2 * comm.size, dtype=torch.float32)
            begin = time.monotonic()
            with pytest.raises(PeerTimeout, match="no answer from rank 1 within 0.3 s") as caught:
                CALLS[name](short, x, [x.clone() for _ in range(comm.size)])
            assert caught.value.ranks == (1,) and time.monotonic() - begin < 0.3 + SLACK, name
            with pytest.raises(PeerTimeout):
                short.all_reduce(x)
            told.append(name)
    comm.barrier()
    return told


@pytest.mark.exhaustive
def test_a_missing_rank_is_named_within_the_timeout_and_the_group_is_given_up():
    assert run_ranks(miss_a_rank, 2, list(CALLS))[0] == list(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_a_missing_thread_is_named_within_the_timeout(name):
    alone, _ = Communicator.of_threads(ThreadWorld(2), timeout=0.1)
    x = torch.arange(4.0)
    with pytest.raises(PeerTimeout, match="no answer from rank 1 within 0.1 s") as caught:
        CALLS[name](alone, x, [x.clone(), x.clone()])
    assert caught.value.ranks == (1,)


def lose_a_rank_between_two_steps(comm):
    short = Communicator(dist.new_group(range(3)), timeout=0.5)
    work = short.all_reduce(torch.ones(ONE_STEP_BYTES), async_op=True)
    if comm.rank == 2:
        time.sleep(1.5)  # it took the first step only
        return ()
    for _ in range(2):
        with pytest.raises(PeerTimeout) as caught:
            work.wait()
    with pytest.raises(PeerTimeout, match="cannot be used any more"):
        short.barrier()
    return caught.value.ranks


def test_a_rank_that_takes_the_first_step_only_is_named():
    assert run_ranks(lose_a_rank_between_two_steps, 3) == [(2,), (2,), ()]


def disagree(comm, name):
    size = 3 if comm.rank else 300
    mine = torch.ones(size)
    if name == "length":
        comm.all_reduce(mine)
    elif name == "operation":
        comm.all_reduce(torch.ones(4), "sum" if comm.rank else "max")
    elif name == "dtype":
        comm.broadcast(torch.ones(4, dtype=torch.int32 if comm.rank else torch.float32), 0)
    elif name == "collective":
        work = comm.all_reduce(torch.ones(2), async_op=True) if comm.rank else None
        comm.reduce(torch.ones(2), 0) if work is None else work.wait()


def disagree_and_live(comm):
    found = []
    for name in ("length", "operation", "dtype", "collective"):
        short = Communicator(dist.new_group(range(2)), timeout=0.3)
        try:
            disagree(short, name)
        except PeerTimeout:
            found.append(name)
    return found


def test_ranks_that_disagree_get_peer_timeout_where_gloo_would_end_the_process():
    first, second = run_ranks(disagree_and_live, 2)
    # Who only sends, and not too much, may be done before its peer finds out.
    assert {*first, *second} == {"length", "operation", "dtype", "collective"}
    assert {"length", "operation"} <= {*first} & {*second}


def test_a_failed_work_tells_all_of_its_error_and_holds_no_tensors():
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)

    def finish(result=tensor):
        raise PeerTimeout("rank 1 is gone", ranks=[1], lane=2, epoch=3, phase="dispatch")

    work = Work((), finish)
    work.settle()
    del tensor, finish
    gc.collect()
    assert alive() is None
    for _ in range(2):
        with pytest.raises(PeerTimeout, match="^rank 1 is gone$") as told:
            work.wait()
        error = told.value
        assert (error.ranks, error.lane, error.epoch, error.phase) == ((1,), 2, 3, "dispatch")
