"""What vLLM's workers observe is what the Hugging Face engine observes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from mla_quant.checkpoint import REFERENCE_FILE, STATISTICS_FILE, compare_logits
from mla_quant.cli import main
from mla_quant.data import DataSpec, load_samples
from mla_quant.integrations.vllm_calibration import engine_arguments
from mla_quant.settings import read_settings
from tests.vllm.client import Vllm
from tests.vllm.reference import EXAMPLE
from tests.vllm.test_stock import BOUND

SAMPLES, TOKENS, BATCH = 8, 80, 4
HOOK = "tests.vllm.hooks:calibration"


@pytest.fixture(scope="module")
def expected(request, tmp_path_factory) -> Path:
    """A checkpoint that the Hugging Face engine calibrated, with the test's observer."""
    folder = tmp_path_factory.mktemp("calibrated") / "checkpoint"
    command = ["calibrate", str(EXAMPLE / "model"), "--recipe", "nvfp4_mla", "--data", "example"]
    command += ["--dtype", "float32"]
    command += ["--num-samples", str(SAMPLES), "--seq-len", str(TOKENS), "--batch-size", str(BATCH)]
    command += ["--observer", request.param, "--out", str(folder)]
    assert main(command) == 0
    return folder


def calibrate(vllm: Vllm, expected: Path, folder: Path, **engine) -> tuple[dict, dict]:
    settings = read_settings(expected)
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "model")
    samples = load_samples(
        DataSpec(source="example", num_samples=SAMPLES, seq_len=TOKENS), tokenizer
    )
    request = folder / "request.json"
    formats = {name: settings.recipe.attention.formats_of_layer(name) for name in settings.layers}
    method = settings.recipe.observer.method
    recorded = logits_of(expected)
    content = {
        "recipe": "nvfp4_mla",
        "method": method,
        "formats": formats,
        "samples": samples,
        "reference_samples": [
            recorded[name].tolist() for name in sorted(recorded) if name.startswith("tokens_")
        ],
        "positions": recorded["projected"].shape[1],
    }
    request.write_text(json.dumps(content))
    result = vllm(
        EXAMPLE / "model",
        [],
        engine=engine_arguments(TOKENS, BATCH) | engine,
        after=[HOOK],
        # The command line turns progress bars off.
        environment={"MLA_QUANT_TEST_CALIBRATION": str(request), "TQDM_DISABLE": "1"}
        | ({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} if engine else {}),
    )
    with np.load(request.with_suffix(".npz")) as archive:
        logits = {name: archive[name] for name in archive.files}
    return result.after[HOOK], logits


def logits_of(checkpoint: Path) -> dict[str, np.ndarray]:
    with np.load(checkpoint / REFERENCE_FILE) as archive:
        return {name: archive[name] for name in archive.files}


def check(found: dict, logits: dict, expected: Path) -> None:
    settings = read_settings(expected)
    records = json.loads((expected / STATISTICS_FILE).read_text())
    assert len(records) == sum(len(operands) for operands in found["statistics"].values())
    for record in records:
        layer, operand = record["layer"], record["operand"]
        ours = found["statistics"][layer][operand]
        assert ours["observed_max"] == pytest.approx(record["observed_max"], rel=1e-4)
        for field in ("format", "values", "nonfinite", "sampled_values"):
            assert ours[field] == record[field], (layer, operand, field)
        for field in ("histogram", "block_histogram"):
            a, b = (aligned(x[field]) for x in (ours, record))
            assert a.sum() == b.sum()
            # Rounding moves a magnitude over the border of a bin here and there.
            assert np.abs(a - b).sum() < 0.02 * b.sum(), (layer, operand, field)
        got = operand_of(found["settings"]["layers"][layer], operand)
        want = settings.layers[layer].operand(operand)
        assert got["format"] == want.format
        assert got["amax"] == pytest.approx(want.amax, rel=1e-4), (layer, operand)
    recorded = logits_of(expected)
    plain = torch.from_numpy(recorded["unquantized"]).log_softmax(-1).numpy()
    assert np.abs(logits["unquantized"] - plain).max() < BOUND
    detail, near = compare_logits(
        recorded["projected"], logits["projected"], recorded["unquantized"]
    )
    assert near, detail


def operand_of(layer: dict, operand: str) -> dict:
    if operand in layer:
        return layer[operand]
    return layer["absorbed"]["v" if operand == "v_latent" else operand]


def aligned(histogram: dict) -> np.ndarray:
    """Counts on the whole range of bins."""
    counts = np.zeros(1 + 64 * histogram["bins_per_octave"], dtype=np.int64)
    counts[0] = histogram["zeros"]
    start = 1 + (histogram["log2_lower"] + 32) * histogram["bins_per_octave"]
    counts[start : start + len(histogram["counts"])] = histogram["counts"]
    return counts


@pytest.mark.parametrize(
    ("vllm", "expected", "ranks"),
    [("0.26.0", "max", 1), ("0.33.0", "mse", 1), ("0.33.0", "max", 2)],
    indirect=["vllm", "expected"],
)
def test_like_hugging_face(vllm, expected, ranks, tmp_path) -> None:
    engine = {"tensor_parallel_size": ranks} if ranks > 1 else {}
    check(*calibrate(vllm, expected, tmp_path, **engine), expected)
