"""A checkpoint written by `mla-quant calibrate`, served by vLLM with nothing but the plugin.

What it computes is compared with the quantized Hugging Face model: projected form for the prompt,
absorbed form for the tokens after it. Both sides run the same numerics on float32 activations, so
that what is left is the order of sums, and the values it moves across a tie of a 4-bit format.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.vllm.client import Result, Vllm, run
from tests.vllm.reference import EXAMPLE, Reference, calibrate, check_agreement, divergence
from tests.vllm.test_stock import BOUND, ENGINE, held_out

GENERATED = 6
LENGTHS = (5, 40, 97)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrate(tmp_path_factory.mktemp("quantized") / "checkpoint")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return held_out(LENGTHS)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


def served(vllm: Vllm, checkpoint: Path, prompts: list[list[int]], **kwargs) -> Result:
    """Prompts one after the other: chunks of a batch would end anywhere."""
    runs = [run([prompt], GENERATED, prompt_logprobs=True, logprobs=True) for prompt in prompts]
    engine = ENGINE | kwargs.pop("engine", {})
    kwargs.setdefault("before", ["tests.vllm.hooks:small_workspace"])
    return vllm(checkpoint, runs, engine=engine, **kwargs)


@pytest.fixture(scope="module")
def outputs(vllm: Vllm, checkpoint: Path, prompts: list[list[int]]) -> Result:
    hooks = ["attention", "compile_kernels", "reserved"]
    return served(
        vllm,
        checkpoint,
        prompts,
        before=[f"tests.vllm.hooks:{hook}" for hook in ("small_workspace", "workspace")],
        after=[f"tests.vllm.hooks:{hook}" for hook in hooks],
    )


def test_plugin_installs_itself(outputs: Result) -> None:
    found = outputs.after["tests.vllm.hooks:attention"]
    assert found["classes"] == ["QuantTritonMLAImpl"] * 4
    assert outputs.after["tests.vllm.hooks:compile_kernels"]
    # Decode had no other scratch than what was reserved before the first prompt.
    assert outputs.after["tests.vllm.hooks:reserved"]
    # Some of the longest prompt was read from the cache, raw, in every layer.
    assert found["calls"]["merge_attn_states"] >= 4


def test_same_numbers_where_no_value_is_at_a_tie(outputs, prompts, reference) -> None:
    """Five tokens and what follows them, projected and absorbed, as exact as unquantized ones."""
    (output,) = outputs.runs[0]
    got = np.concatenate([output.prompt_logprobs, output.logprobs])
    want = reference.logprobs(reference.quantized, prompts[0], output.tokens[:-1])
    original = reference.logprobs(reference.original, prompts[0], output.tokens[:-1])
    assert np.abs(got - want).max() < BOUND
    assert np.abs(got - original).max() > 100 * BOUND


def test_close_to_hugging_face(outputs, prompts, reference) -> None:
    for prompt, (output,) in zip(prompts, outputs.runs, strict=True):
        check_agreement(reference, prompt, output)


@pytest.mark.parametrize("side_cache", [True, False])
def test_side_cache_or_not(vllm, checkpoint, prompts, reference, side_cache: bool) -> None:
    """In a batch, with blocks that requests of the first one wrote found again by the second."""
    engine = ENGINE | {"additional_config": {"mla_quant_side_cache": side_cache}}
    again = [ids + ids[:3] for ids in prompts[:2]]
    result = vllm(
        checkpoint,
        [run(prompts[:2], 2, logprobs=True), run(again, GENERATED, logprobs=True)],
        engine=engine,
        after=["tests.vllm.hooks:cache_width"],
    )
    # 512 + 64 values of float32, and a record of 624 bytes.
    assert result.after["tests.vllm.hooks:cache_width"] == (576 + 156 if side_cache else 576)
    for prompt, output in zip(again, result.runs[1], strict=True):
        assert output.cached == len(prompt) // 16 * 16
        want = reference.logprobs(reference.quantized, prompt, output.tokens[:-1])
        original = reference.logprobs(reference.original, prompt, output.tokens[:-1])
        rows = slice(len(prompt) - 1, None)
        effect = divergence(original[rows], want[rows]).mean()
        assert divergence(want[rows], output.logprobs).mean() < effect


def test_a_model_without_settings_stays_as_it_is(vllm) -> None:
    hooks = ["attention", "every_gate", "failures_leave_nothing"]
    result = vllm(
        EXAMPLE / "model",
        [run([[0, 47, 35]], 2)],
        engine=ENGINE,
        after=[f"tests.vllm.hooks:{hook}" for hook in hooks],
    )
    assert result.after["tests.vllm.hooks:attention"]["classes"] == ["TritonMLAImpl"] * 4
    reasons = result.after["tests.vllm.hooks:every_gate"]
    for change, words in {
        "kv_cache_dtype": "the raw latent is needed",
        "q_pad_num_heads": "heads are padded to 128",
        "calculate_kv_scales": "belongs to an fp8 cache",
        "sliding_window": "has a sliding window",
        "logits_soft_cap": "a soft cap of the scores",
        "indexer": "sparse attention is not supported",
        "class": "start vLLM with --attention-backend TRITON_MLA",
        "decode_context_parallel_size": "context parallelism is not supported",
        "side_cache": "it must be true or false",
        "kv_connector": "the KV connector 'OffloadingConnector' moves pages",
        "p_reference": "kernels have the integer reference point",
        "names": "no MLA attention layer of this model has the name",
        "no settings": "has no mla_quant.json",
        "no model": "is neither a model nor a worker",
        "recipe": "no amax for 4 operands that the recipe quantizes",
        "records: footer": "keeps scales in a footer of each page",
        "records: widths": "have 512 and 64 values, and nvfp4_outer_304 holds 512+0",
        "records: kv_connector": "does not know records",
        "records: context": "context parallelism is not supported",
        "records: class": "start vLLM with --attention-backend TRITON_MLA",
        "records: fusion": "writes the KV cache past the attention layer",
    }.items():
        assert words in reasons[change], change
    # All layers, in one error.
    assert reasons["kv_cache_dtype"].count("the raw latent is needed") == 4
    failures = result.after["tests.vllm.hooks:failures_leave_nothing"]
    assert failures and all(failures.values()), failures


def test_preempted_requests_are_computed_again(vllm, checkpoint, reference) -> None:
    """Eight blocks of 16 tokens: the 65th token of one request evicts the other."""
    prompts = [ids[:60] for ids in held_out((97, 97))]
    result = vllm(
        checkpoint,
        [run(prompts, 8, logprobs=True)],
        engine=ENGINE
        # One more block is vLLM's null block.
        | {"disable_log_stats": False, "max_model_len": 128, "num_gpu_blocks_override": 9},
        after=["tests.vllm.hooks:preemptions"],
    )
    assert result.after["tests.vllm.hooks:preemptions"] > 0
    for prompt, output in zip(prompts, result.runs[0], strict=True):
        rows = slice(len(prompt) - 1, None)
        want = reference.logprobs(reference.quantized, prompt, output.tokens[:-1])[rows]
        original = reference.logprobs(reference.original, prompt, output.tokens[:-1])[rows]
        assert divergence(want, output.logprobs).mean() < divergence(original, want).mean()


@pytest.mark.parametrize("vllm", ["0.33.0"], indirect=True)
def test_two_ranks(vllm, checkpoint, prompts, reference) -> None:
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    result = served(
        vllm,
        checkpoint,
        prompts[:2],
        engine={"tensor_parallel_size": 2},
        environment=environment,
        before=[],
    )
    for prompt, (output,) in zip(prompts[:2], result.runs, strict=True):
        check_agreement(reference, prompt, output)


@pytest.mark.parametrize("vllm", ["0.33.0"], indirect=True)
def test_two_models_in_a_process(vllm, checkpoint, prompts, reference, tmp_path) -> None:
    """Other formats and another cache: neither changes what the other one computes."""
    second = calibrate(tmp_path / "fp8", "fp8_mla")
    engine = ENGINE | {"additional_config": {"mla_quant_side_cache": False}}
    folder = tmp_path / "other"
    folder.mkdir()
    runs = [run([prompts[0]], GENERATED, prompt_logprobs=True, logprobs=True)]
    request = {"model": str(second), "engine": engine, "runs": runs}
    (folder / "request.json").write_text(json.dumps(request))
    result = vllm(
        checkpoint,
        runs,
        engine=ENGINE,
        after=["tests.vllm.hooks:another_model"],
        environment={"MLA_QUANT_TEST_OTHER": str(folder)},
    )
    found = result.after["tests.vllm.hooks:another_model"]
    assert found["classes"] == ["QuantTritonMLAImpl"] * 8
    (output,) = result.runs[0]
    first = np.concatenate([output.prompt_logprobs, output.logprobs])
    for name in ("first", "again"):
        assert np.array_equal(logprobs(folder / name), first)
    # Five tokens: the same numbers as the quantized Hugging Face model, as above.
    tokens = output.tokens[:-1]
    want = reference.logprobs(reference.quantized, prompts[0], tokens)
    assert np.abs(first - want).max() < BOUND
    other = Reference(second)
    rows = len(prompts[0])
    want = other.logprobs(other.quantized, prompts[0], [])
    assert np.abs(logprobs(folder / "second")[:rows] - want).max() < BOUND


def logprobs(folder: Path) -> np.ndarray:
    """What `worker.generate` wrote for the only prompt of the only batch."""
    return np.concatenate([np.load(folder / f"0-0-{part}.npy") for part in ("prompt", "generated")])
