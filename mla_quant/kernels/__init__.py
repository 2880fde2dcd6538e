"""Fused attention kernels in Triton. This loads triton, which importing `mla_quant` does not."""

from mla_quant.kernels.api import (
    decode_attention,
    merge_attention,
    prefill_attention,
    quantize_features,
    quantize_tokens,
    write_operands,
)
from mla_quant.kernels.decode import OperandFormats
from mla_quant.kernels.operand_cache import OperandLayout, allocate

__all__ = [
    "OperandFormats",
    "OperandLayout",
    "allocate",
    "decode_attention",
    "merge_attention",
    "prefill_attention",
    "quantize_features",
    "quantize_tokens",
    "write_operands",
]
