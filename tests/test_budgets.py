"""Parts of the repository have budgets of lines, and a part above its own is named."""

from __future__ import annotations

from pathlib import Path

from verification.budgets import PACKAGE, PARTS, count_lines, over_budget


def test_a_file_counts_once_and_a_part_above_its_budget_is_named(tmp_path: Path) -> None:
    for folder in PARTS.values():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / "triton_kernels" / "cpu" / "one.py").write_text("a = 1\nb = 2\n")
    (tmp_path / "triton_kernels" / "two.py").write_text("c = 3\n")
    (tmp_path / "comm" / "three.txt").write_text("no Python\n")
    (tmp_path / "src" / "thinwire" / "comm").symlink_to(tmp_path / "triton_kernels")
    counts = count_lines(tmp_path)
    assert {part: lines for part, lines in counts.items() if lines} == {"triton_kernels/cpu": 2, "triton_kernels": 1}
    assert over_budget(counts, counts) == []
    assert over_budget(counts, counts | {"triton_kernels": 0}) == ["triton_kernels has 1 lines, and may have 0"]
    assert over_budget(counts, counts | {"gone": 1}) == ["gone has a budget, and is no part"]


def test_every_room_has_a_part() -> None:
    counts = count_lines()
    assert all(counts[part] > 100 for part in PACKAGE)
