"""The stage `mix`, on two small sources that went through all earlier stages."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from gristmill.dataprep.conservation import check_conservation
from gristmill.tokenize.document_sampling import id_words
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.tokenize.mixing import ledger, streams
from gristmill.tokenize.mixing.quotas import MixError
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import LEDGER
from tests.packed_sets import verify

LENGTH = 32
MIXTURE = {"prose": {"weight": 0.7}, "code": {"weight": 0.3, "max_epochs": 4.0}}


def clusters(documents: pa.Table) -> dict[str, Any]:
    """Group documents whose locators end alike into near-duplicates; `code` is
    unjudged.
    """
    ends = [locator[-1] for locator in documents["locator"].to_pylist()]
    prose = [
        source == "prose"
        for source in documents["source"].cast(pa.string()).to_pylist()
    ]
    names = [
        end.encode() * 16 if judged else None
        for end, judged in zip(ends, prose, strict=True)
    ]
    return {
        "cluster": pa.array(names, pa.binary(16)),
        "cluster_size": pa.array(
            [10 if judged else None for judged in prose], pa.int64()
        ),
    }


def quality(documents: pa.Table) -> dict[str, Any]:
    """Score documents 0.0 to 0.9 by their last digit; drop locators ending in 7, leave
    those in 6 unscored.
    """
    digits = [int(locator[-1]) for locator in documents["locator"].to_pylist()]
    return {
        "keep": [digit != 7 for digit in digits],
        "quality": pa.array(
            [None if digit == 6 else digit / 10 for digit in digits], pa.float64()
        ),
    }


@pytest.fixture(scope="module")
def prepared(module_stages: Any) -> dict[str, Path]:
    """Inputs of `mix`: ingest, dedup, quality, tokenizer and tokenize."""
    return prepare(module_stages, "", all_documents(module_stages), shards=3)


def all_documents(stages: Any) -> list[tuple[str, str, str]]:
    return [*stages.documents("prose", 120), *stages.documents("code", 10)]


def prepare(
    stages: Any, prefix: str, documents: list[tuple[str, str, str]], shards: int
) -> dict[str, Path]:
    inputs = {"ingest": stages.ingest(f"{prefix}ingest", documents, shards)}
    inputs["dedup"] = stages.annotate(f"{prefix}dedup", inputs["ingest"], clusters)
    inputs["quality"] = stages.annotate(f"{prefix}quality", inputs["ingest"], quality)
    stages.tokenizer(f"{prefix}tokenizer", inputs, ["prose", "code"])
    inputs["tokenizer"] = stages.root / f"{prefix}tokenizer"
    stages.tokenize(f"{prefix}tokenize", inputs)
    inputs["tokenize"] = stages.root / f"{prefix}tokenize"
    return inputs


def mixed(
    stages: Any, prepared: dict[str, Path], name: str = "mix", **section: Any
) -> PackedSet:
    """Return a packed set of 4,000 tokens, mixed once per name."""
    if not (stages.root / name / "packed.json").exists():
        stages.mix(
            name,
            prepared,
            MIXTURE,
            tokens=4000,
            sequence_length=LENGTH,
            validation=0.15,
            shard_rows=50,
            **section,
        )
    return PackedSet(stages.root / name)


def texts(prepared: dict[str, Path]) -> dict[bytes, str]:
    tables = [
        pq.read_table(path, columns=["id", "text"])
        for path in sorted(prepared["ingest"].glob("part-*"))
    ]
    table = pa.concat_tables(tables)
    return dict(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))


def test_rows_per_source_match_the_weights_exactly(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    """4,000 tokens are 125 rows of 32: 0.7 of them are 87.5 and 0.3 are 37.5."""
    packed = mixed(module_stages, prepared)
    assert packed.sources == ["prose", "code"]
    assert packed.rows == 125
    assert packed.rows_per_source in ([88, 37], [87, 38])
    assert [shard["rows"] for shard in packed.manifest["train"]["shards"]] == [
        50,
        50,
        25,
    ]
    assert packed.read(np.arange(125)).shape == (125, LENGTH)
    verify(packed, deep=True)


def test_rows_hold_the_tokens_of_the_documents_in_their_pieces(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    packed, tokenizer, originals = (
        mixed(module_stages, prepared),
        load(prepared["tokenizer"]),
        texts(prepared),
    )
    tokens, pieces = (
        packed.read(np.arange(packed.rows)),
        packed.pieces(np.arange(packed.rows)).to_pylist(),
    )
    position = dict.fromkeys(range(packed.rows), 0)
    for piece in pieces:
        document_tokens = [
            *tokenizer.encode([originals[piece["id"]]])[0].ids,
            tokenizer.eos,
        ]
        piece_tokens = tokens[
            piece["row"], piece["start"] : piece["start"] + piece["length"]
        ].tolist()
        assert (
            piece_tokens
            == document_tokens[piece["offset"] : piece["offset"] + piece["length"]]
        )
        assert position[piece["row"]] == piece["start"]
        assert packed.source_of(np.array([piece["row"]])).tolist() == [piece["source"]]
        position[piece["row"]] += piece["length"]
    assert set(position.values()) == {LENGTH}


def test_rows_of_a_source_lose_and_repeat_no_token(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    packed = mixed(module_stages, prepared)
    parts_by_copy: dict[tuple[bytes, int], list[tuple[int, int]]] = {}
    for piece in packed.pieces(np.arange(packed.rows)).to_pylist():
        parts_by_copy.setdefault((piece["id"], piece["copy"]), []).append(
            (piece["offset"], piece["length"])
        )
    assert (
        sum(length for parts in parts_by_copy.values() for _, length in parts) == 4000
    )
    for parts in parts_by_copy.values():
        for (offset, length), (following, _) in zip(
            sorted(parts), sorted(parts)[1:], strict=False
        ):
            assert offset + length == following
        assert min(parts)[0] == 0


def test_every_prefix_of_the_files_keeps_the_mixture(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    packed = mixed(module_stages, prepared)
    sources = packed.source_of(np.arange(packed.rows))
    for source, rows in enumerate(packed.rows_per_source):
        rows_so_far = np.cumsum(sources == source)
        assert (
            np.abs(
                rows_so_far - np.arange(1, packed.rows + 1) * rows / packed.rows
            ).max()
            <= 0.5
        )


def packed_as(
    stages: Any, prepared: dict[str, Path], length: int, **section: Any
) -> tuple[PackedSet, dict[str, Any]]:
    name = "-".join([str(length), *map(str, section.values())])
    sources = {"prose": {"weight": 0.7}, "code": {"weight": 0.3, "max_epochs": 8.0}}
    summary = stages.mix(
        name,
        prepared,
        sources,
        tokens=40 * length,
        sequence_length=length,
        validation=0.15,
        shard_rows=30,
        **section,
    )
    return PackedSet(stages.root / name), summary


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_every_packing_meets_quotas_and_agrees_with_its_pieces(
    module_stages: Any, prepared: dict[str, Path], packing: str
) -> None:
    length = 200
    packed, summary = packed_as(module_stages, prepared, length, packing=packing)
    tokenizer, originals, rows = (
        load(prepared["tokenizer"]),
        texts(prepared),
        np.arange(packed.rows),
    )
    tokens, boundaries, positions = (
        packed.read(rows),
        packed.boundaries(rows),
        packed.positions(rows),
    )
    verify(packed, deep=True)
    tokens_by_source = dict.fromkeys(packed.sources, 0)
    filled, splits = [0] * packed.rows, 0
    for piece in packed.pieces(rows).to_pylist():
        row, end = piece["row"], piece["start"] + piece["length"]
        document_tokens = [
            *tokenizer.encode([originals[piece["id"]]])[0].ids,
            tokenizer.eos,
        ]
        assert (
            tokens[row, piece["start"] : end].tolist()
            == document_tokens[piece["offset"] : piece["offset"] + piece["length"]]
        )
        assert positions[row, piece["start"] : end].tolist() == list(
            range(piece["length"])
        )
        assert piece["start"] == filled[row]
        tokens_by_source[packed.sources[piece["source"]]] += piece["length"]
        filled[row] = end
        splits += piece["offset"] + piece["length"] < len(document_tokens)
    assert boundaries.filled().tolist() == filled
    padding = positions < 0
    assert (tokens[padding] == tokenizer.pad).all()
    assert tokens_by_source == {"prose": 28 * length, "code": 12 * length}
    assert (summary.tokens, summary.rows) == (40 * length, packed.rows)
    assert summary.padding_tokens == padding.sum() == packed.rows * length - 40 * length
    assert summary.realised["prose"].share == pytest.approx(0.7)
    if packing == "stream":
        assert packed.rows == 40
    else:
        assert (
            splits
            <= sum(
                len(tokenizer.encode([originals[i]])[0].ids) >= length
                for i in originals
            )
            + 2
        )
    assert summary.packing == packing
    for key in ("rows", "padding_tokens", "split_documents"):
        assert getattr(summary.packing_cost, key) == sum(
            getattr(part, key) for part in summary.realised.values()
        )


def test_validation_rows_do_not_depend_on_the_packing(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    sets = [
        packed_as(module_stages, prepared, 200, packing=packing)[0]
        for packing in ("stream", "best_fit")
    ]
    for source in ("prose", "code"):
        assert np.array_equal(sets[0].validation(source), sets[1].validation(source))
        assert (sets[0].validation_boundaries(source).filled() == 200).all()


def test_near_duplicates_never_straddle_the_validation_split(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    """Prose has 9 clusters (those ending in 7 are dropped); code was not judged, so
    each document stands alone.
    """
    packed = mixed(module_stages, prepared)
    cluster = {}
    for path in sorted(prepared["dedup"].glob("part-*")):
        table = pq.read_table(path)
        cluster.update(
            zip(table["id"].to_pylist(), table["cluster"].to_pylist(), strict=True)
        )
    trained = {
        cluster[i] or i for i in packed.pieces(np.arange(packed.rows))["id"].to_pylist()
    }
    for source in packed.sources:
        held_out = {
            cluster[i] or i for i in packed.validation_pieces(source)["id"].to_pylist()
        }
        assert held_out
        assert not held_out & trained


def test_validation_rows_do_not_depend_on_the_seed_or_the_weights(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    first = mixed(module_stages, prepared)
    module_stages.mix(
        "other",
        prepared,
        {"prose": {"weight": 1}, "code": {"weight": 2, "max_epochs": 5}},
        seed=99,
        tokens=2000,
        sequence_length=LENGTH,
        validation=0.15,
    )
    second = PackedSet(module_stages.root / "other")
    for source in first.sources:
        assert np.array_equal(first.validation(source), second.validation(source))
        assert len(first.validation(source)) > 0
    assert not np.array_equal(first.read(np.arange(20)), second.read(np.arange(20)))


def test_validation_records_the_bytes_of_its_text(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    packed, tokenizer = mixed(module_stages, prepared), load(prepared["tokenizer"])
    for source in packed.sources:
        entry, rows = packed.manifest["validation"][source], packed.validation(source)
        text = "".join(
            tokenizer.decode([t for t in row.tolist() if t != tokenizer.eos])
            for row in rows
        )
        assert entry["bytes"] == len(text.encode())
        assert entry["tokens"] == rows.size
        assert 0 <= entry["cut_tokens"] < LENGTH


def test_validation_is_limited_by_max_validation_rows(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    summary = module_stages.mix(
        "capped",
        prepared,
        MIXTURE,
        tokens=2000,
        sequence_length=LENGTH,
        validation=0.15,
        max_validation_rows=1,
    )
    packed = PackedSet(module_stages.root / "capped")
    assert [len(packed.validation(source)) for source in packed.sources] == [1, 1]
    assert summary.counts["sources"]["prose"]["dropped"]["validation_rest"] > 0


def test_every_document_is_accounted_for(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    packed = mixed(module_stages, prepared)
    summary = module_stages.mix(
        "again", prepared, MIXTURE, tokens=4000, sequence_length=LENGTH, validation=0.15
    )
    counts = summary.counts
    check_conservation(counts, "mix")
    assert counts["read"] == 130 - 13
    kept = {*packed.pieces(np.arange(packed.rows))["id"].to_pylist()}
    for source in packed.sources:
        kept |= {*packed.validation_pieces(source)["id"].to_pylist()}
    assert counts["kept"] == len(kept)
    realised = summary.realised
    assert sum(part.tokens for part in realised.values()) == 4000
    assert realised["prose"].share == packed.rows_per_source[0] / 125
    assert summary.requested["prose"]["share"] == pytest.approx(0.7)


def test_small_sources_are_repeated_in_new_orders_up_to_max_epochs(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    packed = mixed(module_stages, prepared)
    realised = packed.manifest["realised"]["code"]
    assert 1.5 < realised["epochs"] < 4
    pieces = packed.pieces(np.arange(packed.rows)).to_pylist()
    copies = {}
    for piece in pieces:
        copies.setdefault((piece["source"], piece["id"]), set()).add(piece["copy"])
    per_document = [
        len(copy_numbers) for (source, _), copy_numbers in copies.items() if source == 1
    ]
    assert max(per_document) == int(np.ceil(realised["epochs"]))
    assert min(per_document) >= int(realised["epochs"])
    assert all(
        copy_numbers == {0}
        for (source, _), copy_numbers in copies.items()
        if source == 0
    )


def test_shortfall_is_an_error_with_the_largest_possible_mix(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    with pytest.raises(MixError) as caught:
        module_stages.mix(
            "short",
            prepared,
            {"prose": {"weight": 0.2}, "code": {"weight": 0.8}},
            tokens=64_000,
            sequence_length=LENGTH,
        )
    message = str(caught.value)
    assert "code: weight 0.8 asks for 51200 tokens" in message
    assert "prose: weight 0.2 asks for 12800 tokens" in message
    max_tokens = int(message.split("ask for at most ")[1].split()[0])
    module_stages.mix(
        "most",
        prepared,
        {"prose": {"weight": 0.2}, "code": {"weight": 0.8}},
        tokens=max_tokens,
        sequence_length=LENGTH,
    )
    with pytest.raises(MixError):
        module_stages.mix(
            "over",
            prepared,
            {"prose": {"weight": 0.2}, "code": {"weight": 0.8}},
            tokens=max_tokens + LENGTH,
            sequence_length=LENGTH,
        )
    assert not (module_stages.root / "short" / "packed.json").exists()


def test_where_condition_selects_by_measured_columns(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    """Of 12 prose documents per last digit, digits 3 to 9 but 6 (never scored) and 7
    (dropped before) are taken.
    """
    condition = "quality >= 0.3 AND cluster_size > 1 -- a comment"
    summary = module_stages.mix(
        "where",
        prepared,
        {"prose": {"where": condition}, "code": {}},
        tokens=1000,
        sequence_length=LENGTH,
        validation=0.0,
    )
    dropped = summary.counts["sources"]["prose"]["dropped"]
    assert dropped["where"] == 3 * 12
    assert dropped["where_unknown"] == 12
    packed = PackedSet(module_stages.root / "where")
    locators = locators_of(prepared)
    digits = {
        locators[i][-1]
        for i in packed.pieces(np.arange(packed.rows))["id"].to_pylist()
        if locators[i].startswith("prose")
    }
    assert digits <= set("34589")


def test_draw_below_the_validation_share_is_exactly_what_is_held_out(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    """Without clusters the split and the column are hashes of the same ids."""
    inputs = {name: path for name, path in prepared.items() if name != "dedup"}

    def held_out(name: str, condition: str) -> Any:
        summary = module_stages.mix(
            name,
            inputs,
            {"prose": {"where": condition, "weight": 0.0}, "code": {}},
            tokens=320,
            sequence_length=LENGTH,
            validation=0.3,
        )
        return summary.counts["sources"]["prose"], summary.validation["prose"]

    whole, rows = held_out("draws", "true")
    counts, same_rows = held_out("draws-below", "draw < 0.3")
    assert same_rows == rows
    assert counts["kept"] == whole["kept"] > 0
    assert counts["dropped"]["where"] == sum(
        number
        for reason, number in whole["dropped"].items()
        if not reason.startswith("validation")
    )


def locators_of(prepared: dict[str, Path]) -> dict[bytes, str]:
    tables = [
        pq.read_table(path, columns=["id", "locator"])
        for path in sorted(prepared["ingest"].glob("part-*"))
    ]
    table = pa.concat_tables(tables)
    return dict(zip(table["id"].to_pylist(), table["locator"].to_pylist(), strict=True))


@pytest.mark.parametrize(
    ("condition", "complaint"),
    [
        ("qualty >= 0.3", "qualty"),
        ("quality >=", "syntax error"),
        ("quality); SELECT (1", "more than one statement"),
        ("read_text('/etc/hostname') = ''", "read_text"),
    ],
)
def test_invalid_where_condition_names_source_and_columns(
    module_stages: Any, prepared: dict[str, Path], condition: str, complaint: str
) -> None:
    with pytest.raises(MixError) as caught:
        module_stages.mix(
            "wrong",
            prepared,
            {"prose": {"where": condition}, "code": {}},
            tokens=1000,
            sequence_length=LENGTH,
        )
    message = str(caught.value)
    assert message.startswith(f"sources.prose.where: {condition!r}")
    assert complaint in message
    assert "bytes, cluster, cluster_size, draw, quality, tokens" in message


def test_bytes_do_not_depend_on_workers_or_sharding(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    mixed(module_stages, prepared)
    module_stages.mix(
        "parallel",
        prepared,
        MIXTURE,
        workers=2,
        tokens=4000,
        sequence_length=LENGTH,
        validation=0.15,
        shard_rows=50,
    )
    documents = all_documents(module_stages)
    random.Random(5).shuffle(documents)
    resharded = prepare(module_stages, "other-", documents, shards=2)
    module_stages.mix(
        "resharded",
        resharded,
        MIXTURE,
        tokens=4000,
        sequence_length=LENGTH,
        validation=0.15,
        shard_rows=50,
    )
    expected, resharded_files = (
        module_stages.files("mix"),
        module_stages.files("resharded"),
    )
    assert module_stages.files("parallel") == expected
    # Only the ledger records the shards of documents.
    assert {**resharded_files, LEDGER: b""} == {**expected, LEDGER: b""}
    whereabouts = ["shard", "row"]
    assert (
        pq.read_table(module_stages.root / "resharded" / LEDGER)
        .drop_columns(whereabouts)
        .equals(
            pq.read_table(module_stages.root / "mix" / LEDGER).drop_columns(whereabouts)
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_bytes_do_not_depend_on_partitions(
    module_stages: Any,
    prepared: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    packing: str,
) -> None:
    """Repeated sources, one by an expression; two phases; excluded documents; sixteen
    partitions.
    """
    excluded = module_stages.root / "some.ids"
    excluded.write_text(
        "\n".join(document_id.hex() for document_id in sorted(texts(prepared))[::17])
    )
    sources = {
        "prose": {"max_epochs": 3.0, "epochs": "tokens / 60.0"},
        "code": {"max_epochs": 30.0},
    }
    options = {
        "tokens": 6000,
        "sequence_length": LENGTH,
        "packing": packing,
        "validation": 0.15,
        "shard_rows": 50,
        "exclude": str(excluded),
        "phases": [
            {"end": 0.6, "weights": {"prose": 0.8, "code": 0.2}},
            {"weights": {"prose": 0.3, "code": 0.7}},
        ],
    }
    one_partition = module_stages.mix(f"{packing}-whole", prepared, sources, **options)
    monkeypatch.setattr(streams, "PARTITION_BYTES", 500)
    many_partitions = module_stages.mix(f"{packing}-cut", prepared, sources, **options)
    assert (
        len([*(module_stages.root / f"{packing}-cut.work" / "sort-0").iterdir()]) == 16
    )
    assert many_partitions == one_partition
    assert module_stages.files(f"{packing}-cut") == module_stages.files(
        f"{packing}-whole"
    )


def test_large_ledger_is_split_by_the_leading_bits_of_ids(
    module_stages: Any, prepared: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    unsplit = mixed(module_stages, prepared)
    monkeypatch.setattr(streams, "PARTITION_BYTES", 500)
    monkeypatch.setattr(ledger, "FILE_DOCUMENTS", 30)
    packed = mixed(module_stages, prepared, "tables")
    assert packed.manifest["ledgers"] == 4
    tables = [
        pq.read_table(packed.folder / f"documents-{number:05d}.parquet")
        for number in range(4)
    ]
    assert all(len(table) < 60 for table in tables)
    entries = pq.read_table(unsplit.folder / LEDGER)
    assert pa.concat_tables(tables).equals(entries)
    document_ids = entries["id"].to_pylist()[::9]
    assert packed.ledger(document_ids[::-1]).equals(unsplit.ledger(document_ids))
    assert packed.has_ledger
    assert len(packed.ledger([b"?" * 16])) == 0


def test_ledger_records_the_fate_of_every_document(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    packed = mixed(module_stages, prepared)
    shards = sorted(prepared["ingest"].glob("part-*"))
    ledger = pq.read_table(packed.folder / LEDGER).to_pylist()
    assert len(ledger) == 130 - 13
    assert [entry["id"] for entry in ledger] == sorted(entry["id"] for entry in ledger)
    for entry in ledger:
        document = (
            pq.read_table(shards[entry["shard"]]).slice(entry["row"], 1).to_pylist()[0]
        )
        assert (document["id"], document["source"]) == (
            entry["id"],
            packed.sources[entry["source"]],
        )
    trained = {*packed.pieces(np.arange(packed.rows))["id"].to_pylist()}
    held_out = {
        document_id
        for source in packed.sources
        for document_id in packed.validation_pieces(source)["id"].to_pylist()
    }
    used = {
        entry["id"]: entry["held_out"] for entry in ledger if entry["reason"] is None
    }
    assert used == {**dict.fromkeys(trained, False), **dict.fromkeys(held_out, True)}
    unused = {entry["reason"] for entry in ledger} - {None}
    assert unused <= {"quota", "validation_rest"}
    document_ids = [ledger[40]["id"], b"?" * 16]
    assert packed.ledger(document_ids).to_pylist() == [ledger[40]]


def test_rows_of_a_document_are_found_through_the_index_of_each_shard(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    packed = mixed(module_stages, prepared)
    pieces = packed.pieces(np.arange(packed.rows))
    assert len({*pieces["id"].to_pylist()}) > 40
    for document_id in {*pieces["id"].to_pylist()}:
        assert packed.rows_of_documents([document_id]).equals(
            pieces.filter(pc.equal(pieces["id"], pa.scalar(document_id, pa.binary(16))))
        )
    held_out = packed.validation_pieces("prose")
    document_id = held_out["id"][0].as_py()
    assert packed.validation_rows_of_documents("prose", [document_id])[
        "row"
    ].to_pylist() == [
        piece["row"] for piece in held_out.to_pylist() if piece["id"] == document_id
    ]
    assert len(packed.validation_rows_of_documents("code", [document_id])) == 0


def test_resumed_mix_writes_the_same_bytes(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    mixed(module_stages, prepared)
    out, work = (
        module_stages.root / "interrupted",
        module_stages.root / "interrupted.work",
    )
    shutil.copytree(module_stages.root / "mix", out)
    shutil.copytree(module_stages.root / "mix.work", work)
    for record in (work / "rows").iterdir():
        record.write_text(
            record.read_text().replace(str(module_stages.root / "mix"), str(out))
        )
    (out / "packed.json").unlink()
    (out / "train-00001.bin").unlink()
    (work / "rows" / "train-00002.json").unlink()
    (out / "train-00002.bin").write_bytes(b"half")
    untouched = (out / "train-00000.bin").stat().st_mtime_ns
    mixed(module_stages, prepared, "interrupted")
    assert module_stages.files("interrupted") == module_stages.files("mix")
    assert (out / "train-00000.bin").stat().st_mtime_ns == untouched


@pytest.mark.slow
def test_large_vocabulary_is_packed_in_32_bits(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    """The same documents with ids shifted beyond 16 bits, and a tokenizer that lists
    them.
    """
    import json

    shift, inputs = 70_000, dict(prepared)
    for stage in ("tokenizer", "tokenize"):
        inputs[stage] = module_stages.root / f"large-{stage}"
        shutil.copytree(prepared[stage], inputs[stage])
    for path in inputs["tokenize"].glob("*.tokens.bin"):
        (np.fromfile(path, "<u2").astype("<u4") + shift).tofile(path)
    file = inputs["tokenizer"] / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["far"] = shift + 500
    file.write_text(json.dumps(content))
    np.save(inputs["tokenizer"] / "token_bytes.npy", np.ones(shift + 501, np.uint16))
    module_stages.mix(
        "large",
        inputs,
        MIXTURE,
        tokens=4000,
        sequence_length=LENGTH,
        validation=0.15,
        shard_rows=50,
    )
    small, large = (
        mixed(module_stages, prepared),
        PackedSet(module_stages.root / "large"),
    )
    assert large.dtype == np.dtype("<u4")
    rows = np.arange(125)
    expected = small.read(rows)
    eos = small.manifest["tokenizer"]["eos"]
    assert np.array_equal(
        large.read(rows), np.where(expected == eos, eos, expected + shift)
    )
    verify(large, deep=True)


def test_sources_without_validation_rows_are_warned_about(
    module_stages: Any, prepared: dict[str, Path]
) -> None:
    module_stages.mix(
        "quiet", prepared, MIXTURE, tokens=1000, sequence_length=LENGTH, validation=1e-9
    )
    assert any(
        "no validation rows for prose, code" in message
        for message in module_stages.warnings("quiet")
    )
    assert PackedSet(module_stages.root / "quiet").validation("prose").shape == (
        0,
        LENGTH,
    )


def test_document_ids_round_trip_through_words() -> None:
    from gristmill.tokenize.document_sampling import word_ids

    ids = pa.array([bytes(range(k, k + 16)) for k in (0, 100, 240)], pa.binary(16))
    assert word_ids(id_words(ids[1:])).to_pylist() == ids[1:].to_pylist()
