"""The stage `mix`, on two small sources that went through all earlier stages."""

from __future__ import annotations

import random
import shutil
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from gristmill.dataprep.conservation import check_conservation
from gristmill.dataprep.documents import Inputs
from gristmill.tokenize.document_sampling import id_words, word_ids
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.tokenize.mixing import ledger, streams
from gristmill.tokenize.mixing.mix_summary import MixSummary
from gristmill.tokenize.mixing.quotas import MixError
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import LEDGER
from tests.dataprep.document_shards import rows_by_id
from tests.packed_sets import part_of, tokens_of, verify

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
def prepared(module_stages: Any) -> Inputs:
    """Inputs of `mix`: ingest, dedup, quality, tokenizer and tokenize."""
    return prepare(module_stages, "", all_documents(module_stages), shards=3)


def all_documents(stages: Any) -> list[tuple[str, str, str]]:
    return [*stages.documents("prose", 120), *stages.documents("code", 10)]


def prepare(
    stages: Any, prefix: str, documents: list[tuple[str, str, str]], shards: int
) -> Inputs:
    inputs = {"ingest": stages.ingest(f"{prefix}ingest", documents, shards)}
    inputs["dedup"] = stages.annotate(f"{prefix}dedup", inputs["ingest"], clusters)
    inputs["quality"] = stages.annotate(f"{prefix}quality", inputs["ingest"], quality)
    return stages.tokenized(inputs, ["prose", "code"], prefix)


@pytest.fixture
def mix(module_stages: Any, prepared: Inputs) -> Any:
    """Mix, and return the summary and the packed set."""
    defaults = {"tokens": 4000, "sequence_length": LENGTH, "validation": 0.15}

    def mixing(
        name: str,
        sources: dict[str, Any] = MIXTURE,
        inputs: Inputs = prepared,
        **section: Any,
    ) -> tuple[MixSummary, PackedSet]:
        summary = module_stages.mix(name, inputs, sources, **defaults | section)
        return summary, PackedSet(module_stages.root / name)

    return mixing


@pytest.fixture
def packed(mix: Any, module_stages: Any) -> PackedSet:
    """A packed set of 4,000 tokens, mixed once."""
    if not (module_stages.root / "mix" / "packed.json").exists():
        mix("mix", shard_rows=50)
    return PackedSet(module_stages.root / "mix")


def pieces_of(packed: PackedSet) -> list[dict[str, Any]]:
    return packed.pieces(np.arange(packed.rows)).to_pylist()


def trained_ids(packed: PackedSet) -> set[bytes]:
    return {piece["id"] for piece in pieces_of(packed)}


def held_out_ids(packed: PackedSet) -> set[bytes]:
    return {
        document
        for source in packed.sources
        for document in packed.validation_pieces(source)["id"].to_pylist()
    }


@pytest.fixture(scope="module")
def documents(prepared: Inputs) -> dict[bytes, list[int]]:
    """Tokens of every document by id, with the end of text."""
    tokenizer = load(prepared["tokenizer"])
    return {
        document: [*tokenizer.encode([row["text"]])[0].ids, tokenizer.eos]
        for document, row in rows_by_id(prepared["ingest"]).items()
    }


def test_rows_per_source_match_the_weights_exactly(packed: PackedSet) -> None:
    """4,000 tokens are 125 rows of 32: 0.7 of them are 87.5 and 0.3 are 37.5."""
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
    packed: PackedSet, documents: dict[bytes, list[int]]
) -> None:
    tokens, pieces = packed.read(np.arange(packed.rows)), pieces_of(packed)
    position = dict.fromkeys(range(packed.rows), 0)
    for piece in pieces:
        document = documents[piece["id"]]
        assert tokens_of(tokens, piece) == part_of(document, piece)
        assert position[piece["row"]] == piece["start"]
        assert packed.source_of(np.array([piece["row"]])).tolist() == [piece["source"]]
        position[piece["row"]] += piece["length"]
    assert set(position.values()) == {LENGTH}


def test_rows_of_a_source_lose_and_repeat_no_token(packed: PackedSet) -> None:
    parts_by_copy: dict[tuple[bytes, int], list[tuple[int, int]]] = {}
    for piece in pieces_of(packed):
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


def test_every_prefix_of_the_files_keeps_the_mixture(packed: PackedSet) -> None:
    sources = packed.source_of(np.arange(packed.rows))
    for source, rows in enumerate(packed.rows_per_source):
        rows_so_far = np.cumsum(sources == source)
        assert (
            np.abs(
                rows_so_far - np.arange(1, packed.rows + 1) * rows / packed.rows
            ).max()
            <= 0.5
        )


LONG_ROWS = {"tokens": 40 * 200, "sequence_length": 200, "shard_rows": 30}
LONG_MIXTURE = {"prose": {"weight": 0.7}, "code": {"weight": 0.3, "max_epochs": 8.0}}


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_every_packing_meets_quotas_and_agrees_with_its_pieces(
    mix: Any, documents: dict[bytes, list[int]], packing: str
) -> None:
    length = 200
    summary, packed = mix(packing, LONG_MIXTURE, packing=packing, **LONG_ROWS)
    rows = np.arange(packed.rows)
    tokens, positions = packed.read(rows), packed.positions(rows)
    verify(packed, deep=True)
    tokens_by_source = dict.fromkeys(packed.sources, 0)
    filled, splits = [0] * packed.rows, 0
    for piece in pieces_of(packed):
        row, end = piece["row"], piece["start"] + piece["length"]
        document = documents[piece["id"]]
        assert tokens_of(tokens, piece) == part_of(document, piece)
        assert positions[row, piece["start"] : end].tolist() == list(
            range(piece["length"])
        )
        assert piece["start"] == filled[row]
        tokens_by_source[packed.sources[piece["source"]]] += piece["length"]
        filled[row] = end
        splits += piece["offset"] + piece["length"] < len(document)
    assert packed.boundaries(rows).filled().tolist() == filled
    padding = positions < 0
    assert (tokens[padding] == packed.manifest["tokenizer"]["pad"]).all()
    assert tokens_by_source == {"prose": 28 * length, "code": 12 * length}
    assert (summary.tokens, summary.rows) == (40 * length, packed.rows)
    assert summary.padding_tokens == padding.sum() == packed.rows * length - 40 * length
    assert summary.realised["prose"].share == pytest.approx(0.7)
    if packing == "stream":
        assert packed.rows == 40
    else:
        assert (
            splits <= sum(len(document) > length for document in documents.values()) + 2
        )
    assert summary.packing == packing
    for key in ("rows", "padding_tokens", "split_documents"):
        assert getattr(summary.packing_cost, key) == sum(
            getattr(part, key) for part in summary.realised.values()
        )


def test_validation_rows_do_not_depend_on_the_packing(mix: Any) -> None:
    sets = [
        mix(packing, LONG_MIXTURE, packing=packing, **LONG_ROWS)[1]
        for packing in ("stream", "best_fit")
    ]
    for source in ("prose", "code"):
        assert np.array_equal(sets[0].validation(source), sets[1].validation(source))
        assert (sets[0].validation_boundaries(source).filled() == 200).all()


def test_near_duplicates_never_straddle_the_validation_split(
    prepared: Inputs, packed: PackedSet
) -> None:
    """Prose has 9 clusters (those ending in 7 are dropped); code was not judged, so
    each document stands alone.
    """
    cluster = {
        document: row["cluster"] or document
        for document, row in rows_by_id(prepared["dedup"]).items()
    }
    trained = {cluster[document] for document in trained_ids(packed)}
    for source in packed.sources:
        ids = packed.validation_pieces(source)["id"].to_pylist()
        assert ids
        assert trained.isdisjoint(cluster[document] for document in ids)


def test_validation_rows_do_not_depend_on_the_seed_or_the_weights(
    mix: Any, packed: PackedSet
) -> None:
    weights = {"prose": {"weight": 1}, "code": {"weight": 2, "max_epochs": 5}}
    _, other = mix("other", weights, seed=99, tokens=2000)
    for source in packed.sources:
        assert np.array_equal(packed.validation(source), other.validation(source))
        assert len(packed.validation(source)) > 0
    assert not np.array_equal(packed.read(np.arange(20)), other.read(np.arange(20)))


def test_validation_records_the_bytes_of_its_text(
    prepared: Inputs, packed: PackedSet
) -> None:
    tokenizer = load(prepared["tokenizer"])
    for source in packed.sources:
        entry, rows = packed.manifest["validation"][source], packed.validation(source)
        text = "".join(
            tokenizer.decode([t for t in row.tolist() if t != tokenizer.eos])
            for row in rows
        )
        assert entry["bytes"] == len(text.encode())
        assert entry["tokens"] == rows.size
        assert 0 <= entry["cut_tokens"] < LENGTH


def test_validation_is_limited_by_max_validation_rows(mix: Any) -> None:
    summary, packed = mix("capped", tokens=2000, max_validation_rows=1)
    assert [len(packed.validation(source)) for source in packed.sources] == [1, 1]
    assert summary.counts["sources"]["prose"]["dropped"]["validation_rest"] > 0


def test_every_document_is_accounted_for(mix: Any, packed: PackedSet) -> None:
    summary, _ = mix("again")
    counts = summary.counts
    check_conservation(counts, "mix")
    assert counts["read"] == 130 - 13
    assert counts["kept"] == len(trained_ids(packed) | held_out_ids(packed))
    realised = summary.realised
    assert sum(part.tokens for part in realised.values()) == 4000
    assert realised["prose"].share == packed.rows_per_source[0] / 125
    assert summary.requested["prose"]["share"] == pytest.approx(0.7)


def test_small_sources_are_repeated_in_new_orders_up_to_max_epochs(
    packed: PackedSet,
) -> None:
    realised = packed.manifest["realised"]["code"]
    assert 1.5 < realised["epochs"] < 4
    pieces = pieces_of(packed)
    copies: dict[bytes, set[int]] = {}
    for piece in pieces:
        if piece["source"] == 0:
            assert piece["copy"] == 0
        else:
            copies.setdefault(piece["id"], set()).add(piece["copy"])
    per_document = [*map(len, copies.values())]
    assert max(per_document) == int(np.ceil(realised["epochs"]))
    assert min(per_document) >= int(realised["epochs"])


def test_shortfall_is_an_error_with_the_largest_possible_mix(
    mix: Any, module_stages: Any
) -> None:
    weights = {"prose": {"weight": 0.2}, "code": {"weight": 0.8}}
    with pytest.raises(MixError) as caught:
        mix("short", weights, tokens=64_000)
    message = str(caught.value)
    assert "code: weight 0.8 asks for 51200 tokens" in message
    assert "prose: weight 0.2 asks for 12800 tokens" in message
    max_tokens = int(message.split("ask for at most ")[1].split()[0])
    mix("most", weights, tokens=max_tokens)
    with pytest.raises(MixError):
        mix("over", weights, tokens=max_tokens + LENGTH)
    assert not (module_stages.root / "short" / "packed.json").exists()


def test_where_condition_selects_by_measured_columns(
    mix: Any, prepared: Inputs
) -> None:
    """Of 12 prose documents per last digit, digits 3 to 9 but 6 (never scored) and 7
    (dropped before) are taken.
    """
    condition = "quality >= 0.3 AND cluster_size > 1 -- a comment"
    sources = {"prose": {"where": condition}, "code": {}}
    summary, packed = mix("where", sources, tokens=1000, validation=0.0)
    dropped = summary.counts["sources"]["prose"]["dropped"]
    assert dropped["where"] == 3 * 12
    assert dropped["where_unknown"] == 12
    documents = rows_by_id(prepared["ingest"])
    digits = {
        documents[document]["locator"][-1]
        for document in trained_ids(packed)
        if documents[document]["source"] == "prose"
    }
    assert digits <= set("34589")


def test_draw_below_the_validation_share_is_exactly_what_is_held_out(
    mix: Any, prepared: Inputs
) -> None:
    """Without clusters the split and the column are hashes of the same ids."""
    inputs = {name: path for name, path in prepared.items() if name != "dedup"}

    def held_out(name: str, condition: str) -> Any:
        sources = {"prose": {"where": condition, "weight": 0.0}, "code": {}}
        summary, _ = mix(name, sources, inputs, tokens=320, validation=0.3)
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
    mix: Any, condition: str, complaint: str
) -> None:
    with pytest.raises(MixError) as caught:
        mix("wrong", {"prose": {"where": condition}, "code": {}}, tokens=1000)
    message = str(caught.value)
    assert message.startswith(f"sources.prose.where: {condition!r}")
    assert complaint in message
    assert "bytes, cluster, cluster_size, draw, quality, tokens" in message


def test_bytes_do_not_depend_on_workers_or_sharding(
    mix: Any, module_stages: Any, packed: PackedSet
) -> None:
    mix("parallel", workers=2, shard_rows=50)
    documents = all_documents(module_stages)
    random.Random(5).shuffle(documents)
    resharded = prepare(module_stages, "other-", documents, shards=2)
    mix("resharded", inputs=resharded, shard_rows=50)
    expected = module_stages.files(packed.folder.name)
    resharded_files = module_stages.files("resharded")
    assert module_stages.files("parallel") == expected
    # Only the ledger records the shards of documents.
    assert {**resharded_files, LEDGER: b""} == {**expected, LEDGER: b""}
    whereabouts = ["shard", "row"]
    ledgers = (
        pq.read_table(module_stages.root / name / LEDGER).drop_columns(whereabouts)
        for name in ("resharded", "mix")
    )
    assert next(ledgers).equals(next(ledgers))


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_bytes_do_not_depend_on_partitions(
    mix: Any,
    module_stages: Any,
    documents: dict[bytes, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    packing: str,
) -> None:
    """Repeated sources, one by an expression; two phases; excluded documents; sixteen
    partitions.
    """
    excluded = module_stages.root / "some.ids"
    excluded.write_text(
        "\n".join(document_id.hex() for document_id in sorted(documents)[::17])
    )
    sources = {
        "prose": {"max_epochs": 3.0, "epochs": "tokens / 60.0"},
        "code": {"max_epochs": 30.0},
    }
    options = {
        "tokens": 6000,
        "packing": packing,
        "shard_rows": 50,
        "exclude": str(excluded),
        "phases": [
            {"end": 0.6, "weights": {"prose": 0.8, "code": 0.2}},
            {"weights": {"prose": 0.3, "code": 0.7}},
        ],
    }
    one_partition, _ = mix(f"{packing}-whole", sources, **options)
    monkeypatch.setattr(streams, "PARTITION_BYTES", 500)
    many_partitions, _ = mix(f"{packing}-cut", sources, **options)
    assert (
        len([*(module_stages.root / f"{packing}-cut.work" / "sort-0").iterdir()]) == 16
    )
    assert many_partitions == one_partition
    assert module_stages.files(f"{packing}-cut") == module_stages.files(
        f"{packing}-whole"
    )


def test_large_ledger_is_split_by_the_leading_bits_of_ids(
    mix: Any, packed: PackedSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PARTITION_BYTES", 500)
    monkeypatch.setattr(ledger, "FILE_DOCUMENTS", 30)
    _, split = mix("tables", shard_rows=50)
    assert split.manifest["ledgers"] == 4
    tables = [
        pq.read_table(split.folder / f"documents-{number:05d}.parquet")
        for number in range(4)
    ]
    assert all(len(table) < 60 for table in tables)
    entries = pq.read_table(packed.folder / LEDGER)
    assert pa.concat_tables(tables).equals(entries)
    document_ids = entries["id"].to_pylist()[::9]
    assert split.ledger(document_ids[::-1]).equals(packed.ledger(document_ids))
    assert split.has_ledger
    assert len(split.ledger([b"?" * 16])) == 0


def test_ledger_records_the_fate_of_every_document(
    prepared: Inputs, packed: PackedSet
) -> None:
    shards = sorted(prepared["ingest"].glob("part-*"))
    ledger = pq.read_table(packed.folder / LEDGER).to_pylist()
    assert len(ledger) == 130 - 13
    assert [entry["id"] for entry in ledger] == sorted(entry["id"] for entry in ledger)
    tables = [pq.read_table(shard).to_pylist() for shard in shards]
    for entry in ledger:
        document = tables[entry["shard"]][entry["row"]]
        assert document["id"] == entry["id"]
        assert document["source"] == packed.sources[entry["source"]]
    used = {
        entry["id"]: entry["held_out"] for entry in ledger if entry["reason"] is None
    }
    trained, held_out = trained_ids(packed), held_out_ids(packed)
    assert used == {**dict.fromkeys(trained, False), **dict.fromkeys(held_out, True)}
    unused = {entry["reason"] for entry in ledger} - {None}
    assert unused <= {"quota", "validation_rest"}
    document_ids = [ledger[40]["id"], b"?" * 16]
    assert packed.ledger(document_ids).to_pylist() == [ledger[40]]


def test_rows_of_a_document_are_found_through_the_index_of_each_shard(
    packed: PackedSet,
) -> None:
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
    mix: Any, module_stages: Any, packed: PackedSet
) -> None:
    out, work = (
        module_stages.root / "interrupted",
        module_stages.root / "interrupted.work",
    )
    shutil.copytree(packed.folder, out)
    shutil.copytree(module_stages.root / "mix.work", work)
    for record in (work / "rows").iterdir():
        record.write_text(record.read_text().replace(str(packed.folder), str(out)))
    (out / "packed.json").unlink()
    (out / "train-00001.bin").unlink()
    (work / "rows" / "train-00002.json").unlink()
    (out / "train-00002.bin").write_bytes(b"half")
    untouched = (out / "train-00000.bin").stat().st_mtime_ns
    mix("interrupted", shard_rows=50)
    assert module_stages.files("interrupted") == module_stages.files("mix")
    assert (out / "train-00000.bin").stat().st_mtime_ns == untouched


@pytest.mark.slow
def test_large_vocabulary_is_packed_in_32_bits(
    mix: Any, module_stages: Any, prepared: Inputs, packed: PackedSet
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
    _, large = mix("large", inputs=inputs)
    assert large.dtype == np.dtype("<u4")
    rows = np.arange(125)
    expected = packed.read(rows)
    eos = packed.manifest["tokenizer"]["eos"]
    assert np.array_equal(
        large.read(rows), np.where(expected == eos, eos, expected + shift)
    )
    verify(large, deep=True)


def test_sources_without_validation_rows_are_warned_about(
    mix: Any, module_stages: Any
) -> None:
    _, packed = mix("quiet", tokens=1000, validation=1e-9)
    assert any(
        "no validation rows for prose, code" in message
        for message in module_stages.warnings("quiet")
    )
    assert packed.validation("prose").shape == (0, LENGTH)


def test_document_ids_round_trip_through_words() -> None:
    ids = pa.array([bytes(range(k, k + 16)) for k in (0, 100, 240)], pa.binary(16))
    assert word_ids(id_words(ids[1:])).to_pylist() == ids[1:].to_pylist()
