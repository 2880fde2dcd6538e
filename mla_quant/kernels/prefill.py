"""Causal attention over sequences of different lengths with quantized operands (prefill).

Q, K and V are quantized once, before the kernel, unless their format is "none"; P inside it. P's
reference point is the row's running maximum rounded up to an integer, so that its quantization does
not depend on the tiling (see `mla_quant.reference.attention`).

Keys are read in an order that gives each thread whole blocks of P. A tensor core leaves one thread
the columns 8i + 2j + e of a row of scores (j its place among four threads, e = 0, 1); the order of
the keys of a tile is free as long as K and V agree, so column and key are matched such that those
columns are consecutive keys: a block's maximum and scale, and an N:M group, need no exchange
between threads and are computed once.
"""

from __future__ import annotations

import math
from typing import NamedTuple, NoReturn

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_quant.errors import ConfigError
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
    round_e2m1_magnitude,
    round_e4m3_magnitude,
    round_to_dtype,
    validity,
)
from mla_quant.kernels.quantize import quantize_features, quantize_tokens
from mla_quant.kernels.ranking import join_4, largest_2_of_4, largest_4_of_8, split_4
from mla_quant.reference import LOG2_E, RANKED_PATTERNS, Sparsity

_LOG2_E = tl.constexpr(LOG2_E)
_UNSEEN = tl.constexpr(-1.0e30)
"""Reference point of a row that has seen no key; finite, so that differences are no NaN."""


@triton.jit
def tile_order(TOKENS: tl.constexpr):
    """int32 [TOKENS]: the token of a tile that each column of scores stands for."""
    ii: tl.constexpr = 8 if TOKENS >= 64 else TOKENS // 8
    io: tl.constexpr = TOKENS // 8 // ii
    jo: tl.constexpr = TOKENS // BLOCK // io
    ji: tl.constexpr = 4 // jo
    column = tl.arange(0, TOKENS)
    e = column % 2
    inner_j = column // 2 % ji
    outer_j = column // (2 * ji) % jo
    inner_i = column // 8 % ii
    outer_i = column // (8 * ii)
    return (outer_i * jo + outer_j) * BLOCK + (inner_i * ji + inner_j) * 2 + e


@triton.jit
def in_blocks(x):
    """View [rows, tokens in `tile_order`] as [rows, io, ii, jo, ji, 2]; a block is (ii, ji, 2)."""
    rows: tl.constexpr = x.shape[0]
    tokens: tl.constexpr = x.shape[1]
    ii: tl.constexpr = 8 if tokens >= 64 else tokens // 8
    io: tl.constexpr = tokens // 8 // ii
    jo: tl.constexpr = tokens // BLOCK // io
    ji: tl.constexpr = 4 // jo
    return tl.reshape(x, (rows, io, ii, jo, ji, 2))


@triton.jit
def block_maximum(x):
    """Largest value of each block of `in_blocks`, [rows, io, jo]."""
    return tl.max(tl.max(tl.max(x, 5), 4), 2)


@triton.jit
def _maximum_or_nan(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _block_maximum_or_nan(x):
    """As `block_maximum`, and NaN where a block has one."""
    x = tl.reduce(x, 5, _maximum_or_nan)
    return tl.reduce(tl.reduce(x, 4, _maximum_or_nan), 2, _maximum_or_nan)


@triton.jit
def _block_sum(x):
    return tl.sum(tl.sum(tl.sum(x, 5), 4), 2)


@triton.jit
def per_block(x):
    """Shape [rows, io, jo] to broadcast against `in_blocks`."""
    return tl.expand_dims(tl.expand_dims(tl.expand_dims(x, 2), 4), 5)


@triton.jit
def quantize_p_blocks(p, block_max, inverse, inverse_block, DTYPE: tl.constexpr):
    """NVFP4 elements times block scale of P in `DTYPE`, in the shape of `in_blocks`.

    Args:
        p: Probabilities, in the shape of `in_blocks`.
        block_max: Largest of each block, [rows, io, jo].
        inverse: fp32(quant_max / amax).
        inverse_block: fp32(inverse / 6).
        DTYPE: bfloat16, float16 or float32.
    """
    scale = round_e4m3_magnitude(tl.minimum(block_max * inverse_block, E4M3_MAX))
    factor = tl.where(scale > 0, tl.div_rn(inverse, scale), 0.0)
    scaled = p * per_block(factor)
    # Beyond 6 only where a scale is subnormal, or P exceeds its amax.
    if tl.bfloat16 == DTYPE and not INTERPRETED:
        # Clamp and scale pairs in bfloat16, which holds all of it exactly: half the instructions.
        bits = scale.to(tl.int32, bitcast=True)
        pair = per_block(bits | (bits >> 16)) + tl.zeros(p.shape, tl.int32)
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b32 x, six, zero;
                mov.b32 six, 0x40C040C0;
                mov.b32 zero, 0x80008000;
                cvt.rn.bf16x2.f32 x, $2, $1;
                min.NaN.bf16x2 x, x, six;
                fma.rn.bf16x2 $0, x, $3, zero;
            }
            """,
            "=r,r,r,r,r",
            [round_e2m1_magnitude(scaled), pair],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        clamped = tl.minimum(scaled, E2M1_MAX, propagate_nan=tl.PropagateNan.ALL)
        return (round_e2m1_magnitude(clamped) * per_block(scale)).to(DTYPE)


@triton.jit
def only_largest(s, M: tl.constexpr):
    """Scores that M/2 : M sparsity keeps and -inf for the others, in the shape of `in_blocks`.

    Args:
        s: Scores in the shape of `in_blocks`, -inf where not attended to.
        M: 4 or 8.
    """
    rows: tl.constexpr = s.shape[0]
    io: tl.constexpr = s.shape[1]
    ii: tl.constexpr = s.shape[2]
    jo: tl.constexpr = s.shape[3]
    ji: tl.constexpr = s.shape[4]
    # Tokens of a block are (ii, ji, e): a group of M is the last M / 2 / ji of ii, with ji and e.
    gi: tl.constexpr = M // 2 // ji
    x = tl.reshape(s, (rows, io, ii // gi, gi, jo, ji, 2))
    x = tl.permute(x, (0, 1, 2, 4, 3, 5, 6))
    if M == 4:
        x = tl.reshape(x, (rows, io, ii // gi, jo, 2, 2))
        a, b, c, d = split_4(x)
        a, b, c, d = largest_2_of_4(a, b, c, d)
        x = join_4(a, b, c, d)
    else:
        x = tl.reshape(x, (rows, io, ii // gi, jo, 2, 2, 2))
        first, last = tl.split(tl.permute(x, (0, 1, 2, 3, 5, 6, 4)))
        a, b, c, d = split_4(first)
        e, f, g, h = split_4(last)
        a, b, c, d, e, f, g, h = largest_4_of_8(a, b, c, d, e, f, g, h)
        x = tl.permute(tl.join(join_4(a, b, c, d), join_4(e, f, g, h)), (0, 1, 2, 3, 6, 4, 5))
    x = tl.reshape(x, (rows, io, ii // gi, jo, gi, ji, 2))
    x = tl.permute(x, (0, 1, 2, 4, 3, 5, 6))
    return tl.reshape(x, (rows, io, ii, jo, ji, 2))


@triton.jit
def _add_tile(
    acc,
    total,
    reference,
    q_low,
    q_high,
    k,
    v,
    start,
    stride_k,
    stride_v,
    keys,
    limits,
    positions,
    key_start,
    scale,
    inverse,
    inverse_block,
    sink_tokens,
    recent_tokens,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_PADDED: tl.constexpr,
    P_FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ORDERED: tl.constexpr,
    TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add one tile of keys. MASKED: some rows may not read some of them."""
    place = tl.arange(0, TOKENS)
    if ORDERED:
        place = tile_order(TOKENS)
    token = start + place
    if MASKED:
        # A row that does not exist is read as one that does; its scores are masked.
        row = tl.maximum(tl.minimum(token, keys - 1), 0).to(tl.int64)
        k_rows = k + row[None, :] * stride_k
        v_rows = v + row[:, None] * stride_v
    else:
        # Offsets within a tile are the same for all tiles: they stay in registers.
        first = tl.cast(start, tl.int64)
        k_rows = k + first * stride_k + (place * stride_k)[None, :]
        v_rows = v + first * stride_v + (place * stride_v)[:, None]
    low = tl.arange(0, LOW)[:, None]
    if LOW <= WIDTH:
        k_low = tl.load(k_rows + low)
    else:
        k_low = tl.load(k_rows + low, mask=low < WIDTH, other=0.0)
    s = dot(q_low, k_low, tl.zeros((q_low.shape[0], TOKENS), tl.float32))
    if HIGH > 0:
        high = LOW + tl.arange(0, HIGH)[:, None]
        if LOW + HIGH == WIDTH:
            k_high = tl.load(k_rows + high)
        else:
            k_high = tl.load(k_rows + high, mask=high < WIDTH, other=0.0)
        s = dot(q_high, k_high, s)
    if MASKED:
        seen = (token[None, :] < limits[:, None]) & (token >= 0)[None, :]
        s = tl.where(seen, s, float("-inf"))
    if P_FORMAT == FORMAT_NVFP4:
        # A block's largest score is kept, so what is dropped below does not change it.
        if GROUP > 0:
            score_max = _block_maximum_or_nan(in_blocks(s))
        else:
            score_max = block_maximum(in_blocks(s))
    if GROUP > 0:
        largest = tl.reshape(only_largest(in_blocks(s), GROUP), s.shape)
        if MASKED:
            position = key_start + token
            distance = positions[:, None] - position[None, :]
            dense = (distance >= 0) & (distance < recent_tokens)
            dense = dense | (position < sink_tokens)[None, :]
            largest = tl.where(dense, s, largest)
        if P_FORMAT != FORMAT_NVFP4:
            largest = tl.where(s != s, s, largest)
        s = largest
    if P_FORMAT == FORMAT_NVFP4:
        row_max = tl.max(tl.max(score_max, 2), 1)
    else:
        row_max = tl.max(s, 1)
    new_reference = tl.maximum(reference, tl.ceil(row_max * scale))
    shrink = tl.exp2(reference - new_reference)
    p = tl.exp2(s * scale - new_reference[:, None])
    if P_FORMAT == FORMAT_NVFP4:
        blocks = in_blocks(p)
        total = total * shrink[:, None, None] + _block_sum(blocks)
        # The same expression as for P, which is monotone: the largest P, bit for bit.
        p_max = tl.exp2(score_max * scale - new_reference[:, None, None])
        if GROUP > 0:
            # NaN loses comparisons: one that was dropped still makes its row NaN.
            total += p_max - p_max
        quantized = quantize_p_blocks(blocks, p_max, inverse, inverse_block, v.dtype.element_ty)
        carrier = tl.reshape(quantized, p.shape)
    else:
        total = total * shrink + tl.sum(p, 1)
        if P_FORMAT == FORMAT_FP8:
            scaled = tl.minimum(p * inverse, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
            carrier = round_e4m3_magnitude(scaled).to(v.dtype.element_ty)
        else:
            carrier = round_to_dtype(p, v.dtype.element_ty)
    feature = tl.arange(0, V_PADDED)[None, :]
    if V_WIDTH == V_PADDED:
        values = tl.load(v_rows + feature)
    else:
        values = tl.load(v_rows + feature, mask=feature < V_WIDTH, other=0.0)
    acc = dot(carrier, values, acc * shrink[:, None])
    return acc, total, new_reference


@triton.jit(
    # What differs from call to call: a variant each would be compiled while users wait.
    do_not_specialize=["row_blocks", "total_queries", "sink_tokens", "recent_tokens"],
    do_not_specialize_on_alignment=[
        "cu_seqlens_q",
        "cu_seqlens_k",
        "key_starts",
        "query_starts",
        "lse",
    ],
)
def _prefill_kernel(
    q,
    k,
    v,
    out,
    lse,
    amax,
    cu_seqlens_q,
    cu_seqlens_k,
    key_starts,
    query_starts,
    heads,
    heads_per_k,
    row_blocks,
    total_queries,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    softmax_scale,
    sink_tokens,
    recent_tokens,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_PADDED: tl.constexpr,
    Q_FORMAT: tl.constexpr,
    K_FORMAT: tl.constexpr,
    P_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_KEY_STARTS: tl.constexpr,
    HAS_QUERY_STARTS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program: ROWS queries of one head of one sequence."""
    program = tl.program_id(0)
    # The longest rows of a head first: they take the longest.
    row_block = row_blocks - 1 - program % row_blocks
    head = (program // row_blocks) % heads
    sequence = program // row_blocks // heads
    q_first = tl.load(cu_seqlens_q + sequence)
    queries = tl.load(cu_seqlens_q + sequence + 1) - q_first
    first_row = row_block * ROWS
    if first_row < queries:
        k_first = tl.load(cu_seqlens_k + sequence)
        keys = tl.load(cu_seqlens_k + sequence + 1) - k_first
        key_start = 0
        if HAS_KEY_STARTS:
            key_start = tl.load(key_starts + sequence)
        query_start = key_start + keys - queries
        if HAS_QUERY_STARTS:
            query_start = tl.load(query_starts + sequence)
        shift = key_start % TOKENS
        row = first_row + tl.arange(0, ROWS)
        live = row < queries
        positions = query_start + row
        if CAUSAL:
            limits = tl.minimum(positions - key_start + 1, keys)
            last = tl.minimum(first_row + ROWS, queries) - 1
            end = tl.minimum(query_start + last - key_start + 1, keys)
            whole = tl.minimum(query_start + first_row - key_start + 1, keys)
        else:
            limits = tl.zeros((ROWS,), tl.int32) + keys
            end = keys
            whole = keys
        if GROUP > 0:
            whole = tl.minimum(whole, query_start + first_row - recent_tokens + 1 - key_start)
            lead = tl.cdiv(
                tl.maximum(sink_tokens - key_start + shift, tl.minimum(shift, 1)), TOKENS
            )
            lead = tl.maximum(lead, 0)
        else:
            lead = tl.minimum(shift, 1)
        tiles = tl.cdiv(tl.maximum(end + shift, 0), TOKENS)
        tiles = tl.where(end > 0, tiles, 0)
        lead = tl.minimum(lead, tiles)
        whole_tiles = tl.maximum(lead, tl.maximum(whole + shift, 0) // TOKENS)
        whole_tiles = tl.minimum(whole_tiles, tiles)

        g_q = global_scale(tl.load(amax), Q_FORMAT)
        g_k = global_scale(tl.load(amax + 1), K_FORMAT)
        g_v = global_scale(tl.load(amax + 2), V_FORMAT)
        p_amax = tl.load(amax + 3)
        scale = g_q * g_k * (softmax_scale * _LOG2_E)
        out_scale = g_v
        inverse = 1.0
        inverse_block = 1.0
        if P_FORMAT != FORMAT_NONE:
            if P_FORMAT == FORMAT_FP8:
                inverse = tl.div_rn(FP8_QUANT_MAX, p_amax)
            else:
                inverse = tl.div_rn(NVFP4_QUANT_MAX, p_amax)
                inverse_block = tl.div_rn(inverse, E2M1_MAX)
            out_scale = g_v * tl.div_rn(1.0, inverse) * validity(p_amax)

        q_rows = q + (q_first + row).to(tl.int64)[:, None] * stride_qt + head * stride_qh
        low = tl.arange(0, LOW)[None, :]
        q_low = tl.load(q_rows + low, mask=live[:, None] & (low < WIDTH), other=0.0)
        q_high = q_low
        if HIGH > 0:
            high = LOW + tl.arange(0, HIGH)[None, :]
            q_high = tl.load(q_rows + high, mask=live[:, None] & (high < WIDTH), other=0.0)
        kv_head = head // heads_per_k
        k_head = k + k_first.to(tl.int64) * stride_kt + kv_head * stride_kh
        v_head = v + k_first.to(tl.int64) * stride_vt + kv_head * stride_vh

        acc = tl.zeros((ROWS, V_PADDED), tl.float32)
        reference = tl.full((ROWS,), _UNSEEN, tl.float32)
        if P_FORMAT == FORMAT_NVFP4:
            # Partial sums stay with the threads that own the blocks until the end.
            total = block_maximum(in_blocks(tl.zeros((ROWS, TOKENS), tl.float32)))
        else:
            total = tl.zeros((ROWS,), tl.float32)
        ordered: tl.constexpr = P_FORMAT == FORMAT_NVFP4 or GROUP > 0
        for tile in range(0, lead):
            acc, total, reference = _add_tile(
                acc, total, reference, q_low, q_high, k_head, v_head, tile * TOKENS - shift,
                stride_kt, stride_vt, keys, limits, positions, key_start, scale, inverse,
                inverse_block, sink_tokens, recent_tokens, LOW, HIGH, WIDTH, V_WIDTH, V_PADDED,
                P_FORMAT, GROUP, ordered, TOKENS, True,
            )  # fmt: skip
        for tile in range(lead, whole_tiles):
            acc, total, reference = _add_tile(
                acc, total, reference, q_low, q_high, k_head, v_head, tile * TOKENS - shift,
                stride_kt, stride_vt, keys, limits, positions, key_start, scale, inverse,
                inverse_block, sink_tokens, recent_tokens, LOW, HIGH, WIDTH, V_WIDTH, V_PADDED,
                P_FORMAT, GROUP, ordered, TOKENS, False,
            )  # fmt: skip
        for tile in range(whole_tiles, tiles):
            acc, total, reference = _add_tile(
                acc, total, reference, q_low, q_high, k_head, v_head, tile * TOKENS - shift,
                stride_kt, stride_vt, keys, limits, positions, key_start, scale, inverse,
                inverse_block, sink_tokens, recent_tokens, LOW, HIGH, WIDTH, V_WIDTH, V_PADDED,
                P_FORMAT, GROUP, ordered, TOKENS, True,
            )  # fmt: skip
        if P_FORMAT == FORMAT_NVFP4:
            total = tl.sum(tl.sum(total, 2), 1)

        out_rows = out + ((q_first + row).to(tl.int64)[:, None] * heads + head) * V_WIDTH
        feature = tl.arange(0, V_PADDED)[None, :]
        result = acc * tl.where(total > 0, tl.div_rn(out_scale, total), 0.0)[:, None]
        result = tl.where((total == total)[:, None], result, float("nan"))
        tl.store(
            out_rows + feature,
            round_to_dtype(result, out.dtype.element_ty),
            mask=live[:, None] & (feature < V_WIDTH),
        )
        log2_sum = tl.where(total > 0, reference + tl.log2(total), float("-inf"))
        log2_sum = tl.where(total == total, log2_sum, float("nan"))
        tl.store(
            lse + head.to(tl.int64) * total_queries + q_first + row, log2_sum / _LOG2_E, mask=live
        )


class PrefillConfig(NamedTuple):
    """How the kernel is tiled.

    Attributes:
        rows: Queries of a program.
        tokens: Keys of a tile.
        num_warps: Warps of a program.
        num_stages: Stages of the software pipeline.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


def prefill_configs(
    capability: tuple[int, int], width: int, v_width: int, itemsize: int = 2
) -> list[PrefillConfig]:
    """Tilings that fit a GPU, the one to use first.

    Args:
        capability: Compute capability.
        width: Of Q and K.
        v_width: Of V.
        itemsize: Of the carriers, in bytes.
    """
    low, high = _split_width(width)
    padded, v_padded = low + high, max(16, triton.next_power_of_2(v_width))
    candidates = [
        PrefillConfig(128, 64, 8, 3),
        PrefillConfig(128, 64, 8, 2),
        PrefillConfig(64, 64, 4, 2),
        PrefillConfig(64, 32, 4, 2),
        PrefillConfig(32, 32, 4, 1),
    ]
    if itemsize > 2:  # fp32 products run without tensor cores: small tiles keep them in registers
        candidates = candidates[3:]

    def needed(c: PrefillConfig) -> int:
        tile = c.tokens * (padded + v_padded) * itemsize
        return int(c.num_stages * tile + c.rows * padded * itemsize)

    fitting = [c for c in candidates if needed(c) + 4096 <= shared_bytes(capability)]
    return fitting or candidates[-1:]


def _split_width(width: int) -> tuple[int, int]:
    """A width as two powers of two of at least 16 (the second may be 0), together not less."""
    low = max(16, 1 << (width.bit_length() - 1))
    rest = width - low
    return low, 0 if rest <= 0 else max(16, triton.next_power_of_2(rest))


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of unquantized operands."""


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    amax: Tensor,
    key_starts: Tensor | None,
    query_starts: Tensor | None,
    scale: float,
    formats: tuple[str, ...],
    sparsity: Sparsity | None,
    qk_segments: tuple[int, int] | None,
) -> None:
    """Refuse what the kernel cannot take.

    Raises:
        ConfigError: Says which argument, what was found and what is allowed.
    """

    def refuse(what: str, found: object, allowed: str) -> NoReturn:
        raise ConfigError(f"prefill attention: {what} is {found}; it must be {allowed}")

    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            refuse(f"shape of {name}", tuple(x.shape), "[tokens, heads, width]")
        if x.dtype != q.dtype or x.dtype not in DTYPES:
            refuse(f"dtype of {name}", x.dtype, "bfloat16, float16 or float32, the same for all")
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            refuse(f"stride of {name}'s last dimension", x.stride(-1), "1: use .contiguous()")
        if x.device != q.device:
            refuse(f"device of {name}", x.device, f"that of q, {q.device}")
    if k.shape[-1] != q.shape[-1]:
        refuse("width of k", k.shape[-1], f"that of q, {q.shape[-1]}")
    if v.shape[:2] != k.shape[:2]:
        refuse("[tokens, heads] of v", tuple(v.shape[:2]), f"those of k, {tuple(k.shape[:2])}")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        refuse("number of heads of k", k.shape[1], f"a divisor of q's, {q.shape[1]}")
    sequences = cu_seqlens_q.numel() - 1
    given = {"cu_seqlens_q": (cu_seqlens_q, sequences + 1)}
    given["cu_seqlens_k"] = (cu_seqlens_k, sequences + 1)
    for name, starts in (("key_starts", key_starts), ("query_starts", query_starts)):
        if starts is not None:
            given[name] = (starts, sequences)
    for name, (x, count) in given.items():
        if x.dtype != torch.int32 or x.shape != (count,) or x.device != q.device:
            refuse(name, f"{x.dtype} {tuple(x.shape)} on {x.device}", f"int32 ({count},) beside q")
        if not x.is_contiguous():
            refuse(f"stride of {name}", x.stride(), "1: use .contiguous()")
    if amax.dtype != torch.float32 or amax.shape != (4,) or amax.device != q.device:
        refuse("amax", f"{amax.dtype} {tuple(amax.shape)} on {amax.device}", "fp32 (4,) beside q")
    if not amax.is_contiguous():
        refuse("stride of amax", amax.stride(), "1: use .contiguous()")
    for name, fmt in zip("qkpv", formats, strict=True):
        if fmt not in FORMAT_CODES:
            refuse(f"{name}_format", repr(fmt), f"one of {', '.join(FORMAT_CODES)}")
    if not (math.isfinite(scale) and scale > 0):
        refuse("scale", scale, "a finite number above 0")
    if sparsity is not None and (sparsity.n, sparsity.m) not in RANKED_PATTERNS:
        allowed = " or ".join(f"{n}:{m}" for n, m in RANKED_PATTERNS)
        refuse("sparsity", f"{sparsity.n}:{sparsity.m}", allowed)
    if qk_segments is not None and sum(qk_segments) != q.shape[-1]:
        refuse("sum of qk_segments", sum(qk_segments), f"the width of q, {q.shape[-1]}")


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    scale: float,
    amax: Tensor,
    q_format: str = "none",
    k_format: str = "none",
    p_format: str = "none",
    v_format: str = "none",
    causal: bool = True,
    sparsity: Sparsity | None = None,
    qk_segments: tuple[int, int] | None = None,
    key_starts: Tensor | None = None,
    query_starts: Tensor | None = None,
    dtype: torch.dtype | None = None,
    config: PrefillConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of packed sequences, with Q, K, P and V quantized as asked.

    Args:
        q: [queries, heads, width], fp32, fp16 or bf16; the last dimension contiguous.
        k: [keys, heads or a divisor of them, width], likewise.
        v: [keys, heads as `k`, v_width], likewise.
        cu_seqlens_q: int32 [sequences + 1]: where each sequence's queries begin.
        cu_seqlens_k: int32 [sequences + 1]: where each sequence's keys begin.
        max_seqlen_q: Queries of the longest sequence, or more.
        max_seqlen_k: Keys of the longest sequence, or more.
        scale: Softmax scale, above 0.
        amax: fp32 [4] on the device: of Q, K, V and P (P: 1 unless calibrated).
        q_format: "none", "fp8" or "nvfp4".
        k_format: Likewise.
        p_format: Likewise.
        v_format: Likewise.
        causal: Mask keys after the query; the last query stands at the last key unless
            `query_starts` says otherwise.
        sparsity: N:M sparsity of the scores, 2:4 or 4:8.
        qk_segments: Widths of the nope and rope part of Q and K, whose border blocks never cross.
        key_starts: int32 [sequences]: position of the first key in its sequence; None: 0.
        query_starts: int32 [sequences]: position of the first query; None: the queries are the
            last positions.
        dtype: Of the output; None: that of `q`.
        config: Tiling; None: chosen for the GPU.

    Returns:
        Output [queries, heads, v_width] and natural-log LSE fp32 [heads, queries]. Rows without a
        key give 0 and -inf.

    Raises:
        ConfigError: An argument does not fit.
    """
    _check(
        q, k, v, cu_seqlens_q, cu_seqlens_k, amax, key_starts, query_starts,
        scale, (q_format, k_format, p_format, v_format), sparsity, qk_segments,
    )  # fmt: skip
    queries, heads, width = q.shape
    v_width = v.shape[-1]
    out = torch.empty(queries, heads, v_width, dtype=dtype or q.dtype, device=q.device)
    lse = torch.empty(heads, queries, dtype=torch.float32, device=q.device)
    sequences = len(cu_seqlens_q) - 1
    if not out.numel() or not max_seqlen_q:
        return out, lse
    if not max_seqlen_k:
        return out.zero_(), lse.fill_(-torch.inf)
    # bfloat16 holds every quantized value exactly; beside an unquantized operand, its own dtype.
    qk_dtype = q.dtype if "none" in (q_format, k_format) else torch.bfloat16
    pv_dtype = q.dtype if "none" in (p_format, v_format) else torch.bfloat16
    if q_format != "none":
        q = quantize_features(q, q_format, amax[:1], qk_dtype, segments=qk_segments)
    if k_format != "none":
        k = quantize_features(k, k_format, amax[1:2], qk_dtype, segments=qk_segments)
    if v_format != "none":
        v = quantize_tokens(
            v, v_format, amax[2:3], pv_dtype, cu_seqlens_k, max_seqlen_k, key_starts
        )
    if config is None:
        capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (8, 0)
        itemsize = max(qk_dtype.itemsize, pv_dtype.itemsize)
        config = prefill_configs(capability, width, v_width, itemsize)[0]
    low, high = _split_width(width)
    row_blocks = triton.cdiv(max_seqlen_q, config.rows)
    _prefill_kernel[(row_blocks * heads * sequences,)](
        q,
        k,
        v,
        out,
        lse,
        amax,
        cu_seqlens_q,
        cu_seqlens_k,
        cu_seqlens_k if key_starts is None else key_starts,
        cu_seqlens_q if query_starts is None else query_starts,
        heads,
        heads // k.shape[1],
        row_blocks,
        queries,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        scale,
        sparsity.dense_sink_tokens if sparsity else 0,
        sparsity.dense_recent_tokens if sparsity else 0,
        LOW=low,
        HIGH=high,
        WIDTH=width,
        V_WIDTH=v_width,
        V_PADDED=max(16, triton.next_power_of_2(v_width)),
        Q_FORMAT=FORMAT_CODES[q_format],
        K_FORMAT=FORMAT_CODES[k_format],
        P_FORMAT=FORMAT_CODES[p_format],
        V_FORMAT=FORMAT_CODES[v_format],
        CAUSAL=causal,
        GROUP=sparsity.m if sparsity else 0,
        HAS_KEY_STARTS=key_starts is not None,
        HAS_QUERY_STARTS=query_starts is not None,
        ROWS=config.rows,
        TOKENS=config.tokens,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out, lse
