"""Attention in float64 over operands quantized by `blocks`.

Shapes: q [B, H, Sq, D], k [B, Hk, Skv, D], v [B, Hk, Skv, Dv], H a multiple of Hk (1 for a latent).
`visible` [B, 1 or H, Sq, Skv] says which key a query may attend to (before sparsity); `present`
[B, Skv] which key slots hold a token at all. Query i of Sq sits at position offset + i, the offset
being Skv - Sq unless given.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from . import blocks

F64 = NDArray[np.float64]
Bool = NDArray[np.bool_]
LOG2_E = 1.4426950408889634  # log2(e)


@dataclasses.dataclass(frozen=True)
class Operand:
    """How one operand is quantized: a format and the amax of each segment.

    One amax for several segments means one global scale, blocks that end at the borders. As many
    amax as segments means one global scale each (latent and rope part of the absorbed form).
    """

    fmt: str = "none"
    amax: tuple[float, ...] = (1.0,)
    segments: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Sparsity:
    n: int
    m: int
    sink_tokens: int = 0
    recent_tokens: int = 64


@dataclasses.dataclass(frozen=True)
class Result:
    """out [B, H, Sq, Dv], lse [B, H, Sq] (natural log), and what led there.

    `scores` are natural-log units, -inf where not attended; `p` is 2^(score log2 e - M), before
    quantization, `p_quantized` after; `reference` is the integer M of each row (0 for an empty
    one); `v` is the quantized V, zero where no token is present.
    """

    out: F64
    lse: F64
    scores: F64
    p: F64
    p_quantized: F64
    reference: F64
    v: F64


def quantize_features(x: object, how: Operand) -> F64:
    """Q or K: blocks along the last axis."""
    x32 = np.asarray(x, dtype=np.float32)
    if len(how.amax) == 1:
        return blocks.quantize(x32, how.fmt, how.amax[0], segments=how.segments).values.astype(
            np.float64
        )
    if how.segments is None or len(how.segments) != len(how.amax):
        raise ValueError("one amax for each segment")
    parts: list[F64] = []
    start = 0
    for width, amax in zip(how.segments, how.amax, strict=True):
        part = blocks.quantize(x32[..., start : start + width], how.fmt, amax)
        parts.append(part.values.astype(np.float64))
        start += width
    return np.concatenate(parts, axis=-1)


def quantize_tokens(v: object, how: Operand, present: Bool) -> F64:
    """V: blocks along the token axis at absolute positions; absent slots are zero, unread."""
    v32 = np.asarray(v, dtype=np.float32)
    v32 = np.where(present[:, None, :, None], v32, np.float32(0))
    return blocks.quantize(v32, how.fmt, how.amax[0], axis=-2).values.astype(np.float64)


def visibility(offsets: Sequence[int], queries: int, *, present: Bool, causal: bool) -> Bool:
    """[B, 1, Sq, Skv]; `offsets` are the positions of query 0, one a sequence."""
    batch, keys = present.shape
    seen = np.zeros((batch, 1, queries, keys), dtype=bool)
    for b in range(batch):
        for i in range(queries):
            last = offsets[b] + i if causal else keys - 1
            seen[b, 0, i, : max(last + 1, 0)] = True
    return seen & present[:, None, None, :]


def dense_keys(
    offsets: Sequence[int], queries: int, keys: int, sink_tokens: int, recent_tokens: int
) -> Bool:
    """[B, 1, Sq, Skv]: the first keys, and keys with 0 <= q_pos - k_pos < recent_tokens."""
    dense = np.zeros((len(offsets), 1, queries, keys), dtype=bool)
    for b, offset in enumerate(offsets):
        for i in range(queries):
            first = max(offset + i - recent_tokens + 1, 0)
            dense[b, 0, i, first : max(offset + i + 1, 0)] = True
    dense[..., :sink_tokens] = True
    return dense


def nm_keep(scores: F64, visible: Bool, n: int, m: int, dense: Bool | None = None) -> Bool:
    """Which of the visible keys survive: a plain loop over rows and groups.

    The n largest visible scores of each group, the lower index first among equals; dense keys
    compete like any other and, if visible, stay in any case.
    """
    keys = scores.shape[-1]
    visible = np.broadcast_to(visible, scores.shape)
    flat, seen = scores.reshape(-1, keys), visible.reshape(-1, keys)
    kept = np.zeros(flat.shape, dtype=bool)
    for row in range(flat.shape[0]):
        for start in range(0, keys, m):
            members = [j for j in range(start, min(start + m, keys)) if seen[row, j]]
            members.sort(key=lambda j: (-flat[row, j], j))
            kept[row, members[:n]] = True
    keep: Bool = kept.reshape(scores.shape)
    if dense is not None:
        keep = keep | (np.broadcast_to(dense, scores.shape) & visible)
    return keep


def raw_scores(q: F64, k: F64, scale: float) -> F64:
    """[B, H, Sq, Skv], heads of k repeated."""
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    return np.asarray(scale * np.einsum("bhqd,bhkd->bhqk", q, k))


def attend(scores: F64, v: F64, p_format: str) -> Result:
    """Softmax with an integer reference, P quantized, times V. -inf scores are not attended."""
    log2_scores = scores * LOG2_E
    top = log2_scores.max(axis=-1, initial=-np.inf)
    empty = np.isneginf(top)
    reference = np.where(empty, 0.0, np.ceil(np.where(empty, 0.0, top)))
    p = np.exp2(log2_scores - reference[..., None])
    denominator = p.sum(axis=-1)
    p_quantized = blocks.quantize_p(p, p_format).values.astype(np.float64)
    if p_format == "none":
        p_quantized = p
    v = np.repeat(v, scores.shape[1] // v.shape[1], axis=1)
    with np.errstate(divide="ignore"):
        out = np.einsum("bhqk,bhkd->bhqd", p_quantized, v)
        out = out / np.where(empty, 1.0, denominator)[..., None]
        lse = np.log(denominator) + reference * math.log(2.0)
    return Result(out, np.where(empty, -np.inf, lse), scores, p, p_quantized, reference, v)


def attention(
    q: object,
    k: object,
    v: object,
    *,
    scale: float,
    present: Bool | None = None,
    visible: Bool | None = None,
    bias: F64 | None = None,
    causal: bool = False,
    offsets: Sequence[int] | None = None,
    q_how: Operand = Operand(),
    k_how: Operand = Operand(),
    v_how: Operand = Operand(),
    p_format: str = "none",
    sparsity: Sparsity | None = None,
) -> Result:
    """One pass. The absorbed form is the same with two segments and two amax in `q_how`, `k_how`.

    Two dots, each with its own global scale, added: in float64 that is one dot over both parts.
    """
    q_values, k_raw = quantize_features(q, q_how), np.asarray(k, dtype=np.float32)
    batch, keys = k_raw.shape[0], k_raw.shape[2]
    if present is None:
        present = np.ones((batch, keys), dtype=bool)
    k_raw = np.where(present[:, None, :, None], k_raw, np.float32(0))
    scores = raw_scores(q_values, quantize_features(k_raw, k_how), scale)
    if bias is not None:
        scores = scores + bias
    queries = scores.shape[2]
    offsets = [keys - queries] * batch if offsets is None else offsets
    seen = visibility(offsets, queries, present=present, causal=causal)
    if visible is not None:
        seen = seen & visible
    seen = np.broadcast_to(seen, scores.shape)
    if sparsity is not None:
        dense = dense_keys(offsets, queries, keys, sparsity.sink_tokens, sparsity.recent_tokens)
        seen = nm_keep(scores, seen, sparsity.n, sparsity.m, dense)
    return attend(np.where(seen, scores, -np.inf), quantize_tokens(v, v_how, present), p_format)


def attend_running_maximum(scores: F64, v: F64, p_format: str, tile: int) -> tuple[F64, F64]:
    """Online softmax over tiles of keys, M the maximum so far (not rounded): a plain loop."""
    batch, heads, queries, keys = scores.shape
    log2_scores = scores * LOG2_E
    v = np.repeat(v, heads // v.shape[1], axis=1)
    top = np.full((batch, heads, queries), -np.inf)
    total = np.zeros((batch, heads, queries))
    out = np.zeros((batch, heads, queries, v.shape[-1]))
    for start in range(0, keys, tile):
        part = log2_scores[..., start : start + tile]
        new_top = np.maximum(top, part.max(axis=-1))
        finite = np.where(np.isneginf(new_top), 0.0, new_top)
        shrink = np.where(np.isneginf(top), 0.0, np.exp2(top - finite))
        p = np.exp2(part - finite[..., None])
        p_quantized = p if p_format == "none" else blocks.quantize_p(p, p_format).values
        total = total * shrink + p.sum(axis=-1)
        out = out * shrink[..., None] + np.einsum(
            "bhqk,bhkd->bhqd", p_quantized, v[..., start : start + tile, :]
        )
        top = new_top
    empty = total == 0
    with np.errstate(divide="ignore"):
        lse = np.where(empty, -np.inf, np.log(total) + top * math.log(2.0))
    return out / np.where(empty, 1.0, total)[..., None], lse


def merge(parts: Sequence[tuple[F64, F64]]) -> tuple[F64, F64]:
    """Combine (out, lse) of disjoint key sets; an empty part (lse -inf) has no weight."""
    lses = np.stack([lse for _, lse in parts])
    top = lses.max(axis=0)
    finite_top = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(lses - finite_top)
    total = weights.sum(axis=0)
    outs = np.stack([out for out, _ in parts])
    out = (weights[..., None] * outs).sum(axis=0) / np.where(total == 0, 1.0, total)[..., None]
    with np.errstate(divide="ignore"):
        lse = np.log(total) + finite_top
    return out, lse


@dataclasses.dataclass(frozen=True)
class Bound:
    """Per-element error allowed against `Result.out` and `Result.lse`, and its ingredients.

    `p_lower`, `p_upper` enclose every quantized P that float32 rounding of p can lead to; where
    they agree the decision is forced. `open_decisions` counts the others among `elements`.
    """

    out: F64
    lse: F64
    p_lower: F64
    p_upper: F64
    open_decisions: int
    elements: int


def _granularity(x: F64) -> F64:
    """Largest power of two that divides every value of each row (last axis)."""
    mantissa, exponent = np.frexp(x)
    integer = np.asarray(mantissa * 2.0**53, dtype=np.int64)
    lowest = (integer & -integer).astype(np.float64) * np.exp2(exponent - 53.0)
    return np.asarray(np.where(x == 0, np.inf, lowest).min(axis=-1))


def float32_bound(result: Result, q: F64, k: F64, scale: float, p_format: str) -> Bound:
    """What float32 arithmetic may change, for q and k already quantized.

    With u = 2^-24 and gamma(n) = n u / (1 - n u), any order of summation:

    * a score is off by at most e = gamma(D + 8) scale sum|q_d||k_d|: the dot's rounding (D), the
      rounding of q' and k' to float32 and of the scales (8). Where all terms of the dot are
      multiples of one power of two and sum|q_d||k_d| is less than 2^24 of it, every partial sum is
      a float32 and the dot has no error at all: then e = 2 u scale |dot|, for the scaling;
    * log2 units add 3 u (|score| log2 e + |M|) for the constant, the product and the subtraction,
      and exp2 itself 4 u; so p is off by the factor 1 +- d with d = expm1(e + ...);
    * where that interval forces the decision on p, p' differs only by its own three roundings;
      where not, by the distance to the farther end of `blocks.p_range`;
    * P V: gamma(n + 4) sum p'|v|; denominator: gamma(n) plus the largest d in the row.
    """
    u = 2.0**-24

    def gamma(count: int) -> float:
        return count * u / (1 - count * u)

    keys = result.scores.shape[-1]
    seen = np.isfinite(result.scores)
    scores = np.where(seen, result.scores, 0.0)
    size = raw_scores(np.abs(q), np.abs(k), abs(scale))
    unit = (
        _granularity(q)[..., :, None]
        * _granularity(np.repeat(k, q.shape[1] // k.shape[1], axis=1))[..., None, :]
    )
    exact = size < 2.0**24 * unit * abs(scale)
    error = np.where(exact, 2 * u * np.abs(scores), gamma(q.shape[-1] + 8) * size)
    error = error + 3 * u * (np.abs(scores) + np.abs(result.reference[..., None])) + 4 * u
    d = np.where(seen, np.expm1(error), 0.0)
    # Two more roundings between p and its code: the product 2688 p, the quotient.
    lower, upper = blocks.p_range(result.p, np.where(seen, d + 4 * u, 0.0), p_format)
    open_decisions = 0 if p_format == "none" else int((lower != upper).sum())
    deviation = np.maximum(upper - result.p_quantized, result.p_quantized - lower)
    deviation = np.maximum(deviation, 0.0) + 3 * u * result.p_quantized
    denominator = result.p.sum(axis=-1)
    denominator = np.where(denominator == 0, 1.0, denominator)
    worst = gamma(keys) + d.max(axis=-1, initial=0.0)
    mass = np.einsum("bhqk,bhkd->bhqd", np.maximum(result.p_quantized, upper), np.abs(result.v))
    moved = np.einsum("bhqk,bhkd->bhqd", deviation, np.abs(result.v))
    out = (moved + (gamma(keys + 8) + 2 * worst[..., None]) * mass) / denominator[..., None]
    with np.errstate(invalid="ignore"):
        lse_size = np.where(np.isneginf(result.lse), 0.0, np.abs(result.lse))
    lse = worst + 4 * u * (lse_size + np.abs(result.reference)) + 4 * u
    return Bound(out, lse, lower, upper, open_decisions, int(seen.sum()))


def nm_margin(scores: F64, visible: Bool, n: int, m: int) -> float:
    """Smallest gap between the n-th and the next score in any group: how safe the choice is."""
    keys = scores.shape[-1]
    flat = scores.reshape(-1, keys)
    seen = np.broadcast_to(visible, scores.shape).reshape(-1, keys)
    gap = math.inf
    for row in range(flat.shape[0]):
        for start in range(0, keys, m):
            group = flat[row, start : start + m][seen[row, start : start + m]]
            if group.size > n:
                ordered = np.sort(group)[::-1]
                gap = min(gap, float(ordered[n - 1] - ordered[n]))
    return gap


def reference_margin(result: Result) -> float:
    """Smallest distance of a row's largest log2 score from an integer: how safe M is."""
    top = (result.scores * LOG2_E).max(axis=-1)
    top = top[np.isfinite(top)]
    return float(np.abs(top - np.round(top)).min()) if top.size else math.inf
