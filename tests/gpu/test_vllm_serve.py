"""The plugin in the vLLM that is installed, on a GPU: compiled kernels, graphs, torch.compile.

Compared with the Hugging Face model in float32, which vLLM's backend serves once its list of dtypes
says so: there a difference is one of the engine. In bfloat16, rounding of activations by itself
moves as many values across a tie as quantization changes, so that comparisons show much less.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mla_quant.checkpoint import load_quantized
from mla_quant.records import RECORDS, outer_scale
from mla_quant.settings import read_settings

pytest.importorskip("vllm")

from tests.vllm.client import Output, Result, Vllm, entry_points, run
from tests.vllm.reference import EXAMPLE, Reference, calibrate, check_agreement, divergence
from tests.vllm.test_records import RecordReference, chunks, unquantized
from tests.vllm.test_stock import BOUND_BFLOAT16, held_out

GENERATED = 12
LENGTHS = (5, 40, 97, 200)
VERSION = importlib.metadata.version("vllm").split("+")[0]
FLOAT32 = {"dtype": "float32"}
ALLOWED = ["tests.vllm.hooks:allow_float32"]

# Arguments of `LLM` by what the decode steps and the prefill run in.
MODES = {
    "eager": {},
    "full": {
        "enforce_eager": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    },
    "compiled": {
        "enforce_eager": False,
        "compilation_config": {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"},
    },
    "piecewise": {
        "enforce_eager": False,
        "compilation_config": {"mode": 3, "cudagraph_mode": "PIECEWISE"},
    },
}
for mode in ("full", "compiled", "piecewise"):
    MODES[mode]["compilation_config"]["cudagraph_capture_sizes"] = [1, 2, 4, 8, 16, 64]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Vllm:
    scratch = tmp_path_factory.mktemp("vllm")
    metadata = entry_points(tmp_path_factory.mktemp("metadata"))
    return Vllm(VERSION, Path(sys.executable), scratch, metadata, "cuda")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrate(tmp_path_factory.mktemp("quantized") / "checkpoint")


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint, "cuda")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return held_out(LENGTHS)


def one_by_one(prompts: list[list[int]], tokens: int = GENERATED) -> list[dict]:
    return [run([ids], tokens, prompt_logprobs=True, logprobs=True) for ids in prompts]


def all_logprobs(output: Output) -> np.ndarray:
    return np.concatenate([output.prompt_logprobs, output.logprobs])


def check_decoding(
    reference: Reference, prompt: list[int], output: Output, share: float = 0.5
) -> None:
    """Generated tokens alone: prefixes from the cache have no log-probabilities."""
    tokens, rows = output.tokens[:-1], slice(len(prompt) - 1, None)
    want = reference.logprobs(reference.quantized, prompt, tokens)[rows]
    original = reference.logprobs(reference.original, prompt, tokens)[rows]
    effect, found = divergence(original, want).mean(), divergence(want, output.logprobs).mean()
    print(f"KL: {found / effect:.3f} of quantization's effect")
    assert found < share * effect


def test_unquantized(vllm, prompts, reference) -> None:
    """vLLM as it is, FlashAttention and bfloat16, with the plugin there and nothing to do."""
    result = vllm(EXAMPLE / "model", one_by_one(prompts), after=["tests.vllm.hooks:kernels"])
    assert result.after["tests.vllm.hooks:kernels"] == ["TritonMLAImpl"] * 4
    for prompt, (output,) in zip(prompts, result.runs, strict=True):
        expected = reference.logprobs(reference.original, prompt, output.tokens[:-1])
        errors = np.sqrt(((all_logprobs(output) - expected) ** 2).mean(-1))
        assert errors.mean() < BOUND_BFLOAT16


def check(result: Result, prompts: list[list[int]], reference: Reference) -> None:
    assert result.after["tests.vllm.hooks:kernels"] == ["QuantTritonMLAImpl"] * 4
    for prompt, (output,) in zip(prompts, result.runs, strict=True):
        check_agreement(reference, prompt, output)


@pytest.mark.parametrize(
    ("mode", "side_cache"),
    [(mode, True) for mode in MODES] + [("eager", False), ("compiled", False)],
)
def test_close_to_hugging_face(vllm, checkpoint, prompts, reference, mode, side_cache) -> None:
    """Chunks of 64 tokens, context from the cache, decode; in every way vLLM can run them."""
    engine = MODES[mode] | FLOAT32 | {"additional_config": {"mla_quant_side_cache": side_cache}}
    result = vllm(
        checkpoint,
        one_by_one(prompts),
        engine=engine,
        before=ALLOWED,
        after=["tests.vllm.hooks:kernels"],
    )
    check(result, prompts, reference)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_bfloat16(vllm, checkpoint, prompts, reference, mode) -> None:
    """As near to float32 as the Hugging Face model in bfloat16 is, prefill and decode apart.

    Two independent errors of a size differ from the truth by as much each: a ratio of 1. The bound
    of 2 sees an error of the engine's own that is as large as all of bfloat16's.
    """
    result = vllm(
        checkpoint,
        one_by_one(prompts, 48),
        engine=MODES[mode],
        after=["tests.vllm.hooks:kernels"],
    )
    assert result.after["tests.vllm.hooks:kernels"] == ["QuantTritonMLAImpl"] * 4
    other = Reference(reference.folder, "cuda", "bfloat16")
    ours, theirs = np.zeros(2), np.zeros(2)
    for prompt, (output,) in zip(prompts, result.runs, strict=True):
        tokens = output.tokens[:-1]
        truth = reference.logprobs(reference.quantized, prompt, tokens)
        rounded = other.logprobs(other.quantized, prompt, tokens)
        for sums, found in ((ours, all_logprobs(output)), (theirs, rounded)):
            errors = divergence(truth, found)
            sums += [errors[: len(prompt)].sum(), errors[len(prompt) :].sum()]
    print(f"KL from float32: prefill {ours[0] / theirs[0]:.2f}, decode {ours[1] / theirs[1]:.2f}")
    assert (ours < 2 * theirs).all()


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_batches_prefixes_and_preemption(vllm, checkpoint, prompts, reference, mode) -> None:
    """More requests than fit: some are preempted and computed again, some find their prefix."""
    engine = MODES[mode] | FLOAT32 | {"num_gpu_blocks_override": 24, "max_num_seqs": 8}
    batch = [*prompts, *(ids[: len(ids) // 2] for ids in prompts)]
    result = vllm(
        checkpoint,
        [run(batch, 60, logprobs=True), run(batch, 8, logprobs=True)],
        engine=engine | {"disable_log_stats": False},
        before=ALLOWED,
        after=["tests.vllm.hooks:preemptions"],
    )
    assert result.after["tests.vllm.hooks:preemptions"] > 0
    assert any(output.cached for output in result.runs[1])
    # The last to come is preempted first, and what was generated before is then computed as a
    # prompt, with other operands quantized. The first three, 322 tokens in 384, stay.
    for prompt, output in list(zip(batch, result.runs[0], strict=True))[:3]:
        check_decoding(reference, prompt, output)


@pytest.mark.skipif(VERSION < "0.33", reason="earlier ones verify drafts as prefill")
@pytest.mark.parametrize("mode", ["eager", "full"])
def test_drafts_are_verified_together(vllm, checkpoint, prompts, reference, mode) -> None:
    """Decode steps of several tokens: prompts that repeat, so that n-grams draft well."""
    speculative = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    repeated = [(ids[:12] * 4)[:40] for ids in prompts[1:]]
    result = vllm(
        checkpoint,
        [run([ids], GENERATED, logprobs=True) for ids in repeated],
        engine=MODES[mode] | FLOAT32 | {"speculative_config": speculative},
        before=[*ALLOWED, "tests.vllm.hooks:record_query_lengths"],
        after=["tests.vllm.hooks:query_lengths"],
    )
    assert max(result.after["tests.vllm.hooks:query_lengths"]) == 4
    # A group of V that drafts belong to has their range, too: another quantization than stepwise.
    for prompt, (output,) in zip(repeated, result.runs, strict=True):
        check_decoding(reference, prompt, output, share=1.0)


@pytest.mark.parametrize("mode", ["eager", "full", "compiled"])
@pytest.mark.parametrize("fmt", ["nvfp4_fp8rope_352", "nvfp4_ds_mla_432"])
def test_records(vllm, prompts, mode, fmt) -> None:
    """A KV cache of records under graphs and torch.compile, chunks and prefixes read from it.

    Prefill is vLLM's own, which takes no float32 here: the bound is that of `test_bfloat16`.
    """
    again = [ids + ids[:3] for ids in prompts[:3]]
    result = vllm(
        EXAMPLE / "model",
        [*one_by_one(prompts, 48), run(again, 48, logprobs=True)],
        engine=MODES[mode] | {"additional_config": {"mla_quant_records": fmt}},
        after=["tests.vllm.hooks:kernels", "tests.vllm.hooks:record_cache"],
    )
    assert result.after["tests.vllm.hooks:kernels"] == ["RecordMLAImpl"] * 4
    assert result.after["tests.vllm.hooks:record_cache"]["reserved"]
    reference = RecordReference(fmt)
    rounded = AutoModelForCausalLM.from_pretrained(EXAMPLE / "model", dtype=torch.bfloat16)
    other = RecordReference(fmt, model=rounded)
    batches = [*zip(prompts, (outputs[0] for outputs in result.runs[:-1]), strict=True)]
    batches += zip(again, result.runs[-1], strict=True)
    ours = theirs = effect = 0.0
    for prompt, output in batches:
        parts, tokens = chunks(prompt, output.cached), output.tokens[:-1]
        rows = slice(len(prompt) - 1, None)
        truth = reference.logprobs(parts, tokens)[rows]
        ours += divergence(truth, output.logprobs).sum()
        theirs += divergence(truth, other.logprobs(parts, tokens)[rows]).sum()
        effect += divergence(unquantized(reference, [*prompt, *tokens])[rows], truth).sum()
    print(f"KL from float32: {ours / theirs:.2f} of Hugging Face's, records {effect / theirs:.2f}")
    assert ours < 2 * theirs


@pytest.mark.parametrize("mode", ["eager", "full"])
def test_quantized_attention_over_records(vllm, checkpoint, prompts, mode) -> None:
    """In float32: what records read as is quantized again."""
    fmt = RECORDS["nvfp4_ds_mla_432"]
    layers = read_settings(checkpoint).layers.values()
    outer = [outer_scale(layer.operand("k_latent").amax, fmt) for layer in layers]
    quantized, _ = load_quantized(checkpoint, form="auto", device="cpu", dtype="float32")
    reference, plain = RecordReference(fmt.name, outer, quantized), RecordReference(fmt.name)
    short = prompts[:2]
    result = vllm(
        checkpoint,
        one_by_one(short),
        engine=MODES[mode] | FLOAT32 | {"additional_config": {"mla_quant_records": fmt.name}},
        before=ALLOWED,
        after=["tests.vllm.hooks:kernels"],
    )
    assert result.after["tests.vllm.hooks:kernels"] == ["QuantRecordMLAImpl"] * 4
    for prompt, (output,) in zip(short, result.runs, strict=True):
        tokens = output.tokens[:-1]
        want = reference.logprobs([prompt], tokens)
        original = unquantized(plain, [*prompt, *tokens])
        for rows in (slice(None), slice(len(prompt), None)):
            effect = divergence(original[rows], want[rows]).mean()
            found = divergence(want[rows], all_logprobs(output)[rows]).mean()
            print(f"KL: {found / effect:.3f} of what both do")
            assert found < 0.5 * effect
