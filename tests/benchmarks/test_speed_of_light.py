"""The least time of a round: what it is made of, and that nothing published is faster than such a ceiling."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="recording launches needs Triton")

from benchmarks import model
from benchmarks.published import BETWEEN, DECODE, PREFILL
from benchmarks.speed_of_light import MACHINES, Cycles, least_leg, least_published, round_work
from tests.helpers.rounds import make_lanes
from thinwire.errors import ArgumentError
from thinwire.tools.planning.plan import reach

ROOT = Path(model.__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
REQUEST = replace(model.REQUEST, wire="int8", combine_wire="int8")


def test_the_file_of_figures_is_what_the_code_says() -> None:
    written = json.loads((RESULTS / "model.json").read_text())
    found = re.fullmatch(r"python -m benchmarks\.model(?: --machine-code (\S+))? --json \S+", written.pop("command"))
    assert found is not None
    machine_code = ROOT / found[1] if found[1] else None
    assert written == json.loads(json.dumps(model.results(machine_code)))


def test_a_kernel_that_nobody_counted_is_refused() -> None:
    with pytest.raises(ArgumentError, match="'other_kernel' is none of a round's; those are: send_tokens_kernel"):
        least_leg(REQUEST, MACHINES[0], ["other_kernel"])


def test_what_routing_moves_is_what_lanes_hold() -> None:
    request = replace(REQUEST, hidden=64)
    lane = make_lanes(request.ranks, request.experts, request.top_k, request.hidden, request.max_tokens)[0]
    work, layout = round_work(request), lane.layout
    rows = request.max_tokens * request.top_k
    planes = layout.WEIGHTS - layout.IDS, layout.RECORDS - layout.WEIGHTS
    positions = lane.positions.numel() * lane.positions.itemsize
    assert work["count_kernel"].memory_bytes == planes[0] + positions + rows * lane.index.itemsize
    assert work["place_kernel"].memory_bytes == sum(planes) + rows * (2 * lane.index.itemsize + lane.weights.itemsize)


def test_with_memory_and_launches_for_nothing_a_leg_takes_its_bytes_over_the_link() -> None:
    free = replace(MACHINES[0], memory=float("inf"), launch=0.0, crossing=0.0)
    kernels = model.launched_kernels()
    for leg, names in zip(REQUEST.legs("direct"), kernels, strict=True):
        assert least_leg(REQUEST, free, names).seconds == pytest.approx(leg.wire_bytes / 450e9)


def test_instructions_bound_a_kernel_that_has_too_many() -> None:
    names = ["sum_home_kernel"]
    (few,) = least_leg(REQUEST, MACHINES[0], names, {"sum_home_kernel": Cycles(1.0, 1.0)}).launches
    (many,) = least_leg(REQUEST, MACHINES[0], names, {"sum_home_kernel": Cycles(1000.0, 1000.0)}).launches
    assert few.pipe is not None and many.pipe == pytest.approx(1000 * few.pipe)
    assert (few.bound, many.bound) == ("memory", "pipe") and few.seconds < many.seconds == many.launch + many.pipe
    # A token has 5.295 sums, of 7168 elements, on 132 multiprocessors of 128 lanes.
    assert few.pipe == pytest.approx(128 * 5.2951 * 7168 / (132 * 128 * 1.98e9), rel=1e-4)


def test_no_format_gains_more_than_its_bytes_and_slower_links_gain_more() -> None:
    gains = [line["by bf16"] for line in model.figures({}) if line["wires"] == "int8 both legs"]
    bytes_of = [[leg.record_bytes for leg in replace(REQUEST, wire=wire, combine_wire=wire).legs("direct")]
                for wire in ("none", "int8")]  # fmt: skip
    most = sum(bytes_of[0]) / sum(bytes_of[1])
    assert all(1.0 < gain < most for gain in gains)
    assert gains[1] < gains[3] and gains[0] < gains[2]


def test_nothing_that_was_published_is_faster_than_the_ceiling() -> None:
    assert all(row.measured > least_published(row) for row in (*PREFILL, *DECODE))
    assert all(0.8 < row.link_bytes / 50e9 / row.measured < 1 for row in BETWEEN)


def test_between_hosts_the_slower_link_counts() -> None:
    lines = {(line["machine"][:5], line["wires"]): line for line in model.between_hosts()}
    int8 = lines["2 x 8", "int8 both legs"]
    # A record with ids, weights and number crosses once; float32 sums of 14 other ranks' tokens stay in the host.
    link = 1e6 * 8192 * reach(256, 8, 2)[0] * 7376 / 50e9
    within = 1e6 * 8192 * reach(256, 8, 16)[0] * 14 * 4 * 7168 / 450e9
    assert int8["dispatch, two levels"] == pytest.approx(2.5 + link, rel=0.01)
    assert int8["combine, two levels"] == pytest.approx(2.5 + within, rel=0.02)
    assert all(line["dispatch, two levels"] < line["dispatch, one level"] / 2 for line in lines.values())
    assert lines["4 x 8", "fp8 out, bf16 back"]["combine, published"] == pytest.approx(6958, abs=1)


def test_rows_of_half_as_many_bytes_are_half_the_memory_of_what_writes_them() -> None:
    double = replace(REQUEST, wire="none", combine_wire="none", dtype=torch.float32)
    of_rows = [round_work(request)["gather_kernel"].memory_bytes for request in (double, REQUEST)]
    assert of_rows[1] < of_rows[0] / 1.9
