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

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_quant.errors import ConfigError
from mla_quant.formats import E2M1, E4M3, FORMATS, NVFP4
from mla_quant.kernels.numerics import (
    BLOCK,
    FORMAT_CODES,
    FORMAT_FP8,
    FORMAT_NONE,
    INTERPRETED,
    block_scale,
    global_scale,
    quantize_fp8,
    quantize_nvfp4,
    round_to_dtype,
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
    if PAGE_SIZE // SPAN * SPAN == PAGE_SIZE:
        block = tl.load(table + start // PAGE_SIZE).to(tl.int64)
        slot = start % PAGE_SIZE + tokens
    else:
        positions = start + tokens
        page = positions // PAGE_SIZE
        if MASKED:
            block = tl.load(table + page, mask=present, other=0).to(tl.int64)
        else:
            block = tl.load(table + page).to(tl.int64)
        slot = positions - page * PAGE_SIZE
    rows = block * page_stride + slot.to(tl.int64) * token_stride
    if MASKED:
        rows = tl.where(present, rows, 0)
    return rows


# --- codes


@triton.jit
def encode_e2m1(magnitude, x):
    """Codes, int32, of magnitudes on the E2M1 grid with the sign of `x`."""
    code = (magnitude * _E2M1_UNIT).to(tl.int32, bitcast=True) >> _E2M1_SHIFT
    sign = (x.to(tl.int32, bitcast=True) >> _E2M1_SIGN_SHIFT) & _E2M1_SIGN
    return code | sign


@triton.jit
def decode_e2m1(code, scaled):
    """fp32 `element · block_scale · STORED_UNIT` of int32 codes; `scaled` from `stored_scale`."""
    sign = (code & _E2M1_SIGN) << _E2M1_SIGN_SHIFT
    bits = ((code & _E2M1_MAGNITUDE) << _E2M1_SHIFT) | sign
    return bits.to(tl.float32, bitcast=True) * scaled


@triton.jit
def encode_e4m3(x):
    """Codes, int32, of fp32 numbers on the E4M3 grid, or NaN."""
    magnitude = (tl.abs(x) * _E4M3_UNIT).to(tl.int32, bitcast=True) >> _E4M3_SHIFT
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
        # Four bytes at a time: two to a register; a multiplication puts a nibble's sign and
        # magnitude into the fields of a bfloat16, whose product with the scale is exact.
        lower, upper = tl.inline_asm_elementwise(
            """{
            .reg .b32 x, y, t, z;
            mov.b32 z, 0x80008000;
            prmt.b32 x, $4, 0, 0x4140;
            prmt.b32 y, $4, 0, 0x4342;
            and.b32 t, x, 0x000F000F;
            mul.lo.u32 t, t, 4160;
            and.b32 t, t, 0x81C081C0;
            fma.rn.bf16x2 $0, t, $5, z;
            and.b32 t, y, 0x000F000F;
            mul.lo.u32 t, t, 4160;
            and.b32 t, t, 0x81C081C0;
            fma.rn.bf16x2 $1, t, $6, z;
            and.b32 t, x, 0x00F000F0;
            mul.lo.u32 t, t, 260;
            and.b32 t, t, 0x81C081C0;
            fma.rn.bf16x2 $2, t, $7, z;
            and.b32 t, y, 0x00F000F0;
            mul.lo.u32 t, t, 260;
            and.b32 t, t, 0x81C081C0;
            fma.rn.bf16x2 $3, t, $8, z;
            }""",
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
def _encode_nvfp4(x, g, AXIS: tl.constexpr):
    """Codes (int32) and bytes of the block scales (int32) of what `quantize_nvfp4` decides.

    E2M1 has no NaN: a block with one gets the scale byte `_POISON`, itself a NaN, and zero codes,
    so that 0 · inf makes every number of the block NaN when it is decoded.
    """
    carried = quantize_nvfp4(x, g, AXIS)
    nan = tl.max((x != x).to(tl.int32), AXIS)
    magnitude = tl.where(x == x, tl.abs(x), 0.0)
    scale = block_scale(tl.max(magnitude, AXIS), g)
    divisor = tl.expand_dims(tl.where(scale > 0, scale, 1.0), AXIS)
    # The carried number is a product of the scale: the quotient is exact.
    element = tl.div_rn(tl.abs(carried), tl.zeros_like(carried) + divisor)
    codes = encode_e2m1(tl.where(x == x, element, 0.0), x)
    codes = tl.where(tl.expand_dims(nan, AXIS) > 0, 0, codes)
    return codes, tl.where(nan > 0, _POISON, encode_e4m3(scale))


@triton.jit
def _store_k_part(
    source,
    records,
    rows,
    record_rows,
    present,
    new,
    g,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    FORMAT: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Quantize WIDTH features of 16 tokens along features; PADDED is a power of two."""
    BLOCKS: tl.constexpr = PADDED // BLOCK
    feature = tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = feature[None, :, :] < WIDTH
    mask = present[:, None, None] & inside
    at = source + rows[:, None, None] + feature[None, :, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    out = records + CODES + record_rows[:, None, None]
    if FORMAT == FORMAT_FP8:
        codes = encode_e4m3(quantize_fp8(x, g)).to(tl.uint8)
        tl.store(out + feature[None, :, :], codes, mask=new[:, None, None] & inside)
    else:
        codes, scales = _encode_nvfp4(x, g, 2)
        # The codes of features b and b + WIDTH // 2 share a byte; a pad splits them for any WIDTH.
        block = tl.arange(0, BLOCKS)
        tl.store(
            records + SCALES + record_rows[:, None] + block[None, :],
            scales.to(tl.uint8),
            mask=new[:, None] & (block[None, :] < WIDTH // BLOCK),
        )
        _store_nibbles(codes, records + CODES, record_rows, new, WIDTH, PADDED)


@triton.jit
def _store_nibbles(codes, at, rows, new, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Store int32 codes [16, …] of WIDTH of PADDED features as two halves in one byte."""
    codes = tl.reshape(codes, [BLOCK, PADDED])
    if WIDTH == PADDED:
        HALF: tl.constexpr = WIDTH // 2
        halves = tl.permute(tl.reshape(codes, [BLOCK, 2, HALF]), [0, 2, 1])
        lower, upper = tl.split(halves)
        feature = tl.arange(0, HALF)
        packed = (lower | (upper << 4)).to(tl.uint8)
        tl.store(at + rows[:, None] + feature[None, :], packed, mask=new[:, None])
    else:
        # Halves of an odd width do not fall on a power of two: gather the partner's code.
        feature = tl.arange(0, PADDED)
        partner = tl.minimum(feature + WIDTH // 2, PADDED - 1)
        index = tl.zeros([BLOCK, PADDED], tl.int32) + partner[None, :]
        packed = (codes | (tl.gather(codes, index, 1) << 4)).to(tl.uint8)
        mask = new[:, None] & (feature[None, :] < WIDTH // 2)
        tl.store(at + rows[:, None] + feature[None, :], packed, mask=mask)


@triton.jit(do_not_specialize=["groups_per_sequence"])
def _write(
    cache,
    records,
    block_table,
    seq_lens,
    cu_seqlens_new,
    amax,
    cache_page_stride,
    cache_token_stride,
    record_page_stride,
    record_token_stride,
    table_stride,
    groups_per_sequence,
    PAGE_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    K_FORMAT: tl.constexpr,
    K_ROPE_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    K_CODES: tl.constexpr,
    K_ROPE_CODES: tl.constexpr,
    K_SCALES: tl.constexpr,
    K_ROPE_SCALES: tl.constexpr,
    V_CODES: tl.constexpr,
    V_SCALES: tl.constexpr,
):
    """One group of 16 token positions of one sequence."""
    program = tl.program_id(0)
    sequence = program // groups_per_sequence
    length = tl.load(seq_lens + sequence)
    if cu_seqlens_new is None:
        count = 1
    else:
        begin = tl.load(cu_seqlens_new + sequence)
        count = tl.load(cu_seqlens_new + sequence + 1) - begin
    first = tl.maximum(length - count, 0)
    group = first // BLOCK + program % groups_per_sequence
    if (group * BLOCK < length) & (first < length):
        start = group * BLOCK
        tokens = tl.arange(0, BLOCK)
        positions = start + tokens
        present = positions < length
        new = present & (positions >= first)
        table = block_table + sequence.to(tl.int64) * table_stride
        rows = token_rows(
            table,
            start,
            tokens,
            present,
            cache_page_stride,
            cache_token_stride,
            BLOCK,
            PAGE_SIZE,
            True,
        )
        record_rows = token_rows(
            table,
            start,
            tokens,
            present,
            record_page_stride,
            record_token_stride,
            BLOCK,
            PAGE_SIZE,
            True,
        )
        if K_FORMAT != FORMAT_NONE:
            _store_k_part(
                cache,
                records,
                rows,
                record_rows,
                present,
                new,
                global_scale(tl.load(amax + 2), K_FORMAT),
                LATENT,
                LATENT,
                K_FORMAT,
                K_CODES,
                K_SCALES,
            )
        if ROPE > 0 and K_ROPE_FORMAT != FORMAT_NONE:
            _store_k_part(
                cache + LATENT,
                records,
                rows,
                record_rows,
                present,
                new,
                global_scale(tl.load(amax + 3), K_ROPE_FORMAT),
                ROPE,
                ROPE_PADDED,
                K_ROPE_FORMAT,
                K_ROPE_CODES,
                K_ROPE_SCALES,
            )
        if V_FORMAT != FORMAT_NONE:
            g = global_scale(tl.load(amax + 4), V_FORMAT)
            feature = tl.arange(0, LATENT)
            if V_FORMAT == FORMAT_FP8:
                at = cache + rows[:, None] + feature[None, :]
                x = tl.load(at, mask=present[:, None], other=0.0).to(tl.float32)
                codes = encode_e4m3(quantize_fp8(x, g)).to(tl.uint8)
                out = records + V_CODES + record_rows[:, None] + feature[None, :]
                tl.store(out, codes, mask=new[:, None])
            elif group * BLOCK + BLOCK <= length:
                at = cache + rows[:, None] + feature[None, :]
                codes, scales = _encode_nvfp4(tl.load(at).to(tl.float32), g, 0)
                PAIRS: tl.constexpr = BLOCK // 2
                SHARE: tl.constexpr = LATENT // BLOCK
                # Neighbouring tokens share a byte; then features first, tokens second.
                even, odd = tl.split(tl.permute(tl.reshape(codes, [PAIRS, 2, LATENT]), [2, 0, 1]))
                packed = tl.reshape((even | (odd << 4)).to(tl.uint8), [BLOCK, SHARE * PAIRS])
                out = records + V_CODES + record_rows[:, None]
                tl.store(out + tl.arange(0, SHARE * PAIRS)[None, :], packed)
                out = records + V_SCALES + record_rows[:, None]
                scales = tl.reshape(scales.to(tl.uint8), [BLOCK, SHARE])
                tl.store(out + tl.arange(0, SHARE)[None, :], scales)


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
    _write[(batch * groups,)](
        cache,
        records,
        block_table,
        seq_lens,
        cu_seqlens_new,
        amax,
        cache.stride(0),
        cache.stride(1),
        records.stride(0),
        records.stride(1),
        block_table.stride(0),
        groups,
        PAGE_SIZE=cache.shape[1],
        LATENT=layout.latent_width,
        ROPE=layout.rope_width,
        ROPE_PADDED=triton.next_power_of_2(max(layout.rope_width, block_size)),
        K_FORMAT=FORMAT_CODES[layout.k_format],
        K_ROPE_FORMAT=FORMAT_CODES[layout.rope_format],
        V_FORMAT=FORMAT_CODES[layout.v_format],
        **layout.kernel_constants(),
        num_warps=4,
    )


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
    for name, tensor, dims in (("block_table", block_table, 2), ("seq_lens", seq_lens, 1)):
        if tensor.dtype != torch.int32 or tensor.dim() != dims or tensor.device != cache.device:
            raise ConfigError(
                f"{name} must be int32 with {dims} dimension(s) on {cache.device}; got "
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
