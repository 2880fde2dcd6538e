"""Every `mla-quant` command of the manual runs, in the order of its page, on a small model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mla_quant.cli import main
from tests.manual import READABLE, ROOT, Command, blocks, commands
from tests.models import save_model

SMALL = {
    "calibrate": ("--num-samples", "4", "--seq-len", "48", "--device", "cpu"),
    "evaluate": (
        "--num-samples", "2", "--seq-len", "48", "--decode-tokens", "4", "--device", "cpu",
        "--sensitivity-samples", "1",
    ),
}  # fmt: skip
"""Given last, these hold."""


def run_elsewhere(command: Command) -> bool:
    """vLLM and several processes: run by the tests that docs/reliability.md names."""
    return command.words[0] == "torchrun" or "vllm" in command.words


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run: with the files that they name."""
    top = tmp_path_factory.mktemp("manual")
    save_model(top / "MODEL")
    shutil.copytree(ROOT / "examples" / "tiny_mla" / "model", top / "examples/tiny_mla/model")
    for name in ("text.jsonl", "heldout.jsonl"):
        rows = [{"text": f"{name} line {i} says so. " * (1 + i % 5)} for i in range(20)]
        (top / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (recipe,) = blocks(ROOT / "docs" / "calibrate.md", "yaml")
    (top / "mine.yaml").write_text(recipe)
    return top


OURS = [command for command in commands() if command.mla_quant and not run_elsewhere(command)]


@pytest.mark.parametrize(
    "page", [p for p in READABLE if any(c.page == p for c in OURS)], ids=lambda page: page.name
)
def test_commands_run(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for command in (c for c in OURS if c.page == page):
        name, *rest = command.mla_quant or ()
        wanted = [name, *rest, *SMALL.get(name, ())]
        if name == "evaluate" and rest[0] == "OUT" and not Path("OUT").exists():
            calibrate = ["calibrate", "MODEL", "--recipe", "nvfp4_mla", "--data", "text.jsonl"]
            assert main([*calibrate, "--out", "OUT", *SMALL["calibrate"]]) == 0
        # The manual calls every output OUT, its readers do not.
        if name == "calibrate" and "--overwrite" not in rest:
            shutil.rmtree("OUT", ignore_errors=True)
        if name == "evaluate":
            shutil.rmtree("REPORT", ignore_errors=True)
        assert main(wanted) == 0, command
    shutil.rmtree("OUT", ignore_errors=True)
