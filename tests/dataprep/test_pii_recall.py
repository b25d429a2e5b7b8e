"""The benchmark for personal data plants what it claims, and the detectors keep their
recall and precision.
"""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.dataprep.cleaning import (
    as_lines,
    clean_with_datatrove,
    clean_with_us,
    found_by_us,
    score,
)
from benchmarks.dataprep.pii_samples import NEGATIVES, POSITIVES, sentences
from gristmill.dataprep.cleaning.pii import KINDS
from gristmill.mixtures.steps.clean import PiiKind

SAMPLES = sentences(7, 30)


def test_sentences_are_deterministic_and_contain_their_values() -> None:
    assert sentences(7, 2) == sentences(7, 2) != sentences(8, 2)
    assert len(SAMPLES) == 30 * (sum(map(len, POSITIVES.values())) + len(NEGATIVES))
    assert all(
        sample.text.isascii() and 0 <= sample.begin < sample.end <= len(sample.text)
        for sample in SAMPLES
    )
    assert {
        sample.text[sample.end - 1] for sample in SAMPLES if sample.kind == "iban"
    } <= set("0123456789")
    assert {
        sample.text[sample.begin : sample.end].count("@")
        for sample in SAMPLES
        if sample.kind == "email"
    } == {1}


@pytest.mark.parametrize("kind", KINDS)
def test_detectors_have_high_recall_and_precision(kind: PiiKind) -> None:
    recall, precision, _ = score(SAMPLES, kind, partial(found_by_us, kind=kind))
    assert recall >= 0.99
    assert precision >= 0.97  # a tenth of all numbers have the check digit of a card


def test_score_counts_only_exact_spans_as_found() -> None:
    kind: PiiKind = "email"
    emails = [sample for sample in SAMPLES if sample.kind == kind][:4]
    negatives = [sample for sample in SAMPLES if sample.kind is None][:1]
    places = [[(sample.begin, sample.end)] for sample in emails[:2]]
    places += [[(emails[2].begin + 1, emails[2].end)], [], [(0, 1), (1, 2)]]
    assert score([*emails, *negatives], kind, lambda texts: places) == (2 / 4, 3 / 5, 2)


@pytest.mark.referee
def test_datatrove_keeps_the_same_lines_of_the_benchmark_text() -> None:
    pytest.importorskip("datatrove")
    import pyarrow as pa

    texts = [
        as_lines("these are a lot of words that say nothing at all " * 20),
        "one line\nfive words are here now.",
    ]
    assert clean_with_us(
        pa.array(texts, pa.large_string())
    ).to_pylist() == clean_with_datatrove(texts)
