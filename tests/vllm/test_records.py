"""vLLM with a KV cache of records: what it computes, against transformers with the same roundings.

The oracle runs a prompt in the chunks that vLLM runs it in, then token by token. Keys of a chunk
see each other as they are, keys of the context, and every key of a decode step, as their records
read. Both sides are float32 besides, so that what is left is the order of sums, and the values it
moves across a tie of a 4-bit format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from mla_quant.checkpoint import load_quantized
from mla_quant.records import RECORDS, outer_scale, pack, unpack
from mla_quant.settings import read_settings
from tests.vllm.client import Output, Result, Vllm, run
from tests.vllm.reference import EXAMPLE, calibrate, divergence
from tests.vllm.test_stock import BOUND, ENGINE, held_out

CHUNK = 64
GENERATED = 6
LENGTHS = (5, 40, 97)


class RecordReference:
    """The example model over a cache of records."""

    def __init__(
        self, fmt: str, outer: list[float] | None = None, model: torch.nn.Module | None = None
    ) -> None:
        self.format = RECORDS[fmt]
        self.model = model or AutoModelForCausalLM.from_pretrained(
            EXAMPLE / "model", dtype=torch.float32
        )
        self.model.eval()
        self.outer = outer or [1.0] * len(self.model.model.layers)

    def read(self, number: int, latent: torch.Tensor, rope: torch.Tensor) -> list[torch.Tensor]:
        """Parts of a layer as its records read. No format minds the order of the rope part."""
        outer = {"outer_scale": self.outer[number]}
        rows = pack(latent[0, 0], rope[0, 0], self.format, **outer)
        parts = unpack(rows, self.format, **outer)
        return [part[None, None].to(latent.dtype) for part in parts]

    @torch.no_grad()
    def logprobs(self, parts: list[list[int]], tokens: list[int]) -> np.ndarray:
        """Of what follows each token of prompt and `tokens`; `parts`: the prompt's chunks."""
        reference = self

        class Records(DynamicCache):
            decoding = False

            def update(self, latent: Any, rope: Any, number: int, *args: Any, **kwargs: Any) -> Any:
                """transformers caches the latent and the rotated rope part."""
                read = reference.read(number, latent, rope)
                stored = super().update(*read, number, *args, **kwargs)
                if self.decoding:
                    return stored
                new = latent.shape[2]
                return tuple(
                    torch.cat([old[:, :, :-new], x], dim=2)
                    for old, x in zip(stored, (latent, rope), strict=True)
                )

        cache, rows = Records(), []
        for part in [*parts, *([token] for token in tokens)]:
            cache.decoding = len(rows) >= len(parts)
            result = self.model(torch.tensor([part]), past_key_values=cache, use_cache=True)
            rows.append(result.logits[0].float().log_softmax(-1))
        return torch.cat(rows).numpy()


def chunks(ids: list[int], cached: int = 0) -> list[list[int]]:
    """What vLLM runs of a prompt: chunks, after what it finds in the cache."""
    first = [ids[:cached]] if cached else []
    return first + [ids[i : i + CHUNK] for i in range(cached, len(ids), CHUNK)]


def unquantized(reference: RecordReference, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return reference.model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()


def check(reference: RecordReference, prompt: list[int], output: Output, exact: bool) -> None:
    tokens = output.tokens[:-1]
    want = reference.logprobs(chunks(prompt, output.cached), tokens)
    original = unquantized(reference, [*prompt, *tokens])
    if output.prompt_logprobs is None:
        want, original = want[len(prompt) - 1 :], original[len(prompt) - 1 :]
        got = output.logprobs
    else:
        got = np.concatenate([output.prompt_logprobs, output.logprobs])
    effect, found = divergence(original, want).mean(), divergence(want, got).mean()
    print(f"KL: {found / effect:.4f} of what the records do, {effect:.2e}")
    assert found < 0.1 * effect
    if exact:
        assert np.abs(got - want).max() < BOUND
        assert np.abs(got - original).max() > 10 * BOUND


def check_run(
    vllm: Vllm, model: Path, engine: dict[str, Any], reference: RecordReference, **options: Any
) -> Result:
    """Prompts one after the other, then two at once that find their blocks in the cache."""
    prompts = held_out(LENGTHS)
    again = [ids + ids[:3] for ids in prompts[:2]]
    asked = {"prompt_logprobs": True, "logprobs": True}
    runs = [run([ids], GENERATED, **asked) for ids in prompts]
    runs.append(run(again, GENERATED, logprobs=True))
    result = vllm(model, runs, engine=ENGINE | engine, **options)
    for i, (prompt, (output,)) in enumerate(zip(prompts, result.runs[:3], strict=True)):
        check(reference, prompt, output, exact=i == 0)
    for prompt, output in zip(again, result.runs[3], strict=True):
        assert output.cached == len(prompt) // 16 * 16
        check(reference, prompt, output, exact=False)
    return result


def test_records_alone(vllm) -> None:
    """A model as it is, with one setting."""
    fmt = "nvfp4_fp8rope_352"
    reference = RecordReference(fmt)
    hooks = ("small_workspace", "workspace")
    result = check_run(
        vllm,
        EXAMPLE / "model",
        {"additional_config": {"mla_quant_records": fmt}},
        reference,
        before=[f"tests.vllm.hooks:{hook}" for hook in hooks],
        after=[f"tests.vllm.hooks:{hook}" for hook in ("attention", "record_cache")],
    )
    assert result.after["tests.vllm.hooks:attention"]["classes"] == ["RecordMLAImpl"] * 4
    size = reference.format.record_bytes
    found = result.after["tests.vllm.hooks:record_cache"]
    assert found["shapes"] == [[16, size]] * 4
    # A page of 16 tokens takes what its records take, so that as many more fit.
    assert found["page_bytes"] == [16 * size] * 4
    assert found["reserved"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrate(tmp_path_factory.mktemp("calibrated") / "checkpoint")


@pytest.mark.parametrize("vllm", ["0.33.0"], indirect=True)
def test_outer_scales_of_a_checkpoint_on_two_ranks(vllm, checkpoint) -> None:
    """Ranges that were calibrated for quantized attention, which stays off."""
    fmt = RECORDS["nvfp4_ds_mla_432"]
    layers = read_settings(checkpoint).layers.values()
    outer = [outer_scale(layer.operand("k_latent").amax, fmt) for layer in layers]
    check_run(
        vllm,
        checkpoint,
        {
            "additional_config": {"mla_quant_records": fmt.name, "mla_quant": False},
            "tensor_parallel_size": 2,
        },
        RecordReference(fmt.name, outer),
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )


@pytest.mark.parametrize("vllm", ["0.26.0"], indirect=True)
def test_quantized_attention_over_records(vllm, checkpoint) -> None:
    """Records stand for the latents that they read as, which the recipe quantizes again."""
    fmt = RECORDS["fp8_ds_mla_656"]
    quantized, _ = load_quantized(checkpoint, form="auto", device="cpu", dtype="float32")
    reference, plain = RecordReference(fmt.name, model=quantized), RecordReference(fmt.name)
    prompts = held_out((5, 40))
    result = vllm(
        checkpoint,
        [run([ids], GENERATED, prompt_logprobs=True, logprobs=True) for ids in prompts],
        engine=ENGINE | {"additional_config": {"mla_quant_records": fmt.name}},
        before=["tests.vllm.hooks:workspace"],
        after=["tests.vllm.hooks:attention", "tests.vllm.hooks:record_cache"],
    )
    assert result.after["tests.vllm.hooks:attention"]["classes"] == ["QuantRecordMLAImpl"] * 4
    found = result.after["tests.vllm.hooks:record_cache"]
    assert found["shapes"] == [[16, fmt.record_bytes]] * 4
    for prompt, (output,) in zip(prompts, result.runs, strict=True):
        tokens = output.tokens[:-1]
        got = np.concatenate([output.prompt_logprobs, output.logprobs])
        want = reference.logprobs([prompt], tokens)
        # Another order of sums turns some 4-bit values at ties: less than leaving records out does.
        original = unquantized(plain, [*prompt, *tokens])
        decoded = slice(len(prompt), None)
        for rows in (slice(None), decoded):
            effect = divergence(original[rows], want[rows]).mean()
            difference = divergence(want[rows], got[rows]).mean()
            print(f"KL: {difference / effect:.4f} of what both do, {effect:.2e}")
            assert difference < 0.1 * effect
