"""What KV-cache records cost in accuracy: on the example model, and on synthetic latents.

    python -m benchmarks.record_accuracy
    python -m benchmarks.record_accuracy --only double   # keep what else was measured before
    python -m benchmarks.record_accuracy --readme        # write the results into the manual

Model: attention runs in float32 on what a cache of records would give back for every token, its
normed latent and its rotated rope part packed and unpacked. Perplexity and KL divergence from the
original model on held-out text; outer scales from the calibration text. To show where these matter,
the same model is measured with small latents too: a power of two moves from the weight of the
latent's norm into the up-projection, which leaves the function as it is, bit for bit.

Synthetic: all formats on Gaussian latents. Relative errors of the latents read back, and of
attention on them in absorbed form. The rope part has σ 1, and queries are scaled so that scores
have σ 1 whatever that of the latent. With an outer scale, that of other latents of the same σ.

Double: a cache of records under quantized attention, which quantizes K and V from what records
read as. Signal to quantization noise ratio (SQNR) of the absorbed operands of the example model,
against its latents, all layers together: of the operand quantized from the latents, of what the
record reads as, and of the operand quantized from that. Ranges and outer scales are those of the
same text. In NVFP4 the rope part has its blocks where transformers' order of its values puts them.

Results go to `benchmarks/results/record_accuracy.json`; the manual holds nothing else.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.calibration_overhead import RESULTS, hardware
from benchmarks.readme import insert
from benchmarks.recipe_accuracy import MODEL
from mla_quant.calibration import run_batch
from mla_quant.data import DataSpec, TokenBatch, load_samples, make_batches
from mla_quant.evaluation import _forward, _sqnr_db, _Tally
from mla_quant.families import MLALayer, find_mla_layers
from mla_quant.formats import FORMATS
from mla_quant.loading import load_model, load_tokenizer, open_checkpoint
from mla_quant.recipes import OPERAND_AXIS, AttentionRecipe, load_recipe
from mla_quant.records import RECORDS, RecordFormat, outer_scale, pack, unpack
from mla_quant.reference import quantize_dequantize

RESULT = RESULTS / "record_accuracy.json"
WINDOW = 512
"""Tokens in a window of text."""
BATCH = 4
"""Windows of a forward pass."""
MODEL_SIGMAS = (None, 0.01, 0.001)
"""Standard deviations of the model's latents, about; None: as trained."""
SIGMAS = (1.0, 0.01, 0.001)
"""Standard deviations of synthetic latents."""
QUERIES, TOKENS, ROPE = 16, 1024, 64
DOUBLE_WINDOWS = 8
"""Windows of calibration text whose latents are quantized twice, at most."""
DOUBLE_RECIPES = ("nvfp4_mla", "fp8_mla")
CACHED_OPERANDS = {"k_latent": "K latent", "k_rope": "K rope", "v_latent": "V latent"}
"""Operands that come from the cache, and what tables call them."""

Read = Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Given a layer's name, its latents [tokens, width] and its rotated rope parts [tokens, width]:
what its cache reads as."""


# --- the model


def mla_layers(model: nn.Module) -> tuple[MLALayer, ...]:
    """The MLA layers of a model, which must be ones that take up what a cache returns."""
    layers = find_mla_layers(model).require()
    if not all(hasattr(type(layer.module), "expand_kv") for layer in layers):
        raise SystemExit("this needs a transformers that caches latents: 5.15 or later")
    return layers


@contextmanager
def reading(model: nn.Module, read: Read) -> Iterator[None]:
    """Let attention see, of all tokens, what `read` gives for latent and rope part."""
    layers = mla_layers(model)

    def replaced(layer: MLALayer) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        def expand(latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
            shape = latent.shape[:-1]
            # transformers leaves the rotated values in halves where some engines interleave them.
            # To 16-bit and to unscaled E4M3 values the order is nothing, nor is it to values with
            # one scale for all of them, so that no format here reads others for it.
            parts = read(layer.name, latent.flatten(0, -2), rope.flatten(0, -2))
            module: Any = layer.module
            expanded = type(module).expand_kv(module, *(part.unflatten(0, shape) for part in parts))
            return expanded[0], expanded[1]

        return expand

    try:
        for layer in layers:
            layer.module.__dict__["expand_kv"] = replaced(layer)
        yield
    finally:
        for layer in layers:
            layer.module.__dict__.pop("expand_kv", None)


def through_records(fmt: RecordFormat, outer: Mapping[str, float] | None = None) -> Read:
    """Through records of a format, with the outer scale of each layer; 1 without."""

    def read(layer: str, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        scale = 1.0 if outer is None else outer[layer]
        return unpack(pack(latent, rope, fmt, outer_scale=scale), fmt, outer_scale=scale)

    return read


def through_bfloat16(_: str, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """What a cache without records keeps."""
    return latent.bfloat16().float(), rope.bfloat16().float()


def fold(model: nn.Module, exponents: Mapping[str, int]) -> None:
    """Divide the latents of each layer by 2^exponent and multiply the up-projection by it.

    The model's outputs stay the same, bit for bit, as long as nothing underflows.
    """
    with torch.no_grad():
        for layer in mla_layers(model):
            module: Any = layer.module
            module.kv_a_layernorm.weight.mul_(2.0 ** -exponents[layer.name])
            module.kv_b_proj.weight.mul_(2.0 ** exponents[layer.name])


def latent_ranges(model: nn.Module, batches: Iterable[TokenBatch]) -> dict[str, dict[str, float]]:
    """Standard deviation about 0 and largest magnitude of the latents, by layer.

    Args:
        model: An unquantized model.
        batches: Windows without padding.
    """
    squares = {layer.name: 0.0 for layer in mla_layers(model)}
    values, amax = dict.fromkeys(squares, 0), dict.fromkeys(squares, 0.0)

    def watch(layer: str, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        squares[layer] += float(latent.double().square().sum())
        values[layer] += latent.numel()
        amax[layer] = max(amax[layer], float(latent.abs().max()))
        return latent, rope

    with reading(model, watch), torch.inference_mode():
        for batch in batches:
            run_batch(model, batch)
    return {
        name: {"sigma": math.sqrt(squares[name] / values[name]), "amax": amax[name]}
        for name in squares
    }


def variants(formats: Iterable[RecordFormat]) -> list[tuple[RecordFormat, bool]]:
    """Formats, and whether with an outer scale of the layer: both where there can be one."""
    return [
        (fmt, calibrated)
        for fmt in formats
        for calibrated in ((False, True) if fmt.outer_scale == "per layer" else (False,))
    ]


def facts(fmt: RecordFormat, calibrated: bool) -> dict[str, Any]:
    """What a row of the results is about."""
    outer: str = fmt.outer_scale or "none"
    if outer == "per layer" and not calibrated:
        outer = "1"
    return {"record": fmt.name, "record_bytes": fmt.record_bytes, "outer_scale": outer}


def windows(source: str, count: int) -> list[TokenBatch]:
    """Windows of an example text, in order and without padding."""
    spec = DataSpec(source, num_samples=count, seq_len=WINDOW, pack=True)
    return make_batches(load_samples(spec, load_tokenizer(MODEL)), BATCH, 0)


def measure_model(
    calibration: Sequence[TokenBatch], heldout: Sequence[TokenBatch]
) -> dict[str, Any]:
    """The example model with the cache in every format that holds its widths."""
    model = load_model(open_checkpoint(str(MODEL)), dtype=torch.float32)
    geometry = mla_layers(model)[0].geometry
    latent, rope = geometry.kv_lora_rank, geometry.qk_rope_head_dim
    chosen = variants(fmt for fmt in RECORDS.values() if fmt.holds(latent, rope))
    trained = latent_ranges(model, calibration)
    rows: list[dict[str, Any]] = [
        {"record": "bfloat16", "record_bytes": 2 * (latent + rope), "outer_scale": "none"},
        *(facts(*variant) for variant in chosen),
    ]
    settings, runs = [], []
    for sigma in MODEL_SIGMAS:
        scaled, ranges = model, trained
        if sigma is not None:
            scaled = copy.deepcopy(model)
            fold(scaled, {n: round(math.log2(r["sigma"] / sigma)) for n, r in trained.items()})
            ranges = latent_ranges(scaled, calibration)
        settings.append({"sigma": sigma, "layers": ranges})
        reads: list[Read] = [through_bfloat16]
        for fmt, calibrated in chosen:
            outer = None
            if calibrated:
                outer = {name: outer_scale(r["amax"], fmt) for name, r in ranges.items()}
            reads.append(through_records(fmt, outer))
        runs += [(scaled, read, _Tally()) for read in reads]
    for number, batch in enumerate(heldout):
        valid = torch.ones_like(batch.input_ids[:, 1:], dtype=torch.bool)
        with torch.inference_mode():
            expected = _forward(model, batch)[:, :-1]
            for scaled, read, tally in runs:
                with reading(scaled, read):
                    logits = _forward(scaled, batch)[:, :-1]
                tally.add(expected, logits, batch.input_ids[:, 1:], valid)
        print(f"batch {number + 1} of {len(heldout)}", file=sys.stderr, flush=True)
    numbers = [tally.numbers() for _, _, tally in runs]
    kept = ("perplexity", "kl_mean", "top1_agreement")
    for index, row in enumerate(rows):
        # One entry for each of the settings.
        row["accuracy"] = [{key: n[key] for key in kept} for n in numbers[index :: len(rows)]]
    return {
        "model": "examples/tiny_mla",
        "dtype": "float32",
        "latent_width": latent,
        "rope_width": rope,
        "calibration_tokens": sum(batch.input_ids.numel() for batch in calibration),
        "tokens": numbers[0]["tokens"],
        "original_perplexity": numbers[0]["original_perplexity"],
        "settings": settings,
        "rows": rows,
    }


# --- synthetic latents


def relative_error(exact: Tensor, found: Tensor) -> float:
    """‖found − exact‖ / ‖exact‖ in float64."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def attend(queries: Tensor, latent: Tensor, rope: Tensor, v_width: int) -> Tensor:
    """Absorbed attention in float64, [queries, v_width]; the softmax scale is 1 / √width."""
    kv = torch.cat([latent, rope], dim=-1).double()
    p = (queries.double() @ kv.T / math.sqrt(kv.shape[-1])).softmax(-1)
    return p @ kv[:, :v_width]


def synthetic(fmt: RecordFormat, calibrated: bool, sigma: float, seed: int = 0) -> dict[str, float]:
    """Relative errors of Gaussian latents read back, and of attention on them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=generator)

    width = fmt.latent.width
    latent, other = normal(TOKENS, width) * sigma, normal(TOKENS, width) * sigma
    rope, queries = normal(TOKENS, fmt.rope_width), normal(QUERIES, fmt.width)
    queries[:, :width] /= sigma
    scale = outer_scale(float(other.abs().max()), fmt) if calibrated else 1.0
    records = pack(latent, rope, fmt, outer_scale=scale)
    read = unpack(records, fmt, outer_scale=scale)
    exact = attend(queries, latent, rope, fmt.v_width)
    return {
        "sigma": sigma,
        "latent_error": relative_error(latent, read[0]),
        "attention_error": relative_error(exact, attend(queries, *read, fmt.v_width)),
    }


def measure_synthetic() -> dict[str, Any]:
    """All formats."""
    rows = [
        {**facts(*variant), "errors": [synthetic(*variant, sigma) for sigma in SIGMAS]}
        for variant in variants(RECORDS.values())
    ]
    return {"queries": QUERIES, "tokens": TOKENS, "rope_sigma": 1.0, "rows": rows}


# --- quantized attention over records


def capture(model: nn.Module, batches: Sequence[TokenBatch]) -> dict[str, tuple[Tensor, Tensor]]:
    """Latents and rotated rope parts, each [windows, tokens, width], by layer.

    Args:
        model: An unquantized model.
        batches: Windows of one length without padding.
    """
    kept: dict[str, list[tuple[Tensor, Tensor]]] = {layer.name: [] for layer in mla_layers(model)}

    def keep(layer: str, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        kept[layer].append((latent, rope))
        return latent, rope

    with reading(model, keep), torch.inference_mode():
        for batch in batches:
            run_batch(model, batch)
    tokens = batches[0].input_ids.shape[1]

    def together(parts: Iterable[Tensor]) -> Tensor:
        all_windows: Tensor = torch.cat(list(parts)).unflatten(0, (-1, tokens))
        return all_windows

    return {
        name: (together(latent for latent, _ in parts), together(rope for _, rope in parts))
        for name, parts in kept.items()
    }


def double(
    latents: Mapping[str, tuple[Tensor, Tensor]], read: Read, recipe: AttentionRecipe
) -> dict[str, dict[str, float | None]]:
    """SQNR, in dB, of K and V as attention over a cache quantizes them.

    Args:
        latents: Latents and rotated rope parts, each [windows, tokens, width], by layer.
        read: What a cache reads as.
        recipe: Formats of the operands; every range is the largest magnitude in `latents`.

    Returns:
        By operand: "operands", quantized from `latents`; "record", what the cache reads as;
        "both", quantized from that. None where nothing is lost.
    """
    kinds = ("operands", "record", "both")
    sums = {operand: {kind: [0.0, 0.0] for kind in kinds} for operand in CACHED_OPERANDS}
    for layer, parts in latents.items():
        shape = parts[0].shape[:2]
        rows = read(layer, parts[0].flatten(0, 1), parts[1].flatten(0, 1))
        cached = [part.unflatten(0, shape) for part in rows]
        for operand in CACHED_OPERANDS:
            index = int(operand.endswith("_rope"))
            exact, found = parts[index], cached[index]
            fmt, axis = FORMATS[recipe.format_of(operand)], OPERAND_AXIS[operand]
            amax = exact.abs().max()
            once, twice = (quantize_dequantize(x, fmt, amax, axis=axis) for x in (exact, found))
            for kind, value in zip(kinds, (once, found, twice), strict=True):
                total = sums[operand][kind]
                total[0] += float(exact.double().square().sum())
                total[1] += float((exact.double() - value.double()).square().sum())
    return {
        operand: {kind: _sqnr_db(*total) for kind, total in totals.items()}
        for operand, totals in sums.items()
    }


def measure_double(calibration: Sequence[TokenBatch]) -> dict[str, Any]:
    """The example model's latents in every format that holds its widths, calibrated."""
    model = load_model(open_checkpoint(str(MODEL)), dtype=torch.float32)
    geometry = mla_layers(model)[0].geometry
    latents = capture(model, calibration)
    rows: list[dict[str, Any]] = []
    for fmt in RECORDS.values():
        if not fmt.holds(geometry.kv_lora_rank, geometry.qk_rope_head_dim):
            continue
        calibrated = fmt.outer_scale == "per layer"
        outer = None
        if calibrated:
            amax = {name: float(latent.abs().max()) for name, (latent, _) in latents.items()}
            outer = {name: outer_scale(value, fmt) for name, value in amax.items()}
        for recipe in DOUBLE_RECIPES:
            found = double(latents, through_records(fmt, outer), load_recipe(recipe).attention)
            rows.append({**facts(fmt, calibrated), "recipe": recipe, "sqnr_db": found})
    return {
        "model": "examples/tiny_mla",
        "dtype": "float32",
        "tokens": sum(batch.input_ids.numel() for batch in calibration),
        "rows": rows,
    }


# --- tables


def number(value: float | None, digits: int) -> str:
    """A number for people; where there is none, a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


def table(
    rows: Iterable[Mapping[str, Any]],
    titles: Sequence[str],
    columns: Mapping[str, tuple[str, int]],
    entries: str,
) -> list[str]:
    """Rows with some columns for each σ.

    Args:
        rows: Rows of the results.
        titles: What each σ is called.
        columns: For each σ, what is shown: its title and digits by its key.
        entries: Where a row has it.
    """
    names = [name for name, _ in columns.values()]
    heads = [f"{title}: {names[0]}" for title in titles]
    cells = ["record", "bytes", "outer scale"]
    cells += [cell for head in heads for cell in (head, *names[1:])]
    lines = ["| " + " | ".join(cells) + " |", "|---" * len(cells) + "|"]
    for row in rows:
        cells = [f"`{row['record']}`", str(row["record_bytes"]), row["outer_scale"]]
        for entry in row[entries]:
            cells += [number(entry[key], digits) for key, (_, digits) in columns.items()]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def model_lines(model: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    """The example model's results, measured in some run, as Markdown."""
    titles = []
    for setting in model["settings"]:
        if setting["sigma"] is None:
            sigmas = [layer["sigma"] for layer in setting["layers"].values()]
            titles.append(f"σ {min(sigmas):.2g} to {max(sigmas):.2g} as trained")
        else:
            titles.append(f"σ ≈ {setting['sigma']:g}")
    columns = {"perplexity": ("ppl", 3), "kl_mean": ("KL", 4)}
    return [
        f"Example model: perplexity {model['original_perplexity']:.3f} on {model['tokens']} "
        "tokens of held-out text; σ is that of its latents. "
        f"{run['hardware']}, {model['dtype']}, torch {run['torch']}, {run['date']}.",
        "",
        *table(model["rows"], titles, columns, "accuracy"),
    ]


def synthetic_lines(gauss: Mapping[str, Any], _: Mapping[str, Any]) -> list[str]:
    """The results on synthetic latents as Markdown."""
    in_v = [fmt.name for fmt in RECORDS.values() if fmt.v_width > fmt.latent.width]
    titles = [f"σ {sigma['sigma']:g}" for sigma in gauss["rows"][0]["errors"]]
    columns = {"latent_error": ("latent", 3), "attention_error": ("output", 3)}
    return [
        f"Gaussian latents, {gauss['queries']} queries on {gauss['tokens']} tokens: relative "
        "error of the latents, and of the attention output. The rope part has σ "
        f"{gauss['rope_sigma']:g}; V holds it too in {' and '.join(f'`{n}`' for n in in_v)}.",
        "",
        *table(gauss["rows"], titles, columns, "errors"),
    ]


def double_lines(section: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    """The results of quantized attention over records as Markdown."""
    heads = ["record", "bytes", "attention", *CACHED_OPERANDS.values()]
    lines = [
        f"Quantized attention over records: SQNR in dB, over {section['tokens']} tokens and all "
        "layers of the example model, of the operand quantized from the latents / what records "
        "read as / the operand quantized from that. Outer scales are calibrated. "
        f"{run['hardware']}, {section['dtype']}, torch {run['torch']}, {run['date']}.",
        "",
        "| " + " | ".join(heads) + " |",
        "|---" * len(heads) + "|",
    ]
    for row in section["rows"]:
        cells = [f"`{row['record']}`", str(row["record_bytes"]), f"`{row['recipe']}`"]
        for operand in CACHED_OPERANDS:
            values = row["sqnr_db"][operand]
            cells.append(" / ".join(number(values[k], 1) for k in ("operands", "record", "both")))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


SECTIONS = {"model": model_lines, "synthetic": synthetic_lines, "double": double_lines}
"""What can be measured, and what renders it as Markdown."""


def merge(
    earlier: Mapping[str, Any] | None, run: Mapping[str, Any], measured: Mapping[str, Any]
) -> dict[str, Any]:
    """Results with newly measured sections, which say of which run they are if others stay.

    Args:
        earlier: Results that hold what was not measured again; None: there are none.
        run: What the new figures were measured on.
        measured: New sections by name.
    """
    if earlier is None:
        return {**run, **measured}
    return {**earlier, **{name: {**run, **section} for name, section in measured.items()}}


def markdown(result: dict[str, Any]) -> str:
    """The results as Markdown: of what was measured."""
    texts = []
    for name, render in SECTIONS.items():
        if name in result:
            # What a section says about its run holds for it; else, what stands at the top.
            texts.append("\n".join(render(result[name], {**result, **result[name]})))
    return "\n\n".join(texts)


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=64, help="windows of calibration text")
    parser.add_argument("--windows", type=int, default=20, help="windows of held-out text")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SECTIONS,
        help="measure these sections and keep the others of an earlier run",
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--readme", action="store_true", help="render the results, run nothing")
    args = parser.parse_args()
    if args.readme:
        insert("records", markdown(json.loads(args.out.read_text(encoding="utf-8"))))
        return

    def measure(section: str) -> dict[str, Any]:
        if section == "synthetic":
            return measure_synthetic()
        if section == "double":
            return measure_double(windows("example", min(args.samples, DOUBLE_WINDOWS)))
        calibration = windows("example", args.samples)
        return measure_model(calibration, windows("example:heldout", args.windows))

    run: dict[str, Any] = hardware("cpu")
    earlier = None
    if args.only and args.out.exists():
        earlier = json.loads(args.out.read_text(encoding="utf-8"))
    measured = {name: measure(name) for name in args.only or SECTIONS}
    result = merge(earlier, run, measured)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(markdown(result))


if __name__ == "__main__":
    main()
