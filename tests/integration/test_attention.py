"""Quantized MLA layers in real transformers models, through stock `mtq.quantize`."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import modelopt.torch.opt as mto
import modelopt.torch.quantization as mtq
import numpy as np
import pytest
import torch
from modelopt.torch.quantization.nn import TensorQuantizer
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mla_quant.attention import (
    QuantMLAAttention,
    only_operands,
    quant_mla_layers,
    set_form,
    use_form,
)
from mla_quant.errors import CalibrationError, ConfigError, UnsupportedModelError
from mla_quant.families import find_mla_layers
from mla_quant.plugin import (
    UncalibratedWarning,
    layer_statistics,
    register_with_modelopt,
    uncalibrated_quantizers,
)
from mla_quant.recipes import (
    ABSORBED_OPERANDS,
    OPERANDS,
    PROJECTED_OPERANDS,
    QUANTIZER_SUFFIX,
    parse_recipe,
    to_modelopt_config,
)
from tests.models import FAMILIES, loop, make_model, token_ids
from tests.oracles import attention as oracle

register_with_modelopt()

NVFP4 = {"q": "nvfp4", "k": "nvfp4", "p": "nvfp4", "v": "nvfp4"}
FP8 = {"q": "fp8", "k": "fp8", "p": "fp8", "v": "fp8"}
MIXED = {
    "q": "fp8", "k": "nvfp4", "p": "fp8", "v": "nvfp4",
    "absorbed": {"q_rope": "nvfp4", "k_rope": "fp8"},
}  # fmt: skip
EXACT = {"sparsity": {"n": 1, "m": 2, "dense_recent_tokens": 1 << 20, "sparse_decode": True}}
"""Runs this project's attention in both forms without rounding anything or dropping any score."""

# Small everywhere; transformers' plain torch linear attention is slow.
LINEAR = {
    "linear_head_dim": 8, "linear_num_heads": 2, "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 1}


def config(weights: str = "none", **attention: Any) -> dict[str, Any]:
    data = {"name": "test", "weights": weights, "attention": attention}
    return to_modelopt_config(parse_recipe(data, origin="test"))


def family_model(family: str, **changes: Any) -> Any:
    return make_model(family, **(LINEAR if family == "kimi_linear" else {}), **changes)


def quantize(model: Any, *batches: Tensor, **attention: Any) -> Any:
    return mtq.quantize(model, config(**attention), loop(*batches) if batches else None)


def logits(model: Any, input_ids: Tensor, *, cache: bool = False, **kwargs: Any) -> Tensor:
    """Logits of one pass, or of a prompt of 16, a chunk of 3 and then single tokens."""
    with torch.no_grad():
        if not cache:
            return model(input_ids=input_ids, use_cache=False, **kwargs).logits
        past = DynamicCache(config=model.config)
        mask = kwargs.get("attention_mask")
        parts = []
        borders = [0, 16, 19, *range(20, input_ids.shape[1] + 1)]
        for start, end in itertools.pairwise(borders):
            step = {} if mask is None else {"attention_mask": mask[:, :end]}
            if "position_ids" in kwargs:
                step["position_ids"] = kwargs["position_ids"][:, start:end]
            parts.append(
                model(input_ids=input_ids[:, start:end], past_key_values=past, **step).logits
            )
        return torch.cat(parts, dim=1)


def amaxes(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{name}.{operand}": amax
        for name, module in quant_mla_layers(model).items()
        for operand in OPERANDS
        if (amax := getattr(module.quantizer(operand), "_amax", None)) is not None
    }


def assert_same_amax(a: nn.Module, b: nn.Module) -> None:
    left, right = amaxes(a), amaxes(b)
    assert left.keys() == right.keys()
    assert left
    for name, amax in left.items():
        assert torch.equal(amax, right[name]), (name, amax, right[name])


def correctly_rounded_linears(model: nn.Module) -> None:
    """Products in float64: a token's projections no longer depend on the other rows of a call.

    A matmul may sum in another order for another number of rows; a value quantized on the far
    side of a tie would then differ between two runs that must agree.
    """

    def again(module: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        bias = None if module.bias is None else module.bias.double()
        return nn.functional.linear(args[0].double(), module.weight.double(), bias).to(out.dtype)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(again)


def padded(sequences: list[Tensor], side: str) -> dict[str, Tensor]:
    """A padded batch with its mask and the positions that the unpadded sequences have."""
    length = max(len(s) for s in sequences)
    ids = torch.zeros(len(sequences), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        here = slice(length - len(sequence), length) if side == "left" else slice(len(sequence))
        ids[row, here], mask[row, here] = sequence, 1
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
    }


def batch_loop(*batches: dict[str, Tensor]) -> Callable[[Any], None]:
    def run(model: Any) -> None:
        with torch.no_grad():
            for batch in batches:
                model(**batch, use_cache=False)

    return run


@contextmanager
def counted(model: nn.Module) -> Iterator[Counter[str]]:
    """How often each attention quantizer runs."""
    calls: Counter[str] = Counter()
    handles = []
    for name, module in model.named_modules():
        if name.endswith(QUANTIZER_SUFFIX):
            short = name.removesuffix(QUANTIZER_SUFFIX)
            handles.append(
                module.register_forward_hook(lambda *_, short=short: calls.update([short]))
            )
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


# -- disabled: bit-identical ----------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_disabled_is_bit_identical(family: str) -> None:
    model = family_model(family)
    ids = token_ids(2, 21)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    cases = [
        (attn, cache, kwargs)
        for attn in ("eager", "sdpa")
        for cache in (False, True)
        for kwargs in ({}, {"attention_mask": mask})
    ]

    def all_cases() -> Iterator[Tensor]:
        for attn, cache, kwargs in cases:
            model.set_attn_implementation(attn)
            yield logits(model, ids, cache=cache, **kwargs)

    original = list(all_cases())
    quantize(model)
    for case, before, after in zip(cases, original, all_cases(), strict=True):
        assert torch.equal(before, after), ("recipe without formats", *case[:2])
    model = quantize(model, ids, **NVFP4)
    changed = logits(model, ids)
    for form in ("projected", "absorbed", "auto"):
        set_form(model, form)
        with only_operands(model, lambda *_: False):
            for case, before, after in zip(cases, original, all_cases(), strict=True):
                assert torch.equal(before, after), ("only_operands", form, *case[:2])
    set_form(model, "projected")
    assert torch.equal(logits(model, ids), changed), "and on again afterwards"
    mtq.disable_quantizer(model, "*")
    set_form(model, "absorbed")
    for case, before, after in zip(cases, original, all_cases(), strict=True):
        assert torch.equal(before, after), ("disable_quantizer", *case[:2])


# -- absorbed without rounding: the original ------------------------------------------------------


def close(a: Tensor, b: Tensor) -> bool:
    """fp32 rounding of another order of operations, through a whole model."""
    return bool((a - b).abs().max() <= 2e-4 * b.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_absorbed_without_rounding_equals_the_original(family: str) -> None:
    """W_UK and W_UV absorbed, family's scale, LongCat's latent scaling: any slip is far off."""
    model = family_model(family)
    ids = token_ids(2, 21)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    real = mask.bool()
    wanted = {}
    for attn in ("eager", "sdpa"):
        model.set_attn_implementation(attn)
        wanted[attn] = logits(model, ids), logits(model, ids, attention_mask=mask)
    quantize(model, **EXACT)
    for attn, (plain, masked) in wanted.items():
        model.set_attn_implementation(attn)
        for form in ("projected", "absorbed", "auto"):
            set_form(model, form)
            with counted(model) as calls:
                got = logits(model, ids)
            assert set(calls) == {f"{name}.p" for name in quant_mla_layers(model)}
            assert close(got, plain), (attn, form)
            assert close(logits(model, ids, cache=True), plain), (attn, form, "cache")
            for cache in (False, True):
                got = logits(model, ids, attention_mask=mask, cache=cache)
                assert close(got[real], masked[real]), (attn, form, cache, "left padding")


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_yarn_scale_through_each_config_key(key: str) -> None:
    """A single key would hide a wrong scale: its softmax is 1 whatever the score."""
    yarn = {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64,
        "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
        "rope_theta": 10000.0,
    }  # fmt: skip
    ids = token_ids(2, 24)
    for family in ("deepseek_v3", "deepseek_v2", "longcat_flash"):
        model = make_model(family, max_position_embeddings=64 * 40, **{key: yarn})
        layer = find_mla_layers(model).layers[0]
        module: Any = layer.module
        mscale = 0.1 * np.log(40.0) + 1
        assert module.scaling == pytest.approx(layer.geometry.qk_head_dim**-0.5 * mscale**2)
        wanted = logits(model, ids)
        quantize(model, **EXACT)
        with use_form(model, "absorbed"):
            assert close(logits(model, ids), wanted), family
            for attention in quant_mla_layers(model).values():
                attention.scaling = layer.geometry.qk_head_dim**-0.5
            assert not close(logits(model, ids), wanted), "the test must notice a wrong scale"


def test_weight_quantization_reaches_the_absorbed_form() -> None:
    """The absorbed form multiplies by kv_b_proj as its own forward does: fake-quantized."""
    model = make_model()
    ids = token_ids(2, 20)
    mtq.quantize(model, config(weights="nvfp4", **EXACT), loop(ids))
    # The projected form also quantizes what goes into kv_b_proj; absorbed, nothing goes in.
    mtq.disable_quantizer(model, "*kv_b_proj.input_quantizer")
    projected = logits(model, ids)
    set_form(model, "absorbed")
    assert close(logits(model, ids), projected)
    mtq.disable_quantizer(model, "*kv_b_proj.weight_quantizer")
    assert not close(logits(model, ids), projected), "the test must notice a plain weight"


# -- quantized: every element of a layer against the oracle ---------------------------------------


class Captured:
    """What the attention call of each layer of an unquantized model got."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        self.calls: dict[nn.Module, dict[str, Any]] = {}
        latents: dict[nn.Module, Tensor] = {}
        layers = find_mla_layers(model).layers
        handles = [
            layer.module.kv_b_proj.register_forward_pre_hook(
                lambda _, args, m=layer.module: latents.__setitem__(m, args[0])
            )
            for layer in layers
        ]

        def capture(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
            self.calls[module] = {"q": q, "k": k, "v": v, "scale": kwargs["scaling"]}
            return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, **kwargs)

        ALL_ATTENTION_FUNCTIONS.register("test_capture", capture)
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        ALL_MASK_ATTENTION_FUNCTIONS.register("test_capture", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        model.set_attn_implementation("test_capture")
        try:
            logits(model, ids)
        finally:
            model.set_attn_implementation("sdpa")
            for handle in handles:
                handle.remove()
        for layer in layers:
            call = self.calls[layer.module]
            call["latent"] = latents[layer.module].reshape(ids.shape[0], 1, ids.shape[1], -1)
            call["rope"] = call["k"][:, :1, :, layer.geometry.qk_nope_head_dim :]
            call["kv_b"] = layer.module.kv_b_proj.weight.detach().double().numpy()


def gamma(count: int) -> float:
    u = 2.0**-24
    return count * u / (1 - count * u)


def check_layers(model: Any, ids: Tensor, formats: dict[str, Any]) -> None:
    """Both forms of every layer, with only that layer quantized, so that its inputs are known."""
    captured = Captured(model, ids)
    named = {layer.name: captured.calls[layer.module] for layer in find_mla_layers(model).layers}
    quantize(model, ids, **formats)
    for name, attention in quant_mla_layers(model).items():
        for form in ("projected", "absorbed"):
            seen: dict[str, Tensor] = {}
            up_project = attention._up_project

            def spy(out: Tensor, seen: Any = seen, up_project: Any = up_project) -> Tensor:
                seen["latent"] = out
                return up_project(out)

            attention.__dict__["_up_project"] = spy
            hooks = [
                module.register_forward_pre_hook(
                    lambda _, args, seen=seen, key=key: seen.__setitem__(key, args[0])
                )
                for key, module in (
                    ("output", attention.o_proj),
                    ("q_latent", attention.q_latent_mla_quantizer),
                )
            ]
            with use_form(model, form), only_operands(model, lambda n, _, name=name: n == name):
                logits(model, ids)
            for hook in hooks:
                hook.remove()
            del attention.__dict__["_up_project"]
            check_layer(attention, form, named[name], seen, formats)


def check_layer(
    attention: QuantMLAAttention,
    form: str,
    call: dict[str, Any],
    seen: dict[str, Tensor],
    formats: dict[str, Any],
) -> None:
    """Every element, each step within what fp32 may change of the float64 result."""
    g = attention.geometry
    absorbed_formats = formats.get("absorbed", {})

    def rounded(operand: str, x: Tensor, segments: tuple[int, ...]) -> oracle.F64:
        fmt = absorbed_formats.get(operand, formats[operand[0]])
        amax = float(attention.quantizer(operand)._amax)
        return oracle.quantize_features(x, oracle.Operand(fmt, (amax,), segments))

    heads = g.num_heads
    per_head = call["kv_b"].reshape(heads, g.qk_nope_head_dim + g.v_head_dim, g.kv_lora_rank)
    w_uk, w_uv = per_head[:, : g.qk_nope_head_dim], per_head[:, g.qk_nope_head_dim :]
    batch, _, queries, _ = call["q"].shape
    output = seen["output"].view(batch, queries, heads, g.v_head_dim).transpose(1, 2)
    if form == "projected":
        q = rounded("q", call["q"], g.qk_segments)
        k = rounded("k", call["k"], g.qk_segments)
        v, v_name, got = call["v"], "v", output
    else:
        nope = call["q"][..., : g.qk_nope_head_dim].double().numpy()
        check_product(nope, w_uk, seen["q_latent"])
        q = rounded("q_latent", seen["q_latent"], (g.kv_lora_rank,))
        k = rounded("k_latent", call["latent"], (g.kv_lora_rank,))
        if g.qk_rope_head_dim:
            q_rope = call["q"][..., g.qk_nope_head_dim :]
            q = np.concatenate([q, rounded("q_rope", q_rope, (g.qk_rope_head_dim,))], -1)
            k = np.concatenate([k, rounded("k_rope", call["rope"], (g.qk_rope_head_dim,))], -1)
        v, v_name, got = call["latent"], "v_latent", seen["latent"]
        check_product(got.double().numpy(), w_uv.swapaxes(1, 2), output)
    scale, p_format = float(call["scale"]), formats["p"]
    v_how = oracle.Operand(formats["v"], (float(attention.quantizer(v_name)._amax),))
    result = oracle.attention(q, k, v, scale=scale, causal=True, v_how=v_how, p_format=p_format)
    assert oracle.reference_margin(result) > 1e-5, "M itself is undecided: choose another seed"
    bound = oracle.float32_bound(result, q, k, scale, p_format)
    error = np.abs(got.double().numpy() - result.out)
    assert error.shape == bound.out.shape
    assert (error <= bound.out).all(), (form, float((error - bound.out).max()))
    # The bound must say something: rounding to the formats moves far more than it allows.
    assert bound.open_decisions <= max(4, 0.03 * bound.elements)
    plain = call["latent"] if form == "absorbed" else call["v"]
    weights = np.exp(result.scores - result.lse[..., None])
    unrounded = np.einsum("bhqk,bhkd->bhqd", weights, plain.expand(-1, heads, -1, -1).numpy())
    assert np.median(bound.out) < 0.2 * np.median(np.abs(unrounded - result.out))


def check_product(x: oracle.F64, weight: oracle.F64, got: Tensor) -> None:
    """[batch, heads, rows, n] @ [heads, n, m], summed in fp32 in any order."""
    assert got.dtype == torch.float32
    want = np.einsum("bhqn,hnm->bhqm", x, weight)
    size = np.einsum("bhqn,hnm->bhqm", np.abs(x), np.abs(weight))
    assert (np.abs(got.double().numpy() - want) <= gamma(x.shape[-1] + 1) * size).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_the_oracle(family: str) -> None:
    # A seed under which no row's largest score lies so near an integer that fp32 decides M.
    seed = {"deepseek_v2": 2}.get(family, 1)
    check_layers(family_model(family), token_ids(2, 21, seed=seed), NVFP4)


@pytest.mark.parametrize("formats", [NVFP4, MIXED, FP8], ids=["nvfp4", "mixed", "fp8"])
@pytest.mark.parametrize(
    "dims",
    [
        (512, 128, 64, 128),
        (512, 192, 64, 256),
        (256, 64, 32, 64),
        (256, 64, 64, 128),
        (128, 64, 32, 64),
        (32, 16, 8, 16),
        (40, 24, 8, 20),  # no width that 16 divides
    ],
    ids=str,
)
def test_every_geometry_equals_the_oracle(
    dims: tuple[int, int, int, int], formats: dict[str, Any]
) -> None:
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    model = make_model(
        num_attention_heads=2, num_key_value_heads=2, q_lora_rank=None if dims[0] == 256 else 24,
        **ONE_LAYER, **dict(zip(names, dims, strict=True)),
    )  # fmt: skip
    check_layers(model, token_ids(1, 37), formats)


class NoRotation(nn.Module):
    """Rotary embedding of width 0, which transformers' own cannot build."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        empty = x.new_empty(*position_ids.shape, 0)
        return empty, empty


def test_rope_width_zero() -> None:
    model = make_model(qk_rope_head_dim=0, **ONE_LAYER)
    model.model.rotary_emb = NoRotation()
    ids = token_ids(1, 37)
    wanted = logits(model, ids)
    exact = copy.deepcopy(model)
    quantize(exact, **EXACT)
    with use_form(exact, "absorbed"):
        assert close(logits(exact, ids), wanted)
    check_layers(model, ids, NVFP4)
    assert not any(name.endswith("_rope") for name in amaxes(model))


def test_absorbed_query_rounded_to_the_model_dtype() -> None:
    seen = {}
    for setting in ("float32", "model"):
        model = make_model(dtype=torch.bfloat16, **ONE_LAYER)
        quantize(model, token_ids(1, 20), **NVFP4, absorbed_query=setting)
        attention = next(iter(quant_mla_layers(model).values()))
        x = torch.randn(1, 4, 20, 24).bfloat16()
        seen[setting] = attention.absorbed_query(x)[0]
        assert seen[setting].dtype == torch.float32
    assert torch.equal(seen["float32"].bfloat16().float(), seen["model"])
    assert not torch.equal(seen["float32"], seen["model"])


# -- padding --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sequences() -> list[Tensor]:
    return [token_ids(1, n, seed=n)[0] for n in (37, 22)]  # padding that 16 does not divide


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_padding_side_and_batch_size_change_nothing(attn: str, sequences: list[Tensor]) -> None:
    """Same amax bit for bit; same outputs at real positions."""
    model = make_model(attn=attn, **ONE_LAYER)
    correctly_rounded_linears(model)
    alone = [{"input_ids": s[None]} for s in sequences]
    quantized = {
        "alone": mtq.quantize(copy.deepcopy(model), config(**NVFP4), batch_loop(*alone)),
        "left": mtq.quantize(
            copy.deepcopy(model), config(**NVFP4), batch_loop(padded(sequences, "left"))
        ),
        "right": mtq.quantize(
            copy.deepcopy(model), config(**NVFP4), batch_loop(padded(sequences, "right"))
        ),
    }
    assert_same_amax(quantized["alone"], quantized["left"])
    assert_same_amax(quantized["alone"], quantized["right"])
    counts = [
        {k: int(o.values) for k, o in next(iter(layer_statistics(m).values())).items() if k != "p"}
        for m in quantized.values()
    ]
    assert counts[0] == counts[1] == counts[2], "padding is not counted either"
    for form in ("projected", "absorbed"):
        set_form(quantized["alone"], form)
        wanted = [logits(quantized["alone"], s[None])[0] for s in sequences]
        for side in ("left", "right"):
            batch = padded(sequences, side)
            got = logits(quantized["alone"], batch.pop("input_ids"), **batch)
            for row, want in enumerate(wanted):
                real = got[row][batch["attention_mask"][row].bool()]
                torch.testing.assert_close(real, want, rtol=1e-4, atol=1e-5)
            assert bool(got.isfinite().all())


@pytest.mark.parametrize("algorithm", ["mla_quant", "max"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_never_sets_an_amax(side: str, algorithm: str, sequences: list[Tensor]) -> None:
    """A padding token with a large rope part or query, as real tokenizers' have."""
    batch = padded(sequences, side)
    mask = batch["attention_mask"].bool()

    def inflate(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        return torch.where(mask[..., None], out, out * 1e4) if out.shape[:2] == mask.shape else out

    models = [make_model(**ONE_LAYER) for _ in range(2)]
    for model in models:
        correctly_rounded_linears(model)
    attention = models[1].model.layers[0].self_attn
    attention.kv_a_proj_with_mqa.register_forward_hook(inflate)
    attention.q_b_proj.register_forward_hook(inflate)
    for model in models:
        settings = config(**NVFP4, p_amax="calibrated") | {"algorithm": {"method": algorithm}}
        mtq.quantize(model, settings, batch_loop(batch))
    assert {name.rsplit(".", 1)[1] for name in amaxes(models[0])} == set(OPERANDS)
    assert_same_amax(*models)


# -- chunks, caches, forms ------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["projected", "absorbed"])
def test_prompt_in_one_chunk_and_in_two(form: str) -> None:
    """16 + 24 equals 40: invariance holds at multiples of 16."""
    model = make_model(**ONE_LAYER)
    correctly_rounded_linears(model)
    ids = token_ids(2, 40)
    quantize(model, ids, **NVFP4)
    set_form(model, form)
    whole = logits(model, ids)
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        parts = [
            model(input_ids=ids[:, part], past_key_values=past).logits
            for part in (slice(16), slice(16, 40))
        ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["projected", "absorbed", "auto"])
def test_decode_around_a_block_border(form: str) -> None:
    """Steps at lengths 31, 32, 33 equal the last row of a prompt of that length.

    And each operand is quantized exactly once a step.
    """
    model = make_model(**ONE_LAYER)
    correctly_rounded_linears(model)
    ids = token_ids(1, 34)
    quantize(model, ids, **NVFP4)
    past = DynamicCache(config=model.config)
    set_form(model, form)
    used = PROJECTED_OPERANDS if form == "projected" else (*ABSORBED_OPERANDS, "p")
    with torch.no_grad():
        model(input_ids=ids[:, :30], past_key_values=past)
        for length in (31, 32, 33):
            with counted(model) as calls:
                step = model(input_ids=ids[:, length - 1 : length], past_key_values=past).logits
            assert calls == {f"model.layers.0.self_attn.{name}": 1 for name in used}
            with use_form(model, "absorbed" if form == "auto" else form):
                wanted = logits(model, ids[:, :length])[:, -1:]
            torch.testing.assert_close(step, wanted, rtol=1e-4, atol=1e-5)


def test_calibrating_through_a_cache_sees_every_token_once() -> None:
    models = [make_model(**ONE_LAYER) for _ in range(2)]
    ids = token_ids(2, 40)

    def chunks(model: Any) -> None:
        past = DynamicCache(config=model.config)
        with torch.no_grad():
            for part in (slice(16), slice(16, 32), slice(32, 40)):
                model(input_ids=ids[:, part], past_key_values=past)

    for model, run in zip(models, (loop(ids), chunks), strict=True):
        correctly_rounded_linears(model)
        mtq.quantize(model, config(**NVFP4), run)
    assert_same_amax(*models)
    counts = [
        {k: int(o.values) for k, o in next(iter(layer_statistics(m).values())).items() if k != "p"}
        for m in models
    ]
    assert counts[0] == counts[1]  # P is sampled: some rows of every call


@pytest.mark.parametrize("side", ["left", "right", "all rows"])
@pytest.mark.parametrize("preallocated", [False, True])
def test_queries_counted_with_a_cache(side: str, preallocated: bool) -> None:
    """Real queries, whether the keys after the newest token are padding or empty slots."""
    lengths = [20, 12] if side != "all rows" else [18, 12]
    batch = padded(
        [token_ids(1, n, seed=n)[0] for n in lengths], side if side == "left" else "right"
    )
    if side == "all rows":
        batch = {name: nn.functional.pad(x, (0, 2)) for name, x in batch.items()}
    alone, model = make_model(**ONE_LAYER), make_model(**ONE_LAYER)
    for each in (alone, model):
        correctly_rounded_linears(each)

    def run(m: Any) -> None:
        past = StaticCache(m.config, 30) if preallocated else DynamicCache(config=m.config)
        with torch.no_grad():
            m(**batch, past_key_values=past)

    mtq.quantize(model, config(**NVFP4), run)
    rows = [{"input_ids": token_ids(1, n, seed=n)} for n in lengths]
    mtq.quantize(alone, config(**NVFP4), batch_loop(*rows))
    assert_same_amax(alone, model)
    counts = [
        {k: int(o.values) for k, o in next(iter(layer_statistics(m).values())).items() if k != "p"}
        for m in (alone, model)
    ]
    assert counts[0] == counts[1]
    for form in ("projected", "absorbed"):
        set_form(alone, form)
        set_form(model, form)
        past = StaticCache(model.config, 30) if preallocated else DynamicCache(config=model.config)
        with torch.no_grad():
            got = model(**batch, past_key_values=past).logits
        for i, row in enumerate(rows):
            real = got[i][batch["attention_mask"][i].bool()]
            torch.testing.assert_close(real, logits(alone, **row)[0], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def calibrated() -> Any:
    """Two layers, NVFP4, sdpa. Tests leave it as they find it."""
    return quantize(make_model(), token_ids(2, 40), **NVFP4)


def test_generate_in_every_form(calibrated: Any) -> None:
    ids = token_ids(2, 20)
    ids[0, :4] = 0
    mask = (ids != 0).long()
    for form in ("projected", "absorbed", "auto"):
        with use_form(calibrated, form), counted(calibrated) as calls:
            made = calibrated.generate(
                ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False
            )
        assert made.shape == (2, 26)
        assert bool((made[:, :20] == ids).all())
        operands = {name.rsplit(".", 1)[1] for name in calls}
        assert (
            operands
            == {
                "projected": set(PROJECTED_OPERANDS),
                "absorbed": {*ABSORBED_OPERANDS, "p"},
                "auto": set(OPERANDS),
            }[form]
        )


def test_generate_with_a_preallocated_cache(calibrated: Any) -> None:
    """Empty slots hold no token: they enter no block and no scale."""
    ids = token_ids(2, 20)
    ids[0, :4] = 0
    settings = {
        "attention_mask": (ids != 0).long(), "max_new_tokens": 6, "min_new_tokens": 6,
        "do_sample": False,
    }  # fmt: skip
    for form in ("projected", "absorbed", "auto"):
        with use_form(calibrated, form):
            want = calibrated.generate(ids, **settings)
            got = calibrated.generate(
                ids, cache_implementation="static", disable_compile=True, **settings
            )
        assert torch.equal(got, want), form


def test_form_switching(calibrated: Any) -> None:
    ids = token_ids(1, 20)
    projected = logits(calibrated, ids)
    with use_form(calibrated, "absorbed"):
        absorbed = logits(calibrated, ids)
        with use_form(calibrated, "auto"):
            assert torch.equal(logits(calibrated, ids), projected), "a prompt is projected"
        assert torch.equal(logits(calibrated, ids), absorbed)
    assert torch.equal(logits(calibrated, ids), projected)
    assert not torch.equal(projected, absorbed)
    with pytest.raises(RuntimeError, match="inside"), use_form(calibrated, "absorbed"):
        raise RuntimeError("inside")
    assert torch.equal(logits(calibrated, ids), projected), "restored after an error"
    with pytest.raises(ConfigError, match="projected, absorbed or auto, got 'decode'"):
        set_form(calibrated, "decode")  # type: ignore[arg-type]
    with pytest.raises(CalibrationError, match=r"mtq\.quantize"):
        set_form(make_model(), "absorbed")


def test_only_operands(calibrated: Any) -> None:
    ids = token_ids(1, 20)
    everything = logits(calibrated, ids)
    layer = "model.layers.1.self_attn"
    with (
        only_operands(calibrated, lambda name, operand: name == layer and operand == "k"),
        counted(calibrated) as calls,
    ):
        one = logits(calibrated, ids)
    assert calls == {f"{layer}.k": 1}
    assert not torch.equal(one, everything)
    assert torch.equal(logits(calibrated, ids), everything)


def test_recipe_of_one_operand_quantizes_nothing_else() -> None:
    model = make_model(num_hidden_layers=1)
    ids = token_ids(1, 20)
    quantize(model, ids, k="fp8")
    for form, names in (("projected", ["k"]), ("absorbed", ["k_latent", "k_rope"])):
        with use_form(model, form), counted(model) as calls:
            logits(model, ids)
        assert calls == {f"model.layers.0.self_attn.{n}": 1 for n in names}
    on = [n for n, m in model.named_modules() if isinstance(m, TensorQuantizer) and m.is_enabled]
    assert all(n.endswith(QUANTIZER_SUFFIX) for n in on)
    assert len(on) == 3


class OldAttention(nn.Module):
    """DeepSeek-V3's attention as transformers wrote it up to 5.14: expand first, then cache."""

    def __init__(self, new: Any) -> None:
        super().__init__()
        self.__dict__.update({k: v for k, v in new.__dict__.items() if not k.startswith("_")})
        for name, child in new.named_children():
            setattr(self, name, child)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as source

        batch, length = hidden_states.shape[:2]
        widths = [self.kv_lora_rank, self.qk_rope_head_dim]
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q = q.view(batch, length, -1, self.qk_head_dim).transpose(1, 2)
        q_pass, q_rot = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        k_pass, k_rot = self.kv_a_proj_with_mqa(hidden_states).split(widths, dim=-1)
        both = self.kv_b_proj(self.kv_a_layernorm(k_pass))
        both = both.view(batch, length, self.num_heads, -1).transpose(1, 2)
        k_pass, v = both.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        k_rot = k_rot.view(batch, 1, length, self.qk_rope_head_dim)
        q_rot, k_rot = source.apply_rotary_pos_emb_interleave(q_rot, k_rot, *position_embeddings)
        q = torch.cat([q_pass, q_rot], -1)
        k = torch.cat([k_pass, k_rot.expand(-1, self.num_heads, -1, -1)], -1)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        interface = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, p = interface(self, q, k, v, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(batch, length, -1).contiguous()), p


def old_model(**changes: Any) -> tuple[Any, Any]:
    """A model and its twin whose attention caches expanded keys and values."""
    new = make_model(**changes)
    old = copy.deepcopy(new)
    for layer in old.model.layers:
        layer.self_attn = OldAttention(layer.self_attn)
    return new, old


def test_transformers_that_caches_expanded_keys() -> None:
    new, old = old_model(**ONE_LAYER)
    correctly_rounded_linears(new)
    correctly_rounded_linears(old)
    ids = token_ids(2, 34)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    plain = [logits(old, ids, cache=c) for c in (False, True)]
    assert close(plain[0], logits(new, ids))
    for model in (new, old):
        quantize(model, ids, **NVFP4)
    assert_same_amax(new, old)
    for form in ("projected", "absorbed", "auto"):
        set_form(new, form)
        set_form(old, form)
        for cache in (False, True):
            for kwargs in ({}, {"attention_mask": mask}):
                got = logits(old, ids, cache=cache, **kwargs)
                want = logits(new, ids, cache=cache, **kwargs)
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    with only_operands(old, lambda *_: False):
        for cache, want in zip((False, True), plain, strict=True):
            assert torch.equal(logits(old, ids, cache=cache), want)


# -- numbers --------------------------------------------------------------------------------------


def constant_query(model: Any, value: float) -> None:
    """Every query value of layer 0 becomes a constant."""
    model.model.layers[0].self_attn.q_b_proj.register_forward_hook(
        lambda _, __, out: torch.full_like(out, value)
    )


@pytest.mark.parametrize("q", ["none", "fp8", "nvfp4"])
def test_fp16_model_whose_absorbed_query_leaves_fp16(q: str) -> None:
    model = make_model(dtype=torch.float16, **ONE_LAYER)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        weight = attention.kv_b_proj.weight.view(4, 32, 32)
        weight[:, :16] = 16.0
        attention.kv_a_layernorm.weight.fill_(2.0**-7)
    constant_query(model, 300.0)
    ids = token_ids(2, 20)
    quantize(model, ids, **NVFP4 | {"q": q})
    layer = next(iter(quant_mla_layers(model).values()))
    reached = layer.absorbed_query(torch.full((1, 4, 1, 24), 300.0, dtype=torch.float16))[0]
    assert float(reached.detach().max()) == 76800.0
    if q != "none":
        assert float(layer.quantizer("q_latent")._amax) == 76800.0
    for form in ("projected", "absorbed"):
        with use_form(model, form):
            for cache in (False, True):
                assert bool(logits(model, ids, cache=cache).isfinite().all())


PLACES = {
    "q_b_proj": {"q", "q_latent", "q_rope"},
    "kv_a_layernorm": {"k", "v", "k_latent", "v_latent"},
    "kv_a_proj_with_mqa": {"k", "k_rope"},
}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("place", PLACES)
def test_one_nonfinite_value(place: str, bad: float) -> None:
    """It never sets an amax. NaN stays NaN for every query that reads it; Inf saturates."""
    position, ids = 9, token_ids(1, 20)
    clean, dirty = make_model(**ONE_LAYER), make_model(**ONE_LAYER)
    module = getattr(dirty.model.layers[0].self_attn, place)

    def spoil(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        out = out.clone()
        out[0, position, -1] = bad  # of a query and of kv_a_proj: in the rope part
        if place == "q_b_proj":
            out[0, position, 0] = bad
        return out

    for model in (clean, dirty):
        correctly_rounded_linears(model)
    module.register_forward_hook(spoil)
    quantize(clean, ids, **NVFP4)
    quantize(dirty, ids, **NVFP4)
    without = amaxes(clean)
    for name, amax in amaxes(dirty).items():
        assert bool(amax.isfinite()), name
        # The spoilt value itself may have been the largest.
        assert float(amax) <= float(without[name]), name
    statistics = next(iter(layer_statistics(dirty).values()))
    found = {name for name, o in statistics.items() if int(o.nonfinite)}
    assert PLACES[place] <= found <= PLACES[place] | {"p"}
    for form in ("projected", "absorbed"):
        with use_form(dirty, form):
            got = logits(dirty, ids)[0].isfinite().all(-1)
        expands = place == "kv_a_layernorm" and form == "projected"
        if bad != bad or expands:
            # 0 times NaN is NaN: earlier rows of a product may be lost too, later ones must be.
            reading = [position] if place == "q_b_proj" else list(range(position, 20))
            if not expands or bad != bad:
                assert not bool(got[reading].any()), (form, got)
            if place != "kv_a_layernorm":
                others = [i for i in range(20) if i not in reading]
                assert bool(got[others].all()), (form, got)
        else:
            assert bool(got.all()), (form, got)


def test_latent_norm_of_zero() -> None:
    """amax 0 gives zeros, no NaN."""
    model = make_model(**ONE_LAYER)
    with torch.no_grad():
        model.model.layers[0].self_attn.kv_a_layernorm.weight.zero_()
    ids = token_ids(2, 20)
    for formats in (NVFP4, FP8):
        quantized = quantize(copy.deepcopy(model), ids, **formats)
        found = {n.rsplit(".", 1)[1]: float(a) for n, a in amaxes(quantized).items()}
        assert found["k_latent"] == found["v_latent"] == found["v"] == 0.0
        assert found["k_rope"] > 0
        outputs: list[Tensor] = []
        attention = next(iter(quant_mla_layers(quantized).values()))
        attention.o_proj.register_forward_pre_hook(
            lambda _, args, seen=outputs: seen.append(args[0])
        )
        for form in ("projected", "absorbed"):
            with use_form(quantized, form):
                assert bool(logits(quantized, ids).isfinite().all())
        assert all(not bool(out.any()) for out in outputs)


def moe_model() -> Any:
    """All tokens go to experts 0 and 1 of four."""
    model = make_model(num_hidden_layers=1, first_k_dense_replace=0)
    with torch.no_grad():
        model.model.layers[0].mlp.gate.e_score_correction_bias[:] = torch.tensor([9.0, 9, 0, 0])
    return model


def test_experts_that_no_token_reaches_are_listed() -> None:
    """Experts that are linear layers, as in remote code: their inputs were never seen."""
    model = moe_model()
    experts = model.model.layers[0].mlp.experts
    experts.unreached = nn.ModuleList(nn.Linear(64, 32) for _ in range(5))
    ids = token_ids(2, 20)
    with pytest.warns(UncalibratedWarning, match=r"5 quantizers .* saw no calibration") as caught:
        mtq.quantize(model, config(weights="fp8", **NVFP4), loop(ids))
    names = uncalibrated_quantizers(model)
    prefix = "model.layers.0.mlp.experts.unreached"
    assert names == [f"{prefix}.{i}.input_quantizer" for i in range(5)]
    shown = [str(w.message) for w in caught if issubclass(w.category, UncalibratedWarning)]
    assert len(shown) == 1
    assert all(name in shown[0] for name in names)
    assert bool(logits(model, ids).isfinite().all())


def test_fused_experts_that_no_token_reaches_are_calibrated() -> None:
    """ModelOpt takes their weights' amax from the weights; all share one input quantizer."""
    model = moe_model()
    ids = token_ids(2, 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncalibratedWarning)
        mtq.quantize(model, config(weights="fp8", **NVFP4), loop(ids))
    assert uncalibrated_quantizers(model) == []
    with torch.no_grad():
        model.model.layers[0].mlp.gate.e_score_correction_bias.neg_()
    assert bool(logits(model, ids).isfinite().all()), "experts 2 and 3, which saw no token"


@pytest.mark.parametrize("form", ["projected", "absorbed"])
@pytest.mark.parametrize("kind", ["causal", "bool", "float"])
def test_five_queries_over_three_keys(calibrated: Any, form: str, kind: str) -> None:
    """Bottom-right alignment: queries before the first key give exactly 0."""
    attention = next(iter(quant_mla_layers(calibrated).values()))
    latent, rope = torch.randn(1, 1, 3, 32), torch.randn(1, 1, 3, 8)
    q = torch.randn(1, 4, 5, 24)
    k, v = attention.expand_kv(latent, rope)
    reach = torch.arange(3) <= torch.arange(5)[:, None] - 2
    mask = None if kind == "causal" else reach[None, None]
    if kind == "float":
        mask = torch.zeros(1, 1, 5, 3).masked_fill(~reach, torch.finfo(torch.float32).min)
    with use_form(calibrated, form), attention._routed(), torch.no_grad():
        assert attention._call is not None
        attention._call.latent, attention._call.rope = latent, rope
        out, _ = attention.attend(q, k, v, mask, 0.2)
        first, _ = attention.attend(q[:, :, 2:3], k[:, :, :1], v[:, :, :1], None, 0.2)
    assert out.shape == (1, 5, 4, 16)
    assert not bool(out[:, :2].any())
    assert bool(out[:, 2:].isfinite().all())
    assert bool(out[:, 2:].any(-1).all())
    assert first.shape == (1, 1, 4, 16)


@pytest.mark.parametrize("form", ["projected", "absorbed"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_masks_of_every_shape_mean_the_same(calibrated: Any, form: str, side: str) -> None:
    """Flash attention's [batch, keys], and [batch, 1, queries, keys] of bools and of floats."""
    attention = next(iter(quant_mla_layers(calibrated).values()))
    latent, rope, q = torch.randn(2, 1, 19, 32), torch.randn(2, 1, 19, 8), torch.randn(2, 4, 19, 24)
    k, v = attention.expand_kv(latent, rope)
    real = torch.ones(2, 19, dtype=torch.bool)
    real[1, :5] = False
    real = real if side == "left" else real.flip(1)
    full = real[:, None, None, :] & torch.ones(19, 19).tril().bool()
    floats = torch.zeros(full.shape).masked_fill(~full, torch.finfo(torch.float32).min)
    outputs = []
    for mask in (full, floats, floats.masked_fill(~full, -torch.inf), real, real.long()):
        with use_form(calibrated, form), attention._routed(), torch.no_grad():
            assert attention._call is not None
            attention._call.latent, attention._call.rope = latent, rope
            outputs.append(attention.attend(q, k, v, mask, 0.2)[0])
    for out in outputs[1:]:
        assert torch.equal(out[real], outputs[0][real])
    short = real[1]
    with use_form(calibrated, form), attention._routed(), torch.no_grad():
        assert attention._call is not None
        attention._call.latent, attention._call.rope = latent[1:, :, short], rope[1:, :, short]
        parts = (x[1:, :, short] for x in (q, k, v))
        alone, _ = attention.attend(*parts, None, 0.2)
    torch.testing.assert_close(outputs[0][1, short], alone[0], rtol=1e-5, atol=1e-6)


def test_additive_bias_is_added_to_the_scores() -> None:
    """A float mask may hold more than 0 and -inf."""
    attention = next(iter(quant_mla_layers(quantize(make_model(**ONE_LAYER), **EXACT)).values()))
    latent, rope, q = torch.randn(2, 1, 9, 32), torch.randn(2, 1, 9, 8), torch.randn(2, 4, 5, 24)
    bias = torch.randn(2, 1, 5, 9)
    bias[1, ..., :3] = torch.finfo(torch.float32).min
    with torch.no_grad():
        k, v = attention.expand_kv(latent, rope)
        want = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.2)
        for form in ("projected", "absorbed"):
            attention.form = form
            with attention._routed():
                assert attention._call is not None
                attention._call.latent, attention._call.rope = latent, rope
                out, _ = attention.attend(q, k, v, bias, 0.2)
            torch.testing.assert_close(out.transpose(1, 2), want, rtol=1e-4, atol=1e-5)


def test_sparsity_drops_scores_outside_the_window() -> None:
    ids = token_ids(1, 40)
    outputs = {}
    for recent in (0, 8, 1 << 20):
        model = make_model(**ONE_LAYER)
        quantize(model, sparsity={"n": 2, "m": 4, "dense_recent_tokens": recent})
        for form in ("projected", "absorbed"):
            with use_form(model, form):
                outputs[recent, form] = logits(model, ids)[0]
        assert close(outputs[recent, "projected"], outputs[recent, "absorbed"])
    dense = outputs[1 << 20, "projected"]
    same = (outputs[8, "projected"] - dense).abs().amax(-1) < 1e-4
    assert bool(same[:8].all()) and not bool(same[12:].any())
    same = (outputs[0, "projected"] - dense).abs().amax(-1) < 1e-4
    assert bool(same[:2].all()) and not bool(same[4:].all())


def test_gradients_pass_straight_through(calibrated: Any) -> None:
    embeds = torch.randn(1, 12, 64, requires_grad=True)
    for form in ("projected", "absorbed"):
        with use_form(calibrated, form):
            calibrated(inputs_embeds=embeds, use_cache=False).logits.square().sum().backward()
        grad = embeds.grad
        assert grad is not None and bool(grad.isfinite().all()) and bool(grad.any(-1).all())
        embeds.grad = None


# -- calibration ----------------------------------------------------------------------------------


@pytest.mark.parametrize("attn", ["eager", "sdpa", "flex_attention"])
def test_every_quantizer_ran(attn: str) -> None:
    """Also with a mask of flex attention, which is no tensor."""
    ids = token_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    real = mask.bool()
    reference = make_model(num_hidden_layers=1)
    model = make_model(attn=attn, num_hidden_layers=1)
    for each in (reference, model):
        correctly_rounded_linears(each)
        with torch.compiler.set_stance("force_eager"):
            mtq.quantize(each, config(**NVFP4), loop(ids, attention_mask=mask))
    assert set(amaxes(model)) == {
        f"model.layers.0.self_attn.{operand}" for operand in OPERANDS if operand != "p"
    } | ({"model.layers.0.self_attn.p"} & set(amaxes(model)))
    assert_same_amax(model, reference)
    with counted(model) as calls, torch.compiler.set_stance("force_eager"):
        for form in ("projected", "absorbed"):
            set_form(model, form)
            set_form(reference, form)
            got = logits(model, ids, attention_mask=mask)[real]
            want = logits(reference, ids, attention_mask=mask)[real]
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert {name.rsplit(".", 1)[1] for name in calls} == set(OPERANDS)


def test_flash_attention_that_is_not_installed_is_refused_by_transformers() -> None:
    try:
        import flash_attn  # noqa: F401

        pytest.skip("flash_attn is installed")
    except ImportError:
        pass
    with pytest.raises(ImportError, match="FlashAttention2"):
        make_model(attn="flash_attention_2")


def test_eager_returns_probabilities(calibrated: Any) -> None:
    model = quantize(make_model(attn="eager", num_hidden_layers=1), token_ids(1, 20), **NVFP4)
    batch = padded([token_ids(1, 20)[0], token_ids(1, 12)[0]], "left")
    for form in ("projected", "absorbed"):
        with use_form(model, form), torch.no_grad():
            p = model(**batch, output_attentions=True).attentions[0]
        assert p.shape == (2, 4, 20, 20)
        assert not bool(p[1, :, 8:, :8].any()), "padding keys get nothing, where they stood"
        assert not bool(p.triu(1).any())
        # Sums differ from 1 by what rounding P changed: an eighth at most for E2M1.
        assert bool(((p[0].sum(-1) - 1).abs() < 0.25).all())


@pytest.mark.parametrize("attention", [NVFP4, {"k": "fp8"}], ids=["all", "k"])
def test_loop_that_runs_no_data(attention: dict[str, Any]) -> None:
    ids = token_ids(1, 20)
    with pytest.raises(CalibrationError, match="forward_loop is None"):
        mtq.quantize(make_model(**ONE_LAYER), config(**attention), None)
    with pytest.raises(CalibrationError, match=r"never reached.*self_attn\.k"):
        mtq.quantize(make_model(**ONE_LAYER), config(**attention), lambda _: None)
    with pytest.raises(CalibrationError, match="never reached"):
        mtq.quantize(
            make_model(**ONE_LAYER),
            config(**attention),
            loop(ids, attention_mask=torch.zeros_like(ids)),
        )


def test_quantizer_without_amax_is_an_error_not_a_silent_one() -> None:
    model = make_model(**ONE_LAYER)
    with pytest.raises(CalibrationError):
        mtq.quantize(model, config(**NVFP4), lambda _: None)
    with pytest.raises(CalibrationError, match="has no amax"):
        logits(model, token_ids(1, 20))


@pytest.mark.parametrize("formats", [NVFP4, MIXED, FP8], ids=["nvfp4", "mixed", "fp8"])
def test_other_calibration_algorithm_of_modelopt(formats: dict[str, Any]) -> None:
    """The same entries calibrated by ModelOpt's "max": same amax, padding left out too."""
    batch = padded([token_ids(1, 30)[0], token_ids(1, 17, seed=2)[0]], "left")
    models = [make_model() for _ in range(2)]
    mtq.quantize(models[0], config(**formats), batch_loop(batch))
    mtq.quantize(models[1], config(**formats) | {"algorithm": "max"}, batch_loop(batch))
    left, right = amaxes(models[0]), amaxes(models[1])
    assert left.keys() - {n for n in left if n.endswith(".p")} <= right.keys()
    for name in left.keys() & right.keys():
        assert float(left[name]) == float(right[name]), name
    ids = token_ids(1, 20)
    for form in ("projected", "absorbed"):
        for model in models:
            set_form(model, form)
        assert torch.equal(logits(models[0], ids), logits(models[1], ids))


@pytest.mark.parametrize("observer", ["percentile", "mse"])
def test_other_observers(observer: str) -> None:
    ids = token_ids(2, 40)
    plain = quantize(make_model(**ONE_LAYER), ids, **NVFP4)
    recipe = parse_recipe(
        {
            "name": "t",
            "attention": NVFP4,
            "observer": {"method": observer, "percentile": 99.0},
        },
        origin="t",
    )
    calls = []

    def run(model: Any) -> None:
        calls.append(1)
        loop(ids)(model)

    other = mtq.quantize(make_model(**ONE_LAYER), to_modelopt_config(recipe), run)
    assert len(calls) == (2 if observer == "mse" else 1)
    largest, found = amaxes(plain), amaxes(other)
    assert largest.keys() == found.keys()
    assert all(0 < float(found[n]) <= float(largest[n]) for n in found)
    assert any(float(found[n]) < float(largest[n]) for n in found)
    assert bool(logits(other, ids).isfinite().all())


def test_calibration_does_not_change_what_the_model_computes() -> None:
    """The forward passes that calibrate run the original attention."""
    model = make_model()
    ids = token_ids(2, 20)
    wanted = logits(model, ids)
    seen: list[Tensor] = []

    def run(m: Any) -> None:
        seen.append(logits(m, ids))

    mtq.quantize(model, config(**NVFP4), run)
    assert torch.equal(seen[0], wanted)


def test_calibrating_twice_gives_the_same() -> None:
    ids = token_ids(2, 20)
    model = quantize(make_model(**ONE_LAYER), ids, **NVFP4)
    once = {n: a.clone() for n, a in amaxes(model).items()}
    mtq.calibrate(model, config()["algorithm"], loop(ids))
    for name, amax in amaxes(model).items():
        assert torch.equal(amax, once[name])


def test_models_that_cannot_be_quantized() -> None:
    """Refused before the forward loop is called."""
    import transformers

    called = []
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            vocab_size=32,
        )
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="no MLA layer"):
        mtq.quantize(llama, config(**NVFP4), called.append)
    if hasattr(transformers, "DeepseekV32Config"):
        from tests.models import MOE, T

        sparse = transformers.DeepseekV32ForCausalLM(
            transformers.DeepseekV32Config(
                **T | MOE, index_topk=4, index_head_dim=16, index_n_heads=2
            )
        )
        with pytest.raises(UnsupportedModelError, match=r"sparse MLA layers.*indexer"):
            mtq.quantize(sparse, config(**NVFP4), called.append)
    assert called == []


def test_nested_multimodal_model() -> None:
    """Kimi K2.5: the text tower's attention is quantized, the vision tower's is left alone."""
    import transformers

    if not hasattr(transformers, "Kimi_K25Config"):
        pytest.skip("the installed transformers has no kimi_k25")
    model = transformers.AutoModelForImageTextToText.from_config(
        transformers.Kimi_K25Config(
            text_config=make_model(**ONE_LAYER).config.to_dict(),
            vision_config={
                "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2,
                "intermediate_size": 32,
            },
            projection_hidden_size=32,
        )
    ).eval()  # fmt: skip
    ids = token_ids(2, 20)
    original = logits(model, ids)
    quantize(model, ids, **NVFP4)
    assert list(quant_mla_layers(model)) == ["model.language_model.layers.0.self_attn"]
    on = [n for n, m in model.named_modules() if isinstance(m, TensorQuantizer) and m.is_enabled]
    assert all(n.endswith(QUANTIZER_SUFFIX) and "language_model" in n for n in on)
    assert not torch.equal(logits(model, ids), original)
    with only_operands(model, lambda *_: False):
        assert torch.equal(logits(model, ids), original)


def test_packed_sequences_are_refused(calibrated: Any) -> None:
    borders = torch.tensor([0, 8, 20], dtype=torch.int32)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        with pytest.raises(ConfigError, match=f"packed sequences.*{name}"):
            logits(calibrated, token_ids(1, 20), **{name: borders})


def test_attention_implementation_is_internal() -> None:
    from mla_quant.attention import ATTENTION_IMPLEMENTATION

    model = make_model(**ONE_LAYER)
    model.config._attn_implementation = ATTENTION_IMPLEMENTATION
    with pytest.raises(ConfigError, match="internal to quantized MLA layers"):
        logits(model, token_ids(1, 8))


def test_config_is_restored_after_an_error(calibrated: Any) -> None:
    attention = next(iter(quant_mla_layers(calibrated).values()))
    before = attention.config
    with pytest.raises(ConfigError):
        logits(calibrated, token_ids(1, 8), cu_seq_lens_q=torch.tensor([0, 8]))

    def fail(*_: Any) -> None:
        raise RuntimeError("half way")

    handle = attention.k_mla_quantizer.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="half way"):
        logits(calibrated, token_ids(1, 8))
    handle.remove()
    assert attention.config is before
    assert attention._call is None
    assert "expand_kv" not in attention.__dict__


# -- state and offloading -------------------------------------------------------------------------

RESTORE = """
    import sys, torch
    sys.path.insert(0, sys.argv[1])
    import modelopt.torch.opt as mto
    from mla_quant.plugin import register_with_modelopt
    from mla_quant.attention import set_form
    from tests.models import make_model, token_ids
    register_with_modelopt()
    model = mto.restore(make_model(seed=99), sys.argv[2])
    out = {}
    with torch.no_grad():
        for form in ("projected", "absorbed"):
            set_form(model, form)
            out[form] = model(input_ids=token_ids(2, 20), use_cache=False).logits
    torch.save(out, sys.argv[3])
"""


def test_save_and_restore(tmp_path: Path) -> None:
    """Bit-equal here and in a fresh process, in both forms, with all settings of the recipe."""
    ids = token_ids(2, 20)
    formats = MIXED | {
        "p_amax": 0.75, "absorbed_query": "model", "p_reference": "running_max",
        "p_tile_tokens": 16, "sparsity": {"n": 2, "m": 4, "dense_recent_tokens": 4},
    }  # fmt: skip
    model = quantize(make_model(), ids, **formats)
    mto.save(model, tmp_path / "model.pt")
    restored = mto.restore(make_model(seed=7), tmp_path / "model.pt")
    assert_same_amax(model, restored)
    wanted = {}
    for form in ("projected", "absorbed"):
        set_form(model, form)
        set_form(restored, form)
        wanted[form] = logits(model, ids)
        assert torch.equal(logits(restored, ids), wanted[form])
    for name, attention in quant_mla_layers(model).items():
        twin = quant_mla_layers(restored)[name]
        for operand in OPERANDS:
            ours, theirs = attention.quantizer(operand), twin.quantizer(operand)
            assert ours.is_enabled == theirs.is_enabled
            if ours.is_enabled:
                assert ours.backend_extra_args == theirs.backend_extra_args
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", textwrap.dedent(RESTORE), str(root)]
    subprocess.run(
        [*command, str(tmp_path / "model.pt"), str(tmp_path / "out.pt")],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
        cwd=tmp_path,
    )
    fresh = torch.load(tmp_path / "out.pt", weights_only=True)
    for form, want in wanted.items():
        assert torch.equal(fresh[form], want), form


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_weights(when: str, where: str, tmp_path: Path) -> None:
    """accelerate keeps weights on meta and loads them around each submodule's forward."""
    import accelerate

    ids = token_ids(2, 20)
    plain = quantize(make_model(), ids, **NVFP4)
    model = make_model()
    device = torch.device("cpu")

    def offload() -> None:
        if where == "disk":
            accelerate.disk_offload(model, str(tmp_path), execution_device=device)
            return
        # As `device_map` does; ModelOpt cannot read the plain dictionary of a bare cpu_offload.
        weights = accelerate.utils.OffloadedWeightsLoader(state_dict=model.state_dict())
        accelerate.cpu_offload(model, execution_device=device, state_dict=weights)

    if when == "before":
        offload()
    quantize(model, ids, **NVFP4)
    if when == "after":
        offload()
    weight = next(iter(quant_mla_layers(model).values())).kv_b_proj.weight
    assert weight.device.type == "meta"
    assert_same_amax(plain, model)
    for form in ("projected", "absorbed"):
        set_form(plain, form)
        set_form(model, form)
        for cache in (False, True):
            assert torch.equal(logits(model, ids, cache=cache), logits(plain, ids, cache=cache)), (
                form,
                cache,
            )
