"""The kernels as functions, each a `torch.library` operator underneath."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_quant.errors import ConfigError
from mla_quant.kernels import ops
from mla_quant.kernels.decode import OperandFormats
from mla_quant.kernels.operand_cache import OperandLayout
from mla_quant.reference import Sparsity


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
) -> tuple[Tensor, Tensor]:
    """Attention of packed sequences; see `mla_quant.kernels.prefill.prefill_attention`."""
    result: tuple[Tensor, Tensor] = ops.prefill_attention(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        amax,
        key_starts,
        query_starts,
        max_seqlen_q,
        max_seqlen_k,
        scale,
        q_format,
        k_format,
        p_format,
        v_format,
        causal,
        ops.pack_sparsity(sparsity),
        list(qk_segments or ()),
        dtype or q.dtype,
    )
    return result


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
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Decode over a paged latent cache; see `mla_quant.kernels.decode.decode_attention`."""
    if (records is None) != (layout is None):
        raise ConfigError("records and layout of an operand cache must be given together")
    result: tuple[Tensor, Tensor] = ops.decode_attention(
        q,
        cache,
        block_table,
        seq_lens,
        amax,
        cu_seqlens_q,
        records,
        max_query_len,
        latent_width,
        scale,
        ops.pack_formats(formats),
        ops.pack_layout(layout),
        ops.pack_sparsity(sparsity),
        num_splits,
        dtype,
    )
    return result


def write_operands(
    cache: Tensor,
    records: Tensor,
    layout: OperandLayout,
    block_table: Tensor,
    seq_lens: Tensor,
    amax: Tensor,
    *,
    cu_seqlens_new: Tensor | None = None,
    max_new_tokens: int = 1,
) -> None:
    """Fill the side cache; see `mla_quant.kernels.operand_cache.write_operands`."""
    ops.write_operands(
        cache,
        records,
        block_table,
        seq_lens,
        amax,
        cu_seqlens_new,
        max_new_tokens,
        layout.latent_width,
        ops.pack_layout(layout),
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
    """Merge partial attention; see `mla_quant.kernels.merge.merge_attention`."""
    result: tuple[Tensor, Tensor] = ops.merge_attention(
        out_a, lse_a, out_b, lse_b, heads_first, dtype or out_a.dtype
    )
    return result


def quantize_features(
    x: Tensor,
    fmt: str,
    amax: Tensor,
    dtype: torch.dtype,
    *,
    segments: tuple[int, ...] | None = None,
    separate_amax: bool = False,
) -> Tensor:
    """Quantize along features; see `mla_quant.kernels.quantize.quantize_features`."""
    result: Tensor = ops.quantize_features(x, fmt, amax, dtype, list(segments or ()), separate_amax)
    return result


def quantize_tokens(
    x: Tensor,
    fmt: str,
    amax: Tensor,
    dtype: torch.dtype,
    cu_seqlens: Tensor,
    max_seqlen: int,
    starts: Tensor | None = None,
) -> Tensor:
    """Quantize along tokens; see `mla_quant.kernels.quantize.quantize_tokens`."""
    result: Tensor = ops.quantize_tokens(x, fmt, amax, dtype, cu_seqlens, max_seqlen, starts)
    return result
