"""The stage `tokenize`: every kept document's ids, once, at the offsets in the
tables.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, normalizers

from gristmill.dataprep.conservation import QuarantineError
from gristmill.dataprep.documents import Inputs
from gristmill.dataprep.runners.tasks import Task
from gristmill.dataprep.text.kernels import text_buffers
from gristmill.tokenize.encoding import encode
from gristmill.tokenize.encoding.token_report import GroupTokens
from gristmill.tokenize.encoding.tokenizer import TextTokenizer, load

SHARDS = ("part-00000", "part-00001")


@pytest.fixture
def inputs(stages: Any) -> Inputs:
    documents = [
        *stages.documents("prose", 30),
        *stages.documents("code", 20),
        ("code", "code/20", ""),
    ]
    inputs = {"ingest": stages.ingest("ingest", documents, 2)}
    inputs["filter"] = stages.annotate(
        "filter",
        inputs["ingest"],
        lambda table: {
            "keep": [
                not locator.endswith("7") for locator in table["locator"].to_pylist()
            ]
        },
    )
    stages.tokenizer("tokenizer", inputs, ["prose", "code"])
    return {**inputs, "tokenizer": stages.root / "tokenizer"}


def change_tokenizer(
    stages: Any, inputs: Inputs, change: Callable[[Tokenizer], object]
) -> Path:
    """Commit a changed copy of the tokenizer and return its folder."""
    tokenizer = Tokenizer.from_file(str(inputs["tokenizer"] / "tokenizer.json"))
    change(tokenizer)
    path = stages.root / "changed.json"
    tokenizer.save(str(path))
    stages.tokenizer("changed", {}, [], path=str(path))
    return stages.root / "changed"


def normalize(normalizer: normalizers.Normalizer) -> Callable[[Tokenizer], object]:
    return lambda tokenizer: setattr(tokenizer, "normalizer", normalizer)


def encoded(
    folder: Path, shard: str = "part-00000"
) -> list[tuple[dict[str, Any], list[int]]]:
    """Documents of a shard, and the tokens at their offsets."""
    tokens = np.fromfile(folder / f"{shard}.tokens.bin", "<u2")
    return [
        (doc, tokens[doc["offset"] : doc["offset"] + doc["tokens"]].tolist())
        for doc in pq.read_table(folder / f"{shard}.docs.parquet").to_pylist()
    ]


def test_lossy_tokenizer_is_warned_about(stages: Any, inputs: Inputs) -> None:
    assert stages.tokenize("out", inputs).changed_documents == 0
    lower = change_tokenizer(stages, inputs, normalize(normalizers.Lowercase()))
    loud = stages.ingest(
        "loud",
        [("prose", "a", "GRIST and mill"), ("prose", "b", "mill"), ("prose", "c", "")],
    )
    summary = stages.tokenize("lower", {"ingest": loud, "tokenizer": lower})
    assert (summary.decoded_documents, summary.changed_documents) == (3, 1)
    assert "1 of 3 documents" in stages.warnings("lower")[0]


def test_decoding_check_is_bounded(inputs: Inputs) -> None:
    tokenizer = load(inputs["tokenizer"])
    texts = ["ab " * 3000, "cd " * 3000, "ef " * 3000]
    data, offsets = text_buffers(pa.array(texts, pa.large_string()))
    ids, lengths, _ = encode.encode_batch(tokenizer, data, offsets)
    assert encode.decode_some(tokenizer, data, offsets, ids, lengths) == (2, 0)
    ids[0], ids[lengths[0] + lengths[1]] = ids[1], ids[1]
    assert encode.decode_some(tokenizer, data, offsets, ids, lengths) == (2, 1)


def test_documents_that_gigatoken_splits_differently_are_encoded_by_the_library(
    stages: Any, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U+088F is a letter since Unicode 17: gigatoken takes it to the word before, the
    library does not.
    """
    texts = [
        "plain words",
        "a word\u088fs grist",
        "",
        "mill " * 40,
        "the\u088f end\u088f",
    ]
    ingest = stages.ingest(
        "ingest-new",
        [("prose", str(number), text) for number, text in enumerate(texts)],
    )
    tokenizer = load(inputs["tokenizer"])
    expected = [encoding.ids for encoding in tokenizer.encode(texts)]

    by_library, library_texts = encode.FastEncoder.encode_with_library, list[str]()
    monkeypatch.setattr(
        encode.FastEncoder,
        "encode_with_library",
        lambda self, texts_: (library_texts.extend(texts_), by_library(self, texts_))[
            1
        ],
    )
    for batch_bytes in (encode.BATCH_BYTES, 1):
        monkeypatch.setattr(encode, "BATCH_BYTES", batch_bytes)
        library_texts.clear()
        out = f"out-{batch_bytes}"
        stages.tokenize(out, {"ingest": ingest, "tokenizer": inputs["tokenizer"]})
        assert [ids for _, ids in encoded(stages.root / out)] == expected
        assert [text for text in library_texts if text in texts[:2] + texts[3:]] == [
            texts[1],
            texts[4],
        ]


def test_full_disk_fails_the_shard(
    stages: Any, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are flushed while their tables are made."""
    sync = os.fsync

    def full(descriptor: int) -> None:
        if ".tokens.bin" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "no space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        encode.encode_shard(
            Task("part-00000", {"shard": "part-00000.parquet"}),
            inputs,
            stages.root / "full",
        )
    assert not [
        path.name
        for path in (stages.root / "full").iterdir()
        if "tokens.bin" in path.name
    ]


def test_ids_of_each_kept_document_are_at_its_offset(
    stages: Any, inputs: Inputs
) -> None:
    summary = stages.tokenize("out", inputs)
    tokenizer, total = load(inputs["tokenizer"]), 0
    for shard in SHARDS:
        documents = pq.read_table(inputs["ingest"] / f"{shard}.parquet")
        encoded_documents = encoded(stages.root / "out", shard)
        kept = [
            row
            for row, locator in enumerate(documents["locator"].to_pylist())
            if not locator.endswith("7")
        ]
        assert [doc["row"] for doc, _ in encoded_documents] == kept
        place = 0
        for doc, ids in encoded_documents:
            text = documents["text"][doc["row"]].as_py()
            assert doc["offset"] == place
            place += len(ids)
            assert tokenizer.decode(ids) == text
            assert ids == tokenizer.encode([text])[0].ids
            assert (doc["bytes"], doc["id"]) == (
                len(text.encode()),
                documents["id"][doc["row"]].as_py(),
            )
            assert doc["source"] == documents["source"][doc["row"]].as_py()
            assert tokenizer.eos not in ids
        path = stages.root / "out" / f"{shard}.tokens.bin"
        assert path.stat().st_size == 2 * place
        total += place
    assert summary.tokens == total == sum(summary.tokens_per_source.values())
    assert (summary.counts["read"], summary.counts["kept"], summary.dtype) == (
        51 - 5,
        51 - 5,
        "uint16",
    )
    assert summary.counts["sources"]["code"]["kept"] == 21 - 2


def test_workers_and_batches_do_not_change_the_bytes(
    stages: Any, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages.tokenize("one", inputs)
    stages.tokenize("two", inputs, workers=2)
    monkeypatch.setattr(encode, "BATCH_BYTES", 700)
    monkeypatch.setattr(encode, "PART_BYTES", 1500)
    stages.tokenize("small", inputs)
    assert stages.files("one") == stages.files("two") == stages.files("small")


def test_batches_cover_all_documents_within_the_byte_limit() -> None:
    slices = list(encode.batches(np.array([4, 6, 1, 30, 0, 9, 2]), 10))
    assert [(part.start, part.stop) for part in slices] == [
        (0, 2),
        (2, 3),
        (3, 4),
        (4, 6),
        (6, 7),
    ]


class Picky:
    """A tokenizer that cannot take texts that end in 3."""

    def __init__(self, inner: TextTokenizer) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, texts: list[str]) -> Any:
        if any(text.endswith(" 3.\n") for text in texts):
            raise OverflowError("too odd")
        return self._inner.encode(texts)


def test_failing_document_is_quarantined_alone(
    stages: Any, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "_encoder", lambda tokenizer: "of a test")
    monkeypatch.setattr(encode, "_load_once", lambda folder: Picky(load(Path(folder))))
    counts = stages.tokenize("out", inputs).counts
    assert (counts["quarantined"], counts["kept"]) == (2, 51 - 5 - 2)
    quarantined = [
        row
        for path in (stages.root / "out").glob("*.quarantine.parquet")
        for row in pq.read_table(path).to_pylist()
    ]
    assert sorted(row["file"] for row in quarantined) == ["code/3", "prose/3"]
    assert {row["error"] for row in quarantined} == {"OverflowError: too odd"}
    monkeypatch.undo()
    stages.tokenize("whole", inputs)
    for shard in SHARDS:
        whole = {doc["id"]: ids for doc, ids in encoded(stages.root / "whole", shard)}
        for doc, ids in encoded(stages.root / "out", shard):
            assert ids == whole[doc["id"]]


def test_too_many_failures_fail_the_stage(
    stages: Any, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: TextTokenizer, texts: list[str]) -> Any:
        raise OverflowError("always")

    monkeypatch.setattr(encode, "_encoder", lambda tokenizer: "of a test")
    monkeypatch.setattr(TextTokenizer, "encode", broken)
    with pytest.raises(QuarantineError, match="46 of 46 records"):
        stages.tokenize("out", inputs)


@pytest.mark.slow
def test_large_vocabulary_is_written_as_uint32(stages: Any, inputs: Inputs) -> None:
    """70,000 words as added tokens push the vocabulary over 65,536."""
    words = [f"word{number}" for number in range(70_000)]
    large = change_tokenizer(
        stages, inputs, lambda tokenizer: tokenizer.add_tokens(words)
    )
    ingest = {"ingest": stages.ingest("few", [("prose", "a", "word1 word69999")])}
    summary = stages.tokenize("out", {**ingest, "tokenizer": large})
    assert summary.dtype == "uint32"
    tokens = np.fromfile(stages.root / "out" / "part-00000.tokens.bin", "<u4")
    assert load(large).decode(tokens.tolist()) == "word1 word69999"
    assert tokens.max() > 65_536


def test_resumed_attempt_writes_the_same_bytes(stages: Any, inputs: Inputs) -> None:
    stages.tokenize("out", inputs)
    before = stages.files("out")
    (stages.root / "out" / "part-00001.docs.parquet").unlink()
    (stages.root / "out.work" / "encode" / "part-00000.json").unlink()
    stages.tokenize("out", inputs)
    assert stages.files("out") == before


def test_report_counts_tokens_per_source_and_language(
    stages: Any, inputs: Inputs
) -> None:
    langid = stages.annotate(
        "langid",
        inputs["ingest"],
        lambda table: {
            "language": [
                None if locator.endswith("5") else locator.split("/")[0][:2]
                for locator in table["locator"].to_pylist()
            ]
        },
    )
    summary = stages.tokenize("out", {**inputs, "langid": langid})
    tokenizer, texts = load(inputs["tokenizer"]), {}
    for shard in SHARDS:
        for row in pq.read_table(inputs["ingest"] / f"{shard}.parquet").to_pylist():
            if not row["locator"].endswith("7"):
                texts[row["locator"]] = row["text"]
    ids = {name: tokenizer.encode([text])[0].ids for name, text in texts.items()}

    def expected(names: list[str]) -> GroupTokens:
        counted = {
            "documents": len(names),
            "tokens": sum(len(ids[name]) for name in names),
            "bytes": sum(len(texts[name].encode()) for name in names),
            "characters": sum(len(texts[name]) for name in names),
            "words": sum(len(texts[name].split()) for name in names),
        }
        return GroupTokens(
            **counted,
            bytes_per_token=round(counted["bytes"] / counted["tokens"], 4),
            characters_per_token=round(counted["characters"] / counted["tokens"], 4),
            tokens_per_word=round(counted["tokens"] / counted["words"], 4),
        )

    assert summary.sources == {
        source: expected([name for name in texts if name.startswith(source)])
        for source in ("code", "prose")
    }
    assert summary.languages == {
        "co": expected([name for name in texts if name[0] == "c" and name[-1] != "5"]),
        "pr": expected([name for name in texts if name[0] == "p" and name[-1] != "5"]),
        "unknown": expected([name for name in texts if name[-1] == "5"]),
    }
    assert summary.encoder == "gigatoken"
    report = json.loads((stages.root / "out" / "report.json").read_text())
    assert report == {
        name: asdict(summary)[name] for name in ("sources", "languages", "encoder")
    }


def test_summary_names_the_reason_for_encoding_by_the_library(
    stages: Any, inputs: Inputs
) -> None:
    nfkc = change_tokenizer(stages, inputs, normalize(normalizers.NFKC()))
    summary = stages.tokenize("out", {**inputs, "tokenizer": nfkc})
    assert re.search("tokenizers library.*normalizer is NFKC", summary.encoder)
    assert summary.sources == stages.tokenize("whole", inputs).sources
