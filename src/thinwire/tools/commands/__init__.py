"""The commands of `thinwire`: a module each, with its options and what they must be.

Every module has `SUMMARY` and `DESCRIPTION` for `--help`, `add_arguments(parser)`, and `run(options) -> int`, which
gives the exit status and raises ThinwireError or OSError for input that cannot be used. Options are checked before
anything heavy is imported: these modules import neither torch nor numpy at their top.
"""
