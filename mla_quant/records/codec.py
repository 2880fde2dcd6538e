"""Packing rows of latents into records and back, in plain torch on any device.

Everything here reads a `RecordFormat`; no format has code of its own. Arithmetic is fp32, and
what kernels write and read is compared with this.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from mla_quant.errors import RecordError
from mla_quant.formats import UE8M0, ElementFormat
from mla_quant.records.formats import (
    FP32_MAX,
    FP32_SMALLEST_NORMAL,
    BlockScale,
    RecordFormat,
    Segment,
)
from mla_quant.reference import decode, encode, round_to, saturating_cast

OnNan = Literal["refuse", "poison"]
"""What packing does with NaN: an error, or a NaN scale that makes its whole group read as NaN."""

_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def outer_scale(amax: float, fmt: RecordFormat) -> float:
    """The outer scale of a layer's latents: amax / (element.max · scale.max).

    Args:
        amax: Largest magnitude of the layer's latents (without a rope segment); 0 gives the
            smallest scale, with which every latent but 0 saturates.
        fmt: The record they will be packed into.

    Returns:
        An fp32 number, at least the smallest normal one, for `pack`, `unpack` and `RecordCache`.

    Raises:
        RecordError: The format takes no outer scale, or `amax` is no finite number >= 0.
    """
    quant_max = fmt.latent.quant_max
    if fmt.outer_scale != "per layer" or quant_max is None:
        raise RecordError(_no_outer_scale(fmt))
    if not (math.isfinite(amax) and amax >= 0):
        raise RecordError(f"amax is {amax!r}; it must be a finite number, 0 or more")
    scale = torch.tensor(amax, dtype=torch.float32) / torch.tensor(quant_max)
    return scale.clamp(min=FP32_SMALLEST_NORMAL).item()


def check_outer_scale(value: float, fmt: RecordFormat) -> None:
    """Refuse an outer scale that the format does not take or fp32 cannot hold as a normal number.

    Raises:
        RecordError: See above; 1 is always allowed.
    """
    if value == 1.0:
        return
    if fmt.outer_scale != "per layer":
        raise RecordError(f"outer_scale is {value!r}, but {_no_outer_scale(fmt)}")
    if not FP32_SMALLEST_NORMAL <= value <= FP32_MAX:
        raise RecordError(
            f"outer_scale is {value!r}; it must be a positive normal fp32 number, such as "
            "`outer_scale(amax, fmt)` gives, or 1 for none"
        )


def _no_outer_scale(fmt: RecordFormat) -> str:
    own = fmt.outer_scale == "per token"
    reason = "stores an outer scale per token" if own else "has block scales of unlimited range"
    return f"{fmt.name} takes no outer scale: it {reason}; leave outer_scale at 1"


def pack(
    latent: Tensor,
    rope: Tensor | None,
    fmt: RecordFormat,
    *,
    outer_scale: float = 1.0,
    rope_dtype: torch.dtype = torch.bfloat16,
    nan: OnNan = "refuse",
) -> Tensor:
    """Pack latents and rope parts into records.

    Magnitudes beyond what codes and scales can hold saturate, ±Inf included; a 16-bit rope part
    keeps its bits.

    Args:
        latent: [tokens, fmt.latent.width], bfloat16, float16 or float32.
        rope: [tokens, fmt.rope_width], likewise; None where the format has no rope segment.
        fmt: Record format.
        outer_scale: Scale of the layer that multiplies the latent's block scales.
        rope_dtype: What a 16-bit rope part is stored as; float32 is rounded to it.
        nan: "refuse", or "poison": the scale of a group with NaN becomes NaN, as do codes that can
            be NaN. NaN enters no maximum.

    Returns:
        uint8 [tokens, fmt.record_bytes]; a footer's fields follow those of the row.

    Raises:
        RecordError: Wrong shapes, dtypes or devices; NaN; an outer scale the format does not take.
    """
    parts = check_input(latent, rope, fmt, outer_scale, rope_dtype, nan)
    refuse_nan(parts, fmt, nan)
    return encode_rows(parts, fmt, outer_scale, rope_dtype)


def unpack(
    rows: Tensor,
    fmt: RecordFormat,
    *,
    outer_scale: float = 1.0,
    rope_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Read records, whoever wrote them.

    Args:
        rows: uint8 [tokens, fmt.record_bytes], as `pack` returns them.
        fmt: Record format.
        outer_scale: As it was packed with.
        rope_dtype: As it was packed with.

    Returns:
        fp32 latent [tokens, fmt.latent.width] and rope part [tokens, fmt.rope_width]. V is the
        first `fmt.v_width` values of both side by side. The latent is
        (element · block scale) · outer_scale, the product in parentheses exact for E2M1.

    Raises:
        RecordError: Wrong shape or dtype, or an outer scale the format does not take.
    """
    check_outer_scale(outer_scale, fmt)
    check_rope_dtype(rope_dtype, fmt)
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != fmt.record_bytes:
        raise RecordError(
            f"{fmt.name} records must be uint8 [tokens, {fmt.record_bytes}], found "
            f"{_described(rows)}"
        )
    values = {
        name: _decode_segment(rows, fmt, name, segment, rope_dtype)
        for name, segment in fmt.segments
    }
    latent = values["latent"]
    if outer_scale != 1.0:
        latent = latent * latent.new_tensor(outer_scale)
    return latent, values.get("rope", latent.new_zeros(len(rows), 0))


def _described(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


# --- checks


def check_rope_dtype(rope_dtype: torch.dtype, fmt: RecordFormat) -> None:
    """Refuse a dtype in which the format keeps no 16-bit rope part."""
    if fmt.rope is None or fmt.rope.element is not None:
        return
    name = str(rope_dtype).removeprefix("torch.")
    if name not in fmt.rope.dtypes:
        raise RecordError(
            f"rope_dtype is {name}, but {fmt.name} stores the rope part as "
            f"{' or '.join(fmt.rope.dtypes)}"
        )


def check_input(
    latent: Tensor,
    rope: Tensor | None,
    fmt: RecordFormat,
    outer_scale: float,
    rope_dtype: torch.dtype,
    nan: OnNan,
) -> dict[str, Tensor]:
    """The parts to pack by the name of their segment, after checks that read no values."""
    if nan not in ("refuse", "poison"):
        raise RecordError(f'nan is {nan!r}; it must be "refuse" or "poison"')
    check_outer_scale(outer_scale, fmt)
    check_rope_dtype(rope_dtype, fmt)
    if latent.dim() != 2:
        raise RecordError(
            f"{fmt.name} packs latents of shape [tokens, {fmt.latent.width}], found "
            f"{_described(latent)}"
        )
    if rope is None:
        rope = latent.new_zeros(len(latent), 0)
    for name, x, width in (
        ("latent", latent, fmt.latent.width),
        ("rope part", rope, fmt.rope_width),
    ):
        if x.shape != (len(latent), width) or x.dtype not in _INPUT_DTYPES:
            raise RecordError(
                f"{fmt.name} ({fmt.geometry}) packs a {name} of shape [{len(latent)}, {width}] in "
                f"bfloat16, float16 or float32, found {_described(x)}"
            )
    if rope.device != latent.device:
        raise RecordError(
            f"the latent is on {latent.device}, the rope part on {rope.device}; move one of them"
        )
    if fmt.rope is None:
        return {"latent": latent}
    if fmt.rope.element is None and rope.dtype not in (rope_dtype, torch.float32):
        raise RecordError(
            f"the rope part is {_described(rope)}, but its bits are stored as {rope_dtype}: pass "
            f"rope_dtype={rope.dtype} here and when unpacking, or convert it"
        )
    return {"latent": latent, "rope": rope}


def refuse_nan(
    parts: dict[str, Tensor], fmt: RecordFormat, nan: OnNan, rows: Tensor | None = None
) -> None:
    """Raise for NaN unless it was asked to poison; `rows` numbers the rows for the message."""
    if nan == "poison":
        return
    for name, x in parts.items():
        found = x.isnan()
        if bool(found.any()):
            row, column = (int(i) for i in found.nonzero()[0])
            if rows is not None:
                row = int(rows[row])
            raise RecordError(
                f"cannot pack NaN into {fmt.name}: {int(found.sum())} of {x.numel()} values of the "
                f"{name} are NaN, the first at row {row}, column {column}; remove them, or pass "
                'nan="poison" to make their groups read as NaN'
            )


# --- values to bytes


def encode_rows(
    parts: dict[str, Tensor], fmt: RecordFormat, outer_scale: float, rope_dtype: torch.dtype
) -> Tensor:
    """Records of parts that `check_input` returned."""
    latent = parts["latent"]
    rows = torch.zeros(len(latent), fmt.record_bytes, dtype=torch.uint8, device=latent.device)
    for name, segment in fmt.segments:
        outer = torch.full((), outer_scale if name == "latent" else 1.0, device=latent.device)
        for field, data in _encode_segment(parts[name], segment, outer, rope_dtype).items():
            place = fmt.field(name + field)
            rows[:, place.offset : place.end] = data
    return rows


def _encode_segment(
    x: Tensor, segment: Segment, outer: Tensor, rope_dtype: torch.dtype
) -> dict[str, Tensor]:
    """Bytes of the segment's fields, each [tokens, size], by what its name ends in."""
    element = segment.element
    if element is None:
        return {"": _bytes(saturating_cast(x, rope_dtype))}
    x = x.float().clamp(-segment.limit, segment.limit)
    if segment.scale is None:
        return {"": _codes(x, element)}

    found = {}
    groups = x.unflatten(-1, (segment.blocks, segment.scale.block))
    nan = groups.isnan()
    amax = groups.abs().masked_fill(nan, 0.0).amax(-1, keepdim=True)
    token_outer = torch.ones_like(outer)
    if segment.outer_offset is not None and segment.quant_max is not None:
        token_amax = amax.amax(-2, keepdim=True)
        token_outer = token_amax * _reciprocal(token_amax, segment.quant_max)
        found["_outer"] = _bytes(token_outer.flatten(1))
    scale = _scale(amax, segment.scale, element, outer, token_outer)
    scale = scale.masked_fill(nan.any(-1, keepdim=True), math.nan)
    found["_scale"] = _scale_bytes(scale.squeeze(-1), segment.scale)
    # At most one of the outer scales is not 1.
    divisor = scale * token_outer * outer
    # +0 without the sign that x / inf would leave: what the writers in the field store.
    quotient = (groups / divisor).masked_fill(divisor == 0, 0.0)
    if element.nan_code is None:
        quotient = quotient.masked_fill(quotient.isnan(), 0.0)
    return found | {"": _codes(quotient.flatten(1), element)}


def _scale(
    amax: Tensor, rule: BlockScale, element: ElementFormat, outer: Tensor, token_outer: Tensor
) -> Tensor:
    """The stored block scales as fp32 values; `amax` is free of NaN."""
    writer = rule.writer
    # A token of zeros has an outer scale of 0, and amax 0 in every block.
    amax = amax / token_outer.masked_fill(token_outer == 0, 1.0)
    if writer.division == "reciprocal":
        exact = amax * _reciprocal(amax, element.max)
    else:
        exact = amax / (torch.full_like(amax, element.max) * outer)
    exact = exact.clamp(min=writer.floor)
    if writer.rounding == "power_of_two_up":
        return round_to(exact, UE8M0)
    if writer.rounding == "none" or rule.format is None:
        return exact
    nearest = round_to(exact, rule.format)
    if writer.rounding == "nearest":
        return nearest
    code = encode(nearest, rule.format)
    up = (nearest < exact) & (code < rule.format.largest_code)
    return decode(code + up.to(torch.uint8), rule.format)


def _reciprocal(like: Tensor, value: float) -> Tensor:
    """fp32(1 / value), a tensor so that no device multiplies in another precision."""
    value_fp32 = torch.full((), value, dtype=torch.float32, device=like.device)
    return torch.ones_like(value_fp32) / value_fp32


def _codes(x: Tensor, element: ElementFormat) -> Tensor:
    codes = encode(x, element)
    if element.nan_code is not None:
        codes = codes.masked_fill(x.isnan(), element.nan_code)
    if element.bits == 4:
        return codes[:, 0::2] | codes[:, 1::2] << 4
    return codes


def _scale_bytes(scale: Tensor, rule: BlockScale) -> Tensor:
    count = scale.shape[-1]
    stored = torch.empty_like(scale)
    stored[:, rule.places(count)] = scale
    return _bytes(stored) if rule.format is None else encode(stored, rule.format)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


# --- bytes to values


def _decode_segment(
    rows: Tensor, fmt: RecordFormat, name: str, segment: Segment, rope_dtype: torch.dtype
) -> Tensor:
    codes = _field(rows, fmt, name)
    if segment.element is None:
        return codes.view(rope_dtype).float()
    if segment.element.bits == 4:
        codes = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)
    values = decode(codes, segment.element)
    if segment.scale is None:
        return values
    stored = _field(rows, fmt, f"{name}_scale")
    rule = segment.scale
    scale = stored.view(torch.float32) if rule.format is None else decode(stored, rule.format)
    scale = scale[:, rule.places(segment.blocks)]
    if segment.outer_offset is not None:
        scale = scale * _field(rows, fmt, f"{name}_outer").view(torch.float32)
    groups = values.unflatten(-1, (segment.blocks, rule.block))
    scaled: Tensor = groups * scale.unsqueeze(-1)
    return scaled.flatten(-2)


def _field(rows: Tensor, fmt: RecordFormat, name: str) -> Tensor:
    """The bytes of a field, where they can be read as wider numbers."""
    field = fmt.field(name)
    return rows[:, field.offset : field.end].clone(memory_format=torch.contiguous_format)
