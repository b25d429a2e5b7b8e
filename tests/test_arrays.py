"""Arrow without pandas, in processes that do not convert to it."""

from __future__ import annotations

import subprocess
import sys

from tests.test_architecture import ROOT

CONVERSIONS = """
import sys
import pyarrow as pa
from gristmill.core.arrays import admit_pandas, avoid_pandas

if sys.argv[1:]:
    avoid_pandas()
pa.array(["a"])
loaded = "pandas" in sys.modules
import pandas as pd

column = pd.Series([1.0, float("nan")])
print(loaded, pa.array(column, from_pandas=True).null_count, end=" ")
if "admit" in sys.argv:
    admit_pandas()
else:
    print(pa.table({"x": [1]}).to_pandas()["x"].sum(), end=" ")
print(pa.array(column).null_count)
"""


def convert(*arguments: str) -> list[str]:
    """Run the conversions in a process of their own."""
    return subprocess.run(
        [sys.executable, "-c", CONVERSIONS, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout.split()


def test_arrow_loads_pandas_only_to_convert_to_it() -> None:
    assert convert("avoid") == ["False", "1", "1", "1"]
    assert convert() == ["True", "1", "1", "1"]


def test_arrow_knows_the_pandas_of_a_user() -> None:
    assert convert("avoid", "admit") == ["False", "1", "1"]
