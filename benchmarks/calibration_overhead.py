"""What calibration adds to a forward pass, in time and in peak memory.

    python -m benchmarks.calibration_overhead            # CUDA if there is one, and the CPU
    python -m benchmarks.calibration_overhead --device cpu
    python -m benchmarks.calibration_overhead --readme   # write the results into the manual

`mla_quant`, a forward pass with every statistic of both forms gathered, and as a peer `modelopt`,
ModelOpt's own calibration of Q, K and V (amax only), each against the plain forward pass. Times
are medians over rounds in which both run in turn in one process; peak memory is that of a process
(on CUDA, of the allocator) with nothing else. On CUDA the model has random weights and the
attention of DeepSeek-V2-Lite; on the CPU it is the example model. Results go to
`benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.readme import insert

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
VARIANTS = ("modelopt", "mla_quant")
LIMITS = {"time": 1.5, "memory": 1.2}
"""What the project asks of `mla_quant` against `plain`."""


def build(device: str) -> tuple[Any, Any, dict[str, Any]]:
    """A model, a batch of token ids, and what they are."""
    import torch
    from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

    if device == "cpu":
        folder = ROOT / "examples" / "tiny_mla" / "model"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        shape = (8, 512)
        facts = {"model": "examples/tiny_mla", "dtype": "float32"}
    else:
        # DeepSeek-V2-Lite's widths; dense MLPs, so that the host does not wait for a router.
        config = DeepseekV3Config(
            hidden_size=2048, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=1536,
            kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            intermediate_size=10944, num_hidden_layers=8, first_k_dense_replace=8,
            vocab_size=32000, max_position_embeddings=8192,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(device):
            model = DeepseekV3ForCausalLM._from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa"
            )
        shape = (2, 4096)
        facts = {"model": "DeepSeek-V2-Lite attention, dense MLP, 8 layers", "dtype": "bfloat16"}
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, model.config.vocab_size, shape, generator=generator).to(device)
    facts |= {"batch": shape[0], "tokens": shape[1], "layers": model.config.num_hidden_layers}
    return model.eval(), ids, facts


def prepare(model: Any, variant: str) -> Any:
    """Put a model into the state in which it calibrates."""
    import modelopt.torch.quantization as mtq
    import torch

    if variant == "plain":
        return model
    if variant == "modelopt":
        from modelopt.torch.quantization.model_calib import enable_stats_collection

        fp8 = {"num_bits": (4, 3), "axis": None}
        entries = [{"quantizer_name": "*", "enable": False}]
        entries += [{"quantizer_name": f"*{n}_bmm_quantizer", "cfg": fp8} for n in "qkv"]
        model = mtq.quantize(model, {"quant_cfg": entries, "algorithm": None})
        enable_stats_collection(model)
        return model
    import mla_quant
    from mla_quant.attention import quant_mla_layers

    model = mtq.quantize(model, {**mla_quant.NVFP4_MLA_CFG, "algorithm": None})
    device = next(model.parameters()).device
    for module in quant_mla_layers(model).values():
        module.start_observing("max", 99.99, torch.device(device))
    return model


def forward(model: Any, ids: Any) -> None:
    """One forward pass, finished on return."""
    import torch

    with torch.inference_mode():
        model.model(input_ids=ids, use_cache=False)
    if ids.is_cuda:
        torch.cuda.synchronize()


def measure_time(device: str, variant: str, rounds: int) -> dict[str, Any]:
    """Median times in ms of the plain forward pass and of a variant's, run in turn."""
    plain, ids, facts = build(device)
    other = prepare(build(device)[0], variant)
    times: dict[str, list[float]] = {"plain": [], variant: []}
    for number in range(rounds + 2):
        for name, model in (("plain", plain), (variant, other)):
            started = time.perf_counter()
            forward(model, ids)
            if number >= 2:
                times[name].append((time.perf_counter() - started) * 1e3)
    ratios = [b / a for a, b in zip(times["plain"], times[variant], strict=True)]
    return {
        "plain_ms": statistics.median(times["plain"]),
        "ms": statistics.median(times[variant]),
        "time_ratio": statistics.median(ratios),
        "time_ratio_range": [min(ratios), max(ratios)],
        "rounds": rounds,
        **facts,
    }


def measure_memory(device: str, variant: str) -> dict[str, Any]:
    """Peak memory in MiB of some forward passes: the process's own, on CUDA the allocator's."""
    import torch

    before = 0
    if device.startswith("cuda"):
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    model, ids, _ = build(device)
    model = prepare(model, variant)
    for _ in range(3):
        forward(model, ids)
    if ids.is_cuda:
        return {"peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}
    return {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10}


def hardware(device: str) -> dict[str, str]:
    """What the figures were measured on."""
    import modelopt
    import torch
    import transformers

    name = platform.processor() or platform.machine()
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name()
    else:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":")[1].strip()
                break
        name += f", {torch.get_num_threads()} threads"
    return {
        "hardware": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "modelopt": modelopt.__version__,
        "date": datetime.date.today().isoformat(),
    }


def measure(what: str, device: str, variant: str, rounds: int) -> dict[str, Any]:
    """One measurement: on the CPU in a process of its own, whose peak memory is its own."""
    if device.startswith("cuda"):
        if what == "memory":
            return measure_memory(device, variant)
        return measure_time(device, variant, rounds)
    command = [sys.executable, "-m", "benchmarks.calibration_overhead", "--measure", what]
    command += ["--device", device, "--variant", variant, "--rounds", str(rounds)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(device: str, rounds: int) -> dict[str, Any]:
    """All variants against the plain forward pass."""
    plain = measure("memory", device, "plain", rounds)["peak_mib"]
    variants = []
    for variant in VARIANTS:
        timed = measure("time", device, variant, rounds)
        peak = measure("memory", device, variant, rounds)["peak_mib"]
        memory = {"plain_mib": plain, "peak_mib": peak, "memory_ratio": peak / plain}
        variants.append({"variant": variant, **timed, **memory})
        print(json.dumps(variants[-1]), file=sys.stderr, flush=True)
    return {**hardware(device), "limits": LIMITS, "variants": variants}


def markdown(results: list[dict[str, Any]]) -> str:
    """Results as a table."""
    lines = [
        "| hardware, model | variant | plain | with it | ratio (range) | peak memory | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for run in result["variants"]:
            what = (
                f"{result['hardware']}; {run['model']}, {run['dtype']}, {run['batch']} × "
                f"{run['tokens']} tokens; torch {result['torch']}, {result['date']}"
            )
            low, high = run["time_ratio_range"]
            lines.append(
                f"| {what} | {run['variant']} | {run['plain_ms']:.1f} ms | {run['ms']:.1f} ms | "
                f"{run['time_ratio']:.2f} ({low:.2f}–{high:.2f}) | {run['peak_mib']:.0f} MiB | "
                f"{run['memory_ratio']:.2f} |"
            )
    limits = f"Asked of `mla_quant`: time ≤ {LIMITS['time']}, memory ≤ {LIMITS['memory']}."
    return "\n".join([*lines, "", limits])


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default=None, help="cpu or cuda; default: all there are")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--readme", action="store_true", help="render the results, run nothing")
    parser.add_argument("--measure", choices=("time", "memory"), help="one measurement, as JSON")
    parser.add_argument("--variant", choices=("plain", *VARIANTS))
    args = parser.parse_args()
    if args.readme:
        files = sorted(RESULTS.glob("calibration_overhead_*.json"))
        insert("overhead", markdown([json.loads(f.read_text(encoding="utf-8")) for f in files]))
        return
    if args.measure == "time":
        print(json.dumps(measure_time(args.device or "cpu", args.variant, args.rounds)))
        return
    if args.measure == "memory":
        print(json.dumps(measure_memory(args.device or "cpu", args.variant)))
        return
    import torch

    devices = [args.device] if args.device else ["cpu"]
    if not args.device and torch.cuda.is_available():
        devices.append("cuda")
    args.out.mkdir(parents=True, exist_ok=True)
    for device in devices:
        result = compare(device, args.rounds)
        print(markdown([result]))
        path = args.out / f"calibration_overhead_{device}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
