"""Stock vLLM, without anything of this project in its process, loads what `calibrate` writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

# More arguments of `LLM`, as JSON: for a build without the kernels that it would choose.
ENGINE_ARGUMENTS = os.environ.get("MLA_QUANT_TEST_ENGINE_ARGUMENTS", "{}")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny_mla" / "model"

SERVE = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], attention_backend="TRITON_MLA", enforce_eager=True, max_model_len=512,
          gpu_memory_utilization=0.3, dtype="bfloat16", **json.loads(sys.argv[2]))
prompts = ["MACBETH. \\n", "And it came to pass", "The king"]
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
assert "mla_quant" not in sys.modules
print("RESULT", json.dumps([list(o.outputs[0].token_ids) for o in outputs]))
"""


def serve(folder: Path) -> list[list[int]]:
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(folder), ENGINE_ARGUMENTS],
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def export(recipe: str, out: Path) -> Path:
    command = [sys.executable, "-m", "mla_quant.cli", "calibrate", str(EXAMPLE)]
    command += ["--recipe", recipe, "--data", "example", "--out", str(out), "--num-samples", "32"]
    subprocess.run(command, check=True)
    return out


def test_attention_only_export_serves_like_its_source(tmp_path) -> None:
    """The weights are the source's bytes and stock vLLM knows no quantized attention."""
    assert serve(export("nvfp4_mla", tmp_path / "out")) == serve(EXAMPLE)


@pytest.mark.parametrize("recipe", ["fp8_mla_fp8_weights", "nvfp4_mla_nvfp4_weights"])
def test_quantized_weights_load_and_generate(tmp_path, recipe) -> None:
    tokens = serve(export(recipe, tmp_path / "out"))
    assert [len(t) for t in tokens] == [12, 12, 12]
    reference = serve(EXAMPLE)
    same = sum(
        a == b for x, y in zip(tokens, reference, strict=True) for a, b in zip(x, y, strict=True)
    )
    # Wrongly scaled weights give none of the original's 36 tokens but by accident.
    assert same >= 12, (tokens, reference)
