"""Every public function given odd values: what comes out is a result, or an error of thinwire's that says what is
accepted. Where a docstring states ValueError, that may come out, too."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("numba", reason="CPU ranks need numba")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import thinwire as tw
from tests.helpers.collectives import COLLECTIVES
from tests.helpers.speeds import exhaustive_but
from thinwire.comm.communicator import Communicator
from thinwire.moe import received
from thinwire.moe.checkpoint import load_checkpoint, read_metadata, save_checkpoint
from thinwire.moe.experts import GroupedExperts
from thinwire.moe.routing import RouterConfig, load_balancing_loss, top_k_route
from thinwire.testing import run_ranks

HIDDEN = 64


def odd_tensors(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """What may be passed for a tensor of this shape and dtype."""
    plain = torch.ones(shape).to(dtype)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(plain)
    floats = torch.ones(shape)
    found: dict[str, Any] = {
        "None": None,
        "a list": plain.tolist(),
        "a str": "tokens",
        "a number": 1,
        "numpy": plain.float().numpy(),
        "0-dim": plain.flatten()[0],
        "0 rows": plain[:0],
        "one dimension more": plain[None],
        "sparse": floats.to_sparse(),
        "csr": floats.reshape(shape[0], -1).to_sparse_csr(),
        "quantised": torch.quantize_per_tensor(floats, 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([floats[0], floats[0]]),
        "meta": plain.to("meta"),
        "fake": fake,
        "complex": floats.to(torch.complex64),
        "conjugate": floats.to(torch.complex64).conj(),
        "negative": torch._neg_view(plain),
        "bool": plain.bool(),
        "double": plain.double(),
        "uint16": floats.to(torch.uint16),
        "float8": floats.to(torch.float8_e4m3fn),
        "wants a gradient": floats.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(floats.clone()),
        "expanded": plain.flatten()[:1].expand(shape),
        "transposed": plain.transpose(0, -1),
    }
    return found


TORCHS_OWN = "double", "meta", "fake", "float8", "complex", "conjugate", "bool", "uint16"  # what modules say to these

ODD_NUMBERS: dict[str, Any] = {
    "None": None, "str": "3", "list": [1], "dict": {}, "True": True, "-1": -1, "0": 0, "2**31": 2**31, "2**62": 2**62,
    "2**70": 2**70, "1.5": 1.5, "nan": math.nan, "inf": math.inf, "numpy": np.int64(1),
    "array": np.ones(2), "tensor": torch.ones(2), "dtype": torch.float64, "object": object(),
}  # fmt: skip


#: Names of odd values in calls, and what is tried for each.
ODD: dict[str, dict[str, Any]] = {
    "NUMBER": ODD_NUMBERS,
    "TENSOR": odd_tensors((4, HIDDEN), torch.float32),
    "LIST": ODD_NUMBERS | {kind: [value] for kind, value in odd_tensors((4, HIDDEN), torch.float32).items()},
    "BYTES": odd_tensors((4, HIDDEN), torch.int8),
    "SCALES": ODD_NUMBERS | odd_tensors((HIDDEN,), torch.float32),
    "COUNTS": ODD_NUMBERS | odd_tensors((1,), torch.int64) | {"[True]": [True], "[-1]": [-1], "[2**62]": [2**62]},
    "COUNT": ODD_NUMBERS | {"[-1]": [-1], "[True]": [True], "[1.0]": [1.0]},
    "IDS": odd_tensors((4, 2), torch.int64),
    "WEIGHTS": odd_tensors((4, 2), torch.float32),
    "ROWS": odd_tensors((8, HIDDEN), torch.float32),
    "PER_EXPERT": ODD_NUMBERS | odd_tensors((4,), torch.int64) | {"negative": torch.tensor([9, -1, 0, 0])},
    "RECORDS": odd_tensors(tuple(tw.quantize(torch.ones(4, HIDDEN)).records.shape), torch.uint8),
    "SHAPE": ODD_NUMBERS | {"()": (), "-4": (-4, -64), "2**70, 64": (2**70, 64), "4.0": (4.0, 64.0), "list": [4, 64]},
    "NARROW": odd_tensors((4, 8), torch.float32),
    "LOGITS": odd_tensors((4, 6), torch.float32),
}  # fmt: skip


def _collectives() -> Iterator[tuple[str]]:
    for function in COLLECTIVES:
        name, given = function.__name__, "x, send_counts=[4]" if function is tw.all_to_all_v else "x"
        of_counts = {
            "all_gather_v": ["counts"],
            "all_to_all_v": ["send_counts", "recv_counts", "send_displs", "recv_displs"],
        }
        taken = inspect.signature(function).parameters
        odd = [(option, "COUNTS") for option in of_counts.get(name, [])]
        odd += [
            (each, "NUMBER")
            for each in ("wire", "transport", "async_op", "op", "gather_wire", "check")
            if each in taken
        ]
        for wire in ("none", "int8"):
            for parameter, value in (("x", "TENSOR"), ("out", "TENSOR"), ("comm", "NUMBER"), *odd):
                yield (f"call({name}, {given}, wire={wire!r}, transport=path, changed={{{parameter!r}: {value}}})",)


#: Calls with an odd value, then the kinds of it that are left out, of which torch has its own errors or which are only
#: large, and what else may come out.
CALLS: list[tuple[Any, ...]] = [
    *_collectives(),
    ("int8_reduce(BYTES, 0.5, transport=path)",), ("int8_reduce(i8, SCALES, transport=path)",),
    *((f"int8_reduce(i8, 0.5, {name}=NUMBER)",) for name in ("dtype", "gather_wire", "transport", "check")),
    ("tw.redistribute(TENSOR, cut, cut, transport=path)",),
    *(
        (f"call(tw.redistribute, x, src=cut, dst=cut, transport=path, changed={{{name!r}: NUMBER}})",)
        for name in ("src", "dst", "shape", "wire", "transport", "grad_layout", "grad_wire")
    ),
    *((f"tw.AllReduceState(comm, {name}=NUMBER)",) for name in ("wire", "gather_wire", "transport", "error_feedback")),
    ("tw.AllReduceState('comm')",), ("tw.all_reduce_hook(None, None)",),
    ("tw.all_reduce_hook(tw.AllReduceState(comm), None)",),
    *((f"plan.{way}(x, {name}=NUMBER)",) for way in ("there", "back") for name in ("async_op", "wire")),
    # a communicator's methods
    ("comm.all_reduce(TENSOR)",), *((f"comm.all_reduce(x.clone(), {name}=NUMBER)",) for name in ("op", "async_op")),
    ("comm.reduce(TENSOR, 0)",), ("comm.reduce(x.clone(), 0, op=NUMBER)",), ("comm.reduce(x.clone(), NUMBER)",),
    ("comm.reduce_scatter(TENSOR, [x])",), ("comm.reduce_scatter(x.clone(), LIST)",),
    ("comm.broadcast(TENSOR, 0)",), ("comm.broadcast(x.clone(), NUMBER)",),
    ("comm.all_gather(LIST, x)",), ("comm.all_gather([x.clone()], TENSOR)",),
    ("comm.gather(TENSOR, [x.clone()])",), ("comm.gather(x, LIST)",), ("comm.gather(x, [x.clone()], dst=NUMBER)",),
    ("comm.scatter(TENSOR, [x])",), ("comm.scatter(x.clone(), LIST)",), ("comm.scatter(x.clone(), [x], src=NUMBER)",),
    ("comm.all_to_all(LIST, [x])",), ("comm.all_to_all([x.clone()], LIST)",),
    ("comm.all_to_all_v(TENSOR, x)",), ("comm.all_to_all_v(x.clone(), TENSOR)",),
    *((f"comm.all_to_all_v(x.clone(), x, {way}put_split_sizes=NUMBER)",) for way in ("out", "in")),
    ("comm.exchange_counts(COUNT)",), ("Communicator(device=NUMBER)",), ("Communicator(timeout=NUMBER)",),
    # rounds
    *((f"make({name}=NUMBER).close()", "2**31") for name in ("hidden_size", "max_tokens", "lanes", "align")),
    *(
        (f"make({name}=NUMBER).close()",)
        for name in (
            "num_experts", "top_k", "num_programs", "timeout", "dtype", "wire", "combine_wire", "grad_wire",
            "transport", "invariant", "expert_map",
        )
    ),
    ("tw.ExpertParallel('comm', 4, 2, 64, 4)",),
    ("ep.dispatch(TENSOR, ids, weights)",), ("ep.dispatch(x, IDS, weights)",), ("ep.dispatch(x, ids, WEIGHTS)",),
    ("ep.dispatch(x, ids, weights, lane=NUMBER)",), ("ep.combine(ROWS, dispatch())",), ("ep.combine(x, NUMBER)",),
    ("d = dispatch(); ep.combine(d.tokens, d, out=TENSOR)",), ("dispatch().gather(NUMBER)",),
    ("d = dispatch(); ep.combine(d.tokens[:1], d, weighted=NUMBER)",),
    ("local(ROWS, counts)", *TORCHS_OWN), ("local(rows, PER_EXPERT)", "fake"),
    # the codec
    ("tw.quantize(TENSOR)",), ("tw.quantize(x, NUMBER)",), ("tw.dequantize(NUMBER)",), ("tw.dequantize(q, NUMBER)",),
    ("tw.dequantize(WireRows(RECORDS, q.wire, q.shape, q.dtype))",),
    ("tw.dequantize(WireRows(q.records, NUMBER, q.shape, q.dtype))",),
    ("tw.dequantize(WireRows(q.records, q.wire, SHAPE, q.dtype))",),
    ("tw.dequantize(WireRows(q.records, q.wire, q.shape, NUMBER))",),
    ("WireFormat(NUMBER, 128)",), ("WireFormat('int8', NUMBER)",), ("WireFormat('int8', 128, NUMBER)",),
    ("WireFormat.parse(NUMBER)",), ("WireFormat.parse('int8:' + '9' * 5000)",),
    *(
        (f"WireFormat.parse({wire!r}).{method}",)
        for wire in ("none", "int8")
        for method in (
            "row_bytes(NUMBER)", "payload_bytes(NUMBER)", "scales_offset(NUMBER)", "num_groups(NUMBER)",
            "row_bytes(64, NUMBER)", "payload_bytes(64, NUMBER)", "scales_offset(64, NUMBER)",
        )
    ),
    # layouts and layers
    ("tw.Layout(NUMBER, ('dp', 'mp'))",), ("tw.Layout((2, 2), NUMBER)",),
    *(
        (f"layout{call}",)
        for call in (
            "(NUMBER)", ".coordinates(NUMBER)", ".groups(NUMBER)", ".ranks_along('dp', NUMBER)",
            "('dp').shard_shape(NUMBER)", "('dp').full_shape(NUMBER)",
        )
    ),
    *(
        (f"call(tw.MoELayer, **layer_sizes, changed={{{name!r}: NUMBER}})", "2**31", ValueError)
        for name in ("hidden_size", "ff_size", "num_experts", "top_k", "gated", "expert_bias", "activation", "ep")
    ),
    *((f"RouterConfig({name}=NUMBER)",) for name in ("renormalize", "bias", "correction_bias")),
    *(
        (call.format(odd),) for odd in ("NUMBER", "layer")
        for call in (
            "tw.MoELayer(**layer_sizes).shard({})", "tw.LocalExperts({}, torch.nn.Linear)", "tw.Int8Experts({})",
            "tw.Int8Experts(GroupedExperts(1, 64, 64), rotated={})",
        )
    ),
    ("layer(NARROW)", "double", "meta", "fake", "float8"),
    ("top_k_route(LOGITS, 2)", "fake", "meta", "float8"), ("top_k_route(logits, NUMBER)",),
    ("load_balancing_loss(LOGITS, ids, 6)", "fake", "meta", "float8"), ("load_balancing_loss(logits, ids, NUMBER)",),
    ("load_balancing_loss(logits, IDS, 6)", "fake", "meta"),
    ("GroupedExperts(2, 8, 8)(NUMBER, torch.tensor([1, 2]))",), ("GroupedExperts(2, 8, 8)(torch.ones(3, 8), NUMBER)",),
]  # fmt: skip


def _call(function: Callable[..., Any], /, *given: Any, changed: dict[str, Any], **more: Any) -> Any:
    """Calls with arguments by name, of which some are changed."""
    named = dict(zip(inspect.signature(function).parameters, given, strict=False))
    return function(**named | more | changed)


def _problems(call: str, leave: tuple[Any, ...], names: dict[str, Any]) -> list[str]:
    """What came out of a call with odd values that should not."""
    found = []
    stated = (tw.ThinwireError, *(each for each in leave if isinstance(each, type)))
    name = next(iter(re.findall(r"\b(?:" + "|".join(ODD) + r")\b", call)), "")
    for kind, value in ODD[name].items() if name else [("", None)]:
        if kind not in leave:
            try:
                exec(call, names | {name: value})
            except stated as error:
                found += [] if str(error) else [f"{kind}: {type(error).__name__} says nothing"]
            except Exception as error:
                found.append(f"{kind}: {type(error).__name__}: {str(error).splitlines()[:1]}")
    return found


def _run(comm: Communicator, path: str) -> dict[str, list[str]]:
    x, ids, weights = torch.randn(4, HIDDEN), torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5)
    sizes: dict[str, Any] = {"num_experts": 4, "top_k": 2, "hidden_size": HIDDEN, "max_tokens": 4}
    layer_sizes: dict[str, Any] = {"hidden_size": 8, "ff_size": 8, "num_experts": 4, "top_k": 2}
    layout = tw.Layout((2, 2), ("dp", "mp"))
    ep = tw.ExpertParallel(comm, **sizes, transport=path, wire="none")
    d = ep.dispatch(x, ids, weights)
    assert d.tokens.shape[0] == 8
    names = {function.__name__: function for function in (*COLLECTIVES, load_balancing_loss, top_k_route)} | {
        "tw": tw, "torch": torch, "comm": comm, "Communicator": Communicator, "x": x, "path": path,
        "i8": x.to(torch.int8), "int8_reduce": tw.int8_all_to_all_reduce,
        "call": _call, "cut": tw.Layout((1, 1), ("dp", "mp"))("dp", "mp"), "ep": ep, "ids": ids, "weights": weights,
        "plan": tw.ExchangePlan(torch.arange(4), [4], comm, num_rows=4, transport=path), "rows": d.tokens,
        "make": lambda **odd: tw.ExpertParallel(comm, **{"transport": path, **sizes} | odd), "counts": d.expert_counts,
        "dispatch": lambda: ep.dispatch(x, ids, weights), "q": tw.quantize(torch.ones(4, HIDDEN)), "layout": layout,
        "local": tw.LocalExperts(ep, lambda number: torch.nn.Linear(HIDDEN, HIDDEN)), "WireRows": tw.WireRows,
        "WireFormat": tw.WireFormat, "layer": tw.MoELayer(**layer_sizes), "layer_sizes": layer_sizes,
        "GroupedExperts": GroupedExperts, "RouterConfig": RouterConfig, "logits": torch.randn(4, 6),
    }  # fmt: skip
    found = {}
    for call, *leave in CALLS:
        found[call] = _problems(call, tuple(leave), names)
        d = ep.dispatch(x, ids, weights)
        assert torch.equal(ep.combine(d.tokens, d), x), call  # nothing of all that has changed the round
    for function in COLLECTIVES:
        assert torch.equal(function(x, wire="none", transport=path, comm=comm), x)
    d = ep.dispatch(x, ids, weights)
    for gather in (d.gather, d.gather_records, d.gather_routing):
        with (
            mock.patch.object(received, "available_bytes", lambda: 1 << 30),  # as of a small machine
            pytest.raises(tw.CapacityError, match="cannot be allocated: 1073741824 are free"),
        ):
            gather(1 << 24)
    return found


@pytest.fixture(scope="module", params=exhaustive_but(["direct"], ["direct", "staged"]))
def found(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    return run_ranks(_run, 1, request.param, timeout=300)[0]


@pytest.mark.parametrize("call", [call for call, *_ in CALLS])
def test_odd_values_are_taken_or_refused(call: str, found: dict[str, list[str]]) -> None:
    assert not found[call], "\n".join(found[call])


def test_joining() -> None:
    for name in ("rank", "world_size", "rank_table", "domain", "device", "timeout"):
        skipped = {"rank_table": ("None",), "domain": ("str",), "device": ("str",)}.get(name, ())
        join = f"call(tw.init, timeout=1.0, changed={{{name!r}: NUMBER}}).close()"
        assert not _problems(join, skipped, {"call": _call, "tw": tw}), name
    for name in ("world_size", "mode", "device", "timeout", "env"):
        run = f"call(run_ranks, id, world_size=1, mode='thread', changed={{{name!r}: NUMBER}})"
        assert not _problems(run, ("2**31",), {"call": _call, "run_ranks": run_ranks}), name


def _negative_views(comm: Communicator, transport: str) -> None:
    """Their sign is not in memory, which is all that kernels see."""
    with tw.ExpertParallel(comm, 4, 2, HIDDEN, 4, transport=transport, wire="none") as ep:
        x, ids, weights = torch.randn(4, HIDDEN), torch.tensor([[0, 1]] * 4), torch.rand(4, 2)
        d = ep.dispatch(x, ids, weights)
        expected = ep.combine(d.tokens, d)
        d = ep.dispatch(torch._neg_view(-x), ids, torch._neg_view(-weights))
        assert torch.equal(ep.combine(torch._neg_view(-d.tokens), d), expected)


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_the_sign_of_a_negative_view_counts(transport: str) -> None:
    run_ranks(_negative_views, 1, transport, timeout=100)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


class Model(torch.nn.Module):
    """A weight that comes first, and something after it."""

    def __init__(self, second: torch.Tensor) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(3))
        self.register_buffer("second", second)


@pytest.mark.parametrize(
    ("stored", "held", "told"),
    [
        (torch.ones(3), torch.zeros(3, dtype=torch.int64), "second is torch.float32, expected a kind of torch.int64"),
        (torch.ones(3, dtype=torch.int64), torch.zeros(3, dtype=torch.bool), "second is torch.int64"),
        (torch.ones(3, dtype=torch.int64), torch.zeros(3, dtype=torch.complex64), "second is torch.int64"),
        (torch.tensor([1, 2, 300]), torch.zeros(3, dtype=torch.uint8), "numbers that do not fit"),
        (torch.ones(3), torch.zeros(1).expand(3), "elements share memory"),
        (torch.ones(3), torch.zeros(3, device="meta"), "on meta"),
        (torch.ones(3), torch.zeros(3).to_sparse(), "sparse"),
        (torch.ones(3), torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8), "dense"),
        (torch.ones(4), torch.zeros(3), "expected"),
    ],
)
def test_a_checkpoint_that_does_not_fit_leaves_the_model_as_it_was(
    stored: torch.Tensor, held: torch.Tensor, told: str, tmp_path: Path
) -> None:
    saved = Model(stored)
    with torch.no_grad():
        saved.first.fill_(1.0)
    path = tmp_path / "model.safetensors"
    save_checkpoint(saved, path)
    model = Model(held)
    with pytest.raises(tw.CheckpointError, match=told):
        load_checkpoint(model, path)
    assert torch.equal(model.first, torch.zeros(3))


def test_a_model_made_in_inference_mode_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_checkpoint(Model(torch.ones(3)), path)
    with torch.inference_mode():
        held = torch.zeros(3)
    model = Model(held)
    with pytest.raises(tw.CheckpointError, match="inference mode"):
        load_checkpoint(model, path)
    for odd in (tmp_path, "a\0b", 3, None):
        for call in (lambda odd: load_checkpoint(model, odd), read_metadata):
            with pytest.raises((tw.ThinwireError, FileNotFoundError)):
                call(odd)
    with pytest.raises(FileNotFoundError):
        load_checkpoint(Model(torch.zeros(3)), tmp_path / "nowhere")


# ---------------------------------------------------------------------------------------------------------------------
# Copies


def test_errors_survive_copies_and_pickles_as_a_pool_of_processes_makes_them() -> None:
    given: list[tw.ThinwireError] = [
        tw.PeerTimeout("it is late", ranks=[2, 1], lane=1, epoch=5, phase="combine"),
        *(getattr(tw, name)("text") for name in tw.__all__ if name.endswith("Error")),
    ]
    assert len(given) > 8
    for error in given:
        for attempted in (copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))):
            made = attempted(error)
            assert (type(made), made.args, vars(made)) == (type(error), error.args, vars(error))


def test_a_copy_of_a_layer_shares_its_ranks() -> None:
    with tw.init() as comm, tw.ExpertParallel(comm, 2, 1, 8, 4) as ep:
        layer = tw.MoELayer(8, 8, 2, 1).shard(ep)
        copied = copy.deepcopy(layer)
        assert copied.ep is ep and copied.experts.w_in is not layer.experts.w_in
