"""Puts measured tables into README.md, so that no figure there is typed by hand."""

from __future__ import annotations

from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def insert(name: str, text: str) -> None:
    """Replace what stands between `<!-- name:begin -->` and `<!-- name:end -->`."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    readme = README.read_text(encoding="utf-8")
    before, found, rest = readme.partition(begin)
    _, also_found, after = rest.partition(end)
    if not (found and also_found):
        raise SystemExit(f"{README} has no {begin} followed by {end}")
    README.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")
