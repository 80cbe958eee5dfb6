"""Every public function given odd values: what comes out is a result, or an error of thinwire's that says what is
accepted. Where a docstring states TypeError or ValueError, that may come out, too."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
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


_problems: list[str] = []


def attempt(what: str, call: Callable[[], Any], *stated: type[Exception]) -> None:
    """A call may return, or raise what it may raise; what else comes out is for `settle` to tell."""
    try:
        call()
    except (tw.ThinwireError, *stated) as error:
        assert str(error), what
    except Exception as error:
        told = str(error).split("\n")[0][:300]
        _problems.append(f"{what}: {type(error).__name__}: {told}")


def settle() -> None:
    """All that came out and should not have."""
    problems = _problems.copy()
    _problems.clear()
    assert not problems, "\n".join(problems)


def with_odd(
    call: Callable[..., Any], good: dict[str, Any], odd: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """Calls, each with one odd argument."""
    for name, values in odd.items():
        for kind, value in values.items():
            yield f"{call.__name__}({name}={kind})", lambda name=name, value=value: call(**{**good, name: value})


def _collectives(comm: Communicator, transport: str) -> None:
    common = {"comm": comm, "transport": transport}
    shape = (4, HIDDEN)
    numbers = dict(ODD_NUMBERS)
    for function in COLLECTIVES:
        odd = {"x": odd_tensors(shape, torch.float32), "out": odd_tensors(shape, torch.float32)}
        odd |= dict.fromkeys(("wire", "transport", "comm", "async_op"), numbers)
        odd |= {name: numbers for name in ("op", "gather_wire") if name in inspect.signature(function).parameters}
        if function is tw.all_gather_v:
            odd["counts"] = numbers | odd_tensors((1,), torch.int64)
        good = {"x": torch.ones(shape), **common}
        if function is tw.all_to_all_v:
            good["send_counts"] = [4]
            counts = numbers | odd_tensors((1,), torch.int64) | {"bool": [True], "-1": [-1], "2**62": [2**62]}
            odd |= dict.fromkeys(("send_counts", "recv_counts", "send_displs", "recv_displs"), counts)
            odd["check"] = numbers
        for wire in ("none", "int8"):
            for what, call in with_odd(function, {**good, "wire": wire}, odd):
                if "comm=None" not in what:
                    attempt(f"{what}, {wire}, {transport}", call)
        result: Any = function(**good, wire="none")
        assert torch.equal(result, torch.ones(shape))
    attempt_all(
        tw.int8_all_to_all_reduce,
        {"x": torch.ones(shape, dtype=torch.int8), "scales": 0.5, **common},
        {
            "x": odd_tensors(shape, torch.int8),
            "scales": numbers | odd_tensors((HIDDEN,), torch.float32),
            **dict.fromkeys(("dtype", "gather_wire", "transport", "check"), numbers),
        },
    )
    cut = tw.Layout((1, 1), ("dp", "mp"))("dp", "mp")
    attempt_all(
        tw.redistribute,
        {"x": torch.ones(shape), "src": cut, "dst": cut, **common},
        {
            "x": odd_tensors(shape, torch.float32),
            **dict.fromkeys(("src", "dst", "shape", "wire", "transport", "grad_layout", "grad_wire"), numbers),
        },
    )
    state = ("wire", "gather_wire", "transport", "error_feedback")
    attempt_all(tw.AllReduceState, {"comm": comm}, dict.fromkeys(state, numbers))
    plan = tw.ExchangePlan(torch.arange(4), [4], num_rows=4, **common)
    attempt_all(plan.there, {"x": torch.ones(shape)}, dict.fromkeys(("async_op", "wire"), numbers))
    attempt_all(plan.back, {"y": torch.ones(shape)}, dict.fromkeys(("async_op", "wire"), numbers))
    assert torch.equal(plan.there(torch.ones(shape), wire="none"), torch.ones(shape))
    attempt("AllReduceState(comm)", lambda: tw.AllReduceState("comm"))  # type: ignore[arg-type]
    attempt("hook", lambda: tw.all_reduce_hook(None, None))  # type: ignore[arg-type]
    attempt("hook", lambda: tw.all_reduce_hook(tw.AllReduceState(comm), None))  # type: ignore[arg-type]
    settle()


def attempt_all(
    function: Callable[..., Any], good: dict[str, Any], odd: dict[str, dict[str, Any]], *stated: Any
) -> None:
    """All calls with one odd argument."""
    function(**good)
    for what, call in with_odd(function, good, odd):
        attempt(what, call, *stated)


@pytest.mark.parametrize("transport", exhaustive_but(["direct"], ["direct", "staged"]))
def test_collectives(transport: str) -> None:
    run_ranks(_collectives, 1, transport, timeout=200)


def test_a_scalar_that_wants_a_gradient_is_refused_as_any_scalar() -> None:
    with tw.init():
        for function in COLLECTIVES:
            for x in (torch.tensor(1.0), torch.tensor(1.0, requires_grad=True)):
                with pytest.raises(tw.CountsError, match="at least 1 dimension"):
                    function(x)


def _methods(comm: Communicator) -> None:
    x = torch.ones(4, HIDDEN)
    tensors, numbers = odd_tensors((4, HIDDEN), torch.float32), ODD_NUMBERS
    lists = {kind: [value] for kind, value in tensors.items()} | numbers
    cases: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (comm.all_reduce, {"tensor": x.clone()}, {"tensor": tensors, "op": numbers, "async_op": numbers}),
        (comm.reduce, {"tensor": x.clone(), "dst": 0}, {"tensor": tensors, "op": numbers, "dst": numbers}),
        (comm.reduce_scatter, {"output": x.clone(), "input_list": [x]}, {"output": tensors, "input_list": lists}),
        (comm.broadcast, {"tensor": x.clone(), "src": 0}, {"tensor": tensors, "src": numbers}),
        (comm.all_gather, {"tensor_list": [x.clone()], "tensor": x}, {"tensor_list": lists, "tensor": tensors}),
        (
            comm.gather,
            {"tensor": x, "gather_list": [x.clone()]},
            {"tensor": tensors, "gather_list": lists, "dst": numbers},
        ),
        (
            comm.scatter,
            {"tensor": x.clone(), "scatter_list": [x]},
            {"tensor": tensors, "scatter_list": lists, "src": numbers},
        ),
        (
            comm.all_to_all,
            {"output_tensor_list": [x.clone()], "input_tensor_list": [x]},
            {"output_tensor_list": lists, "input_tensor_list": lists},
        ),
        (
            comm.all_to_all_v,
            {"output": x.clone(), "input": x},
            {"output": tensors, "input": tensors, "output_split_sizes": numbers, "input_split_sizes": numbers},
        ),
        (
            comm.exchange_counts,
            {"send_counts": [1]},
            {"send_counts": numbers | {"-1": [-1], "True": [True], "1.0": [1.0]}},
        ),
    ]
    for function, good, odd in cases:
        attempt_all(function, good, odd)
    for name, values in (("device", numbers), ("timeout", numbers)):
        for kind, value in values.items():
            attempt(f"Communicator({name}={kind})", lambda name=name, value=value: Communicator(**{name: value}))
    settle()


def test_methods_of_a_communicator() -> None:
    run_ranks(_methods, 1, timeout=100)


def _experts(comm: Communicator, transport: str) -> None:
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": HIDDEN, "max_tokens": 4}
    names = (
        *sizes, "lanes", "align", "num_programs", "timeout", "dtype", "wire", "combine_wire", "grad_wire", "transport",
        "invariant", "expert_map",
    )  # fmt: skip
    for value in (0, False, "", [], torch.ones(2)):
        with pytest.raises(tw.WireFormatError, match="unknown wire format"):
            tw.ExpertParallel(comm, **sizes, grad_wire=value)  # type: ignore[arg-type]
    with pytest.raises(tw.ArgumentError, match="expert_map is on meta, where tensors have no values"):
        tw.ExpertParallel(comm, **sizes, expert_map=torch.zeros(4, dtype=torch.int64, device="meta"))
    for name in names:
        for kind, value in ODD_NUMBERS.items():
            if name in ("hidden_size", "max_tokens", "align", "lanes") and kind in ("2**31",):
                continue  # refused as the others, which the next test looks at
            call = {"transport": transport, **sizes, name: value}
            attempt(f"ExpertParallel({name}={kind})", lambda call=call: tw.ExpertParallel(comm, **call).close())
    attempt("comm", lambda: tw.ExpertParallel("comm", **sizes))  # type: ignore[arg-type]
    with tw.ExpertParallel(comm, **sizes, transport=transport, wire="none") as ep:
        x, ids, weights = torch.randn(4, HIDDEN), torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5)
        attempt_all(
            ep.dispatch,
            {"x": x, "topk_ids": ids, "topk_weights": weights},
            {
                "x": odd_tensors((4, HIDDEN), torch.float32),
                "topk_ids": odd_tensors((4, 2), torch.int64),
                "topk_weights": odd_tensors((4, 2), torch.float32),
                "lane": ODD_NUMBERS,
            },
        )
        for kind, value in odd_tensors((8, HIDDEN), torch.float32).items():
            d = ep.dispatch(x, ids, weights)
            assert d.tokens.shape[0] == 8
            attempt(f"combine(expert_out={kind})", lambda value=value, d=d: ep.combine(value, d))
        for kind, value in odd_tensors((4, HIDDEN), torch.float32).items():
            d = ep.dispatch(x, ids, weights)
            rows = d.tokens
            attempt(f"combine(out={kind})", lambda value=value, d=d, rows=rows: ep.combine(rows, d, out=value))
        for kind, value in ODD_NUMBERS.items():
            d = ep.dispatch(x, ids, weights)
            attempt(f"gather(capacity={kind})", lambda value=value, d=d: d.gather(value))
            attempt(f"combine(weighted={kind})", lambda value=value, d=d: ep.combine(d.tokens[:1], d, weighted=value))
            attempt(f"combine(d={kind})", lambda value=value: ep.combine(x, value))
            assert torch.equal(ep.combine(d.tokens, d), x)  # nothing of all that has changed the round
        d = ep.dispatch(x, ids, weights)
        for gather in (d.gather, d.gather_records, d.gather_routing):
            with (
                mock.patch.object(received, "available_bytes", lambda: 1 << 30),  # as of a small machine
                pytest.raises(tw.CapacityError, match="cannot be allocated: 1073741824 are free"),
            ):
                gather(1 << 24)
        experts = tw.LocalExperts(ep, lambda number: torch.nn.Linear(HIDDEN, HIDDEN))
        attempt_all(
            experts.forward,
            {"rows": d.tokens, "expert_counts": d.expert_counts},
            {
                "rows": {k: v for k, v in odd_tensors((8, HIDDEN), torch.float32).items() if k not in TORCHS_OWN},
                "expert_counts": {k: v for k, v in odd_tensors((4,), torch.int64).items() if k != "fake"}
                | ODD_NUMBERS
                | {"negative": torch.tensor([9, -1, 0, 0])},
            },
        )
    settle()


@pytest.mark.parametrize("transport", exhaustive_but(["direct"], ["direct", "staged"]))
def test_expert_parallelism(transport: str) -> None:
    run_ranks(_experts, 1, transport, timeout=200)


@pytest.mark.parametrize(
    "name", ["num_experts", "top_k", "hidden_size", "max_tokens", "lanes", "align", "num_programs"]
)
@pytest.mark.parametrize("value", [True, 2**31, 2**62, 1.0, "1", np.int64(4)])
def test_sizes_are_ints_that_kernels_can_count(name: str, value: object) -> None:
    sizes: dict[str, Any] = {"num_experts": 4, "top_k": 2, "hidden_size": 8, "max_tokens": 4, name: value}
    with tw.init() as comm, pytest.raises(tw.errors.RoutingError, match=name):
        tw.ExpertParallel(comm, **sizes)


def _negative_views(comm: Communicator, transport: str) -> None:
    """Their sign is not in memory, which is all that kernels see."""
    with tw.ExpertParallel(comm, 4, 2, HIDDEN, 4, transport=transport, wire="none") as ep:
        x, ids, weights = torch.randn(4, HIDDEN), torch.tensor([[0, 1]] * 4), torch.rand(4, 2)
        d = ep.dispatch(x, ids, weights)
        expected = ep.combine(d.tokens, d)
        d = ep.dispatch(torch._neg_view(-x), ids, torch._neg_view(-weights))
        assert torch.equal(ep.combine(torch._neg_view(-d.tokens), d), expected)
        d = ep.dispatch(x, ids, weights)
        with pytest.raises(tw.RoutingError, match="neg True"):
            ep.combine(d.tokens, d, out=torch._neg_view(torch.empty(x.shape)))


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_the_sign_of_a_negative_view_counts(transport: str) -> None:
    run_ranks(_negative_views, 1, transport, timeout=100)


def test_codec_and_wire_formats() -> None:
    x = torch.ones(4, HIDDEN)
    attempt_all(tw.quantize, {"x": x}, {"x": odd_tensors((4, HIDDEN), torch.float32), "wire": ODD_NUMBERS})
    rows = tw.quantize(x)
    attempt_all(tw.dequantize, {"rows": rows}, {"rows": ODD_NUMBERS, "dtype": ODD_NUMBERS})
    good = {"records": rows.records, "wire": rows.wire, "shape": rows.shape, "dtype": rows.dtype}
    shapes = ODD_NUMBERS | {
        "()": (),
        "-1": (-4, -HIDDEN),
        "2**70": (2**70, HIDDEN),
        "1.5": (4.0, 64.0),
        "list": [4, 64],
    }
    records = odd_tensors(tuple(rows.records.shape), torch.uint8)

    def both_ways(**fields: Any) -> torch.Tensor:
        return tw.dequantize(tw.WireRows(**fields))

    odd = {"records": records, "wire": ODD_NUMBERS, "shape": shapes, "dtype": ODD_NUMBERS}
    attempt_all(both_ways, good, odd)
    attempt_all(
        tw.WireFormat, {"name": "int8", "group": 128}, dict.fromkeys(("name", "group", "alignment"), ODD_NUMBERS)
    )
    for kind, value in ODD_NUMBERS.items():
        attempt(f"parse({kind})", lambda value=value: tw.WireFormat.parse(value))
        for method in ("row_bytes", "payload_bytes", "scales_offset", "num_groups"):
            for wire in (tw.WireFormat("none"), tw.WireFormat.parse("int8")):
                bound = getattr(wire, method)
                attempt(f"{method}({kind})", lambda bound=bound, value=value: bound(value))
                if method != "num_groups":
                    attempt(f"{method}(64, {kind})", lambda bound=bound, value=value: bound(64, value))
    attempt("parse", lambda: tw.WireFormat.parse("int8:" + "9" * 5000))
    with pytest.raises(tw.WireFormatError, match="accepted"):
        tw.quantize(x, ["int8"])  # type: ignore[arg-type]
    with pytest.raises(tw.ArgumentError, match="rows is a list, expected the WireRows"):
        tw.dequantize([1])  # type: ignore[arg-type]
    settle()


def test_layouts_and_layers() -> None:
    attempt_all(
        tw.Layout,
        {"device_matrix": (2, 2), "name": ("dp", "mp")},
        dict.fromkeys(("device_matrix", "name"), ODD_NUMBERS),
    )
    layout = tw.Layout((2, 2), ("dp", "mp"))
    for kind, value in ODD_NUMBERS.items():
        attempt(f"layout({kind})", lambda value=value: layout(value))
        for method in ("coordinates", "groups"):
            attempt(f"{method}({kind})", lambda method=method, value=value: getattr(layout, method)(value))
        attempt(f"ranks_along({kind})", lambda value=value: layout.ranks_along("dp", value))
        for method in ("shard_shape", "full_shape"):
            attempt(f"{method}({kind})", lambda method=method, value=value: getattr(layout("dp"), method)(value))
    sizes = {"hidden_size": 8, "ff_size": 8, "num_experts": 4, "top_k": 2}
    moderate = {kind: value for kind, value in ODD_NUMBERS.items() if kind != "2**31"}  # which is much, and no nonsense
    flags = "gated", "expert_bias"
    attempt_all(tw.MoELayer, sizes, dict.fromkeys((*sizes, *flags, "activation", "ep"), moderate), ValueError)
    attempt_all(RouterConfig, {}, dict.fromkeys(("renormalize", "bias", "correction_bias"), ODD_NUMBERS))
    for kind, value in (ODD_NUMBERS | {"layer": tw.MoELayer(**sizes)}).items():
        attempt(f"shard({kind})", lambda value=value: tw.MoELayer(**sizes).shard(value))
        attempt(f"LocalExperts({kind})", lambda value=value: tw.LocalExperts(value, torch.nn.Linear))
        attempt(f"Int8Experts({kind})", lambda value=value: tw.Int8Experts(value))
        attempt(f"rotated={kind}", lambda value=value: tw.Int8Experts(GroupedExperts(1, 64, 64), rotated=value))
    layer = tw.MoELayer(**sizes)
    for kind, value in odd_tensors((4, 8), torch.float32).items():
        if kind not in ("double", "meta", "fake", "float8"):  # torch's own affair
            attempt(f"MoELayer(x={kind})", lambda value=value: layer(value))
    logits, ids = torch.randn(4, 6), torch.zeros(4, 2, dtype=torch.int64)
    odd = {"router_logits": odd_tensors((4, 6), torch.float32), "top_k": ODD_NUMBERS}
    for values in odd.values():
        for kind in ("fake", "meta", "float8"):
            values.pop(kind, None)
    attempt_all(top_k_route, {"router_logits": logits, "top_k": 2}, odd)
    attempt_all(
        load_balancing_loss, {"router_logits": logits, "topk_ids": ids, "num_experts": 6},
        {
            "router_logits": odd["router_logits"],
            "topk_ids": {k: v for k, v in odd_tensors((4, 2), torch.int64).items() if k not in ("fake", "meta")},
            "num_experts": ODD_NUMBERS,
        },
    )  # fmt: skip
    experts = GroupedExperts(2, 8, 8)
    for kind, value in ODD_NUMBERS.items():
        attempt(f"experts({kind})", lambda value=value: experts(value, torch.tensor([1, 2])))
        attempt(f"counts({kind})", lambda value=value: experts(torch.ones(3, 8), value))
    settle()


def test_joining() -> None:
    for name in ("rank", "world_size", "rank_table", "domain", "device", "timeout"):
        for kind, value in ODD_NUMBERS.items():
            if (name, kind) in {("rank_table", "None"), ("domain", "str"), ("device", "str")}:
                continue

            def call(name: str = name, value: object = value) -> None:
                extra: dict[str, Any] = {"timeout": 1.0} | {name: value}
                tw.init(**extra).close()

            attempt(f"init({name}={kind})", call)
    for name in ("world_size", "mode", "device", "timeout", "env"):
        for kind, value in ODD_NUMBERS.items():
            if (name, kind) == ("world_size", "2**31"):
                continue
            extra: dict[str, Any] = {"world_size": 1, "mode": "thread", name: value}
            attempt(f"run_ranks({name}={kind})", lambda extra=extra: run_ranks(lambda comm: None, **extra))
    settle()


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
        attempt(f"load_checkpoint({odd!r})", lambda odd=odd: load_checkpoint(model, odd), FileNotFoundError)
        attempt(f"read_metadata({odd!r})", lambda odd=odd: read_metadata(odd), FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        load_checkpoint(Model(torch.zeros(3)), tmp_path / "nowhere")
    settle()


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


def test_copies_and_pickles_say_what_to_do_instead() -> None:
    with tw.init() as comm, tw.ExpertParallel(comm, 2, 1, 8, 4) as ep:
        layer = tw.MoELayer(8, 8, 2, 1).shard(ep)
        for attempted in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="a Communicator cannot be copied or pickled.*thinwire.init"):
                attempted(comm)
        for attempted in (copy.copy, pickle.dumps):
            with pytest.raises(TypeError, match="an ExpertParallel cannot be copied or pickled.*construct another"):
                attempted(ep)
        with pytest.raises(TypeError, match="save_checkpoint"):
            pickle.dumps(layer)
        copied = copy.deepcopy(layer)
        assert copied.ep is ep and copied.experts.w_in is not layer.experts.w_in
