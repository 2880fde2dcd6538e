"""Side cache of quantized operands: what decode would compute on every read, computed once.

The K operand of a latent never changes, and the V operand of 16 consecutive tokens never changes
once all 16 are there. Both are quantized when written, into one record per token slot, addressed by
the block table of the raw cache. In NVFP4 a record is smaller than the raw latent, so decode reads
half the bytes and computes the same numbers as if it had quantized what it read.

NVFP4 numbers are carried out of a record times `STORED_UNIT`, a power of two that keeps every
intermediate result of the decoding in the range of fp32; kernels divide by it at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_quant.errors import ConfigError
from mla_quant.formats import E2M1, E4M3, FORMATS, NVFP4
from mla_quant.kernels.numerics import (
    BLOCK,
    E2M1_CARRY_CODE,
    FORMAT_CODES,
    FORMAT_FP8,
    FORMAT_NONE,
    FORMAT_NVFP4,
    INTERPRETED,
    block_scale,
    carried_e2m1_code,
    global_scale,
    nvfp4_quotient,
    quantize_fp8,
    round_to_dtype,
    scale_is_ordinary,
)

RECORD_ALIGNMENT_BYTES = 16
"""Records start at multiples of this, so that 16 bytes can be read at a time."""

_E4M3_NAN = tl.constexpr(E4M3.nan_code)
# A code's exponent and mantissa bits put into the same fields of an fp32 number give the value
# times a power of two; subnormal codes become subnormal numbers, so no case is special.
_E2M1_SHIFT = tl.constexpr(23 - E2M1.mantissa_bits)
_E2M1_MAGNITUDE = tl.constexpr((1 << (E2M1.bits - 1)) - 1)
_E2M1_SIGN = tl.constexpr(1 << (E2M1.bits - 1))
_E2M1_SIGN_SHIFT = tl.constexpr(32 - E2M1.bits)
_E2M1_UNIT = tl.constexpr(2.0 ** (E2M1.bias - 127))
_E4M3_SHIFT = tl.constexpr(23 - E4M3.mantissa_bits)
_E4M3_MAGNITUDE = tl.constexpr((1 << (E4M3.bits - 1)) - 1)
_E4M3_SIGN = tl.constexpr(1 << (E4M3.bits - 1))
_E4M3_SIGN_SHIFT = tl.constexpr(32 - E4M3.bits)
_E4M3_UNIT = tl.constexpr(2.0 ** (E4M3.bias - 127))
_FROM_E4M3_UNIT = tl.constexpr(2.0 ** (127 - E4M3.bias))

STORED_UNIT = tl.constexpr(2.0**-8)
"""Factor of numbers decoded from a record of block-scaled codes."""
# 448 · 2^126 is no fp32 number, 448 · 2^118 is.
_LARGEST_POWER = tl.constexpr(2.0**127)
_TO_BLOCK_SCALE = tl.constexpr(
    STORED_UNIT.value / _E2M1_UNIT.value * (_FROM_E4M3_UNIT.value / _LARGEST_POWER.value)
)
_POISON = tl.constexpr((E4M3.nan_code or 0) | 1 << (E4M3.bits - 1))


@dataclass(frozen=True)
class OperandLayout:
    """Where the operands of a token lie in its record.

    NVFP4 K: byte b holds the code of feature b in its low and that of feature b + width/2 in its
    high nibble, so that kernels work on halves and never interleave them; then an E4M3 scale per
    16 features. NVFP4 V is quantized in groups of 16 tokens and stored by group, features split
    among the tokens: token i (position modulo 16) holds features i · width/16 to (i+1) · width/16,
    8 bytes of codes each, byte j being token 2j in its low and token 2j + 1 in its high nibble, and
    their scales. A thread of a matrix unit wants consecutive values along the contraction axis:
    both are. FP8 takes an E4M3 byte a value and no scale, all features of a token in its record.
    Format "none" is not stored: it is read from the raw cache.

    Attributes:
        latent_width: Features of the latent, a power of two, at least 32.
        rope_width: Features of the rope part, a multiple of 16 or 0.
        k_format: "none", "fp8" or "nvfp4".
        v_format: "none", "fp8" or "nvfp4".
        k_rope_format: Of K's rope part; None: as `k_format`.
    """

    latent_width: int
    rope_width: int
    k_format: str = "nvfp4"
    v_format: str = "nvfp4"
    k_rope_format: str | None = None

    def __post_init__(self) -> None:
        check_widths(self.latent_width, self.rope_width)
        for operand, name in (
            ("k_format", self.k_format),
            ("v_format", self.v_format),
            ("k_rope_format", self.rope_format),
        ):
            if name not in FORMATS:
                raise ConfigError(
                    f"{operand} of an operand cache is {name!r}; allowed are {sorted(FORMATS)}"
                )
        if not self.used_bytes:
            raise ConfigError(
                "an operand cache in which k_format, k_rope_format (of a rope part that exists) "
                "and v_format are 'none' would store nothing; use no operand cache"
            )

    @property
    def rope_format(self) -> str:
        """Format of K's rope part."""
        return self.k_format if self.k_rope_format is None else self.k_rope_format

    def _codes_bytes(self, name: str, width: int) -> int:
        element = FORMATS[name].element
        return 0 if element is None else width * element.bits // 8

    @property
    def k_codes(self) -> int:
        """Offset of the codes of K's latent part, in bytes, as all offsets are."""
        return 0

    @property
    def k_rope_codes(self) -> int:
        """Offset of the codes of K's rope part."""
        return self.k_codes + self._codes_bytes(self.k_format, self.latent_width)

    @property
    def v_codes(self) -> int:
        """Offset of V's codes."""
        return self.k_rope_codes + self._codes_bytes(self.rope_format, self.rope_width)

    @property
    def v_scales(self) -> int:
        """Offset of this token's share of the scales of V."""
        return self.v_codes + self._codes_bytes(self.v_format, self.latent_width)

    @property
    def k_scales(self) -> int:
        """Offset of the scales of K's latent part."""
        return self.v_scales + self._scales_bytes(self.v_format, self.latent_width)

    @property
    def k_rope_scales(self) -> int:
        """Offset of the scales of K's rope part."""
        return self.k_scales + self._scales_bytes(self.k_format, self.latent_width)

    @property
    def used_bytes(self) -> int:
        """Bytes of a record that hold something."""
        return self.k_rope_scales + self._scales_bytes(self.rope_format, self.rope_width)

    @property
    def record_bytes(self) -> int:
        """Bytes of a record, padded to the alignment."""
        return -(-self.used_bytes // RECORD_ALIGNMENT_BYTES) * RECORD_ALIGNMENT_BYTES

    def _scales_bytes(self, name: str, width: int) -> int:
        block_size = FORMATS[name].block_size
        return 0 if block_size is None else width // block_size

    def kernel_constants(self) -> dict[str, int]:
        """Offsets by the names that kernels give them."""
        return {
            "K_CODES": self.k_codes,
            "K_ROPE_CODES": self.k_rope_codes,
            "K_SCALES": self.k_scales,
            "K_ROPE_SCALES": self.k_rope_scales,
            "V_CODES": self.v_codes,
            "V_SCALES": self.v_scales,
        }


def check_widths(latent_width: int, rope_width: int) -> None:
    """Refuse widths that the decode kernels cannot cut into halves and blocks.

    Raises:
        ConfigError: They cannot.
    """
    if latent_width < 32 or latent_width & (latent_width - 1):
        raise ConfigError(
            f"latent_width is {latent_width}; the decode kernels need a power of two, at least 32"
        )
    block_size = NVFP4.block_size or 1
    if rope_width < 0 or rope_width % block_size:
        raise ConfigError(
            f"rope_width is {rope_width}; the decode kernels need a multiple of {block_size}, or 0"
        )


@triton.jit
def _token_slots(
    table,
    start,
    tokens,
    present,
    SPAN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Page, int64, and slot in it, in two summands of which the first is a scalar.

    Of positions `start + tokens`; arguments as of `token_rows`.
    """
    if PAGE_SIZE // SPAN * SPAN == PAGE_SIZE:
        page = tl.load(table + start // PAGE_SIZE).to(tl.int64)
        base = start % PAGE_SIZE
        offset = tokens
    else:
        positions = start + tokens
        number = positions // PAGE_SIZE
        if MASKED:
            page = tl.load(table + number, mask=present, other=0).to(tl.int64)
        else:
            page = tl.load(table + number).to(tl.int64)
        base = start - start
        offset = positions - number * PAGE_SIZE
    return page, base, offset


@triton.jit
def token_rows(
    table,
    start,
    tokens,
    present,
    page_stride,
    token_stride,
    SPAN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Offsets, int64, of the slots of positions `start + tokens` of one sequence.

    Args:
        table: Pointer to the sequence's block table.
        start: First position, a multiple of SPAN that is present.
        tokens: int32, below SPAN.
        present: Which positions are present; the offset of others is 0. Read only if MASKED.
        page_stride: Elements from page to page.
        token_stride: Elements from slot to slot.
        SPAN: Power of two.
        PAGE_SIZE: Slots of a page.
        MASKED: Whether anything may be absent.
    """
    page, base, offset = _token_slots(table, start, tokens, present, SPAN, PAGE_SIZE, MASKED)
    rows = page * page_stride + (base + offset).to(tl.int64) * token_stride
    if MASKED:
        rows = tl.where(present, rows, 0)
    return rows


# --- codes


@triton.jit
def decode_e2m1(code, scaled):
    """fp32 `element · block_scale · STORED_UNIT` of int32 codes; `scaled` from `stored_scale`."""
    sign = (code & _E2M1_SIGN) << _E2M1_SIGN_SHIFT
    bits = ((code & _E2M1_MAGNITUDE) << _E2M1_SHIFT) | sign
    return bits.to(tl.float32, bitcast=True) * scaled


@triton.jit
def encode_e4m3_magnitude(x):
    """Codes, int32, of fp32 numbers on the E4M3 grid without a sign."""
    return (x * _E4M3_UNIT).to(tl.int32, bitcast=True) >> _E4M3_SHIFT


@triton.jit
def decode_e4m3_magnitude(code):
    """fp32 values of int32 E4M3 codes of numbers without a sign."""
    return (code << _E4M3_SHIFT).to(tl.float32, bitcast=True) * _FROM_E4M3_UNIT


@triton.jit
def encode_e4m3(x):
    """Codes, int32, of fp32 numbers on the E4M3 grid, or NaN."""
    magnitude = encode_e4m3_magnitude(tl.abs(x))
    sign = (x.to(tl.int32, bitcast=True) >> _E4M3_SIGN_SHIFT) & _E4M3_SIGN
    return tl.where(x == x, magnitude, _E4M3_NAN) | sign


@triton.jit
def decode_e4m3(code):
    """fp32 values of int32 E4M3 codes."""
    magnitude = code & _E4M3_MAGNITUDE
    sign = (code & _E4M3_SIGN) << _E4M3_SIGN_SHIFT
    value = ((magnitude << _E4M3_SHIFT) | sign).to(tl.float32, bitcast=True) * _FROM_E4M3_UNIT
    return tl.where(magnitude == _E4M3_NAN, float("nan"), value)


@triton.jit
def stored_scale(code):
    """Block scale of a byte times a power of two, fp32; infinite for a poisoned block."""
    # 2^238 in two steps. A poisoned byte, its sign bit set, overflows in the second.
    bits = (code.to(tl.int32) << _E4M3_SHIFT).to(tl.float32, bitcast=True)
    return (bits * _LARGEST_POWER) * _TO_BLOCK_SCALE


def _decode_code(steps: list[tuple[str, str, int]]) -> tl.constexpr:
    """PTX that decodes the four bytes of register $4 into four registers of two bfloat16 numbers.

    Each step isolates two nibbles, one in each half of a register. A multiplication then puts their
    signs and magnitudes into the fields of a bfloat16, whose product with the scale is exact.

    Args:
        steps: For $0 to $3: how a register `x` gets the nibbles, their mask, register of the scale.
    """
    lines = [".reg .b32 x, y, t, z;", "mov.b32 z, 0x80008000;", "shr.b32 y, $4, 4;"]
    for i, (isolate, mask, scale) in enumerate(steps):
        factor = 4160 if mask == "0x000F000F" else 260
        lines += [
            isolate,
            f"and.b32 t, x, {mask};",
            f"mul.lo.u32 t, t, {factor};",
            "and.b32 t, t, 0x81C081C0;",
            f"fma.rn.bf16x2 ${i}, t, ${scale}, z;",
        ]
    return tl.constexpr("{" + "\n".join(lines) + "}")


def _decode_halves(scales: tuple[int, int, int, int]) -> tl.constexpr:
    """Low nibbles of bytes 0, 1 and 2, 3, then their high nibbles."""
    low, high = "0x000F000F", "0x00F000F0"
    first, second = "prmt.b32 x, $4, 0, 0x4140;", "prmt.b32 x, $4, 0, 0x4342;"
    order = (first, low), (second, low), (first, high), (second, high)
    return _decode_code([(*step, scale) for step, scale in zip(order, scales, strict=True)])


# Scales by pairs of elements, as a tensor of bytes has them, or one for the low and one for the
# high nibbles of a word.
_HALVES_OF_BYTES = _decode_halves((5, 6, 7, 8))
DECODE_HALVES = _decode_halves((5, 5, 6, 6))
# Low and high nibble of each byte, one scale.
DECODE_PAIRS = _decode_code(
    [(f"prmt.b32 x, $4, y, 0x0{4 + i}0{i};", "0x000F000F", 5) for i in range(4)]
)


@triton.jit
def decode_nibbles(codes, lower_scale, upper_scale, DTYPE: tl.constexpr):
    """`element · block_scale · STORED_UNIT` of the low and of the high nibbles of uint8 `codes`.

    Scales are from `stored_scale` and broadcast against the codes. Exact in DTYPE.
    """
    if INTERPRETED or tl.bfloat16 != DTYPE:
        wide = codes.to(tl.int32)
        lower = round_to_dtype(decode_e2m1(wide, lower_scale), DTYPE)
        upper = round_to_dtype(decode_e2m1(wide >> 4, upper_scale), DTYPE)
    else:
        lower, upper = tl.inline_asm_elementwise(
            _HALVES_OF_BYTES,
            "=r,=r,=r,=r,r,r,r,r,r",
            [codes, lower_scale.to(tl.bfloat16), upper_scale.to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return lower, upper


# --- reading: tiles of operands in halves


@triton.jit
def _load(at, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(at, mask=mask, other=0)
    else:
        return tl.load(at)


@triton.jit
def load_k(
    records,
    rows,
    present,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    FORMAT: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Both feature halves of the latent or rope part of K, [TOKENS, HALF] each.

    HALF is WIDTH // 2 or a larger power of two; 0 from feature WIDTH // 2 of each half on, and in
    tokens that are not present. NVFP4 numbers are times STORED_UNIT.
    """
    if FORMAT == FORMAT_FP8:
        lower = _load_fp8(records + CODES, rows, present, WIDTH, HALF, DTYPE, MASKED)
        upper = _load_fp8(records + CODES + WIDTH // 2, rows, present, WIDTH, HALF, DTYPE, MASKED)
    elif WIDTH == 2 * HALF and HALF >= BLOCK:
        BLOCKS: tl.constexpr = HALF // BLOCK
        block = tl.arange(0, BLOCKS)
        feature = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        codes_at = records + CODES + rows[:, None, None] + feature[None, :, :]
        codes = _load(codes_at, present[:, None, None], MASKED)
        if BLOCKS <= 2 and SCALES % 4 == 0:
            # One word a token: a pipeline copies no less than four bytes at a time.
            word_at = (records + SCALES + rows).to(tl.pointer_type(tl.int32), bitcast=True)
            word = _load(word_at, present, MASKED)[:, None] >> (8 * block)[None, :]
            lower_scale = word & 0xFF
            upper_scale = (word >> (8 * BLOCKS)) & 0xFF
        else:
            scales_at = records + SCALES + rows[:, None] + tl.arange(0, 2 * BLOCKS)[None, :]
            scales = _load(scales_at, present[:, None], MASKED)
            scales = tl.permute(tl.reshape(scales, [TOKENS, 2, BLOCKS]), [0, 2, 1])
            lower_scale, upper_scale = tl.split(scales)
        lower, upper = decode_nibbles(
            codes,
            stored_scale(lower_scale)[:, :, None],
            stored_scale(upper_scale)[:, :, None],
            DTYPE,
        )
        lower = tl.reshape(lower, [TOKENS, HALF])
        upper = tl.reshape(upper, [TOKENS, HALF])
    else:
        # A half that cuts a block, or is padded: each element looks its scale up.
        feature = tl.arange(0, HALF)
        inside = feature[None, :] < WIDTH // 2
        if MASKED:
            inside = inside & present[:, None]
        codes_at = records + CODES + rows[:, None] + feature[None, :]
        codes = tl.load(codes_at, mask=inside, other=0)
        scales_at = records + SCALES + rows[:, None]
        lower_at = scales_at + (feature // BLOCK)[None, :]
        upper_at = scales_at + ((feature + WIDTH // 2) // BLOCK)[None, :]
        lower_scale = stored_scale(tl.load(lower_at, mask=inside, other=0))
        upper_scale = stored_scale(tl.load(upper_at, mask=inside, other=0))
        lower, upper = decode_nibbles(codes, lower_scale, upper_scale, DTYPE)
    return lower, upper


@triton.jit
def _load_fp8(
    at,
    rows,
    present,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    feature = tl.arange(0, HALF)
    at = at + rows[:, None] + feature[None, :]
    if WIDTH == 2 * HALF:
        codes = _load(at, present[:, None], MASKED)
    else:
        inside = feature[None, :] < WIDTH // 2
        if MASKED:
            inside = inside & present[:, None]
        codes = tl.load(at, mask=inside, other=0)
    return round_to_dtype(decode_e4m3(codes.to(tl.int32)), DTYPE)


@triton.jit
def load_v_fp8(
    records,
    rows,
    present,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
    DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Both feature halves of V, [tokens, WIDTH // 2] each, 0 in tokens that are not present."""
    HALF: tl.constexpr = WIDTH // 2
    lower = _load_fp8(records + CODES, rows, present, WIDTH, HALF, DTYPE, MASKED)
    upper = _load_fp8(records + CODES + HALF, rows, present, WIDTH, HALF, DTYPE, MASKED)
    return lower, upper


@triton.jit
def share_tokens(GROUPS: tl.constexpr, UPPER: tl.constexpr):
    """Tokens whose records hold one feature half of V in groups, int32 [8 · GROUPS]."""
    token = tl.arange(0, GROUPS * BLOCK // 2)
    return token // (BLOCK // 2) * BLOCK + UPPER * (BLOCK // 2) + token % (BLOCK // 2)


@triton.jit
def load_v_groups(
    records,
    rows,
    present,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One feature half of NVFP4 V: even tokens and odd tokens, [8 · GROUPS, WIDTH // 2] each.

    Row 8 g + j is token 16 g + 2 j, or the one after it, times STORED_UNIT.

    Args:
        records: Pointer to the records.
        rows: Offsets of the records of `share_tokens`.
        present: Which of them may be read (MASKED only), whole groups; 0 elsewhere.
        WIDTH: Features.
        GROUPS: Groups of 16 tokens.
        CODES: Offset of the codes.
        SCALES: Offset of the scales.
        DTYPE: Result.
        MASKED: Whether anything may be absent.
    """
    HALF: tl.constexpr = WIDTH // 2
    PAIRS: tl.constexpr = BLOCK // 2
    SHARE: tl.constexpr = WIDTH // BLOCK
    codes_at = records + CODES + rows[:, None] + tl.arange(0, SHARE * PAIRS)[None, :]
    codes = _load(codes_at, present[:, None], MASKED)
    scales_at = records + SCALES + rows[:, None] + tl.arange(0, SHARE)[None, :]
    scales = _load(scales_at, present[:, None], MASKED)
    codes = tl.permute(tl.reshape(codes, [GROUPS, HALF, PAIRS]), [0, 2, 1])
    scale = stored_scale(tl.reshape(scales, [GROUPS, 1, HALF]))
    even, odd = decode_nibbles(codes, scale, scale, DTYPE)
    even = tl.reshape(even, [GROUPS * PAIRS, HALF])
    odd = tl.reshape(odd, [GROUPS * PAIRS, HALF])
    return even, odd


# --- writing


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(x, AXIS: tl.constexpr):
    """Largest magnitude along AXIS, which is kept, NaN if there is one."""
    if INTERPRETED:  # whose maximum leaves NaN out or not, by version
        nan = tl.max((x != x).to(tl.int32), AXIS, keep_dims=True)
        largest = tl.max(tl.where(x == x, tl.abs(x), 0.0), AXIS, keep_dims=True)
        largest = tl.where(nan > 0, float("nan"), largest)
    else:
        largest = tl.reduce(tl.abs(x), AXIS, _larger, keep_dims=True)
    return largest


@triton.jit
def _encode_nvfp4(x, largest, g, ORDINARY: tl.constexpr):
    """Codes of what `quantize_nvfp4` decides about fp32 `x`, and bytes of the block scales, int32.

    `largest` is of `_largest` for each block. Codes are without signs, too large by
    `E2M1_CARRY_CODE` and only right in the lowest three bits: for `_pack_nibbles`. E2M1 has no
    NaN: a block with one gets the scale byte `_POISON`, itself a NaN, and codes of 0 or -0, so that
    0 · inf makes every number of the block NaN when it is decoded.
    """
    poisoned = largest != largest
    scale = block_scale(tl.where(poisoned, 0.0, largest), g, ORDINARY)
    magnitude = tl.abs(x)
    if INTERPRETED or not ORDINARY:
        magnitude = tl.where(poisoned, 0.0, magnitude)
    code = carried_e2m1_code(nvfp4_quotient(magnitude, scale, g, ORDINARY))
    byte = (scale * _E4M3_UNIT).to(tl.int32, bitcast=True) >> _E4M3_SHIFT
    return code, tl.where(poisoned, _POISON, byte)


@triton.jit
def _sign_halves(x):
    """int16 with the signs of a tensor of numbers."""
    if x.dtype.primitive_bitwidth == 16:
        return x.to(tl.int16, bitcast=True)
    else:
        return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16)


# Four bytes: codes of low nibbles $1 to $4, of high ones $5 to $8, all too large by a constant;
# signs, two to a register, of low nibbles $9 and $10, of high ones $11 and $12.
_PACK_NIBBLES = tl.constexpr(
    """{
    .reg .b32 x, y, s, t;
    prmt.b32 x, $1, $2, 0x0040;
    prmt.b32 t, $3, $4, 0x0040;
    prmt.b32 x, x, t, 0x5410;
    prmt.b32 y, $5, $6, 0x0040;
    prmt.b32 t, $7, $8, 0x0040;
    prmt.b32 y, y, t, 0x5410;
    prmt.b32 s, $9, $10, 0x7531;
    prmt.b32 t, $11, $12, 0x7531;
    shl.b32 y, y, 4;
    and.b32 x, x, 0x07070707;
    and.b32 y, y, 0x70707070;
    or.b32 x, x, y;
    add.u32 x, x, LARGER;
    and.b32 x, x, 0x77777777;
    shr.u32 s, s, 4;
    and.b32 s, s, 0x08080808;
    and.b32 t, t, 0x80808080;
    or.b32 s, s, t;
    or.b32 $0, x, s;
}""".replace("LARGER", str(-E2M1_CARRY_CODE.value % 8 * 0x11111111))
)


@triton.jit
def _pack_nibbles(lower, upper, lower_sign, upper_sign):
    """Bytes of two codes of `_encode_nvfp4` each, with signs of `_sign_halves`."""
    if INTERPRETED:
        magnitudes = (lower - E2M1_CARRY_CODE) & _E2M1_MAGNITUDE
        magnitudes |= ((upper - E2M1_CARRY_CODE) & _E2M1_MAGNITUDE) << 4
        signs = ((lower_sign < 0).to(tl.int32) | ((upper_sign < 0).to(tl.int32) << 4)) * _E2M1_SIGN
        return (magnitudes | signs).to(tl.uint8)
    else:
        return tl.inline_asm_elementwise(
            _PACK_NIBBLES,
            "=r,r,r,r,r,r,r,r,r,r,r,r,r",
            [lower, upper, lower_sign, upper_sign],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )


@triton.jit
def _store_features(
    source,
    records,
    new,
    g,
    first,
    WIDTH: tl.constexpr,
    ITEMS: tl.constexpr,
    SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    FORMAT: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    ORDINARY: tl.constexpr,
):
    """Quantize ITEMS times SIZE features of both halves of tokens along features.

    Args:
        source: Pointers to the first of the WIDTH features of each token.
        records: Pointers to the records of the tokens.
        new: Which tokens to quantize.
        g: Global scale.
        first: Item to begin with.
        WIDTH: Features, a multiple of 16.
        ITEMS: Power of two.
        SIZE: Features of one block that lie in one half: 16, or 8 where a half cuts a block.
        SPLIT: Parts of an item, so that a part is 16 bytes and a thread has whole blocks; 1 leaves
            the layout to the compiler.
        FORMAT: "fp8" or "nvfp4".
        CODES: Offset of the codes.
        SCALES: Offset of the block scales.
        ORDINARY: `scale_is_ordinary(g)`.
    """
    HALF: tl.constexpr = WIDTH // 2
    PART: tl.constexpr = SIZE // SPLIT
    # [ITEMS, tokens, SPLIT, PART]: threads go along the last axis, then from the first on.
    item = first + tl.arange(0, ITEMS)[:, None, None, None]
    offset = tl.arange(0, SPLIT)[:, None] * PART + tl.arange(0, PART)[None, :]
    feature = item * SIZE + offset[None, None, :, :]
    mask = new[None, :, None, None] & (item < HALF // SIZE)
    source = source[None, :, None, None]
    records = records[None, :, None, None]
    lower = tl.load(source + feature, mask=mask, other=0.0)
    upper = tl.load(source + HALF + feature, mask=mask, other=0.0)
    x_lower, x_upper = lower.to(tl.float32), upper.to(tl.float32)
    if FORMAT == FORMAT_FP8:
        codes = encode_e4m3(quantize_fp8(x_lower, g, ORDINARY)).to(tl.uint8)
        tl.store(records + CODES + feature, codes, mask=mask)
        codes = encode_e4m3(quantize_fp8(x_upper, g, ORDINARY)).to(tl.uint8)
        tl.store(records + CODES + HALF + feature, codes, mask=mask)
    else:
        largest_lower = _largest(_largest(x_lower, 3), 2)
        largest_upper = _largest(_largest(x_upper, 3), 2)
        if SIZE < BLOCK:
            # What else is in the blocks.
            rest = tl.load(source + (feature ^ SIZE), mask=mask, other=0.0).to(tl.float32)
            largest_lower = _larger(largest_lower, _largest(_largest(rest, 3), 2))
            at = source + ((HALF + feature) ^ SIZE)
            rest = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            largest_upper = _larger(largest_upper, _largest(_largest(rest, 3), 2))
        lower_codes, lower_scale = _encode_nvfp4(x_lower, largest_lower, g, ORDINARY)
        upper_codes, upper_scale = _encode_nvfp4(x_upper, largest_upper, g, ORDINARY)
        codes = _pack_nibbles(lower_codes, upper_codes, _sign_halves(lower), _sign_halves(upper))
        tl.store(records + CODES + feature, codes, mask=mask)
        at = records + SCALES + item * SIZE // BLOCK
        tl.store(at, lower_scale.to(tl.uint8), mask=mask)
        at = records + SCALES + (HALF + item * SIZE) // BLOCK
        tl.store(at, upper_scale.to(tl.uint8), mask=mask)


@triton.jit
def _write_features(
    cache,
    records,
    table,
    start,
    first,
    length,
    amax,
    item,
    cache_page_stride,
    record_page_stride,
    CACHE_STRIDE: tl.constexpr,
    RECORD_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    ITEMS: tl.constexpr,
    SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    FORMAT: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
):
    """`_store_features` of TOKENS positions from `start` on where they are new.

    More than 16 begin anywhere, so that they may lie in several pages.
    """
    SPAN: tl.constexpr = TOKENS if TOKENS <= BLOCK else 2 * PAGE_SIZE
    tokens = tl.arange(0, TOKENS)
    present = start + tokens < length
    new = present & (start + tokens >= first)
    page, base, offset = _token_slots(table, start, tokens, present, SPAN, PAGE_SIZE, True)
    base, offset = base.to(tl.int64), offset.to(tl.int64)
    source = cache + page * cache_page_stride + base * CACHE_STRIDE + offset * CACHE_STRIDE
    target = records + page * record_page_stride + base * RECORD_STRIDE + offset * RECORD_STRIDE
    g = global_scale(amax, FORMAT)
    if scale_is_ordinary(g):
        _store_features(
            source, target, new, g, item, WIDTH, ITEMS, SIZE, SPLIT, FORMAT, CODES, SCALES, True
        )
    else:
        # In small parts: what is rare must not take the registers of what is not.
        for i in range(ITEMS):
            _store_features(
                source, target, new, g, item + i,
                WIDTH, 1, SIZE, SPLIT, FORMAT, CODES, SCALES, False,
            )  # fmt: skip


@triton.jit
def _neighbours(x, VECTORS: tl.constexpr, VECTOR: tl.constexpr):
    """Even and odd tokens of [VECTORS, 16, VECTOR], as [VECTORS, VECTOR, 8]."""
    x = tl.reshape(x, [VECTORS, BLOCK // 2, 2, VECTOR])
    return tl.split(tl.permute(x, [0, 3, 1, 2]))


@triton.jit
def _store_tokens(
    source,
    records,
    table,
    start,
    g,
    feature,
    record_page_stride,
    RECORD_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    VECTORS: tl.constexpr,
    VECTOR: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    ORDINARY: tl.constexpr,
):
    """Quantize features of a group of 16 tokens along tokens to NVFP4.

    Args:
        source: Pointers to the tokens' latents.
        records: Pointer to all records.
        table: Pointer to the sequence's block table.
        start: Position of the first token.
        g: Global scale.
        feature: int32 [VECTORS, VECTOR]. A thread has all tokens of VECTOR neighbours.
        record_page_stride: Bytes from page to page.
        RECORD_STRIDE: Bytes from slot to slot.
        PAGE_SIZE: Slots of a page.
        LATENT: Features of the latent.
        VECTORS: Power of two.
        VECTOR: Power of two.
        CODES: Offset of the codes.
        SCALES: Offset of the block scales.
        ORDINARY: `scale_is_ordinary(g)`.
    """
    PAIRS: tl.constexpr = BLOCK // 2
    SHARE: tl.constexpr = LATENT // BLOCK
    raw = tl.load(source[None, :, None] + feature[:, None, :])
    x = raw.to(tl.float32)
    codes, scales = _encode_nvfp4(x, _largest(x, 1), g, ORDINARY)
    even, odd = _neighbours(codes, VECTORS, VECTOR)
    even_sign, odd_sign = _neighbours(_sign_halves(raw), VECTORS, VECTOR)
    packed = _pack_nibbles(even, odd, even_sign, odd_sign)
    rows = token_rows(
        table, start, feature // SHARE, True, record_page_stride, RECORD_STRIDE, BLOCK, PAGE_SIZE,
        False,
    )  # fmt: skip
    at = records + CODES + rows + feature % SHARE * PAIRS
    tl.store(at[:, :, None] + tl.arange(0, PAIRS)[None, None, :], packed)
    scales = tl.reshape(scales, [VECTORS, VECTOR])
    tl.store(records + SCALES + rows + feature % SHARE, scales.to(tl.uint8))


@triton.jit
def _write_tokens(
    cache,
    records,
    table,
    start,
    amax,
    first,
    cache_page_stride,
    record_page_stride,
    CACHE_STRIDE: tl.constexpr,
    RECORD_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    VECTORS: tl.constexpr,
    VECTOR: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
):
    """`_store_tokens` of VECTORS · VECTOR features from `first` on."""
    page, base, offset = _token_slots(
        table, start, tl.arange(0, BLOCK), True, BLOCK, PAGE_SIZE, False
    )
    base, offset = base.to(tl.int64), offset.to(tl.int64)
    source = cache + page * cache_page_stride + base * CACHE_STRIDE + offset * CACHE_STRIDE
    vector = tl.arange(0, VECTORS)
    if VECTOR == 1:
        # Every other feature: the compiler would join neighbours and part tokens.
        vector = vector * 2 % VECTORS + vector * 2 // VECTORS
    vector = first + vector[:, None] * VECTOR
    g = global_scale(amax, FORMAT_NVFP4)
    if scale_is_ordinary(g):
        _store_tokens(
            source, records, table, start, g, vector + tl.arange(0, VECTOR)[None, :],
            record_page_stride, RECORD_STRIDE, PAGE_SIZE,
            LATENT, VECTORS, VECTOR, CODES, SCALES, True,
        )  # fmt: skip
    else:
        # In small parts: what is rare must not take the registers of what is not.
        for lane in range(VECTOR):
            _store_tokens(
                source, records, table, start, g, vector + lane,
                record_page_stride, RECORD_STRIDE, PAGE_SIZE,
                LATENT, VECTORS, 1, CODES, SCALES, False,
            )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["block_table", "seq_lens", "cu_seqlens_new"])
def _write(
    cache,
    records,
    block_table,
    seq_lens,
    cu_seqlens_new,
    amax,
    cache_page_stride,
    record_page_stride,
    table_stride,
    CACHE_STRIDE: tl.constexpr,
    RECORD_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    K_FORMAT: tl.constexpr,
    K_ROPE_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    K_CODES: tl.constexpr,
    K_ROPE_CODES: tl.constexpr,
    K_SCALES: tl.constexpr,
    K_ROPE_SCALES: tl.constexpr,
    V_CODES: tl.constexpr,
    V_SCALES: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    ITEMS: tl.constexpr,
    ROPE_GROUPS: tl.constexpr,
    ROPE_SPLIT: tl.constexpr,
    ROPE_ITEMS: tl.constexpr,
    ROPE_SIZE: tl.constexpr,
    VECTORS: tl.constexpr,
    VECTOR: tl.constexpr,
    ROPE_PART: tl.constexpr,
    TOKEN_PART: tl.constexpr,
    TOKEN_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One part of what is to be written for one group of 16 token positions of one sequence.

    Parts below ROPE_PART quantize ITEMS blocks of either half of the latent along features, for K
    and for V in FP8; ROPE_PART does K's rope part, of ROPE_GROUPS groups at once; TOKEN_PARTS from
    TOKEN_PART on quantize VECTORS · VECTOR features of V along tokens.
    TOKENS: 16, or 1 where only one can be new.
    """
    part = tl.program_id(0) % PARTS
    number = tl.program_id(0) // PARTS
    sequence = tl.program_id(1)
    k_amax, k_rope_amax, v_amax = tl.load(amax + 2), tl.load(amax + 3), tl.load(amax + 4)
    length = tl.load(seq_lens + sequence)
    if cu_seqlens_new is None:
        count = 1
    else:
        count = tl.load(cu_seqlens_new + sequence + 1) - tl.load(cu_seqlens_new + sequence)
    first = tl.maximum(length - count, 0)
    start = (first // BLOCK + number) * BLOCK
    if (start < length) & (first < length):
        table = block_table + sequence.to(tl.int64) * table_stride
        if TOKENS == 1:
            k_start = first
        else:
            k_start = start
        if part < ROPE_PART:
            if K_FORMAT != FORMAT_NONE:
                _write_features(
                    cache, records, table, k_start, first, length, k_amax, part * ITEMS,
                    cache_page_stride, record_page_stride, CACHE_STRIDE, RECORD_STRIDE, PAGE_SIZE,
                    TOKENS, LATENT, ITEMS, BLOCK, SPLIT, K_FORMAT, K_CODES, K_SCALES,
                )  # fmt: skip
            if V_FORMAT == FORMAT_FP8:
                _write_features(
                    cache, records, table, k_start, first, length, v_amax, part * ITEMS,
                    cache_page_stride, record_page_stride, CACHE_STRIDE, RECORD_STRIDE, PAGE_SIZE,
                    TOKENS, LATENT, ITEMS, BLOCK, SPLIT, V_FORMAT, V_CODES, V_SCALES,
                )  # fmt: skip
        if ROPE_ITEMS > 0:  # noqa: SIM102
            if (part == ROPE_PART) & (number % ROPE_GROUPS == 0):
                _write_features(
                    cache + LATENT, records, table, k_start, first, length, k_rope_amax, 0,
                    cache_page_stride, record_page_stride, CACHE_STRIDE, RECORD_STRIDE, PAGE_SIZE,
                    TOKENS * ROPE_GROUPS, ROPE, ROPE_ITEMS, ROPE_SIZE, ROPE_SPLIT,
                    K_ROPE_FORMAT, K_ROPE_CODES, K_ROPE_SCALES,
                )  # fmt: skip
        if TOKEN_PARTS > 0:
            here = (part >= TOKEN_PART) & (part < TOKEN_PART + TOKEN_PARTS)
            if here & (start + BLOCK <= length):
                _write_tokens(
                    cache, records, table, start, v_amax, (part - TOKEN_PART) * VECTORS * VECTOR,
                    cache_page_stride, record_page_stride, CACHE_STRIDE, RECORD_STRIDE, PAGE_SIZE,
                    LATENT, VECTORS, VECTOR, V_CODES, V_SCALES,
                )  # fmt: skip


def allocate(
    pages: int, page_size: int, layout: OperandLayout, device: torch.device | str
) -> Tensor:
    """Records for a paged cache: uint8 [pages, page_size, layout.record_bytes], all zero."""
    return torch.zeros(pages, page_size, layout.record_bytes, dtype=torch.uint8, device=device)


def check_records(records: Tensor, cache: Tensor, layout: OperandLayout) -> None:
    """Refuse records that do not belong to the raw cache.

    Raises:
        ConfigError: Shape, dtype, device or memory layout do not fit.
    """
    want = (*cache.shape[:2], layout.record_bytes)
    if (
        records.dtype != torch.uint8
        or tuple(records.shape) != want
        or records.device != cache.device
        or records.stride(-1) != 1
    ):
        raise ConfigError(
            f"an operand cache must be uint8 {list(want)} on {cache.device} with a contiguous last "
            f"dimension; got {records.dtype} {list(records.shape)} on {records.device} with "
            f"strides {list(records.stride())}; make it with operand_cache.allocate"
        )
    places = (records.data_ptr(), *records.stride()[:2])
    if any(place % RECORD_ALIGNMENT_BYTES for place in places):
        raise ConfigError(
            f"records must start at multiples of {RECORD_ALIGNMENT_BYTES} bytes; these start at "
            f"{records.data_ptr()} with strides {list(records.stride())}; make them with "
            "operand_cache.allocate"
        )


def write_operands(
    cache: Tensor,
    records: Tensor,
    layout: OperandLayout,
    block_table: Tensor,
    seq_lens: Tensor,
    amax: Tensor,
    *,
    cu_seqlens_new: Tensor | None = None,
    max_new_tokens: int = 1,
) -> None:
    """Quantize the newest tokens of each sequence into the side cache.

    K and FP8 V of a token are written at once, a group of V in NVFP4 when its 16th token is
    there. Call it after the raw cache holds the new tokens. Writing a position again is allowed
    (rejected speculative tokens).

    Args:
        cache: [pages, page_size, latent + rope], bf16, fp16 or fp32, last dimension contiguous.
        records: uint8 [pages, page_size, layout.record_bytes], written in place.
        layout: What is stored and where.
        block_table: int32 [batch, max_pages].
        seq_lens: int32 [batch], tokens of each sequence with the new ones.
        amax: fp32 [6]: q latent, q rope, k latent, k rope, v, p.
        cu_seqlens_new: int32 [batch + 1], cumulated numbers of new tokens; None: one each.
        max_new_tokens: Largest number of new tokens of a sequence, or more.

    A `seq_lens` beyond the capacity of its row of `block_table`, max_pages · page_size, is not
    noticed, because that would wait for the device: block ids past the end of the row are read.

    Raises:
        ConfigError: An argument does not fit.
    """
    check_cache(cache, block_table, seq_lens, layout.latent_width, layout.rope_width)
    check_records(records, cache, layout)
    check_amax(amax, cache)
    batch = seq_lens.shape[0]
    if cu_seqlens_new is None and max_new_tokens != 1:
        raise ConfigError(
            f"max_new_tokens is {max_new_tokens} and cu_seqlens_new is None, which means one new "
            "token a sequence; pass cu_seqlens_new"
        )
    if cu_seqlens_new is not None:
        check_cumulated("cu_seqlens_new", cu_seqlens_new, batch, cache.device)
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}; it must be at least 0")
    if batch == 0 or max_new_tokens == 0 or block_table.shape[1] == 0:
        return
    block_size = NVFP4.block_size or 1
    # n consecutive positions touch at most this many groups.
    groups = (max_new_tokens + 2 * block_size - 2) // block_size
    constants = _write_constants(layout, cache.element_size(), max_new_tokens)
    _write[(constants["PARTS"] * groups, batch)](
        cache,
        records,
        block_table,
        seq_lens,
        cu_seqlens_new,
        amax,
        cache.stride(0),
        records.stride(0),
        block_table.stride(0),
        CACHE_STRIDE=cache.stride(1),
        RECORD_STRIDE=records.stride(1),
        PAGE_SIZE=cache.shape[1],
        LATENT=layout.latent_width,
        ROPE=layout.rope_width,
        K_FORMAT=FORMAT_CODES[layout.k_format],
        K_ROPE_FORMAT=FORMAT_CODES[layout.rope_format],
        V_FORMAT=FORMAT_CODES[layout.v_format],
        **layout.kernel_constants(),
        **constants,
    )


class WriteTiling(NamedTuple):
    """How the writing of a group of 16 tokens is cut into programs.

    Attributes:
        features: Of a program that quantizes along features, half of them in either half.
        v_features: Of a program that quantizes along tokens.
        vector: Of those, neighbours in one thread.
        together: Whether these programs are the same.
        whole_blocks: Whether a thread has whole blocks along features, too.
        warps: Of all programs.
    """

    features: int
    v_features: int
    vector: int
    together: bool
    whole_blocks: bool
    warps: int


# Latency decides: many programs, each with little to do.
ONE_TOKEN = WriteTiling(512, 128, 1, False, False, 4)
FEW_TOKENS = WriteTiling(128, 128, 1, False, False, 4)
# Instructions decide: no block scale is computed twice, the latent is read from memory once.
MANY_TOKENS = WriteTiling(512, 512, 4, True, True, 4)


def _write_constants(
    layout: OperandLayout, element_size: int, max_new_tokens: int
) -> dict[str, int]:
    """What `_write` is compiled for beside the layout."""
    block_size = NVFP4.block_size or 1
    if max_new_tokens == 1:
        tiling = ONE_TOKEN
    else:
        tiling = FEW_TOKENS if max_new_tokens <= block_size else MANY_TOKENS
    width, rope = layout.latent_width, layout.rope_width
    features, v_features = min(tiling.features, width), min(tiling.v_features, width)
    vector = min(tiling.vector, v_features)
    along_features = layout.k_format != "none" or layout.v_format == "fp8"
    feature_parts = width // features if along_features else 0
    rope_size = block_size if rope % (2 * block_size) == 0 else block_size // 2
    rope_items = rope // 2 // rope_size if layout.rope_format != "none" else 0
    token_parts = width // v_features if layout.v_format == "nvfp4" else 0
    token_part = 0 if tiling.together else feature_parts + int(rope_items > 0)
    # Parts of 16 bytes, or one.
    split, rope_split = (
        size * element_size // 16 if tiling.whole_blocks else 1 for size in (block_size, rope_size)
    )
    return {
        "TOKENS": 1 if max_new_tokens == 1 else block_size,
        "SPLIT": split,
        "ITEMS": features // 2 // block_size,
        "ROPE_GROUPS": 4 if tiling.whole_blocks else 1,
        "ROPE_SPLIT": rope_split,
        "ROPE_ITEMS": triton.next_power_of_2(rope_items) if rope_items else 0,
        "ROPE_SIZE": rope_size,
        "VECTORS": v_features // vector,
        "VECTOR": vector,
        "ROPE_PART": feature_parts,
        "TOKEN_PART": token_part,
        "TOKEN_PARTS": token_parts,
        "PARTS": max(feature_parts + int(rope_items > 0), token_part + token_parts),
        "num_warps": tiling.warps,
    }


CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_cache(
    cache: Tensor, block_table: Tensor, seq_lens: Tensor, latent_width: int, rope_width: int
) -> None:
    """Refuse a paged cache that kernels cannot read.

    Raises:
        ConfigError: Shape, dtype, device or memory layout do not fit.
    """
    if cache.dtype not in CACHE_DTYPES or cache.dim() != 3 or cache.stride(-1) != 1:
        raise ConfigError(
            "a latent cache must be bf16, fp16 or fp32 [pages, page_size, width] with a contiguous "
            f"last dimension; got {cache.dtype} {list(cache.shape)}, strides "
            f"{list(cache.stride())}"
        )
    if not cache.shape[1]:
        raise ConfigError(f"pages of a latent cache {list(cache.shape)} hold no token")
    if cache.shape[-1] != latent_width + rope_width:
        raise ConfigError(
            f"the latent cache is {cache.shape[-1]} wide, latent_width and rope_width are "
            f"{latent_width} + {rope_width}; they must add up to it"
        )
    check_sequences(block_table, seq_lens, cache.device)


def check_sequences(block_table: Tensor, seq_lens: Tensor, device: torch.device) -> None:
    """Refuse a block table and lengths that kernels cannot read.

    Raises:
        ConfigError: Shape, dtype, device or memory layout do not fit.
    """
    for name, tensor, dims in (("block_table", block_table, 2), ("seq_lens", seq_lens, 1)):
        if tensor.dtype != torch.int32 or tensor.dim() != dims or tensor.device != device:
            raise ConfigError(
                f"{name} must be int32 with {dims} dimension(s) on {device}; got "
                f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )
    if block_table.shape[0] != seq_lens.shape[0]:
        raise ConfigError(
            f"block_table has {block_table.shape[0]} rows, seq_lens {seq_lens.shape[0]}; both must "
            "have one per sequence"
        )
    if block_table.stride(1) != 1 and block_table.shape[1] > 1:
        raise ConfigError("the last dimension of block_table must be contiguous")
    if seq_lens.stride(0) != 1 and seq_lens.shape[0] > 1:
        raise ConfigError("seq_lens must be contiguous")


def check_cumulated(name: str, cumulated: Tensor, batch: int, device: torch.device) -> None:
    """Refuse cumulated lengths that kernels cannot read.

    Raises:
        ConfigError: Shape, dtype, device or memory layout do not fit.
    """
    if (
        cumulated.dtype != torch.int32
        or tuple(cumulated.shape) != (batch + 1,)
        or cumulated.device != device
        or not cumulated.is_contiguous()
    ):
        raise ConfigError(
            f"{name} must be int32 [{batch + 1}] on {device}, contiguous; got {cumulated.dtype} "
            f"{list(cumulated.shape)} on {cumulated.device}, strides {list(cumulated.stride())}"
        )


def check_amax(amax: Tensor, cache: Tensor) -> None:
    """Refuse a table of amax that kernels cannot read.

    Raises:
        ConfigError: Shape, dtype or device do not fit.
    """
    if (
        amax.dtype != torch.float32
        or tuple(amax.shape) != (6,)
        or amax.device != cache.device
        or amax.stride(0) != 1
    ):
        raise ConfigError(
            f"amax must be fp32 [6] (q latent, q rope, k latent, k rope, v, p) on {cache.device}; "
            f"got {amax.dtype} {list(amax.shape)} on {amax.device}, strides {list(amax.stride())}"
        )
