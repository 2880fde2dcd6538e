"""Calibration inside vLLM's workers, for models that only fit several GPUs.

`collect` drives an engine made with `engine_arguments`: every prompt is one prefill, in which
`CalibrationExtension`, mixed into vLLM's worker class, observes what each attention layer is given.
Observers and statistics are those of the Hugging Face engine. Ranks of a tensor-parallel group hold
some heads each: counts of Q, K, P and V are added up, the latent is the same on all of them.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mla_quant.errors import CalibrationError, ConfigError
from mla_quant.formats import FORMATS
from mla_quant.integrations import vllm as integration
from mla_quant.observers import (
    Observer,
    collect_together,
    head_chunks,
    observed_probabilities,
)
from mla_quant.recipes import OPERAND_AXIS, Recipe
from mla_quant.reference import matmul_fp32, saturating_cast
from mla_quant.settings import LayerSettings, OperandSettings, Settings, parse_settings

SHARED_BY_HEADS = ("k_latent", "k_rope", "v_latent")
"""Operands that every rank of a tensor-parallel group has whole."""

Formats = Mapping[str, Mapping[str, str]]
"""Format name by operand, by layer."""

Observers = dict[str, dict[str, Observer]]
"""By layer and operand."""


# -- in the workers -------------------------------------------------------------------------------


class _LayerObserver:
    """Stands before `forward_mha` of one layer and observes its operands."""

    def __init__(
        self, layer: Any, formats: Mapping[str, str], options: Mapping[str, Any], halves: bool
    ) -> None:
        device = next(layer.impl.kv_b_proj.parameters()).device
        self.layer, self.halves = layer, halves
        self.rounded = options["absorbed_query"] == "model"
        self.observers = {
            operand: Observer(
                operand,
                FORMATS[fmt],
                OPERAND_AXIS[operand],
                options["method"],
                options["percentile"],
                device,
            )
            for operand, fmt in formats.items()
        }
        self.original = layer.impl.forward_mha
        # Found before the class's method; `remove` uncovers that again.
        layer.impl.forward_mha = functools.partial(self)

    def remove(self) -> None:
        del self.layer.impl.forward_mha

    def __call__(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        cache: Tensor,
        attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        prefill = attn_metadata.prefill
        if prefill.chunked_context is not None:
            raise CalibrationError(
                "a prompt was run in more than one part; turn prefix caching and chunked prefill "
                "off"
            )
        borders = prefill.query_start_loc.tolist()
        for start, end in itertools.pairwise(borders):
            self._observe(q[start:end], kv_c_normed[start:end], k_pe[start:end])
        return self.original(q, kv_c_normed, k_pe, cache, attn_metadata, *args, **kwargs)

    def _observe(self, q: Tensor, latent: Tensor, rope: Tensor) -> None:
        """Observe one prompt: [tokens, heads, nope + rope], [tokens, latent], [tokens, 1, rope]."""
        from mla_quant.integrations.vllm_attention import in_halves

        impl, wanted = self.layer.impl, self.observers
        nope, heads = impl.qk_nope_head_dim, q.shape[1]
        if self.halves:
            q, rope = torch.cat([q[..., :nope], in_halves(q[..., nope:])], -1), in_halves(rope)
        query = q.transpose(0, 1)[None]
        operands: dict[str, Tensor] = {"q": query}
        if wanted.keys() & {"k", "v", "p"}:
            expanded = impl.kv_b_proj(latent)[0].view(-1, heads, nope + impl.v_head_dim)
            k_nope, value = expanded.split([nope, impl.v_head_dim], dim=-1)
            key = torch.cat([k_nope, rope.expand(-1, heads, -1)], -1).transpose(0, 1)[None]
            operands |= {"k": key, "v": value.transpose(0, 1)[None]}
        operands["q_rope"] = query[..., nope:]
        operands["k_latent"] = operands["v_latent"] = latent[None, None]
        operands["k_rope"] = rope.transpose(0, 1)[None]
        collect_together([(o, operands[n], None) for n, o in wanted.items() if n in operands])
        if "q_latent" in wanted:
            weight = self.layer.W_UK_T
            for some in head_chunks(query, impl.kv_lora_rank):
                absorbed = matmul_fp32(query[:, some, :, :nope], weight[some])
                if self.rounded:
                    absorbed = saturating_cast(absorbed, q.dtype)
                wanted["q_latent"].collect(absorbed)
        if "p" in wanted:
            for p, valid in observed_probabilities(query, key, float(impl.scale)):
                wanted["p"].collect(p, valid)


class CalibrationExtension:
    """Mixed into vLLM's workers (`worker_extension_cls`); `collect` calls these methods."""

    def mla_quant_start(self, formats: Formats, options: Mapping[str, Any]) -> list[str]:
        """Begin to observe the layers that this worker has; returns their names."""
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention

        model, vllm_config = integration.model_and_config(self)
        halves = integration.rope_in_halves(vllm_config)
        self._mla_quant_layers: dict[str, _LayerObserver] = {}
        for module in model.modules():
            if not isinstance(module, MLAAttention):
                continue
            name = integration.hugging_face_name(module.layer_name, formats)
            if name is not None:
                self._mla_quant_layers[name] = _LayerObserver(
                    module, formats[name], options, halves
                )
        return list(self._mla_quant_layers)

    def mla_quant_second_pass(self, maxima: Mapping[str, Mapping[str, float]]) -> None:
        """Begin the second pass of "mse", with the maxima of all ranks."""
        for name, layer in self._mla_quant_layers.items():
            for operand, observer in layer.observers.items():
                observer.maximum.fill_(maxima[name][operand])
                observer.start_second_pass()

    def mla_quant_state(self) -> dict[str, Any]:
        """What was observed, as plain data, and this worker's tensor-parallel rank."""
        from vllm.distributed import get_tensor_model_parallel_rank

        layers = {
            name: {
                operand: {key: value.tolist() for key, value in observer.state().items()}
                for operand, observer in layer.observers.items()
            }
            for name, layer in self._mla_quant_layers.items()
        }
        return {"rank": get_tensor_model_parallel_rank(), "layers": layers}

    def mla_quant_stop(self) -> None:
        """Leave the layers as they were."""
        for layer in self.__dict__.pop("_mla_quant_layers", {}).values():
            layer.remove()

    def mla_quant_quantize(self, settings: str) -> None:
        """Quantize the attention of prompts that are not continued, as `settings` say."""
        integration.install(self, settings=parse_settings(settings, origin="calibration"))


# -- in the driver --------------------------------------------------------------------------------


def engine_arguments(longest: int, batch_size: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that `collect` relies on.

    Args:
        longest: Tokens of the longest sample.
        batch_size: Samples that are run together.
    """
    extension = f"{CalibrationExtension.__module__}.{CalibrationExtension.__qualname__}"
    block = 64
    return {
        # Its builder takes every prompt of two tokens for a prefill.
        "attention_backend": "TRITON_MLA",
        "worker_extension_cls": extension,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "max_model_len": longest + 1,
        "max_num_batched_tokens": batch_size * (longest + 1),
        "max_num_seqs": batch_size,
        "max_logprobs": -1,
        # No more cache than a batch takes: observing needs the memory.
        "block_size": block,
        "num_gpu_blocks_override": batch_size * (longest // block + 2),
        "skip_tokenizer_init": True,
        # A checkpoint that has settings is calibrated anew, not quantized twice.
        "additional_config": {integration.ENABLED: False, integration.SIDE_CACHE: False},
    }


def check_recipe(recipe: Recipe) -> None:
    """Refuse recipes that need more than what vLLM's workers observe.

    Raises:
        ConfigError: Says what the recipe asks for.
    """
    if recipe.weights != "none":
        raise ConfigError(
            f"recipe {recipe.name!r} quantizes weights ({recipe.weights}); --engine vllm "
            "calibrates attention alone, use --engine transformers"
        )
    if "projected" not in recipe.attention.forms:
        raise ConfigError(
            f"recipe {recipe.name!r} has no projected form, which --engine vllm records logits of "
            "for verify; use --form both"
        )


def _workers(llm: Any, method: str, *args: Any) -> list[Any]:
    try:
        result: list[Any] = llm.collective_rpc(method, args=args)
    except Exception as error:
        raise CalibrationError(f"vLLM's workers failed in {method}: {error}") from error
    return result


def _run(llm: Any, samples: Sequence[Sequence[int]], logprobs: bool = False) -> list[Any]:
    import vllm

    sampling = vllm.SamplingParams(
        temperature=0,
        max_tokens=1,
        detokenize=False,
        logprobs=-1 if logprobs else None,
        prompt_logprobs=-1 if logprobs else None,
    )
    prompts = [{"prompt_token_ids": list(sample)} for sample in samples]
    # vLLM divides by the time that its bar has taken, which is 0 where bars are turned off.
    progress = not logprobs and not os.environ.get("TQDM_DISABLE")
    results: list[Any] = llm.generate(prompts, sampling, use_tqdm=progress)
    return results


def collect(
    llm: Any, formats: Formats, samples: Sequence[Sequence[int]], recipe: Recipe
) -> Observers:
    """Observe every quantized operand of every layer while vLLM runs the samples.

    Args:
        llm: `vllm.LLM` made with `engine_arguments`.
        formats: Of each layer's quantized operands, by Hugging Face module names.
        samples: Token ids, two or more each.
        recipe: Says how an amax follows from what was observed.

    Raises:
        CalibrationError: A layer is missing in vLLM's model, or was not reached by the samples.
    """
    short = sum(len(sample) < 2 for sample in samples)
    if short:
        raise CalibrationError(
            f"{short} of {len(samples)} samples have one token, which vLLM decodes instead of "
            "prefilling; leave them out"
        )
    options = {
        "method": recipe.observer.method,
        "percentile": recipe.observer.percentile,
        "absorbed_query": recipe.attention.absorbed_query,
    }
    plain = {name: dict(operands) for name, operands in formats.items()}
    try:
        found = {
            name for names in _workers(llm, "mla_quant_start", plain, options) for name in names
        }
        missing = sorted(set(formats) - found)
        if missing:
            raise CalibrationError(
                f"{len(missing)} layers are not among vLLM's: {', '.join(missing[:3])}"
            )
        _run(llm, samples)
        observers = _merged(formats, _workers(llm, "mla_quant_state"), recipe)
        _check_complete(observers, sum(map(len, samples)))
        if recipe.observer.method == "mse":
            maxima = {
                name: {operand: float(o.maximum) for operand, o in operands.items()}
                for name, operands in observers.items()
            }
            _workers(llm, "mla_quant_second_pass", maxima)
            _run(llm, samples)
            observers = _merged(formats, _workers(llm, "mla_quant_state"), recipe)
    finally:
        _workers(llm, "mla_quant_stop")
    return observers


_DTYPES = {"maximum": torch.float32, "errors": torch.float64}


def _merged(formats: Formats, states: Sequence[Mapping[str, Any]], recipe: Recipe) -> Observers:
    """Observers with what all workers saw."""
    method, percentile = recipe.observer.method, recipe.observer.percentile
    merged: Observers = {}
    for name, operands in formats.items():
        merged[name] = {}
        for operand, fmt in operands.items():
            parts = [
                state["layers"][name][operand]
                for state in states
                if name in state["layers"]
                and (state["rank"] == 0 or operand not in SHARED_BY_HEADS)
            ]
            observer = Observer(
                operand, FORMATS[fmt], OPERAND_AXIS[operand], method, percentile,
                torch.device("cpu"),
            )  # fmt: skip
            total = {}
            for key in parts[0]:
                stacked = torch.stack(
                    [torch.tensor(p[key], dtype=_DTYPES.get(key, torch.int64)) for p in parts]
                )
                total[key] = stacked.amax(0) if key == "maximum" else stacked.sum(0)
            observer.load_state(total)
            merged[name][operand] = observer
    return merged


def _check_complete(observers: Observers, tokens: int) -> None:
    """Every token of every sample was seen, once."""
    for name, operands in observers.items():
        for operand, observer in operands.items():
            values = int(observer.values)
            if not values or (operand != "p" and values % tokens):
                raise CalibrationError(
                    f"{name}.{operand}: {values} values were observed, which is no multiple of the "
                    f"{tokens} tokens of the samples; vLLM ran some of them in another way"
                )


def layer_settings(
    layers: Sequence[str], formats: Formats, observers: Observers, recipe: Recipe
) -> dict[str, LayerSettings]:
    """Settings of every MLA layer, those that the recipe leaves alone included."""
    from mla_quant.recipes import OPERANDS

    fixed = recipe.attention.p_amax
    result = {}
    for layer in layers:
        operands = {operand: OperandSettings(format="none") for operand in OPERANDS}
        for operand, fmt in formats.get(layer, {}).items():
            amax = observers[layer][operand].amax()
            assert amax is not None
            value = float(amax) if operand != "p" or fixed == "calibrated" else float(fixed)
            operands[operand] = OperandSettings(format=fmt, amax=value)
        result[layer] = LayerSettings.from_operands(operands)
    return result


def reference_logits(
    llm: Any, settings: Settings, samples: Sequence[Sequence[int]], positions: int
) -> dict[str, np.ndarray]:
    """Log-probabilities at the last positions of samples, "unquantized" and "projected".

    They serve as logits: a softmax does not see the difference. Afterwards the engine's attention
    is quantized. Absorbed form is not among them, for vLLM runs it a token at a time.

    Args:
        llm: As for `collect`.
        settings: To quantize with.
        samples: Token ids.
        positions: How many of each; no sample may be shorter.

    Returns:
        fp32 [samples, positions, vocabulary].
    """

    def run() -> np.ndarray:
        return np.stack([_logprobs(output, positions) for output in _run(llm, samples, True)])

    result = {"unquantized": run()}
    _workers(llm, "mla_quant_quantize", settings.model_dump_json())
    return result | {"projected": run()}


def _logprobs(output: Any, positions: int) -> np.ndarray:
    """Of what follows each of the last tokens of a prompt, [positions, vocabulary]."""
    rows = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]][-positions:]
    width = max(max(row) for row in rows) + 1
    table = np.full((len(rows), width), -np.inf, dtype=np.float32)
    for line, row in zip(table, rows, strict=True):
        for token, entry in row.items():
            line[token] = entry.logprob
    return table


def load(model: str, longest: int, batch_size: int, **arguments: Any) -> Any:
    """Start an engine for `collect`.

    Args:
        model: Checkpoint folder.
        longest: Tokens of the longest sample.
        batch_size: Samples that are run together.
        arguments: Others of `vllm.LLM`, such as `tensor_parallel_size` and `dtype`.

    Raises:
        ConfigError: vLLM is not installed.
    """
    try:
        from vllm import LLM
    except ImportError as error:
        raise ConfigError(
            f"--engine vllm needs vLLM, which cannot be imported ({error}): pip install "
            "'mla-quant[vllm]'"
        ) from error
    return LLM(model=model, **(engine_arguments(longest, batch_size) | arguments))


__all__ = [
    "CalibrationExtension",
    "check_recipe",
    "collect",
    "engine_arguments",
    "layer_settings",
    "load",
    "reference_logits",
]
