"""Device functions for the number formats, shared by every kernel.

Only fp32 and int32 arithmetic: the same instructions run on every GPU, older ones without FP8
included, and under Triton's interpreter, whose own casts to FP8 and bfloat16 are wrong.

A quantized operand is carried into a product as `element · block_scale` without its global scale:
at most 6 significant bits (E2M1 times E4M3, or E4M3 alone), so bfloat16 and float16 hold it exactly
over its whole range, and a product with fp32 accumulation rounds nothing but the sum. Global scales
are multiplied into the softmax scale and into the output.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_quant.formats import E2M1, E4M3, FP8, NVFP4, ElementFormat

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels defined in this process run under the interpreter."""

BLOCK = tl.constexpr(NVFP4.block_size)
E2M1_MAX = tl.constexpr(E2M1.max)
E4M3_MAX = tl.constexpr(E4M3.max)
NVFP4_QUANT_MAX = tl.constexpr(NVFP4.quant_max)
FP8_QUANT_MAX = tl.constexpr(FP8.quant_max)
_E2M1_SMALLEST_NORMAL = tl.constexpr(2.0**E2M1.min_exponent)
_E4M3_SMALLEST_NORMAL = tl.constexpr(2.0**E4M3.min_exponent)
_E2M1_CARRY = tl.constexpr(2.0 ** (23 - E2M1.mantissa_bits))
_E4M3_CARRY = tl.constexpr(2.0 ** (23 - E4M3.mantissa_bits))
_E2M1_MANTISSA_BITS = tl.constexpr(E2M1.mantissa_bits)
_E4M3_MANTISSA_BITS = tl.constexpr(E4M3.mantissa_bits)
_SMALLEST_NORMAL_FP32 = tl.constexpr(2.0**-126)
_FAR = tl.constexpr(2.0**64)
_FAR_ROOT = tl.constexpr(2.0**-32)


def _carry_code(element: ElementFormat) -> int:
    """What `_carried_code` is too large by."""
    exponent = 127 + element.min_exponent + 23 - element.mantissa_bits
    return exponent << element.mantissa_bits


E2M1_CARRY_CODE = tl.constexpr(_carry_code(E2M1))
E4M3_CARRY_CODE = tl.constexpr(_carry_code(E4M3))

FORMAT_CODES = {"none": 0, "fp8": 1, "nvfp4": 2}
"""How operand formats are told to kernels."""
FORMAT_NONE = tl.constexpr(FORMAT_CODES["none"])
FORMAT_FP8 = tl.constexpr(FORMAT_CODES["fp8"])
FORMAT_NVFP4 = tl.constexpr(FORMAT_CODES["nvfp4"])


@triton.jit
def _round_magnitude(magnitude, SMALLEST_NORMAL: tl.constexpr, CARRY: tl.constexpr):
    """Round to nearest even by an fp32 addition that leaves room for the mantissa's bits only."""
    binade = (magnitude.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    carry = tl.maximum(binade, SMALLEST_NORMAL) * CARRY
    return (magnitude + carry) - carry


@triton.jit
def round_e2m1_magnitude(magnitude):
    """Nearest E2M1 value of an fp32 tensor that is at least 0 and below 7; NaN stays NaN."""
    return _round_magnitude(magnitude, _E2M1_SMALLEST_NORMAL, _E2M1_CARRY)


@triton.jit
def round_e4m3_magnitude(magnitude):
    """Nearest E4M3 value of an fp32 tensor that is at least 0 and below 480; NaN stays NaN."""
    return _round_magnitude(magnitude, _E4M3_SMALLEST_NORMAL, _E4M3_CARRY)


@triton.jit
def _carried_code(
    magnitude, SMALLEST_NORMAL: tl.constexpr, CARRY: tl.constexpr, MANTISSA_BITS: tl.constexpr
):
    """Code of the nearest value, too large by a constant; its higher bits mean nothing.

    The sum that rounds has the value's mantissa in its lowest bits and its binade in the exponent.
    A mantissa that overflows counts the exponent up, as it does in the code.
    """
    binade = (magnitude.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    carried = tl.fma(tl.maximum(binade, SMALLEST_NORMAL), CARRY, magnitude)
    bits = carried.to(tl.int32, bitcast=True)
    return bits + (bits >> (23 - MANTISSA_BITS))


@triton.jit
def carried_e2m1_code(magnitude):
    """E2M1 code plus `E2M1_CARRY_CODE` of an fp32 tensor from 0 to 6; its low three bits count."""
    return _carried_code(magnitude, _E2M1_SMALLEST_NORMAL, _E2M1_CARRY, _E2M1_MANTISSA_BITS)


@triton.jit
def carried_e4m3_code(magnitude):
    """E4M3 code plus `E4M3_CARRY_CODE` of an fp32 tensor from 0 to 448; its low 7 bits count."""
    return _carried_code(magnitude, _E4M3_SMALLEST_NORMAL, _E4M3_CARRY, _E4M3_MANTISSA_BITS)


@triton.jit
def _clamp(magnitude, LARGEST: tl.constexpr):
    if LARGEST is None:
        return magnitude
    return tl.minimum(magnitude, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def with_sign(magnitude, x):
    """`magnitude` with the sign bit of `x`, both fp32."""
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def global_scale(amax, FORMAT: tl.constexpr):
    """`amax / quant_max` of fp32 `amax`, at least the smallest normal fp32; 1 for format "none"."""
    if FORMAT == FORMAT_NONE:
        scale = 1.0
    elif FORMAT == FORMAT_FP8:
        scale = tl.maximum(tl.div_rn(amax, FP8_QUANT_MAX), _SMALLEST_NORMAL_FP32)
    else:
        scale = tl.maximum(tl.div_rn(amax, NVFP4_QUANT_MAX), _SMALLEST_NORMAL_FP32)
    return scale


@triton.jit
def validity(amax):
    """Factor of an operand by its amax: 1, 0 for amax 0, NaN for a negative or NaN one."""
    return tl.where(amax > 0, 1.0, tl.where(amax == 0, 0.0, float("nan")))


@triton.jit
def scale_is_ordinary(g):
    """Whether no intermediate result of a division by a multiple of `g` leaves fp32's range."""
    return (g > 1.0e-30) & (g < 1.0e30)


@triton.jit
def reciprocal(x):
    """`1 / x`, correctly rounded, for x well inside fp32's range.

    What ptxas makes of `rcp.rn.f32` there, without the branch that looks whether x is.
    """
    y = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
    return tl.fma(y, tl.fma(-x, y, 1.0), y)


@triton.jit
def square_root(x):
    """`sqrt(x)`, correctly rounded, for finite x above 0.

    What ptxas makes of `sqrt.rn.f32` from 2^-101 on, without the branch that looks whether x is.
    """
    low = x < 1 / _FAR
    x = tl.where(low, x * _FAR, x)
    y = tl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
    root = x * y
    root = tl.fma(tl.fma(-root, root, x), y * 0.5, root)
    return tl.where(low, root * _FAR_ROOT, root)


@triton.jit
def bounded_quotient(
    magnitude,
    divisor,
    LARGEST: tl.constexpr,
    ORDINARY: tl.constexpr,
    KEEP_NAN: tl.constexpr = True,
):
    """`min(magnitude / divisor, LARGEST)`, the quotient correctly rounded; 0 for divisor 0.

    ORDINARY: the divisor is a `scale_is_ordinary` one. Two fused multiply-adds then repair the
    product with the rounded reciprocal (Markstein 1990), at a fraction of a division's cost.
    KEEP_NAN False: NaN occurs with divisor 0 only and becomes 0, if ORDINARY.
    """
    if ORDINARY and not INTERPRETED:
        # For divisor 0 any finite reciprocal does: x is 0.
        inverse = reciprocal(tl.maximum(divisor, _SMALLEST_NORMAL_FP32))
        if LARGEST is None:
            x = magnitude
        elif KEEP_NAN:
            x = tl.minimum(magnitude, LARGEST * divisor, propagate_nan=tl.PropagateNan.ALL)
        else:
            x = tl.minimum(magnitude, LARGEST * divisor)
        y = x * inverse
        return tl.fma(tl.fma(y, -divisor, x), inverse, y)
    else:
        # Only x / inf is 0 for every x.
        return _clamp(tl.div_rn(magnitude, tl.where(divisor > 0, divisor, float("inf"))), LARGEST)


@triton.jit
def any_quotient(magnitude, divisor, LARGEST: tl.constexpr, ORDINARY: tl.constexpr):
    """`min(magnitude / divisor, LARGEST)` for any fp32 divisor above 0, without a branch.

    Correctly rounded wherever the quotient is a normal number. Where the divisor is not above 0, or
    the magnitude is NaN, the result is any number. LARGEST None: not bounded; an infinite quotient
    may come out as NaN.
    """
    if not ORDINARY and not INTERPRETED:
        # A power of two for both: exact, save where the quotient is 0 in any code or too large.
        factor = tl.where(divisor < 1 / _FAR, _FAR, tl.where(divisor > _FAR, 1 / _FAR, 1.0))
        magnitude *= factor
        divisor *= factor
    return bounded_quotient(magnitude, divisor, LARGEST, ORDINARY or not INTERPRETED, False)


@triton.jit
def block_scale(block_amax, g, ORDINARY: tl.constexpr = False):
    """Stored E4M3 scale of NVFP4 blocks, fp32; `block_amax` must hold no NaN."""
    if ORDINARY and not INTERPRETED:
        ratio = bounded_quotient(block_amax, g * E2M1_MAX, E4M3_MAX, ORDINARY)
    else:
        ratio = tl.minimum(tl.div_rn(block_amax, g * E2M1_MAX), E4M3_MAX)
    return round_e4m3_magnitude(ratio)


@triton.jit
def quantize_fp8(x, g, ORDINARY: tl.constexpr = False):
    """FP8 elements of fp32 `x` under global scale `g`: E4M3 values, fp32."""
    quotient = bounded_quotient(tl.abs(x), g, E4M3_MAX, ORDINARY)
    return with_sign(round_e4m3_magnitude(quotient), x)


@triton.jit
def nvfp4_quotient(magnitude, scale, g, ORDINARY: tl.constexpr):
    """Magnitudes by their block scale and `g`, at most 6, which E2M1 is to round.

    NaN is in blocks of scale 0 only, if at all, and becomes 0, if ORDINARY.
    """
    return bounded_quotient(magnitude, scale * g, E2M1_MAX, ORDINARY, KEEP_NAN=False)


@triton.jit
def quantize_nvfp4(x, g, AXIS: tl.constexpr, ORDINARY: tl.constexpr = False, factor=1.0):
    """NVFP4 elements times their block scale, fp32.

    `x` is fp32 and has its blocks of 16 as axis `AXIS`; `g` is a scalar or has size 1 there.
    Elements are divided by fp32(scale · g) with correct rounding, so ties are decided as in
    `mla_quant.reference`. ORDINARY: `scale_is_ordinary(g)` holds, which is faster.
    `factor`, which broadcasts like `g`, multiplies the result.
    """
    magnitude = tl.abs(x)
    if INTERPRETED:  # whose maximum keeps NaN
        largest = tl.max(tl.where(magnitude == magnitude, magnitude, 0.0), AXIS)
    else:
        largest = tl.max(magnitude, AXIS)
        largest = tl.where(largest == largest, largest, 0.0)
    scale = block_scale(tl.expand_dims(largest, AXIS), g, ORDINARY)
    quotient = bounded_quotient(magnitude, scale * g, E2M1_MAX, ORDINARY)
    return with_sign(round_e2m1_magnitude(quotient) * (scale * factor), x)


@triton.jit
def round_to_dtype(x, DTYPE: tl.constexpr):
    """fp32 `x` in `DTYPE`, to nearest even; finite values that do not fit saturate."""
    if tl.float32 == DTYPE:
        return x
    elif tl.float16 == DTYPE:
        return tl.clamp(x, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    elif INTERPRETED:
        # The interpreter truncates, and flushes subnormal numbers.
        bits = x.to(tl.int32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        finite = (bits & 0x7F800000) != 0x7F800000
        return (tl.where(finite, rounded, bits) >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def widened(x):
    """fp32 of a float tensor; of bfloat16 in one instruction for either half of a register."""
    if tl.bfloat16 == x.dtype:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def dot(a, b, acc):
    """`acc + a @ b` with fp32 accumulation and no rounding of the operands."""
    if INTERPRETED:
        # The interpreter multiplies the bit patterns of bfloat16.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")
