"""Device functions and kernels of absorbed MLA decode, in portable Triton.

One program computes ROWS rows (query tokens × heads of one sequence) over one range of the context,
in tiles of TOKENS tokens at absolute positions. Everything that depends on the latent's width is
done in two feature halves, because that is how side-cache records hold codes.

The order of tokens inside a tile. An accumulator of a matrix unit gives a thread the columns
8i + 2j + e of a row, j being its place among four and e 0 or 1. If columns were tokens in order, a
block of 16 would be spread over threads and its maximum would cost an exchange per element. So
column (((io · INNER + ii) · ACROSS + a) · PAIR + je) holds token (io · ACROSS + a) · 16 +
((je // 2) · INNER + ii) · 2 + je % 2 of the tile, PAIR being 16 // INNER: `a` counts threads and
warps, the rest lies within a thread as far as INNER allows. Rows of K and V are read in this order,
which costs nothing, and no result depends on it beyond the order of a sum.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from mla_quant.kernels.numerics import (
    BLOCK,
    E2M1_MAX,
    E4M3_MAX,
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
    load_k,
    load_v_fp8,
    load_v_groups,
    share_tokens,
    token_rows,
)
from mla_quant.kernels.ranking import join_4, largest_2_of_4, largest_4_of_8, split_4
from mla_quant.kernels.record_fields import load_features, load_outer

_LN_2 = tl.constexpr(math.log(2.0))
_SMALLEST_NORMAL_FP32 = tl.constexpr(2.0**-126)


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
def only_largest(
    score,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    INNER: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """The M / 2 largest scores of each group of M tokens, -inf for the others, [ROWS, TOKENS].

    The low bits of a token within its block are e, then those of ii, then those of ji.
    """
    OUTER: tl.constexpr = TOKENS // BLOCK // ACROSS
    JI: tl.constexpr = BLOCK // INNER // 2
    if M == 4:
        x = tl.reshape(score, [ROWS, OUTER, INNER // 2, 2, ACROSS, JI, 2])
        a, b, c, d = split_4(tl.permute(x, [0, 1, 2, 4, 5, 3, 6]))
        a, b, c, d = largest_2_of_4(a, b, c, d)
        x = join_4(a, b, c, d)
        x = tl.permute(x, [0, 1, 2, 5, 3, 4, 6])
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
        a, b, c, d, e, f, g, h = largest_4_of_8(a, b, c, d, e, f, g, h)
        x = tl.join(join_4(a, b, c, d), join_4(e, f, g, h))
        if INNER >= 4:
            x = tl.permute(x, [0, 1, 2, 7, 5, 3, 4, 6])
        else:
            x = tl.permute(x, [0, 1, 4, 2, 3, 6, 5])
    return tl.reshape(x, [ROWS, TOKENS])


# --- operands that are quantized on read


@triton.jit
def _load_rows(
    cache,
    rows,
    present,
    outer,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    FIELDS: tl.constexpr,
    RAW_DTYPE: tl.constexpr,
):
    """[rows, WIDTH] of the latent from feature FIRST on, 0 where not present.

    FIELDS: of records that the cache holds instead of raw latents; they are read in RAW_DTYPE.
    """
    feature = (FIRST + tl.arange(0, WIDTH))[None, :]
    if FIELDS is not None:
        SEGMENT: tl.constexpr = FIELDS.latent
        base = cache + rows
        own = load_outer(base, 0, present, SEGMENT)
        if SEGMENT.outer_at >= 0:
            own = own[:, None]
        mask = present[:, None] & (feature >= 0)
        x = load_features(base[:, None], 0, feature, mask, own, SEGMENT, RAW_DTYPE)
        return round_to_dtype(x * outer, RAW_DTYPE)
    elif MASKED:
        return tl.load(cache + rows[:, None] + feature, mask=present[:, None], other=0.0)
    else:
        return tl.load(cache + rows[:, None] + feature)


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
    cache,
    rows,
    present,
    outer,
    g,
    unit,
    TOKENS: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    ACROSS: tl.constexpr,
    DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
    FIELDS: tl.constexpr,
    RAW_DTYPE: tl.constexpr,
):
    """NVFP4 V in groups of 16 tokens, [TOKENS, WIDTH] by column, times `unit`.

    `rows` are in the order of `_token_of_group_row`.
    """
    x = _load_rows(cache, rows, present, outer, FIRST, WIDTH, MASKED, FIELDS, RAW_DTYPE)
    x = tl.reshape(x, [BLOCK, TOKENS // BLOCK, WIDTH]).to(tl.float32)
    x = round_to_dtype(quantize_nvfp4(x, g, 0) * unit, DTYPE)
    return _group_rows_to_columns(x, TOKENS, WIDTH, INNER, ACROSS)


@triton.jit(do_not_specialize=["rows"])
def quantize_queries(
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
    cache_outer,
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
    FIELDS: tl.constexpr,
    STORED_DTYPE: tl.constexpr,
    RAW_DTYPE: tl.constexpr,
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
        raw_lower = _load_rows(
            cache, rows, present, cache_outer, 0, HALF, MASKED, FIELDS, RAW_DTYPE
        )
        raw_upper = _load_rows(
            cache, rows, present, cache_outer, HALF, HALF, MASKED, FIELDS, RAW_DTYPE
        )
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
            if FIELDS is not None:
                PART: tl.constexpr = FIELDS.rope
                mask = present[:, None] & (rope < ROPE)[None, :]
                k_rope = load_features(
                    (cache + rows)[:, None], 0, rope[None, :], mask, 1.0, PART, STORED_DTYPE
                )
                k_rope = round_to_dtype(k_rope, RAW_DTYPE)
            elif MASKED:
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
        largest = only_largest(score, M, ROWS, TOKENS, INNER, ACROSS)
        near = query_position[:, None] - positions[None, :] < recent
        # NaN loses comparisons, and must not be dropped for that.
        dense = near | (positions < sink)[None, :] | (score != score)
        score = tl.where(dense, score, largest)

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
                cache_outer,
                v_g,
                v_unit,
                TOKENS,
                0,
                HALF,
                INNER,
                ACROSS,
                PV_DTYPE,
                MASKED,
                FIELDS,
                RAW_DTYPE,
            )
            v_upper = _quantize_tokens(
                cache,
                group_rows,
                group_present,
                cache_outer,
                v_g,
                v_unit,
                TOKENS,
                HALF,
                HALF,
                INNER,
                ACROSS,
                PV_DTYPE,
                MASKED,
                FIELDS,
                RAW_DTYPE,
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
    ],
    do_not_specialize_on_alignment=["block_table", "seq_lens", "cu_seqlens_q"],
)
def split_portable(
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
    cache_outer,
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
    FIELDS: tl.constexpr = None,
    STORED_DTYPE: tl.constexpr = None,
    RAW_DTYPE: tl.constexpr = None,
):
    """ROWS rows of one sequence over one range of its context.

    DIRECT: there is one range; write results. Otherwise write partial sums with their reference
    points, integers, so that combining them scales by exact powers of two.
    TAIL_ONLY: only groups of V that records do not hold yet, as the range `first_partial`.
    FIELDS: `RecordFields` of what the cache holds instead of raw latents, whose 16-bit parts are
    STORED_DTYPE; they are read in RAW_DTYPE, times `cache_outer`.
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
            cache_outer,
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
                    FIELDS,
                    STORED_DTYPE,
                    RAW_DTYPE,
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
                    FIELDS,
                    STORED_DTYPE,
                    RAW_DTYPE,
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
                    FIELDS,
                    STORED_DTYPE,
                    RAW_DTYPE,
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
def combine_ranges(
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
