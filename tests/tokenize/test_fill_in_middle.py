"""Fill-in-the-middle rearrangement: by hand, by the definition of the paper, and
through `mix`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.dataprep.documents import Inputs
from gristmill.mixtures.loader import ManifestError, parse_manifest
from gristmill.mixtures.schema.mix import FIM_TOKENS, FillInMiddle
from gristmill.tokenize.document_sampling import id_words
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.tokenize.mixing import mix
from gristmill.tokenize.mixing.quotas import MixError
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packing.fill_in_middle import ADDED, Rearranging, rearranging
from gristmill.tokenize.shuffle import order_key
from tests.dataprep.document_shards import rows_by_id
from tests.packed_sets import tokens_of, verify

PRE, SUF, MID, EOT = 900, 901, 902, 903
SOURCES = {
    "prose": {"weight": 0.5, "max_epochs": 3.0},
    "code": {"weight": 0.5, "max_epochs": 3.0},
}
FIM = {"rates": {"code": 0.6}, "spm_rate": 0.5}


def plan(*rates: float, spm_rate: float = 0.5, key: int = 5) -> Rearranging:
    return Rearranging(rates or (1.0,), spm_rate, key, PRE, SUF, MID, EOT)


def by_definition(
    text: list[int],
    begin: int,
    end: int,
    spm: bool,
    ids: tuple[int, ...] = (PRE, SUF, MID, EOT),
) -> list[int]:
    """Rearrange a text as in Bavarian et al. 2022, with variant 2 of SPM."""
    pre, suf, mid, eot = ids
    prefix, middle, suffix = text[:begin], text[begin:end], text[end:]
    return (
        [pre, suf, *suffix, mid, *prefix, *middle, eot]
        if spm
        else [pre, *prefix, suf, *suffix, mid, *middle, eot]
    )


def tokens_of_pieces(runs: Any, texts: list[list[int]]) -> list[list[int]]:
    """Return the tokens of each piece, from its runs."""
    pieces: list[list[int]] = [[] for _ in texts]
    for piece, length, source, text, end in zip(
        runs.piece, runs.length, runs.source, runs.text, runs.end, strict=True
    ):
        pieces[piece] += [
            *texts[piece][source : source + text],
            *([int(end)] if text < length else []),
        ]
    return pieces


@pytest.mark.parametrize(
    ("begin", "end", "spm", "expected"),
    [
        (2, 3, False, [PRE, 1, 2, SUF, 4, 5, MID, 3, EOT]),
        (2, 3, True, [PRE, SUF, 4, 5, MID, 1, 2, 3, EOT]),
        (0, 0, False, [PRE, SUF, 1, 2, 3, 4, 5, MID, EOT]),
        (5, 5, True, [PRE, SUF, MID, 1, 2, 3, 4, 5, EOT]),
        (0, 5, False, [PRE, SUF, MID, 1, 2, 3, 4, 5, EOT]),
    ],
)
def test_document_is_rearranged_as_in_the_paper(
    begin: int, end: int, spm: bool, expected: list[int]
) -> None:
    document = [1, 2, 3, 4, 5]
    source, text, ends = plan().runs(
        np.array([begin]), np.array([end]), np.array([spm]), np.array([5])
    )
    rearranged = [
        token
        for first, number, last in zip(source[0], text[0], ends[0], strict=True)
        for token in [*document[first : first + number], int(last)]
    ]
    assert rearranged == by_definition(document, begin, end, spm) == expected


@given(
    st.integers(0, 2**32),
    st.lists(st.integers(0, 30), min_size=1, max_size=8),
    st.data(),
)
def test_cutting_commutes_with_rearranging(
    key: int, sizes: list[int], data: st.DataObject
) -> None:
    rng, rearranging_ = np.random.default_rng(key), plan(0.5, key=key)
    words = rng.integers(0, 2**64, (len(sizes), 2), dtype=np.uint64)
    epoch, tokens = rng.integers(0, 2, len(sizes)).astype(np.int32), np.array(sizes)
    texts = [rng.integers(0, 800, size).tolist() for size in sizes]
    chosen = rearranging_.chosen(np.zeros(len(sizes), dtype=np.int64), words, epoch)
    begin, end, spm = rearranging_.cuts(words, epoch, 3, tokens)
    assert ((begin >= 0) & (begin <= end) & (end <= tokens)).all()
    documents = [
        by_definition(text, *cut) if is_rearranged else [*text, EOT]
        for text, is_rearranged, *cut in zip(
            texts, chosen, begin, end, spm, strict=True
        )
    ]
    assert [len(document) for document in documents] == (
        tokens + 1 + ADDED * chosen
    ).tolist()
    first = np.array(
        [data.draw(st.integers(0, len(document) - 1)) for document in documents]
    )
    last = np.array(
        [
            data.draw(st.integers(begin_ + 1, len(document)))
            for begin_, document in zip(first, documents, strict=True)
        ]
    )
    runs = rearranging_.cut_pieces(chosen, words, epoch, 3, tokens, first, last - first)
    assert tokens_of_pieces(runs, texts) == [
        document[a:b] for document, a, b in zip(documents, first, last, strict=True)
    ]


GOLDEN = [(55, 78, False), (14, 44, True), (5, 66, True), (15, 35, True)]


def test_draws_are_golden_and_uniform() -> None:
    """The first numbers are golden: another version of the draws would read other
    tokens after a resume.
    """
    words = np.random.default_rng(1).integers(0, 2**64, (40_000, 2), dtype=np.uint64)
    rearranging_, epoch, tokens = (
        plan(0.3),
        np.zeros(40_000, dtype=np.int32),
        np.full(40_000, 99),
    )
    begin, end, spm = rearranging_.cuts(words, epoch, 0, tokens)
    assert [
        *zip(begin[:4].tolist(), end[:4].tolist(), spm[:4].tolist(), strict=True)
    ] == GOLDEN
    assert abs(rearranging_.chosen(epoch, words, epoch).mean() - 0.3) < 0.01
    assert abs(spm.mean() - 0.5) < 0.01
    # The smaller and the larger of two even draws from 0 to 99 have means of 33 and 66,
    # nearly.
    assert abs(begin.mean() - 32.8) < 0.6
    assert abs(end.mean() - 66.2) < 0.6
    begin_of_next_copy, _, _ = rearranging_.cuts(words, epoch, 1, tokens)
    assert (begin_of_next_copy != begin).mean() > 0.9


@pytest.fixture(scope="module")
def prepared(module_stages: Any) -> Inputs:
    stages = module_stages
    documents = [*stages.documents("prose", 60), *stages.documents("code", 40, seed=9)]
    inputs = {"ingest": stages.ingest("ingest", documents, 3)}
    return stages.tokenized(inputs, ["prose", "code"], special_tokens=FIM_TOKENS[0])


def whole_documents(packed: PackedSet) -> dict[tuple[str, bytes, int], list[int]]:
    """Return the tokens of every uncut document of the rows, by source, id and copy."""
    rows = np.arange(packed.rows)
    tokens, parts_by_document = (
        packed.read(rows),
        dict[tuple[str, bytes, int], list[tuple[int, list[int]]]](),
    )
    for piece in packed.pieces(rows).to_pylist():
        part = tokens_of(tokens, piece)
        key = (packed.sources[piece["source"]], piece["id"], piece["copy"])
        parts_by_document.setdefault(key, []).append((piece["offset"], part))
    joined = {
        key: (min(parts)[0], [token for _, part in sorted(parts) for token in part])
        for key, parts in parts_by_document.items()
    }
    return {key: tokens for key, (first, tokens) in joined.items() if first == 0}


@pytest.mark.slow
@pytest.mark.parametrize("section", [{}, {"packing": "best_fit"}])
def test_rows_rearrange_documents_of_the_configured_sources_only(
    module_stages: Any, prepared: Inputs, section: dict[str, Any]
) -> None:
    name = f"mix-{'-'.join(section)}"
    module_stages.mix(
        name,
        prepared,
        SOURCES,
        tokens=12_000,
        sequence_length=64,
        validation=0.1,
        fim=FIM,
        **section,
    )
    packed, tokenizer = (
        PackedSet(module_stages.root / name),
        load(prepared["tokenizer"]),
    )
    verify(packed, deep=True)
    ids = (*(tokenizer.special_ids[token] for token in FIM_TOKENS[0]), tokenizer.eos)
    rearranging_ = rearranging(
        FillInMiddle.model_validate(FIM),
        packed.sources,
        3,
        tokenizer.special_ids,
        tokenizer.eos,
    )
    assert rearranging_ is not None
    originals, cuts = (
        original_texts(prepared),
        dict[bytes, set[tuple[int, int, bool]]](),
    )
    checked = rearranged = 0
    for (source, document, copy), tokens in whole_documents(packed).items():
        text, words = originals[document], id_words(pa.array([document], pa.binary(16)))
        number, epoch = (
            np.array([packed.sources.index(source)]),
            np.zeros(1, dtype=np.int32),
        )
        expected = [*text, tokenizer.eos]
        if rearranging_.chosen(number, words, epoch)[0]:
            assert source == "code"
            begin, end, spm = (
                int(column[0])
                for column in rearranging_.cuts(
                    words, epoch, copy, np.array([len(text)])
                )
            )
            expected = by_definition(text, begin, end, bool(spm), ids)
            cuts.setdefault(document, set()).add((begin, end, bool(spm)))
            rearranged += 1
        assert tokens == expected[: len(tokens)]
        checked += tokens == expected
    assert rearranged > 20
    assert checked > rearranged
    assert 10 < len(cuts) < 34  # of 40 documents, the same ones in every epoch
    # and cut elsewhere in another epoch
    assert any(len(cuts_of_document) > 1 for cuts_of_document in cuts.values())
    for source_ in packed.sources:
        assert not np.isin(packed.validation(source_), ids[:3]).any()


def original_texts(prepared: Inputs) -> dict[bytes, list[int]]:
    tokenizer = load(prepared["tokenizer"])
    return {
        document: tokenizer.encode([row["text"]])[0].ids
        for document, row in rows_by_id(prepared["ingest"]).items()
    }


def test_rows_do_not_depend_on_workers_or_transport(
    module_stages: Any, prepared: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "tokens": 6_000,
        "sequence_length": 64,
        "validation": 0.1,
        "fim": FIM,
    }
    module_stages.mix("alone", prepared, SOURCES, **settings)
    module_stages.mix("two", prepared, SOURCES, workers=2, **settings)
    monkeypatch.setattr(mix, "MOST_PARTS", 1)
    module_stages.mix("sent", prepared, SOURCES, **settings)
    assert (
        module_stages.files("alone")
        == module_stages.files("two")
        == module_stages.files("sent")
    )


def test_rate_of_zero_equals_no_rearrangement(
    module_stages: Any, prepared: Inputs
) -> None:
    settings: dict[str, Any] = {
        "tokens": 6_000,
        "sequence_length": 64,
        "validation": 0.1,
    }
    module_stages.mix("none", prepared, SOURCES, **settings)
    module_stages.mix(
        "zero", prepared, SOURCES, fim={"rates": {"code": 0.0}}, **settings
    )
    assert module_stages.files("none") == module_stages.files("zero")


def test_tokenizer_without_fim_tokens_is_rejected_with_the_tokens_to_add() -> None:
    assert rearranging(None, ["code"], 1, {}, EOT) is None
    with pytest.raises(MixError, match=r"prefix, suffix and middle.*<\|fim_prefix\|>"):
        rearranging(
            FillInMiddle(rates={"code": 0.5}), ["code"], 1, {"<|im_end|>": 4}, EOT
        )
    ids = dict(zip(FIM_TOKENS[1], (7, 8, 9), strict=True))
    rearranging_ = rearranging(
        FillInMiddle(rates={"code": 0.5}), ["prose", "code"], 1, ids, EOT
    )
    assert rearranging_ == Rearranging(
        (0.0, 0.5), 0.5, order_key(1, "mix", "fim"), 7, 8, 9, EOT
    )


def test_manifest_without_fim_tokens_or_with_an_unknown_source_is_rejected() -> None:
    text = (
        "name: small\nsources: {code: {path: '*.py'}}\ntokenizer: {special_tokens: "
        "[%s]}\n"
        "mix: {tokens: 1000, fim: {rates: {%s: 0.5}}}\n"
    )
    names = ", ".join(f'"{name}"' for name in FIM_TOKENS[0])
    assert parse_manifest(text % (names, "code"), "/m/small.yaml", ()).mix is not None
    with pytest.raises(ManifestError, match=r"mix\.fim: .*<\|fim_suffix\|>"):
        parse_manifest(text % ("", "code"), "/m/small.yaml", ())
    with pytest.raises(ManifestError, match=r"mix.fim.rates.cod: no such source"):
        parse_manifest(text % (names, "cod"), "/m/small.yaml", ())
