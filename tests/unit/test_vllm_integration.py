"""What the vLLM integration decides without vLLM: which settings a model has, for which layer."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from mla_quant.errors import CheckpointError, ConfigError
from mla_quant.integrations import vllm as integration
from mla_quant.recipes import OPERANDS, load_recipe
from mla_quant.records import RECORDS
from mla_quant.settings import LayerSettings, OperandSettings, Settings


def settings(fmt: str = "nvfp4", amax: float | None = 4.0, **formats: str) -> Settings:
    operands = {
        name: OperandSettings(
            format=formats.get(name, fmt), amax=None if formats.get(name) == "none" else amax
        )
        for name in OPERANDS
    }
    names = [f"model.layers.{i}.self_attn" for i in (0, 1, 10)]
    return Settings(
        producer={"name": "test", "version": "0"},
        model={"source": "test", "family": "deepseek_v3", "geometry": {}},
        recipe=load_recipe("nvfp4_mla"),
        layers=dict.fromkeys(names, LayerSettings.from_operands(operands)),
    )


def test_settings_are_found_beside_the_weights(tmp_path) -> None:
    assert integration.find_settings(str(tmp_path)) is None
    (tmp_path / "mla_quant.json").write_text(settings().model_dump_json())
    assert integration.find_settings(str(tmp_path)) == settings()
    (tmp_path / "mla_quant.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        integration.find_settings(str(tmp_path))


@pytest.mark.parametrize("model", ["nobody/has-this-model", "neither a folder / nor an id"])
def test_models_that_are_not_there_have_none(model: str) -> None:
    assert integration.find_settings(model) is None


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("model.layers.1.self_attn.attn", "model.layers.1.self_attn"),
        ("model.layers.1.self_attn.mla_attn", "model.layers.1.self_attn"),
        ("language_model.model.layers.10.self_attn.attn", "model.layers.10.self_attn"),
        ("model.layers.2.self_attn.attn", None),
        ("model.layers.0.self_attn.indexer", None),
        ("encoder", None),
    ],
)
def test_names_of_layers(name: str, found: str | None) -> None:
    assert integration.hugging_face_name(name, settings().layers) == found


def test_formats_of_another_recipe_with_the_amax_that_are_there() -> None:
    changed = integration.with_recipe(settings(), load_recipe("fp8_mla"))
    layer = changed.layers["model.layers.0.self_attn"]
    assert {layer.operand(name).format for name in OPERANDS} == {"fp8"}
    assert layer.operand("k_latent").amax == 4.0
    # P's is the recipe's own.
    assert layer.p.amax == load_recipe("fp8_mla").attention.p_amax
    with pytest.raises(ConfigError, match=r"no amax for 3 operands.*layers\.0\.self_attn\.q"):
        integration.with_recipe(settings(q="none"), load_recipe("fp8_mla"))


def loaded_with(tmp_path, monkeypatch, layer_name: str, *, draft: bool, additional=None):
    (tmp_path / "mla_quant.json").write_text(settings().model_dump_json())
    layer = torch.nn.Identity()
    layer.layer_name = layer_name
    model_config = SimpleNamespace(
        model=str(tmp_path), revision=None, loaded=torch.nn.Sequential(layer)
    )
    speculative = SimpleNamespace(draft_model_config=model_config if draft else None)
    vllm_config = SimpleNamespace(
        additional_config=additional or {},
        speculative_config=speculative,
        model_config=SimpleNamespace() if draft else model_config,
    )
    planned = []
    for name in ("plan", "plan_records"):
        monkeypatch.setattr(
            integration, name, lambda *args, name=name, **kw: planned.append((name, *args[1:2], kw))
        )
    monkeypatch.setattr(integration, "publish", lambda *args: None)

    class Loaders:
        class BaseModelLoader:
            def load_model(self, vllm_config, model_config):
                return model_config.loaded

    integration._wrap(Loaders)
    assert Loaders.BaseModelLoader().load_model(vllm_config, model_config) is model_config.loaded
    return planned


def test_draft_layers_stay_as_they_are(tmp_path, monkeypatch) -> None:
    mtp, known = "model.layers.61.mtp_block.self_attn.attn", "model.layers.1.self_attn.attn"
    assert loaded_with(tmp_path, monkeypatch, known, draft=False)
    assert loaded_with(tmp_path, monkeypatch, known, draft=True)
    assert not loaded_with(tmp_path, monkeypatch, mtp, draft=True)
    # A model that is no draft must have settings for its layers: `plan` says what is wrong.
    assert loaded_with(tmp_path, monkeypatch, mtp, draft=False)


def test_switched_off(tmp_path, monkeypatch) -> None:
    known = "model.layers.1.self_attn.attn"
    off = {"mla_quant": False}
    assert not loaded_with(tmp_path, monkeypatch, known, draft=False, additional=off)
    with pytest.raises(ConfigError, match="must be true or false"):
        loaded_with(tmp_path, monkeypatch, known, draft=False, additional={"mla_quant": "no"})


def test_records_are_planned_beside_quantized_attention_or_alone(tmp_path, monkeypatch) -> None:
    known, fmt = "model.layers.1.self_attn.attn", RECORDS["nvfp4_ds_mla_432"]
    additional = {"mla_quant_records": fmt.name}
    both = loaded_with(tmp_path, monkeypatch, known, draft=False, additional=additional)
    # Without a side cache of operands, which a page of records has no place for.
    assert both == [("plan", settings(), {"over_records": True}), ("plan_records", fmt, {})]
    additional["mla_quant"] = False
    alone = loaded_with(tmp_path, monkeypatch, known, draft=False, additional=additional)
    assert alone == [("plan_records", fmt, {})]
    mtp = "model.layers.61.mtp_block.self_attn.attn"
    assert not loaded_with(tmp_path, monkeypatch, mtp, draft=True, additional=additional)


@pytest.mark.parametrize("name", ["nvfp4_ds_mla", "fp4", 352, True])
def test_unknown_records(tmp_path, monkeypatch, name) -> None:
    additional = {"mla_quant_records": name}
    with pytest.raises(ConfigError, match=r"mla_quant_records\): .* give one of fp8_ds_mla_656"):
        loaded_with(tmp_path, monkeypatch, "x", draft=False, additional=additional)


@pytest.mark.parametrize(
    ("name", "calibrated", "words"),
    [
        ("nvfp4_fp8rope_352", True, "352 bytes a token, outer scales calibrated"),
        ("nvfp4_fp8rope_352", False, "352 bytes a token, no outer scale"),
        ("fp8_ds_mla_656", False, "656 bytes a token"),
    ],
)
def test_summary_of_records(name, calibrated, words) -> None:
    layers = {str(i): integration.RecordPlan(RECORDS[name], 1.0) for i in range(2)}
    line = integration.RecordCachePlan(layers, calibrated).summary()
    assert line == f"mla_quant: 2 attention layers with a KV cache of {name} records, {words}"


def test_summary_is_one_line() -> None:
    layers = {
        f"{name}.attn": integration.LayerPlan(name, layer, None, False, True, False)
        for name, layer in settings(p="fp8").layers.items()
    }
    line = integration.Plan(layers, ("model.layers.9.self_attn.attn",)).summary()
    assert line == (
        "mla_quant: 3 attention layers quantized (Q nvfp4 K nvfp4 P fp8 V nvfp4), fused kernels, "
        "side cache of operands; untouched: model.layers.9.self_attn.attn"
    )


def test_registering_imports_nothing(monkeypatch) -> None:
    """It waits for vLLM's loader, and more than once is as once."""
    before = list(sys.meta_path)
    monkeypatch.setattr(sys, "meta_path", list(before))
    modules = set(sys.modules)
    integration.register()
    integration.register()
    assert len(sys.meta_path) == len(before) + 1
    assert set(sys.modules) == modules
    assert sys.meta_path[0].find_spec("json", None) is None
