"""The record kernels as `torch.library` operators, and as functions that take a `RecordCache`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from mla_quant.kernels import record_decode, record_store
from mla_quant.kernels.ops import NAMESPACE
from mla_quant.kernels.record_decode import KeyList, LseConvention
from mla_quant.kernels.record_store import RopeStyle
from mla_quant.records import RECORDS, RecordCache, RecordFormat, ScaleWriter, record_format


class PackedCache(NamedTuple):
    """A `RecordCache` as operators take it; `record` is of `pack_format`."""

    data: Tensor
    record: str
    page_size: int
    outer_scale: float
    rope_dtype: torch.dtype


def pack_cache(cache: RecordCache) -> PackedCache:
    """What a cache is, as arguments of an operator."""
    return PackedCache(
        cache.data, pack_format(cache.format), cache.page_size, cache.outer_scale, cache.rope_dtype
    )


def pack_format(fmt: RecordFormat) -> str:
    """Name of a format, and its writer if that is another than the format's own."""
    scale = fmt.latent.scale
    if RECORDS.get(fmt.name) is fmt or scale is None:
        return fmt.name
    writer = scale.writer
    return f"{fmt.name},{writer.rounding},{writer.floor!r},{writer.division}"


@functools.lru_cache(maxsize=64)
def unpack_format(packed: str) -> RecordFormat:
    """Inverse of `pack_format`."""
    name, *writer = packed.split(",")
    fmt = record_format(name)
    if writer:
        rounding, floor, division = writer
        fmt = fmt.with_writer(ScaleWriter(rounding, float(floor), division))  # type: ignore[arg-type]
    return fmt


def _unpack_cache(
    data: Tensor, record: str, page_size: int, outer_scale: float, rope_dtype: torch.dtype
) -> RecordCache:
    return RecordCache(data, unpack_format(record), page_size, outer_scale, rope_dtype)


@torch.library.custom_op(f"{NAMESPACE}::store_records", mutates_args=("data",))
def _store_records(
    data: Tensor,
    record: str,
    page_size: int,
    outer_scale: float,
    rope_dtype: torch.dtype,
    latent: Tensor,
    rope: Tensor | None,
    slots: Tensor,
    unique_slots: bool,
) -> None:
    cache = _unpack_cache(data, record, page_size, outer_scale, rope_dtype)
    record_store.store_records(cache, latent, rope, slots, unique_slots=unique_slots)


@torch.library.custom_op(
    f"{NAMESPACE}::norm_rotate_store", mutates_args=("data", "normed", "rotated")
)
def _norm_rotate_store(
    data: Tensor,
    record: str,
    page_size: int,
    outer_scale: float,
    rope_dtype: torch.dtype,
    latent: Tensor,
    rope: Tensor | None,
    slots: Tensor,
    weight: Tensor,
    epsilon: float,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    rope_style: str,
    normed: Tensor | None,
    rotated: Tensor | None,
    unique_slots: bool,
) -> None:
    record_store.norm_rotate_store(
        _unpack_cache(data, record, page_size, outer_scale, rope_dtype),
        latent,
        rope,
        slots,
        weight=weight,
        epsilon=epsilon,
        positions=positions,
        cos_sin=cos_sin,
        rope_style=rope_style,  # type: ignore[arg-type]
        normed=normed,
        rotated=rotated,
        unique_slots=unique_slots,
    )


@torch.library.custom_op(f"{NAMESPACE}::record_dense_decode", mutates_args=())
def _dense_decode(
    q: Tensor,
    data: Tensor,
    record: str,
    page_size: int,
    outer_scale: float,
    rope_dtype: torch.dtype,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    causal: bool,
    sink: Tensor | None,
    lse_convention: str,
    num_splits: int | None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    return record_decode.dense_decode(
        q,
        _unpack_cache(data, record, page_size, outer_scale, rope_dtype),
        block_table,
        seq_lens,
        scale=scale,
        causal=causal,
        sink=sink,
        lse_convention=lse_convention,  # type: ignore[arg-type]
        num_splits=num_splits,
        out_dtype=out_dtype,
    )


@torch.library.custom_op(f"{NAMESPACE}::record_sparse_decode", mutates_args=())
def _sparse_decode(
    q: Tensor,
    data: Tensor,
    record: str,
    page_size: int,
    outer_scale: float,
    rope_dtype: torch.dtype,
    indices: Tensor,
    lengths: Tensor | None,
    extra_data: Tensor | None,
    extra_record: str,
    extra_page_size: int,
    extra_outer_scale: float,
    extra_rope_dtype: torch.dtype,
    extra_indices: Tensor | None,
    extra_lengths: Tensor | None,
    scale: float,
    sink: Tensor | None,
    lse_convention: str,
    num_splits: int | None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    cache = _unpack_cache(data, record, page_size, outer_scale, rope_dtype)
    extra = None
    if extra_data is not None and extra_indices is not None:
        other = _unpack_cache(
            extra_data, extra_record, extra_page_size, extra_outer_scale, extra_rope_dtype
        )
        extra = KeyList(other, extra_indices, extra_lengths)
    return record_decode.sparse_decode(
        q,
        KeyList(cache, indices, lengths),
        extra,
        scale=scale,
        sink=sink,
        lse_convention=lse_convention,  # type: ignore[arg-type]
        num_splits=num_splits,
        out_dtype=out_dtype,
    )


@torch.library.custom_op(f"{NAMESPACE}::gather_records", mutates_args=("out",))
def _gather_records(
    data: Tensor,
    record: str,
    page_size: int,
    outer_scale: float,
    rope_dtype: torch.dtype,
    block_table: Tensor,
    cu_lengths: Tensor,
    max_length: int,
    starts: Tensor | None,
    out: Tensor,
) -> None:
    cache = _unpack_cache(data, record, page_size, outer_scale, rope_dtype)
    record_decode.gather(cache, block_table, cu_lengths, max_length, starts=starts, out=out)


def _nothing(*args: object, **kwargs: object) -> None:
    """What operators return that write into their arguments."""


for _operator in (_store_records, _norm_rotate_store, _gather_records):
    _operator.register_fake(_nothing)


@_dense_decode.register_fake
@_sparse_decode.register_fake
def _(q: Tensor, data: Tensor, record: str, *args: object) -> tuple[Tensor, Tensor]:
    out_dtype = args[-1]
    assert isinstance(out_dtype, torch.dtype)
    rows = q.shape[:3]
    out = q.new_empty(*rows, unpack_format(record).v_width, dtype=out_dtype)
    return out, q.new_empty(rows, dtype=torch.float32)


def store_records(
    cache: RecordCache,
    latent: Tensor,
    rope: Tensor | None,
    slots: Tensor,
    *,
    unique_slots: bool = False,
) -> None:
    """Store rows in slots; see `mla_quant.kernels.record_store.store_records`."""
    _store_records(*pack_cache(cache), latent, rope, slots, unique_slots)


def norm_rotate_store(
    cache: RecordCache,
    latent: Tensor,
    rope: Tensor | None,
    slots: Tensor,
    *,
    weight: Tensor,
    epsilon: float,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    rope_style: RopeStyle = "pairs",
    normed: Tensor | None = None,
    rotated: Tensor | None = None,
    unique_slots: bool = False,
) -> None:
    """Norm, rotate and store; see `mla_quant.kernels.record_store.norm_rotate_store`."""
    _norm_rotate_store(
        *pack_cache(cache),
        latent,
        rope,
        slots,
        weight,
        epsilon,
        positions,
        cos_sin,
        rope_style,
        normed,
        rotated,
        unique_slots,
    )


def dense_decode(
    q: Tensor,
    cache: RecordCache,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    causal: bool = True,
    sink: Tensor | None = None,
    lse_convention: LseConvention = "natural",
    num_splits: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to sequences; see `mla_quant.kernels.record_decode.dense_decode`."""
    result: tuple[Tensor, Tensor] = _dense_decode(
        q,
        *pack_cache(cache),
        block_table,
        seq_lens,
        scale,
        causal,
        sink,
        lse_convention,
        num_splits,
        out_dtype or q.dtype,
    )
    return result


def sparse_decode(
    q: Tensor,
    keys: KeyList,
    extra: KeyList | None = None,
    *,
    scale: float,
    sink: Tensor | None = None,
    lse_convention: LseConvention = "natural",
    num_splits: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to listed slots; see `mla_quant.kernels.record_decode.sparse_decode`."""
    packed = pack_cache(keys.cache)
    other = (None, *packed[1:]) if extra is None else pack_cache(extra.cache)
    result: tuple[Tensor, Tensor] = _sparse_decode(
        q,
        *packed,
        keys.indices,
        keys.lengths,
        *other,
        None if extra is None else extra.indices,
        None if extra is None else extra.lengths,
        scale,
        sink,
        lse_convention,
        num_splits,
        out_dtype or q.dtype,
    )
    return result


def gather_records(
    cache: RecordCache,
    block_table: Tensor,
    cu_lengths: Tensor,
    max_length: int,
    *,
    starts: Tensor | None = None,
    out: Tensor,
) -> Tensor:
    """Read ranges; see `mla_quant.kernels.record_decode.gather`."""
    _gather_records(*pack_cache(cache), block_table, cu_lengths, max_length, starts, out)
    return out
