"""KV-cache records against golden bytes and against an oracle that writes each format by hand.

Contract: packing gives the golden bytes and the oracle's, byte for byte; unpacking gives the
golden values and the oracle's, bit for bit, whatever scales a record holds. Bytes of a cache that
no stored record covers stay as they are.

`tests/data/kv_records.npz` holds for each format bfloat16 rows, their slots (one of them negative),
the cache after storing them (preset to 0xA5, pages of 64 tokens) and the values that it reads as.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_quant import formats, reference
from mla_quant.errors import RecordError
from mla_quant.records import (
    RECORDS,
    UNROUNDED,
    BlockScale,
    RecordCache,
    RecordFormat,
    ScaleWriter,
    Segment,
    outer_scale,
    pack,
    pack_into,
    record_format,
    unpack,
    unpack_from,
)
from tests.oracles import codes
from tests.oracles import records as oracle

GOLDEN = Path(__file__).parents[1] / "data" / "kv_records.npz"
NAMES = list(oracle.WIDTHS)
PER_LAYER = [name for name in NAMES if RECORDS[name].outer_scale == "per layer"]
WITH_ROPE = [name for name in NAMES if RECORDS[name].rope is not None]
FP4_NO_FLOOR = ["nvfp4_ds_mla_432", "nvfp4_ds_mla_368", "dsv4_nvfp4_384"]
NAN, INF = float("nan"), float("inf")
PRESET = 0xA5

every_format = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def golden() -> Any:
    with np.load(GOLDEN) as file:
        return dict(file)


def bf16(patterns: np.ndarray) -> Tensor:
    return torch.from_numpy(patterns.view(np.int16).copy()).view(torch.bfloat16)


def bits16(x: Tensor) -> np.ndarray:
    return x.view(torch.int16).numpy().view(np.uint16)


def random_rows(name: str, tokens: int, sigma: float = 1.0) -> tuple[Tensor, Tensor]:
    """bfloat16 latents, some of them outliers, and rope parts beyond E4M3 now and then."""
    fmt = RECORDS[name]
    x = torch.randn(tokens, fmt.width) * sigma
    x = torch.where(torch.rand_like(x) < 0.01, x * 300, x).bfloat16()
    return x[:, : fmt.latent.width], x[:, fmt.latent.width :]


def same_values(got: Tensor, want: np.ndarray) -> None:
    a, b = got.numpy(), np.asarray(want, dtype=np.float32)
    assert got.dtype == torch.float32 and a.shape == b.shape
    same = (a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))
    if not same.all():
        i = tuple(int(j) for j in np.argwhere(~same)[0])
        pytest.fail(
            f"{int((~same).sum())} of {same.size} differ; first {i}: {a[i]!r}, not {b[i]!r}"
        )


def same_bytes(fmt: RecordFormat, got: Tensor, want: list[bytes]) -> None:
    """Equal records; the message names the field, the byte and both values."""
    expected = torch.tensor([list(record) for record in want], dtype=torch.uint8).view(got.shape)
    different = (got != expected).nonzero()
    if len(different):
        row, byte = (int(i) for i in different[0])
        fields = [field.name for field in fmt.fields if field.offset <= byte < field.end]
        pytest.fail(
            f"{len(different)} bytes of {fmt.name} differ; first in row {row}, byte {byte} "
            f"({fields or 'padding'}): {int(got[row, byte]):#x}, not {int(expected[row, byte]):#x}"
        )


def check(
    name: str, latent: Tensor, rope: Tensor, *, fmt: RecordFormat | None = None,
    nan: Any = "refuse", **oracle_options: Any,
) -> Tensor:  # fmt: skip
    """Pack and unpack rows and compare both with the oracle; returns the records."""
    fmt = fmt or RECORDS[name]
    options = {"outer_scale": oracle_options["outer"]} if "outer" in oracle_options else {}
    got = pack(latent, rope, fmt, nan=nan, **options)
    stored = bits16(rope if rope.dtype == torch.bfloat16 else rope.bfloat16())
    want = [
        oracle.pack(name, x, b, r, **oracle_options)
        for x, b, r in zip(latent.float().numpy(), stored, rope.float().numpy(), strict=True)
    ]
    same_bytes(fmt, got, want)
    check_unpack(name, got, **{k: v for k, v in oracle_options.items() if k == "outer"})
    return got


def check_unpack(name: str, records: Tensor, outer: float = 1.0) -> None:
    latent, rope = unpack(records, RECORDS[name], outer_scale=outer)
    want = np.stack([oracle.unpack(name, row.tobytes(), outer) for row in records.numpy()])
    got = torch.cat((latent, rope), dim=1)[:, : want.shape[1]]
    same_values(got, want)


# --- golden bytes


def test_every_format_has_golden_bytes(golden: Any) -> None:
    assert {key.split(".")[0] for key in golden} == set(RECORDS) == set(NAMES)


@every_format
@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32])
def test_golden_cache(golden: Any, name: str, slot_dtype: torch.dtype) -> None:
    fmt, want = RECORDS[name], torch.from_numpy(golden[f"{name}.cache"])
    x = bf16(golden[f"{name}.input_bf16"])
    slots = torch.from_numpy(golden[f"{name}.slots"])
    assert (slots < 0).sum() == 1
    cache = RecordCache(torch.full_like(want, PRESET), fmt, 64)
    pack_into(cache, x[:, : fmt.latent.width], x[:, fmt.latent.width :], slots.to(slot_dtype))
    assert torch.equal(cache.data, want)
    latent, rope = unpack_from(cache, slots[slots >= 0].to(slot_dtype))
    same_values(torch.cat((latent, rope), dim=1), golden[f"{name}.dequantized"])


@every_format
def test_oracle_gives_golden_bytes(golden: Any, name: str) -> None:
    """The oracle is checked by the same bytes, so that it may stand for them elsewhere."""
    patterns = golden[f"{name}.input_bf16"]
    width = oracle.WIDTHS[name][0]
    x = bf16(patterns).float().numpy()
    made = [
        oracle.pack(name, row[:width], raw[width:], row[width:])
        for row, raw in zip(x, patterns, strict=True)
    ]
    want = golden[f"{name}.cache"]
    cache = np.full_like(want, PRESET)
    oracle.store(name, cache, 64, made, golden[f"{name}.slots"].tolist())
    assert np.array_equal(cache, want)
    valid = golden[f"{name}.slots"] >= 0
    got = np.stack([oracle.unpack(name, r) for r, v in zip(made, valid, strict=True) if v])
    assert np.array_equal(got, golden[f"{name}.dequantized"][:, : got.shape[1]])


# --- against the oracle


@every_format
def test_every_bfloat16_value(name: str) -> None:
    """All finite values in order, so that groups are of one magnitude, and shuffled."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    finite = patterns[(patterns & 0x7F80) != 0x7F80]
    # Products of the largest values with scales overflow; what saturates has a test of its own.
    finite = finite[np.abs(bf16(finite).float().numpy()) < 2.0**120]
    fmt = RECORDS[name]
    shuffled = np.random.default_rng(0).permutation(finite)[: 32 * fmt.width]
    for order in (finite, shuffled):
        rows = bf16(np.resize(order, (-(-len(order) // fmt.width), fmt.width)))
        check(name, rows[:, : fmt.latent.width], rows[:, fmt.latent.width :])


@every_format
@given(
    seed=st.integers(0, 2**32 - 1),
    exponents=st.tuples(st.integers(-40, 20), st.integers(-12, 8)),
    outer=st.floats(2.0**-30, 2.0**20, width=32),
)
@settings(max_examples=16, deadline=None)
def test_random_float32(name: str, seed: int, exponents: tuple[int, int], outer: float) -> None:
    """Magnitudes differ from block to block; with an outer scale where the format takes one."""
    generator = torch.Generator().manual_seed(seed)
    fmt = RECORDS[name]
    x = torch.randn(3, fmt.width, generator=generator)
    block = torch.randint(-8, 8, (3, fmt.width // 16), generator=generator)
    x = x * torch.exp2(block.float()).repeat_interleave(16, dim=1)
    latent = x[:, : fmt.latent.width] * 2.0 ** exponents[0]
    rope = x[:, fmt.latent.width :] * 2.0 ** exponents[1]
    check(name, latent, rope)
    if fmt.outer_scale == "per layer":
        check(name, latent, rope, outer=outer)


@every_format
def test_any_record_is_read(name: str) -> None:
    """Readers have no policy: any scale, also negative, NaN or infinite ones, is taken."""
    fmt = RECORDS[name]
    check_unpack(name, torch.randint(0, 256, (64, fmt.record_bytes), dtype=torch.uint8))


def test_scales_of_vllm_026() -> None:
    """656 bytes with scales max(amax / 448, smallest normal), not rounded."""
    name = "fp8_ds_mla_656"
    fmt = RECORDS[name].with_writer(UNROUNDED)
    assert fmt.name == name
    latent, rope = random_rows(name, 16)
    latent[0] = 0
    latent[1] *= 1e-6
    records = check(name, latent, rope, fmt=fmt, rounded=False)
    assert not torch.equal(records, pack(latent, rope, RECORDS[name]))
    assert records[0, 512:516].tolist() == list(struct.pack("<f", 2.0**-126))


@pytest.mark.parametrize("name", ["nvfp4_ds_mla_432", "dsv4_nvfp4_384", "nvfp4_ds_mla_368"])
@pytest.mark.parametrize("sigma", [1.0, 0.01, 0.001, 1e-6])
def test_equals_fake_quantization(name: str, sigma: float) -> None:
    """With a calibrated outer scale the latent part of a record is NVFP4 as numerics define it."""
    fmt = RECORDS[name]
    latent, rope = random_rows(name, 8, sigma)
    amax = latent.abs().max().item()
    outer = outer_scale(amax, fmt)
    got, _ = unpack(pack(latent, rope, fmt, outer_scale=outer), fmt, outer_scale=outer)
    want = reference.quantize_dequantize(latent, formats.NVFP4, amax)
    # A block whose scale is 0 stores +0, fake quantization leaves the sign.
    same_values(got + 0.0, (want + 0.0).numpy())


# --- single values


@every_format
def test_zeros(name: str) -> None:
    """A token of zeros reads as zeros; scales are those of the format's floor."""
    fmt = RECORDS[name]
    latent, rope = torch.zeros(2, fmt.latent.width), torch.zeros(2, fmt.rope_width)
    latent[1] = -0.0
    records = check(name, latent, rope)
    scales = {tuple(records[0, f.offset : f.end].tolist()) for f in fmt.fields if "scale" in f.name}
    floor = {
        "fp8_ds_mla_656": tuple(struct.pack("<f", 2.0**-13)) * 4,
        "nvfp4_fp8rope_352": (0x01,) * 32,
        "dsv4_fp8_584": (127 - 13,) * 7,
        "dsv41_fp8_528": (127 - 13,) * 16,
        "dsv41_fp4_288": (0x01,) * 32,
    }.get(name)
    assert scales == {floor} if floor else all(not any(scale) for scale in scales)
    for part in unpack(records, fmt):
        assert (part == 0).all()


@every_format
def test_block_of_zeros_beside_others(name: str) -> None:
    latent, rope = random_rows(name, 2)
    latent[:, 64:192] = 0
    check(name, latent, rope)


@pytest.mark.parametrize("name", FP4_NO_FLOOR)
@pytest.mark.parametrize(("exponent", "scale"), [(-10, 0), (-9, 1), (-11, 0)])
def test_tiny_block(name: str, exponent: int, scale: int) -> None:
    """amax / 6 at half the smallest E4M3 scale is a tie that goes to 0: the block vanishes."""
    fmt = RECORDS[name]
    latent = torch.full((1, fmt.latent.width), -6 * 2.0**exponent)
    records = check(name, latent, torch.zeros(1, fmt.rope_width))
    stored = records[0, fmt.field("latent_scale").offset]
    assert stored == scale
    # Element codes of a scale of 0 are 0, without a sign.
    assert records[0, 0] == (0xFF if scale else 0)


def test_round_up_of_the_scale() -> None:
    """352 bytes: a scale that came out below amax / 6 goes one code up, but never beyond 0x7E."""
    fmt = RECORDS["nvfp4_fp8rope_352"]
    step = 2.0**-3
    latent = torch.zeros(1, 512)
    for block, t in enumerate([1.0, 1 + step / 4, 1 + step / 2, 1 + 3 * step / 4, 448.0, 1e6]):
        latent[0, 16 * block] = 6 * t
    records = check(fmt.name, latent, torch.zeros(1, 64))
    one = 7 << 3
    # Scales 0 to 5 lie at bytes 0, 8, 16, 24, 1, 9 of 32.
    stored = records[0, [320, 328, 336, 344, 321, 329]]
    assert stored.tolist() == [one, one + 1, one + 1, one + 1, 0x7E, 0x7E]


@pytest.mark.parametrize("name", FP4_NO_FLOOR)
def test_ties(name: str) -> None:
    """Halves between codes go to the even code, in scales and in elements."""
    fmt = RECORDS[name]
    grid = codes.E4M3_MAGNITUDES[8:].astype(np.float32)
    middles = torch.from_numpy((grid[:-1] + grid[1:]) / 2)
    blocks = fmt.latent.width // 16
    latent = torch.zeros(-(-len(middles) // blocks), fmt.latent.width)
    latent.view(-1, 16)[: len(middles), 3] = 6 * middles
    records = check(name, latent, torch.zeros(len(latent), fmt.rope_width))
    field = fmt.field("latent_scale")
    stored = records[:, field.offset : field.end].flatten()[: len(middles)]
    below = torch.arange(8, 8 + len(middles))
    assert torch.equal(stored.long(), below + below % 2)

    elements = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    latent = torch.zeros(1, fmt.latent.width)
    latent[0, :8], latent[0, 8:16] = elements, -elements
    records = check(name, latent, torch.zeros(1, fmt.rope_width))
    low_then_high = [c for byte in records[0, :8].tolist() for c in (byte & 15, byte >> 4)]
    assert low_then_high == [7, 0, 2, 2, 4, 4, 6, 6, 15, 8, 10, 10, 12, 12, 14, 14]


@every_format
def test_nan_is_refused(name: str) -> None:
    fmt = RECORDS[name]
    latent, rope = random_rows(name, 4)
    latent[2, 5] = NAN
    with pytest.raises(RecordError, match=r"1 of \d+ values of the latent.* row 2, column 5"):
        pack(latent, rope, fmt)
    if fmt.rope_width:
        rope[3, 1], latent[2, 5] = NAN, 0.0
        with pytest.raises(RecordError, match="of the rope are NaN, the first at row 3, column 1"):
            pack(latent, rope, fmt)


@every_format
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_poisons_its_group_and_no_other(name: str, sign: float) -> None:
    fmt = RECORDS[name]
    latent, rope = random_rows(name, 3)
    # Conversions and products drop the sign of NaN: 0x7FC0 and 0xFFC0.
    nan = bf16(np.array([0x7FC0 if sign > 0 else 0xFFC0], dtype=np.uint16))
    clean = torch.cat(unpack(pack(latent, rope, fmt), fmt), dim=1)
    latent[1, 40:41] = nan
    if fmt.rope_width:
        rope[2, 7:8] = nan
    records = check(name, latent, rope, nan="poison")
    values = torch.cat(unpack(records, fmt), dim=1)
    assert fmt.latent.scale is not None
    block = fmt.latent.scale.block
    poisoned = torch.zeros_like(values, dtype=torch.bool)
    poisoned[1, 40 // block * block : (40 // block + 1) * block] = True
    if fmt.rope_width:
        assert fmt.rope is not None
        group = fmt.rope.scale.block if fmt.rope.scale else 1
        start = fmt.latent.width + 7 // group * group
        poisoned[2, start : start + group] = True
    assert torch.equal(values.isnan(), poisoned)
    if fmt.outer_scale != "per token":  # there the others share the token's amax, here unchanged
        assert torch.equal(values[~poisoned], clean[~poisoned])


@every_format
@pytest.mark.parametrize("value", [INF, -INF, 3.3e38, -3.3e38])
def test_infinity_saturates(name: str, value: float) -> None:
    """The largest code with a scale whose product is finite; other groups are as without it."""
    fmt = RECORDS[name]
    latent, rope = (x.float() for x in random_rows(name, 2))
    clean, clean_rope = unpack(pack(latent, rope, fmt), fmt)
    latent[1, 3] = value
    records = pack(latent, rope, fmt)
    got, got_rope = unpack(records, fmt)
    assert got.isfinite().all()
    assert torch.equal(got_rope, clean_rope)
    assert fmt.latent.scale is not None
    if fmt.outer_scale != "per token":
        assert torch.equal(got[:, fmt.latent.scale.block :], clean[:, fmt.latent.scale.block :])
    largest = 2688.0 if fmt.outer_scale == "per layer" else 2.0**127
    assert got[1, 3] * math.copysign(1, value) >= largest
    if fmt.latent.scale.format == formats.UE8M0:
        assert records[1, fmt.latent.scale.offset] == 127 + 119
        assert records[1, 3] == (0x7E if value > 0 else 0xFE)


@pytest.mark.parametrize("name", WITH_ROPE)
def test_rope_beyond_e4m3(name: str) -> None:
    """16-bit rope parts keep their bits, infinities too; E4M3 without a scale saturates."""
    fmt = RECORDS[name]
    latent = torch.zeros(1, fmt.latent.width, dtype=torch.bfloat16)
    rope = torch.zeros(1, fmt.rope_width, dtype=torch.bfloat16)
    values = [449.0, -1e4, INF, -INF, 448.0, -0.0]
    rope[0, : len(values)] = torch.tensor(values)
    _, got = unpack(pack(latent, rope, fmt), fmt)
    assert fmt.rope is not None
    if fmt.rope.element is None:
        same_values(got, rope.float().numpy())
    elif fmt.rope.scale is None:
        assert got[0, :5].tolist() == [448.0, -448.0, 448.0, -448.0, 448.0]
    else:
        assert got.isfinite().all() and got[0, 2] > 2.0**126 and got[0, 3] == -got[0, 2]


# --- dtypes of the rope part


@pytest.mark.parametrize("name", ["fp8_ds_mla_656", "nvfp4_ds_mla_432"])
def test_float16_rope_is_verbatim(name: str) -> None:
    fmt = RECORDS[name]
    patterns = torch.arange(64, dtype=torch.int16) * 997
    rope = patterns.view(torch.float16)[None]
    latent = torch.randn(1, 512, dtype=torch.float16)
    records = pack(latent, rope, fmt, rope_dtype=torch.float16, nan="poison")
    field = fmt.field("rope")
    stored = records[0, field.offset : field.end].clone().view(torch.int16)
    assert torch.equal(stored, patterns)
    _, got = unpack(records, fmt, rope_dtype=torch.float16)
    same_values(got, rope.float().numpy())
    with pytest.raises(RecordError, match=r"rope_dtype=torch\.float16"):
        pack(latent, rope, fmt)
    # float32 is rounded and saturates.
    wide = torch.full((1, 64), 1e6)
    _, got = unpack(
        pack(latent, wide, fmt, rope_dtype=torch.float16), fmt, rope_dtype=torch.float16
    )
    assert (got == 65504).all()


def test_rope_dtype_of_the_format() -> None:
    latent, rope = torch.zeros(1, 448), torch.zeros(1, 64, dtype=torch.float16)
    with pytest.raises(RecordError, match="stores the rope part as bfloat16"):
        pack(latent, rope, RECORDS["dsv4_fp8_584"], rope_dtype=torch.float16)


# --- outer scale


@pytest.mark.parametrize("name", PER_LAYER)
@pytest.mark.parametrize("sigma", [1.0, 0.01, 0.001])
def test_outer_scale_restores_small_latents(name: str, sigma: float) -> None:
    """Relative error stays that of NVFP4; without an outer scale it grows to 1 at sigma 0.001.

    Measured: 0.095 for scales rounded to nearest, 0.101 for those that are rounded up.
    """
    fmt = RECORDS[name]
    latent = torch.randn(64, fmt.latent.width) * sigma
    rope = torch.zeros(64, fmt.rope_width)

    def error(scale: float) -> float:
        got, _ = unpack(pack(latent, rope, fmt, outer_scale=scale), fmt, outer_scale=scale)
        return float((got - latent).norm() / latent.norm())

    assert error(outer_scale(latent.abs().max().item(), fmt)) < 0.105
    if sigma == 0.001:
        assert fmt.latent.scale is not None
        if fmt.latent.scale.writer.floor:
            assert 0.25 < error(1.0) < 0.31
        else:
            assert error(1.0) > 0.9


@pytest.mark.parametrize("sigma", [1.0, 0.01, 0.001])
def test_outer_scale_of_the_token(sigma: float) -> None:
    fmt = RECORDS["nvfp4_outer_304"]
    latent = torch.randn(64, 512) * sigma
    got, _ = unpack(pack(latent, None, fmt), fmt)
    assert (got - latent).norm() / latent.norm() < 0.1


@pytest.mark.parametrize("name", PER_LAYER)
def test_outer_scale_leaves_the_rope_part(name: str) -> None:
    """A scale of the latent only: the rope part's bytes are the same with and without."""
    fmt = RECORDS[name]
    latent, rope = random_rows(name, 4, 0.01)
    plain, scaled = pack(latent, rope, fmt), pack(latent, rope, fmt, outer_scale=2.0**-8)
    for field in fmt.fields:
        same = torch.equal(plain[:, field.offset : field.end], scaled[:, field.offset : field.end])
        assert same == field.name.startswith("rope"), field


def test_outer_scale_from_amax() -> None:
    fmt = RECORDS["nvfp4_ds_mla_432"]
    assert outer_scale(2688.0, fmt) == 1.0
    assert outer_scale(0.1, fmt) == float(np.float32(0.1) / np.float32(2688))
    assert outer_scale(0.0, fmt) == 2.0**-126
    for amax in (-1.0, NAN, INF):
        with pytest.raises(RecordError, match="finite number, 0 or more"):
            outer_scale(amax, fmt)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(PER_LAYER)))
def test_outer_scale_where_there_is_none(name: str) -> None:
    fmt = RECORDS[name]
    latent, rope = random_rows(name, 1)
    with pytest.raises(RecordError, match=f"{name} takes no outer scale"):
        outer_scale(1.0, fmt)
    with pytest.raises(RecordError, match=f"{name} takes no outer scale"):
        pack(latent, rope, fmt, outer_scale=0.5)
    with pytest.raises(RecordError, match=f"{name} takes no outer scale"):
        RecordCache.allocate(fmt, 1, outer_scale=0.5)


@pytest.mark.parametrize("value", [0.0, -1.0, NAN, INF, 1e-40, 1e39])
def test_bad_outer_scale(value: float) -> None:
    fmt = RECORDS["nvfp4_ds_mla_432"]
    with pytest.raises(RecordError, match="positive normal fp32 number"):
        unpack(torch.zeros(1, 432, dtype=torch.uint8), fmt, outer_scale=value)


# --- pages


@every_format
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_pages(name: str, page_size: int) -> None:
    """Duplicates: the first row wins. Slots out of range: nothing is touched."""
    fmt = RECORDS[name]
    page_bytes = oracle.page_bytes(name, page_size)
    assert fmt.page_bytes(page_size) == page_bytes
    pages = 4
    latent, rope = random_rows(name, 12)
    last = pages * page_size - 1
    slots = torch.tensor([last, 2, 0, 2, -1, last + 1, 2**33, last, 1, -(2**40), 0, 3])
    # The rows of a strided cache lie apart; what is between them stays.
    memory = torch.full((pages, page_bytes + 48), PRESET, dtype=torch.uint8)
    cache = RecordCache(memory[:, 16 : 16 + page_bytes], fmt, page_size)
    pack_into(cache, latent, rope, slots)

    want = np.full((pages, page_bytes + 48), PRESET, dtype=np.uint8)
    made = [
        oracle.pack(name, *parts)
        for parts in zip(
            latent.float().numpy(), bits16(rope), rope.float().numpy(), strict=True
        )
    ]  # fmt: skip
    oracle.store(name, want[:, 16 : 16 + page_bytes], page_size, made, slots.tolist())
    assert np.array_equal(memory.numpy(), want)

    direct = unpack(pack(latent, rope, fmt), fmt)
    stored = (slots >= 0) & (slots <= last)
    first = torch.tensor([slots.tolist().index(slot) for slot in slots.tolist()])
    for got, part in zip(unpack_from(cache, slots), direct, strict=True):
        assert torch.equal(got[~stored], torch.zeros_like(got[~stored]))
        assert torch.equal(got[stored], part[first][stored])


@every_format
def test_no_rows(name: str) -> None:
    fmt = RECORDS[name]
    latent, rope = random_rows(name, 0)
    assert pack(latent, rope, fmt).shape == (0, fmt.record_bytes)
    cache = RecordCache.allocate(fmt, 0)
    pack_into(cache, latent, rope, torch.zeros(0, dtype=torch.int32))
    assert unpack_from(cache, torch.tensor([0, -1]))[0].tolist() == [[0.0] * fmt.latent.width] * 2


def test_rows_that_are_skipped_may_hold_nan() -> None:
    """Padding rows of a batch hold anything; nothing is written if a row to store holds NaN."""
    fmt = RECORDS["nvfp4_ds_mla_432"]
    latent, rope = random_rows(fmt.name, 4)
    cache = RecordCache.allocate(fmt, 1, 8)
    latent[0] = NAN
    latent[3] = NAN
    pack_into(cache, latent[:3], rope[:3], torch.tensor([-1, 0, 1]))
    before = cache.data.clone()
    with pytest.raises(RecordError, match="row 3, column 0"):
        pack_into(cache, latent, rope, torch.tensor([-1, 5, 6, 2]))
    assert torch.equal(cache.data, before)
    pack_into(cache, latent, rope, torch.tensor([-1, 5, 6, 2]), nan="poison")
    assert unpack_from(cache, torch.tensor([2]))[0].isnan().all()


def test_rows_may_be_views() -> None:
    """Latent and rope part are slices of one tensor in most models, and may be transposed."""
    fmt = RECORDS["nvfp4_ds_mla_432"]
    x = torch.randn(576, 8).bfloat16().T
    want = pack(x[:, :512].contiguous(), x[:, 512:].contiguous(), fmt)
    assert torch.equal(pack(x[:, :512], x[:, 512:], fmt), want)
    assert torch.equal(unpack(want.T.contiguous().T, fmt)[1], x[:, 512:].float())


def test_capacity() -> None:
    assert RECORDS["dsv4_fp8_584"].page_bytes(64) == 37440
    assert RECORDS["dsv4_nvfp4_384"].page_bytes(1) == 384
    fmt = RECORDS["fp8_ds_mla_656"]
    assert fmt.tokens_in(656 * 64 * 10 + 655 * 64) == 640
    assert fmt.tokens_in(656 * 64 * 10, layers=3) == 192
    assert RecordCache.allocate(fmt, 3, 16).num_slots == 48
    for name in NAMES:
        size = RECORDS[name].page_bytes(64)
        assert size % oracle.FOOTERS.get(name, (0, 0, 1))[2] == 0


def test_readers_of_another_format_are_refused() -> None:
    cache = RecordCache.allocate(RECORDS["nvfp4_ds_mla_432"], 1)
    cache.require("nvfp4_ds_mla_432")
    with pytest.raises(RecordError, match=r"nvfp4_ds_mla_432 records.*not 'nvfp4_fp8rope_352'"):
        cache.require("nvfp4_fp8rope_352")


# --- errors


def test_names_of_others_are_refused_with_what_they_may_mean() -> None:
    assert record_format("nvfp4_outer_304") is RECORDS["nvfp4_outer_304"]
    with pytest.raises(RecordError) as error:
        record_format("nvfp4_ds_mla")
    meant = "nvfp4_fp8rope_352, nvfp4_ds_mla_432, nvfp4_ds_mla_368, nvfp4_outer_304"
    assert f"others call {meant} so" in str(error.value)
    with pytest.raises(RecordError, match="give one of fp8_ds_mla_656"):
        record_format("nvfp4")


F32 = torch.float32


@pytest.mark.parametrize(
    ("latent", "rope", "message"),
    [
        (torch.zeros(2, 511), torch.zeros(2, 64), r"latent of shape \[2, 512\].*\[2, 511\]"),
        (torch.zeros(2, 512), torch.zeros(2, 32), r"rope part of shape \[2, 64\].*\[2, 32\]"),
        (torch.zeros(2, 512), torch.zeros(3, 64), r"\[2, 64\].*found float32 \[3, 64\]"),
        (torch.zeros(2, 512), None, r"rope part of shape \[2, 64\].*\[2, 0\]"),
        (torch.zeros(512), torch.zeros(64), r"\[tokens, 512\], found float32 \[512\]"),
        (torch.zeros(2, 512).double(), torch.zeros(2, 64), "found float64"),
        (torch.zeros(2, 512), torch.zeros(2, 64, dtype=torch.int32), "found int32"),
        (torch.zeros(2, 512), torch.zeros(2, 64, device="meta"), "rope part on meta"),
    ],
)
def test_wrong_rows(latent: Tensor, rope: Tensor | None, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        pack(latent, rope, RECORDS["nvfp4_ds_mla_432"])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.zeros(2, 431, dtype=torch.uint8), r"uint8 \[tokens, 432\], found uint8 \[2, 431\]"),
        (torch.zeros(432, dtype=torch.uint8), r"found uint8 \[432\]"),
        (torch.zeros(2, 432, dtype=torch.int8), "found int8"),
    ],
)
def test_wrong_records(rows: Tensor, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        unpack(rows, RECORDS["nvfp4_ds_mla_432"])


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (torch.zeros(2), r"int32 or int64 \[tokens\], found float32 \[2\]"),
        (torch.zeros(2, dtype=torch.int16), "found int16"),
        (torch.zeros(1, 2, dtype=torch.int64), r"found int64 \[1, 2\]"),
        (torch.zeros(3, dtype=torch.int64), "3 slots were given for 2 rows"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "slots are on meta"),
    ],
)
def test_wrong_slots(slots: Tensor, message: str) -> None:
    cache = RecordCache.allocate(RECORDS["nvfp4_outer_304"], 1)
    with pytest.raises(RecordError, match=message):
        pack_into(cache, torch.zeros(2, 512), None, slots)


def test_wrong_cache() -> None:
    fmt = RECORDS["dsv4_fp8_584"]
    for data in (
        torch.zeros(1, 64 * 584, dtype=torch.uint8),  # a page is padded to 37440 bytes
        torch.zeros(37440, dtype=torch.uint8),
        torch.zeros(1, 37440, dtype=torch.int8),
    ):
        with pytest.raises(RecordError, match=r"must be uint8 \[pages, 37440\]"):
            RecordCache(data, fmt, 64)
    page = torch.zeros(1, 37440, dtype=torch.uint8)
    with pytest.raises(RecordError, match="pages must not overlap"):
        RecordCache(page.expand(2, -1), fmt, 64)
    with pytest.raises(RecordError, match="must be consecutive"):
        RecordCache(torch.zeros(1, 2 * 37440, dtype=torch.uint8)[:, ::2], fmt, 64)
    with pytest.raises(RecordError, match="page_size is 0"):
        RecordCache.allocate(fmt, 1, 0)
    cache = RecordCache(page, fmt, 64)
    with pytest.raises(RecordError, match="latent is on meta"):
        pack_into(
            cache, torch.zeros(1, 448, device="meta"), torch.zeros(1, 64, device="meta"),
            torch.zeros(1, dtype=torch.int64),
        )  # fmt: skip


def test_unknown_nan_policy() -> None:
    with pytest.raises(RecordError, match='"refuse" or "poison"'):
        pack(torch.zeros(1, 512), None, RECORDS["nvfp4_outer_304"], nan="ignore")  # type: ignore[arg-type]


# --- a tenth format


def small_format() -> RecordFormat:
    """Latent 32, rope 8; scales interleaved, all scales and the rope part in a footer."""
    return RecordFormat(
        name="small_40",
        known_as=(),
        record_bytes=40,
        latent=Segment(
            32, 0, formats.E2M1, BlockScale(20, 8, formats.E4M3, ScaleWriter("nearest"), 2)
        ),
        rope=Segment(
            8, 24, formats.E4M3, BlockScale(32, 4, None, ScaleWriter("power_of_two_up"))
        ),
        v_width=40,
        row_bytes=16,
        page_alignment=128,
    )  # fmt: skip


def test_tenth_format_needs_a_description_only() -> None:
    """Bytes typed by hand: nothing but the description says how this format is packed."""
    fmt = small_format()
    latent = torch.zeros(1, 32)
    latent[0, 0], latent[0, 1] = 6.0, -3.0  # scale 1
    latent[0, 8] = 12.0  # scale 2
    latent[0, 16] = 1.5  # scale 0.25
    latent[0, 31] = -0.75  # scale 0.125
    rope = torch.tensor([[448.0, -1.0, 0.0, 2.0, 896.0, 0.0, 0.0, 0.0]])
    row = [0xD7, 0, 0, 0, 0x07, 0, 0, 0, 0x07, 0, 0, 0, 0, 0, 0, 0xF0]
    one = 7 << 3
    # Scale s of 4 at 2 · (s mod 2) + s div 2.
    scales = [one, one - 16, one + 8, one - 24]
    rope_codes = [0x7E, 0x80 | one, 0, one + 8, 0x7E, 0, 0, 0]
    want = [*row, 0, 0, 0, 0, *scales, *rope_codes, *struct.pack("<2f", 1.0, 2.0)]
    got = pack(latent, rope, fmt)
    assert got[0].tolist() == want
    same_values(torch.cat(unpack(got, fmt), dim=1), torch.cat((latent, rope), dim=1).numpy())

    assert fmt.page_bytes(3) == 128
    cache = RecordCache(torch.full((2, 128), PRESET, dtype=torch.uint8), fmt, 3)
    pack_into(cache, latent, rope, torch.tensor([4]))
    page = [PRESET] * 128
    page[16:32] = want[:16]
    page[48 + 24 : 48 + 48] = want[16:]
    assert cache.data.tolist() == [[PRESET] * 128, page]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"record_bytes": 39}, "rope_scale ends at byte 40 of 39"),
        ({"row_bytes": 22}, "latent_scale straddles row and footer at 22"),
        ({"row_bytes": 41}, "row_bytes is 41"),
        ({"v_width": 41}, "v_width is 41 of 40 values"),
        ({"rope": Segment(8, 12, formats.E4M3)}, "rope at 12 overlaps latent, which ends at 16"),
        ({"rope": Segment(8, 24, None, outer_offset=36)}, "outer scale without block scales"),
        ({"rope": Segment(7, 24, formats.E2M1)}, "7 values, which fill no whole bytes"),
        (
            {"rope": Segment(8, 24, formats.E4M3, BlockScale(32, 3, None, UNROUNDED))},
            "blocks of 3 do not divide the 8 coded values of the rope",
        ),
        (
            {"rope": Segment(8, 24, formats.E4M3, BlockScale(32, 4, None, UNROUNDED, 3))},
            "interleave 3 does not divide 2",
        ),
    ],
)
def test_inconsistent_description(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        dataclasses.replace(small_format(), **changes)


@pytest.mark.parametrize(
    ("name", "rounding"),
    [
        ("fp8_ds_mla_656", "nearest"),
        ("nvfp4_ds_mla_432", "none"),
        ("nvfp4_ds_mla_432", "power_of_two_up"),
        ("dsv4_fp8_584", "none"),
        ("dsv4_fp8_584", "nearest_not_below"),
    ],
)
def test_writer_that_the_scale_format_cannot_store(name: str, rounding: Any) -> None:
    with pytest.raises(RecordError, match=f"scales cannot be written with rounding '{rounding}'"):
        RECORDS[name].with_writer(ScaleWriter(rounding))


def test_fields_cover_what_the_specification_says() -> None:
    """Offsets typed from the table; what they leave out is written as zero."""
    padding = {
        "nvfp4_ds_mla_432": [(288, 304)],
        "nvfp4_ds_mla_368": [(292, 304)],
        "nvfp4_outer_304": [(288, 292), (296, 304)],
        "dsv4_fp8_584": [(583, 584)],
        "dsv4_nvfp4_384": [(380, 384)],
    }
    for name, fmt in RECORDS.items():
        covered = {byte for field in fmt.fields for byte in range(field.offset, field.end)}
        gaps = {byte for start, end in padding.get(name, []) for byte in range(start, end)}
        assert covered == set(range(fmt.record_bytes)) - gaps
        latent, rope = random_rows(name, 4)
        assert not pack(latent, rope, fmt)[:, sorted(gaps)].any()


def test_what_holds_a_model() -> None:
    def holds(*widths: int) -> list[str]:
        return [name for name, fmt in RECORDS.items() if fmt.holds(*widths)]

    assert holds(512, 64) == [
        "fp8_ds_mla_656", "nvfp4_fp8rope_352", "nvfp4_ds_mla_432", "nvfp4_ds_mla_368",
    ]  # fmt: skip
    assert holds(512, 0) == ["nvfp4_outer_304"]
    assert holds(448, 64) == ["dsv4_fp8_584", "dsv4_nvfp4_384", "dsv41_fp8_528", "dsv41_fp4_288"]
    assert holds(256, 32) == []
