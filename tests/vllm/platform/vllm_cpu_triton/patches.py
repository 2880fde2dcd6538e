"""What vLLM assumes of a device and a CPU does not have, replaced in vLLM's modules."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vllm_cpu_triton import calls


def apply() -> None:
    """Patch this process, once."""
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.v1.attention.ops import merge_attn_states
    from vllm.v1.sample.ops import topk_topp_sampler

    if mla_attention.merge_attn_states is merge:
        return
    # A GPU has a compiled operator. Otherwise 0.26 takes a Triton kernel with a program for each
    # token and head, which is most of the time that a test takes under the interpreter.
    merge_attn_states.merge_attn_states = mla_attention.merge_attn_states = merge
    mla_attention.build_mla_chunked_context_metadata = _unpinned(
        mla_attention.build_mla_chunked_context_metadata
    )
    # Its kernel for top-k and top-p does not run under the interpreter; the torch code there does.
    topk_topp_sampler.HAS_TRITON = False
    # Linear layers ask torch, not the platform, and would call operators that are not there.
    torch.cpu._is_amx_tile_supported = lambda: False


def merge(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: Tensor | None = None,
) -> None:
    """Merge attention to cached and to new tokens, like vLLM's function of the longer name.

    Outputs are [tokens, heads, features], log-sum-exps [heads, tokens] to base e. Tokens from
    `prefill_tokens_with_context` on have no prefix.
    """
    if output_scale is not None:
        raise NotImplementedError("a quantized output")
    # The compiled operator reads both with the strides of the first.
    if prefix_output.stride(1) != suffix_output.stride(1):
        raise ValueError("prefix and suffix differ in the stride of their heads")
    calls["merge_attn_states"] += 1
    lses = torch.stack([prefix_lse, suffix_lse]).float()
    # FlashAttention's way to say that there was no key.
    lses[lses == float("inf")] = float("-inf")
    if prefill_tokens_with_context is not None:
        lses[0, :, prefill_tokens_with_context:] = float("-inf")
    total = lses.logsumexp(0)
    weights = (lses - total).exp().nan_to_num(0.0).mT.unsqueeze(-1)
    outputs = torch.stack([prefix_output, suffix_output]).float()
    # Rows without weight may hold anything.
    output.copy_((outputs * weights).where(weights > 0, 0.0).sum(0))
    if output_lse is not None:
        output_lse.copy_(total)


class _WithoutPinnedMemory(TorchFunctionMode):
    """Make ordinary tensors where pinned ones are asked for: torch refuses those without a GPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return function(*args, **options)


def _unpinned(function: Any) -> Any:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _WithoutPinnedMemory():
            return function(*args, **kwargs)

    return wrapped
