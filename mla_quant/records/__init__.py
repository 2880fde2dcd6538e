"""KV-cache records: how one token's latent is stored, as data, and plain torch that reads it.

`formats` describes the records, `codec` packs and unpacks rows, `cache` places rows in pages.
"""

from mla_quant.records.cache import RecordCache, pack_into, unpack_from
from mla_quant.records.codec import OnNan, check_outer_scale, outer_scale, pack, unpack
from mla_quant.records.formats import (
    RECORDS,
    UNROUNDED,
    BlockScale,
    Field,
    RecordFormat,
    ScaleWriter,
    Segment,
    record_format,
)

__all__ = [
    "RECORDS",
    "UNROUNDED",
    "BlockScale",
    "Field",
    "OnNan",
    "RecordCache",
    "RecordFormat",
    "ScaleWriter",
    "Segment",
    "check_outer_scale",
    "outer_scale",
    "pack",
    "pack_into",
    "record_format",
    "unpack",
    "unpack_from",
]
