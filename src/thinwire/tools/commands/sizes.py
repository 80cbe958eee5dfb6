"""Options that commands share: the sizes of an ExpertParallel that does not exist yet."""

from __future__ import annotations

import argparse

from thinwire.errors import ArgumentError

_DTYPES = ("bfloat16", "float16", "float32")
#: Experts, experts of a token and elements of a token, from the config.json that is published with each model.
MODELS = {
    "deepseek-v3": {"experts": 256, "top_k": 8, "hidden": 7168},
    "qwen3-30b-a3b": {"experts": 128, "top_k": 8, "hidden": 2048},
    "mixtral-8x7b": {"experts": 8, "top_k": 2, "hidden": 4096},
}


def add_sizes(parser: argparse.ArgumentParser, need_ranks: bool = True) -> None:
    """Options with the names of ExpertParallel's arguments; --ranks may be left to the command."""
    sizes = parser.add_argument_group("sizes, as ExpertParallel's arguments")
    sizes.add_argument(
        "--model",
        metavar="NAME",
        help=f"Take experts, top-k and hidden from this model, but for those that are given: {', '.join(MODELS)}.",
    )
    for name, text, required in (
        ("--ranks", "There are so many ranks in the group.", need_ranks),
        ("--experts", "There are so many experts on all ranks together.", False),
        ("--top-k", "Each token has so many experts.", False),
        ("--hidden", "Each token has so many elements.", False),
        ("--max-tokens", "Each rank has at most so many tokens, and dispatches as many.", True),
    ):
        sizes.add_argument(name, type=int, required=required, metavar="N", help=text)
    sizes.add_argument("--wire", help="Dispatch in this wire format (THINWIRE_WIRE, or int8+h64).")
    sizes.add_argument("--combine-wire", help="Combine in this wire format (--wire).")
    sizes.add_argument("--grad-wire", default="none", help="Send gradients in this wire format, both ways (none).")
    sizes.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="Tokens have this dtype (bfloat16).")
    sizes.add_argument("--transport", default="auto", help="Take this transport: auto, direct or staged (auto).")
    sizes.add_argument("--lanes", type=int, default=1, metavar="N", help="So many rounds are open at once (1).")
    sizes.add_argument("--align", type=int, default=1, metavar="N", help="Align each expert's rows to so many (1).")
    sizes.add_argument(
        "--invariant", action="store_true", help="Give the same result on any number of ranks, in more bytes."
    )
    sizes.add_argument(
        "--heap", default="cuda", help="Take memory from cuda, or, for CPU ranks, posix or threads (cuda)."
    )


def check_sizes(options: argparse.Namespace, *others: str) -> None:
    """Fills in the sizes of the model.

    Args:
        others: options that are sizes, too.

    Raises:
        ArgumentError: an unknown model, a size that is missing, or below 1.
    """
    if options.model is not None and options.model not in MODELS:
        raise ArgumentError(f"model {options.model!r} is not known; accepted: {', '.join(MODELS)}")
    for name, value in MODELS.get(options.model, dict.fromkeys(("experts", "top_k", "hidden"))).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
        if getattr(options, name) is None:
            option = f"--{name.replace('_', '-')}"
            raise ArgumentError(f"{option} is missing; give it, or --model with one of {', '.join(MODELS)}")
    for name in ("ranks", "experts", "top_k", "hidden", "max_tokens", "lanes", "align", *others):
        value = getattr(options, name)
        if value < 1:
            raise ArgumentError(f"{name} is {value}, expected an int of at least 1")
