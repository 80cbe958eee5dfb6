"""Options that commands share: the sizes of an ExpertParallel that does not exist yet."""

from __future__ import annotations

import argparse

from thinwire.errors import ArgumentError

_DTYPES = ("bfloat16", "float16", "float32")


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Options with the names of ExpertParallel's arguments."""
    sizes = parser.add_argument_group("sizes, as ExpertParallel's arguments")
    for name, text in (
        ("--ranks", "ranks of the group"),
        ("--experts", "experts on all ranks together"),
        ("--top-k", "experts of a token"),
        ("--hidden", "elements of a token"),
        ("--max-tokens", "most tokens of a rank, and the number that it dispatches"),
    ):
        sizes.add_argument(name, type=int, required=True, metavar="N", help=text)
    sizes.add_argument("--wire", help="wire format of dispatch (default THINWIRE_WIRE, or int8)")
    sizes.add_argument("--combine-wire", help="wire format of combine (default --wire)")
    sizes.add_argument("--grad-wire", default="none", help="wire format of both legs of backward (none)")
    sizes.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="dtype of tokens (bfloat16)")
    sizes.add_argument("--transport", default="auto", help="auto, direct or staged (auto)")
    sizes.add_argument("--lanes", type=int, default=1, metavar="N", help="rounds open at once (1)")
    sizes.add_argument("--align", type=int, default=1, metavar="N", help="alignment of each expert's rows (1)")
    sizes.add_argument("--invariant", action="store_true", help="the same result on any number of ranks, in more bytes")
    sizes.add_argument("--heap", default="cuda", help="cuda; posix or threads for CPU ranks (cuda)")


def check_sizes(options: argparse.Namespace, *others: str) -> None:
    """Raises ArgumentError for a size below 1; `others`: options that are sizes, too."""
    for name in ("ranks", "experts", "top_k", "hidden", "max_tokens", "lanes", "align", *others):
        value = getattr(options, name)
        if value < 1:
            raise ArgumentError(f"{name} is {value}, expected an int of at least 1")
