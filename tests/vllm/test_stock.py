"""A vLLM without anything of this project computes what transformers computes.

This is about the ground that tests of quantized attention stand on: a difference here is one of the
platform in `platform/`, of the worker, or of vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.vllm.client import Output, Result, Vllm, run
from tests.vllm.reference import EXAMPLE

# In float32, transformers and both versions of vLLM are each within 3e-5 of float64, for all of the
# vocabulary. Context without its first token is off by 5, bfloat16 by 0.2 to 0.9.
BOUND = 2e-4

# Root mean square for bfloat16: transformers itself 0.03 to 0.04, vLLM up to 0.055.
BOUND_BFLOAT16 = 0.1

# A chunk has 64 tokens and a block of the cache 16.
LENGTHS = (5, 40, 97, 200)
GENERATED = 8

# Only the platform: whatever this project registers with vLLM stays out.
STOCK = {"VLLM_PLUGINS": "cpu_triton"}
ENGINE = {"block_size": 16}

Logprobs = Callable[[list[int]], np.ndarray]


def held_out(lengths: Sequence[int]) -> list[list[int]]:
    """Token ids of so many tokens each from the text that the example was not trained on."""
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "model")
    lines = (EXAMPLE / "data" / "heldout.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines[: len(lengths)]]
    return [
        tokenizer(text)["input_ids"][:length] for text, length in zip(texts, lengths, strict=True)
    ]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return held_out(LENGTHS)


@pytest.fixture(scope="module")
def logprobs() -> Logprobs:
    """What transformers expects to follow each of the tokens, [tokens, vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE / "model", dtype=torch.float32).eval()

    @torch.no_grad()
    def compute(tokens: list[int]) -> np.ndarray:
        logits = model(torch.tensor([tokens])).logits[0]
        return logits.log_softmax(-1).numpy()

    return compute


@pytest.fixture(scope="module")
def served(vllm: Vllm, prompts: list[list[int]]) -> Result:
    # The second batch finds the first one's blocks in the cache; its ends are new.
    again = [ids + ids[:3] for ids in prompts]
    return vllm(
        EXAMPLE / "model",
        [
            run(prompts, GENERATED, prompt_logprobs=True, logprobs=True),
            run(again, GENERATED, logprobs=True),
        ],
        engine=ENGINE,
        before=["tests.vllm.hooks:small_workspace"],
        after=["tests.vllm.hooks:attention", "tests.vllm.hooks:project"],
        environment=STOCK,
    )


def check_agreement(prompt: list[int], output: Output, logprobs: Logprobs) -> None:
    expected = logprobs(prompt + output.tokens)
    last = len(prompt) - 1
    generated = expected[last:-1]
    assert output.tokens == generated.argmax(-1).tolist()
    # None of these choices is so narrow that the bound would leave it open.
    best = np.sort(generated, axis=-1)
    assert (best[:, -1] - best[:, -2]).min() > 2 * BOUND
    assert np.abs(output.logprobs - generated).max() < BOUND
    if output.prompt_logprobs is not None:
        assert np.abs(output.prompt_logprobs - expected[:last]).max() < BOUND


def test_batch_in_chunks(served, prompts, logprobs) -> None:
    for prompt, output in zip(prompts, served.runs[0], strict=True):
        assert output.prompt_logprobs.shape[0] == len(prompt) - 1
        check_agreement(prompt, output, logprobs)


def test_prefix_from_the_cache(served, prompts, logprobs) -> None:
    for prompt, output in zip(prompts, served.runs[1], strict=True):
        assert output.cached == len(prompt) // 16 * 16
        check_agreement(prompt + prompt[:3], output, logprobs)


def test_attention_is_that_of_vllm(served) -> None:
    found = served.after["tests.vllm.hooks:attention"]
    assert found["classes"] == ["TritonMLAImpl"] * 4
    assert not found["project"]
    calls = found["calls"]
    assert calls["concat_and_cache_mla"] > 0
    # More chunks of context than prefills: some context was read in several.
    assert calls["prefill_context_chunk"] > calls["prefill_new_tokens"] > 0


def test_the_project_imports_beside_vllm(served) -> None:
    assert "mla_quant.kernels" in served.after["tests.vllm.hooks:project"]


@pytest.mark.parametrize("vllm", ["0.26.0"], indirect=True)
def test_bfloat16(vllm, prompts, logprobs) -> None:
    result = vllm(
        EXAMPLE / "model",
        [run(prompts, GENERATED, prompt_logprobs=True, logprobs=True)],
        engine=ENGINE | {"dtype": "bfloat16"},
        environment=STOCK,
    )
    for prompt, output in zip(prompts, result.runs[0], strict=True):
        expected = logprobs(prompt + output.tokens)[:-1]
        found = np.concatenate([output.prompt_logprobs, output.logprobs])
        errors = np.sqrt(((found - expected) ** 2).mean(-1))
        # Prefill and decode steps apart: there are few of the latter.
        assert errors[: len(prompt)].mean() < BOUND_BFLOAT16
        assert errors[len(prompt) :].mean() < BOUND_BFLOAT16


@pytest.mark.parametrize("vllm", ["0.33.0"], indirect=True)
def test_two_ranks_in_spawned_workers(vllm, prompts, logprobs) -> None:
    result = vllm(
        EXAMPLE / "model",
        [run(prompts, GENERATED, logprobs=True)],
        engine=ENGINE | {"tensor_parallel_size": 2},
        environment=STOCK | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )
    for prompt, output in zip(prompts, result.runs[0], strict=True):
        check_agreement(prompt, output, logprobs)
