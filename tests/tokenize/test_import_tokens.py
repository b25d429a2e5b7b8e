"""The stage `import_tokens`, on files written here byte by byte, and on our own
exports.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from gristmill.dataprep.documents import Inputs
from gristmill.dataprep.readers.ingest import ChangedInputError
from gristmill.dataprep.readers.sources import SourceError
from gristmill.mixtures.schema.sources import TokenSource
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.tokenize.exporting.exported_files import export_tokens
from gristmill.tokenize.importing import import_tokens
from gristmill.tokenize.importing.foreign_formats import TokenFileError
from gristmill.tokenize.importing.token_files import token_listing
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.row_provenance import describe_documents
from tests.packed_sets import part_of, tokens_of

VOCAB = 300
Documents = list[list[int]]


@pytest.fixture(scope="module")
def prepared(module_stages: Any) -> Inputs:
    """Our own documents, and a tokenizer of 300 ids."""
    ingest = module_stages.ingest("ingest", module_stages.documents("prose", 60), 2)
    return module_stages.tokenized({"ingest": ingest}, ["prose"])


@pytest.fixture(scope="module")
def end(prepared: Inputs) -> int:
    return load(prepared["tokenizer"]).eos


def draw_documents(seed: int, number: int = 20, end: int = 0) -> Documents:
    """Draw documents of random ids other than the end of text."""
    rng = random.Random(seed)
    ids = [token for token in range(VOCAB) if token != end]
    return [rng.choices(ids, k=rng.randint(1, 40)) for _ in range(number)]


@pytest.fixture
def imported(module_stages: Any, prepared: Inputs) -> Any:
    """Run the stage with a source `web`: its summary, the ids of each document by
    locator, and its warnings.
    """

    def importing(
        name: str, tokens: Path | str, **options: Any
    ) -> tuple[import_tokens.ImportSummary, dict[str, list[int]], list[str]]:
        section = {"tokens": str(tokens), **options}
        section["listing"] = token_listing("web", TokenSource(**section))
        out = module_stages.root / name
        summary = import_tokens.run(
            {"tokenizer": prepared["tokenizer"]},
            {"sources": {"web": section}},
            out,
            module_stages.context(name),
        )
        return summary, read(out), module_stages.warnings(name)

    return importing


def read(out: Path) -> dict[str, list[int]]:
    ids_by_locator = {}
    for shard in sorted((out / "documents").iterdir()):
        ids = np.fromfile(out / "tokens" / f"{shard.stem}.tokens.bin", dtype="<u2")
        docs = pq.read_table(out / "tokens" / f"{shard.stem}.docs.parquet").to_pylist()
        origins = pq.read_table(shard).to_pylist()
        assert [row["id"] for row in docs] == [row["id"] for row in origins]
        assert [row["row"] for row in docs] == list(range(len(origins)))
        for doc, origin in zip(docs, origins, strict=True):
            ids_by_locator[origin["locator"]] = ids[
                doc["offset"] : doc["offset"] + doc["tokens"]
            ].tolist()
    return ids_by_locator


def numbered(name: str, documents: Documents) -> dict[str, list[int]]:
    return {f"{name}#{number}": document for number, document in enumerate(documents)}


def joined(documents: Documents, end: int) -> list[int]:
    """Ids of documents, an end of text behind each."""
    return [token for document in documents for token in (*document, end)]


def packed_ids(kind: str, ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}{kind}", *ids)


def write_megatron(
    prefix: Path,
    sequences: Documents,
    first: Sequence[int],
    code: int = 8,
    kind: str = "H",
) -> None:
    """Write `.bin` and `.idx`: documents are runs of sequences that begin at
    `first`.
    """
    body = b"".join(packed_ids(kind, sequence) for sequence in sequences)
    width, pointers, offset = struct.calcsize(kind), [], 0
    for sequence in sequences:
        pointers.append(offset)
        offset += len(sequence) * width
    index = b"MMIDIDX\x00\x00" + struct.pack(
        "<QBQQ", 1, code, len(sequences), len(first)
    )
    index += (
        packed_ids("i", [len(sequence) for sequence in sequences])
        + packed_ids("q", pointers)
        + packed_ids("q", first)
    )
    prefix.with_suffix(".bin").write_bytes(body)
    prefix.with_suffix(".idx").write_bytes(index)


def write_llmc(path: Path, documents: Documents, end: int, wide: bool = False) -> None:
    """Write the end of text before each document, as llm.c's scripts do."""
    ids = [end, *joined(documents, end)[:-1]]
    header = [20240801, 7, len(ids)] if wide else [20240520, 1, len(ids)]
    path.write_bytes(
        packed_ids("i", header + [0] * 253) + packed_ids("I" if wide else "H", ids)
    )


def test_megatron_documents_follow_the_index(
    imported: Any, end: int, tmp_path: Path
) -> None:
    """Documents may have two sequences or none, and do not include the end of text
    after them.
    """
    first, second, third, fourth = draw_documents(1, 4, end)
    write_megatron(
        tmp_path / "a",
        [first, [*second, end], [], [*third, end], fourth],
        [0, 2, 3, 4, 5],
    )
    summary, documents, warnings = imported("megatron", tmp_path / "a")
    assert documents == {"a.bin#0": first + second, "a.bin#2": third, "a.bin#3": fourth}
    assert (summary.counts["read"], summary.counts["dropped"]) == (
        4,
        {"empty": 1},
    )
    assert summary.sources["web"].formats == ["megatron"]
    assert warnings == []


def test_wide_megatron_tokens_are_narrowed(
    imported: Any, end: int, tmp_path: Path
) -> None:
    documents = draw_documents(2, 6, end)
    for code, kind in ((4, "i"), (5, "q")):
        write_megatron(
            tmp_path / kind,
            [[*document, end] for document in documents],
            range(7),
            code,
            kind,
        )
        _, imported_documents, _ = imported(
            f"megatron-{kind}", tmp_path / f"{kind}.bin"
        )
        assert imported_documents == numbered(f"{kind}.bin", documents)


@pytest.mark.parametrize("wide", [False, True])
def test_both_headers_of_llmc_are_read(
    imported: Any, end: int, tmp_path: Path, wide: bool
) -> None:
    documents = draw_documents(3, 9, end)
    write_llmc(tmp_path / "fineweb_000001.bin", documents, end, wide)
    write_llmc(tmp_path / "fineweb_000002.bin", documents[:2], end, wide)
    _, imported_documents, _ = imported(f"llmc-{wide}", tmp_path / "*.bin")
    assert imported_documents == {
        **numbered("fineweb_000001.bin", documents),
        **numbered("fineweb_000002.bin", documents[:2]),
    }


def test_arrays_of_olmo_are_read_with_and_without_a_header(
    imported: Any, end: int, tmp_path: Path
) -> None:
    documents = draw_documents(4, 9, end)
    ids = joined(documents, end)
    np.save(tmp_path / "a.npy", np.array(ids, np.uint32))
    (tmp_path / "b.npy").write_bytes(packed_ids("H", ids))
    _, imported_documents, _ = imported("olmo", tmp_path, dtype="uint16")
    assert imported_documents == {
        **numbered("a.npy", documents),
        **numbered("b.npy", documents),
    }


def test_metadata_file_of_an_array_delimits_and_names_documents(
    imported: Any, module_stages: Any, end: int, tmp_path: Path
) -> None:
    first, second = draw_documents(5, 2, end)
    (tmp_path / "a.npy").write_bytes(packed_ids("H", [*first, *second, end]))
    lines = f"0,{len(first)},doc-1,web.jsonl.gz,7\n{len(first)},{len(first) + len(second) + 1},doc-2,web.jsonl.gz,8\n"
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(lines.encode()))
    _, documents, _ = imported("olmo-csv", tmp_path / "a.npy", dtype="uint16")
    assert documents == {"a.npy#0": first, "a.npy#1": second}
    table = pq.read_table(
        module_stages.root / "olmo-csv" / "documents" / "part-00000.parquet"
    )
    assert json.loads(table["metadata"][1].as_py()) == {
        "id": "doc-2",
        "src": "web.jsonl.gz",
        "loc": "8",
    }


def test_headerless_tokens_are_read_as_the_configured_dtype(
    imported: Any, end: int, tmp_path: Path
) -> None:
    """Another end of text than the tokenizer's, several of them in a row, and none at
    the end.
    """
    documents = [
        [token for token in document if token != 7] or [8]
        for document in draw_documents(6, 5, end)
    ]
    ids = [7, 7, *[token for document in documents for token in (*document, 7, 7)][:-2]]
    (tmp_path / "train.bin").write_bytes(packed_ids("I", ids))
    summary, imported_documents, _ = imported(
        "memmap",
        tmp_path / "train.bin",
        format="memmap",
        dtype="uint32",
        end_of_text=7,
    )
    assert imported_documents == numbered("train.bin", documents)
    assert summary.tokens_per_source == {"web": sum(map(len, documents))}


def test_files_without_end_of_text_are_cut_by_document_tokens(
    imported: Any, end: int, tmp_path: Path
) -> None:
    ids = draw_documents(8, 1, end)[0] * 4
    (tmp_path / "a.bin").write_bytes(packed_ids("H", ids))
    options = {"tokens": str(tmp_path / "a.bin"), "format": "memmap", "dtype": "uint16"}
    with pytest.raises(TokenFileError, match="`document_tokens:`"):
        imported("cut-none", **options)
    _, documents, _ = imported("cut", **options, document_tokens=10)
    assert documents == numbered(
        "a.bin", [ids[start : start + 10] for start in range(0, len(ids), 10)]
    )


def test_id_outside_the_vocabulary_is_rejected_with_its_position(
    imported: Any, end: int, tmp_path: Path
) -> None:
    write_llmc(tmp_path / "a.bin", [[1, 2], [3, VOCAB + 5, 4]], end)
    # Two tokens and the end of text before each document, after a header of 1,024
    # bytes.
    with pytest.raises(
        Exception,
        match=rf"a.bin: token 1 of document 1 \(byte 1,034\) is {VOCAB + 5}, but the "
        rf"tokenizer has the ids 0 to {VOCAB - 1}",
    ):
        imported("beyond", tmp_path / "a.bin")


def test_unsuitable_file_is_rejected_with_the_fix(
    imported: Any, end: int, tmp_path: Path
) -> None:
    ids = joined(draw_documents(9, 20, end), end)
    (tmp_path / "wide.bin").write_bytes(packed_ids("I", ids))
    write_llmc(tmp_path / "cut.bin", draw_documents(9, 3, end), end)
    (tmp_path / "cut.bin").write_bytes((tmp_path / "cut.bin").read_bytes()[:-2])
    (tmp_path / "questions.bin").write_bytes(
        packed_ids("i", [20240522, 1, 3] + [0] * 253)
    )
    write_megatron(tmp_path / "m", [[1, 2, 3]], [0, 1])
    (tmp_path / "m.bin").write_bytes(b"\0\0")
    for name, options, message in (
        ("wide.bin", {"format": "memmap", "dtype": "uint16"}, "`dtype: uint32`"),
        ("wide.bin", {"format": "memmap"}, "set `dtype:`"),
        ("cut.bin", {}, r"header says [\d,]+ tokens, but it holds"),
        ("questions.bin", {}, "questions.bin: .*multiple-choice"),
        ("m.bin", {}, "has 2 bytes, but its index says 6"),
    ):
        with pytest.raises(TokenFileError, match=message):
            imported(f"bad-{zlib.crc32(message.encode())}", tmp_path / name, **options)
    with pytest.raises(
        SourceError, match=r"cannot tell the format of wide.bin; set `format:`"
    ):
        imported("bad-auto", tmp_path / "wide.bin")
    with pytest.raises(SourceError, match="does not exist"):
        imported("bad-path", tmp_path / "nowhere.bin")


def test_foreign_end_of_text_and_narrow_dtype_are_warned_about(
    imported: Any, end: int, tmp_path: Path
) -> None:
    documents = [
        [token % 200 for token in document] for document in draw_documents(10, 5, end)
    ]
    write_megatron(
        tmp_path / "a", [[*document_, 201] for document_ in documents], range(6), 1, "B"
    )
    _, _, warnings = imported("other-end", tmp_path / "a.bin")
    assert len(warnings) == 2
    assert "5 of 5 documents end with id 201" in warnings[0]
    assert re.search("uint8.* 255.* 300", warnings[1])


def test_files_changed_after_planning_are_rejected(
    module_stages: Any, prepared: Inputs, end: int, tmp_path: Path
) -> None:
    write_llmc(tmp_path / "a.bin", draw_documents(11, 3, end), end)
    section = {"tokens": str(tmp_path / "a.bin"), "format": "auto"}
    listing = token_listing("web", TokenSource(**section))
    write_llmc(tmp_path / "a.bin", draw_documents(12, 4, end), end)
    with pytest.raises(
        ChangedInputError, match="its files changed since the run was planned"
    ):
        import_tokens.run(
            {"tokenizer": prepared["tokenizer"]},
            {"sources": {"web": {**section, "listing": listing}}},
            module_stages.root / "changed",
            module_stages.context("changed"),
        )


def test_documents_do_not_depend_on_part_size(
    imported: Any,
    module_stages: Any,
    end: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts hold whole documents, and their size does not change the documents."""
    documents = draw_documents(13, 50, end)
    for number in range(3):
        write_llmc(tmp_path / f"{number}.bin", documents[number::3], end)
    _, in_one_part, _ = imported("parts-1", tmp_path)
    monkeypatch.setattr(import_tokens, "PART_TOKENS", 100)
    _, in_many_parts, _ = imported("parts-many", tmp_path)
    assert len(list((module_stages.root / "parts-many" / "documents").iterdir())) > 5
    assert in_one_part == in_many_parts
    assert in_one_part == {
        locator: ids
        for number in range(3)
        for locator, ids in numbered(f"{number}.bin", documents[number::3]).items()
    }


def test_mixture_of_documents_and_imported_tokens_keeps_shares_and_provenance(
    imported: Any, module_stages: Any, prepared: Inputs, end: int, tmp_path: Path
) -> None:
    documents = draw_documents(14, 60, end)
    write_llmc(tmp_path / "web.bin", documents, end)
    imported("beside", tmp_path / "web.bin")
    inputs = {**prepared, "import_tokens": module_stages.root / "beside"}
    summary = module_stages.mix(
        "mix-both",
        inputs,
        {"prose": {"weight": 3.0}, "web": {"weight": 1.0}},
        tokens=1600,
        sequence_length=16,
        validation=0.1,
    )
    assert summary.realised["web"].share == 0.25
    packed = PackedSet(module_stages.root / "mix-both")
    num_pieces = check_rows(packed, inputs, numbered("web.bin", documents), end)
    assert num_pieces
    assert summary.counts["sources"]["web"]["read"] == 60
    assert summary.validation["web"]["rows"] > 0


def check_rows(
    packed: PackedSet, inputs: Inputs, expected: dict[str, list[int]], end: int
) -> int:
    """Check that every piece of an imported document has the tokens of its file, and
    return the number of pieces.
    """
    number = packed.sources.index("web")
    rows = np.arange(packed.rows)
    tokens, pieces = packed.read(rows), packed.pieces(rows).to_pylist()
    described = describe_documents(packed, inputs, {piece["id"] for piece in pieces})
    imported_pieces = [piece for piece in pieces if piece["source"] == number]
    for piece in imported_pieces:
        origin = described[piece["id"]]
        assert origin["source"] == "web"
        document = [*expected[origin["locator"]], end]
        assert tokens_of(tokens, piece) == part_of(document, piece)
    assert {
        described[piece["id"]]["source"]
        for piece in pieces
        if piece["source"] != number
    } <= {"prose"}
    return len(imported_pieces)


def test_mixture_of_imported_tokens_needs_no_documents(
    imported: Any, module_stages: Any, prepared: Inputs, end: int, tmp_path: Path
) -> None:
    documents = draw_documents(15, 40, end)
    write_llmc(tmp_path / "web.bin", documents, end)
    imported("alone", tmp_path / "web.bin")
    inputs = {
        "tokenizer": prepared["tokenizer"],
        "import_tokens": module_stages.root / "alone",
    }
    summary = module_stages.mix(
        "mix-alone",
        inputs,
        {"web": {"max_epochs": 3.0, "where": "tokens >= 10"}},
        tokens=800,
        sequence_length=16,
        validation=0.0,
    )
    packed = PackedSet(module_stages.root / "mix-alone")
    assert check_rows(packed, inputs, numbered("web.bin", documents), end)
    short = sum(len(document) < 10 for document in documents)
    assert summary.counts["dropped"]["where"] == short


@pytest.mark.parametrize("form", ["llmc", "megatron", "memmap", "olmo"])
def test_exported_tokens_are_imported_document_by_document(
    imported: Any, module_stages: Any, prepared: Inputs, end: int, form: str
) -> None:
    """Documents of at most a row, which best fit leaves whole, so that no format can
    lose where one ends.
    """
    if not (module_stages.root / "mix-short" / "packed.json").exists():
        ingest = module_stages.ingest(
            "short", module_stages.documents("prose", 50, words=6)
        )
        inputs = {"ingest": ingest, "tokenizer": prepared["tokenizer"]}
        module_stages.tokenize("short-tokens", inputs)
        module_stages.mix(
            "mix-short",
            {**inputs, "tokenize": module_stages.root / "short-tokens"},
            {"prose": {}},
            tokens=640,
            sequence_length=64,
            packing="best_fit",
            validation=0.0,
        )
    packed = PackedSet(module_stages.root / "mix-short")
    out = module_stages.root / f"export-{form}"
    export_tokens(packed, out, form)
    ending = ".npy" if form == "olmo" else ".bin"
    _, documents, _ = imported(
        f"back-{form}", out / f"train*{ending}", format=form, dtype="uint16"
    )
    rows = packed.read(np.arange(packed.rows))
    pieces = packed.pieces(np.arange(packed.rows)).to_pylist()
    expected = [tokens_of(rows, piece) for piece in pieces]
    # a document that the mixture cut runs on into the next
    if form in ("llmc", "memmap"):
        expected = [[*part, end] for part in joined_documents(expected, end)]
    assert list(documents.values()) == [
        ids[:-1] if ids[-1] == end else ids for ids in expected
    ]


def joined_documents(pieces: Documents, end: int) -> Documents:
    """Join pieces without an end of text with the next one, and remove ends of text."""
    documents: Documents = [[]]
    for ids in pieces:
        documents[-1] += [token for token in ids if token != end]
        documents += [[]] if ids[-1] == end else []
    return [ids for ids in documents if ids]


def test_remote_files_are_imported_like_local_ones(
    imported: Any, end: int, tmp_path: Path
) -> None:
    import fsspec

    documents = draw_documents(16, 9, end)
    write_llmc(tmp_path / "a.bin", documents, end)
    write_megatron(tmp_path / "b", documents, range(10))
    store = fsspec.filesystem("memory")
    for name in ("a.bin", "b.bin", "b.idx"):
        store.pipe_file(f"/tokens-elsewhere/{name}", (tmp_path / name).read_bytes())
    _, imported_documents, _ = imported("remote", "memory://tokens-elsewhere/*.bin")
    assert imported_documents == {
        **numbered("a.bin", documents),
        **numbered("b.bin", documents),
    }
