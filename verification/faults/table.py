"""The table of faults in docs/reliability.md, as last run: `python -m verification.faults.table` writes it anew."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from tests.helpers.proofs import PAGE, ROOT, between, by_commit
from verification.faults.rules import FAULTS, OPERATIONS, TRANSPORTS

RUN = ROOT / "benchmarks" / "results" / "cpu" / "faults.json"
BEGIN, END = "<!-- faults: begin, made by python -m verification.faults.table -->\n", "<!-- faults: end -->\n"


def table(ran: dict[str, Any]) -> str:
    """Markdown: a row for each fault and what must come of it, with how many runs held on each transport."""
    lines = [f"| the fault | must come of it | {' | '.join(TRANSPORTS)} |", "|---" * (2 + len(TRANSPORTS)) + "|"]
    for fault in FAULTS:
        of_fault = [cell for cell in ran["cells"] if cell["fault"] == fault]
        for outcome in dict.fromkeys(cell["expected"] for cell in of_fault):
            found = [cell for cell in of_fault if cell["expected"] == outcome]
            operations = [name for name in OPERATIONS if any(cell["operation"] == name for cell in found)]
            every = {cell["operation"] for cell in of_fault}
            where = "" if {*operations} == every else f" ({', '.join(operations)})"
            counted = [_counted([cell for cell in found if cell["transport"] == name]) for name in TRANSPORTS]
            lines.append(f"| {fault}{where} | {outcome} | {' | '.join(counted)} |")
    held, runs, late, late_held = (
        sum(cell[key] for cell in ran["cells"]) for key in ("held", "runs", "late", "late_held")
    )
    judged = sum(run["runs"] for run in ran["runs"]) - runs - late
    counts = {cell["runs"] for cell in ran["cells"]}
    times = " to ".join(map(str, dict.fromkeys((min(counts), max(counts)))))
    slowest = max(cell["slowest"] for cell in ran["cells"])
    lines += [
        "",
        _paragraph(
            f"{len(ran['cells'])} of the {ran['cells_in_all']} possible cells were run, {times} times each; {held} "
            f"of {runs} runs held. {late} more do not count, as the machine kept a thread waiting for over "
            f"{ran['most_late']:g} s; of those {late_held} held. {judged} more were judged by rules that have changed. "
            f"{by_commit(ran, 'runs')} The slowest call of a remaining rank took {slowest:.1f} s."
        ),
        "",
        *(
            _paragraph(f"Known: {reason}.")
            for reason in dict.fromkeys(cell["known_defect"] for cell in ran["cells"])
            if reason
        ),
        "",
        "Cells that are not possible:",
        "",
        *(f"- {number} cells: {reason}." for reason, number in ran["left_out"].items()),
    ]
    return "\n".join(lines) + "\n"


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 120)


def _counted(cells: list[dict[str, Any]]) -> str:
    if not cells:
        return "-"
    known = " (known)" if any(cell["known_defect"] for cell in cells) else ""
    return f"{sum(cell['held'] for cell in cells)} of {sum(cell['runs'] for cell in cells)}{known}"


def page(text: str, ran: dict[str, Any]) -> str:
    """The page with the table of this run between its markers."""
    return between(text, BEGIN, END, table(ran))


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(PAGE.read_text(), json.loads(RUN.read_text())))


if __name__ == "__main__":
    main()
