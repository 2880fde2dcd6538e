"""Recipes: YAML files that say which operands are quantized how, validated once.

A recipe becomes a ModelOpt quantization config (`to_modelopt_config`), so that stock
`mtq.quantize(model, config, forward_loop)` does the work. `configs/*.yaml` are the only source of
the `*_MLA_CFG` dictionaries.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mla_quant.errors import ConfigError
from mla_quant.formats import FORMATS

BACKEND = "mla_quant"
"""Name of the ModelOpt quantization backend, see `mla_quant.quantizers`."""

ALGORITHM = "mla_quant"
"""Name of the ModelOpt calibration algorithm, see `mla_quant.quantizers`."""

QUANTIZER_SUFFIX = "_mla_quantizer"
"""Every attention quantizer's name ends so; nothing else's does."""

FormatName = Literal["none", "fp8", "nvfp4"]
Form = Literal["projected", "absorbed"]
FORMS: tuple[Form, ...] = ("projected", "absorbed")

PROJECTED_OPERANDS = ("q", "k", "p", "v")
ABSORBED_OPERANDS = ("q_latent", "q_rope", "k_latent", "k_rope", "v_latent")
OPERANDS = PROJECTED_OPERANDS + ABSORBED_OPERANDS
"""P is shared by both forms; its statistics come from the projected one."""

OPERAND_LETTER = {
    "q": "q", "k": "k", "p": "p", "v": "v",
    "q_latent": "q", "q_rope": "q", "k_latent": "k", "k_rope": "k", "v_latent": "v",
}  # fmt: skip
"""Which of q, k, p, v sets an operand's format unless the recipe names the operand itself."""

OPERAND_AXIS = {name: -2 if name in ("v", "v_latent") else -1 for name in OPERANDS}
"""Contraction axis of each operand as attention computes it: features, for V and P key tokens."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SparsityRecipe(_Strict):
    """N:M sparsity of attention scores; see `mla_quant.reference.Sparsity`."""

    n: int = Field(2, ge=1)
    m: int = Field(4, ge=2)
    dense_sink_tokens: int = Field(0, ge=0)
    dense_recent_tokens: int = Field(64, ge=0)
    sparse_decode: bool = False

    @model_validator(mode="after")
    def _n_below_m(self) -> SparsityRecipe:
        if self.n >= self.m:
            raise ValueError(f"n must be below m, got {self.n}:{self.m}")
        return self


class AbsorbedRecipe(_Strict):
    """Formats of single absorbed operands; None takes the format of q, k or v."""

    q_latent: FormatName | None = None
    q_rope: FormatName | None = None
    k_latent: FormatName | None = None
    k_rope: FormatName | None = None
    v_latent: FormatName | None = None


class LayerOverride(_Strict):
    """Other formats for some layers. Patterns are fnmatch patterns of attention module names."""

    layers: str
    q: FormatName | None = None
    k: FormatName | None = None
    p: FormatName | None = None
    v: FormatName | None = None

    def changes(self, operands: Iterable[str]) -> dict[str, FormatName]:
        """Formats of those operands that this changes."""
        letters = {o: getattr(self, OPERAND_LETTER[o]) for o in operands}
        return {operand: fmt for operand, fmt in letters.items() if fmt is not None}


class AttentionRecipe(_Strict):
    """Which attention operands are quantized, and how.

    Attributes:
        q: Format of queries.
        k: Format of keys.
        p: Format of softmax probabilities.
        v: Format of values.
        absorbed: Formats of single absorbed operands.
        forms: Forms that get quantizers and statistics.
        p_amax: Range that P's scales are made for; P never exceeds 1. "calibrated" takes the
            observed one.
        p_reference: "integer" makes P independent of tiling; "running_max" predicts a kernel
            that works on tiles of `p_tile_tokens` keys.
        p_tile_tokens: Tile of "running_max", a multiple of 16.
        absorbed_query: dtype of absorbed Q before it is quantized: "float32", or "model" to
            round it to the model's dtype as an engine does that absorbs Q in bf16.
        sparsity: N:M sparsity of the scores, or none.
        exclude: Layers left alone.
        overrides: Other formats for some layers; the last match wins.
    """

    q: FormatName = "none"
    k: FormatName = "none"
    p: FormatName = "none"
    v: FormatName = "none"
    absorbed: AbsorbedRecipe = AbsorbedRecipe()
    forms: tuple[Form, ...] = FORMS
    p_amax: Annotated[float, Field(gt=0, le=1)] | Literal["calibrated"] = 1.0
    p_reference: Literal["integer", "running_max"] = "integer"
    p_tile_tokens: int | None = None
    absorbed_query: Literal["float32", "model"] = "float32"
    sparsity: SparsityRecipe | None = None
    exclude: tuple[str, ...] = ()
    overrides: tuple[LayerOverride, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> AttentionRecipe:
        if not self.forms:
            raise ValueError("forms must name projected, absorbed or both")
        if (self.p_reference == "running_max") != (self.p_tile_tokens is not None):
            raise ValueError(
                "p_tile_tokens belongs to p_reference: running_max, and is required by it"
            )
        block = FORMATS["nvfp4"].block_size
        assert block is not None
        if self.p_tile_tokens is not None and (
            self.p_tile_tokens <= 0 or self.p_tile_tokens % block
        ):
            raise ValueError(
                f"p_tile_tokens must be a positive multiple of {block}, got {self.p_tile_tokens}"
            )
        return self

    def format_of(self, operand: str) -> FormatName:
        """Format of one of `OPERANDS`, before layer overrides."""
        named: FormatName | None = getattr(self.absorbed, operand, None)
        return named if named is not None else getattr(self, OPERAND_LETTER[operand])

    def formats_of_layer(self, layer: str) -> dict[str, FormatName]:
        """Format of each of `operands` in a layer, by its module name."""
        formats = {operand: self.format_of(operand) for operand in self.operands()}
        for override in self.overrides:
            if matches_layer(override.layers, layer):
                formats |= override.changes(formats)
        return formats

    def operands(self) -> tuple[str, ...]:
        """Operands of the recipe's forms, P included."""
        names = PROJECTED_OPERANDS if "projected" in self.forms else ("p",)
        return names + (ABSORBED_OPERANDS if "absorbed" in self.forms else ())


class ObserverRecipe(_Strict):
    """How an amax follows from calibration data.

    Attributes:
        method: "max" takes the largest finite magnitude; "percentile" that percentile of the
            nonzero magnitudes; "mse" the amax with the least squared quantization error, found in a
            second pass over the data.
        percentile: For "percentile", in percent.
    """

    method: Literal["max", "percentile", "mse"] = "max"
    percentile: float = Field(99.99, gt=50, le=100)


class Recipe(_Strict):
    """A whole recipe, as in `configs/*.yaml`.

    Attributes:
        schema_version: 1.
        name: Short name.
        description: One sentence.
        attention: The attention operands.
        weights: ModelOpt preset for linear layers: "fp8" (W8A8), "nvfp4" (W4A4) or none.
        weights_exclude: Linear layers that stay in full precision: patterns as in
            `attention.exclude`, of any module's name.
        observer: How amax values are found.
    """

    schema_version: Literal[1] = 1
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    description: str = ""
    attention: AttentionRecipe = AttentionRecipe()
    weights: Literal["none", "fp8", "nvfp4"] = "none"
    weights_exclude: tuple[str, ...] = ()
    observer: ObserverRecipe = ObserverRecipe()

    @model_validator(mode="after")
    def _weights_to_exclude(self) -> Recipe:
        if self.weights_exclude and self.weights == "none":
            raise ValueError("weights_exclude has no meaning with weights: none")
        return self

    def with_changes(self, **changes: Any) -> Recipe:
        """A validated copy with some fields of `attention` or of the recipe replaced.

        Raises:
            ConfigError: A field does not exist or its value is not allowed.
        """
        data = self.model_dump()
        for key, value in changes.items():
            if key in AttentionRecipe.model_fields:
                data["attention"][key] = value
            else:
                data[key] = value
        return parse_recipe(data, origin=f"recipe {self.name!r} with {changes}")


def parse_recipe(data: object, *, origin: str) -> Recipe:
    """Validate a recipe.

    Args:
        data: Parsed YAML or JSON.
        origin: What to call it in errors.

    Raises:
        ConfigError: Naming every field that is wrong.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{origin}: a recipe is a mapping of fields, found {type(data).__name__}; "
            f"fields are {', '.join(Recipe.model_fields)}"
        )
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {describe_validation_error(error)}") from error


def describe_validation_error(error: ValidationError) -> str:
    """One line a fault: field, what was found, what is allowed."""
    faults = []
    for fault in error.errors():
        field = ".".join(str(part) for part in fault["loc"]) or "file"
        found = "" if fault["type"] == "missing" else f" (found {fault['input']!r:.80})"
        faults.append(f"{field}: {fault['msg']}{found}")
    return "; ".join(faults)


def configs_dir() -> Path:
    """Folder of the shipped recipes: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "configs", package.parent / "configs"):
        if candidate.is_dir():
            return candidate
    raise ConfigError(
        f"the recipe folder is missing: neither {package / 'configs'} nor "
        f"{package.parent / 'configs'} exists; reinstall mla-quant"
    )


def recipe_names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in configs_dir().glob("*.yaml"))


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Read a recipe.

    Args:
        name_or_path: Name of a shipped recipe, or path of a YAML file.

    Raises:
        ConfigError: No such recipe, not YAML, or not a valid recipe.
    """
    text = str(name_or_path)
    path = Path(text).expanduser()
    if text in recipe_names():
        path = configs_dir() / f"{text}.yaml"
    elif not path.is_file():
        close = difflib.get_close_matches(text, recipe_names(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"no recipe {text!r}: neither a file nor one of {', '.join(recipe_names())}{hint}"
        )
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not a readable YAML file: {error}") from error
    return parse_recipe(data, origin=str(path))


def matches_layer(pattern: str, layer: str) -> bool:
    """Whether a layer pattern names a module, with or without the prefix of its model.

    A pattern matches a module, any module below it, and either of these after any prefix that
    ends at a dot: "layers.1" matches "model.layers.1.self_attn", not "model.layers.10.self_attn".
    """
    parts = layer.split(".")
    suffixes = [".".join(parts[i:]) for i in range(len(parts))]
    return any(
        fnmatch.fnmatchcase(suffix, pattern) or fnmatch.fnmatchcase(suffix, f"{pattern}.*")
        for suffix in suffixes
    )


def unmatched_patterns(recipe: Recipe, layers: Iterable[str]) -> list[str]:
    """Exclude and override patterns that name no layer."""
    names = list(layers)
    patterns = [*recipe.attention.exclude, *(o.layers for o in recipe.attention.overrides)]
    return [p for p in patterns if not any(matches_layer(p, name) for name in names)]


def _quantizer_config(operand: str, fmt: FormatName, attention: AttentionRecipe) -> dict[str, Any]:
    extra: dict[str, Any] = {"operand": operand, "format": fmt}
    # What concerns the scores or absorbed Q travels with a quantizer, so that ModelOpt saves and
    # restores it.
    if operand == "p":
        extra["p_tile_tokens"] = attention.p_tile_tokens
        extra["sparsity"] = attention.sparsity.model_dump() if attention.sparsity else None
    if operand in ("q_latent", "q_rope"):
        extra["absorbed_query"] = attention.absorbed_query
    element = FORMATS[fmt].element
    config: dict[str, Any] = {
        "num_bits": (element.exponent_bits, element.mantissa_bits) if element else 16,
        "backend": BACKEND,
        "backend_extra_args": extra,
    }
    block, scale = FORMATS[fmt].block_size, FORMATS[fmt].scale
    if block is not None and scale is not None:
        # -1 stands for "the contraction axis" whatever its position: ModelOpt requires the key.
        config["block_sizes"] = {
            -1: block,
            "type": "dynamic",
            "scale_bits": (scale.exponent_bits, scale.mantissa_bits),
        }
    if operand == "p" and attention.p_amax != "calibrated":
        config["constant_amax"] = float(attention.p_amax)
    return config


def _entries(
    prefixes: Iterable[str],
    formats: Mapping[str, FormatName],
    attention: AttentionRecipe,
) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for prefix in prefixes:
        for operand, fmt in formats.items():
            name = f"{prefix}{operand}{QUANTIZER_SUFFIX}"
            if fmt == "none" and not (operand == "p" and attention.sparsity):
                entries.append({"quantizer_name": name, "enable": False})
            else:
                config = _quantizer_config(operand, fmt, attention)
                entries.append({"quantizer_name": name, "cfg": config})
    return entries


def _layer_prefixes(pattern: str) -> list[str]:
    # The same rule as `matches_layer`, written as the fnmatch patterns that ModelOpt takes.
    return [f"{pattern}.", f"*.{pattern}.", f"{pattern}.*.", f"*.{pattern}.*."]


def weight_preset(name: str) -> list[dict[str, Any]]:
    """ModelOpt's quantizer entries for linear layers.

    They get this project's backend, which defines the same numbers on CPU and CUDA: ModelOpt's own
    NVFP4 runs on CUDA only, and its FP8 rounds twice on CPU.
    """
    import modelopt.torch.quantization as mtq

    preset = {"fp8": mtq.FP8_DEFAULT_CFG, "nvfp4": mtq.NVFP4_DEFAULT_CFG}[name]
    entries = [dict(entry) for entry in preset["quant_cfg"]]
    for entry in entries:
        if entry.get("cfg"):
            entry["cfg"] = {
                **entry["cfg"],
                "backend": BACKEND,
                "backend_extra_args": {"operand": "linear", "format": name},
            }
    return entries


def to_modelopt_config(recipe: Recipe) -> dict[str, Any]:
    """The recipe as a ModelOpt quantization config, for `mtq.quantize`.

    Entries are ordered and the last match wins; the first one disables everything, because a
    config without it leaves ModelOpt's default INT8 quantizers enabled.
    """
    attention = recipe.attention
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    if recipe.weights != "none":
        entries += weight_preset(recipe.weights)
        entries += [
            {"quantizer_name": f"{prefix}*{kind}_quantizer", "enable": False}
            for pattern in recipe.weights_exclude
            for prefix in _layer_prefixes(pattern)
            for kind in ("weight", "input")
        ]
    base = {name: attention.format_of(name) for name in attention.operands()}
    entries += _entries(["*."], base, attention)
    for override in attention.overrides:
        changes = override.changes(base)
        entries += _entries(_layer_prefixes(override.layers), changes, attention)
    entries += [
        {"quantizer_name": f"{prefix}*{QUANTIZER_SUFFIX}", "enable": False}
        for pattern in attention.exclude
        for prefix in _layer_prefixes(pattern)
    ]
    observer = recipe.observer
    return {
        "quant_cfg": entries,
        "algorithm": {
            "method": ALGORITHM,
            "observer": observer.method,
            "percentile": observer.percentile,
        },
    }
