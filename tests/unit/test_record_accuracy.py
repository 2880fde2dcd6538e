"""The benchmark of what KV-cache records cost: it changes the cache's content and nothing else."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.record_accuracy import (
    CACHED_OPERANDS,
    DOUBLE_RECIPES,
    SECTIONS,
    Read,
    capture,
    double,
    facts,
    fold,
    latent_ranges,
    main,
    merge,
    mla_layers,
    reading,
    synthetic,
    through_records,
    variants,
)
from mla_quant.data import TokenBatch
from mla_quant.errors import UnsupportedModelError
from mla_quant.formats import E4M3
from mla_quant.recipes import load_recipe
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


def gaussian(
    *, layers: int = 2, windows: int = 2, tokens: int = 40
) -> dict[str, tuple[Tensor, Tensor]]:
    """Latents and rope parts of other sizes in each layer; the last group of 16 tokens is open."""
    torch.manual_seed(0)
    shape = (windows, tokens)
    return {
        f"layer {i}": (torch.randn(*shape, 512) * 0.1**i, torch.randn(*shape, 64))
        for i in range(layers)
    }


def sqnr(
    latents: dict[str, tuple[Tensor, Tensor]], read: Read, recipe: str
) -> dict[str, dict[str, float | None]]:
    return double(latents, read, load_recipe(recipe).attention)


def test_capture_keeps_windows_apart(model: nn.Module) -> None:
    seen: list[Tensor] = []

    def keep(name: str, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(latent)
        return latent, rope

    batch = TokenBatch(IDS, torch.ones_like(IDS))
    with reading(model, keep):
        logits(model)
    found = capture(model, [batch, batch])
    assert list(found) == LAYERS
    for name, expected in zip(LAYERS, seen, strict=True):
        latent, rope = found[name]
        assert (latent.shape, rope.shape) == ((4, 24, 512), (4, 24, 64))
        torch.testing.assert_close(latent, expected.unflatten(0, (2, 24)).repeat(2, 1, 1))


@pytest.mark.parametrize("recipe", DOUBLE_RECIPES)
def test_over_a_cache_that_loses_nothing_only_operands_lose(recipe: str) -> None:
    for found in sqnr(gaussian(), nothing, recipe).values():
        assert found["operands"] is not None
        assert found["both"] == found["operands"]
        assert found["record"] is None


@pytest.mark.parametrize("recipe", DOUBLE_RECIPES)
def test_over_a_cache_that_loses_all_noise_is_as_large_as_signal(recipe: str) -> None:
    def zeros(_: str, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(latent), torch.zeros_like(rope)

    for found in sqnr(gaussian(), zeros, recipe).values():
        assert (found["record"], found["both"]) == (0, 0)


def test_an_nvfp4_record_read_with_the_range_of_k_is_nvfp4_k() -> None:
    latents = gaussian()
    outer = {name: outer_scale(float(x.abs().max()), FP4) for name, (x, _) in latents.items()}
    found = sqnr(latents, through_records(FP4, outer), "nvfp4_mla")
    # K has the record's blocks and scales, so that quantizing again changes nothing. V does not.
    k, v = found["k_latent"], found["v_latent"]
    assert k["both"] == pytest.approx(k["record"], abs=1e-3)
    assert k["operands"] == pytest.approx(k["record"], abs=1e-3)
    assert v["record"] == k["record"]
    assert v["both"] is not None and v["record"] is not None and v["operands"] is not None
    assert v["both"] < min(v["record"], v["operands"]) - 2


def test_k_has_blocks_of_features_and_v_of_tokens_of_a_window() -> None:
    small = 0.04  # nothing in a block whose largest value is 1
    by_feature, by_window = torch.ones(2, 24, 512), torch.ones(2, 24, 512)
    by_feature[..., ::2] = small
    by_window[1] = small
    rope = torch.ones(2, 24, 64)
    lost = 10 * math.log10((1 + small**2) / small**2)
    features = sqnr({"layer": (by_feature, rope)}, nothing, "nvfp4_mla")
    assert features["k_latent"]["operands"] == pytest.approx(lost)
    for found in (
        features["v_latent"],
        *sqnr({"layer": (by_window, rope)}, nothing, "nvfp4_mla").values(),
    ):
        assert found["operands"] is None or found["operands"] > lost + 20


def test_a_section_measured_again_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    then = {"hardware": "one", "torch": "1", "date": "then"}
    now = {"hardware": "other", "torch": "2", "date": "now"}
    earlier = merge(None, then, {"synthetic": {"rows": []}})
    assert earlier == {**then, "synthetic": {"rows": []}}
    out = tmp_path / "result.json"
    out.write_text(json.dumps(earlier), encoding="utf-8")

    values = {
        operand: {"operands": 20, "record": None, "both": 1.26} for operand in CACHED_OPERANDS
    }
    row = {**facts(FP4, True), "recipe": "nvfp4_mla", "sqnr_db": values}
    section = {"dtype": "float32", "tokens": 8, "rows": [row]}
    place = "benchmarks.record_accuracy."
    monkeypatch.setattr(place + "windows", lambda *_: [])
    monkeypatch.setattr(place + "measure_double", lambda _: section)
    monkeypatch.setattr(place + "hardware", lambda _: now)
    monkeypatch.setitem(SECTIONS, "synthetic", lambda _, run: [f"synthetic: {run['date']}"])
    monkeypatch.setattr("sys.argv", ["record_accuracy", "--only", "double", "--out", str(out)])
    main()
    assert json.loads(out.read_text(encoding="utf-8")) == {**earlier, "double": {**now, **section}}
    printed = capsys.readouterr().out
    assert printed.startswith("synthetic: then\n\n")
    assert "other, float32, torch 2, now." in printed
    assert "| `nvfp4_ds_mla_432` | 432 | `nvfp4_mla` | 20.0 / – / 1.3 |" in printed


def test_a_model_without_latents_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no MLA layer"):
        mla_layers(nn.Linear(2, 2))
