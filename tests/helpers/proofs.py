"""What docs/reliability.md says of corruption and hostile bytes: `python -m tests.helpers.proofs` writes it anew."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

__all__ = ["between", "by_commit", "section"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "benchmarks" / "results" / "cpu"
BEGIN, END = "<!-- proofs: begin, made by python -m tests.helpers.proofs -->\n", "<!-- proofs: end -->\n"


def between(text: str, begin: str, end: str, content: str) -> str:
    """A page with this content between two markers."""
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{content}\n{end}{after}"


def section() -> str:
    """Markdown: what was run, what came of it, and of which commits it was."""
    names = ("cuts", "interrupts", "programs", "fuzz", "fuzz_parsers")
    cuts, interrupts, programs, words, parsers = (json.loads((RESULTS / f"{name}.json").read_text()) for name in names)
    ends = Counter[str]()
    for cell in cuts["cells"]:
        ends.update(cell["verdicts"])
    of = interrupts["outcomes"]
    defects = sum(len(target["defects"]) + target["ended_badly"] for target in parsers["targets"].values())
    executions = sum(target["executions"] for target in parsers["targets"].values())
    seconds = sum(target["seconds"] for target in parsers["targets"].values())
    items = (
        f"Links between three ranks in network namespaces that were cut for 0.95 to 4 timeouts, of one rank or between "
        f"two, in one direction or both: {sum(ends.values())} runs of {len(cuts['cells'])} cells. Three ranks went on "
        f"in {ends['three go on']}, two in {ends['two go on']}, and nobody noticed in {ends['nobody noticed']}; "
        f"{cuts['wrong']} had another outcome. {by_commit(cuts, 'runs')}",
        f"One or two interrupts at random places of a call, caught, and the same call made again: "
        f"{interrupts['trials']} trials. The call was completed in {of.get('right', 0)}; the communicator ended at the "
        f"rank, and its peer named it, in {of.get('ended', 0)}; all ranks got another error in {of.get('told', 0)}. "
        f"{of.get('wrong', 0)} gave a wrong result.",
        f"Random programs of all calls, with backward of all and of parts, interrupts, and rounds that a rank leaves "
        f"open or skips: {programs['programs']} programs, {sum(programs['calls'].values())} calls on rank 0; "
        f"{len(programs['failed'])} differed from plain torch, or gave another error than is documented.",
        f"Words that no peer writes, in the memory of direct calls: {words['rounds']} cases, of which "
        f"{words['returned']} returned and {words['raised_named_errors']} raised an error of thinwire's; "
        f"{len(words['failures'])} did anything else. {by_commit(words, 'rounds')}",
        f"Hostile bytes and text, for {len(parsers['targets'])} parsers: {executions} inputs in "
        f"{seconds / 60:.0f} minutes, which showed {defects} defects. {by_commit(parsers, 'executions')}",
    )
    return "\n".join(textwrap.fill(f"- {item}", 120, subsequent_indent="  ") for item in items) + "\n"


def by_commit(ran: dict[str, Any], amount: str) -> str:
    """How much was run of which commit, in words."""
    of: dict[str, int] = {}
    for run in ran["runs"]:
        of[run["commit"]] = of.get(run["commit"], 0) + run[amount]
    return f"By commit: {', '.join(f'{commit} {many}' for commit, many in of.items())}."


def main() -> None:
    """Writes the page."""
    PAGE.write_text(between(PAGE.read_text(), BEGIN, END, section()))


if __name__ == "__main__":
    main()
