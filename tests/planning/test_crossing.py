"""What crosses between hosts: as counted message by message, and as the closed formula says."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.comm.hosts import forwarder
from thinwire.errors import ArgumentError, ThinwireError
from thinwire.tools.bench.traffic import expert_load
from thinwire.tools.cli import main
from thinwire.tools.demo.tiny_moe import TINY_MOE_PATH
from thinwire.tools.planning import crossing
from thinwire.tools.planning.crossing import DENSE, Crossing, count_crossings, draw_ids, owners_of
from thinwire.tools.planning.plan import Request, reach

REQUEST = Request(ranks=16, experts=256, top_k=8, hidden=7168, max_tokens=4096, wire="int8", hosts=2)


def on(hosts: int, each: int) -> Request:
    return replace(REQUEST, ranks=hosts * each, hosts=hosts)


def leg_of(found: crossing.Crossings, name: str, level: str, wire: str = "int8") -> Crossing:
    (leg,) = (leg for leg in found.legs if (leg.name, leg.level, leg.wire) == (name, level, wire))
    return leg


@pytest.mark.parametrize(("hosts", "each"), [(2, 4), (3, 5), (4, 8), (6, 8), (64, 8)])
def test_drawn_routings_reach_what_the_closed_formula_says(hosts: int, each: int) -> None:
    found = count_crossings(on(hosts, each))
    assert found.ranks == pytest.approx(sum(reach(256, 8, hosts * each)), rel=0.005)
    owned = np.bincount(owners_of(None, 256, hosts * each) // each, minlength=hosts)
    one = [1 - np.prod([(256 - number - i) / (256 - i) for i in range(8)]) for number in owned]
    assert found.hosts == pytest.approx(sum(one), rel=0.005)
    assert found.host_share == pytest.approx(found.hosts / hosts)
    assert found.form == ("dense" if found.host_share >= DENSE else "compact") == ("dense" if hosts <= 4 else "compact")


def _message_by_message(ids: np.ndarray, owners: list[int], hosts: int, each: int, level: str) -> dict[str, Counter]:
    """Rows that cross between hosts, and within them, by (sender, receiver), of dispatch and combine."""
    members = tuple(tuple(range(host * each, (host + 1) * each)) for host in range(hosts))
    between: Counter = Counter()
    within: Counter = Counter()
    for source, token in itertools.product(range(hosts * each), ids.tolist()):
        places = {owners[expert] for expert in token}
        for host in {owner // each for owner in places}:
            carrier = forwarder(members, source, host)
            if level == "two levels" and carrier != source:
                between[source, carrier] += 1
            for owner in (owner for owner in places if owner // each == host):
                if level == "two levels" or owner // each == source // each:
                    within[carrier, owner] += carrier != owner
                else:
                    between[source, owner] += 1
    return {"between": between, "within": within}


def _most(rows: Counter, end: int) -> int:
    sums: Counter = Counter()
    for pair, number in rows.items():
        sums[pair[end]] += number
    return max(sums.values(), default=0)


@pytest.mark.parametrize("expert_map", [None, [3, 0, 0, 5, 2, 5, 4]])
@pytest.mark.parametrize("level", ["one level", "two levels"])
def test_the_bytes_are_those_of_every_message(
    level: str, expert_map: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.array([*itertools.combinations(range(7), 2), (0, 3), (0, 5)])  # skewed a little
    monkeypatch.setattr(crossing, "draw_ids", lambda *_: ids)
    request = Request(6, 7, 2, 200, len(ids), "int8", "int8:row", hosts=3)
    found = count_crossings(request, "these", expert_map)
    rows = _message_by_message(ids, owners_of(expert_map, 7, 6).tolist(), 3, 2, level)
    for leg in (leg for leg in found.legs if leg.level == level and leg.wire != "none"):
        ends = (0, 1) if leg.name == "dispatch" else (1, 0)
        sent, received = (leg.message_bytes * _most(rows["between"], end) for end in ends)
        assert (leg.sent, leg.received) == (pytest.approx(sent), pytest.approx(received))
        mean = leg.message_bytes * rows["between"].total() / 6
        assert leg.token_bytes * len(ids) == pytest.approx(mean)
        assert leg.imbalance == pytest.approx(max(sent, received) / mean)
        records = {"dispatch": request.settings("staged").wire.row_bytes(200, torch.bfloat16), "combine": 4 * 200}
        inside = records[leg.name] if level == "two levels" else leg.message_bytes
        assert leg.within == pytest.approx(inside * max(_most(rows["within"], end) for end in (0, 1)))


def test_a_map_of_experts_is_told_from_contiguous_blocks(tmp_path: Path) -> None:
    load = expert_load([draw_ids("zipf:0.6", 256, 8, 16)], 256)
    owners, rows, free = [0] * 256, [0] * 16, [16] * 16
    for expert in np.argsort(-load).tolist():  # the busiest first, to the rank that has least so far and is not full
        rank = min((rank for rank in range(16) if free[rank]), key=rows.__getitem__)
        owners[expert], rows[rank], free[rank] = rank, rows[rank] + int(load[expert]), free[rank] - 1
    skewed, found = (count_crossings(REQUEST, "zipf:0.6", given) for given in (None, owners))
    assert skewed.imbalance == skewed.contiguous == found.contiguous > 1.3 > 1.2 > found.imbalance
    one, two = (leg_of(skewed, "combine", level).imbalance for level in ("one level", "two levels"))
    assert leg_of(found, "combine", "one level").imbalance < one > two
    file = tmp_path / "map.json"
    file.write_text(json.dumps(owners))
    assert count_crossings(REQUEST, "zipf:0.6", file) == found


def test_the_demo_routes_as_its_card_says() -> None:
    ids = draw_ids("demo", 8, 2, 4)
    (most,) = re.findall(r"held-out \| [\d.]+% to ([\d.]+)%", TINY_MOE_PATH.with_name("MODEL_CARD.md").read_text())
    assert 100 * expert_load([ids], 8).max() / ids.size == pytest.approx(float(most), abs=0.1)


def test_one_host_has_one_level_and_nothing_crosses() -> None:
    found = count_crossings(replace(on(1, 8), wire="none"))
    assert [(leg.name, leg.level, leg.sent, leg.imbalance) for leg in found.legs] == [
        ("dispatch", "one level", 0, 1), ("combine", "one level", 0, 1)
    ]  # fmt: skip
    assert found.hosts == 1 and found.legs[1].within > 0


@pytest.mark.parametrize(
    "given", [[0] * 255, [16] + [0] * 255, [-1] + [0] * 255, [True] + [0] * 255, {"0": 1}, "nothing", None]
)
def test_what_is_no_map_is_refused(given: object, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text(json.dumps(given))
    with pytest.raises(ArgumentError, match=r"expert_map is .*, expected 256 ranks from 0 to 15 in a list"):
        count_crossings(REQUEST, "uniform", file)
    if isinstance(given, list):
        with pytest.raises(ArgumentError, match="expected 256 ranks"):
            owners_of(given, 256, 16)
    with pytest.raises(ThinwireError, match="cannot be read"):
        owners_of(tmp_path / "nowhere", 256, 16)


def test_the_command_counts_what_crosses_for_hosts_by_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "plan --model deepseek-v3 --max-tokens 4096 --wire int8".split()
    assert main([*sizes, "--hosts", "4x8", "--routing", "zipf:1", "--json", "-"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["settings"]["ranks"], content["settings"]["hosts"]) == (32, 4)
    found = count_crossings(on(4, 8), "zipf:1")
    assert [leg["sent"] for leg in content["crossings"]["legs"]] == [leg.sent for leg in found.legs]
    assert main([*sizes, "--hosts", "4x8", "--routing", "zipf:1"]) == 0
    text = capsys.readouterr().out
    for leg in found.legs:
        bytes_of = rf"{leg.token_bytes:,.0f} .* {leg.sent / 1e6:.2f} .*{leg.imbalance:.2f} "
        assert re.search(rf"{leg.name} +{leg.wire} +{leg.level} .* {bytes_of}", text)
    assert f"two levels would send {found.form} messages: {found.host_share:.4f} of tokens go to a host" in text
    assert main([*sizes, "--ranks", "32", "--hosts", "4"]) == 0
    assert "two levels" not in capsys.readouterr().out
