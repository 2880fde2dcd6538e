"""Puts measured tables into README.md and the manual, so that no figure there is typed by hand."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def pages() -> list[Path]:
    """The files that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def insert(name: str, text: str) -> None:
    """Replace what stands between `<!-- name:begin -->` and `<!-- name:end -->` in the one page."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    holding = [page for page in pages() if begin in page.read_text(encoding="utf-8")]
    if len(holding) != 1:
        found = ", ".join(page.name for page in holding) or "none"
        raise SystemExit(f"one page of README.md and docs/*.md must have {begin}; found {found}")
    before, _, rest = holding[0].read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_end:
        raise SystemExit(f"{holding[0]} has no {end} after {begin}")
    holding[0].write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")
