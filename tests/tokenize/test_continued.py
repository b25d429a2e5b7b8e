"""Mixtures that continue another one after the rows that were read, with new
weights.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.mixtures.schema.mix import Continues
from gristmill.tokenize.mixing.continue_mixture import Before, before_of, digest_of_sums
from gristmill.tokenize.mixing.quotas import MixError
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packing.row_layout import Shards
from gristmill.tokenize.shuffle import Order, rows_before, sources_of_rows
from tests.packed_sets import verify
from tests.tokenize.order_definition import rank
from tests.tokenize.test_mix import LENGTH, all_documents, prepare

MIXTURE = {"prose": {"weight": 0.7}, "code": {"weight": 0.3, "max_epochs": 8.0}}
READ, SEED = 37, 11


@pytest.fixture(scope="module")
def prepared(module_stages: Any) -> dict[str, Path]:
    return prepare(module_stages, "", all_documents(module_stages), shards=3)


def mixed(
    stages: Any,
    prepared: dict[str, Path],
    name: str,
    sources: dict[str, Any] = MIXTURE,
    tokens: int = 4000,
    **section: Any,
) -> PackedSet:
    if not (stages.root / name / "packed.json").exists():
        stages.mix(
            name,
            prepared,
            sources,
            tokens=tokens,
            sequence_length=LENGTH,
            validation=0.15,
            shard_rows=50,
            **section,
        )
    return PackedSet(stages.root / name)


def continuing(packed: PackedSet, positions: int, seed: int = SEED) -> dict[str, Any]:
    """Describe a continued set of which a training with this seed has read some
    positions.
    """
    order = packed.order(seed)
    return {
        "rows": order.places_before(positions),
        "sources": packed.sources,
        "phases": packed.phases,
        "seed": seed,
        "fingerprint": packed.fingerprint,
        "withheld": packed.withheld.tolist(),
        "digest": digest_of_sums(packed.sums()[order.rows(np.arange(positions))]),
        **(
            {"continues": packed.manifest["continues"]}
            if "continues" in packed.manifest
            else {}
        ),
    }


def tokens_read(
    packed: PackedSet, positions: np.ndarray, seed: int = SEED
) -> np.ndarray:
    return packed.read(packed.order(seed).rows(positions))


def readings(packed: PackedSet, rows: np.ndarray) -> Counter[tuple[bytes, int, int]]:
    """Count the occurrences of each token of each copy of a document in some rows."""
    return Counter(
        (piece["id"], piece["copy"], piece["offset"] + token)
        for piece in packed.pieces(rows).to_pylist()
        for token in range(piece["length"])
    )


@pytest.mark.parametrize(
    "weights", [{"prose": 0.2, "code": 0.8}, {"prose": 1.0, "code": 0.0}]
)
def test_continued_set_keeps_the_rows_read_and_fills_the_remainder_by_the_new_weights_without_repeats(
    module_stages: Any,
    prepared: dict[str, Path],
    weights: dict[str, float],
) -> None:
    before = mixed(module_stages, prepared, "before")
    after = mixed(
        module_stages,
        prepared,
        f"after-{weights['code']}",
        weights=weights,
        continues=continuing(before, READ),
    )
    verify(after, deep=True)
    assert after.rows == before.rows
    for seed in (SEED, 5):  # rows already read do not depend on the seed
        assert np.array_equal(
            tokens_read(after, np.arange(READ), seed),
            tokens_read(before, np.arange(READ)),
        )
    read = after.order(SEED).rows(np.arange(after.rows))
    assert sorted(read.tolist()) == list(range(after.rows))
    assert np.array_equal(read[:READ], np.arange(READ))
    num_new = after.rows - READ
    sources = after.source_of(read[READ:])
    assert abs(int((sources == 1).sum()) - num_new * weights["code"]) < 1
    code_rows = np.cumsum(sources == 1)
    assert (
        np.abs(code_rows - np.arange(1, num_new + 1) * code_rows[-1] / num_new).max()
        <= 0.5
    )  # every prefix of it is the mixture
    assert max(readings(after, np.arange(after.rows)).values()) == 1
    pieces = after.pieces(np.arange(after.rows)).to_pylist()
    assert [after.sources[piece["source"]] for piece in pieces] == [
        after.sources[number]
        for number in after.source_of(
            np.array([piece["row"] for piece in pieces])
        ).tolist()
    ]
    assert {
        piece["copy"] for piece in pieces if after.sources[piece["source"]] == "prose"
    } == {0}
    assert max(piece["copy"] for piece in pieces) < 8


def test_new_rows_are_those_that_would_have_been_read_next(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    before = mixed(module_stages, prepared, "before")
    after = mixed(module_stages, prepared, "same", continues=continuing(before, READ))
    order = before.order(SEED)
    for source in range(2):
        unread, new_rows = (
            order.rows(np.arange(READ, before.rows)),
            np.arange(READ, after.rows),
        )
        unread_of_source = unread[before.source_of(unread) == source]
        new_of_source = new_rows[after.source_of(new_rows) == source]
        count = min(len(unread_of_source), len(new_of_source))
        read = {row.tobytes() for row in before.read(unread_of_source[:count])}
        # Quotas are rounded anew: one row more or less.
        assert len({row.tobytes() for row in after.read(new_of_source)} - read) <= 1


def test_ledger_and_summary_agree_with_the_packed_documents(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    before = mixed(module_stages, prepared, "before")
    section = {
        "weights": {"prose": 0.1, "code": 0.9},
        "continues": continuing(before, READ),
    }
    summary = module_stages.mix(
        "ledger",
        prepared,
        MIXTURE,
        tokens=4000,
        sequence_length=LENGTH,
        validation=0.15,
        shard_rows=50,
        **section,
    )
    after = PackedSet(module_stages.root / "ledger")
    pieces = after.pieces(np.arange(after.rows)).to_pylist()
    packed_ids = {piece["id"] for piece in pieces}
    ledger = after.ledger(
        [bytes.fromhex(document_id) for document_id in all_ids(prepared)]
    ).to_pylist()
    assert {
        entry["id"]
        for entry in ledger
        if entry["reason"] is None and not entry["held_out"]
    } == packed_ids
    for number, name in enumerate(after.sources):
        pieces_of_source = [piece for piece in pieces if piece["source"] == number]
        assert summary.realised[name].documents == len(
            {piece["id"] for piece in pieces_of_source}
        )
        assert summary.realised[name].copies == len(
            {(piece["id"], piece["copy"]) for piece in pieces_of_source}
        )
        assert summary.realised[name].tokens == sum(
            piece["length"] for piece in pieces_of_source
        )
    assert [stage.rows for stage in summary.stages] == [READ, 125 - READ]
    assert summary.stages[1].requested == {"prose": 0.1, "code": 0.9}


def all_ids(prepared: dict[str, Path]) -> list[str]:
    import pyarrow.parquet as pq

    return [
        document_id.hex()
        for path in sorted(prepared["ingest"].glob("part-*"))
        for document_id in pq.read_table(path, columns=["id"])["id"].to_pylist()
    ]


def test_continued_mixture_is_continued_again_with_phases_and_a_new_source(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    first = mixed(module_stages, prepared, "before")
    second = mixed(
        module_stages,
        prepared,
        "second",
        weights={"prose": 0.2, "code": 0.8},
        continues=continuing(first, READ),
    )
    phases = [
        {"end": 0.2},
        {"end": 0.8, "weights": {"prose": 1}},
        {"weights": {"code": 1}},
    ]
    third = mixed(
        module_stages,
        prepared,
        "third",
        {"none": {"weight": 0.0}, **MIXTURE},
        phases=phases,
        continues=continuing(second, 60, seed=5),
    )
    assert np.array_equal(
        tokens_read(third, np.arange(READ)), tokens_read(first, np.arange(READ))
    )
    assert np.array_equal(
        tokens_read(third, np.arange(60)), tokens_read(second, np.arange(60), seed=5)
    )
    assert len(third.phases) == 4
    assert third.phases[2:] == [[0, 40, 0], [0, 0, 25]]
    assert third.phase_ends() == [25, 100, 125]  # the first one was over already
    assert max(readings(third, np.arange(third.rows)).values()) == 1
    positions = third.order(9).positions(np.arange(third.rows))
    assert third.order(9).rows(positions).tolist() == list(range(third.rows))
    assert [earlier.positions for earlier in third.sets_before()] == [60, READ]
    assert [earlier.fingerprint for earlier in third.sets_before()] == [
        second.fingerprint,
        first.fingerprint,
    ]


def test_documents_are_excluded_from_new_rows_only_or_from_all(
    module_stages: Any, prepared: dict[str, Path], tmp_path: Path
) -> None:
    before = mixed(module_stages, prepared, "before")
    continues = continuing(before, READ)
    plain = mixed(module_stages, prepared, "same", continues=continues)
    ids = [
        piece["id"]
        for piece in plain.pieces(np.arange(READ - 1, plain.rows)).to_pylist()
    ]
    in_both_parts = {
        piece["id"] for piece in plain.pieces(np.arange(READ)).to_pylist()
    } & {piece["id"] for piece in plain.pieces(np.arange(READ, plain.rows)).to_pylist()}
    document = sorted(in_both_parts)[0]
    assert document in ids
    excluded = tmp_path / "ids"
    excluded.write_text(f"{document.hex()}\n")
    later = mixed(
        module_stages,
        prepared,
        "later",
        continues={**continues, "exclude": str(excluded)},
    )
    rows = np.unique(plain.rows_of_documents([document])["row"].to_numpy())
    assert later.withheld.tolist() == [row for row in rows.tolist() if row >= READ]
    assert np.array_equal(later.read(np.arange(READ)), plain.read(np.arange(READ)))
    assert later.ledger([document])["reason"].to_pylist() == [None]  # it was read
    last = later.order(SEED).total - 2
    third = mixed(
        module_stages,
        prepared,
        "later-again",
        weights={"prose": 0.1, "code": 0.9},
        continues={
            **continuing(later, last),
            "continues": {**continues, "exclude": str(excluded)},
        },
    )
    assert np.array_equal(
        tokens_read(third, np.arange(last)), tokens_read(later, np.arange(last))
    )
    assert third.withheld.size
    assert third.rows_of_documents([document])["row"].to_numpy().max() < READ
    everywhere = mixed(
        module_stages,
        prepared,
        "everywhere",
        continues=continues,
        exclude=str(excluded),
    )
    assert everywhere.withheld.tolist() == rows.tolist()
    again = mixed(
        module_stages,
        prepared,
        "again",
        continues=continuing(everywhere, READ),
        exclude=str(excluded),
    )
    assert np.array_equal(
        tokens_read(again, np.arange(READ)), tokens_read(everywhere, np.arange(READ))
    )


def test_impossible_continuation_is_rejected(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    before = mixed(module_stages, prepared, "before")
    continues = continuing(before, READ)
    with pytest.raises(MixError, match="first 37 rows"):
        mixed(module_stages, prepared, "other-seed", seed=4, continues=continues)
    with pytest.raises(MixError, match=r"mix\.tokens .*37 rows.* 37 "):
        mixed(module_stages, prepared, "short", tokens=37 * LENGTH, continues=continues)
    with pytest.raises(MixError, match=r"sources\.code: .* 3[78] rows"):
        mixed(
            module_stages,
            prepared,
            "fewer",
            {**MIXTURE, "code": {"weight": 0.3}},
            continues=continues,
        )
    with pytest.raises(MixError, match=r"code.* too few; raise its max_ep"):
        mixed(
            module_stages,
            prepared,
            "much",
            weights={"code": 1},
            tokens=16_000,
            continues=continues,
        )
    moved = mixed(
        module_stages,
        prepared,
        "moved",
        weights={"code": 1},
        tokens=5000,
        continues=continues,
        on_shortfall="error",
    )
    assert moved.phases[1][0] == 0
    with pytest.raises(ValueError, match="beginning of it"):
        Continues.model_validate({**continues, "rows": 4000})
    with pytest.raises(ValueError, match="continues needs packing: stream"):
        mixed(module_stages, prepared, "fit", packing="best_fit", continues=continues)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.lists(st.integers(0, 30), min_size=3, max_size=3), min_size=1, max_size=3
    ).filter(lambda phases: all(map(sum, phases))),
    st.integers(0, 9),
    st.integers(0, 9),
    st.data(),
)
def test_row_numbers_follow_the_training_order_for_any_chain_of_phases(
    phases: list[list[int]], mix_seed: int, seed: int, data: st.DataObject
) -> None:
    """Row numbers of a source follow its training order, and kept rows are its first
    positions.
    """
    names, before, orders_before = ("a", "b", "c"), None, ()
    tables = tuple(map(tuple, phases))
    for _ in range(2):
        shards = Shards(mix_seed, names, tables, 10, (1, 1, 1), before)
        order, total = (
            Order.of_phases(tables, seed, len(orders_before)),
            sum(map(sum, tables)),
        )
        rows_of_source = [sum(phase[source] for phase in tables) for source in range(3)]
        reach = [
            rows_of_source[source]
            if before is None
            else max(rows_of_source[source], before.reach(source))
            for source in range(3)
        ]
        numbers = [
            np.arange(reach[source] + 2 if before else rows_of_source[source])
            for source in range(3)
        ]
        row_at = {
            int(place): (source, row)
            for source in range(3)
            for row, place in enumerate(shards.places(source, numbers[source]))
        }
        row_at.pop(-1, None)
        # every place has one row, and no row two
        assert sorted(row_at) == list(range(total))
        read = [row_at[int(row)] for row in order.rows(np.arange(total))]
        assert sources_of_rows(tables, np.arange(total), orders_before).tolist() == [
            row_at[row][0] for row in range(total)
        ]
        rows = data.draw(st.integers(1, total), label="rows")
        following = Before(tables, orders_before, rows, seed, (0, 1, 2), before)
        for source in range(3):
            turn = [row for of, row in read if of == source]
            assert following.numbers(
                source, names[source], np.array(turn, dtype=np.int64), mix_seed
            ).tolist() == list(range(len(turn)))
        kept, orders = following.kept()
        assert sum(map(sum, kept)) == rows
        assert [sum(column) for column in zip(*kept, strict=True)] == [
            sum(of == source for of, _ in read[:rows]) for source in range(3)
        ]
        next_phase = data.draw(
            st.lists(st.integers(0, 20), min_size=3, max_size=3).filter(any),
            label="more",
        )
        tables, orders_before, before = (*kept, tuple(next_phase)), orders, following


def test_rows_before_a_place_agree_with_ranks() -> None:
    counts = [7, 0, 3, 5]
    for place in range(16):
        assert rows_before(counts, place) == [
            sum(
                int(rank(counts, np.array(source), np.array(row))) < place
                for row in range(count)
            )
            for source, count in enumerate(counts)
        ]


def test_section_accounts_for_sources_added_later() -> None:
    section = Continues(
        rows=3, sources=("a",), phases=((4,),), seed=1, fingerprint="f", digest="d"
    )
    continued = before_of(section, ["0", "a", "b"])
    assert continued is not None
    assert continued.phases == ((0, 4, 0),)
    assert continued.kept() == (((0, 3, 0),), ((0, 4, 0),))
    assert continued.sources == (-1, 0, -1)
