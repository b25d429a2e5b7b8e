"""Shuffles through files and through Beam's own shuffle give the same bytes, as do jobs
in the stage's process.

Beam's local runner, in memory, stands for a cluster.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.decontamination import decontaminate
from gristmill.dataprep.dedup import dedup
from gristmill.dataprep.dedup import exact_substring as dedup_substrings
from gristmill.dataprep.dedup import lines as dedup_lines
from gristmill.dataprep.readers import ingest
from gristmill.dataprep.runners import shuffle, tasks
from gristmill.mixtures.schema.engine import BeamEngine
from gristmill.tokenize import text_index
from gristmill.tokenize.encoding import encode, tokenizer, vocabulary_sample
from gristmill.tokenize.mixing import mix, streams

pytestmark = pytest.mark.slow
WORDS = "the of and mill grinds grain into flour Wasser mühle 粉 挽く \N{GRINNING FACE} naïve e\u0301 вода".split()
FOOTER = "All rights reserved by the owners of this page, wherever it is read."
CLUSTER = {"runner": "FnApiRunner", "options": {"direct_running_mode": "in_memory"}}
ENGINE = {**CLUSTER, "shuffle": "engine"}


def write_corpus(folder: Path, kind: str) -> None:
    """Write two sources of some files: duplicate records, near-duplicates, repeated
    lines and passages, a leak.
    """
    draw = random.Random(kind)
    texts = [" ".join(draw.choices(WORDS, k=draw.randrange(30, 90))) for _ in range(60)]
    passage = " ".join(draw.choices(WORDS, k=70))
    texts[3] += f"\n{passage}"
    texts[40] = f"{passage} {texts[40]}"
    texts += [f"{text} mill" for text in texts[:6]] + texts[10:14]
    texts[20] += (
        "\nWhich of the rivers turns the heaviest of all the mills in the land of Oz "
        "today?"
    )
    texts = [f"{text}\n{FOOTER}" for text in texts]
    if kind == "one cluster":
        texts = (
            texts[:40]
            + [texts[0]] * 40
            + [f"{texts[0]} {number}" for number in range(40)]
        )
    folder.mkdir()
    for number in range(6):
        lines = [
            json.dumps({"text": text, "key": text[:40]}) for text in texts[number::6]
        ]
        (folder / f"{'ab'[number % 2]}-{number}.jsonl").write_text(
            "\n".join(lines) + "\n"
        )
    (folder / "questions.jsonl").write_text(
        json.dumps(
            {
                "question": "Which of the rivers turns the heaviest of all the mills "
                "in the land of Oz today?"
            }
        )
        + "\n"
    )


def run_all(
    corpus: Path, folder: Path, **engine: Any
) -> tuple[dict[str, str], dict[str, Any]]:
    """Run every stage that shuffles, and return the SHA-256 of each output file and the
    summaries.
    """
    sources = {
        name: {"path": str(corpus / f"{name}-*.jsonl"), "id_field": "key"}
        for name in "ab"
    }
    chosen = {
        name: {
            "weight": 1.0,
            "max_epochs": 5,
            "where": None,
            "epochs": None,
        }
        for name in "ab"
    }
    steps: list[tuple[str, Any, Mapping[str, Any]]] = [
        ("ingest", ingest, {"sources": sources, "ingest": {"shard_bytes": 3000}}),
        ("dedup", dedup, {"index": True}),
        ("dedup_lines", dedup_lines, {}),
        ("dedup_substrings", dedup_substrings, {"min_words": 20, "certain_words": 30}),
        (
            "decontaminate",
            decontaminate,
            {"against": [str(corpus / "questions.jsonl")], "ngram": 5},
        ),
        (
            "tokenizer",
            tokenizer,
            {
                "tokenizer": {"vocab_size": 300, "sample_bytes": 6000},
                "sources": ["a", "b"],
                "seed": 1,
            },
        ),
        ("tokenize", encode, {}),
        (
            "mix",
            mix,
            {
                "mix": {
                    "tokens": 6400,
                    "sequence_length": 32,
                    "shard_rows": 60,
                    "validation": 0.1,
                },
                "sources": chosen,
                "seed": 3,
            },
        ),
        ("text_index", text_index, {"shortest_span": 8}),
    ]
    inputs: dict[str, Path] = {}
    summaries = {}
    for name, module, config in steps:
        context = Context(
            folder / "work" / name,
            name,
            BeamEngine(**{"workers": 1, **engine}),
            emit=lambda event: None,
        )
        context.work.mkdir(parents=True)
        while name not in summaries:
            try:
                summaries[name] = module.run(
                    dict(inputs), config, folder / name, context
                )
            except InterruptedError:
                continue
        inputs[name] = folder / name
    files = [
        path for out in inputs.values() for path in out.rglob("*") if path.is_file()
    ]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }, summaries


@pytest.mark.parametrize(
    ("kind", "small"),
    [
        ("of all kinds", False),
        ("of all kinds", True),
        ("one cluster", True),
        ("one cluster", False),
    ],
    ids=[
        "partitions mostly empty",
        "many small partitions",
        "small and skewed partitions",
        "skewed partitions",
    ],
)
def test_shuffling_stages_give_the_same_bytes_in_both_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, small: bool
) -> None:
    """Small partitions of several batches each; or those that so little data has: one
    of them, or eight.
    """
    if small:
        for module, name, value in (
            (streams, "PARTITION_BYTES", 500),
            (vocabulary_sample, "PARTITION_BYTES", 500),
            (shuffle, "BATCH_BYTES", 200),
        ):
            monkeypatch.setattr(module, name, value)
    write_corpus(tmp_path / "corpus", kind)
    files, summaries = run_all(tmp_path / "corpus", tmp_path / "files", workers=2)
    described = {name: asdict(summary) for name, summary in summaries.items()}
    assert described["ingest"]["counts"]["dropped"]
    assert described["dedup"]["counts"]["dropped"]
    if kind == "of all kinds":
        assert described["dedup_lines"]["units"]["removed"]
        assert described["dedup_substrings"]["words_cut"]
        assert described["decontaminate"]["matches"]
    assert run_all(tmp_path / "corpus", tmp_path / "cluster", **CLUSTER) == (
        files,
        summaries,
    )
    monkeypatch.setattr(tasks, "FEW_DOCUMENTS", 0)
    monkeypatch.setattr(vocabulary_sample, "LITTLE_TEXT", 0)
    by_engine = run_all(tmp_path / "corpus", tmp_path / "engine", **ENGINE)
    assert by_engine == (files, summaries)
    arrived = {
        path.name.removesuffix("-arrived")
        for path in (tmp_path / "engine" / "work").rglob("*-arrived")
    }
    assert {
        "keys",
        "pairs",
        "matches",
        "forest",
        "labels",
        "members",
        "decisions",
        "twins",
        "units",
        "replies",
        "anchors",
        "windows",
        "repeated_anchors",
        "repeated_windows",
        "counts",
        "draw",
        "texts",
        "entries",
        "ledger",
        "place",
        "grams",
    } <= arrived


@pytest.mark.parametrize("form", ["files", "engine"])
def test_repeatedly_interrupted_stages_end_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Every seventh file that takes part in a shuffle is the last one of its
    attempt.
    """
    write_corpus(tmp_path / "corpus", "of all kinds")
    expected = run_all(tmp_path / "corpus", tmp_path / "expected", workers=1)
    if form == "engine":
        monkeypatch.setattr(tasks, "FEW_DOCUMENTS", 0)
    name = {"files": "write_batches", "engine": "atomic_write"}[form]
    original, written = getattr(shuffle, name), list[Path]()

    def interrupt(path: Path, *rows: Any) -> Any:
        if form == "engine" and path.suffix != ".arrow":
            return original(path)
        written.append(path)
        if len(written) % 7 == 0:
            raise InterruptedError("for the test")
        return original(path, *rows)

    monkeypatch.setattr(shuffle, name, interrupt)
    assert (
        run_all(
            tmp_path / "corpus",
            tmp_path / "interrupted",
            **(ENGINE if form == "engine" else {}),
        )
        == expected
    )
    completed = [path for number, path in enumerate(written, start=1) if number % 7]
    assert len(completed) == len(set(completed))  # no file was written twice
    assert len(written) > 70
