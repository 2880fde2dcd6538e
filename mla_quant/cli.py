"""The `mla-quant` command line: parses, calls, prints.

Data goes to stdout, progress and messages to stderr. Exit codes: 0 done, 1 a check failed,
2 bad input.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import MARKDOWN
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from mla_quant import __version__
from mla_quant.errors import ConfigError, MlaQuantError
from mla_quant.recipes import FORMS, OPERANDS, Recipe, load_recipe, parse_recipe, recipe_names

if TYPE_CHECKING:
    from mla_quant.calibration import Plan
    from mla_quant.data import DataSpec
    from mla_quant.loading import Checkpoint
    from mla_quant.settings import Settings

logger = logging.getLogger("mla_quant")

app = typer.Typer(
    name="mla-quant",
    help="Quantize the attention of MLA models: calibrate, evaluate, verify.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_GIB = 1 << 30

# Piped output is not cut to the 80 columns of a terminal that is not there.
out_console = Console(width=None if sys.stdout.isatty() else 200)
err_console = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or balanced (all GPUs + CPU).")]
Dtype = Annotated[str, typer.Option(help="auto (as stored), bfloat16, float16 or float32.")]
Remote = Annotated[bool, typer.Option(help="Run Python code that the model's folder ships.")]
Overwrite = Annotated[bool, typer.Option(help="Replace an existing output.")]
Attn = Annotated[
    str | None, typer.Option("--attn-implementation", help="eager, sdpa, ... as in transformers.")
]


def _emit(data: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(data, indent=1, allow_nan=False, default=str) + "\n")


@contextmanager
def _progress(enabled: bool = True) -> Iterator[Any]:
    """A progress callback `(stage, done, total)` that draws a bar with the time left."""
    if not enabled:
        yield None
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=err_console,
    )
    tasks: dict[str, Any] = {}
    with bar:

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield update


@contextmanager
def _stdout_is_data() -> Iterator[None]:
    """Send what libraries print (ModelOpt reports conversions on stdout) to stderr."""
    real = sys.stdout
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = real


# -- calibrate ------------------------------------------------------------------------------------


def _build_recipe(
    recipe: str | None,
    formats: Mapping[str, str | None],
    form: str,
    observer: str | None,
    percentile: float | None,
) -> Recipe:
    """The recipe that the options describe."""
    chosen = {name: value for name, value in formats.items() if value is not None}
    if recipe is None and not chosen:
        raise ConfigError(
            "nothing to do: give --recipe (one of "
            f"{', '.join(recipe_names())}, or a YAML file), or a format with --q, --k, --p or --v"
        )
    base = load_recipe(recipe) if recipe is not None else Recipe(name="custom")
    if form != "recipe":
        if form not in (*FORMS, "both"):
            raise ConfigError(f"--form must be both, {' or '.join(FORMS)}; got {form!r}")
        chosen["forms"] = list(FORMS) if form == "both" else [form]  # type: ignore[assignment]
    built = base.with_changes(**chosen) if chosen else base
    if observer is not None or percentile is not None:
        data = built.model_dump()
        data["observer"] |= {
            k: v for k, v in (("method", observer), ("percentile", percentile)) if v is not None
        }
        built = parse_recipe(data, origin="--observer/--percentile")
    return built


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="Model folder or hub id.")],
    data: Annotated[
        str,
        typer.Option(help="example, a jsonl/json/parquet/txt/csv file or folder, or a hub id."),
    ],
    out: Annotated[Path, typer.Option(help="Checkpoint folder to write.")],
    recipe: Annotated[
        str | None, typer.Option(help="Name of a shipped recipe, or a YAML file.")
    ] = None,
    q: Annotated[str | None, typer.Option(help="Format of Q: none, fp8 or nvfp4.")] = None,
    k: Annotated[str | None, typer.Option(help="Format of K.")] = None,
    p: Annotated[str | None, typer.Option(help="Format of P.")] = None,
    v: Annotated[str | None, typer.Option(help="Format of V.")] = None,
    form: Annotated[
        str, typer.Option(help="Forms to calibrate: recipe, both, projected or absorbed.")
    ] = "recipe",
    observer: Annotated[
        str | None, typer.Option(help="max, percentile or mse; default: the recipe's.")
    ] = None,
    percentile: Annotated[float | None, typer.Option(help="For --observer percentile.")] = None,
    text_column: Annotated[str | None, typer.Option(help="Column that holds the text.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of a hub data set.")] = None,
    chat: Annotated[
        bool | None, typer.Option(help="Read chat rows through the chat template, or plain text.")
    ] = None,
    num_samples: Annotated[int, typer.Option(help="Samples to use at most.")] = 128,
    seq_len: Annotated[int, typer.Option(help="Tokens of a sample at most.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Samples in a batch.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the choice of samples.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    attn_implementation: Attn = None,
    trust_remote_code: Remote = False,
    engine: Annotated[
        str, typer.Option(help="transformers, or vllm: runs the model over several GPUs.")
    ] = "transformers",
    tensor_parallel_size: Annotated[
        int, typer.Option(help="GPUs that share every layer, for --engine vllm.")
    ] = 1,
    max_shard_size: Annotated[str, typer.Option(help="Of newly written weight files.")] = "5GB",
    dry_run: Annotated[
        bool, typer.Option(help="Print what would be quantized; read no weights.")
    ] = False,
    resume: Annotated[bool, typer.Option(help="Continue an interrupted run.")] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Calibrate a model's attention on data and write a checkpoint."""
    from mla_quant.checkpoint import check_target
    from mla_quant.data import DataSpec, check_source
    from mla_quant.loading import open_checkpoint, parse_device, parse_dtype
    from mla_quant.settings import SETTINGS_FILE

    chosen = _build_recipe(recipe, {"q": q, "k": k, "p": p, "v": v}, form, observer, percentile)
    if batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, got {batch_size}")
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)? ?[KMGT]B", max_shard_size, re.IGNORECASE):
        raise ConfigError(
            f"--max-shard-size must be a number with KB, MB, GB or TB; got {max_shard_size!r}"
        )
    spec = DataSpec(
        source=data, split=split, text_column=text_column, chat=chat,
        num_samples=num_samples, seq_len=seq_len, seed=seed,
    )  # fmt: skip
    parse_dtype(dtype)
    _check_engine(engine, chosen, tensor_parallel_size, device, attn_implementation, resume)
    device = parse_device(device)
    if not dry_run:
        check_target(out, overwrite=overwrite or (resume and (out / SETTINGS_FILE).is_file()))
    check_source(spec)
    with _stdout_is_data():
        checkpoint = open_checkpoint(model, trust_remote_code=trust_remote_code)
        _check_apart(checkpoint.folder, out)
        run = _Calibration(
            checkpoint, chosen, spec, out, batch_size, device, dtype, attn_implementation,
            trust_remote_code, max_shard_size, resume, overwrite, not as_json,
        )  # fmt: skip
        if dry_run:
            result = run.plan_only()
        elif engine == "vllm":
            result = run.run_in_vllm(tensor_parallel_size)
        else:
            result = run.run()
    if os.environ.get("RANK", "0") != "0":
        return  # one of several processes: the first one reports
    if as_json:
        _emit(result or {"out": str(out), "finished": True})
    elif dry_run:
        _print_plan(result)
    elif result:
        _print_statistics(result)
        err_console.print(f"wrote {out}: {result['summary']}", highlight=False)


def _check_engine(
    engine: str, recipe: Recipe, tensor_parallel_size: int, device: str, attn: str | None,
    resume: bool,
) -> None:  # fmt: skip
    """Refuse options that the engine would ignore."""
    if engine not in ("transformers", "vllm"):
        raise ConfigError(f"--engine must be transformers or vllm, got {engine!r}")
    if engine == "transformers":
        if tensor_parallel_size != 1:
            raise ConfigError(
                "--tensor-parallel-size belongs to --engine vllm; with transformers use --device "
                "balanced"
            )
        return
    from mla_quant.integrations.vllm_calibration import check_recipe

    check_recipe(recipe)
    if tensor_parallel_size < 1:
        raise ConfigError(f"--tensor-parallel-size must be at least 1, got {tensor_parallel_size}")
    for option, given in (
        ("--device", device != "auto"),
        ("--attn-implementation", attn is not None),
        ("--resume", resume),
    ):
        if given:
            raise ConfigError(f"{option} has no meaning for --engine vllm; leave it out")


def _check_apart(model: Path, out: Path) -> None:
    """Refuse an output that would replace the model, or become one of its files."""
    source, target = model.resolve(), out.resolve()
    if source == target or source in target.parents or target in source.parents:
        raise ConfigError(
            f"--out {out} lies inside the model folder {model}, or the other way round; give a "
            "folder apart from it"
        )


class _Calibration:
    """One `calibrate` command, after its arguments were checked."""

    def __init__(
        self, checkpoint: Checkpoint, recipe: Recipe, spec: DataSpec, out: Path,
        batch_size: int, device: str, dtype: str, attn: str | None, trust_remote_code: bool,
        max_shard_size: str, resume: bool, overwrite: bool, progress: bool,
    ) -> None:  # fmt: skip
        self.checkpoint, self.recipe, self.spec, self.out = checkpoint, recipe, spec, out
        self.batch_size, self.device, self.dtype, self.attn = batch_size, device, dtype, attn
        self.trust_remote_code, self.max_shard_size = trust_remote_code, max_shard_size
        self.resume, self.overwrite, self.progress = resume, overwrite, progress

    def plan(self) -> Plan:
        from mla_quant.calibration import make_plan
        from mla_quant.families import find_mla_layers
        from mla_quant.loading import meta_model

        structure = meta_model(
            self.checkpoint.config,
            attn_implementation=self.attn,
            trust_remote_code=self.trust_remote_code,
        )
        return make_plan(self.recipe, find_mla_layers(structure), structure)

    def plan_only(self) -> dict[str, Any]:
        from mla_quant.loading import estimate_bytes, load_tokenizer, parse_dtype

        plan = self.plan()
        load_tokenizer(self.checkpoint.folder, trust_remote_code=self.trust_remote_code)
        return {
            "recipe": self.recipe.name,
            "weights": plan.weights,
            "weight_bytes": estimate_bytes(self.checkpoint, parse_dtype(self.dtype)),
            "enabled": plan.enabled(),
            "layers": plan.layers,
            "excluded": plan.excluded,
            "unmatched_patterns": plan.unmatched,
            "notes": self.checkpoint.notes,
        }

    def run(self) -> dict[str, Any]:
        from mla_quant.calibration import (
            fingerprint,
            prepare_state_folder,
            process_group,
            samples_digest,
        )  # fmt: skip
        from mla_quant.data import describe, load_samples
        from mla_quant.loading import check_memory, load_tokenizer, parse_dtype

        tokenizer = load_tokenizer(self.checkpoint.folder, trust_remote_code=self.trust_remote_code)
        self.plan()
        samples = load_samples(self.spec, tokenizer)
        settings = fingerprint(
            model=[
                (self.checkpoint.folder / "config.json").read_text(encoding="utf-8"),
                {f.name: f.stat().st_size for f in self.checkpoint.files},
                self.checkpoint.tensors,
            ],
            recipe=self.recipe.model_dump(),
            data=samples_digest(samples),
            batch_size=self.batch_size,
            dtype=self.dtype,
            attn_implementation=self.attn,
            version=__version__,
        )
        if self.resume and self._finished(settings):
            return {}
        logger.info("%s", check_memory(self.checkpoint, parse_dtype(self.dtype), self.device))
        with process_group(self.device) as (rank, world):
            state = self.out.absolute().parent / f".{self.out.name}.calibration"
            if rank == 0:
                run = fingerprint(processes=world) | settings
                prepare_state_folder(state, run, resume=self.resume)
            _barrier(world)
            started = time.monotonic()
            result = self._calibrate(samples, tokenizer, settings, state, rank, world)
            if rank == 0:
                import shutil

                shutil.rmtree(state, ignore_errors=True)
                result["seconds"] = round(time.monotonic() - started, 2)
                result["data"] = describe(self.spec)
            _barrier(world)
        return result

    def run_in_vllm(self, tensor_parallel_size: int) -> dict[str, Any]:
        """Calibrate in vLLM's workers; the checkpoint is the same but for its absorbed logits."""
        from mla_quant.calibration import fingerprint, samples_digest, statistics_records
        from mla_quant.checkpoint import (
            choose_reference_samples,
            export_checkpoint,
            reference_positions,
        )  # fmt: skip
        from mla_quant.data import describe, load_samples
        from mla_quant.families import find_mla_layers
        from mla_quant.integrations import vllm_calibration as engine
        from mla_quant.loading import load_tokenizer, meta_model
        from mla_quant.settings import ModelSettings, Producer, Settings

        started = time.monotonic()
        tokenizer = load_tokenizer(self.checkpoint.folder, trust_remote_code=self.trust_remote_code)
        plan = self.plan()
        structure = meta_model(self.checkpoint.config, trust_remote_code=self.trust_remote_code)
        discovered = find_mla_layers(structure).require()
        samples = load_samples(self.spec, tokenizer)
        formats = {
            layer: {operand: fmt for operand, fmt in operands.items() if fmt != "none"}
            for layer, operands in plan.layers.items()
        }
        llm = engine.load(
            str(self.checkpoint.folder),
            max(map(len, samples)),
            self.batch_size,
            dtype=self.dtype,
            tensor_parallel_size=tensor_parallel_size,
            trust_remote_code=self.trust_remote_code,
        )
        observers = engine.collect(llm, formats, samples, self.recipe)
        dtype = str(llm.llm_engine.model_config.dtype).removeprefix("torch.")
        settings = Settings(
            producer=Producer(name="mla_quant", version=__version__),
            model=ModelSettings(
                source=self.checkpoint.source,
                family=str(self.checkpoint.config.model_type),
                geometry=discovered[-1].geometry.as_dict(),
            ),
            recipe=self.recipe,
            layers=engine.layer_settings(
                [layer.name for layer in discovered], formats, observers, self.recipe
            ),
            calibration={
                "data": self.spec.source,
                "samples": len(samples),
                "tokens": sum(len(s) for s in samples),
                "seq_len": self.spec.seq_len,
                "seed": self.spec.seed,
                "dtype": dtype,
                "engine": "vllm",
                "tensor_parallel_size": tensor_parallel_size,
                "notes": self.checkpoint.notes,
                "uncalibrated": [],
                "fingerprint": fingerprint(
                    recipe=self.recipe.model_dump(),
                    data=samples_digest(samples),
                    dtype=self.dtype,
                    version=__version__,
                ),
            },
        )
        chosen = choose_reference_samples(samples)
        positions = reference_positions(chosen, llm.llm_engine.model_config.get_vocab_size())
        statistics = statistics_records(observers, settings.layers)
        export_checkpoint(
            None, self.out, settings, source=self.checkpoint, statistics=statistics,
            reference_samples=chosen,
            reference=engine.reference_logits(llm, settings, chosen, positions),
            overwrite=self.overwrite, max_shard_size=self.max_shard_size,
        )  # fmt: skip
        result = self._summary(settings, samples, statistics)
        return result | {
            "batch_size": self.batch_size,
            "processes": tensor_parallel_size,
            "seconds": round(time.monotonic() - started, 2),
            "data": describe(self.spec),
        }

    def _summary(
        self, written: Settings, samples: Sequence[list[int]], statistics: list[dict[str, Any]]
    ) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "recipe": self.recipe.name,
            "layers": len(written.layers),
            "samples": len(samples),
            "tokens": written.calibration["tokens"],
            "statistics": [
                {k: v for k, v in record.items() if not k.endswith("histogram")}
                for record in statistics
            ],
            "uncalibrated": written.calibration["uncalibrated"],
            "notes": self.checkpoint.notes,
            "summary": f"{len(written.layers)} layers, recipe {self.recipe.name}, "
            f"{written.calibration['tokens']} tokens",
        }

    def _finished(self, settings: dict[str, str]) -> bool:
        from mla_quant.errors import CalibrationError
        from mla_quant.settings import SETTINGS_FILE, read_settings

        if not (self.out / SETTINGS_FILE).is_file():
            return False
        previous = read_settings(self.out).calibration.get("fingerprint", {})
        if previous != settings:
            differing = sorted(
                k for k in {*settings, *previous} if settings.get(k) != previous.get(k)
            )
            raise CalibrationError(
                f"{self.out} is finished, with other settings ({', '.join(differing)} differ); "
                "give another --out, or --overwrite without --resume"
            )
        err_console.print(f"{self.out} is finished already: nothing to do", highlight=False)
        return True

    def _calibrate(
        self, samples: list[list[int]], tokenizer: Any, settings: dict[str, str], state: Path,
        rank: int, world: int,
    ) -> dict[str, Any]:  # fmt: skip
        from mla_quant.calibration import (
            ForwardLoop,
            collect_settings,
            collect_statistics,
            quantize,
        )  # fmt: skip
        from mla_quant.checkpoint import (
            choose_reference_samples,
            export_checkpoint,
            load_weights,
        )  # fmt: skip
        from mla_quant.plugin import uncalibrated_quantizers

        device = self.device
        if world > 1 and device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        model = load_weights(
            self.checkpoint, dtype=self.dtype, device=device, attn_implementation=self.attn,
            trust_remote_code=self.trust_remote_code,
        )  # fmt: skip
        pad = tokenizer.pad_token_id
        if pad is None:
            pad = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0
        with _progress(self.progress and rank == 0) as progress:
            loop = ForwardLoop(
                samples, self.batch_size, int(pad), state_folder=state, rank=rank,
                world_size=world, progress=progress,
            )  # fmt: skip
            model = quantize(model, self.recipe, loop)
        if rank != 0:
            return {}
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        written: Settings = collect_settings(
            model,
            self.recipe,
            source=self.checkpoint.source,
            family=str(self.checkpoint.config.model_type),
            version=__version__,
            calibration={
                "data": self.spec.source,
                "samples": len(samples),
                "tokens": sum(len(s) for s in samples),
                "seq_len": self.spec.seq_len,
                "seed": self.spec.seed,
                "dtype": str(dtype).removeprefix("torch."),
                "notes": self.checkpoint.notes,
                "uncalibrated": uncalibrated_quantizers(model),
                "fingerprint": settings,
            },
        )
        statistics = collect_statistics(model)
        export_checkpoint(
            model, self.out, written, source=self.checkpoint, statistics=statistics,
            reference_samples=choose_reference_samples(samples),
            overwrite=self.overwrite, max_shard_size=self.max_shard_size,
        )  # fmt: skip
        return self._summary(written, samples, statistics) | {
            "batch_size": loop.halved_to or self.batch_size,
            "processes": world,
        }


def _barrier(world: int) -> None:
    if world > 1:
        import torch

        torch.distributed.barrier()


def _print_plan(plan: Mapping[str, Any]) -> None:
    operands = [o for o in OPERANDS if any(o in layer for layer in plan["layers"].values())]
    table = Table("layer", *operands, title=f"recipe {plan['recipe']}, weights {plan['weights']}")
    for layer, formats in plan["layers"].items():
        table.add_row(layer, *(formats.get(o, "-") for o in operands))
    out_console.print(table)
    for name in plan["excluded"]:
        out_console.print(f"excluded: {name}", highlight=False)
    for line in plan["enabled"]:
        out_console.print(line, highlight=False)


def _print_statistics(result: Mapping[str, Any]) -> None:
    operands = [o for o in OPERANDS if any(r["operand"] == o for r in result["statistics"])]
    table = Table("layer", *operands, title="amax by layer and operand")
    by_layer: dict[str, dict[str, float]] = {}
    for record in result["statistics"]:
        by_layer.setdefault(record["layer"], {})[record["operand"]] = record["amax"]
    for layer, values in by_layer.items():
        table.add_row(layer, *(f"{values[o]:.4g}" if o in values else "-" for o in operands))
    out_console.print(table)


# -- evaluate -------------------------------------------------------------------------------------


@app.command()
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="Folder written by calibrate.")],
    data: Annotated[str, typer.Option(help="Held-out text, as for calibrate.")],
    out: Annotated[Path, typer.Option(help="Folder for report.json and report.html.")],
    form: Annotated[str, typer.Option(help="both, projected or absorbed.")] = "both",
    text_column: Annotated[str | None, typer.Option(help="Column that holds the text.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of a hub data set.")] = None,
    num_samples: Annotated[int, typer.Option(help="Windows of text to use at most.")] = 32,
    seq_len: Annotated[int, typer.Option(help="Tokens of a window.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Windows in a batch.")] = 4,
    decode_tokens: Annotated[
        int, typer.Option(help="Last tokens of each window decoded one by one; 0: none.")
    ] = 32,
    sensitivity: Annotated[str, typer.Option(help="all, layers, operands or none.")] = "all",
    sensitivity_samples: Annotated[int, typer.Option(help="Windows for sensitivity.")] = 8,
    original: Annotated[
        str | None,
        typer.Option(help="Unquantized model to compare with, if weights are quantized too."),
    ] = None,
    device: Device = "auto",
    attn_implementation: Attn = None,
    trust_remote_code: Remote = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Measure what quantized attention costs in accuracy, and write a report."""
    from mla_quant.data import DataSpec, check_source
    from mla_quant.loading import parse_device
    from mla_quant.settings import read_settings

    for name, value, allowed in (
        ("--form", form, (*FORMS, "both")),
        ("--sensitivity", sensitivity, ("all", "layers", "operands", "none")),
    ):
        if value not in allowed:
            raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
    for name, number, least in (
        ("--batch-size", batch_size, 1),
        ("--decode-tokens", decode_tokens, 0),
        ("--sensitivity-samples", sensitivity_samples, 1),
    ):
        if number < least:
            raise ConfigError(f"{name} must be at least {least}, got {number}")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; give a folder")
    if (out / "report.json").exists() and not overwrite:
        raise ConfigError(f"{out} holds a report already; give another --out, or --overwrite")
    device = parse_device(device)
    settings = read_settings(checkpoint)
    spec = DataSpec(
        source=data, split=split, text_column=text_column,
        num_samples=num_samples, seq_len=seq_len, pack=True,
    )  # fmt: skip
    check_source(spec)
    with _stdout_is_data():
        report = _evaluate(
            checkpoint, settings, spec, form, batch_size, decode_tokens, sensitivity,
            sensitivity_samples, original, device, attn_implementation, trust_remote_code,
            not as_json,
        )  # fmt: skip
        from mla_quant.report import write_report

        out.mkdir(parents=True, exist_ok=True)
        json_path, html_path = write_report(report, out)
    if as_json:
        _emit({**report, "report": [str(json_path), str(html_path)]})
        return
    _print_accuracy(report)
    err_console.print(f"wrote {html_path} and {json_path}", highlight=False)


def _evaluate(
    folder: Path, settings: Settings, spec: DataSpec, form: str, batch_size: int,
    decode_tokens: int, sensitivity: str, sensitivity_samples: int, original: str | None,
    device: str, attn: str | None, trust_remote_code: bool, show: bool,
) -> dict[str, Any]:  # fmt: skip
    import datetime

    from mla_quant import evaluation
    from mla_quant.checkpoint import STATISTICS_FILE, load_quantized, load_weights
    from mla_quant.data import describe, load_samples, make_batches
    from mla_quant.families import describe as describe_layers
    from mla_quant.families import find_mla_layers
    from mla_quant.loading import environment, load_tokenizer, open_checkpoint

    notes: list[str] = list(settings.calibration.get("notes", []))
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    samples = load_samples(spec, tokenizer)
    model, _ = load_quantized(
        folder, device=device, attn_implementation=attn, trust_remote_code=trust_remote_code
    )
    reference = None
    if settings.recipe.weights != "none":
        source = original or settings.model.source
        try:
            reference = load_weights(
                open_checkpoint(source, trust_remote_code=trust_remote_code),
                dtype=str(settings.calibration.get("dtype", "auto")), device=device,
                attn_implementation=attn, trust_remote_code=trust_remote_code,
            )  # fmt: skip
        except MlaQuantError as error:
            if original is not None:
                raise
            notes.append(
                "compared with the quantized weights and unquantized attention, because the "
                f"original model could not be loaded ({error}); give --original"
            )
    batches = make_batches(samples, batch_size, tokenizer.pad_token_id or 0)
    forms = [f for f in settings.recipe.attention.forms if form in (f, "both")]
    if "absorbed" not in forms:
        decode_tokens = 0
    options = evaluation.EvaluationOptions(
        forms=tuple(forms), decode_tokens=decode_tokens, sensitivity=sensitivity,
        sensitivity_sequences=sensitivity_samples, batch_size=batch_size, original=reference,
    )  # fmt: skip
    with _progress(show) as progress:
        measured = evaluation.evaluate(model, batches, options, progress=progress)
    statistics = json.loads((folder / STATISTICS_FILE).read_text(encoding="utf-8"))
    structure = describe_layers(find_mla_layers(model), settings.model.family)
    model_facts = {
        k: structure[k]
        for k in ("family", "layers", "geometry", "skipped", "cache_bytes_per_token")
    }
    return {
        "schema_version": 1,
        "created": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "producer": {"name": "mla_quant", "version": __version__},
        "environment": environment(),
        "model": {"source": settings.model.source, **model_facts},
        "recipe": settings.recipe.model_dump(mode="json"),
        "data": {
            "calibration": {
                k: v for k, v in settings.calibration.items() if k not in ("fingerprint", "notes")
            },
            "evaluation": {
                **describe(spec),
                "sequences": len(samples),
                "tokens": sum(len(s) for s in samples),
                "seq_len": spec.seq_len,
            },
        },
        **{k: measured[k] for k in ("accuracy", "operands", "layers", "sensitivity")},
        "statistics": statistics,
        "warnings": [*notes, *measured["warnings"]],
    }


def _print_accuracy(report: Mapping[str, Any]) -> None:
    table = Table(title="accuracy on held-out text")
    for column in ("form", "perplexity", "original", "KL mean", "KL p99", "top-1", "tokens"):
        table.add_column(column, justify="left" if column == "form" else "right")

    def show(value: float | None, digits: str) -> str:
        return "-" if value is None else format(value, digits)

    for row in report["accuracy"]:
        table.add_row(
            row["form"],
            show(row["perplexity"], ".4f"),
            show(row.get("original_perplexity"), ".4f"),
            show(row["kl_mean"], ".5f"),
            show(row["kl_p99"], ".4f"),
            show(row["top1_agreement"], ".2%"),
            str(row["tokens"]),
        )
    out_console.print(table)
    for text in report["warnings"]:
        err_console.print(f"note: {text}", highlight=False)


# -- inspect, verify, recipes, records ------------------------------------------------------------


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="Model folder or hub id.")],
    trust_remote_code: Remote = False,
    as_json: Json = False,
) -> None:
    """Show a model's MLA layers, geometry and cache size; reads no weights."""
    from mla_quant.families import describe, find_mla_layers
    from mla_quant.loading import meta_model, open_checkpoint

    with _stdout_is_data():
        checkpoint = open_checkpoint(model, trust_remote_code=trust_remote_code)
        structure = meta_model(checkpoint.config, trust_remote_code=trust_remote_code)
        discovery = find_mla_layers(structure)
        facts = dict(describe(discovery, str(checkpoint.config.model_type)))
        facts["weight_files"] = len(checkpoint.files)
        facts["notes"] = checkpoint.notes
        discovery.require()
    if as_json:
        _emit(facts)
        return
    table = Table("", "", title=model, show_header=False)
    table.add_row("family", facts["family"])
    table.add_row("MLA layers", str(facts["layers"]))
    for name, value in facts["geometry"].items():
        table.add_row(name, str(value))
    for kind, size in facts["cache_bytes_per_token"].items():
        table.add_row(f"cache, {kind}", f"{size} bytes/token, all layers")
    out_console.print(table)
    layers = Table("layer", "class", "found")
    for layer in discovery.layers:
        layers.add_row(layer.name, type(layer.module).__name__, "MLA")
    for skipped in facts["skipped"]:
        layers.add_row(skipped["name"], skipped["class"], f"skipped: {skipped['reason']}")
    out_console.print(layers)
    for text in checkpoint.notes:
        err_console.print(f"note: {text}", highlight=False)


@app.command()
def verify(
    checkpoint: Annotated[Path, typer.Argument(help="Folder written by calibrate.")],
    logits: Annotated[bool, typer.Option(help="Run the model and compare its logits.")] = True,
    device: Device = "cpu",
    trust_remote_code: Remote = False,
    as_json: Json = False,
) -> None:
    """Check a checkpoint: hashes, tensors, settings, logits. Exit code 1 if a check fails."""
    from mla_quant.checkpoint import verify_checkpoint
    from mla_quant.loading import parse_device

    device = parse_device(device)
    with _stdout_is_data():
        checks = verify_checkpoint(
            checkpoint, device=device, logits=logits, trust_remote_code=trust_remote_code
        )
    passed = all(check.passed for check in checks)
    if as_json:
        _emit({"passed": passed, "checks": [check.__dict__ for check in checks]})
    else:
        table = Table("check", "result", "detail", title=str(checkpoint))
        for check in checks:
            result = "[green]passed[/]" if check.passed else "[red]FAILED[/]"
            table.add_row(check.name, result, check.detail)
        out_console.print(table)
    if not passed:
        raise typer.Exit(1)


@app.command()
def recipes(as_json: Json = False) -> None:
    """List the shipped recipes."""
    shipped = [load_recipe(name) for name in recipe_names()]
    if as_json:
        _emit({"recipes": [recipe.model_dump() for recipe in shipped]})
        return
    table = Table("recipe", "q", "k", "p", "v", "weights", "description")
    for recipe in shipped:
        a = recipe.attention
        table.add_row(recipe.name, a.q, a.k, a.p, a.v, recipe.weights, recipe.description)
    out_console.print(table)


@app.command()
def records(
    model: Annotated[
        str | None, typer.Argument(help="Model folder or hub id; left out: one layer.")
    ] = None,
    page_size: Annotated[int, typer.Option(help="Tokens in a page of the cache.")] = 64,
    markdown: Annotated[bool, typer.Option(help="Print the table in Markdown.")] = False,
    trust_remote_code: Remote = False,
    as_json: Json = False,
) -> None:
    """List the KV-cache record formats, and how many tokens of a model fit into a GiB."""
    from mla_quant.records import RECORDS

    result: dict[str, Any] = {"page_size": page_size, "model": None, "records": []}
    geometries: set[tuple[int, int]] = set()
    layers = 1
    if page_size < 1:
        raise ConfigError(f"--page-size must be at least 1, got {page_size}")
    if model is not None:
        result["model"], geometries = _cache_geometry(model, page_size, trust_remote_code)
        layers = result["model"]["layers"]
    for fmt in RECORDS.values():
        fits = all(fmt.holds(*widths) for widths in geometries)
        sizes = {
            "fits": fits if geometries else None,
            "bytes_per_token": layers * fmt.record_bytes if fits else None,
            "tokens_per_gib": (
                fmt.tokens_in(_GIB, layers=layers, page_size=page_size) if fits else None
            ),
        }
        result["records"].append(fmt.as_dict(page_size) | sizes)
    if as_json:
        _emit(result)
    else:
        _print_records(result, markdown)


def _cache_geometry(
    model: str, page_size: int, trust_remote_code: bool
) -> tuple[dict[str, Any], set[tuple[int, int]]]:
    """What a model caches, and the widths of latent and rope part that occur in it."""
    from mla_quant.families import describe, find_mla_layers
    from mla_quant.loading import meta_model, open_checkpoint

    with _stdout_is_data():
        checkpoint = open_checkpoint(model, trust_remote_code=trust_remote_code)
        structure = meta_model(checkpoint.config, trust_remote_code=trust_remote_code)
        discovery = find_mla_layers(structure)
        geometries = {
            (layer.geometry.kv_lora_rank, layer.geometry.qk_rope_head_dim)
            for layer in discovery.require()
        }
    facts = describe(discovery, str(checkpoint.config.model_type))
    unquantized = facts["cache_bytes_per_token"]["latent_bfloat16"]
    return {
        "source": model,
        "family": facts["family"],
        "layers": facts["layers"],
        "geometries": [f"{latent}+{rope}" for latent, rope in sorted(geometries)],
        "bfloat16": {
            "bytes_per_token": unquantized,
            "tokens_per_gib": _GIB // (unquantized * page_size) * page_size,
        },
    }, geometries


def _print_records(result: Mapping[str, Any], markdown: bool) -> None:
    model = result["model"]
    of = f"{model['source']}, {model['layers']} layers" if model else "one layer"
    title = f"KV-cache records, {of}, {result['page_size']} tokens a page"
    table = Table(box=MARKDOWN) if markdown else Table(title=title)
    for column in ("record", "known as", "values", "V", "latent", "rope", "outer scale"):
        table.add_column(column)
    for column in ("bytes/token", "tokens/GiB"):
        table.add_column(column, justify="right")

    def coded(row: Mapping[str, Any], segment: str) -> str:
        contents: dict[str, str] = {field["name"]: field["content"] for field in row["fields"]}
        content = contents.get(segment, "-")
        scale = row["scales"].get(segment)
        return content + (f", {scale['format']} per {scale['block']}" if scale else "")

    for row in result["records"]:
        table.add_row(
            row["name"], "; ".join(row["known_as"]), row["geometry"], str(row["v_width"]),
            coded(row, "latent"), coded(row, "rope"), row["outer_scale"] or "-",
            str(row["bytes_per_token"] or "-"), str(row["tokens_per_gib"] or "does not fit"),
        )  # fmt: skip
    if model:
        sizes = model["bfloat16"]
        table.add_row(
            "(unquantized)", "", ", ".join(model["geometries"]), "", "bfloat16", "bfloat16", "",
            str(sizes["bytes_per_token"]), str(sizes["tokens_per_gib"]),
        )  # fmt: skip
    if markdown:
        # A wrapped cell would be another row.
        Console(width=1000).print(table)
    else:
        out_console.print(table)


def _version(value: bool) -> None:
    if value:
        sys.stdout.write(f"mla-quant {__version__}\n")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    del version
    logging.basicConfig(
        level=logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=err_console, show_path=False, show_time=False)],
        force=True,
    )
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    if not verbose:
        # Deprecations inside libraries are of no use to who runs a command.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "transformers .* is not tested", UserWarning)
        _quiet_libraries()


def _quiet_libraries() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Without the program's name; default: the process's.

    Returns:
        Exit code.
    """
    # Newer releases of typer bring a copy of click: take the classes that typer itself raises.
    click_exception: type[Any] = typer.BadParameter.__mro__[2]
    command = typer.main.get_command(app)
    try:
        result = command.main(
            args=None if arguments is None else list(arguments),
            prog_name="mla-quant",
            standalone_mode=False,
        )
    except MlaQuantError as error:
        err_console.print(f"[red]error:[/] {_escape(str(error))}", highlight=False, soft_wrap=True)
        return 2
    except (typer.Abort, KeyboardInterrupt):
        err_console.print("interrupted", highlight=False)
        return 130
    except click_exception as error:
        error.show()
        return 2
    return int(result) if isinstance(result, int) else 0


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


if __name__ == "__main__":
    raise SystemExit(main())
