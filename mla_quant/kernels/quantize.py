"""Quantizing Q, K and V once, before attention reads them.

The results are carriers: `element · block_scale` without the global scale, exact in bfloat16 and
float16 (see `numerics`). An operand whose amax is 0 becomes zeros, one with a negative or NaN amax
NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_quant.formats import NVFP4
from mla_quant.kernels.numerics import (
    BLOCK,
    FORMAT_CODES,
    FORMAT_FP8,
    global_scale,
    quantize_fp8,
    quantize_nvfp4,
    scale_is_ordinary,
    validity,
)


class FeatureTiling(NamedTuple):
    """How a program of `quantize_features` is cut; `eviction`: what its loads ask of L2."""

    blocks: int
    warps: int
    eviction: str = ""


class TokenTiling(NamedTuple):
    """How a program of `quantize_tokens` is cut: a thread has `vector` neighbouring columns."""

    columns: int
    vector: int
    warps: int
    eviction: str = "evict_first"


FEATURE_TILING = FeatureTiling(256, 4)
TOKEN_TILING = TokenTiling(128, 4, 1)


@triton.jit
def _carrier(x, amax, FORMAT: tl.constexpr, AXIS: tl.constexpr, ORDINARY: tl.constexpr):
    """Carrier of fp32 `x` with blocks as axis `AXIS`; `amax` broadcasts against `x`."""
    g = global_scale(amax, FORMAT)
    if ORDINARY:  # Which an amax that is not above 0 never is.
        factor = 1.0
    else:
        factor = validity(amax)
    if FORMAT == FORMAT_FP8:
        value = quantize_fp8(x, g, ORDINARY) * factor
    else:
        value = quantize_nvfp4(x, g, AXIS, ORDINARY, factor)
    return value


@triton.jit
def _feature_blocks(
    x,
    out,
    first,
    number,
    total,
    stride_token,
    stride_head,
    HEADS: tl.constexpr,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    BLOCKS_0: tl.constexpr,
    BLOCKS_1: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
):
    """Blocks `first + number` of 16 features, counted along rows of tokens · heads.

    Where each element is and goes, whether it exists, and whether the block is of the second part.
    """
    lane = tl.arange(0, BLOCK)[None, :]
    row = (first + number) // (BLOCKS_0 + BLOCKS_1)
    block = (first + number) % (BLOCKS_0 + BLOCKS_1)
    second = block >= BLOCKS_0
    start = tl.where(second, WIDTH_0 + (block - BLOCKS_0) * BLOCK, block * BLOCK)
    end = tl.where(second, WIDTH_0 + WIDTH_1, WIDTH_0)
    feature = start[:, None] + lane
    exists = (first + number < total)[:, None]
    if not WHOLE:
        exists = exists & (feature < end[:, None])
    wide_row = row.to(tl.int64)
    linear = first.to(tl.int64) * BLOCK + (number[:, None] * BLOCK + lane)
    if CONTIGUOUS and WHOLE:
        source = x + linear
    elif EVEN_ROWS:
        source = x + (wide_row * stride_head)[:, None] + feature
    else:
        at = (wide_row // HEADS) * stride_token + (wide_row % HEADS) * stride_head
        source = x + at[:, None] + feature
    if WHOLE:
        target = out + linear
    else:
        target = out + (wide_row * (WIDTH_0 + WIDTH_1))[:, None] + feature
    return source, target, exists, second[:, None]


@triton.jit(do_not_specialize=["total"])
def _quantize_features_kernel(
    x,
    out,
    amax,
    total,
    stride_token,
    stride_head,
    HEADS: tl.constexpr,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    BLOCKS_0: tl.constexpr,
    BLOCKS_1: tl.constexpr,
    WHOLE: tl.constexpr,
    SEPARATE_AMAX: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    FULL: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """One program: BLOCKS of the `total` blocks of 16 features; FULL: of a program all exist."""
    first = tl.program_id(0) * BLOCKS
    source, target, exists, second = _feature_blocks(
        x, out, first, tl.arange(0, BLOCKS), total, stride_token, stride_head,
        HEADS, WIDTH_0, WIDTH_1, BLOCKS_0, BLOCKS_1, WHOLE, EVEN_ROWS, CONTIGUOUS,
    )  # fmt: skip
    if FULL:
        values = tl.load(source, eviction_policy=EVICTION)
    else:
        values = tl.load(source, mask=exists, other=0.0, eviction_policy=EVICTION)
    amax_0 = tl.load(amax)
    amax_1 = amax_0
    ordinary = scale_is_ordinary(global_scale(amax_0, FORMAT))
    if SEPARATE_AMAX:
        amax_1 = tl.load(amax + 1)
        ordinary = ordinary & scale_is_ordinary(global_scale(amax_1, FORMAT))
    if ordinary:
        bound = amax_0
        if SEPARATE_AMAX:
            bound = tl.where(second, amax_1, amax_0)
        carrier = _carrier(values.to(tl.float32), bound, FORMAT, 1, True)
        if FULL:
            tl.store(target, carrier.to(out.dtype.element_ty))
        else:
            tl.store(target, carrier.to(out.dtype.element_ty), mask=exists)
    else:
        # In small parts: what is rare must not take the registers of what is not.
        for part in range(PARTS):
            at, to, here, later = _feature_blocks(
                x, out, first, part * (BLOCKS // PARTS) + tl.arange(0, BLOCKS // PARTS), total,
                stride_token, stride_head,
                HEADS, WIDTH_0, WIDTH_1, BLOCKS_0, BLOCKS_1, WHOLE, EVEN_ROWS, CONTIGUOUS,
            )  # fmt: skip
            some = tl.load(at, mask=here, other=0.0).to(tl.float32)
            rare = _carrier(some, tl.where(later, amax_1, amax_0), FORMAT, 1, False)
            tl.store(to, rare.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize_on_alignment=["cu_seqlens", "starts"])
def _quantize_tokens_kernel(
    x,
    out,
    amax,
    cu_seqlens,
    starts,
    stride_head,
    TOKEN_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    FORMAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """One program: one group of 16 tokens of one sequence, COLUMNS of its heads · width values.

    Tiles are [COLUMNS // VECTOR, 16, VECTOR] and threads go along the first axis: whole blocks are
    of one thread.
    """
    ALL: tl.constexpr = HEADS * WIDTH
    PROGRAMS: tl.constexpr = (ALL + COLUMNS - 1) // COLUMNS
    part = tl.program_id(0) % PROGRAMS
    sequence = tl.program_id(1)
    amax_0 = tl.load(amax)
    first = tl.load(cu_seqlens + sequence)
    length = tl.load(cu_seqlens + sequence + 1) - first
    start = tl.program_id(0) // PROGRAMS * BLOCK
    if HAS_STARTS:
        start -= tl.load(starts + sequence) % BLOCK
    if start < length:
        ordinary = scale_is_ordinary(global_scale(amax_0, FORMAT))
        vector = part * COLUMNS + tl.arange(0, COLUMNS // VECTOR)[:, None, None] * VECTOR
        token = tl.arange(0, BLOCK)[None, :, None]
        if EVEN_ROWS:
            vector_at = vector.to(tl.int64)
        else:
            vector_at = (vector // WIDTH).to(tl.int64) * stride_head + vector % WIDTH
        row = (first + start).to(tl.int64)
        source = x + row * TOKEN_STRIDE + vector_at + token * TOKEN_STRIDE
        target = out + row * ALL + vector + token * ALL
        whole = (start >= 0) & (start + BLOCK <= length)
        if PROGRAMS * COLUMNS != ALL:
            whole = whole & (part < PROGRAMS - 1)
        if whole & ordinary:
            lanes = tl.arange(0, VECTOR)[None, None, :]
            values = tl.load(source + lanes, eviction_policy=EVICTION).to(tl.float32)
            carrier = _carrier(values, amax_0, FORMAT, 1, True)
            tl.store(target + lanes, carrier.to(out.dtype.element_ty))
        else:
            # In small parts: what is rare must not take the registers of what is not.
            exists = (start + token >= 0) & (start + token < length)
            for lane in range(VECTOR):
                mask = exists & (vector + lane < ALL)
                values = tl.load(source + lane, mask=mask, other=0.0).to(tl.float32)
                carrier = _carrier(values, amax_0, FORMAT, 1, False)
                tl.store(target + lane, carrier.to(out.dtype.element_ty), mask=mask)


def quantize_features(
    x: Tensor,
    fmt: str,
    amax: Tensor,
    dtype: torch.dtype,
    *,
    segments: tuple[int, ...] | None = None,
    separate_amax: bool = False,
) -> Tensor:
    """Quantize Q or K, in blocks along features.

    Args:
        x: [tokens, heads, width], last dimension contiguous.
        fmt: "fp8" or "nvfp4".
        amax: fp32 on `x`'s device, one value; two, one a segment, with `separate_amax`.
        dtype: Of the result: bfloat16, float16 or float32.
        segments: Widths of one or two parts that blocks never cross; None: one part.
        separate_amax: Each segment has its own amax.

    Returns:
        Contiguous carriers [tokens, heads, width].
    """
    tokens, heads, width = x.shape
    first, second = (*(segments or (width,)), 0)[:2]
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not out.numel():
        return out
    size = NVFP4.block_size or 1
    blocks_0, blocks_1 = triton.cdiv(first, size), triton.cdiv(second, size)
    total = tokens * heads * (blocks_0 + blocks_1)
    even = x.stride(0) == heads * x.stride(1)
    whole = first % size == 0 and second % size == 0
    blocks, warps, eviction = FEATURE_TILING
    _quantize_features_kernel[(triton.cdiv(total, blocks),)](
        x,
        out,
        amax,
        total,
        x.stride(0),
        x.stride(1),
        HEADS=heads,
        WIDTH_0=first,
        WIDTH_1=second,
        BLOCKS_0=blocks_0,
        BLOCKS_1=blocks_1,
        WHOLE=whole,
        SEPARATE_AMAX=separate_amax,
        EVEN_ROWS=even,
        CONTIGUOUS=even and x.stride(1) == width,
        FULL=whole and total % blocks == 0,
        FORMAT=FORMAT_CODES[fmt],
        BLOCKS=blocks,
        PARTS=4,
        EVICTION=eviction,
        num_warps=warps,
    )
    return out


def quantize_tokens(
    x: Tensor,
    fmt: str,
    amax: Tensor,
    dtype: torch.dtype,
    cu_seqlens: Tensor,
    max_seqlen: int,
    starts: Tensor | None = None,
) -> Tensor:
    """Quantize V, in blocks along tokens at absolute positions of each sequence.

    Args:
        x: [tokens, heads, width], last dimension contiguous.
        fmt: "fp8" or "nvfp4".
        amax: fp32 on `x`'s device, one value.
        dtype: Of the result: bfloat16, float16 or float32.
        cu_seqlens: int32 [sequences + 1]: where each sequence begins in `x`.
        max_seqlen: Tokens of the longest sequence.
        starts: int32 [sequences]: absolute position of each sequence's first token; None: 0.

    Returns:
        Contiguous carriers [tokens, heads, width].
    """
    if fmt == "fp8":
        return quantize_features(x, fmt, amax, dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _, heads, width = x.shape
    even = x.stride(1) == width
    columns, vector, warps, eviction = TOKEN_TILING
    if width % vector and not even:
        vector = 1
    size = NVFP4.block_size or 1
    # A sequence that does not begin at a multiple of 16 touches one group more.
    groups = triton.cdiv(max_seqlen, size) + int(starts is not None)
    sequences = len(cu_seqlens) - 1
    if not out.numel() or not groups or not sequences:
        return out
    _quantize_tokens_kernel[(triton.cdiv(heads * width, columns) * groups, sequences)](
        x,
        out,
        amax,
        cu_seqlens,
        starts if starts is not None else cu_seqlens,
        x.stride(1),
        TOKEN_STRIDE=x.stride(0),
        HEADS=heads,
        WIDTH=width,
        EVEN_ROWS=even,
        HAS_STARTS=starts is not None,
        FORMAT=FORMAT_CODES[fmt],
        COLUMNS=columns,
        VECTOR=vector,
        EVICTION=eviction,
        num_warps=warps,
    )
    return out
