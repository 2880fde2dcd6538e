"""KV-cache record formats: each a frozen description; nothing here computes on tensors.

A record holds one token's latent and rope part. A *segment* is a run of values in one code; the
two segments of a record never share a scale. Bytes that no field covers are padding and written
as zero. Multi-byte fields are little-endian; of two 4-bit codes in a byte the even element has
the low nibble.

A format with a page footer keeps the record's first `row_bytes` bytes of all tokens of a page
together, then the remaining bytes of all of them. Offsets here count in the record, so a field at
`row_bytes` or above lies in the footer.

The formats are those of FlashMLA, vLLM, SGLang, FlashInfer and b12x. Readers accept any scale a
record holds; `ScaleWriter` says which one is written.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from mla_quant.errors import RecordError
from mla_quant.formats import E2M1, E4M3, UE8M0, ElementFormat

FP32_BYTES = 4
FP32_SMALLEST_NORMAL = 2.0**-126
FP32_MAX = (2.0 - 2.0**-23) * 2.0**127
SIXTEEN_BIT_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class ScaleWriter:
    """How a writer chooses a scale from the largest magnitude of its group.

    The exact scale is t = amax / element.max, at least `floor`, then rounded. So a group of zeros
    gets the floor, rounded; where the rounded scale is 0, every element code of the group is that
    of +0.

    Attributes:
        rounding: "none" (stored as computed), "nearest" (ties to even), "nearest_not_below"
            (nearest, then one code up where that came out below t and a code is left), or
            "power_of_two_up".
        floor: Smallest t.
        division: "quotient" computes t as a correctly rounded quotient, "reciprocal" as
            amax · fp32(1 / element.max).
    """

    rounding: Literal["none", "nearest", "nearest_not_below", "power_of_two_up"]
    floor: float = 0.0
    division: Literal["quotient", "reciprocal"] = "quotient"


@dataclass(frozen=True)
class BlockScale:
    """The scales of a segment.

    Attributes:
        offset: First byte in the record.
        block: Consecutive values that share a scale.
        format: Code of a scale, one byte each; None: fp32.
        writer: Which scale is written.
        interleave: Scale s of n is stored at place (s mod interleave) · (n / interleave) +
            s div interleave; 1 keeps the order.
    """

    offset: int
    block: int
    format: ElementFormat | None
    writer: ScaleWriter
    interleave: int = 1

    def __post_init__(self) -> None:
        allowed: tuple[str, ...] = ("nearest", "nearest_not_below")
        if self.format is None:
            allowed = ("none", "power_of_two_up")
        elif self.format.rounding == "up":
            allowed = ("power_of_two_up",)
        if self.writer.rounding not in allowed:
            raise RecordError(
                f"{self.format.name if self.format else 'fp32'} scales cannot be written with "
                f"rounding {self.writer.rounding!r}; give {' or '.join(allowed)}"
            )

    @property
    def bytes_each(self) -> int:
        """Bytes of one scale."""
        return FP32_BYTES if self.format is None else 1

    def places(self, count: int) -> list[int]:
        """Where each of `count` scales is stored, in scales."""
        stride = count // self.interleave
        return [s % self.interleave * stride + s // self.interleave for s in range(count)]


@dataclass(frozen=True)
class Segment:
    """A run of values in one code.

    A value is element · fp32(block scale · outer scale), as far as the segment has them.

    Attributes:
        width: Values.
        offset: First byte of the codes in the record.
        element: Code of a value; None: a 16-bit float whose bits are stored as they are.
        scale: Block scales; None: codes are of the values themselves.
        outer_offset: First byte of an fp32 scale per token that multiplies the block scales:
            amax · fp32(1 / (element.max · scale.max)). None: there is none.
        dtypes: For 16-bit floats: which ones.
    """

    width: int
    offset: int
    element: ElementFormat | None
    scale: BlockScale | None = None
    outer_offset: int | None = None
    dtypes: tuple[str, ...] = SIXTEEN_BIT_DTYPES

    @property
    def code_bytes(self) -> int:
        """Bytes of all codes."""
        return self.width * (16 if self.element is None else self.element.bits) // 8

    @property
    def blocks(self) -> int:
        """Block scales."""
        return self.width // self.scale.block if self.scale else 0

    @property
    def limit(self) -> float:
        """Magnitude that values are cut to: no product of a stored code and scale overflows.

        element.max times the largest power of two that fp32 has for it; 0 for 16-bit floats.
        """
        if self.element is None:
            return 0.0
        return self.element.max * 2.0 ** math.floor(math.log2(FP32_MAX / self.element.max))

    @property
    def quant_max(self) -> float | None:
        """element.max · scale.max: the largest magnitude in units of an outer scale.

        None where an outer scale has no purpose: powers of two and fp32 scales cover every latent
        on their own.
        """
        scale = self.scale.format if self.scale else None
        if self.element is None or scale is None or scale.mantissa_bits == 0:
            return None
        return self.element.max * scale.max


@dataclass(frozen=True)
class Field:
    """Bytes of a record that hold one thing: [offset, offset + size_bytes)."""

    name: str
    offset: int
    size_bytes: int
    content: str

    @property
    def end(self) -> int:
        """First byte after the field."""
        return self.offset + self.size_bytes


@dataclass(frozen=True)
class RecordFormat:
    """One way to store a token's latent and rope part.

    A width in bytes does not identify a format, nor does a name others use: two layouts have 352
    bytes, four share one name. `name` does.

    Attributes:
        name: Name in this package.
        known_as: What other projects call it.
        record_bytes: Bytes of a token.
        latent: Values before the rope part, or all of them.
        rope: The rope part, None where it has no segment of its own.
        v_width: Leading values of latent and rope part together that are read as V.
        rope_inside: Whether the latent segment holds the rope part, in the same code.
        row_bytes: Bytes of a token in a page's rows, the rest being in its footer; None: all.
        page_alignment: A page's size is rounded up to a multiple of this, in bytes.
    """

    name: str
    known_as: tuple[str, ...]
    record_bytes: int
    latent: Segment
    rope: Segment | None
    v_width: int
    rope_inside: bool = False
    row_bytes: int | None = None
    page_alignment: int = 1

    def __post_init__(self) -> None:
        for label, segment in self.segments:
            scale = segment.scale
            values_per_byte = 2 if segment.element is not None and segment.element.bits == 4 else 1
            if segment.width < 1 or segment.width % values_per_byte:
                self._refuse(f"{label} has {segment.width} values, which fill no whole bytes")
            if scale and (segment.element is None or segment.width % scale.block):
                self._refuse(
                    f"blocks of {scale.block} do not divide the {segment.width} coded values of "
                    f"the {label}"
                )
            if scale and segment.blocks % scale.interleave:
                self._refuse(f"interleave {scale.interleave} does not divide {segment.blocks}")
            if segment.outer_offset is not None and segment.quant_max is None:
                self._refuse(f"the {label} has an outer scale without block scales of a code")
        end, name = 0, "the start"
        for field in self.fields:
            if field.offset < end:
                self._refuse(f"{field.name} at {field.offset} overlaps {name}, which ends at {end}")
            if field.offset < self.rows_end < field.end:
                self._refuse(f"{field.name} straddles row and footer at {self.rows_end}")
            end, name = field.end, field.name
        if end > self.record_bytes:
            self._refuse(f"{name} ends at byte {end} of {self.record_bytes}")
        if not 0 < self.rows_end <= self.record_bytes:
            self._refuse(f"row_bytes is {self.row_bytes}; give 1 to {self.record_bytes}")
        if not 0 < self.v_width <= self.width:
            self._refuse(f"v_width is {self.v_width} of {self.width} values")

    def _refuse(self, reason: str) -> None:
        raise RecordError(f"record format {self.name!r} is inconsistent: {reason}")

    @property
    def segments(self) -> tuple[tuple[str, Segment], ...]:
        """Segments with their names: "latent", and "rope" if there is one."""
        latent = ("latent", self.latent)
        return (latent,) if self.rope is None else (latent, ("rope", self.rope))

    @property
    def rope_width(self) -> int:
        """Values of the rope segment; 0 without one."""
        return 0 if self.rope is None else self.rope.width

    @property
    def width(self) -> int:
        """Values of latent and rope segment together."""
        return self.latent.width + self.rope_width

    @property
    def rows_end(self) -> int:
        """Bytes of a token that lie in the page's rows."""
        return self.record_bytes if self.row_bytes is None else self.row_bytes

    @property
    def footer_bytes(self) -> int:
        """Bytes of a token that lie in the page's footer."""
        return self.record_bytes - self.rows_end

    @property
    def outer_scale(self) -> Literal["per token", "per layer"] | None:
        """Which scale multiplies the latent's block scales.

        One per token is part of the record, one per layer is calibrated and kept with the model.
        """
        if self.latent.quant_max is None:
            return None
        return "per layer" if self.latent.outer_offset is None else "per token"

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """All fields, by offset. What they leave out is padding."""
        found = []
        for name, segment in self.segments:
            content = segment.element.name if segment.element else " or ".join(segment.dtypes)
            found.append(Field(name, segment.offset, segment.code_bytes, content))
            if segment.scale is not None:
                size = segment.blocks * segment.scale.bytes_each
                content = segment.scale.format.name if segment.scale.format else "fp32"
                found.append(Field(f"{name}_scale", segment.scale.offset, size, content))
            if segment.outer_offset is not None:
                found.append(Field(f"{name}_outer", segment.outer_offset, FP32_BYTES, "fp32"))
        return tuple(sorted(found, key=lambda field: field.offset))

    def field(self, name: str) -> Field:
        """The field of a name: latent, latent_scale, latent_outer, rope, rope_scale."""
        return next(field for field in self.fields if field.name == name)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of `page_size` tokens.

        Raises:
            RecordError: A page size below 1.
        """
        if page_size < 1:
            raise RecordError(f"page_size is {page_size}; a page holds at least 1 token")
        return -(-page_size * self.record_bytes // self.page_alignment) * self.page_alignment

    def tokens_in(self, size_bytes: int, *, layers: int = 1, page_size: int = 64) -> int:
        """Tokens that fit into `size_bytes` with all their layers, in whole pages."""
        return size_bytes // (layers * self.page_bytes(page_size)) * page_size

    def holds(self, latent_width: int, rope_width: int) -> bool:
        """Whether the format has room for exactly these widths."""
        if self.rope_inside:
            return rope_width > 0 and latent_width + rope_width == self.latent.width
        return (latent_width, rope_width) == (self.latent.width, self.rope_width)

    def with_writer(self, writer: ScaleWriter) -> RecordFormat:
        """The same bytes and the same name, written with other scales of the latent.

        Raises:
            RecordError: The latent has no block scales, or none that could be written so.
        """
        if self.latent.scale is None:
            raise RecordError(f"{self.name} has no block scales to write differently")
        scale = dataclasses.replace(self.latent.scale, writer=writer)
        return dataclasses.replace(self, latent=dataclasses.replace(self.latent, scale=scale))

    def as_dict(self, page_size: int) -> dict[str, Any]:
        """The description as plain data, with sizes of one layer, for JSON."""
        scales = {
            name: {
                "format": segment.scale.format.name if segment.scale.format else "fp32",
                "block": segment.scale.block,
                "interleave": segment.scale.interleave,
                "writer": dataclasses.asdict(segment.scale.writer),
            }
            for name, segment in self.segments
            if segment.scale
        }
        return {
            "name": self.name,
            "known_as": list(self.known_as),
            "geometry": self.geometry,
            "latent_width": self.latent.width,
            "rope_width": self.rope_width,
            "rope_inside": self.rope_inside,
            "v_width": self.v_width,
            "record_bytes": self.record_bytes,
            "footer_bytes": self.footer_bytes,
            "page_alignment": self.page_alignment,
            "page_bytes": self.page_bytes(page_size),
            "fields": [dataclasses.asdict(field) for field in self.fields],
            "scales": scales,
            "outer_scale": self.outer_scale,
        }

    @property
    def geometry(self) -> str:
        """Widths for people: "512+64", or "512, rope inside"."""
        if self.rope_inside:
            return f"{self.latent.width}, rope inside"
        return f"{self.latent.width}+{self.rope_width}"


# Writers. Element codes are always round-to-nearest-even of the correctly rounded quotient of the
# value and fp32(stored scale · outer scale); saturating.
_POWER_OF_TWO = ScaleWriter("power_of_two_up", floor=1e-4)
_E4M3_NEAREST = ScaleWriter("nearest")
_E4M3_FLOORED = ScaleWriter("nearest", floor=E4M3.smallest)
_E4M3_NOT_BELOW = ScaleWriter("nearest_not_below", floor=E4M3.smallest)
_RECIPROCAL = ScaleWriter("none", division="reciprocal")

UNROUNDED = ScaleWriter("none", floor=FP32_SMALLEST_NORMAL)
"""What vLLM 0.26 writes into fp8_ds_mla_656 rows: `RECORDS[...].with_writer(UNROUNDED)`."""


def _nvfp4(
    width: int, scale_offset: int, writer: ScaleWriter = _E4M3_NEAREST, *,
    interleave: int = 1, outer_offset: int | None = None,
) -> Segment:  # fmt: skip
    scale = BlockScale(scale_offset, 16, E4M3, writer, interleave)
    return Segment(width, 0, E2M1, scale, outer_offset)


def _mxfp8(width: int, scale_offset: int, block: int) -> Segment:
    return Segment(width, 0, E4M3, BlockScale(scale_offset, block, UE8M0, _POWER_OF_TWO))


_RECORDS = (
    RecordFormat(
        name="fp8_ds_mla_656",
        known_as=("vLLM fp8_ds_mla", "FlashMLA V3.2"),
        record_bytes=656,
        latent=Segment(512, 0, E4M3, BlockScale(512, 128, None, _POWER_OF_TWO)),
        rope=Segment(64, 528, None),
        v_width=512,
    ),
    RecordFormat(
        name="nvfp4_fp8rope_352",
        known_as=("FlashMLA nvfp4.fp8rope", "vLLM 0.33 nvfp4_ds_mla"),
        record_bytes=352,
        latent=_nvfp4(512, 320, _E4M3_NOT_BELOW, interleave=4),
        rope=Segment(64, 256, E4M3),
        v_width=512,
    ),
    RecordFormat(
        name="nvfp4_ds_mla_432",
        known_as=("b12x nvfp4_ds_mla",),
        record_bytes=432,
        latent=_nvfp4(512, 256),
        rope=Segment(64, 304, None),
        v_width=512,
    ),
    RecordFormat(
        name="nvfp4_ds_mla_368",
        known_as=("b12x nvfp4_ds_mla (FP8 rope)",),
        record_bytes=368,
        latent=_nvfp4(512, 256),
        rope=Segment(64, 304, E4M3, BlockScale(288, 64, None, _RECIPROCAL)),
        v_width=512,
    ),
    RecordFormat(
        name="nvfp4_outer_304",
        known_as=("b12x nvfp4_ds_mla (GLM)",),
        record_bytes=304,
        latent=_nvfp4(512, 256, outer_offset=292),
        rope=None,
        v_width=512,
    ),
    RecordFormat(
        name="dsv4_fp8_584",
        known_as=("FlashMLA MODEL1", "DeepSeek-V4 FP8"),
        record_bytes=584,
        latent=_mxfp8(448, 576, block=64),
        rope=Segment(64, 448, None, dtypes=("bfloat16",)),
        v_width=512,
        row_bytes=576,
        page_alignment=576,
    ),
    RecordFormat(
        name="dsv4_nvfp4_384",
        known_as=("SGLang and FlashInfer DeepSeek-V4 NVFP4",),
        record_bytes=384,
        latent=_nvfp4(448, 352),
        rope=Segment(64, 224, None, dtypes=("bfloat16",)),
        v_width=512,
        row_bytes=352,
        page_alignment=16,
    ),
    RecordFormat(
        name="dsv41_fp8_528",
        known_as=("DeepSeek-V4.1 FP8",),
        record_bytes=528,
        latent=_mxfp8(512, 512, block=32),
        rope=None,
        v_width=512,
        rope_inside=True,
    ),
    RecordFormat(
        name="dsv41_fp4_288",
        known_as=("DeepSeek-V4.1 FP4 (extra cache)",),
        record_bytes=288,
        latent=_nvfp4(512, 256, _E4M3_FLOORED),
        rope=None,
        v_width=512,
        rope_inside=True,
    ),
)

RECORDS: dict[str, RecordFormat] = {fmt.name: fmt for fmt in _RECORDS}
"""Record formats by name."""


def record_format(name: str) -> RecordFormat:
    """The format of a name.

    Raises:
        RecordError: No format has this name. Names that other projects use are refused with the
            formats they may mean, since some mean several.
    """
    if name in RECORDS:
        return RECORDS[name]
    meant = [fmt.name for fmt in _RECORDS if any(name in alias.split() for alias in fmt.known_as)]
    hint = f"others call {', '.join(meant)} so; " if meant else ""
    raise RecordError(f"no record format is named {name!r}: {hint}give one of {', '.join(RECORDS)}")
