"""KV-cache records, byte by byte: one function for each format, its offsets typed by hand.

Written from the tables of kv_records.md and rulings 3 and 8-11. A record is built with `struct`
and slices in a bytearray, one token at a time. What the definition rounds to float32 is one numpy
float32 operation; element and scale codes come from the tables in `codes`.

NaN leaves a group's maximum; the group's scale code becomes NaN, 4-bit codes of the group 0,
8-bit codes of the group NaN.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .codes import (
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    encode_e2m1,
    encode_e4m3,
    encode_ue8m0,
)

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
f32 = np.float32

# name: (latent values, rope values, bytes of a token)
WIDTHS = {
    "fp8_ds_mla_656": (512, 64, 656),
    "nvfp4_fp8rope_352": (512, 64, 352),
    "nvfp4_ds_mla_432": (512, 64, 432),
    "nvfp4_ds_mla_368": (512, 64, 368),
    "nvfp4_outer_304": (512, 0, 304),
    "dsv4_fp8_584": (448, 64, 584),
    "dsv4_nvfp4_384": (448, 64, 384),
    "dsv41_fp8_528": (512, 0, 528),
    "dsv41_fp4_288": (512, 0, 288),
}
# name: (bytes of a token's row, bytes of its footer, what a page's size is a multiple of)
FOOTERS = {"dsv4_fp8_584": (576, 8, 576), "dsv4_nvfp4_384": (352, 32, 16)}


def largest(x: F32) -> np.float32:
    kept = np.abs(x[~np.isnan(x)])
    return f32(kept.max()) if kept.size else f32(0)


def power_of_two_above(t: np.float32) -> float:
    mantissa, exponent = math.frexp(float(t))
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


def nibbles(codes: U8) -> bytes:
    return bytes(
        int(low) + 16 * int(high) for low, high in zip(codes[::2], codes[1::2], strict=True)
    )


def fp8(block: F32, divisor: np.float32) -> U8:
    if np.isnan(block).any():
        return np.full(block.shape, 0x7F, dtype=np.uint8)
    if divisor == 0:
        return np.zeros(block.shape, dtype=np.uint8)
    return encode_e4m3(np.divide(block, divisor, dtype=np.float32))


ScaleRule = Callable[[F32], U8]
"""Scale codes of the exact scales."""


def nearest(t: F32) -> U8:
    return encode_e4m3(t)


def nearest_with_floor(t: F32) -> U8:
    return encode_e4m3(np.clip(t, f32(2.0**-9), f32(448)))


def not_below(t: F32) -> U8:
    wanted = np.clip(t, f32(2.0**-9), f32(448))
    code = encode_e4m3(wanted)
    code[(decode_e4m3(code) < wanted) & (code < 0x7E)] += 1
    return code


def fp4_latent(
    x: F32, rule: ScaleRule, outer: np.float32, by_token: bool = False
) -> tuple[bytes, U8]:
    """Codes, and the scale code of each 16 values, in their order."""
    blocks = x.reshape(-1, 16)
    amax = np.array([largest(block) for block in blocks], dtype=np.float32)
    if by_token:
        t = (amax / outer) / f32(6) if outer else np.zeros_like(amax)
    else:
        t = amax / f32(f32(6) * outer)
    scales = rule(t)
    divisor = (decode_e4m3(scales).astype(np.float32) * outer)[:, None]
    empty = (divisor == 0) | np.isnan(blocks).any(axis=1)[:, None]
    quotient = np.where(empty, f32(0), blocks / np.where(divisor == 0, f32(1), divisor))
    scales[np.isnan(blocks).any(axis=1)] = 0x7F
    return nibbles(encode_e2m1(quotient.ravel())), scales


def pack(
    name: str, x: F32, rope_bits: U16, rope: F32, outer: float = 1.0, rounded: bool = True
) -> bytes:
    """One record.

    `x` holds the latent, `rope_bits` the rope part as it is stored in 16 bits, `rope` its values;
    `rounded=False` is what vLLM 0.26 writes as scales of 656 bytes.
    """
    latent, rope_width, size = WIDTHS[name]
    assert x.shape == (latent,) and rope.shape == rope_bits.shape == (rope_width,)
    record = bytearray(size)
    g = f32(outer)
    with np.errstate(all="ignore"):
        if name == "fp8_ds_mla_656":
            for i in range(4):
                tile = x[128 * i : 128 * i + 128]
                t = f32(largest(tile) / f32(448))
                scale = (
                    f32(power_of_two_above(max(t, f32(1e-4))))
                    if rounded
                    else max(t, f32(2.0**-126))
                )
                record[128 * i : 128 * i + 128] = fp8(tile, scale).tobytes()
                stored = math.nan if np.isnan(tile).any() else float(scale)
                record[512 + 4 * i : 516 + 4 * i] = struct.pack("<f", stored)
            record[528:656] = rope_bits.astype("<u2").tobytes()
        elif name == "nvfp4_fp8rope_352":
            record[0:256], scales = fp4_latent(x, not_below, g)
            record[256:320] = encode_e4m3(rope).tobytes()
            for s, code in enumerate(scales):
                record[320 + 8 * (s % 4) + s // 4] = code
        elif name == "nvfp4_ds_mla_432":
            record[0:256], scales = fp4_latent(x, nearest, g)
            record[256:288] = scales.tobytes()
            record[304:432] = rope_bits.astype("<u2").tobytes()
        elif name == "nvfp4_ds_mla_368":
            record[0:256], scales = fp4_latent(x, nearest, g)
            record[256:288] = scales.tobytes()
            scale = f32(largest(rope) * f32(1 / f32(448)))
            stored = math.nan if np.isnan(rope).any() else float(scale)
            record[288:292] = struct.pack("<f", stored)
            record[304:368] = fp8(rope, scale).tobytes()
        elif name == "nvfp4_outer_304":
            token = f32(largest(x) * f32(1 / f32(2688)))
            record[0:256], scales = fp4_latent(x, nearest, token, by_token=True)
            record[256:288] = scales.tobytes()
            record[292:296] = struct.pack("<f", float(token))
        elif name == "dsv4_fp8_584":
            for i in range(7):
                record[64 * i : 64 * i + 64], record[576 + i] = mx(x[64 * i : 64 * i + 64])
            record[448:576] = rope_bits.astype("<u2").tobytes()
        elif name == "dsv4_nvfp4_384":
            record[0:224], scales = fp4_latent(x, nearest, g)
            record[224:352] = rope_bits.astype("<u2").tobytes()
            record[352:380] = scales.tobytes()
        elif name == "dsv41_fp8_528":
            for i in range(16):
                record[32 * i : 32 * i + 32], record[512 + i] = mx(x[32 * i : 32 * i + 32])
        elif name == "dsv41_fp4_288":
            record[0:256], scales = fp4_latent(x, nearest_with_floor, g)
            record[256:288] = scales.tobytes()
        else:
            raise ValueError(name)
    assert len(record) == size
    return bytes(record)


def mx(block: F32) -> tuple[bytes, int]:
    """8-bit codes of a block, and its power-of-two scale code."""
    scale = power_of_two_above(max(f32(largest(block) / f32(448)), f32(1e-4)))
    code = 0xFF if np.isnan(block).any() else int(encode_ue8m0(scale))
    return fp8(block, f32(scale)).tobytes(), code


def unpack(name: str, record: bytes, outer: float = 1.0) -> F32:
    """Latent values of a record, then those of a rope part in 8 bits. 16-bit ones are left out."""
    raw = np.frombuffer(record, dtype=np.uint8)

    def fp4_values(end: int, scales: U8, token: np.float32 | None = None) -> F32:
        codes = np.stack((raw[:end] & 15, raw[:end] >> 4), axis=1).ravel()
        scale = np.repeat(decode_e4m3(scales).astype(np.float32), 16)
        if token is not None:
            return decode_e2m1(codes).astype(np.float32) * (scale * token)
        return (decode_e2m1(codes).astype(np.float32) * scale) * f32(outer)

    def fp8_values(start: int, end: int) -> F32:
        return decode_e4m3(raw[start:end]).astype(np.float32)

    with np.errstate(all="ignore"):
        if name == "fp8_ds_mla_656":
            scales = np.array(struct.unpack("<4f", record[512:528]), dtype=np.float32)
            return fp8_values(0, 512) * np.repeat(scales, 128)
        if name == "nvfp4_fp8rope_352":
            ordered = raw[[320 + 8 * (s % 4) + s // 4 for s in range(32)]]
            return np.concatenate((fp4_values(256, ordered), fp8_values(256, 320)))
        if name == "nvfp4_ds_mla_432":
            return fp4_values(256, raw[256:288])
        if name == "nvfp4_ds_mla_368":
            (scale,) = struct.unpack("<f", record[288:292])
            return np.concatenate(
                (fp4_values(256, raw[256:288]), fp8_values(304, 368) * f32(scale))
            )
        if name == "nvfp4_outer_304":
            (token,) = struct.unpack("<f", record[292:296])
            return fp4_values(256, raw[256:288], f32(token))
        if name == "dsv4_fp8_584":
            scales = decode_ue8m0(raw[576:583]).astype(np.float32)
            return fp8_values(0, 448) * np.repeat(scales, 64)
        if name == "dsv4_nvfp4_384":
            return fp4_values(224, raw[352:380])
        if name == "dsv41_fp8_528":
            return fp8_values(0, 512) * np.repeat(decode_ue8m0(raw[512:528]).astype(np.float32), 32)
        if name == "dsv41_fp4_288":
            return fp4_values(256, raw[256:288])
    raise ValueError(name)


def store(name: str, cache: U8, page_size: int, records: list[bytes], slots: list[int]) -> None:
    """Write records into pages [pages, page bytes]; the lowest row of a slot is written last."""
    size = WIDTHS[name][2]
    row, footer, _ = FOOTERS.get(name, (size, 0, 1))
    for record, slot in zip(reversed(records), reversed(slots), strict=True):
        if not 0 <= slot < len(cache) * page_size:
            continue
        page, place = divmod(slot, page_size)
        values = np.frombuffer(record, dtype=np.uint8)
        cache[page, place * row : place * row + row] = values[:row]
        start = page_size * row + place * footer
        cache[page, start : start + footer] = values[row:]


def page_bytes(name: str, page_size: int) -> int:
    size = WIDTHS[name][2]
    multiple = FOOTERS.get(name, (0, 0, 1))[2]
    return math.ceil(page_size * size / multiple) * multiple
