"""Exporting a calibrated model, loading it again, and verifying that it is what it claims.

An export is a Hugging Face checkpoint that any engine loads: weights, config, tokenizer and all
sidecars of the source, plus `mla_quant.json` with the attention settings and a folder `mla_quant/`
with statistics, reference logits and file hashes, which no engine reads. When only attention is
quantized the weights do not change, so the source's files are copied byte for byte: native FP8
weights and draft layers included, which a load-and-save through transformers would lose.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import logging
import os
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from modelopt.torch.quantization.nn import TensorQuantizer
from safetensors import safe_open
from torch import Tensor, nn

from mla_quant.attention import only_operands, quant_mla_layers, set_form, use_form
from mla_quant.calibration import apply_settings, input_device, split_pair
from mla_quant.errors import CheckpointError, MlaQuantError
from mla_quant.formats import E2M1, E4M3, FP8, NVFP4, OperandFormat
from mla_quant.loading import (
    INDEX_FILE,
    Checkpoint,
    check_files,
    load_model,
    open_checkpoint,
    parse_dtype,
)
from mla_quant.recipes import QUANTIZER_SUFFIX, weight_preset
from mla_quant.reference import decode, global_scale
from mla_quant.settings import (
    SETTINGS_FILE,
    SIDE_FOLDER,
    Settings,
    read_settings,
    write_json,
)

logger = logging.getLogger("mla_quant")

MANIFEST_FILE = f"{SIDE_FOLDER}/manifest.json"
STATISTICS_FILE = f"{SIDE_FOLDER}/statistics.json"
REFERENCE_FILE = f"{SIDE_FOLDER}/reference_logits.npz"
MODELOPT_FILE = "hf_quant_config.json"
CARD_FILE = "README.md"

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")
_INDEX_SUFFIX = ".index.json"
_SCALE_SUFFIXES = (
    ".weight_scale", ".weight_scale_2", ".input_scale", ".weight_scale_inv",
    ".pre_quant_scale", "_scale_inv",
)  # fmt: skip
_CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale")
"""Scales of a KV cache (or of vLLM's own FP8 attention). An MLA engine would take them for the
scale of the *latent* cache; this project never writes them, because operand ranges are no cache
ranges."""
_LOW_PRECISION = ("F8_E4M3", "U8")
_FP8_BITS = (E4M3.exponent_bits, E4M3.mantissa_bits)

REFERENCE_SEQUENCES = 2
REFERENCE_TOKENS = 64
REFERENCE_POSITIONS = 32
REFERENCE_LOGITS = 1 << 20
"""Logits of the last positions of a few short sequences are recorded at export: of each form at
most this many, so that a large vocabulary leaves fewer positions (at least one)."""

# -- loading --------------------------------------------------------------------------------------


def load_quantized(
    folder: str | Path,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    form: str = "projected",
) -> tuple[nn.Module, Settings]:
    """Load an export with its quantized attention (and weights, if those are quantized too).

    Args:
        folder: Written by `export_checkpoint` or `mla-quant calibrate`.
        device: "cpu", "cuda", "cuda:N" or "balanced".
        dtype: "auto" or a name; default: what it was calibrated in.
        attn_implementation: As in transformers.
        trust_remote_code: As in transformers.
        form: "projected", "absorbed" or "auto".

    Returns:
        The model, in evaluation mode, and its settings.

    Raises:
        CheckpointError: Files or settings are missing, damaged or contradict each other.
    """
    path = Path(folder)
    settings = read_settings(path)
    checkpoint = open_checkpoint(str(folder), trust_remote_code=trust_remote_code)
    used = dtype or str(settings.calibration.get("dtype", "auto"))
    model = load_weights(
        checkpoint,
        dtype=used,
        device=device,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    model = apply_settings(model, settings)
    set_form(model, form)  # type: ignore[arg-type]
    return model, settings


def load_weights(
    checkpoint: Checkpoint,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load a model, ModelOpt-quantized weights included.

    transformers does not read ModelOpt's packed weights: they are dequantized here, and the
    activation quantizers of the linear layers are set up again from `input_scale`.
    """
    arguments: dict[str, Any] = {
        "dtype": parse_dtype(dtype),
        "device": device,
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
    }
    if checkpoint.quant_method != "modelopt":
        return load_model(checkpoint, **arguments)
    declared = checkpoint.config.quantization_config
    algorithm = (declared if isinstance(declared, dict) else declared.to_dict()).get("quant_algo")
    preset = {"FP8": "fp8", "NVFP4": "nvfp4"}.get(str(algorithm))
    if preset is None:
        raise CheckpointError(
            f"{checkpoint.folder}: ModelOpt weights of kind {algorithm!r} cannot be read; "
            "FP8 and NVFP4 can"
        )
    if arguments["dtype"] == "auto":
        arguments["dtype"] = getattr(checkpoint.config, "dtype", None) or torch.bfloat16
    full, input_amax = _dequantize_weights(checkpoint, arguments["dtype"])
    del checkpoint.config.quantization_config
    model = load_model(checkpoint, state_dict=full, **arguments)
    checkpoint.config.quantization_config = declared
    return _attach_input_quantizers(model, preset, input_amax)


def _dequantize_weights(
    checkpoint: Checkpoint, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Full-precision weights, and the amax of each linear layer's input."""
    packed: dict[str, Tensor] = {}
    for file in checkpoint.files:
        with safe_open(file, framework="pt") as shard:
            packed |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    unscaled = [
        name
        for name, value in packed.items()
        if value.dtype in (torch.uint8, torch.float8_e4m3fn)
        and not name.endswith(".weight_scale")
        and not {f"{name}_scale"} | ({f"{name}_scale_2"} if value.dtype == torch.uint8 else set())
        <= packed.keys()
    ]
    if unscaled:
        raise CheckpointError(
            f"{checkpoint.folder}: {len(unscaled)} quantized weights have no scale: "
            f"{', '.join(unscaled[:3])}"
        )
    weights: dict[str, Tensor] = {}
    inputs: dict[str, float] = {}
    for name, value in packed.items():
        if name.endswith(".input_scale"):
            layer = name.removesuffix(".input_scale")
            fmt = NVFP4 if packed[f"{layer}.weight"].dtype == torch.uint8 else FP8
            inputs[layer] = _amax_of_scale(value, fmt)
        elif name.endswith((".weight_scale", ".weight_scale_2")):
            continue
        elif value.dtype == torch.float8_e4m3fn:
            weights[name] = (value.float() * packed[f"{name}_scale"].float()).to(dtype)
        elif value.dtype == torch.uint8:
            weights[name] = _unpack_nvfp4(
                value, packed[f"{name}_scale"], packed[f"{name}_scale_2"]
            ).to(dtype)
        else:
            weights[name] = value
    return weights, inputs


def _unpack_nvfp4(packed: Tensor, block_scale: Tensor, global_scale: Tensor) -> Tensor:
    """[out, in/2] two codes a byte, the even one low; [out, in/16] E4M3; fp32."""
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)
    scale = decode(block_scale.view(torch.uint8), E4M3)
    assert NVFP4.block_size is not None
    # Element times block scale is exact, so that there is one rounding, as when it was calibrated.
    units = decode(codes, E2M1) * scale.repeat_interleave(NVFP4.block_size, dim=-1)
    return units * global_scale.float()


def _amax_of_scale(scale: Tensor, fmt: OperandFormat) -> float:
    """An amax that gives just this scale: the product with `quant_max` may be a rounding off."""
    stored = scale.float()
    near = stored * fmt.quant_max
    infinity = torch.full_like(near, torch.inf)
    candidates = (near, torch.nextafter(near, infinity), torch.nextafter(near, -infinity))
    return float(next((a for a in candidates if torch.equal(global_scale(a, fmt), stored)), near))


def _attach_input_quantizers(
    model: nn.Module, preset: str, input_amax: Mapping[str, float]
) -> nn.Module:
    import modelopt.torch.quantization as mtq

    from mla_quant.plugin import register_with_modelopt

    register_with_modelopt()
    entries = [{"quantizer_name": "*", "enable": False}]
    entries += [e for e in weight_preset(preset) if "weight_quantizer" not in e["quantizer_name"]]
    entries.append({"quantizer_name": f"*{QUANTIZER_SUFFIX}", "enable": False})
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        model = mtq.quantize(model, {"quant_cfg": entries, "algorithm": None})
    for name, module in model.named_modules():
        if not (isinstance(module, TensorQuantizer) and module.is_enabled):
            continue
        layer = name.rpartition(".")[0]
        if name.endswith(".input_quantizer"):
            amax = input_amax.get(layer)
        else:
            projections = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            found = [
                value
                for key, value in input_amax.items()
                if key.startswith(f"{layer}.") and key.endswith(projections)
            ]
            amax = max(found, default=None)
        if amax is None:
            module.disable()
        else:
            module.amax = torch.tensor(amax, dtype=torch.float32, device=_device_of(model, layer))
    return model


def _device_of(model: nn.Module, layer: str) -> torch.device:
    for parameter in model.get_submodule(layer).parameters():
        if parameter.device.type != "meta":
            return parameter.device
    return torch.device("cpu")


# -- exporting ------------------------------------------------------------------------------------


def check_target(out: Path, *, overwrite: bool) -> None:
    """Refuse a target that cannot be written, before any work is done.

    Raises:
        CheckpointError: It exists (and is not to be replaced, or is no checkpoint), or it cannot be
            written.
    """
    if out.exists() and not overwrite:
        raise CheckpointError(
            f"output {out} exists already; give another folder, or --overwrite to replace it"
        )
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"output {out} is a file; give a folder")
    if out.exists() and any(out.iterdir()) and not (out / SETTINGS_FILE).is_file():
        raise CheckpointError(
            f"output {out} is not a checkpoint of mla-quant (it has no {SETTINGS_FILE}), and is "
            "not replaced even with --overwrite; give another folder"
        )
    parent = out.absolute().parent
    ancestor = parent
    while not ancestor.exists():
        ancestor = ancestor.parent
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
        raise CheckpointError(f"output {out} cannot be written: no permission in {ancestor}")


def export_checkpoint(
    model: nn.Module | None,
    out: str | Path,
    settings: Settings,
    *,
    source: Checkpoint | None = None,
    tokenizer: Any = None,
    statistics: Sequence[Mapping[str, Any]] = (),
    reference_samples: Sequence[Sequence[int]] = (),
    reference: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    max_shard_size: str = "5GB",
) -> Path:
    """Write a calibrated model as a checkpoint.

    Args:
        model: Converted and calibrated. If its weights are quantized, ModelOpt's exporter packs
            them in place: the model cannot be run afterwards. None where another engine has it:
            then `source` has the weights, and `reference` the logits.
        out: Folder to create; it appears when it is complete and not before.
        settings: From `mla_quant.calibration.collect_settings`.
        source: Checkpoint the model was loaded from: its files are copied.
        tokenizer: Saved if there is no source.
        statistics: From `mla_quant.calibration.collect_statistics`.
        reference_samples: Token ids whose logits are recorded for `verify`.
        reference: Their logits, as `reference_logits` returns them; None: computed here.
        overwrite: Replace an existing folder.
        max_shard_size: Of newly written weight files.

    Returns:
        `out`.

    Raises:
        CheckpointError: The target is not writable, the disk is too small, or the result is not
            consistent.
    """
    out = Path(out)
    check_target(out, overwrite=overwrite)
    if model is None:
        assert source is not None and settings.recipe.weights == "none"
    else:
        _check_fused_pairs(model)
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    for left_over in out.absolute().parent.glob(f".{glob.escape(out.name)}.partial-*"):
        shutil.rmtree(left_over, ignore_errors=True)  # of a run that was killed while exporting
    _check_disk(model, source, out)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.absolute().parent))
    try:
        side = temporary / SIDE_FOLDER
        side.mkdir()
        weights_quantized = settings.recipe.weights != "none"
        if weights_quantized:
            assert model is not None
            _settle_weights(model)
        if reference_samples:
            if reference is None:
                assert model is not None
                reference = reference_logits(model, reference_samples)
            _write_reference(reference, reference_samples, temporary / REFERENCE_FILE)
        write_json(temporary / STATISTICS_FILE, list(statistics))
        _write_weights(model, temporary, source, weights_quantized, max_shard_size)
        if source is not None:
            _copy_sidecars(source, temporary)
        elif tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        write_json(temporary / SETTINGS_FILE, settings.model_dump())
        _write_card(temporary, settings)
        problems = check_claims(temporary)
        if problems:
            raise CheckpointError(f"the export is not consistent: {'; '.join(problems)}")
        write_json(temporary / MANIFEST_FILE, {"files": hash_files(temporary)})
        temporary.chmod(0o777 & ~_umask())
        _publish(temporary, out)
    except OSError as error:
        if isinstance(error, MlaQuantError):
            raise
        raise CheckpointError(f"could not write {out}: {error}; nothing was left behind") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _publish(temporary: Path, out: Path) -> None:
    """Put the finished folder in place; an old one is deleted only after that."""
    old = None
    if out.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old-", dir=out.absolute().parent))
        out.rename(old / "checkpoint")
    try:
        temporary.rename(out)
    except OSError:
        if old is not None:
            (old / "checkpoint").rename(out)
        raise
    finally:
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)


def _check_disk(model: nn.Module | None, source: Checkpoint | None, out: Path) -> None:
    if source is not None:
        need = sum(f.stat().st_size for f in source.files)
    else:
        assert model is not None
        need = sum(p.numel() * p.element_size() for p in model.parameters())
    free = shutil.disk_usage(out.absolute().parent).free
    if need > free:
        raise CheckpointError(
            f"not enough disk for {out}: needs about {need / 2**30:.2f} GiB, "
            f"{free / 2**30:.2f} GiB are free"
        )


def _check_fused_pairs(model: nn.Module) -> None:
    """Layers that an engine fuses must be quantized alike."""
    quantized = {}
    for name, module in model.named_modules():
        quantizer = getattr(module, "weight_quantizer", None)
        if isinstance(quantizer, TensorQuantizer):
            quantized[name] = quantizer.is_enabled
    pair = split_pair(quantized)
    if pair is not None:
        raise CheckpointError(
            f"{pair[0]} is quantized and {pair[1]} is not, but engines fuse the two into one "
            "matrix; exclude both or neither"
        )


def _write_weights(
    model: nn.Module | None,
    folder: Path,
    source: Checkpoint | None,
    weights_quantized: bool,
    max_shard_size: str,
) -> None:
    if weights_quantized:
        assert model is not None
        _export_quantized_weights(model, folder, max_shard_size)
        return
    if source is not None and source.files:
        for file in source.files:
            shutil.copyfile(file, folder / file.name)
        index = source.folder / INDEX_FILE
        if index.is_file():
            shutil.copyfile(index, folder / INDEX_FILE)
        _copy_config(source, folder)
        return
    assert model is not None
    plain = {k: v for k, v in model.state_dict().items() if "_quantizer" not in k}
    config = model.config
    try:
        model.save_pretrained(  # type: ignore[operator]
            folder, state_dict=plain, max_shard_size=max_shard_size
        )
    except (RuntimeError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"transformers could not save {type(config).__name__}: {error}"
        ) from (error)


def _settle_weights(model: nn.Module) -> None:
    """Do to quantized weights what ModelOpt's exporter is going to do, so that it changes nothing.

    The reference logits, which are recorded next, then belong to the exported weights.
    """
    from modelopt.torch.export.layer_utils import sync_moe_gate_up_amax
    from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers
    from modelopt.torch.quantization.nn import QuantModule
    from modelopt.torch.quantization.utils import enable_weight_access_and_writeback

    # Layers that engines fuse get one range.
    requantize_resmooth_fused_llm_layers(model)
    sync_moe_gate_up_amax(model)
    # The exporter divides by an FP8 scale in the model's dtype: one rounding too many, which goes
    # the other way for some weights. Weights that are on the grid already it leaves alone.
    for module in model.modules():
        if not isinstance(module, QuantModule):
            continue
        with enable_weight_access_and_writeback(module, model), torch.no_grad():
            for weight, quantizer in module.iter_weights_for_calibration():
                if quantizer.is_enabled and quantizer.num_bits == _FP8_BITS:
                    weight.copy_(quantizer(weight))


def _export_quantized_weights(model: nn.Module, folder: Path, max_shard_size: str) -> None:
    """ModelOpt's exporter; it drops every quantizer's own state, the attention's included."""
    from modelopt.torch.export import export_hf_checkpoint

    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if all(p.device.type == "cuda" for p in model.parameters()):
        # The exporter divides ranges by Python numbers, which torch on CUDA rounds differently:
        # the scales would be one rounding off those that the recorded logits belong to.
        model.to("cpu")
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        export_hf_checkpoint(model, dtype=dtype, export_dir=folder, max_shard_size=max_shard_size)


def _copy_config(source: Checkpoint, folder: Path) -> None:
    """The source's config, without a quantization_config that its tensors disprove."""
    original = source.folder / "config.json"
    data = json.loads(original.read_text(encoding="utf-8"))
    declared = "quantization_config" in data or any(
        isinstance(v, dict) and "quantization_config" in v for v in data.values()
    )
    if not declared or source.quant_method is not None:
        shutil.copyfile(original, folder / "config.json")
        return
    data.pop("quantization_config", None)
    for value in data.values():
        if isinstance(value, dict):
            value.pop("quantization_config", None)
    write_json(folder / "config.json", data)


def _copy_sidecars(source: Checkpoint, folder: Path) -> None:
    """Everything beside the weights: tokenizer, chat template, remote code, licence."""
    for path in sorted(source.folder.rglob("*")):
        relative = path.relative_to(source.folder)
        target = folder / relative
        if (
            not path.is_file()
            or target.exists()
            or any(part.startswith(".") for part in relative.parts)
            or relative.parts[0] == SIDE_FOLDER
            or path.suffix in _WEIGHT_SUFFIXES
            or path.name.endswith(_INDEX_SUFFIX)
            or relative.name == SETTINGS_FILE
            or (relative.name == MODELOPT_FILE and source.quant_method != "modelopt")
        ):
            continue
        if relative == Path(CARD_FILE):
            target = folder / "README.source.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _write_card(folder: Path, settings: Settings) -> None:
    """A model card: what was quantized, from what, and how to use it."""
    from huggingface_hub import ModelCard, ModelCardData

    attention = settings.recipe.attention
    formats = {letter: getattr(attention, letter) for letter in ("q", "k", "p", "v")}
    data = ModelCardData(
        base_model=settings.model.source if settings.model.source.count("/") == 1 else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["mla", "mla_quant", "modelopt", *sorted(set(formats.values()) - {"none"})],
    )
    rows = "\n".join(f"| {letter.upper()} | {fmt} |" for letter, fmt in formats.items())
    sparsity = attention.sparsity
    scores = f"{sparsity.n}:{sparsity.m} sparse scores. " if sparsity else ""
    name = Path(settings.model.source).name
    text = f"""---
{data.to_yaml()}
---

# {name} with quantized attention

Calibrated by mla_quant {settings.producer.version} with recipe `{settings.recipe.name}`:
{settings.recipe.description}

| attention operand | format |
|---|---|
{rows}

Linear layers: {settings.recipe.weights}. {scores}Formats and ranges of every layer are in
`{SETTINGS_FILE}`; statistics, reference logits and file hashes in `{SIDE_FOLDER}/`.

The weights load in transformers and vLLM as usual, with unquantized attention. With it:

```python
from mla_quant import load_quantized

model, settings = load_quantized("path/of/this/folder")
```

Check the files with `mla-quant verify path/of/this/folder`.
"""
    ModelCard(text).save(folder / CARD_FILE)


# -- reference logits -----------------------------------------------------------------------------


def _recorded_forms(model: nn.Module) -> list[str]:
    layers = quant_mla_layers(model).values()
    return [f for f in ("projected", "absorbed") if any(m.active_operands(f) for m in layers)]


@torch.inference_mode()
def reference_logits(model: nn.Module, samples: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Logits of the last positions of short sequences, by form.

    Returns:
        "projected" and "absorbed" (those that are quantized) and "unquantized" (attention only:
        linear layers stay as they are, which is all that a reloaded model can do):
        fp32 [sequences, positions, vocabulary].
    """
    device = input_device(model)

    def run() -> Any:
        rows = []
        for sample in samples:
            ids = torch.tensor([list(sample)], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[0]
            positions = reference_positions(samples, logits.shape[-1])
            rows.append(logits[-positions:].float().cpu().numpy())
        return np.stack(rows)

    result = {}
    for form in _recorded_forms(model):
        with use_form(model, form):  # type: ignore[arg-type]
            result[form] = run()
    with only_operands(model, lambda layer, operand: False):
        result["unquantized"] = run()
    return result


def reference_positions(samples: Sequence[Sequence[int]], vocabulary: int) -> int:
    """How many of the last positions of each sample are recorded."""
    affordable = max(1, REFERENCE_LOGITS // (len(samples) * vocabulary))
    return min(REFERENCE_POSITIONS, affordable, *(len(sample) for sample in samples))


def choose_reference_samples(samples: Sequence[Sequence[int]]) -> list[list[int]]:
    """Beginnings of the first samples that are long enough."""
    usable = [s for s in samples if len(s) >= REFERENCE_TOKENS] or list(samples)
    return [list(s[:REFERENCE_TOKENS]) for s in usable[:REFERENCE_SEQUENCES]]


def _write_reference(
    logits: Mapping[str, Any], samples: Sequence[Sequence[int]], path: Path
) -> None:
    tokens = {f"tokens_{i}": np.asarray(list(s), dtype=np.int64) for i, s in enumerate(samples)}
    arrays: dict[str, Any] = tokens | dict(logits)
    np.savez_compressed(path, **arrays)


# -- verifying ------------------------------------------------------------------------------------


def hash_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file but the manifest itself, by relative name."""
    result = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name == MANIFEST_FILE:
            continue
        with path.open("rb") as file:
            digest = (
                hashlib.file_digest(file, "sha256")
                if hasattr(hashlib, "file_digest")
                else (_sha256(file))
            )
        result[name] = {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
    return result


def _sha256(file: Any) -> Any:
    """`hashlib.file_digest` of Python 3.11."""
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest


def check_claims(folder: Path) -> list[str]:
    """What a checkpoint's tensors and its quantization config say about each other.

    Returns:
        Contradictions, in words; empty if there are none.
    """
    _, tensors = check_files(folder)
    problems = []
    for name in tensors:
        if "_quantizer" in name or name.endswith("._amax"):
            problems.append(f"{name} is a quantizer's internal state")
        elif name.endswith(_CACHE_SCALES):
            problems.append(f"{name} is a KV-cache scale, but no cache is quantized")
        else:
            suffix = next((s for s in _SCALE_SUFFIXES if name.endswith(s)), None)
            if suffix is None:
                continue
            stem = name.removesuffix(suffix)
            if f"{stem}.weight" not in tensors and stem not in tensors:
                problems.append(f"{name} scales no tensor of the checkpoint")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        declared = dict(config.get("quantization_config") or {})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return [*problems, f"config.json is missing or damaged: {error}"]
    low = [n for n, (d, _) in tensors.items() if d in _LOW_PRECISION and n.endswith(".weight")]
    method = declared.get("quant_method")
    if method and not low:
        problems.append(f"config.json declares quantization {method!r}, but no weight is quantized")
    if low and not method:
        problems.append(f"{low[0]} is quantized, but config.json does not say how")
    for name in low:
        scales = (f"{name}_scale", f"{name}_scale_inv")
        if not any(s in tensors for s in scales):
            problems.append(f"{name} is quantized, but has no scale")
    problems += _check_modelopt_file(folder, declared, method)
    return problems


def _check_modelopt_file(folder: Path, declared: Mapping[str, Any], method: Any) -> list[str]:
    path = folder / MODELOPT_FILE
    if not path.is_file():
        return []
    try:
        inner = json.loads(path.read_text(encoding="utf-8"))["quantization"]
        algorithm, cache = inner["quant_algo"], inner.get("kv_cache_quant_algo")
    except (ValueError, KeyError, TypeError) as error:
        return [f"{MODELOPT_FILE} is damaged: {error!r}"]
    problems = []
    if method != "modelopt" or declared.get("quant_algo") != algorithm:
        problems.append(
            f"{MODELOPT_FILE} says {algorithm!r}, config.json {declared.get('quant_algo')!r} "
            f"({method!r})"
        )
    if cache is not None:
        problems.append(f"{MODELOPT_FILE} advertises a {cache} KV cache, but none is quantized")
    return problems


@dataclass(frozen=True)
class Check:
    """One line of `verify`'s table."""

    name: str
    passed: bool
    detail: str


def verify_checkpoint(
    folder: str | Path,
    *,
    device: str = "cpu",
    logits: bool = True,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> list[Check]:
    """Check an export: hashes, tensors, settings, and logits against those recorded.

    A failed check never stops the later ones unless they need what failed.

    Args:
        folder: The export.
        device: Where to run the model.
        logits: Whether to run it at all.
        trust_remote_code: As in transformers.
        progress: Told what is being checked.

    Returns:
        All checks that could be made.
    """
    path = Path(folder)
    checks: list[Check] = []
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {str(folder)!r} is not a folder")

    def attempt(name: str, run: Callable[[], str]) -> bool:
        if progress is not None:
            progress(name)
        try:
            detail = run()
        except MlaQuantError as error:
            checks.append(Check(name, False, str(error)))
            return False
        checks.append(Check(name, True, detail))
        return True

    settings_ok = attempt("settings", lambda: _verify_settings(path))
    attempt("file hashes", lambda: _verify_hashes(path))
    tensors_ok = attempt("tensors and claims", lambda: _verify_claims(path))
    if logits and settings_ok and tensors_ok:
        attempt("logits", lambda: _verify_logits(path, device, trust_remote_code))
    elif logits:
        checks.append(Check("logits", False, "not run: an earlier check failed"))
    return checks


def _verify_settings(path: Path) -> str:
    settings = read_settings(path)
    return (
        f"schema {settings.schema_version}, recipe {settings.recipe.name}, "
        f"{len(settings.layers)} layers"
    )


def _verify_hashes(path: Path) -> str:
    manifest = path / MANIFEST_FILE
    try:
        recorded = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        recorded = {str(k): str(v["sha256"]) for k, v in recorded.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{manifest} is missing or damaged: {error!r}") from error
    found = {name: entry["sha256"] for name, entry in hash_files(path).items()}
    missing = sorted(set(recorded) - set(found))
    extra = sorted(set(found) - set(recorded))
    changed = sorted(n for n in recorded if n in found and recorded[n] != found[n])
    faults = [
        f"{kind}: {', '.join(names[:4])}"
        for kind, names in (("missing", missing), ("changed", changed), ("not written", extra))
        if names
    ]
    if faults:
        raise CheckpointError("; ".join(faults))
    return f"{len(found)} files"


def _verify_claims(path: Path) -> str:
    problems = check_claims(path)
    if problems:
        raise CheckpointError("; ".join(problems[:6]))
    _, tensors = check_files(path)
    return f"{len(tensors)} tensors, no orphan scale, no claim without tensors"


def _verify_logits(path: Path, device: str, trust_remote_code: bool) -> str:
    recorded_path = path / REFERENCE_FILE
    try:
        with np.load(recorded_path, allow_pickle=False) as archive:
            recorded = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{recorded_path} is missing or damaged: {error}") from error
    samples = [recorded[name].tolist() for name in sorted(recorded) if name.startswith("tokens_")]
    forms = [name for name in recorded if not name.startswith("tokens_") and name != "unquantized"]
    if not samples or not forms or "unquantized" not in recorded:
        raise CheckpointError(f"{recorded_path} lacks tokens or logits")
    model, _ = load_quantized(path, device=device, trust_remote_code=trust_remote_code)
    now = reference_logits(model, samples)
    details: list[str] = []
    faults: list[str] = []
    for form in forms:
        if form not in now:
            faults.append(f"{form}: recorded, but its operands are not quantized now")
            continue
        detail, ok = compare_logits(recorded[form], now[form], recorded["unquantized"])
        (details if ok else faults).append(f"{form}: {detail}")
    if faults:
        raise CheckpointError("; ".join(faults))
    return "; ".join(details)


def compare_logits(recorded: Any, now: Any, recorded_plain: Any) -> tuple[str, bool]:
    """Whether logits are those recorded, up to the rounding of another device or version.

    Equal bits pass, and are what the same device and versions give. Elsewhere sums round
    differently, which flips some values that lie near a tie of quantization; a flip is as large
    as a quantization error, but few values flip. So the KL divergence of the present logits from
    the recorded ones is held against that between recorded and unquantized logits: whatever
    applies other formats or ranges lies about as far from the recorded logits as those do, or
    farther (two independent errors add), and passing means being nearer than half way.

    Args:
        recorded: Logits [sequences, positions, vocabulary] at export, quantized.
        now: The same, computed now.
        recorded_plain: At export, unquantized.

    Returns:
        The finding in words, and whether it passes.
    """
    if recorded.shape != now.shape:
        return f"shape {now.shape} instead of {recorded.shape}", False
    if np.array_equal(recorded, now):
        return "bit-identical", True
    drift, effect = _mean_kl(recorded, now), _mean_kl(recorded, recorded_plain)
    text = (
        f"KL {drift:.3g} nats from the recorded logits; quantization itself moves them {effect:.3g}"
    )
    return text, bool(drift <= effect / 2)


def _mean_kl(p: Any, q: Any) -> float:
    log_p, log_q = (
        torch.log_softmax(torch.from_numpy(np.asarray(x)).double(), dim=-1) for x in (p, q)
    )
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
