"""The kernels as `torch.library` operators: for torch.compile, CUDA graphs and fake tensors.

The functions of `mla_quant.kernels` check their arguments and call these.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mla_quant.kernels import decode, merge, operand_cache, prefill, quantize
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


def pack_formats(formats: decode.OperandFormats) -> str:
    """Formats of all operands as an operator takes them."""
    return _join(dataclasses.astuple(formats))


def unpack_formats(packed: str) -> decode.OperandFormats:
    """Inverse of `pack_formats`."""
    return decode.OperandFormats(*_split(packed))


def pack_layout(layout: operand_cache.OperandLayout | None) -> str:
    """Formats of a side cache as an operator takes them; the widths are known from the cache."""
    return "" if layout is None else _join(dataclasses.astuple(layout)[2:])


def unpack_layout(latent_width: int, rope_width: int, packed: str) -> operand_cache.OperandLayout:
    """Inverse of `pack_layout`."""
    return operand_cache.OperandLayout(latent_width, rope_width, *_split(packed))


def _join(formats: tuple[Any, ...]) -> str:
    return ",".join(name or "" for name in formats)


def _split(packed: str) -> list[Any]:
    return [name or None for name in packed.split(",")]


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


@torch.library.custom_op(f"{NAMESPACE}::decode_attention", mutates_args=())
def decode_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    amax: Tensor,
    cu_seqlens_q: Tensor | None,
    records: Tensor | None,
    max_query_len: int,
    latent_width: int,
    scale: float,
    formats: str,
    stored: str,
    sparsity: list[int],
    num_splits: int | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See `mla_quant.kernels.decode_attention`.

    `formats` are those of `decode.OperandFormats`, `stored` those of
    `operand_cache.OperandLayout`, each by its fields in order, joined by commas.
    """
    layout = None
    if records is not None:
        layout = unpack_layout(latent_width, q.shape[-1] - latent_width, stored)
    return decode.decode_attention(
        q,
        cache,
        block_table,
        seq_lens,
        amax,
        latent_width=latent_width,
        scale=scale,
        formats=unpack_formats(formats),
        cu_seqlens_q=cu_seqlens_q,
        max_query_len=max_query_len,
        sparsity=unpack_sparsity(sparsity),
        num_splits=num_splits,
        records=records,
        layout=layout,
        out_dtype=dtype,
    )


@decode_attention.register_fake
def _(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    amax: Tensor,
    cu_seqlens_q: Tensor | None,
    records: Tensor | None,
    max_query_len: int,
    latent_width: int,
    scale: float,
    formats: str,
    stored: str,
    sparsity: list[int],
    num_splits: int | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.shape[0], q.shape[1], latent_width, dtype=dtype)
    return out, q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)


@torch.library.custom_op(f"{NAMESPACE}::write_operands", mutates_args=("records",))
def write_operands(
    cache: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    amax: Tensor,
    cu_seqlens_new: Tensor | None,
    max_new_tokens: int,
    latent_width: int,
    stored: str,
) -> None:
    """See `mla_quant.kernels.write_operands`."""
    operand_cache.write_operands(
        cache,
        records,
        unpack_layout(latent_width, cache.shape[-1] - latent_width, stored),
        block_table,
        seq_lens,
        amax,
        cu_seqlens_new=cu_seqlens_new,
        max_new_tokens=max_new_tokens,
    )


@write_operands.register_fake
def _(
    cache: Tensor,
    records: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    amax: Tensor,
    cu_seqlens_new: Tensor | None,
    max_new_tokens: int,
    latent_width: int,
    stored: str,
) -> None:
    return None
