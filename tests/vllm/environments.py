"""Virtual environments with a real vLLM, one for each version: `make vllm-envs` runs this file.

They are separate from the project's own, which need not suit any vLLM. vLLM itself is installed
with `--no-deps`, for it wants CUDA and a torch of its own; its compiled parts stay unused (see
`platform/`). An environment is reused until the files that describe it change.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]

VERSIONS = ("0.26.0", "0.33.0")

# Of the newest of them, and of what vLLM imports.
OLDEST_PYTHON = (3, 11)

# Where the environments are: another folder may outlive the clone. `make` sets it.
VARIABLE = "MLA_QUANT_VLLM_ENVS"


def supported() -> bool:
    """Whether the running Python can have these environments."""
    return sys.version_info[:2] >= OLDEST_PYTHON


def requirements(version: str) -> list[Path]:
    """What is installed with its dependencies, then what is installed without."""
    return [HERE / "requirements.txt", HERE / f"requirements-{version}.txt"]


def folder(version: str) -> Path:
    """Where the environment is or would be."""
    digest = hashlib.sha256(f"{sys.version_info[:2]}".encode())
    for file in [*requirements(version), REPOSITORY / "constraints.txt"]:
        digest.update(file.read_bytes())
    root = REPOSITORY / (os.environ.get(VARIABLE) or "build/vllm-envs")
    return root / f"{version}-{digest.hexdigest()[:12]}"


def interpreter(version: str) -> Path | None:
    """The Python of a complete environment, or None where there is none."""
    python = folder(version) / "bin" / "python"
    # Written last, so that an interrupted installation is repeated.
    return python if (folder(version) / ".installed").exists() else None


def build(version: str, pip_arguments: list[str]) -> None:
    """Create the environment, unless it is complete."""
    target = folder(version)
    if interpreter(version):
        print(f"{target}: complete")
        return
    print(f"{target}: installing vLLM {version}", flush=True)
    if target.exists():
        shutil.rmtree(target)
    subprocess.run([sys.executable, "-m", "venv", str(target)], check=True)
    pip = [str(target / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    pip += ["--disable-pip-version-check", *pip_arguments]
    resolved, unresolved = requirements(version)
    constraints = str(REPOSITORY / "constraints.txt")
    subprocess.run([*pip, "-c", constraints, "-r", str(resolved)], check=True)
    subprocess.run([*pip, "--no-deps", "-r", str(unresolved)], check=True)
    (target / ".installed").touch()


def main(pip_arguments: list[str]) -> None:
    """Create every environment, all at once."""
    if not supported():
        print("vLLM needs Python {}.{} or newer: no environments".format(*OLDEST_PYTHON))
        return
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda version: build(version, pip_arguments), VERSIONS))


if __name__ == "__main__":
    main(sys.argv[1:])
