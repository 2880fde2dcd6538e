"""Element codes, from hand-typed tables, in float64.

Rounding works on the table of values and its midpoints. Both are exact in float64, so a tie is an
equality and never a matter of tolerance. `ml_dtypes` is the second opinion (`*_ml_dtypes`); it
knows nothing of the table, and the table nothing of it.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

# The eight magnitudes of codes 0..7; bit 3 is the sign.
E2M1_MAGNITUDES: F64 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

# The 127 finite magnitudes of codes 0x00..0x7E, a row for each exponent field; 0x7F is NaN, bit 7
# the sign. Each row: the value at mantissa 0 and the step to the next mantissa.
_E4M3_ROWS: tuple[tuple[float, float], ...] = (
    (0.0, 0.001953125),
    (0.015625, 0.001953125),
    (0.03125, 0.00390625),
    (0.0625, 0.0078125),
    (0.125, 0.015625),
    (0.25, 0.03125),
    (0.5, 0.0625),
    (1.0, 0.125),
    (2.0, 0.25),
    (4.0, 0.5),
    (8.0, 1.0),
    (16.0, 2.0),
    (32.0, 4.0),
    (64.0, 8.0),
    (128.0, 16.0),
    (256.0, 32.0),
)
E4M3_MAGNITUDES: F64 = np.array(
    [low + i * step for low, step in _E4M3_ROWS for i in range(8)][:127]
)

# UE8M0: code c is 2^(c - 127), 0xFF is NaN. No sign, no zero.
UE8M0_VALUES: F64 = np.array([2.0 ** (code - 127) for code in range(255)])


def _nearest(magnitudes: F64, x: F64) -> NDArray[np.intp]:
    """Index of the magnitude nearest to |x|; a tie goes to the even index; saturates."""
    a = np.abs(x)
    midpoints = (magnitudes[:-1] + magnitudes[1:]) / 2
    below = np.searchsorted(midpoints, a, side="left")  # a tie counts as below the midpoint
    tie = np.isin(a, midpoints) & (below % 2 == 1)
    return np.asarray(below + tie, dtype=np.intp)


def _round(magnitudes: F64, x: object) -> F64:
    with np.errstate(invalid="ignore"):  # widening a signalling NaN
        x64 = np.asarray(x, dtype=np.float64)
    nan = np.isnan(x64)
    value = np.copysign(magnitudes[_nearest(magnitudes, np.where(nan, 0.0, x64))], x64)
    return np.asarray(np.where(nan, np.nan, value), dtype=np.float64)


def round_e2m1(x: object) -> F64:
    """Nearest E2M1 value of each element. NaN stays, Inf saturates, -0 keeps its sign."""
    return _round(E2M1_MAGNITUDES, x)


def round_e4m3(x: object) -> F64:
    """Nearest E4M3 (fn) value of each element. NaN stays, Inf saturates, -0 keeps its sign."""
    return _round(E4M3_MAGNITUDES, x)


def round_ue8m0(x: object) -> F64:
    """Smallest power of two that is not below x, for 0 < x <= 2^127."""
    x64 = np.asarray(x, dtype=np.float64)
    if not np.all((x64 > 0) & (x64 <= UE8M0_VALUES[-1])):
        raise ValueError("UE8M0 is defined for 0 < x <= 2^127")
    return np.asarray(UE8M0_VALUES[np.searchsorted(UE8M0_VALUES, x64, side="left")])


def encode_e2m1(x: object) -> U8:
    """4-bit codes. NaN has no code and is refused."""
    x64 = np.asarray(x, dtype=np.float64)
    if np.isnan(x64).any():
        raise ValueError("E2M1 has no NaN")
    return np.asarray(_nearest(E2M1_MAGNITUDES, x64) | (np.signbit(x64) * 8), dtype=np.uint8)


def encode_e4m3(x: object) -> U8:
    """8-bit codes. NaN is 0x7F, whatever its sign bit."""
    x64 = np.asarray(x, dtype=np.float64)
    nan = np.isnan(x64)
    code = _nearest(E4M3_MAGNITUDES, np.where(nan, 0.0, x64)) | (np.signbit(x64) * 128)
    return np.asarray(np.where(nan, 0x7F, code), dtype=np.uint8)


def encode_ue8m0(x: object) -> U8:
    """8-bit codes of the values `round_ue8m0` returns."""
    return np.asarray(np.searchsorted(UE8M0_VALUES, round_ue8m0(x)), dtype=np.uint8)


def decode_e2m1(codes: object) -> F64:
    code = np.asarray(codes, dtype=np.int64)
    return np.asarray(np.where(code & 8, -1.0, 1.0) * E2M1_MAGNITUDES[code & 7])


def decode_e4m3(codes: object) -> F64:
    code = np.asarray(codes, dtype=np.int64)
    table = np.append(E4M3_MAGNITUDES, np.nan)
    return np.asarray(np.where(code & 128, -1.0, 1.0) * table[code & 127])


def decode_ue8m0(codes: object) -> F64:
    return np.asarray(np.append(UE8M0_VALUES, np.nan)[np.asarray(codes, dtype=np.int64)])


# What each ml_dtypes type saturates at; its own overflow rule (NaN for E4M3) is not ours.
_ML_DTYPES = {
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0),
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
}


def round_ml_dtypes(x: object, name: str) -> F64:
    """Second opinion: clamp, cast by ml_dtypes, cast back. `name` is "e2m1" or "e4m3".

    The input must be exact in float32; ml_dtypes rounds that once.
    """
    x32 = np.asarray(x, dtype=np.float32)
    dtype, largest = _ML_DTYPES[name]
    nan = np.isnan(x32)
    cast = np.clip(np.where(nan, np.float32(0), x32), -largest, largest).astype(dtype)
    return np.asarray(np.where(nan, np.nan, cast.astype(np.float64)))


def encode_ml_dtypes(x: object, name: str) -> U8:
    """Second opinion on codes; NaN is reported as 0x7F for E4M3 and refused for E2M1."""
    x32 = np.asarray(x, dtype=np.float32)
    dtype, largest = _ML_DTYPES[name]
    nan = np.isnan(x32)
    if name == "e2m1" and nan.any():
        raise ValueError("E2M1 has no NaN")
    cast = np.clip(np.where(nan, np.float32(0), x32), -largest, largest).astype(dtype)
    return np.asarray(np.where(nan, np.uint8(0x7F), cast.view(np.uint8)), dtype=np.uint8)
