"""Refuses to build a package without the four rooms; pyproject.toml has all else."""

from pathlib import Path

from setuptools import setup

SOURCE = Path(__file__).parent / "src" / "thinwire"
MISSING = [room for room in ("comm", "fused", "moe", "triton_kernels") if not (SOURCE / room / "__init__.py").is_file()]
if MISSING:
    raise SystemExit(
        f"src/thinwire has no folder {', '.join(MISSING)}: in the repository these are symbolic links to folders "
        "beside src, and this copy has lost them. Clone with `git clone -c core.symlinks=true`, or unpack an archive "
        "with a program that keeps links."
    )
setup()
