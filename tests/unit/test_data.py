"""Reading text: every kind of source, every way in which one can be bad, and the token batches."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import httpx
import pandas as pd
import pytest
import torch
from huggingface_hub import constants as hub_constants
from huggingface_hub import errors as hub_errors
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BatchEncoding, PreTrainedTokenizerFast

from mla_quant import data
from mla_quant.data import (
    DataSpec,
    TokenBatch,
    check_source,
    describe,
    load_samples,
    make_batches,
)
from mla_quant.errors import DataError

WORDS = [f"w{i}" for i in range(200)]
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>"]
VOCAB = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
PAD, BOS, EOS = VOCAB["<pad>"], VOCAB["<bos>"], VOCAB["<eos>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('bad role') }}{% endif %}"
    "<{{ m['role'] }}> {{ m['content'] }} "
    "{% endfor %}"
)

Write = Callable[..., Path]


def build_tokenizer(*, bos: bool = False, template: str | None = TEMPLATE) -> Any:
    """One token a word; ``bos`` puts a first token before each text, as many models do."""
    backend = Tokenizer(models.WordLevel(VOCAB, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file of rows in the kind that its suffix names."""

    def write(name: str, rows: Any = None, *, raw: bytes | None = None) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if raw is not None:
            path.write_bytes(raw)
        elif path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows, indent=1))
        elif path.suffix == ".txt":
            path.write_text("".join(row["text"] + "\n" for row in rows))
        elif path.suffix == ".csv":
            pd.DataFrame(rows).to_csv(path, index=False)
        else:
            pd.DataFrame(rows).to_parquet(path)
        return path

    return write


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record and refuse every connection and name look-up."""
    attempts: list[Any] = []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        attempts.append(args)
        raise OSError("a test must not use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return attempts


def words(*numbers: int) -> str:
    return " ".join(f"w{n}" for n in numbers)


def ids(*numbers: int) -> list[int]:
    return [VOCAB[f"w{n}"] for n in numbers]


ROWS = [{"text": words(i, i + 1, i + 2)} for i in range(20)]
EXPECTED = sorted(ids(i, i + 1, i + 2) for i in range(20))


def spec_of(path: Path | str, **options: Any) -> DataSpec:
    return DataSpec(str(path), **options)


def error(function: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(DataError) as caught:
        function(*args)
    return str(caught.value)


def both_errors(spec: DataSpec, tokenizer: Any) -> str:
    """The check before the model loads must find what the read finds, in the same words."""
    checked = error(check_source, spec)
    assert error(load_samples, spec, tokenizer) == checked
    return checked


# ------------------------------------------------------------------------------- local sources


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.txt", "a.csv", "A.JSONL"])
def test_every_kind_of_file(name: str, write: Write, tokenizer: Any, no_network: list[Any]) -> None:
    path = write(name.lower(), ROWS)
    path = path.rename(path.parent / name)
    spec = spec_of(path)
    check_source(spec)
    assert sorted(load_samples(spec, tokenizer)) == EXPECTED
    assert no_network == []


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".txt", ".csv"])
def test_folder_of_one_kind(suffix: str, write: Write, tokenizer: Any) -> None:
    for part in range(4):
        write(f"parts/{part}{suffix}", ROWS[5 * part : 5 * part + 5])
    write("parts/.hidden.pdf", raw=b"x")
    write("parts/LICENSE", raw=b"x")
    spec = spec_of(path := write("parts/notes.md", raw=b"w1 w2 w3").parent)
    check_source(spec)
    assert sorted(load_samples(spec, tokenizer)) == EXPECTED
    files = describe(spec)["files"]
    assert [Path(f["path"]).name for f in files] == [f"{part}{suffix}" for part in range(4)]
    assert describe(spec)["name"] == str(path)


def test_json_and_jsonl_are_one_kind(write: Write, tokenizer: Any) -> None:
    write("parts/a.json", ROWS[:10])
    folder = write("parts/b.jsonl", ROWS[10:]).parent
    assert sorted(load_samples(spec_of(folder), tokenizer)) == EXPECTED


def test_names_that_are_glob_patterns(write: Write, tokenizer: Any) -> None:
    write("1.jsonl", [{"text": words(9, 9)}])
    path = write("[1]*?.jsonl", ROWS)
    assert sorted(load_samples(spec_of(path), tokenizer)) == EXPECTED


def test_byte_order_mark_and_crlf(write: Write, tokenizer: Any) -> None:
    for name in ("a.txt", "a.csv", "a.jsonl"):
        body = {".txt": "w1 w2\r\nw3 w4\r\n", ".csv": "text\r\nw1 w2\r\nw3 w4\r\n"}.get(
            Path(name).suffix, '{"text": "w1 w2"}\r\n{"text": "w3 w4"}\r\n'
        )
        path = write(name, raw=b"\xef\xbb\xbf" + body.encode())
        assert sorted(load_samples(spec_of(path), tokenizer)) == [ids(1, 2), ids(3, 4)], name


def test_relative_and_home_paths(
    write: Write, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write("a.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in ("a.jsonl", "./a.jsonl", "~/a.jsonl"):
        spec = DataSpec(source)
        assert sorted(load_samples(spec, tokenizer)) == EXPECTED
        assert describe(spec)["name"] == str(tmp_path / "a.jsonl")


def test_existing_folder_wins_over_hub_id(
    write: Write, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write("org/name/a.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    spec = DataSpec("org/name")
    assert sorted(load_samples(spec, tokenizer)) == EXPECTED
    assert describe(spec)["kind"] == "local"


def test_changed_contents_are_read_anew(write: Write, tokenizer: Any) -> None:
    """Same size and same time stamp: caches that look at these alone would miss the change."""
    path = write("a.jsonl", [{"text": words(1, 2)}])
    times = path.stat()
    spec = spec_of(path)
    assert load_samples(spec, tokenizer) == [ids(1, 2)]
    before = describe(spec)
    path.write_text(json.dumps({"text": words(3, 4)}) + "\n")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert describe(spec) == before
    assert load_samples(spec, tokenizer) == [ids(3, 4)]
    assert describe(spec)["files"][0]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert describe(spec)["files"] != before["files"]


def test_nothing_stays_in_a_cache(
    write: Write, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache, scratch = tmp_path / "cache", tmp_path / "scratch"
    cache.mkdir()
    scratch.mkdir()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    spec = spec_of(write("a.jsonl", ROWS))
    check_source(spec)
    load_samples(spec, tokenizer)
    assert list(cache.iterdir()) == []
    assert list(scratch.iterdir()) == []


def test_settings_of_datasets_are_restored(write: Write, tokenizer: Any) -> None:
    before = (datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled())
    load_samples(spec_of(write("a.jsonl", ROWS)), tokenizer)
    assert (datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()) == before


# ------------------------------------------------------------------------------------- example


def test_example(tokenizer: Any, monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    write("calibration.jsonl", [{"text": words(1, 2)}])
    folder = write("heldout.jsonl", [{"text": words(3, 4)}]).parent
    monkeypatch.setattr(data, "EXAMPLE_DIR", folder)
    for source, want in (
        ("example", ids(1, 2)),
        ("example:calibration", ids(1, 2)),
        ("example:heldout", ids(3, 4)),
    ):
        check_source(DataSpec(source))
        assert load_samples(DataSpec(source), tokenizer) == [want]
        assert describe(DataSpec(source))["kind"] == "example"


def test_example_missing_or_misspelt(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(data, "EXAMPLE_DIR", tmp_path / "examples")
    assert "source checkout" in both_errors(DataSpec("example"), tokenizer)
    message = both_errors(DataSpec("example:held-out"), tokenizer)
    assert "'example:heldout'" in message


def test_shipped_example_is_found() -> None:
    """The path into the checkout is right (skipped where only the package is installed)."""
    if not (Path(data.__file__).parents[1] / "examples").is_dir():
        pytest.skip("no source checkout")
    check_source(DataSpec("example"))
    check_source(DataSpec("example:heldout"))
    first, second = describe(DataSpec("example")), describe(DataSpec("example:heldout"))
    assert first["columns"] == ["text"]
    assert first["files"][0]["sha256"] != second["files"][0]["sha256"]


# ----------------------------------------------------------------------- order, length, packing


def test_samples_depend_on_seed_and_contents_only(write: Write, tokenizer: Any) -> None:
    spec = spec_of(write("a.jsonl", ROWS), num_samples=7)
    first = load_samples(spec, tokenizer)
    assert len(first) == 7
    assert load_samples(spec, tokenizer) == first
    assert load_samples(spec_of(write("b.parquet", ROWS), num_samples=7), tokenizer) == first
    assert load_samples(replace(spec, seed=1), tokenizer) != first
    everything = load_samples(replace(spec, num_samples=20), tokenizer)
    assert everything[:7] == first
    assert everything != [ids(i, i + 1, i + 2) for i in range(20)]


def test_truncation(write: Write, tokenizer: Any) -> None:
    path = write("a.jsonl", [{"text": words(*range(50))}, {"text": words(1, 2, 3)}])
    samples = load_samples(spec_of(path, seq_len=8), tokenizer)
    assert sorted(samples) == sorted([ids(*range(8)), ids(1, 2, 3)])


def test_dropped_rows_are_counted(
    write: Write, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"text": words(1, 2)},
        {"text": ""},
        {"text": " \n\t"},
        {"text": None},
        {"text": "<eos> <pad> <eos>"},
        {"text": words(3)},
        {"text": words(4, 5)},
    ]
    spec = spec_of(write("a.jsonl", rows), num_samples=5)
    with caplog.at_level(logging.WARNING, logger="mla_quant"):
        samples = load_samples(spec, tokenizer)
    assert sorted(samples) == [ids(1, 2), ids(4, 5)]
    record = describe(spec)
    assert record["rows_total"] == record["rows_read"] == 7
    assert record["rows_dropped"] == 5
    assert record["drop_reasons"] == {
        "empty text": 3,
        "fewer than 2 tokens": 1,
        "only special tokens": 1,
    }
    assert (record["samples"], record["tokens"]) == (2, 4)
    assert "2 of the 5 requested samples" in caplog.text
    assert "empty text (3)" in caplog.text


def test_enough_samples_warn_of_nothing(
    write: Write, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="mla_quant"):
        load_samples(spec_of(write("a.jsonl", ROWS), num_samples=20), tokenizer)
    assert caplog.records == []


def test_first_token_of_the_tokenizer_counts(write: Write) -> None:
    """A begin-of-sequence token makes a one-word row predictable, but not an empty one."""
    path = write("a.jsonl", [{"text": words(7)}, {"text": ""}, {"text": "<eos>"}])
    assert load_samples(spec_of(path), build_tokenizer(bos=True)) == [[BOS, *ids(7)]]


def test_huge_num_samples(write: Write, tokenizer: Any) -> None:
    samples = load_samples(spec_of(write("a.jsonl", ROWS), num_samples=10**15), tokenizer)
    assert sorted(samples) == EXPECTED


def test_pack(write: Write, tokenizer: Any) -> None:
    """Documents of 3, 4 and 3 tokens: joined by two separators, cut at 4, remainder dropped."""
    rows = [{"text": t} for t in (words(1, 2, 3), "", words(4, 5, 6, 7), words(8, 9, 10))]
    path = write("a.jsonl", rows)
    stream = [*ids(1, 2, 3), EOS, *ids(4, 5, 6, 7), EOS, *ids(8, 9, 10)]
    for size in (2, 3, 4, 5, 6, 7, 11):
        windows = load_samples(spec_of(path, seq_len=size, pack=True), tokenizer)
        full = len(stream) // size
        assert windows == [stream[size * i : size * (i + 1)] for i in range(full)], size
    spec = spec_of(path, seq_len=4, pack=True, num_samples=1)
    assert load_samples(spec, tokenizer) == [stream[:4]]
    assert (describe(spec)["rows_read"], describe(spec)["rows_total"]) == (3, 4)


def test_pack_separator_at_a_window_border(write: Write, tokenizer: Any) -> None:
    """The separator survives where a document ends exactly with a window."""
    path = write("a.jsonl", [{"text": words(1, 2)}, {"text": words(3, 4, 5)}])
    windows = load_samples(spec_of(path, seq_len=2, pack=True), tokenizer)
    assert windows == [ids(1, 2), [EOS, *ids(3)], ids(4, 5)]


def test_pack_does_not_double_the_separator(write: Write, tokenizer: Any) -> None:
    path = write("a.jsonl", [{"text": words(1, 2) + " <eos>"}, {"text": words(3, 4)}])
    stream = [*ids(1, 2), EOS, *ids(3, 4)]
    assert load_samples(spec_of(path, seq_len=5, pack=True), tokenizer) == [stream]
    # also where the cut falls right after it
    assert load_samples(spec_of(path, seq_len=3, pack=True), tokenizer) == [stream[:3]]
    path = write("b.jsonl", [{"text": words(1, 2) + " <eos>"}, {"text": words(3, 4, 5)}])
    windows = load_samples(spec_of(path, seq_len=3, pack=True), tokenizer)
    assert windows == [[*ids(1, 2), EOS], ids(3, 4, 5)]


def test_pack_keeps_the_only_window(write: Write, tokenizer: Any) -> None:
    path = write("a.jsonl", [{"text": words(1, 2, 3)}])
    assert load_samples(spec_of(path, seq_len=100, pack=True), tokenizer) == [ids(1, 2, 3)]


def test_pack_reads_a_text_file_as_one_document(write: Write, tokenizer: Any) -> None:
    path = write("a.txt", raw=b"w1 w2\n\nw3 w4\nw5 w6\n")
    assert load_samples(spec_of(path, seq_len=6, pack=True), tokenizer) == [ids(*range(1, 7))]
    assert len(load_samples(spec_of(path, seq_len=6), tokenizer)) == 3


def test_pack_without_separator_token(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    path = write("a.jsonl", [{"text": words(1, 2)}, {"text": words(3, 4)}])
    with caplog.at_level(logging.WARNING, logger="mla_quant"):
        windows = load_samples(spec_of(path, seq_len=4, pack=True), tokenizer)
    assert windows == [ids(1, 2, 3, 4)]
    assert "no end-of-sequence token" in caplog.text


# ------------------------------------------------------------------------------------- columns


@pytest.mark.parametrize("name", ["text", "content", "prompt", "Text"])
def test_text_column_is_found(name: str, write: Write, tokenizer: Any) -> None:
    spec = spec_of(write("a.jsonl", [{"id": 3, name: words(1, 2)}]))
    assert load_samples(spec, tokenizer) == [ids(1, 2)]
    assert describe(spec)["columns"] == [name]


def test_named_column(write: Write, tokenizer: Any) -> None:
    path = write("a.csv", [{"text": words(1, 2), "summary": words(3, 4)}])
    assert load_samples(spec_of(path, text_column="summary"), tokenizer) == [ids(3, 4)]


def test_ambiguous_column(write: Write, tokenizer: Any) -> None:
    path = write("a.jsonl", [{"text": "w1 w2", "content": "w1 w2", "id": 1}])
    message = both_errors(spec_of(path), tokenizer)
    assert "'text', 'content'" in message and "text_column" in message


def test_no_known_column(write: Write, tokenizer: Any) -> None:
    message = both_errors(spec_of(write("a.jsonl", [{"sentence": "w1", "n": 1}])), tokenizer)
    assert "'sentence', 'n'" in message and "text_column" in message


def test_misspelt_column(write: Write, tokenizer: Any) -> None:
    path = write("a.jsonl", [{"sentence": "w1 w2", "n": 1}])
    message = both_errors(spec_of(path, text_column="sentense"), tokenizer)
    assert "Did you mean 'sentence'" in message and "'n'" in message


def test_column_that_holds_no_text(write: Write, tokenizer: Any) -> None:
    spec = spec_of(write("a.jsonl", [{"text": 3}, {"text": 4}]))
    assert "holds int" in error(check_source, spec)
    assert "holds int" in error(load_samples, spec, tokenizer)


def test_a_number_among_texts(write: Write, tokenizer: Any) -> None:
    path = write("a.jsonl", [{"text": words(1, 2)}, {"text": ["x"]}])
    message = error(load_samples, spec_of(path), tokenizer)
    assert "row 2" in message and "'text'" in message


def test_prompt_and_response(write: Write, tokenizer: Any) -> None:
    path = write("a.jsonl", [{"prompt": words(1, 2), "response": words(3, 4)}])
    assert load_samples(spec_of(path), tokenizer) == [ids(1, 2, 3, 4)]
    user, assistant = VOCAB["<user>"], VOCAB["<assistant>"]
    want = [[user, *ids(1, 2), assistant, *ids(3, 4)]]
    assert load_samples(spec_of(path, chat=True), tokenizer) == want
    assert load_samples(spec_of(path, text_column="prompt"), tokenizer) == [ids(1, 2)]
    turns = {
        "prompt": [{"role": "user", "content": words(1, 2)}],
        "completion": [{"role": "assistant", "content": words(3, 4)}],
    }
    assert load_samples(spec_of(write("b.jsonl", [turns])), tokenizer) == want


# ---------------------------------------------------------------------------------------- chat

CHAT = [
    {"role": "user", "content": words(1, 2)},
    {"role": "assistant", "content": words(3, 4)},
]
CHAT_IDS = [VOCAB["<user>"], *ids(1, 2), VOCAB["<assistant>"], *ids(3, 4)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_chat_messages(name: str, write: Write, tokenizer: Any) -> None:
    spec = spec_of(write(name, [{"messages": CHAT, "id": 1}]))
    check_source(spec)
    assert load_samples(spec, tokenizer) == [CHAT_IDS]
    assert describe(spec)["chat"] is True


def test_chat_of_speakers(write: Write, tokenizer: Any) -> None:
    rows = [
        {"conversations": [{"from": "human", "value": "w1 w2"}, {"from": "gpt", "value": "w3"}]}
    ]
    want = [[VOCAB["<user>"], *ids(1, 2), VOCAB["<assistant>"], *ids(3)]]
    assert load_samples(spec_of(write("a.jsonl", rows)), tokenizer) == want


def test_chat_or_text_of_the_same_rows(write: Write, tokenizer: Any) -> None:
    path = write("a.jsonl", [{"messages": CHAT, "text": words(8, 9)}])
    assert load_samples(spec_of(path), tokenizer) == [CHAT_IDS]
    assert load_samples(spec_of(path, chat=False), tokenizer) == [ids(8, 9)]
    assert load_samples(spec_of(path, text_column="text"), tokenizer) == [ids(8, 9)]


def test_chat_in_a_named_column(write: Write, tokenizer: Any) -> None:
    path = write("a.jsonl", [{"dialog": CHAT}])
    assert load_samples(spec_of(path, text_column="dialog"), tokenizer) == [CHAT_IDS]
    message = error(load_samples, spec_of(path, text_column="dialog", chat=False), tokenizer)
    assert "turned off" in message


@pytest.mark.parametrize(
    "shape",
    [
        lambda ids: ids,
        lambda ids: [ids],
        lambda ids: BatchEncoding({"input_ids": ids}),
        lambda ids: BatchEncoding({"input_ids": [ids]}),
        lambda ids: BatchEncoding({"input_ids": torch.tensor([ids])}),
        lambda ids: torch.tensor([ids]),
    ],
)
def test_what_a_chat_template_may_return(shape: Any, write: Write) -> None:
    tokenizer = build_tokenizer()
    tokenizer.apply_chat_template = lambda *args, **kwargs: shape(CHAT_IDS)
    samples = load_samples(spec_of(write("a.jsonl", [{"messages": CHAT}])), tokenizer)
    assert samples == [CHAT_IDS]
    assert all(type(i) is int for i in samples[0])


def test_no_chat_template(write: Write) -> None:
    spec = spec_of(write("a.jsonl", [{"messages": CHAT}]))
    message = error(load_samples, spec, build_tokenizer(template=None))
    assert "no chat template" in message and "text_column" in message


def test_rows_that_the_template_refuses(
    write: Write, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bad = [{"role": "tool", "content": "w1"}]
    spec = spec_of(write("a.jsonl", [{"messages": CHAT}, {"messages": bad}, {"messages": []}]))
    with caplog.at_level(logging.WARNING, logger="mla_quant"):
        assert load_samples(spec, tokenizer) == [CHAT_IDS]
    assert describe(spec)["drop_reasons"] == {
        "empty text": 1,
        "refused by the chat template": 1,
    }
    assert "bad role" in caplog.text
    message = error(load_samples, spec_of(write("b.jsonl", [{"messages": bad}])), tokenizer)
    assert "refused by the chat template (1)" in message and "bad role" in message


def test_missing_keys_do_not_reach_the_template(write: Write) -> None:
    """Columns give each message the keys of all; a template must not see those that are None."""
    tokenizer = build_tokenizer(
        template="{% for m in messages %}{{ m['content'] }}{% if 'name' in m %} w9{% endif %}"
        " {% endfor %}"
    )
    named = [{"role": "user", "content": words(5, 6), "name": "x"}]
    path = write("a.parquet", [{"messages": CHAT}, {"messages": named}])
    assert sorted(load_samples(spec_of(path), tokenizer)) == [ids(1, 2, 3, 4), ids(5, 6, 9)]


def test_messages_of_another_shape(write: Write, tokenizer: Any) -> None:
    message = both_errors(spec_of(write("a.jsonl", [{"messages": [{"who": "x"}]}])), tokenizer)
    assert "'who'" in message and "'role'" in message
    message = both_errors(spec_of(write("b.jsonl", [{"messages": ["hello"]}])), tokenizer)
    assert "list of str" in message
    message = both_errors(spec_of(write("c.jsonl", [{"messages": "hello"}]), chat=True), tokenizer)
    assert "holds text, not chat messages" in message


def test_chat_demanded_of_plain_text(write: Write, tokenizer: Any) -> None:
    message = both_errors(spec_of(write("a.jsonl", ROWS), chat=True), tokenizer)
    assert "no column of chat messages" in message and "'text'" in message


# ------------------------------------------------------------------------------ unusable files


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.txt", "a.csv"])
def test_empty_file(name: str, write: Write, tokenizer: Any) -> None:
    message = both_errors(spec_of(write(name, raw=b"")), tokenizer)
    assert name in message and "0 bytes" in message


@pytest.mark.parametrize(
    ("name", "raw"),
    [("a.jsonl", b"\n \n"), ("a.json", b"[]"), ("a.csv", b"text,n\n"), ("a.parquet", None)],
)
def test_no_rows(name: str, raw: bytes | None, write: Write, tokenizer: Any) -> None:
    path = write(name, {"text": pd.Series([], dtype=str)}, raw=raw)
    assert "holds no rows" in both_errors(spec_of(path), tokenizer)


def test_all_rows_filtered(write: Write, tokenizer: Any) -> None:
    spec = spec_of(write("a.jsonl", [{"text": ""}, {"text": None}, {"text": "  "}]))
    message = both_errors(spec, tokenizer)
    assert "all 3 rows were dropped: empty text (3)" in message
    spec = spec_of(write("b.jsonl", [{"text": "w1"}, {"text": "<eos> <eos>"}]))
    check_source(spec)  # only the tokenizer can tell
    message = error(load_samples, spec, tokenizer)
    assert "all 2 rows" in message and "fewer than 2 tokens (1), only special tokens (1)" in message


GOOD = b'{"text": "w1 w2"}\n'


@pytest.mark.parametrize(
    ("name", "raw", "parts"),
    [
        ("a.jsonl", GOOD + b'{"text": "w3"\n' + GOOD, ["line 2", "not valid JSON"]),
        ("a.jsonl", GOOD + GOOD + b'{"text": "w3', ["line 3", "not valid JSON"]),
        ("a.jsonl", GOOD + b"plain words\n", ["line 2", "not valid JSON"]),
        ("a.jsonl", b'"w1 w2"\n"w3 w4"\n', ["line 1", "str", "not an object"]),
        ("a.json", b'[\n{"text": "w1 w2"},\n{"text": }\n]', ["line 3", "not valid JSON"]),
        ("a.json", GOOD + b'{"text" "w3"}\n', ["line 2", "not valid JSON"]),
        ("a.jsonl", b'{"text": "\xff"}\n' + GOOD, ["line 1", "0xff", "UTF-8"]),
        ("a.json", b'[{"text": "w1"},\n{"text": "\xe9t\xe9"}]', ["line 2", "0xe9", "UTF-8"]),
        ("a.txt", b"w1 w2\n\xff\xfe\n", ["line 2", "byte 1", "0xff", "UTF-8"]),
        ("a.csv", b"text\nw1 w2\nw3 \xe9\n", ["line 3", "byte 4", "0xe9", "UTF-8"]),
        ("a.csv", b"text,n\nw1,1\nw1,2,3\n", ["a.csv", "line 3"]),
        ("a.csv", b"text,n\nw1,2,3\nw1,2,3\n", ["a.csv", "more fields than the header"]),
        ("a.parquet", b"PK\x03\x04 not parquet at all", ["a.parquet", "PK", "PAR1"]),
        ("a.parquet", b"PAR1 no footer PAR1", ["a.parquet", "cannot be read as parquet"]),
    ],
)
def test_unreadable_file(
    name: str, raw: bytes, parts: list[str], write: Write, tokenizer: Any
) -> None:
    message = both_errors(spec_of(write(name, raw=raw)), tokenizer)
    assert name in message
    for part in parts:
        assert part in message, message


def test_truncated_parquet(write: Write, tokenizer: Any) -> None:
    path = write("a.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:-100])
    assert "not a complete parquet file" in both_errors(spec_of(path), tokenizer)


@pytest.mark.parametrize("fault", [b'{"text": oops}\n', b'{"text": "\xff"}\n'])
def test_fault_after_the_first_rows(fault: bytes, write: Write, tokenizer: Any) -> None:
    """The check reads no further than it must; the read names the line all the same."""
    row = json.dumps({"text": words(1, 2) + " " * 20_000}).encode() + b"\n"
    spec = spec_of(write("a.jsonl", raw=row * 600 + fault), num_samples=1000)
    check_source(spec)
    message = error(load_samples, spec, tokenizer)
    assert "line 601" in message


def test_parts_without_rows(write: Write, tokenizer: Any) -> None:
    write("parts/0.parquet", {"text": pd.Series([], dtype=str)})
    folder = write("parts/1.parquet", ROWS).parent
    check_source(spec_of(folder))
    assert sorted(load_samples(spec_of(folder), tokenizer)) == EXPECTED


def test_bad_file_of_a_folder_is_named(write: Write, tokenizer: Any) -> None:
    write("parts/a.jsonl", ROWS)
    folder = write("parts/b.jsonl", raw=GOOD + b"{\n").parent
    message = error(load_samples, spec_of(folder), tokenizer)
    assert "b.jsonl" in message and "line 2" in message


def test_unknown_suffix(write: Write, tokenizer: Any) -> None:
    message = both_errors(spec_of(write("a.md", raw=b"w1 w2")), tokenizer)
    for part in ("'.md'", ".jsonl", ".json", ".parquet", ".txt", ".csv"):
        assert part in message


def test_folder_without_data(write: Write, tokenizer: Any) -> None:
    folder = write("parts/a.md", raw=b"w1").parent
    write("parts/below/a.jsonl", ROWS)
    message = both_errors(spec_of(folder), tokenizer)
    assert "a.md" in message and "below/" in message and ".parquet" in message


def test_empty_folder(tmp_path: Path, tokenizer: Any) -> None:
    assert "found: nothing" in both_errors(spec_of(tmp_path), tokenizer)


def test_folder_of_several_kinds(write: Write, tokenizer: Any) -> None:
    write("parts/a.jsonl", ROWS)
    message = both_errors(spec_of(write("parts/b.txt", ROWS).parent), tokenizer)
    assert ".jsonl (1), .txt (1)" in message


def test_empty_parts_of_a_folder(
    write: Write, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write("parts/a.jsonl", raw=b"").parent
    assert "are empty" in both_errors(spec_of(folder), tokenizer)
    write("parts/b.jsonl", ROWS)
    with caplog.at_level(logging.WARNING, logger="mla_quant"):
        assert sorted(load_samples(spec_of(folder), tokenizer)) == EXPECTED
    assert "a.jsonl is empty and skipped" in caplog.text


def test_folder_of_save_to_disk(tmp_path: Path, tokenizer: Any) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert "save_to_disk" in both_errors(spec_of(tmp_path / "saved"), tokenizer)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_neither_file_nor_folder(tmp_path: Path, tokenizer: Any) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    assert "neither a file nor a folder" in both_errors(spec_of(tmp_path / "a.jsonl"), tokenizer)


def refuse_permission(*args: Any, **kwargs: Any) -> Any:
    raise PermissionError(13, "Permission denied")


def test_no_permission(write: Write, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By substitution, since the superuser may read everything."""
    path = write("parts/a.jsonl", ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", refuse_permission)
        message = both_errors(spec_of(path.parent), tokenizer)
        assert "cannot be listed" in message and "Permission denied" in message
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse_permission)
        message = both_errors(spec_of(path), tokenizer)
        assert "cannot be read" in message and "Permission denied" in message
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", refuse_permission)
        assert "no permission" in both_errors(spec_of(path), tokenizer)


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may read everything"
)
def test_no_permission_on_disk(write: Write, tokenizer: Any) -> None:
    path = write("parts/a.jsonl", ROWS)
    try:
        path.chmod(0)
        assert "Permission denied" in both_errors(spec_of(path), tokenizer)
        path.parent.chmod(0)
        assert "Permission denied" in both_errors(spec_of(path.parent), tokenizer)
        assert "no permission" in both_errors(spec_of(path), tokenizer)
    finally:
        path.parent.chmod(0o700)
        path.chmod(0o600)


def test_local_sources_have_no_splits(write: Write, tokenizer: Any) -> None:
    message = both_errors(spec_of(write("a.jsonl", ROWS), split="test"), tokenizer)
    assert "'test'" in message and "no splits" in message


# ------------------------------------------------------------------------- misspelt local paths


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a path was sent to the hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    "source",
    [
        "calibration.json",
        "calibraton.jsonl",
        "./calibraton",
        "/nowhere/at/all",
        "~/nowhere_at_all",
        "parts/calibraton",
        "org/name/extra",
        "nosuchfolder/text.jsonl",
        "nosuchfolder/text.jsnol",
        "text.foo",
        "org/model.safetensors",
        "folder/",
        "a\\b",
        "org/name\0.jsonl",
        "x" * 300 + ".jsonl",
    ],
)
def test_misspelt_path(
    source: str,
    write: Write,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    no_network: list[Any],
) -> None:
    path = write("calibration.jsonl", ROWS)
    write("parts/calibration.csv", ROWS)
    monkeypatch.chdir(path.parent)
    message = both_errors(DataSpec(source), tokenizer)
    assert "does not exist" in message and "the hub was not asked" in message
    assert no_network == []
    if "calibrat" in source:
        folder = "parts/" if source.startswith("parts/") else ""
        assert f"Did you mean '{folder}calibration." in message


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("source", ["wikitext", "org/na me", "org/name:", ":x", "a b", "-/x"])
def test_neither_path_nor_hub_id(source: str, tokenizer: Any) -> None:
    assert "neither a local file or folder nor a hub id" in both_errors(DataSpec(source), tokenizer)


@pytest.mark.usefixtures("no_hub")
def test_word_close_to_a_local_name(
    write: Write, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write("calibration/a.jsonl", ROWS).parent.parent)
    assert "Did you mean 'calibration'" in both_errors(DataSpec("calibraton"), tokenizer)


@pytest.mark.usefixtures("no_hub")
def test_missing_folder_is_named(write: Write, tokenizer: Any) -> None:
    root = write("texts/a.jsonl", ROWS).parent.parent
    message = both_errors(spec_of(root / "text" / "a.jsonl"), tokenizer)
    assert f"there is no {str(root / 'text')!r}" in message
    assert f"Did you mean {str(root / 'texts')!r}" in message


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("source", ["https://host/a.jsonl", "hf://datasets/org/name", "s3://b/a"])
def test_url(source: str, tokenizer: Any) -> None:
    assert "is a URL" in both_errors(DataSpec(source), tokenizer)


# ----------------------------------------------------------------------------------------- hub


class Hub:
    """Stands in for ``datasets.load_dataset`` and keeps the arguments it was called with."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, path: str, name: Any = None, *, split: Any, streaming: bool) -> Any:
        self.calls.append((path, name, split, streaming))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Hub]:
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)

    def hub(answer: Any) -> Hub:
        stand_in = Hub(answer)
        monkeypatch.setattr(datasets, "load_dataset", stand_in)
        return stand_in

    return hub


def stream(rows: list[dict[str, Any]]) -> Any:
    return datasets.Dataset.from_list(rows).to_iterable_dataset()


@pytest.mark.parametrize("source", ["org/name", "org/name-v1.5", "org/name.en", "org/n:cfg-v1.0"])
def test_hub(source: str, hub: Any, tokenizer: Any) -> None:
    calls = hub(datasets.IterableDatasetDict({"train": stream(ROWS)})).calls
    spec = DataSpec(source)
    check_source(spec)
    first = load_samples(spec, tokenizer)
    assert sorted(first) == EXPECTED
    assert load_samples(spec, tokenizer) == first
    assert load_samples(replace(spec, seed=1), tokenizer) != first
    name, _, config = source.partition(":")
    assert set(calls) == {(name, config or None, None, True)}
    record = describe(spec)
    assert (record["kind"], record["name"], record["split"]) == ("hub", name, "train")
    assert (record["config"], record["files"], record["rows_read"]) == (config or None, [], 20)


def test_hub_packed(hub: Any, tokenizer: Any) -> None:
    hub(stream(ROWS[:2]))
    spec = DataSpec("org/name", split="test", pack=True, seq_len=7)
    assert load_samples(spec, tokenizer) == [[*ids(0, 1, 2), EOS, *ids(1, 2, 3)]]


def test_hub_splits(hub: Any, tokenizer: Any) -> None:
    parts = {"validation": stream(ROWS), "test": stream(ROWS)}
    hub(datasets.IterableDatasetDict(parts))
    message = both_errors(DataSpec("org/name"), tokenizer)
    assert "'validation', 'test'" in message and "split" in message
    hub(datasets.IterableDatasetDict({"validation": stream(ROWS)}))
    load_samples(DataSpec("org/name"), tokenizer)
    assert describe(DataSpec("org/name"))["split"] == "validation"
    calls = hub(datasets.Dataset.from_list(ROWS)).calls
    load_samples(DataSpec("org/name", split="train[:50%]"), tokenizer)
    assert calls == [("org/name", None, "train[:50%]", False)]


def test_hub_columns_of_a_stream_without_schema(hub: Any, tokenizer: Any) -> None:
    hub(datasets.IterableDataset.from_generator(lambda: iter(ROWS)))
    assert sorted(load_samples(DataSpec("org/name"), tokenizer)) == EXPECTED
    hub(datasets.IterableDataset.from_generator(lambda: iter([])))
    assert "holds no rows" in both_errors(DataSpec("org/name"), tokenizer)


def test_describe_of_the_hub_before_reading(hub: Any) -> None:
    calls = hub(RuntimeError("must not be called")).calls
    record = describe(DataSpec("org/never-read"))
    assert calls == []
    assert record["kind"] == "hub" and record["rows_read"] is None


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://host/x"))


def caused_by(outer: Exception, cause: Exception) -> Exception:
    outer.__cause__ = cause
    return outer


NOT_FOUND = datasets.exceptions.DatasetNotFoundError
HUB_ERRORS = [
    ("gated", hub_errors.GatedRepoError("x", response=response(403))),
    ("gated", NOT_FOUND("Dataset 'org/name' is a gated dataset on the Hub. Visit ...")),
    (
        "gated",
        caused_by(NOT_FOUND("no access"), hub_errors.GatedRepoError("x", response=response(401))),
    ),
    ("missing", hub_errors.RepositoryNotFoundError("x", response=response(404))),
    ("missing", NOT_FOUND("Dataset 'org/name' doesn't exist on the Hub or cannot be accessed.")),
    ("offline", hub_errors.OfflineModeIsEnabled("x")),
    (
        "offline",
        caused_by(ConnectionError("Couldn't reach"), hub_errors.OfflineModeIsEnabled("x")),
    ),
    ("unreachable", ConnectionError("Couldn't reach 'org/name' on the Hub (ConnectError)")),
    ("unreachable", httpx.ConnectError("x")),
    ("unreachable", httpx.ReadTimeout("x")),
    ("unreachable", hub_errors.LocalEntryNotFoundError("x")),
    ("disabled", hub_errors.DisabledRepoError("x", response=response(403))),
    ("server", hub_errors.HfHubHTTPError("503 Server Error", response=response(503))),
    ("no files", datasets.exceptions.DataFilesNotFoundError("No (supported) data files found")),
    ("value", ValueError("BuilderConfig 'x' not found. Available: ['a', 'b']")),
    ("other", RuntimeError("Dataset scripts are no longer supported, but found name.py")),
]
SAYS = {
    "gated": ["is gated", "hf auth login", "accept", "huggingface.co/datasets/org/name"],
    "missing": ["was not found on the hub", "misspelt", "private"],
    "offline": ["HF_HUB_OFFLINE", "local cache"],
    "unreachable": ["cannot be reached", "network"],
    "disabled": ["disabled"],
    "server": ["answered with an error", "503"],
    "no files": ["no data files"],
    "value": ["cannot be opened", "Available: ['a', 'b']", "org/name:config"],
    "other": ["cannot be read", "scripts are no longer supported"],
}


@pytest.mark.parametrize(("kind", "exc"), HUB_ERRORS)
def test_hub_errors_are_told_apart(kind: str, exc: Exception, hub: Any, tokenizer: Any) -> None:
    hub(exc)
    message = both_errors(DataSpec("org/name"), tokenizer)
    assert "'org/name'" in message
    for other, parts in SAYS.items():
        assert (parts[0] in message) == (other == kind), message
    for part in SAYS[kind]:
        assert part in message, message


@pytest.mark.parametrize(
    ("status", "kind"), [(401, "gated"), (404, "missing"), (None, "unreachable"), (0, "offline")]
)
def test_hub_errors_as_datasets_raises_them(
    status: int | None, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: Any
) -> None:
    """Through the real ``load_dataset``, which hides causes and looks into its cache first."""
    import huggingface_hub

    def download(*args: Any, **kwargs: Any) -> Any:
        if status == 0:
            raise AssertionError("the hub was asked in offline mode")
        if status is None:
            raise httpx.ConnectError("no route to host")
        if kind == "gated":
            raise hub_errors.GatedRepoError("x", response=response(401))
        raise hub_errors.RepositoryNotFoundError("x", response=response(401))

    monkeypatch.setattr(huggingface_hub.HfApi, "hf_hub_download", download)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", status == 0)
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", status == 0)
    message = both_errors(DataSpec("org/name"), tokenizer)
    for part in SAYS[kind]:
        assert part in message, message


def test_offline_reads_the_cache(hub: Any, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    """Streams never come from the cache, so that offline mode must not ask for one."""
    calls = hub(datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})).calls
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    assert sorted(load_samples(DataSpec("org/name"), tokenizer)) == EXPECTED
    assert calls == [("org/name", None, None, False)]


def test_connection_lost_while_reading(hub: Any, tokenizer: Any) -> None:
    def rows() -> Any:
        yield {"text": words(1, 2)}
        raise httpx.ReadError("connection reset")

    features = datasets.Features({"text": datasets.Value("string")})
    hub(datasets.IterableDataset.from_generator(rows, features=features))
    message = error(load_samples, DataSpec("org/name"), tokenizer)
    assert "cannot be reached" in message


# --------------------------------------------------------------------------- arguments, batches


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_samples", 0),
        ("num_samples", -1),
        ("num_samples", 1.5),
        ("num_samples", True),
        ("seq_len", 0),
        ("seq_len", 1),
        ("seq_len", -3),
        ("seed", -1),
    ],
)
def test_bad_numbers(name: str, value: Any, write: Write, tokenizer: Any) -> None:
    spec = replace(spec_of(write("a.jsonl", ROWS)), **{name: value})
    message = both_errors(spec, tokenizer)
    assert message.startswith(f"{name} is {value!r}")
    assert error(describe, spec) == message


@pytest.mark.parametrize("source", ["", "  ", None])
def test_no_source(source: Any, tokenizer: Any) -> None:
    assert "hub id" in both_errors(DataSpec(source), tokenizer)


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches(side: str) -> None:
    samples = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11]]
    batches = make_batches(samples, 2, pad_token_id=0, padding_side=side)
    assert [tuple(b.input_ids.shape) for b in batches] == [(2, 3), (2, 4), (1, 1)]
    rows = []
    for batch in batches:
        assert isinstance(batch, TokenBatch)
        assert batch.input_ids.dtype == batch.attention_mask.dtype == torch.int64
        assert batch.input_ids.shape == batch.attention_mask.shape
        assert batch.input_ids[batch.attention_mask == 0].eq(0).all()
        for tokens, mask in zip(batch.input_ids, batch.attention_mask, strict=True):
            rows.append(tokens[mask == 1].tolist())
            kept = mask.tolist()
            assert kept == sorted(kept, reverse=side == "right")
    assert rows == samples


def test_padding_id_that_occurs_in_the_text() -> None:
    (batch,) = make_batches([[2, 2], [2, 5, 2]], 2, pad_token_id=2)
    assert batch.attention_mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.input_ids.tolist() == [[2, 2, 2], [2, 5, 2]]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (([[1]], 0, 0), "batch_size is 0"),
        (([[1]], -2, 0), "batch_size is -2"),
        (([[1]], 1, -1), "pad_token_id is -1"),
        (([[1]], 1, None), "pad_token_id is None"),
        (([[1]], 1, 0, "middle"), "padding_side is 'middle'"),
        (([], 1, 0), "no samples"),
        (([[1], []], 1, 0), "Sample 1"),
    ],
)
def test_bad_batch_arguments(arguments: tuple[Any, ...], part: str) -> None:
    assert part in error(make_batches, *arguments)


def test_descriptions_are_json(write: Write, tokenizer: Any) -> None:
    path = write("a.jsonl", ROWS)
    spec = spec_of(path, num_samples=4)
    before = describe(spec)
    assert before["rows_read"] is None and before["columns"] == ["text"]
    load_samples(spec, tokenizer)
    after = describe(spec)
    assert json.loads(json.dumps(after)) == after
    assert after.keys() == before.keys()
    assert after["files"] == [
        {
            "path": str(path),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "size_bytes": path.stat().st_size,
        }
    ]
    assert (after["rows_total"], after["rows_read"], after["samples"]) == (20, 4, 4)
    after["files"].clear()
    assert describe(spec)["files"] != []
