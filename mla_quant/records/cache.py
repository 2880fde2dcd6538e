"""Records in a paged cache: where a slot lies, writing and reading slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_quant.errors import RecordError
from mla_quant.records.codec import (
    OnNan,
    check_input,
    check_outer_scale,
    check_rope_dtype,
    encode_rows,
    refuse_nan,
    unpack,
)
from mla_quant.records.formats import RecordFormat


@dataclass(frozen=True, eq=False)
class RecordCache:
    """A paged cache of one layer with all that is needed to read it.

    Slot = page · page_size + place in the page.

    Attributes:
        data: uint8 [pages, bytes of a page]. Pages may lie apart in memory (a strided view); the
            bytes of one are consecutive.
        format: What the records are. Two formats of one size are still two formats.
        page_size: Tokens in a page.
        outer_scale: Scale of the layer that multiplies the latent's block scales.
        rope_dtype: What a 16-bit rope part is stored as.

    Raises:
        RecordError: `data` does not fit format and page size, or the format does not take the
            outer scale or the dtype.
    """

    data: Tensor
    format: RecordFormat
    page_size: int
    outer_scale: float = 1.0
    rope_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        check_outer_scale(self.outer_scale, self.format)
        check_rope_dtype(self.rope_dtype, self.format)
        page_bytes = self.format.page_bytes(self.page_size)
        data = self.data
        if data.dtype != torch.uint8 or data.dim() != 2 or data.shape[1] != page_bytes:
            raise RecordError(
                f"a cache of {self.format.name} with {self.page_size} tokens a page must be uint8 "
                f"[pages, {page_bytes}], found {str(data.dtype).removeprefix('torch.')} "
                f"{list(data.shape)}"
            )
        if data.stride(1) != 1 or (len(data) > 1 and data.stride(0) < page_bytes):
            raise RecordError(
                f"the cache has strides {data.stride()}: the {page_bytes} bytes of a page must be "
                "consecutive, and pages must not overlap"
            )

    @classmethod
    def allocate(
        cls,
        fmt: RecordFormat,
        num_pages: int,
        page_size: int = 64,
        *,
        outer_scale: float = 1.0,
        rope_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> RecordCache:
        """A cache of zeros."""
        shape = (num_pages, fmt.page_bytes(page_size))
        data = torch.zeros(shape, dtype=torch.uint8, device=device)
        return cls(data, fmt, page_size, outer_scale, rope_dtype)

    @property
    def num_slots(self) -> int:
        """Tokens the cache has room for; slots are 0 to one less."""
        return len(self.data) * self.page_size

    def require(self, name: str) -> None:
        """Refuse a reader or writer of another format.

        Args:
            name: Name of the record format that the caller works with.

        Raises:
            RecordError: The cache holds another one.
        """
        if name != self.format.name:
            raise RecordError(
                f"the cache holds {self.format.name} records ({self.format.record_bytes} bytes), "
                f"not {name!r}; use a reader of that format, or write the cache anew"
            )

    def areas(self) -> tuple[Tensor, Tensor]:
        """Rows [pages, page_size, row bytes] and footer [pages, page_size, rest], as views."""
        row_bytes, footer_bytes = self.format.rows_end, self.format.footer_bytes
        start, end = self.page_size * row_bytes, self.page_size * self.format.record_bytes
        return (
            self.data[:, :start].unflatten(1, (self.page_size, row_bytes)),
            self.data[:, start:end].unflatten(1, (self.page_size, footer_bytes)),
        )


def pack_into(
    cache: RecordCache,
    latent: Tensor,
    rope: Tensor | None,
    slots: Tensor,
    *,
    nan: OnNan = "refuse",
) -> None:
    """Pack rows and store each in its slot; all other bytes of the cache stay.

    Slots that are negative or beyond the cache are skipped; what their rows hold does not matter.
    Of several rows for one slot the first is stored. On an error nothing is written.

    Args:
        cache: Where to store; it names the format.
        latent: [tokens, latent width], as for `pack`.
        rope: [tokens, rope width], as for `pack`.
        slots: int32 or int64 [tokens].
        nan: As for `pack`.

    Raises:
        RecordError: As `pack`, or slots of a wrong shape, dtype or device.
    """
    fmt = cache.format
    parts = check_rows(cache, latent, rope, slots, nan)
    slots = slots.long()
    chosen = _first_rows(slots, cache.num_slots)
    parts = {name: x[chosen] for name, x in parts.items()}
    refuse_nan(parts, fmt, nan, rows=chosen)
    records = encode_rows(parts, fmt, cache.outer_scale, cache.rope_dtype)
    page, place = _locate(cache, slots[chosen])
    rows, footer = cache.areas()
    rows[page, place] = records[:, : fmt.rows_end]
    footer[page, place] = records[:, fmt.rows_end :]


def unpack_from(cache: RecordCache, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Read the records in slots.

    Args:
        cache: Where to read.
        slots: int32 or int64 [tokens]; a slot may occur more than once.

    Returns:
        fp32 latent [tokens, latent width] and rope part [tokens, rope width], as `unpack` gives
        them. Rows of slots that are negative or beyond the cache are zeros.

    Raises:
        RecordError: Slots of a wrong shape, dtype or device.
    """
    _check_slots(cache, slots)
    slots = slots.long()  # The only dtype that every version of torch indexes with.
    valid = (slots >= 0) & (slots < cache.num_slots)
    page, place = _locate(cache, slots[valid])
    records = torch.cat([area[page, place] for area in cache.areas()], dim=1)
    parts = unpack(
        records, cache.format, outer_scale=cache.outer_scale, rope_dtype=cache.rope_dtype
    )
    latent, rope = (part.new_zeros(len(slots), part.shape[1]) for part in parts)
    latent[valid], rope[valid] = parts
    return latent, rope


def check_rows(
    cache: RecordCache, latent: Tensor, rope: Tensor | None, slots: Tensor, nan: OnNan = "poison"
) -> dict[str, Tensor]:
    """The parts to store by the name of their segment, after checks that read no values.

    Raises:
        RecordError: See `pack_into`.
    """
    fmt = cache.format
    parts = check_input(latent, rope, fmt, cache.outer_scale, cache.rope_dtype, nan)
    _check_slots(cache, slots)
    if len(slots) != len(latent):
        raise RecordError(f"{len(slots)} slots were given for {len(latent)} rows; one each")
    if latent.device != cache.data.device:
        raise RecordError(
            f"the latent is on {latent.device}, the cache on {cache.data.device}; move one of them"
        )
    return parts


def _check_slots(cache: RecordCache, slots: Tensor) -> None:
    if slots.dtype not in (torch.int32, torch.int64) or slots.dim() != 1:
        raise RecordError(
            f"slots must be int32 or int64 [tokens], found "
            f"{str(slots.dtype).removeprefix('torch.')} {list(slots.shape)}"
        )
    if slots.device != cache.data.device:
        raise RecordError(
            f"slots are on {slots.device}, the cache on {cache.data.device}; move one of them"
        )


def _locate(cache: RecordCache, slots: Tensor) -> tuple[Tensor, Tensor]:
    return slots // cache.page_size, slots % cache.page_size


def _first_rows(slots: Tensor, num_slots: int) -> Tensor:
    """Rows to store: those with a slot of the cache, the first for each slot."""
    rows = ((slots >= 0) & (slots < num_slots)).nonzero().squeeze(1)
    ordered, order = slots[rows].sort(stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return rows[order[first]]
