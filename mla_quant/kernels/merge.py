"""Combining attention over two disjoint sets of keys, for example cached context and new tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_quant.errors import MlaQuantError
from mla_quant.kernels.numerics import round_to_dtype
from mla_quant.reference import LOG2_E

_LOG2_E = tl.constexpr(LOG2_E)
_VALUES_PER_PROGRAM = 4096


@triton.jit
def _merge_kernel(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    rows,
    heads,
    stride_at,
    stride_ah,
    stride_bt,
    stride_bh,
    stride_lse_at,
    stride_lse_ah,
    stride_lse_bt,
    stride_lse_bh,
    stride_lse_t,
    stride_lse_h,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program: ROWS rows, a row being one head of one token."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = row < rows
    token, head = row // heads, row % heads
    a = tl.load(lse_a + token * stride_lse_at + head * stride_lse_ah, mask=live, other=0.0)
    b = tl.load(lse_b + token * stride_lse_bt + head * stride_lse_bh, mask=live, other=0.0)
    # max() may drop a NaN, a sum does not.
    high = tl.maximum(a, b)
    top = tl.where(high == float("-inf"), 0.0, high)
    weight_a = tl.exp2((a - top) * _LOG2_E)
    weight_b = tl.exp2((b - top) * _LOG2_E)
    total = weight_a + weight_b
    merged = tl.where(total == 0, float("-inf"), top + tl.log2(total) / _LOG2_E)
    tl.store(lse + token * stride_lse_t + head * stride_lse_h, merged, mask=live)
    total = tl.where(total == 0, 1.0, total)
    feature = tl.arange(0, PADDED)
    mask = live[:, None] & (feature < WIDTH)[None, :]
    # An empty side may hold anything: it is not read.
    from_a = tl.load(
        out_a + (token * stride_at + head * stride_ah)[:, None] + feature[None, :],
        mask=mask & (a != float("-inf"))[:, None],
        other=0.0,
    ).to(tl.float32)
    from_b = tl.load(
        out_b + (token * stride_bt + head * stride_bh)[:, None] + feature[None, :],
        mask=mask & (b != float("-inf"))[:, None],
        other=0.0,
    ).to(tl.float32)
    result = from_a * (weight_a / total)[:, None] + from_b * (weight_b / total)[:, None]
    tl.store(
        out + (row * WIDTH)[:, None] + feature[None, :],
        round_to_dtype(result, out.dtype.element_ty),
        mask=mask,
    )


def merge_attention(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    heads_first: bool = True,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys.

    Args:
        out_a: [tokens, heads, width], over the first set; the last dimension contiguous.
        lse_a: Natural-log LSE, fp32 [heads, tokens]; -inf marks an empty set, whose output is not
            read.
        out_b: As `out_a`, over the second set.
        lse_b: As `lse_a`.
        heads_first: Whether LSE is [heads, tokens]; else [tokens, heads].
        dtype: Of the output; None: that of `out_a`.

    Returns:
        Output [tokens, heads, width] and LSE in the layout of the inputs. Rows that are empty on
        both sides give 0 and -inf.

    Raises:
        MlaQuantError: The shapes do not fit.
    """
    tokens, heads, width = out_a.shape
    shape = (heads, tokens) if heads_first else (tokens, heads)
    if out_b.shape != out_a.shape or lse_a.shape != shape or lse_b.shape != shape:
        raise MlaQuantError(
            f"cannot merge outputs {tuple(out_a.shape)} and {tuple(out_b.shape)} with LSE "
            f"{tuple(lse_a.shape)} and {tuple(lse_b.shape)}: outputs must be equal in shape and "
            f"LSE must be {shape}"
        )
    out = torch.empty(out_a.shape, dtype=dtype or out_a.dtype, device=out_a.device)
    lse = torch.empty(shape, dtype=torch.float32, device=out_a.device)
    if not out.numel():
        return out, lse

    def by_token(x: Tensor) -> tuple[int, int]:
        return (x.stride(1), x.stride(0)) if heads_first else (x.stride(0), x.stride(1))

    padded = triton.next_power_of_2(width)
    rows = max(1, _VALUES_PER_PROGRAM // padded)
    _merge_kernel[(triton.cdiv(tokens * heads, rows),)](
        out_a,
        lse_a,
        out_b,
        lse_b,
        out,
        lse,
        tokens * heads,
        heads,
        out_a.stride(0),
        out_a.stride(1),
        out_b.stride(0),
        out_b.stride(1),
        *by_token(lse_a),
        *by_token(lse_b),
        *by_token(lse),
        WIDTH=width,
        PADDED=padded,
        ROWS=rows,
    )
    return out, lse
