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
from mla_quant.kernels.record_decode import KeyList
from mla_quant.kernels.record_ops import (
    dense_decode,
    gather_records,
    norm_rotate_store,
    sparse_decode,
    store_records,
)

__all__ = [
    "KeyList",
    "OperandFormats",
    "OperandLayout",
    "allocate",
    "decode_attention",
    "dense_decode",
    "gather_records",
    "merge_attention",
    "norm_rotate_store",
    "prefill_attention",
    "quantize_features",
    "quantize_tokens",
    "sparse_decode",
    "store_records",
    "write_operands",
]
