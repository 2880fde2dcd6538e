"""The store kernels against golden bytes and against the plain torch that packs records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mla_quant.errors import RecordError
from mla_quant.kernels.record_store import norm_rotate_store, store_records
from mla_quant.records import (
    RECORDS,
    UNROUNDED,
    RecordCache,
    RecordFormat,
    outer_scale,
    pack_into,
    unpack_from,
)

GOLDEN = Path(__file__).parents[1] / "data" / "kv_records.npz"
PRESET = 0xA5
PER_LAYER = [name for name, fmt in RECORDS.items() if fmt.outer_scale == "per layer"]
NORMED = [name for name, fmt in RECORDS.items() if not fmt.rope_inside]

every_format = pytest.mark.parametrize("name", RECORDS)


def new_cache(
    fmt: RecordFormat, device: torch.device, pages: int = 4, page_size: int = 16, **options: Any
) -> RecordCache:
    shape = (pages, fmt.page_bytes(page_size))
    data = torch.full(shape, PRESET, dtype=torch.uint8, device=device)
    return RecordCache(data, fmt, page_size, **options)


def copy(cache: RecordCache) -> RecordCache:
    return RecordCache(
        cache.data.clone(), cache.format, cache.page_size, cache.outer_scale, cache.rope_dtype
    )


def rows(fmt: RecordFormat, tokens: int, sigma: float = 1.0, seed: int = 0) -> Tensor:
    x = torch.randn(tokens, fmt.width, generator=torch.Generator().manual_seed(seed)) * sigma
    x[::3, ::7] *= 300
    x[tokens // 2] = 0
    return x


def parts(fmt: RecordFormat, x: Tensor) -> tuple[Tensor, Tensor | None]:
    return x[:, : fmt.latent.width], None if fmt.rope is None else x[:, fmt.latent.width :]


def check(cache: RecordCache, x: Tensor, slots: Tensor, **options: Any) -> None:
    """What the kernel writes equals what `pack_into` does."""
    want = copy(cache)
    latent, rope = parts(cache.format, x)
    pack_into(want, latent, rope, slots, nan="poison")
    store_records(cache, latent, rope, slots, **options)
    different = (cache.data != want.data).nonzero()
    assert not len(different), (len(different), different[0].tolist())


@every_format
def test_golden_cache(device, name) -> None:
    with np.load(GOLDEN) as golden:
        want = torch.from_numpy(golden[f"{name}.cache"]).to(device)
        x = torch.from_numpy(golden[f"{name}.input_bf16"].view(np.int16).copy())
        slots = torch.from_numpy(golden[f"{name}.slots"]).to(device)
    cache = RecordCache(torch.full_like(want, PRESET), RECORDS[name], 64)
    latent, rope = parts(RECORDS[name], x.view(torch.bfloat16).to(device))
    store_records(cache, latent, rope, slots, unique_slots=True)
    assert torch.equal(cache.data, want)


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sigma", [1.0, 1e-3])
def test_equals_packing(device, name, dtype, sigma) -> None:
    fmt = RECORDS[name]
    x = rows(fmt, 13, sigma).to(dtype).to(device)
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:13].to(device)
    check(new_cache(fmt, device), x, slots)


@pytest.mark.parametrize("name", PER_LAYER)
@pytest.mark.parametrize("amax", [0.02, 1e-3, 1e-32])
def test_outer_scale(device, name, amax) -> None:
    fmt = RECORDS[name]
    x = rows(fmt, 9, amax / 3).to(device)
    cache = new_cache(fmt, device, outer_scale=outer_scale(amax, fmt))
    check(cache, x, torch.arange(9, device=device))


@every_format
def test_nan_and_infinity(device, name) -> None:
    fmt = RECORDS[name]
    x = rows(fmt, 8)
    for row, column, value in ((0, 5, "nan"), (1, 17, "inf"), (2, -1, "nan"), (3, 40, "-inf")):
        x[row, column] = float(value)
    x[4] = float("nan")
    x[5, 3], x[6, -2] = 3.3e38, -3.3e38
    # Bits of a NaN are kept where a 16-bit part is, and nowhere else.
    x = x.bfloat16()
    check(new_cache(fmt, device), x.to(device), torch.arange(8, device=device))


@pytest.mark.parametrize("name", ["nvfp4_fp8rope_352", "dsv4_fp8_584", "dsv4_nvfp4_384"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("unique", [False, True])
def test_slots(device, name, dtype, unique) -> None:
    """Skipped ones, the last one, and of several rows for a slot the first."""
    fmt = RECORDS[name]
    listed = [5, -1, 63, 64, 7, -(2**31), 2**31 - 1, 0]
    if not unique:
        listed += [63, 5, 5]
    slots = torch.tensor(listed, dtype=dtype, device=device)
    x = rows(fmt, len(listed)).bfloat16().to(device)
    check(new_cache(fmt, device), x, slots, unique_slots=unique)


def test_slots_beyond_32_bits(device) -> None:
    fmt = RECORDS["nvfp4_fp8rope_352"]
    slots = torch.tensor([2**40, 3, -(2**40)], device=device)
    check(new_cache(fmt, device), rows(fmt, 3).bfloat16().to(device), slots)


@every_format
def test_pages_and_rows_may_lie_apart(device, name) -> None:
    fmt = RECORDS[name]
    wide = torch.full((4, 3 * fmt.page_bytes(8) + 48), PRESET, dtype=torch.uint8, device=device)
    cache = RecordCache(wide[:, : fmt.page_bytes(8)], fmt, 8)
    x = rows(fmt, 20).bfloat16().to(device)
    spread = torch.zeros(20, 2 * fmt.width + 8, dtype=x.dtype, device=device)
    spread[:, : fmt.width] = x
    check(cache, spread[:, : fmt.width], torch.arange(3, 23, device=device))
    assert (wide[:, fmt.page_bytes(8) :] == PRESET).all()


@pytest.mark.parametrize("name", ["fp8_ds_mla_656", "nvfp4_ds_mla_432"])
def test_float16(device, name) -> None:
    fmt = RECORDS[name]
    x = rows(fmt, 6).half().to(device)
    cache = new_cache(fmt, device, rope_dtype=torch.float16)
    check(cache, x, torch.arange(6, device=device))


@pytest.mark.parametrize("name", ["nvfp4_fp8rope_352", "dsv41_fp8_528"])
def test_pages_at_odd_addresses(device, name) -> None:
    """Of formats whose fields are bytes."""
    fmt = RECORDS[name]
    wide = torch.full((4, fmt.page_bytes(8) + 3), PRESET, dtype=torch.uint8, device=device)
    cache = RecordCache(wide[:, 1:-2], fmt, 8)
    check(cache, rows(fmt, 9).bfloat16().to(device), torch.arange(9, device=device))
    assert (wide[:, 0] == PRESET).all() and (wide[:, -2:] == PRESET).all()


@pytest.mark.parametrize("name", ["nvfp4_ds_mla_432", "nvfp4_outer_304"])
@pytest.mark.parametrize("outer", [1.0, 2.0**-5, 2.0**-100, 2.0**100])
def test_halfway_values(device, name, outer) -> None:
    """Under every E4M3 scale, bfloat16 numbers halfway between E2M1 ones, and their neighbours."""
    fmt = RECORDS[name]
    if fmt.outer_scale == "per token" and outer != 1:
        pytest.skip("has no scale of a layer")
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * outer
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    bits = (scales[:, None] * halfway).bfloat16().view(torch.int16)
    near = torch.cat((bits - 1, bits, bits + 1), 1).view(torch.bfloat16)
    largest = (6 * scales).bfloat16()[:, None]
    x = torch.cat((near[:, :15], largest, -near[:, 6:], largest), 1)
    x = torch.cat((x.flatten(), x.new_zeros(-x.numel() % 512))).view(-1, 512)
    latent = x.to(device)
    cache = new_cache(fmt, device, **({} if outer == 1 else {"outer_scale": outer}))
    rope = None if fmt.rope is None else latent[:, : fmt.rope_width]
    want, slots = copy(cache), torch.arange(len(x), device=device)
    pack_into(want, latent, rope, slots)
    store_records(cache, latent, rope, slots, unique_slots=True)
    assert torch.equal(cache.data, want.data)


def test_another_writer(device) -> None:
    fmt = RECORDS["fp8_ds_mla_656"].with_writer(UNROUNDED)
    check(new_cache(fmt, device), rows(fmt, 9).to(device), torch.arange(9, device=device))


def test_no_rows(device) -> None:
    fmt = RECORDS["nvfp4_ds_mla_432"]
    check(new_cache(fmt, device), rows(fmt, 2)[:0].to(device), torch.arange(0, device=device))


# --- norm, rotation and store in one launch


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return weight * normed.to(x.dtype)


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor, style: str) -> Tensor:
    cos, sin = cos_sin[positions.long()].float().chunk(2, dim=-1)
    y = x.float()
    if style == "pairs":
        a, b = y[:, 0::2], y[:, 1::2]
    else:
        a, b = y.chunk(2, dim=-1)
    first, second = a * cos - b * sin, b * cos + a * sin
    if style == "pairs":
        return torch.stack((first, second), -1).flatten(1).to(x.dtype)
    return torch.cat((first, second), -1).to(x.dtype)


def angles(width: int, positions: int = 40) -> Tensor:
    turns = torch.arange(positions)[:, None] / 10000.0 ** (torch.arange(width // 2) * 2 / width)
    return torch.cat((turns.cos(), turns.sin()), -1)


@pytest.mark.parametrize("name", NORMED)
@pytest.mark.parametrize(("style", "dtype"), [("pairs", torch.bfloat16), ("halves", torch.float16)])
def test_fused_equals_separate_steps(device, name, style, dtype) -> None:
    """Small integers, a quarter of them 0: squares add up exactly in any order."""
    fmt = RECORDS[name]
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-4, 5, (11, fmt.width), generator=generator).to(dtype).to(device)
    latent, rope = parts(fmt, x)
    weight = torch.randn(fmt.latent.width, generator=generator).to(dtype).to(device)
    slots = torch.tensor([3, -1, 8, 1, 30, 99, 12, 13, 14, 15, 9], device=device)
    sixteen_bit = fmt.rope is not None and fmt.rope.element is None
    if sixteen_bit and str(dtype).removeprefix("torch.") not in fmt.rope.dtypes:
        pytest.skip(f"keeps no {dtype}")
    options = {"rope_dtype": dtype} if sixteen_bit else {}
    cache = new_cache(fmt, device, **options)
    want = copy(cache)
    fused: dict[str, Any] = {"normed": torch.empty_like(latent).contiguous()}
    normed, rotated = norm(latent, weight, 1e-6), rope
    if rope is not None:
        positions = torch.arange(11, device=device) * 3
        cos_sin = angles(fmt.rope_width).to(device)
        rotated = rotate(rope, positions, cos_sin, style)
        fused |= {"positions": positions, "cos_sin": cos_sin, "rope_style": style}
        fused["rotated"] = torch.empty_like(rope).contiguous()
    pack_into(want, normed, rotated, slots)
    norm_rotate_store(cache, latent, rope, slots, weight=weight, epsilon=1e-6, **fused)
    assert torch.equal(fused["normed"], normed)
    if rope is not None:
        assert torch.equal(fused["rotated"], rotated)
    assert torch.equal(cache.data, want.data)


def test_fused_without_rotation(device) -> None:
    fmt = RECORDS["nvfp4_ds_mla_432"]
    latent, rope = parts(fmt, rows(fmt, 5).bfloat16().to(device))
    weight, slots = (
        torch.ones(512, dtype=torch.bfloat16, device=device),
        torch.arange(5, device=device),
    )
    cache = new_cache(fmt, device)
    norm_rotate_store(cache, latent, rope, slots, weight=weight, epsilon=1e-6)
    got_latent, got_rope = unpack_from(cache, slots)
    assert torch.equal(got_rope, rope.float())
    error = (got_latent - norm(latent, weight, 1e-6).float()).norm() / got_latent.norm()
    assert error < 0.15


# --- errors


def call(**changes: Any) -> None:
    fmt = RECORDS["nvfp4_ds_mla_432"]
    cache = changes.pop("cache", None) or RecordCache.allocate(fmt, 2)
    given: dict[str, Any] = {
        "latent": torch.zeros(3, 512), "rope": torch.zeros(3, 64), "slots": torch.arange(3),
        "weight": torch.ones(512), "epsilon": 1e-6,
    }  # fmt: skip
    norm_rotate_store(cache, **(given | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent": torch.zeros(3, 500)}, r"shape \[3, 512\]"),
        ({"latent": torch.zeros(512, 3).t()}, "consecutive"),
        ({"slots": torch.arange(2)}, "2 slots were given for 3 rows"),
        ({"slots": torch.zeros(3)}, "int32 or int64"),
        ({"weight": torch.ones(64)}, r"weight must be contiguous \[512\]"),
        ({"positions": torch.arange(3)}, "together, or neither"),
        ({"positions": torch.arange(2), "cos_sin": torch.zeros(9, 64)}, r"positions must be"),
        ({"positions": torch.zeros(3), "cos_sin": torch.zeros(9, 64)}, "int32 or int64"),
        ({"positions": torch.arange(3), "cos_sin": torch.zeros(9, 32)}, r"cos_sin must be"),
        ({"rotated": torch.zeros(3, 64)}, "without positions"),
        ({"normed": torch.zeros(3, 512).half()}, "its source torch.float32"),
        ({"rope_style": "neox"}, "give .pairs. or .halves."),
        ({"cache": RecordCache.allocate(RECORDS["dsv41_fp8_528"], 2)}, "norm and rotate before"),
        ({"cache": RecordCache.allocate(RECORDS["nvfp4_outer_304"], 2), "rope": None,
          "positions": torch.arange(3), "cos_sin": torch.zeros(9, 0)}, "no rope part to rotate"),
    ],
)  # fmt: skip
def test_wrong_arguments(changes, message) -> None:
    with pytest.raises(RecordError, match=message):
        call(**changes)
