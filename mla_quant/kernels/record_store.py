"""Storing latents as records of a paged cache, in one launch.

The kernel reads the description of `record_fields`. What it writes is, byte for byte, what
`mla_quant.records.pack_into` does with `nan="poison"`: kernels cannot raise.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_quant.errors import RecordError
from mla_quant.kernels.numerics import (
    INTERPRETED,
    LARGEST_ORDINARY,
    LEAST_ORDINARY,
    round_to_dtype,
)
from mla_quant.kernels.record_fields import (
    AS_IS,
    IS_E2M1,
    IS_E4M3,
    TRITON_DTYPES,
    choose_scale,
    describe,
    encode_elements,
    nan_code,
    nan_scale,
    quotient,
    token_offset,
)
from mla_quant.records import RecordCache
from mla_quant.records.cache import check_rows

RopeStyle = Literal["pairs", "halves"]
"""Which features a rotation mixes: 2i and 2i + 1, or i and i + width / 2."""

_STYLES: dict[str | None, int] = {None: 0, "pairs": 1, "halves": 2}
_BFLOAT16_MAX = tl.constexpr(torch.finfo(torch.bfloat16).max)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_PAIRS = tl.constexpr(_STYLES["pairs"])

_TOKENS = 8
_WARPS = 2


@triton.jit
def _saturated(x, LARGEST: tl.constexpr):
    return tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _store_segment(
    base,
    place,
    live,
    x,
    outer,
    SEGMENT: tl.constexpr,
    PADDED: tl.constexpr,
    ORDINARY: tl.constexpr,
):
    """Scales and codes of fp32 rows.

    Args:
        base: Pointers [tokens] to the starts of pages.
        place: Places in them.
        live: Which tokens to store.
        x: [tokens, PADDED, block], or [tokens, PADDED] without block scales; 0 past the segment.
        outer: Scale of the layer.
        SEGMENT: `SegmentFields`, of a coded segment.
        PADDED: Blocks (or values) of x.
        ORDINARY: `numerics.scale_is_ordinary(outer)` holds.
    """
    magnitude = tl.abs(x)
    SCALE: tl.constexpr = SEGMENT.scale
    if SCALE is not None:
        group = tl.arange(0, PADDED)
        if SEGMENT.outer_at >= 0:
            numbers = tl.where(x == x, tl.minimum(magnitude, SEGMENT.limit), 0.0)
            amax = tl.max(numbers, 2, keep_dims=True)
            poisoned = tl.max((x != x).to(tl.int32), 2, keep_dims=True) > 0
            largest = tl.max(amax, 1, keep_dims=True)
            own = largest * SEGMENT.outer_reciprocal
            at = base + SEGMENT.outer_at + place * SEGMENT.outer_stride
            tl.store(at.to(tl.pointer_type(tl.float32)), tl.reshape(own, [x.shape[0]]), mask=live)
            amax = tl.div_rn(amax, tl.where(own == 0, 1.0, own))
        else:
            # As integers, among which NaN are the largest.
            top = tl.max(magnitude.to(tl.int32, bitcast=True), 2, keep_dims=True)
            poisoned = top > _INFINITY_BITS
            # The amax of a group with NaN is not used.
            amax = tl.where(poisoned, 0, top).to(tl.float32, bitcast=True)
            amax = tl.minimum(amax, SEGMENT.limit)
        value, stored = choose_scale(amax, outer, SCALE, SEGMENT.largest)
        value, stored = nan_scale(value, stored, poisoned, SCALE)
        divisor = value
        if SEGMENT.outer_at >= 0:
            divisor = divisor * own
        divisor = divisor * outer
        by_reciprocal: tl.constexpr = SCALE.power_of_two and SEGMENT.outer_at < 0
        bounded: tl.constexpr = ORDINARY and SCALE.code == IS_E4M3 and SEGMENT.outer_at < 0
        if not bounded or INTERPRETED:
            magnitude = tl.minimum(magnitude, SEGMENT.limit)
        ratio = quotient(magnitude, divisor, SEGMENT.largest, by_reciprocal, bounded)
        code = encode_elements(ratio, x, SEGMENT.element)
        # A divisor of 0 gives 0 without a sign, one that is NaN gives NaN.
        special = tl.where(divisor == 0, 0, nan_code(SEGMENT.element))

        stride: tl.constexpr = SCALE.blocks // SCALE.interleave
        slot = group % SCALE.interleave * stride + group // SCALE.interleave
        at = base[:, None] + SCALE.at + (place * SCALE.stride)[:, None]
        at += (slot * SCALE.bytes_each)[None, :]
        stored = tl.reshape(stored, [x.shape[0], PADDED])
        mask = live[:, None] & (group < SCALE.blocks)[None, :]
        if SCALE.code == AS_IS:
            tl.store(at.to(tl.pointer_type(tl.float32)), stored, mask=mask)
        else:
            tl.store(at, stored.to(tl.uint8), mask=mask)
        start = base[:, None, None] + SEGMENT.at + (place * SEGMENT.stride)[:, None, None]
        mask = live[:, None, None] & (group < SCALE.blocks)[None, :, None]
        if SEGMENT.element == IS_E2M1:
            HALF: tl.constexpr = SCALE.block // 2
            low, high = tl.split(tl.reshape(code, [x.shape[0], PADDED, HALF, 2]))
            byte = group[None, :, None] * HALF + tl.arange(0, HALF)[None, None, :]
            pair = tl.where(divisor > 0, (low & 0xF) | (high << 4), special)
            tl.store(start + byte, pair.to(tl.uint8), mask=mask)
        else:
            lane = tl.arange(0, SCALE.block)
            byte = group[None, :, None] * SCALE.block + lane[None, None, :]
            code = tl.where(divisor > 0, code, special)
            tl.store(start + byte, code.to(tl.uint8), mask=mask)
    else:
        tl.static_assert(SEGMENT.element == IS_E4M3, "only E4M3 is stored without block scales")
        feature = tl.arange(0, PADDED)
        code = encode_elements(tl.minimum(magnitude, SEGMENT.largest), x, SEGMENT.element)
        code = tl.where(x == x, code, nan_code(SEGMENT.element))
        at = base[:, None] + SEGMENT.at + (place * SEGMENT.stride)[:, None] + feature[None, :]
        mask = live[:, None] & (feature < SEGMENT.width)[None, :]
        tl.store(at, code.to(tl.uint8), mask=mask)


@triton.jit
def _rotated(
    x, partner, cos_sin, position, live, feature, STYLE: tl.constexpr, WIDTH: tl.constexpr
):
    """Rotary embedding in fp32 of [tokens, features]; `partner` is what a feature mixes with."""
    if STYLE == _PAIRS:
        angle = feature // 2
        first = feature % 2 == 0
    else:
        angle = feature % (WIDTH // 2)
        first = feature < WIDTH // 2
    at = cos_sin + (position * WIDTH)[:, None] + angle[None, :]
    mask = live[:, None] & (feature < WIDTH)[None, :]
    cos = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(at + WIDTH // 2, mask=mask, other=0.0).to(tl.float32)
    same, mixed = x * cos, partner * sin
    return tl.where(first[None, :], same - mixed, same + mixed)


@triton.jit
def _zero(base, place, live, AT: tl.constexpr, STRIDE: tl.constexpr, BYTES: tl.constexpr):
    """Write zeros where a record has no field."""
    SPAN: tl.constexpr = triton.next_power_of_2(BYTES)
    byte = tl.arange(0, SPAN)
    at = (base + AT + place * STRIDE)[:, None] + byte[None, :]
    mask = live[:, None] & (byte < BYTES)[None, :]
    tl.store(at, tl.zeros([base.shape[0], SPAN], tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["rows", "num_slots", "max_position"])
def _store_kernel(
    latent,
    rope,
    slots,
    cache,
    outer,
    weight,
    positions,
    cos_sin,
    normed,
    rotated,
    epsilon,
    rows,
    num_slots,
    max_position,
    page_stride,
    latent_stride,
    rope_stride,
    FIELDS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROPE_DTYPE: tl.constexpr,
    ORDINARY: tl.constexpr,
    NORM: tl.constexpr,
    STYLE: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    ROPE_BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program: TOKENS rows. LATENT_PADDED counts blocks, or values without block scales."""
    row = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    exists = row < rows
    slot = tl.load(slots + row, mask=exists, other=-1).to(tl.int64)
    live = exists & (slot >= 0) & (slot < num_slots)
    start, place = token_offset(tl.where(live, slot, 0), page_stride, PAGE_SIZE)
    base = cache + start

    # The latent, its blocks as the last axis.
    SEGMENT: tl.constexpr = FIELDS.latent
    BLOCK: tl.constexpr = SEGMENT.scale.block if SEGMENT.scale is not None else 1
    feature = tl.arange(0, LATENT_PADDED)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = feature < SEGMENT.width
    if NORM or normed is not None:
        wanted = exists
    else:
        wanted = live
    x = tl.load(
        latent + (row * latent_stride)[:, None, None] + feature[None, :, :],
        mask=wanted[:, None, None] & inside[None, :, :],
        other=0.0,
    )
    DTYPE: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    if NORM:
        mean = tl.sum(tl.sum(x * x, 2, keep_dims=True), 1, keep_dims=True) / SEGMENT.width
        x = round_to_dtype(x * tl.div_rn(1.0, tl.sqrt_rn(mean + epsilon)), DTYPE).to(tl.float32)
        gain = tl.load(weight + feature, mask=inside, other=0.0).to(tl.float32)
        x = round_to_dtype(x * gain[None, :, :], DTYPE)
        if normed is not None:
            tl.store(
                normed + (row * SEGMENT.width)[:, None, None] + feature[None, :, :],
                x,
                mask=exists[:, None, None] & inside[None, :, :],
            )
        x = x.to(tl.float32)
    if SEGMENT.scale is None:
        x = tl.reshape(x, [TOKENS, LATENT_PADDED])
    _store_segment(base, place, live, x, outer, SEGMENT, LATENT_PADDED, ORDINARY)

    ROPE: tl.constexpr = FIELDS.rope
    if ROPE is not None:
        part = tl.arange(0, ROPE_PADDED)
        mask = exists[:, None] & (part < ROPE.width)[None, :]
        source = rope + (row * rope_stride)[:, None]
        y = tl.load(source + part[None, :], mask=mask, other=0.0)
        Y_DTYPE: tl.constexpr = y.dtype
        if STYLE != 0:
            HALF: tl.constexpr = ROPE.width // 2
            if STYLE == _PAIRS:
                other = part ^ 1
            else:
                other = (part + HALF) % ROPE.width
            position = tl.load(positions + row, mask=exists, other=0).to(tl.int64)
            known = exists & (position >= 0) & (position < max_position)
            mixed = tl.load(source + other[None, :], mask=mask, other=0.0).to(tl.float32)
            y = _rotated(y.to(tl.float32), mixed, cos_sin, position, known, part, STYLE, ROPE.width)
            y = round_to_dtype(y, Y_DTYPE)
            if rotated is not None:
                tl.store(rotated + (row * ROPE.width)[:, None] + part[None, :], y, mask=mask)
        if ROPE.element == AS_IS:
            if tl.float32 == Y_DTYPE:
                if tl.bfloat16 == ROPE_DTYPE:
                    y = _saturated(y, _BFLOAT16_MAX)
                y = round_to_dtype(y, ROPE_DTYPE)
            at = base[:, None] + ROPE.at + (place * ROPE.stride)[:, None]
            at = (at + (part * 2)[None, :]).to(tl.pointer_type(ROPE_DTYPE))
            tl.store(at, y, mask=mask & live[:, None])
        else:
            y = y.to(tl.float32)
            if ROPE.scale is not None:
                y = tl.reshape(y, [TOKENS, ROPE_BLOCKS, ROPE_PADDED // ROPE_BLOCKS])
                _store_segment(base, place, live, y, 1.0, ROPE, ROPE_BLOCKS, True)
            else:
                _store_segment(base, place, live, y, 1.0, ROPE, ROPE_PADDED, True)

    for gap in tl.static_range(len(FIELDS.padding)):
        _zero(
            base,
            place,
            live,
            FIELDS.padding[gap][0],
            FIELDS.padding[gap][1],
            FIELDS.padding[gap][2],
        )


def store_records(
    cache: RecordCache,
    latent: Tensor,
    rope: Tensor | None,
    slots: Tensor,
    *,
    unique_slots: bool = False,
) -> None:
    """Store rows in their slots; all other bytes of the cache stay.

    Slots that are negative or beyond the cache are skipped. NaN makes its group read as NaN,
    magnitudes that codes cannot hold saturate. May be captured in a CUDA graph.

    Args:
        cache: Where to store; it names the format.
        latent: [tokens, latent width], bfloat16, float16 or float32; a row's features consecutive.
        rope: [tokens, rope width], likewise; None where the format has no rope segment.
        slots: int32 or int64 [tokens].
        unique_slots: Whether no valid slot occurs twice, as engines assign them. Otherwise the
            first of several rows for one slot is stored, which needs a sort.

    Raises:
        RecordError: Wrong shapes, dtypes, devices or strides.
    """
    _launch(cache, latent, rope, slots, unique_slots, {})


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
    """RMSNorm of the latent, rotary embedding of the rope part, and `store_records`, in one launch.

    The latent becomes `round(x / sqrt(mean(x²) + epsilon)) · weight`, both roundings to its dtype
    and everything else in fp32, as the RMSNorm of transformers' MLA models has it. The rope part
    is rotated in fp32 and rounded once.

    Args:
        cache: Where to store.
        latent: [tokens, latent width], before the norm.
        rope: [tokens, rope width], before the rotation; None without a rope segment.
        slots: As for `store_records`.
        weight: [latent width], of the norm.
        epsilon: Of the norm.
        positions: int32 or int64 [tokens], rows of `cos_sin`; of those outside it the rope part
            becomes 0. None: the rope part is stored as it is.
        cos_sin: [positions, rope width], cosines of all angles, then sines.
        rope_style: Which features are rotated together.
        normed: [tokens, latent width], contiguous: receives the latent after the norm, of rows
            whose slot is skipped too.
        rotated: [tokens, rope width], contiguous: receives the rope part after the rotation.
        unique_slots: As for `store_records`.

    Raises:
        RecordError: As `store_records`; arguments that do not fit each other; or a format whose
            latent segment holds the rope part, which has no norm of its own.
    """
    fmt = cache.format
    if fmt.rope_inside:
        raise RecordError(
            f"{fmt.name} holds the rope part inside the latent, which cannot be normed together; "
            "norm and rotate before `store_records`"
        )
    if (positions is None) != (cos_sin is None):
        raise RecordError("give positions and cos_sin together, or neither")
    if positions is not None and fmt.rope is None:
        raise RecordError(f"{fmt.name} has no rope part to rotate; leave positions out")
    wanted: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("weight", weight, (fmt.latent.width,)),
        ("positions", positions, (len(latent),)),
        ("cos_sin", cos_sin, (-1 if cos_sin is None else len(cos_sin), fmt.rope_width)),
        ("normed", normed, (len(latent), fmt.latent.width)),
        ("rotated", rotated, (len(latent), fmt.rope_width)),
    ]
    for name, x, shape in wanted:
        if x is None:
            continue
        if tuple(x.shape) != shape or not x.is_contiguous() or x.device != latent.device:
            raise RecordError(
                f"{name} must be contiguous {list(shape)} on {latent.device}, found "
                f"{list(x.shape)}, strides {list(x.stride())}, on {x.device}"
            )
    if rope_style not in ("pairs", "halves"):
        raise RecordError(f'rope_style is {rope_style!r}; give "pairs" or "halves"')
    if positions is not None and positions.dtype not in (torch.int32, torch.int64):
        raise RecordError(f"positions must be int32 or int64, found {positions.dtype}")
    if rotated is not None and positions is None:
        raise RecordError("nothing is rotated into `rotated` without positions")
    for name, out, source in (("normed", normed, latent), ("rotated", rotated, rope)):
        if out is not None and source is not None and out.dtype != source.dtype:
            raise RecordError(f"{name} is {out.dtype}, its source {source.dtype}; make them equal")
    _launch(
        cache,
        latent,
        rope,
        slots,
        unique_slots,
        {
            "weight": weight,
            "epsilon": epsilon,
            "positions": positions,
            "cos_sin": cos_sin,
            "normed": normed,
            "rotated": rotated,
            "max_position": 0 if cos_sin is None else len(cos_sin),
            "NORM": True,
            "STYLE": _STYLES[None if positions is None else rope_style],
        },
    )


def _launch(
    cache: RecordCache,
    latent: Tensor,
    rope: Tensor | None,
    slots: Tensor,
    unique_slots: bool,
    fused: dict[str, object],
) -> None:
    parts = check_rows(cache, latent, rope, slots)
    for name, x in parts.items():
        if len(x) > 1 and x.stride(1) != 1:
            raise RecordError(
                f"the {name} part has strides {list(x.stride())}; the features of a row must be "
                "consecutive"
            )
    if not len(latent):
        return
    fmt = cache.format
    if not unique_slots:
        slots = first_of_each(slots)
    segment, y = fmt.latent, parts.get("rope")
    groups = segment.blocks or segment.width
    rope_padded = triton.next_power_of_2(max(fmt.rope_width, 1))
    arguments: dict[str, object] = {
        "weight": None,
        "epsilon": 0.0,
        "positions": None,
        "cos_sin": None,
        "normed": None,
        "rotated": None,
        "max_position": 0,
        "NORM": False,
        "STYLE": _STYLES[None],
    }
    _store_kernel[(triton.cdiv(len(latent), _TOKENS),)](
        latent=latent,
        rope=y,
        slots=slots,
        cache=cache.data,
        outer=cache.outer_scale,
        rows=len(latent),
        num_slots=cache.num_slots,
        page_stride=cache.data.stride(0),
        latent_stride=latent.stride(0),
        rope_stride=0 if y is None else y.stride(0),
        FIELDS=describe(fmt, cache.page_size),
        PAGE_SIZE=cache.page_size,
        ROPE_DTYPE=TRITON_DTYPES[cache.rope_dtype],
        ORDINARY=LEAST_ORDINARY.value < cache.outer_scale < LARGEST_ORDINARY.value,
        LATENT_PADDED=triton.next_power_of_2(groups),
        ROPE_PADDED=rope_padded,
        ROPE_BLOCKS=fmt.rope.blocks if fmt.rope is not None else 0,
        TOKENS=_TOKENS,
        num_warps=_WARPS,
        # Products and sums of a rotation are rounded one by one, as separate steps round them.
        enable_fp_fusion=False,
        **{**arguments, **fused},
    )


def first_of_each(slots: Tensor) -> Tensor:
    """Slots with -1 for rows whose slot a row before them has; shapes depend on no values."""
    ordered, order = slots.sort(stable=True)
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[1:] = ordered[1:] == ordered[:-1]
    return slots.masked_fill(torch.empty_like(again).scatter_(0, order, again), -1)
