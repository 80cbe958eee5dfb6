"""Tables in the docs are what `tests.integrations.models`, `.families`, `make serve-check` and a benchmark wrote.

Neither transformers nor vLLM is needed for that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_vllm import columns

ROOT = Path(__file__).parents[2]
USES = ("a batch each", "one batch")
HEAD = """\
| family | ranks | none: logits | gradients | all_to_all: both | int8: a layer | other experts |
|---|---|---|---|---|---|---|
"""


def table(figures: list[dict[str, Any]], use: str) -> str:
    """A line for each model and number of ranks, of the worst rank, parameter and layer."""
    lines = HEAD
    for found in (each for each in figures if each["use"] == use):
        exact, stock, int8 = (found[name] for name in ("thinwire:none", "all_to_all", "thinwire:int8"))
        lines += (
            f"| {found['family']} | {found['ranks']} | {exact['logits']:.1e} | {max(exact['gradients'].values()):.1e} "
            f"| {stock['logits']:.1e}, {max(stock['gradients'].values()):.1e} "
            f"| {max(int8['layers']):.4f} | {int8['flips']} of {int8['routed']} |\n"
        )
    return lines


def test_the_tables_are_the_recorded_ones() -> None:
    figures = json.loads((ROOT / "benchmarks" / "results" / "cpu" / "transformers.json").read_text())["figures"]
    text = (ROOT / "docs" / "integrations.md").read_text()
    for use in USES:
        assert table(figures, use) in text, table(figures, use)
    assert all(found["thinwire:none"]["tokens_equal"] and found["thinwire:none"]["flips"] == 0 for found in figures)
    assert f"{sum(found['thinwire:int8']['tokens_equal'] for found in figures)} of {len(figures)}" in text


FAMILIES_HEAD = """\
| family | each a batch: logits | gradients | int8: a layer | tokens | one batch: logits | gradients | int8: a layer \
| tokens |
|---|---|---|---|---|---|---|---|---|
"""


def families_table(figures: list[dict[str, Any]]) -> str:
    """A line for each family, of the worst rank, parameter and layer."""
    cells: dict[str, dict[str, str]] = {}
    for found in figures:
        exact, int8 = found["thinwire:none"], found["thinwire:int8"]
        cells.setdefault(found["family"], {})[found["use"]] = (
            f"{exact['logits']:.1e} | {max(exact['gradients'].values()):.1e} | {max(int8['layers']):.4f} "
            f"| {'same' if int8['tokens_equal'] else 'other'}"
        )
    absent = "refused | | |"
    lines = (f"| {name} | {' | '.join(of.get(use, absent) for use in USES)} |\n" for name, of in cells.items())
    return FAMILIES_HEAD + "".join(lines)


def refused_table(refused: list[dict[str, str]]) -> str:
    """What transformers says, up to what it advises or lists."""
    lines = (f"| {each['family']} | {each['says'].split('. ')[0].split(': [')[0]} |\n" for each in refused)
    return "| family | transformers says |\n|---|---|\n" + "".join(lines)


def test_the_tables_of_more_families_are_the_recorded_ones() -> None:
    content = json.loads((ROOT / "benchmarks" / "results" / "cpu" / "transformers_families.json").read_text())
    text = (ROOT / "docs" / "integrations.md").read_text()
    figures = content["figures"]
    for table_text in (families_table(figures), refused_table(content["refused"])):
        assert table_text in text, table_text
    differ = 0.0
    for found in figures:
        exact, stock = found["thinwire:none"], found["all_to_all"]
        assert exact["tokens_equal"] and exact["flips"] == 0, found["family"]
        worst = [[each["logits"], max(each["gradients"].values())] for each in (exact, stock)]
        differ = max(differ, *(abs(ours - theirs) for ours, theirs in zip(*worst, strict=True)))
    assert differ < 1e-8, "which the page says"
    assert f"in all {len(figures)} cases with `none`" in text
    assert f"in {sum(found['thinwire:int8']['tokens_equal'] for found in figures)} with int8" in text


VLLM_HEAD = """\
| | prompts with the same tokens | steps whose tokens went to the same experts | their log-probabilities differ by | \
other steps | by | bytes sent |
|---|---|---|---|---|---|---|
"""


def vllm_table(content: dict[str, Any]) -> str:
    """A line for each way to run it and wire."""
    lines = VLLM_HEAD
    for way, name in (("llm", "`LLM`"), ("serve", "`vllm serve`")):
        for wire, found in content[way].items():
            others, far = found["steps_routed_otherwise"], found["max_logprob_difference_of_those"]
            sent, logical = (sum(rank[what] for rank in found["sent"]) for what in ("wire_bytes", "logical_bytes"))
            lines += (
                f"| {name}, `{wire}` | {found['prompts_with_the_same_tokens']} of {found['prompts']} "
                f"| {found['steps_routed_alike']} | {found['max_logprob_difference']:.4f} at most | {others} "
                f"| {'' if far is None else f'{far:.4f} at most'} | {sent:,} for {logical:,} |\n"
            )
    return lines


VLLM_EXACT_HEAD = """\
| with `none`, on 2 data-parallel ranks | steps with the same tokens | their log-probabilities differ by |
|---|---|---|
"""


def vllm_exact_table(content: dict[str, Any], hosts: dict[str, Any]) -> str:
    """A line for each way that was only run with `none`."""
    ways = {
        "compiled": content["compiled"],
        "2 tensor-parallel ranks in each, Qwen3-MoE": content["tensor_parallel"],
        "2 tensor-parallel ranks in each, Mixtral": content["tensor_parallel_mixtral"],
        "on two hosts": hosts,
    }
    lines = (
        f"| {name} | {each['steps']} | {each['max_logprob_difference']:.1e} at most |\n" for name, each in ways.items()
    )
    return VLLM_EXACT_HEAD + "".join(lines)


VLLM_SPEED_HEAD = """\
| | prefill, tokens/s | x one process | decode, tokens/s | x one process |
|---|---|---|---|---|
"""


def vllm_speed_table(content: dict[str, Any]) -> str:
    """A line for each way to run it."""
    lines = VLLM_SPEED_HEAD
    for line in content["figures"]:
        shown = columns(line)
        lines += f"| {shown['way']} | " + " | ".join(
            f"{shown[f'{work} tokens/s']:.0f} | {shown[f'{work} x one process']}" for work in ("prefill", "decode")
        )
        lines += " |\n"
    return lines


def test_the_tables_of_vllm_are_the_recorded_ones() -> None:
    folder, text = ROOT / "benchmarks" / "results" / "cpu", (ROOT / "docs" / "integrations-vllm.md").read_text()
    content, hosts, speed = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("vllm", "vllm_two_hosts", "vllm_throughput")
    )
    for table_text in (vllm_table(content), vllm_exact_table(content, hosts), vllm_speed_table(speed)):
        assert table_text in text, table_text
    assert all(set(found["requests_answered_by_rank"]) == {"0", "1"} for found in content["serve"].values())
    assert set(speed["without_thinwire"].values()) == {"NotImplementedError"}, "which the page says"


FSDP_HEAD = """\
| gradients reduced in | sent as | a host sends | gathers | reduce-scatters | x stock | error of gradients |
|---|---|---|---|---|---|---|
"""


def fsdp_table(content: dict[str, Any]) -> str:
    """A line for each dtype of the reduction and way to send."""
    lines = FSDP_HEAD
    for line in content["figures"]:
        name, ratios = line["sent_as"], line["ratios_to_stock"]
        spread = "" if name == "stock" else f" ({min(ratios):.2f} to {max(ratios):.2f})"
        lines += (
            f"| {line['reduced_in']} | {name if name == 'stock' else f'`{name}`'} | {line['bytes_sent'] / 1e6:.1f} MB "
            f"| {line['gather']['seconds'] * 1e3:.0f} ms | {line['scatter']['seconds'] * 1e3:.0f} ms "
            f"| {line['ratio_to_stock']:.2f}{spread} | {line['error']:.4f} |\n"
        )
    return lines


def test_the_table_of_fsdp_is_the_recorded_one() -> None:
    content = json.loads((ROOT / "benchmarks" / "results" / "cpu" / "fsdp_link.json").read_text())
    assert fsdp_table(content) in (ROOT / "docs" / "integrations-fsdp.md").read_text(), fsdp_table(content)
    assert content["figures"][0]["elements"] * 2 / 1e6 == pytest.approx(16.8, abs=0.05)


DEEP_EP_HEAD = """\
| format | tokens of each rank | `ExpertParallel` | DeepEP's calls | ratio | memory | of DeepEP's calls |
|---|---|---|---|---|---|---|
"""


def deep_ep_table(content: dict[str, Any]) -> str:
    """A line for each format and number of tokens."""
    return DEEP_EP_HEAD + "".join(
        f"| `{line['wire']}` | {line['tokens']:,} | {line['ms pair']:.2f} ms | {line['ms deep_ep']:.2f} ms "
        f"| {line['ratio']:.2f} | {line['MiB pair']:.0f} MiB | {line['MiB deep_ep']:.0f} MiB |\n"
        for line in content["figures"]
    )


def test_the_table_of_deep_ep_is_the_recorded_one() -> None:
    content = json.loads((ROOT / "benchmarks" / "results" / "cpu" / "deep_ep.json").read_text())
    assert deep_ep_table(content) in (ROOT / "docs" / "integrations-deep-ep.md").read_text(), deep_ep_table(content)
