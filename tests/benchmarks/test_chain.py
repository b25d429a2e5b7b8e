"""The pages of the chain's corpora are functions of their numbers, verdicts are compared, flames are folded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks.chain import pages
from benchmarks.chain.flame import draw, fold, page, read_samples
from benchmarks.chain.pages import KINDS, Pages, kind_of, write_corpus
from benchmarks.chain.verdicts import Kept, compare


def test_a_page_is_the_same_in_every_corpus_and_each_kind_is_among_them(tmp_path: Path) -> None:
    few, more = write_corpus(tmp_path / "few", 20), write_corpus(tmp_path / "more", 60)
    texts = [[json.loads(line)["text"] for line in (corpus.folder / "00000.jsonl").read_text().splitlines()]
             for corpus in (few, more)]
    assert texts[0] == texts[1][:20]
    assert more.text_bytes == sum(len(text.encode()) for text in texts[1])
    assert {kind_of(number) for number in range(2000)} == set(KINDS)


def test_copies_are_of_earlier_pages() -> None:
    made = Pages()
    number = next(number for number in range(2000) if kind_of(number) == "copy")
    assert made.text(number) in {made.text(earlier) for earlier in range(number)}


def test_a_corpus_is_cut_into_files(tmp_path: Path) -> None:
    before = pages.FILE_DOCUMENTS
    pages.FILE_DOCUMENTS = 8
    try:
        corpus = write_corpus(tmp_path / "corpus", 20)
    finally:
        pages.FILE_DOCUMENTS = before
    assert [len(path.read_text().splitlines()) for path in sorted(corpus.folder.iterdir())] == [8, 8, 4]


def kept(ruled: str, alike: str, last: str) -> Kept:
    columns = (np.array([letter == "1" for letter in column]) for column in (ruled, alike, last))
    return Kept(*columns, np.array(["c4/min_sentences" if letter == "0" else None for letter in ruled]))  # type: ignore[call-arg, misc]


def test_another_survivor_of_the_same_cluster_is_no_disagreement() -> None:
    found = compare(kept("1111", "1100", "1010"), kept("1111", "1100", "0110"))
    assert (found.rules, found.alike, found.last, found.numbers) == (1.0, 1.0, 1.0, (2, 2))
    found = compare(kept("0111", "0000", "0111"), kept("1111", "0010", "1101"))
    assert (found.rules, found.alike, found.last) == (0.75, 2 / 3, 0.5)
    assert "rules differ on 1 documents (c4/min_sentences 1)" in found.why


def test_a_flame_has_the_frames_that_are_wide_enough_and_escapes_their_names() -> None:
    samples = read_samples("main (a.py);work (b.py) 600\nmain (a.py);<lambda> (c.py) 399\nmain (a.py);rare (d.py) 1\n")
    root = fold(samples)
    assert root.samples == 1000
    drawn = list(draw(root))
    assert {frame.name for _, _, _, frame in drawn} == {"all", "main (a.py)", "work (b.py)", "<lambda> (c.py)"}
    svg = "\n".join(page(root, drawn))
    assert "<title>&lt;lambda&gt; (c.py): 39.9%</title>" in svg
