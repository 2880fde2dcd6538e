"""Runs inside an environment with vLLM: `python -m tests.vllm.worker FOLDER`.

Without a folder, it imports vLLM and forks for each request that comes (`fork_for_requests`).

Reads `request.json` in the folder, and writes `result.json` and arrays beside it. The request:

    model   folder of the checkpoint
    device  "cpu" or "cuda"
    engine  arguments of `vllm.LLM` over `ENGINES[device]`
    before  functions ("module:name") called before the engine exists, without arguments
    after   functions called with the `LLM` after the runs; the result has what they return
    runs    each with `prompts`, lists of token ids that are given to the engine together;
            `max_tokens`, generated greedily; `prompt_logprobs` and `logprobs`, true to have the
            log-probabilities of the whole vocabulary for the prompt's and the generated tokens.

This module must be importable without vLLM, and again in every process that vLLM spawns.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# Small enough for an interpreter: chunks of 64 tokens, some thousand slots of cache.
COMMON: dict[str, Any] = {
    "attention_backend": "TRITON_MLA",
    "block_size": 32,
    "disable_log_stats": True,
    "enforce_eager": True,
    "max_logprobs": -1,
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 256,
    "seed": 0,
    "skip_tokenizer_init": True,
}
ENGINES: dict[str, dict[str, Any]] = {
    "cpu": COMMON
    | {
        # Without `custom_ops`, layers would call operators compiled for the device.
        "compilation_config": {"mode": 0, "custom_ops": ["none"]},
        "dtype": "float32",
    },
    # Memory of a given size, not what is left: several of these run at once.
    "cuda": COMMON
    | {"dtype": "bfloat16", "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30},
}

# What takes long to import and runs nothing of an engine.
PRELOADED = (
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.v1.worker.cpu_worker",
)


def function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found


def table(rows: list[Any]) -> np.ndarray:
    """Log-probabilities by token id; one row per position that has them."""
    columns = max(max(row) for row in rows) + 1
    array = np.full((len(rows), columns), -np.inf, dtype=np.float32)
    for row, entries in zip(array, rows, strict=True):
        row[list(entries)] = [entry.logprob for entry in entries.values()]
    return array


def serve(folder: Path, forked: bool) -> None:
    request = json.loads((folder / "request.json").read_text())
    for name in request["before"]:
        function(name)()

    import vllm

    llm = vllm.LLM(model=request["model"], **(ENGINES[request["device"]] | request["engine"]))
    runs = generate(llm, request["runs"], folder)
    after = {name: function(name)(llm) for name in request["after"]}
    result = {"version": vllm.__version__, "runs": runs, "after": after}
    (folder / "result.json").write_text(json.dumps(result))
    if forked and not multiprocessing.active_children():
        # Nobody asks for more, and taking apart all that was imported takes seconds.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def generate(llm: Any, requested: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Run batches; log-probabilities go into files of the folder."""
    import vllm

    runs = []
    for i, run in enumerate(requested):
        sampling = vllm.SamplingParams(
            temperature=0,
            max_tokens=run["max_tokens"],
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=-1 if run["prompt_logprobs"] else None,
            logprobs=-1 if run["logprobs"] else None,
        )
        prompts = [{"prompt_token_ids": ids} for ids in run["prompts"]]
        outputs = []
        for j, output in enumerate(llm.generate(prompts, sampling, use_tqdm=False)):
            completion = output.outputs[0]
            outputs.append(
                {"tokens": list(completion.token_ids), "cached": output.num_cached_tokens}
            )
            if run["prompt_logprobs"]:
                # The first token has none: nothing comes before it.
                np.save(folder / f"{i}-{j}-prompt.npy", table(output.prompt_logprobs[1:]))
            if run["logprobs"]:
                np.save(folder / f"{i}-{j}-generated.npy", table(completion.logprobs))
        runs.append(outputs)
    return runs


def fork_for_requests() -> str:
    """Answer lines of input until there is no more; give back the folder of one, in its fork.

    A line is a JSON object: `folder`; `environment`, variables to set; `log`, a file; `seconds`,
    the most that the fork may take. Its answer is a line that says how the fork ended, and whatever
    the fork left behind ended with it. A fork is a process of its own, as a new one would be, but
    for the ten to fifteen seconds that importing vLLM takes: no engine, no plugin, no hook was
    there before.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in PRELOADED:
        importlib.import_module(module)
    # Collections in forks, of which vLLM asks for several, would copy all that was imported.
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if not process:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            answers.close()
            os.environ.update(request["environment"])
            return str(request["folder"])
        print(wait(process, request["seconds"]), file=answers, flush=True)
    sys.exit()


def wait(process: int, seconds: float) -> str:
    """Wait for a process that leads a group."""
    deadline = time.monotonic() + seconds
    found, status = 0, 0
    while not found and time.monotonic() < deadline:
        time.sleep(0.02)
        found, status = os.waitpid(process, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if found:
        return f"status {os.waitstatus_to_exitcode(status)}"
    os.waitpid(process, 0)
    return f"no result after {seconds} seconds"


if __name__ == "__main__":
    given = sys.argv[1:]
    serve(Path(given[0] if given else fork_for_requests()), forked=not given)
