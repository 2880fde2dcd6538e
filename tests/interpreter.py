"""Triton's interpreter with less of the time that it spends beside what a kernel computes."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def shorten() -> None:
    """Do once what the interpreter of this process does again and again; call this once."""
    _patch_once()
    of_scalar = functools.cache(interpreter._get_np_dtype)

    def numpy_dtype(dtype: tl.dtype) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        # Pointers have no hash, and one dtype.
        return of_scalar(tl.uint64 if isinstance(scalar, tl.pointer_type) else scalar)

    interpreter._get_np_dtype = numpy_dtype


def _patch_once() -> None:
    """Have functions that a kernel calls patch `triton.language` once a kernel, not at each call.

    The interpreter replaces the functions of the language before a kernel runs and puts them back
    afterwards. It replaces them again in every call of a function that the kernel makes, `tl.sum`
    among them, and puts nothing back there: what such a call finds are replacements already.
    Looking for what there is to replace takes longer than most calls do.
    """
    patch_lang, run_grid = interpreter._patch_lang, interpreter.GridExecutor.__call__
    # Modules that were patched since the running kernel began; None where none runs.
    patched: list[ModuleType] | None = None

    @functools.cache
    def used(function: Any) -> list[ModuleType]:
        values = function.__globals__.values()
        return [lang for lang in (tl, tl.core) if any(value is lang for value in values)]

    def patch(function: Any) -> Any:
        if patched is None:
            return patch_lang(function)
        if patched and all(lang in patched for lang in used(function)):
            return None
        patched.extend(used(function))
        return patch_lang(function)

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal patched
        patched = []
        try:
            run_grid(self, *args, **kwargs)
        finally:
            patched = None

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch, run
