"""Quantized MLA attention inside vLLM 0.26 to 0.33, on the TRITON_MLA backend.

`register` is vLLM's plugin: it makes every model load look for the settings that
`mla-quant calibrate` wrote beside the weights, and installs them if there are any; or makes the KV
cache hold records, if `--additional-config` says so. `install` does
the same by hand, for a model that is loaded already. Neither this module nor the plugin imports
vLLM's model code before a model is loaded.

Installing plans all layers first, and changes none if any cannot be served.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mla_quant.errors import ConfigError, RecordError
from mla_quant.recipes import OPERANDS, Recipe, load_recipe
from mla_quant.records import RecordFormat, outer_scale, record_format
from mla_quant.reference import RANKED_PATTERNS, Sparsity
from mla_quant.settings import (
    SETTINGS_FILE,
    LayerSettings,
    OperandSettings,
    Settings,
    read_settings,
)

# Below vLLM's own logger, whose handlers and level users have set up.
logger = logging.getLogger("vllm.mla_quant")

_LAYER_SUFFIXES = (".mla_attn", ".attn")
"""What vLLM appends to the name of an attention module for the attention proper."""
ENABLED = "mla_quant"
"""Key of vLLM's `--additional-config`: false serves a checkpoint as if it had no settings."""
RECORDS = "mla_quant_records"
"""Key of vLLM's `--additional-config`: name of the record format that the KV cache holds."""
SIDE_CACHE = "mla_quant_side_cache"
"""Key of vLLM's `--additional-config`: false keeps the KV cache as it is, and quantizes K and V
whenever they are read."""


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """What one attention layer will compute.

    Attributes:
        name: Name of the Hugging Face module, as in the settings.
        settings: Formats and amax of its operands.
        sparsity: Of the scores, or None.
        sparse_decode: Whether steps of one token are sparse too.
        side_cache: Whether the KV cache also holds quantized operands.
        rope_in_halves: Whether transformers rotates this model's rope part in an order of halves
            where vLLM does it in neighbouring pairs. The scores are the same, but not the blocks
            of 16 features that share a scale; then vLLM's order is changed to that of calibration.
    """

    name: str
    settings: LayerSettings
    sparsity: Sparsity | None
    sparse_decode: bool
    side_cache: bool
    rope_in_halves: bool

    def formats(self, operands: tuple[str, ...]) -> tuple[str, ...]:
        """Format names of operands."""
        return tuple(self.settings.operand(o).format for o in operands)

    def amax(self, operands: tuple[str, ...]) -> list[float]:
        """amax of operands; 1 for those that are not quantized, which nothing reads."""
        values = (self.settings.operand(o).amax for o in operands)
        return [1.0 if value is None else value for value in values]


@dataclasses.dataclass(frozen=True)
class RecordPlan:
    """What one attention layer stores in its KV cache.

    Attributes:
        format: Of the records.
        outer_scale: Of the layer; 1 where the format takes none or no range is known.
    """

    format: RecordFormat
    outer_scale: float


@dataclasses.dataclass(frozen=True)
class RecordCachePlan:
    """All layers of a model whose KV cache holds records.

    Attributes:
        layers: By their name in vLLM.
        calibrated: Whether outer scales come from calibrated ranges.
    """

    layers: Mapping[str, RecordPlan]
    calibrated: bool

    def summary(self) -> str:
        """One line for the log."""
        fmt = next(iter(self.layers.values())).format
        outer = ""
        if fmt.outer_scale == "per layer":
            outer = ", outer scales calibrated" if self.calibrated else ", no outer scale"
        return (
            f"mla_quant: {len(self.layers)} attention layers with a KV cache of {fmt.name} "
            f"records, {fmt.record_bytes} bytes a token{outer}"
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """All layers of a model.

    Attributes:
        layers: Attention layers of vLLM by their name there, and what they will compute.
        untouched: Names of attention layers that stay as they are.
    """

    layers: Mapping[str, LayerPlan]
    untouched: tuple[str, ...]

    def summary(self) -> str:
        """One line for the log."""
        formats = {
            " ".join(
                f"{letter.upper()} {plan.settings.operand(operand).format}"
                for letter, operand in zip("qkpv", ("q", "k", "p", "v"), strict=True)
            )
            for plan in self.layers.values()
        }
        first = next(iter(self.layers.values()))
        sparse = f", {first.sparsity.n}:{first.sparsity.m} scores" if first.sparsity else ""
        cache = "side cache of operands" if first.side_cache else "operands quantized on read"
        left = f"; untouched: {', '.join(self.untouched)}" if self.untouched else ""
        listed = "; ".join(sorted(formats)) + sparse
        return (
            f"mla_quant: {len(self.layers)} attention layers quantized ({listed}), fused kernels, "
            f"{cache}{left}"
        )


def enabled(vllm_config: Any) -> bool:
    """Whether `--additional-config` lets the plugin act.

    Raises:
        ConfigError: It says something else than true or false.
    """
    additional = vllm_config.additional_config
    value = additional.get(ENABLED, True) if isinstance(additional, dict) else True
    if not isinstance(value, bool):
        raise ConfigError(f"additional_config {ENABLED} is {value!r}; it must be true or false")
    return value


def find_settings(model: str, revision: str | None = None) -> Settings | None:
    """Settings beside a model's weights: in its folder, or in the local Hugging Face cache.

    Raises:
        CheckpointError: There is a file and it is not valid.
    """
    folder = Path(model)
    if folder.is_dir():
        return read_settings(folder) if (folder / SETTINGS_FILE).is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(model, SETTINGS_FILE, revision=revision)
    except HFValidationError:
        return None
    return read_settings(Path(path).parent) if isinstance(path, str) else None


def with_recipe(settings: Settings, recipe: Recipe) -> Settings:
    """Settings with the formats of another recipe, and the amax that were calibrated.

    Raises:
        ConfigError: An operand that the recipe quantizes has no amax.
    """
    layers, missing = {}, []
    for name, layer in settings.layers.items():
        formats = recipe.attention.formats_of_layer(name)
        operands = {}
        for operand in OPERANDS:
            amax = layer.operand(operand).amax
            fmt = formats[operand]
            if operand == "p" and recipe.attention.p_amax != "calibrated":
                amax = float(recipe.attention.p_amax)
            if fmt != "none" and amax is None:
                missing.append(f"{name}.{operand}")
            operands[operand] = OperandSettings(format=fmt, amax=amax)
        layers[name] = LayerSettings.from_operands(operands)
    if missing:
        raise ConfigError(
            f"no amax for {len(missing)} operands that the recipe quantizes and the settings do "
            f"not: {', '.join(missing[:4])}; calibrate with this recipe"
        )
    return settings.model_copy(update={"recipe": recipe, "layers": layers})


def plan(
    model: torch.nn.Module, settings: Settings, vllm_config: Any, *, over_records: bool = False
) -> Plan:
    """Decide what every attention layer of a vLLM model will compute, changing nothing.

    Args:
        model: vLLM's.
        settings: Formats and ranges.
        vllm_config: vLLM's.
        over_records: Whether the KV cache will hold records: then there is no side cache.

    Raises:
        ConfigError: With every reason why some layer cannot be served.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    additional = vllm_config.additional_config
    wanted = additional.get(SIDE_CACHE, True) if isinstance(additional, dict) else True
    problems: list[str] = []
    if not isinstance(wanted, bool):
        problems.append(f"additional_config {SIDE_CACHE} is {wanted!r}; it must be true or false")
    problems += _context_parallelism(vllm_config)
    recipe = settings.recipe.attention
    sparsity = None
    if recipe.sparsity is not None:
        fields = recipe.sparsity
        sparsity = Sparsity(
            fields.n, fields.m, fields.dense_sink_tokens, fields.dense_recent_tokens
        )
        if (fields.n, fields.m) not in RANKED_PATTERNS:
            allowed = " and ".join(f"{n}:{m}" for n, m in RANKED_PATTERNS)
            problems.append(f"sparsity {fields.n}:{fields.m} has no kernel; allowed are {allowed}")
    if recipe.p_reference != "integer":
        problems.append(
            f"p_reference is {recipe.p_reference!r}; kernels have the integer reference point"
        )
    layers: dict[str, LayerPlan] = {}
    untouched = []
    for name, module in model.named_modules():
        if not isinstance(module, MLAAttention):
            continue
        layer = hugging_face_name(module.layer_name, settings.layers)
        if layer is None:
            untouched.append(module.layer_name)
            continue
        problems += [f"{name}: {reason}" for reason in _gates(module, settings.layers[layer])]
        layers[module.layer_name] = LayerPlan(
            layer,
            settings.layers[layer],
            sparsity,
            bool(recipe.sparsity and recipe.sparsity.sparse_decode),
            wanted is True and not over_records and _has_stored_operands(settings.layers[layer]),
            rope_in_halves(vllm_config),
        )
    connector = getattr(vllm_config, "kv_transfer_config", None)
    if connector is not None and any(layer.side_cache for layer in layers.values()):
        problems.append(
            f"the KV connector {getattr(connector, 'kv_connector', None)!r} moves pages of the KV "
            "cache, and with a side cache they are not those it knows; set additional_config "
            f"{SIDE_CACHE} to false"
        )
    if not layers:
        ours, theirs = ", ".join(list(settings.layers)[:2]), ", ".join(untouched[:2]) or "none"
        problems.append(
            "no MLA attention layer of this model has the name of one in the settings: "
            f"{ours}, … in the settings, {theirs} in the model"
        )
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(f"cannot quantize the attention of this model:{listed}")
    return Plan(layers, tuple(untouched))


def hugging_face_name(layer_name: str, known: Collection[str]) -> str | None:
    """Which of the known module names is vLLM's layer, whatever prefix either gives to it."""
    for suffix in _LAYER_SUFFIXES:
        layer_name = layer_name.removesuffix(suffix)
    if layer_name in known:
        return layer_name
    # Multimodal models nest the language model at different places.
    tail = layer_name[layer_name.find("layers.") :]
    found = [name for name in known if name.endswith(tail)]
    return found[0] if tail.startswith("layers.") and len(found) == 1 else None


def _has_stored_operands(settings: LayerSettings) -> bool:
    return any(settings.operand(o).format != "none" for o in ("k_latent", "k_rope", "v_latent"))


# Their configs in transformers say so by default.
_INTERLEAVED_BY_DEFAULT = ("deepseek_v3", "kimi_k2")


def rope_in_halves(vllm_config: Any) -> bool:
    """Whether transformers rotates this model's rope part in halves; see `LayerPlan`."""
    config = vllm_config.model_config.hf_text_config
    default = getattr(config, "model_type", None) in _INTERLEAVED_BY_DEFAULT
    return bool(getattr(config, "rope_interleave", default))


def _layer_gates(layer: Any) -> list[str]:
    """Every reason why one layer cannot be served, whatever is wanted of it."""
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl

    impl = layer.impl
    reasons = []
    if getattr(impl, "is_sparse", False) or getattr(layer, "indexer", None) is not None:
        reasons.append("it selects keys with an indexer; sparse attention is not supported")
    if type(impl) is not TritonMLAImpl:
        reasons.append(
            f"its attention is {type(impl).__name__}; start vLLM with --attention-backend "
            "TRITON_MLA"
        )
    if layer.kv_cache_dtype not in ("auto", "bfloat16", "float16"):
        reasons.append(
            f"kv_cache_dtype is {layer.kv_cache_dtype!r}; the raw latent is needed, use auto"
        )
    if getattr(layer, "calculate_kv_scales", False):
        reasons.append("calculate_kv_scales is set; it belongs to an fp8 cache, leave it out")
    if getattr(impl, "q_pad_num_heads", None):
        reasons.append(f"heads are padded to {impl.q_pad_num_heads}; that is not supported")
    for field, what in (
        ("sliding_window", "a sliding window"),
        ("logits_soft_cap", "a soft cap of the scores"),
        ("alibi_slopes", "ALiBi"),
        ("sinks", "attention sinks"),
    ):
        if getattr(layer, field, None) or getattr(impl, field, None):
            reasons.append(f"it has {what}, which is not supported")
    return reasons


def _gates(layer: Any, settings: LayerSettings) -> list[str]:
    """Every reason why one layer cannot be served quantized."""
    from mla_quant.kernels.operand_cache import check_widths

    impl = layer.impl
    reasons = _layer_gates(layer)
    try:
        check_widths(impl.kv_lora_rank, impl.qk_rope_head_dim)
    except ConfigError as error:
        reasons.append(str(error))
    nope = impl.qk_nope_head_dim
    if nope % 16 and "nvfp4" in (settings.q.format, settings.k.format):
        reasons.append(f"qk_nope_head_dim is {nope}; NVFP4 needs a multiple of 16")
    for operand in OPERANDS:
        found = settings.operand(operand)
        if found.format != "none" and found.amax is None:
            reasons.append(f"operand {operand} is {found.format} and has no amax; calibrate again")
    return reasons


def _context_parallelism(vllm_config: Any) -> list[str]:
    reasons = []
    for field in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(vllm_config.parallel_config, field, 1)
        if size > 1:
            reasons.append(f"{field} is {size}; context parallelism is not supported, use 1")
    return reasons


def wanted_records(vllm_config: Any) -> RecordFormat | None:
    """The record format that `--additional-config` names for the KV cache, if any.

    Raises:
        ConfigError: It names none.
    """
    additional = vllm_config.additional_config
    name = additional.get(RECORDS) if isinstance(additional, dict) else None
    return None if name is None else named_format(name)


def named_format(name: object) -> RecordFormat:
    """The record format of a name that a user gave.

    Raises:
        ConfigError: There is none.
    """
    try:
        return record_format(str(name))
    except RecordError as error:
        raise ConfigError(f"KV cache records ({RECORDS}): {error}") from error


def plan_records(
    model: torch.nn.Module, fmt: RecordFormat, settings: Settings | None, vllm_config: Any
) -> RecordCachePlan:
    """Decide how every MLA layer of a vLLM model stores its KV cache, changing nothing.

    Args:
        model: vLLM's.
        fmt: Of the records.
        settings: Calibrated ranges for outer scales, if there are any.
        vllm_config: vLLM's.

    Raises:
        ConfigError: With every reason why some layer cannot be served.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    problems = _context_parallelism(vllm_config)
    if fmt.footer_bytes or fmt.page_alignment > 1:
        problems.append(
            f"{fmt.name} keeps scales in a footer of each page, and vLLM's pages have none; give a "
            "format whose records are whole"
        )
    connector = getattr(vllm_config, "kv_transfer_config", None)
    if connector is not None:
        problems.append(
            f"the KV connector {getattr(connector, 'kv_connector', None)!r} moves pages of the KV "
            "cache, and does not know records; leave one of them out"
        )
    passes = getattr(vllm_config.compilation_config, "pass_config", None)
    if getattr(passes, "fuse_rope_kvcache_cat_mla", False):
        problems.append(
            "fuse_rope_kvcache_cat_mla writes the KV cache past the attention layer; set it to "
            "false in the pass_config"
        )
    layers: dict[str, RecordPlan] = {}
    calibrated = True
    for name, module in model.named_modules():
        if not isinstance(module, MLAAttention):
            continue
        reasons = _layer_gates(module)
        widths = (module.impl.kv_lora_rank, module.impl.qk_rope_head_dim)
        if not fmt.holds(*widths):
            reasons.append(
                f"its latent and rope part have {widths[0]} and {widths[1]} values, and "
                f"{fmt.name} holds {fmt.geometry}"
            )
        problems += [f"{name}: {reason}" for reason in reasons]
        amax = None
        if settings is not None and fmt.outer_scale == "per layer":
            known = hugging_face_name(module.layer_name, settings.layers)
            amax = settings.layers[known].operand("k_latent").amax if known else None
        calibrated = calibrated and amax is not None
        outer = outer_scale(amax, fmt) if amax else 1.0
        layers[module.layer_name] = RecordPlan(fmt, outer)
    if not layers:
        problems.append("the model has no MLA attention layer")
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(f"cannot keep this model's KV cache in {fmt.name} records:{listed}")
    return RecordCachePlan(layers, calibrated)


def publish(
    model: torch.nn.Module,
    planned: Plan | None,
    vllm_config: Any,
    records: RecordCachePlan | None = None,
) -> None:
    """Make layers compute and store what was planned; on any failure everything is as it was."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    from mla_quant.integrations import vllm_attention, vllm_records

    undo: list[Callable[[], None]] = []
    try:
        for module in model.modules():
            if not isinstance(module, MLAAttention):
                continue
            layer = planned.layers.get(module.layer_name) if planned else None
            stored = records.layers.get(module.layer_name) if records else None
            if stored is not None:
                vllm_records.reclass(module, stored, layer, vllm_config, undo)
            elif layer is not None:
                vllm_attention.reclass(module, layer, vllm_config, undo)
    except BaseException:
        for step in reversed(undo):
            step()
        raise
    for part in (planned, records):
        if part is not None:
            logger.info(part.summary())


def install(
    model_or_worker: Any,
    recipe: Recipe | str | Path | None = None,
    *,
    settings: Settings | str | Path | None = None,
    records: str | None = None,
) -> Plan:
    """Quantize the attention of a model that vLLM has loaded.

    Call it after the model is loaded and before vLLM profiles memory and allocates the KV cache:
    from a worker class's `load_model`, or by `collective_rpc` on an engine that has not started.

    Args:
        model_or_worker: A vLLM model, or a worker (or model runner) that holds one.
        recipe: Formats other than those of the settings; their amax stay.
        settings: Calibrated settings, or the folder of a checkpoint; None: those of the model.
        records: Name of the record format that the KV cache is to hold; None: raw latents.

    Returns:
        What was installed.

    Raises:
        ConfigError: Every reason why the model cannot be served so; nothing was changed.
        CheckpointError: The settings are missing or not valid.
    """
    model, vllm_config = model_and_config(model_or_worker)
    if settings is None:
        found = find_settings(vllm_config.model_config.model, vllm_config.model_config.revision)
        if found is None:
            raise ConfigError(
                f"{vllm_config.model_config.model} has no {SETTINGS_FILE}; calibrate it with "
                "mla-quant calibrate, or pass settings"
            )
        settings = found
    elif not isinstance(settings, Settings):
        settings = read_settings(Path(settings))
    if recipe is not None:
        settings = with_recipe(
            settings, recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
        )
    fmt = None if records is None else named_format(records)
    planned = plan(model, settings, vllm_config, over_records=fmt is not None)
    stored = None if fmt is None else plan_records(model, fmt, settings, vllm_config)
    publish(model, planned, vllm_config, stored)
    return planned


def model_and_config(model_or_worker: Any) -> tuple[torch.nn.Module, Any]:
    """A model and vLLM's config, from a model, a worker or a model runner."""
    holder = model_or_worker
    if not isinstance(holder, torch.nn.Module):
        holder = getattr(holder, "model_runner", holder)
        config = getattr(holder, "vllm_config", None)
        get_model = getattr(holder, "get_model", None)
        if config is None or get_model is None:
            raise ConfigError(
                f"{type(model_or_worker).__name__} is neither a model nor a worker or model runner "
                "of vLLM; pass one of these"
            )
        return get_model(), config
    from vllm.config import get_current_vllm_config

    return holder, getattr(holder, "vllm_config", None) or get_current_vllm_config()


_LOADER = "vllm.model_executor.model_loader.base_loader"


def register() -> None:
    """Entry point of group `vllm.general_plugins`: every model load looks for settings.

    Called in every process of vLLM, possibly more than once, and in most of them long before a
    model is loaded or never: it waits for the module with the loader instead of importing it.
    """
    if _LOADER in sys.modules:
        _wrap(sys.modules[_LOADER])
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(MetaPathFinder):
    """Lets vLLM's loader be found as always, and wraps it once it is there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LOADER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _wrap(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wrap(module: Any) -> None:
    """Make `load_model` of vLLM's loaders look for settings first and install them afterwards."""
    loader = module.BaseModelLoader
    if getattr(loader.load_model, "_mla_quant", False):
        return
    original = loader.load_model

    @functools.wraps(original)
    def load_model(
        self: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        records, settings = wanted_records(vllm_config), None
        if enabled(vllm_config) or records is not None:
            settings = find_settings(model_config.model, model_config.revision)
        quantized = settings is not None and enabled(vllm_config)
        model = original(self, vllm_config, model_config, *args, **kwargs)
        if not quantized and records is None:
            return model
        draft = _is_draft(vllm_config, model_config)
        if draft and not (settings is not None and _has_layer_of(settings, model)):
            # Draft layers (MTP) are in the same checkpoint, and were not calibrated.
            logger.info("mla_quant: the draft model's attention stays as it is")
            return model
        planned, stored = None, None
        if quantized:
            assert settings is not None
            planned = plan(model, settings, vllm_config, over_records=records is not None)
        if records is not None:
            stored = plan_records(model, records, settings, vllm_config)
        publish(model, planned, vllm_config, stored)
        return model

    load_model._mla_quant = True  # type: ignore[attr-defined]
    loader.load_model = load_model


def _is_draft(vllm_config: Any, model_config: Any) -> bool:
    """Whether what is loaded only proposes tokens."""
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    return model_config is draft and model_config is not vllm_config.model_config


def _has_layer_of(settings: Settings, model: torch.nn.Module) -> bool:
    """Whether some attention layer of a model has settings."""
    names = (getattr(module, "layer_name", None) for module in model.modules())
    return any(name and hugging_face_name(name, settings.layers) for name in names)


__all__ = ["LayerPlan", "Plan", "find_settings", "install", "plan", "publish", "register"]
