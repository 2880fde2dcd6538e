"""Quantize-dequantize of tensors, step by step as numerics.md and rulings 1-3 define it.

Every operation that the definition rounds to float32 is one numpy float32 operation (IEEE, so
correctly rounded); everything else runs in float64, where it is exact:

    NVFP4   g  = f32(amax / 2688), at least the smallest normal float32
            s  = E4M3(min(f32(block_amax / f32(6 g)), 448))
            q  = E2M1(f32(x / f32(s g)))
            x' = f32((q s) g)
    FP8     s  = f32(amax / 448), at least the smallest normal float32
            x' = f32(E4M3(f32(x / s)) s)
    P       r  = f32(2688 / amax), 2688 unless P is calibrated
            s  = E4M3(min(f32(max p f32(r / 6)), 448))
            q  = E2M1(f32(f32(r p) / s))
            p' = f32((q s) f32(1 / r))
    P, FP8  r  = f32(448 / amax);  p' = f32(E4M3(f32(r p)) f32(1 / r))

A block whose s is 0, and a tensor whose amax is 0, becomes zeros; NaN enters no maximum and stays
where it is; Inf saturates. The sign of a zero in a block with s = 0 is left open by the
definition, so `Quantized.sign_free` marks those elements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .codes import round_e2m1, round_e4m3

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

BLOCK = 16
FORMATS = ("nvfp4", "fp8", "none")
SMALLEST_NORMAL = np.float32(2.0**-126)


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Values and the decisions behind them, all in the shape of the input.

    `codes` are element values on the grid (q), `scales` the stored block scales (s; 1 for FP8),
    `global_scale` the float32 factor that the product is multiplied by last.
    """

    values: F32
    codes: F64
    scales: F64
    global_scale: np.float32
    sign_free: Bool


def block_ids(
    width: int, segments: Sequence[int] | None = None, block: int = BLOCK
) -> NDArray[np.int64]:
    """Number of the block of each position; a block ends at a segment's border."""
    ids: list[int] = []
    number = 0
    for segment in [width] if segments is None else segments:
        for start in range(0, segment, block):
            ids += [number] * min(block, segment - start)
            number += 1
    if len(ids) != width:
        raise ValueError(f"segments {segments} do not add up to {width}")
    return np.array(ids, dtype=np.int64)


def block_maxima(x: NDArray[np.floating[Any]], segments: Sequence[int] | None = None) -> Any:
    """Largest magnitude of each element's block along the last axis, NaN left out."""
    magnitude = np.abs(np.where(np.isnan(x), 0, x))
    ids = block_ids(x.shape[-1], segments)
    if not ids.size:
        return magnitude
    starts = np.flatnonzero(np.diff(ids, prepend=-1))
    return np.maximum.reduceat(magnitude, starts, axis=-1)[..., ids]


def _global_scale(amax: float, divisor: float) -> np.float32:
    amax32 = np.float32(amax)
    if not (np.isfinite(amax32) and amax32 >= 0):
        raise ValueError(f"amax must be finite and not negative, not {amax}")
    return max(np.float32(amax32 / np.float32(divisor)), SMALLEST_NORMAL)


def _zeros(x: F32, scales: F64, global_scale: np.float32) -> Quantized:
    values = np.where(np.isnan(x), x, np.float32(0))
    return Quantized(
        values, np.zeros(x.shape), scales, global_scale, np.asarray(~np.isnan(x), dtype=np.bool_)
    )


def quantize(
    x: object,
    fmt: str,
    amax: float,
    *,
    axis: int = -1,
    segments: Sequence[int] | None = None,
) -> Quantized:
    """Quantize-dequantize an operand other than P in blocks along `axis`."""
    moved = np.moveaxis(np.asarray(x, dtype=np.float32), axis, -1)
    with np.errstate(all="ignore"):
        result = _quantize_last(moved, fmt, amax, segments)
    arrays = {
        name: np.moveaxis(getattr(result, name), -1, axis)
        for name in ("values", "codes", "scales", "sign_free")
    }
    return dataclasses.replace(result, **arrays)


def _quantize_last(x: F32, fmt: str, amax: float, segments: Sequence[int] | None) -> Quantized:
    if fmt == "none":
        return Quantized(
            x, x.astype(np.float64), np.ones(x.shape), np.float32(1), np.zeros(x.shape, dtype=bool)
        )
    if fmt == "fp8":
        s = _global_scale(amax, 448.0)
        if amax == 0:
            return _zeros(x, np.ones(x.shape), s)
        codes = round_e4m3(np.divide(x, s, dtype=np.float32))
        values = np.multiply(codes.astype(np.float32), s, dtype=np.float32)
        return Quantized(values, codes, np.ones(x.shape), s, np.zeros(x.shape, dtype=bool))
    if fmt != "nvfp4":
        raise ValueError(f"unknown format {fmt}")
    g = _global_scale(amax, 2688.0)
    if amax == 0:
        return _zeros(x, np.zeros(x.shape), g)
    ratio = np.divide(block_maxima(x, segments), np.float32(6) * g, dtype=np.float32)
    s64 = round_e4m3(np.minimum(ratio, np.float32(448)))
    divisor = np.multiply(s64.astype(np.float32), g, dtype=np.float32)
    return _elements(x, x, s64, divisor, g)


def _elements(x: F32, numerator: F32, s64: F64, divisor: F32, last_factor: np.float32) -> Quantized:
    """q = E2M1(numerator / divisor), x' = (q s) last_factor, zeros where s is 0."""
    alive = s64 > 0
    quotient = np.divide(numerator, np.where(alive, divisor, np.float32(1)), dtype=np.float32)
    codes = np.where(alive | np.isnan(x), round_e2m1(quotient), 0.0)
    # At most six significant bits: exact in float32.
    product = (codes * s64).astype(np.float32)
    values = np.multiply(product, last_factor, dtype=np.float32)
    values = np.where(np.isnan(x), x, values)
    return Quantized(values, codes, s64, last_factor, ~alive & ~np.isnan(x))


def quantize_p(p: object, fmt: str, amax: float = 1.0) -> Quantized:
    """Quantize-dequantize probabilities in blocks of key tokens along the last axis."""
    p32 = np.asarray(p, dtype=np.float32)
    if fmt == "none":
        return _quantize_last(p32, "none", 1.0, None)
    top = {"fp8": np.float32(448), "nvfp4": np.float32(2688)}[fmt]
    with np.errstate(all="ignore"):
        r = np.divide(top, np.float32(amax), dtype=np.float32)
        last_factor = np.divide(np.float32(1), r, dtype=np.float32)
        scaled = np.multiply(p32, r, dtype=np.float32)
        if fmt == "fp8":
            codes = round_e4m3(scaled)
            values = np.multiply(codes.astype(np.float32), last_factor, dtype=np.float32)
            none = np.zeros(p32.shape, dtype=bool)
            return Quantized(values, codes, np.ones(p32.shape), last_factor, none)
        to_scale = np.divide(r, np.float32(6), dtype=np.float32)
        largest = np.multiply(block_maxima(p32), to_scale, dtype=np.float32)
        s64 = round_e4m3(np.minimum(largest, np.float32(448)))
        return _elements(p32, scaled, s64, s64.astype(np.float32), last_factor)


def p_range(p: F64, relative_error: F64 | float, fmt: str) -> tuple[F64, F64]:
    """Smallest and largest p' that any p within `relative_error` may quantize to.

    Every element, and so every block maximum, may be off by the factor (1 +- relative_error).
    Rounding is monotone, so the extremes over all block scales in reach, each with the element at
    both ends of its interval, enclose whatever an implementation with that error can produce.
    Where lower equals upper the decision is forced.
    """
    error = np.broadcast_to(np.asarray(relative_error, dtype=np.float64), p.shape)
    low, high = p * (1 - error), p * (1 + error)
    if fmt == "none":
        return low, high
    if fmt == "fp8":
        return round_e4m3(448 * low) / 448, round_e4m3(448 * high) / 448
    lower, upper = np.full(p.shape, np.inf), np.full(p.shape, -np.inf)
    s_low, s_high = _scale_of(low), _scale_of(high)
    for s in (s_low, s_high):
        safe = np.where(s > 0, s, 1.0)
        for end in (low, high):
            value = np.where(s > 0, round_e2m1(2688 * end / safe) * s / 2688, 0.0)
            lower, upper = np.minimum(lower, value), np.maximum(upper, value)
    # Two scales at most: an error this small cannot reach past a neighbour on the E4M3 grid.
    between = round_e4m3((s_low + s_high) / 2)
    if not np.all((between == s_low) | (between == s_high)):
        raise ValueError("relative_error reaches over more than two block scales")
    return lower, upper


def _scale_of(p: F64) -> F64:
    """Block scale before any float32 rounding, repeated for each element."""
    return round_e4m3(np.minimum(448 * block_maxima(p), 448.0))
