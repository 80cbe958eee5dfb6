"""What cannot be measured is refused in one line, before torch is imported and anything is started."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.tools.bench.options import Settings, sweep
from thinwire.tools.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all_to_al"], "operation all_to_al: accepted are all_to_all_v, all_gather"),
        (["-b", "64Q"], "-b 64Q: a number of bytes is needed"),
        (["-b", "0"], "-b 0: a number of bytes is needed, at least 1"),
        (["-b", "2M", "-e", "1M"], "-b 2M is more than -e 1M"),
        (["-f", "2", "-i", "1K"], "-f 2 and -i 1K were given; expected one of them"),
        (["-i", "0"], "-i 0: a number of bytes is needed, at least 1"),
        (["-b", "1", "-e", "1M", "-i", "1K"], "-i 1K: more than 256 sizes from 1 to 1M; use a larger one"),
        (["-g", "2"], "-g 2: an option of nccl-tests; here it is --ranks N"),
        (["-t", "2"], "-t 2: an option of nccl-tests; here it is --ranks N"),
        (["-d", "float"], "-d float: an option of nccl-tests; here it is --dtype, one of bfloat16, float16, float32"),
        (["-o", "sum"], "-o sum: an option of nccl-tests; here it is no option: every reduction is a sum"),
        (["--plot", "/proc/x"], "--plot /proc/x: No such file or directory; name a path that can be written to"),
        (["--json", "/proc/x"], "--json /proc/x: No such file or directory; name a path that can be written to"),
        (["--json", "/proc/x/y"], "--json /proc/x: No such file or directory; name a path that can be written to"),
        (["-f", "1"], "-f 1: a factor above 1"),
        (["-f", "inf"], "-f inf: a factor above 1 is needed, at most 1e+06"),
        (["-b", "1", "-e", "1T", "-f", "1.0001"], "-f 1.0001: more than 256 sizes from 1 to 1T"),
        (["-e", "9" * 400], "a number of bytes is needed, at least 1 and at most 1024T"),
        (["--link", "9" * 400 + "Gbit"], "400Gbit/s or 900GB/s, and below 1e+18 bytes/s"),
        (["--ranks", "1025"], "--ranks 1025: at most 1024"),
        (["--experts", "65537"], "--experts 65537: at most 65536"),
        (["-n", "0"], "-n 0: at least 1"),
        (["-w", "-1"], "-w -1: at least 0"),
        (["--wire", "int9"], "unknown wire format 'int9'"),
        (["--wire", ","], "--wire ',': at least one is needed"),
        (["--transport", "fast"], "--transport fast: accepted are direct, staged"),
        (["--tokens", "1,x"], "--tokens 1,x: whole numbers are needed"),
        (["--top-k", "9", "--experts", "8"], "--top-k 9: 1 to 8 of 8 experts"),
        (["--routing", "hot:1.5"], "--routing hot:1.5: accepted are uniform, zipf:S"),
        (["--routing", "matrix:nowhere.csv"], "there is no file nowhere.csv"),
        (["--baselines", "group,mine"], "--baselines mine: accepted are all, none, group, mpi"),
        (["--link", "fast"], "--link fast: a rate is needed"),
        (["--ranks", "0"], "--ranks 0: at least 1"),
        (["--timeout", "0"], "--timeout 0: seconds above 0"),
    ],
)
def test_unusable_options_are_one_line_of_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_a_typo_is_found_without_torch() -> None:
    code = "import sys; from thinwire.tools.cli import main; main(['bench', 'typo']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n" and "operation typo" in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1,2,3\n4,5,6\n7,8,9\n", "a matrix of 3 x 3, where 2 ranks need 2 x 2"),
        ("1,-2\n3,4\n", "rows must be numbers of at least 0"),
        ("0,0\n0,0\n", "not all of them 0"),
        ("1,two\n3,4\n", "numbers between commas, or .npy, are needed"),
    ],
)
def test_a_matrix_that_cannot_be_used_is_refused_before_ranks_start(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(content)
    assert main(["bench", "moe", "--ranks", "2", "--routing", f"matrix:{file}"]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_a_launchers_ranks_are_not_overruled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "--ranks", "2"]) == 2
    assert "--ranks 2: torchrun (RANK, WORLD_SIZE) says 1" in capsys.readouterr().err


def test_sizes_grow_to_the_last_one() -> None:
    assert sweep("1", "10", 2) == [1, 2, 4, 8] and sweep("1", "3", 1.1) == [1, 2, 3] and sweep("8", "8", 2) == [8]
    assert sweep("8", "30", increment="10") == [8, 18, 28] and sweep("64K", "1M") == [1 << 16, 1 << 20]


@pytest.mark.parametrize("command", ["bench", "report", "plan"])
def test_help_fits_into_100_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "102")  # argparse leaves two of them free
    with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as printed:
        main([command, "--help"])
    assert max(map(len, printed.getvalue().splitlines())) <= 100


def test_settings_are_refused_wherever_they_come_from() -> None:
    with pytest.raises(ValueError, match="--hidden 0"):
        Settings(hidden=0)
