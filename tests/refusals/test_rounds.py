"""Expert parallelism, experts, routers and layers refuse bad input, and rounds go on. A refusal is one row."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="CPU ranks need numba")

import torch

import thinwire as tw
from tests.helpers.refusals import Ground, Row, answers, check, expand
from tests.helpers.wires import relative_error
from tests.moe.test_experts_and_layer import OneRank
from thinwire.comm import Communicator
from thinwire.errors import (
    ArgumentError,
    CapacityError,
    ConfigMismatch,
    CountsError,
    LaneError,
    RoutingError,
    ThinwireError,
    TransportUnavailable,
    WireFormatError,
)
from thinwire.moe.experts import ClampedSwiGLU, GroupedExperts
from thinwire.moe.routing import RouterConfig, expert_range, load_balancing_loss, top_k_route
from thinwire.triton_kernels.int8_weights import Int8Weights

NO_MAP = "expert_map is ... expected 4 ranks from 0 to 1 in a list or tensor"
INT8 = "{'wire': 'int8'}"
FLOAT64 = "dtype=torch.float64, transport='staged'"
SIZES = ("num_experts", "top_k", "hidden_size", "max_tokens", "lanes", "align", "num_programs")

#: On two ranks x is float32 [4, 64], max_tokens is 4, ids int64 [4, 2] of 4 experts. Each rank receives eight rows.
#: `make` makes an ExpertParallel, `ep` takes one that was made, in the format none, and `received` dispatches on it.
#: Both ways to `combine` refuse, and the round then ends as it should.
ROWS = expand(
    ("dispatch(x[:, 1:], ids, weights)", RoutingError, "float32, float16 or bfloat16 [tokens, 64] is needed"),
    ("dispatch(x.to(_), ids, weights)", RoutingError, "x is _ ... float32, float16", "torch.float64", "torch.int32"),
    ("dispatch(x[None], ids, weights)", RoutingError, "[tokens, 64] is needed: x.flatten(0, -2) makes it so"),
    ("dispatch(x, ids[:, :1], weights)", RoutingError, "topk_ids is torch.int64 [4, 1]"),
    ("dispatch(x, ids[:, [0, 1, 1]], weights)", RoutingError, "int64 [4, 2] is needed"),
    ("dispatch(x, _)", RoutingError, "topk_ids is torch.float32 ... or int64", "ids / 1, weights", "weights, ids"),
    ("dispatch(x, ids, weights[:2])", RoutingError, "topk_weights is torch.float32 [2, 2]"),
    ("dispatch(x, ids, ids)", RoutingError, "topk_weights is torch.int64"),
    ("dispatch(x, ids * 0 + 4, weights)", RoutingError, "topk_ids runs from 4 to 4; experts are 0 ... 3"),
    ("dispatch(x, ids * 0 - 2, weights)", RoutingError, "topk_ids runs from -2 to -2"),
    ("dispatch(*(each.repeat(25, 1) for each in (x, ids, weights)))", CapacityError, "100 tokens were passed; this "
     "ExpertParallel accepts at most max_tokens=4: make a larger one, ExpertParallel(..., max_tokens=100), on all"),
    ("dispatch(x.half() if rank else x, ids, weights)", RoutingError, "all ranks of a round need the same dtype"),
    ("dispatch(x.numpy(), ids, weights)", ArgumentError, "x is a ndarray; a torch.Tensor is needed"),
    ("dispatch(x, ids.tolist(), weights)", ArgumentError, "topk_ids is a list"),
    ("dispatch(x.to('meta'), ids, weights)", ArgumentError, "x lives on meta, ... live on cpu"),
    ("dispatch(x, ids, weights, layer=_)", RoutingError, "int of 0 to 65535", "-1", "1 << 16", "True", "1.0", "None"),
    # combine
    ("combine(torch.zeros(9, 64))", RoutingError, "[8, 64], a row for each"),
    ("combine(lambda d: d.tokens[1:])", RoutingError, "expert_out is torch.float32 [7, 64]; ... [8, 64]"),
    ("combine(lambda d: d.tokens, out=x.double())", RoutingError, "out is torch.float64"),
    ("combine(lambda d: d.tokens, out=torch._neg_view(torch.empty(4, 64)))", RoutingError, "neg True"),
    ("ep().combine(received(), x)", LaneError, "d is a Tensor; what dispatch returned is needed"),
    ("combine(lambda d: d.records, weighted=1)", RoutingError, "weighted is 1"),
    ("combine(torch.zeros(16, 64), weighted=True)", RoutingError, "a row for each of the round's records, as weighted"),
    ("combine(lambda d: d.records, {'invariant': True}, weighted=True)", RoutingError, "weighted is True; with"),
    ("with torch.no_grad(): d = received()\nep().combine(d.records, d, weighted=True)", RoutingError, "without"),
    ("d = received(); rows = d.tokens; ep().combine(rows, d); ep().combine(rows, d)", LaneError, "it was combined"),
    ("d = received(); received(); assert not d.is_open; d.tokens", LaneError, "a later dispatch took ... lanes="),
    ("d = received(); received(); ep().combine(rows, d)", LaneError, "lane 0 is over: a later dispatch"),
    ("d = received(); e = received(); ep().combine(e.tokens, e); d.abandon()", LaneError, "is over: a later dispatch"),
    ("d = received(); d.abandon(); ep().combine(rows, d)", LaneError, "lane 0 is over: it was abandoned"),
    ("dispatch(x, ids, weights, lane=2)", LaneError, "no lane 2"),
    ("ep(lanes=2).combine(rows, received())", LaneError, "another"),
    ("e = make(); d = e.dispatch(x, ids, weights); e.close(); d.tokens", LaneError, "was closed, or rebuilt, since"),
    ("e = make(); e.close(); e.dispatch(x, ids, weights)", LaneError, "closed"),
    ("received(); part = comm.split(groups=[[0, 1]]); e = tw.ExpertParallel(part, 4, 2, 64, 4); part.close(); "
     "e.dispatch(x, ids, weights)", LaneError, "this ExpertParallel is closed, as this communicator is closed"),
    (f"combine(quantize(rows, 'int8:32'), {INT8})", WireFormatError, "group=32 ... accepted: ... group=128"),
    (f"combine(quantize(rows, '_'), {INT8})", WireFormatError, "_ ... accepted: ... int8", "int4", "none"),
    (f"combine(quantize(rows, WireFormat('int8', 128, 64)), {INT8})", WireFormatError, "alignment=64 ... alignment=32"),
    (f"combine(quantize(rows[:3], 'int8'), {INT8})", RoutingError, "[3, 64] ... WireRows in 'int8', [8, 64]"),
    (f"combine(quantize(rows[:3], 'int8'), {INT8}, weighted=True)", RoutingError, "weighted is True"),
    (f"combine(quantize(rows[:, :63], 'int8'), {INT8})", RoutingError, "[8, 63]"),
    (f"combine(quantize(rows[None], 'int8'), {INT8})", RoutingError, "[1, 8, 64]"),
    (f"combine(replace(q, wire='int8'), {INT8})", WireFormatError, "'int8'"),
    (f"combine(replace(q, records=q.records[:, :64]), {INT8})", WireFormatError, "uint8 [8, 96]"),
    (f"combine(replace(q, records=q.records[:3]), {INT8})", WireFormatError, "[3, 96]"),
    (f"combine(replace(q, records=q.records.view(torch.int8)), {INT8})", WireFormatError, "torch.int8"),
    (f"combine(replace(q, records=q.records.to_sparse()), {INT8})", ArgumentError, "dense"),
    (f"combine(replace(q, records=q.records.to('meta')), {INT8})", ArgumentError, "meta"),
    (f"combine(replace(q, records=None), {INT8})", ArgumentError, "NoneType"),
    (f"combine(replace(q, dtype=torch.int8), {INT8})", WireFormatError, "torch.int8"),
    (f"combine(q.records, {INT8})", RoutingError, "torch.uint8"),
    (f"combine(lambda d: d.quantized, {INT8})", ArgumentError, "QuantizedRows ... accepted: ... WireRows"),
    ("combine(quantize(rows, _), {'wire': 'int8', 'combine_wire': 'none'})", WireFormatError, "none but float rows",
     "'int8'", "'none'"),
    # what was received
    ("received().gather(-1)", CapacityError, "-1 is negative"),
    ("received().gather_records(_)", CapacityError, "", "-1", "True", "1.5", "2**63 - 1", "2**70"),
    ("received().gather_routing(_)", CapacityError, "", "-1", "True", "1.5", "2**63 - 1", "2**70"),
    ("received(wire='_').quantized", WireFormatError, "_ ... int8:row", "none", "int4", "fp8"),
    ("make(wire='int8').dispatch(x.clone().requires_grad_(), ids, weights).quantized", RoutingError, "no gradient"),
    # ExpertParallel
    ("tw.ExpertParallel(None, 4, 2, 64, 4)", ArgumentError, "comm is None, expected"),
    ("make(top_k=0)", RoutingError, "top_k is 0"),
    ("make(top_k=9)", RoutingError, "top_k is 9; expected 1 to 4: ... at most 32"),
    ("make(num_experts=40, top_k=33)", RoutingError, "expected 1 to 32: of 40 experts"),
    ("make(num_experts=2, top_k=3)", RoutingError, "top_k is 3; expected 1 to 2: of 2 experts"),
    ("make(num_experts=-1)", RoutingError, "num_experts is -1"),
    ("make(max_tokens=_)", RoutingError, "max_tokens is _; an int of", "1.5", "-1"),
    ("make(num_programs=0)", RoutingError, "num_programs is 0"),
    ("make(timeout=-1.0)", RoutingError, "timeout is -1.0; a finite number"),
    ("make(transport='nccl')", TransportUnavailable, "accepted: auto, direct, two_level, staged"),
    ("make(wire='int7')", WireFormatError, "'int7'; accepted: none, int8, int8+h64,"),
    ("make(grad_wire=_)", WireFormatError, "unknown wire format", "0", "False", "''", "[]", "x"),
    ("make(invariant=_)", RoutingError, "invariant is ... True or False", "'yes'", "None", "1"),
    *((f"make({name}=_)", RoutingError, name, "True", "2**31", "2**62", "1.0", "'1'", "np.int64(4)") for name in SIZES),
    ("make(dtype=torch.float64)", RoutingError, "formats have to be 'none'; ... are int8+h64, int8+h64, none"),
    (f"make({FLOAT64}, wire='none', grad_wire='int8')", RoutingError, "have to be 'none'; ... are none, none, int8"),
    ("make(dtype=torch.float64, wire='none', transport='direct')", TransportUnavailable, "do not take float64"),
    ("ep(dtype=torch.bfloat16).dispatch(x, ids, weights)", RoutingError, "x is torch.float32 ... torch.bfloat16"),
    (f"ep({FLOAT64}).dispatch(x, ids, weights)", RoutingError, "torch.float64 ... is needed"),
    (f"d = ep({FLOAT64}).dispatch(x.double(), ids, weights); ep({FLOAT64}).combine(d.tokens.float(), d)", RoutingError,
     "float64 ... is needed"),
    ("make(expert_map=_)", ArgumentError, NO_MAP,
     "[0, 1]", "[0, 0, 1, 2]", "[-1, 0, 1, 1]", "[False, 0, 1, 1]", "'0011'", "3", "OWNERS / 1", "OWNERS[None]"),
    ("make(expert_map=OWNERS.to_sparse())", ArgumentError, "expert_map is a Tensor of layout"),
    ("make(expert_map=OWNERS.to('meta'))", ArgumentError, "expert_map is on meta, where tensors have no values"),
    ("make(expert_map=[0, 0, 0, 1])", ArgumentError, "gives the ranks [3, 1]"),
    ("make(num_experts=5, expert_map=[1, 1, 1, 0, 0])", ArgumentError, "[2, 3] experts, expected [3, 2], as many"),
    ("make(expert_map=[0, 1, 0, 1], invariant=True)", ArgumentError, "invariant=True"),
    # where ranks differ
    ("make(max_tokens=4 + rank)", ConfigMismatch, "max_tokens"),
    ("make(wire=('int8', 'int4')[rank])", ConfigMismatch, "int4"),
    ("tw.all_to_all_v(x, [2, 2], [2 - rank, 1 + rank], comm=comm)", CountsError, "sends rank ... 2"),
    ("tw.int8_all_to_all_reduce(i8(4, 2), 1.0 + rank, check=True)", ConfigMismatch, "the scales of rank 1 are not"),
    ("comm.split(groups=[[0], [1]] if rank else [[0, 1]])", ConfigMismatch, "split: the ranks' settings differ"),
    # modules and copies
    ("tw.LocalExperts(ep(), torch.nn.Linear(8, 8))", ArgumentError, "factory is a Linear; expected a function"),
    ("local()(rows[:3], torch.tensor([1, 2, 0]))", RoutingError, "are [1, 2, 0], for rows [3, 64]; 2 numbers"),
    ("local()(rows[:4], torch.tensor([1, 2]))", RoutingError, "for rows [4, 64]"),
    ("_(comm)", TypeError, "a Communicator cannot be ... thinwire.init", "copy.copy", "copy.deepcopy", "pickle.dumps"),
    ("_(ep())", TypeError, "an ExpertParallel cannot be copied ... construct another", "copy.copy", "pickle.dumps"),
    ("pickle.dumps(MoELayer(64, 8, 4, 2).shard(ep()))", TypeError, "save_checkpoint"),
    # experts
    ("segments(_)", RoutingError, "expert_", "[3, 2]", "[3, 2, 1]", "[-1, 7]", "[3, 3], [0, 3]", "[3, 3], [0, 2, 6]",
     "[3, 3], [0, 3, 7]", "[3, 3], [0, 4, 6]", "[2, 2], [-1, 2, 4]"),
    ("Experts(_)", ValueError, "got", "-1, 4, 8", "2, 0, 8", "2, 4, 0"),
    ("Experts(2, 4, 8, activation='relu6')", ValueError, "gelu"),
    ("Experts(1, 2, 2, activation=ClampedSwiGLU())", ValueError, "gated=True"),
    ("ClampedSwiGLU(limit=_)", ValueError, "limit must be", "0.0", "float('nan')", "True", "'7'"),
    ("in_int8()(received(wire=_))", WireFormatError, "accepted: int8", "'none'", "'int4'", "'int8:16'"),
    ("in_int8(experts=3)(received(wire='int8'))", RoutingError, "3 experts"),
    ("in_int8(32)(received(wire='int8'))", RoutingError, "rows of 32"),
    ("in_int8()(received(wire='int8'), -1)", CapacityError, "-1"),
    ("in_int8()(x)", RoutingError, "dispatch"),
    ("in_int8(rotated=True)(received(wire='int8'))", WireFormatError, "'int8', and these experts ... rotated=True"),
    ("in_int8()(received(wire='int8+h64'))", WireFormatError, "'int8+h64', and these experts are ... rotated=False"),
    ("in_int8(_)", ValueError, "silu and without biases",
     "activation='gelu'", "bias=True", "gated=True, activation=ClampedSwiGLU()"),
    ("tw.Int8Experts(torch.nn.Linear(2, 2))", ArgumentError, "experts is a Linear"),
    ("Int8Weights(torch.zeros(2, 24, 64), torch.zeros(2, 24), 64)", WireFormatError, "weights of ... expected torch"),
    ("Int8Weights(i8(2, 24, 64), torch.zeros(24, 2).T, 64)", WireFormatError, "weights of ... expected torch"),
    ("Int8Weights(i8(2, 64, 64)[:, :, ::2], torch.zeros(2, 64), 24)", WireFormatError, "weights of ... expected torch"),
    ("Int8Weights(i8(2, 24, 64), torch.zeros(2, 24), 128)", WireFormatError, "of 128 are torch.int8 [2, 24, 64]"),
    ("Int8Weights.of(torch.full((1, 2, 2), torch.inf))", WireFormatError, "finite"),
    # layers and routers
    ("MoELayer(16, 8, 4, 2)(torch.zeros(3, 15))", RoutingError, "16"),
    ("MoELayer(16, 8, 4, _)", ValueError, "top_k", "0", "5"),
    ("MoELayer(8, 4, 4, 3, router_config=GROUPS)", ValueError, "2 of the"),
    ("MoELayer(8, 4, 4, 2, shared_ff_size=-1)", ValueError, "shared_ff_size"),
    ("MoELayer(16, 8, 4, 2, ep=OneRank(range(2), 4, 2, 16)).shard(OneRank(range(1), 4, 2, 16))", ValueError, "already"),
    ("MoELayer(16, 8, 4, 2, ep=OneRank(_, 4, 2, 16))", ValueError, "local_experts", "range(2, 5)", "(0, 4)"),
    ("MoELayer(16, 8, 4, 2, ep=OneRank(range(2), _))", ValueError, "be the same", "5, 2, 16", "4, 1, 16", "4, 2, 8"),
    ("expert_range(_)", ValueError, "got", "-1, 2, 0", "8, 0, 0", "8, 2, 2", "8, 2, -1"),
    ("top_k_route(_)", RoutingError, "got",
     "torch.zeros(4, 8), 0", "torch.zeros(4, 8), 9", "torch.zeros(8), 1", "torch.zeros(4, 8).long(), 2"),
    ("top_k_route(x[:, :8], 2, RouterConfig(num_groups=3))", RoutingError, "groups must be equal"),
    ("top_k_route(x[:, :8], 1, RouterConfig(num_groups=8))", RoutingError, "at least 2"),
    ("top_k_route(x[:, :8], 3, RouterConfig(num_groups=4, top_groups=1))", RoutingError, "hold 2 of the 8"),
    ("top_k_route(x[:, :8], 2, None, torch.zeros(7))", RoutingError, "correction_bias must be floating point [8]"),
    ("RouterConfig(_)", ValueError, "must", "scoring='relu'", "scale=0", "scale=1e999", "num_groups=0", "top_groups=2"),
    ("load_balancing_loss(_, 2)", RoutingError, "got",
     "x[:, :3], ids - ids", "x[:, :2], ids[:3] * 0", "x[:, :2], weights", "x[:, :2], ids + 2", "x[:, :2], ids - 2"),
    ("tw.clip_grad_norm_(_)", ArgumentError, "expected the module itself, and at least 0",
     "[], 1.0", "torch.nn.Linear(1, 1), -1.0", "torch.nn.Linear(1, 1), float('nan')"),
    ("tw._({}, 'path')", ArgumentError, "model is a dict, expected a torch", "save_checkpoint", "load_checkpoint"),
    ("tw._({})", ArgumentError, "model is a dict", "TrainingState", "expert_parameter_names"),
    ("tw.TrainingState(torch.nn.Linear(1, 1), [])", ArgumentError, "optimizers is a list"),
    ("tw.TrainingState(MoELayer(64, 8, 4, 2, ep=ep()))", ArgumentError, "ranks that are threads have no process group"),
)  # fmt: skip


def ground(comm: Communicator, transport: str) -> Ground:
    generator = torch.Generator().manual_seed(comm.rank)
    x, rows = (torch.randn(count, 64, generator=generator) for count in (4, 8))
    ids, weights = torch.tensor([[0, 3]] * 4), torch.full((4, 2), 0.5)
    made: dict[str, tw.ExpertParallel] = {}

    def make(**changed: Any) -> tw.ExpertParallel:
        sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 64, "max_tokens": 4, "transport": transport}
        return tw.ExpertParallel(comm, **sizes | changed)

    def ep(**changed: Any) -> tw.ExpertParallel:
        if str(changed) not in made:
            made[str(changed)] = make(**{"wire": "none"} | changed)
        return made[str(changed)]

    def received(**changed: Any) -> tw.Dispatched:
        return ep(**changed).dispatch(x, ids, weights)

    def combine(given: Any, changed: Any = {}, /, **more: Any) -> None:  # noqa: B006
        d, errors = received(**changed), []
        for call in (ep(**changed).combine, ep(**changed).combine_start):
            try:
                call(given(d) if callable(given) else given, d, **more)
            except ThinwireError as error:
                errors.append(error)
        assert relative_error(x, ep(**changed).combine(d.tokens, d)) < 0.02  # the round was open still
        assert len({(type(error), str(error)) for error in errors}) == 1
        raise errors[0]

    def segments(counts: list[int], offsets: list[int] | None = None) -> None:
        GroupedExperts(2, 4, 8)(
            torch.zeros(6, 4), torch.tensor(counts), None if offsets is None else torch.tensor(offsets)
        )

    def in_int8(hidden: int = 64, experts: int = 2, rotated: bool = False, **options: Any) -> tw.Int8Experts:
        return tw.Int8Experts(GroupedExperts(experts, hidden, 32, **options), rotated=rotated)

    names = {
        "tw": tw, "torch": torch, "np": np, "copy": copy, "pickle": pickle, "comm": comm, "rank": comm.rank, "x": x,
        "ids": ids, "weights": weights, "rows": rows, "q": tw.quantize(rows, "int8"), "quantize": tw.quantize, "ep": ep,
        "make": make, "segments": segments, "received": received, "combine": combine,
        "replace": replace, "WireFormat": tw.WireFormat,
        "dispatch": lambda *given, **more: ep().dispatch(*given, **more), "OWNERS": torch.tensor([0, 0, 1, 1]),
        "local": lambda: tw.LocalExperts(ep(), lambda _: torch.nn.Linear(64, 64)), "in_int8": in_int8,
        "i8": lambda *shape: torch.zeros(shape, dtype=torch.int8), "Int8Weights": Int8Weights,
        "Experts": GroupedExperts,
        "ClampedSwiGLU": ClampedSwiGLU, "MoELayer": tw.MoELayer, "OneRank": OneRank, "RouterConfig": RouterConfig,
        "expert_range": expert_range, "top_k_route": top_k_route, "load_balancing_loss": load_balancing_loss,
        "GROUPS": RouterConfig("sigmoid", num_groups=2, top_groups=1, bias=True, correction_bias=True),
    }  # fmt: skip

    def go_on() -> None:
        d = ep().dispatch(x, ids, weights, layer=65535)
        assert torch.equal(ep().combine(d.tokens, d), x)

    return Ground(names, go_on, alone=False)


@pytest.fixture(scope="module", params=["direct", "staged"])
def found(request: pytest.FixtureRequest) -> list[Any]:
    return answers(ground, 2, ROWS, request.param, mode="thread")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_is_refused_and_the_next_round_is_as_good(row: Row, found: list[Any]) -> None:
    check(row, found)
