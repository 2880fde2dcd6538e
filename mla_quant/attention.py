"""MLA attention modules with quantized operands, in both forms.

`QuantMLAAttention` is mixed into whatever attention class a model uses. The original forward runs
unchanged up to the attention call, which is routed here: so every family's own projections,
norms, latent scaling, rotary embedding, softmax scale and cache handling apply. With every
quantizer disabled the original forward runs alone and is bit-identical.

The routing replaces `config` on the one module during its forward by a view whose attention
implementation is this project's; masks were built before, by the model, for the implementation
that the user chose.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from modelopt.torch.quantization.nn import QuantModule, TensorQuantizer
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mla_quant import fused
from mla_quant.errors import CalibrationError, ConfigError, UnsupportedModelError
from mla_quant.families import Geometry
from mla_quant.formats import NVFP4
from mla_quant.observers import (
    Observer,
    collect_together,
    head_chunks,
    observed_probabilities,
)
from mla_quant.quantizers import operand_format, quantizer_amax, quantizer_settings
from mla_quant.recipes import (
    ABSORBED_OPERANDS,
    OPERAND_AXIS,
    OPERANDS,
    PROJECTED_OPERANDS,
    QUANTIZER_SUFFIX,
)
from mla_quant.reference import (
    RANKED_PATTERNS,
    Sparsity,
    attention,
    matmul_fp32,
    quantize,
    saturating_cast,
    split_segments,
)

ATTENTION_IMPLEMENTATION = "mla_quant"
"""Key of `route_attention` among transformers' attention functions."""

Form = Literal["projected", "absorbed", "auto"]


class _ConfigView:
    """A model's config with another attention implementation."""

    def __init__(self, config: Any) -> None:
        self.__dict__["_config"] = config
        self.__dict__["_attn_implementation"] = ATTENTION_IMPLEMENTATION

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)


class _LatentCache:
    """Stands in for a cache of expanded keys and values; stores the latent and its rope part.

    transformers up to 5.14 caches what the attention call sees. Absorbed attention needs the
    latent of earlier tokens, so the cache holds that and keys and values are expanded anew.
    """

    def __init__(self, cache: Any, module: QuantMLAAttention) -> None:
        self._cache, self._module = cache, module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        call = self._module._call
        assert call is not None
        assert call.latent is not None
        rope = keys[:, :1, :, self._module.geometry.qk_nope_head_dim :]
        call.latent, call.rope = self._cache.update(call.latent, rope, layer_idx, *args, **kwargs)
        return self._module._expand(call.latent, call.rope)


@dataclass
class _Call:
    """What one forward pass has captured so far."""

    latent: Tensor | None = None
    """[batch, 1, keys, kv_lora_rank]: after its norm and any scaling, cached tokens included."""
    rope: Tensor | None = None
    """[batch, 1, keys, qk_rope_head_dim], rotated."""


@dataclass(frozen=True)
class _Visible:
    """Which keys a call may read, with every sequence moved to start at key 0.

    Attributes:
        allowed: bool, broadcastable to [batch, heads, queries, keys], or None.
        bias: Additive part of a float mask, or None.
        causal: Whether `allowed` leaves causality to the reader.
        keys: bool [batch, keys]: keys that are no padding; None if none is.
        queries: bool [batch, queries], likewise.
        order: int64 [batch, keys]: where each key was; None if nothing moved.
        positions: Positions of the queries among the moved keys.
    """

    allowed: Tensor | None
    bias: Tensor | None
    causal: bool
    keys: Tensor | None
    queries: Tensor | None
    order: Tensor | None
    positions: Tensor | None

    def move(self, x: Tensor) -> Tensor:
        """Move [batch, heads, keys, width] likewise, with padding set to zero."""
        if self.keys is None:
            return x
        if self.order is not None:
            x = x.gather(2, self.order[:, None, :, None].expand_as(x))
        return torch.where(self.keys[:, None, :, None], x, torch.zeros_like(x))


def _visible(mask: Any, query: Tensor, keys: int, causal: bool) -> _Visible:
    """Interpret the attention mask of any implementation.

    Blocks of V and P and groups of N:M sparsity lie at absolute positions of a *sequence*. Left
    padding would shift them, so its keys are moved behind the sequence; softmax does not mind.
    """
    batch, _, queries, _ = query.shape
    device = query.device
    if mask is None:
        return _Visible(None, None, causal and queries > 1, None, None, None, None)
    bias = None
    if not isinstance(mask, Tensor):
        mask = _dense_block_mask(mask, batch, queries, keys, device)
    if mask.dim() == 2:
        real = mask[:, -keys:].bool()
        positions = torch.arange(keys - queries, keys, device=device)
        reach = torch.arange(keys, device=device) <= positions[:, None]
        allowed = real[:, None, None, :] & (reach if causal else torch.ones_like(reach))
    else:
        mask = mask[..., :keys].expand(batch, -1, -1, -1)
        if mask.dtype == torch.bool:
            allowed = mask
        else:
            allowed = mask > torch.finfo(mask.dtype).min / 2
            bias = torch.where(allowed, mask, torch.zeros_like(mask))
    real = allowed.any(dim=(1, 2))
    last = (allowed[:, 0] * torch.arange(1, keys + 1, device=device)).amax(-1) - 1
    if bool(real.all()):
        return _Visible(allowed, bias, False, None, None, None, last[:, None])
    # The queries are the newest tokens: padding if their own key is. Those keys need not be the
    # last ones: a preallocated cache goes on with empty slots. The first query reads up to its
    # own key, unless every row begins with padding; then the last one does.
    start = int(last[:, 0].max())
    stop = min(start + queries if start >= 0 else int(last.max()) + 1, keys)
    own = real[:, stop - queries : stop] if queries <= stop else last >= 0
    query_real = own if bool(own.any()) else last >= 0
    first = real.to(torch.int64).argmax(-1)
    order = None
    if bool((first > 0).any()):
        order = (torch.arange(keys, device=device) + first[:, None]) % keys
        last = last - first[:, None]
        index = order[:, None, None, :]
        allowed = allowed.gather(-1, index.expand_as(allowed))
        bias = None if bias is None else bias.gather(-1, index.expand_as(bias))
        real = real.gather(-1, order)
    return _Visible(allowed, bias, False, real, query_real, order, last[:, None])


def _dense_block_mask(
    mask: Any, batch: int, queries: int, keys: int, device: torch.device
) -> Tensor:
    mask_mod = getattr(mask, "mask_mod", None)
    if mask_mod is None:
        raise ConfigError(
            f"cannot read an attention mask of type {type(mask).__name__}; pass a tensor or a "
            "flex-attention BlockMask, or use attn_implementation='sdpa'"
        )
    from torch.nn.attention.flex_attention import create_mask

    return create_mask(mask_mod, batch, 1, queries, keys, device=str(device))


class Measurement:
    """Noise that quantization adds to one layer, summed over calls.

    Attributes:
        noise: Per operand, float64 [signal power, noise power] sums.
        counts: Per operand, [values, saturated values, nonzero blocks, flushed ones among them].
        output: float64 [signal power, noise power] of the attention output, quantized against
            unquantized on the same inputs.
    """

    def __init__(self) -> None:
        self.noise: dict[str, list[float]] = {}
        self.counts: dict[str, list[int]] = {}
        self.output = [0.0, 0.0]

    def add_operand(
        self, quantizer: TensorQuantizer, operand: str, x: Tensor, rounded: Tensor, real: Tensor
    ) -> None:
        """Add one operand of one call; `real` marks valid values, broadcastable to `x`."""
        fmt = operand_format(quantizer)
        x = torch.where(real, x.float(), torch.zeros_like(x, dtype=torch.float32))
        rounded = torch.where(real, rounded.float(), torch.zeros_like(x))
        sums = self.noise.setdefault(operand, [0.0, 0.0])
        sums[0] += float(x.double().square().sum())
        sums[1] += float((x.double() - rounded.double()).square().sum())
        counts = self.counts.setdefault(operand, [0, 0, 0, 0])
        amax = torch.as_tensor(quantizer_amax(quantizer, operand), device=x.device)
        counts[0] += int(real.expand_as(x).sum())
        counts[1] += int((x.abs() > amax).sum())
        if fmt.scale is None:
            return
        axis = OPERAND_AXIS[operand]
        for part in split_segments(x, fmt, axis, getattr(quantizer, "segments", None)):
            parts = quantize(part, fmt, amax, axis=axis, reciprocal=operand == "p")
            assert parts.block_scale is not None
            nonzero = _block_any(part, fmt.block_size or 1, axis)
            counts[2] += int(nonzero.sum())
            counts[3] += int(((parts.block_scale == 0) & nonzero).sum())

    def add_output(self, original: Tensor, quantized: Tensor, real: Tensor | None) -> None:
        """Add a call's attention output, [batch, queries, heads, width] each."""
        if real is not None:
            keep = real[:, :, None, None]
            original = torch.where(keep, original, torch.zeros_like(original))
            quantized = torch.where(keep, quantized, torch.zeros_like(quantized))
        self.output[0] += float(original.double().square().sum())
        self.output[1] += float((original.double() - quantized.double()).square().sum())


def _block_any(x: Tensor, block: int, axis: int) -> Tensor:
    """Whether a block holds a nonzero value, with size 1 in the block's place."""
    padding = -x.shape[axis] % block
    pad = [0, padding] if axis == -1 else [0, 0, 0, padding]
    blocks = nn.functional.pad(x, pad).unflatten(axis, (-1, block))
    found: Tensor = (blocks != 0).any(axis, keepdim=True)
    return found


class QuantMLAAttention(QuantModule):  # type: ignore[misc]  # untyped base
    """Mixed into an MLA attention class by ModelOpt; see the module docstring.

    Attributes:
        geometry: Widths of the layer.
        form: "projected" computes what prefill computes, "absorbed" what decode computes on the
            latent, "auto" one or the other by query length, as an engine does.
        observers: Set while the layer is calibrated.
        measurement: Set while `mla-quant evaluate` measures noise.
    """

    geometry: Geometry
    form: Form
    observers: dict[str, Observer] | None
    measurement: Measurement | None
    _call: _Call | None
    _pending: list[tuple[Observer, Tensor, Tensor | None]]

    def _setup(self) -> None:
        self.geometry = Geometry.of_module(self)
        self.form = "projected"
        self.observers = None
        self.measurement = None
        self._call = None
        self._pending = []
        for operand in OPERANDS:
            quantizer = TensorQuantizer()
            quantizer.disable()
            if operand in ("q", "k"):
                quantizer.segments = self.geometry.qk_segments
            setattr(self, operand + QUANTIZER_SUFFIX, quantizer)

    def quantizer(self, operand: str) -> TensorQuantizer:
        """The quantizer of one of `OPERANDS`."""
        result = getattr(self, operand + QUANTIZER_SUFFIX)
        assert isinstance(result, TensorQuantizer)
        return result

    def enabled_operands(self) -> list[str]:
        """Operands whose quantizer is enabled."""
        return [name for name in OPERANDS if self.quantizer(name).is_enabled]

    def active_operands(self, form: str) -> list[str]:
        """Operands of one form that are quantized now (enabled, and not only calibrating)."""
        names = PROJECTED_OPERANDS if form == "projected" else (*ABSORBED_OPERANDS, "p")
        return [n for n in names if (q := self.quantizer(n)).is_enabled and q._if_quant]

    # -- the forward pass ---------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward, with the attention call routed here if anything is quantized."""
        if self.observers is None and not any(
            self.active_operands(form) or self._calibrating(form)
            for form in ("projected", "absorbed")
        ):
            return super().forward(*args, **kwargs)
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            if kwargs.get(name) is not None:
                raise ConfigError(
                    f"packed sequences ({name}) are not supported by quantized attention: blocks "
                    "of V and P lie at positions of one sequence; pass one sequence a row"
                )
        with self._routed():
            return super().forward(*args, **self._with_latent_cache(kwargs))

    def _calibrating(self, form: str) -> bool:
        names = PROJECTED_OPERANDS if form == "projected" else (*ABSORBED_OPERANDS, "p")
        return any((q := self.quantizer(n)).is_enabled and q._if_calib for n in names)

    @contextmanager
    def _routed(self) -> Iterator[None]:
        self._call = _Call()
        config = self.__dict__["config"]
        handle = None
        self.__dict__["config"] = _ConfigView(config)
        if hasattr(type(self), "expand_kv"):
            self.__dict__["expand_kv"] = self._capture_and_expand
        else:
            handle = self.kv_b_proj.register_forward_pre_hook(self._capture_latent)
        try:
            yield
        finally:
            self.__dict__["config"] = config
            self.__dict__.pop("expand_kv", None)
            if handle is not None:
                handle.remove()
            self._call = None
            self._pending.clear()

    def _with_latent_cache(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if hasattr(type(self), "expand_kv"):
            return kwargs
        for name in ("past_key_values", "past_key_value"):
            if kwargs.get(name) is not None:
                kwargs = {**kwargs, name: _LatentCache(kwargs[name], self)}
        return kwargs

    def _capture_latent(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self._call is not None and self._call.latent is None:
            latent = args[0]
            self._call.latent = latent.reshape(latent.shape[0], 1, -1, self.geometry.kv_lora_rank)

    def _capture_and_expand(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        assert self._call is not None
        self._call.latent, self._call.rope = latent, rope
        if self._form_of(None) == "absorbed" and not self._observing():
            return latent, latent  # The absorbed form never reads expanded keys and values.
        expanded = type(self).expand_kv(self, latent, rope)
        return expanded[0], expanded[1]

    def _expand(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        g = self.geometry
        batch, _, keys, _ = latent.shape
        both = self.kv_b_proj(latent[:, 0]).view(
            batch, keys, g.num_heads, g.qk_nope_head_dim + g.v_head_dim
        )
        k_nope, v = both.transpose(1, 2).split([g.qk_nope_head_dim, g.v_head_dim], dim=-1)
        return torch.cat([k_nope, rope.expand(-1, g.num_heads, -1, -1)], dim=-1), v

    def _observing(self) -> bool:
        return self.observers is not None or any(
            self._calibrating(form) for form in ("projected", "absorbed")
        )

    def _form_of(self, queries: int | None) -> str:
        if self.form != "auto":
            return self.form
        return "absorbed" if queries == 1 else "projected"

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The attention call.

        Args:
            query: [batch, heads, queries, nope + rope].
            key: [batch, heads, keys, nope + rope].
            value: [batch, heads, keys, v_head_dim].
            attention_mask: Whatever the model built for its attention implementation.
            scaling: Softmax scale.
            **kwargs: Passed on where the original implementation runs.

        Returns:
            [batch, queries, heads, v_head_dim] in `query`'s dtype; probabilities for "eager".
        """
        call = self._call
        assert call is not None
        assert call.latent is not None
        if call.rope is None:
            call.rope = key[:, :1, :, self.geometry.qk_nope_head_dim :]
        form = self._form_of(query.shape[2])
        keys = call.latent.shape[2]
        causal = kwargs.get("is_causal")
        causal = bool(getattr(self, "is_causal", True) if causal is None else causal)
        visible = _visible(attention_mask, query, keys, causal)
        if self._observing():
            self._observe(query, key, value, call, visible, scaling)
            return self._original(query, key, value, attention_mask, scaling, **kwargs)
        if not self.active_operands(form):
            if key.shape[1] != query.shape[1]:
                key, value = type(self).expand_kv(self, call.latent, call.rope)
            return self._original(query, key, value, attention_mask, scaling, **kwargs)
        out, p = self._quantized(form, query, key, value, call, visible, scaling)
        if self.measurement is not None:
            if key.shape[1] != query.shape[1]:
                key, value = type(self).expand_kv(self, call.latent, call.rope)
            exact, _ = self._original(query, key, value, attention_mask, scaling, **kwargs)
            self.measurement.add_output(exact, out, visible.queries)
        return out, p

    def _original(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        name = self.__dict__["config"]._config._attn_implementation
        width = value.shape[-1]
        if "flash" in str(name) and query.shape[-1] != width:
            value = nn.functional.pad(value, [0, query.shape[-1] - width])
        function = ALL_ATTENTION_FUNCTIONS.get(name) or _eager_function(type(self))
        out, p = function(self, query, key, value, mask, scaling=scaling, **kwargs)
        return out[..., :width], p

    def _is_eager(self) -> bool:
        return self.__dict__["config"]._config._attn_implementation in (None, "eager")

    # -- quantized attention ------------------------------------------------------------------

    def _quantized(
        self,
        form: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: _Call,
        visible: _Visible,
        scaling: float,
    ) -> tuple[Tensor, Tensor | None]:
        assert call.latent is not None
        assert call.rope is not None
        by_kernels = self._fused(form, query, key, value, call, visible, scaling)
        if by_kernels is not None:
            return by_kernels, None
        rows, dtype = visible.queries, query.dtype
        if form == "projected":
            q_parts = [self._round("q", query, rows, dtype)]
            k_parts = [self._round("k", visible.move(key), visible.keys, dtype)]
            v = self._round("v", visible.move(value), visible.keys, dtype)
        else:
            q_latent, q_rope = self.absorbed_query(query)
            latent, rope = visible.move(call.latent), visible.move(call.rope)
            q_parts = [self._round("q_latent", q_latent, rows, dtype)]
            k_parts = [self._round("k_latent", latent, visible.keys, dtype)]
            if self.geometry.qk_rope_head_dim:
                q_parts.append(self._round("q_rope", q_rope, rows, dtype))
                k_parts.append(self._round("k_rope", rope, visible.keys, dtype))
            v = self._round("v_latent", latent, visible.keys, dtype)
        settings = quantizer_settings(self.quantizer("p"))
        active_p = "p" in self.active_operands(form)
        out, _, p = attention(
            q_parts,
            k_parts,
            v,
            scale=scaling,
            allowed=visible.allowed,
            bias=visible.bias,
            causal=visible.causal,
            query_positions=visible.positions,
            quantize_p=self._p_rounder(visible) if active_p else None,
            p_tile_tokens=settings.get("p_tile_tokens") if active_p else None,
            sparsity=self._sparsity(settings, query.shape[2]) if active_p else None,
            return_probabilities=self._is_eager(),
        )
        if form == "absorbed":
            out = self._up_project(out.to(query.dtype))
        if p is not None:
            p = p.to(query.dtype)
            if visible.order is not None:
                back = visible.order.argsort(-1)[:, None, None, :]
                p = p.gather(-1, back.expand_as(p))
        return out.to(query.dtype).transpose(1, 2).contiguous(), p

    def _fused(
        self,
        form: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: _Call,
        visible: _Visible,
        scaling: float,
    ) -> Tensor | None:
        """The same by the fused kernels, or None where they do not apply.

        They do where nothing asks for probabilities, statistics or gradients and the mask is a
        causal one, padded or not.
        """
        assert call.latent is not None
        assert call.rope is not None
        settings = quantizer_settings(self.quantizer("p"))
        if (
            not fused.kernels_serve(query)
            or self._is_eager()
            or self.measurement is not None
            or visible.bias is not None
            or settings.get("p_tile_tokens") is not None
            or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad))
        ):
            return None
        shape = (query.shape[0], query.shape[2], call.latent.shape[2])
        starts = fused.causal_starts(
            visible.allowed,
            visible.causal,
            visible.positions,
            visible.queries,
            shape,
            query.device,
        )
        active = self.active_operands(form)
        sparsity = self._sparsity(settings, query.shape[2]) if "p" in active else None
        if starts is None or (sparsity and (sparsity.n, sparsity.m) not in RANKED_PATTERNS):
            return None
        operands: dict[str, tuple[str, Tensor | float]] = {}
        for name in OPERANDS:
            quantizer = self.quantizer(name)
            operands[name] = ("none", 1.0)
            if name in active:
                operands[name] = (operand_format(quantizer).name, quantizer_amax(quantizer, name))
        if form == "projected":
            return fused.projected(
                query,
                visible.move(key),
                visible.move(value),
                operands,
                scale=scaling,
                segments=self.geometry.qk_segments,
                sparsity=sparsity,
                starts=starts,
            )
        if not fused.absorbed_serves(self.geometry.kv_lora_rank, self.geometry.qk_rope_head_dim):
            return None
        out = fused.absorbed(
            *self.absorbed_query(query),
            visible.move(call.latent),
            visible.move(call.rope),
            operands,
            scale=scaling,
            sparsity=sparsity,
            starts=starts,
        )
        return self._up_project(out.to(query.dtype)).to(query.dtype).transpose(1, 2).contiguous()

    def _round(
        self, operand: str, x: Tensor, real: Tensor | None, model_dtype: torch.dtype
    ) -> Tensor:
        """Quantize-dequantize one operand in fp32; in the model's dtype if it is not quantized."""
        quantizer = self.quantizer(operand)
        if not (quantizer.is_enabled and quantizer._if_quant):
            return saturating_cast(x, model_dtype)
        rounded: Tensor = quantizer(x.float())
        if self.measurement is not None:
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=x.device)
            if real is not None:
                mask = real[:, None, :, None]
            self.measurement.add_operand(quantizer, operand, x, rounded, mask)
        return rounded

    def _p_rounder(self, visible: _Visible) -> Callable[[Tensor], Tensor]:
        quantizer = self.quantizer("p")
        done = 0  # rows come in chunks, in order

        def round_p(p: Tensor) -> Tensor:
            nonlocal done
            rounded: Tensor = quantizer(p)
            measured = self.measurement
            if measured is not None and operand_format(quantizer).is_quantized:
                real = p > 0
                if visible.queries is not None:
                    chunk = visible.queries[:, done : done + p.shape[2]]
                    real = real & chunk[:, None, :, None]
                measured.add_operand(quantizer, "p", p, rounded, real)
            done += p.shape[2]
            return rounded

        return round_p

    @staticmethod
    def _sparsity(settings: dict[str, Any], queries: int) -> Sparsity | None:
        fields = settings.get("sparsity")
        if not fields:
            return None
        sparsity = Sparsity(**fields)
        return None if queries == 1 and not sparsity.sparse_decode else sparsity

    # -- the absorbed form --------------------------------------------------------------------

    def _up_projection(self) -> tuple[Tensor, Tensor]:
        """kv_b_proj as [heads, nope, latent] for K and [heads, v, latent] for V."""
        g = self.geometry
        weight = _plain_weight(self.kv_b_proj)
        per_head = weight.view(g.num_heads, g.qk_nope_head_dim + g.v_head_dim, g.kv_lora_rank)
        w_uk, w_uv = per_head.split([g.qk_nope_head_dim, g.v_head_dim], dim=1)
        return w_uk, w_uv

    def absorbed_query(self, query: Tensor, heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Absorb the key's up-projection into Q.

        Args:
            query: [batch, heads, queries, nope + rope].
            heads: Heads to take.

        Returns:
            Latent part fp32 [batch, heads, queries, kv_lora_rank], rounded to the model's dtype
            if the recipe says so, and the rope part in `query`'s dtype.
        """
        rope = query[:, heads, :, self.geometry.qk_nope_head_dim :]
        return self._absorb(query, heads).float(), rope

    def _absorb(self, query: Tensor, heads: slice) -> Tensor:
        """The latent part of `absorbed_query`, in the model's dtype if rounded to it."""
        w_uk, _ = self._up_projection()
        latent = matmul_fp32(query[:, heads, :, : self.geometry.qk_nope_head_dim], w_uk[heads])
        settings = quantizer_settings(self.quantizer("q_latent"))
        if settings.get("absorbed_query") == "model":
            return saturating_cast(latent, query.dtype)
        return latent

    def _up_project(self, out: Tensor) -> Tensor:
        """[batch, heads, queries, kv_lora_rank] -> fp32 [batch, heads, queries, v_head_dim]."""
        _, w_uv = self._up_projection()
        return matmul_fp32(out, w_uv.mT)

    # -- calibration --------------------------------------------------------------------------

    def observed_operands(self) -> list[str]:
        """Enabled operands that have a format and exist in this geometry."""
        has_rope = self.geometry.qk_rope_head_dim > 0
        return [
            name
            for name in self.enabled_operands()
            if operand_format(self.quantizer(name)).is_quantized
            and (has_rope or not name.endswith("_rope"))
        ]

    def start_observing(self, method: str, percentile: float, device: torch.device) -> None:
        """Gather statistics in the forward passes that follow."""
        self.observers = {
            name: Observer(
                name,
                operand_format(self.quantizer(name)),
                OPERAND_AXIS[name],
                method,
                percentile,
                device,
            )
            for name in self.observed_operands()
        }

    def _observe(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: _Call,
        visible: _Visible,
        scaling: float,
    ) -> None:
        assert call.latent is not None
        assert call.rope is not None
        wanted = set(self.observers) if self.observers is not None else set(self.enabled_operands())
        rows = None if visible.queries is None else visible.queries[:, None, :, None]
        # Cached tokens were observed when they were new; groups of V start at multiples of 16.
        keys, queries = call.latent.shape[2], query.shape[2]
        fresh, tokens = 0, None
        if visible.keys is None:
            fresh = _whole_blocks(max(0, keys - queries))
        else:
            before = visible.keys.sum(-1, keepdim=True) - queries
            position = torch.arange(keys, device=query.device)
            new_keys = visible.keys & (position >= _whole_blocks(before))
            tokens = new_keys[:, None, :, None]

        def new(x: Tensor) -> Tensor:
            return visible.move(x)[:, :, fresh:]

        if "q" in wanted:
            self._collect("q", query, rows)
        if "k" in wanted:
            self._collect("k", new(key), tokens)
        if "v" in wanted:
            self._collect("v", new(value), tokens)
        if "q_latent" in wanted:
            for heads in head_chunks(query, self.geometry.kv_lora_rank):
                self._collect("q_latent", self._absorb(query, heads), rows)
        if "q_rope" in wanted and self.geometry.qk_rope_head_dim:
            self._collect("q_rope", query[..., self.geometry.qk_nope_head_dim :], rows)
        if wanted & {"k_latent", "v_latent"}:
            latent = new(call.latent)
            for operand in ("k_latent", "v_latent"):
                if operand in wanted:
                    self._collect(operand, latent, tokens)
        if "k_rope" in wanted and self.geometry.qk_rope_head_dim:
            self._collect("k_rope", new(call.rope), tokens)
        if "p" in wanted:
            for p, valid in observed_probabilities(
                query,
                visible.move(key),
                scaling,
                positions=visible.positions,
                allowed=visible.allowed,
                bias=visible.bias,
                real=visible.queries,
            ):
                self._collect("p", p, valid)
        self._collect_pending()

    def _collect(self, operand: str, x: Tensor, valid: Tensor | None) -> None:
        if self.observers is not None:
            self._pending.append((self.observers[operand], x, valid))
            if operand == "q_latent":  # too large to be kept until the others are there
                self._collect_pending()
            return
        # Calibration by another of ModelOpt's algorithms: its own calibrator sees valid values.
        quantizer = self.quantizer(operand)
        if quantizer._if_calib:
            quantizer(x if valid is None else x[valid.expand_as(x)])

    def _collect_pending(self) -> None:
        collect_together(self._pending)
        self._pending.clear()


_Count = TypeVar("_Count", int, Tensor)


def _whole_blocks(tokens: _Count) -> _Count:
    """The multiple of a block at or below a number of tokens."""
    block = NVFP4.block_size
    assert block is not None
    return tokens // block * block


def _plain_weight(linear: nn.Module) -> Tensor:
    """A linear layer's weight as its forward uses it: fake-quantized if it is quantized."""
    hook = getattr(linear, "_hf_hook", None)
    if hook is not None and getattr(hook, "offload", False):
        from accelerate.utils import align_module_device

        with align_module_device(linear, getattr(hook, "execution_device", None)):
            return _plain_weight_on_device(linear).clone()
    return _plain_weight_on_device(linear)


def _plain_weight_on_device(linear: nn.Module) -> Tensor:
    quantize_weight = getattr(linear, "quantize_weight", None)
    with quantize_weight() if quantize_weight is not None else nullcontext():
        weight = linear.weight
    assert isinstance(weight, Tensor)
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UnsupportedModelError(
            f"kv_b_proj.weight has dtype {weight.dtype}: the absorbed form needs float32, float16 "
            "or bfloat16; load the checkpoint dequantized"
        )
    return weight


def _eager_function(cls: type[nn.Module]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    for base in cls.__mro__:
        module = sys.modules.get(base.__module__)
        function = getattr(module, "eager_attention_forward", None)
        if function is not None and module is not sys.modules[__name__]:
            return function  # type: ignore[no-any-return]
    source = inspect.getfile(cls)
    raise UnsupportedModelError(
        f"{cls.__name__} ({source}) has no eager_attention_forward; load the model with "
        "attn_implementation='sdpa'"
    )


def route_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers attention function: hands the call to the module."""
    if not isinstance(module, QuantMLAAttention):
        raise ConfigError(
            f"attention implementation {ATTENTION_IMPLEMENTATION!r} is internal to quantized MLA "
            "layers; load the model with attn_implementation 'eager' or 'sdpa'"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return module.attend(query, key, value, attention_mask, scale, **kwargs)


def quant_mla_layers(model: nn.Module) -> dict[str, QuantMLAAttention]:
    """Converted MLA attention modules by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantMLAAttention)}


def set_form(model: nn.Module, form: Form) -> None:
    """Choose what every MLA layer computes.

    Args:
        model: A model that `mtq.quantize` converted.
        form: "projected" (prefill), "absorbed" (decode) or "auto" (by query length).

    Raises:
        ConfigError: No such form.
        CalibrationError: The model has no converted MLA layer.
    """
    if form not in ("projected", "absorbed", "auto"):
        raise ConfigError(f"form must be projected, absorbed or auto, got {form!r}")
    layers = quant_mla_layers(model)
    if not layers:
        raise CalibrationError(
            "the model has no quantized MLA layer; run mtq.quantize with an MLA config first"
        )
    for module in layers.values():
        module.form = form


@contextmanager
def use_form(model: nn.Module, form: Form) -> Iterator[None]:
    """`set_form` for the duration of a block."""
    layers = quant_mla_layers(model)
    before = {name: module.form for name, module in layers.items()}
    set_form(model, form)
    try:
        yield
    finally:
        for name, module in layers.items():
            module.form = before[name]


@contextmanager
def only_operands(model: nn.Module, keep: Callable[[str, str], bool]) -> Iterator[None]:
    """Quantize only some operands for the duration of a block.

    Args:
        model: A converted model.
        keep: Called with (layer name, operand); others are left unquantized.
    """
    changed = [
        quantizer
        for name, module in quant_mla_layers(model).items()
        for operand in module.enabled_operands()
        if (quantizer := module.quantizer(operand))._if_quant and not keep(name, operand)
    ]
    try:
        for quantizer in changed:
            quantizer.disable_quant()
        yield
    finally:
        for quantizer in changed:
            quantizer.enable_quant()
