"""Ranking of documents that people judged by quality scores, against the length of the
text.

DCLM's authors had people judge web documents (good or not, by majority): the area under
the curve is the probability that a good one has a higher score than another. People
like long documents, so length is a serious peer. There is no large set of ordinary web
pages here to be the bad class, from which DCLM's classifier learns; so one row has a
classifier that learns from other texts, and one learns from the judgements themselves,
five-fold. Telling clickbait from other headlines is an easy task that shows precision
and recall. All texts lie in `checkout.data_folder`.

For speed, the peers are the same libraries used directly on the same text.
"""

from __future__ import annotations

import gzip
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.checkout import data_folder
from benchmarks.dataprep.texts import library_texts
from benchmarks.measuring import Row, fastest, row, text_megabytes
from benchmarks.public_data import read_archive, read_records
from gristmill.dataprep.fasttext.fasttext_predict import load_model
from gristmill.dataprep.quality.classifier import as_line, score_texts, train
from gristmill.dataprep.quality.perplexity import load_scores
from gristmill.dataprep.quality.separation import (
    area_under_curve,
    best_cut,
    measure_cut,
)
from gristmill.dataprep.text.hashing import fmix64
from gristmill.mixtures.steps.quality import Classifier

Labelled = Sequence[tuple[bool, str]]
"""(True if good, text) of each document."""
PIECE_CHARACTERS = 2000
FOLDS = 5
DOCUMENTS, REPEATS = 2000, 5
DEFAULTS = Classifier(positive=("good",), negative=("bad",))


def quality_rows() -> Iterator[Row]:
    """Measure each score."""
    folder = data_folder()
    judged_path = folder / "quality" / "dclm_human_quality.jsonl.zst"
    if not judged_path.exists():
        yield row("quality scores", None, None, "", f"{judged_path} is not there")
        return
    judged = [
        (bool(record["label"]), record["text"]) for record in read_records(judged_path)
    ]
    texts = [text for _, text in judged]
    by_length = auc(judged, np.array([len(text) for text in texts]))
    good, bad = (
        read_good(folder / "text"),
        read_headlines(folder / "quality" / "clickbait_data.gz"),
    )
    other_texts = [
        *((True, text) for text in good),
        *((False, text) for text in headline_lists(bad)),
    ]
    scores = {
        "classifier of other texts": classify(other_texts, texts, DEFAULTS),
        "classifier, five-fold": cross_validate(judged, DEFAULTS),
    }
    sources = {
        "classifier of other texts": "; learnt from speeches, books and posts "
        "against lists of clickbait headlines",
        "classifier, five-fold": "; learnt from the judgements of the other folds",
    }
    note = f"{len(judged)} documents judged by people; peer: the length of the text"
    for name, values in scores.items():
        yield row(
            f"{name}, AUC",
            auc(judged, values),
            by_length,
            "share",
            note + sources.get(name, ""),
        )
    yield from headline_rows(folder / "quality", bad)


def headline_rows(folder: Path, bad: Sequence[str]) -> Iterator[Row]:
    """Tell clickbait from other headlines; the peer is the length with the best cut for
    the held-out ones.
    """
    labelled = [
        *((True, line) for line in read_headlines(folder / "non_clickbait_data.gz")),
        *((False, line) for line in bad),
    ]
    fold = folds(len(labelled))
    training = [
        headline for headline, number in zip(labelled, fold, strict=True) if number
    ]
    held_out = [
        headline for headline, number in zip(labelled, fold, strict=True) if not number
    ]
    lines = [line for _, line in held_out]
    ours = _split(held_out, classify(training, lines, DEFAULTS))
    length = _split(held_out, np.array([len(line) for line in lines], np.float64))
    at_half, by_length = measure_cut(*ours, 0.5), best_cut(*length)
    note = f"{len(held_out)} held-out headlines, cut at 0.5; peer: their length"
    yield row(
        "headlines, AUC",
        area_under_curve(*ours),
        area_under_curve(*length),
        "share",
        note,
    )
    for name in ("precision", "recall"):
        yield row(f"headlines, {name}", at_half[name], by_length[name], "share", note)


def classify(
    examples: Labelled, texts: Sequence[str], section: Classifier
) -> np.ndarray:
    """Score texts by a classifier that learns from the examples, in an order by
    hash.
    """
    order = np.argsort(
        [fmix64(np.uint64(number + 1)) for number in range(len(examples))],
        kind="stable",
    )
    shuffled = [examples[number] for number in order.tolist()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.bin"
        path.write_bytes(
            train(
                ((good, as_line(text, section)) for good, text in shuffled),
                section,
                1,
                None,
            )
        )
        return score_texts(
            load_model(str(path), str(hash(path))),
            pa.array(texts, pa.large_string()),
            section,
        )


def cross_validate(examples: Labelled, section: Classifier) -> np.ndarray:
    """Score every example by a classifier that learns from the other folds."""
    fold, scores = folds(len(examples)), np.empty(len(examples))
    for number in range(FOLDS):
        training = [
            examples[place] for place in np.flatnonzero(fold != number).tolist()
        ]
        texts = [
            examples[place][1] for place in np.flatnonzero(fold == number).tolist()
        ]
        scores[fold == number] = classify(training, texts, section)
    return scores


def folds(number: int) -> np.ndarray:
    """Return the fold of each of n examples: int64, (n,)."""
    return np.array(
        [
            int(fmix64(np.uint64(place + 1)) % np.uint64(FOLDS))
            for place in range(number)
        ]
    )


def auc(examples: Labelled, scores: np.ndarray) -> float:
    """Return the area under the curve of the examples' scores."""
    return area_under_curve(*_split(examples, scores))


def read_good(folder: Path) -> list[str]:
    """Read pieces of speeches, books and posts about government software."""
    texts = [*read_archive(folder / "state_union.zip", "latin-1").values()]
    texts += read_archive(folder / "inaugural.zip", "latin-1").values()
    for record in read_records(folder / "18f_posts.jsonl.zst"):
        texts.append(re.sub(r"\A---\n.*?\n---\n", "", record["text"], flags=re.DOTALL))
    texts += [
        record["text"][5000:85_000]
        for record in read_records(folder / "books.jsonl.zst")
    ]
    return [
        text[start : start + PIECE_CHARACTERS]
        for text in texts
        for start in range(0, len(text) - PIECE_CHARACTERS // 2, PIECE_CHARACTERS)
    ]


def read_headlines(path: Path) -> list[str]:
    """Read headlines, one per line."""
    return [
        line
        for line in gzip.decompress(path.read_bytes()).decode("utf-8").splitlines()
        if line
    ]


def headline_lists(headlines: Sequence[str]) -> list[str]:
    """Return texts of 20 headlines each."""
    return [
        "\n".join(headlines[start : start + 20])
        for start in range(0, len(headlines), 20)
    ]


def _split(examples: Labelled, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    good = np.array([label for label, _ in examples])
    return scores[good], scores[~good]


def speed_rows(documents: int = DOCUMENTS, repeats: int = REPEATS) -> Iterator[Row]:
    """Measure perplexities, in MB of UTF-8 per second; fastText's models are in
    `label_speed`.
    """
    yield from perplexity_vs_kenlm(library_texts(documents), repeats)


def perplexity_vs_kenlm(texts: list[str], repeats: int) -> Iterator[Row]:
    """Score texts under the 3-grams of half of them: by KenLM as the stage uses it,
    against KenLM directly, line by line.
    """
    name = "perplexity by an ARPA file, against kenlm"
    try:
        import kenlm
    except ImportError:
        yield row(name, None, None, "MB/s", "kenlm is not installed")
        return
    array = pa.array(texts, pa.large_string())
    size = text_megabytes(texts)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.arpa"
        path.write_text(flat_model(texts[::2], 3), encoding="utf-8")
        kenlm_model = kenlm.Model(str(path))
        ours, peer = fastest(
            repeats,
            partial(load_scores(str(path), "flat"), array),
            lambda: [
                kenlm_model.score(line)
                for text in texts
                for line in text.split("\n")
                if line.strip()
            ],
            clock=time.process_time,
        )
    # 0.96, 2026-11-28, 2 cores.
    yield row(name, size / ours, size / peer, "MB/s", floor=0.8)


def flat_model(texts: list[str], order: int) -> str:
    """Return an ARPA file of all n-grams of some texts, all of one probability: as fast
    as a trained one.
    """
    grams: list[set[tuple[str, ...]]] = [set() for _ in range(order)]
    grams[0].add(("<unk>",))
    for line in (line for text in texts for line in text.split("\n") if line.strip()):
        words = ("<s>", *line.split(), "</s>")
        for size, size_grams in enumerate(grams, 1):
            size_grams.update(
                words[start : start + size] for start in range(len(words) - size + 1)
            )
    counts = [
        f"ngram {size}={len(size_grams)}" for size, size_grams in enumerate(grams, 1)
    ]
    lines = ["\\data\\", *counts, ""]
    for size, size_grams in enumerate(grams, 1):
        backoff = "\t-0.3" if size < order else ""
        entries = [f"-2.5\t{' '.join(gram)}{backoff}" for gram in sorted(size_grams)]
        lines += [f"\\{size}-grams:", *entries, ""]
    return "\n".join([*lines, "\\end\\", ""])
