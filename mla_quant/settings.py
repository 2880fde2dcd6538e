"""`mla_quant.json`: everything needed to reproduce the quantized attention of a checkpoint.

One versioned file holds the recipe and, for every layer, the format and amax of every operand. It
is read by Hugging Face users (`mla_quant.load_quantized`) and by serving integrations alike.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mla_quant.errors import CheckpointError
from mla_quant.recipes import (
    ABSORBED_OPERANDS,
    OPERANDS,
    FormatName,
    Recipe,
    describe_validation_error,
)

SETTINGS_FILE = "mla_quant.json"
SCHEMA_VERSION: Literal[1] = 1
SIDE_FOLDER = "mla_quant"
"""Folder in a checkpoint for files that no engine reads: statistics, reference logits, hashes."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OperandSettings(_Strict):
    """One operand of one layer.

    Attributes:
        format: Its format.
        amax: Range that its scales are made for; None if the format has no scale.
    """

    format: FormatName
    amax: float | None = None

    @field_validator("amax")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError("amax must be a finite number, 0 or more")
        return value


class AbsorbedSettings(_Strict):
    """Operands of the absorbed form; P is shared with the projected one."""

    q_latent: OperandSettings
    q_rope: OperandSettings
    k_latent: OperandSettings
    k_rope: OperandSettings
    v: OperandSettings


class LayerSettings(_Strict):
    """All operands of one attention layer. Scales of a KV *cache* are none of these."""

    q: OperandSettings
    k: OperandSettings
    p: OperandSettings
    v: OperandSettings
    absorbed: AbsorbedSettings

    def operand(self, name: str) -> OperandSettings:
        """Settings of one of `mla_quant.recipes.OPERANDS`."""
        if name in ABSORBED_OPERANDS:
            found = getattr(self.absorbed, "v" if name == "v_latent" else name)
        else:
            found = getattr(self, name)
        assert isinstance(found, OperandSettings)
        return found

    @classmethod
    def from_operands(cls, operands: dict[str, OperandSettings]) -> LayerSettings:
        """Inverse of `operand`."""
        return cls(
            **{name: operands[name] for name in ("q", "k", "p", "v")},
            absorbed=AbsorbedSettings(
                v=operands["v_latent"],
                **{name: operands[name] for name in ABSORBED_OPERANDS if name != "v_latent"},
            ),
        )


class Producer(_Strict):
    """What wrote a file."""

    name: str
    version: str


class ModelSettings(_Strict):
    """The model that the settings belong to.

    Attributes:
        source: Where its weights came from.
        family: transformers model type.
        geometry: Widths of its MLA layers.
    """

    source: str
    family: str
    geometry: dict[str, int | None]


class Settings(_Strict):
    """The whole file."""

    schema_version: Literal[1] = SCHEMA_VERSION
    producer: Producer
    model: ModelSettings
    recipe: Recipe
    layers: dict[str, LayerSettings] = Field(min_length=1)
    calibration: dict[str, Any] = {}

    def missing_amax(self) -> list[str]:
        """Quantized operands without an amax."""
        return [
            f"{layer}.{name}"
            for layer, settings in self.layers.items()
            for name in OPERANDS
            if settings.operand(name).format != "none" and settings.operand(name).amax is None
        ]


def parse_settings(text: str, *, origin: str) -> Settings:
    """Validate the text of a settings file.

    Args:
        text: JSON.
        origin: What to call it in errors.

    Raises:
        CheckpointError: Not JSON, an unknown version, or a field that is wrong.
    """
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{origin}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{origin}: expected a JSON object, found {type(data).__name__}")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise CheckpointError(
            f"{origin}: schema_version {version!r} is not supported; this release reads "
            f"{SCHEMA_VERSION}. Update mla-quant, or calibrate again"
        )
    try:
        settings = Settings.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise CheckpointError(f"{origin}: {describe_validation_error(error)}") from error
    missing = settings.missing_amax()
    if missing:
        raise CheckpointError(
            f"{origin}: no amax for {len(missing)} quantized operands: {', '.join(missing[:4])}; "
            "calibrate again"
        )
    return settings


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def read_settings(folder: Path) -> Settings:
    """Read a checkpoint's settings.

    Raises:
        CheckpointError: There are none, or they are invalid.
    """
    path = folder / SETTINGS_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} has no {SETTINGS_FILE}: it is not a checkpoint written by mla-quant "
            "calibrate, or the file was left behind when it was copied"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    return parse_settings(text, origin=str(path))


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that replaces it, synced, when the block succeeds."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically, with a stable key order; NaN and Inf are errors."""
    with atomic_file(path) as temporary:
        temporary.write_text(
            json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
        )
