"""What the manual holds, for the tests of it: pages, fenced blocks, links, commands."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
READABLE = [*PAGES, ROOT / "README.md"]
"""What users read of commands; CONTRIBUTING.md has links alone."""

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A command line, continuation lines joined."""

    page: Path
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.name}: {shlex.join(self.words)}"

    @property
    def mla_quant(self) -> tuple[str, ...] | None:
        """Arguments of `mla-quant`, however it is started; None for another program."""
        if self.words[0] == "mla-quant":
            return self.words[1:]
        if "mla_quant.cli" in self.words:
            return self.words[self.words.index("mla_quant.cli") + 1 :]
        return None


def blocks(page: Path, language: str) -> list[str]:
    """Contents of fenced blocks in a language."""
    found = _FENCE.findall(page.read_text(encoding="utf-8"))
    return [text for _, name, text in found if name == language]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def commands() -> list[Command]:
    """Every command line in a block of bash."""
    lines = [
        (page, line.strip())
        for page in READABLE
        for block in blocks(page, "bash")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return [Command(page, tuple(shlex.split(line))) for page, line in lines if line]
