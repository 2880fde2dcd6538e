"""The report of one run: validated, written as strict JSON, and shown as one HTML page.

`Report` is schema version 1 of report.json. Every measurement is optional: None means "not
measured" and is shown so. The page is one file, with its plots as inline SVG that takes its
colours from the page's style sheet (light, dark and print); it loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib import style as mpl_style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, MaxNLocator
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
)

from mla_quant.errors import MlaQuantError
from mla_quant.formats import FORMATS

SCHEMA_VERSION = 1
"""Version of report.json that this module reads and writes."""


class ReportError(MlaQuantError):
    """A report does not follow the schema, or cannot be written."""


# --------------------------------------------------------------------------------------- schema


def _known_format(name: str) -> str:
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}; known: {', '.join(sorted(FORMATS))}")
    return name


Form = Literal["original", "projected", "absorbed", "decode"]
FormatName = Annotated[str, AfterValidator(_known_format)]
OperandName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]
Share = Annotated[float, Field(ge=0, le=1)]


class _Record(BaseModel):
    """Unknown keys are errors: a misspelt measurement would otherwise read "not measured"."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)


class _OpenRecord(_Record):
    """A record to which the producer may add keys; the page shows them as they are."""

    model_config = ConfigDict(extra="allow")


class Producer(_Record):
    """The program that measured."""

    name: str
    version: str


class Geometry(_Record):
    """Widths of the attention, in values."""

    num_heads: PositiveInt
    q_lora_rank: PositiveInt | None = None
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: NonNegativeInt
    qk_rope_head_dim: NonNegativeInt
    v_head_dim: PositiveInt


class Skipped(_Record):
    """A module that looks like attention and was left alone."""

    name: str
    class_name: str = Field(alias="class")
    reason: str


class Model(_OpenRecord):
    """The measured model; `cache_bytes_per_token` maps a cache format to bytes."""

    source: str
    family: str
    layers: NonNegativeInt | None = None
    geometry: Geometry | None = None
    skipped: list[Skipped] = []
    cache_bytes_per_token: dict[str, Any] | None = None


class Recipe(_OpenRecord):
    """The recipe as it was given; only its name is required."""

    name: str


class Data(_Record):
    """Where the calibration and evaluation tokens came from."""

    calibration: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None


class Accuracy(_Record):
    """Accuracy of one form on the evaluation data; KL and NLL in nats per token."""

    form: Form
    perplexity: NonNegativeFloat | None = None
    original_perplexity: NonNegativeFloat | None = None
    nll: float | None = None
    nll_stderr: NonNegativeFloat | None = None
    kl_mean: float | None = None
    kl_p99: float | None = None
    kl_max: float | None = None
    top1_agreement: Share | None = None
    tokens: NonNegativeInt | None = None


class _LayerRecord(_Record):
    layer: str
    layer_index: NonNegativeInt


class Operand(_LayerRecord):
    """One operand of one layer; `sqnr_db` is None where the operand is not quantized."""

    form: Form
    operand: OperandName
    format: FormatName
    amax: NonNegativeFloat | None = None
    sqnr_db: float | None = None
    saturated_share: Share | None = None
    flushed_block_share: Share | None = None
    values: NonNegativeInt | None = None


class LayerOutput(_LayerRecord):
    """One layer: the error it adds itself, and the error accumulated up to its output."""

    form: Form
    attention_sqnr_db: float | None = None
    hidden_sqnr_db: float | None = None


class Sensitivity(_Record):
    """The cost of quantizing one layer, or one operand of all layers, alone."""

    form: Form
    kind: Literal["layer", "operand"]
    target: str
    kl_mean: float | None = None
    perplexity: NonNegativeFloat | None = None
    delta_perplexity: float | None = None
    top1_agreement: Share | None = None


class Histogram(_Record):
    """Counts of magnitudes, every octave divided evenly into `bins_per_octave` bins.

    The first bin starts at 2^`log2_lower`; smaller magnitudes count as `zeros`. Bins of one octave
    are equally wide in |x|, not in log2 |x|: a bin is the leading bits of a float.
    """

    log2_lower: Annotated[float, Field(multiple_of=1)]
    bins_per_octave: PositiveInt
    counts: list[NonNegativeInt]
    zeros: NonNegativeInt = 0


class Statistics(_LayerRecord):
    """What calibration saw of one operand of one layer.

    The histograms may count a sample only, of `sampled_values` values.
    """

    operand: OperandName
    format: FormatName
    amax: NonNegativeFloat | None = None
    observed_max: NonNegativeFloat | None = None
    values: NonNegativeInt | None = None
    sampled_values: NonNegativeInt | None = None
    nonfinite: NonNegativeInt | None = None
    saturated_share: Share | None = None
    flushed_block_share: Share | None = None
    histogram: Histogram | None = None
    block_histogram: Histogram | None = None


class Report(_Record):
    """report.json, schema version 1. Sections that are None or empty were not measured."""

    schema_version: Literal[1]
    created: str
    producer: Producer
    environment: dict[str, Any] | None = None
    model: Model
    recipe: Recipe
    data: Data | None = None
    accuracy: list[Accuracy] | None = None
    operands: list[Operand] | None = None
    layers: list[LayerOutput] | None = None
    sensitivity: list[Sensitivity] | None = None
    statistics: list[Statistics] | None = None
    warnings: list[str] = []


def _plain(value: Any, path: str, notes: list[str]) -> Any:
    """A copy of `value` in JSON types; NaN and infinities become None and are noted."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        number = float(value)
        if math.isfinite(number):
            return number
        notes.append(f"{path} was {number} and is recorded as null.")
        return None
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ReportError(
                    f"report: key {key!r} under {path or 'the top level'} is a "
                    f"{type(key).__name__}; JSON keys are strings. Convert it with str()."
                )
        prefix = f"{path}." if path else ""
        return {key: _plain(item, f"{prefix}{key}", notes) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}[{i}]", notes) for i, item in enumerate(value)]
    raise ReportError(
        f"report: {path or 'the report'} is a {type(value).__name__}, which JSON cannot hold; "
        "allowed are str, int, float, bool, None, lists and mappings. Convert it first."
    )


def _checked(report: Mapping[str, Any]) -> tuple[dict[str, Any], Report]:
    """The report in plain JSON types and as validated records."""
    if not isinstance(report, Mapping):
        raise ReportError(
            f"report: expected a mapping (a JSON object), found a {type(report).__name__}."
        )
    version = report.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ReportError(
            f"report: schema_version is {version!r}; this version of mla_quant reads "
            f"{SCHEMA_VERSION}. Use the mla_quant that wrote the report, or measure again."
        )
    notes: list[str] = []
    plain: dict[str, Any] = _plain(report, "", notes)
    if notes:
        warnings = plain.get("warnings") or []
        if isinstance(warnings, list):
            plain["warnings"] = [*warnings, *notes]
    try:
        return plain, Report.model_validate(plain)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        lines = [
            f"  {'.'.join(map(str, item['loc']))}: {item['msg']} (found {item['input']!r:.80})"
            for item in problems[:10]
        ]
        if len(problems) > len(lines):
            lines.append(f"  and {len(problems) - len(lines)} more")
        raise ReportError(
            f"report: does not follow schema version {SCHEMA_VERSION}. Correct or remove these "
            "keys:\n" + "\n".join(lines)
        ) from error


# ---------------------------------------------------------------------------- format's range


def format_range(name: str, amax: float | None) -> dict[str, float]:
    """The magnitudes at which format `name`, calibrated to `amax`, changes its behaviour.

    Args:
        name: A key of `formats.FORMATS`.
        amax: Calibrated largest magnitude, in the unit of the operand, or None if unknown.

    Returns:
        In the operand's unit, largest first; empty for an unquantized operand and where `amax` is
        None or 0:

        - "top": larger magnitudes saturate to this one;
        - "smallest": smallest nonzero magnitude of all;
        - "zero": magnitudes up to this one round to zero whatever block they are in;

        and, for a format with block scales:

        - "top_block_smallest": smallest nonzero magnitude in a block that contains `amax`;
        - "top_block_zero": magnitudes up to this one round to zero in such a block;
        - "block_flush": a block with a maximum up to this one becomes zeros, its scale being 0.

    Raises:
        ReportError: If the format is unknown.
    """
    if name not in FORMATS:
        raise ReportError(f"unknown format {name!r}; known: {', '.join(sorted(FORMATS))}.")
    fmt = FORMATS[name]
    if fmt.element is None or not amax:
        return {}
    unit = amax / fmt.quant_max
    # Halfway between zero and the smallest value is a tie, and the even code is zero's.
    levels = {"top": amax}
    smallest = fmt.element.smallest * unit
    if fmt.scale is not None:
        levels["top_block_smallest"] = smallest * fmt.scale.max
        levels["top_block_zero"] = levels["top_block_smallest"] / 2
        levels["block_flush"] = fmt.scale.smallest / 2 * fmt.element.max * unit
        smallest *= fmt.scale.smallest
    levels["smallest"] = smallest
    levels["zero"] = smallest / 2
    return dict(sorted(levels.items(), key=lambda item: -item[1]))


# ------------------------------------------------------------------------------- page contents


@dataclass(frozen=True)
class Column:
    """A table column; `unit` stands under the title."""

    title: str
    unit: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Cell:
    """Text of a table cell and the value it is sorted by."""

    text: str
    value: float | str | None = None


@dataclass(frozen=True)
class Table:
    """A sortable table; a long one starts folded."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    @property
    def folded(self) -> bool:
        """Whether the table is too long to stand open between the plots."""
        return len(self.rows) > 24


@dataclass(frozen=True)
class Plot:
    """An inline SVG and what it shows."""

    svg: Markup
    caption: str


@dataclass(frozen=True)
class Section:
    """One part of the page; with neither plots nor tables it says "not measured"."""

    key: str
    title: str
    reading: str
    remedy: str
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()

    @property
    def measured(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.plots or self.tables)


@dataclass(frozen=True)
class Card:
    """Headline numbers of one form."""

    form: str
    title: str
    perplexity: str
    delta: str
    facts: Sequence[tuple[str, str]]


MISSING = "–"
FORM_TITLES = {
    "original": "original",
    "projected": "projected (prefill)",
    "absorbed": "absorbed (decode)",
    "decode": "decode (token by token)",
}
FORMS = tuple(FORM_TITLES)
# By role, so that three columns of histograms hold each role with its latent and rope parts.
OPERANDS = ("q", "q_latent", "q_rope", "k", "k_latent", "k_rope", "p", "v", "v_latent")

_T = TypeVar("_T")


def _number(value: float | None, digits: int = 4, signed: bool = False) -> str:
    """`digits` significant digits, without an exponent where that stays readable."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    sign = "+" if signed else ""
    if 1e-4 <= abs(value) < 10**digits:
        text = f"{value:{sign}#.{digits}g}".rstrip(".")
    else:
        text = f"{value:{sign}.{digits - 1}e}"
    return text.replace("-", "−", 1) if value < 0 else text


def _decibel(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}".replace("-", "−")


def _superscript(value: int) -> str:
    return str(value).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _percent(share: float | None) -> str:
    if share is None:
        return MISSING
    if share == 0:
        return "0"
    return f"{100 * share:.2f}" if share >= 1e-4 else f"{100 * share:.1e}"


def _count(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"


def _cell(value: float | None, show: Callable[[Any], str] = _number) -> Cell:
    return Cell(show(value), value)


def _text(text: str) -> Cell:
    return Cell(text, text)


def _operand_rank(name: str) -> tuple[int, str]:
    return (OPERANDS.index(name) if name in OPERANDS else len(OPERANDS), name)


def _forms_of(records: Iterable[Operand | LayerOutput | Sensitivity]) -> list[Form]:
    present = {record.form for record in records}
    return [form for form in ("original", "projected", "absorbed", "decode") if form in present]


class _Layers:
    """Positions and short labels of all attention layers of the report, in model order.

    Positions, not indices: a hybrid model has attention in every fourth layer only, and LongCat
    has two attentions in one layer.
    """

    def __init__(self, report: Report) -> None:
        records: list[_LayerRecord] = [
            *(report.operands or []),
            *(report.layers or []),
            *(report.statistics or []),
        ]
        names = sorted({(record.layer_index, record.layer) for record in records})
        self.position = {name: i for i, (_, name) in enumerate(names)}
        within: dict[int, list[str]] = {}
        for index, name in names:
            within.setdefault(index, []).append(name)
        self._label = {
            name: str(index) if len(group) == 1 else f"{index}.{group.index(name)}"
            for index, group in within.items()
            for name in group
        }

    def __len__(self) -> int:
        return len(self.position)

    @property
    def labels(self) -> list[str]:
        return [self._label[name] for name in self.position]

    def label(self, name: str) -> str:
        """The short label, or the full name of a layer that has no other measurement."""
        return self._label.get(name, name)


# ------------------------------------------------------------------------------------- plotting

# Matplotlib writes these unlikely colours; _svg replaces them by the style sheet's variables, so
# that one drawing serves the light, the dark and the printed page.
_INK = {
    name: f"#0a0b{i:02x}"
    for i, name in enumerate(("fg", "muted", "grid", "shade", "q", "k", "v", "p", "other", "layer"))
}
_HEAT = (0x2B / 255, 0x8C / 255, 0xD0 / 255)  # legible on a light and on a dark card
_WIDTH = 10.6
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mla_quant",
    "font.family": ["DejaVu Sans"],
    "font.size": 8,
    "text.parse_math": False,
    "text.color": _INK["fg"],
    "axes.edgecolor": _INK["muted"],
    "axes.labelcolor": _INK["fg"],
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.unicode_minus": True,
    "figure.facecolor": "none",
    "grid.color": _INK["grid"],
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "xtick.color": _INK["muted"],
    "ytick.color": _INK["muted"],
    "xtick.labelcolor": _INK["fg"],
    "ytick.labelcolor": _INK["fg"],
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
}


def _figure(rows: float) -> Figure:
    """A figure of the page's width and `rows` inches height."""
    return Figure(figsize=(_WIDTH, rows), layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.05))


def _svg(figure: Figure, name: str, description: str) -> Markup:
    """The figure as an inline SVG element with ids that are unique on the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", dpi=144, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Its <style> would apply to the whole page, which has the same rule for plots alone.
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text)
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    text = text.replace("'DejaVu Sans'", "var(--font)")
    for ink, code in _INK.items():
        text = text.replace(code, f"var(--ink-{ink})")
    width, height = re.findall(r'(?:width|height)="([\d.]+)pt"', text)[:2]
    head = Markup('<svg class="plot" role="img" aria-label="{}" viewBox="0 0 {} {}">').format(
        description, width, height
    )
    # Everything matplotlib wrote as text it has escaped itself.
    return head + Markup(text[text.index(">") + 1 :].strip())


def _operand_style(operand: str) -> dict[str, Any]:
    """Colour by role (q, k, v, p); the rope part dashed, so that colour is never alone."""
    role = operand[0] if operand[0] in "qkvp" else "other"
    rope = operand.endswith("rope")
    return {
        "color": _INK[role],
        "linestyle": (0, (4, 2)) if rope else "solid",
        "marker": {"q": "o", "k": "s", "v": "^", "p": "D"}.get(role, "x"),
        "markerfacecolor": "none" if rope else _INK[role],
    }


def _layer_axis(axes: Axes, layers: _Layers) -> None:
    axes.set_xlabel("layer")
    axes.set_xlim(-0.4, max(len(layers) - 0.6, 0.6))
    labels = layers.labels
    step = max(1, math.ceil(len(labels) / 16))
    axes.xaxis.set_major_locator(FixedLocator(list(range(0, len(labels), step))))
    axes.set_xticklabels(labels[::step])


def _profile(
    axes: Axes,
    layers: _Layers,
    points: Iterable[tuple[str, float | None]],
    label: str,
    line_style: Mapping[str, Any],
) -> None:
    """One line over the layers; it breaks where a layer has no value."""
    values: NDArray[np.float64] = np.full(len(layers), np.nan)
    for name, value in points:
        if value is not None:
            values[layers.position[name]] = value
    if np.isnan(values).all():
        return
    settings = dict(line_style)
    if len(layers) > 24:
        settings["markersize"] = 2.2
        settings["linewidth"] = 1.1
    axes.plot(np.arange(len(layers)), values, label=label, **settings)


def _panels(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """A row of panels that share the value axis."""
    figure = _figure(height)
    grid = figure.subplots(1, max(count, 1), sharey=True, squeeze=False)
    return figure, list(grid[0])


def _legend(axes: Axes) -> None:
    count = len(axes.get_legend_handles_labels()[0])
    if count:
        columns = count if count <= 4 else math.ceil(count / 2)
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=columns, handlelength=2.6
        )
    else:
        axes.text(0.5, 0.5, "nothing quantized", transform=axes.transAxes, ha="center")


def _operand_plot(operands: Sequence[Operand], layers: _Layers) -> Plot | None:
    if all(record.sqnr_db is None for record in operands):
        return None
    forms = _forms_of(operands)
    figure, panels = _panels(len(forms), 3.5)
    for axes, form in zip(panels, forms, strict=True):
        chosen = [record for record in operands if record.form == form]
        for name in sorted({record.operand for record in chosen}, key=_operand_rank):
            points = [(r.layer, r.sqnr_db) for r in chosen if r.operand == name]
            _profile(axes, layers, points, name, _operand_style(name))
        axes.set_title(FORM_TITLES[form])
        _layer_axis(axes, layers)
        _legend(axes)
    panels[0].set_ylabel("SQNR (dB)")
    caption = "SQNR of each quantized operand by layer, in dB; higher is better."
    return Plot(_svg(figure, "operands", caption), caption)


def _layer_plot(records: Sequence[LayerOutput], layers: _Layers) -> Plot | None:
    if all(r.attention_sqnr_db is None and r.hidden_sqnr_db is None for r in records):
        return None
    forms = _forms_of(records)
    figure, panels = _panels(len(forms), 3.0)
    for axes, form in zip(panels, forms, strict=True):
        chosen = [record for record in records if record.form == form]
        _profile(
            axes,
            layers,
            [(r.layer, r.attention_sqnr_db) for r in chosen],
            "attention output (own error)",
            {"color": _INK["layer"], "marker": "o"},
        )
        _profile(
            axes,
            layers,
            [(r.layer, r.hidden_sqnr_db) for r in chosen],
            "layer output (accumulated)",
            {"color": _INK["fg"], "marker": "s", "linestyle": (0, (4, 2))},
        )
        axes.set_title(FORM_TITLES[form])
        _layer_axis(axes, layers)
        _legend(axes)
    panels[0].set_ylabel("SQNR (dB)")
    caption = "SQNR of the attention output and of the layer output by layer, in dB."
    return Plot(_svg(figure, "layers", caption), caption)


MAX_BARS = 12


def _sensitivity_plots(records: Sequence[Sensitivity], layers: _Layers) -> list[Plot]:
    measured = [record for record in records if record.kl_mean is not None]
    if not measured:
        return []
    forms = _forms_of(measured)
    kinds = [k for k in ("operand", "layer") if any(r.kind == k for r in measured)]
    bars = {
        (kind, form): sorted(
            (r for r in measured if r.kind == kind and r.form == form),
            key=lambda r: -(r.kl_mean or 0.0),
        )[:MAX_BARS]
        for kind in kinds
        for form in forms
    }
    heights = [max(len(bars[kind, form]) for form in forms) for kind in kinds]
    figure = _figure(0.55 * len(kinds) + 0.2 * sum(heights) + 0.45)
    grid = figure.subplots(
        len(kinds),
        len(forms),
        squeeze=False,
        sharex=True,
        gridspec_kw={"height_ratios": [height + 1.5 for height in heights]},
    )
    largest = max(record.kl_mean or 0.0 for record in measured)
    for i, kind in enumerate(kinds):
        for j, form in enumerate(forms):
            axes: Axes = grid[i, j]
            chosen = bars[kind, form]
            values = [r.kl_mean or 0.0 for r in chosen]
            names = [
                f"layer {layers.label(r.target)}"
                if kind == "layer" and r.target in layers.position
                else r.target
                for r in chosen
            ]
            rows = range(len(chosen))
            colors = (
                [_operand_style(r.target or "?")["color"] for r in chosen]
                if kind == "operand"
                else [_INK["layer"]] * len(chosen)
            )
            axes.barh(rows, values, height=0.72, color=colors)
            for row, value in zip(rows, values, strict=True):
                axes.annotate(
                    _number(value, 3), (max(value, 0), row), (3, 0),
                    textcoords="offset points", va="center", fontsize=7,
                )  # fmt: skip
            axes.set_yticks(rows, [name if len(name) < 40 else f"{name[:38]}…" for name in names])
            axes.set_ylim(heights[i] - 0.4, -0.6)
            axes.grid(False, axis="y")
            axes.tick_params(axis="y", length=0)
            axes.set_xlim(0, (largest or 1.0) * 1.14)
            axes.xaxis.set_major_locator(MaxNLocator(6))
            what = {"operand": "one operand, all layers", "layer": "one layer, all operands"}
            more = sum(r.kind == kind and r.form == form for r in measured) - len(chosen)
            suffix = f" ({MAX_BARS} of {more + MAX_BARS})" if more else ""
            axes.set_title(f"{FORM_TITLES[form]}: {what[kind]}{suffix}")
    for axes in grid[-1]:
        axes.set_xlabel("mean KL divergence (nats/token)")
    caption = "Mean KL divergence when one thing is quantized alone; all panels share one scale."
    plots = [Plot(_svg(figure, "sensitivity", caption), caption)]
    if len({r.target for r in measured if r.kind == "layer"}) > MAX_BARS:
        plots.append(_sensitivity_profile(measured, layers))
    return plots


def _sensitivity_profile(records: Sequence[Sensitivity], layers: _Layers) -> Plot:
    """All layers in model order, for models with too many to sort into one bar chart."""
    chosen = [r for r in records if r.kind == "layer" and r.target in layers.position]
    forms = _forms_of(chosen)
    figure, panels = _panels(len(forms), 2.1)
    for axes, form in zip(panels, forms, strict=True):
        points = [r for r in chosen if r.form == form]
        axes.bar(
            [layers.position[r.target] for r in points],
            [r.kl_mean or 0.0 for r in points],
            width=0.8,
            color=_INK["layer"],
        )
        axes.grid(False, axis="x")
        axes.set_title(f"{FORM_TITLES[form]}: one layer, all operands")
        _layer_axis(axes, layers)
    if panels:
        panels[0].set_ylabel("mean KL (nats/token)")
    caption = "The same divergence of single layers, in model order."
    return Plot(_svg(figure, "profile", caption), caption)


_Dashes: TypeAlias = Literal["solid"] | tuple[float, Sequence[float]]

# Histograms: bins of a quarter octave on a grid common to all panels.
BINS_PER_OCTAVE = 4
MAX_OCTAVES = 36
MAX_RIDGES = 8
"""Up to this many layers each is drawn as a curve; beyond, as a row of a heat map."""

_LEVELS: tuple[tuple[str, _Dashes, str], ...] = (
    ("top", "solid", "amax: larger values saturate"),
    ("top_block_zero", (0, (5, 2)), "rounds to zero in the block that holds amax"),
    ("block_flush", (0, (5, 1.5, 1, 1.5)), "block with a maximum below this becomes zeros"),
    ("zero", (0, (1, 1.5)), "rounds to zero in every block"),
)


def _blocks(record: Statistics) -> Histogram | None:
    """Maxima of the blocks, where the format has blocks that they say something about."""
    return record.block_histogram if FORMATS[record.format].scale is not None else None


def _edges(histogram: Histogram) -> NDArray[np.float64]:
    """log2 of the edges of the bins, one more than there are bins."""
    octave, part = np.divmod(np.arange(len(histogram.counts) + 1), histogram.bins_per_octave)
    edges: NDArray[np.float64] = (
        histogram.log2_lower + octave + np.log2(1 + part / histogram.bins_per_octave)
    )
    return edges


def _rebin(histogram: Histogram, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Counts between log2 `edges`; what lies outside is added to the first and the last bin."""
    counts = np.asarray(histogram.counts, dtype=np.float64)
    own = _edges(histogram)
    cumulative = np.concatenate(([0.0], np.cumsum(counts)))
    at = np.interp(edges, own, cumulative)
    at[0], at[-1] = 0.0, cumulative[-1]
    binned: NDArray[np.float64] = np.diff(at)
    return binned


def _occupied(histogram: Histogram) -> tuple[float, float] | None:
    """Lower and upper log2 edge of the bins that are not empty."""
    occupied = np.flatnonzero(histogram.counts)
    if not occupied.size:
        return None
    edges = _edges(histogram)
    return float(edges[occupied[0]]), float(edges[occupied[-1] + 1])


@dataclass(frozen=True)
class _Scale:
    """What all histogram panels share: log2 bin edges, and the share drawn as zero height."""

    edges: NDArray[np.float64]
    floor: float

    @classmethod
    def of(cls, statistics: Sequence[Statistics]) -> _Scale:
        histograms = [h for s in statistics for h in (s.histogram, _blocks(s)) if h]
        ranges = [occupied for h in histograms if (occupied := _occupied(h))]
        for record in statistics:
            levels = format_range(record.format, record.amax)
            if levels:
                ranges.append((math.log2(levels["zero"]), math.log2(levels["top"])))
        if not ranges:
            ranges = [(-1.0, 0.0)]
        high = math.ceil(max(upper for _, upper in ranges)) + 1
        low = max(math.floor(min(lower for lower, _ in ranges)) - 1, high - MAX_OCTAVES)
        edges = np.linspace(low, high, (high - low) * BINS_PER_OCTAVE + 1)
        # One value of the largest histogram stays visible: outliers are what an amax is about.
        largest = max((sum(h.counts) + h.zeros for h in histograms), default=1)
        return cls(edges, 10.0 ** -min(max(math.ceil(math.log10(max(largest, 1))), 4), 10))

    def height(self, histogram: Histogram) -> NDArray[np.float64]:
        """log10 of the share of all values per bin, as 0 (floor or empty) to 1 (everything)."""
        total = sum(histogram.counts) + histogram.zeros
        share = _rebin(histogram, self.edges) / max(total, 1)
        with np.errstate(divide="ignore"):
            height: NDArray[np.float64] = 1 - np.log10(share) / math.log10(self.floor)
        return np.clip(height, 0.0, 1.0)


def _draw_levels(
    axes: Axes, rows: Sequence[tuple[float, Statistics]], low: float, above_image: bool
) -> None:
    """The representable range of each row's format: shaded, with its levels as lines."""
    segments: dict[str, list[tuple[float, float]]] = {}
    text_at: dict[str, tuple[float, str]] = {}
    for row, record in rows:
        levels = format_range(record.format, record.amax)
        if not levels:
            continue
        logs = {key: max(math.log2(level), low) for key, level in levels.items()}
        inner = logs.get("top_block_zero", logs["zero"])
        for left, opacity in ((logs["zero"], 0.5), (inner, 0.5)):
            axes.add_patch(
                Rectangle(
                    (left, row), logs["top"] - left, 1, zorder=0,
                    facecolor=_INK["shade"], alpha=opacity, linewidth=0,
                )
            )  # fmt: skip
        ratio = levels["top"] / levels.get("top_block_zero", math.inf) if inner else 0
        names = {
            "top": "amax",
            "top_block_zero": f"a/{ratio:g}",
            "block_flush": "flush",
            "zero": "zero",
        }
        for key, _, _ in _LEVELS:
            if key in logs:
                segments.setdefault(key, []).append((logs[key], row))
                text_at.setdefault(key, (logs[key], names[key]))
    for key, dashes, _ in _LEVELS:
        if key not in segments:
            continue
        x = [value for value, row in segments[key] for _ in (0, 1)]
        y = [edge for _, row in segments[key] for edge in (row, row + 1)]
        axes.plot(
            x, y, color=_INK["fg"], linestyle=dashes, linewidth=1.1 if above_image else 0.9,
            zorder=4, solid_capstyle="butt",
        )  # fmt: skip
        axes.annotate(
            text_at[key][1], (text_at[key][0], rows[0][0]), (0, 2), textcoords="offset points",
            ha="center", va="bottom", fontsize=6.5, color=_INK["fg"],
        )  # fmt: skip


def _histogram_panel(
    axes: Axes,
    records: Sequence[Statistics],
    layers: _Layers,
    scale: _Scale,
    pick: Callable[[Statistics], Histogram | None],
    as_image: bool,
) -> None:
    first = records[0]
    ink = _operand_style(first.operand)["color"]
    ordered = sorted(records, key=lambda record: layers.position[record.layer])
    rows = [(float(i), record) for i, record in enumerate(ordered)]
    low, high = float(scale.edges[0]), float(scale.edges[-1])
    _draw_levels(axes, rows, low, as_image)
    if as_image:
        image = np.zeros((len(rows), scale.edges.size - 1, 4))
        image[..., :3] = _HEAT
        for i, (_, record) in enumerate(rows):
            histogram = pick(record)
            if histogram is not None:
                height = scale.height(histogram)
                image[i, :, 3] = np.where(height > 0, 0.08 + 0.92 * height, 0.0)
        axes.imshow(
            image, extent=(low, high, len(rows), 0), aspect="auto", interpolation="nearest",
            zorder=2,
        )  # fmt: skip
        step = max(1, math.ceil(len(rows) / 8))
    else:
        for row, record in rows:
            base = row + 0.96
            histogram = pick(record)
            if histogram is not None:
                axes.stairs(
                    base - 0.86 * scale.height(histogram), scale.edges, baseline=base,
                    fill=True, color=ink, alpha=0.75, zorder=2, linewidth=0,
                )  # fmt: skip
            blocks = _blocks(record)
            if blocks is not None:
                height = scale.height(blocks)
                axes.stairs(
                    np.where(height > 0, base - 0.86 * height, np.nan), scale.edges,
                    baseline=base, color=_INK["fg"], linewidth=0.8, zorder=3,
                )  # fmt: skip
            axes.axhline(base, color=_INK["grid"], linewidth=0.6, zorder=1)
        step = 1
    shown = range(0, len(rows), step)
    axes.set_yticks([i + 0.5 for i in shown], [layers.label(ordered[i].layer) for i in shown])
    axes.set_xlim(low, high)
    axes.set_ylim(len(rows), 0)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    formats = sorted({record.format for record in records})
    axes.set_title(f"{first.operand}  ({', '.join(formats)})", pad=13)


def _histogram_plot(
    statistics: Sequence[Statistics],
    layers: _Layers,
    pick: Callable[[Statistics], Histogram | None],
    name: str,
    caption: str,
    as_image: bool,
) -> Plot | None:
    by_operand = {
        operand: [s for s in statistics if s.operand == operand and pick(s) is not None]
        for operand in sorted({s.operand for s in statistics}, key=_operand_rank)
    }
    by_operand = {operand: records for operand, records in by_operand.items() if records}
    if not by_operand:
        return None
    scale = _Scale.of(statistics)
    columns = 2 if len(by_operand) == 4 else min(3, len(by_operand))
    lines = math.ceil(len(by_operand) / columns)
    tallest = max(len(records) for records in by_operand.values())
    panel = min(2.3, 0.75 + 0.022 * tallest) if as_image else 0.6 + 0.36 * tallest
    figure = _figure(lines * (panel + 0.35) + 0.75)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True)
    panels: list[Axes] = list(grid.flat)
    for axes, records in zip(panels, by_operand.values(), strict=False):
        _histogram_panel(axes, records, layers, scale, pick, as_image)
    for axes in panels[len(by_operand) :]:
        axes.set_visible(False)
    for i, axes in enumerate(panels[: len(by_operand)]):
        axes.tick_params(axis="x", labelbottom=True)
        if i + columns >= len(by_operand):
            axes.set_xlabel("log₂ of the block's largest |x|" if "block" in name else "log₂ |x|")
        if i % columns == 0:
            axes.set_ylabel("layer")
    used = {key for s in statistics for key in format_range(s.format, s.amax)}
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=_INK["fg"], linestyle=dashes, linewidth=1.1, label=label)
        for key, dashes, label in _LEVELS
        if key in used
    ]
    if used:
        handles.insert(
            0, Patch(facecolor=_INK["shade"], label="range of the format (darker: in any block)")
        )
    if not as_image and any(_blocks(s) is not None for s in statistics):
        handles.append(
            Line2D([], [], color=_INK["fg"], linewidth=0.8, label="outline: maxima of the blocks")
        )
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=3, handlelength=3)
    decades = round(-math.log10(scale.floor))
    strength = "Colour strength" if as_image else "Height"
    caption += (
        f" {strength} is the share of values per quarter octave, on a logarithmic scale from "
        f"10{_superscript(-decades)} to 1."
    )
    return Plot(_svg(figure, name, caption), caption)


# ------------------------------------------------------------------------------------- sections


def _original_perplexity(row: Accuracy, base: Accuracy | None) -> float | None:
    """The original model's perplexity over a row's tokens: decoding covers only some."""
    if row.original_perplexity is not None:
        return row.original_perplexity
    return base.perplexity if base else None


def _original_nll(row: Accuracy, base: Accuracy | None) -> float | None:
    if row.original_perplexity:
        return math.log(row.original_perplexity)
    return base.nll if base else None


def _accuracy_section(report: Report) -> Section:
    rows = sorted(report.accuracy or [], key=lambda r: FORMS.index(r.form))
    base = next((r for r in rows if r.form == "original"), None)

    def difference(value: float | None, reference: float | None) -> float | None:
        return None if value is None or reference is None else value - reference

    columns = [
        Column("form", numeric=False),
        Column("perplexity"),
        Column("Δ\N{NO-BREAK SPACE}perplexity"),
        Column("NLL", "nats/token"),
        Column("std. error of NLL", "nats/token"),
        Column("Δ NLL", "nats/token"),
        Column("KL\N{NO-BREAK SPACE}mean", "nats/token"),
        Column("KL 99th perc.", "nats/token"),
        Column("KL largest", "nats/token"),
        Column("top-1 agreement", "%"),
        Column("tokens"),
    ]

    def signed(value: float | None) -> str:
        return _number(value, signed=True)

    table = [
        [
            _text(FORM_TITLES[r.form]),
            _cell(r.perplexity, lambda v: _number(v, 5)),
            _cell(
                None if r is base else difference(r.perplexity, _original_perplexity(r, base)),
                signed,
            ),
            _cell(r.nll, lambda v: _number(v, 5)),
            _cell(r.nll_stderr, lambda v: _number(v, 3)),
            _cell(None if r is base else difference(r.nll, _original_nll(r, base)), signed),
            _cell(r.kl_mean),
            _cell(r.kl_p99),
            _cell(r.kl_max),
            _cell(r.top1_agreement, _percent),
            _cell(r.tokens, _count),
        ]
        for r in rows
    ]
    return Section(
        "accuracy",
        "Accuracy",
        "Perplexity is exp(NLL) on the evaluation text. KL compares the next-token distributions, "
        "original against quantized, token by token: it shows changes that cancel in the "
        "perplexity. Top-1 agreement is the share of tokens whose most likely successor stays the "
        "same. The standard error is that of each row's own NLL over the text; all rows share the "
        "text, so their difference is known better than that.",
        "Run mla-quant evaluate to measure it.",
        tables=[Table("Accuracy of every form", columns, table)] if rows else [],
    )


def _lowest(records: Sequence[_T], value: Callable[[_T], float | None]) -> _T | None:
    known = [record for record in records if value(record) is not None]
    return min(known, key=lambda record: value(record) or 0.0, default=None)


def _highest(records: Sequence[_T], value: Callable[[_T], float | None]) -> _T | None:
    return _lowest(records, lambda r: None if (v := value(r)) is None else -v)


def _operand_section(report: Report, layers: _Layers) -> Section:
    records = sorted(
        report.operands or [],
        key=lambda r: (FORMS.index(r.form), layers.position[r.layer], _operand_rank(r.operand)),
    )
    summary: list[list[Cell]] = []
    for form in _forms_of(records):
        for name in sorted({r.operand for r in records if r.form == form}, key=_operand_rank):
            group = [r for r in records if r.form == form and r.operand == name]
            known = [r.sqnr_db for r in group if r.sqnr_db is not None]
            worst = _lowest(group, lambda r: r.sqnr_db)
            amax = [r.amax for r in group if r.amax is not None]
            saturated = [r.saturated_share for r in group if r.saturated_share is not None]
            flushed = [r.flushed_block_share for r in group if r.flushed_block_share is not None]
            summary.append(
                [
                    _text(FORM_TITLES[form]),
                    _text(name),
                    _text(", ".join(sorted({r.format for r in group}))),
                    _cell(min(known, default=None), _decibel),
                    _text(layers.label(worst.layer) if worst else MISSING),
                    _cell(median(known) if known else None, _decibel),
                    _cell(max(known, default=None), _decibel),
                    _cell(min(amax, default=None)),
                    _cell(max(amax, default=None)),
                    _cell(max(saturated, default=None), _percent),
                    _cell(max(flushed, default=None), _percent),
                ]
            )
    summary_columns = [
        Column("form", numeric=False),
        Column("operand", numeric=False),
        Column("format", numeric=False),
        Column("SQNR lowest", "dB"),
        Column("in layer"),
        Column("SQNR median", "dB"),
        Column("SQNR highest", "dB"),
        Column("amax smallest"),
        Column("amax largest"),
        Column("saturated, most", "% of values"),
        Column("flushed, most", "% of blocks"),
    ]
    columns = [
        Column("form", numeric=False),
        Column("layer"),
        Column("operand", numeric=False),
        Column("format", numeric=False),
        Column("amax"),
        Column("SQNR", "dB"),
        Column("saturated", "% of values"),
        Column("flushed", "% of blocks"),
        Column("values"),
    ]
    rows = [
        [
            _text(r.form),
            Cell(layers.label(r.layer), layers.position[r.layer]),
            _text(r.operand),
            _text(r.format),
            _cell(r.amax),
            _cell(r.sqnr_db, _decibel),
            _cell(r.saturated_share, _percent),
            _cell(r.flushed_block_share, _percent),
            _cell(r.values, _count),
        ]
        for r in records
    ]
    plot = _operand_plot(records, layers) if records else None
    tables = [
        Table("Operands over all layers", summary_columns, summary),
        Table("Every operand of every layer", columns, rows),
    ]
    return Section(
        "operands",
        "Operands",
        "SQNR is the signal power of an operand over the power of its quantization error, in dB: "
        "6 dB more halve the error. A layer far below its neighbours has outliers that set its "
        "amax; look at its histogram. Saturated values exceed amax; flushed blocks are so small "
        "against amax that their scale rounds to zero.",
        "Run mla-quant evaluate to measure it.",
        plots=[plot] if plot else [],
        tables=tables if records else [],
    )


def _layer_section(report: Report, layers: _Layers) -> Section:
    records = sorted(
        report.layers or [], key=lambda r: (FORMS.index(r.form), layers.position[r.layer])
    )
    columns = [
        Column("form", numeric=False),
        Column("layer"),
        Column("module", numeric=False),
        Column("attention output SQNR", "dB"),
        Column("layer output SQNR", "dB"),
    ]
    rows = [
        [
            _text(r.form),
            Cell(layers.label(r.layer), layers.position[r.layer]),
            _text(r.layer),
            _cell(r.attention_sqnr_db, _decibel),
            _cell(r.hidden_sqnr_db, _decibel),
        ]
        for r in records
    ]
    plot = _layer_plot(records, layers) if records else None
    return Section(
        "layers",
        "Layer outputs",
        "The attention output is compared with that of the unquantized attention on the same "
        "input: the error this layer adds. The layer output is compared with the original model: "
        "the error that has gathered so far, softened by the residual stream.",
        "Run mla-quant evaluate to measure it.",
        plots=[plot] if plot else [],
        tables=[Table("Output of every layer", columns, rows)] if rows else [],
    )


def _sensitivity_section(report: Report, layers: _Layers) -> Section:
    records = sorted(
        report.sensitivity or [],
        key=lambda r: (FORMS.index(r.form), r.kind != "operand", -(r.kl_mean or 0.0)),
    )
    columns = [
        Column("form", numeric=False),
        Column("quantized alone", numeric=False),
        Column("target", numeric=False),
        Column("KL\N{NO-BREAK SPACE}mean", "nats/token"),
        Column("perplexity"),
        Column("Δ\N{NO-BREAK SPACE}perplexity"),
        Column("top-1 agreement", "%"),
    ]
    rows = [
        [
            _text(r.form),
            _text(r.kind),
            _text(r.target),
            _cell(r.kl_mean),
            _cell(r.perplexity, lambda v: _number(v, 5)),
            _cell(r.delta_perplexity, lambda v: _number(v, signed=True)),
            _cell(r.top1_agreement, _percent),
        ]
        for r in records
    ]
    return Section(
        "sensitivity",
        "Sensitivity",
        "Each bar is a run in which only that operand (in all layers) or only that layer (all its "
        "operands) is quantized. The longest bars are the first candidates for FP8 or for no "
        "quantization. The sum of the bars need not equal the cost of quantizing everything.",
        "Run mla-quant evaluate with its sensitivity option to measure it.",
        plots=_sensitivity_plots(records, layers) if records else [],
        tables=[Table("Sensitivity, most sensitive first", columns, rows)] if rows else [],
    )


def _statistics_section(report: Report, layers: _Layers) -> Section:
    records = sorted(
        report.statistics or [],
        key=lambda r: (layers.position[r.layer], _operand_rank(r.operand)),
    )
    columns = [
        Column("layer"),
        Column("operand", numeric=False),
        Column("format", numeric=False),
        Column("amax"),
        Column("observed maximum"),
        Column("saturated", "% of values"),
        Column("flushed", "% of blocks"),
        Column("zeros", "% of values"),
        Column("not finite"),
        Column("values"),
        Column("in histogram", "values"),
    ]

    def zero_share(histogram: Histogram | None) -> float | None:
        if histogram is None:
            return None
        total = sum(histogram.counts) + histogram.zeros
        return histogram.zeros / total if total else None

    rows = [
        [
            Cell(layers.label(r.layer), layers.position[r.layer]),
            _text(r.operand),
            _text(r.format),
            _cell(r.amax),
            _cell(r.observed_max),
            _cell(r.saturated_share, _percent),
            _cell(r.flushed_block_share, _percent),
            _cell(zero_share(r.histogram), _percent),
            _cell(r.nonfinite, _count),
            _cell(r.values, _count),
            _cell(r.sampled_values, _count),
        ]
        for r in records
    ]
    as_image = len({r.layer for r in records}) > MAX_RIDGES
    plots = [
        _histogram_plot(
            records,
            layers,
            lambda s: s.histogram,
            "values",
            "Magnitudes of the values that calibration saw, one row per layer.",
            as_image,
        )
    ]
    if as_image:
        plots.append(
            _histogram_plot(
                records,
                layers,
                _blocks,
                "blocks",
                "Largest magnitudes of the blocks, one row per layer.",
                as_image,
            )
        )
    nvfp4 = format_range("nvfp4", 1.0)
    return Section(
        "statistics",
        "Calibration statistics",
        "The shaded range is what the format can represent at each layer's amax. Values right of "
        "the amax line saturate. In NVFP4 the block that holds amax rounds everything below "
        f"amax/{1 / nvfp4['top_block_zero']:.0f} to zero; other blocks bring their own scale and "
        "reach further down, until the flush line, below which a block's scale is zero. A long "
        "thin tail on the right means that a few outliers cost all others their resolution.",
        "Run mla-quant calibrate to measure it.",
        plots=[plot for plot in plots if plot] if records else [],
        tables=[Table("Statistics of every operand of every layer", columns, rows)] if rows else [],
    )


# ------------------------------------------------------------------------------------ head of page


def _cards(report: Report) -> list[Card]:
    rows = {r.form: r for r in report.accuracy or []}
    base = rows.get("original")
    cards = []
    for form, row in sorted(rows.items(), key=lambda item: FORMS.index(item[0])):
        delta = ""
        if form != "original":
            reference = _original_perplexity(row, base)
            if reference and row.perplexity is not None:
                change = row.perplexity - reference
                share = 100 * change / reference
                delta = f"{_number(change, 3, signed=True)} ({share:+,.2f} %)".replace("-", "−")
            facts = [
                ("KL mean", f"{_number(row.kl_mean)} nats/token"),
                ("top-1 agreement", f"{_percent(row.top1_agreement)} %"),
            ]
        else:
            facts = [
                ("NLL", f"{_number(row.nll)} ± {_number(row.nll_stderr, 2)} nats/token"),
                ("tokens", _count(row.tokens)),
            ]
        facts = [
            (name, "not measured" if text.startswith(MISSING) else text) for name, text in facts
        ]
        perplexity = "not measured" if row.perplexity is None else _number(row.perplexity, 4)
        cards.append(Card(form, FORM_TITLES[form], perplexity, delta, facts))
    return cards


def _findings(report: Report, layers: _Layers) -> list[str]:
    """The extremes that a reader would look for in the tables, one sentence each."""
    found = []
    operand = _lowest(report.operands or [], lambda r: r.sqnr_db)
    if operand:
        found.append(
            f"Lowest operand SQNR: {_decibel(operand.sqnr_db)} dB, {operand.operand} "
            f"({operand.format}) of layer {layers.label(operand.layer)}, {operand.form}."
        )
    attention = _lowest(report.layers or [], lambda r: r.attention_sqnr_db)
    if attention:
        found.append(
            f"Lowest attention output SQNR: {_decibel(attention.attention_sqnr_db)} dB, layer "
            f"{layers.label(attention.layer)}, {attention.form}."
        )
    for kind in ("operand", "layer"):
        worst = _highest(
            [r for r in report.sensitivity or [] if r.kind == kind], lambda r: r.kl_mean
        )
        if worst:
            target = worst.target if kind == "operand" else layers.label(worst.target)
            found.append(
                f"Most sensitive {kind}: {target}, {_number(worst.kl_mean)} nats/token alone, "
                f"{worst.form}."
            )
    shares: list[Operand | Statistics] = [*(report.operands or []), *(report.statistics or [])]
    saturated = _highest(shares, lambda r: r.saturated_share)
    flushed = _highest(shares, lambda r: r.flushed_block_share)
    for worst_share, share, what in (
        (saturated, saturated and saturated.saturated_share, "values saturated"),
        (flushed, flushed and flushed.flushed_block_share, "blocks flushed to zero"),
    ):
        if worst_share is None:
            continue
        if not share:
            found.append(f"No {what}.")
            continue
        found.append(
            f"Largest share of {what}: {_percent(share)} %, {worst_share.operand} of layer "
            f"{layers.label(worst_share.layer)}."
        )
    return found


def _warnings(report: Report, layers: _Layers) -> list[str]:
    """The producer's warnings and what the numbers themselves say is wrong."""
    found = list(report.warnings)
    for statistic in report.statistics or []:
        if statistic.nonfinite:
            found.append(
                f"{statistic.operand} of layer {layers.label(statistic.layer)}: "
                f"{_count(statistic.nonfinite)} values were NaN or infinite."
            )
    silent = [
        f"{r.operand} of layer {layers.label(r.layer)} ({r.form})"
        for r in report.operands or []
        if FORMATS[r.format].is_quantized and r.sqnr_db is None and r.amax != 0
    ]
    if silent:
        more = f" and {len(silent) - 5} more" if len(silent) > 5 else ""
        found.append(f"Quantized, but without a measured SQNR: {', '.join(silent[:5])}{more}.")
    return found


def _flat(value: Any) -> str:
    """A scalar of a free-form record as text."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return _count(value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _facts(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """A free-form record as (key, text); nested keys are joined by dots."""
    facts: list[tuple[str, str]] = []
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            facts += _facts(item, f"{name}.") or [(name, "none")]
        elif isinstance(item, list):
            simple = all(not isinstance(entry, (Mapping, list)) for entry in item)
            text = ", ".join(map(_flat, item)) if simple else json.dumps(item)
            facts.append((name, text or "none"))
        else:
            facts.append((name, _flat(item)))
    return facts


def _operand_formats(report: Report) -> str:
    """The recipe's format of each operand, in one line."""
    attention = (report.recipe.model_extra or {}).get("attention")
    if not isinstance(attention, Mapping):
        return ""
    parts = []
    for name in "qkpv":
        entry = attention.get(name)
        entry = entry.get("format") if isinstance(entry, Mapping) else entry
        if isinstance(entry, str):
            parts.append(f"{name.upper()} {entry}")
    absorbed = attention.get("absorbed")
    if isinstance(absorbed, Mapping):
        parts += [f"{name} {entry}" for name, entry in absorbed.items() if isinstance(entry, str)]
    return " · ".join(parts)


SCRIPT = """
for (const button of document.querySelectorAll('th button')) {
  button.addEventListener('click', () => {
    const head = button.parentElement;
    const body = head.closest('table').tBodies[0];
    const at = head.cellIndex;
    const up = head.getAttribute('aria-sort') === 'ascending';
    for (const other of head.parentElement.children) other.removeAttribute('aria-sort');
    head.setAttribute('aria-sort', up ? 'descending' : 'ascending');
    const key = (row) => row.cells[at].dataset.v;
    const compare = (a, b) => {
      if (a === '' || b === '') return (a === '') - (b === '');
      const by = isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
      return up ? -by : by;
    };
    body.append(...Array.from(body.rows).sort((a, b) => compare(key(a), key(b))));
  });
}
addEventListener('beforeprint', () => {
  for (const fold of document.querySelectorAll('details')) fold.open = true;
});
"""


def render_html(report: Mapping[str, Any]) -> str:
    """One self-contained HTML page of a report.

    Args:
        report: A report of schema version 1 (see `Report`), as read from report.json. NaN and
            infinities count as not measured and are listed among the warnings.

    Returns:
        The page. It loads nothing, and two renderings of one report are equal.

    Raises:
        ReportError: If the report has another schema version or does not follow the schema.
    """
    return _render(_checked(report)[1])


def _render(report: Report) -> str:
    layers = _Layers(report)
    with mpl_style.context(["default", _STYLE]):
        sections = [
            _accuracy_section(report),
            _operand_section(report, layers),
            _layer_section(report, layers),
            _sensitivity_section(report, layers),
            _statistics_section(report, layers),
        ]
    environment = Environment(
        loader=PackageLoader("mla_quant", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    model = report.model
    model_facts = [("source", model.source), ("family", model.family)]
    if model.layers is not None:
        model_facts.append(("attention layers", _count(model.layers)))
    if model.geometry is not None:
        model_facts += _facts(model.geometry.model_dump())
    model_facts += _facts(model.model_extra or {})
    data = report.data or Data()
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return environment.get_template("report.html.j2").render(
        report=report,
        formats=_operand_formats(report),
        cards=_cards(report),
        findings=_findings(report, layers),
        warnings=_warnings(report, layers),
        sections=sections,
        model_facts=model_facts,
        cache_facts=_facts(model.cache_bytes_per_token or {}),
        data_facts=[
            ("Calibration data", _facts(data.calibration or {})),
            ("Evaluation data", _facts(data.evaluation or {})),
            ("Environment", _facts(report.environment or {})),
        ],
        recipe=json.dumps(report.recipe.model_dump(), indent=2, ensure_ascii=False),
        script=Markup(SCRIPT),
        script_hash=digest,
    )


def _replace(path: Path, text: str) -> None:
    """Write `path` in one step: readers see the old file or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_report(report: Mapping[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write report.json and report.html, each replaced in one step.

    Args:
        report: A report of schema version 1. NaN and infinities are written as null, and a
            warning that names them is added to the file's `warnings`.
        folder: Where to write; made if it does not exist.

    Returns:
        The paths of report.json and report.html.

    Raises:
        ReportError: If the report does not follow the schema or `folder` is a file. Nothing is
            written then.
    """
    plain, checked = _checked(report)
    text = json.dumps(plain, indent=1, allow_nan=False) + "\n"
    # Histograms hold most of the numbers: one line each. A JSON string contains no line break, so
    # the pattern matches arrays of numbers only.
    text = re.sub(
        r"\[\n\s*([-+0-9.eE,\s]+?)\n\s*\]",
        lambda match: "[" + re.sub(r",\s+", ", ", match[1]) + "]",
        text,
    )
    page = _render(checked)
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ReportError(f"report folder {str(folder)!r} is a file; give a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "report.json", folder / "report.html"
    for path, content in zip(paths, (text, page), strict=True):
        _replace(path, content)
    return paths
