"""Statistics of an operand in one pass over it, for calibration on CUDA.

The numbers are those of `mla_quant.observers.collect_together` in plain torch: integers and a
maximum, so that the order of the additions does not matter. Written in torch operations they cost
more than the forward pass that they observe: some twenty launches an operand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_quant.formats import NVFP4

_GROUP = NVFP4.block_size or 1
_COLUMNS = 128
_COPIES = 64
"""Histograms are counted in copies: additions to one bin of one copy wait for each other."""


@triton.jit
def _observe_kernel(
    x,
    valid,
    maximum,
    values,
    nonfinite,
    scratch,
    heads,
    tokens,
    features,
    row_groups,
    stride_xb,
    stride_xh,
    stride_xt,
    stride_xd,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_vd,
    step,
    SHIFT: tl.constexpr,
    BASE: tl.constexpr,
    BINS: tl.constexpr,
    HAS_VALID: tl.constexpr,
    ALONG_TOKENS: tl.constexpr,
    SAMPLE_ALL: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    COPIES: tl.constexpr,
):
    """One program: 16 tokens of one head, COLUMNS features."""
    program = tl.program_id(0)
    group = program % row_groups
    head = (program // row_groups) % heads
    batch = program // row_groups // heads
    token = group * GROUP + tl.arange(0, GROUP)
    feature = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (feature < features)[None, :]
    # 64 bits: an operand may hold more than 2^31 values.
    t, d = token.to(tl.int64)[:, None], feature.to(tl.int64)[None, :]
    b, h = batch.to(tl.int64), head.to(tl.int64)
    ok = inside
    if HAS_VALID:
        mark = valid + b * stride_vb + h * stride_vh + t * stride_vt + d * stride_vd
        ok = inside & (tl.load(mark, mask=inside, other=0) != 0)
    source = x + b * stride_xb + h * stride_xh + t * stride_xt + d * stride_xd
    value = tl.load(source, mask=ok, other=0.0).to(tl.float32)
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    finite = bits < 0x7F800000
    # Magnitudes are ordered as their bit patterns.
    tl.atomic_max(maximum, tl.max(tl.max(tl.where(finite, bits, 0), 1), 0), sem="relaxed")
    bad = tl.sum(tl.sum((ok & (finite == 0)).to(tl.int32), 1), 0)
    if bad > 0:
        tl.atomic_add(nonfinite, bad.to(tl.int64), sem="relaxed")
    if HAS_VALID:
        count = tl.sum(tl.sum(ok.to(tl.int32), 1), 0)
        tl.atomic_add(values, count.to(tl.int64), sem="relaxed")

    if ALONG_TOKENS:
        whole = (group + 1) * GROUP <= tokens
        wanted = SAMPLE_ALL or ((group % step == 0) and whole)
    else:
        wanted = SAMPLE_ALL or (tl.cdiv(group * GROUP, step) * step < (group + 1) * GROUP)
    if wanted:
        sampled = ok
        if not ALONG_TOKENS and not SAMPLE_ALL:
            sampled = ok & (token % step == 0)[:, None]
        copy = (program + tl.program_id(1)) % COPIES
        counts = scratch + copy * (BINS + 1)
        key = tl.maximum(tl.minimum((bits >> SHIFT) - (BASE - 1), BINS), 0)
        tl.atomic_add(counts + key, 1, mask=sampled & finite, sem="relaxed")
        if ALONG_TOKENS:
            block_bits = tl.max(bits, 0)
            some = tl.max(sampled.to(tl.int32), 0) > 0
        else:
            shape: tl.constexpr = (GROUP, COLUMNS // GROUP, GROUP)
            block_bits = tl.max(tl.reshape(bits, shape), 2)
            some = tl.max(tl.reshape(sampled.to(tl.int32), shape), 2) > 0
        some = some & (block_bits < 0x7F800000)
        block_key = tl.maximum(tl.minimum((block_bits >> SHIFT) - (BASE - 1), BINS), 0)
        block_counts = counts + COPIES * (BINS + 1)
        tl.atomic_add(block_counts + block_key, 1, mask=some, sem="relaxed")


@triton.jit
def _add_up_kernel(
    scratch,
    histogram,
    block_histogram,
    values,
    count,
    SIZE: tl.constexpr,
    COPIES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the copies to the totals and clear them for the next call."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    which = tl.program_id(1)
    row = tl.arange(0, COPIES)
    inside = (column < SIZE)[None, :] & (row < COPIES)[:, None]
    place = scratch + which * (COPIES * SIZE) + row[:, None] * SIZE + column[None, :]
    counts = tl.sum(tl.load(place, mask=inside, other=0), 0)
    tl.store(place, tl.zeros((COPIES, COLUMNS), tl.int32), mask=inside)
    target = (histogram if which == 0 else block_histogram) + column
    total = tl.load(target, mask=column < SIZE, other=0)
    tl.store(target, total + counts, mask=column < SIZE)
    if (tl.program_id(0) == 0) & (which == 0):
        tl.store(values, tl.load(values) + count)


def new_scratch(bins: int, device: torch.device) -> Tensor:
    """What `observe` counts in between: zeros, and zeros again after each call."""
    return torch.zeros(2, _COPIES, bins + 1, dtype=torch.int32, device=device)


def observe(
    x: Tensor,
    valid: Tensor | None,
    *,
    maximum: Tensor,
    values: Tensor,
    nonfinite: Tensor,
    histogram: Tensor,
    block_histogram: Tensor,
    scratch: Tensor,
    axis: int,
    step: int,
    shift: int,
    base: int,
) -> None:
    """Add an operand to running statistics, in place.

    Args:
        x: [batch, heads, tokens, features], any strides, floating point.
        valid: bool, broadcastable to `x`: values that count; None: all.
        maximum: 0-dim fp32, largest finite magnitude.
        values: 0-dim int64, number of values.
        nonfinite: 0-dim int64, NaN and Inf among them.
        histogram: int64 [bins + 1], of sampled magnitudes: bin 0 holds those below the range.
        block_histogram: Likewise, of the maxima of blocks of 16.
        scratch: From `new_scratch`.
        axis: -1 or -2: along which blocks lie.
        step: Every how manieth token (axis -1) or whole group of 16 tokens (axis -2) is sampled;
            0: all, an incomplete last group too.
        shift: Bits of an fp32 number below a bin's number.
        base: Bin number, before subtraction, of bin 1.
    """
    batch, heads, tokens, features = x.shape
    groups = triton.cdiv(tokens, _GROUP)
    mask = valid.expand_as(x).view(torch.uint8) if valid is not None else x
    bins = histogram.numel() - 1
    _observe_kernel[(batch * heads * groups, triton.cdiv(features, _COLUMNS))](
        x,
        mask,
        maximum.view(torch.int32),
        values,
        nonfinite,
        scratch,
        heads,
        tokens,
        features,
        groups,
        *x.stride(),
        *mask.stride(),
        max(step, 1),
        SHIFT=shift,
        BASE=base,
        BINS=bins,
        HAS_VALID=valid is not None,
        ALONG_TOKENS=axis == -2,
        SAMPLE_ALL=step == 0,
        GROUP=_GROUP,
        COLUMNS=_COLUMNS,
        COPIES=_COPIES,
        num_warps=4,
    )
    columns = 64
    _add_up_kernel[(triton.cdiv(bins + 1, columns), 2)](
        scratch,
        histogram,
        block_histogram,
        values,
        0 if valid is not None else x.numel(),
        SIZE=bins + 1,
        COPIES=_COPIES,
        COLUMNS=columns,
    )
