"""Sentences of a summary: who is fastest at which sizes, by how much, and who is about as fast."""

from __future__ import annotations

from typing import Any

from tests.bench.synthetic import figure
from thinwire.tools.bench.results import figure_of
from thinwire.tools.bench.summary import summarise


def told(*figures: dict[str, Any]) -> list[str]:
    return summarise(map(figure_of, figures))


def of_size(
    mebibytes: int, time: float, name: str = "thinwire", operation: str = "all_reduce", **fields: Any
) -> dict[str, Any]:
    peer = {} if name == "thinwire" else {"wire": "none", "transport": None}
    return figure(operation, time=time, implementation=name, size_bytes=mebibytes << 20, routing=None, **peer | fields)


def test_sizes_one_after_the_other_with_the_same_winner_are_one_clause() -> None:
    figures = [
        *(of_size(size, 1.0, "gloo", speedup=1.0) for size in (1, 2, 4, 8)),
        of_size(1, 2.0, speedup=0.5), of_size(2, 0.5, speedup=2.0), of_size(4, 0.4, speedup=2.5),
        of_size(8, 3.0, speedup=0.33),
    ]  # fmt: skip
    assert told(*figures[::-1]) == [
        "all_reduce: gloo is fastest at 1 MiB; thinwire int8 direct is fastest from 2 MiB to 4 MiB (2.0x to 2.5x gloo)"
        "; gloo is fastest at 8 MiB"
    ]  # fmt: skip


def test_rounds_go_by_tokens_and_several_routings_are_named() -> None:
    assert told(figure("moe", tokens=16, speedup=3.04)) == [
        "moe: thinwire int8 direct is fastest at 16 tokens (3.0x gloo)"
    ]
    several = told(*(figure("moe", routing=name, speedup=None) for name in ("uniform", "hot:0.5")))
    assert [sentence.partition(" is")[0] for sentence in several] == [
        "moe, uniform: thinwire int8 direct", "moe, hot:0.5: thinwire int8 direct"
    ]  # fmt: skip


def test_who_is_within_the_quartiles_of_the_fastest_is_about_as_fast() -> None:
    near, far = of_size(1, 1.09, "near", speedup=None), of_size(1, 1.11, "far", speedup=None)
    assert told(far, near, of_size(1, 1.0, speedup=None)) == [
        "all_reduce: thinwire int8 direct is fastest at 1 MiB (near about as fast)"
    ]


def test_copies_and_wrong_results_are_never_the_fastest() -> None:
    wrong = of_size(1, 1.0, "spoiled") | {"seconds": None, "speedup": None}
    assert told(of_size(1, 0.1, "copy"), wrong, of_size(1, 5.0, "gloo", speedup=1.0)) == [
        "all_reduce: gloo is fastest at 1 MiB"
    ]
    assert told(wrong) == []
