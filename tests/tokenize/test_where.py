"""A source's condition is SQL over what was measured; what was not measured is unknown, and mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from gristmill.tokenize.mixing.shares import MixError
from gristmill.tokenize.mixing.where import MET, NOT_MET, UNKNOWN, check_names, judge

MEASURED = pa.table({"quality": pa.array([0.2, None, 0.9]), "tokens": pa.array([5, 6, 7])})


def test_a_value_that_was_not_measured_is_neither_met_nor_not() -> None:
    assert judge("web", "quality >= 0.5", MEASURED).tolist() == [NOT_MET, UNKNOWN, MET]
    assert judge("web", "tokens > 5", MEASURED).tolist() == [NOT_MET, MET, MET]


def test_a_shard_with_no_document_left_has_no_verdicts() -> None:
    assert judge("web", "quality >= 0.5", MEASURED.slice(0, 0)).tolist() == []


def test_an_unknown_column_is_named_with_the_ones_there_are() -> None:
    with pytest.raises(MixError, match=r"sources\.web\.where: 'qualty > 1'.*columns: quality, tokens"):
        judge("web", "qualty > 1", MEASURED)


@pytest.mark.parametrize("condition", [
    "(SELECT count(*) FROM read_csv('{secret}')) > 0",
    "(SELECT content FROM read_text('{secret}')) = 'x'",
    "(SELECT count(*) FROM '{secret}') > 0",
    "(SELECT count(*) FROM glob('/*')) > 0",
    "(SELECT count(*) FROM read_parquet('https://127.0.0.1:9/a.parquet')) > 0",
    "(SELECT count(*) FROM read_csv('s3://bucket/a.csv')) > 0",
    "(SELECT count(*) FROM measured) > 0",
    "true) AS BOOLEAN) FROM documents; COPY documents TO '{out}'; SELECT 1, CAST((true",
    "true) AS BOOLEAN) FROM documents; ATTACH '{out}'; SELECT 1, CAST((true",
    "true) AS BOOLEAN) FROM documents; INSTALL httpfs; SELECT 1, CAST((true",
    "true) AS BOOLEAN) FROM documents; LOAD '{secret}'; SELECT 1, CAST((true",
    "true) AS BOOLEAN) FROM documents; SET enable_external_access = true; SELECT 1, CAST((true",
    "true) AS BOOLEAN) FROM documents; SET lock_configuration = false; SELECT 1, CAST((true",
])  # fmt: skip
def test_a_condition_reaches_no_file_no_network_and_no_variable(condition: str, tmp_path: Path) -> None:
    secret, out = tmp_path / "secret.csv", tmp_path / "out"
    secret.write_text("a\nx\n")
    with pytest.raises(MixError, match=r"sources\.web\.where"):
        judge("web", condition.format(secret=secret, out=out), pa.table({"quality": [0.5]}))
    assert [path.name for path in tmp_path.iterdir()] == ["secret.csv"]


def test_names_are_checked_before_there_are_values() -> None:
    names = ["quality", "language", "cluster_size"]
    check_names("sources.web.where", "quality >= 0.5 AND language IN ('en', 'de') AND length(language) = 2", names)
    check_names("sources.web.epochs", "coalesce(min(cluster_size, 4), 1)", names)
    with pytest.raises(MixError, match=r"qualty.*columns: cluster_size, language, quality"):
        check_names("sources.web.where", "qualty > 1", names)
    with pytest.raises(MixError, match=r"sources\.web\.where.*syntax"):
        check_names("sources.web.where", "quality >", names)
