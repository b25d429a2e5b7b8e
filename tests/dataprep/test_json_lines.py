"""JSON lines read by orjson give the records of Python's json."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gristmill.dataprep.documents import document_id, hash_documents
from gristmill.dataprep.readers import compression, document_shards, json_array, jsonl
from gristmill.dataprep.readers.document_shards import ShardWriter
from gristmill.dataprep.readers.jsonl import read_jsonl
from gristmill.dataprep.readers.readers import read_records
from gristmill.dataprep.readers.records import (
    Input,
    Read,
    Reading,
    Record,
    Rejected,
)
from tests.dataprep.source_files import files_of

READINGS = (
    Reading(),
    Reading(id="id"),
    Reading(metadata=()),
    Reading(metadata=("é", "n", "tags")),
    Reading(text="a.b"),
    Reading(text="a", id="n", metadata=("text",)),
    Reading(encoding_errors="strict"),
)
CERTAIN = [
    '{"text": "a"}',
    '{"text":"a"}',
    ' \t{ "text" : "a" , "n" : 1 }\t\r',
    '{"text": "a", "n": -12, "z": 0, "b": -1}',
    '{"text": "aé漢😀\x7f", "é漢": "é😀"}',
    '{"text": "\\"\\\\\\/\\b\\f\\n\\r\\t\\u0001\\u001f\\u007f\\u00e9\\uD83D\\uDE00"}',
    '{"z": "\\"\\\\\\/\\b\\f\\n\\r\\t\\u0000\\u001F\\u007f\\u00e9\\ud83d\\ude00", '
    '"text": "x"}',
    '{"text": "x", "n": 1.5, "m": -0.0, "o": 0.0001, "p": 123456789012.125, "q": '
    '0.12345678901234, "r": 5.0}',
    '{"text": "x", "n": 0.1234567890123456, "m": 1e+16, "o": 1.2345e-05, "p": 1e-05, '
    '"q": 0.8999999999999999}',
    '{"text": "x", "n": null, "m": true, "o": false, "p": [], "q": {}, "r": [{"a": '
    '[1, "\\u00e9\\udfff", null]}, {}]}',
    '{"text": "x", "": 1, "a": 2, "aa": 3, "Z": 4, "ab": 5, "é": 6, "\x7f": 7}',
    '{"text": "x", "n": ' + "9" * 4000 + "}",
    json.dumps({"text": "x", **{f"key {number}": number for number in range(63)}}),
    json.dumps({"text": "word " * 3000, "other": "\n" * 999}),
]
"""Lines with a document."""
OTHERS = [
    "",
    " ",
    "\r",
    "\x0b\x0c",
    "{}",
    "[]",
    "1",
    "null",
    "nul",
    "{",
    "}",
    '{"text"}',
    '{"text": "a"',
    '{"text": "a",}',
    '{"text": "a"}x',
    '{"text": "a"} {"text": "b"}',
    '{"text": "a" "b": 1}',
    '{"text": "a", "b"; 1}',
    "{'text': 'a'}",
    '{"text": ""}',
    '{"text": null}',
    '{"text": 3}',
    '{"text": ["a"]}',
    '{"texts": "a"}',
    '{"text": "a", "text": "b"}',
    '{"text": "a", "n": 1, "n": null}',
    '{"text": "a", "\\u006e": 1}',
    '{"te\\u0078t": "a"}',
    '{"text": "\\ud800"}',
    '{"text": "\\udc00\\ud800"}',
    '{"text": "\\ud800\\u0041"}',
    '{"text": "\\ud800\\"}',
    '{"text": "\\x"}',
    '{"text": "\\u12g4"}',
    '{"text": "\\u 123"}',
    '{"text": "a\tb"}',
    '{"text": "a\x00b"}',
    '{"text": "a\x1fb"}',
    '{"text": "a", "n": "\\udfff"}',
    '{"text": "a", "n\\udfff": 1}',
    '{"text": "a", "n": 01}',
    '{"text": "a", "n": -}',
    '{"text": "a", "n": -0}',
    '{"text": "a", "n": +1}',
    '{"text": "a", "n": 1.}',
    '{"text": "a", "n": .5}',
    '{"text": "a", "n": 1.50}',
    '{"text": "a", "n": 0.00001}',
    '{"text": "a", "n": 1e5}',
    '{"text": "a", "n": 1E400}',
    '{"text": "a", "n": 1e}',
    '{"text": "a", "n": 12345678901234567.0}',
    '{"text": "a", "n": 0.10000000000000000001}',
    '{"text": "a", "n": NaN}',
    '{"text": "a", "n": -Infinity}',
    '{"text": "a", "n": [NaN]}',
    '{"text": "a", "n": tru}',
    '{"text": "a", "n": falsy}',
    '{"text": "a", "n": [1,]}',
    '{"text": "a", "n": {"a": 1,}}',
    '{"text": "a", "n": [}',
    '{"text": "a", "n": {]}',
    '{"text": "a", "n": {"a"}}',
    '{"text": "a", "n": {1: 2}}',
    '{"text": "a", "n": [1 2]}',
    '{"text": "a", "n": ' + "9" * 4400 + "}",
    '{"text": "a", "n": [' + "9" * 4400 + "]}",
    '{"text": "a", "id": ""}',
    '{"text": "a", "n": ' + "[" * 70 + "]" * 70 + "}",
    '{"text": "a", "n": ' + "[" * 2000,
    '{"text": "a", "id": true}',
    '{"text": "a", "id": 1.5}',
    '{"text": "a", "id": {"a": 1}}',
    '{"a": {"b": "inner"}, "a.b": ""}',
    '{"text": "", "n": [-9223372036854775809]}',
    "\ufeff{}",
    json.dumps({"text": "x", **{f"key {number}": number for number in range(64)}}),
]


def read_both_ways(path: Path, reading: Reading) -> list[Read]:
    """Records read by orjson, equal to those of Python's json."""
    records = list(read_jsonl(Input("a.jsonl", path), reading))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_exact_row", lambda line, reading: None)
        python_records = list(read_jsonl(Input("a.jsonl", path), reading))
    assert records == python_records
    return records


def write(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


@pytest.mark.parametrize("reading", READINGS, ids=str)
def test_every_kind_of_line_reads_as_by_python(
    tmp_path: Path, reading: Reading
) -> None:
    lines = [
        line.encode("utf-8", "surrogatepass")
        for pair in zip(OTHERS, CERTAIN * 9, strict=False)
        for line in pair
    ]
    read_both_ways(write(tmp_path / "a.jsonl", lines), reading)
    for line in lines:
        read_both_ways(write(tmp_path / "a.jsonl", [line]), reading)


def test_certain_lines_and_ids_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    named = [
        json.dumps({"text": "t", "id": key, "n": 1}) for key in ("a/é", 17, -3, "é\n\\")
    ]
    for lines, reading in (
        (CERTAIN, Reading()),
        (named, Reading(id="id")),
        (named, Reading(metadata=("n", "id"))),
    ):
        records = read_both_ways(
            write(path, [line.encode() for line in lines]), reading
        )
        assert {type(record) for record in records} == {Record}
        assert len(records) == len(lines)


@pytest.mark.parametrize("number", [2**63 - 1, 2**64, -(2**63) - 1, 10**30, 9.5e30])
@pytest.mark.parametrize(
    ("row", "reading"),
    [
        ({}, Reading()),
        ({"list": []}, Reading(metadata=("list", "n"))),
        ({"outer": {"n": 1}}, Reading(metadata=("outer.n", "n"))),
    ],
)
def test_numbers_keep_all_digits(
    tmp_path: Path, number: float, row: dict[str, object], reading: Reading
) -> None:
    line = json.dumps({"text": "a", "n": number, **row}).encode()
    (record,) = read_both_ways(write(tmp_path / "a.jsonl", [line]), reading)
    assert isinstance(record, Record)
    assert json.loads(record.metadata)["n"] == number
    nested = json.dumps(
        {"text": "a", "list": [number], "outer": {"n": number}}
    ).encode()
    read_both_ways(write(tmp_path / "a.jsonl", [nested]), reading)


def test_byte_order_marks_and_invalid_bytes_read_as_by_python(
    tmp_path: Path,
) -> None:
    good, bad = (
        b'{"text": "' + b"x" * 400 + b'"}',
        b'{"text": "' + b"x" * 400 + b'\xff"}',
    )
    for lines in (
        [b"\xef\xbb\xbf" + good, good],
        [b"", b"\xef\xbb\xbf" + good],
        [good, bad, good],
    ):
        for reading in READINGS:
            read_both_ways(write(tmp_path / "a.jsonl", lines), reading)
    path = tmp_path / "a.jsonl"
    for content in (
        good,
        good + b"\n" + good,
        good + b"\n" + good[:-9],
        b"\xef\xbb\xbf" + good,
        b"\n\n",
        b"",
        b" ",
    ):
        path.write_bytes(content)
        read_both_ways(path, Reading())


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.floats(0, 1).map(lambda value: round(value, 4)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)
ROWS = st.builds(
    lambda text, others, name: {**others, "text": text, name: 1},
    st.text(min_size=1, max_size=40),
    st.dictionaries(
        st.sampled_from(["id", "n", "é", "tags", "z"]) | st.text(max_size=3),
        VALUES,
        max_size=5,
    ),
    st.text(max_size=2),
)


@st.composite
def spoiled_lines(draw: st.DrawFn) -> bytes:
    """A line of JSON in the style of some writer, perhaps with a few bytes replaced."""
    separators = draw(st.sampled_from([None, (",", ":"), (" ,", "\t: ")]))
    line = bytearray(
        json.dumps(
            draw(ROWS), ensure_ascii=draw(st.booleans()), separators=separators
        ).encode("utf-8", "surrogatepass")
    )
    for _ in range(draw(st.integers(0, 2))):
        line[draw(st.integers(0, len(line) - 1))] = draw(
            st.sampled_from(list(b'"\\{}[]:,0.-eu \x00\x80'))
        )
    return bytes(line.replace(b"\n", b""))


@pytest.mark.slow
@given(lines=st.lists(spoiled_lines(), max_size=8), reading=st.sampled_from(READINGS))
@example(
    lines=[b'{"text":"a","n":1}', b'{"n":1,"text":"a"}', b'{"n":1,"text":"a"}'],
    reading=READINGS[0],
)
def test_lines_of_any_writer_read_as_by_python(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], reading: Reading
) -> None:
    read_both_ways(
        write(tmp_path_factory.getbasetemp() / "lines.jsonl", lines), reading
    )


def test_shards_do_not_depend_on_pending_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        json.dumps({"text": "word " * (1 + number % 7), "n": number}).encode()
        for number in range(60)
    ]
    lines[20], lines[40] = b"{", json.dumps({"text": "long " * 50}).encode()
    path = write(tmp_path / "a.jsonl", lines)
    for limit in (None, 1, 33, 41, 58):
        outcomes = []
        for rows in (1, 7, 1024):
            monkeypatch.setattr(document_shards, "PENDING_ROWS", rows)
            out = tmp_path / f"{limit}-{rows}"
            writer = ShardWriter(out, "00000", "s", 100, 200, limit)
            for record in read_jsonl(Input("a.jsonl", path), Reading()):
                writer.add("a.jsonl", record)
            writer.close()
            counts = writer.counts()
            assert counts["kept"] == (58 if limit is None else limit)
            outcomes.append(
                (
                    counts,
                    writer.first_quarantined,
                    writer.totals,
                    writer.shards,
                    {file.name: file.read_bytes() for file in out.rglob("*.parquet")},
                )
            )
        assert outcomes[0] == outcomes[1] == outcomes[2]


@given(st.lists(st.tuples(st.text(), st.text()), min_size=2))
def test_ids_of_a_column_equal_single_ids(rows: list[tuple[str, str]]) -> None:
    locators, texts = (
        pa.array(column, type)
        for column, type in zip(
            zip(*rows, strict=True), (pa.string(), pa.large_string()), strict=True
        )
    )
    ids = hash_documents("é".encode(), locators, texts).to_pylist()
    assert ids == [document_id("é", *row) for row in rows]
    assert hash_documents("é".encode(), locators[1:], texts[1:]).to_pylist() == ids[1:]


@pytest.mark.parametrize("part_bytes", [1, 3, 7, 100])
def test_limit_of_a_line_is_the_same_however_it_arrives(
    monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(compression, "MAX_RECORD_BYTES", 8)
    content = b"a\n" + b"b" * 9 + b"\n\n" + b"c" * 8 + b"\nd\n" + b"e" * 10 + b"\nf"
    parts = [
        content[begin : begin + part_bytes]
        for begin in range(0, len(content), part_bytes)
    ]
    lines = list(compression.split_lines(parts))
    assert [line if isinstance(line, bytes) else type(line) for line in lines] == [
        b"a",
        compression.RecordTooLongError,
        b"",
        b"c" * 8,
        b"d",
        compression.RecordTooLongError,
        b"f",
    ]
    assert isinstance(lines[-1], compression.Unended)
    damage = compression.Damage("cut", 0)
    assert [*compression.split_lines([*parts, damage, b"g\n"])][-2:] == [damage, b"g"]


ELEMENTS = [
    {"text": 'one } ] " two'},
    {"text": "a\nb", "n": 2, "list": [{"x": ["]"]}]},
    {"text": "é😀", "n": 3},
]


@pytest.mark.parametrize("indent", [None, 2])
def test_array_elements_are_numbered_records(
    tmp_path: Path, indent: int | None
) -> None:
    write(
        tmp_path / "a.json",
        [b"\xef\xbb\xbf \n" + json.dumps(ELEMENTS, indent=indent).encode()],
    )
    (file,) = files_of(tmp_path / "a.json")
    records = list(read_records(file, Reading()))
    assert [record.text for record in records] == [row["text"] for row in ELEMENTS]
    assert [record.locator for record in records] == [
        "a.json#1",
        "a.json#2",
        "a.json#3",
    ]
    assert json.loads(records[1].metadata) == {"n": 2}


def test_array_reads_the_same_for_any_read_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [*ELEMENTS, {"text": "long " * 500}, *ELEMENTS]
    path = write(
        tmp_path / "a.json", [json.dumps(rows, ensure_ascii=False, indent=1).encode()]
    )
    for size in (1, 7, 64, 4096):
        monkeypatch.setattr(compression, "READ_BYTES", size)
        lines = json_array.json_elements(path, "")
        assert [json.loads(line)["text"] for line in lines if line] == [
            row["text"] for row in rows
        ]


def test_array_that_is_too_long_is_rejected_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.json", [json.dumps(ELEMENTS).encode()])
    monkeypatch.setattr(json_array, "MAX_RECORD_BYTES", 20)
    (rejected,) = read_jsonl(Input("a.json", path), Reading())
    assert isinstance(rejected, Rejected)
    assert "JSON lines" in rejected.error
    assert rejected.lost is None


def test_bad_array_elements_are_rejected_alone(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.json",
        [
            b'[{"text": "a"}, 7, {"text": b}, {"text": "line\nbreak"}, {"x": 1}}, {"text": "c"}]'
        ],
    )
    records = list(read_jsonl(Input("a.json", path), Reading()))
    assert [record.number for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record.number for record in records if isinstance(record, Rejected)] == [
        2,
        3,
        4,
        5,
    ]


@pytest.mark.parametrize("cut", [1, 20, 40])
def test_truncated_array_keeps_the_elements_before_the_end(
    tmp_path: Path, cut: int
) -> None:
    content = json.dumps([{"text": f"text {number}"} for number in range(9)]).encode()
    path = write(tmp_path / "a.json", [content[:-cut]])
    *records, end = read_jsonl(Input("a.json", path), Reading())
    assert [record.text for record in records] == [
        f"text {number}" for number in range(len(records))
    ]
    assert len(records) == content[:-cut].count(b"}")
    assert isinstance(end, Rejected)
    assert end.lost is None
    compressed = tmp_path / "b.json.gz"
    compressed.write_bytes(gzip.compress(content)[:-9])
    *records, end = read_jsonl(Input("b.json.gz", compressed, ".gz"), Reading())
    assert (len(records), end.lost) == (9, None)


def test_text_after_an_array_is_read_as_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", [b'[{"text": "a"}]', b'{"text": "b"}', b"x"])
    first, second, invalid = read_jsonl(Input("a.json", path), Reading())
    assert (first.text, second.text, type(invalid)) == ("a", "b", Rejected)
