"""Finding the MLA layers of a model, and saying why others are left alone.

Discovery is by structure, not by class name: an MLA attention owns the down-projection of the
latent, its norm and its up-projection. That finds every family that transformers ships as well
as remote code that follows DeepSeek's naming.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from mla_quant.errors import ConfigError, UnsupportedModelError

_MLA_CHILDREN = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
_SPARSE_MARKS = ("indexer", "skip_topk")
"""Attributes of attention that reads only selected keys (DeepSeek-V3.2 and its kin)."""

_REFUSED_TYPES = {
    "deepseek_v32": "sparse attention (an indexer selects keys)",
    "deepseek_v4": "compressed sparse attention",
    "glm_moe_dsa": "sparse attention (an indexer selects keys)",
    "axk2": "sparse attention (an indexer selects keys)",
    "glm5_next": "sparse attention (an indexer selects keys)",
    "hy_v4": "sparse attention (an indexer selects keys)",
}
"""Model types that are refused before weights are read."""

_NEEDS_Q_LORA = ("longcat_flash",)
"""Model types whose code always projects queries through a low-rank factor."""

_WITHOUT_ROTARY = ("kimi_linear",)
"""Model types whose code works without a rope part."""

_BYTES_PER_VALUE = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class Geometry:
    """Widths of an MLA layer, in values.

    Attributes:
        num_heads: Query heads.
        q_lora_rank: Width of the query latent, None where queries are projected directly.
        kv_lora_rank: Width of the key/value latent.
        qk_nope_head_dim: Part of a query or key head without rotary embedding.
        qk_rope_head_dim: Part with it; shared by all heads of the key. May be 0.
        v_head_dim: Value head.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Values a token adds to the cache of one layer: latent and rope part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_segments(self) -> tuple[int, ...]:
        """Parts of a projected query or key that blocks never straddle."""
        return tuple(w for w in (self.qk_nope_head_dim, self.qk_rope_head_dim) if w)

    def as_dict(self) -> dict[str, int | None]:
        """Fields by name."""
        return asdict(self)

    @classmethod
    def of_module(cls, module: nn.Module) -> Geometry:
        """Read the widths off an attention module."""
        values: Any = module
        kv_lora_rank = int(values.kv_lora_rank)
        # Grouped or sharded variants may rename the head count: derive it from the weight.
        rows = int(values.kv_b_proj.weight.shape[0])
        per_head = int(values.qk_nope_head_dim) + int(values.v_head_dim)
        if rows % per_head:
            raise ConfigError(
                f"kv_b_proj has {rows} rows, not a multiple of qk_nope_head_dim + v_head_dim = "
                f"{per_head}: the checkpoint's weights do not fit its config"
            )
        q_lora_rank = getattr(module, "q_lora_rank", None)
        return cls(
            num_heads=rows // per_head,
            q_lora_rank=None if q_lora_rank is None else int(q_lora_rank),
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=int(values.qk_nope_head_dim),
            qk_rope_head_dim=int(values.qk_rope_head_dim),
            v_head_dim=int(values.v_head_dim),
        )

    def cache_bytes_per_token(self) -> dict[str, int]:
        """Cache of one token in one layer, in bytes.

        Keys name what is stored: the latent with its rope part in some dtype, or expanded keys
        and values as transformers up to 5.14 caches them.
        """
        expanded = self.num_heads * (self.qk_head_dim + self.v_head_dim)
        return {
            "latent_bfloat16": self.latent_width * _BYTES_PER_VALUE["bfloat16"],
            "latent_float8_e4m3fn": self.latent_width * _BYTES_PER_VALUE["float8_e4m3fn"],
            "expanded_bfloat16": expanded * _BYTES_PER_VALUE["bfloat16"],
        }


@dataclass(frozen=True)
class MLALayer:
    """One MLA attention module of a model."""

    name: str
    module: nn.Module
    geometry: Geometry


@dataclass(frozen=True)
class SkippedLayer:
    """An attention module that is not quantized, and why."""

    name: str
    class_name: str
    reason: str


@dataclass(frozen=True)
class Discovery:
    """What `find_mla_layers` found."""

    layers: tuple[MLALayer, ...]
    skipped: tuple[SkippedLayer, ...]
    sparse: tuple[SkippedLayer, ...]

    def require(self) -> tuple[MLALayer, ...]:
        """The MLA layers.

        Raises:
            UnsupportedModelError: There is none, or some are sparse.
        """
        if self.sparse:
            names = ", ".join(f"{s.name} ({s.class_name})" for s in self.sparse[:3])
            more = f" and {len(self.sparse) - 3} more" if len(self.sparse) > 3 else ""
            raise UnsupportedModelError(
                f"the model has sparse MLA layers: {names}{more}; {self.sparse[0].reason}. "
                "mla_quant quantizes dense MLA attention only; no data was run and nothing written"
            )
        if not self.layers:
            seen = ", ".join(f"{s.name}: {s.reason}" for s in self.skipped[:5]) or "none"
            raise UnsupportedModelError(
                "the model has no MLA layer (a module with "
                f"{', '.join(_MLA_CHILDREN)}); attention modules seen: {seen}"
            )
        return self.layers


def is_mla(module: nn.Module) -> bool:
    """Whether a module is an MLA attention, dense or sparse."""
    has_latent = all(isinstance(getattr(module, c, None), nn.Module) for c in _MLA_CHILDREN)
    has_query = any(
        isinstance(getattr(module, c, None), nn.Module) for c in ("q_proj", "q_a_proj", "q_b_proj")
    )
    return has_latent and has_query and hasattr(module, "kv_lora_rank")


def is_sparse(module: nn.Module) -> bool:
    """Whether an MLA attention reads only keys that an indexer selects."""
    return any(hasattr(module, mark) for mark in _SPARSE_MARKS)


def _attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        class_name = type(module).__name__
        looks_like_attention = class_name.endswith(("Attention", "MLA")) or all(
            hasattr(module, child) for child in ("q_proj", "k_proj", "v_proj")
        )
        if is_mla(module) or looks_like_attention:
            yield name, module


def find_mla_layers(model: nn.Module) -> Discovery:
    """Find the MLA attention modules of a model, in module order.

    Args:
        model: Any model, on any device including meta.

    Returns:
        Dense MLA layers, other attention modules with the reason why they are skipped, and sparse
        MLA layers, which callers refuse.
    """
    layers, skipped, sparse = [], [], []
    for name, module in _attention_modules(model):
        class_name = type(module).__name__
        if not is_mla(module):
            missing = [c for c in _MLA_CHILDREN if not hasattr(module, c)]
            reason = f"not MLA: no {', '.join(missing)}" if missing else "not MLA: no query latent"
            skipped.append(SkippedLayer(name, class_name, reason))
        elif is_sparse(module):
            sparse.append(
                SkippedLayer(name, class_name, "sparse attention: an indexer selects its keys")
            )
        else:
            layers.append(MLALayer(name, module, Geometry.of_module(module)))
    return Discovery(tuple(layers), tuple(skipped), tuple(sparse))


def layer_index(name: str) -> int:
    """Position of a layer: the last number in its module name that is not a submodule's.

    LongCat has two attentions a layer ("layers.3.self_attn.1"): they get 6 and 7.
    """
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if not numbers:
        return 0
    return numbers[0] if len(numbers) == 1 else numbers[0] * 2 + numbers[1]


def text_config(config: Any) -> Any:
    """The language model's config of a nested (multimodal) one."""
    getter = getattr(config, "get_text_config", None)
    return getter() if callable(getter) else config


def check_config(config: Any) -> None:
    """Refuse a transformers config that cannot work, before anything is loaded.

    Raises:
        UnsupportedModelError: A sparse family.
        ConfigError: A field without which the family's code fails, or an impossible width.
    """
    inner = text_config(config)
    for candidate in {getattr(config, "model_type", ""), getattr(inner, "model_type", "")}:
        for refused, reason in _REFUSED_TYPES.items():
            if candidate == refused or candidate.startswith(f"{refused}_"):
                raise UnsupportedModelError(
                    f"model type {candidate!r} is not supported: {reason}. mla_quant quantizes "
                    "dense MLA attention only; nothing was read or written"
                )
    if (
        getattr(inner, "model_type", "") in _NEEDS_Q_LORA
        and getattr(inner, "q_lora_rank", None) is None
    ):
        raise ConfigError(
            f"config field q_lora_rank is None, but {inner.model_type} always projects queries "
            "through a low-rank factor; set q_lora_rank to the width of q_a_proj's output"
        )
    for field in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "num_attention_heads"):
        value = getattr(inner, field, None)
        if value is not None and (not isinstance(value, int) or value <= 0):
            raise ConfigError(f"config field {field} must be a positive integer, found {value!r}")
    rope = getattr(inner, "qk_rope_head_dim", None)
    if rope == 0 and getattr(inner, "model_type", "") not in _WITHOUT_ROTARY:
        raise ConfigError(
            f"config field qk_rope_head_dim is 0, but the code of {inner.model_type} rotates a "
            "part of every key; give the even width of that part"
        )
    if rope is not None and (not isinstance(rope, int) or rope < 0 or rope % 2):
        raise ConfigError(
            f"config field qk_rope_head_dim must be an even integer, 0 or more, found {rope!r}"
        )


def describe(discovery: Discovery, model_type: str) -> Mapping[str, Any]:
    """What `mla-quant inspect` prints, as plain data."""
    geometries = {layer.geometry for layer in discovery.layers}
    per_token: dict[str, int] = {}
    for layer in discovery.layers:
        for kind, size in layer.geometry.cache_bytes_per_token().items():
            per_token[kind] = per_token.get(kind, 0) + size
    first = discovery.layers[0].geometry if discovery.layers else None
    return {
        "family": model_type,
        "layers": len(discovery.layers),
        "geometry": first.as_dict() if first else {},
        "uniform_geometry": len(geometries) <= 1,
        "layer_names": [layer.name for layer in discovery.layers],
        "skipped": [
            {"name": s.name, "class": s.class_name, "reason": s.reason}
            for s in (*discovery.skipped, *discovery.sparse)
        ],
        "cache_bytes_per_token": per_token,
    }
