"""Runs `worker.py` in the environment of a vLLM and reads what it wrote."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mla_quant
from tests.vllm.environments import HERE, REPOSITORY

SECONDS = 300
TAIL = 6000


@dataclass(frozen=True)
class Output:
    """What one prompt gave; log-probabilities are [positions, vocabulary] where asked for."""

    tokens: list[int]
    cached: int
    prompt_logprobs: np.ndarray | None
    logprobs: np.ndarray | None


@dataclass(frozen=True)
class Result:
    runs: list[list[Output]]
    after: dict[str, Any]


def run(
    prompts: Sequence[Sequence[int]],
    max_tokens: int = 1,
    *,
    prompt_logprobs: bool = False,
    logprobs: bool = False,
) -> dict[str, Any]:
    """One batch for `Vllm.__call__`; vLLM reads no prefix cache where it owes prompt_logprobs."""
    return {
        "prompts": [list(ids) for ids in prompts],
        "max_tokens": max_tokens,
        "prompt_logprobs": prompt_logprobs,
        "logprobs": logprobs,
    }


def entry_points(parent: Path) -> Path:
    """Write what makes vLLM find the plugin of this project, which is not installed beside it."""
    import tomllib

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    version = mla_quant.__version__
    folder = parent / f"mla_quant-{version}.dist-info"
    folder.mkdir()
    name = project["name"]
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return parent


@dataclass(frozen=True)
class Forks:
    """A process of `worker.fork_for_requests`, and what it wrote."""

    process: subprocess.Popen[str]
    log: Path

    def __call__(self, folder: Path, environment: dict[str, str], log: Path) -> str:
        request = {"folder": str(folder), "environment": environment}
        request |= {"log": str(log), "seconds": SECONDS}
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=stdin, flush=True)
            # Longer by what importing vLLM may take.
            if select.select([stdout], [], [], 2 * SECONDS)[0]:
                answer = stdout.readline().strip()
        if not answer:
            pytest.fail(f"no answer of a fork\n{self.log.read_text()[-TAIL:]}", pytrace=False)
        return answer


@dataclass(frozen=True)
class Vllm:
    """Loads a checkpoint into a vLLM of one version and runs batches through it."""

    version: str
    python: Path
    scratch: Path
    metadata: Path
    device: str = "cpu"
    forks: Forks | None = None

    def __call__(
        self,
        model: str | Path,
        runs: Sequence[dict[str, Any]],
        *,
        engine: dict[str, Any] | None = None,
        before: Sequence[str] = (),
        after: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> Result:
        """Start a process, as `worker.py` describes, and give back what it found."""
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        request = {
            "model": str(model),
            "device": self.device,
            "engine": engine or {},
            "before": list(before),
            "after": list(after),
            "runs": list(runs),
        }
        (folder / "request.json").write_text(json.dumps(request))
        log = folder / "log.txt"
        if self.forks is not None:
            status = self.forks(folder, environment or {}, log)
        else:
            command = [str(self.python), "-m", "tests.vllm.worker", str(folder)]
            with log.open("w") as stream:
                status = _wait(
                    subprocess.Popen(
                        command,
                        cwd=REPOSITORY,
                        env=self.variables() | (environment or {}),
                        stdin=subprocess.DEVNULL,
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        if not (folder / "result.json").exists():
            pytest.fail(f"vLLM {self.version}: {status}\n{log.read_text()[-TAIL:]}", pytrace=False)
        result = json.loads((folder / "result.json").read_text())
        assert result["version"] == self.version
        outputs = [
            [
                Output(
                    **output,
                    prompt_logprobs=_array(folder / f"{i}-{j}-prompt.npy"),
                    logprobs=_array(folder / f"{i}-{j}-generated.npy"),
                )
                for j, output in enumerate(batch)
            ]
            for i, batch in enumerate(result["runs"])
        ]
        return Result(outputs, result["after"])

    def variables(self) -> dict[str, str]:
        """The child's environment: nothing of vLLM or Python that surrounds the tests."""
        dropped = ("VLLM_", "PYTHON", "PYTEST_", "VIRTUAL_ENV")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        common = {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            # What it learned of a model's class; kept with the environment, it saves a process.
            "VLLM_CACHE_ROOT": str(self.python.parents[1] / "cache"),
            # The engine in the same process: quicker, and `after` reaches the model.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_DEEP_GEMM": "0",
        }
        if self.device == "cuda":
            # There vLLM is found as it was for the tests.
            paths = [REPOSITORY, self.metadata, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
            own = {"VLLM_CACHE_ROOT": str(self.scratch / "cache")}
            own["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        else:
            paths = [REPOSITORY, HERE / "platform", self.metadata]
            own = {
                # With a visible device vLLM would replace Triton's kernels by placeholders.
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                # Otherwise small helpers of vLLM go through torch.compile, and a C++ compiler.
                "TORCHDYNAMO_DISABLE": "1",
                "TRITON_INTERPRET": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            }
        found = os.pathsep.join(str(path) for path in paths if str(path))
        return kept | common | {"PYTHONPATH": found} | own

    @contextlib.contextmanager
    def forking(self) -> Iterator[Vllm]:
        """The same, but its processes are forks of one that has imported vLLM."""
        log = self.scratch / "forks.txt"
        with (
            log.open("w") as stream,
            subprocess.Popen(
                [str(self.python), "-m", "tests.vllm.worker"],
                cwd=REPOSITORY,
                env=self.variables(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                start_new_session=True,
                text=True,
            ) as process,
        ):
            try:
                yield dataclasses.replace(self, forks=Forks(process, log))
            finally:
                process.kill()


def _wait(process: subprocess.Popen[bytes]) -> str:
    """Wait for a process that leads a group; whatever it started and left behind ends with it."""
    try:
        return f"status {process.wait(SECONDS)}"
    except subprocess.TimeoutExpired:
        return f"no result after {SECONDS} seconds"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _array(path: Path) -> np.ndarray | None:
    return np.load(path) if path.exists() else None
