"""Serving with quantized attention beside serving without, in one run on one CUDA device.

    python -m benchmarks.vllm_serving                # about five minutes
    python -m benchmarks.vllm_serving --readme       # write the results into the manual

Two models with random weights: DeepSeek-V2-Lite as it is (16 heads, 27 layers, 64 experts), and
eight layers with the attention and the dense MLP of DeepSeek-V3 (128 heads), which one GPU of a
data-parallel deployment runs beside its share of experts. Experts would dilute the difference.

For each model a stock and a quantized engine are up at the same time and measured in turn, both on
TRITON_MLA with torch.compile and CUDA graphs as by default:

    decode   64 requests whose prompts of 8192 tokens are cached already, 256 tokens each; output
             tokens a second while all of them decode (64 times the rate of the one that began last)
    TTFT     one new prompt of 8192 tokens, to the first token; the median

Results go to `benchmarks/results/vllm_serving.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.attention_kernels import version_of
from benchmarks.calibration_overhead import RESULTS, hardware
from benchmarks.readme import insert

RESULT = RESULTS / "vllm_serving.json"
BATCH, CONTEXT, GENERATED = 64, 8192, 256
MAX_LENGTH = CONTEXT + 1024

_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "max_position_embeddings": MAX_LENGTH,
    "n_group": 1,
    "n_shared_experts": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}

MODELS: dict[int, dict[str, Any]] = {
    16: _COMMON
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "vocab_size": 102400,
    },
    128: _COMMON
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 8,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 8,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 8,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "rope_interleave": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "vocab_size": 129280,
    },
}
"""Hugging Face configs by number of heads."""


def write_model(folder: Path, heads: int) -> Path:
    """A checkpoint without weights, with settings as calibration writes them."""
    from mla_quant.recipes import OPERANDS, load_recipe
    from mla_quant.settings import (
        SETTINGS_FILE,
        LayerSettings,
        ModelSettings,
        OperandSettings,
        Producer,
        Settings,
    )

    config = MODELS[heads]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    operands = {name: OperandSettings(format="nvfp4", amax=4.0) for name in OPERANDS}
    operands["p"] = OperandSettings(format="nvfp4", amax=1.0)
    names = [f"model.layers.{i}.self_attn" for i in range(config["num_hidden_layers"])]
    settings = Settings(
        producer=Producer(name="benchmark", version="0"),
        model=ModelSettings(source="random", family=config["model_type"], geometry={}),
        recipe=load_recipe("nvfp4_mla"),
        layers=dict.fromkeys(names, LayerSettings.from_operands(operands)),
    )
    (folder / SETTINGS_FILE).write_text(settings.model_dump_json())
    return folder


def serve(folder: Path, quantized: bool) -> None:
    """An engine that does what lines on the standard input say; answers are lines of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints
    import vllm

    from mla_quant.integrations.vllm import ENABLED

    config = json.loads((folder / "config.json").read_text())
    record = 640 if quantized else 0
    cache = BATCH * MAX_LENGTH * config["num_hidden_layers"] * (2 * 576 + record)
    llm = vllm.LLM(
        model=str(folder),
        attention_backend="TRITON_MLA",
        additional_config={ENABLED: quantized},
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
        disable_log_stats=False,
        dtype="bfloat16",
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=cache,
        load_format="dummy",
        max_model_len=MAX_LENGTH,
        max_num_batched_tokens=CONTEXT,
        max_num_seqs=BATCH,
        seed=0,
        skip_tokenizer_init=True,
    )
    generator = random.Random(0)

    def prompts(count: int) -> list[dict[str, Any]]:
        tokens = range(3, config["vocab_size"])
        return [{"prompt_token_ids": generator.choices(tokens, k=CONTEXT)} for _ in range(count)]

    def generate(inputs: list[dict[str, Any]], tokens: int) -> list[Any]:
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        outputs: list[Any] = llm.generate(inputs, sampling, use_tqdm=False)
        return outputs

    cached = prompts(BATCH)

    def decode() -> dict[str, float]:
        times = [output.metrics for output in generate(cached, GENERATED + 1)]
        last = max(times, key=lambda m: m.first_token_ts)
        seconds = last.last_token_ts - last.first_token_ts
        return {"tokens_per_s": BATCH * GENERATED / seconds, "step_ms": seconds / GENERATED * 1e3}

    def ttft() -> dict[str, float]:
        inputs = prompts(1)
        start = time.perf_counter()
        generate(inputs, 1)
        return {"ttft_ms": (time.perf_counter() - start) * 1e3}

    def warm() -> dict[str, float]:
        ttft()
        generate(cached, 1)
        return {}

    calls = {"warm": warm, "decode": decode, "ttft": ttft}
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(calls[line.strip()]()), file=answers, flush=True)


class Engine:
    """A process that runs `serve`."""

    def __init__(self, folder: Path, quantized: bool) -> None:
        command = [sys.executable, "-m", "benchmarks.vllm_serving", "--serve", str(folder)]
        self.name = "quantized" if quantized else "stock"
        self.log = folder / f"{self.name}.log"
        self.process = subprocess.Popen(
            [*command, "--quantized"] if quantized else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        """The next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} engine ended:\n{self.log.read_text()[-6000:]}")
        result: dict[str, Any] = json.loads(line)
        return result

    def ask(self, call: str) -> dict[str, Any]:
        """Do something and wait for it."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{call}\n")
        self.process.stdin.flush()
        return self.answer()

    def stop(self) -> None:
        """End the process and whatever it started."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.wait()


def measure(heads: int, folder: Path, repeats: int) -> list[dict[str, Any]]:
    """Rows of one model: stock, then quantized."""
    write_model(folder, heads)
    engines = [Engine(folder, quantized) for quantized in (False, True)]
    try:
        for engine in engines:
            print(engine.name, engine.answer(), flush=True)
        installed = "mla_quant: " in engines[1].log.read_text()
        if not installed or "mla_quant: " in engines[0].log.read_text():
            raise SystemExit("the plugin is not where it should be: install this project")
        for engine in engines:
            engine.ask("warm")
        found: list[dict[str, list[float]]] = [{}, {}]
        for call in ["decode"] * repeats + ["ttft"] * (2 * repeats + 1):
            for engine, values in zip(engines, found, strict=True):
                for key, value in engine.ask(call).items():
                    values.setdefault(key, []).append(value)
        rows = []
        for engine, values in zip(engines, found, strict=True):
            row = {key: statistics.median(v) for key, v in values.items()}
            rows.append({"heads": heads, "engine": engine.name, **row, "all": values})
            print(json.dumps(rows[-1]), flush=True)
        return rows
    finally:
        for engine in engines:
            engine.stop()


def markdown(result: dict[str, Any]) -> str:
    """The results as a table."""
    lines = [
        f"{result['hardware']}, torch {result['torch']}, vLLM {result['vllm']}, {result['date']}; "
        f"batch {BATCH}, context {CONTEXT}.",
        "",
        "| heads | | stock | quantized | ratio |",
        "|---|---|---|---|---|",
    ]
    for heads in dict.fromkeys(row["heads"] for row in result["rows"]):
        stock, ours = (r for r in result["rows"] if r["heads"] == heads)
        for key, name in (("tokens_per_s", "output tokens/s"), ("ttft_ms", "TTFT, ms")):
            ratio = ours[key] / stock[key]
            lines.append(
                f"| {heads} | {name} | {stock[key]:,.0f} | {ours[key]:,.0f} | {ratio:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", nargs="*", type=int, choices=tuple(MODELS), default=[*MODELS])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--readme", action="store_true", help="render the results, run nothing")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--quantized", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.quantized)
        return
    if args.readme:
        insert("serving", markdown(json.loads(args.out.read_text(encoding="utf-8"))))
        return
    result = {**hardware("cuda"), "triton": version_of("triton"), "vllm": version_of("vllm")}
    result["rows"] = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for heads in args.heads:
        with tempfile.TemporaryDirectory() as folder:
            result["rows"] += measure(heads, Path(folder, "model"), args.repeats)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(markdown(result))


if __name__ == "__main__":
    main()
