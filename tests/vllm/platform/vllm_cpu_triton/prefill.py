"""Attention of a prefill in torch, in the place of FlashAttention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.registry import (
    MLAPrefillBackendEnum,
    register_mla_prefill_backend,
)

from vllm_cpu_triton import calls


class TorchPrefill(MLAPrefillBackend):
    """One request after the other, in float32; log-sum-exp to base e, shaped [heads, tokens]."""

    @staticmethod
    def get_name() -> str:
        """Name it for vLLM's log."""
        return "TORCH"

    def run_prefill_new_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, return_softmax_lse: bool, **options: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend causally to the tokens of this step."""
        if any(value is not None for value in options.values()):
            raise NotImplementedError(f"prefill options {sorted(options)}")
        calls["prefill_new_tokens"] += 1
        offsets = self._prefill_metadata.query_start_loc
        out, lse = self._attend(q, k, v, offsets, offsets, causal=True)
        return (out, lse) if return_softmax_lse else out

    def run_prefill_context_chunk(
        self,
        chunk_idx: int | None = None,
        q: Any = None,
        k: Any = None,
        v: Any = None,
        chunk: Any = None,
        out: None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend to cached tokens: of a chunk that 0.26 names by number and 0.33 describes."""
        calls["prefill_context_chunk"] += 1
        if chunk is None:
            metadata = self._prefill_metadata
            q_offsets = metadata.query_start_loc
            k_offsets = metadata.chunked_context.cu_seq_lens[chunk_idx]
        else:
            q_offsets, k_offsets = chunk.query_start_loc, chunk.cu_seq_lens
        return self._attend(q, k, v, q_offsets, k_offsets, causal=False)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        q_lengths = q_offsets.diff().tolist()
        k_lengths = k_offsets.diff().tolist()
        for q_, k_, v_ in zip(
            q.float().split(q_lengths),
            k.float().split(k_lengths),
            v.float().split(k_lengths),
            strict=True,
        ):
            scores = torch.einsum("qhd,khd->hqk", q_, k_) * self.scale
            if causal:
                above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(above, float("-inf"))
            lses.append(scores.logsumexp(-1))
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v_))
        return torch.cat(outs).to(q.dtype), torch.cat(lses, 1)


def register() -> None:
    """Stand in for FlashAttention, which 0.26 takes for a device without compute capability."""
    name = f"{TorchPrefill.__module__}.{TorchPrefill.__qualname__}"
    register_mla_prefill_backend(MLAPrefillBackendEnum.FLASH_ATTN, name)
