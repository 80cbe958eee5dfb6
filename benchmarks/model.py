"""Computes the least time of a round on GPUs from its bounds: nothing is measured, and no GPU is needed.

    python -m benchmarks.model --json benchmarks/results/model.json

The kernels of a round are recorded from its launchers. Their bytes follow from the layouts
(`benchmarks.speed_of_light`), and the least time of their instructions from the file of `benchmarks.machine_code`, if
one is given. The same code gives the same result on every machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import timing
from benchmarks.published import BETWEEN, BETWEEN_TOKENS, DECODE, PREFILL
from benchmarks.speed_of_light import CROSSINGS, MACHINES, Cycles, LeastLeg, Machine, least_leg, least_published
from tests.helpers.rounds import make_lanes
from thinwire.tools.planning.crossing import count_crossings
from thinwire.tools.planning.model import Model, find_link
from thinwire.tools.planning.plan import Request
from thinwire.triton_kernels import combine, dispatch, permute
from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH
from verification.ahead_of_time.harness import record_launches

TOKENS = (128, 4096)
#: What the table calls them: the wire formats of dispatch and of combine.
WIRES = {
    "int8 both legs": ("int8", "int8"),
    "int8, records to experts": ("int8", "int8"),
    "fp8 out, bf16 back": ("fp8", "none"),
    "bf16": ("none", "none"),
}
#: Where experts read records, no rows are gathered.
WITHOUT_ROWS = ("int8, records to experts",)
REQUEST = Request(ranks=8, experts=256, top_k=8, hidden=7168, max_tokens=TOKENS[0], transport="direct")
COLUMNS = {
    "machine": "",
    "tokens": "d",
    "wires": "",
    "dispatch us": ".0f",
    "combine us": ".0f",
    "round trip us": ".0f",
    "by bf16": ".2f",
    "planned us": ".0f",
}


def launched_kernels() -> tuple[list[str], list[str]]:
    """Names of what dispatch and combine launch, with the rows that are gathered for experts."""
    sizes = REQUEST.ranks, REQUEST.experts, REQUEST.top_k, REQUEST.hidden
    lane = make_lanes(*sizes, max_tokens=4)[0]
    x, ids = torch.zeros(4, REQUEST.hidden, dtype=REQUEST.dtype), torch.zeros(4, REQUEST.top_k, dtype=torch.int64)

    def dispatch_leg() -> None:
        dispatch.send_tokens(lane, x, ids, ids.float())
        dispatch.wait(lane, DISPATCH, 1.0, 1.0)
        permute.route(lane)
        permute.gather(lane, x, torch.tensor(False))

    def combine_leg() -> None:
        combine.send_sums(lane, x, x.dtype)
        dispatch.wait(lane, COMBINE, 1.0, 1.0)
        combine.sum_home(lane, x)

    first, second = ([launch.kernel.__name__ for launch in record_launches(leg)] for leg in (dispatch_leg, combine_leg))
    return first, second


#: Of the busiest pipe, by kernel and wire.
_Code = dict[tuple[str, str], Cycles]


def read_machine_code(path: Path | None) -> _Code:
    """What `benchmarks.machine_code` found for sm_90 and these rows; nothing where there is no file."""
    figures = [] if path is None else json.loads(path.read_text())["figures"]
    return {
        (figure["kernel name"], figure["wire"]): Cycles(figure["pipe"], figure["each"])
        for figure in figures
        if (figure["target"], figure["hidden"]) == ("sm_90", REQUEST.hidden) and figure.get("pipe")
    }


def least_round(
    machine: Machine, tokens: int, wires: str, kernels: tuple[list[str], list[str]], code: _Code
) -> dict[str, Any]:
    """One line of the table, with every launch of it."""
    wire, combine_wire = WIRES[wires]
    request = replace(REQUEST, max_tokens=tokens, wire=wire, combine_wire=combine_wire)
    needless = {"gather_kernel"} if wires in WITHOUT_ROWS else set()
    legs = [
        least_leg(
            request,
            machine,
            [name for name in names if name not in needless],
            {kernel: cycles for (kernel, of_wire), cycles in code.items() if of_wire == leg_wire},
        )
        for names, leg_wire in zip(kernels, WIRES[wires], strict=True)
    ]
    model = Model(find_link(machine.link))
    return {
        "machine": f"{machine.gpu}, {machine.link}",
        "tokens": tokens,
        "wires": wires,
        "dispatch us": 1e6 * legs[0].seconds,
        "combine us": 1e6 * legs[1].seconds,
        "round trip us": 1e6 * sum(leg.seconds for leg in legs),
        "planned us": 1e6 * sum(model.seconds(leg) for leg in request.legs("direct")),
        "legs": [_described(leg) for leg in legs],
    }


def _described(leg: LeastLeg) -> dict[str, Any]:
    launches = [
        {"kernel": launch.kernel, "bound": launch.bound}
        | {
            f"{name} us": None if seconds is None else 1e6 * seconds
            for name, seconds in (("link", launch.link), ("memory", launch.memory), ("pipe", launch.pipe))
        }
        for launch in leg.launches
    ]
    return {"signal us": 1e6 * leg.signal, "launches": launches}


def figures(code: _Code) -> list[dict[str, Any]]:
    """Every line of the table."""
    kernels, lines = launched_kernels(), []
    for machine in MACHINES:
        for tokens in TOKENS:
            group = [least_round(machine, tokens, wires, kernels, code) for wires in WIRES]
            bf16 = next(line for line in group if line["wires"] == "bf16")
            lines += [line | {"by bf16": bf16["round trip us"] / line["round trip us"]} for line in group]
    return lines


def published() -> list[dict[str, Any]]:
    """What other libraries' authors published, beside the least time of the same bytes."""
    return [
        {
            "kernels": f"{row.kernels}, {row.machine}",
            "leg": row.leg,
            "tokens": row.tokens,
            "sends": row.sends + (" x expert" if row.per_expert else ""),
            "published us": 1e6 * row.measured,
            "least us": 1e6 * least_published(row),
            "times": row.measured / least_published(row),
        }
        for row in (*PREFILL, *DECODE)
    ]


def between_hosts() -> list[dict[str, Any]]:
    """Rounds over 2 and 4 hosts of the first machine, a card of 400 Gbit/s for each GPU, beside DeepEP's.

    A leg takes one launch, one signal, and the bytes of the busiest rank on the slower of its links, which both work at
    nominal rates and at once. On two levels these are NVLink's in combine, where owners store float32 sums.
    """
    machine, lines = MACHINES[0], []
    rates = {"between": find_link("ib400").beta, "within": find_link(machine.link).beta}
    for hosts in (2, 4):
        for wires in (name for name in WIRES if name not in WITHOUT_ROWS):
            wire, back = WIRES[wires]
            sizes = {"ranks": 8 * hosts, "hosts": hosts, "max_tokens": BETWEEN_TOKENS}
            found = count_crossings(replace(REQUEST, wire=wire, combine_wire=back, **sizes))
            line: dict[str, Any] = {"machine": f"{hosts} x 8 {machine.gpu}, ib400", "wires": wires}
            for leg in (leg for leg in found.legs if (leg.name, leg.wire) in (("dispatch", wire), ("combine", back))):
                times = {"between": max(leg.sent, leg.received), "within": leg.within}
                times = {name: 1e6 * moved / rates[name] for name, moved in times.items()}
                beside = 1e6 * (machine.launch + CROSSINGS * machine.crossing)
                line[f"{leg.name}, {leg.level}"] = beside + max(times.values())
                line[f"{leg.name}, {leg.level}, links"] = times
            published = [row for row in BETWEEN if row.hosts == hosts and wires == "fp8 out, bf16 back"]
            line |= {f"{row.leg}, published": 1e6 * row.measured for row in published}
            lines.append(line)
    return lines


def results(machine_code: Path | None) -> dict[str, Any]:
    """All that the file holds, but for the command."""
    machines = [asdict(machine) | {"link_rate": find_link(machine.link).beta} for machine in MACHINES]
    return {
        "machines": machines,
        "figures": figures(read_machine_code(machine_code)),
        "published": published(),
        "between hosts": between_hosts(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--machine-code", type=Path, metavar="FILE", help="what benchmarks.machine_code wrote")
    options = parser.parse_args(arguments)
    found = results(options.machine_code)
    timing.print_table(found["figures"], COLUMNS)
    print("\nus between hosts, reckoned from bytes at nominal rates, not measured; published: DeepEP's own figures")
    heads = [f"{leg}, {what}" for leg in ("dispatch", "combine") for what in ("one level", "two levels", "published")]
    lines = [
        line | {head: f"{line[head]:,.0f}" if head in line else "" for head in heads} for line in found["between hosts"]
    ]
    timing.print_table(lines, dict.fromkeys(("machine", "wires", *heads), ""))
    if options.json is not None:
        given = "" if options.machine_code is None else f" --machine-code {options.machine_code}"
        command = f"python -m benchmarks.model{given} --json {options.json}"
        options.json.write_text(json.dumps({"command": command, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
