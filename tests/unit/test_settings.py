"""`mla_quant.json`: what is written is read back, and nothing else is accepted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from mla_quant.errors import CheckpointError
from mla_quant.recipes import OPERANDS, load_recipe
from mla_quant.settings import (
    SETTINGS_FILE,
    LayerSettings,
    ModelSettings,
    OperandSettings,
    Producer,
    Settings,
    atomic_file,
    parse_settings,
    read_settings,
    write_json,
)


def make_settings() -> Settings:
    """Every operand has a number of its own, so that a mix-up shows."""
    layers = {
        f"model.layers.{index}.self_attn": LayerSettings.from_operands(
            {
                name: OperandSettings(format="nvfp4", amax=10.0 * index + position + 0.1)
                for position, name in enumerate(OPERANDS)
            }
        )
        for index in range(2)
    }
    return Settings(
        producer=Producer(name="mla_quant", version="1.2.3"),
        model=ModelSettings(
            source="org/model", family="deepseek_v3", geometry={"kv_lora_rank": 32, "q": None}
        ),
        recipe=load_recipe("nvfp4_mla"),
        layers=layers,
        calibration={"samples": 3, "notes": ["a note"]},
    )


def valid() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(make_settings().model_dump()))
    return data


def parse(data: object) -> Settings:
    return parse_settings(json.dumps(data), origin="the file")


FIRST = "model.layers.0.self_attn"


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    settings = make_settings()
    write_json(tmp_path / SETTINGS_FILE, settings.model_dump())
    assert read_settings(tmp_path) == settings
    layer = read_settings(tmp_path).layers[FIRST]
    found = {name: layer.operand(name).amax for name in OPERANDS}
    assert found == {name: position + 0.1 for position, name in enumerate(OPERANDS)}


def test_keys_of_the_file_are_those_that_other_tools_read() -> None:
    layer = valid()["layers"][FIRST]
    assert set(layer) == {"q", "k", "p", "v", "absorbed"}
    assert set(layer["absorbed"]) == {"q_latent", "q_rope", "k_latent", "k_rope", "v"}
    # Nothing here may be taken for the scale of a KV cache.
    assert "scale" not in json.dumps(valid()["layers"])


@pytest.mark.parametrize("amax", [0.0, 5e-324, 1e-30, 0.1, 3.4e38, 1.7e308])
def test_amax_survives_exactly(amax: float) -> None:
    data = valid()
    data["layers"][FIRST]["q"]["amax"] = amax
    assert parse(data).layers[FIRST].q.amax == amax


def test_operand_without_format_needs_no_amax() -> None:
    data = valid()
    data["layers"][FIRST]["q"] = {"format": "none", "amax": None}
    assert parse(data).layers[FIRST].q.amax is None


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema_version=2), ["schema_version 2", "reads 1"]),
        (lambda d: d.update(schema_version="1"), ["schema_version '1'"]),
        (lambda d: d.pop("schema_version"), ["schema_version None"]),
        (lambda d: d.update(extra=1), ["extra", "not permitted"]),
        (lambda d: d["layers"][FIRST].update(k_scale=1.0), [FIRST, "k_scale", "not permitted"]),
        (lambda d: d["layers"][FIRST]["absorbed"].update(kv=1.0), ["absorbed.kv", "not permitted"]),
        (lambda d: d["layers"][FIRST].pop("v"), [f"{FIRST}.v", "required"]),
        (lambda d: d["layers"][FIRST]["q"].update(amax=-1.0), [f"{FIRST}.q.amax", "0 or more"]),
        (lambda d: d["layers"][FIRST]["q"].update(amax="big"), [f"{FIRST}.q.amax", "'big'"]),
        (lambda d: d["layers"][FIRST]["q"].update(amax=[1.0]), [f"{FIRST}.q.amax"]),
        (lambda d: d["layers"][FIRST]["q"].update(format="int8"), ["q.format", "'int8'", "nvfp4"]),
        (
            lambda d: d["layers"][FIRST]["absorbed"]["v"].update(amax=None),
            ["no amax for 1", f"{FIRST}.v_latent", "calibrate again"],
        ),
        (lambda d: d["layers"][FIRST]["q"].pop("amax"), ["no amax for 1", f"{FIRST}.q"]),
        (lambda d: d.update(layers={}), ["layers", "at least 1"]),
        (lambda d: d.update(layers=[]), ["layers"]),
        (lambda d: d["recipe"].update(name=""), ["recipe.name"]),
        (lambda d: d["recipe"]["attention"].update(q="fp4"), ["recipe.attention.q", "'fp4'"]),
        (lambda d: d.pop("model"), ["model", "required"]),
    ],
)
def test_invalid_field_is_named(change: Change, words: list[str]) -> None:
    data = valid()
    change(data)
    with pytest.raises(CheckpointError) as caught:
        parse(data)
    for word in ["the file", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["not valid JSON"]),
        ("{", ["not valid JSON"]),
        ("[1]", ["expected a JSON object", "list"]),
        ("null", ["expected a JSON object", "NoneType"]),
        ('{"schema_version": NaN}', ["NaN is not a JSON number"]),
        ("[" * 100_000, ["not valid JSON"]),
        ('{"a":' * 100_000, ["not valid JSON"]),
    ],
)
def test_text_that_is_no_settings_file(text: str, words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_settings(text, origin="the file")
    for word in ["the file", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_constants_that_json_does_not_have(constant: str) -> None:
    data = valid()
    data["layers"][FIRST]["q"]["amax"] = float(constant.replace("Infinity", "inf"))
    with pytest.raises(CheckpointError, match=f"{constant} is not a JSON number"):
        parse_settings(json.dumps(data), origin="f")
    with pytest.raises(ValueError, match="not JSON compliant"):
        json.dumps(data, allow_nan=False)


def test_number_too_large_for_a_float_is_refused() -> None:
    text = json.dumps(valid()).replace("0.1,", "1e999,", 1).replace("0.1}", "1e999}", 1)
    assert "1e999" in text
    with pytest.raises(CheckpointError):
        parse_settings(text, origin="f")


def test_missing_and_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no mla_quant\.json"):
        read_settings(tmp_path)
    (tmp_path / SETTINGS_FILE).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="cannot read"):
        read_settings(tmp_path)
    (tmp_path / SETTINGS_FILE).unlink()
    (tmp_path / SETTINGS_FILE).mkdir()
    with pytest.raises(CheckpointError, match="cannot read"):
        read_settings(tmp_path)


# -- any damage -----------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
TEXT = json.dumps(make_settings().model_dump())


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items if isinstance(data, (dict, list)) else ():
        if isinstance(value, (dict, list)):
            found += places(value, (*path, key))
        else:
            found.append((*path, key))
    return found


PLACES = places(json.loads(TEXT))


def usable_or_refused(text: str) -> None:
    try:
        settings = parse_settings(text, origin="f")
    except CheckpointError:
        return
    for layer in settings.layers.values():
        for name in OPERANDS:
            operand = layer.operand(name)
            assert operand.format == "none" or operand.amax is not None
            assert operand.amax is None or (math.isfinite(operand.amax) and operand.amax >= 0)


@given(st.sampled_from(PLACES), JSON, st.sampled_from(["replace", "delete", "add"]))
@hypothesis_settings(max_examples=300, deadline=None)
def test_changed_value_is_valid_or_refused(place: tuple[Any, ...], value: Any, how: str) -> None:
    data = json.loads(TEXT)
    parent = data
    for key in place[:-1]:
        parent = parent[key]
    if how == "delete":
        del parent[place[-1]]
    elif how == "add" and isinstance(parent, dict):
        parent[f"{place[-1]}x"] = value
    else:
        parent[place[-1]] = value
    usable_or_refused(json.dumps(data))


@given(st.integers(0, len(TEXT) - 1), st.integers(0, 40), st.text(max_size=4))
@hypothesis_settings(max_examples=300, deadline=None)
def test_changed_text_is_valid_or_refused(start: int, length: int, insert: str) -> None:
    usable_or_refused(TEXT[:start] + insert + TEXT[start + length :])


@pytest.mark.parametrize("depth", [10, 200, 900])
def test_deep_nesting_inside_a_valid_file(depth: int) -> None:
    deep: Any = 1
    for _ in range(depth):
        deep = [deep]
    data = valid()
    data["calibration"]["deep"] = deep
    usable_or_refused(json.dumps(data))


# -- atomic files ---------------------------------------------------------------------------------


def test_atomic_file_leaves_nothing_on_failure(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(RuntimeError, match="half"), atomic_file(path) as temporary:  # noqa: PT012
        temporary.write_text("half")
        assert not path.exists()
        raise RuntimeError("half")
    assert list(tmp_path.iterdir()) == []


def test_atomic_file_keeps_the_old_file_on_failure(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_file(path) as temporary:  # noqa: PT012
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


def test_atomic_file_replaces_and_is_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    plain = path.stat().st_mode
    with atomic_file(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert path.stat().st_mode == plain
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_write_json_refuses_nan_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "file", {"a": math.nan})
    assert list(tmp_path.iterdir()) == []
