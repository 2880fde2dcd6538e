"""Record descriptions as kernels read them, and device functions that read and write codes.

`describe` turns a `RecordFormat` and a page size into named tuples of numbers, which kernels take
as one `tl.constexpr`: no format has code of its own. Every field of token `place` in a page lies at
`at + place · stride` from the page's start, whether in the page's rows or in its footer.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mla_quant.formats import E2M1, E4M3, UE8M0, ElementFormat
from mla_quant.kernels.numerics import (
    E4M3_CARRY_CODE,
    INTERPRETED,
    any_quotient,
    carried_e4m3_code,
    reciprocal,
    round_e4m3_magnitude,
    with_sign,
)
from mla_quant.kernels.operand_cache import (
    decode_e4m3,
    decode_e4m3_magnitude,
    encode_e4m3_magnitude,
)
from mla_quant.records import RecordFormat, Segment

_CODES: dict[ElementFormat | None, int] = {None: 0, E2M1: 1, E4M3: 2, UE8M0: 3}
AS_IS = tl.constexpr(_CODES[None])
"""As an element: a 16-bit float. As a scale: fp32."""
IS_E2M1 = tl.constexpr(_CODES[E2M1])
IS_E4M3 = tl.constexpr(_CODES[E4M3])

_ROUNDINGS = {"none": 0, "nearest": 1, "nearest_not_below": 2, "power_of_two_up": 3}
_UNROUNDED = tl.constexpr(_ROUNDINGS["none"])
_NOT_BELOW = tl.constexpr(_ROUNDINGS["nearest_not_below"])
_POWER_OF_TWO_UP = tl.constexpr(_ROUNDINGS["power_of_two_up"])

_E4M3_MAX = tl.constexpr(E4M3.max)
_E4M3_LARGEST_CODE = tl.constexpr(E4M3.largest_code)
_E4M3_NAN = tl.constexpr(E4M3.nan_code)
_UE8M0_NAN = tl.constexpr(UE8M0.nan_code)
_E2M1_SIGN = tl.constexpr(1 << (E2M1.bits - 1))
_E2M1_MAGNITUDE = tl.constexpr((1 << (E2M1.bits - 1)) - 1)
_E2M1_SIGN_SHIFT = tl.constexpr(32 - E2M1.bits)
_E4M3_MAGNITUDE = tl.constexpr((1 << (E4M3.bits - 1)) - 1)
_E4M3_SIGN = tl.constexpr(1 << (E4M3.bits - 1))
_E4M3_SIGN_SHIFT = tl.constexpr(32 - E4M3.bits)
_FP32_MANTISSA_BITS = tl.constexpr(23)
_FP32_MANTISSA = tl.constexpr((1 << 23) - 1)
_FP32_NAN = tl.constexpr(0x7FC00000)
_SMALLEST_UE8M0_BITS = tl.constexpr(1 << 22)
# Exponent fields of x and of its reciprocal add up to this, for powers of two.
_RECIPROCAL_BITS = tl.constexpr((2 * 127) << 23)
_E2M1_SHIFT = tl.constexpr(23 - E2M1.mantissa_bits)
# See `quotient`: the largest element, with what is added to it, is 1 in these units.
_ROUGH_UNIT = tl.constexpr(2.0**11)
_ROUGH_ABOVE = tl.constexpr(2.0**11 - E2M1.max)
# A sum with it is rounded to an integer, ties to even, which its lowest bits hold.
_TO_INTEGER_BITS = 0x4B400000
_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)
_E2M1_LARGEST_INTEGER = tl.constexpr(_TO_INTEGER_BITS + E2M1.largest_code)
_SUM_OF_INTEGERS = tl.constexpr(sum(_TO_INTEGER_BITS << 4 * i for i in range(8)) & 0x7FFFFFFF)
_SIGNS = tl.constexpr(-0x77777778)
_UNBOUNDED = tl.constexpr(2.0**127)
# Moves E2M1's exponents to where fp32 has them.
_FROM_E2M1_UNIT = tl.constexpr(2.0 ** (127 - E2M1.bias))


TRITON_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


class ScaleFields(NamedTuple):
    """Block scales of a segment; see `mla_quant.records.BlockScale` for what they mean.

    `power_of_two`: whether only powers of two are written. `reciprocal`: fp32(1 / element.max) if
    the exact scale is a product with it, else 0.
    """

    at: int
    stride: int
    bytes_each: int
    block: int
    blocks: int
    interleave: int
    code: int
    rounding: int
    power_of_two: bool
    floor: float
    reciprocal: float


class SegmentFields(NamedTuple):
    """One segment; `scale` is None without block scales, `outer_at` is -1 without an outer scale.

    `limit`: no product of a stored code and a scale of magnitudes up to it overflows.
    `outer_reciprocal`: fp32(1 / (element.max · scale.max)).
    """

    at: int
    stride: int
    width: int
    element: int
    largest: float
    limit: float
    scale: ScaleFields | None
    outer_at: int
    outer_stride: int
    outer_reciprocal: float


class RecordFields(NamedTuple):
    """A record.

    `rope` is None without a rope segment; `padding` has (at, stride, bytes) of each gap.
    """

    latent: SegmentFields
    rope: SegmentFields | None
    v_width: int
    padding: tuple[tuple[int, int, int], ...]


@functools.lru_cache(maxsize=128)
def describe(fmt: RecordFormat, page_size: int) -> RecordFields:
    """The fields of a format in pages of `page_size` tokens."""

    def place(offset: int) -> tuple[int, int]:
        if offset < fmt.rows_end:
            return offset, fmt.rows_end
        return page_size * fmt.rows_end + offset - fmt.rows_end, fmt.footer_bytes

    def segment(part: Segment) -> SegmentFields:
        scale = None
        if part.scale is not None and part.element is not None:
            rule = part.scale
            scale = ScaleFields(
                *place(rule.offset),
                rule.bytes_each,
                rule.block,
                part.blocks,
                rule.interleave,
                _CODES[rule.format],
                _ROUNDINGS[rule.writer.rounding],
                rule.writer.rounding == "power_of_two_up",
                rule.writer.floor,
                _fp32(1 / part.element.max) if rule.writer.division == "reciprocal" else 0.0,
            )
        largest = part.element.max if part.element else 0.0
        outer = (-1, 0) if part.outer_offset is None else place(part.outer_offset)
        return SegmentFields(
            *place(part.offset),
            part.width,
            _CODES[part.element],
            largest,
            part.limit,
            scale,
            *outer,
            _fp32(1 / part.quant_max) if part.quant_max else 0.0,
        )

    covered = sorted((field.offset, field.end) for field in fmt.fields)
    ends = [0, *(end for _, end in covered)]
    starts = [*(start for start, _ in covered), fmt.record_bytes]
    gaps = []
    for end, start in zip(ends, starts, strict=True):
        for first, last in ((end, min(start, fmt.rows_end)), (max(end, fmt.rows_end), start)):
            if first < last:
                gaps.append((*place(first), last - first))
    return RecordFields(
        segment(fmt.latent),
        None if fmt.rope is None else segment(fmt.rope),
        fmt.v_width,
        tuple(gaps),
    )


def _fp32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


@triton.jit
def token_offset(slot, page_stride, PAGE_SIZE: tl.constexpr):
    """Offset of the page of `slot` from the cache's start, int64, and the place in it."""
    page = slot // PAGE_SIZE
    return page.to(tl.int64) * page_stride, slot - page * PAGE_SIZE


# --- codes of scales


@triton.jit
def ue8m0_bits(code):
    """fp32 bits of UE8M0 codes; the smallest is a subnormal number."""
    bits = tl.where(code == 0, _SMALLEST_UE8M0_BITS, code << _FP32_MANTISSA_BITS)
    return tl.where(code == _UE8M0_NAN, _FP32_NAN, bits)


@triton.jit
def load_scale(base, place, number, SCALE: tl.constexpr, mask):
    """Block scales as fp32.

    Args:
        base: Pointers to bytes: starts of pages.
        place: Places of tokens in them.
        number: Numbers of blocks.
        SCALE: `ScaleFields`.
        mask: Which to read; the others are 0.
    """
    stride: tl.constexpr = SCALE.blocks // SCALE.interleave
    stored = number % SCALE.interleave * stride + number // SCALE.interleave
    at = base + SCALE.at + place * SCALE.stride + stored * SCALE.bytes_each
    if SCALE.code == AS_IS:
        return tl.load(at.to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    code = tl.load(at, mask=mask, other=0).to(tl.int32)
    if SCALE.code == IS_E4M3:
        return decode_e4m3(code)
    else:
        return ue8m0_bits(code).to(tl.float32, bitcast=True)


@triton.jit
def choose_scale(amax, outer, SCALE: tl.constexpr, LARGEST: tl.constexpr, ORDINARY: tl.constexpr):
    """What a writer stores for groups of largest magnitude `amax`: fp32 value and its byte.

    `outer` multiplies the stored scale when it is read; None is 1. ORDINARY:
    `numerics.scale_is_ordinary` holds for it. Without a byte (fp32 scales) the second
    result is the value itself. Of an `amax` that is NaN the results are any.
    """
    if SCALE.reciprocal > 0.0:
        exact = amax * SCALE.reciprocal
    else:
        whole = tl.full([], LARGEST, tl.float32)
        if outer is not None:
            whole *= outer
        if SCALE.rounding == _UNROUNDED:
            exact = tl.div_rn(amax, whole)
        else:
            most: tl.constexpr = _E4M3_MAX if SCALE.code == IS_E4M3 else _UNBOUNDED
            exact = any_quotient(amax, whole, most, ORDINARY)
    if SCALE.floor > 0.0:
        exact = tl.maximum(exact, SCALE.floor)
    if SCALE.rounding == _UNROUNDED:
        return exact, exact
    elif SCALE.rounding == _POWER_OF_TWO_UP:
        # Rounded up in the exponent's field; floors keep exponents positive.
        code = (exact.to(tl.int32, bitcast=True) + _FP32_MANTISSA) >> _FP32_MANTISSA_BITS
        value = (code << _FP32_MANTISSA_BITS).to(tl.float32, bitcast=True)
        if SCALE.code == AS_IS:
            return value, value
        else:
            return value, code
    else:
        if SCALE.reciprocal > 0.0:
            exact = tl.minimum(exact, _E4M3_MAX)
        value = round_e4m3_magnitude(exact)
        code = encode_e4m3_magnitude(value)
        if SCALE.rounding == _NOT_BELOW:
            code += ((value < exact) & (code < _E4M3_LARGEST_CODE)).to(tl.int32)
            value = decode_e4m3_magnitude(code)
        return value, code


@triton.jit
def nan_scale(value, code, poisoned, SCALE: tl.constexpr):
    """The results of `choose_scale`, NaN where `poisoned`."""
    value = tl.where(poisoned, float("nan"), value)
    if SCALE.code == AS_IS:
        return value, value
    elif SCALE.code == IS_E4M3:
        return value, tl.where(poisoned, _E4M3_NAN, code)
    else:
        return value, tl.where(poisoned, _UE8M0_NAN, code)


# --- codes of elements


@triton.jit
def _sum_up_to_1(x, y):
    """`min(x + y, 1)`."""
    if INTERPRETED:
        return tl.minimum(x + y, 1.0)
    else:
        return tl.inline_asm_elementwise(
            "add.rn.sat.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def quotient(
    x,
    divisor,
    ELEMENT: tl.constexpr,
    LARGEST: tl.constexpr,
    EXACT: tl.constexpr,
    ROUGH: tl.constexpr,
    ORDINARY: tl.constexpr,
):
    """`x / divisor` for `element_words`: what rounds to the same element.

    EXACT: divisors are powers of two, so that the product with a reciprocal is the quotient.
    ROUGH: x is bfloat16, divisors are E4M3 scales, elements E2M1. Quotients are then halfway
    between elements or off by 2^-8 of them. Adding `_ROUGH_ABOVE` makes multiples of 2^-13 of them,
    as halfway numbers are, and so removes the error of multiplying by a reciprocal. The result
    keeps it, divided by `_ROUGH_UNIT`, and is at most 1.
    ORDINARY: divisors are 0 or `numerics.scale_is_ordinary`. Where a divisor is not above 0 the
    result is any number.
    """
    if EXACT:
        bits = _RECIPROCAL_BITS - divisor.to(tl.int32, bitcast=True)
        ratio = x * bits.to(tl.float32, bitcast=True)
    else:
        ratio = tl.abs(x)
        if ROUGH:
            if INTERPRETED:
                inverse = tl.div_rn(1.0, tl.where(divisor > 0, divisor, 1.0))
            else:
                inverse = reciprocal(divisor)
            inverse *= 1 / _ROUGH_UNIT
            ratio = _sum_up_to_1(ratio * inverse, _ROUGH_ABOVE / _ROUGH_UNIT)
        else:
            # `_e2m1_code` needs no bound.
            most: tl.constexpr = None if ELEMENT == IS_E2M1 else LARGEST
            ratio = any_quotient(ratio, divisor, most, ORDINARY)
        if ELEMENT != IS_E2M1:
            ratio = with_sign(ratio, x)
    return ratio


@triton.jit
def _e2m1_code(x, ROUGH: tl.constexpr):
    """Codes of the elements nearest to magnitudes from `quotient`, plus `_TO_INTEGER_BITS`.

    Codes are the nearest integers to 2x up to 2, to x + 2 up to 4, to x / 2 + 4 up to 6: the least
    of them is the code, and sums this large are rounded to integers. A GPU's NaN is the largest.
    """
    UNIT: tl.constexpr = _ROUGH_UNIT if ROUGH else 1.0
    ABOVE: tl.constexpr = _ROUGH_ABOVE if ROUGH else 0.0
    fine = tl.fma(x, 2 * UNIT, _TO_INTEGER - 2 * ABOVE).to(tl.int32, bitcast=True)
    medium = tl.fma(x, UNIT, _TO_INTEGER + 2 - ABOVE).to(tl.int32, bitcast=True)
    coarse = tl.fma(x, UNIT / 2, _TO_INTEGER + 4 - ABOVE / 2).to(tl.int32, bitcast=True)
    if not ROUGH:
        coarse = tl.minimum(coarse, _E2M1_LARGEST_INTEGER)
    # As integers, of which three are compared at once.
    return tl.minimum(tl.minimum(fine, medium), coarse)


@triton.jit
def _eighths(x):
    """The eight [parts, tokens] of [parts, tokens, 8]."""
    parts: tl.constexpr = x.shape[0]
    tokens: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.reshape(x, [parts, tokens, 4, 2]))
    x04, x26 = tl.split(tl.reshape(even, [parts, tokens, 2, 2]))
    x15, x37 = tl.split(tl.reshape(odd, [parts, tokens, 2, 2]))
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _e2m1_words(ratio, x, ROUGH: tl.constexpr):
    """int32 [parts, tokens, 1] of eight codes each: those of `_e2m1_code`, with the signs of x."""
    codes = _eighths(_e2m1_code(ratio, ROUGH))
    bits = _eighths(x.to(tl.uint32, bitcast=True))
    word = codes[7]
    sign = bits[7] >> _E2M1_SIGN_SHIFT
    for i in tl.static_range(1, 8):
        word = (word << 4) + codes[7 - i]
        sign = (sign << 4) | (bits[7 - i] >> _E2M1_SIGN_SHIFT)
    word -= _SUM_OF_INTEGERS
    # Signs from `sign`, all else from `word`, in one instruction.
    return tl.expand_dims(word ^ ((word ^ sign.to(tl.int32, bitcast=True)) & _SIGNS), 2)


@triton.jit
def _e4m3_code(x, KEEP_NAN: tl.constexpr):
    """Code, int32, of the element nearest to fp32 x."""
    magnitude = tl.minimum(tl.abs(x), _E4M3_MAX)
    code = carried_e4m3_code(magnitude) - E4M3_CARRY_CODE
    sign = x.to(tl.int32, bitcast=True) >> _E4M3_SIGN_SHIFT
    code = (code & _E4M3_MAGNITUDE) | (sign & _E4M3_SIGN)
    if KEEP_NAN:
        code = tl.where(x == x, code, _E4M3_NAN)
    return code


@triton.jit
def _e4m3_words(x, CONVERTS: tl.constexpr, KEEP_NAN: tl.constexpr):
    """int32 [..., 2] of four codes each; x is [parts, tokens, 8]."""
    if KEEP_NAN and CONVERTS:
        # Without the sign, which its code has not either.
        x = tl.where(x == x, x, float("nan"))
    parts: tl.constexpr = x.shape[0]
    tokens: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.reshape(x, [parts, tokens, 4, 2]))
    first, third = tl.split(tl.reshape(even, [parts, tokens, 2, 2]))
    second, fourth = tl.split(tl.reshape(odd, [parts, tokens, 2, 2]))
    if CONVERTS and not INTERPRETED:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f",
            [first, second, third, fourth],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        low = _e4m3_code(first, KEEP_NAN) | (_e4m3_code(second, KEEP_NAN) << 8)
        high = _e4m3_code(third, KEEP_NAN) | (_e4m3_code(fourth, KEEP_NAN) << 8)
        return low | (high << 16)


@triton.jit
def element_words(
    ratio,
    x,
    ELEMENT: tl.constexpr,
    CONVERTS: tl.constexpr,
    KEEP_NAN: tl.constexpr = False,
    ROUGH: tl.constexpr = False,
):
    """int32 [parts, tokens, words] of the codes nearest to fp32 [parts, tokens, 8], saturating.

    Args:
        ratio: What to encode, from `quotient`: with its sign, for E2M1 a magnitude.
        x: Has the signs.
        ELEMENT: Of which code.
        CONVERTS: The GPU converts to E4M3.
        KEEP_NAN: E4M3 codes of NaN are NaN; else they are any.
        ROUGH: `quotient` was.
    """
    if ELEMENT == IS_E2M1:
        return _e2m1_words(ratio, x, ROUGH)
    else:
        return _e4m3_words(ratio, CONVERTS, KEEP_NAN)


@triton.jit
def nan_word(ELEMENT: tl.constexpr):
    """A word of codes of NaN; of 0 where an element has none."""
    if ELEMENT == IS_E2M1:
        return 0
    else:
        return _E4M3_NAN * 0x1010101


@triton.jit
def decode_e2m1(code):
    """fp32 values of int32 E2M1 codes, of which only the lowest four bits count."""
    bits = ((code & _E2M1_MAGNITUDE) << _E2M1_SHIFT) | ((code & _E2M1_SIGN) << _E2M1_SIGN_SHIFT)
    return bits.to(tl.float32, bitcast=True) * _FROM_E2M1_UNIT


# --- values of records


@triton.jit
def _scaled(element, base, place, mask, number, outer, SCALE: tl.constexpr):
    """fp32 elements times their scales; `outer` is that of the token, or 1."""
    if SCALE is not None:
        element = element * (load_scale(base, place, number, SCALE, mask) * outer)
    return element


@triton.jit
def load_outer(base, place, present, SEGMENT: tl.constexpr):
    """Outer scales [tokens] that records hold; 1 where the format has none."""
    if SEGMENT.outer_at >= 0:
        at = base + SEGMENT.outer_at + place * SEGMENT.outer_stride
        return tl.load(at.to(tl.pointer_type(tl.float32)), mask=present, other=0.0)
    else:
        return 1.0


@triton.jit
def load_features(
    base, place, feature, mask, outer, SEGMENT: tl.constexpr, STORED_DTYPE: tl.constexpr
):
    """Values of a segment as fp32 [tokens, features], 0 where not read.

    Args:
        base: Pointers [tokens, 1] to the starts of pages.
        place: Places in them, [tokens, 1].
        feature: Features, [1, features].
        mask: Which to read, [tokens, features].
        outer: From `load_outer`, [tokens, 1].
        SEGMENT: `SegmentFields`.
        STORED_DTYPE: Of a 16-bit segment.
    """
    at = base + SEGMENT.at + place * SEGMENT.stride
    if SEGMENT.element == AS_IS:
        at = (at + feature * 2).to(tl.pointer_type(STORED_DTYPE))
        return tl.load(at, mask=mask, other=0.0).to(tl.float32)
    else:
        SCALE: tl.constexpr = SEGMENT.scale
        if SEGMENT.element == IS_E2M1:
            code = tl.load(at + feature // 2, mask=mask, other=0).to(tl.int32)
            element = decode_e2m1(code >> (feature % 2 * 4))
        else:
            element = decode_e4m3(tl.load(at + feature, mask=mask, other=0).to(tl.int32))
        if SCALE is not None:
            return _scaled(element, base, place, mask, feature // SCALE.block, outer, SCALE)
        else:
            return element


@triton.jit
def load_halves(base, place, present, FIELDS: tl.constexpr, STORED_DTYPE: tl.constexpr):
    """V of tokens in two parts as fp32 [tokens, v_width / 2], 0 for absent tokens.

    Of 4-bit latents the parts are the even and the odd features, which a byte holds side by side;
    of others the lower and the upper half: `half_features` says which. Where V is wider than the
    latent the rope part follows.
    """
    LATENT: tl.constexpr = FIELDS.latent
    SCALE: tl.constexpr = LATENT.scale
    HALF: tl.constexpr = FIELDS.v_width // 2
    # [tokens, blocks, bytes of a block]: a block's scale is read and decoded once.
    BYTES: tl.constexpr = SCALE.block // 2 if LATENT.element == IS_E2M1 else SCALE.block
    BLOCKS: tl.constexpr = HALF // BYTES
    tokens: tl.constexpr = base.shape[0]
    outer = load_outer(base, place, present, LATENT)
    if LATENT.outer_at >= 0:
        outer = outer[:, None, None]
    block = tl.arange(0, BLOCKS)[None, :, None]
    byte = tl.arange(0, BYTES)[None, None, :]
    starts, places = base[:, None, None], place[:, None, None]
    at = starts + LATENT.at + places * LATENT.stride + byte
    there = present[:, None, None]
    if LATENT.element == IS_E2M1:
        mask = there & (block < SCALE.blocks)
        code = tl.load(at + block * BYTES, mask=mask, other=0).to(tl.int32)
        scale = load_scale(starts, places, block, SCALE, mask) * outer
        first = decode_e2m1(code) * scale
        second = decode_e2m1(code >> 4) * scale
    else:
        mask = there & (block < SCALE.blocks)
        code = tl.load(at + block * BYTES, mask=mask, other=0).to(tl.int32)
        first = decode_e4m3(code) * (load_scale(starts, places, block, SCALE, mask) * outer)
        block += BLOCKS
        mask = there & (block < SCALE.blocks)
        code = tl.load(at + block * BYTES, mask=mask, other=0).to(tl.int32)
        second = decode_e4m3(code) * (load_scale(starts, places, block, SCALE, mask) * outer)
    first = tl.reshape(first, [tokens, HALF])
    second = tl.reshape(second, [tokens, HALF])
    base, place, present = base[:, None], place[:, None], present[:, None]
    if FIELDS.v_width > LATENT.width:
        ROPE: tl.constexpr = FIELDS.rope
        # A part is 0 where the other one has its features.
        first_feature, second_feature = half_features(FIELDS)
        for part in tl.static_range(2):
            feature = (second_feature if part else first_feature)[None, :] - LATENT.width
            mask = present & (feature >= 0)
            values = load_features(base, place, feature, mask, 1.0, ROPE, STORED_DTYPE)
            if part:
                second = tl.where(feature >= 0, values, second)
            else:
                first = tl.where(feature >= 0, values, first)
    return first, second


@triton.jit
def half_features(FIELDS: tl.constexpr):
    """Features of V that the parts of `load_halves` hold."""
    HALF: tl.constexpr = FIELDS.v_width // 2
    lane = tl.arange(0, HALF)
    if FIELDS.latent.element == IS_E2M1:
        return 2 * lane, 2 * lane + 1
    else:
        return lane, lane + HALF


@triton.jit
def load_rope(base, place, present, FIELDS: tl.constexpr, STORED_DTYPE: tl.constexpr):
    """The rope part beside V as fp32 [tokens, padded width], 0 for absent tokens and past it."""
    ROPE: tl.constexpr = FIELDS.rope
    feature = tl.arange(0, triton.next_power_of_2(ROPE.width))[None, :]
    mask = present[:, None] & (feature < ROPE.width)
    return load_features(base[:, None], place[:, None], feature, mask, 1.0, ROPE, STORED_DTYPE)
