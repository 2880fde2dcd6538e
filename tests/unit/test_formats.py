"""Element and operand formats: every code, every 16-bit input, every tie.

Numeric contract: rounding is to nearest, ties to the even code, saturating; NaN stays NaN, Inf
saturates, -0 keeps its sign; UE8M0 rounds up to a power of two. Results are compared bit for bit
with two oracles that share nothing: a hand-typed table and `ml_dtypes` (and `gfloat` for codes).
"""

from __future__ import annotations

import ast
from pathlib import Path

import gfloat
import numpy as np
import pytest
import torch
from gfloat.formats import format_info_ocp_e2m1, format_info_ocp_e4m3, format_info_ocp_e8m0

from mla_quant import formats, reference
from mla_quant.errors import MlaQuantError
from tests.oracles import codes as oracle

ELEMENTS = {"e2m1": formats.E2M1, "e4m3": formats.E4M3}
ROUND = {"e2m1": oracle.round_e2m1, "e4m3": oracle.round_e4m3, "ue8m0": oracle.round_ue8m0}
ENCODE = {"e2m1": oracle.encode_e2m1, "e4m3": oracle.encode_e4m3, "ue8m0": oracle.encode_ue8m0}
DECODE = {"e2m1": oracle.decode_e2m1, "e4m3": oracle.decode_e4m3, "ue8m0": oracle.decode_ue8m0}
GFLOAT = {
    "e2m1": format_info_ocp_e2m1,
    "e4m3": format_info_ocp_e4m3,
    "ue8m0": format_info_ocp_e8m0,
}
MAGNITUDES = {"e2m1": oracle.E2M1_MAGNITUDES, "e4m3": oracle.E4M3_MAGNITUDES}
ALL_16_BIT = np.arange(1 << 16, dtype=np.uint16)


def bits(x: object) -> np.ndarray:
    """fp32 bit patterns, every NaN made one: its sign and payload are nobody's contract."""
    x32 = np.array(x.numpy() if isinstance(x, torch.Tensor) else x, dtype=np.float32)
    x32[np.isnan(x32)] = np.float32(np.nan)
    return x32.view(np.uint32)


def assert_same_bits(got: object, want: object, inputs: object) -> None:
    different = np.flatnonzero(bits(got).ravel() != bits(want).ravel())
    if different.size:
        i = different[0]
        x, g, w = (np.asarray(a, dtype=np.float32).ravel()[i] for a in (inputs, got, want))
        pytest.fail(f"{different.size} differ; first: {x!r} ({float(x).hex()}) -> {g!r}, not {w!r}")


def all_values(dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(ALL_16_BIT.view(np.int16).copy()).view(dtype)


# --- the formats themselves


def test_oracles_do_not_import_the_package() -> None:
    """An oracle that uses the code under test proves nothing."""
    for path in (Path(__file__).parents[1] / "oracles").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not [n for n in names if n.split(".")[0] in ("mla_quant", "torch")], path


@pytest.mark.parametrize("name", ["e2m1", "e4m3", "ue8m0"])
def test_every_code_decodes(name: str) -> None:
    """Each code has the value of the hand-typed table and of gfloat; NaN codes are NaN."""
    count = 16 if name == "e2m1" else 256
    codes = torch.arange(count, dtype=torch.int32).to(torch.uint8)
    got = reference.decode(codes, formats.ELEMENTS[name])
    assert got.dtype == torch.float32
    assert got.shape == codes.shape
    assert_same_bits(got, DECODE[name](np.arange(count)), codes)
    assert_same_bits(got, [gfloat.decode_float(GFLOAT[name], i).fval for i in range(count)], codes)


@pytest.mark.parametrize("name", ["e2m1", "e4m3", "ue8m0"])
def test_every_finite_code_survives_decode_and_encode(name: str) -> None:
    """encode(decode(c)) = c, -0 included; NaN comes back as a NaN code."""
    element = formats.ELEMENTS[name]
    codes = torch.arange(1 << element.bits, dtype=torch.int32).to(torch.uint8)
    values = reference.decode(codes, element)
    finite = ~values.isnan()
    torch.testing.assert_close(
        reference.encode(values[finite], element), codes[finite], rtol=0, atol=0
    )
    if not finite.all():
        again = reference.decode(reference.encode(values[~finite], element), element)
        assert again.isnan().all()


def test_derived_facts() -> None:
    """Largest, smallest and positive values follow from the records."""
    assert (formats.E2M1.max, formats.E2M1.smallest) == (6.0, 0.5)
    assert (formats.E4M3.max, formats.E4M3.smallest) == (448.0, 2.0**-9)
    assert (formats.UE8M0.max, formats.UE8M0.smallest) == (2.0**127, 2.0**-127)
    assert formats.E2M1.values() == oracle.E2M1_MAGNITUDES.tolist()
    assert formats.E4M3.values() == oracle.E4M3_MAGNITUDES.tolist()
    assert formats.UE8M0.values() == oracle.UE8M0_VALUES.tolist()
    elements = [formats.ELEMENTS[name] for name in ("e2m1", "e4m3", "ue8m0")]
    assert [element.bits for element in elements] == [4, 8, 8]
    assert [element.min_exponent for element in elements] == [0, -6, -127]


def test_operand_formats() -> None:
    """NVFP4 is E2M1 in blocks of 16 with E4M3 scales, FP8 plain E4M3; names are the keys."""
    assert set(formats.FORMATS) == {"nvfp4", "fp8", "none"}
    assert all(fmt.name == name for name, fmt in formats.FORMATS.items())
    assert formats.NVFP4.element is formats.E2M1
    assert formats.NVFP4.scale is formats.E4M3
    assert formats.NVFP4.block_size == 16
    assert formats.NVFP4.quant_max == 2688.0
    assert formats.NVFP4.bits_per_value == 4.5
    assert formats.FP8.element is formats.E4M3
    assert formats.FP8.scale is None
    assert formats.FP8.block_size is None
    assert formats.FP8.quant_max == 448.0
    assert formats.FP8.bits_per_value == 8.0
    assert not formats.NONE.is_quantized
    for fact in ("quant_max", "bits_per_value"):
        with pytest.raises(ValueError, match="none"):
            getattr(formats.NONE, fact)


# --- rounding and encoding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["e2m1", "e4m3"])
def test_all_16_bit_inputs_round(name: str, dtype: torch.dtype) -> None:
    """All 2^16 inputs, NaN, Inf, -0 and subnormals included, bit for bit against both oracles."""
    x = all_values(dtype)
    x32 = x.float().numpy()
    got = reference.round_to(x, ELEMENTS[name])
    assert got.dtype == torch.float32
    assert_same_bits(got, ROUND[name](x32), x32)
    assert_same_bits(got, oracle.round_ml_dtypes(x32, name), x32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["e2m1", "e4m3"])
def test_all_16_bit_inputs_encode(name: str, dtype: torch.dtype) -> None:
    """The same codes as both oracles for every input but NaN; NaN in E4M3 is a NaN code."""
    x = all_values(dtype)
    nan = x.isnan()
    got = reference.encode(x[~nan], ELEMENTS[name])
    assert got.dtype == torch.uint8
    x32 = x[~nan].float().numpy()
    np.testing.assert_array_equal(got.numpy(), ENCODE[name](x32))
    np.testing.assert_array_equal(got.numpy(), oracle.encode_ml_dtypes(x32, name))
    if name == "e4m3":
        assert nan.any()
        assert ((reference.encode(x[nan], formats.E4M3) & 0x7F) == 0x7F).all()


def test_nan_has_no_e2m1_code() -> None:
    """Packing NaN as E2M1 never gives a finite code: it is refused, and says how many."""
    with pytest.raises(MlaQuantError, match=r"2 of 3"):
        reference.encode(torch.tensor([1.0, float("nan"), float("nan")]), formats.E2M1)


E2M1_TIES = [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)]


@pytest.mark.parametrize(("tie", "even"), E2M1_TIES)
def test_e2m1_ties(tie: float, even: float) -> None:
    """Halfway goes to the even code; one fp32 step to either side goes to that side."""
    below, above = np.nextafter(np.float32(tie), np.float32([0, 9]))
    grid = oracle.E2M1_MAGNITUDES
    lower, upper = grid[grid < tie].max(), grid[grid > tie].min()
    x = torch.tensor([tie, -tie, below, above, -below, -above])
    want = [even, -even, lower, upper, -lower, -upper]
    assert_same_bits(reference.round_to(x, formats.E2M1), want, x)


E4M3_TIES = [
    (2.0**-10, 0.0),  # half the smallest subnormal
    (3 * 2.0**-10, 2 * 2.0**-9),
    (15 * 2.0**-10, 2.0**-6),  # the largest subnormal and the smallest normal
    (17 * 2.0**-10, 2.0**-6),
    (1.0625, 1.0),
    (1.1875, 1.25),
    (1.9375, 2.0),  # into the next binade
    (232.0, 224.0),
    (248.0, 256.0),
    (432.0, 448.0),
]


@pytest.mark.parametrize(("tie", "even"), E4M3_TIES)
def test_e4m3_ties(tie: float, even: float) -> None:
    """Ties named one by one; among them the borders of subnormals and of binades."""
    x = torch.tensor([tie, -tie])
    assert_same_bits(reference.round_to(x, formats.E4M3), [even, -even], x)


@pytest.mark.parametrize("name", ["e2m1", "e4m3"])
def test_every_tie_and_its_neighbours(name: str) -> None:
    """Every midpoint and the fp32 numbers next to it and next to every value of the grid."""
    grid = MAGNITUDES[name]
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]).astype(np.float32)
    x = np.concatenate(
        [points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(1e9))]
    )
    x = np.concatenate([x, -x])
    got = reference.round_to(torch.from_numpy(x), ELEMENTS[name])
    assert_same_bits(got, ROUND[name](x), x)
    assert_same_bits(got, oracle.round_ml_dtypes(x, name), x)


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (448.0, 0x7E),
        (464.0, 0x7E),  # halfway to the 480 that E4M3 does not have
        (465.0, 0x7E),
        (480.0, 0x7E),
        (1e3, 0x7E),
        (3.4e38, 0x7E),
        (float("inf"), 0x7E),
        (-448.0, 0xFE),
        (-465.0, 0xFE),
        (float("-inf"), 0xFE),
        (0.0, 0x00),
        (-0.0, 0x80),
        (-1e-30, 0x80),
    ],
)
def test_e4m3_saturates(x: float, code: int) -> None:
    """Past 448 everything is 448, Inf too, whatever torch's own cast does with it."""
    assert int(reference.encode(torch.tensor([x]), formats.E4M3)) == code
    want = oracle.decode_e4m3([code])
    assert_same_bits(reference.round_to(torch.tensor([x]), formats.E4M3), want, [x])


def test_ue8m0_rounds_up_to_a_power_of_two() -> None:
    """Every power of two is itself; anything above, by one fp32 step, is the next one."""
    powers = oracle.UE8M0_VALUES.astype(np.float32)
    above = np.nextafter(powers[:-1], np.float32(np.inf))
    rng = np.random.default_rng(0)
    between = (powers[:-1] * rng.uniform(1, 2, powers.size - 1)).astype(np.float32)
    x = np.concatenate([powers, above, between])
    got = reference.round_to(torch.from_numpy(x), formats.UE8M0)
    assert_same_bits(got, oracle.round_ue8m0(x), x)
    np.testing.assert_array_equal(
        reference.encode(torch.from_numpy(x), formats.UE8M0).numpy(), oracle.encode_ue8m0(x)
    )


def test_ue8m0_outside_its_range() -> None:
    """Zero and less become the smallest scale, too large ones the largest, NaN is code 0xFF."""
    x = torch.tensor([0.0, -1.0, 1e-45, 3.4e38, float("inf"), float("nan")])
    got = reference.encode(x, formats.UE8M0)
    assert got.tolist() == [0, 0, 0, 0xFE, 0xFE, 0xFF]
    assert reference.round_to(x, formats.UE8M0).isnan().tolist() == [False] * 5 + [True]


@pytest.mark.parametrize("name", ["e2m1", "e4m3"])
def test_float32_inputs_round(name: str) -> None:
    """fp32 inputs over every binade, against the table; no detour through a 16-bit type."""
    rng = np.random.default_rng(1)
    x = (rng.uniform(1, 2, 20000) * 2.0 ** rng.uniform(-14, 12, 20000)).astype(np.float32)
    x *= rng.choice(np.float32([-1, 1]), x.size)
    assert_same_bits(reference.round_to(torch.from_numpy(x), ELEMENTS[name]), ROUND[name](x), x)


@pytest.mark.parametrize(("name", "bad"), [("e2m1", 16), ("e2m1", 255), ("e4m3", 256)])
def test_codes_that_do_not_fit_are_refused(name: str, bad: int) -> None:
    """A code wider than the format is an error that names it."""
    with pytest.raises(MlaQuantError, match=str(bad)):
        reference.decode(torch.tensor([0, bad]), ELEMENTS[name])


def test_empty_tensors() -> None:
    """No element in, no element out."""
    empty = torch.empty(0, 3)
    for element in formats.ELEMENTS.values():
        assert reference.round_to(empty, element).shape == (0, 3)
        codes = reference.encode(empty, element)
        assert codes.shape == (0, 3)
        assert reference.decode(codes, element).shape == (0, 3)
