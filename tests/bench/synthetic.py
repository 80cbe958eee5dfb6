"""Results as `thinwire bench --json` writes them, made up: no figure here was measured."""

from __future__ import annotations

from typing import Any

from thinwire.tools.bench.options import COLLECTIVES, ROUND
from thinwire.tools.bench.results import FORMAT, VERSION

SERIES = (
    ("thinwire", "int8", "direct"),
    ("thinwire", "none", "direct"),
    ("thinwire", "int8", "staged"),
    ("gloo", "none", None),
    ("quantize, gloo", "int8", None),
)


def figure(operation: str = "dispatch", tokens: int = 64, **fields: Any) -> dict[str, Any]:
    """One figure, consistent in itself; `fields` are put in place of its own."""
    size = tokens * 8192
    seconds = fields.pop("time", 1e-4 + size / 1e9)
    return {
        "operation": operation, "implementation": "thinwire", "wire": "int8", "transport": "direct",
        "routing": "uniform", "skew": 1.03, "max_violation": 0.4, "tokens": tokens, "size_bytes": size,
        "logical_bytes": 0.75 * size, "wire_bytes": 0.38 * size,
        "seconds": {
            "minimum": 0.8 * seconds, "lower_quartile": 0.9 * seconds, "median": seconds,
            "upper_quartile": 1.1 * seconds, "p99": 1.4 * seconds, "maximum": 1.5 * seconds,
        },
        "fastest_rank": 0.7 * seconds, "rank_spread": 0.2 * seconds, "period": 0.9 * seconds,
        "algorithm_bandwidth": size / seconds, "bus_bandwidth": 0.75 * size / seconds,
        "wire_bandwidth": 0.38 * size / seconds, "relative_error": 0.0065, "wrong": 0, "speedup": 1.5,
        "paired_speedup": 1.4, "reference": "gloo", "called": None,
    } | fields  # fmt: skip


def results(figures: Any = (), **fields: Any) -> dict[str, Any]:
    """A run of four ranks."""
    return {
        "format": FORMAT, "version": VERSION, "command": "thinwire bench dispatch --json a.json",
        "commit": "0123456789ab", "machine": {"cpu": "A processor", "cpus": 2, "load": 0.5, "gpu": None}, "ranks": 4,
        "hosts": 1, "launched": "processes of one host", "settings": {"hidden": 4096, "routings": ["uniform"]},
        "figures": list(figures), "skipped": [{"implementation": "nccl", "reason": "not there"}],
        "traffic": None, "expert_load": None, "copy_bandwidth": 9.7e9, "link_bandwidth": None,
    } | fields  # fmt: skip


def whole_run(
    series: Any = SERIES,
    tokens: Any = (1, 16, 256, 4096),
    routings: Any = (("uniform", 1.03),),
    operations: Any = (*ROUND, *COLLECTIVES),
) -> dict[str, Any]:
    """All operations, sizes and routings of each series, with traffic and load."""
    figures = []
    for operation in operations:
        for routing, skew in routings if operation in ROUND else ((None, None),):
            for place, (implementation, wire, transport) in enumerate(series):
                figures += [
                    figure(
                        operation,
                        count,
                        time=(1e-4 + count * 8e-6) * (1 + 0.4 * place) * (skew or 1),
                        implementation=implementation,
                        wire=wire,
                        transport=transport,
                        routing=routing,
                        skew=skew,
                        speedup=2 / (1 + 0.4 * place),
                    )
                    for count in tokens
                ]
    traffic = [[400 + 30 * i - 20 * j for j in range(4)] for i in range(4)]
    return results(figures, traffic=traffic, expert_load=[100 + 7 * (i % 5) for i in range(16)], link_bandwidth=1.25e8)


def odd_runs() -> dict[str, dict[str, Any]]:
    """Runs at the ends of what a file may hold, by name."""
    skewed = (("uniform", 1.03), ("zipf:1.2", 1.9), ("hot:0.5", 2.6))
    peers = (
        "gloo",
        "nccl",
        "Open MPI",
        "torch symmetric memory",
        "another",
        "_and $x^2$ <one>",
    )
    long_name = "a name that goes on and on, " * 14
    return {
        "a whole run": whole_run(routings=skewed),
        "one figure": results([figure()]),
        "one of each": results([figure(operation) for operation in (*ROUND, *COLLECTIVES)]),
        "six peers": whole_run([*SERIES, *((peer, "none", None) for peer in peers)], routings=skewed),
        "every wire": whole_run([("thinwire", f"int8:{2**k}", "direct") for k in range(4, 11)]),
        "six decades": whole_run(tokens=[4**k for k in range(11)]),
        "no powers of two": whole_run(tokens=(3, 100, 777)),
        "long names": whole_run(
            [(long_name[:400], "none", long_name[:40]), ("W" * 400, "int8", None), *SERIES],
            routings=((long_name[:400], 1.0), ("M" * 400, 1.1)),
        ),
        "no speed-up": results([figure(skew=skew, speedup=0, routing=str(skew)) for skew in (1.0, 2.0)]),
        "large speed-up": results([figure(skew=skew, speedup=9e11, routing=str(skew)) for skew in (1.0, 1e6)]),
        "no tokens": results([figure(tokens=0, bus_bandwidth=0), figure("all_reduce", 0, bus_bandwidth=None)]),
        "equal times": results(
            [figure(tokens=n, seconds=dict.fromkeys(("minimum", "median", "maximum"), 1e-3)) for n in (1, 2)]
        ),
        "nanoseconds to days": results([figure(tokens=4**k, time=10.0 ** (k - 9)) for k in range(15)]),
        "all skipped": results(traffic=[[0] * 4] * 4, expert_load=[0]),
        "many ranks": results(ranks=64, traffic=[[i * j for j in range(64)] for i in range(64)]),
        "eight ranks": results(ranks=8, traffic=[[99_999 * (i == j) + 88_888 for j in range(8)] for i in range(8)]),
        "one rank": results(ranks=1, traffic=[[3e14]], expert_load=[1e14]),
        "many experts": results(expert_load=[k % 97 for k in range(20_000)]),
    }  # fmt: skip
