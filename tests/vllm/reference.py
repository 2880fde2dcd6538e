"""What the original and the quantized Hugging Face model compute, to compare vLLM with."""

from __future__ import annotations

from pathlib import Path

import modelopt.torch.quantization as mtq
import numpy as np
import torch

from mla_quant.checkpoint import load_quantized
from mla_quant.cli import main
from tests.vllm.client import Output
from tests.vllm.environments import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "tiny_mla"


def calibrate(folder: Path, recipe: str = "nvfp4_mla", dtype: str = "float32") -> Path:
    """Write a quantized checkpoint of the example model, as a user does."""
    command = ["calibrate", str(EXAMPLE / "model"), "--recipe", recipe, "--data", "example"]
    command += ["--dtype", dtype, "--num-samples", "16", "--out", str(folder)]
    assert main(command) == 0
    return folder


class Reference:
    """The quantized Hugging Face model: one pass over the prompt, then token by token."""

    def __init__(self, folder: Path, device: str = "cpu", dtype: str = "float32") -> None:
        self.folder, self.device = folder, device
        options = {"form": "auto", "device": device, "dtype": dtype}
        self.quantized, _ = load_quantized(folder, **options)
        self.original, _ = load_quantized(folder, **options)
        mtq.disable_quantizer(self.original, "*")

    @torch.no_grad()
    def logprobs(self, model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> np.ndarray:
        """Of what follows each token of the prompt and of `tokens`, [positions, vocabulary]."""
        result = model(torch.tensor([prompt], device=self.device), use_cache=True)
        rows, cache = [result.logits[0]], result.past_key_values
        for token in tokens:
            ids = torch.tensor([[token]], device=self.device)
            result = model(ids, past_key_values=cache, use_cache=True)
            rows.append(result.logits[0])
            cache = result.past_key_values
        return torch.cat(rows).float().log_softmax(-1).cpu().numpy()


def divergence(expected: np.ndarray, got: np.ndarray) -> np.ndarray:
    """KL divergence by position."""
    return np.asarray((np.exp(expected) * (expected - got)).sum(-1))


def check_agreement(reference: Reference, prompt: list[int], output: Output) -> None:
    """Another order of sums turns a few 4-bit values at ties, and each turned one changes others.

    So the difference may be a part of what quantization itself does, not more; where nothing
    turned, as in a test of five tokens in float32, it is one of float32.
    """
    got = np.concatenate([output.prompt_logprobs, output.logprobs])
    quantized = reference.logprobs(reference.quantized, prompt, output.tokens[:-1])
    original = reference.logprobs(reference.original, prompt, output.tokens[:-1])
    effect = divergence(original, quantized)
    difference = divergence(quantized, got)
    decoded = slice(len(prompt), None)
    print(
        f"KL: prompt {difference.mean() / effect.mean():.3f} of quantization's effect, "
        f"decoded {difference[decoded].mean() / effect[decoded].mean():.3f}"
    )
    assert difference.mean() < 0.5 * effect.mean()
    # Decoding by itself, too.
    assert difference[decoded].mean() < 0.5 * effect[decoded].mean()
    agree = quantized.argmax(-1) == got.argmax(-1)
    assert agree.mean() > 0.9
