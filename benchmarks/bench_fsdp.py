"""Times the collectives of a step of FSDP2 between two hosts joined by a link of 1 Gbit/s, in int8 and as they are.

    sudo .venv/bin/python -m benchmarks.bench_fsdp --json benchmarks/results/cpu/fsdp_link.json

The hosts are two network namespaces of this machine (see `benchmarks/link.py`), with one rank each, over Gloo; the
transport is staged. Each way to send has a model of its own, of --blocks pairs of square Linear layers, each pair
sharded by `fully_shard`. Their steps, a forward and a backward of one row each, take turns. Parameters are float32 and
gathered in bfloat16; gradients are reduced in bfloat16, or in float32.

On the CPU FSDP's collectives block, so their times add up: of a step, `gather` and `scatter` are the times from call to
return, `step` is all of it, and `x stock` compares gather and scatter with stock FSDP2's in the same run: the median of
the ratios within rounds. In parentheses are the least and the greatest of --runs runs, each over a new link between new
ranks. `none` sends the same numbers by thinwire: what that gains is not the format's doing. `sent MB` is what left a
host in a step, headers included, as the kernel counted it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from benchmarks import link, timing
from thinwire.comm import Communicator
from thinwire.integrations import fsdp

STOCK = "stock"
WIRES = {STOCK: None, "none": "none", "int8": "int8", "int8+h64": "int8+h64"}
COLUMNS = {
    "link": "s", "reduced in": "s", "sent as": "s", "bf16 MB": ".1f", "sent MB": ".1f", "gather ms": ".1f",
    "scatter ms": ".1f", "step ms": ".1f", "x stock": "s", "gradients": ".4f",
}  # fmt: skip
GOAL = 1.7  # of int8, where gradients are reduced in bfloat16


class _Timed:
    """One of FSDP's collectives, and how long its calls took and what they got."""

    def __init__(self, collective: Any) -> None:
        self.collective, self.allocate = collective, collective.allocate
        self.seconds = 0.0

    def __call__(self, *, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **more: Any) -> Any:
        begun = time.perf_counter()
        done = self.collective(output_tensor=output_tensor, input_tensor=input_tensor, **more)
        self.seconds += time.perf_counter() - begun
        return done


class _Model:
    """A sharded model, and what its collectives take."""

    def __init__(self, comm: Communicator, wire: str | None, width: int, blocks: int, reduced: torch.dtype) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(blocks))
        )
        self.x = torch.randn(1, width, generator=torch.Generator().manual_seed(comm.rank))
        mesh, policy = DeviceMesh.from_group(comm.group, "cpu"), MixedPrecisionPolicy(torch.bfloat16, reduced)
        for block in self.net:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.net, mesh=mesh, mp_policy=policy)
        if wire is not None:
            fsdp.quantize(self.net, wire, wire)
        self.timed: dict[str, list[_Timed]] = {"_all_gather_comm": [], "_reduce_scatter_comm": []}
        for block in self.net:
            assert isinstance(block, FSDPModule)
            (group,) = block._get_fsdp_state()._fsdp_param_groups
            for name, legs in self.timed.items():
                legs.append(_Timed(getattr(group, name)))
                setattr(group, name, legs[-1])

    def step(self) -> list[float]:
        """Seconds of gathers, of scatters, and of all; and bytes sent."""
        for leg in sum(self.timed.values(), []):
            leg.seconds = 0.0
        self.net.zero_grad()
        before, begun = _bytes_sent(), time.perf_counter()
        self.net(self.x).float().square().mean().backward()
        whole = time.perf_counter() - begun
        return [*(sum(leg.seconds for leg in legs) for legs in self.timed.values()), whole, _bytes_sent() - before]

    def gradients(self) -> torch.Tensor:
        return torch.cat([parameter.grad.full_tensor().flatten() for parameter in self.net.parameters()])


def _bytes_sent() -> int:
    """What left this host so far."""
    devices = dict(line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:])
    return sum(int(counts.split()[8]) for name, counts in devices.items() if name.strip() != "lo")


def measure(comm: Communicator, *, width: int, blocks: int, reduced: str, repeats: int) -> dict[str, Any]:
    """One rank's part: of every step of each model the larger figures of both ranks, and the errors of gradients."""
    dtype = getattr(torch, reduced)
    models = {name: _Model(comm, wire, width, blocks, dtype) for name, wire in WIRES.items()}
    for model in models.values():
        model.step()
    samples: dict[str, list[list[float]]] = {name: [] for name in models}
    for _ in range(repeats):
        for name, model in models.items():
            comm.barrier()
            taken = comm.all_gather_object(model.step())
            samples[name].append([max(each) for each in zip(*taken, strict=True)])
    stock = models[STOCK].gradients()
    error = {name: timing.relative_error(model.gradients(), stock) for name, model in models.items()}
    elements = sum(parameter.numel() for parameter in models[STOCK].net.parameters())
    return {"samples": samples, "error": error, "elements": elements}


def figures(rate: str, reduced: str, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each way to send, from what a rank says of each run."""
    lines = []
    for name in WIRES:
        ratios = [
            statistics.median(
                (stock[0] + stock[1]) / (own[0] + own[1])
                for stock, own in zip(run["samples"][STOCK], run["samples"][name], strict=True)
            )
            for run in runs
        ]
        gather, scatter, step, sent = zip(*(sample for run in runs for sample in run["samples"][name]), strict=True)
        lines.append(
            {
                "rate": rate,
                "reduced_in": reduced,
                "sent_as": name,
                "elements": runs[0]["elements"],
                "bytes_sent": statistics.median(sent),
                "gather": timing.spread(gather),
                "scatter": timing.spread(scatter),
                "step": timing.spread(step),
                "ratio_to_stock": statistics.median(ratios),
                "ratios_to_stock": ratios,
                "error": max(run["error"][name] for run in runs),
                "samples": [run["samples"][name] for run in runs],
            }
        )
    return lines


def _columns(line: dict[str, Any]) -> dict[str, Any]:
    ratios = line["ratios_to_stock"]
    return {
        "link": line["rate"],
        "reduced in": line["reduced_in"],
        "sent as": line["sent_as"],
        "bf16 MB": line["elements"] * 2 / 1e6,
        "sent MB": line["bytes_sent"] / 1e6,
        "gather ms": line["gather"]["seconds"] * 1e3,
        "scatter ms": line["scatter"]["seconds"] * 1e3,
        "step ms": line["step"]["seconds"] * 1e3,
        "x stock": f"{line['ratio_to_stock']:.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
        "gradients": line["error"],
    }


@link.or_skipped
def main(arguments: Sequence[str] | None) -> None:
    parser = timing.parser(__doc__, repeats=7)
    parser.add_argument("--rate", default="1gbit", help="bits a second each way")
    parser.add_argument("--runs", type=int, default=3, help="links and pairs of ranks, of --repeats steps each")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=4)
    options = parser.parse_args(arguments)
    described = timing.machine(timing.check_device("cpu"))
    lines: list[dict[str, Any]] = []
    for reduced in ("bfloat16", "float32"):
        settings = {"width": options.width, "blocks": options.blocks, "reduced": reduced, "repeats": options.repeats}
        job = "benchmarks.bench_fsdp:measure"
        runs = [link.run_on_two_hosts(job, settings, rate=options.rate)[0] for _ in range(options.runs)]
        lines += figures(options.rate, reduced, runs)
    described["congestion_control"] = link.congestion_control()
    timing.print_machine(described)
    table = ([_columns(line) for line in lines], COLUMNS)
    timing.finish(options, "fsdp_link", described, table, lines, repeats=options.repeats, runs=options.runs)
    reached = next(line["ratio_to_stock"] for line in lines if line["sent_as"] == "int8")
    print(f"int8 at {options.rate}, reduced in bfloat16: {reached:.2f} x, goal {timing.verdict(GOAL, reached)}")


if __name__ == "__main__":
    main()
