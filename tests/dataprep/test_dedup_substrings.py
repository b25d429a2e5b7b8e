"""The stage `dedup_substrings`: repeated passages are found, and the first copy
stays.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import check_conservation
from gristmill.dataprep.dedup import exact_substring as dedup_substrings
from gristmill.dataprep.dedup.ngram_windows import find_anchors, find_windows, near
from gristmill.dataprep.dedup.repeated_spans import Spans
from gristmill.dataprep.documents import document_id, write_table
from gristmill.dataprep.shuffle_format import open_batches
from gristmill.mixtures.steps.dedup import DedupSubstrings
from tests.dataprep.document_shards import (
    Document,
    jobs_in_this_process,
    rewrite_texts,
    rows_by_id,
    texts_by_locator,
    write_shards,
)


def prose(seed: int, words: int = 150) -> str:
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(5000)}" for _ in range(words))


@pytest.fixture
def run(run_stage: Callable) -> Callable:
    """Run the stage: (name, shards, settings, **settings of BeamEngine) -> inputs with
    its output, summary.
    """
    return partial(run_stage, dedup_substrings, "dedup_substrings")


def run_in_this_process(
    folder: Path, shards: Sequence[Sequence[Document]], config: dict[str, Any]
) -> dict[str, Path]:
    """Run the stage with two partitions, without Beam."""
    ingest = write_shards(folder / "ingest", shards)
    context = Context(
        work=folder / "work", stage="dedup_substrings", emit=lambda event: None
    )
    with jobs_in_this_process(dedup_substrings), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dedup_substrings, "count_partitions", lambda size: 2)
        summary = dedup_substrings.run(
            {"ingest": ingest}, config, folder / "out", context
        )
    check_conservation(summary.counts, "dedup_substrings")
    return {"ingest": ingest, "dedup_substrings": folder / "out"}


def spans(text: str) -> list[tuple[int, int]]:
    """Byte ranges of the words of a text of letters, digits and separators."""
    words, at, inside = [], 0, False
    for char in text:
        size = len(char.encode())
        if char.isalnum() and inside:
            words[-1] = (words[-1][0], at + size)
        elif char.isalnum():
            words.append((at, at + size))
        inside, at = char.isalnum(), at + size
    return words


Places = dict[bytes, list[tuple[bytes, int, int]]]


def windows_in_plain_python(documents: Sequence[Document], length: int) -> Places:
    """Map of each repeated window to its (document id, begin, first word), the first
    copy first.
    """
    places: Places = defaultdict(list)
    for document in documents:
        data, words = document[2].encode(), spans(document[2])
        for at in range(len(words) - length + 1):
            begin, end = words[at][0], words[at + length - 1][1]
            places[data[begin:end]].append((document_id(*document), begin, at))
    return {
        window: sorted(copies) for window, copies in places.items() if len(copies) > 1
    }


def cut_in_plain_python(
    documents: Sequence[Document], length: int
) -> dict[bytes, set[int]]:
    """Map of each document id to the words that are cut if every repeated window is
    known.
    """
    copied, kept = defaultdict(set), defaultdict(set)
    for first, *later_copies in windows_in_plain_python(documents, length).values():
        kept[first[0]].update(range(first[2], first[2] + length))
        for identity, _, at in later_copies:
            copied[identity].update(range(at, at + length))
    return {
        document_id(*document): copied[document_id(*document)]
        - kept[document_id(*document)]
        for document in documents
    }


def words_cut(
    rows: dict[bytes, dict[str, Any]], documents: Sequence[Document]
) -> dict[bytes, set[int]]:
    cut = {}
    for document in documents:
        edits = rows[document_id(*document)]["edits"]
        cut[document_id(*document)] = {
            number
            for number, (begin, end) in enumerate(spans(document[2]))
            if any(edit["begin"] <= begin and end <= edit["end"] for edit in edits)
        }
    return cut


CORPORA = st.lists(
    st.lists(st.sampled_from(["a", "b", "é", "cc"]), max_size=16).flatmap(
        lambda words: st.sampled_from([" ", ", "]).map(
            lambda between: between.join(words)
        )
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(texts=CORPORA, length=st.integers(2, 4), shards=st.integers(1, 3))
def test_result_equals_plain_python_if_every_window_is_certain(
    texts: list[str], length: int, shards: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    documents = [("web", str(row), text) for row, text in enumerate(texts)]
    config = {"min_words": length, "certain_words": length}
    cut = [documents[at::shards] for at in range(shards)]
    inputs = run_in_this_process(tmp_path_factory.mktemp("case"), cut, config)
    rows = rows_by_id(inputs["dedup_substrings"])
    expected = cut_in_plain_python(documents, length)
    assert words_cut(rows, documents) == expected
    for document in documents:
        row, total = rows[document_id(*document)], len(spans(document[2]))
        assert row["duplicated_substring_words"] == len(expected[row["id"]])
        assert row["duplicated_substring_ratio"] == (
            len(expected[row["id"]]) / total if total else 0.0
        )
        assert row["keep"] == (row["duplicated_substring_ratio"] < 1.0)
    edited_texts = texts_by_locator(inputs)
    for document in documents:
        words, cut_words = spans(document[2]), expected[document_id(*document)]
        data = document[2].encode()
        kept = [
            data[begin:end].decode()
            for number, (begin, end) in enumerate(words)
            if number not in cut_words
        ]
        assert edited_texts[document[1]].replace(",", "").split() == kept
    for copies_of in windows_in_plain_python(documents, length).values():
        identity, _, at = copies_of[0]
        # the first copy is whole
        assert not expected[identity] & set(range(at, at + length))


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(texts=CORPORA, length=st.integers(2, 3), more=st.integers(1, 4))
def test_certain_passages_are_found_and_only_repeated_words_are_cut(
    texts: list[str], length: int, more: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    documents = [("web", str(row), text) for row, text in enumerate(texts)]
    folder = tmp_path_factory.mktemp("case")
    config = {"min_words": length, "certain_words": length + more}
    inputs = run_in_this_process(folder, [documents[::2], documents[1::2]], config)
    repeated = windows_in_plain_python(documents, length)
    repeated_words = defaultdict(set)
    for places in repeated.values():
        for identity, _, at in places:
            repeated_words[identity].update(range(at, at + length))
    cut = words_cut(rows_by_id(inputs["dedup_substrings"]), documents)
    assert all(cut[identity] <= repeated_words[identity] for identity in cut)
    known_hashes: set[int] = set()
    for path in (folder / "work" / "repeated_windows").glob("*.arrow"):
        known_hashes.update(open_batches(path).read_all()["high"].to_pylist())
    for places in windows_in_plain_python(documents, length + more).values():
        for identity, begin, at in places:
            text = next(
                document[2]
                for document in documents
                if document_id(*document) == identity
            )
            passage = text.encode()[
                begin : spans(text)[at + length + more - 1][1]
            ].decode()
            hashes = find_windows(pa.array([passage], pa.large_string()), length)[
                0
            ].high
            assert len(hashes) == more + 1
            assert set(hashes.tolist()) <= known_hashes


def corpus() -> list[Document]:
    shared, longer = prose(1, 60), prose(2, 90)
    documents = [("web", f"plain{n}", prose(10 + n)) for n in range(4)]
    documents += [
        ("web", f"shared{n}", f"{prose(20 + n)}\n\n{shared}\n\n{prose(30 + n)}")
        for n in range(5)
    ]
    documents += [
        ("books", "long0", f"{prose(40)} {longer} {prose(41)}"),
        ("web", "long1", f"{longer} {prose(42)}"),
    ]
    documents += [
        (
            "web",
            "twice",
            f"{prose(43)} {prose(3, 70)} {prose(44)} {prose(3, 70)} {prose(45)}",
        )
    ]
    documents += [
        ("web", "copy", prose(42)[:200]),
        ("web", "below", prose(10, 49)),
        ("web", "empty", ""),
    ]
    return documents


def test_first_copy_stays_and_later_copies_are_cut(run: Callable) -> None:
    documents = corpus()
    config = {"min_words": 50, "certain_words": 55}
    inputs, summary = run(
        "all",
        [documents[:6], documents[6:]],
        config,
    )
    texts = texts_by_locator(inputs)
    holders = [name for name, text in texts.items() if prose(1, 60) in text]
    first = min(
        (document for document in documents if "shared" in document[1]),
        key=lambda document: document_id(*document),
    )
    assert holders == [first[1]]
    for name in {f"shared{n}" for n in range(5)} - set(holders):
        number = int(name[-1])
        assert texts[name] == f"{prose(20 + number)}\n\n{prose(30 + number)}"
    assert texts["twice"] == f"{prose(43)} {prose(3, 70)} {prose(44)} {prose(45)}"
    assert sum(prose(2, 90) in text for text in texts.values()) == 1
    assert all(
        texts[document[1]] == document[2]
        for document in documents
        if document[1]
        in {"plain0", "plain1", "plain2", "plain3", "copy", "below", "empty"}
    )
    assert [(row["words"], row["copies"]) for row in summary.largest_repeats] == [
        (90, 2),
        (70, 2),
        (60, 5),
    ]
    assert summary.largest_repeats[0]["text"] == prose(2, 90)[:200]
    assert summary.largest_repeats[2]["document"] == document_id(*first).hex()
    assert (summary.spans, summary.words_cut) == (6, 4 * 60 + 90 + 70)
    sizes = sum(len(document[2].encode()) for document in documents)
    assert summary.bytes_cut == sizes - sum(
        len(text.encode()) for text in texts.values()
    )


def test_documents_are_dropped_by_their_duplicated_ratio(run: Callable) -> None:
    documents = corpus()
    config = {
        "action": "drop",
        "max_duplicated_substring_ratio": 0.3,
        "certain_words": 55,
    }
    inputs, summary = run("all", [documents], config)
    rows = rows_by_id(inputs["dedup_substrings"])
    dropped = [
        document for document in documents if not rows[document_id(*document)]["keep"]
    ]
    long_documents = [
        document for document in documents if document[1].startswith("long")
    ]
    long = max(long_documents, key=lambda document: document_id(*document))
    assert dropped == ([long] if long[1] == "long1" else [])
    assert rows[document_id(*long)]["duplicated_substring_words"] == 90
    assert "edits" not in next(iter(rows.values()))
    assert summary.bytes_cut == 0


def test_complete_copy_is_dropped(run: Callable) -> None:
    documents = [
        ("web", "a", prose(1, 60)),
        ("web", "b", prose(1, 60)),
        ("web", "c", f"{prose(2, 9)} {prose(1, 60)}"),
    ]
    inputs, summary = run(
        "all",
        [documents[:1], documents[1:]],
        {"certain_words": 50},
    )
    first = min(documents, key=lambda document: document_id(*document))
    rows = rows_by_id(inputs["dedup_substrings"])
    expected = {
        document_id(*document): document == first or document[1] == "c"
        for document in documents
    }
    assert {identity: row["keep"] for identity, row in rows.items()} == expected
    assert set(summary.counts["dropped"]) == {"dedup_substrings/empty"}


@pytest.mark.slow
def test_shards_partitions_workers_and_order_do_not_change_the_result(
    run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = corpus()
    mixed = random.Random(4).sample(documents, len(documents))
    cut = [mixed[at : at + 3] for at in range(0, len(mixed), 3)]
    first, first_summary = run("one", [documents], {})
    second, second_summary = run("cut", cut, {}, workers=2)
    monkeypatch.setattr(dedup_substrings, "count_partitions", lambda size: 3)
    third, third_summary = run("three", cut, {})
    outs = [rows_by_id(inputs["dedup_substrings"]) for inputs in (first, second, third)]
    assert outs[0] == outs[1] == outs[2]
    # how much is moved depends on the shards, the result does not
    first_summary, second_summary, third_summary = (
        replace(
            summary, windows=replace(summary.windows, anchors_shuffled=0, shuffled=0)
        )
        for summary in (first_summary, second_summary, third_summary)
    )
    assert first_summary == second_summary == third_summary


@pytest.mark.slow
def test_line_repeated_a_hundred_thousand_times_is_shuffled_once_per_shard(
    run: Callable,
) -> None:
    line = prose(1, 10) + "\n"
    documents = [("web", str(row), line * 50) for row in range(2000)]
    inputs, summary = run(
        "all",
        [documents[:1000], documents[1000:]],
        {},
    )
    assert summary.windows.seen == 2000 * (500 - 50 + 1)
    assert summary.windows.anchors_shuffled <= 2 * 10
    # a window can begin with any word of the line
    assert summary.windows.shuffled == 2 * 10
    assert summary.windows.repeated == 10
    assert summary.counts["kept"] == 1
    (kept,) = [
        row for row in rows_by_id(inputs["dedup_substrings"]).values() if row["keep"]
    ]
    # Ten windows, one per first word, are the first copies: 59 words stay.
    assert kept["duplicated_substring_words"] == 500 - 59


def test_windows_that_share_half_of_their_hash_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [("web", str(row), prose(row)) for row in range(4)]

    def colliding(texts: pa.Array, length: int) -> tuple[Spans, np.ndarray]:
        windows, words = find_windows(texts, length)
        return windows._replace(high=windows.high % np.uint64(16)), words

    monkeypatch.setattr(dedup_substrings, "find_windows", colliding)
    inputs = run_in_this_process(
        tmp_path, [documents[:2], documents[2:]], {"certain_words": 50}
    )
    assert texts_by_locator(inputs) == {row: text for _, row, text in documents}


def test_only_kept_documents_of_the_sources_are_compared(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    documents = [
        ("web", "dropped", prose(1)),
        ("web", "kept", prose(1) + " a"),
        ("books", "other", prose(1) + " b"),
        ("web", "second", "c " + prose(1)),
    ]
    ingest = write_ingest("ingest", [documents])
    ids = pq.read_table(ingest / "part-00000.parquet")["id"]
    write_table(
        tmp_path / "langid" / "part-00000.parquet",
        pa.table({"id": ids, "keep": pa.array([False, True, True, True])}),
    )
    inputs = {"ingest": ingest, "langid": tmp_path / "langid"}
    dedup_substrings.run(
        inputs, {"sources": ["web"]}, tmp_path / "out", make_context("work")
    )
    rows = rows_by_id(tmp_path / "out")
    words = [
        rows[document_id(*document)]["duplicated_substring_words"]
        for document in documents
    ]
    assert words[0] is None
    assert words[2] is None
    assert sorted((words[1], words[3])) == [0, 150]


def test_text_that_is_not_utf8_is_quarantined_and_not_compared(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> None:
    ingest = write_ingest(
        "ingest",
        [[("web", "a", prose(1)), ("web", "b", prose(1)), ("web", "c", prose(2))]],
    )
    rewrite_texts(
        ingest / "part-00000.parquet",
        [prose(1).encode() + b" caf\xe9", prose(1).encode(), prose(2).encode()],
    )
    out = tmp_path / "out"
    summary = dedup_substrings.run(
        {"ingest": ingest}, {"max_quarantined": 0.5}, out, make_context("work")
    )
    check_conservation(summary.counts, "dedup_substrings")
    assert (
        summary.counts["quarantined"],
        summary.counts["kept"],
        summary.spans,
    ) == (1, 2, 0)


def test_empty_corpus_is_allowed(make_context: Callable, tmp_path: Path) -> None:
    (tmp_path / "ingest").mkdir()
    summary = dedup_substrings.run(
        {"ingest": tmp_path / "ingest"}, {}, tmp_path / "out", make_context("work")
    )
    assert (summary.counts, summary.largest_repeats) == ({}, [])


def test_contradictory_settings_are_rejected() -> None:
    with pytest.raises(
        ValidationError, match=r"certain_words \(40\) .*min_words \(50\)"
    ):
        DedupSubstrings(certain_words=40)
    with pytest.raises(ValidationError, match=r"max_duplicated_substring_ratio .*1"):
        DedupSubstrings(action="drop")


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=20), min_size=1, max_size=4),
    st.integers(1, 6),
)
def test_anchors_are_the_last_minimum_of_every_row_of_windows(
    texts: list[list[int]], spread: int
) -> None:
    flat = np.array([value for text in texts for value in text], np.uint64)
    offsets = np.cumsum([0, *map(len, texts)])
    expected = set()
    for text, offset in zip(texts, offsets.tolist()):
        for at in range(max(len(text) - spread + 1, min(len(text), 1))):
            row = text[at : at + spread]
            expected.add(
                offset
                + at
                + max(place for place, value in enumerate(row) if value == min(row))
            )
    anchors = find_anchors(flat, offsets, spread)
    assert set(np.flatnonzero(anchors).tolist()) == expected


@settings(deadline=None)
@given(
    st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=4),
    st.integers(0, 4),
)
def test_near_marks_windows_of_the_same_text_within_the_distance(
    texts: list[list[bool]], distance: int
) -> None:
    marked = np.flatnonzero([mark for text in texts for mark in text])
    offsets = np.cumsum([0, *map(len, texts)])
    expected = [
        any(text[max(at - distance, 0) : at + distance + 1])
        for text in texts
        for at in range(len(text))
    ]
    assert near(offsets, marked, distance).tolist() == np.flatnonzero(expected).tolist()


@settings(deadline=None)
@given(CORPORA, st.integers(2, 4))
def test_windows_are_passages_of_n_words_with_unique_hashes(
    texts: list[str], length: int
) -> None:
    windows, _ = find_windows(pa.array(texts, pa.large_string()), length)
    passages = []
    for text in texts:
        words, data = spans(text), text.encode()
        passages += [
            data[words[at][0] : words[at + length - 1][1]]
            for at in range(len(words) - length + 1)
        ]
    window_texts = [
        texts[text].encode()[begin:end]
        for text, begin, end in zip(windows.text, windows.begins, windows.ends)
    ]
    assert window_texts == passages
    for hashes in (windows.high.tolist(), windows.low.tolist()):
        assert len(set(zip(passages, hashes))) == len(set(passages)) == len(set(hashes))
