"""Quantize-dequantize, N:M sparsity, attention and merging against the independent oracles.

Contracts: quantized values equal the oracle's bit for bit (the sign of a zero in a block whose
scale is 0 is left open). Attention stays, in every element, within the float32 bound that
`tests.oracles.attention.float32_bound` derives; decisions on P may differ only where float32
rounding of p can cross a tie, and those places are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_quant import formats, reference
from tests.oracles import attention as oracle
from tests.oracles import blocks
from tests.oracles import codes as code_oracle

FORMATS = formats.FORMATS
QUANTIZED = ["nvfp4", "fp8"]
NAN, INF = float("nan"), float("inf")

# Feature widths of MLA models with the borders their blocks may not cross.
WIDTHS: list[tuple[int, tuple[int, ...] | None]] = [
    (1, None),
    (8, None),
    (15, None),
    (16, None),
    (17, None),
    (40, (24, 16)),  # nope 24: a block of 8 before the rope part
    (40, (32, 8)),
    (48, (8, 40)),
    (96, (64, 32)),
    (192, (128, 64)),
    (320, (256, 64)),
    (576, (512, 64)),
]


def assert_same(got: Tensor, want: blocks.Quantized) -> None:
    """Equal bits; NaN equals NaN; zeros of blocks with scale 0 may have either sign."""
    assert got.dtype == torch.float32
    a, b = got.numpy(), np.asarray(want.values, dtype=np.float32)
    assert a.shape == b.shape
    same = (a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))
    same |= want.sign_free & (a == 0) & (b == 0)
    if not same.all():
        i = tuple(int(j) for j in np.argwhere(~same)[0])
        pytest.fail(
            f"{int((~same).sum())} of {same.size} differ; first at {i}: "
            f"got {a[i]!r} ({float(a[i]).hex()}), want {b[i]!r} ({float(b[i]).hex()}), "
            f"scale {want.scales[i]}, global scale {want.global_scale!r}"
        )


def check(x: Tensor, fmt: str, amax: float, **kwargs: object) -> blocks.Quantized:
    """The package against the oracle on one tensor; returns the oracle's result."""
    want = blocks.quantize(x.float().numpy(), fmt, amax, **kwargs)  # type: ignore[arg-type]
    got = reference.quantize_dequantize(x, FORMATS[fmt], amax, **kwargs)  # type: ignore[arg-type]
    assert_same(got, want)
    return want


def bf16(pattern: np.ndarray) -> Tensor:
    return torch.from_numpy(pattern.astype(np.uint16).view(np.int16).copy()).view(torch.bfloat16)


# --- the oracle itself


def round_to_float32(x: Fraction) -> Fraction:
    """Nearest float32, ties to even, in integer arithmetic."""
    if x == 0:
        return x
    exponent = -126
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    return round(x / unit) * unit  # round() of a Fraction takes ties to even


def nearest(grid: np.ndarray, x: Fraction) -> Fraction:
    """Nearest of the magnitudes by exhaustive search; of two equally near the even index."""
    values = [Fraction(float(v)) for v in grid]
    _, _, i = min((abs(abs(x) - v), i % 2, i) for i, v in enumerate(values))
    return values[i] if x >= 0 else -values[i]


def test_block_oracle_equals_exact_rational_arithmetic() -> None:
    """The definition once more, in fractions with float32 rounding in integers, no numpy."""
    rng = np.random.default_rng(0)
    for amax in (3.7, 0.011, 2688.0, 1e-36):
        x = torch.from_numpy(rng.normal(size=48).astype(np.float32) * amax).bfloat16().float()
        got = blocks.quantize(x.numpy(), "nvfp4", amax)
        g = round_to_float32(Fraction(float(np.float32(amax))) / 2688)
        g = max(g, Fraction(2) ** -126)
        for start in range(0, 48, 16):
            block = [Fraction(float(v)) for v in x[start : start + 16]]
            largest = max(abs(v) for v in block)
            ratio = round_to_float32(largest / round_to_float32(6 * g))
            s = nearest(code_oracle.E4M3_MAGNITUDES, min(ratio, Fraction(448)))
            for i, v in enumerate(block):
                want = Fraction(0)
                if s:
                    quotient = round_to_float32(v / round_to_float32(s * g))
                    want = round_to_float32(nearest(code_oracle.E2M1_MAGNITUDES, quotient) * s * g)
                assert Fraction(float(got.values[start + i])) == want


def test_p_oracle_equals_exact_rational_arithmetic() -> None:
    """Likewise for P: the product 2688 p, the quotient and the last factor round to float32."""
    rng = np.random.default_rng(1)
    p = rng.uniform(size=64).astype(np.float32) ** 4
    got = blocks.quantize_p(p, "nvfp4")
    factor = round_to_float32(Fraction(1, 2688))
    for start in range(0, 64, 16):
        block = [Fraction(float(v)) for v in p[start : start + 16]]
        s = nearest(code_oracle.E4M3_MAGNITUDES, round_to_float32(448 * max(block)))
        for i, v in enumerate(block):
            code = nearest(
                code_oracle.E2M1_MAGNITUDES, round_to_float32(round_to_float32(2688 * v) / s)
            )
            assert Fraction(float(got.values[start + i])) == round_to_float32(code * s * factor)


# --- blocks: listed cases


@pytest.mark.parametrize("fmt", QUANTIZED)
@pytest.mark.parametrize(("width", "segments"), WIDTHS)
def test_widths_and_segments(fmt: str, width: int, segments: tuple[int, ...] | None) -> None:
    """Blocks end at segment borders; a width that 16 does not divide ends in a shorter block."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(3, 5, width, generator=generator)
    x[..., -8:] *= 30  # a rope part an order of magnitude larger: a shared block would show
    for amax in (float(x.abs().max()), 1.0):
        check(x, fmt, amax, segments=segments)
        check(x.bfloat16(), fmt, amax, segments=segments)


@pytest.mark.parametrize("fmt", QUANTIZED)
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_any_axis(fmt: str, axis: int) -> None:
    """Blocks lie along the axis asked for, contiguous or not."""
    x = torch.randn(21, 33, 18, generator=torch.Generator().manual_seed(3))
    check(x, fmt, 3.0, axis=axis)
    check(x.transpose(0, 2), fmt, 3.0, axis=axis)


def test_segments_along_another_axis() -> None:
    """Segments are widths along `axis`, not along the last one."""
    x = torch.randn(2, 40, 5, generator=torch.Generator().manual_seed(4))
    check(x, "nvfp4", 3.0, axis=1, segments=(24, 16))
    check(x, "nvfp4", 3.0, axis=-2, segments=(8, 32))


def test_segments_must_add_up() -> None:
    """A wrong sum is an error, whatever the format or the number of segments."""
    for segments in [(16, 8), (5,)]:
        for fmt in QUANTIZED:
            with pytest.raises(ValueError, match="segments"):
                reference.quantize_dequantize(
                    torch.ones(2, 40), FORMATS[fmt], 1.0, segments=segments
                )


def test_a_zero_block() -> None:
    """A zero block next to others: scale code at most 0x7E, values exactly 0, no NaN."""
    x = torch.zeros(2, 32)
    x[:, 16:] = 0.01
    want = check(x, "nvfp4", 0.01)
    got = reference.quantize_dequantize(x, formats.NVFP4, 0.01)
    assert (got[:, :16] == 0).all()
    assert (got[:, 16:] != 0).all()
    assert (code_oracle.encode_e4m3(want.scales) <= 0x7E).all()
    quantized = reference.quantize(x, formats.NVFP4, 0.01)
    assert quantized.block_scale is not None
    assert (reference.encode(quantized.block_scale, formats.E4M3) <= 0x7E).all()


def test_large_and_tiny_block_under_one_amax() -> None:
    """Maxima 2688 and 1e-3 (g = 1): 1e-3/6 is below half the smallest scale, so zeros.

    The flush border is f32(max/6g) <= 2^-10, half the smallest scale (the tie goes to zero).
    """
    x = torch.zeros(4, 32)
    x[:, 0] = 2688.0
    border = 6 * 2.0**-10
    x[:, 16] = torch.tensor([1e-3, border, border * (1 + 2.0**-7), -border * (1 + 2.0**-7)])
    want = check(x, "nvfp4", 2688.0)
    got = reference.quantize_dequantize(x, formats.NVFP4, 2688.0)
    assert (got[:, 0] == 2688.0).all()
    assert (got[:2, 16:] == 0).all()
    # Just above: s = 2^-9 and x/s just above 3.
    assert got[2, 16] == 3 * 2.0**-9
    assert got[3, 16] == -3 * 2.0**-9
    assert want.scales[:, 16].tolist() == [0.0, 0.0, 2.0**-9, 2.0**-9]


@pytest.mark.parametrize("fmt", QUANTIZED)
def test_amax_zero_gives_zeros(fmt: str) -> None:
    """amax 0 gives zeros whatever the values, Inf included; NaN stays."""
    x = torch.tensor([[0.0, 1.0, -3e38, INF, -INF, NAN, 1e-45, -0.0] * 4])
    got = reference.quantize_dequantize(x, FORMATS[fmt], 0.0)
    assert torch.equal(got.isnan(), x.isnan())
    assert (got[~x.isnan()] == 0).all()
    check(x, fmt, 0.0)
    check(torch.zeros(3, 20), fmt, 0.0)


@pytest.mark.parametrize("fmt", QUANTIZED)
@pytest.mark.parametrize("amax", [NAN, INF, -1.0])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
def test_impossible_amax_is_never_silent(fmt: str, amax: float, as_tensor: bool) -> None:
    """NaN, Inf or negative: an error, or for a tensor (no host sync) NaN; not plausible numbers."""
    x = torch.ones(2, 16)
    try:
        got = reference.quantize_dequantize(
            x, FORMATS[fmt], torch.tensor(amax) if as_tensor else amax
        )
    except ValueError as error:
        assert "amax" in str(error)  # noqa: PT017
    else:
        assert as_tensor
        assert got.isnan().all()


@pytest.mark.parametrize("fmt", QUANTIZED)
def test_missing_amax_is_refused(fmt: str) -> None:
    """No amax is an error, never a silent 1."""
    with pytest.raises(ValueError, match="amax"):
        reference.quantize_dequantize(torch.ones(2, 16), FORMATS[fmt], None)


@pytest.mark.parametrize("fmt", QUANTIZED)
def test_nan_and_inf(fmt: str) -> None:
    """NaN stays in place and leaves its neighbours as if it were 0; Inf gives the largest code."""
    x = torch.randn(6, 48, generator=torch.Generator().manual_seed(5))
    x[1, 3], x[2, 17], x[3, 40], x[4, :16], x[5, 20:22] = (
        NAN,
        INF,
        -INF,
        NAN,
        torch.tensor([NAN, INF]),
    )
    check(x, fmt, 4.0)
    check(x.t().contiguous(), fmt, 4.0, axis=0)
    got = reference.quantize_dequantize(x, FORMATS[fmt], 4.0)
    assert torch.equal(got.isnan(), x.isnan())
    without = reference.quantize_dequantize(
        x.nan_to_num(nan=0.0, posinf=INF, neginf=-INF), FORMATS[fmt], 4.0
    )
    assert torch.equal(got[~x.isnan()], without[~x.isnan()])
    largest = float(blocks.quantize([4.0], fmt, 4.0).values[0])
    assert got[2, 17] == largest
    assert got[3, 40] == -largest


@pytest.mark.parametrize("fmt", QUANTIZED)
def test_extreme_magnitudes(fmt: str) -> None:
    """Subnormal and huge inputs and amax: g is at least the smallest normal, nothing overflows."""
    x = torch.tensor([[3e38, -3e38, 1e-45, 1e-38, 2.0**-126, 65504.0, 0.0, -0.0] * 2])
    for amax in (1e-45, 1e-40, 2.0**-126, 2688 * 2.0**-126, 1e-30, 1e30, 3e38):
        check(x, fmt, amax)
        check(x * 1e-30, fmt, amax)


def test_format_none_changes_nothing() -> None:
    """Format "none" hands the operand through in fp32, without an amax."""
    x = torch.randn(3, 17, generator=torch.Generator().manual_seed(6)).bfloat16()
    got = reference.quantize_dequantize(x, formats.NONE, None)
    assert got.dtype == torch.float32
    assert torch.equal(got, x.float())
    p = torch.rand(3, 17)
    assert torch.equal(reference.quantize_dequantize_p(p, formats.NONE), p)


@pytest.mark.parametrize("fmt", QUANTIZED)
@pytest.mark.parametrize("shape", [(0, 32), (2, 0), (0, 0), (2, 0, 5)])
def test_empty_operands(fmt: str, shape: tuple[int, ...]) -> None:
    """No tokens or no features: an empty tensor of the same shape."""
    for axis in (-1, -2):
        got = reference.quantize_dequantize(torch.empty(shape), FORMATS[fmt], 1.0, axis=axis)
        assert got.shape == shape


@pytest.mark.parametrize("fmt", QUANTIZED)
def test_amax_as_tensor(fmt: str) -> None:
    """A 0-dim tensor of any float dtype is the number it holds."""
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(7))
    want = reference.quantize_dequantize(x, FORMATS[fmt], 2.75)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        got = reference.quantize_dequantize(x, FORMATS[fmt], torch.tensor(2.75, dtype=dtype))
        assert torch.equal(got, want)


# --- blocks: ties and all inputs


# With g = 1 all inputs of the next two tests are exact in bf16. A g of five significant bits keeps
# every step but the reciprocals exact: dividing hits the ties, multiplying by 1/d misses many.
FIVE_BITS = [1 + i / 16 for i in range(16)]


@pytest.mark.parametrize("g", FIVE_BITS)
def test_ties_in_block_scales(g: float) -> None:
    """Every midpoint of E4M3 as block_amax / 6 g goes to the even scale."""
    grid = code_oracle.E4M3_MAGNITUDES
    middle = (grid[1:] + grid[:-1]) / 2
    even = np.where(np.arange(middle.size) % 2 == 0, grid[:-1], grid[1:])
    x = torch.zeros(middle.size, 16, dtype=torch.float64)
    x[:, 5] = torch.from_numpy(6 * g * middle)
    x32 = x.bfloat16() if g == 1 else x.float()
    assert torch.equal(x32.double(), x)
    want = check(x32, "nvfp4", 2688.0 * g)
    np.testing.assert_array_equal(want.scales[:, 0], even)
    quantized = reference.quantize(x32, formats.NVFP4, 2688.0 * g)
    assert quantized.block_scale is not None
    np.testing.assert_array_equal(quantized.block_scale.flatten().numpy(), even)


@pytest.mark.parametrize("g", FIVE_BITS)
def test_ties_in_elements(g: float) -> None:
    """All seven E2M1 ties under every E4M3 scale go to the even code, of either sign."""
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    even = np.array([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    scales = code_oracle.E4M3_MAGNITUDES[1:]
    x = np.zeros((scales.size, 16))
    x[:, 0] = 6 * g * scales
    x[:, 1:8] = ties * g * scales[:, None]
    x[:, 8:15] = -x[:, 1:8]
    x32 = torch.from_numpy(x).bfloat16() if g == 1 else torch.from_numpy(x).float()
    assert torch.equal(x32.double(), torch.from_numpy(x))
    want = check(x32, "nvfp4", 2688.0 * g)
    np.testing.assert_array_equal(want.codes[:, 1:8], np.broadcast_to(even, (scales.size, 7)))
    got = reference.quantize_dequantize(x32, formats.NVFP4, 2688.0 * g).double().numpy()
    np.testing.assert_array_equal(got[:, 1:8], even * scales[:, None] * g)
    np.testing.assert_array_equal(got[:, 8:15], -even * scales[:, None] * g)


@pytest.mark.parametrize("s", FIVE_BITS)
def test_ties_in_fp8(s: float) -> None:
    """Every midpoint of E4M3 under a per-tensor scale goes to the even code."""
    grid = code_oracle.E4M3_MAGNITUDES
    middle = (grid[1:] + grid[:-1]) / 2
    even = np.where(np.arange(middle.size) % 2 == 0, grid[:-1], grid[1:])
    x = torch.from_numpy(np.concatenate([middle, -middle]) * s).float()
    check(x, "fp8", 448.0 * s)
    got = reference.quantize_dequantize(x, formats.FP8, 448.0 * s).double().numpy()
    np.testing.assert_array_equal(got, np.concatenate([even, -even]) * s)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("fmt", QUANTIZED)
def test_all_16_bit_inputs_in_blocks(fmt: str, dtype: torch.dtype) -> None:
    """All 2^16 inputs, NaN and Inf among them, in order and shuffled, under several amax."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    shuffled = np.random.default_rng(0).permutation(patterns)
    for order in (patterns, shuffled):
        x = torch.from_numpy(order.view(np.int16).copy()).view(dtype).reshape(64, 1024)
        for amax in (0.013, 1.0, 3.5, 5.25, 448.0, 2688.0, 60000.0):
            check(x, fmt, amax)


@pytest.mark.parametrize("fmt", QUANTIZED)
@pytest.mark.parametrize("amax", [2688.0, 5.25, 448.0, 3.5, 1.0, 0.75])
def test_ties_drawn_from_bf16(fmt: str, amax: float) -> None:
    """Random bf16 operands, as models have them: exact ties occur by the hundred, all to even.

    With a global scale that is a power of two (amax 2688 2^k, for FP8 448 2^k) the quotient of 8
    and 4 significant bits falls on midpoints of elements and of block scales; the counts say that
    the comparison had something to decide.
    """
    x = torch.randn(512, 192, generator=torch.Generator().manual_seed(0)).bfloat16() * (amax / 4)
    want = check(x, fmt, amax)
    if np.frexp(want.global_scale)[0] != 0.5:
        return
    x64 = np.abs(x.double().numpy())
    e2m1, e4m3 = (
        (grid[1:] + grid[:-1]) / 2
        for grid in (code_oracle.E2M1_MAGNITUDES, code_oracle.E4M3_MAGNITUDES)
    )
    if fmt == "fp8":
        assert np.isin(x64 / float(want.global_scale), e4m3).sum() > 300
        return
    assert np.isin(x64 / (want.scales * float(want.global_scale)), e2m1).sum() > 300
    ratio = blocks.block_maxima(x64)[:, ::16] / (6 * float(want.global_scale))
    assert np.isin(ratio, e4m3).sum() > 30


SCALED_SHAPES = st.sampled_from(
    [(8, None), (17, None), (40, (24, 16)), (96, None), (192, (128, 64))]
)


@st.composite
def operands(draw: st.DrawFn) -> tuple[Tensor, float, tuple[int, ...] | None]:
    """A bf16 tensor of raw bit patterns or of scaled normals, an amax, and segments."""
    width, segments = draw(SCALED_SHAPES)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if draw(st.booleans()):
        x = bf16(rng.integers(0, 1 << 16, size=(4, width)))
    else:
        spread = draw(st.sampled_from([0.0, 2.0, 6.0]))
        values = rng.normal(size=(4, width)) * 10.0 ** (spread * rng.normal(size=(4, width)))
        x = torch.from_numpy(values.astype(np.float32)).bfloat16()
    amax = draw(st.sampled_from([1.0, 2688.0, 2.0**-10]) | st.floats(2.0**-20, 2.0**20, width=32))
    return x, amax, segments


@settings(max_examples=150, deadline=None, derandomize=True)
@given(operands(), st.sampled_from(QUANTIZED))
def test_equals_the_oracle(case: tuple[Tensor, float, tuple[int, ...] | None], fmt: str) -> None:
    """Bit-exact equality for whatever hypothesis finds."""
    x, amax, segments = case
    check(x, fmt, amax, segments=segments)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(operands(), st.sampled_from(QUANTIZED), st.integers(-20, 20))
def test_sign_and_power_of_two(
    case: tuple[Tensor, float, tuple[int, ...] | None], fmt: str, shift: int
) -> None:
    """Negating negates; scaling x and amax by 2^k scales the result by 2^k, exactly."""
    x, amax, segments = case
    # Away from float32's own borders, where scaling is not exact.
    x = x.float().nan_to_num(0.0, 0.0, 0.0).clamp(-1e9, 1e9)
    x = torch.where(x.abs() < 1e-9, torch.zeros_like(x), x)
    one = reference.quantize_dequantize(x, FORMATS[fmt], amax, segments=segments)
    minus = reference.quantize_dequantize(-x, FORMATS[fmt], amax, segments=segments)
    assert torch.equal(minus, -one)
    factor = 2.0**shift
    scaled = reference.quantize_dequantize(
        x * factor, FORMATS[fmt], amax * factor, segments=segments
    )
    assert torch.equal(scaled, one * factor)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 1e3))
def test_error_bound_and_idempotence(seed: int, amax: float) -> None:
    """|x' - x| <= max of the block * (17/16) / 6 where its scale is normal; twice equals once.

    s is within 1/16 of block_amax/6g, half the widest E2M1 step is 1 and saturation cuts at most
    6.4 - 6, so the error is at most s g <= (17/16) block_amax / 6, plus three float32 roundings.
    """
    rng = np.random.default_rng(seed)
    x = (rng.uniform(-1, 1, size=(8, 64)) * rng.uniform(0.01, 1, size=(8, 1)) * amax).astype(
        np.float32
    )
    once = reference.quantize_dequantize(torch.from_numpy(x), formats.NVFP4, amax)
    bound = blocks.block_maxima(x).astype(np.float64) * 17 / 96 * (1 + 2.0**-21)
    assert (np.abs(once.double().numpy() - x) <= bound).all()
    twice = reference.quantize_dequantize(once, formats.NVFP4, amax)
    assert torch.equal(once, twice)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(operands())
def test_blocks_are_independent(case: tuple[Tensor, float, tuple[int, ...] | None]) -> None:
    """Each row, and each 16 aligned values of it, alone give what they give together."""
    x, amax, _ = case
    whole = reference.quantize_dequantize(x, formats.NVFP4, amax)
    for start in range(0, x.shape[-1], 16):
        part = reference.quantize_dequantize(x[1:2, start : start + 16], formats.NVFP4, amax)
        torch.testing.assert_close(
            part, whole[1:2, start : start + 16], rtol=0, atol=0, equal_nan=True
        )


# --- P


def check_p(p: Tensor, fmt: str, amax: float = 1.0) -> blocks.Quantized:
    want = blocks.quantize_p(p.float().numpy(), fmt, amax)
    assert_same(reference.quantize_dequantize_p(p, FORMATS[fmt], amax), want)
    return want


@pytest.mark.parametrize("fmt", QUANTIZED)
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 100, 256])
def test_p_equals_the_oracle(fmt: str, tokens: int) -> None:
    """P with amax 1: s from 448 max p, x = f32(f32(2688 p)/s), one last factor fp32(1/2688)."""
    rng = np.random.default_rng(tokens)
    p = rng.uniform(size=(50, tokens)) ** rng.integers(1, 30, size=(50, 1))
    check_p(torch.from_numpy(p.astype(np.float32)), fmt)
    check_p(torch.from_numpy(p.astype(np.float32)).bfloat16(), fmt)


@pytest.mark.parametrize("fmt", QUANTIZED)
def test_all_16_bit_p(fmt: str) -> None:
    """Every bf16 and fp16 in [0, 1], in order (ties within like magnitudes) and shuffled."""
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.arange(1 << 15, dtype=torch.int16).view(dtype)
        x = x[(x >= 0) & (x <= 1)]
        x = x[: x.numel() // 16 * 16].reshape(-1, 16)
        check_p(x, fmt)
        order = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))
        check_p(x.flatten()[order].reshape(-1, 16), fmt)


def test_p_ties() -> None:
    """448 max p on every E4M3 midpoint and 2688 p / s on every E2M1 tie, where float32 has them.

    2688 = 2^7 * 21: p = tie * s / 2688 is seldom a float32, so the scan takes the two float32
    neighbours and requires that exact ties of f32(2688 p) / s do occur among them.
    """
    grid = code_oracle.E4M3_MAGNITUDES
    scales = grid[1:]
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    p = np.zeros((scales.size, 16), dtype=np.float32)
    p[:, 0] = (scales / 448).astype(np.float32)
    p[:, 1:8] = (ties * scales[:, None] / 2688).astype(np.float32)
    p[:, 8:15] = np.nextafter(p[:, 1:8], np.float32(1))
    want = check_p(torch.from_numpy(p), "nvfp4")
    quotient = np.float32(2688) * p / want.scales.astype(np.float32)
    assert np.isin(quotient, ties.astype(np.float32)).sum() > 300
    middle = ((grid[1:] + grid[:-1]) / 2 / 448).astype(np.float32)
    p = np.zeros((3 * middle.size, 16), dtype=np.float32)
    p[:, 3] = np.concatenate(
        [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1))]
    )
    check_p(torch.from_numpy(p), "nvfp4")


@pytest.mark.parametrize("fmt", QUANTIZED)
@pytest.mark.parametrize("amax", [2.0**-4, 2.0**-1, 0.7, 0.8151375651359558, 0.27708885073661804])
def test_p_with_calibrated_amax(fmt: str, amax: float) -> None:
    """A calibrated amax: the factor is the correctly rounded f32(2688/amax), all else as before."""
    rng = np.random.default_rng(8)
    p = (rng.uniform(size=(200, 64)) ** 3 * amax * 1.2).astype(np.float32)
    check_p(torch.from_numpy(p), fmt, amax)


@pytest.mark.parametrize("fmt", QUANTIZED)
def test_p_specials(fmt: str) -> None:
    """NaN stays and enters no maximum, Inf and anything above 1 saturate, zeros stay zeros."""
    p = torch.rand(5, 32, generator=torch.Generator().manual_seed(9))
    p[0, 3], p[1, 20], p[2, :16], p[3, 7] = NAN, INF, 0.0, 2.0
    p[4] = 0.0
    check_p(p, fmt)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(0, 13))
def test_p_commutes_with_powers_of_two(seed: int, shift: int) -> None:
    """quantize(2^-k p) = 2^-k quantize(p), exactly, for blocks whose maximum stays >= 2^-14."""
    rng = np.random.default_rng(seed)
    p = torch.from_numpy(rng.uniform(size=(8, 16)).astype(np.float32))
    p[:, 0] = p[:, 0].clamp(min=0.5)
    one = reference.quantize_dequantize_p(p, formats.NVFP4)
    other = reference.quantize_dequantize_p(p * 2.0**-shift, formats.NVFP4)
    assert torch.equal(other, one * 2.0**-shift)


# --- N:M sparsity


def check_keep(
    scores: Tensor, valid: Tensor, n: int, m: int, dense: Tensor | None = None
) -> Tensor:
    got = reference.nm_keep(scores, valid, n, m, dense=dense)
    assert got.dtype == torch.bool
    assert got.shape == scores.shape
    want = oracle.nm_keep(
        scores.double().numpy(), valid.numpy(), n, m, None if dense is None else dense.numpy()
    )
    different = np.argwhere(got.numpy() != want)
    if different.size:
        row = tuple(different[0][:-1])
        seen = valid.expand_as(scores)[row].tolist()
        pytest.fail(
            f"{n}:{m} scores {scores[row].tolist()} valid {seen}: "
            f"got {got[row].tolist()}, want {want[row].tolist()}"
        )
    return got


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_group_of_four(n: int) -> None:
    """All score patterns over {-2, -0, 0, 1, 2} and all valid sets: ties to the lower index.

    -0 equals 0. With 0 to n valid keys exactly those stay, so no row loses its last key.
    """
    values = torch.tensor([-2.0, -0.0, 0.0, 1.0, 2.0])
    scores = torch.cartesian_prod(*[values] * 4).repeat_interleave(16, 0)
    valid = (torch.arange(16)[:, None] >> torch.arange(4) & 1).bool().repeat(625, 1)
    got = check_keep(scores, valid, n, 4)
    assert torch.equal(got.sum(-1), valid.sum(-1).clamp(max=n))


def test_ties_by_name() -> None:
    """Four equal scores keep the first two; an equal score further left wins over one right."""
    all_valid = torch.ones(4, dtype=torch.bool)
    for scores, want in [
        ([1.0, 1.0, 1.0, 1.0], [True, True, False, False]),
        ([0.0, 1.0, 1.0, 1.0], [False, True, True, False]),
        ([1.0, 0.0, 0.0, 0.0], [True, True, False, False]),
        ([-5.0, 3.0, -1.0, -1.0], [False, True, True, False]),  # signed, not magnitude
        ([-0.0, 0.0, -0.0, 0.0], [True, True, False, False]),
    ]:
        got = reference.nm_keep(torch.tensor(scores), all_valid, 2, 4)
        assert got.tolist() == want, scores


def test_valid_keys_outrank_invalid_ones() -> None:
    """A valid score of -inf is still a valid token: an invalid slot never takes its place."""
    scores = torch.tensor([[9.0, 9.0, -INF, -INF], [9.0, -INF, 9.0, 1.0]])
    valid = torch.tensor([[False, False, True, True], [False, True, False, True]])
    assert check_keep(scores, valid, 2, 4).tolist() == valid.tolist()


@pytest.mark.parametrize(("n", "m"), [(4, 8), (2, 8), (1, 4)])
def test_every_valid_set_of_larger_groups(n: int, m: int) -> None:
    """All valid sets of a group, with scores that tie often."""
    generator = torch.Generator().manual_seed(m)
    valid = (torch.arange(1 << m)[:, None] >> torch.arange(m) & 1).bool().repeat(4, 1)
    scores = torch.randint(-2, 3, valid.shape, generator=generator).float()
    got = check_keep(scores, valid, n, m)
    assert torch.equal(got.sum(-1), valid.sum(-1).clamp(max=n))


@pytest.mark.parametrize("keys", range(1, 18))
@pytest.mark.parametrize(("n", "m"), [(2, 4), (4, 8)])
def test_cut_groups(keys: int, n: int, m: int) -> None:
    """Groups lie at absolute positions; causal edge and sequence end cut them short."""
    generator = torch.Generator().manual_seed(keys)
    scores = torch.randint(-3, 4, (2, 3, keys, keys), generator=generator).float()
    causal = torch.ones(keys, keys, dtype=torch.bool).tril()
    check_keep(scores, causal, n, m)
    check_keep(scores, causal[None, None], n, m)


def test_dense_keys_compete_and_stay() -> None:
    """A dense key takes a place in its group if it ranks, and stays if it does not."""
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
    dense = torch.tensor([True, False, False, False])
    valid = torch.ones(4, dtype=torch.bool)
    got = check_keep(scores, valid, 2, 4, dense)
    assert got.tolist() == [[True, True, False, False], [True, False, True, True]]
    # Dense and not valid: dropped like any other masked key.
    assert not check_keep(scores, torch.zeros(4, dtype=torch.bool), 2, 4, dense).any()


@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (0, 64), (1, 3), (5, 1), (4, 0), (0, 7)])
def test_sink_and_recent_window(sink: int, recent: int) -> None:
    """dense() is the first `sink` keys and those with 0 <= q_pos - k_pos < `recent`."""
    queries, keys = 9, 21
    rule = reference.Sparsity(2, 4, dense_sink_tokens=sink, dense_recent_tokens=recent)
    got = rule.dense(torch.arange(keys - queries, keys), torch.arange(keys))
    want = oracle.dense_keys([keys - queries], queries, keys, sink, recent)
    np.testing.assert_array_equal(np.broadcast_to(got.numpy(), want.shape), want)


def test_default_window_is_64() -> None:
    """numerics.md: sink 0 and recent 64, so a length of 64 exercises no sparsity at all."""
    default = reference.Sparsity()
    assert (default.n, default.m) == (2, 4)
    assert (default.dense_sink_tokens, default.dense_recent_tokens) == (0, 64)
    assert not default.sparse_decode


# --- attention


class Case:
    """Operands of one attention call, quantized by the package, and the oracle's arguments."""

    def __init__(
        self,
        *,
        batch: int = 1,
        heads: int = 2,
        queries: int = 24,
        keys: int = 40,
        absorbed: bool = False,
        nope: int = 32,
        rope: int = 16,
        v_width: int = 24,
        q_format: str = "none",
        k_format: str = "none",
        v_format: str = "none",
        spread: float = 1.0,
        present: np.ndarray | None = None,
        exact: bool = False,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        kv_heads = 1 if absorbed else heads
        width = nope + rope
        self.q = rng.normal(size=(batch, heads, queries, width)).astype(np.float32) * spread
        self.k = rng.normal(size=(batch, kv_heads, keys, width)).astype(np.float32)
        self.k[..., nope:] *= 3
        self.v = rng.normal(size=(batch, kv_heads, keys, v_width)).astype(np.float32)
        self.v += rng.normal(size=v_width).astype(np.float32)
        amax_q, amax_k = ((5.0, 4.0), (3.5, 11.0)) if absorbed else ((4.5,), (11.0,))
        if exact:
            # Global scales that are powers of two and block maxima close to amax: Q.K is exact in
            # float32, and the bound stays tight at real widths.
            amax_q, amax_k = (5.25,) * len(amax_q), (5.25,) * len(amax_k)
            for x in (self.q, self.k):
                x[:] = rng.uniform(-1, 1, size=x.shape) ** 3 * 5.25
                x[..., ::16] = rng.choice([-5.25, 4.0, 5.25], size=x[..., ::16].shape)
        self.present = np.ones((batch, keys), dtype=bool) if present is None else present
        self.scale = width**-0.5
        self.segments = (nope, rope)
        self.formats = {"q": q_format, "k": k_format, "v": v_format}
        # In the absorbed form latent and rope part have an amax each.
        self.how = {
            "q": oracle.Operand(q_format, amax_q, self.segments),
            "k": oracle.Operand(k_format, amax_k, self.segments),
            "v": oracle.Operand(v_format, (4.0,)),
        }
        self.absorbed = absorbed

    def quantized(self) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """q parts, k parts and v by the package; one part projected, two absorbed."""
        here = torch.from_numpy(self.present)[:, None, :, None]
        k = torch.from_numpy(self.k).masked_fill(~here, 0.0)
        v = torch.from_numpy(self.v).masked_fill(~here, 0.0)
        v = reference.quantize_dequantize(v, FORMATS[self.formats["v"]], 4.0, axis=-2)
        parts: dict[str, list[Tensor]] = {}
        for name, x in (("q", torch.from_numpy(self.q)), ("k", k)):
            fmt, amax = FORMATS[self.formats[name]], self.how[name].amax
            if self.absorbed:
                split = x.split(list(self.segments), dim=-1)
                parts[name] = [
                    reference.quantize_dequantize(part, fmt, a)
                    for part, a in zip(split, amax, strict=True)
                ]
            else:
                parts[name] = [
                    reference.quantize_dequantize(x, fmt, amax[0], segments=self.segments)
                ]
        return parts["q"], parts["k"], v

    def oracle(self, p_format: str, **kwargs: object) -> tuple[oracle.Result, oracle.Bound]:
        result = oracle.attention(
            self.q,
            self.k,
            self.v,
            scale=self.scale,
            present=self.present,
            q_how=self.how["q"],
            k_how=self.how["k"],
            v_how=self.how["v"],
            p_format=p_format,
            **kwargs,  # type: ignore[arg-type]
        )
        here = self.present[:, None, :, None]
        q = oracle.quantize_features(self.q, self.how["q"])
        k = oracle.quantize_features(np.where(here, self.k, np.float32(0)), self.how["k"])
        return result, oracle.float32_bound(result, q, k, self.scale, p_format)


def quantizer(name: str) -> Callable[[Tensor], Tensor] | None:
    if name == "none":
        return None
    return lambda p: reference.quantize_dequantize_p(p, FORMATS[name])


def compare(
    got: tuple[Tensor, Tensor, Tensor | None], result: oracle.Result, bound: oracle.Bound
) -> None:
    """Every element within its bound; P equal except where float32 may cross a tie."""
    assert oracle.reference_margin(result) > 1e-4, "M itself is undecided: choose another seed"
    out, lse, p = got
    assert out.dtype == lse.dtype == torch.float32
    assert out.shape == result.out.shape
    assert lse.shape == result.lse.shape
    error = np.abs(out.double().numpy() - result.out)
    worst = np.unravel_index(np.nanargmax(error - bound.out), error.shape)
    assert (error <= bound.out).all(), (
        f"out{[int(i) for i in worst]}: got {out.numpy()[worst]}, want {result.out[worst]}, "
        f"bound {bound.out[worst]}"
    )
    empty = np.isneginf(result.lse)
    np.testing.assert_array_equal(np.isneginf(lse.numpy()), empty)
    assert (out.numpy()[empty] == 0).all()
    lse_error = np.abs(np.where(empty, 0, lse.double().numpy()) - np.where(empty, 0, result.lse))
    assert (lse_error <= bound.lse).all(), (lse_error.max(), bound.lse.max())
    # The bound says something: almost all decisions are forced, what float32 adds is small.
    assert bound.open_decisions <= max(4, 0.005 * bound.elements)
    assert np.median(bound.out) < 1e-3
    assert bound.lse.max() < 1e-3
    if p is None:
        return
    denominator = result.p.sum(-1, keepdims=True)
    denominator = np.where(denominator == 0, 1.0, denominator)
    slack = 1 + 2 * (bound.lse[..., None] + 1e-6)
    p64 = p.double().numpy() * denominator
    assert (p64 <= bound.p_upper * slack).all()
    assert (p64 >= bound.p_lower / slack).all()


ALL_FORMATS = ["none", "fp8", "nvfp4"]


@pytest.mark.parametrize("absorbed", [False, True], ids=["projected", "absorbed"])
@pytest.mark.parametrize("p_format", ALL_FORMATS)
@pytest.mark.parametrize("others", ALL_FORMATS)
def test_attention(absorbed: bool, p_format: str, others: str) -> None:
    """Both forms, causal with a cached prefix, every pairing of P's format with the others'."""
    case = Case(absorbed=absorbed, q_format=others, k_format=others, v_format=others, seed=1)
    q, k, v = case.quantized()
    got = reference.attention(
        q,
        k,
        v,
        scale=case.scale,
        causal=True,
        quantize_p=quantizer(p_format),
        return_probabilities=True,
    )
    compare(got, *case.oracle(p_format, causal=True))


@pytest.mark.parametrize("fmt", [("nvfp4", "none", "fp8"), ("fp8", "nvfp4", "none")])
@pytest.mark.parametrize("absorbed", [False, True], ids=["projected", "absorbed"])
def test_attention_mixed_formats(absorbed: bool, fmt: tuple[str, str, str]) -> None:
    """Any format for each operand."""
    case = Case(absorbed=absorbed, q_format=fmt[0], k_format=fmt[1], v_format=fmt[2], seed=2)
    q, k, v = case.quantized()
    got = reference.attention(q, k, v, scale=case.scale, causal=True, quantize_p=quantizer("nvfp4"))
    compare(got, *case.oracle("nvfp4", causal=True))


@pytest.mark.parametrize(
    ("absorbed", "widths", "queries", "keys"),
    [
        (False, (128, 64, 128), 33, 33),
        (True, (512, 64, 512), 1, 100),
        (True, (512, 64, 512), 3, 49),
    ],
)
def test_attention_at_real_widths(
    absorbed: bool, widths: tuple[int, int, int], queries: int, keys: int
) -> None:
    """DeepSeek's geometry: 192/128 projected, 512+64/512 absorbed with one shared latent."""
    case = Case(
        absorbed=absorbed,
        nope=widths[0],
        rope=widths[1],
        v_width=widths[2],
        queries=queries,
        keys=keys,
        q_format="nvfp4",
        k_format="nvfp4",
        v_format="nvfp4",
        exact=True,
        seed=3,
    )
    q, k, v = case.quantized()
    got = reference.attention(
        q,
        k,
        v,
        scale=case.scale,
        causal=True,
        quantize_p=quantizer("nvfp4"),
        return_probabilities=True,
    )
    compare(got, *case.oracle("nvfp4", causal=True))


@pytest.mark.parametrize("spread", [0.01, 3.0, 8.0])
def test_attention_flat_and_peaked_rows(spread: float) -> None:
    """From rows that are nearly uniform to rows where one key has all the mass."""
    case = Case(queries=8, keys=200, spread=spread, v_format="nvfp4", seed=5)
    q, k, v = case.quantized()
    got = reference.attention(
        q,
        k,
        v,
        scale=case.scale,
        causal=True,
        quantize_p=quantizer("nvfp4"),
        return_probabilities=True,
    )
    compare(got, *case.oracle("nvfp4", causal=True))


@pytest.mark.parametrize("queries", [1, 3, 5])
def test_more_queries_than_keys(queries: int) -> None:
    """Bottom-right alignment: query 5 over keys 3 leaves the first two rows without a key."""
    case = Case(queries=queries, keys=3, q_format="nvfp4", v_format="nvfp4", seed=6)
    q, k, v = case.quantized()
    got = reference.attention(q, k, v, scale=case.scale, causal=True, quantize_p=quantizer("nvfp4"))
    result, bound = case.oracle("nvfp4", causal=True)
    compare(got, result, bound)
    assert np.isneginf(result.lse).sum() == 2 * max(0, queries - 3)


PADDING = {
    "right": [[True] * 40, [True] * 13 + [False] * 27, [True] * 32 + [False] * 8],
    "left": [[True] * 40, [False] * 27 + [True] * 13, [False] * 8 + [True] * 32],
    "empty": [[True] * 40, [False] * 40, [False] * 16 + [True] * 24],
}


@pytest.mark.parametrize("side", list(PADDING))
@pytest.mark.parametrize("fill", [NAN, 1e30])
def test_padding(side: str, fill: float) -> None:
    """Absent slots, whatever they hold, count for nothing; V's blocks lie at absolute positions.

    V is passed with absent slots zeroed, as every caller must; K may hold NaN there.
    """
    present = np.array(PADDING[side])
    case = Case(batch=3, present=present, q_format="nvfp4", v_format="nvfp4", seed=7)
    case.k[~np.broadcast_to(present[:, None], case.k.shape[:3])] = fill
    case.v[~np.broadcast_to(present[:, None], case.v.shape[:3])] = fill
    q, _, v = case.quantized()
    k = [torch.from_numpy(case.k)]
    allowed = torch.from_numpy(present)[:, None, None, :]
    got = reference.attention(
        q, k, v, scale=case.scale, allowed=allowed, causal=True, quantize_p=quantizer("nvfp4")
    )
    result, bound = case.oracle("nvfp4", causal=True)
    compare(got, result, bound)


def test_first_sixteen_keys_masked() -> None:
    """A whole block masked: later keys survive, the first rows are empty."""
    case = Case(queries=40, v_format="nvfp4", seed=8)
    visible = np.ones((1, 1, 40, 40), dtype=bool)
    visible[..., :16] = False
    q, k, v = case.quantized()
    got = reference.attention(
        q,
        k,
        v,
        scale=case.scale,
        allowed=torch.from_numpy(visible),
        causal=True,
        quantize_p=quantizer("nvfp4"),
    )
    result, bound = case.oracle("nvfp4", causal=True, visible=visible)
    compare(got, result, bound)
    assert np.isneginf(result.lse[..., :16]).all()
    assert np.isfinite(result.lse[..., 16:]).all()


def test_no_key_and_no_query() -> None:
    """Zero keys: output 0, LSE -inf. Zero queries: empty results of the right shape."""
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 0, 8), torch.randn(1, 2, 0, 5)
    out, lse, _ = reference.attention([q], [k], v, scale=1.0)
    assert torch.equal(out, torch.zeros(1, 2, 3, 5))
    assert (lse == -INF).all()
    out, lse, _ = reference.attention(
        [q[:, :, :0]], [torch.randn(1, 2, 4, 8)], torch.randn(1, 2, 4, 5), scale=1.0
    )
    assert out.shape == (1, 2, 0, 5)
    assert lse.shape == (1, 2, 0)


@pytest.mark.parametrize("absorbed", [False, True], ids=["projected", "absorbed"])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (4, 8)])
@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (2, 5), (0, 64)])
def test_sparse_attention(absorbed: bool, n: int, m: int, sink: int, recent: int) -> None:
    """N:M with sink and recent window, after causal and padding masks; rows renormalize."""
    present = np.ones((2, 90), dtype=bool)
    present[1, 71:] = False
    case = Case(
        batch=2,
        absorbed=absorbed,
        queries=30,
        keys=90,
        q_format="nvfp4",
        k_format="nvfp4",
        v_format="nvfp4",
        present=present,
        seed=9,
    )
    q, k, v = case.quantized()
    rule = reference.Sparsity(n, m, dense_sink_tokens=sink, dense_recent_tokens=recent)
    got = reference.attention(
        q,
        k,
        v,
        scale=case.scale,
        allowed=torch.from_numpy(present)[:, None, None, :],
        causal=True,
        quantize_p=quantizer("nvfp4"),
        sparsity=rule,
        return_probabilities=True,
    )
    dense_result, _ = case.oracle("nvfp4", causal=True)
    visible = np.isfinite(dense_result.scores)
    # float32 scores are good to about 1e-5 here: no choice hangs on it.
    assert oracle.nm_margin(dense_result.scores, visible, n, m) > 2e-5, "choose another seed"
    result, bound = case.oracle("nvfp4", causal=True, sparsity=oracle.Sparsity(n, m, sink, recent))
    compare(got, result, bound)
    assert (np.isfinite(result.scores) != visible).any(), "no score was dropped"


def test_sparse_attention_with_equal_scores() -> None:
    """Scores that tie exactly (small integers): the lower index stays, in attention too."""
    rng = np.random.default_rng(10)
    q = torch.from_numpy(rng.integers(-2, 3, size=(1, 2, 24, 8)).astype(np.float32))
    k = torch.from_numpy(rng.integers(-1, 2, size=(1, 2, 24, 8)).astype(np.float32))
    v = torch.from_numpy(rng.normal(size=(1, 2, 24, 16)).astype(np.float32))
    rule = reference.Sparsity(2, 4, dense_recent_tokens=0)
    _, _, p = reference.attention(
        [q], [k], v, scale=0.5, causal=True, sparsity=rule, return_probabilities=True
    )
    assert p is not None
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k).double().numpy()
    causal = np.tril(np.ones((24, 24), dtype=bool))
    want = oracle.nm_keep(scores, causal, 2, 4)
    np.testing.assert_array_equal(p.numpy() > 0, want)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_nan_score_reaches_the_output(sparse: bool) -> None:
    """A NaN in Q stays NaN in its row's output, sparse or not: never a silently dropped key."""
    case = Case(queries=12, keys=12, seed=11)
    q, k, v = case.quantized()
    q[0][0, 0, 5, 3] = NAN
    sparsity = reference.Sparsity(2, 4, dense_recent_tokens=0) if sparse else None
    out, lse, _ = reference.attention(q, k, v, scale=case.scale, causal=True, sparsity=sparsity)
    nan_rows = out.isnan().any(-1)
    assert out[0, 0, 5].isnan().all()
    assert lse[0, 0, 5].isnan()
    assert int(nan_rows.sum()) == 1


@pytest.mark.parametrize("p_format", ["none", "nvfp4"])
def test_bias_and_offsets(p_format: str) -> None:
    """An additive bias joins the scores; each sequence has its own position of query 0."""
    case = Case(batch=2, queries=7, keys=40, v_format="nvfp4", seed=12)
    q, k, v = case.quantized()
    bias = np.random.default_rng(12).normal(size=(2, 1, 7, 40)).astype(np.float32)
    offsets = [33, 11]
    sparsity = oracle.Sparsity(2, 4, 1, 3)
    got = reference.attention(
        q,
        k,
        v,
        scale=case.scale,
        causal=True,
        bias=torch.from_numpy(bias),
        query_positions=torch.tensor(offsets)[:, None, None] + torch.arange(7),
        quantize_p=quantizer(p_format),
        sparsity=reference.Sparsity(2, 4, 1, 3),
        return_probabilities=True,
    )
    result, bound = case.oracle(
        p_format, causal=True, bias=bias.astype(np.float64), offsets=offsets, sparsity=sparsity
    )
    compare(got, result, bound)


def test_rows_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many rows are computed at a time changes nothing but float32 rounding."""
    case = Case(batch=2, queries=9, keys=40, v_format="nvfp4", seed=13)
    q, k, v = case.quantized()
    bias = np.random.default_rng(13).normal(size=(1, 1, 9, 40)).astype(np.float32)
    visible = np.random.default_rng(14).uniform(size=(2, 1, 9, 40)) > 0.2
    result, bound = case.oracle(
        "nvfp4",
        causal=True,
        bias=bias.astype(np.float64),
        visible=visible,
        sparsity=oracle.Sparsity(2, 4, 1, 3),
    )
    for scores_at_a_time in (1, 3 * 2 * 2 * 40):
        monkeypatch.setattr(reference, "_MAX_SCORES_PER_CHUNK", scores_at_a_time)
        got = reference.attention(
            q,
            k,
            v,
            scale=case.scale,
            causal=True,
            bias=torch.from_numpy(bias),
            allowed=torch.from_numpy(visible),
            quantize_p=quantizer("nvfp4"),
            sparsity=reference.Sparsity(2, 4, 1, 3),
            return_probabilities=True,
        )
        compare(got, result, bound)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_lse_against_logsumexp(sparse: bool) -> None:
    """LSE is the natural-log sum over *unquantized* scores that are kept, in fp32."""
    case = Case(queries=20, keys=70, q_format="nvfp4", k_format="nvfp4", spread=4.0, seed=15)
    q, k, v = case.quantized()
    rule = reference.Sparsity(2, 4, dense_recent_tokens=6) if sparse else None
    _, lse, _ = reference.attention(
        q, k, v, scale=case.scale, causal=True, quantize_p=quantizer("nvfp4"), sparsity=rule
    )
    scores = case.scale * (q[0].double() @ k[0].double().mT)
    seen = torch.ones(20, 70, dtype=torch.bool).tril(50)
    if rule is not None:
        dense = torch.from_numpy(oracle.dense_keys([50], 20, 70, 0, 6))
        seen = torch.from_numpy(oracle.nm_keep(scores.numpy(), seen.numpy(), 2, 4, dense.numpy()))
    want = scores.masked_fill(~seen, -INF).logsumexp(-1)
    torch.testing.assert_close(lse.double(), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("p_format", ["none", "nvfp4"])
@pytest.mark.parametrize("tile", [16, 32, 64])
def test_running_maximum(p_format: str, tile: int) -> None:
    """`p_tile_tokens`: M is the running maximum over tiles, as an online softmax has it."""
    case = Case(queries=6, keys=90, v_format="nvfp4", spread=2.0, seed=16)
    q, k, v = case.quantized()
    out, lse, _ = reference.attention(
        q, k, v, scale=case.scale, causal=True, quantize_p=quantizer(p_format), p_tile_tokens=tile
    )
    result, bound = case.oracle(p_format, causal=True)
    want, want_lse = oracle.attend_running_maximum(result.scores, result.v, p_format, tile)
    # Ties of P lie elsewhere than for the integer M, so the fp32 bound is taken without them and
    # the few elements whose decision flips are counted instead.
    error = np.abs(out.double().numpy() - want)
    assert (error > 2e-4).mean() <= 0.02
    assert error.max() < 0.05
    assert np.abs(lse.double().numpy() - want_lse).max() <= bound.lse.max()


# --- merging and invariance


def test_merge_equals_one_pass() -> None:
    """Keys split in two and merged equal one pass to 1e-5, for every border."""
    case = Case(queries=5, keys=64, spread=3.0, seed=17)
    q, k, v = case.quantized()
    whole, whole_lse, _ = reference.attention(q, k, v, scale=case.scale)
    for border in (1, 13, 16, 32, 63):
        parts = [
            reference.attention(q, [k[0][:, :, part]], v[:, :, part], scale=case.scale)[:2]
            for part in (slice(0, border), slice(border, 64))
        ]
        out, lse = reference.merge(*parts[0], *parts[1])
        assert out.dtype == lse.dtype == torch.float32
        torch.testing.assert_close(out, whole, rtol=0, atol=1e-5)
        torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-5)


def test_merge_against_the_oracle() -> None:
    """Weights e^lse, far apart, equal and empty; an empty part's output is not looked at."""
    rng = np.random.default_rng(18)
    lse_a = np.array([0.0, 5.0, -200.0, 300.0, -np.inf, 1.0, -np.inf, 88.0])
    lse_b = np.array([0.0, -5.0, -201.0, 299.0, 2.0, -np.inf, -np.inf, -88.0])
    out_a, out_b = rng.normal(size=(8, 3)), rng.normal(size=(8, 3))
    want, want_lse = oracle.merge([(out_a, lse_a), (out_b, lse_b)])
    out_a[[4, 6]], out_b[[5, 6]] = np.nan, np.nan
    want[6] = 0.0
    args = [torch.from_numpy(a.astype(np.float32)) for a in (out_a, lse_a, out_b, lse_b)]
    out, lse = reference.merge(*args)
    np.testing.assert_allclose(out.numpy(), want, rtol=0, atol=2e-5)
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=2.0**-22, atol=1e-6)
    swapped, _ = reference.merge(args[2], args[3], args[0], args[1])
    torch.testing.assert_close(swapped, out, rtol=0, atol=1e-6)


def test_merge_rows_masked_in_both() -> None:
    """Both parts empty: output 0, LSE -inf, no NaN."""
    out, lse = reference.merge(
        torch.full((2, 3), NAN), torch.full((2,), -INF), torch.ones(2, 3), torch.full((2,), -INF)
    )
    assert torch.equal(out, torch.zeros(2, 3))
    assert (lse == -INF).all()


def in_splits(
    scores: Tensor, v: Tensor, splits: list[int], p_tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """Attention with given log2 scores, computed over key ranges and merged.

    Query i has the one-hot i and K holds the scores, so that every product is exact; the softmax
    scale 1/log2 e makes float32 log2 scores out of them without rounding.
    """
    queries = scores.shape[0]
    q = torch.eye(queries)[None, None]
    result: tuple[Tensor, Tensor] | None = None
    start = 0
    for width in splits:
        part = slice(start, start + width)
        out, lse, _ = reference.attention(
            [q],
            [scores.t()[None, None, part]],
            v[None, None, part],
            scale=1 / reference.LOG2_E,
            quantize_p=quantizer("nvfp4"),
            p_tile_tokens=p_tile,
        )
        result = (out, lse) if result is None else reference.merge(*result, out, lse)
        start += width
    assert result is not None
    assert start == scores.shape[1]
    return result[0][0, 0], result[1][0, 0]


def invariance_bound(scores: np.ndarray, v: np.ndarray, parts: int) -> tuple[np.ndarray, float]:
    """Ruling 4's bound on the difference of two splittings, and the largest low mass of a row.

    First term: float32 accumulation, both sides, any order: 2 gamma(keys + 8 parts + 8) of
    sum p'|v| / sum p, with 4 u for each of exp2, log2 and exp of the merge's weights. Second term:
    in blocks with maximum below 2^-14 of 2^M both p' lie in [0, 2 p] (E2M1 rounding raises a value
    by the factor 2 at most, from just above 1/4 to 1/2), so they differ by 2 p at most.
    """
    u = 2.0**-24
    top = np.ceil(scores.max(-1, keepdims=True))
    p = np.exp2(scores - top)
    low = blocks.block_maxima(p.astype(np.float32)) < 2.0**-14
    total = p.sum(-1, keepdims=True)
    count = scores.shape[1] + 8 * parts + 8
    # A merge takes exp(lse_a - lse): an lse of size L carries L u of absolute error.
    lse = np.abs(np.log(total) + top * math.log(2))
    first = 2 * (count + parts * (16 + 4 * lse)) * u / total * (1.1 * p @ np.abs(v))
    second = 2 / total * (np.where(low, p, 0) @ np.abs(v))
    return first + second, float((np.where(low, p, 0).sum(-1) / total[:, 0]).max())


def dyadic_scores(spread: float, rows: int, keys: int, seed: int) -> np.ndarray:
    """log2 scores on a grid of 1/64, so that score - M is exact whatever M is."""
    rng = np.random.default_rng(seed)
    return np.asarray(np.round(rng.normal(size=(rows, keys)) * spread * 64) / 64)


SPLITS = [[512, 512], [1008, 16], [16, 1008], [16] * 64, [64] * 16, [336, 336, 352]]


@pytest.mark.parametrize("spread", [1.0, 3.0, 8.0])
def test_splits_do_not_change_p(spread: float) -> None:
    """M = ceil(row maximum) makes quantized P, and so the output, independent of the split."""
    scores = dyadic_scores(spread, 4, 1024, seed=int(spread))
    v = np.random.default_rng(20).normal(size=(1024, 8)).astype(np.float32)
    s32, v32 = torch.from_numpy(scores).float(), torch.from_numpy(v)
    whole, whole_lse = in_splits(s32, v32, [1024])
    for splits in SPLITS:
        out, lse = in_splits(s32, v32, splits)
        bound, mass = invariance_bound(scores, v.astype(np.float64), len(splits))
        error = (out - whole).abs().double().numpy()
        assert (error <= bound).all(), (splits, error.max(), bound.min())
        torch.testing.assert_close(lse, whole_lse, rtol=0, atol=2e-5)
        assert mass < (1e-6 if spread < 8 else 0.05)


def test_running_maximum_is_not_invariant() -> None:
    """Negative control: with the running maximum the same comparison fails by far."""
    scores = dyadic_scores(1.0, 4, 1024, seed=1)
    v = np.random.default_rng(20).normal(size=(1024, 8)).astype(np.float32)
    s32, v32 = torch.from_numpy(scores).float(), torch.from_numpy(v)
    tiles = [in_splits(s32, v32, [1024], p_tile=tile)[0] for tile in (16, 1024)]
    bound, _ = invariance_bound(scores, v.astype(np.float64), 1)
    assert ((tiles[0] - tiles[1]).abs().double().numpy() > 3 * bound).any()


def test_splits_with_a_sink_at_128k() -> None:
    """A sink 20 log2 units up, 131,072 keys, V = 1: the rest may flush, by the mass stated.

    The rest holds 131,071 / (131,071 + 2^20) of the mass, 11%, in blocks whose maximum is 2^-20:
    the second term of the bound carries it, and must, for the outputs do differ.
    """
    keys = 1 << 17
    scores = np.zeros((1, keys))
    scores[0, 0] = 20.0
    v = np.ones((keys, 1), dtype=np.float32)
    s32, v32 = torch.from_numpy(scores).float(), torch.from_numpy(v)
    outs = [in_splits(s32, v32, [keys // n] * n)[0] for n in (1, 2, 8)]
    bound, mass = invariance_bound(scores, v.astype(np.float64), 8)
    assert mass == pytest.approx((keys - 16) / (keys - 1 + 2.0**20), rel=1e-6)
    for out in outs[1:]:
        assert abs(float(out - outs[0])) <= bound[0, 0]
    assert abs(float(outs[2] - outs[0])) > 0.05
