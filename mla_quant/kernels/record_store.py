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
from mla_quant.kernels.decode_shapes import device_properties
from mla_quant.kernels.numerics import (
    INTERPRETED,
    any_quotient,
    reciprocal,
    round_to_dtype,
    square_root,
    widened,
)
from mla_quant.kernels.record_fields import (
    AS_IS,
    IS_E2M1,
    IS_E4M3,
    TRITON_DTYPES,
    choose_scale,
    describe,
    element_words,
    nan_scale,
    nan_word,
    quotient,
    token_offset,
)
from mla_quant.records import RecordCache
from mla_quant.records.cache import check_rows

RopeStyle = Literal["pairs", "halves"]
"""Which features a rotation mixes: 2i and 2i + 1, or i and i + width / 2."""

_STYLES: dict[str | None, int] = {None: 0, "pairs": 1, "halves": 2}
_BFLOAT16_MAX = tl.constexpr(torch.finfo(torch.bfloat16).max)
# Above any block's amax by its token's outer scale, which may be a subnormal number.
_FAR_ABOVE = tl.constexpr(8192.0)
# Values that a thread reads at once: 16 bytes of a 16-bit type.
_PART = tl.constexpr(8)
_PAIRS = tl.constexpr(_STYLES["pairs"])

# Between its inverse and this, no remainder of a division by a scale of the layer underflows.
_ORDINARY = 2.0**60
# Compute capability, times 10, from which on there is an instruction that rounds to E4M3.
_CONVERTS_SINCE = 89

# A warp that is a program of its own needs no barriers. With 64 registers a thread, as many are
# resident as a multiprocessor has places for programs.
_WARPS = 1
_REGISTERS = 64
# Tokens of a program whose values, 16 of each in a thread, these registers hold: as 16-bit floats,
# and as fp32.
_TOKENS = 4
_TOKENS_AS_FP32 = 2


@triton.jit
def _saturated(x, LARGEST: tl.constexpr):
    return tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _joined(first, second):
    """Words of eight values side by side with those of the next eight."""
    words: tl.constexpr = first.shape[2]
    both = tl.permute(tl.join(first, second), [0, 1, 3, 2])
    return tl.reshape(both, [first.shape[0], first.shape[1], 2 * words])


@triton.jit
def _store_words(at, words, mask, ALIGNED: tl.constexpr):
    """Store int32 [parts, tokens, words], a token's consecutive from byte pointers [tokens] on."""
    count: tl.constexpr = words.shape[2]
    number = tl.arange(0, words.shape[0])[:, None, None] * count
    number += tl.arange(0, count)[None, None, :]
    at = at[None, :, None]
    if ALIGNED:
        at = at.to(tl.pointer_type(tl.int32))
        tl.store(at + number, words, mask=mask)
    else:
        for byte in tl.static_range(4):
            tl.store(at + (number * 4 + byte), (words >> (8 * byte)).to(tl.uint8), mask=mask)


@triton.jit
def _largest_of(x, AXIS: tl.constexpr, KEEP: tl.constexpr = False):
    """Largest of fp32 without a sign along an axis: NaN if there is any, as its bits are."""
    return tl.max(x.to(tl.int32, bitcast=True), AXIS, keep_dims=KEEP).to(tl.float32, bitcast=True)


@triton.jit
def _of_blocks(x, PARTS: tl.constexpr):
    """Largest of each PARTS neighbours, as `_largest_of` has it, of fp32 [parts, tokens]."""
    if PARTS == 1:
        return x
    return _largest_of(tl.reshape(x, [x.shape[0] // PARTS, PARTS, x.shape[1]]), 1)


@triton.jit
def _largest(first, second):
    """Largest magnitudes [parts, tokens] of both; NaN is the largest of all."""
    x = tl.abs(first)
    if second is not None:
        x = tl.maximum(x, tl.abs(second), propagate_nan=tl.PropagateNan.ALL)
    return _largest_of(x, 2)


@triton.jit
def _largest_number(first, second):
    """Largest magnitudes [parts, tokens] of both but NaN, and sums, which are NaN if any is."""
    x = tl.abs(first)
    y = x if second is None else tl.abs(second)
    total = tl.sum(x + y, 2)
    if INTERPRETED:  # whose maximum keeps NaN
        x, y = tl.where(x == x, x, 0.0), tl.where(y == y, y, 0.0)
    x = tl.max(tl.maximum(x, y), 2)
    return tl.where(x == x, x, 0.0), total


@triton.jit
def _repeated(x, PARTS: tl.constexpr):
    """[blocks, tokens] as [blocks · PARTS, tokens, 1]."""
    if PARTS > 1:
        wide = tl.broadcast_to(x[:, None, :], [x.shape[0], PARTS, x.shape[1]])
        x = tl.reshape(wide, [x.shape[0] * PARTS, x.shape[1]])
    return x[:, :, None]


@triton.jit
def _store_segment(
    base,
    place,
    live,
    first,
    second,
    outer,
    SEGMENT: tl.constexpr,
    DTYPE: tl.constexpr,
    ORDINARY: tl.constexpr,
    CONVERTS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Scales and codes of fp32 rows.

    Args:
        base: Pointers [tokens] to the starts of pages.
        place: Places in them.
        live: Which tokens to store.
        first: [parts, tokens, 8], 0 past the segment; tokens are no outer axis, so that a warp's
            lanes read and write neighbouring parts of one token.
        second: The eight values after each of those, so that one thread has a block of 16; None if
            they are part of `first`.
        outer: Scale of the layer; None is 1.
        SEGMENT: `SegmentFields`, of a coded segment.
        DTYPE: Which the values come from.
        ORDINARY: The scale of the layer is; see `_ORDINARY`.
        CONVERTS: See `element_words`.
        ALIGNED: Pages start at multiples of 4 bytes.
    """
    SIZE: tl.constexpr = _PART if second is None else 2 * _PART
    TOKENS: tl.constexpr = first.shape[1]
    WIDE: tl.constexpr = first.shape[0]
    SCALE: tl.constexpr = SEGMENT.scale
    part = tl.arange(0, WIDE)
    mask = live[None, :, None]
    if SEGMENT.width < WIDE * SIZE:
        mask &= (part * SIZE < SEGMENT.width)[:, None, None]
    words_at = base + SEGMENT.at + place * SEGMENT.stride
    aligned: tl.constexpr = ALIGNED and SEGMENT.at % 4 == 0 and SEGMENT.stride % 4 == 0
    if SCALE is not None:
        PARTS: tl.constexpr = SCALE.block // SIZE
        # A block with NaN is poisoned, its amax not used.
        if SEGMENT.outer_at < 0:
            nan = _of_blocks(_largest(first, second), PARTS)
            amax = tl.minimum(nan, SEGMENT.limit)
        else:
            amax, nan = _largest_number(first, second)
            amax = tl.minimum(_of_blocks(amax, PARTS), SEGMENT.limit)
            nan = _of_blocks(nan, PARTS)
            own = _largest_of(amax, 0, True) * SEGMENT.outer_reciprocal
            at = base + SEGMENT.outer_at + place * SEGMENT.outer_stride
            tl.store(at.to(tl.pointer_type(tl.float32)), tl.reshape(own, [TOKENS]), mask=live)
            amax = any_quotient(amax, tl.where(own == 0, 1.0, own), _FAR_ABOVE, False)
        poisoned = nan != nan
        value, stored = choose_scale(amax, outer, SCALE, SEGMENT.largest, ORDINARY)
        value, stored = nan_scale(value, stored, poisoned, SCALE)
        divisor = value
        if SEGMENT.outer_at >= 0:
            divisor = divisor * own
        if outer is not None:
            divisor = divisor * outer

        block = tl.arange(0, WIDE // PARTS)
        stride: tl.constexpr = SCALE.blocks // SCALE.interleave
        slot = block % SCALE.interleave * stride + block // SCALE.interleave
        at = base + SCALE.at + place * SCALE.stride
        there = live[None, :]
        if SCALE.blocks < WIDE // PARTS:
            there &= (block < SCALE.blocks)[:, None]
        if SCALE.code == AS_IS:
            at = at.to(tl.pointer_type(tl.float32))
            tl.store(at[None, :] + slot[:, None], stored, mask=there)
        else:
            tl.store(at[None, :] + slot[:, None], stored.to(tl.uint8), mask=there)

        alone: tl.constexpr = SEGMENT.outer_at < 0 and outer is None
        exact: tl.constexpr = SCALE.power_of_two and alone
        e4m3_scales: tl.constexpr = SCALE.code == IS_E4M3
        rough: tl.constexpr = (
            alone and e4m3_scales and SEGMENT.element == IS_E2M1 and tl.bfloat16 == DTYPE
        )
        bounded: tl.constexpr = ORDINARY and e4m3_scales and SEGMENT.outer_at < 0
        divisor = _repeated(divisor, PARTS)
        # A divisor of 0 gives 0 without a sign, one that is NaN gives NaN.
        special = tl.where(divisor == 0, 0, nan_word(SEGMENT.element))
        words = _divided(first, divisor, special, SEGMENT, exact, rough, bounded, CONVERTS)
        if second is not None:
            more = _divided(second, divisor, special, SEGMENT, exact, rough, bounded, CONVERTS)
            words = _joined(words, more)
    else:
        tl.static_assert(SEGMENT.element == IS_E4M3, "only E4M3 is stored without block scales")
        tl.static_assert(second is None, "parts of a segment without scales come in one tensor")
        words = element_words(first, first, SEGMENT.element, CONVERTS, KEEP_NAN=True)
    _store_words(words_at, words, mask, aligned)


@triton.jit
def _divided(
    x,
    divisor,
    special,
    SEGMENT: tl.constexpr,
    EXACT: tl.constexpr,
    ROUGH: tl.constexpr,
    ORDINARY: tl.constexpr,
    CONVERTS: tl.constexpr,
):
    """Words of codes of x / divisor; those of a divisor that is not above 0 are `special`."""
    ratio = quotient(x, divisor, SEGMENT.element, SEGMENT.largest, EXACT, ROUGH, ORDINARY)
    codes = element_words(ratio, x, SEGMENT.element, CONVERTS, ROUGH=ROUGH)
    return tl.where(divisor > 0, codes, special)


@triton.jit
def _rotated_pairs(x, cos, sin):
    """Rotary embedding in fp32 of [tokens, features], 2i with 2i + 1."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    mixed = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    return tl.reshape(mixed, [x.shape[0], x.shape[1]])


@triton.jit
def _rotated_halves(x, partner, cos, sin, first):
    """Rotary embedding in fp32 of [tokens, features]; `partner` is what a feature mixes with."""
    same, mixed = x * cos, partner * sin
    return tl.where(first[None, :], same - mixed, same + mixed)


@triton.jit
def _zero(
    base,
    place,
    live,
    AT: tl.constexpr,
    STRIDE: tl.constexpr,
    BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Write zeros where a record has no field."""
    words: tl.constexpr = ALIGNED and AT % 4 == 0 and STRIDE % 4 == 0 and BYTES % 4 == 0
    COUNT: tl.constexpr = BYTES // 4 if words else BYTES
    DTYPE: tl.constexpr = tl.int32 if words else tl.uint8
    at = (base + AT + place * STRIDE).to(tl.pointer_type(DTYPE))
    zero = tl.zeros([base.shape[0], triton.next_power_of_2(COUNT)], DTYPE)
    number = tl.arange(0, zero.shape[1])
    mask = live[:, None] & (number < COUNT)[None, :]
    tl.store(at[:, None] + number[None, :], zero, mask=mask)


@triton.jit
def _reciprocal_root(x):
    """`1 / sqrt(x)`, each step correctly rounded; every root but these is well inside the range."""
    if INTERPRETED:
        return tl.div_rn(1.0, tl.sqrt_rn(x))
    else:
        inverse = reciprocal(square_root(x))
        return tl.where(x == 0, float("inf"), tl.where(x == float("inf"), 0.0, inverse))


@triton.jit
def _normed(x, inverse, gain, DTYPE: tl.constexpr):
    """fp32 x after the norm, as fp32 numbers that DTYPE has; `gain` are of DTYPE or another."""
    x = x * inverse
    if tl.bfloat16 == DTYPE and tl.bfloat16 == gain.dtype and not INTERPRETED:
        # Two at a time: x rounded, times gain, rounded. fp32 holds such products, or they round to
        # 0 either way, so this is what the other branch computes; adding -0 changes none.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 both, zero;
            mov.b32 zero, 0x80008000;
            cvt.rn.bf16x2.f32 both, $3, $2;
            fma.rn.bf16x2 both, both, $4, zero;
            shl.b32 $0, both, 16;
            and.b32 $1, both, 0xffff0000;
            }""",
            "=f,=f,f,f,r",
            [x, gain],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        x = round_to_dtype(x, DTYPE).to(tl.float32)
        return round_to_dtype(x * gain.to(tl.float32), DTYPE).to(tl.float32)


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
    CONVERTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program: TOKENS rows."""
    # Past the last row, and past the last feature, those again: what is stored twice is the same,
    # and masks cost more. Nor do reads wait for the slots.
    row = tl.minimum(tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), rows - 1).to(tl.int64)

    SEGMENT: tl.constexpr = FIELDS.latent
    SIZE: tl.constexpr = 2 * _PART
    part = tl.minimum(tl.arange(0, LATENT_PADDED // SIZE), SEGMENT.width // SIZE - 1)
    feature = part[:, None, None] * SIZE + tl.arange(0, _PART)[None, None, :]
    at = latent + (row * latent_stride)[None, :, None] + feature
    first, second = tl.load(at), tl.load(at + _PART)
    DTYPE: tl.constexpr = first.dtype
    slot = tl.load(slots + row).to(tl.int64)
    # Negative ones are the largest without a sign.
    live = slot.to(tl.uint64, bitcast=True) < num_slots.to(tl.uint64)
    slot = tl.where(live, slot, 0).to(num_slots.dtype)
    start, place = token_offset(slot, page_stride, PAGE_SIZE)
    base = cache + start
    first, second = widened(first), widened(second)
    if NORM:
        squares = tl.sum(first * first + second * second, 2, keep_dims=True)
        if SEGMENT.width < LATENT_PADDED:
            known = tl.arange(0, LATENT_PADDED // SIZE) < SEGMENT.width // SIZE
            squares = tl.where(known[:, None, None], squares, 0.0)
        total = tl.sum(squares, 0, keep_dims=True)
        inverse = _reciprocal_root(total / SEGMENT.width + epsilon)
        first = _normed(first, inverse, tl.load(weight + feature), DTYPE)
        second = _normed(second, inverse, tl.load(weight + feature + _PART), DTYPE)
        if normed is not None:
            at = normed + (row * SEGMENT.width)[None, :, None] + feature
            tl.store(at, round_to_dtype(first, DTYPE))
            tl.store(at + _PART, round_to_dtype(second, DTYPE))
    _store_segment(
        base, place, live, first, second, outer, SEGMENT, DTYPE, ORDINARY, CONVERTS, ALIGNED
    )

    ROPE: tl.constexpr = FIELDS.rope
    if ROPE is not None:
        part = tl.arange(0, ROPE_PADDED)
        mask = (part < ROPE.width)[None, :]
        source = rope + (row * rope_stride)[:, None]
        y = tl.load(source + part[None, :], mask=mask, other=0.0)
        Y_DTYPE: tl.constexpr = y.dtype
        if STYLE != 0:
            HALF: tl.constexpr = ROPE.width // 2
            position = tl.load(positions + row).to(tl.int64)
            known = (position >= 0) & (position < max_position)
            angles = cos_sin + (position * ROPE.width)[:, None]
            if STYLE == _PAIRS:
                angle = tl.arange(0, ROPE_PADDED // 2)
            else:
                angle = part % HALF
            turned = known[:, None] & (angle < HALF)[None, :]
            cos = tl.load(angles + angle[None, :], mask=turned, other=0.0).to(tl.float32)
            sin = tl.load(angles + HALF + angle[None, :], mask=turned, other=0.0).to(tl.float32)
            if STYLE == _PAIRS:
                y = _rotated_pairs(y.to(tl.float32), cos, sin)
            else:
                other = source + ((part + HALF) % ROPE.width)[None, :]
                other = tl.load(other, mask=mask, other=0.0).to(tl.float32)
                y = _rotated_halves(y.to(tl.float32), other, cos, sin, part < HALF)
            y = round_to_dtype(y, Y_DTYPE)
            if rotated is not None:
                tl.store(rotated + (row * ROPE.width)[:, None] + part[None, :], y, mask=mask)
        if ROPE.element == AS_IS:
            if tl.float32 == Y_DTYPE:
                if tl.bfloat16 == ROPE_DTYPE:
                    y = _saturated(y, _BFLOAT16_MAX)
                y = round_to_dtype(y, ROPE_DTYPE)
            # A pointer to numbers before their places are added, which are consecutive then.
            at = (base + ROPE.at + place * ROPE.stride).to(tl.pointer_type(ROPE_DTYPE))
            tl.store(at[:, None] + part[None, :], y, mask=mask & live[:, None])
        else:
            y = tl.reshape(y.to(tl.float32), [TOKENS, ROPE_PADDED // _PART, _PART])
            y = tl.permute(y, [1, 0, 2])
            _store_segment(base, place, live, y, None, None, ROPE, Y_DTYPE, True, CONVERTS, ALIGNED)

    for gap in tl.static_range(len(FIELDS.padding)):
        _zero(
            base,
            place,
            live,
            FIELDS.padding[gap][0],
            FIELDS.padding[gap][1],
            FIELDS.padding[gap][2],
            ALIGNED,
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
    # Before the first code of a token, a norm and a scale per token need all of its values.
    whole = bool(fused) or fmt.outer_scale == "per token"
    tokens = _TOKENS_AS_FP32 if whole or latent.dtype == torch.float32 else _TOKENS
    y = parts.get("rope")
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
    _store_kernel[(triton.cdiv(len(latent), tokens),)](
        latent=latent,
        rope=y,
        slots=slots,
        cache=cache.data,
        outer=None if cache.outer_scale == 1.0 else cache.outer_scale,
        rows=len(latent),
        num_slots=cache.num_slots,
        page_stride=cache.data.stride(0),
        latent_stride=latent.stride(0),
        rope_stride=0 if y is None else y.stride(0),
        FIELDS=describe(fmt, cache.page_size),
        PAGE_SIZE=cache.page_size,
        ROPE_DTYPE=TRITON_DTYPES[cache.rope_dtype],
        ORDINARY=1 / _ORDINARY < cache.outer_scale < _ORDINARY,
        LATENT_PADDED=triton.next_power_of_2(fmt.latent.width),
        ROPE_PADDED=triton.next_power_of_2(max(fmt.rope_width, 1)),
        CONVERTS=device_properties(latent.device)[0] >= _CONVERTS_SINCE,
        ALIGNED=not (cache.data.data_ptr() % 4 or cache.data.stride(0) % 4),
        TOKENS=tokens,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
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
