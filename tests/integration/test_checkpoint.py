"""Exports: what they hold, that they reproduce the calibrated model, that damage is found."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mla_quant import checkpoint as checkpoint_module
from mla_quant.calibration import collect_settings, collect_statistics, make_plan, quantize
from mla_quant.checkpoint import (
    MANIFEST_FILE,
    MODELOPT_FILE,
    REFERENCE_FILE,
    STATISTICS_FILE,
    check_claims,
    check_target,
    compare_logits,
    export_checkpoint,
    hash_files,
    load_quantized,
    load_weights,
    reference_logits,
    verify_checkpoint,
)
from mla_quant.cli import main
from mla_quant.errors import CheckpointError, ConfigError, MlaQuantError
from mla_quant.families import find_mla_layers
from mla_quant.formats import FP8, NVFP4
from mla_quant.loading import INDEX_FILE, SINGLE_FILE, Checkpoint, load_model, open_checkpoint
from mla_quant.recipes import Recipe, load_recipe
from mla_quant.reference import quantize_dequantize
from mla_quant.settings import SETTINGS_FILE, SIDE_FOLDER, Settings
from tests.models import loop, make_model, save_fp8_model, save_model, token_ids

SAMPLES = [row.tolist() for row in token_ids(2, 40, seed=5)]
WEIGHT_RECIPES = ["fp8_mla_fp8_weights", "nvfp4_mla_fp8_weights", "nvfp4_mla_nvfp4_weights"]


@dataclass
class Calibrated:
    """A calibrated model before export, and everything that an export takes."""

    model: Any
    source: Checkpoint
    settings: Settings
    statistics: list[dict[str, Any]]

    def export(self, out: Path, **kwargs: Any) -> Path:
        return export_checkpoint(
            self.model, out, self.settings, source=self.source, statistics=self.statistics,
            **{"reference_samples": SAMPLES, **kwargs},
        )  # fmt: skip


def calibrated(source: Path, recipe: Recipe | str) -> Calibrated:
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    checkpoint = open_checkpoint(str(source))
    model = load_model(checkpoint)
    batches = [token_ids(4, 48, seed=seed) for seed in range(2)]
    model = quantize(model, recipe, loop(*batches))
    settings = collect_settings(
        model, recipe, source=str(source), family="deepseek_v3", version="0",
        calibration={"dtype": str(next(model.parameters()).dtype).removeprefix("torch.")},
    )  # fmt: skip
    return Calibrated(model, checkpoint, settings, collect_statistics(model))


def add_sidecars(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(b"\x00sentencepiece")
    (folder / "modeling_custom.py").write_text("raise RuntimeError('never imported')\n")
    (folder / "assets" / "deep").mkdir(parents=True)
    (folder / "assets" / "deep" / "picture.txt").write_text("a picture")
    (folder / "assets" / "README.md").write_text("about the assets")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").write_text("not part of the model")
    (folder / MODELOPT_FILE).write_text('{"quantization": {"quant_algo": "FP8"}}')
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {}}')
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config["a_field_of_another_tool"] = [1, {"b": None}]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sharded, with every sidecar, a stale hf_quant_config.json and a false declaration."""
    folder = save_model(tmp_path_factory.mktemp("source") / "model", max_shard_size="60KB")
    assert (folder / INDEX_FILE).is_file()
    add_sidecars(folder)
    return folder


@pytest.fixture(scope="module")
def attention_only(source: Path) -> Calibrated:
    return calibrated(source, "nvfp4_mla")


@pytest.fixture(scope="module")
def export(attention_only: Calibrated, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return attention_only.export(tmp_path_factory.mktemp("export") / "out")


@pytest.fixture(scope="module")
def plain_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # NVFP4 weights need input widths that are multiples of 16.
    model = make_model(dtype=torch.bfloat16, q_lora_rank=32)
    return save_model(tmp_path_factory.mktemp("source") / "plain", model)


@dataclass
class WeightExport:
    folder: Path
    logits: dict[str, Any]
    inputs: dict[str, float]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=WEIGHT_RECIPES)
def weight_export(
    request: pytest.FixtureRequest, plain_source: Path, tmp_path_factory: pytest.TempPathFactory
) -> WeightExport:
    """Weights and attention quantized; what the model was before its export took it apart."""
    run = calibrated(plain_source, request.param)
    weights = {k: v.clone() for k, v in run.model.state_dict().items() if k.endswith("weight")}
    inputs = {
        name: float(module.amax)
        for name, module in run.model.named_modules()
        if name.endswith("input_quantizer") and module.is_enabled
    }
    out = run.export(tmp_path_factory.mktemp("weights") / "out")
    with np.load(out / REFERENCE_FILE) as archive:
        logits = {k: archive[k] for k in archive.files}
    return WeightExport(out, logits, inputs, weights)


@pytest.fixture
def copy(export: Path, tmp_path: Path) -> Path:
    shutil.copytree(export, tmp_path / "copy")
    return tmp_path / "copy"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def rehash(folder: Path) -> None:
    """Make the manifest fit again: other checks must find the fault without it."""
    (folder / MANIFEST_FILE).write_text(json.dumps({"files": hash_files(folder)}))


def failed(folder: Path, *, logits: bool = False) -> dict[str, str]:
    return {c.name: c.detail for c in verify_checkpoint(folder, logits=logits) if not c.passed}


# -- what an export holds -------------------------------------------------------------------------


def test_weight_files_are_copied_byte_for_byte(source: Path, export: Path) -> None:
    files = sorted(source.glob("*.safetensors"))
    assert len(files) > 2
    assert [p.name for p in files] == [p.name for p in sorted(export.glob("*.safetensors"))]
    for path in [*files, source / INDEX_FILE]:
        assert digest(path) == digest(export / path.name)


def test_sidecars_are_copied(source: Path, export: Path) -> None:
    for name in (
        "chat_template.jinja", "tokenizer.model", "modeling_custom.py", "LICENSE", "tokenizer.json",
        "tokenizer_config.json", "generation_config.json", "assets/deep/picture.txt",
        "assets/README.md",
    ):  # fmt: skip
        assert digest(source / name) == digest(export / name), name
    assert (export / "README.source.md").read_text() == (source / "README.md").read_text()
    assert not (export / ".cache").exists()


def test_stale_and_false_declarations_are_gone(source: Path, export: Path) -> None:
    assert not (export / MODELOPT_FILE).exists()
    assert not (export / "pytorch_model.bin.index.json").exists()
    config = json.loads((export / "config.json").read_text())
    original = json.loads((source / "config.json").read_text())
    assert original.pop("quantization_config")
    assert config == original


def test_card_says_what_was_done(export: Path) -> None:
    from huggingface_hub import ModelCard

    card = ModelCard.load(export / "README.md")
    assert {"mla", "mla_quant", "nvfp4"} <= set(card.data.tags or [])
    assert "| P | nvfp4 |" in card.text
    assert "nvfp4_mla" in card.text


def test_files_that_no_engine_reads(export: Path, attention_only: Calibrated) -> None:
    assert json.loads((export / STATISTICS_FILE).read_text()) == json.loads(
        json.dumps(attention_only.statistics)
    )
    with np.load(export / REFERENCE_FILE, allow_pickle=False) as archive:
        assert archive["projected"].shape == (2, 32, 128)
        assert not np.array_equal(archive["projected"], archive["absorbed"])
        assert not np.array_equal(archive["projected"], archive["unquantized"])
        assert archive["tokens_1"].tolist() == SAMPLES[1]
    manifest = json.loads((export / MANIFEST_FILE).read_text())["files"]
    everything = {p.relative_to(export).as_posix() for p in export.rglob("*") if p.is_file()}
    assert set(manifest) == everything - {MANIFEST_FILE}
    for name, entry in manifest.items():
        assert entry == {"bytes": (export / name).stat().st_size, "sha256": digest(export / name)}


def test_no_engine_meets_a_scale_that_it_could_misread(export: Path) -> None:
    assert check_claims(export) == []
    names = open_checkpoint(str(export)).tensors
    assert not [n for n in names if "scale" in n or "quantizer" in n or "amax" in n]


def test_amax_of_the_settings_is_that_of_the_model(
    export: Path, attention_only: Calibrated
) -> None:
    _, settings = load_quantized(export)
    assert settings == attention_only.settings
    for record in attention_only.statistics:
        if record["operand"] != "p":
            operand = settings.layers[record["layer"]].operand(record["operand"])
            assert operand.amax == record["amax"]


# -- what it reproduces ---------------------------------------------------------------------------


def test_reloaded_model_is_the_calibrated_one(export: Path, attention_only: Calibrated) -> None:
    expected = reference_logits(attention_only.model, SAMPLES)
    model, _ = load_quantized(export)
    found = reference_logits(model, SAMPLES)
    assert set(found) == {"projected", "absorbed", "unquantized"}
    for form, logits in expected.items():
        assert np.array_equal(found[form], logits), form


def test_form_is_chosen_on_loading(export: Path, attention_only: Calibrated) -> None:
    expected = reference_logits(attention_only.model, SAMPLES)
    model, _ = load_quantized(export, form="absorbed")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor(SAMPLES[:1]), use_cache=False).logits[0, -32:]
    assert np.array_equal(logits.float().numpy(), expected["absorbed"][0])


def test_plain_transformers_loads_it_unquantized(export: Path, attention_only: Calibrated) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(export, dtype="auto").eval()
    if hasattr(model, "set_experts_implementation"):
        # ModelOpt runs experts one by one; transformers' other ways sum in another order.
        model.set_experts_implementation("eager")
    expected = reference_logits(attention_only.model, SAMPLES)["unquantized"]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor(SAMPLES[:1]), use_cache=False).logits[0, -32:]
    assert np.array_equal(logits.float().numpy(), expected[0])


def test_verify_in_a_fresh_process(export: Path) -> None:
    command = [sys.executable, "-m", "mla_quant.cli", "verify", str(export), "--json"]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    details = {c["name"]: c["detail"] for c in result["checks"]}
    assert result["passed"]
    assert details["logits"] == "projected: bit-identical; absorbed: bit-identical"


def test_export_of_an_export(export: Path, tmp_path: Path) -> None:
    again = calibrated(export, "fp8_mla").export(tmp_path / "again")
    assert failed(again, logits=True) == {}
    assert json.loads((again / SETTINGS_FILE).read_text())["recipe"]["name"] == "fp8_mla"
    assert "fp8" in (again / "README.md").read_text()


def test_export_without_a_source(tmp_path: Path) -> None:
    from tests.models import make_tokenizer

    recipe = load_recipe("fp8_mla")
    model = quantize(make_model(), recipe, loop(token_ids()))
    settings = collect_settings(
        model, recipe, source="here", family="deepseek_v3", version="0", calibration={}
    )
    out = export_checkpoint(
        model, tmp_path / "out", settings, tokenizer=make_tokenizer(), reference_samples=SAMPLES
    )
    assert failed(out, logits=True) == {}
    assert (out / "tokenizer.json").is_file()


def test_pickled_source_becomes_safetensors(plain_source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(plain_source, folder)
    torch.save(load_file(folder / SINGLE_FILE), folder / "pytorch_model.bin")
    (folder / SINGLE_FILE).unlink()
    out = calibrated(folder, "fp8_mla").export(tmp_path / "out")
    assert not list(out.glob("*.bin"))
    assert failed(out, logits=True) == {}
    stored, original = load_file(out / SINGLE_FILE), load_file(plain_source / SINGLE_FILE)
    assert stored.keys() == original.keys()
    assert all(torch.equal(stored[k], original[k]) for k in original)


def test_native_fp8_weights_stay_as_they_are(plain_source: Path, tmp_path: Path) -> None:
    folder = save_fp8_model(tmp_path / "fp8", plain_source)
    out = calibrated(folder, "nvfp4_mla").export(tmp_path / "out")
    assert digest(out / SINGLE_FILE) == digest(folder / SINGLE_FILE)
    assert digest(out / "config.json") == digest(folder / "config.json")
    declared = json.loads((out / "config.json").read_text())["quantization_config"]
    assert declared["quant_method"] == "fp8"
    checks = {c.name: c for c in verify_checkpoint(out)}
    assert all(c.passed for c in checks.values()), checks
    assert checks["logits"].detail == "projected: bit-identical; absorbed: bit-identical"


# -- weights quantized too ------------------------------------------------------------------------


def test_weight_export_verifies_bit_identically(weight_export: WeightExport) -> None:
    checks = {c.name: c for c in verify_checkpoint(weight_export.folder)}
    assert all(c.passed for c in checks.values()), checks
    assert checks["logits"].detail == "projected: bit-identical; absorbed: bit-identical"


def test_attention_of_quantized_weights_is_calibrated_anew(
    weight_export: WeightExport, tmp_path: Path
) -> None:
    source = open_checkpoint(str(weight_export.folder))
    model = load_weights(source)
    recipe = load_recipe("nvfp4_mla")
    model = quantize(model, recipe, loop(token_ids(4, 48, seed=0)))
    settings = collect_settings(
        model, recipe, source="here", family="deepseek_v3", version="0", calibration={}
    )
    out = export_checkpoint(
        model, tmp_path / "out", settings, source=source, reference_samples=SAMPLES
    )
    assert digest(out / SINGLE_FILE) == digest(weight_export.folder / SINGLE_FILE)
    assert digest(out / MODELOPT_FILE) == digest(weight_export.folder / MODELOPT_FILE)
    checks = {c.name: c for c in verify_checkpoint(out)}
    assert all(c.passed for c in checks.values()), checks
    assert checks["logits"].detail == "projected: bit-identical; absorbed: bit-identical"


def test_modelopt_files_say_what_is_stored(weight_export: WeightExport) -> None:
    folder = weight_export.folder
    settings = json.loads((folder / SETTINGS_FILE).read_text())
    algorithm = settings["recipe"]["weights"].upper()
    inner = json.loads((folder / MODELOPT_FILE).read_text())["quantization"]
    assert inner["quant_algo"] == algorithm
    assert inner["kv_cache_quant_algo"] is None
    assert "lm_head" in inner["exclude_modules"]
    declared = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert declared["quant_method"] == "modelopt"
    assert declared["quant_algo"] == algorithm
    assert declared.get("kv_cache_scheme") is None


def test_no_orphan_scales(weight_export: WeightExport) -> None:
    assert check_claims(weight_export.folder) == []
    tensors = load_file(weight_export.folder / SINGLE_FILE)
    quantized = {
        n.removesuffix(".weight")
        for n, v in tensors.items()
        if v.dtype in (torch.uint8, torch.float8_e4m3fn) and n.endswith(".weight")
    }
    # 5 attention and 3 MLP matrices in layer 0; 5, 4 experts' 3 and the shared 3 in layer 1.
    assert len(quantized) == 8 + 5 + 12 + 3
    scales = {n for n in tensors if "scale" in n}
    assert {n.rpartition(".")[0] for n in scales} == quantized
    assert not [n for n in scales if n.endswith(("k_scale", "v_scale", "kv_scale"))]
    assert not [n for n in tensors if "quantizer" in n or "amax" in n]


def test_stored_weights_are_the_rounded_originals(weight_export: WeightExport) -> None:
    """Against the format's definition, from the original weights and the stored scale alone."""
    model, settings = load_quantized(weight_export.folder)
    stored = load_file(weight_export.folder / SINGLE_FILE)
    fmt = {"fp8": FP8, "nvfp4": NVFP4}[settings.recipe.weights]
    state = model.state_dict()
    compared = 0
    for name, original in weight_export.weights.items():
        scale = stored.get(f"{name}_scale_2", stored.get(f"{name}_scale"))
        if scale is None:
            if ".experts." not in name:
                assert torch.equal(state[name], original), name
            continue
        amax = scale.double() * fmt.quant_max
        expected = quantize_dequantize(original, fmt, amax.float()).to(torch.bfloat16)
        # The product with quant_max may be a rounding off, which a bf16 result hardly sees.
        different = (state[name] != expected).double().mean()
        assert different < 0.1, name
        torch.testing.assert_close(state[name], expected, rtol=2**-7, atol=0)
        compared += 1
    assert compared >= 13


def test_ranges_of_linear_inputs_come_back(weight_export: WeightExport) -> None:
    model, _ = load_quantized(weight_export.folder)
    found = {
        name: float(module.amax)
        for name, module in model.named_modules()
        if name.endswith("input_quantizer") and module.is_enabled
    }
    assert found.keys() == weight_export.inputs.keys()
    for name, amax in weight_export.inputs.items():
        assert found[name] == pytest.approx(amax, rel=1e-6), name


def test_fused_layers_share_a_weight_scale(weight_export: WeightExport) -> None:
    stored = load_file(weight_export.folder / SINGLE_FILE)
    pairs = [("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj")]
    compared = 0
    for name, value in stored.items():
        for first, second in pairs:
            if name.endswith(f"{first}.weight_scale_2"):
                assert torch.equal(value, stored[name.replace(first, second)]), name
                compared += 1
    # Two attentions, the dense MLP, four experts and the shared one. FP8 has no such scale.
    recipe = json.loads((weight_export.folder / SETTINGS_FILE).read_text())["recipe"]
    assert compared == (8 if recipe["weights"] == "nvfp4" else 0)


def test_weights_exclude_keeps_layers_in_full_precision(plain_source: Path, tmp_path: Path) -> None:
    pair = ("q_a_proj", "kv_a_proj_with_mqa")
    recipe = load_recipe("fp8_mla_fp8_weights").with_changes(weights_exclude=pair)
    out = calibrated(plain_source, recipe).export(tmp_path / "out")
    stored, original = load_file(out / SINGLE_FILE), load_file(plain_source / SINGLE_FILE)
    for layer in range(2):
        for child in pair:
            name = f"model.layers.{layer}.self_attn.{child}.weight"
            assert torch.equal(stored[name], original[name])
            assert f"{name}_scale" not in stored
        assert f"model.layers.{layer}.self_attn.o_proj.weight_scale" in stored
    excluded = json.loads((out / MODELOPT_FILE).read_text())["quantization"]["exclude_modules"]
    assert [e for e in excluded if "q_a_proj" in e]
    assert failed(out, logits=True) == {}


def test_half_of_a_fused_pair_is_refused(plain_source: Path, tmp_path: Path) -> None:
    recipe = load_recipe("fp8_mla_fp8_weights").with_changes(weights_exclude=("q_a_proj",))
    model = make_model(q_lora_rank=32)
    with pytest.raises(ConfigError, match=r"kv_a_proj_with_mqa but not of .*q_a_proj.*both"):
        make_plan(recipe, find_mla_layers(model), model)
    # Without a plan, the export is the last to see it.
    with pytest.raises(CheckpointError, match="engines fuse the two"):
        calibrated(plain_source, recipe).export(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_nvfp4_cannot_block_are_refused() -> None:
    model = make_model(q_lora_rank=24)
    recipe = load_recipe("nvfp4_mla_nvfp4_weights")
    with pytest.raises(ConfigError, match=r"multiples of 16.*q_b_proj has 24.*weights_exclude"):
        make_plan(recipe, find_mla_layers(model), model)
    allowed = recipe.with_changes(weights_exclude=("q_b_proj", "no_such_layer"))
    plan = make_plan(allowed, find_mla_layers(model), model)
    assert plan.unmatched == ["no_such_layer"]
    with pytest.raises(ConfigError, match="weights_exclude has no meaning"):
        load_recipe("nvfp4_mla").with_changes(weights_exclude=("q_b_proj",))


# -- verify finds damage --------------------------------------------------------------------------


def test_sound_export_passes(export: Path) -> None:
    assert failed(export) == {}


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def flip_byte(folder: Path) -> None:
    data = bytearray(first_shard(folder).read_bytes())
    data[-1] ^= 1
    first_shard(folder).write_bytes(data)


def truncate(folder: Path) -> None:
    first_shard(folder).write_bytes(first_shard(folder).read_bytes()[:-2])


def add_tensor(folder: Path, name: str) -> None:
    path = first_shard(folder)
    tensors = load_file(path)
    tensors[name] = torch.ones(())
    save_file(tensors, path, metadata={"format": "pt"})
    edit_json(folder / INDEX_FILE, lambda d: d["weight_map"].update({name: path.name}))


def set_amax(value: Any) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        def change(data: Any) -> None:
            data["layers"]["model.layers.0.self_attn"]["k"]["amax"] = value

        edit_json(folder / SETTINGS_FILE, change)

    return run


ATTENTION = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("damage", "check", "words"),
    [
        (flip_byte, "file hashes", "changed: model-00001"),
        (truncate, "file hashes", "changed: model-00001"),
        (truncate, "tensors and claims", "truncated"),
        (lambda f: first_shard(f).unlink(), "file hashes", "missing: model-00001"),
        (lambda f: first_shard(f).unlink(), "tensors and claims", "missing weight files"),
        (
            lambda f: first_shard(f).rename(f / "model-99999.safetensors"),
            "file hashes",
            "not written: model-99999",
        ),
        (lambda f: (f / "tokenizer.model").unlink(), "file hashes", "missing: tokenizer.model"),
        (lambda f: (f / "extra.txt").write_text("x"), "file hashes", "not written: extra.txt"),
        (set_amax(1.0), "file hashes", f"changed: {SETTINGS_FILE}"),
        (set_amax(None), "settings", f"{ATTENTION}.k"),
        (lambda f: (f / SETTINGS_FILE).unlink(), "settings", f"has no {SETTINGS_FILE}"),
        (lambda f: (f / SETTINGS_FILE).write_text("{"), "settings", "not valid JSON"),
        (lambda f: (f / MANIFEST_FILE).unlink(), "file hashes", "missing or damaged"),
        (lambda f: (f / MANIFEST_FILE).write_text("[]"), "file hashes", "missing or damaged"),
        (lambda f: (f / "config.json").unlink(), "tensors and claims", "config.json"),
        (lambda f: (f / "config.json").write_text("{"), "tensors and claims", "config.json"),
    ],
)
def test_damage_is_found(
    copy: Path, damage: Callable[[Path], object], check: str, words: str
) -> None:
    damage(copy)
    found = failed(copy)
    assert check in found
    assert words in found[check]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: add_tensor(f, f"{ATTENTION}.k_scale"), "is a KV-cache scale, but no cache"),
        (lambda f: add_tensor(f, f"{ATTENTION}.kv_scale"), "is a KV-cache scale, but no cache"),
        (lambda f: add_tensor(f, f"{ATTENTION}.gone.weight_scale"), "scales no tensor"),
        (lambda f: add_tensor(f, f"{ATTENTION}.q_mla_quantizer._amax"), "internal state"),
        (
            lambda f: edit_json(
                f / "config.json",
                lambda d: d.update(quantization_config={"quant_method": "modelopt"}),
            ),
            "no weight is quantized",
        ),
    ],
)
def test_claims_are_checked_whatever_the_manifest_says(
    copy: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(copy)
    rehash(copy)
    found = failed(copy)
    assert list(found) == ["tensors and claims"]
    assert words in found["tensors and claims"]


def test_advertised_cache_is_found(weight_export: WeightExport, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(weight_export.folder, folder)
    edit_json(folder / MODELOPT_FILE, lambda d: d["quantization"].update(kv_cache_quant_algo="FP8"))
    rehash(folder)
    assert "advertises a FP8 KV cache" in failed(folder)["tensors and claims"]
    edit_json(
        folder / MODELOPT_FILE,
        lambda d: d["quantization"].update(kv_cache_quant_algo=None, quant_algo="INT4"),
    )
    rehash(folder)
    assert "'INT4'" in failed(folder)["tensors and claims"]


def test_weight_without_its_scale_is_found(weight_export: WeightExport, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(weight_export.folder, folder)
    tensors = load_file(folder / SINGLE_FILE)
    del tensors[f"{ATTENTION}.o_proj.weight_scale"]
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    rehash(folder)
    found = failed(folder, logits=True)
    assert (
        f"{ATTENTION}.o_proj.weight is quantized, but has no scale" in found["tensors and claims"]
    )
    with pytest.raises(CheckpointError, match=r"o_proj"):
        load_quantized(folder)


def other_formats(folder: Path) -> None:
    """FP8 instead of NVFP4 everywhere, consistently."""

    def change(data: Any) -> None:
        data["recipe"] = load_recipe("fp8_mla").model_dump(mode="json")
        for layer in data["layers"].values():
            for operand in [*layer.values(), *layer["absorbed"].values()]:
                if "format" in operand:
                    operand["format"] = "fp8"

    edit_json(folder / SETTINGS_FILE, change)


def one_layer_unquantized(folder: Path) -> None:
    def change(data: Any) -> None:
        data["recipe"]["attention"]["exclude"] = ["layers.0"]
        del data["layers"][ATTENTION]

    edit_json(folder / SETTINGS_FILE, change)


def swap_weights(folder: Path) -> None:
    name = f"{ATTENTION}.o_proj.weight"
    path = folder / json.loads((folder / INDEX_FILE).read_text())["weight_map"][name]
    tensors = load_file(path)
    tensors[name] = -tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("damage", [other_formats, one_layer_unquantized, set_amax(0.05)])
def test_other_numbers_fail_on_the_logits_alone(
    copy: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(copy)
    rehash(copy)
    assert list(failed(copy, logits=True)) == ["logits"]
    assert main(["verify", str(copy)]) == 1
    shown = capsys.readouterr().out
    assert "FAILED" in shown
    assert "passed" in shown


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["layers"][ATTENTION]["q"].update(format="fp8"),
        lambda d: d["recipe"]["attention"].update(q="fp8"),
        lambda d: d["layers"].pop(ATTENTION),
        lambda d: d["layers"].update({"model.layers.7.self_attn": d["layers"][ATTENTION]}),
    ],
)
def test_settings_that_contradict_themselves_do_not_load(
    copy: Path, change: Callable[[Any], object]
) -> None:
    edit_json(copy / SETTINGS_FILE, change)
    with pytest.raises(MlaQuantError, match="settings"):
        load_quantized(copy)
    rehash(copy)
    assert "logits" in failed(copy, logits=True)


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04nothing", b"\x93NUMPY"])
def test_damaged_reference_logits(copy: Path, content: bytes | None) -> None:
    (copy / REFERENCE_FILE).unlink()
    if content is not None:
        (copy / REFERENCE_FILE).write_bytes(content)
    rehash(copy)
    assert "missing or damaged" in failed(copy, logits=True)["logits"]


def test_not_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        verify_checkpoint(tmp_path / "none")
    assert main(["verify", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["verify", str(tmp_path)]) == 1


def test_other_weights_are_at_least_not_called_equal(copy: Path) -> None:
    swap_weights(copy)
    assert "changed" in failed(copy)["file hashes"]
    rehash(copy)
    (check,) = (c for c in verify_checkpoint(copy) if c.name == "logits")
    assert not check.passed


def test_comparison_of_logits() -> None:
    torch.manual_seed(0)
    plain = torch.randn(2, 3, 50).numpy()
    quantized = plain + 0.1 * torch.randn(2, 3, 50).numpy()
    assert compare_logits(quantized, quantized, plain) == ("bit-identical", True)
    assert compare_logits(quantized, quantized + 1e-5, plain)[1]
    assert not compare_logits(quantized, plain, plain)[1]
    assert not compare_logits(quantized, quantized[:1], plain)[1]
    broken = quantized.copy()
    broken[0, 0, 0] = np.nan
    assert not compare_logits(quantized, broken, plain)[1]


# -- writing --------------------------------------------------------------------------------------


def entries(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def snapshot(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): digest(p) for p in folder.rglob("*") if p.is_file()}


def test_existing_output_is_kept(attention_only: Calibrated, copy: Path) -> None:
    before = snapshot(copy)
    with pytest.raises(CheckpointError, match="exists already"):
        attention_only.export(copy)
    assert snapshot(copy) == before
    attention_only.export(copy, overwrite=True)
    assert snapshot(copy).keys() == before.keys()
    assert entries(copy.parent) == ["copy"]


def test_overwrite_replaces_checkpoints_only(attention_only: Calibrated, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="is not a checkpoint of mla-quant"):
        attention_only.export(tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        check_target(tmp_path / "file", overwrite=True)


def test_full_disk_is_noticed_before_writing(
    attention_only: Calibrated, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(copy)
    usage = shutil.disk_usage(copy)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"not enough disk .* needs about"):
        attention_only.export(copy, overwrite=True)
    with pytest.raises(CheckpointError, match="not enough disk"):
        attention_only.export(copy.parent / "new" / "out")
    assert snapshot(copy) == before
    assert [n for n in entries(copy.parent) if n not in ("copy", "new")] == []


@pytest.mark.parametrize("after", [0, 1, 5])
def test_disk_that_fills_up_leaves_nothing_behind(
    attention_only: Calibrated, copy: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    before = snapshot(copy)
    done = 0
    real = shutil.copyfile

    def copyfile(source: Path, target: Path) -> Any:
        nonlocal done
        done += 1
        if done > after:
            Path(target).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        return real(source, target)

    monkeypatch.setattr(shutil, "copyfile", copyfile)
    for out, overwrite in ((copy, True), (copy.parent / "new", False)):
        done = 0
        with pytest.raises(CheckpointError, match=r"could not write .*No space left"):
            attention_only.export(out, overwrite=overwrite)
    assert snapshot(copy) == before
    assert entries(copy.parent) == ["copy"]


def test_failed_rename_restores_the_old_output(
    attention_only: Calibrated, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(copy)
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(errno.EIO, "input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(CheckpointError, match="could not write"):
        attention_only.export(copy, overwrite=True)
    assert snapshot(copy) == before
    assert entries(copy.parent) == ["copy"]


def test_interrupt_leaves_nothing_behind(
    attention_only: Calibrated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_module, "_write_card", stop)
    with pytest.raises(KeyboardInterrupt):
        attention_only.export(tmp_path / "out")
    assert entries(tmp_path) == []


def test_inconsistent_result_is_not_published(
    attention_only: Calibrated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "check_claims", lambda folder: ["a contradiction"])
    with pytest.raises(CheckpointError, match="not consistent: a contradiction"):
        attention_only.export(tmp_path / "out")
    assert entries(tmp_path) == []


def test_unwritable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Permissions do not bind the superuser, whom tests may run as.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(CheckpointError, match=f"no permission in {tmp_path}"):
        check_target(tmp_path / "a" / "b", overwrite=False)
    monkeypatch.undo()
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be written"):
        check_target(tmp_path / "file" / "out", overwrite=False)


def test_short_reference_samples_give_fewer_positions(
    attention_only: Calibrated, tmp_path: Path
) -> None:
    out = attention_only.export(tmp_path / "out", reference_samples=[[1, 2, 3], [4, 5, 6, 7, 8]])
    with np.load(out / REFERENCE_FILE) as archive:
        assert archive["absorbed"].shape == (2, 3, 128)
    assert all(check.passed for check in verify_checkpoint(out))


def test_side_folder_of_a_source_is_not_mixed_in(export: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(export, source)
    (source / SIDE_FOLDER / "old.txt").write_text("of the previous calibration")
    out = calibrated(source, "fp8_mla").export(tmp_path / "out")
    assert not (out / SIDE_FOLDER / "old.txt").exists()
