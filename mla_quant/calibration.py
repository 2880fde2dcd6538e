"""Calibration over a data set: resumable, on one or several processes, with a plan up front."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.quantization.nn import TensorQuantizer
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from mla_quant.attention import quant_mla_layers
from mla_quant.data import TokenBatch, make_batches
from mla_quant.errors import CalibrationError, ConfigError
from mla_quant.families import Discovery, layer_index
from mla_quant.formats import FORMATS
from mla_quant.observers import Observer
from mla_quant.plugin import layer_statistics, register_with_modelopt
from mla_quant.quantizers import quantizer_amax
from mla_quant.recipes import (
    OPERANDS,
    QUANTIZER_SUFFIX,
    FormatName,
    Recipe,
    matches_layer,
    to_modelopt_config,
    unmatched_patterns,
)
from mla_quant.settings import (
    LayerSettings,
    ModelSettings,
    OperandSettings,
    Producer,
    Settings,
    atomic_file,
    write_json,
)

logger = logging.getLogger("mla_quant")

Progress = Callable[[str, int, int], None]
"""Called with (stage, samples done, samples in all)."""

SAVE_SECONDS = 30.0
"""Statistics are saved at most this often while calibrating, and at the end of each pass."""


@dataclass(frozen=True)
class Plan:
    """What calibration is going to do, before any of it is done.

    Attributes:
        layers: For each MLA layer, the format of every operand.
        excluded: MLA layers that the recipe leaves alone.
        unmatched: Patterns of the recipe that name no layer.
        weights: Preset for linear layers.
    """

    layers: dict[str, dict[str, FormatName]]
    excluded: list[str]
    unmatched: list[str]
    weights: str

    def enabled(self) -> list[str]:
        """`layer.operand: format` of everything that will be quantized."""
        return [
            f"{layer}.{operand}: {fmt}"
            for layer, operands in self.layers.items()
            for operand, fmt in operands.items()
            if fmt != "none"
        ]


FUSED_PAIRS = (("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj"))
"""Linear layers that vLLM fuses: both quantized alike, or neither."""


def split_pair(quantized: Mapping[str, bool]) -> tuple[str, str] | None:
    """A quantized and an unquantized layer that engines fuse, if there are such.

    Args:
        quantized: Whether each linear layer's weight is quantized, by module name.
    """
    for name, state in quantized.items():
        parent, _, child = name.rpartition(".")
        for first, second in FUSED_PAIRS:
            partner = f"{parent}.{second}"
            if child == first and quantized.get(partner, state) != state:
                return (name, partner) if state else (partner, name)
    return None


def _check_weights(recipe: Recipe, model: nn.Module) -> list[str]:
    """Check what a recipe does to linear layers; returns patterns that name no module."""
    if recipe.weights == "none":
        return []
    rules = [e for e in to_modelopt_config(recipe)["quant_cfg"] if "parent_class" not in e]

    def enabled(quantizer: str) -> bool:
        matching = [e for e in rules if fnmatch.fnmatchcase(quantizer, e["quantizer_name"])]
        return bool(matching) and matching[-1].get("enable", True)

    widths: dict[str, int] = {}
    quantized: dict[str, bool] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            widths[name] = module.in_features
            quantized[name] = enabled(f"{name}.weight_quantizer")
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3 and key.endswith("_proj"):  # fused experts
                widths[f"{name}.{key}"] = int(parameter.shape[-1])
                quantized[f"{name}.{key}"] = enabled(f"{name}.{key}_weight_quantizer")
    block = FORMATS[recipe.weights].block_size
    uneven = [n for n, w in widths.items() if quantized[n] and block and w % block]
    if uneven:
        raise ConfigError(
            f"weights: {recipe.weights} needs input widths that are multiples of {block}; "
            f"{', '.join(f'{n} has {widths[n]}' for n in uneven[:3])} ({len(uneven)} layers): list "
            "them in weights_exclude, or use weights: fp8"
        )
    pair = split_pair(quantized)
    if pair is not None:
        raise ConfigError(
            f"recipe {recipe.name!r} quantizes the weights of {pair[0]} but not of {pair[1]}, and "
            "engines fuse the two into one matrix: list both in weights_exclude, or neither"
        )
    names = [name for name, _ in model.named_modules()]
    return [p for p in recipe.weights_exclude if not any(matches_layer(p, n) for n in names)]


def make_plan(recipe: Recipe, discovery: Discovery, model: nn.Module | None = None) -> Plan:
    """Resolve a recipe's patterns against a model.

    Args:
        recipe: What to do.
        discovery: The model's MLA layers.
        model: The model itself, on any device; its linear layers are checked if it is given.

    Raises:
        UnsupportedModelError: No dense MLA layer, or sparse ones.
        ConfigError: The recipe quantizes nothing in this model, or linear layers that cannot be.
    """
    attention = recipe.attention
    layers, excluded = {}, []
    for layer in discovery.require():
        if any(matches_layer(pattern, layer.name) for pattern in attention.exclude):
            excluded.append(layer.name)
            continue
        formats = attention.formats_of_layer(layer.name)
        if layer.geometry.qk_rope_head_dim == 0:
            formats = {o: fmt for o, fmt in formats.items() if not o.endswith("_rope")}
        layers[layer.name] = dict(formats)
    names = [layer.name for layer in discovery.layers]
    unmatched = unmatched_patterns(recipe, names)
    if model is not None:
        unmatched += _check_weights(recipe, model)
    plan = Plan(layers, excluded, unmatched, recipe.weights)
    if not plan.enabled() and recipe.weights == "none" and attention.sparsity is None:
        raise ConfigError(
            f"recipe {recipe.name!r} quantizes nothing in this model: every operand has format "
            f"none or its layer is excluded ({len(excluded)} of {len(names)} layers excluded)"
        )
    for pattern in plan.unmatched:
        logger.warning("recipe pattern %r matches no layer", pattern)
    return plan


def quantize(
    model: nn.Module, recipe: Recipe, forward_loop: Callable[[nn.Module], object] | None
) -> nn.Module:
    """`mtq.quantize` with a recipe.

    Args:
        model: A transformers model with dense MLA layers.
        recipe: From `mla_quant.load_recipe`.
        forward_loop: Runs calibration data through the model.

    Returns:
        The model, converted in place.

    Raises:
        UnsupportedModelError: No dense MLA layer, or sparse ones.
        CalibrationError: Quantizers that the data never reached.
    """
    register_with_modelopt()
    config = to_modelopt_config(recipe)
    kept: dict[TensorQuantizer, Tensor] = {}
    if recipe.weights == "none":
        kept = _linear_ranges(model)
        _leave_linear_alone(model, config["quant_cfg"])
    model = mtq.quantize(model, config, forward_loop)
    for quantizer, amax in kept.items():
        quantizer.amax = amax
    return model


def _linear_ranges(model: nn.Module) -> dict[TensorQuantizer, Tensor]:
    """Ranges of linear layers that were quantized before: they belong to the stored weights."""
    return {
        module: module.amax.clone()
        for name, module in model.named_modules()
        if isinstance(module, TensorQuantizer)
        and not name.endswith(QUANTIZER_SUFFIX)
        and module.is_enabled
        and module.amax is not None
    }


def _leave_linear_alone(model: nn.Module, entries: list[dict[str, Any]]) -> None:
    """Let a config switch off attention quantizers only, where linear layers have theirs."""
    if any(isinstance(module, TensorQuantizer) for module in model.modules()):
        entries[0] = {"quantizer_name": f"*{QUANTIZER_SUFFIX}", "enable": False}


# -- the statistics of a run, as tensors ----------------------------------------------------------


def _calibrators(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """ModelOpt's own calibrators, of linear layers."""
    for name, module in model.named_modules():
        if isinstance(module, TensorQuantizer) and hasattr(module._calibrator, "_calib_amax"):
            yield name, module._calibrator


def _observers(model: nn.Module) -> Iterator[tuple[str, Observer]]:
    for name, module in quant_mla_layers(model).items():
        for operand, observer in (module.observers or {}).items():
            yield f"{name}:{operand}", observer


def statistics_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of everything that calibration batches change, by a unique name."""
    state = {
        f"observer/{name}/{key}": value.detach().clone()
        for name, observer in _observers(model)
        for key, value in observer.state().items()
    }
    for name, calibrator in _calibrators(model):
        if calibrator._calib_amax is not None:
            state[f"calibrator/{name}"] = calibrator._calib_amax.detach().clone()
    return state


def load_statistics_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Inverse of `statistics_state`."""
    for name, observer in _observers(model):
        prefix = f"observer/{name}/"
        observer.load_state(
            {k.removeprefix(prefix): v.clone() for k, v in state.items() if k.startswith(prefix)}
        )
    for name, calibrator in _calibrators(model):
        saved = state.get(f"calibrator/{name}")
        if saved is not None:
            current = calibrator._calib_amax
            calibrator._calib_amax = saved.clone().to(None if current is None else current.device)


# -- the forward loop -----------------------------------------------------------------------------


@dataclass
class Position:
    """How far a pass over the data has come.

    Attributes:
        samples: Samples of this process's share that are done.
        batch_size: Current batch size; halved when memory runs out.
    """

    samples: int = 0
    batch_size: int = 1


@dataclass
class ForwardLoop:
    """Runs calibration samples through a model; give it to `mtq.quantize`.

    Attributes:
        samples: Token ids of each sample, all processes' together.
        batch_size: Samples in a batch.
        pad_token_id: Fills shorter samples.
        padding_side: "left" or "right".
        state_folder: Where statistics are saved to resume from; None: nowhere.
        rank: This process.
        world_size: All processes. Batches are dealt out in turn.
        progress: Told of every batch.
    """

    samples: Sequence[list[int]]
    batch_size: int
    pad_token_id: int
    padding_side: str = "right"
    state_folder: Path | None = None
    rank: int = 0
    world_size: int = 1
    progress: Progress | None = None
    halved_to: int | None = field(default=None, init=False)
    """Batch size that memory allowed, if the one asked for did not fit."""
    _passes: int = field(default=0, init=False)

    def _share(self) -> list[list[int]]:
        """This process's samples: whole batches dealt out, so that padding does not change."""
        groups = [
            self.samples[i : i + self.batch_size]
            for i in range(0, len(self.samples), self.batch_size)
        ]
        return [sample for group in groups[self.rank :: self.world_size] for sample in group]

    def __call__(self, model: nn.Module) -> None:
        """One pass over the data, from where an interrupted run stopped."""
        self._passes += 1
        position = Position(0, self.halved_to or self.batch_size)
        saved = self._load()
        if saved is not None:
            state, position = saved
            load_statistics_state(model, state)
        share = self._share()
        last_save = time.monotonic()
        self._tell(position, len(share))
        with torch.inference_mode():
            while position.samples < len(share):
                chunk = share[position.samples : position.samples + position.batch_size]
                if not self._run(model, chunk, position):
                    continue
                position.samples += len(chunk)
                self._tell(position, len(share))
                if time.monotonic() - last_save >= SAVE_SECONDS:
                    self._save(model, position)
                    last_save = time.monotonic()
        self._save(model, position)

    def _run(self, model: nn.Module, chunk: list[list[int]], position: Position) -> bool:
        """One batch; False if memory ran out and a smaller one should be tried."""
        before = statistics_state(model)
        (batch,) = make_batches(chunk, len(chunk), self.pad_token_id, self.padding_side)
        try:
            run_batch(model, batch)
        except torch.OutOfMemoryError as error:
            # Layers before the one that failed have counted this batch already.
            load_statistics_state(model, before)
            if len(chunk) == 1:
                raise CalibrationError(
                    f"out of memory with a single sample of {len(chunk[0])} tokens: use a shorter "
                    "--seq-len, or --device balanced"
                ) from error
            position.batch_size = self.halved_to = len(chunk) // 2
            logger.warning("out of memory: batch size halved to %d", position.batch_size)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return False
        return True

    def _tell(self, position: Position, total: int) -> None:
        if self.progress is not None:
            stage = "calibrating" if self._passes == 1 else f"calibrating, pass {self._passes}"
            self.progress(stage, position.samples, total)

    def _state_path(self) -> Path | None:
        if self.state_folder is None:
            return None
        return self.state_folder / f"rank{self.rank}.pass{self._passes}.state"

    def _save(self, model: nn.Module, position: Position) -> None:
        path = self._state_path()
        if path is None:
            return
        tensors = {
            k: v.cpu().contiguous()
            for k, v in statistics_state(model).items()
            # A later pass starts from the finished, summed-up statistics of the first.
            if self._passes == 1 or k.endswith("/errors")
        }
        tensors[_POSITION] = torch.tensor([position.samples, position.batch_size])
        try:
            with atomic_file(path) as temporary:
                save_file(tensors, temporary)
        except (OSError, SafetensorError) as error:
            raise CalibrationError(
                f"could not save statistics in {path.parent}: {error}; what was saved before is "
                "kept: make room, then --resume"
            ) from error

    def _load(self) -> tuple[dict[str, Tensor], Position] | None:
        path = self._state_path()
        if path is None or not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            samples, batch_size = (int(n) for n in state.pop(_POSITION))
        except (SafetensorError, KeyError, ValueError) as error:
            raise CalibrationError(
                f"saved statistics {path} are damaged ({error}); delete "
                f"{path.parent} and start again"
            ) from error
        if batch_size != self.batch_size:
            self.halved_to = batch_size
        return state, Position(samples, batch_size)


_POSITION = "position"
"""Key of the pass's position among the saved tensors."""


def input_device(model: nn.Module) -> torch.device:
    """Where a model takes its token ids, also when its weights are offloaded."""
    embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    for parameter in (*embedding.parameters(), *model.parameters()):
        if parameter.device.type != "meta":
            return parameter.device
    return torch.device("cpu")


def run_batch(model: nn.Module, batch: TokenBatch) -> None:
    """One forward pass without a cache, logits left out where the model allows."""
    device = input_device(model)
    base = getattr(model, "model", model)  # the head's logits are of no use here
    arguments: dict[str, Any] = {"input_ids": batch.input_ids.to(device), "use_cache": False}
    mask = batch.attention_mask.to(device)
    if not bool(mask.all()):
        arguments["attention_mask"] = mask
        arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    base(**arguments)


# -- a resumable run ------------------------------------------------------------------------------


def fingerprint(**parts: Any) -> dict[str, str]:
    """A digest of each setting that a result depends on, to compare runs by."""
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
        for key, value in parts.items()
    }


def samples_digest(samples: Sequence[Sequence[int]]) -> str:
    """Digest of the token ids."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps(list(sample)).encode())
    return digest.hexdigest()


RUN_FILE = "run.json"


def prepare_state_folder(folder: Path, settings: dict[str, str], *, resume: bool) -> None:
    """Start a run's state folder, or check that an interrupted run can be continued.

    Raises:
        CalibrationError: The interrupted run had other settings, or is damaged.
    """
    run = folder / RUN_FILE
    if resume and not run.is_file():
        logger.info("no interrupted run in %s: starting from the beginning", folder)
    if resume and run.is_file():
        try:
            previous = dict(json.loads(run.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise CalibrationError(
                f"{run} is damaged; delete {folder} and start without --resume"
            ) from error
        differing = sorted(k for k in {*settings, *previous} if previous.get(k) != settings.get(k))
        if differing:
            raise CalibrationError(
                f"the interrupted run in {folder} had other settings: {', '.join(differing)} "
                "differ. Repeat them to resume, or start again without --resume"
            )
        return
    if folder.exists():
        logger.warning("discarding an interrupted run in %s (resume with --resume)", folder)
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    write_json(run, settings)


# -- results --------------------------------------------------------------------------------------


def collect_settings(
    model: nn.Module,
    recipe: Recipe,
    *,
    source: str,
    family: str,
    version: str,
    calibration: dict[str, Any],
) -> Settings:
    """The settings of a calibrated model.

    Raises:
        CalibrationError: A quantizer has no amax.
    """
    layers: dict[str, LayerSettings] = {}
    geometry: dict[str, int | None] = {}
    for name, module in quant_mla_layers(model).items():
        geometry = module.geometry.as_dict()
        enabled = set(module.observed_operands())
        operands = {}
        for operand in OPERANDS:
            if operand not in enabled:
                operands[operand] = OperandSettings(format="none")
                continue
            quantizer = module.quantizer(operand)
            amax = quantizer_amax(quantizer, f"{name}.{operand}")
            fmt = quantizer.backend_extra_args["format"]
            operands[operand] = OperandSettings(format=fmt, amax=float(amax))
        layers[name] = LayerSettings.from_operands(operands)
    if not layers:
        raise CalibrationError("the model has no quantized MLA layer; run mtq.quantize first")
    return Settings(
        producer=Producer(name="mla_quant", version=version),
        model=ModelSettings(source=source, family=family, geometry=geometry),
        recipe=recipe,
        layers=layers,
        calibration=calibration,
    )


def collect_statistics(model: nn.Module) -> list[dict[str, Any]]:
    """Statistics of every operand of every layer, as plain data."""
    layers = {}
    for name, module in quant_mla_layers(model).items():
        layers[name] = {
            operand: float(quantizer_amax(module.quantizer(operand), f"{name}.{operand}"))
            for operand in module.observed_operands()
        }
    return _records(layer_statistics(model), layers)


def statistics_records(
    observers: Mapping[str, Mapping[str, Observer]], layers: Mapping[str, LayerSettings]
) -> list[dict[str, Any]]:
    """As `collect_statistics`, of observers that are not in a model."""
    amax = {
        name: {operand: layers[name].operand(operand).amax for operand in operands}
        for name, operands in observers.items()
    }
    return _records(observers, amax)


def _records(
    observers: Mapping[str, Mapping[str, Observer]],
    amax: Mapping[str, Mapping[str, float | None]],
) -> list[dict[str, Any]]:
    return [
        {
            "layer": name,
            "layer_index": layer_index(name),
            "operand": operand,
            **observer.summary(amax[name][operand]),
        }
        for name, operands in observers.items()
        for operand, observer in operands.items()
    ]


def apply_settings(model: nn.Module, settings: Settings) -> nn.Module:
    """Convert a model and give its quantizers the formats and amax of a settings file.

    Args:
        model: The model that the settings belong to, not converted yet.
        settings: From `mla_quant.settings.read_settings`.

    Raises:
        CalibrationError: Layers of the settings and of the model differ.
    """
    register_with_modelopt()
    attention_only = settings.recipe.with_changes(weights="none", weights_exclude=())
    entries = to_modelopt_config(attention_only)["quant_cfg"]
    _leave_linear_alone(model, entries)
    with contextlib.redirect_stdout(None):
        model = mtq.quantize(model, {"quant_cfg": entries, "algorithm": None})
    layers = quant_mla_layers(model)
    if set(layers) != set(settings.layers):
        unknown = sorted(set(settings.layers) - set(layers))[:3]
        absent = sorted(set(layers) - set(settings.layers))[:3]
        raise CalibrationError(
            "the settings do not belong to this model: "
            f"settings of unknown layers {unknown}, layers without settings {absent}"
        )
    for name, module in layers.items():
        for operand in module.observed_operands():
            entry = settings.layers[name].operand(operand)
            quantizer = module.quantizer(operand)
            expected = quantizer.backend_extra_args["format"]
            if entry.format != expected or entry.amax is None:
                raise CalibrationError(
                    f"{name}.{operand}: the recipe says {expected}, the layer's settings "
                    f"{entry.format} with amax {entry.amax}; the settings file was changed by hand"
                )
            device = module.kv_a_layernorm.weight.device
            device = torch.device("cpu") if device.type == "meta" else device
            quantizer.amax = torch.tensor(entry.amax, dtype=torch.float32, device=device)
    return model


@contextlib.contextmanager
def process_group(device: str) -> Iterator[tuple[int, int]]:
    """Join the processes that `torchrun` started; yields (rank, world size)."""
    import os

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or torch.distributed.is_initialized():
        initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
        yield (
            (torch.distributed.get_rank(), torch.distributed.get_world_size())
            if initialized
            else (0, 1)
        )
        return
    torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield torch.distributed.get_rank(), world
    finally:
        torch.distributed.destroy_process_group()
