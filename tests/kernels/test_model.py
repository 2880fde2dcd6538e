"""Quantized Hugging Face layers compute the same with the fused kernels as in plain torch."""

from __future__ import annotations

from typing import Any

import modelopt.torch.quantization as mtq
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from mla_quant import fused, kernels
from mla_quant.attention import QuantMLAAttention, use_form
from mla_quant.plugin import register_with_modelopt
from mla_quant.recipes import parse_recipe, to_modelopt_config
from tests.models import loop, make_model, token_ids

register_with_modelopt()
FORMS = ["projected", "absorbed"]
NVFP4 = dict.fromkeys("qkpv", "nvfp4")
SPARSE = {"n": 2, "m": 4, "dense_sink_tokens": 2, "dense_recent_tokens": 6}


def quantized(device: torch.device, **settings: Any) -> Any:
    model = make_model(attn="sdpa", num_hidden_layers=1, kv_lora_rank=32, qk_rope_head_dim=16)
    recipe = parse_recipe({"name": "test", "attention": settings}, origin="test")
    return mtq.quantize(model, to_modelopt_config(recipe), loop(token_ids(2, 40))).to(device)


def both(monkeypatch: Any, run: Any) -> tuple[Tensor, Tensor, int]:
    """A run in plain torch, the same by kernels, and how often kernels were used in it."""
    used = 0
    original = QuantMLAAttention._fused

    def counting(self: QuantMLAAttention, *args: Any) -> Any:
        nonlocal used
        out = original(self, *args)
        used += out is not None
        return out

    monkeypatch.setattr(QuantMLAAttention, "_fused", counting)
    results = []
    for available in (False, True):
        monkeypatch.setattr(fused, "kernels_serve", lambda _, a=available: a)
        with torch.inference_mode():
            results.append(run())
    return results[0], results[1], used


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "settings",
    [
        NVFP4,
        dict.fromkeys("qkpv", "fp8"),
        {**NVFP4, "sparsity": SPARSE},
        {"k": "nvfp4", "p": "fp8"},
        {**NVFP4, "absorbed": {"q_rope": "fp8", "k_rope": "fp8"}},
    ],
    ids=["nvfp4", "fp8", "sparse", "mixed", "rope"],
)
def test_plain_batch(form, settings, device, monkeypatch) -> None:
    model = quantized(device, **settings)
    ids = token_ids(2, 37).to(device)
    with use_form(model, form):
        plain, by_kernels, used = both(monkeypatch, lambda: model(ids).logits)
    assert used == 1
    torch.testing.assert_close(by_kernels, plain, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(form, side, device, monkeypatch) -> None:
    model = quantized(device, **NVFP4)
    ids, mask = token_ids(2, 37).to(device), torch.ones(2, 37, dtype=torch.long, device=device)
    gap = slice(0, 9) if side == "left" else slice(28, 37)
    mask[1, gap] = 0
    with use_form(model, form):
        plain, by_kernels, used = both(
            monkeypatch, lambda: model(ids, attention_mask=mask).logits[mask.bool()]
        )
    assert used == 1
    torch.testing.assert_close(by_kernels, plain, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("form", ["auto", *FORMS])
def test_through_a_cache(form, device, monkeypatch) -> None:
    """A prompt in two chunks, then single tokens."""
    model = quantized(device, **NVFP4)
    ids = token_ids(1, 40).to(device)

    def run() -> Tensor:
        cache, outs, done = DynamicCache(config=model.config), [], 0
        for length in (20, 17, 1, 1, 1):
            part = ids[:, done : done + length]
            outs.append(model(part, past_key_values=cache, use_cache=True).logits)
            done += length
        return torch.cat(outs, dim=1)

    with use_form(model, form):
        plain, by_kernels, used = both(monkeypatch, run)
    assert used == 5
    torch.testing.assert_close(by_kernels, plain, rtol=1e-4, atol=2e-5)


def test_other_masks_keep_to_plain_torch(device, monkeypatch) -> None:
    """A mask with a hole in the middle is no causal one."""
    model = quantized(device, **NVFP4)
    ids, mask = token_ids(1, 30).to(device), torch.ones(1, 30, dtype=torch.long, device=device)
    mask[0, 10:13] = 0
    plain, by_kernels, used = both(monkeypatch, lambda: model(ids, attention_mask=mask).logits)
    assert used == 0
    assert torch.equal(plain, by_kernels)


def test_gradients_and_probabilities_keep_to_plain_torch(device, monkeypatch) -> None:
    monkeypatch.setattr(fused, "kernels_serve", lambda _: True)
    model = quantized(device, **NVFP4)
    embedded = model.get_input_embeddings()(token_ids(1, 20).to(device)).detach().requires_grad_()
    model(inputs_embeds=embedded).logits.sum().backward()
    assert embedded.grad is not None
    assert bool(embedded.grad.abs().sum() > 0)


def test_a_growing_cache_keeps_its_kernel(monkeypatch) -> None:
    """A kernel is compiled for a size of page, which once was the cache's length."""
    shapes = []
    original = kernels.decode_attention

    def decode_attention(q: Tensor, cache: Tensor, *args: Any, **kwargs: Any) -> Any:
        shapes.append(cache.shape[1:])
        return original(q, cache, *args, **kwargs)

    monkeypatch.setattr(kernels, "decode_attention", decode_attention)
    operands = {name: ("none", 1.0) for name in fused.ABSORBED}
    for keys in (1, 63, 64, 65):
        new = torch.zeros
        out = fused.absorbed(
            new(1, 2, 1, 32), new(1, 2, 1, 16), new(1, 1, keys, 32), new(1, 1, keys, 16), operands,
            scale=1.0, sparsity=None, starts=torch.tensor([keys - 1], dtype=torch.int32),
        )  # fmt: skip
        assert out.shape == (1, 2, 1, 32)
    assert len(set(shapes)) == 1
