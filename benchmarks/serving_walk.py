"""A new user's path, as the manual has it, on the machine at hand; writes down what came out.

    python -m benchmarks.serving_walk                 # about three minutes on a GPU
    python -m benchmarks.serving_walk --device cpu --tokens 3 --windows 4 -- --dtype float32 \\
        --enforce-eager                               # what follows -- goes to `vllm serve`

Calibrates the example model, verifies the checkpoint, serves it, asks it something over the OpenAI
API, and evaluates it: with `mla-quant evaluate`, and in vLLM with lm-evaluation-harness if that is
installed. The served answers are asked for twice, with quantized attention and without. Commands
and what they printed go to `benchmarks/results/serving_walk_VERSION.json`, VERSION being vLLM's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

from benchmarks.calibration_overhead import RESULTS, ROOT, hardware

MODEL = "examples/tiny_mla/model"
PROMPTS = ("MACBETH. \n", "And it came to pass", "The king")
STARTING_S = 300


def entry_point(name: str, module: str) -> list[str]:
    """A command as users type it, or its module where only that is on the path."""
    return [name] if shutil.which(name) else [sys.executable, "-m", module]


MLA_QUANT = entry_point("mla-quant", "mla_quant.cli")
VLLM = entry_point("vllm", "vllm.entrypoints.cli.main")


class Walk:
    """Runs commands from the top of the repository and keeps a transcript."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[dict[str, Any]] = []

    def note(self, command: list[str], seconds: float, found: Any) -> None:
        """Add a step; paths of this machine are left out."""
        readable = " ".join(Path(part).name if os.path.isabs(part) else part for part in command)
        step = {"command": readable, "seconds": round(seconds, 1), "found": found}
        self.steps.append(step)
        print(json.dumps(step), flush=True)

    def mla_quant(self, *arguments: str, keep: tuple[str, ...] = ()) -> dict[str, Any]:
        """Run a command of this project with --json; `keep` says what goes into the transcript."""
        command = [*MLA_QUANT, *arguments]
        start = time.monotonic()
        done = subprocess.run(
            [*command, "--json"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(done.stdout)
        self.note(command, time.monotonic() - start, {key: found[key] for key in keep})
        return found

    @contextmanager
    def server(self, model: Path, *options: str) -> Iterator[Callable[[], str]]:
        """`vllm serve`, until the block ends; yields what waits for it and returns its address."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [*VLLM, "serve", str(model), "--attention-backend", "TRITON_MLA", *options]
        log = self.folder / f"server-{port}.log"
        start = time.monotonic()
        process = subprocess.Popen(
            [*command, "--port", str(port)], cwd=ROOT, stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        address = f"http://127.0.0.1:{port}"

        def ready() -> str:
            while True:
                if process.poll() is not None or time.monotonic() > start + STARTING_S:
                    raise SystemExit(f"no server after {command}:\n{log.read_text()[-6000:]}")
                try:
                    if requests.get(f"{address}/health", timeout=5).ok:
                        break
                except requests.ConnectionError:
                    time.sleep(0.5)
            lines = [x.split("mla_quant: ", 1)[1] for x in log.read_text().splitlines()
                     if "mla_quant: " in x]  # fmt: skip
            self.note(command, time.monotonic() - start, {"log": sorted(set(lines))})
            return address

        try:
            yield ready
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()

    def ask(self, address: str, model: Path, tokens: int) -> list[str]:
        """Completions of the prompts."""
        start, texts = time.monotonic(), []
        for prompt in PROMPTS:
            body = {"model": str(model), "prompt": prompt, "max_tokens": tokens, "temperature": 0}
            answer = requests.post(f"{address}/v1/completions", json=body, timeout=300)
            answer.raise_for_status()
            texts.append(answer.json()["choices"][0]["text"])
        self.note(["POST v1/completions"], time.monotonic() - start,
                  dict(zip(PROMPTS, texts, strict=True)))  # fmt: skip
        return texts

    def harness(self, model: Path) -> None:
        """lm-evaluation-harness on the task in examples/lm_eval."""
        if importlib.util.find_spec("lm_eval") is None:
            return
        out = self.folder / f"harness-{model.name}"
        arguments = f"pretrained={model},attention_backend=TRITON_MLA,max_model_len=1024"
        arguments += ",gpu_memory_utilization=0.3"
        command = [sys.executable, "-m", "lm_eval", "--model", "vllm", "--model_args", arguments]
        command += ["--include_path", "examples/lm_eval", "--tasks", "tiny_mla_heldout"]
        start = time.monotonic()
        done = subprocess.run(
            [*command, "--output_path", str(out)], cwd=ROOT, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        results = list(out.rglob("results*.json"))
        if done.returncode or not results:
            raise SystemExit(f"lm_eval failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        found = json.loads(results[0].read_text())["results"]["tiny_mla_heldout"]
        self.note(command, time.monotonic() - start, found)


def walk(
    folder: Path, device: str, tokens: int, windows: int, options: list[str]
) -> list[dict[str, Any]]:
    """The whole path; returns the transcript."""
    steps = Walk(folder)
    out, report = folder / "OUT", folder / "REPORT"
    steps.mla_quant(
        "calibrate", MODEL, "--recipe", "nvfp4_mla", "--data", "example", "--out", str(out),
        "--device", device, keep=("recipe", "layers", "samples", "tokens", "seconds"),
    )  # fmt: skip
    steps.mla_quant("verify", str(out), "--device", device, keep=("passed", "checks"))
    options = ["--max-model-len", "1024", *options]
    if device.startswith("cuda"):
        # A size that is given: what else uses the GPU meanwhile would disturb a measurement.
        options += ["--gpu-memory-utilization", "0.3", "--kv-cache-memory-bytes", str(4 << 30)]
    with steps.server(out, *options) as ready:
        quantized = steps.ask(ready(), out, tokens)
    off = ["--additional-config", '{"mla_quant": false}']
    with steps.server(out, *options, *off) as ready:
        # While it starts.
        steps.mla_quant(
            "evaluate", str(out), "--data", "example:heldout", "--out", str(report), "--device",
            device, "--num-samples", str(windows), keep=("accuracy",),
        )  # fmt: skip
        plain = steps.ask(ready(), out, tokens)
    if quantized == plain:
        raise SystemExit("quantized attention made no difference to any answer")
    steps.harness(out)
    steps.harness(ROOT / MODEL)
    return steps.steps


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--windows", type=int, default=128, help="to evaluate on")
    parser.add_argument("options", nargs="*", help="more for `vllm serve`, after --")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/serving_walk_….json")
    args = parser.parse_args()
    version = subprocess.run(
        [*VLLM, "--version"], capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    result: dict[str, Any] = {**hardware(args.device), "vllm": version}
    with tempfile.TemporaryDirectory() as folder:
        result["steps"] = walk(Path(folder), args.device, args.tokens, args.windows, args.options)
    out = args.out or RESULTS / f"serving_walk_{version}.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
