"""Everything that can be wrong with a model is found before its weights are read, and named."""

from __future__ import annotations

import json
import logging
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub_errors
from safetensors.torch import load_file, save_file

from mla_quant import loading
from mla_quant.errors import CheckpointError, ConfigError, UnsupportedModelError
from mla_quant.loading import (
    INDEX_FILE,
    SINGLE_FILE,
    check_files,
    check_memory,
    estimate_bytes,
    load_model,
    load_tokenizer,
    open_checkpoint,
    parse_device,
    parse_dtype,
    read_header,
    resolve_model,
)
from tests.models import make_model, save_fp8_model, save_model, token_ids


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "single")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("models") / "sharded", max_shard_size="40KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


@pytest.fixture(scope="module")
def fp8_model(single: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_fp8_model(tmp_path_factory.mktemp("models") / "fp8", single)


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[Path], Path]:
    def run(folder: Path) -> Path:
        shutil.copytree(folder, tmp_path / "model")
        return tmp_path / "model"

    return run


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def refuse(folder: Path, *words: str, error: type[Exception] = CheckpointError) -> None:
    with pytest.raises(error) as caught:
        open_checkpoint(str(folder))
    for word in words:
        assert word in str(caught.value)


def test_sound_checkpoints_open_without_reading_weights(single: Path, sharded: Path) -> None:
    one, many = open_checkpoint(str(single)), open_checkpoint(str(sharded))
    assert [f.name for f in one.files] == [SINGLE_FILE]
    assert [f.name for f in many.files] == [f.name for f in shards(sharded)]
    assert one.tensors == many.tensors
    assert one.tensors["model.layers.0.self_attn.kv_a_layernorm.weight"] == ("BF16", (32,))
    assert one.notes == many.notes == []


def test_sharded_and_single_load_alike(single: Path, sharded: Path) -> None:
    ids = token_ids()
    one, many = (load_model(open_checkpoint(str(f))) for f in (single, sharded))
    with torch.inference_mode():
        assert torch.equal(one(input_ids=ids).logits, many(input_ids=ids).logits)
    assert not one.training
    assert {p.dtype for p in one.parameters() if p.dim() > 1} == {torch.bfloat16}


# -- files ----------------------------------------------------------------------------------------


def test_missing_shard(sharded: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(sharded)
    lost = shards(folder)[1]
    name = next(iter(read_header(lost)))
    lost.unlink()
    refuse(folder, "missing weight files", lost.name, "tensors", "download them again")
    weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    assert weight_map[name] == lost.name
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("keep", [-1, -1000, 200, 8, 7, 0])
def test_truncated_shard(sharded: Path, copy: Callable[[Path], Path], keep: int) -> None:
    folder = copy(sharded)
    path = shards(folder)[1]
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    refuse(folder, path.name, "truncated", str(len(data[:keep])))


def test_bytes_after_the_tensors(single: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(single)
    with (folder / SINGLE_FILE).open("ab") as file:
        file.write(b"more")
    refuse(folder, SINGLE_FILE, "damaged")


def header_file(path: Path, header: bytes, body: int = 0, length: int | None = None) -> None:
    path.write_bytes(
        struct.pack("<Q", len(header) if length is None else length) + header + bytes(body)
    )


@pytest.mark.parametrize(
    ("header", "body", "length", "words"),
    [
        (b"{}", 0, 2**63, "its header claims"),
        (b"{}", 0, 10, "its header claims 10"),
        (b"{bad", 0, None, "not a readable safetensors file"),
        (b"\xff\xfe", 0, None, "not a readable safetensors file"),
        (b"[]", 0, None, "damaged header"),
        (b'{"a": 3}', 0, None, "damaged header"),
        (b'{"a": {"dtype": "F32", "shape": [2]}}', 8, None, "damaged header"),
        (b'{"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}', 8, None, "damaged header"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": []}}', 8, None, "damaged header"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', 4, None, "truncated"),
    ],
)
def test_header_that_lies(
    tmp_path: Path, header: bytes, body: int, length: int | None, words: str
) -> None:
    path = tmp_path / "model.safetensors"
    header_file(path, header, body, length)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_header_of_a_sound_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(())}, path, metadata={"format": "pt"})
    assert read_header(path) == {"a": ("F32", (2, 3)), "b": ("F32", ())}
    with pytest.raises(CheckpointError, match=r"b\.safetensors is missing"):
        read_header(tmp_path / "b.safetensors")


@pytest.mark.parametrize("ghost", ["model-00009-of-00009.safetensors", SINGLE_FILE])
def test_ghost_shard(sharded: Path, copy: Callable[[Path], Path], ghost: str) -> None:
    folder = copy(sharded)
    shutil.copyfile(shards(folder)[0], folder / ghost)
    refuse(folder, ghost, "not listed in", INDEX_FILE, "remove the stale")


def test_ghost_beside_a_single_file(single: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(single)
    ghost = folder / "model-00001-of-00002.safetensors"
    shutil.copyfile(folder / SINGLE_FILE, ghost)
    refuse(folder, ghost.name, "not listed")


def test_tensor_in_index_but_not_in_its_file(sharded: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(sharded)
    first, second = shards(folder)[:2]
    name = next(iter(read_header(first)))
    edit_json(folder / INDEX_FILE, lambda d: d["weight_map"].update({name: second.name}))
    refuse(folder, INDEX_FILE, "lists 1 tensors that their files lack", f"{name} in {second.name}")


def test_tensor_not_in_index(sharded: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(sharded)
    name = next(iter(read_header(shards(folder)[0])))
    edit_json(folder / INDEX_FILE, lambda d: d["weight_map"].pop(name))
    refuse(folder, "hold 1 tensors", INDEX_FILE, "does not list", name)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": null}', "\x00"]
)
def test_damaged_index(sharded: Path, copy: Callable[[Path], Path], text: str) -> None:
    folder = copy(sharded)
    (folder / INDEX_FILE).write_text(text)
    refuse(folder, INDEX_FILE, "damaged")


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "sub/x.safetensors"])
def test_index_that_leaves_its_folder(
    sharded: Path, copy: Callable[[Path], Path], name: str
) -> None:
    folder = copy(sharded)
    edit_json(folder / INDEX_FILE, lambda d: d["weight_map"].update({"lm_head.weight": name}))
    refuse(folder, INDEX_FILE, "outside its folder", name)


def test_no_weights(single: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(single)
    (folder / SINGLE_FILE).unlink()
    refuse(folder, "has no weights", SINGLE_FILE, INDEX_FILE)


def test_missing_tensor_is_never_random(single: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(single)
    tensors = load_file(folder / SINGLE_FILE)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    del tensors[name]
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(CheckpointError, match=r"lacks 1 weights .* would be random") as caught:
        load_model(checkpoint)
    assert name in str(caught.value)


def test_tensor_of_another_shape(single: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(single)
    tensors = load_file(folder / SINGLE_FILE)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    tensors[name] = tensors[name][:-16].contiguous()
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        load_model(open_checkpoint(str(folder)))
    assert f"{name} (112, 32) instead of (128, 32)" in str(caught.value)


def test_tensors_of_a_draft_layer_are_noted(single: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(single)
    tensors = load_file(folder / SINGLE_FILE)
    tensors["draft.extra.weight"] = torch.zeros(3)
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    checkpoint = open_checkpoint(str(folder))
    load_model(checkpoint)
    (note,) = checkpoint.notes
    assert "1 tensors" in note
    assert "draft.extra.weight" in note


def test_pickled_weights_load_without_running_code(
    single: Path, copy: Callable[[Path], Path]
) -> None:
    folder = copy(single)
    tensors = load_file(folder / SINGLE_FILE)
    (folder / SINGLE_FILE).unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.files == []
    assert estimate_bytes(checkpoint, "auto") == sum(
        p.stat().st_size for p in folder.glob("pytorch_model.bin")
    )
    model = load_model(checkpoint)
    assert torch.equal(model.state_dict()["lm_head.weight"], tensors["lm_head.weight"])

    class Run:
        def __reduce__(self) -> Any:
            return (Path.touch, (folder / "ran",))

    torch.save({**tensors, "lm_head.weight": Run()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="would run code when loaded"):
        load_model(open_checkpoint(str(folder)))
    assert not (folder / "ran").exists()


# -- config and tokenizer -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not readable JSON"),
        ("[]", "expected an object, found list"),
        ("", "not readable JSON"),
        ('{"model_type": "no_such_model"}', "'no_such_model'"),
        ("{}", "is not accepted by the installed transformers"),
        ('{"model_type": "deepseek_v3", "kv_lora_rank": "wide"}', "kv_lora_rank"),
    ],
)
def test_bad_config(single: Path, copy: Callable[[Path], Path], text: str, words: str) -> None:
    folder = copy(single)
    (folder / "config.json").write_text(text)
    refuse(folder, "config", words, error=ConfigError)


def test_config_missing(single: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(single)
    (folder / "config.json").unlink()
    refuse(folder, "has no config.json", error=ConfigError)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_lora_rank", 0),
        ("kv_lora_rank", -32),
        ("kv_lora_rank", 32.5),
        ("qk_nope_head_dim", 0),
        ("v_head_dim", "16"),
        ("num_attention_heads", 0),
        ("qk_rope_head_dim", 7),
        ("qk_rope_head_dim", -8),
    ],
)
def test_impossible_width(
    single: Path, copy: Callable[[Path], Path], field: str, value: object
) -> None:
    folder = copy(single)
    edit_json(folder / "config.json", lambda d: d.update({field: value}))
    refuse(folder, field, repr(value), error=ConfigError)


def test_width_that_the_weights_do_not_have(single: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(single)
    edit_json(folder / "config.json", lambda d: d.update(kv_lora_rank=48))
    with pytest.raises(CheckpointError, match=r"6 weights .*kv_a_layernorm.* \(32,\) instead"):
        load_model(open_checkpoint(str(folder)))


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_family_is_refused_by_name(
    single: Path, copy: Callable[[Path], Path], model_type: str
) -> None:
    folder = copy(single)
    edit_json(folder / "config.json", lambda d: d.update(model_type=model_type))
    refuse(folder, model_type, "sparse", error=UnsupportedModelError)


def test_longcat_without_query_rank(single: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(single)
    edit_json(
        folder / "config.json", lambda d: d.update(model_type="longcat_flash", q_lora_rank=None)
    )
    refuse(folder, "q_lora_rank", "longcat_flash", error=ConfigError)


def test_model_without_mla_is_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        vocab_size=16,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    with pytest.raises(UnsupportedModelError, match="no MLA layer"):
        load_model(open_checkpoint(str(tmp_path / "llama")))


def test_missing_tokenizer(single: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(single)
    assert load_tokenizer(folder)("ab")["input_ids"]
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        load_tokenizer(folder)


# -- quantized sources ----------------------------------------------------------------------------


def test_false_quantization_config_is_dropped_with_a_note(
    single: Path, copy: Callable[[Path], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy(single)
    edit_json(
        folder / "config.json", lambda d: d.update(quantization_config={"quant_method": "fp8"})
    )
    with caplog.at_level(logging.WARNING, logger="mla_quant"):
        checkpoint = open_checkpoint(str(folder))
    assert checkpoint.quant_method is None
    assert "'fp8'" in checkpoint.notes[0]
    assert "dropped" in caplog.text
    load_model(checkpoint)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_unsupported_quantization_is_refused(
    single: Path, copy: Callable[[Path], Path], method: str
) -> None:
    folder = copy(single)
    tensors = load_file(folder / SINGLE_FILE)
    tensors["model.layers.0.mlp.up_proj.qweight"] = torch.zeros(4, 4, dtype=torch.int32)
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    declared = {"quant_method": method, "bits": 4, "group_size": 128}
    edit_json(folder / "config.json", lambda d: d.update(quantization_config=declared))
    refuse(folder, method, "bfloat16", error=UnsupportedModelError)


def test_block_fp8_loads_dequantized(fp8_model: Path) -> None:
    checkpoint = open_checkpoint(str(fp8_model))
    assert checkpoint.quant_method == "fp8"
    model = load_model(checkpoint)
    stored = load_file(fp8_model / SINGLE_FILE)
    state = model.state_dict()
    compared = 0
    for name, value in stored.items():
        if value.dtype != torch.float8_e4m3fn or ".experts." in name:
            continue
        # One 128x128 block covers each of these small matrices, so its scale is one number.
        expected = (value.double() * stored[f"{name}_scale_inv"].double()).to(torch.bfloat16)
        assert torch.equal(state[name], expected), name
        compared += 1
    assert compared >= 12
    first = "model.layers.1.mlp.experts.0.down_proj.weight"
    expected = stored[first].double() * stored[f"{first}_scale_inv"].double()
    found = state["model.layers.1.mlp.experts.down_proj"][0]
    assert torch.equal(found, expected.to(torch.bfloat16))
    with torch.inference_mode():
        assert bool(model(input_ids=token_ids()).logits.isfinite().all())


def test_fp8_tensor_without_scale(fp8_model: Path, copy: Callable[[Path], Path]) -> None:
    folder = copy(fp8_model)
    tensors = load_file(folder / SINGLE_FILE)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    refuse(folder, "1 FP8 tensors have no *_scale_inv", name)


# -- arguments and memory -------------------------------------------------------------------------


def test_dtype_argument() -> None:
    assert parse_dtype("auto") == "auto"
    assert parse_dtype("float16") == torch.float16
    with pytest.raises(ConfigError, match=r"auto, bfloat16, float16, float32; got 'fp8'"):
        parse_dtype("fp8")


def test_dtype_is_used(single: Path) -> None:
    model = load_model(open_checkpoint(str(single)), dtype=torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "mps", "meta", "cuda:0:1"])
def test_unknown_device(name: str) -> None:
    with pytest.raises(ConfigError, match=r"auto, cpu, cuda, cuda:N or balanced"):
        parse_device(name)


def test_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert parse_device("auto") == "cpu"
    for name in ("cuda", "cuda:0", "cuda:7"):
        with pytest.raises(ConfigError, match="0 CUDA devices are visible"):
            parse_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert parse_device("cuda:1") == "cuda:1"
    with pytest.raises(ConfigError, match="2 CUDA devices are visible"):
        parse_device("cuda:2")


def test_memory_is_estimated_before_loading(
    single: Path, fp8_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = open_checkpoint(str(single))
    model = load_model(checkpoint)
    loaded = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    # transformers keeps a few small tensors in fp32.
    assert estimate_bytes(checkpoint, "auto") == pytest.approx(loaded, rel=1e-3)
    assert estimate_bytes(checkpoint, torch.float32) == sum(
        t.numel() * 4 for t in model.state_dict().values()
    )
    # FP8 weights become bfloat16: the same size as the original, though half of it on disk.
    fp8 = open_checkpoint(str(fp8_model))
    assert estimate_bytes(fp8, "auto") == estimate_bytes(checkpoint, "auto")

    loaded = estimate_bytes(checkpoint, "auto")
    monkeypatch.setattr(loading, "available_bytes", lambda device: loaded - 1)
    with pytest.raises(CheckpointError, match=r"does not fit.*--device balanced"):
        check_memory(checkpoint, "auto", "cpu")
    monkeypatch.setattr(loading, "available_bytes", lambda device: loaded + 1)
    with caplog.at_level(logging.WARNING, logger="mla_quant"):
        assert "free on cpu" in check_memory(checkpoint, "auto", "cpu")
    assert "memory is tight" in caplog.text


# -- finding a model ------------------------------------------------------------------------------


def test_misspelt_folder_gets_a_suggestion(single: Path) -> None:
    with pytest.raises(CheckpointError, match=r"did you mean .*single"):
        resolve_model(str(single.parent / "sinlge"))
    with pytest.raises(CheckpointError, match=r"does not exist$"):
        resolve_model("./nothing/like/this")
    with pytest.raises(CheckpointError, match=r"is a file; give the folder"):
        resolve_model(str(single / "config.json"))


def hub_error(kind: type[Exception], status: int) -> Exception:
    response = httpx.Response(status, request=httpx.Request("GET", "https://hub.test"))
    return kind("message", response=response)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (hub_error(hub_errors.GatedRepoError, 403), "is gated: log in with `hf auth login`"),
        (hub_error(hub_errors.RepositoryNotFoundError, 404), "nor a model on the hub"),
        (hub_errors.LocalEntryNotFoundError("x"), "the hub cannot be reached"),
        (hub_errors.OfflineModeIsEnabled("x"), "offline"),
        (hub_error(hub_errors.HfHubHTTPError, 500), "could not be downloaded"),
        (httpx.ConnectError("no route"), "could not be downloaded: no route"),
        (OSError("disk full"), "could not be downloaded: disk full"),
    ],
)
def test_hub_errors_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        resolve_model("org/model")
    assert "'org/model'" in str(caught.value)
    assert words in str(caught.value)


def test_hub_model_is_downloaded(monkeypatch: pytest.MonkeyPatch, single: Path) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(single))
    assert open_checkpoint("org/model").source == "org/model"
    assert check_files(resolve_model("org/model"))[1]


def test_offline_and_not_cached() -> None:
    with pytest.raises(CheckpointError, match=r"nor cached|neither a local folder"):
        resolve_model("some-org/some-model-that-is-not-here")


def test_model_built_in_tests_is_the_saved_one(single: Path) -> None:
    model = make_model(dtype=torch.bfloat16)
    saved = load_file(single / SINGLE_FILE)
    assert torch.equal(model.state_dict()["lm_head.weight"], saved["lm_head.weight"])
