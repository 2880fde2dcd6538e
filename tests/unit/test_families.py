"""Discovery of MLA layers, on the meta device: no weights are needed to find them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mla_quant.errors import ConfigError, UnsupportedModelError
from mla_quant.families import (
    Discovery,
    Geometry,
    SkippedLayer,
    check_config,
    describe,
    find_mla_layers,
    is_mla,
    is_sparse,
    layer_index,
    text_config,
)
from tests.models import FAMILIES, MOE, T, family_classes, make_config

SPARSE = {
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM"),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM"),
    "axk2": ("AXK2Config", "AXK2ForCausalLM"),
}


def on_meta(family: str = "deepseek_v3", **changes: Any) -> Any:
    _, model_class = family_classes(family)
    with torch.device("meta"):
        return model_class._from_config(make_config(family, **changes))


def sparse_model(family: str) -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers")
    names = SPARSE[family]
    if not all(hasattr(transformers, name) for name in names):
        pytest.skip(f"the installed transformers has no {family}")
    config = getattr(transformers, names[0])(
        **T | MOE, index_topk=4, index_head_dim=16, index_n_heads=2
    )
    with torch.device("meta"):
        return config, getattr(transformers, names[1])._from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    found = find_mla_layers(on_meta(family))
    names = {
        "longcat_flash": [f"model.layers.{i}.self_attn.{j}" for i in (0, 1) for j in (0, 1)],
        "kimi_linear": ["model.layers.1.self_attn"],
    }.get(family, ["model.layers.0.self_attn", "model.layers.1.self_attn"])
    assert [layer.name for layer in found.layers] == names
    assert found.sparse == ()
    expected = Geometry(4, None if family == "kimi_linear" else 24, 32, 16, 8, 16)
    assert {layer.geometry for layer in found.layers} == {expected}
    assert found.require() == found.layers


def test_hybrid_lists_linear_attention_with_the_reason() -> None:
    found = find_mla_layers(on_meta("kimi_linear"))
    assert [s.name for s in found.skipped] == [
        "model.layers.0.self_attn",
        "model.layers.2.self_attn",
    ]
    for skipped in found.skipped:
        assert "not MLA" in skipped.reason
        assert "kv_a_proj_with_mqa" in skipped.reason
        assert skipped.class_name == type_of_linear_attention()


def type_of_linear_attention() -> str:
    model = on_meta("kimi_linear")
    return type(model.model.layers[0].self_attn).__name__


@pytest.mark.parametrize("q_lora_rank", [None, 24])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_query_projection_with_and_without_low_rank(family: str, q_lora_rank: int | None) -> None:
    layers = find_mla_layers(on_meta(family, q_lora_rank=q_lora_rank)).require()
    assert [layer.geometry.q_lora_rank for layer in layers] == [q_lora_rank] * 2


def test_nested_kimi_k25_quantizes_the_text_tower_only() -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Kimi_K25Config"):
        pytest.skip("the installed transformers has no kimi_k25")
    config = transformers.Kimi_K25Config(
        text_config=make_config().to_dict(),
        vision_config={
            "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2,
            "intermediate_size": 32,
        },
        projection_hidden_size=32,
    )  # fmt: skip
    check_config(config)
    assert text_config(config).model_type == "deepseek_v3"
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    found = find_mla_layers(model)
    assert len(found.require()) == 2
    for i, layer in enumerate(found.layers):
        assert layer.name.endswith(f"language_model.layers.{i}.self_attn")
        assert layer_index(layer.name) == i
    assert len(found.skipped) == 2, "one attention in each layer of the vision tower"
    assert all("vision" in s.name and "not MLA" in s.reason for s in found.skipped)
    shown = describe(found, config.model_type)
    assert shown["family"] == "kimi_k25"
    assert [s["name"] for s in shown["skipped"]] == [s.name for s in found.skipped]


@pytest.mark.parametrize("family", SPARSE)
def test_sparse_models_are_refused_by_config_and_by_structure(family: str) -> None:
    config, model = sparse_model(family)
    with pytest.raises(UnsupportedModelError, match=f"{family}.*indexer"):
        check_config(config)
    found = find_mla_layers(model)
    assert found.layers == ()
    assert [s.name for s in found.sparse] == [f"model.layers.{i}.self_attn" for i in (0, 1)]
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.self_attn.*indexer"):
        found.require()


def test_nested_sparse_config_is_refused() -> None:
    inner = SimpleNamespace(model_type="deepseek_v32")
    outer = SimpleNamespace(model_type="some_vlm", get_text_config=lambda: inner)
    with pytest.raises(UnsupportedModelError, match="deepseek_v32"):
        check_config(outer)
    with pytest.raises(UnsupportedModelError, match="deepseek_v32_text"):
        check_config(SimpleNamespace(model_type="deepseek_v32_text"))


def test_many_sparse_layers_are_counted_not_all_listed() -> None:
    sparse = tuple(SkippedLayer(f"layers.{i}", "A", "sparse") for i in range(5))
    with pytest.raises(UnsupportedModelError, match=r"layers\.2 \(A\) and 2 more"):
        Discovery((), (), sparse).require()


def test_model_without_mla_is_an_error_that_names_what_was_seen() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        vocab_size=32,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    check_config(config)
    found = find_mla_layers(model)
    assert len(found.skipped) == 2
    with pytest.raises(UnsupportedModelError, match="no MLA layer") as error:
        found.require()
    assert "model.layers.0.self_attn" in str(error.value)
    assert "kv_a_proj_with_mqa" in str(error.value)
    with pytest.raises(UnsupportedModelError, match="seen: none"):
        find_mla_layers(nn.Linear(2, 2)).require()


def test_longcat_without_query_rank_names_the_field() -> None:
    """transformers itself fails with a bare TypeError when it builds the layer."""
    config = make_config("longcat_flash")
    check_config(config)
    config.q_lora_rank = None
    with pytest.raises(ConfigError, match="q_lora_rank is None"):
        check_config(config)
    config = make_config("deepseek_v3", q_lora_rank=None)
    check_config(config)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("kv_lora_rank", 0, "positive integer"),
        ("kv_lora_rank", "512", "positive integer"),
        ("qk_nope_head_dim", -16, "positive integer"),
        ("v_head_dim", 0, "positive integer"),
        ("num_attention_heads", 0, "positive integer"),
        ("qk_rope_head_dim", 7, "even integer"),
        ("qk_rope_head_dim", -2, "even integer"),
    ],
)
def test_impossible_widths_name_field_found_and_allowed(
    field: str, value: object, allowed: str
) -> None:
    config = SimpleNamespace(model_type="deepseek_v3", **{field: value})
    with pytest.raises(ConfigError) as error:
        check_config(config)
    assert field in str(error.value)
    assert repr(value) in str(error.value)
    assert allowed in str(error.value)


def test_rope_width_zero_is_allowed() -> None:
    check_config(SimpleNamespace(model_type="kimi_linear", qk_rope_head_dim=0))
    with pytest.raises(ConfigError, match="qk_rope_head_dim is 0, but the code of deepseek_v3"):
        check_config(SimpleNamespace(model_type="deepseek_v3", qk_rope_head_dim=0))
    geometry = Geometry(4, None, 512, 256, 0, 256)
    assert geometry.qk_segments == (256,)
    assert geometry.latent_width == 512


@pytest.mark.parametrize(
    ("dims", "heads", "latent", "expanded"),
    [
        # (kv_lora, nope, rope, v): bytes of latent + rope in bf16; of expanded K and V in bf16
        ((512, 128, 64, 128), 128, 1152, 128 * 320 * 2),
        ((512, 192, 64, 256), 20, 1152, 20 * 512 * 2),
        ((256, 64, 32, 64), 40, 576, 40 * 160 * 2),
        ((32, 16, 8, 16), 4, 80, 4 * 40 * 2),
    ],
)
def test_cache_bytes(dims: tuple[int, ...], heads: int, latent: int, expanded: int) -> None:
    geometry = Geometry(heads, 1536, *dims)
    assert geometry.cache_bytes_per_token() == {
        "latent_bfloat16": latent,
        "latent_float8_e4m3fn": latent // 2,
        "expanded_bfloat16": expanded,
    }


def test_describe_sums_the_cache_over_layers() -> None:
    found = find_mla_layers(on_meta("longcat_flash"))
    shown = describe(found, "longcat_flash")
    assert shown["layers"] == 4
    assert shown["uniform_geometry"] is True
    assert shown["geometry"]["kv_lora_rank"] == 32
    assert shown["cache_bytes_per_token"]["latent_bfloat16"] == 4 * 80
    empty = describe(find_mla_layers(nn.Linear(2, 2)), "none")
    assert empty["layers"] == 0 and empty["geometry"] == {}


def test_weights_that_do_not_fit_the_config() -> None:
    attention = on_meta().model.layers[0].self_attn
    attention.kv_b_proj = nn.Linear(32, 100, device="meta")
    with pytest.raises(ConfigError, match=r"100 rows, not a multiple of .* 32"):
        Geometry.of_module(attention)


def test_structure_decides_not_the_class_name() -> None:
    """Remote code follows DeepSeek's names of submodules, not of classes."""
    attention = on_meta().model.layers[0].self_attn
    assert is_mla(attention) and not is_sparse(attention)
    shell = nn.Module()
    shell.kv_lora_rank, shell.qk_nope_head_dim = 32, 16
    shell.qk_rope_head_dim, shell.v_head_dim = 8, 16
    for name, child in attention.named_children():
        setattr(shell, name, child)
    model = nn.Module()
    model.mixer = shell
    assert [layer.name for layer in find_mla_layers(model).layers] == ["mixer"]
    del shell.kv_b_proj
    assert not is_mla(shell)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("model.layers.7.self_attn", 7),
        ("model.language_model.layers.12.self_attn", 12),
        ("model.layers.3.self_attn.0", 6),
        ("model.layers.3.self_attn.1", 7),
        ("mixer", 0),
    ],
)
def test_layer_index(name: str, index: int) -> None:
    assert layer_index(name) == index
