"""Finding, checking and loading models.

Everything that can be wrong is looked at before weights are read: transformers fills weights that
a damaged checkpoint lacks with random numbers, which then calibrate without complaint.
"""

from __future__ import annotations

import copy
import difflib
import json
import logging
import os
import pickle
import struct
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError
from torch import nn

from mla_quant.data import transport_errors
from mla_quant.errors import CheckpointError, ConfigError, UnsupportedModelError
from mla_quant.families import check_config, find_mla_layers

logger = logging.getLogger("mla_quant")

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own limit."""
_ACTIVATION_SHARE = 1.25
"""Memory beside the weights that a calibration batch is expected to need, as a factor."""


@dataclass
class Checkpoint:
    """A model folder whose files are consistent.

    Attributes:
        folder: Where it is.
        source: What the user called it.
        config: Its transformers config.
        tensors: dtype and shape of every tensor by name, from the file headers.
        files: Weight files, in order.
        notes: What was found and put right, for the report.
    """

    folder: Path
    source: str
    config: Any
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    files: list[Path]
    notes: list[str] = field(default_factory=list)

    @property
    def quant_method(self) -> str | None:
        """Quantization method that the config declares (and the tensors bear out)."""
        declared = getattr(self.config, "quantization_config", None)
        if declared is None:
            return None
        if not isinstance(declared, dict):
            declared = declared.to_dict()
        method = declared.get("quant_method")
        return str(method) if method is not None else None


def resolve_model(source: str) -> Path:
    """The local folder of a model.

    Args:
        source: A folder, or the id of a model on the Hugging Face Hub.

    Raises:
        CheckpointError: Neither exists or can be reached; each cause has its own message.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"model {source!r} is a file; give the folder that holds config.json")
    if (
        source.startswith((".", "/", "~"))
        or source.count("/") > 1
        or (path.parent.is_dir() and path.parent != Path("."))
    ):
        names = [p.name for p in path.parent.glob("*")] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, names, n=1)
        hint = f"; did you mean {path.parent / close[0]}?" if close else ""
        raise CheckpointError(f"model folder {source!r} does not exist{hint}")
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(source, ignore_patterns=["*.gguf", "*.onnx", "original/*"]))
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"model {source!r} is gated: log in with `hf auth login` and accept its terms on its "
            "page, then run again"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"model {source!r} is neither a local folder nor cached, and the hub cannot be reached "
            "(offline); check the spelling, or download it first"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise CheckpointError(
            f"model {source!r} is neither a local folder nor a model on the hub; check the "
            "spelling, or log in if it is private"
        ) from error
    except Exception as error:
        if not isinstance(error, (OSError, *transport_errors())):
            raise
        raise CheckpointError(f"model {source!r} could not be downloaded: {error}") from error


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of every tensor in a safetensors file.

    Raises:
        CheckpointError: The file is missing, truncated or not a safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path} is truncated: {size} bytes, not even a header")
            length = struct.unpack("<Q", prefix)[0]
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{path} is truncated or not a safetensors file: its header claims {length} "
                    f"bytes, the file has {size}"
                )
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise CheckpointError(f"weight file {path} is missing; download it again") from error
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
    tensors, end = {}, 0
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            tensors[str(name)] = (str(entry["dtype"]), tuple(int(n) for n in entry["shape"]))
            end = max(end, int(entry["data_offsets"][1]))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged header: {error!r}; download it again") from error
    if end != size - 8 - length:
        raise CheckpointError(
            f"{path} is truncated or damaged: its tensors need {8 + length + end} bytes, the file "
            f"has {size}; download it again"
        )
    return tensors


def _listed_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Weight files in order, and the file of each tensor if an index says."""
    index_path = folder / INDEX_FILE
    if not index_path.is_file():
        files = sorted(folder.glob("*.safetensors"))
        single = folder / SINGLE_FILE
        return ([single] if single in files else files), {}
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        mapping = {str(k): str(v) for k, v in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index_path} is damaged: {error!r}; download it again") from error
    outside = sorted({f for f in mapping.values() if Path(f).name != f})
    if outside:
        raise CheckpointError(
            f"{index_path} names files outside its folder: {outside[0]!r}; file names must be plain"
        )
    return [folder / name for name in sorted(set(mapping.values()))], mapping


def check_files(folder: Path) -> tuple[list[Path], dict[str, tuple[str, tuple[int, ...]]]]:
    """Check a folder's weight files against each other.

    Returns:
        The files in order, and dtype and shape of every tensor; both empty for a checkpoint with
        pickled weights only, which transformers reads with `weights_only`.

    Raises:
        CheckpointError: Shards missing, truncated, unlisted or disagreeing with the index.
    """
    files, mapping = _listed_files(folder)
    if not files:
        if any(p for pattern in _PICKLED for p in folder.glob(pattern)):
            return [], {}
        raise CheckpointError(
            f"{folder} has no weights: no {SINGLE_FILE}, no {INDEX_FILE}, no *.safetensors"
        )
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        lost = [k for k, v in mapping.items() if v in missing]
        raise CheckpointError(
            f"{folder}: missing weight files {', '.join(missing)}, with {len(lost)} tensors "
            f"({', '.join(lost[:3])} ...); download them again"
        )
    headers = {f.name: read_header(f) for f in files}
    listed = {f.name for f in files}
    extra = [p.name for p in sorted(folder.glob("model*.safetensors")) if p.name not in listed]
    if extra:
        raise CheckpointError(
            f"{folder}: weight files {', '.join(extra)} are not listed in {INDEX_FILE}; an "
            "engine may read them all: remove the stale ones"
        )
    if mapping:
        absent = [k for k, v in mapping.items() if k not in headers[v]]
        if absent:
            raise CheckpointError(
                f"{folder}: {INDEX_FILE} lists {len(absent)} tensors that their files lack: "
                f"{', '.join(f'{k} in {mapping[k]}' for k in absent[:3])}"
            )
        ghosts = [k for h in headers.values() for k in h if k not in mapping]
        if ghosts:
            raise CheckpointError(
                f"{folder}: weight files hold {len(ghosts)} tensors that {INDEX_FILE} does not "
                f"list: {', '.join(ghosts[:3])}; files of another checkpoint may be mixed in"
            )
    tensors = {name: entry for header in headers.values() for name, entry in header.items()}
    return files, tensors


def open_checkpoint(source: str, *, trust_remote_code: bool = False) -> Checkpoint:
    """Find a model, read its config and check its files; no weights are read.

    Raises:
        CheckpointError: Files are missing or damaged.
        ConfigError: The config is not valid.
        UnsupportedModelError: The family is refused.
    """
    folder = resolve_model(source)
    config = load_config(folder, trust_remote_code=trust_remote_code)
    check_config(config)
    files, tensors = check_files(folder)
    checkpoint = Checkpoint(folder, source, config, tensors, files)
    _settle_quantization(checkpoint)
    return checkpoint


def load_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """A folder's transformers config.

    Raises:
        ConfigError: Missing, not JSON, or of an unknown model type.
    """
    from transformers import AutoConfig

    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError(f"expected an object, found {type(raw).__name__}")
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} has no config.json: it is not a model folder") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from error
    check_config(_Raw(raw))
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        # transformers raises whatever a config class happens to raise on a bad field.
        raise ConfigError(
            f"{path} (model_type {raw.get('model_type')!r}) is not accepted by the installed "
            f"transformers: {type(error).__name__}: {error}"
        ) from error


class _Raw:
    """The raw JSON of a config, with the attribute access of a config."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.__dict__.update(data)

    def get_text_config(self) -> _Raw:
        inner = self.__dict__.get("text_config")
        return _Raw(inner) if isinstance(inner, dict) else self


def _settle_quantization(checkpoint: Checkpoint) -> None:
    """Drop a quantization_config that the tensors disprove; refuse methods we cannot read."""
    config, tensors = checkpoint.config, checkpoint.tensors
    method = checkpoint.quant_method
    if method is None or not tensors:
        return
    low = [n for n, (dtype, _) in tensors.items() if dtype in ("F8_E4M3", "I8", "U8", "I32")]
    if not low:
        checkpoint.notes.append(
            f"config.json declares quantization {method!r}, but every tensor is stored in full "
            "precision: the declaration was dropped"
        )
        logger.warning(checkpoint.notes[-1])
        del config.quantization_config
        return
    if method == "fp8":
        unscaled = [
            n for n in low if tensors[n][0] == "F8_E4M3" and f"{n}_scale_inv" not in tensors
        ]
        if unscaled:
            raise CheckpointError(
                f"{checkpoint.folder}: {len(unscaled)} FP8 tensors have no *_scale_inv: "
                f"{', '.join(unscaled[:3])}"
            )
    elif method != "modelopt":
        raise UnsupportedModelError(
            f"{checkpoint.source}: weights are quantized with {method!r}; mla_quant reads "
            "full-precision, block-FP8 and its own ModelOpt checkpoints. Convert it to bfloat16"
        )


def parse_dtype(name: str) -> torch.dtype | str:
    """A dtype argument: "auto" (as stored) or a name.

    Raises:
        ConfigError: An unknown name.
    """
    if name == "auto":
        return name
    if name not in _DTYPES:
        raise ConfigError(f"dtype must be auto, {', '.join(_DTYPES)}; got {name!r}")
    return _DTYPES[name]


def parse_device(name: str) -> str:
    """A device argument: "auto", "cpu", "cuda", "cuda:N" or "balanced" (several GPUs and CPU).

    Raises:
        ConfigError: Unknown, or a GPU that is not there.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name in ("cpu", "balanced"):
        return name
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type != "cuda":
        raise ConfigError(f"device must be auto, cpu, cuda, cuda:N or balanced; got {name!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ConfigError(f"device {name!r} does not exist: {count} CUDA devices are visible")
    return name


def estimate_bytes(checkpoint: Checkpoint, dtype: torch.dtype | str) -> int:
    """Memory that the loaded weights take, in bytes: tensors at their dtype once loaded."""
    if not checkpoint.tensors:  # pickled weights, whose size on disk has to do
        pickled = {p for pattern in _PICKLED for p in checkpoint.folder.glob(pattern)}
        return sum(p.stat().st_size for p in pickled)
    sizes = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1}
    total = 0
    for name, (stored, shape) in checkpoint.tensors.items():
        if name.endswith(("_scale_inv", "_scale", "_scale_2")):
            continue
        count = 1
        for n in shape:
            count *= n
        # FP8 and packed weights load as bfloat16.
        auto = sizes.get(stored, 2)
        total += count * (dtype.itemsize if isinstance(dtype, torch.dtype) else auto)
    return total


def available_bytes(device: str) -> int:
    """Free memory of a device, in bytes."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    free = 0
    if device == "balanced" and torch.cuda.is_available():
        free = sum(int(torch.cuda.mem_get_info(i)[0]) for i in range(torch.cuda.device_count()))
    return free + int(psutil.virtual_memory().available)


def check_memory(checkpoint: Checkpoint, dtype: torch.dtype | str, device: str) -> str:
    """Estimate before loading.

    Returns:
        The estimate in words.

    Raises:
        CheckpointError: The weights alone do not fit.
    """
    need = estimate_bytes(checkpoint, dtype)
    free = available_bytes(device)
    text = f"weights {need / 2**30:.2f} GiB, free on {device} {free / 2**30:.2f} GiB"
    if need > free:
        raise CheckpointError(
            f"{checkpoint.source} does not fit: {text}. Use --device balanced to spread it over "
            "all GPUs and CPU memory, or a machine with more memory"
        )
    if need * _ACTIVATION_SHARE > free:
        logger.warning("memory is tight: %s; the batch is halved if it runs out", text)
    return text


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """A model's tokenizer.

    Raises:
        CheckpointError: It has none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        # transformers raises OSError, ValueError or whatever the tokenizer's own files cause.
        raise CheckpointError(
            f"no usable tokenizer in {folder}: {type(error).__name__}: {error}"
        ) from error


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype | str = "auto",
    device: str = "cpu",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    state_dict: dict[str, torch.Tensor] | None = None,
) -> nn.Module:
    """Load a checked checkpoint for inference.

    Args:
        checkpoint: From `open_checkpoint`.
        dtype: torch dtype, or "auto".
        device: "cpu", "cuda", "cuda:N" or "balanced".
        attn_implementation: As in transformers.
        trust_remote_code: As in transformers.
        state_dict: Weights to use instead of the files'.

    Returns:
        The model, in evaluation mode.

    Raises:
        CheckpointError: Weights are missing or left over.
        UnsupportedModelError: There is no dense MLA layer.
    """
    arguments: dict[str, Any] = {
        "config": checkpoint.config,
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "output_loading_info": True,
        # Reported below, with their names, instead of by transformers, without.
        "ignore_mismatched_sizes": True,
    }
    if attn_implementation is not None:
        arguments["attn_implementation"] = attn_implementation
    if device == "balanced":
        arguments["device_map"] = "auto"
    elif device != "cpu":
        arguments["device_map"] = {"": device}
    if checkpoint.quant_method == "fp8":
        from transformers import FineGrainedFP8Config

        declared = checkpoint.config.quantization_config
        block = (declared if isinstance(declared, dict) else declared.to_dict()).get(
            "weight_block_size", (128, 128)
        )
        arguments["quantization_config"] = FineGrainedFP8Config(
            weight_block_size=tuple(block), dequantize=True
        )
    loader = _auto_class(checkpoint.config)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            if state_dict is None:
                model, info = loader.from_pretrained(checkpoint.folder, **arguments)
            else:
                # The auto classes insist on a folder, the classes behind them on having none.
                model, info = _model_class(checkpoint, loader).from_pretrained(
                    None, state_dict=state_dict, **arguments
                )
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{checkpoint.folder}: pickled weights are damaged, or hold more than tensors and "
            "would run code when loaded; convert them to safetensors"
        ) from error
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise CheckpointError(
            f"transformers cannot load {checkpoint.folder}: {type(error).__name__}: {error}"
        ) from error
    missing = sorted(info.get("missing_keys", []))
    if missing:
        raise CheckpointError(
            f"{checkpoint.folder} lacks {len(missing)} weights of the model, which would be "
            f"random: {', '.join(missing[:4])}"
        )
    mismatched = sorted(
        f"{name} {tuple(stored)} instead of {tuple(expected)}"
        for name, stored, expected in info.get("mismatched_keys", [])
    )
    if mismatched:
        raise CheckpointError(
            f"{checkpoint.folder}: {len(mismatched)} weights do not have the shape that "
            f"config.json implies: {', '.join(mismatched[:4])}"
        )
    unexpected = sorted(info.get("unexpected_keys", []))
    if unexpected:
        checkpoint.notes.append(
            f"{len(unexpected)} tensors of the checkpoint are not part of the model and were not "
            f"loaded (draft layers, for example): {', '.join(unexpected[:3])}"
        )
        logger.info(checkpoint.notes[-1])
    find_mla_layers(model).require()
    model.eval()
    return model  # type: ignore[no-any-return]


def _auto_class(config: Any) -> Any:
    """transformers' auto class for a config: causal, or multimodal around a causal model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    mapped = type(config) in AutoModelForCausalLM._model_mapping
    remote = getattr(config, "auto_map", None)
    return AutoModelForCausalLM if mapped or remote else AutoModelForImageTextToText


def _model_class(checkpoint: Checkpoint, loader: Any) -> Any:
    """The class that an auto class would choose."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto.auto_factory import _get_model_class

    remote = (getattr(checkpoint.config, "auto_map", None) or {}).get(loader.__name__)
    if remote is not None and type(checkpoint.config) not in loader._model_mapping:
        return get_class_from_dynamic_module(remote, str(checkpoint.folder))
    return _get_model_class(checkpoint.config, loader._model_mapping)


def meta_model(
    config: Any, *, attn_implementation: str | None = None, trust_remote_code: bool = False
) -> nn.Module:
    """The model's structure without weights, to plan with.

    Raises:
        ConfigError: The config does not build, or not with that attention implementation.
    """
    loader = _auto_class(config)
    arguments: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if attn_implementation is not None:
        # from_config would write the choice into the caller's config.
        config = copy.deepcopy(config)
        arguments["attn_implementation"] = attn_implementation
    try:
        with torch.device("meta"):
            model: nn.Module = loader.from_config(config, **arguments)
    except Exception as error:
        # Model code raises whatever a bad width or None makes it raise.
        chosen = f" with attention {attn_implementation!r}" if attn_implementation else ""
        raise ConfigError(
            f"config.json does not describe a model that can be built{chosen}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return model


def environment() -> dict[str, str]:
    """Versions that a report names."""
    import modelopt
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "modelopt": modelopt.__version__,
        "device": device,
        "cpu_threads": str(os.cpu_count()),
    }
