"""Recipes: what they accept, what their errors say, and what ModelOpt makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from mla_quant.errors import ConfigError
from mla_quant.recipes import (
    ABSORBED_OPERANDS,
    OPERANDS,
    QUANTIZER_SUFFIX,
    Recipe,
    configs_dir,
    load_recipe,
    matches_layer,
    parse_recipe,
    recipe_names,
    to_modelopt_config,
    unmatched_patterns,
)
from tests.models import make_model

SHIPPED = sorted(path.stem for path in configs_dir().glob("*.yaml"))
ALL_NVFP4 = {"q": "nvfp4", "k": "nvfp4", "p": "nvfp4", "v": "nvfp4"}


def recipe(weights: str = "none", **attention: Any) -> Recipe:
    data = {"name": "test", "weights": weights, "attention": attention}
    return parse_recipe(data, origin="test")


def formats_on(model: nn.Module) -> dict[str, str]:
    """Format of every enabled attention quantizer by its name, read off the converted model."""
    return {
        name.removesuffix(QUANTIZER_SUFFIX): module.backend_extra_args["format"]
        for name, module in model.named_modules()
        if name.endswith(QUANTIZER_SUFFIX) and module.is_enabled
    }


@pytest.fixture(scope="module")
def convert() -> Callable[[Recipe], nn.Module]:
    """What a recipe does to a model of ten layers and more, without calibrating it."""
    import modelopt.torch.quantization as mtq

    from mla_quant.plugin import register_with_modelopt

    register_with_modelopt()
    model = make_model(num_hidden_layers=11, hidden_size=32, first_k_dense_replace=11)
    mtq.quantize(model, to_modelopt_config(recipe()), None)

    def apply(wanted: Recipe) -> nn.Module:
        mtq.set_quantizer_by_cfg(model, to_modelopt_config(wanted)["quant_cfg"])
        return model

    return apply


# -- parsing --------------------------------------------------------------------------------------


def test_shipped_recipes_exist() -> None:
    assert recipe_names() == SHIPPED
    assert {"nvfp4_mla", "fp8_mla", "nvfp4_mla_2to4"} <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe(name: str, convert: Callable[[Recipe], nn.Module]) -> None:
    loaded = load_recipe(name)
    assert loaded.name == name
    assert loaded.description.endswith(".")
    assert load_recipe(configs_dir() / f"{name}.yaml") == loaded
    assert parse_recipe(loaded.model_dump(mode="json"), origin="again") == loaded
    found = formats_on(convert(loaded))
    expected = {
        f"model.layers.{i}.self_attn.{operand}": loaded.attention.format_of(operand)
        for i in range(11)
        for operand in OPERANDS
    }
    assert found == expected


def test_package_configs_are_the_shipped_recipes() -> None:
    import mla_quant

    for name in ("NVFP4_MLA_CFG", "FP8_MLA_CFG", "NVFP4_MLA_2TO4_CFG"):
        shipped = load_recipe(name.lower().removesuffix("_cfg"))
        assert getattr(mla_quant, name) == to_modelopt_config(shipped)
    with pytest.raises(AttributeError, match="NVFP5"):
        mla_quant.NVFP5_MLA_CFG  # noqa: B018


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"attention": {"q": "int4"}}, ["attention.q", "'int4'", "'none', 'fp8' or 'nvfp4'"]),
        ({"attention": {"qq": "fp8"}}, ["attention.qq", "not permitted"]),
        ({"attention": {"absorbed": {"p": "fp8"}}}, ["attention.absorbed.p", "not permitted"]),
        ({"attention": {"absorbed": {"k_rope": 4}}}, ["attention.absorbed.k_rope", "4", "'fp8'"]),
        ({"weights": "int8"}, ["weights", "'int8'", "'nvfp4'"]),
        ({"wieghts": "fp8"}, ["wieghts", "not permitted"]),
        ({"name": "../x"}, ["name", "'../x'"]),
        ({"name": None}, ["name"]),
        ({"schema_version": 2}, ["schema_version", "2", "1"]),
        ({"observer": {"method": "mean"}}, ["observer.method", "'mean'", "'percentile'"]),
        ({"observer": {"percentile": 101}}, ["observer.percentile", "101", "100"]),
        ({"attention": {"p_amax": 1.5}}, ["p_amax", "1.5", "1"]),
        ({"attention": {"p_amax": 0}}, ["p_amax", "0"]),
        ({"attention": {"forms": []}}, ["forms must name projected, absorbed or both"]),
        ({"attention": {"forms": ["decode"]}}, ["attention.forms.0", "'decode'", "'absorbed'"]),
        ({"attention": {"p_tile_tokens": 64}}, ["p_tile_tokens", "running_max"]),
        ({"attention": {"p_reference": "running_max"}}, ["p_tile_tokens", "required"]),
        (
            {"attention": {"p_reference": "running_max", "p_tile_tokens": 24}},
            ["multiple of 16", "24"],
        ),
        ({"attention": {"sparsity": {"n": 4, "m": 4}}}, ["n must be below m", "4:4"]),
        ({"attention": {"sparsity": {"dense_recent_tokens": -1}}}, ["dense_recent_tokens", "-1"]),
        ({"attention": {"overrides": [{"q": "fp8"}]}}, ["attention.overrides.0.layers"]),
        ({"attention": {"overrides": [{"layers": "*", "q": "f"}]}}, ["overrides.0.q", "'f'"]),
    ],
)
def test_errors_name_field_found_and_allowed(data: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_recipe({"name": "test"} | data, origin="my.yaml")
    message = str(error.value)
    assert message.startswith("my.yaml: ")
    for part in says:
        assert part in message, message


def test_every_fault_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        parse_recipe({"attention": {"q": "x", "k": "y"}}, origin="r")
    assert all(part in str(error.value) for part in ("name", "attention.q", "attention.k"))


@pytest.mark.parametrize("data", [None, [], "nvfp4", 3])
def test_not_a_mapping(data: object) -> None:
    with pytest.raises(ConfigError, match=f"mapping of fields, found {type(data).__name__}"):
        parse_recipe(data, origin="r")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'nvfp4_mla'"):
        load_recipe("nvfp4_mal")
    with pytest.raises(ConfigError, match="neither a file nor one of fp8_mla"):
        load_recipe(tmp_path / "absent.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("attention: {q: [")
    with pytest.raises(ConfigError, match="not a readable YAML"):
        load_recipe(broken)
    broken.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ConfigError, match="not a readable YAML"):
        load_recipe(broken)
    broken.write_text("")
    with pytest.raises(ConfigError, match="NoneType"):
        load_recipe(broken)


def test_recipe_file_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nattention: {k: fp8, overrides: [{layers: 'layers.0', k: none}]}\n")
    loaded = load_recipe(path)
    assert loaded.attention.k == "fp8"
    assert loaded.attention.q == "none"


def test_with_changes_validates() -> None:
    changed = load_recipe("nvfp4_mla").with_changes(k="fp8", weights="fp8")
    assert (changed.attention.k, changed.attention.q, changed.weights) == ("fp8", "nvfp4", "fp8")
    with pytest.raises(ConfigError, match=r"attention\.k.*'int4'"):
        changed.with_changes(k="int4")
    with pytest.raises(ConfigError, match="nonsense"):
        changed.with_changes(nonsense=1)


# -- layer patterns -------------------------------------------------------------------------------

LAYERS = [f"model.language_model.layers.{i}.self_attn" for i in range(12)]


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("layers.1", {1}),
        ("layers.1.self_attn", {1}),
        ("model.language_model.layers.1.self_attn", {1}),
        ("model.language_model.layers.1", {1}),
        ("language_model.layers.10", {10}),
        ("layers.[0-2]", {0, 1, 2}),
        ("layers.1*", {1, 10, 11}),
        ("*.layers.3.*", {3}),
        ("*", set(range(12))),
        ("self_attn", set(range(12))),
        ("layers.12", set()),
        ("ayers.1", set()),
        ("Layers.1", set()),
        ("model.layers.1", set()),
    ],
)
def test_layer_patterns_agree_with_modelopt(
    pattern: str, matched: set[int], convert: Callable[[Recipe], nn.Module]
) -> None:
    """`matches_layer` (what is reported) and the entries (what happens) are the same rule."""
    assert {i for i, name in enumerate(LAYERS) if matches_layer(pattern, name)} == matched
    model = convert(recipe(k="fp8", exclude=[pattern]))
    names = {i: f"model.layers.{i}.self_attn" for i in range(11)}
    left = {i for i, name in names.items() if not matches_layer(pattern, name)}
    on = {i for i, name in names.items() if f"{name}.k" in formats_on(model)}
    assert on == left


def test_patterns_with_and_without_prefix_that_match_nothing_are_reported() -> None:
    wanted = recipe(
        k="fp8",
        exclude=["layers.1", "model.layers.2", "layers.99"],
        overrides=[
            {"layers": "language_model.layers.3", "k": "nvfp4"},
            {"layers": "h.*", "k": "none"},
        ],
    )
    assert unmatched_patterns(wanted, LAYERS) == ["model.layers.2", "layers.99", "h.*"]
    assert unmatched_patterns(wanted, ["model.layers.2.self_attn"]) == [
        "layers.1", "layers.99", "language_model.layers.3", "h.*",
    ]  # fmt: skip
    assert unmatched_patterns(recipe(k="fp8"), LAYERS) == []


# -- what the entries give on a model -------------------------------------------------------------


def test_only_what_the_recipe_names_is_enabled(convert: Callable[[Recipe], nn.Module]) -> None:
    """`--k fp8` alone: not one quantizer of another operand or of a linear layer stays on."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    model = convert(recipe(k="fp8"))
    enabled = {
        name.rsplit(".", 1)[1]
        for name, module in model.named_modules()
        if isinstance(module, TensorQuantizer) and module.is_enabled
    }
    assert enabled == {f"{o}{QUANTIZER_SUFFIX}" for o in ("k", "k_latent", "k_rope")}


@pytest.mark.parametrize(
    ("form", "operands"),
    [("projected", {"q", "k", "p", "v"}), ("absorbed", {"p", *ABSORBED_OPERANDS})],
)
def test_one_form(form: str, operands: set[str], convert: Callable[[Recipe], nn.Module]) -> None:
    found = formats_on(convert(recipe(**ALL_NVFP4, forms=[form])))
    assert {name.rsplit(".", 1)[1] for name in found} == operands


def test_overrides_last_match_wins_and_exclude_beats_them(
    convert: Callable[[Recipe], nn.Module],
) -> None:
    wanted = recipe(
        **ALL_NVFP4,
        overrides=[
            {"layers": "layers.[0-4]", "k": "fp8", "v": "none"},
            {"layers": "model.layers.1", "k": "none", "p": "fp8"},
            {"layers": "layers.5", "q": "fp8"},
        ],
        exclude=["layers.5"],
    )
    found = formats_on(convert(wanted))

    def layer(i: int) -> dict[str, str]:
        prefix = f"model.layers.{i}.self_attn."
        return {n.removeprefix(prefix): f for n, f in found.items() if n.startswith(prefix)}

    everything = dict.fromkeys(OPERANDS, "nvfp4")
    fp8_k = {"k": "fp8", "k_latent": "fp8", "k_rope": "fp8"}
    no_v = {n: f for n, f in (everything | fp8_k).items() if n not in ("v", "v_latent")}
    assert layer(0) == layer(4) == no_v
    assert layer(1) == {
        "q": "nvfp4", "q_latent": "nvfp4", "q_rope": "nvfp4", "p": "fp8",
    }  # fmt: skip
    assert layer(5) == {}
    assert layer(6) == layer(10) == everything


def test_absorbed_operands_follow_their_letter_unless_named(
    convert: Callable[[Recipe], nn.Module],
) -> None:
    wanted = recipe(q="fp8", k="nvfp4", v="fp8", absorbed={"k_rope": "fp8", "q_rope": "none"})
    found = formats_on(convert(wanted))
    prefix = "model.layers.0.self_attn."
    assert {n.removeprefix(prefix): f for n, f in found.items() if n.startswith(prefix)} == {
        "q": "fp8", "k": "nvfp4", "v": "fp8",
        "q_latent": "fp8", "k_latent": "nvfp4", "k_rope": "fp8", "v_latent": "fp8",
    }  # fmt: skip


def test_settings_of_p_travel_with_its_quantizer(convert: Callable[[Recipe], nn.Module]) -> None:
    wanted = recipe(
        **ALL_NVFP4,
        p_amax=0.5,
        p_reference="running_max",
        p_tile_tokens=32,
        absorbed_query="model",
        sparsity={"n": 1, "m": 8, "dense_sink_tokens": 3, "dense_recent_tokens": 5},
    )
    attention: Any = convert(wanted).get_submodule("model.layers.10.self_attn")
    p = attention.p_mla_quantizer
    assert float(p._constant_amax) == 0.5
    assert p.backend_extra_args["p_tile_tokens"] == 32
    assert p.backend_extra_args["sparsity"] == {
        "n": 1, "m": 8, "dense_sink_tokens": 3, "dense_recent_tokens": 5, "sparse_decode": False,
    }  # fmt: skip
    assert attention.q_latent_mla_quantizer.backend_extra_args["absorbed_query"] == "model"
    calibrated: Any = convert(recipe(p="fp8", p_amax="calibrated"))
    p = calibrated.get_submodule("model.layers.0.self_attn").p_mla_quantizer
    assert getattr(p, "_constant_amax", None) is None


def test_sparsity_alone_enables_p_without_a_format(convert: Callable[[Recipe], nn.Module]) -> None:
    found = formats_on(convert(recipe(sparsity={})))
    assert found == {f"model.layers.{i}.self_attn.p": "none" for i in range(11)}


@pytest.mark.parametrize("weights", ["fp8", "nvfp4"])
def test_weights_and_attention_together(
    weights: str, convert: Callable[[Recipe], nn.Module]
) -> None:
    model: Any = convert(recipe(weights=weights, k="fp8"))
    attention = model.model.layers[0].self_attn
    bits = (4, 3) if weights == "fp8" else (2, 1)
    assert attention.o_proj.weight_quantizer.is_enabled
    assert attention.o_proj.weight_quantizer.num_bits == bits
    assert attention.o_proj.input_quantizer.is_enabled
    assert not model.lm_head.weight_quantizer.is_enabled, "ModelOpt's presets leave the head alone"
    assert set(formats_on(model).values()) == {"fp8"}
    assert not attention.q_mla_quantizer.is_enabled
