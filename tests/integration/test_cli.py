"""The command line: every option, every way to misuse it, interruption, several processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mla_quant import calibration, checkpoint, loading
from mla_quant.checkpoint import STATISTICS_FILE
from mla_quant.cli import main
from mla_quant.recipes import OPERANDS, load_recipe, recipe_names
from mla_quant.settings import SETTINGS_FILE, read_settings
from tests.models import save_model

SMALL = ("--num-samples", "16", "--seq-len", "64", "--batch-size", "4", "--device", "cpu")
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "text.jsonl"
    # Lengths differ, so that batches are padded.
    rows = [{"text": f"Line {i} says so. " * (1 + i % 5), "other": i} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def undisturbed(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run with nothing special: what others are compared with."""
    out = tmp_path_factory.mktemp("cli") / "undisturbed"
    assert main(["calibrate", str(model), *options(data, out)]) == 0
    return out


def options(data: Path, out: Path, *more: str, recipe: str = "nvfp4_mla") -> list[str]:
    return ["--data", str(data), "--out", str(out), "--recipe", recipe, *SMALL, *more]


def numbers(out: Path) -> tuple[Any, bytes]:
    """What must not depend on how a calibration was run."""
    layers = json.loads((out / SETTINGS_FILE).read_text())["layers"]
    return layers, (out / STATISTICS_FILE).read_bytes()


def flat(shown: str) -> str:
    """Without the line breaks of a narrow terminal."""
    return " ".join(shown.split())


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if weights are read."""

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("the model was loaded")

    for module, name in (
        (loading, "load_model"), (checkpoint, "load_model"), (checkpoint, "load_weights"),
        (checkpoint, "load_quantized"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, fail)


# -- calibrate ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_model")
def test_dry_run_prints_what_is_enabled(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", str(model), *options(data, tmp_path / "out", "--dry-run")]) == 0
    shown = capsys.readouterr().out
    for layer in range(2):
        for operand in OPERANDS:
            assert f"model.layers.{layer}.self_attn.{operand}: nvfp4" in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_model")
def test_dry_run_as_json(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data", str(data), "--out", str(tmp_path / "out"), "--k", "fp8", "--dry-run"]
    assert main(["calibrate", str(model), *arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    letters = {line.rpartition(".")[2] for line in plan["enabled"]}
    assert letters == {"k: fp8", "k_latent: fp8", "k_rope: fp8"}
    assert len(plan["enabled"]) == 2 * 3
    assert plan["weights"] == "none"
    assert plan["weight_bytes"] > 0


def test_one_operand_alone(model: Path, data: Path, tmp_path: Path) -> None:
    arguments = ["--data", str(data), "--out", str(tmp_path / "out"), "--k", "fp8", *SMALL]
    assert main(["calibrate", str(model), *arguments]) == 0
    for layer in read_settings(tmp_path / "out").layers.values():
        formats = {name: layer.operand(name).format for name in OPERANDS}
        assert {n for n, f in formats.items() if f != "none"} == {"k", "k_latent", "k_rope"}
        assert layer.q.amax is None


def test_json_is_all_there_is_on_stdout(
    model: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["calibrate", str(model), *options(data, out, "--json")]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["layers"] == 2
    assert result["samples"] == 16
    assert {r["operand"] for r in result["statistics"]} == set(OPERANDS)
    assert result["data"]["source"] == str(data)
    assert read_settings(out).calibration["samples"] == 16


def test_result_repeats(model: Path, data: Path, undisturbed: Path, tmp_path: Path) -> None:
    assert main(["calibrate", str(model), *options(data, tmp_path / "out")]) == 0
    assert numbers(tmp_path / "out") == numbers(undisturbed)
    assert main(["calibrate", str(model), *options(data, tmp_path / "b", "--seed", "7")]) == 0
    assert numbers(tmp_path / "b") != numbers(undisturbed)


def test_options_reach_the_settings(model: Path, data: Path, tmp_path: Path) -> None:
    more = ("--form", "projected", "--observer", "percentile", "--percentile", "99",
            "--dtype", "float32", "--attn-implementation", "eager", "--p", "none")  # fmt: skip
    assert main(["calibrate", str(model), *options(data, tmp_path / "out", *more)]) == 0
    settings = read_settings(tmp_path / "out")
    assert settings.recipe.attention.forms == ("projected",)
    assert settings.recipe.observer.method == "percentile"
    assert settings.recipe.observer.percentile == 99
    assert settings.recipe.attention.p == "none"
    assert settings.calibration["dtype"] == "float32"
    for record in json.loads((tmp_path / "out" / STATISTICS_FILE).read_text()):
        assert record["operand"] in ("q", "k", "v")


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_verifies(recipe: str, model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    weights = load_recipe(recipe).weights
    if weights == "nvfp4":
        from tests.models import make_model

        model = save_model(tmp_path / "wide", make_model(dtype=torch.bfloat16, q_lora_rank=32))
    assert main(["calibrate", str(model), *options(data, out, recipe=recipe)]) == 0
    assert main(["verify", str(out)]) == 0


def test_draft_note_and_false_declaration_are_kept(model: Path, data: Path, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["calibrate", str(folder), *options(data, tmp_path / "out")]) == 0
    assert "eh_proj" in read_settings(tmp_path / "out").calibration["notes"][0]
    assert "model.layers.2.eh_proj.weight" in load_file(tmp_path / "out" / "model.safetensors")


# -- bad input ------------------------------------------------------------------------------------


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


VLLM = ("--engine", "vllm", "--device", "auto")

BAD: dict[str, tuple[list[str], str]] = {
    "unknown recipe": (["--recipe", "nvfp4_mia"], "did you mean 'nvfp4_mla'"),
    "format": (["--k", "int4"], "'int4'"),
    "form": (["--form", "sideways"], "--form must be both, projected or absorbed"),
    "observer": (["--observer", "median"], "'median'"),
    "percentile": (["--percentile", "30"], "percentile"),
    "batch": (["--batch-size", "0"], "--batch-size must be at least 1"),
    "samples": (["--num-samples", "0"], "num_samples is 0"),
    "length": (["--seq-len", "1"], "seq_len is 1"),
    "seed": (["--seed", "-1"], "seed is -1"),
    "dtype": (["--dtype", "int8"], "dtype must be auto"),
    "device": (["--device", "gpu"], "device must be auto"),
    "no such gpu": (["--device", "cuda:99"], "does not exist"),
    "shards": (["--max-shard-size", "5 bananas"], "--max-shard-size"),
    "attention": (["--attn-implementation", "no_such"], "'no_such'"),
    "column": (["--text-column", "missing"], "'missing'"),
    "empty column": (["--text-column", "other"], "other"),
    "split": (["--split", "train"], "split"),
    "not a number": (["--seed", "x"], "--seed"),
    "unknown option": (["--sample", "3"], "--sample"),
    "engine": (["--engine", "tensorrt"], "--engine must be transformers or vllm"),
    "ranks of transformers": (["--tensor-parallel-size", "2"], "belongs to --engine vllm"),
    "ranks": ([*VLLM, "--tensor-parallel-size", "0"], "must be at least 1, got 0"),
    "device of vllm": ([*VLLM, "--device", "cpu"], "--device has no meaning for --engine vllm"),
    "resume in vllm": ([*VLLM, "--resume"], "--resume has no meaning for --engine vllm"),
    "weights in vllm": ([*VLLM, "--recipe", "fp8_mla_fp8_weights"], "calibrates attention alone"),
    "form in vllm": ([*VLLM, "--form", "absorbed"], "use --form both"),
}


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("case", BAD)
def test_bad_option(
    case: str, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, words = BAD[case]
    code = main(["calibrate", str(model), *options(data, tmp_path / "out", *arguments)])
    captured = capsys.readouterr()
    assert code == 2
    assert words in flat(captured.err)
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


Make = Callable[[Path, Path], tuple[str, str]]
"""From the good model and a scratch folder: a model argument and a data argument."""


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m, t: (f"{m}l", None), "did you mean"),
        (lambda m, t: (t / "none" / "model", None), "does not exist"),
        (lambda m, t: (write(t / "m" / "readme.txt", "x").parent, None), "no config.json"),
        (lambda m, t: (write(t / "m" / "config.json", "{").parent, None), "not readable JSON"),
        (
            lambda m, t: (
                write(t / "m" / "config.json", '{"model_type": "deepseek_v32"}').parent,
                None,
            ),
            "sparse attention",
        ),
        (lambda m, t: (m, t / "none.jsonl"), "none.jsonl"),
        (lambda m, t: (m, write(t / "empty.jsonl", "")), "empty.jsonl"),
        (lambda m, t: (m, write(t / "blank.txt", "\n\n  \n")), "blank.txt"),
        (lambda m, t: (m, write(t / "bad.jsonl", '{"text": "a"}\n{bad')), "bad.jsonl"),
        (lambda m, t: (m, write(t / "empty" / "x.md", "x").parent), "empty"),
        (lambda m, t: (m, write(t / "rows.jsonl", '{"text": ""}\n' * 5)), "rows.jsonl"),
    ],
)
def test_bad_model_or_data(
    make: Make, words: str, model: Path, data: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    chosen, source = make(model, tmp_path / "in")
    out = tmp_path / "out"
    code = main(["calibrate", str(chosen), *options(Path(source or data), out)])
    captured = capsys.readouterr()
    assert code == 2, captured
    assert words in flat(captured.err)
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert [p.name for p in tmp_path.iterdir() if p.name != "in"] == []


@pytest.mark.usefixtures("no_model")
def test_rows_that_are_all_filtered(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Readable text, but nothing besides special tokens.
    data = write(tmp_path / "rows.jsonl", '{"text": "<eos>"}\n{"text": "<pad>"}\n')
    assert main(["calibrate", str(model), *options(data, tmp_path / "out")]) == 2
    assert "only special tokens" in flat(capsys.readouterr().err)
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.usefixtures("no_model")
def test_nothing_to_do(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data", str(data), "--out", str(tmp_path / "out")]
    assert main(["calibrate", str(model), *arguments]) == 2
    assert "nothing to do" in capsys.readouterr().err
    assert main(["calibrate", str(model), *arguments, "--k", "none"]) == 2
    assert "quantizes nothing" in capsys.readouterr().err
    assert main(["calibrate", str(model)]) == 2
    assert "--data" in capsys.readouterr().err
    assert main(["no-such-command"]) == 2


@pytest.mark.usefixtures("no_model")
def test_output_in_the_way(
    model: Path, data: Path, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = numbers(undisturbed)
    assert main(["calibrate", str(model), *options(data, undisturbed)]) == 2
    assert "exists already" in flat(capsys.readouterr().err)
    assert numbers(undisturbed) == before
    mine = write(tmp_path / "mine" / "thesis.txt", "years of work")
    for flag in ("--overwrite", "--resume"):
        assert main(["calibrate", str(model), *options(data, mine.parent, flag)]) == 2
    assert mine.read_text() == "years of work"
    # An output that would take the model with it.
    for out in (model / "out", model.parent):
        code = main(["calibrate", str(model), *options(data, out, "--overwrite")])
        assert code == 2
    assert (model / "config.json").is_file()
    assert not (model / "out").exists()


@pytest.mark.usefixtures("no_model")
def test_too_large_model_is_refused_before_loading(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(loading, "available_bytes", lambda device: 1000)
    assert main(["calibrate", str(model), *options(data, tmp_path / "out")]) == 2
    assert "does not fit" in flat(capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_local_data_touches_no_network(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*args: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    assert main(["calibrate", str(model), *options(data, tmp_path / "out")]) == 0
    assert main(["verify", str(tmp_path / "out")]) == 0


# -- memory ---------------------------------------------------------------------------------------


def limit_batch(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Run out of memory in the second layer, when the first has been observed already."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    cls = modeling_deepseek_v3.DeepseekV3MoE
    real = cls.forward

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        if hidden_states.shape[0] > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, hidden_states)

    monkeypatch.setattr(cls, "forward", forward)


@pytest.mark.parametrize("observer", ["max", "mse"])
def test_batch_is_halved_and_nothing_counted_twice(
    observer: str, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    more = ("--observer", observer)
    asked = options(data, tmp_path / "asked", *more, "--batch-size", "2")
    assert main(["calibrate", str(model), *asked]) == 0
    capsys.readouterr()
    limit_batch(monkeypatch, 2)
    halved = options(data, tmp_path / "halved", *more, "--json")
    assert main(["calibrate", str(model), *halved]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["batch_size"] == 2
    assert "batch size halved to 2" in flat(captured.err)
    assert numbers(tmp_path / "halved") == numbers(tmp_path / "asked")


def test_one_sample_too_large(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    limit_batch(monkeypatch, 0)
    assert main(["calibrate", str(model), *options(data, tmp_path / "out")]) == 2
    err = flat(capsys.readouterr().err)
    assert "out of memory with a single sample" in err
    assert "--seq-len" in err
    assert not (tmp_path / "out").exists()


# -- interruption ---------------------------------------------------------------------------------


@pytest.fixture
def interrupted(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Output whose calibration stopped after two of four batches."""
    out = tmp_path / "out"
    real = calibration.run_batch
    done = 0

    def run_batch(*args: Any) -> None:
        nonlocal done
        done += 1
        if done > 2:
            raise KeyboardInterrupt
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(calibration, "run_batch", run_batch)
        patch.setattr(calibration, "SAVE_SECONDS", 0.0)
        assert main(["calibrate", str(model), *options(data, out)]) == 130
    assert not out.exists()
    return out


def test_resume_runs_only_what_is_left(
    interrupted: Path, model: Path, data: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = calibration.run_batch
    batches = []

    def run_batch(model: Any, batch: Any) -> None:
        batches.append(batch)
        real(model, batch)

    monkeypatch.setattr(calibration, "run_batch", run_batch)
    assert main(["calibrate", str(model), *options(data, interrupted, "--resume")]) == 0
    assert len(batches) == 2
    assert numbers(interrupted) == numbers(undisturbed)
    assert [p.name for p in interrupted.parent.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--batch-size", "2"), ["batch_size"]),
        (("--seed", "3"), ["data"]),
        (("--dtype", "float32"), ["dtype"]),
        (("--k", "fp8", "--attn-implementation", "eager"), ["attn_implementation, recipe"]),
    ],
)
def test_resume_with_other_settings_is_refused(
    interrupted: Path, model: Path, data: Path, arguments: tuple[str, ...], words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    capsys.readouterr()
    more = ("--resume", *arguments)
    assert main(["calibrate", str(model), *options(data, interrupted, *more)]) == 2
    err = flat(capsys.readouterr().err)
    assert f"had other settings: {words[0]} differ" in err
    assert not interrupted.exists()


def test_start_again_discards_the_interrupted_run(
    interrupted: Path, model: Path, data: Path, undisturbed: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert main(["calibrate", str(model), *options(data, interrupted)]) == 0
    assert "discarding an interrupted run" in flat(capsys.readouterr().err)
    assert numbers(interrupted) == numbers(undisturbed)


@pytest.mark.parametrize("file", ["run.json", "rank0.pass1.state"])
def test_damaged_state_is_refused(
    interrupted: Path, model: Path, data: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (interrupted.parent / f".{interrupted.name}.calibration" / file).write_bytes(b"[damaged")
    assert main(["calibrate", str(model), *options(data, interrupted, "--resume")]) == 2
    assert "damaged" in capsys.readouterr().err


@pytest.mark.usefixtures("no_model")
def test_finished_run_has_nothing_to_do(
    undisturbed: Path, model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.stat().st_mtime_ns for p in undisturbed.rglob("*")}
    assert main(["calibrate", str(model), *options(data, undisturbed, "--resume")]) == 0
    assert "nothing to do" in flat(capsys.readouterr().err)
    assert {p: p.stat().st_mtime_ns for p in undisturbed.rglob("*")} == before
    assert main(["calibrate", str(model), *options(data, undisturbed, "--resume", "--json")]) == 0
    assert json.loads(capsys.readouterr().out) == {"out": str(undisturbed), "finished": True}
    more = ("--resume", "--seed", "5")
    assert main(["calibrate", str(model), *options(data, undisturbed, *more)]) == 2
    assert "finished, with other settings (data differ" in flat(capsys.readouterr().err)


KILLER = '''
"""Fork a child for each run, so that modelopt is imported once; kill it; resume it."""
import json, os, signal, socket, sys
import torch
torch.set_num_threads(1)
from mla_quant import calibration, checkpoint
from mla_quant.cli import main

def refuse(*args):
    raise RuntimeError("a connection was opened")
socket.socket.connect = refuse

def run(arguments, moment=None):
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    calibration.SAVE_SECONDS = 0.0
    if moment is not None:
        module, name, calls = moment
        module = {"calibration": calibration, "checkpoint": checkpoint}[module]
        real, count = getattr(module, name), [0]
        def wrapped(*args, **kwargs):
            count[0] += 1
            if count[0] > calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        setattr(module, name, wrapped)
    try:
        code = main(arguments)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        code = 99
    os._exit(code)

results = []
for case in json.loads(sys.argv[1]):
    killed = [run(case["arguments"] + (["--resume"] if i else []), m)
              for i, m in enumerate(case["moments"])]
    left = os.path.exists(case["out"])
    results.append([killed, left, run(case["arguments"] + ["--resume"])])
print("RESULT" + json.dumps(results))
'''


def test_killed_and_resumed_gives_the_same_bytes(
    model: Path, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """SIGKILL at every kind of moment; the whole command without CUDA and without network."""
    moments: list[tuple[str, list[tuple[str, str, int]]]] = [
        ("max", [("calibration", "run_batch", 1)]),
        ("max", [("calibration", "run_batch", 3)]),
        ("max", [("calibration", "save_file", 2)]),
        ("max", [("checkpoint", "_write_card", 0)]),
        ("max", [("calibration", "run_batch", 1), ("calibration", "run_batch", 1)]),
        ("mse", [("calibration", "run_batch", 6)]),
        ("mse", [("calibration", "run_batch", 6), ("calibration", "run_batch", 1)]),
    ]
    cases = []
    for index, (observer, kills) in enumerate(moments):
        out = tmp_path / f"out{index}"
        arguments = ["calibrate", str(model), *options(data, out, "--observer", observer)]
        cases.append({"arguments": arguments, "moments": kills, "out": str(out)})
    run = subprocess.run(
        [sys.executable, "-c", KILLER, json.dumps(cases)], capture_output=True, text=True,
        check=False, timeout=300,
        env={**ENVIRONMENT, "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"},
    )  # fmt: skip
    assert "RESULT" in run.stdout, run.stderr
    results = json.loads(run.stdout.partition("RESULT")[2])
    for (_, kills), (killed, left, code) in zip(moments, results, strict=True):
        assert killed == [9] * len(kills), run.stderr  # ended by signal 9, nothing else
        assert not left
        assert code == 0, run.stderr
    assert (
        main(["calibrate", str(model), *options(data, tmp_path / "mse", "--observer", "mse")]) == 0
    )
    for index, (observer, kills) in enumerate(moments):
        expected = undisturbed if observer == "max" else tmp_path / "mse"
        assert numbers(tmp_path / f"out{index}") == numbers(expected), kills
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"mse", *(f"out{i}" for i in range(len(moments)))}


def test_two_processes_give_the_statistics_of_one(
    model: Path, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    arguments = ["calibrate", str(model), *options(data, tmp_path / "out", "--observer", "max")]
    run = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
            "-m", "mla_quant.cli", *arguments, "--json",
        ],
        capture_output=True, text=True, check=False, timeout=300, env=ENVIRONMENT,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["processes"] == 2
    assert numbers(tmp_path / "out") == numbers(undisturbed)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


# -- the other commands ---------------------------------------------------------------------------


def test_evaluate_writes_a_report(
    undisturbed: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report"
    arguments = [
        "evaluate", str(undisturbed), "--data", str(data), "--out", str(out), "--device", "cpu",
        "--num-samples", "2", "--seq-len", "48", "--decode-tokens", "4",
        "--sensitivity-samples", "1",
    ]  # fmt: skip
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    report = json.loads((out / "report.json").read_text())
    assert {k: v for k, v in result.items() if k != "report"} == report
    assert {row["form"] for row in report["accuracy"]} >= {"projected", "absorbed"}
    assert (out / "report.html").read_text().lstrip().lower().startswith("<!doctype html>")
    assert main(arguments) == 2
    assert "holds a report already" in flat(capfd.readouterr().err)
    assert main([*arguments, "--overwrite", "--sensitivity", "none", "--form", "absorbed"]) == 0
    assert "KL" in capfd.readouterr().out


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--form", "sideways"], "--form must be one of"),
        (["--sensitivity", "some"], "--sensitivity must be one of"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--decode-tokens", "-1"], "--decode-tokens must be at least 0"),
        (["--device", "cuda:99"], "does not exist"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--seq-len", "0"], "seq_len is 0"),
    ],
)
def test_evaluate_refuses_bad_options(
    arguments: list[str], words: str, undisturbed: Path, data: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    base = ["evaluate", str(undisturbed), "--data", str(data), "--out", str(tmp_path / "out")]
    assert main([*base, *arguments]) == 2
    captured = capsys.readouterr()
    assert words in flat(captured.err)
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []
    assert main(["evaluate", str(tmp_path), *base[2:]]) == 2
    assert SETTINGS_FILE in capsys.readouterr().err


@pytest.mark.usefixtures("no_model")
def test_inspect(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(model), "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["family"] == "deepseek_v3"
    assert facts["layers"] == 2
    assert facts["geometry"]["kv_lora_rank"] == 32
    assert facts["cache_bytes_per_token"]["latent_bfloat16"] == 2 * 2 * (32 + 8)
    assert main(["inspect", str(model)]) == 0
    shown = capfd.readouterr().out
    assert "deepseek_v3" in shown
    assert "bytes/token" in shown
    assert main(["inspect", str(model / "nothing")]) == 2


def test_recipes(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--json"]) == 0
    listed = json.dumps(json.loads(capfd.readouterr().out))
    assert all(name in listed for name in recipe_names())
    assert main(["recipes"]) == 0
    assert "nvfp4_mla" in capfd.readouterr().out


def test_records(capfd: pytest.CaptureFixture[str]) -> None:
    """Without a model: sizes of one layer."""
    assert main(["records", "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)
    rows = {row["name"]: row for row in listed["records"]}
    assert len(rows) == 9
    assert listed["model"] is None
    assert rows["nvfp4_fp8rope_352"]["bytes_per_token"] == 352
    assert rows["nvfp4_fp8rope_352"]["tokens_per_gib"] == 2**30 // (64 * 352) * 64
    # A page of 64 tokens of this format is padded from 37376 to 37440 bytes.
    assert rows["dsv4_fp8_584"]["page_bytes"] == 37440
    assert rows["dsv4_fp8_584"]["tokens_per_gib"] == 2**30 // 37440 * 64
    assert {row["outer_scale"] for row in rows.values()} == {"per token", "per layer", None}
    assert rows["nvfp4_fp8rope_352"]["scales"]["latent"]["writer"]["rounding"] == (
        "nearest_not_below"
    )
    assert main(["records"]) == 0
    shown = capfd.readouterr().out
    assert all(name in shown for name in rows)
    assert "one layer" in shown


@pytest.mark.usefixtures("no_model")
def test_records_of_a_model(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With a model: sizes of all its layers, for the formats that have room for its latent."""
    example = Path(__file__).parents[2] / "examples" / "tiny_mla" / "model"
    assert main(["records", str(example), "--page-size", "16", "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)
    layers = listed["model"]["layers"]
    assert listed["model"]["geometries"] == ["512+64"]
    assert listed["model"]["bfloat16"]["bytes_per_token"] == layers * 2 * 576
    fitting = {row["name"]: row for row in listed["records"] if row["fits"]}
    assert set(fitting) == {
        "fp8_ds_mla_656", "nvfp4_fp8rope_352", "nvfp4_ds_mla_432", "nvfp4_ds_mla_368",
    }  # fmt: skip
    row = fitting["nvfp4_ds_mla_432"]
    assert row["bytes_per_token"] == layers * 432
    assert row["tokens_per_gib"] == 2**30 // (layers * 16 * 432) * 16
    assert all(row["tokens_per_gib"] is None for row in listed["records"] if not row["fits"])

    assert main(["records", str(model)]) == 0
    assert capfd.readouterr().out.count("does not fit") == 9
    assert main(["records", str(model / "nothing")]) == 2
    assert main(["records", "--page-size", "0"]) == 2
    assert "--page-size must be at least 1" in flat(capfd.readouterr().err)


def test_verify(undisturbed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(undisturbed), "--no-logits"]) == 0
    assert "passed" in capfd.readouterr().out
    assert main(["verify", str(undisturbed), "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["passed"]
    assert [c["name"] for c in result["checks"]] == [
        "settings", "file hashes", "tensors and claims", "logits",
    ]  # fmt: skip
    (undisturbed / "stray").write_text("x")
    try:
        assert main(["verify", str(undisturbed), "--json", "--no-logits"]) == 1
        assert not json.loads(capfd.readouterr().out)["passed"]
    finally:
        (undisturbed / "stray").unlink()


def test_version_and_help(capfd: pytest.CaptureFixture[str]) -> None:
    from mla_quant import __version__

    assert main(["--version"]) == 0
    assert __version__ in capfd.readouterr().out
    for command in ("calibrate", "evaluate", "inspect", "verify", "recipes", "records"):
        assert main([command, "--help"]) == 0
        assert command in capfd.readouterr().out
