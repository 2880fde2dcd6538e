"""Quantizing Q, K and V once, before attention reads them.

The results are carriers: `element · block_scale` without the global scale, exact in bfloat16 and
float16 (see `numerics`). An operand whose amax is 0 becomes zeros, one with a negative or NaN amax
NaN.
"""

from __future__ import annotations

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

_BLOCKS_PER_PROGRAM = 256
_TOKEN_COLUMNS = 128


@triton.jit
def _carrier(x, amax, FORMAT: tl.constexpr, AXIS: tl.constexpr, ORDINARY: tl.constexpr):
    """Carrier of fp32 `x` with blocks as axis `AXIS`; `amax` broadcasts against `x`."""
    g = global_scale(amax, FORMAT)
    if FORMAT == FORMAT_FP8:
        value = quantize_fp8(x, g, ORDINARY) * validity(amax)
    else:
        value = quantize_nvfp4(x, g, AXIS, ORDINARY, validity(amax))
    return value


@triton.jit
def _quantize_features_kernel(
    x,
    out,
    amax,
    rows,
    heads,
    stride_token,
    stride_head,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    SEPARATE_AMAX: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCKS_0: tl.constexpr,
    BLOCKS_1: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One program: BLOCKS blocks of 16 features of `rows` = tokens · heads rows."""
    blocks_row: tl.constexpr = BLOCKS_0 + BLOCKS_1
    width: tl.constexpr = WIDTH_0 + WIDTH_1
    number = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row = number // blocks_row
    block = number % blocks_row
    second = block >= BLOCKS_0
    start = tl.where(second, WIDTH_0 + (block - BLOCKS_0) * BLOCK, block * BLOCK)
    end = tl.where(second, width, WIDTH_0)
    feature = start[:, None] + tl.arange(0, BLOCK)[None, :]
    mask = (row < rows)[:, None]
    if not WHOLE:
        mask = mask & (feature < end[:, None])
    wide_row = row.to(tl.int64)
    if EVEN_ROWS:
        source = x + wide_row * stride_head
    else:
        source = x + (wide_row // heads) * stride_token + (wide_row % heads) * stride_head
    values = tl.load(source[:, None] + feature, mask=mask, other=0.0).to(tl.float32)
    amax_0 = tl.load(amax)
    ordinary = scale_is_ordinary(global_scale(amax_0, FORMAT))
    amax_rows = amax_0
    if SEPARATE_AMAX:
        amax_1 = tl.load(amax + 1)
        ordinary = ordinary & scale_is_ordinary(global_scale(amax_1, FORMAT))
        amax_rows = tl.where(second, amax_1, amax_0)[:, None]
    target = out + (wide_row * width)[:, None] + feature
    if ordinary:
        carrier = _carrier(values, amax_rows, FORMAT, 1, True)
        tl.store(target, carrier.to(out.dtype.element_ty), mask=mask)
    else:
        carrier = _carrier(values, amax_rows, FORMAT, 1, False)
        tl.store(target, carrier.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _quantize_tokens_kernel(
    x,
    out,
    amax,
    cu_seqlens,
    starts,
    columns,
    width,
    max_groups,
    stride_token,
    stride_head,
    FORMAT: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: one group of 16 tokens of one sequence, COLUMNS of its heads · width values."""
    column_blocks = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    column_block = program % column_blocks
    group = (program // column_blocks) % max_groups
    sequence = program // column_blocks // max_groups
    first = tl.load(cu_seqlens + sequence).to(tl.int64)
    length = tl.load(cu_seqlens + sequence + 1).to(tl.int64) - first
    shift = 0
    if HAS_STARTS:
        shift = tl.load(starts + sequence) % BLOCK
    token = group * BLOCK - shift + tl.arange(0, BLOCK)
    if group * BLOCK - shift < length:
        column = column_block * COLUMNS + tl.arange(0, COLUMNS)
        mask = ((token >= 0) & (token < length))[:, None] & (column < columns)[None, :]
        if EVEN_ROWS:
            offset = column
        else:
            offset = (column // width) * stride_head + column % width
        position = first + token
        source = x + position[:, None] * stride_token + offset[None, :]
        values = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        amax_0 = tl.load(amax)
        target = out + position[:, None] * columns + column[None, :]
        if scale_is_ordinary(global_scale(amax_0, FORMAT)):
            carrier = _carrier(values, amax_0, FORMAT, 0, True)
            tl.store(target, carrier.to(out.dtype.element_ty), mask=mask)
        else:
            carrier = _carrier(values, amax_0, FORMAT, 0, False)
            tl.store(target, carrier.to(out.dtype.element_ty), mask=mask)


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
    blocks = tokens * heads * (blocks_0 + blocks_1)
    _quantize_features_kernel[(triton.cdiv(blocks, _BLOCKS_PER_PROGRAM),)](
        x,
        out,
        amax,
        tokens * heads,
        heads,
        x.stride(0),
        x.stride(1),
        WIDTH_0=first,
        WIDTH_1=second,
        SEPARATE_AMAX=separate_amax,
        EVEN_ROWS=x.stride(0) == heads * x.stride(1),
        FORMAT=FORMAT_CODES[fmt],
        BLOCKS_0=blocks_0,
        BLOCKS_1=blocks_1,
        WHOLE=first % size == 0 and second % size == 0,
        BLOCKS=_BLOCKS_PER_PROGRAM,
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
    columns = x.shape[1] * x.shape[2]
    size = NVFP4.block_size or 1
    # A sequence that does not begin at a multiple of 16 touches one group more.
    groups = triton.cdiv(max_seqlen, size) + int(starts is not None)
    programs = triton.cdiv(columns, _TOKEN_COLUMNS) * groups * (len(cu_seqlens) - 1)
    if not out.numel() or not programs:
        return out
    _quantize_tokens_kernel[(programs,)](
        x,
        out,
        amax,
        cu_seqlens,
        starts if starts is not None else cu_seqlens,
        columns,
        x.shape[2],
        groups,
        x.stride(0),
        x.stride(1),
        FORMAT=FORMAT_CODES[fmt],
        EVEN_ROWS=x.stride(1) == x.shape[2],
        HAS_STARTS=starts is not None,
        COLUMNS=_TOKEN_COLUMNS,
        num_warps=1,
    )
    return out
