"""Conditions of sources: SQL over measured columns, unknown where nothing was
measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from gristmill.dataprep.where_sql import FUNCTIONS, columns_in
from gristmill.mixtures.base import docstrings
from gristmill.mixtures.schema.sources import Source
from gristmill.tokenize.mixing.quotas import MixError
from gristmill.tokenize.mixing.source_filters import (
    MET,
    NOT_MET,
    UNKNOWN,
    check_names,
    judge,
)

MEASURED = pa.table(
    {"quality": pa.array([0.2, None, 0.9]), "tokens": pa.array([5, 6, 7])}
)


def check(condition: str, names: Sequence[str]) -> None:
    check_names("sources.web.where", condition, names)


def verdicts(condition: str, rows: pa.Table = MEASURED) -> list[int]:
    return judge("web", condition, rows).tolist()


def test_unmeasured_value_is_unknown() -> None:
    assert verdicts("quality >= 0.5") == [NOT_MET, UNKNOWN, MET]
    assert verdicts("tokens > 5") == [NOT_MET, MET, MET]


def test_empty_shard_has_no_verdicts() -> None:
    assert verdicts("quality >= 0.5", MEASURED.slice(0, 0)) == []


def test_unknown_column_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(
        MixError, match=r"sources\.web\.where: 'qualty > 1'.*columns: quality, tokens"
    ):
        verdicts("qualty > 1")


@pytest.mark.parametrize(
    "condition",
    [
        "(SELECT count(*) FROM read_csv('{secret}')) > 0",
        "(SELECT content FROM read_text('{secret}')) = 'x'",
        "(SELECT count(*) FROM '{secret}') > 0",
        "(SELECT count(*) FROM glob('/*')) > 0",
        "(SELECT count(*) FROM read_parquet('https://127.0.0.1:9/a.parquet')) > 0",
        "(SELECT count(*) FROM read_csv('s3://bucket/a.csv')) > 0",
        "(SELECT count(*) FROM measured) > 0",
        "true) AS BOOLEAN) FROM documents; COPY documents TO '{out}'; SELECT 1, "
        "CAST((true",
        "true) AS BOOLEAN) FROM documents; ATTACH '{out}'; SELECT 1, CAST((true",
        "true) AS BOOLEAN) FROM documents; INSTALL httpfs; SELECT 1, CAST((true",
        "true) AS BOOLEAN) FROM documents; LOAD '{secret}'; SELECT 1, CAST((true",
        "true) AS BOOLEAN) FROM documents; SET enable_external_access = true; SELECT "
        "1, CAST((true",
        "true) AS BOOLEAN) FROM documents; SET lock_configuration = false; SELECT 1, "
        "CAST((true",
    ],
)
def test_condition_reaches_no_file_network_or_setting(
    condition: str, tmp_path: Path
) -> None:
    secret, out = tmp_path / "secret.csv", tmp_path / "out"
    secret.write_text("a\nx\n")
    with pytest.raises(MixError, match=r"sources\.web\.where"):
        verdicts(condition.format(secret=secret, out=out))
    assert [path.name for path in tmp_path.iterdir()] == ["secret.csv"]


def test_names_are_checked_without_values() -> None:
    names = ["quality", "language", "cluster_size"]
    check("quality >= 0.5 AND language IN ('en', 'de') AND length(language) = 2", names)
    check_names("sources.web.epochs", "coalesce(min(cluster_size, 4), 1)", names)
    with pytest.raises(
        MixError, match=r"qualty.*columns: cluster_size, language, quality"
    ):
        check("qualty > 1", names)
    with pytest.raises(MixError, match=r"sources\.web\.where.*syntax"):
        check("quality >", names)


METADATA = [
    '{"n": 20, "page": {"lang": "en"}, "a.b": 1}',
    "{}",
    '{"n": 7.5}',
    '{"n": null, "page": {"lang": "de"}}',
]
ROWS = pa.table(
    {
        "quality": [0.2, None, 0.9, 0.5],
        "tokens": [5, 6, 7, 0],
        "language": ["en", "de", None, "fr"],
        "metadata": METADATA,
    }
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "expression",
    [
        "quality >= 0.5 AND NOT (language IN ('en', 'de')) OR tokens BETWEEN 1 AND 5",
        "language LIKE 'e%'",
        "language NOT ILIKE 'E_' AND language GLOB 'd*'",
        "language LIKE '10$%' ESCAPE '$'",
        "language SIMILAR TO 'e.'",
        "CASE WHEN tokens > 5 THEN quality ELSE 1.0 END > 0.5",
        "quality IS NOT NULL",
        "quality IS NULL OR tokens != 3",
        "coalesce(quality, 0) > 0.1",
        "-quality + 2 * tokens % 3 // 2 ** 2 <= tokens ^ 2 / 3",
        "CAST(tokens AS DOUBLE) > 5",
        "tokens::int > 5 -- a comment",
        "quality IS DISTINCT FROM 0.5",
        "true",
        "NULL",
        "language || 'x' = 'enx'",
        "min(tokens, 6) > max(quality, 0.1)",
        "if(tokens > 5, true, false)",
        "Quality > 0.5",
        "nullif(tokens, 0) IS NULL",
        "least(tokens, 4) < greatest(quality, tokens)",
        "starts_with(language, 'e')",
        "position('n' in language) > 0",
        "substring(language from 1 for 1) = 'e'",
        "TRY_CAST(language AS INTEGER) IS NULL",
        "tokens IN (5, 6) AND length(trim(lower(language))) = 2",
        "round(sqrt(tokens), 1) > ln(tokens + 1)",
        "metadata.n >= 20",
        "Metadata.page.lang = 'en' OR metadata.\"a.b\" = 1 AND tokens > 5",
        "coalesce(metadata.n, 0) < 20",
    ],
)
def test_condition_depends_on_its_own_row_only(expression: str) -> None:
    check(expression, ROWS.column_names)
    together = verdicts(expression, ROWS)
    for order in ([3, 1, 0, 2], [2], [0, 0, 1]):
        assert verdicts(expression, ROWS.take(order)) == [
            together[row] for row in order
        ]


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("random() < 0.5", "the function random is"),
        ("now() > 1", "the function now is"),
        ("uuid() > 'a'", "the function uuid is"),
        ("current_date IS NULL", "no column 'current_date'"),
        ("CURRENT_TIMESTAMP IS NULL", "no column 'CURRENT_TIMESTAMP'"),
        ("row_number() OVER () < 10", r"window function .*\(row_number\)"),
        ("sum(tokens) OVER (ORDER BY quality) < 9", r"window function .*\(sum\)"),
        ("tokens > (SELECT avg(tokens) FROM documents)", "a sub-query is"),
        ("EXISTS (SELECT 1)", "a sub-query is"),
        ("tokens IN (SELECT 5)", "a sub-query is"),
        ("tokens = ANY([1, 2])", "a sub-query is"),
        ("count(*) > 1", "the function count_star is"),
        ("tokens > avg(tokens)", "the function avg is"),
        ("min(tokens) > 1", "min takes two values"),
        ("rowid < 3", "no column 'rowid'"),
        ("gristmill_row < 3", "no column 'gristmill_row'"),
        ("getenv('HOME') = 'x'", "the function getenv is"),
        ("current_setting('threads') = '1'", "the function current_setting"),
        ("nextval('s') > 1", "the function nextval"),
        ("main.abs(tokens) > 1", "the function abs is"),
        ("COLUMNS(*) > 1", r"\* is not"),
        ("#1 > 2", "a column's number is"),
        ("tokens > ?", "a parameter is"),
        ("list_transform([1], x -> x)[1] > 0", "array_extract is"),
        ("tokens > 1) , (true", "more than one expression"),
        ("true) FROM documents WHERE (true", "more than one expression"),
        ("true) FROM documents ORDER BY (tokens", "more than one expression"),
        ("1); SELECT (2", "more than one statement"),
        ("DATE '2026-01-01' > 'today'::DATE", "a cast to DATE is"),
        ("tokens::TIMESTAMPTZ IS NULL", "a cast to TIMESTAMPTZ is"),
        ("language COLLATE nocase = 'EN'", "COLLATE is"),
        ("'a' = version()", "the function version is"),
        ("typeof(tokens) = 'x'", "the function typeof is"),
        ("hash(tokens) > 1", "the function hash is"),
    ],
)
def test_expression_that_is_not_a_function_of_the_row_is_rejected(
    expression: str, message: str
) -> None:
    with pytest.raises(MixError, match=message):
        check(expression, ROWS.column_names)
    with pytest.raises(MixError, match=message):
        verdicts(expression, ROWS)


def test_metadata_keys_are_columns() -> None:
    assert verdicts("metadata.n >= 20", ROWS) == [
        MET,
        UNKNOWN,
        NOT_MET,
        UNKNOWN,
    ]
    assert verdicts("metadata.page.lang = 'de'", ROWS) == [
        NOT_MET,
        UNKNOWN,
        UNKNOWN,
        MET,
    ]
    assert columns_in("metadata.n > tokens", ROWS.column_names) == [
        "tokens",
        "metadata",
    ]
    with pytest.raises(MixError, match=r"sources\.web\.where.*metadata\.n"):
        verdicts(
            "metadata.n >= 20", pa.table({"metadata": ['{"n": 20}', '{"n": "20"}']})
        )
    for condition in (
        "metadata.page = '' OR metadata.page.lang = 'de'",
        "metadata.page.lang = 'de' OR metadata.page = ''",
    ):
        with pytest.raises(MixError, match=r"metadata\.page and metadata\.page\.lang"):
            verdicts(condition, ROWS)
        with pytest.raises(MixError, match=r"metadata\.page and metadata\.page\.lang"):
            check(condition, ROWS.column_names)
    with pytest.raises(MixError, match=r"no column 'metadata\.n'"):
        check("metadata.n >= 20", ["tokens"])


def test_reference_lists_every_function_of_the_grammar() -> None:
    manual = " ".join(docstrings(Source)["where"].split())
    for kind, names in FUNCTIONS.items():
        assert f"{', '.join(names)}" in manual, kind


def test_every_function_of_the_grammar_is_stateless_in_duckdb() -> None:
    import duckdb

    with duckdb.connect() as connection:
        functions = connection.execute(
            "SELECT function_name, function_type, stability FROM duckdb_functions()"
        ).fetchall()
    for name in itertools.chain(*FUNCTIONS.values()):
        kinds = {
            (kind, stability)
            for function, kind, stability in functions
            if function == name and kind in ("scalar", "macro")
        }
        assert {stability for _, stability in kinds} <= {"CONSISTENT", None}, name
