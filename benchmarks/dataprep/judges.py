"""How well scores rank documents that people judged, against what the length of a text alone says.

DCLM's authors had people judge web documents (good or not, by majority): the area under the curve is the chance that
a good one scores over another. People like long documents, so that length is a peer to be taken seriously. No large
set of ordinary web pages is at hand to be the bad class, which is what DCLM's classifier learns from; so one row has
a classifier that learns from other texts, and one learns from the judgements themselves, five-fold. The headlines are
an easy task that shows precision and recall: whether one is clickbait. All texts lie in the folder that
`checkout.data_folder` names.

For speed, the judges stand against the same libraries used bare on the same text.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.checkout import data_folder
from benchmarks.dataprep.texts import library_texts
from benchmarks.measuring import Row, fastest, row
from gristmill.dataprep.fasttext.fasttext_backend import load_model
from gristmill.dataprep.quality.classifier import as_line, score_texts, train
from gristmill.dataprep.quality.heuristics import heuristic_scores
from gristmill.dataprep.quality.kneser_ney import read_sentences, train_entries
from gristmill.dataprep.quality.ngram_tables import make_tables
from gristmill.dataprep.quality.ngram_tables import score_texts as ngram_scores
from gristmill.dataprep.quality.perplexity import load_scores, normalise, perplexities
from gristmill.dataprep.quality.quality import area_under_curve, best_cut, measure_cut
from gristmill.dataprep.text.hashing import fmix64
from gristmill.mixtures.steps.quality import Classifier

Labelled = Sequence[tuple[bool, str]]
"""(whether good, text) of each document."""
PIECE_CHARACTERS = 2000
FOLDS = 5
DOCUMENTS, REPEATS = 2000, 5
DEFAULTS = Classifier(positive=("good",), negative=("bad",))


def quality_rows() -> Iterator[Row]:
    """One row per score and measure."""
    folder = data_folder()
    judged_path = folder / "quality" / "dclm_human_quality.jsonl.zst"
    if not judged_path.exists():
        yield row("quality scores", None, None, "", f"{judged_path} is not there")
        return
    judged = [(bool(document["label"]), document["text"]) for document in read_json_lines(judged_path)]
    texts = [text for _, text in judged]
    by_length = auc(judged, np.array([len(text) for text in texts]))
    good, bad = read_good(folder / "text"), read_headlines(folder / "quality" / "clickbait_data.gz")
    lists = ["\n".join(bad[at : at + 20]) for at in range(0, len(bad), 20)]
    elsewhere = [*((True, text) for text in good), *((False, text) for text in lists)]
    ngrams = make_tables(train_entries(read_sentences(_normalised(good)), 5))
    perplexity = perplexities(lambda array: ngram_scores(ngrams, array), _normalised(texts))
    note = f"{len(judged)} documents judged by people; peer: the length of the text"
    for name, scores, more in (
        ("heuristic score", heuristic_scores(pa.array(texts, pa.large_string())), ""),
        (
            "classifier of other texts",
            classify(elsewhere, texts, DEFAULTS),
            "; learnt from speeches, books and posts against lists of clickbait headlines",
        ),
        ("classifier, five-fold", cross_validate(judged, DEFAULTS), "; learnt from the judgements of the other folds"),
        ("perplexity", -perplexity, "; 5-grams of the same speeches, books and posts"),
    ):
        yield row(f"{name}, AUC", auc(judged, scores), by_length, "share", note + more)
    yield from headline_rows(folder / "quality", bad)


def headline_rows(folder: Path, bad: Sequence[str]) -> Iterator[Row]:
    """Tell clickbait from other headlines; the peer is the length with the cut that suits the held-out ones best."""
    labelled = [
        *((True, line) for line in read_headlines(folder / "non_clickbait_data.gz")),
        *((False, line) for line in bad),
    ]
    fold = folds(len(labelled))
    training = [one for one, number in zip(labelled, fold, strict=True) if number]
    held_out = [one for one, number in zip(labelled, fold, strict=True) if not number]
    lines = [line for _, line in held_out]
    ours = _split(held_out, classify(training, lines, DEFAULTS))
    length = _split(held_out, np.array([len(line) for line in lines], np.float64))
    at_half, by_length = measure_cut(*ours, 0.5), best_cut(*length)
    note = f"{len(held_out)} held-out headlines, cut at 0.5; peer: their length"
    yield row("headlines, AUC", area_under_curve(*ours), area_under_curve(*length), "share", note)
    for name in ("precision", "recall"):
        yield row(f"headlines, {name}", at_half[name], by_length[name], "share", note)


def classify(examples: Labelled, texts: Sequence[str], section: Classifier) -> np.ndarray:
    """The scores of some texts by a classifier that learns from the examples, in an order that is a hash's."""
    order = np.argsort([fmix64(np.uint64(number + 1)) for number in range(len(examples))], kind="stable")
    shuffled = [examples[number] for number in order.tolist()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.bin"
        path.write_bytes(train(((good, as_line(text, section)) for good, text in shuffled), section, 1, None))
        return score_texts(load_model(str(path), str(hash(path))), pa.array(texts, pa.large_string()), section)


def cross_validate(examples: Labelled, section: Classifier) -> np.ndarray:
    """The score of every example by a classifier that learnt from the other folds."""
    fold, scores = folds(len(examples)), np.empty(len(examples))
    for number in range(FOLDS):
        learnt = [one for one, of_one in zip(examples, fold, strict=True) if of_one != number]
        scores[fold == number] = classify(
            learnt, [text for (_, text), of_one in zip(examples, fold, strict=True) if of_one == number], section
        )
    return scores


def folds(number: int) -> np.ndarray:
    """Which of FOLDS each of n examples is in: int64 of shape (n,)."""
    return np.array([int(fmix64(np.uint64(at + 1)) % np.uint64(FOLDS)) for at in range(number)])


def auc(examples: Labelled, scores: np.ndarray) -> float:
    """The area under the curve of the examples' scores."""
    return area_under_curve(*_split(examples, scores))


def read_good(folder: Path) -> list[str]:
    """Pieces of speeches, books and posts about government software."""
    speeches = [text for name in ("state_union.zip", "inaugural.zip") for text in _read_zip(folder / name)]
    posts = [
        re.sub(r"\A---\n.*?\n---\n", "", document["text"], flags=re.DOTALL)
        for document in read_json_lines(folder / "18f_posts.jsonl.zst")
    ]
    books = [document["text"][5000:85_000] for document in read_json_lines(folder / "books.jsonl.zst")]
    return [
        text[at : at + PIECE_CHARACTERS]
        for text in (*speeches, *posts, *books)
        for at in range(0, len(text) - PIECE_CHARACTERS // 2, PIECE_CHARACTERS)
    ]


def read_headlines(path: Path) -> list[str]:
    """Headlines, one a line."""
    return [line for line in gzip.decompress(path.read_bytes()).decode("utf-8").splitlines() if line]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file in zstd."""
    import zstandard

    with zstandard.open(path, "rb") as stream:
        return [json.loads(line) for line in io.TextIOWrapper(stream, "utf-8")]


def _read_zip(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".txt"))
        return [archive.read(name).decode("latin-1") for name in names]


def _normalised(texts: Sequence[str]) -> pa.Array:
    return pa.array(normalise(texts, "ccnet"), pa.large_string())


def _split(examples: Labelled, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    good = np.array([label for label, _ in examples])
    return scores[good], scores[~good]


def speed_rows(documents: int = DOCUMENTS, repeats: int = REPEATS) -> Iterator[Row]:
    """Perplexities, in MB of UTF-8 that are looked at per second; fastText's models are in `label_speed`."""
    yield from perplexity_vs_kenlm(library_texts(documents), repeats)


def perplexity_vs_kenlm(texts: list[str], repeats: int) -> Iterator[Row]:
    """Scores of texts under the 3-grams of half of them: by a model that was trained here, and by KenLM's as the stage
    uses it, both against KenLM bare, line by line.
    """
    array = pa.array(texts, pa.large_string())
    size = sum(len(text.encode("utf-8")) for text in texts) / 1e6
    tables = make_tables(train_entries(read_sentences(array.take(pa.array(range(0, len(texts), 2)))), 3))
    ngram_scores(tables, array.slice(0, 1))  # compiles, or loads what an earlier run compiled
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.arpa"
        path.write_text(flat_model(texts[::2], 3), encoding="utf-8")
        try:
            import kenlm
        except ImportError:
            (seconds,) = fastest(repeats, partial(ngram_scores, tables, array))
            yield row("perplexity, trained here", size / seconds, None, "MB/s", "kenlm is not installed")
            return
        bare, given = kenlm.Model(str(path)), load_scores(str(path), "flat")
        ours, through, peer = fastest(
            repeats,
            partial(ngram_scores, tables, array),
            partial(given, array),
            lambda: [bare.score(line) for text in texts for line in text.split("\n") if line.strip()],
            clock=time.process_time,
        )
    # 1.33 by processor time on the standard library, 2026-11-24.
    yield row("perplexity, trained here, against kenlm", size / ours, size / peer, "MB/s", floor=1.1)
    yield row("perplexity by an ARPA file, against kenlm", size / through, size / peer, "MB/s")


def flat_model(texts: list[str], order: int) -> str:
    """An ARPA file of all n-grams of some texts, all of one probability: as fast as a trained one."""
    grams: list[set[tuple[str, ...]]] = [{("<unk>",)}, *(set() for _ in range(order - 1))]
    for line in (line for text in texts for line in text.split("\n") if line.strip()):
        words = ("<s>", *line.split(), "</s>")
        for size, of_size in enumerate(grams, 1):
            of_size.update(words[at : at + size] for at in range(len(words) - size + 1))
    lines = ["\\data\\", *(f"ngram {size}={len(of_size)}" for size, of_size in enumerate(grams, 1)), ""]
    for size, of_size in enumerate(grams, 1):
        backoff = "\t-0.3" if size < order else ""
        lines += [f"\\{size}-grams:", *(f"-2.5\t{' '.join(gram)}{backoff}" for gram in sorted(of_size)), ""]
    return "\n".join([*lines, "\\end\\", ""])
