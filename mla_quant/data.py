"""Text for calibration and evaluation: from a source's name to token batches.

A source is the example text, a local file or folder, or a data set on the Hugging Face Hub. Local
sources never touch the network, and leave nothing in the user's cache. Everything that can be
wrong with a source raises :class:`~mla_quant.errors.DataError` with a message of its own.
"""

from __future__ import annotations

import copy
import difflib
import glob
import hashlib
import itertools
import json
import logging
import os
import random
import re
import stat
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mla_quant.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DataSpec", "TokenBatch", "check_source", "describe", "load_samples", "make_batches"]

logger = logging.getLogger("mla_quant")

EXAMPLE_DIR = Path(__file__).resolve().parent.parent / "examples" / "tiny_mla" / "data"
_EXAMPLE_FILES = {
    "example": "calibration.jsonl",
    "example:calibration": "calibration.jsonl",
    "example:heldout": "heldout.jsonl",
}

_FORMATS = {
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".txt": "text",
    ".csv": "csv",
}
_ALLOWED = ", ".join(_FORMATS)
# Suffixes of files that we do not read. A source that ends so is a file, not a hub id: hub ids may
# hold dots too ("org/set-v1.5", "org/set.en"), so that the mere presence of a dot says nothing.
_OTHER_FILE_SUFFIX = re.compile(
    r"\.(arrow|avro|bin|bz2|dat|docx?|feather|gz|h5|html?|md|ndjson|npy|npz|orc|pdf|pickle|pkl|pt|py"
    r"|rst|safetensors|sqlite|tar|text|tsv|xlsx?|xml|xz|ya?ml|zip|zst)"
)

_TEXT_COLUMNS = ("text", "content", "document", "article", "body", "prompt")
_CHAT_COLUMNS = ("messages", "conversations", "conversation")
_PAIRS = (("prompt", "completion"), ("prompt", "response"))
# The speaker names of the ShareGPT layout ({"from": ..., "value": ...}).
_ROLES = {"human": "user", "gpt": "assistant"}

_EMPTY = "empty text"
_ONLY_SPECIAL = "only special tokens"
_TOO_SHORT = "fewer than 2 tokens"
_REFUSED = "refused by the chat template"

_MIN_TOKENS = 2  # a next-token prediction takes a token and its successor


@dataclass(frozen=True)
class DataSpec:
    """What to read and how to cut it.

    Attributes:
        source: ``"example"`` (the calibration text of the source checkout's example model),
            ``"example:heldout"`` (its held-out text), a local ``.jsonl``, ``.json``,
            ``.parquet``, ``.txt`` or ``.csv`` file, a folder of files of one of these kinds, or
            a hub id ``"org/name"`` or ``"org/name:config"``. What exists on disk is local.
        split: split of a hub data set; ``None`` takes its only split or ``"train"``. Local
            sources have no splits.
        text_column: column that holds the text or the messages; ``None`` finds it by name.
        chat: ``True`` demands chat rows and applies the tokenizer's chat template, ``False``
            reads plain text; ``None`` applies the template to rows that hold chat messages.
        num_samples: largest number of samples (with ``pack``: of windows).
        seq_len: largest number of tokens in a sample, at least 2.
        seed: seed of the order in which rows are taken; unused with ``pack``.
        pack: ``False``: one sample a row, rows in shuffled order, each cut at ``seq_len``; a
            row of a ``.txt`` file is a line. ``True``: documents in the order of the source,
            joined with the end-of-sequence token between them and cut into windows of exactly
            ``seq_len`` tokens, as perplexity wants it; a ``.txt`` file is one document.
    """

    source: str
    split: str | None = None
    text_column: str | None = None
    chat: bool | None = None
    num_samples: int = 128
    seq_len: int = 512
    seed: int = 0
    pack: bool = False


@dataclass(frozen=True)
class TokenBatch:
    """Token ids with their padding mask.

    Attributes:
        input_ids: int64 ``[batch, seq]``.
        attention_mask: int64 ``[batch, seq]``, 1 for a token, 0 for padding.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor


@dataclass(frozen=True)
class _Source:
    """A source that was found: where it is, not yet what it holds."""

    kind: str  # "example" | "local" | "hub"
    name: str  # absolute path, or hub id
    config: str | None = None
    files: tuple[Path, ...] = ()
    format: str | None = None

    @property
    def label(self) -> str:
        if self.kind == "hub":
            return f"hub data set {self.name!r}" + (f" ({self.config})" if self.config else "")
        return f"{self.name!r}"


@dataclass(frozen=True)
class _Rows:
    """An open data set and the columns that its text is in (two for prompt/response pairs)."""

    dataset: Any  # datasets.Dataset | datasets.IterableDataset
    columns: tuple[str, ...]
    split: str | None


_last_read: dict[DataSpec, dict[str, Any]] = {}


# --------------------------------------------------------------------------------------------
# Public functions
# --------------------------------------------------------------------------------------------


def load_samples(spec: DataSpec, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Read a source and return at most ``spec.num_samples`` lists of token ids.

    The result depends on nothing but the specification, the contents of the source and the
    tokenizer. Rows without text, with special tokens only or with fewer than 2 tokens are dropped
    and counted (:func:`describe` gives the counts). Fewer samples than asked for are logged as a
    warning. With ``spec.pack`` an incomplete last window is dropped unless it is the only one.

    Returns:
        Non-empty list of samples, each of 2 to ``spec.seq_len`` token ids.

    Raises:
        DataError: the source cannot be read, has no usable column, needs a chat template that
            the tokenizer lacks, or leaves no sample.
    """
    _check_spec(spec)
    source = _find(spec)
    record = _static_record(spec, source)
    reader = _Reader(spec, tokenizer)
    with _open(spec, source, streaming=source.kind == "hub") as rows:
        samples = list(reader.windows(rows, source) if spec.pack else reader.rows(rows, source))
        record |= {
            "split": rows.split,
            "columns": list(rows.columns),
            "chat": reader.used_template,
            "rows_total": _length(rows.dataset),
        }
    dropped = sum(reader.dropped.values())
    record |= {
        "rows_read": reader.read,
        "rows_dropped": dropped,
        "drop_reasons": dict(sorted(reader.dropped.items())),
        "samples": len(samples),
        "tokens": sum(map(len, samples)),
    }
    if not samples:
        raise _nothing_left(source, reader.read, reader.dropped, reader.refusal)
    _last_read[spec] = record
    unit = "windows" if spec.pack else "samples"
    if len(samples) < spec.num_samples:
        logger.warning(
            "%s: %d of the %d requested %s (rows read: %d; dropped: %s)",
            source.label,
            len(samples),
            spec.num_samples,
            unit,
            reader.read,
            _counts(reader.dropped),
        )
    elif dropped:
        logger.info("%s: dropped rows: %s", source.label, _counts(reader.dropped))
    if reader.refusal is not None:
        logger.warning(
            "%s: the chat template refused %d rows, the first with: %s",
            source.label,
            reader.dropped[_REFUSED],
            reader.refusal,
        )
    return samples


def make_batches(
    samples: Sequence[Sequence[int]],
    batch_size: int,
    pad_token_id: int,
    padding_side: str = "right",
) -> list[TokenBatch]:
    """Pad samples into batches, in order; each batch is as long as its longest sample.

    Args:
        samples: token ids; none of them empty.
        batch_size: samples in a batch; the last batch may hold fewer.
        pad_token_id: id that fills the padding. Any valid id does: the mask excludes it.
        padding_side: ``"right"`` or ``"left"``.

    Returns:
        ``ceil(len(samples) / batch_size)`` batches.

    Raises:
        DataError: an argument is out of range, or there are no samples.
    """
    _check_int("batch_size", batch_size, 1)
    if pad_token_id is None:
        raise DataError(
            "pad_token_id is None: the tokenizer has no padding token. Pass another valid id, "
            "such as the end-of-sequence token's; the attention mask excludes it."
        )
    _check_int("pad_token_id", pad_token_id, 0)
    if padding_side not in ("left", "right"):
        raise DataError(f"padding_side is {padding_side!r}; allowed are 'left' and 'right'.")
    if not samples:
        raise DataError("There are no samples to make batches of.")
    for index, sample in enumerate(samples):
        if not sample:
            raise DataError(f"Sample {index} holds no tokens; drop it before making batches.")

    batches = []
    for start in range(0, len(samples), batch_size):
        chunk = samples[start : start + batch_size]
        shape = (len(chunk), max(map(len, chunk)))
        input_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros(shape, dtype=torch.int64)
        for row, sample in enumerate(chunk):
            where = slice(-len(sample), None) if padding_side == "left" else slice(len(sample))
            input_ids[row, where] = torch.tensor(sample, dtype=torch.int64)
            attention_mask[row, where] = 1
        batches.append(TokenBatch(input_ids, attention_mask))
    return batches


def describe(spec: DataSpec) -> dict[str, Any]:
    """Say what was read, as plain JSON types, for the report.

    Keys: the fields of ``spec``; ``kind`` (``"example"``, ``"local"``, ``"hub"``), ``name``
    (absolute path or hub id), ``config``, ``format``, ``files`` (of local sources: ``path``,
    ``sha256``, ``size_bytes``), ``columns``, ``rows_total`` (``None`` if unknown, as in a stream),
    ``rows_read``, ``rows_dropped``, ``drop_reasons`` (reason to count), ``samples``, ``tokens``;
    ``split`` and ``chat`` are those used.

    After :func:`load_samples` with an equal specification in this process, it describes that
    read, even if the files have changed since. Before, what only reading can tell is ``None``;
    local files are hashed and their column looked up, the network is not used.

    Raises:
        DataError: the source cannot be found or read.
    """
    if spec in _last_read:
        return copy.deepcopy(_last_read[spec])
    _check_spec(spec)
    source = _find(spec)
    record = _static_record(spec, source)
    if source.kind != "hub":
        with _open(spec, source, streaming=True) as rows:
            record["columns"] = list(rows.columns)
    return record


def check_source(spec: DataSpec) -> None:
    """Check a source before time is spent on a model.

    The source must exist, be readable, have its text column and at least one row with text. Local
    sources are read up to that row, without the network; hub data sets are opened as a stream.
    A fault further on, and a missing chat template, only :func:`load_samples` can find.

    Raises:
        DataError: the specification or the source is unusable.
    """
    _check_spec(spec)
    source = _find(spec)
    with _open(spec, source, streaming=True) as rows:
        read = 0
        for where, row in _iterate(rows.dataset, source, order=None):
            read += 1
            if _content(row, rows.columns, spec.chat, where) is not None:
                return
    raise _nothing_left(source, read, Counter({_EMPTY: read}), None)


# --------------------------------------------------------------------------------------------
# Specification
# --------------------------------------------------------------------------------------------


def _check_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DataError(f"{name} is {value!r}; it must be an integer of at least {least}.")


def _check_spec(spec: DataSpec) -> None:
    _check_int("num_samples", spec.num_samples, 1)
    _check_int("seq_len", spec.seq_len, _MIN_TOKENS)
    _check_int("seed", spec.seed, 0)
    if not isinstance(spec.source, str) or not spec.source.strip():
        raise DataError(
            f"source is {spec.source!r}; give 'example', a local file or folder ({_ALLOWED}), or "
            "a hub id 'org/name'."
        )


def _static_record(spec: DataSpec, source: _Source) -> dict[str, Any]:
    """Give the part of a description that needs no rows, and leave places for the rest."""
    return {
        "source": spec.source,
        "kind": source.kind,
        "name": source.name,
        "config": source.config,
        "format": source.format,
        "files": [
            {"path": str(path), "sha256": _sha256(path), "size_bytes": path.stat().st_size}
            for path in source.files
        ],
        "split": spec.split,
        "text_column": spec.text_column,
        "columns": None,
        "chat": spec.chat,
        "num_samples": spec.num_samples,
        "seq_len": spec.seq_len,
        "seed": spec.seed,
        "pack": spec.pack,
        "rows_total": None,
        "rows_read": None,
        "rows_dropped": None,
        "drop_reasons": None,
        "samples": None,
        "tokens": None,
    }


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# --------------------------------------------------------------------------------------------
# Finding the source
# --------------------------------------------------------------------------------------------


def _find(spec: DataSpec) -> _Source:
    source = spec.source
    if source == "example" or source.startswith("example:"):
        found = _find_example(source)
    else:
        path = Path(source).expanduser()
        mode = _mode(path)
        if mode is not None:
            found = _find_local(path, mode)
        elif "://" in source:
            raise DataError(
                f"{source!r} is a URL, which is not read. Download it and pass the local file, or "
                "pass a hub id 'org/name'."
            )
        elif _looks_like_path(source):
            raise _no_such_path(source, path)
        else:
            found = _hub_id(source)
    if found.kind != "hub" and spec.split is not None:
        hint = "'example' or 'example:heldout'" if found.kind == "example" else "the split's file"
        raise DataError(
            f"split is {spec.split!r}, but {source!r} is local, and local sources have no splits. "
            f"Leave the split out and pass {hint} as the source."
        )
    return found


def _find_example(source: str) -> _Source:
    if source not in _EXAMPLE_FILES:
        raise DataError(
            f"{source!r} is not a part of the example text; allowed are "
            f"{', '.join(map(repr, _EXAMPLE_FILES))}. For a local file of that name, write "
            f"{'./' + source!r}."
        )
    path = EXAMPLE_DIR / _EXAMPLE_FILES[source]
    if not path.is_file():
        raise DataError(
            f"The example text is not there: {str(path)!r} does not exist. It ships with the "
            "source checkout, not with the installed package. Run from a checkout (pip install "
            "-e .), or pass your own text as the source."
        )
    _check_file(path)
    return _Source("example", str(path), files=(path,), format=_FORMATS[path.suffix])


def _mode(path: Path) -> int | None:
    """Give the file mode of what is at a path, ``None`` if nothing is."""
    try:
        return path.stat().st_mode
    except PermissionError as exc:
        raise DataError(
            f"{str(path)!r} cannot be reached: no permission to enter a folder above it. Grant "
            "it, or copy the data elsewhere."
        ) from exc
    except (OSError, ValueError):  # absent, name too long, link loop, zero byte in the name
        return None


def _find_local(path: Path, mode: int) -> _Source:
    path = Path(os.path.abspath(path))
    if stat.S_ISDIR(mode):
        files = _folder_files(path)
    elif stat.S_ISREG(mode):
        if path.suffix.lower() not in _FORMATS:
            raise DataError(
                f"{str(path)!r} has the suffix {path.suffix!r}; allowed are {_ALLOWED}. Convert "
                "the file or rename it to what it holds."
            )
        _check_file(path)
        files = (path,)
    else:
        raise DataError(f"{str(path)!r} is neither a file nor a folder; pass one of these.")
    return _Source("local", str(path), files=files, format=_FORMATS[files[0].suffix.lower()])


def _folder_files(folder: Path) -> tuple[Path, ...]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as exc:
        raise DataError(
            f"The folder {str(folder)!r} cannot be listed: {exc.strerror or exc}. Grant read "
            "permission, or copy the data elsewhere."
        ) from exc
    names = {entry.name for entry in entries}
    if {"state.json", "dataset_info.json"} <= names or "dataset_dict.json" in names:
        raise DataError(
            f"{str(folder)!r} was written by datasets' save_to_disk, which is not read. Write it "
            "with to_parquet or to_json, and pass that file."
        )
    # Hidden files are system litter (.DS_Store, .gitattributes).
    entries = [entry for entry in entries if not entry.name.startswith(".")]
    known = [e for e in entries if e.suffix.lower() in _FORMATS and e.is_file()]
    if not known:
        found = ", ".join(entry.name + "/" * entry.is_dir() for entry in entries[:10]) or "nothing"
        raise DataError(
            f"The folder {str(folder)!r} holds no file that can be read; allowed are {_ALLOWED}; "
            f"found: {found}. Folders below it are not searched."
        )
    suffixes = Counter(entry.suffix.lower() for entry in known)
    if len({_FORMATS[suffix] for suffix in suffixes}) > 1:
        raise DataError(
            f"The folder {str(folder)!r} holds files of several kinds: "
            f"{_counts(suffixes)}. Pass one file, or a folder of one kind."
        )
    files = []
    for entry in known:
        # Tools that write in parts leave empty parts; they are no reason to refuse the rest.
        if entry.stat().st_size == 0:
            logger.warning("%s is empty and skipped", entry)
            continue
        _check_file(entry)
        files.append(entry)
    if not files:
        raise DataError(f"All {len(known)} files of the folder {str(folder)!r} are empty.")
    ignored = [e.name for e in entries if e not in known]
    if ignored:
        logger.info("%s: ignored %s", folder, ", ".join(ignored))
    return tuple(files)


def _check_file(path: Path) -> None:
    """Find the faults that show without parsing: no permission, no bytes, no parquet."""
    try:
        with path.open("rb") as file:
            head = file.read(4)
            if not head:
                raise DataError(f"{str(path)!r} is empty (0 bytes); it must hold at least one row.")
            if path.suffix.lower() == ".parquet":
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - 4, 0))
                tail = file.read(4)
                if not (head == tail == b"PAR1"):
                    raise DataError(
                        f"{str(path)!r} is not a complete parquet file: it starts with {head!r} "
                        f"and ends with {tail!r}, both must be b'PAR1'. If the copy was cut short, "
                        "copy it again."
                    )
    except OSError as exc:
        raise DataError(
            f"{str(path)!r} cannot be read: {exc.strerror or exc}. Grant read permission, or copy "
            "the data elsewhere."
        ) from exc


def _looks_like_path(source: str) -> bool:
    """Tell a misspelt path from a hub id, for a source that does not exist on disk."""
    if source.startswith((".", "/", "~")) or "\\" in source or source.endswith("/"):
        return True
    if source.count("/") > 1:
        return True
    if "/" in source and _mode(Path(source).parent) is not None:
        return True
    suffix = Path(source).suffix.lower()
    if suffix in _FORMATS or _OTHER_FILE_SUFFIX.fullmatch(suffix):
        return True
    if not re.fullmatch(r"\.[a-z]+", suffix):
        return False
    return "/" not in source or bool(difflib.get_close_matches(suffix, _FORMATS, cutoff=0.75))


def _close_names(path: Path) -> str:
    """Suggest what a misspelt path may have meant, in a sentence; empty if nothing is close."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(str(path.parent / n)) for n in close)}?" * bool(close)


def _no_such_path(source: str, path: Path) -> DataError:
    missing = path
    while missing.parent != missing and _mode(missing.parent) is None:
        missing = missing.parent
    what = "" if missing == path else f": there is no {str(missing)!r}"
    return DataError(
        f"The local source {source!r} does not exist{what}.{_close_names(missing)} The current "
        f"folder is {os.getcwd()!r}. It was taken for a path, so the hub was not asked."
    )


def _hub_id(source: str) -> _Source:
    name, colon, config = source.partition(":")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name, re.ASCII) or (colon and not config):
        raise DataError(
            f"{source!r} is neither a local file or folder nor a hub id. Hub ids have the form "
            f"'org/name' or 'org/name:config'; local files end in {_ALLOWED}; 'example' is the "
            "example text."
            f"{_close_names(Path(source))}"
        )
    return _Source("hub", name, config=config or None)


# --------------------------------------------------------------------------------------------
# Opening it with datasets
# --------------------------------------------------------------------------------------------


def transport_errors() -> tuple[type[Exception], ...]:
    """Base errors of whichever HTTP client the installed ``huggingface_hub`` uses.

    Releases 1.x use ``httpx``, 2.x ``httpx2``; 0.x used ``requests``, whose errors are ``OSError``.
    """
    found: list[type[Exception]] = []
    for name in ("httpx", "httpx2"):
        with suppress(ImportError):
            found.append(import_module(name).HTTPError)
    return tuple(found)


def _read_errors() -> tuple[type[Exception], ...]:
    """List what ``datasets`` raises on bad data or a bad connection."""
    import datasets
    import pyarrow

    # StopIteration and the last four come from inside datasets, on files it cannot make sense of.
    return (
        datasets.exceptions.DatasetsError,
        pyarrow.ArrowException,
        *transport_errors(),
        OSError,
        ValueError,
        StopIteration,
        RuntimeError,
        LookupError,
        TypeError,
        AttributeError,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress bars and log lines of ``datasets``; its errors become ours."""
    import datasets

    verbosity = datasets.logging.get_verbosity()
    bars = datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if not bars:
            datasets.enable_progress_bars()


@contextmanager
def _open(spec: DataSpec, source: _Source, *, streaming: bool) -> Iterator[_Rows]:
    """Open a source, reduced to the columns that are needed. Close only after the last row."""
    if source.kind == "hub":
        dataset, split = _open_hub(spec, source)
        yield _reduce(spec, source, dataset, split)
        return
    with _quiet(), tempfile.TemporaryDirectory(prefix="mla_quant_data_") as cache:
        # The peek gives the columns, and tells "no rows" from "cannot be parsed".
        rows = _reduce(spec, source, _open_local(spec, source, cache, streaming=True), None)
        if not streaming:
            if next(_iterate(rows.dataset, source, order=None), None) is None:
                raise _nothing_left(source, 0, Counter(), None)
            dataset = _open_local(spec, source, cache, streaming=False)
            rows = _Rows(dataset.select_columns(list(rows.columns)), rows.columns, None)
        yield rows


def _open_local(spec: DataSpec, source: _Source, cache: str, *, streaming: bool) -> Any:
    from datasets import Dataset

    # Not load_dataset: that reports each use of a local loader to the hub. The throw-away cache
    # keeps the user's cache small, and makes every call read the files anew.
    options: dict[str, Any] = {"cache_dir": cache, "streaming": streaming}
    if source.format == "text":
        options |= {"encoding": "utf-8-sig", "sample_by": "document" if spec.pack else "line"}
    elif source.format == "parquet":
        # By default a batch is as long as the first row group, which may have no rows.
        options["batch_size"] = 1000
    reader = {
        "json": Dataset.from_json,
        "parquet": Dataset.from_parquet,
        "text": Dataset.from_text,
        "csv": Dataset.from_csv,
    }[str(source.format)]
    try:
        return reader([glob.escape(str(path)) for path in source.files], **options)
    except _read_errors() as exc:
        raise _local_error(source, exc) from exc


def _open_hub(spec: DataSpec, source: _Source) -> tuple[Any, str | None]:
    import datasets
    from huggingface_hub import constants

    # Streams cannot be sliced ("train[:10%]"), nor come from the cache when offline.
    streaming = not constants.HF_HUB_OFFLINE and "[" not in (spec.split or "")
    try:
        dataset = datasets.load_dataset(
            source.name, source.config, split=spec.split, streaming=streaming
        )
    except _read_errors() as exc:
        raise _hub_error(source, exc) from exc
    split = spec.split
    if isinstance(dataset, dict):
        names = list(dataset)
        split = names[0] if len(names) == 1 else "train"
        if split not in dataset:
            raise DataError(
                f"{source.label} has the splits {', '.join(map(repr, names))} and no 'train'; "
                "say which one to read (split)."
            )
        dataset = dataset[split]
    return dataset, split


def _reduce(spec: DataSpec, source: _Source, dataset: Any, split: str | None) -> _Rows:
    """Choose the columns; the others may hold images that would be decoded for nothing."""
    names = dataset.column_names
    if names is None:  # a stream whose schema is known from its rows only
        for _, row in _iterate(dataset, source, order=None):
            names = list(row)
            break
    if not names or _length(dataset) == 0:
        raise _nothing_left(source, 0, Counter(), None)
    if source.format == "csv" and any(name.startswith("__index_level_") for name in names):
        raise DataError(
            f"{source.label}: rows have more fields than the header has names, so that columns "
            "cannot be told apart. Quote fields that hold commas."
        )
    columns = _choose_columns(spec, source, list(names))
    return _Rows(dataset.select_columns(list(columns)), columns, split)


def _choose_columns(spec: DataSpec, source: _Source, names: list[str]) -> tuple[str, ...]:
    listed = ", ".join(map(repr, names))
    if spec.text_column is not None:
        if spec.text_column not in names:
            close = difflib.get_close_matches(spec.text_column, names, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise DataError(
                f"{source.label} has no column {spec.text_column!r}; it has {listed}.{hint}"
            )
        return (spec.text_column,)
    chat = [name for name in names if name.lower() in _CHAT_COLUMNS]
    text = [name for name in names if name.lower() in _TEXT_COLUMNS]
    pair = next((pair for pair in _PAIRS if set(pair) <= set(names)), None)
    if spec.chat is not False and chat:
        candidates = chat
    elif pair is not None and set(text) <= set(pair):
        return pair
    elif spec.chat is True:
        raise DataError(
            f"{source.label} has no column of chat messages (looked for "
            f"{', '.join(map(repr, _CHAT_COLUMNS))}); it has {listed}. Name the column "
            "(text_column), or turn the chat template off (chat)."
        )
    else:
        candidates = text
    if len(candidates) == 1:
        return (candidates[0],)
    if candidates:
        raise DataError(
            f"{source.label} has several columns that may hold the text: "
            f"{', '.join(map(repr, candidates))}. Name the one to read (text_column)."
        )
    raise DataError(
        f"{source.label} has no column that is known to hold text (looked for "
        f"{', '.join(map(repr, (*_TEXT_COLUMNS, *_CHAT_COLUMNS)))}); it has {listed}. Name the "
        "one to read (text_column)."
    )


def _length(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None


def _iterate(
    dataset: Any, source: _Source, order: Iterable[int] | None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield rows with a name for messages; errors of reading become :class:`DataError`."""
    errors = _read_errors()
    # Only the step to the next row is guarded: what the consumer raises is no error of reading.
    try:
        rows: Iterator[tuple[int, Mapping[str, Any]]] = (
            enumerate(dataset) if order is None else ((i, dataset[i]) for i in order)
        )
    except errors as exc:
        raise _error(source, exc) from exc
    while True:
        try:
            index, row = next(rows)
        except StopIteration:
            return
        except errors as exc:
            raise _error(source, exc) from exc
        # The order of a hub stream is not that of the data set.
        stream = " of the stream" if order is None and source.kind == "hub" else ""
        yield f"{source.label}, row {index + 1}{stream}", row


# --------------------------------------------------------------------------------------------
# Errors
# --------------------------------------------------------------------------------------------


def _counts(counter: Mapping[str, int]) -> str:
    return ", ".join(f"{key} ({count})" for key, count in sorted(counter.items())) or "none"


def _nothing_left(
    source: _Source, read: int, dropped: Mapping[str, int], refusal: str | None
) -> DataError:
    if read == 0:
        return DataError(f"{source.label} holds no rows; at least one row with text is needed.")
    why = f" The chat template's first refusal: {refusal}." if refusal else ""
    return DataError(
        f"{source.label} leaves nothing to use: all {read} rows were dropped: "
        f"{_counts(dropped)}.{why} Check the column (text_column) and the data."
    )


def _chain(exc: BaseException) -> list[BaseException]:
    """List an exception and those it came from, each once."""
    found: list[BaseException] = []
    queue: list[BaseException | None] = [exc]
    while queue:
        current = queue.pop(0)
        if current is not None and current not in found:
            found.append(current)
            queue += [current.__cause__, current.__context__]
    return found


def _summary(exc: BaseException) -> str:
    """Give the first line of the exception that says something."""
    from datasets.exceptions import DatasetGenerationError

    if type(exc) is DatasetGenerationError and exc.__cause__ is not None:
        exc = exc.__cause__
    text = " ".join(str(exc).split())
    return f"{type(exc).__name__}: {text[:400]}" if text else type(exc).__name__


def _error(source: _Source, exc: Exception) -> DataError:
    return _hub_error(source, exc) if source.kind == "hub" else _local_error(source, exc)


def _local_error(source: _Source, exc: Exception) -> DataError:
    for path in source.files:
        found = _diagnose(path, str(source.format))
        if found is not None:
            return DataError(found)
    return DataError(
        f"{source.label} cannot be read as {source.format}: {_summary(exc)}. All rows of a source "
        "must have the same columns, each of one type."
    )


def _diagnose(path: Path, format: str) -> str | None:
    """Find the line at which a file of text is broken; parsers name neither file nor line."""
    if format == "parquet":
        return None
    name = repr(str(path))
    first = ""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as exc:
                return (
                    f"{name}, line {number}: byte {exc.start + 1} of the line "
                    f"(0x{raw[exc.start]:02x}) is not UTF-8 ({exc.reason}). Convert the file to "
                    "UTF-8."
                )
            first = first or line.strip()
    if format != "json" or not first:
        return None
    # A .json file may be one value that spans lines, or JSON lines under another suffix.
    whole = path.suffix.lower() == ".json" and not _is_json(first)
    with path.open(encoding="utf-8-sig") as text:
        lines = enumerate([text.read()] if whole else text, start=1)
        for number, line in lines:
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as exc:
                at = f"line {exc.lineno}" if whole else f"line {number}"
                return (
                    f"{name}, {at}, column {exc.colno}: not valid JSON ({exc.msg}). Each line "
                    "must be one object, or the file one array of objects."
                )
            items = value if isinstance(value, list) else [value]
            for item in items:
                if not isinstance(item, dict):
                    return (
                        f"{name}, line {number}: a row is {type(item).__name__}, not an object "
                        'such as {"text": "..."}.'
                    )
    return None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def _hub_error(source: _Source, exc: Exception) -> DataError:
    import datasets
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    chain = _chain(exc)

    def has(*kinds: type[BaseException]) -> bool:
        return any(isinstance(link, kinds) for link in chain)

    label = source.label
    # datasets drops the cause when it re-raises, so that only its message tells gated from absent.
    if has(hub.GatedRepoError) or (
        has(DatasetNotFoundError) and any("gated dataset" in str(link) for link in chain)
    ):
        return DataError(
            f"{label} is gated. Log in (hf auth login) and accept its terms at "
            f"https://huggingface.co/datasets/{source.name}, then run again."
        )
    if has(hub.RepositoryNotFoundError, DatasetNotFoundError):
        return DataError(
            f"{label} was not found on the hub: it may be misspelt, or private. Check the name at "
            f"https://huggingface.co/datasets; for a private one, log in first (hf auth login)."
            f"{_close_names(Path(source.name))}"
        )
    if has(hub.OfflineModeIsEnabled) or (constants.HF_HUB_OFFLINE and has(OSError)):
        return DataError(
            f"{label} is not in the local cache, and the hub may not be asked because offline "
            "mode is on (HF_HUB_OFFLINE). Unset it, download the data set first, or pass a local "
            "file."
        )
    if has(hub.DisabledRepoError):
        return DataError(f"{label} has been disabled on the hub. Use another data set.")
    status = next((x for x in chain if isinstance(x, hub.HfHubHTTPError)), None)
    if status is not None:
        return DataError(f"{label}: the hub answered with an error: {_summary(status)}. Try again.")
    if has(hub.LocalEntryNotFoundError, *transport_errors(), ConnectionError, TimeoutError):
        return DataError(
            f"{label}: the hub cannot be reached ({_summary(exc)}). Check the network connection "
            "and proxy, or pass a local file."
        )
    if has(DataFilesNotFoundError, EmptyDatasetError):
        return DataError(f"{label} holds no data files that datasets can read.")
    if isinstance(exc, ValueError) and not has(datasets.exceptions.DatasetsError):
        return DataError(
            f"{label} cannot be opened: {_summary(exc)}. A configuration is given as "
            f"'{source.name}:config', a split by its own option."
        )
    return DataError(f"{label} cannot be read: {_summary(exc)}")


# --------------------------------------------------------------------------------------------
# Rows to tokens
# --------------------------------------------------------------------------------------------


def _content(
    row: Mapping[str, Any], columns: tuple[str, ...], chat: bool | None, where: str
) -> str | list[dict[str, Any]] | None:
    """Give a row's text or its chat messages, ``None`` if there is none."""
    values = [row.get(column) for column in columns]
    if len(columns) == 2:
        return _pair(values, columns, chat, where)
    value = values[0]
    if value is None:
        return None
    named = f"{where}: column {columns[0]!r}"
    if isinstance(value, str):
        if chat is True:
            raise DataError(
                f"{named} holds text, not chat messages. Name the column of the messages "
                "(text_column), or turn the chat template off (chat)."
            )
        return value if value.strip() else None
    if not isinstance(value, list):
        raise DataError(
            f"{named} holds {type(value).__name__}; it must hold text or a list of chat messages. "
            "Name another column (text_column)."
        )
    if chat is False:
        raise DataError(
            f"{named} holds a list, not text, and the chat template is turned off (chat). Turn it "
            "on, or name another column (text_column)."
        )
    return _messages(value, named)


def _pair(
    values: list[Any], columns: tuple[str, ...], chat: bool | None, where: str
) -> str | list[dict[str, Any]] | None:
    if all(value is None for value in values):
        return None
    named = f"{where}: columns {columns[0]!r} and {columns[1]!r}"
    if all(isinstance(value, list) for value in values):
        if chat is False:
            raise DataError(
                f"{named} hold lists, not text, and the chat template is turned off (chat)."
            )
        return _messages([*values[0], *values[1]], named)
    if not all(value is None or isinstance(value, str) for value in values):
        kinds = " and ".join(type(value).__name__ for value in values)
        raise DataError(f"{named} hold {kinds}; both must hold text, or both lists of messages.")
    prompt, response = (value or "" for value in values)
    if not prompt.strip() and not response.strip():
        return None
    if chat is True:
        return [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": response},
        ]
    return f"{prompt}\n{response}"


def _messages(value: list[Any], named: str) -> list[dict[str, Any]] | None:
    """Bring messages to ``{"role", "content", ...}``; ``None`` if none of them says anything."""
    messages = []
    for message in value:
        if not isinstance(message, Mapping):
            raise DataError(
                f"{named} holds a list of {type(message).__name__}; chat messages are objects with "
                "'role' and 'content', or 'from' and 'value'."
            )
        # Columns give every row the keys of all rows; templates take a None key for a present one.
        entry = {key: item for key, item in message.items() if item is not None}
        if "role" not in entry and "from" in entry:
            speaker = entry.pop("from")
            entry["role"] = _ROLES.get(speaker, speaker)
            entry["content"] = entry.pop("value", "")
        if "role" not in entry:
            raise DataError(
                f"{named}: a message has the keys {', '.join(map(repr, entry)) or 'none'}; it "
                "needs 'role' and 'content', or 'from' and 'value'."
            )
        entry.setdefault("content", "")
        messages.append(entry)
    said = any(
        entry["content"].strip() if isinstance(entry["content"], str) else entry["content"]
        for entry in messages
    )
    return messages if said else None


class _Reader:
    """Turns rows into samples and keeps count of what it read and dropped."""

    def __init__(self, spec: DataSpec, tokenizer: PreTrainedTokenizerBase) -> None:
        self.spec = spec
        self.tokenizer = tokenizer
        self.special = frozenset(tokenizer.all_special_ids)
        self.read = 0
        self.dropped: Counter[str] = Counter()
        self.refusal: str | None = None
        self.used_template = False

    def rows(self, rows: _Rows, source: _Source) -> Iterator[list[int]]:
        """Yield one sample a row, in seeded order, until there are enough."""
        seed, wanted = self.spec.seed, self.spec.num_samples
        dataset, order = rows.dataset, None
        if (length := _length(dataset)) is not None:
            order = random.Random(seed).sample(range(length), length)
        else:
            # Shuffled within a buffer, which must be downloaded before the first row comes out.
            size = min(10_000, max(1_000, 8 * wanted))
            dataset = dataset.shuffle(seed=seed, buffer_size=size)
        documents = self._documents(dataset, order, rows.columns, source)
        for ids in itertools.islice(documents, wanted):
            yield ids[: self.spec.seq_len]

    def windows(self, rows: _Rows, source: _Source) -> Iterator[list[int]]:
        """Yield full windows of the documents in order, until there are enough."""
        size, wanted = self.spec.seq_len, self.spec.num_samples
        eos = self.tokenizer.eos_token_id
        if eos is None:
            logger.warning(
                "The tokenizer has no end-of-sequence token: documents are joined without one"
            )
        rest: list[int] = []
        last: int | None = None
        found = 0
        length = _length(rows.dataset)
        order = None if length is None else range(length)
        for ids in self._documents(rows.dataset, order, rows.columns, source):
            if eos is not None and last not in (None, eos):
                rest.append(eos)
            rest += ids
            last = rest[-1]
            full = len(rest) - len(rest) % size
            for start in range(0, full, size):
                yield rest[start : start + size]
                found += 1
                if found == wanted:
                    return
            rest = rest[full:]
        if not found and rest:
            yield rest

    def _documents(
        self,
        dataset: Any,
        order: Iterable[int] | None,
        columns: tuple[str, ...],
        source: _Source,
    ) -> Iterator[list[int]]:
        for where, row in _iterate(dataset, source, order):
            self.read += 1
            content = _content(row, columns, self.spec.chat, where)
            if content is None:
                self.dropped[_EMPTY] += 1
                continue
            ids = self._text(content) if isinstance(content, str) else self._chat(content)
            if ids is None:
                self.dropped[_REFUSED] += 1
            elif self.special.issuperset(ids):
                self.dropped[_ONLY_SPECIAL] += 1
            elif len(ids) < _MIN_TOKENS:
                self.dropped[_TOO_SHORT] += 1
            else:
                yield ids

    def _text(self, text: str) -> list[int]:
        # verbose=False: a text longer than the model's context is cut here, no need to warn.
        return [int(i) for i in self.tokenizer(text, verbose=False)["input_ids"]]

    def _chat(self, messages: list[dict[str, Any]]) -> list[int] | None:
        """Apply the chat template; ``None`` if it refuses these messages."""
        from jinja2 import TemplateError

        try:
            encoded: Any = self.tokenizer.apply_chat_template(messages, tokenize=True)
        except (TemplateError, TypeError, ValueError) as exc:
            if not getattr(self.tokenizer, "chat_template", None):
                raise DataError(
                    "The rows hold chat messages, but the tokenizer has no chat template. Use a "
                    "tokenizer that has one, or name a column of plain text (text_column) and "
                    "turn the template off (chat)."
                ) from exc
            self.refusal = self.refusal or _summary(exc)
            return None
        self.used_template = True
        # transformers 5 returns a mapping here, transformers 4 a list.
        ids = encoded["input_ids"] if isinstance(encoded, Mapping) else encoded
        if isinstance(ids, torch.Tensor):
            ids = ids.tolist()
        if ids and isinstance(ids[0], list):
            ids = ids[0]
        return [int(i) for i in ids]
