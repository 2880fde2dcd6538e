"""Fused attention kernels in Triton. This loads triton, which importing `mla_quant` does not."""

from mla_quant.kernels.api import (
    merge_attention,
    prefill_attention,
    quantize_features,
    quantize_tokens,
)

__all__ = ["merge_attention", "prefill_attention", "quantize_features", "quantize_tokens"]
