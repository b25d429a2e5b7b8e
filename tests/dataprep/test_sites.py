"""Sites of web addresses, in Arrow and in SQL."""

from __future__ import annotations

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from gristmill.dataprep.sites import SITE


@pytest.mark.parametrize(
    ("address", "site"),
    [
        ("https://www.mill.org/wheel", "mill.org"),
        ("http://blog.mill.org:8080?a=b", "blog.mill.org"),
        ("https://ann@mill.org#top", "mill.org"),
        ("https://www2.mill.org", "www2.mill.org"),
        ("mill.org/wheel", None),
    ],
)
def test_site_of_an_address(address: str, site: str | None) -> None:
    assert pc.extract_regex(pa.array([address]), SITE).to_pylist() == [
        None if site is None else {"host": site}
    ]
    sql = f"SELECT regexp_extract(?, '{SITE}', 1)"
    assert duckdb.execute(sql, [address]).fetchone() == (site or "",)
