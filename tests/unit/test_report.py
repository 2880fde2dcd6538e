"""The report: schema, strict JSON, and the page made of it."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mla_quant.errors import MlaQuantError
from mla_quant.report import ReportError, format_range, render_html, write_report

PROJECTED = ("q", "k", "p", "v")
ABSORBED = ("q_latent", "q_rope", "k_latent", "k_rope", "v_latent", "p")
# Standard deviation and strength of the outliers, of the order that MLA models show.
SHAPES = {
    "q": (1.4, 3.0), "k": (1.1, 6.0), "p": (0.02, 1.0), "v": (0.35, 2.0), "q_latent": (2.6, 4.0),
    "q_rope": (1.8, 3.0), "k_latent": (0.8, 5.0), "k_rope": (2.2, 24.0), "v_latent": (0.8, 5.0),
}  # fmt: skip


def histogram(values: np.ndarray, bins_per_octave: int = 32) -> dict[str, Any]:
    exponents = np.floor(np.log2(values[values > 0]))
    lower, upper = int(exponents.min(initial=0)), int(exponents.max(initial=0)) + 1
    steps = np.arange(bins_per_octave) / bins_per_octave
    edges = np.concatenate([2.0**octave * (1 + steps) for octave in range(lower, upper)])
    return {
        "log2_lower": lower,
        "bins_per_octave": bins_per_octave,
        "counts": np.histogram(values, [*edges, 2.0**upper])[0].tolist(),
        "zeros": int((values == 0).sum()),
    }


def fake_report(
    layers: int, seed: int = 0, chosen: Collection[str] = tuple(SHAPES)
) -> dict[str, Any]:
    """What evaluate would write for a model of that many layers: consistent, invented numbers."""
    rng = np.random.default_rng(seed)
    formats = dict.fromkeys(SHAPES, "nvfp4") | {"p": "fp8"}
    statistics, operands, outputs, sensitivity = [], [], [], []
    size = 8192 if layers <= 8 else 2048
    for index in range(layers):
        name = f"model.layers.{index}.self_attn"
        depth = index / max(layers - 1, 1)
        for operand, (sigma, tail) in SHAPES.items():
            if operand not in chosen:
                continue
            values = np.abs(rng.normal(0, sigma * 2 ** rng.normal(0, 0.3), size))
            if operand == "p":
                values = np.exp(rng.normal(-6, 2.5, size)).clip(0, 1)
                values[: size // 8] = 0
            else:
                values[rng.integers(0, size, 12)] *= tail * (1 + depth)
            blocks = values.reshape(-1, 16).max(axis=1)
            amax = 1.0 if operand == "p" else float(values.max())
            statistics.append(
                {
                    "layer": name,
                    "layer_index": index,
                    "operand": operand,
                    "amax": amax,
                    "observed_max": float(values.max()),
                    "values": 5 * size,
                    "sampled_values": size,
                    "nonfinite": 0,
                    "format": formats[operand],
                    "saturated_share": 0.0,
                    "flushed_block_share": None
                    if operand == "p"
                    else float((blocks <= amax * 2**-10 / 448).mean()),
                    "histogram": histogram(values),
                    "block_histogram": histogram(blocks),
                }
            )
            base = 31.2 if operand == "p" else 20.9 - 1.2 * math.log2(tail)
            for form, names in (("projected", PROJECTED), ("absorbed", ABSORBED)):
                if operand in names:
                    operands.append(
                        {
                            "form": form,
                            "layer": name,
                            "layer_index": index,
                            "operand": operand,
                            "format": formats[operand],
                            "amax": amax,
                            "sqnr_db": round(base - 2 * depth + float(rng.normal(0, 0.4)), 4),
                            "saturated_share": 0.0 if index else 0.00031,
                            "flushed_block_share": 0.0,
                            "values": size,
                        }
                    )
        for form, loss in (("projected", 0.0), ("absorbed", 0.7)):
            outputs.append(
                {
                    "form": form,
                    "layer": name,
                    "layer_index": index,
                    "attention_sqnr_db": 18.5 - loss - 1.5 * depth + float(rng.normal(0, 0.5)),
                    "hidden_sqnr_db": 33.0 - loss - 4 * math.log2(index + 1),
                }
            )
            kl = 0.004 * (1 + loss) * float(rng.gamma(1.3)) / layers
            sensitivity.append(
                {
                    "form": form,
                    "kind": "layer",
                    "target": name,
                    "kl_mean": kl,
                    "perplexity": 24.31 * (1 + kl),
                    "delta_perplexity": 24.31 * kl,
                    "top1_agreement": 0.995,
                }
            )
    for form, names in (("projected", PROJECTED), ("absorbed", ABSORBED)):
        for operand in (name for name in names if name in chosen):
            kl = {"p": 0.0002, "k": 0.0061, "k_rope": 0.0083}.get(operand, 0.0024)
            sensitivity.append(
                {
                    "form": form,
                    "kind": "operand",
                    "target": operand,
                    "kl_mean": kl,
                    "perplexity": 24.31 * (1 + kl),
                    "delta_perplexity": 24.31 * kl,
                    "top1_agreement": 0.9871,
                }
            )
    return {
        "schema_version": 1,
        "created": "2025-11-30T07:25:00+00:00",
        "producer": {"name": "mla-quant", "version": "0.1.0"},
        "environment": {
            "torch": "2.13.0",
            "transformers": "5.17.0",
            "modelopt": "0.47.0",
            "device": "cpu",
        },
        "model": {
            "source": "examples/tiny_mla",
            "family": "deepseek_v3",
            "layers": layers,
            "geometry": {
                "num_heads": 4,
                "q_lora_rank": 96,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
            },
            "skipped": [
                {
                    "name": "model.mtp.self_attn",
                    "class": "DraftAttention",
                    "reason": "draft layer, not part of the main forward",
                }
            ],
            "cache_bytes_per_token": {"bf16": 1152 * layers, "fp8": 656 * layers},
        },
        "recipe": {
            "name": "nvfp4_mla",
            "attention": {"q": "nvfp4", "k": "nvfp4", "p": "fp8", "v": "nvfp4"},
            "sparsity": None,
        },
        "data": {
            "calibration": {"source": "calibration.jsonl", "sequences": 64, "tokens": 32768},
            "evaluation": {
                "source": "heldout.jsonl",
                "sequences": 32,
                "tokens": 16384,
                "seq_len": 512,
            },
        },
        "accuracy": [
            accuracy("original", 24.317, 0.0),
            accuracy("projected", 24.793, 0.01934),
            accuracy("absorbed", 24.901, 0.02267),
        ],
        "operands": operands,
        "layers": outputs,
        "sensitivity": sensitivity,
        "statistics": statistics,
        "warnings": ["no calibration text of the chat template's roles was given"],
    }


def accuracy(form: str, perplexity: float, kl: float) -> dict[str, Any]:
    original = form == "original"
    return {
        "form": form,
        "perplexity": perplexity,
        "nll": math.log(perplexity),
        "nll_stderr": 0.0113,
        "kl_mean": None if original else kl,
        "kl_p99": None if original else 11.5 * kl,
        "kl_max": None if original else 0.8125,
        "top1_agreement": None if original else 0.9713,
        "tokens": 16352,
    }


class Page(HTMLParser):
    """Checks that elements are closed in order; collects text, attributes and table rows."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(html)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.stack.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.stack, f"</{tag}> without a start"
        assert self.stack.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] in ("style", "script"):
            return
        self.texts.append(data)
        if any(tag in ("td", "th") for tag in self.stack):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def ids(self) -> list[str]:
        return [value for _, name, value in self.attributes if name == "id"]


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    return fake_report(4)


@pytest.fixture(scope="module")
def tiny() -> dict[str, Any]:
    """For tests of structure: quick to draw."""
    return fake_report(2, chosen=("q", "p", "k_rope"))


@pytest.fixture(scope="module")
def small_html(small: dict[str, Any]) -> str:
    return render_html(small)


@pytest.fixture(scope="module")
def large_html() -> str:
    return render_html(fake_report(61))


def number(text: str) -> float:
    return float(text.replace("−", "-").replace(",", ""))


def test_page_is_well_formed_and_ids_are_unique(small_html: str) -> None:
    page = Page(small_html)
    assert small_html.startswith("<!doctype html>")
    assert page.tags["html"] == page.tags["body"] == page.tags["main"] == 1
    assert [i for i, count in Counter(page.ids).items() if count > 1] == []
    # Every reference inside the page, from the navigation or from a plot, has its target.
    used = {v[1:] for _, n, v in page.attributes if n == "href" and v.startswith("#")}
    used |= set(re.findall(r"url\(#([^)]+)\)", small_html))
    assert used <= set(page.ids)


@pytest.mark.parametrize("layers", [4, 61])
def test_page_loads_nothing(layers: int, small_html: str, large_html: str) -> None:
    html = small_html if layers == 4 else large_html
    assert "http:" not in html
    assert "https:" not in html
    assert "@import" not in html
    for tag, name, value in Page(html).attributes:
        if name in ("src", "href", "srcset", "data", "action", "xlink:href"):
            assert value.startswith(("#", "data:image/png;base64,")), (tag, name, value[:60])


def test_sizes_and_plot_kinds(small_html: str, large_html: str) -> None:
    assert len(small_html.encode()) < 2e6
    assert len(large_html.encode()) < 6e6
    # Four layers are drawn as curves; 61 as heat maps: one per operand, and one per operand with
    # blocks (all but p).
    assert Page(small_html).tags["image"] == 0
    assert Page(large_html).tags["image"] == 9 + 8
    assert Page(small_html).tags["details"] == 2  # the tables of 40 and of 36 rows
    assert Page(small_html).tags["svg"] == 4
    assert Page(large_html).tags["svg"] == 6


def test_rendering_is_deterministic(tiny: dict[str, Any]) -> None:
    assert render_html(copy.deepcopy(tiny)) == render_html(tiny)


def test_headline_numbers(small_html: str) -> None:
    text = Page(small_html).text
    assert "24.32 perplexity" in text
    assert "24.79 perplexity +0.476 (+1.96 %) against the original" in text
    assert "24.90 perplexity +0.584 (+2.40 %) against the original" in text
    assert "KL mean 0.01934 nats/token" in text
    assert "top-1 agreement 97.13 %" in text
    assert "Q nvfp4 · K nvfp4 · P fp8 · V nvfp4" in text
    assert "Most sensitive operand: k_rope, 0.008300 nats/token alone, absorbed." in text
    assert "1 warning" in text
    assert "no calibration text of the chat template's roles was given" in text


def test_tables_hold_every_measurement(small: dict[str, Any], small_html: str) -> None:
    page = Page(small_html)
    for record in small["operands"]:
        head = [record["form"], str(record["layer_index"]), record["operand"]]
        (row,) = [r for r in page.rows if r[:3] == head and len(r) == 9]
        assert number(row[4]) == pytest.approx(record["amax"], rel=5e-4)
        assert number(row[5]) == pytest.approx(record["sqnr_db"], abs=0.0051)
        assert number(row[6]) / 100 == pytest.approx(record["saturated_share"], rel=0.05)
        assert number(row[8]) == record["values"]
    for record in small["layers"]:
        head = [record["form"], str(record["layer_index"]), record["layer"]]
        (row,) = [r for r in page.rows if r[:3] == head]
        assert number(row[3]) == pytest.approx(record["attention_sqnr_db"], abs=0.0051)
        assert number(row[4]) == pytest.approx(record["hidden_sqnr_db"], abs=0.0051)
    for record in small["sensitivity"]:
        (row,) = [
            r for r in page.rows if r[:3] == [record["form"], record["kind"], record["target"]]
        ]
        assert number(row[3]) == pytest.approx(record["kl_mean"], rel=5e-4)
        assert number(row[4]) == pytest.approx(record["perplexity"], rel=5e-5)
        assert number(row[5]) == pytest.approx(record["delta_perplexity"], rel=5e-4)
    for record in small["statistics"]:
        head = [str(record["layer_index"]), record["operand"], record["format"]]
        (row,) = [r for r in page.rows if r[:3] == head]
        assert number(row[4]) == pytest.approx(record["observed_max"], rel=5e-4)
        zeros = record["histogram"]["zeros"] / record["sampled_values"]
        assert number(row[7]) / 100 == pytest.approx(zeros, abs=5.1e-5)
    for text in (
        "kv_lora_rank 512",
        "bf16 4,608",
        "torch 2.13.0",
        "DraftAttention",
        "heldout.jsonl",
    ):
        assert text in page.text
    # Sorting uses the unrounded values.
    values = {v for _, n, v in page.attributes if n == "data-v"}
    assert {str(r["sqnr_db"]) for r in small["operands"]} <= values


def test_hostile_text_is_escaped(tiny: dict[str, Any]) -> None:
    hostile = (
        "</title><script>alert(1)</script>\"'><img src=http://example.invalid/x onerror=a()> $\\x$"
    )
    report = copy.deepcopy(tiny)
    report["model"]["source"] = hostile
    report["recipe"]["name"] = hostile
    report["warnings"] = [hostile]
    report["environment"][hostile] = hostile
    report["model"]["skipped"][0]["reason"] = hostile
    report["sensitivity"].append(
        report["sensitivity"][0] | {"target": hostile, "kl_mean": 0.5}  # drawn as a bar's label
    )
    for record in report["operands"] + report["layers"] + report["statistics"]:
        if record["layer_index"] == 1:
            record["layer"] = hostile
    page = Page(render_html(report))
    assert page.tags["script"] == 1
    assert page.tags["img"] == 0
    assert not any(name.startswith("on") for _, name, _ in page.attributes)
    assert page.text.count("<script>alert(1)</script>") > 5


def test_script_is_the_one_the_policy_allows(small_html: str) -> None:
    (script,) = re.findall(r"<script>(.*?)</script>", small_html, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest.replace('+', '&#43;')}'" in small_html or (
        f"script-src 'sha256-{digest}'" in small_html
    )


@pytest.mark.parametrize("empty", [None, [], "absent"])
def test_absent_sections_say_not_measured(tiny: dict[str, Any], empty: Any) -> None:
    report = copy.deepcopy(tiny)
    optional = ["accuracy", "operands", "layers", "sensitivity", "statistics"]
    for key in optional:
        if empty == "absent":
            del report[key]
        else:
            report[key] = empty
    report["data"] = {"calibration": None}
    page = Page(render_html(report))
    # Five sections, and the calibration and evaluation data.
    assert page.text.count("not measured.") == 7
    assert page.tags["svg"] == 0
    assert "Run mla-quant evaluate" in page.text


@pytest.mark.parametrize("key", ["accuracy", "operands", "layers", "sensitivity", "statistics"])
def test_one_absent_section_leaves_the_others(tiny: dict[str, Any], key: str) -> None:
    report = {name: value for name, value in tiny.items() if name != key}
    page = Page(render_html(report))
    assert page.text.count("not measured.") == 1
    assert page.tags["svg"] == (4 if key == "accuracy" else 3)


MINIMAL: dict[str, Any] = {
    "schema_version": 1,
    "created": "2025-11-30",
    "producer": {"name": "mla-quant", "version": "0"},
    "model": {"source": "m", "family": "youtu"},
    "recipe": {"name": "r"},
}


def test_minimal_report_renders() -> None:
    assert "not measured." in Page(render_html(MINIMAL)).text


def nulled(value: Any) -> Any:
    """The report with every measured number null."""
    keep = {"layer_index", "schema_version", "log2_lower", "bins_per_octave"}
    if isinstance(value, dict):
        return {
            k: v
            if k in keep or k in ("model", "recipe", "histogram", "block_histogram")
            else nulled(v)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [nulled(item) for item in value]
    return None if isinstance(value, (int, float)) else value


def test_every_measurement_may_be_null(tiny: dict[str, Any]) -> None:
    page = Page(render_html(nulled(tiny)))
    assert "Quantized, but without a measured SQNR: q of layer 0 (projected)" in page.text
    assert "not measured perplexity" in page.text
    assert page.tags["svg"] == 1  # the histograms, without a range: their amax is unknown
    assert not re.search(r"\b(nan|None|inf)\b", page.text)


def test_unquantized_operand_is_no_warning(tiny: dict[str, Any]) -> None:
    report = copy.deepcopy(tiny)
    for record in report["operands"] + report["statistics"]:
        if record["operand"] == "q":
            record |= (
                {"format": "none", "sqnr_db": None} if "sqnr_db" in record else {"format": "none"}
            )
    page = Page(render_html(report))
    assert "without a measured SQNR" not in page.text
    assert "1 warning" in page.text


def test_hybrid_and_double_layers() -> None:
    # Attention in layers 3 and 7 only, two modules each: positions, not indices, on the axes.
    report = fake_report(4, chosen=("q",))
    for key in ("operands", "layers", "statistics"):
        for record in report[key]:
            i = record["layer_index"]
            record["layer_index"] = 3 + 4 * (i // 2)
            record["layer"] = f"model.layers.{record['layer_index']}.self_attn.{i % 2}"
    page = Page(render_html(report))
    labels = {row[1] for row in page.rows if row and row[0] == "projected"}
    assert {"3.0", "3.1", "7.0", "7.1"} <= labels


def test_empty_histogram_and_zero_amax(tiny: dict[str, Any]) -> None:
    report = copy.deepcopy(tiny)
    report["statistics"][0] |= {
        "amax": 0.0,
        "observed_max": 0.0,
        "histogram": {"log2_lower": 0.0, "bins_per_octave": 8, "counts": [], "zeros": 8192},
        "block_histogram": {"log2_lower": -3.0, "bins_per_octave": 8, "counts": [0], "zeros": 9},
    }
    report["statistics"][1]["nonfinite"] = 1234
    page = Page(render_html(report))
    assert "p of layer 0: 1,234 values were NaN or infinite." in page.text
    (row,) = [r for r in page.rows if r[:3] == ["0", "q", "nvfp4"]]
    assert number(row[7]) == 100


@pytest.mark.parametrize("version", [0, 2, "1", None, True, "absent"])
def test_unknown_schema_version(version: Any) -> None:
    report = MINIMAL | {"schema_version": version}
    if version == "absent":
        del report["schema_version"]
    with pytest.raises(ReportError, match=r"schema_version is .* reads 1"):
        render_html(report)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"acuracy": []}, r"acuracy: Extra inputs"),
        ({"accuracy": [{"form": "stepwise"}]}, r"accuracy\.0\.form: .*found 'stepwise'"),
        ({"accuracy": [{"form": "absorbed", "top1_agreement": 97.1}]}, r"top1_agreement.*97\.1"),
        ({"accuracy": [{"form": "absorbed", "kl": 0.1}]}, r"accuracy\.0\.kl: Extra"),
        ({"accuracy": [{"form": "absorbed", "nll": "3.2"}]}, r"nll: .*number"),
        (
            {"operands": [{"form": "projected", "layer": "l", "layer_index": 0, "operand": "q",
                           "format": "int8"}]},
            r"unknown format 'int8'; known: fp8, none, nvfp4",
        ),
        ({"created": Path("x")}, r"created is a PosixPath.*Convert"),
        ({"recipe": {"name": "r", 3: 4}}, r"key 3 under recipe is a int"),
        ({"recipe": {}}, r"recipe\.name: Field required"),
    ],
)  # fmt: skip
def test_violations_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ReportError, match=message) as caught:
        render_html(MINIMAL | change)
    assert isinstance(caught.value, MlaQuantError)


def test_not_a_mapping() -> None:
    with pytest.raises(ReportError, match="expected a mapping"):
        render_html([])  # type: ignore[arg-type]


def test_written_json_is_strict_and_complete(tiny: dict[str, Any], tmp_path: Path) -> None:
    report = copy.deepcopy(tiny)
    report["accuracy"][1]["perplexity"] = math.inf
    report["operands"][2]["sqnr_db"] = np.float32("nan")
    report["sensitivity"][0]["kl_mean"] = np.float32(0.25)
    report["recipe"]["note"] = {"limits": (1, -math.inf)}
    before = copy.deepcopy(report)
    json_path, html_path = write_report(report, tmp_path / "new" / "out")
    assert (json_path.name, html_path.name) == ("report.json", "report.html")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    written = json.loads(json_path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert written["accuracy"][1]["perplexity"] is None
    assert written["operands"][2]["sqnr_db"] is None
    assert written["sensitivity"][0]["kl_mean"] == 0.25
    assert written["recipe"]["note"] == {"limits": [1, None]}
    assert written["warnings"] == [
        *tiny["warnings"],
        "recipe.note.limits[1] was -inf and is recorded as null.",
        "accuracy[1].perplexity was inf and is recorded as null.",
        "operands[2].sqnr_db was nan and is recorded as null.",
    ]
    assert written["statistics"] == tiny["statistics"]
    # The file alone gives the same page, and the caller's report is untouched.
    assert render_html(written) == html_path.read_text(encoding="utf-8")
    assert repr(report) == repr(before)
    assert sorted(p.name for p in json_path.parent.iterdir()) == ["report.html", "report.json"]


def test_writing_replaces_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(MINIMAL, tmp_path)
    old = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    changed = MINIMAL | {"created": "2026-01-01"}

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mla_quant.report.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(changed, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == old
    monkeypatch.undo()
    with pytest.raises(ReportError):
        write_report(changed | {"schema_version": 9}, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == old
    with (tmp_path / "report.json").open("rb") as reader:
        write_report(changed, tmp_path)
        assert reader.read() == old["report.json"]  # who was reading keeps the old file, whole
    assert {p.name for p in tmp_path.iterdir()} == set(old)
    assert "2026-01-01" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ReportError, match="is a file"):
        write_report(MINIMAL, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


# ---- format_range: the levels against conversions that know nothing of this package


def scaled(values: np.ndarray, dtype: Any) -> np.ndarray:
    return values.astype(dtype).astype(np.float64)


def just_around(level: float) -> np.ndarray:
    return np.array([level * (1 - 1e-6), level, level * (1 + 1e-6)])


@pytest.mark.parametrize("amax", [1.0, 6.25, 0.0123, 3e4])
def test_fp8_range(amax: float) -> None:
    levels = format_range("fp8", amax)
    assert list(levels) == ["top", "smallest", "zero"]

    def quantize(x: np.ndarray) -> np.ndarray:
        return scaled(np.clip(x / (amax / 448), -448, 448), ml_dtypes.float8_e4m3fn) * amax / 448

    assert quantize(just_around(levels["zero"])) == pytest.approx([0, 0, levels["smallest"]])
    assert quantize(np.array([levels["top"], 2 * levels["top"]])) == pytest.approx([amax, amax])


@pytest.mark.parametrize("amax", [1.0, 6.25, 0.0123, 3e4])
def test_nvfp4_range(amax: float) -> None:
    levels = format_range("nvfp4", amax)
    assert sorted(levels.values(), reverse=True) == list(levels.values())
    g = amax / (6 * 448)

    def scale(block_amax: np.ndarray) -> np.ndarray:
        return scaled(np.minimum(block_amax / (6 * g), 448), ml_dtypes.float8_e4m3fn)

    def element(x: np.ndarray, s: float) -> np.ndarray:
        return scaled(np.clip(x / (s * g), -6, 6), ml_dtypes.float4_e2m1fn) * s * g

    assert scale(just_around(levels["block_flush"])) == pytest.approx([0, 0, 2**-9])
    top = float(scale(np.array([amax]))[0])
    assert element(np.array([levels["top"], 9 * amax]), top) == pytest.approx([amax, amax])
    assert element(just_around(levels["top_block_zero"]), top) == pytest.approx(
        [0, 0, levels["top_block_smallest"]]
    )
    assert element(just_around(levels["zero"]), 2**-9) == pytest.approx([0, 0, levels["smallest"]])
    assert levels["top_block_zero"] == pytest.approx(amax / 24)


def test_range_of_unquantized_unknown_and_empty() -> None:
    assert format_range("none", 3.0) == {}
    assert format_range("fp8", None) == {}
    assert format_range("nvfp4", 0.0) == {}
    with pytest.raises(ReportError, match="unknown format 'int8'"):
        format_range("int8", 1.0)
