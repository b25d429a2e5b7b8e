"""Reading a shard opens every table of the chain once; a stage that reads a shard
repeatedly merges them first.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.dataprep import documents
from gristmill.dataprep.annotate_batches import merge_annotations
from gristmill.dataprep.cleaning import clean
from gristmill.dataprep.decontamination import decontaminate
from gristmill.dataprep.dedup import dedup
from gristmill.dataprep.dedup import exact_substring as dedup_substrings
from gristmill.dataprep.dedup import lines as dedup_lines
from gristmill.dataprep.documents import (
    MERGED,
    MisalignedError,
    Remarks,
    annotate,
    combine_annotations,
    kept_rows,
    read_documents,
    read_shard,
    read_table,
    write_table,
)
from gristmill.dataprep.edits import EDITS, BadEditError, edits_array
from gristmill.dataprep.filters import filter as filtering
from gristmill.dataprep.quality import quality
from gristmill.dataprep.row_groups import ahead, read_document_rows, read_texts
from tests.dataprep.document_shards import MakeContext, WriteIngest

SHARD = "part-00000.parquet"
STEPS = (
    "filter",
    "clean",
    "langid",
    "dedup_lines",
    "decontaminate",
    "dedup_substrings",
    "dedup",
    "filter-2",
)
WORDS = "the river of a winter and evening in every old garden was that with letters have to be machine".split()


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words)).capitalize() + "."


def add_stage(
    inputs: dict[str, Path],
    stage: str,
    columns: Mapping[str, pa.Array],
    rows: np.ndarray | None = None,
    reasons: Remarks | None = None,
) -> None:
    """Write a stage's annotations of the shard; all its rows are kept by default."""
    table = read_table(inputs["ingest"] / SHARD)
    rows = np.arange(len(table)) if rows is None else rows
    inputs[stage] = inputs["ingest"].with_name(stage)
    annotations, _ = annotate(table, rows, rows, reasons or [None] * len(rows), columns)
    write_table(inputs[stage] / SHARD, annotations)


@contextmanager
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count the Parquet files that are opened meanwhile, by the name of their
    folder.
    """
    counts: Counter[str] = Counter()
    open_parquet = documents.open_parquet

    def count(path: Path) -> Any:
        counts[path.parent.name] += 1
        return open_parquet(path)

    with monkeypatch.context() as patched:
        patched.setattr(documents, "open_parquet", count)
        yield counts


def edited(rng: random.Random, text: bytes) -> tuple[list[tuple[int, int, str]], bytes]:
    """Random edits of an ASCII text, and the edited text."""
    places = sorted(
        rng.sample(range(len(text) + 1), min(2 * rng.randint(0, 3), len(text) // 2 * 2))
    )
    edits = [
        (begin, end, rng.choice(["", "x", "new words"]))
        for begin, end in zip(places[::2], places[1::2], strict=True)
    ]
    for begin, end, new in reversed(edits):
        text = text[:begin] + new.encode() + text[end:]
    return edits, text


@pytest.mark.parametrize("seed", range(5))
def test_shard_is_read_with_the_edits_and_drops_of_every_stage(
    seed: int, write_ingest: WriteIngest, make_context: MakeContext
) -> None:
    rng = random.Random(seed)
    texts = [sentence(rng, rng.randint(1, 9)).encode() for _ in range(12)]
    inputs = {
        "ingest": write_ingest(
            "ingest",
            [[("web", str(row), text.decode()) for row, text in enumerate(texts)]],
        )
    }
    rows = np.arange(len(texts))
    for stage in STEPS:
        table = read_table(inputs["ingest"] / SHARD)
        kept = np.array([row for row in rows.tolist() if rng.random() < 0.9], np.int64)
        edits_and_texts = [edited(rng, texts[row]) for row in rows.tolist()]
        for row, (_, text) in zip(rows.tolist(), edits_and_texts, strict=True):
            texts[row] = text
        edits = (
            {"edits": edits_array([text_edits for text_edits, _ in edits_and_texts])}
            if rng.random() < 0.6
            else {}
        )
        if not edits:
            texts = [
                text.encode()
                for text in read_documents(inputs, SHARD, ["text"])["text"].to_pylist()
            ]
        reasons = [None if row in kept else "gone" for row in rows.tolist()]
        add_stage(inputs, stage, edits, rows, reasons)
        rows = kept
        for read in (inputs, merge_annotations(inputs, make_context(f"work-{stage}"))):
            shard = read_shard(read, SHARD, ["text", "id"])
            assert shard.documents["text"].to_pylist() == [
                text.decode() for text in texts
            ], seed
            assert shard.documents["id"].equals(table["id"])
            assert (
                shard.rows.tolist() == kept_rows(read, SHARD).tolist() == kept.tolist()
            )
            sampled_rows = rng.choices(range(len(texts)), k=4)
            sampled_documents = read_document_rows(
                read, SHARD, sampled_rows, ["text", "id"]
            )
            assert sampled_documents.equals(shard.documents.take(sampled_rows)), seed
            annotations = combine_annotations(read, SHARD, table["id"], [EDITS])
            parts = [*ahead(read_texts(read, SHARD, annotations, rng.randint(1, 400)))]
            assert pa.concat_arrays(parts).to_pylist() == [
                text.decode() for text in (texts[row] for row in kept)
            ], seed


def test_each_table_of_a_chain_or_the_merged_one_is_opened_once(
    write_ingest: WriteIngest,
    make_context: MakeContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = {
        "ingest": write_ingest(
            "ingest", [[("web", "a", "one two"), ("web", "b", "three")]]
        )
    }
    for stage in STEPS:
        edits = edits_array([[(0, 0, "a ")], []])
        add_stage(inputs, stage, {"edits": edits, stage: pa.array([1, 2])})
    with opened(monkeypatch) as counts:
        shard = read_shard(inputs, SHARD, ["text", *STEPS])
    assert shard.documents["text"].to_pylist() == [
        "a " * len(STEPS) + "one two",
        "three",
    ]
    assert all(shard.documents[stage].to_pylist() == [1, 2] for stage in STEPS)
    assert counts == dict.fromkeys(("ingest", *STEPS), 1)
    with opened(monkeypatch) as counts:
        merged = merge_annotations(inputs, make_context("work"))
    assert counts == dict.fromkeys(("ingest", *STEPS), 1)
    with opened(monkeypatch) as counts:
        assert read_shard(merged, SHARD, ["text"]).documents.equals(
            shard.documents.select(["text"])
        )
    assert counts == {"ingest": 1, MERGED: 1}


def test_misaligned_table_and_overlapping_edits_are_errors(
    write_ingest: WriteIngest, make_context: MakeContext
) -> None:
    inputs = {
        "ingest": write_ingest("ingest", [[("web", "a", "one"), ("web", "b", "two")]])
    }
    for stage in ("clean", "filter"):
        add_stage(inputs, stage, {"edits": edits_array([[(0, 1, "")], [(1, 2, "")]])})
    annotations = read_table(inputs["clean"] / SHARD)
    write_table(inputs["clean"] / SHARD, annotations.take([1, 0]))
    for read in (
        lambda: read_shard(inputs, SHARD),
        lambda: merge_annotations(inputs, make_context("work")),
        lambda: read_document_rows(inputs, SHARD, [1]),
    ):
        with pytest.raises(MisalignedError, match="gristmill stage clean"):
            read()
    overlapping = edits_array([[], [(0, 2, ""), (1, 3, "")]])
    add_stage(inputs, "clean", {"edits": overlapping})
    with pytest.raises(BadEditError, match="document 1 of 2"):
        read_shard(inputs, SHARD)


@pytest.mark.slow
def test_stages_open_each_earlier_table_once_per_shard(
    tmp_path: Path,
    write_ingest: WriteIngest,
    make_context: MakeContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight steps over two shards, some of which pass over a shard several times."""
    rng = random.Random(7)
    repeated = [sentence(rng, 12) for _ in range(4)]
    shards = [
        [
            (
                source,
                f"{shard}/{number}",
                "\n".join(
                    [
                        sentence(rng, 14),
                        f"Mail me at a{number}@example.org now.",
                        rng.choice(repeated),
                        sentence(rng, 11),
                    ]
                ),
            )
            for number, source in enumerate(["good", "bad"] * 10)
        ]
        for shard in range(2)
    ]
    inputs = {"ingest": write_ingest("ingest", shards)}
    against = tmp_path / "eval.jsonl"
    against.write_text("".join(f'{{"question": "{text}"}}\n' for text in repeated[:2]))
    classes = {
        "positive": ["good"],
        "negative": ["bad"],
        "epochs": 1,
        "max_documents": 5,
    }
    steps: list[tuple[str, Callable[..., dict[str, Any]], dict[str, Any]]] = [
        ("clean", clean.run, {"mask": {}}),
        (
            "filter",
            filtering.run,
            {"rules": {"fineweb": {"max_repeated_line_char_ratio": 1.0}}},
        ),
        ("dedup_lines", dedup_lines.run, {}),
        (
            "decontaminate",
            decontaminate.run,
            {
                "against": [{"path": str(against)}],
                "ngram": 5,
                "min_words": 5,
                "action": "excise",
                "min_left_words": 0,
                "margin_characters": 0,
            },
        ),
        (
            "dedup_substrings",
            dedup_substrings.run,
            {"min_words": 8, "certain_words": 12},
        ),
        ("dedup", dedup.run, {}),
        ("quality", quality.run, {"classifier": classes, "seed": 1}),
    ]
    for name, run, config in steps:
        (tmp_path / name).mkdir()
        with opened(monkeypatch) as counts:
            run(
                inputs,
                config,
                tmp_path / name,
                make_context(f"work-{name}", mode="memory"),
            )
        before = {stage: counts[stage] for stage in inputs if stage != "ingest"}
        assert set(before.values()) <= {2}, (name, before)  # once for each shard
        inputs[name] = tmp_path / name
    last = read_shard(inputs, SHARD)
    assert len(last.rows)
    assert pq.read_table(inputs["quality"] / SHARD)["quality"].null_count < 20


def test_exactly_one_item_is_prepared_ahead() -> None:
    produced = threading.Semaphore(0)

    def items() -> Iterator[int]:
        for number in range(4):
            produced.release()
            yield number
        raise BadEditError("after the last item")

    items_ahead = ahead(items())
    # none before the first is requested
    assert produced.acquire(blocking=False) is False
    for number in range(4):
        assert next(items_ahead) == number
        assert produced.acquire(timeout=60)
        if number < 3:
            assert produced.acquire(timeout=60)  # the next one
            assert not produced.acquire(blocking=False)
            produced.release()
    with pytest.raises(BadEditError, match="after the last item"):
        next(items_ahead)


def test_closing_early_ends_the_thread() -> None:
    before = threading.active_count()
    with closing(ahead(itertools.count())) as numbers:
        assert next(numbers) == 0
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
