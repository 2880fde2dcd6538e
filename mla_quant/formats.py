"""Number formats: each fact once, as frozen records; nothing here computes on tensors.

`ElementFormat` describes the code of one number, `OperandFormat` how an attention operand is
stored: an element format plus, for block formats, the format of the block scale. Largest and
smallest magnitudes and value tables are derived from the records. Codes follow the OCP
Microscaling (MX) v1.0 and OCP 8-bit floating point v1.0 specifications.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal


@dataclass(frozen=True)
class ElementFormat:
    """One small floating-point format.

    Attributes:
        name: Lower-case OCP name.
        exponent_bits: Width of the exponent field, in bits.
        mantissa_bits: Width of the mantissa field, in bits.
        bias: Exponent bias.
        signed: Whether the top bit is a sign.
        subnormals: Whether exponent field 0 encodes subnormal numbers and zero.
        largest_code: Largest positive finite code.
        nan_code: Code of NaN, or None where the format has none.
        rounding: "nearest_even", or "up" (towards +inf), used by power-of-two scales.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    signed: bool
    subnormals: bool
    largest_code: int
    nan_code: int | None
    rounding: Literal["nearest_even", "up"]

    def value(self, code: int) -> float:
        """Value of a non-negative finite code (sign bit clear)."""
        exponent, mantissa = divmod(code, 1 << self.mantissa_bits)
        if exponent == 0 and self.subnormals:
            return float(mantissa * 2.0 ** (self.min_exponent - self.mantissa_bits))
        fraction = 1.0 + mantissa / (1 << self.mantissa_bits)
        return float(fraction * 2.0 ** (exponent - self.bias))

    def values(self) -> list[float]:
        """All non-negative finite values, by code."""
        return [self.value(code) for code in range(self.largest_code + 1)]

    @property
    def bits(self) -> int:
        """Width of a code, in bits."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value, and of the subnormal range."""
        return (1 if self.subnormals else 0) - self.bias

    @cached_property
    def max(self) -> float:
        """Largest finite value."""
        return self.value(self.largest_code)

    @cached_property
    def smallest(self) -> float:
        """Smallest positive value."""
        return self.value(1 if self.subnormals else 0)


@dataclass(frozen=True)
class OperandFormat:
    """How one attention operand is stored.

    A value is `element · block_scale · global_scale` where `block_scale` exists only with a
    `block_size`. `global_scale = amax / quant_max`, one per operand and layer, calibrated.

    Attributes:
        name: The name recipes and settings files use.
        element: Element format, or None for an operand kept in the model's dtype.
        block_size: Consecutive values along the contraction axis that share a block scale.
        scale: Format of the block scale, or None.
    """

    name: str
    element: ElementFormat | None
    block_size: int | None = None
    scale: ElementFormat | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether the format rounds values beyond the model's dtype."""
        return self.element is not None

    @cached_property
    def quant_max(self) -> float:
        """amax / global_scale: the largest magnitude in units of the global scale."""
        if self.element is None:
            raise ValueError(f"format {self.name!r} has no scale")
        return self.element.max * (self.scale.max if self.scale else 1.0)

    @property
    def bits_per_value(self) -> float:
        """Storage of one value including its share of the block scale, in bits."""
        if self.element is None:
            raise ValueError(f"format {self.name!r} is stored in the model's dtype")
        scale_bits = self.scale.bits / self.block_size if self.scale and self.block_size else 0.0
        return self.element.bits + scale_bits


E2M1 = ElementFormat("e2m1", 2, 1, 1, True, True, 0x7, None, "nearest_even")
E4M3 = ElementFormat("e4m3", 4, 3, 7, True, True, 0x7E, 0x7F, "nearest_even")
UE8M0 = ElementFormat("ue8m0", 8, 0, 127, False, False, 0xFE, 0xFF, "up")

NVFP4 = OperandFormat("nvfp4", E2M1, block_size=16, scale=E4M3)
FP8 = OperandFormat("fp8", E4M3)
NONE = OperandFormat("none", None)

FORMATS: dict[str, OperandFormat] = {fmt.name: fmt for fmt in (NONE, FP8, NVFP4)}
"""Operand formats by the name that recipes and settings files use."""

ELEMENTS: dict[str, ElementFormat] = {fmt.name: fmt for fmt in (E2M1, E4M3, UE8M0)}
"""Element formats by name."""
