"""Absorbed MLA decode over a paged latent cache, split along the context, in portable Triton.

One program computes BLOCK_ROWS rows (query tokens × heads of one sequence) over one range of the
context, in tiles of BLOCK_TOKENS tokens at absolute positions. Everything that depends on the
latent's width is done in two feature halves, because that is how side-cache records hold codes.

The order of tokens inside a tile. An accumulator of a matrix unit gives a thread the columns
8i + 2j + e of a row, j being its place among four and e 0 or 1. If columns were tokens in order, a
block of 16 would be spread over threads and its maximum would cost an exchange per element. So
column (((io · INNER + ii) · ACROSS + a) · PAIR + je) holds token (io · ACROSS + a) · 16 +
((je // 2) · INNER + ii) · 2 + je % 2 of the tile, PAIR being 16 // INNER: `a` counts threads and
warps, the rest lies within a thread as far as INNER allows. Rows of K and V are read in this order,
which costs nothing, and no result depends on it beyond the order of a sum.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_quant.errors import ConfigError
from mla_quant.formats import FORMATS, NVFP4
from mla_quant.kernels.devices import shared_bytes
from mla_quant.kernels.numerics import (
    BLOCK,
    E2M1_MAX,
    E4M3_MAX,
    FORMAT_CODES,
    FORMAT_FP8,
    FORMAT_NONE,
    FORMAT_NVFP4,
    FP8_QUANT_MAX,
    INTERPRETED,
    NVFP4_QUANT_MAX,
    dot,
    global_scale,
    quantize_fp8,
    quantize_nvfp4,
    round_e2m1_magnitude,
    round_e4m3_magnitude,
    round_to_dtype,
    validity,
)
from mla_quant.kernels.operand_cache import (
    STORED_UNIT,
    OperandLayout,
    check_amax,
    check_cache,
    check_cumulated,
    check_records,
    check_widths,
    load_k,
    load_v_fp8,
    load_v_groups,
    share_tokens,
    token_rows,
)
from mla_quant.kernels.ranking import join_4, keep_2_of_4, keep_4_of_8, split_4
from mla_quant.reference import RANKED_PATTERNS, Sparsity

_LN_2 = tl.constexpr(math.log(2.0))
_SMALLEST_NORMAL_FP32 = tl.constexpr(2.0**-126)
AMAX_ENTRIES = ("q_latent", "q_rope", "k_latent", "k_rope", "v", "p")
"""Order of the amax table."""
OPERANDS = ("q", "k", "p", "v", "q_rope", "k_rope")

_TRITON_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


# --- order of tokens


@triton.jit
def _token_of_column(TOKENS: tl.constexpr, INNER: tl.constexpr, ACROSS: tl.constexpr):
    """Token of each column of a tile, int32 [TOKENS]."""
    PAIR: tl.constexpr = BLOCK // INNER
    column = tl.arange(0, TOKENS)
    je = column % PAIR
    across = column // PAIR % ACROSS
    inner = column // (PAIR * ACROSS) % INNER
    outer = column // (PAIR * ACROSS * INNER)
    return (outer * ACROSS + across) * BLOCK + (je // 2 * INNER + inner) * 2 + je % 2


@triton.jit
def _token_of_group_row(TOKENS: tl.constexpr, INNER: tl.constexpr):
    """Token of each row of a tile whose rows are [16 in order of columns, blocks], int32."""
    PAIR: tl.constexpr = BLOCK // INNER
    row = tl.arange(0, TOKENS)
    block = row % (TOKENS // BLOCK)
    within = row // (TOKENS // BLOCK)
    je = within % PAIR
    return block * BLOCK + (je // 2 * INNER + within // PAIR) * 2 + je % 2


@triton.jit
def _group_rows_to_columns(
    x, TOKENS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, ACROSS: tl.constexpr
):
    """[16, blocks, WIDTH] in the order of `_token_of_group_row` to [TOKENS, WIDTH] by column."""
    PAIR: tl.constexpr = BLOCK // INNER
    OUTER: tl.constexpr = TOKENS // BLOCK // ACROSS
    x = tl.reshape(x, [INNER, PAIR, OUTER, ACROSS, WIDTH])
    return tl.reshape(tl.permute(x, [2, 0, 3, 1, 4]), [TOKENS, WIDTH])


@triton.jit
def _split_pairs(
    p, ROWS: tl.constexpr, TOKENS: tl.constexpr, INNER: tl.constexpr, ACROSS: tl.constexpr
):
    """Even and odd tokens of [ROWS, TOKENS] by column, [ROWS, TOKENS // 2] each by token."""
    JI: tl.constexpr = BLOCK // INNER // 2
    OUTER: tl.constexpr = TOKENS // BLOCK // ACROSS
    p = tl.reshape(p, [ROWS, OUTER, INNER, ACROSS, JI, 2])
    even, odd = tl.split(tl.permute(p, [0, 1, 3, 4, 2, 5]))
    return tl.reshape(even, [ROWS, TOKENS // 2]), tl.reshape(odd, [ROWS, TOKENS // 2])


# --- probabilities


@triton.jit
def power_of_two(exponent):
    """2^exponent, exact, of integers <= 0 in fp32; 0 below the normal range and for -inf."""
    bounded = tl.maximum(exponent, -127.0)
    return ((bounded.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _divide_by_scale(x, scale):
    """Correctly rounded `x / scale` of fp32 `x` >= 0 by E4M3 values; 0 where the scale is 0.

    A rounded reciprocal and one correction step by the exact remainder give the correctly rounded
    quotient for every fp32 significand over every E4M3 significand (checked exhaustively).
    """
    reciprocal = tl.where(scale > 0, tl.div_rn(1.0, scale), 0.0)
    if INTERPRETED:
        # The interpreter's fma rounds the product.
        divisor = tl.where(scale > 0, scale, float("inf"))
        return tl.div_rn(x, divisor)
    else:
        quotient = x * reciprocal
        return tl.fma(tl.fma(-quotient, scale, x), reciprocal, quotient)


@triton.jit
def quantize_p(
    p,
    block_max,
    amax,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    INNER: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """Elements times block scale of probabilities [ROWS, TOKENS] by column, fp32.

    Args:
        p: fp32, at least 0.
        block_max: Largest p of each block, [ROWS, OUTER, 1, ACROSS, 1].
        amax: 0-dim fp32.
        FORMAT: "fp8" or "nvfp4".
        ROWS: Rows.
        TOKENS: Tokens.
        INNER: See the module.
        ACROSS: See the module.
    """
    inverse = p_inverse_scale(amax, FORMAT)
    scaled = p * inverse
    if FORMAT == FORMAT_FP8:
        return round_e4m3_magnitude(tl.minimum(scaled, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL))
    else:
        scale = block_max * tl.div_rn(inverse, E2M1_MAX)
        scale = round_e4m3_magnitude(tl.minimum(scale, E4M3_MAX))
        PAIR: tl.constexpr = BLOCK // INNER
        OUTER: tl.constexpr = TOKENS // BLOCK // ACROSS
        blocks = tl.reshape(scaled, [ROWS, OUTER, INNER, ACROSS, PAIR])
        quotient = _divide_by_scale(blocks, scale)
        quotient = tl.minimum(quotient, E2M1_MAX, propagate_nan=tl.PropagateNan.ALL)
        return tl.reshape(round_e2m1_magnitude(quotient) * scale, [ROWS, TOKENS])


@triton.jit
def p_inverse_scale(amax, FORMAT: tl.constexpr):
    """fp32(quant_max / amax), what probabilities are multiplied by."""
    QUANT_MAX: tl.constexpr = FP8_QUANT_MAX if FORMAT == FORMAT_FP8 else NVFP4_QUANT_MAX
    floored = tl.maximum(amax, QUANT_MAX * _SMALLEST_NORMAL_FP32)
    return tl.div_rn(QUANT_MAX, floored)


# --- N:M sparsity


@triton.jit
def keep_largest(
    score,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    INNER: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """Which scores are among the M / 2 largest of their group of M tokens, int1 [ROWS, TOKENS].

    The low bits of a token within its block are e, then those of ii, then those of ji.
    """
    OUTER: tl.constexpr = TOKENS // BLOCK // ACROSS
    JI: tl.constexpr = BLOCK // INNER // 2
    if M == 4:
        x = tl.reshape(score, [ROWS, OUTER, INNER // 2, 2, ACROSS, JI, 2])
        a, b, c, d = split_4(tl.permute(x, [0, 1, 2, 4, 5, 3, 6]))
        a, b, c, d = keep_2_of_4(a, b, c, d)
        keep = join_4(a.to(tl.int8), b.to(tl.int8), c.to(tl.int8), d.to(tl.int8))
        keep = tl.permute(keep, [0, 1, 2, 5, 3, 4, 6])
    else:
        # Third bit to the last place, then two of four.
        if INNER >= 4:
            x = tl.reshape(score, [ROWS, OUTER, INNER // 4, 2, 2, ACROSS, JI, 2])
            x = tl.permute(x, [0, 1, 2, 5, 6, 4, 7, 3])
        else:
            x = tl.reshape(score, [ROWS, OUTER, 2, ACROSS, JI // 2, 2, 2])
            x = tl.permute(x, [0, 1, 3, 4, 2, 6, 5])
        first, second = tl.split(x)
        a, b, c, d = split_4(first)
        e, f, g, h = split_4(second)
        a, b, c, d, e, f, g, h = keep_4_of_8(a, b, c, d, e, f, g, h)
        first = join_4(a.to(tl.int8), b.to(tl.int8), c.to(tl.int8), d.to(tl.int8))
        second = join_4(e.to(tl.int8), f.to(tl.int8), g.to(tl.int8), h.to(tl.int8))
        keep = tl.join(first, second)
        if INNER >= 4:
            keep = tl.permute(keep, [0, 1, 2, 7, 5, 3, 4, 6])
        else:
            keep = tl.permute(keep, [0, 1, 4, 2, 3, 6, 5])
    return tl.reshape(keep, [ROWS, TOKENS]) != 0


# --- operands that are quantized on read


@triton.jit
def _load_rows(at, rows, present, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """[rows, WIDTH] elements, 0 where not present."""
    at = at + rows[:, None] + tl.arange(0, WIDTH)[None, :]
    if MASKED:
        return tl.load(at, mask=present[:, None], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _quantize_features(
    x, g, FORMAT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr
):
    """Elements times block scale of [ROWS, WIDTH], blocks along features, in DTYPE."""
    if FORMAT == FORMAT_NONE:
        y = round_to_dtype(x.to(tl.float32), DTYPE) if x.dtype != DTYPE else x
    elif FORMAT == FORMAT_FP8:
        y = round_to_dtype(quantize_fp8(x.to(tl.float32), g), DTYPE)
    else:
        blocks = tl.reshape(x, [ROWS, WIDTH // BLOCK, BLOCK]).to(tl.float32)
        y = tl.reshape(round_to_dtype(quantize_nvfp4(blocks, g, 2), DTYPE), [ROWS, WIDTH])
    return y


@triton.jit
def _quantize_tokens(
    at,
    rows,
    present,
    g,
    unit,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    ACROSS: tl.constexpr,
    DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """NVFP4 V in groups of 16 tokens, [TOKENS, WIDTH] by column, times `unit`.

    `rows` are in the order of `_token_of_group_row`.
    """
    x = _load_rows(at, rows, present, WIDTH, MASKED)
    x = tl.reshape(x, [BLOCK, TOKENS // BLOCK, WIDTH]).to(tl.float32)
    x = round_to_dtype(quantize_nvfp4(x, g, 0) * unit, DTYPE)
    return _group_rows_to_columns(x, TOKENS, WIDTH, INNER, ACROSS)


@triton.jit(do_not_specialize=["rows"])
def _quantize_queries(
    q,
    out,
    rope_out,
    amax,
    rows,
    q_token_stride,
    q_head_stride,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    FORMAT: tl.constexpr,
    ROPE_FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """q [tokens, heads, latent + rope] to elements times block scale.

    `out` and `rope_out` are contiguous [tokens, heads, latent] and [tokens, heads, rope].
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    token = row // HEADS
    head = row - token * HEADS
    source = q + (token.to(tl.int64) * q_token_stride + head.to(tl.int64) * q_head_stride)[:, None]
    target = out + (row.to(tl.int64) * LATENT)[:, None]
    feature = tl.arange(0, LATENT)
    x = tl.load(source + feature[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    g = global_scale(tl.load(amax + 0), FORMAT)
    y = _quantize_features(x, g, FORMAT, ROWS, LATENT, out.dtype.element_ty)
    tl.store(target + feature[None, :], y, mask=inside[:, None])
    if ROPE > 0:
        rope = tl.arange(0, ROPE_PADDED)
        mask = inside[:, None] & (rope < ROPE)[None, :]
        x = tl.load(source + LATENT + rope[None, :], mask=mask, other=0.0).to(tl.float32)
        g = global_scale(tl.load(amax + 1), ROPE_FORMAT)
        y = _quantize_features(x, g, ROPE_FORMAT, ROWS, ROPE_PADDED, rope_out.dtype.element_ty)
        target = rope_out + (row.to(tl.int64) * ROPE)[:, None]
        tl.store(target + rope[None, :], y, mask=mask)


# --- one tile


@triton.jit
def _tile(
    tile,
    present_end,
    acc_lower,
    acc_upper,
    top,
    total,
    q_lower,
    q_upper,
    q_rope,
    q_rope_upper,
    limit,
    query_position,
    cache,
    records,
    table,
    latent_factor,
    rope_factor,
    k_latent_g,
    k_rope_g,
    v_g,
    v_unit,
    p_amax,
    cache_page_stride,
    cache_token_stride,
    record_page_stride,
    record_token_stride,
    sink,
    recent,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    INNER: tl.constexpr,
    ACROSS: tl.constexpr,
    V_STORED: tl.constexpr,
    QK_DTYPE: tl.constexpr,
    ROPE_DTYPE: tl.constexpr,
    PV_DTYPE: tl.constexpr,
    K_STORED: tl.constexpr,
    K_ROPE_STORED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    K_FORMAT: tl.constexpr,
    K_ROPE_FORMAT: tl.constexpr,
    P_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    M: tl.constexpr,
    K_CODES: tl.constexpr,
    K_ROPE_CODES: tl.constexpr,
    K_SCALES: tl.constexpr,
    K_ROPE_SCALES: tl.constexpr,
    V_CODES: tl.constexpr,
    V_SCALES: tl.constexpr,
):
    """Online softmax over one tile; MASKED where some token may be absent or not visible."""
    HALF: tl.constexpr = LATENT // 2
    PAIR: tl.constexpr = BLOCK // INNER
    OUTER: tl.constexpr = TOKENS // BLOCK // ACROSS
    V_RAW: tl.constexpr = V_FORMAT != FORMAT_NVFP4 and not V_STORED
    ROPE_RAW: tl.constexpr = ROPE > 0 and not K_ROPE_STORED
    ROPE_STORED: tl.constexpr = ROPE > 0 and K_ROPE_STORED
    start = tile * TOKENS
    tokens = _token_of_column(TOKENS, INNER, ACROSS)
    positions = start + tokens
    present = positions < present_end

    # K, and the raw latent where V needs it too.
    if not K_STORED or V_RAW or ROPE_RAW:
        rows = token_rows(
            table,
            start,
            tokens,
            present,
            cache_page_stride,
            cache_token_stride,
            TOKENS,
            PAGE_SIZE,
            MASKED,
        )
    if not K_STORED or V_RAW:
        raw_lower = _load_rows(cache, rows, present, HALF, MASKED)
        raw_upper = _load_rows(cache + HALF, rows, present, HALF, MASKED)
    if K_STORED or ROPE_STORED or (V_STORED and V_FORMAT == FORMAT_FP8):
        record_rows = token_rows(
            table,
            start,
            tokens,
            present,
            record_page_stride,
            record_token_stride,
            TOKENS,
            PAGE_SIZE,
            MASKED,
        )
    if K_STORED:
        k_lower, k_upper = load_k(
            records,
            record_rows,
            present,
            LATENT,
            HALF,
            TOKENS,
            K_FORMAT,
            K_CODES,
            K_SCALES,
            QK_DTYPE,
            MASKED,
        )
    else:
        k_lower = _quantize_features(raw_lower, k_latent_g, K_FORMAT, TOKENS, HALF, QK_DTYPE)
        k_upper = _quantize_features(raw_upper, k_latent_g, K_FORMAT, TOKENS, HALF, QK_DTYPE)
    nothing = tl.zeros([ROWS, TOKENS], tl.float32)
    score = dot(q_lower, tl.trans(k_lower), nothing)
    if ROWS < 64:
        # Two chains of dependent products, half as long: few rows expose their latency.
        score = (score + dot(q_upper, tl.trans(k_upper), nothing)) * latent_factor
    else:
        score = dot(q_upper, tl.trans(k_upper), score) * latent_factor
    if ROPE > 0:
        if ROPE_STORED:
            RECORD_HALF: tl.constexpr = q_rope.shape[1]
            k_rope, k_rope_upper = load_k(
                records,
                record_rows,
                present,
                ROPE,
                RECORD_HALF,
                TOKENS,
                K_ROPE_FORMAT,
                K_ROPE_CODES,
                K_ROPE_SCALES,
                ROPE_DTYPE,
                MASKED,
            )
            rope_score = dot(q_rope, tl.trans(k_rope), tl.zeros([ROWS, TOKENS], tl.float32))
            rope_score = dot(q_rope_upper, tl.trans(k_rope_upper), rope_score)
        else:
            rope = tl.arange(0, ROPE_PADDED)
            at = cache + LATENT + rows[:, None] + rope[None, :]
            if MASKED:
                k_rope = tl.load(at, mask=present[:, None] & (rope < ROPE)[None, :], other=0.0)
            elif ROPE == ROPE_PADDED:
                k_rope = tl.load(at)
            else:
                k_rope = tl.load(at, mask=(rope < ROPE)[None, :], other=0.0)
            k_rope = _quantize_features(
                k_rope, k_rope_g, K_ROPE_FORMAT, TOKENS, ROPE_PADDED, ROPE_DTYPE
            )
            rope_score = dot(q_rope, tl.trans(k_rope), tl.zeros([ROWS, TOKENS], tl.float32))
        score += rope_score * rope_factor

    # Visible scores; -inf for the others.
    if MASKED:
        visible = positions[None, :] < tl.minimum(limit, present_end)[:, None]
        score = tl.where(visible, score, float("-inf"))
    if M > 0:
        keep = keep_largest(score, M, ROWS, TOKENS, INNER, ACROSS)
        near = query_position[:, None] - positions[None, :] < recent
        # NaN loses comparisons, and must not be dropped for that.
        keep = keep | near | (positions < sink)[None, :] | (score != score)
        score = tl.where(keep, score, float("-inf"))

    # Maxima of blocks first: P's block scales and the row maximum both come from them.
    blocks = tl.reshape(score, [ROWS, OUTER, INNER, ACROSS, PAIR])
    block_top = tl.max(tl.max(blocks, 4, keep_dims=True), 2, keep_dims=True)
    tile_top = tl.max(tl.reshape(block_top, [ROWS, TOKENS // BLOCK]), 1)
    new_top = tl.maximum(top, tl.ceil(tile_top))
    reference = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = power_of_two(top - reference)
    p = tl.exp2(score - reference[:, None])
    total = total * shrink + tl.sum(p, 1)
    if P_FORMAT != FORMAT_NONE:
        block_max = tl.exp2(block_top - tl.reshape(reference, [ROWS, 1, 1, 1, 1]))
        p = quantize_p(p, block_max, p_amax, P_FORMAT, ROWS, TOKENS, INNER, ACROSS)
    p = round_to_dtype(p, PV_DTYPE)

    # V.
    acc_lower *= shrink[:, None]
    acc_upper *= shrink[:, None]
    if V_STORED and V_FORMAT == FORMAT_NVFP4:
        GROUPS: tl.constexpr = TOKENS // BLOCK
        p_even, p_odd = _split_pairs(p, ROWS, TOKENS, INNER, ACROSS)
        for upper in tl.static_range(2):
            share = share_tokens(GROUPS, upper)
            share_present = start + share < present_end
            share_rows = token_rows(
                table,
                start,
                share,
                share_present,
                record_page_stride,
                record_token_stride,
                TOKENS,
                PAGE_SIZE,
                MASKED,
            )
            even, odd = load_v_groups(
                records,
                share_rows,
                share_present,
                LATENT,
                GROUPS,
                V_CODES,
                V_SCALES,
                PV_DTYPE,
                MASKED,
            )
            if upper:
                acc_upper = dot(p_odd, odd, dot(p_even, even, acc_upper))
            else:
                acc_lower = dot(p_odd, odd, dot(p_even, even, acc_lower))
    else:
        if V_FORMAT == FORMAT_NVFP4:
            group_tokens = _token_of_group_row(TOKENS, INNER)
            group_present = start + group_tokens < present_end
            group_rows = token_rows(
                table,
                start,
                group_tokens,
                group_present,
                cache_page_stride,
                cache_token_stride,
                TOKENS,
                PAGE_SIZE,
                MASKED,
            )
            v_lower = _quantize_tokens(
                cache,
                group_rows,
                group_present,
                v_g,
                v_unit,
                TOKENS,
                HALF,
                INNER,
                ACROSS,
                PV_DTYPE,
                MASKED,
            )
            v_upper = _quantize_tokens(
                cache + HALF,
                group_rows,
                group_present,
                v_g,
                v_unit,
                TOKENS,
                HALF,
                INNER,
                ACROSS,
                PV_DTYPE,
                MASKED,
            )
        elif V_STORED:
            v_lower, v_upper = load_v_fp8(
                records, record_rows, present, LATENT, V_CODES, PV_DTYPE, MASKED
            )
        else:
            v_lower = _quantize_features(raw_lower, v_g, V_FORMAT, TOKENS, HALF, PV_DTYPE)
            v_upper = _quantize_features(raw_upper, v_g, V_FORMAT, TOKENS, HALF, PV_DTYPE)
        acc_lower = dot(p, v_lower, acc_lower)
        acc_upper = dot(p, v_upper, acc_upper)
    return acc_lower, acc_upper, new_top, total


@triton.jit
def score_factors(
    amax,
    scale_log2,
    Q_FORMAT: tl.constexpr,
    Q_ROPE_FORMAT: tl.constexpr,
    K_FORMAT: tl.constexpr,
    K_ROPE_FORMAT: tl.constexpr,
    K_STORED: tl.constexpr,
    K_ROPE_STORED: tl.constexpr,
):
    """What products of Q's and K's elements are multiplied by, latent and rope part, fp32."""
    latent = scale_log2 * (
        global_scale(tl.load(amax + 0), Q_FORMAT) * global_scale(tl.load(amax + 2), K_FORMAT)
    )
    rope = scale_log2 * (
        global_scale(tl.load(amax + 1), Q_ROPE_FORMAT)
        * global_scale(tl.load(amax + 3), K_ROPE_FORMAT)
    )
    if Q_FORMAT != FORMAT_NONE:
        latent *= validity(tl.load(amax + 0))
    if Q_ROPE_FORMAT != FORMAT_NONE:
        rope *= validity(tl.load(amax + 1))
    if K_FORMAT != FORMAT_NONE:
        latent *= validity(tl.load(amax + 2))
    if K_ROPE_FORMAT != FORMAT_NONE:
        rope *= validity(tl.load(amax + 3))
    if K_STORED and K_FORMAT == FORMAT_NVFP4:
        latent *= 1.0 / STORED_UNIT
    if K_ROPE_STORED and K_ROPE_FORMAT == FORMAT_NVFP4:
        rope *= 1.0 / STORED_UNIT
    return latent, rope


# --- kernels


@triton.jit(
    do_not_specialize=[
        "row_blocks",
        "num_splits",
        "first_partial",
        "partial_rows",
        "sink",
        "recent",
        "table_stride",
    ]
)
def _split(
    q,
    rope_q,
    cache,
    records,
    block_table,
    seq_lens,
    cu_seqlens_q,
    amax,
    out,
    lse,
    partial_out,
    partial_top,
    partial_total,
    scale_log2,
    row_blocks,
    num_splits,
    first_partial,
    partial_rows,
    sink,
    recent,
    q_token_stride,
    q_head_stride,
    rope_q_token_stride,
    rope_q_head_stride,
    cache_page_stride,
    cache_token_stride,
    record_page_stride,
    record_token_stride,
    table_stride,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    INNER: tl.constexpr,
    ACROSS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    Q_FORMAT: tl.constexpr,
    Q_ROPE_FORMAT: tl.constexpr,
    K_FORMAT: tl.constexpr,
    K_ROPE_FORMAT: tl.constexpr,
    P_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    K_STORED: tl.constexpr,
    K_ROPE_STORED: tl.constexpr,
    V_STORED: tl.constexpr,
    PV_DTYPE: tl.constexpr,
    DIRECT: tl.constexpr,
    TAIL_ONLY: tl.constexpr,
    M: tl.constexpr,
    K_CODES: tl.constexpr,
    K_ROPE_CODES: tl.constexpr,
    K_SCALES: tl.constexpr,
    K_ROPE_SCALES: tl.constexpr,
    V_CODES: tl.constexpr,
    V_SCALES: tl.constexpr,
):
    """ROWS rows of one sequence over one range of its context.

    DIRECT: there is one range; write results. Otherwise write partial sums with their reference
    points, integers, so that combining them scales by exact powers of two.
    TAIL_ONLY: only groups of V that records do not hold yet, as the range `first_partial`.
    """
    HALF: tl.constexpr = LATENT // 2
    QK_DTYPE: tl.constexpr = q.dtype.element_ty
    ROPE_DTYPE: tl.constexpr = rope_q.dtype.element_ty
    TAIL: tl.constexpr = V_STORED and V_FORMAT == FORMAT_NVFP4
    program = tl.program_id(0)
    row_block = program % row_blocks
    split = program // row_blocks % num_splits
    sequence = program // row_blocks // num_splits
    seq_len = tl.load(seq_lens + sequence)
    if cu_seqlens_q is None:
        begin = sequence
        queries = 1
    else:
        begin = tl.load(cu_seqlens_q + sequence)
        queries = tl.load(cu_seqlens_q + sequence + 1) - begin

    first_row = row_block * ROWS
    if first_row < queries * HEADS:
        row = first_row + tl.arange(0, ROWS)
        inside = row < queries * HEADS
        query = row // HEADS
        # Row of all tokens × heads, and of a contiguous output.
        flat_row = begin.to(tl.int64) * HEADS + row
        limit = tl.where(inside, seq_len - queries + query + 1, 0)
        query_position = seq_len - queries + query
        token = (begin + query).to(tl.int64)
        head = (row - query * HEADS).to(tl.int64)
        at = q + (token * q_token_stride + head * q_head_stride)[:, None]
        half = tl.arange(0, HALF)
        q_lower = tl.load(at + half[None, :], mask=inside[:, None], other=0.0)
        q_upper = tl.load(at + HALF + half[None, :], mask=inside[:, None], other=0.0)
        q_rope = q_lower
        q_rope_upper = q_upper
        if ROPE > 0:
            at = rope_q + (token * rope_q_token_stride + head * rope_q_head_stride)[:, None]
            if K_ROPE_STORED:
                # Halves of the rope part, each padded to a width that a product takes.
                RECORD_HALF: tl.constexpr = max(ROPE_PADDED // 2, BLOCK)
                rope = tl.arange(0, RECORD_HALF)
                mask = inside[:, None] & (rope < ROPE // 2)[None, :]
                q_rope = tl.load(at + rope[None, :], mask=mask, other=0.0)
                q_rope_upper = tl.load(at + ROPE // 2 + rope[None, :], mask=mask, other=0.0)
            else:
                rope = tl.arange(0, ROPE_PADDED)
                mask = inside[:, None] & (rope < ROPE)[None, :]
                q_rope = tl.load(at + rope[None, :], mask=mask, other=0.0)

        k_latent_g = global_scale(tl.load(amax + 2), K_FORMAT)
        k_rope_g = global_scale(tl.load(amax + 3), K_ROPE_FORMAT)
        v_g = global_scale(tl.load(amax + 4), V_FORMAT)
        p_amax = tl.load(amax + 5)
        latent_factor, rope_factor = score_factors(
            amax,
            scale_log2,
            Q_FORMAT,
            Q_ROPE_FORMAT,
            K_FORMAT,
            K_ROPE_FORMAT,
            K_STORED,
            K_ROPE_STORED,
        )

        # Tiles of this range: without masks up to the first row's limit, with masks to the last's.
        # V groups that records do not hold yet, at most one, are a tile of their own.
        last_query = tl.minimum((first_row + ROWS - 1) // HEADS, queries - 1)
        end = tl.maximum(seq_len - queries + last_query + 1, 0)
        full_end = tl.maximum(seq_len - queries + first_row // HEADS + 1, 0)
        present_end = seq_len
        v_unit = 1.0
        if TAIL:
            present_end = seq_len // BLOCK * BLOCK
            v_unit = STORED_UNIT
            full_end = tl.minimum(full_end, present_end)
        per_split = tl.cdiv(tl.cdiv(seq_len, TOKENS), num_splits)
        first_tile = split * per_split
        last_tile = tl.minimum(first_tile + per_split, tl.cdiv(end, TOKENS))
        # Tiles that hold nothing but the tail.
        edge_tile = tl.minimum(last_tile, tl.cdiv(present_end, TOKENS))
        full_tile = tl.maximum(tl.minimum(full_end // TOKENS, edge_tile), first_tile)

        table = block_table + sequence.to(tl.int64) * table_stride
        acc_lower = tl.zeros([ROWS, HALF], tl.float32)
        acc_upper = tl.zeros([ROWS, HALF], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        # What tiles share. The calls below differ in what may be absent and how long a tile is.
        shared = (
            q_lower,
            q_upper,
            q_rope,
            q_rope_upper,
            limit,
            query_position,
            cache,
            records,
            table,
            latent_factor,
            rope_factor,
            k_latent_g,
            k_rope_g,
            v_g,
            v_unit,
            p_amax,
            cache_page_stride,
            cache_token_stride,
            record_page_stride,
            record_token_stride,
            sink,
            recent,
        )
        if not TAIL_ONLY:
            for tile in tl.range(first_tile, full_tile):
                acc_lower, acc_upper, top, total = _tile(
                    tile,
                    present_end,
                    acc_lower,
                    acc_upper,
                    top,
                    total,
                    *shared,
                    False,
                    ROWS,
                    TOKENS,
                    INNER,
                    ACROSS,
                    V_STORED,
                    QK_DTYPE,
                    ROPE_DTYPE,
                    PV_DTYPE,
                    K_STORED,
                    K_ROPE_STORED,
                    PAGE_SIZE,
                    LATENT,
                    ROPE,
                    ROPE_PADDED,
                    K_FORMAT,
                    K_ROPE_FORMAT,
                    P_FORMAT,
                    V_FORMAT,
                    M,
                    K_CODES,
                    K_ROPE_CODES,
                    K_SCALES,
                    K_ROPE_SCALES,
                    V_CODES,
                    V_SCALES,
                )
            for tile in tl.range(full_tile, edge_tile, num_stages=1):
                acc_lower, acc_upper, top, total = _tile(
                    tile,
                    present_end,
                    acc_lower,
                    acc_upper,
                    top,
                    total,
                    *shared,
                    True,
                    ROWS,
                    TOKENS,
                    INNER,
                    ACROSS,
                    V_STORED,
                    QK_DTYPE,
                    ROPE_DTYPE,
                    PV_DTYPE,
                    K_STORED,
                    K_ROPE_STORED,
                    PAGE_SIZE,
                    LATENT,
                    ROPE,
                    ROPE_PADDED,
                    K_FORMAT,
                    K_ROPE_FORMAT,
                    P_FORMAT,
                    V_FORMAT,
                    M,
                    K_CODES,
                    K_ROPE_CODES,
                    K_SCALES,
                    K_ROPE_SCALES,
                    V_CODES,
                    V_SCALES,
                )
        if TAIL:
            tail_tile = present_end // TOKENS
            if (present_end < end) & (tail_tile >= first_tile) & (tail_tile < last_tile):
                acc_lower, acc_upper, top, total = _tile(
                    present_end // BLOCK,
                    seq_len,
                    acc_lower,
                    acc_upper,
                    top,
                    total,
                    *shared,
                    True,
                    ROWS,
                    BLOCK,
                    INNER,
                    1,
                    False,
                    QK_DTYPE,
                    ROPE_DTYPE,
                    PV_DTYPE,
                    K_STORED,
                    K_ROPE_STORED,
                    PAGE_SIZE,
                    LATENT,
                    ROPE,
                    ROPE_PADDED,
                    K_FORMAT,
                    K_ROPE_FORMAT,
                    P_FORMAT,
                    V_FORMAT,
                    M,
                    K_CODES,
                    K_ROPE_CODES,
                    K_SCALES,
                    K_ROPE_SCALES,
                    V_CODES,
                    V_SCALES,
                )

        if DIRECT:
            factor = _output_factor(amax, P_FORMAT, V_FORMAT, V_STORED)
            per_row = tl.where(total == 0, 0.0, factor / total)
            results = out + (flat_row * LATENT)[:, None] + half[None, :]
            _store(results, acc_lower * per_row[:, None], inside)
            _store(results + HALF, acc_upper * per_row[:, None], inside)
            tl.store(lse + flat_row, _natural_lse(top, total), mask=inside)
        else:
            partial_row = (first_partial + split).to(tl.int64) * partial_rows + flat_row
            tl.store(partial_top + partial_row, top, mask=inside)
            tl.store(partial_total + partial_row, total, mask=inside)
            # Sums of an empty range are neither written nor read.
            stored = first_tile < last_tile
            if TAIL_ONLY:
                stored = stored & (present_end < end)
            if stored:
                sums = partial_out + (partial_row * LATENT)[:, None] + half[None, :]
                tl.store(sums, acc_lower, mask=inside[:, None])
                tl.store(sums + HALF, acc_upper, mask=inside[:, None])


@triton.jit
def _output_factor(amax, P_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr, V_STORED: tl.constexpr):
    """Global scales of P and V, fp32; what the product of their elements is multiplied by."""
    v_amax = tl.load(amax + 4)
    p_amax = tl.load(amax + 5)
    factor = global_scale(v_amax, V_FORMAT)
    if P_FORMAT != FORMAT_NONE:
        inverse = p_inverse_scale(p_amax, P_FORMAT)
        factor *= tl.div_rn(1.0, inverse)
        factor *= validity(p_amax)
    if V_FORMAT != FORMAT_NONE:
        factor *= validity(v_amax)
    if V_STORED and V_FORMAT == FORMAT_NVFP4:
        factor *= 1.0 / STORED_UNIT
    return factor


@triton.jit
def _natural_lse(top, total):
    return tl.where(total == 0, float("-inf"), (top + tl.log2(total)) * _LN_2)


@triton.jit
def _store(at, x, inside):
    tl.store(at, round_to_dtype(x, at.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["num_splits", "partial_rows"])
def _combine(
    partial_out,
    partial_top,
    partial_total,
    amax,
    out,
    lse,
    num_splits,
    partial_rows,
    LATENT: tl.constexpr,
    FEATURES: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    P_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    V_STORED: tl.constexpr,
):
    """FEATURES of one row from its ranges; SPLITS is num_splits padded to a multiple of CHUNK."""
    BLOCKS: tl.constexpr = LATENT // FEATURES
    program = tl.program_id(0)
    row = (program // BLOCKS).to(tl.int64)
    feature = program % BLOCKS * FEATURES + tl.arange(0, FEATURES)
    split = tl.arange(0, SPLITS)
    at = split.to(tl.int64) * partial_rows + row
    tops = tl.load(partial_top + at, mask=split < num_splits, other=float("-inf"))
    totals = tl.load(partial_total + at, mask=split < num_splits, other=0.0)
    # An empty range has total 0 and its sums were not written; NaN is not empty.
    tops = tl.where(totals == 0, float("-inf"), tops)
    top = tl.max(tops, 0)
    reference = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(totals * power_of_two(tops - reference), 0)
    acc = tl.zeros([FEATURES], tl.float32)
    for first in tl.range(0, num_splits, CHUNK):
        part = first + tl.arange(0, CHUNK)
        part_at = part.to(tl.int64) * partial_rows + row
        part_totals = tl.load(partial_total + part_at, mask=part < num_splits, other=0.0)
        filled = part_totals != 0
        part_tops = tl.load(partial_top + part_at, mask=filled, other=float("-inf"))
        parts = tl.load(
            partial_out + (part_at * LATENT)[:, None] + feature[None, :],
            mask=filled[:, None],
            other=0.0,
        )
        acc += tl.sum(parts * power_of_two(part_tops - reference)[:, None], 0)
    factor = _output_factor(amax, P_FORMAT, V_FORMAT, V_STORED)
    result = acc * tl.where(total == 0, 0.0, factor / total)
    tl.store(out + row * LATENT + feature, round_to_dtype(result, out.dtype.element_ty))
    if program % BLOCKS == 0:
        tl.store(lse + row, _natural_lse(top, total))


# --- choice of shapes


@dataclass(frozen=True)
class Configuration:
    """Shape of the work of one program of the split kernel.

    Attributes:
        block_rows: Query tokens × heads of a program.
        block_tokens: Tokens of a tile.
        inner: Of the 8 pairs of tokens in a block, how many a thread holds (see the module).
        across: Neighbouring blocks that are spread over threads and warps.
        warps: Warps of a program.
        stages: Stages of the software pipeline.
    """

    block_rows: int
    block_tokens: int
    inner: int
    across: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        powers = (self.block_rows, self.block_tokens, self.inner, self.across, self.warps)
        block_size = NVFP4.block_size or 1
        if (
            any(x < 1 or x & (x - 1) for x in powers)
            or self.block_rows < 16
            or not 2 <= self.inner <= block_size // 2
            or self.block_tokens % (block_size * self.across)
            or self.stages < 1
        ):
            raise ConfigError(
                f"{self} is no shape of a program: all but stages must be powers of two, "
                f"block_rows at least 16, inner from 2 to {block_size // 2}, block_tokens a "
                f"multiple of {block_size} · across, stages at least 1"
            )

    def kernel_constants(self) -> dict[str, int]:
        """By the names that the kernel gives them."""
        return {
            "ROWS": self.block_rows,
            "TOKENS": self.block_tokens,
            "INNER": self.inner,
            "ACROSS": self.across,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


SOURCES = ("raw", "stored", "partial", "read")
"""How operands reach a product: as they are; K's latent part and V from a side cache; only one of
them or the rope part from it, the rest as it is; or quantized on read. Each needs another amount of
registers and shared memory."""

# [source][shared memory: large (227 KiB), medium (163 KiB), small (99 KiB)], by rising rows.
_CONFIGURATIONS = {
    "raw": {
        "large": (Configuration(16, 64, 2, 4, 4, 5), Configuration(32, 64, 2, 4, 8, 5)),
        "medium": (Configuration(16, 64, 2, 4, 4, 2), Configuration(32, 64, 2, 4, 8, 2)),
        "small": (Configuration(16, 32, 2, 2, 4, 2), Configuration(32, 32, 2, 2, 8, 2)),
    },
    "stored": {
        "large": (Configuration(16, 64, 2, 4, 8, 5), Configuration(32, 64, 2, 4, 8, 5)),
        "medium": (Configuration(16, 64, 2, 4, 4, 4), Configuration(32, 64, 2, 4, 8, 2)),
        "small": (Configuration(16, 64, 2, 4, 8, 2), Configuration(32, 32, 2, 2, 8, 2)),
    },
    # Raw tiles and records both: fewer stages fit.
    "partial": {
        "large": (Configuration(16, 64, 2, 4, 8, 2), Configuration(32, 64, 2, 4, 8, 2)),
        "medium": (Configuration(16, 64, 2, 4, 8, 2), Configuration(32, 64, 2, 4, 8, 2)),
        "small": (Configuration(16, 32, 2, 2, 8, 2), Configuration(32, 32, 2, 2, 8, 2)),
    },
    "read": {
        "large": (Configuration(16, 32, 2, 2, 8, 5), Configuration(32, 32, 2, 2, 8, 2)),
        "medium": (Configuration(16, 32, 2, 2, 8, 2), Configuration(32, 32, 2, 2, 8, 2)),
        "small": (Configuration(16, 16, 2, 1, 4, 2), Configuration(32, 16, 2, 1, 8, 2)),
    },
}
# Hopper's matrix unit takes 64 rows; Blackwell's would need more shared memory for them.
_CONFIGURATIONS_HOPPER_RAW = (
    Configuration(16, 64, 2, 4, 4, 5),
    Configuration(64, 64, 4, 2, 8, 2),
)
# fp32 operands: products without tensor cores, for tests and exact comparisons.
_CONFIGURATIONS_FP32 = {
    "large": (Configuration(16, 32, 2, 2, 4, 1),),
    "medium": (Configuration(16, 32, 2, 2, 4, 1),),
    "small": (Configuration(16, 16, 2, 1, 4, 1),),
}


def configurations(
    capability: int, source: str, element_bytes: int = 2
) -> tuple[Configuration, ...]:
    """What `choose_configuration` may return, by rising number of rows.

    Args:
        capability: Compute capability × 10, for example 90.
        source: One of `SOURCES`.
        element_bytes: Bytes of the widest operand of a product.
    """
    shared = shared_bytes(divmod(capability, 10))
    size = "large" if shared >= 227 << 10 else "medium" if shared >= 163 << 10 else "small"
    if element_bytes > 2:
        return _CONFIGURATIONS_FP32[size]
    if source == "raw" and capability == 90:
        return _CONFIGURATIONS_HOPPER_RAW
    return _CONFIGURATIONS[source][size]


def choose_configuration(
    rows: int, capability: int, source: str, element_bytes: int = 2
) -> Configuration:
    """The smallest that holds the rows of a sequence, else the largest."""
    allowed = configurations(capability, source, element_bytes)
    for configuration in allowed:
        if configuration.block_rows >= rows:
            return configuration
    return allowed[-1]


def operand_source(
    formats: OperandFormats, k_stored: bool, v_stored: bool, k_rope_stored: bool | None = None
) -> str:
    """Which of `SOURCES` a call has; `k_rope_stored` None: as `k_stored`."""
    operands = (
        (formats.k, k_stored),
        (formats.rope_k, k_stored if k_rope_stored is None else k_rope_stored),
        (formats.v, v_stored),
    )
    if any(name != "none" and not stored for name, stored in operands):
        return "read"
    if k_stored and v_stored:
        return "stored"
    return "partial" if any(stored for _, stored in operands) else "raw"


# 64 rows over NVFP4 records ended in an illegal memory access on a Hopper GPU, with the addresses
# that 16 and 32 rows read; the cause is not known.
_MAX_ROWS_STORED = 32
_MAX_SPLITS = 128
# What a program costs besides its tiles, and what another range costs when ranges are combined, in
# units of one tile's time.
_PROGRAM_COST = 3.0
_SPLIT_COST = 0.25


def choose_splits(
    programs: int,
    tiles: int,
    multiprocessors: int,
    program_cost: float = _PROGRAM_COST,
    split_cost: float = _SPLIT_COST,
) -> int:
    """Into how many ranges to split the context, from shapes alone.

    Args:
        programs: Programs without splitting: sequences × row blocks.
        tiles: Tiles of the longest context possible.
        multiprocessors: Programs that run at a time.
        program_cost: Of a program besides its tiles, in tiles.
        split_cost: Of another range when ranges are combined, in tiles.

    Returns:
        The number that minimizes waves × work of a program, plus the cost of combining.
    """
    best, best_cost = 1, math.inf
    for splits in range(1, min(_MAX_SPLITS, max(tiles, 1)) + 1):
        waves = math.ceil(programs * splits / multiprocessors)
        cost = waves * (math.ceil(tiles / splits) + program_cost)
        cost += split_cost * splits if splits > 1 else 0.0
        if cost < best_cost:
            best, best_cost = splits, cost
    return best


@dataclass(frozen=True)
class ProgramShape:
    """Work of one program of a kernel, and its costs in the sense of `choose_splits`."""

    rows: int
    tokens: int
    program_cost: float = _PROGRAM_COST
    split_cost: float = _SPLIT_COST

    def splits(self, batch: int, rows: int, capacity: int, multiprocessors: int) -> int:
        """Ranges for sequences of some query rows and at most `capacity` tokens."""
        return choose_splits(
            batch * triton.cdiv(rows, self.rows),
            triton.cdiv(capacity, self.tokens),
            multiprocessors,
            self.program_cost,
            self.split_cost,
        )


@functools.cache
def _device_properties(device: torch.device) -> tuple[int, int]:
    """Compute capability × 10 and multiprocessors."""
    if device.type != "cuda":
        return 90, 8
    properties = torch.cuda.get_device_properties(device)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


# --- host function


@dataclass(frozen=True)
class OperandFormats:
    """Format names of the four operands, each of `mla_quant.formats.FORMATS`.

    Attributes:
        q: Q's latent part.
        k: K's latent part.
        p: P.
        v: V.
        q_rope: Q's rope part; None: as `q`.
        k_rope: K's rope part; None: as `k`.
    """

    q: str = "nvfp4"
    k: str = "nvfp4"
    p: str = "nvfp4"
    v: str = "nvfp4"
    q_rope: str | None = None
    k_rope: str | None = None

    def __post_init__(self) -> None:
        for operand in OPERANDS:
            name = getattr(self, operand)
            if name not in FORMATS and not (name is None and operand in ("q_rope", "k_rope")):
                raise ConfigError(f"format of {operand} is {name!r}; allowed are {sorted(FORMATS)}")

    @property
    def rope_q(self) -> str:
        """Format of Q's rope part."""
        return self.q if self.q_rope is None else self.q_rope

    @property
    def rope_k(self) -> str:
        """Format of K's rope part."""
        return self.k if self.k_rope is None else self.k_rope


def operand_dtypes(formats: OperandFormats, cache_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Dtype in which the three products are computed: Q·K latent, Q·K rope, P·V.

    Quantized operands are exact in bf16. Where an operand is not quantized, its dtype rules, which
    holds quantized numbers too.
    """
    products = ((formats.q, formats.k), (formats.rope_q, formats.rope_k), (formats.p, formats.v))
    return tuple(cache_dtype if "none" in names else torch.bfloat16 for names in products)


def _check(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    amax: Tensor,
    latent_width: int,
    scale: float,
    cu_seqlens_q: Tensor | None,
    max_query_len: int,
    sparsity: Sparsity | None,
    num_splits: int | None,
    out_dtype: torch.dtype,
) -> None:
    if q.dim() != 3 or q.stride(-1) != 1 or q.dtype not in _TRITON_DTYPES:
        raise ConfigError(
            "q must be bf16, fp16 or fp32 [tokens, heads, width] with a contiguous last dimension; "
            f"got {q.dtype} {list(q.shape)}, strides {list(q.stride())}"
        )
    rope_width = q.shape[-1] - latent_width
    check_widths(latent_width, rope_width)
    check_cache(cache, block_table, seq_lens, latent_width, rope_width)
    check_amax(amax, cache)
    if q.device != cache.device:
        raise ConfigError(f"q is on {q.device}, the latent cache on {cache.device}")
    batch = seq_lens.shape[0]
    if cu_seqlens_q is None:
        if q.shape[0] != batch or max_query_len != 1:
            raise ConfigError(
                f"without cu_seqlens_q each of the {batch} sequences has one query token; got "
                f"{q.shape[0]} and max_query_len {max_query_len}; pass cu_seqlens_q"
            )
    else:
        check_cumulated("cu_seqlens_q", cu_seqlens_q, batch, cache.device)
        if max_query_len < 1 and q.shape[0]:
            raise ConfigError(
                f"max_query_len is {max_query_len} and there are {q.shape[0]} query tokens; it "
                "must be the largest number of query tokens of a sequence"
            )
    if not (math.isfinite(scale) and scale > 0):
        raise ConfigError(f"scale is {scale}; it must be a finite number above 0")
    if out_dtype not in _TRITON_DTYPES:
        raise ConfigError(f"out_dtype is {out_dtype}; it must be bf16, fp16 or fp32")
    if sparsity is not None and (sparsity.n, sparsity.m) not in RANKED_PATTERNS:
        allowed = " and ".join(f"{n}:{m}" for n, m in RANKED_PATTERNS)
        raise ConfigError(
            f"sparsity {sparsity.n}:{sparsity.m} is not supported by the decode kernel; allowed "
            f"are {allowed}"
        )
    if num_splits is not None and num_splits < 1:
        raise ConfigError(f"num_splits is {num_splits}; it must be at least 1, or None")


Allocate = Callable[[Sequence[tuple[tuple[int, ...], torch.dtype]], torch.device], list[Tensor]]


def allocate_scratch(
    wanted: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device
) -> list[Tensor]:
    """Scratch from torch's allocator."""
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in wanted]


def _carried_shapes(
    tokens: int, heads: int, latent: int, rope: int, dtype: torch.dtype, rope_dtype: torch.dtype
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Of Q as it enters the products."""
    parts = [(latent, dtype), (rope, rope_dtype)] if rope else [(latent, dtype)]
    return [((tokens, heads, width), dtype) for width, dtype in parts]


def _partial_shapes(
    ranges: int, tokens: int, heads: int, latent: int
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Of what ranges leave to be combined: sums, reference points, denominators."""
    rows = (ranges, tokens, heads)
    return [((*rows, latent), torch.float32), (rows, torch.float32), (rows, torch.float32)]


def scratch_shapes(
    batch: int,
    query_len: int,
    heads: int,
    latent_width: int,
    rope_width: int,
    capacity: int,
    device: torch.device,
    element_bytes: int = 2,
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Scratch that no `decode_attention` of these sizes exceeds, whatever its formats.

    Args:
        batch: Sequences.
        query_len: Query tokens of each.
        heads: Query heads.
        latent_width: Features of the latent.
        rope_width: Features of the rope part.
        capacity: Tokens that a row of the block table can hold.
        device: Where it runs.
        element_bytes: Of the widest operand of a product.
    """
    capability, multiprocessors = _device_properties(device)
    rows = query_len * heads
    shapes = [
        ProgramShape(c.block_rows, c.block_tokens)
        for source in SOURCES
        for c in (choose_configuration(rows, capability, source, element_bytes),)
    ]
    ranges = [shape.splits(batch, rows, capacity, multiprocessors) for shape in shapes]
    hopper = _import_hopper() if capability == 90 and not INTERPRETED else None
    if hopper is not None:
        ranges.append(hopper.SHAPE.splits(batch, rows, capacity, multiprocessors) + 1)
    dtype = {2: torch.bfloat16, 4: torch.float32}[element_bytes]
    tokens = batch * query_len
    carried = _carried_shapes(tokens, heads, latent_width, rope_width, dtype, dtype)
    return carried + _partial_shapes(max(ranges), tokens, heads, latent_width)


def decode_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    amax: Tensor,
    *,
    latent_width: int,
    scale: float,
    formats: OperandFormats,
    cu_seqlens_q: Tensor | None = None,
    max_query_len: int = 1,
    sparsity: Sparsity | None = None,
    num_splits: int | None = None,
    records: Tensor | None = None,
    layout: OperandLayout | None = None,
    out_dtype: torch.dtype = torch.float32,
    configuration: Configuration | None = None,
    allocate: Allocate = allocate_scratch,
) -> tuple[Tensor, Tensor]:
    """Attention of few query tokens a sequence over a paged latent cache, in the absorbed form.

    K is the whole latent with its rope part, V the latent part. Query token i of L of a sequence
    sees its first `seq_len - L + i + 1` tokens. Slots past `seq_len` are never read, nor are
    entries of the block table past it. Nothing synchronizes with the host; grids and allocations
    depend on shapes and host numbers only. Therefore a `seq_lens` beyond the capacity of its row of
    `block_table`, max_pages · page_size, cannot be noticed: block ids past the end of the row are
    read then, and whatever they point to. The same holds for block ids that are no page.

    P is quantized against a reference point that rises by powers of two as larger scores are met,
    which changes nothing but blocks far below the row's maximum, as long as no p saturates. With an
    amax of P of at least 1 none does. With one below 1, p above it saturate under the reference
    point of their time, which depends on the tiles before them: results then depend on
    `block_tokens` and `num_splits`, beyond the order of sums.

    Args:
        q: [tokens, heads, latent + rope], absorbed, bf16, fp16 or fp32, last dimension contiguous.
        cache: [pages, page_size, latent + rope], bf16, fp16 or fp32, last dimension contiguous.
        block_table: int32 [batch, max_pages].
        seq_lens: int32 [batch], tokens in the cache, the query's own included; may be 0.
        amax: fp32 [6] on the device, in the order of `AMAX_ENTRIES`; entries of operands that are
            not quantized are ignored.
        latent_width: Features of the latent part.
        scale: Softmax scale.
        formats: Of the operands; those of rope parts may differ from those of latent parts. "none"
            means rounded to the dtype of the cache.
        cu_seqlens_q: int32 [batch + 1], cumulated query lengths; None: one query token each.
        max_query_len: Largest query length; tokens beyond it in a sequence are not computed.
        sparsity: N:M sparsity of the scores, 2:4 or 4:8, applied to every row (whether a decode
            step is sparse at all is the caller's choice).
        num_splits: Ranges into which the context is split; None chooses.
        records: Side cache of operands (see `operand_cache`), or None to quantize on read. What it
            does not hold is read from `cache`, and quantized if its format is not "none".
        layout: What `records` holds.
        out_dtype: Of the output.
        configuration: Of the portable kernel; None chooses, the kernel too. With `records`, at most
            32 rows.
        allocate: Hands out scratch: shapes and dtypes, then the device, to tensors of any content
            that may be reused after the call. `scratch_shapes` says how much is needed.

    Returns:
        Output [tokens, heads, latent] and natural-log LSE fp32 [tokens, heads] (of unquantized P),
        contiguous. Rows that see no token, and tokens of no sequence, are 0 / -inf.

    Raises:
        ConfigError: An argument does not fit.
    """
    _check(
        q,
        cache,
        block_table,
        seq_lens,
        amax,
        latent_width,
        scale,
        cu_seqlens_q,
        max_query_len,
        sparsity,
        num_splits,
        out_dtype,
    )
    if (records is None) != (layout is None):
        raise ConfigError("records and layout of an operand cache must be given together")
    rope_width = q.shape[-1] - latent_width
    k_stored = k_rope_stored = v_stored = False
    if records is not None and layout is not None:
        if (layout.latent_width, layout.rope_width) != (latent_width, rope_width):
            raise ConfigError(
                f"the layout of the operand cache has latent_width {layout.latent_width} and "
                f"rope_width {layout.rope_width}, q and the latent cache {latent_width} and "
                f"{rope_width}; they must be equal"
            )
        check_records(records, cache, layout)
        k_stored, v_stored = layout.k_format != "none", layout.v_format != "none"
        k_rope_stored = rope_width > 0 and layout.rope_format != "none"
        for operand, stored, held, asked in (
            ("k", k_stored, layout.k_format, formats.k),
            ("k_rope", k_rope_stored, layout.rope_format, formats.rope_k),
            ("v", v_stored, layout.v_format, formats.v),
        ):
            if stored and held != asked:
                raise ConfigError(
                    f"the operand cache holds {operand} in {held}, asked for is {asked}; write it "
                    "in the format that is read"
                )
    tokens, heads, _ = q.shape
    batch = seq_lens.shape[0]
    page_size = cache.shape[1]
    new = functools.partial(torch.empty, device=q.device)
    # Where every token belongs to a sequence each result is written.
    covered = cu_seqlens_q is None
    out = new(tokens, heads, latent_width, dtype=out_dtype)
    lse = new(tokens, heads, dtype=torch.float32)
    rows_per_sequence = max_query_len * heads
    if tokens == 0 or batch == 0 or rows_per_sequence <= 0 or block_table.shape[1] == 0:
        return out.zero_(), lse.fill_(-math.inf)

    latent_dtype, rope_dtype, pv_dtype = operand_dtypes(formats, cache.dtype)
    if not rope_width:
        rope_dtype = latent_dtype
    q_formats = {formats.q, formats.rope_q} if rope_width else {formats.q}
    carries = q_formats != {"none"} or {latent_dtype, rope_dtype} != {q.dtype}
    capability, multiprocessors = _device_properties(q.device)
    hopper = None
    if configuration is None:
        q_dtype = latent_dtype if carries else q.dtype
        hopper = _hopper(
            q_dtype,
            cache,
            latent_width,
            rope_width,
            layout,
            formats,
            rows_per_sequence,
            capability,
        )
        element_bytes = max(d.itemsize for d in (latent_dtype, rope_dtype, pv_dtype))
        rope_as_latent = k_stored if not rope_width else k_rope_stored
        source = operand_source(formats, k_stored, v_stored, rope_as_latent)
        configuration = choose_configuration(rows_per_sequence, capability, source, element_bytes)
    elif records is not None and (
        configuration.block_rows > _MAX_ROWS_STORED
        or (v_stored and formats.v == "nvfp4" and configuration.block_tokens < 2 * BLOCK.value)
    ):
        raise ConfigError(
            f"a configuration of {configuration.block_rows} rows and {configuration.block_tokens} "
            f"tokens cannot be used with an operand cache; at most {_MAX_ROWS_STORED} rows and, "
            f"for NVFP4 V, at least {2 * BLOCK.value} tokens can"
        )
    shape = (
        hopper.SHAPE
        if hopper
        else ProgramShape(configuration.block_rows, configuration.block_tokens)
    )
    if num_splits is None:
        capacity = block_table.shape[1] * page_size
        num_splits = shape.splits(batch, rows_per_sequence, capacity, multiprocessors)
    # Hopper kernels always leave ranges to be combined. Groups of V that are not closed they leave
    # to the portable kernel, as one more.
    has_tail = hopper is not None and records is not None
    ranges = num_splits + 1 if has_tail else num_splits
    direct = hopper is None and num_splits == 1

    wanted: list[tuple[tuple[int, ...], torch.dtype]] = []
    if carries:
        wanted += _carried_shapes(tokens, heads, latent_width, rope_width, latent_dtype, rope_dtype)
    if not direct:
        wanted += _partial_shapes(ranges, tokens, heads, latent_width)
    scratch = allocate(wanted, q.device) if wanted else []
    partial_out = partial_top = partial_total = None
    if not direct:
        partial_out, partial_top, partial_total = scratch[-3:]
        if not covered:
            partial_total.zero_()
    elif not covered:
        out.zero_()
        lse.fill_(-math.inf)
    # An empty view would have no address.
    rope_q = q[..., latent_width:] if rope_width else q
    if carries:
        carried, rope_carried = scratch[0], scratch[1 if rope_width else 0]
        rows_per_program = 4
        _quantize_queries[(triton.cdiv(tokens * heads, rows_per_program),)](
            q,
            carried,
            rope_carried,
            amax,
            tokens * heads,
            q.stride(0),
            q.stride(1),
            HEADS=heads,
            LATENT=latent_width,
            ROPE=rope_width,
            ROPE_PADDED=_padded(rope_width),
            FORMAT=FORMAT_CODES[formats.q],
            ROPE_FORMAT=FORMAT_CODES[formats.rope_q],
            ROWS=rows_per_program,
            num_warps=4,
        )
        q, rope_q = carried, rope_carried

    value_constants: dict[str, object] = {
        "P_FORMAT": FORMAT_CODES[formats.p],
        "V_FORMAT": FORMAT_CODES[formats.v],
        "V_STORED": v_stored,
    }
    # What both kernels are told.
    arguments: dict[str, object] = {
        "q": q,
        "rope_q": rope_q,
        "block_table": block_table,
        "seq_lens": seq_lens,
        "cu_seqlens_q": cu_seqlens_q,
        "amax": amax,
        "partial_out": partial_out,
        "partial_top": partial_top,
        "partial_total": partial_total,
        "scale_log2": scale * math.log2(math.e),
        "partial_rows": tokens * heads,
        "sink": sparsity.dense_sink_tokens if sparsity else 0,
        "recent": sparsity.dense_recent_tokens if sparsity else 0,
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "rope_q_token_stride": rope_q.stride(0),
        "rope_q_head_stride": rope_q.stride(1),
        "table_stride": block_table.stride(0),
        "HEADS": heads,
        "PAGE_SIZE": page_size,
        "Q_FORMAT": FORMAT_CODES[formats.q],
        "Q_ROPE_FORMAT": FORMAT_CODES[formats.rope_q],
        "K_FORMAT": FORMAT_CODES[formats.k],
        "K_ROPE_FORMAT": FORMAT_CODES[formats.rope_k],
        "P_FORMAT": FORMAT_CODES[formats.p],
        "M": sparsity.m if sparsity else 0,
    }
    places = (layout or OperandLayout(latent_width, rope_width)).kernel_constants()
    if hopper:
        row_blocks = triton.cdiv(rows_per_sequence, shape.rows)
        grid = (row_blocks * num_splits * batch,)
        launch: dict[str, object] = {
            "row_blocks": row_blocks,
            "num_splits": num_splits,
            "num_warps": hopper.WARPS.value,
        }
        if records is None:
            hopper.split_raw[grid](
                **arguments,
                **launch,
                cache=cache,
                cache_page_stride=cache.stride(0),
                cache_token_stride=cache.stride(1),
            )
        else:
            words = records.view(torch.int32)
            hopper.split_records[grid](
                **arguments,
                **launch,
                **places,
                record_words=words,
                record_page_words=words.stride(0),
                TOKEN_WORDS=words.stride(1),
            )
    if not hopper or has_tail:
        row_blocks = triton.cdiv(rows_per_sequence, configuration.block_rows)
        portable_splits = 1 if hopper else num_splits
        _split[(row_blocks * portable_splits * batch,)](
            **arguments,
            **places,
            cache=cache,
            records=records,
            out=out,
            lse=lse,
            row_blocks=row_blocks,
            num_splits=portable_splits,
            first_partial=ranges - portable_splits,
            cache_page_stride=cache.stride(0),
            cache_token_stride=cache.stride(1),
            record_page_stride=records.stride(0) if records is not None else 0,
            record_token_stride=records.stride(1) if records is not None else 0,
            LATENT=latent_width,
            ROPE=rope_width,
            ROPE_PADDED=_padded(rope_width),
            K_STORED=k_stored,
            K_ROPE_STORED=k_rope_stored,
            V_FORMAT=FORMAT_CODES[formats.v],
            V_STORED=v_stored,
            PV_DTYPE=_TRITON_DTYPES[pv_dtype],
            DIRECT=direct,
            TAIL_ONLY=hopper is not None,
            **configuration.kernel_constants(),
        )
    if not direct:
        # Few ranges: whole rows, so that there are not more programs than needed.
        features = latent_width if ranges <= _FEW_RANGES else min(latent_width, _COMBINE_FEATURES)
        _combine[(tokens * heads * (latent_width // features),)](
            partial_out,
            partial_top,
            partial_total,
            amax,
            out,
            lse,
            ranges,
            tokens * heads,
            LATENT=latent_width,
            FEATURES=features,
            SPLITS=triton.next_power_of_2(ranges),
            CHUNK=min(triton.next_power_of_2(ranges), _COMBINE_CHUNK),
            **value_constants,
            num_warps=4,
        )
    return out, lse


def _hopper(
    q_dtype: torch.dtype,
    cache: Tensor,
    latent_width: int,
    rope_width: int,
    layout: OperandLayout | None,
    formats: OperandFormats,
    rows: int,
    capability: int,
) -> ModuleType | None:
    """`decode_hopper` where it serves these operands and is the faster one.

    `q_dtype` is that of the product, `rows` are query tokens × heads of a sequence.
    """
    if INTERPRETED or capability != 90 or rows <= _HOPPER_MORE_THAN_ROWS:
        return None
    hopper = _import_hopper()
    if hopper is None or q_dtype != torch.bfloat16 or cache.dtype != torch.bfloat16:
        return None
    if (latent_width, rope_width) != (hopper.LATENT.value, hopper.ROPE.value):
        return None
    if layout is None:
        places = (cache.data_ptr() // cache.element_size(), *cache.stride()[:2])
        aligned = all(place % _COPIED_ELEMENTS == 0 for place in places)
        serves = aligned and (formats.k, formats.rope_k, formats.v) == ("none",) * 3
    else:
        serves = (layout.k_format, layout.rope_format, layout.v_format) == ("nvfp4",) * 3
    return hopper if serves else None


# With 16 rows the portable kernel's tiles are full, and a quarter of these would be (H200, 128
# sequences of 16 heads and 8192 tokens: 610 µs against 679).
_HOPPER_MORE_THAN_ROWS = 16
# Copies to shared memory take 16 bytes.
_COPIED_ELEMENTS = 8


@functools.cache
def _import_hopper() -> ModuleType | None:
    """None where Triton has no Gluon, or one that this package does not know."""
    try:
        return importlib.import_module("mla_quant.kernels.decode_hopper")
    except (ImportError, AttributeError):
        return None


_COMBINE_FEATURES = 128
_FEW_RANGES = 4
_COMBINE_CHUNK = 32


def _padded(width: int) -> int:
    return int(triton.next_power_of_2(max(width, NVFP4.block_size or 1)))


__all__: Sequence[str] = (
    "AMAX_ENTRIES",
    "SOURCES",
    "Configuration",
    "OperandFormats",
    "ProgramShape",
    "allocate_scratch",
    "choose_configuration",
    "choose_splits",
    "configurations",
    "decode_attention",
    "operand_dtypes",
    "operand_source",
    "scratch_shapes",
)
