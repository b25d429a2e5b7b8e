"""Phases, limits, redistribution and repeats of the stage `mix`, on documents of known
tokens.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gristmill.dataprep.conservation import check_conservation
from gristmill.dataprep.documents import Inputs
from gristmill.tokenize.mixing.mix_summary import MixedPhase, MixSummary
from gristmill.tokenize.mixing.quotas import MixError
from gristmill.tokenize.packed import PackedSet
from tests.dataprep.document_shards import rows_by_id
from tests.packed_sets import verify

LENGTH = 16
PHASES = [
    {"end": 0.75, "weights": {"web": 3, "books": 1}},
    {"weights": {"books": 1, "code": 1}},
]


def clusters(documents: pa.Table) -> dict[str, Any]:
    """Set the cluster size of a web page to the last digit of its locator; leave others
    unjudged.
    """
    sizes = [
        int(locator[-1]) if locator.startswith("web") else None
        for locator in documents["locator"].to_pylist()
    ]
    return {
        "cluster": pa.nulls(len(sizes), pa.binary(16)),
        "cluster_size": pa.array(sizes, pa.int32()),
    }


@pytest.fixture(scope="module")
def prepared(module_stages: Any) -> Inputs:
    """120 web pages, 40 books and 20 files of code, in 2 shards."""
    documents = [
        *module_stages.documents("web", 120),
        *module_stages.documents("books", 40),
        *module_stages.documents("code", 20),
    ]
    inputs = {"ingest": module_stages.ingest("ingest", documents, 2)}
    inputs["dedup"] = module_stages.annotate("dedup", inputs["ingest"], clusters)
    return module_stages.tokenized(inputs, ["web", "books", "code"])


@pytest.fixture
def mix(module_stages: Any, prepared: Inputs) -> Any:
    """Mix anew without held-out rows, and return the summary and the packed set."""
    defaults = {"sequence_length": LENGTH, "validation": 0.0, "shard_rows": 60}

    def mixing(
        name: str, sources: dict[str, Any] | None = None, **section: Any
    ) -> tuple[MixSummary, PackedSet]:
        for folder in (name, f"{name}.work"):
            shutil.rmtree(module_stages.root / folder, ignore_errors=True)
        all_sources = {"web": {}, "books": {}, "code": {}, **(sources or {})}
        summary = module_stages.mix(name, prepared, all_sources, **defaults | section)
        return summary, PackedSet(module_stages.root / name)

    return mixing


@pytest.fixture
def staged(mix: Any) -> tuple[MixSummary, PackedSet]:
    """A mixture of PHASES."""
    return mix("staged", tokens=3200, phases=PHASES)


def copies(packed: PackedSet, source: int) -> Counter[bytes]:
    """Count the copies of each document of a source in the rows."""
    pieces = packed.pieces(np.arange(packed.rows)).to_pylist()
    return Counter(
        document
        for document, _ in {
            (piece["id"], piece["copy"])
            for piece in pieces
            if piece["source"] == source
        }
    )


def test_phases_follow_each_other_with_their_own_weights(staged: Any) -> None:
    """3,200 tokens are 200 rows: 150 by 3 : 1 : 0 and 50 by 0 : 1 : 1, the half row of
    112.5 going to the first.
    """
    summary, packed = staged
    assert packed.phases == [[113, 37, 0], [0, 25, 25]]
    assert packed.rows_per_source == [113, 62, 25]
    sources = packed.source_of(np.arange(200))
    assert np.bincount(sources[:150], minlength=3).tolist() == [113, 37, 0]
    pieces = packed.pieces(np.arange(200))
    assert np.array_equal(
        sources,
        pieces["source"].to_numpy()[np.unique(pieces["row"], return_index=True)[1]],
    )
    rows = packed.order(4).rows(np.arange(200))
    assert set(rows[:150].tolist()) == set(range(150))
    assert summary.stages[0] == MixedPhase(
        until=0.75,
        rows=150,
        tokens=2400,
        rows_per_source=[113, 37, 0],
        requested={"web": 0.75, "books": 0.25, "code": 0.0},
        realised={"web": 113 / 150, "books": 37 / 150, "code": 0.0},
    )
    assert summary.requested["books"] == {
        "share": 0.3125,
        "tokens": 1000.0,
        "max_epochs": 1.0,
    }
    assert packed.manifest["shares"] == [asdict(stage) for stage in summary.stages]
    verify(packed, deep=True)


def test_source_continues_in_the_next_phase_where_it_stopped(staged: Any) -> None:
    _, packed = staged
    parts: dict[bytes, list[tuple[int, int]]] = {}
    for piece in packed.pieces(np.arange(200)).to_pylist():
        parts.setdefault(piece["id"], []).append((piece["offset"], piece["length"]))
    for spans in parts.values():
        ends = np.cumsum([length for _, length in sorted(spans)])
        assert [offset for offset, _ in sorted(spans)] == [0, *ends[:-1].tolist()]


def test_phased_rows_do_not_depend_on_workers_or_shard_sizes(
    mix: Any, staged: Any
) -> None:
    _, packed = staged
    _, resharded = mix(
        "other",
        tokens=3200,
        phases=PHASES,
        workers=2,
        shard_rows=37,
    )
    rows = np.arange(200)
    assert np.array_equal(packed.read(rows), resharded.read(rows))
    assert packed.pieces(rows).equals(resharded.pieces(rows))


def test_single_phase_equals_a_mixture_without_phases(mix: Any) -> None:
    weights = {"web": 2, "books": 1, "code": 1}
    _, plain = mix("plain", tokens=1600, weights=weights)
    _, staged = mix("whole", tokens=1600, phases=[{"weights": weights}])
    assert np.array_equal(plain.read(np.arange(100)), staged.read(np.arange(100)))
    assert plain.rows_per_source == [50, 25, 25]


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_every_phase_has_its_tokens_in_every_packing(mix: Any, packing: str) -> None:
    summary, packed = mix(packing, tokens=3200, phases=PHASES, packing=packing)
    assert [stage.tokens for stage in summary.stages] == [2400, 800]
    assert [sum(rows) for rows in packed.phases] == [
        stage.rows for stage in summary.stages
    ]
    lengths, borders = (
        packed.pieces(np.arange(packed.rows)),
        np.cumsum([0, *map(sum, packed.phases)]),
    )
    by_stage = np.searchsorted(borders, lengths["row"].to_numpy(), side="right")
    assert np.bincount(by_stage, lengths["length"].to_numpy())[1:].tolist() == [
        2400,
        800,
    ]


def test_alpha_weights_follow_available_tokens(mix: Any) -> None:
    for alpha in (1.0, 0.5, 0.0):
        summary, packed = mix("alpha", tokens=1600, weights={"alpha": alpha})
        powers = (
            np.array([part.available_tokens for part in summary.realised.values()])
            ** alpha
        )
        assert (
            np.abs(np.array(packed.rows_per_source) - 100 * powers / powers.sum()).max()
            < 1
        )


def test_shortfall_is_redistributed_to_other_sources_and_reported(
    mix: Any, module_stages: Any
) -> None:
    """Code is limited to 10 rows of 16 tokens instead of 50; the other 40 go 3 : 1 to
    web and books.
    """
    weights = {"web": 3, "books": 1, "code": 4}
    unlimited, _ = mix("unlimited", tokens=160)
    available = unlimited.realised["code"].available_tokens
    max_epochs = round(168 / available, 4)
    limited = {"code": {"max_epochs": max_epochs}}
    with pytest.raises(
        MixError,
        match=rf"code: weight 4 .* 800 tokens.* {available} tokens x .* fill 160",
    ):
        mix("short", limited, tokens=1600, weights=weights)
    summary, packed = mix(
        "short",
        limited,
        tokens=1600,
        weights=weights,
        on_shortfall="redistribute",
    )
    assert packed.rows_per_source == [68, 22, 10]
    assert summary.redistributed == {"web": 488, "books": 152, "code": -640}
    assert packed.manifest["redistributed"] == summary.redistributed
    assert summary.requested["code"] == {
        "share": 0.5,
        "tokens": 800.0,
        "max_epochs": max_epochs,
    }
    (warning,) = module_stages.warnings("short")
    assert "(mix.on_shortfall): 640 from code; 488 to web, 152 to books" in warning


def test_unweighted_source_gives_no_row_and_a_warning(
    mix: Any, module_stages: Any
) -> None:
    summary, packed = mix("unnamed", tokens=800, weights={"web": 1, "code": 1})
    assert packed.rows_per_source == [25, 0, 25]
    assert summary.counts["sources"]["books"]["dropped"] == {"quota": 40}
    (warning,) = module_stages.warnings("unnamed")
    assert "no training rows of books" in warning


def test_documents_are_repeated_by_their_cluster_size(
    mix: Any, prepared: Inputs
) -> None:
    """Of clusters of 0 to 9 pages, empty ones are skipped and others read once to four
    times per epoch.
    """
    sources = {"web": {"epochs": "min(cluster_size, 4)"}}
    summary, packed = mix("repeats", sources, weights={"web": 1}, tokens=1600)
    tokens = summary.realised["web"].available_tokens
    summary, packed = mix("repeats", sources, weights={"web": 1}, tokens=tokens)
    num_copies = copies(packed, 0)
    expected = {
        document: min(int(row["locator"][-1]), 4)
        for document, row in rows_by_id(prepared["ingest"]).items()
        if row["source"] == "web" and row["locator"][-1] != "0"
    }
    incomplete = {
        document for document in expected if num_copies[document] != expected[document]
    }
    assert len(incomplete) <= 1  # the last row of the epoch is not full, and dropped
    assert all(
        num_copies[document] == expected[document] - 1 for document in incomplete
    )
    assert summary.counts["sources"]["web"]["dropped"] == {"epochs": 12}
    assert summary.requested["web"]["epochs"] == "min(cluster_size, 4)"
    check_conservation(summary.counts, "mix")


def test_repeats_are_spread_over_an_epoch_as_numbered_copies(mix: Any) -> None:
    """In an epoch with four copies of each document, the first 40 % hold 1.6 copies on
    average, and four of a few.
    """
    _, packed = mix(
        "spread",
        {"web": {"epochs": "4"}},
        weights={"web": 1},
        tokens=16_000,
    )
    num_copies = copies(packed, 0)
    assert 1.6 < sum(num_copies.values()) / len(num_copies) < 2.2
    assert max(num_copies.values()) == 4
    pieces = packed.pieces(np.arange(packed.rows))
    keys = set(
        zip(
            pieces["id"].to_pylist(),
            pieces["copy"].to_pylist(),
            pieces["offset"].to_pylist(),
            strict=True,
        )
    )
    assert len(keys) == len(pieces)


def test_fractional_epochs_are_drawn_and_unmeasured_documents_dropped(mix: Any) -> None:
    sources = {"web": {"epochs": "0.5"}, "books": {"epochs": "min(cluster_size, 4)"}}
    summary, _ = mix("chance", sources, weights={"web": 1}, tokens=320)
    dropped = summary.counts["sources"]
    assert 40 < dropped["web"]["dropped"]["epochs"] < 80
    assert dropped["books"]["dropped"] == {"epochs_unknown": 40}
    again, _ = mix("chance", sources, weights={"web": 1}, tokens=320)
    assert again == summary


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("cluster_sizes", "cluster_sizes"),
        ("0 - cluster_size", r"is -\d for document [0-9a-f]{32}; it must be between 0"),
        ("1 / (cluster_size - cluster_size)", "is inf for document"),
        ("'web'", "web"),
        ("length(read_text('/etc/hostname'))", "read_text"),
    ],
)
def test_invalid_epochs_expression_names_source_and_document(
    mix: Any, expression: str, complaint: str
) -> None:
    with pytest.raises(MixError, match=complaint) as caught:
        mix(
            "wrong",
            {"web": {"epochs": expression}},
            tokens=320,
        )
    assert str(caught.value).startswith(f"sources.web.epochs: {expression!r}")
