"""numba if it is installed; otherwise stand-ins that let these files import and say what is missing when called.

Everything in the library imports without its optional parts. Calling a function of this folder without numba raises
`thinwire.errors.TransportUnavailable`, which names the extra to install.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial, wraps
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from thinwire import first_run, wire
from thinwire.errors import TransportUnavailable
from thinwire.triton_kernels import leg_layout, round_layout, signal, silu
from thinwire.triton_kernels.cpu import HAS_NUMBA


def _hash_sources() -> int:
    digest = hashlib.sha256()
    # Their words are compiled into kernels too.
    words = [Path(module.__file__) for module in (signal, round_layout, leg_layout, silu, wire) if module.__file__]
    for path in [*sorted(Path(__file__).parent.rglob("*.py")), *words]:
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:6], "little")


_LLVM_WITH_BFLOAT16 = 16  # before that, intrinsics took integers in its place

#: Identifies the source text of this folder, `ir` included, of the layouts and wire formats. numba's cache looks at the
#: file of the function that it caches and not at the files of what it calls, so without this, as a part of the
#: cache's key, kernels would go on running an intrinsic's older version.
FINGERPRINT = _hash_sources()

if HAS_NUMBA:
    with first_run.working("loading numba"):
        from llvmlite import binding, ir
        from numba import njit, types
        from numba.core import cgutils
        from numba.core.caching import FunctionCache, NullCache
        from numba.core.compiler_lock import global_compiler_lock
        from numba.core.registry import cpu_target
        from numba.extending import intrinsic

    # error_model="numpy": a division checks nothing. fastmath stays off: no operation may be fused or reordered, or
    # results would differ from the other backends in the last bit.
    # inline="always": a function that kernels call would otherwise be compiled once for itself as well.
    device = njit(nogil=True, error_model="numpy", inline="always")

    #: What kernels are for, where that is not the name of their file.
    _PURPOSES = {
        "codec": "quantisation", "pack": "quantisation", "sums": "sums of quantised rows",
        "pull": "all_to_all_v and the collectives", "lines": "waits for peers",
    }  # fmt: skip

    class _SharedCache(NullCache):
        """numba's cache on disk of an entry point. Of the ranks that find nothing there, one compiles; others load.

        There may be no folder for it; or one that becomes full, another user's, or goes, while the program runs: then
        kernels are compiled and not kept.
        """

        def __init__(self, function: Any) -> None:
            file = (function.__module__ or "").rpartition(".")[2]
            self._name, self._what = function.__name__, f"a kernel for {_PURPOSES.get(file, file)}"
            self._files: FunctionCache | None = None
            with suppress(RuntimeError):  # neither the source's folder nor the user's cache folder can be written
                self._files = FunctionCache(function)
            self._why_not = "" if self._files else "no folder for them can be written"

        @property
        def cache_path(self) -> Any:
            return self._files and self._files.cache_path

        def load_overload(self, signature: Any, target_context: Any) -> Any:
            found = self._try("load_overload", signature, target_context)
            if found is None:
                self.turn.enter_context(first_run.turn(self._name, self.cache_path, self._what))
                found = self._try("load_overload", signature, target_context)
            if found is None:
                self.turn.enter_context(first_run.compiling(self._what, self._why_not))
            return found

        def save_overload(self, signature: Any, data: Any) -> None:
            self._try("save_overload", signature, data)

        def _try(self, method: str, signature: Any, argument: Any) -> Any:
            try:
                return self._files and getattr(self._files, method)((signature, FINGERPRINT), argument)
            except (OSError, EOFError, UnpicklingError) as error:
                self._why_not = f"{self.cache_path} cannot be used: {error}"
                first_run.tell_unkept(self._why_not)
                return None

        def compile(self, dispatcher: Any, signature: Any) -> Any:
            """`dispatcher.compile`, which loads, or else compiles and saves: then it is another rank's turn."""
            # The lock is numba's: else threads would share a turn.
            with first_run.working(f"loading {self._what}"), global_compiler_lock, ExitStack() as self.turn:
                return type(dispatcher).compile(dispatcher, signature)

    def kernel(function: Callable[..., Any]) -> Any:
        """Compiles an entry point, cached on disk: ranks are processes, and all of them need the same code."""
        cache = _SharedCache(function)
        compiled = device(function) if cache.cache_path is None else njit(nogil=True, error_model="numpy")(function)
        compiled._cache, compiled.compile = cache, partial(cache.compile, compiled)
        return compiled

    def emits(result: str, **others: str) -> Callable[[Any], Any]:
        """An intrinsic out of `(builder, *values)`, which writes the IR. Arguments are int64, but for `others`."""

        def decorate(write: Any) -> Any:
            names = [*inspect.signature(write).parameters][1:]

            @wraps(write)
            def typed(typing_context, *operands):
                def codegen(context, builder, signature, values):
                    value = write(builder, *values)
                    return context.get_dummy_value() if value is None else value

                arguments = [getattr(types, others.get(name, "int64")) for name in names]
                return getattr(types, result)(*arguments), codegen

            return intrinsic(typed)

        return decorate

    #: LLVM's type bfloat, for which llvmlite has none.
    BFloat16: Any = type("BFloat16", (ir.Type,), {"_to_string": lambda self: "bfloat"})

    def converts_halves() -> bool:
        """Whether the machine converts float16 itself. Where it does not, LLVM calls functions that numba lacks."""
        triple, features = _target()
        return "+f16c" in features if triple.startswith(("x86_64", "i686")) else triple.startswith(("aarch64", "arm64"))

    def rounds_pairs_to_bfloat16() -> bool:
        """Whether it rounds two vectors of float32 to one of bfloat16, in LLVM by a name that `ir/vectors.py` knows."""
        return "+avx512bf16" in _target()[1] and binding.llvm_version_info[0] >= _LLVM_WITH_BFLOAT16

    def gathers_bytes() -> bool:
        """Whether it gathers any 64 bytes out of two vectors in one instruction."""
        return "+avx512vbmi" in _target()[1]

    def _target() -> tuple[str, list[str]]:
        """The machine that kernels are compiled for: its triple, and features as +name or -name."""
        triple, _, features = cpu_target.target_context.codegen().magic_tuple()
        return triple, features.split(",")

else:

    def device(function: Callable[..., Any]) -> Any:
        """A function that says what is missing."""

        def unavailable(*args: object, **kwargs: object) -> Any:
            raise TransportUnavailable(f"{function.__name__} needs numba: pip install numba")

        return unavailable

    kernel = device

    def intrinsic(function: Any = None, **options: object) -> Any:
        """Stands in for numba's, with its options."""
        return device if function is None else device(function)

    def emits(result: str, **others: str) -> Callable[[Any], Any]:
        """Makes a function that says what is missing."""
        return device

    def converts_halves() -> bool:
        """Never asked: nothing compiles."""
        return False

    rounds_pairs_to_bfloat16 = gathers_bytes = converts_halves
    ir = types = cgutils = BFloat16 = None
