"""What ModelOpt is told: which modules to convert, and how MLA layers are calibrated."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from modelopt.torch.quantization.config import QuantizeAlgorithmConfig
from modelopt.torch.quantization.conversion import register, unregister
from modelopt.torch.quantization.mode import BaseCalibrateModeDescriptor, CalibrateModeRegistry
from modelopt.torch.quantization.model_calib import max_calibrate
from modelopt.torch.quantization.nn import QuantModuleRegistry, TensorQuantizer
from modelopt.torch.quantization.plugins.custom import CUSTOM_MODEL_PLUGINS
from pydantic import Field
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mla_quant.attention import (
    ATTENTION_IMPLEMENTATION,
    QuantMLAAttention,
    quant_mla_layers,
    route_attention,
)
from mla_quant.errors import CalibrationError
from mla_quant.families import find_mla_layers
from mla_quant.observers import Observer
from mla_quant.quantizers import register_backend
from mla_quant.recipes import ALGORITHM

ForwardLoop = Callable[[nn.Module], object]


class UncalibratedWarning(UserWarning):
    """Modules that calibration data never reached."""


def register_mla_layers(model: nn.Module) -> None:
    """Register the classes of a model's dense MLA layers with ModelOpt.

    Called by ModelOpt for every model it converts. Takes the place of its own registration of
    attention classes, which blocks V along features and reads P's kernel with one head width.
    """
    for cls in {type(layer.module) for layer in find_mla_layers(model).layers}:
        if issubclass(cls, QuantMLAAttention):
            continue
        registered = QuantModuleRegistry.get(cls)
        if registered is not None:
            if issubclass(registered, QuantMLAAttention):
                continue
            unregister(cls)
        register(cls, QuantMLAAttention)


def _layer_device(module: nn.Module) -> torch.device:
    for parameter in module.parameters():
        if parameter.device.type != "meta":
            return parameter.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def calibrate_mla(
    model: nn.Module,
    forward_loop: ForwardLoop | None = None,
    observer: str = "max",
    percentile: float = 99.99,
) -> None:
    """ModelOpt calibration algorithm "mla_quant".

    Plans first, so that a model which cannot be quantized is refused before any data is run; then
    observes every operand in the same forward passes in which ModelOpt calibrates linear layers;
    then checks that every quantizer ran.

    Args:
        model: A converted model.
        forward_loop: Runs the calibration data; called a second time by the "mse" observer.
        observer: "max", "percentile" or "mse".
        percentile: For "percentile", in percent.

    Raises:
        UnsupportedModelError: No MLA layer, or sparse ones.
        CalibrationError: No forward loop, or a layer that its data never reached.
    """
    find_mla_layers(model).require()
    layers = {n: m for n, m in quant_mla_layers(model).items() if m.observed_operands()}
    if layers and forward_loop is None:
        raise CalibrationError(
            f"{len(layers)} MLA layers need calibration data, but forward_loop is None; pass a "
            "function that runs calibration batches through the model"
        )
    try:
        for module in layers.values():
            module.start_observing(observer, percentile, _layer_device(module))
        max_calibrate(model, forward_loop)
        sync_observers(model)
        if observer == "mse" and layers:
            assert forward_loop is not None
            for module in layers.values():
                for statistics in (module.observers or {}).values():
                    statistics.start_second_pass()
            with unquantized(model):
                forward_loop(model)
            sync_observers(model, second_pass=True)
        _load_amax(layers)
    finally:
        for module in layers.values():
            module.statistics, module.observers = module.observers or {}, None
    _warn_uncalibrated(model)


@contextmanager
def unquantized(model: nn.Module) -> Iterator[None]:
    """Turn every quantizer off, those of linear layers included, for the duration of a block."""
    changed = [
        module
        for module in model.modules()
        if isinstance(module, TensorQuantizer) and module.is_enabled and module._if_quant
    ]
    for quantizer in changed:
        quantizer.disable_quant()
    try:
        yield
    finally:
        for quantizer in changed:
            quantizer.enable_quant()


def _load_amax(layers: dict[str, QuantMLAAttention]) -> None:
    missing = []
    for name, module in layers.items():
        for operand, statistics in (module.observers or {}).items():
            quantizer = module.quantizer(operand)
            amax = statistics.amax()
            if amax is None:
                missing.append(f"{name}.{operand}")
            elif quantizer._constant_amax is None:
                quantizer.amax = amax.to(statistics.device)
    if missing:
        shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if missing[4:] else "")
        raise CalibrationError(
            f"calibration never reached {len(missing)} of the enabled quantizers: {shown}. Did "
            "the forward loop run the model on data, with attention masks that are not all zero?"
        )


def sync_observers(model: nn.Module, *, second_pass: bool = False) -> None:
    """Add up the statistics of all processes, so that each holds those of one.

    Maxima and integer counts do not depend on the order; squared errors are float64 sums.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    for module in quant_mla_layers(model).values():
        for statistics in (module.observers or {}).values():
            if second_pass:
                assert statistics.errors is not None
                _all_reduce(statistics.errors, torch.distributed.ReduceOp.SUM)
                continue
            _all_reduce(statistics.maximum, torch.distributed.ReduceOp.MAX)
            for counts in (
                statistics.histogram,
                statistics.block_histogram,
                statistics.values,
                statistics.nonfinite,
            ):
                _all_reduce(counts, torch.distributed.ReduceOp.SUM)


def _all_reduce(value: torch.Tensor, op: torch.distributed.ReduceOp.RedOpType) -> None:
    """In place, whatever device the process group works on."""
    backend = torch.distributed.get_backend()
    device = torch.device("cuda") if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    moved = value.to(device)
    torch.distributed.all_reduce(moved, op=op)
    value.copy_(moved)


def _warn_uncalibrated(model: nn.Module) -> None:
    """List quantizers of linear layers that no token reached (experts, above all)."""
    names = uncalibrated_quantizers(model)
    if names:
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if names[8:] else "")
        warnings.warn(
            f"{len(names)} quantizers of linear layers saw no calibration data and will scale by "
            f"the values they meet: {shown}. Use more or longer calibration samples",
            UncalibratedWarning,
            stacklevel=2,
        )


def uncalibrated_quantizers(model: nn.Module) -> list[str]:
    """Enabled quantizers outside attention that have no amax."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, TensorQuantizer)
        and module.is_enabled
        and not module._dynamic
        and not name.endswith("_mla_quantizer")
        and getattr(module, "_amax", None) is None
    ]


def layer_statistics(model: nn.Module) -> dict[str, dict[str, Observer]]:
    """Observers of the last calibration, by layer and operand."""
    return {
        name: statistics
        for name, module in quant_mla_layers(model).items()
        if (statistics := getattr(module, "statistics", None))
    }


class MLACalibrateConfig(QuantizeAlgorithmConfig):  # type: ignore[misc]  # untyped base
    """Config of the calibration algorithm: `{"method": "mla_quant", "observer": "max"}`."""

    _mutates_weights = False

    method: Literal["mla_quant"] = Field(default="mla_quant")
    observer: Literal["max", "percentile", "mse"] = Field(default="max")
    percentile: float = Field(default=99.99, gt=50, le=100)


class MLACalibrateModeDescriptor(BaseCalibrateModeDescriptor):  # type: ignore[misc]
    """ModelOpt mode of `calibrate_mla`."""

    @property
    def config_class(self) -> type[QuantizeAlgorithmConfig]:
        """The config that `mtq.quantize` validates."""
        return MLACalibrateConfig

    _calib_func = calibrate_mla
    _supports_layerwise = False


def register_with_modelopt() -> None:
    """Make MLA quantization known to ModelOpt and transformers; idempotent."""
    register_backend()
    CUSTOM_MODEL_PLUGINS.add(register_mla_layers)
    if f"{ALGORITHM}_calibrate" not in CalibrateModeRegistry:
        CalibrateModeRegistry.register_mode(MLACalibrateModeDescriptor)
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_IMPLEMENTATION, route_attention)
