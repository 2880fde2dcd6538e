"""The kernels as `torch.library` operators: for torch.compile, CUDA graphs and fake tensors.

The functions of `mla_quant.kernels` check their arguments and call these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_quant.kernels import merge, prefill, quantize
from mla_quant.reference import Sparsity

NAMESPACE = "mla_quant"


def pack_sparsity(sparsity: Sparsity | None) -> list[int]:
    """N, M, sink and recent tokens as an operator takes them; empty: dense."""
    if sparsity is None:
        return []
    return [
        sparsity.n,
        sparsity.m,
        sparsity.dense_sink_tokens,
        sparsity.dense_recent_tokens,
    ]


def unpack_sparsity(packed: list[int]) -> Sparsity | None:
    """Inverse of `pack_sparsity`."""
    if not packed:
        return None
    n, m, sink, recent = packed
    return Sparsity(n, m, sink, recent)


@torch.library.custom_op(f"{NAMESPACE}::prefill_attention", mutates_args=())
def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    amax: Tensor,
    key_starts: Tensor | None,
    query_starts: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    q_format: str,
    k_format: str,
    p_format: str,
    v_format: str,
    causal: bool,
    sparsity: list[int],
    qk_segments: list[int],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See `mla_quant.kernels.prefill_attention`."""
    return prefill.prefill_attention(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        scale=scale,
        amax=amax,
        q_format=q_format,
        k_format=k_format,
        p_format=p_format,
        v_format=v_format,
        causal=causal,
        sparsity=unpack_sparsity(sparsity),
        qk_segments=(qk_segments[0], qk_segments[1]) if qk_segments else None,
        key_starts=key_starts,
        query_starts=query_starts,
        dtype=dtype,
    )


@prefill_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    amax: Tensor,
    key_starts: Tensor | None,
    query_starts: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    q_format: str,
    k_format: str,
    p_format: str,
    v_format: str,
    causal: bool,
    sparsity: list[int],
    qk_segments: list[int],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2], dtype=dtype)
    return out, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op(f"{NAMESPACE}::merge_attention", mutates_args=())
def merge_attention(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    heads_first: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See `mla_quant.kernels.merge_attention`."""
    return merge.merge_attention(out_a, lse_a, out_b, lse_b, heads_first=heads_first, dtype=dtype)


@merge_attention.register_fake
def _(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    heads_first: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    out = out_a.new_empty(out_a.shape, dtype=dtype)
    return out, lse_a.new_empty(lse_a.shape, dtype=torch.float32)


@torch.library.custom_op(f"{NAMESPACE}::quantize_features", mutates_args=())
def quantize_features(
    x: Tensor, fmt: str, amax: Tensor, dtype: torch.dtype, segments: list[int], separate_amax: bool
) -> Tensor:
    """See `mla_quant.kernels.quantize_features`."""
    return quantize.quantize_features(
        x, fmt, amax, dtype, segments=tuple(segments) or None, separate_amax=separate_amax
    )


@quantize_features.register_fake
def _(
    x: Tensor, fmt: str, amax: Tensor, dtype: torch.dtype, segments: list[int], separate_amax: bool
) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op(f"{NAMESPACE}::quantize_tokens", mutates_args=())
def quantize_tokens(
    x: Tensor,
    fmt: str,
    amax: Tensor,
    dtype: torch.dtype,
    cu_seqlens: Tensor,
    max_seqlen: int,
    starts: Tensor | None,
) -> Tensor:
    """See `mla_quant.kernels.quantize_tokens`."""
    return quantize.quantize_tokens(x, fmt, amax, dtype, cu_seqlens, max_seqlen, starts)


@quantize_tokens.register_fake
def _(
    x: Tensor,
    fmt: str,
    amax: Tensor,
    dtype: torch.dtype,
    cu_seqlens: Tensor,
    max_seqlen: int,
    starts: Tensor | None,
) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)
