"""What kernels need to know about GPUs beside the one they run on."""

from __future__ import annotations

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
