"""Quantized attention of a Hugging Face layer by the fused kernels.

The kernels work on packed sequences and paged caches; here a padded batch becomes packed, its cache
paged. Importing this loads no triton.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from mla_quant.errors import ConfigError
from mla_quant.reference import Sparsity

Operands = Mapping[str, tuple[str, Tensor | float]]
"""Format and amax of each operand, by name; the amax of an unquantized one is ignored."""

PROJECTED = ("q", "k", "v", "p")
ABSORBED = ("q_latent", "q_rope", "k_latent", "k_rope", "v_latent", "p")
"""Operands of each form, in the order in which kernels take their amax."""

_LOWEST_CAPABILITY = (8, 0)
_PAGE_TOKENS = 64
"""A kernel is compiled for a size of page: it must not follow the cache's length."""


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def kernels_serve(x: Tensor) -> bool:
    """Whether the fused kernels run where a tensor is, in its dtype."""
    return (
        x.is_cuda
        and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and _has_triton()
        and _capability(x.device) >= _LOWEST_CAPABILITY
    )


def causal_starts(
    allowed: Tensor | None,
    causal: bool,
    positions: Tensor | None,
    queries_real: Tensor | None,
    shape: tuple[int, int, int],
    device: torch.device,
) -> Tensor | None:
    """Where each row's first query stands, if the mask is a causal one.

    Args:
        allowed: bool, broadcastable to [batch, heads, queries, keys]; None: all keys, or by
            `causal`.
        causal: Whether `allowed` leaves causality to the reader.
        positions: int64 [batch, 1, queries]: last key that each query may read.
        queries_real: bool [batch, queries]: queries that are no padding; None: all. The others may
            get any position: nobody reads their outputs.
        shape: Batch, queries, keys.
        device: Of the result.

    Returns:
        int32 [batch]; None if some query may read other keys than all real ones up to its own.
    """
    batch, queries, keys = shape
    if allowed is None:
        if not causal and queries > 1:
            return None
        return torch.full((batch,), keys - queries, dtype=torch.int32, device=device)
    if positions is None or allowed.shape[1] != 1:
        return None
    rows = torch.arange(queries, device=device)
    columns = torch.arange(keys, device=device)
    if queries_real is None:
        queries_real = torch.ones(batch, queries, dtype=torch.bool, device=device)
    first = queries_real.to(torch.int64).argmax(-1, keepdim=True)
    start = positions[:, 0].expand(batch, -1).gather(-1, first) - first
    reach = columns <= (start + rows)[..., None]
    if not bool(((reach == allowed[:, 0]) | ~queries_real[..., None]).all()):
        return None
    return start[:, 0].to(torch.int32)


def projected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    operands: Operands,
    *,
    scale: float,
    segments: Sequence[int],
    sparsity: Sparsity | None,
    starts: Tensor,
) -> Tensor:
    """Attention on projected operands.

    Args:
        query: [batch, heads, queries, width].
        key: [batch, heads, keys, width], padding set to zero.
        value: [batch, heads, keys, v_width], likewise.
        operands: Of "q", "k", "v" and "p".
        scale: Softmax scale.
        segments: Widths of the parts of Q and K that blocks never straddle.
        sparsity: N:M sparsity of the scores, or None.
        starts: From `causal_starts`.

    Returns:
        [batch, queries, heads, v_width] in `query`'s dtype.
    """
    from mla_quant.kernels import prefill_attention

    batch, _, queries, _ = query.shape
    keys = key.shape[2]
    sequences = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
    out, _ = prefill_attention(
        _packed(query),
        _packed(key),
        _packed(value),
        sequences * queries,
        sequences * keys,
        queries,
        keys,
        scale=scale,
        amax=_stack([operands[name][1] for name in PROJECTED], query.device),
        q_format=operands["q"][0],
        k_format=operands["k"][0],
        p_format=operands["p"][0],
        v_format=operands["v"][0],
        sparsity=sparsity,
        qk_segments=(segments[0], segments[1]) if len(segments) == 2 else None,
        query_starts=starts,
    )
    result: Tensor = out.unflatten(0, (batch, queries))
    return result


def absorbed_serves(latent_width: int, rope_width: int) -> bool:
    """Whether the decode kernel takes a latent and a rope part of these widths."""
    from mla_quant.kernels.operand_cache import check_widths

    try:
        check_widths(latent_width, rope_width)
    except ConfigError:
        return False
    return True


def absorbed(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    operands: Operands,
    *,
    scale: float,
    sparsity: Sparsity | None,
    starts: Tensor,
) -> Tensor:
    """Attention in the latent space.

    Args:
        q_latent: fp32 [batch, heads, queries, latent].
        q_rope: [batch, heads, queries, rope].
        latent: [batch, 1, keys, latent], padding set to zero.
        rope: [batch, 1, keys, rope], likewise.
        operands: Of the absorbed form, and "p".
        scale: Softmax scale.
        sparsity: N:M sparsity of the scores, or None.
        starts: From `causal_starts`.

    Returns:
        fp32 [batch, heads, queries, latent].
    """
    from mla_quant.kernels import OperandFormats, decode_attention

    batch, _, queries, _ = q_latent.shape
    keys, width = latent.shape[2], latent.shape[-1] + rope.shape[-1]
    sequences = torch.arange(batch + 1, dtype=torch.int32, device=latent.device)
    pages = -(-keys // _PAGE_TOKENS)
    cache = latent.new_zeros(batch, pages * _PAGE_TOKENS, width)
    torch.cat([latent[:, 0], rope[:, 0]], dim=-1, out=cache[:, :keys])
    block_table = torch.arange(batch * pages, dtype=torch.int32, device=latent.device)
    out, _ = decode_attention(
        _packed(torch.cat([q_latent, q_rope.float()], dim=-1)),
        cache.view(batch * pages, _PAGE_TOKENS, width),
        block_table.view(batch, pages),
        starts + queries,
        _stack([operands[name][1] for name in ABSORBED], latent.device),
        latent_width=latent.shape[-1],
        scale=scale,
        formats=OperandFormats(
            q=operands["q_latent"][0],
            k=operands["k_latent"][0],
            p=operands["p"][0],
            v=operands["v_latent"][0],
            q_rope=operands["q_rope"][0],
            k_rope=operands["k_rope"][0],
        ),
        cu_seqlens_q=sequences * queries,
        max_query_len=queries,
        sparsity=sparsity,
    )
    result: Tensor = out.unflatten(0, (batch, queries)).transpose(1, 2)
    return result


def _packed(x: Tensor) -> Tensor:
    """[batch, heads, tokens, width] as [batch · tokens, heads, width]."""
    return x.transpose(1, 2).flatten(0, 1)


def _stack(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """fp32 [n] on a device."""
    return torch.stack(
        [torch.as_tensor(v, dtype=torch.float32, device=device).reshape(()) for v in values]
    )
