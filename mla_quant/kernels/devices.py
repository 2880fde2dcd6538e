"""What kernels need to know about GPUs beside the one they run on."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from mla_quant.kernels.numerics import INTERPRETED

_KIB = 1024
_SHARED_BYTES = {
    (8, 0): 163 * _KIB,
    (8, 6): 99 * _KIB,
    (8, 7): 163 * _KIB,
    (8, 9): 99 * _KIB,
    (9, 0): 227 * _KIB,
    (10, 0): 227 * _KIB,
    (10, 3): 227 * _KIB,
    (12, 0): 99 * _KIB,
}
_SMALLEST_SHARED_BYTES = 99 * _KIB


def shared_bytes(capability: tuple[int, int]) -> int:
    """Shared memory that one program may use on a GPU, in bytes (CUDA C++ programming guide).

    Args:
        capability: Compute capability. One that is not known counts as the smallest.
    """
    return _SHARED_BYTES.get(capability, _SMALLEST_SHARED_BYTES)


@functools.cache
def hopper_module(name: str, capability: int) -> ModuleType | None:
    """A module of kernels in Gluon for Hopper GPUs, of `mla_quant.kernels`.

    Args:
        name: Of the module.
        capability: Compute capability × 10.

    Returns:
        None on other GPUs, in the interpreter, and where Triton has no Gluon or one that this
        package does not know.
    """
    if INTERPRETED or capability != 90:
        return None
    try:
        return importlib.import_module(f"mla_quant.kernels.{name}")
    except (ImportError, AttributeError):
        return None
