"""DeepEP's own tests, read from a checkout and run over thinwire on CPU ranks.

    DEEP_EP_CHECKOUT=path/to/DeepEP python -m pytest tests/integrations/test_deep_ep_own.py

They are read with 'cpu' for 'cuda', without torch.compile, without timing; with int8, limits are those of its error.
Methods take what DeepEP's take.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("numba", reason="CPU ranks need numba")

from thinwire.comm.communicator import Communicator
from thinwire.integrations import deep_ep
from thinwire.testing import run_ranks

CHECKOUT = os.environ.get("DEEP_EP_CHECKOUT", "")
pytestmark = pytest.mark.skipif(not CHECKOUT, reason="DEEP_EP_CHECKOUT names no checkout of DeepEP")
#: Limits of theirs for `none`, and what stands for them with int8; both are about a squared error.
LIMITS = {"< 5e-6": "< 2e-4", "else 1e-5": "else 2e-4"}


def load(name: str, path: str, limits: dict[str, str]) -> Any:
    text = Path(CHECKOUT, path).read_text().replace("'cuda'", "'cpu'").replace("@torch.compile(dynamic=True)", "")
    for limit, ours in limits.items():
        text = text.replace(limit, ours)
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, path, "exec"), module.__dict__)
    return module


def gather(output: torch.Tensor, x: torch.Tensor, group: Any = None) -> None:
    dist.all_gather_single(output.view(-1, *x.shape[1:]), x, group=group)  # gloo takes no stacked output


def kernel_times(*_: object, num_kernels_per_period: int = 1, **__: object) -> Any:
    return ((1.0, 1.0), (1.0, 1.0)) if num_kernels_per_period == 2 else (1.0, 1.0)


def run(comm: Communicator, what: str, wire: str) -> None:
    deep_ep.install(wire=wire)
    dist.all_gather_into_tensor, time.sleep = gather, lambda _: None
    for name, attributes in {
        "envs": {"init_dist": None},
        # What it times was checked before that.
        "testing": {"bench": lambda *_, **__: (1.0, 1.0, 1.0), "bench_kineto": kernel_times},
    }.items():
        sys.modules[f"deep_ep.utils.{name}"] = module = types.ModuleType(f"deep_ep.utils.{name}")
        vars(module).update(attributes)
    load("deep_ep.utils.math", "deep_ep/utils/math.py", {})
    limits = LIMITS if wire != "none" else {}
    low_latency = load("test_low_latency", "tests/legacy/test_low_latency.py", limits)
    torch.manual_seed(comm.rank)
    buffer, group = (
        sys.modules["deep_ep"].Buffer(dist.group.WORLD, low_latency_mode=what == "low_latency"),
        dist.group.WORLD,
    )
    if what == "low_latency":
        low_latency.test_main(32, 1024, 16, 4, comm.rank, comm.size, group, buffer, seed=1)
        return
    intranode = load("test_intranode", "tests/legacy/test_intranode.py", limits)
    settings = argparse.Namespace(num_tokens=48, hidden=256, num_topk=4, num_experts=16, allow_mnnvl=False)
    intranode.test_main(settings, 24, comm.rank, comm.size, comm.rank, buffer, group)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("wire", ["none", "int8"])
@pytest.mark.parametrize("what", ["intranode", "low_latency"])
def test_what_deep_ep_tests(what: str, wire: str, ranks: int) -> None:
    run_ranks(run, ranks, what, wire, timeout=300.0)


@pytest.mark.parametrize("ours", [deep_ep.Buffer, deep_ep.ElasticBuffer, deep_ep.EventOverlap])
def test_methods_have_deep_eps_parameters_and_defaults(ours: type) -> None:
    path = {"Buffer": "buffers/legacy.py", "ElasticBuffer": "buffers/elastic.py", "EventOverlap": "utils/event.py"}
    tree = ast.parse(Path(CHECKOUT, "deep_ep", path[ours.__name__]).read_text())
    (theirs,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == ours.__name__)
    methods = {node.name: node.args for node in theirs.body if isinstance(node, ast.FunctionDef)}
    shared = [name for name in methods if name in dir(ours) and (name == "__init__" or name[0] != "_")]
    assert len(shared) >= 3
    for name in shared:
        names = [each.arg for each in methods[name].args]
        defaults = [ast.literal_eval(each) for each in methods[name].defaults]
        got = dict(inspect.signature(getattr(ours, name)).parameters)
        if name == "internode_dispatch":
            del got["num_worst_tokens"]  # it is dispatch itself here
        assert [*got] == names, name
        assert [each.default for each in got.values()][len(names) - len(defaults) :] == defaults, name
