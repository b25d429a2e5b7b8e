"""User lists: domains, pages and words of URLs, bad words, a toxicity model."""

from __future__ import annotations

import gzip
import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import read_table, shard_names
from gristmill.dataprep.filters import filter as filter_stage
from gristmill.dataprep.filters.bad_words import bad_word_statistics
from gristmill.dataprep.filters.listed_words import (
    WordListError,
    build,
    count,
    lower,
    read_list,
)
from gristmill.dataprep.filters.toxicity import (
    ToxicityModelError,
    toxicity_statistics,
)
from gristmill.dataprep.filters.urls import url_statistics
from gristmill.dataprep.quality.classifier import train
from gristmill.dataprep.text.kernels import text_buffers
from gristmill.dataprep.text.unicode_tables import code_point_flags
from gristmill.mixtures.steps.quality import Classifier
from gristmill.mixtures.steps.rules import BadWords, Toxicity, Urls

LDNOOBW = (
    Path(__file__).resolve().parents[2].parent
    / "shared"
    / "data"
    / "quality"
    / "ldnoobw.tar.gz"
)


@pytest.fixture
def write_list(tmp_path: Path) -> Callable[..., str]:
    """Write a list: (name, *entries) -> path."""

    def write(name: str, *entries: str) -> str:
        content = "\n".join(entries).encode()
        (tmp_path / name).write_bytes(
            gzip.compress(content) if name.endswith(".gz") else content
        )
        return str(tmp_path / name)

    return write


def url_rows(*urls: str | None) -> pa.Table:
    return pa.table(
        {
            "locator": ["file#1"] * len(urls),
            "metadata": [
                json.dumps({} if url is None else {"url": url}) for url in urls
            ],
        }
    )


def measured(urls: list[str | None], **options: str) -> dict[str, list[float | None]]:
    columns = url_statistics(url_rows(*urls), Urls.model_validate(options))
    return {
        name: [None if np.isnan(value) else value for value in values]
        for name, values in columns.items()
    }


def text_rows(texts: list[str], languages: list[str | None] | None = None) -> pa.Table:
    language = pa.array(languages or [None] * len(texts), pa.string())
    return pa.table({"text": pa.array(texts, pa.large_string()), "language": language})


def test_list_has_its_lines_without_comments_and_blanks(
    write_list: Callable[..., str],
) -> None:
    lines = ("\ufeffOne", "# two", "", "  three words here ", "ünf")
    for name in ("list.txt", "list.gz"):
        assert list(read_list(write_list(name, *lines))) == [
            "One",
            "three words here",
            "ünf",
        ]


def test_unreadable_list_is_named(
    write_list: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "bad.gz").write_bytes(b"plain")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for name in ("nowhere.txt", "bad.gz", "latin.txt"):
        with pytest.raises(WordListError, match=re.escape(name)):
            list(read_list(str(tmp_path / name)))


def test_domain_blocks_itself_and_its_subdomains(
    write_list: Callable[..., str],
) -> None:
    path = write_list(
        "domains.gz",
        "Bad.org",
        "*.worse.co.uk",
        "10.0.0.1",
        "bücher.example",
        "# good.org",
    )
    urls = [
        "http://bad.org/x",
        "https://www.BAD.org",
        "http://a.b.bad.org:8080/",
        "http://notbad.org",
        "http://org",
        "http://bad.org.com",
        "http://x.worse.co.uk",
        "http://co.uk",
        "http://10.0.0.1/",
        "http://xn--bcher-kva.example",
        "http://good.org",
        None,
    ]
    expected = [1, 1, 1, 0, 0, 0, 1, 0, 1, 1, 0, None]
    assert measured(urls, block_domains=path)["url_blocked_domain"] == expected


def test_page_is_blocked_in_every_spelling(write_list: Callable[..., str]) -> None:
    path = write_list("pages.txt", "http://www.a.org/x/")
    urls: list[str | None] = [
        "https://a.org/x?utm_source=y",
        "http://a.org/y",
        "http://a.org/X",
    ]
    assert measured(urls, block_urls=path)["url_blocked_page"] == [1, 0, 0]


def test_url_words_are_whole_and_case_insensitive(
    write_list: Callable[..., str],
) -> None:
    hard, soft = (
        write_list("hard.txt", "Casino", "hot-stuff"),
        write_list("soft.txt", "poker", "game", "bet"),
    )
    urls: list[str | None] = [
        "http://a.org/CASINO-x",
        "http://casinos.org/",
        "http://hot.stuff.org",
        "http://stuff.org/hot",
        "http://poker.org/poker/bet",
        "http://poker.org/pokers",
        None,
    ]
    columns = measured(urls, hard_words=hard, soft_words=soft)
    assert columns["url_hard_words"] == [1, 0, 1, 0, 0, 0, None]
    assert columns["url_soft_words"] == [0, 0, 0, 0, 2, 1, None]


def test_strict_words_match_inside_the_url_without_hyphens_and_dots(
    write_list: Callable[..., str],
) -> None:
    path = write_list("strict.txt", "xxx", "free-stuff")
    urls: list[str | None] = [
        "http://a.org/x-x.x",
        "http://freestuffs.org",
        "http://a.org/xx",
        "http://XXXX.org",
    ]
    assert measured(urls, strict_words=path)["url_strict_words"] == [1, 1, 0, 2]


def test_filter_drops_by_url_in_the_order_of_the_lists(
    write_ingest: Callable[..., Path],
    make_context: Callable[..., Context],
    write_list: Callable[..., str],
    tmp_path: Path,
) -> None:
    shards = [
        [
            ("web", "http://bad.org/casino", "a"),
            ("web", "http://b.org/casino", "b"),
            ("web", "http://b.org/poker/bet", "c"),
            ("web", "http://b.org/poker", "d"),
            ("web", "file#5", "e"),
        ]
    ]
    inputs = {"ingest": write_ingest("ingest", shards)}
    rules = {
        "urls": {
            "block_domains": write_list("domains.txt", "bad.org"),
            "hard_words": write_list("hard.txt", "casino"),
            "soft_words": write_list("soft.txt", "poker", "bet"),
        }
    }
    summary = filter_stage.run(
        inputs, {"rules": rules}, tmp_path / "out", make_context("work")
    )
    (shard,) = shard_names(inputs["ingest"])
    rows = read_table(tmp_path / "out" / shard).to_pylist()
    assert [row["reason"] for row in rows] == [
        "urls/max_url_blocked_domain",
        "urls/max_url_hard_words",
        "urls/max_url_soft_words",
        None,
        None,
    ]
    assert [row["url_soft_words"] for row in rows] == [0, 0, 2, 1, None]
    assert summary.rules["urls/max_url_hard_words"] == {"failing": 2, "only": 1}


WORDS = ["bad", "bad word", "word", "ба", "ß", "a.b", "c++", "É", "a", "aa", "baaa"]
ALPHABET = "abdorw .+_1éÉßбаΣİ\n-"


def plain_count(text: str, words: list[str], whole_words: bool) -> int:
    """Number of ends of all entries, each tried at every position."""
    text, ends = lower(pa.array([text], pa.string())).to_pylist()[0], set()
    for word in lower(pa.array(words, pa.string())).to_pylist():
        for at in range(len(text) - len(word) + 1):
            flanks = (
                text[at - 1 : at] if at else "",
                text[at + len(word) : at + len(word) + 1],
            )
            if text.startswith(word, at) and not (
                whole_words and any(re.match(r"\w", flank) for flank in flanks)
            ):
                ends.add(at + len(word))
    return len(ends)


@given(
    st.lists(
        st.one_of(
            st.text(ALPHABET, max_size=20),
            st.lists(st.sampled_from(WORDS)).map(" ".join),
        ),
        max_size=4,
    ),
    st.lists(st.sampled_from(WORDS), unique=True),
    st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_automaton_equals_trying_every_entry_everywhere(
    texts: list[str], words: list[str], whole_words: bool
) -> None:
    data, offsets = text_buffers(lower(pa.array(texts, pa.large_string())))
    counts, covered = count(
        data, offsets, build(words), code_point_flags(), whole_words
    )
    assert counts.tolist() == [plain_count(text, words, whole_words) for text in texts]
    assert ((covered > 0) == (counts > 0)).all()


def test_bad_word_ratio_counts_every_byte_once(write_list: Callable[..., str]) -> None:
    path = write_list("en", "bad", "bad word", "word", "é")
    section = BadWords.model_validate({"lists": {"en": path}})
    columns = bad_word_statistics(text_rows(["A BAD word.", "é", "fine", ""]), section)
    assert columns["bad_words"].tolist() == [2, 1, 0, 0]
    assert columns["bad_word_ratio"].tolist() == [8 / 11, 1.0, 0.0, 0.0]


def test_language_selects_the_list_and_word_boundaries(
    write_list: Callable[..., str],
) -> None:
    section = BadWords.model_validate(
        {
            "lists": {
                "en": write_list("en", "ass"),
                "zh": write_list("zh", "性", "坏"),
                "ko": write_list("ko", "나쁜"),
            },
        }
    )
    texts = ["ass", "class", "ass", "很坏的", "性", "나쁜말", "나쁜 말", "ass", "ass"]
    languages = ["en", "en", None, "zh-Hant", "zh", "ko", "ko", "de", "en-GB"]
    counts = bad_word_statistics(text_rows(texts, languages), section)["bad_words"]
    assert counts.tolist()[:7] == [1, 0, 1, 1, 0, 0, 1]
    assert np.isnan(counts[7])
    assert counts[8] == 1
    silent = BadWords.model_validate({**section.model_dump(), "language": None})
    assert np.isnan(bad_word_statistics(text_rows(["ass"]), silent)["bad_words"]).all()


@pytest.mark.skipif(not LDNOOBW.exists(), reason="LDNOOBW's lists are not here")
def test_ldnoobw_lists_match_like_c4s_pattern(tmp_path: Path) -> None:
    with tarfile.open(LDNOOBW) as archive:
        lists = {
            member.name: archive.extractfile(member).read().decode().splitlines()  # type: ignore[union-attr]
            for member in archive
            if "." not in member.name and member.name not in ("LICENSE", "-")
        }
    assert len(lists) == 28
    for language, words in lists.items():
        entries = sorted({word.strip() for word in words} - {""})
        texts = [f"Ein x{word} und {word}y." for word in entries] + [
            f"So, {word}!" for word in entries
        ]
        whole_words = language not in ("ja", "th", "zh")
        joined = "|".join(re.escape(word.lower()) for word in entries)
        pattern = re.compile(rf"(?:\W|^)({joined})(?:\W|$)" if whole_words else joined)
        data, offsets = text_buffers(lower(pa.array(texts, pa.large_string())))
        counts, _ = count(
            data, offsets, build(entries), code_point_flags(), whole_words
        )
        assert (counts > 0).tolist() == [
            pattern.search(text.lower()) is not None for text in texts
        ], language


def test_toxicity_is_the_probability_of_the_label(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    section = Classifier(
        positive=("a",), negative=("b",), dimensions=4, epochs=20, buckets=1000
    )
    path.write_bytes(
        train(
            [(True, "you awful fool"), (False, "what a lovely day")] * 50,
            section,
            1,
            tmp_path,
        )
    )
    options = Toxicity.model_validate(
        {"model": str(path), "label": "__label__positive"}
    )
    values = toxicity_statistics(
        text_rows(["you awful\n\nfool", "what a lovely day", " \n"]), options
    )["toxicity"]
    assert values[0] > 0.9
    assert values[1] < 0.1
    assert np.isnan(values[2])
    with pytest.raises(
        ToxicityModelError,
        match=r"'__label__toxic'.*__label__negative, __label__positive",
    ):
        toxicity_statistics(
            text_rows([]), Toxicity.model_validate({"model": str(path)})
        )
