"""Benchmark chains: pages as functions of their numbers, chains of the peers,
comparison of verdicts, folded flame graphs.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks.chain import chain, pages
from benchmarks.chain.flame import draw, fold, page, read_samples
from benchmarks.chain.our_chain import MIN_QUALITY, Models, write_chain
from benchmarks.chain.pages import (
    KINDS,
    Corpus,
    Pages,
    kind_of,
    remove_corpus,
    write_corpus,
)
from benchmarks.chain.peers import PEERS, VARIABLE, Peer, dolma_drops
from benchmarks.chain.verdicts import Kept, compare


def test_a_page_is_the_same_in_every_corpus_and_each_kind_is_among_them(
    tmp_path: Path,
) -> None:
    few, more = write_corpus(tmp_path / "few", 20), write_corpus(tmp_path / "more", 60)
    texts = [
        [
            json.loads(line)["text"]
            for line in (corpus.folder / "00000.jsonl").read_text().splitlines()
        ]
        for corpus in (few, more)
    ]
    assert texts[0] == texts[1][:20]
    assert more.text_bytes == sum(len(text.encode()) for text in texts[1])
    assert {kind_of(number) for number in range(2000)} == set(KINDS)


def test_copies_are_of_earlier_pages() -> None:
    corpus_pages = Pages(2000)
    number = next(number for number in range(2000) if kind_of(number) == "copy")
    assert corpus_pages.text(number) in {
        corpus_pages.text(earlier) for earlier in range(number)
    }


def test_a_corpus_is_cut_into_files(tmp_path: Path) -> None:
    original_size = pages.FILE_DOCUMENTS
    pages.FILE_DOCUMENTS = 8
    try:
        corpus = write_corpus(tmp_path / "corpus", 20)
    finally:
        pages.FILE_DOCUMENTS = original_size
    assert [
        len(path.read_text().splitlines()) for path in sorted(corpus.folder.iterdir())
    ] == [8, 8, 4]
    remove_corpus(corpus)
    assert not list(tmp_path.iterdir())


MODELS = Models(Path("/tokenizer.json"), Path("/classifier.bin"), Path("/lid.ftz"))


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_our_chain_has_the_steps_of_the_peer_and_ends_as_it_does(
    peer: Peer, tmp_path: Path
) -> None:
    chain = write_chain(
        tmp_path, Corpus(tmp_path / "pages", 10, 30_000), MODELS, peer.same, peer.packed
    )
    manifest = yaml.safe_load(chain.manifest.read_text())
    assert [next(iter(step)) for step in manifest["prepare"]] == list(peer.same)
    assert ("mix" in manifest) == peer.packed == ("documents" not in manifest)
    for step in manifest["prepare"]:
        assert step.get("langid", {"model": "/lid.ftz"})["model"] == "/lid.ftz"
        quality = step.get(
            "quality",
            {"min_quality": MIN_QUALITY, "classifier": {"model": "/classifier.bin"}},
        )
        assert quality == {
            "min_quality": MIN_QUALITY,
            "classifier": {"model": "/classifier.bin"},
        }


def test_a_peer_that_is_not_here_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    peer = Peer(
        "some-chain",
        "no_such_module",
        "all",
        {},
        True,
        lambda *arguments: pytest.fail("it is not here"),
    )
    (row,) = chain.peer_rows(tmp_path, peer, [Corpus(tmp_path, 10, 30_000)], MODELS)
    assert (row.name, row.ours, row.note) == (
        "chain_vs_some_chain",
        None,
        "not installed: make peers",
    )


def test_dolmas_mixer_drops_by_bounds_of_what_its_taggers_say() -> None:
    drops = dolma_drops().split(" or ")
    assert (
        "((.attributes.judged__gopher_v1__word_count // [[0, 0, 0]])[0][2] < 50)"
        in drops
    )
    assert (
        "((.attributes.judged__gopher_v1__word_count // [[0, 0, 0]])[0][2] > 100000)"
        in drops
    )
    assert (
        "((.attributes.judged__classifier__positive // [[0, 0, 0]])[0][2] < "
        f"{MIN_QUALITY})" in drops
    )
    assert "(.attributes.equal != null)" in drops
    assert len(drops) == len(set(drops)) == 25


def kept(passed_rules: str, is_alike: str, is_kept: str) -> Kept:
    columns = (
        np.array([letter == "1" for letter in column])
        for column in (passed_rules, is_alike, is_kept)
    )
    return Kept(
        *columns,
        np.array(
            ["c4/min_sentences" if letter == "0" else None for letter in passed_rules]
        ),
    )  # type: ignore[call-arg, misc]


def test_another_survivor_of_the_same_cluster_is_no_disagreement() -> None:
    agreement = compare(kept("1111", "1100", "1010"), kept("1111", "1100", "0110"))
    assert (agreement.rules, agreement.alike, agreement.kept) == (1.0, 1.0, 1.0)
    assert (agreement.kept_by_us, agreement.kept_by_peer) == (2, 2)
    agreement = compare(kept("0111", "0000", "0111"), kept("1111", "0010", "1101"))
    assert (agreement.rules, agreement.alike, agreement.kept) == (0.75, 2 / 3, 0.5)
    assert "rules differ on 1 documents (c4/min_sentences 1)" in agreement.differences


def test_a_flame_has_the_frames_that_are_wide_enough_and_escapes_their_names() -> None:
    samples = read_samples(
        'process 7:"/home/me/bin/python -m it";main (a.py:7);work (b.py:1) 300\nmain '
        "(a.py:9);work (b.py:2) 300\n"
        "main (a.py:9);<lambda> (c.py) 199\nmain (a.py:9);<lambda> (c.py);x "
        "(pack/d.py:1);y (pack/e/f.py:1) 200\n"
        "main (a.py:9);rare (d.py) 1\nmain (a.py:9);Condition.wait "
        "(threading.py:331) 5000\n"
    )
    root = fold(samples)
    assert root.samples == 1000
    drawn = list(draw(root))
    assert {frame.name for _, _, _, frame in drawn} == {
        "all",
        "main (a.py)",
        "work (b.py)",
        "<lambda> (c.py)",
        "pack",
    }
    svg = "\n".join(page(root, drawn))
    assert "<title>&lt;lambda&gt; (c.py): 39.9%</title>" in svg
