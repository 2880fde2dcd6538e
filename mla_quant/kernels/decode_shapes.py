"""What decode kernels compute and in which shapes: formats of operands, tilings, ranges."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton

from mla_quant.errors import ConfigError
from mla_quant.formats import FORMATS, NVFP4
from mla_quant.kernels.devices import shared_bytes

OPERANDS = ("q", "k", "p", "v", "q_rope", "k_rope")


# --- formats


@dataclass(frozen=True)
class OperandFormats:
    """Format names of the four operands, each of `mla_quant.formats.FORMATS`.

    Attributes:
        q: Q's latent part.
        k: K's latent part.
        p: P.
        v: V.
        q_rope: Q's rope part; None: as `q`.
        k_rope: K's rope part; None: as `k`.
    """

    q: str = "nvfp4"
    k: str = "nvfp4"
    p: str = "nvfp4"
    v: str = "nvfp4"
    q_rope: str | None = None
    k_rope: str | None = None

    def __post_init__(self) -> None:
        for operand in OPERANDS:
            name = getattr(self, operand)
            if name not in FORMATS and not (name is None and operand in ("q_rope", "k_rope")):
                raise ConfigError(f"format of {operand} is {name!r}; allowed are {sorted(FORMATS)}")

    @property
    def rope_q(self) -> str:
        """Format of Q's rope part."""
        return self.q if self.q_rope is None else self.q_rope

    @property
    def rope_k(self) -> str:
        """Format of K's rope part."""
        return self.k if self.k_rope is None else self.k_rope


def operand_dtypes(formats: OperandFormats, cache_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Dtype in which the three products are computed: Q·K latent, Q·K rope, P·V.

    Quantized operands are exact in bf16. Where an operand is not quantized, its dtype rules, which
    holds quantized numbers too.
    """
    products = ((formats.q, formats.k), (formats.rope_q, formats.rope_k), (formats.p, formats.v))
    return tuple(cache_dtype if "none" in names else torch.bfloat16 for names in products)


# --- choice of shapes


@dataclass(frozen=True)
class Configuration:
    """Shape of the work of one program of the split kernel.

    Attributes:
        block_rows: Query tokens × heads of a program.
        block_tokens: Tokens of a tile.
        inner: Of the 8 pairs of tokens in a block, how many a thread holds (see the module).
        across: Neighbouring blocks that are spread over threads and warps.
        warps: Warps of a program.
        stages: Stages of the software pipeline.
    """

    block_rows: int
    block_tokens: int
    inner: int
    across: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        powers = (self.block_rows, self.block_tokens, self.inner, self.across, self.warps)
        block_size = NVFP4.block_size or 1
        if (
            any(x < 1 or x & (x - 1) for x in powers)
            or self.block_rows < 16
            or not 2 <= self.inner <= block_size // 2
            or self.block_tokens % (block_size * self.across)
            or self.stages < 1
        ):
            raise ConfigError(
                f"{self} is no shape of a program: all but stages must be powers of two, "
                f"block_rows at least 16, inner from 2 to {block_size // 2}, block_tokens a "
                f"multiple of {block_size} · across, stages at least 1"
            )

    def kernel_constants(self) -> dict[str, int]:
        """By the names that the kernel gives them."""
        return {
            "ROWS": self.block_rows,
            "TOKENS": self.block_tokens,
            "INNER": self.inner,
            "ACROSS": self.across,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


SOURCES = ("raw", "stored", "partial", "read", "unpacked")
"""How operands reach a product: as they are; K's latent part and V from a side cache; only one of
them or the rope part from it, the rest as it is; quantized on read; or from KV-cache records,
quantized again or not. Each needs another amount of registers and shared memory."""

# [source][shared memory: large (227 KiB), medium (163 KiB), small (99 KiB)], by rising rows.
_CONFIGURATIONS = {
    "raw": {
        "large": (Configuration(16, 64, 2, 4, 4, 5), Configuration(32, 64, 2, 4, 8, 5)),
        "medium": (Configuration(16, 64, 2, 4, 4, 2), Configuration(32, 64, 2, 4, 8, 2)),
        "small": (Configuration(16, 32, 2, 2, 4, 2), Configuration(32, 32, 2, 2, 8, 2)),
    },
    "stored": {
        "large": (Configuration(16, 64, 2, 4, 8, 5), Configuration(32, 64, 2, 4, 8, 5)),
        "medium": (Configuration(16, 64, 2, 4, 4, 4), Configuration(32, 64, 2, 4, 8, 2)),
        "small": (Configuration(16, 64, 2, 4, 8, 2), Configuration(32, 32, 2, 2, 8, 2)),
    },
    # Raw tiles and records both: fewer stages fit.
    "partial": {
        "large": (Configuration(16, 64, 2, 4, 8, 2), Configuration(32, 64, 2, 4, 8, 2)),
        "medium": (Configuration(16, 64, 2, 4, 8, 2), Configuration(32, 64, 2, 4, 8, 2)),
        "small": (Configuration(16, 32, 2, 2, 8, 2), Configuration(32, 32, 2, 2, 8, 2)),
    },
    "read": {
        "large": (Configuration(16, 32, 2, 2, 8, 5), Configuration(32, 32, 2, 2, 8, 2)),
        "medium": (Configuration(16, 32, 2, 2, 8, 2), Configuration(32, 32, 2, 2, 8, 2)),
        "small": (Configuration(16, 16, 2, 1, 4, 2), Configuration(32, 16, 2, 1, 8, 2)),
    },
    # Tiles are those of "read", so that sums of quantized operands are the same; stages are not.
    # Another stage would hold the scales of the next tile in shared memory once for every element
    # that they belong to: two stages of FP8 records with fp32 scales take 211 KiB, five 371. With
    # one, operands alone are there, most of them where V is not quantized: 82 KiB for 16 rows and
    # 32 tokens, 100 for 32 rows.
    "unpacked": {
        "large": (Configuration(16, 32, 2, 2, 8, 1), Configuration(32, 32, 2, 2, 8, 1)),
        "medium": (Configuration(16, 32, 2, 2, 8, 1), Configuration(32, 32, 2, 2, 8, 1)),
        "small": (Configuration(16, 16, 2, 1, 4, 1), Configuration(32, 16, 2, 1, 8, 1)),
    },
}
# Hopper's matrix unit takes 64 rows; Blackwell's would need more shared memory for them.
_CONFIGURATIONS_HOPPER_RAW = (
    Configuration(16, 64, 2, 4, 4, 5),
    Configuration(64, 64, 4, 2, 8, 2),
)
# fp32 operands, whose products take no tensor cores, and fp32 caches that are quantized on read.
# Records fit as well: see "unpacked".
_CONFIGURATIONS_FP32 = {
    "large": (Configuration(16, 32, 2, 2, 4, 1),),
    "medium": (Configuration(16, 32, 2, 2, 4, 1),),
    "small": (Configuration(16, 16, 2, 1, 4, 1),),
}


def configurations(
    capability: int, source: str, element_bytes: int = 2
) -> tuple[Configuration, ...]:
    """What `choose_configuration` may return, by rising number of rows.

    Args:
        capability: Compute capability × 10, for example 90.
        source: One of `SOURCES`.
        element_bytes: Bytes of the widest element of a tile: operand of a product, or raw
            cache.
    """
    shared = shared_bytes(divmod(capability, 10))
    size = "large" if shared >= 227 << 10 else "medium" if shared >= 163 << 10 else "small"
    if element_bytes > 2:
        return _CONFIGURATIONS_FP32[size]
    if source == "raw" and capability == 90:
        return _CONFIGURATIONS_HOPPER_RAW
    return _CONFIGURATIONS[source][size]


def choose_configuration(
    rows: int, capability: int, source: str, element_bytes: int = 2
) -> Configuration:
    """The smallest that holds the rows of a sequence, else the largest."""
    allowed = configurations(capability, source, element_bytes)
    for configuration in allowed:
        if configuration.block_rows >= rows:
            return configuration
    return allowed[-1]


def operand_source(
    formats: OperandFormats, k_stored: bool, v_stored: bool, k_rope_stored: bool | None = None
) -> str:
    """Which of `SOURCES` a call over raw latents has; `k_rope_stored` None: as `k_stored`."""
    operands = (
        (formats.k, k_stored),
        (formats.rope_k, k_stored if k_rope_stored is None else k_rope_stored),
        (formats.v, v_stored),
    )
    if any(name != "none" and not stored for name, stored in operands):
        return "read"
    if k_stored and v_stored:
        return "stored"
    return "partial" if any(stored for _, stored in operands) else "raw"


# 64 rows over NVFP4 records ended in an illegal memory access on a Hopper GPU, with the addresses
# that 16 and 32 rows read; the cause is not known.
MAX_ROWS_STORED = 32
MAX_SPLITS = 128
# What a program costs besides its tiles, and what another range costs when ranges are combined, in
# units of one tile's time.
_PROGRAM_COST = 3.0
_SPLIT_COST = 0.25


def choose_splits(
    programs: int,
    tiles: int,
    multiprocessors: int,
    program_cost: float = _PROGRAM_COST,
    split_cost: float = _SPLIT_COST,
) -> int:
    """Into how many ranges to split the context, from shapes alone.

    Args:
        programs: Programs without splitting: sequences × row blocks.
        tiles: Tiles of the longest context possible.
        multiprocessors: Programs that run at a time.
        program_cost: Of a program besides its tiles, in tiles.
        split_cost: Of another range when ranges are combined, in tiles.

    Returns:
        The number that minimizes waves × work of a program, plus the cost of combining.
    """
    best, best_cost = 1, math.inf
    for splits in range(1, min(MAX_SPLITS, max(tiles, 1)) + 1):
        waves = math.ceil(programs * splits / multiprocessors)
        cost = waves * (math.ceil(tiles / splits) + program_cost)
        cost += split_cost * splits if splits > 1 else 0.0
        if cost < best_cost:
            best, best_cost = splits, cost
    return best


@dataclass(frozen=True)
class ProgramShape:
    """Work of one program of a kernel, and its costs in the sense of `choose_splits`.

    Attributes:
        rows: Query rows of a program.
        tokens: Tokens of a tile.
        program_cost: See `choose_splits`.
        split_cost: See `choose_splits`.
        programs: How many share a multiprocessor.
    """

    rows: int
    tokens: int
    program_cost: float = _PROGRAM_COST
    split_cost: float = _SPLIT_COST
    programs: int = 1

    def splits(self, batch: int, rows: int, capacity: int, multiprocessors: int) -> int:
        """Ranges for sequences of some query rows and at most `capacity` tokens."""
        return choose_splits(
            batch * triton.cdiv(rows, self.rows),
            triton.cdiv(capacity, self.tokens),
            multiprocessors * self.programs,
            self.program_cost,
            self.split_cost,
        )


@functools.cache
def device_properties(device: torch.device) -> tuple[int, int]:
    """Compute capability × 10 and multiprocessors."""
    if device.type != "cuda":
        return 90, 8
    properties = torch.cuda.get_device_properties(device)
    return properties.major * 10 + properties.minor, properties.multi_processor_count
