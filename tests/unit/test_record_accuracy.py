"""The benchmark of what KV-cache records cost: it changes the cache's content and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks.record_accuracy import (
    facts,
    fold,
    latent_ranges,
    mla_layers,
    reading,
    synthetic,
    through_records,
    variants,
)
from mla_quant.data import TokenBatch
from mla_quant.errors import UnsupportedModelError
from mla_quant.formats import E4M3
from mla_quant.records import RECORDS, outer_scale

transformers = pytest.importorskip("transformers")
FP4 = RECORDS["nvfp4_ds_mla_432"]
IDS = torch.arange(48).reshape(2, 24)
LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """Random weights, with the latent and rope widths that records have."""
    config = transformers.DeepseekV3Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=64, v_head_dim=16,
        intermediate_size=32, first_k_dense_replace=2, vocab_size=64, max_position_embeddings=64,
        initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    built = transformers.DeepseekV3ForCausalLM(config).eval()
    if not hasattr(type(built.model.layers[0].self_attn), "expand_kv"):
        pytest.skip("transformers before 5.15 does not cache latents")
    assert isinstance(built, nn.Module)
    return built


def logits(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        found = model(input_ids=IDS, use_cache=False).logits
    assert isinstance(found, Tensor)
    return found


def nothing(_: str, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    return latent, rope


def test_a_cache_that_loses_nothing_changes_nothing(model: nn.Module) -> None:
    expected = logits(model)
    with reading(model, nothing):
        assert torch.equal(logits(model), expected)


def test_attention_reads_what_the_cache_gives(model: nn.Module) -> None:
    expected = logits(model)
    seen: dict[str, tuple[torch.Size, torch.Size]] = {}

    def zeros(name: str, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        seen[name] = (latent.shape, rope.shape)
        return torch.zeros_like(latent), torch.zeros_like(rope)

    with reading(model, zeros):
        changed = logits(model)
        # Values of zero: attention adds nothing to any token.
        with torch.inference_mode():
            hidden = model.model.layers[0].self_attn(  # type: ignore[union-attr,index]
                torch.randn(2, 24, 32), (torch.ones(1, 24, 64), torch.zeros(1, 24, 64)), None
            )[0]
    assert hidden.abs().max() == 0
    assert not torch.equal(changed, expected)
    assert seen == dict.fromkeys(LAYERS, ((48, 512), (48, 64)))
    assert torch.equal(logits(model), expected)


def test_only_the_rotated_rope_part_reaches_the_cache(model: nn.Module) -> None:
    kept: list[Tensor] = []

    def keep(_: str, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        kept.append(rope.unflatten(0, IDS.shape))
        return latent, rope

    same = torch.full_like(IDS, 7)
    with reading(model, keep), torch.inference_mode():
        model(input_ids=same, use_cache=False)
    rope = kept[0]
    # One token at all positions: its rope part turns, and keeps its length.
    torch.testing.assert_close(rope.norm(dim=-1), rope[:, :1].norm(dim=-1).expand(2, 24))
    assert (rope[:, 1:] - rope[:, :1]).norm(dim=-1).min() > 0.1 * rope[0, 0].norm()


def test_the_fold_of_a_power_of_two_leaves_the_function(model: nn.Module) -> None:
    expected = logits(model)
    batches = [TokenBatch(IDS, torch.ones_like(IDS))]
    before = latent_ranges(model, batches)
    down = {LAYERS[0]: 10, LAYERS[1]: 7}
    fold(model, down)
    try:
        assert torch.equal(logits(model), expected)
        after = latent_ranges(model, batches)
    finally:
        fold(model, {name: -k for name, k in down.items()})
    for name, k in down.items():
        assert after[name]["amax"] == before[name]["amax"] / 2**k
        assert after[name]["sigma"] == pytest.approx(before[name]["sigma"] / 2**k)
    assert torch.equal(logits(model), expected)


def test_an_outer_scale_makes_up_for_small_latents_of_the_model(model: nn.Module) -> None:
    expected = logits(model)
    batches = [TokenBatch(IDS, torch.ones_like(IDS))]
    errors = {}
    fold(model, dict.fromkeys(LAYERS, 10))
    try:
        ranges = latent_ranges(model, batches)
        outer = {name: outer_scale(r["amax"], FP4) for name, r in ranges.items()}
        for kind, scales in (("1", None), ("calibrated", outer)):
            with reading(model, through_records(FP4, scales)):
                errors[kind] = float((logits(model) - expected).norm() / expected.norm())
    finally:
        fold(model, dict.fromkeys(LAYERS, -10))
    assert 0 < errors["calibrated"] < 0.3 * errors["1"]


def test_small_latents_are_lost_without_an_outer_scale() -> None:
    lost, restored = synthetic(FP4, False, 0.001), synthetic(FP4, True, 0.001)
    assert lost["latent_error"] > 0.9
    assert lost["attention_error"] > 0.9
    assert restored["latent_error"] < 0.12
    assert restored["attention_error"] < 0.12


@pytest.mark.parametrize("name", RECORDS)
def test_every_format_reads_latents_of_sigma_1(name: str) -> None:
    for fmt, calibrated in variants([RECORDS[name]]):
        errors = synthetic(fmt, calibrated, 1.0)
        assert 0 < errors["latent_error"] < (0.04 if fmt.latent.element is E4M3 else 0.12)


def test_rows_say_which_outer_scale_they_are_for() -> None:
    names = ("fp8_ds_mla_656", "nvfp4_ds_mla_432", "nvfp4_outer_304")
    rows = [facts(*variant) for variant in variants(RECORDS[name] for name in names)]
    assert [row["outer_scale"] for row in rows] == ["none", "1", "per layer", "per token"]
    assert [row["record_bytes"] for row in rows] == [656, 432, 432, 304]


def test_a_model_without_latents_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no MLA layer"):
        mla_layers(nn.Linear(2, 2))
